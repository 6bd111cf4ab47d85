//! Which tiles a block does, and where all of it lies in shared memory.

use abi::ops::attention::{
    AttentionDims, WGMMA_BARRIER_BYTES, WGMMA_MAX_STAGES, wgmma_out_in_q, wgmma_q_places, wgmma_stages_log2,
};
use cuda_std::atomic::{self, Order};
use cuda_std::cvt::Element;
use cuda_std::{shared, thread};

use super::super::Tables;
use super::super::scores::{Blocks, Masks, has_blocks};
use super::super::tile::Tile;

/// Marks are kept for so many tiles: loads run ahead of a consumer by less.
pub(super) const MARKS: u32 = 4;

/// A number of steps of keys, or of those that are borders, counted through all tiles: its place in the rings, in one
/// register.
#[derive(Clone, Copy)]
pub(super) struct Turn(pub(super) u32);

impl Turn {
    /// In a ring of so many places, as a power of two.
    #[inline(always)]
    fn place(self, places_log2: u32) -> u32 {
        self.0 & ((1 << places_log2) - 1)
    }

    /// Of the round in such a ring.
    #[inline(always)]
    fn parity(self, places_log2: u32) -> u32 {
        self.0 >> places_log2 & 1
    }
}

/// The tiles of a block, for its loader: the first has the block's own number, the others it draws from those that are
/// left.
pub(super) struct Tiles<const EARLY: bool, const SPLIT: bool> {
    /// How many there were.
    pub(super) round: u32,
    /// What was drawn early for the next one.
    drawn: u32,
}

impl<const EARLY: bool, const SPLIT: bool> Tiles<EARLY, SPLIT> {
    pub(super) const NEW: Self = Tiles { round: 0, drawn: 0 };

    /// Where tiles are drawn early, draws the next one, if it is due. That takes a while; what is drawn is not looked
    /// at before [`Tiles::next`].
    ///
    /// It is not due much earlier than it is wanted: a block that draws while it begins a long tile has bound itself to
    /// more than its share.
    ///
    /// # Safety
    /// - As for [`Tiles::next`]; it is due once in each tile.
    #[inline(always)]
    pub(super) unsafe fn draw(&mut self, counter: *mut u32, is_due: bool) {
        if EARLY {
            // SAFETY: the caller's promise.
            self.drawn = if is_due { unsafe { atomic::add_u32(counter, 1, Order::Relaxed) } } else { 0 };
        }
    }

    /// The next one's number, if there is one.
    ///
    /// # Safety
    /// - One thread of each block, up to the first `None`; there are no more blocks than tiles; the counter is
    ///   *exclusive* to the launch. It is 0 when that begins, and again when it ends.
    #[inline(always)]
    pub(super) unsafe fn next(&mut self, counter: *mut u32, dims: &AttentionDims) -> Option<u32> {
        // Opaque, or the count would be kept in a register.
        let mut count = thread::opaque(dims.tiles) * dims.heads_q * dims.batch;
        if SPLIT {
            count <<= dims.key_parts_log2;
        }
        let mut number = thread::block_idx_x();
        // SAFETY: the caller's promise.
        unsafe {
            if self.round > 0 {
                let drawn = if EARLY { self.drawn } else { atomic::add_u32(counter, 1, Order::Relaxed) };
                number = drawn + dims.grid;
                // Each block draws one number beyond the last tile: this was the last of all.
                if drawn == count - 1 {
                    atomic::and_u32(counter, 0, Order::Relaxed);
                }
            }
        }
        self.round += 1;
        (number < count).then_some(number)
    }
}

/// A tile's steps of keys, of which with a block mask some are left out.
pub(super) struct Walk {
    pub(super) tile: Tile,
    has_blocks: bool,
    blocks: Blocks,
    /// The first row and the last.
    queries: [u32; 2],
}

/// No step.
pub(super) const NONE: u32 = u32::MAX;
/// The loader's words on steps and tiles are kept for so many: it runs ahead of a consumer by fewer.
const STEP_WORDS: u32 = 8;
const TILE_WORDS: u32 = 4;

