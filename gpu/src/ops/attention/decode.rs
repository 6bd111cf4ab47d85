//! Few queries against a long cache: 256 keys per block, every element of k and v read from memory once.
//!
//! Work split: the rows of a block are pairs of a query and a head, of the heads that share a key head. `LANES` lanes
//! take a key, 16 bytes (up to five times 16) of its row each, which they multiply with all the rows' q, held in
//! registers.
//!
//! ```text
//! grid     tiles of rows (fastest: they share k and v in L2) × splits × key heads × sequences
//! key      i·STEP + u·GROUPS + group                  group = thread / LANES, u < UNROLL: loads in flight per thread
//! shared   | weights [256 keys][ROWS], later results [4 warps][ROWS][DIM_V] | maxima [4][ROWS] | sums [4][ROWS] |
//!
//! s = q·kᵀ      a dot product per key and row, summed over the lanes
//! p = 2^(s − m), m the split's own maximum; l = Σp       // the first v are on their way
//! o = p·v       per group; then over the groups of a warp (shuffles) and the warps (shared)
//! ```
//!
//! Rows that cannot be accessed in pieces of 16 bytes are for the prefill kernels, where those hold the head. For wider
//! heads there is only this kernel, for any number of queries: latent attention's 576 and 512, where v is the first
//! columns of k. What a block has read as k it reads again as v from L2, as do the blocks of the other rows.
//!
//! The sum over the lanes halves the rows while it halves the lanes: at each step a lane gives away one half of its
//! rows and keeps the other, so 8 rows cost 7 shuffles and those for the lanes that are left, instead of 8 times all.
//!
//! All sums are made in an order that does not depend on ROWS, so a row has the same bits in every kernel of its type
//! and dimensions. Splits and the groups' keys are counted from the sequence's first key, so neither does the order
//! depend on the other sequences or on the room in the cache.

use abi::ops::attention::{AttentionDims, MAX_PREFILL_DIM, SPLIT_KEYS, THREADS, decode_results_bytes};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, math, shared, thread, warp};

use super::scores::{Masks, capped, has_cap, has_masks};
use super::{Pages, Sequence, Tables, Visible, load_piece, offset};
use crate::tile::softmax::weight;

/// Most pieces of 16 bytes that a thread has in flight.
const MAX_PIECES: usize = 8;
const WARPS: u32 = THREADS / 32;
/// Keys that a warp turns into weights.
const WARP_KEYS: u32 = SPLIT_KEYS / WARPS;

/// How a key's row is spread over lanes.
#[derive(Clone, Copy)]
struct Spread {
    /// Lanes of a key.
    lanes: u32,
    /// Pieces of 16 bytes of a lane, `lanes` pieces apart; those beyond the row are zeros.
    chunks: usize,
    /// Keys of the block at a time.
    groups: u32,
    /// Keys of a thread at a time.
    unroll: usize,
    /// Keys of the block per iteration.
    step: u32,
}

impl Spread {
    #[inline(always)]
    const fn new(dim: usize, per_16: usize, rows: usize) -> Self {
        let pieces = (dim / per_16) as u32;
        let lanes = if pieces < 32 { pieces } else { 32 };
        let chunks = pieces.div_ceil(lanes) as usize;
        // Eight rows of q and of results leave registers for four pieces; more blocks at a time make up for it.
        let in_flight = if rows > 4 { MAX_PIECES / 2 } else { MAX_PIECES };
        let (groups, unroll) = (THREADS / lanes, in_flight / chunks);
        Spread { lanes, chunks, groups, unroll, step: groups * unroll as u32 }
    }
}

/// Elements of a head that a lane holds, at most.
pub(super) const fn per_lane(dim: usize) -> usize {
    dim.div_ceil(256) * 8
}

/// Sums each row's values over the lanes of a key; the lane gets the sum of one row, `lane / (lanes / ROWS)`.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
unsafe fn sum_rows<const ROWS: usize>(mut values: [f32; ROWS], lanes: u32) -> f32 {
    let mut stage = 0;
    while stage < 5 {
        let mask = lanes >> (stage + 1);
        let half = ROWS >> (stage + 1);
        if mask != 0 {
            let upper = thread::lane() & mask != 0;
            let mut row = 0;
            while row < ROWS.div_ceil(2) {
                if row < half {
                    let (low, high) = (values[row], values[row + half]);
                    let (keep, give) = if upper { (high, low) } else { (low, high) };
                    // SAFETY: the whole warp takes part — the caller.
                    values[row] = keep + unsafe { warp::shuffle_xor_f32(warp::FULL_MASK, give, mask) };
                } else if row == 0 {
                    // SAFETY: the whole warp takes part — the caller.
                    values[0] += unsafe { warp::shuffle_xor_f32(warp::FULL_MASK, values[0], mask) };
                }
                row += 1;
            }
        }
        stage += 1;
    }
    values[0]
}

