//! The kernels: entry points and their tiles.

use super::AttentionTile;
use crate::{Arch, DType};

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct AttentionVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of q and out.
    pub dtype: DType,
    /// Type of k and v.
    pub dtype_kv: DType,
    /// How the work is cut up.
    pub tile: AttentionTile,
    /// What it needs at least.
    pub floor: Arch,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! attention_table {
    ($callback:ident) => {
        $callback! {
            attention_f32__prefill_d64__sm61 => f32, F32, Prefill { dim: 64, keys: 64, lanes: 8 };
            attention_f32__prefill_d128__sm61 => f32, F32, Prefill { dim: 128, keys: 32, lanes: 8 };
            attention_f32__prefill_d256__sm61 => f32, F32, Prefill { dim: 256, keys: 16, lanes: 16 };
            attention_f32__decode_d64_r1__sm61 => f32, F32, Decode { dim: 64, dim_v: 64, rows: 1 };
            attention_f32__decode_d64_r2__sm61 => f32, F32, Decode { dim: 64, dim_v: 64, rows: 2 };
            attention_f32__decode_d64_r4__sm61 => f32, F32, Decode { dim: 64, dim_v: 64, rows: 4 };
            attention_f32__decode_d64_r8__sm61 => f32, F32, Decode { dim: 64, dim_v: 64, rows: 8 };
            attention_f32__decode_d128_r1__sm61 => f32, F32, Decode { dim: 128, dim_v: 128, rows: 1 };
            attention_f32__decode_d128_r2__sm61 => f32, F32, Decode { dim: 128, dim_v: 128, rows: 2 };
            attention_f32__decode_d128_r4__sm61 => f32, F32, Decode { dim: 128, dim_v: 128, rows: 4 };
            attention_f32__decode_d128_r8__sm61 => f32, F32, Decode { dim: 128, dim_v: 128, rows: 8 };
            attention_f32__decode_d256_r1__sm61 => f32, F32, Decode { dim: 256, dim_v: 256, rows: 1 };
            attention_f32__decode_d256_r2__sm61 => f32, F32, Decode { dim: 256, dim_v: 256, rows: 2 };
            attention_f32__decode_d256_r4__sm61 => f32, F32, Decode { dim: 256, dim_v: 256, rows: 4 };
            attention_f32__decode_d256_r8__sm61 => f32, F32, Decode { dim: 256, dim_v: 256, rows: 8 };
            attention_f32__decode_d576v512_r4__sm61 => f32, F32, Decode { dim: 576, dim_v: 512, rows: 4 };
            attention_f32__merge__sm61 => f32, F32, Merge {};
            attention_f16__prefill_d64__sm61 => f16, F16, Prefill { dim: 64, keys: 64, lanes: 8 };
            attention_f16__prefill_d128__sm61 => f16, F16, Prefill { dim: 128, keys: 32, lanes: 8 };
            attention_f16__prefill_d256__sm61 => f16, F16, Prefill { dim: 256, keys: 16, lanes: 16 };
            attention_f16__decode_d64_r1__sm61 => f16, F16, Decode { dim: 64, dim_v: 64, rows: 1 };
            attention_f16__decode_d64_r2__sm61 => f16, F16, Decode { dim: 64, dim_v: 64, rows: 2 };
            attention_f16__decode_d64_r4__sm61 => f16, F16, Decode { dim: 64, dim_v: 64, rows: 4 };
            attention_f16__decode_d64_r8__sm61 => f16, F16, Decode { dim: 64, dim_v: 64, rows: 8 };
            attention_f16__decode_d128_r1__sm61 => f16, F16, Decode { dim: 128, dim_v: 128, rows: 1 };
            attention_f16__decode_d128_r2__sm61 => f16, F16, Decode { dim: 128, dim_v: 128, rows: 2 };
            attention_f16__decode_d128_r4__sm61 => f16, F16, Decode { dim: 128, dim_v: 128, rows: 4 };
            attention_f16__decode_d128_r8__sm61 => f16, F16, Decode { dim: 128, dim_v: 128, rows: 8 };
            attention_f16__decode_d256_r1__sm61 => f16, F16, Decode { dim: 256, dim_v: 256, rows: 1 };
            attention_f16__decode_d256_r2__sm61 => f16, F16, Decode { dim: 256, dim_v: 256, rows: 2 };
            attention_f16__decode_d256_r4__sm61 => f16, F16, Decode { dim: 256, dim_v: 256, rows: 4 };
            attention_f16__decode_d256_r8__sm61 => f16, F16, Decode { dim: 256, dim_v: 256, rows: 8 };
            attention_f16__decode_d576v512_r4__sm61 => f16, F16, Decode { dim: 576, dim_v: 512, rows: 4 };
            attention_f16__merge__sm61 => f16, F16, Merge {};
            attention_bf16__prefill_d64__sm61 => bf16, BF16, Prefill { dim: 64, keys: 64, lanes: 8 };
            attention_bf16__prefill_d128__sm61 => bf16, BF16, Prefill { dim: 128, keys: 32, lanes: 8 };
            attention_bf16__prefill_d256__sm61 => bf16, BF16, Prefill { dim: 256, keys: 16, lanes: 16 };
            attention_bf16__decode_d64_r1__sm61 => bf16, BF16, Decode { dim: 64, dim_v: 64, rows: 1 };
            attention_bf16__decode_d64_r2__sm61 => bf16, BF16, Decode { dim: 64, dim_v: 64, rows: 2 };
            attention_bf16__decode_d64_r4__sm61 => bf16, BF16, Decode { dim: 64, dim_v: 64, rows: 4 };
            attention_bf16__decode_d64_r8__sm61 => bf16, BF16, Decode { dim: 64, dim_v: 64, rows: 8 };
            attention_bf16__decode_d128_r1__sm61 => bf16, BF16, Decode { dim: 128, dim_v: 128, rows: 1 };
            attention_bf16__decode_d128_r2__sm61 => bf16, BF16, Decode { dim: 128, dim_v: 128, rows: 2 };
            attention_bf16__decode_d128_r4__sm61 => bf16, BF16, Decode { dim: 128, dim_v: 128, rows: 4 };
            attention_bf16__decode_d128_r8__sm61 => bf16, BF16, Decode { dim: 128, dim_v: 128, rows: 8 };
            attention_bf16__decode_d256_r1__sm61 => bf16, BF16, Decode { dim: 256, dim_v: 256, rows: 1 };
            attention_bf16__decode_d256_r2__sm61 => bf16, BF16, Decode { dim: 256, dim_v: 256, rows: 2 };
            attention_bf16__decode_d256_r4__sm61 => bf16, BF16, Decode { dim: 256, dim_v: 256, rows: 4 };
            attention_bf16__decode_d256_r8__sm61 => bf16, BF16, Decode { dim: 256, dim_v: 256, rows: 8 };
            attention_bf16__decode_d576v512_r4__sm61 => bf16, BF16, Decode { dim: 576, dim_v: 512, rows: 4 };
            attention_bf16__merge__sm61 => bf16, BF16, Merge {};
        }
    };
}

