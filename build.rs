//! Lists the device images, kernel by kernel, for `src/images.rs`. Where their source is, in a checkout, they are
//! built, one per operator and floor; a published crate has them, compiled, from the crates `warpforge-images-*`.

use std::process::ExitCode;

fn main() -> ExitCode {
    #[cfg(feature = "cuda")]
    if let Err(error) = images::list() {
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
    use cuda_builder::{BuildError, CudaBuilder, DeviceToolchain, split_kernels};

    /// A floor's list of images, and that of all: Rust, which names the files beside it by the compiler's variable
    /// [`variable`].
    const LIST: &str = "images.rs";

    pub fn list() -> Result<(), BuildError> {
        let out_dir = PathBuf::from(var_os("OUT_DIR").unwrap_or_default());
        println!("cargo:rerun-if-changed=build.rs");
        let mut folders: Vec<(Arch, PathBuf)> =
            wanted().map(|(arch, folder)| (arch, folder.into())).collect();
        if Path::new("gpu/Cargo.toml").is_file() {
            for (arch, folder) in &mut folders {
                *folder = out_dir.join(arch.name());
            }
            build(&folders)?;
        }
        let mut images = String::from("&[\n");
        for (arch, folder) in &folders {
            println!("cargo:rustc-env={}={}", variable(*arch), folder.display());
            images += &read(folder.join(LIST))?;
        }
        write(out_dir.join(LIST), (images + "]").as_bytes())
    }

    fn build(folders: &[(Arch, PathBuf)]) -> Result<(), BuildError> {
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
        println!("cargo:rerun-if-env-changed={}", DeviceToolchain::VARIABLE);
        // One architecture per thread: each has a target directory of its own.
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                folders.iter().map(|(arch, folder)| scope.spawn(move || build_arch(*arch, folder))).collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// Builds the images of an architecture into a folder, with their list.
    fn build_arch(arch: Arch, folder: &Path) -> Result<(), BuildError> {
        let io = |path: &Path| {
            let path = path.to_path_buf();
            move |source| BuildError::Io { path, source }
        };
        // A kernel that is no more leaves no file.
        if folder.exists() {
            std::fs::remove_dir_all(folder).map_err(io(folder))?;
        }
        std::fs::create_dir_all(folder).map_err(io(folder))?;
        let file = |name: &str| format!("concat!(env!({:?}), {:?})", variable(arch), format!("/{name}"));
        let mut list = String::new();
        for family in FAMILIES {
            let ptx = CudaBuilder::new("gpu").arch(arch.into()).features([*family]).locked().build()?;
            let text = read(ptx)?;
            let (head, kernels) = split_kernels(&text);
            let _ = writeln!(
                list,
                "Image {{ family: {family:?}, arch: host::Arch::{arch:?}, ptx: host::Ptx::Kernels {{"
            );
            let _ = writeln!(list, "    origin: include_str!({}), head: {head:?},", file("ORIGIN"));
            list.push_str("    kernels: &[\n");
            for (name, text) in kernels {
                let deflated = format!("{name}.ptx.deflate");
                let _ = writeln!(list, "        ({name:?}, include_bytes!({})),", file(&deflated));
                write(folder.join(deflated), &miniz_oxide::deflate::compress_to_vec(text.as_bytes(), 9))?;
            }
            list.push_str("    ],\n} },\n");
        }
        let origin = format!("rustc {}\n", DeviceToolchain::find()?.version);
        write(folder.join("ORIGIN"), origin.as_bytes())?;
        write(folder.join(LIST), list.as_bytes())
    }

    fn variable(arch: Arch) -> String {
        format!("WARPFORGE_IMAGES_{}", arch.name().to_uppercase())
    }

    fn read(path: PathBuf) -> Result<String, BuildError> {
        std::fs::read_to_string(&path).map_err(|source| BuildError::Io { path, source })
    }

    fn write(path: PathBuf, bytes: &[u8]) -> Result<(), BuildError> {
        std::fs::write(&path, bytes).map_err(|source| BuildError::Io { path, source })
    }

    /// The floors of the features, and where their crates have them compiled.
    fn wanted() -> impl Iterator<Item = (Arch, &'static str)> {
        let floors: &[(Arch, &str)] = &[
            #[cfg(feature = "sm61")]
            (Arch::Sm61, images_sm61::FOLDER),
            #[cfg(feature = "sm80")]
            (Arch::Sm80, images_sm80::FOLDER),
            #[cfg(feature = "sm90a")]
            (Arch::Sm90a, images_sm90a::FOLDER),
            #[cfg(feature = "sm100")]
            (Arch::Sm100, images_sm100::FOLDER),
        ];
        floors.iter().copied()
    }
}
