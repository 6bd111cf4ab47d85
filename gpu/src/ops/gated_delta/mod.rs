//! Gated delta rule: a state `S [dim_k, dim_v]` per value head, which each token decays, corrects and reads.
//!
//! ```text
//! k ← k / |k|   q ← q / |q| · scale   β = sigmoid(b)   g = −exp(A_log) · softplus(a + dt_bias)
//! S ← e^g · S
//! S ← S + k ⊗ β (v − Sᵀ k)
//! out = Sᵀ q
//! ```
//!
//! Three ways to do it:
//! - `recurrent`: as it stands. A warp keeps eight columns of S in registers and walks along the tokens. Reading and
//!   writing S is what bounds a decode step.
//! - `chunk` and `scan`: 64 tokens at a time, as matrix products. `chunk` does for all chunks at once what does not
//!   depend on S, `scan` the rest from chunk to chunk.
//! - `chunk_mma` and `scan_mma`: the same on tensor cores.
//!
//! Columns of S do not depend on each other, so both share them out over blocks, in slices of 32.

mod chunk;
#[cfg(not(lacks_mma_sync))]
mod chunk_mma;
#[cfg(not(lacks_mma_sync))]
mod fragments;
mod recurrent;
mod scan;
#[cfg(not(lacks_mma_sync))]
mod scan_mma;

use abi::ops::gated_delta::{GatedDeltaDims, ROWS_IN_PIECES};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel};

use crate::tile::activation::{exp, sigmoid, softplus};

/// Added to the sum of squares of q and k, inside the root.
const EPS: f32 = 1e-6;

/// Decays below are taken as this: e^−256 is 0 in f32, and differences of sums of 64 of them are exact enough.
const LEAST_LOG_DECAY: f32 = -256.0;

/// The head of a key head's q and k that value head `head` uses.
#[inline(always)]
fn key_head(head: u32, dims: &GatedDeltaDims) -> usize {
    // At least 1 (GatedDelta::run); `max` tells the compiler, which would otherwise keep a panic path.
    (head / dims.group.max(1)) as usize
}

/// What a token's gates are: β, and the logarithm g of the decay.
#[derive(Clone, Copy)]
struct Gates {
    beta: f32,
    log_decay: f32,
}

/// The raw gates and their weights.
#[derive(Clone, Copy)]
struct RawGates<T> {
    b: *const T,
    a: *const T,
    a_log: *const f32,
    dt_bias: *const f32,
}

/// −e^a_log · softplus(x), for finite arguments a number or −∞: neither factor overflows where the other is 0.
#[inline(always)]
fn log_decay(a_log: f32, x: f32) -> f32 {
    // Not `min`, which would drop a NaN.
    let x = if x > f32::MAX { f32::MAX } else { x };
    // Beyond, e^a_log overflows, or softplus(x), which is e^x there, is below the smallest normal number. Where a_log
    // is large and x is not small, either way gives less than the least.
    if a_log > 88.0 || x < -87.0 { -exp(a_log + x) } else { -exp(a_log) * softplus(x) }
}

impl<T: Element> RawGates<T> {
    /// The gates of a token and a value head.
    ///
    /// # Safety
    /// - *in-bounds*: `token` below the rows of b and a, `head` below their columns — GatedDelta::run.
    #[inline(always)]
    unsafe fn load(self, token: u32, head: u32, dims: &GatedDeltaDims) -> Gates {
        let (token, head) = (token as usize, head as usize);
        // SAFETY: the caller's promise.
        unsafe {
            let b = global::load(self.b.add(token * dims.b_stride as usize + head)).to_f32();
            let a = global::load(self.a.add(token * dims.a_stride as usize + head)).to_f32();
            let (a_log, bias) = (global::load(self.a_log.add(head)), global::load(self.dt_bias.add(head)));
            let log_decay = log_decay(a_log, a + bias);
            // Not `max`, which would drop a NaN.
            let log_decay = if log_decay < LEAST_LOG_DECAY { LEAST_LOG_DECAY } else { log_decay };
            Gates { beta: sigmoid::<f32>(b), log_decay }
        }
    }
}

