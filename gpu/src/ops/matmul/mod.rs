//! Matrix product with a transposed right operand: `out = act(scale · a · bᵀ + bias) + residual`, or gated.
//!
//! | kernels | for | work split |
//! |---|---|---|
//! | `Gemv` | few rows | a warp per group of columns, or several that share k: [`crate::matmul::few_rows_simt`] |
//! | `Ahead` | one row, constant b, from sm_90a on | the same by two columns: `matmul::few_rows_ahead` |
//! | `Simt` | many rows | a block per 64 × 64 or 128 × 128: [`crate::matmul::simt`] |
//! | `Mma` | many rows, from sm_80 on | a block per 64 × 64 to 128 × 256: `matmul::mma_sync` |
//! | `Stream` | few rows, from sm_80 on | a warp, or several that share k, per 16 columns: `matmul::few_rows_mma` |
//! | `StreamNormed` | few rows that are normed, from sm_80 on | as `Stream` |
//! | `Wgmma` | many rows, from sm_90a on | persistent blocks, 64 × 64 to 128 × 256: `matmul::wgmma` |
//! | `Split` | up to 128 rows and few columns, from sm_90a on | a cluster per tile shares k: `matmul::split_k_wgmma` |
//! | `Swapped` | dozens to hundreds of rows, from sm_90a on | a block or a cluster per tile: `matmul::swapped_wgmma` |
//! | fp8 | many rows that are made fp8, packed fp8 weights | persistent blocks, 128 × 128 to 192 × 128: `matmul::fp8` |
//! | `Packed` | packed weights | a warp, or several that share k, per 16 columns: `packed` and the files beside it |
//! | `PermuteColumns` | rows before weights whose columns are in another order | a thread per 8 columns: `permute` |
//!
//! The first two multiply in f32 whatever the type in memory: operands are widened on their way into shared memory or
//! registers, sums are f32, and out is rounded once, behind all of the [`crate::matmul::epilogue`]. Of several products
//! of the same size each has a layer of blocks.

mod packed;
#[cfg(not(lacks_dependent_launch))]
mod packed_ahead;
#[cfg(not(lacks_wgmma))]
mod packed_wgmma;
mod permute;
mod unpack;

#[cfg(not(lacks_mma_sync))]
use abi::ops::matmul::MatmulNorm;
use abi::ops::matmul::{MatmulDims, MatmulEpilogue, NEXT_MAY_START};
#[cfg(not(lacks_wgmma))]
use abi::weight::WeightDims;
#[cfg(not(lacks_wgmma))]
use cuda_std::cvt::E4m3;
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{grid, kernel, thread};

use crate::matmul::epilogue::{Epilogue, rows_of_b};
#[cfg(not(lacks_dependent_launch))]
use crate::matmul::few_rows_ahead::{self, Row};
use crate::matmul::operand::Operand;
use crate::matmul::{early, few_rows_simt, simt};
#[cfg(not(lacks_wgmma))]
use crate::matmul::{early::Weights, fp8, split_k_wgmma, swapped_wgmma, wgmma};
#[cfg(not(lacks_mma_sync))]
use crate::matmul::{few_rows_mma, mma_sync, row_scale::RowScale};

/// Where this block's product finds its operands.
#[derive(Clone, Copy)]
struct Operands<'a, T> {
    a: *const T,
    b: *const T,
    /// If the product is gated, the rows of up, and b those of the gate.
    up: *const T,
    dims: &'a MatmulDims,
    how: &'a MatmulEpilogue,
}

impl<'a, T> Operands<'a, T> {
    /// Given those of the first product.
    #[inline(always)]
    fn new(a: *const T, b: *const T, up: *const T, dims: &'a MatmulDims, how: &'a MatmulEpilogue) -> Self {
        let product = thread::block_idx_z() as usize;
        let b_start = product * dims.b_batch_stride as usize;
        let a = a.wrapping_add(product * dims.a_batch_stride as usize);
        Operands { a, b: b.wrapping_add(b_start), up: up.wrapping_add(b_start), dims, how }
    }

