use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::record::{Case, Record};
use super::*;

fn run_line(unix_time: u64) -> Value {
    json!({
        "kind": "run", "source": "warpforge", "version": "0.1.0", "unix_time": unix_time, "device": "NVIDIA H200",
        "floor": "sm_90a", "card": { "driver": "580.1", "power_limit_w": null },
        "roofline": {
            "copy_gb_per_s": 4000.0, "peaks": [{ "dtype": "bf16", "tflop_per_s": 50.0, "by": "ours" }],
        },
    })
}

/// A case of 4 MB and `flops` operations.
fn case(name: &str, flops: u64) -> Value {
    let op = name.split(' ').next();
    json!({
        "kind": "case", "name": name, "op": op, "model": null, "phase": null, "dtype": "bf16", "shape": { "m": 1 },
        "bytes": 4_000_000, "flops": flops,
    })
}

fn with(mut line: Value, more: Value) -> Value {
    let (Value::Object(line_map), Value::Object(more)) = (&mut line, more) else { panic!("not objects") };
    line_map.extend(more);
    line
}

fn ours(name: &str, flops: u64, us: f64, spread_us: f64) -> Value {
    let time = json!({
        "us": us, "spread_us": spread_us, "samples": 20, "joules": 0.001, "kernel": "k", "registers": 32,
        "smem_bytes": 0, "occupancy": 0.5, "memory_bytes": 1 << 20, "floor_us": 1.0,
    });
    with(case(name, flops), time)
}

fn peer(name: &str, flops: u64, peer: &str, us: f64) -> Value {
    let time = json!({
        "kind": "peer", "peer": peer, "us": us, "spread_us": 0.1, "samples": 20, "joules": null, "note": "",
    });
    with(case(name, flops), time)
}

fn measured(folder: &Path, ours: &[Value], peers: &[Value]) {
    fs::create_dir_all(folder).unwrap();
    let text = |lines: &[Value]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    fs::write(folder.join("ours.jsonl"), text(ours)).unwrap();
    if !peers.is_empty() {
        fs::write(folder.join("peers.jsonl"), text(peers)).unwrap();
    }
}

fn options(from: &Path, out: &Path) -> Options {
    Options { from: from.into(), out: Some(out.into()), ..Options::default() }
}

#[test]
fn cases_are_joined_by_their_names() {
    let folder = tempfile::tempdir().unwrap();
    measured(
        folder.path(),
        &[
            run_line(0),
            ours("matmul a", 8_000_000, 2.0, 0.1),
            ours("rope b", 0, 4.0, 0.1),
            json!({ "kind": "failed", "name": "rope c", "reason": "out of memory" }),
        ],
        &[
            json!({ "kind": "run", "source": "peers", "torch": "2.11" }),
            json!({ "kind": "peak", "dtype": "bf16", "tflop_per_s": 700.0, "by": "cuBLAS" }),
            peer("matmul a", 8_000_000, "eager", 6.0),
            peer("matmul a", 8_000_000, "cuBLAS", 1.0),
            peer("matmul_fp8 d", 1000, "torch._scaled_mm", 5.0),
            json!({ "kind": "missing", "name": "rope b", "peer": "inductor", "reason": "no compiler" }),
        ],
    );
    let record = Record::join(folder.path()).unwrap();
    let names: Vec<&str> = record.cases.iter().map(|case| &*case.work.name).collect();
    assert_eq!(names, ["matmul a", "rope b", "matmul_fp8 d"]);
    let [matmul, rope, fp8] = &record.cases[..] else { panic!("three cases") };
    assert_eq!(matmul.best_peer().map(|peer| &*peer.peer), Some("cuBLAS"));
    assert_eq!(matmul.ratio(), Some(0.5));
    assert_eq!((rope.ratio(), &*rope.missing[0].reason), (None, "no compiler"));
    assert!(fp8.ours.is_none() && fp8.ratio().is_none());
    assert_eq!(markdown::ratios(&record.cases).map(|ratios| (ratios.mean, ratios.count)), Some((0.5, 1)));
    // 4 MB at 4000 GB/s.
    assert_eq!(record.run.roofline.floor_us(&rope.work), 1.0);
}

