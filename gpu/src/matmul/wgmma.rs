//! Matrix products on Hopper: TMA feeds a ring of stages, warpgroups multiply from it, TMA takes the result away.
//!
//! A block stays on its multiprocessor and walks over tiles of `BM` × `BN`. One thread of its first warpgroup loads;
//! the others, one to three, multiply 64 rows each, with all sums in registers. How b comes and what is multiplied is a
//! [`Multiplier`]'s: plain matrices ([`Plain`]), or packed weights of fp8 ([`super::fp8`]).
//!
//! ```text
//! producer   wait empty[s] ── expect bytes ── load a BM × 128 B, b BN × 128 B ──► full[s]     runs up to STAGES ahead,
//! consumers  wait full[s] ── 4 × wgmma m64nBN ── wait for the group before ──► empty[s-1]  also into the next tile
//! at the end of a tile: epilogue, rounding, 64 registers instead of 128; they leave while the next tile is multiplied,
//! behind each of its first steps 64 columns: stmatrix to a box of shared memory, TMA store
//!
//! shared memory   | stage 0: a BM · 128, b BN · 128 | stage 1 | … | 2 boxes of 8 KiB per consumer | barriers |
//! ```
//!
//! - All tiles are in TMA's 128-byte swizzle, rows of 64 elements, 32 of f32 (which `wgmma` takes as tf32) or 128 of
//!   int8: loads, `wgmma` and `stmatrix` have no bank conflicts.
//! - The blocks of a cluster share an operand: each loads its part of it for all. With many rows two blocks take tiles
//!   one above the other and share b. With few (`SHARES_A`) four take tiles side by side and share a, which would else
//!   come out of L2 more often than the weights. A stage is free when the consumers of all blocks have read it, so they
//!   arrive at all blocks' barriers.
//! - One group of `wgmma` stays in flight over the back edge; a stage is given back one step late.
//! - Tiles go in bands of rows, so that the blocks at work at a time share operands in L2.
//! - The tails of m, n and k need nothing here: TMA reads zeros outside the tensors and writes nothing there. But it is
//!   slow where a box is mostly outside: of fewer rows than a tile's, boxes have those that there are.
//! - Of up to 64 rows the second consumer has none, and takes no part.
//! - Where the product is gated, a tile's b is `BN / 2` rows of the gate and as many of up, by a load each (in a
//!   cluster each block loads one of them for both), and the tile of out is half as wide: element for element the
//!   registers' first half are gates and the second the ups of the same columns.
//! - The sums of an element run over k in one order, whatever the tile, m, or the other rows: all these kernels give
//!   the same bits.
//! - Arrivals at the other block's barriers are the form that releases no writes. The releasing form is compiled to
//!   `MEMBAR.ALL.GPU`, which would wait for all of the thread's memory traffic in every step. The cluster's barriers at
//!   the beginning and the end are relaxed ones for the same reason.
//! - No more clusters than the card holds at a time: one that comes late would have all its rounds still before it. And
//!   no more than each round has work for.
//! - A shared operand comes in at 25 bytes per clock, whatever the tile's width, so no tile that shares a is narrower
//!   than 64 columns.
//! - A kernel waits for the one ahead (`griddepcontrol.wait`) behind its barriers' setup and before its first load. The
//!   first bytes of b come to L2 before that wait where there is one row of tiles ([`early`](super::early)).
//! - A tile's results leave beside the next one's first steps. Registers decide how: 128 sums, 64 words of results and
//!   37 others are all that ptxas gives out here without spilling. So they go out before an epilogue begins, and rotate
//!   in their places for one piece of code to store them all.
//! - The first loads are started before the roles part, by the thread that has set up the barriers: the producer's code
//!   behind that jump comes from memory. Tiles are found without dividing, and a launch's sizes lie in one line of the
//!   constants' cache.
//! - Sums begin as zeros in each tile. Sums that stay in their registers from tile to tile are moved by ptxas, which
//!   then has products wait for each other (C7515). With no values at all before the first results LLVM would keep
//!   those of the tile before alive, and spill.
//! - Bounds: of large products the card's power, else what a tile takes beside its steps.
//!
//! What was measured and tried: `gpu/NOTES/matmul.md`.

