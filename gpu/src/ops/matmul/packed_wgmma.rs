//! Products of dozens of rows with a packed weight on Hopper: the weight's codes are `wgmma`'s first operand, from
//! registers.
//!
//! ```text
//! stages     all threads: a's rows of 64 of k ── cp.async, a pair of elements each ──► in the 128-byte swizzle
//!            each lane: its own 16 bytes of a tile, or 32 ── cp.async ──► beside them
//! consumers  two warpgroups of 64 of the weight's rows: own codes ── lop3, fma ──► 16-bit floats, exact ──► 4 × wgmma
//!            m64nROWS; meanwhile the next tile's codes are decoded
//! groups     sums · scale, in f32, are added to the total where a group ends
//! at the end totals ──► own shared memory ── crosswise ── epilogue ── out
//! ```
//!
//! - A lane's codes of a tile are what `mma` wants of its first operand, and `wgmma` wants the same of a warp's 16
//!   rows. Of 16 of k a lane has four neighbours, though, where the instruction has two pairs eight apart: so a's pairs
//!   come into shared memory in that order, which is why they are copied by fours of bytes.
//! - `mma.sync` reads a from shared memory for each 16 of the weight's rows, `wgmma` for each 64: at 64 rows that was
//!   what bounded the products by `mma.sync`.
//! - Groups of 64 of k and more, without minimums. More rows than a tile has are further blocks, which decode again.
//! - The order of a row's sum is that of k, of each group by itself, for any number of rows.

use abi::ops::matmul::{MatmulDims, THREADS, WGMMA_PACKED_STAGES as STAGES, WGMMA_ROW_BYTES as ROW_BYTES};
use abi::weight::{TILE_K, TILE_ROWS};
use cuda_std::wgmma::{Accumulate, Descriptor, KMajor, Multiply, Registers, Swizzle};
use cuda_std::{cp_async, fence, grid, math, shared, thread, wgmma};

use super::packed::{end, part, sum_address};
use crate::matmul::epilogue::Epilogue;
use crate::matmul::few_rows_simt::place_of_block;
use crate::matmul::weight::{self, Code, FewWords, MIDDLE, Packed, Pair, Row, WIDE, ZEROS};

/// Bytes of a lane's codes in a stage, of 8 bits.
const CODES_BYTES: u32 = 32;
/// What a tile of the weight comes to: registers of four `wgmma`.
type Fragments = [u32; 16];

/// The block's part of the product.
struct Block<'a, T> {
    /// Its first row of a, and how many there are.
    a: *const T,
    rows: u32,
    dims: &'a MatmulDims,
    packed: &'a Packed,
    weight: Row<'a>,
}

