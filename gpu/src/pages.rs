//! A pool of pages from which kernels take and to which they give back, without the host.
//!
//! **Work split.** A warp does one operation on one sequence's table: all 32 lanes call with the same arguments.
//!
//! **Memory.** Bit `p` of `free` says that page `p` is free, and word `p` of `counts` how many tables hold it: exactly
//! one of the two is non-zero while no operation is under way. `header[AVAILABLE]` counts the free pages that are not
//! promised.
//!
//! **No lock.** A warp first takes what it needs off `AVAILABLE`, by one addition, and only then looks for the bits. A
//! bit is set before it is counted, so that as many bits as were promised are there: a claim fails only since another
//! one succeeded. A lane claims the bits of a word by one `and`.
//!
//! **Exhaustion.** A request that is not granted changes no page, count or table: `header[REFUSED]` counts it, and
//! `header[MISSING]` keeps the most pages that one lacked. Requests that are refused at the same moment may refuse one
//! another: each of them saw fewer pages than it asked for.
//!
//! **Compaction.** Between other operations, while none is under way, the pages that tables hold can be moved to the
//! lowest numbers, so that a pool can end earlier: [`PagePool::plan_moves`] by one block, which pairs each held page
//! beyond the number of those that are held with a free one below; [`PagePool::copy_moved`] for each memory that pages
//! are of; then [`PagePool::finish_moves`] and [`rewrite`] for the tables. Each is a kernel's, or separated from the
//! next by a barrier of all its threads.
//!
//! What bounds it: one addition to `AVAILABLE` per request, at one address, and an `and` per 32 pages.

use cuda_std::atomic::{self, Order};
use cuda_std::global;
use cuda_std::thread::{lane, sync_threads, thread_idx_x};
use cuda_std::warp::{self, FULL_MASK};

use crate::tile::scan::block_scan_u64;

/// Word of the header: free pages that are promised to nobody, as an i32, which requests under way can make negative.
pub const AVAILABLE: usize = 0;
/// Word of the header: requests that were not granted.
pub const REFUSED: usize = 1;
/// Word of the header: most pages that a request lacked.
pub const MISSING: usize = 2;
/// Word of the header: pages that [`PagePool::plan_moves`] has found to be moved.
pub const MOVES: usize = 3;
/// Words of the header.
pub const HEADER_WORDS: usize = 4;
/// Most pages of a pool: `AVAILABLE` is an i32, below zero by what requests under way ask for.
pub const MAX_PAGES: u32 = 1 << 30;

/// Where a pool's state is, all of it in global memory.
#[derive(Clone, Copy)]
pub struct PagePool {
    /// `HEADER_WORDS` words.
    pub header: *mut u32,
    /// A bit per page, `num_pages.div_ceil(32)` words: set where the page is free.
    pub free: *mut u32,
    /// A word per page: tables that hold it.
    pub counts: *mut u32,
    /// PagePool, at most [`MAX_PAGES`].
    pub num_pages: u32,
}

/// The sum of the lanes before this one, and that of all.
///
/// # Safety
/// - *converged*: all lanes of the warp.
#[inline(always)]
unsafe fn sums(value: u32) -> (u32, u32) {
    let mut sum = value;
    let mut delta = 1;
    while delta < 32 {
        // SAFETY: the caller's promise.
        let below = unsafe { warp::shuffle_up(FULL_MASK, sum, delta) };
        if lane() >= delta {
            sum += below;
        }
        delta *= 2;
    }
    // SAFETY: the caller's promise.
    (sum - value, unsafe { warp::shuffle_idx(FULL_MASK, sum, 31) })
}

/// The `count` lowest set bits of a word.
#[inline(always)]
fn lowest(word: u32, count: u32) -> u32 {
    if count >= word.count_ones() {
        return word;
    }
    let (mut rest, mut taken) = (word, 0);
    while taken < count {
        rest &= rest - 1;
        taken += 1;
    }
    word & !rest
}

/// # Safety of each operation
/// - *in-bounds*: the pointers are those of a pool that [`PagePool::initialise`] made in an earlier kernel.
/// - *converged*: all lanes of the warp call it with the same arguments.
/// - *exclusive*: no other warp touches the table that it is given; its entries were written by these operations.
impl PagePool {
    /// Makes all pages free. One of `num_threads` threads; ends before any operation starts.
    ///
    /// # Safety
    /// - *in-bounds*: as the fields say; *exclusive*: nothing else touches them during this kernel.
    #[inline(always)]
    pub unsafe fn initialise(self, thread: u32, num_threads: u32) {
        let mut page = thread;
        while page < self.num_pages {
            // SAFETY: a page of the pool, of this thread alone.
            unsafe { global::store(self.counts.add(page as usize), 0) };
            if page.is_multiple_of(32) {
                let left = self.num_pages - page;
                let word = if left < 32 { (1 << left) - 1 } else { u32::MAX };
                // SAFETY: the word of this page, of this thread alone.
                unsafe { global::store(self.free.add((page / 32) as usize), word) };
            }
            page += num_threads;
        }
        if thread == 0 {
            // SAFETY: the header's words, of this thread alone.
            unsafe {
                global::store(self.header.add(AVAILABLE), self.num_pages);
                global::store(self.header.add(REFUSED), 0);
                global::store(self.header.add(MISSING), 0);
                global::store(self.header.add(MOVES), 0);
            }
        }
    }

