//! Symmetric quantisation of rows: `scale = max|x| / 127; q = round(x / scale)`.
//!
//! A block per row, in two passes: the largest magnitude, then the division; the second reads from L1 or L2. Magnitudes
//! are compared as integers, whose order is that of the absolute values with infinity and NaN at the top: a NaN is not
//! lost in the maximum, and ends up in the scale.

use abi::ops::matmul_i8::QuantizeRowsDims;
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, math, shared, thread, warp};

/// The larger of two magnitudes as integers, the first with its sign cleared.
#[inline(always)]
fn max_magnitude(value: f32, most: u32) -> u32 {
    (value.to_bits() & 0x7fff_ffff).max(most)
}

/// Largest over all threads of the block; every thread gets it.
///
/// # Safety
/// - *converged*: all threads of the block, a multiple of 32 and at most 1024.
/// - *exclusive*: the first word of dynamic shared memory per warp is used for nothing else.
#[inline(always)]
unsafe fn block_max(value: u32) -> u32 {
    // SAFETY: all threads take part — the caller. Each warp writes its own word, and reads follow the barrier.
    unsafe {
        let most = warp_max(value);
        let (lane, base) = (thread::lane(), shared::base());
        if lane == 0 {
            shared::store_u32(base + 4 * thread::warp_idx(), most);
        }
        thread::sync_threads();
        let num_warps = thread::block_dim_x() / 32;
        warp_max(if lane < num_warps { shared::load_u32(base + 4 * lane) } else { 0 })
    }
}

/// Largest over the lanes of the warp.
///
/// # Safety
/// - *converged*: all 32 lanes.
#[inline(always)]
unsafe fn warp_max(mut value: u32) -> u32 {
    let mut step = 16;
    while step > 0 {
        // SAFETY: all lanes take part — the caller.
        value = value.max(unsafe { warp::shuffle_xor(warp::FULL_MASK, value, step) });
        step /= 2;
    }
    value
}

/// The int8 of a value; `scale` is not 0. NaN gives 0.
#[inline(always)]
fn quantized(value: f32, scale: f32) -> i8 {
    math::round_i8(math::div(value, scale))
}

/// Quantises one row.
///
/// # Safety
/// - *converged*: one block per row, all its threads; rows *in-bounds*, and *aligned* (x to 16 bytes, q to as many
///   bytes as 16 bytes of x have elements) if `cols_in_pieces` is not 0 — checked in `QuantizeRows::run`.
#[inline(always)]
unsafe fn quantize_row<T: Element>(x: *const T, q: *mut i8, scale: *mut f32, dims: &QuantizeRowsDims) {
    let row = thread::block_idx_x() as usize;
    let (member, members) = (thread::thread_idx_x(), thread::block_dim_x());
    let per_piece = T::PER_16_BYTES as u32;
    let num_pieces = dims.cols_in_pieces / per_piece;
    // SAFETY: pieces lie within cols_in_pieces, which is at most cols, and single elements below cols — dims.
    unsafe {
        let x = x.add(row * dims.x_stride as usize);
        let q = q.add(row * dims.q_stride as usize);
        let mut most = 0;
        let mut piece = member;
        while piece < num_pieces {
            let mut values = [0.0; 8];
            T::unpack(global::load_nc_x4(x.add((piece * per_piece) as usize)), &mut values);
            let mut i = 0;
            while i < T::PER_16_BYTES {
                most = max_magnitude(values[i], most);
                i += 1;
            }
            piece += members;
        }
        let mut col = dims.cols_in_pieces + member;
        while col < dims.cols {
            most = max_magnitude(global::load(x.add(col as usize)).to_f32(), most);
            col += members;
        }
        let row_scale = math::div(f32::from_bits(block_max(most)), 127.0);
        if member == 0 {
            global::store(scale.add(row), row_scale);
        }
        // A scale of 0 stands for a row of zeros; any divisor gives those.
        let is_zero = row_scale == 0.0;
        let mut piece = member;
        while piece < num_pieces {
            let first = (piece * per_piece) as usize;
            let mut values = [0.0; 8];
            T::unpack(global::load_nc_x4(x.add(first)), &mut values);
            let mut bytes = [0u32; 2];
            let mut i = 0;
            while i < T::PER_16_BYTES {
                let byte = if is_zero { 0 } else { quantized(values[i], row_scale) };
                bytes[i / 4] |= u32::from(byte as u8) << (8 * (i % 4));
                i += 1;
            }
            if T::PER_16_BYTES == 4 {
                global::store(q.add(first).cast::<u32>(), bytes[0]);
            } else {
                global::store(q.add(first).cast::<u64>(), u64::from(bytes[0]) | u64::from(bytes[1]) << 32);
            }
            piece += members;
        }
        let mut col = dims.cols_in_pieces + member;
        while col < dims.cols {
            let value = global::load(x.add(col as usize)).to_f32();
            let byte = if is_zero { 0 } else { quantized(value, row_scale) };
            global::store(q.add(col as usize), byte);
            col += members;
        }
    }
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::matmul_i8`.
        ///
        /// # Safety
        /// - Arguments as `QuantizeRows::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(x: *const $type, q: *mut i8, scale: *mut f32, dims: QuantizeRowsDims) {
            // SAFETY: one block of 256 threads per row — QuantizeRows::run.
            unsafe { quantize_row::<$type>(x, q, scale, &dims) }
        }
    )*};
}
abi::quantize_rows_table!(entries);
