//! First half of the chunked form: for every chunk of 64 tokens what does not depend on the state.
//!
//! With rows q, k of the chunk's tokens, γ_t = Σ_{s≤t} g_s and D_ts = e^(γ_t − γ_s) for s ≤ t, else 0:
//!
//! ```text
//! A = strictly lower part of diag(β) · K Kᵀ ⊙ D
//! X = (I + A)⁻¹ · diag(β)
//! P = Q Kᵀ ⊙ D
//! ```
//!
//! Work split: a block of 256 threads has one place (see `tile::sequences`) and value head. It leaves in the workspace
//!
//! ```text
//! | X 64 × 64 | P 64 × 64 | 1/|k_t| | scale/|q_t| | e^γ_t | e^(γ_63 − γ_t) |
//! ```
//!
//! with tokens past the sequence's end as q = k = 0, β = 0, g = 0.
//!
//! 1. The products take 32 elements of the heads at a time through shared memory; the thread (ty, tx) of 16 × 16 makes
//!    the 4 × 4 at (4 ty, 4 tx). The norms come out of the same walk: |k_t|² and |q_t|² divide the products at the end.
//! 2. γ is kept as a sum of two f32, since a token that forgets everything (g = −256) would leave the differences of
//!    those after it few bits. D is e to the difference, never a quotient of two powers.
//! 3. The inverse by blocks of 16 rows: what the rows above contribute is a product that all threads share; within a
//!    block, a thread solves its column in registers.

use abi::ops::gated_delta::{CHUNK, GatedDeltaDims, PLACE_ELEMENTS};
use cuda_std::cvt::Element;
use cuda_std::{global, math, shared, thread, warp};

use super::{EPS, RawGates, key_head, load_8};
use crate::tile::activation::exp;
use crate::tile::sequences::piece_at;

/// Elements of a head that are in shared memory at a time.
const SLICE_K: u32 = 32;
/// Rows of a block of the inverse.
const BLOCK: usize = 16;

/// Shared memory in bytes: five columns, then A, then the slices of k and q in the place of X.
const SUMS: u32 = 0;
const REMAINDERS: u32 = 4 * CHUNK;
pub(super) const BETAS: u32 = 8 * CHUNK;
pub(super) const KEY_SCALES: u32 = 12 * CHUNK;
pub(super) const QUERY_SCALES: u32 = 16 * CHUNK;
pub(super) const MATRIX_A: u32 = 20 * CHUNK;
pub(super) const MATRIX_X: u32 = MATRIX_A + 4 * CHUNK * CHUNK;
const KEYS: u32 = MATRIX_X;
const QUERIES: u32 = MATRIX_X + 4 * CHUNK * SLICE_K;

/// a + b as its rounding and the error of that (Knuth's two-sum).
#[inline(always)]
fn two_sum(a: f32, b: f32) -> (f32, f32) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

/// A γ: the sum, and what rounding took from it.
#[derive(Clone, Copy)]
pub(super) struct Gamma {
    sum: f32,
    remainder: f32,
}

impl Gamma {
    pub(super) const ZERO: Gamma = Gamma { sum: 0.0, remainder: 0.0 };

    /// # Safety
    /// - *initialised*: both columns, and a barrier since; `t` < 64.
    #[inline(always)]
    pub(super) unsafe fn load(base: u32, t: u32) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            Gamma {
                sum: shared::load_f32(base + SUMS + 4 * t),
                remainder: shared::load_f32(base + REMAINDERS + 4 * t),
            }
        }
    }

    /// The sum of two.
    #[inline(always)]
    fn plus(self, other: Gamma) -> Gamma {
        let (sum, error) = two_sum(self.sum, other.sum);
        Gamma { sum, remainder: (self.remainder + other.remainder) + error }
    }

    /// e^(self − earlier).
    #[inline(always)]
    pub(super) fn decay_since(self, earlier: Gamma) -> f32 {
        let (sum, error) = two_sum(self.sum, -earlier.sum);
        let (sum, error) = two_sum(sum, error + (self.remainder - earlier.remainder));
        let power = exp(sum);
        math::fma(power, error, power)
    }
}

