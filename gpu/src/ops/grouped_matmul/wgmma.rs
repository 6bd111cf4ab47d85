//! Grouped products on Hopper: TMA brings the weights and sorted rows of x, `cp.async` gathers others, warpgroups
//! multiply by `wgmma`.
//!
//! A block stays on its multiprocessor and walks over the tiles of `BM` × `BN` that there are, those of an expert's
//! rows side by side. Its first warpgroup finds the tiles and loads, the two others multiply 64 rows each.
//!
//! ```text
//! producer   wait empty[s] ── tell whose stage it is, expect bytes, load w BN × 128 B ──► full[s], a warp a stage
//!                          ├─ sorted: load x, 32 rows × 128 B at a time ──► full[s]
//!                          └─ gathered: 32 × cp.async: 4 rows of x ── wait for them ── fence ──► full[s]
//! consumers  wait full[s] ── 4 × wgmma m64nBN ── wait for the group before ──► empty[s-1]
//! at the end of a tile: rounding, two boxes of 64 × 64 by stmatrix into shared memory, two stay in
//! registers; behind each of the next tile's first steps 64 columns leave, from shared memory 16 bytes at a time to the
//! rows that exist
//!
//! shared memory   | stage 0: x BM · 128, w BN · 128 | … | 2 boxes of 8 KiB a consumer | tiles of stages | barriers |
//! ```
//!
//! - Gathered rows of x lie anywhere, where no TMA box reaches them. A warp copies four rows by an instruction, into
//!   the 128-byte swizzle that `wgmma` reads; which rows they are its lanes hold for the whole tile, four each, and
//!   tell one another. Sorted rows that lie over each other, as after a broadcast, take the same way.
//! - What `cp.async` writes is ordinary memory traffic, so whoever started the copies waits for them and fences them
//!   for the asynchronous proxy. That fence waits for all of a warp's traffic (`MEMBAR.ALL.CTA`): with a warp for each
//!   stage it is that stage's, and the copies of the others stay under way.
//! - The sizes of groups are on the device, so only the producers know what comes next; each stage says whose it is.
//! - Rows past the end of a group are not loaded but to the next multiple of 32, and a consumer that has none passes
//!   its stages on.
//! - Bounds of gathered rows: `cp.async` is slow beside products, which have most of what shared memory gives, so the
//!   consumers wait for stages. Sorted rows come by TMA, and a tile's end is beside the next one's steps.
//!
//! What was measured and tried: `gpu/NOTES/grouped_matmul.md`.

use abi::ops::grouped_matmul::{GroupedMatmulDims, WGMMA_X_ROWS};
use abi::ops::matmul::{A_BY_TMA, MatmulDims, OUT_IN_PIECES};
use abi::weight::{BLOCK_SCALES, TILE_K, TILE_ROWS, WeightDims};
use cuda_std::cvt::{E4m3, Element};
use cuda_std::tma::TensorMap;
use cuda_std::wgmma::{Multiply, Registers};
use cuda_std::{barrier, cp_async, fence, global, mbarrier, registers, shared, thread, tma, warp};

use super::{null, x_number};
use crate::matmul::epilogue::{Epilogue, PLAIN};
use crate::matmul::fp8;
use crate::matmul::wgmma::Stages;
use crate::matmul::wgmma_consumers::{
    BOX_BYTES, BOX_WORDS, Place, ROW_BYTES, Ring, Rounded, multiply_stages, put_words, store_pairs,
};

/// A warpgroup that loads and two that multiply.
const THREADS: u32 = 384;
/// Rows of a tile: 64 for each of two consumers.
const BM: u32 = 128;
/// Pieces of 16 bytes of a row of a stage.
const PIECES: u32 = ROW_BYTES / 16;
/// Rows that an instruction of a warp copies.
const ROWS: u32 = 32 / PIECES;
/// Instructions for 32 rows.
const COPIES: usize = (32 / ROWS) as usize;

