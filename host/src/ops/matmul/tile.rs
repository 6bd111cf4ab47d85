//! Products of many rows on the CPU, which are bound by arithmetic.
//!
//! ```text
//! a        [m / 16][k][16] in f32: a vector has a column of sixteen rows. Packed once for all
//! b        panels of COLS rows by DEPTH in f32, each row as it lies: packed by the thread that needs it
//! sums     COLS columns of so many rows, each column together; a vector of a times one number of b is added to one of
//!          its vectors
//! ```
//!
//! A sum is one chain along k, so its bits depend on its row and column alone, and where products are added with one
//! rounding not on the CPU. The crate `gemm`, where it takes part, has an order of its own.
//!
//! # Pairs of bf16
//!
//! Where the CPU has an instruction for them ([`Level::Avx512Bf16`]), rows and panels of bf16 are not widened:
//!
//! ```text
//! a        [m / 16][k / 2][16] pairs of elements that follow each other along k, the first in the upper half
//! b        panels of COLS rows by DEPTH pairs
//! ```
//!
//! `vdpbf16ps` adds two products to each sum, that of the upper halves first, each with one rounding to nearest: the
//! bits are those of the elements in f32, at twice the rate. But it takes subnormal numbers for zeros, elements and
//! sums alike, and makes zeros of subnormal results, which may be large together or behind a large factor. So the least
//! magnitude of each block of rows and of each panel is found when they are packed ([`Least`]). Where something could
//! be subnormal, the halves are widened in registers and multiplied in f32, which is slower.

use std::ops::Range;

use half::bf16;

#[cfg(feature = "gemm")]
use crate::simd::Level;
use crate::simd::{LANES, Lanes, Work, load, load_rest};
use crate::tensor::FloatElement;

/// Columns of a panel: a multiple of what the registers take at a time, 8 or 4, and of the 16 rows of packed weights;
/// of twice as many, so that gated columns are whole vectors.
pub(crate) const COLS: usize = 64;
/// Elements of k of a panel.
pub(crate) const DEPTH: usize = 256;
/// From one row of a panel to the next: rows that are a power of two apart would have one place in the cache.
pub(crate) const STRIDE: usize = DEPTH + LANES;

/// Where panels of b come from.
pub(crate) trait Panels {
    /// Columns `first..first + cols` of the result along `depth`, which begins at a multiple of [`DEPTH`] and is not
    /// longer: rows of a panel.
    fn panel<V: Lanes>(&self, first: usize, cols: usize, depth: Range<usize>, panel: &mut [[f32; STRIDE]]);
}

/// Some columns of some rows.
pub(crate) struct Tile<'s, P> {
    /// The rows, `[rows / 16][k][16]`.
    pub(crate) rows: &'s [[f32; LANES]],
    /// How many blocks of sixteen.
    pub(crate) blocks: usize,
    pub(crate) panels: &'s P,
    pub(crate) first: usize,
    /// At most [`COLS`].
    pub(crate) cols: usize,
    /// [`COLS`] rows.
    pub(crate) panel: &'s mut [[f32; STRIDE]],
    /// `[COLS][rows / 16][16]`, whatever it holds.
    pub(crate) sums: &'s mut [[f32; LANES]],
}

impl<P: Panels> Work for Tile<'_, P> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        let Tile { rows, blocks, panels, first, cols, panel, sums } = self;
        let k = rows.len() / blocks;
        // Columns of the last tile that there are not are computed from whatever the panel holds.
        sums.fill([0.0; LANES]);
        for start in (0..k).step_by(DEPTH) {
            let depth = DEPTH.min(k - start);
            panels.panel::<V>(first, cols, start..start + depth, panel);
            #[cfg(feature = "gemm")]
            if V::LEVEL == Level::Portable {
                for block in 0..blocks {
                    let a = &rows[block * k + start..][..depth];
                    add_by_gemm(a, &panel[..cols], &mut sums[block..], blocks);
                }
                continue;
            }
            let at = |block: usize| block * k + start..block * k + start + depth;
            // As many sums at a time as leave registers for what is added to them.
            if V::SUMS >= 16 {
                for (tile, panel) in panel.as_chunks().0.iter().enumerate().take(cols.div_ceil(8)) {
                    let mut block = 0;
                    while block < blocks {
                        let sums = &mut sums[tile * 8 * blocks + block..];
                        block += if blocks - block > 1 {
                            let rows = [&rows[at(block)], &rows[at(block + 1)]];
                            add::<V, Numbers, 2, 8>(rows, panel, sums, blocks, [&[]; 8])
                        } else {
                            add::<V, Numbers, 1, 8>([&rows[at(block)]], panel, sums, blocks, [&[]; 8])
                        };
                    }
                }
            } else {
                for (tile, panel) in panel.as_chunks().0.iter().enumerate().take(cols.div_ceil(4)) {
                    for block in 0..blocks {
                        let sums = &mut sums[tile * 4 * blocks + block..];
                        add::<V, Numbers, 1, 4>([&rows[at(block)]], panel, sums, blocks, [&[]; 8]);
                    }
                }
            }
        }
    }
}

