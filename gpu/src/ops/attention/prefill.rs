//! A tile of queries of one head against all of their keys.
//!
//! Work split: 128 threads; `LANES` neighbouring lanes share four rows of scores and of the result, so a row's maximum
//! and sum are shuffles, and so is the way of a weight to the lanes that multiply it by a value: weights need no shared
//! memory. Blocks are numbered from the last tile of queries, which under a causal mask has the most to do.
//!
//! ```text
//! shared, f32   | q: 4·128/LANES rows of DIM | k, then v: KEYS rows of DIM |      48 KiB at DIM 128 and 256
//! a row         16-byte pieces; piece c of row r lies at c ^ (r mod 8): 8 rows, or 8 pieces, are read without conflict
//! thread        rows  y, y + Y, y + 2Y, y + 3Y       y = thread / LANES, Y = 128 / LANES
//! (x, y)        keys  x, x + LANES, …                x = thread mod LANES
//!               cols  4x .. 4x+4, then 4·LANES further on, …
//!
//! for each tile of keys:
//!     s = q·kᵀ                    // v is on its way into registers
//!     m' = max(m, max s); p = 2^(s − m'); l = l·2^(m − m') + Σp; o = o·2^(m − m')
//!     o += p·v                    // the next k is on its way
//! l += 2^(sink − m);  out = o / l
//! ```
//!
//! Tiles of keys start at multiples of KEYS, those without a visible key are skipped, and those that every row sees
//! whole take a path without masks. With a block mask those without a block of their rows' are skipped as well. A tile
//! of which a row sees nothing leaves that row's bits as they were, so a row's result does not depend on the other rows
//! of its block.

use abi::ops::attention::{AttentionDims, PREFILL_THREAD_ROWS, THREADS};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, math, shared, thread, warp};

use super::scores::{Blocks, Masks, capped, has_blocks, has_cap, has_masks, sink};
use super::{Pages, Sequence, Tables, Visible, load_piece, offset};
use crate::tile::sequences::piece_at;
use crate::tile::softmax::{join, log_sum_exp, weight};

/// Rows of a thread.
const ROWS: usize = PREFILL_THREAD_ROWS as usize;
/// Most keys of a thread in one tile.
const MAX_COLS: usize = 8;
/// Most result columns of a thread.
const MAX_OUT: usize = 16;
/// Most 16-byte pieces of a thread in one tile of k or v: 4096 elements over 128 threads.
const MAX_PIECES: usize = 8;

/// What a thread knows of its rows.
struct State {
    /// Scores, then weights; −1 for a weight that is masked.
    s: [[f32; MAX_COLS]; ROWS],
    o: [[f32; MAX_OUT]; ROWS],
    /// Largest score so far.
    m: [f32; ROWS],
    /// This thread's part of the sum of weights.
    l: [f32; ROWS],
}

/// Where a piece of a tile lies in shared memory.
#[inline(always)]
fn piece_address<const DIM: usize>(base: u32, row: u32, piece: u32) -> u32 {
    base + row * (DIM as u32 * 4) + ((piece ^ (row & 7)) << 4)
}

/// This thread's pieces of the rows `first..` of a tile of k or v, which start where `row_start` says, zeros from row
/// `limit` on and beyond `width`.
///
/// # Safety
/// - Rows below `limit` are *in-bounds* — checked in `Attention::run`.
#[inline(always)]
unsafe fn fetch<T: Element, const DIM: usize, const KEYS: usize>(
    rows: *const T,
    row_start: impl Fn(i32) -> usize,
    width: u32,
    first: i32,
    limit: i32,
    dims: &AttentionDims,
) -> [[u32; 4]; MAX_PIECES] {
    let per_row = (DIM / T::PER_16_BYTES) as u32;
    let mut held = [[0; 4]; MAX_PIECES];
    let mut i = 0;
    while i < KEYS * DIM / T::PER_16_BYTES / THREADS as usize {
        let piece = thread::thread_idx_x() + i as u32 * THREADS;
        let (row, col) = (first + (piece / per_row) as i32, piece % per_row * T::PER_16_BYTES as u32);
        if row < limit && col < width {
            // SAFETY: the row is below the limit, the column inside the head.
            held[i] = unsafe { load_piece(rows.add(row_start(row) + col as usize), dims) };
        }
        i += 1;
    }
    held
}

