//! Few queries against a long cache on the tensor cores of Ampere and later: `cp.async` keeps k and v coming through a
//! ring in shared memory, from one split of 256 keys to the next.
//!
//! Work split: as in `decode`, but the rows of a split, pairs of a query and a head of those that share a key head, are
//! 8 columns of `mma.sync`, or twice 8: keys, and columns of v, are its rows. Blocks are as many as the card holds at a
//! time; each takes every so many-th split, or every so many-th group of four that follow each other. Heads go first,
//! since their keys are neighbours in memory. A warp does every fourth 16 keys of a split, by itself up to the end.
//!
//! ```text
//! shared   a ring per warp: | 16 rows of k, or of v | × PLACES |
//!          | results [4 warps][8 or 16 rows][≤ 128] | maxima | sums | marks |
//!          beside fp8, heads up to 128: | q |     of groups: | maxima × 2 | sums | what has been joined [rows][DIM] |
//!
//! each chunk of 16 keys   wait for its copies ── multiply ── start the copies of the chunk PLACES further
//!                         into its place
//! s = k·qᵀ    the warp's 64 keys: four chunks
//! p           masks, unless all rows see all keys; the warp's own maximum m and sum l; rounded, and
//!             transposed among the warp's lanes
//! o = vᵀ·p    four chunks; behind them those of the next split's k start
//! at the end  o · 2^(m − the block's m) of the four warps meet in shared memory, 128 columns at a time; meanwhile the
//!             next split's q is loaded. Of a group, they are joined to those of the splits before; the last one's go
//!             to the workspace
//! ```
//!
//! - Nobody waits for another warp until its 64 keys are done, and the ring fills meanwhile.
//! - Keys that no row sees, and columns beyond a head, are not read but filled with zeros. Pieces of 16 bytes are moved
//!   by an exclusive or with their row, so that those of eight rows, which `ldmatrix` reads at a time, come from
//!   different banks.
//! - Keys are the rows of the product, so that 8 rows of q take half of the products, weights and registers that 16
//!   take: of fp8 a multiprocessor holds four blocks instead of three.
//! - A row's bits depend on its own keys alone: tensor cores keep rows apart, and a weight of 0 adds nothing.
//! - 0 · NaN would carry a value that a row does not see into it. That can be where the rows of a block see different
//!   keys only: there the products are made again without what is not finite, which is added in the end to the rows
//!   that see it.
//! - A page has a multiple of 16 keys, so a chunk is of one: looked up once, when its copies start.
//! - A chunk of which all rows and columns are there is copied without a predicate, the others in a loop. What is known
//!   of a split is found once, without divisions, and kept; heads of 256 have no registers for all of it.
//! - fp8 lies in the ring as it is and is widened before `mma` ([`Cached`]): the scale of a head's keys joins that of
//!   the scores, the scale of its values multiplies the results. It is widened to binary16, which is a quarter of the
//!   instructions of bfloat16, so q of that type is brought to binary16 too, exactly: a row by a power of two. That is
//!   done once for all warps, in shared memory. Where binary16 has not all elements of a tile, its block multiplies in
//!   bfloat16, with the same bits ([`SharedQueries`]).
//! - Weights of bfloat16 are binary16 for that too, times 2^15, which the values' scale takes back. Those below 2^-29
//!   are multiplied in bands of their own, further up, with the sums as far up meanwhile: a row without such weights
//!   keeps its bits, and a column whose heavy keys have a value of 0 is made of the light ones.
//!
//! - The splits' results are written and read again, so a group's four are joined here where they can be. A group is
//!   joined by the same operations whoever joins it, so a row's bits do not tell.
//! - The values' four chunks are a loop: as one stretch of instructions the kernel waits for the instructions' cache.
//! - The merge is not launched while this runs: what it gains with the longest caches it loses with others.
//!
//! What was measured and tried: `gpu/NOTES/attention.md`.

