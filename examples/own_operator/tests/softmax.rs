//! The kernels in the simulator, and on a card where there is one, against f64.

use cuda_std::sim::{Launch, Memory, Report, Statistics, simulate};
use own_operator::{DType, Invalid, Softmax, values};
use proptest::prelude::*;

/// Runs a softmax in the simulator, in blocks of so many threads.
fn simulated(
    softmax: &Softmax,
    x: &[f32],
    threads: u32,
    seed: u64,
) -> Result<(Vec<f32>, Statistics), Report> {
    let bytes = softmax.encode(x).expect("as many elements");
    let mut memory = Memory::new();
    let x = memory.allocate_from("x", &bytes);
    let out = memory.allocate("out", bytes.len());
    let launch = Launch::new(softmax.dtype().kernel(), [softmax.rows(), 1, 1], [threads, 1, 1])
        .shared_bytes(Softmax::SHARED_BYTES)
        .seed(seed);
    let (cols, scale) = (softmax.cols(), softmax.scale());
    let statistics = simulate(&mut memory, &launch, || {
        // SAFETY: the buffers hold a row for each block, at multiples of 256 bytes; and the simulator looks.
        unsafe {
            match softmax.dtype() {
                DType::F32 => kernels::softmax_f32(x as _, out as _, cols, scale),
                DType::Bf16 => kernels::softmax_bf16(x as _, out as _, cols, scale),
            }
        }
    })?;
    let mut result = vec![0; bytes.len()];
    memory.read(out, &mut result);
    Ok((softmax.dtype().decode(&result), statistics))
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::Bf16)]
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
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// Right for every shape, type, scale, block size, and order in which the threads run.
    #[test]
    fn softmax_of_any_rows(
        (rows, cols, x) in (1..4usize, lengths()).prop_flat_map(|(rows, cols)| (Just(rows), Just(cols), elements(rows * cols))),
        dtype in dtypes(),
        scale in prop_oneof![Just(1.0f32), 0.01f32..4.0],
        warps in prop_oneof![Just(1u32), Just(3), Just(8)],
        seed in any::<u64>(),
    ) {
        let softmax = Softmax::new(rows, cols, dtype, scale).unwrap();
        let mut x = dtype.decode(&dtype.encode(&x));
        for row in x.chunks_exact_mut(cols) {
            // Of nothing but -inf the softmax is not defined.
            row[0] = row[0].max(-10.0);
        }
        let (out, _) = match simulated(&softmax, &x, 32 * warps, seed) {
            Ok(output) => output,
            Err(report) => return Err(TestCaseError::fail(report.to_string())),
        };
        let error = softmax.error(&x, &out);
        prop_assert!(error <= 1.0, "{error} times the bound, seed {seed}");
    }
}

/// The same bits with every seed: no result depends on which thread comes first.
#[test]
fn the_order_of_threads_does_not_show() {
    let softmax = Softmax::new(2, 777, DType::F32, 0.5).unwrap();
    let x = values(2 * 777);
    let bits = |seed| -> Vec<u32> {
        let (out, _) = simulated(&softmax, &x, 256, seed).unwrap_or_else(|report| panic!("{report}"));
        out.into_iter().map(f32::to_bits).collect()
    };
    let first = bits(0);
    assert!((1..20).all(|seed| bits(seed) == first));
}

/// Masked elements get nothing, and a row that is masked whole is NaN.
#[test]
fn rows_with_masks() {
    let softmax = Softmax::new(2, 3, DType::F32, 1.0).unwrap();
    let x = [f32::NEG_INFINITY, 2.0, 2.0, f32::NEG_INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY];
    let (out, _) = simulated(&softmax, &x, 32, 1).unwrap_or_else(|report| panic!("{report}"));
    assert_eq!(out[..3], [0.0, 0.5, 0.5]);
    assert!(out[3..].iter().all(|p| p.is_nan()), "{out:?}");
}

/// Long rows are read in whole pieces: fewer accesses than elements.
#[test]
fn most_accesses_are_of_16_bytes() {
    let softmax = Softmax::new(1, 4003, DType::Bf16, 1.0).unwrap();
    let (_, statistics) =
        simulated(&softmax, &values(4003), 256, 0).unwrap_or_else(|report| panic!("{report}"));
    // Three loads and a store of each piece and each of three edge elements; the words of the reductions.
    assert_eq!(statistics.accesses, 4 * (500 + 3) + 2 * (8 + 8 * 8));
}

#[test]
fn what_is_no_softmax() {
    let shape = "softmax of 0 rows of 5 elements: expected 1 to 2^31 - 1 of each";
    assert_eq!(Softmax::new(0, 5, DType::F32, 1.0).unwrap_err().to_string(), shape);
    assert!(matches!(Softmax::new(1, 1 << 31, DType::F32, 1.0), Err(Invalid::Shape { .. })));
    for (scale, text) in [(0.0, "0"), (-1.0, "-1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let text = format!("softmax with a scale of {text}: expected a positive number");
        assert_eq!(Softmax::new(1, 1, DType::F32, scale).unwrap_err().to_string(), text);
    }
    let softmax = Softmax::new(2, 3, DType::Bf16, 1.0).unwrap();
    assert_eq!(softmax.encode(&[0.0; 5]).unwrap_err().to_string(), "softmax of 6 elements, got 5");
}

/// A wrong result is above the bound, a NaN too.
#[test]
fn the_bound_can_be_missed() {
    let softmax = Softmax::new(1, 2, DType::F32, 1.0).unwrap();
    assert!(softmax.error(&[1.0, 1.0], &[0.5, 0.5]) <= 1.0);
    assert!(softmax.error(&[1.0, 1.0], &[0.5, 0.50001]) > 1.0);
    assert!(softmax.error(&[1.0, 1.0], &[f32::NAN, 0.5]) > 1.0);
}

#[cfg(feature = "cuda")]
#[test]
fn a_card_agrees() {
    use own_operator::card::Card;
    let card = match Card::open() {
        Ok(card) => card,
        Err(reason) => {
            assert!(
                std::env::var_os("REQUIRE_GPU").is_none(),
                "REQUIRE_GPU is set, and there is no card: {reason}"
            );
            eprintln!("skipped, no card: {reason}");
            return;
        }
    };
    for dtype in [DType::F32, DType::Bf16] {
        for (rows, cols) in [(1, 1), (7, 5), (300, 33), (5, 1000), (3, 4096), (2, 32001)] {
            let softmax = Softmax::new(rows, cols, dtype, 0.7).unwrap();
            let x = dtype.decode(&dtype.encode(&values(rows * cols)));
            let output = card.run(&softmax, &x, 0).unwrap_or_else(|error| panic!("{error}"));
            let error = softmax.error(&x, &output.out);
            assert!(error <= 1.0, "{dtype:?} {rows} × {cols}: {error} times the bound");
        }
    }
}
