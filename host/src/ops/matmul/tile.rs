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

use std::ops::Range;

#[cfg(feature = "gemm")]
use crate::simd::Level;
use crate::simd::{LANES, Lanes, Work, load, load_rest};
use crate::tensor::FloatElement;

/// Columns of a panel: a multiple of what the registers take at a time, 8 or 4, and of the 16 rows of packed weights.
pub(crate) const COLS: usize = 48;
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
                            add::<V, 2, 8>([&rows[at(block)], &rows[at(block + 1)]], panel, sums, blocks)
                        } else {
                            add::<V, 1, 8>([&rows[at(block)]], panel, sums, blocks)
                        };
                    }
                }
            } else {
                for (tile, panel) in panel.as_chunks().0.iter().enumerate().take(cols.div_ceil(4)) {
                    for block in 0..blocks {
                        let sums = &mut sums[tile * 4 * blocks + block..];
                        add::<V, 1, 4>([&rows[at(block)]], panel, sums, blocks);
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

/// Adds the products of blocks of sixteen rows and so many rows of a panel; how many blocks.
#[inline(always)]
fn add<V: Lanes, const BLOCKS: usize, const N: usize>(
    a: [&[[f32; LANES]]; BLOCKS],
    panel: &[[f32; STRIDE]; N],
    sums: &mut [[f32; LANES]],
    stride: usize,
) -> usize {
    let depth = a[0].len().min(STRIDE);
    let a = a.map(|a| &a[..depth]);
    let mut own = [[V::splat(0.0); BLOCKS]; N];
    for i in 0..N {
        for j in 0..BLOCKS {
            own[i][j] = V::load(&sums[i * stride + j]);
        }
    }
    for step in 0..depth {
        let mut x = [V::splat(0.0); BLOCKS];
        for j in 0..BLOCKS {
            x[j] = V::load(&a[j][step]);
        }
        for i in 0..N {
            let y = V::splat(panel[i][step]);
            for j in 0..BLOCKS {
                own[i][j] = x[j].mul_add(y, own[i][j]);
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
        let at = |row: usize, col: usize| sums[col * blocks + row / LANES][row % LANES];
        (0..a.len())
            .flat_map(|row| (0..cols).map(move |col| (row, col)))
            .map(|(row, col)| at(row, col))
            .collect()
    }

    /// Sizes beside those of tiles and panels, by all instructions: against f64, the same bits by all that add alike,
    /// and those of fewer rows and columns.
    #[test]
    fn sums_of_any_size() {
        for (m, n, k) in [(1, 1, 1), (9, 5, 17), (16, 48, 256), (33, 47, 257), (50, 11, 600), (17, 13, 64)] {
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
