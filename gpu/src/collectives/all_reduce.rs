//! Sums over the ranks of a group, in place: `x = Σ_r x_r`, through memory that all ranks access.
//!
//! **Work split.** Block b of every rank works with block b of the others and with no other block. It has a stretch of
//! x of its own, in pieces of 16 bytes, and goes through it by as much as a slot holds. All ranks launch the same grid.
//!
//! **Phases.** A phase is: the block fills its own slot, tells all ranks (a word in each rank's exchange), waits until
//! all have told it, and reads their slots. A thread does the telling and the waiting for each rank.
//!
//! ```text
//! one-shot   x → own slot   ⇄   sum of all slots → x
//! two-shot   x → own slot   ⇄   sum of all slots' own part → own slot, x   ⇄   the others' parts → x
//! ```
//!
//! **Two slots in turn** are enough, without a barrier at a phase's end. Slot p mod 2 is filled for phase p and again
//! for phase p + 2. In between the block has waited for all ranks' word of phase p + 1; each rank gave it after it had
//! read the slots of phase p, which a block's barrier and the release put before the word. One slot would not be
//! enough: it would be filled for phase p + 1 while slower ranks still read phase p.
//!
//! **The count of phases** goes on from launch to launch. It is in device memory and counted by the block itself, so a
//! recorded launch can be replayed. All ranks make the same calls, so block b has the same count at each; between
//! blocks counts differ, which is why no block touches another's slots.
//!
//! **Giving up.** A block whose like does not come within a time stops: it says so in the status, which the host reads,
//! and in its exchange, by which later launches that have to wait give up at once. What x holds is then nobody's sum.
//!
//! Sums are in f32, in the order of the ranks, rounded once; of the two-shot kernel each is made by one rank. So all
//! ranks get the same bits.
//!
//! What bounds it: for few bytes the way of a word to the peers and back, for many what the links carry. Threads have
//! pieces of all ranks in flight, several for few ranks. Kernels ahead have ended when it begins (`#[kernel]`), which
//! is what serialises the calls of a rank.

use abi::collectives::all_reduce::{
    AllReduceDims, CONTROL_BYTES, COUNTER_BYTES, GIVEN_UP_BYTES, MAX_RANKS, THREADS, slot_at,
};
use cuda_std::atomic::{self, Order};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, shared, thread};

/// Looks at a word between two looks at the clock.
const LOOKS: u32 = 64;

/// A block's ways to its like at the other ranks.
#[derive(Clone, Copy)]
struct Links<'a, const RANKS: usize> {
    exchanges: [*mut u8; RANKS],
    status: *mut u32,
    dims: &'a AllReduceDims,
}

