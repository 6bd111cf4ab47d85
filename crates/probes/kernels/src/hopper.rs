//! TMA, clusters, and mbarriers that count bytes.

#[cfg(not(lacks_wgmma))]
use cuda_std::registers;
use cuda_std::tma::TensorMap;
use cuda_std::{cluster, fence, grid, kernel, mbarrier, shared, thread, tma};

use crate::{load, store};

/// Words of a block's shared memory for a box.
pub const BOX_WORDS: u32 = 4096;
/// Words of a block's part of the input: a head, and a box.
pub const INPUT_WORDS: u32 = 8 + BOX_WORDS;

/// Copies the box at the block's coordinates, of as many dimensions as the head says.
macro_rules! with_coordinates {
    ($input:ident, |$c:ident| $copy:expr) => {{
        let [rank, c0, c1, c2, c3, c4] = [0, 2, 3, 4, 5, 6].map(|i| load($input, INPUT_WORDS, i) as i32);
        match rank {
            1 => {
                let $c = [c0];
                $copy
            }
            2 => {
                let $c = [c0, c1];
                $copy
            }
            3 => {
                let $c = [c0, c1, c2];
                $copy
            }
            4 => {
                let $c = [c0, c1, c2, c3];
                $copy
            }
            _ => {
                let $c = [c0, c1, c2, c3, c4];
                $copy
            }
        }
    }};
}

/// Loads a box by the map with the block's number. Input of a block: 8 words (dimensions, words of the box,
/// coordinates), [`INPUT_WORDS`] in all. Results: the box as it lies in shared memory, [`BOX_WORDS`] for each block, in
/// which words beyond the box are 0xdeadbeef. Blocks of 128 threads; shared memory: 16400 bytes.
#[kernel(max_threads = 128)]
pub unsafe fn probe_tma_load(input: *const u32, output: *mut u32, maps: *const u64, _parameter: u32) {
    let (thread, base) = (thread::thread_idx_x(), shared::base());
    let bar = base + 4 * BOX_WORDS;
    // SAFETY: the buffers are as documented; the box is read after its barrier.
    unsafe {
        let map = maps.add(16 * thread::block_idx_x() as usize).cast::<TensorMap>();
        let mut i = thread;
        while i < BOX_WORDS {
            shared::store_u32(base + 4 * i, 0xdead_beef);
            i += 128;
        }
        fence::proxy_async_shared();
        if thread == 0 {
            mbarrier::init(bar, 1);
            mbarrier::fence_mbarrier_init();
            tma::prefetch_map(map);
        }
        thread::sync_threads();
        if thread == 0 {
            mbarrier::arrive_expect_tx(bar, 4 * load(input, INPUT_WORDS, 1));
            with_coordinates!(input, |c| tma::load(base, map, c, bar));
        }
        mbarrier::wait_parity(bar, 0);
        let mut i = thread;
        while i < BOX_WORDS {
            store(output, BOX_WORDS, i, shared::load_u32(base + 4 * i));
            i += 128;
        }
    }
}

/// Stores a box, or adds it, by the map with the block's number. Input of a block: 8 words as for [`probe_tma_load`],
/// then the box as it lies in shared memory. The results are the tensors of the maps. Parameter: 0 stores, 1 adds.
#[kernel(max_threads = 128)]
pub unsafe fn probe_tma_store(input: *const u32, _output: *mut u32, maps: *const u64, parameter: u32) {
    let (thread, base) = (thread::thread_idx_x(), shared::base());
    // SAFETY: the buffers are as documented; the box is written before the fence and the barrier.
    unsafe {
        let map = maps.add(16 * thread::block_idx_x() as usize).cast::<TensorMap>();
        let words = load(input, INPUT_WORDS, 1);
        let mut i = thread;
        while i < words {
            shared::store_u32(base + 4 * i, load(input, INPUT_WORDS, 8 + i));
            i += 128;
        }
        fence::proxy_async_shared();
        thread::sync_threads();
        if thread == 0 {
            if parameter == 0 {
                with_coordinates!(input, |c| tma::store(map, c, base));
            } else {
                with_coordinates!(input, |c| tma::reduce_add(map, c, base));
            }
            tma::commit_group();
            tma::wait_group_read::<0>();
            tma::wait_group::<0>();
        }
    }
}

/// Copies 256 words to shared memory, waits, changes them, and copies them back; adds them to 256 more as f32. Input of
/// a block: 256 words, small integers as f32. Results: the words times two, then the sum. Blocks of 128 threads; shared
/// memory: 1040 bytes.
#[kernel(max_threads = 128)]
pub unsafe fn probe_bulk(input: *const u32, output: *mut u32, _maps: *const u64, _parameter: u32) {
    let (thread, base) = (thread::thread_idx_x(), shared::base());
    let bar = base + 1024;
    // SAFETY: the buffers are as documented; barrier and fences hand the words over.
    unsafe {
        if thread == 0 {
            mbarrier::init(bar, 1);
            mbarrier::fence_mbarrier_init();
        }
        thread::sync_threads();
        if thread == 0 {
            mbarrier::arrive_expect_tx(bar, 1024);
            tma::load_bulk(base, input.add((256 * thread::block_idx_x()) as usize), 1024, bar);
        }
        mbarrier::wait_parity(bar, 0);
        let address = base + 8 * thread;
        let (low, high) = (shared::load_f32(address), shared::load_f32(address + 4));
        shared::store_f32(address, 2.0 * low);
        shared::store_f32(address + 4, 2.0 * high);
        fence::proxy_async_shared();
        thread::sync_threads();
        if thread == 0 {
            let out = output.add((512 * thread::block_idx_x()) as usize);
            tma::store_bulk(out, base, 1024);
            tma::reduce_add_bulk_f32(out.add(256).cast(), base, 1024);
            tma::commit_group();
            tma::wait_group::<0>();
        }
    }
}