/// Bytes of a box of x.
const BOX: u32 = WGMMA_X_ROWS * ROW_BYTES;

/// Rows of x, as the producers find them.
#[derive(Clone, Copy)]
pub struct Rows<X> {
    /// The first.
    pub x: *const X,
    /// In boxes of [`WGMMA_X_ROWS`], if they are loaded by TMA.
    pub map: *const TensorMap,
    /// Where each expert's begin.
    pub offsets: *const u32,
    /// Which row of x each is, if they are gathered.
    pub order: *const u32,
}

/// A tile: rows `row..end` of an expert, or the first of them, and columns from `col` on.
pub struct Tile {
    row: u32,
    end: u32,
    col: u32,
    expert: u32,
}

/// How weights come into a stage, and how a consumer multiplies.
pub trait Weights<X, const SUMS: usize> {
    /// Whether rows of x are sorted in any case: then nothing gathers them.
    const SORTED: bool;

    /// The weights' map, to be fetched early.
    fn map(&self) -> *const TensorMap;

    /// Loads the tile's rows of a weight for a step, `2 · SUMS` of 128 bytes. By one thread.
    ///
    /// # Safety
    /// - The stage is empty and has the room; its barrier expects the bytes.
    unsafe fn load(&self, to: u32, step: u32, tile: &Tile, full: u32);

    /// A consumer's sums of all steps: as [`multiply_stages`].
    ///
    /// # Safety
    /// - As for [`multiply_stages`]; the tile exists, and has rows for the consumer from `row` on.
    unsafe fn sums<const STAGES: u32>(
        &self,
        ring: &mut Ring<STAGES>,
        steps: u32,
        tile: &Tile,
        stages: Stages<impl Fn(u32) -> (u32, u32), impl Fn(u32) -> u32, impl Fn(u32)>,
        meanwhile: impl FnMut(),
    ) -> [f32; SUMS];
}

/// Weights of the type of x, in boxes of `SUMS` rows.
pub struct Plain {
    /// Of all experts.
    pub map: *const TensorMap,
}

impl<T: Element + Multiply<[f32; SUMS]>, const SUMS: usize> Weights<T, SUMS> for Plain
where
    [f32; SUMS]: Registers,
{
    const SORTED: bool = false;

    #[inline(always)]
    fn map(&self) -> *const TensorMap {
        self.map
    }

    #[inline(always)]
    unsafe fn load(&self, to: u32, step: u32, tile: &Tile, full: u32) {
        let k = (step * (ROW_BYTES / size_of::<T>() as u32)) as i32;
        let [col, expert] = [tile.col as i32, tile.expert as i32];
        // SAFETY: the caller's promise.
        unsafe {
            tma::load(to, self.map, [k, col, expert, 0], full);
            tma::load(to + SUMS as u32 * ROW_BYTES, self.map, [k, col + SUMS as i32, expert, 0], full);
        }
    }

    #[inline(always)]
    unsafe fn sums<const STAGES: u32>(
        &self,
        ring: &mut Ring<STAGES>,
        steps: u32,
        _: &Tile,
        stages: Stages<impl Fn(u32) -> (u32, u32), impl Fn(u32) -> u32, impl Fn(u32)>,
        meanwhile: impl FnMut(),
    ) -> [f32; SUMS] {
        let Stages { operands, full, release } = stages;
        // SAFETY: the caller's promise.
        unsafe {
            multiply_stages::<T, f32, SUMS, STAGES>(ring, steps, false, operands, full, release, meanwhile)
        }
    }
}

/// Packed weights of fp8, multiplied by rows that [`fp8::quantise`] has made.
pub struct Fp8<'a> {
    /// The tiles of all experts: `[rows of tiles][tiles · 16][64]` bytes, in boxes of a tile of each of the rows of
    /// tiles.
    pub map: *const TensorMap,
    /// Scales of the weights.
    pub scales: *const f32,
    /// Scales of the rows: `[blocks of k, rows]`.
    pub x_scales: *const f32,
    /// Sizes of the weights.
    pub weight: &'a WeightDims,
    /// Sizes of the product.
    pub dims: &'a GroupedMatmulDims,
}