    /// Where the rows of b begin, as tiles see them.
    #[inline(always)]
    fn b_row(&self) -> impl Fn(u32) -> *const T + use<T> {
        rows_of_b(self.b, self.up, self.dims, self.how)
    }
}

/// One tile of the product.
///
/// # Safety
/// - *converged*: all threads of the block; tensors *in-bounds* for `dims` — checked in `Matmul::run`.
#[inline(always)]
unsafe fn tile<T, O, const EDGE: u32, const PER: usize>(x: Operands<'_, T>, end: Epilogue<'_, T, O>)
where
    T: Operand<Sum = f32> + Element,
    O: Element,
{
    let dims = x.dims;
    let (tile_m, tile_n) = simt::tile_of_block::<EDGE, EDGE>(dims);
    // SAFETY: the caller's promise; every element of out belongs to one thread of one block.
    unsafe {
        grid::begin();
        let sums = simt::multiply::<T, EDGE, PER>(simt::strided(x.a, dims), x.b_row(), dims, tile_m, tile_n);
        let bias = |col| end.bias::<4>(col);
        if end.is_plain() {
            simt::for_quads::<f32, _, EDGE, PER>(
                &sums,
                dims,
                tile_m,
                tile_n,
                bias,
                |row, col, mut sums, bias| {
                    let mut i = 0;
                    while i < 4 {
                        sums[i] += bias[i];
                        i += 1;
                    }
                    simt::store_quad(end.out(), row, col, sums, dims);
                },
            );
        } else {
            simt::loop_over_quads::<_, EDGE, PER>(
                &sums,
                dims,
                tile_m,
                tile_n,
                bias,
                |row, col, sums, bias| {
                    end.quad(row, col, sums, bias);
                },
            );
        }
    }
}

/// Some columns of the product for up to `ROWS` rows.
///
/// # Safety
/// - *converged*: all threads of the block; tensors *in-bounds* for `dims` — checked in `Matmul::run`.
#[inline(always)]
unsafe fn few_rows<T, O, const ROWS: usize, const COLS: usize, const SUMS: usize, const UNROLL: usize>(
    x: Operands<'_, T>,
    end: Epilogue<'_, T, O>,
) where
    T: Operand<Sum = f32> + Element,
    O: Element,
{
    // SAFETY: the caller's promise; every element of out is finished once. Where the product is gated, `select` leaves
    // at least two columns to a block.
    unsafe {
        let place = few_rows_simt::place_of_block::<ROWS>(x.dims);
        let next_may_start = x.dims.access & NEXT_MAY_START != 0;
        early::begin(x.b_row(), x.dims, place.1, COLS as u32, few_rows_simt::EARLY_BYTES, next_may_start);
        few_rows_simt::multiply::<T, ROWS, COLS, SUMS, UNROLL>(
            simt::strided(x.a, x.dims),
            x.b_row(),
            x.dims,
            place,
            end.is_gated(),
            true,
            |row, col, sums| end.element(row, col, sums),
        );
    }
}

macro_rules! body {
    (Simt, $type:ident, $out:ident, $args:tt, $bm:literal, $bn:literal, $bk:literal) => {
        tile::<$type, $out, $bm, { $bm / 16 }> $args
    };
    (Gemv, $type:ident, $out:ident, $args:tt, $rows:literal, $cols:literal, $unroll:literal) => {
        few_rows::<$type, $out, $rows, $cols, { $rows * $cols }, $unroll> $args
    };
}

/// An entry point of blocks that read a and b themselves.
macro_rules! entry {
    ($entry:ident, $type:ident, $out:ident, $threads:literal, $blocks:literal, |$operands:ident, $end:ident| $body:expr) => {
        /// Entry point; see the module and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `Matmul::run` checks them.
        #[kernel(max_threads = $threads, min_blocks = $blocks, waits)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            a: *const $type,
            b: *const $type,
            up: *const $type,
            bias: *const $type,
            residual: *const $out,
            out: *mut $out,
            dims: MatmulDims,
            how: MatmulEpilogue,
        ) {
            let $end = Epilogue::new(bias, residual, out, &dims, &how);
            let $operands = Operands::new(a, b, up, &dims, &how);
            // SAFETY: blocks of the tile's threads, a block per tile or per rows and columns, its shared memory —
            // Matmul::run.
            unsafe { $body }
        }
    };
}

