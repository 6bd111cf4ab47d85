//! Sorting (token, expert) pairs by expert: parameters and entry points.

/// Sizes of one launch, in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoePermuteDims {
    /// Pairs altogether.
    pub pairs: u32,
    /// Experts.
    pub experts: u32,
    /// The id of the first.
    pub first_expert: u32,
    /// Kinds of tokens, each with bins for all experts: bins altogether at most [`MAX_BINS`].
    pub kinds: u32,
    /// Pairs of a token, at least 1.
    pub top_k: u32,
    /// Pairs of a block.
    pub block_pairs: u32,
    /// Warps of a block that have a histogram and a share of the block's pairs, at least 1.
    pub warps: u32,
}

const _: () = assert!(size_of::<MoePermuteDims>() == 28);
impl crate::Params for MoePermuteDims {}

/// Most experts of all kinds of tokens.
pub const MAX_BINS: u32 = 2048;
/// Threads of every block.
pub const THREADS: u32 = 1024;
/// Pairs of a chunk where there are many.
pub const CHUNK_PAIRS: u32 = 4096;
/// Most pairs for a kernel of which each block counts all and places as many as it has threads.
pub const COUNTED_PAIRS: u32 = 1 << 16;
/// The position of a pair whose id is no expert's.
pub const NO_POSITION: u32 = u32::MAX;

/// Where things lie in the dynamic shared memory, in bytes.
pub mod smem {
    /// Scratch of the scan.
    pub const SCAN: u32 = 0;
    /// For each warp a word per bin, then two words per bin for the pairs of other blocks.
    pub const HISTOGRAMS: u32 = 256;
}

/// A bin per expert, of each kind of tokens, and one for the pairs of none.
pub const fn bins(experts: u32) -> u32 {
    experts + 1
}

/// Warps that have a histogram: as many as shared memory holds.
pub const fn warps(experts: u32) -> u32 {
    let fitting = ((48 << 10) - smem::HISTOGRAMS) / (4 * bins(experts)) - 2;
    if fitting < THREADS / 32 { fitting } else { THREADS / 32 }
}

/// Dynamic shared memory of a block in bytes.
pub const fn smem_bytes(experts: u32) -> u32 {
    smem::HISTOGRAMS + (warps(experts) + 2) * bins(experts) * 4
}

const _: () = assert!(warps(MAX_BINS) >= 1 && smem_bytes(MAX_BINS) <= 48 << 10);

/// What a kernel does of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoePermuteStage {
    /// All of it, in a block for each chunk.
    Block,
    /// Counts the pairs of each expert in each chunk.
    Count,
    /// Sums the counts up, in one block.
    Scan,
    /// Puts the pairs of each chunk in their places.
    Scatter,
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct MoePermuteVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// What it does.
    pub stage: MoePermuteStage,
}

/// Hands every row of the table to the macro `$callback`.
#[macro_export]
macro_rules! moe_permute_table {
    ($callback:path) => {
        $callback! {
            moe_permute_u32__block__sm61 => Block;
            moe_permute_u32__count__sm61 => Count;
            moe_permute_u32__scan__sm61 => Scan;
            moe_permute_u32__scatter__sm61 => Scatter;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $stage:ident;)*) => {
        /// Every kernel of the operator.
        pub const VARIANTS: &[MoePermuteVariant] =
            &[$(MoePermuteVariant { entry: stringify!($entry), stage: MoePermuteStage::$stage }),*];
    };
}
moe_permute_table!(variants);