/// The gates of a chunk's tokens to shared memory: β, and γ as their sums.
///
/// # Safety
/// - All threads of the block (*converged*), at least 64; `len` tokens from `start` on *in-bounds* for `dims`.
/// - *exclusive*: the columns; a barrier follows before they are read.
#[inline(always)]
pub(super) unsafe fn gather_gates<T: Element>(
    base: u32,
    gates: RawGates<T>,
    [start, len]: [u32; 2],
    head: u32,
    dims: &GatedDeltaDims,
) {
    let (tid, lane) = (thread::thread_idx_x(), thread::lane());
    if tid >= 32 {
        return;
    }
    // SAFETY: tokens below `len`; a lane has the places 2 · lane and the next; the whole warp is here.
    unsafe {
        let mut sums = [Gamma::ZERO; 2];
        let mut i = 0;
        while i < 2 {
            let t = 2 * lane + i as u32;
            let (mut beta, mut log_decay) = (0.0, 0.0);
            if t < len {
                let gate = gates.load(start + t, head, dims);
                (beta, log_decay) = (gate.beta, gate.log_decay);
            }
            shared::store_f32(base + BETAS + 4 * t, beta);
            sums[i] = Gamma { sum: log_decay, remainder: 0.0 };
            i += 1;
        }
        sums[1] = sums[0].plus(sums[1]);
        // Those of the lanes before.
        let mut before = sums[1];
        let mut delta = 1;
        while delta < 32 {
            let other = Gamma {
                sum: warp::shuffle_up_f32(warp::FULL_MASK, before.sum, delta),
                remainder: warp::shuffle_up_f32(warp::FULL_MASK, before.remainder, delta),
            };
            if lane >= delta {
                before = other.plus(before);
            }
            delta *= 2;
        }
        let mut before = Gamma {
            sum: warp::shuffle_up_f32(warp::FULL_MASK, before.sum, 1),
            remainder: warp::shuffle_up_f32(warp::FULL_MASK, before.remainder, 1),
        };
        if lane == 0 {
            before = Gamma::ZERO;
        }
        let mut i = 0;
        while i < 2 {
            let (t, gamma) = (2 * lane + i as u32, before.plus(sums[i]));
            shared::store_f32(base + SUMS + 4 * t, gamma.sum);
            shared::store_f32(base + REMAINDERS + 4 * t, gamma.remainder);
            i += 1;
        }
    }
}

/// X = (I + A)⁻¹ · diag(β) of the A in shared memory, zeros above its diagonal, and the four columns, to the workspace.
///
/// # Safety
/// - All 256 threads of the block (*converged*); *initialised*: A and the columns, and a barrier since; *in-bounds*:
///   `to`, of a place.
#[inline(always)]
unsafe fn leave(base: u32, to: *mut f32) {
    let tid = thread::thread_idx_x();
    // SAFETY: the caller's promise.
    unsafe {
        invert(base);
        let mut piece = tid;
        while piece < CHUNK * CHUNK / 4 {
            let (row, col) = (piece / (CHUNK / 4), piece % (CHUNK / 4) * 4);
            let (inverse, betas) = (load_quad(base + MATRIX_X, piece), load_quad(base + BETAS, col / 4));
            let mut x = [0.0; 4];
            let mut j = 0;
            while j < 4 {
                if col + j as u32 <= row {
                    x[j] = inverse[j] * betas[j];
                }
                j += 1;
            }
            global::store_x4(to.add(piece as usize * 4), x.map(f32::to_bits));
            piece += 256;
        }
        let t = tid % CHUNK;
        let column = tid / CHUNK;
        let value = if column == 0 {
            shared::load_f32(base + KEY_SCALES + 4 * t)
        } else if column == 1 {
            shared::load_f32(base + QUERY_SCALES + 4 * t)
        } else if column == 2 {
            Gamma::load(base, t).decay_since(Gamma::ZERO)
        } else {
            Gamma::load(base, CHUNK - 1).decay_since(Gamma::load(base, t))
        };
        global::store(to.add((2 * CHUNK * CHUNK + tid) as usize), value);
    }
}

