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
    MAX_GROUP, MAX_ROWS, PRODUCERS, ROW_PITCH, STAGE_BYTES, STAGES, TILE_COLS, TILE_KEYS, TILE_ROWS,
    WARP_COLS, smem,
};
use cuda_std::atomic::{self, Order};
use cuda_std::cvt::{bf16, bf16x2_from_f32, prmt};
use cuda_std::{barrier, cp_async, global, grid, math, mbarrier, mma, shared, thread, warp};

/// Keys that a block takes at a time, and a warp of it.
const ROUND: u32 = CONSUMERS * WARP_KEYS;
const WARP_KEYS: u32 = 16;
/// Warps that have keys of a tile; tiles of a round, of keys and then of values.
const TILE_WARPS: u32 = TILE_KEYS / WARP_KEYS;
const TILES_A_ROUND: u32 = 2 * (ROUND / TILE_KEYS);
/// Products of a head's elements by 16.
const HEAD_STEPS: usize = (HEAD_DIM / 16) as usize;

/// Below every score.
const LEAST: f32 = -1e30;

/// What a warp's columns of a tile are multiplied in.
const HALVES: usize = (WARP_COLS / COLS_UNIT) as usize;

/// Words that a lane waits for at a time, two to each.
const WAITS: usize = 2;

/// A layer: where the addresses of its tensors are in shared memory. As parameters they would be a load from memory
/// each.
#[derive(Clone, Copy)]
struct Layer {
    at: u32,
}

impl Layer {
    #[inline(always)]
    fn new(base: u32, number: u32) -> Self {
        Layer { at: base + smem::LAYERS + LAYER_BYTES * number }
    }

    /// The address of a tensor, 0 for one that there is not.
    ///
    /// # Safety
    /// - *initialised*: the table, and a barrier since; the layer's number is one of those.
    #[inline(always)]
    unsafe fn address(self, tensor: u32) -> usize {
        // SAFETY: the caller's promise.
        let [low, high] = unsafe { shared::load_u32x2(self.at + 8 * tensor) };
        (u64::from(low) | u64::from(high) << 32) as usize
    }
}

/// The products of a layer: those of its first tensors, in their order.
const PRODUCTS: u32 = LayerTensor::Down as u32 + 1;

/// A block's rows of a weight: of a gate and up pairs of them, number `first + i` of both.
#[derive(Clone, Copy)]
struct Rows {
    weight: usize,
    first: u32,
    count: u32,
    cols: u32,
    /// From a pair's first row to its second one; 0 for rows.
    apart: u32,
}

impl Rows {
    /// This block's, as [`keep_rows`] has left them.
    ///
    /// # Safety
    /// - *initialised*: what that leaves, and a barrier since.
    #[inline(always)]
    unsafe fn new(base: u32, product: u32, layer: Layer) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let [first, count, cols, apart] = shared::load_u32x4(base + smem::ROWS + 16 * product);
            Rows { weight: layer.address(product), first, count, cols, apart }
        }
    }

    /// How many are multiplied at a time.
    #[inline(always)]
    fn per_tile(self) -> u32 {
        if self.apart > 0 { TILE_ROWS / 2 } else { TILE_ROWS }
    }

    #[inline(always)]
    fn tiles(self) -> u32 {
        self.count.div_ceil(self.per_tile())
    }

    /// Rows, or pairs, of a tile.
    #[inline(always)]
    fn in_tile(self, tile: u32) -> u32 {
        let rest = self.count - tile * self.per_tile();
        if rest < self.per_tile() { rest } else { self.per_tile() }
    }

    /// The number of the row that is number `i` of a tile, if there is one.
    #[inline(always)]
    fn row(self, tile: u32, i: u32) -> Option<u32> {
        let (at, offset) =
            if self.apart > 0 && i >= TILE_ROWS / 2 { (i - TILE_ROWS / 2, self.apart) } else { (i, 0) };
        let is_there = at < self.in_tile(tile);
        is_there.then_some(self.first + tile * self.per_tile() + at + offset)
    }

    /// Columns of a tile from `from` on.
    #[inline(always)]
    fn cols_from(self, from: u32) -> u32 {
        if self.cols - from < TILE_COLS { self.cols - from } else { TILE_COLS }
    }
}

