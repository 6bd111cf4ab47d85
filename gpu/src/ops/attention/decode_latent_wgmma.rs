//! Few queries against a long cache of latent rows on Hopper: as `decode_latent`, with TMA and `wgmma`.
//!
//! Work split: as in `decode_ring`, with 32 rows, pairs of a query and a head of those that share a key head; as many blocks as there are
//! multiprocessors, each of which takes every so many-th split of 256 keys, or every so many-th group of four. Keys are the rows of both
//! products, since there are few rows of q: `sᵀ = k·qᵀ` is 64 × 32 for each step of 64 keys, `oᵀ = vᵀ·pᵀ` 512 × 32, and `wgmma` takes 64 × n.
//!
//! ```text
//! warpgroup 0   a thread:    wait empty_k[s] ── a step of keys, by TMA ──► full_k[s]
//!               three warps: wait empty_q ── q of the next result ──► full_q
//! warpgroup 1   wait full_k[s] ── sᵀ = k·qᵀ ── masks, the new maximum, weights, what older sums are multiplied by ──► full_p[s]
//! 2 and 3       wait full_p[s] ── oᵀ ·= decay ── oᵀ += vᵀ·pᵀ, 256 columns of v each ──► empty_k[s]
//!               at the end of a split: joined to those before it in its group, or stored
//!
//! shared memory   | keys 0, 1 | q 0, 1 | pᵀ 0, 1 | notes 0, 1 | numbers, barriers |
//! ```
//!
//! - A step of keys lies in boxes of 64 columns in TMA's 128-byte swizzle, whose first eight are the values too: `vᵀ` is the operand whose columns are
//!   contiguous (MN-major), and so is `pᵀ`, in rows of 32 weights with the 64-byte swizzle, where two neighbours of a thread are a word.
//! - Scores are ahead of values by a step. The weights of a step and what is told of it are free when its keys are.
//! - Keys that not all rows see have weights of 0 for some, and 0 · NaN would carry a value into those: of such keys what is not finite becomes 0
//!   when the scores are done. A row that does see one is NaN all the same: so is the score. (A soft cap would make it finite, so such
//!   problems are left to `decode`.) What is behind the last key or in another page is masked in the same way.
//! - A row's bits depend on its own keys alone: tensor cores keep rows apart, a weight of 0 adds nothing, and an older sum times 1 is the same. A group
//!   is joined by the same operations here and in the merge.
//! - Weights are relative to a base, which follows the largest score where that is 2^[`SLACK`] above it. A row's own scores alone move its base. Most
//!   steps move none, so a word of each warp is all that the four have to tell each other, and older sums stay as they are.
//! - Results are stored by way of the keys' place: whole rows at a time, where the registers' own order would be 32 bytes of each of four rows.
//!
//! # Measured on an H100, 20 heads, 4096 keys, bf16, with the merge, beside `decode_latent` on the same card in turn
//!
//! | sequences | µs | GB/s | `decode_latent`, µs |
//! |---|---|---|---|
//! | 1 | 13.3 | 360 | 17.3 |
//! | 8 | 23.6 | 1615 | 22.7 |
//! | 32 | 62.3 | 2445 | 75.9 |
//! | 128 | 227 | 2680 | 280 |
//!
//! A copy makes 2670 GB/s there. What was worth how much (1 / 8 / 128 sequences): q loaded four pieces of a thread at a time, each behind the loads of
//! keys, 14.3 / 26.3 / 225, by `cp.async` all at once 13.2 / 24.0 / 223; its rows' places found by a lane each 13.2 / 23.5. Bases that stay: 14.9 to 14.4 µs
//! of one sequence, nothing of many.
//!
//! Where the time of one sequence goes, four steps for each of 16 blocks (`ncu`, samples of each role): 3 µs until q and keys have come, of which most is finding
//! out which, then for each step 0.7 of products (36 of 64 × 32 × 16, bound by what comes between them: with two sums instead of three, as a product waits for
//! the one before in its sum, 1.0) and 0.5 of weights; 2 to 3 behind the last weights, and 3 of the merge. Of 128 sequences the warpgroup of scores waits for keys
//! half of its time. Eight sequences are a split for each of 128 blocks: the two steps that there is room for are late by half a step beside the
//! four smaller ones of `decode_latent`.
//!
//! Tried and left: four sums of scores, which spill (16.2 / 28.7 / 254); dividing by 1 left out where blocks find their splits: a branch that costs
//! `decode_ring` 2 %.

