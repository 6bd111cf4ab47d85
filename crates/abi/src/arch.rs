/// Something that not every card has, and that kernels need by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Need {
    /// Fences with scope and order (`fence.acq_rel`), loads that pass L1 by: the memory model of Volta.
    MemoryModel,
    /// Conversions two at a time, arithmetic of pairs of bf16, tf32, `tanh.approx`.
    PackedMath,
    /// Integer reductions and comparisons over a warp in one instruction: `redux.sync`, `match.sync`.
    Redux,
    /// Tensor cores by the warp, and their operands from shared memory: `mma.sync`, `ldmatrix`.
    MmaSync,
    /// Copies to shared memory that do not wait: `cp.async`.
    CpAsync,
    /// Barriers in shared memory that count arrivals: `mbarrier`.
    Mbarrier,
    /// Conversions from and to fp8.
    Fp8,
    /// Matrices back to shared memory: `stmatrix`.
    StMatrix,
    /// Copies of whole tiles, and what belongs to them: bytes that an mbarrier counts, proxy fences, `elect.sync`.
    Tma,
    /// Clusters of blocks that reach each other's shared memory.
    Clusters,
    /// Kernels that start while the one ahead of them still runs: `griddepcontrol`.
    DependentLaunch,
    /// Tensor cores by the warpgroup, and registers moved between warpgroups: `wgmma`, `setmaxnreg`.
    Wgmma,
}

impl Need {
    /// Every need.
    pub const ALL: [Need; 12] = [
        Need::MemoryModel,
        Need::PackedMath,
        Need::Redux,
        Need::MmaSync,
        Need::CpAsync,
        Need::Mbarrier,
        Need::Fp8,
        Need::StMatrix,
        Need::Tma,
        Need::Clusters,
        Need::DependentLaunch,
        Need::Wgmma,
    ];

    /// What device code of a floor without it is compiled with, as in `#[cfg(not(lacks_tma))]`.
    ///
    /// The host has everything, in the simulator: so it is what a floor lacks that is said.
    pub const fn lacking(self) -> &'static str {
        match self {
            Need::MemoryModel => "lacks_memory_model",
            Need::PackedMath => "lacks_packed_math",
            Need::Redux => "lacks_redux",
            Need::MmaSync => "lacks_mma_sync",
            Need::CpAsync => "lacks_cp_async",
            Need::Mbarrier => "lacks_mbarrier",
            Need::Fp8 => "lacks_fp8",
            Need::StMatrix => "lacks_stmatrix",
            Need::Tma => "lacks_tma",
            Need::Clusters => "lacks_clusters",
            Need::DependentLaunch => "lacks_dependent_launch",
            Need::Wgmma => "lacks_wgmma",
        }
    }

    /// The first floor that has it, for messages.
    pub fn since(self) -> Arch {
        Arch::ALL.into_iter().find(|arch| arch.has(self)).unwrap_or(Arch::Sm90a)
    }
}

/// An architecture floor: what a kernel needs at least, and what its PTX is built for.
///
/// Floors are not in an order: one may have what another lacks, both ways. [`Arch::runs`] says whose kernels a floor's
/// image holds, and [`Arch::PREFERRED`] which of the images that a card can run it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    /// Pascal and everything later. SIMT kernels, f32 arithmetic, `dp4a`, 48 KiB of shared memory per block.
    Sm61,
    /// Ampere and everything later. `mma.sync`, `cp.async`, up to 163 KiB of shared memory per block.
    Sm80,
    /// Hopper (compute capability 9.0) and only that. `wgmma`, TMA, clusters, up to 227 KiB of shared memory.
    Sm90a,
    /// Blackwell, compute capability 10.0, and everything later: 12.0 is among it. What Hopper has but for `wgmma`; up
    /// to 227 KiB of shared memory per block, on 12.x 99.
    Sm100,
}

impl Arch {
    /// Every floor, oldest first.
    pub const ALL: [Arch; 4] = [Arch::Sm61, Arch::Sm80, Arch::Sm90a, Arch::Sm100];

    /// Every floor, the one that a card takes if it can run it first.
    pub const PREFERRED: [Arch; 4] = [Arch::Sm90a, Arch::Sm100, Arch::Sm80, Arch::Sm61];

    /// The name as LLVM and ptxas spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Sm61 => "sm_61",
            Arch::Sm80 => "sm_80",
            Arch::Sm90a => "sm_90a",
            Arch::Sm100 => "sm_100",
        }
    }

    /// Whether code of this floor can use it.
    pub const fn has(self, need: Need) -> bool {
        use Need::*;
        match self {
            Arch::Sm61 => false,
            Arch::Sm80 => {
                matches!(need, MemoryModel | PackedMath | Redux | MmaSync | CpAsync | Mbarrier)
            }
            Arch::Sm90a => true,
            Arch::Sm100 => !matches!(need, Wgmma),
        }
    }

    /// Whether kernels of that floor are in images of this one: it has all that the other has.
    pub const fn runs(self, floor: Arch) -> bool {
        let mut index = 0;
        while index < Need::ALL.len() {
            let need = Need::ALL[index];
            if floor.has(need) && !self.has(need) {
                return false;
            }
            index += 1;
        }
        true
    }

    /// The floor that a card of this compute capability takes; none below 6.1.
    ///
    /// sm_90a code runs on compute capability 9.0 alone.
    pub const fn for_compute_capability(major: u32, minor: u32) -> Option<Arch> {
        let mut index = 0;
        while index < Arch::PREFERRED.len() {
            if Arch::PREFERRED[index].runs_on(major, minor) {
                return Some(Arch::PREFERRED[index]);
            }
            index += 1;
        }
        None
    }

    /// Whether a card of this compute capability runs code of this floor.
    pub const fn runs_on(self, major: u32, minor: u32) -> bool {
        match self {
            Arch::Sm61 => matches!((major, minor), (7.., _) | (6, 1..)),
            Arch::Sm80 => major >= 8,
            Arch::Sm90a => major == 9 && minor == 0,
            Arch::Sm100 => major >= 10,
        }
    }
}

