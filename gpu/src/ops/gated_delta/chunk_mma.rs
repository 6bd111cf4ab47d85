//! The same as `chunk` on the tensor cores of Ampere and later, for q and k of 16 bits, whose products are exact.
//!
//! A block of eight warps has one place and value head. Warps 0 to 3 make K Kᵀ and the others Q Kᵀ, each 16 rows of it,
//! up to its diagonal; their operands come from global memory as they are:
//!
//! ```text
//! mma.m16n8k16   a: 16 tokens of k or q, 16 elements   b: 8 tokens of k
//! lane 4 g + t   a: rows 2 g, 2 g + 1, 8 elements of 32 by one load, for two products
//! ```
//!
//! It leaves what `scan_mma` multiplies, in the order in which a lane needs it (`fragments`), so that the many blocks
//! of that have nothing to do with layouts:
//!
//! ```text
//! place   | K | Q | Kᵀ | of each key head …
//!         | X | P | e^γ_t / |k_t| | e^γ_t scale / |q_t| | e^(γ_63 − γ_t) / |k_t| | e^γ_t | of each value head …
//! ```
//!
//! Rows of k and q are multiplied by the power of two of 1 / |k_t| and scale / |q_t|, which is exact: neither their
//! sums nor what `scan_mma` weighs by them leave the range of f32. The columns have the rest, from 1 to 2.
//!
//! Between tokens of two blocks of 16 a decay is that to the first of the later block, and from there. All else is as
//! in `chunk`.

use abi::ops::gated_delta::{CHUNK, FRAGMENT, GatedDeltaDims, MAX_DIM_K, VALUE_WORDS, key_words};
use cuda_std::{global, math, shared, thread, warp};

use super::chunk::{
    BETAS, Gamma, KEY_SCALES, MATRIX_A, MATRIX_X, QUERY_SCALES, gather_gates, invert, load_quad,
};
use super::fragments::{
    PARTS, Parts, before_row, halves, load_words, lower_halves, power_and_rest, split_elements, split_pair,
    store_fragment, upper_halves,
};
use super::{EPS, RawGates, key_head};
use crate::tile::sequences::piece_at;

/// Blocks of 32 elements of a head, the most, and of 16 tokens of a chunk.
const BLOCKS: usize = 4;
/// Blocks of 16 elements of a head.
const COLUMNS: u32 = MAX_DIM_K / 16;
/// Rows of blocks of 16 tokens.
const ROWS: u32 = CHUNK / 16;

/// Where P and the columns begin in a value head's part.
pub(super) const MATRIX_P: u32 = PARTS as u32 * before_row(ROWS) * FRAGMENT;
const COLUMNS_AT: u32 = 2 * MATRIX_P;
/// Columns of factors: of the state's products with k and q, of the values that the state is changed by; decays.
pub(super) const OF_KEYS: u32 = COLUMNS_AT;
pub(super) const OF_QUERIES: u32 = OF_KEYS + CHUNK;
pub(super) const OF_CHANGES: u32 = OF_QUERIES + CHUNK;
pub(super) const SINCE_START: u32 = OF_CHANGES + CHUNK;
const _: () = assert!(SINCE_START + CHUNK == VALUE_WORDS);

/// The matrices of elements.
#[derive(Clone, Copy)]
pub(super) enum Elements {
    Keys,
    Queries,
    /// Its rows are those of k, its columns tokens.
    KeysTransposed,
}

impl Elements {
    /// The number of a fragment.
    #[inline(always)]
    pub(super) fn fragment<T: Parts>(self, row: u32, col: u32, part: usize) -> usize {
        let cols = if matches!(self, Elements::KeysTransposed) { ROWS } else { COLUMNS };
        let before = self as usize * (ROWS * COLUMNS) as usize + row as usize * cols as usize;
        (before + col as usize) * T::PARTS + part
    }
}

/// The number of a fragment of X or P.
#[inline(always)]
pub(super) fn lower_fragment(row: u32, col: u32, part: usize) -> usize {
    (before_row(row) as usize + col as usize) * PARTS + part
}

/// Where a place of the pass and a value head have the parts of their key head and their own in the workspace.
#[inline(always)]
pub(super) fn parts_of<T: Parts>(place: u32, head: u32, dims: &GatedDeltaDims) -> [usize; 2] {
    let (heads_k, key_words) = (key_head(dims.heads_v, dims), key_words(T::PARTS as u32) as usize);
    let value_words = VALUE_WORDS as usize;
    let first = place as usize * (heads_k * key_words + dims.heads_v as usize * value_words);
    [first + key_head(head, dims) * key_words, first + heads_k * key_words + head as usize * value_words]
}

