//! The sum on the CPU: tokens in parallel.

use std::cell::RefCell;

use abi::DType;
use abi::exact::sigmoid;
use abi::ops::moe_combine::MoeCombineDims;
use half::{bf16, f16};

use super::{MoeCombineArgs, MoeCombineProblem};
use crate::ops::Store;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;

thread_local! {
    /// The sums of a row.
    static SUMS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

pub(super) fn run(problem: MoeCombineProblem, dims: &MoeCombineDims, args: &mut MoeCombineArgs<'_>) {
    match problem.dtype {
        DType::F16 => tokens::<f16>(problem, dims, args),
        DType::BF16 => tokens::<bf16>(problem, dims, args),
        _ => tokens::<f32>(problem, dims, args),
    }
}

fn tokens<T: FloatElement>(problem: MoeCombineProblem, dims: &MoeCombineDims, args: &mut MoeCombineArgs<'_>) {
    let (tokens, top_k, cols) = (dims.tiles.rows as usize, problem.top_k, problem.cols);
    if cols == 0 {
        return;
    }
    let (y, weights, positions) =
        (args.y.host_slice::<T>(), args.weights.host_slice::<f32>(), args.positions.host_slice::<u32>());
    let shared = args.shared.as_ref().map(|shared| shared.host_slice::<T>());
    let gate = args.gate.as_ref().map(|gate| gate.host_slice::<f32>());
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    for_rows(tokens, tokens * cols * (top_k + 1), |token| {
        SUMS.with_borrow_mut(|sums| {
            sums.clear();
            sums.resize(cols, 0.0);
            let mut add = |weight: f32, row: &[T]| {
                for (sum, value) in std::iter::zip(&mut *sums, row) {
                    *sum += weight * value.to_f32();
                }
            };
            let pairs = token * top_k..(token + 1) * top_k;
            for (&weight, &position) in std::iter::zip(&weights[pairs.clone()], &positions[pairs]) {
                if position < dims.y_rows {
                    add(weight, &y[position as usize * dims.y_stride as usize..][..cols]);
                }
            }
            if let Some(shared) = shared {
                let weight = gate.map_or(1.0, |gate| sigmoid(gate[token * dims.gate_stride as usize]));
                add(weight, &shared[token * dims.shared_stride as usize..][..cols]);
            }
            // SAFETY: the rows of a view that is written do not overlap.
            let out = unsafe { out.part(token * dims.out_stride as usize, cols) };
            for (out, &sum) in std::iter::zip(out, &*sums) {
                *out = T::from_f32(if problem.store == Store::Add { sum + out.to_f32() } else { sum });
            }
        });
    });
}
