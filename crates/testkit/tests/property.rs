//! A user's property test: a kernel of one's own on simulated cards, in buffers with guard bands, against f64. And what
//! each part of it finds of kernels that are wrong.

use std::sync::Arc;

use abi::{Arch, DType};
use cuda_std::{global, kernel, thread};
use host::module::{In, Module, Out};
use host::{Device, Error, Tensor};
use proptest::prelude::*;
use testkit::buffer::{BufferError, Guarded};
use testkit::compare::{Mismatch, Scale, Tolerance, check_within_naive};
use testkit::gpu::proptest_config;
use testkit::round::{round_to, widen};
use testkit::simulator::Card;
use testkit::strategies::{Values, dims, fill, finite_values};

/// The index of a thread in its grid.
fn index() -> u32 {
    thread::block_idx_x() * thread::block_dim_x() + thread::thread_idx_x()
}

/// out[i] = a · x[i] + y[i]
///
/// # Safety
/// x, y and out have n elements.
#[kernel(max_threads = 256)]
pub unsafe fn axpy(a: f32, x: *const f32, y: *const f32, out: *mut f32, n: u32) {
    let i = index() as usize;
    if i < n as usize {
        // SAFETY: i < n, the length of all three.
        unsafe { global::store(out.add(i), a * global::load(x.add(i)) + global::load(y.add(i))) };
    }
}

/// The same with a mistake: it clears one element too many.
///
/// # Safety
/// As it should be, and is not enough: x, y and out have n elements.
#[kernel(max_threads = 256)]
pub unsafe fn axpy_beyond(a: f32, x: *const f32, y: *const f32, out: *mut f32, n: u32) {
    let i = index() as usize;
    if i <= n as usize {
        // SAFETY: not for the last one, as the tests are to find.
        unsafe { global::store(out.add(i), 0.0) };
    }
    // SAFETY: the caller's promise.
    unsafe { axpy(a, x, y, out, n) }
}

/// What a run gave: the result, or a write beside it.
type Outcome = Result<Vec<f32>, BufferError>;

/// Runs a kernel in the middle of longer tensors, whose other elements are guards.
fn guarded(name: &'static str, device: &Device, a: f32, x: &[f32], y: &[f32]) -> Result<Outcome, Error> {
    let stream = device.stream()?;
    let axpy = Module::load(device, "")?.function::<(f32, In<f32>, In<f32>, Out<f32>, u32)>(name)?;
    let (x, y) = (Guarded::new(x, 1), Guarded::new(y, 0));
    let out = Guarded::<f32>::poisoned(x.payload().len(), 3);
    let upload = |buffer: &Guarded<f32>| {
        let padded = buffer.as_padded();
        Tensor::from_slice(&stream, &[padded.len()], padded)
    };
    let (x_tensor, y_tensor, mut out_tensor) = (upload(&x)?, upload(&y)?, upload(&out)?);
    let n = x.payload().len() as u32;
    let grid = [(n + 1).div_ceil(64), 1, 1];
    let args = (
        a,
        x_tensor.view().slice(0, x.payload_range())?,
        y_tensor.view().slice(0, y.payload_range())?,
        out_tensor.view_mut().slice(0, out.payload_range())?,
        n,
    );
    // SAFETY: n elements of each; what a wrong kernel does is within the guards, or the simulator says so.
    unsafe { axpy.launch(&stream, grid, [64, 1, 1], args)? };
    let out = Guarded::from_padded(out_tensor.to_vec(&stream)?, out.payload_range());
    Ok(out.check_guards().map(|()| out.payload().to_vec()))
}

fn agrees(a: f32, x: &[f32], y: &[f32], got: &[f32]) -> Result<(), Mismatch> {
    let pairs = || std::iter::zip(x, y).map(|(&x, &y)| (f64::from(x), f64::from(y)));
    let reference: Vec<f64> = pairs().map(|(x, y)| f64::from(a) * x + y).collect();
    let round = |value| round_to(DType::F32, value);
    let naive: Vec<f64> = pairs().map(|(x, y)| round(round(f64::from(a) * x) + y)).collect();
    // Of a sum errors are relative to its terms.
    let terms: Vec<f64> = pairs().map(|(x, y)| (f64::from(a) * x).abs() + y.abs()).collect();
    let tolerance = Tolerance::new(DType::F32, Scale::Given(&terms), 2);
    check_within_naive(&widen(got), &reference, &naive, &tolerance).map(|_| ())
}

