//! Norm and rotary embedding of a latent row, the append to its cache, and the rotation of the queries' parts: what
//! stands between the projections of latent attention and its product with the cache, in one launch.
//!
//! ```text
//! x[token, ..latent] → norm(weight) → cache[slots[token], ..latent]
//! x[token, latent..] → rotate       → cache[slots[token], latent..]
//! q[token, head]     → rotate       → q_out[token, head]
//! ```
//!
//! Work split: the first blocks normalise, a warp a row, so no block waits for another warp. Lane l takes pieces l,
//! l + 32, … of 16 bytes, as in RMSNorm's kernels for rows of this size, so the sums of squares have the same bits. The
//! blocks behind them rotate: a token's key and heads are its numbers 0, 1, 2, …, and a thread takes the same place of
//! one or several of them, the two pieces that hold its pairs if they are half of it apart, so nothing is exchanged.
//!
//! ```text
//! row, 576 bf16 | 0 | 1 | … | 31 | 32 | … | 63 | 64 | … | 71 |     the norm's lane 0: pieces 0 and 32
//! threads       |    one warp of the first blocks   | one each: place p of the key, and of heads G − 1, 2G − 1, …
//! ```
//!
//! Few tokens are bound by the launch and by latency: the norm's chain is row, sum, store, the rotation's is position,
//! angle, store, and both run side by side; all else is on its way before either waits. A thread has one number then.
//! Many tokens are bound by memory: a thread has up to four pieces on their way, and reads cos and sin once for them.
//!
//! q and q_out may be the same memory: a thread reads all that it will write before it writes, and nobody else reads
//! it.

use abi::ops::latent_append::{LatentAppendDims, PIECES_PER_THREAD, WARPS_TILE_THREADS};
use abi::range;
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, math, thread, warp};

use crate::tile::reduce::block_sum_f32;
use crate::tile::rotation::{load_angles, rotate};

/// Logarithm of a block's threads, by tile.
const WARPS_LOG2: u32 = WARPS_TILE_THREADS.ilog2();
const BLOCK_LOG2: u32 = abi::ops::latent_append::BLOCK_TILE_THREADS.ilog2();

/// Pieces that a thread holds.
const PIECES: usize = PIECES_PER_THREAD as usize;

/// The tensors of a launch.
struct Tensors<T> {
    q: *const T,
    x: *const T,
    weight: *const T,
    positions: *const u32,
    cos: *const f32,
    sin: *const f32,
    slots: *const u32,
    q_out: *mut T,
    cache: *mut T,
}

/// What a thread rotates: place `unit` of numbers `first`, `first + groups`, … of a token.
struct Place {
    /// Whether there is anything to do.
    is_inside: bool,
    token: u32,
    /// 0 is the key, which only the first of them can be.
    first: u32,
    unit: u32,
    /// The token's row of the tables.
    table: usize,
}

impl Place {
    /// # Safety
    /// - `positions` is *in-bounds* for `tiles.rows` tokens — checked in `LatentAppend::run`.
    #[inline(always)]
    unsafe fn new(positions: *const u32, dims: &LatentAppendDims, block_log2: u32) -> Self {
        let block = thread::block_idx_x() - dims.norm_blocks;
        let (token, piece) = dims.tiles.locate(block, thread::thread_idx_x(), block_log2);
        let is_inside = token < dims.tiles.rows && piece < dims.tiles.pieces;
        let mut position = 0;
        if is_inside {
            let at = positions.wrapping_add(token as usize * dims.position_stride as usize);
            // SAFETY: token < rows — LatentAppend::run.
            position = unsafe { global::load(at) };
        }
        // `units` is at least 1 (LatentAppend::run); `max` tells the compiler, which would otherwise keep a panic path.
        let units = dims.units.max(1);
        // A position beyond the tables takes the last row: a kernel has no way to refuse, and must not read outside.
        let position = position.min(dims.max_position - 1);
        Place {
            is_inside,
            token,
            first: piece / units,
            unit: piece % units,
            table: position as usize * (dims.rope / 2) as usize,
        }
    }

    /// Whether the token has number `number`: the key is one of `heads` + 1.
    #[inline(always)]
    fn has(&self, number: u32, dims: &LatentAppendDims) -> bool {
        self.is_inside && number <= dims.heads
    }

    /// Where number `number` is read.
    #[inline(always)]
    fn from<T>(&self, number: u32, tensors: &Tensors<T>, dims: &LatentAppendDims) -> *const T {
        if number == 0 {
            tensors.x.wrapping_add(self.token as usize * dims.x_stride as usize + dims.latent as usize)
        } else {
            let head = (number - 1) as usize * dims.q_head_stride as usize;
            tensors.q.wrapping_add(self.token as usize * dims.q_token_stride as usize + head)
        }
    }

