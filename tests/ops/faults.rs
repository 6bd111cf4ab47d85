//! What does not fit this machine is an error with a reason: never a panic, never an abort.

use std::sync::Arc;

use proptest::test_runner::TestCaseError;
use testkit::simulator::Card;
use warpforge::ops::attention::{Attention, AttentionProblem, Mask, Scores};
use warpforge::ops::matmul::{Matmul, MatmulProblem};
use warpforge::ops::rmsnorm::{NormWeight, RmsNorm, RmsNormArgs, RmsNormProblem};
use warpforge::{
    Arch, DType, Device, Error, HardwareProfile, Image, OptLevel, Place, Ptx, Stream, Tensor, TensorView,
};

use crate::harness::{Layout, Rows, devices};

const PROBLEM: RmsNormProblem =
    RmsNormProblem { rows: 1, cols: 64, dtype: DType::BF16, eps: 1e-6, weight: NormWeight::Plain };

#[test]
fn devices_that_are_not_there() {
    match Device::cuda_count() {
        Ok(count) => {
            let error = Device::cuda(count).unwrap_err().to_string();
            assert_eq!(error, format!("no CUDA device {count}: the driver reports {count} device(s)"));
        }
        Err(error) => {
            assert!(error.to_string().starts_with("no CUDA driver: "), "{error}");
            assert!(matches!(Device::cuda(0), Err(Error::NoDriver { .. })));
            assert!(Device::best().limits().is_none(), "without a driver the best device is the CPU");
            assert_eq!(HardwareProfile::detect(), *Device::cpu().profile());
        }
    }
}

/// The card, or nothing after saying so.
fn card(images: &'static [Image]) -> Option<Result<Device, Error>> {
    match Device::cuda_count() {
        // SAFETY: this build's images, or such as no kernel of is launched.
        Ok(count) if count > 0 => Some(unsafe { Device::cuda_with_images(0, images) }),
        other => {
            testkit::gpu::skip(&format!("needs a card: {other:?}"));
            None
        }
    }
}

#[test]
fn an_image_that_the_driver_refuses() {
    static BROKEN: &[Image] = &[Image {
        family: "rmsnorm",
        arch: Arch::Sm61,
        ptx: Ptx::Text(
            ".version 6.3\n.target sm_61\n.address_size 64\n.visible .entry k() { no_such_instruction; ret; }\n",
        ),
    }];
    let Some(device) = card(BROKEN) else { return };
    let error = RmsNorm::plan(&device.unwrap(), PROBLEM).unwrap_err();
    let message = error.to_string();
    assert!(message.starts_with("the driver refused the image rmsnorm for sm_61: "), "{message}");
    assert!(message.contains("no_such_instruction"), "the assembler's own words are missing: {message}");
    assert!(matches!(error, Error::Image { source, .. } if source.name == "CUDA_ERROR_INVALID_PTX"));
}

#[test]
fn an_image_that_is_not_in_the_build() {
    static OTHER: &[Image] = &[Image { family: "rope", arch: Arch::Sm61, ptx: Ptx::Text("") }];
    let Some(device) = card(OTHER) else { return };
    assert_eq!(
        RmsNorm::plan(&device.unwrap(), PROBLEM).unwrap_err().to_string(),
        "no image of rmsnorm for sm_61 in this build; it holds: rope sm_61"
    );
}

#[test]
fn a_build_without_any_image_for_the_card() {
    let Some(device) = card(&[]) else { return };
    let message = device.unwrap_err().to_string();
    assert!(message.ends_with("this build has images for nothing"), "{message}");
}

#[test]
fn a_floor_that_the_card_cannot_run() {
    let Some(device) = card(warpforge::IMAGES) else { return };
    let device = device.unwrap();
    let profile = device.profile();
    let (major, minor) = profile.compute_capability.unwrap();
    for arch in Arch::ALL {
        let forced = device.with_arch(arch);
        assert_eq!(forced.is_ok(), arch.runs_on(major, minor), "{arch}");
        if let Err(error) = forced {
            let expected =
                format!("{} has compute capability {major}.{minor}: it cannot run {arch} code", profile.name);
            assert_eq!(error.to_string(), expected);
        }
    }
}

/// A device's tensors on another device's plan or stream.
#[test]
fn devices_that_do_not_match() -> Result<(), Error> {
    let Some(device) = card(warpforge::IMAGES) else { return Ok(()) };
    let (card, cpu) = (device?, Device::cpu());
    let (on_card, on_cpu): (Stream, Stream) = (card.stream()?, cpu.stream()?);
    let tensor = Tensor::zeros(&on_card, &[4], DType::F32)?;
    assert_eq!(
        tensor.to_vec::<f32>(&on_cpu).unwrap_err().to_string(),
        "TensorView::to_vec: stream: expected cuda:0, got the CPU"
    );
    Ok(())
}

