//! LayerNorm, with an optional residual added first: `h = x + residual; out = (h − mean) · rsqrt(variance + eps) · w +
//! b`.
//!
//! Work split: a row belongs to a warp (8 rows per block) or to a block. Each thread holds its pieces of the row in
//! registers, so the row is read once; thread t of n takes pieces t, t + n, …, so a warp's load is one contiguous
//! stretch:
//!
//! ```text
//! row   | piece 0 | piece 1 | … | piece n-1 | piece n | …      a piece is 16 bytes
//! thread    0         1             n-1          0
//! ```
//!
//! Mean and variance are those of the differences from a first mean, so nothing cancels where a row is far from zero:
//! the rounding of the first mean is in the mean of the differences, which is subtracted too (the shifted and corrected
//! two-pass algorithm of Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983).
//!
//! Of a row whose sums do not fit f32 they are taken once more, of its values times a power of two (`abi::range`).
//!
//! Bound by memory: all loads of a thread are issued before the first use. The choice depends on the row's length only,
//! so a row's result does not depend on how many rows there are.

use abi::ops::layernorm::LayerNormDims;
use abi::range;
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, math, thread, warp};

use crate::tile::packed::add_packed;
use crate::tile::reduce::block_sum_f32;

/// The tensors of a launch.
struct Tensors<T> {
    x: *const T,
    residual: *mut T,
    weight: *const T,
    bias: *const T,
    out: *mut T,
}

/// A thread's part of the work: it is `member` of the `members` that hold `row`.
struct Share {
    row: u32,
    member: u32,
    members: u32,
}

/// Of a row: its mean, what is left of it in the differences from it, and their squares' sum.
#[derive(Clone, Copy)]
struct Moments {
    mean: f32,
    rest: f32,
    square: f32,
}

impl Moments {
    /// Of sums of the differences and of their squares.
    #[inline(always)]
    fn new(mean: f32, rest: f32, square: f32, dims: &LayerNormDims) -> Self {
        Moments { mean, rest: rest * dims.inv_cols, square }
    }

    #[inline(always)]
    fn variance(self, dims: &LayerNormDims) -> f32 {
        math::max(math::fma(self.square, dims.inv_cols, -(self.rest * self.rest)), 0.0)
    }

    /// What the row is multiplied by before these are taken again; 1 if they are right as they are.
    #[inline(always)]
    fn factor(self, dims: &LayerNormDims) -> f32 {
        range::factor_of_differences(self.square, self.mean, self.variance(dims) + dims.eps)
    }
}

/// The moments of what the members hold of a row: a thread's pieces, of which some may be outside of it.
///
/// # Safety
/// - As `sum`, which is called three times.
#[inline(always)]
unsafe fn moments_of<T: Element, const CHUNKS: usize>(
    held: &[[u32; 4]; CHUNKS],
    is_inside: impl Fn(usize) -> bool,
    dims: &LayerNormDims,
    sum: impl Fn(f32) -> f32,
) -> Moments {
    // What a thread holds beyond the row is zero, which a sum does not see.
    let mut total = 0.0;
    let mut i = 0;
    while i < CHUNKS {
        let mut values = [0.0; 8];
        T::unpack(held[i], &mut values);
        let mut j = 0;
        while j < T::PER_16_BYTES {
            total += values[j];
            j += 1;
        }
        i += 1;
    }
    let mean = sum(total) * dims.inv_cols;
    let (mut rest, mut square) = (0.0, 0.0);
    let mut i = 0;
    while i < CHUNKS {
        if is_inside(i) {
            let mut values = [0.0; 8];
            T::unpack(held[i], &mut values);
            let mut j = 0;
            while j < T::PER_16_BYTES {
                let difference = values[j] - mean;
                rest += difference;
                square = math::fma(difference, difference, square);
                j += 1;
            }
        }
        i += 1;
    }
    Moments::new(mean, sum(rest), sum(square), dims)
}

