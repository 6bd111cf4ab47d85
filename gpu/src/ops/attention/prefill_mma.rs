//! Tiles of queries on the tensor cores of Ampere and later: `cp.async` brings keys and values, warps multiply by
//! `mma.sync`.
//!
//! Work split: a block does a tile of queries of one head, each of its four warps `PARTS` times 16 rows of it, against
//! steps of `KEYS` keys, from the last that is seen to the first.
//!
//! ```text
//! shared   | q, later out [rows][DIM] | k 0, k 1 [KEYS][DIM] | v [KEYS][DIM_V] | marks | pages of four steps |
//!
//! each step   wait for k ── barrier ── start the copies of v, and of the next k into the place that everybody has left
//!             s = q·kᵀ ── mask ── softmax: m, l, p = 2^(s·c − m·c), o ·= 2^((m_old − m)·c)
//!             wait for v ── barrier ── o += p·v; p is the operand as it comes out of the softmax
//! ```
//!
//! - q is read from shared memory anew in each step, which leaves its registers to a second part: two parts share every
//!   operand that comes from k and v, of which `ldmatrix` brings just as many as `mma.sync` takes with one.
//! - Pieces of 16 bytes are moved by an exclusive or with their row, so that the eight rows that `ldmatrix` reads at a
//!   time come from different banks.
//! - Steps without a visible key are skipped; only those that some row does not see whole are masked. There whatever is
//!   not finite in v becomes 0, as 0 · NaN would carry it into rows that do not see it, and is added in the end to
//!   those that do.
//! - A bias is added by kernels of their own, with steps of 32 keys, since it takes registers: its words, of two keys
//!   each, come while the products are made. Scores are multiplied by the scale before; every step may have keys that
//!   some row does not see.
//! - A row's steps begin at multiples of KEYS, and one of which it sees nothing leaves it as it was, so its bits depend
//!   on its sequence alone.
//! - Of few queries and many keys there are fewer tiles than multiprocessors: as in `wgmma`, `SPLIT` kernels cut a
//!   tile's steps into parts, whose results `combine` puts together.
//! - Keys in pages have kernels of their own (`PAGED`), with the same steps and so the same bits. Of 16 keys all are in
//!   one page: a few lanes copy the numbers of a step's pages to shared memory two steps ahead, beside k and without a
//!   register, and each row's place is found anew where it is copied, by strides that are parameters.
//! - At 255 registers two blocks of four warps are all that fits; at 256 columns the accumulators leave room for one
//!   part of 16 rows only, and every operand serves one `mma.sync`.
//!
//! What was measured: `gpu/NOTES/attention.md`.

use abi::ops::attention::{AttentionDims, PREFILL_PAGE_STEPS, THREADS};
use cuda_std::cvt::{bf16, f16};
use cuda_std::{cp_async, global, kernel, math, matrix, shared, thread, warp};

use super::scores::{Masks, has_cap, sink};
use super::share::{Share, moved};
use super::softmax::{Groups, Rows, add_pairs, cap, mask, raise, round, scale_rows, store_lse, weights};
use super::tile::Tile;
use super::{Pages, Tables, Visible, offset};
use crate::matmul::multiplicand::Multiplicand;
use crate::tile::softmax::join;

/// The whole block. See the module.
///
/// # Safety
/// - One block of [`THREADS`] threads per tile, head and sequence; tensors *in-bounds*, their rows *aligned(16)* —
///   checked in `Attention::run`. `STEPS`, `SCORES`, `SUMS` and `WEIGHTS` are `DIM / 16`, `KEYS / 2`, `DIM_V / 2` and
///   `KEYS / 4`. There is a bias if, and only if, the kernel is `MASKED`, a table of pages if, and only if, it is
///   `PAGED`; no block mask.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn tile<
    T: Multiplicand,
    const DIM: u32,
    const DIM_V: u32,
    const KEYS: u32,
    const PARTS: usize,
    const STEPS: usize,
    const SCORES: usize,
    const SUMS: usize,
    const WEIGHTS: usize,
    const MASKED: bool,
    const SPLIT: bool,
    const PAGED: bool,