    /// The token's slot, if the key is among the numbers; else 0.
    ///
    /// # Safety
    /// - `slots` is *in-bounds* for `tiles.rows` tokens — checked in `LatentAppend::run`.
    #[inline(always)]
    unsafe fn load_slot(&self, slots: *const u32) -> u32 {
        if self.is_inside && self.first == 0 {
            // SAFETY: token < rows.
            unsafe { global::load(slots.wrapping_add(self.token as usize)) }
        } else {
            0
        }
    }

    /// Where number `number` goes; none for a key whose slot is not in the cache.
    #[inline(always)]
    fn to<T>(&self, number: u32, slot: u32, tensors: &Tensors<T>, dims: &LatentAppendDims) -> Option<*mut T> {
        if number == 0 {
            let at = slot as usize * dims.slot_stride as usize + dims.latent as usize;
            (slot < dims.num_slots).then(|| tensors.cache.wrapping_add(at))
        } else {
            let head = (number - 1) as usize * dims.q_out_head_stride as usize;
            Some(tensors.q_out.wrapping_add(self.token as usize * dims.q_out_token_stride as usize + head))
        }
    }
}

/// The sum of the squares of a lane's pieces, times a factor each.
#[inline(always)]
fn square_of<T: Element, const CHUNKS: usize>(held: &[[u32; 4]; CHUNKS], factor: f32) -> f32 {
    let mut square = 0.0;
    let mut i = 0;
    while i < CHUNKS {
        let mut values = [0.0; 8];
        T::unpack(held[i], &mut values);
        let mut j = 0;
        while j < T::PER_16_BYTES {
            let value = values[j] * factor;
            square = math::fma(value, value, square);
            j += 1;
        }
        i += 1;
    }
    square
}

/// The norm of a row, in `CHUNKS` pieces per lane of a warp.
///
/// # Safety
/// - All lanes of the warp call it (*converged*), also those whose token is past the end.
/// - Pointers, strides and `latent` are *in-bounds* and *aligned(16)*; a row has at most 32 · `CHUNKS` pieces — checked
///   in `LatentAppend::run`, which takes the block tile otherwise. Slots distinct (*exclusive*) — its caller.
#[inline(always)]
unsafe fn norm_by_warp<T: Element, const CHUNKS: usize>(tensors: &Tensors<T>, dims: &LatentAppendDims) {
    let token = thread::block_idx_x() * (WARPS_TILE_THREADS / 32) + thread::thread_idx_x() / 32;
    let is_inside = token < dims.tiles.rows;
    let num_pieces = if is_inside { dims.latent / T::PER_16_BYTES as u32 } else { 0 };
    let piece = |i: usize| thread::lane() + 32 * i as u32;
    let element = |i: usize| piece(i) as usize * T::PER_16_BYTES;
    let x = tensors.x.wrapping_add(token as usize * dims.x_stride as usize);
    let (mut held, mut weights) = ([[0u32; 4]; CHUNKS], [[0u32; 4]; CHUNKS]);
    // SAFETY: token < rows and piece < num_pieces keep every access inside its row, and the slot is one of the cache's
    // — LatentAppend::run. The shuffles are in branches on votes.
    unsafe {
        let mut i = 0;
        while i < CHUNKS {
            if piece(i) < num_pieces {
                held[i] = global::load_stream_x4(x.wrapping_add(element(i)));
            }
            i += 1;
        }
        let mut i = 0;
        while i < CHUNKS {
            if piece(i) < num_pieces {
                weights[i] = global::load_nc_x4(tensors.weight.wrapping_add(element(i)));
            }
            i += 1;
        }
        let mut slot = 0;
        if is_inside {
            slot = global::load(tensors.slots.wrapping_add(token as usize));
        }
        let sum = warp::sum_f32::<32>(square_of::<T, CHUNKS>(&held, 1.0));
        let mut mean = math::fma(sum, dims.inv_latent, dims.eps);
        let factor = range::factor(mean);
        if warp::any(warp::FULL_MASK, factor != 1.0) {
            let sum = warp::sum_f32::<32>(square_of::<T, CHUNKS>(&held, factor));
            mean = math::fma(sum, dims.inv_latent, range::epsilon(dims.eps, factor));
        }
        let scale = math::rsqrt(mean);
        let to = tensors.cache.wrapping_add(slot as usize * dims.slot_stride as usize);
        let mut i = 0;
        while i < CHUNKS {
            if piece(i) < num_pieces && slot < dims.num_slots {
                let (mut values, mut gains) = ([0.0; 8], [0.0; 8]);
                T::unpack(held[i], &mut values);
                T::unpack(weights[i], &mut gains);
                let mut j = 0;
                while j < T::PER_16_BYTES {
                    values[j] = values[j] * factor * scale * (gains[j] + dims.weight_offset);
                    j += 1;
                }
                global::store_x4(to.wrapping_add(element(i)), T::pack(&values));
            }
            i += 1;
        }
    }
}

