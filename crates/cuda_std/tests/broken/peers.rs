//! Kernels of several cards that access each other's memory.

use crate::harness::tid;
use cuda_std::atomic::{self, Order};
use cuda_std::sim::{Defect, Launch, Memory, Report, simulate_together};
use cuda_std::{global, thread};

/// How the cards tell each other.
#[derive(Clone, Copy, PartialEq)]
enum Tells {
    /// As it should be.
    System,
    /// The release is for threads of the own card.
    ReleasesToDevice,
    /// The acquire is of threads of the own card.
    AcquiresOfDevice,
    /// The word is seen, and orders nothing.
    Relaxed,
}

/// Each card writes its word, tells the other, waits for it, and reads the other's word.
unsafe fn exchange(tells: Tells, own: [*mut u32; 2], other: [*mut u32; 2], out: *mut u32) {
    let ([data, flag], [their_data, their_flag]) = (own, other);
    // SAFETY: the simulator checks all accesses.
    unsafe {
        global::store(data.add(tid() as usize), 7);
        thread::sync_threads();
        if tid() == 0 {
            match tells {
                Tells::ReleasesToDevice => atomic::store_u32(their_flag, 1, Order::Release),
                Tells::Relaxed => atomic::store_u32(their_flag, 1, Order::Relaxed),
                _ => atomic::store_release_system_u32(their_flag, 1),
            }
            let seen = || match tells {
                Tells::AcquiresOfDevice => atomic::load_u32(flag, Order::Acquire),
                _ => atomic::load_acquire_system_u32(flag),
            };
            while seen() == 0 {}
        }
        thread::sync_threads();
        global::store(out.add(tid() as usize), global::load(their_data.add(tid() as usize)));
    }
}

/// Runs it on two cards, of which some may access the other's memory.
fn run(tells: Tells, enabled: [bool; 2], seed: u64) -> Result<(), Report> {
    let mut memories = [Memory::new(), Memory::new()];
    let ids = [memories[0].id(), memories[1].id()];
    let buffers = [0, 1].map(|card| {
        let memory = &mut memories[card];
        if enabled[card] {
            memory.enable_peer(ids[1 - card]);
        }
        let data = memory.allocate("data", 256);
        let flag = memory.allocate_from("flag", &[0; 4]);
        [data, flag, memory.allocate("out", 256)].map(|address| address as *mut u32)
    });
    let kernel = |card: usize| {
        let ([data, flag, out], [their_data, their_flag, _]) = (buffers[card], buffers[1 - card]);
        // SAFETY: as in the kernel.
        move || unsafe { exchange(tells, [data, flag], [their_data, their_flag], out) }
    };
    let launch = Launch::new("exchange", [1, 1, 1], [64, 1, 1]).seed(seed);
    let [first, second] = &mut memories;
    simulate_together(&mut [first, second], &launch, &[&kernel(0), &kernel(1)])?;
    for (card, memory) in memories.iter().enumerate() {
        let mut bytes = [0; 256];
        memory.read(buffers[card][2] as u64, &mut bytes);
        assert!(bytes.chunks(4).all(|word| word == [7, 0, 0, 0]), "card {card}");
    }
    Ok(())
}

#[test]
fn words_at_system_scope_order_cards() {
    for seed in 0..50 {
        run(Tells::System, [true; 2], seed).unwrap_or_else(|report| panic!("{report}"));
    }
}

#[test]
fn others_do_not() {
    for tells in [Tells::ReleasesToDevice, Tells::AcquiresOfDevice, Tells::Relaxed] {
        for seed in 0..4 {
            let report = run(tells, [true; 2], seed).expect_err("a race");
            assert_eq!(report.defect, Defect::Race, "{report}");
            let (text, card) = (report.to_string(), report.device.expect("one of two cards"));
            let place = format!("kernel `exchange`, card {card}, block 0, thread ");
            assert!(text.starts_with(&place), "{text}");
            let other = 1 - card;
            assert!(
                text.contains(&format!("of `data` of card {other} with no barrier after the write by")),
                "{text}"
            );
            assert!(text.contains(&format!(" of card {other}, ")), "{text}");
        }
    }
}

#[test]
fn access_that_is_not_enabled() {
    for seed in 0..4 {
        let report = run(Tells::System, [true, false], seed).expect_err("an access");
        assert_eq!((report.defect, report.device), (Defect::OutOfBounds, Some(1)), "{report}");
        assert!(
            report.text.contains("`flag` of card 0, in which peer access is not enabled or ends"),
            "{report}"
        );
    }
}

/// Whoever waits for a card that does not come can look at the clock, which runs fast then.
#[test]
fn time_passes_for_who_waits() {
    let mut memory = Memory::new();
    let flag = memory.allocate_from("flag", &[0; 4]) as *const u32;
    let kernel = || {
        let start = thread::global_timer_ns();
        // SAFETY: a word of the buffer.
        while unsafe { atomic::load_acquire_system_u32(flag) } == 0 {
            if thread::global_timer_ns() - start > 60_000_000_000 {
                return;
            }
        }
    };
    let launch = Launch::new("waits", [1, 1, 1], [1, 1, 1]);
    simulate_together(&mut [&mut memory], &launch, &[&kernel]).unwrap_or_else(|report| panic!("{report}"));
}
