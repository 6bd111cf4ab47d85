//! Tiles of queries on Hopper: TMA feeds rings of keys and values, warpgroups multiply by `wgmma` with all sums in
//! registers.
//!
//! A block stays on its multiprocessor and walks over tiles of 64 queries of one head for each of its `CONSUMERS`
//! warpgroups. One thread of the first warpgroup loads; the three warps beside it clean values at the borders.
//!
//! ```text
//! producer   q ──► full_q;  for each step of KEYS keys, from the last that is seen to the first:
//!            k ──► full_k, v of the step before ──► full_v
//! cleaners   at borders:    v ──► raw_v, keys that nobody sees and what is not finite becomes 0 ──► full_v
//! consumer   s = q·k[n]     ── first step: wait, mask, softmax: p, m, l
//!            s = q·k[n−1]  and  o += p·v[n]  are under way at a time; p comes from registers
//!            wait for s ──► empty_k;  mask; m', l, p' = 2^(s·c − m'·c)
//!            wait for o ──► empty_v;  o ·= 2^((m − m')·c);  p = p' rounded
//!            … o += p·v[first], meanwhile the log-sum-exp;  o / l, rounded ──► shared memory ──► TMA store, while the
//!            next tile begins: at 128 columns all that follows the rounding is beside its first q·k
//!
//! shared memory   | q, up to 128 columns of two tiles | out, unless it takes q's place |
//!                 | k 0, k 1, … | v 0, v 1, … | barriers, marks |
//!                 boxes of 64 columns in TMA's 128-byte swizzle; v is the operand whose rows are k (MN-major)
//! ```
//!
//! - Consumers take turns in starting products (named barriers): while one's are under way, the other does its softmax.
//! - Steps of keys without a visible key are skipped, with a block mask those without a block of the rows'; only those
//!   that some row does not see whole are masked. Of these a warp masks only those 16 keys at a time that some of its
//!   16 rows see and others do not, and has no maximum and no exponential of what none of them sees: see `Groups`.
//!   These steps and all under a soft cap are special: a plain one asks for both by one branch.
//! - The producer tells the consumers each tile and each step in shared memory: they have no registers for the walk
//!   over blocks, and none to keep what they need of a tile at its borders and its end.
//! - It tells the cleaners each border with the values' arrival, and no more: a causal tile begins at one, and its
//!   first `p·v` waits for them.
//! - Tiles go from the last queries, which under a causal mask have the most to do, to the first, the heads of a
//!   section side by side: as many as have keys and values that fit into L2. A block's loader draws them from a counter
//!   in device memory when it has loaded the one before, or its last k: handed out in turns, blocks had up to a quarter
//!   more to do than the mean where sections are short.
//! - There are two steps of keys and values in shared memory, four at 64 columns, and up to 128 columns the q of two
//!   tiles: loads are ahead of the products also from one tile to the next, whose keys may come from memory.
//! - At 128 columns a tile's end waits for the next tile's first scores to be started, and goes on beside them. Where
//!   there are none (no steps, no rows, no tile) it does not wait, nor where the tile is marked.
//! - A consumer behind the last row takes its turns and multiplies nothing: of 512 rows in tiles of 192 that is a
//!   ninth.
//! - `s·c − m·c` is one multiply-add where `m·c` is small: both products are relative to the same rounded `m·c`, so
//!   that its rounding cancels. Where it is large, differences are taken first, as in the other kernels: see `softmax`.
//! - 0 · NaN would carry a value that a row may not see into it, so at borders whatever is not finite is zero for the
//!   product. Rows that see it get it at the end, from global memory: see `borders`.
//! - A bias has kernels of its own (`MASKED`). A consumer loads its words, of two keys each, while the scores are made,
//!   and adds them to scores that are multiplied by the scale; any row may not see any key, so all values are cleaned.
//! - Keys in pages come in boxes of what a page and a step have in common, 16 rows at least; the producer reads the
//!   table.
//! - A row's steps begin at multiples of KEYS, and one of which it sees nothing leaves it as it was, so its bits depend
//!   on its sequence alone.
//!
//! - A tile's end stands beside the next tile's first scores, whose sums must be rounded before those scores start:
//!   ptxas waits for all products (C7517) where one's result is read behind the start of others, even if it was waited
//!   for in the round before. A tile with marked values ends at once.
//! - A plain step's time is in what a warp does one after the other, not in a unit, so branches and instructions count:
//!   it has one branch for caps and borders, and one more around the rescaling of older results. That stands behind the
//!   wait for their product: the wait is the whole warpgroup's, and whether a maximum has grown is each warp's own.
//! - q's descriptors are known to be the warp's, so none of them is moved (`R2UR`) between products of a group. What a
//!   warp sees of the first border is not found while the first scores are under way, since ptxas would move it there.
//! - The next k is asked for before the values. At 64 columns, whose steps are half as long, loads were late with two
//!   steps in shared memory, hence four.
//! - Bounds: of large prompts the card's power.
//!
//! - Of few queries and many keys there are fewer tiles than multiprocessors. `SPLIT` kernels cut a tile's steps into
//!   equal parts, which are tiles of their own with results of their own, and `combine` puts these together.
//!
//! What was measured and tried: `gpu/NOTES/attention.md`.

