//! Memory and streams of both libraries over the fake driver of `host/tests/driver_faults`, whose device is the host:
//! it copies, its kernels do nothing, and it writes down what orders its streams. Built from C (`cc`; without one the
//! tests say so and pass). The process's library path is read at its start, so the programs run in processes of their
//! own.

#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use cudarc::driver::CudaContext;
use half::bf16;
use host::{Arch, DType, Device, Image, Place, Ptx, Tensor};
use warpforge_cudarc::{CudarcError, SharedStream};

const INSIDE: &str = "CUDARC_INSIDE";

/// The folder with the fake `libcuda.so.1`, or `None` without a C compiler.
fn fake_driver() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cudarc_fake_driver");
        std::fs::create_dir_all(&folder).expect("the temporary folder is writable");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../host/tests/driver_faults/libcuda.c");
        let library = folder.join("libcuda.so.1");
        let mut compiler = Command::new("cc");
        let status =
            compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).status().ok()?;
        assert!(status.success(), "cc failed on {}", source.display());
        // cudarc looks for this name first: both are to find the same driver.
        let other = folder.join("libcuda.so");
        if !other.exists() {
            std::os::unix::fs::symlink("libcuda.so.1", &other).expect("the folder is writable");
        }
        Some(folder)
    };
    FOLDER.get_or_init(build).as_deref()
}

/// A kernel that nobody launches: a device wants an image.
static IMAGES: &[Image] = &[Image {
    family: "none",
    arch: Arch::Sm61,
    ptx: Ptx::Text(".version 6.3\n.target sm_61\n.address_size 64\n.visible .entry k() { ret; }\n"),
}];

fn device() -> Result<Device, CudarcError> {
    // SAFETY: the fake driver's kernels do nothing.
    Ok(unsafe { Device::cuda_with_images(0, IMAGES)? })
}

fn say(what: &str) {
    eprintln!("test: {what}");
}

