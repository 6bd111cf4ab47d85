//! Few queries against a long cache on the tensor cores of Ampere and later: 256 keys per block, every element of k and v read
//! from memory once, straight into the registers that are multiplied.
//!
//! Work split: as in `decode`, but the rows of a block, pairs of a query and a head of those that share a key head, are the 16
//! rows of `mma.sync`. A warp does every fourth 16 keys of the block's 256, by itself up to the end.
//!
//! ```text
//! s = q·kᵀ    a lane has 16 bytes of a key's row at a time: k of the sum in any order, the same for q
//! p           masks, the warp's own maximum m and sum l; rounded, the next product's operand as they are
//! o = p·v     a lane has 16 bytes of four keys' rows: pairs of keys by `prmt`, columns dealt out eight to a lane
//! at the end  64 columns of o at a time go to shared memory, where o · 2^(m − the block's m) of the four warps meet
//! ```
//!
//! - 12 to 16 loads of 16 bytes are under way per lane, those of v before the last of k are multiplied.
//! - Of keys in pages, a warp's 16 are of one: a lane of four looks up each, and shuffles tell the others.
//! - A row's bits depend on its own keys alone: tensor cores keep rows apart, and a weight of 0 adds nothing.
//! - 0 · NaN would carry a value that a row does not see into it. That can be where the rows of a block see different keys only:
//!   there what is not finite is left out, and added in the end to the rows that see it.
//!
//! On an H200 (µs, this / the kernels without tensor cores / cuDNN): 64 sequences of 4096, 32 heads on 8: 314 / 316 / 245; 8 of
//! 2048, 32 on 4: 31 / 50; 8 of 2048, 16 on 8: 51 / 38, which is why pairs of heads do not come here. 255 registers leave two
//! blocks to a multiprocessor, too few loads under way: shared memory and TMA are to be tried next.

use abi::ops::attention::{AttentionDims, SPLIT_KEYS, THREADS};
use cuda_std::cvt::prmt;
use cuda_std::{global, math, shared, thread, warp};

use super::scores::{capped, has_cap};
use super::{Pages, Visible, offset, sequence_len, within_page};
use crate::tile::multiplicand::{Multiplicand, not_finite};
use crate::tile::softmax::weight;

const ROWS: u32 = 16;
const WARPS: u32 = THREADS / 32;
/// Tiles of 8 keys of a warp.
const KEY_TILES: usize = (SPLIT_KEYS / WARPS / 8) as usize;
/// The same in steps of 16.
const KEYS_16: usize = KEY_TILES / 2;
/// Loads of a lane that are under way before v, by fours.
const DEPTH: usize = 3;
/// Floats between the rows of results in shared memory, beyond the columns: against bank conflicts.
const PADDING: u32 = abi::ops::attention::DECODE_MMA_PADDING;

/// What a block does.
#[derive(Clone, Copy)]
struct Work {
    batch: u32,
    head_kv: u32,
    split: u32,
    first_row: u32,
    end_row: u32,
    len: i32,
}

impl Work {
    /// # Safety
    /// - As for [`sequence_len`].
    #[inline(always)]
    unsafe fn new(block: u32, kv_lens: *const u32, dims: &AttentionDims) -> Self {
        // Sizes are at least 1 where there is a block at all; `max` tells the compiler.
        let (splits, tiles, heads_kv) = (dims.splits.max(1), dims.tiles.max(1), dims.heads_kv.max(1));
        let (tile, rest) = (block % tiles, block / tiles);
        let (split, rest) = (rest % splits, rest / splits);
        let (head_kv, batch) = (rest % heads_kv, rest / heads_kv);
        let first_row = tile * ROWS;
        let end_row = (first_row + ROWS).min(dims.seq_q * dims.group);
        // SAFETY: the caller's promise.
        let len = unsafe { sequence_len(kv_lens, dims, batch) };
        Work { batch, head_kv, split, first_row, end_row, len }
    }

    /// Query and head of a row.
    #[inline(always)]
    fn place(self, row: u32, dims: &AttentionDims) -> (u32, u32) {
        let group = dims.group.max(1);
        (row / group, self.head_kv * group + row % group)
    }

    /// What a row sees; nothing if there is no such row.
    #[inline(always)]
    fn visible(self, row: u32, dims: &AttentionDims) -> Visible {
        if row < self.end_row {
            Visible::new(dims, self.len, self.place(row, dims).0 as i32)
        } else {
            Visible { lo: 0, hi: 0 }
        }
    }

