//! Builds the probes for every floor and lists the images for `src/lib.rs`.

use std::error::Error;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use cuda_builder::{BuildError, CudaBuilder, NvvmArch};

/// Feature and floor of each image.
const IMAGES: [(&str, &str, NvvmArch); 5] = [
    ("base", "Sm61", NvvmArch::Compute61),
    ("base", "Sm80", NvvmArch::Compute80),
    ("base", "Sm90a", NvvmArch::Compute90a),
    ("base", "Sm100", NvvmArch::Compute100),
    ("wgmma", "Sm90a", NvvmArch::Compute90a),
];

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("probes: {error}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), Box<dyn Error>> {
    for path in ["kernels", "../cuda_std", "../cuda_std_macros", "build.rs"] {
        println!("cargo:rerun-if-changed={path}");
    }
    println!("cargo:rerun-if-env-changed={}", cuda_builder::DeviceToolchain::VARIABLE);
    println!("cargo:rerun-if-env-changed=REQUIRE_DEVICE_TOOLCHAIN");
    let out_dir = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("no OUT_DIR")?);
    let mut list = String::from("&[\n");
    for (image, floor, arch) in IMAGES {
        // The simulator needs no images: without a device compiler the tests run there alone.
        let ptx = match CudaBuilder::new("kernels").arch(arch).features([image]).locked().build() {
            Err(BuildError::Toolchain(error)) if !is_required() => {
                println!("cargo:warning=no images of the probes: {error}");
                break;
            }
            other => other?,
        };
        let path = out_dir.join(format!("{image}.{floor}.ptx.deflate"));
        std::fs::write(&path, miniz_oxide::deflate::compress_to_vec(&std::fs::read(ptx)?, 9))?;
        writeln!(list, "    ({image:?}, Arch::{floor}, include_bytes!({path:?})),")?;
    }
    list.push(']');
    Ok(std::fs::write(out_dir.join("images.rs"), list)?)
}

fn is_required() -> bool {
    std::env::var_os("REQUIRE_DEVICE_TOOLCHAIN").is_some_and(|value| value != "0")
}