impl<const SUMS: usize> Weights<E4m3, SUMS> for Fp8<'_>
where
    E4m3: Multiply<[f32; SUMS]>,
    [f32; SUMS]: Registers,
{
    const SORTED: bool = true;

    #[inline(always)]
    fn map(&self) -> *const TensorMap {
        self.map
    }

    #[inline(always)]
    unsafe fn load(&self, to: u32, step: u32, tile: &Tile, full: u32) {
        let blocks = (tile.expert * self.weight.row_blocks + tile.col / TILE_ROWS) as i32;
        let row = (2 * step * TILE_ROWS) as i32;
        // SAFETY: the caller's promise. A tile of k that does not exist is zeros.
        unsafe {
            tma::load(to, self.map, [0, row, blocks, 0], full);
            let second = to + 2 * SUMS as u32 * TILE_K;
            tma::load(second, self.map, [0, row + TILE_ROWS as i32, blocks, 0], full);
        }
    }

    #[inline(always)]
    unsafe fn sums<const STAGES: u32>(
        &self,
        ring: &mut Ring<STAGES>,
        steps: u32,
        tile: &Tile,
        stages: Stages<impl Fn(u32) -> (u32, u32), impl Fn(u32) -> u32, impl Fn(u32)>,
        meanwhile: impl FnMut(),
    ) -> [f32; SUMS] {
        let Stages { operands, full, release } = stages;
        let WeightDims { row_blocks, stretches, rows_log2, .. } = *self.weight;
        // Of blocks of 128 rows or a multiple, so two for all columns.
        let block = (tile.expert * row_blocks + tile.col / TILE_ROWS) >> (rows_log2 - TILE_ROWS.ilog2());
        let of_weight = self.scales.wrapping_add((block * stretches * BLOCK_SCALES) as usize);
        let by_step = if stretches > 1 { BLOCK_SCALES } else { 0 };
        let x_rows = self.dims.rows as usize;
        // SAFETY: rows of the tile, and where they end the last one; scales of the block and of the rows of x for each
        // step; the caller's promise.
        unsafe {
            let member = thread::thread_idx_x() % 128;
            let row = tile.row + member / 32 * 16 + member % 32 / 4;
            let of_row = |row: u32| self.x_scales.wrapping_add(row.min(tile.end - 1) as usize);
            let rows = [of_row(row), of_row(row + 8)];
            let scales = |step: u32| {
                let [even, _, odd, _] = global::load_x4(of_weight.wrapping_add((step * by_step) as usize));
                let of_row = |row: *const f32| global::load(row.wrapping_add(step as usize * x_rows));
                let cols = [[f32::from_bits(even), f32::from_bits(odd)]];
                fp8::Scales { rows: [of_row(rows[0]), of_row(rows[1])], cols }
            };
            fp8::multiply_blocks::<SUMS, 1, STAGES>(ring, steps, scales, operands, full, release, meanwhile)
        }
    }
}

/// A walk over the tiles' rows, experts in their order.
struct Walk {
    /// The first of 32 experts, of which each lane has one.
    experts: u32,
    /// Rows of tiles of the experts before.
    before: u32,
    /// The lane's expert: its sorted rows.
    start: u32,
    end: u32,
    /// Rows of tiles up to and with it, of these experts.
    upto: u32,
}

/// A row of tiles: sorted rows `row..end` of an expert, or the first `BM` of them.
struct TileRow {
    expert: u32,
    row: u32,
    end: u32,
}

