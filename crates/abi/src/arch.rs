/// An architecture floor: what a kernel needs at least, and what its PTX is built for.
///
/// The order is that of capability: a card takes the image of the newest floor that it can run, and an image holds the
/// kernels of its own floor and of all below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arch {
    /// Pascal and everything later. SIMT kernels, f32 arithmetic, `dp4a`, 48 KiB of shared memory per block.
    Sm61,
    /// Ampere and everything later. `mma.sync`, `cp.async`, up to 163 KiB of shared memory per block.
    Sm80,
    /// Hopper (compute capability 9.0) and only that. `wgmma`, TMA, clusters, up to 227 KiB of shared memory.
    Sm90a,
}

impl Arch {
    /// Every floor, oldest first.
    pub const ALL: [Arch; 3] = [Arch::Sm61, Arch::Sm80, Arch::Sm90a];

    /// The name as LLVM and ptxas spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Sm61 => "sm_61",
            Arch::Sm80 => "sm_80",
            Arch::Sm90a => "sm_90a",
        }
    }

    /// The newest floor that a card of this compute capability can run; none below 6.1.
    ///
    /// sm_90a code runs on compute capability 9.0 alone, so a later card takes sm_80.
    pub const fn for_compute_capability(major: u32, minor: u32) -> Option<Arch> {
        match (major, minor) {
            (9, 0) => Some(Arch::Sm90a),
            (8.., _) => Some(Arch::Sm80),
            (7, _) | (6, 1..) => Some(Arch::Sm61),
            _ => None,
        }
    }

    /// Whether a card of this compute capability runs code of this floor.
    pub const fn runs_on(self, major: u32, minor: u32) -> bool {
        match self {
            Arch::Sm61 => matches!((major, minor), (7.., _) | (6, 1..)),
            Arch::Sm80 => major >= 8,
            Arch::Sm90a => major == 9 && minor == 0,
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
    use super::{Arch, UnknownArch};
    use std::string::ToString;

    #[test]
    fn floors_by_name() {
        for arch in Arch::ALL {
            assert_eq!(arch.to_string().parse(), Ok(arch));
        }
        assert_eq!("sm_90".parse::<Arch>(), Err(UnknownArch));
        assert_eq!(UnknownArch.to_string(), "unknown floor: expected sm_61, sm_80, sm_90a");
    }

    #[test]
    fn newest_floor_per_card() {
        let cards = [
            ((5, 2), None),
            ((6, 0), None),
            ((6, 1), Some(Arch::Sm61)),
            ((7, 0), Some(Arch::Sm61)),
            ((7, 5), Some(Arch::Sm61)),
            ((8, 0), Some(Arch::Sm80)),
            ((8, 9), Some(Arch::Sm80)),
            ((9, 0), Some(Arch::Sm90a)),
            ((10, 0), Some(Arch::Sm80)),
            ((12, 0), Some(Arch::Sm80)),
        ];
        for ((major, minor), expected) in cards {
            assert_eq!(Arch::for_compute_capability(major, minor), expected, "{major}.{minor}");
            for arch in Arch::ALL {
                let runs = arch.runs_on(major, minor);
                assert_eq!(
                    runs && expected.is_some_and(|best| arch <= best),
                    runs,
                    "{arch} on {major}.{minor}"
                );
            }
        }
    }
}
