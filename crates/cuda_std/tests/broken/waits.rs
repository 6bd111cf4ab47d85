//! Waits that never end, which must be reported and not hang.

use crate::harness::{Defective, Form, bid, launch, tid};
use cuda_std::atomic::{self, Order};
use cuda_std::sim::Defect;
use cuda_std::{barrier, global, shared, thread};

const SOURCE: &str = include_str!("waits.rs");

/// Blocks wait for each other in the middle of a kernel, but those without work have returned before they arrive.
unsafe fn grid_barrier_without_some(form: Form, arrived: *mut u32, out: *mut u32, n: u32) {
    if form == Form::Broken && bid() >= n {
        return;
    }
    atomic::add_u32(arrived, 1, Order::AcqRel);
    while atomic::or_u32(arrived, 0, Order::Acquire) < thread::grid_dim_x() {} // reported, named
    if bid() < n {
        global::store(out.add(bid() as usize), bid());
    }
}

#[test]
fn blocks_that_never_arrive() {
    let text =
        "looks at memory by the threads that can run, and nothing changes any more: a wait that cannot end";
    Defective::new(SOURCE, launch("grid_barrier_without_some", 4, 1))
        .input("arrived", [0])
        .output("out", 0..3)
        .caught(1, Defect::Deadlock, text, |form, [arrived, out]| unsafe {
            grid_barrier_without_some(form, arrived as _, out as _, 3)
        });
}

/// Each of two blocks waits for the other's flag before it sets its own.
unsafe fn flags_in_a_circle(form: Form, flags: *mut u32, out: *mut u32) {
    let (own, other) = (flags.add(bid() as usize), flags.add(1 - bid() as usize));
    if form == Form::Repaired {
        atomic::exchange_u32(own, 1, Order::Release);
    }
    while atomic::or_u32(other, 0, Order::Acquire) == 0 {} // reported, named
    if form == Form::Broken {
        atomic::exchange_u32(own, 1, Order::Release);
    }
    global::store(out.add(bid() as usize), 1);
}

#[test]
fn two_blocks_wait_for_each_other() {
    Defective::new(SOURCE, launch("flags_in_a_circle", 2, 1))
        .input("flags", [0, 0])
        .output("out", [1, 1])
        .caught(1, Defect::Deadlock, "a wait that cannot end", |form, [flags, out]| unsafe {
            flags_in_a_circle(form, flags as _, out as _)
        });
}

/// A named barrier waits for all 128 threads of the block in a branch that 64 of them take (the doubt of FlashMLA #41,
/// whose other half arrives elsewhere).
unsafe fn count_of_the_whole_block(form: Form, out: *mut u32) {
    shared::store_u32(shared::base() + 4 * tid(), tid());
    if tid() < 64 {
        match form {
            Form::Broken => barrier::sync(1, 128), // named
            Form::Repaired => barrier::sync(1, 64),
        }
        global::store(out.add(tid() as usize), shared::load_u32(shared::base() + 4 * (63 - tid())));
    }
}

#[test]
fn a_named_barrier_with_too_large_a_count() {
    let text = "64 threads, the first block 0, thread 0, wait for barrier 1 of 128 threads";
    Defective::new(SOURCE, launch("count_of_the_whole_block", 1, 128).shared_bytes(512))
        .output("out", (0..64).rev())
        .caught(1, Defect::Deadlock, text, |form, [out]| unsafe { count_of_the_whole_block(form, out as _) });
}
