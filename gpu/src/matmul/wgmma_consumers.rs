//! The consumers' side of products by `wgmma`: the ring of stages, the main loop, and the way out from registers.
//!
//! Stages have rows of 128 bytes of both operands in the 128-byte swizzle. A consumer is a warpgroup that makes 64
//! rows, with all sums in registers. One group of `wgmma` stays in flight over the back edge; a stage is given back one
//! step late.

use abi::ops::matmul::WGMMA_ROW_BYTES;
use cuda_std::cvt::Element;
use cuda_std::wgmma::{Accumulate, Descriptor, KMajor, Multiply, Registers, Swizzle};
use cuda_std::{matrix, mbarrier, wgmma};

use super::epilogue::Epilogue;
use super::operand::Sum;
use crate::tile::activation::bent;

/// Bytes of a row of a stage, and of a box of out.
pub const ROW_BYTES: u32 = WGMMA_ROW_BYTES;
/// 64 × 64 elements of out, of 16 bits.
pub const BOX_BYTES: u32 = 64 * ROW_BYTES;

/// A place in the ring of stages.
#[derive(Clone, Copy)]
pub struct Ring<const STAGES: u32> {
    /// Which stage.
    pub stage: u32,
    /// Of the phase that its barriers are in.
    pub parity: u32,
}

impl<const STAGES: u32> Ring<STAGES> {
    /// The first stage.
    pub const START: Self = Ring { stage: 0, parity: 0 };

    /// Goes on to the next.
    #[inline(always)]
    pub fn advance(&mut self) {
        self.stage += 1;
        if self.stage == STAGES {
            self.stage = 0;
            self.parity ^= 1;
        }
    }
}

/// A consumer's sums over `steps` stages. `operands` says where its rows of a and those of b lie in a stage, `full` and
/// `release` are how a stage is waited for and given back, `meanwhile` what is done while a step is under way.
/// `promotes`: each step's sum is added by itself.
///
/// # Safety
/// - *converged*: all 128 threads of the warpgroup, also behind `meanwhile`.
/// - *initialised(by who fills the stages, behind `full`)*: 64 rows of a and `2 · SUMS` of b.
#[inline(always)]
pub unsafe fn multiply_stages<T: Multiply<[S; SUMS]>, S: Sum, const SUMS: usize, const STAGES: u32>(
    ring: &mut Ring<STAGES>,
    steps: u32,
    promotes: bool,
    operands: impl Fn(u32) -> (u32, u32),
    full: impl Fn(u32) -> u32,
    release: impl Fn(u32),
    mut meanwhile: impl FnMut(),
) -> [S; SUMS]
where
    [S; SUMS]: Registers,
{
    let mut sums = [S::ZERO; SUMS];
    let mut total = [S::ZERO; SUMS];
    let mut before = 0;
    let mut step = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while step < steps {
            let Ring { stage, parity } = *ring;
            mbarrier::wait_parity(full(stage), parity);
            let (a_at, b_at) = operands(stage);
            let a = Descriptor::<KMajor>::new(a_at, Swizzle::Bytes128, 16, 8 * ROW_BYTES);
            let b = Descriptor::<KMajor>::new(b_at, Swizzle::Bytes128, 16, 8 * ROW_BYTES);
            let accumulate = if promotes || step == 0 { Accumulate::Overwrite } else { Accumulate::Add };
            wgmma::fence();
            wgmma::ss::<T, _, _, _>(&mut sums, a, b, accumulate);
            wgmma::ss::<T, _, _, _>(&mut sums, a.advance(32), b.advance(32), Accumulate::Add);
            wgmma::ss::<T, _, _, _>(&mut sums, a.advance(64), b.advance(64), Accumulate::Add);
            wgmma::ss::<T, _, _, _>(&mut sums, a.advance(96), b.advance(96), Accumulate::Add);
            wgmma::commit_group();
            wgmma::wait_group::<1>(&mut sums);
            if step > 0 {
                release(before);
            }
            meanwhile();
            before = stage;
            ring.advance();
            step += 1;
            if promotes && step < steps {
                wgmma::wait_group::<0>(&mut sums);
                add(&mut total, &sums);
            }
        }
        wgmma::wait_group::<0>(&mut sums);
    }
    if promotes {
        add(&mut sums, &total);
    }
    if steps > 0 {
        release(before);
    }
    sums
}

/// Adds each sum to its total; floats are rounded to nearest.
#[inline(always)]
fn add<S: Sum, const SUMS: usize>(total: &mut [S; SUMS], sums: &[S; SUMS]) {
    let mut i = 0;
    while i < SUMS {
        total[i] = total[i].plus(sums[i]);
        i += 1;
    }
}

