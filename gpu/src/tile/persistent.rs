//! Matrix products on Hopper: TMA feeds a ring of stages, warpgroups multiply from it, TMA takes the result away.
//!
//! A block stays on its multiprocessor and walks over tiles of `BM` × `BN`. One thread of its first warpgroup loads; the
//! others, one or two, multiply 64 rows each, with all sums in registers.
//!
//! ```text
//! producer   wait empty[s] ── expect bytes ── load a BM × 128 B, b BN × 128 B ──► full[s]     runs up to STAGES ahead,
//! consumers  wait full[s] ── 4 × wgmma m64nBN ── wait for the group before ──► empty[s-1]  also into the next tile
//! at the end of a tile: epilogue, rounding, stmatrix to a 64 × 64 box of shared memory, TMA store; the next tile's loads and
//! the stores are under way meanwhile
//!
//! shared memory   | stage 0: a BM · 128, b BN · 128 | stage 1 | … | 2 boxes of 8 KiB per consumer | barriers |
//! ```
//!
//! - All tiles are in TMA's 128-byte swizzle, rows of 64 elements, 32 of f32 (which `wgmma` takes as tf32) or 128 of int8: loads, `wgmma` and
//!   `stmatrix` have no bank conflicts.
//! - The blocks of a cluster share an operand: each loads its part of it for all. With many rows two blocks take tiles one
//!   above the other and share b. With few (`SHARES_A`) four take tiles side by side and share a, which would else come out
//!   of L2 more often than the weights. A stage is free when the consumers of all blocks have read it, so they arrive at all
//!   blocks' barriers.
//! - One group of `wgmma` stays in flight over the back edge; a stage is given back one step late.
//! - Tiles go in bands of rows, so that the blocks at work at a time share operands in L2.
//! - The tails of m, n and k need nothing here: TMA reads zeros outside the tensors and writes nothing there. But it is slow where a box is mostly
//!   outside (32 × 19456 × 2560 by 128 × 192: 37 µs, 128 rows 30): of fewer rows than a tile's, boxes have those that there are.
//! - Where the product is gated, a tile's b is `BN / 2` rows of the gate and as many of up, by a load each (in a cluster each block
//!   loads one of them for both), and the tile of out is half as wide: element for element the registers' first half are gates
//!   and the second the ups of the same columns.
//! - The sums of an element run over k in one order, whatever the tile, m, or the other rows: all these kernels give the
//!   same bits.
//!
//! # What was tried, on an H200 against cuBLAS in the same run
//!
//! - Arrivals at the other block's barriers are the form that releases no writes. The releasing form is compiled to
//!   `MEMBAR.ALL.GPU`, which waits for all of the thread's memory traffic in every step: 504 instead of 791 TFLOP/s at 8192³.
//! - 128 × 256 in clusters of two is the fastest tile where it fills the card (8192³: 795 TFLOP/s, 1.09 of cuBLAS; 4096³:
//!   1.00); 128 × 192 where that leaves fewer multiprocessors idle (2048 × 19456 × 2560: 1.06, 2048 × 1536 × 2048: 0.91).
//! - For few rows, narrow tiles whose cluster of four shares a: 16, 24, 32 and 64 columns of 64 rows. Only 64 is worth having (64 ×
//!   4096 × 4096: 13.5 µs, cuBLAS 12.4, the tile of 128 rows 22.6): the shared operand comes in at 25 bytes per clock,
//!   whatever the width, so narrower tiles pay the same time more often (32 columns: 25.8 µs).
//! - An activation at the end of a tile costs 128 × 16384 × 4096 1.8 µs of 37.4, SwiGLU 2048 × 2 · 9728 × 2560 12 µs of 320.
//! - No more clusters than the card holds at a time, 30 of four where its multiprocessors would be 33: those that come late have all their rounds still
//!   before them (32 × 19456 × 2560 by the tile that shares a: 36.1 µs with 33 clusters, 29.9 with 30). And no more than each round has work for: 64 of 66
//!   of two at 4096³ and 8192³, 61 at 2048 × 19456 × 2560, where that was 2 to 5 % faster in each of three runs.
//! - 128 × 192 without a cluster: for 65 to 128 rows of many columns (128 × 19456 × 2560: 29.8 µs, 128 × 128 37.7, cuBLAS 30.9).
//! - Clusters of four one above the other, for 128 × 128 to 128 × 256: they read a tenth less from L2, but the card holds 30 of them, so 120
//!   blocks; in rounds for 128 they took twice as long.
//! - L2's hints: keeping a (`evict_last`) changes what comes from memory by 4 % (8192³: 1.25 GB instead of 1.30), letting b go first makes it 2.25 GB,
//!   out going first nothing that lasted from run to run. Starting the next launch early (`griddepcontrol.launch_dependents`): 2048 × 1536 × 2048 2 %
//!   faster, attention of 512 tokens 1 to 3 % slower.
//! - Each warp stores its own rows by TMA, 16 × 64 at a time, instead of a warpgroup's thread 64 × 64 behind two barriers: 193.1 thousand cycles
//!   instead of 194.1 at 4096 × 4096 × 2560.
//! - Bounds: at 8192³ the card's power (the clock falls below 1.6 GHz); elsewhere what a tile takes beside its steps (`ncu`, thousands of
//!   cycles with the launch, of two runs, this / cuBLAS / steps alone): 4096³ 295 / 284 / 262, 4096 × 4096 × 2560 193 / 185 / 164, 2048 × 1536 × 2048 39.0 / 35.4 /
//!   24.6. Of it a tile's end was some 3300 before warps stored for themselves, a third of that waits for a box's store and a fourth for instructions, and
//!   the last step 1300 alone. A second
//!   tile in flight (ping-pong) and a split of k for what does not fill the card are not there yet.

