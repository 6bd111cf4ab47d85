//! The rows of q that `decode_ring` multiplies: in each warp's registers, or beside fp8 in shared memory.

use abi::ops::attention::{AttentionDims, DECODE_RING_ROWS, THREADS};
use cuda_std::{global, math, shared, thread, warp};

use super::cached::Cached;
use super::offset;
use super::work::Work;
use crate::tile::multiplicand::Multiplicand;

/// The columns that a lane has of a key, of two of a split's rows: 16 bytes of the one and of the other by turns.
///
/// # Safety
/// - The split has keys; rows below `end_row` are inside q, *aligned(16)*.
#[inline(always)]
pub(super) unsafe fn load_queries<T: Multiplicand, C: Cached<T>, const STEPS: usize>(
    q: *const T,
    work: &Work,
    lane: u32,
    dims: &AttentionDims,
) -> [[u32; 4]; STEPS] {
    let (group, member) = (lane / 4, lane % 4);
    let mut queries = [[0; 4]; STEPS];
    let mut half = 0;
    while half < 2 {
        // The last row instead of those that there are not.
        let row = (work.first_row + group + 8 * half as u32).min(work.end_row - 1);
        let (query, head) = work.place(row, dims);
        let (query, strides) = (work.own.first_q + query, (dims.q_batch_stride, dims.q_token_stride));
        let at = offset(work.batch, strides.0, query, strides.1, head, dims.q_head_stride);
        let mut load = |i: usize, width: u32| {
            let (piece, part) = (i / C::PARTS, i % C::PARTS);
            let column = (member + 4 * piece as u32) * C::PER_PIECE + 8 * part as u32;
            if column < width {
                // SAFETY: a row of q — the caller; 16 bytes of it.
                queries[2 * i + half] = unsafe { global::load_nc_x4(q.wrapping_add(at + column as usize)) };
            }
        };
        let mut i = 0;
        if dims.head_dim as usize == 16 * STEPS {
            while i < STEPS / 2 {
                load(i, u32::MAX);
                i += 1;
            }
        } else {
            while i < STEPS / 2 {
                load(i, dims.head_dim);
                i += 1;
            }
        }
        half += 1;
    }
    queries
}

/// The same as first operands of `mma`, of which each is of two rows; zeros for rows that there are not.
#[inline(always)]
pub(super) fn operands<const STEPS: usize>(
    queries: &[[u32; 4]; STEPS],
    work: &Work,
    lane: u32,
) -> [[u32; 4]; STEPS] {
    let mut operands = [[0; 4]; STEPS];
    let mut half = 0;
    while half < 2 {
        // An instruction takes each word to where it is wanted; without one there would be moves before each product.
        let is_there = work.first_row + lane / 4 + 8 * (half as u32) < work.end_row;
        let mut i = 0;
        while i < STEPS {
            let words = queries[i / 2 * 2 + half];
            let mut j = 0;
            while j < 2 {
                operands[i][half + 2 * j] = if is_there { words[i % 2 * 2 + j] } else { 0 };
                j += 1;
            }
            i += 1;
        }
        half += 1;
    }
    operands
}

/// q in shared memory, of the type that keys are multiplied in: all warps want the same, and each brings a part of it there. If the
/// type is another than that of q, a row is multiplied by a power of two; if some elements are not representable even so, the block
/// does without.
#[derive(Clone, Copy)]
pub(super) struct SharedQueries {
    /// Operands of `mma`, [step][lane]; the rows' factors' inverses; of each warp whether it did not succeed.
    pub(super) at: u32,
}

impl SharedQueries {
    /// The largest factor is 2^40; none makes an element larger than 2^15.
    const MAX_SHIFT: u32 = 40;

    #[inline(always)]
    pub(super) fn inverses(self, steps: usize) -> u32 {
        self.at + steps as u32 * 512
    }

    #[inline(always)]
    pub(super) fn marks(self, steps: usize) -> u32 {
        self.inverses(steps) + DECODE_RING_ROWS * 4
    }

