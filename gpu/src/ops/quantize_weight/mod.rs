//! Plain matrices as packed, quantised weights (`abi::weight`): scales first, then codes by these scales.
//!
//! ```text
//! scales  a warp: 128 elements of a row, or all of a longer group, for each row of a block ── range of each group, by
//!         shuffles ──► scale and zero point, as they are stored
//! codes   a warp: a tile of 16 rows and 64 of k ── four elements of a row a lane, by the scale as it was stored ──►
//!         the lane's 16 bytes of the tile, for 8 bits twice, for 16 four times
//! ```
//!
//! Two passes over the matrix: the second reads what the first one has stored, so a value is quantised by the very
//! number that a product multiplies its code by. Arithmetic bounds them, the exact divisions above all. A percentile
//! takes 31 more passes over a group, which the caches have: the bits of the magnitude that is wanted, one after the
//! other. Two blocks to a multiprocessor are asked for, or ptxas keeps to 64 registers and spills one.

use abi::ops::quantize_weight::{
    QuantizeWeightDims, SPAN, WARPS, covered_rank, e2m1_code, e8m0_scale, integer_code, magnitude_of_rank,
    zero_point,
};
use abi::weight::{BLOCK_SCALES, Codes, ScaleType, TILE_K, TILE_ROWS, e6m9_from_f32, scale_place};
use cuda_std::cvt::{E4m3 as Fp8, Element, bf16, e4m3x2_from_f32, f16};
use cuda_std::{atomic, global, kernel, math, thread, warp};

use crate::matmul::weight::{ANY, Code, E2m1, E4m3, E6m9, Int4, Int8, Packed};

/// The matrices whose rows the weight's are.
struct Matrices<'a, T> {
    starts: [*const T; 2],
    dims: &'a QuantizeWeightDims,
}

impl<T: Element> Matrices<'_, T> {
    /// A row of the weight.
    #[inline(always)]
    fn row(&self, row: u32) -> *const T {
        if self.dims.matrices == 1 { self.row_of(0, row) } else { self.row_of(row % 2, row / 2) }
    }

    /// A row of a matrix.
    #[inline(always)]
    fn row_of(&self, matrix: u32, row: u32) -> *const T {
        let (start, stride) = if matrix == 0 {
            (self.starts[0], self.dims.strides[0])
        } else {
            (self.starts[1], self.dims.strides[1])
        };
        start.wrapping_add(row as usize * stride as usize)
    }

    /// Elements of a row from `k` on, a multiple of four, and how many of the four lie before `end`: those do.
    ///
    /// # Safety
    /// - The row *in-bounds* up to `end`, and aligned as `dims.in_quads` says.
    #[inline(always)]
    unsafe fn quad(&self, row: *const T, k: u32, end: u32) -> ([f32; 4], u32) {
        let mut values = [0.0; 8];
        let there = end.saturating_sub(k).min(4);
        // SAFETY: the caller's promise.
        unsafe {
            let at = row.wrapping_add(k as usize);
            if there == 4 && self.dims.in_quads != 0 {
                if T::PER_16_BYTES == 4 {
                    T::unpack(global::load_nc_x4(at), &mut values);
                } else {
                    let pair = global::load(at.cast::<u64>());
                    T::unpack([pair as u32, (pair >> 32) as u32, 0, 0], &mut values);
                }
            } else {
                let mut i = 0;
                while i < 4 {
                    if (i as u32) < there {
                        values[i] = global::load(at.wrapping_add(i)).to_f32();
                    }
                    i += 1;
                }
            }
        }
        ([values[0], values[1], values[2], values[3]], there)
    }
}

/// A part of a row that shares a scale, as a lane sees it: it has every `SPAN`th four elements.
struct Group<T> {
    row: *const T,
    /// The lane's first element, and where the group ends.
    k: u32,
    end: u32,
    /// Lanes that have a part of it, a power of two, and of how many elements.
    lanes: u32,
    len: u32,
}

impl<T: Element> Group<T> {
    /// How many of its magnitudes have at most these bits: in each of its lanes.
    ///
    /// # Safety
    /// - *converged*: all 32 lanes; as [`Matrices::quad`].
    #[inline(always)]
    unsafe fn count(&self, matrices: &Matrices<'_, T>, bits: u32) -> u32 {
        let (mut count, mut k) = (0, self.k);
        // SAFETY: the caller's promise.
        unsafe {
            while k < self.end {
                let (values, there) = matrices.quad(self.row, k, self.end);
                let mut i = 0;
                while i < 4 {
                    count += ((i as u32) < there && values[i].abs().to_bits() <= bits) as u32;
                    i += 1;
                }
                k += SPAN;
            }
            let mut apart = 1;
            while apart < self.lanes {
                count += warp::shuffle_xor(warp::FULL_MASK, count, apart);
                apart *= 2;
            }
        }
        count
    }

