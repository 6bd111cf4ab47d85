//! RMSNorm per head and rotary embedding of q and k, and the append of k and v to a cache: what stands between the
//! joint projection and attention, in one pass.
//!
//! ```text
//! q head → norm(q_weight) → rotate → q_out[token]
//! k head → norm(k_weight) → rotate → k_cache[slots[token]]
//! v head → v_cache[slots[token]]
//! ```
//!
//! A cache holds the heads' type, or fp8: values times 1/scale of their head, saturating.
//!
//! Work split: a head belongs to 8 to 32 neighbouring lanes, a piece of 16 bytes each, so the pieces are where
//! RMSNorm's kernels have them and their sums of squares have the same bits. The other element of a half-split pair is
//! in another lane, at the same place of its piece: four shuffles fetch that piece. What is normalised is rounded to
//! the stored type before it is rotated, as it is between the operators `rmsnorm` and `rope`.
//!
//! ```text
//! head, 128 bf16 | 0 | 1 | … | 7 | 8 | 9 | … | 15 |     lane: its piece; lanes 0 and 8, 1 and 9, … exchange theirs
//! ```
//!
//! A group of lanes takes up to eight heads of a token, all of q, of k or of v: it finds their places and reads weight,
//! cos and sin once for them, and four loads are on their way all the time: when a head is done, the one four further
//! on comes into its registers. Few tokens are bound by the launch and by latency: then a group takes one head.
//!
//! The lanes of a warp have the same group of neighbouring tokens, so that what a group does not need, such as the norm
//! of v or heads that there are not, takes the warp no instructions, and shuffles are converged. They differ in what
//! there is: tokens and slots. Where there are many tokens, the warps of a block have the same group of more of them,
//! or those of few heads would wait for the others' end.
//!
//! q and q_out may be the same memory: a head is read before it is written, by the same lanes.
//!
//! The first loads of everything are on their way before a slot is waited for: a slot that is the same for the warp, as
//! with 32 lanes to a head, is in one of its registers, for which a warp waits as soon as the load is under way. With
//! 64 registers four blocks are on a multiprocessor. What was measured and tried: `gpu/NOTES/qk_norm_rope.md`.

use abi::ops::qk_norm_rope::QkNormRopeDims;
use abi::range;
use cuda_std::cvt::{E4m3, Element, bf16, e4m3x2_from_f32, f16};
use cuda_std::{global, grid, kernel, math, thread, warp};

use crate::tile::reduce::block_sum_f32;

/// Heads whose loads are on their way at a time.
const HEADS: usize = 4;

/// What a cache holds of heads of `T`.
trait Cached<T>: Copy {
    /// Whether there are scales.
    const IS_SCALED: bool;

    /// Stores 16 bytes of heads.
    ///
    /// # Safety
    /// - *in-bounds* and *aligned* to as many elements; *exclusive*.
    unsafe fn store_piece(to: *mut Self, piece: [u32; 4], inverse_scale: f32);

    /// What is stored of an element.
    fn from_head(value: T, inverse_scale: f32) -> Self;
}

macro_rules! cached_as_it_is {
    ($($type:ident),*) => {$(
        impl Cached<$type> for $type {
            const IS_SCALED: bool = false;

            #[inline(always)]
            unsafe fn store_piece(to: *mut Self, piece: [u32; 4], _: f32) {
                // SAFETY: the caller's promise.
                unsafe { global::store_x4(to, piece) }
            }

            #[inline(always)]
            fn from_head(value: $type, _: f32) -> Self {
                value
            }
        }
    )*};
}
cached_as_it_is!(f32, f16, bf16);

impl<T: Element> Cached<T> for E4m3 {
    const IS_SCALED: bool = true;

    #[inline(always)]
    unsafe fn store_piece(to: *mut Self, piece: [u32; 4], inverse_scale: f32) {
        let mut values = [0.0; 8];
        T::unpack(piece, &mut values);
        let four = |i: usize| {
            let pair = |i: usize| {
                u32::from(e4m3x2_from_f32(values[i] * inverse_scale, values[i + 1] * inverse_scale))
            };
            pair(i) | pair(i + 2) << 16
        };
        // SAFETY: the caller's promise.
        unsafe {
            if T::PER_16_BYTES == 8 {
                global::store(to.cast::<u64>(), u64::from(four(0)) | u64::from(four(4)) << 32);
            } else {
                global::store(to.cast::<u32>(), four(0));
            }
        }
    }

