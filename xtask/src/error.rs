//! What can stop a recipe.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use cuda_builder::ToolchainError;

/// Why a recipe stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line is not one of the recipes.
    #[error("`{0}` is not a recipe; `cargo xtask help` lists them")]
    Usage(String),
    /// A program could not be started.
    #[error("cannot start `{command}`: {source}")]
    Start {
        /// The whole command line.
        command: String,
        /// What the system said.
        source: io::Error,
    },
    /// A program ended with an error.
    #[error("failed: {command}\n  ({status})")]
    Failed {
        /// The whole command line.
        command: String,
        /// How it ended.
        status: ExitStatus,
    },
    /// A file or folder could not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A table is not what it should be.
    #[error("{}:{line}: {reason}", path.display())]
    Table {
        /// The file.
        path: PathBuf,
        /// Where in it.
        line: usize,
        /// What was expected.
        reason: String,
    },
    /// There is no compiler for the device code, and none could be installed.
    #[error("{0}")]
    Toolchain(#[from] ToolchainError),
    /// [`Error::Toolchain`] in the demo, which has another way.
    #[error("{0}\nWithout the CUDA backend: cargo xtask demo --cpu-only")]
    DemoToolchain(ToolchainError),
    /// There is no ptxas, and none could be installed.
    #[error(
        "ptxas is missing: {reason}\n\
         Put one on the path (it comes with every CUDA toolkit) or name it in WARPFORGE_PTXAS.\n\
         Without the CUDA backend: cargo xtask test --no-cuda"
    )]
    Ptxas {
        /// What went wrong.
        reason: String,
    },
    /// Cargo built no program of a kind that the bundle cannot do without.
    #[error("cargo built no {kind}: there is nothing to bundle")]
    NothingBuilt {
        /// The kind of target, in cargo's words.
        kind: &'static str,
    },
    /// A package is larger than a registry takes.
    #[error("{} is {bytes} bytes; crates.io takes {limit}", path.display())]
    TooLarge {
        /// The package.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The largest size allowed.
        limit: u64,
    },
    /// A file does not hold what it should.
    #[error("{}, line {line}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A measurement does not say what it was made on.
    #[error("{} has no line of kind `run`: was it cut short?", path.display())]
    NoRun {
        /// The results.
        path: PathBuf,
    },
    /// A case is there twice, so its name does not tell which is meant.
    #[error("{} has the case `{name}` twice", path.display())]
    TwiceTimed {
        /// The results.
        path: PathBuf,
        /// The case.
        name: String,
    },
    /// A plot could not be drawn.
    #[error("{}: {reason}", path.display())]
    Plot {
        /// The plot.
        path: PathBuf,
        /// What went wrong.
        reason: String,
    },
    /// There is no place for the figures.
    #[error("{} has no lines `{begin}` and `{end}`, in this order", path.display())]
    NoMarkers {
        /// The file.
        path: PathBuf,
        /// The line before the figures.
        begin: &'static str,
        /// The line behind them.
        end: &'static str,
    },
    /// Cases are slower than in the last record.
    #[error("{count} cases are slower than in the last record")]
    Slower {
        /// How many.
        count: usize,
    },
    /// The bundle is too large to be carried.
    #[error("{} is {bytes} bytes; {limit} are allowed", folder.display())]
    BundleTooLarge {
        /// The bundle.
        folder: PathBuf,
        /// Its size.
        bytes: u64,
        /// The largest size allowed.
        limit: u64,
    },
}