    /// The smallest and the largest value of the lane's part, 0 among them, and the largest bits of a magnitude.
    ///
    /// # Safety
    /// - As [`Matrices::quad`].
    #[inline(always)]
    unsafe fn range(&self, matrices: &Matrices<'_, T>) -> ([f32; 2], u32) {
        let (mut range, mut largest, mut k) = ([0f32; 2], 0, self.k);
        while k < self.end {
            // SAFETY: the caller's promise.
            let (values, _) = unsafe { matrices.quad(self.row, k, self.end) };
            let mut i = 0;
            while i < 4 {
                range = [math::min(range[0], values[i]), math::max(range[1], values[i])];
                largest = largest.max(values[i].abs().to_bits());
                i += 1;
            }
            k += SPAN;
        }
        (range, largest)
    }
}

/// The scale and the zero point of a range: the bits as they are stored, and how many bytes of them.
#[inline(always)]
fn scale_of(range: [f32; 2], dims: &QuantizeWeightDims) -> (u32, u32, u8) {
    let (magnitude, most) = (math::max(range[1], -range[0]), dims.most as u8);
    let wanted = if dims.asymmetric != 0 {
        math::div(range[1] - range[0], f32::from(most))
    } else if magnitude <= dims.unscaled_to {
        1.0
    } else {
        math::div(magnitude, dims.largest)
    };
    // As the scheme has it: the bits, their bytes, and their value. Not a table of jumps.
    let kind = dims.scale;
    let (bits, bytes, value) = if kind <= ScaleType::Bf16 as u32 {
        if kind == ScaleType::F32 as u32 {
            (wanted.to_bits(), 4, wanted)
        } else if kind == ScaleType::F16 as u32 {
            let half = <f16 as Element>::from_f32(wanted);
            (half.to_bits().into(), 2, Element::to_f32(half))
        } else {
            let half = <bf16 as Element>::from_f32(wanted);
            (half.to_bits().into(), 2, Element::to_f32(half))
        }
    } else if kind == ScaleType::E8m0 as u32 {
        let byte = u32::from(e8m0_scale(magnitude, dims.largest));
        // 0 is 2^-127, which is subnormal.
        (byte, 1, f32::from_bits((byte << 23).max(0x0040_0000)))
    } else {
        let global = dims.weight.global;
        let byte = Fp8::from_f32(math::div(wanted, global));
        (byte.0.into(), 1, byte.to_f32() * global)
    };
    let zero = if dims.asymmetric != 0 { zero_point(range[0], value, most) } else { 0 };
    // All of a tile's k shares it: then its value is stored.
    if dims.weight.scale == ScaleType::F32 as u32 { (value.to_bits(), 4, zero) } else { (bits, bytes, zero) }
}

/// # Safety
/// - *in-bounds*: the number `index`.
#[inline(always)]
unsafe fn store_scale(scales: *mut u8, index: usize, (bits, bytes): (u32, u32)) {
    let at = scales.wrapping_add(index * bytes as usize);
    // SAFETY: the caller's promise; numbers lie at multiples of their bytes.
    unsafe {
        match bytes {
            1 => global::store(at, bits as u8),
            2 => global::store(at.cast::<u16>(), bits as u16),
            _ => global::store(at.cast::<u32>(), bits),
        }
    }
}

