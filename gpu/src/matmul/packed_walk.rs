//! One row, in shared memory, by a packed weight on tensor cores: a warp's way through the tiles of sixteen rows of the
//! weight, of which it holds a ring in registers.
//!
//! All eight columns of `mma` are the row: what seven of them come to is dropped. Ordinary arithmetic would take more
//! instructions, as each code would become an f32 by itself.

use abi::weight::{STEP_K, TILE_K};
use cuda_std::{math, shared, thread};

use super::weight::{self, Code, FewWords, MIDDLE, MINIMUMS, OF_32, Packed, Pair, RawScales, Row, ZEROS};

/// Bytes of a tile of the row.
const A_BYTES: u32 = TILE_K * 2;

/// A tile of the weight in a lane's registers.
#[derive(Clone, Copy)]
pub struct Tile {
    words: FewWords,
    scales: RawScales,
    zeros: [u32; 2],
}

impl Tile {
    /// None: what it is multiplied by adds nothing, if that is finite.
    pub const NONE: Tile = Tile { words: [0; 8], scales: RawScales::NONE, zeros: [0; 2] };
}

/// A warp's way through its part of k: tiles from `first` to `end`.
pub struct Walk<'a> {
    /// The weight.
    pub packed: &'a Packed,
    /// Its row of tiles.
    pub weight: Row<'a>,
    /// First tile.
    pub first: u32,
    /// Behind the last.
    pub end: u32,
}

impl Walk<'_> {
    /// Starts the loads of a tile; one that is not the warp's is not read.
    ///
    /// # Safety
    /// - The weight *in-bounds* for its dims.
    #[inline(always)]
    unsafe fn load<C: Code<Words = FewWords>, const GROUP: u32>(&self, tile: u32, minimums: bool) -> Tile {
        if tile >= self.end {
            return Tile::NONE;
        }
        // SAFETY: a tile that there is — `end`.
        unsafe {
            Tile {
                words: self.weight.words::<C>(tile),
                scales: self.weight.raw_scales::<C, GROUP>(tile, minimums),
                zeros: self.weight.raw_zeros::<C, GROUP>(tile),
            }
        }
    }

    /// Starts the loads of the first tiles.
    ///
    /// # Safety
    /// - The weight *in-bounds* for its dims.
    #[inline(always)]
    pub unsafe fn first_tiles<C: Code<Words = FewWords>, const TILES: usize, const GROUP: u32>(
        &self,
    ) -> [Tile; TILES] {
        let minimums = GROUP == OF_32 && self.packed.has_minimums::<C>();
        let mut held = [Tile::NONE; TILES];
        let mut i = 0;
        while i < TILES {
            // SAFETY: the caller's promise.
            held[i] = unsafe { self.load::<C, GROUP>(self.first + i as u32, minimums) };
            i += 1;
        }
        held
    }

    /// The warp's sums of rows `lane / 4` and `lane / 4 + 8` of the weight, of which the first tiles are `held`.
    ///
    /// # Safety
    /// - *converged*: all 32 lanes; the weight *in-bounds* for its dims; the row of a lies at `a`, zeros behind it up
    ///   to the last tile's end.
    #[inline(always)]
    pub unsafe fn sums<C: Code<Words = FewWords>, T: Pair, const TILES: usize, const GROUP: u32>(
        &self,
        a: u32,
        held: [Tile; TILES],
    ) -> [f32; 2] {
        // The same for the whole launch. A loop for each: registers do not suffice for all in one.
        // SAFETY: the caller's promise.
        unsafe {
            match self.packed.origin::<C>() {
                ZEROS => self.sums_from::<C, T, TILES, GROUP, ZEROS>(a, held),
                MINIMUMS if GROUP == OF_32 => self.sums_from::<C, T, TILES, GROUP, MINIMUMS>(a, held),
                _ => self.sums_from::<C, T, TILES, GROUP, MIDDLE>(a, held),
            }
        }
    }

    /// The same of codes that count from `ORIGIN`.
    ///
    /// # Safety
    /// - *converged*: all 32 lanes; the weight *in-bounds* for its dims; the row of a lies at `a`, zeros behind it up
    ///   to the last tile's end.
    #[inline(always)]
    unsafe fn sums_from<
        C: Code<Words = FewWords>,
        T: Pair,
        const TILES: usize,
        const GROUP: u32,
        const ORIGIN: u32,
    >(
        &self,
        a: u32,
        mut held: [Tile; TILES],
    ) -> [f32; 2] {
        // The lane's four of each step.
        let a = a + thread::lane() % 4 * 8;
        let mut sums = [[0f32; 4]];
        let mut at = self.first;
        while at < self.end {
            let mut i = 0;
            while i < TILES {
                let tile = at + i as u32;
                // The same for the whole warp.
                if tile < self.end {
                    let Tile { words, scales, zeros } = &held[i];
                    // SAFETY: the caller's promise; a tile that there is, as of the row.
                    unsafe {
                        let steps = |_| {
                            let mut steps = [[0; 2]; 4];
                            let mut step = 0;
                            while step < 4 {
                                steps[step] = shared::load_u32x2(a + tile * A_BYTES + step as u32 * 32);
                                step += 1;
                            }
                            steps
                        };
                        add_tile::<C, T, 1, GROUP, ORIGIN>(
                            self.packed,
                            (words, scales, *zeros),
                            steps,
                            &mut sums,
                        );
                        held[i] = self.load::<C, GROUP>(tile + TILES as u32, ORIGIN == MINIMUMS);
                    }
                }
                i += 1;
            }
            at += TILES as u32;
        }
        [sums[0][0], sums[0][2]]
    }
}

