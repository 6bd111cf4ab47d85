//! What the floor or the launch does not allow, and panics.

use crate::harness::{Defective, Form, launch, tid};
use cuda_std::sim::{Arch, Defect};
use cuda_std::{global, shared, thread};

const SOURCE: &str = include_str!("limits.rs");

/// A tile chosen for one card is launched on another, whose blocks have less shared memory.
unsafe fn reversed_through_shared_memory(out: *mut u32) {
    shared::store_u32(shared::base() + 4 * tid(), tid());
    thread::sync_threads();
    let value = shared::load_u32(shared::base() + 4 * (31 - tid()));
    global::store(out.add(tid() as usize), value);
}

#[test]
fn shared_memory_over_the_limit() {
    let launch = launch("reversed_through_shared_memory", 1, 32);
    for (arch, bytes, text) in [
        (Arch::Sm61, 96 << 10, "98304 bytes of shared memory per block: sm_61 has 49152"),
        (Arch::Sm80, 164 << 10, "167936 bytes of shared memory per block: sm_80 has 166912"),
        (Arch::Sm90a, 228 << 10, "233472 bytes of shared memory per block: sm_90a has 232448"),
        (Arch::Sm100, 228 << 10, "233472 bytes of shared memory per block: sm_100 has 232448"),
    ] {
        let launch = launch.arch(arch);
        Defective::new(SOURCE, launch.shared_bytes(bytes))
            .repaired(launch.shared_bytes(bytes - 48 * 1024))
            .output("out", (0..32).rev())
            .caught(1, Defect::Unsupported, text, |_, [out]| unsafe {
                reversed_through_shared_memory(out as _)
            });
    }
}

/// A tile of 33 rows of 32 threads.
unsafe fn thread_index(out: *mut u32) {
    let thread = thread::thread_idx_y() * 32 + tid();
    global::store(out.add(thread as usize), thread);
}

#[test]
fn more_threads_than_a_block_has() {
    let launch = |rows: u32| cuda_std::sim::Launch::new("thread_index", [1; 3], [32, rows, 1]);
    Defective::new(SOURCE, launch(33)).repaired(launch(32)).output("out", 0..1024).caught(
        1,
        Defect::Unsupported,
        "a block of [32, 33, 1] threads: expected 1 to 1024",
        |_, [out]| unsafe { thread_index(out as _) },
    );
}

/// A 4-bit code indexes a table of the eight magnitudes before its sign is taken off: on a card a read of whatever lies
/// behind the table, here a panic.
unsafe fn code_with_its_sign(form: Form, codes: *const u32, out: *mut f32) {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let code = global::load(codes) >> (4 * tid()) & 15; // reported
    let index = if form == Form::Broken { code } else { code & 7 };
    let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
    let value = sign * MAGNITUDES[index as usize];
    global::store(out.add(tid() as usize), value);
}

#[test]
fn an_index_beyond_a_table() {
    let text = "the kernel panicked: index out of bounds: the len is 8 but the index is";
    let values = [0.0, 0.5, 1.0, 1.5, -2.0, -3.0, -4.0, -6.0];
    Defective::new(SOURCE, launch("code_with_its_sign", 1, 8))
        .input("codes", [0xfedc_3210])
        .output("out", crate::harness::floats(values))
        .caught(1, Defect::Panic, text, |form, [codes, out]| unsafe {
            code_with_its_sign(form, codes as _, out as _)
        });
}
