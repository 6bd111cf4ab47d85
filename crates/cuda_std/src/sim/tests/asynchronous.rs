//! Copies, mbarriers and clusters.

use super::*;
use crate::{barrier, cluster, cp_async, fence, grid, mbarrier, tma};

fn words(n: usize) -> Vec<u8> {
    (0..n as u32).flat_map(u32::to_le_bytes).collect()
}

/// Runs with 40 seeds; `x` holds the numbers from 0 on.
fn run(launch: Launch<'_>, n: usize, kernel: impl Fn(*const u32, *mut u32)) -> Result<Vec<Vec<u32>>, Report> {
    (0..40)
        .map(|seed| {
            let mut memory = Memory::new();
            let x = memory.allocate_from("x", &words(n));
            let out = memory.allocate_from("out", &std::vec![0xff; 4 * n]);
            simulate(&mut memory, &launch.seed(seed), || kernel(x as *const u32, out as *mut u32))?;
            let mut bytes = std::vec![0; 4 * n];
            memory.read(out, &mut bytes);
            Ok(bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect())
        })
        .collect()
}

fn copied(outputs: Result<Vec<Vec<u32>>, Report>, n: usize) {
    let expected: Vec<u32> = (0..n as u32).collect();
    for out in outputs.unwrap_or_else(|report| panic!("{report}")) {
        assert_eq!(out, expected);
    }
}

/// A pipeline of `cp.async` groups of 32 words with two stages; `newest` is what its wait leaves under way.
fn pipeline(newest: u32, barrier: bool) -> impl Fn(*const u32, *mut u32) {
    move |x, out| unsafe {
        let stage = |round: u32| shared::base() + round % 2 * 128;
        let issue = |round: u32| {
            if round < 4 {
                let at = 32 * round + tid();
                cp_async::ca_4(stage(round) + 4 * tid(), x.add(at as usize));
            }
            cp_async::commit_group();
        };
        issue(0);
        for round in 0..4 {
            issue(round + 1);
            match newest {
                1 => cp_async::wait_group::<1>(),
                _ => cp_async::wait_group::<2>(),
            }
            if barrier {
                thread::sync_threads();
            }
            let other = (tid() + 1) % 32;
            let value = shared::load_u32(stage(round) + 4 * other);
            global::store(out.add((32 * round + other) as usize), value);
            thread::sync_threads();
        }
    }
}

#[test]
fn groups_of_cp_async() {
    copied(run(launch(1, 32), 128, pipeline(1, true)), 128);
    let report = run(launch(1, 32), 128, pipeline(2, true)).unwrap_err();
    assert_eq!(report.defect, Defect::Race);
    assert!(report.text.contains("by a cp.async of block 0, thread "), "{report}");
    let report = run(launch(1, 32), 128, pipeline(1, false)).unwrap_err();
    assert!(matches!(report.defect, Defect::Race | Defect::Uninitialised), "{report}");
    let report = run(launch(1, 32).arch(Arch::Sm61), 128, pipeline(1, true)).unwrap_err();
    assert_eq!(report.text, "`cp.async` needs sm_80, and this is sm_61");
}

#[test]
fn cp_async_fills_with_zeros_and_reads_no_further() {
    for out in run(launch(1, 1), 8, |x, out| unsafe {
        cp_async::cg_16_fill(shared::base(), x.add(4), 12);
        cp_async::cg_16_fill(shared::base() + 16, x.add(8), 0);
        cp_async::wait_all();
        global::store_x4(out, shared::load_u32x4(shared::base()));
        global::store_x4(out.add(4), shared::load_u32x4(shared::base() + 16));
    })
    .unwrap()
    {
        assert_eq!(out, [4, 5, 6, 0, 0, 0, 0, 0]);
    }
    let report = run(launch(1, 1), 8, |x, _| unsafe { cp_async::cg_16_fill(shared::base(), x.add(8), 4) });
    assert_eq!(report.unwrap_err().defect, Defect::OutOfBounds);
}