/// Leaves what [`Rows`] are of a product, and its words' places. Selects, where a table of jumps would be nobody's to
/// follow.
///
/// # Safety
/// - *exclusive*: those places; a thread for each product does it.
#[inline(always)]
unsafe fn keep_rows(base: u32, product: u32, dims: &DecoderLayersDims) {
    let (is_qkv, is_gate) = (product == LayerTensor::Qkv as u32, product == LayerTensor::GateUp as u32);
    let (is_output, is_down) = (product == LayerTensor::Output as u32, product == LayerTensor::Down as u32);
    let of = |is_it: bool, value: u32| if is_it { value } else { 0 };
    let rows =
        of(is_qkv, dims.qkv_rows()) + of(is_gate, dims.intermediate) + of(is_output | is_down, dims.hidden);
    let cols = of(is_output, dims.heads_q * HEAD_DIM)
        + of(is_down, dims.intermediate)
        + of(is_qkv | is_gate, dims.hidden);
    let places = Exchange::of(dims);
    let from = of(is_qkv, places.residual)
        + of(is_output, places.attended)
        + of(is_gate, places.middle)
        + of(is_down, places.activated);
    let to = of(is_qkv, places.qkv)
        + of(is_output, places.middle)
        + of(is_gate, places.activated)
        + of(is_down, places.residual);
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x().max(1));
    let first = rows * block / blocks;
    let kept = [first, rows * (block + 1) / blocks - first, cols, of(is_gate, dims.intermediate)];
    // SAFETY: the caller's promise.
    unsafe {
        shared::store_u32x4(base + smem::ROWS + 16 * product, kept);
        shared::store_u32x2(base + smem::PLACES + 8 * product, [from, to]);
    }
}

/// A place in the ring of tiles.
#[derive(Clone, Copy)]
struct Ring {
    base: u32,
    at: u32,
    parity: u32,
}

impl Ring {
    #[inline(always)]
    fn new(base: u32) -> Self {
        Ring { base, at: 0, parity: 0 }
    }

    #[inline(always)]
    fn tile(self) -> u32 {
        self.base + self.at * STAGE_BYTES
    }

    #[inline(always)]
    fn full(self) -> u32 {
        self.base + smem::FULL + 8 * self.at
    }

    #[inline(always)]
    fn empty(self) -> u32 {
        self.base + smem::EMPTY + 8 * self.at
    }

    /// The place so many further on, up to a round.
    #[inline(always)]
    fn ahead(self, count: u32) -> Self {
        let at = self.at + count;
        if at < STAGES {
            Ring { at, ..self }
        } else {
            Ring { at: at - STAGES, parity: self.parity ^ 1, ..self }
        }
    }

    #[inline(always)]
    fn next(&mut self) {
        *self = self.ahead(1);
    }
}

/// A producer's end of the ring: a thread's.
struct Tiles {
    /// The next tile's place.
    ring: Ring,
    is_first_round: bool,
}

/// # Safety of each operation
/// - All threads of the `PRODUCERS` do the same; the barriers are initialised.
impl Tiles {
    #[inline(always)]
    fn new(base: u32) -> Self {
        Tiles { ring: Ring::new(base), is_first_round: true }
    }

    /// Where the next tile goes, once all consumers are done with what was there.
    #[inline(always)]
    unsafe fn begin(&mut self) -> u32 {
        if !self.is_first_round {
            // SAFETY: the caller's promise; the phase of the last round, or this one's.
            unsafe { mbarrier::wait_parity(self.ring.empty(), self.ring.parity ^ 1) };
        }
        self.ring.tile()
    }

    /// The tile's copies are asked for: the barrier hears of them when they are done.
    #[inline(always)]
    unsafe fn end(&mut self) {
        // SAFETY: the caller's promise.
        unsafe { cp_async::mbarrier_arrive_noinc(self.ring.full()) };
        self.ring.next();
        self.is_first_round &= self.ring.at != 0;
    }
}

/// Brings a tile of a round's keys, or of their values.
///
/// # Safety
/// - As for [`bring`]; *exclusive*: the tile.
#[inline(always)]
unsafe fn bring_keys(
    to: u32,
    thread: u32,
    (first, tile): (u32, u32),
    split: Split,
    pages: *const u32,
    layer: Layer,
    dims: &DecoderLayersDims,
) {
    const PIECES: u32 = HEAD_DIM / 8;
    const APART: u32 = 32 * PRODUCERS / PIECES;
    const KEYS: usize = (TILE_KEYS / APART) as usize;
    let (own, piece) = (thread / PIECES, thread % PIECES);
    let is_keys = tile < TILES_A_ROUND / 2;
    let cache = if is_keys { LayerTensor::KeyCache } else { LayerTensor::ValueCache };
    let first = first + tile % (TILES_A_ROUND / 2) * TILE_KEYS;
    let mut keys = [0; KEYS];
    let mut i = 0;
    while i < KEYS {
        let key = first + own + APART * i as u32;
        keys[i] = if key < split.end { key } else { split.end - 1 };
        i += 1;
    }
    // SAFETY: keys of the split, whose slots are the caches'; the thread's own pieces of the tile.
    unsafe {
        let slots = slots_of(pages, keys, dims);
        let from = (layer.address(cache as u32) as *const bf16)
            .wrapping_add((split.head * HEAD_DIM + 8 * piece) as usize);
        let mut i = 0;
        while i < KEYS {
            let key = own + APART * i as u32;
            let bytes = if first + key < split.end { 16 } else { 0 };
            let row = from.wrapping_add(slots[i] as usize * dims.slot_stride as usize);
            cp_async::cg_16_fill(to + piece_at(key, piece), row, bytes);
            i += 1;
        }
    }
}