    /// Plans which pages are to be moved: `moves` gets pairs of a held page and the free one where it goes, and
    /// `header[MOVES]` their number, at most half of the pages. `map` gets the new number of every page, the same but
    /// for those.
    ///
    /// # Safety
    /// - *converged*: all threads of one block of 1024; `scratch` is the shared address of 256 bytes.
    /// - *in-bounds*: `moves` has a word for each page, `map` too.
    /// - *exclusive*: no operation is under way, nor are there kernels that hold pages in registers.
    #[inline(always)]
    pub unsafe fn plan_moves(self, moves: *mut u32, map: *mut u32, scratch: u32) {
        let thread = thread_idx_x();
        let words = self.num_pages.div_ceil(32);
        // Bits that are pages, and those of pages below a number.
        let below = |word: u32, number: u32| match number.saturating_sub(word * 32) {
            0 => 0,
            bits if bits >= 32 => u32::MAX,
            bits => (1 << bits) - 1,
        };
        // SAFETY: the header and the bitmap, which nobody changes meanwhile; each word is one thread's. Ranks are below
        // the numbers of holes and of pages to be moved, which are the same: as many held pages are beyond the number
        // of those that are held as free ones are below.
        unsafe {
            let held = self.num_pages - global::load(self.header.add(AVAILABLE).cast_const());
            let (mut holes, mut movers) = (0, 0);
            let mut first = 0;
            while first < words {
                let word = first + thread;
                let (mut free, mut taken) = (0, 0);
                if word < words {
                    let bits = global::load(self.free.add(word as usize).cast_const());
                    let low = below(word, held);
                    free = bits & low;
                    taken = !bits & !low & below(word, self.num_pages);
                }
                let both = u64::from(free.count_ones()) | u64::from(taken.count_ones()) << 32;
                let scan = block_scan_u64(both, scratch);
                let mut hole = holes + scan.before as u32;
                let mut mover = movers + (scan.before >> 32) as u32;
                let mut bit = 0;
                while bit < 32 {
                    let page = word * 32 + bit;
                    if free >> bit & 1 != 0 {
                        global::store(moves.add(2 * hole as usize + 1), page);
                        hole += 1;
                    }
                    if taken >> bit & 1 != 0 {
                        global::store(moves.add(2 * mover as usize), page);
                        mover += 1;
                    } else if word < words && page < self.num_pages {
                        global::store(map.add(page as usize), page);
                    }
                    bit += 1;
                }
                holes += scan.total as u32;
                movers += (scan.total >> 32) as u32;
                first += 1024;
            }
            sync_threads();
            let mut index = thread;
            while index < movers {
                let at = moves.add(2 * index as usize).cast_const();
                global::store(map.add(global::load(at) as usize), global::load(at.add(1)));
                index += 1024;
            }
            if thread == 0 {
                global::store(self.header.add(MOVES), movers);
            }
        }
    }

    /// Copies what the moved pages of one memory hold to where they go. One of `num_warps` warps, behind
    /// [`Self::plan_moves`].
    ///
    /// # Safety
    /// - *converged*: all lanes of the warp; *in-bounds*: `data` holds `16 * page_x16` bytes per page, aligned to 16;
    ///   `moves` is as it was planned. *exclusive*: nobody else touches the pages.
    #[inline(always)]
    pub unsafe fn copy_moved(
        self,
        moves: *const u32,
        data: *mut u32,
        page_x16: u32,
        (warp, num_warps): (u32, u32),
    ) {
        let words = page_x16 as usize * 4;
        // SAFETY: pages of the pool, each in one pair.
        unsafe {
            let count = global::load(self.header.add(MOVES).cast_const());
            let mut index = warp;
            while index < count {
                let pair = moves.add(2 * index as usize);
                let from = data.add(global::load(pair) as usize * words);
                let to = data.add(global::load(pair.add(1)) as usize * words);
                let mut at = lane();
                while at < page_x16 {
                    let value = global::load_x4(from.add(at as usize * 4).cast_const());
                    global::store_x4(to.add(at as usize * 4), value);
                    at += 32;
                }
                index += num_warps;
            }
        }
    }

