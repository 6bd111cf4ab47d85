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

    use abi::{Arch, families};
    use cuda_builder::{BuildError, CudaBuilder, DeviceToolchain, split_kernels};

    /// A floor's list of images, and that of all: Rust, which names the files beside it by the compiler's variable
    /// [`variable`].
    const LIST: &str = "images.rs";

    pub fn list() -> Result<(), BuildError> {
        let out_dir = PathBuf::from(var_os("OUT_DIR").unwrap_or_default());
        println!("cargo:rerun-if-changed=build.rs");
        let mut folders: Vec<(Arch, PathBuf)> =
            wanted().map(|(arch, folder)| (arch, folder.into())).collect();
        let source = source();
        if let Some(source) = &source {
            for (arch, folder) in &mut folders {
                *folder = out_dir.join(arch.name());
            }
            build(source, &folders)?;
        }
        let mut images = String::from("&[\n");
        for (arch, folder) in &folders {
            println!("cargo:rustc-env={}={}", variable(*arch), folder.display());
            let list = read(folder.join(LIST))?;
            images += &match assembled(*arch).filter(|_| source.is_none()) {
                Some(folder) => with_cubins(&list, Path::new(folder)),
                None => list,
            };
        }
        write(out_dir.join(LIST), (images + "]").as_bytes())
    }

    /// Where the kernels' source is, if they are to be compiled.
    fn source() -> Option<PathBuf> {
        let beside = PathBuf::from("gpu");
        if beside.join("Cargo.toml").is_file() {
            return Some(beside);
        }
        #[cfg(feature = "build-images")]
        let packaged = Some(gpu::FOLDER);
        #[cfg(not(feature = "build-images"))]
        let packaged: Option<&str> = None;
        packaged.map(PathBuf::from)
    }

    fn build(source: &Path, folders: &[(Arch, PathBuf)]) -> Result<(), BuildError> {
        for path in [
            "gpu/src",
            "gpu/Cargo.toml",
            "Cargo.toml",
            "Cargo.lock",
            "crates/abi/src",
            "crates/cuda_std",
            "crates/cuda_std_macros",
        ] {
            // One that is not there, as in a package, would have this run again and again.
            if Path::new(path).exists() {
                println!("cargo:rerun-if-changed={path}");
            }
        }
        println!("cargo:rerun-if-env-changed={}", DeviceToolchain::VARIABLE);
        // One architecture per thread: each has a target directory of its own.
        std::thread::scope(|scope| {
            let threads: Vec<_> = folders
                .iter()
                .map(|(arch, folder)| scope.spawn(move || build_arch(source, *arch, folder)))
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// Builds the images of an architecture into a folder, with their list.
    fn build_arch(source: &Path, arch: Arch, folder: &Path) -> Result<(), BuildError> {
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
        for family in families() {
            let ptx = CudaBuilder::new(source).arch(arch.into()).features([family]).locked().build()?;
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
                let kernel = format!(
                    "host::EmbeddedKernel {{ name: {name:?}, ptx: include_bytes!({})",
                    file(&deflated)
                );
                let _ = writeln!(list, "        {kernel}, cubin: None }},");
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

    /// A list with the machine code of the kernels of which the folder has it.
    fn with_cubins(list: &str, folder: &Path) -> String {
        let line = |line: &str| {
            let name =
                line.split_once("EmbeddedKernel { name: \"").and_then(|(_, rest)| rest.split('"').next());
            let file =
                name.map(|name| folder.join(format!("{name}.cubin.deflate"))).filter(|file| file.is_file());
            match file {
                Some(file) => {
                    line.replace("cubin: None", &format!("cubin: Some(include_bytes!({file:?}))")) + "\n"
                }
                None => format!("{line}\n"),
            }
        };
        list.lines().map(line).collect()
    }

    /// Where a floor's kernels are assembled.
    fn assembled(arch: Arch) -> Option<&'static str> {
        match arch {
            #[cfg(feature = "sm80")]
            Arch::Sm80 => Some(cubins_sm80::FOLDER),
            #[cfg(feature = "sm90a")]
            Arch::Sm90a => Some(cubins_sm90a::FOLDER),
            _ => None,
        }
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
