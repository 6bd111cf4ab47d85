//! Accesses at addresses that are no multiple of their size.

use crate::harness::{Defective, Form, bid, floats, launch, tid};
use cuda_std::sim::Defect;
use cuda_std::{global, matrix, shared, thread};

const SOURCE: &str = include_str!("alignment.rs");

/// Rows are loaded 16 bytes at a time and are 7 elements apart: from the second row on, the address is odd (CUTLASS
/// #49, FlashInfer #634, mahout #1107).
unsafe fn odd_row_stride(form: Form, x: *const f32, out: *mut f32, stride: u32) {
    let row = x.add((bid() * stride) as usize);
    let values = if form == Form::Broken || row.addr().is_multiple_of(16) {
        global::load_x4(row).map(f32::from_bits) // reported
    } else {
        [0, 1, 2, 3].map(|i| global::load(row.add(i)))
    };
    global::store(out.add(bid() as usize), values.iter().sum());
}

#[test]
fn vectors_of_rows_with_an_odd_stride() {
    let sum = |row: i32| (0..4).map(|i| (7 * row + i) as f32).sum();
    Defective::new(SOURCE, launch("odd_row_stride", 3, 1))
        .input("x", floats((0..21).map(|i| i as f32)))
        .output("out", floats((0..3).map(sum)))
        .caught(1, Defect::Misaligned, "of `x`, which is not aligned to 16 bytes", |form, [x, out]| unsafe {
            odd_row_stride(form, x as _, out as _, 7)
        });
}

/// A view that starts inside a larger buffer is written with vectors, since "buffers are aligned to 256 bytes"
/// (tokenspeed #683, sampling).
unsafe fn view_with_an_offset(form: Form, out: *mut f32) {
    let view = out.add(2);
    if form == Form::Broken {
        global::store_x4(view.add(4 * tid() as usize), [1.0f32.to_bits(); 4]); // reported
    } else {
        (0..4).for_each(|i| global::store(view.add((4 * tid() + i) as usize), 1.0));
    }
}

#[test]
fn vectors_of_a_view() {
    let after = (0..34).map(|i| if i < 2 { 0.0 } else { 1.0 });
    Defective::new(SOURCE, launch("view_with_an_offset", 1, 8))
        .in_place("out", [0; 34], floats(after))
        .caught(1, Defect::Misaligned, "of `out`, which is not aligned to 16 bytes", |form, [out]| unsafe {
            view_with_an_offset(form, out as _)
        });
}

/// Rows of shared memory are padded by one word against bank conflicts, and then loaded 16 bytes at a time.
unsafe fn padded_rows(form: Form, out: *mut u32) {
    let stride = if form == Form::Broken { 4 * 33 } else { 4 * 36 };
    for row in 0..4 {
        shared::store_u32(shared::base() + stride * row + 4 * tid(), 32 * row + tid());
    }
    thread::sync_threads();
    let (row, piece) = (tid() / 8, tid() % 8);
    let values = shared::load_u32x4(shared::base() + stride * row + 16 * piece); // reported
    global::store(out.add(tid() as usize), values.iter().sum());
}

#[test]
fn vectors_of_padded_shared_memory() {
    Defective::new(SOURCE, launch("padded_rows", 1, 32).shared_bytes(4 * 144))
        .output("out", (0..32).map(|i| 16 * i + 6))
        .caught(
            1,
            Defect::Misaligned,
            "of shared memory, which is not aligned to 16 bytes",
            |form, [out]| unsafe { padded_rows(form, out as _) },
        );
}

/// Rows of a tile are padded by four bytes, and `ldmatrix` reads 16-byte rows.
unsafe fn padded_rows_of_a_fragment(form: Form, out: *mut u32) {
    let stride = if form == Form::Broken { 20 } else { 32 };
    let (row, column) = (tid() / 4, tid() % 4);
    shared::store_u32(shared::base() + stride * row + 4 * column, tid());
    thread::sync_threads();
    let [fragment] = matrix::load_x1(shared::base() + stride * (tid() % 8)); // reported
    global::store(out.add(tid() as usize), fragment);
}

#[test]
fn rows_of_a_fragment() {
    Defective::new(SOURCE, launch("padded_rows_of_a_fragment", 1, 32).shared_bytes(256))
        .output("out", 0..32)
        .caught(1, Defect::Misaligned, "which is not aligned to 16 bytes", |form, [out]| unsafe {
            padded_rows_of_a_fragment(form, out as _)
        });
}