    /// Keys of the split that some row sees, and keys that all rows see.
    #[inline(always)]
    fn keys(self, dims: &AttentionDims) -> (Visible, Visible) {
        let (top, bottom) = (self.visible(self.first_row, dims), self.visible(self.end_row - 1, dims));
        let first = (self.split * SPLIT_KEYS) as i32;
        let any = Visible { lo: top.lo.max(first), hi: bottom.hi.min(first + SPLIT_KEYS as i32) };
        (any, Visible { lo: bottom.lo, hi: top.hi })
    }

    /// Where a row's results go: `[row][split]`.
    #[inline(always)]
    fn slot(self, row: u32, dims: &AttentionDims) -> usize {
        let (query, head) = self.place(row, dims);
        ((self.batch * dims.heads_q + head) as usize * dims.seq_q as usize + query as usize)
            * dims.splits as usize
            + self.split as usize
    }
}

/// The whole block. See the module.
///
/// # Safety
/// - One block of [`THREADS`] threads per split, tile of rows, key head and sequence; tensors and workspace *in-bounds*, the rows
///   of the tensors *aligned(16)* — checked in `Attention::run`. `CHUNKS` is `DIM / 32`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn split<T: Multiplicand, const DIM: u32, const CHUNKS: usize>(
    q: *const T,
    k: *const T,
    v: *const T,
    kv_lens: *const u32,
    page_table: *const u32,
    partial: *mut f32,
    stats: *mut f32,
    dims: &AttentionDims,
) {
    let (thread, lane, warp_idx) = (thread::thread_idx_x(), thread::lane(), thread::warp_idx());
    let (group, member) = (lane / 4, lane % 4);

    // SAFETY: keys inside `any` are below the sequence's length, rows below `end_row` inside q and the workspace —
    // Attention::run. What the branches around barriers and shuffles depend on is the same in the whole block.
    unsafe {
        let work = Work::new(thread::block_idx_x(), kv_lens, dims);
        let Work { batch, head_kv, .. } = work;
        let first_key = (work.split * SPLIT_KEYS) as i32;
        let (any, _) = work.keys(dims);
        if any.lo >= any.hi {
            return;
        }
        let k = k.add(offset(0, 0, 0, 0, head_kv, dims.k_head_stride));
        let v = v.add(offset(0, 0, 0, 0, head_kv, dims.v_head_stride));
        // The first of 8 keys; two tiles are neighbours.
        let key_of = |key_tile: usize| {
            first_key + (((key_tile / 2) as u32 * WARPS + warp_idx) * 16 + (key_tile % 2) as u32 * 8) as i32
        };
        // A page has a multiple of 16 keys, and so 16 of the warp's are of one: that of the nearest key that is there.
        let pages = Pages::new(page_table, dims, batch);
        // Lane i of four keeps that of the warp's i-th 16.
        let own = first_key + ((lane % 4 * WARPS + warp_idx) * 16) as i32;
        let own = pages.page(dims, own.clamp(any.lo, any.hi - 1));
        // Where key 0 would be, if the keys before the page of the 16 that begin with `first` lay before it.
        let origin = |rows: *const T, strides: [u32; 2], keys: usize, first: i32| {
            let page = warp::shuffle_idx(warp::FULL_MASK, own, keys as u32);
            let first = first.clamp(any.lo, any.hi - 1) as u32;
            let first = first - within_page(dims, first as i32);
            rows.wrapping_add(offset(page, strides[0], 0, 0, 0, 0))
                .wrapping_sub(offset(0, 0, first, strides[1], 0, 0))
        };
        // A piece of the row of the nearest key that is there.
        let load = |origin: *const T, stride: u32, key: i32, element: u32| {
            let key = key.clamp(any.lo, any.hi - 1);
            global::load_stream_x4(origin.wrapping_add(key as usize * stride as usize + element as usize))
        };
        let k_strides = [dims.k_batch_stride, dims.k_token_stride];
        let v_strides = [dims.v_batch_stride, dims.v_token_stride];
        // k, then v, four pieces at a time. Of k a lane's key is `group` in its tile; wide heads in parts of 128.
        let per_part = if CHUNKS < 4 { CHUNKS } else { 4 };
        let fetches = KEY_TILES * per_part / 4;
        let tile_of = |number: usize, i: usize| number % fetches * (4 / per_part) + i / per_part;
        let fetch_k = |number: usize| {
            let mut held = [[0u32; 4]; 4];
            let keys = tile_of(number, 0) / 2;
            let origin = origin(k, k_strides, keys, key_of(2 * keys));
            let mut i = 0;
            while i < 4 {
                let chunk = number / fetches * per_part + i % per_part;
                let (key, element) =
                    (key_of(tile_of(number, i)) + group as i32, chunk as u32 * 32 + member * 8);
                if element < dims.head_dim {
                    held[i] = load(origin, dims.k_token_stride, key, element);
                }
                i += 1;
            }
            held
        };
        // Of v four keys of 16 and eight columns of 64.
        let key_of_v = |first_key: i32, keys: usize, i: usize| {
            let first = first_key + ((keys as u32 * WARPS + warp_idx) * 16) as i32;
            first + (2 * member + i as u32 / 2 * 8 + i as u32 % 2) as i32
        };
        let fetch_v = |first_key: i32, keys: usize, column: u32| {
            let mut held = [[0u32; 4]; 4];
            let element = column * 64 + group * 8;
            // Results of columns that do not exist are not used.
            let element = if element < dims.head_dim_v { element } else { 0 };
            // 0, opaque, or the addresses of all keys would be kept in registers for the next column.
            let zero = thread::opaque(column).wrapping_sub(column) as i32;
            let first = first_key + ((keys as u32 * WARPS + warp_idx) * 16) as i32 + zero;
            let origin = origin(v, v_strides, keys, first);
            let mut i = 0;
            while i < 4 {
                held[i] = load(origin, dims.v_token_stride, key_of_v(first_key, keys, i) + zero, element);
                i += 1;
            }
            held
        };
        let fetch = |number: usize| {
            if number < 2 * CHUNKS { fetch_k(number) } else { fetch_v(first_key, number - 2 * CHUNKS, 0) }
        };

        let mut held = [[[0u32; 4]; 4]; KEYS_16];
        let mut number = 0;
        while number < DEPTH {
            held[number] = fetch(number);
            number += 1;
        }
        let rows = [work.first_row + group, work.first_row + group + 8];
        let load_queries = |part: usize| {
            let mut queries = [[[0u32; 4]; 2]; 4];
            let mut i = 0;
            while i < 2 * per_part {
                let (half, chunk) = (i % 2, part * per_part + i / 2);
                let element = chunk as u32 * 32 + member * 8;
                if rows[half] < work.end_row && element < dims.head_dim {
                    let (query, head) = work.place(rows[half], dims);
                    let at = offset(
                        batch,
                        dims.q_batch_stride,
                        query,
                        dims.q_token_stride,
                        head,
                        dims.q_head_stride,
                    );
                    queries[i / 2][half] = global::load_nc_x4(q.add(at + element as usize));
                }
                i += 1;
            }
            queries
        };

        let mut s = [[0f32; 4]; KEY_TILES];
        // Two loops, since one alone would be too long to be unrolled for wide heads.
        let mut part = 0;
        while part < 2 * CHUNKS / fetches {
            let queries = load_queries(part);
            let mut step = 0;
            while step < fetches {
                let number = part * fetches + step;
                let mut i = 0;
                while i < 4 {
                    let [upper, lower] = queries[i % per_part];
                    let s = &mut s[tile_of(number, i)];
                    let [a, b, c, d] = held[number % DEPTH][i];
                    *s = T::multiply_add([upper[0], lower[0], upper[1], lower[1]], [a, b], *s);
                    *s = T::multiply_add([upper[2], lower[2], upper[3], lower[3]], [c, d], *s);
                    i += 1;
                }
                // Holds back ptxas, which would start more loads than there are registers for.
                warp::sync_warp(warp::FULL_MASK);
                held[number % DEPTH] = fetch(number + DEPTH);
                step += 1;
            }
            part += 1;
        }
        // The first keys of v are on their way, in the places that k has left.
        let place_of = |keys: usize| if keys < DEPTH { (2 * CHUNKS + keys) % DEPTH } else { keys };
        let mut keys = DEPTH;
        while keys < KEYS_16 {
            held[place_of(keys)] = fetch_v(first_key, keys, 0);
            keys += 1;
        }

        // Weights, of the warp's keys by themselves.
        let visible = [work.visible(rows[0], dims), work.visible(rows[1], dims)];
        let mut m = [f32::NEG_INFINITY; 2];
        let mut scale = dims.scale;
        if has_cap(dims) {
            let mut i = 0;
            while i < 4 * KEY_TILES {
                s[i / 4][i % 4] = capped(s[i / 4][i % 4] * scale, dims);
                i += 1;
            }
            scale = 1.0;
        }
        let mut i = 0;
        while i < 4 * KEY_TILES {
            let (half, key) = (i / 2 % 2, key_of(i / 4) + (2 * member + i as u32 % 2) as i32);
            let s = &mut s[i / 4][i % 4];
            *s = if visible[half].has(key) { *s * scale } else { f32::NEG_INFINITY };
            m[half] = math::max(m[half], *s);
            i += 1;
        }
        m = [warp::max_f32::<4>(m[0]), warp::max_f32::<4>(m[1])];
        let base = |m: f32| if m == f32::NEG_INFINITY { 0.0 } else { m };
        let bases = [base(m[0]), base(m[1])];
        let mut sums = [0f32; 2];
        let mut p = [[0u32; 4]; KEYS_16];
        let mut i = 0;
        while i < KEYS_16 {
            let mut eight = [0f32; 8];
            let mut j = 0;
            while j < 8 {
                let half = j / 2 % 2;
                eight[j] = weight::<T>(s[2 * i + j / 4][j % 4] - bases[half]);
                sums[half] += eight[j];
                j += 1;
            }
            p[i] = T::pack(&eight);
            i += 1;
        }
        sums = [warp::sum_f32::<4>(sums[0]), warp::sum_f32::<4>(sums[1])];
        let results = shared::base();
        let maxima = results + WARPS * ROWS * (DIM + PADDING) * 4;
        let totals = maxima + WARPS * ROWS * 4;
        if member == 0 {
            let mut half = 0;
            while half < 2 {
                let at = (warp_idx * ROWS + group + 8 * half as u32) * 4;
                shared::store_f32(maxima + at, m[half]);
                shared::store_f32(totals + at, sums[half]);
                half += 1;
            }
        }

        // A column of results at a time goes to shared memory, relative to the warp's maximum.
        let row_bytes = (DIM + PADDING) * 4;
        let put = |o: &[[f32; 4]; 8], column: u32| {
            let mut i = 0;
            while i < 8 {
                // Register j of the two of a row has columns 16·member + 8·j + 0..8, one from each tile.
                let (half, j, quad) = (i / 4, i / 2 % 2, i % 2 * 4);
                let value = |tile: usize| o[quad + tile][2 * half + j];
                let row = warp_idx * ROWS + group + 8 * half as u32;
                let at = results + row * row_bytes + (64 * column + 16 * member + (8 * j + quad) as u32) * 4;
                shared::store_f32x4(at, [value(0), value(1), value(2), value(3)]);
                i += 1;
            }
        };
        let mut is_finite = true;
        // Opaque, so that the loop is not unrolled, which would keep the addresses of all keys in registers.
        let mut column = thread::opaque(0);
        while column < DIM / 64 {
            let mut o = [[0f32; 4]; 8];
            let mut keys = 0;
            while keys < KEYS_16 {
                multiply_values::<T>(&mut o, p[keys], &held[place_of(keys)]);
                if column + 1 < DIM / 64 {
                    held[place_of(keys)] = fetch_v(first_key, keys, column + 1);
                }
                keys += 1;
            }
            put(&o, column);
            is_finite &= all_finite(&o);
            column += 1;
        }

        // Opaque, or what is known of block and thread would take up registers all the time.
        let work = Work::new(thread::opaque(thread::block_idx_x()), kv_lens, dims);
        let thread = thread::opaque(thread);
        let (lane, warp_idx) = (thread % 32, thread / 32);
        let (any, all) = work.keys(dims);
        let alike = any.lo >= all.lo && any.hi <= all.hi;
        let mut is_marked = false;
        // 0 · NaN of a key that a row does not see: once more, without what is not finite of such keys.
        if !alike && warp::any(warp::FULL_MASK, !is_finite) {
            let first_key = (work.split * SPLIT_KEYS) as i32;
            let mut column = thread::opaque(0);
            while column < DIM / 64 {
                let mut o = [[0f32; 4]; 8];
                let mut keys = 0;
                while keys < KEYS_16 {
                    let mut four = fetch_v(first_key, keys, column);
                    let mut i = 0;
                    while i < 4 {
                        if !all.has(key_of_v(first_key, keys, i)) {
                            is_marked |= clean::<T>(&mut four[i]);
                        }
                        i += 1;
                    }
                    multiply_values::<T>(&mut o, p[keys], &four);
                    keys += 1;
                }
                put(&o, column);
                column += 1;
            }
        }
        let marks = totals + WARPS * ROWS * 4;
        is_marked = warp::any(warp::FULL_MASK, is_marked);
        if lane == 0 {
            shared::store_u32(marks + warp_idx * 4, u32::from(is_marked));
        }

        // The block's maximum and sum, and the warps' results relative to it.
        thread::sync_threads();
        let [a, b, c, d] = shared::load_u32x4(marks);
        let is_marked = a | b | c | d != 0;
        let Work { first_row, end_row, .. } = work;
        let of_warp = |base: u32, warp: u32, row: u32| shared::load_f32(base + (warp * ROWS + row) * 4);
        let largest = |row: u32| {
            math::max(
                math::max(of_warp(maxima, 0, row), of_warp(maxima, 1, row)),
                math::max(of_warp(maxima, 2, row), of_warp(maxima, 3, row)),
            )
        };
        let decay = |warp: u32, row: u32| weight::<T>(of_warp(maxima, warp, row) - base(largest(row)));
        if thread < end_row - first_row {
            let total = |warp: u32| of_warp(totals, warp, thread) * decay(warp, thread);
            let stats = stats.add(2 * work.slot(first_row + thread, dims));
            global::store(stats, largest(thread));
            global::store(stats.add(1), (total(0) + total(1)) + (total(2) + total(3)));
        }
        let quads = DIM / 4;
        let mut i = thread;
        while i < (end_row - first_row) * quads {
            let (row, col) = (i / quads, i % quads * 4);
            if col < dims.head_dim_v {
                let of_warp =
                    |warp: u32| shared::load_f32x4(results + (warp * ROWS + row) * row_bytes + col * 4);
                let mut totals = [0f32; 4];
                let mut warp = 0;
                while warp < WARPS {
                    let (values, decay) = (of_warp(warp), decay(warp, row));
                    let mut j = 0;
                    while j < 4 {
                        totals[j] = math::fma(values[j], decay, totals[j]);
                        j += 1;
                    }
                    warp += 1;
                }
                if is_marked {
                    // What was left out of the products, for the row that sees it.
                    let own = work.visible(first_row + row, dims);
                    let mut key = any.lo.max(own.lo);
                    while key < any.hi.min(own.hi) {
                        let at = pages.row(dims, key, dims.v_batch_stride, dims.v_token_stride);
                        let at = v.add(at + col as usize);
                        let mut j = 0;
                        while j < 4 && !all.has(key) {
                            let value = global::load(at.add(j)).to_f32();
                            totals[j] += if value.is_finite() { 0.0 } else { value };
                            j += 1;
                        }
                        key += 1;
                    }
                }
                let at = work.slot(first_row + row, dims) * dims.head_dim_v as usize + col as usize;
                global::store_x4(partial.add(at), totals.map(f32::to_bits));
            }
            i += THREADS;
        }
    }
}

