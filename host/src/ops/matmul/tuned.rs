//! What the tiles of Hopper's 16-bit products take: written by `cargo xtask tune`, not by hand.
//!
//! From 180 shapes on an NVIDIA H200, where the tile of the least modelled time took 1.012 of the
//! best one's in the mean: `benches/record/h200/2026-11-29-narrow.md`.

use abi::ops::matmul::TileKind;

use super::tuning::Tuned;

pub(super) const TUNED: &[Tuned] = &[
    Tuned::new((TileKind::Wgmma, 128, 64, 1), [0.14105, 0.10704, 0.00009, 0.36881, 0.01904, 1.60523]),
    Tuned::new((TileKind::Wgmma, 128, 128, 1), [0.23461, 0.15775, 0.00025, 1.43920, 0.00278, 0.86704]),
    Tuned::new((TileKind::Wgmma, 128, 128, 2), [0.23682, 0.14762, 0.00000, 0.97062, 0.00538, 1.16946]),
    Tuned::new((TileKind::Wgmma, 128, 192, 1), [0.35525, 0.21297, 0.00002, 1.44927, 0.00406, 1.59564]),
    Tuned::new((TileKind::Wgmma, 128, 192, 2), [0.38038, 0.14660, 0.00000, 1.98685, 0.00239, 0.86502]),
    Tuned::new((TileKind::Wgmma, 128, 256, 2), [0.54941, 0.14875, 0.00000, 3.33668, 0.00000, 0.33199]),
    Tuned::new((TileKind::SharesA, 64, 64, 4), [0.15398, 0.00874, 0.00005, 0.29924, 0.00000, 1.66031]),
    Tuned::new((TileKind::Split, 64, 64, 2), [0.04396, 0.16152, 0.00100, 1.68729, 0.00000, 0.90940]),
    Tuned::new((TileKind::Split, 64, 64, 4), [0.00000, 0.21546, 0.00101, 0.84598, 0.00000, 1.81043]),
    Tuned::new((TileKind::Split, 64, 128, 4), [0.00049, 0.32929, 0.00080, 0.71391, 0.00000, 3.35596]),
    Tuned::new((TileKind::Swapped, 64, 96, 2), [0.08591, 0.11188, 0.00049, 2.78092, 0.00000, 0.76639]),
    Tuned::new((TileKind::Swapped, 64, 128, 2), [0.00000, 0.11081, 0.00118, 2.27828, 0.00770, 0.51856]),
    Tuned::new((TileKind::Swapped, 64, 160, 2), [0.00000, 0.14577, 0.00083, 0.00000, 0.02766, 0.39866]),
    Tuned::new((TileKind::Swapped, 64, 192, 2), [0.00000, 0.14488, 0.00081, 0.00000, 0.02670, 0.00000]),
    Tuned::new((TileKind::Swapped, 128, 96, 1), [0.12734, 0.10566, 0.00059, 3.52808, 0.00308, 0.00000]),
    Tuned::new((TileKind::Swapped, 128, 96, 2), [0.14294, 0.24864, 0.00007, 2.69797, 0.00769, 1.46022]),
    Tuned::new((TileKind::Swapped, 128, 96, 4), [0.09624, 0.36162, 0.00000, 0.09588, 0.03537, 1.71231]),
    Tuned::new((TileKind::Swapped, 128, 128, 1), [0.01555, 0.11136, 0.00189, 3.64287, 0.00000, 0.00000]),
    Tuned::new((TileKind::Swapped, 128, 128, 2), [0.00000, 0.23140, 0.00152, 4.59654, 0.00190, 0.24363]),
    Tuned::new((TileKind::Swapped, 128, 160, 1), [0.00000, 0.16295, 0.00191, 2.25112, 0.01318, 0.00000]),
    Tuned::new((TileKind::Swapped, 128, 160, 2), [0.00000, 0.20760, 0.00168, 0.00000, 0.03863, 0.00000]),
    Tuned::new((TileKind::Swapped, 128, 192, 1), [0.00000, 0.18403, 0.00208, 0.00000, 0.01877, 0.00000]),
    Tuned::new((TileKind::Swapped, 128, 192, 2), [0.00000, 0.17505, 0.00194, 0.00000, 0.03366, 0.00000]),
    Tuned::new((TileKind::Swapped, 128, 192, 4), [0.00000, 0.21459, 0.00182, 0.00000, 0.03525, 0.00000]),
    Tuned::new((TileKind::Swapped, 128, 224, 1), [0.00000, 0.15983, 0.00212, 0.00000, 0.01928, 0.00468]),
    Tuned::new((TileKind::Swapped, 128, 256, 1), [0.00000, 0.20446, 0.00198, 0.00000, 0.02131, 0.00000]),
    Tuned::new((TileKind::Swapped, 192, 160, 1), [0.00000, 0.21950, 0.00290, 0.00000, 0.04020, 0.45058]),
    Tuned::new((TileKind::Swapped, 192, 192, 1), [0.00000, 0.12969, 0.00338, 0.00000, 0.04123, 0.00000]),
];