impl Walk {
    /// At the experts from `experts` on.
    ///
    /// # Safety
    /// - *converged*: all lanes; `offsets` holds `dims.experts + 1` numbers.
    #[inline(always)]
    unsafe fn at(offsets: *const u32, dims: &GroupedMatmulDims, experts: u32, before: u32) -> Self {
        let lane = thread::lane();
        let expert = (experts + lane).min(dims.experts - 1);
        // SAFETY: below `experts` — the caller; all lanes take part in the shuffles.
        unsafe {
            let start = global::load(offsets.add(expert as usize)).min(dims.rows);
            let end = global::load(offsets.add(expert as usize + 1)).min(dims.rows);
            let exists = experts + lane < dims.experts;
            let mut upto = if exists { end.saturating_sub(start).div_ceil(BM) } else { 0 };
            let mut step = 1;
            while step < 32 {
                let other = warp::shuffle_up(warp::FULL_MASK, upto, step);
                upto += if lane >= step { other } else { 0 };
                step *= 2;
            }
            Walk { experts, before, start, end, upto }
        }
    }

    /// The row of tiles of this number, which is not below that of the call before; none if there are no more.
    ///
    /// # Safety
    /// - As [`Self::at`].
    #[inline(always)]
    unsafe fn find(&mut self, offsets: *const u32, dims: &GroupedMatmulDims, number: u32) -> Option<TileRow> {
        // SAFETY: the caller's promise.
        unsafe {
            loop {
                let within = number - self.before;
                let ended = warp::ballot(warp::FULL_MASK, self.upto <= within).count_ones();
                if ended < 32 {
                    let of_owner = |value: u32| warp::shuffle_idx(warp::FULL_MASK, value, ended);
                    let (start, end, upto) = (of_owner(self.start), of_owner(self.end), of_owner(self.upto));
                    // Counted from the end: the owner's last row of tiles is number `upto - 1`.
                    let row = start + ((end - start).div_ceil(BM) - (upto - within)) * BM;
                    return Some(TileRow { expert: self.experts + ended, row, end });
                }
                let next = self.experts + 32;
                if next >= dims.experts {
                    return None;
                }
                let before = self.before + warp::shuffle_idx(warp::FULL_MASK, self.upto, 31);
                *self = Walk::at(offsets, dims, next, before);
            }
        }
    }
}

/// The block's part of the product. `BOXES` is how many boxes of 64 columns a tile has.
///
/// # Safety
/// - Blocks of 384 threads, shared memory as `GroupedMatmulTile::smem_bytes` says.
/// - The maps are those of `GroupedMatmul::run`, the other tensors *in-bounds* for `dims` and x in pieces — checked
///   there.
#[inline(always)]
pub unsafe fn multiply<
    X,
    O: Element,
    W: Weights<X, SUMS>,
    const BN: u32,
    const SUMS: usize,
    const BOXES: usize,
    const STAGES: u32,
