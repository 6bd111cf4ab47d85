//! Second half of the chunked form: from chunk to chunk, with what `chunk` left in the workspace.
//!
//! ```text
//! R = V − diag(e^γ) · K S
//! Ṽ = X R                                  X = (I + A)⁻¹ · diag(β)
//! O = diag(e^γ) · Q S + P Ṽ
//! S ← e^γ_63 · S + (diag(e^(γ_63 − γ)) · K)ᵀ Ṽ
//! ```
//!
//! Work split: a block of eight warps has 32 columns of one sequence and value head; lane c has column c everywhere,
//! warp w the rows 8 w to 8 w + 7 of every 64. What a product reads by rows (K, Q, X, P) passes through one tile of 64
//! × 64 in shared memory, where a warp reads the same word in all lanes; what it reads by columns (S, R, Ṽ) stays
//! there:
//!
//! ```text
//! shared   | S dim_k × 32 | R or Ṽ 64 × 32 | tile 64 × 64 |
//! ```
//!
//! Products with X and P end at the diagonal, so that no token sees a later one, not even as 0 · NaN.

use abi::ops::gated_delta::{CHUNK, GatedDeltaDims, MAX_DIM_K, PLACE_ELEMENTS, SLICE};
use cuda_std::cvt::Element;
use cuda_std::{global, math, shared, thread};

use super::{key_head, load_8};
use crate::tile::sequences::Sequence;

/// Rows of a warp.
const ROWS: usize = 8;

/// Shared memory in bytes.
const STATE: u32 = 0;
const VALUES: u32 = 4 * MAX_DIM_K * SLICE;
const TILE: u32 = VALUES + 4 * CHUNK * SLICE;

/// Where the columns of a place begin in the workspace.
pub(super) const KEY_SCALES: u32 = 2 * CHUNK * CHUNK;
pub(super) const QUERY_SCALES: u32 = KEY_SCALES + CHUNK;
pub(super) const SINCE_START: u32 = QUERY_SCALES + CHUNK;
pub(super) const TO_END: u32 = SINCE_START + CHUNK;

/// Elements `first..first + 64` of the chunk's rows to the tile, times a factor per row.
///
/// # Safety
/// - All 256 threads of the block; *in-bounds*: `rows` rows of `dims.dim_k` at `from`, 64 factors.
/// - *exclusive*: the tile; a barrier follows before it is read.
#[inline(always)]
unsafe fn stage_rows<T: Element>(
    base: u32,
    from: *const T,
    token_stride: u32,
    factors: *const f32,
    first: u32,
    rows: u32,
    dims: &GatedDeltaDims,
) {
    let part = first + thread::thread_idx_x() % 8 * 8;
    let mut i = 0;
    while i < 2 {
        let row = thread::thread_idx_x() / 8 + 32 * i;
        let len = if row < rows { dims.dim_k.saturating_sub(part).min(8) } else { 0 };
        let row_start = from.wrapping_add(row as usize * token_stride as usize + part as usize);
        // SAFETY: `len` elements of a row below `rows`; the thread's own 8 words of the tile.
        unsafe {
            let factor = global::load(factors.add(row as usize));
            let values = load_8(row_start, len, dims).map(|value| value * factor);
            let to = base + TILE + 4 * (row * CHUNK + part - first);
            shared::store_f32x4(to, [values[0], values[1], values[2], values[3]]);
            shared::store_f32x4(to + 16, [values[4], values[5], values[6], values[7]]);
        }
        i += 1;
    }
}

/// A matrix of the workspace to the tile.
///
/// # Safety
/// - As for `stage_rows`; *aligned(16)*.
#[inline(always)]
unsafe fn stage_matrix(base: u32, from: *const f32) {
    let mut i = 0;
    while i < CHUNK * CHUNK / 4 / 256 {
        let piece = thread::thread_idx_x() + 256 * i;
        // SAFETY: piece < 64 · 64 / 4.
        unsafe {
            let values = global::load_nc_x4(from.add(piece as usize * 4)).map(f32::from_bits);
            shared::store_f32x4(base + TILE + 16 * piece, values);
        }
        i += 1;
    }
}

/// Adds to this thread's rows the product of the tile's rows and a part of the state: its rows `first..first + 64`.
///
/// # Safety
/// - *initialised*: the tile and the state, and a barrier since.
#[inline(always)]
unsafe fn multiply_state(base: u32, first: u32, sums: &mut [f32; ROWS]) {
    let (warp, lane) = (thread::warp_idx(), thread::lane());
    let mut d = thread::opaque(0);
    while d < CHUNK {
        let mut state = [0.0; 4];
        let mut i = 0;
        while i < 4 {
            // SAFETY: row < 128 of the state.
            state[i] =
                unsafe { shared::load_f32(base + STATE + 4 * ((first + d + i as u32) * SLICE + lane)) };
            i += 1;
        }
        let mut r = 0;
        while r < ROWS {
            let row = warp * ROWS as u32 + r as u32;
            // SAFETY: four words of a row of the tile.
            let factors = unsafe { shared::load_f32x4(base + TILE + 4 * (row * CHUNK + d)) };
            let mut i = 0;
            while i < 4 {
                sums[r] = math::fma(factors[i], state[i], sums[r]);
                i += 1;
            }
            r += 1;
        }
        d += 4;
    }
}