use abi::ops::matmul::{MatmulDims, NEXT_MAY_START, OUT_BY_TMA, WGMMA_OUT_ROWS};
use cuda_std::cvt::Element;
use cuda_std::tma::TensorMap;
use cuda_std::wgmma::{Multiply, Registers};
use cuda_std::{cluster, fence, grid, mbarrier, registers, shared, thread, tma, warp};

use super::early::Weights;
use super::epilogue::Epilogue;
use super::operand::Sum;
use super::wgmma_consumers::{
    BOX_BYTES, Place, ROW_BYTES, Results, Ring, Rounded, multiply_stages, store_pairs,
};

/// Rows of tiles in a band.
const BAND: u32 = 16;

/// Bytes of each row of b that a block of one row of tiles brings to L2 at first: see [`early`](super::early).
const EARLY_BYTES: u32 = 1024;

/// How rows of b come into a stage, and what the consumers make of the stages.
pub trait Multiplier<T, S, const SUMS: usize>: Copy {
    /// Whether a tile's results leave before the next tile is begun: where registers have no room for them beside it.
    const STORES_AT_ONCE: bool = false;

    /// Has the tensor maps come to the caches.
    ///
    /// # Safety
    /// - The maps are there.
    unsafe fn prefetch_maps(&self);

    /// Loads a step's rows of b to `to`: all `2 · SUMS` of them, or as `shared` says the block's part for all blocks of
    /// the cluster.
    ///
    /// # Safety
    /// - The stage is empty, its barrier expects the bytes; one thread.
    unsafe fn load(&self, to: u32, step: u32, row: u32, full: u32, shared: Option<Share>);

    /// Brings the first bytes of the block's first tile, of columns from `col` on, to L2.
    ///
    /// # Safety
    /// - The tile exists; all warps behind the first warpgroup, `warps` of them.
    unsafe fn to_l2(&self, _dims: &MatmulDims, _col: u32, _warps: u32) {}

    /// A consumer's sums over a tile, with up to `place.len` of them behind each other where the product is gated:
    /// first those of the gate.
    ///
    /// # Safety
    /// - As for [`multiply_stages`]; the tile exists, and has rows for the consumer.
    unsafe fn sums<const STAGES: u32>(
        &self,
        ring: &mut Ring<STAGES>,
        steps: u32,
        place: &Place,
        stages: Stages<impl Fn(u32) -> (u32, u32), impl Fn(u32) -> u32, impl Fn(u32)>,
        meanwhile: impl FnMut(),
    ) -> [S; SUMS];
}

/// How a consumer comes by the stages: where a stage's operands lie, its barrier, and how it is given back.
pub struct Stages<A, B, C> {
    /// Its rows of a, and those of b.
    pub operands: A,
    /// The barrier of a stage that is full.
    pub full: B,
    /// Gives a stage back.
    pub release: C,
}

/// A block's part of the rows of b that the blocks of a cluster share.
#[derive(Clone, Copy)]
pub struct Share {
    /// The block's place in the cluster.
    pub rank: u32,
    /// Blocks of the cluster.
    pub of: u32,
}

impl Share {
    /// All blocks of the cluster, a bit each.
    #[inline(always)]
    pub fn all(self) -> u16 {
        ((1u32 << self.of) - 1) as u16
    }
}

/// Plain matrices of T.
#[derive(Clone, Copy)]
pub struct Plain<T> {
    /// The tensor maps.
    pub maps: Maps<T>,
    /// Whether b has two rows for each column of out.
    pub gated: bool,
    /// Whether each step's sum is added by itself.
    pub promotes: bool,
}

