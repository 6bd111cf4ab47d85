//! The pool of pages of `gpu`, with all warps of a grid at once.

use cuda_std::atomic::{self, Order};
use cuda_std::{global, kernel, thread};
use gpu::pages::{HEADER_WORDS, PagePool};

/// Entries of a warp's table.
pub const ROOM: u32 = 64;

/// Where the parts of the output begin, in words: header, bitmap, counts, what was wrong, owners, and the warps'
/// tables.
#[derive(Clone, Copy)]
pub struct Places {
    /// The bitmap of free pages.
    pub free: u32,
    /// A count for each page.
    pub counts: u32,
    /// Pages that were two warps' at once.
    pub wrong: u32,
    /// Pages that were granted.
    pub granted: u32,
    /// A word for each page: who has it.
    pub owners: u32,
    /// `ROOM` words for each warp.
    pub tables: u32,
}

/// Those of so many pages.
pub const fn places(pages: u32) -> Places {
    let free = HEADER_WORDS as u32;
    let counts = free + pages.div_ceil(32);
    let wrong = counts + pages;
    Places { free, counts, wrong, granted: wrong + 1, owners: wrong + 2, tables: wrong + 2 + pages }
}

/// Each warp takes 1 to 64 pages, finds them nobody's, makes them its own, and gives them back; again and again. The
/// input is the number of pages and of rounds; with the parameter 1 nobody looks at owners, which is for times.
///
/// # Safety
/// - See the crate: the output is as [`places`] says, all pages free, with a table for each warp.
#[kernel]
pub unsafe fn probe_pages(input: *const u32, output: *mut u32, _: *const u64, parameter: u32) {
    // SAFETY: the parts of the output, of which a warp touches its own table alone, and all else by atomics.
    unsafe {
        let (pages, rounds) = (global::load(input), global::load(input.add(1)));
        let places = places(pages);
        let part = |at: u32| output.add(at as usize);
        let (free, counts) = (part(places.free), part(places.counts));
        let pool = PagePool { header: output, free, counts, num_pages: pages };
        let warp = thread::block_idx_x() * (thread::block_dim_x() / 32) + thread::warp_idx();
        let table = part(places.tables + ROOM * warp);
        let mut granted = 0;
        let mut round = 0;
        while round < rounds {
            let size = (warp.wrapping_mul(7) + round.wrapping_mul(13)) % ROOM + 1;
            if pool.extend(table, 0, size, warp.wrapping_mul(31) + round) {
                let set = |from: u32, to: u32| {
                    let mut entry = thread::lane();
                    while entry < size {
                        let page = global::load(table.add(entry as usize).cast_const());
                        let owner = part(places.owners + page);
                        if atomic::exchange_u32(owner, to, Order::Relaxed) != from {
                            atomic::add_u32(part(places.wrong), 1, Order::Relaxed);
                        }
                        entry += 32;
                    }
                };
                if parameter == 0 {
                    set(0, warp + 1);
                    set(warp + 1, 0);
                }
                pool.release(table, size);
                granted += size;
            }
            round += 1;
        }
        if thread::lane() == 0 {
            atomic::add_u32(part(places.granted), granted, Order::Relaxed);
        }
    }
}