/// Adds to this thread's rows the product of the tile, up to its diagonal, and the values.
///
/// # Safety
/// - *initialised*: the tile and the values, and a barrier since.
#[inline(always)]
unsafe fn multiply_lower(base: u32, sums: &mut [f32; ROWS]) {
    let (warp, lane) = (thread::warp_idx(), thread::lane());
    let first_row = warp * ROWS as u32;
    let quad = |s: u32| {
        let mut values = [0.0; 4];
        let mut i = 0;
        while i < 4 {
            // SAFETY: row < 64 of the values.
            values[i] = unsafe { shared::load_f32(base + VALUES + 4 * ((s + i as u32) * SLICE + lane)) };
            i += 1;
        }
        values
    };
    let factors = |r: usize, s: u32| {
        // SAFETY: four words of a row of the tile.
        unsafe { shared::load_f32x4(base + TILE + 4 * ((first_row + r as u32) * CHUNK + s)) }
    };
    let mut s = thread::opaque(0);
    while s < first_row {
        let values = quad(s);
        let mut r = 0;
        while r < ROWS {
            let factors = factors(r, s);
            let mut i = 0;
            while i < 4 {
                sums[r] = math::fma(factors[i], values[i], sums[r]);
                i += 1;
            }
            r += 1;
        }
        s += 4;
    }
    // The rows' own block of 8 × 8.
    let mut group = 0;
    while group < ROWS / 4 {
        let s = first_row + 4 * group as u32;
        let values = quad(s);
        let mut r = 4 * group;
        while r < ROWS {
            let factors = factors(r, s);
            let mut i = 0;
            while i < 4 {
                if 4 * group + i <= r {
                    sums[r] = math::fma(factors[i], values[i], sums[r]);
                }
                i += 1;
            }
            r += 1;
        }
        group += 1;
    }
}

