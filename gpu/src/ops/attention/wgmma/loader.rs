//! The thread that feeds a block: tiles, their q, and keys and values step by step.

use abi::ops::attention::{AttentionDims, wgmma_knows_blocks};
use cuda_std::tma::TensorMap;
use cuda_std::{mbarrier, thread, tma};

use super::super::scores::Masks;
use super::super::tile::Tile;
use super::super::{Pages, Tables};
use super::walk::{Border, NONE, Places, Step, TileWords, Tiles, Turn, Walk};
use super::{CLEANER_WARPS, Maps, ROW_BYTES};

/// The thread that loads.
///
/// # Safety
/// - One thread; the rest is the caller's promise to [`super::tiles`].
#[inline(always)]
pub(super) unsafe fn load<
    const DIM: u32,
    const DIM_V: u32,
    const KEYS: u32,
    const ROWS: u32,
    const EARLY: bool,
    const MASKED: bool,
    const SPLIT: bool,
>(
    maps: Maps,
    places: Places,
    tables: Tables,
    masks: Masks,
    counter: *mut u32,
    dims: &AttentionDims,
) {
    // Steps, and in the three lowest bits borders, of which no more is asked: in one register.
    let mut counts = 0;
    let mut tiles = Tiles::<EARLY, SPLIT>::NEW;
    // SAFETY: a stage is loaded when all consumers have given it back.
    unsafe {
        while let Some(number) = tiles.next(counter, dims) {
            let walk = Walk::new::<ROWS>(
                Tile::new::<KEYS, ROWS, SPLIT>(number, dims.sequences, tables, dims),
                wgmma_knows_blocks(ROWS / 64, DIM_V),
                masks,
                dims,
            );
            let tile = &walk.tile;
            let batch = if tables.q_offsets.is_null() { tile.batch as i32 } else { 0 };
            let pages = Pages::new(tables, dims, tile.batch);
            // The last key that some row sees, opaque, or the one behind it would have a register too.
            let last = thread::opaque((tile.any.hi - 1) as u32);
            let mut next = walk.below::<KEYS>(tile.end, dims);
            tiles.draw(counter, next == NONE);
            // Opaque, or places would be computed before the tile is.
            let round = thread::opaque(tiles.round);
            mbarrier::wait_parity(places.empty_q(round), places.parity_q(round) ^ 1);
            TileWords::new(number, tile, next != NONE, tables, dims).store(places, round);
            mbarrier::arrive_expect_tx(places.full_q(round), ROWS * DIM * 2);
            let mut col = 0;
            while col < DIM / 64 {
                let at = places.q(round) + col * ROWS * ROW_BYTES;
                let query = (tile.own.first_q + tile.first_query) as i32;
                let from = [(64 * col) as i32, query, tile.head as i32, batch];
                tma::load(at, maps.q, from, places.full_q(round));
                col += 1;
            }
            // Keys of a step come before the values of the one before it: their place is the first to be free, and they
            // are wanted first.
            let mut has_keys = false;
            loop {
                let goes_on = next != NONE;
                if goes_on {
                    let index = next;
                    // Opaque, or the step would be kept to ask by it whether there is a next one.
                    next = thread::opaque(walk.below::<KEYS>(index, dims));
                    let step = Step::new(index, walk.is_border::<KEYS>(index, dims), next == NONE, dims);
                    let turn = Turn(counts / 8);
                    let full = places.full_k(turn);
                    mbarrier::wait_parity(places.empty_k(turn), places.parity(turn) ^ 1);
                    step.store(places, turn);
                    counts += 8;
                    mbarrier::arrive_expect_tx(full, KEYS * DIM * 2);
                    let (at, from) = (places.stage_k(turn), [index * KEYS, last]);
                    load_rows::<DIM, KEYS>(maps.k, at, full, tile.head_kv, from, pages, dims);
                }
                if has_keys {
                    // Now, because the wait for v's place is the longest. Not in all kernels: others have no register
                    // for it.
                    tiles.draw(counter, !goes_on);
                    let turn = Turn(counts / 8 - 1 - u32::from(goes_on));
                    let loaded = Step::load(places, turn);
                    let mut full = places.full_v(turn);
                    mbarrier::wait_parity(places.empty_v(turn), places.parity(turn) ^ 1);
                    let first = loaded.index() * KEYS;
                    // With a mask of one's own any row may not see any key.
                    if MASKED || loaded.is_border() {
                        let border = Turn(counts % 8);
                        Border::new::<KEYS>(turn, last - first, tiles.round).store(places, border);
                        full = places.raw_v(border);
                        counts = counts & !7 | (counts + 1) & 7;
                    } else {
                        // What is not cleaned lacks the cleaners' arrivals, but for one, which tells the bytes.
                        let mut others = 1;
                        while others < CLEANER_WARPS {
                            mbarrier::arrive(full);
                            others += 1;
                        }
                    }
                    mbarrier::arrive_expect_tx(full, KEYS * DIM_V * 2);
                    let at = places.stage_v(turn);
                    load_rows::<DIM_V, KEYS>(maps.v, at, full, tile.head_kv, [first, last], pages, dims);
                }
                if !goes_on {
                    break;
                }
                has_keys = true;
            }
        }
        mbarrier::wait_parity(places.empty_q(tiles.round), places.parity_q(tiles.round) ^ 1);
        TileWords::END.store(places, tiles.round);
        mbarrier::arrive(places.full_q(tiles.round));
        // As before one more border.
        let (turn, border) = (Turn(counts / 8), Turn(counts % 8));
        mbarrier::wait_parity(places.empty_v(turn), places.parity(turn) ^ 1);
        Border::END.store(places, border);
        mbarrier::arrive(places.raw_v(border));
    }
}

/// Loads a step of k or v from its first key on, box by box. A page beyond the last key that is seen is not looked up:
/// another comes in its place, whose rows are masked as those of the last page are.
///
/// # Safety
/// - One thread; the stage is free, and the barrier expects it.
#[inline(always)]
unsafe fn load_rows<const WIDTH: u32, const KEYS: u32>(
    map: *const TensorMap,
    stage: u32,
    full: u32,
    head: u32,
    [first, last]: [u32; 2],
    pages: Pages,
    dims: &AttentionDims,
) {
    let mut row = 0;
    while row < KEYS {
        let key = (first + row) as i32;
        // SAFETY: a key of the sequence; the box lies inside the stage.
        unsafe {
            let page = pages.page(dims, key.min(last as i32));
            let mut col = 0;
            while col < WIDTH / 64 {
                let token = pages.row_in_page(dims, key) as i32;
                let from = [(64 * col) as i32, token, head as i32, page as i32];
                tma::load(stage + (col * KEYS + row) * ROW_BYTES, map, from, full);
                col += 1;
            }
        }
        row += dims.box_keys;
    }
}