/// The same for the kernels of few queries on tensor cores.
#[macro_export]
macro_rules! attention_decode_ring_table {
    ($callback:ident) => {
        $callback! {
            attention_f16__decode_ring_d64_r8__sm80 => f16, F16, DecodeRing { dim: 64, rows: 8, places: 4, kv_bytes: 2, blocks: 4 };
            attention_f16__decode_ring_d64_r16__sm80 => f16, F16, DecodeRing { dim: 64, rows: 16, places: 4, kv_bytes: 2, blocks: 4 };
            attention_f16__decode_ring_d128_r8__sm80 => f16, F16, DecodeRing { dim: 128, rows: 8, places: 4, kv_bytes: 2, blocks: 2 };
            attention_f16__decode_ring_d128_r16__sm80 => f16, F16, DecodeRing { dim: 128, rows: 16, places: 4, kv_bytes: 2, blocks: 2 };
            attention_f16__decode_ring_d256_r8__sm80 => f16, F16, DecodeRing { dim: 256, rows: 8, places: 2, kv_bytes: 2, blocks: 2 };
            attention_f16__decode_ring_d256_r16__sm80 => f16, F16, DecodeRing { dim: 256, rows: 16, places: 2, kv_bytes: 2, blocks: 2 };
            attention_bf16__decode_ring_d64_r8__sm80 => bf16, BF16, DecodeRing { dim: 64, rows: 8, places: 4, kv_bytes: 2, blocks: 4 };
            attention_bf16__decode_ring_d64_r16__sm80 => bf16, BF16, DecodeRing { dim: 64, rows: 16, places: 4, kv_bytes: 2, blocks: 4 };
            attention_bf16__decode_ring_d128_r8__sm80 => bf16, BF16, DecodeRing { dim: 128, rows: 8, places: 4, kv_bytes: 2, blocks: 2 };
            attention_bf16__decode_ring_d128_r16__sm80 => bf16, BF16, DecodeRing { dim: 128, rows: 16, places: 4, kv_bytes: 2, blocks: 2 };
            attention_bf16__decode_ring_d256_r8__sm80 => bf16, BF16, DecodeRing { dim: 256, rows: 8, places: 2, kv_bytes: 2, blocks: 2 };
            attention_bf16__decode_ring_d256_r16__sm80 => bf16, BF16, DecodeRing { dim: 256, rows: 16, places: 2, kv_bytes: 2, blocks: 2 };
        }
    };
}

