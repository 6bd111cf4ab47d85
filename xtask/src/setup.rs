//! `cargo xtask setup`: gets what is missing to build the device code and to check it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use cuda_builder::{DeviceToolchain, ToolchainError};

use crate::error::Error;
use crate::process::{is_program, on_path, probe, run as run_command};

/// The wheel that carries ptxas. CUDA 13.0 is what driver branch 580 has, so this is the assembler that such a driver
/// uses; it no longer takes sm_61 as its target, for which the PTX is assembled for sm_75.
const PTXAS_WHEEL: &str = "nvidia-cuda-nvcc==13.0.88";
/// What the wheel's bytes are: for x86_64 and for aarch64, as the index had them in November 2026.
const PTXAS_HASHES: [&str; 2] = [
    "sha256:56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
    "sha256:c7ff28f86a24effdc6c034fa15230c549a273e4771b10a7fec14996f8cf3307f",
];
/// Where the wheel is unpacked, seen from the repository's root.
const PTXAS_FOLDER: &str = "target/xtask/cuda";
/// Where ptxas lies in [`PTXAS_FOLDER`].
const PTXAS_IN_WHEEL: &str = "nvidia/cu13/bin/ptxas";
/// Debian's packages of a device toolchain.
const DISTRIBUTION: [&str; 3] = ["rustc-web", "cargo-web", "rust-web-src"];

/// Both parts of the setup.
pub fn run(root: &Path) -> Result<(), Error> {
    device_toolchain()?;
    ptxas(root)?;
    Ok(())
}

/// Finds a device toolchain, or installs one: rustup's component first, the distribution's packages second.
pub fn device_toolchain() -> Result<DeviceToolchain, ToolchainError> {
    let found = match DeviceToolchain::find() {
        Err(ToolchainError::NotFound { .. }) => install_device_toolchain(),
        found => found,
    }?;
    println!("device toolchain: rustc {} ({}), {}", found.version, found.source, found.rustc.display());
    Ok(found)
}

fn install_device_toolchain() -> Result<DeviceToolchain, ToolchainError> {
    println!("device toolchain: none on this machine yet");
    let ways: [fn() -> Result<(), String>; 2] = [
        || {
            on_path("rustup").ok_or("there is no rustup")?;
            let install =
                ["toolchain", "install", DeviceToolchain::RUSTUP_CHANNEL, "--component", "rust-src"];
            run_command(Command::new("rustup").args(install)).map_err(|error| error.to_string())
        },
        || apt_install(&DISTRIBUTION),
    ];
    for way in ways {
        match way() {
            Ok(()) => {
                let found = DeviceToolchain::find();
                if found.is_ok() {
                    return found;
                }
            }
            Err(reason) => println!("that did not work: {reason}"),
        }
    }
    DeviceToolchain::find()
}

/// Finds ptxas, or installs one below `target`: `WARPFORGE_PTXAS`, what an earlier setup installed, the path, a CUDA
/// toolkit in its usual place.
pub fn ptxas(root: &Path) -> Result<PathBuf, Error> {
    let named = env::var_os("WARPFORGE_PTXAS").filter(|file| !file.is_empty()).map(PathBuf::from);
    let installed = root.join(PTXAS_FOLDER).join(PTXAS_IN_WHEEL);
    let ptxas = match find_ptxas(named, &installed)? {
        Some(ptxas) => ptxas,
        None => install_ptxas(&root.join(PTXAS_FOLDER), installed)?,
    };
    // A wheel for another machine, or a file cut short, would otherwise look like broken PTX in the tests.
    let version = probe(Command::new(&ptxas).arg("--version"))
        .map_err(|reason| Error::Ptxas { reason: format!("{} does not run: {reason}", ptxas.display()) })?;
    let release = version.lines().find_map(|line| line.split_once("release ")).map_or("?", |(_, rest)| rest);
    println!("ptxas: {release}, {}", ptxas.display());
    // The tests run in other folders.
    std::path::absolute(&ptxas).map_err(|source| Error::File { path: ptxas, source })
}

