//! What of the public API has changed since the last release, by `cargo semver-checks`.

use std::path::Path;
use std::process::Command;

use crate::process::{cargo, probe};

/// The libraries whose API users write against, without `warpforge`, which passes on those of `host` and `models` and
/// would compile the device images of both versions.
const PACKAGES: [&str; 11] = [
    "warpforge-abi",
    "warpforge-builder",
    "warpforge-candle",
    "warpforge-cudarc",
    "warpforge-dlpack",
    "warpforge-host",
    "warpforge-loader",
    "warpforge-models",
    "warpforge-std",
    "warpforge-testkit",
    "warpforge-text",
];

/// Says which release is compared with: its tag.
fn tag(root: &Path) -> Command {
    let mut git = Command::new("git");
    git.current_dir(root).args(["describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]);
    git
}

/// What fails where the comparison cannot be made, and the comparison.
pub fn steps(root: &Path) -> (Command, Command) {
    let mut version = cargo(root, &["semver-checks", "--version"]);
    let tag = match probe(&mut version) {
        Ok(_) => tag(root),
        Err(_) => return (version, checks(root, "HEAD")),
    };
    with_baseline(root, tag)
}

fn with_baseline(root: &Path, mut tag: Command) -> (Command, Command) {
    let baseline = probe(&mut tag).unwrap_or_else(|_| "HEAD".into());
    (tag, checks(root, &baseline))
}

fn checks(root: &Path, baseline: &str) -> Command {
    let mut checks = cargo(root, &["semver-checks", "--baseline-rev", baseline, "--default-features"]);
    checks.args(PACKAGES.iter().flat_map(|package| ["--package", package]));
    checks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::line;

    #[test]
    fn packages_are_those_that_are_published() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let metadata = probe(&mut cargo(root, &["metadata", "--no-deps", "--format-version=1", "--offline"]));
        let metadata: serde_json::Value = serde_json::from_str(&metadata.unwrap()).unwrap();
        let packages = metadata["packages"].as_array().unwrap().iter();
        let published = packages.filter(|package| package["publish"].is_null()).filter(|package| {
            // Images and kernels have no API; macros are those of `warpforge-std`.
            let name = package["name"].as_str().unwrap();
            let has_none = ["-images-", "-cubins-", "-gpu", "-macros"].iter().any(|part| name.contains(part));
            !has_none && name != "warpforge"
        });
        let mut names: Vec<&str> = published.map(|package| package["name"].as_str().unwrap()).collect();
        names.sort();
        assert_eq!(names, PACKAGES);
    }

    /// With a tag there is something to compare with; without one the reason is git's.
    #[test]
    fn the_baseline_is_the_last_tag() {
        let folder = tempfile::tempdir().unwrap();
        let git = |args: &[&str]| {
            let mut git = Command::new("git");
            let identity = ["-c", "user.name=a", "-c", "user.email=a@b"];
            probe(git.current_dir(folder.path()).args(identity).args(args)).unwrap()
        };
        git(&["init", "--quiet"]);
        git(&["commit", "--quiet", "--allow-empty", "--message", "first"]);
        let (mut needed, _) = with_baseline(folder.path(), tag(folder.path()));
        let reason = probe(&mut needed).unwrap_err();
        assert!(reason.contains("No names found") || reason.contains("no tag"), "{reason}");
        git(&["tag", "v0.1.0"]);
        git(&["commit", "--quiet", "--allow-empty", "--message", "second"]);
        git(&["tag", "other"]);
        let (mut needed, checks) = with_baseline(folder.path(), tag(folder.path()));
        assert_eq!(probe(&mut needed), Ok("v0.1.0".into()));
        let words = line(&checks);
        assert!(
            words.contains("semver-checks --baseline-rev v0.1.0 ") && words.contains("warpforge-host"),
            "{words}"
        );
    }
}
