//! Quantised weights against the specification, and against what the host packs.

use abi::ops::quantize_weight::{QuantizeWeightVariant, SCALES_VARIANTS, VARIANTS};
use abi::weight::{Codes, ScaleType};
use proptest::prelude::*;
use proptest::sample::select;
use testkit::strategies::{Values, dims, dims_from, finite_values, stride_padding};
use warpforge::ops::quantize_weight::{
    QuantizeWeight, QuantizeWeightArgs, QuantizeWeightProblem, Quantizer, reference,
};
use warpforge::weight::{GateUp, Quantised, Scheme, Weight, WeightSource};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, devices, every_kernel, fail, floats, layouts, on_executors,
    through_every_kernel, values,
};

#[derive(Clone, Debug)]
struct Case {
    problem: QuantizeWeightProblem,
    /// Rows of the run.
    rows: usize,
    places: [Layout; 2],
    kind: Values,
    seed: u64,
}

fn place() -> impl Strategy<Value = Layout> {
    let offset = prop_oneof![5 => Just(0usize), 1 => 1usize..9];
    (stride_padding(), offset).prop_map(|(padding, offset)| Layout { padding, offset })
}

fn scheme() -> impl Strategy<Value = Scheme> {
    use ScaleType::{Bf16, E4m3, E8m0, F16, F32};
    let own = (
        select(&Codes::ALL[..]),
        select(&[0u32, 16, 32, 64, 128, 256][..]),
        prop_oneof![4 => Just(1u32), 1 => Just(16), 1 => Just(128)],
        select(&[F32, F16, Bf16, E8m0, E4m3][..]),
        prop_oneof![2 => Just(false), 1 => Just(true)],
        prop_oneof![3 => Just(1.0f32), 1 => Just(0.9), 1 => Just(0.0)],
    );
    let own = own.prop_map(|(codes, group, rows, scale, asymmetric, percentile)| Scheme {
        codes,
        group,
        rows,
        scale,
        asymmetric,
        percentile,
    });
    let named = select(&Scheme::NAMED[..]).prop_map(|(_, scheme)| scheme);
    prop_oneof![2 => own.prop_filter("a layout", |scheme| scheme.layout().problem().is_none()), 1 => named]
}

fn case() -> impl Strategy<Value = Case> {
    let rows = prop_oneof![3 => dims(&[16, 32], 40), 1 => dims(&[128, 256], 270)];
    let sizes = (floats(), rows, dims_from(1, &[16, 64, 128, 256], 300), 0usize..3);
    (sizes, scheme(), any::<bool>(), layouts(place), finite_values(), any::<u64>()).prop_map(
        |((dtype, rows, k, more), scheme, in_turn, places, kind, seed)| {
            let problem = QuantizeWeightProblem::new(rows + more, k, dtype, scheme);
            Case { problem: QuantizeWeightProblem { in_turn, ..problem }, rows, places, kind, seed }
        },
    )
}

impl Case {
    fn work(&self) -> usize {
        let QuantizeWeightProblem { k, scheme, in_turn, .. } = self.problem;
        let passes = if scheme.percentile < 1.0 { 40 } else { 4 };
        (1 + usize::from(in_turn)) * passes * self.rows.next_multiple_of(16) * k.next_multiple_of(64)
    }

    /// The matrices' values, one after the other.
    fn matrices(&self) -> Vec<Vec<f64>> {
        let QuantizeWeightProblem { k, dtype, in_turn, .. } = self.problem;
        let of = |seed: u64| values(self.kind, dtype, self.rows * k, self.seed ^ seed);
        if in_turn { vec![of(1), of(2)] } else { vec![of(1)] }
    }
}

/// A matrix that the host quantises.
fn on_host(
    matrix: &[f64],
    [n, k]: [usize; 2],
    scheme: Scheme,
    global: f32,
) -> Result<Quantised<impl Fn(usize, &mut [f32]) + Sync>, Error> {
    let read = move |row: usize, values: &mut [f32]| {
        values.iter_mut().zip(&matrix[row * k..]).for_each(|(out, &value)| *out = value as f32);
    };
    Quantised::with_global([n, k], scheme, read, Some(global))
}