use abi::ops::attention::{
    AttentionDims, DECODE_LATENT_ROWS, LATENT_KEYS, LATENT_NOTE_BYTES, LATENT_NUMBERS_BYTES, LATENT_STAGES,
    MAX_HEAD_DIM, MAX_HEAD_DIM_V,
};
use cuda_std::tma::TensorMap;
use cuda_std::wgmma::{Accumulate, Descriptor, KMajor, MnMajor, Multiply, Swizzle};
use cuda_std::{
    barrier, cp_async, fence, global, math, mbarrier, registers, shared, thread, tma, warp, wgmma,
};

use super::work::{Splits, Work};
use super::{Tables, offset};
use crate::tile::multiplicand::{Multiplicand, not_finite};
use crate::tile::softmax::{base, meet, weight};

const ROWS: u32 = DECODE_LATENT_ROWS;
const KEYS: u32 = LATENT_KEYS;
/// Bytes of a row of a box: 64 elements.
const ROW_BYTES: u32 = 128;
/// Boxes of 64 columns of a row.
const BOXES: u32 = MAX_HEAD_DIM / 64;
const STEP_BYTES: u32 = KEYS * MAX_HEAD_DIM * 2;
const Q_BYTES: u32 = ROWS * MAX_HEAD_DIM * 2;
const WEIGHT_BYTES: u32 = KEYS * ROWS * 2;
/// Scores of a thread, and results of one in 64 columns of v.
const SUMS: usize = ROWS as usize / 2;
/// Times 64 columns of a warpgroup's results.
const PARTS: usize = MAX_HEAD_DIM_V as usize / 128;
/// Rows that a thread has scores and results of.
const OWN: usize = ROWS as usize / 4;
/// Threads that load q.
const Q_THREADS: u32 = 96;
/// Pieces of 16 bytes of so many rows of q that such a thread copies.
const Q_LOTS: usize = 3;
const Q_LOT_ROWS: u32 = Q_LOTS as u32 * Q_THREADS / (BOXES * 8);
/// Bytes of a row of results of a warpgroup of values.
const RESULT_BYTES: u32 = MAX_HEAD_DIM_V / 2 * 4;
/// Pieces of results that a thread stores together.
const LOTS: usize = 4;
/// Named barriers: of the warpgroup of scores, and of those of values.
const SCORES: u32 = 1;
const VALUES: u32 = 2;

/// What the warpgroups of values are told of a step: nothing, as there is none;
const NONE: u32 = 1;
/// it is the first of its split, the last;
const FIRST: u32 = 2;
const LAST: u32 = 4;
/// some older sum changes;
const DECAYS: u32 = 8;
/// its split is the last of its result, and of all.
const LAST_SPLIT: u32 = 16;
const END: u32 = 32;

/// How far, in powers of two, a score may be above what weights are relative to: those are 256 at most then, which f16 has room for.
const SLACK: f32 = 8.0;
/// The slot of a row that there is not.
const NO_SLOT: u32 = u32::MAX;

/// A number of steps, or of tiles of q: its place among [`LATENT_STAGES`], and how often that was used before.
#[derive(Clone, Copy)]
struct Turn(u32);

impl Turn {
    #[inline(always)]
    fn place(self) -> u32 {
        self.0 % LATENT_STAGES
    }

    #[inline(always)]
    fn parity(self) -> u32 {
        self.0 / LATENT_STAGES % 2
    }

    #[inline(always)]
    fn keys(self) -> u32 {
        shared::base() + self.place() * STEP_BYTES
    }

    #[inline(always)]
    fn q(self) -> u32 {
        shared::base() + LATENT_STAGES * STEP_BYTES + self.place() * Q_BYTES
    }

    #[inline(always)]
    fn weights(self) -> u32 {
        shared::base() + LATENT_STAGES * (STEP_BYTES + Q_BYTES) + self.place() * WEIGHT_BYTES
    }

    /// A word, then of each row what older sums are multiplied by, what the split's result and those before it are, and its slot.
    #[inline(always)]
    fn note(self) -> u32 {
        shared::base()
            + LATENT_STAGES * (STEP_BYTES + Q_BYTES + WEIGHT_BYTES)
            + self.place() * LATENT_NOTE_BYTES
    }

