//! The same as `scan` on the tensor cores of Ampere and later, with what `chunk_mma` left in the workspace. Numbers are
//! sums of three of bf16 (`fragments`), so the state stays f32's.
//!
//! A block of eight warps has 32 columns of one sequence and value head:
//!
//! ```text
//! phase 1   warp w: 16 tokens, 16 columns   K S and Q S in one walk;  R = V − diag(e^γ / |k|) · K S
//! phase 2   the same                        Ṽ = X R, up to the rows' diagonal;  W = diag(e^(γ_63 − γ) / |k|) · Ṽ
//! phase 3   the same                        O = diag(e^γ scale / |q|) · Q S + P Ṽ
//!           warp w: 16 rows of the state    S ← e^γ_63 · S + Kᵀ W, of which the sums stay in registers
//!
//! shared    | S | R | Ṽ | W | as second operands, blocks of 16 rows and 8 columns, each in three parts
//!           | X | P | as first operands | marks of the warps: of R, of Ṽ |
//! ```
//!
//! - First operands come from the workspace as they are, a lane's by one load; those of the next chunk's phase 1
//!   while the state is brought up to date. X and P come by `cp.async` as soon as their readers are done with the last.
//! - Rows of k and q have a size near 1, and the factors the rest of it.
//! - A product with X or P ends at the diagonal's block of 16 by 16, where zeros stand above it. 0 · NaN would lead
//!   back to earlier tokens, so where R or Ṽ has something that is not finite, that product is made number by number.

use abi::ops::gated_delta::{
    CHUNK, FRAGMENT, GatedDeltaDims, GatedDeltaTile, MAX_DIM_K, SLICE, VALUES_IN_PIECES,
};
use cuda_std::{cp_async, global, shared, thread, warp};

use super::chunk_mma::{
    Elements, MATRIX_P as P_AT, OF_CHANGES, OF_KEYS, OF_QUERIES, SINCE_START, lower_fragment, parts_of,
};
use super::fragments::{
    BLOCK_BYTES, Lane, PARTS, Parts, add_elements, add_numbers, half, halves, joined, load_fragment,
    load_number, next_power,
};
use crate::tile::sequences::Sequence;

/// Blocks of 16 tokens of a chunk, and of 8 columns of a slice.
const BLOCKS: usize = 4;
/// Blocks of 16 rows of the state, the most.
const STATE_BLOCKS: usize = MAX_DIM_K as usize / 16;

/// Shared memory in bytes.
const STATE: u32 = 0;
const REST: u32 = STATE_BLOCKS as u32 * ROW_BYTES;
const VALUES: u32 = REST + BLOCKS as u32 * ROW_BYTES;
const WEIGHED: u32 = VALUES + BLOCKS as u32 * ROW_BYTES;
const MATRIX_X: u32 = WEIGHED + BLOCKS as u32 * ROW_BYTES;
const MATRIX_P: u32 = MATRIX_X + LOWER_BYTES;
const MARKS: u32 = MATRIX_P + LOWER_BYTES;
const _: () = assert!(MARKS + 64 == GatedDeltaTile::ScanMma.smem_bytes());

/// Bytes of a matrix's 16 rows.
const ROW_BYTES: u32 = SLICE / 8 * BLOCK_BYTES;

/// Bytes of the fragments of X or P.
const LOWER_BYTES: u32 = 4 * P_AT;

/// Where a block of 16 rows and 8 columns of a matrix is.
#[inline(always)]
const fn block_at(matrix: u32, row: u32, col: u32) -> u32 {
    matrix + row * ROW_BYTES + col * BLOCK_BYTES
}

/// Several parts of a fragment, or several fragments.
type Fragment<const N: usize> = [[u32; 4]; N];

/// A part of a fragment of elements; zeros where it `is_there` not, as the second of a type that has one.
///
/// # Safety
/// - As for [`load_fragment`].
#[inline(always)]
unsafe fn load_part<T: Parts>(
    from: *const f32,
    matrix: Elements,
    [row, col]: [u32; 2],
    part: usize,
    is_there: bool,
) -> [u32; 4] {
    if part >= T::PARTS || !is_there {
        return [0; 4];
    }
    // SAFETY: the caller's promise.
    unsafe { load_fragment(from, matrix.fragment::<T>(row, col, part)) }
}