/// Where a consumer's 64 rows lie in out.
pub struct Place {
    /// First row.
    pub row: u32,
    /// First column.
    pub col: u32,
    /// Sums that are elements of out in the end: all, or half of them where the product is gated.
    pub len: usize,
    /// Which warpgroup of those that multiply.
    pub consumer: u32,
    /// Thread of the warpgroup.
    pub member: u32,
}

impl Place {
    /// The row of the thread's first registers in the 64, and the column of its first register in 8.
    #[inline(always)]
    pub fn of_register(&self) -> (u32, u32) {
        (self.member / 32 * 16 + self.member % 32 / 4, self.member % 4 * 2)
    }
}

/// What becomes of a consumer's sums.
pub trait Results<S, const SUMS: usize> {
    /// Makes them elements of out, `place.len` of them: f32, by their bits where sums are integers.
    ///
    /// # Safety
    /// - *converged*: all 128 threads of the consumer.
    /// - What it adds or multiplies by is *in-bounds* for the dimensions.
    unsafe fn make(&self, sums: &mut [S; SUMS], place: &Place);
}

impl<T: Element, O: Element, const SUMS: usize> Results<f32, SUMS> for Epilogue<'_, T, O> {
    // Not as a closure: the compiler takes one of this size for a call, with the sums in memory.
    #[inline(always)]
    unsafe fn make(&self, sums: &mut [f32; SUMS], place: &Place) {
        // One jump over what most products do not want: instructions behind a far jump come late.
        if !self.is_plain() || self.has_bias() {
            // SAFETY: the caller's promise.
            unsafe { finish(sums, self, place) }
        }
    }
}

/// Makes the sums elements of out, `place.len` of them.
///
/// Step by step over all of them, so that a step that is not asked for costs one branch.
///
/// # Safety
/// - Bias and residual *in-bounds* for the dimensions.
#[inline(always)]
unsafe fn finish<T: Element, O: Element, const SUMS: usize>(
    sums: &mut [f32; SUMS],
    end: &Epilogue<'_, T, O>,
    place: &Place,
) {
    let (row, first) = place.of_register();
    let col = |i: usize| place.col + first + 8 * (i as u32 / 4) + i as u32 % 2;
    if end.scale() != 1.0 {
        let mut i = 0;
        while i < SUMS {
            sums[i] *= end.scale();
            i += 1;
        }
    }
    if end.has_bias() {
        let mut i = 0;
        while i < SUMS {
            // SAFETY: of columns that exist — the method.
            let bias = unsafe {
                if i >= place.len { end.bias_of_up(col(i - SUMS / 2)) } else { end.bias_of(col(i)) }
            };
            sums[i] += bias;
            sums[i + 2] += bias;
            i += if i % 4 == 0 { 1 } else { 3 };
        }
    }
    if end.is_activated() {
        if end.is_straight() {
            activate(sums, end.is_gated(), |x| end.activated_straight(x));
        } else {
            let cols = end.n().saturating_sub(place.col).min(2 * place.len as u32);
            activate_by_groups(sums, cols, |x| end.exponent(x));
        }
    }
    if end.is_gated() {
        let mut i = 0;
        while i < SUMS / 2 {
            sums[i] *= sums[i + SUMS / 2];
            i += 1;
        }
    }
    if end.has_residual() {
        // Row by row: their registers are two in four.
        let mut half = 0;
        while half < 2 {
            let row = place.row + row + 8 * half as u32;
            let from = end.residual_row(row);
            let len = if row < end.dims.m { place.len } else { 0 };
            let mut i = 2 * half;
            while i < SUMS {
                if i < len && col(i) < end.n() {
                    // SAFETY: the row and column exist, the column is even.
                    let [low, high] = unsafe { end.residual_pair(from, col(i)) };
                    sums[i] += low;
                    sums[i + 1] += high;
                }
                i += 4;
            }
            half += 1;
        }
    }
}

/// An activation of few instructions of the sums, or of the gate's alone.
#[inline(always)]
fn activate<const SUMS: usize>(sums: &mut [f32; SUMS], is_gated: bool, activation: impl Fn(f32) -> f32) {
    let mut i = 0;
    while i < SUMS / 2 {
        sums[i] = activation(sums[i]);
        i += 1;
    }
    if !is_gated {
        while i < SUMS {
            sums[i] = activation(sums[i]);
            i += 1;
        }
    }
}

/// An activation by its curve, of the sums of the first columns: each group's polynomials beside the powers and
/// reciprocals of the one before.
///
/// ptxas moves nothing across the branch that each group has. Of all sums at once it puts the polynomials first, and
/// each of the two units is idle while those for the other work. A driver has refused groups of 16.
#[inline(always)]
fn activate_by_groups<const SUMS: usize>(sums: &mut [f32; SUMS], cols: u32, exponent: impl Fn(f32) -> f32) {
    // No more than half of them, of which the gate's are.
    let group = const { if SUMS < 16 { SUMS / 2 } else { 8 } };
    let mut exponents = [0.0; 8];
    let mut j = 0;
    while j < group {
        exponents[j] = exponent(sums[j]);
        j += 1;
    }
    let mut i = 0;
    while i < SUMS {
        if 2 * (i as u32) < cols {
            let mut j = 0;
            while j < group {
                sums[i + j] = bent(sums[i + j], exponents[j]);
                if i + group < SUMS {
                    exponents[j] = exponent(sums[i + group + j]);
                }
                j += 1;
            }
        }
        i += group;
    }
}