/// A row of 16 and the next of a lower triangle's block, four neighbours of each, to its fragments.
///
/// # Safety
/// - As for [`store_fragment`].
#[inline(always)]
unsafe fn store_lower(to: *mut f32, row: u32, col: u32, values: [[f32; 4]; 2]) {
    let mut words = [[0; 4]; PARTS];
    let mut i = 0;
    while i < 4 {
        let (half, pair) = (i % 2, i / 2);
        let parts = split_pair([values[half][2 * pair], values[half][2 * pair + 1]]);
        let mut part = 0;
        while part < PARTS {
            words[part][i] = parts[part];
            part += 1;
        }
        i += 1;
    }
    let mut part = 0;
    while part < PARTS {
        // SAFETY: the caller's promise.
        unsafe { store_fragment(to, lower_fragment(row, col, part), words[part]) };
        part += 1;
    }
}

/// Leaves the warp's rows of k or q, and of kᵀ.
///
/// # Safety
/// - *in-bounds*, *exclusive*: the fragments of the warp's rows.
#[inline(always)]
unsafe fn leave_elements<T: Parts>(
    to: *mut f32,
    is_keys: bool,
    tile: u32,
    words: &[[[u32; 4]; BLOCKS]; 2],
    powers: [f32; 2],
    dims: &GatedDeltaDims,
) {
    let (group, member) = (thread::lane() / 4, thread::lane() % 4);
    let matrix = if is_keys { Elements::Keys } else { Elements::Queries };
    let mut i = 0;
    while i < 2 * BLOCKS {
        // Two words of each of the lane's tokens: a fragment's.
        let (block, first) = (i / 2, i % 2 * 2);
        if 32 * (block as u32) < dims.dim_k {
            let mut parts = [[0; 4]; 2];
            let mut j = 0;
            while j < 4 {
                let word = words[j % 2][block][first + j / 2];
                let split = split_elements::<T>(word, powers[j % 2]);
                (parts[0][j], parts[1][j]) = (split[0], split[1]);
                j += 1;
            }
            let mut part = 0;
            while part < T::PARTS {
                let own = parts[part];
                // SAFETY: the caller's promise; fragments of blocks below dim_k.
                unsafe {
                    store_fragment(to, matrix.fragment::<T>(tile, i as u32, part), own);
                    let mut j = 0;
                    while is_keys && j < 2 {
                        // Two neighbouring elements of both tokens: two rows of kᵀ.
                        let (low, high) = (own[2 * j], own[2 * j + 1]);
                        let (even, odd) = (lower_halves(low, high), upper_halves(low, high));
                        let fragment = Elements::KeysTransposed.fragment::<T>(i as u32, tile, part);
                        let lane = 4 * (2 * member + j as u32) + group / 2;
                        let at = fragment * FRAGMENT as usize + (4 * lane + 2 * (group % 2)) as usize;
                        let to = to.wrapping_add(at).cast::<u64>();
                        global::store(to, u64::from(even) | u64::from(odd) << 32);
                        j += 1;
                    }
                }
                part += 1;
            }
        }
        i += 1;
    }
}

