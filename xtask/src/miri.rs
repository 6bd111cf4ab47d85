//! `cargo xtask miri`: what of `host` works with addresses, in Miri.

use std::path::Path;
use std::process::Command;

use crate::error::Error;
use crate::process::run as run_command;

/// The tests that are run: the pool's, but for those of many thousand steps; views; simulated devices. The operators on
/// the CPU are products by SIMD, which Miri cannot run, or loops over the same views.
const TESTS: [&str; 9] = [
    "memory::book",
    "memory::tests::a_",
    "memory::tests::blocks",
    "memory::tests::done",
    "memory::tests::out",
    "memory::tests::sizes",
    "memory::tests::waiting",
    "simulator::",
    "tensor::",
];

/// Runs them.
pub fn run(root: &Path) -> Result<(), Error> {
    run_command(&mut tests(root))
}

/// What runs them.
pub fn tests(root: &Path) -> Command {
    let package = ["test", "--package", "warpforge-host", "--no-default-features", "--lib", "--"];
    let mut cargo = miri(root, &[&package[..], &TESTS].concat());
    // An address is a number to the library, as it is to a card; proptest looks for its files. Properties have few
    // cases there by `cfg!(miri)`.
    cargo.env("MIRIFLAGS", "-Zmiri-permissive-provenance -Zmiri-disable-isolation");
    cargo
}

/// What fails where there is no nightly with Miri.
pub fn version(root: &Path) -> Command {
    // One that is not there is not fetched.
    let mut cargo = miri(root, &["--version"]);
    cargo.env("RUSTUP_AUTO_INSTALL", "0");
    cargo
}

/// rustup finds the nightly.
fn miri(root: &Path, args: &[&str]) -> Command {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(root).args(["+nightly", "miri"]).args(args);
    // Of the cargo that runs this recipe.
    for variable in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN"] {
        cargo.env_remove(variable);
    }
    cargo
}