mod borders;
mod end;
mod entries;
mod loader;
mod walk;

use abi::ops::attention::{
    AttentionDims, WGMMA_MAX_STAGES, wgmma_knows_blocks, wgmma_out_in_q, wgmma_q_places, wgmma_stages_log2,
};
use cuda_std::tma::TensorMap;
use cuda_std::wgmma::{Accumulate, Descriptor, KMajor, MnMajor, Multiply, Registers, Swizzle};
use cuda_std::{barrier, mbarrier, registers, shared, thread, tma, warp, wgmma};

use super::Tables;
use super::scores::{Blocks, Masks, has_blocks, has_cap};
use super::softmax::{
    Groups, Rows, add_pairs, cap, mask, raise, round as round_weights, scale_rows, weights,
};
use crate::matmul::multiplicand::Multiplicand;
use borders::clean;
use end::{finish, results, settle};
use loader::load;
use walk::{END, MARKS, Places, STEPS, Step, TileWords, Turn};

/// Bytes of a row of a box: 64 elements.
const ROW_BYTES: u32 = 128;
/// Named barriers: the consumers' turns, and their own.
const TURN: u32 = 1;
const OWN: u32 = 4;
const CLEANER_WARPS: u32 = 3;

/// The tensor maps of a launch, of `[sequence, head, token, column]`; of k and v a sequence may be a page.
#[derive(Clone, Copy)]
pub(super) struct Maps {
    /// q in boxes of a block's rows.
    pub q: *const TensorMap,
    /// k in boxes of a step's keys, or of a part of them that is in one page.
    pub k: *const TensorMap,
    /// v in the same boxes.
    pub v: *const TensorMap,
    /// out in boxes of 64 rows.
    pub out: *const TensorMap,
}

/// The block's tiles. See the module.
///
/// # Safety
/// - Blocks of `128 · (CONSUMERS + 1)` threads, shared memory as `AttentionTile::smem_bytes` says; `SCORES`, `SUMS`,
///   `WEIGHTS` and `WORDS` are `KEYS / 2`, `DIM_V / 2`, `KEYS / 4` and `DIM_V / 4`.
/// - The maps are those of `Attention::run`, the scale is positive unless the kernel is `MASKED`; v, out, the tables,
///   lse, sinks and the masks *in-bounds* for `dims`. There is a bias if, and only if, the kernel is `MASKED`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn tiles<
    T: Multiplicand + Multiply<[f32; SCORES]> + Multiply<[f32; SUMS]>,
    const DIM: u32,
    const DIM_V: u32,
    const KEYS: u32,
    const CONSUMERS: u32,
    const ROWS: u32,
    const SCORES: usize,
    const SUMS: usize,
    const WEIGHTS: usize,
    const WORDS: usize,
    const MASKED: bool,
    const SPLIT: bool,
