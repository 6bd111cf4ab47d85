//! Experts of few tokens, from the router's choice to their weighted sum, in two launches:
//!
//! ```text
//! up    x → norm → x̂      a[t, j] = act(x̂ · gate[e]ᵀ) ⊙ (x̂ · up[e]ᵀ)     e = ids[t, j], and the shared expert
//! down                     out[t] (+)= Σ_j weights[t, j] · (a[t, j] · down[e]ᵀ)
//! ```
//!
//! Where tokens are few, hardly two have the same expert: nothing is sorted, and a pair of token and expert reads the
//! expert's weights for itself. Bound by reading them.
//!
//! **up**: a block has a pair (`block_idx_y`), and a warp some of its elements: a row of the gate and one of up, 32
//! pieces of 16 bytes at a time. The block brings the token's row to shared memory and norms it, which takes less time
//! than a launch, with the first pieces of the weights on their way.
//!
//! ```text
//! gate, row j | piece 0 | … | piece 31 | piece 32 | …      lane: its piece; UNROLL of them from both rows in registers
//! up,   row j | piece 0 | … | piece 31 | piece 32 | …      the next warp has the row after j, then one a grid further
//! ```
//!
//! **down**: a warp has a column of out and all experts of the token, one after the other, so that what is added up
//! stays in its registers; the rows between the products lie in shared memory, in f32 and times their weights. Each is
//! filled up with zeros to whole steps of a warp, so that a sum goes over all of them as over one row.
//!
//! ```text
//! a · weight | slot 0: row of inner, zeros | slot 1 | …    loads run ahead over the ends of slots
//! down, col  | expert e0, row col          | e1     | …    sum += (a · weight) · down
//! ```
//!
//! **The router**: where `up` has the router's logits, the first warp of a block chooses as many experts as its slot
//! needs, as `moe_router` does, which takes less time than that kernel's launch; the block of a token's last chosen
//! slot stores numbers and weights for `down`. The shared expert's blocks do not wait for that.
//!
//! A number of no expert is left out: neither weights nor what is between are read for it. The sums of a column, and
//! their order, depend on the token alone.

#[cfg(not(lacks_mma_sync))]
mod packed;

use abi::exact::sigmoid;
use abi::ops::fused_moe::{CHOSEN_AT, DOWN_PIECES, FusedMoeDims, HEAD_BYTES, SLOT_BYTES, THREADS, WARPS};
use abi::ops::matmul::MatmulNorm;
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, grid, kernel, math, shared, thread, warp};

use crate::matmul::few_rows_simt::{multiply_pieces, sum_over_lanes};
use crate::matmul::operand::Operand;
use crate::tile::row_norm::{for_pieces, norm_row};
use crate::tile::{activation, experts};

/// Pieces of a row of the gate, and of one of up, that a lane has on their way.
const UP_UNROLL: usize = 4;
/// Pieces of rows of down that a lane has on their way, in each of two halves.
const DOWN_UNROLL: usize = 4;
/// Pieces of rows between the products that a thread brings to shared memory at a time.
const STAGED: usize = 4;

/// In place of an expert that there is not.
const NOBODY: u32 = u32::MAX;

/// Where a piece of the rows lies in shared memory.
#[inline(always)]
fn row_at(piece: u32) -> u32 {
    shared::base() + HEAD_BYTES + 16 * piece
}

/// A piece of a row of `cols` elements; zeros where it has none.
///
/// # Safety
/// - The row is *in-bounds*, and *aligned(16)* and of whole pieces if `PIECES`.
#[inline(always)]
unsafe fn load_piece<T: Operand, const PIECES: bool>(row: *const T, piece: u32, cols: u32) -> [u32; 4] {
    let start = piece * T::PER_PIECE;
    if start >= cols {
        return [0; 4];
    }
    let from = row.wrapping_add(start as usize);
    // SAFETY: elements that there are — the caller.
    unsafe {
        if PIECES { global::load_nc_x4(from) } else { T::gather(from, (cols - start).min(T::PER_PIECE)) }
    }
}

/// The same of a weight, which is read once.
///
/// # Safety
/// - As [`load_piece`].
#[inline(always)]
unsafe fn load_weight<T: Operand, const PIECES: bool>(row: *const T, piece: u32, cols: u32) -> [u32; 4] {
    if PIECES && piece * T::PER_PIECE < cols {
        // SAFETY: a piece that there is — the caller.
        unsafe { global::load_stream_x4(row.wrapping_add((piece * T::PER_PIECE) as usize)) }
    } else {
        // SAFETY: the caller's promise.
        unsafe { load_piece::<T, PIECES>(row, piece, cols) }
    }
}

