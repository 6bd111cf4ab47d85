//! Weighted sums of table rows on the CPU: tokens in parallel.

use abi::DType;
use half::{bf16, f16};

use super::{EmbeddingBagArgs, EmbeddingBagProblem};
use crate::ops::Store;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;

pub(super) fn run(problem: &EmbeddingBagProblem, args: &mut EmbeddingBagArgs<'_>) {
    match problem.dtype {
        DType::F16 => tokens::<f16>(problem, args),
        DType::BF16 => tokens::<bf16>(problem, args),
        _ => tokens::<f32>(problem, args),
    }
}

fn tokens<T: FloatElement>(problem: &EmbeddingBagProblem, args: &mut EmbeddingBagArgs<'_>) {
    let EmbeddingBagProblem { bag, vocab, cols, store, .. } = *problem;
    if args.out.is_empty() {
        return;
    }
    let (tokens, table_stride, out_stride) =
        (args.out.shape()[0], args.table.strides()[0], args.out.strides()[0]);
    let (table, ids, weights) =
        (args.table.host_slice::<T>(), args.ids.host_slice::<u32>(), args.weights.host_slice::<f32>());
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    for_rows(tokens, tokens * bag * cols, |token| {
        // SAFETY: the rows of a view that is written do not overlap.
        let out = unsafe { out.part(token * out_stride, cols) };
        let mut sums: Vec<f32> = match store {
            Store::Replace => vec![0.0; cols],
            Store::Add => out.iter().map(|out| out.to_f32()).collect(),
        };
        for entry in token * bag..(token + 1) * bag {
            let id = ids[entry] as usize;
            if id >= vocab {
                sums.fill(f32::NAN);
                break;
            }
            for (sum, value) in sums.iter_mut().zip(&table[id * table_stride..][..cols]) {
                *sum += weights[entry] * value.to_f32();
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = T::from_f32(sum);
        }
    });
}
