//! The recurrence token by token: decode, and short pieces.
//!
//! Work split: a block of four warps has 32 columns of the state of one sequence and value head, a warp eight of them
//! with all rows. No warp needs another:
//!
//! ```text
//! S, 8 columns of a warp        lane 2r:    columns 0–3 of rows r, r + 16, …, r + 112
//! row 0    | lane 0 | lane 1 |  lane 2r+1:  columns 4–7
//! row 1    | lane 2 | lane 3 |  32 registers of state per lane, 16 bytes an access; a warp's access is 16 sectors of
//!   …                           32 bytes, and the block's four warps have the line of 128
//! row 15   | lane 30| lane 31|
//! row 16   | lane 0 | lane 1 |
//! ```
//!
//! For each token: the 16 lanes with the same columns add up |k|² and |q|², then Sᵀk and Sᵀq of the old S, and k·q, all
//! by butterflies. With S' = e^g S + k ⊗ d and d = β (v − e^g Sᵀk) the output needs no second round: S'ᵀq = e^g Sᵀq +
//! (k·q) d.

use abi::ops::gated_delta::{GatedDeltaDims, STATE_IN_PIECES};
use cuda_std::cvt::Element;
use cuda_std::warp::{FULL_MASK, shuffle_xor_f32};
use cuda_std::{global, math, thread};

use super::{EPS, RawGates, key_head};
use crate::tile::activation::exp;
use crate::tile::sequences::Sequence;

/// Rows of a lane.
const ROWS: usize = 8;
/// Lanes that share a column, each with its own rows.
const ROW_LANES: u32 = 16;
/// Columns of a lane.
const COLS: usize = 4;
/// Columns of a warp.
const WARP_COLS: u32 = 8;

/// Sum over the 16 lanes that hold the same columns; all get the same bits.
///
/// # Safety
/// - *converged*: all 32 lanes execute it.
#[inline(always)]
unsafe fn sum_rows(mut value: f32) -> f32 {
    let mut step = 16;
    while step > 1 {
        // SAFETY: all lanes take part — the caller.
        value += unsafe { shuffle_xor_f32(FULL_MASK, value, step) };
        step /= 2;
    }
    value
}

/// This thread's elements of q or k: its rows as far as they exist, else 0.
///
/// # Safety
/// - *in-bounds*: `dims.dim_k` elements at `from`.
#[inline(always)]
unsafe fn load_rows<T: Element>(from: *const T, row: u32, dims: &GatedDeltaDims) -> [f32; ROWS] {
    let mut values = [0.0; ROWS];
    let mut i = 0;
    while i < ROWS {
        let row = row + i as u32 * ROW_LANES;
        if row < dims.dim_k {
            // SAFETY: row < dim_k.
            values[i] = unsafe { global::load(from.add(row as usize)) }.to_f32();
        }
        i += 1;
    }
    values
}

