//! Softmax over rows: `out[r, c] = exp(scale · x[r, c]) / Σ exp(scale · x[r, ·])`.
//!
//! Work split: a block per row; its threads walk over the row three times, which after the first time is in a cache:
//! for the maximum, for the sum, and to write. Rows have any length, so only some of their 16-byte pieces are aligned.
//!
//! ```text
//! row     | e e e | piece 0 | piece 1 | … | piece n-1 | e e |      e: an element at an edge, loaded alone
//! thread    0 1 2   0         1             n-1         3 4
//! ```
//!
//! The same source compiles for the host, where `cuda_std` is a simulator: leave out a barrier or a bound and run
//! `cargo test -p own_operator`.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

use cuda_std::cvt::{Element, bf16};
use cuda_std::{global, kernel, math, shared, thread, warp};

/// A row of a block: its elements at the edges, `head` of them before the pieces.
struct Row<T> {
    x: *const T,
    out: *mut T,
    cols: usize,
    head: usize,
    pieces: usize,
}

impl<T: Element> Row<T> {
    /// Row `row` of matrices that begin at multiples of 16 bytes.
    #[inline(always)]
    fn new(x: *const T, out: *mut T, row: u32, cols: u32) -> Self {
        let (first, cols) = (row as usize * cols as usize, cols as usize);
        // Elements up to the next multiple of a piece; a number of elements so small that the row ends before.
        let head = (first.wrapping_neg() % T::PER_16_BYTES).min(cols);
        let pieces = (cols - head) / T::PER_16_BYTES;
        Row { x: x.wrapping_add(first), out: out.wrapping_add(first), cols, head, pieces }
    }

    /// Elements at the edges.
    #[inline(always)]
    fn edges(&self) -> usize {
        self.cols - self.pieces * T::PER_16_BYTES
    }

    /// Column of an element at the edges.
    #[inline(always)]
    fn edge(&self, i: usize) -> usize {
        if i < self.head { i } else { i + self.pieces * T::PER_16_BYTES }
    }

    /// First column of a piece.
    #[inline(always)]
    fn piece(&self, i: usize) -> usize {
        self.head + i * T::PER_16_BYTES
    }

    /// Combines the thread's elements with `start`, one after another.
    ///
    /// # Safety
    /// - `cols` elements at `x` are *in-bounds* and *initialised(before the kernel)*.
    #[inline(always)]
    unsafe fn fold(&self, start: f32, combine: impl Fn(f32, f32) -> f32) -> f32 {
        let (first, step) = (thread::thread_idx_x() as usize, thread::block_dim_x() as usize);
        let mut folded = start;
        let mut i = first;
        while i < self.edges() {
            // SAFETY: the columns of edges and pieces are below `cols`; pieces lie at multiples of 16 bytes — `new`.
            folded = combine(folded, unsafe { global::load(self.x.add(self.edge(i))) }.to_f32());
            i += step;
        }
        let mut i = first;
        while i < self.pieces {
            let mut values = [0.0; 8];
            // SAFETY: as above.
            T::unpack(unsafe { global::load_x4(self.x.add(self.piece(i))) }, &mut values);
            let mut j = 0;
            while j < T::PER_16_BYTES {
                folded = combine(folded, values[j]);
                j += 1;
            }
            i += step;
        }
        folded
    }

