//! Reads of memory that nothing has written.

use crate::harness::{Defective, Form, bid, floats, launch, tid};
use cuda_std::atomic::{self, Order};
use cuda_std::sim::Defect;
use cuda_std::{global, shared, thread, warp};

const SOURCE: &str = include_str!("uninitialised.rs");

/// There are 32 slots, of which a block of 96 threads writes three; the last step sums all of them. Right with 1024
/// threads, a NaN now and then with fewer (the sums of rvllm #1 were wrong below a block size, too).
unsafe fn slots_of_warps_that_do_not_exist(form: Form, x: *const f32, out: *mut f32) {
    let (slots, num_warps) = (shared::base(), thread::block_dim_x() / 32);
    let sum = warp::sum_f32::<32>(global::load(x.add(tid() as usize)));
    if thread::lane() == 0 {
        shared::store_f32(slots + 4 * thread::warp_idx(), sum);
    }
    thread::sync_threads();
    if tid() < 32 {
        let mine = if form == Form::Broken || tid() < num_warps {
            shared::load_f32(slots + 4 * tid()) // reported
        } else {
            0.0
        };
        let sum = warp::sum_f32::<32>(mine);
        if tid() == 0 {
            global::store(out, sum);
        }
    }
}

#[test]
fn a_sum_that_depends_on_the_block_size() {
    let text = "of shared memory, which nothing has written";
    Defective::new(SOURCE, launch("slots_of_warps_that_do_not_exist", 1, 96).shared_bytes(128))
        .input("x", floats((0..96).map(|i| i as f32)))
        .output("out", floats([4560.0]))
        .caught(1, Defect::Uninitialised, text, |form, [x, out]| unsafe {
            slots_of_warps_that_do_not_exist(form, x as _, out as _)
        });
}

/// Positions behind a sequence's end have probability 0, but their rows of the cache were never written, and 0 times
/// what is there can be NaN (vLLM #936, FlashAttention #1745).
unsafe fn values_behind_the_end(form: Form, values: *const f32, lengths: *const u32, out: *mut f32) {
    let length = global::load(lengths.add(bid() as usize));
    let mut sum = 0.0;
    for position in 0..4 {
        let probability = if position < length { 1.0 / length as f32 } else { 0.0 };
        if form == Form::Broken || position < length {
            let at = (4 * bid() + position) * 32 + tid();
            sum += probability * global::load(values.add(at as usize)); // reported
        }
    }
    global::store(out.add((32 * bid() + tid()) as usize), sum);
}

/// Fills the cache as far as the sequences reach, then reads it.
unsafe fn cache_behind_the_end(form: Form, values: *mut f32, lengths: *const u32, out: *mut f32) {
    let length = global::load(lengths.add(bid() as usize));
    for position in 0..length {
        global::store(values.add(((4 * bid() + position) * 32 + tid()) as usize), 2.0);
    }
    values_behind_the_end(form, values, lengths, out);
}

#[test]
fn a_cache_that_is_not_full() {
    Defective::new(SOURCE, launch("values_behind_the_end", 2, 32))
        .scratch("values", 2 * 4 * 32)
        .input("lengths", [2, 4])
        .output("out", floats([2.0; 64]))
        .caught(
            1,
            Defect::Uninitialised,
            "of `values`, which nothing has written",
            |form, [values, lengths, out]| unsafe {
                cache_behind_the_end(form, values as _, lengths as _, out as _)
            },
        );
}

/// Each block counts the residues of its elements in buckets that nobody has set to zero.
unsafe fn buckets_without_a_start(form: Form, x: *const u32, out: *mut u32) {
    let buckets = out.add(4 * bid() as usize);
    if form == Form::Repaired && tid() < 4 {
        global::store(buckets.add(tid() as usize), 0);
    }
    thread::sync_threads();
    let value = global::load(x.add((32 * bid() + tid()) as usize));
    atomic::add_u32(buckets.add((value % 4) as usize), 1, Order::Relaxed); // reported
}

#[test]
fn atomics_on_fresh_memory() {
    Defective::new(SOURCE, launch("buckets_without_a_start", 2, 32))
        .input("x", 0..64)
        .output("out", [8; 8])
        .caught(1, Defect::Uninitialised, "of `out`, which nothing has written", |form, [x, out]| unsafe {
            buckets_without_a_start(form, x as _, out as _)
        });
}

/// A row of 63 16-bit elements is staged by element and read by words: of the last word one half was never written.
unsafe fn half_of_the_last_word(form: Form, out: *mut u32) {
    let staged = shared::base();
    for column in (tid()..63).step_by(32) {
        shared::store_u16(staged + 2 * column, column as u16);
    }
    if form == Form::Repaired && tid() == 31 {
        shared::store_u16(staged + 2 * 63, 0);
    }
    thread::sync_threads();
    let pair = shared::load_u32(staged + 4 * tid()); // reported
    global::store(out.add(tid() as usize), pair);
}

#[test]
fn one_half_of_a_word() {
    let column = |i: u32| if i < 63 { i } else { 0 };
    Defective::new(SOURCE, launch("half_of_the_last_word", 1, 32).shared_bytes(128))
        .output("out", (0..32).map(|i| column(2 * i) | column(2 * i + 1) << 16))
        .caught(1, Defect::Uninitialised, "read of byte 126 of shared memory", |form, [out]| unsafe {
            half_of_the_last_word(form, out as _)
        });
}

/// A total is kept in shared memory from one launch to the next, where a block of another kernel may have been since.
unsafe fn total_of_the_last_launch(form: Form, out: *mut u32) {
    let total = shared::base();
    if form == Form::Repaired {
        if tid() == 0 {
            shared::store_u32(total, 0);
        }
        thread::sync_threads();
    }
    shared::add_u32(total, 1); // reported
    thread::sync_threads();
    global::store(out.add(tid() as usize), shared::load_u32(total));
}

#[test]
fn shared_memory_of_another_block() {
    Defective::new(SOURCE, launch("total_of_the_last_launch", 1, 64).shared_bytes(4))
        .output("out", [64; 64])
        .caught(
            1,
            Defect::Uninitialised,
            "of shared memory, which nothing has written",
            |form, [out]| unsafe { total_of_the_last_launch(form, out as _) },
        );
}
