//! Few queries against a long cache on the tensor cores of Ampere and later: `cp.async` keeps k and v coming through a ring in
//! shared memory, from one split of 256 keys to the next.
//!
//! Work split: as in `decode`, but the rows of a split, pairs of a query and a head of those that share a key head, are the 16
//! rows of `mma.sync`. Blocks are as many as the card holds at a time; each takes every so many-th split, or every so many-th group of
//! four that follow each other. Heads go first, since their keys are neighbours in memory. A warp does every fourth 16 keys of a
//! split, by itself up to the end.
//!
//! ```text
//! shared   a ring per warp: | 16 rows of k, or of v | × PLACES |    | results [4 warps][16 rows][≤ 128] | maxima | sums | marks |
//!          beside fp8, heads up to 128: | q |         of groups: | maxima × 2 | sums | what has been joined [rows][DIM] |
//!
//! each chunk of 16 keys   wait for its copies ── multiply ── start the copies of the chunk PLACES further into its place
//! s = q·kᵀ    the warp's 64 keys: four chunks
//! p           masks, unless all rows see all keys; the warp's own maximum m and sum l; rounded, the next product's operand as they are
//! o = p·v     four chunks; behind them those of the next split's k start
//! at the end  o · 2^(m − the block's m) of the four warps meet in shared memory, 128 columns at a time; meanwhile the next split's
//!             q is loaded. Of a group, they are joined to those of the splits before; the last one's go to the workspace
//! ```
//!
//! - Nobody waits for another warp until its 64 keys are done, and the ring fills meanwhile.
//! - Keys that no row sees, and columns beyond a head, are not read but filled with zeros. Pieces of 16 bytes are moved by an
//!   exclusive or with their row, so that what is read at a time comes from different banks: by `ldmatrix` eight rows of v.
//! - The columns of q and k are multiplied in another order: a lane's operands of two steps of `mma` are 16 bytes of a row, of q
//!   loaded at a time from global memory, of k from the ring.
//! - A row's bits depend on its own keys alone: tensor cores keep rows apart, and a weight of 0 adds nothing.
//! - 0 · NaN would carry a value that a row does not see into it. That can be where the rows of a block see different keys only:
//!   there the products are made again without what is not finite, which is added in the end to the rows that see it.
//! - A page has a multiple of 16 keys, so a chunk is of one: looked up once, when its copies start.
//! - A chunk of which all rows and columns are there is copied without a predicate, the others in a loop. What is known of a split
//!   is found once, without divisions, and kept; heads of 256 have no registers for all of it.
//! - fp8 lies in the ring as it is and is widened before `mma` ([`Cached`]): the scale of a head's keys joins that of the scores, the
//!   scale of its values multiplies the results. It is widened to binary16, which is a quarter of the instructions of bfloat16, so
//!   q of that type is brought to binary16 too, exactly: a row by a power of two. That is done once for all warps, in shared memory.
//!   Where binary16 has not all elements of a tile, its block multiplies in bfloat16, with the same bits ([`SharedQueries`]).
//! - To be mended: weights beside fp8 are binary16 too, and end at 2^-25, where those of bfloat16 go on. A column in which the heavy keys
//!   have a value of 0 is made of the light ones alone: `planned_fp8` finds it now and then (7 queries, 4 keys, one head of 208, queries times 16).
//!   Weights times 2^15, which the values' scale can take back, would end at 2^-40.
//!
//! # Measured on an H200, head dim 128, with the merge
//!
//! | sequences, heads, keys | bf16 µs | GB/s | fp8 µs | cuDNN, bf16 | FlashAttention-2, bf16 |
//! |---|---|---|---|---|---|
//! | 64, 32 on 8, 4096 | 255 | 4210 | 156 | 238 | 400 |
//! | 256, 32 on 8, 2048 | 507 | 4242 | 283 | 474 | 789 |
//! | 1, 32 on 8, 32768 | 37.8 | 3549 | 34.7 | 38.2 | 47.4 |
//! | 8, 32 on 4, 8192 | 39.2 | 3431 | | 38.0 | 45.0 |
//!
//! A copy makes 4220 GB/s there. What was worth how much at 64 × 4096: the ring, 128 KiB on their way on a multiprocessor also from one
//! split to the next, 314 → 268 µs (without it 12 to 16 loads of 16 bytes per lane were kept in registers, and each block began with nothing
//! on its way); half the instructions (about 2650 per warp and split → 1320) nothing, as schedulers issue in a fifth of the cycles; for fp8
//! (3150 → 1710) 200 → 152 µs, where they issue in two fifths; the merge by one warp a row instead of a block 13 → 8.3 µs by itself,
//! which with as many splits for each block made 267 → 266 of both, 41.6 → 38.8 at 1 × 32768, and 39.6 → 41.2 at 8 × 8192: there the merge
//! had blocks of eight warps with 145 registers, one on a multiprocessor at a time.
//!
//! cuDNN, which writes no partial results and has no merge, is above a copy's rate. The splits' results were 16.8 MB that are written and
//! read again: hence the groups, which all four cases have in bf16, with a quarter of that: 266 → 254 µs, and 42.0 → 39.6 at 8 × 8192.
//! The merge is 5.1 µs of the first case, 3.7 of the last two (each kernel by itself). A group is joined by the same operations whoever
//! joins it, so a row's bits do not tell. That costs the merge where the kernel has joined nothing: fp8's three blocks on a multiprocessor
//! have three splits each of 1 × 32768, fewer than a group, and the merge of its 128 takes 5.9 µs. With groups where there is a balance and what is known
//! of the next split kept, fp8 takes 283 µs of 256 × 2048; without groups 306, with it found again 287.

