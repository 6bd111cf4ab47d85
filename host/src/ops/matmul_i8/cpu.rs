//! The int8 product and the quantisation on the CPU.

use abi::DType;
use abi::ops::matmul::MatmulDims;
use abi::ops::matmul_i8::QuantizeRowsDims;
use half::{bf16, f16};

use super::{MatmulI8Args, QuantizeRowsArgs};
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;

/// Rows and columns that a thread takes at a time: of either operand a tile's rows stay in its cache.
const TILE_ROWS: usize = 64;
const TILE_COLS: usize = 32;

pub(super) fn run(out_dtype: DType, dims: &MatmulDims, args: &mut MatmulI8Args<'_>) {
    match out_dtype {
        DType::F16 => product::<f16>(dims, args),
        DType::BF16 => product::<bf16>(dims, args),
        _ => product::<f32>(dims, args),
    }
}

fn product<O: FloatElement>(dims: &MatmulDims, args: &mut MatmulI8Args<'_>) {
    let [m, n, k] = [dims.m, dims.n, dims.k].map(|size| size as usize);
    let (a, b) = (args.qa.host_slice::<i8>(), args.qb.host_slice::<i8>());
    let (a_scale, b_scale) = (args.a_scale.host_slice::<f32>(), args.b_scale.host_slice::<f32>());
    let bias = args.bias.as_ref().map(|bias| bias.host_slice::<O>());
    let out = SharedSlice::new(args.out.host_slice_mut::<O>());
    let tile_rows = m.div_ceil(TILE_ROWS);
    for_rows(tile_rows * n.div_ceil(TILE_COLS), m * n * k.max(1), |tile| {
        let (first_row, first_col) = (tile % tile_rows * TILE_ROWS, tile / tile_rows * TILE_COLS);
        let cols = TILE_COLS.min(n - first_col);
        for row in first_row..m.min(first_row + TILE_ROWS) {
            // SAFETY: rows do not overlap (MatmulI8::run), and tiles do not.
            let out = unsafe { out.part(row * dims.out_stride as usize + first_col, cols) };
            for (col, out) in (first_col..).zip(out) {
                let a = &a[row * dims.a_stride as usize..][..k];
                let sum = dot(a, &b[col * dims.b_stride as usize..][..k]);
                let value = sum as f32 * a_scale[row] * b_scale[col];
                *out = O::from_f32(bias.map_or(value, |bias| value + bias[col].to_f32()));
            }
        }
    });
}

fn dot(a: &[i8], b: &[i8]) -> i32 {
    // 16-bit products of 8-bit values are exact, and there are instructions that add pairs of them.
    std::iter::zip(a, b).map(|(&a, &b)| i32::from(i16::from(a) * i16::from(b))).sum()
}

pub(super) fn quantize(dtype: DType, rows: usize, dims: &QuantizeRowsDims, args: &mut QuantizeRowsArgs<'_>) {
    match dtype {
        DType::F16 => quantize_rows::<f16>(rows, dims, args),
        DType::BF16 => quantize_rows::<bf16>(rows, dims, args),
        _ => quantize_rows::<f32>(rows, dims, args),
    }
}

fn quantize_rows<T: FloatElement>(rows: usize, dims: &QuantizeRowsDims, args: &mut QuantizeRowsArgs<'_>) {
    let cols = dims.cols as usize;
    let x = args.x.host_slice::<T>();
    let q = SharedSlice::new(args.q.host_slice_mut::<i8>());
    let scale = SharedSlice::new(args.scale.host_slice_mut::<f32>());
    for_rows(rows, rows * cols, |row| {
        let x = &x[row * dims.x_stride as usize..][..cols];
        // SAFETY: rows do not overlap (QuantizeRows::run), and each is one call's.
        let (q, scale) = unsafe { (q.part(row * dims.q_stride as usize, cols), scale.part(row, 1)) };
        // Magnitudes as integers have the order of the values, NaN at the top.
        let most = x.iter().map(|value| value.to_f32().to_bits() & 0x7fff_ffff).max().unwrap_or(0);
        scale[0] = f32::from_bits(most) / 127.0;
        for (q, value) in std::iter::zip(q, x) {
            // `as` saturates, and takes NaN to 0.
            *q = if scale[0] == 0.0 { 0 } else { (value.to_f32() / scale[0]).round_ties_even() as i8 };
        }
    });
}
