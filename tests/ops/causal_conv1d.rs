//! The causal convolution against its reference.

use abi::ops::causal_conv1d::{CausalConv1dVariant, VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::{Rng, Values, dims_from, finite_values, stride_padding};
use warpforge::ops::causal_conv1d::{CausalConv1d, CausalConv1dArgs, CausalConv1dProblem, reference};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, every_kernel, fail, floats, layouts, on_executors,
    one_apart, store, through_every_kernel, values,
};

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    channels: usize,
    width: usize,
    has_bias: bool,
    /// Tokens of each sequence.
    lens: Vec<usize>,
    layouts: Layouts,
    kind: Values,
    seed: u64,
}

/// How the tensors lie in memory; weight and bias have no gaps.
#[derive(Clone, Copy, Debug)]
struct Layouts {
    x: Layout,
    weight: Layout,
    bias: Layout,
    state: Layout,
    out: Layout,
}

fn lens() -> impl Strategy<Value = Vec<usize>> {
    let len = prop_oneof![
        3 => proptest::sample::select(&[0usize, 1, 2, 3, 4, 5, 31, 32, 33, 64, 67][..]),
        1 => 0usize..100,
    ];
    proptest::collection::vec(len, 0..6)
}

fn case() -> impl Strategy<Value = Case> {
    let sizes = (floats(), dims_from(1, &[8, 128], 300), 2usize..5, any::<bool>(), lens());
    // Mostly such that pieces of 16 bytes are possible.
    let sizes = sizes.prop_flat_map(|sizes| {
        prop_oneof![1 => Just(sizes.1), 2 => Just(sizes.1.next_multiple_of(8))]
            .prop_map(move |channels| (channels, sizes.clone()))
    });
    let layout = || {
        (stride_padding(), prop_oneof![3 => Just(0usize), 1 => 1usize..9])
            .prop_map(|(padding, offset)| Layout { padding, offset })
    };
    let layouts = layouts(layout).prop_map(|[x, weight, bias, state, out]| {
        let [weight, bias] = [weight, bias].map(|layout| Layout { padding: 0, ..layout });
        Layouts { x, weight, bias, state, out }
    });
    (sizes, layouts, finite_values(), any::<u64>()).prop_map(
        |((channels, (dtype, _, width, has_bias, lens)), layouts, kind, seed)| Case {
            dtype,
            channels,
            width,
            has_bias,
            lens,
            layouts,
            kind,
            seed,
        },
    )
}

impl Case {
    fn tokens(&self) -> usize {
        self.lens.iter().sum()
    }

    fn work(&self) -> usize {
        (3 * self.tokens() + 25 * self.lens.len()) * self.channels.next_multiple_of(32)
    }

    fn problem(&self) -> CausalConv1dProblem {
        let Case { dtype, channels, width, .. } = *self;
        let (tokens, sequences) = (self.tokens(), self.lens.len());
        CausalConv1dProblem { tokens, sequences, channels, width, dtype }
    }
}

