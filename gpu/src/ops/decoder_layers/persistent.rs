//! All layers by blocks that stay on their multiprocessors, from the first layer to the last.
//!
//! ```text
//! each layer   q, k, v = Wqkv · norm(x)          | a row is one block's, which also has its sums
//!              heads: norm, rotation             | of a key head's group, by each of its blocks
//!              scores, weighted sums of values   | a split of the keys to each of the key head's blocks
//!              merged over the splits            | a share of the group's values to each of them
//!              x ← x + Wo · attended
//!              a = silu(Wg · norm(x)) ⊙ (Wu · norm(x))
//!              x ← x + Wd · a
//! ```
//!
//! **What it is for.** A token's step moves few bytes for each of its launches, and what a launch waits for is a chain:
//! the kernel ahead, its first loads, a sum over a block. Here some warps of each block bring weights, from the
//! first layer to the last, as fast as memory gives them, and wait for no value; the others multiply what is there.
//!
//! **Values from block to block** are words of 8 bytes: the value's bits and the number of the layer. A word is written
//! and read as a whole, so a reader that finds its layer's number has the value, by one way to L2 and back. There is no
//! barrier of the grid, no fence and no flag. A word is written again a layer later, by a block that has by then read
//! what all others made of it: nobody reads late. Numbers go on from launch to launch; the count is the first word.
//!
//! **All blocks must be there at once**, as they wait for each other: the launch is a cooperative one.
//!
//! **Products.** A warp has 64 columns of each 512, of all rows of the block, 16 of them at a time as the first operand
//! of `mma.sync`; so it waits for its own columns of x alone. The warps' sums of a row are added behind a barrier.
//!
//! ```text
//! shared    | tiles of weights, a ring | x, each warp's columns | sums of rows, twice | heads | attention's sums |
//! ```
//!
//! **Attention.** Keys and values come as weights do. A warp has 16 keys of each 128 of the block's split, for all
//! query heads of their head. The token's own key and value are never read from the cache, where the last split's block
//! puts them.

use abi::ops::decoder_layers::{
    COLS_UNIT, CONSUMERS, DecoderLayersDims, Exchange, HEAD_DIM, LAYER_BYTES, LayerTable, LayerTensor,
    MAX_GROUP, MAX_ROWS, PRODUCERS, ROW_PITCH, STAGES, TILE_COLS, TILE_ROWS, WARP_COLS, smem,
};
use cuda_std::atomic::{self, Order};
use cuda_std::cvt::{bf16, bf16x2_from_f32};
use cuda_std::{barrier, global, grid, math, mbarrier, mma, shared, thread, warp};

use super::attend::Token;
use super::exchange::{hear_pairs, tell};
use super::ring::{Layer, PRODUCTS, Ring, Rows, Split, bring, keep_rows};

/// What a warp's columns of a tile are multiplied in.
const HALVES: usize = (WARP_COLS / COLS_UNIT) as usize;

/// Words that a lane waits for at a time, two to each.
const WAITS: usize = 2;

/// What a product is of: the residual that the launch begins with, or words of a layer if that is null.
type Input = (*const bf16, *mut u64);

/// What a warp that multiplies has to do with.
#[derive(Clone, Copy)]
pub(super) struct Consumer<'a> {
    pub(super) base: u32,
    pub(super) warp: u32,
    pub(super) lane: u32,
    pub(super) dims: &'a DecoderLayersDims,
    exchange: *mut u64,
    pub(super) places: Exchange,
    /// The number of the layer among all that there were.
    pub(super) layer: u32,
}