/// What the host quantises is what the specification says.
fn expect_reference(
    quantised: &Quantised<impl Fn(usize, &mut [f32]) + Sync>,
    matrix: &[f64],
    scheme: &Scheme,
    global: f32,
) -> Result<(), TestCaseError> {
    let [n, k] = quantised.size();
    let matrix: Vec<f32> = matrix.iter().map(|&value| value as f32).collect();
    let want = reference::quantize_weight(&matrix, k, scheme, global);
    let groups = want.scales.len().checked_div(n).unwrap_or(0);
    let width = if scheme.group == 0 { k } else { scheme.group as usize };
    for row in 0..n {
        let bytes = scheme.codes.bytes();
        let (mut codes, mut after) = (vec![0; k * bytes], vec![0.0; k]);
        quantised.codes(row, &mut codes);
        let codes: Vec<u16> = codes
            .chunks(bytes)
            .map(|code| code.iter().rev().fold(0, |code, &byte| code << 8 | u16::from(byte)))
            .collect();
        prop_assert_eq!(&codes[..], &want.codes[row * k..][..k], "codes of row {}", row);
        quantised.dequantise(row, &mut after);
        for group in 0..groups {
            let zero = quantised.zero(row, group);
            prop_assert_eq!(zero, want.zeros[row * groups + group], "zero point {} of row {}", group, row);
        }
        for (col, (&code, &after)) in std::iter::zip(&codes, &after).enumerate() {
            let (scale, zero) =
                (want.scales[row * groups + col / width], want.zeros[row * groups + col / width]);
            let value = scale * reference::value(scheme.codes, zero, code) as f32;
            prop_assert_eq!(
                after.to_bits(),
                value.to_bits(),
                "row {}, column {}: {} {}",
                row,
                col,
                after,
                value
            );
        }
    }
    Ok(())
}

fn run(
    device: &Device,
    case: &Case,
    variant: Option<&'static QuantizeWeightVariant>,
) -> Result<(), TestCaseError> {
    let Case { rows, places, .. } = *case;
    let stream = device.stream().map_err(fail)?;
    let matrices = case.matrices();
    let largest = matrices.iter().flatten().fold(0.0f64, |most, value| most.max(value.abs()));
    let scheme = case.problem.scheme;
    let global = scheme.global_of(largest as f32);
    // Of so small values that there is none.
    let global = if global > 0.0 && global.is_finite() { global } else { 1.0 };
    let problem = QuantizeWeightProblem { global, ..case.problem };
    let QuantizeWeightProblem { k, dtype, .. } = problem;
    let plan = match variant {
        None => QuantizeWeight::plan(device, problem),
        Some(variant) => QuantizeWeight::plan_with(device, problem, variant),
    };
    let plan = plan.map_err(fail)?;
    let inputs: Result<Vec<Rows>, Error> = std::iter::zip(&matrices, places)
        .map(|(matrix, layout)| Rows::input(&stream, dtype, matrix, k, layout))
        .collect();
    let inputs = inputs.map_err(fail)?;
    let bytes = problem.bytes(rows).expect("a small size");
    let part = |bytes: usize| Rows::output(&stream, DType::I8, 1, bytes, Layout::default()).map_err(fail);
    let [mut codes, mut scales, mut zeros] = [part(bytes[0])?, part(bytes[1])?, part(bytes[2])?];
    let mut met = Rows::input(&stream, DType::F32, &[0.0], 1, Layout::default()).map_err(fail)?;
    let args = QuantizeWeightArgs {
        rows: inputs[0].view(),
        second: inputs.get(1).map(Rows::view),
        codes: codes.view_mut().reshape(&[bytes[0]]).map_err(fail)?,
        scales: scales.view_mut().reshape(&[bytes[1]]).map_err(fail)?,
        zeros: match scheme.asymmetric {
            true => Some(zeros.view_mut().reshape(&[bytes[2]]).map_err(fail)?),
            false => None,
        },
        largest: met.view_mut().reshape(&[1]).map_err(fail)?,
    };
    plan.run(&stream, args).map_err(fail)?;

    prop_assert_eq!(met.read(&stream)?, vec![largest]);
    let quantised: Result<Vec<_>, Error> =
        matrices.iter().map(|matrix| on_host(matrix, [rows, k], scheme, global)).collect();
    let quantised = match quantised {
        // What a scale cannot hold is found by the largest magnitude, behind the run.
        Err(error) if error.to_string().contains("can hold") => return Ok(()),
        quantised => quantised.map_err(fail)?,
    };
    for (matrix, quantised) in std::iter::zip(&matrices, &quantised) {
        expect_reference(quantised, matrix, &scheme, global)?;
    }
    let host = Device::cpu().stream().map_err(fail)?;
    let want = match &quantised[..] {
        [one] => Weight::pack(&host, one),
        [gate, up, ..] => Weight::pack(&host, &GateUp(gate, up)),
        [] => unreachable!("a matrix at least"),
    };
    let want = want.map_err(fail)?;
    for (name, part, want) in [
        ("codes", &codes, want.parts()[0]),
        ("scales", &scales, want.parts()[1]),
        ("zero points", &zeros, want.parts()[2]),
    ] {
        let want = want.map_or(Ok(Vec::new()), |want| want.to_vec::<i8>(&host)).map_err(fail)?;
        let got: Vec<i8> = part.read(&stream)?.into_iter().map(|value| value as i8).collect();
        let differ = std::iter::zip(&got, &want).position(|(got, want)| got != want);
        prop_assert!(differ.is_none() && got.len() == want.len(), "{}: byte {:?}", name, differ);
    }
    Ok(())
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        let QuantizeWeightProblem { dtype, scheme, .. } = case.problem;
        let is_of_it =
            |variant: &&QuantizeWeightVariant| (variant.dtype, variant.codes) == (dtype, scheme.codes);
        let scales = SCALES_VARIANTS.iter().any(|scales| scales.dtype == dtype && wanted(scales.entry));
        for variant in VARIANTS.iter().filter(is_of_it).filter(|variant| scales || wanted(variant.entry)) {
            run(device, case, Some(variant))?;
        }
    }
    Ok(())
}