use abi::ops::attention::{
    AttentionDims, DECODE_RING_COLUMNS, DECODE_RING_GROUP_NUMBERS_BYTES, DECODE_RING_PADDING,
    DECODE_RING_ROWS, SPLIT_KEYS, THREADS, decode_ring_joins, decode_ring_q_bytes,
};
use cuda_std::cvt::Element;
use cuda_std::{cp_async, global, math, matrix, shared, thread, warp};

use super::cached::{Cached, Keys, head_scale};
use super::queries::{SharedQueries, load_queries, operands};
use super::scores::{capped, has_cap};
use super::work::{Splits, Work};
use super::{Tables, Visible, offset};
use crate::tile::multiplicand::{Factor, Multiplicand, not_finite};
use crate::tile::softmax::{base, meet, weight};

const ROWS: u32 = DECODE_RING_ROWS;
const WARPS: u32 = THREADS / 32;
/// Keys of a chunk.
const CHUNK: u32 = 16;
/// Chunks of k of a warp, and of v.
const CHUNKS: usize = (SPLIT_KEYS / WARPS / CHUNK) as usize;

/// What the pieces of a row are moved by, of which it has so many: of rows without a bit in common that is what each is moved by,
/// together.
#[inline(always)]
fn turn(pieces: u32, row: u32) -> u32 {
    // Of four pieces, two rows lie in all the banks. Of more, the exclusive or takes two neighbours to different halves of them:
    // v is read eight rows at a time, a piece of each, and k two rows, four pieces of each.
    row / 2 % 4 + if pieces < 8 { 0 } else { row % 2 * 4 }
}

/// What a lane copies of a chunk: a piece of every so many-th row.
#[derive(Clone, Copy)]
struct Share {
    first_row: u32,
    piece: u32,
}

impl Share {
    #[inline(always)]
    fn new(pieces: u32, lane: u32) -> Self {
        Share { first_row: lane / pieces, piece: lane % pieces }
    }

    /// Starts the copies of a chunk, all of which there is, from the share's first piece on.
    ///
    /// # Safety
    /// - *converged*: the whole warp, whose own the place is; the rows *in-bounds* and *aligned(16)*.
    #[inline(always)]
    unsafe fn copy<C>(self, pieces: u32, from: *const C, stride: u32, place: u32) {
        let rows_at_once = 32 / pieces;
        let place = place + self.first_row * pieces * 16 + ((self.piece ^ turn(pieces, self.first_row)) << 4);
        let mut from = from;
        let mut i = 0;
        while i < pieces / 2 {
            let row = i * rows_at_once;
            // SAFETY: an existing row; inside the place, which begins at a multiple of 128 bytes.
            unsafe { cp_async::cg_16((place ^ turn(pieces, row) << 4) + row * pieces * 16, from) };
            from = from.wrapping_add(rows_at_once as usize * stride as usize);
            i += 1;
        }
    }