/// The whole block. See the module.
///
/// # Safety
/// - One block of [`THREADS`] threads per split, tile of rows, key head and sequence; tensors and workspace
///   *in-bounds*, the rows of the tensors *aligned(16)*, beyond [`MAX_PREFILL_DIM`] only if `dims.vector` — checked in
///   `Attention::run`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn split<
    T: Element,
    const DIM: usize,
    const DIM_V: usize,
    const ROWS: usize,
    const LANE: usize,
    const LANE_V: usize,
>(
    q: *const T,
    k: *const T,
    v: *const T,
    tables: Tables,
    masks: Masks,
    partial: *mut f32,
    stats: *mut f32,
    dims: &AttentionDims,
) {
    let (of_k, of_v) = (Spread::new(DIM, T::PER_16_BYTES, ROWS), Spread::new(DIM_V, T::PER_16_BYTES, ROWS));
    let thread = thread::thread_idx_x();
    let (lane, warp_idx) = (thread::lane(), thread::warp_idx());

    // Sizes are at least 1 where there is a block at all; `max` tells the compiler.
    let (splits, tiles, heads_kv) = (dims.splits.max(1), dims.tiles.max(1), dims.heads_kv.max(1));
    let heads_per_key = dims.group.max(1);
    let index = thread::block_idx_x();
    let (tile, rest) = (index % tiles, index / tiles);
    let (split, rest) = (rest % splits, rest / splits);
    let (head_kv, batch) = (rest % heads_kv, rest / heads_kv);
    let first_row = tile * ROWS as u32;
    // Row r of the block is query `r / heads_per_key` of head `r % heads_per_key`.
    let place = |row: u32| (row / heads_per_key, head_kv * heads_per_key + row % heads_per_key);

    // SAFETY: keys inside `any` are below the sequence's length, rows below `end_row` inside q and the workspace —
    // Attention::run. What the branches around barriers and shuffles depend on is the same in the whole block.
    unsafe {
        let own = Sequence::new(tables, dims, batch);
        let end_row = (first_row + ROWS as u32).min(own.seq_q * heads_per_key);
        if first_row >= end_row {
            return;
        }
        let first_key = (split * SPLIT_KEYS) as i32;
        let top = own.visible(dims, place(first_row).0);
        let bottom = own.visible(dims, place(end_row - 1).0);
        // Keys of this split that some row sees, and keys that all rows see.
        let any = Visible { lo: top.lo.max(first_key), hi: bottom.hi.min(first_key + SPLIT_KEYS as i32) };
        let all = Visible { lo: bottom.lo, hi: top.hi };
        if any.lo >= any.hi {
            return;
        }
        let iterations = |spread: Spread| {
            ((any.lo - first_key) as u32 / spread.step, ((any.hi - first_key) as u32).div_ceil(spread.step))
        };
        let pages = Pages::new(tables, dims, batch);
        let k = k.add(offset(0, 0, pages.first_row, dims.k_token_stride, head_kv, dims.k_head_stride));
        let v = v.add(offset(0, 0, pages.first_row, dims.v_token_stride, head_kv, dims.v_head_stride));
        let pages = Pages { first_row: 0, ..pages };
        let element = |spread: Spread, chunk: usize| {
            (thread % spread.lanes + chunk as u32 * spread.lanes) * T::PER_16_BYTES as u32
        };
        let key_of = |spread: Spread, iteration: u32, u: usize| {
            iteration * spread.step + u as u32 * spread.groups + thread / spread.lanes
        };
        // 16 bytes of a row of k or v. Heads for which there are no prefill kernels come in all alignments.
        let load = |from: *const T| {
            if DIM > MAX_PREFILL_DIM as usize && dims.vector == 0 {
                load_piece(from, dims)
            } else {
                global::load_stream_x4(from)
            }
        };
        // This thread's pieces of one iteration; zeros where there is no key.
        let fetch = |spread: Spread, rows: *const T, strides: [u32; 2], width: u32, iteration: u32| {
            let mut held = [[0u32; 4]; MAX_PIECES];
            let mut u = 0;
            while u < spread.unroll {
                let key = first_key + key_of(spread, iteration, u) as i32;
                let mut chunk = 0;
                while chunk < spread.chunks {
                    if any.has(key) && element(spread, chunk) < width {
                        let at = pages.row(dims, key, strides[0], strides[1]);
                        held[u * spread.chunks + chunk] =
                            load(rows.add(at + element(spread, chunk) as usize));
                    }
                    chunk += 1;
                }
                u += 1;
            }
            held
        };
        let k_strides = [dims.k_batch_stride, dims.k_token_stride];
        let v_strides = [dims.v_batch_stride, dims.v_token_stride];
        let fetch_k = |iteration: u32| fetch(of_k, k, k_strides, dims.head_dim, iteration);
        let fetch_v = |iteration: u32| fetch(of_v, v, v_strides, dims.head_dim_v, iteration);
        let weights = shared::base();
        let maxima = weights + decode_results_bytes(DIM_V as u32, ROWS as u32);
        let sums = maxima + WARPS * ROWS as u32 * 4;

        let (start, end) = iterations(of_k);
        let mut held = fetch_k(start);
        let mut queries = [[0.0f32; LANE]; ROWS];
        let mut row = 0;
        while row < ROWS {
            if first_row + (row as u32) < end_row {
                let (query, head) = place(first_row + row as u32);
                let at = offset(
                    batch,
                    dims.q_batch_stride,
                    own.first_q + query,
                    dims.q_token_stride,
                    head,
                    dims.q_head_stride,
                );
                let mut chunk = 0;
                while chunk < of_k.chunks {
                    if element(of_k, chunk) < dims.head_dim {
                        let mut values = [0.0; 8];
                        let from = q.add(at + element(of_k, chunk) as usize);
                        let piece = if DIM > MAX_PREFILL_DIM as usize {
                            load_piece(from, dims)
                        } else {
                            global::load_nc_x4(from)
                        };
                        T::unpack(piece, &mut values);
                        let mut j = 0;
                        while j < T::PER_16_BYTES {
                            queries[row][chunk * T::PER_16_BYTES + j] = values[j];
                            j += 1;
                        }
                    }
                    chunk += 1;
                }
            }
            row += 1;
        }

        // Scores.
        let (member, lanes_per_row) = (thread % of_k.lanes, of_k.lanes / ROWS as u32);
        let mut iteration = start;
        while iteration < end {
            let mut u = 0;
            while u < of_k.unroll {
                let mut dots = [0.0f32; ROWS];
                let mut chunk = 0;
                while chunk < of_k.chunks {
                    let mut values = [0.0; 8];
                    T::unpack(held[u * of_k.chunks + chunk], &mut values);
                    let mut j = 0;
                    while j < T::PER_16_BYTES {
                        let mut row = 0;
                        while row < ROWS {
                            dots[row] =
                                math::fma(queries[row][chunk * T::PER_16_BYTES + j], values[j], dots[row]);
                            row += 1;
                        }
                        j += 1;
                    }
                    chunk += 1;
                }
                // Not q, whose roundings would be those of as many products.
                let score = sum_rows(dots, of_k.lanes) * dims.scale;
                if member % lanes_per_row == 0 {
                    let row = member / lanes_per_row;
                    shared::store_f32(weights + (key_of(of_k, iteration, u) * ROWS as u32 + row) * 4, score);
                }
                u += 1;
            }
            iteration += 1;
            if iteration < end {
                held = fetch_k(iteration);
            }
        }
        let (start, end) = iterations(of_v);
        held = fetch_v(start);
        thread::sync_threads();

        // Weights: a warp does 64 keys, a lane every (32 / ROWS)-th key of one row.
        // Anew, or it would be kept in registers all the time.
        let own = Sequence::new(tables, dims, thread::opaque(batch));
        let per_lane = 2 * ROWS;
        let lane_row = lane % ROWS as u32;
        let own = if first_row + lane_row < end_row {
            own.visible(dims, place(first_row + lane_row).0)
        } else {
            Visible { lo: 0, hi: 0 }
        };
        let address = |i: usize| weights + (warp_idx * WARP_KEYS * ROWS as u32 + i as u32 * 32 + lane) * 4;
        let visible = |i: usize| {
            let key = warp_idx * WARP_KEYS + (i as u32 * 32 + lane) / ROWS as u32;
            own.has(first_key + key as i32) && key < SPLIT_KEYS
        };
        let mut p = [f32::NEG_INFINITY; 16];
        // A bit for each key that is seen.
        let mut seen = 0u32;
        let mut largest = f32::NEG_INFINITY;
        let mut i = 0;
        while i < per_lane {
            let mut term = Some(0.0);
            if visible(i) && has_masks(dims) {
                let (query, head) = place(first_row + lane_row);
                let key = first_key as u32 + warp_idx * WARP_KEYS + (i as u32 * 32 + lane) / ROWS as u32;
                term = masks.term::<T>([batch, head, query], key, dims);
            }
            if let (Some(term), true) = (term, visible(i)) {
                p[i] = shared::load_f32(address(i));
                if has_cap(dims) {
                    p[i] = capped(p[i], dims);
                }
                p[i] += term;
                seen |= 1 << i;
            }
            largest = math::max(largest, p[i]);
            i += 1;
        }
        let mut mask = 16;
        while mask >= ROWS as u32 {
            largest = math::max(largest, warp::shuffle_xor_f32(warp::FULL_MASK, largest, mask));
            mask /= 2;
        }
        if lane < ROWS as u32 {
            shared::store_f32(maxima + (warp_idx * ROWS as u32 + lane) * 4, largest);
        }
        thread::sync_threads();
        let of_warp = |base: u32, i: u32| shared::load_f32(base + (i * ROWS as u32 + lane_row) * 4);
        let m = math::max(
            math::max(of_warp(maxima, 0), of_warp(maxima, 1)),
            math::max(of_warp(maxima, 2), of_warp(maxima, 3)),
        );
        let base = if m == f32::NEG_INFINITY { 0.0 } else { m };
        let mut i = 0;
        while i < per_lane {
            p[i] = weight::<T>(p[i] - base);
            shared::store_f32(address(i), if seen >> i & 1 != 0 { p[i] } else { -1.0 });
            i += 1;
        }
        // Halves first, then quarters, …: with the shuffles one tree over the warp's keys, whatever ROWS is.
        let mut stage = 1;
        while stage < 5 {
            let half = per_lane >> stage;
            let mut i = 0;
            while i < 8 {
                if i < half {
                    p[i] += p[i + half];
                }
                i += 1;
            }
            stage += 1;
        }
        let mut sum = p[0];
        let mut mask = 16;
        while mask >= ROWS as u32 {
            sum += warp::shuffle_xor_f32(warp::FULL_MASK, sum, mask);
            mask /= 2;
        }
        if lane < ROWS as u32 {
            shared::store_f32(sums + (warp_idx * ROWS as u32 + lane) * 4, sum);
        }
        thread::sync_threads();

        // Where a row's results go: [row][split].
        let slot = |row: u32| {
            let (query, head) = place(row);
            ((batch * dims.heads_q + head) as usize * dims.seq_q as usize + query as usize)
                * dims.splits as usize
                + split as usize
        };
        if thread < ROWS as u32 && first_row + thread < end_row {
            let sum = (of_warp(sums, 0) + of_warp(sums, 1)) + (of_warp(sums, 2) + of_warp(sums, 3));
            let stats = stats.add(2 * slot(first_row + thread));
            global::store(stats, m);
            global::store(stats.add(1), sum);
        }

        // Values.
        let mut result = [[0.0f32; LANE_V]; ROWS];
        let mut iteration = start;
        while iteration < end {
            let key = first_key + (iteration * of_v.step) as i32;
            // Two ways are more than there are registers for where heads are wide.
            let is_whole = key >= all.lo && key + of_v.step as i32 <= all.hi && !has_masks(dims);
            if DIM <= MAX_PREFILL_DIM as usize && is_whole {
                add_values::<T, DIM_V, ROWS, LANE_V, false>(
                    &mut result,
                    weights,
                    &held,
                    key_of(of_v, iteration, 0),
                );
            } else {
                add_values::<T, DIM_V, ROWS, LANE_V, true>(
                    &mut result,
                    weights,
                    &held,
                    key_of(of_v, iteration, 0),
                );
            }
            iteration += 1;
            if iteration < end {
                held = fetch_v(iteration);
            }
        }
        let mut row = 0;
        while row < ROWS {
            let mut j = 0;
            while j < of_v.chunks * T::PER_16_BYTES {
                let mut stage = 0;
                while stage < 5 {
                    let mask = of_v.lanes << stage;
                    if mask < 32 {
                        result[row][j] += warp::shuffle_xor_f32(warp::FULL_MASK, result[row][j], mask);
                    }
                    stage += 1;
                }
                j += 1;
            }
            row += 1;
        }
        // The weights have been used: their place is free.
        thread::sync_threads();
        if lane < of_v.lanes {
            let mut row = 0;
            while row < ROWS {
                let mut chunk = 0;
                while chunk < of_v.chunks {
                    let at = weights
                        + ((warp_idx * ROWS as u32 + row as u32) * DIM_V as u32 + element(of_v, chunk)) * 4;
                    let mut j = 0;
                    while j < T::PER_16_BYTES {
                        let values = &result[row];
                        let i = chunk * T::PER_16_BYTES + j;
                        shared::store_f32x4(
                            at + j as u32 * 4,
                            [values[i], values[i + 1], values[i + 2], values[i + 3]],
                        );
                        j += 4;
                    }
                    chunk += 1;
                }
                row += 1;
            }
        }
        thread::sync_threads();
        let quads = DIM_V as u32 / 4;
        let mut i = thread;
        while i < ROWS as u32 * quads {
            let (row, col) = (i / quads, i % quads * 4);
            if first_row + row < end_row && col < dims.head_dim_v {
                let of_warp =
                    |w: u32| shared::load_f32x4(weights + ((w * ROWS as u32 + row) * DIM_V as u32 + col) * 4);
                let (a, b, c, d) = (of_warp(0), of_warp(1), of_warp(2), of_warp(3));
                let total = |j: usize| ((a[j] + b[j]) + (c[j] + d[j])).to_bits();
                let at = slot(first_row + row) * dims.head_dim_v as usize + col as usize;
                global::store_x4(partial.add(at), [total(0), total(1), total(2), total(3)]);
            }
            i += THREADS;
        }
    }
}