/// A row times a factor, from memory: the elements of its pieces one after the other. It is apart from
/// [`rows_in_registers`], since the registers that hold a row are not to be kept for it.
///
/// # Safety
/// - As [`rows_in_registers`]; `from` has the row that is normalised, whose pieces this thread wrote itself or nobody.
///   All that `sum` is over have the same row.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn far_row<T: Element>(
    from: *const T,
    weight: *const T,
    bias: *const T,
    out: *mut T,
    dims: &LayerNormDims,
    share: Share,
    num_chunks: u32,
    factor: f32,
    sum: impl Fn(f32) -> f32,
) {
    let Share { row, member, members } = share;
    // The next element of this thread's pieces.
    let next = |col: u32| {
        let per_piece = T::PER_16_BYTES as u32;
        if (col + 1).is_multiple_of(per_piece) { col + 1 + (members - 1) * per_piece } else { col + 1 }
    };
    let (first, end) = (thread::opaque(member * T::PER_16_BYTES as u32), num_chunks * T::PER_16_BYTES as u32);
    // SAFETY: col < end keeps every access inside its row, the rows are inside their buffers, and `sum` is called by
    // all that take part in it — the caller.
    unsafe {
        let value_at = |col: u32| global::load(from.add(col as usize)).to_f32() * factor;
        let mut total = 0.0;
        let mut col = first;
        while col < end {
            total += value_at(col);
            col = thread::opaque(next(col));
        }
        let mean = sum(total) * dims.inv_cols;
        let (mut rest, mut square) = (0.0, 0.0);
        let mut col = first;
        while col < end {
            let difference = value_at(col) - mean;
            rest += difference;
            square = math::fma(difference, difference, square);
            col = thread::opaque(next(col));
        }
        let moments = Moments::new(mean, sum(rest), sum(square), dims);
        let scale = math::rsqrt(moments.variance(dims) + range::epsilon(dims.eps, factor));
        let mut col = first;
        while col < end {
            let gain = global::load(weight.add(col as usize)).to_f32();
            let offset = global::load(bias.add(col as usize)).to_f32();
            let value = math::fma((value_at(col) - mean - moments.rest) * scale, gain, offset);
            global::store(
                out.add(row as usize * dims.out_stride as usize + col as usize),
                T::from_f32(value),
            );
            col = thread::opaque(next(col));
        }
    }
}

