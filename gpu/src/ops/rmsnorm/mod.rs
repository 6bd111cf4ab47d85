//! RMSNorm, with an optional residual added first: `h = x + residual; out = h · rsqrt(mean(h²) + eps) · (w + offset)`, and
//! an optional gate at the end: `out · silu(gate)`.
//!
//! Work split: a row belongs to 8 to 32 lanes (short rows, several per block), or to a block. Each thread holds its
//! pieces of the row in registers, so the row is read once; thread t of n takes pieces t, t + n, …, which makes every
//! load of a warp one contiguous 512-byte stretch.
//!
//! ```text
//! row   | piece 0 | piece 1 | … | piece n-1 | piece n | …      a piece is 16 bytes
//! thread    0         1             n-1          0
//! ```
//!
//! All loads are issued before the first use: 2 × 16 bytes per thread and 2048 threads per SM are the 48 KiB in flight
//! that Hopper's memory needs. The choice depends on the row's length only, so a row's result does not depend on how
//! many rows there are.

use abi::ops::rmsnorm::RmsNormDims;
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, math, thread, warp};

use crate::tile::activation::silu;
use crate::tile::packed::add_packed;
use crate::tile::reduce::block_sum_f32;

/// Where a row lies in x, out, the residual and the gate.
struct Row {
    x: usize,
    out: usize,
    residual: usize,
    gate: usize,
}

impl Row {
    #[inline(always)]
    fn new(row: u32, dims: &RmsNormDims) -> Self {
        // `heads` is at least 1 (RmsNorm::run); `max` tells the compiler, which would otherwise keep a panic path.
        let heads = dims.heads.max(1);
        let (token, head) = (row / heads, row % heads);
        let offset = |token_stride, head_stride| {
            token as usize * token_stride as usize + head as usize * head_stride as usize
        };
        Row {
            x: offset(dims.x_token_stride, dims.x_head_stride),
            out: offset(dims.out_token_stride, dims.out_head_stride),
            residual: offset(dims.residual_token_stride, dims.residual_head_stride),
            gate: offset(dims.gate_token_stride, dims.gate_head_stride),
        }
    }
}

/// A thread's part of the work: it is `member` of the `members` that hold `row`.
struct Share {
    row: u32,
    member: u32,
    members: u32,
}

/// One row in `CHUNKS` pieces per thread. `sum` reduces over the members.
///
/// # Safety
/// - All lanes of the warp call it (*converged*), also those whose `row` is past the end.
/// - Pointers, strides and `cols` are *in-bounds* and *aligned(16)* — checked in `RmsNorm::run`, which takes another
///   tile otherwise. `residual` and `gate` are null if there is none.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn rows_in_registers<T: Element, const CHUNKS: usize>(
    x: *const T,
    residual: *mut T,
    weight: *const T,
    gate: *const T,
    out: *mut T,
    dims: &RmsNormDims,
    share: Share,
    sum: impl Fn(f32) -> f32,
) {
    let Share { row, member, members } = share;
    let at = Row::new(row, dims);
    let num_chunks = if row < dims.rows { dims.cols / T::PER_16_BYTES as u32 } else { 0 };
    let mut held = [[0u32; 4]; CHUNKS];
    let element = |chunk: u32| chunk as usize * T::PER_16_BYTES;
    // SAFETY: chunk < num_chunks keeps every access inside its row, and the rows inside their buffers — RmsNorm::run.
    unsafe {
        let mut i = 0;
        while i < CHUNKS {
            let chunk = member + i as u32 * members;
            if chunk < num_chunks {
                held[i] = global::load_stream_x4(x.add(at.x + element(chunk)));
            }
            i += 1;
        }
        if !residual.is_null() {
            let mut added = [[0u32; 4]; CHUNKS];
            let mut i = 0;
            while i < CHUNKS {
                let chunk = member + i as u32 * members;
                if chunk < num_chunks {
                    added[i] = global::load_x4(residual.add(at.residual + element(chunk)));
                }
                i += 1;
            }
            let mut i = 0;
            while i < CHUNKS {
                let chunk = member + i as u32 * members;
                // Rounded to the stored type before the norm, so that the norm is that of what is stored.
                held[i] = add_packed::<T>(held[i], added[i]);
                if chunk < num_chunks {
                    global::store_x4(residual.add(at.residual + element(chunk)), held[i]);
                }
                i += 1;
            }
        }
        let mut square = 0.0;
        let mut i = 0;
        while i < CHUNKS {
            let mut values = [0.0; 8];
            T::unpack(held[i], &mut values);
            let mut j = 0;
            while j < T::PER_16_BYTES {
                square = math::fma(values[j], values[j], square);
                j += 1;
            }
            i += 1;
        }
        let scale = math::rsqrt(math::fma(sum(square), dims.inv_cols, dims.eps));
        let mut i = 0;
        while i < CHUNKS {
            let chunk = member + i as u32 * members;
            if chunk < num_chunks {
                let (mut values, mut gains) = ([0.0; 8], [0.0; 8]);
                T::unpack(held[i], &mut values);
                T::unpack(global::load_nc_x4(weight.add(element(chunk))), &mut gains);
                let mut j = 0;
                while j < T::PER_16_BYTES {
                    values[j] = values[j] * scale * (gains[j] + dims.weight_offset);
                    j += 1;
                }
                if !gate.is_null() {
                    let mut gates = [0.0; 8];
                    T::unpack(global::load_stream_x4(gate.add(at.gate + element(chunk))), &mut gates);
                    let mut j = 0;
                    while j < T::PER_16_BYTES {
                        values[j] *= silu(gates[j]);
                        j += 1;
                    }
                }
                global::store_x4(out.add(at.out + element(chunk)), T::pack(&values));
            }
            i += 1;
        }
    }
}

