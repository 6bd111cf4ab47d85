//! What the simulator runs right, and what it reports.

#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "kernels of the tests break their promises; the simulator checks"
)]

mod asynchronous;
mod tensors;

use super::*;
use crate::atomic::{self, Order};
use crate::{global, shared, thread, warp};
use std::string::ToString;
use std::vec::Vec;

/// Runs with 40 seeds, which must all pass, and returns the contents of `out` after each.
fn passes(launch: Launch<'_>, out_words: usize, kernel: impl Fn(*mut u32)) -> Vec<Vec<u32>> {
    (0..40)
        .map(|seed| {
            let mut memory = Memory::new();
            let out = memory.allocate("out", 4 * out_words);
            if let Err(report) = simulate(&mut memory, &launch.seed(seed), || kernel(out as *mut u32)) {
                panic!("{report}");
            }
            let mut bytes = std::vec![0; 4 * out_words];
            memory.read(out, &mut bytes);
            bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
        })
        .collect()
}

/// The first report within `seeds` seeds.
fn fails(launch: Launch<'_>, seeds: u64, out_words: usize, kernel: impl Fn(*mut u32)) -> Report {
    for seed in 0..seeds {
        let mut memory = Memory::new();
        let out = memory.allocate("out", 4 * out_words);
        if let Err(report) = simulate(&mut memory, &launch.seed(seed), || kernel(out as *mut u32)) {
            return report;
        }
    }
    panic!("no report in {seeds} seeds");
}

fn launch(blocks: u32, threads: u32) -> Launch<'static> {
    Launch::new("test", [blocks, 1, 1], [threads, 1, 1]).shared_bytes(4096)
}

fn tid() -> u32 {
    thread::thread_idx_x()
}

#[test]
fn every_thread_of_every_block_runs_once() {
    let launch = Launch::new("test", [3, 2, 2], [5, 3, 2]);
    for out in passes(launch, 12 * 30, |out| {
        let block = (thread::block_idx_z() * 2 + thread::block_idx_y()) * 3 + thread::block_idx_x();
        let index = (thread::thread_idx_z() * 3 + thread::thread_idx_y()) * 5 + thread::thread_idx_x();
        let dims = thread::grid_dim_x() * 100 + thread::block_dim_y() * 10 + thread::block_dim_z();
        unsafe { global::store(out.add((block * 30 + index) as usize), dims + block) };
    }) {
        assert!(out.iter().enumerate().all(|(i, &value)| value == 332 + i as u32 / 30), "{out:?}");
    }
}

#[test]
fn barriers_order_shared_memory() {
    for out in passes(launch(2, 96), 192, |out| unsafe {
        let base = shared::base();
        for round in 0..10 {
            shared::store_u32(base + 4 * tid(), tid() + round);
            thread::sync_threads();
            let neighbour = shared::load_u32(base + 4 * ((tid() + 1) % 96));
            thread::sync_threads();
            if round == 9 {
                global::store(out.add((thread::block_idx_x() * 96 + tid()) as usize), neighbour);
            }
        }
    }) {
        assert!(out.iter().enumerate().all(|(i, &value)| value == (i as u32 % 96 + 1) % 96 + 9), "{out:?}");
    }
}

#[test]
fn shuffles_and_votes() {
    for out in passes(launch(1, 64), 64 * 8, |out| unsafe {
        let lane = tid() & 31;
        let half = if lane < 16 { 0xffff } else { 0xffff_0000 };
        let values = [
            warp::shuffle_xor(warp::FULL_MASK, tid(), 5),
            warp::shuffle_up(warp::FULL_MASK, tid(), 3),
            warp::shuffle_down(warp::FULL_MASK, tid(), 3),
            warp::shuffle_idx(half, tid(), (lane & 16) | ((lane + 1) & 15)),
            warp::ballot(half, lane.is_multiple_of(3)),
            warp::any(warp::FULL_MASK, tid() == 40).into(),
            warp::all(half, lane < 16).into(),
            warp::sum_f32::<32>(tid() as f32) as u32,
        ];
        for (i, value) in values.into_iter().enumerate() {
            global::store(out.add(tid() as usize * 8 + i), value);
        }
    }) {
        for (thread, values) in out.chunks_exact(8).enumerate() {
            let (warp, lane) = (thread as u32 & !31, thread as u32 & 31);
            let thirds = 0x4924_9249u32 & if lane < 16 { 0xffff } else { 0xffff_0000 };
            let expected = [
                warp + (lane ^ 5),
                warp + lane.checked_sub(3).unwrap_or(lane),
                warp + if lane + 3 < 32 { lane + 3 } else { lane },
                warp + ((lane & 16) | ((lane + 1) & 15)),
                thirds,
                (warp == 32).into(),
                (lane < 16).into(),
                if warp == 0 { 496 } else { 1520 },
            ];
            assert_eq!(values, expected, "thread {thread}");
        }
    }
}