/// One row in `CHUNKS` pieces per thread. `sum` reduces over the members, and may be called again; `any` says whether
/// one of those that take part in it wants that.
///
/// # Safety
/// - All lanes of the warp call it (*converged*), also those whose `row` is past the end.
/// - Pointers, strides and `cols` are *in-bounds* and *aligned(16)* — checked in `LayerNorm::run`, which takes another
///   tile otherwise. `residual` is null if there is none.
#[inline(always)]
unsafe fn rows_in_registers<T: Element, const CHUNKS: usize>(
    tensors: Tensors<T>,
    dims: &LayerNormDims,
    share: Share,
    sum: impl Fn(f32) -> f32,
    any: impl Fn(bool) -> bool,
) {
    let Tensors { x, residual, weight, bias, out } = tensors;
    let Share { row, member, members } = share;
    let at = |stride: u32, chunk: u32| row as usize * stride as usize + chunk as usize * T::PER_16_BYTES;
    let num_chunks = if row < dims.rows { dims.cols / T::PER_16_BYTES as u32 } else { 0 };
    let mut held = [[0u32; 4]; CHUNKS];
    // SAFETY: chunk < num_chunks keeps every access inside its row, and the rows inside their buffers — LayerNorm::run.
    unsafe {
        let mut i = 0;
        while i < CHUNKS {
            let chunk = member + i as u32 * members;
            if chunk < num_chunks {
                held[i] = global::load_stream_x4(x.add(at(dims.x_stride, chunk)));
            }
            i += 1;
        }
        if !residual.is_null() {
            let mut added = [[0u32; 4]; CHUNKS];
            let mut i = 0;
            while i < CHUNKS {
                let chunk = member + i as u32 * members;
                if chunk < num_chunks {
                    added[i] = global::load_x4(residual.add(at(dims.residual_stride, chunk)));
                }
                i += 1;
            }
            let mut i = 0;
            while i < CHUNKS {
                let chunk = member + i as u32 * members;
                // Rounded to the stored type before the norm, so that the norm is that of what is stored.
                held[i] = add_packed::<T>(held[i], added[i]);
                if chunk < num_chunks {
                    global::store_x4(residual.add(at(dims.residual_stride, chunk)), held[i]);
                }
                i += 1;
            }
        }
        let is_inside = |i: usize| member + i as u32 * members < num_chunks;
        let moments = moments_of::<T, CHUNKS>(&held, is_inside, dims, &sum);
        let factor = moments.factor(dims);
        if any(factor != 1.0) {
            let from = if residual.is_null() {
                x.add(at(dims.x_stride, 0))
            } else {
                residual.add(at(dims.residual_stride, 0)).cast_const()
            };
            let share = Share { row, member, members };
            return far_row(from, weight, bias, out, dims, share, num_chunks, factor, sum);
        }
        let Moments { mean, rest, .. } = moments;
        let scale = math::rsqrt(moments.variance(dims) + dims.eps);
        let mut i = 0;
        while i < CHUNKS {
            let chunk = member + i as u32 * members;
            if chunk < num_chunks {
                let (mut values, mut gains, mut offsets) = ([0.0; 8], [0.0; 8], [0.0; 8]);
                let element = chunk as usize * T::PER_16_BYTES;
                T::unpack(held[i], &mut values);
                T::unpack(global::load_nc_x4(weight.add(element)), &mut gains);
                T::unpack(global::load_nc_x4(bias.add(element)), &mut offsets);
                let mut j = 0;
                while j < T::PER_16_BYTES {
                    values[j] = math::fma((values[j] - mean - rest) * scale, gains[j], offsets[j]);
                    j += 1;
                }
                global::store_x4(out.add(at(dims.out_stride, chunk)), T::pack(&values));
            }
            i += 1;
        }
    }
}

/// A sum over the block that another may follow.
///
/// # Safety
/// - *converged*: all threads of the block. Nothing else lives in the sum's shared memory.
#[inline(always)]
unsafe fn block_sum(value: f32) -> f32 {
    // SAFETY: the caller's promise; the barrier is between the reads of this sum and the writes of the next.
    unsafe {
        let total = block_sum_f32(value);
        thread::sync_threads();
        total
    }
}

/// A block walks over one row element by element, three times, or five: the fallback for any length, stride and
/// alignment.
///
/// # Safety
/// - One block per row, all its threads (*converged*); rows *in-bounds* — checked in `LayerNorm::run`.
#[inline(always)]
unsafe fn row_by_element<T: Element>(tensors: Tensors<T>, dims: &LayerNormDims) {
    let Tensors { x, residual, weight, bias, out } = tensors;
    let row = thread::block_idx_x() as usize;
    let (member, members) = (thread::thread_idx_x(), thread::block_dim_x());
    // SAFETY: col < cols keeps every access inside its row — LayerNorm::run. The later passes read back what this same
    // thread wrote in the first.
    unsafe {
        let x = x.add(row * dims.x_stride as usize);
        let stored = residual.wrapping_add(row * dims.residual_stride as usize);
        let value_at = |col: u32| {
            if residual.is_null() {
                global::load(x.add(col as usize)).to_f32()
            } else {
                global::load(stored.add(col as usize)).to_f32()
            }
        };
        let mut total = 0.0;
        let mut col = member;
        while col < dims.cols {
            if !residual.is_null() {
                let sum = global::load(x.add(col as usize)).to_f32() + value_at(col);
                global::store(stored.add(col as usize), T::from_f32(sum));
            }
            total += value_at(col);
            col += members;
        }
        let about = |total: f32, factor: f32| {
            let mean = block_sum(total) * dims.inv_cols;
            let (mut rest, mut square) = (0.0, 0.0);
            let mut col = member;
            while col < dims.cols {
                let difference = value_at(col) * factor - mean;
                rest += difference;
                square = math::fma(difference, difference, square);
                col += members;
            }
            Moments::new(mean, block_sum(rest), block_sum(square), dims)
        };
        let mut moments = about(total, 1.0);
        let mut eps = dims.eps;
        let factor = moments.factor(dims);
        // The same for all threads, as are the sums; by a vote, so that the compiler knows it of the warp.
        if warp::any(warp::FULL_MASK, factor != 1.0) {
            let mut total = 0.0;
            let mut col = member;
            while col < dims.cols {
                total += value_at(col) * factor;
                col += members;
            }
            moments = about(total, factor);
            eps = range::epsilon(eps, factor);
        }
        let Moments { mean, rest, .. } = moments;
        let scale = math::rsqrt(moments.variance(dims) + eps);
        let out = out.add(row * dims.out_stride as usize);
        let mut col = member;
        while col < dims.cols {
            let gain = global::load(weight.add(col as usize)).to_f32();
            let offset = global::load(bias.add(col as usize)).to_f32();
            let value = math::fma((value_at(col) * factor - mean - rest) * scale, gain, offset);
            global::store(out.add(col as usize), T::from_f32(value));
            col += members;
        }
    }
}

