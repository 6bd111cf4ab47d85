//! Matrix products of some dozens to some hundreds of rows on Hopper: the weights' rows are those of the tile.
//!
//! `wgmma` makes 64 rows at a time, and any multiple of 8 columns. So here a's rows are the columns: 129 rows are a
//! tile of 160, where tiles of 128 rows by `wgmma` would be two, and each of b's rows comes in once for all of them.
//! Where tiles are few, the blocks of a cluster share k, as in `split_k_wgmma`.
//!
//! ```text
//! producer   wait empty[s] ── expect bytes ── load b BM × 128 B, a n × 128 B ──► full[s]
//! consumers  wait full[s] ── 4 × wgmma m64nN ──► empty[s-1]                  one for each 64 rows of b
//! at the end sums ──► own shared memory ── each block's warps' by bulk copies ──► that block
//!            block 0 + block 1 + …, read crosswise ── epilogue ── out
//! ```
//!
//! - A warp has 16 of the weights' rows. Every so many-th warp's sums are a block's to finish, which all of its warps
//!   do, 16 × 16 of them at a time.
//! - If the product is gated, the first half of a tile's rows are the gate's and the second half up's: the sums of one
//!   and the other meet in shared memory.
//! - Sums leave registers for shared memory as they lie there, and come back crosswise: a thread then has neighbours of
//!   out's rows, as it has by `wgmma`, and what follows is the same.
//! - What is sent comes into a stage for each consumer, the first that are free for good; see `split_k_wgmma`.
//! - The rows of a are shared out evenly: 257 are twice 136, not 256 and 1. TMA is slow where a box is mostly outside
//!   of its tensor. Where that leaves 16 columns or more without a row, `wgmma` makes 16 fewer.
//! - By two the next launch may start early, and then it has brought its first bytes of b to L2 before this one has
//!   ended ([`early`](super::early)), as in `split_k_wgmma`. Blocks that share no k gain nothing by that.
//! - The order of a sum is that of k within a part, then of the parts: that of `wgmma`, and where k is shared that of
//!   `split_k_wgmma` by as many blocks.
//!
//! What was measured and tried: `gpu/NOTES/matmul.md`.

use abi::ops::matmul::{MatmulDims, NEXT_MAY_START, swapped_columns, swapped_rows};
use cuda_std::cvt::Element;
use cuda_std::wgmma::{Multiply, Registers};
use cuda_std::{barrier, cluster, fence, grid, mbarrier, shared, thread, tma, warp};

use super::epilogue::Epilogue;
use super::wgmma::Maps;
use super::wgmma_consumers::{Place, ROW_BYTES, Results, Ring, multiply_stages, store_pairs};

/// Warps of a consumer, of 16 rows each.
const WARPS: u32 = 4;
/// Four sums of each lane of a warp: 16 rows, 8 columns.
const QUAD_BYTES: u32 = 32 * 16;
/// The barrier of the consumers.
const CONSUMERS: u32 = 1;
/// Bytes of each row of b that a block brings to L2 at first: see [`early`](super::early).
const EARLY_BYTES: u32 = 1024;

/// Stores a lane's sums, four of each 8 columns, from `at` on.
///
/// # Safety
/// - *exclusive*: 16 bytes of shared memory at `at` and every [`QUAD_BYTES`] further on, for each four sums.
#[inline(always)]
unsafe fn store_quads<const SUMS: usize>(at: u32, sums: &[f32; SUMS]) {
    let mut quad = 0;
    while quad < SUMS / 4 {
        let values = [sums[4 * quad], sums[4 * quad + 1], sums[4 * quad + 2], sums[4 * quad + 3]];
        // SAFETY: the caller's promise.
        unsafe { shared::store_u32x4(at + quad as u32 * QUAD_BYTES, values.map(f32::to_bits)) };
        quad += 1;
    }
}

/// The block's part of the product, behind what the kernel ahead leaves (`#[kernel(waits)]`).
///
/// # Safety
/// - Blocks of 128 threads for each 64 of `BM` and a warp, in clusters of `CLUSTER`, a cluster for each tile; shared
///   memory as `MatmulTile::smem_bytes` says; a thread has `SUMS` of the tile's sums, or `FEWER` where these will do.
/// - The maps and the weights are those of `Matmul::run`; out, bias and residual *in-bounds* for `dims`.
#[inline(always)]
pub unsafe fn multiply<
    T: Multiply<[f32; SUMS]> + Multiply<[f32; FEWER]>,
    B: Element,
    O: Element,
    const BM: u32,
    const SUMS: usize,
    const FEWER: usize,
    const STAGES: u32,
    const CLUSTER: u32,
