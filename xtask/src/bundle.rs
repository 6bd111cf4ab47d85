//! `cargo xtask gpu-bundle`: programs for a GPU machine that has no Rust.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Error;
use crate::process::{cargo, output, run as run_command};

/// The script that runs the bundle. It comes with the repository's checkout, whose data the programs read.
const RUN: &str = include_str!("bundle_run.sh");
/// The kinds of targets that are bundled, in cargo's words. Each gets a folder of its name.
const KINDS: [&str; 3] = ["test", "bench", "example"];
/// What has nothing to do with a card: tests of the tree and the PTX, of `cuda_loader` on machines without a driver or
/// NCCL, of programs where they were built (`process`); and examples of which each holds the device images once more.
const NEED_NO_CARD: [&str; 9] =
    ["tree", "images", "no_driver", "fake_driver", "fake_nccl", "process", "accuracy", "batch", "quantise"];
/// Machines that take a working tree per run limit its size; the rest of it needs room too.
const LIMIT_BYTES: u64 = 36_000_000;

/// Builds the root package's tests, benchmarks and examples, the tests of the loader and the probes, and the examples
/// `generate`, `doctor` and `own_operator`, in release, and packs them into `folder`. Each program holds the same
/// device images, which xz stores once.
pub fn run(root: &Path, folder: &str) -> Result<(), Error> {
    crate::setup::device_toolchain()?;
    let folder = root.join(folder);
    let messages = output(&mut cargo(
        root,
        &[
            "build",
            "--release",
            "--package",
            "warpforge",
            "--package",
            "warpforge-loader",
            "--package",
            "probes",
            "--package",
            "own_operator",
            "--package",
            "generate",
            "--package",
            "doctor",
            "--tests",
            "--benches",
            "--examples",
            "--bins",
            "--message-format=json-render-diagnostics",
        ],
    ))?;
    let programs: Vec<Program> = messages
        .lines()
        .filter_map(Program::parse)
        .map(|program| match &*program.kind {
            // An example that is a package of its own.
            "bin" => Program { kind: "example".into(), ..program },
            _ => program,
        })
        .filter(|program| KINDS.contains(&&*program.kind) && !NEED_NO_CARD.contains(&&*program.name))
        .collect();
    if !programs.iter().any(|program| program.kind == "test") {
        return Err(Error::NothingBuilt { kind: "test" });
    }

    let staged = root.join("target/xtask/bundle");
    if staged.exists() {
        at(&staged, fs::remove_dir_all)?;
    }
    for kind in KINDS {
        at(&staged.join(kind), fs::create_dir_all)?;
    }
    for program in &programs {
        let file = staged.join(&program.kind).join(&program.name);
        let bytes = at(&file, |file| fs::copy(&program.executable, file))?;
        println!("{bytes:>11} {}/{}", program.kind, program.name);
    }

    if folder.exists() {
        at(&folder, fs::remove_dir_all)?;
    }
    at(&folder, fs::create_dir_all)?;
    let archive = folder.join("programs.tar.xz");
    let mut tar = Command::new("tar");
    // The window holds all programs: what each has of the images is found in the one before.
    tar.env("XZ_OPT", "--lzma2=preset=6,dict=192MiB").arg("--create").arg("--xz").arg("--file").arg(&archive);
    run_command(tar.arg("--directory").arg(&staged).args(KINDS))?;
    let bytes = write_script(&folder.join("run"))? + at(&archive, fs::metadata)?.len();
    println!("{bytes:>11} packed, in {}", folder.display());
    if bytes > LIMIT_BYTES {
        return Err(Error::BundleTooLarge { folder, bytes, limit: LIMIT_BYTES });
    }
    Ok(())
}

fn write_script(file: &Path) -> Result<u64, Error> {
    use std::os::unix::fs::PermissionsExt;
    at(file, |file| fs::write(file, RUN))?;
    at(file, |file| fs::set_permissions(file, fs::Permissions::from_mode(0o755)))?;
    Ok(RUN.len() as u64)
}

fn at<'a, T>(path: &'a Path, work: impl FnOnce(&'a Path) -> std::io::Result<T>) -> Result<T, Error> {
    work(path).map_err(|source| Error::File { path: path.to_path_buf(), source })
}

/// A program that cargo has built.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    /// Cargo's kind of the target: `test`, `bench`, `example`, `bin`, `lib`.
    kind: String,
    /// The target's name.
    name: String,
    executable: PathBuf,
}