/// Four neighbours of a column in shared memory.
///
/// # Safety
/// - As `shared::load_f32x4`.
#[inline(always)]
pub(super) unsafe fn load_quad(column: u32, index: u32) -> [f32; 4] {
    // SAFETY: the caller's promise.
    unsafe { shared::load_f32x4(column + 16 * index) }
}

/// One place and value head.
///
/// # Safety
/// - All threads of the block (*converged*); tensors *in-bounds* for `dims` and aligned as it says, the workspace of
///   `dims.num_places` places — checked in `GatedDelta::run`.
/// - *exclusive*: `GatedDeltaTile::smem_bytes` of dynamic shared memory.
#[inline(always)]
pub unsafe fn chunk<T: Element>(
    q: *const T,
    k: *const T,
    gates: RawGates<T>,
    offsets: *const u32,
    workspace: *mut f32,
    dims: &GatedDeltaDims,
) {
    // At least 1, or there were no blocks; `max` tells the compiler, which would otherwise keep a panic path.
    let heads = dims.heads_v.max(1);
    let (block, tid, base) = (thread::block_idx_x(), thread::thread_idx_x(), shared::base());
    let (place, head) = (dims.first_place + block / heads, block % heads);
    // SAFETY: the caller's promise for the offsets. Shared memory: each phase writes its own part, and a barrier comes
    // before anyone reads it or puts something else there. Tokens are those of the chunk, t < len.
    unsafe {
        let Some((sequence, first)) = piece_at(offsets, dims.sequences, dims.tokens, place, CHUNK) else {
            return;
        };
        let (start, len) = (sequence.start + first, (sequence.len - first).min(CHUNK));
        let to = workspace.add(block as usize * PLACE_ELEMENTS as usize);

        gather_gates(base, gates, [start, len], head, dims);

        // K Kᵀ and Q Kᵀ.
        let (row, quarter) = (tid / 4, tid % 4);
        let (ty, tx) = (tid / 16, tid % 16);
        let key_head = key_head(head, dims);
        let at = |token_stride: u32, head_stride: u32| {
            (start + row) as usize * token_stride as usize
                + key_head * head_stride as usize
                + quarter as usize * 8
        };
        let k = k.wrapping_add(at(dims.k_token_stride, dims.k_head_stride));
        let q = q.wrapping_add(at(dims.q_token_stride, dims.q_head_stride));
        let row_len = if row < len { dims.dim_k } else { 0 };
        let (mut keys_keys, mut queries_keys) = ([[0.0f32; 4]; 4], [[0.0f32; 4]; 4]);
        let (mut key_square, mut query_square) = (0.0, 0.0);
        let mut slice = thread::opaque(0);
        while slice < dims.dim_k {
            let here = row_len.saturating_sub(slice + quarter * 8).min(8);
            let keys = load_8(k.wrapping_add(slice as usize), here, dims);
            let queries = load_8(q.wrapping_add(slice as usize), here, dims);
            thread::sync_threads();
            let mut i = 0;
            while i < 8 {
                let at = 4 * ((quarter * 8 + i as u32) * CHUNK + row);
                shared::store_f32(base + KEYS + at, keys[i]);
                shared::store_f32(base + QUERIES + at, queries[i]);
                key_square = math::fma(keys[i], keys[i], key_square);
                query_square = math::fma(queries[i], queries[i], query_square);
                i += 1;
            }
            thread::sync_threads();
            let mut d = 0;
            while d < SLICE_K {
                let (keys, queries) = (base + KEYS + 4 * d * CHUNK, base + QUERIES + 4 * d * CHUNK);
                let (own_keys, own_queries) = (load_quad(keys, ty), load_quad(queries, ty));
                let others = load_quad(keys, tx);
                let mut i = 0;
                while i < 4 {
                    let mut j = 0;
                    while j < 4 {
                        keys_keys[i][j] = math::fma(own_keys[i], others[j], keys_keys[i][j]);
                        queries_keys[i][j] = math::fma(own_queries[i], others[j], queries_keys[i][j]);
                        j += 1;
                    }
                    i += 1;
                }
                d += 1;
            }
            slice += SLICE_K;
        }
        let key_scale = math::rsqrt(warp::sum_f32::<4>(key_square) + EPS);
        let query_scale = math::rsqrt(warp::sum_f32::<4>(query_square) + EPS) * dims.scale;
        if quarter == 0 {
            shared::store_f32(base + KEY_SCALES + 4 * row, key_scale);
            shared::store_f32(base + QUERY_SCALES + 4 * row, query_scale);
        }
        thread::sync_threads();

        // A and P.
        let scales = load_quad(base + KEY_SCALES, tx);
        let mut i = 0;
        while i < 4 {
            let t = ty * 4 + i as u32;
            let gamma = Gamma::load(base, t);
            let beta = shared::load_f32(base + BETAS + 4 * t);
            let key_scale = shared::load_f32(base + KEY_SCALES + 4 * t);
            let query_scale = shared::load_f32(base + QUERY_SCALES + 4 * t);
            let (mut a, mut p) = ([0.0; 4], [0.0; 4]);
            let mut j = 0;
            while j < 4 {
                let s = tx * 4 + j as u32;
                if s <= t {
                    let decay = gamma.decay_since(Gamma::load(base, s));
                    p[j] = queries_keys[i][j] * query_scale * scales[j] * decay;
                    if s < t {
                        a[j] = beta * (keys_keys[i][j] * key_scale * scales[j] * decay);
                    }
                }
                j += 1;
            }
            let at = t * CHUNK + tx * 4;
            shared::store_f32x4(base + MATRIX_A + 4 * at, a);
            global::store_x4(to.add((CHUNK * CHUNK + at) as usize), p.map(f32::to_bits));
            i += 1;
        }
        thread::sync_threads();
        leave(base, to);
    }
}