impl<T: Pair> Block<'_, T> {
    /// Where a tile's stage begins; the codes of the threads lie behind a's rows.
    #[inline(always)]
    fn stage<const ROWS: usize>(tile: u32) -> u32 {
        shared::base() + tile % STAGES * (ROWS as u32 * ROW_BYTES + THREADS * CODES_BYTES)
    }

    /// Where the thread's codes lie in a stage: each 16 bytes of a warp's lanes together.
    #[inline(always)]
    fn codes<const ROWS: usize>(tile: u32) -> u32 {
        let (warp, lane) = (thread::warp_idx(), thread::lane());
        Self::stage::<ROWS>(tile) + ROWS as u32 * ROW_BYTES + warp * 32 * CODES_BYTES + lane * 16
    }

    /// Starts the copies of a tile, if there is one, as a group by itself.
    ///
    /// # Safety
    /// - All threads of the block; rows of a *in-bounds* and aligned to 16 bytes, k a multiple of 4; the stage is
    ///   *exclusive*.
    #[inline(always)]
    unsafe fn load<C: Code<Words = FewWords>, const ROWS: usize>(&self, tile: u32) {
        if tile < self.packed.dims.tiles {
            // A pair of k, which comes to the words of its step so: 0, 4, 1, 5, …
            let pair = thread::thread_idx_x() % 32;
            let chunk = pair / 8 * 2 + pair % 2;
            let k = tile * TILE_K + pair * 2;
            let mut i = 0;
            while i < ROWS as u32 / 8 {
                let row = thread::thread_idx_x() / 32 + 8 * i;
                let exists = row < self.rows && k < self.dims.k;
                let (at, bytes) = if exists {
                    (row as usize * self.dims.a_stride as usize + k as usize, 4)
                } else {
                    (0, 0)
                };
                let to =
                    Self::stage::<ROWS>(tile) + row * ROW_BYTES + (chunk ^ (row % 8)) * 16 + pair % 8 / 2 * 4;
                // SAFETY: the caller's promise; what is not there is not read.
                unsafe { cp_async::ca_4_fill(to, self.a.wrapping_add(at), bytes) };
                i += 1;
            }
            // SAFETY: a tile that exists, and the thread's own bytes.
            unsafe { self.weight.copy::<C>(tile, Self::codes::<ROWS>(tile)) };
        }
        cp_async::commit_group();
    }

    /// The lane's codes of a tile as the registers of its products.
    ///
    /// # Safety
    /// - The thread's copies of the tile are done; the tile exists.
    #[inline(always)]
    unsafe fn decode<C: Code<Words = FewWords>, const ROWS: usize, const ORIGIN: u32>(
        &self,
        tile: u32,
        zeros: [u32; 2],
    ) -> Fragments {
        let at = Self::codes::<ROWS>(tile);
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

    /// Zero points of a tile, if codes count from such and there is one.
    ///
    /// # Safety
    /// - The weight *in-bounds* for its dims.
    #[inline(always)]
    unsafe fn zeros<C: Code, const ORIGIN: u32>(&self, tile: u32) -> [u32; 2] {
        if ORIGIN == ZEROS && tile < self.packed.dims.tiles {
            // SAFETY: the caller's promise.
            unsafe { self.weight.raw_zeros::<C, WIDE>(tile) }
        } else {
            [0; 2]
        }
    }

    /// A tile's products, which end when this returns; meanwhile the next tile is decoded. `total` gets the sums of a
    /// group that ends.
    ///
    /// # Safety
    /// - *converged*: all threads of the block; as [`Block::load`]; `fragments` are the tile's.
    #[inline(always)]
    unsafe fn add<C, const ROWS: usize, const SUMS: usize, const ORIGIN: u32>(
        &self,
        tile: u32,
        fragments: &mut Fragments,
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
        // SAFETY: the caller's promise: the tile's copies are done and seen behind the barrier, behind which nobody
        // reads the stage of the tile before; scales of a tile that exists.
        unsafe {
            let raw = self.weight.raw_scales::<C, WIDE>(tile, false);
            let zeros = self.zeros::<C, ORIGIN>(tile + 1);
            fence::proxy_async_shared();
            thread::sync_threads();
            self.load::<C, ROWS>(tile + STAGES - 1);
            let rows = Self::stage::<ROWS>(tile);
            let b = Descriptor::<KMajor>::new(rows, Swizzle::Bytes128, 16, 8 * ROW_BYTES);
            let f = &*fragments;
            let first = if tile & mask == 0 { Accumulate::Overwrite } else { Accumulate::Add };
            wgmma::fence();
            wgmma::rs::<T, _, _>(sums, [f[0], f[1], f[2], f[3]], b, first);
            wgmma::rs::<T, _, _>(sums, [f[4], f[5], f[6], f[7]], b.advance(32), Accumulate::Add);
            wgmma::rs::<T, _, _>(sums, [f[8], f[9], f[10], f[11]], b.advance(64), Accumulate::Add);
            wgmma::rs::<T, _, _>(sums, [f[12], f[13], f[14], f[15]], b.advance(96), Accumulate::Add);
            wgmma::commit_group();
            cp_async::wait_group::<{ STAGES - 2 }>();
            if tile + 1 < tiles {
                next = self.decode::<C, ROWS, ORIGIN>(tile + 1, zeros);
            }
            wgmma::wait_group::<0>(&mut (&mut *sums, &mut *fragments));
            if (tile + 1) & mask == 0 || tile + 1 == tiles {
                let [scales, _] = self.packed.numbers::<C, WIDE>(&raw, false);
                let mut i = 0;
                while i < SUMS {
                    // Registers 2 and 3 of four are of the weight's row 8 below.
                    total[i] = math::fma(scales[0][i / 2 % 2], sums[i], total[i]);
                    i += 1;
                }
            }
        }
        next
    }

    /// The totals of the warpgroup's rows.
    ///
    /// # Safety
    /// - As [`Block::add`].
    #[inline(always)]
    unsafe fn totals<C, const ROWS: usize, const SUMS: usize, const ORIGIN: u32>(&self) -> [f32; SUMS]
    where
        C: Code<Words = FewWords>,
        T: Multiply<[f32; SUMS]>,
        [f32; SUMS]: Registers,
    {
        let (mut sums, mut total) = ([0f32; SUMS], [0f32; SUMS]);
        let tiles = self.packed.dims.tiles;
        // SAFETY: the caller's promise; tiles below their number.
        unsafe {
            let mut tile = 0;
            while tile < STAGES - 1 {
                self.load::<C, ROWS>(tile);
                tile += 1;
            }
            if tiles == 0 {
                return total;
            }
            let zeros = self.zeros::<C, ORIGIN>(0);
            cp_async::wait_group::<{ STAGES - 2 }>();
            let mut even = self.decode::<C, ROWS, ORIGIN>(0, zeros);
            let mut tile = 0;
            while tile < tiles {
                let mut odd = self.add::<C, ROWS, SUMS, ORIGIN>(tile, &mut even, (&mut sums, &mut total));
                if tile + 1 >= tiles {
                    break;
                }
                even = self.add::<C, ROWS, SUMS, ORIGIN>(tile + 1, &mut odd, (&mut sums, &mut total));
                tile += 2;
            }
        }
        total
    }
}