>(
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
    let q_at = shared::base();
    // The first row of a thread's warp.
    let first_own = |thread: u32| thread / 32 * (PARTS as u32 * 16);

    // SAFETY: keys inside `any` and queries of the tensor are *in-bounds*, and so are the numbers of the keys' pages in
    // the table, each one of the pool's or taken to be its last — Attention::run. What the branches around
    // barriers and shuffles depend on is the same in the whole block. A place in shared memory is filled anew behind a
    // barrier after its last reading; rows of q are read, and written with the result, by their own warp.
    unsafe {
        let rows = 64 * PARTS as u32;
        let new_tile = |number: u32| {
            // Opaque where registers are fewest, or whether there are several would be kept in one.
            let sequences = if MASKED { thread::opaque(dims.sequences) } else { dims.sequences };
            if PARTS == 2 {
                Tile::new::<KEYS, 128, SPLIT>(number, sequences, tables, dims)
            } else {
                Tile::new::<KEYS, 64, SPLIT>(number, sequences, tables, dims)
            }
        };
        let tile = new_tile(thread::block_idx_x());
        if tile.first_query >= tile.own.seq_q {
            return;
        }
        let pages = if PAGED {
            Pages { table: tables.page_table, first: tile.batch * dims.table_stride, first_row: 0 }
        } else {
            Pages::new(tables, dims, tile.batch)
        };
        let k_at = |step: u32| q_at + rows * DIM * 2 + step % 2 * (KEYS * DIM * 2);
        let v_at = q_at + (rows + 2 * KEYS) * DIM * 2;
        let marks = v_at + KEYS * DIM_V * 2;
        let pages_at = |step: u32| marks + THREADS / 32 * 4 + step % PREFILL_PAGE_STEPS * (KEYS / 4);
        // Starts the copies of the numbers of a step's pages. Beyond the keys that are seen there are none to be read.
        let find_pages = |thread: u32, step: u32| {
            if thread < KEYS / 16 {
                let key = step * KEYS + 16 * thread;
                let bytes = if (key as i32) < tile.any.hi { 4 } else { 0 };
                let from = pages.table.wrapping_add((pages.first + (key >> dims.page_log2)) as usize);
                cp_async::ca_4_fill(pages_at(step) + 4 * thread, from, bytes);
            }
        };
        // Opaque, or where the head's keys and values begin would be kept in registers.
        let head = |step: u32| thread::opaque(tile.head_kv ^ step) ^ step;
        let copy_k = |share: Share, step: u32| {
            if PAGED {
                let k = k.wrapping_add(offset(0, 0, 0, 0, head(step), dims.k_head_stride));
                let shape = [dims.k_batch_stride, dims.k_token_stride, dims.head_dim];
                let at = [pages_at(step), k_at(step)];
                return share.copy_pages::<T, DIM, KEYS>(k, shape, step * KEYS, tile.any, at, dims);
            }
            let k = k.wrapping_add(offset(
                pages.first,
                dims.k_batch_stride,
                pages.first_row,
                dims.k_token_stride,
                tile.head_kv,
                dims.k_head_stride,
            ));
            let shape = (dims.k_token_stride, dims.head_dim);
            share.copy::<T, DIM, KEYS>(k, shape, (step * KEYS) as i32, tile.any, k_at(step));
        };
        let copy_v = |share: Share, step: u32| {
            if PAGED {
                let v = v.wrapping_add(offset(0, 0, 0, 0, head(step), dims.v_head_stride));
                let shape = [dims.v_batch_stride, dims.v_token_stride, dims.head_dim_v];
                let at = [pages_at(step), v_at];
                return share.copy_pages::<T, DIM_V, KEYS>(v, shape, step * KEYS, tile.any, at, dims);
            }
            let v = v.wrapping_add(offset(
                pages.first,
                dims.v_batch_stride,
                pages.first_row,
                dims.v_token_stride,
                tile.head_kv,
                dims.v_head_stride,
            ));
            let shape = (dims.v_token_stride, dims.head_dim_v);
            share.copy::<T, DIM_V, KEYS>(v, shape, (step * KEYS) as i32, tile.any, v_at);
        };
        let queries = Visible { lo: 0, hi: tile.own.seq_q as i32 };
        let from = q.wrapping_add(offset(
            tile.batch,
            dims.q_batch_stride,
            tile.own.first_q,
            dims.q_token_stride,
            tile.head,
            dims.q_head_stride,
        ));
        let shape = (dims.q_token_stride, dims.head_dim);
        let share = Share::new(thread::thread_idx_x());
        let mut step = tile.end;
        if PAGED {
            if step > tile.first {
                find_pages(thread::thread_idx_x(), step - 1);
            }
            if step > tile.first + 1 {
                find_pages(thread::thread_idx_x(), step - 2);
            }
            cp_async::commit_group();
        }
        let mut part = 0;
        while part < PARTS as u32 {
            let (first, to) = (tile.first_query + 64 * part, q_at + part * (64 * DIM * 2));
            share.copy::<T, DIM, 64>(from, shape, first as i32, queries, to);
            part += 1;
        }
        if PAGED {
            // The pages are there; q may still come.
            cp_async::commit_group();
            cp_async::wait_group::<1>();
            thread::sync_threads();
        }
        if step > tile.first {
            copy_k(share, step - 1);
        }
        cp_async::commit_group();

        let mut o = [[0f32; SUMS]; PARTS];
        let mut state = [Rows { m: [f32::NEG_INFINITY; 2], l: [0.0; 2] }; PARTS];
        let mut is_marked = false;
        // By a scale below that scores are multiplied before the largest is looked for, and where a bias is added
        // before that.
        let is_positive = !MASKED && dims.scale >= f32::MIN_POSITIVE;
        let scale = || if is_positive { dims.scale } else { 1.0 };
        while step > tile.first {
            step -= 1;
            // Opaque, or the places of all that the thread copies and reads would be kept in registers for the next
            // step.
            let thread = thread::opaque(thread::thread_idx_x() ^ step) ^ step;
            let (share, lane) = (Share::new(thread), thread % 32);
            cp_async::wait_group::<0>();
            thread::sync_threads();
            copy_v(share, step);
            cp_async::commit_group();
            if step > tile.first {
                copy_k(share, step - 1);
            }
            if PAGED && step > tile.first + 1 {
                // To a place whose last readers are two barriers behind.
                find_pages(thread, step - 2);
            }
            cp_async::commit_group();

            let place = |part: usize| {
                let query = tile.first_query + first_own(thread) + 16 * part as u32 + lane / 4;
                (query, step * KEYS + 2 * (lane % 4))
            };
            let bias_of = |part: usize| -> [u32; WEIGHTS] {
                let (query, first) = place(part);
                masks.pairs([tile.batch, tile.head, query], first, (step + 1) * KEYS, dims)
            };
            // On its way while the products are made; the next part's while this one's weights are.
            let mut bias = if MASKED { bias_of(0) } else { [0; WEIGHTS] };
            let mut s = [[0f32; SCORES]; PARTS];
            scores::<T, DIM, KEYS, PARTS, STEPS, SCORES>(
                &mut s,
                q_at + first_own(thread) * (DIM * 2),
                k_at(step),
                lane,
            );
            let is_border = MASKED || tile.is_border::<KEYS>(step);
            let mut p = [[0u32; WEIGHTS]; PARTS];
            let mut part = 0;
            while part < PARTS {
                let s = &mut s[part];
                if has_cap(dims) {
                    cap::<SCORES, false>(s, dims);
                }
                if !MASKED && !is_positive {
                    let mut i = 0;
                    while i < SCORES {
                        s[i] *= dims.scale;
                        i += 1;
                    }
                }
                if MASKED {
                    let own = bias;
                    if part + 1 < PARTS {
                        bias = bias_of(part + 1);
                    }
                    add_pairs::<T, SCORES, WEIGHTS>(s, &own, dims);
                }
                if is_border {
                    let (query, first) = place(part);
                    mask(s, Groups::UNKNOWN, dims, [tile.own.len, tile.own.ahead], query, first);
                }
                let (exponents, decay) =
                    raise::<SCORES, false>(s, Groups::UNKNOWN, &mut state[part], scale());
                weights(s, Groups::UNKNOWN, &mut state[part], exponents, decay);
                if let Some(decay) = decay {
                    scale_rows(&mut o[part], decay);
                }
                round::<T, SCORES, WEIGHTS>(s, &mut p[part]);
                part += 1;
            }
            cp_async::wait_group::<1>();
            if is_border {
                is_marked |= share.clean::<T, DIM_V, KEYS>(v_at);
            }
            thread::sync_threads();
            values::<T, DIM_V, KEYS, PARTS, SUMS, WEIGHTS>(&mut o, &p, v_at, lane);
        }
        // Where there was no step q is still coming, into the places that the results take.
        cp_async::wait_group::<0>();
        thread::sync_threads();

        // Opaque, or the places of tile and thread would take up registers all the time.
        let tile = new_tile(thread::opaque(thread::block_idx_x()));
        let thread = thread::opaque(thread::thread_idx_x());
        let (lane, warp_idx, first_own) = (thread % 32, thread / 32, first_own(thread));
        let (group, member) = (lane / 4, lane % 4);
        let own_at = q_at + first_own * (DIM * 2);
        is_marked = warp::any(warp::FULL_MASK, is_marked);
        if lane == 0 {
            shared::store_u32(marks + warp_idx * 4, u32::from(is_marked));
        }
        let sink = sink::<T>(sinks, tile.head);
        let (out_batch, out_row) = tile.out_place(tables, dims);
        let mut part = 0;
        while part < PARTS {
            let mut factors = [0f32; 2];
            let mut is_empty = [false; 2];
            let mut half = 0;
            while half < 2 {
                let mut sum = warp::sum_f32::<4>(state[part].l[half]);
                is_empty[half] = sum == 0.0;
                let mut m = state[part].m[half] * scale();
                let decay = join::<T>(&mut m, &mut sum, sink);
                factors[half] = math::rcp(sum) * decay;
                let row = first_own + (16 * part + 8 * half) as u32 + group;
                if !lse.is_null() && member == 0 && tile.first_query + row < tile.own.seq_q {
                    let at = offset(
                        out_batch,
                        dims.lse_batch_stride,
                        out_row + row,
                        1,
                        tile.head,
                        dims.lse_head_stride,
                    );
                    store_lse::<T, SPLIT>(lse, at, m, sum);
                }
                half += 1;
            }
            scale_rows(&mut o[part], factors);
            // A row of weights 0 has no result, whatever its values are.
            let at = own_at + (16 * part as u32 + group) * (DIM * 2) + member * 4;
            let mut i = 0;
            while i < SUMS / 4 {
                let value = |j: usize| if is_empty[j / 2] { 0.0 } else { o[part][4 * i + j] };
                let words = T::pack(&[value(0), value(1), value(2), value(3), 0.0, 0.0, 0.0, 0.0]);
                let piece = moved(i as u32, group);
                shared::store_u32(at + piece, words[0]);
                shared::store_u32(at + piece + 8 * DIM * 2, words[1]);
                i += 1;
            }
            part += 1;
        }

        thread::sync_threads();
        let [a, b, c, d] = shared::load_u32x4(marks);
        if a | b | c | d != 0 {
            let pages = Pages::new(tables, dims, tile.batch);
            spoil::<T, DIM, KEYS, MASKED, SPLIT>(&tile, rows, q_at, v, pages, masks, dims);
            thread::sync_threads();
        }
        let mut i = thread;
        // Opaque, so that the loop stays one.
        let end = thread::opaque(rows * (DIM_V / 8));
        while i < end {
            let (row, piece) = (i / (DIM_V / 8), i % (DIM_V / 8));
            if tile.first_query + row < tile.own.seq_q && piece * 8 < dims.head_dim_v {
                let strides = (dims.out_batch_stride, dims.out_token_stride, dims.out_head_stride);
                let at = offset(out_batch, strides.0, out_row + row, strides.1, tile.head, strides.2);
                let words = shared::load_u32x4(q_at + row * (DIM * 2) + moved(piece, row));
                global::store_x4(out.add(at + piece as usize * 8), words);
            }
            i += THREADS;
        }
    }
}

