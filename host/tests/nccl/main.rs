//! Groups of cards whose collectives NCCL carries: both NCCL and the driver are fakes, built here from C
//! (`cc`; without one the tests say so and pass). Devices are the host, streams are busy until all ranks
//! have come, and calls fail, stay in progress or hang as they are told.
//!
//! A process finds its libraries at its start, so each case runs this binary again.

#![cfg(all(feature = "cuda", target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use host::group::{Communicator, Rendezvous};
use host::{Arch, Device, Error, Image, Ptx};
use programs::*;

mod programs;

const INSIDE: &str = "NCCL_TEST_INSIDE";
/// How long the groups here wait for a rank that does not come.
const TIMEOUT: Duration = Duration::from_millis(300);
/// What a wait may take beyond that on a busy machine, with what an abort is waited for.
const SLACK: Duration = Duration::from_secs(8);
/// The same where ranks meet first.
const JOIN: Duration = Duration::from_millis(800);
const RANKS: usize = 3;

static IMAGES: &[Image] = &[Image {
    family: "rmsnorm",
    arch: Arch::Sm61,
    ptx: Ptx::Text(".version 6.3\n.target sm_61\n.address_size 64\n.visible .entry k() { ret; }\n"),
}];

/// The folder with both fakes, or none without a C compiler or their sources.
fn fakes() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nccl");
        std::fs::create_dir_all(&folder).expect("the temporary folder is writable");
        let own = Path::new(env!("CARGO_MANIFEST_DIR"));
        for (source, name) in [
            ("tests/driver_faults/libcuda.c", "libcuda.so.1"),
            ("../crates/cuda_loader/tests/fake_nccl/libnccl.c", "libnccl.so.2"),
        ] {
            let source = own.join(source);
            if !source.is_file() {
                return None;
            }
            let mut compiler = Command::new("cc");
            compiler.args([
                "-shared",
                "-fPIC",
                "-O1",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-pthread",
                "-DSTREAMS",
                "-o",
            ]);
            let status = compiler.arg(folder.join(name)).arg(&source).arg("-ldl").status().ok()?;
            assert!(status.success(), "cc failed on {}", source.display());
        }
        Some(folder)
    };
    let folder = FOLDER.get_or_init(build).as_deref();
    if folder.is_none() {
        eprintln!("skipped: no C compiler (cc), or no source of the fakes");
    }
    folder
}

