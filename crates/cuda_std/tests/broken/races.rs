//! Accesses of several threads with no order between them.

use crate::harness::{Defective, Form, bid, floats, launch, tid};
use cuda_std::sim::Defect;
use cuda_std::{global, shared, thread, warp};

const SOURCE: &str = include_str!("races.rs");

/// One thread writes the block's offset and all read it, with no barrier between (HeCBench #254, marchingCubes; there
/// the compiler's code hid it from a race checker on the card).
unsafe fn missing_barrier(form: Form, out: *mut u32) {
    let offset = shared::base();
    if tid() == 0 {
        shared::store_u32(offset, 0);
    }
    thread::sync_threads();
    if tid() == 63 {
        shared::store_u32(offset, 100); // reported, named
    }
    if form == Form::Repaired {
        thread::sync_threads();
    }
    let offset = shared::load_u32(offset); // reported, named
    global::store(out.add(tid() as usize), offset + tid());
}

#[test]
fn one_thread_writes_and_all_read() {
    Defective::new(SOURCE, launch("missing_barrier", 1, 64).shared_bytes(4)).output("out", 100..164).caught(
        1,
        Defect::Race,
        "of shared memory with no barrier after the",
        |form, [out]| unsafe { missing_barrier(form, out as _) },
    );
}

/// A tile is filled, a barrier, the tile is used, and the next round fills it again while others still use it (HeCBench
/// #253, surfel; LitePT #12, RoPE).
unsafe fn one_barrier_in_a_loop(form: Form, x: *const u32, out: *mut u32) {
    let tile = shared::base();
    let mut sum = 0;
    for round in 0..3 {
        let value = global::load(x.add((64 * round + tid()) as usize));
        shared::store_u32(tile + 4 * tid(), value); // reported, named
        thread::sync_threads();
        sum += shared::load_u32(tile + 4 * (63 - tid())); // reported, named
        if form == Form::Repaired {
            thread::sync_threads();
        }
    }
    global::store(out.add(tid() as usize), sum);
}

#[test]
fn a_tile_is_filled_again() {
    Defective::new(SOURCE, launch("one_barrier_in_a_loop", 1, 64).shared_bytes(256))
        .input("x", 0..192)
        .output("out", (0..64).map(|i| 3 * (63 - i) + 192))
        .caught(1, Defect::Race, "with no barrier after the", |form, [x, out]| unsafe {
            one_barrier_in_a_loop(form, x as _, out as _)
        });
}

/// Two buffers take turns; the barrier stands between the use of one and the filling of the other, where none is
/// needed, and is missing between the filling and the next use.
unsafe fn double_buffer(form: Form, x: *const u32, out: *mut u32) {
    let tile = |round: u32| shared::base() + 256 * (round % 2) + 4 * tid();
    shared::store_u32(tile(0), global::load(x.add(tid() as usize)));
    thread::sync_threads();
    let mut sum = 0;
    for round in 0..4 {
        sum += shared::load_u32(tile(round) ^ 4); // reported, named
        if form == Form::Broken {
            thread::sync_threads();
        }
        if round < 3 {
            let value = global::load(x.add((64 * (round + 1) + tid()) as usize));
            shared::store_u32(tile(round + 1), value); // reported, named
        }
        if form == Form::Repaired {
            thread::sync_threads();
        }
    }
    global::store(out.add(tid() as usize), sum);
}

#[test]
fn a_double_buffer_with_its_barrier_astray() {
    let defective = Defective::new(SOURCE, launch("double_buffer", 1, 64).shared_bytes(512))
        .input("x", 0..256)
        .output("out", (0..64).map(|i| 4 * (i ^ 1) + 64 * 6));
    // In the first round the other buffer has never been written.
    defective.caught(4, Defect::Race, "with no barrier after the", |form, [x, out]| unsafe {
        shared::store_u32(shared::base() + 256 + 4 * tid(), 0);
        thread::sync_threads();
        double_buffer(form, x as _, out as _)
    });
}

/// The scratch of a block's sum is used a second time before all have read the first result (Fuser #489: two warp
/// reductions, then two broadcasts).
unsafe fn block_sum(form: Form, value: u32) -> u32 {
    let slots = shared::base();
    let mut sum = value;
    for step in [16, 8, 4, 2, 1] {
        sum += warp::shuffle_xor(warp::FULL_MASK, sum, step);
    }
    if form == Form::Repaired {
        thread::sync_threads();
    }
    if thread::lane() == 0 {
        shared::store_u32(slots + 4 * thread::warp_idx(), sum); // reported, named
    }
    thread::sync_threads();
    (0..thread::block_dim_x() / 32).map(|warp| shared::load_u32(slots + 4 * warp)).sum() // reported, named
}

