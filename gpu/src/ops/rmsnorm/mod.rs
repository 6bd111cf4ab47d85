//! RMSNorm, with an optional residual added first: `h = x + residual; out = h · rsqrt(mean(h²) + eps) · (w + offset)`,
//! and an optional gate at the end: `out · silu(gate)`.
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
//! that Hopper's memory needs. The gains come to L2 before the kernel ahead has ended, since a model's step finds them
//! in memory, and where a thread has one piece to its registers beside the row. The choice depends on the row's length
//! only, so a row's result does not depend on how many rows there are.
//!
//! A row whose squares do not fit f32 is multiplied by a power of two, and they are added up once more (`abi::range`).

use abi::ops::rmsnorm::RmsNormDims;
use abi::range;
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, grid, kernel, math, thread, warp};

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

/// The sum of the squares of a thread's pieces.
#[inline(always)]
fn square_of<T: Element, const CHUNKS: usize>(held: &[[u32; 4]; CHUNKS]) -> f32 {
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
    square
}

/// A row times a factor, from memory: the elements of its pieces one after the other, in the order of their squares in
/// [`rows_in_registers`], so that an ordinary row, whose factor is 1, keeps its bits. It is apart from that, since the
/// registers that hold a row are not to be kept for it.
///
/// # Safety
/// - As [`rows_in_registers`], which has stored the sum.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn far_row<T: Element>(
    x: *const T,
    residual: *mut T,
    weight: *const T,
    gate: *const T,
    out: *mut T,
    dims: &RmsNormDims,
    share: Share,
    factor: f32,
    sum: impl Fn(f32) -> f32,
) {
    let Share { row, member, members } = share;
    // Opaque, or what is computed of it would be kept since the beginning.
    let row = thread::opaque(row);
    let at = Row::new(row, dims);
    let from = if residual.is_null() {
        x.wrapping_add(at.x)
    } else {
        residual.wrapping_add(at.residual).cast_const()
    };
    // The next element of this thread's pieces.
    let next = |col: u32| {
        let per_piece = T::PER_16_BYTES as u32;
        if (col + 1).is_multiple_of(per_piece) { col + 1 + (members - 1) * per_piece } else { col + 1 }
    };
    let (first, end) =
        (thread::opaque(member * T::PER_16_BYTES as u32), if row < dims.rows { dims.cols } else { 0 });
    // SAFETY: col < end keeps every access inside its row, the rows are inside their buffers, and `sum` is called by
    // all that take part in it — the caller.
    unsafe {
        let mut square = 0.0;
        let mut col = first;
        while col < end {
            let value = global::load(from.add(col as usize)).to_f32() * factor;
            square = math::fma(value, value, square);
            col = thread::opaque(next(col));
        }
        let eps = range::epsilon(dims.eps, factor);
        let scale = math::rsqrt(math::fma(sum(square), dims.inv_cols, eps));
        let mut col = first;
        while col < end {
            let value = global::load(from.add(col as usize)).to_f32() * factor;
            let gain = global::load(weight.add(col as usize)).to_f32() + dims.weight_offset;
            let mut value = value * scale * gain;
            if !gate.is_null() {
                value *= silu::<T>(global::load(gate.add(at.gate + col as usize)).to_f32());
            }
            global::store(out.add(at.out + col as usize), T::from_f32(value));
            col = thread::opaque(next(col));
        }
    }
}

/// One row in `CHUNKS` pieces per thread. `sum` reduces over the members; `again` tells all that take part in it
/// whether one of them wants it once more.
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
    again: impl Fn(bool) -> bool,
) {
    let Share { row, member, members } = share;
    let at = Row::new(row, dims);
    let num_chunks = if row < dims.rows { dims.cols / T::PER_16_BYTES as u32 } else { 0 };
    let mut held = [[0u32; 4]; CHUNKS];
    let element = |chunk: u32| chunk as usize * T::PER_16_BYTES;
    // SAFETY: chunk < num_chunks keeps every access inside its row, and the rows inside their buffers — RmsNorm::run.
    unsafe {
        // The others have no registers for them.
        let mut gains_held = [0; 4];
        if CHUNKS == 1 && member < num_chunks {
            gains_held = global::load_nc_x4(weight.add(element(member)));
        }
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
        let mean = math::fma(sum(square_of::<T, CHUNKS>(&held)), dims.inv_cols, dims.eps);
        // Whether the row has to be done again, by predicates, for which there are registers of their own. With two
        // pieces to a thread at the end, where what holds them is free again; else at once, which has fewer in use.
        let is_far = warp::any(warp::FULL_MASK, !range::is_normal(mean));
        if CHUNKS != 2 && again(is_far) {
            let share = Share { row, member, members };
            return far_row(x, residual, weight, gate, out, dims, share, range::factor(mean), sum);
        }
        let is_tiny = warp::any(warp::FULL_MASK, mean < 1.0);
        let scale = math::rsqrt(mean);
        let mut i = 0;
        while i < CHUNKS {
            let chunk = member + i as u32 * members;
            if chunk < num_chunks {
                let (mut values, mut gains) = ([0.0; 8], [0.0; 8]);
                T::unpack(held[i], &mut values);
                let piece =
                    if CHUNKS == 1 { gains_held } else { global::load_nc_x4(weight.add(element(chunk))) };
                T::unpack(piece, &mut gains);
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
                        values[j] *= silu::<T>(gates[j]);
                        j += 1;
                    }
                }
                global::store_x4(out.add(at.out + element(chunk)), T::pack(&values));
            }
            i += 1;
        }
        if CHUNKS == 2 && again(is_far) {
            let share = Share { row, member, members };
            let factor = if is_tiny { range::TINY } else { range::HUGE };
            far_row(x, residual, weight, gate, out, dims, share, factor, sum);
        }
    }
}

