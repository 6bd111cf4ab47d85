//! How long the tiles of Hopper's 16-bit products take, by factors that were fitted to measured times.

use abi::ops::matmul::{MatmulTile, WGMMA_ROW_BYTES, swapped_rows};

use super::tuned::TUNED;

/// Which kernel a tile is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// [`MatmulTile::Wgmma`] whose blocks lie one above the other.
    Wgmma,
    /// The same side by side, sharing a.
    SharesA,
    /// [`MatmulTile::Split`].
    Split,
    /// [`MatmulTile::Swapped`].
    Swapped,
}

/// What a tile takes, in microseconds.
#[derive(Debug)]
pub(super) struct Tuned {
    /// Kind, rows, columns and cluster.
    tile: (Kind, u32, u32, u32),
    /// Of a step of k in a wave of blocks; times how full that is; times the rows of a in it, if those are columns.
    step: [f32; 3],
    /// Of a wave besides; times those rows.
    wave: [f32; 2],
    /// Of a launch.
    once: f32,
}

impl Tuned {
    pub(super) const fn new(
        tile: (Kind, u32, u32, u32),
        [step, full, row, wave, wave_row, once]: [f32; 6],
    ) -> Self {
        Tuned { tile, step: [step, full, row], wave: [wave, wave_row], once }
    }
}

/// Microseconds of a launch, of rows of a, rows of b and k, about; none of a tile that was not timed.
pub(super) fn micros(tile: MatmulTile, [m, n, k]: [u32; 3], num_sms: u32) -> Option<f32> {
    let key = match tile {
        MatmulTile::Wgmma { bm, bn, cluster, shares_a, .. } => {
            (if shares_a { Kind::SharesA } else { Kind::Wgmma }, bm, bn, cluster)
        }
        MatmulTile::Split { bn, cluster, .. } => (Kind::Split, 64, bn, cluster),
        MatmulTile::Swapped { bm, bn, cluster, .. } => (Kind::Swapped, bm, bn, cluster),
        _ => return None,
    };
    let tuned = TUNED.iter().find(|tuned| tuned.tile == key)?;
    let (kind, _, bn, cluster) = key;
    // Clusters of four leave some multiprocessors of a group over.
    let sms = if cluster > 2 { num_sms - num_sms / 11 } else { num_sms };
    let (tiles, at_a_time) = (tile.blocks(m, n, 0), u64::from((sms / cluster).max(1)));
    let waves = tiles.div_ceil(at_a_time);
    let full = tiles as f32 / (at_a_time * waves).max(1) as f32;
    let steps = k.div_ceil(WGMMA_ROW_BYTES / 2);
    let (steps, rows) = match kind {
        Kind::Swapped => (steps.div_ceil(cluster), swapped_rows(m, bn).1),
        Kind::Split => (steps.div_ceil(cluster), 0),
        _ => (steps, 0),
    };
    let ([step, of_full, of_row], [wave, wave_row]) = (tuned.step, tuned.wave);
    let (waves, rows) = (waves as f32, rows as f32);
    let of_wave = steps as f32 * (step + of_full * full + of_row * rows) + wave + wave_row * rows;
    Some(waves * of_wave + tuned.once)
}
