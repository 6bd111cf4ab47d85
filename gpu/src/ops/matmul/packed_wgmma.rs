//! Products of dozens of rows with a packed weight on Hopper: the weight's codes are `wgmma`'s first operand, from
//! registers.
//!
//! ```text
//! producers  four warps, a tile of 64 of k each in turn: a's rows ── 16 bytes a load ──► registers ── pairs in the
//!            products' order, in the 128-byte swizzle ──► a stage ──► full[s]
//! codes      each lane of the consumers: its own 16 bytes of a tile, or 32 ── cp.async ──► its place in a ring
//! consumers  two warpgroups of 64 of the weight's rows: own codes ── lop3, fma ──► 16-bit floats, exact ──► wait
//!            full[s] ── 4 × wgmma m64nROWS ──► empty[s]; meanwhile the next tile's codes are decoded
//! groups     sums · scale, in f32, are added to the total where a group ends
//! at the end totals ──► own shared memory ── crosswise ── epilogue ── out
//! ```
//!
//! - A lane's codes of a tile are what `mma` wants of its first operand, and `wgmma` wants the same of a warp's 16
//!   rows. Of 16 of k a lane has four neighbours, though, where the instruction has two pairs eight apart: so a's pairs
//!   come into shared memory in that order, every other one of 16 bytes to either half of a step.
//! - What ordinary stores have put there `wgmma` sees behind a fence, which waits for all loads of a thread that are on
//!   their way. So those who store load nothing else, and those who multiply need no fence.
//! - `mma.sync` reads a from shared memory for each 16 of the weight's rows, `wgmma` for each 64: at 64 rows that was
//!   what bounded the products by `mma.sync`.
//! - Scales and zero points are loaded two tiles ahead, and without branches: see `packed`.
//! - Groups of 64 of k and more, without minimums. More rows than a tile has are further blocks, which decode again.
//! - The order of a row's sum is that of k, of each group by itself, for any number of rows.

use abi::ops::matmul::{
    MatmulDims, THREADS, WGMMA_PACKED_STAGES as STAGES, WGMMA_PACKED_STAGES_OF_A as STAGES_OF_A,
    WGMMA_ROW_BYTES as ROW_BYTES,
};
use abi::weight::{TILE_K, TILE_ROWS};
use cuda_std::wgmma::{Accumulate, Descriptor, KMajor, Multiply, Registers, Swizzle};
use cuda_std::{cp_async, fence, global, grid, math, mbarrier, shared, thread, warp, wgmma};

use super::packed::{end, part, sum_address};
use crate::matmul::epilogue::Epilogue;
use crate::matmul::few_rows_simt::place_of_block;
use crate::matmul::weight::{self, Code, FewWords, MIDDLE, Packed, Pair, RawScales, Row, WIDE, ZEROS};

/// Bytes of a lane's codes in a stage, of 8 bits.
const CODES_BYTES: u32 = 32;
/// Pieces of 16 bytes of a row of a tile of a.
const PIECES: u32 = ROW_BYTES / 16;
/// Rows of a tile of a that a warp loads a piece of at once.
const ROWS_AT_ONCE: u32 = 32 / PIECES;
/// Warps that load a.
const PRODUCERS: u32 = 4;
/// What a tile of the weight comes to: registers of four `wgmma`.
type Fragments = [u32; 16];

/// What is loaded ahead of a tile: scales and zero points of the lane's rows.
#[derive(Clone, Copy)]
struct Ahead {
    scales: RawScales,
    zeros: [u32; 2],
}

/// The block's part of the product, of `ROWS` rows of a at most.
struct Block<'a, T, const ROWS: usize> {
    /// The first row of a, and how many there are.
    a: *const T,
    rows: u32,
    dims: &'a MatmulDims,
    packed: &'a Packed,
    weight: Row<'a>,
}

