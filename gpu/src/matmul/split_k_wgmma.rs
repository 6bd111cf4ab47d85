//! Matrix products of few rows and columns on Hopper: the blocks of a cluster share k.
//!
//! Where there are fewer tiles than multiprocessors, the weights would come in through some of these alone. So a tile
//! of 64 rows and 64 or 128 columns is a cluster's, of two or four blocks, each of which multiplies a part of k as
//! `wgmma` does, and then makes a part of the tile's columns from the sums of all:
//!
//! ```text
//! producer   wait empty[s] ── expect bytes ── load a 64 × 128 B, b n × 128 B ──► full[s]
//! consumer   wait full[s] ── 4 × wgmma m64nN ──► empty[s-1]
//! at the end sums ──► own shared memory ── each block's columns by bulk copies ──► that block
//!            block 0 + block 1 + … ── epilogue ── out
//! ```
//!
//! - A warp has 16 of the rows. It sends its sums by itself, and those that have no rows send none.
//! - What is sent comes into the stage that is free first, and is not sent before the loader of that stage has said so,
//!   which it does some steps before the end. The receiver waits for the bytes alone. Reading from the other blocks
//!   behind a barrier of the cluster takes longer: the barrier's release is a `MEMBAR.ALL.GPU`, and the loads come one
//!   way after the other.
//! - By two the next launch may start early, and then it has brought its first bytes of b to L2 before this one has
//!   ended ([`early`](super::early)). By four, beside whose blocks there is room for others, it may not:
//!   `next_may_start` in `host/src/ops/matmul/select.rs`.
//! - By two there are twelve stages, and so a block to a multiprocessor. By four there are six, and two blocks: with
//!   one to a multiprocessor the card does not hold as many clusters of four at a time.
//! - a is loaded in boxes of the rows that there are: TMA is slow where a box is mostly outside of its tensor.
//! - The order of a sum is that of k within a part, then of the parts: it depends on k and how many blocks share it,
//!   and is not that of `wgmma`. Sums of int8 are exact in any order.
//!
//! What was measured and tried: `gpu/NOTES/matmul.md`.

use abi::ops::matmul::NEXT_MAY_START;
use cuda_std::cvt::Element;
use cuda_std::wgmma::{Multiply, Registers};
use cuda_std::{cluster, fence, grid, mbarrier, shared, thread, tma, warp};

use super::epilogue::Epilogue;
use super::operand::Sum;
use super::wgmma::Maps;
use super::wgmma_consumers::{Place, ROW_BYTES, Results, Ring, multiply_stages, store_pairs};

/// Rows of a tile.
const BM: u32 = 64;
/// Warps of the consumer, of 16 rows each.
const WARPS: u32 = 4;
/// Bytes of each row of b that a block brings to L2 at first: see [`early`](super::early).
const EARLY_BYTES: u32 = 512;
/// Four sums of each lane of a warp.
const QUAD_BYTES: u32 = 32 * 16;

/// The block's part of the product, behind what the kernel ahead leaves (`#[kernel(waits)]`). `promotes`: each step's
/// sum is added by itself.
///
/// # Safety
/// - Blocks of 256 threads in clusters of `CLUSTER`, a cluster for each tile; shared memory as `MatmulTile::smem_bytes`
///   says.
/// - A thread has `SUMS` of the tile's sums, and finishes `OWN` of them: those of a block's columns, or half of the
///   gate and half of up.
/// - The maps are those of `Matmul::run` or `MatmulI8::run`; out, bias and residual *in-bounds* for `dims`.
#[inline(always)]
pub unsafe fn multiply<
    T: Multiply<[S; SUMS]>,
    S: Sum,
    B: Element,
    O: Element,
    const SUMS: usize,
    const OWN: usize,
    const STAGES: u32,
    const CLUSTER: u32,