/// The first parts of a row of fragments of k or q.
///
/// # Safety
/// - As for [`load_fragment`].
#[inline(always)]
unsafe fn load_row<T: Parts>(
    from: *const f32,
    matrix: Elements,
    row: u32,
    dims: &GatedDeltaDims,
) -> Fragment<STATE_BLOCKS> {
    let mut fragments = [[0; 4]; STATE_BLOCKS];
    let mut block = 0;
    while block < STATE_BLOCKS {
        let at = [row, block as u32];
        // SAFETY: the caller's promise.
        fragments[block] = unsafe { load_part::<T>(from, matrix, at, 0, has_rows(block as u32, dims)) };
        block += 1;
    }
    fragments
}

/// Whether there are rows of the state in a block of 16: they go by 32.
#[inline(always)]
fn has_rows(block: u32, dims: &GatedDeltaDims) -> bool {
    16 * (block & !1) < dims.dim_k
}

/// Starts the copy of X or P to shared memory.
///
/// # Safety
/// - All 256 threads of the block; *in-bounds*: all fragments at `from`, left by an earlier kernel; *exclusive*: the
///   place of the matrix until they have waited, and a barrier since.
#[inline(always)]
unsafe fn copy_lower(matrix: u32, from: *const f32) {
    let mut piece = thread::opaque(thread::thread_idx_x());
    while piece < LOWER_BYTES / 16 {
        // SAFETY: the caller's promise.
        unsafe { cp_async::cg_16(matrix + 16 * piece, from.wrapping_add(4 * piece as usize)) };
        piece += 256;
    }
    cp_async::commit_group();
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
    /// The first of its two blocks of 8 columns.
    first_block: u32,
    group: u32,
    member: u32,
}

impl Own {
    /// This thread's. Of two warps of a scheduler one has a long lower triangle and one a short one.
    #[inline(always)]
    fn new() -> Self {
        let (warp, lane) = (thread::warp_idx(), thread::lane());
        let tile = if warp < 4 { warp } else { 7 - warp };
        Own { tile, first_block: warp / 4 * 2, group: lane / 4, member: lane % 4 }
    }

    /// The token of the lane's first or second row.
    #[inline(always)]
    fn token(self, second: usize) -> u32 {
        16 * self.tile + 2 * self.group + second as u32
    }

    /// The column of the lane's first of two sums of a row.
    #[inline(always)]
    fn col(self, n: usize) -> u32 {
        8 * (self.first_block + n as u32) + 2 * self.member
    }

    /// The lane's first or second row of the state, and a column of all of them.
    #[inline(always)]
    fn of_state(self, n: usize, i: usize) -> (u32, u32) {
        let warp = thread::warp_idx();
        let pair = 4 * (self.group / 2) + 2 * (warp % 2) + self.group % 2;
        (32 * (warp / 2) + 2 * pair + i as u32 / 2, 8 * n as u32 + 2 * self.member + i as u32 % 2)
    }
}

/// The first `count` of two neighbours of a row of v, and zeros.
///
/// # Safety
/// - As many *in-bounds*, and aligned as `dims.access` says.
#[inline(always)]
unsafe fn load_pair<T: Parts>(from: *const T, count: u32, dims: &GatedDeltaDims) -> [f32; 2] {
    // SAFETY: the caller's promise; where rows are in whole pieces of 16 bytes, `count` is 0 or 2.
    unsafe {
        if dims.access & VALUES_IN_PIECES != 0 {
            return if count == 0 { [0.0; 2] } else { halves::<T>(global::load(from.cast::<u32>())) };
        }
        let first = if count > 0 { global::load(from).to_f32() } else { 0.0 };
        let second = if count > 1 { global::load(from.wrapping_add(1)).to_f32() } else { 0.0 };
        [first, second]
    }
}

