//! Order between blocks, which only releases and acquires make.

use crate::harness::{Defective, Form, bid, launch, tid};
use cuda_std::atomic::{self, Order};
use cuda_std::sim::Defect;
use cuda_std::{global, shared, thread};

const SOURCE: &str = include_str!("order.rs");

/// The last block to arrive adds up what the others have written, but the arrival releases nothing: a fence is missing
/// before it (Fuser #2391, split-k).
unsafe fn last_block_without_a_fence(form: Form, partial: *mut u32, arrived: *mut u32, out: *mut u32) {
    if tid() == 0 {
        global::store(partial.add(bid() as usize), 10 + bid()); // named
        if form == Form::Repaired {
            atomic::fence_device();
        }
        if atomic::add_u32(arrived, 1, Order::Relaxed) == thread::grid_dim_x() - 1 {
            atomic::fence_device();
            let sum = (0..thread::grid_dim_x()).map(|block| global::load(partial.add(block as usize))).sum(); // reported
            global::store::<u32>(out, sum);
        }
    }
}

#[test]
fn the_last_block_reads_what_nobody_released() {
    Defective::new(SOURCE, launch("last_block_without_a_fence", 5, 32))
        .scratch("partial", 5)
        .input("arrived", [0])
        .output("out", [60])
        .caught(
            1,
            Defect::Race,
            "of `partial` with no barrier after the write by block",
            |form, buffers| unsafe {
                let [partial, arrived, out] = buffers.map(|address| address as *mut u32);
                last_block_without_a_fence(form, partial, arrived, out)
            },
        );
}

/// All threads write; the first one fences and reports the block's arrival without a barrier before, so its fence
/// covers its own writes alone (cuML #4157, `grid_sync`).
unsafe fn fence_of_one_thread(form: Form, partial: *mut u32, arrived: *mut u32, out: *mut u32) {
    global::store(partial.add((32 * bid() + tid()) as usize), bid()); // named
    if form == Form::Repaired {
        thread::sync_threads();
    }
    if tid() == 0 {
        let arrived = atomic::add_u32(arrived, 1, Order::AcqRel) + 1;
        shared::store_u32(shared::base(), arrived);
    }
    thread::sync_threads();
    if shared::load_u32(shared::base()) == thread::grid_dim_x() {
        let at = |block: u32| partial.add((32 * block + tid()) as usize);
        let sum = (0..thread::grid_dim_x()).map(|block| global::load(at(block))).sum(); // reported
        global::store::<u32>(out.add(tid() as usize), sum);
    }
}

#[test]
fn a_fence_covers_one_thread() {
    Defective::new(SOURCE, launch("fence_of_one_thread", 4, 32).shared_bytes(4))
        .scratch("partial", 128)
        .input("arrived", [0])
        .output("out", [6; 32])
        .caught(
            1,
            Defect::Race,
            "of `partial` with no barrier after the write by block",
            |form, buffers| unsafe {
                let [partial, arrived, out] = buffers.map(|address| address as *mut u32);
                fence_of_one_thread(form, partial, arrived, out)
            },
        );
}

/// The flag behind which data lies is set by a relaxed atomic.
unsafe fn flag_without_release(form: Form, data: *mut u32, flag: *mut u32, out: *mut u32) {
    if bid() == 0 {
        global::store(data, 42); // named
        let order = if form == Form::Broken { Order::Relaxed } else { Order::Release };
        atomic::exchange_u32(flag, 1, order);
    } else {
        while atomic::or_u32(flag, 0, Order::Acquire) == 0 {}
        global::store(out, global::load(data)); // reported
    }
}

#[test]
fn a_flag_that_releases_nothing() {
    Defective::new(SOURCE, launch("flag_without_release", 2, 1))
        .scratch("data", 1)
        .input("flag", [0])
        .output("out", [42])
        .caught(
            1,
            Defect::Race,
            "read of byte 0 of `data` with no barrier after the write",
            |form, buffers| unsafe {
                let [data, flag, out] = buffers.map(|address| address as *mut u32);
                flag_without_release(form, data, flag, out)
            },
        );
}

/// The flag behind which data lies is read by a relaxed atomic.
unsafe fn flag_without_acquire(form: Form, data: *mut u32, flag: *mut u32, out: *mut u32) {
    if bid() == 0 {
        global::store(data, 42); // named
        atomic::exchange_u32(flag, 1, Order::Release);
    } else {
        let order = if form == Form::Broken { Order::Relaxed } else { Order::Acquire };
        while atomic::or_u32(flag, 0, order) == 0 {}
        global::store(out, global::load(data)); // reported
    }
}

#[test]
fn a_flag_that_acquires_nothing() {
    Defective::new(SOURCE, launch("flag_without_acquire", 2, 1))
        .scratch("data", 1)
        .input("flag", [0])
        .output("out", [42])
        .caught(
            1,
            Defect::Race,
            "read of byte 0 of `data` with no barrier after the write",
            |form, buffers| unsafe {
                let [data, flag, out] = buffers.map(|address| address as *mut u32);
                flag_without_acquire(form, data, flag, out)
            },
        );
}

/// A ticket is drawn with a load and a store; two blocks can draw the same one.
unsafe fn ticket_without_atomics(form: Form, tickets: *mut u32, out: *mut u32) {
    let ticket = match form {
        Form::Broken => {
            let ticket = global::load(tickets); // reported, named
            global::store(tickets, ticket + 1); // reported, named
            ticket
        }
        Form::Repaired => atomic::add_u32(tickets, 1, Order::Relaxed),
    };
    global::store(out.add(ticket as usize), 1);
}

#[test]
fn a_ticket_is_drawn_twice() {
    Defective::new(SOURCE, launch("ticket_without_atomics", 6, 1))
        .in_place("tickets", [0], [6])
        .output("out", [1; 6])
        .caught(1, Defect::Race, "of `tickets` with no barrier after the", |form, [tickets, out]| unsafe {
            ticket_without_atomics(form, tickets as _, out as _)
        });
}
