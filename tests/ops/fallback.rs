//! Devices that refuse: under their policy every operator goes on, on the next floor with that floor's bits, on the
//! CPU with the CPU's, and says so.

use std::collections::BTreeSet;
use std::sync::Arc;

use half::{bf16, f16};
use testkit::simulator::{Card, Refuses, Refusing};
use testkit::strategies::Rng;
use warpforge::ops;
use warpforge::ops::attention::{Attention, AttentionArgs, AttentionProblem};
use warpforge::ops::gated_delta::{Form, GatedDelta, GatedDeltaArgs, GatedDeltaProblem};
use warpforge::ops::rmsnorm::{RmsNorm, RmsNormArgs, RmsNormProblem};
use warpforge::{Arch, DType, Device, Error, Fallback, Sample, SampleTensor, Stream, Tensor};

use crate::harness::with_type;

fn card(refuses: Refuses, fallback: Fallback) -> Result<Device, Error> {
    let card = Refusing::new(Card::new(Arch::Sm90a), refuses);
    Ok(Device::simulated(Arc::new(card))?.with_fallback(fallback))
}

/// Small numbers of a tensor's type; those of rows and offsets ascend.
fn values(tensor: &SampleTensor, seed: u64) -> Vec<u8> {
    let len: usize = tensor.shape.iter().product();
    let mut rng = Rng::new(seed);
    match tensor.dtype {
        DType::U32 => (0..len as u32).flat_map(u32::to_le_bytes).collect(),
        DType::I8 => (0..len).map(|_| rng.next_u64() as u8).collect(),
        DType::F8E4M3 => (0..len).map(|_| 0x30 + (rng.next_u64() % 16) as u8).collect(),
        dtype => {
            let values: Vec<f64> = (0..len).map(|_| (rng.next_u64() % 256) as f64 / 128.0 - 1.0).collect();
            testkit::round::encode(dtype, &values)
        }
    }
}

/// Runs a sample with tensors whose elements are apart where they may be; all bytes of its tensors behind the run,
/// gaps and all.
fn run(stream: &Stream, sample: &Sample) -> Result<Vec<Vec<u8>>, Error> {
    let mut tensors = Vec::new();
    for (index, of) in sample.tensors.iter().enumerate() {
        let (apart, size) = (if of.strided { 2 } else { 1 }, of.dtype.bytes());
        let elements = values(of, index as u64);
        let gap = vec![0x55; (apart - 1) * size];
        let whole: Vec<u8> = elements.chunks_exact(size).flat_map(|one| [one, &gap].concat()).collect();
        let shape = [&of.shape[..], &[apart]].concat();
        tensors.push(Tensor::from_bytes(stream, &shape, of.dtype, &whole)?);
    }
    let mut views = Vec::new();
    for (tensor, of) in std::iter::zip(&mut tensors, &sample.tensors) {
        views.push(tensor.view_mut().slice(of.shape.len(), 0..1)?.reshape(&of.shape)?);
    }
    sample.run(stream, &mut views)?;
    let read = |tensor: &Tensor| {
        with_type!(tensor.dtype(), T => {
            Ok(bytemuck::cast_slice(&tensor.to_vec::<T>(stream)?).to_vec())
        })
    };
    tensors.iter().map(read).collect()
}

/// Every operator: what a refusing card gives under its policy is, bit for bit and with every gap as it was, what the
/// device gives that stands in.
fn stands_in(refuses: Refuses, fallback: Fallback, other: &Device) -> Result<(), Error> {
    let device = card(refuses, fallback)?;
    let (stream, others) = (device.stream()?, other.stream()?);
    let (mut ran, mut others_lack) = (BTreeSet::new(), BTreeSet::new());
    let cpu = Device::cpu();
    let on_cpu = cpu.stream()?;
    for dtype in [DType::F32, DType::BF16] {
        let (all, expected) = (ops::samples(&device, 4, dtype)?, ops::samples(other, 4, dtype)?);
        let last = ops::samples(&cpu, 4, dtype)?;
        for (((op, samples), (_, expected)), (_, last)) in std::iter::zip(std::iter::zip(all, expected), last)
        {
            if expected.is_empty() {
                // It is not of this type, or of the refusing floor alone: the CPU may be left.
                others_lack.insert(op);
                for (sample, last) in std::iter::zip(samples, last) {
                    match (run(&stream, &sample), fallback) {
                        (Ok(got), Fallback::Cpu) => {
                            assert!(got == run(&on_cpu, &last)?, "{op} {dtype}");
                            ran.insert(op);
                        }
                        (Err(error), _) => assert!(error.is_refusal(), "{op} {dtype}: {error}"),
                        (Ok(_), _) => panic!("{op} {dtype} went on"),
                    }
                }
                continue;
            }
            ran.insert(op);
            assert_eq!(samples.len(), expected.len());
            for (sample, expected) in std::iter::zip(samples, expected) {
                // Twice: what a plan keeps from run to run is as it was.
                for _ in 0..2 {
                    assert!(run(&stream, &sample)? == run(&others, &expected)?, "{op} {dtype}: {sample:?}");
                }
            }
        }
    }
    let fallen = device.fallen();
    let nowhere: Vec<_> = others_lack.difference(&ran).collect();
    assert!(nowhere.is_empty() || nowhere == [&"decoder_layers"], "{nowhere:?}");
    for op in ran {
        let own: Vec<&String> =
            fallen.iter().filter(|line| line.starts_with(&format!("{op} falls"))).collect();
        assert!(!own.is_empty(), "{op} has not fallen back: {fallen:#?}");
    }
    Ok(())
}