    /// Writes what `map` makes of each of the thread's elements.
    ///
    /// # Safety
    /// - `cols` elements at `x` and `out` are *in-bounds*, those of `x` *initialised(before the kernel)*, those of
    ///   `out` *exclusive* to the block.
    #[inline(always)]
    unsafe fn map(&self, map: impl Fn(f32) -> f32) {
        let (first, step) = (thread::thread_idx_x() as usize, thread::block_dim_x() as usize);
        let mut i = first;
        while i < self.edges() {
            let col = self.edge(i);
            // SAFETY: as in `fold`; each column is one thread's.
            unsafe {
                let value = global::load(self.x.add(col)).to_f32();
                global::store(self.out.add(col), T::from_f32(map(value)));
            }
            i += step;
        }
        let mut i = first;
        while i < self.pieces {
            let col = self.piece(i);
            let mut values = [0.0; 8];
            // SAFETY: as in `fold`.
            T::unpack(unsafe { global::load_x4(self.x.add(col)) }, &mut values);
            let mut j = 0;
            while j < T::PER_16_BYTES {
                values[j] = map(values[j]);
                j += 1;
            }
            // SAFETY: as above; `out` lies as `x` does.
            unsafe { global::store_x4(self.out.add(col), T::pack(&values)) };
            i += step;
        }
    }
}

/// Reduces a value of each thread of the block; all get the result. `warp` reduces the values of a warp, and `neutral`
/// changes nothing in it.
///
/// # Safety
/// - *converged*: all threads of the block, a multiple of 32 and at most 1024, execute it.
/// - *exclusive*: a word for each warp at shared address `slots`, until the end of the kernel.
#[inline(always)]
unsafe fn reduce(value: f32, neutral: f32, slots: u32, warp: impl Fn(f32) -> f32) -> f32 {
    let (lane, num_warps) = (thread::lane(), thread::block_dim_x() / 32);
    let reduced = warp(value);
    // SAFETY: a slot is written by its warp alone, and read after the barrier; only slots of warps that exist are.
    unsafe {
        if lane == 0 {
            shared::store_f32(slots + 4 * thread::warp_idx(), reduced);
        }
        thread::sync_threads();
        warp(if lane < num_warps { shared::load_f32(slots + 4 * lane) } else { neutral })
    }
}

/// Softmax of the block's row.
///
/// # Safety
/// - *converged*: all threads of the block, a multiple of 32 and at most 1024, execute it, with 256 bytes of shared
///   memory.
/// - `x` and `out` begin at multiples of 16 bytes and have `cols` elements for each block; nobody writes `x`.
#[inline(always)]
unsafe fn softmax<T: Element>(x: *const T, out: *mut T, cols: u32, scale: f32) {
    let row = Row::new(x, out, thread::block_idx_x(), cols);
    let slots = shared::base();
    // SAFETY: the caller's promise; the two reductions have 128 bytes each.
    unsafe {
        let largest = row.fold(f32::NEG_INFINITY, |largest, x| math::max(largest, x * scale));
        let largest = reduce(largest, f32::NEG_INFINITY, slots, |value| warp::max_f32::<32>(value));
        // The product is not rounded before the subtraction: what is left is small.
        let exp = |x: f32| math::exp(math::fma(x, scale, -largest));
        let sum = reduce(row.fold(0.0, |sum, x| sum + exp(x)), 0.0, slots + 128, |value| {
            warp::sum_f32::<32>(value)
        });
        let factor = math::div(1.0, sum);
        row.map(|x| exp(x) * factor);
    }
}

/// Softmax of f32: a block per row.
///
/// # Safety
/// - Blocks of whole warps, with 256 bytes of shared memory.
/// - `x` and `out` begin at multiples of 16 bytes and have `cols` elements for each block; nobody writes `x`.
#[kernel(max_threads = 256)]
pub unsafe fn softmax_f32(x: *const f32, out: *mut f32, cols: u32, scale: f32) {
    // SAFETY: the caller's promise.
    unsafe { softmax(x, out, cols, scale) }
}

/// Softmax of bf16: a block per row.
///
/// # Safety
/// As for [`softmax_f32`].
#[kernel(max_threads = 256)]
pub unsafe fn softmax_bf16(x: *const bf16, out: *mut bf16, cols: u32, scale: f32) {
    // SAFETY: the caller's promise.
    unsafe { softmax(x, out, cols, scale) }
}

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    cuda_std::debug::trap()
}