/// As [`add`] for all columns of a panel, where the crate may know instructions that [`Level`] does not.
#[cfg(feature = "gemm")]
fn add_by_gemm(a: &[[f32; LANES]], panel: &[[f32; STRIDE]], sums: &mut [[f32; LANES]], stride: usize) {
    let (cols, depth) = (panel.len(), a.len().min(STRIDE));
    assert!(cols == 0 || (cols - 1) * stride < sums.len());
    let (a, b, sums) = (a.as_ptr(), panel.as_ptr(), sums.as_mut_ptr());
    // SAFETY: `depth` vectors of a, as many numbers of `cols` rows of the panel, and as many vectors of sums, which
    // nothing else points into, are within their slices — the assertion, the lengths, and the borrows.
    unsafe {
        gemm::gemm(
            LANES,
            cols,
            depth,
            sums.cast::<f32>(),
            (stride * LANES) as isize,
            1,
            true,
            a.cast::<f32>(),
            LANES as isize,
            1,
            b.cast::<f32>(),
            STRIDE as isize,
            1,
            1.0f32,
            1.0f32,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// The least magnitude among elements of bf16 that are not zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Least(
    /// Its bits less one, of which zeros have the most.
    u16,
);

impl Least {
    const OF_NONE: Least = Least(u16::MAX);

    #[inline(always)]
    fn of(elements: &[bf16]) -> Least {
        let bits = elements.iter().map(|element| (element.to_bits() & 0x7fff).wrapping_sub(1));
        Least(bits.fold(u16::MAX, u16::min))
    }

    fn and(self, other: Least) -> Least {
        Least(self.0.min(other.0))
    }

    /// Whether no product of these and those elements and no sum of such products is subnormal, nor any of the
    /// elements.
    fn is_normal_with(self, other: Least) -> bool {
        let exponents = [self, other].map(|least| (u32::from(least.0) + 1) >> 7);
        // A product is a multiple of the last places of its factors, 2^(exponent − 127 − 7) each, and so is a sum: none
        // but zero is below 2^−126 if they are not.
        exponents[0].min(exponents[1]) > 0 && exponents[0] + exponents[1] >= 2 * (127 + 7) - 126
    }

    /// As a line of numbers.
    fn to_line(self) -> [f32; LANES] {
        [f32::from(self.0); LANES]
    }

    fn from_line(line: &[f32; LANES]) -> Least {
        Least(line[0] as u16)
    }
}

/// Elements as pairs, the first one in the upper half; behind an odd number of them a zero.
#[inline(always)]
fn pack_pairs(from: &[bf16], to: &mut [f32]) -> Least {
    let (pairs, rest) = from.as_chunks::<2>();
    for (to, [first, second]) in std::iter::zip(&mut *to, pairs) {
        *to = f32::from_bits(u32::from(first.to_bits()) << 16 | u32::from(second.to_bits()));
    }
    if let [last] = rest {
        to[pairs.len()] = f32::from_bits(u32::from(last.to_bits()) << 16);
    }
    Least::of(from)
}

/// As [`Tile`], of pairs of bf16.
pub(crate) struct PairTile<'s> {
    /// The rows, `[rows / 16][k / 2][16]`.
    pub(crate) rows: &'s [[f32; LANES]],
    /// For each block of sixteen a line of its [`Least`].
    pub(crate) least: &'s [[f32; LANES]],
    /// The elements of a column of the result: a row of b.
    pub(crate) column: &'s dyn Fn(usize) -> &'s [bf16],
    pub(crate) first: usize,
    /// At most [`COLS`].
    pub(crate) cols: usize,
    /// How many columns the result has: those behind the tile are likely the next.
    pub(crate) columns: usize,
    /// [`COLS`] rows.
    pub(crate) panel: &'s mut [[f32; STRIDE]],
    /// `[COLS][rows / 16][16]`, whatever it holds.
    pub(crate) sums: &'s mut [[f32; LANES]],
}

impl Work for PairTile<'_> {
    type Out = ();
    const OF_PAIRS: bool = true;

    #[inline(always)]
    fn with<V: Lanes>(self) {
        let PairTile { rows, least, column, first, cols, columns, panel, sums } = self;
        let blocks = least.len();
        let steps = rows.len() / blocks;
        // Columns of the last tile that there are not are computed from whatever the panel holds.
        sums.fill([0.0; LANES]);
        for start in (0..steps).step_by(DEPTH) {
            let depth = DEPTH.min(steps - start);
            let mut of_panel = Least::OF_NONE;
            for (col, panel) in panel.iter_mut().take(cols).enumerate() {
                let column = column(first + col);
                let elements = 2 * start..(2 * (start + depth)).min(column.len());
                of_panel = of_panel.and(pack_pairs(&column[elements], panel));
            }
            // Where the next panel comes from.
            let (next, from) = if start + depth < steps { (first, start + depth) } else { (first + COLS, 0) };
            for (tile, panel) in panel.as_chunks().0.iter().enumerate().take(cols.div_ceil(8)) {
                let mut block = 0;
                while block < blocks {
                    // A share of the next panel's rows for each addition.
                    let mut ahead: [&[u8]; 8] = [&[]; 8];
                    let share = 8 * block / blocks..(8 * (block + 2) / blocks).min(8);
                    for (bytes, row) in std::iter::zip(&mut ahead[share.clone()], share) {
                        let next = next + tile * 8 + row;
                        if next < columns {
                            *bytes = bytemuck::cast_slice(column(next).get(2 * from..).unwrap_or_default());
                        }
                    }
                    let sums = &mut sums[tile * 8 * blocks + block..];
                    let at = |block: usize| &rows[block * steps + start..][..depth];
                    let is_normal = |block: usize| Least::from_line(&least[block]).is_normal_with(of_panel);
                    block += if blocks - block > 1 {
                        let rows = [at(block), at(block + 1)];
                        if is_normal(block) && is_normal(block + 1) {
                            add::<V, NormalPairs, 2, 8>(rows, panel, sums, blocks, ahead)
                        } else {
                            add::<V, AnyPairs, 2, 8>(rows, panel, sums, blocks, ahead)
                        }
                    } else if is_normal(block) {
                        add::<V, NormalPairs, 1, 8>([at(block)], panel, sums, blocks, ahead)
                    } else {
                        add::<V, AnyPairs, 1, 8>([at(block)], panel, sums, blocks, ahead)
                    };
                }
            }
        }
    }
}

