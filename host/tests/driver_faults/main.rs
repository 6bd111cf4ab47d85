//! Every call of the driver fails in turn: the program ends with an error that says so, or with the right result where
//! the code has its reason not to mind, or where the device's policy is to go on. Never with a panic, and never with a
//! wrong result.
//!
//! The driver is a fake, built here from C (`cc`; without one the tests say so and pass). Its device is the host, so
//! all of the CUDA backend runs but for what kernels compute. The process's library path is read at its start, so the
//! program runs in a process of its own.

#![cfg(all(feature = "cuda", target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use host::group::{Group, PeerOptions};
use host::module::{Module, Out};
use host::ops::rmsnorm::{NormWeight, RmsNorm, RmsNormArgs, RmsNormProblem};
use host::{Arch, DType, Device, Error, Fallback, Image, Ptx, Stream, Tensor, TensorViewMut};

const INSIDE: &str = "DRIVER_FAULTS_INSIDE";

/// The folder with the fake `libcuda.so.1`, or `None` without a C compiler.
fn fake_driver() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("driver_faults");
        std::fs::create_dir_all(&folder).expect("the temporary folder is writable");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/driver_faults/libcuda.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-pthread", "-O1", "-Wall", "-Wextra", "-Werror", "-o"]);
        let status = compiler.arg(folder.join("libcuda.so.1")).arg(&source).status().ok()?;
        assert!(status.success(), "cc failed on {}", source.display());
        Some(folder)
    };
    FOLDER.get_or_init(build).as_deref()
}

/// A kernel that does nothing, as all of the fake driver's.
static IMAGES: &[Image] = &[Image {
    family: "rmsnorm",
    arch: Arch::Sm61,
    ptx: Ptx::Text(".version 6.3\n.target sm_61\n.address_size 64\n.visible .entry k() { ret; }\n"),
}];

/// PTX of one's own, whose kernel does nothing either.
const OWN: &str = ".version 6.3\n.target sm_61\n.address_size 64\n\
    .visible .entry own(.param .u64 own_param_0, .param .u32 own_param_1) { ret; }\n";

