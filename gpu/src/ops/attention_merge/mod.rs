//! Attention over two parts of the keys as attention over all of them, by the logarithms of their sums:
//!
//! ```text
//! m = max(lse_a, lse_b)    w = exp(lse − m)    out = (w_a · a + w_b · b) / (w_a + w_b)    lse = m + ln(w_a + w_b)
//! ```
//!
//! Work split: a thread makes one piece of 16 bytes of a row, a head of a token; `abi::RowTiles` deals the pieces to
//! blocks. The threads of a row load its two logarithms each, which come out of the cache but for the first; the first
//! piece's stores the sum's. Bound by memory: each part is read once, and the result written once.

use abi::ops::attention_merge::{AttentionMergeDims, BLOCK_PIECES_LOG2};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, math, thread};

const LN_2: f32 = core::f32::consts::LN_2;

/// e^x for x up to 0, within some units in the last place however far x is from 0, and of subnormal numbers
/// within their last place.
#[inline(always)]
fn power(x: f32) -> f32 {
    /// What log2(e) has beyond f32.
    const LOW: f32 = (core::f64::consts::LOG2_E - math::LOG2_E as f64) as f32;
    let exponent = x * math::LOG2_E;
    // What the product has lost; of -infinity that is no number, and nothing to add.
    let lost = math::fma(x, math::LOG2_E, -exponent) + x * LOW;
    let whole = math::ex2_subnormal(exponent);
    if whole == 0.0 { 0.0 } else { math::fma(whole, lost * LN_2, whole) }
}

/// ln(1 + x) for x from 0 to 1, within three roundings: `2 artanh(x / (2 + x))` by its series. The logarithm of the
/// hardware errs by 2^-22 where the sum is near 1.
#[inline(always)]
fn ln_1p(x: f32) -> f32 {
    let s = math::div(x, 2.0 + x);
    let square = s * s;
    let series = math::fma(2.0 / 13.0, square, 2.0 / 11.0);
    let series = math::fma(series, square, 2.0 / 9.0);
    let series = math::fma(series, square, 2.0 / 7.0);
    let series = math::fma(series, square, 2.0 / 5.0);
    let series = math::fma(series, square, 2.0 / 3.0);
    math::fma(s * square, series, 2.0 * s)
}

/// A thread's piece, and what the parts' are multiplied by there.
struct Piece {
    /// Elements before it, in a, b and out.
    at: [usize; 3],
    weights: [f32; 2],
}

/// The thread's piece; none past the end. Stores the row's logarithm, if it is asked for and the piece the first.
///
/// # Safety
/// - Logarithms *in-bounds* for `dims` — AttentionMerge::run.
#[inline(always)]
unsafe fn place(
    lses: [*const f32; 2],
    lse: *mut f32,
    dims: &AttentionMergeDims,
    per_piece: usize,
) -> Option<Piece> {
    let (row, piece) = dims.tiles.locate(thread::block_idx_x(), thread::thread_idx_x(), BLOCK_PIECES_LOG2);
    if row >= dims.tiles.rows || piece >= dims.tiles.pieces {
        return None;
    }
    // A row has a head, or there would be none; so much the compiler is told.
    let heads = dims.heads.max(1);
    let (token, head) = ((row / heads) as usize, (row % heads) as usize);
    let of = |strides: [u32; 2]| {
        token * strides[0] as usize + head * strides[1] as usize + piece as usize * per_piece
    };
    let of_lse = |which: usize| head * dims.lse_strides[which] as usize + token;
    // SAFETY: a row that exists.
    let (a, b) = unsafe { (global::load(lses[0].add(of_lse(0))), global::load(lses[1].add(of_lse(1)))) };
    let most = a.max(b);
    // Of no keys at all: their differences would be no numbers. A NaN stays one.
    let none = a == f32::NEG_INFINITY && b == f32::NEG_INFINITY;
    let weight = |lse: f32| if lse == most { 1.0 } else { power(lse - most) };
    let powers = if none { [0.0; 2] } else { [weight(a), weight(b)] };
    let sum = powers[0] + powers[1];
    if piece == 0 && !lse.is_null() {
        // One of them is 1.
        let value = if none { f32::NEG_INFINITY } else { most + ln_1p(powers[0] * powers[1]) };
        // SAFETY: a row that exists, which has this piece once.
        unsafe { global::store(lse.add(of_lse(2)), value) };
    }
    let by = if none { 0.0 } else { math::div(1.0, sum) };
    let at = [of(dims.a_strides), of(dims.b_strides), of(dims.out_strides)];
    Some(Piece { at, weights: [powers[0] * by, powers[1] * by] })
}

/// `w_a · a + w_b · b`, where a weight of 0 hides what it is of.
#[inline(always)]
fn mixed(weights: [f32; 2], a: f32, b: f32) -> f32 {
    let a = if weights[0] == 0.0 { 0.0 } else { weights[0] * a };
    if weights[1] == 0.0 { a } else { math::fma(weights[1], b, a) }
}

/// # Safety
/// - Tensors *in-bounds* and *aligned(16)* — AttentionMerge::run.
#[inline(always)]
unsafe fn by_piece<T: Element>(
    parts: [*const T; 2],
    lses: [*const f32; 2],
    out: *mut T,
    lse: *mut f32,
    dims: &AttentionMergeDims,
) {
    // SAFETY: `place` gives offsets inside the tensors.
    unsafe {
        let Some(Piece { at, weights }) = place(lses, lse, dims, T::PER_16_BYTES) else { return };
        let (mut a, mut b) = ([0.0; 8], [0.0; 8]);
        T::unpack(global::load_stream_x4(parts[0].add(at[0])), &mut a);
        T::unpack(global::load_stream_x4(parts[1].add(at[1])), &mut b);
        let mut i = 0;
        while i < T::PER_16_BYTES {
            a[i] = mixed(weights, a[i], b[i]);
            i += 1;
        }
        global::store_x4(out.add(at[2]), T::pack(&a));
    }
}

/// # Safety
/// - As `by_piece`, without the alignment.
#[inline(always)]
unsafe fn by_element<T: Element>(
    parts: [*const T; 2],
    lses: [*const f32; 2],
    out: *mut T,
    lse: *mut f32,
    dims: &AttentionMergeDims,
) {
    // SAFETY: `place` gives offsets inside the tensors.
    unsafe {
        let Some(Piece { at, weights }) = place(lses, lse, dims, 1) else { return };
        let (a, b) = (global::load(parts[0].add(at[0])), global::load(parts[1].add(at[1])));
        global::store(out.add(at[2]), T::from_f32(mixed(weights, a.to_f32(), b.to_f32())));
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

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::attention_merge`.
        ///
        /// # Safety
        /// - Arguments as `AttentionMerge::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            a: *const $type,
            a_lse: *const f32,
            b: *const $type,
            b_lse: *const f32,
            out: *mut $type,
            lse: *mut f32,
            dims: AttentionMergeDims,
        ) {
            // SAFETY: the same contract.
            unsafe { body!($tile)([a, b], [a_lse, b_lse], out, lse, &dims) }
        }
    )*};
}
abi::attention_merge_table!(entries);