/// `result += p · v` over the thread's keys of an iteration, from `first` on; with `MASKED` without the weights that
/// are marked as masked.
///
/// # Safety
/// - *initialised*: a barrier since the weights were written.
#[inline(always)]
unsafe fn add_values<
    T: Element,
    const DIM_V: usize,
    const ROWS: usize,
    const LANE_V: usize,
    const MASKED: bool,
>(
    result: &mut [[f32; LANE_V]; ROWS],
    weights: u32,
    held: &[[u32; 4]; MAX_PIECES],
    first: u32,
) {
    let spread = Spread::new(DIM_V, T::PER_16_BYTES, ROWS);
    let mut u = 0;
    while u < spread.unroll {
        // SAFETY: a key of the split; the caller's promise.
        let p =
            unsafe { load_weights::<ROWS>(weights + (first + u as u32 * spread.groups) * (ROWS as u32 * 4)) };
        let mut chunk = 0;
        while chunk < spread.chunks {
            let mut values = [0.0; 8];
            T::unpack(held[u * spread.chunks + chunk], &mut values);
            let mut row = 0;
            while row < ROWS {
                let masked = MASKED && p[row] < 0.0;
                if !masked {
                    let mut j = 0;
                    while j < T::PER_16_BYTES {
                        let sum = &mut result[row][chunk * T::PER_16_BYTES + j];
                        *sum = math::fma(p[row], values[j], *sum);
                        j += 1;
                    }
                }
                row += 1;
            }
            chunk += 1;
        }
        u += 1;
    }
}

