//! NCCL against a fake, built here from C: where it is looked for, what is said where there is none, and
//! that every call arrives with its arguments and every answer comes back. Needs a C compiler (`cc`);
//! without one the tests say so and pass.
//!
//! A process looks for NCCL once, so each case runs this binary again, with its environment.

#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use cuda_loader::driver::sys::CUstream;
use cuda_loader::nccl::{self, Communicator, DataType, NcclError, NcclLoadError, State, UniqueIdError};

const INSIDE: &str = "CUDA_LOADER_TEST_INSIDE";

/// A folder that goes with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fake_nccl-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("the temporary folder is writable");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Only room is lost.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn compile(name: &str, flag: Option<&str>) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_nccl");
    std::fs::create_dir_all(&folder).expect("the temporary folder is writable");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_nccl/libnccl.c");
    let file = folder.join(name);
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]).args(flag);
    let status = compiler.arg("-o").arg(&file).arg(&source).arg("-ldl").status().ok()?;
    assert!(status.success(), "cc failed on {}", source.display());
    Some(file)
}

/// The fake, and one that has no `ncclRecv`; none without a C compiler.
fn fakes() -> Option<&'static (PathBuf, PathBuf)> {
    static FILES: OnceLock<Option<(PathBuf, PathBuf)>> = OnceLock::new();
    let files =
        FILES.get_or_init(|| Some((compile("fake.so", None)?, compile("lacks.so", Some("-DLACKS_RECV"))?)));
    if files.is_none() {
        eprintln!("skipped: no C compiler (cc)");
    }
    files.as_ref()
}

/// What a process of this binary writes that does `what` with this environment and none of its own that
/// matters.
fn run(what: &str, environment: &[(&str, &OsStr)]) -> String {
    let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
    command.args(["inside", "--exact", "--nocapture", "--test-threads=1"]);
    for variable in [nccl::VARIABLE, "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH"] {
        command.env_remove(variable);
    }
    command.env("PATH", "/nowhere").env(INSIDE, what).envs(environment.iter().copied());
    let output = command.output().expect("this binary runs");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{what}: {text}");
    text.into_owned()
}

fn said<'a>(text: &'a str, before: &str) -> &'a str {
    text.lines().find_map(|line| line.strip_prefix(before)).unwrap_or_else(|| panic!("{before}: {text}"))
}

/// In a process of its own.
#[test]
fn inside() {
    let Some(what) = std::env::var_os(INSIDE) else { return };
    match what.to_str() {
        Some("find") => match nccl::load() {
            Ok(()) => {
                let (file, version) = (nccl::file().expect("it is loaded"), nccl::version());
                eprintln!("found {file} of version {}", version.expect("it is loaded"));
            }
            Err(error) => {
                // The same answer at every call.
                assert_eq!(nccl::version(), Err(error.clone()));
                assert_eq!(nccl::unique_id(), Err(UniqueIdError::Load(error.clone())));
                eprintln!("not found {error}");
            }
        },
        Some("program") => match program() {
            Ok(()) => eprintln!("the program is right"),
            Err(error) => eprintln!("the program fails: {error}"),
        },
        what => panic!("{what:?}"),
    }
}

/// Copies the fake to a place, with the folders above it.
fn put(fake: &Path, place: &Path) {
    std::fs::create_dir_all(place.parent().expect("a folder")).expect("the folder can be made");
    std::fs::copy(fake, place).expect("the fake can be copied");
}

#[test]
fn it_is_looked_for_in_this_order() {
    let Some((fake, _)) = fakes() else { return };
    let of_system = run("find", &[]);
    let folder = Folder::new("order");
    let package = |packages: &str| {
        let packages = folder.0.join(packages);
        let file = packages.join("nvidia/nccl/lib/libnccl.so.2");
        put(fake, &file);
        (packages, file)
    };
    let (pythonpath, in_pythonpath) = package("own");
    let (_, in_environment) = package("environment/lib/python3.11/site-packages");
    package("environment/lib/python3.9/site-packages");
    let environment = folder.0.join("environment");
    let (_, beside_python) = package("system/lib/python3.12/site-packages");
    let bin = folder.0.join("system/bin");
    put(fake, &bin.join("python3"));
    let libraries = folder.0.join("libraries");
    put(fake, &libraries.join("libnccl.so"));

    let path = ("PATH", bin.as_os_str());
    let environment = ("VIRTUAL_ENV", environment.as_os_str());
    // One that does not have it comes first.
    let listed = format!("{}:{}", folder.0.display(), pythonpath.display());
    let python = ("PYTHONPATH", OsStr::new(&listed));
    let loader = ("LD_LIBRARY_PATH", libraries.as_os_str());
    let named = (nccl::VARIABLE, fake.as_os_str());
    let finds = |environment: &[(&str, &OsStr)], file: &Path| {
        let text = run("find", environment);
        assert_eq!(said(&text, "found "), format!("{} of version 22703", file.display()), "{environment:?}");
    };
    finds(&[path, environment, python, loader, named], fake);
    if !of_system.contains("not found ") {
        eprintln!("skipped: this system has NCCL, which comes before Python's packages");
        return;
    }
    finds(&[path, environment, python, loader], Path::new("libnccl.so"));
    put(fake, &libraries.join("libnccl.so.2"));
    finds(&[path, environment, python, loader], Path::new("libnccl.so.2"));
    finds(&[path, environment, python], &in_pythonpath);
    // The newest Python of the environment: 3.11 is after 3.9.
    finds(&[path, environment], &in_environment);
    finds(&[path], &beside_python);
    // An empty variable names nothing.
    finds(&[path, (nccl::VARIABLE, OsStr::new(""))], &beside_python);
}