/// The same with k and v in fp8.
#[macro_export]
macro_rules! attention_decode_ring_fp8_table {
    ($callback:ident) => {
        $callback! {
            attention_f16_f8e4m3__decode_ring_d64_r8__sm80 => f16, F16, DecodeRing { dim: 64, rows: 8, places: 8, kv_bytes: 1, blocks: 4 };
            attention_f16_f8e4m3__decode_ring_d64_r16__sm80 => f16, F16, DecodeRing { dim: 64, rows: 16, places: 8, kv_bytes: 1, blocks: 3 };
            attention_f16_f8e4m3__decode_ring_d128_r8__sm80 => f16, F16, DecodeRing { dim: 128, rows: 8, places: 4, kv_bytes: 1, blocks: 4 };
            attention_f16_f8e4m3__decode_ring_d128_r16__sm80 => f16, F16, DecodeRing { dim: 128, rows: 16, places: 4, kv_bytes: 1, blocks: 3 };
            attention_f16_f8e4m3__decode_ring_d256_r8__sm80 => f16, F16, DecodeRing { dim: 256, rows: 8, places: 4, kv_bytes: 1, blocks: 2 };
            attention_f16_f8e4m3__decode_ring_d256_r16__sm80 => f16, F16, DecodeRing { dim: 256, rows: 16, places: 4, kv_bytes: 1, blocks: 2 };
            attention_bf16_f8e4m3__decode_ring_d64_r8__sm80 => bf16, BF16, DecodeRing { dim: 64, rows: 8, places: 8, kv_bytes: 1, blocks: 4 };
            attention_bf16_f8e4m3__decode_ring_d64_r16__sm80 => bf16, BF16, DecodeRing { dim: 64, rows: 16, places: 8, kv_bytes: 1, blocks: 3 };
            attention_bf16_f8e4m3__decode_ring_d128_r8__sm80 => bf16, BF16, DecodeRing { dim: 128, rows: 8, places: 4, kv_bytes: 1, blocks: 4 };
            attention_bf16_f8e4m3__decode_ring_d128_r16__sm80 => bf16, BF16, DecodeRing { dim: 128, rows: 16, places: 4, kv_bytes: 1, blocks: 2 };
            attention_bf16_f8e4m3__decode_ring_d256_r8__sm80 => bf16, BF16, DecodeRing { dim: 256, rows: 8, places: 4, kv_bytes: 1, blocks: 2 };
            attention_bf16_f8e4m3__decode_ring_d256_r16__sm80 => bf16, BF16, DecodeRing { dim: 256, rows: 16, places: 4, kv_bytes: 1, blocks: 2 };
        }
    };
}

/// The same for the kernels that take k and v from fp8, or from pages of it, to the type of q.
#[macro_export]
macro_rules! attention_gather_table {
    ($callback:ident) => {
        $callback! {
            attention_f16_f8e4m3__gather__sm61 => f16, F16, Gather {};
            attention_bf16_f8e4m3__gather__sm61 => bf16, BF16, Gather {};
        }
    };
}

