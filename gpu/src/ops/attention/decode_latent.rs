//! Few queries against a long cache of latent rows, on the tensor cores of Ampere and later: heads of 576 whose values
//! are the first 512 columns of the keys' own rows, so that a row comes from memory once and is both.
//!
//! Work split: as in `decode_ring`, with 32 rows, pairs of a query and a head of those that share a key head, and
//! blocks of eight warps, as many as there are multiprocessors; each takes every so many-th split of 256 keys.
//! `cp.async` keeps steps of 32 keys coming through a ring in shared memory, from one split to the next. The first step
//! of a split is not keys but q, which is as large and goes into registers.
//!
//! ```text
//! shared   | 32 rows of keys, or of q | × PLACES | | scores [4 parts][32][32] | weights [32][32] | decay of each row |
//!
//! each step   wait for its copies ── barrier ── start the copies of the step PLACES − 1 further into
//!             the place of the last one
//! s = q·kᵀ    a warp does 16 keys and every fourth 16 columns, so its part of q is 72 registers; the parts go to
//!             shared memory
//! barrier     a warp adds up the parts of four rows: masks, the new maximum, weights, the factors of older sums
//! barrier
//! o = p·v     a warp does all rows, of which every lane has four, and 64 columns: 64 registers
//! ```
//!
//! - A row of 72 pieces of 16 bytes begins where all rows begin, in bank 0, so pieces are moved by an exclusive or with
//!   their row. Scores and weights lie as the registers of `mma` do, 16 bytes of a lane beside those of the next one.
//! - Keys that no row sees are not read but filled with zeros. A row's bits depend on its own keys alone: tensor cores
//!   keep rows apart, a weight of 0 adds nothing, and an older sum times 1 is the same.
//! - 0 · NaN would carry a value that a row does not see into it. That can be where the rows of a block see different
//!   keys only: of those keys what is not finite becomes 0 when the scores are done. A row that does see one is NaN all
//!   the same: so is the score. (A soft cap would make it finite, so such problems are left to `decode`.)
//! - Every thread copies pieces of one row of a step, so a table of pages is read once per thread and step.
//!
//! A step of 32 keys and 32 rows is 36 KiB from memory, written to shared memory and read once as k, 32 KiB read as v,
//! and 36 KiB of scores and weights there and back: less for shared memory, and for the tensor cores, than the bytes
//! take on Hopper, which has `decode_latent_wgmma`. What was measured: `gpu/NOTES/attention.md`.

use abi::ops::attention::{
    AttentionDims, DECODE_LATENT_KEYS, DECODE_LATENT_PARTS, DECODE_LATENT_ROWS, MAX_HEAD_DIM, MAX_HEAD_DIM_V,
};
use cuda_std::cvt::{bf16, f16};
use cuda_std::{cp_async, global, grid, kernel, math, matrix, shared, thread, warp};

use super::work::{Splits, Work};
use super::{Tables, offset};
use crate::matmul::multiplicand::{Multiplicand, finite_halves};
use crate::tile::softmax::{base, weight};

const ROWS: u32 = DECODE_LATENT_ROWS;
const KEYS: u32 = DECODE_LATENT_KEYS;
const PARTS: u32 = DECODE_LATENT_PARTS;
const ROW_BYTES: u32 = MAX_HEAD_DIM * 2;
const PLACE_BYTES: u32 = KEYS * ROW_BYTES;
/// Lots of 128 bytes of a row: each is a piece of every thread that copies it, and 16 columns of every part.
const LOTS: usize = (ROW_BYTES / 128) as usize;
/// Tiles of 16 rows; of 8 columns of a warp's results.
const TILES: usize = (ROWS / 16) as usize;
const COLUMN_TILES: usize = (MAX_HEAD_DIM_V / 64) as usize;
/// Scores of a tile of 16 rows and 8 keys.
const TILE_BYTES: u32 = 16 * 8 * 4;

/// A place in the block's order of steps: for each of its splits q, then the keys that some row sees.
struct Cursor {
    splits: Splits,
    work: Work<ROWS>,
    /// Counted from key 0 of the sequence; the first is q instead.
    step: i32,
}

impl Cursor {
    /// The block's first step.
    ///
    /// # Safety
    /// - As for `Sequence::new`.
    #[inline(always)]
    unsafe fn new(tables: Tables, dims: &AttentionDims) -> Self {
        let mut splits = Splits::new(dims, false);
        // SAFETY: the caller's promise.
        let work = unsafe { splits.find(tables, dims) };
        let mut cursor = Cursor { splits, work, step: 0 };
        cursor.step = cursor.q_step();
        cursor
    }

