//! Attention of one token: a split of a key head's keys by each of its blocks, and a share of the merge.

use abi::ops::decoder_layers::{CONSUMERS, Exchange, HEAD_DIM, LayerTensor, MAX_GROUP, TILE_KEYS, smem};
use cuda_std::cvt::{bf16, bf16x2_from_f32, prmt};
use cuda_std::{global, math, mma, shared, thread, warp};

use super::exchange::{hear, hear_pairs, tell};
use super::persistent::{Consumer, both, sync};
use super::ring::{Layer, ROUND, Ring, Split, TILES_A_ROUND, WARP_KEYS, piece_at};

/// Warps that have keys of a tile.
const TILE_WARPS: u32 = TILE_KEYS / WARP_KEYS;
/// Products of a head's elements by 16.
const HEAD_STEPS: usize = (HEAD_DIM / 16) as usize;

/// Below every score.
const LEAST: f32 = -1e30;

/// What attention has besides the layer's tensors.
#[derive(Clone, Copy)]
pub(super) struct Token {
    pub(super) cos: *const f32,
    pub(super) sin: *const f32,
    /// Its slot of the caches.
    pub(super) slot: u32,
}

/// A lane's pieces of 16 keys, or of their values, as products take them.
///
/// ```text
/// S = q · keysᵀ        lane 4 g + t   keys g, g + 8                       elements 8 t + 32 j …, 8 each
/// O = valuesᵀ · Sᵀ                    keys 2 t, 2 t + 1, and 8 further    elements 8 g …, and 64 + 8 g …, 8 each
/// ```
type Held = [[u32; 4]; 8];

