//! From scores to weights, in registers: a thread has pairs of neighbouring keys, 8 apart, of two rows, 8 apart, as
//! tensor cores leave them.

use abi::ops::attention::{ADDED, AttentionDims, SEEN};
use cuda_std::cvt::Element;
use cuda_std::{global, math, thread, warp};

use super::scores::{Blocks, Masks, capped};
use super::{Visible, offset};
use crate::tile::activation::tanh_rest;
use crate::tile::softmax::{base, in_unit, log_sum_exp};

/// Up to this size of `m·c` scores are subtracted after they are multiplied.
const SMALL: f32 = 1024.0;
/// How far a row's largest score may be above what its weights are relative to, in the unit of the exponent.
const LATE: f32 = 8.0;

/// What a thread knows of its two rows: the largest score so far, and its part of the sum of weights.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) m: [f32; 2],
    pub(super) l: [f32; 2],
}

/// Scores under the soft cap, still to be multiplied by the scale. Where all scores of a warp are below the cap, as
/// they mostly are, a polynomial does without the units for exponentials and reciprocals, which the softmax keeps busy.
/// `ASKS`: unless the compiler would no longer unroll what is around it.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
pub(super) unsafe fn cap<const SCORES: usize, const ASKS: bool>(s: &mut [f32; SCORES], dims: &AttentionDims) {
    let (factor, cap) = (dims.scores.cap_in, dims.scores.cap_out);
    let mut largest = 0.0;
    let mut i = 0;
    while ASKS && i < SCORES {
        largest = math::max_or_nan(largest, math::abs(s[i]));
        i += 1;
    }
    // SAFETY: the whole warp takes part — the caller.
    let is_near = ASKS && unsafe { warp::all(warp::FULL_MASK, largest * math::abs(factor) < 1.0) };
    let mut i = 0;
    if is_near {
        // Opaque, or what the other way has in common would be computed ahead of the branch, in registers of its own.
        let factor = f32::from_bits(thread::opaque(factor.to_bits()));
        while i < SCORES {
            // As `tanh` has it, for a score's bits do not hang on those beside it.
            let part = s[i] * factor;
            let square = part * part;
            s[i] = cap * math::fma(part * square, tanh_rest(square), part);
            i += 1;
        }
    } else {
        while i < SCORES {
            s[i] = capped(s[i], dims);
            i += 1;
        }
    }
}

/// What a warp's 16 rows see of a step, 16 keys at a time. For each 16 keys a low bit says that some row may see some
/// of them, a high one that besides not all rows see all.
#[derive(Clone, Copy)]
pub(super) struct Groups(u32);

impl Groups {
    /// Nothing is known of them.
    pub(super) const UNKNOWN: Groups = Groups(!0);

    /// Of a step of at most 256 keys from `first` on, for the warp's first row.
    ///
    /// # Safety
    /// - *converged*: the whole warp.
    #[inline(always)]
    pub(super) unsafe fn new(dims: &AttentionDims, [len, ahead]: [i32; 2], query: u32, first: u32) -> Self {
        // Bounds do not fall from row to row.
        let query = query as i32;
        let rows = [Visible::new(dims, len, ahead, query), Visible::new(dims, len, ahead, query + 15)];
        // Those that end at a key or before it, and those that begin before it.
        let ended = |key: i32| (1u32 << ((key - first as i32) >> 4).clamp(0, 16)) - 1;
        let begun = |key: i32| ended(key + 15);
        let some = begun(rows[1].hi) & !ended(rows[0].lo);
        let all = ended(rows[0].hi) & !begun(rows[1].lo);
        let groups = some | (some & !all) << 16;
        // One lane's, so that ptxas knows that the warp stays together.
        // SAFETY: the whole warp takes part — the caller.
        Groups(unsafe { warp::shuffle_idx(warp::FULL_MASK, groups, 0) })
    }

    /// Without blocks of keys that the rows do not see. The step has 128 keys and begins at a multiple of as many, so
    /// with a block, at `first`; the rows, of which `query` is one, are of one block of the mask.
    ///
    /// # Safety
    /// - *converged*: the whole warp; the block mask of a head, *in-bounds* for `dims`.
    #[inline(always)]
    pub(super) unsafe fn of_blocks(
        self,
        blocks: Blocks,
        query: u32,
        first: u32,
        dims: &AttentionDims,
    ) -> Self {
        // SAFETY: a query and a key of the mask, the whole warp — the caller.
        let bits = unsafe {
            let bits = blocks.bits(query.min(dims.seq_q - 1), first, dims);
            warp::shuffle_idx(warp::FULL_MASK, bits, 0)
        };
        let mut seen = 0;
        let mut group = 0;
        while group < 8 {
            seen |= (bits >> ((16 * group) >> dims.scores.block_shift) & 1) << group;
            group += 1;
        }
        Groups(self.0 & (seen | seen << 16))
    }