    #[inline(always)]
    fn decays(self) -> u32 {
        self.note() + 16
    }

    #[inline(always)]
    fn factors(self) -> [u32; 2] {
        [self.decays() + ROWS * 4, self.decays() + 2 * ROWS * 4]
    }

    #[inline(always)]
    fn slots(self) -> u32 {
        self.decays() + 3 * ROWS * 4
    }

    /// Of four warps the largest score of each row, in one of two places.
    #[inline(always)]
    fn maxima(self) -> u32 {
        numbers() + self.0 % 2 * 4 * ROWS * 4
    }

    /// Of four warps whether they want new bases, in one of two places.
    #[inline(always)]
    fn votes(self) -> u32 {
        largest() + ROWS * 4 + self.0 % 2 * 16
    }

    #[inline(always)]
    fn barrier(self, kind: u32) -> u32 {
        numbers() + LATENT_NUMBERS_BYTES - (5 - kind) * LATENT_STAGES * 8 + self.place() * 8
    }

    #[inline(always)]
    fn full_k(self) -> u32 {
        self.barrier(0)
    }

    #[inline(always)]
    fn empty_k(self) -> u32 {
        self.barrier(1)
    }

    #[inline(always)]
    fn full_q(self) -> u32 {
        self.barrier(2)
    }

    #[inline(always)]
    fn empty_q(self) -> u32 {
        self.barrier(3)
    }

    #[inline(always)]
    fn full_p(self) -> u32 {
        self.barrier(4)
    }
}

#[inline(always)]
fn numbers() -> u32 {
    shared::base() + LATENT_STAGES * (STEP_BYTES + Q_BYTES + WEIGHT_BYTES + LATENT_NOTE_BYTES)
}

/// Of four warps the sums of each row's weights.
#[inline(always)]
fn totals() -> u32 {
    numbers() + 2 * 4 * ROWS * 4
}

/// What each row's weights of a split are relative to.
#[inline(always)]
fn largest() -> u32 {
    totals() + 4 * ROWS * 4
}

/// The steps of a split in which some row sees a key.
#[inline(always)]
fn steps_of(work: &Work<ROWS>) -> [i32; 2] {
    let keys = KEYS as i32;
    [work.any.lo / keys, (work.any.hi + keys - 1) / keys]
}

/// The whole block. See the module.
///
/// # Safety
/// - Blocks of 512 threads, shared memory as `AttentionTile::smem_bytes` says; heads of [`MAX_HEAD_DIM`] and [`MAX_HEAD_DIM_V`], v in
///   the rows of k, of which `k` is the map in boxes of `box_keys` × 64; q and workspace *in-bounds*, the rows of q *aligned(16)* —
///   checked in `Attention::run`.
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
    // SAFETY: the barriers lie behind all else; one thread initialises them before anyone uses them. The roles are those of whole
    // warps; each waits for what it touches.
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

/// The thread that loads keys.
///
/// # Safety
/// - One thread; the rest is the caller's promise to [`splits`].
#[inline(always)]
unsafe fn load_keys(k: *const TensorMap, tables: Tables, dims: &AttentionDims) {
    let mut splits = Splits::new(dims, true);
    let mut turn = Turn(0);
    // SAFETY: a stage is loaded when both warpgroups of values have given it back. A page beyond the last key that is seen is not looked
    // up: another comes in its place.
    unsafe {
        let mut work: Work<ROWS> = splits.find(tables, dims);
        while work.has_keys() {
            let [mut step, end] = steps_of(&work);
            while step < end {
                mbarrier::wait_parity(turn.empty_k(), turn.parity() ^ 1);
                mbarrier::arrive_expect_tx(turn.full_k(), STEP_BYTES);
                let mut row = 0;
                while row < KEYS {
                    let key = step * KEYS as i32 + row as i32;
                    let page = work.pages.page(dims, key.min(work.any.hi - 1)) as i32;
                    let token = work.pages.row_in_page(dims, key) as i32;
                    let mut col = 0;
                    while col < BOXES {
                        let from = [(64 * col) as i32, token, work.head_kv as i32, page];
                        tma::load(turn.keys() + (col * KEYS + row) * ROW_BYTES, k, from, turn.full_k());
                        // Opaque, so that the loop stays one.
                        col = thread::opaque(col + 1);
                    }
                    row += dims.box_keys;
                }
                turn.0 += 1;
                step += 1;
            }
            work = splits.next(tables, dims);
        }
    }
}