    #[inline(always)]
    fn from_head(value: T, inverse_scale: f32) -> Self {
        E4m3::from_f32(value.to_f32() * inverse_scale)
    }
}

/// The tensors of a launch. `q_weight` and `k_weight` are null if there is no norm, the scales if the caches have none.
struct Tensors<T, C> {
    q: *const T,
    k: *const T,
    v: *const T,
    q_weight: *const T,
    k_weight: *const T,
    positions: *const u32,
    cos: *const f32,
    sin: *const f32,
    slots: *const u32,
    q_out: *mut T,
    k_cache: *mut C,
    v_cache: *mut C,
    k_scale: *const f32,
    v_scale: *const f32,
}

/// Groups of a token.
#[inline(always)]
fn num_groups(dims: &QkNormRopeDims) -> u32 {
    // At least 1 (QkNormRope::run); `max` tells the compiler, which would otherwise keep a panic path.
    (dims.q_groups + 2 * dims.kv_groups).max(1)
}

/// Heads of a token, all of q, of k or of v.
struct Group<T, C> {
    /// The first head; the others are `step` apart.
    head: u32,
    step: u32,
    end: u32,
    /// Whether there is such a token.
    is_inside: bool,
    /// The token's heads, before and after.
    from: *const T,
    from_stride: u32,
    to: *mut C,
    to_stride: u32,
    /// Where the token's slot is; none for q.
    slot: *const u32,
    /// None for q, and if the caches have none.
    scale: *const f32,
    /// None for v, and without a norm.
    weight: *const T,
    /// The token's row of the tables.
    table: usize,
    /// Then what is at `to` are elements of `T`.
    is_q: bool,
    is_v: bool,
}

impl<T: Element, C: Cached<T>> Group<T, C> {
    /// # Safety
    /// - `positions` and `slots` are *in-bounds* for every token — checked in `QkNormRope::run`.
    #[inline(always)]
    unsafe fn new(token: u32, group: u32, tensors: &Tensors<T, C>, dims: &QkNormRopeDims) -> Self {
        let is_q = group < dims.q_groups;
        let is_v = group >= dims.q_groups + dims.kv_groups;
        let is_inside = token < dims.tokens;
        let mut position = 0;
        if is_inside && !is_v {
            let at = tensors.positions.wrapping_add(token as usize * dims.position_stride as usize);
            // SAFETY: token < tokens — QkNormRope::run.
            position = unsafe { global::load(at) };
        }
        // A position beyond the tables takes the last row: a kernel has no way to refuse, and must not read outside.
        let position = position.min(dims.max_position - 1);
        // Inside their tensors wherever `is_inside`: elsewhere nothing is accessed.
        let (from, from_strides, weight, to, to_stride, scale) = if is_q {
            let out = tensors.q_out.wrapping_add(token as usize * dims.q_out_token_stride as usize);
            let strides = [dims.q_token_stride, dims.q_head_stride];
            (tensors.q, strides, tensors.q_weight, out.cast(), dims.q_out_head_stride, core::ptr::null())
        } else if is_v {
            let strides = [dims.v_token_stride, dims.v_head_stride];
            (tensors.v, strides, core::ptr::null(), tensors.v_cache, dims.cache_head_stride, tensors.v_scale)
        } else {
            let strides = [dims.k_token_stride, dims.k_head_stride];
            (tensors.k, strides, tensors.k_weight, tensors.k_cache, dims.cache_head_stride, tensors.k_scale)
        };
        let before = if is_q { 0 } else { dims.q_groups + if is_v { dims.kv_groups } else { 0 } };
        let end = if is_q { dims.heads_q } else { dims.heads_kv };
        Group {
            head: group - before,
            step: if is_q { dims.q_groups } else { dims.kv_groups },
            end,
            is_inside,
            from: from.wrapping_add(token as usize * from_strides[0] as usize),
            from_stride: from_strides[1],
            to,
            to_stride,
            slot: if is_q { core::ptr::null() } else { tensors.slots.wrapping_add(token as usize) },
            scale,
            weight,
            table: position as usize * (dims.rotary_dim / 2) as usize,
            is_q,
            is_v,
        }
    }