/// The same for latent attention's. The second of a type is for cards with less shared memory.
#[macro_export]
macro_rules! attention_decode_latent_table {
    ($callback:ident) => {
        $callback! {
            attention_f16__decode_latent_p4__sm80 => f16, F16, DecodeLatent { places: 4 };
            attention_f16__decode_latent_p2__sm80 => f16, F16, DecodeLatent { places: 2 };
            attention_bf16__decode_latent_p4__sm80 => bf16, BF16, DecodeLatent { places: 4 };
            attention_bf16__decode_latent_p2__sm80 => bf16, BF16, DecodeLatent { places: 2 };
        }
    };
}

/// The same for the kernels that combine the results of parts of the keys.
#[macro_export]
macro_rules! attention_combine_table {
    ($callback:ident) => {
        $callback! {
            attention_f16__combine__sm80 => f16, F16, Combine {};
            attention_bf16__combine__sm80 => bf16, BF16, Combine {};
        }
    };
}

/// The same for those of Hopper.
#[macro_export]
macro_rules! attention_decode_latent_wgmma_table {
    ($callback:ident) => {
        $callback! {
            attention_f16__decode_latent__sm90a => f16, F16, DecodeLatentWgmma {};
            attention_bf16__decode_latent__sm90a => bf16, BF16, DecodeLatentWgmma {};
        }
    };
}