/// A recording that panics or fails ends, and its stream and the pool go on.
#[test]
fn recordings_that_fail() -> Result<(), Error> {
    let Some(device) = card(warpforge::IMAGES) else { return Ok(()) };
    let device = device?;
    let stream = device.stream()?;
    let panics = std::panic::AssertUnwindSafe(|| stream.capture(|_| panic!("while it records")));
    assert!(std::panic::catch_unwind(panics).is_err());
    let refused = || Error::Invalid {
        op: "recordings_that_fail",
        argument: "x",
        expected: "nothing".into(),
        got: "something".into(),
    };
    let error = stream.capture(|_| Err(refused())).unwrap_err();
    assert_eq!(error.to_string(), refused().to_string());
    let mut tensor = Tensor::from_slice(&stream, &[3], &[1.0f32, 2.0, 3.0])?;
    let error =
        stream.capture(|stream| tensor.view_mut().write(stream, &[4.0f32; 3])).unwrap_err().to_string();
    assert!(error.starts_with("Stream::capture: enqueue: expected work of the device alone"), "{error}");
    assert_eq!(tensor.to_vec::<f32>(&stream)?, [1.0, 2.0, 3.0]);
    drop(tensor);
    // An error where the stream were still recorded; nothing is given back while another test records.
    device.pool().trim()?;
    Ok(())
}

/// What a recording has used is not handed to another stream meanwhile, whose work would be recorded too.
#[test]
fn recordings_stay_apart() -> Result<(), Error> {
    let Some(device) = card(warpforge::IMAGES) else { return Ok(()) };
    let device = device?;
    let (stream, other) = (device.stream()?, device.stream()?);
    let (x, weight) =
        (Tensor::zeros(&stream, &[1, 64], DType::BF16)?, Tensor::zeros(&stream, &[64], DType::BF16)?);
    let mut out = Tensor::zeros(&stream, &[1, 64], DType::BF16)?;
    let free = Tensor::zeros(&stream, &[1 << 20], DType::F32)?;
    let address = free.view().address();
    stream.synchronize()?;
    drop(free);
    let rmsnorm = RmsNorm::plan(&device, PROBLEM)?;
    let graph = stream.capture(|stream| {
        // The caller waits: work that is not recorded cannot be waited for by what is.
        stream.wait_for(&other)?;
        let args = RmsNormArgs {
            x: x.view(),
            residual: None,
            weight: weight.view(),
            gate: None,
            out: out.view_mut(),
        };
        rmsnorm.run(stream, args)?;
        let elsewhere = || -> Result<(), Error> {
            let tensor = Tensor::zeros(&other, &[1 << 20], DType::F32)?;
            assert_ne!(tensor.view().address(), address, "its stream is being recorded");
            assert!(tensor.to_vec::<f32>(&other)?.iter().all(|&value| value == 0.0));
            Ok(())
        };
        std::thread::scope(|scope| scope.spawn(elsewhere).join().expect("no panic"))?;
        Ok(())
    })?;
    // SAFETY: the tensors and the plan are there until the stream has been waited for.
    unsafe { graph.launch(&stream)? };
    stream.synchronize()?;
    // Behind the recording its memory is the others' too: the driver is not asked for more.
    let third = device.stream()?;
    let from_device = device.pool().stats().num_from_device;
    let tensor = Tensor::empty(&third, &[1 << 20], DType::F32)?;
    assert_eq!(device.pool().stats().num_from_device, from_device, "at {:#x}", tensor.view().address());
    Ok(())
}

/// A stream of another library is one queue with its own work, and stays when ours is dropped.
#[test]
fn streams_of_others() -> Result<(), Error> {
    let cpu = Device::cpu();
    assert!(cpu.stream()?.as_raw().is_none());
    // SAFETY: refused before the handle is looked at.
    let error = unsafe { cpu.stream_from_raw(std::ptr::null_mut()) }.unwrap_err();
    assert!(matches!(error, Error::Unsupported { op: "Device::stream_from_raw", .. }), "{error}");

    let Some(device) = card(warpforge::IMAGES) else { return Ok(()) };
    let device = device?;
    let stream = device.stream()?;
    let handle = stream.as_raw().expect("a CUDA stream");
    for _ in 0..2 {
        // SAFETY: of this device, and destroyed behind the loop.
        let same = unsafe { device.stream_from_raw(handle)? };
        assert_eq!(same.as_raw(), Some(handle));
        let tensor = Tensor::from_slice(&same, &[3], &[1.0f32, 2.0, 3.0])?;
        assert_eq!(tensor.to_vec::<f32>(&stream)?, [1.0, 2.0, 3.0]);
    }
    stream.synchronize()
}

#[test]
fn more_memory_than_there_is() {
    // The other tests' allocations are in the pools of their devices.
    let simulated = devices().into_iter().filter(|device| matches!(device.place(), Place::Simulated(_)));
    let mut own: Vec<Device> = simulated.chain([Device::cpu()]).collect();
    own.extend(card(warpforge::IMAGES).map(|card| card.unwrap()));
    for device in own {
        let stream = device.stream().unwrap();
        let before = device.pool().stats();
        let error = Tensor::empty(&stream, &[1 << 58], DType::F32).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { requested, .. } if requested == 1 << 60), "{error}");
        assert_eq!(device.pool().stats().in_use_bytes, before.in_use_bytes);
        let error = Tensor::empty(&stream, &[usize::MAX, 2], DType::F32).unwrap_err().to_string();
        assert!(
            error.starts_with("Tensor::empty: shape: expected a size that fits the address space"),
            "{error}"
        );
    }
}

