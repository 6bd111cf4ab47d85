//! How long the tiles of Hopper's 16-bit products take, by factors that were fitted to measured times.

use std::cmp::Ordering;

use abi::ops::matmul::{MatmulTile, MatmulVariant, TIME_TERMS, TimedTile};

use super::tuned::TUNED;

/// What a tile takes: its factors of [`MatmulTile::time_terms`], in microseconds.
#[derive(Debug)]
pub(super) struct Tuned {
    tile: TimedTile,
    factors: [f32; TIME_TERMS],
}

impl Tuned {
    pub(super) const fn new(tile: TimedTile, factors: [f32; TIME_TERMS]) -> Self {
        Tuned { tile, factors }
    }
}

/// Up to so many rows products go by other rules.
const FROM: u32 = 64;
/// From more rows on they go by clocks: a card at its power has others than those that the factors are of.
const UP_TO: u32 = 2048;

/// Where the factors of a tile stand in the table, by [`slot`]; 0 of one that was not timed, else one more.
const PLACES: [u8; 512] = {
    let mut places = [0; 512];
    let mut i = 0;
    while i < TUNED.len() {
        places[slot(TUNED[i].tile).expect("a tile that has a place")] = i as u8 + 1;
        i += 1;
    }
    places
};

/// A place for each kind, of 64 to 256 rows, 32 to 256 columns, and 1, 2 or 4 blocks.
const fn slot((kind, bm, bn, cluster): TimedTile) -> Option<usize> {
    if bm > 256 || bm == 0 || bn > 256 || bn == 0 || !bn.is_multiple_of(32) || cluster == 0 || cluster > 4 {
        return None;
    }
    let of_columns = (bn as usize / 32 - 1) * 4 + cluster.ilog2() as usize;
    Some(kind as usize * 128 + (bm as usize / 64 - 1) * 32 + of_columns)
}

/// Of the loaded tiles that were timed, the one of the least time for a launch; none for few rows and for very many,
/// and for f32.
pub(super) fn fastest<'a, T>(
    loaded: &'a [(&'static MatmulVariant, T)],
    is_gated: bool,
    [m, n, k]: [u32; 3],
    num_sms: u32,
) -> Option<&'a (&'static MatmulVariant, T)> {
    if m <= FROM || m > UP_TO {
        return None;
    }
    let is_timed = |variant: &MatmulVariant| variant.dtype.bytes() == 2 && !keeps_out(variant.tile, is_gated);
    let timed = loaded.iter().filter(|(variant, _)| is_timed(variant));
    let timed = timed.filter_map(|one| Some((one, micros(one.0.tile, [m, n, k], num_sms)?)));
    timed.min_by(|(_, a), (_, b)| a.partial_cmp(b).unwrap_or(Ordering::Equal)).map(|(fastest, _)| fastest)
}

/// Whether out does not leave by TMA: where half a tile of a gated product is no whole boxes.
pub(super) fn keeps_out(tile: MatmulTile, is_gated: bool) -> bool {
    matches!(tile, MatmulTile::Wgmma { bm: 128, bn, .. } if is_gated && !bn.is_multiple_of(128))
}

/// [`MatmulTile::micros`] by the tile's factors; none of a tile that was not timed.
fn micros(tile: MatmulTile, sizes: [u32; 3], num_sms: u32) -> Option<[f32; 2]> {
    let tuned = TUNED.get(usize::from(PLACES[slot(tile.timed()?)?]).checked_sub(1)?)?;
    tile.micros(tuned.factors, sizes, num_sms)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use abi::ops::matmul::WGMMA_VARIANTS;

    use super::*;

    #[test]
    fn each_tile_has_a_place_of_its_own() {
        let slots: BTreeSet<usize> = TUNED.iter().filter_map(|tuned| slot(tuned.tile)).collect();
        assert_eq!(slots.len(), TUNED.len());
        for variant in WGMMA_VARIANTS.iter().filter(|variant| variant.entry.starts_with("matmul_bf16__")) {
            assert!(micros(variant.tile, [128, 4096, 4096], 132).is_some(), "{}", variant.entry);
        }
    }
}