/// How a kernel begins that has rows in registers: its first block brings the gains to L2, whoever writes them.
///
/// # Safety
/// - As [`rows_in_registers`].
#[inline(always)]
unsafe fn begin<T: Element>(weight: *const T, dims: &RmsNormDims) {
    grid::begin_with(|| {
        if thread::block_idx_x() == 0 && thread::thread_idx_x() == 0 && dims.cols > 0 {
            // SAFETY: `cols` elements, whole pieces — the caller.
            unsafe { global::prefetch_l2(weight, dims.cols * size_of::<T>() as u32) };
        }
    });
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
        let value_at = |col: u32| {
            if residual.is_null() {
                global::load(x.add(at.x + col as usize)).to_f32()
            } else {
                global::load(residual.add(at.residual + col as usize)).to_f32()
            }
        };
        let mut mean = math::fma(block_sum_f32(square), dims.inv_cols, dims.eps);
        let factor = range::factor(mean);
        // The same for all threads, as is the mean; by a vote, so that the compiler knows it of the warp.
        if warp::any(warp::FULL_MASK, factor != 1.0) {
            let mut square = 0.0;
            let mut col = member;
            while col < dims.cols {
                let value = value_at(col) * factor;
                square = math::fma(value, value, square);
                col += members;
            }
            thread::sync_threads();
            mean = math::fma(block_sum_f32(square), dims.inv_cols, range::epsilon(dims.eps, factor));
        }
        let scale = math::rsqrt(mean);
        let mut col = member;
        while col < dims.cols {
            let gain = global::load(weight.add(col as usize)).to_f32() + dims.weight_offset;
            let mut value = value_at(col) * factor * scale * gain;
            if !gate.is_null() {
                value *= silu::<T>(global::load(gate.add(at.gate + col as usize)).to_f32());
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
        // SAFETY: whole warps, and the sum is over the lanes of the row's group, which all have the same `row`. They
        // ask for it again together.
        unsafe {
            begin($w, &$dims);
            rows_in_registers::<$type, $chunks>(
                $x,
                $r,
                $w,
                $g,
                $o,
                &$dims,
                share,
                |v| warp::sum_f32::<$lanes>(v),
                |again| warp::any(warp::FULL_MASK, again),
            )
        }
    }};
    (Block, $type:ident, $x:ident, $r:ident, $w:ident, $g:ident, $o:ident, $dims:ident, $chunks:literal) => {{
        let (row, member, members) = (thread::block_idx_x(), thread::thread_idx_x(), thread::block_dim_x());
        let share = Share { row, member, members };
        // SAFETY: one block per row, all its threads take part in the sum; the grid has `rows` blocks — RmsNorm::run.
        // All have the bits of the same sum, so they want the same; the barrier is between the two sums.
        unsafe {
            begin($w, &$dims);
            rows_in_registers::<$type, $chunks>(
                $x,
                $r,
                $w,
                $g,
                $o,
                &$dims,
                share,
                |v| block_sum_f32(v),
                |again| {
                    // A vote, though all say the same, so that the compiler knows it of the warp: a barrier follows.
                    let again = warp::any(warp::FULL_MASK, again);
                    if again {
                        thread::sync_threads();
                    }
                    again
                },
            )
        }
    }};
    (Scalar, $type:ident, $x:ident, $r:ident, $w:ident, $g:ident, $o:ident, $dims:ident $(,)?) => {{
        grid::begin();
        // SAFETY: one block per row — RmsNorm::run.
        unsafe { row_by_element::<$type>($x, $r, $w, $g, $o, &$dims) }
    }};
}

macro_rules! entry {
    ($(#[$bounds:meta])* $entry:ident, $type:ident, $tile:ident, $($value:tt),*) => {
        /// Entry point; see the module and `abi::ops::rmsnorm`.
        ///
        /// # Safety
        /// - Arguments as `RmsNorm::run` checks them.
        $(#[$bounds])*
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
    };
    // What rows that are not done again need: on Hopper 2048 threads on a multiprocessor, as its memory wants.
    ($entry:ident, f32, $threads:literal, Block { chunks: 2 }) => {
        entry!(
            #[cfg_attr(not(lacks_wgmma), kernel(max_threads = $threads, max_registers = 32, waits))]
            #[cfg_attr(lacks_wgmma, kernel(max_threads = $threads, waits))]
            $entry,
            f32,
            Block,
            2
        );
    };
    ($entry:ident, $type:ident, $threads:literal, Block { chunks: 2 }) => {
        entry!(
            #[cfg_attr(not(lacks_wgmma), kernel(max_threads = $threads, max_registers = 32, waits))]
            #[cfg_attr(lacks_wgmma, kernel(max_threads = $threads, max_registers = 48, waits))]
            $entry,
            $type,
            Block,
            2
        );
    };
    ($entry:ident, $type:ident, $threads:literal, $tile:ident { $($field:ident: $value:tt),* }) => {
        entry!(#[kernel(max_threads = $threads, waits)] $entry, $type, $tile, $($value),*);
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $threads:literal, $tile:ident $fields:tt;)*) => {$(
        entry!($entry, $type, $threads, $tile $fields);
    )*};
}
abi::rmsnorm_table!(entries);