#[test]
fn cp_async_arrives_at_an_mbarrier() {
    let kernel = |wait: bool| {
        move |x: *const u32, out: *mut u32| unsafe {
            let full = shared::base() + 1024;
            if tid() == 0 {
                mbarrier::init(full, 32);
            }
            thread::sync_threads();
            cp_async::ca_4(shared::base() + 4 * tid(), x.add(tid() as usize));
            cp_async::mbarrier_arrive_noinc(full);
            if wait {
                while !mbarrier::test_wait_parity(full, 0) {}
            }
            let other = 31 - tid();
            global::store(out.add(other as usize), shared::load_u32(shared::base() + 4 * other));
        }
    };
    copied(run(launch(1, 32).arch(Arch::Sm80), 32, kernel(true)), 32);
    let report = run(launch(1, 32).arch(Arch::Sm80), 32, kernel(false)).unwrap_err();
    assert!(matches!(report.defect, Defect::Race | Defect::Uninitialised), "{report}");
}

/// A producer warp loads rounds of 32 words through `stages` stages, a consumer warp stores them.
struct Pipeline {
    stages: u32,
    rounds: u32,
    /// Bytes announced per round.
    bytes: u32,
    empty_count: u32,
    flips: bool,
    fences: bool,
}

const GOOD: Pipeline =
    Pipeline { stages: 2, rounds: 7, bytes: 128, empty_count: 32, flips: true, fences: true };

impl Pipeline {
    fn kernel(self) -> impl Fn(*const u32, *mut u32) {
        move |x, out| unsafe {
            let base = shared::base();
            let full = |stage: u32| base + 2048 + 8 * stage;
            let empty = |stage: u32| base + 2048 + 8 * (self.stages + stage);
            if tid() == 0 {
                for stage in 0..self.stages {
                    mbarrier::init(full(stage), 1);
                    mbarrier::init(empty(stage), self.empty_count);
                }
                if self.fences {
                    mbarrier::fence_mbarrier_init();
                }
            }
            thread::sync_threads();
            for round in 0..self.rounds {
                let (stage, parity) =
                    (round % self.stages, if self.flips { (round / self.stages) & 1 } else { 0 });
                if tid() == 32 {
                    mbarrier::wait_parity(empty(stage), parity ^ 1);
                    mbarrier::arrive_expect_tx(full(stage), self.bytes);
                    tma::load_bulk(base + 128 * stage, x.add(32 * round as usize), 128, full(stage));
                } else if tid() < 32 {
                    mbarrier::wait_parity(full(stage), parity);
                    let value = shared::load_u32(base + 128 * stage + 4 * tid());
                    global::store(out.add((32 * round + tid()) as usize), value);
                    mbarrier::arrive(empty(stage));
                }
            }
        }
    }
}

#[test]
fn a_pipeline_of_bulk_loads() {
    let launch = launch(1, 64);
    copied(run(launch, 224, GOOD.kernel()), 224);
    copied(run(launch, 224, Pipeline { stages: 3, ..GOOD }.kernel()), 224);
    let report = |pipeline: Pipeline| run(launch, 224, pipeline.kernel()).unwrap_err();
    let text = report(Pipeline { fences: false, ..GOOD });
    assert_eq!(text.defect, Defect::ProxyFence);
    assert!(text.text.contains("missing fence.mbarrier_init"), "{text}");
    // A wait for bytes that never come.
    let waits = report(Pipeline { bytes: 144, ..GOOD });
    assert_eq!(waits.defect, Defect::Deadlock);
    assert!(waits.text.contains("wait for the phase of parity 0 of the mbarrier at byte 2048"), "{waits}");
    // Too few: the phase completes early or never.
    let early = report(Pipeline { bytes: 64, ..GOOD });
    assert!(matches!(early.defect, Defect::Race | Defect::Deadlock | Defect::Mbarrier), "{early}");
    // Refilled while the others still read.
    let refilled = report(Pipeline { empty_count: 31, ..GOOD });
    assert!(matches!(refilled.defect, Defect::Race | Defect::Mbarrier), "{refilled}");
    // The second round takes the first one's completion for its own.
    let reused = report(Pipeline { flips: false, ..GOOD });
    assert!(matches!(reused.defect, Defect::Race | Defect::Deadlock | Defect::Mbarrier), "{reused}");
}