fn offsets(lens: &[usize]) -> Vec<u32> {
    let ends = lens.iter().scan(0, |end, &len| {
        *end += len as u32;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// Distinct slots in a random order, of one more than there are sequences.
fn slots(sequences: usize, seed: u64) -> Vec<u32> {
    let mut slots: Vec<u32> = (0..sequences as u32 + 1).collect();
    let mut rng = Rng::new(seed);
    for i in (1..slots.len()).rev() {
        slots.swap(i, rng.below(i + 1));
    }
    slots.truncate(sequences);
    slots
}

/// The inputs of a run.
#[derive(Clone)]
struct Data {
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Option<Vec<f64>>,
    slots: Vec<u32>,
    state: Vec<f64>,
}

impl Data {
    fn new(case: &Case) -> Self {
        let Case { dtype, channels, width, has_bias, kind, seed, .. } = *case;
        let slots = slots(case.lens.len(), seed);
        Data {
            x: values(kind, dtype, case.tokens() * channels, seed),
            weight: values(Values::Normal, dtype, channels * width, seed ^ 1),
            bias: has_bias.then(|| values(kind, dtype, channels, seed ^ 2)),
            state: values(kind, dtype, (slots.len() + 1) * channels * (width - 1), seed ^ 3),
            slots,
        }
    }
}

/// Output and state after a run of sequences of these lengths.
fn run_once(
    device: &Device,
    case: &Case,
    (data, lens): (&Data, &[usize]),
    variant: Option<&'static CausalConv1dVariant>,
) -> Result<(Vec<f64>, Vec<f64>), TestCaseError> {
    let Case { dtype, channels, width, layouts, .. } = *case;
    let problem = case.problem();
    let stream = device.stream().map_err(fail)?;
    let plan = match variant {
        None => CausalConv1d::plan(device, problem),
        Some(variant) => CausalConv1d::plan_with(device, problem, variant),
    };
    let plan = plan.map_err(fail)?;
    let tokens = lens.iter().sum();
    let num_slots = data.state.len() / (channels * (width - 1));
    let x = Rows::input(&stream, dtype, &data.x, channels, layouts.x).map_err(fail)?;
    let weight = Rows::input(&stream, dtype, &data.weight, channels * width, layouts.weight).map_err(fail)?;
    let bias = data.bias.as_ref().map(|bias| Rows::input(&stream, dtype, bias, channels, layouts.bias));
    let bias = bias.transpose().map_err(fail)?;
    let state_cols = channels * (width - 1);
    let mut state = Rows::input(&stream, dtype, &data.state, state_cols, layouts.state).map_err(fail)?;
    let mut out = Rows::output(&stream, dtype, tokens, channels, layouts.out).map_err(fail)?;
    let offsets = Tensor::from_slice(&stream, &[lens.len() + 1], &offsets(lens)).map_err(fail)?;
    let slots = Tensor::from_slice(&stream, &[lens.len()], &data.slots).map_err(fail)?;
    let bias_view = bias.as_ref().map(|bias| bias.view().reshape(&[channels])).transpose().map_err(fail)?;
    let args = CausalConv1dArgs {
        x: x.view(),
        weight: weight.view().reshape(&[channels, width]).map_err(fail)?,
        bias: bias_view,
        offsets: offsets.view(),
        slots: slots.view(),
        state: state.view_mut().reshape(&[num_slots, channels, width - 1]).map_err(fail)?,
        out: out.view_mut(),
    };
    plan.run(&stream, args).map_err(fail)?;
    Ok((out.read(&stream)?, state.read(&stream)?))
}

fn run(
    device: &Device,
    case: &Case,
    variant: Option<&'static CausalConv1dVariant>,
) -> Result<(), TestCaseError> {
    let Case { dtype, channels, width, .. } = *case;
    let data = Data::new(case);
    let (out, state) = run_once(device, case, (&data, &case.lens), variant)?;
    let (mut want, mut naive, mut terms, mut sums) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let absolute = |values: &[f64]| values.iter().map(|value| value.abs()).collect::<Vec<f64>>();
    let mut want_state = data.state.clone();
    let mut from = 0;
    for (&len, &slot) in std::iter::zip(&case.lens, &data.slots) {
        let x = &data.x[from * channels..][..len * channels];
        let state = &mut want_state[slot as usize * channels * (width - 1)..][..channels * (width - 1)];
        let bias = data.bias.as_deref();
        let (rows, _) = reference::causal_conv1d::<f32>(
            x,
            &data.weight,
            bias,
            &mut state.to_vec(),
            channels,
            store(dtype),
        );
        naive.extend(rows);
        // Of sizes, which the activation leaves as they are where they are large.
        let sizes = (absolute(x), absolute(&data.weight), bias.map(absolute), &mut absolute(state));
        let (rows, _) =
            reference::causal_conv1d::<f64>(&sizes.0, &sizes.1, sizes.2.as_deref(), sizes.3, channels, |v| v);
        sums.extend(rows);
        let (rows, scale) = reference::causal_conv1d::<f64>(x, &data.weight, bias, state, channels, |v| v);
        want.extend(rows);
        terms.extend(scale);
        from += len;
    }
    prop_assert_eq!(state, want_state);
    // The sum, then the activation: exponential (4), quotient, product. It makes a zero of a sum that is −∞ on the way.
    let zeros = vec![0.0; want.len()];
    let tolerance = Tolerance {
        on_the_way: Some(&sums),
        activated: Some(&zeros),
        ..Tolerance::new(dtype, Scale::Given(&terms), width + 7)
    };
    let what = variant.map_or("planned", |variant| variant.entry);
    check(what, &out, &want, &naive, &tolerance)
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        for variant in VARIANTS {
            if wanted(variant.entry) && CausalConv1d::plan_with(device, case.problem(), variant).is_ok() {
                run(device, case, Some(variant))?;
            }
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "causal_conv1d",
        &[|case: &mut Case| case.lens.clear(), |case: &mut Case| case.lens.fill(0)],
        case(),
        Case::work,
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("causal_conv1d", case(), Case::work, run_variants)
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

    /// Sequences give the same bits packed together, alone, and cut into runs anywhere.
    #[test]
    fn cuts_and_packing_do_not_show(
        ((case, cut), on) in on_executors(|| (case(), 0.0f64..=1.0), |(case, _)| 3 * case.work()),
    ) {
        let Case { channels, width, .. } = case;
        let data = Data::new(&case);
        for device in &on.devices() {
            let (out, state) = run_once(device, &case, (&data, &case.lens), None)?;
            let mut from = 0;
            let mut part = Data { state: data.state.clone(), ..data.clone() };
            for (&len, &slot) in std::iter::zip(&case.lens, &data.slots) {
                part.slots = vec![slot];
                let first = (len as f64 * cut) as usize;
                for range in [from..from + first, from + first..from + len] {
                    part.x = data.x[range.start * channels..range.end * channels].to_vec();
                    let (rows, next) = run_once(device, &case, (&part, &[range.len()]), None)?;
                    part.state = next;
                    // NaNs of sums that overflow are alike.
                    let bits = |values: &[f64]| -> Vec<u64> {
                        values.iter().map(|v| if v.is_nan() { u64::MAX } else { v.to_bits() }).collect()
                    };
                    let together = &out[range.start * channels..range.end * channels];
                    prop_assert_eq!(bits(&rows), bits(together));
                }
                from += len;
            }
            prop_assert_eq!(&part.state, &state, "{} taps", width);
        }
    }
}

/// One tensor's own stride; and one that cannot be read in pieces of 16 bytes is enough for the kernel that reads none.
#[test]
fn one_tensor_apart() -> Result<(), TestCaseError> {
    for [x, weight, bias, state, out] in one_apart() {
        let [weight, bias] = [weight, bias].map(|layout| Layout { padding: 0, ..layout });
        let case = Case {
            dtype: DType::BF16,
            channels: 16,
            width: 4,
            has_bias: true,
            lens: vec![2, 5],
            layouts: Layouts { x, weight, bias, state, out },
            kind: Values::Normal,
            seed: 3,
        };
        for device in &devices() {
            run(device, &case, None)?;
        }
    }
    Ok(())
}

/// Tokens that no sequence has, and sequences without a slot, are left as they are.
#[test]
fn what_belongs_to_nobody_is_left() -> Result<(), TestCaseError> {
    let (channels, width) = (16, 4);
    for device in &devices() {
        let stream = device.stream()?;
        let problem = CausalConv1dProblem { tokens: 8, sequences: 2, channels, width, dtype: DType::F32 };
        let x = values(Values::Normal, DType::F32, 8 * channels, 1);
        let x_rows = Rows::input(&stream, DType::F32, &x, channels, Layout::default())?;
        let before = vec![7.0; 8 * channels];
        let mut out = Rows::input(&stream, DType::F32, &before, channels, Layout::default())?;
        let weight = Tensor::from_slice(&stream, &[channels, width], &vec![1.0f32; channels * width])?;
        let mut state = Tensor::zeros(&stream, &[1, channels, width - 1], DType::F32)?;
        // Tokens 1 and 2 are sequence 0's, 3 to 5 sequence 1's, which has no slot; the last offset is beyond the
        // tokens.
        let offsets = Tensor::from_slice(&stream, &[3], &[1u32, 3, 6])?;
        let slots = Tensor::from_slice(&stream, &[2], &[0u32, 1])?;
        let args = CausalConv1dArgs {
            x: x_rows.view(),
            weight: weight.view(),
            bias: None,
            offsets: offsets.view(),
            slots: slots.view(),
            state: state.view_mut(),
            out: out.view_mut(),
        };
        CausalConv1d::plan(device, problem)?.run(&stream, args)?;
        let got = out.read(&stream)?;
        for (token, row) in got.chunks(channels).enumerate() {
            assert_eq!(
                row.iter().all(|&value| value == 7.0),
                !(1..3).contains(&token),
                "{token}, {device:?}"
            );
        }
    }
    Ok(())
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem =
            CausalConv1dProblem { tokens: 4, sequences: 2, channels: 8, width: 4, dtype: DType::F32 };
        let plan = CausalConv1d::plan(device, problem)?;
        let zeros = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message =
            |tokens: usize, sequences: usize, offsets: usize, width: usize| -> Result<String, Error> {
                let (x, weight) = (zeros(&[tokens, 8], DType::F32)?, zeros(&[8, width], DType::F32)?);
                let (offsets, slots) = (zeros(&[offsets], DType::U32)?, zeros(&[sequences], DType::U32)?);
                let mut state = zeros(&[2, 8, width - 1], DType::F32)?;
                let mut out = zeros(&[tokens, 8], DType::F32)?;
                let args = CausalConv1dArgs {
                    x: x.view(),
                    weight: weight.view(),
                    bias: None,
                    offsets: offsets.view(),
                    slots: slots.view(),
                    state: state.view_mut(),
                    out: out.view_mut(),
                };
                Ok(plan.run(&stream, args).unwrap_err().to_string())
            };
        assert_eq!(message(5, 2, 3, 4)?, "causal_conv1d: x: expected at most 4 tokens, as planned, got 5");
        assert_eq!(
            message(4, 3, 4, 4)?,
            "causal_conv1d: slots: expected at most 2 sequences, as planned, got 3"
        );
        assert_eq!(message(4, 2, 2, 4)?, "causal_conv1d: offsets: expected shape [3], got [2]");
        assert_eq!(message(4, 2, 3, 3)?, "causal_conv1d: weight: expected shape [8, 4], got [8, 3]");
        for (wrong, expected) in [
            (CausalConv1dProblem { width: 5, ..problem }, "2 to 4 taps, got 5"),
            (CausalConv1dProblem { channels: 0, ..problem }, "channels at least 1 and below 2^28, got 0"),
            (
                CausalConv1dProblem { channels: 1 << 28, ..problem },
                "channels at least 1 and below 2^28, got 268435456",
            ),
            (CausalConv1dProblem { dtype: DType::I8, ..problem }, "dtype f32, f16 or bf16, got i8"),
        ] {
            assert_eq!(
                CausalConv1d::supports(device, &wrong).unwrap_err().to_string(),
                format!("causal_conv1d: problem: expected {expected}")
            );
        }
    }
    Ok(())
}
