//! Matrix product of int8 operands: `out = f32(qa · qbᵀ) · sa · sb + bias`, and the quantisation of rows.
//!
//! | kernels | for | by |
//! |---|---|---|
//! | `Gemv`, `Simt` | few rows; what is not aligned | `dp4a`: [`few_rows_simt`] and [`simt`], of four int8 as an f32 |
//! | `Mma` | from 17 rows on, from sm_80 on | `mma.sync` m16n8k32: `matmul::mma_sync`, whose stages hold bytes |
//! | `Wgmma` | from 17 rows on, sm_90a | `wgmma` k32: `matmul::wgmma` |
//! | `Split` | 17 to 128 rows and few columns, sm_90a | the same, k shared by a cluster: `matmul::split_k_wgmma` |
//!
//! [`few_rows_simt`]: crate::matmul::few_rows_simt
//! [`simt`]: crate::matmul::simt
//!
//! [`few_rows_simt`]: crate::matmul::few_rows_simt
//! [`simt`]: crate::matmul::simt
//!
//! Sums are exact. What follows a sum is the same in all of them, step for step, hence the same bits: `scaled`.
//!
//! What was measured: `gpu/NOTES/matmul_i8.md`; of 17 to 128 rows see `matmul::split_k_wgmma`.

pub mod quantize;

use abi::ops::matmul::{MatmulDims, NEXT_MAY_START};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, grid, kernel, warp};

#[cfg(not(lacks_wgmma))]
use crate::matmul::epilogue::{Epilogue, PLAIN};
#[cfg(not(lacks_mma_sync))]
use crate::matmul::mma_sync;
use crate::matmul::{early, few_rows_simt, simt};
#[cfg(not(lacks_wgmma))]
use crate::matmul::{early::Weights, split_k_wgmma, wgmma, wgmma_consumers};

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
    let (tile_m, tile_n) = simt::tile_of_block::<EDGE, EDGE>(dims);
    // SAFETY: the caller's promise; every element of out belongs to one thread of one block.
    unsafe {
        grid::begin();
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
        let place = few_rows_simt::place_of_block::<ROWS>(dims);
        let next_may_start = dims.access & NEXT_MAY_START != 0;
        early::begin(
            simt::rows_of_b(b, dims),
            dims,
            place.1,
            COLS as u32,
            few_rows_simt::EARLY_BYTES,
            next_may_start,
        );
        few_rows_simt::multiply::<i8, ROWS, COLS, SUMS, UNROLL>(
            simt::strided(a, dims),
            simt::rows_of_b(b, dims),
            dims,
            place,
            false,
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
        #[kernel(max_threads = 256, min_blocks = 2, waits)]
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

/// One tile on Ampere's tensor cores.
///
/// # Safety
/// - *converged*: all threads of the block; tensors *in-bounds* for `dims`, rows of a and b aligned to 16 bytes —
///   checked in `MatmulI8::run`.
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn tensor_tile<
    O: Element,
    const BM: u32,
    const BN: u32,
    const FM: usize,
    const FN: usize,
    const COUNT_A: usize,
    const COUNT_B: usize,
    const THREADS: u32,
>(
    a: *const i8,
    b: *const i8,
    a_scale: *const f32,
    b_scale: *const f32,
    bias: *const O,
    out: *mut O,
    dims: &MatmulDims,
) {
    let (tile_m, tile_n) = simt::tile_of_block::<BM, BN>(dims);
    let (row, col) = (tile_m * BM, tile_n * BN);
    // SAFETY: the caller's promise; every element of out belongs to one thread of one block.
    unsafe {
        let sums = mma_sync::sums::<i8, BM, BN, FM, FN, COUNT_A, COUNT_B, THREADS>(
            mma_sync::strided::<i8, THREADS>(simt::strided(a, dims), (dims.a_stride, 0), row),
            mma_sync::strided::<i8, THREADS>(simt::rows_of_b(b, dims), (dims.b_stride, 0), col),
            (row, col),
            dims,
            false,
        );
        let of_columns = |col: u32| {
            let scales = [simt::load_quad(b_scale, col, dims.n), simt::load_quad(b_scale, col + 4, dims.n)];
            let has_bias = !bias.is_null();
            let bias = || [simt::load_quad(bias, col, dims.n), simt::load_quad(bias, col + 4, dims.n)];
            (scales, has_bias.then(bias))
        };
        sums.for_octets(dims, of_columns, |row, col, sums, (scales, bias)| {
            let row_scale = global::load(a_scale.add(row as usize));
            let mut values = [0.0; 8];
            let mut i = 0;
            while i < 8 {
                values[i] = scaled(sums[i], row_scale, scales[i / 4][i % 4]);
                if let Some(bias) = bias {
                    values[i] += bias[i / 4][i % 4];
                }
                i += 1;
            }
            simt::store_octet(out, row, col, &values, dims);
        });
    }
}

#[cfg(not(lacks_mma_sync))]
macro_rules! mma_entries {
    ($($entry:ident => $out:ident, $out_dtype:ident, $floor:ident,
       Mma { bm: $bm:literal, bn: $bn:literal, threads: $threads:literal, blocks: $blocks:literal };)*) => {$(
        /// Entry point; see the module and `abi::ops::matmul_i8`.
        ///
        /// # Safety
        /// - Arguments as `MatmulI8::run` checks them.
        #[kernel(max_threads = $threads, min_blocks = $blocks)]
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
            const EDGE: usize = mma_sync::warp_edge($bm, $bn, $threads);
            // SAFETY: blocks of the tile's threads, a block per tile, its shared memory — MatmulI8::run.
            unsafe {
                tensor_tile::<
                    $out,
                    $bm,
                    $bn,
                    { EDGE / 16 },
                    { EDGE / 8 },
                    { $bm * 4 / $threads },
                    { $bn * 4 / $threads },
                    $threads,
                >(a, b, a_scale, b_scale, bias, out, &dims)
            }
        }
    )*};
}
#[cfg(not(lacks_mma_sync))]
abi::matmul_i8_mma_table!(mma_entries);

/// What becomes of a consumer's sums on Hopper.
#[cfg(not(lacks_wgmma))]
struct Scaled<'a, O> {
    a_scale: *const f32,
    b_scale: *const f32,
    end: Epilogue<'a, O, O>,
}

