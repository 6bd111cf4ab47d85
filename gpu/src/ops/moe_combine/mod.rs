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
//! are what is to be read, are loaded four at a time before the first is used. Bound by reading y.

use abi::exact::sigmoid;
use abi::ops::moe_combine::{BLOCK_PIECES_LOG2, MoeCombineDims};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, math, thread};

/// Pieces of y that are loaded before the first is used.
const AHEAD: usize = 4;

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

/// Sum of a token's results at `offset` of the row; `PER` elements, those that `load` gives. Those of `out`, the row's
/// place there, come last, if the sum is added to them.
///
/// # Safety
/// - The row is below the number of rows and `offset` inside it; tensors *in-bounds* for `dims` — MoeCombine::run.
#[inline(always)]
unsafe fn sum<T: Element>(
    inputs: &Inputs<T>,
    dims: &MoeCombineDims,
    token: usize,
    offset: usize,
    per: usize,
    out: *const T,
    load: impl Fn(*const T) -> [f32; 8],
) -> [f32; 8] {
    let mut sums = [0.0; 8];
    let pairs = token * dims.top_k as usize;
    let mut first = 0;
    // SAFETY: j < top_k; rows of y below y_rows; the rest is the caller's promise.
    unsafe {
        while first < dims.top_k {
            let (mut values, mut weights, mut is_there) = ([[0.0; 8]; AHEAD], [0.0; AHEAD], [false; AHEAD]);
            let mut i = 0;
            while i < AHEAD {
                let j = first + i as u32;
                if j < dims.top_k {
                    let position = global::load(inputs.positions.add(pairs + j as usize));
                    is_there[i] = position < dims.y_rows;
                    if is_there[i] {
                        weights[i] = global::load(inputs.weights.add(pairs + j as usize));
                        values[i] = load(inputs.y.add(position as usize * dims.y_stride as usize + offset));
                    }
                }
                i += 1;
            }
            let mut i = 0;
            while i < AHEAD {
                if is_there[i] {
                    add::<8>(&mut sums, weights[i], &values[i], per);
                }
                i += 1;
            }
            first += AHEAD as u32;
        }
        if !inputs.shared.is_null() {
            let weight = if inputs.gate.is_null() {
                1.0
            } else {
                sigmoid(global::load(inputs.gate.add(token * dims.gate_stride as usize)))
            };
            let values = load(inputs.shared.add(token * dims.shared_stride as usize + offset));
            add::<8>(&mut sums, weight, &values, per);
        }
        if dims.adds != 0 {
            add::<8>(&mut sums, 1.0, &load(out), per);
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
        let sums = sum(inputs, dims, row, offset, T::PER_16_BYTES, out, |from| {
            let mut values = [0.0; 8];
            T::unpack(global::load_x4(from), &mut values);
            values
        });
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
        let sums = sum(inputs, dims, row, col, 1, out, |from| {
            let mut values = [0.0; 8];
            values[0] = global::load(from).to_f32();
            values
        });
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
        #[kernel(max_threads = 256)]
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
