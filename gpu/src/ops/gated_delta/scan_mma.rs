//! The same as `scan` on the tensor cores of Ampere and later, for q, k, v and out of 16 bits: products of tf32, which
//! holds elements of 16 bits whole, and other numbers as two parts (`words::Split`), so the state stays f32's.
//!
//! A block of eight warps has 32 columns of one sequence and value head:
//!
//! ```text
//! phase 1   warp w: 16 tokens, 16 columns   K S and Q S in one walk;  R = V − diag(e^γ) · K S
//! phase 2   the same                        Ṽ = X R, up to the rows' diagonal;  W = diag(e^(γ_63 − γ) / |k|) · Ṽ
//! phase 3   the same                        O = diag(e^γ) · Q S + P Ṽ
//!           warp w: rows 16 w to 16 w + 15  S ← e^γ_63 · S + Kᵀ W, of which the sums stay in registers
//!
//! shared    | S | R | Ṽ | W |, each as two parts, rows of 32 words moved by `turned`; | powers of two of k |
//!           | marks of the warps: of R, of Ṽ |
//! ```
//!
//! - k, q, X and P go from global memory to operands as they are. Which elements are multiplied at a time does not
//!   matter, so a lane has 8 neighbours of a row of k by one load, or 4 of X.
//! - A row of k is divided by a power of two near its size, which is exact: neither sums nor W leave the range of f32
//!   for it.
//! - A product with X or P ends at the diagonal's block of 16 by 16, where zeros stand above it. 0 · NaN would lead
//!   back to earlier tokens, so where R or Ṽ has something that is not finite, that product is made number by number.
//! - What the next chunk needs of k and q is loaded behind phase 1.

use abi::ops::gated_delta::{CHUNK, GatedDeltaDims, MAX_DIM_K, PLACE_ELEMENTS, SLICE};
use cuda_std::{global, mma, shared, thread, warp};

use super::key_head;
use super::scan::{KEY_SCALES, QUERY_SCALES, SINCE_START, TO_END};
use super::words::{Split, halves, load_pair, load_words, parts};
use crate::matmul::multiplicand::Multiplicand;
use crate::tile::sequences::Sequence;

/// Blocks of 32 elements of a key head, and of 16 tokens of a chunk.
const BLOCKS: usize = 4;

/// Bytes of a part of a matrix of 64 rows.
const ROWS_BYTES: u32 = 4 * CHUNK * SLICE;

/// Shared memory in bytes: the matrices' two parts each, then a power of two for each token, then two marks of each
/// warp.
const STATE: u32 = 0;
const STATE_BYTES: u32 = 4 * MAX_DIM_K * SLICE;
const REST: u32 = STATE + 2 * STATE_BYTES;
const VALUES: u32 = REST + 2 * ROWS_BYTES;
const WEIGHED: u32 = VALUES + 2 * ROWS_BYTES;
const POWERS: u32 = WEIGHED + 2 * ROWS_BYTES;
const MARKS: u32 = POWERS + 4 * CHUNK;
const _: () = assert!(MARKS + 64 == abi::ops::gated_delta::GatedDeltaTile::ScanMma.smem_bytes());

/// The place of a column in a row of 32 words, for lanes of which four have rows 4 apart and eight neighbouring
/// columns, and for those of which eight have neighbouring rows and four columns 2 apart: each time 32 banks.
#[inline(always)]
fn turned(row: u32, col: u32) -> u32 {
    row * SLICE + (col ^ (row & 1 | ((row >> 1 ^ row >> 3) & 1) << 3 | (row >> 2 & 1) << 4))
}

/// The same for rows of the state, which go by twos.
#[inline(always)]
fn turned_by_twos(row: u32, col: u32) -> u32 {
    row * SLICE + (turned(row >> 1, col) & (SLICE - 1))
}

/// Two parts of a number to a matrix at `to`, of which a part has `bytes`.
///
/// # Safety
/// - *exclusive*: the word, of both parts.
#[inline(always)]
unsafe fn store(to: u32, bytes: u32, word: u32, value: f32) {
    let Split { high, low } = Split::new(value);
    // SAFETY: the caller's promise.
    unsafe {
        shared::store_u32(to + 4 * word, high);
        shared::store_u32(to + bytes + 4 * word, low);
    }
}

/// Two neighbouring rows of a column as the second operand, both parts.
///
/// # Safety
/// - *initialised*: the words, and a barrier since.
#[inline(always)]
unsafe fn load(from: u32, bytes: u32, words: [u32; 2]) -> [[u32; 2]; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let part = |at: u32| [shared::load_u32(at + 4 * words[0]), shared::load_u32(at + 4 * words[1])];
        [part(from), part(from + bytes)]
    }
}

