//! Matrix product with a transposed right operand: `out = a · bᵀ + bias`.
//!
//! | kernels | for | work split |
//! |---|---|---|
//! | `Gemv` | few rows | a warp per group of columns, or several that share k: [`crate::tile::gemv`] |
//! | `Simt` | many rows | a block per 64 × 64 or 128 × 128: [`crate::tile::simt`] |
//! | `Mma` | many rows, from sm_80 on | a block per 64 × 64 to 128 × 256: `mma` |
//! | `Skinny` | up to 64 rows, from sm_80 on | a block, or a cluster of them, per 64 columns: `skinny` |
//! | `Wgmma` | many rows, from sm_90a on | persistent blocks, 128 × 64 to 128 × 256: `wgmma` |
//!
//! The first two multiply in f32 whatever the type in memory: operands are widened on their way into shared memory or registers,
//! sums are f32, and out is rounded once, after the bias. Of several products of the same size each has a layer of blocks.

use abi::ops::matmul::MatmulDims;
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, thread};

#[cfg(any(target_feature = "sm_80", not(target_arch = "nvptx64")))]
mod mma;
#[cfg(any(target_feature = "sm_80", not(target_arch = "nvptx64")))]
mod skinny;
#[cfg(any(target_feature = "sm_90a", not(target_arch = "nvptx64")))]
mod wgmma;

use crate::tile::operand::Operand;
use crate::tile::{gemv, simt};

/// Where the operands and the result of this block's product begin.
#[inline(always)]
fn of_product<T, O>(
    a: *const T,
    b: *const T,
    out: *mut O,
    dims: &MatmulDims,
) -> (*const T, *const T, *mut O) {
    let product = thread::block_idx_z() as usize;
    (
        a.wrapping_add(product * dims.a_batch_stride as usize),
        b.wrapping_add(product * dims.b_batch_stride as usize),
        out.wrapping_add(product * dims.out_batch_stride as usize),
    )
}

/// One tile of the product.
///
/// # Safety
/// - *converged*: all threads of the block; tensors *in-bounds* for `dims` — checked in `Matmul::run`.
#[inline(always)]
unsafe fn tile<T, O, const EDGE: u32, const PER: usize>(
    a: *const T,
    b: *const T,
    bias: *const T,
    out: *mut O,
    dims: &MatmulDims,
) where
    T: Operand<Sum = f32> + Element,
    O: Element,
{
    let (a, b, out) = of_product(a, b, out, dims);
    let (tile_m, tile_n) = simt::tile_of_block::<EDGE>(dims);
    // SAFETY: the caller's promise; every element of out belongs to one thread of one block.
    unsafe {
        let sums = simt::multiply::<T, EDGE, PER>(simt::strided(a, dims), b, dims, tile_m, tile_n);
        simt::for_quads::<f32, EDGE, PER>(&sums, dims, tile_m, tile_n, |row, col, mut values| {
            if !bias.is_null() {
                let bias = simt::load_quad(bias, col, dims.n);
                let mut i = 0;
                while i < 4 {
                    values[i] += bias[i];
                    i += 1;
                }
            }
            simt::store_quad(out, row, col, values, dims);
        });
    }
}

/// Some columns of the product for up to `ROWS` rows.
///
/// # Safety
/// - *converged*: all threads of the block; tensors *in-bounds* for `dims` — checked in `Matmul::run`.
#[inline(always)]
unsafe fn few_rows<T, O, const ROWS: usize, const COLS: usize, const SUMS: usize, const UNROLL: usize>(
    a: *const T,
    b: *const T,
    bias: *const T,
    out: *mut O,
    dims: &MatmulDims,
) where
    T: Operand<Sum = f32> + Element,
    O: Element,
{
    let (a, b, out) = of_product(a, b, out, dims);
    // SAFETY: the caller's promise; every element of out is finished once.
    unsafe {
        gemv::multiply::<T, ROWS, COLS, SUMS, UNROLL>(
            simt::strided(a, dims),
            b,
            dims,
            gemv::place_of_block::<ROWS>(dims),
            |row, col, mut value| {
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
    (Simt, $type:ident, $out:ident, $args:tt, $bm:literal, $bn:literal, $bk:literal) => {
        // SAFETY: blocks of 256 threads, a block per tile, shared memory for both buffers — Matmul::run.
        unsafe { tile::<$type, $out, $bm, { $bm / 16 }> $args }
    };
    (Gemv, $type:ident, $out:ident, $args:tt, $rows:literal, $cols:literal, $unroll:literal) => {
        // SAFETY: blocks of 256 threads, a block per rows and columns — Matmul::run.
        unsafe { few_rows::<$type, $out, $rows, $cols, { $rows * $cols }, $unroll> $args }
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $out:ident, $dtype:ident, $out_dtype:ident, $floor:ident,
       $tile:ident { $($field:ident: $value:literal),* };)*) => {$(
        /// Entry point; see the module and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `Matmul::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 2)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(a: *const $type, b: *const $type, bias: *const $type, out: *mut $out, dims: MatmulDims) {
            body!($tile, $type, $out, (a, b, bias, out, &dims), $($value),*)
        }
    )*};
}
abi::matmul_table!(entries);

#[cfg(any(target_feature = "sm_80", not(target_arch = "nvptx64")))]
macro_rules! mma_entries {
    ($($entry:ident => $type:ident, $out:ident, $dtype:ident, $out_dtype:ident, $floor:ident,
       Mma { bm: $bm:literal, bn: $bn:literal, threads: $threads:literal, blocks: $blocks:literal,
             stages: $stages:literal };)*) => {$(
        /// Entry point; see `mma` and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `Matmul::run` checks them.
        #[kernel(max_threads = $threads, min_blocks = $blocks)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(a: *const $type, b: *const $type, bias: *const $type, out: *mut $out, dims: MatmulDims) {
            const EDGE: usize = mma::warp_edge($bm, $bn, $threads);
            let (a, b, out) = of_product(a, b, out, &dims);
            // SAFETY: blocks of the tile's threads, a block per tile, its shared memory — Matmul::run.
            unsafe {
                mma::multiply::<
                    $type,
                    $out,
                    $bm,
                    $bn,
                    { EDGE / 16 },
                    { EDGE / 8 },
                    { $bm * 4 / $threads },
                    { $bn * 4 / $threads },
                    $stages,
                    $threads,
                >(a, b, bias, out, &dims)
            }
        }
    )*};
}
#[cfg(any(target_feature = "sm_80", not(target_arch = "nvptx64")))]
abi::matmul_mma_table!(mma_entries);