/// A slice of the columns of one sequence and value head.
///
/// # Safety
/// - All threads of the block (*converged*); tensors *in-bounds* for `dims`, the state *aligned(16)* if `dims.access`
///   says so — checked in `GatedDelta::run`.
/// - *exclusive*: the slots of the sequences are distinct — its caller.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub unsafe fn slice<T: Element>(
    q: *const T,
    k: *const T,
    v: *const T,
    gates: RawGates<T>,
    offsets: *const u32,
    slots: *const u32,
    state: *mut f32,
    out: *mut T,
    dims: &GatedDeltaDims,
) {
    // At least 1 each, or there were no blocks; `max` tells the compiler, which would otherwise keep a panic path.
    let (slices, heads) = (dims.slices.max(1), dims.heads_v.max(1));
    let block = thread::block_idx_x();
    let (slice, head, index) = (block % slices, block / slices % heads, block / slices / heads);
    let lane = thread::lane();
    let first_col = (slice * 4 + thread::warp_idx()) * WARP_COLS;
    // SAFETY: index < sequences, by the grid.
    let (sequence, slot) =
        unsafe { (Sequence::load(offsets, index, dims.tokens), global::load(slots.add(index as usize))) };
    // The same in all lanes of a warp.
    if first_col >= dims.dim_v || slot >= dims.num_slots || sequence.len == 0 {
        return;
    }
    let (row, col) = (lane / 2, first_col + lane % 2 * COLS as u32);
    let num_cols = dims.dim_v.saturating_sub(col).min(COLS as u32);
    let key_head = key_head(head, dims);
    let q = q.wrapping_add(key_head * dims.q_head_stride as usize);
    let k = k.wrapping_add(key_head * dims.k_head_stride as usize);
    let v = v.wrapping_add(head as usize * dims.v_head_stride as usize + col as usize);
    let out = out.wrapping_add(head as usize * dims.out_head_stride as usize + col as usize);
    let head_state = slot as usize * dims.slot_stride as usize
        + head as usize * dims.dim_k as usize * dims.dim_v as usize
        + col as usize;
    let in_pieces = dims.access & STATE_IN_PIECES != 0 && num_cols > 0;
    let row_state = |i: usize| {
        state.wrapping_add(head_state + (row as usize + i * ROW_LANES as usize) * dims.dim_v as usize)
    };
    let has_row = |i: usize| row + (i as u32) * ROW_LANES < dims.dim_k;

    // SAFETY: rows below dim_k and columns below dim_v of a slot and head that exist, tokens below the sequence's end;
    // all lanes take part in the sums.
    unsafe {
        let mut s = [[0.0f32; COLS]; ROWS];
        let mut i = 0;
        while i < ROWS {
            if has_row(i) {
                if in_pieces {
                    s[i] = global::load_x4(row_state(i).cast_const()).map(f32::from_bits);
                } else {
                    let mut j = 0;
                    while j < COLS {
                        if (j as u32) < num_cols {
                            s[i][j] = global::load(row_state(i).add(j).cast_const());
                        }
                        j += 1;
                    }
                }
            }
            i += 1;
        }

        let mut token = sequence.start;
        while token < sequence.start + sequence.len {
            let mut keys = load_rows(k.add(token as usize * dims.k_token_stride as usize), row, dims);
            let mut queries = load_rows(q.add(token as usize * dims.q_token_stride as usize), row, dims);
            let mut values = [0.0; COLS];
            let mut j = 0;
            while j < COLS {
                if (j as u32) < num_cols {
                    let at = token as usize * dims.v_token_stride as usize + j;
                    values[j] = global::load(v.add(at)).to_f32();
                }
                j += 1;
            }
            let gate = gates.load(token, head, dims);
            let decay = exp(gate.log_decay);

            let (mut key_square, mut query_square) = (0.0, 0.0);
            let mut i = 0;
            while i < ROWS {
                key_square = math::fma(keys[i], keys[i], key_square);
                query_square = math::fma(queries[i], queries[i], query_square);
                i += 1;
            }
            let key_scale = math::rsqrt(sum_rows(key_square) + EPS);
            let query_scale = math::rsqrt(sum_rows(query_square) + EPS) * dims.scale;
            let mut product = 0.0;
            let (mut predicted, mut read) = ([0.0; COLS], [0.0; COLS]);
            let mut i = 0;
            while i < ROWS {
                keys[i] *= key_scale;
                queries[i] *= query_scale;
                product = math::fma(keys[i], queries[i], product);
                let mut j = 0;
                while j < COLS {
                    predicted[j] = math::fma(s[i][j], keys[i], predicted[j]);
                    read[j] = math::fma(s[i][j], queries[i], read[j]);
                    j += 1;
                }
                i += 1;
            }
            let product = sum_rows(product);
            let mut change = [0.0; COLS];
            let mut j = 0;
            while j < COLS {
                let predicted = decay * sum_rows(predicted[j]);
                change[j] = gate.beta * (values[j] - predicted);
                read[j] = math::fma(product, change[j], decay * sum_rows(read[j]));
                j += 1;
            }
            let mut i = 0;
            while i < ROWS {
                let mut j = 0;
                while j < COLS {
                    s[i][j] = math::fma(keys[i], change[j], decay * s[i][j]);
                    j += 1;
                }
                i += 1;
            }
            if row == 0 {
                let mut j = 0;
                while j < COLS {
                    if (j as u32) < num_cols {
                        let at = token as usize * dims.out_token_stride as usize + j;
                        global::store(out.add(at), T::from_f32(read[j]));
                    }
                    j += 1;
                }
            }
            token += 1;
        }

        let mut i = 0;
        while i < ROWS {
            if has_row(i) {
                if in_pieces {
                    global::store_x4(row_state(i), s[i].map(f32::to_bits));
                } else {
                    let mut j = 0;
                    while j < COLS {
                        if (j as u32) < num_cols {
                            global::store(row_state(i).add(j), s[i][j]);
                        }
                        j += 1;
                    }
                }
            }
            i += 1;
        }
    }
}