/// Brings the block's rows of all weights, in the order in which they are multiplied: a thread has a piece of 16 bytes
/// of every other row of a tile.
///
/// # Safety
/// - *converged*: whole warps, all that do so; the barriers are initialised.
/// - *in-bounds*: the weights of all layers — `DecoderLayers::run`.
#[inline(always)]
unsafe fn bring(base: u32, thread: u32, split: Split, pages: *const u32, dims: &DecoderLayersDims) {
    const PIECES: u32 = TILE_COLS / 8;
    const APART: u32 = 32 * PRODUCERS / PIECES;
    let (first_row, col) = (thread / PIECES, thread % PIECES * 8);
    let mut tiles = Tiles::new(base);
    let mut layer = 0;
    while layer < dims.num_layers {
        let mut product = thread::opaque(0);
        while product < PRODUCTS {
            // SAFETY: one of the layers; what was left before the barrier.
            let rows = unsafe { Rows::new(base, product, Layer::new(base, layer)) };
            let weight = rows.weight as *const bf16;
            // Behind the rows of q, k and v the block's keys and values.
            let mut first = if product == LayerTensor::Output as u32 { split.start } else { split.end };
            while first < split.end {
                let mut tile = thread::opaque(0);
                while tile < TILES_A_ROUND {
                    // SAFETY: as below; pieces of keys of the split, and zeros beyond it.
                    unsafe {
                        let (to, layer) = (tiles.begin(), Layer::new(base, layer));
                        bring_keys(to, thread, (first, tile), split, pages, layer, dims);
                        tiles.end();
                    }
                    tile += 1;
                }
                first += ROUND;
            }
            let mut tile = 0;
            while tile < rows.tiles() {
                let mut from = 0;
                while from < rows.cols {
                    let is_inside = col < rows.cols_from(from);
                    // SAFETY: pieces of rows of the weight; the stage is empty.
                    unsafe {
                        let to = tiles.begin() + 2 * col;
                        let mut i = 0;
                        while i < (TILE_ROWS / APART) as usize {
                            let place = first_row + APART * i as u32;
                            if let Some(row) = rows.row(tile, place) {
                                let row = row as usize * rows.cols as usize;
                                // Zeros beyond the last column, up to a whole tile.
                                let at = if is_inside { row + (from + col) as usize } else { row };
                                let bytes = if is_inside { 16 } else { 0 };
                                cp_async::cg_16_fill(to + place * ROW_PITCH, weight.wrapping_add(at), bytes);
                            }
                            i += 1;
                        }
                        tiles.end();
                    }
                    from += TILE_COLS;
                }
                tile += 1;
            }
            product += 1;
        }
        layer += 1;
    }
}

/// Tells a value of a layer.
///
/// # Safety
/// - *in-bounds*: a word of the exchange, which this thread alone writes in this layer.
#[inline(always)]
unsafe fn tell(word: *mut u64, value: f32, layer: u32) {
    // SAFETY: the caller's promise.
    unsafe { atomic::store_u64(word, u64::from(value.to_bits()) | u64::from(layer) << 32) }
}

/// The value of a word, once it is of the layer.
///
/// # Safety
/// - *in-bounds*: a word of the exchange, which some block tells in this layer.
#[inline(always)]
unsafe fn hear(word: *const u64, layer: u32) -> f32 {
    loop {
        // SAFETY: the caller's promise.
        let heard = unsafe { atomic::load_u64(word) };
        if (heard >> 32) as u32 == layer {
            return f32::from_bits(heard as u32);
        }
    }
}