/// Marks the warp's numbers: whether all are finite.
///
/// # Safety
/// - *converged*: the whole warp; *exclusive*: the warp's mark of these at `marks`.
#[inline(always)]
unsafe fn mark(marks: u32, is_finite: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        let is_bad = warp::any(warp::FULL_MASK, !is_finite);
        if thread::lane() == 0 {
            shared::store_u32(marks + 4 * thread::warp_idx(), u32::from(is_bad));
        }
    }
}

/// Whether some warp has marked its numbers.
///
/// # Safety
/// - *initialised*: the marks, and a barrier since.
#[inline(always)]
unsafe fn is_marked(marks: u32) -> bool {
    // SAFETY: the caller's promise.
    let [low, high] = unsafe { [shared::load_u32x4(marks), shared::load_u32x4(marks + 16)] };
    low[0] | low[1] | low[2] | low[3] | high[0] | high[1] | high[2] | high[3] != 0
}

/// Where a warp's tile of 16 tokens and 16 columns is.
#[derive(Clone, Copy)]
struct Own {
    /// Its rows, 16 each.
    tile: u32,
    /// The lane's two rows.
    rows: [u32; 2],
    /// The lane's first column of the sums; the others are the next, and 8 further.
    col: u32,
    /// The first column of the tile.
    first_col: u32,
    /// The lane's first row of the state; the other is the next one.
    state_row: u32,
    group: u32,
    member: u32,
}

impl Own {
    /// A thread's. Of two warps of a scheduler one has a long lower triangle and one a short one.
    #[inline(always)]
    fn new(thread: u32) -> Self {
        let (warp, group, member) = (thread / 32, thread % 32 / 4, thread % 4);
        let tile = if warp < 4 { warp } else { 7 - warp };
        let first_col = warp / 4 * 16;
        Own {
            tile,
            rows: [16 * tile + group, 16 * tile + group + 8],
            col: first_col + 2 * member,
            first_col,
            state_row: 16 * warp + 2 * group,
            group,
            member,
        }
    }

    /// This thread's, found anew: places of all that it reads and writes would be kept in registers from chunk to
    /// chunk.
    #[inline(always)]
    fn again(place: u32) -> Self {
        Self::new(thread::opaque(thread::thread_idx_x() ^ place) ^ place)
    }
}

/// Adds the product of the lower triangle of a matrix in the workspace, of which the lane has `factors`, and a matrix
/// in shared memory.
///
/// # Safety
/// - *converged*: the whole warp; *initialised*: the matrix, and a barrier since.
#[inline(always)]
unsafe fn add_lower(sums: &mut [[f32; 4]; 2], factors: &[[[f32; 4]; 2]; BLOCKS], from: u32, own: Own) {
    let mut block = 0;
    while block < BLOCKS {
        if block as u32 <= own.tile {
            let mut j = 0;
            while j < 2 {
                let [low, high] = factors[block];
                let a = [low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1]].map(Split::new);
                let (a_high, a_low) = (a.map(|a| a.high), a.map(|a| a.low));
                let row = 16 * block as u32 + 4 * own.member + 2 * j as u32;
                let mut n = 0;
                while n < 2 {
                    let col = own.first_col + 8 * n as u32 + own.group;
                    // SAFETY: rows below 64 — the caller.
                    unsafe {
                        let [b_high, b_low] =
                            load(from, ROWS_BYTES, [turned(row, col), turned(row + 1, col)]);
                        sums[n] = mma::m16n8k8_f32_tf32(a_low, b_high, sums[n]);
                        sums[n] = mma::m16n8k8_f32_tf32(a_high, b_low, sums[n]);
                        sums[n] = mma::m16n8k8_f32_tf32(a_high, b_high, sums[n]);
                    }
                    n += 1;
                }
                j += 1;
            }
        }
        block += 1;
    }
}

/// The same number by number.
///
/// # Safety
/// - As for [`add_lower`]; the matrix in the workspace *in-bounds*.
#[inline(always)]
unsafe fn add_lower_singly(sums: &mut [[f32; 4]; 2], matrix: *const f32, from: u32, own: Own) {
    let mut s = thread::opaque(0);
    while s <= own.rows[1] {
        let mut n = 0;
        while n < 2 {
            let mut j = 0;
            while j < 4 {
                let (row, col) = (own.rows[j / 2], own.col + 8 * n as u32 + j as u32 % 2);
                if s <= row {
                    // SAFETY: row and s below 64 — the caller.
                    unsafe {
                        let factor = global::load(matrix.add((row * CHUNK + s) as usize));
                        let at = from + 4 * turned(s, col);
                        sums[n][j] += factor * (shared::load_f32(at) + shared::load_f32(at + ROWS_BYTES));
                    }
                }
                j += 1;
            }
            n += 1;
        }
        s += 1;
    }
}