/// The program: everything that a library's user does with a card, in two streams, then all is dropped.
fn program() -> Result<(), Error> {
    // SAFETY: the fake driver's kernels do nothing.
    let device = unsafe { Device::cuda_with_images(0, IMAGES)? };
    let (stream, other) = (device.stream()?, device.stream()?);
    let data: Vec<f32> = (0..256).map(|value| value as f32).collect();
    let a = Tensor::from_slice(&stream, &[4, 64], &data)?;
    let mut b = Tensor::zeros(&stream, &[4, 64], DType::F32)?;
    assert_eq!(b.to_vec::<f32>(&stream)?, [0.0; 256]);
    stream.copy(a.view(), b.view_mut())?;
    other.wait_for(&stream)?;
    assert_eq!(b.to_vec::<f32>(&other)?, data);

    // Through staging memory: twice, of which the second finds its buffers; and where there is no room.
    for limit in [1 << 20, 1 << 20, 0] {
        device.staging().set_limit(limit);
        if limit == 0 {
            device.staging().trim()?;
        }
        b.view_mut().enqueue_write(&stream, &data[..128].repeat(2))?;
        let mut download = b.view().enqueue_read::<f32>(&stream)?;
        assert!(download.query()?);
        assert_eq!(download.read()?, data[..128].repeat(2));
        drop(b.view().enqueue_read::<f32>(&other)?);
    }
    assert_eq!(device.staging().stats().reserved_bytes, 0);
    b.view_mut().write(&stream, &data)?;

    let problem =
        RmsNormProblem { rows: 4, cols: 64, dtype: DType::F32, eps: 1e-6, weight: NormWeight::Plain };
    let plan = RmsNorm::plan(&device, problem)?;
    assert_eq!(plan.report().resources.map(|resources| resources.registers), Some(32));
    let weight = Tensor::zeros(&stream, &[64], DType::F32)?;
    let run = |out: &mut Tensor, stream: &_| {
        let (x, weight, out) = (a.view(), weight.view(), out.view_mut());
        plan.run(stream, RmsNormArgs { x, residual: None, weight, gate: None, out })
    };
    run(&mut b, &stream)?;

    let module = Module::load(&device, OWN)?;
    let own = module.function::<(Out<f32>, u32)>("own")?;
    assert_eq!(own.resources().map(|resources| resources.registers), Some(32));
    let error = module.function::<(Out<f32>, u64)>("own").unwrap_err().to_string();
    assert_eq!(error, "own: parameters: expected parameters of [8, 4] bytes, got [8, 8]");
    let error = module.function::<(u32,)>("k").unwrap_err().to_string();
    assert_eq!(error, "Module::function: name: expected one of [\"own\"], got k");
    // SAFETY: the fake driver's kernels do nothing.
    let launch = |stream: &Stream, b: &mut Tensor| unsafe {
        own.launch(stream, [4, 1, 1], [64, 1, 1], (b.view_mut(), 4))
    };
    launch(&stream, &mut b)?;
    drop(module);

    let (start, end) = (stream.record()?, stream.record()?);
    assert_eq!((end.elapsed_ms(&start)?, end.query()?), (1.0, true));
    #[cfg(feature = "async")]
    pollster::block_on(stream.finished())?;
    let graph = stream.capture(|stream| {
        // It cannot be asked while something is recorded.
        assert!(!end.query()?);
        stream.wait_for(&other)?;
        b.view_mut().fill_zero(stream)?;
        launch(stream, &mut b)?;
        run(&mut b, stream)
    })?;
    // SAFETY: the tensors and the plan are there until the stream has been waited for.
    unsafe { graph.launch(&stream)? };
    stream.synchronize()?;
    assert_eq!(b.to_vec::<f32>(&stream)?, data);

    // Memory of one stream in another: small, which waits for an event, and large, which asks whether there is anything
    // to wait for.
    for bytes in [4096, 8 << 20] {
        drop(Tensor::zeros(&stream, &[bytes], DType::I8)?);
        let again = Tensor::from_slice(&other, &[bytes], &vec![7i8; bytes])?;
        assert!(again.to_vec::<i8>(&other)?.iter().all(|&value| value == 7));
    }
    // Larger and larger: what is free at the end grows, or is given back for a whole one. Then in parts, which join.
    for megabytes in [3, 7, 12] {
        let data = vec![megabytes as i8; megabytes << 20];
        assert!(Tensor::from_slice(&stream, &[data.len()], &data)?.to_vec::<i8>(&stream)? == data);
    }
    let [low, middle, high] =
        [1i8, 2, 3].map(|value| Tensor::from_slice(&stream, &[4 << 20], &vec![value; 4 << 20]));
    let (low, middle, high) = (low?, middle?, high?);
    drop((low, high));
    device.pool().trim()?;
    assert!(middle.to_vec::<i8>(&stream)?.iter().all(|&value| value == 2));
    drop(middle);
    let error = Tensor::empty(&stream, &[1 << 40], DType::I8).unwrap_err();
    if !matches!(error, Error::OutOfMemory { .. }) {
        return Err(error);
    }
    drop(Tensor::zeros(&stream, &[64], DType::I8)?);
    assert_eq!(device.pool().trim()?, 512);
    stream.synchronize()?;
    other.synchronize()?;
    eprintln!("the work is done");
    Ok(())
}

