//! The entry points: keys and values of q's type, and such of fp8.

use core::ptr::null;

use abi::ops::attention::AttentionDims;
use cuda_std::cvt::{E4m3, bf16, f16};
use cuda_std::{grid, kernel};

use super::super::Tables;
use super::splits;

macro_rules! decode_ring_entries {
    ($($entry:ident => $type:ident, $dtype:ident, DecodeRing { dim: $dim:literal, rows: $rows:literal, places: $places:literal, kv_bytes: 2,
       blocks: $blocks:literal };)*) => {$(
        /// Entry point; see `decode_ring` and `abi::ops::attention`.
        ///
        /// # Safety
        /// - Arguments as `Attention::run` checks them.
        #[kernel(max_threads = 128, min_blocks = $blocks, waits)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            q: *const $type,
            k: *const $type,
            v: *const $type,
            kv_lens: *const u32,
            q_offsets: *const u32,
            page_table: *const u32,
            _bias: *const u8,
            _blocks: *const u32,
            partial: *mut f32,
            stats: *mut f32,
            dims: AttentionDims,
        ) {
            grid::begin_early(|| (), false);
            // SAFETY: the caller's promise.
            unsafe {
                let tables = Tables { kv_lens, q_offsets, page_table };
                splits::<$type, $type, $dim, $rows, { $rows / 8 }, { $dim / 16 }, $places>(
                    q, k, v, null(), null(), tables, partial, stats, &dims,
                )
            }
        }
    )*};
}
abi::attention_decode_ring_table!(decode_ring_entries);

macro_rules! decode_ring_fp8_entries {
    ($($entry:ident => $type:ident, $dtype:ident, DecodeRing { dim: $dim:literal, rows: $rows:literal, places: $places:literal, kv_bytes: 1,
       blocks: $blocks:literal };)*) => {$(
        /// Entry point; see `decode_ring` and `abi::ops::attention`.
        ///
        /// # Safety
        /// - Arguments as `Attention::run` checks them.
        #[kernel(max_threads = 128, min_blocks = $blocks, waits)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            k_scale: *const f32,
            v_scale: *const f32,
            q: *const $type,
            k: *const E4m3,
            v: *const E4m3,
            kv_lens: *const u32,
            q_offsets: *const u32,
            page_table: *const u32,
            _bias: *const u8,
            _blocks: *const u32,
            partial: *mut f32,
            stats: *mut f32,
            dims: AttentionDims,
        ) {
            grid::begin_early(|| (), false);
            // SAFETY: the caller's promise.
            unsafe {
                let tables = Tables { kv_lens, q_offsets, page_table };
                splits::<$type, E4m3, $dim, $rows, { $rows / 8 }, { $dim / 16 }, $places>(
                    q, k, v, k_scale, v_scale, tables, partial, stats, &dims,
                )
            }
        }
    )*};
}
abi::attention_decode_ring_fp8_table!(decode_ring_fp8_entries);
