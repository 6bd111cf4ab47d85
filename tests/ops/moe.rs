//! A mixture of experts from its operators: router, sort, grouped products, gated activation, sum.

use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::{Rng, Values};
use warpforge::ops::glu::{self, Activation, Glu, GluArgs, GluProblem};
use warpforge::ops::grouped_matmul::{GroupedMatmul, GroupedMatmulArgs, GroupedMatmulProblem, GroupedRows};
use warpforge::ops::matmul;
use warpforge::ops::moe_combine::{self, MoeCombine, MoeCombineArgs, MoeCombineProblem};
use warpforge::ops::moe_permute::{MoePermute, MoePermuteArgs, MoePermuteProblem};
use warpforge::ops::moe_router::{
    self, MoeRouter, MoeRouterArgs, MoeRouterProblem, RouterScore, RouterWeights,
};
use warpforge::ops::reference::Real;
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{check, fail, floats, on_executors, store, values};

/// How tokens choose.
#[derive(Clone, Copy, Debug)]
enum Routing {
    /// By random logits.
    Spread,
    /// All alike.
    Together,
}

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    tokens: usize,
    hidden: usize,
    intermediate: usize,
    experts: usize,
    top_k: usize,
    score: RouterScore,
    routing: Routing,
    seed: u64,
}

fn case(tokens: impl Strategy<Value = usize>) -> impl Strategy<Value = Case> {
    let score = prop_oneof![Just(RouterScore::Softmax), Just(RouterScore::Sigmoid)];
    let routing = prop_oneof![3 => Just(Routing::Spread), 1 => Just(Routing::Together)];
    let experts = (1usize..24).prop_flat_map(|experts| (Just(experts), 1..=experts.min(6)));
    (floats(), tokens, 16usize..70, 8usize..40, experts, score, routing, any::<u64>()).prop_map(
        |(dtype, tokens, hidden, intermediate, (experts, top_k), score, routing, seed)| Case {
            dtype,
            tokens,
            hidden,
            intermediate,
            experts,
            top_k,
            score,
            routing,
            seed,
        },
    )
}

/// Results whose errors are compared, at least, unless there are none.
const SAMPLE: usize = 512;

impl Case {
    /// Draws of the inputs that make up a sample.
    fn draws(&self) -> usize {
        if self.tokens == 0 { 1 } else { SAMPLE.div_ceil(self.tokens * self.hidden) }
    }

    fn work(&self) -> usize {
        let Case { tokens, hidden, intermediate, experts, top_k, .. } = *self;
        let pairs = tokens * top_k;
        let products = pairs * (2 * intermediate * (1500 + 4 * hidden) + hidden * (1500 + 4 * intermediate));
        // The sort, and blocks that find nothing.
        products + 1024 * 60 + (pairs + experts) * 256 * 60
    }

    fn router(&self) -> MoeRouterProblem {
        let Case { tokens, experts, top_k, score, .. } = *self;
        MoeRouterProblem {
            tokens,
            experts,
            top_k,
            dtype: DType::F32,
            score,
            groups: None,
            weights: RouterWeights::Normalised,
            scale: 1.0,
            weight_dtype: DType::F32,
            sort: None,
        }
    }
}

/// Everything that goes in, exactly.
struct Inputs {
    x: Vec<f64>,
    logits: Vec<f64>,
    /// `[experts, 2 · intermediate, hidden]`: gate rows, then up rows.
    gate_up: Vec<f64>,
    /// `[experts, hidden, intermediate]`.
    down: Vec<f64>,
}

impl Inputs {
    fn of(case: &Case) -> Self {
        let Case { dtype, tokens, hidden, intermediate, experts, routing, seed, .. } = *case;
        let normal = |dtype, n, salt| values(Values::Normal, dtype, n, seed ^ salt);
        let mut logits = normal(DType::F32, tokens * experts, 2);
        if let Routing::Together = routing {
            let first = logits[..experts.min(logits.len())].to_vec();
            logits.chunks_exact_mut(experts).for_each(|row| row.copy_from_slice(&first));
        }
        Inputs {
            x: normal(dtype, tokens * hidden, 1),
            logits,
            gate_up: normal(dtype, experts * 2 * intermediate * hidden, 3),
            down: normal(dtype, experts * hidden * intermediate, 4),
        }
    }

    /// All terms of the sums absolute; the routing stays.
    fn absolute(&self) -> Inputs {
        let absolute = |values: &[f64]| values.iter().map(|value| value.abs()).collect();
        Inputs {
            x: absolute(&self.x),
            logits: self.logits.clone(),
            gate_up: absolute(&self.gate_up),
            down: absolute(&self.down),
        }
    }

