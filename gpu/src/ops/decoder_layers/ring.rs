//! The tiles of weights, keys and values that a block will multiply: the rows and keys that are its own, and the warps
//! that bring them, which wait for no value.

use abi::ops::decoder_layers::{
    CONSUMERS, DecoderLayersDims, Exchange, HEAD_DIM, LAYER_BYTES, LayerTensor, PRODUCERS, ROW_PITCH,
    STAGE_BYTES, STAGES, TILE_COLS, TILE_KEYS, TILE_ROWS, smem,
};
use cuda_std::cvt::bf16;
use cuda_std::{cp_async, global, mbarrier, shared, thread};

/// Keys that a block takes at a time, and a warp of it.
pub(super) const ROUND: u32 = CONSUMERS * WARP_KEYS;
pub(super) const WARP_KEYS: u32 = 16;
/// Tiles of a round, of keys and then of values.
pub(super) const TILES_A_ROUND: u32 = 2 * (ROUND / TILE_KEYS);

/// A layer: where the addresses of its tensors are in shared memory. As parameters they would be a load from memory
/// each.
#[derive(Clone, Copy)]
pub(super) struct Layer {
    at: u32,
}

impl Layer {
    #[inline(always)]
    pub(super) fn new(base: u32, number: u32) -> Self {
        Layer { at: base + smem::LAYERS + LAYER_BYTES * number }
    }

    /// The address of a tensor, 0 for one that there is not.
    ///
    /// # Safety
    /// - *initialised*: the table, and a barrier since; the layer's number is one of those.
    #[inline(always)]
    pub(super) unsafe fn address(self, tensor: u32) -> usize {
        // SAFETY: the caller's promise.
        let [low, high] = unsafe { shared::load_u32x2(self.at + 8 * tensor) };
        (u64::from(low) | u64::from(high) << 32) as usize
    }
}

/// The products of a layer: those of its first tensors, in their order.
pub(super) const PRODUCTS: u32 = LayerTensor::Down as u32 + 1;

/// A block's rows of a weight: of a gate and up pairs of them, number `first + i` of both.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    weight: usize,
    pub(super) first: u32,
    pub(super) count: u32,
    pub(super) cols: u32,
    /// From a pair's first row to its second one; 0 for rows.
    pub(super) apart: u32,
}

impl Rows {
    /// This block's, as [`keep_rows`] has left them.
    ///
    /// # Safety
    /// - *initialised*: what that leaves, and a barrier since.
    #[inline(always)]
    pub(super) unsafe fn new(base: u32, product: u32, layer: Layer) -> Self {
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
    pub(super) fn tiles(self) -> u32 {
        self.count.div_ceil(self.per_tile())
    }

    /// Rows, or pairs, of a tile.
    #[inline(always)]
    pub(super) fn in_tile(self, tile: u32) -> u32 {
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
pub(super) unsafe fn keep_rows(base: u32, product: u32, dims: &DecoderLayersDims) {
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
pub(super) struct Split {
    pub(super) head: u32,
    pub(super) index: u32,
    /// Its keys.
    pub(super) start: u32,
    pub(super) end: u32,
}

impl Split {
    /// That of this block; none beyond the key heads.
    ///
    /// # Safety
    /// - *in-bounds*: `lens`.
    #[inline(always)]
    pub(super) unsafe fn load(lens: *const u32, dims: &DecoderLayersDims) -> Self {
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
pub(super) fn piece_at(key: u32, piece: u32) -> u32 {
    2 * HEAD_DIM * key + 16 * (piece ^ (key & 6) ^ (key & 1) << 2)
}

/// A place in the ring of tiles.
#[derive(Clone, Copy)]
pub(super) struct Ring {
    base: u32,
    at: u32,
    parity: u32,
}

impl Ring {
    #[inline(always)]
    pub(super) fn new(base: u32) -> Self {
        Ring { base, at: 0, parity: 0 }
    }

    #[inline(always)]
    pub(super) fn tile(self) -> u32 {
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
    pub(super) fn ahead(self, count: u32) -> Self {
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

    /// Waits until the tile is there.
    ///
    /// # Safety
    /// - The barriers are initialised; the producers have this place next, or had it last.
    #[inline(always)]
    pub(super) unsafe fn wait(self) {
        // SAFETY: the caller's promise.
        unsafe { mbarrier::wait_parity(self.full(), self.parity) }
    }

    /// Leaves the tile, with which a thread of the consumers is done.
    ///
    /// # Safety
    /// - All consumers do so, each behind its last read; the barriers are initialised.
    #[inline(always)]
    pub(super) unsafe fn leave(&mut self) {
        // SAFETY: the caller's promise.
        unsafe { mbarrier::arrive(self.empty()) };
        self.next();
    }
}

/// A producer's end of the ring: a thread's.
struct Tiles {
    /// The next tile's place.
    ring: Ring,
    is_first_round: bool,
}

impl Tiles {
    #[inline(always)]
    fn new(base: u32) -> Self {
        Tiles { ring: Ring::new(base), is_first_round: true }
    }

    /// Where the next tile goes, once all consumers are done with what was there.
    ///
    /// # Safety
    /// - All threads of the `PRODUCERS` do the same; the barriers are initialised.
    #[inline(always)]
    unsafe fn begin(&mut self) -> u32 {
        if !self.is_first_round {
            // SAFETY: the caller's promise; the phase of the last round, or this one's.
            unsafe { mbarrier::wait_parity(self.ring.empty(), self.ring.parity ^ 1) };
        }
        self.ring.tile()
    }

    /// The tile's copies are asked for: the barrier hears of them when they are done.
    ///
    /// # Safety
    /// - As for [`Self::begin`], behind it.
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
pub(super) unsafe fn bring(
    base: u32,
    thread: u32,
    split: Split,
    pages: *const u32,
    dims: &DecoderLayersDims,
) {
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