#[cfg(not(lacks_wgmma))]
impl<O: Element, const SUMS: usize> wgmma_consumers::Results<i32, SUMS> for Scaled<'_, O> {
    // As `scaled`, and the bias, step by step over all of them.
    #[inline(always)]
    unsafe fn make(&self, sums: &mut [i32; SUMS], place: &wgmma_consumers::Place) {
        let (row, _) = place.of_register();
        let row = place.row + row;
        let scale = |scales: *const f32, at: u32, len: u32| {
            // SAFETY: below the scales' number — the caller.
            if at < len { unsafe { global::load(scales.add(at as usize)) } } else { 0.0 }
        };
        let dims = self.end.dims;
        let rows = [scale(self.a_scale, row, dims.m), scale(self.a_scale, row + 8, dims.m)];
        let mut i = 0;
        while i < SUMS {
            sums[i] = (sums[i] as f32 * rows[i / 2 % 2]).to_bits() as i32;
            i += 1;
        }
        // SAFETY: the warp is converged, columns beyond n are not looked up — the caller.
        unsafe {
            let scales = |col| scale(self.b_scale, col, dims.n);
            for_columns(sums, place, scales, |value, scale| value * scale);
            if self.end.has_bias() {
                for_columns(sums, place, |col| self.end.bias_of(col), |value, bias| value + bias);
            }
        }
    }
}