#[test]
fn two_sums_in_one_scratch() {
    Defective::new(SOURCE, launch("block_sum", 1, 64).shared_bytes(8))
        .output("out", [2016 + 128; 64])
        .caught(1, Defect::Race, "with no barrier after the", |form, [out]| unsafe {
            let out = out as *mut u32;
            global::store(out.add(tid() as usize), block_sum(form, tid()) + block_sum(form, 2));
        });
}

/// A rotation in place: a thread takes its pair from both halves of the row and writes its own element, while the
/// partner may have written already (Megatron-LM #5963; helion #3080, where it showed on one card alone).
unsafe fn rotation_in_place(form: Form, x: *mut f32) {
    let pair = (tid() + 32) % 64;
    let other = global::load(x.add(pair as usize)); // reported, named
    let own = global::load(x.add(tid() as usize));
    if form == Form::Repaired {
        thread::sync_threads();
    }
    let rotated = if tid() < 32 { own - other } else { own + other };
    global::store(x.add(tid() as usize), rotated); // reported, named
}

#[test]
fn two_halves_in_place() {
    let before = |i: u32| (i * i) as f32;
    let after = |i: u32| if i < 32 { before(i) - before(i + 32) } else { before(i) + before(i - 32) };
    Defective::new(SOURCE, launch("rotation_in_place", 1, 64))
        .in_place("x", floats((0..64).map(before)), floats((0..64).map(after)))
        .caught(1, Defect::Race, "of `x` with no barrier after the", |form, [x]| unsafe {
            rotation_in_place(form, x as _)
        });
}

/// The last steps of a sum within a warp go without barriers, as before Volta, when its lanes ran in lockstep (HeCBench
/// #91, lsqt; FastNN #8).
unsafe fn lockstep(form: Form, out: *mut u32) {
    let place = shared::base() + 4 * tid();
    shared::store_u32(place, tid());
    warp::sync_warp(warp::FULL_MASK);
    for step in [16, 8, 4, 2, 1] {
        let other = shared::base() + 4 * ((tid() + step) % 32);
        let sum = shared::load_u32(place) + shared::load_u32(other); // reported, named
        if form == Form::Repaired {
            warp::sync_warp(warp::FULL_MASK);
        }
        shared::store_u32(place, sum); // reported, named
        if form == Form::Repaired {
            warp::sync_warp(warp::FULL_MASK);
        }
    }
    global::store(out.add(tid() as usize), shared::load_u32(place));
}

#[test]
fn lanes_do_not_run_in_lockstep() {
    Defective::new(SOURCE, launch("lockstep", 1, 32).shared_bytes(128)).output("out", [496; 32]).caught(
        1,
        Defect::Race,
        "of shared memory with no barrier after the",
        |form, [out]| unsafe { lockstep(form, out as _) },
    );
}

/// A list in shared memory is written by the lanes, then come shuffles, then other lanes read it. A shuffle makes lanes
/// wait, but orders no memory (`mmq_ids_helper` of llama.cpp #28475).
unsafe fn shuffle_is_no_barrier(form: Form, out: *mut u32) {
    let list = shared::base();
    let rank = warp::ballot(warp::FULL_MASK, tid().is_multiple_of(3)) & ((1 << tid()) - 1);
    if tid().is_multiple_of(3) {
        shared::store_u32(list + 4 * rank.count_ones(), tid()); // named
    }
    let count = warp::ballot(warp::FULL_MASK, tid().is_multiple_of(3)).count_ones();
    if form == Form::Repaired {
        warp::sync_warp(warp::FULL_MASK);
    }
    let entry = shared::load_u32(list + 4 * (count - 1 - tid() % count)); // reported
    global::store(out.add(tid() as usize), entry);
}

#[test]
fn a_shuffle_orders_no_memory() {
    Defective::new(SOURCE, launch("shuffle_is_no_barrier", 1, 32).shared_bytes(44))
        .output("out", (0..32).map(|i| 3 * (10 - i % 11)))
        .caught(1, Defect::Race, "read of byte", |form, [out]| unsafe {
            shuffle_is_no_barrier(form, out as _)
        });
}

/// Counts with a load and a store where an atomic belongs.
unsafe fn counts_without_atomics(form: Form, x: *const u32, out: *mut u32) {
    let counts = shared::base();
    if tid() < 4 {
        shared::store_u32(counts + 4 * tid(), 0);
    }
    thread::sync_threads();
    let bucket = counts + 4 * (global::load(x.add(tid() as usize)) % 4);
    match form {
        Form::Broken => {
            let count = shared::load_u32(bucket); // reported, named
            shared::store_u32(bucket, count + 1); // reported, named
        }
        Form::Repaired => _ = shared::add_u32(bucket, 1),
    }
    thread::sync_threads();
    if tid() < 4 {
        global::store(out.add(tid() as usize), shared::load_u32(counts + 4 * tid()));
    }
}