/// Packs a block of sixteen rows of a as pairs; rows that have no elements are zeros.
pub(crate) struct PairColumns<'s> {
    pub(crate) rows: [&'s [bf16]; LANES],
    pub(crate) columns: &'s mut [[f32; LANES]],
    pub(crate) least: &'s mut [f32; LANES],
}

impl Work for PairColumns<'_> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        let mut least = Least::OF_NONE;
        for (i, columns) in self.columns.chunks_mut(ORDERED).enumerate() {
            let mut pairs = [[0.0; ORDERED]; LANES];
            for (row, pairs) in std::iter::zip(self.rows, &mut pairs) {
                let row = &row[(i * 2 * ORDERED).min(row.len())..];
                least = least.and(pack_pairs(&row[..row.len().min(2 * ORDERED)], pairs));
            }
            for (place, column) in columns.iter_mut().enumerate() {
                for (row, pair) in column.iter_mut().enumerate() {
                    *pair = pairs[row][place];
                }
            }
        }
        *self.least = least.to_line();
    }
}

/// Columns of a that are put into another order together.
pub(crate) const ORDERED: usize = 64;

/// Packs a block of sixteen rows of a, of which those that have no elements are zeros.
pub(crate) struct Columns<'s, T> {
    pub(crate) rows: [&'s [T]; LANES],
    /// For each place of 64 columns which of them comes there.
    pub(crate) order: Option<&'s [u8; ORDERED]>,
    pub(crate) columns: &'s mut [[f32; LANES]],
}

