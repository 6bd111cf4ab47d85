//! With the feature `cust`: lets `-lcuda`, which `cust_raw` asks for, resolve where no toolkit is installed.
//!
//! `stub/lib64/libcuda.so` is a linker script without content. Where a toolkit's own `libcuda.so` is found first, the
//! executable's definitions in `src/symbols.rs` still win over it. Without the feature nothing of the linking is
//! touched.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=stub/lib64/libcuda.so");
    if std::env::var_os("CARGO_FEATURE_CUST").is_some() {
        let root =
            std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR for build scripts");
        println!("cargo::rustc-link-search=native={root}/stub/lib64");
    }
}
