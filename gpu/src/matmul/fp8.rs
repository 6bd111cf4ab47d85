//! Products of fp8 by fp8: rows that become fp8, each 128 of them by a scale of their own, and sums of 128 that are
//! added up in f32.
//!
//! A packed weight's tiles of 8 bits have their k in an order of their own (`abi::weight::byte_place`), in which
//! [`quantise`] stores the rows too: what matters is that both have the same. Rows that are gathered are so then: as
//! fp8 a row of x that several need is there several times, and TMA brings them all.
//!
//! ```text
//! out[i, j] = Σ_b a_scale[i, b] · w_scale[j, b] · (Σ_{k in b} qa[i, k] · qw[j, k])      b: 128 of k each
//! ```
//!
//! The inner sum is `wgmma`'s, which keeps fewer bits than f32; the outer one is f32, in the order of b.

use abi::matmul_fp8::{BLOCK_K, QuantiseDims};
use abi::weight::{TILE_K, byte_place};
use cuda_std::cvt::{E4m3, Element, e4m3x2_from_f32};
use cuda_std::wgmma::{Accumulate, Descriptor, KMajor, Multiply, Registers, Swizzle};
use cuda_std::{global, math, mbarrier, thread, warp, wgmma};

use super::wgmma_consumers::{ROW_BYTES, Ring};

/// Lanes that have 128 elements of a row, 16 bytes each.
const LANES: u32 = BLOCK_K / 8;

/// Rows become e4m3, and each 128 of them a scale: `scale = max|x| / 448`, `q = round(x / scale)`, and zeros where all
/// are. A NaN or infinity makes the scale so, and then the products.
///
/// # Safety
/// - *converged*: whole warps; x and the order *in-bounds* for `dims`, its rows aligned to 16 bytes and k a multiple of
///   8; q with rows of `dims.q_stride` bytes, a multiple of 128, and scales `[blocks of k, rows]` — who launches.
#[inline(always)]
pub unsafe fn quantise<T: Element>(
    x: *const T,
    order: *const u32,
    q: *mut u32,
    scales: *mut f32,
    dims: &QuantiseDims,
) {
    let lane = thread::lane();
    let (half, own) = (lane / LANES, lane % LANES);
    let blocks = dims.k.div_ceil(BLOCK_K);
    // Two blocks of a row for a warp.
    let pairs = blocks.div_ceil(2).max(1);
    let warps = thread::block_dim_x() / 32;
    let mut task = thread::block_idx_x() * warps + thread::warp_idx();
    while task < dims.rows * pairs {
        let (row, block) = (task / pairs, task % pairs * 2 + half);
        let k = block * BLOCK_K + own * 8;
        let mut values = [0.0; 8];
        if k < dims.k {
            // SAFETY: an order for every row, if there is a fan-out; eight elements of the row: k is a multiple of 8.
            let bytes = unsafe {
                let from = match dims.fan_out {
                    0 => row,
                    fan_out => (global::load(order.add(row as usize)) / fan_out).min(dims.x_rows - 1),
                };
                global::load_x4(x.add(from as usize * dims.x_stride as usize + k as usize))
            };
            T::unpack(bytes, &mut values);
        }
        // Magnitudes as integers have infinity and NaN at the top.
        let mut most = 0;
        let mut i = 0;
        while i < 8 {
            most = (values[i].to_bits() & 0x7fff_ffff).max(most);
            i += 1;
        }
        let mut step = LANES / 2;
        while step > 0 {
            // SAFETY: all lanes are here: `task` is the same for all.
            most = most.max(unsafe { warp::shuffle_xor(warp::FULL_MASK, most, step) });
            step /= 2;
        }
        let scale = f32::from_bits(most) * (1.0 / 448.0);
        // A division by a subnormal may be infinite: what is so small is zero.
        let inverse = if scale < f32::MIN_POSITIVE { 0.0 } else { math::div(1.0, scale) };
        if block < blocks {
            let mut words = [0; 2];
            let mut i = 0;
            while i < 2 {
                let pair = |at: usize| e4m3x2_from_f32(values[at] * inverse, values[at + 1] * inverse) as u32;
                words[i] = pair(4 * i) | pair(4 * i + 2) << 16;
                i += 1;
            }
            let at = |k: u32| (k / TILE_K * TILE_K + byte_place(k % TILE_K)) / 4;
            // SAFETY: words of the row, whose stride has all blocks; a scale of the row's block.
            unsafe {
                let to = q.add(row as usize * (dims.q_stride / 4) as usize);
                global::store(to.add(at(k) as usize), words[0]);
                global::store(to.add(at(k + 4) as usize), words[1]);
                if own == 0 {
                    global::store(scales.add(block as usize * dims.rows as usize + row as usize), scale);
                }
            }
        }
        task += thread::grid_dim_x() * warps;
    }
}