/// The lane's part of the lower triangle of a matrix in the workspace.
///
/// # Safety
/// - *in-bounds*: the matrix, *aligned(16)*.
#[inline(always)]
unsafe fn load_lower(matrix: *const f32, own: Own) -> [[[f32; 4]; 2]; BLOCKS] {
    let mut factors = [[[0.0; 4]; 2]; BLOCKS];
    let mut block = 0;
    while block < BLOCKS {
        if block as u32 <= own.tile {
            let mut half = 0;
            while half < 2 {
                let at = own.rows[half] * CHUNK + 16 * block as u32 + 4 * own.member;
                // SAFETY: a row's 4 of 64 — the caller.
                factors[block][half] =
                    unsafe { global::load_nc_x4(matrix.wrapping_add(at as usize)) }.map(f32::from_bits);
                half += 1;
            }
        }
        block += 1;
    }
    factors
}

/// A slice of the columns of one sequence and value head, through those of its chunks that are in this pass.
///
/// # Safety
/// - As for `scan::slice`, with what `chunk_mma` has left.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub unsafe fn slice<T: Multiplicand>(
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

    let (warp, base) = (thread::warp_idx(), shared::base());
    let key_head = key_head(head, dims);
    let q = q.wrapping_add(key_head * dims.q_head_stride as usize);
    let k = k.wrapping_add(key_head * dims.k_head_stride as usize);
    let v = v.wrapping_add(head as usize * dims.v_head_stride as usize);
    let out = out.wrapping_add(head as usize * dims.out_head_stride as usize);
    let state = state.wrapping_add(
        slot as usize * dims.slot_stride as usize + head as usize * dims.dim_k as usize * dims.dim_v as usize,
    );
    let in_slice = |col: u32| slice * SLICE + col;
    // A lane's rows and columns of the state.
    let state_place = |own: Own, n: usize, i: usize| {
        (own.state_row + i as u32 / 2, 8 * n as u32 + 2 * own.member + i as u32 % 2)
    };

    // SAFETY: rows below dim_k and columns below dim_v of a slot and head that exist; tokens below the sequence's end.
    // Shared memory: a lane writes its own words, and barriers come between every write and the reads before and after
    // it. The state's rows past dim_k, and columns past dim_v, are zeros.
    unsafe {
        let tokens_of = |place: u32| {
            let first = (place - first_place) * CHUNK;
            ((sequence.start + first) as usize, (sequence.len - first).min(CHUNK))
        };
        // The lane's rows of k or q.
        let load_rows = |from: *const T, stride: u32, place: u32| {
            let ((start, len), own) = (tokens_of(place), Own::again(place));
            let mut words = [[[0u32; 4]; 2]; BLOCKS];
            let mut block = 0;
            while block < BLOCKS {
                let mut half = 0;
                while half < 2 {
                    let (row, col) = (own.rows[half], 32 * block as u32 + 8 * own.member);
                    let here = if row < len { dims.dim_k.saturating_sub(col).min(8) } else { 0 };
                    let at = (start + row as usize) * stride as usize + col as usize;
                    words[block][half] = load_words(from.wrapping_add(at), here, dims);
                    half += 1;
                }
                block += 1;
            }
            words
        };
        let mut sums_state = [[[0.0f32; 2]; 2]; 4];
        let own = Own::again(place);
        let mut n = 0;
        while n < 4 {
            let mut i = 0;
            while i < 4 {
                let (row, col) = state_place(own, n, i);
                if row < dims.dim_k && in_slice(col) < dims.dim_v {
                    let at = row as usize * dims.dim_v as usize + in_slice(col) as usize;
                    sums_state[n][i / 2][i % 2] = global::load(state.add(at).cast_const());
                }
                let word = turned_by_twos(row, col);
                store(base + STATE, STATE_BYTES, word, sums_state[n][i / 2][i % 2]);
                i += 1;
            }
            n += 1;
        }
        let mut keys = load_rows(k, dims.k_token_stride, place);
        let mut queries = load_rows(q, dims.q_token_stride, place);
        thread::sync_threads();

        while place < end_place {
            let ((start, len), own) = (tokens_of(place), Own::again(place));
            let left =
                workspace.add(((place - dims.first_place) * heads + head) as usize * PLACE_ELEMENTS as usize);
            let column = |which: u32, row: u32| global::load(left.wrapping_add((which + row) as usize));
            // Of both rows: what k and q are multiplied by first, and what their products are then.
            let (mut powers, mut factors, mut since_start) =
                ([[0.0f32; 2]; 2], [[0.0f32; 2]; 2], [0.0f32; 2]);
            let mut to_end = [0.0f32; 2];
            let mut half = 0;
            while half < 2 {
                let row = own.rows[half];
                let scales = [column(KEY_SCALES, row), column(QUERY_SCALES, row)];
                since_start[half] = column(SINCE_START, row);
                let mut i = 0;
                while i < 2 {
                    (powers[i][half], factors[i][half]) = parts(scales[i]);
                    i += 1;
                }
                to_end[half] = column(TO_END, row) * factors[0][half];
                if warp < 4 && own.member == 0 {
                    shared::store_f32(base + POWERS + 4 * row, powers[0][half]);
                }
                half += 1;
            }
            let whole = column(SINCE_START, CHUNK - 1);
            let lower = load_lower(left, own);
            let mut values = [[0.0f32; 4]; 2];
            let mut n = 0;
            while n < 2 {
                let mut j = 0;
                while j < 4 {
                    let (row, col) = (own.rows[j / 2], in_slice(own.col + 8 * n as u32 + j as u32 % 2));
                    if row < len && col < dims.dim_v {
                        let at = (start + row as usize) * dims.v_token_stride as usize + col as usize;
                        values[n][j] = global::load(v.add(at)).to_f32();
                    }
                    j += 1;
                }
                n += 1;
            }

            // K S and Q S.
            let (mut keys_state, mut queries_state) = ([[0.0f32; 4]; 2], [[0.0f32; 4]; 2]);
            let mut block = 0;
            while block < BLOCKS {
                if 32 * (block as u32) < dims.dim_k {
                    let mut j = 0;
                    while j < 4 {
                        let operand = |words: &[[u32; 4]; 2], powers: [f32; 2]| {
                            let (low, high) = (halves::<T>(words[0][j]), halves::<T>(words[1][j]));
                            [low[0] * powers[0], high[0] * powers[1], low[1] * powers[0], high[1] * powers[1]]
                                .map(f32::to_bits)
                        };
                        let (own_keys, own_queries) =
                            (operand(&keys[block], powers[0]), operand(&queries[block], powers[1]));
                        let row = 32 * block as u32 + 8 * own.member + 2 * j as u32;
                        let mut n = 0;
                        while n < 2 {
                            let col = own.first_col + 8 * n as u32 + own.group;
                            let word = turned_by_twos(row, col);
                            let [high, low] = load(base + STATE, STATE_BYTES, [word, word + SLICE]);
                            keys_state[n] = mma::m16n8k8_f32_tf32(own_keys, low, keys_state[n]);
                            queries_state[n] = mma::m16n8k8_f32_tf32(own_queries, low, queries_state[n]);
                            keys_state[n] = mma::m16n8k8_f32_tf32(own_keys, high, keys_state[n]);
                            queries_state[n] = mma::m16n8k8_f32_tf32(own_queries, high, queries_state[n]);
                            n += 1;
                        }
                        j += 1;
                    }
                }
                block += 1;
            }
            // R = V − diag(e^γ) · K S
            let mut is_finite = true;
            let mut n = 0;
            while n < 2 {
                let mut j = 0;
                while j < 4 {
                    let (row, col) = (own.rows[j / 2], own.col + 8 * n as u32 + j as u32 % 2);
                    let product = keys_state[n][j] * factors[0][j / 2];
                    let rest = values[n][j] - since_start[j / 2] * product;
                    is_finite &= rest.is_finite();
                    store(base + REST, ROWS_BYTES, turned(row, col), rest);
                    j += 1;
                }
                n += 1;
            }
            mark(base + MARKS, is_finite);
            if place + 1 < end_place {
                keys = load_rows(k, dims.k_token_stride, place + 1);
                queries = load_rows(q, dims.q_token_stride, place + 1);
            }
            thread::sync_threads();

            // Ṽ = X R
            let own = Own::again(place);
            let matrix_p = left.wrapping_add((CHUNK * CHUNK) as usize);
            let mut weighed = [[0.0f32; 4]; 2];
            if is_marked(base + MARKS) {
                add_lower_singly(&mut weighed, left, base + REST, own);
            } else {
                add_lower(&mut weighed, &lower, base + REST, own);
            }
            let mut is_finite = true;
            let mut n = 0;
            while n < 2 {
                let mut j = 0;
                while j < 4 {
                    let (row, col) = (own.rows[j / 2], own.col + 8 * n as u32 + j as u32 % 2);
                    let value = weighed[n][j];
                    is_finite &= value.is_finite();
                    store(base + VALUES, ROWS_BYTES, turned(row, col), value);
                    store(base + WEIGHED, ROWS_BYTES, turned(row, col), value * to_end[j / 2]);
                    j += 1;
                }
                n += 1;
            }
            mark(base + MARKS + 32, is_finite);
            thread::sync_threads();

            // O = diag(e^γ) · Q S + P Ṽ
            let own = Own::again(place);
            let lower = load_lower(matrix_p, own);
            let mut outs = [[0.0f32; 4]; 2];
            let mut n = 0;
            while n < 2 {
                let mut j = 0;
                while j < 4 {
                    outs[n][j] = queries_state[n][j] * factors[1][j / 2] * since_start[j / 2];
                    j += 1;
                }
                n += 1;
            }
            if is_marked(base + MARKS + 32) {
                add_lower_singly(&mut outs, matrix_p, base + VALUES, own);
            } else {
                add_lower(&mut outs, &lower, base + VALUES, own);
            }
            let mut n = 0;
            while n < 2 {
                let mut j = 0;
                while j < 4 {
                    let (row, col) = (own.rows[j / 2], in_slice(own.col + 8 * n as u32 + j as u32 % 2));
                    if row < len && col < dims.dim_v {
                        let at = (start + row as usize) * dims.out_token_stride as usize + col as usize;
                        global::store(out.add(at), T::from_f32(outs[n][j]));
                    }
                    j += 1;
                }
                n += 1;
            }

            // S ← e^γ_63 · S + Kᵀ W
            let own = Own::again(place);
            let mut n = 0;
            while n < 4 {
                let mut i = 0;
                while i < 4 {
                    sums_state[n][i / 2][i % 2] *= whole;
                    i += 1;
                }
                n += 1;
            }
            if 16 * warp < dims.dim_k {
                let here = dims.dim_k.saturating_sub(own.state_row).min(2);
                let mut block = 0;
                while block < BLOCKS {
                    let mut j = 0;
                    while j < 2 {
                        let token = 16 * block as u32 + 4 * own.member + 2 * j as u32;
                        // Of token and the next.
                        let pair = |token: u32| {
                            let at = (start + token as usize) * dims.k_token_stride as usize
                                + own.state_row as usize;
                            let word =
                                load_pair(k.wrapping_add(at), if token < len { here } else { 0 }, dims);
                            let power = shared::load_f32(base + POWERS + 4 * token);
                            halves::<T>(word).map(|value| (value * power).to_bits())
                        };
                        let (low, high) = (pair(token), pair(token + 1));
                        let a = [low[0], low[1], high[0], high[1]];
                        let mut n = 0;
                        while n < 4 {
                            let col = 8 * n as u32 + own.group;
                            let words = [turned(token, col), turned(token + 1, col)];
                            let [b_high, b_low] = load(base + WEIGHED, ROWS_BYTES, words);
                            let [low, high] = sums_state[n];
                            let sums = [low[0], low[1], high[0], high[1]];
                            let sums = mma::m16n8k8_f32_tf32(a, b_low, sums);
                            let sums = mma::m16n8k8_f32_tf32(a, b_high, sums);
                            sums_state[n] = [[sums[0], sums[1]], [sums[2], sums[3]]];
                            n += 1;
                        }
                        j += 1;
                    }
                    block += 1;
                }
            }
            let mut n = 0;
            while n < 4 {
                let mut i = 0;
                while i < 4 {
                    let (row, col) = state_place(own, n, i);
                    let word = turned_by_twos(row, col);
                    store(base + STATE, STATE_BYTES, word, sums_state[n][i / 2][i % 2]);
                    i += 1;
                }
                n += 1;
            }
            thread::sync_threads();
            place += 1;
        }

        let own = Own::again(place);
        let mut n = 0;
        while n < 4 {
            let mut i = 0;
            while i < 4 {
                let (row, col) = state_place(own, n, i);
                if row < dims.dim_k && in_slice(col) < dims.dim_v {
                    let at = row as usize * dims.dim_v as usize + in_slice(col) as usize;
                    global::store(state.add(at), sums_state[n][i / 2][i % 2]);
                }
                i += 1;
            }
            n += 1;
        }
    }
}