/// Adds the product of a tile and the rows of a, of which `steps(fragment)` gives the lane's registers of `mma`'s
/// second operand. Of a tile that does not exist a is 0, and the scales are finite.
///
/// # Safety
/// - *converged*: all 32 lanes.
#[inline(always)]
pub unsafe fn add_tile<
    C: Code<Words = FewWords>,
    T: Pair,
    const FRAGMENTS: usize,
    const GROUP: u32,
    const ORIGIN: u32,
>(
    packed: &Packed,
    (words, raw, zeros): (&FewWords, &RawScales, [u32; 2]),
    steps: impl Fn(usize) -> [[u32; 2]; 4],
    sums: &mut [[f32; 4]; FRAGMENTS],
) {
    let has_minimums = ORIGIN == MINIMUMS;
    let [scales, minimums] = packed.numbers::<C, GROUP>(raw, has_minimums);
    let mut weights = [[0; 4]; 4];
    let mut step = 0;
    while step < 4 {
        weights[step] =
            weight::fragment::<C, T>(words, step, packed.zero::<C, GROUP, ORIGIN>(zeros, step as u32));
        step += 1;
    }
    let mut i = 0;
    while i < FRAGMENTS {
        let (mut part, mut total) = ([0f32; 4], [0f32; 4]);
        let mut step = 0;
        let x = steps(i);
        // SAFETY: the caller's promise.
        unsafe {
            while step < 4 {
                part = T::multiply_add(weights[step], x[step], part);
                if has_minimums {
                    total = T::multiply_add([T::ONES; 4], x[step], total);
                }
                // At the end of a group.
                if (step as u32 + 1).is_multiple_of(GROUP / STEP_K) {
                    let mut e = 0;
                    while e < 4 {
                        sums[i][e] = math::fma(scales[step][e / 2], part[e], sums[i][e]);
                        part[e] = 0.0;
                        if has_minimums {
                            sums[i][e] = math::fma(-minimums[step][e / 2], total[e], sums[i][e]);
                            total[e] = 0.0;
                        }
                        e += 1;
                    }
                }
                step += 1;
            }
        }
        i += 1;
    }
}