impl Consumer<'_> {
    /// Where elements `2 i` and `2 i + 1` of a query head are.
    #[inline(always)]
    fn query_at(&self, head: u32, i: u32) -> u32 {
        self.base + smem::QUERIES + 4 * (head * HEAD_DIM / 2 + i)
    }

    /// Where element `i` of the token's own key is, or of its value.
    #[inline(always)]
    fn own_at(&self, is_value: bool, i: u32) -> u32 {
        self.base + smem::OWN + 4 * (if is_value { HEAD_DIM } else { 0 } + i)
    }

    #[inline(always)]
    fn values_at(&self, entry: u32, head: u32, i: u32) -> u32 {
        self.base + smem::VALUES + 4 * ((entry * MAX_GROUP + head) * HEAD_DIM + i)
    }

    #[inline(always)]
    fn weights_at(&self, entry: u32, head: u32) -> u32 {
        self.base + smem::WEIGHTS + 8 * (entry * MAX_GROUP + head)
    }

    /// Norms and rotates one vector of the token: a query head, the key or the value. The last two go to
    /// the cache.
    ///
    /// # Safety
    /// - *converged*: the whole warp; `vector` up to `group + 1`.
    #[inline(always)]
    unsafe fn prepare(&self, vector: u32, split: Split, token: Token, layer: Layer) {
        let (dims, lane) = (self.dims, self.lane);
        let group = dims.group();
        let (is_query, is_value) = (vector < group, vector > group);
        let head = if is_query {
            split.head * group + vector
        } else {
            dims.heads_q + split.head + if is_value { dims.heads_kv } else { 0 }
        };
        let of_gains = if is_query { LayerTensor::QueryNorm } else { LayerTensor::KeyNorm };
        // SAFETY: vectors of heads that there are; angles of a position, four of them to a lane; the token's own slot.
        unsafe {
            let gains = layer.address(of_gains as u32);
            let (mut own, mut angles) = ([1.0f32; 4], [[0.0; 4]; 2]);
            if !is_value {
                let at = (4 * lane % 64) as usize;
                angles = [token.cos, token.sin]
                    .map(|table| global::load_x4(table.wrapping_add(at)).map(f32::from_bits));
                if gains != 0 {
                    let gain = (gains as *const bf16).wrapping_add(4 * lane as usize).cast::<u32>();
                    let ([a, b], [c, d]) =
                        (both(global::load(gain)), both(global::load(gain.wrapping_add(1))));
                    own = [a, b, c, d].map(|gain| gain + dims.weight_offset);
                }
            }
            let words = self.word(self.places.qkv + head * HEAD_DIM + 4 * lane).cast_const();
            let [[a, b], [c, d]] = hear_pairs([words, words.wrapping_add(2)], [true; 2], self.layer);
            let mut values = [a, b, c, d];
            if !is_value {
                if gains != 0 {
                    let mut squares = 0.0;
                    let mut i = 0;
                    while i < 4 {
                        squares = math::fma(values[i], values[i], squares);
                        i += 1;
                    }
                    let mean = warp::sum_f32::<32>(squares) * (1.0 / HEAD_DIM as f32);
                    let scale = math::rsqrt(mean + dims.eps);
                    let mut i = 0;
                    while i < 4 {
                        values[i] *= scale * own[i];
                        i += 1;
                    }
                }
                let mut i = 0;
                while i < 4 {
                    // Pairs are half a head apart.
                    let other = warp::shuffle_xor_f32(warp::FULL_MASK, values[i], 16);
                    let other = if lane < 16 { -other } else { other };
                    values[i] = math::fma(other, angles[1][i], values[i] * angles[0][i]);
                    i += 1;
                }
            }
            if is_query {
                values = values.map(|value| value * dims.scale_log2);
            }
            let words = [bf16x2_from_f32(values[0], values[1]), bf16x2_from_f32(values[2], values[3])];
            if is_query {
                shared::store_u32x2(self.query_at(vector, 2 * lane), words);
                return;
            }
            let ([a, b], [c, d]) = (both(words[0]), both(words[1]));
            shared::store_f32x4(self.own_at(is_value, 4 * lane), [a, b, c, d]);
            if token.slot < dims.num_slots {
                let cache = if is_value { LayerTensor::ValueCache } else { LayerTensor::KeyCache };
                let cache = layer.address(cache as u32) as *mut bf16;
                let at = token.slot as usize * dims.slot_stride as usize
                    + (split.head * HEAD_DIM + 4 * lane) as usize;
                let to = cache.wrapping_add(at).cast::<u32>();
                global::store(to, words[0]);
                global::store(to.wrapping_add(1), words[1]);
            }
        }
    }

    /// Attention of the block's split, told to the key head's other blocks; then the block's share of the merge.
    ///
    /// # Safety
    /// - *converged*: all consumers of a block that has a split.
    #[inline(always)]
    pub(super) unsafe fn attend(&self, ring: &mut Ring, split: Split, token: Token, layer: Layer) {
        let (dims, lane, warp) = (self.dims, self.lane, self.warp);
        let group = dims.group();
        let is_last = split.index + 1 == dims.splits;
        let (head, member) = (lane / 4, lane % 4);
        // SAFETY: keys of the split; each phase of shared memory is the warp's own, or a barrier comes before it is
        // read.
        // What the last layer's merge read, all read before the barriers of three products since. Words of this key
        // head alone.
        unsafe {
            // The first warps' vectors, of which there are up to two more than warps.
            let mut vector = warp;
            while vector < group + if is_last { 2 } else { 0 } {
                self.prepare(vector, split, token, layer);
                vector += CONSUMERS;
            }
            sync();
            if is_last && warp < group {
                // The token's own key and value.
                let [[a, b], [c, d]] = shared::load_u32x2(self.query_at(warp, 2 * lane)).map(both);
                let (query, key) = ([a, b, c, d], shared::load_f32x4(self.own_at(false, 4 * lane)));
                let mut score = 0.0;
                let mut i = 0;
                while i < 4 {
                    score = math::fma(query[i], key[i], score);
                    i += 1;
                }
                let score = warp::sum_f32::<32>(score);
                if lane == 0 {
                    shared::store_f32x2(self.weights_at(CONSUMERS, warp), [score, 1.0]);
                }
                let value = shared::load_f32x4(self.own_at(true, 4 * lane));
                shared::store_f32x4(self.values_at(CONSUMERS, warp, 4 * lane), value);
            }

            // Of head `head`: its largest score, and the lane's part of the sum of weights.
            let (mut largest, mut weight) = (LEAST, 0.0);
            // Elements 8 g + j, and 64 further, of heads 2 t and 2 t + 1.
            let mut sums = [[0.0f32; 4]; 8];
            let mut first = split.start;
            while first < split.end {
                let keys = ring.ahead(warp / TILE_WARPS);
                keys.wait();
                let own_key = WARP_KEYS * (warp % TILE_WARPS);
                let mut held: Held = [[0; 4]; 8];
                let mut i = 0;
                while i < 8 {
                    let at = piece_at(own_key + head + 8 * (i as u32 / 4), member + 4 * (i as u32 % 4));
                    held[i] = shared::load_u32x4(keys.tile() + at);
                    i += 1;
                }
                let mut scores = [[0.0f32; 4]; 2];
                let mut step = 0;
                while step < HEAD_STEPS / 2 {
                    let q = shared::load_u32x4(self.query_at(head, 4 * member + 16 * step as u32));
                    let mut n = 0;
                    while n < 2 {
                        let k = held[4 * n + step];
                        scores[n] = mma::m16n8k16_f32_bf16([q[0], 0, q[1], 0], [k[0], k[1]], scores[n]);
                        scores[n] = mma::m16n8k16_f32_bf16([q[2], 0, q[3], 0], [k[2], k[3]], scores[n]);
                        n += 1;
                    }
                    step += 1;
                }
                // Keys 2 t, 2 t + 1, and 8 further.
                let mut own = [scores[0][0], scores[0][1], scores[1][0], scores[1][1]];
                let mut most = largest;
                let mut i = 0;
                while i < 4 {
                    let key = first + WARP_KEYS * warp + 2 * member + 8 * (i as u32 / 2) + i as u32 % 2;
                    own[i] = if key < split.end { own[i] } else { f32::NEG_INFINITY };
                    most = math::max(most, own[i]);
                    i += 1;
                }
                most = math::max(most, warp::shuffle_xor_f32(warp::FULL_MASK, most, 1));
                most = math::max(most, warp::shuffle_xor_f32(warp::FULL_MASK, most, 2));
                let factor = math::ex2(largest - most);
                largest = most;
                let weights = own.map(|score| math::ex2(score - most));
                weight = math::fma(weight, factor, weights[0] + weights[1] + weights[2] + weights[3]);
                let of_both = [8 * member, 8 * member + 4]
                    .map(|lane| warp::shuffle_idx_f32(warp::FULL_MASK, factor, lane));
                let b = [bf16x2_from_f32(weights[0], weights[1]), bf16x2_from_f32(weights[2], weights[3])];
                let values = ring.ahead(TILES_A_ROUND / 2 + warp / TILE_WARPS);
                values.wait();
                let mut i = 0;
                while i < 8 {
                    // Two neighbouring keys, the two 8 further, and of these the other half's elements.
                    let key = own_key + 2 * member + (i as u32 % 2) + 8 * (i as u32 % 4 / 2);
                    held[i] = shared::load_u32x4(values.tile() + piece_at(key, head + 8 * (i as u32 / 4)));
                    i += 1;
                }
                let mut j = 0;
                while j < 8 {
                    let mut i = 0;
                    while i < 4 {
                        sums[j][i] *= of_both[i % 2];
                        i += 1;
                    }
                    // Two keys of one element to a word.
                    let pair = |i: usize| {
                        let (low, high) = (held[i][j / 2], held[i + 1][j / 2]);
                        prmt(low, high, if j % 2 == 0 { 0x5410 } else { 0x7632 })
                    };
                    let a = [pair(0), pair(4), pair(2), pair(6)];
                    sums[j] = mma::m16n8k16_f32_bf16(a, b, sums[j]);
                    j += 1;
                }
                warp::sync_warp(warp::FULL_MASK);
                let mut tile = 0;
                while tile < TILES_A_ROUND {
                    ring.leave();
                    tile += 1;
                }
                first += ROUND;
            }
            weight += warp::shuffle_xor_f32(warp::FULL_MASK, weight, 1);
            weight += warp::shuffle_xor_f32(warp::FULL_MASK, weight, 2);
            if member == 0 && head < group {
                shared::store_f32x2(self.weights_at(warp, head), [largest, weight]);
            }
            let mut i = 0;
            while i < 4 {
                let of = 2 * member + i as u32 % 2;
                if of < group {
                    let to = self.values_at(warp, of, 8 * head + 64 * (i as u32 / 2));
                    shared::store_f32x4(to, [sums[0][i], sums[1][i], sums[2][i], sums[3][i]]);
                    shared::store_f32x4(to + 16, [sums[4][i], sums[5][i], sums[6][i], sums[7][i]]);
                }
                i += 1;
            }
            sync();
            let split_words = Exchange::split_words(group);
            let of_split =
                |index: u32| self.word(self.places.splits + (split.head * dims.splits + index) * split_words);
            let thread = 32 * warp + lane;
            let mut index = thread;
            while index < group * HEAD_DIM {
                let (h, i) = (index / HEAD_DIM, index % HEAD_DIM);
                let entries = CONSUMERS + u32::from(is_last);
                let [most, weight, sum] =
                    merged(entries, |entry| self.weights_at(entry, h), |entry| self.values_at(entry, h, i));
                let to = of_split(split.index);
                tell(to.wrapping_add(index as usize), sum, self.layer);
                if i == 0 {
                    let to = to.wrapping_add((group * HEAD_DIM + 2 * h) as usize);
                    tell(to, most, self.layer);
                    tell(to.wrapping_add(1), weight, self.layer);
                }
                index += 32 * CONSUMERS;
            }

            // A share of the group's values, of all splits.
            let all = group * HEAD_DIM;
            let share = all.div_ceil(dims.splits.max(1));
            let from = if split.index * share < all { split.index * share } else { all };
            let count = if all - from < share { all - from } else { share };
            let at = |split: u32, i: u32| self.base + smem::SHARE + 8 * (split * count + i);
            let sum_at = |split: u32, i: u32| self.base + smem::SHARE_SUMS + 4 * (split * count + i);
            let mut index = thread;
            while index < dims.splits * count {
                let (other, i) = (index / count.max(1), index % count.max(1));
                let words = of_split(other).cast_const();
                let of_head = words.wrapping_add((all + 2 * ((from + i) / HEAD_DIM)) as usize);
                let sum = hear(words.wrapping_add((from + i) as usize), self.layer);
                let [weights] = hear_pairs([of_head], [true], self.layer);
                shared::store_f32x2(at(other, i), weights);
                shared::store_f32(sum_at(other, i), sum);
                index += 32 * CONSUMERS;
            }
            sync();
            let mut index = thread;
            while index < count {
                let [_, weight, sum] =
                    merged(dims.splits, |split| at(split, index), |split| sum_at(split, index));
                let to = self.word(self.places.attended + split.head * all + from + index);
                tell(to, sum / weight, self.layer);
                index += 32 * CONSUMERS;
            }
        }
    }
}

/// The largest score, the sum of weights and the weighted sum of several such, which are at places of shared memory.
///
/// # Safety
/// - *initialised*: `count` of each, and a barrier since.
#[inline(always)]
unsafe fn merged(count: u32, scores_and_weights: impl Fn(u32) -> u32, sums: impl Fn(u32) -> u32) -> [f32; 3] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut largest = LEAST;
        let mut i = thread::opaque(0);
        while i < count {
            largest = math::max(largest, shared::load_f32(scores_and_weights(i)));
            i += 1;
        }
        let (mut weight, mut sum) = (0.0, 0.0);
        let mut i = thread::opaque(0);
        while i < count {
            let [score, own] = shared::load_f32x2(scores_and_weights(i));
            let factor = math::ex2(score - largest);
            weight = math::fma(factor, own, weight);
            sum = math::fma(factor, shared::load_f32(sums(i)), sum);
            i += 1;
        }
        [largest, weight, sum]
    }
}