/// Scales and zero points, and the largest magnitude of all.
///
/// # Safety
/// - *converged*: all threads of the block; tensors *in-bounds* for `dims` — checked in `QuantizeWeight::run`.
#[inline(always)]
unsafe fn make_scales<T: Element>(
    matrices: &Matrices<'_, T>,
    scales: *mut u8,
    zeros: *mut u8,
    largest: *mut u32,
) {
    let dims = matrices.dims;
    // At least one of each, or there were no blocks; `max` tells the compiler.
    let (count, group, rows) = (dims.matrices.max(1), dims.group.max(16), dims.rows.max(1));
    let (tiles, stretches) = (dims.weight.tiles, dims.weight.stretches.max(1));
    let rows_of_one = dims.n / count;
    let is_row = rows == 1;
    // Rows of the weight, also those of its last tiles that are not there; or blocks of each matrix in turn.
    let lines = if is_row { dims.weight.row_blocks * TILE_ROWS } else { rows_of_one.div_ceil(rows) * count };
    let is_short = group <= SPAN;
    let spans = if is_short { (tiles * TILE_K).div_ceil(SPAN) } else { stretches }.max(1);
    let lanes = if is_short { group / 4 } else { 32 };
    let lane = thread::lane();
    let mut unit = thread::block_idx_x() * WARPS + thread::warp_idx();
    let mut met = 0;
    // SAFETY: the caller's promise; each scale is one lane's of one warp.
    unsafe {
        while unit < lines * spans {
            let (line, span) = (unit / spans, unit % spans);
            let (matrix, block) = (line % count, line / count);
            let first = block * rows;
            let last = if is_row && line >= dims.n { first } else { rows_of_one.min(first + rows) };
            // The lane's group, and where its own elements begin.
            let (index, k) = if is_short {
                let k = span * SPAN + lane * 4;
                (k / group, k)
            } else {
                (span, span * group + lane * 4)
            };
            let start = index * group;
            let end = dims.k.min(start + group);
            let (mut range, mut row) = ([0f32; 2], first);
            while row < last {
                let part = Group {
                    row: matrices.row_of(matrix, row),
                    k,
                    end,
                    lanes,
                    len: end.saturating_sub(start),
                };
                let (own, largest) = part.range(matrices);
                met = met.max(largest);
                if dims.percentile < 1.0 && dims.asymmetric == 0 {
                    let rank = covered_rank(part.len.max(1), dims.percentile);
                    let covered = magnitude_of_rank(rank, |bits| part.count(matrices, bits));
                    let covered = if part.len == 0 { 0.0 } else { covered };
                    range = [math::min(range[0], -covered), math::max(range[1], covered)];
                } else {
                    range = [math::min(range[0], own[0]), math::max(range[1], own[1])];
                }
                row += 1;
            }
            let mut apart = 1;
            while apart < lanes {
                range[0] = math::min(range[0], warp::shuffle_xor_f32(warp::FULL_MASK, range[0], apart));
                range[1] = math::max(range[1], warp::shuffle_xor_f32(warp::FULL_MASK, range[1], apart));
                apart *= 2;
            }
            let exists = first < last && start < dims.k;
            let (bits, bytes, zero) = scale_of(range, dims);
            let (bits, zero) = if exists { (bits, zero) } else { (0, 0) };
            if lane.is_multiple_of(lanes) {
                if !is_row {
                    if index < stretches {
                        let at =
                            (block as usize * stretches as usize + index as usize) * BLOCK_SCALES as usize;
                        let mut slot = 0;
                        while slot < BLOCK_SCALES {
                            if count == 1 || slot / 2 == matrix {
                                store_scale(scales, at + slot as usize, (bits, bytes));
                            }
                            slot += 1;
                        }
                    }
                } else {
                    let (row_block, place) = (line / TILE_ROWS, scale_place(line % TILE_ROWS));
                    let per_stretch = if group < TILE_K { TILE_K / group } else { 1 };
                    let (stretch, within) = (index / per_stretch, index % per_stretch);
                    if stretch < stretches {
                        let row = (row_block as usize * stretches as usize + stretch as usize) * 16;
                        let at = (row + place as usize) * per_stretch as usize + within as usize;
                        store_scale(scales, at, (bits, bytes));
                        if !zeros.is_null() {
                            global::store(zeros.wrapping_add(at), zero);
                        }
                    }
                }
            }
            unit += thread::grid_dim_x() * WARPS;
        }
        let mut apart = 1;
        while apart < 32 {
            met = met.max(warp::shuffle_xor(warp::FULL_MASK, met, apart));
            apart *= 2;
        }
        if lane == 0 && met > 0 {
            atomic::max_u32(largest, met, atomic::Order::Relaxed);
        }
    }
}