/// No rows, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    let no_rows = |case: &mut Case| (case.rows, case.problem.rows) = (0, 0);
    through_every_kernel("quantize_weight", &[no_rows], case(), |case| 2 * case.work(), run_variants)
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("quantize_weight", case(), |case| 2 * case.work(), run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(128))]

    /// What `plan` chooses, on every device.
    #[test]
    fn planned((case, on) in on_executors(case, Case::work)) {
        for device in &on.devices() {
            run(device, &case, None)?;
        }
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_variant((case, on) in on_executors(case, |case| 2 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }
}

/// A weight of several matrices, and of several experts, is what the host packs of all of them.
#[test]
fn weights_of_several_matrices() -> Result<(), Error> {
    let host = Device::cpu().stream()?;
    let bytes = |weight: &Weight, stream: &warpforge::Stream| -> Result<Vec<Vec<i8>>, Error> {
        weight.parts().into_iter().flatten().map(|part| part.to_vec::<i8>(stream)).collect()
    };
    for device in &devices() {
        let stream = device.stream()?;
        for scheme in Scheme::NAMED.map(|(_, scheme)| scheme) {
            let (n, k) = (128, 96);
            // The second expert's are smaller, the third one's larger.
            let mut matrix = values(Values::Normal, DType::F32, 3 * n * k, 5);
            std::iter::zip(&mut matrix[n * k..], [0.125, 8.0].map(|by| vec![by; n * k]).concat())
                .for_each(|(value, by)| *value *= by);
            let on_device: Vec<f32> = matrix.iter().map(|&value| value as f32).collect();
            let tensor = Tensor::from_slice(&stream, &[3, n, k], &on_device)?;
            let largest = on_device.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            let global = scheme.global_of(largest);
            let of = |expert: usize| on_host(&matrix[expert * n * k..], [n, k], scheme, global);

            // Each expert has a factor of its own.
            let alone = |expert: usize, rows: usize| {
                let own = &matrix[expert * n * k..][..rows * k];
                let largest = own.iter().fold(0.0f32, |most, value| most.max(value.abs() as f32));
                on_host(own, [rows, k], scheme, scheme.global_of(largest))
            };
            let experts = Weight::quantize(&stream, tensor.view(), scheme)?;
            let want = Weight::pack_experts(&host, 3, |expert| alone(expert, n))?;
            let factors = |weight: &Weight| format!("{weight:?}");
            assert_eq!(factors(&experts), factors(&want));
            assert_eq!(bytes(&experts, &stream)?, bytes(&want, &host)?, "{scheme:?} on {device:?}");

            // Experts whose last tiles are not whole; those of blocks end with these.
            if scheme.rows == 1 {
                let rows = 90;
                let part = tensor.view().slice(1, 0..rows)?;
                let experts = Weight::quantize(&stream, part, scheme)?;
                let want = Weight::pack_experts(&host, 3, |expert| alone(expert, rows))?;
                assert_eq!(factors(&experts), factors(&want));
                assert_eq!(bytes(&experts, &stream)?, bytes(&want, &host)?, "{scheme:?} on {device:?}");
            }

            // One above the other, and the last one's rows no whole tile.
            let last = 2 * n..2 * n + 90;
            let rows = tensor.view().reshape(&[3 * n, k])?.slice(0, 0..last.end)?;
            let want = Weight::pack(&host, &on_host(&matrix, [last.end, k], scheme, global)?)?;
            let mut quantizer = Quantizer::new(&stream, scheme, 1, [last.end, k], global)?;
            for part in [0..n, n..2 * n, last] {
                quantizer.push(&stream, rows.slice(0, part)?)?;
            }
            let whole = quantizer.finish(&stream)?;
            assert_eq!(bytes(&whole, &stream)?, bytes(&want, &host)?, "{scheme:?} on {device:?}");

            // In turn.
            let mut quantizer = Quantizer::of_pairs(&stream, scheme, 1, [2 * n, k], global)?;
            let of_view = |expert: usize| tensor.view().slice(0, expert..expert + 1)?.reshape(&[n, k]);
            quantizer.push_pair(&stream, [of_view(0)?, of_view(1)?])?;
            let pair = quantizer.finish(&stream)?;
            let want = Weight::pack(&host, &GateUp(&of(0)?, &of(1)?))?;
            assert_eq!(bytes(&pair, &stream)?, bytes(&want, &host)?, "{scheme:?} on {device:?}");
        }
    }
    Ok(())
}

/// Values that are not finite are an error when the weight is asked for, and so are rows that are missing or too many.
#[test]
fn bad_weights() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![1.0f32; 20 * 40];
            values[777] = bad;
            let matrix = Tensor::from_slice(&stream, &[20, 40], &values)?;
            for scheme in [Scheme::INT4, Scheme::NVFP4] {
                let error = Weight::quantize(&stream, matrix.view(), scheme).unwrap_err().to_string();
                assert!(error.starts_with("quantize_weight: rows: expected finite values, got "), "{error}");
            }
        }
        let matrix = Tensor::zeros(&stream, &[20, 40], DType::F32)?;
        let new = |n: usize| Quantizer::new(&stream, Scheme::INT8, 1, [n, 40], 1.0);
        let mut missing = new(36)?;
        missing.push(&stream, matrix.view().slice(0, 0..16)?)?;
        assert_eq!(
            missing.finish(&stream).unwrap_err().to_string(),
            "quantize_weight: rows: expected all of them, got 16 of 48, in whole tiles"
        );
        let mut torn = new(36)?;
        assert_eq!(
            torn.push(&stream, matrix.view()).unwrap_err().to_string(),
            "quantize_weight: rows: expected columns 40, and 36 rows of the weight or a multiple of 16 below, got \
             [20, 40] behind row 0 of expert 0 of 1"
        );
        assert!(new(16)?.push(&stream, matrix.view()).is_err());
        assert!(new(20)?.push_pair(&stream, [matrix.view(), matrix.view()]).is_err());
        assert!(Weight::quantize(&stream, matrix.view().reshape(&[800])?, Scheme::INT8).is_err());
    }
    Ok(())
}