>(
    rows: Rows<X>,
    weights: W,
    out: *mut O,
    dims: &GroupedMatmulDims,
) {
    const { assert!(SUMS as u32 * 2 == BN && BOXES as u32 * 64 == BN && STAGES == 4) };
    let Rows { x, map: x_map, offsets, order } = rows;
    let per_piece = 16 / size_of::<X>() as u32;
    let (x_bytes, w_bytes) = (BM * ROW_BYTES, BN * ROW_BYTES);
    let stage_bytes = x_bytes + w_bytes;
    let base = shared::base();
    let boxes = base + STAGES * stage_bytes;
    let tiles = boxes + 4 * BOX_BYTES;
    let barriers = tiles + 16 * STAGES;
    // Where a stage says whose it is: its tile's first row and the end of the group, the tile's first column.
    let tile_of = |stage: u32| tiles + 16 * stage;
    let full = |stage: u32| barriers + 8 * stage;
    let empty = |stage: u32| barriers + 8 * (STAGES + stage);
    let thread = thread::thread_idx_x();
    let by_tma = W::SORTED || dims.access & A_BY_TMA != 0;
    // SAFETY: the barriers lie behind the boxes; one thread initialises them before anyone uses them, and all the
    // stages.
    unsafe {
        if thread == 0 {
            let mut stage = 0;
            while stage < STAGES {
                mbarrier::init(full(stage), 1);
                mbarrier::init(empty(stage), 2);
                stage += 1;
            }
            mbarrier::fence_mbarrier_init();
            tma::prefetch_map(weights.map());
            if by_tma {
                tma::prefetch_map(x_map);
            }
        }
        // Rows of x that no copy fills are multiplied too, though not stored.
        let mut at = thread * 16;
        while at < x_bytes {
            let mut stage = 0;
            while stage < STAGES {
                shared::store_u32x4(base + stage * stage_bytes + at, [0; 4]);
                stage += 1;
            }
            at += THREADS * 16;
        }
        fence::proxy_async_shared();
        thread::sync_threads();
    }
    // Elements of k per step.
    let bk = ROW_BYTES / size_of::<X>() as u32;
    let steps = dims.k.div_ceil(bk);
    let warpgroup = thread / 128;
    // SAFETY: the roles are those of whole warpgroups; each waits for a stage before it touches it.
    unsafe {
        if warpgroup == 0 {
            registers::decrease::<72>();
            let (stage, lane) = (thread / 32, thread::lane());
            let at = base + stage * stage_bytes;
            let (first_row, piece) = (lane / PIECES, lane % PIECES);
            // Of the first rows, and of those four on, which are the next in the swizzle too.
            let place = |row: u32| at + row * ROW_BYTES + ((piece ^ (row % 8)) << 4);
            let places = [place(first_row), place(first_row + ROWS)];
            let x_stride_bytes = dims.x_stride * size_of::<X>() as u32;
            let col_blocks = dims.col_blocks.max(1);
            let mut walk = Walk::at(offsets, dims, 0, 0);
            let mut tile = thread::block_idx_x();
            let mut parity = 1;
            // The stage's first step in the tile.
            let mut step = stage;
            while let Some(TileRow { expert, row, end }) = walk.find(offsets, dims, tile / col_blocks) {
                let rows = (end - row).min(BM);
                if step < steps {
                    // Which rows of x they are: each lane has those of every 32nd. Rows past the end are not read; the
                    // last stands for those that are copied.
                    let mut numbers = [0; (BM / 32) as usize];
                    let mut i = 0;
                    while !by_tma && i < numbers.len() {
                        numbers[i] = x_number(order, dims, (row + 32 * i as u32 + lane).min(end - 1));
                        i += 1;
                    }
                    let own = Tile { row, end, col: tile % col_blocks * BN, expert };
                    while step < steps {
                        let k = step * bk;
                        mbarrier::wait_parity(empty(stage), parity);
                        parity ^= 1;
                        if lane == 0 {
                            shared::store_u32x4(tile_of(stage), [row, end, own.col, expert]);
                            let boxes = if by_tma { rows.div_ceil(WGMMA_X_ROWS) } else { 0 };
                            mbarrier::expect_tx(full(stage), w_bytes + boxes * BOX);
                            weights.load(at + x_bytes, step, &own, full(stage));
                            let mut i = 0;
                            while i < boxes {
                                let from = (row + i * WGMMA_X_ROWS) as i32;
                                tma::load(at + i * BOX, x_map, [k as i32, from], full(stage));
                                i += 1;
                            }
                        }
                        let from = x.wrapping_add((k + piece * per_piece) as usize).cast::<u8>();
                        // k is a multiple of a piece.
                        let left = (dims.k - k) / per_piece;
                        let mut j = 0;
                        while j < numbers.len() {
                            if !by_tma && 32 * (j as u32) < rows {
                                // All shuffles, then all copies: one does not wait for the other.
                                let mut starts = [from; COPIES];
                                let mut i = 0;
                                while i < COPIES {
                                    let owner = i as u32 * ROWS + first_row;
                                    let number = warp::shuffle_idx(warp::FULL_MASK, numbers[j], owner);
                                    starts[i] = from.wrapping_add(number as usize * x_stride_bytes as usize);
                                    i += 1;
                                }
                                let mut i = 0;
                                while i < COPIES {
                                    let row = (32 * j + i / 2 * 8) as u32;
                                    let to = places[i % 2] + row * ROW_BYTES;
                                    if left >= PIECES {
                                        cp_async::cg_16(to, starts[i]);
                                    } else {
                                        cp_async::cg_16_fill(
                                            to,
                                            starts[i],
                                            if piece < left { 16 } else { 0 },
                                        );
                                    }
                                    i += 1;
                                }
                            }
                            j += 1;
                        }
                        if !by_tma {
                            cp_async::wait_all();
                            fence::proxy_async_shared();
                        }
                        warp::sync_warp(warp::FULL_MASK);
                        if lane == 0 {
                            mbarrier::arrive(full(stage));
                        }
                        step += STAGES;
                    }
                }
                step -= steps;
                tile += thread::grid_dim_x();
            }
            // A stage of no tile, the next one, ends the consumers' work.
            if step == 0 {
                mbarrier::wait_parity(empty(stage), parity);
                if lane == 0 {
                    shared::store_u32x4(tile_of(stage), [0; 4]);
                    mbarrier::arrive(full(stage));
                }
            }
        } else {
            registers::increase::<216>();
            let consumer = warpgroup - 1;
            let member = thread % 128;
            let my_boxes = boxes + consumer * 2 * BOX_BYTES;
            let mut ring = Ring::<STAGES>::START;
            let mut leaving = Leaving::<BOXES> { words: [0; 2 * BOX_WORDS], left: 0, row: 0, end: 0, col: 0 };
            let operands = |stage: u32| {
                let at = base + stage * stage_bytes;
                (at + consumer * 64 * ROW_BYTES, at + x_bytes)
            };
            let release = |stage: u32| {
                if member == 0 {
                    mbarrier::arrive(empty(stage));
                }
            };
            loop {
                mbarrier::wait_parity(full(ring.stage), ring.parity);
                let [row, end, col, expert] = shared::load_u32x4(tile_of(ring.stage));
                // One thread gives the stage back: all have read whose it is.
                barrier::sync(1 + consumer, 128);
                let row = row + consumer * 64;
                // Of one lane, and joined below: so ptxas knows that a warp stays together.
                let has_rows = warp::shuffle_idx(warp::FULL_MASK, u32::from(row < end), 0) != 0;
                if !has_rows {
                    leaving.end_all(out, dims, my_boxes, member);
                }
                if end == 0 {
                    break;
                }
                if has_rows {
                    let tile = Tile { row, end, col, expert };
                    let stages = Stages { operands, full, release };
                    let sums = weights.sums(&mut ring, steps, &tile, stages, || {
                        leaving.store_box(out, dims, my_boxes, member)
                    });
                    leaving.end_all(out, dims, my_boxes, member);
                    let place = Place { row, col, len: SUMS, consumer, member };
                    if dims.access & OUT_IN_PIECES != 0 && dims.n.is_multiple_of(8) {
                        leaving.take::<O, SUMS>(&sums, my_boxes, end, &place);
                    } else {
                        let own = MatmulDims { m: end, ..super::product(dims) };
                        store_pairs(&sums, &Epilogue::new(null::<O>(), null(), out, &own, &PLAIN), &place);
                        leaving.words = [0; 2 * BOX_WORDS];
                    }
                } else {
                    let mut step = 0;
                    while step < steps {
                        mbarrier::wait_parity(full(ring.stage), ring.parity);
                        // Or the stage might be filled again before all have seen it full.
                        barrier::sync(1 + consumer, 128);
                        release(ring.stage);
                        warp::sync_warp(warp::FULL_MASK);
                        ring.advance();
                        step += 1;
                    }
                }
                warp::sync_warp(warp::FULL_MASK);
            }
        }
    }
}