/// Codes, by scales that are there.
///
/// # Safety
/// - As [`make_scales`].
#[inline(always)]
unsafe fn make_codes<C: Code, T: Element>(matrices: &Matrices<'_, T>, packed: &Packed, codes: *mut u32) {
    let dims = matrices.dims;
    let tiles = dims.weight.tiles.max(1);
    let lane = thread::lane();
    let mut index = thread::block_idx_x() * WARPS + thread::warp_idx();
    // SAFETY: the caller's promise; each lane's words of a tile are its own.
    unsafe {
        while index < dims.weight.row_blocks * tiles {
            let (row_block, tile) = (index / tiles, index % tiles);
            let row = packed.row::<C>(row_block);
            let raw = row.raw_scales::<C, ANY>(tile, false);
            let [scales, _] = packed.numbers::<C, ANY>(&raw, false);
            let zeros = row.raw_zeros::<C, ANY>(tile);
            // In lines of 16 bytes a lane.
            let mut lines = [[0u32; 4]; 4];
            let mut step = 0;
            while step < 4 {
                let zero = packed.any_zero::<C>(zeros, step as u32);
                let k = tile * TILE_K + step as u32 * 16 + lane % 4 * 4;
                let mut half = 0;
                while half < 2 {
                    let at = row_block * TILE_ROWS + lane / 4 + 8 * half as u32;
                    let end = if at < dims.n { dims.k } else { 0 };
                    let (values, there) = matrices.quad(matrices.row(at.min(dims.n - 1)), k, end);
                    let mut codes = [u32::from(C::CODES.zero()); 4];
                    let mut i = 0;
                    while i < 4 {
                        if (i as u32) < there {
                            let scale = scales[step][half];
                            let scaled = if scale > 0.0 { math::div(values[i], scale) } else { 0.0 };
                            codes[i] = match C::CODES {
                                Codes::Int4 | Codes::Int8 => {
                                    integer_code(scaled, zero[half] as u8, C::CODES.most()).into()
                                }
                                Codes::E2m1 => e2m1_code(scaled).into(),
                                Codes::E4m3 => e4m3x2_from_f32(scaled, 0.0) as u8 as u32,
                                Codes::E6m9 => e6m9_from_f32(scaled).into(),
                            };
                        }
                        i += 1;
                    }
                    let mut i = 0;
                    while i < 4 {
                        match C::CODES.bits() {
                            4 => lines[0][step] |= codes[i] << (4 * (2 * (i / 2) + half) + 16 * (i % 2)),
                            8 => lines[half][step] |= codes[i] << (8 * i),
                            _ => {
                                let word = step % 2 * 2 + i / 2;
                                lines[2 * half + step / 2][word] |= codes[i] << (16 * (i % 2));
                            }
                        }
                        i += 1;
                    }
                    half += 1;
                }
                step += 1;
            }
            let words_of_tile = (C::CODES.tile_bytes() / 4) as usize;
            let to = codes.wrapping_add(index as usize * words_of_tile + 4 * lane as usize);
            let mut line = 0;
            while line < C::CODES.bits() as usize / 4 {
                global::store_x4(to.wrapping_add(128 * line), lines[line]);
                line += 1;
            }
            index += thread::grid_dim_x() * WARPS;
        }
    }
}

macro_rules! scales_entries {
    ($($entry:ident => $type:ident, $dtype:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::quantize_weight`.
        ///
        /// # Safety
        /// - Arguments as `QuantizeWeight::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 2)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            rows: *const $type,
            second: *const $type,
            scales: *mut u8,
            zeros: *mut u8,
            largest: *mut u32,
            dims: QuantizeWeightDims,
        ) {
            let matrices = Matrices { starts: [rows, second], dims: &dims };
            // SAFETY: the same contract.
            unsafe { make_scales(&matrices, scales, zeros, largest) }
        }
    )*};
}
abi::quantize_weight_scales_table!(scales_entries);

macro_rules! codes_entries {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::quantize_weight`.
        ///
        /// # Safety
        /// - Arguments as `QuantizeWeight::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 2)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            rows: *const $type,
            second: *const $type,
            codes: *mut u32,
            scales: *const u8,
            zeros: *const u8,
            dims: QuantizeWeightDims,
        ) {
            let matrices = Matrices { starts: [rows, second], dims: &dims };
            let none = core::ptr::null();
            let packed = Packed {
                codes,
                scales,
                zeros,
                minimums: none,
                supers: none.cast(),
                super_minimums: none.cast(),
                dims: dims.weight,
            };
            // SAFETY: the same contract; the scales are there, as the launch before has made them.
            unsafe { make_codes::<$codes, $type>(&matrices, &packed, codes) }
        }
    )*};
}
abi::quantize_weight_table!(codes_entries);
