//! The router against its reference: the same experts, unless a choice lies within rounding distance, and their
//! weights.

use abi::ops::moe_router::{MoeRouterVariant, VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::{Rng, Values, any_values, dims, dims_from, stride_padding};
use warpforge::ops::moe_permute;
use warpforge::ops::moe_router::{
    ExpertGroups, MoeRouter, MoeRouterArgs, MoeRouterProblem, MoeRouterStage, OwnExperts, RouterScore,
    RouterWeights, SORT_TOKENS, SortedPairs, reference,
};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, devices_for, every_kernel, fail, floats, on_executors,
    store, through_every_kernel, values,
};

/// Rounding distance: how far sums of scores and biases may be from those of the reference.
const NEAR: f64 = 1e-6;

#[derive(Clone, Debug)]
struct Case {
    problem: MoeRouterProblem,
    has_bias: bool,
    layout: Layout,
    logits: Vec<f64>,
    seed: u64,
}

impl Case {
    /// A warp per token: a key is touched some four times, and each choice waits ten times. To sort, each pair and
    /// expert goes over all pairs.
    fn work(&self) -> usize {
        let MoeRouterProblem { tokens, experts, top_k, sort, .. } = self.problem;
        let sort = sort.map_or(0, |own| tokens * top_k * (tokens * top_k + own.experts) * 4);
        sort + tokens.next_multiple_of(4) * (8 * experts * top_k / 8 + 8 * experts + 32 * 40 * (top_k + 4))
    }

    fn bias(&self) -> Option<Vec<f64>> {
        self.has_bias.then(|| values(Values::Normal, DType::F32, self.problem.experts, self.seed))
    }
}

/// What logits look like.
#[derive(Clone, Copy, Debug)]
enum Logits {
    /// Of one of the testkit's kinds.
    Of(Values),
    /// A few values only, so that there are many ties.
    Ties,
}

fn logits(kind: Logits, dtype: DType, n: usize, seed: u64) -> Vec<f64> {
    let mut rng = Rng::new(seed);
    match kind {
        Logits::Of(kind) => values(kind, dtype, n, seed),
        Logits::Ties => (0..n).map(|_| rng.below(4) as f64 - 2.0).collect(),
    }
}

fn score() -> impl Strategy<Value = RouterScore> {
    prop_oneof![Just(RouterScore::Softmax), Just(RouterScore::Sigmoid)]
}

/// Experts, groups, and experts of a token.
pub fn sizes() -> impl Strategy<Value = (usize, Option<ExpertGroups>, usize)> {
    let flat = dims_from(1, &[32, 64], 160).prop_map(|experts| (experts, None, experts));
    let large = Just((512, None, 512));
    let grouped = (1usize..9, 2usize..17).prop_flat_map(|(num_groups, size)| {
        (1..=num_groups).prop_map(move |top_groups| {
            let groups = ExpertGroups { num_groups, top_groups };
            (num_groups * size, Some(groups), top_groups * size)
        })
    });
    prop_oneof![4 => flat, 1 => large, 3 => grouped].prop_flat_map(|(experts, groups, eligible)| {
        let top_k = prop_oneof![3 => 1..=eligible.min(10), 1 => 1..=eligible.min(32)];
        top_k.prop_map(move |top_k| (experts, groups, top_k))
    })
}