/// The tile before, on its way out while the next one is multiplied, 64 columns at a time: the first two boxes of them
/// in shared memory, the others, if there are four, still in registers. Each warp stores its own rows, so none waits
/// for another.
struct Leaving<const BOXES: usize> {
    words: [u32; 2 * BOX_WORDS],
    /// Boxes still to be stored.
    left: u32,
    /// Place of the next box in out, and the end of the group.
    row: u32,
    end: u32,
    col: u32,
}

impl<const BOXES: usize> Leaving<BOXES> {
    /// Rounds a tile's sums.
    ///
    /// # Safety
    /// - *converged*: all 128 threads of the consumer; the boxes are theirs, and nothing is left of the tile before.
    #[inline(always)]
    unsafe fn take<T: Element, const SUMS: usize>(
        &mut self,
        sums: &[f32; SUMS],
        boxes: u32,
        end: u32,
        place: &Place,
    ) {
        const { assert!((BOXES == 2 || BOXES == 4) && SUMS / 2 == BOXES * BOX_WORDS) };
        let mut rounded = Rounded::<SUMS>::NONE;
        rounded.round::<f32, T>(sums);
        if BOXES > 2 {
            self.words = rounded.rest(2);
        }
        // SAFETY: the warp's lanes have read these rows of both when they have come together.
        unsafe {
            warp::sync_warp(warp::FULL_MASK);
            rounded.put_box(boxes, place.member);
            rounded.put_box(boxes + BOX_BYTES, place.member);
        }
        // Else LLVM makes copies of the store.
        self.left = thread::opaque(BOXES as u32);
        (self.row, self.end, self.col) = (place.row, end, place.col);
    }