>(
    maps: Maps,
    v: *const T,
    out: *mut T,
    tables: Tables,
    lse: *mut f32,
    sinks: *const f32,
    masks: Masks,
    counter: *mut u32,
    dims: &AttentionDims,
) where
    [f32; SCORES]: Registers,
    [f32; SUMS]: Registers,
    [u32; WEIGHTS]: Registers,
{
    // What `Groups::of_blocks` asks for.
    const { assert!(!wgmma_knows_blocks(CONSUMERS, DIM_V) || KEYS == 128) };
    let places = Places::new::<DIM, DIM_V, KEYS, ROWS>();
    let thread = thread::thread_idx_x();
    // SAFETY: the barriers lie behind the tensors; one thread initialises them before anyone uses them.
    unsafe {
        if thread == 0 {
            mbarrier::init(places.full_q(0), 1);
            mbarrier::init(places.empty_q(0), CONSUMERS);
            if wgmma_q_places(DIM) == 2 {
                mbarrier::init(places.full_q(1), 1);
                mbarrier::init(places.empty_q(1), CONSUMERS);
            }
            let mut stage = 0;
            while stage < WGMMA_MAX_STAGES {
                let turn = Turn(stage);
                if stage < 1 << wgmma_stages_log2(DIM) {
                    mbarrier::init(places.full_k(turn), 1);
                    mbarrier::init(places.empty_k(turn), CONSUMERS);
                    // Each of the cleaners' warps arrives at a border.
                    mbarrier::init(places.full_v(turn), CLEANER_WARPS);
                    mbarrier::init(places.empty_v(turn), CONSUMERS);
                }
                mbarrier::init(places.raw_v(turn), 1);
                stage += 1;
            }
            let mut mark = 0;
            while mark < MARKS * 3 {
                shared::store_u32(places.mark(mark / 3, mark % 3), 0);
                mark += 1;
            }
            mbarrier::fence_mbarrier_init();
            tma::prefetch_map(maps.q);
            tma::prefetch_map(maps.k);
            tma::prefetch_map(maps.v);
        }
        thread::sync_threads();
    }
    let warpgroup = thread / 128;
    // SAFETY: the roles are those of whole warps; each waits for a stage before it touches it.
    unsafe {
        if warpgroup == 0 {
            if wgmma_knows_blocks(CONSUMERS, DIM_V) {
                registers::decrease::<56>();
            } else if CONSUMERS == 2 {
                registers::decrease::<40>();
            } else {
                registers::decrease::<32>();
            }
            // First what is the same in a warp: a barrier must not depend on what is one thread's.
            if thread >= 32 {
                clean::<T, DIM_V, KEYS>(places);
            } else if thread == 0 && wgmma_knows_blocks(CONSUMERS, DIM_V) {
                // Tiles are drawn early where the loader has registers for it.
                load::<DIM, DIM_V, KEYS, ROWS, true, MASKED, SPLIT>(
                    maps, places, tables, masks, counter, dims,
                );
            } else if thread == 0 {
                load::<DIM, DIM_V, KEYS, ROWS, false, MASKED, SPLIT>(
                    maps, places, tables, masks, counter, dims,
                );
            }
        } else {
            if wgmma_knows_blocks(CONSUMERS, DIM_V) {
                registers::increase::<224>();
            } else if CONSUMERS == 2 {
                registers::increase::<232>();
            } else {
                registers::increase::<160>();
            }
            consume::<T, DIM, DIM_V, KEYS, CONSUMERS, ROWS, SCORES, SUMS, WEIGHTS, WORDS, MASKED, SPLIT>(
                maps,
                places,
                warpgroup - 1,
                v,
                out,
                tables,
                lse,
                sinks,
                masks,
                dims,
            );
        }
    }
}