/// Values beyond what scales of their type can hold are an error, on every device as on the host; up to there all of
/// them stay finite.
#[test]
fn scales_that_would_be_infinite() -> Result<(), Error> {
    let f16 = Scheme { scale: ScaleType::F16, ..Scheme::INT8 };
    let half = Scheme { codes: Codes::Int4, asymmetric: true, ..f16 };
    let pairs = Scheme { asymmetric: true, ..Scheme::INT8 };
    for (scheme, fits, too_large, kind) in [
        (f16, 65504.0 * 127.0, Some(65520.0 * 127.0), "F16"),
        (half, 65504.0 * 7.5, Some(65520.0 * 7.5), "F16"),
        (pairs, f32::MAX / 2.1, Some(f32::MAX / 1.9), "F32"),
        (Scheme::INT4, f32::MAX / 1.1, Some(f32::MAX), "Bf16"),
        (Scheme::NVFP4, f32::MAX / 1.1, None, ""),
        (Scheme::MXFP4, f32::MAX, None, ""),
    ] {
        let row = |largest: f32| [vec![-largest, largest, 1.0], vec![0.0; 29]].concat();
        let on_host = |largest: f32| {
            Quantised::new([1, 32], scheme, move |_, out: &mut [f32]| out.copy_from_slice(&row(largest)))
        };
        let want = |op: &str, largest: f32| {
            format!("{op}: expected values whose scales {kind} can hold, got a magnitude of {largest:e}")
        };
        let mut after = [f32::NAN; 32];
        on_host(fits)?.dequantise(0, &mut after);
        assert!(after.iter().all(|x| x.is_finite()), "{scheme:?}: {after:?}");
        if let Some(largest) = too_large {
            let error = on_host(largest).err().map(|error| error.to_string());
            assert_eq!(error, Some(want("Weight::pack: source", largest)), "{scheme:?}");
        }
        for device in &devices() {
            let stream = device.stream()?;
            let on_device = |largest: f32| {
                let matrix = Tensor::from_slice(&stream, &[1, 32], &row(largest))?;
                Weight::quantize(&stream, matrix.view(), scheme).map(|_| ())
            };
            on_device(fits)?;
            if let Some(largest) = too_large {
                let error = on_device(largest).err().map(|error| error.to_string());
                assert_eq!(error, Some(want("quantize_weight: rows", largest)), "{scheme:?} on {device:?}");
            }
        }
    }
    Ok(())
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let problem = QuantizeWeightProblem::new(16, 64, DType::F32, Scheme::INT8);
        let refused = |problem| QuantizeWeight::supports(device, &problem).unwrap_err().to_string();
        assert_eq!(
            refused(QuantizeWeightProblem { k: 0, ..problem }),
            "quantize_weight: problem: expected a k of at least 1, got 0"
        );
        assert_eq!(
            refused(QuantizeWeightProblem { dtype: DType::U32, ..problem }),
            "quantize_weight: problem: expected dtype f32, f16 or bf16, got u32"
        );
        assert_eq!(
            refused(QuantizeWeightProblem { global: f32::NAN, ..problem }),
            "quantize_weight: problem: expected a positive, finite global scale, got NaN"
        );
        let odd = Scheme { group: 48, ..Scheme::INT8 };
        assert!(refused(QuantizeWeightProblem { scheme: odd, ..problem }).starts_with(
            "quantize_weight: scheme: expected a group of 16, 32, 64, … 32768, or of all of a row"
        ));
        let stream = device.stream()?;
        let plan = QuantizeWeight::plan(device, problem)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |rows: [usize; 2], sizes: [usize; 2], offset: usize, zeros: bool| {
            let x = tensor(&rows, DType::F32)?;
            let mut codes = tensor(&[sizes[0] + offset], DType::I8)?;
            let (mut scales, mut largest) = (tensor(&[sizes[1]], DType::I8)?, tensor(&[1], DType::F32)?);
            let mut of_zeros = tensor(&[16], DType::I8)?;
            let codes = codes.view_mut().slice(0, offset..offset + sizes[0])?;
            let parts = [codes, scales.view_mut(), largest.view_mut()];
            let args = QuantizeWeightArgs {
                zeros: zeros.then(|| of_zeros.view_mut()),
                ..QuantizeWeightArgs::new(x.view(), parts)
            };
            Ok::<String, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        assert_eq!(
            message([17, 64], [2048, 128], 0, false)?,
            "quantize_weight: rows: expected at most 16 rows, as planned, got 17"
        );
        assert_eq!(
            message([16, 64], [1000, 64], 0, false)?,
            "quantize_weight: codes: expected shape [1024], got [1000]"
        );
        assert_eq!(
            message([16, 64], [1024, 60], 0, false)?,
            "quantize_weight: scales: expected shape [64], got [60]"
        );
        let moved = message([16, 64], [1024, 64], 8, false)?;
        let expected = "quantize_weight: codes: expected an address that is a multiple of 16, got 0x";
        assert!(moved.starts_with(expected), "{moved}");
        assert_eq!(
            message([16, 64], [1024, 64], 0, true)?,
            "quantize_weight: zeros: expected none of a symmetric scheme, got some"
        );
    }
    Ok(())
}
