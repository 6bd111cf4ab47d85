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
use abi::ops::matmul::MatmulDims;
use abi::weight::{BLOCK_SCALES, TILE_K, TILE_ROWS, WeightDims, byte_place};
use cuda_std::cvt::{E4m3, Element, e4m3x2_from_f32};
use cuda_std::tma::TensorMap;
use cuda_std::wgmma::{Accumulate, Descriptor, KMajor, Multiply, Registers, Swizzle};
use cuda_std::{global, math, mbarrier, thread, tma, warp, wgmma};

use super::wgmma::{Multiplier, Share, Stages};
use super::wgmma_consumers::{Place, ROW_BYTES, Ring};

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

/// The scales of a step: of the thread's two rows, and of the weight's even and odd rows in each of `PARTS` equal parts
/// of the tile.
#[derive(Clone, Copy)]
pub struct Scales<const PARTS: usize> {
    /// Of rows of a.
    pub rows: [f32; 2],
    /// Of rows of b.
    pub cols: [[f32; 2]; PARTS],
}

/// A consumer's sums over `steps` stages, each a block of k, whose sum is multiplied by `scales(step)`, which are
/// loaded a step ahead. Rows of a are 128 bytes in the 128-byte swizzle; those of b are two tiles of 64 bytes, `2 ·
/// SUMS` rows each, in the 64-byte swizzle, one after the other. `operands`, `full`, `release` and `meanwhile` as for
/// [`super::wgmma_consumers::multiply_stages`].
///
/// # Safety
/// - *converged*: all 128 threads of the warpgroup, also behind `meanwhile` and `scales`.
/// - *initialised(by who fills the stages, behind `full`)*: 64 rows of a and `2 · SUMS` of b.
#[inline(always)]
pub unsafe fn multiply_blocks<const SUMS: usize, const PARTS: usize, const STAGES: u32>(
    ring: &mut Ring<STAGES>,
    steps: u32,
    scales: impl Fn(u32) -> Scales<PARTS>,
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
    let none = Scales { rows: [0.0; 2], cols: [[0.0; 2]; PARTS] };
    let mut ahead = if steps > 0 { scales(0) } else { none };
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
            let mut part = 0;
            while part < PARTS {
                let by = own.cols[part];
                let by =
                    [[own.rows[0] * by[0], own.rows[0] * by[1]], [own.rows[1] * by[0], own.rows[1] * by[1]]];
                let mut i = part * (SUMS / PARTS);
                while i < (part + 1) * (SUMS / PARTS) {
                    total[i] = math::fma(sums[i], by[i / 2 % 2][i % 2], total[i]);
                    i += 1;
                }
                part += 1;
            }
            ring.advance();
            step += 1;
        }
    }
    total
}

/// A packed weight of fp8, multiplied by rows that [`quantise`] has made. In tiles of `2 · SUMS` columns, of which each
/// of `PARTS` equal parts lies in one block of scales. `LATE`: results leave before the next tile is begun.
#[derive(Clone, Copy)]
pub struct Fp8<'a, const PARTS: usize, const LATE: bool> {
    /// The tiles, `[rows of tiles][tiles · 16][64]` bytes, in boxes of a tile of each of the rows of tiles that a block
    /// loads.
    pub map: *const TensorMap,
    /// Scales of the weight: of blocks of rows, or one for each row.
    pub scales: *const f32,
    /// Scales of the rows: `[blocks of k, rows]`.
    pub row_scales: *const f32,
    /// Sizes of the weight.
    pub weight: &'a WeightDims,
    /// Sizes of the product.
    pub dims: &'a MatmulDims,
    /// Whether the weight's rows are those of a gate and of up in turn.
    pub gated: bool,
}

impl<const SUMS: usize, const PARTS: usize, const LATE: bool> Multiplier<E4m3, f32, SUMS>
    for Fp8<'_, PARTS, LATE>