/// The first of a thread's two rows in the block's tile.
#[inline(always)]
fn first_row(consumer: u32, member: u32) -> u32 {
    consumer * 64 + member / 32 * 16 + member % 32 / 4
}

/// A warpgroup that computes.
///
/// # Safety
/// - All 128 threads (*converged*); the rest is the caller's promise to [`tiles`].
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn consume<
    T: Multiplicand + Multiply<[f32; SCORES]> + Multiply<[f32; SUMS]>,
    const DIM: u32,
    const DIM_V: u32,
    const KEYS: u32,
    const CONSUMERS: u32,
    const ROWS: u32,
    const SCORES: usize,
    const SUMS: usize,
    const WEIGHTS: usize,
    const WORDS: usize,
    const MASKED: bool,
    const SPLIT: bool,
>(
    maps: Maps,
    places: Places,
    consumer: u32,
    v: *const T,
    out: *mut T,
    tables: Tables,
    lse: *mut f32,
    sinks: *const f32,
    masks: Masks,
    dims: &AttentionDims,
) where
    [f32; SCORES]: Registers,
    [f32; SUMS]: Registers,
    [u32; WEIGHTS]: Registers,
{
    let member = thread::thread_idx_x() % 128;
    let (own_turn, next_turn) = (TURN + consumer, TURN + (consumer + 1) % CONSUMERS);
    let q_at = places.q(0) + consumer * 64 * ROW_BYTES;
    // The first scores of a tile are under way beside the end of the one before.
    let is_early = CONSUMERS == 2 && wgmma_q_places(DIM) == 2;
    // Of the next k; v is one behind.
    let mut turn = Turn(0);
    // Tiles, with this one.
    let mut round = 0;
    // Results of a tile, rounded: ptxas waits for all products (C7517) where one's sums are read behind the start of
    // others.
    let mut words = [0u32; WORDS];
    // Whether they are those of the tile before, whose end is due.
    let mut is_due = false;
    // SAFETY: products read stages that have come, and give them back when they are done; all branches around products
    // and barriers depend on what is the same in the whole block.
    unsafe {
        let release = |barrier: u32| {
            if member == 0 {
                mbarrier::arrive(barrier);
            }
        };
        // The first consumer begins.
        if consumer == CONSUMERS - 1 {
            barrier::arrive(TURN, 256);
        }
        loop {
            round += 1;
            mbarrier::wait_parity(places.full_q(round), places.parity_q(round));
            let [what, ..] = TileWords::of_masks(places, round);
            let all = (maps, places, v, out, tables, masks);
            if is_early && is_due {
                let has_scores = what == STEPS && TileWords::of_rows(places, round)[3] > consumer * 64;
                if warp::shuffle_idx(warp::FULL_MASK, u32::from(has_scores), 0) == 0 {
                    finish::<T, DIM, DIM_V, KEYS, CONSUMERS, ROWS, WORDS, MASKED, SPLIT>(
                        &words,
                        round - 1,
                        false,
                        all,
                        dims,
                    );
                    is_due = false;
                }
            }
            if what == END {
                break;
            }
            // By one lane's word, and with a join at the end, so that ptxas knows that warps stay together: else it
            // would keep what goes on from tile to tile, the products' descriptors with it, for each thread instead of
            // once for the warp.
            let has_rows = u32::from(TileWords::of_rows(places, round)[3] > consumer * 64);
            let has_rows = warp::shuffle_idx(warp::FULL_MASK, has_rows, 0) != 0;
            // Without rows it takes its turns and gives back what comes, once it has: before that it may not speak of
            // it.
            if !has_rows {
                let mut is_last = what != STEPS;
                while !is_last {
                    mbarrier::wait_parity(places.full_k(turn), places.parity(turn));
                    is_last = Step::load(places, turn).is_last();
                    barrier::sync(own_turn, 256);
                    barrier::arrive(next_turn, 256);
                    release(places.empty_k(turn));
                    mbarrier::wait_parity(places.full_v(turn), places.parity(turn));
                    // All threads have seen that it had come.
                    barrier::sync(OWN + consumer, 128);
                    release(places.empty_v(turn));
                    turn.0 += 1;
                }
                // The tile's words too.
                barrier::sync(OWN + consumer, 128);
                release(places.empty_q(round));
            } else {
                // By one lane's word too, or each thread would keep the descriptors of its own.
                let q_at = warp::shuffle_idx(warp::FULL_MASK, q_at + places.behind_q(round), 0);
                let empty_q = places.empty_q(round);
                let mut s = [0f32; SCORES];
                let mut o = [0f32; SUMS];
                let mut p = [0u32; WEIGHTS];
                let mut rows = Rows { m: [f32::NEG_INFINITY; 2], l: [0.0; 2] };
                let mut is_marked = false;
                let ends;
                // Of a step whose scores are done, k, and behind a tile's last one q. Where there is another place for
                // q, that has time.
                let release_scores = |step: Step, turn: Turn| {
                    release(places.empty_k(turn));
                    if !is_early && !wgmma_out_in_q(DIM) && step.is_last() {
                        release(empty_q);
                    }
                };
                let of_masks = |round: u32| (places, round, consumer, member, masks);
                let bias_of = |step: Step| -> [u32; WEIGHTS] {
                    if !MASKED {
                        return [0; WEIGHTS];
                    }
                    let [_, first_query, ..] = TileWords::of_masks(places, round);
                    let [_, head, batch, _] = TileWords::of_rows(places, round);
                    // Opaque, or what follows would be computed before the loop and kept in registers.
                    let member = thread::opaque(member ^ step.index()) ^ step.index();
                    let query = first_query + first_row(consumer, member);
                    let first = step.index() * KEYS;
                    masks.pairs([batch, head, query], first + member % 4 * 2, first + KEYS, dims)
                };
                if what == STEPS {
                    mbarrier::wait_parity(places.full_k(turn), places.parity(turn));
                    let mut step = Step::load(places, turn);
                    barrier::sync(own_turn, 256);
                    scores::<T, DIM, KEYS, ROWS, SCORES>(&mut s, q_at, places.stage_k(turn));
                    barrier::arrive(next_turn, 256);
                    if is_early && is_due {
                        finish::<T, DIM, DIM_V, KEYS, CONSUMERS, ROWS, WORDS, MASKED, SPLIT>(
                            &words,
                            round - 1,
                            false,
                            all,
                            dims,
                        );
                    }
                    let mut bias = bias_of(step);
                    wgmma::wait_group::<0>(&mut s);
                    release_scores(step, turn);
                    weigh::<T, DIM_V, KEYS, CONSUMERS, SCORES, WEIGHTS, MASKED>(
                        &mut s,
                        &mut rows,
                        step,
                        &bias,
                        of_masks(round),
                        dims,
                    );
                    round_weights::<T, SCORES, WEIGHTS>(&s, &mut p);
                    let mut accumulate = Accumulate::Overwrite;
                    let wait_for_next_k = |step: Step, turn: Turn| {
                        if !step.is_last() {
                            let next = Turn(turn.0 + 1);
                            mbarrier::wait_parity(places.full_k(next), places.parity(next));
                        } else if is_early {
                            release(empty_q);
                        }
                    };
                    wait_for_next_k(step, turn);
                    while !step.is_last() {
                        let before = turn;
                        turn.0 += 1;
                        step = Step::load(places, turn);
                        // On its way while the products are made.
                        bias = bias_of(step);
                        barrier::sync(own_turn, 256);
                        scores::<T, DIM, KEYS, ROWS, SCORES>(&mut s, q_at, places.stage_k(turn));
                        mbarrier::wait_parity(places.full_v(before), places.parity(before));
                        values::<T, KEYS, SUMS, WEIGHTS>(&mut o, &p, places.stage_v(before), accumulate);
                        barrier::arrive(next_turn, 256);
                        accumulate = Accumulate::Add;
                        wgmma::wait_group::<1>(&mut s);
                        release_scores(step, turn);
                        let decay = weigh::<T, DIM_V, KEYS, CONSUMERS, SCORES, WEIGHTS, MASKED>(
                            &mut s,
                            &mut rows,
                            step,
                            &bias,
                            of_masks(round),
                            dims,
                        );
                        // Here, because ptxas moves the wait for the products to the front of its basic block: this
                        // loop begins a new one, behind the softmax.
                        wait_for_next_k(step, turn);
                        wgmma::wait_group::<0>(&mut (&mut o, &mut p));
                        release(places.empty_v(before));
                        // Each warp decides for itself, so the wait for the products, which is the warpgroup's, stands
                        // before.
                        if let Some(decay) = decay {
                            scale_rows(&mut o, decay);
                        }
                        round_weights::<T, SCORES, WEIGHTS>(&s, &mut p);
                    }
                    mbarrier::wait_parity(places.full_v(turn), places.parity(turn));
                    let mut v_at = places.stage_v(turn);
                    if is_early {
                        // The same. Ahead of the wait ptxas spills.
                        v_at = warp::shuffle_idx(warp::FULL_MASK, v_at, 0);
                    }
                    values::<T, KEYS, SUMS, WEIGHTS>(&mut o, &p, v_at, accumulate);
                    let mark = |cleaner: u32| shared::load_u32(places.mark(round, cleaner)) == round;
                    is_marked = mark(0) | mark(1) | mark(2);
                    ends = settle::<T, MASKED, SPLIT>(&rows, round, places, lse, sinks, dims);
                    wgmma::wait_group::<0>(&mut (&mut o, &mut p));
                    release(places.empty_v(turn));
                    turn.0 += 1;
                } else {
                    ends = settle::<T, MASKED, SPLIT>(&rows, round, places, lse, sinks, dims);
                }

                results::<T, SUMS, WORDS>(&mut o, ends, &mut words);
                // What is marked takes long, and more registers.
                is_due = is_early && warp::shuffle_idx(warp::FULL_MASK, u32::from(is_marked), 0) == 0;
                if !is_due {
                    finish::<T, DIM, DIM_V, KEYS, CONSUMERS, ROWS, WORDS, MASKED, SPLIT>(
                        &words, round, is_marked, all, dims,
                    );
                }
            }
            warp::sync_warp(warp::FULL_MASK);
        }
        if member == 0 {
            tma::wait_group_read::<0>();
        }
    }
}

