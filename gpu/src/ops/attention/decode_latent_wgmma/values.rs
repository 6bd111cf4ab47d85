//! The warpgroups of values: products of values and weights, and what becomes of a split's results.

use abi::ops::attention::MAX_HEAD_DIM_V;
use cuda_std::wgmma::{Accumulate, Descriptor, MnMajor, Multiply, Swizzle};
use cuda_std::{barrier, fence, global, math, mbarrier, shared, thread, warp, wgmma};

use super::places::{DECAYS, END, FIRST, LAST, LAST_SPLIT, NO_SLOT, NONE, Turn, WEIGHT_BYTES, load_own};
use super::{KEYS, OWN, ROW_BYTES, ROWS, SUMS, VALUES};
use crate::matmul::multiplicand::Multiplicand;

/// Times 64 columns of a warpgroup's results.
const PARTS: usize = MAX_HEAD_DIM_V as usize / 128;
/// Bytes of a row of them.
const RESULT_BYTES: u32 = MAX_HEAD_DIM_V / 2 * 4;
/// Pieces of results that a thread stores together.
const LOTS: usize = 4;

/// A warpgroup of values: 256 columns.
///
/// # Safety
/// - All 128 threads (*converged*); the rest is the caller's promise to [`super::splits`].
#[inline(always)]
pub(super) unsafe fn values<T: Multiplicand + Multiply<[f32; SUMS]>>(half: u32, partial: *mut f32) {
    let lane = thread::lane();
    let member = lane % 4;
    let mut turn = Turn(0);
    let mut o = [[0f32; SUMS]; PARTS];
    // To which −0 a first split is added as it is, whatever the sign of its zeros.
    let mut joined = [[-0f32; SUMS]; PARTS];
    // SAFETY: a step has come, and what is told of it; results go to the slots of the rows that there are.
    unsafe {
        loop {
            mbarrier::wait_parity(turn.full_p(), turn.parity());
            let word = shared::load_u32(turn.note());
            if word == NONE {
                return;
            }
            // What TMA wrote is seen by those who waited for it.
            mbarrier::wait_parity(turn.full_k(), turn.parity());
            if word & DECAYS != 0 {
                let decays = load_own(turn.decays(), member);
                let mut i = 0;
                while i < PARTS * SUMS {
                    let sum = i % SUMS;
                    o[i / SUMS][sum] *= decays[sum / 4 * 2 + sum % 2];
                    i += 1;
                }
            }
            let accumulate = if word & FIRST != 0 { Accumulate::Overwrite } else { Accumulate::Add };
            let boxes = turn.keys() + half * PARTS as u32 * KEYS * ROW_BYTES;
            let v = Descriptor::<MnMajor>::new(boxes, Swizzle::Bytes128, KEYS * ROW_BYTES, 8 * ROW_BYTES);
            let p = Descriptor::<MnMajor>::new(turn.weights(), Swizzle::Bytes64, WEIGHT_BYTES, 8 * ROWS * 2);
            wgmma::fence();
            let mut i = 0;
            while i < KEYS / 16 {
                let accumulate = if i == 0 { accumulate } else { Accumulate::Add };
                let mut part = 0;
                while part < PARTS {
                    let v = v.advance(part as u32 * KEYS * ROW_BYTES + i * 16 * ROW_BYTES);
                    wgmma::ss::<T, _, _, _>(&mut o[part], v, p.advance(i * 16 * ROWS * 2), accumulate);
                    part += 1;
                }
                i += 1;
            }
            wgmma::commit_group();
            let [a, b, c, d] = &mut o;
            wgmma::wait_group::<0>(&mut (&mut (a, b), &mut (c, d)));
            // All that is told of the step is read before its keys are given back.
            let (mut own, mut before) = ([0.0; OWN], [0.0; OWN]);
            if word & LAST != 0 {
                (own, before) = (load_own(turn.factors()[0], member), load_own(turn.factors()[1], member));
            }
            let give_back = || {
                warp::sync_warp(warp::FULL_MASK);
                if lane == 0 {
                    mbarrier::arrive(turn.empty_k());
                }
            };
            if word & LAST_SPLIT == 0 {
                give_back();
            }
            if word & LAST != 0 {
                let mut i = 0;
                while i < PARTS * SUMS {
                    let (part, sum) = (i / SUMS, i % SUMS);
                    let row = sum / 4 * 2 + sum % 2;
                    let (o, joined) = (o[part][sum], &mut joined[part][sum]);
                    *joined = math::fma(o, own[row], *joined * before[row]);
                    i += 1;
                }
            }
            if word & LAST_SPLIT != 0 {
                // Opaque, or what is known of the thread would be kept in registers.
                let own_thread = thread::opaque(thread::thread_idx_x() + turn.0 * 128) % 128;
                let (group, warp_idx) = (own_thread % 32 / 4, own_thread / 32);
                // By way of the warpgroup's own boxes of values, which nobody else reads: whole rows at a time.
                let own_barrier = VALUES + half;
                barrier::sync(own_barrier, 128);
                let at = |row: u32, col: u32| boxes + row * RESULT_BYTES + ((col ^ (row / 2 % 4 * 8)) << 2);
                let mut i = 0;
                while i < PARTS * SUMS {
                    let (part, sum) = (i / SUMS, i % SUMS);
                    let row = (sum / 4 * 8 + sum % 2) as u32 + 2 * member;
                    let col = (part * 64 + sum / 2 % 2 * 8) as u32 + 16 * warp_idx + group;
                    shared::store_f32(at(row, col), joined[part][sum]);
                    i += 1;
                }
                barrier::sync(own_barrier, 128);
                // A thread has a piece of every second row. Rows that there are not come last.
                let (first_row, col) =
                    (own_thread / (RESULT_BYTES / 16), own_thread % (RESULT_BYTES / 16) * 4);
                let mut i = 0;
                while i < ROWS / 2 {
                    let (mut slots, mut words) = ([NO_SLOT; LOTS], [[0; 4]; LOTS]);
                    let mut j = 0;
                    while j < LOTS {
                        let row = first_row + 2 * (i + j as u32);
                        slots[j] = shared::load_u32(turn.slots() + row * 4);
                        words[j] = shared::load_u32x4(at(row, col));
                        j += 1;
                    }
                    let mut j = 0;
                    while j < LOTS {
                        if slots[j] != NO_SLOT {
                            let to = partial.add(slots[j] as usize * MAX_HEAD_DIM_V as usize);
                            global::store_x4(to.add((half * RESULT_BYTES / 4 + col) as usize), words[j]);
                        }
                        j += 1;
                    }
                    // Opaque, so that the loop stays one.
                    i = if slots[LOTS - 1] == NO_SLOT { ROWS } else { thread::opaque(i + LOTS as u32) };
                }
                fence::proxy_async_shared();
                give_back();
                joined = [[-0.0; SUMS]; PARTS];
            }
            if word & END != 0 {
                return;
            }
            turn.0 += 1;
        }
    }
}