/// The same for the kernels of many queries, which keys in one piece and those in pages have of their own.
#[macro_export]
macro_rules! attention_prefill_mma_table {
    ($callback:ident) => {
        $callback! {
            attention_f16__prefill_d64__sm80 => f16, F16, PrefillMma { dim: 64, dim_v: 64, keys: 64, parts: 2, blocks: 2, masked: false, split: false, paged: false };
            attention_f16__prefill_paged_d64__sm80 => f16, F16, PrefillMma { dim: 64, dim_v: 64, keys: 64, parts: 2, blocks: 2, masked: false, split: false, paged: true };
            attention_f16__prefill_split_d64__sm80 => f16, F16, PrefillMma { dim: 64, dim_v: 64, keys: 64, parts: 2, blocks: 2, masked: false, split: true, paged: false };
            attention_f16__prefill_split_paged_d64__sm80 => f16, F16, PrefillMma { dim: 64, dim_v: 64, keys: 64, parts: 2, blocks: 2, masked: false, split: true, paged: true };
            attention_f16__prefill_d128__sm80 => f16, F16, PrefillMma { dim: 128, dim_v: 128, keys: 64, parts: 2, blocks: 2, masked: false, split: false, paged: false };
            attention_f16__prefill_paged_d128__sm80 => f16, F16, PrefillMma { dim: 128, dim_v: 128, keys: 64, parts: 2, blocks: 2, masked: false, split: false, paged: true };
            attention_f16__prefill_split_d128__sm80 => f16, F16, PrefillMma { dim: 128, dim_v: 128, keys: 64, parts: 1, blocks: 2, masked: false, split: true, paged: false };
            attention_f16__prefill_split_paged_d128__sm80 => f16, F16, PrefillMma { dim: 128, dim_v: 128, keys: 64, parts: 1, blocks: 2, masked: false, split: true, paged: true };
            attention_f16__prefill_d256__sm80 => f16, F16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: false, split: false, paged: false };
            attention_f16__prefill_paged_d256__sm80 => f16, F16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: false, split: false, paged: true };
            attention_f16__prefill_split_d256__sm80 => f16, F16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: false, split: true, paged: false };
            attention_f16__prefill_split_paged_d256__sm80 => f16, F16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: false, split: true, paged: true };
            attention_bf16__prefill_d64__sm80 => bf16, BF16, PrefillMma { dim: 64, dim_v: 64, keys: 64, parts: 2, blocks: 2, masked: false, split: false, paged: false };
            attention_bf16__prefill_paged_d64__sm80 => bf16, BF16, PrefillMma { dim: 64, dim_v: 64, keys: 64, parts: 2, blocks: 2, masked: false, split: false, paged: true };
            attention_bf16__prefill_split_d64__sm80 => bf16, BF16, PrefillMma { dim: 64, dim_v: 64, keys: 64, parts: 2, blocks: 2, masked: false, split: true, paged: false };
            attention_bf16__prefill_split_paged_d64__sm80 => bf16, BF16, PrefillMma { dim: 64, dim_v: 64, keys: 64, parts: 2, blocks: 2, masked: false, split: true, paged: true };
            attention_bf16__prefill_d128__sm80 => bf16, BF16, PrefillMma { dim: 128, dim_v: 128, keys: 64, parts: 2, blocks: 2, masked: false, split: false, paged: false };
            attention_bf16__prefill_paged_d128__sm80 => bf16, BF16, PrefillMma { dim: 128, dim_v: 128, keys: 64, parts: 2, blocks: 2, masked: false, split: false, paged: true };
            attention_bf16__prefill_split_d128__sm80 => bf16, BF16, PrefillMma { dim: 128, dim_v: 128, keys: 64, parts: 1, blocks: 2, masked: false, split: true, paged: false };
            attention_bf16__prefill_split_paged_d128__sm80 => bf16, BF16, PrefillMma { dim: 128, dim_v: 128, keys: 64, parts: 1, blocks: 2, masked: false, split: true, paged: true };
            attention_bf16__prefill_d256__sm80 => bf16, BF16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: false, split: false, paged: false };
            attention_bf16__prefill_paged_d256__sm80 => bf16, BF16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: false, split: false, paged: true };
            attention_bf16__prefill_split_d256__sm80 => bf16, BF16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: false, split: true, paged: false };
            attention_bf16__prefill_split_paged_d256__sm80 => bf16, BF16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: false, split: true, paged: true };
            attention_f16__prefill_masked_d64__sm80 => f16, F16, PrefillMma { dim: 64, dim_v: 64, keys: 32, parts: 2, blocks: 3, masked: true, split: false, paged: false };
            attention_f16__prefill_masked_paged_d64__sm80 => f16, F16, PrefillMma { dim: 64, dim_v: 64, keys: 32, parts: 2, blocks: 3, masked: true, split: false, paged: true };
            attention_f16__prefill_masked_d128__sm80 => f16, F16, PrefillMma { dim: 128, dim_v: 128, keys: 32, parts: 2, blocks: 2, masked: true, split: false, paged: false };
            attention_f16__prefill_masked_paged_d128__sm80 => f16, F16, PrefillMma { dim: 128, dim_v: 128, keys: 32, parts: 2, blocks: 2, masked: true, split: false, paged: true };
            attention_f16__prefill_masked_d256__sm80 => f16, F16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: true, split: false, paged: false };
            attention_f16__prefill_masked_paged_d256__sm80 => f16, F16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: true, split: false, paged: true };
            attention_bf16__prefill_masked_d64__sm80 => bf16, BF16, PrefillMma { dim: 64, dim_v: 64, keys: 32, parts: 2, blocks: 3, masked: true, split: false, paged: false };
            attention_bf16__prefill_masked_paged_d64__sm80 => bf16, BF16, PrefillMma { dim: 64, dim_v: 64, keys: 32, parts: 2, blocks: 3, masked: true, split: false, paged: true };
            attention_bf16__prefill_masked_d128__sm80 => bf16, BF16, PrefillMma { dim: 128, dim_v: 128, keys: 32, parts: 2, blocks: 2, masked: true, split: false, paged: false };
            attention_bf16__prefill_masked_paged_d128__sm80 => bf16, BF16, PrefillMma { dim: 128, dim_v: 128, keys: 32, parts: 2, blocks: 2, masked: true, split: false, paged: true };
            attention_bf16__prefill_masked_d256__sm80 => bf16, BF16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: true, split: false, paged: false };
            attention_bf16__prefill_masked_paged_d256__sm80 => bf16, BF16, PrefillMma { dim: 256, dim_v: 256, keys: 32, parts: 1, blocks: 2, masked: true, split: false, paged: true };
        }
    };
}