/// The element of out that stands in the place of a sum.
#[inline(always)]
fn value<S: Sum>(sum: S) -> f32 {
    f32::from_word(sum.to_word())
}

/// Rounds the sums and stores them from the registers, two at a time: for any stride and type of out.
///
/// # Safety
/// - *in-bounds(out)* for the dimensions; nobody else writes the tile.
#[inline(always)]
pub unsafe fn store_pairs<S: Sum, T: Element, O: Element, const SUMS: usize>(
    sums: &[S; SUMS],
    end: &Epilogue<'_, T, O>,
    place: &Place,
) {
    let (row, first) = place.of_register();
    let mut half = 0;
    while half < 2 {
        let row = place.row + row + 8 * half as u32;
        let to = end.out_row(row);
        let len = if row < end.dims.m { place.len } else { 0 };
        let mut i = 2 * half;
        while i < SUMS {
            let col = place.col + first + 8 * (i as u32 / 4);
            if i < len && col < end.n() {
                // SAFETY: the row and column exist — the caller.
                unsafe { end.store_pair(to, col, [value(sums[i]), value(sums[i + 1])]) };
            }
            i += 4;
        }
        half += 1;
    }
}

/// A consumer's results on their way out: rounded, 64 rows in boxes of 64 columns, of which the first goes next.
pub struct Rounded<const SUMS: usize> {
    /// Two elements each, in the order of the sums; the first half counts.
    words: [u32; SUMS],
}

/// Words of a box that a thread holds.
pub const BOX_WORDS: usize = 16;

impl<const SUMS: usize> Rounded<SUMS> {
    /// Nothing. Zeros, and no values at all would not be cheaper: LLVM then keeps those of before.
    pub const NONE: Self = Rounded { words: [0; SUMS] };

    /// Rounds the sums.
    #[inline(always)]
    pub fn round<S: Sum, O: Element>(&mut self, sums: &[S; SUMS]) {
        let mut i = 0;
        while i < SUMS / 8 {
            let s = 8 * i;
            let words = O::pack(&[
                value(sums[s]),
                value(sums[s + 1]),
                value(sums[s + 2]),
                value(sums[s + 3]),
                value(sums[s + 4]),
                value(sums[s + 5]),
                value(sums[s + 6]),
                value(sums[s + 7]),
            ]);
            let mut j = 0;
            while j < 4 {
                self.words[4 * i + j] = words[j];
                j += 1;
            }
            i += 1;
        }
    }

    /// Puts the next 64 columns into a box.
    ///
    /// # Safety
    /// - As [`put_words`].
    #[inline(always)]
    pub unsafe fn put_box(&mut self, at: u32, member: u32) {
        // SAFETY: the caller's promise.
        unsafe { put_words(&self.words, at, member) };
        // In registers, which have no index: so one piece of code serves for all boxes.
        let mut i = BOX_WORDS;
        while i < SUMS / 2 {
            self.words[i - BOX_WORDS] = self.words[i];
            i += 1;
        }
    }

    /// What is left after `boxes` of them, as far as there is room for it.
    #[inline(always)]
    pub fn rest<const WORDS: usize>(&self, boxes: usize) -> [u32; WORDS] {
        let mut words = [0; WORDS];
        let mut i = 0;
        while i < WORDS && boxes * BOX_WORDS + i < SUMS / 2 {
            words[i] = self.words[boxes * BOX_WORDS + i];
            i += 1;
        }
        words
    }
}

/// Puts a thread's first words, 64 columns of rounded results, into a box in the 128-byte swizzle.
///
/// # Safety
/// - *converged*: all 32 threads of the warp; its rows of the box are theirs.
#[inline(always)]
pub unsafe fn put_words<const WORDS: usize>(words: &[u32; WORDS], at: u32, member: u32) {
    let (lane, row) = (member % 32, member / 32 * 16 + member % 16);
    // Of the swizzle; the other pieces' places differ from the first one's in the bits of their numbers alone.
    let first = at + row * ROW_BYTES + (((lane / 16) ^ (row % 8)) << 4);
    let mut j = 0;
    while j < BOX_WORDS / 4 {
        let w = 4 * j;
        // SAFETY: inside the box — the caller.
        unsafe {
            matrix::store_x4(first ^ (32 * j as u32), [words[w], words[w + 1], words[w + 2], words[w + 3]])
        };
        j += 1;
    }
}