impl<const RANKS: usize> Links<'_, RANKS> {
    /// The exchange of a rank, of which the compiler need not know which it is: an index would put them into memory.
    #[inline(always)]
    fn exchange(&self, rank: u32) -> *mut u8 {
        let mut found = self.exchanges[0];
        let mut r = 1;
        while r < RANKS {
            if rank == r as u32 {
                found = self.exchanges[r];
            }
            r += 1;
        }
        found
    }

    /// The word by which `from` tells `to`.
    #[inline(always)]
    fn word(&self, to: u32, from: u32) -> *mut u32 {
        let at = thread::block_idx_x() * CONTROL_BYTES + from * 4;
        self.exchange(to).wrapping_add(at as usize).cast()
    }

    #[inline(always)]
    fn counter(&self) -> *mut u32 {
        let at = thread::block_idx_x() * CONTROL_BYTES + COUNTER_BYTES;
        self.exchange(self.dims.rank).wrapping_add(at as usize).cast()
    }

    /// Where a piece is in the slot of a phase, from the beginning of an exchange.
    #[inline(always)]
    fn at(&self, phase: u32, piece: u32) -> usize {
        (slot_at(thread::block_idx_x(), phase & 1, self.dims.slot_bytes) + 16 * u64::from(piece)) as usize
    }

    /// Tells all ranks of a phase and waits until all have told this one: whether they have.
    ///
    /// What the block did before is visible to the other ranks' blocks after it, and theirs to this one.
    ///
    /// # Safety
    /// - *converged*: all threads of the block. The word of shared memory is 0 until a thread gives up — `sum`.
    /// - *in-bounds*: the exchanges of `dims.size` ranks.
    #[inline(always)]
    unsafe fn meet(&self, phase: u32) -> bool {
        let AllReduceDims { rank, size, timeout_ns, .. } = *self.dims;
        let peer = thread::thread_idx_x();
        // SAFETY: all threads are at both barriers. The words lie in the exchanges' controls, which all access by
        // atomics alone, as `given_up` and the status.
        unsafe {
            thread::sync_threads();
            if peer < size {
                atomic::store_release_system_u32(self.word(peer, rank), phase);
                let given_up = self.exchange(rank).wrapping_add(GIVEN_UP_BYTES as usize).cast::<u32>();
                let (mut looks, mut start) = (0, 0);
                // Others may be a phase ahead; counts wrap.
                while (atomic::load_acquire_system_u32(self.word(rank, peer)).wrapping_sub(phase) as i32) < 0
                {
                    looks += 1;
                    if looks % LOOKS == 0 {
                        let now = thread::global_timer_ns();
                        if looks == LOOKS {
                            start = now;
                        }
                        if now.wrapping_sub(start) > timeout_ns
                            || atomic::load_u32(given_up, Order::Relaxed) != 0
                        {
                            atomic::store_u32(given_up, 1, Order::Relaxed);
                            atomic::store_release_system_u32(self.status, 1 + peer);
                            shared::add_u32(shared::base(), 1);
                            break;
                        }
                    }
                }
            }
            thread::sync_threads();
            shared::load_u32(shared::base()) == 0
        }
    }
}

/// A piece of x; 0 beyond its end.
///
/// # Safety
/// - *in-bounds*: `dims.len` elements; with `dims.is_aligned` *aligned(16)*.
#[inline(always)]
unsafe fn load_piece<T: Element>(x: *const T, piece: u64, dims: &AllReduceDims) -> [u32; 4] {
    let first = piece * T::PER_16_BYTES as u64;
    let element = x.wrapping_add(first as usize);
    // SAFETY: what is read lies below `len`.
    unsafe {
        if dims.is_aligned != 0 && first + T::PER_16_BYTES as u64 <= dims.len {
            return global::load_x4(element);
        }
        let mut words = [0; 4];
        let mut k = 0;
        while k < T::PER_16_BYTES {
            if first + (k as u64) < dims.len {
                if const { size_of::<T>() == 4 } {
                    words[k] = global::load(element.wrapping_add(k).cast::<u32>());
                } else {
                    let bits = global::load(element.wrapping_add(k).cast::<u16>());
                    words[k / 2] |= u32::from(bits) << (k % 2 * 16);
                }
            }
            k += 1;
        }
        words
    }
}

/// Writes a piece of x; what is beyond its end is dropped.
///
/// # Safety
/// - As [`load_piece`], and *exclusive*.
#[inline(always)]
unsafe fn store_piece<T: Element>(x: *mut T, piece: u64, words: [u32; 4], dims: &AllReduceDims) {
    let first = piece * T::PER_16_BYTES as u64;
    let element = x.wrapping_add(first as usize);
    // SAFETY: what is written lies below `len`.
    unsafe {
        if dims.is_aligned != 0 && first + T::PER_16_BYTES as u64 <= dims.len {
            return global::store_x4(element, words);
        }
        let mut k = 0;
        while k < T::PER_16_BYTES {
            if first + (k as u64) < dims.len {
                if const { size_of::<T>() == 4 } {
                    global::store(element.wrapping_add(k).cast::<u32>(), words[k]);
                } else {
                    let bits = (words[k / 2] >> (k % 2 * 16)) as u16;
                    global::store(element.wrapping_add(k).cast::<u16>(), bits);
                }
            }
            k += 1;
        }
    }
}

