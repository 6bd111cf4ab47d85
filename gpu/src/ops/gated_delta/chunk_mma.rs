//! The same as `chunk` on the tensor cores of Ampere and later, for q and k of 16 bits, whose products are exact.
//!
//! A block of eight warps has one place and value head. Warps 0 to 3 make K Kᵀ and the others Q Kᵀ, each 16 rows of it,
//! up to its diagonal; their operands come from global memory as they are:
//!
//! ```text
//! mma.m16n8k16   a: 16 tokens of k or q, 16 elements   b: 8 tokens of k   lane 4 g + t has 8 elements of rows g, g + 8
//! ```
//!
//! Which elements are multiplied at a time does not matter, so lane t of four has 8 neighbours of 32, by one load, for
//! two products. All else is as in `chunk`.

use abi::ops::gated_delta::{CHUNK, GatedDeltaDims, PLACE_ELEMENTS};
use cuda_std::{global, math, shared, thread, warp};

use super::chunk::{BETAS, Gamma, KEY_SCALES, MATRIX_A, QUERY_SCALES, gather_gates, leave};
use super::words::{halves, load_words};
use super::{EPS, RawGates, key_head};
use crate::matmul::multiplicand::Multiplicand;
use crate::tile::sequences::piece_at;

/// Blocks of 32 elements of a head, the most.
const BLOCKS: usize = 4;

/// One place and value head.
///
/// # Safety
/// - As for `chunk::chunk`.
#[inline(always)]
pub unsafe fn chunk<T: Multiplicand>(
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
    let (place, head) = (dims.first_place + block / heads, block % heads);
    // SAFETY: the caller's promise for the offsets. Shared memory: each phase writes its own part, and a barrier comes
    // before anyone reads it. Tokens are those of the chunk, t < len.
    unsafe {
        let Some((sequence, first)) = piece_at(offsets, dims.sequences, dims.tokens, place, CHUNK) else {
            return;
        };
        let (start, len) = (sequence.start + first, (sequence.len - first).min(CHUNK));
        let to = workspace.add(block as usize * PLACE_ELEMENTS as usize);
        gather_gates(base, gates, [start, len], head, dims);

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
        let load = |from: *const T, strides: [u32; 2], row: u32, block: usize| {
            let col = 32 * block as u32 + 8 * member;
            let here = if row < len { dims.dim_k.saturating_sub(col).min(8) } else { 0 };
            load_words(place_of(from, strides, row, col), here, dims)
        };
        let rows = [16 * tile + group, 16 * tile + group + 8];
        let mut words = [[[0u32; 4]; BLOCKS]; 2];
        let mut squares = [0.0f32; 2];
        let mut half = 0;
        while half < 2 {
            let mut block = 0;
            while block < BLOCKS {
                words[half][block] = load(own, [row_stride, head_stride], rows[half], block);
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
        let mut half = 0;
        while half < 2 {
            let scale = math::rsqrt(warp::sum_f32::<4>(squares[half]) + EPS);
            let (column, scale) =
                if is_keys { (KEY_SCALES, scale) } else { (QUERY_SCALES, scale * dims.scale) };
            if member == 0 {
                shared::store_f32(base + column + 4 * rows[half], scale);
            }
            half += 1;
        }

        // Eight tokens of k at a time.
        let mut sums = [[0.0f32; 4]; 8];
        let mut i = 0;
        while i < 8 {
            if (i as u32) < 2 * tile + 2 {
                let mut block = 0;
                while block < BLOCKS {
                    let other =
                        load(k, [dims.k_token_stride, dims.k_head_stride], 8 * i as u32 + group, block);
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

        // A to shared memory, P to the workspace.
        let gammas = [Gamma::load(base, rows[0]), Gamma::load(base, rows[1])];
        let own_scales = if is_keys { KEY_SCALES } else { QUERY_SCALES };
        let mut factors = [0.0; 2];
        let mut half = 0;
        while half < 2 {
            factors[half] = shared::load_f32(base + own_scales + 4 * rows[half]);
            half += 1;
        }
        let betas =
            [shared::load_f32(base + BETAS + 4 * rows[0]), shared::load_f32(base + BETAS + 4 * rows[1])];
        let mut i = 0;
        while i < 8 {
            if (i as u32) < 2 * tile + 2 {
                let mut j = 0;
                while j < 4 {
                    let (t, s) = (rows[j / 2], 8 * i as u32 + 2 * member + j as u32 % 2);
                    let mut value = 0.0;
                    if s <= t {
                        let decay = gammas[j / 2].decay_since(Gamma::load(base, s));
                        let scale = shared::load_f32(base + KEY_SCALES + 4 * s);
                        value = sums[i][j] * factors[j / 2] * scale * decay;
                    }
                    let at = t * CHUNK + s;
                    if is_keys {
                        shared::store_f32(base + MATRIX_A + 4 * at, betas[j / 2] * value);
                    } else {
                        global::store(to.add((CHUNK * CHUNK + at) as usize), value);
                    }
                    j += 1;
                }
            }
            i += 1;
        }
        thread::sync_threads();
        leave(base, to);
    }
}
