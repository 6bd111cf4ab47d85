//! The end of a split: the four warps' results become one, which is joined to those before it in its group, or stored.

use abi::ops::attention::{
    AttentionDims, DECODE_RING_COLUMNS, DECODE_RING_GROUP_NUMBERS_BYTES, DECODE_RING_PADDING,
    DECODE_RING_ROWS, THREADS,
};
use cuda_std::{global, math, shared, thread, warp};

use super::bands::{LIFT, narrow, power_of_bands};
use super::{CHUNKS, WARPS, key_of};
use crate::matmul::multiplicand::{Factor, Multiplicand, not_finite};
use crate::ops::attention::cached::{Cached, head_scale};
use crate::ops::attention::work::Work;
use crate::ops::attention::{Tables, offset};
use crate::tile::softmax::{base, meet, weight};

/// A lane's part of 16 keys' values in 16 columns, as an operand, without what is not finite of keys that a row does
/// not see; and whether it had such a one.
///
/// # Safety
/// - The caller's promise to [`splits`](super::splits).
#[inline(always)]
unsafe fn finite_values<T: Multiplicand, C: Cached<T>, const ROWS: u32>(
    v: *const C,
    first_key: i32,
    first_column: u32,
    work: &Work<ROWS>,
    dims: &AttentionDims,
) -> ([u32; 4], bool) {
    let Work { pages, any, all, .. } = *work;
    let (mut values, mut has_left_out) = ([0u32; 4], false);
    let mut eight = 0;
    while eight < 2 {
        let mut second = 0;
        while second < 2 {
            let key = first_key + (second + 8 * eight) as i32;
            if any.has(key) {
                let head = offset(0, 0, 0, 0, work.head_kv, dims.v_head_stride);
                // SAFETY: a key that there is.
                let at = head + unsafe { pages.row(dims, key, dims.v_batch_stride, dims.v_token_stride) };
                let mut side = 0;
                while side < 2 {
                    let column = first_column + side * 8;
                    if column < dims.head_dim_v {
                        // SAFETY: as above, one of its columns.
                        let bits = unsafe { C::value_bits(v.wrapping_add(at + column as usize)) };
                        let is_left_out = !all.has(key) && not_finite::<C::Narrow>(bits) != 0;
                        has_left_out |= is_left_out;
                        let bits = if is_left_out { 0 } else { bits };
                        values[(2 * eight + side) as usize] |= bits << (16 * second);
                    }
                    side += 1;
                }
            }
            // Opaque, so that the loop stays one.
            second = thread::opaque(second + 1);
        }
        eight += 1;
    }
    (values, has_left_out)
}

/// A warp's results of so many times 16 columns from one on, without values that are not finite, of keys that a row
/// does not see. Returns whether there were any in the lane's columns.
///
/// # Safety
/// - *converged*: the whole warp, to which the rows of results belong; the rest is the caller's promise to
///   [`splits`](super::splits).
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn multiply_finite<T: Multiplicand, C: Cached<T>, const ROWS: u32, const HALVES: usize>(
    p: &[[[u32; 2]; HALVES]; CHUNKS],
    v: *const C,
    (results, row_bytes, first_column, tiles): (u32, u32, u32, u32),
    bands: u32,
    work: &Work<ROWS>,
    thread: u32,
    dims: &AttentionDims,
) -> bool {
    let (lane, warp_idx) = (thread % 32, thread / 32);
    let (group, member) = (lane / 4, lane % 4);
    let mut is_marked = false;
    let mut j = 0;
    // Opaque, so that the loop stays one.
    while j < thread::opaque(tiles) {
        let mut tile = [[0f32; 4]; HALVES];
        // Opaque, or the places of all keys would be kept in registers for the next columns.
        let member = thread::opaque(member + j * 4) % 4;
        let mut chunk = 0;
        while chunk < CHUNKS {
            let first_key = key_of(work, chunk, warp_idx) + 2 * member as i32;
            let column = first_column + j * 16 + group;
            // SAFETY: the caller's promise.
            let (values, has_left_out) =
                unsafe { finite_values::<T, C, ROWS>(v, first_key, column, work, dims) };
            is_marked |= has_left_out;
            // As in `super::splits`; opaque, so that the loop stays one.
            let mut band = thread::opaque(0);
            while band < bands {
                let factor = if band == 0 { 1.0 } else { power_of_bands(1) };
                let mut half = 0;
                while half < HALVES {
                    let weights = narrow::<T, C::Narrow>(p[chunk][half], band, bands);
                    let sums = tile[half].map(|sum| sum * factor);
                    // SAFETY: the caller's promise.
                    tile[half] = unsafe { C::Narrow::multiply_add(values, weights, sums) };
                    half += 1;
                }
                band += 1;
            }
            tile = tile.map(|tile| tile.map(|sum| sum * (1.0 / power_of_bands(bands - 1))));
            chunk += 1;
        }
        let mut i = 0;
        while i < 4 * HALVES {
            let row = 8 * (i / 4) as u32 + 2 * member + (i % 2) as u32;
            let column = j * 16 + group + (i / 2 % 2 * 8) as u32;
            // SAFETY: a row and a column of the warp's results.
            unsafe { shared::store_f32(results + row * row_bytes + column * 4, tile[i / 4][i % 4]) };
            i += 1;
        }
        j += 1;
    }
    is_marked
}