#[test]
fn prefetches_are_checked_like_reads() {
    let report = |first: usize, bytes: u32| {
        run(launch(1, 1), 16, |x, _| unsafe { global::prefetch_l2(x.wrapping_add(first), bytes) })
    };
    for (first, bytes) in [(0, 64), (12, 16), (16, 0)] {
        report(first, bytes).unwrap_or_else(|report| panic!("{report}"));
    }
    for (first, bytes, defect) in [
        (4, 64, Defect::OutOfBounds),
        (16, 16, Defect::OutOfBounds),
        (1, 16, Defect::Misaligned),
        (0, 8, Defect::Misaligned),
    ] {
        assert_eq!(report(first, bytes).unwrap_err().defect, defect, "{first} {bytes}");
    }
}

#[test]
fn mbarriers_used_against_their_rules() {
    let report = |kernel: fn(u32)| run(launch(1, 32), 1, |_, _| kernel(shared::base())).unwrap_err();
    let text = report(|base| unsafe { mbarrier::arrive(base) });
    assert_eq!(text.text, "`mbarrier.arrive` on byte 0 of shared memory, where no mbarrier was initialised");
    let text = report(|base| unsafe {
        if tid() == 0 {
            mbarrier::init(base, 32);
        }
        mbarrier::arrive(base);
    });
    assert!(matches!(text.defect, Defect::Race | Defect::Mbarrier), "{text}");
    let text = report(|base| unsafe {
        if tid() == 0 {
            mbarrier::init(base, 2);
            mbarrier::expect_tx(base, 16);
            mbarrier::arrive(base);
            mbarrier::arrive(base);
            mbarrier::arrive(base);
        }
    });
    assert!(text.text.contains("more than the 2 arrivals that a phase"), "{text}");
    let text = report(|base| unsafe {
        if tid() == 0 {
            mbarrier::init(base, 2);
            shared::store_u32(base + 4, 0);
        }
    });
    assert_eq!(text.text, "write of byte 4 of shared memory, which belongs to an mbarrier");
    let text = report(|base| unsafe {
        if tid() == 0 {
            mbarrier::init(base, 2);
            mbarrier::invalidate(base);
            shared::load_u32(base);
        }
    });
    assert_eq!(text.defect, Defect::Uninitialised);
    let text = report(|base| unsafe { mbarrier::init(base + 4, 1) });
    assert_eq!(text.defect, Defect::Misaligned);
    let text = report(|base| unsafe {
        if tid() == 0 {
            mbarrier::init(base, 0)
        }
    });
    assert_eq!(text.text, "`mbarrier.init` with a count of 0: expected 1 to 1048575");
}

/// Which of the steps of a bulk store a kernel takes.
#[derive(Clone, Copy)]
struct Store {
    fence: bool,
    barrier: bool,
    wait: bool,
    reuse: bool,
}

fn store_kernel(store: Store) -> impl Fn(*const u32, *mut u32) {
    move |x, out| unsafe {
        let base = shared::base();
        for half in 0..2 {
            let at = 32 * half + tid();
            shared::store_u32(base + 4 * tid(), global::load(x.add(at as usize)));
            if store.fence {
                fence::proxy_async_shared();
            }
            if store.barrier {
                thread::sync_threads();
            }
            if tid() == 0 {
                tma::store_bulk(out.add(32 * half as usize), base, 128);
                tma::commit_group();
                if store.wait {
                    tma::wait_group_read::<0>();
                }
            }
            if !store.reuse {
                thread::sync_threads();
            }
        }
    }
}

#[test]
fn bulk_stores() {
    let good = Store { fence: true, barrier: true, wait: true, reuse: false };
    copied(run(launch(1, 32), 64, store_kernel(good)), 64);
    let defect = |store| run(launch(1, 32), 64, store_kernel(store)).unwrap_err();
    let fence = defect(Store { fence: false, ..good });
    assert_eq!(fence.defect, Defect::ProxyFence, "{fence}");
    assert!(fence.text.starts_with("missing fence.proxy.async: asynchronous read of byte "), "{fence}");
    let barrier = defect(Store { barrier: false, ..good });
    assert!(matches!(barrier.defect, Defect::Race | Defect::Uninitialised), "{barrier}");
    let reused = defect(Store { reuse: true, ..good });
    assert_eq!(reused.defect, Defect::Race, "{reused}");
    let early = defect(Store { wait: false, ..good });
    assert!(matches!(early.defect, Defect::Race | Defect::Asynchronous), "{early}");
    let report = run(launch(1, 1), 4, |x, out| unsafe {
        shared::store_u32x4(shared::base(), [0, 1, 2, 3]);
        fence::proxy_async_shared();
        tma::store_bulk(out, shared::base(), 16);
        tma::commit_group();
        let _ = x;
    });
    let report = report.unwrap_err();
    assert_eq!(report.defect, Defect::Asynchronous);
    assert!(report.text.contains("wait_group.read"), "{report}");
}