fn case() -> impl Strategy<Value = Case> {
    let kind = prop_oneof![3 => any_values().prop_map(Logits::Of), 1 => Just(Logits::Ties)];
    let options = (
        score(),
        prop_oneof![Just(RouterWeights::Scores), Just(RouterWeights::Normalised)],
        prop_oneof![2 => Just(1.0f32), 1 => Just(1.8f32)],
        floats(),
        any::<bool>(),
    );
    let layout = (stride_padding(), prop_oneof![3 => Just(0usize), 1 => 1usize..9]);
    let sorts = prop_oneof![1 => Just(None), 1 => any::<[prop::sample::Index; 2]>().prop_map(Some)];
    ((floats(), dims(&[4, 8], 21), sizes(), sorts), options, layout, kind, any::<u64>()).prop_map(
        |((dtype, tokens, (experts, groups, top_k), sorts), options, (padding, offset), kind, seed)| {
            let (score, weights, scale, weight_dtype, has_bias) = options;
            let sort = sorts.filter(|_| tokens <= SORT_TOKENS as usize).map(|[first, own]| {
                let first_expert = first.index(experts);
                OwnExperts { first_expert, experts: own.index(experts - first_expert) + 1 }
            });
            let problem = MoeRouterProblem {
                tokens,
                experts,
                top_k,
                dtype,
                score,
                groups,
                weights,
                scale,
                weight_dtype,
                sort,
            };
            let logits = logits(kind, dtype, tokens * experts, seed);
            Case { problem, has_bias, layout: Layout { padding, offset }, logits, seed: !seed }
        },
    )
}

/// Ids and weights, after checking that nothing but them was written.
fn route(
    device: &Device,
    case: &Case,
    variant: Option<&'static MoeRouterVariant>,
) -> Result<(Vec<u32>, Vec<f64>), TestCaseError> {
    let MoeRouterProblem { tokens, experts, top_k, dtype, .. } = case.problem;
    let stream = device.stream().map_err(fail)?;
    let plan = match variant {
        None => MoeRouter::plan(device, case.problem),
        Some(variant) => MoeRouter::plan_with(device, case.problem, variant),
    };
    let plan = plan.map_err(fail)?;
    let logits = Rows::input(&stream, dtype, &case.logits, experts, case.layout).map_err(fail)?;
    let place = Layout::default();
    let bias = case.bias().map(|bias| Rows::input(&stream, DType::F32, &bias, experts, place)).transpose();
    let bias = bias.map_err(fail)?;
    let bias = bias.as_ref().map(|bias| bias.view().reshape(&[experts])).transpose().map_err(fail)?;
    let mut ids = Rows::output(&stream, DType::U32, tokens, top_k, place).map_err(fail)?;
    let mut weights = Rows::output(&stream, DType::F32, tokens, top_k, place).map_err(fail)?;
    let output = |rows, cols| Rows::output(&stream, DType::U32, rows, cols, place).map_err(fail);
    let own = case.problem.sort.unwrap_or(OwnExperts { first_expert: 0, experts: 0 });
    let (mut offsets, mut order, mut positions) =
        (output(1, own.experts + 1)?, output(tokens, top_k)?, output(tokens, top_k)?);
    let sorted = case.problem.sort.map(|own| {
        Ok::<_, Error>(SortedPairs {
            offsets: offsets.view_mut().reshape(&[own.experts + 1])?,
            order: order.view_mut().reshape(&[tokens * top_k])?,
            positions: positions.view_mut(),
        })
    });
    let sorted = sorted.transpose().map_err(fail)?;
    let (to_ids, to_weights) = (ids.view_mut(), weights.view_mut());
    let args = MoeRouterArgs { bias, sorted, ..MoeRouterArgs::new(logits.view(), to_ids, to_weights) };
    plan.run(&stream, args).map_err(fail)?;
    let words = |rows: &Rows| -> Result<Vec<u32>, TestCaseError> {
        Ok(rows.read(&stream)?.into_iter().map(|value| value as u32).collect())
    };
    let ids = words(&ids)?;
    if let Some(OwnExperts { first_expert, experts }) = case.problem.sort {
        let want = moe_permute::reference::moe_permute(
            &ids,
            first_expert..first_expert + experts,
            (1, &vec![0; tokens]),
        );
        let got = (words(&offsets)?, words(&order)?, words(&positions)?);
        prop_assert_eq!(got, want, "{:?} on {:?}", case.problem, device);
    }
    Ok((ids, weights.read(&stream)?))
}

