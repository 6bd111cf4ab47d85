//! LayerNorm on the CPU: rows in parallel.

use abi::DType;
use abi::ops::layernorm::LayerNormDims;
use abi::range;
use half::{bf16, f16};

use super::LayerNormArgs;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;

pub(super) fn run(dtype: DType, dims: &LayerNormDims, args: &mut LayerNormArgs<'_>) {
    match dtype {
        DType::F16 => rows::<f16>(dims, args),
        DType::BF16 => rows::<bf16>(dims, args),
        _ => rows::<f32>(dims, args),
    }
}

fn rows<T: FloatElement>(dims: &LayerNormDims, args: &mut LayerNormArgs<'_>) {
    let (rows, cols) = (dims.rows as usize, dims.cols as usize);
    if rows == 0 {
        return;
    }
    let (x, weight, bias) =
        (args.x.host_slice::<T>(), args.weight.host_slice::<T>(), args.bias.host_slice::<T>());
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    let residual = args.residual.as_mut().map(|residual| SharedSlice::new(residual.host_slice_mut::<T>()));
    for_rows(rows, rows * cols, |row| {
        let x = &x[row * dims.x_stride as usize..][..cols];
        // SAFETY: the rows of a view that is written do not overlap.
        let out = unsafe { out.part(row * dims.out_stride as usize, cols) };
        let h: &[T] = match residual {
            None => x,
            Some(residual) => {
                // SAFETY: as for out.
                let sum = unsafe { residual.part(row * dims.residual_stride as usize, cols) };
                for (sum, x) in sum.iter_mut().zip(x) {
                    *sum = T::from_f32(sum.to_f32() + x.to_f32());
                }
                sum
            }
        };
        let moments = |factor: f32| {
            let mean = sum(h, |h| h * factor) * dims.inv_cols;
            // What rounding has left of the mean in the differences, as in the kernels.
            let rest = sum(h, |h| h * factor - mean) * dims.inv_cols;
            let square = sum(h, |h| (h * factor - mean).powi(2));
            let variance = (square * dims.inv_cols - rest * rest).max(0.0);
            (mean, rest, square, variance + range::epsilon(dims.eps, factor))
        };
        let (mut mean, mut rest, square, mut variance) = moments(1.0);
        let factor = range::factor_of_differences(square, mean, variance);
        if factor != 1.0 {
            (mean, rest, _, variance) = moments(factor);
        }
        let scale = 1.0 / variance.sqrt();
        for col in 0..cols {
            let normed = (h[col].to_f32() * factor - mean - rest) * scale;
            out[col] = T::from_f32(normed * weight[col].to_f32() + bias[col].to_f32());
        }
    });
}

/// The sum over a row, in 32 parts that are added up at the end, as a warp's lanes would: one after the other the
/// roundings of a long row would outweigh what is to be corrected.
fn sum<T: FloatElement>(row: &[T], term: impl Fn(f32) -> f32) -> f32 {
    let mut parts = [0.0; 32];
    for values in row.chunks(parts.len()) {
        for (part, value) in parts.iter_mut().zip(values) {
            *part += term(value.to_f32());
        }
    }
    parts.iter().sum()
}