/// (I + A)⁻¹ of the A in shared memory.
///
/// # Safety
/// - *converged*: all 256 threads of the block; *initialised*: A, and a barrier since; nobody reads what was in the
///   place of X. A barrier follows before it returns.
#[inline(always)]
pub(super) unsafe fn invert(base: u32) {
    let (col, group) = (thread::thread_idx_x() % CHUNK, thread::thread_idx_x() / CHUNK);
    let a = |row: u32, col: u32| base + MATRIX_A + 4 * (row * CHUNK + col);
    let x = |row: u32, col: u32| base + MATRIX_X + 4 * (row * CHUNK + col);
    let mut first = thread::opaque(0);
    while first < CHUNK {
        // SAFETY: in this phase a thread writes its own four elements of the block's rows, and reads rows above, which
        // are done since the barrier at the end of the previous round.
        unsafe {
            let mut sums = [0.0f32; 4];
            let mut s = 0;
            while s < first {
                let mut above = [0.0; 4];
                let mut j = 0;
                while j < 4 {
                    above[j] = shared::load_f32(x(s + j as u32, col));
                    j += 1;
                }
                let mut i = 0;
                while i < 4 {
                    let factors = shared::load_f32x4(a(first + group * 4 + i as u32, s));
                    let mut j = 0;
                    while j < 4 {
                        sums[i] = math::fma(-factors[j], above[j], sums[i]);
                        j += 1;
                    }
                    i += 1;
                }
                s += 4;
            }
            let mut i = 0;
            while i < 4 {
                shared::store_f32(x(first + group * 4 + i as u32, col), sums[i]);
                i += 1;
            }
            thread::sync_threads();
        }
        if group == 0 {
            // SAFETY: the block's rows were written before the barrier; from here on the column is this thread's alone.
            unsafe {
                let mut solved = [0.0f32; BLOCK];
                let mut i = 0;
                while i < BLOCK {
                    let row = first + i as u32;
                    let mut value = shared::load_f32(x(row, col));
                    if row == col {
                        value += 1.0;
                    }
                    let mut s = 0;
                    while s < i {
                        let factors = shared::load_f32x4(a(row, first + s as u32));
                        let mut j = 0;
                        while j < 4 && s + j < i {
                            value = math::fma(-factors[j], solved[s + j], value);
                            j += 1;
                        }
                        s += 4;
                    }
                    solved[i] = value;
                    shared::store_f32(x(row, col), value);
                    i += 1;
                }
            }
        }
        // SAFETY: all threads of the block.
        unsafe { thread::sync_threads() };
        first += BLOCK as u32;
    }
}