/// The expert of a slot of a token: [`NOBODY`] if its number is beyond those that there are. Of the shared one any
/// other number.
///
/// # Safety
/// - `ids` holds `top_k` numbers for each token — checked in `FusedMoe::run`.
#[inline(always)]
unsafe fn expert_of(ids: *const u32, (token, slot): (u32, u32), dims: &FusedMoeDims) -> u32 {
    if slot >= dims.top_k {
        return 0;
    }
    // SAFETY: slot < top_k; the token is one of the grid's — the caller.
    let expert = unsafe { global::load(ids.wrapping_add((token * dims.top_k + slot) as usize)) };
    if expert < dims.experts { expert } else { NOBODY }
}

/// The numbers of experts that `up` reads, or the logits of which it makes them.
#[derive(Clone, Copy)]
struct Choice {
    /// Null if the experts are chosen already.
    logits: *const f32,
    /// Null if there is none.
    bias: *const f32,
    ids: *mut u32,
    weights: *mut f32,
}

impl Choice {
    /// The expert of a slot of a token, the same for all threads: as [`expert_of`]. Where there are logits, the block
    /// of a token's last chosen slot stores the choice.
    ///
    /// # Safety
    /// - Blocks of [`THREADS`] threads (*converged*), of a slot and a token each; `logits` is null or has a row for
    ///   each token, `ids` holds `top_k` numbers for each, and if there are logits `weights` too.
    /// - *exclusive*: a word for each expert behind the head, and the head's last slot; what lies there before is read
    ///   by no one any more.
    #[inline(always)]
    unsafe fn expert(&self, (token, slot): (u32, u32), dims: &FusedMoeDims) -> u32 {
        // SAFETY: the caller's promise. The word is written before the barrier, and no one writes it behind.
        unsafe {
            if self.logits.is_null() || slot >= dims.top_k {
                return expert_of(self.ids, (token, slot), dims);
            }
            let at = shared::base() + CHOSEN_AT;
            if thread::warp_idx() == 0 {
                let router = &dims.router;
                let row = self.logits.wrapping_add(token as usize * router.logits_stride as usize);
                let stores = slot + 1 == dims.top_k && thread::block_idx_x() == 0;
                let (chosen, scores) =
                    experts::choose((row, self.bias), row_at(0), (slot + 1, stores), router);
                if thread::lane() == slot {
                    shared::store_u32(at, chosen);
                }
                if stores {
                    let weight = experts::weigh(row, (chosen, scores), router);
                    experts::store_choice((token, chosen, weight), self.ids, self.weights, router);
                }
            }
            thread::sync_threads();
            shared::load_u32(at)
        }
    }
}

/// Where a slot's expert and weight lie in the head.
#[inline(always)]
fn slot_at(slot: u32) -> u32 {
    shared::base() + SLOT_BYTES * slot
}

/// Stores the expert of a slot of a token, and what its result is multiplied by.
///
/// # Safety
/// - As [`expert_of`], and `weights` holds as many numbers; `gate` is null or holds one for each token.
/// - *exclusive*: the slot's place in the head.
#[inline(always)]
unsafe fn store_slot(
    ids: *const u32,
    weights: *const f32,
    gate: *const f32,
    (token, slot): (u32, u32),
    dims: &FusedMoeDims,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let expert = expert_of(ids, (token, slot), dims);
        let weight = if slot < dims.top_k {
            global::load(weights.wrapping_add((token * dims.top_k + slot) as usize))
        } else if gate.is_null() {
            1.0
        } else {
            sigmoid(global::load(gate.wrapping_add(token as usize * dims.gate_stride as usize)))
        };
        shared::store_u32x2(slot_at(slot), [expert, weight.to_bits()]);
    }
}

/// What `up` reads.
struct UpInputs<T> {
    x: *const T,
    /// Null if x is taken as it is.
    gain: *const T,
    choice: Choice,
    gate_up: *const T,
    /// Of the shared expert.
    shared: *const T,
}

