//! What the time of a launch of Hopper's 16-bit products is modelled by: the choice of a tile adds up terms times
//! factors of the tile, which were fitted to measured times.

use super::{MatmulTile, WGMMA_ROW_BYTES, swapped_columns, swapped_rows};

/// Which kernel a tile is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TileKind {
    /// [`MatmulTile::Wgmma`] whose blocks lie one above the other.
    Wgmma,
    /// The same side by side, sharing a.
    SharesA,
    /// [`MatmulTile::Split`].
    Split,
    /// [`MatmulTile::Swapped`].
    Swapped,
}

/// A tile that has factors: kind, rows, columns and cluster.
pub type TimedTile = (TileKind, u32, u32, u32);

/// Bytes that the H200 whose times the factors are of moves in a microsecond, by a copy.
const BYTES_PER_MICROSECOND: f32 = 4.2e6;

/// Terms of a launch's time.
pub const TIME_TERMS: usize = 6;

impl MatmulTile {
    /// What the tile's factors are found by; none of tiles that have none.
    pub const fn timed(self) -> Option<TimedTile> {
        Some(match self {
            MatmulTile::Wgmma { bm, bn, cluster, shares_a, .. } => {
                (if shares_a { TileKind::SharesA } else { TileKind::Wgmma }, bm, bn, cluster)
            }
            MatmulTile::Split { bn, cluster, .. } => (TileKind::Split, 64, bn, cluster),
            MatmulTile::Swapped { bm, bn, cluster, .. } => (TileKind::Swapped, bm, bn, cluster),
            _ => return None,
        })
    }

    /// What the tile's factors are multiplied by, of rows of a, rows of b and k; none of tiles that have none.
    ///
    /// ```text
    /// waves · (steps · (step + full · fullness + row · rows) + wave + wave_row · rows) + once
    /// ```
    ///
    /// with the waves of its blocks or clusters, how full these are, the steps of k of a block, and rows: the columns
    /// that a swapped tile multiplies; of the others' last tiles the rows that are none of a's, which TMA is slow to
    /// fill.
    pub fn time_terms(self, [m, n, k]: [u32; 3], num_sms: u32) -> Option<[f32; TIME_TERMS]> {
        let (kind, bm, bn, cluster) = self.timed()?;
        // Clusters of four leave some multiprocessors of a group over.
        let sms = if cluster > 2 { num_sms - num_sms / 11 } else { num_sms };
        let (tiles, at_a_time) = (self.blocks(m, n, 0), u64::from((sms / cluster).max(1)));
        let waves = tiles.div_ceil(at_a_time);
        let full = tiles as f32 / (at_a_time * waves).max(1) as f32;
        let steps = k.div_ceil(WGMMA_ROW_BYTES / 2);
        let outside = |rows: u32| (rows - m % rows) % rows;
        let (steps, rows) = match kind {
            TileKind::Swapped => (steps.div_ceil(cluster), swapped_columns(swapped_rows(m, bn).1, bn)),
            TileKind::Split => (steps.div_ceil(cluster), outside(bm)),
            TileKind::Wgmma => (steps, outside(bm * cluster)),
            TileKind::SharesA => (steps, outside(bm)),
        };
        let (waves, steps, rows) = (waves as f32, steps as f32, rows as f32);
        Some([waves * steps, waves * steps * full, waves * steps * rows, waves, waves * rows, 1.0])
    }

    /// Microseconds of a launch, about, of rows of a, rows of b and k of 16 bits, by the tile's factors: no less than
    /// its bytes take and a tenth more, a fifth of swapped tiles, whose blocks load nothing while they end theirs.
    /// Behind it what its steps take alone, which orders launches that only wait for the memory.
    pub fn micros(self, factors: [f32; TIME_TERMS], sizes: [u32; 3], num_sms: u32) -> Option<[f32; 2]> {
        let terms = self.time_terms(sizes, num_sms)?;
        let mut steps = 0.0;
        for (term, factor) in core::iter::zip(terms, factors) {
            steps += term * factor;
        }
        let [m, n, k] = sizes.map(|size| size as f32);
        let share = if matches!(self, MatmulTile::Swapped { .. }) { 1.2 } else { 1.1 };
        let of_bytes = share * 2.0 * (m * k + n * k + m * n) / BYTES_PER_MICROSECOND;
        Some([steps.max(of_bytes), steps])
    }
}
