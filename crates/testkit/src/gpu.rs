//! How tests behave on machines with and without a GPU, and where they find the checkout.
//!
//! Everything here is looked up when the test runs, not when it is built: on GPU hosts the binaries run beside a copy
//! of the checkout, without cargo.

use proptest::test_runner::{Config, FailurePersistence, FileFailurePersistence, PersistedSeed};
use std::any::Any;
use std::collections::BTreeSet;
use std::env;
use std::fmt::Debug;
use std::io::Write;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Whether `REQUIRE_GPU` asks that a missing GPU fail the tests: set, and neither empty nor `0`.
pub fn require_gpu() -> bool {
    env::var_os("REQUIRE_GPU").is_some_and(|value| !value.is_empty() && value != "0")
}

/// Reports that the calling test cannot run for want of a GPU, once per test and place; the test then returns.
///
/// The line goes straight to standard error, so it shows although the test passes.
///
/// # Panics
/// When [`require_gpu`].
#[track_caller]
pub fn skip(reason: &str) {
    assert!(!require_gpu(), "REQUIRE_GPU is set, but: {reason}");
    skip_optional(reason);
}

/// [`skip`] for want of anything but a GPU, such as a tool: never fails, since GPU hosts may lack it.
#[track_caller]
pub fn skip_optional(reason: &str) {
    static REPORTED: Mutex<BTreeSet<(String, String)>> = Mutex::new(BTreeSet::new());
    // The test harness names each test's thread after the test.
    let test = std::thread::current().name().unwrap_or("unnamed").to_owned();
    let mut reported = REPORTED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if reported.insert((test.clone(), Location::caller().to_string())) {
        // Where standard error is closed there is nobody to tell.
        let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {reason}");
    }
}

/// Number of property cases: `WARPFORGE_CASES` if it is set, else `default`.
///
/// # Panics
/// When `WARPFORGE_CASES` is not a positive number: a run with fewer cases than asked for would look like a pass.
pub fn cases(default: u32) -> u32 {
    parse_cases(env::var("WARPFORGE_CASES").ok().as_deref(), default)
        .unwrap_or_else(|message| panic!("{message}"))
}

fn parse_cases(value: Option<&str>, default: u32) -> Result<u32, String> {
    match value.map(str::trim) {
        None | Some("") => Ok(default),
        Some(text) => match text.parse() {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(format!("WARPFORGE_CASES: expected a positive number of cases, got {text:?}")),
        },
    }
}

/// proptest's settings for this project: [`cases`], and failing seeds kept in
/// `tests/proptest-regressions/<source path with dashes>.txt` of the checkout.
///
/// `PROPTEST_DISABLE_FAILURE_PERSISTENCE` and proptest's other variables work as usual, but for the number of cases.
pub fn proptest_config(default_cases: u32) -> Config {
    let config = Config::default();
    let failure_persistence: Option<Box<dyn FailurePersistence>> = match config.failure_persistence {
        Some(_) => {
            Some(Box::new(Regressions { folder: workspace_root().join("tests/proptest-regressions") }))
        }
        None => None,
    };
    Config { cases: cases(default_cases), failure_persistence, ..config }
}

/// Seeds in one file per source file, in one folder.
#[derive(Clone, Debug, PartialEq)]
struct Regressions {
    folder: PathBuf,
}

impl Regressions {
    /// `tests/ops/gemm.rs` has its seeds in `tests-ops-gemm.txt`.
    fn file(&self, source_file: Option<&'static str>) -> FileFailurePersistence {
        let Some(source) = source_file else { return FileFailurePersistence::Off };
        let name =
            source.trim_end_matches(".rs").trim_start_matches(['/', '\\']).replace(['/', '\\', ':'], "-");
        let path = self.folder.join(format!("{name}.txt"));
        // proptest takes only a static path; this is one short string per property.
        FileFailurePersistence::Direct(Box::leak(path.to_string_lossy().into_owned().into_boxed_str()))
    }
}

impl FailurePersistence for Regressions {
    fn load_persisted_failures2(&self, source_file: Option<&'static str>) -> Vec<PersistedSeed> {
        self.file(source_file).load_persisted_failures2(None)
    }

    fn save_persisted_failure2(
        &mut self,
        source_file: Option<&'static str>,
        seed: PersistedSeed,
        shrunken_value: &dyn Debug,
    ) {
        self.file(source_file).save_persisted_failure2(None, seed, shrunken_value);
    }

    fn box_clone(&self) -> Box<dyn FailurePersistence> {
        Box::new(self.clone())
    }

