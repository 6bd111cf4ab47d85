//! Causal depthwise convolution over time: `out[t, c] = silu(Σ_j w[c, j] · x[t − width + 1 + j, c] (+ bias[c]))`.
//!
//! Work split: a block does up to 32 tokens of one sequence in its channels; a thread has the channels of one piece of
//! 16 bytes, keeps their weights and the last inputs in registers, and walks along the tokens. The inputs before its
//! first token are the state if that is the sequence's first, else tokens of the piece before, which are read a second
//! time (3 rows in 32).
//!
//! ```text
//! state  s0 s1 s2 ┐ before the first token
//! x         t0 t1 … t31 | t32 …          the block of t32 begins with t29 t30 t31
//! state' ← the last inputs of the sequence, written by the block that has read the old ones
//! ```
//!
//! The block of a sequence's first piece writes the new state too, after it has read the old one: so nobody waits for
//! anybody, and prefill and decode are the same kernel. Decode is bound by the state, of which three inputs are read
//! and written for each input: all of it in pieces of 16 bytes.

use abi::ops::causal_conv1d::{CausalConv1dDims, MAX_WIDTH, THREADS, TOKENS};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, grid, kernel, math, thread};

use crate::tile::activation::silu;
use crate::tile::sequences::{Sequence, piece_at};

/// Tokens whose inputs are loaded before the first is used.
const HELD: usize = 4;

/// The tensors of a run.
struct Tensors<T> {
    x: *const T,
    weight: *const T,
    /// Null if there is none.
    bias: *const T,
    state: *mut T,
    out: *mut T,
}

/// What a block does: a piece of a sequence, the sequence's slot.
struct Share {
    sequence: Sequence,
    first: u32,
    slot: u32,
}

impl Share {
    /// # Safety
    /// - `offsets` and `slots` are of `dims.sequences` sequences, at least one — CausalConv1d::run.
    #[inline(always)]
    unsafe fn new(offsets: *const u32, slots: *const u32, dims: &CausalConv1dDims) -> Option<Self> {
        let place = thread::block_idx_x() / dims.channel_blocks.max(1);
        // SAFETY: the caller's promise.
        unsafe {
            let (sequence, first) = piece_at(offsets, dims.sequences, dims.tokens, place, TOKENS)?;
            let slot = global::load(slots.add(sequence.index as usize));
            (slot < dims.num_slots).then_some(Share { sequence, first, slot })
        }
    }

    /// The sequence's token that follows the piece, or its end.
    #[inline(always)]
    fn end(&self) -> u32 {
        self.sequence.len.min(self.first + TOKENS)
    }
}

/// This thread's number among those that share out the channels.
#[inline(always)]
fn channel_thread(dims: &CausalConv1dDims) -> u32 {
    thread::block_idx_x() % dims.channel_blocks.max(1) * THREADS + thread::thread_idx_x()
}

/// `ROW` elements of each of the channels of a piece, `from` on, as `[row][channel]`: `ROW` pieces of 16 bytes.
///
/// # Safety
/// - *aligned(16)*, and `ROW` pieces *in-bounds*.
#[inline(always)]
unsafe fn load_columns<T: Element, const ROW: usize>(from: *const T) -> [[f32; 8]; ROW] {
    let mut columns = [[0.0; 8]; ROW];
    let mut piece = 0;
    while piece < ROW {
        let mut values = [0.0; 8];
        // SAFETY: the caller's promise.
        T::unpack(unsafe { global::load_x4(from.add(piece * T::PER_16_BYTES)) }, &mut values);
        let mut i = 0;
        while i < T::PER_16_BYTES {
            let index = piece * T::PER_16_BYTES + i;
            columns[index % ROW][index / ROW] = values[i];
            i += 1;
        }
        piece += 1;
    }
    columns
}

/// The inverse.
///
/// # Safety
/// - As `load_columns`; *exclusive*.
#[inline(always)]
unsafe fn store_columns<T: Element, const ROW: usize>(to: *mut T, columns: &[[f32; 8]; ROW]) {
    let mut piece = 0;
    while piece < ROW {
        let mut values = [0.0; 8];
        let mut i = 0;
        while i < T::PER_16_BYTES {
            let index = piece * T::PER_16_BYTES + i;
            values[i] = columns[index % ROW][index / ROW];
            i += 1;
        }
        // SAFETY: the caller's promise.
        unsafe { global::store_x4(to.add(piece * T::PER_16_BYTES), T::pack(&values)) };
        piece += 1;
    }
}