>(
    maps: Maps<T>,
    end: Epilogue<'_, B, O>,
    promotes: bool,
    results: impl Results<S, OWN>,
) where
    [S; SUMS]: Registers,
{
    const { assert!(CLUSTER as usize * OWN == SUMS && OWN.is_multiple_of(8)) };
    let (dims, gated) = (end.dims, end.is_gated());
    let bn = 2 * SUMS as u32;
    let (a_bytes, b_bytes) = (BM * ROW_BYTES, bn * ROW_BYTES);
    let base = shared::base();
    let stage_of = |stage: u32| base + stage * (a_bytes + b_bytes);
    let barriers = stage_of(STAGES);
    let full = |stage: u32| barriers + 8 * stage;
    let empty = |stage: u32| barriers + 8 * (STAGES + stage);
    // The others have room for this block's sums, and this one has theirs.
    let (ready, received) = (barriers + 16 * STAGES, barriers + 16 * STAGES + 8);
    let (rank, thread) = (cluster::block_rank(), thread::thread_idx_x());
    let tile = thread::block_idx_x() / CLUSTER;
    let rows = dims.m.div_ceil(BM).max(1);
    let (row, col) = (tile % rows * BM, tile / rows * if gated { bn / 2 } else { bn });
    let box_rows = dims.m.next_multiple_of(8).min(BM);
    let bk = ROW_BYTES / size_of::<T>() as u32;
    let steps = dims.k.div_ceil(bk);
    let bounds = |rank: u32| (steps * rank / CLUSTER, steps * (rank + 1) / CLUSTER);
    let (first, last) = bounds(rank);
    // Warps that have rows. Of one's rows and a block's columns: sums of one block for another. They come into the
    // stage that is the first to be free for good, in which the next step would be, from the next block's to that of
    // the one before.
    let (warps, quads) = ((dims.m - row).div_ceil(16).min(WARPS), OWN as u32 / 4);
    let part_bytes = quads * QUAD_BYTES;
    const {
        // Parts into one stage, and a block's own sums into the others.
        let stage = (BM + 2 * SUMS as u32) * ROW_BYTES;
        assert!((CLUSTER - 1) * OWN as u32 * 512 <= stage && SUMS as u32 * 512 <= (STAGES - 1) * stage);
    };
    let part = |from: u32, to: u32| {
        let (first, last) = bounds(to);
        stage_of((last - first) % STAGES) + (CLUSTER + from - to - 1) % CLUSTER * WARPS * part_bytes
    };
    // Loads a step into an empty stage.
    let load = |stage: u32, step: u32| {
        let (at, k) = (stage_of(stage), (step * bk) as i32);
        let b_at = at + a_bytes;
        // SAFETY: the stage is empty — who calls; its rows are those of the maps' boxes.
        unsafe {
            mbarrier::arrive_expect_tx(full(stage), box_rows * ROW_BYTES + b_bytes);
            tma::load(at, maps.a, [k, row as i32], full(stage));
            tma::load(b_at, maps.b, [k, col as i32], full(stage));
            if gated {
                tma::load(b_at + b_bytes / 2, maps.up, [k, col as i32], full(stage));
            }
        }
    };
    let mut ring = Ring::<STAGES>::START;
    let mut step = first;
    // SAFETY: one thread initialises the barriers, which lie behind the stages, before anyone uses them; rows that no
    // load fills are nobody else's. What is brought to L2 begins at a step of this block's, inside a row.
    unsafe {
        if thread == 0 {
            let mut stage = 0;
            while stage < STAGES {
                mbarrier::init(full(stage), 1);
                mbarrier::init(empty(stage), 1);
                stage += 1;
            }
            mbarrier::init(ready, CLUSTER - 1);
            mbarrier::init(received, 1);
            mbarrier::fence_mbarrier_init();
            mbarrier::arrive_expect_tx(received, (CLUSTER - 1) * warps * part_bytes);
        }
        if dims.access & NEXT_MAY_START != 0 && first < last {
            maps.weights.to_l2(dims, gated, (col, bn), first * bk, EARLY_BYTES, WARPS);
        }
        grid::wait();
        // Opaque, or LLVM makes two copies of the wait.
        if thread::opaque(thread) == 0 {
            // The first loads come before anything else: they take as long as all that follows.
            while step < last.min(first + STAGES) {
                load(ring.stage, step);
                ring.advance();
                // Else LLVM makes copies of the loads.
                step = thread::opaque(step + 1);
            }
        }
        let mut at = box_rows * ROW_BYTES + thread * 16;
        while at < a_bytes {
            let mut stage = 0;
            while stage < STAGES {
                shared::store_u32x4(stage_of(stage) + at, [0; 4]);
                stage += 1;
            }
            at += 256 * 16;
        }
        fence::proxy_async_shared();
        thread::sync_threads();
        // The barriers' fence is all that others have to see.
        cluster::arrive_relaxed();
        if dims.access & NEXT_MAY_START != 0 {
            grid::launch_dependents();
        }
    }
    let member = thread % 128;
    // SAFETY: the roles are those of whole warpgroups; each waits for a stage before it touches it. The stages are free
    // when the consumer is done: all that was loaded was waited for and multiplied.
    unsafe {
        if thread < 128 {
            if thread == 0 {
                while step < last {
                    mbarrier::wait_parity(empty(ring.stage), ring.parity ^ 1);
                    load(ring.stage, step);
                    ring.advance();
                    step = thread::opaque(step + 1);
                }
            }
            warp::sync_warp(warp::FULL_MASK);
            cluster::wait();
            if thread == 0 {
                mbarrier::wait_parity(empty(ring.stage), ring.parity ^ 1);
                let mut ahead = 1;
                while ahead < CLUSTER {
                    mbarrier::arrive_remote(cluster::map_shared(ready, (rank + ahead) % CLUSTER));
                    ahead += 1;
                }
            }
            warp::sync_warp(warp::FULL_MASK);
            cluster::arrive_relaxed();
        } else {
            let mut ring = Ring::<STAGES>::START;
            let operands = |stage: u32| (stage_of(stage), stage_of(stage) + a_bytes);
            let release = |stage: u32| {
                if member == 0 {
                    mbarrier::arrive(empty(stage));
                }
            };
            let sums = multiply_stages::<T, S, SUMS, STAGES>(
                &mut ring,
                last - first,
                promotes,
                operands,
                full,
                release,
                || (),
            );
            // A quad is 8 columns. A warp's are behind the stage of the others' parts, and on from the first one.
            let warp = warp::shuffle_idx(warp::FULL_MASK, member / 32, 0);
            let lane = member % 32;
            let quads_at = stage_of((last - first + 1) % STAGES) + warp * (SUMS as u32 / 4) * QUAD_BYTES;
            let at_quad = |quad: u32| {
                let at = quads_at + quad * QUAD_BYTES;
                at - if at >= barriers { barriers - base } else { 0 }
            };
            if warp < warps {
                let mut quad = 0;
                while quad < SUMS / 4 {
                    let values = [sums[4 * quad], sums[4 * quad + 1], sums[4 * quad + 2], sums[4 * quad + 3]];
                    shared::store_u32x4(at_quad(quad as u32) + lane * 16, values.map(S::to_word));
                    quad += 1;
                }
                fence::proxy_async_shared();
                warp::sync_warp(warp::FULL_MASK);
            }
            cluster::wait();
            // A block's quads are next to each other, or half of them in the gate's half and half in up's.
            let halves = if gated { 2 } else { 1 };
            let first_quad = |rank: u32, half: u32| half * (SUMS as u32 / 8) + quads / halves * rank;
            if warp < warps && lane == 0 {
                mbarrier::wait_parity(ready, 0);
                let mut ahead = 1;
                while ahead < CLUSTER {
                    let to = (rank + ahead) % CLUSTER;
                    let barrier = cluster::map_shared(received, to);
                    let mut half = 0;
                    while half < halves {
                        let bytes = part_bytes / halves;
                        let at = part(rank, to) + warp * part_bytes + half * bytes;
                        let at = cluster::map_shared(at, to);
                        tma::copy_bulk_to_block(at, at_quad(first_quad(to, half)), bytes, barrier);
                        half += 1;
                    }
                    ahead += 1;
                }
            }
            warp::sync_warp(warp::FULL_MASK);
            mbarrier::wait_parity(received, 0);
            // What another block has sent is here, and so may that one end.
            cluster::arrive_relaxed();
            if warp < warps {
                let mut sums = [S::ZERO; OWN];
                let mut from = 0;
                while from < CLUSTER {
                    let mut i = 0;
                    while i < quads {
                        let at = if from == rank {
                            let half = i / (quads / halves);
                            at_quad(first_quad(rank, half) + i % (quads / halves))
                        } else {
                            part(from, rank) + warp * part_bytes + i * QUAD_BYTES
                        };
                        let values = shared::load_u32x4(at + lane * 16).map(S::from_word);
                        let mut j = 0;
                        while j < 4 {
                            let sum = &mut sums[4 * i as usize + j];
                            *sum = if from == 0 { values[j] } else { sum.plus(values[j]) };
                            j += 1;
                        }
                        i += 1;
                    }
                    from += 1;
                }
                let own = bn / CLUSTER;
                let (col, len) =
                    if gated { (col + own / 2 * rank, OWN / 2) } else { (col + own * rank, OWN) };
                let place = Place { row, col, len, consumer: 0, member };
                results.make(&mut sums, &place);
                store_pairs(&sums, &end, &place);
            }
        }
        cluster::wait();
    }
}