    /// The token's slot; 0 for q.
    ///
    /// # Safety
    /// - `slots` is *in-bounds* for every token — checked in `QkNormRope::run`.
    #[inline(always)]
    unsafe fn load_slot(&self) -> u32 {
        // SAFETY: token < tokens.
        if self.is_inside && !self.is_q { unsafe { global::load(self.slot) } } else { 0 }
    }

    /// Moves `to` to the token's slot; whether there is one. A warp waits here for its slot: loads come before.
    #[inline(always)]
    fn find_place(&mut self, slot: u32, dims: &QkNormRopeDims) -> bool {
        self.to = self.to.wrapping_add(slot as usize * dims.slot_stride as usize);
        self.is_inside && (self.is_q || slot < dims.num_slots)
    }

    #[inline(always)]
    fn from(&self, head: u32) -> *const T {
        self.from.wrapping_add(head as usize * self.from_stride as usize)
    }

    /// What a head's values are multiplied by in a cache with scales.
    ///
    /// # Safety
    /// - head < heads.
    #[inline(always)]
    unsafe fn inverse_scale(&self, head: u32) -> f32 {
        if !C::IS_SCALED || self.is_q {
            return 1.0;
        }
        // SAFETY: a scale for each head — QkNormRope::run.
        1.0 / unsafe { global::load(self.scale.wrapping_add(head as usize)) }
    }

    /// # Safety
    /// - head < heads, and the piece at `element` is *in-bounds* of it and *aligned*; *exclusive*.
    #[inline(always)]
    unsafe fn store_piece(&self, head: u32, element: usize, piece: [u32; 4], inverse_scale: f32) {
        let at = head as usize * self.to_stride as usize + element;
        // SAFETY: the caller's promise.
        unsafe {
            if C::IS_SCALED && self.is_q {
                global::store_x4(self.to.cast::<T>().wrapping_add(at), piece);
            } else {
                C::store_piece(self.to.wrapping_add(at), piece, inverse_scale);
            }
        }
    }

    /// # Safety
    /// - head < heads and col < head_dim; *exclusive*.
    #[inline(always)]
    unsafe fn store(&self, head: u32, col: usize, value: T, inverse_scale: f32) {
        let at = head as usize * self.to_stride as usize + col;
        // SAFETY: the caller's promise.
        unsafe {
            if C::IS_SCALED && self.is_q {
                global::store(self.to.cast::<T>().wrapping_add(at), value);
            } else {
                global::store(self.to.wrapping_add(at), C::from_head(value, inverse_scale));
            }
        }
    }
}

/// cos and sin of a piece's elements, whose pairs are `pair` and those that follow it: two elements a pair if they are
/// interleaved, one if not.
///
/// # Safety
/// - The pairs are *in-bounds* of the tables' row, which is *aligned(16)*, but for the two of an interleaved f32 piece
///   — checked in `QkNormRope::run`, which takes another tile otherwise.
#[inline(always)]
unsafe fn load_angles<T: Element>(table: *const f32, pair: usize, is_interleaved: bool) -> [f32; 8] {
    let table = table.wrapping_add(pair);
    let mut angles = [0.0; 8];
    // SAFETY: the caller's promise.
    unsafe {
        if !is_interleaved {
            let mut i = 0;
            while i < T::PER_16_BYTES {
                let four = global::load_nc_x4(table.wrapping_add(i));
                angles[i] = f32::from_bits(four[0]);
                angles[i + 1] = f32::from_bits(four[1]);
                angles[i + 2] = f32::from_bits(four[2]);
                angles[i + 3] = f32::from_bits(four[3]);
                i += 4;
            }
        } else if T::PER_16_BYTES == 8 {
            let four = global::load_nc_x4(table);
            let mut i = 0;
            while i < 4 {
                angles[2 * i] = f32::from_bits(four[i]);
                angles[2 * i + 1] = angles[2 * i];
                i += 1;
            }
        } else {
            let mut i = 0;
            while i < 2 {
                angles[2 * i] = global::load(table.wrapping_add(i));
                angles[2 * i + 1] = angles[2 * i];
                i += 1;
            }
        }
    }
    angles
}

