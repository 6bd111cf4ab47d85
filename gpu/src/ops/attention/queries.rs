//! The rows of q that `decode_ring` multiplies: in each warp's registers, or beside fp8 in shared memory.

use abi::ops::attention::{AttentionDims, THREADS};
use cuda_std::{global, math, shared, thread, warp};

use super::cached::Cached;
use super::offset;
use super::work::Work;
use crate::matmul::multiplicand::Multiplicand;

/// A lane's part of a split's q, as second operands of `mma`: [step of 16 columns][eight rows].
///
/// # Safety
/// - The split has keys; rows below `end_row` are inside q, *aligned(16)*.
#[inline(always)]
pub(super) unsafe fn load_queries<
    T: Multiplicand,
    C: Cached<T>,
    const ROWS: u32,
    const HALVES: usize,
    const STEPS: usize,
>(
    q: *const T,
    work: &Work<ROWS>,
    lane: u32,
    dims: &AttentionDims,
) -> [[[u32; 2]; HALVES]; STEPS] {
    let (group, member) = (lane / 4, lane % 4);
    let mut queries = [[[0; 2]; HALVES]; STEPS];
    let mut half = 0;
    while half < HALVES {
        // The last row instead of those that there are not: nobody looks at their results.
        let row = (work.first_row + group + 8 * half as u32).min(work.end_row - 1);
        let (query, head) = work.place(row, dims);
        let (query, strides) = (work.own.first_q + query, (dims.q_batch_stride, dims.q_token_stride));
        let at = offset(work.batch, strides.0, query, strides.1, head, dims.q_head_stride);
        let mut load = |width: u32| {
            let mut i = 0;
            while i < 2 * STEPS {
                // The columns of a key that `ldmatrix` brings the lane: two of each eight, of fp8 four of each 16.
                let column = if C::PARTS == 1 {
                    8 * i as u32 + 2 * member
                } else {
                    16 * (i / 2) as u32 + 4 * member + 2 * (i % 2) as u32
                };
                if column < width {
                    // SAFETY: a row of q — the caller; two elements of it.
                    queries[i / 2][half][i % 2] =
                        unsafe { global::load(q.wrapping_add(at + column as usize).cast()) };
                }
                i += 1;
            }
        };
        // Whole heads without predicates.
        if dims.head_dim as usize == 16 * STEPS {
            load(u32::MAX);
        } else {
            load(dims.head_dim);
        }
        half += 1;
    }
    queries
}

/// q in shared memory, of the type that keys are multiplied in: all warps want the same, and each brings a part of it
/// there. If the type is another than that of q, a row is multiplied by a power of two; if some elements are not
/// representable even so, the block does without.
#[derive(Clone, Copy)]
pub(super) struct SharedQueries<const ROWS: u32> {
    /// Operands of `mma`, [step][eight rows][lane]; the rows' factors' inverses; of each warp whether it did not
    /// succeed.
    pub(super) at: u32,
}

impl<const ROWS: u32> SharedQueries<ROWS> {
    /// The largest factor is 2^40; none makes an element larger than 2^15.
    const MAX_SHIFT: u32 = 40;
    /// Threads that bring a row.
    const THREADS: u32 = THREADS / ROWS;

    #[inline(always)]
    pub(super) fn inverses(self, steps: usize) -> u32 {
        self.at + steps as u32 * ROWS * 32
    }

    #[inline(always)]
    pub(super) fn marks(self, steps: usize) -> u32 {
        self.inverses(steps) + ROWS * 4
    }

    /// Pieces of 16 bytes that each of those brings, one or two.
    #[inline(always)]
    fn pieces(steps: usize) -> usize {
        (2 * steps).div_ceil(Self::THREADS as usize)
    }

    /// A thread's part of a split's q: pieces of a row, zeros for what there is not.
    ///
    /// # Safety
    /// - The split has keys; rows below `end_row` are inside q, *aligned(16)*.
    #[inline(always)]
    pub(super) unsafe fn load<T: Multiplicand>(
        q: *const T,
        work: &Work<ROWS>,
        steps: usize,
        dims: &AttentionDims,
    ) -> [[u32; 4]; 2] {
        let thread = thread::thread_idx_x();
        let row = work.first_row + thread / Self::THREADS;
        let mut part = [[0; 4]; 2];
        if row < work.end_row {
            let (query, head) = work.place(row, dims);
            let (query, strides) = (work.own.first_q + query, (dims.q_batch_stride, dims.q_token_stride));
            let at = offset(work.batch, strides.0, query, strides.1, head, dims.q_head_stride);
            let mut i = 0;
            while i < Self::pieces(steps) {
                let column = (thread % Self::THREADS + i as u32 * Self::THREADS) * 8;
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
        let (row, piece) = (thread / Self::THREADS, thread % Self::THREADS);
        let (mut words, mut inverse, mut is_exact) = (part, 1.0, true);
        // SAFETY: inside the block's shared memory — `smem_bytes`; the rest is the caller's promise.
        unsafe {
            if T::INFINITIES != M::INFINITIES {
                let mut values = [[0f32; 8]; 2];
                let mut largest = 0f32;
                let mut i = 0;
                while i < 8 * Self::pieces(steps) {
                    if i % 8 == 0 {
                        T::unpack(part[i / 8], &mut values[i / 8]);
                    }
                    largest = math::max(largest, values[i / 8][i % 8].abs());
                    i += 1;
                }
                // A row's threads are neighbours.
                largest = if Self::THREADS == 8 {
                    warp::max_f32::<8>(largest)
                } else {
                    warp::max_f32::<16>(largest)
                };
                // From 2^14 on, below 2^15, or as it is if it is larger.
                let shift = (127 + 14u32).saturating_sub(largest.to_bits() >> 23).min(Self::MAX_SHIFT);
                let factor = f32::from_bits((127 + shift) << 23);
                inverse = f32::from_bits((127 - shift) << 23);
                let mut i = 0;
                while i < Self::pieces(steps) {
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
            while i < Self::pieces(steps) {
                // Of a step and row there are two pieces; a lane has half of one.
                let piece = piece + i as u32 * Self::THREADS;
                if piece < 2 * steps as u32 {
                    let at = self.at + (piece / 2 * ROWS + row) * 32 + piece % 2 * 16;
                    shared::store_u32x4(at, words[i]);
                }
                i += 1;
            }
        }
    }
}
