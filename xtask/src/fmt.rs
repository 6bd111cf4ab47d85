//! `cargo xtask fmt`: `cargo fmt`, and the operators' and collectives' sources, whose modules are made by macros
//! (`abi::for_each_operator!`, `abi::for_each_collective!`), where `cargo fmt` does not find them.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Error;
use crate::process::{cargo, run as run_command};

/// Where each operator or collective has a file or a folder.
const FOLDERS: [&str; 7] = [
    "crates/abi/src/ops",
    "crates/abi/src/collectives",
    "gpu/src/ops",
    "gpu/src/collectives",
    "host/src/ops",
    "tests/ops",
    "benches/ops",
];

/// Formats all, or with `--check` says what is not formatted.
pub fn run(root: &Path, args: &[&str]) -> Result<(), Error> {
    run_command(cargo(root, &["fmt", "--all"]).args(args))?;
    run_command(&mut operators(root, args))
}

/// `rustfmt` on the roots of those modules, from which it finds the rest.
pub fn operators(root: &Path, args: &[&str]) -> Command {
    let mut rustfmt = Command::new("rustfmt");
    rustfmt.args(["--edition", "2024"]).args(args).current_dir(root);
    for folder in FOLDERS {
        let mut found: Vec<PathBuf> = std::fs::read_dir(root.join(folder))
            .into_iter()
            .flatten()
            .filter_map(Result::ok)
            .map(|entry| entry.path())
            .map(|path| if path.is_dir() { path.join("mod.rs") } else { path })
            .filter(|path| path.is_file() && path.extension().is_some_and(|extension| extension == "rs"))
            .collect();
        found.sort();
        rustfmt.args(found);
    }
    rustfmt
}