/// The warps that load q, as the splits of a result have it in common.
///
/// # Safety
/// - Threads 32 to 127; the rest is the caller's promise to [`splits`].
#[inline(always)]
unsafe fn load_queries<T: Multiplicand>(q: *const T, tables: Tables, dims: &AttentionDims) {
    // Row and piece of each lot: four rows' pieces are three of each thread.
    let lane = thread::lane();
    let mut lots = [[0; 2]; Q_LOTS];
    let mut i = 0;
    while i < Q_LOTS {
        let piece = i as u32 * Q_THREADS + thread::thread_idx_x() - 32;
        lots[i] = [piece / (BOXES * 8), piece % (BOXES * 8)];
        i += 1;
    }
    let mut splits = Splits::new(dims, true);
    let mut turn = Turn(0);
    // SAFETY: rows below `end_row` are inside q; a place is written when the warpgroup of scores has given it back.
    unsafe {
        let mut work: Work<ROWS> = splits.find(tables, dims);
        while work.has_keys() {
            if splits.is_first {
                mbarrier::wait_parity(turn.empty_q(), turn.parity() ^ 1);
                // Each lane finds a row, the last one instead of those that there are not, of which there are zeros.
                let (query, head) = work.place((work.first_row + lane).min(work.end_row - 1), dims);
                let query = work.own.first_q + query;
                let strides = (dims.q_batch_stride, dims.q_token_stride, dims.q_head_stride);
                let of_lane = offset(work.batch, strides.0, query, strides.1, head, strides.2) as u64;
                let num_rows = work.end_row - work.first_row;
                let mut first_row = 0;
                while first_row < ROWS {
                    let mut i = 0;
                    while i < Q_LOTS {
                        let (row, piece) = (first_row + lots[i][0], lots[i][1]);
                        let to = turn.q()
                            + (piece / 8 * ROWS + row) * ROW_BYTES
                            + (((piece % 8) ^ (row % 8)) << 4);
                        let [low, high] = [of_lane as u32, (of_lane >> 32) as u32]
                            .map(|half| warp::shuffle_idx(warp::FULL_MASK, half, row));
                        let at = u64::from(low) | u64::from(high) << 32;
                        let from = q.wrapping_add(at as usize + piece as usize * 8);
                        cp_async::cg_16_fill(to, from, if row < num_rows { 16 } else { 0 });
                        i += 1;
                    }
                    // Opaque, so that the loop stays one.
                    first_row = thread::opaque(first_row + Q_LOT_ROWS);
                }
                cp_async::commit_group();
                cp_async::wait_group::<0>();
                fence::proxy_async_shared();
                mbarrier::arrive(turn.full_q());
                turn.0 += 1;
            }
            work = splits.next(tables, dims);
        }
    }
}

/// The larger of two numbers of each of a thread's rows.
#[inline(always)]
fn larger(a: [f32; OWN], b: [f32; OWN]) -> [f32; OWN] {
    let mut larger = a;
    let mut i = 0;
    while i < OWN {
        larger[i] = math::max(larger[i], b[i]);
        i += 1;
    }
    larger
}

/// A thread's numbers of 32 rows: `8·j + 2·t` and the next one for each j.
///
/// # Safety
/// - *initialised*: inside shared memory.
#[inline(always)]
unsafe fn load_own(at: u32, member: u32) -> [f32; OWN] {
    let mut own = [0.0; OWN];
    let mut i = 0;
    while i < OWN {
        // SAFETY: the caller's promise.
        [own[i], own[i + 1]] = unsafe { shared::load_f32x2(at + (4 * i as u32 + 2 * member) * 4) };
        i += 2;
    }
    own
}

/// The other way round.
///
/// # Safety
/// - *exclusive*: inside shared memory.
#[inline(always)]
unsafe fn store_own(at: u32, member: u32, own: [f32; OWN]) {
    let mut i = 0;
    while i < OWN {
        // SAFETY: the caller's promise.
        unsafe { shared::store_f32x2(at + (4 * i as u32 + 2 * member) * 4, [own[i], own[i + 1]]) };
        i += 2;
    }
}

