//! Weighted sum of experts' results: `out[t] = Σ_j w[t, j] · y[pos[t, j]] (+ shared[t]) (+ out[t])`.
//!
//! Work split: a thread per piece of 16 bytes of out, dealt by `abi::RowTiles`, so rows of any length fill the blocks:
//!
//! ```text
//! pos[t]    | 7 | 90 | 31 | …            y row 7  | … piece … |  ┐
//! w[t]      |   |    |    | …            y row 90 | … piece … |  ┼→ 8 (f32: 4) sums in f32 → out row t | … piece … |
//! ```
//!
//! Positions and weights of a token are the same for all threads of its row and come from L1; the pieces of y, which
//! are what is to be read, are loaded eight at a time before the first is used. Bound by reading y.

use abi::exact::sigmoid;
use abi::ops::moe_combine::{BLOCK_PIECES_LOG2, MoeCombineDims};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, math, thread};

/// Pieces of y that are loaded before the first is used.
const AHEAD: usize = 8;

/// What is read, beside the sizes.
struct Inputs<T> {
    y: *const T,
    weights: *const f32,
    positions: *const u32,
    /// Null if there is none.
    shared: *const T,
    /// Null if the shared expert has no gate.
    gate: *const f32,
}

/// Sum of a token's results at `offset` of the row; `PER` elements, those that `unpack` makes of what `load` gives.
/// Those of `out`, the row's place there, come last, if the sum is added to them.
///
/// # Safety
/// - The row is below the number of rows and `offset` inside it; tensors *in-bounds* for `dims` — MoeCombine::run.
#[inline(always)]
unsafe fn sum<T: Element>(
    inputs: &Inputs<T>,
    dims: &MoeCombineDims,
    (token, offset, out): (usize, usize, *const T),
    per: usize,
    load: impl Fn(*const T) -> [u32; 4],
    unpack: impl Fn([u32; 4]) -> [f32; 8],
) -> [f32; 8] {
    let mut sums = [0.0; 8];
    let pairs = token * dims.top_k as usize;
    // SAFETY: j < top_k; rows of y below y_rows; the rest is the caller's promise.
    unsafe {
        // What comes last is on its way while the experts' results are.
        let (mut shared, mut weight, mut before) = ([0; 4], 1.0, [0; 4]);
        if !inputs.shared.is_null() {
            shared = load(inputs.shared.add(token * dims.shared_stride as usize + offset));
            if !inputs.gate.is_null() {
                weight = global::load(inputs.gate.add(token * dims.gate_stride as usize));
            }
        }
        if dims.adds != 0 {
            before = load(out);
        }
        let mut first = 0;
        while first < dims.top_k {
            // Behind the last pair the last once more, which is not added. All positions come before the first row:
            // one wait for the former, one for the latter.
            let (mut positions, mut weights) = ([0; AHEAD], [0.0; AHEAD]);
            let mut i = 0;
            while i < AHEAD {
                let pair = pairs + (first + i as u32).min(dims.top_k - 1) as usize;
                positions[i] = global::load(inputs.positions.add(pair));
                weights[i] = global::load(inputs.weights.add(pair));
                i += 1;
            }
            let is_there = |i: usize| first + (i as u32) < dims.top_k && positions[i] < dims.y_rows;
            let mut words = [[0; 4]; AHEAD];
            let mut i = 0;
            while i < AHEAD {
                if is_there(i) {
                    words[i] = load(inputs.y.add(positions[i] as usize * dims.y_stride as usize + offset));
                }
                i += 1;
            }
            let mut i = 0;
            while i < AHEAD {
                if is_there(i) {
                    add::<8>(&mut sums, weights[i], &unpack(words[i]), per);
                }
                i += 1;
            }
            first += AHEAD as u32;
        }
        if !inputs.shared.is_null() {
            let weight = if inputs.gate.is_null() { 1.0 } else { sigmoid(weight) };
            add::<8>(&mut sums, weight, &unpack(shared), per);
        }
        if dims.adds != 0 {
            add::<8>(&mut sums, 1.0, &unpack(before), per);
        }
    }
    sums
}

#[inline(always)]
fn add<const N: usize>(sums: &mut [f32; N], weight: f32, values: &[f32; N], per: usize) {
    let mut i = 0;
    while i < N {
        if i < per {
            sums[i] = math::fma(weight, values[i], sums[i]);
        }
        i += 1;
    }
}

/// Pieces of 16 bytes.
///
/// # Safety
/// - Tensors *in-bounds* for `dims` and *aligned(16)* — checked in `MoeCombine::run`, which takes the scalar tile
///   otherwise.
#[inline(always)]
unsafe fn by_piece<T: Element>(inputs: &Inputs<T>, out: *mut T, dims: &MoeCombineDims) {
    let (row, piece) = dims.tiles.locate(thread::block_idx_x(), thread::thread_idx_x(), BLOCK_PIECES_LOG2);
    if row >= dims.tiles.rows || piece >= dims.tiles.pieces {
        return;
    }
    let (row, offset) = (row as usize, piece as usize * T::PER_16_BYTES);
    // SAFETY: row and piece are inside the tensors.
    unsafe {
        let out = out.add(row * dims.out_stride as usize + offset);
        let unpack = |words| {
            let mut values = [0.0; 8];
            T::unpack(words, &mut values);
            values
        };
        let at = (row, offset, out.cast_const());
        let sums = sum(inputs, dims, at, T::PER_16_BYTES, |from| global::load_x4(from), unpack);
        global::store_x4(out, T::pack(&sums));
    }
}

/// Element by element: the fallback for any length, stride and alignment.
///
/// # Safety
/// - Tensors *in-bounds* for `dims` — checked in `MoeCombine::run`.
#[inline(always)]
unsafe fn by_element<T: Element>(inputs: &Inputs<T>, out: *mut T, dims: &MoeCombineDims) {
    let (row, col) = dims.tiles.locate(thread::block_idx_x(), thread::thread_idx_x(), BLOCK_PIECES_LOG2);
    if row >= dims.tiles.rows || col >= dims.tiles.pieces {
        return;
    }
    let (row, col) = (row as usize, col as usize);
    // SAFETY: row and col are inside the tensors.
    unsafe {
        let out = out.add(row * dims.out_stride as usize + col);
        let load = |from: *const T| [global::load(from).to_f32().to_bits(), 0, 0, 0];
        let unpack = |words: [u32; 4]| [f32::from_bits(words[0]), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let sums = sum(inputs, dims, (row, col, out.cast_const()), 1, load, unpack);
        global::store(out, T::from_f32(sums[0]));
    }
}

macro_rules! body {
    (Pieces) => {
        by_piece
    };
    (Scalar) => {
        by_element
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::moe_combine`.
        ///
        /// # Safety
        /// - Arguments as `MoeCombine::run` checks them.
        #[kernel(max_threads = 128)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            y: *const $type,
            weights: *const f32,
            positions: *const u32,
            shared: *const $type,
            gate: *const f32,
            out: *mut $type,
            dims: MoeCombineDims,
        ) {
            let inputs = Inputs { y, weights, positions, shared, gate };
            // SAFETY: arguments as the body asks, by `MoeCombine::run`.
            unsafe { body!($tile)(&inputs, out, &dims) }
        }
    )*};
}
abi::moe_combine_table!(entries);
