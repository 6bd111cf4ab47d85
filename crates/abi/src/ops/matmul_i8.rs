//! Matrix product of int8 operands, and the quantisation of rows: parameters and entry points.

use super::matmul::MatmulTile;
use crate::{Arch, DType};

/// The longest k: no sum of this many products of int8 values, −128 included, leaves the range of an i32.
pub const MAX_K: usize = (1 << 17) - 1;

/// One kernel of the product. Its sizes are a [`super::matmul::MatmulDims`].
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct MatmulI8Variant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of bias and out.
    pub out_dtype: DType,
    /// How the product is cut up.
    pub tile: MatmulTile,
    /// What it needs at least.
    pub floor: Arch,
}

/// Hands every row of the product's table to the macro `$callback`.
#[macro_export]
macro_rules! matmul_i8_table {
    ($callback:ident) => {
        $callback! {
            matmul_i8_f32__gemv1__sm61 => f32, F32, Sm61, Gemv { rows: 1, cols: 1, unroll: 4 };
            matmul_i8_f32__gemv2__sm61 => f32, F32, Sm61, Gemv { rows: 2, cols: 1, unroll: 4 };
            matmul_i8_f32__gemv4__sm61 => f32, F32, Sm61, Gemv { rows: 4, cols: 2, unroll: 2 };
            matmul_i8_f32__gemv8__sm61 => f32, F32, Sm61, Gemv { rows: 8, cols: 4, unroll: 1 };
            matmul_i8_f32__m64n64k64__sm61 => f32, F32, Sm61, Simt { bm: 64, bn: 64, bk: 64 };
            matmul_i8_f32__m128n128k32__sm61 => f32, F32, Sm61, Simt { bm: 128, bn: 128, bk: 32 };
            matmul_i8_f16__gemv1__sm61 => f16, F16, Sm61, Gemv { rows: 1, cols: 1, unroll: 4 };
            matmul_i8_f16__gemv2__sm61 => f16, F16, Sm61, Gemv { rows: 2, cols: 1, unroll: 4 };
            matmul_i8_f16__gemv4__sm61 => f16, F16, Sm61, Gemv { rows: 4, cols: 2, unroll: 2 };
            matmul_i8_f16__gemv8__sm61 => f16, F16, Sm61, Gemv { rows: 8, cols: 4, unroll: 1 };
            matmul_i8_f16__m64n64k64__sm61 => f16, F16, Sm61, Simt { bm: 64, bn: 64, bk: 64 };
            matmul_i8_f16__m128n128k32__sm61 => f16, F16, Sm61, Simt { bm: 128, bn: 128, bk: 32 };
            matmul_i8_bf16__gemv1__sm61 => bf16, BF16, Sm61, Gemv { rows: 1, cols: 1, unroll: 4 };
            matmul_i8_bf16__gemv2__sm61 => bf16, BF16, Sm61, Gemv { rows: 2, cols: 1, unroll: 4 };
            matmul_i8_bf16__gemv4__sm61 => bf16, BF16, Sm61, Gemv { rows: 4, cols: 2, unroll: 2 };
            matmul_i8_bf16__gemv8__sm61 => bf16, BF16, Sm61, Gemv { rows: 8, cols: 4, unroll: 1 };
            matmul_i8_bf16__m64n64k64__sm61 => bf16, BF16, Sm61, Simt { bm: 64, bn: 64, bk: 64 };
            matmul_i8_bf16__m128n128k32__sm61 => bf16, BF16, Sm61, Simt { bm: 128, bn: 128, bk: 32 };
        }
    };
}

/// The same for the kernels of Ampere's tensor cores.
#[macro_export]
macro_rules! matmul_i8_mma_table {
    ($callback:ident) => {
        $callback! {
            matmul_i8_f32__m128n256__sm80 => f32, F32, Sm80, Mma { bm: 128, bn: 256, threads: 256, blocks: 1 };
            matmul_i8_f32__m128n128__sm80 => f32, F32, Sm80, Mma { bm: 128, bn: 128, threads: 128, blocks: 2 };
            matmul_i8_f32__m64n64__sm80 => f32, F32, Sm80, Mma { bm: 64, bn: 64, threads: 128, blocks: 4 };
            matmul_i8_f16__m128n256__sm80 => f16, F16, Sm80, Mma { bm: 128, bn: 256, threads: 256, blocks: 1 };
            matmul_i8_f16__m128n128__sm80 => f16, F16, Sm80, Mma { bm: 128, bn: 128, threads: 128, blocks: 2 };
            matmul_i8_f16__m64n64__sm80 => f16, F16, Sm80, Mma { bm: 64, bn: 64, threads: 128, blocks: 4 };
            matmul_i8_bf16__m128n256__sm80 => bf16, BF16, Sm80, Mma { bm: 128, bn: 256, threads: 256, blocks: 1 };
            matmul_i8_bf16__m128n128__sm80 => bf16, BF16, Sm80, Mma { bm: 128, bn: 128, threads: 128, blocks: 2 };
            matmul_i8_bf16__m64n64__sm80 => bf16, BF16, Sm80, Mma { bm: 64, bn: 64, threads: 128, blocks: 4 };
        }
    };
}