/// Blocks hand a total over: the last to arrive sums what the others have written.
#[test]
fn the_last_block_sees_the_others() {
    let mut seen = Vec::new();
    for seed in 0..40 {
        let mut memory = Memory::new();
        let out = memory.allocate("out", 24);
        let count = memory.allocate_from("count", &[0; 4]);
        simulate(&mut memory, &launch(5, 32).seed(seed), || unsafe {
            let (out, count) = (out as *mut u32, count as *mut u32);
            let block = thread::block_idx_x();
            if tid() == 0 {
                global::store(out.add(block as usize), block + 10);
                if atomic::add_u32(count, 1, Order::AcqRel) == 4 {
                    let sum = (0..5).map(|i| global::load(out.add(i))).sum::<u32>();
                    global::store(out.add(5), sum);
                }
            }
        })
        .unwrap();
        let mut sum = [0; 4];
        memory.read(out + 20, &mut sum);
        seen.push(u32::from_le_bytes(sum));
    }
    assert_eq!(seen, [60; 40]);
}

#[test]
fn relaxed_arrivals_do_not_hand_anything_over() {
    for (fences, expected) in [(false, Some(Defect::Race)), (true, None)] {
        let mut found = None;
        for seed in 0..40 {
            let mut memory = Memory::new();
            let out = memory.allocate("out", 24);
            let count = memory.allocate_from("count", &[0; 4]);
            let result = simulate(&mut memory, &launch(5, 32).seed(seed), || unsafe {
                let (out, count) = (out as *mut u32, count as *mut u32);
                let block = thread::block_idx_x();
                if tid() == 0 {
                    global::store(out.add(block as usize), block + 10);
                    if fences {
                        atomic::fence_device();
                    }
                    if atomic::add_u32(count, 1, Order::Relaxed) == 4 {
                        if fences {
                            atomic::fence_device();
                        }
                        let sum = (0..5).map(|i| global::load(out.add(i))).sum::<u32>();
                        global::store(out.add(5), sum);
                    }
                }
            });
            found = found.or(result.err().map(|report| report.defect));
        }
        assert_eq!(found, expected);
    }
}

#[test]
fn a_missing_barrier_is_a_race() {
    let report = fails(launch(1, 64), 1, 64, |out| unsafe {
        shared::store_u32(shared::base() + 4 * tid(), tid());
        let value = shared::load_u32(shared::base() + 4 * (63 - tid()));
        global::store(out.add(tid() as usize), value);
    });
    assert!(matches!(report.defect, Defect::Race | Defect::Uninitialised), "{report}");
    let report = fails(launch(1, 64), 1, 64, |_| unsafe {
        shared::store_u32(shared::base() + 4 * tid(), tid());
        thread::sync_threads();
        shared::load_u32(shared::base() + 4 * (63 - tid()));
        shared::store_u32(shared::base() + 4 * tid(), tid());
    });
    assert_eq!(report.defect, Defect::Race);
    let text = report.to_string();
    assert!(text.contains("data race") && text.contains("sim/tests/mod.rs:"), "{text}");
    assert!(text.contains("of shared memory with no barrier after the") && text.contains("thread"), "{text}");
}

/// `bar.warp.sync` orders a warp, not a block; a shuffle orders nothing.
#[test]
fn barriers_of_a_warp() {
    let kernel = |distance: u32, sync: bool| {
        move |out: *mut u32| unsafe {
            shared::store_u32(shared::base() + 4 * tid(), tid());
            if sync {
                warp::sync_warp(warp::FULL_MASK);
            } else {
                warp::shuffle_xor(warp::FULL_MASK, 0, 1);
            }
            let value = shared::load_u32(shared::base() + 4 * (tid() ^ distance));
            global::store(out.add(tid() as usize), value);
        }
    };
    passes(launch(1, 64), 64, kernel(1, true));
    assert_eq!(fails(launch(1, 64), 1, 64, kernel(1, false)).defect, Defect::Race);
    let report = fails(launch(1, 64), 1, 64, kernel(32, true));
    assert!(matches!(report.defect, Defect::Race | Defect::Uninitialised));
}