#[test]
fn the_mean_of_ratios_is_geometric() {
    let folder = tempfile::tempdir().unwrap();
    let lines = [run_line(0), ours("glu a", 0, 1.0, 0.0), ours("glu b", 0, 1.0, 0.0)];
    measured(folder.path(), &lines, &[peer("glu a", 0, "p", 4.0), peer("glu b", 0, "p", 0.25)]);
    let ratios = markdown::ratios(&Record::join(folder.path()).unwrap().cases).unwrap();
    assert!((ratios.mean - 1.0).abs() < 1e-12, "{}", ratios.mean);
    assert_eq!((ratios.least, ratios.most), (0.25, 4.0));
}

#[test]
fn a_rate_that_was_reached_raises_the_roofline() {
    let folder = tempfile::tempdir().unwrap();
    // 10^9 operations in 2 µs are 500 TFLOP/s, in 1 µs 1000.
    let lines = [run_line(0), ours("matmul a", 1_000_000_000, 2.0, 0.0)];
    measured(folder.path(), &lines, &[peer("matmul a", 1_000_000_000, "cuBLAS", 1.0)]);
    let peaks = Record::join(folder.path()).unwrap().run.roofline.peaks;
    assert_eq!((peaks[0].tflop_per_s, &*peaks[0].by), (1000.0, "cuBLAS at matmul a"));
}

#[test]
fn a_record_is_read_as_it_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let (from, out) = (folder.path().join("from"), folder.path().join("h200/2026-11-22"));
    measured(&from, &[run_line(0), ours("rope a", 7, 1.25, 0.1)], &[peer("rope a", 7, "p", 2.0)]);
    run(folder.path(), &options(&from, &out)).unwrap();
    let record = Record::read(&out.join("results.json")).unwrap();
    assert_eq!(record.to_json().unwrap(), fs::read_to_string(out.join("results.json")).unwrap());
    let Case { work, ours, .. } = &record.cases[0];
    assert_eq!((&*work.name, ours.as_ref().map(|ours| ours.us)), ("rope a", Some(1.25)));
    let report = fs::read_to_string(out.join("report.md")).unwrap();
    for part in [
        "# NVIDIA H200, 1970-01-01",
        "driver 580.1",
        "| a | 1.25 µs ± 0.10 µs |",
        "There is none of this card.",
    ] {
        assert!(report.contains(part), "`{part}` is not in\n{report}");
    }
    for plot in ["roofline.svg", "ratios.svg"] {
        let text = fs::read_to_string(out.join(plot)).unwrap();
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{plot}");
    }
}

#[test]
fn models_have_their_whole_names() {
    let folder = tempfile::tempdir().unwrap();
    let line = ours("model qwen3-coder-next, 36 of 48 layers, decode 8", 0, 4000.0, 10.0);
    let line = with(line, json!({ "model": "qwen3-coder-next", "phase": "decode 8" }));
    let other = ours("model qwen3-0.6b prefill 2048", 0, 4096.0, 10.0);
    let other = with(other, json!({ "model": "qwen3-0.6b", "phase": "prefill 2048" }));
    measured(folder.path(), &[run_line(0), line, other], &[]);
    let record = Record::join(folder.path()).unwrap();
    let report = markdown::report(&record, "1970-01-01", None);
    let row = "| qwen3-coder-next, 36 of 48 layers, decode 8 | 4.00 ms ± 10.0 µs | 2000 |";
    assert!(report.contains(row), "{report}");
    let text = markdown::readme(&record, "1970-01-01", "folder");
    for row in [
        "| tokens/s, bf16, random weights | decode 8 | prefill 2048 |\n|---|---|---|\n",
        "| qwen3-coder-next, 36 of 48 layers | 2000 | – |\n",
        "| qwen3-0.6b | – | 500000 |\n",
    ] {
        assert!(text.contains(row), "{text}");
    }
}