/// The relative error of a weight: those of its score and of the sum, which the exponents magnify.
fn magnitude(logits: &[f64], id: u32, weight: f64, score: RouterScore) -> f64 {
    let finite = logits.iter().copied().filter(|logit| logit.is_finite());
    let max = finite.fold(f64::NEG_INFINITY, f64::max);
    // The difference of two logits is rounded before its exponential is taken.
    let exponent = if score == RouterScore::Softmax { max - logits[id as usize] } else { 0.0 };
    weight.abs() * (1.0 + exponent.abs().min(100.0))
}

fn run(
    device: &Device,
    case: &Case,
    variant: Option<&'static MoeRouterVariant>,
) -> Result<(), TestCaseError> {
    let (ids, weights) = route(device, case, variant)?;
    let MoeRouterProblem { experts, top_k, score, weight_dtype, .. } = case.problem;
    let bias = case.bias();
    let (mut want, mut naive, mut scale) = (Vec::new(), Vec::new(), Vec::new());
    for (token, ids) in ids.chunks_exact(top_k).enumerate() {
        let logits = &case.logits[token * experts..][..experts];
        let choice = reference::choose(logits, bias.as_deref(), &case.problem);
        if choice.margin > NEAR {
            prop_assert_eq!(ids, &choice.ids[..], "token {} on {:?}", token, device);
        }
        let mut seen = vec![false; experts];
        for &id in ids {
            prop_assert!(!std::mem::replace(&mut seen[id as usize], true), "{} twice", id);
        }
        let exact = reference::weights::<f64>(logits, ids, &case.problem, |v| v);
        scale.extend(std::iter::zip(&exact, ids).map(|(w, &id)| magnitude(logits, id, *w, score)));
        want.extend(exact);
        naive.extend(reference::weights::<f32>(logits, ids, &case.problem, store(weight_dtype)));
    }
    // The chain: the exponent, its polynomial, the sum over the experts and that over the chosen.
    let tolerance = Tolerance::new(weight_dtype, Scale::Given(&scale), 16 + experts + top_k);
    check(&format!("{device:?}"), &weights, &want, &naive, &tolerance)
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        let stage = if case.problem.sort.is_some() { MoeRouterStage::Sort } else { MoeRouterStage::Route };
        let fits = |v: &&MoeRouterVariant| v.dtype == case.problem.dtype && v.stage == stage;
        for variant in VARIANTS.iter().filter(fits).filter(|v| wanted(v.entry)) {
            run(device, case, Some(variant))?;
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "moe_router",
        &[|case: &mut Case| (case.problem.tokens, case.logits) = (0, Vec::new())],
        case(),
        Case::work,
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("moe_router", case(), Case::work, run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(256))]

    /// What `plan` chooses, on every device: the experts and weights of the definition, and the same bits everywhere.
    #[test]
    fn planned((case, on) in on_executors(case, Case::work)) {
        let mut first = None;
        for device in &on.devices() {
            run(device, &case, None)?;
            let (ids, weights) = route(device, &case, None)?;
            let weights: Vec<u64> = weights.into_iter().filter(|w| !w.is_nan()).map(f64::to_bits).collect();
            let first = first.get_or_insert_with(|| (ids.clone(), weights.clone()));
            prop_assert_eq!(&*first, &(ids, weights), "{:?}", device);
        }
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_variant((case, on) in on_executors(case, Case::work)) {
        run_variants(&on.cards(), &case, EVERY)?;
    }
}

/// Logits as a model's have no near ties that the property would pass over: the choice is exactly the reference's.
#[test]
fn choices_are_exact() -> Result<(), TestCaseError> {
    let grouped = Some(ExpertGroups { num_groups: 8, top_groups: 3 });
    for (score, has_bias, groups, scale) in [
        (RouterScore::Softmax, false, None, 1.0),
        (RouterScore::Softmax, true, grouped, 1.0),
        (RouterScore::Sigmoid, false, grouped, 2.5),
        (RouterScore::Sigmoid, true, None, 1.8),
        (RouterScore::Sigmoid, true, grouped, 1.8),
    ] {
        let problem = MoeRouterProblem {
            tokens: 12,
            experts: 64,
            top_k: 8,
            dtype: DType::F32,
            score,
            groups,
            weights: RouterWeights::Normalised,
            scale,
            weight_dtype: DType::F32,
            sort: None,
        };
        let logits = values(Values::Normal, DType::F32, 12 * 64, 11);
        let case = Case { problem, has_bias, layout: Layout::default(), logits, seed: 5 };
        let bias = case.bias();
        for logits in case.logits.chunks_exact(64) {
            let margin = reference::choose(logits, bias.as_deref(), &problem).margin;
            assert!(margin > NEAR, "{score:?} {margin}");
        }
        for device in &devices_for(case.work()) {
            run(device, &case, None)?;
        }
    }
    Ok(())
}

/// The documented order of what is equal or not a number.
#[test]
fn ties_and_nan() -> Result<(), TestCaseError> {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let table: [(&[f64], &[u32]); 6] = [
        (&[1.0, 3.0, 3.0, 1.0], &[1, 2, 0]),
        (&[0.0, -0.0, 0.0, -0.0], &[0, 1, 2]),
        (&[nan, 1.0, nan, -inf], &[1, 3, 0]),
        (&[nan, nan, nan, nan], &[0, 1, 2]),
        (&[-inf, inf, -inf, inf], &[1, 3, 0]),
        (&[-1e38, 1e38, 3e38, -3e38], &[2, 1, 0]),
    ];
    for score in [RouterScore::Softmax, RouterScore::Sigmoid] {
        for (logits, want) in table {
            let problem = MoeRouterProblem {
                tokens: 1,
                experts: 4,
                top_k: 3,
                dtype: DType::F32,
                score,
                groups: None,
                weights: RouterWeights::Normalised,
                scale: 1.0,
                weight_dtype: DType::F32,
                sort: None,
            };
            let case =
                Case { problem, has_bias: false, layout: Layout::default(), logits: logits.into(), seed: 0 };
            for device in &devices() {
                let (ids, weights) = route(device, &case, None)?;
                assert_eq!(ids, want, "{score:?} {logits:?}");
                let is_nan = logits.iter().any(|logit| logit.is_nan() || *logit == inf);
                if score == RouterScore::Softmax {
                    assert!(weights.iter().all(|weight| weight.is_nan() == is_nan), "{logits:?} {weights:?}");
                }
            }
        }
    }
    Ok(())
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    let good = MoeRouterProblem {
        tokens: 4,
        experts: 8,
        top_k: 2,
        dtype: DType::F32,
        score: RouterScore::Softmax,
        groups: None,
        weights: RouterWeights::Scores,
        scale: 1.0,
        weight_dtype: DType::F32,
        sort: None,
    };
    for device in &devices() {
        let stream = device.stream()?;
        let plan = MoeRouter::plan(device, good)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |logits: &[usize], bias: &[usize], ids: &[usize], weights: DType| {
            let (logits, bias) = (tensor(logits, DType::F32)?, tensor(bias, DType::F32)?);
            let (mut ids, mut weights) = (tensor(ids, DType::U32)?, tensor(&[4, 2], weights)?);
            let args = MoeRouterArgs::new(logits.view(), ids.view_mut(), weights.view_mut());
            let args = MoeRouterArgs { bias: Some(bias.view()), ..args };
            Ok::<_, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        let f32 = DType::F32;
        assert_eq!(
            message(&[5, 8], &[8], &[5, 2], f32)?,
            "moe_router: logits: expected at most 4 tokens, as planned, got 5"
        );
        assert_eq!(
            message(&[4, 7], &[8], &[4, 2], f32)?,
            "moe_router: logits: expected shape [any, 8], got [4, 7]"
        );
        assert_eq!(message(&[4, 8], &[7], &[4, 2], f32)?, "moe_router: bias: expected shape [8], got [7]");
        assert_eq!(
            message(&[4, 8], &[8], &[3, 2], f32)?,
            "moe_router: ids: expected shape [4, 2], got [3, 2]"
        );
        assert_eq!(
            message(&[4, 8], &[8], &[4, 2], DType::BF16)?,
            "moe_router: weights: expected f32, got bf16"
        );
        let refused = |problem| MoeRouter::supports(device, &problem).unwrap_err().to_string();
        assert_eq!(
            refused(MoeRouterProblem { experts: 4096, ..good }),
            "moe_router: problem: expected 1 to 2048 experts, got 4096"
        );
        assert_eq!(
            refused(MoeRouterProblem { top_k: 9, ..good }),
            "moe_router: problem: expected a top_k of 1 to 8, got 9"
        );
        let groups = Some(ExpertGroups { num_groups: 4, top_groups: 1 });
        assert_eq!(
            refused(MoeRouterProblem { groups, top_k: 3, ..good }),
            "moe_router: problem: expected a top_k of 1 to 2, got 3"
        );
        let groups = Some(ExpertGroups { num_groups: 3, top_groups: 1 });
        assert_eq!(
            refused(MoeRouterProblem { groups, ..good }),
            "moe_router: problem: expected 1 to 32 groups of equal size, at least 2, and 1 to all of them kept, got 1 of 3 \
             groups of 8 experts"
        );
        assert_eq!(
            refused(MoeRouterProblem { dtype: DType::I8, ..good }),
            "moe_router: problem: expected dtype f32, f16 or bf16, got i8"
        );
        assert_eq!(
            refused(MoeRouterProblem { weight_dtype: DType::I8, ..good }),
            "moe_router: problem: expected weight_dtype f32, f16 or bf16, got i8"
        );
        let sort = |first_expert, experts| Some(OwnExperts { first_expert, experts });
        assert_eq!(
            refused(MoeRouterProblem { tokens: 9, sort: sort(0, 8), ..good }),
            "moe_router: problem: expected at most 8 tokens and 1024 experts to sort, got 9 tokens and 8 experts"
        );
        assert_eq!(
            refused(MoeRouterProblem { sort: sort(usize::MAX, 2), ..good }),
            format!(
                "moe_router: problem: expected to sort by some of the 8 experts, got 2 from {} on",
                usize::MAX
            )
        );
        assert_eq!(
            refused(MoeRouterProblem { sort: sort(8, 0), ..good }),
            "moe_router: problem: expected to sort by some of the 8 experts, got 0 from 8 on"
        );
        let sorting = MoeRouter::plan(device, MoeRouterProblem { sort: sort(2, 3), ..good })?;
        let logits = tensor(&[4, 8], f32)?;
        let sorted = |offsets: usize| -> Result<String, Error> {
            let (mut ids, mut weights) = (tensor(&[4, 2], DType::U32)?, tensor(&[4, 2], f32)?);
            let (mut starts, mut order) = (tensor(&[offsets], DType::U32)?, tensor(&[8], DType::U32)?);
            let mut positions = tensor(&[4, 2], DType::U32)?;
            let args = MoeRouterArgs::new(logits.view(), ids.view_mut(), weights.view_mut());
            let (offsets, order) = (starts.view_mut(), order.view_mut());
            let sorted = Some(SortedPairs { offsets, order, positions: positions.view_mut() });
            Ok(sorting.run(&stream, MoeRouterArgs { sorted, ..args }).unwrap_err().to_string())
        };
        assert_eq!(sorted(9)?, "moe_router: offsets: expected shape [4], got [9]");
        let (mut ids, mut weights) = (tensor(&[4, 2], DType::U32)?, tensor(&[4, 2], f32)?);
        let args = MoeRouterArgs::new(logits.view(), ids.view_mut(), weights.view_mut());
        let message = sorting.run(&stream, args).unwrap_err().to_string();
        assert_eq!(message, "moe_router: sorted: expected tensors, as planned, got none");
        assert_eq!(
            refused(MoeRouterProblem { scale: f32::NAN, ..good }),
            "moe_router: problem: expected a finite scale, got NaN"
        );
    }
    Ok(())
}
