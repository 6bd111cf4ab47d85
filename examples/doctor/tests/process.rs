//! `doctor` as a process: what it writes, to whom, and its status.
#![cfg(unix)]

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use warpforge::models::WEIGHT_FORMATS;
use warpforge::{Arch, Device, IMAGES};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// In an empty folder: it needs no checkout.
fn doctor(folder: &tempfile::TempDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_doctor"));
    command.current_dir(folder).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn succeeded(output: &Output) {
    assert!(output.status.success(), "{:?}: {}", output.status, text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
}

fn list<'a>(value: &'a Value, key: &str) -> Result<&'a Vec<Value>, String> {
    value[key].as_array().ok_or_else(|| format!("{key}: expected a list, got {}", value[key]))
}

/// Its standard output is one JSON object, and nothing else.
#[test]
fn json() -> Outcome {
    let folder = tempfile::tempdir()?;
    let output = doctor(&folder, &["--json"]).output()?;
    succeeded(&output);
    let all: Value = serde_json::from_slice(&output.stdout)?;
    let keys: Vec<&str> = all.as_object().ok_or("an object")?.keys().map(String::as_str).collect();
    assert_eq!(keys, ["cards", "choices", "formats", "images", "memory", "no_cards", "tests", "version"]);
    assert_eq!(all["version"], env!("CARGO_PKG_VERSION"));

    // The images that this test was built with, too.
    let images = list(&all, "images")?;
    let arches: Vec<&Value> = images.iter().map(|image| &image["arch"]).collect();
    assert_eq!(arches, Arch::ALL.map(|arch| arch.to_string()).iter().collect::<Vec<_>>());
    for (arch, image) in std::iter::zip(Arch::ALL, images) {
        let own = || IMAGES.iter().filter(|image| image.arch == arch);
        assert_eq!(image["families"], own().count(), "{arch}");
        assert_eq!(image["kernels"], own().map(|image| image.modules().count()).sum::<usize>(), "{arch}");
        let held = own().next().is_some();
        assert_eq!(image["ptx_bytes"].as_u64().ok_or("bytes")? > 0, held, "{arch}");
        assert_eq!(image["driver"].is_u64(), held, "{arch}: {image}");
        assert_eq!(image["cuda"].is_string(), held, "{arch}: {image}");
    }

    // A card or the reason why there is none.
    let cards = list(&all, "cards")?;
    match Device::cuda_count() {
        Ok(count) => assert_eq!((cards.len(), &all["no_cards"]), (count, &Value::Null)),
        Err(error) => assert_eq!((cards.len(), &all["no_cards"]), (0, &Value::from(error.to_string()))),
    }
    for card in cards {
        assert!(card["card"].is_u64() && (card["name"].is_string() || card["error"].is_string()), "{card}");
    }

    // The CPU first, then every card with every floor that it runs: all write the demo model's text.
    let tests = list(&all, "tests")?;
    assert_eq!(tests[0]["device"], Device::cpu().describe());
    for test in tests {
        assert_eq!(test["ok"], true, "{test}");
        assert!(test["tokens"].as_u64() > Some(20), "{test}");
        assert!(test["error"].is_null(), "{test}");
    }

    // What the last device's operators chose, and what each device's pool held.
    let last = &tests[tests.len() - 1]["device"];
    assert_eq!(&all["choices"]["device"], last);
    let choices = list(&all["choices"], "operators")?;
    for choice in choices {
        for key in ["phase", "operator", "variant", "why"] {
            assert!(choice[key].as_str().is_some_and(|text| !text.is_empty()), "{key}: {choice}");
        }
    }
    for operator in ["matmul", "rmsnorm", "attention"] {
        assert!(choices.iter().any(|choice| choice["operator"] == operator), "{operator}");
    }
    // A kernel for every format on every device.
    let formats = list(&all, "formats")?;
    let devices: Vec<&Value> = formats.iter().map(|formats| &formats["device"]).collect();
    assert_eq!(devices, tests.iter().map(|test| &test["device"]).collect::<Vec<_>>());
    for (index, formats) in formats.iter().enumerate() {
        let weights = list(formats, "weights")?;
        assert_eq!(weights.len(), WEIGHT_FORMATS.len());
        for (weight, (name, _)) in std::iter::zip(weights, WEIGHT_FORMATS.iter().copied()) {
            assert_eq!(weight["weights"], name);
            for key in ["rows_1", "rows_16", "rows_2048"] {
                let kernel = weight[key].as_str().ok_or(key)?;
                assert!(if index == 0 { kernel == "cpu" } else { kernel.starts_with("matmul_") }, "{weight}");
            }
        }
    }
    let memory = list(&all, "memory")?;
    let devices: Vec<&Value> = memory.iter().map(|pool| &pool["device"]).collect();
    assert_eq!(devices, tests.iter().map(|test| &test["device"]).collect::<Vec<_>>());
    for pool in memory {
        let (pool, number) = (&pool["pool"], |key: &str| pool["pool"][key].as_u64());
        assert!(number("in_use_bytes") > Some(0) && number("live") > Some(0), "{pool}");
        assert!(number("in_use_bytes") <= number("reserved_bytes"), "{pool}");
        let segments = list(pool, "segments")?;
        let bytes: Option<u64> = segments.iter().map(|segment| segment["bytes"].as_u64()).sum();
        assert_eq!(bytes, number("reserved_bytes"));
    }
    Ok(())
}

