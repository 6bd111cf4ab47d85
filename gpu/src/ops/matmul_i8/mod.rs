//! Matrix product of int8 operands: `out = f32(qa · qbᵀ) · sa · sb + bias`, and the quantisation of rows.
//!
//! The kernels are those of [`crate::tile::gemv`] and [`crate::tile::simt`] with four int8 in the place of an f32 and
//! `dp4a` in the place of the multiply-add, so their sums are exact. What follows a sum is the same in all of them, step
//! for step, hence the same bits: `scaled`.

pub mod quantize;

use abi::ops::matmul::MatmulDims;
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel};

use crate::tile::{gemv, simt};

/// An exact sum, scaled; every step is rounded, none is fused.
#[inline(always)]
fn scaled(sum: i32, row_scale: f32, col_scale: f32) -> f32 {
    sum as f32 * row_scale * col_scale
}

/// One tile of the product.
///
/// # Safety
/// - *converged*: all threads of the block; tensors *in-bounds* for `dims` — checked in `MatmulI8::run`.
#[inline(always)]
unsafe fn tile<O: Element, const EDGE: u32, const PER: usize>(
    a: *const i8,
    b: *const i8,
    a_scale: *const f32,
    b_scale: *const f32,
    bias: *const O,
    out: *mut O,
    dims: &MatmulDims,
) {
    let (tile_m, tile_n) = simt::tile_of_block::<EDGE>(dims);
    // SAFETY: the caller's promise; every element of out belongs to one thread of one block.
    unsafe {
        let sums = simt::multiply::<i8, EDGE, PER>(
            simt::strided(a, dims),
            simt::rows_of_b(b, dims),
            dims,
            tile_m,
            tile_n,
        );
        simt::for_quads::<i32, _, EDGE, PER>(
            &sums,
            dims,
            tile_m,
            tile_n,
            |_| (),
            |row, col, sums, ()| {
                let row_scale = global::load(a_scale.add(row as usize));
                let col_scales = simt::load_quad(b_scale, col, dims.n);
                let mut values = [0.0; 4];
                let mut i = 0;
                while i < 4 {
                    values[i] = scaled(sums[i], row_scale, col_scales[i]);
                    i += 1;
                }
                if !bias.is_null() {
                    let bias = simt::load_quad(bias, col, dims.n);
                    let mut i = 0;
                    while i < 4 {
                        values[i] += bias[i];
                        i += 1;
                    }
                }
                simt::store_quad(out, row, col, values, dims);
            },
        );
    }
}

/// Some columns of the product for up to `ROWS` rows.
///
/// # Safety
/// - *converged*: all threads of the block; tensors *in-bounds* for `dims` — checked in `MatmulI8::run`.
#[inline(always)]
unsafe fn few_rows<
    O: Element,
    const ROWS: usize,
    const COLS: usize,
    const SUMS: usize,
    const UNROLL: usize,
>(
    a: *const i8,
    b: *const i8,
    a_scale: *const f32,
    b_scale: *const f32,
    bias: *const O,
    out: *mut O,
    dims: &MatmulDims,
) {
    // SAFETY: the caller's promise; every element of out is finished once.
    unsafe {
        gemv::multiply::<i8, ROWS, COLS, SUMS, UNROLL>(
            simt::strided(a, dims),
            simt::rows_of_b(b, dims),
            dims,
            gemv::place_of_block::<ROWS>(dims),
            false,
            |row, col, [sum, _]| {
                let row_scale = global::load(a_scale.add(row as usize));
                let mut value = scaled(sum, row_scale, global::load(b_scale.add(col as usize)));
                if !bias.is_null() {
                    value += global::load(bias.add(col as usize)).to_f32();
                }
                let to = out.add(row as usize * dims.out_stride as usize + col as usize);
                global::store(to, O::from_f32(value));
            },
        );
    }
}

macro_rules! body {
    (Simt, $out:ident, $args:tt, $bm:literal, $bn:literal, $bk:literal) => {
        // SAFETY: blocks of 256 threads, a block per tile, shared memory for both buffers — MatmulI8::run.
        unsafe { tile::<$out, $bm, { $bm / 16 }> $args }
    };
    (Gemv, $out:ident, $args:tt, $rows:literal, $cols:literal, $unroll:literal) => {
        // SAFETY: blocks of 256 threads, a block per rows and columns — MatmulI8::run.
        unsafe { few_rows::<$out, $rows, $cols, { $rows * $cols }, $unroll> $args }
    };
}

macro_rules! entries {
    ($($entry:ident => $out:ident, $out_dtype:ident, $floor:ident,
       $tile:ident { $($field:ident: $value:literal),* };)*) => {$(
        /// Entry point; see the module and `abi::ops::matmul_i8`.
        ///
        /// # Safety
        /// - Arguments as `MatmulI8::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 2)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            a: *const i8,
            b: *const i8,
            a_scale: *const f32,
            b_scale: *const f32,
            bias: *const $out,
            out: *mut $out,
            dims: MatmulDims,
        ) {
            body!($tile, $out, (a, b, a_scale, b_scale, bias, out, &dims), $($value),*)
        }
    )*};
}
abi::matmul_i8_table!(entries);