/// The sum of `size` pieces, in their order.
#[inline(always)]
fn sum_of<T: Element, const RANKS: usize>(pieces: &[[u32; 4]; RANKS], size: u32) -> [u32; 4] {
    let mut sums = [0.0; 8];
    T::unpack(pieces[0], &mut sums);
    let mut r = 1;
    while r < RANKS {
        if (r as u32) < size {
            let mut values = [0.0; 8];
            T::unpack(pieces[r], &mut values);
            let mut k = 0;
            while k < T::PER_16_BYTES {
                sums[k] += values[k];
                k += 1;
            }
        }
        r += 1;
    }
    T::pack(&sums)
}

/// What is done with a sum: `(piece of the slot, words)`.
///
/// # Safety
/// - *converged*: all threads of the block, between two meetings; the slots of `phase` are filled for these pieces.
#[inline(always)]
unsafe fn sum_slots<T: Element, const RANKS: usize, const PIECES: usize>(
    links: &Links<'_, RANKS>,
    phase: u32,
    pieces: core::ops::Range<u32>,
    done: impl Fn(u32, [u32; 4]),
) {
    let size = links.dims.size;
    let mut first = pieces.start + thread::thread_idx_x();
    while first < pieces.end {
        let mut held = [[[0; 4]; RANKS]; PIECES];
        let mut i = 0;
        while i < PIECES {
            let piece = first + i as u32 * THREADS;
            if piece < pieces.end {
                let at = links.at(phase, piece);
                let mut r = 0;
                while r < RANKS {
                    if (r as u32) < size {
                        // SAFETY: a piece of a slot, which all blocks of this index have filled and none writes before
                        // the next meeting — the caller.
                        held[i][r] = unsafe { global::load_x4(links.exchanges[r].wrapping_add(at)) };
                    }
                    r += 1;
                }
            }
            i += 1;
        }
        let mut i = 0;
        while i < PIECES {
            let piece = first + i as u32 * THREADS;
            if piece < pieces.end {
                done(piece, sum_of::<T, RANKS>(&held[i], size));
            }
            i += 1;
        }
        first += PIECES as u32 * THREADS;
    }
}

/// The part of a rank of so many pieces.
#[inline(always)]
fn part_of(rank: u32, pieces: u32, size: u32) -> core::ops::Range<u32> {
    // At least 1; `max` tells the compiler, which would otherwise keep a panic path.
    let each = pieces.div_ceil(size.max(1));
    let start = rank * each;
    let start = if start < pieces { start } else { pieces };
    let end = start + each;
    start..if end < pieces { end } else { pieces }
}