/// The sum of the squares of a head, of which each of `LANES` lanes has some.
///
/// # Safety
/// - *converged*: all lanes of the warp call it.
#[inline(always)]
unsafe fn square_of<T: Element, const LANES: u32>(values: &[f32; 8]) -> f32 {
    let mut square = 0.0;
    let mut j = 0;
    while j < T::PER_16_BYTES {
        square = math::fma(values[j], values[j], square);
        j += 1;
    }
    // SAFETY: the caller's promise.
    unsafe { warp::sum_f32::<LANES>(square) }
}

/// A head in `LANES` lanes, a piece of 16 bytes each.
///
/// # Safety
/// - All lanes of the warp call it (*converged*), also those whose token is past the end.
/// - Pointers, strides, the head dimension and the rotated part (half of it, if pairs are half of it apart) are
///   *in-bounds* and *aligned(16)*; a head has at most `LANES` pieces — checked in `QkNormRope::run`, which takes the
///   block tile otherwise. q is q_out or does not overlap it; slots distinct (*exclusive*) — its caller.
#[inline(always)]
unsafe fn by_lanes<T: Element, C: Cached<T>, const LANES: u32>(
    tensors: &Tensors<T, C>,
    dims: &QkNormRopeDims,
) {
    let per_piece = T::PER_16_BYTES as u32;
    let (lane, piece) = (thread::lane(), thread::thread_idx_x() % LANES);
    let (pieces, rotated) = (dims.head_dim / per_piece, dims.rotary_dim / per_piece);
    let element = (piece * per_piece) as usize;
    let is_interleaved = dims.is_interleaved != 0;
    // SAFETY: head < heads and piece < pieces keep every access inside the tensors — QkNormRope::run. The shuffles are
    // in branches on `dims` and on which group it is, the same for the whole warp.
    unsafe {
        // By one lane's word, so that ptxas knows that the warp stays together.
        let warp = warp::shuffle_idx(warp::FULL_MASK, thread::thread_idx_x() / 32, 0);
        let index = thread::block_idx_x() * (thread::block_dim_x() / 32) + warp;
        let side_by_side = index >> dims.warps_log2;
        let (block, group) = (side_by_side / num_groups(dims), side_by_side % num_groups(dims));
        let tokens = (block << dims.warps_log2) + (index & ((1 << dims.warps_log2) - 1));
        let mut group = Group::new(tokens * (32 / LANES) + lane / LANES, group, tensors, dims);
        // What is there of a head, whether or not it has a place to go to: nothing waits for its slot.
        let has_piece = group.is_inside && piece < pieces;
        let load = |group: &Group<T, C>, head: u32| {
            if has_piece && head < group.end {
                global::load_x4(group.from(head).wrapping_add(element))
            } else {
                [0; 4]
            }
        };
        let mut held = [[0; 4]; HEADS];
        let mut i = 0;
        while i < HEADS {
            held[i] = load(&group, group.head + i as u32 * group.step);
            i += 1;
        }
        let slot = group.load_slot();
        let mut weights = [0; 4];
        if has_piece && !group.weight.is_null() {
            weights = global::load_nc_x4(group.weight.wrapping_add(element));
        }
        let rotates = piece < rotated && group.is_inside && !group.is_v;
        // The pieces of the second half have the pairs of the first.
        let is_second = !is_interleaved && piece >= rotated / 2;
        let (mut cos, mut sin) = ([0.0; 8], [0.0; 8]);
        if rotates {
            let pair = if is_interleaved {
                element / 2
            } else {
                element - if is_second { (dims.rotary_dim / 2) as usize } else { 0 }
            };
            cos = load_angles::<T>(tensors.cos.wrapping_add(group.table), pair, is_interleaved);
            sin = load_angles::<T>(tensors.sin.wrapping_add(group.table), pair, is_interleaved);
            // The first of a pair (a, b) becomes a·cos − b·sin, the second b·cos + a·sin.
            let mut j = 0;
            while j < T::PER_16_BYTES {
                let is_first = if is_interleaved { j % 2 == 0 } else { !is_second };
                sin[j] = if is_first { -sin[j] } else { sin[j] };
                j += 1;
            }
        }
        let has_place = group.find_place(slot, dims);
        let mut gains = [0.0; 8];
        T::unpack(weights, &mut gains);
        let mut j = 0;
        while j < T::PER_16_BYTES {
            gains[j] += dims.weight_offset;
            j += 1;
        }
        let half = rotated / 2;
        let partner = if !rotates || is_interleaved {
            lane
        } else if is_second {
            lane - half
        } else {
            lane + half
        };
        let mut first = group.head;
        while first < group.end {
            let mut i = 0;
            while i < HEADS {
                let head = first + i as u32 * group.step;
                if head < group.end {
                    let inverse_scale = group.inverse_scale(head);
                    if !group.is_v {
                        let mut values = [0.0; 8];
                        T::unpack(held[i], &mut values);
                        if !tensors.q_weight.is_null() {
                            let mut mean =
                                math::fma(square_of::<T, LANES>(&values), dims.inv_head_dim, dims.eps);
                            if warp::any(warp::FULL_MASK, !range::is_normal(mean)) {
                                let factor = range::factor(mean);
                                // As f32, which has small elements beside huge ones as `rmsnorm` has them.
                                let mut j = 0;
                                while j < T::PER_16_BYTES {
                                    values[j] *= factor;
                                    j += 1;
                                }
                                let square = square_of::<T, LANES>(&values);
                                mean = math::fma(square, dims.inv_head_dim, range::epsilon(dims.eps, factor));
                            }
                            let scale = math::rsqrt(mean);
                            let mut j = 0;
                            while j < T::PER_16_BYTES {
                                values[j] = values[j] * scale * gains[j];
                                j += 1;
                            }
                            held[i] = T::pack(&values);
                            T::unpack(held[i], &mut values);
                        }
                        let mut others = [0.0; 8];
                        if is_interleaved {
                            let mut j = 0;
                            while j < T::PER_16_BYTES {
                                others[j] = values[j ^ 1];
                                j += 1;
                            }
                        } else {
                            let mut words = [0; 4];
                            let mut j = 0;
                            while j < 4 {
                                words[j] = warp::shuffle_idx(warp::FULL_MASK, held[i][j], partner);
                                j += 1;
                            }
                            T::unpack(words, &mut others);
                        }
                        if rotates {
                            let mut j = 0;
                            while j < T::PER_16_BYTES {
                                values[j] = math::fma(values[j], cos[j], others[j] * sin[j]);
                                j += 1;
                            }
                            held[i] = T::pack(&values);
                        }
                    }
                    if has_piece && has_place {
                        group.store_piece(head, element, held[i], inverse_scale);
                    }
                    // The next one of its place comes while the others are dealt with.
                    held[i] = load(&group, head + HEADS as u32 * group.step);
                }
                i += 1;
            }
            first += HEADS as u32 * group.step;
        }
    }
}