/// Blocks of a cluster of four write to each other. Input of a block: 32 words. Results: 192 words for each block:
/// those of the next block by words, the next but one by fours, those that the block before left here, those that the
/// block before copied here in bulk, rank and size, and whether its arrivals came. Blocks of 32 threads; shared memory:
/// 640 bytes.
#[kernel(max_threads = 32)]
pub unsafe fn probe_cluster(input: *const u32, output: *mut u32, _maps: *const u64, _parameter: u32) {
    let (lane, base) = (thread::lane(), shared::base());
    let (rank, blocks) = (cluster::block_rank(), cluster::num_blocks());
    let (bulk, arrivals) = (base + 512, base + 520);
    // SAFETY: the buffers are as documented; cluster barriers and mbarriers hand the words over, and the last keeps the
    // blocks alive.
    unsafe {
        let value = load(input, 32, lane);
        shared::store_u32(base + 4 * lane, value);
        if lane == 0 {
            mbarrier::init(bulk, 1);
            mbarrier::init(arrivals, 32);
            mbarrier::fence_mbarrier_init();
        }
        fence::proxy_async_shared();
        cluster::sync();
        let next = cluster::map_shared(base, (rank + 1) % blocks);
        let second = cluster::map_shared(base, (rank + 2) % blocks);
        store(output, 192, lane, cluster::load_u32(next + 4 * lane));
        if lane < 8 {
            let four = cluster::load_x4(second + 16 * lane);
            let mut i = 0;
            while i < 4 {
                store(output, 192, 32 + 4 * lane + i, four[i as usize]);
                i += 1;
            }
        }
        cluster::store_u32(next + 128 + 4 * lane, value + 1);
        if lane == 0 {
            mbarrier::arrive_expect_tx(bulk, 128);
            tma::copy_bulk_to_block(next + 256, base, 128, cluster::map_shared(bulk, (rank + 1) % blocks));
        }
        mbarrier::arrive_remote_release(cluster::map_shared(arrivals, (rank + 1) % blocks));
        mbarrier::wait_parity_cluster(arrivals, 0);
        mbarrier::wait_parity_cluster(bulk, 0);
        store(output, 192, 96 + lane, shared::load_u32(base + 256 + 4 * lane));
        cluster::sync();
        store(output, 192, 64 + lane, shared::load_u32(base + 128 + 4 * lane));
        if lane == 0 {
            store(output, 192, 128, rank);
            store(output, 192, 129, blocks);
            store(output, 192, 130, cluster::cluster_idx_x());
            store(output, 192, 131, cluster::grid_dim_x());
        }
        store(output, 192, 160 + lane, mbarrier::test_wait_parity(arrivals, 0).into());
        cluster::sync();
    }
}

/// The first block of a cluster of two loads a box for both, by the first map. Input: 8 words as for
/// [`probe_tma_load`]. Results as there.
#[kernel(max_threads = 128)]
pub unsafe fn probe_multicast(input: *const u32, output: *mut u32, maps: *const u64, _parameter: u32) {
    let (thread, base) = (thread::thread_idx_x(), shared::base());
    let bar = base + 4 * BOX_WORDS;
    // SAFETY: the buffers are as documented; the box is read after its barrier.
    unsafe {
        let map = maps.cast::<TensorMap>();
        let mut i = thread;
        while i < BOX_WORDS {
            shared::store_u32(base + 4 * i, 0xdead_beef);
            i += 128;
        }
        fence::proxy_async_shared();
        if thread == 0 {
            mbarrier::init(bar, 1);
            mbarrier::fence_mbarrier_init();
            mbarrier::arrive_expect_tx(bar, 4 * load(input, INPUT_WORDS, 1));
        }
        cluster::sync();
        if thread == 0 && cluster::block_rank() == 0 {
            with_coordinates!(input, |c| tma::load_multicast(base, map, c, bar, 3));
        }
        mbarrier::wait_parity(bar, 0);
        let mut i = thread;
        while i < BOX_WORDS {
            store(output, BOX_WORDS, i, shared::load_u32(base + 4 * i));
            i += 128;
        }
        cluster::sync();
    }
}

/// Two warpgroups exchange registers, and the kernel says that its dependents may start. Input of a block: 256 words.
/// Results: the words plus one.
#[cfg(not(lacks_wgmma))]
#[kernel(max_threads = 256, min_blocks = 1)]
pub unsafe fn probe_registers(input: *const u32, output: *mut u32, _maps: *const u64, _parameter: u32) {
    let thread = thread::thread_idx_x();
    // SAFETY: the buffers are as documented; whole warpgroups take either way.
    unsafe {
        grid::wait();
        if thread < 128 {
            registers::decrease::<40>();
            store(output, 256, thread, load(input, 256, thread) + 1);
        } else {
            registers::increase::<232>();
            store(output, 256, thread, load(input, 256, thread) + 1);
        }
        grid::launch_dependents();
    }
}