/// A slice of the columns of one sequence and value head, through those of its chunks that are in this pass.
///
/// # Safety
/// - All threads of the block (*converged*); tensors *in-bounds* for `dims` and aligned as it says — checked in
///   `GatedDelta::run`; the workspace filled by `chunk` with the same dims.
/// - *exclusive*: the slots of the sequences are distinct — its caller; `GatedDeltaTile::smem_bytes` of dynamic shared
///   memory.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub unsafe fn slice<T: Element>(
    q: *const T,
    k: *const T,
    v: *const T,
    offsets: *const u32,
    slots: *const u32,
    state: *mut f32,
    out: *mut T,
    workspace: *const f32,
    dims: &GatedDeltaDims,
) {
    // At least 1 each, or there were no blocks; `max` tells the compiler, which would otherwise keep a panic path.
    let (slices, heads) = (dims.slices.max(1), dims.heads_v.max(1));
    let block = thread::block_idx_x();
    let (slice, head, index) = (block % slices, block / slices % heads, block / slices / heads);
    // SAFETY: index < sequences, by the grid.
    let (sequence, slot) =
        unsafe { (Sequence::load(offsets, index, dims.tokens), global::load(slots.add(index as usize))) };
    // The sequence's places, and those of them that are in this pass.
    let first_place = sequence.first_place(CHUNK);
    let end_place = first_place + sequence.len.div_ceil(CHUNK);
    let mut place = first_place.max(dims.first_place);
    let end_place = end_place.min(dims.first_place + dims.num_places);
    if slot >= dims.num_slots || place >= end_place {
        return;
    }

    let (warp, lane, base) = (thread::warp_idx(), thread::lane(), shared::base());
    let col = slice * SLICE + lane;
    let has_col = col < dims.dim_v;
    let key_head = key_head(head, dims);
    let q = q.wrapping_add(key_head * dims.q_head_stride as usize);
    let k = k.wrapping_add(key_head * dims.k_head_stride as usize);
    let v = v.wrapping_add(head as usize * dims.v_head_stride as usize + col as usize);
    let out = out.wrapping_add(head as usize * dims.out_head_stride as usize + col as usize);
    let state = state.wrapping_add(
        slot as usize * dims.slot_stride as usize
            + head as usize * dims.dim_k as usize * dims.dim_v as usize
            + col as usize,
    );
    // This thread's rows of 64, in the shared words of its column.
    let own = |r: usize| warp * ROWS as u32 + r as u32;
    let state_at = |row: u32| base + STATE + 4 * (row * SLICE + lane);
    let value_at = |row: u32| base + VALUES + 4 * (row * SLICE + lane);

    // SAFETY: rows below dim_k and columns below dim_v of a slot and head that exist; tokens below the sequence's end.
    // Shared memory: a thread writes its own words of the state and the values, all threads the tile; barriers come
    // between every write and the reads before and after it. The state's rows past dim_k are zeros.
    unsafe {
        let mut part = thread::opaque(0);
        while part < dims.dim_k {
            let mut r = 0;
            while r < ROWS {
                let row = part + own(r);
                let mut value = 0.0;
                if has_col && row < dims.dim_k {
                    value = global::load(state.add(row as usize * dims.dim_v as usize).cast_const());
                }
                shared::store_f32(state_at(row), value);
                r += 1;
            }
            part += CHUNK;
        }

        while place < end_place {
            let first = (place - first_place) * CHUNK;
            let start = (sequence.start + first) as usize;
            let rows = (sequence.len - first).min(CHUNK);
            let left =
                workspace.add(((place - dims.first_place) * heads + head) as usize * PLACE_ELEMENTS as usize);
            let column = |which: u32| left.wrapping_add(which as usize);
            let k = k.wrapping_add(start * dims.k_token_stride as usize);
            let q = q.wrapping_add(start * dims.q_token_stride as usize);

            // R = V − diag(e^γ) · K S
            let mut sums = [0.0f32; ROWS];
            let mut part = thread::opaque(0);
            while part < dims.dim_k {
                thread::sync_threads();
                stage_rows(base, k, dims.k_token_stride, column(KEY_SCALES), part, rows, dims);
                thread::sync_threads();
                multiply_state(base, part, &mut sums);
                part += CHUNK;
            }
            let mut r = 0;
            while r < ROWS {
                let row = own(r);
                let mut value = 0.0;
                if has_col && row < rows {
                    let at = (start + row as usize) * dims.v_token_stride as usize;
                    value = global::load(v.add(at)).to_f32();
                }
                let since_start = global::load(column(SINCE_START + row));
                shared::store_f32(value_at(row), math::fma(-since_start, sums[r], value));
                r += 1;
            }

            // Ṽ = X R
            thread::sync_threads();
            stage_matrix(base, left);
            thread::sync_threads();
            let mut values = [0.0f32; ROWS];
            multiply_lower(base, &mut values);
            thread::sync_threads();
            let mut r = 0;
            while r < ROWS {
                shared::store_f32(value_at(own(r)), values[r]);
                r += 1;
            }

            // O = diag(e^γ) · Q S + P Ṽ
            let mut sums = [0.0f32; ROWS];
            let mut part = thread::opaque(0);
            while part < dims.dim_k {
                thread::sync_threads();
                stage_rows(base, q, dims.q_token_stride, column(QUERY_SCALES), part, rows, dims);
                thread::sync_threads();
                multiply_state(base, part, &mut sums);
                part += CHUNK;
            }
            let mut r = 0;
            while r < ROWS {
                sums[r] *= global::load(column(SINCE_START + own(r)));
                r += 1;
            }
            thread::sync_threads();
            stage_matrix(base, left.wrapping_add((CHUNK * CHUNK) as usize));
            thread::sync_threads();
            multiply_lower(base, &mut sums);
            let mut r = 0;
            while r < ROWS {
                let row = own(r);
                if has_col && row < rows {
                    let at = (start + row as usize) * dims.out_token_stride as usize;
                    global::store(out.add(at), T::from_f32(sums[r]));
                }
                r += 1;
            }

            // S ← e^γ_63 · S + (diag(e^(γ_63 − γ)) · K)ᵀ Ṽ
            thread::sync_threads();
            let mut r = 0;
            while r < ROWS {
                let row = own(r);
                // This thread's own words: nobody else writes them.
                let value = shared::load_f32(value_at(row)) * global::load(column(TO_END + row));
                shared::store_f32(value_at(row), value);
                r += 1;
            }
            let whole = global::load(column(SINCE_START + CHUNK - 1));
            let mut part = thread::opaque(0);
            while part < dims.dim_k {
                thread::sync_threads();
                stage_rows(base, k, dims.k_token_stride, column(KEY_SCALES), part, rows, dims);
                thread::sync_threads();
                let mut sums = [0.0f32; ROWS];
                let mut r = 0;
                while r < ROWS {
                    sums[r] = whole * shared::load_f32(state_at(part + own(r)));
                    r += 1;
                }
                let mut t = thread::opaque(0);
                while t < CHUNK {
                    let value = shared::load_f32(value_at(t));
                    let from = base + TILE + 4 * (t * CHUNK + warp * ROWS as u32);
                    let (low, high) = (shared::load_f32x4(from), shared::load_f32x4(from + 16));
                    let mut i = 0;
                    while i < 4 {
                        sums[i] = math::fma(low[i], value, sums[i]);
                        sums[i + 4] = math::fma(high[i], value, sums[i + 4]);
                        i += 1;
                    }
                    t += 1;
                }
                let mut r = 0;
                while r < ROWS {
                    shared::store_f32(state_at(part + own(r)), sums[r]);
                    r += 1;
                }
                part += CHUNK;
            }
            place += 1;
        }

        let mut part = thread::opaque(0);
        while part < dims.dim_k {
            let mut r = 0;
            while r < ROWS {
                let row = part + own(r);
                if has_col && row < dims.dim_k {
                    let to = state.add(row as usize * dims.dim_v as usize);
                    global::store(to, shared::load_f32(state_at(row)));
                }
                r += 1;
            }
            part += CHUNK;
        }
    }
}