/// What a thread knows when its products are done.
pub(super) struct End<const ROWS: u32> {
    /// Its numbers and rows. More is found again where it is needed.
    pub(super) work: Work<ROWS>,
    /// Whether all rows see the same keys of the split.
    pub(super) is_alike: bool,
    /// Of the warp's weights, as [`narrow`] takes them.
    pub(super) bands: u32,
    /// Whether the split is the first of its result, and the last.
    pub(super) is_first: bool,
    pub(super) is_last: bool,
    /// Of the maxima of its two rows and their sums, of the warp's keys, the one that is the lane's.
    pub(super) number: f32,
    /// Shared memory behind the ring.
    pub(super) results: u32,
    /// And for what the splits of a result have been joined to.
    pub(super) joined: u32,
}

impl<const ROWS: u32> End<ROWS> {
    /// The four warps' results as one. `meanwhile` is done once o is in shared memory, between two barriers.
    ///
    /// # Safety
    /// - *converged*: the whole block; the rest is the caller's promise to [`splits`](super::splits).
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn store<
        T: Multiplicand,
        C: Cached<T>,
        const DIM: u32,
        const HALVES: usize,
        const STEPS: usize,
    >(
        &self,
        o: &[[[f32; 4]; HALVES]; STEPS],
        p: &[[[u32; 2]; HALVES]; CHUNKS],
        v: *const C,
        v_scale: *const f32,
        tables: Tables,
        partial: *mut f32,
        stats: *mut f32,
        dims: &AttentionDims,
        mut meanwhile: impl FnMut(),
    ) {
        let End { work, is_alike, bands, is_first, is_last, number, results, joined } = *self;
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
            let mut v_scale = head_scale::<T, C>(v_scale, work.head_kv);
            if T::INFINITIES != C::Narrow::INFINITIES {
                v_scale *= 1.0 / LIFT;
            }
            let mut first_column = 0;
            while first_column < DIM {
                // The results before these have been read.
                thread::sync_threads();
                let numbers = if group % 4 < 2 { maxima } else { totals };
                let row = group / 4 * 8 + 2 * member + group % 2;
                if row < num_rows {
                    shared::store_f32(numbers + (warp_idx * ROWS + row) * 4, number);
                }
                let mut i = 0;
                while i < 2 * HALVES {
                    let row = 8 * (i / 2) as u32 + 2 * member + (i % 2) as u32;
                    if row < num_rows {
                        let at = results + (warp_idx * ROWS + row) * row_bytes + group * 4 * C::PARTS as u32;
                        let mut j = 0;
                        while j < columns as usize / 16 {
                            let (tile, at) = (first_column as usize / 16 + j, at + j as u32 * 64);
                            let [a, b] = [o[tile][i / 2][i % 2], o[tile][i / 2][2 + i % 2]];
                            if C::PARTS == 1 {
                                shared::store_f32(at, a);
                                shared::store_f32(at + 32, b);
                            } else {
                                shared::store_f32x2(at, [a, b]);
                            }
                            j += 1;
                        }
                    }
                    i += 1;
                }
                let mut is_marked = false;
                if !is_alike {
                    let mut zero = 0.0;
                    let mut i = 0;
                    while i < columns as usize / 16 * HALVES * 4 {
                        let o = o[first_column as usize / 16 + i / 4 / HALVES][i / 4 % HALVES][i % 4];
                        zero = math::fma(o, 0.0, zero);
                        i += 1;
                    }
                    // 0 · NaN of a key that a row does not see: once more, without what is not finite of such keys.
                    if warp::any(warp::FULL_MASK, zero != 0.0) {
                        // Other lanes' columns.
                        warp::sync_warp(warp::FULL_MASK);
                        let work = work.again(tables, dims);
                        let results = results + warp_idx * ROWS * row_bytes;
                        let place = (results, row_bytes, first_column, columns / 16);
                        is_marked =
                            multiply_finite::<T, C, ROWS, HALVES>(p, v, place, bands, &work, thread, dims);
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
                // The largest score of the splits before, whose place is another for each split, as it is read until
                // all are done with this one; and what they and this one are multiplied by.
                let joined_m = |split: u32, row: u32| joined + (split % 2 * DECODE_RING_ROWS + row) * 4;
                let meet_joined = |m: &mut f32, row: u32| {
                    let before = shared::load_f32(joined_m(work.split + 1, row));
                    meet::<T>(m, before)
                };
                if first_column == 0 && thread < num_rows {
                    let total = |warp: u32| of_warp(totals, warp, thread) * decay(warp, thread);
                    let mut total = (total(0) + total(1)) + (total(2) + total(3));
                    let mut m = largest(thread);
                    let joined_sum = joined + (2 * DECODE_RING_ROWS + thread) * 4;
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