use abi::ops::matmul::{OUT_BY_TMA, WGMMA_OUT_ROWS};
use cuda_std::cvt::Element;
use cuda_std::tma::TensorMap;
use cuda_std::wgmma::{Multiply, Registers};
use cuda_std::{cluster, fence, mbarrier, registers, shared, thread, tma, warp};

use super::epilogue::Epilogue;
use super::operand::Sum;
use super::wgmma::{BOX_BYTES, Place, ROW_BYTES, Results, Ring, multiply_stages, put_box, store_pairs};

/// Rows of tiles in a band.
const BAND: u32 = 16;

/// The tensor maps of a launch.
#[derive(Clone, Copy)]
pub struct Maps {
    /// a in boxes of a block's share of the rows, or, where it has them for itself, of those that there are.
    pub a: *const TensorMap,
    /// b in the same way; if the product is gated, the gate in boxes of half a tile.
    pub b: *const TensorMap,
    /// Up in the same boxes.
    pub up: *const TensorMap,
    /// out in boxes of [`WGMMA_OUT_ROWS`] × 64.
    pub out: *const TensorMap,
}

/// The tile's place: row of clusters and column.
#[inline(always)]
fn tile_at(tile: u32, rows: u32, cols: u32, band: u32) -> (u32, u32) {
    let first = tile / (band * cols).max(1) * band;
    let height = if rows - first < band { rows - first } else { band };
    let within = tile - first * cols;
    (first + within % height.max(1), within / height.max(1))
}