macro_rules! body {
    (Warp, $type:ident, $tensors:ident, $dims:ident, $chunks:literal) => {{
        let row = thread::block_idx_x() * (thread::block_dim_x() / 32) + thread::warp_idx();
        let share = Share { row, member: thread::lane(), members: 32 };
        // SAFETY: whole warps, and the sum is over the lanes of the warp, which all have the same `row`. All have the
        // bits of the same sums, so they want the same; by a vote, so that ptxas knows that the warp stays together.
        unsafe {
            let sum = |v| warp::sum_f32::<32>(v);
            rows_in_registers::<$type, $chunks>($tensors, &$dims, share, sum, |v| warp::any(warp::FULL_MASK, v))
        }
    }};
    (Block, $type:ident, $tensors:ident, $dims:ident, $chunks:literal) => {{
        let (row, member, members) = (thread::block_idx_x(), thread::thread_idx_x(), thread::block_dim_x());
        let share = Share { row, member, members };
        // SAFETY: one block per row, all its threads take part in the sums; the grid has `rows` blocks —
        // LayerNorm::run. All have the bits of the same sums, so they want the same; by a vote, so that the compiler
        // knows it of the warp.
        unsafe {
            let any = |v| warp::any(warp::FULL_MASK, v);
            rows_in_registers::<$type, $chunks>($tensors, &$dims, share, |v| block_sum(v), any)
        }
    }};
    (Scalar, $type:ident, $tensors:ident, $dims:ident $(,)?) => {{
        // SAFETY: one block per row — LayerNorm::run.
        unsafe { row_by_element::<$type>($tensors, &$dims) }
    }};
}

macro_rules! entry {
    ([$($bound:ident = $most:literal),*] $entry:ident, $type:ident, $tile:ident, $($value:tt),*) => {
        /// Entry point; see the module and `abi::ops::layernorm`.
        ///
        /// # Safety
        /// - Arguments as `LayerNorm::run` checks them.
        #[kernel($($bound = $most),*)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            x: *const $type,
            residual: *mut $type,
            weight: *const $type,
            bias: *const $type,
            out: *mut $type,
            dims: LayerNormDims,
        ) {
            let tensors = Tensors { x, residual, weight, bias, out };
            body!($tile, $type, tensors, dims, $($value),*)
        }
    };
    // What rows that are not done again need.
    ($entry:ident, f32, Block { chunks: 2 }) => {
        entry!([max_threads = 1024, max_registers = 32] $entry, f32, Block, 2);
    };
    ($entry:ident, $type:ident, Block { chunks: 2 }) => {
        entry!([max_threads = 1024, max_registers = 40] $entry, $type, Block, 2);
    };
    ($entry:ident, $type:ident, $tile:ident { $($field:ident: $value:tt),* }) => {
        entry!([max_threads = 1024] $entry, $type, $tile, $($value),*);
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident $fields:tt;)*) => {$(
        entry!($entry, $type, $tile $fields);
    )*};
}
abi::layernorm_table!(entries);