/// Sums x over the ranks.
///
/// # Safety
/// - All threads of a grid with `SMEM_BYTES` of shared memory per block, the same grid at all ranks, of at most
///   `MAX_BLOCKS` blocks, of which block b has the pieces from `b · block_pieces` on.
/// - *in-bounds*: x of `dims.len` elements, with `dims.is_aligned` *aligned(16)*; the exchanges of `dims.size` ranks,
///   at most RANKS, *aligned(16)*, of `exchange_bytes(dims.slot_bytes)` bytes, set to 0 before the first launch; the
///   status, which is a word of memory of this device or of the host.
/// - *exclusive*: x; and of the exchanges all but these launches, of which a rank's come one after the other.
#[inline(always)]
unsafe fn sum<T: Element, const RANKS: usize, const PIECES: usize, const TWO_SHOT: bool>(
    x: *mut T,
    links: &Links<'_, RANKS>,
) {
    let dims = links.dims;
    let own = links.exchange(dims.rank);
    let own_thread = thread::thread_idx_x();
    let all_pieces = dims.len.div_ceil(T::PER_16_BYTES as u64);
    let mut first = u64::from(thread::block_idx_x()) * dims.block_pieces;
    let end = if first + dims.block_pieces < all_pieces { first + dims.block_pieces } else { all_pieces };
    // SAFETY: `piece < pieces` keeps what is read and written of x inside this block's stretch, which is below `len`,
    // and of the slots inside them. A thread reads x before the first meeting of a step and writes it after, and each
    // piece of a slot is written by one thread — the module says when. The counter is this block's alone, read before
    // a barrier and written after it.
    unsafe {
        let before = global::load(links.counter());
        let mut phase = before;
        if own_thread == 0 {
            // The first meeting's barrier comes before anyone adds to it.
            shared::store_u32(shared::base(), 0);
        }
        let slot_pieces = u64::from(dims.slot_bytes / 16);
        while first < end {
            let left = end - first;
            let pieces = if left < slot_pieces { left } else { slot_pieces } as u32;
            phase = phase.wrapping_add(1);
            let mut next = own_thread;
            while next < pieces {
                let mut held = [[0; 4]; PIECES];
                let mut i = 0;
                while i < PIECES {
                    let piece = next + i as u32 * THREADS;
                    if piece < pieces {
                        held[i] = load_piece(x, first + u64::from(piece), dims);
                    }
                    i += 1;
                }
                let mut i = 0;
                while i < PIECES {
                    let piece = next + i as u32 * THREADS;
                    if piece < pieces {
                        global::store_x4(own.wrapping_add(links.at(phase, piece)), held[i]);
                    }
                    i += 1;
                }
                next += PIECES as u32 * THREADS;
            }
            if !links.meet(phase) {
                return;
            }
            let part = if TWO_SHOT { part_of(dims.rank, pieces, dims.size) } else { 0..pieces };
            sum_slots::<T, RANKS, PIECES>(links, phase, part, |piece, words| {
                store_piece(x, first + u64::from(piece), words, dims);
                if TWO_SHOT {
                    global::store_x4(own.wrapping_add(links.at(phase.wrapping_add(1), piece)), words);
                }
            });
            if TWO_SHOT {
                phase = phase.wrapping_add(1);
                if !links.meet(phase) {
                    return;
                }
                // Each rank begins with another one's part, so that not all of them ask one link.
                let mut turn = 1;
                while turn < dims.size {
                    let rank = dims.rank + turn;
                    let rank = if rank < dims.size { rank } else { rank - dims.size };
                    let (part, sums) = (part_of(rank, pieces, dims.size), links.exchange(rank));
                    let mut next = part.start + own_thread;
                    while next < part.end {
                        let mut held = [[0; 4]; PIECES];
                        let mut i = 0;
                        while i < PIECES {
                            let piece = next + i as u32 * THREADS;
                            if piece < part.end {
                                held[i] = global::load_x4(sums.wrapping_add(links.at(phase, piece)));
                            }
                            i += 1;
                        }
                        let mut i = 0;
                        while i < PIECES {
                            let piece = next + i as u32 * THREADS;
                            if piece < part.end {
                                store_piece(x, first + u64::from(piece), held[i], dims);
                            }
                            i += 1;
                        }
                        next += PIECES as u32 * THREADS;
                    }
                    turn += 1;
                }
            }
            first += u64::from(pieces);
        }
        // Without work there was no barrier, and there is nothing to count.
        if own_thread == 0 && phase != before {
            global::store(links.counter(), phase);
        }
    }
}

macro_rules! exchanges {
    (2, $all:ident) => {
        [$all[0], $all[1]]
    };
    (8, $all:ident) => {
        $all
    };
}

macro_rules! is_two_shot {
    (One) => {
        false
    };
    (Two) => {
        true
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $shots:ident, $ranks:tt, $pieces:literal;)*) => {$(
        /// Entry point; see the module and `abi::collectives::all_reduce`. The exchanges of ranks that there are not
        /// may be anything.
        ///
        /// # Safety
        /// - Arguments as `host::group` makes them.
        #[kernel(max_threads = 512)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            x: *mut $type,
            exchange0: *mut u8,
            exchange1: *mut u8,
            exchange2: *mut u8,
            exchange3: *mut u8,
            exchange4: *mut u8,
            exchange5: *mut u8,
            exchange6: *mut u8,
            exchange7: *mut u8,
            status: *mut u32,
            dims: AllReduceDims,
        ) {
            let all: [*mut u8; MAX_RANKS] = [
                exchange0, exchange1, exchange2, exchange3, exchange4, exchange5, exchange6, exchange7,
            ];
            let links = Links { exchanges: exchanges!($ranks, all), status, dims: &dims };
            // SAFETY: arguments as the body asks, by `host::group`.
            unsafe { sum::<$type, $ranks, $pieces, { is_two_shot!($shots) }>(x, &links) }
        }
    )*};
}
abi::all_reduce_table!(entries);