/// Writes this thread's pieces of a tile to shared memory as f32.
///
/// # Safety
/// - *exclusive*: nobody reads the tile until the next barrier.
#[inline(always)]
unsafe fn put<T: Element, const DIM: usize, const KEYS: usize>(base: u32, held: &[[u32; 4]; MAX_PIECES]) {
    let per_row = (DIM / T::PER_16_BYTES) as u32;
    let mut i = 0;
    while i < KEYS * DIM / T::PER_16_BYTES / THREADS as usize {
        let piece = thread::thread_idx_x() + i as u32 * THREADS;
        let mut values = [0.0; 8];
        T::unpack(held[i], &mut values);
        // SAFETY: the caller's promise; row and column lie inside the tile.
        unsafe { put_piece::<T, DIM>(base, piece / per_row, piece % per_row, &values) };
        i += 1;
    }
}

/// Writes the values of a 16-byte piece of global memory to shared memory as f32.
///
/// # Safety
/// - *exclusive* and *in-bounds*, as for `put`.
#[inline(always)]
unsafe fn put_piece<T: Element, const DIM: usize>(base: u32, row: u32, piece: u32, values: &[f32; 8]) {
    let first = piece * (T::PER_16_BYTES as u32 / 4);
    // SAFETY: the caller's promise.
    unsafe {
        shared::store_f32x4(
            piece_address::<DIM>(base, row, first),
            [values[0], values[1], values[2], values[3]],
        );
        if T::PER_16_BYTES == 8 {
            let upper = [values[4], values[5], values[6], values[7]];
            shared::store_f32x4(piece_address::<DIM>(base, row, first + 1), upper);
        }
    }
}