impl Program {
    /// Reads one line of cargo's JSON messages; `None` for every line that is not about a program, and for the tests of
    /// an example, which have its name.
    fn parse(line: &str) -> Option<Self> {
        if !line.starts_with(r#"{"reason":"compiler-artifact""#) {
            return None;
        }
        let target = after(line, r#""target":{"#)?;
        let kind = string(after(target, r#""kind":["#)?)?;
        let is_harness = after(after(line, r#""profile":{"#)?, r#""test":"#)?.starts_with("true");
        if is_harness && matches!(&*kind, "example" | "bin") {
            return None;
        }
        Some(Self {
            kind,
            name: string(after(target, r#""name":"#)?)?,
            executable: string(after(line, r#""executable":"#)?)?.into(),
        })
    }
}

/// The text that follows a key. Quotes inside JSON strings are escaped, so a quoted key is never found in one.
fn after<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.split_once(key).map(|(_, rest)| rest)
}

/// The JSON string that `text` begins with; `None` for anything else, `null` for one.
fn string(text: &str) -> Option<String> {
    let mut chars = text.strip_prefix('"')?.chars();
    let mut value = String::new();
    loop {
        match chars.next()? {
            '"' => return Some(value),
            '\\' => match chars.next()? {
                'n' => value.push('\n'),
                't' => value.push('\t'),
                'r' => value.push('\r'),
                'b' => value.push('\u{8}'),
                'f' => value.push('\u{c}'),
                // Cargo escapes only control characters this way; a surrogate is no path of ours.
                'u' => {
                    let digits: String = chars.by_ref().take(4).collect();
                    value.push(char::from_u32(u32::from_str_radix(&digits, 16).ok()?)?);
                }
                plain @ ('"' | '\\' | '/') => value.push(plain),
                _ => return None,
            },
            plain => value.push(plain),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARTIFACT: &str = r#"{"reason":"compiler-artifact","package_id":"path+file:///w/warpforge#0.1.0","manifest_path":"/w/Cargo.toml","target":{"kind":["KIND"],"crate_types":["bin"],"name":"ops","src_path":"/w/tests/ops/main.rs","edition":"2024","doc":false,"doctest":false,"test":true},"profile":{"opt_level":"3","debuginfo":0,"test":HARNESS},"features":["cuda"],"filenames":["/w/t/ops-1"],"executable":EXECUTABLE,"fresh":false}"#;

    fn artifact(kind: &str, executable: &str) -> Option<Program> {
        parse(kind, executable, matches!(kind, "test" | "bench"))
    }

    fn parse(kind: &str, executable: &str, is_harness: bool) -> Option<Program> {
        let line = ARTIFACT.replace("KIND", kind).replace("HARNESS", &is_harness.to_string());
        Program::parse(&line.replace("EXECUTABLE", executable))
    }

    #[test]
    fn the_tests_of_an_example_are_not_the_example() {
        for kind in ["example", "bin"] {
            assert_eq!(parse(kind, r#""/w/t/examples/ops-1""#, true), None);
        }
    }

    #[test]
    fn programs_are_read_from_cargos_messages() {
        for kind in KINDS {
            let program = artifact(kind, r#""/w/t/ops-1""#).unwrap();
            assert_eq!(
                program,
                Program { kind: kind.into(), name: "ops".into(), executable: "/w/t/ops-1".into() }
            );
        }
    }

    /// `run sanitize` with programs and a sanitizer that are scripts: what it prints, and its status.
    fn sanitize(arguments: &[&str], tools: &str) -> (String, Option<i32>) {
        let place = tempfile::tempdir().unwrap();
        let at = |path: &str| place.path().join(path);
        let script = |path: &str, text: &str| {
            fs::create_dir_all(at(path).parent().unwrap()).unwrap();
            fs::write(at(path), format!("#!/bin/bash\n{text}")).unwrap();
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            fs::set_permissions(at(path), mode).unwrap();
        };
        // Seven tests, of which two are skipped by name, as libtest does it.
        script(
            "programs/test/ops",
            r#"skips=(); filters=()
            while (($#)); do case "$1" in
                --list) list=1 ;; --skip) skips+=("$2"); shift ;; --format) shift ;; -*) ;; *) filters+=("$1") ;;
            esac; shift; done
            count=0
            for name in a::one a::two b::bad c::cpu faults::x every_kernel_is_simulated sampling::ties; do
                for skip in "${skips[@]}"; do [[ $name == *$skip* ]] && continue 2; done
                found=$((${#filters[@]} == 0))
                for filter in "${filters[@]}"; do [[ $name == *$filter* ]] && found=1; done
                ((found)) || continue
                [[ -n $list ]] && echo "$name: test"
                count=$((count + 1))
            done
            [[ -n $list ]] || echo "test result: ok. $count passed; 0 failed;""#,
        );
        // A finding of synccheck, wherever the bad test is, and nothing to look at where the other runs alone.
        script(
            "bin/compute-sanitizer",
            r#"tool="$2"; shift 4; "$@"
            if [[ $tool == synccheck && "$*" == *b::bad* ]]; then
                echo "========= Barrier error detected. Divergent thread(s) in warp."
                echo "========= ERROR SUMMARY: 1 error"; exit 86
            fi
            if [[ "$*" != *[ab]::* ]]; then
                echo "========= Error: Target application terminated before first instrumented API call"; exit 255
            fi"#,
        );
        let archive = at("bundle/programs.tar.xz");
        fs::create_dir_all(at("bundle")).unwrap();
        let mut tar = Command::new("tar");
        tar.arg("--create").arg("--xz").arg("--file").arg(&archive).arg("--directory").arg(at("programs"));
        assert!(tar.arg("test").status().unwrap().success());
        write_script(&at("bundle/run")).unwrap();
        fs::create_dir_all(at("checkout/tests")).unwrap();
        fs::write(at("checkout/Cargo.toml"), "").unwrap();
        let path = format!("{}:{}", at("bin").display(), std::env::var("PATH").unwrap());
        let mut run = Command::new(at("bundle/run"));
        run.arg("sanitize").args(arguments).current_dir(at("checkout")).env("PATH", path);
        run.env("TMPDIR", place.path()).env("WARPFORGE_PROCESSES", "2").env_remove("WARPFORGE_SANITIZERS");
        if !tools.is_empty() {
            run.env("WARPFORGE_SANITIZERS", tools);
        }
        let output = run.output().unwrap();
        (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code())
    }

    #[test]
    fn every_tool_sees_every_test_and_a_finding_fails() {
        let lines = |text: &str| -> Vec<String> {
            text.lines().filter(|line| line.contains(" tests passed")).map(str::to_string).collect()
        };
        let (text, status) = sanitize(&[], "");
        assert_eq!(status, Some(86), "{text}");
        assert_eq!(
            lines(&text),
            [
                "memcheck   5 of 5 tests passed, findings in 0 runs",
                "racecheck  4 of 4 tests passed, findings in 0 runs",
                "synccheck  5 of 5 tests passed, findings in 1 runs",
                "initcheck  5 of 5 tests passed, findings in 0 runs",
            ],
            "{text}"
        );
        assert!(text.contains("FINDINGS: ERROR SUMMARY: 1 error"), "{text}");
        assert!(text.contains("Divergent thread(s) in warp"), "{text}");
        for (filter, tool, count, passed) in
            [("a::", "synccheck", 1, 0), ("c::", "initcheck", 1, 0), ("nothing_like_it", "memcheck", 0, 1)]
        {
            let (text, status) = sanitize(&[filter], tool);
            assert_eq!((lines(&text).len(), status), (count, Some(passed)), "{text}");
        }
    }

    #[test]
    fn escapes_in_paths_are_undone() {
        let program = artifact("test", r#""/a \"b\" \\c\u0041/\u00e9ü\t""#).unwrap();
        assert_eq!(program.executable, PathBuf::from("/a \"b\" \\cA/éü\t"));
    }

    #[test]
    fn other_lines_are_no_programs() {
        assert_eq!(artifact("lib", "null"), None);
        assert_eq!(string(r#""/cut short"#), None);
        assert_eq!(string(r#""\u12"#), None);
        assert_eq!(artifact("test", r#""\x""#), None);
        assert_eq!(artifact("test", r#""\ud800""#), None);
        for line in ["", "running 3 tests", r#"{"reason":"build-finished","success":true}"#] {
            assert_eq!(Program::parse(line), None, "{line}");
        }
        // A key in a string has escaped quotes.
        let message = r#"{"reason":"compiler-message","message":"\"target\":{\"kind\":[\"test\"]} \"executable\":\"/x\""}"#;
        assert_eq!(Program::parse(message), None);
    }
}
