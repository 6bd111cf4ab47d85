//! A tile's end: the log-sum-exp, and results from a consumer's registers to memory.

use abi::ops::attention::{AttentionDims, wgmma_knows_blocks, wgmma_out_in_q};
use cuda_std::cvt::Element;
use cuda_std::{barrier, fence, global, math, matrix, mbarrier, shared, thread, tma, warp};

use super::super::scores::{Masks, sink};
use super::super::softmax::{Rows, round as round_results, scale_rows, store_lse};
use super::super::tile::Tile;
use super::super::{Pages, Tables, offset};
use super::borders::spoil;
use super::walk::{Places, STEPS, TileWords, Walk};
use super::{Maps, OWN, ROW_BYTES, first_row};
use crate::matmul::multiplicand::Multiplicand;
use crate::tile::softmax::join;

/// What a thread's two rows are multiplied by in the end, and whether a row has no weights.
#[derive(Clone, Copy)]
pub(super) struct Ends {
    factors: [f32; 2],
    is_empty: [bool; 2],
}

/// What of a tile's end may be done while its last product is under way: waits for the boxes of the results, and stores
/// the log-sum-exp.
///
/// # Safety
/// - *converged*: all 128 threads of the consumer, whose scores are done; the rest is the caller's promise to
///   [`super::tiles`].
#[inline(always)]
pub(super) unsafe fn settle<T: Multiplicand, const MASKED: bool, const SPLIT: bool>(
    rows: &Rows,
    round: u32,
    places: Places,
    lse: *mut f32,
    sinks: *const f32,
    dims: &AttentionDims,
) -> Ends {
    // SAFETY: the tile's words; rows that there are — the caller.
    unsafe {
        // Opaque, or the places of tile and thread would take up registers all the time.
        let round = thread::opaque(round);
        let thread = thread::opaque(thread::thread_idx_x() ^ round) ^ round;
        let consumer = thread / 128 - 1;
        // The store of the tile before has read its boxes, and the products of scores q, when all threads have passed
        // the barrier. All threads wait, though one has stores: behind a branch of that one alone, LLVM makes a copy of
        // the barrier for it.
        tma::wait_group_read::<0>();
        barrier::sync(OWN + consumer, 128);
        let row = first_row(consumer, thread % 128);
        let [_, head, batch, num_rows] = TileWords::of_rows(places, round);
        let mut ends = Ends { factors: [0.0; 2], is_empty: [false; 2] };
        let sink = sink::<T>(sinks, head);
        let mut half = 0;
        while half < 2 {
            let mut sum = warp::sum_f32::<4>(rows.l[half]);
            ends.is_empty[half] = sum == 0.0;
            let mut m = rows.m[half] * if MASKED { 1.0 } else { dims.scale };
            let decay = join::<T>(&mut m, &mut sum, sink);
            ends.factors[half] = math::rcp(sum) * decay;
            let row = row + 8 * half as u32;
            if !lse.is_null() && thread.is_multiple_of(4) && row < num_rows {
                let row = TileWords::first_row(places, round) + row;
                let at = offset(batch, dims.lse_batch_stride, row, 1, head, dims.lse_head_stride);
                store_lse::<T, SPLIT>(lse, at, m, sum);
            }
            half += 1;
        }
        ends
    }
}

/// A tile's results, rounded: sums, of which each row has a factor.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
pub(super) unsafe fn results<T: Element, const SUMS: usize, const WORDS: usize>(
    o: &mut [f32; SUMS],
    Ends { factors, is_empty }: Ends,
    words: &mut [u32; WORDS],
) {
    scale_rows(o, factors);
    // A row of weights 0 has no result, whatever its values are.
    // SAFETY: the whole warp takes part — the caller.
    if unsafe { warp::any(warp::FULL_MASK, is_empty[0] || is_empty[1]) } {
        let mut i = 0;
        while i < SUMS {
            if is_empty[i / 2 % 2] {
                o[i] = 0.0;
            }
            i += 1;
        }
    }
    round_results::<T, SUMS, WORDS>(o, words);
}

/// Ends a tile: its results to memory. It may be under way beside products of the next one, unless it is marked.
///
/// # Safety
/// - *converged*: all 128 threads of the consumer, which have passed [`settle`]; the next tile has not been given back;
///   the rest is the caller's promise to [`super::tiles`].
#[inline(always)]
pub(super) unsafe fn finish<
    T: Multiplicand,
    const DIM: u32,
    const DIM_V: u32,
    const KEYS: u32,
    const CONSUMERS: u32,
    const ROWS: u32,
    const WORDS: usize,
    const MASKED: bool,
    const SPLIT: bool,