    /// Whether some row may see some keys of a group.
    #[inline(always)]
    fn some(self, group: usize) -> bool {
        self.0 >> group & 1 != 0
    }

    /// Whether some rows see some keys of a group, and others not.
    #[inline(always)]
    fn mixed(self, group: usize) -> bool {
        self.0 >> (16 + group) & 1 != 0
    }
}

/// Scores of keys that a row does not see become −∞, in those groups where some are seen. The thread's first key is
/// `first`, its rows are `query` and 8 further.
#[inline(always)]
pub(super) fn mask<const SCORES: usize>(
    s: &mut [f32; SCORES],
    groups: Groups,
    dims: &AttentionDims,
    [len, ahead]: [i32; 2],
    query: u32,
    first: u32,
) {
    // Opaque, or what follows would be computed before the loop and kept in registers.
    let query = first.wrapping_add(thread::opaque(query.wrapping_sub(first))) as i32;
    let rows = [Visible::new(dims, len, ahead, query), Visible::new(dims, len, ahead, query + 8)];
    let lo = [rows[0].lo - first as i32, rows[1].lo - first as i32];
    let hi = [rows[0].hi - first as i32, rows[1].hi - first as i32];
    let mut group = 0;
    while group < SCORES / 8 {
        if groups.mixed(group) {
            let mut i = 8 * group;
            while i < 8 * group + 8 {
                let (key, row) = ((8 * (i / 4) + i % 2) as i32, i / 2 % 2);
                if key < lo[row] || key >= hi[row] {
                    s[i] = f32::NEG_INFINITY;
                }
                i += 1;
            }
        }
        group += 1;
    }
}

impl Masks {
    /// The bias of a thread's scores, as tensor cores leave them: of the keys `first`, which is even, and the next, and
    /// so on 8 further, for the query and the one 8 further. A pair of keys to a word, in the bias's own type; 0 beyond
    /// the last key. `end` is one past the last key of all threads.
    ///
    /// # Safety
    /// - There is a bias, *in-bounds* for `dims`, of which sequence and head are some — checked in `Attention::run`.
    #[inline(always)]
    pub(super) unsafe fn pairs<const PAIRS: usize>(
        self,
        [batch, head, query]: [u32; 3],
        first: u32,
        end: u32,
        dims: &AttentionDims,
    ) -> [u32; PAIRS] {
        let scores = &dims.scores;
        // Results of queries that there are not are not used.
        let row = |query: u32| {
            let (batch_stride, head_stride) = (scores.bias_batch_stride, scores.bias_head_stride);
            let query = query.min(dims.seq_q - 1);
            offset(batch, batch_stride, query, scores.bias_query_stride, head, head_stride) + first as usize
        };
        let rows = [row(query), row(query + 8)];
        let is_whole = end <= dims.seq_kv;
        // SAFETY: the caller's promise: rows of queries that there are.
        unsafe {
            if scores.bias == ADDED {
                let bias = self.bias.cast::<u16>();
                let rows = [bias.wrapping_add(rows[0]), bias.wrapping_add(rows[1])];
                if is_whole && (rows[0] as usize | rows[1] as usize).is_multiple_of(4) {
                    even_pairs(rows, |at| global::load(at.cast::<u32>()))
                } else {
                    odd_pairs(rows, first, dims.seq_kv, |at, half| u32::from(global::load(at)) << (16 * half))
                }
            } else {
                let rows = [self.bias.wrapping_add(rows[0]), self.bias.wrapping_add(rows[1])];
                if is_whole && (rows[0] as usize | rows[1] as usize).is_multiple_of(2) {
                    even_pairs(rows, |at| u32::from(global::load(at.cast::<u16>())))
                } else {
                    odd_pairs(rows, first, dims.seq_kv, |at, half| u32::from(global::load(at)) << (8 * half))
                }
            }
        }
    }
}

/// Pairs of a thread's two rows, 8 keys apart, each by a load of its own.
#[inline(always)]
fn even_pairs<T, const PAIRS: usize>(rows: [*const T; 2], load: impl Fn(*const T) -> u32) -> [u32; PAIRS] {
    let mut pairs = [0; PAIRS];
    let mut i = 0;
    while i < PAIRS {
        pairs[i] = load(rows[i % 2].wrapping_add(i / 2 * 8));
        i += 1;
    }
    pairs
}