#[test]
fn a_report_says_where_a_peer_is_faster() {
    let folder = tempfile::tempdir().unwrap();
    let cases =
        [("a", 10.0), ("b", 10.0), ("c", 10.0)].map(|(name, us)| ours(&format!("rope {name}"), 0, us, 0.1));
    let peers =
        [("a", 9.0), ("b", 12.0), ("c", 5.0)].map(|(name, us)| peer(&format!("rope {name}"), 0, "torch", us));
    measured(folder.path(), &[&[run_line(0)], &cases[..]].concat(), &peers);
    let record = Record::join(folder.path()).unwrap();
    for (text, sentence) in [
        (markdown::report(&record, "1970-01-01", None), "in 2: rope c (0.50); rope a (0.90).\n"),
        (markdown::readme(&record, "1970-01-01", "folder"), "in 2, at most with 0.50.\n"),
    ] {
        let sentence = format!("Of the 3 cases that have a peer, the peer was faster {sentence}");
        assert!(text.contains(&sentence), "{text}");
    }
}

#[test]
fn slower_beyond_the_spread_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let record = |day: &str, cases: &[Value]| {
        let from = folder.path().join(format!("from-{day}"));
        measured(&from, &[&[run_line(0)], cases].concat(), &[]);
        run(folder.path(), &options(&from, &folder.path().join("h200").join(day)))
    };
    record("2026-11-20", &[ours("rope a", 0, 1.0, 0.0)]).unwrap();
    let before = [("a", 10.0), ("b", 10.0), ("c", 10.0), ("d", 10.0), ("e", 10.0)]
        .map(|(name, us)| ours(&format!("rope {name}"), 0, us, 0.1));
    // Ten times as slow as the record before: that is what the exit status tells.
    assert_eq!(
        record("2026-11-21", &before).unwrap_err().to_string(),
        "1 cases are slower than in the last record"
    );
    // a: 5 % and a little more than the spread. b: within the spread. c: faster. d: gone. e: more to do than before.
    let now = [("a", 0, 10.7, 0.1), ("b", 0, 12.0, 2.0), ("c", 0, 5.0, 0.1), ("e", 7, 20.0, 0.1)]
        .map(|(name, flops, us, spread)| ours(&format!("rope {name}"), flops, us, spread));
    let error = record("2026-11-22", &now).unwrap_err().to_string();
    assert_eq!(error, "1 cases are slower than in the last record");
    let report = fs::read_to_string(folder.path().join("h200/2026-11-22/report.md")).unwrap();
    for part in [
        "Against [2026-11-21](../2026-11-21/report.md): 1 slower by more than 5 % beyond their spread, 1 faster, 2 gone.",
        "| rope a | 10.0 µs | 10.7 µs | 1.07 |",
        "Gone: rope d; rope e.",
    ] {
        assert!(report.contains(part), "`{part}` is not in\n{report}");
    }
    record("2026-11-23", &now).unwrap();
    // d was in the first and the second record only.
    let error = record("2026-11-24", &[ours("rope d", 0, 11.0, 0.1)]).unwrap_err().to_string();
    assert_eq!(error, "1 cases are slower than in the last record");
    let report = fs::read_to_string(folder.path().join("h200/2026-11-24/report.md")).unwrap();
    assert!(report.contains("| rope d | 10.0 µs | 11.0 µs | 1.10 |"), "{report}");
}