/// One place and value head.
///
/// # Safety
/// - As for `chunk::chunk`.
#[inline(always)]
pub unsafe fn chunk<T: Parts>(
    q: *const T,
    k: *const T,
    gates: RawGates<T>,
    offsets: *const u32,
    workspace: *mut f32,
    dims: &GatedDeltaDims,
) {
    // At least 1, or there were no blocks; `max` tells the compiler, which would otherwise keep a panic path.
    let heads = dims.heads_v.max(1);
    let (block, base) = (thread::block_idx_x(), shared::base());
    let (place, head) = (block / heads, block % heads);
    // SAFETY: the caller's promise for the offsets. Shared memory: each phase writes its own part, and a barrier comes
    // before anyone reads it. Tokens are those of the chunk, t < len.
    unsafe {
        let piece = piece_at(offsets, dims.sequences, dims.tokens, dims.first_place + place, CHUNK);
        let Some((sequence, first)) = piece else {
            return;
        };
        let (start, len) = (sequence.start + first, (sequence.len - first).min(CHUNK));
        let parts_of = |place: u32| parts_of::<T>(place, head, dims).map(|at| workspace.wrapping_add(at));
        gather_gates(base, gates, [start, len], head, dims);
        gather_decays(base);

        let (warp, lane) = (thread::warp_idx(), thread::lane());
        let (group, member) = (lane / 4, lane % 4);
        // Rows of the warp; those of one scheduler are not all long ones.
        let is_keys = warp < 4;
        let tile = if is_keys { warp } else { 7 - warp };
        let (row_stride, head_stride, own) = if is_keys {
            (dims.k_token_stride, dims.k_head_stride, k)
        } else {
            (dims.q_token_stride, dims.q_head_stride, q)
        };
        let key_head = key_head(head, dims);
        let place_of = |from: *const T, strides: [u32; 2], row: u32, col: u32| {
            from.wrapping_add(
                (start + row) as usize * strides[0] as usize + key_head * strides[1] as usize + col as usize,
            )
        };
        let load = |from: *const T, strides: [u32; 2], row: u32, member: u32, block: usize| {
            let col = 32 * block as u32 + 8 * member;
            let here = if row < len { dims.dim_k.saturating_sub(col).min(8) } else { 0 };
            load_words(place_of(from, strides, row, col), here, dims)
        };
        let rows = [16 * tile + 2 * group, 16 * tile + 2 * group + 1];
        let mut words = [[[0u32; 4]; BLOCKS]; 2];
        let mut squares = [0.0f32; 2];
        let mut half = 0;
        while half < 2 {
            let mut block = 0;
            while block < BLOCKS {
                words[half][block] = load(own, [row_stride, head_stride], rows[half], member, block);
                let mut i = 0;
                while i < 4 {
                    let [low, high] = halves::<T>(words[half][block][i]);
                    squares[half] = math::fma(high, high, math::fma(low, low, squares[half]));
                    i += 1;
                }
                block += 1;
            }
            half += 1;
        }
        let mut powers = [0.0; 2];
        let mut half = 0;
        while half < 2 {
            let scale = math::rsqrt(warp::sum_f32::<4>(squares[half]) + EPS);
            let (column, scale) =
                if is_keys { (KEY_SCALES, scale) } else { (QUERY_SCALES, scale * dims.scale) };
            powers[half] = power_and_rest(scale).0;
            if member == 0 {
                shared::store_f32(base + column + 4 * rows[half], scale);
            }
            half += 1;
        }
        // Value heads of a key head leave the same.
        if head.is_multiple_of(dims.group.max(1)) {
            let [of_key, _] = parts_of(place);
            leave_elements::<T>(of_key, is_keys, tile, &words, powers, dims);
        }

        // Opaque, or places here and above would be kept in registers together.
        let lane = thread::opaque(thread::lane());
        let (group, member) = (lane / 4, lane % 4);
        let rows = [16 * tile + 2 * group, 16 * tile + 2 * group + 1];
        // Eight tokens of k at a time: those of 16 of which a lane needs the sums, four neighbours by two products.
        let token = |i: usize, col: u32| 16 * (i as u32 / 2) + 4 * (col / 2) + 2 * (i as u32 % 2) + col % 2;
        let mut sums = [[0.0f32; 4]; 8];
        let mut i = 0;
        while i < 8 {
            if (i as u32) < 2 * tile + 2 {
                let mut block = 0;
                while block < BLOCKS {
                    let strides = [dims.k_token_stride, dims.k_head_stride];
                    let other = load(k, strides, token(i, group), member, block);
                    let [low, high] = [words[0][block], words[1][block]];
                    let mut j = 0;
                    while j < 4 {
                        let a = [low[j], high[j], low[j + 1], high[j + 1]];
                        sums[i] = T::multiply_add(a, [other[j], other[j + 1]], sums[i]);
                        j += 2;
                    }
                    block += 1;
                }
            }
            i += 1;
        }
        thread::sync_threads();

        // A to shared memory, P to the workspace, whose place would otherwise be kept in registers.
        let [_, of_value] = parts_of(thread::opaque(place));
        let gammas = [Gamma::load(base, rows[0]), Gamma::load(base, rows[1])];
        let first_gamma = Gamma::load(base, 16 * tile);
        let since_first = gammas.map(|gamma| gamma.decay_since(first_gamma));
        let own_scales = if is_keys { KEY_SCALES } else { QUERY_SCALES };
        let mut factors = [0.0; 2];
        let mut half = 0;
        while half < 2 {
            factors[half] = shared::load_f32(base + own_scales + 4 * rows[half]);
            half += 1;
        }
        let betas =
            [shared::load_f32(base + BETAS + 4 * rows[0]), shared::load_f32(base + BETAS + 4 * rows[1])];
        // A block's sums times all that they are to be multiplied by.
        let put = |block: u32, [near, far]: [[f32; 4]; 2], decays: [[f32; 4]; 2]| {
            let first = 16 * block + 4 * member;
            let scales = load_quad(base + KEY_SCALES, first / 4);
            let mut values = [[0.0; 4]; 2];
            let mut half = 0;
            while half < 2 {
                let sums = [near[2 * half], near[2 * half + 1], far[2 * half], far[2 * half + 1]];
                let mut j = 0;
                while j < 4 {
                    if first + j as u32 <= rows[half] {
                        values[half][j] = sums[j] * factors[half] * scales[j] * decays[half][j];
                    }
                    j += 1;
                }
                if is_keys {
                    let at = base + MATRIX_A + 4 * (rows[half] * CHUNK + first);
                    shared::store_f32x4(at, values[half].map(|value| betas[half] * value));
                }
                half += 1;
            }
            if !is_keys {
                store_lower(of_value.wrapping_add(MATRIX_P as usize), tile, block, values);
            }
        };
        let mut diagonal = [sums[0], sums[1]];
        let mut block = 0;
        while block + 1 < BLOCKS {
            if (block as u32) < tile {
                let to_first = load_quad(base + decay_at(tile, 16 * block as u32), member);
                let decays = since_first.map(|since| to_first.map(|to| since * to));
                put(block as u32, [sums[2 * block], sums[2 * block + 1]], decays);
                diagonal = [sums[2 * block + 2], sums[2 * block + 3]];
            }
            block += 1;
        }
        let mut decays = [[0.0; 4]; 2];
        let mut j = 0;
        while j < 4 {
            let other = Gamma::load(base, 16 * tile + 4 * member + j as u32);
            decays[0][j] = gammas[0].decay_since(other);
            decays[1][j] = gammas[1].decay_since(other);
            j += 1;
        }
        put(tile, diagonal, decays);
        thread::sync_threads();
        invert(base);
        leave_inverse(base, of_value);
        leave_columns(base, of_value);
    }
}