/// The same by two loads, each of a key that there is.
#[inline(always)]
fn odd_pairs<T, const PAIRS: usize>(
    rows: [*const T; 2],
    first: u32,
    keys: u32,
    load: impl Fn(*const T, usize) -> u32,
) -> [u32; PAIRS] {
    let mut pairs = [0; PAIRS];
    let mut i = 0;
    while i < 2 * PAIRS {
        let key = i / 4 * 8 + i % 2;
        if first + (key as u32) < keys {
            pairs[i / 2] |= load(rows[i / 2 % 2].wrapping_add(key), i % 2);
        }
        i += 1;
    }
    pairs
}

/// Multiplies scores by the scale, and adds what [`Masks::pairs`] has loaded.
#[inline(always)]
pub(super) fn add_pairs<T: Element, const SCORES: usize, const PAIRS: usize>(
    s: &mut [f32; SCORES],
    pairs: &[u32; PAIRS],
    dims: &AttentionDims,
) {
    // One branch for all of them. A hidden key's score may be anything.
    if dims.scores.bias == SEEN {
        let mut i = 0;
        while i < SCORES {
            let is_seen = pairs[i / 2] >> (8 * (i % 2)) & 0xff != 0;
            s[i] = if is_seen { s[i] * dims.scale } else { f32::NEG_INFINITY };
            i += 1;
        }
    } else {
        let mut i = 0;
        while i < SCORES {
            let mut terms = [0.0; 8];
            T::unpack([pairs[i / 2], 0, 0, 0], &mut terms);
            let term = terms[i % 2];
            let sum = math::fma(s[i], dims.scale, in_unit::<T>(term));
            s[i] = if term == f32::NEG_INFINITY { f32::NEG_INFINITY } else { sum };
            i += 1;
        }
    }
}

/// What the exponents of weights are: `s · factor − shift` of each of the two rows.
#[derive(Clone, Copy)]
pub(super) struct Exponents {
    factor: f32,
    shift: [f32; 2],
}

/// The first half of a softmax: finds what the weights of some scores are relative to, and returns what older sums are
/// to be multiplied by, if they are at all. Scores in groups of which no row sees a key are not looked at.
///
/// A weight is `2^(s·c − M)` with M = m·c rounded, one multiply-add: M is no more than a number near the largest `s·c`
/// that all of a row's weights are relative to, so its rounding does no harm as long as it is a small part of 1. Scores
/// beyond that (of 1e30, say) are subtracted first, so that equal ones cancel; they are then final.
///
/// m is a row's largest score, or one that the largest is no more than [`LATE`] above, in the unit of the exponent:
/// weights up to 2^8 do no harm, and older sums mostly stay as they are (as in FlashAttention-4). Whether they all do a
/// warp knows before it knows any row's largest score: lanes ask it of their own ones, without the four shuffles.
/// `ASKS`: unless the kernel has no registers for another branch.
///
/// # Safety
/// - *converged*: the whole warp.
#[inline(always)]
pub(super) unsafe fn raise<const SCORES: usize, const ASKS: bool>(
    s: &mut [f32; SCORES],
    groups: Groups,
    rows: &mut Rows,
    scale: f32,
) -> (Exponents, Option<[f32; 2]>) {
    let mut largest = rows.m;
    let mut group = 0;
    while group < SCORES / 8 {
        if groups.some(group) {
            let mut i = 8 * group;
            while i < 8 * group + 8 {
                largest[0] = math::max(largest[0], math::max(s[i], s[i + 1]));
                largest[1] = math::max(largest[1], math::max(s[i + 2], s[i + 3]));
                i += 4;
            }
        }
        group += 1;
    }
    let mut exponents = Exponents { factor: scale, shift: [rows.m[0] * scale, rows.m[1] * scale] };
    let growth = math::max(largest[0] - rows.m[0], largest[1] - rows.m[1]);
    // Also where a row has not seen a key, whose m is −∞.
    let is_due = growth * scale > LATE || is_large(exponents.shift);
    // SAFETY: the whole warp takes part — the caller.
    if ASKS && !unsafe { warp::any(warp::FULL_MASK, is_due) } {
        return (exponents, None);
    }
    let mut decay = [0f32; 2];
    let old = rows.m;
    let mut half = 0;
    while half < 2 {
        // SAFETY: the whole warp takes part — the caller.
        let mut m = unsafe { warp::max_f32::<4>(largest[half]) };
        // False of −∞.
        if (m - old[half]) * scale <= LATE {
            m = old[half];
        }
        rows.m[half] = m;
        exponents.shift[half] = base(rows.m[half]) * scale;
        // Relative to what the weights so far are: to the rounded product, which is the same as long as the row's
        // largest is.
        decay[half] = old[half] * scale - exponents.shift[half];
        half += 1;
    }
    // SAFETY: the whole warp takes part — the caller.
    if unsafe { warp::any(warp::FULL_MASK, is_large(exponents.shift)) } {
        let bases = [base(rows.m[0]), base(rows.m[1])];
        let mut i = 0;
        while i < SCORES {
            s[i] = (s[i] - bases[i / 2 % 2]) * scale;
            i += 1;
        }
        decay = [(old[0] - bases[0]) * scale, (old[1] - bases[1]) * scale];
        exponents = Exponents { factor: 1.0, shift: [0.0; 2] };
    }
    decay = [math::ex2(decay[0]), math::ex2(decay[1])];
    (exponents, Some(decay))
}