impl<T: FloatElement> Work for Columns<'_, T> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        for (i, columns) in self.columns.chunks_mut(ORDERED).enumerate() {
            let mut numbers = [[0.0; ORDERED]; LANES];
            for (row, numbers) in std::iter::zip(self.rows, &mut numbers) {
                let row = &row[(i * ORDERED).min(row.len())..];
                let (whole, rest) = row[..row.len().min(ORDERED)].as_chunks();
                let (to, _) = numbers.as_chunks_mut();
                for (to, from) in std::iter::zip(&mut *to, whole) {
                    load::<V, T>(from).store(to);
                }
                if !rest.is_empty() {
                    load_rest::<V, T>(rest).store(&mut to[whole.len()]);
                }
            }
            for (place, column) in columns.iter_mut().enumerate() {
                let from = self.order.map_or(place, |order| usize::from(order[place]) % ORDERED);
                for (row, number) in column.iter_mut().enumerate() {
                    *number = numbers[row][from];
                }
            }
        }
    }
}

/// What lanes hold.
trait Content {
    /// Adds their products to sums.
    fn add<V: Lanes>(a: V, b: V, sums: V) -> V;
}

struct Numbers;

impl Content for Numbers {
    #[inline(always)]
    fn add<V: Lanes>(a: V, b: V, sums: V) -> V {
        a.mul_add(b, sums)
    }
}

/// Pairs, of which nothing is subnormal.
struct NormalPairs;

impl Content for NormalPairs {
    #[inline(always)]
    fn add<V: Lanes>(a: V, b: V, sums: V) -> V {
        a.add_pairs(b, sums)
    }
}

struct AnyPairs;

impl Content for AnyPairs {
    #[inline(always)]
    fn add<V: Lanes>(a: V, b: V, sums: V) -> V {
        a.add_products_of_halves(b, sums)
    }
}