/// `o += p·v` for 16 keys and 64 columns.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
unsafe fn multiply_values<T: Multiplicand>(o: &mut [[f32; 4]; 8], p: [u32; 4], four: &[[u32; 4]; 4]) {
    let mut j = 0;
    while j < 8 {
        // SAFETY: the caller's promise.
        o[j] = unsafe { T::multiply_add(p, columns(four, j), o[j]) };
        j += 1;
    }
}

/// The operand for column `j` of a lane's eight: of keys 2t and 2t + 1, and of those 8 further.
#[inline(always)]
fn columns(four: &[[u32; 4]; 4], j: usize) -> [u32; 2] {
    let selector = if j.is_multiple_of(2) { 0x5410 } else { 0x7632 };
    [prmt(four[0][j / 2], four[1][j / 2], selector), prmt(four[2][j / 2], four[3][j / 2], selector)]
}

/// Whether no value is an infinity or NaN.
#[inline(always)]
fn all_finite(o: &[[f32; 4]; 8]) -> bool {
    let mut zero = 0.0;
    let mut i = 0;
    while i < 32 {
        zero = math::fma(o[i / 4][i % 4], 0.0, zero);
        i += 1;
    }
    zero == 0.0
}

/// Values that are not finite become zeros; whether there are any.
#[inline(always)]
fn clean<T: Multiplicand>(piece: &mut [u32; 4]) -> bool {
    let mut all_bad = 0;
    let mut i = 0;
    while i < 4 {
        let bad = not_finite::<T>(piece[i]);
        piece[i] &= !((bad >> 15) * 0xffff);
        all_bad |= bad;
        i += 1;
    }
    all_bad != 0
}