/// The same of a tile. Of one row four blocks have room on a multiprocessor, and their loads are on their way together.
macro_rules! entry_of_tile {
    ($entry:ident, $type:ident, $out:ident, Gemv, 1, $cols:literal, $unroll:literal) => {
        entry!($entry, $type, $out, 256, 4, |x, end| body!(Gemv, $type, $out, (x, end), 1, $cols, $unroll));
    };
    ($entry:ident, $type:ident, $out:ident, $tile:ident, $($value:literal),*) => {
        entry!($entry, $type, $out, 256, 2, |x, end| body!($tile, $type, $out, (x, end), $($value),*));
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $out:ident, $dtype:ident, $out_dtype:ident, $floor:ident,
       $tile:ident { $($field:ident: $value:tt),* };)*) => {
        $(entry_of_tile!($entry, $type, $out, $tile, $($value),*);)*
    };
}
abi::matmul_table!(entries);

#[cfg(not(lacks_dependent_launch))]
macro_rules! ahead_entries {
    ($($entry:ident => $type:ident, $out:ident, $dtype:ident, $out_dtype:ident, $floor:ident,
       Ahead { cols: $cols:literal, unroll: $unroll:literal };)*) => {
        $(
        /// Entry point; see the module and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `Matmul::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 4, waits)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            a: *const $type,
            b: *const $type,
            up: *const $type,
            bias: *const $type,
            residual: *const $out,
            out: *mut $out,
            dims: MatmulDims,
            how: MatmulEpilogue,
            gain: *const $type,
            norm: MatmulNorm,
        ) {
            let end = Epilogue::new(bias, residual, out, &dims, &how);
            let x = Operands::new(a, b, up, &dims, &how);
            // SAFETY: blocks of the tile's threads, a block per columns, its shared memory, constant b and gains, and
            // rows of a length that can be normed — Matmul::run.
            unsafe {
                few_rows_ahead::multiply::<$type, $cols, $unroll, _>(
                    Row { a: x.a, gain, norm: &norm },
                    x.b_row(),
                    x.dims,
                    end.is_gated(),
                    |col| end.residual_of(0, col),
                    |col, sums, residual| end.element_of(0, col, sums, residual),
                )
            }
        })*
    };
}
#[cfg(not(lacks_dependent_launch))]
abi::matmul_ahead_table!(ahead_entries);

#[cfg(not(lacks_mma_sync))]
macro_rules! mma_entries {
    ($($entry:ident => $type:ident, $out:ident, $dtype:ident, $out_dtype:ident, $floor:ident,
       Mma { bm: $bm:literal, bn: $bn:literal, threads: $threads:literal, blocks: $blocks:literal };)*) => {
        $(entry!($entry, $type, $out, $threads, $blocks, |x, end| {
            grid::begin();
            const EDGE: usize = mma_sync::warp_edge($bm, $bn, $threads);
            let (tile_m, tile_n) = simt::tile_of_block::<$bm, $bn>(x.dims);
            let (row, col) = (tile_m * $bm, tile_n * $bn);
            let steps_b = (x.dims.b_stride, u32::from(end.is_gated()));
            mma_sync::multiply::<
                $type,
                $out,
                $bm,
                $bn,
                { EDGE / 16 },
                { EDGE / 8 },
                { $bm * 4 / $threads },
                { $bn * 4 / $threads },
                $threads,
            >(
                mma_sync::strided::<$type, $threads>(simt::strided(x.a, x.dims), (x.dims.a_stride, 0), row),
                mma_sync::strided::<$type, $threads>(x.b_row(), steps_b, col),
                (row, col),
                end,
            )
        });)*
    };
}
#[cfg(not(lacks_mma_sync))]
abi::matmul_mma_table!(mma_entries);

