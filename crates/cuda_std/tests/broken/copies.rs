//! `cp.async`: what is read before it has arrived, and overwritten while it is read.

use crate::harness::{Defective, Form, launch, tid};
use cuda_std::sim::{Arch, Defect, Launch};
use cuda_std::{cp_async, global, shared, thread};

const SOURCE: &str = include_str!("copies.rs");

/// One warp on Ampere.
fn warp(kernel: &'static str, shared_bytes: u32) -> Launch<'static> {
    launch(kernel, 1, 32).arch(Arch::Sm80).shared_bytes(shared_bytes)
}

/// The thread's word of a round's stage.
fn word(round: u32, stages: u32) -> u32 {
    shared::base() + 128 * (round % stages) + 4 * tid()
}

/// Copies the thread's word of a round, unless there are no more rounds, and commits either way.
#[track_caller]
unsafe fn issue(x: *const u32, round: u32, stages: u32) {
    if round < ROUNDS {
        cp_async::ca_4(word(round, stages), x.add((32 * round + tid()) as usize));
    }
    cp_async::commit_group();
}

const ROUNDS: u32 = 5;

/// Two groups are under way, and the wait leaves both of them so: N is one too large.
unsafe fn wait_for_one_group_too_few(form: Form, x: *const u32, out: *mut u32) {
    issue(x, 0, 2); // named
    for round in 0..ROUNDS {
        issue(x, round + 1, 2); // named
        match form {
            Form::Broken => cp_async::wait_group::<2>(),
            Form::Repaired => cp_async::wait_group::<1>(),
        }
        let value = shared::load_u32(word(round, 2)); // reported
        global::store(out.add((32 * round + tid()) as usize), value);
    }
}

#[test]
fn a_wait_with_n_one_too_large() {
    let text = "of shared memory with no barrier after the write by a cp.async of block 0, thread";
    Defective::new(SOURCE, warp("wait_for_one_group_too_few", 256))
        .input("x", 0..160)
        .output("out", 0..160)
        .caught(1, Defect::Race, text, |form, [x, out]| unsafe {
            wait_for_one_group_too_few(form, x as _, out as _)
        });
}

/// The copy of a round is committed after the wait, which therefore counts a group too few: it waits for nothing
/// (csarofeen/pytorch #2457, found as wrong results of some rows).
unsafe fn commit_after_the_wait(form: Form, x: *const u32, out: *mut u32) {
    issue(x, 0, 3);
    issue(x, 1, 3); // named
    cp_async::wait_group::<1>();
    for round in 0..ROUNDS {
        let value = shared::load_u32(word(round, 3)); // reported
        global::store(out.add((32 * round + tid()) as usize), value);
        if form == Form::Repaired {
            issue(x, round + 2, 3);
            cp_async::wait_group::<1>();
        } else {
            if round + 2 < ROUNDS {
                cp_async::ca_4(word(round + 2, 3), x.add((32 * (round + 2) + tid()) as usize));
            }
            cp_async::wait_group::<1>();
            cp_async::commit_group();
        }
    }
}

#[test]
fn a_group_that_is_not_committed_yet() {
    Defective::new(SOURCE, warp("commit_after_the_wait", 384))
        .input("x", 0..160)
        .output("out", 0..160)
        .caught(1, Defect::Race, "by a cp.async of block 0, thread", |form, [x, out]| unsafe {
            commit_after_the_wait(form, x as _, out as _)
        });
}

/// A wait covers the copies of its own thread, and the barrier that would hand them to the others stands before it.
unsafe fn barrier_before_the_wait(form: Form, x: *const u32, out: *mut u32) {
    cp_async::ca_4(shared::base() + 4 * tid(), x.add(tid() as usize)); // named
    cp_async::commit_group();
    if form == Form::Broken {
        thread::sync_threads();
    }
    cp_async::wait_group::<0>();
    if form == Form::Repaired {
        thread::sync_threads();
    }
    let value = shared::load_u32(shared::base() + 4 * (31 - tid())); // reported
    global::store(out.add(tid() as usize), value);
}

#[test]
fn copies_of_other_threads() {
    Defective::new(SOURCE, warp("barrier_before_the_wait", 128))
        .input("x", 0..32)
        .output("out", (0..32).rev())
        .caught(1, Defect::Race, "by a cp.async of block 0, thread", |form, [x, out]| unsafe {
            barrier_before_the_wait(form, x as _, out as _)
        });
}

/// A stage is filled again right after its use, while other threads still use it (TileLang #2668).
unsafe fn stage_filled_while_in_use(form: Form, x: *const u32, out: *mut u32) {
    issue(x, 0, 2);
    issue(x, 1, 2);
    for round in 0..ROUNDS {
        cp_async::wait_group::<1>();
        thread::sync_threads();
        let value = shared::load_u32(word(round, 2) ^ 4); // reported, named
        global::store(out.add((32 * round + tid()) as usize), value);
        if form == Form::Repaired {
            thread::sync_threads();
        }
        issue(x, round + 2, 2); // reported, named
    }
}

#[test]
fn a_stage_that_others_still_read() {
    Defective::new(SOURCE, warp("stage_filled_while_in_use", 256))
        .input("x", 0..160)
        .output("out", (0..160).map(|i| i ^ 1))
        .caught(1, Defect::Race, "of shared memory with no barrier after the", |form, [x, out]| unsafe {
            stage_filled_while_in_use(form, x as _, out as _)
        });
}

/// The last copy of 16 bytes reaches over the row's end; the form with a number of source bytes would fill with zeros.
unsafe fn copy_over_the_end(form: Form, x: *const u32, out: *mut u32, n: u32) {
    let first = 4 * tid();
    let valid = n.saturating_sub(first).min(4);
    let (place, source) = (shared::base() + 4 * first, x.wrapping_add(first as usize));
    match form {
        Form::Broken => cp_async::cg_16(place, source), // reported
        Form::Repaired => cp_async::cg_16_fill(place, source, 4 * valid),
    }
    cp_async::wait_all();
    global::store(out.add(tid() as usize), shared::load_u32x4(place).iter().sum());
}

#[test]
fn a_copy_of_a_rows_tail() {
    let sum = |i: u32| (4 * i..4 * i + 4).filter(|&i| i < 101).sum();
    Defective::new(SOURCE, warp("copy_over_the_end", 512))
        .input("x", 0..101)
        .output("out", (0..32).map(sum))
        .caught(1, Defect::OutOfBounds, "of `x`, which has 404 bytes", |form, [x, out]| unsafe {
            copy_over_the_end(form, x as _, out as _, 101)
        });
}

/// Runs on a card whose floor has no `cp.async`.
unsafe fn copy_on_an_older_card(form: Form, x: *const u32, out: *mut u32) {
    let place = shared::base() + 4 * tid();
    match form {
        Form::Broken => {
            cp_async::ca_4(place, x.add(tid() as usize)); // reported
            cp_async::wait_all();
        }
        Form::Repaired => shared::store_u32(place, global::load(x.add(tid() as usize))),
    }
    global::store(out.add(tid() as usize), shared::load_u32(place));
}

#[test]
fn an_instruction_that_the_floor_lacks() {
    let launch = warp("copy_on_an_older_card", 128).arch(Arch::Sm61);
    Defective::new(SOURCE, launch).input("x", 0..32).output("out", 0..32).caught(
        1,
        Defect::Unsupported,
        "`cp.async` needs sm_80, and this is sm_61",
        |form, [x, out]| unsafe { copy_on_an_older_card(form, x as _, out as _) },
    );
}