/// A block walks over one head element by element, twice, or three times if its squares do not fit f32: the fallback
/// for any size, stride and alignment.
///
/// # Safety
/// - One block per head, all its threads (*converged*); heads *in-bounds* — checked in `QkNormRope::run`. q is q_out or
///   does not overlap it; slots distinct (*exclusive*) — its caller.
#[inline(always)]
unsafe fn by_element<T: Element, C: Cached<T>>(tensors: &Tensors<T, C>, dims: &QkNormRopeDims) {
    let (member, members) = (thread::thread_idx_x(), thread::block_dim_x());
    // SAFETY: col < head_dim keeps every access inside its head — QkNormRope::run. All threads of the block have one
    // group, so they leave together and meet in the sum; what is read after it is written only by the thread that read
    // it.
    unsafe {
        let (token, group) =
            (thread::block_idx_x() / num_groups(dims), thread::block_idx_x() % num_groups(dims));
        let mut group = Group::new(token, group, tensors, dims);
        let slot = group.load_slot();
        if !group.find_place(slot, dims) || group.head >= group.end {
            return;
        }
        let (head, from) = (group.head, group.from(group.head));
        let inverse_scale = group.inverse_scale(head);
        let (mut factor, mut scale) = (1.0, 1.0);
        if !group.weight.is_null() {
            let square_of = |factor: f32| {
                let mut square = 0.0;
                let mut col = member;
                while col < dims.head_dim {
                    let value = global::load(from.wrapping_add(col as usize)).to_f32() * factor;
                    square = math::fma(value, value, square);
                    col += members;
                }
                block_sum_f32(square)
            };
            let mut mean = math::fma(square_of(1.0), dims.inv_head_dim, dims.eps);
            factor = range::factor(mean);
            // The same for all threads, as is the mean; the barrier is between the two sums.
            if factor != 1.0 {
                thread::sync_threads();
                mean = math::fma(square_of(factor), dims.inv_head_dim, range::epsilon(dims.eps, factor));
            }
            scale = math::rsqrt(mean);
        }
        let normed = |col: usize| {
            let value = global::load(from.wrapping_add(col));
            if group.weight.is_null() {
                return value;
            }
            let gain = global::load(group.weight.wrapping_add(col)).to_f32() + dims.weight_offset;
            T::from_f32(value.to_f32() * factor * scale * gain)
        };
        let pairs = if group.is_v { 0 } else { dims.rotary_dim / 2 };
        let mut unit = member;
        while unit < dims.head_dim - pairs {
            if unit < pairs {
                let (first, second) = if dims.is_interleaved != 0 {
                    (2 * unit as usize, 2 * unit as usize + 1)
                } else {
                    (unit as usize, (unit + pairs) as usize)
                };
                let (a, b) = (normed(first).to_f32(), normed(second).to_f32());
                let angle = group.table + unit as usize;
                let cos = global::load(tensors.cos.wrapping_add(angle));
                let sin = global::load(tensors.sin.wrapping_add(angle));
                let (a, b) = (math::fma(a, cos, -(b * sin)), math::fma(b, cos, a * sin));
                group.store(head, first, T::from_f32(a), inverse_scale);
                group.store(head, second, T::from_f32(b), inverse_scale);
            } else {
                // Units beyond count from the middle of the rotated part: its second half has no units of its own.
                let col = (unit + pairs) as usize;
                group.store(head, col, normed(col), inverse_scale);
            }
            unit += members;
        }
    }
}