    /// The tokens in another order.
    fn permuted(&self, case: &Case, order: &[usize]) -> Inputs {
        let rows = |values: &[f64], width: usize| -> Vec<f64> {
            order.iter().flat_map(|&token| &values[token * width..][..width]).copied().collect()
        };
        Inputs {
            x: rows(&self.x, case.hidden),
            logits: rows(&self.logits, case.experts),
            gate_up: self.gate_up.clone(),
            down: self.down.clone(),
        }
    }
}

/// The formula, token by token and expert by expert.
fn formula<A: Real>(case: &Case, inputs: &Inputs, store: impl Fn(A) -> A) -> Vec<f64> {
    let Case { tokens, hidden, intermediate, experts, top_k, .. } = *case;
    let (mut y, mut weights) = (Vec::new(), Vec::new());
    for token in 0..tokens {
        let logits = &inputs.logits[token * experts..][..experts];
        let ids = moe_router::reference::choose(logits, None, &case.router()).ids;
        weights.extend(moe_router::reference::weights::<A>(logits, &ids, &case.router(), |v| v));
        for expert in ids.into_iter().map(|id| id as usize) {
            let x = &inputs.x[token * hidden..][..hidden];
            let gate_up = &inputs.gate_up[expert * 2 * intermediate * hidden..][..2 * intermediate * hidden];
            let down = &inputs.down[expert * hidden * intermediate..][..hidden * intermediate];
            let inner = matmul::reference::matmul(x, gate_up, None, [1, 2 * intermediate, hidden], &store);
            let (gate, up) = inner.split_at(intermediate);
            let inner = glu::reference::glu(gate, up, Activation::Silu, &store);
            y.extend(matmul::reference::matmul(&inner, down, None, [1, hidden, intermediate], &store));
        }
    }
    let positions: Vec<u32> = (0..(tokens * top_k) as u32).collect();
    let (y, weights, positions) = (&y[..], &weights[..], &positions[..]);
    let terms = moe_combine::reference::Terms {
        top_k,
        cols: hidden,
        y,
        weights,
        positions,
        shared: None,
        gate: None,
        residual: None,
    };
    moe_combine::reference::moe_combine(tokens, &terms, store)
}