impl<T: Pair, const ROWS: usize> Block<'_, T, ROWS> {
    /// Bytes of a's rows of a tile, and of all their stages.
    const A_BYTES: u32 = ROWS as u32 * ROW_BYTES;
    const ALL_OF_A: u32 = STAGES_OF_A * Self::A_BYTES;

    /// Where a's rows of a tile lie.
    #[inline(always)]
    fn stage(tile: u32) -> u32 {
        shared::base() + tile % STAGES_OF_A * Self::A_BYTES
    }

    /// Where the thread's codes of a tile lie: each 16 bytes of a warp's lanes together.
    #[inline(always)]
    fn codes(tile: u32) -> u32 {
        let of_warp = thread::warp_idx() * 32 * CODES_BYTES + thread::lane() * 16;
        shared::base() + Self::ALL_OF_A + tile % STAGES * THREADS * CODES_BYTES + of_warp
    }

    /// The barrier that a tile's rows of a are there, and the one that they have been multiplied, which both consumers
    /// say.
    #[inline(always)]
    fn barriers(tile: u32) -> (u32, u32) {
        let barriers = shared::base() + Self::ALL_OF_A + STAGES * THREADS * CODES_BYTES;
        let full = barriers + tile % STAGES_OF_A * 8;
        (full, full + STAGES_OF_A * 8)
    }

    /// Initialises the barriers.
    ///
    /// # Safety
    /// - One thread, before all that wait for them.
    #[inline(always)]
    unsafe fn init(&self) {
        let mut stage = 0;
        while stage < STAGES_OF_A {
            let (full, empty) = Self::barriers(stage);
            // SAFETY: the caller's promise; behind the stages.
            unsafe {
                mbarrier::init(full, 1);
                mbarrier::init(empty, 2);
            }
            stage += 1;
        }
        mbarrier::fence_mbarrier_init();
    }

    /// A producer's tiles of a: words 0 and 2 of a piece go to the first 16 bytes of a step, 1 and 3 to the others.
    /// Rows behind the last one are that one.
    ///
    /// # Safety
    /// - *converged*: all 32 threads of the warp; rows of a *in-bounds* and aligned to 16 bytes, k a multiple of 8.
    #[inline(always)]
    unsafe fn produce<const LOADS: usize>(&self, warp: u32) {
        let (piece, first) = (thread::lane() % PIECES, thread::lane() / PIECES);
        let mut tile = warp;
        while tile < self.packed.dims.tiles {
            let k = tile * TILE_K + piece * 8;
            let exists = k < self.dims.k;
            let from = self.a.wrapping_add(if exists { k as usize } else { 0 });
            let mut pieces = [[0; 4]; LOADS];
            let mut i = 0;
            while i < LOADS {
                let row = (first + i as u32 * ROWS_AT_ONCE).min(self.rows - 1);
                let at = from.wrapping_add(row as usize * self.dims.a_stride as usize);
                // SAFETY: the caller's promise; what does not exist is the row's first piece.
                pieces[i] = unsafe { global::load_nc_x4(at) };
                i += 1;
            }
            let (full, empty) = Self::barriers(tile);
            // SAFETY: the stage is empty behind the wait, the first time from the beginning on; its rows begin at
            // multiples of 128 bytes, and each lane has its own places.
            unsafe {
                mbarrier::wait_parity(empty, (tile / STAGES_OF_A + 1) % 2);
                let mut i = 0;
                while i < LOADS {
                    let row = first + i as u32 * ROWS_AT_ONCE;
                    let place = ((piece & !1) ^ (row % 8)) * 16 + piece % 2 * 8;
                    let at = Self::stage(tile) + row * ROW_BYTES + place;
                    let words = pieces[i].map(|word| if exists { word } else { 0 });
                    shared::store_u32x2(at, [words[0], words[2]]);
                    shared::store_u32x2(at ^ 16, [words[1], words[3]]);
                    i += 1;
                }
                fence::proxy_async_shared();
                warp::sync_warp(warp::FULL_MASK);
                if thread::lane() == 0 {
                    mbarrier::arrive(full);
                }
            }
            tile += PRODUCERS;
        }
    }

    /// Starts the copies of a tile's codes, if there is one, as a group by itself.
    ///
    /// # Safety
    /// - The weight *in-bounds* for its dims; the thread has decoded what lies in the stage.
    #[inline(always)]
    unsafe fn copy<C: Code<Words = FewWords>>(&self, tile: u32) {
        if tile < self.packed.dims.tiles {
            // SAFETY: a tile that exists, and the thread's own bytes.
            unsafe { self.weight.copy::<C>(tile, Self::codes(tile)) };
        }
        cp_async::commit_group();
    }

    /// What is loaded ahead of a tile, behind the last one that one's.
    ///
    /// # Safety
    /// - There are tiles; the weight *in-bounds* for its dims.
    #[inline(always)]
    unsafe fn ahead<C: Code, const ORIGIN: u32>(&self, tile: u32) -> Ahead {
        let tile = tile.min(self.packed.dims.tiles - 1);
        // SAFETY: the caller's promise.
        unsafe {
            let zeros = if ORIGIN == ZEROS { self.weight.raw_zeros::<C, WIDE>(tile) } else { [0; 2] };
            Ahead { scales: self.weight.raw_scales::<C, WIDE>(tile, false), zeros }
        }
    }

    /// The lane's codes of a tile as the registers of its products.
    ///
    /// # Safety
    /// - The thread's copies of the tile are done; the tile exists.
    #[inline(always)]
    unsafe fn decode<C: Code<Words = FewWords>, const ORIGIN: u32>(
        &self,
        tile: u32,
        zeros: [u32; 2],
    ) -> Fragments {
        let at = Self::codes(tile);
        // SAFETY: the caller's promise.
        let (low, high) = unsafe {
            let high = if C::CODES.bits() == 8 { shared::load_u32x4(at + 512) } else { [0; 4] };
            (shared::load_u32x4(at), high)
        };
        let words = [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]];
        let mut fragments = [0; 16];
        let mut step = 0;
        while step < 4 {
            let zero = self.packed.zero::<C, WIDE, ORIGIN>(zeros, step as u32);
            let own = weight::fragment::<C, T>(&words, step, zero);
            let mut i = 0;
            while i < 4 {
                fragments[4 * step + i] = own[i];
                i += 1;
            }
            step += 1;
        }
        fragments
    }

    /// A tile's products, which end when this returns; meanwhile the next tile is decoded. `ahead` has the tile's
    /// scales and `zeros` the next one's zero points; `ahead` is loaded again, two tiles on. `total` gets the sums of a
    /// group that ends.
    ///
    /// # Safety
    /// - *converged*: all threads of the warpgroup; as [`Block::ahead`]; `fragments` are the tile's.
    #[inline(always)]
    unsafe fn add<C, const SUMS: usize, const ORIGIN: u32>(
        &self,
        tile: u32,
        fragments: &mut Fragments,
        (ahead, zeros): (&mut Ahead, [u32; 2]),
        (sums, total): (&mut [f32; SUMS], &mut [f32; SUMS]),
    ) -> Fragments
    where
        C: Code<Words = FewWords>,
        T: Multiply<[f32; SUMS]>,
        [f32; SUMS]: Registers,
    {
        let tiles = self.packed.dims.tiles;
        let mask = (1 << (self.packed.dims.group_log2.max(2) - 2)) - 1;
        let mut next = [0; 16];
        let (full, empty) = Self::barriers(tile);
        // SAFETY: the caller's promise: a's rows are there behind the wait, and are given back when they have been
        // multiplied; the thread's copies of the next tile are done when it decodes it.
        unsafe {
            mbarrier::wait_parity(full, tile / STAGES_OF_A % 2);
            let b = Descriptor::<KMajor>::new(Self::stage(tile), Swizzle::Bytes128, 16, 8 * ROW_BYTES);
            let f = &*fragments;
            let first = if tile & mask == 0 { Accumulate::Overwrite } else { Accumulate::Add };
            wgmma::fence();
            wgmma::rs::<T, _, _>(sums, [f[0], f[1], f[2], f[3]], b, first);
            wgmma::rs::<T, _, _>(sums, [f[4], f[5], f[6], f[7]], b.advance(32), Accumulate::Add);
            wgmma::rs::<T, _, _>(sums, [f[8], f[9], f[10], f[11]], b.advance(64), Accumulate::Add);
            wgmma::rs::<T, _, _>(sums, [f[12], f[13], f[14], f[15]], b.advance(96), Accumulate::Add);
            wgmma::commit_group();
            self.copy::<C>(tile + STAGES - 1);
            cp_async::wait_group::<{ STAGES - 2 }>();
            if tile + 1 < tiles {
                next = self.decode::<C, ORIGIN>(tile + 1, zeros);
            }
            wgmma::wait_group::<0>(&mut (&mut *sums, &mut *fragments));
            if thread::thread_idx_x().is_multiple_of(128) {
                mbarrier::arrive(empty);
            }
            if (tile + 1) & mask == 0 || tile + 1 == tiles {
                let [scales, _] = self.packed.numbers::<C, WIDE>(&ahead.scales, false);
                let mut i = 0;
                while i < SUMS {
                    // Registers 2 and 3 of four are of the weight's row 8 below.
                    total[i] = math::fma(scales[0][i / 2 % 2], sums[i], total[i]);
                    i += 1;
                }
            }
            *ahead = self.ahead::<C, ORIGIN>(tile + 2);
        }
        next
    }

    /// The totals of the warpgroup's rows.
    ///
    /// # Safety
    /// - *converged*: all threads of the warpgroup; the weight *in-bounds*; the barriers are initialised, and producers
    ///   at work.
    #[inline(always)]
    unsafe fn totals<C, const SUMS: usize, const ORIGIN: u32>(&self) -> [f32; SUMS]
    where
        C: Code<Words = FewWords>,
        T: Multiply<[f32; SUMS]>,
        [f32; SUMS]: Registers,
    {
        let (mut sums, mut total) = ([0f32; SUMS], [0f32; SUMS]);
        let tiles = self.packed.dims.tiles;
        if tiles == 0 {
            return total;
        }
        // SAFETY: the caller's promise; tiles below their number.
        unsafe {
            let mut tile = 0;
            while tile < STAGES - 1 {
                self.copy::<C>(tile);
                tile += 1;
            }
            let (mut of_even, mut of_odd) = (self.ahead::<C, ORIGIN>(0), self.ahead::<C, ORIGIN>(1));
            cp_async::wait_group::<{ STAGES - 2 }>();
            let mut even = self.decode::<C, ORIGIN>(0, of_even.zeros);
            let mut tile = 0;
            while tile < tiles {
                let loaded = (&mut of_even, of_odd.zeros);
                let mut odd = self.add::<C, SUMS, ORIGIN>(tile, &mut even, loaded, (&mut sums, &mut total));
                if tile + 1 >= tiles {
                    break;
                }
                let loaded = (&mut of_odd, of_even.zeros);
                even = self.add::<C, SUMS, ORIGIN>(tile + 1, &mut odd, loaded, (&mut sums, &mut total));
                tile += 2;
            }
            cp_async::wait_all();
        }
        total
    }
}