    /// Stores the next box, if there is one: the warp's rows before the end, in pieces.
    ///
    /// # Safety
    /// - *converged*: all 128 threads of the consumer; the boxes are theirs.
    /// - *in-bounds(out)* for the dimensions, rows of whole pieces; nobody else writes the tile.
    #[inline(always)]
    unsafe fn store_box<T: Element>(
        &mut self,
        out: *mut T,
        dims: &GroupedMatmulDims,
        boxes: u32,
        member: u32,
    ) {
        // SAFETY: the warp's lanes have read these rows of the box of two turns ago when they have come together; the
        // row and column exist.
        unsafe {
            if self.left > 0 {
                let at = boxes + self.left % 2 * BOX_BYTES;
                if BOXES > 2 && self.left <= 2 {
                    warp::sync_warp(warp::FULL_MASK);
                    put_words(&self.words, at, member);
                    let mut i = BOX_WORDS;
                    while i < self.words.len() {
                        self.words[i - BOX_WORDS] = self.words[i];
                        i += 1;
                    }
                }
                warp::sync_warp(warp::FULL_MASK);
                let piece = member % PIECES;
                let col = self.col + piece * T::PER_16_BYTES as u32;
                let mut j = 0;
                while j < 16 / ROWS {
                    let row = member / 32 * 16 + member % 32 / PIECES + j * ROWS;
                    if self.row + row < self.end && col < dims.n {
                        let values = shared::load_u32x4(at + row * ROW_BYTES + ((piece ^ (row & 7)) << 4));
                        let to = (self.row + row) as usize * dims.out_stride as usize + col as usize;
                        global::store_x4(out.add(to), values);
                    }
                    j += 1;
                }
                self.col += 64;
                self.left -= 1;
            }
            warp::sync_warp(warp::FULL_MASK);
        }
    }

    /// Stores all that is left.
    ///
    /// # Safety
    /// - As [`Self::store_box`].
    #[inline(always)]
    unsafe fn end_all<T: Element>(&mut self, out: *mut T, dims: &GroupedMatmulDims, boxes: u32, member: u32) {
        while self.left > 0 {
            // SAFETY: the caller's promise.
            unsafe { self.store_box(out, dims, boxes, member) };
        }
    }
}