/// Stores the first `count` of two neighbours of a row of out.
///
/// # Safety
/// - As for [`load_pair`]; *exclusive*: they are the lane's.
#[inline(always)]
unsafe fn store_pair<T: Parts>(to: *mut T, [first, second]: [f32; 2], count: u32, dims: &GatedDeltaDims) {
    // SAFETY: the caller's promise; where rows are in whole pieces of 16 bytes, `count` is 0 or 2.
    unsafe {
        if dims.access & VALUES_IN_PIECES != 0 {
            if count > 0 {
                let [word, ..] = T::pack(&[first, second, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
                global::store(to.cast::<u32>(), word);
            }
            return;
        }
        if count > 0 {
            global::store(to, T::from_f32(first));
        }
        if count > 1 {
            global::store(to.wrapping_add(1), T::from_f32(second));
        }
    }
}

/// The product of a lower triangle's fragments and a matrix, both in shared memory, added to two blocks of sums.
///
/// # Safety
/// - *converged*: the whole warp; *initialised*: both, and a barrier since.
#[inline(always)]
unsafe fn add_lower(sums: &mut [[f32; 4]; 2], lower: u32, matrix: u32, own: Own, lane: Lane) {
    let zeros = [0.0; 4];
    let mut powers = [[sums[0], zeros, zeros], [sums[1], zeros, zeros]];
    let mut block = 0;
    while block < BLOCKS {
        if block as u32 <= own.tile {
            let part = |part: usize| {
                let at = lower_fragment(own.tile, block as u32, part) as u32 * (4 * FRAGMENT);
                // SAFETY: the caller's promise.
                unsafe { shared::load_u32x4(lower + at + 16 * thread::lane()) }
            };
            let a = [part(0), part(1), part(2)];
            let mut n = 0;
            while n < 2 {
                let at = block_at(matrix, block as u32, own.first_block + n as u32);
                // SAFETY: the caller's promise.
                powers[n] = unsafe {
                    let b = [lane.load(at, 0), lane.load(at, 1), lane.load(at, 2)];
                    add_numbers(powers[n], &a, &b)
                };
                n += 1;
            }
        }
        block += 1;
    }
    let mut i = 0;
    while i < 8 {
        let parts = powers[i / 4].map(|power| power[i % 4]);
        sums[i / 4][i % 4] = joined(parts);
        i += 1;
    }
}

/// The same number by number.
///
/// # Safety
/// - As for [`add_lower`].
#[inline(always)]
unsafe fn add_lower_singly(sums: &mut [[f32; 4]; 2], lower: u32, matrix: u32, own: Own) {
    let mut s = thread::opaque(0);
    while s <= own.token(1) {
        let (block, pair, second) = (s / 16, s % 16 / 2, s % 2);
        let mut i = 0;
        while i < 8 {
            let (n, j) = (i / 4, i % 4);
            if s <= own.token(j / 2) {
                let lane = 4 * own.group + pair / 2;
                let word = lane * 4 + j as u32 / 2 + 2 * (pair % 2);
                let part = |part: usize| {
                    let at = 4 * (lower_fragment(own.tile, block, part) as u32 * FRAGMENT + word);
                    // SAFETY: s up to the token — the caller.
                    half(unsafe { shared::load_u32(lower + at) }, second)
                };
                let factor = joined([part(0), part(1), part(2)]);
                let (first_col, col) = (own.first_block + n as u32, 2 * own.member + j as u32 % 2);
                // SAFETY: as above.
                let number = unsafe { load_number(block_at(matrix, block, first_col), pair, second, col) };
                sums[n][j] += factor * number;
            }
            i += 1;
        }
        s += 1;
    }
}

/// A slice of the columns of one sequence and value head, through those of its chunks that are in this pass.
///
/// # Safety
/// - As for `scan::slice`, with what `chunk_mma` has left.
#[inline(always)]
pub unsafe fn slice<T: Parts>(
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

    let (base, own) = (shared::base(), Own::new());
    let (warp, lane) = (thread::warp_idx(), Lane::new(own.group, own.member));
    let v = v.wrapping_add(head as usize * dims.v_head_stride as usize);
    let out = out.wrapping_add(head as usize * dims.out_head_stride as usize);
    let state = state.wrapping_add(
        slot as usize * dims.slot_stride as usize + head as usize * dims.dim_k as usize * dims.dim_v as usize,
    );
    let in_slice = |col: u32| slice * SLICE + col;
    let parts_of =
        |place: u32| parts_of::<T>(place - dims.first_place, head, dims).map(|at| workspace.wrapping_add(at));

    // SAFETY: rows below dim_k and columns below dim_v of a slot and head that exist; tokens below the sequence's end;
    // fragments of places of this pass and of blocks below dim_k, which the kernel before has left. Shared memory: a
    // lane writes its own words, and barriers come between every write and the reads before and after it. The state's
    // rows past dim_k, and columns past dim_v, are zeros.
    unsafe {
        let mut sums_state = [[0.0f32; 4]; BLOCKS];
        let mut n = 0;
        while n < BLOCKS {
            let mut i = 0;
            while i < 4 {
                let (row, col) = own.of_state(n, i);
                if row < dims.dim_k && in_slice(col) < dims.dim_v {
                    let at = row as usize * dims.dim_v as usize + in_slice(col) as usize;
                    sums_state[n][i] = global::load(state.add(at).cast_const());
                }
                i += 1;
            }
            lane.store(base + block_at(STATE, warp, n as u32), sums_state[n]);
            n += 1;
        }
        let [of_key, of_value] = parts_of(place);
        copy_lower(base + MATRIX_X, of_value);
        let mut keys = load_row::<T>(of_key, Elements::Keys, own.tile, dims);
        let mut queries = load_row::<T>(of_key, Elements::Queries, own.tile, dims);
        thread::sync_threads();

        while place < end_place {
            let [of_key, of_value] = parts_of(place);
            copy_lower(base + MATRIX_P, of_value.wrapping_add(P_AT as usize));
            let first = (place - first_place) * CHUNK;
            let (start, len) = ((sequence.start + first) as usize, (sequence.len - first).min(CHUNK));
            let column = |which: u32, row: u32| global::load(of_value.wrapping_add((which + row) as usize));
            let of_both = |which: u32| [column(which, own.token(0)), column(which, own.token(1))];
            let (of_keys, of_queries, of_changes) =
                (of_both(OF_KEYS), of_both(OF_QUERIES), of_both(OF_CHANGES));
            let whole = column(SINCE_START, CHUNK - 1);
            // Of a row and two neighbouring columns: where they are, and how many there are.
            let pair = |n: usize, half: usize, stride: u32| {
                let (row, col) = (own.token(half), in_slice(own.col(n)));
                let count = if row < len { dims.dim_v.saturating_sub(col).min(2) } else { 0 };
                ((start + row as usize) * stride as usize + col as usize, count)
            };
            let mut values = [[0.0f32; 4]; 2];
            let mut i = 0;
            while i < 4 {
                let (at, count) = pair(i / 2, i % 2, dims.v_token_stride);
                let [low, high] = load_pair(v.wrapping_add(at), count, dims);
                (values[i / 2][i % 2 * 2], values[i / 2][i % 2 * 2 + 1]) = (low, high);
                i += 1;
            }

            // K S and Q S, of one part also of blocks without rows, which are zeros: a branch would keep loads of one
            // block behind products of another. Two parts have no registers for that.
            let (mut keys_state, mut queries_state) = ([[0.0f32; 4]; 2], [[0.0f32; 4]; 2]);
            let mut part = PARTS;
            while part > 0 {
                part -= 1;
                let mut block = 0;
                while block < STATE_BLOCKS {
                    if T::PARTS == 1 || has_rows(block as u32, dims) {
                        let rest = |matrix: Elements| {
                            load_part::<T>(of_key, matrix, [own.tile, block as u32], 1, true)
                        };
                        let own_keys = [keys[block], rest(Elements::Keys)];
                        let own_queries = [queries[block], rest(Elements::Queries)];
                        let mut n = 0;
                        while n < 2 {
                            let at = block_at(STATE, block as u32, own.first_block + n as u32);
                            let b = lane.load(base + at, part);
                            keys_state[n] = add_elements::<T>(keys_state[n], &own_keys, b, part);
                            queries_state[n] = add_elements::<T>(queries_state[n], &own_queries, b, part);
                            n += 1;
                        }
                    }
                    block += 1;
                }
                if part > 0 {
                    keys_state = keys_state.map(next_power);
                    queries_state = queries_state.map(next_power);
                }
            }
            // R
            let mut is_finite = true;
            let mut n = 0;
            while n < 2 {
                let mut rest = [0.0; 4];
                let mut j = 0;
                while j < 4 {
                    rest[j] = values[n][j] - of_keys[j / 2] * keys_state[n][j];
                    is_finite &= rest[j].is_finite();
                    j += 1;
                }
                lane.store(base + block_at(REST, own.tile, own.first_block + n as u32), rest);
                n += 1;
            }
            mark(base + MARKS, is_finite);
            // X is there; P may still come.
            cp_async::wait_group::<1>();
            thread::sync_threads();

            // Ṽ and W
            let mut changes = [[0.0f32; 4]; 2];
            if is_marked(base + MARKS) {
                add_lower_singly(&mut changes, base + MATRIX_X, base + REST, own);
            } else {
                add_lower(&mut changes, base + MATRIX_X, base + REST, own, lane);
            }
            let mut is_finite = true;
            let mut n = 0;
            while n < 2 {
                let mut weighed = [0.0; 4];
                let mut j = 0;
                while j < 4 {
                    is_finite &= changes[n][j].is_finite();
                    weighed[j] = changes[n][j] * of_changes[j / 2];
                    j += 1;
                }
                let col = own.first_block + n as u32;
                lane.store(base + block_at(VALUES, own.tile, col), changes[n]);
                lane.store(base + block_at(WEIGHED, own.tile, col), weighed);
                n += 1;
            }
            mark(base + MARKS + 32, is_finite);
            let transposed_part = |block: usize, part: usize| {
                let at = [warp, block as u32];
                load_part::<T>(of_key, Elements::KeysTransposed, at, part, has_rows(warp, dims))
            };
            let mut transposed = [[0; 4]; BLOCKS];
            let mut block = 0;
            while block < BLOCKS {
                transposed[block] = transposed_part(block, 0);
                block += 1;
            }
            cp_async::wait_group::<0>();
            thread::sync_threads();

            // O
            let mut outs = [[0.0f32; 4]; 2];
            let mut i = 0;
            while i < 8 {
                outs[i / 4][i % 4] = queries_state[i / 4][i % 4] * of_queries[i % 4 / 2];
                i += 1;
            }
            if is_marked(base + MARKS + 32) {
                add_lower_singly(&mut outs, base + MATRIX_P, base + VALUES, own);
            } else {
                add_lower(&mut outs, base + MATRIX_P, base + VALUES, own, lane);
            }
            let mut i = 0;
            while i < 4 {
                let (at, count) = pair(i / 2, i % 2, dims.out_token_stride);
                let values = [outs[i / 2][i % 2 * 2], outs[i / 2][i % 2 * 2 + 1]];
                store_pair(out.wrapping_add(at), values, count, dims);
                i += 1;
            }

            if place + 1 < end_place {
                let [of_key, of_value] = parts_of(place + 1);
                copy_lower(base + MATRIX_X, of_value);
                keys = load_row::<T>(of_key, Elements::Keys, own.tile, dims);
                queries = load_row::<T>(of_key, Elements::Queries, own.tile, dims);
            }
            // S
            if has_rows(warp, dims) {
                let mut sums = [[0.0; 4]; BLOCKS];
                let mut part = PARTS;
                while part > 0 {
                    part -= 1;
                    let mut block = 0;
                    while block < BLOCKS {
                        let own_keys = [transposed[block], transposed_part(block, 1)];
                        let mut n = 0;
                        while n < BLOCKS {
                            let b = lane.load(base + block_at(WEIGHED, block as u32, n as u32), part);
                            sums[n] = add_elements::<T>(sums[n], &own_keys, b, part);
                            n += 1;
                        }
                        block += 1;
                    }
                    let mut n = 0;
                    while n < BLOCKS && part > 0 {
                        sums[n] = next_power(sums[n]);
                        if part == 1 {
                            let mut i = 0;
                            while i < 4 {
                                sums[n][i] += sums_state[n][i] * whole;
                                i += 1;
                            }
                        }
                        n += 1;
                    }
                }
                sums_state = sums;
            }
            let mut n = 0;
            while n < BLOCKS {
                lane.store(base + block_at(STATE, warp, n as u32), sums_state[n]);
                n += 1;
            }
            thread::sync_threads();
            place += 1;
        }

        let mut n = 0;
        while n < BLOCKS {
            let mut i = 0;
            while i < 4 {
                let (row, col) = own.of_state(n, i);
                if row < dims.dim_k && in_slice(col) < dims.dim_v {
                    let at = row as usize * dims.dim_v as usize + in_slice(col) as usize;
                    global::store(state.add(at), sums_state[n][i]);
                }
                i += 1;
            }
            n += 1;
        }
    }
}