/// The activated rows of a pair.
///
/// # Safety
/// - Blocks of [`THREADS`] threads (*converged*), a row of them for each pair; shared memory for the head and a row of
///   x; tensors *in-bounds* for `dims`, and of whole pieces, *aligned(16)*, if `PIECES` — checked in `FusedMoe::run`.
#[inline(always)]
unsafe fn up<T: Operand<Sum = f32> + Element, const UNROLL: usize, const PIECES: bool>(
    inputs: &UpInputs<T>,
    activated: *mut T,
    dims: &FusedMoeDims,
    norm: &MatmulNorm,
) {
    // At least 1; `max` tells the compiler, which would otherwise keep a panic path.
    let slots = dims.slots.max(1);
    let (pair, hidden) = (thread::block_idx_y(), dims.hidden);
    let (token, slot) = (pair / slots, pair % slots);
    // SAFETY: a pair of the grid; nothing lies in shared memory yet.
    let expert = unsafe { inputs.choice.expert((token, slot), dims) };
    // The same for the whole block.
    if expert == NOBODY {
        return;
    }
    let (weight, stride) = if slot < dims.top_k {
        let from = expert as usize * dims.gate_up_expert_stride as usize;
        (inputs.gate_up.wrapping_add(from), dims.gate_up_stride)
    } else {
        (inputs.shared, dims.shared_gate_up_stride)
    };
    let lane = thread::lane();
    // Pieces from `first` on, of the rows of an element; zeros of an element that there is not.
    let load = |element: u32, first: u32| {
        let mut loaded = [[[0; 4]; 2]; UNROLL];
        if element < dims.inner {
            let rows = [element, dims.inner + element]
                .map(|row| weight.wrapping_add(row as usize * stride as usize));
            let mut u = 0;
            while u < UNROLL {
                let mut half = 0;
                while half < 2 {
                    let piece = first + 32 * u as u32 + lane;
                    // SAFETY: a row of the weight — `FusedMoe::run`.
                    loaded[u][half] = unsafe { load_weight::<T, PIECES>(rows[half], piece, hidden) };
                    half += 1;
                }
                u += 1;
            }
        }
        loaded
    };
    let (mut element, step) =
        (thread::block_idx_x() * WARPS + thread::warp_idx(), thread::grid_dim_x() * WARPS);
    let mut held = load(element, 0);

    let num_pieces = hidden.div_ceil(T::PER_PIECE);
    let x = inputs.x.wrapping_add(token as usize * dims.x_stride as usize);
    // SAFETY: a row of x; each thread norms what it has stored, and all read behind the barrier. Elements are below
    // `inner`, and their places in the workspace the pair's own.
    unsafe {
        for_pieces::<THREADS>(num_pieces, |piece| {
            shared::store_u32x4(row_at(piece), load_piece::<T, PIECES>(x, piece, hidden));
        });
        if !inputs.gain.is_null() {
            let gain = |piece| load_piece::<T, PIECES>(inputs.gain, piece, hidden);
            norm_row::<T, THREADS>(row_at(0), num_pieces, gain, norm);
        }
        thread::sync_threads();
        let out = activated.wrapping_add(pair as usize * dims.activated_stride as usize);
        while element < dims.inner {
            let (mut sums, mut first) = ([0.0; 2], 0);
            while first < num_pieces {
                let mut u = 0;
                while u < UNROLL {
                    let piece = first + 32 * u as u32 + lane;
                    if piece < num_pieces {
                        let x = shared::load_u32x4(row_at(piece));
                        multiply_pieces::<T, 1, 2, 2>(&[x], &held[u], &mut sums);
                    }
                    u += 1;
                }
                first += 32 * UNROLL as u32;
                // The next round's, or those of the next element.
                held = if first < num_pieces { load(element, first) } else { load(element + step, 0) };
            }
            // Half of the warp has the gate's sum, half up's.
            let sum = sum_over_lanes::<f32, 2>(sums);
            let other = warp::shuffle_xor_f32(warp::FULL_MASK, sum, 16);
            if lane == 0 {
                let value = activation::curve(sum, &dims.curve) * other;
                global::store(out.wrapping_add(element as usize), T::from_f32(value));
            }
            element += step;
        }
    }
    grid::near_end();
}

/// What `down` reads.
struct DownInputs<T> {
    activated: *const T,
    ids: *const u32,
    weights: *const f32,
    down: *const T,
    /// Of the shared expert.
    shared: *const T,
    /// Null if the shared expert has no gate.
    gate: *const f32,
}

