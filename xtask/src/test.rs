//! `cargo xtask test`: every check that needs no GPU, in the order in which they fail soonest.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::fmt;
use crate::miri;
use crate::process::{cargo, line, probe, run as run_command};
use crate::semver;
use crate::setup;

/// What is built and tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// The default features: device images and the CUDA backend.
    Cuda,
    /// No default features; needs neither a device toolchain nor ptxas.
    CpuOnly,
}

/// The compilers that the README promises beside the one that `rust-toolchain.toml` names: each checks the build
/// without CUDA where it is installed.
const OTHER_COMPILERS: [(&str, &str); 1] = [("check by rustc 1.96", "1.96.0")];

/// Features that no package of the workspace asks for, tested with all others: by themselves they would have the crates
/// compiled once more. None is of the package that lists the images, which would be built once more too.
pub const OPTIONAL: [&str; 2] = [
    "--features",
    "warpforge-host/serde,warpforge-host/async,warpforge-host/ndarray,warpforge-models/tracing,warpforge-models/hub",
];

/// Runs every check and stops at the first that fails.
pub fn run(root: &Path, backend: Backend) -> Result<(), Error> {
    let mut report = Report::default();
    let result = steps(root, backend, &mut report);
    report.print(result.is_ok());
    result
}

fn steps(root: &Path, backend: Backend, report: &mut Report) -> Result<(), Error> {
    let features: &[&str] = match backend {
        Backend::Cuda => &[],
        Backend::CpuOnly => &["--no-default-features", "--features", "models"],
    };
    let workspace =
        |args: &[&str], rest: &[&str]| cargo(root, &[args, &["--workspace"], features, rest].concat());

    let mut ptxas: Option<PathBuf> = None;
    if backend == Backend::Cuda {
        report.step("setup", || {
            setup::device_toolchain()?;
            ptxas = Some(setup::ptxas(root)?);
            Ok(())
        })?;
    }
    let component = |name| cargo(root, &[name, "--version"]);
    report.optional("format", component("fmt"), cargo(root, &["fmt", "--all", "--check"]))?;
    report.optional("format of the operators", component("fmt"), fmt::operators(root, &["--check"]))?;
    // Its database of advisories is fetched, which needs a network.
    let deny = |args: &[&str]| cargo(root, &[&["deny"], args].concat());
    report.optional("dependencies", deny(&["fetch"]), deny(&["--offline", "check"]))?;
    let clippy =
        workspace(&["clippy"], &[&["--all-targets"], &OPTIONAL[..], &["--", "-D", "warnings"]].concat());
    report.optional("clippy", component("clippy"), clippy)?;
    let mut tests = workspace(&["test"], &OPTIONAL);
    if let Some(ptxas) = ptxas {
        tests.env("WARPFORGE_PTXAS", ptxas);
        // There is one: the set-up saw to it.
        tests.env("REQUIRE_DEVICE_TOOLCHAIN", "1");
    }
    report.step("tests", || run_command(&mut tests))?;
    report.optional("miri", miri::version(root), miri::tests(root))?;
    if backend == Backend::Cuda {
        // What the workspace builds has the feature `cust`.
        let mut tests =
            cargo(root, &["test", "--package", "warpforge-host", "--package", "warpforge-loader"]);
        tests.args(["--features", "warpforge-host/cuda,warpforge-host/async"]);
        // They compute nothing: to optimise what they are built of takes longer than they do.
        tests.env("CARGO_PROFILE_DEV_OPT_LEVEL", "0");
        for name in ["driver_faults", "fake_driver", "no_driver"] {
            tests.args(["--test", name]);
        }
        report.step("tests without cust", || run_command(&mut tests))?;
        // What the packages depend on, also on other platforms, has to be there: a registry is made of it.
        let program = std::env::current_exe();
        let program = program.map_err(|source| Error::File { path: "xtask".into(), source })?;
        let mut check = Command::new(program);
        check.current_dir(root).args(["package", "--check"]);
        report.optional("packages", cargo(root, &["fetch", "--locked"]), check)?;
    }
    let python = |args: &[&str]| {
        let mut python = Command::new("python3");
        // It would leave compiled files in the tree.
        python.current_dir(root).env("PYTHONDONTWRITEBYTECODE", "1").args(args);
        python
    };
    let (baseline, checks) = semver::steps(root);
    report.optional("public API", baseline, checks)?;
    let peers = python(&["-m", "unittest", "discover", "benches/peers"]);
    report.optional("peers' script", python(&["--version"]), peers)?;
    let mut doc = workspace(&["doc"], &["--no-deps"]);
    report.step("documentation", || run_command(doc.env("RUSTDOCFLAGS", "-D warnings")))?;
    // Its programs are among the tests of the documentation.
    let mdbook = |args: &[&str]| {
        let mut mdbook = Command::new("mdbook");
        mdbook.current_dir(root).args(args);
        mdbook
    };
    report.optional("book", mdbook(&["--version"]), mdbook(&["build", "docs/book"]))?;
    if backend == Backend::Cuda {
        let without = |command: &str, features: &[&str]| {
            let package = [command, "--package", "warpforge", "--no-default-features", "--all-targets"];
            cargo(root, &[&package[..], features].concat())
        };
        report
            .step("build without CUDA", || run_command(&mut without("check", &["--features", "models"])))?;
        // What is in these for the CPU alone, or left out, no other step lints; nor what hears and exchanges for
        // others.
        let linted = [
            "--package",
            "warpforge-host",
            "--package",
            "warpforge-models",
            "--features",
            "models,tracing,ndarray,async,hub",
        ];
        let linted = without("clippy", &[&linted[..], &["--", "-D", "warnings"]].concat());
        report.optional("clippy without CUDA", component("clippy"), linted)?;
        report.step("build without models", || run_command(&mut without("check", &[])))?;
        for target in ["aarch64-unknown-linux-gnu", "x86_64-pc-windows-gnu"] {
            // Its standard library is there if `rustup target add` was asked for it.
            let folder = format!("test -d \"$(rustc --print target-libdir --target {target})\"");
            let mut library = Command::new("sh");
            library.current_dir(root).args(["-c", &folder]);
            let features =
                ["--lib", "--no-default-features", "--features", "cuda,models", "--target", target];
            let check = cargo(root, &[&["check", "--package", "warpforge"], &features[..]].concat());
            report.optional(target, library, check)?;
        }
    }
    for (title, toolchain) in OTHER_COMPILERS {
        let with = |args: &[&str]| {
            let mut rustup = Command::new("rustup");
            // One that is not there is not fetched.
            rustup
                .current_dir(root)
                .env("RUSTUP_AUTO_INSTALL", "0")
                .args(["run", toolchain, "cargo"])
                .args(args);
            rustup
        };
        let folder = format!("target/{toolchain}");
        let features = ["--no-default-features", "--features", "models", "--target-dir", &folder];
        let check = with(&[&["check", "--workspace", "--all-targets"], &features[..]].concat());
        report.optional(title, with(&["--version"]), check)?;
    }
    Ok(())
}