#[test]
fn to_the_next_floor() -> Result<(), Error> {
    let other = Device::simulated(Arc::new(Card::new(Arch::Sm90a)))?.with_arch(Arch::Sm80)?;
    let refuses = Refuses::Kernels(|_, arch| arch == Arch::Sm90a);
    stands_in(refuses, Fallback::LowerFloor, &other)?;
    stands_in(refuses, Fallback::Cpu, &other)
}

#[test]
fn to_the_cpu() -> Result<(), Error> {
    stands_in(Refuses::Kernels(|_, _| true), Fallback::Cpu, &Device::cpu())
}

/// A launch is refused when it comes: the run itself goes on.
#[test]
fn launches_that_are_refused() -> Result<(), Error> {
    stands_in(Refuses::Launches(|_, _| true), Fallback::Cpu, &Device::cpu())?;
    let other = Device::simulated(Arc::new(Card::new(Arch::Sm90a)))?.with_arch(Arch::Sm61)?;
    stands_in(Refuses::Launches(|_, arch| arch != Arch::Sm61), Fallback::LowerFloor, &other)
}

/// A run of several launches of which a later one is refused is done again where that is sound: attention's merge,
/// whose first launch wrote nothing but the plan's own memory. Not so the scan of a delta net in several passes,
/// which has changed the state.
#[test]
fn launches_that_are_refused_half_way() -> Result<(), Error> {
    let device = card(Refuses::Launches(|entry, _| entry.contains("__merge")), Fallback::Cpu)?;
    let problem = AttentionProblem::new(1, [1, 4096], [4, 1], 64, DType::F32);
    let cpu = Device::cpu();
    let attention = [Attention::plan(&device, problem)?, Attention::plan(&cpu, problem)?];
    let mut results = Vec::new();
    for (device, attention) in std::iter::zip([&device, &cpu], &attention) {
        let stream = device.stream()?;
        let values = |len: usize| (0..len).map(|at| (at % 13) as f32 / 4.0 - 1.5).collect::<Vec<_>>();
        let q = Tensor::from_slice(&stream, &[1, 1, 4, 64], &values(256))?;
        let kv = Tensor::from_slice(&stream, &[1, 600, 1, 64], &values(600 * 64))?;
        let mut out = Tensor::zeros(&stream, &[1, 1, 4, 64], DType::F32)?;
        attention.run(&stream, AttentionArgs::new(q.view(), kv.view(), kv.view(), out.view_mut()))?;
        results.push(out.to_vec::<f32>(&stream)?);
    }
    assert_eq!(results[0], results[1]);
    assert!(attention[0].report().fallback.is_some_and(|refusal| refusal.contains("__merge")));

    let device = card(Refuses::Launches(|entry, _| entry.contains("__scan")), Fallback::Cpu)?;
    let tokens = 130;
    let problem = GatedDeltaProblem::new(tokens, 1, [1, 1], [16, 16], DType::F32);
    let plan = GatedDelta::plan_with(&device, problem, Form::Chunked { pass: 1 })?;
    let stream = device.stream()?;
    let zeros = |shape: &[usize]| Tensor::zeros(&stream, shape, DType::F32);
    let (heads, gates) = (zeros(&[tokens, 1, 16])?, zeros(&[tokens, 1])?);
    let (per_head, slots) = (zeros(&[1])?, Tensor::zeros(&stream, &[1], DType::U32)?);
    let offsets = Tensor::from_slice(&stream, &[2], &[0u32, tokens as u32])?;
    let (mut state, mut out) = (zeros(&[1, 1, 16, 16])?, zeros(&[tokens, 1, 16])?);
    let args = GatedDeltaArgs {
        q: heads.view(),
        k: heads.view(),
        v: heads.view(),
        b: gates.view(),
        a: gates.view(),
        a_log: per_head.view(),
        dt_bias: per_head.view(),
        offsets: offsets.view(),
        slots: slots.view(),
        state: state.view_mut(),
        out: out.view_mut(),
    };
    let error = plan.run(&stream, args).unwrap_err();
    assert!(matches!(error, Error::Launch { .. }), "{error}");
    Ok(())
}