/// The first `len` (up to 8) elements of a row's part, and zeros.
///
/// # Safety
/// - `len` elements *in-bounds*; *aligned(16)* and whole pieces if `dims.access` says so — GatedDelta::run.
#[inline(always)]
unsafe fn load_8<T: Element>(from: *const T, len: u32, dims: &GatedDeltaDims) -> [f32; 8] {
    let mut values = [0.0; 8];
    // SAFETY: the caller's promise.
    unsafe {
        if dims.access & ROWS_IN_PIECES == 0 {
            let mut i = 0;
            while i < 8 {
                if (i as u32) < len {
                    values[i] = global::load(from.add(i)).to_f32();
                }
                i += 1;
            }
        } else {
            let mut first = 0;
            while first < 8 {
                if (first as u32) < len {
                    let mut piece = [0.0; 8];
                    T::unpack(global::load_nc_x4(from.add(first)), &mut piece);
                    let mut i = 0;
                    while i < T::PER_16_BYTES {
                        values[first + i] = piece[i];
                        i += 1;
                    }
                }
                first += T::PER_16_BYTES;
            }
        }
    }
    values
}

macro_rules! entry {
    ($entry:ident, $type:ident, Recurrent) => {
        /// Entry point; see `recurrent` and `abi::ops::gated_delta`.
        ///
        /// # Safety
        /// - Arguments as `GatedDelta::run` checks them.
        #[kernel(max_threads = 128, min_blocks = 4)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            q: *const $type,
            k: *const $type,
            v: *const $type,
            b: *const $type,
            a: *const $type,
            a_log: *const f32,
            dt_bias: *const f32,
            offsets: *const u32,
            slots: *const u32,
            state: *mut f32,
            out: *mut $type,
            dims: GatedDeltaDims,
        ) {
            let gates = RawGates { b, a, a_log, dt_bias };
            // SAFETY: the caller's promise.
            unsafe { recurrent::slice::<$type>(q, k, v, gates, offsets, slots, state, out, &dims) }
        }
    };
    ($entry:ident, $type:ident, Chunk) => {
        entry!($entry, $type, of_chunk chunk);
    };
    ($entry:ident, $type:ident, ChunkMma) => {
        entry!($entry, $type, of_chunk chunk_mma);
    };
    ($entry:ident, $type:ident, of_chunk $module:ident) => {
        /// Entry point; see `chunk` and `abi::ops::gated_delta`.
        ///
        /// # Safety
        /// - Arguments as `GatedDelta::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 2)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            q: *const $type,
            k: *const $type,
            b: *const $type,
            a: *const $type,
            a_log: *const f32,
            dt_bias: *const f32,
            offsets: *const u32,
            workspace: *mut f32,
            dims: GatedDeltaDims,
        ) {
            let gates = RawGates { b, a, a_log, dt_bias };
            // SAFETY: the caller's promise.
            unsafe { $module::chunk::<$type>(q, k, gates, offsets, workspace, &dims) }
        }
    };
    ($entry:ident, $type:ident, ScanMma) => {
        /// Entry point; see `scan_mma` and `abi::ops::gated_delta`.
        ///
        /// # Safety
        /// - Arguments as `GatedDelta::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 1)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            v: *const $type,
            offsets: *const u32,
            slots: *const u32,
            state: *mut f32,
            out: *mut $type,
            workspace: *const f32,
            dims: GatedDeltaDims,
        ) {
            // SAFETY: the caller's promise.
            unsafe { scan_mma::slice::<$type>(v, offsets, slots, state, out, workspace, &dims) }
        }
    };
    ($entry:ident, $type:ident, Scan) => {
        /// Entry point; see `scan` and `abi::ops::gated_delta`.
        ///
        /// # Safety
        /// - Arguments as `GatedDelta::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 1)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            q: *const $type,
            k: *const $type,
            v: *const $type,
            offsets: *const u32,
            slots: *const u32,
            state: *mut f32,
            out: *mut $type,
            workspace: *const f32,
            dims: GatedDeltaDims,
        ) {
            // SAFETY: the caller's promise.
            unsafe { scan::slice::<$type>(q, k, v, offsets, slots, state, out, workspace, &dims) }
        }
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $tile:ident;)*) => {
        $(entry!($entry, $type, $tile);)*
    };
}
abi::gated_delta_table!(entries);
#[cfg(not(lacks_mma_sync))]
abi::gated_delta_mma_table!(entries);
