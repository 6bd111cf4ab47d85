//! Products of few rows and a row of tiles, from the codes as they lie.

use std::ops::Range;

use super::{Decoded, LevelLanes, Packed, ROWS};
use crate::simd::{LANES, Lanes, Work};

/// The products of a row of tiles and rows of a.
pub(super) struct FewRows<'s> {
    pub(super) packed: &'s Packed<'s>,
    pub(super) expert: usize,
    pub(super) block: usize,
    pub(super) rows: &'s [[f32; LANES]],
    pub(super) sums: &'s mut [[f32; ROWS]],
}

/// Most rows that are multiplied at once.
pub(crate) const FEW_ROWS: usize = 8;

impl Work for FewRows<'_> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        match (self.sums.len(), self.packed.weight.layout.minimums) {
            (0 | 1, false) => self.products::<V, 1, 4>(),
            (0 | 1, true) => self.products::<V, 1, 6>(),
            (2..=4, false) => self.products::<V, 4, 4>(),
            (2..=4, true) => self.products::<V, 4, 6>(),
            (_, false) => self.products::<V, FEW_ROWS, 4>(),
            (_, true) => self.products::<V, FEW_ROWS, 6>(),
        }
    }
}

impl FewRows<'_> {
    /// Of up to so many rows, with so many vectors a tile; rows that are missing are the last one again.
    #[inline(always)]
    fn products<V: Lanes, const MOST: usize, const VECTORS: usize>(self) {
        let FewRows { packed, expert, block, rows, sums } = self;
        let tiles = packed.counts.tiles;
        let (rows, _) = rows.as_chunks::<VECTORS>();
        let mut of_row = [rows; MOST];
        for (i, of_row) in of_row.iter_mut().enumerate() {
            *of_row = &rows[i.min(sums.len().saturating_sub(1)) * tiles..][..tiles];
        }
        let mut products = Products { rows: of_row, lanes: [[V::splat(0.0); MOST]; ROWS] };
        packed.for_tiles::<V, _>(expert, block, 0..tiles, &mut products);
        for (i, sums) in sums.iter_mut().enumerate().take(MOST) {
            for (sum, lanes) in std::iter::zip(sums, &products.lanes) {
                *sum = lanes[i].sum();
            }
        }
    }
}

/// Sums of products with so many rows of a, tile by tile.
struct Products<'s, V, const MOST: usize, const VECTORS: usize> {
    rows: [&'s [[[f32; LANES]; VECTORS]]; MOST],
    lanes: [[V; MOST]; ROWS],
}

/// Sums of a row of the weight, and what the rows of a have for these tiles.
struct RowSums<'s, V, const MOST: usize, const VECTORS: usize> {
    lanes: [V; MOST],
    rows: [&'s [[[f32; LANES]; VECTORS]]; MOST],
}

impl<'s, V: Lanes, const MOST: usize, const VECTORS: usize> Decoded<V> for Products<'s, V, MOST, VECTORS> {
    const MINIMUMS_ONLY: bool = VECTORS > 4;
    type State = RowSums<'s, V, MOST, VECTORS>;

    #[inline(always)]
    fn begin(&self, row: usize, tiles: Range<usize>) -> Self::State {
        let mut rows = self.rows;
        for rows in &mut rows {
            *rows = &rows[tiles.clone()];
        }
        RowSums { lanes: self.lanes[row], rows }
    }

    #[inline(always)]
    fn add(&mut self, state: &mut Self::State, tile: usize, values: [V; 4], level: LevelLanes<V>) {
        for (rows, lanes) in std::iter::zip(state.rows, &mut state.lanes) {
            let x = &rows[tile];
            let first = V::load(&x[1]).mul_add(values[1], V::load(&x[0]).mul(values[0]));
            let all = V::load(&x[3]).mul_add(values[3], V::load(&x[2]).mul_add(values[2], first));
            let mut sum = all.mul_add(level.scales, *lanes);
            for minus in &x[4..] {
                sum = V::load(minus).mul_add(level.minimums, sum);
            }
            *lanes = sum;
        }
    }

    #[inline(always)]
    fn end(&mut self, row: usize, state: Self::State) {
        self.lanes[row] = state.lanes;
    }
}
