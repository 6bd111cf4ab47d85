//! Builds a device crate to PTX from a build script, with an API like that of Rust-CUDA's `cuda_builder`.
//!
//! ```no_run
//! use std::path::Path;
//!
//! use cuda_builder::{CudaBuilder, NvvmArch};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     println!("cargo::rerun-if-changed=kernels");
//!     let ptx = Path::new(&std::env::var("OUT_DIR")?).join("kernels.ptx");
//!     CudaBuilder::new("kernels").arch(NvvmArch::Compute61).copy_to(ptx).build()?;
//!     Ok(())
//! }
//! ```
//!
//! The program has it by `include_str!(concat!(env!("OUT_DIR"), "/kernels.ptx"))`. `examples/own_operator` of this
//! repository is all of it: the device crate `kernels` (a library without `std`, with `cuda_std`, `#![feature(abi_ptx,
//! asm_experimental_arch)]` and a panic handler on that target), its build script, its tests in the simulator and its
//! launch.
//!
//! Rust-CUDA compiles through NVVM; this one drives rustc's own `nvptx64-nvidia-cuda` target, for the architectures of
//! [`NvvmArch`]. A few flags are not a matter of taste:
//! - `-Zmir-enable-passes=-JumpThreading`: up to rustc 1.96 that pass clones calls, barriers among them, into the arms
//!   of a divergent branch.
//! - `-unroll-threshold`: arrays of accumulators stay in registers only if the loops over them unroll completely.
//! - `lto = "fat"`, `--emit=asm`: one PTX module holds the crate and what it uses of `core`.
//! - `staticlib`, not `cdylib`: rustc writes it without a linker (rustup ships no bitcode linker with a stable
//!   toolchain), and with `-Zno-link` in place of one cargo misses the library and compiles every image every time.
//!
//! Device code is compiled with a `cfg` for each thing that the architecture lacks ([`Need::lacking`]):
//! `#[cfg(not(lacks_tma))]` is what only exists where TMA does, and on the host, whose simulator has everything. A
//! device crate names those that it uses under `unexpected_cfgs` of its `[lints.rust]`.
//!
//! The crate is built with `cargo rustc` in a target directory per architecture, so `core` is compiled once per
//! architecture, not once per image, and an image whose sources did not change is not compiled again.

mod ptx;
mod toolchain;

use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use abi::{Arch, Need};

pub use ptx::split_kernels;
pub use toolchain::{DeviceToolchain, Rejection, ToolchainError};

/// What the PTX is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NvvmArch {
    /// Pascal, compute capability 6.1, and everything later.
    Compute61,
    /// Ampere, compute capability 8.0, and everything later.
    Compute80,
    /// Hopper, compute capability 9.0 with its `a` features, and only that.
    Compute90a,
    /// Blackwell, compute capability 10.0, and everything later, 12.0 among it.
    Compute100,
}

impl From<Arch> for NvvmArch {
    fn from(floor: Arch) -> Self {
        match floor {
            Arch::Sm61 => NvvmArch::Compute61,
            Arch::Sm80 => NvvmArch::Compute80,
            Arch::Sm90a => NvvmArch::Compute90a,
            Arch::Sm100 => NvvmArch::Compute100,
        }
    }
}

impl NvvmArch {
    /// The floor, whose table says what it has.
    pub const fn floor(self) -> Arch {
        match self {
            NvvmArch::Compute61 => Arch::Sm61,
            NvvmArch::Compute80 => Arch::Sm80,
            NvvmArch::Compute90a => Arch::Sm90a,
            NvvmArch::Compute100 => Arch::Sm100,
        }
    }

    /// `target-cpu` of the nvptx64 target.
    pub const fn target_cpu(self) -> &'static str {
        self.floor().name()
    }

    /// The PTX version that is asked for: the lowest that has the instructions of the floor, since a driver refuses
    /// PTX newer than itself. 6.3 runs on drivers from branch 410 on, 7.4 from 470, 8.0 from 525, 8.6
    /// from 565 (the first that knows a card of Blackwell is 570).
    const fn ptx_feature(self) -> &'static str {
        match self {
            NvvmArch::Compute61 => "+ptx63",
            NvvmArch::Compute80 => "+ptx74",
            NvvmArch::Compute90a => "+ptx80",
            NvvmArch::Compute100 => "+ptx86",
        }
    }
}

