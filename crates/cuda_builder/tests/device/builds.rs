//! What is built again, what is not, and what a failing build says.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant, SystemTime};

use cuda_builder::{BuildError, NvvmArch};

use super::Fixture;

const ARCH: NvvmArch = NvvmArch::Compute80;

fn written(path: &Path) -> SystemTime {
    fs::metadata(path)
        .and_then(|file| file.modified())
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn only_what_changed_is_compiled_again() {
    let Some(fixture) = Fixture::new("incremental") else { return };
    let build = |feature| fixture.builder().arch(ARCH).features([feature]).build().expect(feature);
    let ptx = ["a", "b"].map(build);
    let raw = ["a", "b"].map(|feature| fixture.raw_ptx(ARCH, feature));
    let before = raw.each_ref().map(|path| written(path));
    let text = ptx.each_ref().map(|path| fs::read_to_string(path).expect("PTX"));
    assert!(text[0].contains("image_a") && !text[0].contains("image_b"));
    assert!(text[1].contains("image_b") && !text[1].contains("image_a"));

    let start = Instant::now();
    assert_eq!(["a", "b"].map(build), ptx);
    let elapsed = start.elapsed();
    assert_eq!(raw.each_ref().map(|path| written(path)), before, "nothing changed");
    assert!(elapsed < Duration::from_secs(20), "two builds of nothing took {elapsed:?}");

    let source = fixture.path.join("src/a.rs");
    let changed =
        fs::read_to_string(&source).expect("a source").replace("max_threads = 32", "max_threads = 96");
    fs::write(&source, changed).expect("a source");
    assert_eq!(["a", "b"].map(build), ptx);
    assert!(written(&raw[0]) > before[0], "image a is the old one");
    assert_eq!(written(&raw[1]), before[1], "image b was compiled again");
    let new = fs::read_to_string(&ptx[0]).expect("PTX");
    assert!(text[0].contains(".maxntid 32, 1, 1") && new.contains(".maxntid 96, 1, 1"), "{new}");
}

/// Two crates with a feature of the same name in one target directory: each gets its own PTX, also when nothing
/// changed.
#[test]
fn crates_do_not_take_each_others_images() {
    let Some(one) = Fixture::new("crate_one") else { return };
    let Some(two) = Fixture::new("crate_two") else { return };
    let source = two.path.join("src/a.rs");
    let renamed = fs::read_to_string(&source).expect("a source").replace("image_a", "image_of_two");
    fs::write(source, renamed).expect("a source");
    for _ in 0..2 {
        for (fixture, kernel) in [(&one, "image_a("), (&two, "image_of_two(")] {
            let path = fixture.builder().arch(ARCH).features(["a"]).build().expect("a build");
            let text = fs::read_to_string(path).expect("PTX");
            assert!(text.contains(kernel), "{kernel} is not in:\n{text}");
        }
    }
}

/// A build by the lock changes nothing of it, and is none where the lock does not fit.
#[test]
fn a_lock_is_kept() {
    let Some(fixture) = Fixture::new("locked") else { return };
    let lock = || fs::read_to_string(fixture.path.join("Cargo.lock")).expect("a lock file");
    // The whole workspace's, which knows nothing of the copy.
    let before = lock();
    let builder = || fixture.builder().arch(ARCH).features(["a"]);
    assert!(matches!(builder().locked().build(), Err(BuildError::Compile { .. })));
    assert_eq!(lock(), before);
    builder().build().expect("a build");
    let own = lock();
    assert_ne!(own, before);
    builder().locked().build().expect("a build by its own lock");
    assert_eq!(lock(), own);
}

#[test]
fn bounds_without_an_entry_are_an_error() {
    let Some(fixture) = Fixture::new("lost") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join("lost.ptx");
    let built = fixture.builder().arch(ARCH).features(["lost"]).copy_to(&copy).build();
    match built {
        Err(BuildError::Ptx { path, reason }) => {
            assert_eq!(path, fixture.raw_ptx(ARCH, "lost"));
            assert_eq!(reason, "there is no entry gone for its launch bounds");
        }
        other => panic!("{other:?}"),
    }
    assert!(!copy.exists());
}

#[test]
fn a_feature_that_is_not_there_is_an_error() {
    let Some(fixture) = Fixture::new("no_feature") else { return };
    let built = fixture.builder().arch(ARCH).features(["no-such-feature"]).build();
    assert!(matches!(built, Err(BuildError::Compile { arch: "sm_80", .. })), "{built:?}");
}

/// What the two tests below run in a process of its own, for its environment and its standard error.
#[test]
#[ignore = "a helper"]
fn build_in_a_child() {
    let path = |name| std::env::var_os(name).expect(name);
    let builder = cuda_builder::CudaBuilder::new(path("FIXTURE")).target_dir(path("FIXTURE_TARGET"));
    match builder.arch(ARCH).features(["a"]).copy_to(path("FIXTURE_PTX")).build() {
        Ok(_) => println!("built"),
        Err(error) => println!("error: {error}\nis: {error:?}"),
    }
}

fn in_a_child(fixture: &Fixture, ptx: &Path, environment: &[(&str, &str)]) -> Output {
    Command::new(std::env::current_exe().expect("this test"))
        .args(["--ignored", "--exact", "builds::build_in_a_child", "--nocapture"])
        .env("FIXTURE", &fixture.path)
        .env("FIXTURE_TARGET", &fixture.target_dir)
        .env("FIXTURE_PTX", ptx)
        .envs(environment.iter().copied())
        .output()
        .expect("the child")
}

#[test]
fn a_compile_error_shows_the_compilers_words_and_writes_no_ptx() {
    let Some(fixture) = Fixture::new("broken") else { return };
    let source = fixture.path.join("src/a.rs");
    let text = fs::read_to_string(&source)
        .expect("a source")
        .replace("global::store(out, 1)", "global::stores(out)");
    fs::write(source, text).expect("a source");
    let folder = tempfile::tempdir().expect("a folder");
    let ptx = folder.path().join("broken.ptx");
    let output = in_a_child(&fixture, &ptx, &[]);
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    let message = format!(
        "error: {} does not compile for sm_80 (the compiler's messages are above)\nis: Compile {{",
        fixture.path.display()
    );
    assert!(stdout.contains(&message), "{stdout}\n{stderr}");
    assert!(stderr.contains("cannot find function `stores`") && stderr.contains("src/a.rs"), "{stderr}");
    assert!(!ptx.exists());
}

/// The same PTX, and by the same compilation: cargo compiles again whatever other flags reach it.
#[test]
fn settings_of_the_outer_build_do_not_reach_it() {
    let Some(fixture) = Fixture::new("outer") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let [clean, with_settings] = ["clean.ptx", "settings.ptx"].map(|name| folder.path().join(name));
    let builds = |output: Output| {
        let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        assert!(output.status.success() && stdout.contains("built"), "{stdout}\n{stderr}");
    };
    builds(in_a_child(&fixture, &clean, &[]));
    let raw = fixture.raw_ptx(ARCH, "a");
    let before = written(&raw);
    let elsewhere = folder.path().join("elsewhere");
    let elsewhere = elsewhere.to_str().expect("a plain path");
    let settings = [
        ("RUSTC_WRAPPER", "/no/such/wrapper"),
        ("RUSTC_WORKSPACE_WRAPPER", "/no/such/clippy-driver"),
        ("CLIPPY_ARGS", "-Dwarnings"),
        ("RUSTFLAGS", "-Cno-such-flag"),
        ("RUSTDOCFLAGS", "-Cno-such-flag"),
        ("CARGO_ENCODED_RUSTFLAGS", "-Cno-such-flag"),
        ("CARGO_BUILD_RUSTFLAGS", "-Cno-such-flag"),
        ("CARGO_BUILD_TARGET", "no-such-target"),
        ("CARGO_BUILD_TARGET_DIR", elsewhere),
        ("CARGO_BUILD_RUSTC_WRAPPER", "/no/such/wrapper"),
        ("CARGO_TARGET_DIR", elsewhere),
        ("CARGO_TARGET_NVPTX64_NVIDIA_CUDA_RUSTFLAGS", "-Cno-such-flag"),
        ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0"),
        ("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "true"),
        ("CARGO_PROFILE_RELEASE_PANIC", "unwind"),
        ("CARGO_INCREMENTAL", "1"),
        ("CARGO_UNSTABLE_BUILD_STD", "std"),
    ];
    builds(in_a_child(&fixture, &with_settings, &settings));
    assert_eq!(written(&raw), before, "another compilation");
    let [clean, with_settings] = [clean, with_settings].map(|path| fs::read_to_string(path).expect("PTX"));
    assert_eq!(clean, with_settings);
    assert!(!Path::new(elsewhere).exists());
}