where
    E4m3: Multiply<[f32; SUMS]>,
    [f32; SUMS]: Registers,
{
    const STORES_AT_ONCE: bool = LATE;

    #[inline(always)]
    unsafe fn prefetch_maps(&self) {
        // SAFETY: the caller's promise.
        unsafe { tma::prefetch_map(self.map) };
    }

    #[inline(always)]
    unsafe fn load(&self, to: u32, step: u32, row: u32, full: u32, shared: Option<Share>) {
        let (rows, row) = (2 * SUMS as u32, if self.gated { 2 * row } else { row });
        // Two tiles of k, of which the second may not exist: then it is zeros.
        let mut tile = 0;
        while tile < 2 {
            let (to, k) = (to + tile * rows * TILE_K, ((2 * step + tile) * TILE_ROWS) as i32);
            // SAFETY: the caller's promise.
            unsafe {
                if let Some(share) = shared {
                    let part = share.rank * (rows / share.of);
                    let block = ((row + part) / TILE_ROWS) as i32;
                    tma::load_multicast(to + part * TILE_K, self.map, [0, k, block, 0], full, share.all());
                } else {
                    tma::load(to, self.map, [0, k, (row / TILE_ROWS) as i32, 0], full);
                }
            }
            tile += 1;
        }
    }

    #[inline(always)]
    unsafe fn sums<const STAGES: u32>(
        &self,
        ring: &mut Ring<STAGES>,
        steps: u32,
        place: &Place,
        stages: Stages<impl Fn(u32) -> (u32, u32), impl Fn(u32) -> u32, impl Fn(u32)>,
        mut meanwhile: impl FnMut(),
    ) -> [f32; SUMS] {
        let Stages { operands, full, release } = stages;
        let WeightDims { stretches, rows_log2, .. } = *self.weight;
        let has_blocks = rows_log2 != 0;
        let col = if self.gated { 2 * place.col } else { place.col };
        let of_part = |part: usize| {
            let col = (col + part as u32 * (2 * SUMS / PARTS) as u32).min(self.dims.n - 1);
            self.scales.wrapping_add(((col >> rows_log2) * stretches * BLOCK_SCALES) as usize)
        };
        let by_step = if stretches > 1 { BLOCK_SCALES as usize } else { 0 };
        let (row, _) = place.of_register();
        let of_row = |row: u32| self.row_scales.wrapping_add((place.row + row).min(self.dims.m - 1) as usize);
        let rows = [of_row(row), of_row(row + 8)];
        // SAFETY: rows of the tile, and where they end the last one; scales of blocks that exist, and of the rows, for
        // each step; the caller's promise.
        unsafe {
            let scales = |step: u32| {
                let mut cols = [[1.0; 2]; PARTS];
                let mut part = 0;
                while part < PARTS && has_blocks {
                    let at = of_part(part).wrapping_add(step as usize * by_step);
                    let [even, _, odd, _] = global::load_x4(at);
                    cols[part] = [f32::from_bits(even), f32::from_bits(odd)];
                    part += 1;
                }
                let at = step as usize * self.dims.m as usize;
                Scales { rows: rows.map(|row| global::load(row.wrapping_add(at))), cols }
            };
            let mut sums =
                multiply_blocks::<SUMS, PARTS, STAGES>(ring, steps, scales, operands, full, release, || {
                    if !LATE {
                        meanwhile();
                    }
                });
            if !has_blocks {
                self.scale_columns(&mut sums, col, place.member);
            }
            if self.gated { gates_first(&sums, place.member) } else { sums }
        }
    }
}

impl<const PARTS: usize, const LATE: bool> Fp8<'_, PARTS, LATE> {
    /// Multiplies by the scales of the columns from `col` on, one for each.
    ///
    /// # Safety
    /// - Scales of the weight's rows, 16 by 16 in the order of `abi::weight::scale_place`.
    #[inline(always)]
    unsafe fn scale_columns<const SUMS: usize>(&self, sums: &mut [f32; SUMS], col: u32, member: u32) {
        let mut i = 0;
        while i < SUMS {
            let block = (col / TILE_ROWS + i as u32 / 8).min(self.weight.row_blocks - 1);
            let at = self.scales.wrapping_add((block * TILE_ROWS + member % 4 * 4) as usize);
            // SAFETY: the caller's promise; a block that exists.
            let own = unsafe { global::load_x4(at) }.map(f32::from_bits);
            let mut j = 0;
            while j < 8 {
                // Columns of either parity, and 8 further on.
                sums[i + j] *= own[j % 2 * 2 + j / 4];
                j += 1;
            }
            i += 8;
        }
    }
}

/// Of columns that are a gate's and up's in turn: first the gate's sums, then up's, in the places that columns of out
/// have.
///
/// # Safety
/// - *converged*: all 32 lanes of the warp.
#[inline(always)]
unsafe fn gates_first<const SUMS: usize>(sums: &[f32; SUMS], member: u32) -> [f32; SUMS] {
    let mut sorted = [0.0; SUMS];
    let (lane, own) = (member % 32, member % 4);
    let mut i = 0;
    while i < SUMS {
        // Of 16 columns those of 8 columns of out, in a row: a lane has gate and up of column `own` of the first four
        // and of the others, and wants columns `2 own` and `2 own + 1` of the eight.
        let mut j = 0;
        while j < 8 {
            let (half, which, second) = (j / 4, j / 2 % 2, j % 2);
            let from = lane - own + own % 2 * 2 + second as u32;
            // SAFETY: the caller's promise.
            let (low, high) = unsafe {
                let of = |sum: f32| warp::shuffle_idx(warp::FULL_MASK, sum.to_bits(), from);
                (of(sums[i + 2 * half + which]), of(sums[i + 4 + 2 * half + which]))
            };
            let value = f32::from_bits(if own < 2 { low } else { high });
            sorted[which * (SUMS / 2) + i / 2 + 2 * half + second] = value;
            j += 1;
        }
        i += 8;
    }
    sorted
}