/// From scores to weights, of which those that a row does not see are 0. Returns what older results are to be
/// multiplied by, if they are: that is the warp's own decision, so no `wgmma` may depend on it. `bias` is what
/// [`Masks::pairs`] has loaded, if the kernel is `MASKED`.
///
/// # Safety
/// - *converged*: the whole warp; the tile's words, and the block mask *in-bounds* for `dims`.
#[inline(always)]
unsafe fn weigh<
    T: Multiplicand,
    const DIM_V: u32,
    const KEYS: u32,
    const CONSUMERS: u32,
    const SCORES: usize,
    const WEIGHTS: usize,
    const MASKED: bool,
>(
    s: &mut [f32; SCORES],
    rows: &mut Rows,
    step: Step,
    bias: &[u32; WEIGHTS],
    (places, round, consumer, member, masks): (Places, u32, u32, u32, Masks),
    dims: &AttentionDims,
) -> Option<[f32; 2]> {
    // A bias is added to scores that are multiplied by the scale.
    let scale = if MASKED { 1.0 } else { dims.scale };
    // SAFETY: the caller's promise.
    unsafe {
        if MASKED {
            if has_cap(dims) {
                cap::<SCORES, true>(s, dims);
            }
            add_pairs::<T, SCORES, WEIGHTS>(s, bias, dims);
        }
        if if MASKED { step.is_border() } else { step.is_special() } {
            if !MASKED && has_cap(dims) {
                cap::<SCORES, true>(s, dims);
            }
            if step.is_border() {
                // Nothing is kept in registers for it.
                let [_, first_query, len, ahead] = TileWords::of_masks(places, round);
                let bounds = [len as i32, ahead as i32];
                let (round, member) = (thread::opaque(round), thread::opaque(member));
                // The warp's first row, and the step's first key.
                let (query, key) = (first_query + first_row(consumer, member & !31), step.index() * KEYS);
                let mut groups = Groups::new(dims, bounds, query, key);
                if wgmma_knows_blocks(CONSUMERS, DIM_V) && has_blocks(dims) {
                    let [blocks_place, ..] = TileWords::of_rows(places, round);
                    groups = groups.of_blocks(Blocks(masks.blocks).of_head(blocks_place), query, key, dims);
                }
                let lane = member % 32;
                mask(s, groups, dims, bounds, query + lane / 4, key + lane % 4 * 2);
                // Mostly a tile's first step, in which all is new.
                let (exponents, decay) = raise::<SCORES, false>(s, groups, rows, scale);
                weights(s, groups, rows, exponents, decay);
                return decay;
            }
        }
        let (exponents, decay) = raise::<SCORES, true>(s, Groups::UNKNOWN, rows, scale);
        weights(s, Groups::UNKNOWN, rows, exponents, decay);
        decay
    }
}

