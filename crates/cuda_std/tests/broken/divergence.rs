//! Threads that do not come together where they must.

use crate::harness::{Defective, Form, floats, launch, tid};
use cuda_std::sim::Defect;
use cuda_std::{barrier, global, matrix, mma, shared, thread, warp};

const SOURCE: &str = include_str!("divergence.rs");

/// A barrier of the block in a branch that only some lanes take (TileLang #1026).
unsafe fn barrier_in_a_branch(form: Form, out: *mut u32) {
    let place = |thread: u32| shared::base() + 4 * thread;
    shared::store_u32(place(tid()), tid()); // reported
    if form == Form::Repaired {
        thread::sync_threads();
    }
    if tid().is_multiple_of(2) {
        if form == Form::Broken {
            thread::sync_threads(); // reported, cause
        }
        let other = shared::load_u32(place(tid() ^ 1));
        global::store(out.add(tid() as usize / 2), other);
    }
}

#[test]
fn a_barrier_that_half_the_lanes_reach() {
    Defective::new(SOURCE, launch("barrier_in_a_branch", 1, 64).shared_bytes(256))
        .output("out", (0..32).map(|i| 2 * i + 1))
        .caught(1, Defect::Divergence, "`bar.sync`", |form, [out]| unsafe {
            barrier_in_a_branch(form, out as _)
        });
}

/// Threads beyond the last element return at once, some of them from a warp whose others go on to a barrier (FBGEMM
/// #5857, quantisation to mx4).
unsafe fn return_before_the_barrier(form: Form, x: *const f32, out: *mut f32, n: u32) {
    shared::store_f32(shared::base() + 4 * tid(), 0.0); // reported
    if form == Form::Broken && tid() >= n {
        return;
    }
    if tid() < n {
        shared::store_f32(shared::base() + 4 * tid(), global::load(x.add(tid() as usize)));
    }
    thread::sync_threads(); // reported, cause
    if tid() < n {
        global::store(out.add(tid() as usize), shared::load_f32(shared::base() + 4 * (n - 1 - tid())));
    }
}

#[test]
fn some_return_early() {
    Defective::new(SOURCE, launch("return_before_the_barrier", 1, 64).shared_bytes(256))
        .input("x", floats((0..50).map(|i| i as f32)))
        .output("out", floats((0..50).rev().map(|i| i as f32)))
        .caught(1, Defect::Divergence, "return", |form, [x, out]| unsafe {
            return_before_the_barrier(form, x as _, out as _, 50)
        });
}

/// A loop over elements shuffles in its body with the full mask, but in the last round some lanes have none left (CUB
/// #154).
unsafe fn full_mask_in_a_tail(form: Form, x: *const u32, out: *mut u32, n: u32) {
    let end = if form == Form::Broken { n } else { n.next_multiple_of(32) };
    let mut sum = 0;
    for i in (tid()..end).step_by(32) {
        let value = if i < n { global::load(x.add(i as usize)) } else { 0 };
        sum += value + warp::shuffle_xor(warp::FULL_MASK, value, 1); // reported, named
    }
    warp::sync_warp(warp::FULL_MASK); // reported
    global::store(out.add(tid() as usize), sum);
}

#[test]
fn a_shuffle_in_the_tail_of_a_loop() {
    Defective::new(SOURCE, launch("full_mask_in_a_tail", 1, 32))
        .input("x", [1; 50])
        .output("out", (0..32).map(|i| if i < 18 { 4 } else { 2 }))
        .caught(
            1,
            Defect::Divergence,
            "of its warp, which came to something else",
            |form, [x, out]| unsafe { full_mask_in_a_tail(form, x as _, out as _, 50) },
        );
}

/// A block of 17 threads reduces with the mask of a whole warp; the maximum of negative scores came out as 0 (rvllm
/// #1).
unsafe fn lanes_that_do_not_exist(form: Form, x: *const f32, out: *mut f32) {
    let mut largest = global::load(x.add(tid() as usize));
    let mask = if form == Form::Broken { warp::FULL_MASK } else { (1 << thread::block_dim_x()) - 1 };
    for step in [16, 8, 4, 2, 1] {
        let from = (tid() + step).min(16);
        let other = warp::shuffle_idx(mask, largest.to_bits(), from); // reported
        largest = largest.max(f32::from_bits(other));
    }
    if tid() == 0 {
        global::store(out, largest);
    }
}

#[test]
fn a_block_smaller_than_a_warp() {
    let text = "lanes 17 to 31, which the warp does not have";
    Defective::new(SOURCE, launch("lanes_that_do_not_exist", 1, 17))
        .input("x", floats((0..17).map(|i| -1.0 - (i * 5 % 17) as f32)))
        .output("out", floats([-1.0]))
        .caught(1, Defect::Divergence, text, |form, [x, out]| unsafe {
            lanes_that_do_not_exist(form, x as _, out as _)
        });
}

/// The right operand of `&&` is a vote, which the lanes whose left operand is false never come to.
unsafe fn vote_in_a_short_circuit(form: Form, x: *const u32, out: *mut u32) {
    let value = global::load(x.add(tid() as usize));
    let found = match form {
        Form::Broken => value > 3 && warp::any(warp::FULL_MASK, value == 7), // reported, named
        Form::Repaired => warp::any(warp::FULL_MASK, value == 7) && value > 3,
    };
    warp::sync_warp(warp::FULL_MASK); // reported
    global::store(out.add(tid() as usize), found.into());
}

