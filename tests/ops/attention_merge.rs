//! Attention over two parts of the keys as attention over all of them, against its reference.

use abi::ops::attention_merge::{AttentionMergeVariant, VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::{Rng, Values, dims, dims_from, finite_values, stride_padding};
use warpforge::ops::attention_merge::{AttentionMerge, AttentionMergeArgs, AttentionMergeProblem, reference};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, every_kernel, fail, floats, heads_of, on_executors, store,
    swapped, through_every_kernel, values,
};

#[derive(Clone, Debug)]
struct Case {
    problem: AttentionMergeProblem,
    /// Of a, b and out: gaps, and whether a head's tokens lie together.
    places: [(Layout, bool); 3],
    /// How far the logarithms are apart.
    spread: f64,
    has_lse: bool,
    kind: Values,
    seed: u64,
}

fn place() -> impl Strategy<Value = (Layout, bool)> {
    let layout = (stride_padding(), prop_oneof![5 => Just(0usize), 1 => 1usize..9]);
    (layout.prop_map(|(padding, offset)| Layout { padding, offset }), any::<bool>())
}

fn case() -> impl Strategy<Value = Case> {
    let sizes = (floats(), dims(&[8, 32], 40), 1usize..6, dims_from(1, &[8, 64, 128], 300));
    let places = prop_oneof![place().prop_map(|all| [all; 3]), [place(), place(), place()]];
    let spread = prop_oneof![2 => Just(1.0), 1 => Just(30.0), 1 => Just(300.0)];
    (sizes, places, spread, any::<bool>(), finite_values(), any::<u64>()).prop_map(
        |((dtype, tokens, heads, dim), places, spread, has_lse, kind, seed)| Case {
            problem: AttentionMergeProblem { tokens, heads, dim, dtype },
            places,
            spread,
            has_lse,
            kind,
            seed,
        },
    )
}

impl Case {
    fn work(&self) -> usize {
        let AttentionMergeProblem { tokens, heads, dim, .. } = self.problem;
        8 * tokens * heads * (dim + 20)
    }

    /// Logarithms of each head's tokens, some of parts without keys.
    fn lses(&self, seed: u64) -> Vec<f64> {
        let mut rng = Rng::new(self.seed ^ seed);
        let draw = |_| match rng.below(8) {
            0 => f64::NEG_INFINITY,
            _ => f64::from((self.spread * (2.0 * rng.uniform() - 1.0)) as f32),
        };
        (0..self.problem.heads * self.problem.tokens).map(draw).collect()
    }
}

fn run(
    device: &Device,
    case: &Case,
    variant: Option<&'static AttentionMergeVariant>,
) -> Result<(), TestCaseError> {
    let AttentionMergeProblem { tokens, heads, dim, dtype } = case.problem;
    let (stream, sizes) = (device.stream().map_err(fail)?, [tokens, heads, dim]);
    let plan = match variant {
        None => AttentionMerge::plan(device, case.problem),
        Some(variant) => AttentionMerge::plan_with(device, case.problem, variant),
    };
    let plan = plan.map_err(fail)?;
    // By token, by head, as the reference has them.
    let parts = [1, 2].map(|seed| values(case.kind, dtype, tokens * heads * dim, case.seed ^ seed));
    let lses = [3, 4].map(|seed| case.lses(seed));
    let width = |by_head: bool| if by_head { dim } else { heads * dim };
    let input = |values: &[f64], (layout, by_head): (Layout, bool)| {
        let values = if by_head { swapped(values, sizes) } else { values.to_vec() };
        Rows::input(&stream, dtype, &values, width(by_head), layout).map_err(fail)
    };
    let [a, b] = [input(&parts[0], case.places[0])?, input(&parts[1], case.places[1])?];
    let of_lse = |values: &[f64]| {
        let layout = case.places[0].0;
        // Rows of no elements have no number by their values.
        let rows = match tokens {
            0 => Rows::output(&stream, DType::F32, heads, 0, layout),
            _ => Rows::input(&stream, DType::F32, values, tokens, layout),
        };
        rows.map_err(fail)
    };
    let [a_lse, b_lse] = [of_lse(&lses[0])?, of_lse(&lses[1])?];
    let (layout, by_head) = case.places[2];
    let rows = if by_head { tokens * heads } else { tokens };
    let mut out = Rows::output(&stream, dtype, rows, width(by_head), layout).map_err(fail)?;
    let mut lse = Rows::output(&stream, DType::F32, heads, tokens, layout).map_err(fail)?;
    let given = |rows, place: (Layout, bool)| heads_of(rows, sizes, place.1).map_err(fail);
    let ends = out.view_mut();
    let ends = match by_head {
        true => ends.reshape(&[heads, tokens, dim]).and_then(|out| out.swap_axes(0, 1)),
        false => ends.reshape(&sizes),
    };
    let parts_of =
        [(given(a.view(), case.places[0])?, a_lse.view()), (given(b.view(), case.places[1])?, b_lse.view())];
    let args = AttentionMergeArgs {
        lse: case.has_lse.then(|| lse.view_mut()),
        ..AttentionMergeArgs::new(parts_of, ends.map_err(fail)?)
    };
    plan.run(&stream, args).map_err(fail)?;

    let [by_token_a, by_token_b] = [&lses[0], &lses[1]].map(|lses| swapped(lses, [heads, tokens, 1]));
    let (sides, logarithms) = ([&parts[0][..], &parts[1]], [&by_token_a[..], &by_token_b]);
    let (want, want_lse) = reference::attention_merge::<f64>(sides, logarithms, dim, |value| value);
    let (naive, naive_lse) = reference::attention_merge::<f32>(sides, logarithms, dim, store(dtype));
    let got = out.read(&stream)?;
    let got = if by_head { swapped(&got, [heads, tokens, dim]) } else { got };
    // A weight errs by the rounding of its exponent, so in proportion to that.
    let sized = |part: usize| -> Vec<f64> {
        let row_of = |at: usize| {
            let exponent = logarithms[part][at / dim] - by_token_a[at / dim].max(by_token_b[at / dim]);
            if exponent.is_finite() { 1.0 - exponent } else { 1.0 }
        };
        parts[part].iter().enumerate().map(|(at, value)| value.abs() * row_of(at)).collect()
    };
    let (mut terms, _) =
        reference::attention_merge::<f64>([&sized(0), &sized(1)], logarithms, dim, |value| value);
    // A weight may be off by the smallest number there is, 2^-149; the bound is of some 2^-30 of a term at least.
    for (at, term) in terms.iter_mut().enumerate() {
        *term += (parts[0][at].abs() + parts[1][at].abs()) * 2f64.powi(-149 + 30);
    }
    let what = plan.report().variant;
    let tolerance = Tolerance::new(dtype, Scale::Given(&terms), 8);
    check(what, &got, &want, &naive, &tolerance)?;
    if case.has_lse && tokens * heads > 0 {
        let got = swapped(&lse.read(&stream)?, [heads, tokens, 1]);
        let sizes: Vec<f64> = want_lse.iter().map(|lse| 1.0 + lse.abs()).collect();
        let tolerance = Tolerance::new(DType::F32, Scale::Given(&sizes), 8);
        check(&format!("{what}, lse"), &got, &want_lse, &naive_lse, &tolerance)?;
    }
    Ok(())
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        for variant in VARIANTS.iter().filter(|variant| variant.dtype == case.problem.dtype) {
            if wanted(variant.entry) && AttentionMerge::plan_with(device, case.problem, variant).is_ok() {
                run(device, case, Some(variant))?;
            }
        }
    }
    Ok(())
}