impl Consumer<'_> {
    #[inline(always)]
    pub(super) fn word(&self, at: u32) -> *mut u64 {
        self.exchange.wrapping_add(at as usize)
    }

    /// Where a warp's sum of a row is.
    #[inline(always)]
    fn sum_at(&self, turn: u32, warp: u32, row: u32) -> u32 {
        self.base + smem::SUMS + turn * smem::SUMS_BYTES + 4 * (warp * MAX_ROWS + row)
    }

    /// Waits for the warp's columns of x, and puts them, times the gains, where its lanes will read them. Returns the
    /// lane's sum of squares.
    ///
    /// # Safety
    /// - *converged*: the whole warp; *in-bounds*: `cols` of x and of the gains.
    #[inline(always)]
    unsafe fn gather(&self, (x, words): Input, gains: usize, cols: u32) -> f32 {
        let to = self.base + smem::WORDS + self.warp * smem::WARP_WORDS;
        let mut squares = 0.0;
        let mut first = 0;
        while first < cols {
            let (mut at, mut wanted, mut own) = ([0; WAITS], [false; WAITS], [0; WAITS]);
            let mut i = 0;
            while i < WAITS {
                at[i] = first + TILE_COLS * i as u32 + WARP_COLS * self.warp + 2 * self.lane;
                wanted[i] = at[i] < cols;
                if gains != 0 {
                    // Beyond the end the last ones: a branch around a load would wait for it.
                    let at = if wanted[i] { at[i] } else { cols - 2 };
                    // SAFETY: `at < cols` — the caller.
                    own[i] = unsafe {
                        global::load((gains as *const bf16).wrapping_add(at as usize).cast::<u32>())
                    };
                }
                i += 1;
            }
            let values = if x.is_null() {
                // SAFETY: as above.
                unsafe {
                    hear_pairs(at.map(|at| words.wrapping_add(at as usize).cast_const()), wanted, self.layer)
                }
            } else {
                let mut values = [[0.0; 2]; WAITS];
                let mut i = 0;
                while i < WAITS {
                    if wanted[i] {
                        // SAFETY: as above.
                        values[i] =
                            both(unsafe { global::load(x.wrapping_add(at[i] as usize).cast::<u32>()) });
                    }
                    i += 1;
                }
                values
            };
            let mut i = 0;
            while i < WAITS {
                // Zeros beyond the last column, up to a whole tile.
                let from = first + TILE_COLS * i as u32;
                if from < cols {
                    let [low, high] = values[i];
                    squares = math::fma(high, high, math::fma(low, low, squares));
                    let gains = both(own[i])
                        .map(|gain| if gains != 0 { gain + self.dims.weight_offset } else { 1.0 });
                    let word = bf16x2_from_f32(low * gains[0], high * gains[1]);
                    let place = from / TILE_COLS * (WARP_COLS / 2) + self.lane;
                    // SAFETY: the warp's own words.
                    unsafe { shared::store_u32(to + 4 * place, if wanted[i] { word } else { 0 }) };
                }
                i += 1;
            }
            first += WAITS as u32 * TILE_COLS;
        }
        squares
    }

    /// The warp's sums of the block's rows times x, behind a barrier.
    ///
    /// # Safety
    /// - *converged*: all consumers of the block, each in the same place of the ring.
    /// - As for [`Self::gather`].
    #[inline(always)]
    unsafe fn multiply(&self, ring: &mut Ring, rows: Rows, x: Input, gains: usize, turn: u32) {
        let (group, member) = (self.lane / 4, self.lane % 4);
        // SAFETY: the caller's promise; rows of a tile that were brought, and the warp's own columns; a sum's place is
        // the lane's own. What was in the sums' other place all have read, who came to the barrier since.
        unsafe {
            let squares = self.gather(x, gains, rows.cols);
            warp::sync_warp(warp::FULL_MASK);
            let words = self.base + smem::WORDS + self.warp * smem::WARP_WORDS + 16 * member;
            let mut tile = 0;
            while tile < rows.tiles() {
                // Of rows that there are not any others: nobody adds up their sums, and there is no branch.
                let last = rows.in_tile(tile) - 1;
                let low = if group < last { group } else { last };
                let high = if rows.apart > 0 {
                    low
                } else if group + 8 < last {
                    group
                } else {
                    last.saturating_sub(8)
                };
                let high = if rows.apart > 0 || last >= 8 { high + 8 } else { low };
                let columns = 2 * WARP_COLS * self.warp + 16 * member;
                let (low, high) = (low * ROW_PITCH + columns, high * ROW_PITCH + columns);
                let mut words = words;
                let mut sums = [[0.0f32; 4]; HALVES];
                let mut from = 0;
                while from < rows.cols {
                    ring.wait();
                    let at = ring.tile();
                    let mut held = [[[0; 4]; 3]; HALVES];
                    let mut half = 0;
                    while half < HALVES {
                        let bytes = 2 * COLS_UNIT * half as u32;
                        held[half] = [
                            shared::load_u32x4(at + low + bytes),
                            shared::load_u32x4(at + high + bytes),
                            shared::load_u32x4(words + bytes),
                        ];
                        half += 1;
                    }
                    let mut half = 0;
                    while half < HALVES {
                        let [low, high, b] = held[half];
                        let first = [low[0], high[0], low[1], high[1]];
                        sums[half] = mma::m16n8k16_f32_bf16(first, [b[0], b[1]], sums[half]);
                        let second = [low[2], high[2], low[3], high[3]];
                        sums[half] = mma::m16n8k16_f32_bf16(second, [b[2], b[3]], sums[half]);
                        half += 1;
                    }
                    warp::sync_warp(warp::FULL_MASK);
                    ring.leave();
                    words += 2 * WARP_COLS;
                    from += TILE_COLS;
                }
                // All columns of the product are the same.
                if member == 0 {
                    let to = self.sum_at(turn, self.warp, TILE_ROWS * tile + group);
                    shared::store_f32(to, sums[0][0] + sums[1][0]);
                    shared::store_f32(to + 4 * 8, sums[0][2] + sums[1][2]);
                }
                tile += 1;
            }
            if gains != 0 {
                let squares = warp::sum_f32::<32>(squares);
                if self.lane == 0 {
                    shared::store_f32(self.base + smem::SQUARES + 4 * self.warp, squares);
                }
            }
            sync();
        }
    }

    /// All warps' sum of a row.
    ///
    /// # Safety
    /// - Behind [`Self::multiply`], of a row of a tile.
    #[inline(always)]
    unsafe fn total(&self, turn: u32, row: u32) -> f32 {
        let mut total = 0.0;
        let mut warp = 0;
        while warp < CONSUMERS {
            // SAFETY: the caller's promise.
            total += unsafe { shared::load_f32(self.sum_at(turn, warp, row)) };
            warp += 1;
        }
        total
    }

    /// 1 / √(mean square of x + ε).
    ///
    /// # Safety
    /// - Behind [`Self::multiply`] with gains.
    #[inline(always)]
    unsafe fn norm(&self) -> f32 {
        let mut squares = 0.0;
        let mut warp = 0;
        while warp < CONSUMERS {
            // SAFETY: the caller's promise.
            squares += unsafe { shared::load_f32(self.base + smem::SQUARES + 4 * warp) };
            warp += 1;
        }
        math::rsqrt(math::fma(squares, self.dims.inv_hidden, self.dims.eps))
    }
}