/// A program that goes on where the card refuses: two plans, runs, and a recording. On the card the result stays as
/// it was.
fn program_that_goes_on() -> Result<(), Error> {
    // SAFETY: the fake driver's kernels do nothing.
    let device = unsafe { Device::cuda_with_images(0, IMAGES)? }.with_fallback(Fallback::Cpu);
    let stream = device.stream()?;
    let x = Tensor::from_slice(&stream, &[4, 64], &[3.0f32; 256])?;
    let weight = Tensor::from_slice(&stream, &[64], &[2.0f32; 64])?;
    for _ in 0..2 {
        let mut out = Tensor::from_slice(&stream, &[4, 64], &[7.0f32; 256])?;
        let plan = RmsNorm::plan(&device, RmsNormProblem::new(4, 64, DType::F32, 0.0))?;
        let mut run =
            |stream: &Stream| plan.run(stream, RmsNormArgs::new(x.view(), weight.view(), out.view_mut()));
        run(&stream)?;
        run(&stream)?;
        let is_on_cpu = plan.report().variant == "cpu";
        let recorded = stream.capture(&mut run);
        match (is_on_cpu, recorded) {
            (false, recorded) => drop(recorded?),
            (true, Err(error @ Error::Unsupported { .. })) => {
                assert!(error.to_string().contains("cannot be recorded"), "{error}");
            }
            (true, recorded) => assert!(recorded.is_err(), "copies were recorded"),
        }
        run(&stream)?;
        let expected = if plan.report().variant == "cpu" { 2.0 } else { 7.0 };
        assert_eq!(out.to_vec::<f32>(&stream)?, [expected; 256]);
        assert_eq!(plan.report().variant == "cpu", plan.report().fallback.is_some());
    }
    eprintln!("the work is done");
    Ok(())
}

/// A program whose pool is checked, with three mistakes: bytes behind a tensor, a tensor that was dropped, and one that
/// outlives its device. It writes how many were found.
fn program_that_is_checked() -> Result<(), Error> {
    // SAFETY: the fake driver's kernels do nothing.
    let device = unsafe { Device::cuda_with_images(0, IMAGES)? };
    device.pool().start_checks();
    let (stream, other) = (device.stream()?, device.stream()?);
    let write = |stream: &Stream, address: u64| {
        // SAFETY: memory of the pool that nobody uses.
        let mut view = unsafe { TensorViewMut::from_raw(&device, address, &[4], &[1], DType::I8)? };
        view.write(stream, &[7i8; 4])
    };
    let tensor = Tensor::zeros(&stream, &[100], DType::F32)?;
    assert_eq!(tensor.to_vec::<f32>(&stream)?, [0.0; 100]);
    write(&stream, tensor.view().address() + 400)?;
    drop(tensor);
    // Memory of another stream, written while it is nobody's.
    let mut large = Tensor::zeros(&stream, &[4096], DType::I8)?;
    let address = large.view().address();
    let mut inner = Some(Tensor::zeros(&stream, &[500], DType::I8)?);
    // What is dropped while a graph is recorded is not looked at, and the recording goes on.
    let graph = stream.capture(|stream| {
        drop(inner.take());
        drop(Tensor::empty(stream, &[500], DType::I8)?);
        large.view_mut().fill_zero(stream)
    })?;
    drop((large, graph));
    write(&stream, address + 1000)?;
    let again = Tensor::from_slice(&other, &[4096], &[7i8; 4096])?;
    assert!(again.to_vec::<i8>(&other)?.iter().all(|&value| value == 7));
    drop(again);
    device.pool().trim()?;
    std::mem::forget(Tensor::zeros(&other, &[3], DType::F32)?);
    let pool = device.pool().clone();
    drop((stream, other, device));
    eprintln!("faults: {}", pool.faults().len());
    eprintln!("the work is done");
    Ok(())
}

/// A program that waits for points of streams: one that is passed, one of a stream that is being recorded, and one
/// that is never passed if the stream's context has failed.
#[cfg(feature = "async")]
fn program_that_awaits() -> Result<(), Error> {
    // SAFETY: the fake driver's kernels do nothing.
    let device = unsafe { Device::cuda_with_images(0, IMAGES)? };
    let stream = device.stream()?;
    let mut tensor = Tensor::zeros(&stream, &[64], DType::F32)?;
    stream.capture(|stream| {
        let error = pollster::block_on(stream.finished()).unwrap_err().to_string();
        let expected = "Stream::capture: enqueue: expected work of the device alone, got Stream::finished";
        assert_eq!(error, expected);
        tensor.view_mut().fill_zero(stream)
    })?;
    // Before its point is passed.
    drop(stream.finished());
    let finished = stream.finished();
    // It keeps what it waits for.
    drop((tensor, stream, device));
    pollster::block_on(finished)?;
    eprintln!("the work is done");
    Ok(())
}

