//! `cargo xtask demo`: from a fresh clone to generated text.

use std::path::Path;

use abi::Arch;
use cuda_loader::driver::{DeviceAttribute, device_attribute, device_get, device_name};

use crate::error::Error;
use crate::{process, setup};

/// Sets up what the build needs, then runs the example `generate` with `args`; without any, its defaults are the demo.
/// Only what this machine runs is built: the kernels for its first card, or without a card none.
pub fn run(root: &Path, args: &[&str]) -> Result<(), Error> {
    let (own, args): (Vec<&str>, Vec<&str>) = args.iter().partition(|arg| **arg == "--cpu-only");
    let floor = if own.is_empty() { card() } else { Err("--cpu-only".into()) };
    let features = match floor {
        Ok((card, floor)) => {
            println!("{card}: the kernels are built for {floor} alone, which takes some minutes");
            setup::device_toolchain().map_err(Error::DemoToolchain)?;
            Some(format!("cuda,{}", feature(floor)))
        }
        Err(reason) => {
            println!("built for the CPU alone ({reason})");
            None
        }
    };
    let mut command =
        process::cargo(root, &["run", "--release", "--package", "generate", "--no-default-features"]);
    if let Some(features) = features {
        command.args(["--features", &features]);
    }
    process::run(command.arg("--").args(args))
}

/// The floor's feature of the crate.
fn feature(floor: Arch) -> String {
    floor.name().replace('_', "")
}

/// The first card, and the floor that it and its driver run best; or why there is none.
fn card() -> Result<(String, Arch), String> {
    cuda_loader::load().map_err(|error| error.to_string())?;
    let driver = |error: cuda_loader::DriverError| format!("the driver says {error}");
    cuda_loader::init().map_err(driver)?;
    if cuda_loader::device_count().map_err(driver)? == 0 {
        return Err("the driver knows no card".into());
    }
    let device = device_get(0).map_err(driver)?;
    let get = |attribute| device_attribute(device, attribute).map(i32::unsigned_abs).map_err(driver);
    let major = get(DeviceAttribute::ComputeCapabilityMajor)?;
    let minor = get(DeviceAttribute::ComputeCapabilityMinor)?;
    let name = device_name(device).map_err(driver)?;
    let version = cuda_loader::driver_version().map_err(driver)?;
    let floor = best_floor((major, minor), version);
    floor.map(|floor| (name.clone(), floor)).ok_or(format!("{name} is older than every kernel"))
}

/// Of those that are built by default.
fn best_floor((major, minor): (u32, u32), driver: (u32, u32)) -> Option<Arch> {
    // The first driver that takes the PTX version of each: ARCHITECTURE, "PTX versions".
    let needed = |floor| match floor {
        Arch::Sm61 => Some((10, 0)),
        Arch::Sm80 => Some((11, 4)),
        Arch::Sm90a => Some((12, 0)),
        Arch::Sm100 => None,
    };
    let runs =
        |floor: &Arch| floor.runs_on(major, minor) && needed(*floor).is_some_and(|needed| driver >= needed);
    Arch::PREFERRED.into_iter().find(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_gets_the_floor_of_its_own() {
        for (capability, driver, expected) in [
            ((9, 0), (13, 0), Some(Arch::Sm90a)),
            ((9, 0), (11, 8), Some(Arch::Sm80)),
            ((8, 9), (12, 4), Some(Arch::Sm80)),
            ((12, 0), (13, 0), Some(Arch::Sm80)),
            ((7, 5), (12, 4), Some(Arch::Sm61)),
            ((5, 2), (12, 4), None),
        ] {
            assert_eq!(best_floor(capability, driver), expected, "{capability:?} {driver:?}");
        }
    }

    /// What the root's manifest calls them.
    #[test]
    fn every_floor_is_a_feature() {
        let manifest =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml")).unwrap();
        for floor in Arch::ALL {
            assert!(manifest.contains(&format!("\n{} = [", feature(floor))), "{floor}");
        }
    }
}
