//! The operator on simulated cards, and on a card where there is one, against f64.

use std::sync::Arc;

use cuda_std::sim::{Launch, Memory, Statistics, simulate};
use half::bf16;
use own_operator::{Softmax, Stored, values};
use proptest::prelude::*;
use testkit::simulator::Card;
use warpforge::{Arch, Device, Error, Tensor};

fn simulated(floor: Arch) -> Device {
    Device::simulated(Arc::new(Card::new(floor))).expect("a floor that there is")
}

/// Runs the operator on a device: the values as they were stored, and the result.
fn run<T: Stored>(
    device: &Device,
    softmax: &Softmax<T>,
    [rows, cols]: [usize; 2],
    x: &[T],
) -> Result<(Vec<f32>, Vec<f32>), Error> {
    let stream = device.stream()?;
    let x = Tensor::from_slice(&stream, &[rows, cols], x)?;
    let mut out = Tensor::empty(&stream, &[rows, cols], T::DTYPE)?;
    softmax.run(&stream, x.view(), out.view_mut())?;
    Ok((x.to_f32_vec(&stream)?, out.to_f32_vec(&stream)?))
}

/// The error of the operator on these values in multiples of what it may be.
fn error_of<T: Stored>(
    device: &Device,
    shape: [usize; 2],
    scale: f32,
    x: &[f32],
    round: fn(f32) -> T,
) -> Result<f64, Error> {
    let softmax = Softmax::<T>::plan(device, shape[0], shape[1], scale)?;
    let x: Vec<T> = x.iter().copied().map(round).collect();
    let (x, out) = run(device, &softmax, shape, &x)?;
    Ok(softmax.error(&x, &out))
}

/// Lengths with and without pieces, edges and second rounds.
fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![3 => 1..40usize, 2 => (1..160usize, 0..3usize).prop_map(|(n, more)| 8 * n + more - 1), 1 => 1000..2500usize]
}

/// Moderate and huge values, and -inf as masks have it; the first is a number.
fn elements(n: usize) -> impl Strategy<Value = Vec<f32>> {
    let element = prop_oneof![
        8 => -10.0f32..10.0,
        1 => prop_oneof![Just(f32::NEG_INFINITY), Just(0.0), Just(-0.0), Just(1e-40)],
        1 => -1e4f32..1e4,
    ];
    prop::collection::vec(element, n)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    /// Right for every shape, type, scale and card.
    #[test]
    fn softmax_of_any_rows(
        (rows, cols, mut x) in (1..4usize, lengths()).prop_flat_map(|(rows, cols)| (Just(rows), Just(cols), elements(rows * cols))),
        is_bf16 in any::<bool>(),
        scale in prop_oneof![Just(1.0f32), 0.01f32..4.0],
        floor in prop_oneof![Just(Arch::Sm61), Just(Arch::Sm80), Just(Arch::Sm90a)],
    ) {
        for row in x.chunks_exact_mut(cols) {
            // Of nothing but -inf the softmax is not defined.
            row[0] = row[0].max(-10.0);
        }
        let device = simulated(floor);
        let error = match is_bf16 {
            true => error_of(&device, [rows, cols], scale, &x, bf16::from_f32),
            false => error_of(&device, [rows, cols], scale, &x, |x| x),
        };
        let error = error.map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert!(error <= 1.0, "{error} times the bound");
    }
}

/// The kernel alone, with a course of its threads of one's choice.
fn kernel_alone(x: &[f32], threads: u32, seed: u64) -> (Vec<u8>, Statistics) {
    let bytes: Vec<u8> = x.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut memory = Memory::new();
    let x = memory.allocate_from("x", &bytes);
    let out = memory.allocate("out", bytes.len());
    let launch = Launch::new("softmax_f32", [1, 1, 1], [threads, 1, 1])
        .shared_bytes(Softmax::<f32>::SHARED_BYTES)
        .seed(seed);
    let cols = (bytes.len() / 4) as u32;
    let statistics = simulate(&mut memory, &launch, || {
        // SAFETY: the buffers hold a row, at multiples of 256 bytes; and the simulator looks.
        unsafe { kernels::softmax_f32(x as _, out as _, cols, 0.5) }
    });
    let statistics = statistics.unwrap_or_else(|report| panic!("{report}"));
    let mut result = vec![0; bytes.len()];
    memory.read(out, &mut result);
    (result, statistics)
}

/// The same bits with every seed: no result depends on which thread comes first.
#[test]
fn the_order_of_threads_does_not_show() {
    let x = values(777);
    for threads in [32, 96, 256] {
        let (first, _) = kernel_alone(&x, threads, 0);
        assert!((1..20).all(|seed| kernel_alone(&x, threads, seed).0 == first), "{threads} threads");
    }
}

