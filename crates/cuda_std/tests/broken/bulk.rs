//! Bulk copies out of shared memory: proxy fences, waits before the source is used again, the end of a block.

use crate::harness::{Defective, Form, launch, tid};
use cuda_std::sim::{Defect, Launch};
use cuda_std::{fence, global, mbarrier, shared, thread, tma};

const SOURCE: &str = include_str!("bulk.rs");

/// One warp with 256 bytes of data and an mbarrier behind them.
fn warp(kernel: &'static str) -> Launch<'static> {
    launch(kernel, 1, 32).shared_bytes(264)
}

fn place() -> u32 {
    shared::base() + 4 * tid()
}

/// Threads write a tile with ordinary stores, a barrier, and a bulk store reads it. The barrier orders the threads, not
/// the ways in which memory is accessed (FlashKDA #24, cuLA #114, Fuser #1967).
unsafe fn store_without_a_proxy_fence(form: Form, out: *mut u32) {
    shared::store_u32(place(), tid()); // named
    if form == Form::Repaired {
        fence::proxy_async_shared();
    }
    thread::sync_threads();
    if tid() == 0 {
        tma::store_bulk(out, shared::base(), 128); // reported
        tma::commit_group();
        tma::wait_group_read::<0>();
    }
}

#[test]
fn a_store_that_may_read_stale_data() {
    let text = "missing fence.proxy.async: asynchronous read of byte 0 of shared memory, written by ordinary stores of \
                block 0, thread 0";
    Defective::new(SOURCE, warp("store_without_a_proxy_fence")).output("out", 0..32).caught(
        1,
        Defect::ProxyFence,
        text,
        |form, [out]| unsafe { store_without_a_proxy_fence(form, out as _) },
    );
}

/// The fence comes first, the stores that it should cover after it.
unsafe fn fence_before_the_stores(form: Form, out: *mut u32) {
    if form == Form::Broken {
        fence::proxy_async_shared();
    }
    shared::store_u32(place(), tid()); // named
    if form == Form::Repaired {
        fence::proxy_async_shared();
    }
    thread::sync_threads();
    if tid() == 0 {
        tma::store_bulk(out, shared::base(), 128); // reported
        tma::commit_group();
        tma::wait_group_read::<0>();
    }
}

#[test]
fn a_proxy_fence_too_early() {
    Defective::new(SOURCE, warp("fence_before_the_stores")).output("out", 0..32).caught(
        1,
        Defect::ProxyFence,
        "missing fence.proxy.async",
        |form, [out]| unsafe { fence_before_the_stores(form, out as _) },
    );
}

/// A fence, but no barrier: the issuing thread has not seen what the others wrote.
unsafe fn store_without_a_barrier(form: Form, out: *mut u32) {
    shared::store_u32(place(), 0);
    fence::proxy_async_shared();
    thread::sync_threads();
    shared::store_u32(place(), tid()); // reported, named
    fence::proxy_async_shared();
    if form == Form::Repaired {
        thread::sync_threads();
    }
    if tid() == 0 {
        tma::store_bulk(out, shared::base(), 128); // reported, named
        tma::commit_group();
        tma::wait_group_read::<0>();
    }
}

#[test]
fn a_store_of_what_others_still_write() {
    Defective::new(SOURCE, warp("store_without_a_barrier")).output("out", 0..32).caught(
        1,
        Defect::Race,
        "of shared memory with no barrier after the",
        |form, [out]| unsafe { store_without_a_barrier(form, out as _) },
    );
}

/// The tile is written again while a bulk store still reads it: the wait is missing (Fuser #5448).
unsafe fn source_used_again(form: Form, out: *mut u32) {
    for round in 0..2 {
        shared::store_u32(place(), 32 * round + tid()); // reported
        fence::proxy_async_shared();
        thread::sync_threads();
        if tid() == 0 {
            tma::store_bulk(out.add(32 * round as usize), shared::base(), 128); // named
            tma::commit_group();
            if form == Form::Repaired || round == 1 {
                tma::wait_group_read::<0>();
            }
        }
        thread::sync_threads();
    }
}

#[test]
fn a_tile_that_is_still_read() {
    let text = "no barrier after the read by a bulk store of block 0, thread 0";
    Defective::new(SOURCE, warp("source_used_again")).output("out", 0..64).caught(
        1,
        Defect::Race,
        text,
        |form, [out]| unsafe { source_used_again(form, out as _) },
    );
}

/// A copy in two stages: before a stage is loaded again its store must have read it, but the wait leaves one group, and
/// that is the stage's own (DeepEP #657, `tma_copy`).
unsafe fn wait_for_stores_one_too_few(form: Form, x: *const u32, out: *mut u32) {
    if tid() > 0 {
        return;
    }
    let full = shared::base() + 256;
    mbarrier::init(full, 1);
    mbarrier::fence_mbarrier_init();
    for round in 0..4u32 {
        let stage = shared::base() + 128 * (round % 2);
        match form {
            Form::Broken => tma::wait_group_read::<2>(),
            Form::Repaired => tma::wait_group_read::<1>(),
        }
        mbarrier::arrive_expect_tx(full, 128);
        tma::load_bulk(stage, x.add(32 * round as usize), 128, full); // reported
        mbarrier::wait_parity(full, round & 1);
        tma::store_bulk(out.add(32 * round as usize), stage, 128); // named
        tma::commit_group();
    }
    tma::wait_group_read::<0>();
}

#[test]
fn a_wait_for_stores_with_n_one_too_large() {
    let text = "no barrier after the read by a bulk store of block 0, thread 0";
    Defective::new(SOURCE, warp("wait_for_stores_one_too_few"))
        .input("x", 0..128)
        .output("out", 0..128)
        .caught(1, Defect::Race, text, |form, [x, out]| unsafe {
            wait_for_stores_one_too_few(form, x as _, out as _)
        });
}

/// The block ends while its bulk store still reads its shared memory, which may be the next block's by then (the
/// question of CUTLASS #2002: it has to be waited for).
unsafe fn end_under_a_store(form: Form, out: *mut u32) {
    shared::store_u32(place(), tid());
    fence::proxy_async_shared();
    thread::sync_threads();
    if tid() == 0 {
        tma::store_bulk(out, shared::base(), 128);
        tma::commit_group(); // reported
        if form == Form::Repaired {
            tma::wait_group_read::<0>();
        }
    }
}

#[test]
fn a_block_that_ends_under_its_store() {
    Defective::new(SOURCE, warp("end_under_a_store")).output("out", 0..32).caught(
        1,
        Defect::Asynchronous,
        "returns without `cp.async.bulk.wait_group.read`",
        |form, [out]| unsafe { end_under_a_store(form, out as _) },
    );
}

/// The store is issued and never committed, so the wait has nothing to wait for.
unsafe fn store_without_a_commit(form: Form, out: *mut u32) {
    shared::store_u32(place(), tid());
    fence::proxy_async_shared();
    thread::sync_threads();
    if tid() == 0 {
        tma::store_bulk(out, shared::base(), 128);
        if form == Form::Repaired {
            tma::commit_group();
        }
        tma::wait_group_read::<0>(); // reported
    }
}

#[test]
fn a_store_that_belongs_to_no_group() {
    Defective::new(SOURCE, warp("store_without_a_commit")).output("out", 0..32).caught(
        1,
        Defect::Asynchronous,
        "returns without `cp.async.bulk.wait_group.read`",
        |form, [out]| unsafe { store_without_a_commit(form, out as _) },
    );
}

/// The last round prefetches for one that does not come, and the block ends while the copy is under way.
unsafe fn end_under_a_load(form: Form, x: *const u32, out: *mut u32) {
    let full = shared::base() + 256;
    if tid() == 0 {
        mbarrier::init(full, 1);
        mbarrier::fence_mbarrier_init();
        mbarrier::arrive_expect_tx(full, 128);
        tma::load_bulk(shared::base(), x, 128, full);
    }
    thread::sync_threads();
    let last = if form == Form::Broken { 2 } else { 1 };
    for round in 0..2 {
        mbarrier::wait_parity(full, round);
        let value = shared::load_u32(shared::base() + 128 * round + 4 * tid());
        thread::sync_threads();
        if tid() == 0 && round < last {
            mbarrier::arrive_expect_tx(full, 128);
            let next = (round + 1) % 2;
            tma::load_bulk(shared::base() + 128 * next, x.add(32 * next as usize), 128, full); // named
        }
        global::store(out.add((32 * round + tid()) as usize), value); // reported
    }
}

#[test]
fn a_block_that_ends_under_its_load() {
    Defective::new(SOURCE, warp("end_under_a_load")).input("x", 0..64).output("out", 0..64).caught(
        6,
        Defect::Asynchronous,
        "the block ends while the copy of ",
        |form, [x, out]| unsafe { end_under_a_load(form, x as _, out as _) },
    );
}

/// What a bulk store has written is read back after a wait for its reads alone.
unsafe fn read_back_too_early(form: Form, out: *mut u32, copy: *mut u32) {
    shared::store_u32(place(), tid());
    fence::proxy_async_shared();
    thread::sync_threads();
    if tid() == 0 {
        tma::store_bulk(out, shared::base(), 128); // named
        tma::commit_group();
        match form {
            Form::Broken => tma::wait_group_read::<0>(),
            Form::Repaired => tma::wait_group::<0>(),
        }
    }
    thread::sync_threads();
    let value = global::load(out.add(tid() as usize)); // reported
    global::store(copy.add(tid() as usize), value);
}

#[test]
fn a_wait_for_reads_where_writes_count() {
    let text = "no barrier after the asynchronous write by a bulk store of block 0, thread 0";
    Defective::new(SOURCE, warp("read_back_too_early")).output("out", 0..32).output("copy", 0..32).caught(
        1,
        Defect::Race,
        text,
        |form, [out, copy]| unsafe { read_back_too_early(form, out as _, copy as _) },
    );
}

/// A row of 31 words is copied in bulk, whose unit is 16 bytes.
unsafe fn bulk_copy_of_odd_rows(form: Form, x: *const u32, out: *mut u32) {
    let full = shared::base() + 256;
    let bytes = if form == Form::Broken { 124 } else { 112 };
    if tid() == 0 {
        mbarrier::init(full, 1);
        mbarrier::fence_mbarrier_init();
        mbarrier::arrive_expect_tx(full, bytes);
        tma::load_bulk(shared::base(), x, bytes, full); // reported
    }
    thread::sync_threads();
    mbarrier::wait_parity(full, 0);
    if tid() < 31 {
        let staged = 4 * tid() < bytes;
        let value = if staged { shared::load_u32(place()) } else { global::load(x.add(tid() as usize)) };
        global::store(out.add(tid() as usize), value);
    }
}

#[test]
fn a_bulk_copy_of_124_bytes() {
    let text = "addresses and number of bytes (124) must be multiples of 16";
    Defective::new(SOURCE, warp("bulk_copy_of_odd_rows")).input("x", 0..31).output("out", 0..31).caught(
        1,
        Defect::Misaligned,
        text,
        |form, [x, out]| unsafe { bulk_copy_of_odd_rows(form, x as _, out as _) },
    );
}

/// The last stage is loaded whole, over the end of the buffer.
unsafe fn bulk_copy_over_the_end(form: Form, x: *const u32, out: *mut u32, n: u32) {
    let full = shared::base() + 256;
    let bytes = if form == Form::Broken { 128 } else { 4 * n };
    if tid() == 0 {
        mbarrier::init(full, 1);
        mbarrier::fence_mbarrier_init();
        mbarrier::arrive_expect_tx(full, bytes);
        tma::load_bulk(shared::base(), x, bytes, full); // reported
    }
    thread::sync_threads();
    mbarrier::wait_parity(full, 0);
    if tid() < n {
        global::store(out.add(tid() as usize), shared::load_u32(place()));
    }
}

#[test]
fn a_bulk_copy_of_a_rows_tail() {
    let text = "asynchronous read of 16 bytes out of bounds: at byte 96 of `x`, which has 96 bytes";
    Defective::new(SOURCE, warp("bulk_copy_over_the_end")).input("x", 0..24).output("out", 0..24).caught(
        1,
        Defect::OutOfBounds,
        text,
        |form, [x, out]| unsafe { bulk_copy_over_the_end(form, x as _, out as _, 24) },
    );
}

/// What threads have just written to global memory is loaded in bulk; the proxy fence between covers shared memory
/// alone (DeepEP #621 and #642 discuss such a fence).
unsafe fn fence_of_the_other_memory(form: Form, data: *mut u32, out: *mut u32) {
    let full = shared::base() + 256;
    if tid() == 0 {
        mbarrier::init(full, 1);
        mbarrier::fence_mbarrier_init();
    }
    global::store(data.add(tid() as usize), tid()); // named
    match form {
        Form::Broken => fence::proxy_async_shared(),
        Form::Repaired => fence::proxy_async_global(),
    }
    thread::sync_threads();
    if tid() == 0 {
        mbarrier::arrive_expect_tx(full, 128);
        tma::load_bulk(shared::base(), data, 128, full); // reported
    }
    mbarrier::wait_parity(full, 0);
    global::store(out.add(tid() as usize), shared::load_u32(place()));
}

#[test]
fn a_proxy_fence_of_the_other_memory() {
    let text = "missing fence.proxy.async: asynchronous read of byte 0 of `data`";
    Defective::new(SOURCE, warp("fence_of_the_other_memory"))
        .scratch("data", 32)
        .output("out", 0..32)
        .caught(1, Defect::ProxyFence, text, |form, [data, out]| unsafe {
            fence_of_the_other_memory(form, data as _, out as _)
        });
}