/// The same of what the lanes of eight keys have, together.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
unsafe fn over_keys(mut own: [f32; OWN], join: fn(f32, f32) -> f32) -> [f32; OWN] {
    let mut step = 4;
    while step < 32 {
        let mut i = 0;
        while i < OWN {
            // SAFETY: the caller's promise.
            own[i] = join(own[i], unsafe { warp::shuffle_xor_f32(warp::FULL_MASK, own[i], step) });
            i += 1;
        }
        step *= 2;
    }
    own
}

/// The warpgroup of scores and weights.
///
/// # Safety
/// - All 128 threads (*converged*); the rest is the caller's promise to [`splits`].
#[inline(always)]
unsafe fn scores<T: Multiplicand + Multiply<[f32; SUMS]>>(
    tables: Tables,
    stats: *mut f32,
    dims: &AttentionDims,
) {
    let own_thread = thread::thread_idx_x() % 128;
    let (lane, warp_idx) = (own_thread % 32, own_thread / 32);
    let (group, member) = (lane / 4, lane % 4);
    let mut splits = Splits::new(dims, true);
    let (mut turn, mut q_turn) = (Turn(0), Turn(0));
    // Of the row that is the first warp's lane, of the splits of the result so far.
    let (mut joined_m, mut joined_sum) = (0.0, 0.0);
    // SAFETY: what comes from shared memory has come; what is told of a step is written between its keys' arrival and its own, to places
    // that are read before the keys are given back.
    unsafe {
        let mut work: Work<ROWS> = splits.find(tables, dims);
        if !work.has_keys() {
            if own_thread == 0 {
                shared::store_u32(turn.note(), NONE);
            }
            mbarrier::arrive(turn.full_p());
            return;
        }
        loop {
            let is_first_split = splits.is_first;
            if is_first_split {
                mbarrier::wait_parity(q_turn.full_q(), q_turn.parity());
            }
            let [first_step, end] = steps_of(&work);
            let (mut is_last_split, mut goes_on) = (false, false);
            let mut m = [f32::NEG_INFINITY; OWN];
            let mut sums = [0f32; OWN];
            let mut step = first_step;
            while step < end {
                let is_last = step + 1 == end;
                if is_last {
                    let next: Work<ROWS> = splits.next(tables, dims);
                    goes_on = next.has_keys();
                    is_last_split = splits.is_first || !goes_on;
                }
                mbarrier::wait_parity(turn.full_k(), turn.parity());
                // By a shuffle, as above; else the places of all parts of q would be kept in registers.
                let of_warp = |at| warp::shuffle_idx(warp::FULL_MASK, at, 0);
                let mut s = products::<T>(of_warp(turn.keys()), of_warp(q_turn.q()));
                if is_last && is_last_split {
                    warp::sync_warp(warp::FULL_MASK);
                    if lane == 0 {
                        mbarrier::arrive(q_turn.empty_q());
                    }
                }

                let mut i = 0;
                while i < SUMS {
                    s[i] *= dims.scale;
                    i += 1;
                }
                let first_key = step * KEYS as i32;
                if !(work.all.lo <= first_key && first_key + KEYS as i32 <= work.all.hi) {
                    clean::<T>(&work, first_key, turn, own_thread);
                    let mut i = 0;
                    while i < OWN {
                        let row = work.first_row + 4 * (i as u32 & !1) + 2 * member + i as u32 % 2;
                        let visible = work.visible(row, dims);
                        let mut half = 0;
                        while half < 2 {
                            let key = first_key + (16 * warp_idx + group) as i32 + 8 * half as i32;
                            let s = &mut s[i / 2 * 4 + 2 * half + i % 2];
                            *s = if visible.has(key) { *s } else { f32::NEG_INFINITY };
                            half += 1;
                        }
                        i += 1;
                    }
                }

                // Bases stay where no score is far above them: then one word of each warp is all that they have to tell each other.
                let mut is_far = false;
                let mut i = 0;
                while i < OWN {
                    let (at, limit) = (i / 2 * 4 + i % 2, m[i] + SLACK);
                    is_far |= s[at] > limit || s[at + 2] > limit;
                    i += 1;
                }
                let is_far = warp::any(warp::FULL_MASK, is_far);
                if lane == 0 {
                    shared::store_u32(turn.votes() + warp_idx * 4, u32::from(is_far));
                }
                barrier::sync(SCORES, 128);
                let [a, b, c, d] = shared::load_u32x4(turn.votes());
                let is_new = a | b | c | d != 0;
                if is_new {
                    let mut new = m;
                    let mut i = 0;
                    while i < OWN {
                        let at = i / 2 * 4 + i % 2;
                        new[i] = math::max(s[at], s[at + 2]);
                        i += 1;
                    }
                    new = over_keys(new, math::max);
                    if lane < 4 {
                        store_own(turn.maxima() + warp_idx * ROWS * 4, member, new);
                    }
                    barrier::sync(SCORES, 128);
                    new = [f32::NEG_INFINITY; OWN];
                    let mut other = 0;
                    while other < 4 {
                        new = larger(new, load_own(turn.maxima() + other * ROWS * 4, member));
                        other += 1;
                    }
                    let mut decays = [1.0; OWN];
                    let mut i = 0;
                    while i < OWN {
                        // As the row's own scores alone decide.
                        if new[i] > m[i] + SLACK {
                            decays[i] = weight::<T>(m[i] - base(new[i]));
                            sums[i] *= decays[i];
                            m[i] = new[i];
                        }
                        i += 1;
                    }
                    if warp_idx == 0 && lane < 4 {
                        store_own(turn.decays(), member, decays);
                    }
                }
                let mut i = 0;
                while i < OWN {
                    let (at, base) = (i / 2 * 4 + i % 2, base(m[i]));
                    [s[at], s[at + 2]] = [weight::<T>(s[at] - base), weight::<T>(s[at + 2] - base)];
                    sums[i] += s[at] + s[at + 2];
                    i += 1;
                }
                // A word is a key's two neighbouring rows; the exclusive or is that of the key's row of 64 bytes.
                let own_key = 16 * warp_idx + group;
                let own_weights = turn.weights() + own_key * ROWS * 2 + 4 * member;
                let mut i = 0;
                while i < OWN / 2 {
                    let at = 4 * i;
                    let words = T::pack(&[s[at], s[at + 1], s[at + 2], s[at + 3], 0.0, 0.0, 0.0, 0.0]);
                    let to = own_weights + ((i as u32 ^ (own_key / 2 % 4)) << 4);
                    shared::store_u32(to, words[0]);
                    shared::store_u32(to + 8 * ROWS * 2, words[1]);
                    i += 1;
                }
                if is_last {
                    sums = over_keys(sums, |a, b| a + b);
                    if lane < 4 {
                        store_own(totals() + warp_idx * ROWS * 4, member, sums);
                    }
                    if lane < 4 && warp_idx == 0 {
                        store_own(largest(), member, m);
                    }
                    barrier::sync(SCORES, 128);
                    if warp_idx == 0 {
                        let of = |at: u32| shared::load_f32(at + lane * 4);
                        let total = |warp: u32| of(totals() + warp * ROWS * 4);
                        let mut total = (total(0) + total(1)) + (total(2) + total(3));
                        let mut m = of(largest());
                        let mut factors = [1.0; 2];
                        if !is_first_split {
                            factors = meet::<T>(&mut m, joined_m);
                            total = math::fma(total, factors[0], joined_sum * factors[1]);
                        }
                        shared::store_f32(turn.factors()[0] + lane * 4, factors[0]);
                        shared::store_f32(turn.factors()[1] + lane * 4, factors[1]);
                        (joined_m, joined_sum) = (m, total);
                        if is_last_split {
                            let row = work.first_row + lane;
                            let mut slot = NO_SLOT;
                            if row < work.end_row {
                                let at = work.slot(row, dims);
                                slot = at as u32;
                                global::store(stats.add(2 * at), m);
                                global::store(stats.add(2 * at + 1), total);
                            }
                            shared::store_u32(turn.slots() + lane * 4, slot);
                        }
                    }
                }
                if own_thread == 0 {
                    let flag = |is: bool, flag: u32| if is { flag } else { 0 };
                    let word = flag(step == first_step, FIRST)
                        | flag(is_last, LAST)
                        | flag(is_new && step != first_step, DECAYS)
                        | flag(is_last && is_last_split, LAST_SPLIT)
                        | flag(is_last && !goes_on, END);
                    shared::store_u32(turn.note(), word);
                }
                fence::proxy_async_shared();
                mbarrier::arrive(turn.full_p());
                turn.0 += 1;
                step += 1;
            }
            if is_last_split {
                q_turn.0 += 1;
            }
            if !goes_on {
                return;
            }
            // Found again, as it was not worth the registers.
            work = splits.find(tables, dims);
        }
    }
}