/// A block walks over one row element by element, twice: the fallback for any length, stride and alignment.
///
/// # Safety
/// - One block per row, all its threads (*converged*); rows *in-bounds* — checked in `RmsNorm::run`.
#[inline(always)]
unsafe fn row_by_element<T: Element>(
    x: *const T,
    residual: *mut T,
    weight: *const T,
    gate: *const T,
    out: *mut T,
    dims: &RmsNormDims,
) {
    let at = Row::new(thread::block_idx_x(), dims);
    let (member, members) = (thread::thread_idx_x(), thread::block_dim_x());
    // SAFETY: col < cols keeps every access inside its row — RmsNorm::run. The second pass reads back what this same
    // thread wrote in the first.
    unsafe {
        let mut square = 0.0;
        let mut col = member;
        while col < dims.cols {
            let mut value = global::load(x.add(at.x + col as usize)).to_f32();
            if !residual.is_null() {
                let stored = residual.add(at.residual + col as usize);
                let sum = T::from_f32(value + global::load(stored).to_f32());
                global::store(stored, sum);
                value = sum.to_f32();
            }
            square = math::fma(value, value, square);
            col += members;
        }
        let scale = math::rsqrt(math::fma(block_sum_f32(square), dims.inv_cols, dims.eps));
        let mut col = member;
        while col < dims.cols {
            let value = if residual.is_null() {
                global::load(x.add(at.x + col as usize)).to_f32()
            } else {
                global::load(residual.add(at.residual + col as usize)).to_f32()
            };
            let gain = global::load(weight.add(col as usize)).to_f32() + dims.weight_offset;
            let mut value = value * scale * gain;
            if !gate.is_null() {
                value *= silu(global::load(gate.add(at.gate + col as usize)).to_f32());
            }
            global::store(out.add(at.out + col as usize), T::from_f32(value));
            col += members;
        }
    }
}

macro_rules! body {
    (Lanes, $type:ident, $x:ident, $r:ident, $w:ident, $g:ident, $o:ident, $dims:ident, $lanes:literal, $chunks:literal) => {{
        let group = thread::thread_idx_x() / $lanes;
        let row = thread::block_idx_x() * (thread::block_dim_x() / $lanes) + group;
        let share = Share { row, member: thread::thread_idx_x() % $lanes, members: $lanes };
        // SAFETY: whole warps, and the sum is over the lanes of the row's group, which all have the same `row`.
        unsafe {
            rows_in_registers::<$type, $chunks>($x, $r, $w, $g, $o, &$dims, share, |v| warp::sum_f32::<$lanes>(v))
        }
    }};
    (Block, $type:ident, $x:ident, $r:ident, $w:ident, $g:ident, $o:ident, $dims:ident, $chunks:literal) => {{
        let (row, member, members) = (thread::block_idx_x(), thread::thread_idx_x(), thread::block_dim_x());
        let share = Share { row, member, members };
        // SAFETY: one block per row, all its threads take part in the sum; the grid has `rows` blocks — RmsNorm::run.
        unsafe {
            rows_in_registers::<$type, $chunks>($x, $r, $w, $g, $o, &$dims, share, |v| block_sum_f32(v))
        }
    }};
    (Scalar, $type:ident, $x:ident, $r:ident, $w:ident, $g:ident, $o:ident, $dims:ident $(,)?) => {{
        // SAFETY: one block per row — RmsNorm::run.
        unsafe { row_by_element::<$type>($x, $r, $w, $g, $o, &$dims) }
    }};
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $threads:literal, $tile:ident { $($field:ident: $value:literal),* };)*) => {$(
        /// Entry point; see the module and `abi::ops::rmsnorm`.
        ///
        /// # Safety
        /// - Arguments as `RmsNorm::run` checks them.
        #[kernel(max_threads = $threads)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            x: *const $type,
            residual: *mut $type,
            weight: *const $type,
            gate: *const $type,
            out: *mut $type,
            dims: RmsNormDims,
        ) {
            body!($tile, $type, x, residual, weight, gate, out, dims, $($value),*)
        }
    )*};
}
abi::rmsnorm_table!(entries);