/// No tokens and no heads, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "attention_merge",
        &[|case: &mut Case| case.problem.tokens = 0, |case: &mut Case| case.problem.heads = 0],
        case(),
        |case| 2 * case.work(),
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("attention_merge", case(), |case| 2 * case.work(), run_variants)
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

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = AttentionMergeProblem::new(4, 2, 64, DType::F32);
        let plan = AttentionMerge::plan(device, problem)?;
        let message = |a: [usize; 3], b: [usize; 3], b_lse: ([usize; 2], DType)| {
            let zeros = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
            let (a_of, b_of) = (zeros(&a, DType::F32)?, zeros(&b, DType::F32)?);
            let (a_lse, b_lse) = (zeros(&[2, a[0]], DType::F32)?, zeros(&b_lse.0, b_lse.1)?);
            let mut out = zeros(&[4, 2, 64], DType::F32)?;
            let parts = [(a_of.view(), a_lse.view()), (b_of.view(), b_lse.view())];
            let args = AttentionMergeArgs::new(parts, out.view_mut());
            Ok::<String, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        let lses = ([2, 4], DType::F32);
        assert_eq!(
            message([4, 3, 64], [4, 2, 64], lses)?,
            "attention_merge: a: expected shape [any, 2, 64], got [4, 3, 64]"
        );
        assert_eq!(
            message([5, 2, 64], [5, 2, 64], ([2, 5], DType::F32))?,
            "attention_merge: a: expected at most 4 tokens, as planned, got 5"
        );
        assert_eq!(
            message([4, 2, 64], [3, 2, 64], lses)?,
            "attention_merge: b: expected shape [4, 2, 64], got [3, 2, 64]"
        );
        assert_eq!(
            message([4, 2, 64], [4, 2, 64], ([4, 2], DType::F32))?,
            "attention_merge: b_lse: expected shape [2, 4], got [4, 2]"
        );
        assert_eq!(
            message([4, 2, 64], [4, 2, 64], ([2, 4], DType::F16))?,
            "attention_merge: b_lse: expected f32, got f16"
        );
        let refused = |problem| AttentionMerge::supports(device, &problem).unwrap_err().to_string();
        assert_eq!(
            refused(AttentionMergeProblem { dim: 0, ..problem }),
            "attention_merge: problem: expected a dim of at least 1, got 0"
        );
        assert_eq!(
            refused(AttentionMergeProblem { dtype: DType::U32, ..problem }),
            "attention_merge: problem: expected dtype f32, f16 or bf16, got u32"
        );
    }
    Ok(())
}