/// Combines the elements of out with what `of_column` says of their columns. A warp asks for each column once, a lane
/// for every 32nd, and hands them around: asked for by every thread, 64 of them would be in its registers at a time,
/// beside the sums.
///
/// # Safety
/// - *converged*: the whole warp.
#[cfg(not(lacks_wgmma))]
#[inline(always)]
unsafe fn for_columns<const SUMS: usize>(
    sums: &mut [i32; SUMS],
    place: &wgmma_consumers::Place,
    of_column: impl Fn(u32) -> f32,
    combine: impl Fn(f32, f32) -> f32,
) {
    const { assert!(SUMS <= 128) };
    let lane = place.member % 32;
    let mut columns = [0u32; 8];
    let mut i = 0;
    while i < SUMS.div_ceil(16) {
        columns[i] = of_column(place.col + lane + 32 * i as u32).to_bits();
        i += 1;
    }
    // Registers i and i + 2 are of one column: the (8 · (i / 4) + i % 2)-th behind the thread's first.
    let (_, first) = place.of_register();
    let mut i = 0;
    while i < SUMS {
        let from = first + (8 * (i / 4 % 4) + i % 2) as u32;
        // SAFETY: the caller's promise.
        let column = f32::from_bits(unsafe { warp::shuffle_idx(warp::FULL_MASK, columns[i / 16], from) });
        sums[i] = combine(f32::from_bits(sums[i] as u32), column).to_bits() as i32;
        sums[i + 2] = combine(f32::from_bits(sums[i + 2] as u32), column).to_bits() as i32;
        i += if i % 4 == 0 { 1 } else { 3 };
    }
}

#[cfg(not(lacks_wgmma))]
macro_rules! wgmma_body {
    (Wgmma, $out:ident, $maps:ident, $end:ident, $results:ident, $bm:literal, $bn:literal, $stages:literal, $cluster:literal, $shares_a:literal) => {
        wgmma::multiply::<i8, i32, $out, $out, $bm, $bn, { $bn / 2 }, $stages, $cluster, $shares_a>(
            wgmma::Ends { a: $maps.a, out: $maps.out },
            wgmma::Plain { maps: $maps, gated: false, promotes: false },
            $end,
            $results,
        )
    };
    (Split, $out:ident, $maps:ident, $end:ident, $results:ident, $bn:literal, $stages:literal, $cluster:literal) => {
        split_k_wgmma::multiply::<i8, i32, $out, $out, { $bn / 2 }, { $bn / 2 / $cluster }, $stages, $cluster>(
            $maps, $end, false, $results,
        )
    };
}

#[cfg(not(lacks_wgmma))]
macro_rules! wgmma_entries {
    ($($entry:ident => $out:ident, $out_dtype:ident, $floor:ident,
       $tile:ident { threads: $threads:literal, $($field:ident: $value:literal),* };)*) => {$(
        /// Entry point; see the module and `abi::ops::matmul_i8`.
        ///
        /// # Safety
        /// - Arguments as `MatmulI8::run` checks them.
        #[kernel(max_threads = $threads, min_blocks = 1, waits)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            dims: MatmulDims,
            #[grid_constant] a: cuda_std::tma::TensorMap,
            #[grid_constant] b: cuda_std::tma::TensorMap,
            #[grid_constant] out_map: cuda_std::tma::TensorMap,
            a_scale: *const f32,
            b_scale: *const f32,
            bias: *const $out,
            out: *mut $out,
            b_at: *const i8,
        ) {
            let weights = Weights { b: b_at, up: b_at };
            let maps = wgmma::Maps { a, b, up: b, out: out_map, weights };
            let end = Epilogue::new(bias, core::ptr::null(), out, &dims, &PLAIN);
            let results = Scaled { a_scale, b_scale, end };
            // SAFETY: threads, clusters and shared memory of the tile; scales of the rows and columns — MatmulI8::run.
            unsafe { wgmma_body!($tile, $out, maps, end, results, $($value),*) }
        }
    )*};
}
#[cfg(not(lacks_wgmma))]
abi::matmul_i8_wgmma_table!(wgmma_entries);
