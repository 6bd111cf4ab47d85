//! mbarriers: phases, counts, bytes, and waits for them.

use crate::harness::{Defective, Form, launch, tid};
use cuda_std::sim::{Defect, Launch};
use cuda_std::{fence, global, mbarrier, shared, thread, tma, warp};

const SOURCE: &str = include_str!("mbarriers.rs");

/// Where the mbarriers are: behind four stages of 128 bytes.
const BARRIERS: u32 = 512;
const SHARED_BYTES: u32 = BARRIERS + 64;

fn barrier(index: u32) -> u32 {
    shared::base() + BARRIERS + 8 * index
}

fn stage(round: u32, stages: u32) -> u32 {
    shared::base() + 128 * (round % stages)
}

/// One thread sets up an mbarrier for each of the counts; a barrier of the block follows.
#[track_caller]
unsafe fn set_up(counts: &[u32]) {
    if tid() == 0 {
        for (index, &count) in counts.iter().enumerate() {
            mbarrier::init(barrier(index as u32), count);
        }
        mbarrier::fence_mbarrier_init();
    }
    thread::sync_threads();
}

/// A warp that consumes, and one that produces.
fn two_warps(kernel: &'static str) -> Launch<'static> {
    launch(kernel, 1, 64).shared_bytes(SHARED_BYTES)
}

fn one_warp(kernel: &'static str) -> Launch<'static> {
    launch(kernel, 1, 32).shared_bytes(SHARED_BYTES)
}

/// Every round waits for parity 0, as if each phase were the first: from the second round on the wait returns at once
/// (TileLang #3087, wrong results with three stages and more).
unsafe fn phase_bit_reused(form: Form, x: *const u32, out: *mut u32) {
    set_up(&[1]);
    for round in 0..3 {
        if tid() == 0 {
            mbarrier::arrive_expect_tx(barrier(0), 128);
            tma::load_bulk(stage(0, 1), x.add(32 * round as usize), 128, barrier(0)); // named
        }
        thread::sync_threads();
        let parity = if form == Form::Broken { 0 } else { round & 1 };
        mbarrier::wait_parity(barrier(0), parity);
        let value = shared::load_u32(stage(0, 1) + 4 * tid()); // reported
        global::store(out.add((32 * round + tid()) as usize), value);
        thread::sync_threads();
    }
}

#[test]
fn a_phase_bit_that_never_flips() {
    let text = "by a copy that completes at the mbarrier at byte 512";
    Defective::new(SOURCE, one_warp("phase_bit_reused")).input("x", 0..96).output("out", 0..96).caught(
        8,
        Defect::Race,
        text,
        |form, [x, out]| unsafe { phase_bit_reused(form, x as _, out as _) },
    );
}

/// 32 threads read a stage and arrive at its `empty` barrier, whose count is 31: the producer refills the stage under
/// the last of them.
unsafe fn empty_count_one_too_small(form: Form, x: *const u32, out: *mut u32) {
    set_up(&[1, if form == Form::Broken { 31 } else { 32 }]);
    let (full, empty) = (barrier(0), barrier(1));
    for round in 0..4 {
        if tid() == 32 {
            mbarrier::wait_parity(empty, round & 1 ^ 1);
            mbarrier::arrive_expect_tx(full, 128);
            tma::load_bulk(stage(0, 1), x.add(32 * round as usize), 128, full); // reported, named
        } else if tid() < 32 {
            mbarrier::wait_parity(full, round & 1);
            let value = shared::load_u32(stage(0, 1) + 4 * tid()); // reported, named
            global::store(out.add((32 * round + tid()) as usize), value);
            mbarrier::arrive(empty);
        }
    }
}

#[test]
fn a_stage_is_refilled_under_a_reader() {
    Defective::new(SOURCE, two_warps("empty_count_one_too_small"))
        .input("x", 0..128)
        .output("out", 0..128)
        .caught(8, Defect::Race, "of shared memory with no barrier after the", |form, [x, out]| unsafe {
            empty_count_one_too_small(form, x as _, out as _)
        });
}

/// The data is used, then waited for (CUTracer #106 lists it among the races that mostly go well).
unsafe fn read_before_the_wait(form: Form, x: *const u32, out: *mut u32) {
    set_up(&[1]);
    if tid() == 0 {
        mbarrier::arrive_expect_tx(barrier(0), 128);
        tma::load_bulk(stage(0, 1), x, 128, barrier(0)); // named
    }
    thread::sync_threads();
    if form == Form::Repaired {
        mbarrier::wait_parity(barrier(0), 0);
    }
    let value = shared::load_u32(stage(0, 1) + 4 * tid()); // reported
    if form == Form::Broken {
        mbarrier::wait_parity(barrier(0), 0);
    }
    global::store(out.add(tid() as usize), value);
}

#[test]
fn a_wait_that_comes_too_late() {
    Defective::new(SOURCE, one_warp("read_before_the_wait")).input("x", 0..32).output("out", 0..32).caught(
        1,
        Defect::Race,
        "by a copy that completes at the mbarrier",
        |form, [x, out]| unsafe { read_before_the_wait(form, x as _, out as _) },
    );
}

/// All lanes of the producer arrive and announce bytes at a barrier that expects one of them.
unsafe fn arrival_of_every_lane(form: Form, x: *const u32, out: *mut u32) {
    set_up(&[1]);
    if form == Form::Broken || tid() == 0 {
        mbarrier::arrive_expect_tx(barrier(0), 128); // reported
    }
    thread::sync_threads();
    if tid() == 0 {
        tma::load_bulk(stage(0, 1), x, 128, barrier(0));
    }
    mbarrier::wait_parity(barrier(0), 0);
    global::store(out.add(tid() as usize), shared::load_u32(stage(0, 1) + 4 * tid()));
}

#[test]
fn arrivals_beyond_the_count() {
    let text = "more than the 1 arrivals that a phase of the mbarrier at byte 512 expects";
    Defective::new(SOURCE, one_warp("arrival_of_every_lane")).input("x", 0..32).output("out", 0..32).caught(
        1,
        Defect::Mbarrier,
        text,
        |form, [x, out]| unsafe { arrival_of_every_lane(form, x as _, out as _) },
    );
}

/// No barrier between an mbarrier's initialisation and its first use, only a vote, which orders no memory (Fuser #1552,
/// a test that hung on an H100).
unsafe fn use_before_the_barrier(form: Form, out: *mut u32) {
    let place = shared::base() + 4 * tid();
    shared::store_u32(place, tid());
    if tid() == 0 {
        mbarrier::init(barrier(0), 32); // named
    }
    warp::any(warp::FULL_MASK, tid() == 0);
    if form == Form::Repaired {
        thread::sync_threads();
    }
    mbarrier::arrive(barrier(0)); // reported
    mbarrier::wait_parity(barrier(0), 0);
    global::store(out.add(tid() as usize), shared::load_u32(shared::base() + 4 * (31 - tid())));
}

#[test]
fn an_mbarrier_that_may_not_be_there_yet() {
    let text = "with no barrier after its initialisation by block 0, thread 0";
    Defective::new(SOURCE, one_warp("use_before_the_barrier")).output("out", (0..32).rev()).caught(
        20,
        Defect::Race,
        text,
        |form, [out]| unsafe { use_before_the_barrier(form, out as _) },
    );
}

/// The last stage is copied in part, but announced whole: the wait never ends (mirage #705, announced and copied bytes
/// that differ).
unsafe fn bytes_of_the_whole_stage(form: Form, x: *const u32, out: *mut u32, n: u32) {
    set_up(&[1]);
    for round in 0..n.div_ceil(32) {
        let count = (n - 32 * round).min(32);
        if tid() == 0 {
            let announced = if form == Form::Broken { 128 } else { 4 * count };
            mbarrier::arrive_expect_tx(barrier(0), announced);
            tma::load_bulk(stage(0, 1), x.add(32 * round as usize), 4 * count, barrier(0));
        }
        mbarrier::wait_parity(barrier(0), round & 1); // named
        if tid() < count {
            let value = shared::load_u32(stage(0, 1) + 4 * tid());
            global::store(out.add((32 * round + tid()) as usize), value);
        }
        thread::sync_threads();
    }
}

#[test]
fn bytes_that_never_come() {
    let text = "no thread can run any more:\n  32 threads, the first block 0, thread 0, wait for the phase of parity 1 \
                of the mbarrier at byte 512";
    Defective::new(SOURCE, one_warp("bytes_of_the_whole_stage"))
        .input("x", 0..52)
        .output("out", 0..52)
        .caught(4, Defect::Deadlock, text, |form, [x, out]| unsafe {
            bytes_of_the_whole_stage(form, x as _, out as _, 52)
        });
}

/// The producer announces bytes and does not arrive (TileLang #2566, loops of one round).
unsafe fn announcement_without_arrival(form: Form, x: *const u32, out: *mut u32) {
    set_up(&[1]);
    if tid() == 0 {
        match form {
            Form::Broken => mbarrier::expect_tx(barrier(0), 128),
            Form::Repaired => mbarrier::arrive_expect_tx(barrier(0), 128),
        }
        tma::load_bulk(stage(0, 1), x, 128, barrier(0));
    }
    mbarrier::wait_parity(barrier(0), 0); // named
    global::store(out.add(tid() as usize), shared::load_u32(stage(0, 1) + 4 * tid()));
}

#[test]
fn an_arrival_that_is_missing() {
    let text = "wait for the phase of parity 0 of the mbarrier at byte 512";
    Defective::new(SOURCE, one_warp("announcement_without_arrival"))
        .input("x", 0..32)
        .output("out", 0..32)
        .caught(4, Defect::Deadlock, text, |form, [x, out]| unsafe {
            announcement_without_arrival(form, x as _, out as _)
        });
}

/// A fifth stage where the layout has four: it lies on the mbarriers.
unsafe fn stage_over_the_barriers(form: Form, out: *mut u32) {
    set_up(&[32]);
    let stages = if form == Form::Broken { 5 } else { 4 };
    for round in 0..5 {
        shared::store_u32(stage(round, stages) + 4 * tid(), round); // reported
    }
    mbarrier::arrive(barrier(0));
    mbarrier::wait_parity(barrier(0), 0);
    global::store(out.add(tid() as usize), shared::load_u32(stage(4, stages) + 4 * tid()));
}

#[test]
fn data_over_an_mbarrier() {
    Defective::new(SOURCE, one_warp("stage_over_the_barriers").shared_bytes(640))
        .output("out", [4; 32])
        .caught(
            2,
            Defect::Mbarrier,
            "of shared memory, which belongs to an mbarrier",
            |form, [out]| unsafe { stage_over_the_barriers(form, out as _) },
        );
}

/// A persistent block sets its mbarriers up for each tile anew, over those that are in use.
unsafe fn initialised_for_every_tile(form: Form, x: *const u32, out: *mut u32) {
    for tile in 0..2 {
        if tid() == 0 && (form == Form::Broken || tile == 0) {
            mbarrier::init(barrier(0), 1); // reported
            mbarrier::fence_mbarrier_init();
        }
        thread::sync_threads();
        if tid() == 0 {
            mbarrier::arrive_expect_tx(barrier(0), 128);
            tma::load_bulk(stage(0, 1), x.add(32 * tile as usize), 128, barrier(0));
        }
        mbarrier::wait_parity(barrier(0), tile & 1);
        let value = shared::load_u32(stage(0, 1) + 4 * tid());
        global::store(out.add((32 * tile + tid()) as usize), value);
        thread::sync_threads();
    }
}

#[test]
fn initialised_twice() {
    Defective::new(SOURCE, one_warp("initialised_for_every_tile"))
        .input("x", 0..64)
        .output("out", 0..64)
        .caught(1, Defect::Mbarrier, "which holds an mbarrier already", |form, [x, out]| unsafe {
            initialised_for_every_tile(form, x as _, out as _)
        });
}

/// The consumer's arrival comes before its read: it releases nothing of it.
unsafe fn arrival_before_the_read(form: Form, x: *const u32, out: *mut u32) {
    set_up(&[1, 32]);
    let (full, empty) = (barrier(0), barrier(1));
    for round in 0..4 {
        if tid() == 32 {
            mbarrier::wait_parity(empty, round & 1 ^ 1);
            mbarrier::arrive_expect_tx(full, 128);
            tma::load_bulk(stage(0, 1), x.add(32 * round as usize), 128, full); // reported, named
        } else if tid() < 32 {
            mbarrier::wait_parity(full, round & 1);
            if form == Form::Broken {
                mbarrier::arrive(empty);
            }
            let value = shared::load_u32(stage(0, 1) + 4 * tid()); // reported, named
            if form == Form::Repaired {
                mbarrier::arrive(empty);
            }
            global::store(out.add((32 * round + tid()) as usize), value);
        }
    }
}

#[test]
fn a_stage_released_before_its_use() {
    Defective::new(SOURCE, two_warps("arrival_before_the_read"))
        .input("x", 0..128)
        .output("out", 0..128)
        .caught(1, Defect::Race, "of shared memory with no barrier after the", |form, [x, out]| unsafe {
            arrival_before_the_read(form, x as _, out as _)
        });
}

/// `fence.mbarrier_init` is missing: the copy engine may not see the mbarrier yet (TIRx-kernels #9, FlashKDA #24).
unsafe fn initialisation_without_fence(form: Form, x: *const u32, out: *mut u32) {
    if tid() == 0 {
        mbarrier::init(barrier(0), 1); // named
        if form == Form::Repaired {
            mbarrier::fence_mbarrier_init();
        }
    }
    thread::sync_threads();
    if tid() == 0 {
        mbarrier::arrive_expect_tx(barrier(0), 128);
        tma::load_bulk(stage(0, 1), x, 128, barrier(0)); // reported
    }
    mbarrier::wait_parity(barrier(0), 0);
    global::store(out.add(tid() as usize), shared::load_u32(stage(0, 1) + 4 * tid()));
}

#[test]
fn an_mbarrier_that_the_copy_engine_may_not_see() {
    Defective::new(SOURCE, one_warp("initialisation_without_fence"))
        .input("x", 0..32)
        .output("out", 0..32)
        .caught(1, Defect::ProxyFence, "missing fence.mbarrier_init", |form, [x, out]| unsafe {
            initialisation_without_fence(form, x as _, out as _)
        });
}

/// A stage that threads have padded by ordinary stores is loaded over, with no proxy fence between.
unsafe fn load_over_ordinary_stores(form: Form, x: *const u32, out: *mut u32) {
    shared::store_u32(stage(0, 1) + 4 * tid(), 0); // named
    if form == Form::Repaired {
        fence::proxy_async_shared();
    }
    set_up(&[1]);
    if tid() == 0 {
        mbarrier::arrive_expect_tx(barrier(0), 64);
        tma::load_bulk(stage(0, 1), x, 64, barrier(0)); // reported
    }
    mbarrier::wait_parity(barrier(0), 0);
    global::store(out.add(tid() as usize), shared::load_u32(stage(0, 1) + 4 * tid()));
}

#[test]
fn a_load_over_ordinary_stores() {
    Defective::new(SOURCE, one_warp("load_over_ordinary_stores"))
        .input("x", 1..33)
        .output("out", (1..17).chain([0; 16]))
        .caught(
            1,
            Defect::ProxyFence,
            "missing fence.proxy.async: asynchronous write",
            |form, [x, out]| unsafe { load_over_ordinary_stores(form, x as _, out as _) },
        );
}