>(
    maps: Maps<T>,
    end: Epilogue<'_, B, O>,
) where
    [f32; SUMS]: Registers,
    [f32; FEWER]: Registers,
{
    let (dims, gated) = (end.dims, end.is_gated());
    let bn = 2 * SUMS as u32;
    let consumers = BM / 64;
    // Bytes of b's rows, which are the tile's, and of a's.
    let (rows_bytes, cols_bytes) = (BM * ROW_BYTES, bn * ROW_BYTES);
    let base = shared::base();
    let stage_of = |stage: u32| base + stage * (rows_bytes + cols_bytes);
    let barriers = stage_of(STAGES);
    let full = |stage: u32| barriers + 8 * stage;
    let empty = |stage: u32| barriers + 8 * (STAGES + stage);
    // The others have room for this block's sums, and this one has theirs.
    let (ready, received) = (barriers + 16 * STAGES, barriers + 16 * STAGES + 8);
    let (rank, thread) = (if CLUSTER > 1 { cluster::block_rank() } else { 0 }, thread::thread_idx_x());
    // Tiles of the same weights come one after the other.
    let tile = thread::block_idx_x() / CLUSTER;
    let (tiles, a_rows) = swapped_rows(dims.m, bn);
    let a_row = tile % tiles * a_rows;
    let out_col = tile / tiles * if gated { BM / 2 } else { BM };
    let bk = ROW_BYTES / size_of::<T>() as u32;
    let steps = dims.k.div_ceil(bk);
    let bounds = |rank: u32| (steps * rank / CLUSTER, steps * (rank + 1) / CLUSTER);
    let (first, last) = bounds(rank);
    // A warp's sums, and of a consumer's warps those that a block finishes.
    let (of_warp, own_warps) = (SUMS as u32 / 4 * QUAD_BYTES, WARPS / CLUSTER);
    // What a warp makes of them.
    let columns = swapped_columns(a_rows, bn);
    let made = columns / 8 * QUAD_BYTES;
    const {
        // Parts into a stage for each consumer, and whole warps' own sums into the others: before the last stage's end
        // and from the first stage on.
        let stage = (BM + 2 * SUMS as u32) * ROW_BYTES;
        let (of_warp, taken) = (SUMS as u32 * 128, if CLUSTER > 1 { BM / 64 } else { 0 });
        assert!((CLUSTER - 1) * (WARPS / CLUSTER) * of_warp <= stage && SUMS.is_multiple_of(8));
        assert!(swapped_columns(1, 2 * SUMS as u32) == 2 * FEWER as u32);
        let mut before = 0;
        while before <= STAGES - taken {
            let behind = (STAGES - taken - before) * stage;
            assert!(before * stage / of_warp + behind / of_warp >= BM / 16);
            before += 1;
        }
    };
    // Where a block's sums of a consumer's warp come to in another one.
    let part = |consumer: u32, warp: u32, from: u32, to: u32| {
        let (first, last) = bounds(to);
        let stage = (last - first + consumer) % STAGES;
        let block = (CLUSTER + from - to - 1) % CLUSTER;
        stage_of(stage) + (block * own_warps + warp / CLUSTER) * of_warp
    };
    // Loads a step into an empty stage.
    let load = |stage: u32, step: u32| {
        let (at, k) = (stage_of(stage), (step * bk) as i32);
        // SAFETY: the stage is empty — who calls; its rows are those of the maps' boxes.
        unsafe {
            mbarrier::arrive_expect_tx(full(stage), rows_bytes + a_rows * ROW_BYTES);
            tma::load(at, maps.b, [k, out_col as i32], full(stage));
            if gated {
                tma::load(at + rows_bytes / 2, maps.up, [k, out_col as i32], full(stage));
            }
            tma::load(at + rows_bytes, maps.a, [k, a_row as i32], full(stage));
        }
    };
    // The first thread behind the consumers.
    let producer = 128 * consumers;
    let mut ring = Ring::<STAGES>::START;
    let mut step = first;
    // SAFETY: one thread initialises the barriers, which lie behind the stages, before anyone uses them; rows that no
    // load fills are nobody else's.
    unsafe {
        if thread == producer {
            let mut stage = 0;
            while stage < STAGES {
                mbarrier::init(full(stage), 1);
                mbarrier::init(empty(stage), consumers);
                stage += 1;
            }
            mbarrier::init(ready, (CLUSTER - 1).max(1));
            mbarrier::init(received, 1);
            mbarrier::fence_mbarrier_init();
            if CLUSTER > 1 {
                mbarrier::arrive_expect_tx(received, (CLUSTER - 1) * own_warps * consumers * made);
            }
        }
        let may_be_early = CLUSTER == 2 && dims.access & NEXT_MAY_START != 0;
        // Those of the same weights bring them once.
        if may_be_early && consumers > 1 && tile.is_multiple_of(tiles) && first < last {
            maps.weights.to_l2(dims, gated, (out_col, BM), first * bk, EARLY_BYTES, 4 * (consumers - 1));
        }
        grid::wait();
        // Opaque, or LLVM makes two copies of the wait.
        if thread::opaque(thread) == producer {
            // The first loads come before anything else: they take as long as all that follows.
            while step < last.min(first + STAGES) {
                load(ring.stage, step);
                ring.advance();
                // Else LLVM makes copies of the loads.
                step = thread::opaque(step + 1);
            }
        }
        let mut at = rows_bytes + a_rows * ROW_BYTES + thread * 16;
        while at < rows_bytes + cols_bytes {
            let mut stage = 0;
            while stage < STAGES {
                shared::store_u32x4(stage_of(stage) + at, [0; 4]);
                stage += 1;
            }
            at += thread::block_dim_x() * 16;
        }
        fence::proxy_async_shared();
        thread::sync_threads();
        if CLUSTER > 1 {
            // The barriers' fence is all that others have to see.
            cluster::arrive_relaxed();
        }
        if may_be_early {
            grid::launch_dependents();
        }
    }
    let member = thread % 128;
    // By one lane's word, so that ptxas knows that a warp stays together.
    // SAFETY: all lanes of each warp are here.
    let warpgroup = unsafe { warp::shuffle_idx(warp::FULL_MASK, thread / 128, 0) };
    // SAFETY: the consumers are whole warpgroups; each waits for a stage before it touches it. The stages are free
    // when all consumers are done: all that was loaded was waited for and multiplied.
    unsafe {
        if warpgroup == consumers {
            if thread == producer {
                while step < last {
                    mbarrier::wait_parity(empty(ring.stage), ring.parity ^ 1);
                    load(ring.stage, step);
                    ring.advance();
                    step = thread::opaque(step + 1);
                }
            }
            warp::sync_warp(warp::FULL_MASK);
            if CLUSTER > 1 {
                cluster::wait();
                if thread == producer {
                    let mut consumer = 0;
                    while consumer < consumers {
                        mbarrier::wait_parity(empty(ring.stage), ring.parity ^ 1);
                        ring.advance();
                        consumer += 1;
                    }
                    let mut ahead = 1;
                    while ahead < CLUSTER {
                        mbarrier::arrive_remote(cluster::map_shared(ready, (rank + ahead) % CLUSTER));
                        ahead += 1;
                    }
                }
                warp::sync_warp(warp::FULL_MASK);
                cluster::arrive_relaxed();
            }
        } else {
            let consumer = warpgroup;
            let mut ring = Ring::<STAGES>::START;
            let operands =
                |stage: u32| (stage_of(stage) + consumer * 64 * ROW_BYTES, stage_of(stage) + rows_bytes);
            let release = |stage: u32| {
                if member == 0 {
                    mbarrier::arrive(empty(stage));
                }
            };
            let steps = last - first;
            // Warps' sums next to each other, behind the stages of the others' parts, and on from the first stage.
            let warp = warp::shuffle_idx(warp::FULL_MASK, member / 32, 0);
            let lane = member % 32;
            let quads_from = if CLUSTER > 1 { stage_of((steps + consumers) % STAGES) } else { base };
            let before = (barriers - quads_from) / of_warp;
            let at_warp = |index: u32| {
                if index < before { quads_from + index * of_warp } else { base + (index - before) * of_warp }
            };
            let own_at = at_warp(consumer * WARPS + warp);
            // The stages are free for good when the other consumers have multiplied, too.
            let all_have_multiplied = || {
                if consumers > 1 {
                    barrier::sync(CONSUMERS, 128 * consumers);
                }
            };
            if columns < bn {
                let sums = multiply_stages::<T, f32, FEWER, STAGES>(
                    &mut ring,
                    steps,
                    false,
                    operands,
                    full,
                    release,
                    || (),
                );
                all_have_multiplied();
                store_quads(own_at + lane * 16, &sums);
            } else {
                let sums = multiply_stages::<T, f32, SUMS, STAGES>(
                    &mut ring,
                    steps,
                    false,
                    operands,
                    full,
                    release,
                    || (),
                );
                all_have_multiplied();
                store_quads(own_at + lane * 16, &sums);
            }
            if CLUSTER > 1 {
                fence::proxy_async_shared();
                warp::sync_warp(warp::FULL_MASK);
                cluster::wait();
                let to = warp % CLUSTER;
                if lane == 0 && to != rank {
                    mbarrier::wait_parity(ready, 0);
                    let at = cluster::map_shared(part(consumer, warp, rank, to), to);
                    tma::copy_bulk_to_block(at, own_at, made, cluster::map_shared(received, to));
                }
                warp::sync_warp(warp::FULL_MASK);
            }
            // All warps' sums are read by others of the block.
            barrier::sync(CONSUMERS, 128 * consumers);
            if CLUSTER > 1 {
                mbarrier::wait_parity(received, 0);
                // What another block has sent is here, and so may that one end.
                cluster::arrive_relaxed();
            }
            // The tile's own rows of a: those behind are another's.
            let tile_dims = MatmulDims { m: dims.m.min(a_row + a_rows), ..*dims };
            let end = end.with_dims(&tile_dims);
            // A block of 16 × 16 sums, of so many 16 rows of the tile.
            let crosswise = |rows: u32, block: u32| {
                let mut sums = [0f32; 8];
                let mut from = 0;
                while from < CLUSTER {
                    let at = if from == rank {
                        at_warp(rows)
                    } else {
                        part(rows / WARPS, rows % WARPS, from, rank)
                    };
                    let mut i = 0;
                    while i < 8 {
                        // Register i is for column 2 · (lane % 4) + i % 2 of out's row lane / 4, 8 rows below where i /
                        // 2 is odd, 8 columns beside where i / 4 is. In the tile rows and columns change places.
                        let (col, row) = (2 * (lane % 4) + i % 2, lane / 4);
                        let quad = 2 * block + i / 2 % 2;
                        let place = (col * 4 + row / 2) * 16 + (i / 4 * 2 + row % 2) * 4;
                        let value = f32::from_bits(shared::load_u32(at + quad * QUAD_BYTES + place));
                        let sum = &mut sums[i as usize];
                        *sum = if from == 0 { value } else { *sum + value };
                        i += 1;
                    }
                    from += 1;
                }
                sums
            };
            // The block's share of the tile's rows, of the gate's if there is one, by blocks of a's.
            let all = if gated { BM / 32 } else { BM / 16 };
            let share = all / CLUSTER;
            let mut item = consumer * WARPS + warp;
            while item < a_rows.div_ceil(16) * share {
                let (rows, block) = (item % share * CLUSTER + rank, item / share);
                // All warps do all rows, so that each is the first.
                let place = Place {
                    row: a_row + 16 * block,
                    col: out_col + 16 * rows,
                    len: 8,
                    consumer,
                    member: lane,
                };
                if gated {
                    let [gate, up] = [crosswise(rows, block), crosswise(rows + all, block)];
                    let mut sums = [0f32; 16];
                    let mut i = 0;
                    while i < 8 {
                        sums[i] = gate[i];
                        sums[8 + i] = up[i];
                        i += 1;
                    }
                    end.make(&mut sums, &place);
                    store_pairs(&sums, &end, &place);
                } else {
                    let mut sums = crosswise(rows, block);
                    end.make(&mut sums, &place);
                    store_pairs(&sums, &end, &place);
                }
                // Opaque, so that the loop stays one.
                item = thread::opaque(item + BM / 16);
            }
        }
        if CLUSTER > 1 {
            cluster::wait();
        }
    }
}