    /// The step that is q: that before the first of keys.
    #[inline(always)]
    fn q_step(&self) -> i32 {
        self.work.any.lo / KEYS as i32 - 1
    }

    #[inline(always)]
    fn first_key(&self) -> i32 {
        self.step * KEYS as i32
    }

    /// Goes on to the next step; to a split without keys behind the last one.
    ///
    /// # Safety
    /// - As for `Sequence::new`.
    #[inline(always)]
    unsafe fn advance(&mut self, tables: Tables, dims: &AttentionDims) {
        self.step += 1;
        if self.first_key() >= self.work.any.hi {
            // SAFETY: the caller's promise.
            self.work = unsafe { self.splits.next(tables, dims) };
            self.step = self.q_step();
        }
    }
}

/// The whole block. See the module.
///
/// # Safety
/// - Blocks of `DECODE_LATENT_THREADS` threads; tensors and workspace *in-bounds*, heads of [`MAX_HEAD_DIM`] and
///   [`MAX_HEAD_DIM_V`], v in the rows of k, the rows of the tensors *aligned(16)* — checked in `Attention::run`.
///   `UNDER_WAY` is `PLACES − 2`.
#[inline(always)]
pub(super) unsafe fn splits<T: Multiplicand, const PLACES: u32, const UNDER_WAY: u32>(
    q: *const T,
    k: *const T,
    tables: Tables,
    partial: *mut f32,
    stats: *mut f32,
    dims: &AttentionDims,
) {
    let (lane, warp_idx) = (thread::lane(), thread::warp_idx());
    let (group, member) = (lane / 4, lane % 4);
    let ring = shared::base();
    let parts = ring + PLACES * PLACE_BYTES;
    let weights = parts + PARTS * ROWS * KEYS * 4;
    let decays = weights + ROWS * KEYS * 2;
    // A thread copies eight pieces and one more of a row, 128 bytes apart.
    let (own_row, own_piece) = (thread::thread_idx_x() / 8, lane % 8);
    let own = own_row * ROW_BYTES + ((own_piece ^ (own_row & 7)) << 4);
    // A part's columns are 16 of each 128 bytes, so the exclusive or is the same for all of them. Of q the lane's row
    // is one of 16, of k one of 16 keys.
    let part = warp_idx % PARTS;
    let first_own_key = warp_idx / PARTS * 16;
    let of_q = lane % 16 * ROW_BYTES + (((2 * part + lane / 16) ^ (lane & 7)) << 4);
    let of_k = (first_own_key + lane % 8 + lane / 16 * 8) * ROW_BYTES
        + (((2 * part + lane / 8 % 2) ^ (lane & 7)) << 4);
    // Of the scores a lane finishes those of two rows, 8 apart, and two keys.
    let (pair, tile, key_tile) = (warp_idx * 2 + lane / 16, warp_idx / 4, lane % 16 / 4);
    let own_rows = [tile * 16 + pair % 8, tile * 16 + pair % 8 + 8];
    let own_lane = pair % 8 * 4 + member;
    let score_at = |part: u32, tile: u32, key_tile: u32, lane: u32| {
        // Two neighbouring tiles are read at a time: from different banks.
        parts + ((part * 2 + tile) * 4 + key_tile) * TILE_BYTES + ((lane ^ (key_tile % 2 * 4)) << 4)
    };
    let weight_at = |tile: u32, keys: u32, lane: u32| weights + ((tile * 2 + keys) * 32 + lane) * 16;

    // SAFETY: keys inside `any` are below the sequence's length, rows below `end_row` inside q and the workspace —
    // Attention::run. What the branches around barriers and shuffles depend on is the same in the whole block. What is
    // in shared memory was written before the last barrier, and the place of a step is filled anew behind the barrier
    // after its products.
    unsafe {
        // Where the thread's row of a step is, and how many bytes of each of its pieces there are.
        let locate = |at: &Cursor| {
            let Work { batch, head_kv, first_row, end_row, pages, any, .. } = at.work;
            let (from, is_there) = if !at.work.has_keys() {
                (q, false)
            } else if at.step == at.q_step() {
                let row = first_row + own_row;
                let (query, head) = at.work.place(row, dims);
                let query = at.work.own.first_q + query;
                let strides = (dims.q_batch_stride, dims.q_token_stride, dims.q_head_stride);
                let from = q.wrapping_add(offset(batch, strides.0, query, strides.1, head, strides.2));
                (from, row < end_row)
            } else {
                let key = at.first_key() + own_row as i32;
                let nearest = key.max(any.lo).min(any.hi - 1);
                let page = pages.page(dims, nearest);
                let (strides, nearest) = (
                    (dims.k_batch_stride, dims.k_token_stride, dims.k_head_stride),
                    pages.row_in_page(dims, nearest),
                );
                let from = k.wrapping_add(offset(page, strides.0, nearest, strides.1, head_kv, strides.2));
                (from, any.has(key))
            };
            (from.wrapping_add(own_piece as usize * 8), if is_there { 16 } else { 0 })
        };
        let start = |(from, bytes): (*const T, u32), place: u32| {
            let to = ring + place * PLACE_BYTES + own;
            let mut i = 0;
            while i < LOTS {
                cp_async::cg_16_fill(to + i as u32 * 128, from.wrapping_add(i * 64), bytes);
                i += 1;
            }
            cp_async::commit_group();
        };

        let mut ahead = Cursor::new(tables, dims);
        let mut place = 0;
        // Opaque, so that the loop stays one.
        while place < thread::opaque(PLACES - 1) {
            start(locate(&ahead), place);
            ahead.advance(tables, dims);
            place += 1;
        }
        // Found while products are under way, so that copies start at once behind the barrier.
        let mut next = locate(&ahead);
        let mut look_ahead = || {
            ahead.advance(tables, dims);
            locate(&ahead)
        };
        place = 0;
        // Waits for the next step, starts the copies of one further on, and returns where its rows are.
        let mut arrive = |next| {
            cp_async::wait_group::<UNDER_WAY>();
            thread::sync_threads();
            start(next, if place == 0 { PLACES - 1 } else { place - 1 });
            let rows = ring + place * PLACE_BYTES;
            place = if place == PLACES - 1 { 0 } else { place + 1 };
            rows
        };
        let mut splits = Splits::new(dims, false);
        let mut work: Work<ROWS> = splits.find(tables, dims);
        while work.has_keys() {
            let visible = [
                work.visible(work.first_row + own_rows[0], dims),
                work.visible(work.first_row + own_rows[1], dims),
            ];
            let all = work.all;
            let mut queries = [[[0u32; 4]; LOTS]; TILES];
            let rows = arrive(next);
            let mut i = 0;
            while i < LOTS {
                let mut tile = 0;
                while tile < TILES {
                    let at = rows + tile as u32 * 16 * ROW_BYTES + of_q + i as u32 * 128;
                    queries[tile][i] = matrix::load_x4(at);
                    tile += 1;
                }
                i += 1;
            }
            next = look_ahead();
            let mut o = [[[0f32; 4]; COLUMN_TILES]; TILES];
            let mut m = [f32::NEG_INFINITY; 2];
            let mut sums = [0f32; 2];
            let mut first_key = work.any.lo / KEYS as i32 * KEYS as i32;
            while first_key < work.any.hi {
                let rows = arrive(next);
                let mut s = [[[0f32; 4]; 2]; TILES];
                let mut i = 0;
                while i < LOTS {
                    let [a, b, c, d] = matrix::load_x4(rows + of_k + i as u32 * 128);
                    let mut tile = 0;
                    while tile < TILES {
                        s[tile][0] = T::multiply_add(queries[tile][i], [a, b], s[tile][0]);
                        s[tile][1] = T::multiply_add(queries[tile][i], [c, d], s[tile][1]);
                        tile += 1;
                    }
                    i += 1;
                }
                next = look_ahead();
                let mut i = 0;
                while i < 2 * TILES {
                    let at = score_at(part, i as u32 / 2, first_own_key / 8 + i as u32 % 2, lane);
                    shared::store_f32x4(at, s[i / 2][i % 2]);
                    i += 1;
                }
                thread::sync_threads();

                // Scores are done; as values, keys that not all rows see are without what is not finite.
                let key = first_key + own_row as i32;
                if work.any.has(key) && !all.has(key) {
                    let mut i = 0;
                    while i < MAX_HEAD_DIM_V / 64 {
                        let at = rows + own + i * 128;
                        shared::store_u32x4(at, shared::load_u32x4(at).map(finite_halves::<T>));
                        i += 1;
                    }
                }
                let at = |part| shared::load_f32x4(score_at(part, tile, key_tile, own_lane));
                let (a, b, c, d) = (at(0), at(1), at(2), at(3));
                let mut scores = [0f32; 4];
                let mut largest = m;
                let mut i = 0;
                while i < 4 {
                    let key = first_key + (key_tile * 8 + 2 * member) as i32 + (i % 2) as i32;
                    let score = ((a[i] + b[i]) + (c[i] + d[i])) * dims.scale;
                    scores[i] = if visible[i / 2].has(key) { score } else { f32::NEG_INFINITY };
                    largest[i / 2] = math::max(largest[i / 2], scores[i]);
                    i += 1;
                }
                largest = [warp::max_f32::<16>(largest[0]), warp::max_f32::<16>(largest[1])];
                let bases = [base(largest[0]), base(largest[1])];
                let mut eight = [0f32; 8];
                let mut i = 0;
                while i < 4 {
                    eight[i] = weight::<T>(scores[i] - bases[i / 2]);
                    i += 1;
                }
                let [low, high, ..] = T::pack(&eight);
                let at = weight_at(tile, key_tile / 2, own_lane) + key_tile % 2 * 8;
                shared::store_u32(at, low);
                shared::store_u32(at + 4, high);
                let mut half = 0;
                while half < 2 {
                    let decay = weight::<T>(m[half] - bases[half]);
                    sums[half] = math::fma(sums[half], decay, eight[2 * half] + eight[2 * half + 1]);
                    if lane % 16 == 0 {
                        shared::store_f32(decays + own_rows[half] * 4, decay);
                    }
                    half += 1;
                }
                m = largest;
                thread::sync_threads();

                let mut tile = 0;
                while tile < TILES {
                    let at = decays + (tile as u32 * 16 + group) * 4;
                    let decays = [shared::load_f32(at), shared::load_f32(at + 32)];
                    let mut i = 0;
                    while i < 4 * COLUMN_TILES {
                        o[tile][i / 4][i % 4] *= decays[i / 2 % 2];
                        i += 1;
                    }
                    tile += 1;
                }
                let mut keys = 0;
                while keys < KEYS / 16 {
                    let p = [
                        shared::load_u32x4(weight_at(0, keys, lane)),
                        shared::load_u32x4(weight_at(1, keys, lane)),
                    ];
                    let at = rows + (keys * 16 + lane % 16) * ROW_BYTES + warp_idx * 128;
                    let mut j = 0;
                    while j < COLUMN_TILES {
                        let piece = j as u32 ^ (lane / 16) ^ (lane & 7);
                        let [a, b, c, d] = matrix::load_x4_trans(at + (piece << 4));
                        let mut tile = 0;
                        while tile < TILES {
                            o[tile][j] = T::multiply_add(p[tile], [a, b], o[tile][j]);
                            o[tile][j + 1] = T::multiply_add(p[tile], [c, d], o[tile][j + 1]);
                            tile += 1;
                        }
                        j += 2;
                    }
                    keys += 1;
                }
                first_key += KEYS as i32;
            }

            sums = [warp::sum_f32::<16>(sums[0]), warp::sum_f32::<16>(sums[1])];
            let mut half = 0;
            while half < 2 {
                let row = work.first_row + own_rows[half];
                if lane % 16 == 0 && row < work.end_row {
                    let stats = stats.add(2 * work.slot(row, dims));
                    global::store(stats, m[half]);
                    global::store(stats.add(1), sums[half]);
                }
                half += 1;
            }
            let mut i = 0;
            while i < 2 * TILES {
                let row = work.first_row + i as u32 * 8 + group;
                if row < work.end_row {
                    let at = work.slot(row, dims) * MAX_HEAD_DIM_V as usize;
                    let to = partial.add(at + (warp_idx * 64 + 2 * member) as usize);
                    let mut j = 0;
                    while j < COLUMN_TILES {
                        let tile = o[i / 2][j];
                        let [low, high] = [tile[i % 2 * 2], tile[i % 2 * 2 + 1]].map(f32::to_bits);
                        let both = u64::from(low) | u64::from(high) << 32;
                        global::store(to.add(8 * j).cast::<u64>(), both);
                        j += 1;
                    }
                }
                i += 1;
            }
            work = splits.next(tables, dims);
        }
        cp_async::wait_group::<0>();
    }
}

macro_rules! decode_latent_entries {
    ($($entry:ident => $type:ident, $dtype:ident, DecodeLatent { places: $places:literal };)*) => {$(
        /// Entry point; see `decode_latent` and `abi::ops::attention`.
        ///
        /// # Safety
        /// - Arguments as `Attention::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 1, waits)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            q: *const $type,
            k: *const $type,
            _v: *const $type,
            kv_lens: *const u32,
            q_offsets: *const u32,
            page_table: *const u32,
            _bias: *const u8,
            _blocks: *const u32,
            partial: *mut f32,
            stats: *mut f32,
            dims: AttentionDims,
        ) {
            grid::begin_early(|| (), false);
            // SAFETY: the caller's promise.
            unsafe {
                let tables = Tables { kv_lens, q_offsets, page_table };
                splits::<$type, $places, { $places - 2 }>(q, k, tables, partial, stats, &dims)
            }
        }
    )*};
}
abi::attention_decode_latent_table!(decode_latent_entries);