/// The whole block. See the module.
///
/// # Safety
/// - One block of [`THREADS`] threads per tile, head and sequence; tensors *in-bounds* — checked in `Attention::run`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn tile<T: Element, const DIM: usize, const KEYS: usize, const LANES: u32>(
    q: *const T,
    k: *const T,
    v: *const T,
    tables: Tables,
    out: *mut T,
    lse: *mut f32,
    sinks: *const f32,
    masks: Masks,
    dims: &AttentionDims,
) {
    let groups = THREADS / LANES;
    let num_rows = groups * ROWS as u32;
    let (x, y) = (thread::thread_idx_x() % LANES, thread::thread_idx_x() / LANES);

    // Sizes are at least 1 where there is a block at all; `max` tells the compiler.
    let (heads, batches) = (dims.heads_q.max(1), dims.batch.max(1));
    let index = thread::block_idx_x();
    let (head, rest) = (index % heads, index / heads);
    let (mut batch, tile) = (rest % batches, dims.tiles - 1 - rest / batches);
    let head_kv = head / dims.group.max(1);
    let mut first_query = tile * num_rows;

    // SAFETY: a row index below the limits given to `fetch`, and queries below `end_query`, are inside their tensors —
    // Attention::run. Every barrier is reached by all threads: what the branches around them depend on is the same in
    // the whole block. Shared memory is written between the barriers that end the old reads and start the new ones.
    unsafe {
        if !tables.q_offsets.is_null() {
            let piece = piece_at(tables.q_offsets, dims.sequences.max(1), dims.tokens_q, tile, num_rows);
            let Some((of, first)) = piece else { return };
            (batch, first_query) = (of.index, first);
        }
        let sequence = Sequence::new(tables, dims, batch);
        if first_query >= sequence.seq_q {
            return;
        }
        let end_query = (first_query + num_rows).min(sequence.seq_q);
        let pages = Pages::new(tables, dims, batch);
        let k = k.add(offset(0, 0, 0, 0, head_kv, dims.k_head_stride));
        let v = v.add(offset(0, 0, 0, 0, head_kv, dims.v_head_stride));
        let k_row = |key| pages.row(dims, key, dims.k_batch_stride, dims.k_token_stride);
        let v_row = |key| pages.row(dims, key, dims.v_batch_stride, dims.v_token_stride);
        let (q_base, kv_base) = (shared::base(), shared::base() + num_rows * (DIM as u32 * 4));

        // Keys that some row sees, and keys that all rows see.
        let (first_row, last_row) =
            (sequence.visible(dims, first_query), sequence.visible(dims, end_query - 1));
        let any = Visible { lo: first_row.lo, hi: last_row.hi };
        let all = Visible { lo: last_row.lo, hi: first_row.hi };

        let keys = KEYS as i32;
        // The tile at `key`, or the next one of which some row sees a block.
        let next = |key: i32| {
            if has_blocks(dims) && key < any.hi {
                let blocks = Blocks::new(masks.blocks, batch, head, dims);
                let next = blocks.next([first_query, end_query - 1], key as u32, any.hi as u32, dims) as i32;
                if next < any.hi { next / keys * keys } else { any.hi }
            } else {
                key
            }
        };
        let mut key = next(any.lo / keys * keys);
        let mut held = fetch::<T, DIM, KEYS>(k, k_row, dims.head_dim, key, any.hi, dims);

        let per_row = (DIM / T::PER_16_BYTES) as u32;
        let mut piece = thread::thread_idx_x();
        while piece < num_rows * per_row {
            let (row, col) = (piece / per_row, piece % per_row);
            let (query, element) = (first_query + row, col * T::PER_16_BYTES as u32);
            let mut values = [0.0; 8];
            if query < end_query && element < dims.head_dim {
                let at = offset(
                    batch,
                    dims.q_batch_stride,
                    sequence.first_q + query,
                    dims.q_token_stride,
                    head,
                    dims.q_head_stride,
                );
                T::unpack(load_piece(q.add(at + element as usize), dims), &mut values);
            }
            put_piece::<T, DIM>(q_base, row, col, &values);
            piece += THREADS;
        }
        // The result takes q's place at the end, also where there is no key at all.
        thread::sync_threads();

        let mut state = State {
            s: [[0.0; MAX_COLS]; ROWS],
            o: [[0.0; MAX_OUT]; ROWS],
            m: [f32::NEG_INFINITY; ROWS],
            l: [0.0; ROWS],
        };
        while key < any.hi {
            put::<T, DIM, KEYS>(kv_base, &held);
            thread::sync_threads();
            held = fetch::<T, DIM, KEYS>(v, v_row, dims.head_dim_v, key, any.hi, dims);
            scores::<DIM, KEYS, LANES>(&mut state, q_base, kv_base, x, y, dims);
            if has_cap(dims) {
                cap::<KEYS, LANES>(&mut state, dims);
            }
            let whole = key >= all.lo && key + keys <= all.hi && !has_masks(dims);
            if whole {
                softmax::<T, DIM, KEYS, LANES>(&mut state, |_, _| true);
            } else {
                let place = [batch, head, first_query + y];
                let seen = mask::<T, KEYS, LANES>(&mut state, masks, place, key + x as i32, sequence, dims);
                softmax::<T, DIM, KEYS, LANES>(&mut state, |row, col| {
                    seen >> (row * MAX_COLS + col) & 1 != 0
                });
            }
            thread::sync_threads();
            put::<T, DIM, KEYS>(kv_base, &held);
            thread::sync_threads();
            let following = next(key + keys);
            held = fetch::<T, DIM, KEYS>(k, k_row, dims.head_dim, following, any.hi, dims);
            if whole {
                accumulate::<DIM, KEYS, LANES, false>(&mut state, kv_base, x, (any.hi - key) as u32);
            } else {
                accumulate::<DIM, KEYS, LANES, true>(&mut state, kv_base, x, (any.hi - key) as u32);
            }
            thread::sync_threads();
            key = following;
        }

        // Anew, or it would be kept in registers all the time.
        let sequence = Sequence::new(tables, dims, thread::opaque(batch));
        let end_query = (first_query + num_rows).min(sequence.seq_q);
        let sink = sink::<T>(sinks, head);
        let mut row = 0;
        while row < ROWS {
            let mut sum = warp::sum_f32::<LANES>(state.l[row]);
            let decay = join::<T>(&mut state.m[row], &mut sum, sink);
            let scale = math::rcp(sum) * decay;
            let own = y + row as u32 * groups;
            let mut piece = 0;
            while piece < DIM / LANES as usize / 4 {
                let finish = |j: usize| if sum == 0.0 { 0.0 } else { state.o[row][4 * piece + j] * scale };
                let address = piece_address::<DIM>(q_base, own, x + piece as u32 * LANES);
                shared::store_f32x4(address, [finish(0), finish(1), finish(2), finish(3)]);
                piece += 1;
            }
            let query = first_query + own;
            if !lse.is_null() && x == 0 && query < end_query {
                let at = offset(
                    batch,
                    dims.lse_batch_stride,
                    sequence.first_q + query,
                    1,
                    head,
                    dims.lse_head_stride,
                );
                global::store(lse.add(at), log_sum_exp::<T>(state.m[row], sum));
            }
            row += 1;
        }
        thread::sync_threads();
        let mut piece = thread::thread_idx_x();
        while piece < num_rows * per_row {
            let (row, col) = (piece / per_row, piece % per_row);
            let (query, element) = (first_query + row, col * T::PER_16_BYTES as u32);
            if query < end_query && element < dims.head_dim_v {
                let first = col * (T::PER_16_BYTES as u32 / 4);
                let lower = shared::load_f32x4(piece_address::<DIM>(q_base, row, first));
                let upper = if T::PER_16_BYTES == 8 {
                    shared::load_f32x4(piece_address::<DIM>(q_base, row, first + 1))
                } else {
                    [0.0; 4]
                };
                let values = [lower[0], lower[1], lower[2], lower[3], upper[0], upper[1], upper[2], upper[3]];
                let at = offset(
                    batch,
                    dims.out_batch_stride,
                    sequence.first_q + query,
                    dims.out_token_stride,
                    head,
                    dims.out_head_stride,
                );
                let out = out.add(at + element as usize);
                if dims.vector != 0 {
                    global::store_x4(out, T::pack(&values));
                } else {
                    let mut j = 0;
                    while j < T::PER_16_BYTES {
                        global::store(out.add(j), T::from_f32(values[j]));
                        j += 1;
                    }
                }
            }
            piece += THREADS;
        }
    }
}