    /// The same with zeros for keys that are not among `keys`, the chunk's first being 0, and beyond the first `width_pieces`.
    ///
    /// # Safety
    /// - As for [`Share::copy`] of those that there are.
    #[inline(always)]
    unsafe fn copy_some<C>(
        self,
        pieces: u32,
        from: *const C,
        stride: u32,
        place: u32,
        keys: Visible,
        width_pieces: u32,
    ) {
        let rows_at_once = 32 / pieces;
        let mut from = from;
        let mut i = 0;
        while i < pieces / 2 {
            let row = self.first_row + i * rows_at_once;
            let bytes = if keys.has(row as i32) && self.piece < width_pieces { 16 } else { 0 };
            let to = place + row * pieces * 16 + ((self.piece ^ turn(pieces, row)) << 4);
            // SAFETY: an existing row, or no byte of it; inside the place.
            unsafe { cp_async::cg_16_fill(to, from, bytes) };
            from = from.wrapping_add(rows_at_once as usize * stride as usize);
            // Opaque, so that the loop stays one.
            i = thread::opaque(i + 1);
        }
    }
}

/// Waits for the copies of the chunk that comes next, `PLACES` of which are under way.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
unsafe fn wait<const PLACES: usize>() {
    match PLACES {
        8 => cp_async::wait_group::<7>(),
        4 => cp_async::wait_group::<3>(),
        _ => cp_async::wait_group::<1>(),
    }
    // SAFETY: the caller's promise.
    unsafe { warp::sync_warp(warp::FULL_MASK) };
}

/// The first key of a chunk.
#[inline(always)]
fn key_of(work: &Work, chunk: usize, warp_idx: u32) -> i32 {
    work.first_key() + (((chunk % CHUNKS) as u32 * WARPS + warp_idx) * CHUNK) as i32
}

/// The products of a warp's keys and a split's rows, and the copies that follow: `start` is given the chunk that has been read.
///
/// # Safety
/// - *converged*: the whole warp; the rest is the caller's promise to [`splits`].
#[inline(always)]
unsafe fn products<M: Multiplicand, C: Keys<M>, const STEPS: usize, const PLACES: usize>(
    queries: &[[u32; 4]; STEPS],
    lane: u32,
    pieces: u32,
    place_of: impl Fn(usize) -> u32,
    start: impl Fn(usize),
) -> [[f32; 4]; 2 * CHUNKS] {
    let (group, member) = (lane / 4, lane % 4);
    let steps_of_piece = 4 * STEPS / pieces as usize;
    let mut s = [[0f32; 4]; 2 * CHUNKS];
    let mut chunk = 0;
    while chunk < CHUNKS {
        // SAFETY: the caller's promise.
        unsafe {
            wait::<PLACES>();
            // A piece of keys `group` and eight further on, of every four.
            let at = place_of(chunk) + group * pieces * 16;
            let mut i = 0;
            while i < pieces as usize / 4 {
                let piece = (i as u32 % 2 * 4) ^ member ^ turn(pieces, group);
                let at = at + (piece << 4) + i as u32 / 2 * 128;
                let near = C::keys(shared::load_u32x4(at));
                let far = C::keys(shared::load_u32x4(at + 8 * pieces * 16));
                let mut j = 0;
                while j < steps_of_piece {
                    let query = queries[steps_of_piece * i + j];
                    s[2 * chunk] = M::multiply_add(query, near[j], s[2 * chunk]);
                    s[2 * chunk + 1] = M::multiply_add(query, far[j], s[2 * chunk + 1]);
                    j += 1;
                }
                i += 1;
            }
            warp::sync_warp(warp::FULL_MASK);
        }
        start(chunk);
        chunk += 1;
    }
    s
}

/// The whole block. See the module.
///
/// # Safety
/// - Blocks of [`THREADS`] threads; tensors and workspace *in-bounds*, the rows of the tensors *aligned(16)* — checked in
///   `Attention::run`. `STEPS` is `DIM / 16`, `TILES` `DIM / 8`; `PLACES` is 2, 4 or 8.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn splits<
    T: Multiplicand,
    C: Cached<T> + Keys<T> + Keys<C::Values>,
    const DIM: u32,
    const STEPS: usize,
    const TILES: usize,
    const PLACES: usize,