/// Memory as views, whole and in parts, of several types.
fn views() -> Result<(), CudarcError> {
    let stream = CudaContext::new(0)?.new_stream()?;
    let shared = SharedStream::new(&device()?, &stream)?;
    let x = stream.clone_htod(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
    let mut out = stream.alloc_zeros::<f32>(4)?;
    let sum = shared.scope(|scope| {
        let view = scope.input(&x, &[2, 3])?;
        assert_eq!((view.shape(), view.strides(), view.dtype()), (&[2, 3][..], &[3, 1][..], DType::F32));
        assert_eq!(view.place(), Place::Cuda(0));
        let last = view.slice(0, 1..2)?;
        scope.stream().copy(last.reshape(&[3])?, scope.output(&mut out, &[4])?.slice(0, 1..4)?)?;
        Ok(last.to_vec::<f32>(scope.stream())?.iter().sum::<f32>())
    })?;
    assert_eq!(sum, 15.0);
    assert_eq!(stream.clone_dtoh(&out)?, [0.0, 4.0, 5.0, 6.0]);

    let half = stream.clone_htod(&[bf16::from_f32(0.5); 8])?;
    let (part, mut ints) = (half.slice(2..6), stream.alloc_zeros::<i32>(6)?);
    let (_, mut tail) = ints.split_at_mut(4);
    shared.scope(|scope| {
        let view = scope.input(&part, &[2, 2])?;
        assert_eq!(
            (view.dtype(), view.to_vec::<bf16>(scope.stream())?),
            (DType::BF16, vec![bf16::from_f32(0.5); 4])
        );
        Ok(scope.output(&mut tail, &[2])?.write(scope.stream(), &[8i32, 9])?)
    })?;
    assert_eq!(stream.clone_dtoh(&ints)?, [0, 0, 0, 0, 8, 9]);

    let none = stream.null::<u32>()?;
    shared.scope(|scope| {
        assert!(scope.input(&none, &[3, 0])?.is_empty());
        Ok(())
    })
}

/// What is refused.
fn refusals() -> Result<(), CudarcError> {
    let (device, context) = (device()?, CudaContext::new(0)?);
    let stream = context.new_stream()?;
    let shared = SharedStream::new(&device, &stream)?;
    let x = stream.clone_htod(&[1.0f32; 6])?;
    for (shape, text) in [
        (&[2usize, 2][..], "memory of 6 elements: expected those of shape [2, 2]"),
        (&[usize::MAX, 2], "memory of 6 elements: expected those of shape [18446744073709551615, 2]"),
        (&[1, 1, 1, 1, 1, 6], "at most 5 dimensions"),
    ] {
        let error = shared.scope(|scope| scope.input(&x, shape).map(|_| ())).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    let tensor = Tensor::zeros(shared.stream(), &[2], DType::F32)?;
    assert_eq!(shared.lend::<i32>(tensor).unwrap_err().to_string(), "a tensor of f32: expected i32");
    let tensor = Tensor::zeros(&Device::cpu().stream()?, &[2], DType::F32)?;
    let error = shared.lend::<f32>(tensor).unwrap_err().to_string();
    assert!(error.contains("expected a stream of the CPU, got a stream of cuda:0"), "{error}");

    for (stream, name) in [
        (context.default_stream(), "the legacy default stream"),
        (context.per_thread_stream(), "the per-thread default stream"),
    ] {
        let error = SharedStream::new(&device, &stream).unwrap_err().to_string();
        assert!(error.contains("expected a stream that was created") && error.contains(name), "{error}");
    }
    let error = SharedStream::new(&Device::cpu(), &stream).unwrap_err().to_string();
    assert_eq!(error, "stream of CUDA device 0: expected one of the CPU");
    // The fake driver's second card.
    let second = CudaContext::new(1)?.new_stream()?;
    let error = SharedStream::new(&device, &second).unwrap_err().to_string();
    assert_eq!(error, "stream of CUDA device 1: expected one of cuda:0");
    let far = second.clone_htod(&[1.0f32; 6])?;
    let error = shared.scope(|scope| scope.input(&far, &[6]).map(|_| ())).unwrap_err().to_string();
    assert_eq!(error, "memory of CUDA device 1: expected one of cuda:0");
    // SAFETY: a context is a number there.
    let own = unsafe { CudaContext::from_raw_context(0, 0, std::ptr::without_provenance_mut(7))? };
    let error = SharedStream::new(&device, &own.new_stream()?).unwrap_err().to_string();
    assert_eq!(error, "stream of a context that is not the primary one of CUDA device 0");
    // The fake driver ends no context of one's own.
    std::mem::forget(own);
    Ok(())
}

/// A tensor as memory, and back.
fn lending() -> Result<(), CudarcError> {
    let device = device()?;
    let (stream, before) = (CudaContext::new(0)?.new_stream()?, device.stream()?);
    let shared = SharedStream::new(&device, &stream)?;
    let tensor = Tensor::from_slice(&before, &[2, 2], &[1u32, 2, 3, 4])?;
    let address = tensor.view().address();
    let mut lent = shared.lend::<u32>(tensor)?;
    assert_eq!(stream.clone_dtoh(&lent.view())?, [1, 2, 3, 4]);
    stream.memcpy_htod(&[7u32, 8], &mut lent.view_mut().slice_mut(1..3))?;
    let tensor = lent.into_tensor();
    assert_eq!((tensor.shape(), tensor.view().address()), (&[2, 2][..], address));
    assert_eq!(tensor.to_vec::<u32>(shared.stream())?, [1, 7, 8, 4]);
    // Its memory is the pool's: dropped in either form it is there again.
    drop(shared.lend::<u32>(tensor)?);
    let again = Tensor::zeros(shared.stream(), &[4], DType::U32)?;
    assert_eq!(again.view().address(), address);
    let empty = shared.lend::<f32>(Tensor::empty(shared.stream(), &[0], DType::F32)?)?;
    assert!(empty.view().is_empty());
    Ok(())
}

/// What waits for what, in the fake driver's words.
fn order() -> Result<(), CudarcError> {
    let device = device()?;
    let context = CudaContext::new(0)?;
    let (stream, other) = (context.new_stream()?, context.new_stream()?);
    eprintln!("streams: {:?} {:?}", stream.cu_stream(), other.cu_stream());
    let shared = SharedStream::new(&device, &stream)?;
    let x = other.clone_htod(&[1.0f32; 4])?;
    let mut out = other.alloc_zeros::<f32>(4)?;
    say("scope");
    shared.scope(|scope| {
        let (x, out) = (scope.input(&x, &[4])?, scope.output(&mut out, &[4])?);
        Ok(scope.stream().copy(x, out)?)
    })?;
    say("read elsewhere");
    let copied = other.clone_dtoh(&out)?;
    assert_eq!(copied, [1.0; 4]);
    say("lend");
    let own = device.stream()?;
    eprintln!("own: {:?}", own.as_raw().expect("a CUDA stream"));
    let lent = shared.lend::<f32>(Tensor::zeros(&own, &[4], DType::F32)?)?;
    say("read lent elsewhere");
    drop(other.clone_dtoh(&lent.view())?);
    say("back");
    let tensor = lent.into_tensor();
    say("drop");
    drop((x, out, shared, stream));
    say("the pool has the stream");
    drop(tensor);
    say("the device goes");
    drop((own, device));
    say("end");
    Ok(())
}

/// In the fake driver's process.
#[test]
fn inside() {
    let Some(which) = std::env::var_os(INSIDE) else { return };
    let program = match which.to_str() {
        Some("views") => views,
        Some("refusals") => refusals,
        Some("lending") => lending,
        _ => order,
    };
    program().unwrap_or_else(|error| panic!("{error}"));
    say("done");
}

/// What the program wrote.
fn run(program: &str) -> Option<String> {
    let Some(folder) = fake_driver() else {
        eprintln!("skipped: no C compiler (cc)");
        return None;
    };
    let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
    command.args(["inside", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(INSIDE, program).env("LD_LIBRARY_PATH", folder).env("FAKE_DEVICES", "2").env("FAKE_LOG", "1");
    let output = command.output().expect("this binary runs");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("test: done"), "{program}: {text}");
    Some(text.into_owned())
}

#[test]
fn memory_is_seen_as_views() {
    run("views");
}

#[test]
fn what_does_not_fit_is_refused() {
    run("refusals");
}

#[test]
fn tensors_are_lent() {
    run("lending");
}

/// Each side waits for what the other has done with the memory, and the stream lives until neither has it.
#[test]
fn uses_are_ordered() {
    let Some(text) = run("order") else { return };
    let names = |before: &str| -> Vec<String> {
        let line = text.lines().find_map(|line| line.strip_prefix(before)).expect("the program says so");
        line.split_whitespace().map(str::to_owned).collect()
    };
    let [stream, other] = &names("streams: ")[..] else { panic!("{text}") };
    let [own] = &names("own: ")[..] else { panic!("{text}") };
    // What the driver was asked between two words of the program.
    let calls = |from: &str| -> Vec<Vec<&str>> {
        let said = |line: &&str| !line.starts_with("test: ");
        let part = text.lines().skip_while(|line| *line != format!("test: {from}")).skip(1).take_while(said);
        part.filter_map(|line| Some(line.strip_prefix("fake driver: ")?.split(' ').collect())).collect()
    };
    let kinds = |calls: &[Vec<&str>], of: &str| -> Vec<String> {
        let own = calls.iter().filter(|call| call[1] == of);
        own.map(|call| call[0].to_owned()).collect()
    };
    let scope = calls("scope");
    // For who has written x; for who has read and written out; the work; then both uses are marked.
    assert_eq!(kinds(&scope, stream), ["wait", "wait", "wait", "copy", "record", "record"], "{text}");
    let marked: Vec<&str> = scope.iter().filter(|call| call[0] == "record").map(|call| call[2]).collect();
    let elsewhere = calls("read elsewhere");
    // It waits for the event that the write was marked with.
    let wait = elsewhere.iter().find(|call| call[..2] == ["wait", other]).unwrap_or_else(|| panic!("{text}"));
    assert!(marked.contains(&wait[2]), "{text}");

    let lend = calls("lend");
    let tensor_s =
        lend.iter().position(|call| call[..2] == ["record", own]).unwrap_or_else(|| panic!("{text}"));
    assert_eq!(lend[tensor_s + 1][..2], ["wait", stream], "{text}");
    assert_eq!(lend[tensor_s + 1][2], lend[tensor_s][2], "{text}");
    let written =
        lend.iter().rfind(|call| call[..2] == ["record", stream]).unwrap_or_else(|| panic!("{text}"));
    let elsewhere = calls("read lent elsewhere");
    assert!(elsewhere.iter().any(|call| call[..] == ["wait", other, written[2]]), "{text}");
    let read =
        elsewhere.iter().find(|call| call[..2] == ["record", other]).unwrap_or_else(|| panic!("{text}"));
    assert!(calls("back").iter().any(|call| call[..] == ["wait", stream, read[2]]), "{text}");

    let ends = |from: &str| calls(from).iter().any(|call| call[..2] == ["destroy", stream]);
    assert!(!ends("drop") && !ends("the pool has the stream") && ends("the device goes"), "{text}");
}