/// `k·qᵀ` of a step.
///
/// # Safety
/// - As for [`wgmma::ss`]: a step of keys and 32 rows of q.
#[inline(always)]
unsafe fn products<T: Multiply<[f32; SUMS]>>(keys: u32, q: u32) -> [f32; SUMS] {
    let keys = Descriptor::<KMajor>::new(keys, Swizzle::Bytes128, 16, 8 * ROW_BYTES);
    let q = Descriptor::<KMajor>::new(q, Swizzle::Bytes128, 16, 8 * ROW_BYTES);
    // Three sums, as a product waits for the one before it in its sum.
    let (mut a, mut b, mut c) = ([0.0; SUMS], [0.0; SUMS], [0.0; SUMS]);
    // SAFETY: the caller's promise.
    unsafe {
        wgmma::fence();
        let mut i = 0;
        while i < MAX_HEAD_DIM / 16 {
            let accumulate = if i < 3 { Accumulate::Overwrite } else { Accumulate::Add };
            let (column, within) = (i / 4 * ROW_BYTES, i % 4 * 32);
            let (keys, q) = (keys.advance(column * KEYS + within), q.advance(column * ROWS + within));
            let sum = match i % 3 {
                0 => &mut a,
                1 => &mut b,
                _ => &mut c,
            };
            wgmma::ss::<T, _, _, _>(sum, keys, q, accumulate);
            i += 1;
        }
        wgmma::commit_group();
        wgmma::wait_group::<0>(&mut (&mut a, &mut (&mut b, &mut c)));
    }
    let mut i = 0;
    while i < SUMS {
        a[i] += b[i] + c[i];
        i += 1;
    }
    a
}

