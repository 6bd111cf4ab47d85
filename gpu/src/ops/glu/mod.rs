//! Gated linear unit activation: `out = act(gate) · up`, or the activation alone where up is null.
//!
//! Work split: every piece of 16 bytes is alike; `abi::RowTiles` deals them to blocks in tiles of 2^c pieces by several
//! rows, so that rows of any length fill the blocks. Thread t of a block takes places t and t + 256 of the tile:
//!
//! ```text
//! gate | piece | …   ┐
//! up   | piece | …   ┘→ 8 (f32: 4) products in f32 → out | piece | …
//! ```
//!
//! Two pieces of two inputs are 64 bytes in flight per thread, loaded before the first use; with 1024 threads per SM
//! that is more than the 48 KiB that Hopper's memory needs.

use abi::ops::glu::{BLOCK_PIECES_LOG2, GluDims, PIECES_PER_THREAD, THREADS};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, thread};

use crate::tile::activation::{gelu_erf, gelu_tanh, sigmoid, silu};

const PIECES: usize = PIECES_PER_THREAD as usize;

/// Pieces of 16 bytes.
///
/// # Safety
/// - Pointers, strides and row lengths are *in-bounds* and *aligned(16)* — checked in `Glu::run`, which takes the
///   scalar tile otherwise.
#[inline(always)]
unsafe fn by_piece<T: Element>(
    gate: *const T,
    up: *const T,
    out: *mut T,
    dims: &GluDims,
    act: impl Fn(f32) -> f32,
) {
    let block = thread::block_idx_x();
    let place = |i: usize| {
        let index = thread::thread_idx_x() + i as u32 * THREADS;
        let (row, piece) = dims.tiles.locate(block, index, BLOCK_PIECES_LOG2);
        let inside = row < dims.tiles.rows && piece < dims.tiles.pieces;
        (inside, row as usize, piece as usize * T::PER_16_BYTES)
    };
    let (mut gates, mut ups) = ([[0u32; 4]; PIECES], [[0u32; 4]; PIECES]);
    // SAFETY: row < rows and piece < pieces keep every access inside the views — Glu::run.
    unsafe {
        let mut i = 0;
        while i < PIECES {
            let (inside, row, col) = place(i);
            if inside {
                gates[i] = global::load_stream_x4(gate.add(row * dims.gate_stride as usize + col));
                if !up.is_null() {
                    ups[i] = global::load_stream_x4(up.add(row * dims.up_stride as usize + col));
                }
            }
            i += 1;
        }
        let mut i = 0;
        while i < PIECES {
            let (inside, row, col) = place(i);
            if inside {
                let (mut g, mut u) = ([0.0; 8], [1.0; 8]);
                T::unpack(gates[i], &mut g);
                if !up.is_null() {
                    T::unpack(ups[i], &mut u);
                }
                let mut j = 0;
                while j < T::PER_16_BYTES {
                    g[j] = act(g[j]) * u[j];
                    j += 1;
                }
                global::store_x4(out.add(row * dims.out_stride as usize + col), T::pack(&g));
            }
            i += 1;
        }
    }
}

/// Element by element: the fallback for any length, stride and alignment.
///
/// # Safety
/// - Pointers, strides and row lengths are *in-bounds* — checked in `Glu::run`.
#[inline(always)]
unsafe fn by_element<T: Element>(
    gate: *const T,
    up: *const T,
    out: *mut T,
    dims: &GluDims,
    act: impl Fn(f32) -> f32,
) {
    let mut i = 0;
    while i < PIECES_PER_THREAD {
        let index = thread::thread_idx_x() + i * THREADS;
        let (row, col) = dims.tiles.locate(thread::block_idx_x(), index, BLOCK_PIECES_LOG2);
        if row < dims.tiles.rows && col < dims.tiles.pieces {
            let (row, col) = (row as usize, col as usize);
            // SAFETY: row < rows and col < cols keep every access inside the views — Glu::run.
            unsafe {
                let g = global::load(gate.add(row * dims.gate_stride as usize + col)).to_f32();
                let u = if up.is_null() {
                    1.0
                } else {
                    global::load(up.add(row * dims.up_stride as usize + col)).to_f32()
                };
                global::store(out.add(row * dims.out_stride as usize + col), T::from_f32(act(g) * u));
            }
        }
        i += 1;
    }
}

macro_rules! body {
    (Pieces) => {
        by_piece
    };
    (Scalar) => {
        by_element
    };
}

/// The activation, as exact as the type needs it.
macro_rules! activation {
    (gelu_erf, $type:ident) => {
        gelu_erf
    };
    ($function:ident, $type:ident) => {
        $function::<$type>
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $function:ident, $activation:ident, $tile:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::glu`.
        ///
        /// # Safety
        /// - Arguments as `Glu::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(gate: *const $type, up: *const $type, out: *mut $type, dims: GluDims) {
            // SAFETY: arguments as the body asks, by `Glu::run`.
            unsafe { body!($tile)(gate, up, out, &dims, activation!($function, $type)) }
        }
    )*};
}
abi::glu_table!(entries);