    fn eq(&self, other: &dyn FailurePersistence) -> bool {
        other.as_any().downcast_ref() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The checkout: the nearest folder that holds `tests/golden`, upwards from `CARGO_MANIFEST_DIR` as the running process
/// has it (cargo sets it), else from the current directory; the current directory if there is none.
pub fn workspace_root() -> PathBuf {
    let current = env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
    let manifest = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    manifest.as_deref().and_then(root_above).or_else(|| root_above(&current)).unwrap_or(current)
}

fn root_above(start: &Path) -> Option<PathBuf> {
    start.ancestors().find(|folder| folder.join("tests/golden").is_dir()).map(Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::test_runner::{TestError, TestRunner};
    use std::fs;
    use std::process::Command;

    #[test]
    fn number_of_cases() {
        assert_eq!(parse_cases(None, 7), Ok(7));
        assert_eq!(parse_cases(Some(""), 7), Ok(7));
        assert_eq!(parse_cases(Some(" 12 "), 7), Ok(12));
        for bad in ["0", "many", "-3", "1o0"] {
            let message = format!("WARPFORGE_CASES: expected a positive number of cases, got {bad:?}");
            assert_eq!(parse_cases(Some(bad), 7), Err(message));
        }
    }

    #[test]
    fn root_is_found_from_below() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("checkout");
        let below = root.join("crates/testkit");
        fs::create_dir_all(&below).unwrap();
        assert_eq!(root_above(&below), None);
        fs::create_dir_all(root.join("tests/golden")).unwrap();
        assert_eq!(root_above(&below), Some(root.clone()));
        assert_eq!(root_above(&root), Some(root));
        assert!(workspace_root().join("tests/golden").is_dir());
    }

    #[test]
    fn failing_seeds_are_kept_and_tried_first() {
        let dir = tempfile::tempdir().unwrap();
        let config = || Config {
            source_file: Some("tests/ops/some.rs"),
            failure_persistence: Some(Box::new(Regressions { folder: dir.path().join("seeds") })),
            ..Config::with_cases(200)
        };
        let failing = |value: u32| if value >= 1000 { Err(TestCaseError::fail("large")) } else { Ok(()) };
        let result = TestRunner::new(config()).run(&any::<u32>(), failing);
        assert!(matches!(result, Err(TestError::Fail(_, 1000))), "{result:?}");
        let text = fs::read_to_string(dir.path().join("seeds/tests-ops-some.txt")).unwrap();
        assert!(text.contains("shrinks to 1000"), "{text}");

        let first = std::cell::Cell::new(None);
        let again = TestRunner::new(config()).run(&any::<u32>(), |value| {
            first.set(first.get().or(Some(value)));
            Ok(())
        });
        assert!(again.is_ok());
        assert!(first.get().is_some_and(|value| value >= 1000), "{first:?}");
    }

    #[test]
    fn config_keeps_seeds_in_the_checkout() {
        let config = proptest_config(9);
        if let Some(persistence) = config.failure_persistence {
            let folder = workspace_root().join("tests/proptest-regressions");
            assert_eq!(persistence.as_any().downcast_ref(), Some(&Regressions { folder }));
        }
    }

    /// What the two tests below run in a process of its own, since the environment belongs to all threads.
    #[test]
    #[ignore = "a helper"]
    fn skipping_twice() {
        for _ in 0..2 {
            skip("no card");
        }
        writeln!(std::io::stderr(), "cases: {}", cases(7)).unwrap();
    }

    fn skipping_twice_with(require: &str) -> std::process::Output {
        Command::new(env::current_exe().unwrap())
            .args(["--ignored", "--exact", "gpu::tests::skipping_twice"])
            .env("REQUIRE_GPU", require)
            .env("WARPFORGE_CASES", "21")
            .output()
            .unwrap()
    }

    #[test]
    fn skip_reports_once_and_is_not_captured() {
        for off in ["", "0"] {
            let output = skipping_twice_with(off);
            let text = String::from_utf8(output.stderr).unwrap();
            assert!(output.status.success(), "{text}");
            assert_eq!(text.matches("SKIPPED: gpu::tests::skipping_twice: no card").count(), 1, "{text}");
            assert!(text.contains("cases: 21"), "{text}");
        }
    }

    #[test]
    fn skip_fails_where_a_gpu_is_required() {
        let output = skipping_twice_with("1");
        assert!(!output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("REQUIRE_GPU is set, but: no card"), "{text}");
    }
}