#[test]
fn where_there_is_none_the_error_says_what_was_tried_and_what_to_do() {
    let Some((fake, lacks)) = fakes() else { return };
    let of_system = run("find", &[]);
    let nothing = "/nowhere/libnccl.so.2";
    let missing = run("find", &[(nccl::VARIABLE, OsStr::new(nothing))]);
    let message = said(&missing, "not found ");
    // Nothing but what is named.
    assert!(message.starts_with(&format!("NCCL cannot be loaded; tried {nothing} (")), "{message}");
    assert!(
        message.contains("cannot open shared object file") && !message.contains("libnccl.so)"),
        "{message}"
    );
    for word in ["pip install nvidia-nccl-cu13", "the system's package", "WARPFORGE_NCCL"] {
        assert!(message.contains(word), "{message}");
    }
    let lacking = run("find", &[(nccl::VARIABLE, lacks.as_os_str())]);
    assert!(said(&lacking, "not found ").contains("(it has no function ncclRecv)"), "{lacking}");
    for (version, words) in [("2708", "NCCL 2.7.8"), ("21705", "NCCL 2.17.5"), ("30100", "NCCL 3.1.0")] {
        let named = (nccl::VARIABLE, fake.as_os_str());
        let text = run("find", &[named, ("FAKE_NCCL_VERSION", OsStr::new(version))]);
        let expected = format!("(it is {words}, and 2.18 or a later 2.x is needed)");
        assert!(said(&text, "not found ").contains(&expected), "{text}");
    }
    let no_library = Folder::new("nonsense");
    let file = no_library.0.join("libnccl.so.2");
    std::fs::write(&file, "no library").expect("the folder is writable");
    let text = run("find", &[(nccl::VARIABLE, file.as_os_str())]);
    assert!(said(&text, "not found ").contains("file too short"), "{text}");
    if of_system.contains("not found ") {
        let message = said(&of_system, "not found ");
        assert!(message.starts_with("NCCL cannot be loaded; tried libnccl.so.2 ("), "{message}");
        assert!(message.contains("), libnccl.so ("), "{message}");
        // What the loader finds and cannot use is no end of the search.
        let folder = Folder::new("goes-on");
        put(lacks, &folder.0.join("libraries/libnccl.so.2"));
        put(fake, &folder.0.join("own/nvidia/nccl/lib/libnccl.so.2"));
        let (libraries, own) = (folder.0.join("libraries"), folder.0.join("own"));
        let environment = [("LD_LIBRARY_PATH", libraries.as_os_str()), ("PYTHONPATH", own.as_os_str())];
        let text = run("find", &environment);
        assert!(said(&text, "found ").starts_with(&own.display().to_string()), "{text}");
    }
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Id(#[from] UniqueIdError),
    #[error(transparent)]
    Nccl(#[from] NcclError),
    #[error(transparent)]
    Load(#[from] NcclLoadError),
}

fn settle(communicator: &Communicator, begun: State) -> Result<(), NcclError> {
    let mut state = begun;
    while state == State::InProgress {
        state = communicator.state()?;
    }
    Ok(())
}

fn stream(number: usize) -> CUstream {
    std::ptr::without_provenance_mut(number)
}

/// Two ranks, each call once, and their ends.
fn program() -> Result<(), Failure> {
    nccl::load()?;
    let id = nccl::unique_id()?;
    let a = Communicator::init(&id, 0, 2)?;
    assert_eq!(a.state()?, State::InProgress, "rank 1 is not there");
    let b = Communicator::init(&id, 1, 2)?;
    settle(&a, State::InProgress)?;
    settle(&b, State::InProgress)?;
    let mut data = [[1.0f32, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]];
    let [x, y] = [data[0].as_mut_ptr() as u64, data[1].as_mut_ptr() as u64];
    // SAFETY: the fake's device is the host, its streams are numbers, and all addresses are of `data`.
    unsafe {
        settle(&a, a.all_reduce(x, x, 4, DataType::F32, stream(7))?)?;
        settle(&b, b.all_reduce(y, y, 4, DataType::F32, stream(8))?)?;
        // Both have 11, 22, 33, 44; the first half is each one's, the second half the other's.
        settle(&a, a.broadcast(x, 8, DataType::U8, 1, stream(7))?)?;
        settle(&b, b.broadcast(y, 8, DataType::U8, 1, stream(8))?)?;
        settle(&a, a.reduce_scatter(x, x + 8, 2, DataType::F32, stream(7))?)?;
        settle(&b, b.reduce_scatter(y, y + 8, 2, DataType::F32, stream(8))?)?;
        settle(&a, a.all_gather(x + 8, x, 8, DataType::U8, stream(7))?)?;
        settle(&b, b.all_gather(y + 8, y, 8, DataType::U8, stream(8))?)?;
        settle(&a, a.send(x, 4, DataType::U8, 1, stream(7))?)?;
        settle(&b, b.recv(y + 12, 4, DataType::U8, 0, stream(8))?)?;
        let swap = |rank: &Communicator, at, other| {
            rank.grouped(|rank| {
                rank.send(at, 4, DataType::U8, other, stream(9))?;
                rank.recv(at + 4, 4, DataType::U8, other, stream(9)).map(|_| ())
            })
        };
        settle(&a, swap(&a, x, 1)?)?;
        settle(&b, swap(&b, y, 0)?)?;
    }
    assert_eq!(data, [[22.0, 22.0, 66.0, 88.0], [22.0, 22.0, 66.0, 22.0]]);
    for rank in [a, b] {
        settle(&rank, rank.finalize()?)?;
        rank.destroy()?;
    }
    // One that is dropped is aborted.
    let alone = Communicator::init(&nccl::unique_id()?, 0, 1)?;
    settle(&alone, State::InProgress)?;
    alone.abort()?;
    Ok(())
}

#[test]
fn calls_arrive_with_their_arguments() {
    let Some((fake, _)) = fakes() else { return };
    for progress in ["0", "1", "5"] {
        let folder = Folder::new(&format!("calls-{progress}"));
        let log = folder.0.join("log");
        let environment = [
            (nccl::VARIABLE, fake.as_os_str()),
            ("FAKE_NCCL_LOG", log.as_os_str()),
            ("FAKE_NCCL_PROGRESS", OsStr::new(progress)),
        ];
        let text = run("program", &environment);
        assert!(text.contains("the program is right") && text.contains("fake nccl: 0 alive"), "{text}");
        let log = std::fs::read_to_string(&log).expect("the fake has written it");
        let lines: Vec<&str> = log.lines().map(str::trim).collect();
        let with = |line: &str, words: &[&str]| words.iter().all(|word| line.contains(word));
        for (index, words) in [
            (0, &["ncclGetUniqueId"][..]),
            (1, &["ncclCommInitRankConfig", "rank=0 size=2", "blocking=0 config=48/21700"]),
            (2, &["ncclCommInitRankConfig", "rank=1 size=2"]),
            (3, &["ncclAllReduce rank=0", "count=4 type=7", "stream=7"]),
            (4, &["ncclAllReduce rank=1", "count=4 type=7", "stream=8"]),
            (6, &["ncclBroadcast rank=1", "count=8 type=1 root=1"]),
            (7, &["ncclReduceScatter rank=0", "count=2 type=7"]),
            (10, &["ncclAllGather rank=1", "count=8 type=1"]),
            (11, &["ncclSend rank=0", "bytes=4 other=1"]),
            (12, &["ncclRecv rank=1", "bytes=4 other=0"]),
            (13, &["ncclGroupStart"]),
            (16, &["ncclGroupEnd"]),
            (21, &["ncclCommFinalize rank=0"]),
            (22, &["ncclCommDestroy rank=0"]),
            (27, &["ncclCommAbort rank=0"]),
        ] {
            assert!(with(lines[index], words), "line {index}: {words:?}: {log}");
        }
        assert_eq!(lines.len(), 28, "{log}");
    }
}

/// Each call fails once, and each question: the error has NCCL's words, and no communicator is left.
#[test]
fn every_call_fails_in_turn() {
    let Some((fake, _)) = fakes() else { return };
    let named = (nccl::VARIABLE, fake.as_os_str());
    let whole = run("program", &[named]);
    let count = |before| {
        said(&whole, before).split(' ').next().unwrap_or_default().parse::<usize>().expect("a number")
    };
    // The last line of each kind.
    let (calls, questions) = (count("fake nccl: "), {
        let line = whole.lines().find(|line| line.ends_with(" questions")).expect("a count");
        line.trim_start_matches("fake nccl: ")
            .split(' ')
            .next()
            .unwrap_or_default()
            .parse::<usize>()
            .expect("a number")
    });
    assert!(calls == 28 && questions >= 4, "{calls} {questions}");
    for (variable, most) in [("FAKE_NCCL_FAIL", calls), ("FAKE_NCCL_FAIL_STATE", questions)] {
        for at in 1..=most {
            let at = at.to_string();
            let text =
                run("program", &[named, (variable, OsStr::new(&at)), ("FAKE_NCCL_CODE", OsStr::new("6"))]);
            let failed = said(&text, "fake nccl: ncc").strip_suffix(" fails").expect("a name");
            let message = said(&text, "the program fails: ");
            let words = if variable == "FAKE_NCCL_FAIL" {
                format!("the fake lets ncc{failed} fail")
            } else {
                "the fake lets a question fail".into()
            };
            assert_eq!(message, format!("ncc{failed}: remote process exited (6): {words}"), "{text}");
            assert!(text.contains("fake nccl: 0 alive"), "{text}");
        }
    }
}
