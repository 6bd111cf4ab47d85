//! The entry points.

use abi::ops::attention::AttentionDims;
use cuda_std::cvt::{bf16, f16};
use cuda_std::kernel;
use cuda_std::tma::TensorMap;

use super::super::Tables;
use super::super::scores::Masks;
use super::{Maps, tiles};

macro_rules! wgmma_entries {
    ($($entry:ident => $type:ident, $dtype:ident, Wgmma { dim: $dim:literal, dim_v: $dim_v:literal, keys: $keys:literal,
       consumers: $consumers:literal, threads: $threads:literal, masked: $masked:literal, split: $split:literal };)*) => {$(
        /// Entry point; see `wgmma` and `abi::ops::attention`.
        ///
        /// # Safety
        /// - Arguments as `Attention::run` checks them.
        #[kernel(max_threads = $threads, min_blocks = 1)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            #[grid_constant] q: TensorMap,
            #[grid_constant] k: TensorMap,
            #[grid_constant] v_map: TensorMap,
            #[grid_constant] out_map: TensorMap,
            v: *const $type,
            out: *mut $type,
            kv_lens: *const u32,
            q_offsets: *const u32,
            page_table: *const u32,
            lse: *mut f32,
            sinks: *const f32,
            bias: *const u8,
            blocks: *const u32,
            counter: *mut u32,
            dims: AttentionDims,
        ) {
            let maps = Maps { q, k, v: v_map, out: out_map };
            let tables = Tables { kv_lens, q_offsets, page_table };
            let masks = Masks { bias, blocks };
            // SAFETY: the caller's promise.
            unsafe {
                tiles::<
                    $type,
                    $dim,
                    $dim_v,
                    $keys,
                    $consumers,
                    { $consumers * 64 },
                    { $keys / 2 },
                    { $dim_v / 2 },
                    { $keys / 4 },
                    { $dim_v / 4 },
                    $masked,
                    $split,
                >(maps, v, out, tables, lse, sinks, masks, counter, &dims)
            }
        }
    )*};
}
abi::attention_wgmma_table!(wgmma_entries);
