//! Accesses outside the buffers, outside shared memory, and in gaps between rows.

use crate::harness::{Defective, Form, bid, floats, launch, tid};
use cuda_std::sim::Defect;
use cuda_std::{global, shared, thread, warp};

const SOURCE: &str = include_str!("bounds.rs");

/// A warp takes 32 words of 4-bit weights at a time, and the row has 20. What is read past its end is multiplied by the
/// zeros that pad `x`, so the sums are right (llama.cpp #2144, `vec_dot_q4_0_q8_1`).
unsafe fn quantised_tail(form: Form, weights: *const u32, x: *const f32, out: *mut f32, words: u32) {
    let lane = tid();
    let mut sum = 0.0;
    for word in (lane..words.next_multiple_of(32)).step_by(32) {
        if form == Form::Repaired && word >= words {
            continue;
        }
        let packed = global::load(weights.add(word as usize)); // reported
        for i in 0..8 {
            let weight = (packed >> (4 * i) & 15) as f32 - 8.0;
            sum += weight * global::load(x.add((8 * word + i) as usize));
        }
    }
    let sum = warp::sum_f32::<32>(sum);
    if lane == 0 {
        global::store(out, sum);
    }
}

#[test]
fn the_tail_of_a_quantised_row() {
    let x = |i: usize| if i < 160 { (i % 7) as f32 } else { 0.0 };
    let weight = |i: usize| (i % 16) as f32 - 8.0;
    let sum = (0..160).map(|i| weight(i) * x(i)).sum();
    Defective::new(SOURCE, launch("quantised_tail", 1, 32))
        .input("weights", [0x7654_3210, 0xfedc_ba98].repeat(10))
        .input("x", floats((0..256).map(x)))
        .output("out", floats([sum]))
        .caught(
            1,
            Defect::OutOfBounds,
            "of `weights`, which has 80 bytes",
            |form, [weights, x, out]| unsafe { quantised_tail(form, weights as _, x as _, out as _, 20) },
        );
}

/// A block takes two rows, and the number of rows is odd: the last block computes with a row that is not there and
/// drops the result (llama.cpp #23539, `mul_mat_vec_q`).
unsafe fn rows_beyond_the_last(form: Form, x: *const f32, out: *mut f32, rows: u32) {
    for row in 2 * bid()..2 * bid() + 2 {
        if form == Form::Repaired && row >= rows {
            break;
        }
        let value = global::load(x.add((32 * row + tid()) as usize)); // reported
        let sum = warp::sum_f32::<32>(value);
        if tid() == 0 && row < rows {
            global::store(out.add(row as usize), sum);
        }
    }
}

#[test]
fn a_block_with_fewer_rows() {
    Defective::new(SOURCE, launch("rows_beyond_the_last", 3, 32))
        .input("x", floats((0..160).map(|i| (i / 32) as f32)))
        .output("out", floats((0..5).map(|row| 32.0 * row as f32)))
        .caught(
            1,
            Defect::OutOfBounds,
            "read of 4 bytes out of bounds: at byte 6",
            |form, [x, out]| unsafe { rows_beyond_the_last(form, x as _, out as _, 5) },
        );
}

/// 16-byte loads run over the end of a row of 21 elements into the gap before the next one: inside the buffer, so a
/// check of the buffer's bounds alone would not see it (FlagGems #5230: a tail loaded whole, with right results).
unsafe fn vectors_over_a_rows_end(form: Form, x: *const f32, out: *mut f32, cols: u32, stride: u32) {
    let row = bid();
    let first = 4 * tid();
    if first >= cols {
        return;
    }
    let x = x.add((row * stride + first) as usize);
    let out = out.add((row * cols + first) as usize);
    if form == Form::Repaired && first + 4 > cols {
        for i in 0..(cols - first) as usize {
            global::store(out.add(i), global::load(x.add(i)));
        }
        return;
    }
    let values = global::load_x4(x); // reported
    for (i, value) in values.into_iter().enumerate().take((cols - first) as usize) {
        global::store(out.add(i), f32::from_bits(value));
    }
}