/// Two cards: what each has mapped, and maps later, is the other's to access once a group over peers is asked for,
/// which this build then has no kernels for.
fn program_that_shares() -> Result<(), Error> {
    // SAFETY: the fake driver's kernels do nothing.
    let open = |ordinal| unsafe { Device::cuda_with_images(ordinal, IMAGES) };
    let devices = [open(0)?, open(1)?];
    let streams = [devices[0].stream()?, devices[1].stream()?];
    let before = Tensor::zeros(&streams[0], &[4 << 20], DType::I8)?;
    eprintln!("a group is asked for");
    let error = Group::over_peers(&devices, PeerOptions::default()).unwrap_err();
    assert!(matches!(error, Error::MissingImage { .. }), "{error}");
    eprintln!("there is none");
    let later = Tensor::zeros(&streams[1], &[4 << 20], DType::I8)?;
    // Of a second device of the same card.
    let other = open(0)?;
    let third = Tensor::zeros(&other.stream()?, &[4 << 20], DType::I8)?;
    drop((before, later, third));
    eprintln!("the work is done");
    Ok(())
}

/// In the fake driver's process: runs the program and prints its end.
#[test]
fn inside() {
    let Some(which) = std::env::var_os(INSIDE) else { return };
    let result = match which.to_str() {
        Some("goes on") => program_that_goes_on(),
        Some("checked") => program_that_is_checked(),
        Some("shares") => program_that_shares(),
        #[cfg(feature = "async")]
        Some("awaits") => program_that_awaits(),
        _ => program(),
    };
    match result {
        Ok(()) => eprintln!("the program is right"),
        Err(error) => {
            let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            eprintln!("the program fails: {error}: {source}");
        }
    }
}

/// What the program wrote when this call failed.
fn run(folder: &Path, fail_at: usize, is_sticky: bool, variables: &[(&str, &str)]) -> String {
    // CUDA_ERROR_ILLEGAL_ADDRESS, which spoils the context; CUDA_ERROR_UNKNOWN.
    run_program_in("whole", folder, fail_at, (if is_sticky { 700 } else { 999 }, is_sticky), variables)
}

fn run_program(program: &str, folder: &Path, fail_at: usize, with: (u32, bool)) -> String {
    run_program_in(program, folder, fail_at, with, &[])
}

fn run_program_in(
    program: &str,
    folder: &Path,
    fail_at: usize,
    (code, is_sticky): (u32, bool),
    variables: &[(&str, &str)],
) -> String {
    let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
    command.args(["inside", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(INSIDE, program).env("LD_LIBRARY_PATH", folder).envs(variables.iter().copied());
    command.env("FAKE_FAIL", fail_at.to_string()).env("FAKE_CODE", code.to_string());
    if is_sticky {
        command.env("FAKE_STICKY", "1");
    }
    let output = command.output().expect("this binary runs");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "call {fail_at}: {text}");
    text.into_owned()
}

#[test]
fn peers_have_access_to_what_is_mapped() {
    let Some(folder) = fake_driver() else {
        eprintln!("skipped: no C compiler (cc)");
        return;
    };
    let variables = [("FAKE_DEVICES", "2"), ("FAKE_PEERS", "1"), ("FAKE_LOG", "1")];
    let text = run_program_in("shares", folder, 0, (0, false), &variables);
    assert!(text.contains("the program is right"), "{text}");
    assert!(text.contains("left 0 reserved, 0 mapped, 0 bytes made"), "{text}");
    let (before, rest) = text.split_once("a group is asked for").expect("a line");
    let (asked, after) = rest.split_once("there is none").expect("a line");
    // How many devices, and the last of them.
    let accesses = |text: &str| -> Vec<String> {
        let lines =
            text.lines().filter_map(|line| line.strip_prefix("fake driver: access of so many, the last "));
        lines.map(|line| line.replace("(nil)", "0x0")).collect()
    };
    assert_eq!(accesses(before), ["0x1 0x0"]);
    assert_eq!(accesses(asked), ["0x1 0x1"]);
    assert_eq!(accesses(after), ["0x2 0x0", "0x2 0x1"]);
}

/// What fails before the point comes out of the future, also where the point is never passed.
#[cfg(feature = "async")]
#[test]
fn errors_come_out_of_futures() {
    let Some(folder) = fake_driver() else {
        eprintln!("skipped: no C compiler (cc)");
        return;
    };
    let whole = run_program("awaits", folder, 0, (0, false));
    assert!(whole.contains("the program is right"), "{whole}");
    let text = run_program_in("awaits", folder, 0, (0, false), &[("FAKE_CONTEXT", "700")]);
    assert!(text.contains("the program fails: cuStreamAddCallback failed: CUresult 700"), "{text}");
}

fn line<'a>(text: &'a str, before: &str, behind: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(before)?.strip_suffix(behind))
}

