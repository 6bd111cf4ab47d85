//! Gated delta rule: parameters and entry points.

use crate::{Arch, DType};

/// Sizes and strides of one launch, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedDeltaDims {
    /// Tokens of all sequences: none of the offsets is taken to be more.
    pub tokens: u32,
    /// Sequences.
    pub sequences: u32,
    /// Slots of the state: a sequence with a slot number beyond them is skipped.
    pub num_slots: u32,
    /// Value heads.
    pub heads_v: u32,
    /// Value heads of one key head.
    pub group: u32,
    /// Elements of a key head.
    pub dim_k: u32,
    /// Elements of a value head.
    pub dim_v: u32,
    /// Slices of [`SLICE`] columns that a value head has.
    pub slices: u32,
    /// The sum of [`ROWS_IN_PIECES`], [`STATE_IN_PIECES`] and [`VALUES_IN_PIECES`], where they hold.
    pub access: u32,
    /// First place of this pass, for the chunked form: see [`CHUNK`].
    pub first_place: u32,
    /// Places of this pass.
    pub num_places: u32,
    /// From one token to the next, in q.
    pub q_token_stride: u32,
    /// From one head to the next, in q.
    pub q_head_stride: u32,
    /// The same for k.
    pub k_token_stride: u32,
    /// The same for k.
    pub k_head_stride: u32,
    /// The same for v.
    pub v_token_stride: u32,
    /// The same for v.
    pub v_head_stride: u32,
    /// From one token to the next, in b.
    pub b_stride: u32,
    /// The same for a.
    pub a_stride: u32,
    /// The same for out.
    pub out_token_stride: u32,
    /// From one head to the next, in out.
    pub out_head_stride: u32,
    /// From one slot to the next.
    pub slot_stride: u32,
    /// What q is multiplied by after its norm.
    pub scale: f32,
}

const _: () = assert!(size_of::<GatedDeltaDims>() == 92);
impl crate::Params for GatedDeltaDims {}

/// In [`GatedDeltaDims::access`]: rows of q and k can be read in pieces of 16 bytes.
pub const ROWS_IN_PIECES: u32 = 1;
/// In [`GatedDeltaDims::access`]: rows of the state can be read and written in pieces of 16 bytes.
pub const STATE_IN_PIECES: u32 = 2;
/// In [`GatedDeltaDims::access`]: so can rows of v, and out written.
pub const VALUES_IN_PIECES: u32 = 4;

/// The most elements of a key head.
pub const MAX_DIM_K: u32 = 128;
/// Columns of the state of one block.
pub const SLICE: u32 = 32;

/// Tokens of a chunk.
///
/// Sequence s with tokens `offsets[s]..offsets[s + 1]` has its chunks at the places from `offsets[s] / CHUNK + s` on.
/// That leaves at least as many as it has chunks, so that a kernel finds a place's sequence from the offsets alone.
pub const CHUNK: u32 = 64;

/// What the `Chunk` kernels leave in the workspace for each place and value head, in f32: two matrices of [`CHUNK`]
/// rows and columns and four columns; see `gpu/src/ops/gated_delta/chunk.rs`.
pub const PLACE_ELEMENTS: u32 = 2 * CHUNK * CHUNK + 4 * CHUNK;

/// Words of a fragment: what the lanes of a warp hold of 16 rows and 16 columns of bf16, as the first operand of a
/// product.
pub const FRAGMENT: u32 = 128;

/// How many numbers of bf16 an element of 16 bits is the sum of.
pub const fn parts(dtype: DType) -> u32 {
    if matches!(dtype, DType::F16) { 2 } else { 1 }
}

/// Words that the `ChunkMma` kernels leave for each place and key head: fragments of k, q and kᵀ, of so many parts.
pub const fn key_words(parts: u32) -> u32 {
    3 * parts * (CHUNK / 16) * (MAX_DIM_K / 16) * FRAGMENT
}

/// Words that they leave for each place and value head: fragments of two lower triangles of [`CHUNK`] rows and columns,
/// of three parts, and four columns.
pub const VALUE_WORDS: u32 = 2 * 3 * 10 * FRAGMENT + 4 * CHUNK;

