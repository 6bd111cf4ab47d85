//! Builds the device images, one per operator and architecture floor, and lists them, kernel by kernel, for `src/images.rs`.

use std::process::ExitCode;

fn main() -> ExitCode {
    #[cfg(feature = "cuda")]
    if let Err(error) = images::build() {
        let mut message = format!("warpforge: {error}");
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            message += &format!(": {error}");
            cause = error.source();
        }
        eprintln!("{message}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

#[cfg(feature = "cuda")]
mod images {
    use std::env::var_os;
    use std::fmt::Write as _;
    use std::path::{Path, PathBuf};

    use abi::{Arch, ops::FAMILIES};
    use cuda_builder::{BuildError, CudaBuilder, split_kernels};

    pub fn build() -> Result<(), BuildError> {
        for path in [
            "gpu/src",
            "gpu/Cargo.toml",
            "Cargo.toml",
            "Cargo.lock",
            "crates/abi/src",
            "crates/cuda_std",
            "crates/cuda_std_macros",
        ] {
            println!("cargo:rerun-if-changed={path}");
        }
        println!("cargo:rerun-if-env-changed={}", cuda_builder::DeviceToolchain::VARIABLE);
        let out_dir = PathBuf::from(var_os("OUT_DIR").unwrap_or_default());
        let arches: Vec<Arch> = Arch::ALL.into_iter().filter(|&arch| wanted(arch)).collect();
        // One architecture per thread: each has a target directory of its own.
        let results: Vec<Result<String, BuildError>> = std::thread::scope(|scope| {
            let build = |&arch| {
                scope.spawn({
                    let out_dir = &out_dir;
                    move || build_arch(arch, out_dir)
                })
            };
            let threads: Vec<_> = arches.iter().map(build).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        let images = results.into_iter().collect::<Result<String, _>>()?;
        write(out_dir.join("images.rs"), format!("&[\n{images}]").as_bytes())
    }

    /// The images of an architecture, as `src/images.rs` has them.
    fn build_arch(arch: Arch, out_dir: &Path) -> Result<String, BuildError> {
        let mut list = String::new();
        for family in FAMILIES {
            let ptx = CudaBuilder::new("gpu").arch(arch.into()).features([*family]).locked().build()?;
            let text =
                std::fs::read_to_string(&ptx).map_err(|source| BuildError::Io { path: ptx, source })?;
            let (head, kernels) = split_kernels(&text);
            let _ = writeln!(
                list,
                "Image {{ family: {family:?}, arch: host::Arch::{arch:?}, ptx: host::Ptx::Kernels {{"
            );
            let _ = writeln!(list, "    head: {head:?},\n    kernels: &[");
            for (name, text) in kernels {
                let path = out_dir.join(format!("{name}.{arch}.ptx.deflate"));
                let _ = writeln!(list, "        ({name:?}, include_bytes!({path:?})),");
                write(path, &miniz_oxide::deflate::compress_to_vec(text.as_bytes(), 9))?;
            }
            list.push_str("    ],\n} },\n");
        }
        Ok(list)
    }

    fn write(path: PathBuf, bytes: &[u8]) -> Result<(), BuildError> {
        std::fs::write(&path, bytes).map_err(|source| BuildError::Io { path, source })
    }

    fn wanted(arch: Arch) -> bool {
        match arch {
            Arch::Sm61 => cfg!(feature = "sm61"),
            Arch::Sm80 => cfg!(feature = "sm80"),
            Arch::Sm90a => cfg!(feature = "sm90a"),
            Arch::Sm100 => cfg!(feature = "sm100"),
        }
    }
}
