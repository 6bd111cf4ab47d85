//! Rows of a packed weight as a plain matrix, for products of many rows.

use abi::ops::matmul::{MatmulDims, WARPS};
use abi::weight::{TILE_K, TILE_ROWS, WeightDims};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{grid, kernel, thread};

use crate::matmul::simt;
use crate::matmul::weight::{self, ANY, Code, E2m1, E4m3, E6m9, Int4, Int8, Packed};

/// Rows of a weight as a plain matrix, each value rounded once: warps take tiles in turn.
///
/// # Safety
/// - *converged*: all threads of the block; `out` has `dims.n` rows of `dims.k`, the weight as many from `first_block`
///   on — checked in `Matmul::run`.
#[inline(always)]
unsafe fn unpack<C: Code, T: Element>(packed: &Packed, out: *mut T, dims: &MatmulDims) {
    // At least 1, or there were no blocks; `max` tells the compiler.
    let tiles = packed.dims.tiles.max(1);
    let blocks = dims.n.div_ceil(TILE_ROWS);
    let lane = thread::lane();
    let mut index = thread::block_idx_x() * WARPS + thread::warp_idx();
    // SAFETY: the caller's promise; each element is one lane's.
    unsafe {
        grid::begin();
        while index < blocks * tiles {
            let (row_block, tile) = (index / tiles, index % tiles);
            let row = packed.row::<C>(row_block);
            let words = row.words::<C>(tile);
            let raw = row.raw_scales::<C, ANY>(tile, packed.has_minimums::<C>());
            let [scales, minimums] = packed.numbers::<C, ANY>(&raw, packed.has_minimums::<C>());
            let zeros = row.raw_zeros::<C, ANY>(tile);
            let mut step = 0;
            while step < 4 {
                let (scale, minimum) = (scales[step], minimums[step]);
                let values = weight::values::<C>(&words, step, packed.any_zero::<C>(zeros, step as u32));
                let k = tile * TILE_K + step as u32 * 16 + lane % 4 * 4;
                let mut half = 0;
                while half < 2 {
                    let row = row_block * TILE_ROWS + lane / 4 + 8 * half as u32;
                    if row < dims.n && k < dims.k {
                        let mut quad = [0.0; 4];
                        let mut i = 0;
                        while i < 4 {
                            quad[i] = values[half][i] * scale[half];
                            if packed.has_minimums::<C>() {
                                quad[i] -= minimum[half];
                            }
                            i += 1;
                        }
                        // The matrix is n rows of k here.
                        simt::store_quad(out, row, k, quad, &MatmulDims { n: dims.k, ..*dims });
                    }
                    half += 1;
                }
                step += 1;
            }
            index += thread::grid_dim_x() * WARPS;
        }
    }
}

macro_rules! unpack_entries {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident, $floor:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::matmul`.
        ///
        /// # Safety
        /// - Arguments as `Matmul::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 2, waits)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            codes: *const u32,
            scales: *const u8,
            zeros: *const u8,
            minimums: *const u8,
            supers: *const u16,
            super_minimums: *const u16,
            out: *mut $type,
            dims: MatmulDims,
            weight: WeightDims,
        ) {
            let packed = Packed { codes, scales, zeros, minimums, supers, super_minimums, dims: weight };
            // SAFETY: 256 threads; the weight's rows and out's — Matmul::run.
            unsafe { unpack::<$codes, $type>(&packed, out, &dims) }
        }
    )*};
}
abi::matmul_unpack_table!(unpack_entries);