mod bands;
mod end;
mod entries;
mod ring;

use abi::ops::attention::{
    AttentionDims, DECODE_RING_COLUMNS, DECODE_RING_PADDING, SPLIT_KEYS, THREADS, decode_ring_joins,
    decode_ring_q_bytes,
};
use cuda_std::{cp_async, cvt, math, matrix, shared, thread, warp};

use super::cached::{Cached, Keys, head_scale};
use super::queries::{SharedQueries, load_queries};
use super::scores::{capped, has_cap};
use super::work::{Splits, Work};
use super::{Tables, Visible, offset};
use crate::matmul::multiplicand::{Factor, Multiplicand};
use crate::tile::softmax::{base, weight};
use bands::{BANDS, LIFT, least_of_band, narrow, power_of_bands};
use end::End;
use ring::{Share, key_of, pair, row_of_pair, wait};

const WARPS: u32 = THREADS / 32;
/// Keys of a chunk.
const CHUNK: u32 = 16;
/// Chunks of k of a warp, and of v.
const CHUNKS: usize = (SPLIT_KEYS / WARPS / CHUNK) as usize;

/// The largest of eight lanes', of which every fourth is one; or their sum.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
unsafe fn over_groups(value: f32, join: fn(f32, f32) -> f32) -> f32 {
    let mut value = value;
    let mut step = 16;
    while step >= 4 {
        // SAFETY: the caller's promise.
        value = join(value, unsafe { warp::shuffle_xor_f32(warp::FULL_MASK, value, step) });
        step /= 2;
    }
    value
}

/// The transpose of eight rows of eight 16-bit elements, of which a lane has two neighbours as of an operand of `mma`.
/// `movmatrix` would do it in one instruction, but not before PTX 7.8.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
unsafe fn transpose(word: u32, lane: u32) -> u32 {
    let (group, member) = (lane / 4, lane % 4);
    // SAFETY: the caller's promise.
    let [near, far] =
        [0, 4].map(|next| unsafe { warp::shuffle_idx(warp::FULL_MASK, word, member * 8 + next + group / 2) });
    cvt::prmt(near, far, if group % 2 == 0 { 0x5410 } else { 0x7632 })
}

/// The products of a warp's keys and a split's rows, and the copies that follow: `start` is given the chunk that has
/// been read. For each chunk and eight rows of q a lane has keys `g` and `g + 8`, rows `2 t` and `2 t + 1`.
///
/// # Safety
/// - *converged*: the whole warp; the rest is the caller's promise to [`splits`].
#[inline(always)]
unsafe fn products<
    M: Multiplicand,
    C: Keys<M>,
    const HALVES: usize,
    const STEPS: usize,
    const PLACES: usize,
>(
    queries: &[[[u32; 2]; HALVES]; STEPS],
    lane: u32,
    pieces: u32,
    place_of: impl Fn(usize) -> u32,
    start: impl Fn(usize),
) -> [[[f32; 4]; HALVES]; CHUNKS] {
    let row = row_of_pair(pieces, lane % 16, lane / 16);
    let parts = 2 * STEPS / pieces as usize;
    let mut s = [[[0f32; 4]; HALVES]; CHUNKS];
    let mut chunk = 0;
    while chunk < CHUNKS {
        // SAFETY: the caller's promise.
        unsafe {
            wait::<PLACES>();
            let at = place_of(chunk) + row;
            let mut i = 0;
            while i < STEPS {
                let keys = C::keys(matrix::load_x4(pair(at, (i / parts) as u32)));
                let mut part = 0;
                while part < parts {
                    let mut half = 0;
                    while half < HALVES {
                        s[chunk][half] = M::multiply_add(keys[part], queries[i + part][half], s[chunk][half]);
                        half += 1;
                    }
                    part += 1;
                }
                i += parts;
            }
            warp::sync_warp(warp::FULL_MASK);
        }
        start(chunk);
        chunk += 1;
    }
    s
}