/// The same for the kernels of Hopper's, which take tensor maps.
#[macro_export]
macro_rules! matmul_i8_wgmma_table {
    ($callback:ident) => {
        $callback! {
            matmul_i8_f32__n128__sm90a => f32, F32, Sm90a, Wgmma { threads: 384, bm: 128, bn: 128, stages: 6, cluster: 1, shares_a: false };
            matmul_i8_f32__n64__sm90a => f32, F32, Sm90a, Wgmma { threads: 384, bm: 128, bn: 64, stages: 7, cluster: 1, shares_a: false };
            matmul_i8_f32__m64n64k4__sm90a => f32, F32, Sm90a, Split { threads: 256, bn: 64, stages: 6, cluster: 4 };
            matmul_i8_f32__m64n128k4__sm90a => f32, F32, Sm90a, Split { threads: 256, bn: 128, stages: 4, cluster: 4 };
            matmul_i8_f16__n256c2__sm90a => f16, F16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 256, stages: 4, cluster: 2, shares_a: false };
            matmul_i8_f16__n128__sm90a => f16, F16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 128, stages: 6, cluster: 1, shares_a: false };
            matmul_i8_f16__n64__sm90a => f16, F16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 64, stages: 7, cluster: 1, shares_a: false };
            matmul_i8_f16__m64n64k4__sm90a => f16, F16, Sm90a, Split { threads: 256, bn: 64, stages: 6, cluster: 4 };
            matmul_i8_f16__m64n128k4__sm90a => f16, F16, Sm90a, Split { threads: 256, bn: 128, stages: 4, cluster: 4 };
            matmul_i8_bf16__n256c2__sm90a => bf16, BF16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 256, stages: 4, cluster: 2, shares_a: false };
            matmul_i8_bf16__n128__sm90a => bf16, BF16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 128, stages: 6, cluster: 1, shares_a: false };
            matmul_i8_bf16__n64__sm90a => bf16, BF16, Sm90a, Wgmma { threads: 384, bm: 128, bn: 64, stages: 7, cluster: 1, shares_a: false };
            matmul_i8_bf16__m64n64k4__sm90a => bf16, BF16, Sm90a, Split { threads: 256, bn: 64, stages: 6, cluster: 4 };
            matmul_i8_bf16__m64n128k4__sm90a => bf16, BF16, Sm90a, Split { threads: 256, bn: 128, stages: 4, cluster: 4 };
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $out:ident, $out_dtype:ident, $floor:ident,
       $tile:ident { $($field:ident: $value:literal),* };)*) => {
        &[$(MatmulI8Variant {
            entry: stringify!($entry),
            out_dtype: DType::$out_dtype,
            tile: MatmulTile::$tile { $($field: $value),* },
            floor: Arch::$floor,
        }),*]
    };
}
/// The kernels by `dp4a`.
pub const VARIANTS: &[MatmulI8Variant] = matmul_i8_table!(variants);
/// The kernels of Ampere's tensor cores.
pub const MMA_VARIANTS: &[MatmulI8Variant] = matmul_i8_mma_table!(variants);
/// The kernels of Hopper's tensor cores, which take tensor maps.
pub const WGMMA_VARIANTS: &[MatmulI8Variant] = matmul_i8_wgmma_table!(variants);

const _: () = {
    let mut i = 0;
    while i < VARIANTS.len() {
        let tile = VARIANTS[i].tile;
        assert!(tile.smem_bytes(DType::I8) <= 48 << 10);
        if let MatmulTile::Simt { bm, bn, bk } = tile {
            assert!(bm == bn && bk == super::matmul::THREADS / bm * 16);
        }
        i += 1;
    }
    let mut i = 0;
    while i < MMA_VARIANTS.len() {
        assert!(MMA_VARIANTS[i].tile.smem_bytes(DType::I8) <= 99 << 10);
        i += 1;
    }
    let mut i = 0;
    while i < WGMMA_VARIANTS.len() {
        assert!(WGMMA_VARIANTS[i].tile.smem_bytes(DType::I8) <= 227 << 10);
        i += 1;
    }
};

/// Sizes and strides of one quantisation, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizeRowsDims {
    /// Elements of a row.
    pub cols: u32,
    /// From one row of x to the next.
    pub x_stride: u32,
    /// From one row of q to the next.
    pub q_stride: u32,
    /// Leading elements of a row that are read 16 bytes at a time, a multiple of what that holds; 0 where x or q is not
    /// aligned for it.
    pub cols_in_pieces: u32,
}

const _: () = assert!(size_of::<QuantizeRowsDims>() == 16);
impl crate::Params for QuantizeRowsDims {}

/// Threads of a block, which quantises a row.
pub const QUANTIZE_THREADS: u32 = 256;
/// Shared memory of a block in bytes: a word per warp.
pub const QUANTIZE_SMEM_BYTES: u32 = QUANTIZE_THREADS / 32 * 4;

/// One kernel of the quantisation.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct QuantizeRowsVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of x.
    pub dtype: DType,
}

/// Hands every row of the quantisation's table to the macro `$callback`.
#[macro_export]
macro_rules! quantize_rows_table {
    ($callback:path) => {
        $callback! {
            quantize_rows_f32__block__sm61 => f32, F32;
            quantize_rows_f16__block__sm61 => f16, F16;
            quantize_rows_bf16__block__sm61 => bf16, BF16;
        }
    };
}

macro_rules! quantize_variants {
    ($($entry:ident => $type:ident, $dtype:ident;)*) => {
        /// Every kernel of the quantisation.
        pub const QUANTIZE_VARIANTS: &[QuantizeRowsVariant] =
            &[$(QuantizeRowsVariant { entry: stringify!($entry), dtype: DType::$dtype }),*];
    };
}
quantize_rows_table!(quantize_variants);