/// A word's two elements.
#[inline(always)]
pub(super) fn both(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}

/// Waits for all consumers of the block.
///
/// # Safety
/// - *converged*: all of them.
#[inline(always)]
pub(super) unsafe fn sync() {
    // SAFETY: the caller's promise.
    unsafe { barrier::sync(1, 32 * CONSUMERS) }
}

/// All layers.
///
/// # Safety
/// - All threads of a grid of blocks of `THREADS` that are all there at once, with `smem::BYTES` of shared memory.
/// - The tensors are as `DecoderLayers::run` checked them; the exchange is of `Exchange::words`, zeros at first, and no
///   other launch's meanwhile.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn layers(
    x: *const bf16,
    positions: *const u32,
    cos: *const f32,
    sin: *const f32,
    slots: *const u32,
    lens: *const u32,
    pages: *const u32,
    out: *mut bf16,
    exchange: *mut u64,
    table: *const LayerTable,
    dims: &DecoderLayersDims,
) {
    let (base, thread) = (shared::base(), thread::thread_idx_x());
    // SAFETY: the barriers are initialised by one thread, before a barrier of all. Rows and values are the block's own;
    // a residual's value stays in its thread. The count of layers is read before the block tells anything, and written
    // by a block that has heard all others in the last layer.
    unsafe {
        if thread == 0 {
            let mut stage = 0;
            while stage < STAGES {
                mbarrier::init(base + smem::FULL + 8 * stage, 32 * PRODUCERS);
                mbarrier::init(base + smem::EMPTY + 8 * stage, 32 * CONSUMERS);
                stage += 1;
            }
            mbarrier::fence_mbarrier_init();
        }
        if thread < PRODUCTS {
            keep_rows(base, thread, dims);
        }
        // Those of the layers that there are. Queries that there are not are zeros.
        let mut word = thread;
        while word < MAX_GROUP * HEAD_DIM / 2 {
            shared::store_u32(base + smem::QUERIES + 4 * word, 0);
            word += thread::block_dim_x();
        }
        let mut word = thread;
        while word < dims.num_layers * (LAYER_BYTES / 4) {
            let from = table.cast::<u32>().wrapping_add(word as usize);
            shared::store_u32(base + smem::LAYERS + 4 * word, grid::load_parameter(from));
            word += thread::block_dim_x();
        }
        thread::sync_threads();
        let (split, block) = (Split::load(lens, dims), thread::block_idx_x());
        if thread::warp_idx() >= CONSUMERS {
            bring(base, thread - 32 * CONSUMERS, split, pages, dims);
            return;
        }
        let count = exchange.wrapping_add(Exchange::COUNT as usize).cast::<u32>();
        let before = atomic::load_u32(count, Order::Relaxed);
        let position = global::load(positions);
        let position = if position < dims.max_position { position } else { dims.max_position - 1 };
        let angles = position as usize * (HEAD_DIM / 2) as usize;
        let token =
            Token { cos: cos.wrapping_add(angles), sin: sin.wrapping_add(angles), slot: global::load(slots) };
        let mut own = Consumer {
            base,
            warp: thread::warp_idx(),
            lane: thread::lane(),
            dims,
            exchange,
            places: Exchange::of(dims),
            layer: before,
        };
        let mut ring = Ring::new(base);
        let rows = Rows::new(base, LayerTensor::Output as u32, Layer::new(base, 0));
        let at = (rows.first + thread) as usize;
        let mut residual = if thread < rows.count { global::load(x.wrapping_add(at)).to_f32() } else { 0.0 };
        let mut number = 0;
        while number < dims.num_layers {
            let layer = Layer::new(base, number);
            // Opaque, or what hangs on it would be kept in registers from layer to layer.
            own.lane = thread::opaque(thread::lane());
            // 0 is what the words begin with.
            own.layer = own.layer.wrapping_add(1);
            let is_end = number + 1 == dims.num_layers;
            // One code for all four products: what goes round in more than fits a cache waits for its instructions.
            let mut product = thread::opaque(0);
            while product < PRODUCTS {
                let [from, to] = shared::load_u32x2(base + smem::PLACES + 8 * product);
                let (turn, is_normed) = (product % 2, product.is_multiple_of(2));
                let (is_gate, is_last) = (product == LayerTensor::GateUp as u32, product + 1 == PRODUCTS);
                let gains = if is_gate { LayerTensor::PostAttentionNorm } else { LayerTensor::InputNorm };
                let gains = if is_normed { layer.address(gains as u32) } else { 0 };
                let x = if product + number == 0 { x } else { core::ptr::null() };
                let rows = Rows::new(base, product, layer);
                own.multiply(&mut ring, rows, (x, own.word(from)), gains, turn);
                if thread < rows.count {
                    let scale = if is_normed { own.norm() } else { 1.0 };
                    // Of pairs, gates are the first 8 of a tile's 16 rows.
                    let row = if is_gate { thread / 8 * TILE_ROWS + thread % 8 } else { thread };
                    let mut value = own.total(turn, row) * scale;
                    if is_gate {
                        value = math::silu(value) * own.total(turn, row + 8) * scale;
                    } else if !is_normed {
                        residual += value;
                        value = residual;
                    }
                    let at = rows.first + thread;
                    if is_end && is_last {
                        global::store(out.wrapping_add(at as usize), bf16::from_f32(value));
                    } else {
                        // The last one's are the next layer's.
                        tell(own.word(to + at), value, own.layer.wrapping_add(u32::from(is_last)));
                    }
                }
                if product == 0 && split.head < dims.heads_kv {
                    own.attend(&mut ring, split, token, layer);
                }
                product += 1;
            }
            number += 1;
        }
        if block == 0 && thread == 0 {
            atomic::store_u32(count, own.layer, Order::Relaxed);
        }
    }
}