/// Adds the products of a chunk's values and weights. For each 16 columns and eight rows a lane has rows `2 t` and
/// `2 t + 1` of two columns: `g` and `g + 8`, of fp8 `2 g` and `2 g + 1`.
///
/// # Safety
/// - *converged*: the whole warp; `at` is [`row_of_pair`] of the chunk's place; the rest is the caller's promise to
///   [`splits`].
#[inline(always)]
unsafe fn add_values<T: Multiplicand, C: Cached<T>, const HALVES: usize, const STEPS: usize>(
    o: &mut [[[f32; 4]; HALVES]; STEPS],
    weights: [[u32; 2]; HALVES],
    at: u32,
) {
    let mut i = 0;
    while i < STEPS {
        // SAFETY: the caller's promise.
        unsafe {
            let values = C::values(matrix::load_x4_trans(pair(at, (i / C::PARTS) as u32)));
            let mut part = 0;
            while part < C::PARTS {
                let mut half = 0;
                while half < HALVES {
                    let o = &mut o[i + part][half];
                    *o = C::Narrow::multiply_add(values[part], weights[half], *o);
                    half += 1;
                }
                part += 1;
            }
        }
        i += C::PARTS;
    }
}

/// The whole block. See the module.
///
/// # Safety
/// - Blocks of [`THREADS`] threads; tensors and workspace *in-bounds*, the rows of the tensors *aligned(16)* — checked
///   in `Attention::run`. `HALVES` is `ROWS / 8`, `STEPS` `DIM / 16`; `PLACES` is 2, 4 or 8.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn splits<
    T: Multiplicand,
    C: Cached<T> + Keys<T> + Keys<C::Narrow>,
    const DIM: u32,
    const ROWS: u32,
    const HALVES: usize,
    const STEPS: usize,
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
        SharedQueries::<ROWS> { at: ring_end + WARPS * (ROWS * (columns + DECODE_RING_PADDING + 2) + 1) * 4 };
    let q_bytes = decode_ring_q_bytes(DIM, ROWS, 16 / C::PER_PIECE);
    let joined = shared_queries.at + q_bytes;
    // Whether weights have exponents that the type they are multiplied in has not.
    let lifts = T::INFINITIES != C::Narrow::INFINITIES;
    // For what would be kept from one split to the next; and for all that is known of the next split, while v is
    // multiplied.
    let has_registers = DIM * ROWS <= 128 * 16;
    // fp8 has the registers for that where the hardware converts it; the simulator runs the other form of it, which
    // knows the same.
    let keeps_next = has_registers && (C::PARTS == 1 || cfg!(all(target_arch = "nvptx64", not(lacks_fp8))));
    let shares_q = q_bytes != 0;
    // Of chunk number 0, 1, … of k, then of v.
    let place_of = |chunk: usize| ring + (chunk % PLACES) as u32 * place_bytes;

    // SAFETY: keys inside `any` are below the sequence's length, rows below `end_row` inside q and the workspace —
    // Attention::run. What the branches around barriers and shuffles depend on is the same in the whole block. A place
    // is filled anew by the warp that has read it, all of it behind `sync_warp`.
    unsafe {
        let share = Share::new(pieces, thread::lane());
        let start = |work: &Work<ROWS>, is_v: bool, chunk: usize| {
            if work.has_keys() {
                let first_key = key_of(work, chunk, warp_idx);
                let mut share = share;
                if !has_registers {
                    // Opaque, or the places of all pieces would be kept in registers for the next chunk.
                    let salt = (first_key as u32 + chunk as u32) * 32;
                    share = Share::new(pieces, thread::opaque(thread::lane() + salt) % 32);
                }
                let place = place_of(chunk + if is_v { CHUNKS } else { 0 });
                let (strides, width) = if !is_v {
                    ((dims.k_batch_stride, dims.k_token_stride, dims.k_head_stride), dims.head_dim)
                } else {
                    ((dims.v_batch_stride, dims.v_token_stride, dims.v_head_stride), dims.head_dim_v)
                };
                // A page has a multiple of 16 keys, so all of a chunk are of one: that of the nearest key that there
                // is.
                let from = |nearest: i32| {
                    let page = work.pages.page(dims, nearest);
                    let row = work.pages.row_in_page(dims, first_key) + share.first_row;
                    let at = offset(page, strides.0, row, strides.1, work.head_kv, strides.2);
                    let of_piece = (share.piece * C::PER_PIECE) as usize;
                    (if is_v { v } else { k }).wrapping_add(at + of_piece)
                };
                let any = work.any;
                if width == DIM && any.lo <= first_key && first_key + CHUNK as i32 <= any.hi {
                    share.copy(pieces, from(first_key), strides.1, place);
                } else {
                    let keys = Visible { lo: any.lo - first_key, hi: any.hi - first_key };
                    let from = from(first_key.clamp(any.lo, any.hi - 1));
                    share.copy_some(pieces, from, strides.1, place, keys, width / C::PER_PIECE);
                }
            }
            cp_async::commit_group();
        };

        let mut splits = Splits::new(dims, decode_ring_joins(DIM));
        let mut work: Work<ROWS> = splits.find(tables, dims);
        let mut is_first = true;
        let mut chunk = 0;
        while chunk < PLACES {
            start(&work, chunk >= CHUNKS, chunk % CHUNKS);
            chunk += 1;
        }
        let mut loaded = [[[0u32; 2]; HALVES]; STEPS];
        if !work.has_keys() || !has_registers {
            // Nothing is loaded.
        } else if shares_q {
            let part = SharedQueries::load(q, &work, STEPS, dims);
            shared_queries.store::<T, C::Narrow>(part, STEPS, 0);
            thread::sync_threads();
        } else {
            loaded = load_queries::<T, C, ROWS, HALVES, STEPS>(q, &work, thread::lane(), dims);
        }
        while work.has_keys() {
            // Opaque, or the places of all that is read would be kept in registers for the next split.
            let lane = thread::opaque(thread::lane() + work.split * 32) % 32;
            let (group, member) = (lane / 4, lane % 4);
            // Where all of a split's k is on its way, what follows it is of the next split.
            let ahead = if PLACES > CHUNKS { splits.next(tables, dims) } else { work };
            // The chunk `PLACES` further on goes where the one that was read is.
            let go_on = |chunk: usize| {
                let next = (chunk + PLACES) % (2 * CHUNKS);
                start(&ahead, next >= CHUNKS, next % CHUNKS);
            };
            let mut is_shared = shares_q;
            if shares_q && lifts {
                let [a, b, c, d] = shared::load_u32x4(shared_queries.marks(STEPS));
                is_shared = a | b | c | d == 0;
            }
            let mut scales = [[dims.scale * head_scale::<T, C>(k_scale, work.head_kv); 2]; HALVES];
            let mut s = if is_shared {
                let mut queries = [[[0; 2]; HALVES]; STEPS];
                let mut half = 0;
                while half < HALVES {
                    let at = shared_queries.inverses(STEPS) + (8 * half as u32 + 2 * member) * 4;
                    let inverses = shared::load_f32x2(at);
                    scales[half] = [scales[half][0] * inverses[0], scales[half][1] * inverses[1]];
                    let mut i = 0;
                    while i < STEPS {
                        let at = shared_queries.at + (i as u32 * ROWS + 8 * half as u32) * 32;
                        queries[i][half] = shared::load_u32x2(at + lane * 8);
                        i += 1;
                    }
                    half += 1;
                }
                products::<C::Narrow, C, HALVES, STEPS, PLACES>(&queries, lane, pieces, place_of, go_on)
            } else {
                let queries = if has_registers && !shares_q {
                    loaded
                } else {
                    load_queries::<T, C, ROWS, HALVES, STEPS>(q, &work, lane, dims)
                };
                products::<T, C, HALVES, STEPS, PLACES>(&queries, lane, pieces, place_of, go_on)
            };

            // Weights, of the warp's keys by themselves.
            let mut m = [[f32::NEG_INFINITY; 2]; HALVES];
            if has_cap(dims) {
                let mut i = 0;
                while i < 4 * CHUNKS * HALVES {
                    let (chunk, half, row) = (i / 4 / HALVES, i / 4 % HALVES, i % 2);
                    let s = &mut s[chunk][half][i % 4];
                    *s = capped(*s * scales[half][row], dims);
                    i += 1;
                }
                scales = [[1.0; 2]; HALVES];
            }
            if work.is_whole() {
                let mut i = 0;
                while i < 4 * CHUNKS * HALVES {
                    let (chunk, half, row) = (i / 4 / HALVES, i / 4 % HALVES, i % 2);
                    let s = &mut s[chunk][half][i % 4];
                    *s *= scales[half][row];
                    m[half][row] = math::max(m[half][row], *s);
                    i += 1;
                }
            } else {
                let mut half = 0;
                while half < HALVES {
                    let first = work.first_row + 8 * half as u32 + 2 * member;
                    let visible = [work.visible(first, dims), work.visible(first + 1, dims)];
                    let mut i = 0;
                    while i < 4 * CHUNKS {
                        let (chunk, row) = (i / 4, i % 2);
                        let key = key_of(&work, chunk, warp_idx) + (i / 2 % 2 * 8) as i32 + group as i32;
                        let s = &mut s[chunk][half][i % 4];
                        *s = if visible[row].has(key) { *s * scales[half][row] } else { f32::NEG_INFINITY };
                        m[half][row] = math::max(m[half][row], *s);
                        i += 1;
                    }
                    half += 1;
                }
            }
            let mut bases = [[0f32; 2]; HALVES];
            let mut i = 0;
            while i < 2 * HALVES {
                m[i / 2][i % 2] = over_groups(m[i / 2][i % 2], math::max);
                bases[i / 2][i % 2] = base(m[i / 2][i % 2]);
                i += 1;
            }
            let mut sums = [[0f32; 2]; HALVES];
            let mut p = [[[0u32; 2]; HALVES]; CHUNKS];
            // Of 0 the bits less one are the largest.
            let mut least = u32::MAX;
            let mut i = 0;
            while i < CHUNKS * HALVES {
                let mut eight = [0f32; 8];
                let mut j = 0;
                while j < 8 {
                    let (chunk, half, row) = ((i + j / 4) / HALVES, (i + j / 4) % HALVES, j % 2);
                    let weight = weight::<T>(s[chunk][half][j % 4] - bases[half][row]);
                    sums[half][row] += weight;
                    eight[j] = if lifts { weight * LIFT } else { weight };
                    least = least.min(eight[j].to_bits().wrapping_sub(1));
                    j += 1;
                }
                // A key's weights are a row there, and are wanted as a column.
                let words = T::pack(&eight).map(|word| transpose(word, lane));
                p[i / HALVES][i % HALVES] = [words[0], words[1]];
                p[(i + 1) / HALVES][(i + 1) % HALVES] = [words[2], words[3]];
                i += 2;
            }
            let mut bands = 1;
            while lifts && bands < BANDS && warp::any(warp::FULL_MASK, least < least_of_band(bands - 1)) {
                bands += 1;
            }
            let mut i = 0;
            while i < 2 * HALVES {
                sums[i / 2][i % 2] = over_groups(sums[i / 2][i % 2], |a, b| a + b);
                i += 1;
            }
            // All eight lanes of a row know them: each keeps one.
            let half = if HALVES == 1 || group < 4 { 0 } else { HALVES - 1 };
            let of_half =
                |numbers: [[f32; 2]; HALVES]| if half == 0 { numbers[0] } else { numbers[HALVES - 1] };
            let numbers = if group % 4 < 2 { of_half(m) } else { of_half(sums) };
            let number = if group % 2 == 0 { numbers[0] } else { numbers[1] };

            let next = if PLACES > CHUNKS { ahead } else { splits.next(tables, dims) };
            let mut part = [[0; 4]; 2];
            if shares_q && next.has_keys() {
                part = SharedQueries::load(q, &next, STEPS, dims);
            }
            let is_alike = work.is_alike();
            let mut o = [[[0f32; 4]; HALVES]; STEPS];
            let row_of_values = |lane: u32| row_of_pair(pieces, lane % 8 + lane / 16 * 8, lane / 8 % 2);
            // A loop that stays one, for the instructions' cache. p goes round, once in all, as an index into it
            // would put it into memory.
            macro_rules! add_chunks {
                ($first:expr, $end:expr, |$chunk:ident| $start_next:expr) => {
                    let mut $chunk = thread::opaque($first);
                    while $chunk < $end {
                        wait::<PLACES>();
                        let place = place_of(CHUNKS + $chunk as usize);
                        let weights = |band: u32| {
                            let mut weights = p[0];
                            let mut half = 0;
                            while half < HALVES {
                                weights[half] = narrow::<T, C::Narrow>(weights[half], band, bands);
                                half += 1;
                            }
                            weights
                        };
                        let scale = |o: &mut [[[f32; 4]; HALVES]; STEPS], factor: f32| {
                            let mut i = 0;
                            while i < 4 * HALVES * STEPS {
                                o[i / 4 / HALVES][i / 4 % HALVES][i % 4] *= factor;
                                i += 1;
                            }
                        };
                        // Opaque, or what it is made of would be kept in registers.
                        let row = row_of_values(thread::opaque(thread::lane() + $chunk * 32) % 32);
                        add_values::<T, C, HALVES, STEPS>(&mut o, weights(0), place + row);
                        if lifts && bands != 1 {
                            // Opaque, so that the loop stays one.
                            let mut band = thread::opaque(1);
                            while band < bands {
                                scale(&mut o, power_of_bands(1));
                                // Opaque, or all that is read would be kept in registers for the next band.
                                let row = row_of_values(thread::opaque(lane + band * 32) % 32);
                                add_values::<T, C, HALVES, STEPS>(&mut o, weights(band), place + row);
                                band += 1;
                            }
                            scale(&mut o, 1.0 / power_of_bands(bands - 1));
                        }
                        warp::sync_warp(warp::FULL_MASK);
                        $start_next;
                        let first = p[0];
                        let mut i = 0;
                        while i + 1 < CHUNKS {
                            p[i] = p[i + 1];
                            i += 1;
                        }
                        p[CHUNKS - 1] = first;
                        $chunk = thread::opaque($chunk + 1);
                    }
                };
            }
            // Up to this chunk those that follow are of this split's values, then of the next one's keys and values.
            let own = CHUNKS.saturating_sub(PLACES) as u32;
            add_chunks!(0, own, |chunk| start(&work, true, chunk as usize + PLACES));
            add_chunks!(own, CHUNKS as u32, |chunk| {
                start(&next, PLACES > CHUNKS, (chunk - own) as usize)
            });

            let is_last = splits.is_first || !next.has_keys();
            let end = End { work, is_alike, bands, is_first, is_last, number, results: ring_end, joined };
            end.store::<T, C, DIM, HALVES, STEPS>(&o, &p, v, v_scale, tables, partial, stats, dims, || {
                if shares_q {
                    shared_queries.store::<T, C::Narrow>(part, STEPS, next.split);
                } else if has_registers && next.has_keys() {
                    loaded = load_queries::<T, C, ROWS, HALVES, STEPS>(q, &next, lane, dims);
                }
            });
            work = if keeps_next { next } else { next.again(tables, dims) };
            is_first = is_last;
        }
        cp_async::wait_group::<0>();
    }
}