/// The values of two neighbouring words each, those of them that are wanted.
///
/// # Safety
/// - As for [`hear`]; *aligned(16)*.
#[inline(always)]
unsafe fn hear_pairs<const N: usize>(words: [*const u64; N], wanted: [bool; N], layer: u32) -> [[f32; 2]; N] {
    loop {
        let (mut values, mut is_heard) = ([[0.0; 2]; N], true);
        let mut i = 0;
        while i < N {
            if wanted[i] {
                // SAFETY: the caller's promise.
                let heard = unsafe { atomic::load_u64x2(words[i]) };
                is_heard &= (heard[0] >> 32) as u32 == layer && (heard[1] >> 32) as u32 == layer;
                values[i] = [f32::from_bits(heard[0] as u32), f32::from_bits(heard[1] as u32)];
            }
            i += 1;
        }
        if is_heard {
            return values;
        }
    }
}

/// What a product is of: the residual that the launch begins with, or words of a layer if that is null.
type Input = (*const bf16, *mut u64);

/// What a warp that multiplies has to do with.
#[derive(Clone, Copy)]
struct Consumer<'a> {
    base: u32,
    warp: u32,
    lane: u32,
    dims: &'a DecoderLayersDims,
    exchange: *mut u64,
    places: Exchange,
    /// The number of the layer among all that there were.
    layer: u32,
}

impl Consumer<'_> {
    #[inline(always)]
    fn word(&self, at: u32) -> *mut u64 {
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
                    mbarrier::wait_parity(ring.full(), ring.parity);
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
                    if self.lane == 0 {
                        mbarrier::arrive(ring.empty());
                    }
                    ring.next();
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
fn both(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}

/// Waits for all consumers of the block.
///
/// # Safety
/// - *converged*: all of them.
#[inline(always)]
unsafe fn sync() {
    // SAFETY: the caller's promise.
    unsafe { barrier::sync(1, 32 * CONSUMERS) }
}

/// What attention has besides the layer's tensors.
#[derive(Clone, Copy)]
struct Token {
    cos: *const f32,
    sin: *const f32,
    /// Its slot of the caches.
    slot: u32,
}

/// The slots of keys.
///
/// # Safety
/// - *in-bounds*: keys before the token's.
#[inline(always)]
unsafe fn slots_of<const N: usize>(
    pages: *const u32,
    mut keys: [u32; N],
    dims: &DecoderLayersDims,
) -> [u32; N] {
    let size = dims.page_tokens;
    if size == 0 {
        return keys;
    }
    // SAFETY: the caller's promise.
    let pages = keys.map(|key| unsafe { global::load(pages.wrapping_add((key / size) as usize)) });
    let mut i = 0;
    while i < N {
        let is_there = pages[i] < dims.num_slots / size;
        keys[i] = if is_there { pages[i] * size + keys[i] % size } else { dims.num_slots - 1 };
        i += 1;
    }
    keys
}

/// A key head, and what this block has of it.
#[derive(Clone, Copy)]
struct Split {
    head: u32,
    index: u32,
    /// Its keys.
    start: u32,
    end: u32,
}

impl Split {
    /// That of this block; none beyond the key heads.
    ///
    /// # Safety
    /// - *in-bounds*: `lens`.
    #[inline(always)]
    unsafe fn load(lens: *const u32, dims: &DecoderLayersDims) -> Self {
        // SAFETY: the caller's promise.
        let len = unsafe { global::load(lens) };
        let len = if len < dims.max_keys { len } else { dims.max_keys };
        let (keys, splits) = (len.saturating_sub(1), dims.splits.max(1));
        let (head, index) = (thread::block_idx_x() / splits, thread::block_idx_x() % splits);
        let keys = if head < dims.heads_kv { keys } else { 0 };
        let each = keys.div_ceil(splits);
        let start = if index * each < keys { index * each } else { keys };
        let end = if start + each < keys { start + each } else { keys };
        Split { head, index, start, end }
    }
}

/// Where a piece of 16 bytes of a key, or of a value, is in its tile: so that eight lanes read eight banks of 16 bytes,
/// four pieces of two neighbouring keys, or two of every other of eight.
#[inline(always)]
fn piece_at(key: u32, piece: u32) -> u32 {
    2 * HEAD_DIM * key + 16 * (piece ^ (key & 6) ^ (key & 1) << 2)
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
    unsafe fn attend(&self, ring: &mut Ring, split: Split, token: Token, layer: Layer) {
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
                mbarrier::wait_parity(keys.full(), keys.parity);
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
                mbarrier::wait_parity(values.full(), values.parity);
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
                    if lane == 0 {
                        mbarrier::arrive(ring.empty());
                    }
                    ring.next();
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
                mbarrier::init(base + smem::EMPTY + 8 * stage, CONSUMERS);
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