impl core::fmt::Display for Arch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

impl core::str::FromStr for Arch {
    type Err = UnknownArch;
    fn from_str(text: &str) -> Result<Self, UnknownArch> {
        Arch::ALL.into_iter().find(|arch| arch.name() == text).ok_or(UnknownArch)
    }
}

/// A text that is no floor's [name](Arch::name).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownArch;

impl core::fmt::Display for UnknownArch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("unknown floor: expected ")?;
        for (index, arch) in Arch::ALL.into_iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{arch}")?;
        }
        Ok(())
    }
}

impl core::error::Error for UnknownArch {}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::{Arch, Need, UnknownArch};
    use std::string::ToString;

    #[test]
    fn floors_by_name() {
        for arch in Arch::ALL {
            assert_eq!(arch.to_string().parse(), Ok(arch));
        }
        assert_eq!("sm_90".parse::<Arch>(), Err(UnknownArch));
        assert_eq!(UnknownArch.to_string(), "unknown floor: expected sm_61, sm_80, sm_90a, sm_100");
    }

    #[test]
    fn preferred_floor_per_card() {
        let cards = [
            ((5, 2), None),
            ((6, 0), None),
            ((6, 1), Some(Arch::Sm61)),
            ((7, 0), Some(Arch::Sm61)),
            ((7, 5), Some(Arch::Sm61)),
            ((8, 0), Some(Arch::Sm80)),
            ((8, 9), Some(Arch::Sm80)),
            ((9, 0), Some(Arch::Sm90a)),
            ((10, 0), Some(Arch::Sm100)),
            ((10, 3), Some(Arch::Sm100)),
            ((12, 0), Some(Arch::Sm100)),
        ];
        for ((major, minor), expected) in cards {
            assert_eq!(Arch::for_compute_capability(major, minor), expected, "{major}.{minor}");
            for arch in Arch::ALL {
                let runs = arch.runs_on(major, minor);
                assert_eq!(
                    runs && expected.is_some_and(|best| best.runs(arch)),
                    runs,
                    "{arch} on {major}.{minor}"
                );
            }
        }
    }

    /// A floor runs its own kernels, and those of what it runs.
    #[test]
    fn floors_are_in_a_partial_order() {
        for arch in Arch::ALL {
            assert!(arch.runs(arch) && arch.runs(Arch::Sm61), "{arch}");
            for floor in Arch::ALL.into_iter().filter(|&floor| arch.runs(floor)) {
                assert!(
                    Arch::ALL.into_iter().all(|below| !floor.runs(below) || arch.runs(below)),
                    "{arch} {floor}"
                );
            }
        }
        let pairs = [
            (Arch::Sm61, Arch::Sm80, false),
            (Arch::Sm80, Arch::Sm61, true),
            (Arch::Sm80, Arch::Sm90a, false),
            (Arch::Sm90a, Arch::Sm80, true),
            (Arch::Sm100, Arch::Sm80, true),
            (Arch::Sm100, Arch::Sm90a, false),
            (Arch::Sm80, Arch::Sm100, false),
        ];
        for (arch, floor, runs) in pairs {
            assert_eq!(arch.runs(floor), runs, "{arch} {floor}");
        }
    }

    /// A card takes a floor before all that this one runs.
    #[test]
    fn floors_are_preferred_to_those_that_they_run() {
        for arch in Arch::ALL {
            let place = |arch| Arch::PREFERRED.iter().position(|&one| one == arch).expect("every floor");
            for floor in Arch::ALL.into_iter().filter(|&floor| arch.runs(floor) && !floor.runs(arch)) {
                assert!(place(arch) < place(floor), "{arch} {floor}");
            }
        }
    }

    #[test]
    fn needs_by_floor() {
        assert!(Need::ALL.into_iter().all(|need| !Arch::Sm61.has(need) && need.since().has(need)));
        let firsts = [(Need::MmaSync, Arch::Sm80), (Need::Tma, Arch::Sm90a), (Need::Wgmma, Arch::Sm90a)];
        for (need, first) in firsts {
            assert_eq!(need.since(), first, "{need:?}");
        }
        // Blackwell has other tensor cores than Hopper, and all else.
        assert!(Need::ALL.into_iter().all(|need| Arch::Sm100.has(need) == (need != Need::Wgmma)));
    }
}