#[test]
fn other_floors_and_clocks_are_not_compared() {
    for (other, said) in [
        (json!({ "floor": "sm_61" }), "NVIDIA H200 with sm_61, warm for 0 s there"),
        (json!({ "warm_seconds": 0.3 }), "NVIDIA H200 with sm_90a, warm for 0.3 s there"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let before = with(run_line(0), other);
        for (day, line, us) in [("2026-11-21", before, 1.0), ("2026-11-22", run_line(0), 9.0)] {
            let from = folder.path().join(day);
            measured(&from, &[line, ours("rope a", 0, us, 0.0)], &[]);
            run(folder.path(), &options(&from, &folder.path().join("h200").join(day))).unwrap();
        }
        let report = fs::read_to_string(folder.path().join("h200/2026-11-22/report.md")).unwrap();
        assert!(report.contains(&format!("is of something else: {said}")), "{report}");
    }
}

#[test]
fn the_readme_gets_the_headlines_between_its_markers() {
    let folder = tempfile::tempdir().unwrap();
    let (from, readme) = (folder.path().join("from"), folder.path().join("README.md"));
    measured(&from, &[run_line(0), ours("matmul anchor 8192", 0, 300.0, 1.0)], &[]);
    let options = Options { readme: Readme::Write, from, ..Options::default() };
    fs::write(&readme, "# Title\n").unwrap();
    let message = run(folder.path(), &options).unwrap_err().to_string();
    assert!(message.contains("has no lines `<!-- bench-report -->`"), "{message}");
    fs::write(&readme, format!("before\n{BEGIN}\nold\n{END}\nafter\n")).unwrap();
    run(folder.path(), &options).unwrap();
    let text = fs::read_to_string(&readme).unwrap();
    assert!(
        text.starts_with(&format!("before\n{BEGIN}\n")) && text.ends_with(&format!("{END}\nafter\n")),
        "{text}"
    );
    assert!(text.contains("| matmul 8192 | 300 µs | – |"), "{text}");
    assert!(text.contains("benches/record/h200/1970-01-01/report.md") && !text.contains("old"), "{text}");
}

#[test]
fn what_is_wrong_with_a_measurement_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let message = |folder: &Path| Record::join(folder).unwrap_err().to_string();
    assert!(message(folder.path()).contains("ours.jsonl: No such file"), "{}", message(folder.path()));
    measured(folder.path(), &[ours("rope a", 0, 1.0, 0.0)], &[]);
    assert!(message(folder.path()).contains("has no line of kind `run`"), "{}", message(folder.path()));
    measured(folder.path(), &[run_line(0), ours("rope a", 0, 1.0, 0.0), ours("rope a", 0, 2.0, 0.0)], &[]);
    assert!(message(folder.path()).contains("has the case `rope a` twice"), "{}", message(folder.path()));
    measured(folder.path(), &[run_line(0), json!({ "kind": "bogus" })], &[]);
    let text = message(folder.path());
    assert!(text.contains("ours.jsonl, line 2: unknown variant `bogus`"), "{text}");
}

#[test]
fn words_of_the_command_line() {
    let parsed = Options::parse(&["from", "--readme", "--date", "2026-11-22", "--out", "there"]).unwrap();
    let expected = Options {
        from: "from".into(),
        out: Some("there".into()),
        date: Some("2026-11-22".into()),
        readme: Readme::Write,
        of: Of::Cases,
    };
    assert_eq!(parsed, expected);
    for words in [&[][..], &["--readme"], &["a", "b"], &["a", "--out"], &["a", "--dates", "x"]] {
        assert_eq!(Options::parse(words), None, "{words:?}");
    }
}

#[test]
fn days_and_folders() {
    for (time, day) in [
        (0, "1970-01-01"),
        (951_782_399, "2000-02-28"),
        (951_782_400, "2000-02-29"),
        (951_868_800, "2000-03-01"),
        (1_795_305_600, "2026-11-22"),
        (4_107_542_400, "2100-03-01"),
    ] {
        assert_eq!(date(time), day, "{time}");
    }
    assert_eq!(folder_name("NVIDIA H200"), "h200");
    assert_eq!(folder_name("NVIDIA GeForce RTX 4090"), "geforce-rtx-4090");
    assert_eq!(folder_name("CPU with 2 threads"), "cpu-with-2-threads");
}
