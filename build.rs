//! Builds the device images, one per operator and architecture floor, and lists them for `src/images.rs`.

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
    use cuda_builder::{BuildError, CudaBuilder, NvvmArch};

    pub fn build() -> Result<(), BuildError> {
        for path in
            ["gpu/src", "gpu/Cargo.toml", "crates/abi/src", "crates/cuda_std", "crates/cuda_std_macros"]
        {
            println!("cargo:rerun-if-changed={path}");
        }
        println!("cargo:rerun-if-env-changed={}", cuda_builder::DeviceToolchain::VARIABLE);
        let out_dir = PathBuf::from(var_os("OUT_DIR").unwrap_or_default());
        let arches: Vec<Arch> = Arch::ALL.into_iter().filter(|&arch| wanted(arch)).collect();
        // One architecture per thread: each has a target directory of its own.
        let results: Vec<Result<(), BuildError>> = std::thread::scope(|scope| {
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
        results.into_iter().collect::<Result<(), _>>()?;

        let mut list = String::from("&[\n");
        for arch in arches {
            for family in FAMILIES {
                let path = out_dir.join(file_name(family, arch));
                let _ = writeln!(
                    list,
                    "    Image {{ family: {family:?}, arch: Arch::{arch:?}, ptx: Ptx::Deflated(include_bytes!({path:?})) }},"
                );
            }
        }
        list.push(']');
        let path = out_dir.join("images.rs");
        std::fs::write(&path, list).map_err(|source| BuildError::Io { path, source })
    }

    fn build_arch(arch: Arch, out_dir: &Path) -> Result<(), BuildError> {
        let nvvm = match arch {
            Arch::Sm61 => NvvmArch::Compute61,
            Arch::Sm80 => NvvmArch::Compute80,
            Arch::Sm90a => NvvmArch::Compute90a,
        };
        for family in FAMILIES {
            let image = out_dir.join(file_name(family, arch));
            let ptx = CudaBuilder::new("gpu").arch(nvvm).features([*family]).build()?;
            let text = std::fs::read(&ptx).map_err(|source| BuildError::Io { path: ptx, source })?;
            let deflated = miniz_oxide::deflate::compress_to_vec(&text, 9);
            std::fs::write(&image, deflated).map_err(|source| BuildError::Io { path: image, source })?;
        }
        Ok(())
    }

    fn file_name(family: &str, arch: Arch) -> String {
        format!("{family}.{arch}.ptx.deflate")
    }

    fn wanted(arch: Arch) -> bool {
        match arch {
            Arch::Sm61 => cfg!(feature = "sm61"),
            Arch::Sm80 => cfg!(feature = "sm80"),
            Arch::Sm90a => cfg!(feature = "sm90a"),
        }
    }
}