/// Channels in pieces of 16 bytes; `PAST` is `WIDTH` − 1.
///
/// # Safety
/// - Tensors *in-bounds* and *aligned(16)*, `dims.width` is `WIDTH` — checked in `CausalConv1d::run`.
#[inline(always)]
unsafe fn by_piece<T: Element, const WIDTH: usize, const PAST: usize>(
    tensors: Tensors<T>,
    dims: &CausalConv1dDims,
    share: Share,
) {
    let channel = channel_thread(dims) as usize * T::PER_16_BYTES;
    if channel >= dims.channels as usize {
        return;
    }
    let Share { sequence, first, slot } = share;
    let end = share.end();
    // Token t of the sequence.
    let x = |t: u32| {
        tensors.x.wrapping_add((sequence.start + t) as usize * dims.x_stride as usize).wrapping_add(channel)
    };
    // SAFETY: channel < channels, which are whole pieces; tokens are below the sequence's end.
    unsafe {
        let weights: [[f32; 8]; WIDTH] = load_columns::<T, WIDTH>(tensors.weight.add(channel * WIDTH));
        let mut bias = [0.0; 8];
        if !tensors.bias.is_null() {
            T::unpack(global::load_nc_x4(tensors.bias.add(channel)), &mut bias);
        }
        let state = tensors.state.add(slot as usize * dims.slot_stride as usize + channel * PAST);
        let mut past = [[0.0; 8]; PAST];
        if first == 0 {
            past = load_columns::<T, PAST>(state);
            store_columns::<T, PAST>(state, &next_state::<T, PAST>(&past, sequence.len, x));
        } else {
            let mut j = 0;
            while j < PAST {
                T::unpack(global::load_x4(x(first + j as u32 - PAST as u32)), &mut past[j]);
                j += 1;
            }
        }

        let mut t = first;
        while t < end {
            let mut held = [[0u32; 4]; HELD];
            let mut i = 0;
            while i < HELD {
                if t + (i as u32) < end {
                    held[i] = global::load_x4(x(t + i as u32));
                }
                i += 1;
            }
            let mut i = 0;
            while i < HELD {
                if t + (i as u32) < end {
                    let mut own = [0.0; 8];
                    T::unpack(held[i], &mut own);
                    let mut sums = bias;
                    let mut c = 0;
                    while c < T::PER_16_BYTES {
                        let mut j = 0;
                        while j < PAST {
                            sums[c] = math::fma(weights[j][c], past[j][c], sums[c]);
                            j += 1;
                        }
                        sums[c] = silu::<T>(math::fma(weights[PAST][c], own[c], sums[c]));
                        c += 1;
                    }
                    let mut j = 0;
                    while j < PAST {
                        past[j] = if j + 1 < PAST { past[j + 1] } else { own };
                        j += 1;
                    }
                    let row = (sequence.start + t + i as u32) as usize * dims.out_stride as usize;
                    global::store_x4(tensors.out.add(row + channel), T::pack(&sums));
                }
                i += 1;
            }
            t += HELD as u32;
        }
    }
}

/// The last `PAST` inputs of a sequence of `len` tokens that follow `past`; `x(t)` is where token t's are.
///
/// # Safety
/// - `x` of every token of the sequence *in-bounds* and *aligned(16)*.
#[inline(always)]
unsafe fn next_state<T: Element, const PAST: usize>(
    past: &[[f32; 8]; PAST],
    len: u32,
    x: impl Fn(u32) -> *const T,
) -> [[f32; 8]; PAST] {
    let mut next = [[0.0; 8]; PAST];
    let mut j = 0;
    while j < PAST {
        let index = len + j as u32;
        if index >= PAST as u32 {
            // SAFETY: index − PAST < len, since j < PAST.
            T::unpack(unsafe { global::load_x4(x(index - PAST as u32)) }, &mut next[j]);
        } else {
            // One of them: compared, since registers have no index.
            let mut from = 0;
            while from < PAST {
                if index == from as u32 {
                    next[j] = past[from];
                }
                from += 1;
            }
        }
        j += 1;
    }
    next
}