/// Calls whose failure is nobody's error, each with its reason in the code where it is made.
const NOT_MINDED: &[&str] = &[
    // Of what is dropped: nobody is there to be told, and what the driver keeps goes with the context.
    "cuGraphDestroy after ",
    "cuGraphExecDestroy after ",
    "cuEventDestroy_v2 after ",
    "cuStreamDestroy_v2 after ",
    "cuDevicePrimaryCtxRelease_v2 after ",
    // Of a report, which then lacks the figure.
    "cuOccupancyMaxActiveBlocksPerMultiprocessor after ",
    "cuCtxSetCurrent after cuFuncGetAttribute",
    // Of the text of another error.
    "cuMemGetInfo_v2 after ",
    #[cfg(feature = "cust")]
    // cust's own when it makes a context, which everybody enters again before each use.
    "cuCtxSetCurrent after cuDevicePrimaryCtxRetain",
];

/// Calls whose failure keeps memory from going back.
const KEPT: &[&str] = &["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"];

#[test]
fn every_call_fails_in_turn() {
    fail_in_turn(&[]);
}

/// The same where memory cannot be mapped.
#[test]
fn every_call_fails_in_turn_without_mappings() {
    fail_in_turn(&[("FAKE_PLAIN", "1")]);
}

fn fail_in_turn(variables: &[(&str, &str)]) {
    let Some(folder) = fake_driver() else {
        eprintln!("skipped: no C compiler (cc)");
        return;
    };
    let whole = run(folder, 0, false, variables);
    assert!(whole.contains("the program is right"), "{whole}");
    assert!(whole.contains("left 0 reserved, 0 mapped, 0 bytes made"), "{whole}");
    let calls: usize = line(&whole, "fake driver: ", " calls").expect("a count").parse().expect("a number");
    assert!(calls > 100, "{calls}");
    let (mut minded, mut swallowed, mut kept) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for call in 1..=calls {
        for is_sticky in [false, true] {
            let text = run(folder, call, is_sticky, variables);
            let (_, rest) = text.split_once("fake driver: ").expect("the call is made");
            let name = rest.split_once(" fails").map(|(name, _)| name).expect("the call is made");
            // Whatever failed, all that was mapped is given back, but for what the call itself keeps.
            let keeps = KEPT.iter().any(|call| name.starts_with(call));
            if !is_sticky && !keeps && !text.contains("left 0 reserved, 0 mapped, 0 bytes made") {
                kept.insert(name.to_owned());
            }
            let told = line(&text, "the program fails: ", "");
            let was_done = rest.contains("the work is done");
            match told {
                // The driver's words reach the user.
                Some(message) => {
                    let code = if is_sticky { "700" } else { "999" };
                    assert!(
                        message.contains(code) || NOT_MINDED.iter().any(|call| name.starts_with(call)),
                        "{name}: {message}"
                    );
                    minded.insert(name.split(' ').next().unwrap_or_default().to_owned());
                }
                None => {
                    assert!(text.contains("the program is right"), "{name}: {text}");
                    // What fails after the work is of no consequence: all is dropped.
                    if was_done && !NOT_MINDED.iter().any(|call| name.starts_with(call)) {
                        swallowed.insert(format!("call {call}, {name}, sticky {is_sticky}"));
                    }
                }
            }
        }
    }
    assert!(swallowed.is_empty(), "{swallowed:#?}");
    assert!(kept.is_empty(), "{kept:#?}");
    for name in [
        "cuPointerGetAttributes",
        "cuThreadExchangeStreamCaptureMode",
        "cuStreamQuery",
        "cuEventQuery",
        "cuStreamIsCapturing",
    ] {
        assert!(minded.contains(name), "{name}: {minded:?}");
    }
}