#[test]
fn bulk_adds_of_several_blocks() {
    for out in run(launch(4, 1), 8, |_, out| unsafe {
        for i in 0..4 {
            shared::store_f32(shared::base() + 4 * i, 1.5);
        }
        fence::proxy_async_shared();
        let sum = out.cast::<f32>().add(4);
        if thread::block_idx_x() < 4 {
            tma::reduce_add_bulk_f32(sum, shared::base(), 16);
            tma::commit_group();
            tma::wait_group::<0>();
        }
    })
    .unwrap()
    {
        // 0xffffffff is NaN.
        assert!(out[4..].iter().all(|&word| f32::from_bits(word).is_nan()));
    }
}

#[test]
fn blocks_end_after_their_loads() {
    let report = run(launch(1, 1), 4, |x, _| unsafe {
        let full = shared::base() + 64;
        mbarrier::init(full, 1);
        mbarrier::fence_mbarrier_init();
        mbarrier::arrive_expect_tx(full, 16);
        tma::load_bulk(shared::base(), x, 16, full);
    });
    let report = report.unwrap_err();
    assert_eq!(report.defect, Defect::Asynchronous);
    assert!(report.text.contains("the block ends while the copy of "), "{report}");
}

/// Each block of a cluster writes its rank into its neighbour's memory.
fn ring(sync: bool, end: bool) -> impl Fn(*const u32, *mut u32) {
    move |_, out| unsafe {
        let (rank, blocks) = (cluster::block_rank(), cluster::num_blocks());
        cluster::sync();
        let right = cluster::map_shared(shared::base(), (rank + 1) % blocks);
        if tid() == 0 {
            cluster::store_u32(right, rank);
        }
        if sync {
            cluster::sync();
        }
        let left = shared::load_u32(shared::base());
        if tid() == 0 {
            global::store(out.add((thread::block_idx_x()) as usize), left);
        }
        if end {
            cluster::sync();
        }
    }
}

#[test]
fn clusters_share_memory() {
    let launch = launch(8, 32).cluster([4, 1, 1]);
    for out in run(launch, 8, ring(true, true)).unwrap_or_else(|report| panic!("{report}")) {
        assert_eq!(out, [3, 0, 1, 2, 3, 0, 1, 2]);
    }
    let report = run(launch, 8, ring(false, true)).unwrap_err();
    assert!(matches!(report.defect, Defect::Race | Defect::Uninitialised), "{report}");
    let report = run(launch, 8, |_, _| unsafe { _ = cluster::map_shared(shared::base(), 4) }).unwrap_err();
    assert_eq!(report.text, "`mapa.shared::cluster` to block 4 of a cluster of 4");
}

#[test]
fn initialised_mbarriers_are_known_behind_a_relaxed_barrier() {
    let kernel = |fence: bool, late: bool| {
        move |_: *const u32, _: *mut u32| unsafe {
            let bar = shared::base() + 64;
            if tid() == 0 {
                mbarrier::init(bar, 2);
                if fence && !late {
                    mbarrier::fence_mbarrier_init();
                }
            }
            cluster::arrive_relaxed();
            if tid() == 0 && late {
                mbarrier::fence_mbarrier_init();
            }
            cluster::wait();
            if tid() == 0 {
                for other in 0..2 {
                    mbarrier::arrive_remote(cluster::map_shared(bar, other));
                }
                mbarrier::wait_parity(bar, 0);
            }
            cluster::arrive_relaxed();
            cluster::wait();
        }
    };
    let launch = launch(2, 32).cluster([2, 1, 1]);
    run(launch, 1, kernel(true, false)).unwrap_or_else(|report| panic!("{report}"));
    for (fence, late) in [(false, false), (true, true)] {
        let report = run(launch, 1, kernel(fence, late)).unwrap_err();
        assert_eq!(report.defect, Defect::Race, "{report}");
    }
}