/// A consumer's sums over `steps` stages, each a block of k, whose sum is multiplied by the scales of the thread's two
/// rows and of the weight: `scales(step)`, which are loaded a step ahead. Rows of a are 128 bytes in the 128-byte
/// swizzle; those of b are two tiles of 64 bytes, `2 · SUMS` rows each, in the 64-byte swizzle, one after the other.
/// `operands`, `full`, `release` and `meanwhile` as for [`super::wgmma_consumers::multiply_stages`].
///
/// # Safety
/// - *converged*: all 128 threads of the warpgroup, also behind `meanwhile` and `scales`.
/// - *initialised(by who fills the stages, behind `full`)*: 64 rows of a and `2 · SUMS` of b.
#[inline(always)]
pub unsafe fn multiply_blocks<const SUMS: usize, const STAGES: u32>(
    ring: &mut Ring<STAGES>,
    steps: u32,
    scales: impl Fn(u32) -> [f32; 3],
    operands: impl Fn(u32) -> (u32, u32),
    full: impl Fn(u32) -> u32,
    release: impl Fn(u32),
    mut meanwhile: impl FnMut(),
) -> [f32; SUMS]
where
    E4m3: Multiply<[f32; SUMS]>,
    [f32; SUMS]: Registers,
{
    const TILE_ROW: u32 = TILE_K;
    let mut sums = [0.0; SUMS];
    let mut total = [0.0; SUMS];
    let mut step = 0;
    let mut ahead = if steps > 0 { scales(0) } else { [0.0; 3] };
    // SAFETY: the caller's promise.
    unsafe {
        while step < steps {
            let Ring { stage, parity } = *ring;
            mbarrier::wait_parity(full(stage), parity);
            let (a_at, b_at) = operands(stage);
            let a = Descriptor::<KMajor>::new(a_at, Swizzle::Bytes128, 16, 8 * ROW_BYTES);
            let first = Descriptor::<KMajor>::new(b_at, Swizzle::Bytes64, 16, 8 * TILE_ROW);
            let second = first.advance(2 * SUMS as u32 * TILE_ROW);
            wgmma::fence();
            wgmma::ss::<E4m3, _, _, _>(&mut sums, a, first, Accumulate::Overwrite);
            wgmma::ss::<E4m3, _, _, _>(&mut sums, a.advance(32), first.advance(32), Accumulate::Add);
            wgmma::ss::<E4m3, _, _, _>(&mut sums, a.advance(64), second, Accumulate::Add);
            wgmma::ss::<E4m3, _, _, _>(&mut sums, a.advance(96), second.advance(32), Accumulate::Add);
            wgmma::commit_group();
            // Not multiplied before the products are there: nothing may wait for them here.
            let own = ahead;
            ahead = scales((step + 1).min(steps - 1));
            meanwhile();
            wgmma::wait_group::<0>(&mut sums);
            release(stage);
            let by = [own[0] * own[2], own[1] * own[2]];
            let mut i = 0;
            while i < SUMS {
                total[i] = math::fma(sums[i], by[i / 2 % 2], total[i]);
                i += 1;
            }
            ring.advance();
            step += 1;
        }
    }
    total
}
