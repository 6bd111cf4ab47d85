//! Matrix products, of which the operators' kernels are made.
//!
//! | file | products | floor |
//! |---|---|---|
//! | `few_rows_simt` | of few rows, bound by reading b, by ordinary arithmetic | sm_61 |
//! | `few_rows_ahead` | of one row with constant weights, which it loads before the kernel ahead has ended | sm_90a |
//! | `packed_walk` | of one row with a packed weight by `mma.sync` | sm_80 |
//! | `simt` | of many rows, by ordinary arithmetic | sm_61 |
//! | `few_rows_mma` | of few rows by `mma.sync`: b streams through registers | sm_80 |
//! | `mma_sync` | of many rows by `mma.sync`, which `cp.async` feeds | sm_80 |
//! | `wgmma` | by `wgmma`, which TMA feeds; blocks stay and walk over tiles | sm_90a |
//! | `split_k_wgmma` | of few rows and columns by `wgmma`: the blocks of a cluster share k | sm_90a |
//! | `fp8` | of fp8 by fp8, of rows that become fp8 before: `wgmma`'s multiplier, and what makes them so | sm_90a |
//! | `swapped_wgmma` | of dozens to hundreds of rows by `wgmma`, which are the tile's columns | sm_90a |
//!
//! What they have in common: types that are multiplied ([`operand`], by tensor cores `multiplicand`, packed ones
//! [`weight`]), rows that are normed (`row_scale`), what becomes of a sum ([`epilogue`]), weights that are brought to
//! L2 before the kernel ahead has ended ([`early`]), and the consumers' side of the products by `wgmma`
//! (`wgmma_consumers`).

pub mod early;
pub mod epilogue;
#[cfg(not(lacks_dependent_launch))]
pub mod few_rows_ahead;
#[cfg(not(lacks_mma_sync))]
pub mod few_rows_mma;
pub mod few_rows_simt;
#[cfg(not(lacks_wgmma))]
pub mod fp8;
#[cfg(not(lacks_mma_sync))]
pub mod mma_sync;
#[cfg(not(lacks_mma_sync))]
pub mod multiplicand;
pub mod operand;
#[cfg(not(lacks_mma_sync))]
pub mod packed_walk;
#[cfg(not(lacks_mma_sync))]
pub mod row_scale;
pub mod simt;
#[cfg(not(lacks_wgmma))]
pub mod split_k_wgmma;
#[cfg(not(lacks_wgmma))]
pub mod swapped_wgmma;
pub mod weight;
#[cfg(not(lacks_wgmma))]
pub mod wgmma;
#[cfg(not(lacks_wgmma))]
pub mod wgmma_consumers;