/// A step of keys as the loader tells the consumers of it, who have no registers for finding it themselves. It is
/// written before the step's k is loaded.
#[derive(Clone, Copy)]
pub(super) struct Step(u32);

impl Step {
    const SPECIAL: u32 = 1 << 29;
    const BORDER: u32 = 1 << 30;
    const LAST: u32 = 1 << 31;

    #[inline(always)]
    pub(super) fn new(index: u32, is_border: bool, is_last: bool, dims: &AttentionDims) -> Self {
        let border = if is_border { Self::BORDER } else { 0 };
        // Opaque, or it would be kept in a register.
        let cap = f32::from_bits(thread::opaque(dims.scores.cap_in.to_bits()));
        let special = if is_border || cap != 0.0 { Self::SPECIAL } else { 0 };
        Step(index | border | special | if is_last { Self::LAST } else { 0 })
    }

    /// # Safety
    /// - *exclusive*: the step so many before has been done.
    #[inline(always)]
    pub(super) unsafe fn store(self, places: Places, turn: Turn) {
        // SAFETY: inside shared memory; the caller's promise.
        unsafe { shared::store_u32(places.step(turn), self.0) }
    }

    /// # Safety
    /// - *initialised*: the step's k has come.
    #[inline(always)]
    pub(super) unsafe fn load(places: Places, turn: Turn) -> Self {
        // SAFETY: inside shared memory; the caller's promise.
        Step(unsafe { shared::load_u32(places.step(turn)) })
    }

    #[inline(always)]
    pub(super) fn index(self) -> u32 {
        self.0 & (Self::SPECIAL - 1)
    }

    /// Whether scores are more than multiplied by the scale: at borders, and everywhere under a soft cap.
    #[inline(always)]
    pub(super) fn is_special(self) -> bool {
        self.0 & Self::SPECIAL != 0
    }

    /// Whether some row does not see all of its keys.
    #[inline(always)]
    pub(super) fn is_border(self) -> bool {
        self.0 & Self::BORDER != 0
    }

    /// Whether it is the tile's last.
    #[inline(always)]
    pub(super) fn is_last(self) -> bool {
        self.0 & Self::LAST != 0
    }
}

/// Values at a border, as the loader tells the cleaners of them before it loads them.
#[derive(Clone, Copy)]
pub(super) struct Border {
    /// The turn of its values, as far as a ring's place needs it, and the last of the step's keys that some row sees.
    place: u32,
    /// The tile's.
    pub(super) round: u32,
}

impl Border {
    /// Behind the last one.
    pub(super) const END: Border = Border { place: u32::MAX, round: 0 };

    /// `last` is the last key that some row sees, counted from the step's first.
    #[inline(always)]
    pub(super) fn new<const KEYS: u32>(turn: Turn, last: u32, round: u32) -> Self {
        Border { place: (turn.0 % WGMMA_MAX_STAGES) << 16 | last.min(KEYS - 1), round }
    }

    /// # Safety
    /// - *exclusive*: the border so many before as there are stages has been cleaned, since a stage has been given back
    ///   behind it.
    #[inline(always)]
    pub(super) unsafe fn store(self, places: Places, turn: Turn) {
        // SAFETY: inside shared memory; the caller's promise.
        unsafe {
            shared::store_u32(places.border(turn), self.place);
            shared::store_u32(places.border(turn) + 4, self.round);
        }
    }

    /// # Safety
    /// - *initialised*: its values have come.
    #[inline(always)]
    pub(super) unsafe fn load(places: Places, turn: Turn) -> Self {
        // SAFETY: inside shared memory; the caller's promise.
        unsafe {
            let (place, round) =
                (shared::load_u32(places.border(turn)), shared::load_u32(places.border(turn) + 4));
            Border { place, round }
        }
    }

    #[inline(always)]
    pub(super) fn is_end(self) -> bool {
        self.place == Self::END.place
    }

    #[inline(always)]
    pub(super) fn turn(self) -> Turn {
        Turn(self.place >> 16)
    }