/// Adds the products of blocks of sixteen rows and so many rows of a panel; how many blocks. Meanwhile it brings as
/// many bytes of each slice of `ahead` to the cache as a row of the panel has.
#[inline(always)]
fn add<V: Lanes, C: Content, const BLOCKS: usize, const N: usize>(
    a: [&[[f32; LANES]]; BLOCKS],
    panel: &[[f32; STRIDE]; N],
    sums: &mut [[f32; LANES]],
    stride: usize,
    ahead: [&[u8]; 8],
) -> usize {
    let depth = a[0].len().min(STRIDE);
    let a = a.map(|a| &a[..depth]);
    let mut own = [[V::splat(0.0); BLOCKS]; N];
    for i in 0..N {
        for j in 0..BLOCKS {
            own[i][j] = V::load(&sums[i * stride + j]);
        }
    }
    for first in (0..depth).step_by(LANES) {
        // A line at a time: more wait for each other.
        for bytes in ahead {
            let line = first * size_of::<f32>();
            if line < bytes.len() {
                V::prefetch(bytes, line);
            }
        }
        for step in first..depth.min(first + LANES) {
            let mut x = [V::splat(0.0); BLOCKS];
            for j in 0..BLOCKS {
                x[j] = V::load(&a[j][step]);
            }
            for i in 0..N {
                let y = V::splat(panel[i][step]);
                for j in 0..BLOCKS {
                    own[i][j] = C::add(x[j], y, own[i][j]);
                }
            }
        }
    }
    for i in 0..N {
        for j in 0..BLOCKS {
            own[i][j].store(&mut sums[i * stride + j]);
        }
    }
    BLOCKS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Level, by};

    /// The rows of a matrix.
    struct Matrix<'s>(&'s [Vec<f32>]);

    impl Panels for Matrix<'_> {
        #[inline(always)]
        fn panel<V: Lanes>(
            &self,
            first: usize,
            cols: usize,
            depth: Range<usize>,
            panel: &mut [[f32; STRIDE]],
        ) {
            for (row, panel) in std::iter::zip(&self.0[first..first + cols], panel) {
                panel[..depth.len()].copy_from_slice(&row[depth.clone()]);
            }
        }
    }

    /// As [`product`], of pairs.
    fn product_of_pairs(level: Level, a: &[Vec<bf16>], b: &[Vec<bf16>]) -> Vec<f32> {
        let (blocks, steps) = (a.len().div_ceil(LANES), a[0].len().div_ceil(2));
        let mut rows = vec![[f32::NAN; LANES]; blocks * steps];
        let mut least = vec![[f32::NAN; LANES]; blocks];
        for (block, columns) in rows.chunks_mut(steps).enumerate() {
            let rows = std::array::from_fn(|row| a.get(block * LANES + row).map_or(&[][..], |row| row));
            by(level, PairColumns { rows, columns, least: &mut least[block] });
        }
        let mut panel = vec![[f32::NAN; STRIDE]; COLS];
        let mut sums = vec![[f32::NAN; LANES]; COLS * blocks];
        let (column, cols) = (&|col: usize| &b[col][..], b.len());
        let (panel, least) = (&mut panel[..], &least[..]);
        by(
            level,
            PairTile { rows: &rows, least, column, first: 0, cols, columns: cols, panel, sums: &mut sums },
        );
        row_by_row(&sums, blocks, (a.len(), cols))
    }

    /// Sums of columns in the order of rows.
    fn row_by_row(sums: &[[f32; LANES]], blocks: usize, (rows, cols): (usize, usize)) -> Vec<f32> {
        let at = |row: usize, col: usize| sums[col * blocks + row / LANES][row % LANES];
        (0..rows)
            .flat_map(|row| (0..cols).map(move |col| (row, col)))
            .map(|(row, col)| at(row, col))
            .collect()
    }

    fn value(i: usize, seed: usize) -> f32 {
        ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0
    }

    /// Sums of a tile by these instructions, row after row.
    fn product(level: Level, a: &[Vec<f32>], b: &[Vec<f32>], order: Option<&[u8; ORDERED]>) -> Vec<f32> {
        let (blocks, k) = (a.len().div_ceil(LANES), a[0].len());
        let mut rows = vec![[f32::NAN; LANES]; blocks * k];
        for (block, columns) in rows.chunks_mut(k).enumerate() {
            let rows = std::array::from_fn(|row| a.get(block * LANES + row).map_or(&[][..], |row| row));
            by(level, Columns { rows, order, columns });
        }
        let mut panel = vec![[f32::NAN; STRIDE]; COLS];
        let mut sums = vec![[f32::NAN; LANES]; COLS * blocks];
        let (panels, cols) = (&Matrix(b), b.len());
        by(level, Tile { rows: &rows, blocks, panels, first: 0, cols, panel: &mut panel, sums: &mut sums });
        row_by_row(&sums, blocks, (a.len(), cols))
    }

    /// Sizes beside those of tiles and panels, by all instructions: against f64, the same bits by all that add alike,
    /// and those of fewer rows and columns.
    #[test]
    fn sums_of_any_size() {
        for (m, n, k) in [(1, 1, 1), (9, 5, 17), (16, 64, 256), (33, 63, 257), (50, 11, 600), (17, 13, 64)] {
            let a: Vec<Vec<f32>> = (0..m).map(|row| (0..k).map(|i| value(i, row)).collect()).collect();
            let b: Vec<Vec<f32>> = (0..n).map(|col| (0..k).map(|i| value(i, 100 + col)).collect()).collect();
            let mut known: Option<Vec<f32>> = None;
            for &level in Level::available() {
                let got = product(level, &a, &b, None);
                for (i, &got) in got.iter().enumerate() {
                    let products =
                        std::iter::zip(&a[i / n], &b[i % n]).map(|(&x, &y)| f64::from(x) * f64::from(y));
                    let (sum, size) = products.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                    assert!(
                        (f64::from(got) - sum).abs() <= 3e-6 * size,
                        "{level:?} {m} {n} {k}: {got} {sum}"
                    );
                }
                // The crate `gemm` has its own order.
                if level > Level::Portable {
                    let part = product(level, &a[m - 1..], &b[..n.min(3)], None);
                    assert_eq!(part, got[(m - 1) * n..][..n.min(3)], "{level:?} {m} {n} {k}");
                    assert_eq!(*known.get_or_insert_with(|| got.clone()), got, "{level:?} {m} {n} {k}");
                }
            }
        }
    }

    /// Pairs have the sums of the elements in f32, to the bit, at sizes beside those of tiles and panels, whatever the
    /// elements: also where the CPU's instruction would make zeros of them, of their products or of sums.
    #[test]
    fn sums_of_pairs() {
        let mut seed = 1u32;
        let mut bits = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            seed >> 16
        };
        // Elements of a and of b by random bits.
        let exponents = |bits: u32, from: u32, count: u32| bits & 0x807f | (from + (bits >> 7) % count) << 7;
        type Elements<'s> = &'s dyn Fn(u32) -> u32;
        let kinds: [(&str, Elements<'_>, Elements<'_>); 8] = [
            ("usual", &|x| exponents(x, 110, 20), &|x| exponents(x, 110, 20)),
            ("any", &|x| x, &|x| x),
            ("just normal", &|x| exponents(x, 71, 1), &|x| exponents(x, 71, 1)),
            ("just not", &|x| exponents(x, 70, 2), &|x| exponents(x, 71, 2)),
            ("subnormal products", &|x| exponents(x, 60, 8), &|x| exponents(x, 60, 8)),
            ("subnormal and huge", &|x| x & 0x807f, &|x| exponents(x, 200, 40)),
            ("huge and zeros", &|x| exponents(x, 240, 14), &|x| x & 0x8000),
            ("few subnormal", &|x| if x % 97 == 0 { x & 0x807f } else { exponents(x, 110, 20) }, &|x| {
                exponents(x, 120, 130)
            }),
        ];
        for (name, of_a, of_b) in kinds {
            for (m, n, k) in
                [(1, 1, 1), (9, 5, 17), (16, 64, 512), (33, 63, 513), (50, 11, 1201), (17, 13, 64)]
            {
                let mut rows = |count: usize, of: Elements<'_>| -> Vec<Vec<bf16>> {
                    (0..count).map(|_| (0..k).map(|_| bf16::from_bits(of(bits()) as u16)).collect()).collect()
                };
                let (a, b) = (rows(m, of_a), rows(n, of_b));
                let widened = |rows: &[Vec<bf16>]| -> Vec<Vec<f32>> {
                    rows.iter().map(|row| row.iter().map(|x| x.to_f32()).collect()).collect()
                };
                let (wide_a, wide_b) = (widened(&a), widened(&b));
                for &level in Level::available() {
                    // The crate `gemm` has its own order.
                    if level == Level::Portable {
                        continue;
                    }
                    let (got, want) =
                        (product_of_pairs(level, &a, &b), product(level, &wide_a, &wide_b, None));
                    for (i, (got, want)) in std::iter::zip(got, want).enumerate() {
                        let same = got == want || got.is_nan() && want.is_nan();
                        assert!(same, "{name} {level:?} {m} {n} {k} [{i}]: {got:e} {want:e}");
                    }
                }
            }
        }
    }

    /// What is least of elements, and which products are normal.
    #[test]
    fn least_magnitudes() {
        let least = |values: &[f32]| {
            Least::of(&values.iter().map(|&value| bf16::from_f32(value)).collect::<Vec<_>>())
        };
        let of = |exponent: i32| least(&[0.0, f32::NAN, -(2f32.powi(exponent)), 1e30]);
        assert_eq!(least(&[0.0, -0.0]), Least::OF_NONE);
        assert_eq!(of(-3), least(&[0.125]));
        assert_eq!(Least::from_line(&of(-30).to_line()), of(-30));
        assert_eq!(Least::from_line(&Least::OF_NONE.to_line()), Least::OF_NONE);
        assert!(of(-56).is_normal_with(of(-56)) && !of(-56).is_normal_with(of(-57)));
        assert!(of(-126).is_normal_with(of(20)) && !of(-127).is_normal_with(of(20)));
        assert!(Least::OF_NONE.is_normal_with(of(-126)) && !of(-130).is_normal_with(Least::OF_NONE));
    }

    /// Columns in another order on both sides are other sums of the same.
    #[test]
    fn columns_in_order() {
        let order: [u8; ORDERED] = std::array::from_fn(|i| (i * 37 % ORDERED) as u8);
        let a: Vec<Vec<f32>> = (0..20).map(|row| (0..128).map(|i| value(i, row)).collect()).collect();
        let ordered = |row: &Vec<f32>| -> Vec<f32> {
            (0..128).map(|i| row[i / ORDERED * ORDERED + usize::from(order[i % ORDERED])]).collect()
        };
        let b: Vec<Vec<f32>> = (0..9).map(|col| (0..128).map(|i| value(i, 100 + col)).collect()).collect();
        for &level in Level::available() {
            let (a_ordered, b): (Vec<_>, Vec<_>) =
                (a.iter().map(ordered).collect(), b.iter().map(ordered).collect());
            assert_eq!(
                product(level, &a, &b, Some(&order)),
                product(level, &a_ordered, &b, None),
                "{level:?}"
            );
        }
    }
}