    /// Makes the moved pages' old places free: behind all copies. One of `num_threads` threads.
    ///
    /// # Safety
    /// - *in-bounds*: `moves` is as it was planned; *exclusive*: nothing else touches the pool during this kernel.
    #[inline(always)]
    pub unsafe fn finish_moves(self, moves: *const u32, thread: u32, num_threads: u32) {
        // SAFETY: pages of the pool, each in one pair; bits by atomics, as pages of one word may be several threads'.
        unsafe {
            let count = global::load(self.header.add(MOVES).cast_const());
            let mut index = thread;
            while index < count {
                let pair = moves.add(2 * index as usize);
                let (from, to) = (global::load(pair), global::load(pair.add(1)));
                let holders = global::load(self.counts.add(from as usize).cast_const());
                global::store(self.counts.add(to as usize), holders);
                global::store(self.counts.add(from as usize), 0);
                atomic::or_u32(self.free.add((from / 32) as usize), 1 << (from % 32), Order::Relaxed);
                atomic::and_u32(self.free.add((to / 32) as usize), !(1 << (to % 32)), Order::Relaxed);
                index += num_threads;
            }
        }
    }

    /// Promises `count` pages to this warp: whether they are there. 0 and false change nothing but the status.
    #[inline(always)]
    unsafe fn reserve(self, count: u32) -> bool {
        if count == 0 {
            return true;
        }
        let mut granted = 0;
        if lane() == 0 {
            // SAFETY: the header is words that all access by atomics.
            unsafe {
                // More than there are is refused before it could make the sum wrap.
                let seen = atomic::load_u32(self.header.add(AVAILABLE), Order::Acquire) as i32;
                let mut before = seen;
                if count <= self.num_pages && seen >= count as i32 {
                    let minus = count.wrapping_neg();
                    before = atomic::add_u32(self.header.add(AVAILABLE), minus, Order::AcqRel) as i32;
                    if before >= count as i32 {
                        granted = 1;
                    } else {
                        atomic::add_u32(self.header.add(AVAILABLE), count, Order::AcqRel);
                    }
                }
                if granted == 0 {
                    let missing = count - before.max(0) as u32;
                    atomic::max_u32(self.header.add(MISSING), missing, Order::Relaxed);
                    atomic::add_u32(self.header.add(REFUSED), 1, Order::Relaxed);
                }
            }
        }
        // SAFETY: all lanes are here.
        unsafe { warp::shuffle_idx(FULL_MASK, granted, 0) != 0 }
    }

    /// Writes `count` pages that were promised to `table`, each held once. `start` spreads the warps over the words.
    #[inline(always)]
    unsafe fn claim(self, table: *mut u32, count: u32, start: u32) {
        let words = self.num_pages.div_ceil(32);
        let mut done = 0;
        let hash = start.wrapping_mul(0x9e37_79b1);
        let mut first = ((u64::from(hash) * u64::from(words)) >> 32) as u32;
        while done < count {
            // Lanes of one round look at words of their own.
            let mut word = first + lane();
            if word >= words {
                word -= words;
            }
            let has_word = lane() < words && word < words;
            let mut seen = 0;
            if has_word {
                // SAFETY: a word of the bitmap, which all access by atomics.
                seen = unsafe { atomic::load_u32(self.free.add(word as usize), Order::Relaxed) };
            }
            // SAFETY: all lanes are here, as in every round: `done` is the same for all.
            let (before, _) = unsafe { sums(seen.count_ones()) };
            let wanted = lowest(seen, (count - done).saturating_sub(before));
            let mut claimed = 0;
            if wanted != 0 {
                // SAFETY: as above.
                claimed =
                    wanted & unsafe { atomic::and_u32(self.free.add(word as usize), !wanted, Order::AcqRel) };
            }
            // SAFETY: all lanes are here.
            let (before, all) = unsafe { sums(claimed.count_ones()) };
            let mut entry = (done + before) as usize;
            while claimed != 0 {
                let page = word * 32 + claimed.trailing_zeros();
                claimed &= claimed - 1;
                // SAFETY: the page is this lane's since the `and`; the table has room for `count` entries.
                unsafe {
                    atomic::store_u32(self.counts.add(page as usize), 1, Order::Relaxed);
                    global::store(table.add(entry), page);
                }
                entry += 1;
            }
            done += all;
            first += 32;
            if first >= words {
                first = 0;
            }
        }
        // SAFETY: all lanes are here. Whoever reads the table next sees all of it.
        unsafe { warp::sync_warp(FULL_MASK) };
    }

    /// Lengthens a table of `held` pages to `needed`: whether the pages were there. If not, nothing has changed. A
    /// table that is long enough stays as it is.
    ///
    /// # Safety
    /// - as for each operation; `table` has room for `needed` entries.
    #[inline(always)]
    pub unsafe fn extend(self, table: *mut u32, held: u32, needed: u32, start: u32) -> bool {
        let count = needed.saturating_sub(held);
        // SAFETY: the caller's promises; what is claimed has been promised.
        unsafe {
            if !self.reserve(count) {
                return false;
            }
            self.claim(table.add(held as usize), count, start);
        }
        true
    }

