//! Blocks of a cluster that reach into each other's shared memory.

use crate::harness::{Defective, Form, bid, launch, tid};
use cuda_std::sim::{Defect, Launch};
use cuda_std::{cluster, global, mbarrier, shared, thread, warp};

const SOURCE: &str = include_str!("clusters.rs");

/// Two clusters of two blocks of a warp each.
fn pairs(kernel: &'static str) -> Launch<'static> {
    launch(kernel, 4, 32).cluster([2, 1, 1]).shared_bytes(136)
}

fn other_block() -> u32 {
    1 - cluster::block_rank()
}

/// The other block of the pair of thread `i` of the grid.
fn partner(i: u32) -> u32 {
    (i / 32) ^ 1
}

fn place() -> u32 {
    shared::base() + 4 * tid()
}

/// A block reads its neighbour's shared memory after a barrier of its own block alone.
unsafe fn barrier_of_one_block(form: Form, out: *mut u32) {
    shared::store_u32(place(), 0);
    cluster::sync();
    shared::store_u32(place(), 100 * bid() + tid()); // reported, named
    match form {
        Form::Broken => thread::sync_threads(),
        Form::Repaired => cluster::sync(),
    }
    let value = cluster::load_u32(cluster::map_shared(place(), other_block())); // reported, named
    global::store(out.add((32 * bid() + tid()) as usize), value);
    cluster::sync();
}

#[test]
fn a_barrier_of_the_block_for_a_cluster() {
    Defective::new(SOURCE, pairs("barrier_of_one_block"))
        .output("out", (0..128).map(|i| 100 * partner(i) + i % 32))
        .caught(1, Defect::Race, "with no barrier after the", |form, [out]| unsafe {
            barrier_of_one_block(form, out as _)
        });
}

/// The cluster's barrier is split, and the arrival is the relaxed one, which releases no writes.
unsafe fn arrival_that_releases_nothing(form: Form, out: *mut u32) {
    shared::store_u32(place(), 100 * bid() + tid()); // named
    match form {
        Form::Broken => cluster::arrive_relaxed(),
        Form::Repaired => cluster::arrive(),
    }
    cluster::wait();
    let value = cluster::load_u32(cluster::map_shared(place(), other_block())); // reported
    global::store(out.add((32 * bid() + tid()) as usize), value);
    cluster::sync();
}

#[test]
fn a_relaxed_arrival() {
    Defective::new(SOURCE, pairs("arrival_that_releases_nothing"))
        .output("out", (0..128).map(|i| 100 * partner(i) + i % 32))
        .caught(1, Defect::Race, "with no barrier after the write by block", |form, [out]| unsafe {
            arrival_that_releases_nothing(form, out as _)
        });
}

/// The right neighbour of the last block is one more than there are.
unsafe fn neighbour_without_wrapping(form: Form, out: *mut u32) {
    let (rank, blocks) = (cluster::block_rank(), cluster::num_blocks());
    shared::store_u32(place(), bid());
    cluster::sync();
    let right = if form == Form::Broken { rank + 1 } else { (rank + 1) % blocks };
    let place = cluster::map_shared(place(), right); // reported
    global::store(out.add((32 * bid() + tid()) as usize), cluster::load_u32(place));
    cluster::sync();
}

#[test]
fn a_block_that_the_cluster_lacks() {
    Defective::new(SOURCE, pairs("neighbour_without_wrapping")).output("out", (0..128).map(partner)).caught(
        1,
        Defect::OutOfBounds,
        "`mapa.shared::cluster` to block 2 of a cluster of 2",
        |form, [out]| unsafe { neighbour_without_wrapping(form, out as _) },
    );
}

/// A block arrives at its neighbour's mbarrier, whose initialisation was not made visible to the cluster.
unsafe fn remote_arrival_without_fence(form: Form, out: *mut u32) {
    let full = shared::base() + 128;
    if tid() == 0 {
        mbarrier::init(full, 32); // named
        if form == Form::Repaired {
            mbarrier::fence_mbarrier_init();
        }
    }
    cluster::sync();
    cluster::store_u32(cluster::map_shared(place(), other_block()), bid());
    mbarrier::arrive_remote_release(cluster::map_shared(full, other_block())); // reported
    mbarrier::wait_parity_cluster(full, 0);
    global::store(out.add((32 * bid() + tid()) as usize), shared::load_u32(place()));
    cluster::sync();
}

#[test]
fn an_mbarrier_that_the_cluster_may_not_see() {
    Defective::new(SOURCE, pairs("remote_arrival_without_fence"))
        .output("out", (0..128).map(partner))
        .caught(1, Defect::ProxyFence, "missing fence.mbarrier_init", |form, [out]| unsafe {
            remote_arrival_without_fence(form, out as _)
        });
}

/// Two arrivals at the cluster's barrier with no wait between.
unsafe fn arrival_without_wait(form: Form, out: *mut u32) {
    shared::store_u32(place(), bid());
    cluster::arrive();
    if form == Form::Repaired {
        cluster::wait();
    }
    cluster::arrive(); // reported
    cluster::wait();
    let value = cluster::load_u32(cluster::map_shared(place(), other_block()));
    global::store(out.add((32 * bid() + tid()) as usize), value);
    cluster::sync();
}

#[test]
fn two_arrivals_and_one_wait() {
    let text = "`barrier.cluster.arrive` twice without `barrier.cluster.wait` between";
    Defective::new(SOURCE, pairs("arrival_without_wait")).output("out", (0..128).map(partner)).caught(
        2,
        Defect::Divergence,
        text,
        |form, [out]| unsafe { arrival_without_wait(form, out as _) },
    );
}

/// A block ends while its neighbour may still read its shared memory (Triton #11730: the launch fails on some cards).
unsafe fn end_under_a_reader(form: Form, out: *mut u32) {
    shared::store_u32(place(), bid()); // reported
    cluster::sync(); // reported
    let rank = cluster::block_rank(); // reported
    if rank == 0 {
        let value = cluster::load_u32(cluster::map_shared(place(), 1)); // reported, cause
        global::store(out.add((16 * bid() + tid()) as usize), value);
    }
    if form == Form::Repaired {
        cluster::sync();
    }
}

#[test]
fn a_block_that_ends_under_a_reader() {
    Defective::new(SOURCE, pairs("end_under_a_reader"))
        .output("out", (0..64).map(|i| i / 32 * 2 + 1))
        .caught(
            1,
            Defect::Race,
            "the block ends with no barrier of the cluster after the read in its shared memory by block",
            |form, [out]| unsafe { end_under_a_reader(form, out as _) },
        );
}

/// A block writes into its neighbour's shared memory before it can know that the neighbour has started
/// (facebookexperimental/triton #2292).
unsafe fn store_before_the_start(form: Form, out: *mut u32) {
    if form == Form::Repaired {
        cluster::sync();
    }
    cluster::store_u32(cluster::map_shared(place(), other_block()), bid()); // reported
    cluster::sync();
    global::store(out.add((32 * bid() + tid()) as usize), shared::load_u32(place()));
}

#[test]
fn a_block_that_may_not_have_started() {
    Defective::new(SOURCE, pairs("store_before_the_start")).output("out", (0..128).map(partner)).caught(
        1,
        Defect::Race,
        "may not have started",
        |form, [out]| unsafe { store_before_the_start(form, out as _) },
    );
}

/// A consumer gives a stage back to a producer in the other block, which has nothing more to load and ends (what the
/// *producer tail* of pipelines is for).
unsafe fn end_under_an_arrival(form: Form, out: *mut u32) {
    let (full, empty) = (shared::base() + 128, shared::base() + 136);
    if tid() == 0 {
        mbarrier::init(full, 1);
        mbarrier::init(empty, 32);
        mbarrier::fence_mbarrier_init();
    }
    cluster::sync();
    if cluster::block_rank() == 0 {
        // Produces for the other block.
        cluster::store_u32(cluster::map_shared(place(), 1), 7 + tid());
        warp::sync_warp(warp::FULL_MASK); // reported
        if tid() == 0 {
            mbarrier::arrive_remote_release(cluster::map_shared(full, 1)); // reported
        }
        if form == Form::Repaired {
            mbarrier::wait_parity_cluster(empty, 0);
        }
    } else {
        mbarrier::wait_parity_cluster(full, 0);
        let value = shared::load_u32(place());
        global::store(out.add((16 * (bid() - 1) + tid()) as usize), value);
        mbarrier::arrive_remote(cluster::map_shared(empty, 0)); // reported, cause
    }
}

#[test]
fn a_producer_that_ends_before_its_consumer() {
    let text = "arrival at an mbarrier in ";
    Defective::new(SOURCE, pairs("end_under_an_arrival").shared_bytes(144))
        .output("out", (0..64).map(|i| 7 + i % 32))
        .caught(1, Defect::Race, text, |form, [out]| unsafe { end_under_an_arrival(form, out as _) });
}

/// Another block's shared memory by the block's own load, whose addresses are of its own window.
unsafe fn load_of_ones_own(form: Form, out: *mut u32) {
    shared::store_u32(place(), 100 * bid() + tid());
    cluster::sync();
    let other = cluster::map_shared(place(), other_block());
    let value = match form {
        Form::Broken => shared::load_u32(other), // reported
        Form::Repaired => cluster::load_u32(other),
    };
    global::store(out.add((32 * bid() + tid()) as usize), value);
    cluster::sync();
}

#[test]
fn a_load_that_reaches_its_own_block_alone() {
    Defective::new(SOURCE, pairs("load_of_ones_own"))
        .output("out", (0..128).map(|i| 100 * partner(i) + i % 32))
        .caught(1, Defect::OutOfBounds, "by an instruction for the block's own", |form, [out]| unsafe {
            load_of_ones_own(form, out as _)
        });
}

/// The cluster's barrier in two branches of a warp: its instructions are `.aligned`.
unsafe fn barrier_in_two_branches(form: Form, out: *mut u32) {
    shared::store_u32(place(), 100 * bid() + tid());
    if form == Form::Broken && tid() < 16 {
        cluster::sync(); // reported
    } else {
        cluster::arrive(); // reported
        cluster::wait();
    }
    let value = cluster::load_u32(cluster::map_shared(place(), other_block()));
    global::store(out.add((32 * bid() + tid()) as usize), value);
    cluster::sync();
}

#[test]
fn a_cluster_barrier_of_half_a_warp() {
    Defective::new(SOURCE, pairs("barrier_in_two_branches"))
        .output("out", (0..128).map(|i| 100 * partner(i) + i % 32))
        .caught(1, Defect::Divergence, "`barrier.cluster.arrive`", |form, [out]| unsafe {
            barrier_in_two_branches(form, out as _)
        });
}
