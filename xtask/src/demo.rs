//! `cargo xtask demo`: from a fresh clone to generated text.

use std::path::Path;

use crate::error::Error;
use crate::{process, setup};

/// Sets up what the build needs, then runs the example `generate` with `args`; without any, its defaults are the demo.
pub fn run(root: &Path, args: &[&str]) -> Result<(), Error> {
    let (own, args): (Vec<&str>, Vec<&str>) = args.iter().partition(|arg| **arg == "--cpu-only");
    let mut command = process::cargo(root, &["run", "--release", "--example", "generate"]);
    if own.is_empty() {
        setup::device_toolchain().map_err(Error::DemoToolchain)?;
    } else {
        command.args(["--no-default-features", "--features", "models"]);
    }
    process::run(command.arg("--").args(args))
}