fn find_ptxas(named: Option<PathBuf>, installed: &Path) -> Result<Option<PathBuf>, Error> {
    if let Some(named) = named {
        return match is_program(&named) {
            true => Ok(Some(named)),
            false => {
                Err(Error::Ptxas { reason: format!("WARPFORGE_PTXAS={} is no program", named.display()) })
            }
        };
    }
    let toolkit = PathBuf::from("/usr/local/cuda/bin/ptxas");
    let places = [Some(installed.to_path_buf()), on_path("ptxas"), Some(toolkit)];
    Ok(places.into_iter().flatten().find(|file| is_program(file)))
}

fn install_ptxas(folder: &Path, installed: PathBuf) -> Result<PathBuf, Error> {
    println!("ptxas: none on this machine yet");
    let failed = |reason: String| Error::Ptxas { reason };
    let pip = || probe(Command::new("python3").args(["-m", "pip", "--version"]));
    if let Err(reason) = pip() {
        println!("pip is missing: {reason}");
        apt_install(&["python3-pip"]).map_err(failed)?;
    }
    fs::create_dir_all(folder).map_err(|source| Error::File { path: folder.to_path_buf(), source })?;
    // pip takes hashes from a file alone, and then nothing that has none.
    let requirements = folder.join("requirements.txt");
    fs::write(&requirements, ptxas_requirement())
        .map_err(|source| Error::File { path: requirements.clone(), source })?;
    let mut install = Command::new("python3");
    install
        .args(["-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--only-binary", ":all:"])
        .args(["--require-hashes", "--requirement"])
        .arg(&requirements)
        .arg("--target")
        .arg(folder);
    // A user's pip configuration must not send the wheel elsewhere or refuse it.
    install.env("PIP_USER", "0").env("PIP_REQUIRE_VIRTUALENV", "0").env("PIP_ROOT_USER_ACTION", "ignore");
    run_command(&mut install).map_err(|error| failed(error.to_string()))?;
    match is_program(&installed) {
        true => Ok(installed),
        false => Err(failed(format!("{PTXAS_WHEEL} did not bring {}", installed.display()))),
    }
}

/// The wheel and its hashes, as pip's requirements file has them.
fn ptxas_requirement() -> String {
    let hashes = PTXAS_HASHES.map(|hash| format!(" --hash={hash}")).concat();
    format!("{PTXAS_WHEEL}{hashes}\n")
}

/// Installs Debian packages as root, updating apt's lists first.
fn apt_install(packages: &[&str]) -> Result<(), String> {
    on_path("apt-get").ok_or("there is no apt-get")?;
    let privileged: &[&str] = if probe(Command::new("id").arg("-u")).is_ok_and(|id| id == "0") {
        &[]
    } else if probe(Command::new("sudo").args(["-n", "true"])).is_ok() {
        &["sudo", "-n"]
    } else {
        return Err(format!("installing {} needs root", packages.join(", ")));
    };
    let apt_get = |args: &[&str]| {
        let apt = [
            "env",
            "DEBIAN_FRONTEND=noninteractive",
            "apt-get",
            "-qq",
            "-o",
            "Acquire::Retries=3",
            "-o",
            "Dpkg::Use-Pty=0",
        ];
        let words: Vec<&str> = [privileged, &apt, args].concat();
        run_command(Command::new(words[0]).args(&words[1..])).map_err(|error| error.to_string())
    };
    // One unreachable source makes the update fail, although the packages may come from another.
    if let Err(reason) = apt_get(&["update"]) {
        println!("that did not work: {reason}");
    }
    apt_get(&[&["install", "-y", "--no-install-recommends"], packages].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_ptxas_is_never_replaced() {
        let shell = PathBuf::from("/bin/sh");
        assert_eq!(find_ptxas(Some(shell.clone()), Path::new("/nowhere")).unwrap(), Some(shell));
        let message =
            find_ptxas(Some("/no/such/ptxas".into()), Path::new("/bin/sh")).unwrap_err().to_string();
        assert!(message.contains("WARPFORGE_PTXAS=/no/such/ptxas is no program"), "{message}");
    }

    #[test]
    fn the_installed_ptxas_comes_before_the_path() {
        assert_eq!(find_ptxas(None, Path::new("/bin/sh")).unwrap(), Some(PathBuf::from("/bin/sh")));
    }
}