const PROBLEM: fn() -> RmsNormProblem = || RmsNormProblem::new(2, 64, DType::F32, 1e-6);

fn norm(device: &Device, plan: &RmsNorm) -> Result<(), Error> {
    let stream = device.stream()?;
    let x = Tensor::from_slice(&stream, &[2, 64], &[3.0f32; 128])?;
    let weight = Tensor::from_slice(&stream, &[64], &[1.0f32; 64])?;
    let mut out = Tensor::zeros(&stream, &[2, 64], DType::F32)?;
    plan.run(&stream, RmsNormArgs::new(x.view(), weight.view(), out.view_mut()))?;
    assert!(out.to_vec::<f32>(&stream)?.iter().all(|value| (value - 1.0).abs() < 1e-5));
    Ok(())
}

/// The report says what was refused and where the plan is, and one line does, however many plans there are.
#[test]
fn reports_say_so() -> Result<(), Error> {
    let device = card(Refuses::Kernels(|_, arch| arch == Arch::Sm90a), Fallback::Cpu)?;
    RmsNorm::supports(&device, &PROBLEM())?;
    let plans = [RmsNorm::plan(&device, PROBLEM())?, RmsNorm::plan(&device, PROBLEM())?];
    for plan in &plans {
        norm(&device, plan)?;
        let report = plan.report();
        assert_eq!(report.device, device.with_arch(Arch::Sm80)?.describe());
        let expected = format!("for {}: rmsnorm: not supported on ", device.describe());
        let refusal = report.fallback.clone().expect("a reason");
        assert!(refusal.starts_with(&expected), "{refusal}");
        assert!(report.to_string().contains(&format!("  fallback   {refusal}\n")), "{report}");
        let line = format!("rmsnorm falls back to {}, {refusal}", report.device);
        assert_eq!(device.fallen(), [line]);
    }
    // A launch that is refused later than that.
    let device = card(Refuses::Launches(|_, arch| arch != Arch::Sm61), Fallback::LowerFloor)?;
    let plan = RmsNorm::plan(&device, PROBLEM())?;
    assert_eq!((plan.report().fallback, device.fallen().len()), (None, 0));
    norm(&device, &plan)?;
    assert_eq!(plan.report().device, device.with_arch(Arch::Sm61)?.describe());
    assert_eq!(device.fallen().len(), 2, "{:?}", device.fallen());
    norm(&device, &plan)?;
    assert_eq!(device.fallen().len(), 2);
    Ok(())
}

/// Without a policy, and below the last floor without the CPU, it is the error that it was. The caller's own choice
/// of a kernel is one that others stand in for.
#[test]
fn policies_end() -> Result<(), Error> {
    for fallback in [Fallback::Error, Fallback::LowerFloor] {
        let device = card(Refuses::Kernels(|_, _| true), fallback)?;
        let error = RmsNorm::plan(&device, PROBLEM()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("rmsnorm: not supported on {}", device.describe())), "{error}");
        let device = card(Refuses::Launches(|_, _| true), fallback)?;
        let error = norm(&device, &RmsNorm::plan(&device, PROBLEM())?).unwrap_err();
        assert!(matches!(error, Error::Launch { .. }), "{error}");
    }
    let plain = card(Refuses::Nothing, Fallback::Error)?;
    let mut variants = ops::rmsnorm::VARIANTS.iter();
    let variant = variants.find(|variant| RmsNorm::plan_with(&plain, PROBLEM(), variant).is_ok());
    let variant = variant.expect("a row");
    for refuses in [Refuses::Kernels(|_, _| true), Refuses::Launches(|_, _| true)] {
        let device = card(refuses, Fallback::Cpu)?;
        let plan = RmsNorm::plan_with(&device, PROBLEM(), variant)?;
        norm(&device, &plan)?;
        assert_eq!(plan.report().variant, "cpu");
    }
    assert_eq!(Device::cpu().with_fallback(Fallback::Cpu).fallback(), Fallback::Cpu);
    Ok(())
}