impl<T: Multiply<[S; SUMS]> + Copy, S: Sum, const SUMS: usize> Multiplier<T, S, SUMS> for Plain<T>
where
    [S; SUMS]: Registers,
{
    #[inline(always)]
    unsafe fn prefetch_maps(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            tma::prefetch_map(self.maps.b);
            if self.gated {
                tma::prefetch_map(self.maps.up);
            }
        }
    }

    #[inline(always)]
    unsafe fn load(&self, to: u32, step: u32, row: u32, full: u32, shared: Option<Share>) {
        let (maps, k) = (&self.maps, (step * (ROW_BYTES / size_of::<T>() as u32)) as i32);
        let rows = 2 * SUMS as u32;
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(share) = shared {
                let part = share.rank * (rows / share.of);
                let (map, from) = match (self.gated, share.rank) {
                    (true, 0) => (maps.b, row),
                    (true, _) => (maps.up, row),
                    (false, _) => (maps.b, row + part),
                };
                tma::load_multicast(to + part * ROW_BYTES, map, [k, from as i32], full, share.all());
            } else {
                tma::load(to, maps.b, [k, row as i32], full);
                if self.gated {
                    tma::load(to + rows / 2 * ROW_BYTES, maps.up, [k, row as i32], full);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn to_l2(&self, dims: &MatmulDims, col: u32, warps: u32) {
        // SAFETY: the caller's promise; the tensor map has found whole pieces.
        unsafe {
            self.maps.weights.to_l2(dims, self.gated, (col, 2 * SUMS as u32), 0, EARLY_BYTES, warps);
        }
    }

    #[inline(always)]
    unsafe fn sums<const STAGES: u32>(
        &self,
        ring: &mut Ring<STAGES>,
        steps: u32,
        _: &Place,
        stages: Stages<impl Fn(u32) -> (u32, u32), impl Fn(u32) -> u32, impl Fn(u32)>,
        meanwhile: impl FnMut(),
    ) -> [S; SUMS] {
        let Stages { operands, full, release } = stages;
        // SAFETY: the caller's promise.
        unsafe {
            multiply_stages::<T, S, SUMS, STAGES>(
                ring,
                steps,
                self.promotes,
                operands,
                full,
                release,
                meanwhile,
            )
        }
    }
}

/// The tensor maps of a launch.
#[derive(Clone, Copy)]
pub struct Maps<T> {
    /// a in boxes of a block's share of the rows, or, where it has them for itself, of those that there are.
    pub a: *const TensorMap,
    /// b in the same way; if the product is gated, the gate in boxes of half a tile.
    pub b: *const TensorMap,
    /// Up in the same boxes.
    pub up: *const TensorMap,
    /// out in boxes of [`WGMMA_OUT_ROWS`] × 64.
    pub out: *const TensorMap,
    /// What the maps of b and up are of.
    pub weights: Weights<T>,
}

/// A walk over the tiles of clusters: in bands of rows, those above each other first.
#[derive(Clone, Copy)]
struct Walk {
    rows: u32,
    cols: u32,
    /// Rows of a band.
    band: u32,
    /// First row of the band.
    first: u32,
    /// Tile of the band, or of those behind it.
    within: u32,
}

impl Walk {
    /// Row and column of the tile; none if there are no more.
    #[inline(always)]
    fn place(&mut self) -> Option<(u32, u32)> {
        while self.first < self.rows {
            let height = (self.rows - self.first).min(self.band);
            if self.within < height * self.cols {
                // A shift but for the last band.
                let (above, col) = if height == self.band {
                    (self.within % self.band, self.within / self.band)
                } else {
                    (self.within % height, self.within / height)
                };
                return Some((self.first + above, col));
            }
            self.within -= height * self.cols;
            self.first += self.band;
        }
        None
    }
}

/// [`Multiplier::STORES_AT_ONCE`].
const fn stores_at_once<T, S, const SUMS: usize, M: Multiplier<T, S, SUMS>>(_: &M) -> bool {
    M::STORES_AT_ONCE
}

/// The tensor maps of a and out.
#[derive(Clone, Copy)]
pub struct Ends {
    /// As in [`Maps`].
    pub a: *const TensorMap,
    /// As in [`Maps`].
    pub out: *const TensorMap,
}

/// The block's part of the product, behind what the kernel ahead leaves (`#[kernel(waits)]`).
///
/// # Safety
/// - Blocks of `MatmulTile::threads` threads in clusters of `CLUSTER`, shared memory as `MatmulTile::smem_bytes` says.
/// - k is not 0. The maps are those of `Matmul::run`; out, bias and residual *in-bounds* for `dims`.
#[inline(always)]
pub unsafe fn multiply<
    T,
    S: Sum,
    B: Element,
    O: Element,
    const BM: u32,
    const BN: u32,
    const SUMS: usize,
    const STAGES: u32,
    const CLUSTER: u32,
    const SHARES_A: bool,
>(
    ends: Ends,
    by: impl Multiplier<T, S, SUMS>,
    end: Epilogue<'_, B, O>,
    results: impl Results<S, SUMS>,
) where
    [S; SUMS]: Registers,
{
    let (dims, gated) = (end.dims, end.is_gated());
    let (a_bytes, b_bytes) = (BM * ROW_BYTES, BN * ROW_BYTES);
    let stage_bytes = a_bytes + b_bytes;
    let consumers = BM / 64;
    let in_boxes = size_of::<O>() == 2 && BN.is_multiple_of(64);
    let base = shared::base();
    let boxes = base + STAGES * stage_bytes;
    let barriers = boxes + if BN.is_multiple_of(64) { consumers * 2 * BOX_BYTES } else { 0 };
    let full = |stage: u32| barriers + 8 * stage;
    let empty = |stage: u32| barriers + 8 * (STAGES + stage);
    let rank = if CLUSTER > 1 { cluster::block_rank() } else { 0 };
    let thread = thread::thread_idx_x();
    // Of a box of a that a block has for itself.
    let box_rows = if SHARES_A { BM } else { dims.m.next_multiple_of(8).min(BM) };
    // Consumers that have rows.
    let at_work = dims.m.div_ceil(64).min(consumers);
    // SAFETY: the barriers lie behind the boxes; one thread initialises them before anyone uses them; rows of a that no
    // load fills are nobody else's.
    unsafe {
        if thread == 0 {
            let mut stage = 0;
            while stage < STAGES {
                mbarrier::init(full(stage), 1);
                mbarrier::init(empty(stage), at_work * CLUSTER);
                stage += 1;
            }
            mbarrier::fence_mbarrier_init();
            tma::prefetch_map(ends.a);
            by.prefetch_maps();
        }
        if box_rows < at_work * 64 {
            let mut at = box_rows * ROW_BYTES + thread * 16;
            while at < at_work * 64 * ROW_BYTES {
                let mut stage = 0;
                while stage < STAGES {
                    shared::store_u32x4(base + stage * stage_bytes + at, [0; 4]);
                    stage += 1;
                }
                at += thread::block_dim_x() * 16;
            }
            fence::proxy_async_shared();
        }
        thread::sync_threads();
        if CLUSTER > 1 {
            // The barriers' fence is all that others have to see.
            cluster::arrive_relaxed();
            cluster::wait();
        }
    }
    if CLUSTER == 1 && dims.m <= BM && dims.access & NEXT_MAY_START != 0 {
        let rows = if gated { BN / 2 } else { BN };
        // SAFETY: of the block's first tile, which exists.
        unsafe { by.to_l2(dims, thread::block_idx_x() * rows, 4 * consumers) };
    }
    grid::wait();
    // Blocks of a cluster, and this one's place among them.
    let (above, beside) = if SHARES_A { (1, CLUSTER) } else { (CLUSTER, 1) };
    let (rank_m, rank_n) = if SHARES_A { (0, rank) } else { (rank, 0) };
    // Elements of k per step.
    let bk = ROW_BYTES / size_of::<T>() as u32;
    let steps = dims.k.div_ceil(bk);
    // SAFETY: there is a k — the caller.
    unsafe { core::hint::assert_unchecked(steps > 0) };
    let walk = Walk {
        rows: dims.m.div_ceil(BM * above),
        cols: dims.n.div_ceil(BN * beside),
        band: BAND / above,
        first: 0,
        within: thread::block_idx_x() / CLUSTER,
    };
    let stride = thread::grid_dim_x() / CLUSTER;
    // First rows of a and of b for the block, b's of the gate if the product is gated.
    let rows_at = |(row, col): (u32, u32)| {
        ((row * above + rank_m) * BM, (col * beside + rank_n) * if gated { BN / 2 } else { BN })
    };
    // Loads a step into the ring's stage, the block's part of the shared operand for all.
    let load = |ring: Ring<STAGES>, (a_row, b_row): (u32, u32), step: u32| {
        let (stage, k) = (ring.stage, (step * bk) as i32);
        let a_at = base + stage * stage_bytes;
        let b_at = a_at + a_bytes;
        let share = Share { rank, of: CLUSTER };
        // SAFETY: the stage is empty — who calls; its rows are those of the maps' boxes.
        unsafe {
            mbarrier::arrive_expect_tx(full(stage), box_rows * ROW_BYTES + b_bytes);
            if CLUSTER > 1 && SHARES_A {
                let part = rank * (BM / CLUSTER);
                let (to, from) = (a_at + part * ROW_BYTES, (a_row + part) as i32);
                tma::load_multicast(to, ends.a, [k, from], full(stage), share.all());
            } else {
                tma::load(a_at, ends.a, [k, a_row as i32], full(stage));
            }
            by.load(b_at, step, b_row, full(stage), (CLUSTER > 1 && !SHARES_A).then_some(share));
        }
    };
    // The first loads come before the roles: a jump to the producer's code takes as long as half of a load.
    let mut loads = walk;
    let mut ring = Ring::<STAGES>::START;
    let mut step = 0;
    if thread == 0
        && let Some(place) = loads.place()
    {
        while step < steps.min(STAGES) {
            load(ring, rows_at(place), step);
            ring.advance();
            // Else LLVM makes copies of the loads.
            step = thread::opaque(step + 1);
        }
    }
    // The next launch has no room beside a block of this, waits for this one's end by itself, and has begun when that
    // comes.
    if dims.access & NEXT_MAY_START != 0 {
        grid::launch_dependents();
    }
    // By one lane's word, so that ptxas knows that a warp stays together.
    // SAFETY: all lanes of each warp are here.
    let warpgroup = unsafe {
        warp::sync_warp(warp::FULL_MASK);
        warp::shuffle_idx(warp::FULL_MASK, thread / 128, 0)
    };
    // SAFETY: the roles are those of whole warpgroups; each waits for a stage before it touches it.
    unsafe {
        if warpgroup == 0 {
            if consumers == 2 {
                registers::decrease::<40>();
            } else if consumers == 3 {
                registers::decrease::<32>();
            }
            if thread == 0 {
                while let Some(place) = loads.place() {
                    while step < steps {
                        mbarrier::wait_parity(empty(ring.stage), ring.parity ^ 1);
                        load(ring, rows_at(place), step);
                        ring.advance();
                        step = thread::opaque(step + 1);
                    }
                    step = 0;
                    loads.within += stride;
                }
            }
            // The lanes of the first warp come together again for the cluster's barrier.
            warp::sync_warp(warp::FULL_MASK);
        } else if warpgroup <= at_work {
            if consumers == 2 {
                registers::increase::<232>();
            } else if consumers == 3 {
                registers::increase::<160>();
            }
            let consumer = warpgroup - 1;
            let member = thread % 128;
            let my_boxes = boxes + consumer * 2 * BOX_BYTES;
            let mut ring = Ring::<STAGES>::START;
            let mut out = Outgoing { rounded: Rounded::<SUMS>::NONE, left: 0, row: 0, col: 0, turn: 0 };
            let release = |stage: u32| {
                if CLUSTER > 1 {
                    if member < CLUSTER {
                        mbarrier::arrive_remote(cluster::map_shared(empty(stage), member));
                    }
                } else if member == 0 {
                    mbarrier::arrive(empty(stage));
                }
            };
            let mut walk = walk;
            while let Some(place) = walk.place() {
                let (a_row, b_row) = rows_at(place);
                let operands = |stage: u32| {
                    let at = base + stage * stage_bytes;
                    (at + consumer * 64 * ROW_BYTES, at + a_bytes)
                };
                let place = Place {
                    row: a_row + consumer * 64,
                    col: b_row,
                    len: if gated { SUMS / 2 } else { SUMS },
                    consumer,
                    member,
                };
                let stages = Stages { operands, full, release };
                let mut sums = by.sums::<STAGES>(&mut ring, steps, &place, stages, || {
                    out.store_box(ends.out, my_boxes, member);
                });
                // Of few steps. Behind it the registers are free.
                while out.left > 0 {
                    out.store_box(ends.out, my_boxes, member);
                }
                results.make(&mut sums, &place);
                if in_boxes && dims.access & OUT_BY_TMA != 0 {
                    out.take::<S, O>(&sums, &place, end.n());
                    if stores_at_once(&by) {
                        while out.left > 0 {
                            out.store_box(ends.out, my_boxes, member);
                        }
                        out.rounded = Rounded::NONE;
                    }
                } else {
                    store_pairs(&sums, &end, &place);
                    out.rounded = Rounded::NONE;
                }
                walk.within += stride;
            }
            while out.left > 0 {
                out.store_box(ends.out, my_boxes, member);
            }
            if member.is_multiple_of(32) {
                tma::wait_group_read::<0>();
            }
            warp::sync_warp(warp::FULL_MASK);
        }
        if CLUSTER > 1 {
            // Others may still load into this block's memory, or arrive at its barriers.
            cluster::arrive_relaxed();
            cluster::wait();
        }
    }
}

/// The tile before, on its way out while the next one is multiplied: box by box through two boxes of shared memory in
/// turn. Each warp stores its own rows, so none waits for another.
struct Outgoing<const SUMS: usize> {
    rounded: Rounded<SUMS>,
    /// Boxes still to be stored.
    left: u32,
    /// Place of the next box in out.
    row: u32,
    col: u32,
    /// Which box of shared memory is next.
    turn: u32,
}

impl<const SUMS: usize> Outgoing<SUMS> {
    /// Rounds a tile's sums; boxes that begin before column n will be stored.
    ///
    /// # Safety
    /// - All 128 threads of the consumer (*converged*).
    #[inline(always)]
    unsafe fn take<S: Sum, O: Element>(&mut self, sums: &[S; SUMS], place: &Place, n: u32) {
        self.rounded.round::<S, O>(sums);
        let boxes = n.saturating_sub(place.col).min(2 * place.len as u32).div_ceil(64);
        // By one lane's word, so that ptxas knows that a warp stays together. LLVM knows nothing of it, and makes no
        // copies of the store. SAFETY: the caller's promise.
        self.left = unsafe { warp::shuffle_idx(warp::FULL_MASK, boxes, 0) };
        (self.row, self.col) = (place.row, place.col);
    }

    /// Stores the next box, if there is one.
    ///
    /// # Safety
    /// - All 128 threads of the consumer (*converged*); the boxes are theirs.
    #[inline(always)]
    unsafe fn store_box(&mut self, out: *const TensorMap, boxes: u32, member: u32) {
        // SAFETY: the warp's store of two boxes ago has read its rows when all its threads have come together.
        unsafe {
            if self.left > 0 {
                let at = boxes + self.turn * BOX_BYTES;
                // One lane has stores, but behind a branch of that one alone LLVM may make a copy of the barrier for
                // it.
                tma::wait_group_read::<1>();
                warp::sync_warp(warp::FULL_MASK);
                self.rounded.put_box(at, member);
                fence::proxy_async_shared();
                warp::sync_warp(warp::FULL_MASK);
                if member.is_multiple_of(32) {
                    let row = member / 32 * WGMMA_OUT_ROWS;
                    let to = [self.col as i32, (self.row + row) as i32];
                    tma::store(out, to, at + row * ROW_BYTES);
                    tma::commit_group();
                }
                self.turn ^= 1;
                self.col += 64;
                self.left -= 1;
            }
            warp::sync_warp(warp::FULL_MASK);
        }
    }
}