/// `s = q·kᵀ`, four elements of the head at a time.
///
/// # Safety
/// - Both tiles are complete: a barrier since they were written.
#[inline(always)]
unsafe fn scores<const DIM: usize, const KEYS: usize, const LANES: u32>(
    state: &mut State,
    q_base: u32,
    k_base: u32,
    x: u32,
    y: u32,
    dims: &AttentionDims,
) {
    let cols = KEYS / LANES as usize;
    let s = &mut state.s;
    *s = [[0.0; MAX_COLS]; ROWS];
    let mut piece = 0;
    while piece < dims.head_dim / 4 {
        // A thread's rows differ by multiples of 8: one place in the row for all of them.
        let q_row = piece_address::<DIM>(q_base, y, piece);
        let k_row = piece_address::<DIM>(k_base, x, piece);
        let mut q = [[0.0; 4]; ROWS];
        let mut row = 0;
        while row < ROWS {
            // SAFETY: inside the tile, which the caller says is complete.
            q[row] = unsafe { shared::load_f32x4(q_row + row as u32 * (THREADS / LANES * DIM as u32 * 4)) };
            row += 1;
        }
        let mut col = 0;
        while col < cols {
            // SAFETY: as above.
            let k = unsafe { shared::load_f32x4(k_row + col as u32 * (LANES * DIM as u32 * 4)) };
            let mut row = 0;
            while row < ROWS {
                let mut j = 0;
                while j < 4 {
                    s[row][col] = math::fma(q[row][j], k[j], s[row][col]);
                    j += 1;
                }
                row += 1;
            }
            col += 1;
        }
        piece += 1;
    }
    // Not q, whose roundings would be those of as many products.
    let mut i = 0;
    while i < ROWS * cols {
        s[i / cols][i % cols] *= dims.scale;
        i += 1;
    }
}

/// Scores under the soft cap.
#[inline(always)]
fn cap<const KEYS: usize, const LANES: u32>(state: &mut State, dims: &AttentionDims) {
    let cols = KEYS / LANES as usize;
    let mut i = 0;
    while i < ROWS * cols {
        let s = &mut state.s[i / cols][i % cols];
        *s = capped(*s, dims);
        i += 1;
    }
}

/// Which scores' keys are seen, a bit each: those of rows from `query` and keys from `key` on. Adds the bias to their
/// scores.
///
/// # Safety
/// - As for [`Masks::term`].
#[inline(always)]
unsafe fn mask<T: Element, const KEYS: usize, const LANES: u32>(
    state: &mut State,
    masks: Masks,
    [batch, head, query]: [u32; 3],
    key: i32,
    own: Sequence,
    dims: &AttentionDims,
) -> u32 {
    let cols = KEYS / LANES as usize;
    let mut seen = 0;
    let mut row = 0;
    while row < ROWS {
        let query = query + row as u32 * (THREADS / LANES);
        let visible = own.visible(dims, query);
        let mut col = 0;
        while col < cols {
            let key = key + (col as u32 * LANES) as i32;
            let mut is_seen = visible.has(key);
            if has_masks(dims) && is_seen && query < own.seq_q {
                // SAFETY: the key is one of the sequence's — the caller.
                let term = unsafe { masks.term::<T>([batch, head, query], key as u32, dims) };
                is_seen = term.is_some();
                state.s[row][col] += term.unwrap_or(0.0);
            }
            seen |= u32::from(is_seen) << (row * MAX_COLS + col);
            col += 1;
        }
        row += 1;
    }
    seen
}