/// A channel per thread: the fallback for any alignment. Taps beyond `dims.width` weigh nothing and are not read.
///
/// # Safety
/// - Tensors *in-bounds*, `dims.width` from 2 to [`MAX_WIDTH`] — checked in `CausalConv1d::run`.
#[inline(always)]
unsafe fn by_channel<T: Element>(tensors: Tensors<T>, dims: &CausalConv1dDims, share: Share) {
    const WIDTH: usize = MAX_WIDTH as usize;
    let channel = channel_thread(dims) as usize;
    if channel >= dims.channels as usize {
        return;
    }
    let Share { sequence, first, slot } = share;
    let end = share.end();
    // Taps are counted from the newest: 0 is the token itself, 1 the one before.
    let past = dims.width - 1;
    let x = |t: u32| {
        let at = (sequence.start + t) as usize * dims.x_stride as usize + channel;
        // SAFETY: t is below the sequence's end, channel < channels.
        unsafe { global::load(tensors.x.add(at)) }
    };
    // SAFETY: channel < channels, `age` from 1 to `past`, and the tokens below the sequence's end.
    unsafe {
        let state = tensors.state.add(slot as usize * dims.slot_stride as usize + channel * past as usize);
        let mut weights = [0.0; WIDTH];
        // The inputs before the next token, the newest at 1.
        let mut window = [T::from_f32(0.0); WIDTH];
        let mut age = 0;
        while age < WIDTH {
            if age as u32 <= past {
                let tap = channel * dims.width as usize + past as usize - age;
                weights[age] = global::load(tensors.weight.add(tap)).to_f32();
            }
            if age > 0 && age as u32 <= past {
                window[age] = if first == 0 {
                    global::load(state.add(past as usize - age))
                } else {
                    x(first - age as u32)
                };
            }
            age += 1;
        }
        let bias =
            if tensors.bias.is_null() { 0.0 } else { global::load(tensors.bias.add(channel)).to_f32() };
        if first == 0 {
            let mut age = 1;
            while age < WIDTH {
                if age as u32 <= past {
                    let mut value = window[age];
                    if sequence.len >= age as u32 {
                        value = x(sequence.len - age as u32);
                    } else {
                        // `age − len` tokens before the sequence: compared, since registers have no index.
                        let mut before = 1;
                        while before < age {
                            if sequence.len + before as u32 == age as u32 {
                                value = window[before];
                            }
                            before += 1;
                        }
                    }
                    global::store(state.add(past as usize - age), value);
                }
                age += 1;
            }
        }
        let mut t = first;
        while t < end {
            window[0] = x(t);
            let mut sum = bias;
            let mut age = WIDTH;
            while age > 0 {
                age -= 1;
                if age as u32 <= past {
                    sum = math::fma(weights[age], window[age].to_f32(), sum);
                }
            }
            let mut age = WIDTH - 1;
            while age > 0 {
                window[age] = window[age - 1];
                age -= 1;
            }
            let row = (sequence.start + t) as usize * dims.out_stride as usize;
            global::store(tensors.out.add(row + channel), T::from_f32(silu::<T>(sum)));
            t += 1;
        }
    }
}

macro_rules! body {
    (Pieces, $type:ident, $tensors:ident, $dims:ident, $tables:expr, $width:literal) => {{
        // A model's step finds the weights in memory: the blocks of the first tokens bring them to L2, whoever writes
        // them.
        grid::begin_with(|| {
            let channel = channel_thread($dims) * <$type as Element>::PER_16_BYTES as u32;
            let is_first = thread::block_idx_x() < $dims.channel_blocks && thread::thread_idx_x() == 0;
            if is_first && channel < $dims.channels {
                let most = THREADS * <$type as Element>::PER_16_BYTES as u32;
                let elements = ($dims.channels - channel).min(most) * $width;
                let weights = $tensors.weight.add((channel * $width) as usize);
                global::prefetch_l2(weights, elements * size_of::<$type>() as u32);
            }
        });
        if let Some(share) = Share::new($tables.0, $tables.1, $dims) {
            by_piece::<$type, $width, { $width - 1 }>($tensors, $dims, share)
        }
    }};
    (Scalar, $type:ident, $tensors:ident, $dims:ident, $tables:expr $(,)?) => {{
        grid::begin();
        if let Some(share) = Share::new($tables.0, $tables.1, $dims) {
            by_channel::<$type>($tensors, $dims, share)
        }
    }};
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident { $($field:ident: $value:literal)? };)*) => {$(
        /// Entry point; see the module and `abi::ops::causal_conv1d`.
        ///
        /// # Safety
        /// - Arguments as `CausalConv1d::run` checks them.
        #[kernel(max_threads = 128, waits)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            x: *const $type,
            weight: *const $type,
            bias: *const $type,
            offsets: *const u32,
            slots: *const u32,
            state: *mut $type,
            out: *mut $type,
            dims: CausalConv1dDims,
        ) {
            let (dims, tensors) = (&dims, Tensors { x, weight, bias, state, out });
            // SAFETY: the same contract.
            unsafe { body!($tile, $type, tensors, dims, (offsets, slots), $($value)?) }
        }
    )*};
}
abi::causal_conv1d_table!(entries);