#[test]
fn remote_arrivals() {
    let kernel = |_: *const u32, out: *mut u32| unsafe {
        let bar = shared::base() + 64;
        let rank = cluster::block_rank();
        if tid() == 0 {
            mbarrier::init(bar, 2);
            mbarrier::fence_mbarrier_init();
        }
        cluster::sync();
        if tid() == 0 {
            for other in 0..2 {
                cluster::store_u32(cluster::map_shared(shared::base() + 4 * rank, other), rank + 7);
                mbarrier::arrive_remote_release(cluster::map_shared(bar, other));
            }
            mbarrier::wait_parity_cluster(bar, 0);
            let both = [0, 1].map(|i| shared::load_u32(shared::base() + 4 * i));
            global::store(out.add(rank as usize), both[0] * 100 + both[1]);
        }
        cluster::sync();
    };
    for out in run(launch(2, 32).cluster([2, 1, 1]), 2, kernel).unwrap_or_else(|report| panic!("{report}")) {
        assert_eq!(out, [708, 708]);
    }
}

#[test]
fn part_of_a_block_at_a_named_barrier() {
    let kernel = |_: *const u32, out: *mut u32| unsafe {
        if tid() < 64 {
            shared::store_u32(shared::base() + 4 * tid(), tid());
            barrier::sync(5, 64);
            let value = shared::load_u32(shared::base() + 4 * (63 - tid()));
            global::store(out.add(63 - tid() as usize), value);
        }
    };
    copied(run(launch(1, 96), 64, kernel), 64);
    let report = run(launch(1, 96), 64, |_, _| unsafe { barrier::sync(16, 96) }).unwrap_err();
    assert_eq!(report.defect, Defect::Unsupported);
    let report = run(launch(1, 96), 64, |_, _| unsafe { barrier::sync(1, 80) }).unwrap_err();
    assert_eq!(report.defect, Defect::Unsupported);
}

/// What is touched before a kernel has waited may still be written by the one ahead.
#[test]
fn global_memory_before_the_wait() {
    let outputs = run(launch(1, 32), 32, |x, out| unsafe {
        grid::wait();
        let at = tid() as usize;
        global::store(out.add(at), global::load(x.add(at)));
    });
    copied(outputs, 32);
    let report = run(launch(1, 32), 32, |x, out| unsafe {
        let at = tid() as usize;
        let value = global::load(x.add(at));
        grid::wait();
        global::store(out.add(at), value);
    });
    assert_eq!(report.expect_err("an early read").defect, Defect::Race);
}

/// What no kernel writes may be read before a kernel has waited, nothing else may, and a kernel that writes it is
/// reported.
#[test]
fn constants_are_read_ahead() {
    let word = |tid: u32| tid as usize;
    let attempt = |is_constant: bool, kernel: &dyn Fn(*mut u32, *mut u32)| {
        let mut memory = Memory::new();
        let x = memory.allocate_from("x", &[7; 4 * 32]);
        let out = memory.allocate("out", 4 * 32);
        memory.set_constant(x + 8, is_constant);
        simulate(&mut memory, &launch(1, 32), || kernel(x as *mut u32, out as *mut u32))
    };
    let ahead = |x: *mut u32, out: *mut u32| unsafe {
        let value = grid::begin_ahead(|| global::load(x.add(word(tid()))), true);
        global::store(out.add(word(tid())), value);
    };
    attempt(true, &ahead).expect("an early read of a constant");
    let report = attempt(false, &ahead).expect_err("an early read");
    assert_eq!(report.defect, Defect::Race);
    assert!(
        report.to_string().contains("`x`, which is not constant, before griddepcontrol.wait"),
        "{report}"
    );

    let waits = |x: *mut u32, out: *mut u32| unsafe {
        let value = global::load(x.add(word(tid())));
        grid::wait();
        global::store(out.add(word(tid())), value);
    };
    attempt(true, &waits).expect("an early read of a constant");

    let writes = |x: *mut u32, _: *mut u32| unsafe { global::store(x.add(word(tid())), 1) };
    attempt(false, &writes).expect("a write");
    let report = attempt(true, &writes).expect_err("a write to a constant");
    assert_eq!(report.defect, Defect::Race);
    assert!(report.to_string().contains("`x`, which is constant"), "{report}");

    let writes_early = |_: *mut u32, out: *mut u32| unsafe {
        grid::begin_ahead(|| global::store(out.add(word(tid())), 1), true);
    };
    assert_eq!(attempt(true, &writes_early).expect_err("an early write").defect, Defect::Race);
}