macro_rules! body {
    (Lanes, $type:ident, $cache:ident, $tensors:ident, $dims:ident, $lanes:literal) => {{
        // A model's step finds the gains in memory: the first block brings them to L2, whoever writes them.
        grid::begin_with(|| {
            let bytes = $dims.head_dim * size_of::<$type>() as u32;
            if thread::block_idx_x() == 0 && thread::thread_idx_x() == 0 && !$tensors.q_weight.is_null() {
                global::prefetch_l2($tensors.q_weight, bytes);
                global::prefetch_l2($tensors.k_weight, bytes);
            }
        });
        by_lanes::<$type, $cache, $lanes>(&$tensors, &$dims)
    }};
    (Block, $type:ident, $cache:ident, $tensors:ident, $dims:ident $(,)?) => {{
        grid::begin();
        by_element::<$type, $cache>(&$tensors, &$dims)
    }};
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $cache:ident, $cache_dtype:ident, $tile:ident { $($field:ident: $value:literal),* };)*) => {$(
        /// Entry point; see the module and `abi::ops::qk_norm_rope`.
        ///
        /// # Safety
        /// - Arguments as `QkNormRope::run` checks them.
        #[kernel(max_threads = 256, waits)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(
            q: *const $type,
            k: *const $type,
            v: *const $type,
            q_weight: *const $type,
            k_weight: *const $type,
            positions: *const u32,
            cos: *const f32,
            sin: *const f32,
            slots: *const u32,
            q_out: *mut $type,
            k_cache: *mut $cache,
            v_cache: *mut $cache,
            k_scale: *const f32,
            v_scale: *const f32,
            dims: QkNormRopeDims,
        ) {
            let tensors = Tensors {
                q,
                k,
                v,
                q_weight,
                k_weight,
                positions,
                cos,
                sin,
                slots,
                q_out,
                k_cache,
                v_cache,
                k_scale,
                v_scale,
            };
            // SAFETY: arguments as the body asks, by `QkNormRope::run`.
            unsafe { body!($tile, $type, $cache, tensors, dims, $($value),*) }
        }
    )*};
}
abi::qk_norm_rope_table!(entries);