/// `s = q·kᵀ` for the warp's rows, which are at `q`.
///
/// # Safety
/// - *converged*: the whole warp; both tensors are complete.
#[inline(always)]
unsafe fn scores<
    T: Multiplicand,
    const DIM: u32,
    const KEYS: u32,
    const PARTS: usize,
    const STEPS: usize,
    const SCORES: usize,
>(
    s: &mut [[f32; SCORES]; PARTS],
    q: u32,
    k: u32,
    lane: u32,
) {
    let q = q + lane % 16 * (DIM * 2);
    let k = k + (lane % 8 + lane / 16 * 8) * (DIM * 2);
    let mut step = 0;
    while step < STEPS {
        let first = 2 * step as u32;
        let piece = |own: u32| moved((first % 8) ^ own, lane) + first / 8 * 128;
        let mut rows = [[0u32; 4]; PARTS];
        let mut part = 0;
        while part < PARTS {
            // SAFETY: the caller's promise.
            rows[part] = unsafe { matrix::load_x4(q + part as u32 * (16 * DIM * 2) + piece(lane / 16)) };
            part += 1;
        }
        let mut i = 0;
        while i < SCORES / 8 {
            // SAFETY: the caller's promise.
            let keys = unsafe { matrix::load_x4(k + i as u32 * (16 * DIM * 2) + piece(lane / 8 % 2)) };
            let mut part = 0;
            while part < PARTS {
                // SAFETY: the caller's promise.
                unsafe { add_16::<T, SCORES>(&mut s[part], 8 * i, rows[part], keys) };
                part += 1;
            }
            i += 1;
        }
        // Holds back ptxas, which would load more operands than there are registers for.
        // SAFETY: the caller's promise.
        unsafe { warp::sync_warp(warp::FULL_MASK) };
        step += 1;
    }
}

