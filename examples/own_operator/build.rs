//! Builds the kernels to one PTX image, for every card from Pascal on.

use std::process::ExitCode;

fn main() -> ExitCode {
    #[cfg(feature = "cuda")]
    if let Err(error) = build() {
        eprintln!("own_operator: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

#[cfg(feature = "cuda")]
fn build() -> Result<(), cuda_builder::BuildError> {
    for path in ["kernels", "../../crates/cuda_std/src", "../../crates/cuda_std_macros/src"] {
        println!("cargo:rerun-if-changed={path}");
    }
    println!("cargo:rerun-if-env-changed={}", cuda_builder::DeviceToolchain::VARIABLE);
    let out_dir = std::env::var_os("OUT_DIR").unwrap_or_default();
    let ptx = std::path::Path::new(&out_dir).join("kernels.ptx");
    cuda_builder::CudaBuilder::new("kernels").copy_to(ptx).build()?;
    Ok(())
}