>(
    q: *const T,
    k: *const C,
    v: *const C,
    k_scale: *const f32,
    v_scale: *const f32,
    tables: Tables,
    partial: *mut f32,
    stats: *mut f32,
    dims: &AttentionDims,
) {
    let warp_idx = thread::warp_idx();
    let pieces = DIM / C::PER_PIECE;
    let row_bytes = pieces * 16;
    let place_bytes = CHUNK * row_bytes;
    let ring = shared::base() + warp_idx * (PLACES as u32 * place_bytes);
    let ring_end = shared::base() + WARPS * PLACES as u32 * place_bytes;
    let columns = if DIM < DECODE_RING_COLUMNS { DIM } else { DECODE_RING_COLUMNS };
    let shared_queries =
        SharedQueries { at: ring_end + WARPS * (ROWS * (columns + DECODE_RING_PADDING + 2) + 1) * 4 };
    let joined = shared_queries.at + decode_ring_q_bytes(DIM, 16 / C::PER_PIECE);
    // For what would be kept from one split to the next; and for all that is known of the next split, while v is multiplied.
    let has_registers = DIM <= 128;
    // fp8 at 128 has the registers for that on Hopper alone; the simulator runs the other form of it, which knows the same.
    let keeps_next = DIM < 128 || (has_registers && (C::PARTS == 1 || cfg!(target_feature = "sm_90a")));
    let shares_q = decode_ring_q_bytes(DIM, 16 / C::PER_PIECE) != 0;
    // Of chunk number 0, 1, … of k, then of v.
    let place_of = |chunk: usize| ring + (chunk % PLACES) as u32 * place_bytes;

    // SAFETY: keys inside `any` are below the sequence's length, rows below `end_row` inside q and the workspace —
    // Attention::run. What the branches around barriers and shuffles depend on is the same in the whole block. A place is filled
    // anew by the warp that has read it, all of it behind `sync_warp`.
    unsafe {
        let share = Share::new(pieces, thread::lane());
        let start = |work: &Work, chunk: usize| {
            if work.has_keys() {
                let first_key = key_of(work, chunk, warp_idx);
                let mut share = share;
                if !has_registers {
                    // Opaque, or the places of all pieces would be kept in registers for the next chunk.
                    let salt = (first_key as u32 + chunk as u32) * 32;
                    share = Share::new(pieces, thread::opaque(thread::lane() + salt) % 32);
                }
                let (strides, width) = if chunk < CHUNKS {
                    ((dims.k_batch_stride, dims.k_token_stride, dims.k_head_stride), dims.head_dim)
                } else {
                    ((dims.v_batch_stride, dims.v_token_stride, dims.v_head_stride), dims.head_dim_v)
                };
                // A page has a multiple of 16 keys, so all of a chunk are of one: that of the nearest key that there is.
                let from = |nearest: i32| {
                    let page = work.pages.page(dims, nearest);
                    let row = work.pages.row_in_page(dims, first_key) + share.first_row;
                    let at = offset(page, strides.0, row, strides.1, work.head_kv, strides.2);
                    let of_piece = (share.piece * C::PER_PIECE) as usize;
                    (if chunk < CHUNKS { k } else { v }).wrapping_add(at + of_piece)
                };
                let any = work.any;
                if width == DIM && any.lo <= first_key && first_key + CHUNK as i32 <= any.hi {
                    share.copy(pieces, from(first_key), strides.1, place_of(chunk));
                } else {
                    let keys = Visible { lo: any.lo - first_key, hi: any.hi - first_key };
                    let from = from(first_key.clamp(any.lo, any.hi - 1));
                    share.copy_some(pieces, from, strides.1, place_of(chunk), keys, width / C::PER_PIECE);
                }
            }
            cp_async::commit_group();
        };

        let mut splits = Splits::new(dims, decode_ring_joins(DIM));
        let mut work: Work = splits.find(tables, dims);
        let mut is_first = true;
        let mut chunk = 0;
        while chunk < PLACES {
            start(&work, chunk);
            chunk += 1;
        }
        let mut loaded = [[0u32; 4]; STEPS];
        if !work.has_keys() || !has_registers {
            // Nothing is loaded.
        } else if shares_q {
            let part = SharedQueries::load(q, &work, STEPS, dims);
            shared_queries.store::<T, C::Values>(part, STEPS, 0);
            thread::sync_threads();
        } else {
            loaded = load_queries::<T, C, STEPS>(q, &work, thread::lane(), dims);
        }
        while work.has_keys() {
            // Opaque, or the places of all that is read would be kept in registers for the next split.
            let lane = thread::opaque(thread::lane() + work.split * 32) % 32;
            let (group, member) = (lane / 4, lane % 4);
            // Where all of a split's k is on its way, what follows it is of the next split.
            let ahead = if PLACES > CHUNKS { splits.next(tables, dims) } else { work };
            // The chunk `PLACES` further on goes where the one that was read is.
            let go_on = |chunk: usize| start(&ahead, (chunk + PLACES) % (2 * CHUNKS));
            let mut is_shared = shares_q;
            if shares_q && T::INFINITIES != C::Values::INFINITIES {
                let [a, b, c, d] = shared::load_u32x4(shared_queries.marks(STEPS));
                is_shared = a | b | c | d == 0;
            }
            let mut scales = [dims.scale * head_scale::<T, C>(k_scale, work.head_kv); 2];
            let mut s = if is_shared {
                let at = shared_queries.inverses(STEPS) + group * 4;
                scales = [scales[0] * shared::load_f32(at), scales[1] * shared::load_f32(at + 32)];
                let mut queries = [[0; 4]; STEPS];
                let mut i = 0;
                while i < STEPS {
                    queries[i] = shared::load_u32x4(shared_queries.at + (i as u32 * 32 + lane) * 16);
                    i += 1;
                }
                products::<C::Values, C, STEPS, PLACES>(&queries, lane, pieces, place_of, go_on)
            } else {
                let loaded = if has_registers && !shares_q {
                    loaded
                } else {
                    load_queries::<T, C, STEPS>(q, &work, lane, dims)
                };
                let queries = operands(&loaded, &work, lane);
                products::<T, C, STEPS, PLACES>(&queries, lane, pieces, place_of, go_on)
            };

            // Weights, of the warp's keys by themselves.
            let mut m = [f32::NEG_INFINITY; 2];
            if has_cap(dims) {
                let mut i = 0;
                while i < 8 * CHUNKS {
                    s[i / 4][i % 4] = capped(s[i / 4][i % 4] * scales[i / 2 % 2], dims);
                    i += 1;
                }
                scales = [1.0; 2];
            }
            if work.is_whole() {
                let mut i = 0;
                while i < 8 * CHUNKS {
                    let s = &mut s[i / 4][i % 4];
                    *s *= scales[i / 2 % 2];
                    m[i / 2 % 2] = math::max(m[i / 2 % 2], *s);
                    i += 1;
                }
            } else {
                let rows = [work.first_row + group, work.first_row + group + 8];
                let visible = [work.visible(rows[0], dims), work.visible(rows[1], dims)];
                let mut i = 0;
                while i < 8 * CHUNKS {
                    let half = i / 2 % 2;
                    let key =
                        key_of(&work, i / 8, warp_idx) + (i / 4 % 2 * 8 + i % 2) as i32 + 2 * member as i32;
                    let s = &mut s[i / 4][i % 4];
                    *s = if visible[half].has(key) { *s * scales[half] } else { f32::NEG_INFINITY };
                    m[half] = math::max(m[half], *s);
                    i += 1;
                }
            }
            m = [warp::max_f32::<4>(m[0]), warp::max_f32::<4>(m[1])];
            let bases = [base(m[0]), base(m[1])];
            let mut sums = [0f32; 2];
            let mut p = [[0u32; 4]; CHUNKS];
            let mut i = 0;
            while i < CHUNKS {
                let mut eight = [0f32; 8];
                let mut j = 0;
                while j < 8 {
                    let half = j / 2 % 2;
                    eight[j] = weight::<T>(s[2 * i + j / 4][j % 4] - bases[half]);
                    sums[half] += eight[j];
                    j += 1;
                }
                p[i] = C::Values::pack(&eight);
                i += 1;
            }
            sums = [warp::sum_f32::<4>(sums[0]), warp::sum_f32::<4>(sums[1])];
            // All four lanes of a row know them: each keeps one.
            let numbers = if member < 2 { m } else { sums };
            let number = if member % 2 == 0 { numbers[0] } else { numbers[1] };

            let next = if PLACES > CHUNKS { ahead } else { splits.next(tables, dims) };
            let mut part = [[0; 4]; 2];
            if shares_q && next.has_keys() {
                part = SharedQueries::load(q, &next, STEPS, dims);
            }
            let is_alike = work.is_alike();
            let mut o = [[0f32; 4]; TILES];
            let mut chunk = 0;
            while chunk < CHUNKS {
                wait::<PLACES>();
                let at = place_of(CHUNKS + chunk) + lane % 16 * row_bytes;
                let mut j = 0;
                while j < TILES {
                    let from = j / C::PARTS;
                    let piece = (from as u32 % 8) ^ (lane / 16) ^ turn(pieces, lane % 8);
                    let [a, b, c, d] = matrix::load_x4_trans(at + (piece << 4) + from as u32 / 8 * 128);
                    let (left, right) = (C::values([a, b]), C::values([c, d]));
                    let mut i = 0;
                    while i < C::PARTS {
                        let (l, r) = (j + i, j + C::PARTS + i);
                        o[l] = C::Values::multiply_add(p[chunk], left[i], o[l]);
                        o[r] = C::Values::multiply_add(p[chunk], right[i], o[r]);
                        i += 1;
                    }
                    j += 2 * C::PARTS;
                }
                warp::sync_warp(warp::FULL_MASK);
                match (chunk + PLACES).checked_sub(CHUNKS) {
                    Some(of_next) => start(&next, of_next),
                    None => start(&work, CHUNKS + chunk + PLACES),
                }
                chunk += 1;
            }

            let is_last = splits.is_first || !next.has_keys();
            let end = End { work, is_alike, is_first, is_last, number, results: ring_end, joined };
            end.store::<T, C, DIM, TILES>(&o, &p, v, v_scale, tables, partial, stats, dims, || {
                if shares_q {
                    shared_queries.store::<T, C::Values>(part, STEPS, next.split);
                } else if has_registers && next.has_keys() {
                    loaded = load_queries::<T, C, STEPS>(q, &next, lane, dims);
                }
            });
            work = if keeps_next { next } else { next.again(tables, dims) };
            is_first = is_last;
        }
        cp_async::wait_group::<0>();
    }
}