/// Rotates pieces of 16 bytes: the `HALVES` = 2 that hold the pairs of a place where they are half a head apart, or the
/// one where pairs are neighbours.
///
/// # Safety
/// - Pointers, strides and the rotated part, or half of it, are *in-bounds* and *aligned(16)* — checked in
///   `LatentAppend::run`, which takes the block tile otherwise. q is q_out or does not overlap it; slots distinct
///   (*exclusive*) — its caller.
#[inline(always)]
unsafe fn rotate_pieces<T: Element, const HALVES: usize>(tensors: &Tensors<T>, dims: &LatentAppendDims) {
    // SAFETY: number <= heads and unit < units keep every access inside its head, the tables have max_position rows of
    // rope / 2, and a slot is one of the cache's — LatentAppend::run.
    unsafe {
        let place = Place::new(tensors.positions, dims, WARPS_LOG2);
        let (col, half) = (place.unit as usize * T::PER_16_BYTES, (dims.rope / 2) as usize);
        let mut held = [[0u32; 4]; PIECES];
        let mut i = 0;
        while i < PIECES / HALVES {
            let number = place.first + i as u32 * dims.groups;
            if place.has(number, dims) {
                let from = place.from(number, tensors, dims).wrapping_add(col);
                held[i * HALVES] = global::load_x4(from);
                if HALVES == 2 {
                    held[i * HALVES + 1] = global::load_x4(from.wrapping_add(half));
                }
            }
            i += 1;
        }
        let slot = place.load_slot(tensors.slots);
        if !place.is_inside {
            return;
        }
        // A pair for each element of a piece, or for two.
        let pair = place.table + if HALVES == 2 { col } else { col / 2 };
        let (cos, sin) = (tensors.cos.wrapping_add(pair), tensors.sin.wrapping_add(pair));
        let (cos, sin) = match T::PER_16_BYTES * HALVES {
            16 => (load_angles::<8>(cos), load_angles::<8>(sin)),
            8 => (load_angles::<4>(cos), load_angles::<4>(sin)),
            _ => (load_angles::<2>(cos), load_angles::<2>(sin)),
        };
        let mut i = 0;
        while i < PIECES / HALVES {
            let number = place.first + i as u32 * dims.groups;
            if place.has(number, dims)
                && let Some(to) = place.to(number, slot, tensors, dims)
            {
                let to = to.wrapping_add(col);
                let mut a = [0.0; 8];
                T::unpack(held[i * HALVES], &mut a);
                if HALVES == 2 {
                    let mut b = [0.0; 8];
                    T::unpack(held[i * HALVES + 1], &mut b);
                    let mut j = 0;
                    while j < T::PER_16_BYTES {
                        (a[j], b[j]) = rotate(a[j], b[j], cos[j], sin[j]);
                        j += 1;
                    }
                    global::store_x4(to.wrapping_add(half), T::pack(&b));
                } else {
                    let mut j = 0;
                    while j < T::PER_16_BYTES / 2 {
                        (a[2 * j], a[2 * j + 1]) = rotate(a[2 * j], a[2 * j + 1], cos[j], sin[j]);
                        j += 1;
                    }
                }
                global::store_x4(to, T::pack(&a));
            }
            i += 1;
        }
    }
}

/// # Safety
/// - As [`norm_by_warp`] and [`rotate_pieces`].
#[inline(always)]
unsafe fn by_pieces<T: Element, const CHUNKS: usize>(tensors: &Tensors<T>, dims: &LatentAppendDims) {
    // SAFETY: the caller's promise; a block does one of the two as a whole.
    unsafe {
        if thread::block_idx_x() < dims.norm_blocks {
            norm_by_warp::<T, CHUNKS>(tensors, dims);
        } else if dims.is_interleaved != 0 {
            rotate_pieces::<T, 1>(tensors, dims);
        } else {
            rotate_pieces::<T, 2>(tensors, dims);
        }
    }
}