    /// How many keys of the step there are up to the last that some row sees.
    #[inline(always)]
    pub(super) fn keys(self) -> u32 {
        (self.place & 0xffff) + 1
    }
}

/// [`TileWords::of_masks`]: a tile without steps, one with steps, no tile any more.
const EMPTY: u32 = 0;
pub(super) const STEPS: u32 = 1;
pub(super) const END: u32 = 2;

/// A tile as the loader tells the others of it, before its q is loaded. They read it where they need it.
pub(super) struct TileWords {
    of_masks: [u32; 4],
    of_rows: [u32; 4],
    first_row: u32,
    number: u32,
}

impl TileWords {
    /// Behind the block's last tile.
    pub(super) const END: TileWords =
        TileWords { of_masks: [END, 0, 0, 0], of_rows: [0; 4], first_row: 0, number: 0 };

    #[inline(always)]
    pub(super) fn new(
        number: u32,
        tile: &Tile,
        has_steps: bool,
        tables: Tables,
        dims: &AttentionDims,
    ) -> Self {
        let Tile { batch, head, first_query, own, .. } = *tile;
        let (out_batch, first_row) = tile.out_place(tables, dims);
        let rows = own.seq_q.saturating_sub(first_query);
        TileWords {
            of_masks: [if has_steps { STEPS } else { EMPTY }, first_query, own.len as u32, own.ahead as u32],
            of_rows: [Blocks::place(batch, head, dims), head, out_batch, rows],
            first_row,
            number,
        }
    }

    /// # Safety
    /// - *exclusive*: the tile so many before has been done.
    #[inline(always)]
    pub(super) unsafe fn store(self, places: Places, round: u32) {
        // SAFETY: inside shared memory; the caller's promise.
        unsafe {
            shared::store_u32x4(places.tile(round), self.of_masks);
            shared::store_u32x4(places.tile(round) + 16, self.of_rows);
            shared::store_u32(places.tile(round) + 32, self.first_row);
            shared::store_u32(places.tile(round) + 36, self.number);
        }
    }

    /// [`STEPS`], [`END`] or neither; the first query; of its sequence `len` and `ahead`.
    ///
    /// # Safety
    /// - *initialised*: the tile's q has come, and the tile has not been given back.
    #[inline(always)]
    pub(super) unsafe fn of_masks(places: Places, round: u32) -> [u32; 4] {
        // SAFETY: inside shared memory; the caller's promise.
        unsafe { shared::load_u32x4(places.tile(round)) }
    }

    /// Where the block mask of the head begins, head, sequence of out, rows that there are from the first query on.
    ///
    /// # Safety
    /// - As for [`TileWords::of_masks`].
    #[inline(always)]
    pub(super) unsafe fn of_rows(places: Places, round: u32) -> [u32; 4] {
        // SAFETY: inside shared memory; the caller's promise.
        unsafe { shared::load_u32x4(places.tile(round) + 16) }
    }

    /// The first query's row among those of out.
    ///
    /// # Safety
    /// - As for [`TileWords::of_masks`].
    #[inline(always)]
    pub(super) unsafe fn first_row(places: Places, round: u32) -> u32 {
        // SAFETY: inside shared memory; the caller's promise.
        unsafe { shared::load_u32(places.tile(round) + 32) }
    }

    /// The tile's number.
    ///
    /// # Safety
    /// - As for [`TileWords::of_masks`].
    #[inline(always)]
    pub(super) unsafe fn number(places: Places, round: u32) -> u32 {
        // SAFETY: inside shared memory; the caller's promise.
        unsafe { shared::load_u32(places.tile(round) + 36) }
    }
}

impl Walk {
    /// `knows_blocks` is [`abi::ops::attention::wgmma_knows_blocks`].
    #[inline(always)]
    pub(super) fn new<const ROWS: u32>(
        tile: Tile,
        knows_blocks: bool,
        masks: Masks,
        dims: &AttentionDims,
    ) -> Self {
        let has_blocks = knows_blocks && has_blocks(dims);
        let blocks = Blocks::new(masks.blocks, tile.batch, tile.head, dims);
        let queries = [tile.first_query, (tile.first_query + ROWS).min(tile.own.seq_q).max(1) - 1];
        Walk { tile, has_blocks, blocks, queries }
    }