/// The second half: turns scores into weights, and adds them to the rows' sums, which are older: `decay`, as [`raise`]
/// has returned it. In groups of which no row sees a key weights are 0.
#[inline(always)]
pub(super) fn weights<const SCORES: usize>(
    s: &mut [f32; SCORES],
    groups: Groups,
    rows: &mut Rows,
    Exponents { factor, shift }: Exponents,
    decay: Option<[f32; 2]>,
) {
    let mut group = 0;
    while group < SCORES / 8 {
        let end = 8 * group + 8;
        let mut i = 8 * group;
        if groups.some(group) {
            while i < end {
                s[i] = math::ex2(math::fma(s[i], factor, -shift[i / 2 % 2]));
                i += 1;
            }
        } else {
            // Opaque, or ahead of the branch there would be zeros for all, in registers of their own.
            let zero = f32::from_bits(thread::opaque(0));
            while i < end {
                s[i] = zero;
                i += 1;
            }
        }
        group += 1;
    }
    let mut sums = [0f32; 4];
    let mut i = 0;
    while i < SCORES {
        sums[i % 4] += s[i];
        i += 1;
    }
    let decay = decay.unwrap_or([1.0; 2]);
    rows.l[0] = math::fma(rows.l[0], decay[0], sums[0] + sums[1]);
    rows.l[1] = math::fma(rows.l[1], decay[1], sums[2] + sums[3]);
}

/// Whether products with the scale are too large for their rounding.
#[inline(always)]
fn is_large(shift: [f32; 2]) -> bool {
    math::max(math::abs(shift[0]), math::abs(shift[1])) > SMALL
}

/// Weights as the operand of the next product.
#[inline(always)]
pub(super) fn round<T: Element, const SCORES: usize, const WEIGHTS: usize>(
    s: &[f32; SCORES],
    p: &mut [u32; WEIGHTS],
) {
    let mut i = 0;
    while i < SCORES / 8 {
        let j = 8 * i;
        let eight = [s[j], s[j + 1], s[j + 2], s[j + 3], s[j + 4], s[j + 5], s[j + 6], s[j + 7]];
        let words = T::pack(&eight);
        p[4 * i] = words[0];
        p[4 * i + 1] = words[1];
        p[4 * i + 2] = words[2];
        p[4 * i + 3] = words[3];
        i += 1;
    }
}

/// Multiplies the thread's two rows.
#[inline(always)]
pub(super) fn scale_rows<const SUMS: usize>(o: &mut [f32; SUMS], factors: [f32; 2]) {
    let mut i = 0;
    while i < SUMS {
        o[i] *= factors[i / 2 % 2];
        i += 1;
    }
}

/// Stores a row's log-sum-exp; where blocks share keys, what it is made of, in two words: the largest score and the sum
/// of the weights.
///
/// # Safety
/// - *in-bounds(lse)*: the row's place, of one word or two.
#[inline(always)]
pub(super) unsafe fn store_lse<T: Element, const SPLIT: bool>(lse: *mut f32, at: usize, m: f32, sum: f32) {
    // SAFETY: the caller's promise.
    unsafe {
        if SPLIT {
            let numbers = u64::from(m.to_bits()) | u64::from(sum.to_bits()) << 32;
            global::store(lse.add(2 * at).cast::<u64>(), numbers);
        } else {
            global::store(lse.add(at), log_sum_exp::<T>(m, sum));
        }
    }
}