/// A block walks over a row element by element, twice, or three times if its squares do not fit f32.
///
/// # Safety
/// - One block per token, all its threads (*converged*); rows *in-bounds* — checked in `LatentAppend::run`. Slots
///   distinct (*exclusive*) — its caller.
#[inline(always)]
unsafe fn norm_by_element<T: Element>(tensors: &Tensors<T>, dims: &LatentAppendDims) {
    let (member, members) = (thread::thread_idx_x(), thread::block_dim_x());
    let token = thread::block_idx_x() as usize;
    // SAFETY: col < latent keeps every access inside its row, and the slot is one of the cache's — LatentAppend::run. A
    // block has one slot, so its threads leave together and meet in the sum.
    unsafe {
        let slot = global::load(tensors.slots.wrapping_add(token));
        if slot >= dims.num_slots {
            return;
        }
        let x = tensors.x.wrapping_add(token * dims.x_stride as usize);
        let square_of = |factor: f32| {
            let mut square = 0.0;
            let mut col = member;
            while col < dims.latent {
                let value = global::load(x.wrapping_add(col as usize)).to_f32() * factor;
                square = math::fma(value, value, square);
                col += members;
            }
            block_sum_f32(square)
        };
        let mut mean = math::fma(square_of(1.0), dims.inv_latent, dims.eps);
        let factor = range::factor(mean);
        // The same for all threads, as is the mean; by a vote, so that the compiler knows it of the warp. The barrier
        // is between the two sums.
        if warp::any(warp::FULL_MASK, factor != 1.0) {
            thread::sync_threads();
            mean = math::fma(square_of(factor), dims.inv_latent, range::epsilon(dims.eps, factor));
        }
        let scale = math::rsqrt(mean);
        let to = tensors.cache.wrapping_add(slot as usize * dims.slot_stride as usize);
        let mut col = member;
        while col < dims.latent {
            let value = global::load(x.wrapping_add(col as usize)).to_f32();
            let gain = global::load(tensors.weight.wrapping_add(col as usize)).to_f32() + dims.weight_offset;
            global::store(to.wrapping_add(col as usize), T::from_f32(value * factor * scale * gain));
            col += members;
        }
    }
}

/// Rotates one pair of one head, or of the key.
///
/// # Safety
/// - Pointers and strides are *in-bounds* — checked in `LatentAppend::run`. q is q_out or does not overlap it; slots
///   distinct (*exclusive*) — its caller.
#[inline(always)]
unsafe fn rotate_pair<T: Element>(tensors: &Tensors<T>, dims: &LatentAppendDims) {
    // SAFETY: first <= heads, since there are as many groups, and unit < units keep every access inside its head; the
    // tables have max_position rows of rope / 2, and a slot is one of the cache's — LatentAppend::run.
    unsafe {
        let place = Place::new(tensors.positions, dims, BLOCK_LOG2);
        if !place.is_inside {
            return;
        }
        let slot = place.load_slot(tensors.slots);
        let Some(to) = place.to(place.first, slot, tensors, dims) else { return };
        let from = place.from(place.first, tensors, dims);
        let unit = place.unit as usize;
        let (first, second) = if dims.is_interleaved != 0 {
            (2 * unit, 2 * unit + 1)
        } else {
            (unit, unit + (dims.rope / 2) as usize)
        };
        let a = global::load(from.wrapping_add(first)).to_f32();
        let b = global::load(from.wrapping_add(second)).to_f32();
        let angle = place.table + unit;
        let cos = global::load(tensors.cos.wrapping_add(angle));
        let sin = global::load(tensors.sin.wrapping_add(angle));
        let (a, b) = rotate(a, b, cos, sin);
        global::store(to.wrapping_add(first), T::from_f32(a));
        global::store(to.wrapping_add(second), T::from_f32(b));
    }
}

/// The fallback for any size, stride and alignment.
///
/// # Safety
/// - As [`norm_by_element`] and [`rotate_pair`].
#[inline(always)]
unsafe fn by_element<T: Element>(tensors: &Tensors<T>, dims: &LatentAppendDims) {
    // SAFETY: the caller's promise; a block does one of the two as a whole.
    unsafe {
        if thread::block_idx_x() < dims.norm_blocks {
            norm_by_element(tensors, dims);
        } else {
            rotate_pair(tensors, dims);
        }
    }
}

macro_rules! body {
    (Warps, $type:ident, $tensors:ident, $dims:ident, $chunks:literal) => {
        by_pieces::<$type, $chunks>(&$tensors, &$dims)
    };
    (Block, $type:ident, $tensors:ident, $dims:ident $(,)?) => {
        by_element::<$type>(&$tensors, &$dims)
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident { $($field:ident: $value:literal),* };)*) => {$(
        /// Entry point; see the module and `abi::ops::latent_append`.
        ///
        /// # Safety
        /// - Arguments as `LatentAppend::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            q: *const $type,
            x: *const $type,
            weight: *const $type,
            positions: *const u32,
            cos: *const f32,
            sin: *const f32,
            slots: *const u32,
            q_out: *mut $type,
            cache: *mut $type,
            dims: LatentAppendDims,
        ) {
            let tensors = Tensors { q, x, weight, positions, cos, sin, slots, q_out, cache };
            // SAFETY: arguments as the body asks, by `LatentAppend::run`.
            unsafe { body!($tile, $type, tensors, dims, $($value),*) }
        }
    )*};
}
abi::latent_append_table!(entries);