#[cfg(not(lacks_mma_sync))]
macro_rules! stream_entries {
    ($($entry:ident => $type:ident, $out:ident, $dtype:ident, $out_dtype:ident, $floor:ident,
       Stream { rows: $rows:literal, cols: $cols:literal, lanes: $lanes:literal, unroll: $unroll:literal };)*) => {
        $(entry!($entry, $type, $out, 256, 2, |x, end| {
            let place = few_rows_simt::place_of_block::<$rows>(x.dims);
            early::begin(x.b_row(), x.dims, place.1, $cols, few_rows_mma::early_bytes(x.dims), false);
            few_rows_mma::multiply::<
                $type,
                $out,
                $rows,
                $lanes,
                { $rows / 8 },
                { $cols * $lanes / 64 },
                { $cols * $lanes / 32 },
                $unroll,
                false,
            >((simt::strided(x.a, x.dims), RowScale::NONE), x.b_row(), place, end)
        });)*
    };
}
#[cfg(not(lacks_mma_sync))]
abi::matmul_stream_table!(stream_entries);

#[cfg(not(lacks_mma_sync))]
macro_rules! stream_normed_entries {
    ($($entry:ident => $type:ident, $out:ident, $dtype:ident, $out_dtype:ident, $floor:ident,
       StreamNormed { rows: $rows:literal, cols: $cols:literal, unroll: $unroll:literal };)*) => {
        $(
        /// Entry point; see the module and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `Matmul::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 2, waits)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            a: *const $type,
            b: *const $type,
            up: *const $type,
            bias: *const $type,
            residual: *const $out,
            out: *mut $out,
            dims: MatmulDims,
            how: MatmulEpilogue,
            gain: *const $type,
            norm: MatmulNorm,
        ) {
            let end = Epilogue::new(bias, residual, out, &dims, &how);
            let x = Operands::new(a, b, up, &dims, &how);
            let place = few_rows_simt::place_of_block::<$rows>(x.dims);
            // SAFETY: blocks of the tile's threads, a block per columns, its shared memory, and operands and gains in
            // pieces — Matmul::run.
            unsafe {
                early::begin(x.b_row(), x.dims, place.1, $cols, few_rows_mma::early_bytes(x.dims), false);
                few_rows_mma::multiply::<
                    $type,
                    $out,
                    $rows,
                    8,
                    { $rows / 8 },
                    { $cols / 8 },
                    { $cols / 4 },
                    $unroll,
                    true,
                >((simt::strided(x.a, x.dims), RowScale { gain, norm: &norm }), x.b_row(), place, end)
            }
        })*
    };
}
#[cfg(not(lacks_mma_sync))]
abi::matmul_stream_normed_table!(stream_normed_entries);

/// Whether each step's sum is added by itself. The tensor cores cut sums off instead of rounding them, which over a
/// long k adds up to more than a rounding of the whole: where out is f32. An out of 16 bits does not show it, nor do
/// operands that are cut off themselves.
#[cfg(not(lacks_wgmma))]
const fn promotes<T, O>() -> bool {
    size_of::<O>() == 4 && size_of::<T>() == 2
}

#[cfg(not(lacks_wgmma))]
macro_rules! wgmma_body {
    (Wgmma, $type:ident, $out:ident, $maps:ident, $end:ident, $bm:literal, $bn:literal, $stages:literal, $cluster:literal, $shares_a:literal) => {
        wgmma::multiply::<$type, f32, $type, $out, $bm, $bn, { $bn / 2 }, $stages, $cluster, $shares_a>(
            wgmma::Ends { a: $maps.a, out: $maps.out },
            wgmma::Plain { maps: $maps, gated: $end.is_gated(), promotes: promotes::<$type, $out>() },
            $end,
            $end,
        )
    };
    (Split, $type:ident, $out:ident, $maps:ident, $end:ident, $bn:literal, $stages:literal, $cluster:literal) => {
        split_k_wgmma::multiply::<
            $type,
            f32,
            $type,
            $out,
            { $bn / 2 },
            { $bn / 2 / $cluster },
            $stages,
            $cluster,
        >($maps, $end, promotes::<$type, $out>(), $end)
    };
    (Swapped, $type:ident, $out:ident, $maps:ident, $end:ident, $bm:literal, $bn:literal, $stages:literal, $cluster:literal) => {
        swapped_wgmma::multiply::<$type, $type, $out, $bm, { $bn / 2 }, { $bn / 2 - 8 }, $stages, $cluster>(
            $maps, $end,
        )
    };
}