/// What a kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatedDeltaTile {
    /// A block walks through a sequence token by token, with a slice of the state in registers.
    Recurrent,
    /// First half of the chunked form: a block does what a chunk needs of keys, queries and gates.
    Chunk,
    /// Second half: a block walks through a sequence chunk by chunk, with a slice of the state in shared memory.
    Scan,
    /// The first half on tensor cores.
    ChunkMma,
    /// The second half on tensor cores, with a slice of the state in registers and in shared memory.
    ScanMma,
}

impl GatedDeltaTile {
    /// Threads of a block.
    pub const fn threads(self) -> u32 {
        match self {
            GatedDeltaTile::Recurrent => 128,
            _ => 256,
        }
    }

    /// Shared memory of a block in bytes, for a `dim_k` of up to [`MAX_DIM_K`].
    ///
    /// Chunk: the matrix A, the inverse or before that slices of q and k, five columns. Scan: the slice of the state,
    /// the chunk's values, a tile of 64 by 64. ScanMma: the slice of the state and three matrices of the chunk's
    /// values, each in three parts of 16 bits, the fragments of both triangles, two marks of each warp.
    pub const fn smem_bytes(self) -> u32 {
        match self {
            GatedDeltaTile::Recurrent => 0,
            GatedDeltaTile::Chunk | GatedDeltaTile::ChunkMma => (2 * CHUNK * CHUNK + 5 * CHUNK) * 4,
            GatedDeltaTile::Scan => (MAX_DIM_K * SLICE + CHUNK * SLICE + CHUNK * CHUNK) * 4,
            GatedDeltaTile::ScanMma => {
                (MAX_DIM_K + 3 * CHUNK) * SLICE * 6 + (VALUE_WORDS - 4 * CHUNK) * 4 + 64
            }
        }
    }
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct GatedDeltaVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of q, k, v, b, a and out.
    pub dtype: DType,
    /// What it does.
    pub tile: GatedDeltaTile,
    /// The least architecture that runs it.
    pub floor: Arch,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! gated_delta_table {
    ($callback:ident) => {
        $callback! {
            gated_delta_f32__recurrent__sm61 => f32, F32, Recurrent;
            gated_delta_f32__chunk__sm61 => f32, F32, Chunk;
            gated_delta_f32__scan__sm61 => f32, F32, Scan;
            gated_delta_f16__recurrent__sm61 => f16, F16, Recurrent;
            gated_delta_f16__chunk__sm61 => f16, F16, Chunk;
            gated_delta_f16__scan__sm61 => f16, F16, Scan;
            gated_delta_bf16__recurrent__sm61 => bf16, BF16, Recurrent;
            gated_delta_bf16__chunk__sm61 => bf16, BF16, Chunk;
            gated_delta_bf16__scan__sm61 => bf16, BF16, Scan;
        }
    };
}

/// The same for the kernels of tensor cores.
#[macro_export]
macro_rules! gated_delta_mma_table {
    ($callback:ident) => {
        $callback! {
            gated_delta_f16__chunk__sm80 => f16, F16, ChunkMma;
            gated_delta_f16__scan__sm80 => f16, F16, ScanMma;
            gated_delta_bf16__chunk__sm80 => bf16, BF16, ChunkMma;
            gated_delta_bf16__scan__sm80 => bf16, BF16, ScanMma;
        }
    };
}

macro_rules! sm61 {
    ($($rows:tt)*) => { variants!(Sm61, $($rows)*) };
}
macro_rules! sm80 {
    ($($rows:tt)*) => { variants!(Sm80, $($rows)*) };
}
macro_rules! variants {
    ($floor:ident, $($entry:ident => $type:ident, $dtype:ident, $tile:ident;)*) => {
        &[$(GatedDeltaVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            tile: GatedDeltaTile::$tile,
            floor: Arch::$floor,
        }),*]
    };
}

/// The kernels by ordinary arithmetic.
pub const VARIANTS: &[GatedDeltaVariant] = gated_delta_table!(sm61);
/// The kernels of tensor cores.
pub const MMA_VARIANTS: &[GatedDeltaVariant] = gated_delta_mma_table!(sm80);