    /// A thread's part of a split's q: one or two pieces of a row, zeros for what there is not.
    ///
    /// # Safety
    /// - The split has keys; rows below `end_row` are inside q, *aligned(16)*.
    #[inline(always)]
    pub(super) unsafe fn load<T: Multiplicand>(
        q: *const T,
        work: &Work,
        steps: usize,
        dims: &AttentionDims,
    ) -> [[u32; 4]; 2] {
        let thread = thread::thread_idx_x();
        let row = work.first_row + thread / 8;
        let mut part = [[0; 4]; 2];
        if row < work.end_row {
            let (query, head) = work.place(row, dims);
            let (query, strides) = (work.own.first_q + query, (dims.q_batch_stride, dims.q_token_stride));
            let at = offset(work.batch, strides.0, query, strides.1, head, dims.q_head_stride);
            let mut i = 0;
            while i < steps / 4 {
                let column = thread % 8 * 8 + i as u32 * 64;
                if column < dims.head_dim {
                    // SAFETY: a row of q — the caller; 16 bytes of it.
                    part[i] = unsafe { global::load_nc_x4(q.wrapping_add(at + column as usize)) };
                }
                i += 1;
            }
        }
        part
    }

    /// Brings it to shared memory.
    ///
    /// # Safety
    /// - *converged*: the whole block, of which nobody reads the shared memory until the next barrier.
    #[inline(always)]
    pub(super) unsafe fn store<T: Multiplicand, M: Multiplicand>(
        self,
        part: [[u32; 4]; 2],
        steps: usize,
        salt: u32,
    ) {
        // Opaque, or the places would be kept in registers for the next split.
        let thread = thread::opaque(thread::thread_idx_x() + salt * THREADS) % THREADS;
        let (row, piece) = (thread / 8, thread % 8);
        let (mut words, mut inverse, mut is_exact) = (part, 1.0, true);
        // SAFETY: inside the block's shared memory — `smem_bytes`; the rest is the caller's promise.
        unsafe {
            if T::INFINITIES != M::INFINITIES {
                let mut values = [[0f32; 8]; 2];
                let mut largest = 0f32;
                let mut i = 0;
                while i < 8 * (steps / 4) {
                    if i % 8 == 0 {
                        T::unpack(part[i / 8], &mut values[i / 8]);
                    }
                    largest = math::max(largest, values[i / 8][i % 8].abs());
                    i += 1;
                }
                largest = warp::max_f32::<8>(largest);
                // From 2^14 on, below 2^15, or as it is if it is larger.
                let shift = (127 + 14u32).saturating_sub(largest.to_bits() >> 23).min(Self::MAX_SHIFT);
                let factor = f32::from_bits((127 + shift) << 23);
                inverse = f32::from_bits((127 - shift) << 23);
                let mut i = 0;
                while i < steps / 4 {
                    let mut back = [0f32; 8];
                    let scaled = values[i].map(|value| value * factor);
                    words[i] = M::pack(&scaled);
                    M::unpack(words[i], &mut back);
                    let mut j = 0;
                    while j < 8 {
                        // Not `!=`: NaN stays what it is.
                        #[allow(clippy::double_comparisons)]
                        let is_rounded = back[j] < scaled[j] || back[j] > scaled[j];
                        is_exact &= !is_rounded;
                        j += 1;
                    }
                    i += 1;
                }
                let is_exact = warp::all(warp::FULL_MASK, is_exact);
                if thread.is_multiple_of(32) {
                    shared::store_u32(self.marks(steps) + thread / 32 * 4, u32::from(!is_exact));
                }
            }
            if piece == 0 {
                shared::store_f32(self.inverses(steps) + row * 4, inverse);
            }
            let mut i = 0;
            while i < 2 * (steps / 4) {
                // Two steps are of 16 bytes of q: the first of the lane, the second of the columns behind them.
                let (piece, pair) = (piece + i as u32 / 2 * 8, i as u32 % 2);
                let (step, member) = (piece / 8 * 4 + piece % 2 * 2 + pair, piece / 2 % 4);
                let at = self.at + step * 512 + (row % 8 * 4 + member) * 16 + row / 8 * 4;
                shared::store_u32(at, words[i / 2][2 * (i % 2)]);
                shared::store_u32(at + 8, words[i / 2][2 * (i % 2) + 1]);
                i += 1;
            }
        }
    }
}