/// `o += p·v`.
///
/// # Safety
/// - *converged*: the whole warp; v is complete.
#[inline(always)]
unsafe fn values<
    T: Multiplicand,
    const DIM_V: u32,
    const KEYS: u32,
    const PARTS: usize,
    const SUMS: usize,
    const WEIGHTS: usize,
>(
    o: &mut [[f32; SUMS]; PARTS],
    p: &[[u32; WEIGHTS]; PARTS],
    v: u32,
    lane: u32,
) {
    let v = v + lane % 16 * (DIM_V * 2);
    let mut keys = 0;
    while keys < WEIGHTS / 4 {
        let mut i = 0;
        while i < SUMS / 8 {
            let first = 2 * i as u32;
            let piece = moved((first % 8) ^ (lane / 16), lane) + first / 8 * 128;
            // SAFETY: the caller's promise.
            let columns = unsafe { matrix::load_x4_trans(v + keys as u32 * (16 * DIM_V * 2) + piece) };
            let mut part = 0;
            while part < PARTS {
                let j = 4 * keys;
                let weights = [p[part][j], p[part][j + 1], p[part][j + 2], p[part][j + 3]];
                // SAFETY: the caller's promise.
                unsafe { add_16::<T, SUMS>(&mut o[part], 8 * i, weights, columns) };
                part += 1;
            }
            i += 1;
        }
        keys += 1;
    }
}