/// Starts `s = q·kᵀ` as a group of its own.
///
/// # Safety
/// - As for [`wgmma::ss`]: 64 rows of q and `KEYS` of k, in boxes of 64 columns.
#[inline(always)]
unsafe fn scores<
    T: Multiply<[f32; SCORES]>,
    const DIM: u32,
    const KEYS: u32,
    const ROWS: u32,
    const SCORES: usize,
>(
    s: &mut [f32; SCORES],
    q: u32,
    k: u32,
) {
    let q = Descriptor::<KMajor>::new(q, Swizzle::Bytes128, 16, 8 * ROW_BYTES);
    let k = Descriptor::<KMajor>::new(k, Swizzle::Bytes128, 16, 8 * ROW_BYTES);
    // SAFETY: the caller's promise; the fence comes after whatever wrote s.
    unsafe {
        wgmma::fence();
        let mut i = 0;
        while i < DIM / 16 {
            let accumulate = if i == 0 { Accumulate::Overwrite } else { Accumulate::Add };
            let (column, within) = (i / 4 * ROW_BYTES, i % 4 * 32);
            let (q, k) = (q.advance(column * ROWS + within), k.advance(column * KEYS + within));
            wgmma::ss::<T, _, _, _>(s, q, k, accumulate);
            i += 1;
        }
        wgmma::commit_group();
    }
}

/// Starts `o += p·v`, or `o = p·v`, as a group of its own.
///
/// # Safety
/// - As for [`wgmma::rs`]: `KEYS` rows of v, in boxes of 64 columns.
#[inline(always)]
unsafe fn values<T: Multiply<[f32; SUMS]>, const KEYS: u32, const SUMS: usize, const WEIGHTS: usize>(
    o: &mut [f32; SUMS],
    p: &[u32; WEIGHTS],
    v: u32,
    accumulate: Accumulate,
) {
    let v = Descriptor::<MnMajor>::new(v, Swizzle::Bytes128, KEYS * ROW_BYTES, 8 * ROW_BYTES);
    // SAFETY: the caller's promise; the fence comes after whatever wrote o and p.
    unsafe {
        wgmma::fence();
        let mut i = 0;
        while i < WEIGHTS / 4 {
            let accumulate = if i == 0 { accumulate } else { Accumulate::Add };
            let p = [p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]];
            wgmma::rs::<T, _, _>(o, p, v.advance(i as u32 * 16 * ROW_BYTES), accumulate);
            i += 1;
        }
        wgmma::commit_group();
    }
}