    /// The last step below `step` that has a key for some row, or `NONE`.
    ///
    /// # Safety
    /// - The block mask, if there is one, is *in-bounds* for `dims`.
    #[inline(always)]
    pub(super) unsafe fn below<const KEYS: u32>(&self, step: u32, dims: &AttentionDims) -> u32 {
        if self.has_blocks {
            let (start, end) = (self.tile.first * KEYS, (step * KEYS).min(self.tile.any.hi.max(0) as u32));
            // SAFETY: keys below `any.hi` are the sequence's — the caller.
            let last = unsafe { self.blocks.last(self.queries, start, end, dims) };
            if last > start { (last - 1) / KEYS } else { NONE }
        } else if step > self.tile.first {
            step - 1
        } else {
            NONE
        }
    }

    /// Whether some row does not see all keys of a step.
    ///
    /// # Safety
    /// - As for [`Walk::below`].
    #[inline(always)]
    pub(super) unsafe fn is_border<const KEYS: u32>(&self, step: u32, dims: &AttentionDims) -> bool {
        let (start, end) = (step * KEYS, (step + 1) * KEYS);
        self.tile.is_border::<KEYS>(step)
            // SAFETY: the step is below `all.hi` — the caller.
            || (self.has_blocks && unsafe { !self.blocks.all(self.queries, start, end, dims) })
    }

    /// Whether a row sees a key: with the masks of a kernel that is `MASKED`, and blocks that it knows.
    ///
    /// # Safety
    /// - As for [`Walk::below`], and of the masks the same; the key is one of the sequence's, the query one of the
    ///   tile's.
    #[inline(always)]
    pub(super) unsafe fn sees<T: Element, const MASKED: bool>(
        &self,
        query: u32,
        key: i32,
        masks: Masks,
        dims: &AttentionDims,
    ) -> bool {
        let Tile { batch, head, own, .. } = self.tile;
        let last = self.queries[1];
        if !own.visible(dims, query).has(key) {
            return false;
        }
        // SAFETY: the caller's promise.
        unsafe {
            if MASKED {
                masks.term::<T>([batch, head, query.min(last)], key as u32, dims).is_some()
            } else {
                !self.has_blocks || self.blocks.has(query.min(last), key as u32, dims)
            }
        }
    }
}

/// Where things lie in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Places {
    q: u32,
    q_bytes: u32,
    /// Places of q, less one. A mask, since a remainder has a check that changes the loader's registers, even where it
    /// is for nothing.
    q_mask: u32,
    pub(super) out: u32,
    k: u32,
    v: u32,
    k_bytes: u32,
    v_bytes: u32,
    /// Of k, and of v.
    stages_log2: u32,
    barriers: u32,
}

/// Borders have as many places as a ring of values at most.
const BORDERS_LOG2: u32 = WGMMA_MAX_STAGES.ilog2();
/// Behind the barriers of q's first place, and those of all stages.
const MARKS_AT: u32 = 16 + 8 * 5 * WGMMA_MAX_STAGES;
const STEPS_AT: u32 = MARKS_AT + MARKS * 12;
const TILES_AT: u32 = STEPS_AT + STEP_WORDS * 4;
const BORDERS_AT: u32 = TILES_AT + TILE_WORDS * 48;
const _: () = assert!(BORDERS_AT + WGMMA_MAX_STAGES * 8 + 16 == WGMMA_BARRIER_BYTES);

impl Places {
    #[inline(always)]
    pub(super) fn new<const DIM: u32, const DIM_V: u32, const KEYS: u32, const ROWS: u32>() -> Self {
        let q = shared::base();
        let (q_bytes, q_mask) = (ROWS * DIM * 2, wgmma_q_places(DIM) - 1);
        let q_end = q + (q_mask + 1) * q_bytes;
        let (out, k) = if wgmma_out_in_q(DIM) { (q, q_end) } else { (q_end, q_end + ROWS * DIM_V * 2) };
        let (k_bytes, v_bytes) = (KEYS * DIM * 2, KEYS * DIM_V * 2);
        let stages_log2 = wgmma_stages_log2(DIM);
        let v = k + (k_bytes << stages_log2);
        let barriers = v + (v_bytes << stages_log2);
        Places { q, q_bytes, q_mask, out, k, v, k_bytes, v_bytes, stages_log2, barriers }
    }

