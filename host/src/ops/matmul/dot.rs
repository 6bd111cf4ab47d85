//! Products of few rows on the CPU, which are bound by reading their weights: a row of the weights is read once, and
//! multiplied by all rows of a.
//!
//! Each result is a sum of its own in twice sixteen lanes, which are added up in one order. So its bits depend on its
//! row and column alone, not on what else is computed, nor on threads.

use crate::simd::{LANES, Lanes, Work, load, load_rest};
use crate::tensor::FloatElement;

/// Some columns of all rows.
pub(crate) struct FewRows<'s, 'b, T> {
    /// Rows of a in f32, each with zeros to a multiple of sixteen.
    pub(crate) rows: &'s [[f32; LANES]],
    /// How many.
    pub(crate) count: usize,
    /// The elements of a column of the result: a row of the weights.
    pub(crate) column: &'s dyn Fn(usize) -> &'b [T],
    /// How many columns.
    pub(crate) cols: usize,
    /// The sums, `[count][stride]`.
    pub(crate) sums: &'s mut [f32],
    pub(crate) stride: usize,
}

impl<T: FloatElement> Work for FewRows<'_, '_, T> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(mut self) {
        // One column after the other, as they lie in memory: more streams at a time are read more slowly.
        for col in 0..self.cols {
            let mut row = 0;
            while row < self.count {
                row += match (V::SUMS >= 16, self.count - row) {
                    (_, 1) => self.rows_of::<V, 1>(row, col),
                    (true, 4..) => self.rows_of::<V, 4>(row, col),
                    (_, _) => self.rows_of::<V, 2>(row, col),
                };
            }
        }
    }
}

impl<T: FloatElement> FewRows<'_, '_, T> {
    /// The sums of so many rows from this one on, of a column; how many rows.
    #[inline(always)]
    fn rows_of<V: Lanes, const ROWS: usize>(&mut self, row: usize, col: usize) -> usize {
        let length = self.rows.len() / self.count;
        let (column, rest) = (self.column)(col).as_chunks::<LANES>();
        let rows: [&[[f32; LANES]]; ROWS] =
            std::array::from_fn(|i| &self.rows[(row + i) * length..][..length]);
        let firsts = rows.map(|row| &row[..column.len()]);
        // Two sums of each, so that additions do not wait for each other.
        let mut sums = [[V::splat(0.0); 2]; ROWS];
        let mut step = 0;
        while step + 1 < column.len() {
            let weights = [load::<V, T>(&column[step]), load::<V, T>(&column[step + 1])];
            for i in 0..ROWS {
                for j in 0..2 {
                    sums[i][j] = V::load(&firsts[i][step + j]).mul_add(weights[j], sums[i][j]);
                }
            }
            step += 2;
        }
        if step < column.len() {
            let weights = load::<V, T>(&column[step]);
            for i in 0..ROWS {
                sums[i][0] = V::load(&firsts[i][step]).mul_add(weights, sums[i][0]);
            }
        }
        if column.len() < length {
            let weights = load_rest::<V, T>(rest);
            for i in 0..ROWS {
                sums[i][1] = V::load(&rows[i][column.len()]).mul_add(weights, sums[i][1]);
            }
        }
        for (i, [first, second]) in sums.into_iter().enumerate() {
            self.sums[(row + i) * self.stride + col] = first.add(second).sum();
        }
        ROWS
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::simd::{Level, by};

    fn value(i: usize, seed: usize) -> f32 {
        ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0
    }

    /// The product of these rows, each with zeros behind it, and the weights' rows of this length.
    fn product<T: FloatElement>(level: Level, rows: &[Vec<f32>], weights: &[Vec<T>]) -> Vec<f32> {
        let chunks = rows[0].len().div_ceil(LANES);
        let mut padded = vec![[0.0f32; LANES]; chunks * rows.len()];
        for (i, row) in rows.iter().enumerate() {
            padded[i * chunks..][..chunks].as_flattened_mut()[..row.len()].copy_from_slice(row);
        }
        let mut sums = vec![f32::NAN; rows.len() * weights.len()];
        let column = &|col: usize| &weights[col][..];
        let (cols, stride) = (weights.len(), weights.len());
        by(level, FewRows { rows: &padded, count: rows.len(), column, cols, sums: &mut sums, stride });
        sums
    }

    /// All lengths beside the lanes', all tiles, by all instructions: against f64, the same bits by all that add alike,
    /// and those of a row alone.
    #[test]
    fn sums_of_any_size() {
        fn check<T: FloatElement>() {
            for (len, count, cols) in
                (1..50).map(|len| (len, len % 8 + 1, len * 5 % 13 + 1)).chain([(511, 8, 9), (4097, 5, 7)])
            {
                let rows: Vec<Vec<f32>> =
                    (0..count).map(|row| (0..len).map(|i| value(i, row)).collect()).collect();
                let weights: Vec<Vec<T>> = (0..cols)
                    .map(|col| (0..len).map(|i| T::from_f32(value(i, 100 + col))).collect())
                    .collect();
                let mut known: Option<Vec<u32>> = None;
                for &level in Level::available() {
                    let got = product(level, &rows, &weights);
                    for (i, &got) in got.iter().enumerate() {
                        let products = std::iter::zip(&rows[i / cols], &weights[i % cols])
                            .map(|(&x, w)| f64::from(x) * f64::from(w.to_f32()));
                        let (sum, size) = products
                            .fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()));
                        assert!((f64::from(got) - sum).abs() <= 1e-6 * size, "{level:?} {len}: {got} {sum}");
                    }
                    let alone = product(level, &rows[count - 1..], &weights);
                    assert_eq!(&got[(count - 1) * cols..], &alone[..], "{level:?} {len} {count} {cols}");
                    let bits: Vec<u32> = got.iter().map(|got| got.to_bits()).collect();
                    if level > Level::Portable {
                        assert!(*known.get_or_insert_with(|| bits.clone()) == bits, "{level:?} {len}");
                    }
                }
            }
        }
        check::<f32>();
        check::<bf16>();
        check::<f16>();
    }

    /// What is not finite comes through wherever it is.
    #[test]
    fn values_that_are_not_finite() {
        for len in [1, 15, 16, 17, 200] {
            for (place, &level) in [0, len / 2, len - 1]
                .into_iter()
                .flat_map(|place| Level::available().iter().map(move |l| (place, l)))
            {
                let ones = vec![vec![1.0; len]];
                let mut weights = vec![vec![1.0f32; len]];
                weights[0][place] = f32::NAN;
                assert!(product(level, &ones, &weights)[0].is_nan());
                weights[0][place] = f32::INFINITY;
                assert_eq!(product(level, &ones, &weights)[0], f32::INFINITY);
                let halves = vec![weights[0].iter().map(|&y| bf16::from_f32(y)).collect()];
                assert_eq!(product::<bf16>(level, &ones, &halves)[0], f32::INFINITY);
            }
        }
    }
}