/// Long rows are read in whole pieces: fewer accesses than elements.
#[test]
fn most_accesses_are_of_16_bytes() {
    let (_, statistics) = kernel_alone(&values(4003), 256, 0);
    // Three loads and a store of each piece and each of three edge elements; the words of the reductions.
    assert_eq!(statistics.accesses, 4 * (1000 + 3) + 2 * (8 + 8 * 8));
}

/// Masked elements get nothing, and a row that is masked whole is NaN.
#[test]
fn rows_with_masks() {
    let device = simulated(Arch::Sm61);
    let softmax = Softmax::<f32>::plan(&device, 2, 3, 1.0).unwrap();
    let x = [f32::NEG_INFINITY, 2.0, 2.0, f32::NEG_INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY];
    let (_, out) = run(&device, &softmax, [2, 3], &x).unwrap();
    assert_eq!(out[..3], [0.0, 0.5, 0.5]);
    assert!(out[3..].iter().all(|p| p.is_nan()), "{out:?}");
}

#[test]
fn what_is_no_softmax() {
    let device = simulated(Arch::Sm80);
    let refused =
        |rows, cols, scale| Softmax::<f32>::plan(&device, rows, cols, scale).unwrap_err().to_string();
    let shape = "softmax: shape: expected 1 to 2^31 - 1 rows and columns, got 0 × 5";
    assert_eq!(refused(0, 5, 1.0), shape);
    assert!(refused(1, 1 << 31, 1.0).contains("got 1 × 2147483648"));
    for (scale, text) in [(0.0, "0"), (-1.0, "-1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        assert_eq!(refused(1, 1, scale), format!("softmax: scale: expected a positive number, got {text}"));
    }
    let softmax = Softmax::<f32>::plan(&device, 2, 4, 1.0).unwrap();
    let stream = device.stream().unwrap();
    let x = Tensor::from_slice(&stream, &[2, 8], &values(16)).unwrap();
    let mut out = Tensor::from_slice(&stream, &[2, 4], &[bf16::ONE; 8]).unwrap();
    let error = softmax.run(&stream, x.view().slice(1, 0..4).unwrap(), out.view_mut()).unwrap_err();
    assert!(error.to_string().contains("x: expected [2, 4] without gaps"), "{error}");
    let x = x.view().slice(0, 0..1).unwrap().reshape(&[2, 4]).unwrap();
    let error = softmax.run(&stream, x, out.view_mut()).unwrap_err().to_string();
    assert_eq!(error, "softmax_f32: tensor: expected f32, got bf16");
}

/// A wrong result is above the bound, a NaN too.
#[test]
fn the_bound_can_be_missed() {
    let softmax = Softmax::<f32>::plan(&simulated(Arch::Sm61), 1, 2, 1.0).unwrap();
    assert!(softmax.error(&[1.0, 1.0], &[0.5, 0.5]) <= 1.0);
    assert!(softmax.error(&[1.0, 1.0], &[0.5, 0.50001]) > 1.0);
    assert!(softmax.error(&[1.0, 1.0], &[f32::NAN, 0.5]) > 1.0);
}

#[cfg(feature = "cuda")]
#[test]
fn a_card_agrees() {
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(reason) => return testkit::gpu::skip(&reason.to_string()),
    };
    for (rows, cols) in [(1, 1), (7, 5), (300, 33), (5, 1000), (3, 4096), (2, 32001)] {
        let x = values(rows * cols);
        for error in [
            error_of(&device, [rows, cols], 0.7, &x, |x| x),
            error_of(&device, [rows, cols], 0.7, &x, bf16::from_f32),
        ] {
            let error = error.unwrap_or_else(|error| panic!("{error}"));
            assert!(error <= 1.0, "{rows} × {cols}: {error} times the bound");
        }
    }
    // Recorded, and launched twice.
    let stream = device.stream().unwrap();
    let softmax = Softmax::<f32>::plan(&device, 3, 100, 1.0).unwrap();
    let x = Tensor::from_slice(&stream, &[3, 100], &values(300)).unwrap();
    let mut out = Tensor::zeros(&stream, &[3, 100], warpforge::DType::F32).unwrap();
    let graph = stream.capture(|stream| softmax.run(stream, x.view(), out.view_mut())).unwrap();
    drop(softmax);
    for _ in 0..2 {
        out.view_mut().fill_zero(&stream).unwrap();
        // SAFETY: the tensors are there until the stream has been waited for, and nobody else uses them.
        unsafe { graph.launch(&stream) }.unwrap();
        let sum: f32 = out.to_vec::<f32>(&stream).unwrap().iter().sum();
        assert!((sum - 3.0).abs() < 1e-4, "{sum}");
    }
}
