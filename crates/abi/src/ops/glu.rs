//! Gated linear unit activation: parameters and entry points.

use crate::{DType, RowTiles};

/// Sizes and strides of one launch; strides in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GluDims {
    /// The rows, in pieces of 16 bytes or of one element: see [`GluTile`].
    pub tiles: RowTiles,
    /// From one row of the gate to the next.
    pub gate_stride: u32,
    /// The same for up, where there is one.
    pub up_stride: u32,
    /// The same for out.
    pub out_stride: u32,
}

const _: () = assert!(size_of::<GluDims>() == 28);
impl crate::Params for GluDims {}

/// Threads of a block.
pub const THREADS: u32 = 256;
/// Pieces of a thread, all loaded before the first is used.
pub const PIECES_PER_THREAD: u32 = 2;
/// Logarithm of a block's pieces.
pub const BLOCK_PIECES_LOG2: u32 = (THREADS * PIECES_PER_THREAD).ilog2();

/// The activation of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x · sigmoid(x).
    Silu,
    /// x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).
    GeluTanh,
    /// x/2 · (1 + erf(x/√2)).
    GeluErf,
    /// 1 / (1 + e^−x): a plain gate, as of an attention's output.
    Sigmoid,
}

impl Activation {
    /// Every activation.
    pub const ALL: [Activation; 4] =
        [Activation::Silu, Activation::GeluTanh, Activation::GeluErf, Activation::Sigmoid];

    /// The name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Activation::Silu => "silu",
            Activation::GeluTanh => "gelu_tanh",
            Activation::GeluErf => "gelu_erf",
            Activation::Sigmoid => "sigmoid",
        }
    }
}

/// How rows are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GluTile {
    /// In pieces of 16 bytes.
    Pieces,
    /// Element by element: any length, stride and alignment.
    Scalar,
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct GluVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of gate, up and out.
    pub dtype: DType,
    /// The activation of the gate.
    pub activation: Activation,
    /// How rows are read.
    pub tile: GluTile,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! glu_table {
    ($callback:path) => {
        $callback! {
            glu_f32_silu__pieces__sm61 => f32, F32, silu, Silu, Pieces;
            glu_f32_silu__scalar__sm61 => f32, F32, silu, Silu, Scalar;
            glu_f32_gelu_tanh__pieces__sm61 => f32, F32, gelu_tanh, GeluTanh, Pieces;
            glu_f32_gelu_tanh__scalar__sm61 => f32, F32, gelu_tanh, GeluTanh, Scalar;
            glu_f32_gelu_erf__pieces__sm61 => f32, F32, gelu_erf, GeluErf, Pieces;
            glu_f32_gelu_erf__scalar__sm61 => f32, F32, gelu_erf, GeluErf, Scalar;
            glu_f32_sigmoid__pieces__sm61 => f32, F32, sigmoid, Sigmoid, Pieces;
            glu_f32_sigmoid__scalar__sm61 => f32, F32, sigmoid, Sigmoid, Scalar;
            glu_f16_silu__pieces__sm61 => f16, F16, silu, Silu, Pieces;
            glu_f16_silu__scalar__sm61 => f16, F16, silu, Silu, Scalar;
            glu_f16_gelu_tanh__pieces__sm61 => f16, F16, gelu_tanh, GeluTanh, Pieces;
            glu_f16_gelu_tanh__scalar__sm61 => f16, F16, gelu_tanh, GeluTanh, Scalar;
            glu_f16_gelu_erf__pieces__sm61 => f16, F16, gelu_erf, GeluErf, Pieces;
            glu_f16_gelu_erf__scalar__sm61 => f16, F16, gelu_erf, GeluErf, Scalar;
            glu_f16_sigmoid__pieces__sm61 => f16, F16, sigmoid, Sigmoid, Pieces;
            glu_f16_sigmoid__scalar__sm61 => f16, F16, sigmoid, Sigmoid, Scalar;
            glu_bf16_silu__pieces__sm61 => bf16, BF16, silu, Silu, Pieces;
            glu_bf16_silu__scalar__sm61 => bf16, BF16, silu, Silu, Scalar;
            glu_bf16_gelu_tanh__pieces__sm61 => bf16, BF16, gelu_tanh, GeluTanh, Pieces;
            glu_bf16_gelu_tanh__scalar__sm61 => bf16, BF16, gelu_tanh, GeluTanh, Scalar;
            glu_bf16_gelu_erf__pieces__sm61 => bf16, BF16, gelu_erf, GeluErf, Pieces;
            glu_bf16_gelu_erf__scalar__sm61 => bf16, BF16, gelu_erf, GeluErf, Scalar;
            glu_bf16_sigmoid__pieces__sm61 => bf16, BF16, sigmoid, Sigmoid, Pieces;
            glu_bf16_sigmoid__scalar__sm61 => bf16, BF16, sigmoid, Sigmoid, Scalar;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $function:ident, $activation:ident, $tile:ident;)*) => {
        /// Every kernel of the operator.
        pub const VARIANTS: &[GluVariant] = &[$(GluVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            activation: Activation::$activation,
            tile: GluTile::$tile,
        }),*];
    };
}
glu_table!(variants);