    /// A second table of the same pages, each held once more.
    ///
    /// # Safety
    /// - as for each operation, for both tables; `into` has room for `held` entries.
    #[inline(always)]
    pub unsafe fn fork(self, table: *const u32, into: *mut u32, held: u32) {
        let mut entry = lane();
        while entry < held {
            // SAFETY: entries of both tables; the page is held by the first, so that nobody frees it meanwhile.
            unsafe {
                let page = global::load(table.add(entry as usize));
                atomic::add_u32(self.counts.add(page as usize), 1, Order::Relaxed);
                global::store(into.add(entry as usize), page);
            }
            entry += 32;
        }
        // SAFETY: all lanes are here.
        unsafe { warp::sync_warp(FULL_MASK) };
    }

    /// Gives a table's pages up: those that no other table holds are free. The table's entries mean nothing after it.
    ///
    /// # Safety
    /// - as for each operation.
    #[inline(always)]
    pub unsafe fn release(self, table: *const u32, held: u32) {
        // SAFETY: all lanes are here. What any lane did with the pages comes before they are free.
        unsafe { warp::sync_warp(FULL_MASK) };
        let mut freed = 0;
        let mut entry = lane();
        while entry < held {
            // SAFETY: an entry of the table, which holds its page until here.
            unsafe {
                let page = global::load(table.add(entry as usize));
                let minus_one = u32::MAX;
                if atomic::add_u32(self.counts.add(page as usize), minus_one, Order::AcqRel) == 1 {
                    atomic::or_u32(self.free.add((page / 32) as usize), 1 << (page % 32), Order::AcqRel);
                    freed += 1;
                }
            }
            entry += 32;
        }
        // SAFETY: all lanes are here: every bit is set before it is counted.
        unsafe {
            warp::sync_warp(FULL_MASK);
            let (_, all) = sums(freed);
            if lane() == 0 && all != 0 {
                atomic::add_u32(self.header.add(AVAILABLE), all, Order::AcqRel);
            }
        }
    }

    /// Makes the page of one entry this table's alone, so that it can be written: a page that others hold too is
    /// copied. Whether that was possible; if not, nothing has changed.
    ///
    /// # Safety
    /// - as for each operation; `data` holds `16 * page_x16` bytes per page, aligned to 16, and nobody writes a page
    ///   that more than one table holds.
    #[inline(always)]
    pub unsafe fn unshare(self, entry: *mut u32, data: *mut u32, page_x16: u32, start: u32) -> bool {
        // SAFETY: the table's entry, and its page, which it holds.
        unsafe {
            let old = global::load(entry);
            let mut count = 0;
            if lane() == 0 {
                count = atomic::load_u32(self.counts.add(old as usize), Order::Acquire);
            }
            count = warp::shuffle_idx(FULL_MASK, count, 0);
            warp::sync_warp(FULL_MASK);
            if count == 1 {
                return true;
            }
            if !self.reserve(1) {
                return false;
            }
            self.claim(entry, 1, start);
            let new = global::load(entry);
            let words = page_x16 as usize * 4;
            let (from, to) = (data.add(old as usize * words), data.add(new as usize * words));
            let mut at = lane();
            while at < page_x16 {
                let value = global::load_x4(from.add(at as usize * 4));
                global::store_x4(to.add(at as usize * 4), value);
                at += 32;
            }
            // The last of those that copied it at the same time frees it.
            warp::sync_warp(FULL_MASK);
            if lane() == 0 && atomic::add_u32(self.counts.add(old as usize), u32::MAX, Order::AcqRel) == 1 {
                atomic::or_u32(self.free.add((old / 32) as usize), 1 << (old % 32), Order::AcqRel);
                atomic::add_u32(self.header.add(AVAILABLE), 1, Order::AcqRel);
            }
            warp::sync_warp(FULL_MASK);
        }
        true
    }
}

/// Gives a table's entries the numbers that their pages have behind a compaction. One warp of its own.
///
/// # Safety
/// - *converged*: all lanes of the warp; *in-bounds*: `held` entries, which are pages of the pool that `map` was
///   planned for.
/// - *exclusive*: no other warp touches the table.
#[inline(always)]
pub unsafe fn rewrite(table: *mut u32, held: u32, map: *const u32) {
    let mut entry = lane();
    while entry < held {
        // SAFETY: the caller's promise.
        unsafe {
            let page = global::load(table.add(entry as usize).cast_const());
            global::store(table.add(entry as usize), global::load(map.add(page as usize)));
        }
        entry += 32;
    }
    // SAFETY: all lanes are here.
    unsafe { warp::sync_warp(FULL_MASK) };
}
