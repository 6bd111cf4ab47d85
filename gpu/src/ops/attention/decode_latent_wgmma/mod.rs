//! Few queries against a long cache of latent rows on Hopper: as `decode_latent`, with TMA and `wgmma`.
//!
//! Work split: as in `decode_ring`, with 32 rows, pairs of a query and a head of those that share a key head; as many
//! blocks as there are multiprocessors, each of which takes every so many-th split of 256 keys, or every so many-th
//! group of four. Keys are the rows of both products, since there are few rows of q: `sᵀ = k·qᵀ` is 64 × 32 for each
//! step of 64 keys, `oᵀ = vᵀ·pᵀ` 512 × 32, and `wgmma` takes 64 × n.
//!
//! ```text
//! warpgroup 0   a thread:    wait empty_k[s] ── a step of keys, by TMA ──► full_k[s]
//!               three warps: wait empty_q ── q of the next result ──► full_q
//! warpgroup 1   wait full_k[s] ── sᵀ = k·qᵀ ── masks, the new maximum, weights, factors of older sums ──► full_p[s]
//! 2 and 3       wait full_p[s] ── oᵀ ·= decay ── oᵀ += vᵀ·pᵀ, 256 columns of v each ──► empty_k[s]
//!               at the end of a split: joined to those before it in its group; at the end of the group, or of a split
//!               alone, stored
//!
//! shared memory   | keys 0, 1 | q 0, 1 | pᵀ 0, 1 | notes 0, 1 | numbers, barriers |
//! ```
//!
//! - A step of keys lies in boxes of 64 columns in TMA's 128-byte swizzle, whose first eight are the values too: `vᵀ`
//!   is the operand whose columns are contiguous (MN-major), and so is `pᵀ`, in rows of 32 weights with the 64-byte
//!   swizzle, where two neighbours of a thread are a word.
//! - Scores are ahead of values by a step. The weights of a step and what is told of it are free when its keys are.
//! - Keys that not all rows see have weights of 0 for some, and 0 · NaN would carry a value into those: of such keys
//!   what is not finite becomes 0 when the scores are done. A row that does see one is NaN all the same: so is the
//!   score. (A soft cap would make it finite, so such problems are left to `decode`.) What is behind the last key or in
//!   another page is masked in the same way.
//! - A row's bits depend on its own keys alone: tensor cores keep rows apart, a weight of 0 adds nothing, and an older
//!   sum times 1 is the same. A group is joined by the same operations here and in the merge.
//! - Weights are relative to a base, which follows the largest score where that is 2^8 (`SLACK`) times above it. A
//!   row's own scores alone move its base. Most steps move none, so a word of each warp is all that the four have to
//!   tell each other, and older sums stay as they are.
//! - Results are stored by way of the keys' place: whole rows at a time, where the registers' own order would be 32
//!   bytes of each of four rows.
//!
//! - Scores have three sums, since a product waits for the one before in its sum; four would spill.
//!
//! What was measured and tried: `gpu/NOTES/attention.md`.

mod load;
mod places;
mod scores;
mod values;

use abi::ops::attention::{AttentionDims, DECODE_LATENT_ROWS, LATENT_KEYS, LATENT_STAGES, MAX_HEAD_DIM};
use cuda_std::cvt::{bf16, f16};
use cuda_std::tma::TensorMap;
use cuda_std::wgmma::Multiply;
use cuda_std::{grid, kernel, mbarrier, registers, thread, tma, warp};

use super::Tables;
use super::work::Work;
use crate::matmul::multiplicand::Multiplicand;
use load::{load_keys, load_queries};
use places::Turn;
use scores::scores;
use values::values;

const ROWS: u32 = DECODE_LATENT_ROWS;
const KEYS: u32 = LATENT_KEYS;
/// Bytes of a row of a box: 64 elements.
const ROW_BYTES: u32 = 128;
/// Boxes of 64 columns of a row.
const BOXES: u32 = MAX_HEAD_DIM / 64;
/// Scores of a thread, and results of one in 64 columns of v.
const SUMS: usize = ROWS as usize / 2;
/// Rows that a thread has scores and results of.
const OWN: usize = ROWS as usize / 4;
/// Threads that load q.
const Q_THREADS: u32 = 96;
/// Named barriers: of the warpgroup of scores, and of those of values.
const SCORES: u32 = 1;
const VALUES: u32 = 2;

/// The steps of a split in which some row sees a key.
#[inline(always)]
fn steps_of(work: &Work<ROWS>) -> [i32; 2] {
    let keys = KEYS as i32;
    [work.any.lo / keys, (work.any.hi + keys - 1) / keys]
}

/// The whole block. See the module.
///
/// # Safety
/// - Blocks of 512 threads, shared memory as `AttentionTile::smem_bytes` says; heads of [`MAX_HEAD_DIM`] and
///   [`MAX_HEAD_DIM_V`], v in the rows of k, of which `k` is the map in boxes of `box_keys` × 64; q and workspace
///   *in-bounds*, the rows of q *aligned(16)* — checked in `Attention::run`.
#[inline(always)]
pub(super) unsafe fn splits<T: Multiplicand + Multiply<[f32; SUMS]>>(
    k: *const TensorMap,
    q: *const T,
    tables: Tables,
    partial: *mut f32,
    stats: *mut f32,
    dims: &AttentionDims,
) {
    let thread = thread::thread_idx_x();
    // SAFETY: the barriers lie behind all else; one thread initialises them before anyone uses them. The roles are
    // those of whole warps; each waits for what it touches.
    unsafe {
        if thread == 0 {
            let mut place = 0;
            while place < LATENT_STAGES {
                let turn = Turn(place);
                mbarrier::init(turn.full_k(), 1);
                // A lane of each warp of values.
                mbarrier::init(turn.empty_k(), 8);
                mbarrier::init(turn.full_q(), Q_THREADS);
                mbarrier::init(turn.empty_q(), 4);
                mbarrier::init(turn.full_p(), 128);
                place += 1;
            }
            mbarrier::fence_mbarrier_init();
            tma::prefetch_map(k);
        }
        thread::sync_threads();
        if thread < 128 {
            registers::decrease::<64>();
            if thread == 0 {
                load_keys(k, tables, dims);
            } else if thread >= 32 {
                load_queries(q, tables, dims);
            }
        } else if thread < 256 {
            scores::<T>(tables, stats, dims);
        } else {
            registers::increase::<160>();
            // By a shuffle, so that the compiler knows that warps stay together: see ARCHITECTURE, "Uniform registers".
            values::<T>(warp::shuffle_idx(warp::FULL_MASK, thread / 128 - 2, 0), partial);
        }
    }
}

macro_rules! decode_latent_wgmma_entries {
    ($($entry:ident => $type:ident, $dtype:ident, DecodeLatentWgmma {};)*) => {$(
        /// Entry point; see `decode_latent_wgmma` and `abi::ops::attention`.
        ///
        /// # Safety
        /// - Arguments as `Attention::run` checks them.
        #[kernel(max_threads = 512, min_blocks = 1, waits)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            #[grid_constant] k: TensorMap,
            q: *const $type,
            kv_lens: *const u32,
            q_offsets: *const u32,
            page_table: *const u32,
            partial: *mut f32,
            stats: *mut f32,
            dims: AttentionDims,
        ) {
            grid::begin_early(|| (), false);
            // SAFETY: the caller's promise.
            unsafe {
                let tables = Tables { kv_lens, q_offsets, page_table };
                splits::<$type>(k, q, tables, partial, stats, &dims)
            }
        }
    )*};
}
abi::attention_decode_latent_wgmma_table!(decode_latent_wgmma_entries);
