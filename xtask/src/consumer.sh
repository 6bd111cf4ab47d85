#!/usr/bin/env bash
# consumer.sh PACKAGES: as a new user does, but for the network. Makes a registry of the packages and of what they
# depend on, and in a HOME that holds nothing a crate that depends on warpforge's operators alone; builds and runs it
# without the source of the standard library and without a folder of CUDA. Then a program that another crate links to
# libcuda. Fails if the build takes more than two minutes of two cores, or the dependencies are more than 40 crates.
set -euo pipefail
packages=$(realpath "$1")
work=$(realpath "$packages/..")/consumer
limit=${WARPFORGE_CONSUMER_SECONDS:-240}
rm -rf "$work"
mkdir -p "$work/home" "$work/registry" "$work/plan/src" "$work/consumer/src"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
toolchain=$(rustc --print sysroot)

echo "--- a registry of the packages and their dependencies"
cd "$work"
cat >consumer/Cargo.toml <<TOML
[package]
name = "consumer"
version = "0.0.0"
edition = "2024"

[dependencies]
warpforge = { version = "=$version", default-features = false, features = ["cuda", "sm61", "sm80", "sm90a"] }

[workspace]
TOML
# What others publish is taken by the versions of the repository's lock; cargo vendors it for a crate that has ours by
# their paths.
cp consumer/Cargo.toml plan/Cargo.toml
cp "$OLDPWD/Cargo.lock" plan/Cargo.lock
touch plan/src/lib.rs
echo '[patch.crates-io]' >>plan/Cargo.toml
while read -r name; do
    tar --extract --gzip --file "$packages/$name-$version.crate" --directory registry
    printf '%s = { path = "../registry/%s-%s" }\n' "$name" "$name" "$version" >>plan/Cargo.toml
done <"$packages/ORDER"
(cd plan && cargo vendor --quiet --versioned-dirs ../vendor >/dev/null)
while read -r name; do
    sum=$(sha256sum "$packages/$name-$version.crate" | cut -d ' ' -f 1)
    printf '{"files":{},"package":"%s"}' "$sum" >"registry/$name-$version/.cargo-checksum.json"
done <"$packages/ORDER"
mv vendor/* registry/

mkdir consumer/.cargo
cat >consumer/.cargo/config.toml <<TOML
[source.crates-io]
replace-with = "packages"
[source.packages]
directory = "$work/registry"
TOML
cat >consumer/src/main.rs <<'RUST'
use warpforge::ops::rmsnorm::{NormWeight, RmsNorm, RmsNormArgs, RmsNormProblem};
use warpforge::{DType, Device, Error, IMAGES, Tensor};

fn main() -> Result<(), Error> {
    let image = IMAGES.first().expect("images");
    println!("{} images; the first, {image:?}: {}", IMAGES.len(), image.origin().expect("an origin"));
    assert!(image.modules().next().expect("a kernel").text()?.contains(".visible .entry"));
    let device = std::env::args().nth(1).map_or_else(|| Ok(Device::cpu()), |_| Device::cuda(0))?;
    let stream = device.stream()?;
    let problem = RmsNormProblem { rows: 4, cols: 8, dtype: DType::F32, eps: 1e-6, weight: NormWeight::Plain };
    let rmsnorm = RmsNorm::plan(&device, problem)?;
    let x = Tensor::from_slice(&stream, &[4, 8], &[2.0f32; 32])?;
    let weight = Tensor::from_slice(&stream, &[8], &[1.0f32; 8])?;
    let mut out = Tensor::empty(&stream, &[4, 8], DType::F32)?;
    let args = RmsNormArgs { x: x.view(), residual: None, weight: weight.view(), gate: None, out: out.view_mut() };
    rmsnorm.run(&stream, args)?;
    assert!(out.to_vec::<f32>(&stream)?.iter().all(|value| (value - 1.0).abs() < 1e-4));
    println!("{}", rmsnorm.report());
    Ok(())
}
RUST

# Nothing of this user's: no home, no rustup, no CUDA. A device toolchain that is looked for would be found to be none.
clean() {
    env --ignore-environment PATH="$toolchain/bin:/usr/bin:/bin" HOME="$work/home" CARGO_TERM_COLOR=never CARGO_NET_OFFLINE=true \
        WARPFORGE_DEVICE_TOOLCHAIN=/nonexistent "$@"
}
cd consumer
clean cargo generate-lockfile --quiet
count=$(clean cargo tree --quiet --edges normal,build --prefix none | sed 's/ (.*//' | sort --unique | grep --count --invert-match '^consumer ')
echo "--- $count crates besides the user's own"
((count <= 40)) || { echo "more than 40 crates"; exit 1; }

echo "--- a build"
times=$work/times
start=$(date +%s)
( TIMEFORMAT="%U %S"; time clean cargo build --quiet ) 2>"$times" || { cat "$times"; exit 1; }
processor=$(tail -n 1 "$times" | awk '{ print int($1 + $2 + 0.5) }')
echo "built in $(($(date +%s) - start)) s, with $processor s of processor time"
((processor <= limit)) || { echo "more than $limit s of processor time"; exit 1; }
[[ ! -e target/cuda_builder ]] || { echo "device code was built"; exit 1; }
clean target/debug/consumer

echo "--- beside a crate that links libcuda"
if command -v cc >/dev/null; then
    # A driver of one function: that of the other crate has to be called, not one of ours.
    mkdir -p "$work/fake"
    echo 'int cuInit(unsigned flags) { return 4711 + (int)flags; }' >"$work/fake/cuda.c"
    cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$work/fake/libcuda.so.1" "$work/fake/cuda.c"
    ln -s libcuda.so.1 "$work/fake/libcuda.so"
    cat >build.rs <<RUST
fn main() {
    println!("cargo::rustc-link-search=native=$work/fake");
    println!("cargo::rustc-link-lib=dylib=cuda");
}
RUST
    cat >src/main.rs <<'RUST'
unsafe extern "C" {
    fn cuInit(flags: u32) -> i32;
}

fn main() {
    // SAFETY: the driver of this test, which takes a number.
    assert_eq!(unsafe { cuInit(1) }, 4712);
    // Ours is the same library, in which the functions are missing.
    let error = warpforge::Device::cuda(0).unwrap_err().to_string();
    assert!(error.contains("4711"), "{error}");
    println!("both called the one driver: {error}");
}
RUST
    clean cargo build --quiet
    clean LD_LIBRARY_PATH="$work/fake" target/debug/consumer
else
    echo "skipped: no C compiler (cc)"
fi
echo "--- the packages are whole"