>(
    words: &[u32; WORDS],
    round: u32,
    is_marked: bool,
    (maps, places, v, out, tables, masks): (Maps, Places, *const T, *mut T, Tables, Masks),
    dims: &AttentionDims,
) {
    // SAFETY: the tile's words; rows that there are, and the consumer's own boxes — the caller.
    unsafe {
        // Opaque, or the places of tile and thread would take up registers all the time.
        let round = thread::opaque(round);
        let thread = thread::opaque(thread::thread_idx_x() ^ round) ^ round;
        let (consumer, member) = (thread / 128 - 1, thread % 128);
        let [_, head, batch, num_rows] = TileWords::of_rows(places, round);
        let first_row = TileWords::first_row(places, round);
        let boxes = places.out + consumer * 64 * ROW_BYTES;
        put::<ROWS, WORDS>(words, boxes, member);
        if is_marked {
            barrier::sync(OWN + consumer, 128);
            let number = TileWords::number(places, round);
            let tile = Tile::new::<KEYS, ROWS, SPLIT>(number, dims.sequences, tables, dims);
            let pages = Pages::new(tables, dims, tile.batch);
            let walk = Walk::new::<ROWS>(tile, wgmma_knows_blocks(CONSUMERS, DIM_V), masks, dims);
            spoil::<T, KEYS, ROWS, MASKED, SPLIT>(&walk, masks, boxes, consumer, member, v, pages, dims);
        }
        fence::proxy_async_shared();
        barrier::sync(OWN + consumer, 128);
        let first_row = first_row + consumer * 64;
        // Behind the last row of a packed sequence there are those of the next one.
        let is_whole = tables.q_offsets.is_null() || num_rows >= consumer * 64 + 64;
        if !is_whole {
            let rows = num_rows.saturating_sub(consumer * 64);
            let stride = dims.out_token_stride;
            let out = out.wrapping_add(offset(0, 0, first_row, stride, head, dims.out_head_stride));
            let mut i = member;
            while i < rows * (DIM_V / 8) {
                let (row, piece) = (i / (DIM_V / 8), i % (DIM_V / 8));
                if piece * 8 < dims.head_dim_v {
                    let at = boxes + (piece / 8 * ROWS + row) * ROW_BYTES + ((piece ^ row) % 8) * 16;
                    let at_out = row as usize * stride as usize + piece as usize * 8;
                    global::store_x4(out.wrapping_add(at_out), shared::load_u32x4(at));
                }
                i += 128;
            }
            barrier::sync(OWN + consumer, 128);
        }
        if member == 0 {
            let batch = if tables.q_offsets.is_null() { batch as i32 } else { 0 };
            let mut i = 0;
            while is_whole && i < DIM_V / 64 {
                if 64 * i < dims.head_dim_v {
                    let to = [(64 * i) as i32, first_row as i32, head as i32, batch];
                    tma::store(maps.out, to, boxes + i * ROWS * ROW_BYTES);
                }
                i += 1;
            }
            tma::commit_group();
            if wgmma_out_in_q(DIM) {
                tma::wait_group_read::<0>();
                mbarrier::arrive(places.empty_q(round));
            } else if TileWords::of_masks(places, round)[0] != STEPS {
                // Without steps here, where all threads have seen that q had come: they have passed the barriers above.
                mbarrier::arrive(places.empty_q(round));
            }
        }
    }
}

/// 64 rows into boxes of 64 columns.
///
/// # Safety
/// - All 128 threads of the consumer (*converged*); the boxes are theirs.
#[inline(always)]
unsafe fn put<const ROWS: u32, const WORDS: usize>(words: &[u32; WORDS], boxes: u32, member: u32) {
    let lane = member % 32;
    let row = member / 32 * 16 + lane % 16;
    let mut i = 0;
    while i < WORDS / 4 {
        let four = [words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]];
        let (column, piece) = (i as u32 / 4, 2 * (i as u32 % 4) + lane / 16);
        let at = boxes + column * ROWS * ROW_BYTES + row * ROW_BYTES + ((piece ^ (row & 7)) << 4);
        // SAFETY: inside the consumer's boxes.
        unsafe { matrix::store_x4(at, four) };
        i += 1;
    }
}