/// What a process writes that runs this program with both fakes. One that does not end is a failure.
fn run(folder: &Path, program: &str, environment: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
    command.args(["inside", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(INSIDE, program).env("LD_LIBRARY_PATH", folder).env("FAKE_DEVICES", RANKS.to_string());
    command.env_remove("WARPFORGE_NCCL").envs(environment.iter().copied());
    let files = tempfile::tempdir().expect("a folder");
    let path = files.path().join("text");
    let file = std::fs::File::create(&path).expect("a file");
    command.stdout(file.try_clone().expect("a file")).stderr(file).stdin(Stdio::null());
    let mut child = command.spawn().expect("this binary runs");
    let end = Instant::now() + Duration::from_secs(60);
    let status = loop {
        if let Some(status) = child.try_wait().expect("it can be waited for") {
            break Some(status);
        }
        if Instant::now() > end {
            child.kill().expect("it can be ended");
            child.wait().expect("it has ended");
            break None;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let text = std::fs::read_to_string(&path).expect("a text");
    assert!(
        status.is_some_and(|status| status.success()) && text.contains("1 passed"),
        "{program} with {environment:?}, {status:?}: {text}"
    );
    text
}

fn devices() -> Result<Vec<Device>, Error> {
    // SAFETY: the fake driver's kernels do nothing.
    (0..RANKS).map(|ordinal| unsafe { Device::cuda_with_images(ordinal, IMAGES) }).collect()
}

/// On a machine with two cards or more and NCCL, in one process and in one for each card. `REQUIRE_GPUS=2`
/// makes a machine with fewer a failure.
#[test]
fn cards_exchange() {
    if std::env::var_os(INSIDE).is_some() {
        return;
    }
    let count = Device::cuda_count().unwrap_or(0);
    if count < 2 {
        assert!(std::env::var_os("REQUIRE_GPUS").is_none(), "this machine has {count} cards");
        eprintln!("skipped: this machine has {count} cards");
        return;
    }
    let begin = |program: &str, card: Option<String>| {
        let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
        command.args(["inside", "--exact", "--nocapture", "--test-threads=1"]).env(INSIDE, program);
        command.envs(card.map(|card| ("CARD", card))).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("this binary runs")
    };
    let end = |child: std::process::Child| {
        let output = child.wait_with_output().expect("it ends");
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        eprintln!("{text}");
        (output.status.code(), text.contains("the program is right"))
    };
    assert_eq!(end(begin("cards", None)), (Some(0), true));
    let folder = tempfile::tempdir().expect("a folder");
    let (_other, [_, Rendezvous::Tcp(address)]) = meetings() else { panic!("an address") };
    let file = folder.path().join("meeting");
    for what in ["runs", "dies"] {
        for place in [format!("file {}", file.display()), format!("tcp {address}")] {
            let card = |rank| begin("one card", Some(format!("{rank} {count} {what} {place}")));
            let children: Vec<_> = (0..count).map(card).collect();
            for (rank, child) in children.into_iter().enumerate() {
                let expected =
                    if what == "dies" && rank + 1 == count { (Some(3), false) } else { (Some(0), true) };
                assert_eq!(end(child), expected, "rank {rank} of {count} {what}, {place}");
            }
        }
    }
}

/// The programs for cards, with the fakes, as far as they go there.
#[test]
fn programs_for_cards_end() {
    let Some(folder) = fakes() else { return };
    let text = run(folder, "cards", &[("FAKE_NCCL_PROGRESS", "1")]);
    assert!(text.contains("the program is right"), "{text}");
    let files = tempfile::tempdir().expect("a folder");
    let card = format!("0 1 runs file {}", files.path().join("meeting").display());
    let text = run(folder, "one card", &[("CARD", &card)]);
    assert!(text.contains("the program is right"), "{text}");
}

/// In the fakes' process: runs the program and prints its end.
#[test]
fn inside() {
    let Some(which) = std::env::var_os(INSIDE) else { return };
    let result = match which.to_str() {
        Some("group") => program_of_a_group(),
        Some("records") => program_that_records(),
        Some("joins") => program_that_joins(),
        Some("gone") => program_whose_rank_is_gone(),
        Some("refused") => program_that_is_refused(),
        Some("cards") => program_of_cards(),
        Some("one card") => program_of_one_card(),
        Some(how) => program_of_a_rank_that(how),
        None => panic!("{which:?}"),
    };
    match result {
        Ok(()) => eprintln!("the program is right"),
        Err(error) => eprintln!("the program fails: {error}"),
    }
}

/// What stands behind these words, which may not be at a line's beginning.
fn said<'a>(text: &'a str, before: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.split_once(before)).map(|(_, said)| said)
}

fn numbers(text: &str, of: &str) -> usize {
    let line = text.lines().find(|line| line.starts_with("fake nccl: ") && line.ends_with(of));
    let line = line.unwrap_or_else(|| panic!("{of}: {text}"));
    line.split(' ').nth(2).and_then(|number| number.parse().ok()).expect("a number")
}

#[test]
fn collectives_of_a_group() {
    let Some(folder) = fakes() else { return };
    for progress in ["0", "1", "7"] {
        for program in ["group", "joins"] {
            let text = run(folder, program, &[("FAKE_NCCL_PROGRESS", progress)]);
            assert!(text.contains("the program is right"), "{text}");
            // All were ended, and in order.
            assert_eq!(numbers(&text, " alive"), 0, "{text}");
            assert!(!text.contains("destroyed before"), "{text}");
        }
    }
}

#[test]
fn each_communicator_is_made_in_its_device_s_context() {
    let Some(folder) = fakes() else { return };
    let files = tempfile::tempdir().expect("a folder");
    let log = files.path().join("log");
    let text = run(folder, "group", &[("FAKE_NCCL_LOG", log.to_str().expect("a name"))]);
    assert!(text.contains("the program is right"), "{text}");
    let log = std::fs::read_to_string(log).expect("the fake has written it");
    for rank in 0..RANKS {
        let line =
            format!("ncclCommInitRankConfig rank={rank} size={RANKS} context={} blocking=0", 64 + rank);
        assert_eq!(log.matches(&line).count(), 1, "{line}: {log}");
        assert_eq!(log.matches(&format!("ncclCommDestroy rank={rank}")).count(), 1, "{log}");
    }
    assert!(!log.contains("ncclCommAbort"), "{log}");
}

#[test]
fn recorded_collectives_keep_their_communicator() {
    let Some(folder) = fakes() else { return };
    let files = tempfile::tempdir().expect("a folder");
    let log = files.path().join("log");
    let environment = [("FAKE_NCCL_LOG", log.to_str().expect("a name")), ("FAKE_NCCL_PROGRESS", "2")];
    let text = run(folder, "records", &environment);
    assert!(text.contains("the program is right"), "{text}");
    let log = std::fs::read_to_string(log).expect("the fake has written it");
    // Three calls of each rank while it is recorded, then the ends.
    assert_eq!(log.matches("ncclAllReduce").count(), 3 * RANKS, "{log}");
    assert_eq!((log.matches("ncclCommDestroy").count(), numbers(&text, " alive")), (RANKS, 0), "{log}");
}

#[test]
fn a_rank_that_does_not_come_or_ends_is_no_hang() {
    let Some(folder) = fakes() else { return };
    for how in ["does not come", "fails", "panics", "comes with another call"] {
        let text = run(folder, how, &[]);
        assert!(text.contains("the program is right"), "{how}: {text}");
        for rank in [0, 2] {
            let heard = format!("rank {rank} hears: synchronize: rank {rank} of {RANKS}: ");
            let heard = said(&text, &heard).unwrap_or_else(|| panic!("{how}: {text}"));
            let reason = match how {
                "does not come" => "the other ranks did not come within 300ms",
                "comes with another call" => "AllReduce(F32, 4) and rank 1 with AllReduce(F32, 5)",
                "fails" => "rank 1 has ended: test: x: expected one thing, got another",
                _ => "rank 1 has ended: it panicked",
            };
            assert!(heard.ends_with(reason), "{how}: {heard}");
        }
        assert_eq!(numbers(&text, " alive"), 0, "{text}");
    }
    let text = run(folder, "gone", &[]);
    assert!(text.contains("the program is right"), "{text}");
    // An abort that does not come back is left to itself.
    let text = run(folder, "does not come", &[("FAKE_NCCL_ABORT_HANGS", "1")]);
    assert!(text.contains("the program is right"), "{text}");
}

#[test]
fn what_stays_in_progress_is_given_up() {
    let Some(folder) = fakes() else { return };
    for (call, op) in [
        ("ncclCommInitRankConfig", "Group"),
        ("ncclAllReduce", "all_reduce"),
        ("ncclReduceScatter", "reduce_scatter"),
        ("ncclAllGather", "all_gather"),
        ("ncclBroadcast", "broadcast"),
    ] {
        let begin = Instant::now();
        let text = run(folder, "group", &[("FAKE_NCCL_HANG", call)]);
        let message = said(&text, "the program fails: ");
        let message = message.unwrap_or_else(|| panic!("{call}: {text}"));
        assert!(message.starts_with(&format!("{op}: rank ")), "{call}: {message}");
        assert!(message.ends_with("the other ranks did not come within 2s"), "{call}: {message}");
        assert!(begin.elapsed() < Duration::from_secs(2) + SLACK, "{call}: {:?}", begin.elapsed());
        assert_eq!(numbers(&text, " alive"), 0, "{call}: {text}");
    }
    // An end in order that does not come is an abort.
    let text = run(folder, "group", &[("FAKE_NCCL_HANG", "ncclCommFinalize")]);
    assert!(text.contains("the program is right"), "{text}");
    assert_eq!(numbers(&text, " alive"), 0, "{text}");
}

#[test]
fn every_call_fails_in_turn() {
    let Some(folder) = fakes() else { return };
    for program in ["group", "joins"] {
        let whole = run(folder, program, &[("FAKE_NCCL_PROGRESS", "1")]);
        let calls = numbers(&whole, " calls");
        assert!(calls > 30, "{calls}");
        let fail_at = &|variable: &str, at: usize| {
            let at = at.to_string();
            let environment = [("FAKE_NCCL_PROGRESS", "1"), (variable, &*at), ("FAKE_NCCL_CODE", "6")];
            let text = run(folder, program, &environment);
            let (_, rest) = text.split_once("fake nccl: ncc").unwrap_or_else(|| panic!("{at}: {text}"));
            let name = rest.split(' ').next().unwrap_or_default();
            let is_end = ["lCommFinalize", "lCommDestroy", "lCommAbort"].contains(&name);
            // What fails when all is dropped is nobody's error.
            if !text.contains("the program is right") {
                let message = said(&text, "the program fails: ");
                let message = message.unwrap_or_else(|| panic!("{at}: {text}"));
                let words = format!("ncc{name}: remote process exited (6): the fake lets ");
                assert!(message.contains(&words), "{at}: {message}: {text}");
            } else {
                assert!(is_end || variable == "FAKE_NCCL_FAIL_STATE", "{at}, ncc{name}: {text}");
            }
            assert_eq!(numbers(&text, " alive"), 0, "{at}: {text}");
        };
        let step = if program == "group" { 1 } else { 7 };
        std::thread::scope(|scope| {
            for first in 0..2 {
                scope.spawn(move || {
                    (1 + first..=calls).step_by(2 * step).for_each(|at| fail_at("FAKE_NCCL_FAIL", at));
                    (1 + first..30).step_by(4).for_each(|at| fail_at("FAKE_NCCL_FAIL_STATE", at));
                });
            }
        });
    }
}

#[test]
fn refusals_say_what_is_wrong() {
    let Some(folder) = fakes() else { return };
    let text = run(folder, "refused", &[("WARPFORGE_NCCL", "/nowhere/libnccl.so")]);
    assert!(text.contains("the work is done"), "{text}");
    for start in ["the program fails: Group: ", "join: Communicator::join: "] {
        let message = said(&text, start).expect("an error");
        assert!(
            message.starts_with("not supported on fake (cuda:0, sm_61): NCCL cannot be loaded"),
            "{message}"
        );
        assert!(message.contains("/nowhere/libnccl.so (") && message.contains("pip install"), "{message}");
    }
    let text = run(folder, "refused", &[]);
    let message = said(&text, "join: ").expect("an error");
    assert!(message.starts_with("Communicator::join: meeting: expected a file"), "{message}");
    assert!(text.contains("the program is right"), "{text}");
}

/// On the CPU ranks of several processes have no way to exchange; arguments are looked at first.
#[test]
fn join_is_for_cards() {
    let join = |rank, size| {
        let address = SocketAddr::from(([127, 0, 0, 1], 9));
        Communicator::join(&Device::cpu(), rank, size, &Rendezvous::Tcp(address), TIMEOUT)
            .unwrap_err()
            .to_string()
    };
    assert!(join(0, 2).contains("one process's memory"), "{}", join(0, 2));
    assert_eq!(join(2, 2), "Communicator::join: rank: expected a rank below 2, got 2");
    assert_eq!(join(0, 0), "Communicator::join: size: expected 1 to 65536 ranks, got 0");
}