#[test]
fn a_vote_that_some_skip() {
    Defective::new(SOURCE, launch("vote_in_a_short_circuit", 1, 32))
        .input("x", (0..32).map(|i| i % 8))
        .output("out", (0..32).map(|i| (i % 8 > 3).into()))
        .caught(
            1,
            Defect::Divergence,
            "of its warp, which came to something else",
            |form, [x, out]| unsafe { vote_in_a_short_circuit(form, x as _, out as _) },
        );
}

/// Half a warp shuffles with the mask of its half, but takes values from the other.
unsafe fn source_outside_the_mask(form: Form, out: *mut u32) {
    let half = if tid() < 16 { 0xffff } else { 0xffff_0000 };
    let step = if form == Form::Broken { 16 } else { 8 };
    let other = warp::shuffle_xor(half, tid(), step); // reported
    global::store(out.add(tid() as usize), other);
}

#[test]
fn a_shuffle_from_outside_its_mask() {
    Defective::new(SOURCE, launch("source_outside_the_mask", 1, 32))
        .output("out", (0..32).map(|i| i ^ 8))
        .caught(1, Defect::Divergence, "which is not in the mask 0xffff", |form, [out]| unsafe {
            source_outside_the_mask(form, out as _)
        });
}

/// Lanes of one warp come to different shuffles in the branches of an `if`. Before Volta even equal masks did not help.
unsafe fn shuffles_in_two_branches(form: Form, out: *mut u32) {
    let doubled = 2 * tid();
    let mine = if form == Form::Repaired {
        let mine = if tid() < 16 { tid() } else { doubled };
        warp::shuffle_xor(warp::FULL_MASK, mine, 16)
    } else if tid() < 16 {
        warp::shuffle_xor(warp::FULL_MASK, tid(), 16) // reported, named
    } else {
        warp::shuffle_xor(warp::FULL_MASK, doubled, 16) // reported, named
    };
    global::store(out.add(tid() as usize), mine);
}

#[test]
fn a_shuffle_in_both_branches_on_pascal() {
    let launch = launch("shuffles_in_two_branches", 1, 32).arch(cuda_std::sim::Arch::Sm61);
    Defective::new(SOURCE, launch).output("out", (32..64).step_by(2).chain(0..16)).caught(
        1,
        Defect::Divergence,
        "`shfl.sync.bfly` waits for lanes",
        |form, [out]| unsafe { shuffles_in_two_branches(form, out as _) },
    );
}

/// Two groups of warps use the same named barrier, each with a count of its own (FlashInfer #4533, which hung now and
/// then).
unsafe fn one_barrier_for_two_groups(form: Form, out: *mut u32) {
    let group = u32::from(tid() >= 64);
    shared::store_u32(shared::base() + 4 * tid(), tid());
    let id = if form == Form::Broken { 1 } else { 1 + group };
    match group {
        0 => barrier::sync(id, 64), // reported
        _ => barrier::sync(id, 96), // reported
    }
    let threads = if group == 0 { 64 } else { 96 };
    let neighbour = 64 * group + (tid() - 64 * group + 1) % threads;
    global::store(out.add(tid() as usize), shared::load_u32(shared::base() + 4 * neighbour));
}

#[test]
fn a_barrier_with_two_counts() {
    let neighbour = |i: u32| if i < 64 { (i + 1) % 64 } else { 64 + (i - 63) % 96 };
    Defective::new(SOURCE, launch("one_barrier_for_two_groups", 1, 160).shared_bytes(640))
        .output("out", (0..160).map(neighbour))
        .caught(4, Defect::Divergence, "while others wait at it for", |form, [out]| unsafe {
            one_barrier_for_two_groups(form, out as _)
        });
}

/// `ldmatrix` in a branch that half a warp takes: it is for whole warps.
unsafe fn fragment_of_half_a_warp(form: Form, out: *mut u32) {
    shared::store_u32(shared::base() + 4 * tid(), tid());
    warp::sync_warp(warp::FULL_MASK); // reported
    let row = shared::base() + 16 * (tid() % 8);
    if form == Form::Repaired || tid() < 16 {
        let [fragment] = matrix::load_x1(row); // reported, cause
        global::store(out.add(tid() as usize), fragment);
    }
}

#[test]
fn a_fragment_loaded_by_part_of_a_warp() {
    Defective::new(SOURCE, launch("fragment_of_half_a_warp", 1, 32).shared_bytes(128))
        .output("out", 0..32)
        .caught(1, Defect::Divergence, "`ldmatrix.sync`", |form, [out]| unsafe {
            fragment_of_half_a_warp(form, out as _)
        });
}

/// The tensor cores' product in a branch that depends on the lane: rows beyond the matrix's end are left out.
unsafe fn product_of_some_lanes(form: Form, out: *mut f32) {
    const ONES: u32 = 0x3f80_3f80;
    let row = tid() / 4;
    let mut sums = [0.0; 4];
    if form == Form::Repaired || row < 5 {
        sums = mma::m16n8k16_f32_bf16([ONES; 4], [ONES; 2], sums); // reported, cause
    }
    warp::sync_warp(warp::FULL_MASK); // reported
    if row < 5 {
        global::store(out.add(tid() as usize), sums[0]);
    }
}

#[test]
fn a_product_by_part_of_a_warp() {
    Defective::new(SOURCE, launch("product_of_some_lanes", 1, 32)).output("out", floats([16.0; 20])).caught(
        1,
        Defect::Divergence,
        "of its warp, which came to something else",
        |form, [out]| unsafe { product_of_some_lanes(form, out as _) },
    );
}