    #[inline(always)]
    pub(super) fn stage_k(self, turn: Turn) -> u32 {
        self.k + turn.place(self.stages_log2) * self.k_bytes
    }

    #[inline(always)]
    pub(super) fn stage_v(self, turn: Turn) -> u32 {
        self.v + turn.place(self.stages_log2) * self.v_bytes
    }

    /// A tile's q, in one of the places in turn.
    #[inline(always)]
    pub(super) fn q(self, round: u32) -> u32 {
        self.q + self.behind_q(round)
    }

    /// From the first place of q to a tile's.
    #[inline(always)]
    pub(super) fn behind_q(self, round: u32) -> u32 {
        (round & self.q_mask) * self.q_bytes
    }

    /// The barriers of the second place are behind all else.
    #[inline(always)]
    pub(super) fn full_q(self, round: u32) -> u32 {
        self.barriers + (round & self.q_mask) * (WGMMA_BARRIER_BYTES - 16)
    }

    #[inline(always)]
    pub(super) fn empty_q(self, round: u32) -> u32 {
        self.full_q(round) + 8
    }

    /// Of the tiles that have been in a tile's place of q, as it comes.
    #[inline(always)]
    pub(super) fn parity_q(self, round: u32) -> u32 {
        (round + self.q_mask) >> self.q_mask & 1 ^ 1
    }

    #[inline(always)]
    pub(super) fn full_k(self, turn: Turn) -> u32 {
        self.barriers + 16 + 8 * turn.place(self.stages_log2)
    }

    #[inline(always)]
    pub(super) fn empty_k(self, turn: Turn) -> u32 {
        self.barriers + 16 + 8 * (WGMMA_MAX_STAGES + turn.place(self.stages_log2))
    }

    #[inline(always)]
    pub(super) fn full_v(self, turn: Turn) -> u32 {
        self.barriers + 16 + 8 * (2 * WGMMA_MAX_STAGES + turn.place(self.stages_log2))
    }

    #[inline(always)]
    pub(super) fn empty_v(self, turn: Turn) -> u32 {
        self.barriers + 16 + 8 * (3 * WGMMA_MAX_STAGES + turn.place(self.stages_log2))
    }

    /// Of a step's round in the rings of k and v.
    #[inline(always)]
    pub(super) fn parity(self, turn: Turn) -> u32 {
        turn.parity(self.stages_log2)
    }

    /// Completed by loads of values that are still to be cleaned, in turns of their own.
    #[inline(always)]
    pub(super) fn raw_v(self, border: Turn) -> u32 {
        self.barriers + 16 + 8 * (4 * WGMMA_MAX_STAGES + border.place(BORDERS_LOG2))
    }

    #[inline(always)]
    pub(super) fn border_parity(self, border: Turn) -> u32 {
        border.parity(BORDERS_LOG2)
    }

    #[inline(always)]
    fn step(self, turn: Turn) -> u32 {
        self.barriers + STEPS_AT + turn.0 % STEP_WORDS * 4
    }

    #[inline(always)]
    fn tile(self, round: u32) -> u32 {
        self.barriers + TILES_AT + round % TILE_WORDS * 48
    }

    #[inline(always)]
    fn border(self, border: Turn) -> u32 {
        self.barriers + BORDERS_AT + border.place(BORDERS_LOG2) * 8
    }

    /// Where a warp of the cleaners notes the last tile of those numbers in which it found what is not finite.
    #[inline(always)]
    pub(super) fn mark(self, tile: u32, cleaner: u32) -> u32 {
        self.barriers + MARKS_AT + (tile % MARKS * 3 + cleaner) * 4
    }
}