#[test]
fn blocks_that_write_the_same_place() {
    let report = fails(launch(2, 32), 2, 32, |out| unsafe { global::store(out.add(tid() as usize), 1) });
    assert_eq!(report.defect, Defect::Race);
    assert!(report.text.contains("`out`"), "{report}");
}

#[test]
fn accesses_out_of_bounds() {
    let report = fails(launch(1, 33), 1, 32, |out| unsafe { global::store(out.add(tid() as usize), 1) });
    assert_eq!(report.text, "write of 4 bytes out of bounds: at byte 128 of `out`, which has 128 bytes");
    assert_eq!(report.thread, Some(([0; 3], [32, 0, 0])));
    let report = fails(launch(1, 1), 1, 32, |out| unsafe { _ = global::load(out.sub(1)) });
    assert_eq!(report.text, "read of 4 bytes out of bounds: at byte -4 of `out`, which has 128 bytes");
    let report = fails(launch(1, 1), 1, 32, |_| unsafe { _ = global::load(core::ptr::null::<u32>()) });
    assert_eq!(report.text, "read of 4 bytes out of bounds: at the null pointer");
    let report =
        fails(launch(1, 1), 1, 32, |_| unsafe { shared::store_u32x4(shared::base() + 4096, [0; 4]) });
    assert_eq!(
        report.text,
        "write of 16 bytes out of bounds: at byte 4096 of shared memory, of which there are 4096 bytes"
    );
    let report = fails(launch(1, 1), 1, 32, |_| unsafe { shared::store_u32(0, 0) });
    assert!(report.text.contains("byte -1024 of shared memory"), "{report}");
}

#[test]
fn guard_bands() {
    let mut memory = Memory::new();
    let out = memory.allocate_from("out", &[0; 64]);
    memory.forbid(out + 32, 8);
    let run = |memory: &mut Memory, index: usize| {
        simulate(memory, &launch(1, 1), || unsafe { _ = global::load((out as *const u32).add(index)) })
    };
    assert!(run(&mut memory, 7).is_ok() && run(&mut memory, 10).is_ok());
    let report = run(&mut memory, 9).unwrap_err();
    assert_eq!(report.text, "read out of bounds: byte 36 of `out` is a guard band or a gap between rows");
}

#[test]
fn memory_that_nothing_wrote() {
    let report = fails(launch(1, 1), 1, 32, |out| unsafe { _ = global::load(out.add(3)) });
    assert_eq!(report.text, "read of byte 12 of `out`, which nothing has written");
    let report = fails(launch(1, 1), 1, 32, |_| unsafe {
        shared::store_u16(shared::base(), 1);
        shared::load_u32(shared::base());
    });
    assert_eq!(report.text, "read of byte 2 of shared memory, which nothing has written");
    // Shared memory does not outlive its block.
    let report = fails(launch(2, 1), 1, 32, |_| unsafe {
        if thread::block_idx_x() == 0 {
            shared::store_u32(shared::base(), 1);
        } else {
            shared::load_u32(shared::base());
        }
    });
    assert_eq!(report.defect, Defect::Uninitialised);
}

#[test]
fn misaligned_vectors() {
    let report = fails(launch(1, 1), 1, 32, |out| unsafe { global::store_x4(out.add(1), [0; 4]) });
    assert_eq!(report.text, "write at byte 4 of `out`, which is not aligned to 16 bytes");
    let report = fails(launch(1, 1), 1, 32, |_| unsafe { shared::store_u32x4(shared::base() + 8, [0; 4]) });
    assert_eq!(report.defect, Defect::Misaligned);
}