/// Where 4 of the elements of a piece of the rows between the products lie in shared memory, in f32: the first, or the
/// last where a piece has 8. Pieces of a token are neighbours, and so are those that a warp reads at once.
#[inline(always)]
fn weighted_at(piece: u32, half: u32, num_pieces: u32) -> u32 {
    row_at(half * num_pieces + piece)
}

/// Some columns of a token's out.
///
/// # Safety
/// - Blocks of [`THREADS`] threads (*converged*), a row of them for each token; shared memory for the head and the
///   token's rows in f32, each of whole [`DOWN_PIECES`]; tensors *in-bounds* for `dims`, and of whole pieces,
///   *aligned(16)*, if `PIECES` — checked in `FusedMoe::run`.
#[inline(always)]
unsafe fn down<T: Operand<Sum = f32> + Element, const UNROLL: usize, const PIECES: bool>(
    inputs: &DownInputs<T>,
    out: *mut T,
    dims: &FusedMoeDims,
) {
    let (token, inner) = (thread::block_idx_y(), dims.inner);
    let (member, lane) = (thread::thread_idx_x(), thread::lane());
    // Of a slot: those of a row, and with those that fill it up.
    let num_pieces = inner.div_ceil(T::PER_PIECE);
    let padded = num_pieces.next_multiple_of(DOWN_PIECES);
    let all = dims.slots * padded;
    // Columns past the end are computed from the last one, and not stored.
    let col = thread::block_idx_x() * WARPS + thread::warp_idx();
    let row = col.min(dims.hidden - 1) as usize;
    // SAFETY: slots below `slots` have their places in the head, which all read behind the barrier; pieces below `all`
    // theirs behind the next; rows of experts that there are — `FusedMoe::run`.
    unsafe {
        if member < dims.slots {
            store_slot(inputs.ids, inputs.weights, inputs.gate, (token, member), dims);
        }
        thread::sync_threads();
        // The column's row of a slot's weight; none of an expert that there is not.
        let weight_of = |slot: u32| {
            if slot >= dims.slots {
                return core::ptr::null();
            }
            let [expert, _] = shared::load_u32x2(slot_at(slot));
            if expert == NOBODY {
                core::ptr::null()
            } else if slot < dims.top_k {
                let of_expert = inputs.down.wrapping_add(expert as usize * dims.down_expert_stride as usize);
                of_expert.wrapping_add(row * dims.down_stride as usize)
            } else {
                inputs.shared.wrapping_add(row * dims.shared_down_stride as usize)
            }
        };
        // Where loads go on: the slot, its weight, and a piece of that.
        let (mut slot, mut weight, mut first) = (0, weight_of(0), 0);
        let mut load_some = || {
            let mut loaded = [[0; 4]; UNROLL];
            let mut u = 0;
            while u < UNROLL {
                if !weight.is_null() {
                    loaded[u] = load_weight::<T, PIECES>(weight, first + lane, inner);
                }
                first += DOWN_PIECES;
                if first >= padded {
                    slot += 1;
                    (weight, first) = (weight_of(slot), 0);
                }
                u += 1;
            }
            loaded
        };
        let (mut first_half, mut second_half) = (load_some(), load_some());
        let out = out.wrapping_add(token as usize * dims.out_stride as usize + row);
        let mut added = 0.0;
        if dims.adds != 0 && lane == 0 && col < dims.hidden {
            added = global::load(out).to_f32();
        }

        // Each row times its slot's weight; zeros behind it, and of an expert that there is not.
        let first_row = token as usize * dims.slots as usize;
        let mut index = member;
        while index < all {
            let (mut pieces, mut weights) = ([[0; 4]; STAGED], [0.0; STAGED]);
            let mut i = 0;
            while i < STAGED {
                let at = index + i as u32 * THREADS;
                if at < all {
                    // At least 1 here; `max` tells the compiler.
                    let (slot, piece) = (at / padded.max(1), at % padded.max(1));
                    let [expert, weight] = shared::load_u32x2(slot_at(slot));
                    if expert != NOBODY {
                        let row = (first_row + slot as usize) * dims.activated_stride as usize;
                        pieces[i] = load_piece::<T, PIECES>(inputs.activated.wrapping_add(row), piece, inner);
                        weights[i] = f32::from_bits(weight);
                    }
                }
                i += 1;
            }
            let mut i = 0;
            while i < STAGED {
                let at = index + i as u32 * THREADS;
                if at < all {
                    let mut values = [0.0; 8];
                    T::unpack(pieces[i], &mut values);
                    let mut half = 0;
                    while half < T::PER_PIECE / 4 {
                        let mut words = [0; 4];
                        let mut j = 0;
                        while j < 4 {
                            words[j] = (values[4 * half as usize + j] * weights[i]).to_bits();
                            j += 1;
                        }
                        shared::store_u32x4(weighted_at(at, half, all), words);
                        half += 1;
                    }
                }
                i += 1;
            }
            index += STAGED as u32 * THREADS;
        }
        thread::sync_threads();

        let (mut sum, mut at) = (0.0, lane);
        let mut multiply = |held: &[[u32; 4]; UNROLL]| {
            let mut u = 0;
            while u < UNROLL {
                if at < all {
                    let mut values = [0.0; 8];
                    T::unpack(held[u], &mut values);
                    let mut half = 0;
                    while half < T::PER_PIECE / 4 {
                        let words = shared::load_u32x4(weighted_at(at, half, all));
                        let mut j = 0;
                        while j < 4 {
                            sum = math::fma(f32::from_bits(words[j]), values[4 * half as usize + j], sum);
                            j += 1;
                        }
                        half += 1;
                    }
                }
                at += DOWN_PIECES;
                u += 1;
            }
            at < all
        };
        // One half is multiplied while the other is on its way.
        let mut goes_on = all > 0;
        while goes_on {
            goes_on = multiply(&first_half);
            first_half = load_some();
            if goes_on {
                goes_on = multiply(&second_half);
                second_half = load_some();
            }
        }
        let sum = warp::sum_f32::<32>(sum);
        if lane == 0 && col < dims.hidden {
            global::store(out, T::from_f32(sum + added));
        }
    }
    grid::near_end();
}