/// The same by the operators.
fn layer(device: &Device, case: &Case, inputs: &Inputs) -> Result<Vec<f32>, Error> {
    let Case { dtype, tokens, hidden, intermediate, experts, top_k, .. } = *case;
    let stream = &device.stream()?;
    let pairs = tokens * top_k;
    let upload = |dtype, shape: &[usize], values: &[f64]| {
        Tensor::from_bytes(stream, shape, dtype, &testkit::round::encode(dtype, values))
    };
    let x = upload(dtype, &[tokens, hidden], &inputs.x)?;
    let logits = upload(DType::F32, &[tokens, experts], &inputs.logits)?;
    let gate_up = upload(dtype, &[experts, 2 * intermediate, hidden], &inputs.gate_up)?;
    let down = upload(dtype, &[experts, hidden, intermediate], &inputs.down)?;
    let empty = |shape: &[usize], dtype| Tensor::empty(stream, shape, dtype);
    let (mut ids, mut weights) = (empty(&[tokens, top_k], DType::U32)?, empty(&[tokens, top_k], DType::F32)?);
    let (mut offsets, mut order) = (empty(&[experts + 1], DType::U32)?, empty(&[pairs], DType::U32)?);
    let mut positions = empty(&[tokens, top_k], DType::U32)?;
    let (mut inner, mut gated) =
        (empty(&[pairs, 2 * intermediate], dtype)?, empty(&[pairs, intermediate], dtype)?);
    let (mut y, mut out) = (empty(&[pairs, hidden], dtype)?, empty(&[tokens, hidden], dtype)?);

    let args = MoeRouterArgs::new(logits.view(), ids.view_mut(), weights.view_mut());
    MoeRouter::plan(device, case.router())?.run(stream, args)?;
    let args = MoePermuteArgs::new(ids.view(), offsets.view_mut(), order.view_mut(), positions.view_mut());
    MoePermute::plan(device, MoePermuteProblem::new(tokens, top_k, experts))?.run(stream, args)?;
    let from = GroupedRows::Gathered { fan_out: top_k };
    let first = GroupedMatmulProblem {
        from,
        ..GroupedMatmulProblem::new(pairs, experts, 2 * intermediate, hidden, dtype)
    };
    let args = GroupedMatmulArgs {
        x: x.view(),
        w: gate_up.view().into(),
        offsets: offsets.view(),
        order: Some(order.view()),
        out: inner.view_mut(),
    };
    GroupedMatmul::plan(device, first)?.run(stream, args)?;
    let args = GluArgs {
        gate: inner.view().slice(1, 0..intermediate)?,
        up: Some(inner.view().slice(1, intermediate..2 * intermediate)?),
        out: gated.view_mut(),
    };
    let problem = GluProblem { rows: pairs, cols: intermediate, dtype, activation: Activation::Silu };
    Glu::plan(device, problem)?.run(stream, args)?;
    let from = GroupedRows::Sorted;
    let second = GroupedMatmulProblem {
        from,
        ..GroupedMatmulProblem::new(pairs, experts, hidden, intermediate, dtype)
    };
    let args = GroupedMatmulArgs {
        x: gated.view(),
        w: down.view().into(),
        offsets: offsets.view(),
        order: None,
        out: y.view_mut(),
    };
    GroupedMatmul::plan(device, second)?.run(stream, args)?;
    let args = MoeCombineArgs {
        y: y.view(),
        weights: weights.view(),
        positions: positions.view(),
        shared: None,
        gate: None,
        out: out.view_mut(),
    };
    MoeCombine::plan(device, MoeCombineProblem::new(tokens, top_k, hidden, dtype))?.run(stream, args)?;
    out.to_f32_vec(stream)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(64))]

    /// Over as many draws of the inputs as make up [`SAMPLE`] results: all of a token share the errors of its inner
    /// values, so the largest error of a few tokens may be small by chance.
    #[test]
    fn operators_together_are_the_formula(
        (case, on) in on_executors(|| case(0usize..24), |case| case.draws() * Case::work(case)),
    ) {
        let cases: Vec<Case> =
            (0..case.draws()).map(|draw| Case { seed: case.seed ^ (draw as u64) << 8, ..case.clone() }).collect();
        let inputs: Vec<Inputs> = cases.iter().map(Inputs::of).collect();
        let of_all = |result: &dyn Fn(&Case, &Inputs) -> Vec<f64>| -> Vec<f64> {
            std::iter::zip(&cases, &inputs).flat_map(|(case, inputs)| result(case, inputs)).collect()
        };
        let want = of_all(&|case, inputs| formula::<f64>(case, inputs, |v| v));
        let naive = of_all(&|case, inputs| formula::<f32>(case, inputs, store(case.dtype)));
        // The products of both matrices, the activation, the weights and the sum.
        let roundings = case.hidden + case.intermediate + case.experts + 32;
        // A row of few results may be small as a whole by cancellation.
        let magnitudes = of_all(&|case, inputs| formula::<f64>(case, &inputs.absolute(), |v| v));
        let tolerance = Tolerance::new(case.dtype, Scale::Given(&magnitudes), roundings);
        for device in &on.devices() {
            let mut got: Vec<f64> = Vec::new();
            for (case, inputs) in std::iter::zip(&cases, &inputs) {
                got.extend(layer(device, case, inputs).map_err(fail)?.into_iter().map(f64::from));
            }
            check(&format!("{device:?}"), &got, &want, &naive, &tolerance)?;
        }
    }

    /// Tokens in another order give the same rows in that order, and a token alone its own, bit for bit. Up to 8
    /// tokens, so that the kernels are of one kind and no expert has more than 8 rows.
    #[test]
    fn tokens_do_not_matter_to_one_another(
        (case, on) in on_executors(|| case(1usize..9), |case| 3 * Case::work(case)),
    ) {
        let inputs = Inputs::of(&case);
        let mut order: Vec<usize> = (0..case.tokens).collect();
        let mut rng = Rng::new(case.seed);
        for i in (1..order.len()).rev() {
            order.swap(i, rng.below(i + 1));
        }
        let rows = |values: &[f32], tokens: &[usize]| -> Vec<u32> {
            let row = |&token: &usize| values[token * case.hidden..][..case.hidden].iter().copied();
            tokens.iter().flat_map(row).map(f32::to_bits).collect()
        };
        for device in &on.devices() {
            let straight = layer(device, &case, &inputs).map_err(fail)?;
            let permuted = layer(device, &case, &inputs.permuted(&case, &order)).map_err(fail)?;
            let all: Vec<usize> = (0..case.tokens).collect();
            prop_assert_eq!(rows(&straight, &order), rows(&permuted, &all), "{:?}", device);
            let alone = Case { tokens: 1, ..case.clone() };
            let alone = layer(device, &alone, &inputs.permuted(&case, &order[..1])).map_err(fail)?;
            prop_assert_eq!(rows(&straight, &order[..1]), rows(&alone, &[0]), "{:?}", device);
        }
    }
}