#[cfg(not(lacks_wgmma))]
macro_rules! wgmma_entries {
    ($($entry:ident => $type:ident, $out:ident, $dtype:ident, $out_dtype:ident, $floor:ident,
       $tile:ident { threads: $threads:literal, $($field:ident: $value:literal),* };)*) => {$(
        /// Entry point; see the module and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `Matmul::run` checks them.
        #[kernel(max_threads = $threads, min_blocks = 1, waits)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            // First, as far as one line of the constants' cache reaches: a launch finds none of them there.
            dims: MatmulDims,
            how: MatmulEpilogue,
            #[grid_constant] a: cuda_std::tma::TensorMap,
            #[grid_constant] b: cuda_std::tma::TensorMap,
            #[grid_constant] up: cuda_std::tma::TensorMap,
            #[grid_constant] out_map: cuda_std::tma::TensorMap,
            bias: *const $type,
            residual: *const $out,
            out: *mut $out,
            b_at: *const $type,
            up_at: *const $type,
        ) {
            let weights = Weights { b: b_at, up: up_at };
            let maps = wgmma::Maps { a, b, up, out: out_map, weights };
            let end = Epilogue::new(bias, residual, out, &dims, &how);
            // SAFETY: threads, clusters and shared memory of the tile — Matmul::run.
            unsafe { wgmma_body!($tile, $type, $out, maps, end, $($value),*) }
        }
    )*};
}
#[cfg(not(lacks_wgmma))]
abi::matmul_wgmma_table!(wgmma_entries);

#[cfg(not(lacks_wgmma))]
macro_rules! fp8_entries {
    ($($entry:ident => $type:ident, $out:ident, $dtype:ident, $out_dtype:ident, $floor:ident,
       Wgmma { threads: $threads:literal, bm: $bm:literal, bn: $bn:literal, stages: $stages:literal,
               cluster: $cluster:literal, shares_a: false };)*) => {$(
        /// Entry point; see `matmul::fp8` and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `Matmul::run` checks them.
        #[kernel(max_threads = $threads, min_blocks = 1, waits)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            dims: MatmulDims,
            how: MatmulEpilogue,
            #[grid_constant] a: cuda_std::tma::TensorMap,
            #[grid_constant] b: cuda_std::tma::TensorMap,
            #[grid_constant] out_map: cuda_std::tma::TensorMap,
            row_scales: *const f32,
            scales: *const f32,
            bias: *const $type,
            residual: *const $out,
            out: *mut $out,
            weight: WeightDims,
        ) {
            let end = Epilogue::new(bias, residual, out, &dims, &how);
            let gated = end.is_gated();
            // Columns of a part are in one block of 128 rows, or more, of the weight.
            let by = fp8::Fp8::<{ if $bn == 128 { 1 } else { $bn / 64 } }, { $bn > 128 || $bm > 128 }> {
                map: b,
                scales,
                row_scales,
                weight: &weight,
                dims: &dims,
                gated,
            };
            let ends = wgmma::Ends { a, out: out_map };
            // SAFETY: threads, clusters and shared memory of the tile; rows as `quantise` makes them — Matmul::run.
            unsafe {
                wgmma::multiply::<E4m3, f32, $type, $out, $bm, $bn, { $bn / 2 }, $stages, $cluster, false>(
                    ends, by, end, end,
                )
            }
        }
    )*};
}
#[cfg(not(lacks_wgmma))]
abi::matmul_fp8_table!(fp8_entries);