/// Under the policy to go on, a refusal of a plan or a launch ends on the CPU with the right result and one line that
/// says so; what may have spoiled the context ends the program, and nothing is tried again.
#[test]
fn refusals_fall_back() {
    let Some(folder) = fake_driver() else {
        eprintln!("skipped: no C compiler (cc)");
        return;
    };
    let program = |fail_at, with| run_program("goes on", folder, fail_at, with);
    let whole = program(0, (0, false));
    assert!(whole.contains("the program is right") && !whole.contains("falls back"), "{whole}");
    let calls: usize = line(&whole, "fake driver: ", " calls").expect("a count").parse().expect("a number");
    let mut fallen = BTreeSet::new();
    for call in 1..=calls {
        // CUDA_ERROR_INVALID_PTX, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, which pass; CUDA_ERROR_UNKNOWN, which may not;
        // a context that is spoilt.
        for (code, is_sticky) in [(218, false), (701, false), (999, false), (700, true)] {
            let text = program(call, (code, is_sticky));
            let (_, rest) = text.split_once("fake driver: ").expect("the call is made");
            let name = rest.split([' ', ',']).next().unwrap_or_default().to_owned();
            let lines = text.lines().filter(|line| line.contains("rmsnorm falls back to ")).count();
            let is_passing = code == 218 || code == 701;
            assert!(lines <= usize::from(is_passing), "{name} with {code}: {text}");
            if lines == 1 {
                assert!(text.contains("the program is right"), "{name} with {code}: {text}");
                fallen.insert(name);
            } else if !text.contains("the program is right") {
                assert!(text.contains("the program fails: "), "{name} with {code}: {text}");
            }
        }
    }
    for name in ["cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncGetAttribute", "cuLaunchKernel"] {
        assert!(fallen.contains(name), "{name}: {fallen:?}");
    }
    assert!(!fallen.contains("cuMemcpyHtoDAsync_v2") && !fallen.contains("cuStreamCreate"), "{fallen:?}");
}

/// The pool's checks find mistakes on a card too. Where the driver fails they are not found, and nothing else happens:
/// no panic, no fault that is none.
#[test]
fn checks_of_the_pool() {
    let Some(folder) = fake_driver() else {
        eprintln!("skipped: no C compiler (cc)");
        return;
    };
    let whole = run_program("checked", folder, 0, (0, false));
    assert!(whole.contains("the program is right") && whole.contains("faults: 3"), "{whole}");
    for (what, place) in [
        (
            "4 byte(s) from offset 400 of a tensor of 400 bytes were written, which are not its own",
            "dropped in",
        ),
        (
            "4 byte(s) from offset 1000 of a tensor of 4096 bytes were written after it was dropped",
            "dropped in",
        ),
        ("a tensor of 12 bytes is still there after its device", "allocated at"),
    ] {
        let said =
            whole.lines().find(|line| line.contains(what)).unwrap_or_else(|| panic!("{what}: {whole}"));
        assert!(said.contains("driver_faults/main.rs") && said.contains(place), "{said}");
    }
    let calls: usize = line(&whole, "fake driver: ", " calls").expect("a count").parse().expect("a number");
    // Every other one: those that open the device have their test above, and what finds a fault takes its time.
    let fail_in_turn = &|first: usize| {
        for call in (2 * first..=calls).step_by(8) {
            let text = run_program("checked", folder, call, (999, false));
            let found = text.matches("warpforge: ").count();
            let is_told = text.contains("the program fails: ") || text.contains("the program is right");
            assert!(is_told && found <= 3, "{call}: {text}");
        }
    };
    std::thread::scope(|scope| (1..=4).for_each(|first| drop(scope.spawn(move || fail_in_turn(first)))));
}