/// What a kernel did wrong, and a caller's mistake, are errors under every policy.
#[test]
fn mistakes_are_not_refusals() -> Result<(), Error> {
    let device = card(Refuses::Nothing, Fallback::Cpu)?;
    let error = RmsNorm::plan(&device, RmsNormProblem { cols: 0, ..PROBLEM() }).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    let plan = RmsNorm::plan(&device, PROBLEM())?;
    let stream = device.stream()?;
    // Nothing has written it.
    let x = Tensor::empty(&stream, &[2, 64], DType::F32)?;
    let weight = Tensor::from_slice(&stream, &[64], &[1.0f32; 64])?;
    let mut out = Tensor::zeros(&stream, &[2, 64], DType::F32)?;
    let error = plan.run(&stream, RmsNormArgs::new(x.view(), weight.view(), out.view_mut())).unwrap_err();
    assert!(matches!(error, Error::Simulation { .. }), "{error}");
    // On the CPU the tensors are looked at as on the card.
    let device = card(Refuses::Kernels(|_, _| true), Fallback::Cpu)?;
    let (stream, plan) = (device.stream()?, RmsNorm::plan(&device, PROBLEM())?);
    let x = Tensor::zeros(&stream, &[2, 32], DType::F32)?;
    let mut out = Tensor::zeros(&stream, &[2, 64], DType::F32)?;
    let weight = Tensor::from_slice(&stream, &[64], &[1.0f32; 64])?;
    let error = plan.run(&stream, RmsNormArgs::new(x.view(), weight.view(), out.view_mut())).unwrap_err();
    assert_eq!(error.to_string(), "rmsnorm: x: expected shape [any, 64], got [2, 32]");
    let other = Device::cpu().stream()?;
    let x = Tensor::zeros(&other, &[2, 64], DType::F32)?;
    let args = RmsNormArgs::new(x.view(), weight.view(), out.view_mut());
    let error = plan.run(&stream, args).unwrap_err().to_string();
    assert_eq!(error, format!("rmsnorm: x: expected {}, got the CPU", device.place()));
    let args = RmsNormArgs::new(x.view(), weight.view(), out.view_mut());
    let error = plan.run(&other, args).unwrap_err().to_string();
    assert!(error.starts_with("rmsnorm: stream: expected a stream of "), "{error}");
    Ok(())
}

/// A plan whose memory is out is on the CPU, which needs none of the card.
#[test]
fn memory_that_is_out() -> Result<(), Error> {
    let device = card(Refuses::MemoryBeyond(1 << 20), Fallback::Cpu)?;
    let (heads, keys) = ([4, 1], 1 << 16);
    let problem = AttentionProblem::new(1, [1, keys], heads, 64, DType::F32);
    let problem = AttentionProblem { batch: 8, ..problem };
    let attention = Attention::plan(&device, problem)?;
    assert_eq!(attention.report().variant, "cpu");
    let refusal = attention.report().fallback.expect("a reason");
    assert!(refusal.contains("out of memory on simulated H200: "), "{refusal}");
    let run = |device: &Device, attention: &Attention| -> Result<Vec<f32>, Error> {
        let stream = device.stream()?;
        let values = |len: usize| (0..len).map(|at| (at % 17) as f32 / 8.0 - 1.0).collect::<Vec<_>>();
        let q = Tensor::from_slice(&stream, &[1, 1, 4, 64], &values(256))?;
        let kv = Tensor::from_slice(&stream, &[1, 128, 2, 64], &values(128 * 128))?;
        let (k, v) = (kv.view().slice(2, 0..1)?, kv.view().slice(2, 1..2)?);
        let mut out = Tensor::zeros(&stream, &[1, 1, 4, 64], DType::F32)?;
        let before = device.pool().stats().num_allocations;
        attention.run(&stream, AttentionArgs::new(q.view(), k, v, out.view_mut()))?;
        assert_eq!(device.pool().stats().num_allocations, before, "a run takes no memory of the device");
        out.to_vec(&stream)
    };
    let cpu = Device::cpu();
    assert_eq!(run(&device, &attention)?, run(&cpu, &Attention::plan(&cpu, problem)?)?);
    Ok(())
}
