//! `cp.async`, mbarriers as sm_80 has them, and named barriers.

use cuda_std::{barrier, cp_async, kernel, mbarrier, shared, thread};

use crate::{load, store};

/// How [`probe_cp_async`] waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum Wait {
    Group,
    All,
    Mbarrier,
}

impl Wait {
    /// Every way.
    pub const ALL: [Wait; 3] = [Wait::Group, Wait::All, Wait::Mbarrier];
}

/// 64 threads copy a piece each, of 4, 8, 16, and 16 bytes past L1, whole or in part. Input of a block: for each thread
/// the piece that it reads and how many of its bytes (17: the form without fill), then 64 pieces of four words.
/// Results: 64 pieces of four words; what was not copied is 0xdeadbeef. Parameter: 0 to 3 for the sizes, plus 4 times
/// the [`Wait`]. Shared memory: 1040 bytes.
#[kernel(max_threads = 64)]
pub unsafe fn probe_cp_async(input: *const u32, output: *mut u32, _maps: *const u64, parameter: u32) {
    let thread = thread::thread_idx_x();
    let base = shared::base();
    let (mine, bar) = (base + 16 * thread, base + 1024);
    // SAFETY: the buffers are as documented; every thread has a piece of its own.
    unsafe {
        shared::store_u32x4(mine, [0xdead_beef; 4]);
        if thread == 0 {
            mbarrier::init(bar, 64);
        }
        thread::sync_threads();
        let (from, bytes) = (load(input, 384, 2 * thread), load(input, 384, 2 * thread + 1));
        let source = input.add((thread::block_idx_x() * 384 + 128 + 4 * from) as usize);
        match (parameter & 3, bytes) {
            (0, 17) => cp_async::ca_4(mine, source),
            (1, 17) => cp_async::ca_8(mine, source),
            (2, 17) => cp_async::ca_16(mine, source),
            (3, 17) => cp_async::cg_16(mine, source),
            (0, _) => cp_async::ca_4_fill(mine, source, bytes),
            (1, _) => cp_async::ca_8_fill(mine, source, bytes),
            (2, _) => cp_async::ca_16_fill(mine, source, bytes),
            (_, _) => cp_async::cg_16_fill(mine, source, bytes),
        }
        match parameter / 4 {
            0 => {
                cp_async::commit_group();
                cp_async::wait_group::<0>();
            }
            1 => cp_async::wait_all(),
            _ => {
                cp_async::mbarrier_arrive_noinc(bar);
                while !mbarrier::test_wait_parity(bar, 0) {}
            }
        }
        thread::sync_threads();
        let piece = shared::load_u32x4(base + 16 * (thread ^ 33));
        let mut i = 0;
        while i < 4 {
            store(output, 256, 4 * (thread ^ 33) + i, piece[i as usize]);
            i += 1;
        }
    }
}

/// A warp hands words to another through a pipeline of two stages. Input of a block: 16 times 32 words. Results: the
/// running sums of each lane. Blocks of 64 threads; shared memory: 288 bytes.
#[kernel(max_threads = 64)]
pub unsafe fn probe_pipeline(input: *const u32, output: *mut u32, _maps: *const u64, _parameter: u32) {
    const STAGES: u32 = 2;
    const ROUNDS: u32 = 16;
    let (lane, base) = (thread::lane(), shared::base());
    let full = |round: u32| base + 256 + 8 * (round % STAGES);
    let empty = |round: u32| base + 272 + 8 * (round % STAGES);
    let slot = |round: u32| base + 128 * (round % STAGES) + 4 * lane;
    // SAFETY: the buffers are as documented; full and empty hand the stages from one warp to the other.
    unsafe {
        if thread::thread_idx_x() == 0 {
            let mut stage = 0;
            while stage < STAGES {
                mbarrier::init(full(stage), 32);
                mbarrier::init(empty(stage), 32);
                stage += 1;
            }
        }
        thread::sync_threads();
        let mut round = 0;
        if thread::warp_idx() == 0 {
            while round < ROUNDS {
                while !mbarrier::test_wait_parity(empty(round), ((round / STAGES) & 1) ^ 1) {}
                shared::store_u32(slot(round), load(input, 512, 32 * round + lane));
                mbarrier::arrive(full(round));
                round += 1;
            }
        } else {
            let mut sum = 0u32;
            while round < ROUNDS {
                while !mbarrier::test_wait_parity(full(round), (round / STAGES) & 1) {}
                sum = sum.wrapping_add(shared::load_u32(slot(round)));
                mbarrier::arrive(empty(round));
                store(output, 512, 32 * round + lane, sum);
                round += 1;
            }
        }
        thread::sync_threads();
        if thread::thread_idx_x() < 2 * STAGES {
            mbarrier::invalidate(base + 256 + 8 * thread::thread_idx_x());
        }
    }
}

/// Two warps write and two read, by turns, with named barriers. Input of a block: 8 times 64 words. Results: 8 times 64
/// words: those of the thread opposite. Blocks of 128 threads; shared memory: 256 bytes.
#[kernel(max_threads = 128)]
pub unsafe fn probe_named_barriers(input: *const u32, output: *mut u32, _maps: *const u64, _parameter: u32) {
    const FULL: u32 = 1;
    const EMPTY: u32 = 2;
    let (thread, base) = (thread::thread_idx_x() & 63, shared::base());
    let mut round = 0;
    // SAFETY: the buffers are as documented; FULL and EMPTY hand the words over.
    unsafe {
        if thread::thread_idx_x() < 64 {
            while round < 8 {
                if round > 0 {
                    barrier::sync(EMPTY, 128);
                }
                shared::store_u32(base + 4 * thread, load(input, 512, 64 * round + thread));
                barrier::arrive(FULL, 128);
                round += 1;
            }
        } else {
            while round < 8 {
                barrier::sync(FULL, 128);
                store(output, 512, 64 * round + thread, shared::load_u32(base + 4 * (thread ^ 63)));
                if round < 7 {
                    barrier::arrive(EMPTY, 128);
                }
                round += 1;
            }
        }
    }
}