/// Up to `ROWS = 2 · SUMS` rows by 128 columns.
///
/// # Safety
/// - *converged*: all 256 threads of the block; tensors *in-bounds* for `dims`, rows of a aligned to 16 bytes, k a
///   multiple of 4, `split_log2` 0 — checked in `Matmul::run`.
#[inline(always)]
pub(super) unsafe fn multiply<C, T, const ROWS: usize, const SUMS: usize>(
    a: *const T,
    packed: &Packed,
    epilogue: Epilogue<'_, T, T>,
) where
    C: Code<Words = FewWords>,
    T: Pair + Multiply<[f32; SUMS]>,
    [f32; SUMS]: Registers,
{
    let dims = epilogue.dims;
    let (first_row, col_block) = place_of_block::<ROWS>(dims);
    let own = part(dims, col_block);
    let block = Block {
        a: a.wrapping_add(first_row as usize * dims.a_stride as usize),
        rows: (dims.m - first_row).min(ROWS as u32),
        dims,
        packed,
        weight: packed.row::<C>(own.row_block),
    };
    let early = packed.dims.tiles.min(STAGES - 1);
    // SAFETY: tiles that exist.
    grid::begin_with(|| unsafe { block.weight.to_l2::<C>(0, early) });
    // SAFETY: the caller's promise; the totals lie where the stages were, which nobody reads behind the barrier.
    unsafe {
        // The same for the whole launch.
        let totals = if packed.origin::<C>() == ZEROS {
            block.totals::<C, ROWS, SUMS, ZEROS>()
        } else {
            block.totals::<C, ROWS, SUMS, MIDDLE>()
        };
        cp_async::wait_all();
        thread::sync_threads();
        let lane = thread::lane();
        let base = shared::base() + thread::warp_idx() * ROWS as u32 * TILE_ROWS * 4;
        let mut i = 0;
        while i < SUMS {
            // Register i is for the weight's row lane / 4, 8 below where i / 2 is odd, and a's row 2 · (lane % 4) + i %
            // 2, of each 8.
            let row = (i / 4 * 8 + i % 2) as u32 + lane % 4 * 2;
            let col = lane / 4 + 8 * (i / 2 % 2) as u32;
            shared::store_f32(base + sum_address(row, col), totals[i]);
            i += 1;
        }
        end(ROWS as u32, first_row, col_block, &epilogue);
    }
}