/// What has been done so far, and how long it took.
#[derive(Default)]
struct Report(Vec<(&'static str, Outcome)>);

enum Outcome {
    Passed(Duration),
    Failed(Duration),
    Skipped(String),
}

impl Report {
    fn step(&mut self, title: &'static str, work: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        println!("\n=== {title}");
        let start = Instant::now();
        let result = work();
        let time = start.elapsed();
        println!("--- {title}: {:.1} s", time.as_secs_f64());
        self.0.push((title, if result.is_ok() { Outcome::Passed(time) } else { Outcome::Failed(time) }));
        result
    }

    /// A step that needs something which a minimal installation may lack: a component of the toolchain, Python.
    fn optional(
        &mut self,
        title: &'static str,
        mut version: Command,
        mut command: Command,
    ) -> Result<(), Error> {
        match probe(&mut version) {
            Ok(_) => self.step(title, || run_command(&mut command)),
            Err(reason) => {
                println!("\n=== {title}: skipped, because `{}` does not run ({reason})", line(&version));
                self.0.push((title, Outcome::Skipped(reason)));
                Ok(())
            }
        }
    }

    fn print(&self, is_ok: bool) {
        println!("\n=== summary");
        for (title, outcome) in &self.0 {
            match outcome {
                Outcome::Passed(time) => println!("{title:<20} passed  {:7.1} s", time.as_secs_f64()),
                Outcome::Failed(time) => println!("{title:<20} FAILED  {:7.1} s", time.as_secs_f64()),
                Outcome::Skipped(reason) => println!("{title:<20} skipped ({reason})"),
            }
        }
        let skipped = self.0.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Skipped(_))).count();
        match (is_ok, skipped) {
            (false, _) => println!("stopped at the first failure"),
            (true, 0) => println!("all checks passed"),
            (true, _) => println!("all other checks passed; {skipped} skipped"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_step_is_returned_and_recorded() {
        let mut report = Report::default();
        report.step("first", || Ok(())).unwrap();
        let message =
            report.step("second", || run_command(&mut Command::new("false"))).unwrap_err().to_string();
        assert!(message.contains("false"), "{message}");
        assert!(matches!(report.0[..], [("first", Outcome::Passed(_)), ("second", Outcome::Failed(_))]));
    }

    /// With the nightly in front, and without the cargo of this recipe, which is of another toolchain.
    #[test]
    fn miri_is_asked_for_before_it_is_run() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert_eq!(line(&miri::version(root)), "RUSTUP_AUTO_INSTALL=0 cargo +nightly miri --version");
        let tests = miri::tests(root);
        let (words, flags) = (line(&tests), "'-Zmiri-permissive-provenance -Zmiri-disable-isolation'");
        let start = format!("MIRIFLAGS={flags} cargo +nightly miri test --package warpforge-host ");
        assert!(words.starts_with(&start) && words.contains(" -- memory::book "), "{words}");
        for variable in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN"] {
            assert!(tests.get_envs().any(|(name, value)| name == variable && value.is_none()), "{variable}");
        }
    }

    #[test]
    fn a_missing_component_is_skipped_with_its_reason() {
        let mut report = Report::default();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let version = cargo(root, &["no-such-subcommand", "--version"]);
        report.optional("title", version, Command::new("false")).unwrap();
        let [("title", Outcome::Skipped(reason))] = &report.0[..] else { panic!("not skipped") };
        assert!(reason.contains("no-such-subcommand"), "{reason}");
    }
}
