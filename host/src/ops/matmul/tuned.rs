//! What the tiles of Hopper's 16-bit products take: written by `cargo xtask tune`, not by hand.
//!
//! From 103 shapes on an NVIDIA H200, where the tile of the least modelled time took 1.014 of the
//! best one's in the mean: `benches/record/h200/2026-11-28-choice.md`.

use abi::ops::matmul::TileKind;

use super::tuning::Tuned;

pub(super) const TUNED: &[Tuned] = &[
    Tuned::new((TileKind::Wgmma, 128, 64, 1), [0.15205, 0.10640, 0.00000, 0.28892, 0.00000, 1.99416]),
    Tuned::new((TileKind::Wgmma, 128, 128, 1), [0.24004, 0.16265, 0.00000, 0.83226, 0.00000, 1.72050]),
    Tuned::new((TileKind::Wgmma, 128, 128, 2), [0.24814, 0.13550, 0.00000, 1.26282, 0.00000, 0.97242]),
    Tuned::new((TileKind::Wgmma, 128, 192, 1), [0.38522, 0.17146, 0.00000, 1.29749, 0.00000, 1.56242]),
    Tuned::new((TileKind::Wgmma, 128, 192, 2), [0.39674, 0.13612, 0.00000, 1.28940, 0.00000, 1.36639]),
    Tuned::new((TileKind::Wgmma, 128, 256, 2), [0.51935, 0.20091, 0.00000, 0.00000, 0.00000, 3.20108]),
    Tuned::new((TileKind::SharesA, 64, 64, 4), [0.14995, 0.02167, 0.00000, 0.30816, 0.00000, 1.39845]),
    Tuned::new((TileKind::Split, 64, 64, 2), [0.13279, 0.07620, 0.00000, 1.54305, 0.00000, 1.29238]),
    Tuned::new((TileKind::Split, 64, 64, 4), [0.03735, 0.18390, 0.00000, 0.64958, 0.00000, 3.69495]),
    Tuned::new((TileKind::Split, 64, 128, 4), [0.03480, 0.29190, 0.00000, 0.84033, 0.00000, 3.70783]),
    Tuned::new((TileKind::Swapped, 64, 96, 2), [0.06486, 0.07960, 0.00108, 2.78403, 0.00000, 0.35625]),
    Tuned::new((TileKind::Swapped, 64, 128, 2), [0.05123, 0.11923, 0.00081, 3.20849, 0.00215, 0.45253]),
    Tuned::new((TileKind::Swapped, 64, 160, 2), [0.02922, 0.14075, 0.00090, 4.07103, 0.00000, 0.30018]),
    Tuned::new((TileKind::Swapped, 64, 192, 2), [0.08968, 0.14285, 0.00054, 4.27082, 0.00227, 0.00000]),
    Tuned::new((TileKind::Swapped, 128, 96, 1), [0.18308, 0.09468, 0.00014, 3.55083, 0.00000, 0.00000]),
    Tuned::new((TileKind::Swapped, 128, 96, 2), [0.03714, 0.23131, 0.00137, 2.82462, 0.00000, 2.19454]),
    Tuned::new((TileKind::Swapped, 128, 96, 4), [0.00000, 0.24552, 0.00186, 3.63475, 0.00000, 1.60031]),
    Tuned::new((TileKind::Swapped, 128, 128, 1), [0.23868, 0.11624, 0.00022, 3.37888, 0.00000, 0.11503]),
    Tuned::new((TileKind::Swapped, 128, 128, 2), [0.17962, 0.23016, 0.00011, 4.84755, 0.00000, 0.74965]),
    Tuned::new((TileKind::Swapped, 128, 160, 1), [0.26121, 0.13791, 0.00053, 3.88038, 0.00000, 0.00000]),
    Tuned::new((TileKind::Swapped, 128, 160, 2), [0.18932, 0.19410, 0.00075, 5.64824, 0.00000, 0.17138]),
    Tuned::new((TileKind::Swapped, 128, 192, 1), [0.33076, 0.14292, 0.00049, 4.20787, 0.00000, 0.00000]),
    Tuned::new((TileKind::Swapped, 128, 192, 2), [0.29999, 0.16217, 0.00051, 6.23240, 0.00000, 0.00000]),
    Tuned::new((TileKind::Swapped, 128, 192, 4), [0.23861, 0.19387, 0.00085, 6.55008, 0.00000, 0.22461]),
    Tuned::new((TileKind::Swapped, 128, 224, 1), [0.39078, 0.12797, 0.00060, 3.76591, 0.00000, 0.00000]),
    Tuned::new((TileKind::Swapped, 128, 256, 1), [0.44086, 0.18940, 0.00033, 2.92669, 0.01410, 0.00000]),
    Tuned::new((TileKind::Swapped, 192, 160, 1), [0.39342, 0.22314, 0.00056, 5.94839, 0.00000, 0.00000]),
    Tuned::new((TileKind::Swapped, 192, 192, 1), [0.43254, 0.13894, 0.00116, 7.63458, 0.00000, 0.00000]),
];