/// Turns the scores into weights, and brings maximum, sum and result up to date. `visible(row, col)` is the mask.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
unsafe fn softmax<T: Element, const DIM: usize, const KEYS: usize, const LANES: u32>(
    state: &mut State,
    visible: impl Fn(usize, usize) -> bool,
) {
    let cols = KEYS / LANES as usize;
    let mut row = 0;
    while row < ROWS {
        let mut largest = f32::NEG_INFINITY;
        let mut col = 0;
        while col < cols {
            if !visible(row, col) {
                state.s[row][col] = f32::NEG_INFINITY;
            }
            largest = math::max(largest, state.s[row][col]);
            col += 1;
        }
        // SAFETY: the whole warp takes part — the caller.
        let m = math::max(state.m[row], unsafe { warp::max_f32::<LANES>(largest) });
        let base = if m == f32::NEG_INFINITY { 0.0 } else { m };
        let decay = weight::<T>(state.m[row] - base);
        state.m[row] = m;
        let mut sum = 0.0;
        let mut col = 0;
        while col < cols {
            let p = weight::<T>(state.s[row][col] - base);
            sum += p;
            state.s[row][col] = if visible(row, col) { p } else { -1.0 };
            col += 1;
        }
        state.l[row] = math::fma(state.l[row], decay, sum);
        let mut col = 0;
        while col < DIM / LANES as usize {
            state.o[row][col] *= decay;
            col += 1;
        }
        row += 1;
    }
}

/// `o += p·v` over the first `num_keys` keys of the tile.
///
/// # Safety
/// - *converged*: the whole warp; the tile is complete.
#[inline(always)]
unsafe fn accumulate<const DIM: usize, const KEYS: usize, const LANES: u32, const MASKED: bool>(
    state: &mut State,
    v_base: u32,
    x: u32,
    num_keys: u32,
) {
    let group = thread::lane() & !(LANES - 1);
    // The lane whose weights are used; a bound that is not constant also keeps the loop rolled, which is long enough.
    let lanes = num_keys.min(LANES);
    let mut lane = 0;
    while lane < lanes {
        // The keys of one lane differ by multiples of 8: one place in the row for all of them.
        let v_row = piece_address::<DIM>(v_base, lane, x);
        let mut col = 0;
        while col < KEYS / LANES as usize {
            let mut p = [0.0; ROWS];
            let mut row = 0;
            while row < ROWS {
                // SAFETY: the whole warp takes part — the caller.
                p[row] = unsafe { warp::shuffle_idx_f32(warp::FULL_MASK, state.s[row][col], group | lane) };
                row += 1;
            }
            let mut piece = 0;
            while piece < DIM / LANES as usize / 4 {
                let at = v_row + (col as u32 * LANES * DIM as u32 * 4 + piece as u32 * LANES * 16);
                // SAFETY: inside the tile, which the caller says is complete.
                let v = unsafe { shared::load_f32x4(at) };
                let mut row = 0;
                while row < ROWS {
                    let masked = MASKED && p[row] < 0.0;
                    if !masked {
                        let mut j = 0;
                        while j < 4 {
                            let o = &mut state.o[row][4 * piece + j];
                            *o = math::fma(p[row], v[j], *o);
                            j += 1;
                        }
                    }
                    row += 1;
                }
                piece += 1;
            }
            col += 1;
        }
        lane += 1;
    }
}

macro_rules! entry {
    ($entry:ident, $type:ident, Prefill, $dim:literal, $keys:literal, $lanes:literal) => {
        /// Entry point; see `prefill` and `abi::ops::attention`.
        ///
        /// # Safety
        /// - Arguments as `Attention::run` checks them.
        #[kernel(max_threads = 128, min_blocks = 2)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            q: *const $type,
            k: *const $type,
            v: *const $type,
            kv_lens: *const u32,
            q_offsets: *const u32,
            page_table: *const u32,
            out: *mut $type,
            lse: *mut f32,
            sinks: *const f32,
            bias: *const u8,
            blocks: *const u32,
            dims: AttentionDims,
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                let tables = Tables { kv_lens, q_offsets, page_table };
                let masks = Masks { bias, blocks };
                tile::<$type, $dim, $keys, $lanes>(q, k, v, tables, out, lse, sinks, masks, &dims)
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