#[test]
fn a_histogram_without_atomics() {
    Defective::new(SOURCE, launch("counts_without_atomics", 1, 64).shared_bytes(16))
        .input("x", 0..64)
        .output("out", [16; 4])
        .caught(1, Defect::Race, "of shared memory", |form, [x, out]| unsafe {
            counts_without_atomics(form, x as _, out as _)
        });
}

/// One thread sets a counter to zero, and the others add to it with no barrier between (popsift #82).
unsafe fn counter_set_too_late(form: Form, out: *mut u32) {
    let counter = shared::base();
    if tid() == 0 {
        shared::store_u32(counter, 0);
    }
    thread::sync_threads();
    for round in 0..2 {
        shared::add_u32(counter, 1); // reported, named
        thread::sync_threads();
        let count = shared::load_u32(counter); // reported, named
        global::store(out.add((64 * round + tid()) as usize), count);
        if form == Form::Repaired {
            thread::sync_threads();
        }
        if tid() == 0 {
            shared::store_u32(counter, 0); // reported, named
        }
        if form == Form::Repaired {
            thread::sync_threads();
        }
    }
}

#[test]
fn atomics_against_a_store() {
    Defective::new(SOURCE, launch("counter_set_too_late", 1, 64).shared_bytes(4))
        .output("out", [64; 128])
        .caught(1, Defect::Race, "of shared memory with no barrier after the", |form, [out]| unsafe {
            counter_set_too_late(form, out as _)
        });
}

/// Two experts' blocks add their parts to a token with a load and a store each; no barrier orders blocks.
unsafe fn blocks_add_to_one_row(form: Form, out: *mut u32) {
    for part in 0..thread::grid_dim_x() {
        // Repaired, one block adds all parts.
        if part != bid() && form == Form::Broken || bid() > 0 && form == Form::Repaired {
            continue;
        }
        let sum = global::load(out.add(tid() as usize)); // reported, named
        global::store(out.add(tid() as usize), sum + part + 1); // reported, named
    }
}

#[test]
fn blocks_that_share_a_row() {
    Defective::new(SOURCE, launch("blocks_add_to_one_row", 2, 32))
        .in_place("out", [10; 32], [13; 32])
        .caught(1, Defect::Race, "of `out` with no barrier after the", |form, [out]| unsafe {
            blocks_add_to_one_row(form, out as _)
        });
}

/// A barrier of the warp between steps of a sum that spans warps.
unsafe fn barrier_of_the_wrong_scope(form: Form, out: *mut u32) {
    let place = shared::base() + 4 * tid();
    shared::store_u32(place, tid()); // named
    thread::sync_threads();
    for step in [32, 16] {
        let sum = shared::load_u32(place) + shared::load_u32(shared::base() + 4 * (tid() ^ step)); // reported, named
        match form {
            Form::Broken => warp::sync_warp(warp::FULL_MASK),
            Form::Repaired => thread::sync_threads(),
        }
        shared::store_u32(place, sum); // reported, named
        match form {
            Form::Broken => warp::sync_warp(warp::FULL_MASK),
            Form::Repaired => thread::sync_threads(),
        }
    }
    global::store(out.add(tid() as usize), shared::load_u32(place));
}

#[test]
fn a_barrier_of_the_warp_for_a_block() {
    let sum = |i: u32| (0..4).map(|k| i % 16 + 16 * k).sum();
    Defective::new(SOURCE, launch("barrier_of_the_wrong_scope", 1, 64).shared_bytes(256))
        .output("out", (0..64).map(sum))
        .caught(1, Defect::Race, "of shared memory with no barrier after the", |form, [out]| unsafe {
            barrier_of_the_wrong_scope(form, out as _)
        });
}

/// What the kernel itself has written, through the read-only path, which may have the value of before.
unsafe fn read_only_after_a_write(form: Form, x: *mut u32, out: *mut u32) {
    global::store_x4(x.add(4 * tid() as usize), [tid(); 4]); // named
    thread::sync_threads();
    let other = x.add(4 * (tid() ^ 1) as usize);
    let [value, ..] = match form {
        Form::Broken => global::load_nc_x4(other), // reported
        Form::Repaired => global::load_x4(other),
    };
    global::store(out.add(tid() as usize), value);
}

#[test]
fn a_read_only_load_of_what_was_written() {
    Defective::new(SOURCE, launch("read_only_after_a_write", 1, 64))
        .input("x", 0..256)
        .output("out", (0..64).map(|i| i ^ 1))
        .caught(1, Defect::Race, "through the read-only path", |form, [x, out]| unsafe {
            read_only_after_a_write(form, x as _, out as _)
        });
}
