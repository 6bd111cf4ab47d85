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

    /// A share's list of images, and that of all: Rust, which names the files beside it by the compiler's variable
    /// [`Share::variable`].
    const LIST: &str = "images.rs";

    /// The images that a crate carries: a floor's, or some of its families where one crate would be more than a
    /// registry takes.
    struct Share {
        arch: Arch,
        /// In the names of its folder and of its variable.
        name: &'static str,
        holds: fn(&str) -> bool,
        /// Where its crate has them compiled.
        packaged: &'static str,
    }

    pub fn list() -> Result<(), BuildError> {
        let out_dir = PathBuf::from(var_os("OUT_DIR").unwrap_or_default());
        println!("cargo:rerun-if-changed=build.rs");
        let source = source();
        if let Some(source) = &source {
            build(source, &out_dir)?;
        }
        let mut images = String::from("&[\n");
        for share in shares() {
            let folder = match &source {
                Some(_) => out_dir.join(share.name),
                None => PathBuf::from(share.packaged),
            };
            println!("cargo:rustc-env={}={}", share.variable(), folder.display());
            let list = read(folder.join(LIST))?;
            images += &match assembled(share.arch).filter(|_| source.is_none()) {
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

    /// Builds the images of every share into a folder of its name.
    fn build(source: &Path, out_dir: &Path) -> Result<(), BuildError> {
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
        let shares = shares();
        std::thread::scope(|scope| {
            let threads: Vec<_> = shares
                .chunk_by(|a, b| a.arch == b.arch)
                .map(|shares| {
                    let build = |share: &Share| share.build(source, &out_dir.join(share.name));
                    scope.spawn(move || shares.iter().try_for_each(build))
                })
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    impl Share {
        /// Builds its images into a folder, with their list.
        fn build(&self, source: &Path, folder: &Path) -> Result<(), BuildError> {
            let io = |path: &Path| {
                let path = path.to_path_buf();
                move |source| BuildError::Io { path, source }
            };
            // A kernel that is no more leaves no file.
            if folder.exists() {
                std::fs::remove_dir_all(folder).map_err(io(folder))?;
            }
            std::fs::create_dir_all(folder).map_err(io(folder))?;
            let arch = self.arch;
            let file = |name: &str| format!("concat!(env!({:?}), {:?})", self.variable(), format!("/{name}"));
            let mut list = String::new();
            for family in families().filter(|family| (self.holds)(family)) {
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

        fn variable(&self) -> String {
            format!("WARPFORGE_IMAGES_{}", self.name.to_uppercase())
        }
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

    /// Those of the floors of the features, a floor's beside each other, families in their order.
    fn shares() -> Vec<Share> {
        #[cfg(any(feature = "sm61", feature = "sm80", feature = "sm100"))]
        let floor = |arch: Arch, packaged| Share { arch, name: arch.name(), holds: |_| true, packaged };
        vec![
            #[cfg(feature = "sm61")]
            floor(Arch::Sm61, images_sm61::FOLDER),
            #[cfg(feature = "sm80")]
            floor(Arch::Sm80, images_sm80::FOLDER),
            #[cfg(feature = "sm90a")]
            Share {
                arch: Arch::Sm90a,
                name: "sm_90a_attention",
                holds: is_attention,
                packaged: images_sm90a_attention::FOLDER,
            },
            #[cfg(feature = "sm90a")]
            Share {
                arch: Arch::Sm90a,
                name: "sm_90a",
                holds: |family| !is_attention(family),
                packaged: images_sm90a::FOLDER,
            },
            #[cfg(feature = "sm100")]
            floor(Arch::Sm100, images_sm100::FOLDER),
        ]
    }

    #[cfg(feature = "sm90a")]
    fn is_attention(family: &str) -> bool {
        family.starts_with("attention")
    }
}