#[test]
#[expect(clippy::if_same_then_else, reason = "the same barrier at two lines")]
fn threads_that_do_not_come_together() {
    let report = fails(launch(1, 64), 4, 1, |_| unsafe {
        if tid() < 40 {
            thread::sync_threads();
        } else {
            thread::sync_threads();
        }
    });
    assert_eq!(report.defect, Defect::Divergence);
    assert!(report.text.contains("`bar.sync` waits for lanes "), "{report}");
    let report = fails(launch(1, 64), 4, 1, |_| unsafe {
        if tid() < 40 {
            thread::sync_threads();
        }
    });
    assert_eq!(report.defect, Defect::Divergence, "{report}");
    let report = fails(launch(1, 32), 4, 1, |_| unsafe {
        if tid() != 5 {
            warp::shuffle_xor(warp::FULL_MASK, 0, 1);
        }
    });
    assert_eq!(report.defect, Defect::Divergence);
    assert!(report.text.contains("lane"), "{report}");
    let report = fails(launch(1, 32), 4, 1, |_| unsafe {
        if tid() < 16 {
            warp::shuffle_xor(warp::FULL_MASK, 0, 1);
        } else {
            thread::sync_threads();
        }
    });
    assert_eq!(report.defect, Defect::Divergence);
    let report = fails(launch(1, 32), 1, 1, |_| unsafe { _ = warp::shuffle_xor(0xffff, 0, 1) });
    assert_eq!(report.defect, Defect::Divergence);
    let report = fails(launch(1, 8), 1, 1, |_| unsafe { _ = warp::shuffle_xor(warp::FULL_MASK, 0, 1) });
    assert!(report.text.contains("lanes 8 to 31, which the warp does not have"), "{report}");
    let report = fails(launch(1, 32), 1, 1, |_| unsafe {
        if tid() < 16 {
            warp::shuffle_xor(0xffff, 0, 16);
        }
    });
    assert!(report.text.contains("lane 0 reads lane 16, which is not in the mask 0xffff"), "{report}");
}

#[test]
fn waits_that_cannot_end() {
    // One warp comes to the barrier twice, the other once, and then waits for it elsewhere.
    let report = fails(launch(1, 64), 4, 1, |_| {
        if tid() < 32 {
            crate::sim::barrier("bar.sync", 1, Some(64), Arrival::Wait);
        } else {
            crate::sim::barrier("bar.sync", 2, Some(64), Arrival::Wait);
        }
    });
    assert_eq!(report.defect, Defect::Deadlock);
    assert!(
        report.text.contains("32 threads, the first block 0, thread 0, wait for barrier 1 of 64 threads"),
        "{report}"
    );
    let mut memory = Memory::new();
    let flag = memory.allocate_from("flag", &[0; 4]);
    let report = simulate(&mut memory, &launch(3, 32), || unsafe {
        while atomic::or_u32(flag as *mut u32, 0, Order::Acquire) == 0 {}
    });
    assert_eq!(report.unwrap_err().defect, Defect::Deadlock);
}

/// A block waits for a flag of another that may not even have started.
#[test]
fn a_wait_for_a_later_block_ends() {
    for seed in 0..20 {
        let mut memory = Memory::new();
        let flag = memory.allocate_from("flag", &[0; 4]);
        simulate(&mut memory, &launch(6, 32).seed(seed), || unsafe {
            if thread::block_idx_x() == 3 {
                atomic::exchange_u32(flag as *mut u32, 1, Order::Release);
            } else {
                while atomic::or_u32(flag as *mut u32, 0, Order::Acquire) == 0 {}
            }
        })
        .unwrap();
    }
}

/// A flag hands data over if both sides order it, and not otherwise.
#[test]
fn flags_between_blocks() {
    let run = |release: Order, acquire: Order, seed: u64| {
        let mut memory = Memory::new();
        let flag = memory.allocate_from("flag", &[0; 4]);
        let data = memory.allocate_from("data", &[0; 4]);
        simulate(&mut memory, &launch(2, 1).seed(seed), || unsafe {
            let (flag, data) = (flag as *mut u32, data as *mut u32);
            if thread::block_idx_x() == 0 {
                global::store(data, 42);
                atomic::store_u32(flag, 1, release);
            } else {
                while atomic::load_u32(flag, acquire) == 0 {}
                if global::load(data) != 42 {
                    crate::debug::trap();
                }
            }
        })
    };
    for seed in 0..20 {
        run(Order::Release, Order::Acquire, seed).unwrap_or_else(|report| panic!("{report}"));
        for (release, acquire) in [(Order::Relaxed, Order::Acquire), (Order::Release, Order::Relaxed)] {
            assert_eq!(run(release, acquire, seed).unwrap_err().defect, Defect::Race);
        }
    }
}

/// Threads claim slots by compare and swap, and each gets one of its own.
#[test]
fn compare_and_swap() {
    for seed in 0..20 {
        let mut memory = Memory::new();
        let next = memory.allocate_from("next", &[0; 4]);
        let out = memory.allocate("out", 256);
        simulate(&mut memory, &launch(2, 32).seed(seed), || unsafe {
            let (next, out) = (next as *mut u32, out as *mut u32);
            let mut slot = atomic::load_u32(next, Order::Relaxed);
            loop {
                let found = atomic::compare_exchange_u32(next, slot, slot + 1, Order::Relaxed);
                if found == slot {
                    break;
                }
                slot = found;
            }
            global::store(out.add(slot as usize), slot);
        })
        .unwrap_or_else(|report| panic!("{report}"));
        let mut bytes = [0; 256];
        memory.read(out, &mut bytes);
        let (words, _) = bytes.as_chunks();
        assert!(words.iter().enumerate().all(|(i, &word)| u32::from_le_bytes(word) == i as u32));
    }
}

