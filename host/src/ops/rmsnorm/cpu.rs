//! RMSNorm on the CPU: rows in parallel.

use abi::DType;
use abi::ops::rmsnorm::RmsNormDims;
use abi::range;
use half::{bf16, f16};

use super::RmsNormArgs;
use crate::ops::glu;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;

pub(super) fn run(dtype: DType, dims: &RmsNormDims, args: &mut RmsNormArgs<'_>) {
    match dtype {
        DType::F16 => rows::<f16>(dims, args),
        DType::BF16 => rows::<bf16>(dims, args),
        _ => rows::<f32>(dims, args),
    }
}

fn rows<T: FloatElement>(dims: &RmsNormDims, args: &mut RmsNormArgs<'_>) {
    let (rows, cols, heads) = (dims.rows as usize, dims.cols as usize, dims.heads as usize);
    let (x, weight) = (args.x.host_slice::<T>(), args.weight.host_slice::<T>());
    let gate = args.gate.as_ref().map(|gate| gate.host_slice::<T>());
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    let residual = args.residual.as_mut().map(|residual| SharedSlice::new(residual.host_slice_mut::<T>()));
    let offset = |row: usize, token_stride: u32, head_stride: u32| {
        row / heads * token_stride as usize + row % heads * head_stride as usize
    };
    for_rows(rows, rows * cols, |row| {
        let x = &x[offset(row, dims.x_token_stride, dims.x_head_stride)..][..cols];
        // SAFETY: rows do not overlap within a view that is written (distinct rows have distinct elements).
        let out = unsafe { out.part(offset(row, dims.out_token_stride, dims.out_head_stride), cols) };
        let gate =
            gate.map(|gate| &gate[offset(row, dims.gate_token_stride, dims.gate_head_stride)..][..cols]);
        let mut row_of = |h: &dyn Fn(usize) -> f32| {
            let (factor, mean) = range::mean_of_squares((0..cols).map(h), dims.inv_cols, dims.eps);
            let scale = 1.0 / mean.sqrt();
            for col in 0..cols {
                let normed = h(col) * factor * scale * (weight[col].to_f32() + dims.weight_offset);
                out[col] = T::from_f32(gate.map_or(normed, |gate| normed * glu::silu(gate[col].to_f32())));
            }
        };
        match residual {
            None => row_of(&|col| x[col].to_f32()),
            Some(residual) => {
                let start = offset(row, dims.residual_token_stride, dims.residual_head_stride);
                // SAFETY: as for out.
                let sum = unsafe { residual.part(start, cols) };
                for col in 0..cols {
                    sum[col] = T::from_f32(sum[col].to_f32() + x[col].to_f32());
                }
                row_of(&|col| sum[col].to_f32());
            }
        }
    });
}
