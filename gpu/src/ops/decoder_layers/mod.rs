//! All layers of a dense decoder for one token, in one launch: see `persistent`. `ring` brings weights, keys and values
//! to a block, `exchange` what other blocks have found, `attend` is attention.

#[cfg(not(lacks_wgmma))]
mod attend;
#[cfg(not(lacks_wgmma))]
mod exchange;
#[cfg(not(lacks_wgmma))]
mod persistent;
#[cfg(not(lacks_wgmma))]
mod ring;

#[cfg(not(lacks_wgmma))]
use abi::ops::decoder_layers::{DecoderLayersDims, LayerTable};
#[cfg(not(lacks_wgmma))]
use cuda_std::{cvt::bf16, kernel};

#[cfg(not(lacks_wgmma))]
macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident;)*) => {$(
        /// Entry point; see `persistent` and `abi::ops::decoder_layers`.
        ///
        /// # Safety
        /// - Arguments as `DecoderLayers::run` checks them.
        #[kernel(max_threads = 384, min_blocks = 1)]
        #[allow(clippy::too_many_arguments)]
        pub unsafe fn $entry(
            x: *const $type,
            positions: *const u32,
            cos: *const f32,
            sin: *const f32,
            slots: *const u32,
            lens: *const u32,
            pages: *const u32,
            out: *mut $type,
            exchange: *mut u64,
            dims: DecoderLayersDims,
            #[grid_constant] table: LayerTable,
        ) {
            // SAFETY: the caller's promise; the parameter lives as long as the kernel.
            unsafe { persistent::layers(x, positions, cos, sin, slots, lens, pages, out, exchange, table, &dims) }
        }
    )*};
}
#[cfg(not(lacks_wgmma))]
abi::decoder_layers_table!(entries);