#[test]
fn named_barriers_between_warps() {
    for out in passes(launch(1, 96), 96, |out| unsafe {
        let base = shared::base();
        if tid() < 32 {
            shared::store_u32(base + 4 * tid(), tid());
            barrier("bar.arrive", 3, Some(96), Arrival::Count);
        } else {
            barrier("bar.sync", 3, Some(96), Arrival::Wait);
            let value = shared::load_u32(base + 4 * (tid() % 32));
            global::store(out.add(tid() as usize), value);
        }
    }) {
        assert!((32..96).all(|i| out[i] == i as u32 % 32));
    }
    // Without the arrival's order the reader races with a write after it.
    let report = fails(launch(1, 64), 4, 64, |_| unsafe {
        let base = shared::base();
        if tid() < 32 {
            barrier("bar.arrive", 3, Some(64), Arrival::Count);
            shared::store_u32(base + 4 * tid(), tid());
        } else {
            barrier("bar.sync", 3, Some(64), Arrival::Wait);
            shared::load_u32(base + 4 * (tid() % 32));
        }
    });
    assert!(matches!(report.defect, Defect::Race | Defect::Uninitialised), "{report}");
}

#[test]
fn panics_and_limits() {
    let report = fails(launch(1, 32), 1, 1, |_| {
        let values = [1, 2, 3];
        core::hint::black_box(values[core::hint::black_box(tid() as usize)]);
    });
    assert_eq!(report.defect, Defect::Panic);
    assert!(report.text.contains("index out of bounds"), "{report}");
    let report = fails(launch(1, 32), 1, 1, |_| crate::debug::trap());
    assert_eq!((report.defect, &*report.text), (Defect::Panic, "trap"));
    for (launch, text) in [
        (launch(1, 1025), "a block of [1025, 1, 1] threads: expected 1 to 1024, at most 64 in z"),
        (launch(1, 0), "a block of [0, 1, 1] threads: expected 1 to 1024, at most 64 in z"),
        (
            launch(1, 1).arch(Arch::Sm61).shared_bytes(49153),
            "49153 bytes of shared memory per block: sm_61 has 49152",
        ),
        (
            launch(1, 1).arch(Arch::Sm80).cluster([1, 1, 1]).shared_bytes(166913),
            "166913 bytes of shared memory per block: sm_80 has 166912",
        ),
        (
            launch(3, 1).cluster([2, 1, 1]),
            "clusters of [2, 1, 1] blocks in a grid of [3, 1, 1]: expected up to 8, dividing it",
        ),
        (launch(4, 1).arch(Arch::Sm80).cluster([2, 1, 1]), "clusters need sm_90a, and this is sm_80"),
    ] {
        assert_eq!(fails(launch, 1, 1, |_| {}).text, text);
    }
}

#[test]
fn a_seed_gives_the_same_run_and_others_differ() {
    let order = |seed: u64| {
        let mut memory = Memory::new();
        let out = memory.allocate_from("out", &[0; 4 * 257]);
        simulate(&mut memory, &launch(4, 64).seed(seed), || unsafe {
            let out = out as *mut u32;
            let place = atomic::add_u32(out, 1, Order::Relaxed);
            global::store(out.add(1 + place as usize), thread::block_idx_x() * 64 + tid());
        })
        .unwrap();
        let mut bytes = std::vec![0; 4 * 257];
        memory.read(out, &mut bytes);
        bytes
    };
    let runs: Vec<_> = (0..10).map(order).collect();
    assert_eq!(runs, (0..10).map(order).collect::<Vec<_>>());
    assert!(runs.windows(2).all(|pair| pair[0] != pair[1]));
}

#[test]
fn a_thousand_barriers_of_256_threads() {
    let start = std::time::Instant::now();
    let mut memory = Memory::new();
    let statistics = simulate(&mut memory, &launch(1, 256), || unsafe {
        for _ in 0..1000 {
            thread::sync_threads();
        }
    })
    .unwrap();
    assert_eq!((statistics.threads, statistics.switches), (256, 256_000 + 256));
    let seconds = start.elapsed().as_secs_f64();
    std::println!("{seconds:.3} s");
    // In well under a second, also where other tests run beside it.
    assert!(seconds < 1.0, "{seconds} s");
}