/// Up to `ROWS = 2 · SUMS = 4 · LOADS` rows by 128 columns.
///
/// # Safety
/// - *converged*: all 384 threads of the block; tensors *in-bounds* for `dims`, rows of a aligned to 16 bytes, k a
///   multiple of 8, `split_log2` 0 — checked in `Matmul::run`.
#[inline(always)]
pub(super) unsafe fn multiply<C, T, const ROWS: usize, const SUMS: usize, const LOADS: usize>(
    a: *const T,
    packed: &Packed,
    epilogue: Epilogue<'_, T, T>,
) where
    C: Code<Words = FewWords>,
    T: Pair + Multiply<[f32; SUMS]>,
    [f32; SUMS]: Registers,
{
    const { assert!(ROWS == 2 * SUMS && ROWS == ROWS_AT_ONCE as usize * LOADS) };
    let dims = epilogue.dims;
    let (first_row, col_block) = place_of_block::<ROWS>(dims);
    let own = part(dims, col_block);
    let block = Block::<T, ROWS> {
        a: a.wrapping_add(first_row as usize * dims.a_stride as usize),
        rows: (dims.m - first_row).min(ROWS as u32),
        dims,
        packed,
        weight: packed.row::<C>(own.row_block),
    };
    let warp = thread::warp_idx();
    let early = if warp < THREADS / 32 { packed.dims.tiles.min(STAGES - 1) } else { 0 };
    // SAFETY: one thread, and all others behind the barrier; tiles that exist; roles are those of whole warpgroups; the
    // totals lie where the stages were, which nobody reads behind the barrier.
    unsafe {
        if thread::thread_idx_x() == 0 {
            block.init();
        }
        grid::begin_with(|| block.weight.to_l2::<C>(0, early));
        thread::sync_threads();
        // By one lane's word, so that ptxas knows that a warp stays together.
        if warp::shuffle_idx(warp::FULL_MASK, thread::thread_idx_x() / 128, 0) == THREADS / 128 {
            block.produce::<LOADS>(warp - THREADS / 32);
            thread::sync_threads();
        } else {
            // The same for the whole launch.
            let totals = if packed.origin::<C>() == ZEROS {
                block.totals::<C, SUMS, ZEROS>()
            } else {
                block.totals::<C, SUMS, MIDDLE>()
            };
            thread::sync_threads();
            let lane = thread::lane();
            let base = shared::base() + warp * ROWS as u32 * TILE_ROWS * 4;
            let mut i = 0;
            while i < SUMS {
                // Register i is for the weight's row lane / 4, 8 below where i / 2 is odd, and a's row 2 · (lane % 4) +
                // i % 2, of each 8.
                let row = (i / 4 * 8 + i % 2) as u32 + lane % 4 * 2;
                let col = lane / 4 + 8 * (i / 2 % 2) as u32;
                shared::store_f32(base + sum_address(row, col), totals[i]);
                i += 1;
            }
        }
        end(ROWS as u32, first_row, col_block, &epilogue);
    }
}