/// Of a step's keys that not all rows see, the values that are not finite become 0.
///
/// # Safety
/// - All 128 threads; the step's scores are done, and nobody has been told of it.
#[inline(always)]
unsafe fn clean<T: Multiplicand>(work: &Work<ROWS>, first_key: i32, turn: Turn, own_thread: u32) {
    let key = own_thread / 2;
    if work.all.has(first_key + key as i32) {
        return;
    }
    // Every second box is the thread's.
    let mut at = turn.keys() + (own_thread % 2 * KEYS + key) * ROW_BYTES;
    let end = turn.keys() + MAX_HEAD_DIM_V / 64 * KEYS * ROW_BYTES;
    while at < end {
        let mut i = 0;
        while i < 8 {
            // SAFETY: the key's row of a box.
            unsafe {
                let words = shared::load_u32x4(at + i * 16);
                // From the halves' highest bits to all of theirs.
                let kept = words.map(|word| word & !((not_finite::<T>(word) >> 15) * 0xffff));
                shared::store_u32x4(at + i * 16, kept);
            }
            i += 1;
        }
        at += 2 * KEYS * ROW_BYTES;
    }
}

/// A warpgroup of values: 256 columns.
///
/// # Safety
/// - All 128 threads (*converged*); the rest is the caller's promise to [`splits`].
#[inline(always)]
unsafe fn values<T: Multiplicand + Multiply<[f32; SUMS]>>(half: u32, partial: *mut f32) {
    let lane = thread::lane();
    let member = lane % 4;
    let mut turn = Turn(0);
    let mut o = [[0f32; SUMS]; PARTS];
    // To which −0 a first split is added as it is, whatever the sign of its zeros.
    let mut joined = [[-0f32; SUMS]; PARTS];
    // SAFETY: a step has come, and what is told of it; results go to the slots of the rows that there are.
    unsafe {
        loop {
            mbarrier::wait_parity(turn.full_p(), turn.parity());
            let word = shared::load_u32(turn.note());
            if word == NONE {
                return;
            }
            // What TMA wrote is seen by those who waited for it.
            mbarrier::wait_parity(turn.full_k(), turn.parity());
            if word & DECAYS != 0 {
                let decays = load_own(turn.decays(), member);
                let mut i = 0;
                while i < PARTS * SUMS {
                    let sum = i % SUMS;
                    o[i / SUMS][sum] *= decays[sum / 4 * 2 + sum % 2];
                    i += 1;
                }
            }
            let accumulate = if word & FIRST != 0 { Accumulate::Overwrite } else { Accumulate::Add };
            let boxes = turn.keys() + half * PARTS as u32 * KEYS * ROW_BYTES;
            let v = Descriptor::<MnMajor>::new(boxes, Swizzle::Bytes128, KEYS * ROW_BYTES, 8 * ROW_BYTES);
            let p = Descriptor::<MnMajor>::new(turn.weights(), Swizzle::Bytes64, WEIGHT_BYTES, 8 * ROWS * 2);
            wgmma::fence();
            let mut i = 0;
            while i < KEYS / 16 {
                let accumulate = if i == 0 { accumulate } else { Accumulate::Add };
                let mut part = 0;
                while part < PARTS {
                    let v = v.advance(part as u32 * KEYS * ROW_BYTES + i * 16 * ROW_BYTES);
                    wgmma::ss::<T, _, _, _>(&mut o[part], v, p.advance(i * 16 * ROWS * 2), accumulate);
                    part += 1;
                }
                i += 1;
            }
            wgmma::commit_group();
            let [a, b, c, d] = &mut o;
            wgmma::wait_group::<0>(&mut (&mut (a, b), &mut (c, d)));
            // All that is told of the step is read before its keys are given back.
            let (mut own, mut before) = ([0.0; OWN], [0.0; OWN]);
            if word & LAST != 0 {
                (own, before) = (load_own(turn.factors()[0], member), load_own(turn.factors()[1], member));
            }
            let give_back = || {
                warp::sync_warp(warp::FULL_MASK);
                if lane == 0 {
                    mbarrier::arrive(turn.empty_k());
                }
            };
            if word & LAST_SPLIT == 0 {
                give_back();
            }
            if word & LAST != 0 {
                let mut i = 0;
                while i < PARTS * SUMS {
                    let (part, sum) = (i / SUMS, i % SUMS);
                    let row = sum / 4 * 2 + sum % 2;
                    let (o, joined) = (o[part][sum], &mut joined[part][sum]);
                    *joined = math::fma(o, own[row], *joined * before[row]);
                    i += 1;
                }
            }
            if word & LAST_SPLIT != 0 {
                // By way of the warpgroup's own boxes of values, which nobody else reads: whole rows at a time.
                // Opaque, or what is known of the thread would be kept in registers.
                let own_thread = thread::opaque(thread::thread_idx_x() + turn.0 * 128) % 128;
                let (group, warp_idx) = (own_thread % 32 / 4, own_thread / 32);
                let own_barrier = VALUES + half;
                barrier::sync(own_barrier, 128);
                let at = |row: u32, col: u32| boxes + row * RESULT_BYTES + ((col ^ (row / 2 % 4 * 8)) << 2);
                let mut i = 0;
                while i < PARTS * SUMS {
                    let (part, sum) = (i / SUMS, i % SUMS);
                    let row = (sum / 4 * 8 + sum % 2) as u32 + 2 * member;
                    let col = (part * 64 + sum / 2 % 2 * 8) as u32 + 16 * warp_idx + group;
                    shared::store_f32(at(row, col), joined[part][sum]);
                    i += 1;
                }
                barrier::sync(own_barrier, 128);
                // A thread has a piece of every second row. Rows that there are not come last.
                let (first_row, col) =
                    (own_thread / (RESULT_BYTES / 16), own_thread % (RESULT_BYTES / 16) * 4);
                let mut i = 0;
                while i < ROWS / 2 {
                    let (mut slots, mut words) = ([NO_SLOT; LOTS], [[0; 4]; LOTS]);
                    let mut j = 0;
                    while j < LOTS {
                        let row = first_row + 2 * (i + j as u32);
                        slots[j] = shared::load_u32(turn.slots() + row * 4);
                        words[j] = shared::load_u32x4(at(row, col));
                        j += 1;
                    }
                    let mut j = 0;
                    while j < LOTS {
                        if slots[j] != NO_SLOT {
                            let to = partial.add(slots[j] as usize * MAX_HEAD_DIM_V as usize);
                            global::store_x4(to.add((half * RESULT_BYTES / 4 + col) as usize), words[j]);
                        }
                        j += 1;
                    }
                    // Opaque, so that the loop stays one.
                    i = if slots[LOTS - 1] == NO_SLOT { ROWS } else { thread::opaque(i + LOTS as u32) };
                }
                fence::proxy_async_shared();
                give_back();
                joined = [[-0.0; SUMS]; PARTS];
            }
            if word & END != 0 {
                return;
            }
            turn.0 += 1;
        }
    }
}