/// Why a build gave no PTX.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// No compiler that can build device code.
    #[error(transparent)]
    Toolchain(#[from] ToolchainError),
    /// The compiler could not be started.
    #[error("cannot run {command}")]
    Spawn {
        /// The program.
        command: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The device crate does not compile; the compiler's messages are on standard error.
    #[error("{crate_path} does not compile for {arch} (the compiler's messages are above)")]
    Compile {
        /// The device crate.
        crate_path: String,
        /// The architecture.
        arch: &'static str,
    },
    /// A file could not be read or written.
    #[error("{path}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The PTX is not what this crate expects of the compiler.
    #[error("{path}: {reason}")]
    Ptx {
        /// The PTX file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// Builds one PTX image of a device crate.
#[derive(Clone, Debug)]
pub struct CudaBuilder {
    crate_path: PathBuf,
    arch: NvvmArch,
    features: Option<Vec<String>>,
    unroll_threshold: u32,
    is_locked: bool,
    target_dir: Option<PathBuf>,
    copy_to: Option<PathBuf>,
}

impl CudaBuilder {
    /// A builder for the crate at `crate_path`, relative to the manifest of the package whose build script this is.
    pub fn new(crate_path: impl AsRef<Path>) -> Self {
        let manifest = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default();
        CudaBuilder {
            crate_path: Path::new(&manifest).join(crate_path),
            arch: NvvmArch::Compute61,
            features: None,
            unroll_threshold: 4000,
            is_locked: false,
            target_dir: None,
            copy_to: None,
        }
    }

    /// What the PTX is built for; [`NvvmArch::Compute61`] if not set.
    pub fn arch(mut self, arch: NvvmArch) -> Self {
        self.arch = arch;
        self
    }

    /// Builds with just these cargo features of the crate, without its default ones: how one crate gives many images.
    pub fn features<S: Into<String>>(mut self, features: impl IntoIterator<Item = S>) -> Self {
        self.features = Some(features.into_iter().map(Into::into).collect());
        self
    }

    /// LLVM's loop unrolling threshold; 4000 if not set.
    pub fn unroll_threshold(mut self, threshold: u32) -> Self {
        self.unroll_threshold = threshold;
        self
    }

    /// Builds by the lock of the crate's workspace, which must be there and up to date: cargo's `--locked`.
    pub fn locked(mut self) -> Self {
        self.is_locked = true;
        self
    }

    /// Where cargo keeps what it compiles, in a folder per architecture; if not set, `cuda_builder` in the target
    /// directory of the build whose script this is. Crates that share it share the compiled `core`.
    pub fn target_dir(mut self, path: impl AsRef<Path>) -> Self {
        self.target_dir = Some(path.as_ref().to_path_buf());
        self
    }

    /// Where the finished PTX is put; if not set, beside the compiler's own in the target directory.
    pub fn copy_to(mut self, path: impl AsRef<Path>) -> Self {
        self.copy_to = Some(path.as_ref().to_path_buf());
        self
    }

    /// Builds, and returns the path of the PTX.
    ///
    /// Prints nothing for cargo: which files should rerun the build script is its author's to say, once for all images.
    pub fn build(&self) -> Result<PathBuf, BuildError> {
        let toolchain = DeviceToolchain::find()?;
        let arch = self.arch.target_cpu();
        let target_dir = self.target_dir.clone().unwrap_or_else(default_target_dir).join(arch);
        let crate_path = self
            .crate_path
            .canonicalize()
            .map_err(|source| BuildError::Io { path: self.crate_path.clone(), source })?;
        let image = self.features.as_ref().map_or("default".into(), |features| features.join("+"));
        let image = format!("{}.{image}", self.id(&crate_path, &toolchain));
        let raw = target_dir.join(format!("{image}.raw.ptx"));
        let path = self.copy_to.clone().unwrap_or_else(|| target_dir.join(format!("{image}.ptx")));
        create_dir(&target_dir)?;

        let mut cargo = Command::new(&toolchain.cargo);
        remove_outer_settings(&mut cargo, std::env::vars_os().map(|(name, _)| name));
        cargo
            .env("RUSTC", &toolchain.rustc)
            // The nvptx64 target, `-Z` flags and device intrinsics are unstable; the compiler is a stable one.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", self.rustflags())
            // The user's cargo configuration has settings of these kinds for other builds. A wrapper of no name is
            // none.
            .env("CARGO_BUILD_BUILD_DIR", &target_dir)
            .env("RUSTC_WRAPPER", "")
            .env("RUSTC_WORKSPACE_WRAPPER", "")
            .env("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "false")
            .env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "false")
            .env("CARGO_INCREMENTAL", "0")
            .env("CARGO_PROFILE_RELEASE_LTO", "fat")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
            .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
            .env("CARGO_PROFILE_RELEASE_STRIP", "none")
            .current_dir(&crate_path)
            .args(["rustc", "--release", "--lib", "--crate-type", "staticlib"])
            .args(["--target", "nvptx64-nvidia-cuda", "-Zbuild-std=core", "--quiet"])
            .arg("--target-dir")
            .arg(&target_dir);
        if self.is_locked {
            cargo.arg("--locked");
        }
        if let Some(features) = &self.features {
            cargo.args(["--no-default-features", "--features", &features.join(",")]);
        }
        let mut emit = OsString::from("--emit=asm=");
        emit.push(&raw);
        // Code is generated in this last step, for all crates at once: the flag need not be known to the others.
        cargo.arg("--").arg(emit).arg(format!("-Cllvm-args=-unroll-threshold={}", self.unroll_threshold));

        let command = toolchain.cargo.display().to_string();
        let output = cargo.output().map_err(|source| BuildError::Spawn { command, source })?;
        if !output.status.success() {
            eprintln!("{}", String::from_utf8_lossy(&output.stderr));
            return Err(BuildError::Compile { crate_path: self.crate_path.display().to_string(), arch });
        }

        let text =
            std::fs::read_to_string(&raw).map_err(|source| BuildError::Io { path: raw.clone(), source })?;
        let text = ptx::finish(&text).map_err(|reason| BuildError::Ptx { path: raw, reason })?;
        std::fs::write(&path, text).map_err(|source| BuildError::Io { path: path.clone(), source })?;
        Ok(path)
    }

    /// A name for a build's files in a target directory that other builds use too: features of two crates may have the
    /// same name, and one crate may be built by two compilers or with two thresholds; cargo, which does not know of
    /// these files, would call one's image fresh when the other has replaced it.
    fn id(&self, crate_path: &Path, toolchain: &DeviceToolchain) -> String {
        let mut hasher = DefaultHasher::new();
        (crate_path, &toolchain.rustc, &toolchain.version, self.unroll_threshold).hash(&mut hasher);
        let name = crate_path.file_name().unwrap_or_default().to_string_lossy();
        format!("{name}-{:016x}", hasher.finish())
    }

    fn rustflags(&self) -> String {
        let (cpu, ptx) = (self.arch.target_cpu(), self.arch.ptx_feature());
        let mut flags =
            format!("-C target-cpu={cpu} -C target-feature={ptx} -Zmir-enable-passes=-JumpThreading");
        for need in Need::ALL {
            flags += &format!(" --check-cfg=cfg({})", need.lacking());
            if !self.arch.floor().has(need) {
                flags += &format!(" --cfg={}", need.lacking());
            }
        }
        flags
    }
}

/// `target/cuda_builder`, shared by all profiles of the outer build. A build script's OUT_DIR is
/// `<target>/<profile>/build/<package>/out`.
fn default_target_dir() -> PathBuf {
    let out_dir = std::env::var_os("OUT_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    let target = out_dir.ancestors().nth(4).unwrap_or(&out_dir);
    target.join("cuda_builder")
}

fn create_dir(path: &Path) -> Result<(), BuildError> {
    std::fs::create_dir_all(path).map_err(|source| BuildError::Io { path: path.into(), source })
}

/// Of the environment variables `names`, keeps from `command` what the outer cargo tells its build scripts and its user
/// told it about compiler, flags, profile and folders: all that is for another target than ours. Where the toolchains,
/// registries and network are stays.
fn remove_outer_settings(command: &mut Command, names: impl Iterator<Item = OsString>) {
    for name in names {
        let text = name.to_string_lossy();
        let ours = ["CARGO_HOME", "RUSTUP_HOME", "CARGO_TERM_COLOR"].contains(&&*text)
            || ["CARGO_REGISTRIES_", "CARGO_HTTP_", "CARGO_NET_"]
                .iter()
                .any(|prefix| text.starts_with(prefix));
        let outer = ["CARGO", "RUST", "CLIPPY"].iter().any(|prefix| text.starts_with(prefix));
        if outer && !ours {
            command.env_remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_the_outer_build_are_removed_and_no_others() {
        let outer = [
            "CARGO",
            "CARGO_BUILD_JOBS",
            "CARGO_BUILD_RUSTFLAGS",
            "CARGO_BUILD_TARGET",
            "CARGO_BUILD_TARGET_DIR",
            "CARGO_CFG_TARGET_ARCH",
            "CARGO_ENCODED_RUSTFLAGS",
            "CARGO_INCREMENTAL",
            "CARGO_MAKEFLAGS",
            "CARGO_MANIFEST_DIR",
            "CARGO_PROFILE_RELEASE_LTO",
            "CARGO_TARGET_DIR",
            "CARGO_TARGET_NVPTX64_NVIDIA_CUDA_RUSTFLAGS",
            "CARGO_UNSTABLE_BUILD_STD",
            "CLIPPY_ARGS",
            "CLIPPY_CONF_DIR",
            "RUSTC",
            "RUSTC_BOOTSTRAP",
            "RUSTC_LINKER",
            "RUSTC_WORKSPACE_WRAPPER",
            "RUSTC_WRAPPER",
            "RUSTDOCFLAGS",
            "RUSTFLAGS",
            "RUSTUP_TOOLCHAIN",
        ];
        let kept = [
            "PATH",
            "HOME",
            "LD_LIBRARY_PATH",
            "CARGO_HOME",
            "RUSTUP_HOME",
            "CARGO_NET_OFFLINE",
            "CARGO_NET_GIT_FETCH_WITH_CLI",
            "CARGO_HTTP_PROXY",
            "CARGO_REGISTRIES_MINE_TOKEN",
            "CARGO_TERM_COLOR",
            "MAKEFLAGS",
        ];
        let mut command = Command::new("cargo");
        remove_outer_settings(&mut command, outer.iter().chain(&kept).map(OsString::from));
        let removed: Vec<_> = command.get_envs().collect();
        let expected: Vec<_> = outer.iter().map(|name| (name.as_ref(), None)).collect();
        assert_eq!(removed, expected);
    }

    #[test]
    fn builds_have_files_of_their_own() {
        let toolchain = |rustc: &str| DeviceToolchain {
            rustc: rustc.into(),
            cargo: "cargo".into(),
            version: "1.95.0".into(),
            source: String::new(),
        };
        let builder = |path: &str, threshold| CudaBuilder::new(path).unroll_threshold(threshold);
        let id =
            |path: &str, threshold, rustc| builder(path, threshold).id(Path::new(path), &toolchain(rustc));
        let first = id("/one/gpu", 4000, "a");
        assert!(first.starts_with("gpu-"), "{first}");
        assert_eq!(id("/one/gpu", 4000, "a"), first);
        for other in [id("/two/gpu", 4000, "a"), id("/one/gpu", 8000, "a"), id("/one/gpu", 4000, "b")] {
            assert_ne!(other, first);
        }
    }

    /// Each thing that an architecture lacks is a `cfg`, and none that it has.
    #[test]
    fn what_an_architecture_lacks_is_said() {
        for floor in Arch::ALL {
            let flags = CudaBuilder::new("gpu").arch(floor.into()).rustflags();
            let flags: Vec<&str> = flags.split(' ').collect();
            for need in Need::ALL {
                let flag = format!("--cfg={}", need.lacking());
                assert_eq!(flags.contains(&flag.as_str()), !floor.has(need), "{floor} {need:?}");
            }
        }
    }

    #[test]
    fn a_missing_crate_is_named() {
        let Err(error) = CudaBuilder::new("/no/such/crate").build() else { panic!("built") };
        match error {
            BuildError::Io { path, .. } => assert_eq!(path, Path::new("/no/such/crate")),
            BuildError::Toolchain(_) => {}
            other => panic!("{other:?}"),
        }
    }
}
