//! Boxes of tensors that the tensor memory accelerator copies.

use crate::harness::{Defective, Form, bid, launch, tid};
use cuda_std::sim::tensor_map::{Element, Fill, Tiled, encode};
use cuda_std::sim::{Defect, Launch};
use cuda_std::tma::TensorMap;
use cuda_std::wgmma::Swizzle;
use cuda_std::{cluster, fence, global, mbarrier, shared, thread, tma};

const SOURCE: &str = include_str!("tensors.rs");

/// A matrix of words with 32 columns, and boxes of so many of its rows.
fn map(address: u64, rows: u64, box_rows: u32, swizzle: Swizzle) -> TensorMap {
    encode(&Tiled {
        element: Element::U32,
        address,
        dims: &[32, rows],
        strides_bytes: &[128],
        box_dims: &[32, box_rows],
        element_strides: &[1, 1],
        swizzle,
        fill: Fill::Zeros,
    })
    .expect("a map that the driver takes too")
}

/// Where the mbarrier is: behind two boxes of 8 rows.
const BARRIER: u32 = 2048;

fn warp(kernel: &'static str) -> Launch<'static> {
    launch(kernel, 1, 32).shared_bytes(BARRIER + 16)
}

/// One thread sets up the mbarrier; a barrier of the block follows.
#[track_caller]
unsafe fn set_up() -> u32 {
    let full = shared::base() + BARRIER;
    if tid() == 0 {
        mbarrier::init(full, 1);
        mbarrier::fence_mbarrier_init();
    }
    thread::sync_threads();
    full
}

/// A box that is swizzled over 128 bytes starts at a multiple of 128, not of 1024. The card swizzles by the address,
/// the kernel by the offset in the box, and the values are wrong (TileLang #2379).
unsafe fn destination_off_the_swizzle(form: Form, map: &TensorMap, out: *mut u32) {
    let full = set_up();
    let tile = shared::base() + if form == Form::Broken { 128 } else { 1024 };
    if tid() == 0 {
        mbarrier::arrive_expect_tx(full, 1024);
        tma::load(tile, map, [0, 0], full); // reported
    }
    mbarrier::wait_parity(full, 0);
    for row in 0..8 {
        let piece = (tid() / 4) ^ row;
        let value = shared::load_u32(tile + 128 * row + 16 * piece + 4 * (tid() % 4));
        global::store(out.add((32 * row + tid()) as usize), value);
    }
}

#[test]
fn a_swizzled_box_at_the_wrong_place() {
    let text = "in shared memory, which is not aligned to 1024 bytes";
    Defective::new(SOURCE, warp("destination_off_the_swizzle"))
        .input("x", 0..256)
        .output("out", 0..256)
        .caught(1, Defect::Misaligned, text, |form, [x, out]| unsafe {
            destination_off_the_swizzle(form, &map(x, 8, 8, Swizzle::Bytes128), out as _)
        });
}

/// The last box reaches over the tensor's end, and only the bytes inside are announced. The card counts the whole box,
/// zeros included (mirage #705 had the two apart as well).
unsafe fn bytes_of_the_clipped_box(form: Form, map: &TensorMap, out: *mut u32, rows: u32) {
    let full = set_up();
    for round in 0..rows.div_ceil(8) {
        let inside = (rows - 8 * round).min(8);
        if tid() == 0 {
            let announced = if form == Form::Broken { 128 * inside } else { 1024 };
            mbarrier::arrive_expect_tx(full, announced);
            tma::load(shared::base(), map, [0, 8 * round as i32], full);
        }
        mbarrier::wait_parity(full, round & 1); // named
        for row in 0..inside {
            let value = shared::load_u32(shared::base() + 128 * row + 4 * tid());
            global::store(out.add((32 * (8 * round + row) + tid()) as usize), value);
        }
        thread::sync_threads();
    }
}

#[test]
fn a_box_over_the_edge() {
    let text = "wait for the phase of parity 1 of the mbarrier at byte 2048";
    Defective::new(SOURCE, warp("bytes_of_the_clipped_box")).input("x", 0..352).output("out", 0..352).caught(
        4,
        Defect::Deadlock,
        text,
        |form, [x, out]| unsafe {
            bytes_of_the_clipped_box(form, &map(x, 11, 8, Swizzle::None), out as _, 11)
        },
    );
}

/// The map was made for boxes of 16 rows, and shared memory is laid out for 8.
unsafe fn box_larger_than_its_stage(form: Form, map: &TensorMap, out: *mut u32) {
    let full = set_up();
    let (stage, bytes) = (shared::base() + 1024, if form == Form::Broken { 2048 } else { 1024 });
    if tid() == 0 {
        mbarrier::arrive_expect_tx(full, bytes);
        tma::load(stage, map, [0, 0], full); // reported
    }
    mbarrier::wait_parity(full, 0);
    for row in 0..8 {
        let value = shared::load_u32(stage + 128 * row + 4 * tid());
        global::store(out.add((32 * row + tid()) as usize), value);
    }
}

#[test]
fn a_box_of_another_size() {
    Defective::new(SOURCE, warp("box_larger_than_its_stage"))
        .input("x", 0..512)
        .output("out", 0..256)
        .caught(
            1,
            Defect::Mbarrier,
            "of shared memory, which belongs to an mbarrier",
            |form, [x, out]| unsafe {
                let box_rows = if form == Form::Broken { 16 } else { 8 };
                box_larger_than_its_stage(form, &map(x, 16, box_rows, Swizzle::None), out as _)
            },
        );
}

/// Blocks are 6 rows apart and store boxes of 8: neighbours write the same rows.
unsafe fn boxes_that_overlap(form: Form, map: &TensorMap) {
    for row in 0..8 {
        shared::store_u32(shared::base() + 128 * row + 4 * tid(), bid());
    }
    fence::proxy_async_shared();
    thread::sync_threads();
    if tid() == 0 {
        let rows = if form == Form::Broken { 6 } else { 8 };
        tma::store(map, [0, (rows * bid()) as i32], shared::base()); // reported, named
        tma::commit_group();
        tma::wait_group_read::<0>();
    }
}

#[test]
fn two_blocks_store_the_same_rows() {
    let text = "with no barrier after the asynchronous write by";
    Defective::new(SOURCE, launch("boxes_that_overlap", 2, 32).shared_bytes(1024))
        .output("out", (0..512).map(|i| i / 256))
        .caught(1, Defect::Race, text, |form, [out]| unsafe {
            boxes_that_overlap(form, &map(out, 16, 8, Swizzle::None))
        });
}

/// The kernel addresses a matrix by three coordinates.
unsafe fn coordinates_of_another_rank(form: Form, map: &TensorMap, out: *mut u32) {
    let full = set_up();
    if tid() == 0 {
        mbarrier::arrive_expect_tx(full, 1024);
        match form {
            Form::Broken => tma::load(shared::base(), map, [0, 0, 0], full), // reported
            Form::Repaired => tma::load(shared::base(), map, [0, 0], full),
        }
    }
    mbarrier::wait_parity(full, 0);
    global::store(out.add(tid() as usize), shared::load_u32(shared::base() + 4 * tid()));
}

#[test]
fn coordinates_that_do_not_fit_the_map() {
    Defective::new(SOURCE, warp("coordinates_of_another_rank"))
        .input("x", 0..256)
        .output("out", 0..32)
        .caught(1, Defect::Unsupported, "with 3 coordinates and a map of rank 2", |form, [x, out]| unsafe {
            coordinates_of_another_rank(form, &map(x, 8, 8, Swizzle::None), out as _)
        });
}

/// A box goes to both blocks of a cluster, but one of them may not have set up its mbarrier yet: the cluster's barrier
/// releases nothing, and the fence is none for other blocks.
unsafe fn multicast_before_the_other_is_ready(form: Form, map: &TensorMap, out: *mut u32) {
    let full = shared::base() + BARRIER;
    if tid() == 0 {
        mbarrier::init(full, 1); // named
        match form {
            Form::Broken => fence::proxy_async_shared(),
            Form::Repaired => mbarrier::fence_mbarrier_init(),
        }
        mbarrier::arrive_expect_tx(full, 1024);
    }
    thread::sync_threads();
    cluster::arrive_relaxed();
    cluster::wait();
    if cluster::block_rank() == 0 && tid() == 0 {
        tma::load_multicast(shared::base(), map, [0, 0], full, 0b11); // reported
    }
    mbarrier::wait_parity(full, 0);
    let value = shared::load_u32(shared::base() + 4 * tid());
    global::store(out.add((32 * bid() + tid()) as usize), value);
}

#[test]
fn a_multicast_to_a_block_that_is_not_ready() {
    let text = "with no barrier after its initialisation by block 1, thread 0";
    Defective::new(
        SOURCE,
        launch("multicast_before_the_other_is_ready", 2, 32).shared_bytes(BARRIER + 16).cluster([2, 1, 1]),
    )
    .input("x", 0..256)
    .output("out", (0..64).map(|i| i % 32))
    .caught(1, Defect::Race, text, |form, [x, out]| unsafe {
        multicast_before_the_other_is_ready(form, &map(x, 8, 8, Swizzle::None), out as _)
    });
}

/// No tensor map at all, where a launch has left a place for one empty.
unsafe fn no_map(form: Form, map: *const TensorMap, out: *mut u32) {
    let map = if form == Form::Broken { core::ptr::null() } else { map };
    if tid() == 0 {
        tma::prefetch(map, [0, 0]); // reported
    }
    global::store(out.add(tid() as usize), tid());
}

#[test]
fn a_map_that_is_not_there() {
    Defective::new(SOURCE, warp("no_map")).input("x", 0..256).output("out", 0..32).caught(
        1,
        Defect::Unsupported,
        "without a tensor map",
        |form, [x, out]| unsafe { no_map(form, &map(x, 8, 8, Swizzle::Bytes128), out as _) },
    );
}