#[test]
fn a_gap_between_rows() {
    Defective::new(SOURCE, launch("vectors_over_a_rows_end", 2, 32))
        .input("x", floats((0..48).map(|i| i as f32)))
        .gap(84..96)
        .gap(180..192)
        .output("out", floats((0..42).map(|i| (i / 21 * 24 + i % 21) as f32)))
        .caught(1, Defect::OutOfBounds, "is a guard band or a gap between rows", |form, [x, out]| unsafe {
            vectors_over_a_rows_end(form, x as _, out as _, 21, 24)
        });
}

/// Shared memory has a slot for each of the eight warps; the last step of the reduction lets all 32 lanes of a warp
/// read one (LeetCUDA #409, online softmax).
unsafe fn slots_for_fewer_warps(form: Form, x: *const f32, out: *mut f32) {
    let (slots, num_warps) = (shared::base(), thread::block_dim_x() / 32);
    let largest = warp::max_f32::<32>(global::load(x.add(tid() as usize)));
    if thread::lane() == 0 {
        shared::store_f32(slots + 4 * thread::warp_idx(), largest);
    }
    thread::sync_threads();
    if tid() < 32 {
        let mine = if form == Form::Broken || tid() < num_warps {
            shared::load_f32(slots + 4 * tid()) // reported
        } else {
            f32::NEG_INFINITY
        };
        let largest = warp::max_f32::<32>(mine);
        if tid() == 0 {
            global::store(out, largest);
        }
    }
}

#[test]
fn shared_memory_for_fewer_warps() {
    let text = "of shared memory, of which there are 32 bytes";
    Defective::new(SOURCE, launch("slots_for_fewer_warps", 1, 256).shared_bytes(32))
        .input("x", floats((0..256).map(|i| (i * 37 % 256) as f32)))
        .output("out", floats([255.0]))
        .caught(1, Defect::OutOfBounds, text, |form, [x, out]| unsafe {
            slots_for_fewer_warps(form, x as _, out as _)
        });
}

/// A causal convolution of width 4 reads in front of the first element of a sequence instead of zeros.
unsafe fn convolution_before_the_start(form: Form, x: *const f32, out: *mut f32) {
    let mut sum = 0.0;
    for back in 0..4 {
        if form == Form::Repaired && back > tid() {
            break;
        }
        sum += global::load(x.add(tid() as usize).sub(back as usize)); // reported
    }
    global::store(out.add(tid() as usize), sum);
}

#[test]
fn in_front_of_a_buffer() {
    let text = "of `x`, which has 128 bytes";
    Defective::new(SOURCE, launch("convolution_before_the_start", 1, 32))
        .input("x", floats([1.0; 32]))
        .output("out", floats((0..32).map(|i| (i + 1).min(4) as f32)))
        .caught(1, Defect::OutOfBounds, text, |form, [x, out]| unsafe {
            convolution_before_the_start(form, x as _, out as _)
        });
}

/// An optional bias is a null pointer where there is none, and the kernel adds it all the same.
unsafe fn absent_bias(form: Form, bias: *const f32, out: *mut f32) {
    let mut value = tid() as f32;
    if form == Form::Broken || !bias.is_null() {
        value += global::load(bias.wrapping_add(tid() as usize)); // reported
    }
    global::store(out.add(tid() as usize), value);
}

#[test]
fn a_null_pointer() {
    let text = "read of 4 bytes out of bounds: at ";
    Defective::new(SOURCE, launch("absent_bias", 1, 32))
        .output("out", floats((0..32).map(|i| i as f32)))
        .caught(1, Defect::OutOfBounds, text, |form, [out]| unsafe {
            absent_bias(form, core::ptr::null(), out as _)
        });
}

/// Weights are brought to L2 for one row more than there are: inside the buffer that they are part of, so no card says
/// so.
unsafe fn prefetch_of_a_row_too_many(form: Form, x: *const u32, out: *mut u32) {
    let rows = if form == Form::Broken { 5 } else { 4 };
    if tid() < rows {
        global::prefetch_l2(x.add(8 * tid() as usize), 32); // reported
    }
    global::store(out.add(tid() as usize), tid());
}

#[test]
fn a_prefetch_behind_the_last_row() {
    Defective::new(SOURCE, launch("prefetch_of_a_row_too_many", 1, 32))
        .input("x", 0..64)
        .gap(128..256)
        .output("out", 0..32)
        .caught(1, Defect::OutOfBounds, "is a guard band or a gap between rows", |form, [x, out]| unsafe {
            prefetch_of_a_row_too_many(form, x as _, out as _)
        });
}