/// The same for the kernels that take tensor maps.
#[macro_export]
macro_rules! attention_wgmma_table {
    ($callback:ident) => {
        $callback! {
            attention_f16__prefill_d64__sm90a => f16, F16, Wgmma { dim: 64, dim_v: 64, keys: 128, consumers: 3, threads: 512, masked: false, split: false };
            attention_f16__prefill_split_d64__sm90a => f16, F16, Wgmma { dim: 64, dim_v: 64, keys: 128, consumers: 2, threads: 384, masked: false, split: true };
            attention_f16__prefill_d128__sm90a => f16, F16, Wgmma { dim: 128, dim_v: 128, keys: 128, consumers: 2, threads: 384, masked: false, split: false };
            attention_f16__prefill_split_d128__sm90a => f16, F16, Wgmma { dim: 128, dim_v: 128, keys: 128, consumers: 2, threads: 384, masked: false, split: true };
            attention_f16__prefill_d192v128__sm90a => f16, F16, Wgmma { dim: 192, dim_v: 128, keys: 128, consumers: 2, threads: 384, masked: false, split: false };
            attention_f16__prefill_split_d192v128__sm90a => f16, F16, Wgmma { dim: 192, dim_v: 128, keys: 128, consumers: 2, threads: 384, masked: false, split: true };
            attention_f16__prefill_d256__sm90a => f16, F16, Wgmma { dim: 256, dim_v: 256, keys: 80, consumers: 2, threads: 384, masked: false, split: false };
            attention_f16__prefill_split_d256__sm90a => f16, F16, Wgmma { dim: 256, dim_v: 256, keys: 80, consumers: 2, threads: 384, masked: false, split: true };
            attention_f16__prefill_masked_d64__sm90a => f16, F16, Wgmma { dim: 64, dim_v: 64, keys: 128, consumers: 2, threads: 384, masked: true, split: false };
            attention_f16__prefill_masked_d128__sm90a => f16, F16, Wgmma { dim: 128, dim_v: 128, keys: 128, consumers: 2, threads: 384, masked: true, split: false };
            attention_f16__prefill_masked_d256__sm90a => f16, F16, Wgmma { dim: 256, dim_v: 256, keys: 80, consumers: 2, threads: 384, masked: true, split: false };
            attention_bf16__prefill_d64__sm90a => bf16, BF16, Wgmma { dim: 64, dim_v: 64, keys: 128, consumers: 3, threads: 512, masked: false, split: false };
            attention_bf16__prefill_split_d64__sm90a => bf16, BF16, Wgmma { dim: 64, dim_v: 64, keys: 128, consumers: 2, threads: 384, masked: false, split: true };
            attention_bf16__prefill_d128__sm90a => bf16, BF16, Wgmma { dim: 128, dim_v: 128, keys: 128, consumers: 2, threads: 384, masked: false, split: false };
            attention_bf16__prefill_split_d128__sm90a => bf16, BF16, Wgmma { dim: 128, dim_v: 128, keys: 128, consumers: 2, threads: 384, masked: false, split: true };
            attention_bf16__prefill_d192v128__sm90a => bf16, BF16, Wgmma { dim: 192, dim_v: 128, keys: 128, consumers: 2, threads: 384, masked: false, split: false };
            attention_bf16__prefill_split_d192v128__sm90a => bf16, BF16, Wgmma { dim: 192, dim_v: 128, keys: 128, consumers: 2, threads: 384, masked: false, split: true };
            attention_bf16__prefill_d256__sm90a => bf16, BF16, Wgmma { dim: 256, dim_v: 256, keys: 80, consumers: 2, threads: 384, masked: false, split: false };
            attention_bf16__prefill_split_d256__sm90a => bf16, BF16, Wgmma { dim: 256, dim_v: 256, keys: 80, consumers: 2, threads: 384, masked: false, split: true };
            attention_bf16__prefill_masked_d64__sm90a => bf16, BF16, Wgmma { dim: 64, dim_v: 64, keys: 128, consumers: 2, threads: 384, masked: true, split: false };
            attention_bf16__prefill_masked_d128__sm90a => bf16, BF16, Wgmma { dim: 128, dim_v: 128, keys: 128, consumers: 2, threads: 384, masked: true, split: false };
            attention_bf16__prefill_masked_d256__sm90a => bf16, BF16, Wgmma { dim: 256, dim_v: 256, keys: 80, consumers: 2, threads: 384, masked: true, split: false };
        }
    };
}

