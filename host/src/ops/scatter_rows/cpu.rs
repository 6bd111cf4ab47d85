//! Rows into places that are named by number, on the CPU: one after the other.

use abi::DType;
use half::{bf16, f16};

use super::{ScatterRowsArgs, ScatterRowsProblem};
use crate::ops::Store;
use crate::tensor::FloatElement;

pub(super) fn run(problem: &ScatterRowsProblem, args: &mut ScatterRowsArgs<'_>) {
    match problem.dtype {
        DType::F16 => rows::<f16>(problem, args),
        DType::BF16 => rows::<bf16>(problem, args),
        _ => rows::<f32>(problem, args),
    }
}

fn rows<T: FloatElement>(problem: &ScatterRowsProblem, args: &mut ScatterRowsArgs<'_>) {
    let cols = problem.cols;
    let (num_rows, x_stride, out_stride) = (args.out.shape()[0], args.x.strides()[0], args.out.strides()[0]);
    if args.x.is_empty() || args.out.is_empty() {
        return;
    }
    let (x, ids, out) =
        (args.x.host_slice::<T>(), args.ids.host_slice::<u32>(), args.out.host_slice_mut::<T>());
    for (row, &id) in ids.iter().enumerate().filter(|&(_, &id)| (id as usize) < num_rows) {
        let x = &x[row * x_stride..][..cols];
        let out = &mut out[id as usize * out_stride..][..cols];
        match problem.store {
            Store::Replace => out.copy_from_slice(x),
            Store::Add => {
                for (out, x) in out.iter_mut().zip(x) {
                    *out = T::from_f32(out.to_f32() + x.to_f32());
                }
            }
        }
    }
}
