//! Builds a small device crate and looks into the PTX. Without a device toolchain the tests say so and pass, unless
//! `REQUIRE_DEVICE_TOOLCHAIN` is set.

mod builds;
mod wrappers;

use std::fs;
use std::path::{Path, PathBuf};

use cuda_builder::{CudaBuilder, DeviceToolchain, NvvmArch};
use testkit::gpu::{skip_optional, workspace_root};

/// A copy of the crate `tests/fixture` that a test may change.
struct Fixture {
    path: PathBuf,
    target_dir: PathBuf,
}

impl Fixture {
    /// `None`, and the reason on standard error, where no toolchain can build it.
    #[track_caller]
    fn new(name: &str) -> Option<Fixture> {
        if let Err(error) = DeviceToolchain::find() {
            let required = std::env::var_os("REQUIRE_DEVICE_TOOLCHAIN").is_some_and(|value| value != "0");
            assert!(!required, "REQUIRE_DEVICE_TOOLCHAIN is set, but: {error}");
            skip_optional(&error.to_string());
            return None;
        }
        // The same folder every time, so that the shared target directory does not grow with each run.
        let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let path = scratch.join("cuda_builder").join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(path.join("src")).expect("a folder for the copy");

        let original = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixture");
        for file in fs::read_dir(original.join("src")).expect("the fixture") {
            let file = file.expect("a source file");
            fs::copy(file.path(), path.join("src").join(file.file_name())).expect("a copy");
        }
        let manifest = fs::read_to_string(original.join("Cargo.toml")).expect("the fixture's manifest");
        let cuda_std = workspace_root().join("crates/cuda_std");
        let manifest = manifest.replace("\"../../../cuda_std\"", &format!("{cuda_std:?}"));
        fs::write(path.join("Cargo.toml"), manifest).expect("a manifest");
        // The versions that the workspace has already.
        fs::copy(workspace_root().join("Cargo.lock"), path.join("Cargo.lock")).expect("a lock file");

        let target = scratch.parent().expect("the target directory");
        Some(Fixture { path, target_dir: target.join("cuda_builder") })
    }

    fn builder(&self) -> CudaBuilder {
        CudaBuilder::new(&self.path).target_dir(&self.target_dir)
    }

    /// What the compiler itself wrote for a feature.
    fn raw_ptx(&self, arch: NvvmArch, feature: &str) -> PathBuf {
        let name = self.path.file_name().expect("a name").to_str().expect("a plain name");
        let folder = self.target_dir.join(arch.target_cpu());
        let found = fs::read_dir(&folder).expect("the target directory").flatten().find(|file| {
            let file = file.file_name().into_string().unwrap_or_default();
            file.starts_with(&format!("{name}-")) && file.ends_with(&format!(".{feature}.raw.ptx"))
        });
        found.unwrap_or_else(|| panic!("no raw PTX of {name} in {}", folder.display())).path()
    }
}