macro_rules! sm61 {
    ($($rows:tt)*) => { variants!(Sm61, None, $($rows)*) };
}
macro_rules! sm61_fp8 {
    ($($rows:tt)*) => { variants!(Sm61, Some(DType::F8E4M3), $($rows)*) };
}
macro_rules! sm80 {
    ($($rows:tt)*) => { variants!(Sm80, None, $($rows)*) };
}
macro_rules! sm80_fp8 {
    ($($rows:tt)*) => { variants!(Sm80, Some(DType::F8E4M3), $($rows)*) };
}
macro_rules! sm90a {
    ($($rows:tt)*) => { variants!(Sm90a, None, $($rows)*) };
}
macro_rules! variants {
    ($floor:ident, $dtype_kv:expr, $($entry:ident => $type:ident, $dtype:ident, $tile:ident { $($field:ident: $value:literal),* };)*) => {
        &[$(AttentionVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            dtype_kv: match $dtype_kv {
                Some(dtype_kv) => dtype_kv,
                None => DType::$dtype,
            },
            tile: AttentionTile::$tile { $($field: $value),* },
            floor: Arch::$floor,
        }),*]
    };
}

/// The kernels by ordinary arithmetic.
pub const VARIANTS: &[AttentionVariant] = attention_table!(sm61);
/// The kernels of few queries on tensor cores.
pub const DECODE_RING_VARIANTS: &[AttentionVariant] = attention_decode_ring_table!(sm80);
/// The kernels of latent attention on tensor cores.
pub const DECODE_LATENT_VARIANTS: &[AttentionVariant] = attention_decode_latent_table!(sm80);
/// The same on Hopper.
pub const DECODE_LATENT_WGMMA_VARIANTS: &[AttentionVariant] = attention_decode_latent_wgmma_table!(sm90a);
/// The same with k and v in fp8.
pub const DECODE_RING_FP8_VARIANTS: &[AttentionVariant] = attention_decode_ring_fp8_table!(sm80_fp8);
/// The kernels that take k and v from fp8 to the type of q.
pub const GATHER_VARIANTS: &[AttentionVariant] = attention_gather_table!(sm61_fp8);
/// The kernels of many queries on tensor cores.
pub const PREFILL_MMA_VARIANTS: &[AttentionVariant] = attention_prefill_mma_table!(sm80);
/// The kernels that combine the results of parts of the keys.
pub const COMBINE_VARIANTS: &[AttentionVariant] = attention_combine_table!(sm80);
/// The kernels of Hopper's tensor cores, which take tensor maps.
pub const WGMMA_VARIANTS: &[AttentionVariant] = attention_wgmma_table!(sm90a);

const _: () = {
    let mut i = 0;
    while i < VARIANTS.len() {
        assert!(VARIANTS[i].tile.smem_bytes() <= 48 << 10, "the floor has 48 KiB of shared memory");
        i += 1;
    }
    let mut i = 0;
    while i < DECODE_RING_VARIANTS.len() {
        assert!(DECODE_RING_VARIANTS[i].tile.smem_bytes() <= 99 << 10);
        i += 1;
    }
    let mut i = 0;
    while i < DECODE_RING_FP8_VARIANTS.len() {
        assert!(DECODE_RING_FP8_VARIANTS[i].tile.smem_bytes() <= 99 << 10);
        i += 1;
    }
    let mut i = 0;
    while i < DECODE_LATENT_VARIANTS.len() {
        let is_small = matches!(DECODE_LATENT_VARIANTS[i].tile, AttentionTile::DecodeLatent { places: 2 });
        assert!(DECODE_LATENT_VARIANTS[i].tile.smem_bytes() <= if is_small { 99 << 10 } else { 163 << 10 });
        i += 1;
    }
    assert!(AttentionTile::DecodeLatentWgmma {}.smem_bytes() <= 227 << 10);
    let mut i = 0;
    while i < PREFILL_MMA_VARIANTS.len() {
        assert!(PREFILL_MMA_VARIANTS[i].tile.smem_bytes() <= 99 << 10);
        i += 1;
    }
    let mut i = 0;
    while i < WGMMA_VARIANTS.len() {
        let tile = WGMMA_VARIANTS[i].tile;
        assert!(tile.smem_bytes() <= 227 << 10 && tile.threads() == tile.rows() * 2 + 128);
        i += 1;
    }
};