/// Adds the product of 16 rows and 16 columns to the sums from number `at` on.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
unsafe fn add_16<T: Multiplicand, const SUMS: usize>(
    sums: &mut [f32; SUMS],
    at: usize,
    rows: [u32; 4],
    columns: [u32; 4],
) {
    let mut half = 0;
    while half < 2 {
        let at = at + 4 * half;
        let before = [sums[at], sums[at + 1], sums[at + 2], sums[at + 3]];
        // SAFETY: the caller's promise.
        let after = unsafe { T::multiply_add(rows, [columns[2 * half], columns[2 * half + 1]], before) };
        sums[at] = after[0];
        sums[at + 1] = after[1];
        sums[at + 2] = after[2];
        sums[at + 3] = after[3];
        half += 1;
    }
}

/// Adds values that are not finite, and were therefore left out at borders, to the rows of the result that see them. A
/// thread does two columns.
///
/// # Safety
/// - The whole block, whose result is at `at`; v and the bias *in-bounds* for `dims`.
#[inline(always)]
unsafe fn spoil<T: Multiplicand, const DIM: u32, const KEYS: u32, const MASKED: bool, const SPLIT: bool>(
    tile: &Tile,
    rows: u32,
    at: u32,
    v: *const T,
    pages: Pages,
    masks: Masks,
    dims: &AttentionDims,
) {
    let v = v.wrapping_add(offset(0, 0, 0, 0, tile.head_kv, dims.v_head_stride));
    let column = 2 * thread::thread_idx_x();
    // Opaque, so that the loop stays one.
    let rows = thread::opaque(rows);
    let keys = tile.keys::<KEYS, SPLIT>();
    let mut key = keys.lo;
    // SAFETY: keys that some row sees and columns of the head are inside v; a pair of columns is this thread's alone.
    unsafe {
        while column < dims.head_dim_v && key < keys.hi {
            if MASKED || tile.is_border::<KEYS>(key as u32 / KEYS) {
                let first = pages.row(dims, key, dims.v_batch_stride, dims.v_token_stride);
                let from = v.wrapping_add(first + column as usize);
                let values = [global::load(from).to_f32(), global::load(from.add(1)).to_f32()];
                let is_bad = [!values[0].is_finite(), !values[1].is_finite()];
                let mut row = 0;
                while (is_bad[0] || is_bad[1]) && row < rows {
                    let query = tile.first_query + row;
                    let mut is_seen = tile.own.visible(dims, query).has(key) && query < tile.own.seq_q;
                    if MASKED && is_seen {
                        is_seen = masks.term::<T>([tile.batch, tile.head, query], key as u32, dims).is_some();
                    }
                    if is_seen {
                        let at = at + row * (DIM * 2) + moved(column / 8, row) + column % 8 * 2;
                        let mut pair = [0f32; 8];
                        T::unpack([shared::load_u32(at), 0, 0, 0], &mut pair);
                        let mut i = 0;
                        while i < 2 {
                            if is_bad[i] {
                                pair[i] += values[i];
                            }
                            i += 1;
                        }
                        shared::store_u32(at, T::pack(&pair)[0]);
                    }
                    row += 1;
                }
            }
            key += 1;
        }
    }
}

macro_rules! prefill_mma_entries {
    ($($entry:ident => $type:ident, $dtype:ident, PrefillMma { dim: $dim:literal, dim_v: $dim_v:literal, keys: $keys:literal,
       parts: $parts:literal, blocks: $blocks:literal, masked: $masked:literal, split: $split:literal, paged: $paged:literal };)*) => {$(
        /// Entry point; see `prefill_mma` and `abi::ops::attention`.
        ///
        /// # Safety
        /// - Arguments as `Attention::run` checks them.
        #[kernel(max_threads = 128, min_blocks = $blocks)]
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
                tile::<
                    $type,
                    $dim,
                    $dim_v,
                    $keys,
                    $parts,
                    { $dim / 16 },
                    { $keys / 2 },
                    { $dim_v / 2 },
                    { $keys / 4 },
                    $masked,
                    $split,
                    $paged,
                >(q, k, v, tables, out, lse, sinks, masks, &dims)
            }
        }
    )*};
}
abi::attention_prefill_mma_table!(prefill_mma_entries);