/// Where the decay from a token to the first of a block of 16 further on is, in the place of the inverse.
#[inline(always)]
const fn decay_at(block: u32, t: u32) -> u32 {
    MATRIX_X + 4 * (block * CHUNK + t)
}

/// Those decays, which all rows of a block share, by the first warp: it has the shortest rows.
///
/// # Safety
/// - *converged*: the whole block, behind [`gather_gates`]; *exclusive*: the place of the inverse; a barrier follows
///   before they are read.
#[inline(always)]
unsafe fn gather_decays(base: u32) {
    if thread::warp_idx() != 0 {
        return;
    }
    // SAFETY: the warp's own γ; tokens below 64.
    unsafe {
        warp::sync_warp(warp::FULL_MASK);
        let mut block = thread::opaque(1);
        while block < ROWS {
            let first = Gamma::load(base, 16 * block);
            let mut t = thread::lane();
            while t < 16 * block {
                shared::store_f32(base + decay_at(block, t), first.decay_since(Gamma::load(base, t)));
                t += 32;
            }
            block += 1;
        }
    }
}

/// X = (I + A)⁻¹ · diag(β) of the inverse in shared memory.
///
/// # Safety
/// - *converged*: the whole block; *initialised*: the inverse and β, and a barrier since; *in-bounds*: the fragments.
#[inline(always)]
unsafe fn leave_inverse(base: u32, to: *mut f32) {
    let (group, member) = (thread::lane() / 4, thread::lane() % 4);
    let mut index = thread::warp_idx();
    while index < before_row(ROWS) {
        let row = u32::from(index >= 1) + u32::from(index >= 3) + u32::from(index >= 6);
        let col = index - before_row(row);
        let first = 16 * col + 4 * member;
        // SAFETY: rows and columns below 64 — the caller.
        unsafe {
            let betas = load_quad(base + BETAS, first / 4);
            let mut values = [[0.0; 4]; 2];
            let mut half = 0;
            while half < 2 {
                let t = 16 * row + 2 * group + half as u32;
                let inverse = load_quad(base + MATRIX_X, (t * CHUNK + first) / 4);
                let mut j = 0;
                while j < 4 {
                    if first + j as u32 <= t {
                        values[half][j] = inverse[j] * betas[j];
                    }
                    j += 1;
                }
                half += 1;
            }
            store_lower(to, row, col, values);
        }
        index += 8;
    }
}

/// The four columns.
///
/// # Safety
/// - *initialised*: the columns in shared memory, and a barrier since; *in-bounds*: a value head's part.
#[inline(always)]
unsafe fn leave_columns(base: u32, to: *mut f32) {
    let (t, column) = (thread::thread_idx_x() % CHUNK, thread::thread_idx_x() / CHUNK);
    // SAFETY: the caller's promise.
    unsafe {
        let scales = if column == 1 { QUERY_SCALES } else { KEY_SCALES };
        let (_, rest) = power_and_rest(shared::load_f32(base + scales + 4 * t));
        let own = Gamma::load(base, t);
        let since_start = own.decay_since(Gamma::ZERO);
        let value = if column < 2 {
            since_start * rest
        } else if column == 2 {
            Gamma::load(base, CHUNK - 1).decay_since(own) * rest
        } else {
            since_start
        };
        global::store(to.wrapping_add((COLUMNS_AT + thread::thread_idx_x()) as usize), value);
    }
}