/// The block's part of the product. `promotes`: each step's sum is added by itself.
///
/// # Safety
/// - Blocks of `MatmulTile::threads` threads in clusters of `CLUSTER`, shared memory as `MatmulTile::smem_bytes` says.
/// - The maps are those of `Matmul::run`; out, bias and residual *in-bounds* for `dims`.
#[inline(always)]
pub unsafe fn multiply<
    T: Multiply<[S; SUMS]>,
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
    maps: Maps,
    end: Epilogue<'_, B, O>,
    promotes: bool,
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
    // SAFETY: the barriers lie behind the boxes; one thread initialises them before anyone uses them; rows of a that no load fills are
    // nobody else's.
    unsafe {
        if thread == 0 {
            let mut stage = 0;
            while stage < STAGES {
                mbarrier::init(full(stage), 1);
                mbarrier::init(empty(stage), consumers * CLUSTER);
                stage += 1;
            }
            mbarrier::fence_mbarrier_init();
            tma::prefetch_map(maps.a);
            tma::prefetch_map(maps.b);
            if gated {
                tma::prefetch_map(maps.up);
            }
        }
        if box_rows < BM {
            let mut at = box_rows * ROW_BYTES + thread * 16;
            while at < a_bytes {
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
            cluster::sync();
        }
    }
    // Blocks of a cluster, and this one's place among them.
    let (above, beside) = if SHARES_A { (1, CLUSTER) } else { (CLUSTER, 1) };
    let (rank_m, rank_n) = if SHARES_A { (0, rank) } else { (rank, 0) };
    let rows = dims.m.div_ceil(BM * above);
    let cols = dims.n.div_ceil(BN * beside);
    // Elements of k per step.
    let bk = ROW_BYTES / size_of::<T>() as u32;
    let steps = dims.k.div_ceil(bk);
    let num_tiles = rows * cols;
    let first = thread::block_idx_x() / CLUSTER;
    let stride = thread::grid_dim_x() / CLUSTER;
    let band = BAND / above;
    let warpgroup = thread / 128;
    // SAFETY: the roles are those of whole warpgroups; each waits for a stage before it touches it.
    unsafe {
        if warpgroup == 0 {
            if consumers == 2 {
                registers::decrease::<40>();
            }
            if thread == 0 {
                let mut ring = Ring::<STAGES>::START;
                let shared_b = if gated && rank == 1 { maps.up } else { maps.b };
                let mut tile = first;
                while tile < num_tiles {
                    let (row, col) = tile_at(tile, rows, cols, band);
                    let a_row = (row * above + rank_m) * BM;
                    let b_row = (col * beside + rank_n) * if gated { BN / 2 } else { BN };
                    // The part of the shared operand that this block loads for all.
                    let part = rank * (if SHARES_A { BM } else { BN } / CLUSTER);
                    let mut step = 0;
                    while step < steps {
                        let Ring { stage, parity } = ring;
                        let at = base + stage * stage_bytes;
                        mbarrier::wait_parity(empty(stage), parity ^ 1);
                        mbarrier::arrive_expect_tx(full(stage), box_rows * ROW_BYTES + b_bytes);
                        let k = (step * bk) as i32;
                        let (a_at, b_at) = (at, at + a_bytes);
                        let all = ((1u32 << CLUSTER) - 1) as u16;
                        if CLUSTER > 1 && SHARES_A {
                            let (to, from) = (a_at + part * ROW_BYTES, (a_row + part) as i32);
                            tma::load_multicast(to, maps.a, [k, from], full(stage), all);
                        } else {
                            tma::load(a_at, maps.a, [k, a_row as i32], full(stage));
                        }
                        if CLUSTER > 1 && !SHARES_A {
                            let from = if gated { b_row } else { b_row + part } as i32;
                            tma::load_multicast(
                                b_at + part * ROW_BYTES,
                                shared_b,
                                [k, from],
                                full(stage),
                                all,
                            );
                        } else {
                            tma::load(b_at, maps.b, [k, b_row as i32], full(stage));
                            if gated {
                                tma::load(b_at + b_bytes / 2, maps.up, [k, b_row as i32], full(stage));
                            }
                        }
                        ring.advance();
                        step += 1;
                    }
                    tile += stride;
                }
            }
            // The lanes of the first warp come together again for the cluster's barrier.
            warp::sync_warp(warp::FULL_MASK);
        } else {
            if consumers == 2 {
                registers::increase::<232>();
            }
            let consumer = warpgroup - 1;
            let member = thread % 128;
            let my_boxes = boxes + consumer * 2 * BOX_BYTES;
            let mut ring = Ring::<STAGES>::START;
            let mut turn = 0;
            let release = |stage: u32| {
                if CLUSTER > 1 {
                    if member < CLUSTER {
                        mbarrier::arrive_remote(cluster::map_shared(empty(stage), member));
                    }
                } else if member == 0 {
                    mbarrier::arrive(empty(stage));
                }
            };
            let mut tile = first;
            while tile < num_tiles {
                let (row, col) = tile_at(tile, rows, cols, band);
                let operands = |stage: u32| {
                    let at = base + stage * stage_bytes;
                    (at + consumer * 64 * ROW_BYTES, at + a_bytes)
                };
                let mut sums = multiply_stages::<T, S, SUMS, STAGES>(
                    &mut ring, steps, promotes, operands, full, release,
                );
                let place = Place {
                    row: (row * above + rank_m) * BM + consumer * 64,
                    col: (col * beside + rank_n) * if gated { BN / 2 } else { BN },
                    len: if gated { SUMS / 2 } else { SUMS },
                    consumer,
                    member,
                };
                results.make(&mut sums, &place);
                if in_boxes && dims.access & OUT_BY_TMA != 0 {
                    store_boxes::<S, O, SUMS>(&sums, maps.out, my_boxes, &mut turn, &place, end.n());
                } else {
                    store_pairs(&sums, &end, &place);
                }
                tile += stride;
            }
            if member.is_multiple_of(32) {
                tma::wait_group_read::<0>();
            }
            warp::sync_warp(warp::FULL_MASK);
        }
        if CLUSTER > 1 {
            // Others may still load into this block's memory, or arrive at its barriers.
            cluster::sync();
        }
    }
}

/// Rounds the sums and stores them box by box, through two boxes of shared memory in turn, as far as they begin before column n. Each warp stores its own
/// rows, so none waits for another.
///
/// # Safety
/// - All 128 threads of the consumer (*converged*); the boxes are theirs.
#[inline(always)]
unsafe fn store_boxes<S: Sum, O: Element, const SUMS: usize>(
    sums: &[S; SUMS],
    out: *const TensorMap,
    boxes: u32,
    turn: &mut u32,
    place: &Place,
    n: u32,
) {
    let mut i = 0;
    while i < SUMS / 32 {
        if 32 * i >= place.len || place.col + 64 * i as u32 >= n {
            break;
        }
        let at = boxes + *turn * BOX_BYTES;
        *turn ^= 1;
        // SAFETY: the warp's store of two boxes ago has read its rows when all its threads have come together.
        unsafe {
            // One lane has stores, but behind a branch of that one alone LLVM may make a copy of the barrier for it.
            tma::wait_group_read::<1>();
            warp::sync_warp(warp::FULL_MASK);
            put_box::<S, O, SUMS>(sums, 32 * i, at, place.member);
            fence::proxy_async_shared();
            warp::sync_warp(warp::FULL_MASK);
            if place.member.is_multiple_of(32) {
                let row = place.member / 32 * WGMMA_OUT_ROWS;
                let to = [(place.col + 64 * i as u32) as i32, (place.row + row) as i32];
                tma::store(out, to, at + row * ROW_BYTES);
                tma::commit_group();
            }
        }
        i += 1;
    }
}