fn card(floor: Arch) -> Device {
    Device::simulated(Arc::new(Card::new(floor))).expect("a card of a floor")
}

proptest! {
    #![proptest_config(proptest_config(64))]

    #[test]
    fn axpy_is_right(
        n in dims(&[64], 300),
        values in finite_values(),
        a in -4.0f32..4.0,
        seed in any::<u64>(),
        floor in prop::sample::select(&[Arch::Sm61, Arch::Sm80, Arch::Sm90a]),
    ) {
        let (x, y) = (fill(values, DType::F32, n, seed), fill(values, DType::F32, n, !seed));
        let outcome = guarded("axpy", &card(floor), a, &x, &y);
        let got = outcome.map_err(|report| TestCaseError::fail(report.to_string()))?;
        let got = got.map_err(|written| TestCaseError::fail(written.to_string()))?;
        agrees(a, &x, &y, &got).map_err(|error| TestCaseError::fail(error.to_string()))?;
    }
}

/// One element too many is found by the guards, and where nothing lies behind the tensors by the simulator, with the
/// line.
#[test]
fn one_element_too_many_is_found() {
    let device = card(Arch::Sm80);
    let (x, y) = (fill(Values::Normal, DType::F32, 10, 1), fill(Values::Normal, DType::F32, 10, 2));
    let written = guarded("axpy_beyond", &device, 1.0, &x, &y).unwrap().unwrap_err();
    assert!(
        written.to_string().starts_with("guard element 1 after the payload of 10 was overwritten"),
        "{written}"
    );

    let stream = device.stream().unwrap();
    let module = Module::load(&device, "").unwrap();
    let beyond = module.function::<(f32, In<f32>, In<f32>, Out<f32>, u32)>("axpy_beyond").unwrap();
    let upload = |values: &[f32]| Tensor::from_slice(&stream, &[10], values).unwrap();
    let (x, y, mut out) = (upload(&x), upload(&y), upload(&[0.0; 10]));
    let args = (1.0, x.view(), y.view(), out.view_mut(), 10);
    // SAFETY: the simulator looks.
    let report = unsafe { beyond.launch(&stream, [1, 1, 1], [64, 1, 1], args) }.unwrap_err().to_string();
    assert!(report.contains("out of bounds") && report.contains("property.rs"), "{report}");
    assert!(report.contains("WARPFORGE_SIM_SEED="), "{report}");
}

/// Other parameters than the kernel's are refused before it runs.
#[test]
fn other_parameters_are_refused() {
    let device = card(Arch::Sm61);
    let stream = device.stream().unwrap();
    let wrong = Module::load(&device, "").unwrap().function::<(f64, Out<f32>)>("axpy").unwrap();
    let mut out = Tensor::zeros(&stream, &[1], DType::F32).unwrap();
    // SAFETY: refused.
    let error = unsafe { wrong.launch(&stream, [1; 3], [32, 1, 1], (1.0, out.view_mut())) }.unwrap_err();
    let text = "the kernel's parameters have [4, 8, 8, 8, 4] bytes, not [8, 8]";
    assert!(error.to_string().contains(text), "{error}");
}

/// A result that is a little wrong is above the bound.
#[test]
fn the_tolerance_can_be_missed() {
    let (x, y) = (fill(Values::Normal, DType::F32, 300, 1), fill(Values::Normal, DType::F32, 300, 2));
    let mut got: Vec<f32> = std::iter::zip(&x, &y).map(|(x, y)| 2.0 * x + y).collect();
    agrees(2.0, &x, &y, &got).unwrap();
    got[7] *= 1.00001;
    assert!(matches!(agrees(2.0, &x, &y, &got), Err(Mismatch::OutOfBound { .. })));
}