/// Cards of Blackwell run their own floor, whose kernels are those of Ampere: without `wgmma`, and of the card's shared
/// memory.
#[test]
fn blackwell_takes_what_it_can_run() {
    let product = MatmulProblem::new(4096, 4096, 4096, DType::BF16);
    for card in [Card::new(Arch::Sm100), Card::rtx_5090()] {
        let card = Device::simulated(Arc::new(card)).unwrap();
        assert_eq!(card.limits().unwrap().floor, Arch::Sm100);
        assert!(card.with_arch(Arch::Sm90a).is_err() && card.with_arch(Arch::Sm80).is_ok());
        let matmul = Matmul::plan(&card, product).unwrap();
        assert!(matmul.report().variant.ends_with("__sm80"), "{:?}", matmul.report());
        let problem = AttentionProblem {
            batch: 1,
            seq_q: 1,
            seq_kv: 4096,
            heads_q: 32,
            heads_kv: 8,
            head_dim: 128,
            head_dim_v: 128,
            dtype: DType::BF16,
            dtype_kv: DType::BF16,
            scale: None,
            mask: Mask::Causal,
            window: None,
            scores: Scores::default(),
            page_size: None,
        };
        let attention = Attention::plan(&card, problem).unwrap();
        let ring = "attention_bf16__decode_ring_d128_r8__sm80";
        assert_eq!(attention.report().variant, ring, "{:?}", attention.report());
    }
}

#[test]
fn levels_bound_the_floor() {
    for card in devices() {
        let Some(newest) = card.limits().map(|limits| limits.floor) else { continue };
        for (level, floor) in
            [(OptLevel::Basic, Arch::Sm61), (OptLevel::Medium, Arch::Sm80), (OptLevel::High, Arch::Sm90a)]
        {
            assert_eq!(
                card.with_level(level).limits().unwrap().floor,
                if newest.runs(floor) { floor } else { newest },
                "{level:?}"
            );
        }
    }
}

/// Runs the norm of `rows` rows of 64 that start `skip` elements into `x`, as if they were there.
fn norm(device: &Device, x: &Rows, skip: usize, rows: usize) -> Result<String, TestCaseError> {
    let (stream, dtype) = (device.stream()?, DType::F32);
    let weight = Rows::input(&stream, dtype, &[1.0; 64], 64, Layout::default())?;
    let mut out = Rows::output(&stream, dtype, rows, 64, Layout::default())?;
    let problem = RmsNormProblem { rows, cols: 64, dtype, eps: 1e-6, weight: NormWeight::Plain };
    let address = x.view().address() + 4 * skip as u64;
    // SAFETY: inside the rows' buffer, guard bands included, which lives longer.
    let x = unsafe { TensorView::from_raw(device, address, &[rows, 64], &[64, 1], dtype)? };
    let weight = weight.view().reshape(&[64])?;
    let args = RmsNormArgs { x, residual: None, weight, gate: None, out: out.view_mut() };
    let error = RmsNorm::plan(device, problem)?.run(&stream, args).expect_err("a defect");
    assert!(matches!(error, Error::Simulation { .. }), "{error:?}");
    Ok(error.to_string())
}

/// What a kernel may not read on a simulated card: guard bands, gaps between rows, and outputs before they are written.
#[test]
fn reads_that_are_reported() -> Result<(), TestCaseError> {
    for device in devices() {
        if !matches!(device.place(), Place::Simulated(_)) {
            continue;
        }
        let (stream, dtype) = (device.stream()?, DType::F32);
        let x = Rows::input(&stream, dtype, &[1.0; 128], 64, Layout::default())?;
        let spaced = Rows::input(&stream, dtype, &[1.0; 128], 64, Layout { padding: 1, offset: 0 })?;
        let unwritten = Rows::output(&stream, dtype, 2, 64, Layout::default())?;
        for (x, skip, rows, expected) in [
            (&x, 0, 3, "read out of bounds: "),
            (&x, 1, 2, "read out of bounds: "),
            (&spaced, 0, 2, " is a guard band or a gap between rows"),
            (&unwritten, 0, 2, ", which nothing has written"),
        ] {
            let message = norm(&device, x, skip, rows)?;
            let arch = device.limits().unwrap().floor;
            for part in [
                "rmsnorm_f32__",
                &format!(" failed on {}: kernel `rmsnorm_f32__", device.describe()),
                "gpu/src/ops/rmsnorm/mod.rs:",
                expected,
                &format!(" [{arch}, seed "),
                "\nwith grid [",
                "RmsNormDims { rows: ",
                "\nsee it again: WARPFORGE_SIM_SEED=0 cargo test faults::reads_that_are_reported",
            ] {
                assert!(message.contains(part), "no {part:?} in {message}");
            }
        }
    }
    Ok(())
}
