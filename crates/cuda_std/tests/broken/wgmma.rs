//! `wgmma`: its registers, its operands in shared memory, its warpgroup.

use crate::harness::{Defective, Form, floats, launch, tid};
use cuda_std::sim::{Arch, Defect, Launch};
use cuda_std::wgmma::{Accumulate, Descriptor, KMajor, Swizzle};
use cuda_std::{cp_async, fence, global, mbarrier, shared, thread, tma, wgmma};
use half::bf16;

const SOURCE: &str = include_str!("wgmma.rs");

/// 64 × 16 elements, then 8 × 16 of them, an mbarrier, and 32 × 16 more.
const B: u32 = 2048;
const BARRIER: u32 = B + 256;

/// Two elements 1.0.
const ONES: u32 = 0x3f80_3f80;

/// What a thread stores of a product of ones.
const PRODUCT: [f32; 4] = [16.0; 4];

/// One warpgroup.
fn group(kernel: &'static str) -> Launch<'static> {
    launch(kernel, 1, 128).shared_bytes(BARRIER + 8)
}

/// Fills both operands with ones.
#[track_caller]
unsafe fn fill() {
    for word in (tid()..BARRIER / 4).step_by(thread::block_dim_x() as usize) {
        shared::store_u32(shared::base() + 4 * word, ONES);
    }
}

/// Issues a product of the operands.
#[track_caller]
unsafe fn multiply(sums: &mut [f32; 4], accumulate: Accumulate) {
    let a = Descriptor::<KMajor>::new(shared::base(), Swizzle::None, 128, 256);
    let b = Descriptor::<KMajor>::new(shared::base() + B, Swizzle::None, 128, 256);
    wgmma::ss::<bf16, _, _, _>(sums, a, b, accumulate);
}

#[track_caller]
unsafe fn store(out: *mut f32, sums: [f32; 4]) {
    global::store(out.cast::<[f32; 4]>().add(tid() as usize), sums);
}

/// A kernel of Hopper on a card of Blackwell, which has TMA and clusters, but other tensor cores.
unsafe fn product_on_a_later_card(form: Form, out: *mut f32) {
    let mut sums = [16.0; 4];
    if form == Form::Broken {
        wgmma::fence(); // reported
        multiply(&mut sums, Accumulate::Overwrite);
    }
    store(out, sums);
}

#[test]
fn wgmma_is_of_hopper_alone() {
    let text = "`wgmma.fence` needs sm_90a, and this is sm_100";
    Defective::new(SOURCE, group("product_on_a_later_card").arch(Arch::Sm100))
        .output("out", floats(PRODUCT.repeat(128)))
        .caught(1, Defect::Unsupported, text, |form, [out]| unsafe {
            product_on_a_later_card(form, out as _)
        });
}

/// The accumulators are stored before the wait that gives them back.
unsafe fn sums_before_the_wait(form: Form, out: *mut f32) {
    fill();
    fence::proxy_async_shared();
    thread::sync_threads();
    let mut sums = [0.0; 4];
    wgmma::fence();
    multiply(&mut sums, Accumulate::Overwrite);
    wgmma::commit_group();
    if form == Form::Repaired {
        wgmma::wait_group::<0>(&mut sums);
    }
    store(out, sums); // reported
    if form == Form::Broken {
        wgmma::wait_group::<0>(&mut sums);
    }
}

#[test]
fn accumulators_that_are_not_there_yet() {
    let text = "stores an accumulator of a `wgmma` that no `wgmma.wait_group` has given back";
    Defective::new(SOURCE, group("sums_before_the_wait"))
        .output("out", floats([PRODUCT; 128].concat()))
        .caught(1, Defect::Asynchronous, text, |form, [out]| unsafe { sums_before_the_wait(form, out as _) });
}

/// Two products are under way, and the wait before the first is stored leaves both of them so.
unsafe fn wait_for_one_product_too_few(form: Form, out: *mut f32) {
    fill();
    fence::proxy_async_shared();
    thread::sync_threads();
    let mut sums = [[0.0; 4]; 2];
    for sums in &mut sums {
        wgmma::fence();
        multiply(sums, Accumulate::Overwrite);
        wgmma::commit_group();
    }
    match form {
        Form::Broken => wgmma::wait_group::<2>(&mut sums[0]),
        Form::Repaired => wgmma::wait_group::<1>(&mut sums[0]),
    }
    store(out, sums[0]); // reported
    wgmma::wait_group::<0>(&mut sums[1]);
    store(out.add(512), sums[1]);
}

#[test]
fn a_wait_for_products_with_n_one_too_large() {
    Defective::new(SOURCE, group("wait_for_one_product_too_few"))
        .output("out", floats([PRODUCT; 256].concat()))
        .caught(1, Defect::Asynchronous, "no `wgmma.wait_group` has given back", |form, [out]| unsafe {
            wait_for_one_product_too_few(form, out as _)
        });
}

/// A stage is given back to the producer before the product that reads it was waited for (Fuser #3561, where no result
/// ever was wrong; CUTLASS #2508 asks whether that wait is needed).
unsafe fn stage_released_before_the_wait(form: Form, x: *const u32, out: *mut f32) {
    let full = shared::base() + BARRIER;
    if tid() == 0 {
        mbarrier::init(full, 1);
        mbarrier::fence_mbarrier_init();
    }
    thread::sync_threads();
    let mut sums = [0.0; 4];
    for round in 0..2 {
        if tid() == 0 {
            mbarrier::arrive_expect_tx(full, BARRIER);
            tma::load_bulk(shared::base(), x, BARRIER, full); // reported
        }
        mbarrier::wait_parity(full, round);
        wgmma::fence();
        multiply(&mut sums, Accumulate::Add); // named
        wgmma::commit_group();
        if form == Form::Repaired {
            wgmma::wait_group::<0>(&mut sums);
        }
        thread::sync_threads();
    }
    wgmma::wait_group::<0>(&mut sums);
    store(out, sums);
}

#[test]
fn a_stage_that_a_product_still_reads() {
    Defective::new(SOURCE, group("stage_released_before_the_wait"))
        .input("x", [ONES; BARRIER as usize / 4])
        .output("out", floats([32.0; 512]))
        .caught(1, Defect::Race, "no barrier after the read by a wgmma of warp", |form, [x, out]| unsafe {
            stage_released_before_the_wait(form, x as _, out as _)
        });
}

/// Two warpgroups multiply the same operands. Each waits for its own product, and the first overwrites what the
/// second's may still read (TileLang #2613: a barrier that the compiler left out).
unsafe fn wait_of_one_group(form: Form, out: *mut f32) {
    fill();
    fence::proxy_async_shared();
    thread::sync_threads();
    let mut sums = [0.0; 4];
    wgmma::fence();
    multiply(&mut sums, Accumulate::Overwrite); // reported, named
    wgmma::commit_group();
    wgmma::wait_group::<0>(&mut sums);
    if form == Form::Repaired {
        thread::sync_threads();
    }
    if tid() < 64 {
        shared::store_u32(shared::base() + B + 4 * tid(), 0); // reported, named
    }
    store(out, sums);
}

#[test]
fn two_groups_are_not_in_step() {
    Defective::new(SOURCE, launch("wait_of_one_group", 1, 256).shared_bytes(BARRIER))
        .output("out", floats([16.0; 1024]))
        .caught(1, Defect::Race, "of shared memory with no barrier after the", |form, [out]| unsafe {
            wait_of_one_group(form, out as _)
        });
}

/// Operands that ordinary stores wrote, and no proxy fence before the product.
unsafe fn operands_without_a_proxy_fence(form: Form, out: *mut f32) {
    fill(); // named
    if form == Form::Repaired {
        fence::proxy_async_shared();
    }
    thread::sync_threads();
    let mut sums = [0.0; 4];
    wgmma::fence();
    multiply(&mut sums, Accumulate::Overwrite); // reported
    wgmma::commit_group();
    wgmma::wait_group::<0>(&mut sums);
    store(out, sums);
}

#[test]
fn operands_that_may_be_stale() {
    Defective::new(SOURCE, group("operands_without_a_proxy_fence"))
        .output("out", floats([16.0; 512]))
        .caught(
            1,
            Defect::ProxyFence,
            "missing fence.proxy.async: asynchronous read",
            |form, [out]| unsafe { operands_without_a_proxy_fence(form, out as _) },
        );
}

/// Operands that `cp.async` brought: it writes as ordinary stores do, so they need the fence all the same.
unsafe fn copied_operands_without_a_proxy_fence(form: Form, x: *const u32, out: *mut f32) {
    for word in (tid()..BARRIER / 4).step_by(128) {
        cp_async::ca_4(shared::base() + 4 * word, x.add(word as usize)); // named
    }
    cp_async::wait_all();
    if form == Form::Repaired {
        fence::proxy_async_shared();
    }
    thread::sync_threads();
    let mut sums = [0.0; 4];
    wgmma::fence();
    multiply(&mut sums, Accumulate::Overwrite); // reported
    wgmma::commit_group();
    wgmma::wait_group::<0>(&mut sums);
    store(out, sums);
}

#[test]
fn copied_operands_that_may_be_stale() {
    Defective::new(SOURCE, group("copied_operands_without_a_proxy_fence"))
        .input("x", [ONES; BARRIER as usize / 4])
        .output("out", floats([16.0; 512]))
        .caught(
            1,
            Defect::ProxyFence,
            "written by ordinary stores of a cp.async of block 0",
            |form, [x, out]| unsafe { copied_operands_without_a_proxy_fence(form, x as _, out as _) },
        );
}

/// The accumulators are written and then given to the hardware, with no `wgmma.fence` between.
unsafe fn registers_without_a_fence(form: Form, out: *mut f32) {
    fill();
    fence::proxy_async_shared();
    thread::sync_threads();
    let mut sums = [1.0; 4];
    if form == Form::Repaired {
        wgmma::fence();
    }
    multiply(&mut sums, Accumulate::Add); // reported
    wgmma::commit_group();
    wgmma::wait_group::<0>(&mut sums);
    store(out, sums);
}

#[test]
fn registers_that_the_hardware_may_not_see() {
    Defective::new(SOURCE, group("registers_without_a_fence")).output("out", floats([17.0; 512])).caught(
        1,
        Defect::Asynchronous,
        "without `wgmma.fence`",
        |form, [out]| unsafe { registers_without_a_fence(form, out as _) },
    );
}

/// A block of three warps multiplies: a warpgroup is four.
unsafe fn group_of_three_warps(out: *mut f32) {
    fill();
    fence::proxy_async_shared();
    thread::sync_threads();
    let mut sums = [0.0; 4];
    wgmma::fence(); // reported
    multiply(&mut sums, Accumulate::Overwrite);
    wgmma::commit_group();
    wgmma::wait_group::<0>(&mut sums);
    store(out, sums);
}

#[test]
fn a_warpgroup_that_is_not_whole() {
    let launch = |threads| launch("group_of_three_warps", 1, threads).shared_bytes(BARRIER);
    Defective::new(SOURCE, launch(96)).repaired(launch(128)).output("out", floats([16.0; 512])).caught(
        1,
        Defect::Divergence,
        "whose warpgroup has less than four warps",
        |_, [out]| unsafe { group_of_three_warps(out as _) },
    );
}

/// The last warp of the group has nothing to store and leaves the product out.
unsafe fn product_without_the_last_warp(form: Form, out: *mut f32) {
    fill();
    fence::proxy_async_shared();
    thread::sync_threads(); // reported
    let mut sums = [0.0; 4];
    if form == Form::Repaired || tid() < 96 {
        wgmma::fence();
        multiply(&mut sums, Accumulate::Overwrite);
        wgmma::commit_group();
        wgmma::wait_group::<0>(&mut sums);
    }
    if tid() < 96 {
        store(out, sums); // reported
    }
}

#[test]
fn a_warp_that_leaves_the_product_out() {
    Defective::new(SOURCE, group("product_without_the_last_warp")).output("out", floats([16.0; 384])).caught(
        8,
        Defect::Divergence,
        "while another warp of its group executed 4",
        |form, [out]| unsafe { product_without_the_last_warp(form, out as _) },
    );
}

/// A warp waits for the product in a branch of its own, where it has something to add before the others do: its
/// `wgmma.wait_group` is not theirs. Attention's prompts on Hopper did so where a warp's scores had grown (synccheck:
/// mismatching pc between warps).
unsafe fn wait_in_a_warps_own_branch(form: Form, out: *mut f32) {
    fill();
    fence::proxy_async_shared();
    thread::sync_threads();
    let mut sums = [0.0; 4];
    let grows = tid() / 32 == 2;
    wgmma::fence();
    multiply(&mut sums, Accumulate::Overwrite);
    wgmma::commit_group();
    if form == Form::Broken && grows {
        wgmma::wait_group::<0>(&mut sums); // reported, named
        sums = sums.map(|sum| 2.0 * sum);
    }
    wgmma::wait_group::<0>(&mut sums); // reported, named
    if form == Form::Repaired && grows {
        sums = sums.map(|sum| 2.0 * sum);
    }
    store(out, sums);
}

#[test]
fn a_wait_that_is_one_warps() {
    let after = core::array::from_fn::<f32, 512, _>(|i| if i / 128 == 2 { 32.0 } else { 16.0 });
    Defective::new(SOURCE, group("wait_in_a_warps_own_branch")).output("out", floats(after)).caught(
        1,
        Defect::Divergence,
        "executes another instruction, or other operands, than the other warps of its group: `wgmma.wait_group`",
        |form, [out]| unsafe { wait_in_a_warps_own_branch(form, out as _) },
    );
}

/// Each half of the warpgroup goes to the product by a way of its own, as after a compiler that copies what follows a
/// branch.
unsafe fn product_on_both_sides_of_a_branch(form: Form, out: *mut f32) {
    fill();
    fence::proxy_async_shared();
    thread::sync_threads();
    let mut sums = [0.0; 4];
    wgmma::fence();
    // The same product in both: that is the defect.
    #[expect(clippy::if_same_then_else)]
    if form == Form::Broken && tid() < 64 {
        multiply(&mut sums, Accumulate::Overwrite); // reported, named
    } else {
        multiply(&mut sums, Accumulate::Overwrite); // reported, named
    }
    wgmma::commit_group();
    wgmma::wait_group::<0>(&mut sums);
    store(out, sums);
}

#[test]
fn a_product_at_two_places() {
    Defective::new(SOURCE, group("product_on_both_sides_of_a_branch")).output("out", floats([16.0; 512])).caught(
        1,
        Defect::Divergence,
        "executes another instruction, or other operands, than the other warps of its group: `wgmma.mma_async`",
        |form, [out]| unsafe { product_on_both_sides_of_a_branch(form, out as _) },
    );
}