/// What a thread knows when its products are done.
struct End {
    /// Its numbers and rows. More is found again where it is needed.
    work: Work,
    /// Whether all rows see the same keys of the split.
    is_alike: bool,
    /// Whether the split is the first of its result, and the last.
    is_first: bool,
    is_last: bool,
    /// Of the maxima of its two rows and their sums, of the warp's keys, the one that is the lane's.
    number: f32,
    /// Shared memory behind the ring.
    results: u32,
    /// And for what the splits of a result have been joined to.
    joined: u32,
}

impl End {
    /// The four warps' results as one. `meanwhile` is done once o is in shared memory, between two barriers.
    ///
    /// # Safety
    /// - *converged*: the whole block; the rest is the caller's promise to [`splits`].
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn store<T: Multiplicand, C: Cached<T>, const DIM: u32, const TILES: usize>(
        &self,
        o: &[[f32; 4]; TILES],
        p: &[[u32; 4]; CHUNKS],
        v: *const C,
        v_scale: *const f32,
        tables: Tables,
        partial: *mut f32,
        stats: *mut f32,
        dims: &AttentionDims,
        mut meanwhile: impl FnMut(),
    ) {
        let End { work, is_alike, is_first, is_last, number, results, joined } = *self;
        // Opaque, or what is known of the thread and the split would take up registers while o does.
        let thread = thread::opaque(thread::thread_idx_x() + work.split * THREADS) % THREADS;
        let (lane, warp_idx) = (thread % 32, thread / 32);
        let (group, member) = (lane / 4, lane % 4);
        let columns = if DIM < DECODE_RING_COLUMNS { DIM } else { DECODE_RING_COLUMNS };
        let row_bytes = (columns + DECODE_RING_PADDING) * 4;
        let maxima = results + WARPS * ROWS * row_bytes;
        let totals = maxima + WARPS * ROWS * 4;
        let marks = totals + WARPS * ROWS * 4;
        // SAFETY: as in `splits`; between the two barriers a warp writes its own rows of shared memory only.
        unsafe {
            let num_rows = work.end_row - work.first_row;
            let v_scale = head_scale::<T, C>(v_scale, work.head_kv);
            let mut first_column = 0;
            while first_column < DIM {
                // The results before these have been read.
                thread::sync_threads();
                let numbers = if member < 2 { maxima } else { totals };
                let row = group + 8 * (member % 2);
                if row < num_rows {
                    shared::store_f32(numbers + (warp_idx * ROWS + row) * 4, number);
                }
                let mut half = 0;
                while half < 2 {
                    let row = group + 8 * half as u32;
                    if row < num_rows {
                        let at = results + (warp_idx * ROWS + row) * row_bytes + member * 8 * C::PARTS as u32;
                        let mut j = 0;
                        while j < columns as usize / 8 {
                            let (tile, at) = (first_column as usize / 8 + j, at + j as u32 * 32);
                            let [a, b] = [o[tile][2 * half], o[tile][2 * half + 1]];
                            if C::PARTS == 1 {
                                shared::store_f32(at, a);
                                shared::store_f32(at + 4, b);
                            } else {
                                // The columns between them are the next tile's.
                                let next = o[tile + 1];
                                shared::store_f32x4(at, [a, next[2 * half], b, next[2 * half + 1]]);
                            }
                            j += C::PARTS;
                        }
                    }
                    half += 1;
                }
                let mut is_marked = false;
                if !is_alike {
                    let mut zero = 0.0;
                    let mut i = 0;
                    while i < columns as usize / 2 {
                        zero = math::fma(o[first_column as usize / 8 + i / 4][i % 4], 0.0, zero);
                        i += 1;
                    }
                    // 0 · NaN of a key that a row does not see: once more, without what is not finite of such keys.
                    if warp::any(warp::FULL_MASK, zero != 0.0) {
                        // Other lanes' columns.
                        warp::sync_warp(warp::FULL_MASK);
                        let work = work.again(tables, dims);
                        let Work { pages, all, .. } = work;
                        let head = offset(0, 0, 0, 0, work.head_kv, dims.v_head_stride);
                        let mut j = 0;
                        // Opaque, so that the loop stays one.
                        while j < thread::opaque(columns / 8) {
                            let column = first_column + j * 8 + group;
                            let mut tile = [0f32; 4];
                            let mut chunk = 0;
                            while chunk < CHUNKS {
                                let mut halves = [0u32; 4];
                                let mut i = 0;
                                while i < 4 {
                                    let key = key_of(&work, chunk, warp_idx)
                                        + 2 * member as i32
                                        + (i / 2 * 8 + i % 2) as i32;
                                    if work.any.has(key) && column < dims.head_dim_v {
                                        let at = head
                                            + pages.row(dims, key, dims.v_batch_stride, dims.v_token_stride);
                                        halves[i] = C::value_bits(v.wrapping_add(at + column as usize));
                                        if !all.has(key) && not_finite::<C::Values>(halves[i]) != 0 {
                                            halves[i] = 0;
                                            is_marked = true;
                                        }
                                    }
                                    i += 1;
                                }
                                let pairs = [halves[0] | halves[1] << 16, halves[2] | halves[3] << 16];
                                tile = C::Values::multiply_add(p[chunk], pairs, tile);
                                chunk += 1;
                            }
                            let mut i = 0;
                            while i < 4 {
                                let row = group + 8 * (i / 2) as u32;
                                let at = results + (warp_idx * ROWS + row) * row_bytes + member * 8 + j * 32;
                                shared::store_f32(at + (i % 2) as u32 * 4, tile[i]);
                                i += 1;
                            }
                            j += 1;
                        }
                    }
                }
                is_marked = warp::any(warp::FULL_MASK, is_marked);
                if lane == 0 {
                    shared::store_u32(marks + warp_idx * 4, u32::from(is_marked));
                }

                if first_column + columns == DIM {
                    meanwhile();
                }

                // The block's maximum and sum, and the warps' results relative to it.
                thread::sync_threads();
                let [a, b, c, d] = shared::load_u32x4(marks);
                let is_marked = a | b | c | d != 0;
                let of_warp =
                    |base: u32, warp: u32, row: u32| shared::load_f32(base + (warp * ROWS + row) * 4);
                let largest = |row: u32| {
                    math::max(
                        math::max(of_warp(maxima, 0, row), of_warp(maxima, 1, row)),
                        math::max(of_warp(maxima, 2, row), of_warp(maxima, 3, row)),
                    )
                };
                let decay =
                    |warp: u32, row: u32| weight::<T>(of_warp(maxima, warp, row) - base(largest(row)));
                // The largest score of the splits before, whose place is another for each split, as it is read until all are done
                // with this one; and what they and this one are multiplied by.
                let joined_m = |split: u32, row: u32| joined + (split % 2 * ROWS + row) * 4;
                let meet_joined = |m: &mut f32, row: u32| {
                    let before = shared::load_f32(joined_m(work.split + 1, row));
                    meet::<T>(m, before)
                };
                if first_column == 0 && thread < num_rows {
                    let total = |warp: u32| of_warp(totals, warp, thread) * decay(warp, thread);
                    let mut total = (total(0) + total(1)) + (total(2) + total(3));
                    let mut m = largest(thread);
                    let joined_sum = joined + (2 * ROWS + thread) * 4;
                    if !is_first {
                        let [own, of_before] = meet_joined(&mut m, thread);
                        total = math::fma(total, own, shared::load_f32(joined_sum) * of_before);
                    }
                    if is_last {
                        let stats = stats.add(2 * work.slot(work.first_row + thread, dims));
                        global::store(stats, m);
                        global::store(stats.add(1), total);
                    } else {
                        shared::store_f32(joined_m(work.split, thread), m);
                        shared::store_f32(joined_sum, total);
                    }
                }
                let quads = columns / 4;
                let mut i = thread;
                while i < num_rows * quads {
                    let (row, quad) = (i / quads, i % quads);
                    let column = first_column + quad * 4;
                    if column < dims.head_dim_v {
                        let mut totals = [0f32; 4];
                        let mut warp = 0;
                        while warp < WARPS {
                            let at = results + (warp * ROWS + row) * row_bytes + quad * 16;
                            let (values, decay) = (shared::load_f32x4(at), decay(warp, row));
                            let mut j = 0;
                            while j < 4 {
                                totals[j] = math::fma(values[j], decay, totals[j]);
                                j += 1;
                            }
                            warp += 1;
                        }
                        if is_marked {
                            // What was left out of the products, for the row that sees it.
                            let work = work.again(tables, dims);
                            let Work { pages, all, .. } = work;
                            let own = work.visible(work.first_row + row, dims);
                            let head = offset(0, 0, 0, 0, work.head_kv, dims.v_head_stride);
                            let mut key = work.any.lo.max(own.lo);
                            while key < work.any.hi.min(own.hi) {
                                let at =
                                    head + pages.row(dims, key, dims.v_batch_stride, dims.v_token_stride);
                                let mut j = 0;
                                while j < 4 && !all.has(key) {
                                    let from = v.wrapping_add(at + column as usize + j);
                                    let value = C::value(from);
                                    totals[j] += if value.is_finite() { 0.0 } else { value };
                                    j += 1;
                                }
                                key += 1;
                            }
                        }
                        if C::IS_SCALED {
                            totals = totals.map(|total| total * v_scale);
                        }
                        let joined_row = joined + DECODE_RING_GROUP_NUMBERS_BYTES + row * DIM * 4;
                        if !is_first {
                            let [own, of_before] = meet_joined(&mut largest(row), row);
                            let before = shared::load_f32x4(joined_row + column * 4);
                            let mut j = 0;
                            while j < 4 {
                                totals[j] = math::fma(totals[j], own, before[j] * of_before);
                                j += 1;
                            }
                        }
                        if is_last {
                            let at = work.slot(work.first_row + row, dims) * dims.head_dim_v as usize;
                            global::store_x4(partial.add(at + column as usize), totals.map(f32::to_bits));
                        } else {
                            shared::store_f32x4(joined_row + column * 4, totals);
                        }
                    }
                    i += THREADS;
                }
                first_column += columns;
            }
        }
    }
}