macro_rules! entry {
    ($entry:ident, $type:ident, Up, $unroll:expr, $pieces:literal) => {
        /// Entry point; see the module and `abi::ops::fused_moe`.
        ///
        /// # Safety
        /// - Arguments as `FusedMoe::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 3)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            x: *const $type,
            gain: *const $type,
            logits: *const f32,
            bias: *const f32,
            ids: *mut u32,
            weights: *mut f32,
            gate_up: *const $type,
            shared: *const $type,
            activated: *mut $type,
            dims: FusedMoeDims,
            norm: MatmulNorm,
        ) {
            let choice = Choice { logits, bias, ids, weights };
            let inputs = UpInputs { x, gain, choice, gate_up, shared };
            // SAFETY: arguments as the body asks, by `FusedMoe::run`.
            unsafe { up::<$type, { $unroll }, $pieces>(&inputs, activated, &dims, &norm) }
        }
    };
    ($entry:ident, $type:ident, Down, $unroll:expr, $pieces:literal) => {
        /// Entry point; see the module and `abi::ops::fused_moe`.
        ///
        /// # Safety
        /// - Arguments as `FusedMoe::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 2)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            activated: *const $type,
            ids: *const u32,
            weights: *const f32,
            down: *const $type,
            shared: *const $type,
            gate: *const f32,
            out: *mut $type,
            dims: FusedMoeDims,
        ) {
            let inputs = DownInputs { activated, ids, weights, down, shared, gate };
            // SAFETY: arguments as the body asks, by `FusedMoe::run`.
            unsafe { self::down::<$type, { $unroll }, $pieces>(&inputs, out, &dims) }
        }
    };
}

macro_rules! entries {
    () => {};
    ($entry:ident => $type:ident, $dtype:ident, Up, Pieces; $($rest:tt)*) => {
        entry!($entry, $type, Up, UP_UNROLL, true);
        entries!($($rest)*);
    };
    ($entry:ident => $type:ident, $dtype:ident, Down, Pieces; $($rest:tt)*) => {
        entry!($entry, $type, Down, DOWN_UNROLL, true);
        entries!($($rest)*);
    };
    ($entry:ident => $type:ident, $dtype:ident, Up, Elements; $($rest:tt)*) => {
        entry!($entry, $type, Up, 1, false);
        entries!($($rest)*);
    };
    ($entry:ident => $type:ident, $dtype:ident, Down, Elements; $($rest:tt)*) => {
        entry!($entry, $type, Down, 1, false);
        entries!($($rest)*);
    };
}
abi::fused_moe_table!(entries);