/// The same for a reader, in columns.
#[test]
fn tables() -> Outcome {
    let folder = tempfile::tempdir()?;
    let output = doctor(&folder, &[]).output()?;
    succeeded(&output);
    let shown = text(&output.stdout);
    let first = format!("images of this build (warpforge {})\n", env!("CARGO_PKG_VERSION"));
    assert!(shown.starts_with(&first), "{shown}");
    for line in [
        "\ncards\n",
        "\nself-tests: ",
        "\nkernels for quantised weights on ",
        "  GGUF Q4_K ",
        &format!("\n  {}: ", Device::cpu().describe()),
    ] {
        assert!(shown.contains(line), "{line:?}: {shown}");
    }
    assert!(shown.contains(" tokens as expected\n") && !shown.contains("FAILED"), "{shown}");
    assert!(serde_json::from_str::<Value>(&shown).is_err());
    Ok(())
}

/// Its reader goes after a line, as `head -1` does, or before the first: quietly, with the status that a shell shows
/// for it.
#[test]
fn a_closed_pipe() -> Outcome {
    let folder = tempfile::tempdir()?;
    for (arguments, lines) in [(&[][..], 1), (&[], 0), (&["--json"], 0)] {
        let mut child = doctor(&folder, arguments).spawn()?;
        let mut shown = BufReader::new(child.stdout.take().ok_or("a pipe")?);
        for _ in 0..lines {
            let mut line = String::new();
            shown.read_line(&mut line)?;
            assert!(line.starts_with("images of this build"), "{line}");
        }
        drop(shown);
        let output = child.wait_with_output()?;
        assert_eq!(output.status.code(), Some(141), "{arguments:?}: {}", text(&output.stderr));
        assert_eq!(text(&output.stderr), "", "{arguments:?}");
    }
    Ok(())
}

#[test]
fn help_version_and_mistakes() -> Outcome {
    let folder = tempfile::tempdir()?;
    let output = doctor(&folder, &["--help"]).output()?;
    succeeded(&output);
    let help = text(&output.stdout);
    for part in ["Usage: doctor", "--json", "--memory", "--version"] {
        assert!(help.contains(part), "{part}: {help}");
    }
    let output = doctor(&folder, &["--version"]).output()?;
    succeeded(&output);
    assert_eq!(text(&output.stdout), format!("doctor {}\n", env!("CARGO_PKG_VERSION")));
    let output = doctor(&folder, &["--jsn"]).output()?;
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
    assert!(text(&output.stderr).contains("'--jsn'"), "{}", text(&output.stderr));
    Ok(())
}

/// What the pools did is JSON, with a process for each device.
#[test]
fn a_timeline_of_memory() -> Outcome {
    let folder = tempfile::tempdir()?;
    succeeded(&doctor(&folder, &["--memory-timeline=pools.json"]).output()?);
    let all: Value = serde_json::from_slice(&std::fs::read(folder.path().join("pools.json"))?)?;
    assert_eq!(all["otherData"]["dropped events"], "0");
    let events = list(&all, "traceEvents")?;
    let of = |name: &str| events.iter().filter(|event| event["name"] == name).count();
    assert!(of("process_name") >= 1 && of("bytes") > 100, "{} events", events.len());
    let output = doctor(&folder, &["--memory-timeline=none/pools.json"]).output()?;
    assert_eq!(output.status.code(), Some(1));
    let told = text(&output.stderr);
    assert!(told.starts_with("doctor: cannot write none/pools.json: "), "{told}");
    Ok(())
}

/// The picture lands where it is asked for; where that cannot be is an error with the file's name.
#[test]
fn a_picture_of_memory() -> Outcome {
    let folder = tempfile::tempdir()?;
    let output = doctor(&folder, &["--memory=pools.svg"]).output()?;
    succeeded(&output);
    assert!(text(&output.stdout).contains(&format!("\nmemory of {}\n", Device::cpu().describe())));
    assert!(std::fs::read_to_string(folder.path().join("pools.svg"))?.starts_with("<svg"));
    let output = doctor(&folder, &["--memory=none/pools.svg"]).output()?;
    assert_eq!(output.status.code(), Some(1));
    let told = text(&output.stderr);
    assert!(told.starts_with("doctor: cannot write none/pools.svg: "), "{told}");
    Ok(())
}