/// Kernels in clusters are in Hopper's images alone, the others in those between.
#[cfg(any(target_feature = "sm_80", not(target_arch = "nvptx64")))]
macro_rules! skinny_entries {
    ($($entry:ident => $type:ident, $out:ident, $dtype:ident, $out_dtype:ident, $floor:ident,
       Skinny { rows: $rows:literal, blocks: $blocks:literal, clustered: $clustered:literal };)*) => {$(
        skinny_entry!($floor, $entry, $type, $out, $rows, $blocks);
    )*};
}
#[cfg(any(target_feature = "sm_80", not(target_arch = "nvptx64")))]
macro_rules! skinny_entry {
    (Sm80, $($rest:tt)*) => { skinny_entry!($($rest)*, Alone); };
    (Sm90a, $($rest:tt)*) => {
        #[cfg(any(target_feature = "sm_90a", not(target_arch = "nvptx64")))]
        skinny_entry!($($rest)*, Cluster);
    };
    ($entry:ident, $type:ident, $out:ident, $rows:literal, $blocks:literal, $sharing:ident) => {
        /// Entry point; see `skinny` and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `Matmul::run` checks them.
        #[kernel(max_threads = 256, min_blocks = $blocks)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(a: *const $type, b: *const $type, bias: *const $type, out: *mut $out, dims: MatmulDims) {
            let (a, b, out) = of_product(a, b, out, &dims);
            // SAFETY: blocks of 256 threads, a cluster per 64 columns, the tile's shared memory — Matmul::run.
            unsafe {
                skinny::multiply::<
                    $type,
                    $out,
                    skinny::$sharing,
                    $rows,
                    { $rows / 8 },
                    { $rows / 16 },
                    { abi::ops::matmul::SKINNY_STAGES },
                >(a, b, bias, out, &dims)
            }
        }
    };
}
#[cfg(any(target_feature = "sm_80", not(target_arch = "nvptx64")))]
abi::matmul_skinny_table!(skinny_entries);

#[cfg(any(target_feature = "sm_90a", not(target_arch = "nvptx64")))]
macro_rules! wgmma_entries {
    ($($entry:ident => $type:ident, $out:ident, $dtype:ident, $out_dtype:ident, $floor:ident,
       Wgmma { bn: $bn:literal, stages: $stages:literal, cluster: $cluster:literal };)*) => {$(
        /// Entry point; see the module and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `Matmul::run` checks them.
        #[kernel(max_threads = 384, min_blocks = 1)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            #[grid_constant] a: cuda_std::tma::TensorMap,
            #[grid_constant] b: cuda_std::tma::TensorMap,
            #[grid_constant] out_map: cuda_std::tma::TensorMap,
            bias: *const $type,
            out: *mut $out,
            dims: MatmulDims,
        ) {
            let maps = wgmma::Maps { a, b, out: out_map };
            // SAFETY: blocks of 384 threads, clusters and shared memory of the tile — Matmul::run.
            unsafe {
                wgmma::multiply::<$type, $out, $bn, { $bn / 2 }, $stages, $cluster>(maps, bias, out, &dims)
            }
        }
    )*};
}
#[cfg(any(target_feature = "sm_90a", not(target_arch = "nvptx64")))]
abi::matmul_wgmma_table!(wgmma_entries);