/// The weights of one key.
///
/// # Safety
/// - *initialised*: a barrier since they were written; `address` is *aligned(16)* from 4 rows on.
#[inline(always)]
unsafe fn load_weights<const ROWS: usize>(address: u32) -> [f32; ROWS] {
    let mut p = [0.0; ROWS];
    let mut row = 0;
    while row < ROWS {
        // SAFETY: the caller's promise.
        unsafe {
            if ROWS >= 4 {
                let four = shared::load_f32x4(address + row as u32 * 4);
                let mut j = 0;
                while j < 4 {
                    // `%`: the compiler sees fewer rows here too.
                    p[(row + j) % ROWS] = four[j];
                    j += 1;
                }
                row += 4;
            } else {
                p[row] = shared::load_f32(address + row as u32 * 4);
                row += 1;
            }
        }
    }
    p
}

macro_rules! entry {
    ($entry:ident, $type:ident, Decode, $dim:literal, $dim_v:literal, $rows:literal) => {
        /// Entry point; see `decode` and `abi::ops::attention`.
        ///
        /// # Safety
        /// - Arguments as `Attention::run` checks them.
        #[kernel(max_threads = 128, min_blocks = 3)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            q: *const $type,
            k: *const $type,
            v: *const $type,
            kv_lens: *const u32,
            q_offsets: *const u32,
            page_table: *const u32,
            bias: *const u8,
            blocks: *const u32,
            partial: *mut f32,
            stats: *mut f32,
            dims: AttentionDims,
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                let tables = Tables { kv_lens, q_offsets, page_table };
                let masks = Masks { bias, blocks };
                split::<$type, $dim, $dim_v, $rows, { per_lane($dim) }, { per_lane($dim_v) }>(
                    q, k, v, tables, masks, partial, stats, &dims,
                )
            }
        }
    };
    ($($of_others:tt)*) => {};
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident { $($field:ident: $value:literal),* };)*) => {
        $(entry!($entry, $type, $tile, $($value),*);)*
    };
}
abi::attention_table!(entries);
