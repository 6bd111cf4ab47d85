//! The experts of few tokens against their reference.

mod packed;

use abi::ops::fused_moe::{FusedMoeTile, VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::{Rng, Values, dims, dims_from, stride_padding};
use warpforge::ops::Store;
use warpforge::ops::fused_moe::reference::{self, Terms};
use warpforge::ops::fused_moe::{FusedMoe, FusedMoeArgs, FusedMoeProblem};
use warpforge::ops::glu::Activation;
use warpforge::ops::matmul::{MatmulB, RowNorm};
use warpforge::ops::moe_router::{
    ExpertGroups, MoeRouter, MoeRouterArgs, MoeRouterProblem, OwnExperts, RouterScore, RouterWeights,
};
use warpforge::ops::rmsnorm::NormWeight;
use warpforge::{DType, Device, Error, Stream, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, every_kernel_of, fail, floats, on_executors, store,
    through_kernels, values,
};

/// Rows of x and out, of gate and up, of down, of the shared expert's, and of its gate.
const LAYOUTS: usize = 6;

#[derive(Clone, Debug)]
struct Case {
    problem: FusedMoeProblem,
    gated: bool,
    in_place: bool,
    /// How experts are chosen, if they can be.
    router: Option<Router>,
    layouts: [Layout; LAYOUTS],
    /// Of x.
    kind: Values,
    seed: u64,
}

/// How experts are chosen.
#[derive(Clone, Copy, Debug)]
struct Router {
    score: RouterScore,
    groups: Option<ExpertGroups>,
    weights: RouterWeights,
    scale: f32,
    weight_dtype: DType,
    has_bias: bool,
    has_ties: bool,
}

fn router() -> impl Strategy<Value = Router> {
    let score = prop_oneof![Just(RouterScore::Softmax), Just(RouterScore::Sigmoid)];
    let weights = prop_oneof![Just(RouterWeights::Scores), Just(RouterWeights::Normalised)];
    let scale = prop_oneof![Just(1.0f32), Just(1.8f32)];
    (score, weights, scale, floats(), any::<[bool; 2]>()).prop_map(
        |(score, weights, scale, weight_dtype, [has_bias, has_ties])| Router {
            score,
            groups: None,
            weights,
            scale,
            weight_dtype,
            has_bias,
            has_ties,
        },
    )
}

impl Case {
    /// The choice of experts, where there can be one.
    fn choice(&self) -> Option<MoeRouterProblem> {
        let FusedMoeProblem { tokens, top_k, experts, inner, .. } = self.problem;
        let router = self.router.filter(|_| (1..=experts).contains(&top_k) && inner > 0)?;
        let Router { score, groups, weights, scale, weight_dtype, .. } = router;
        let problem = MoeRouterProblem::new(tokens, experts, top_k, DType::F32);
        Some(MoeRouterProblem { score, groups, weights, scale, weight_dtype, ..problem })
    }

    fn work(&self) -> usize {
        let FusedMoeProblem { tokens, top_k, experts, hidden, inner, .. } = self.problem;
        let once = 12 * tokens * (top_k + 1) * (inner + 8) * (hidden + 8) + 256 * 20;
        // Once more with given experts; each block chooses.
        let choice = tokens * (top_k + 1) * (inner / 8 + 1) * (8 * experts * top_k / 8 + 8 * experts + 2000);
        if self.choice().is_some() { 2 * once + choice } else { once }
    }
}

fn layout() -> impl Strategy<Value = Layout> {
    let offset = prop_oneof![5 => Just(0usize), 1 => 1usize..9];
    (stride_padding(), offset).prop_map(|(padding, offset)| Layout { padding, offset })
}

fn case() -> impl Strategy<Value = Case> {
    let sizes =
        (dims(&[2, 4], 5), 0usize..6, 1usize..6, dims_from(1, &[8, 64, 256], 300), dims(&[8, 64, 256], 300));
    let activations = [Activation::Silu, Activation::GeluTanh, Activation::GeluErf];
    let norm = (prop_oneof![Just(NormWeight::Plain), Just(NormWeight::ZeroCentred)], any::<bool>())
        .prop_map(|(weight, is_there)| is_there.then_some(RowNorm { eps: 1e-6, weight }));
    let options = (prop::sample::select(activations.to_vec()), norm, any::<[bool; 4]>());
    let problem = (floats(), sizes, options).prop_map(
        |(
            dtype,
            (tokens, top_k, experts, hidden, inner),
            (activation, norm, [shared, adds, gated, in_place]),
        )| {
            let store = if adds { Store::Add } else { Store::Replace };
            let problem = FusedMoeProblem::new(tokens, [top_k, experts], [hidden, inner], dtype);
            (FusedMoeProblem { activation, shared, norm, store, ..problem }, gated, in_place)
        },
    );
    // The same layout for all half of the time, which is whole pieces more often than not.
    let layouts = prop_oneof![
        layout().prop_map(|all| [all; LAYOUTS]),
        prop::collection::vec(layout(), LAYOUTS).prop_map(|all| all.try_into().unwrap()),
    ];
    let kinds = prop_oneof![3 => Just(Values::Normal), 1 => Just(Values::Huge), 1 => Just(Values::Tiny)];
    let routers = prop::option::of(router());
    (problem, routers, layouts, kinds, any::<u64>()).prop_map(
        |((problem, gated, in_place), router, layouts, kind, seed)| {
            // What is not normed would leave the type on the way.
            let kind = if problem.norm.is_some() { kind } else { Values::Normal };
            Case { problem, gated: gated && problem.shared, in_place, router, layouts, kind, seed }
        },
    )
}

/// Small experts, many of them and in groups.
fn case_of_many() -> impl Strategy<Value = Case> {
    let sizes = (1usize..40, 1usize..12);
    (case(), router(), crate::moe_router::sizes(), sizes).prop_map(
        |(case, router, (experts, groups, top_k), (hidden, inner))| {
            let problem = FusedMoeProblem { experts, top_k, hidden, inner, ..case.problem };
            Case { problem, router: Some(Router { groups, ..router }), ..case }
        },
    )
}

/// The inputs, exactly.
struct Inputs {
    x: Vec<f64>,
    gain: Vec<f64>,
    ids: Vec<u32>,
    weights: Vec<f64>,
    logits: Vec<f64>,
    bias: Vec<f64>,
    gate_up: Vec<f64>,
    down: Vec<f64>,
    shared: [Vec<f64>; 2],
    gate: Vec<f64>,
    out: Vec<f64>,
}

impl Inputs {
    fn of(case: &Case) -> Self {
        let FusedMoeProblem { tokens, top_k, experts, hidden, inner, dtype, .. } = case.problem;
        let (normal, mut rng) = (Values::Normal, Rng::new(case.seed ^ 9));
        let of = |dtype, n, salt: u64| values(normal, dtype, n, case.seed ^ salt);
        let x = values(case.kind, dtype, tokens * hidden, case.seed ^ 1);
        Inputs {
            gain: of(dtype, hidden, 2),
            // Some next to those that there are, and far from them.
            ids: (0..tokens * top_k)
                .map(|_| match rng.below(16) {
                    0 => experts as u32,
                    1 => u32::MAX,
                    _ => rng.below(experts) as u32,
                })
                .collect(),
            weights: of(DType::F32, tokens * top_k, 3),
            logits: match case.router {
                Some(Router { has_ties: true, .. }) => {
                    (0..tokens * experts).map(|_| rng.below(4) as f64 - 2.0).collect()
                }
                _ => of(DType::F32, tokens * experts, 11),
            },
            bias: of(DType::F32, experts, 12),
            gate_up: of(dtype, experts * 2 * inner * hidden, 4),
            down: of(dtype, experts * hidden * inner, 5),
            shared: [of(dtype, 2 * inner * hidden, 6), of(dtype, hidden * inner, 7)],
            gate: of(DType::F32, tokens, 8),
            out: if case.in_place { x.clone() } else { of(dtype, tokens * hidden, 10) },
            x,
        }
    }

    /// With the experts that `MoeRouter` chooses, and their weights, where the case has them chosen.
    fn routed(mut self, device: &Device, case: &Case) -> Result<Self, TestCaseError> {
        let Some(problem) = case.choice() else { return Ok(self) };
        let MoeRouterProblem { tokens, experts, top_k, .. } = problem;
        let stream = device.stream().map_err(fail)?;
        let floats = |shape: &[usize], values: &[f64]| {
            let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
            Tensor::from_slice(&stream, shape, &values).map_err(fail)
        };
        let (logits, bias) = (floats(&[tokens, experts], &self.logits)?, floats(&[experts], &self.bias)?);
        let mut ids = Tensor::empty(&stream, &[tokens, top_k], DType::U32).map_err(fail)?;
        let mut weights = Tensor::empty(&stream, &[tokens, top_k], DType::F32).map_err(fail)?;
        let args = MoeRouterArgs {
            bias: case.router.is_some_and(|router| router.has_bias).then(|| bias.view()),
            ..MoeRouterArgs::new(logits.view(), ids.view_mut(), weights.view_mut())
        };
        MoeRouter::plan(device, problem).and_then(|plan| plan.run(&stream, args)).map_err(fail)?;
        self.ids = ids.to_vec(&stream).map_err(fail)?;
        let weights: Vec<f32> = weights.to_vec(&stream).map_err(fail)?;
        self.weights = weights.into_iter().map(f64::from).collect();
        Ok(self)
    }

    fn terms<'a>(&'a self, case: &Case, x: &'a [f64]) -> Terms<'a> {
        let FusedMoeProblem { top_k, hidden, inner, activation, shared, store, .. } = case.problem;
        Terms {
            top_k,
            hidden,
            inner,
            activation: Some(activation),
            x,
            ids: &self.ids,
            weights: &self.weights,
            gate_up: &self.gate_up,
            down: &self.down,
            shared: shared.then_some([&self.shared[0], &self.shared[1]]),
            gate: case.gated.then_some(&self.gate),
            residual: (store == Store::Add).then_some(&self.out),
        }
    }

    /// Those of one token alone.
    fn of_token(self, token: usize, problem: &FusedMoeProblem) -> Inputs {
        let FusedMoeProblem { top_k, experts, hidden, .. } = *problem;
        let of = |values: &[f64], cols: usize| values[token * cols..][..cols].to_vec();
        Inputs {
            x: of(&self.x, hidden),
            ids: self.ids[token * top_k..][..top_k].to_vec(),
            weights: of(&self.weights, top_k),
            logits: of(&self.logits, experts),
            gate: of(&self.gate, 1),
            out: of(&self.out, hidden),
            ..self
        }
    }

    /// All sizes, but for those that choose.
    fn absolute(&self) -> Inputs {
        let absolute = |values: &[f64]| values.iter().map(|value| value.abs()).collect::<Vec<f64>>();
        Inputs {
            x: Vec::new(),
            gain: Vec::new(),
            ids: self.ids.clone(),
            weights: absolute(&self.weights),
            logits: Vec::new(),
            bias: Vec::new(),
            gate_up: absolute(&self.gate_up),
            down: absolute(&self.down),
            shared: [absolute(&self.shared[0]), absolute(&self.shared[1])],
            gate: self.gate.clone(),
            out: absolute(&self.out),
        }
    }
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn run(device: &Device, case: &Case, tile: Option<FusedMoeTile>) -> Result<(), TestCaseError> {
    let inputs = Inputs::of(case).routed(device, case)?;
    let got = sum(device, case, tile, &inputs)?;
    expect(&format!("{device:?}, {tile:?}"), case, &inputs, &inputs.absolute(), &got)
}

/// What came against the reference, of inputs and of the sizes of all terms.
fn expect(
    what: &str,
    case: &Case,
    inputs: &Inputs,
    absolute: &Inputs,
    got: &[f64],
) -> Result<(), TestCaseError> {
    let FusedMoeProblem { tokens, top_k, hidden, inner, dtype, norm, .. } = case.problem;
    let normed = norm.map(|RowNorm { eps, weight }| {
        let how = [f64::from(eps), f64::from(u8::from(weight == NormWeight::ZeroCentred))];
        let naive = reference::normed::<f32>(&inputs.x, &inputs.gain, how, store(dtype));
        [reference::normed::<f64>(&inputs.x, &inputs.gain, how, |v| v), naive]
    });
    let [x, naive_x] = normed.as_ref().map_or([&inputs.x; 2], |[x, naive]| [x, naive]);
    let want = reference::fused_moe::<f64>(tokens, &inputs.terms(case, x), |v| v);
    let naive = reference::fused_moe::<f32>(tokens, &inputs.terms(case, naive_x), store(dtype));
    let sizes: Vec<f64> = x.iter().map(|value| value.abs()).collect();
    let terms = Terms { activation: None, ..absolute.terms(case, &sizes) };
    let scale = reference::fused_moe::<f64>(tokens, &terms, |v| v);
    let roundings = hidden + inner + 2 * top_k + 40;
    // x behind the norm, and what is between the products, whose errors all columns of a token share.
    let tolerance = Tolerance {
        independent: tokens * (top_k + usize::from(case.problem.shared)) * inner,
        terms: (dtype != DType::F32).then_some(dtype),
        ..Tolerance::new(dtype, Scale::Given(&scale), roundings)
    };
    check(what, got, &want, &naive, &tolerance)
}

fn sum(
    device: &Device,
    case: &Case,
    tile: Option<FusedMoeTile>,
    inputs: &Inputs,
) -> Result<Vec<f64>, TestCaseError> {
    let FusedMoeProblem { experts, hidden, inner, dtype, .. } = case.problem;
    let stream = device.stream().map_err(fail)?;
    let rows = |dtype, values: &[f64], cols, layout: usize| {
        Rows::input(&stream, dtype, values, cols, case.layouts[layout]).map_err(fail)
    };
    let gate_up = rows(dtype, &inputs.gate_up, hidden, 2)?;
    let empty = Tensor::zeros(&stream, &[experts, hidden, 0], dtype).map_err(fail)?;
    let down = (inner > 0).then(|| rows(dtype, &inputs.down, inner, 3)).transpose()?;
    let down = match &down {
        Some(down) => down.view().reshape(&[experts, hidden, inner]).map_err(fail)?,
        None => empty.view(),
    };
    let shared_gate_up = rows(dtype, &inputs.shared[0], hidden, 4)?;
    let shared_down = (inner > 0).then(|| rows(dtype, &inputs.shared[1], inner, 4)).transpose()?;
    let no_down = empty.view().slice(0, 0..1).and_then(|one| one.reshape(&[hidden, 0])).map_err(fail)?;
    let shared_down = shared_down.as_ref().map_or(no_down, Rows::view);
    let gate_up = gate_up.view().reshape(&[experts, 2 * inner, hidden]).map_err(fail)?;
    let shared = [shared_gate_up.view().into(), shared_down.into()];
    apply(&stream, case, tile, inputs, ([gate_up.into(), down.into()], shared))
}

/// What a plan makes of the inputs and these weights: gate and up, and down, of the experts and of the shared one.
/// Where it chooses experts itself, it has the bits of one that they are given.
fn apply(
    stream: &Stream,
    case: &Case,
    tile: Option<FusedMoeTile>,
    inputs: &Inputs,
    weights: ([MatmulB<'_>; 2], [MatmulB<'_>; 2]),
) -> Result<Vec<f64>, TestCaseError> {
    let given = apply_with(stream, case, (tile, None), inputs, weights)?;
    if let Some(router) = case.choice() {
        let chosen = apply_with(stream, case, (tile, Some(router)), inputs, weights)?;
        prop_assert_eq!(bits(&chosen), bits(&given), "{:?}, {:?}: chosen and given experts", stream, tile);
    }
    Ok(given)
}

fn apply_with(
    stream: &Stream,
    case: &Case,
    (tile, router): (Option<FusedMoeTile>, Option<MoeRouterProblem>),
    inputs: &Inputs,
    (experts, [shared_gate_up, shared_down]): ([MatmulB<'_>; 2], [MatmulB<'_>; 2]),
) -> Result<Vec<f64>, TestCaseError> {
    let problem = FusedMoeProblem { router, ..case.problem };
    let FusedMoeProblem { tokens, top_k, hidden, dtype, shared, norm, .. } = problem;
    let device = stream.device();
    let plan = match tile {
        None => FusedMoe::plan(device, problem),
        Some(tile) => FusedMoe::plan_with(device, problem, tile),
    };
    let plan = plan.map_err(fail)?;
    let rows = |dtype, values: &[f64], cols, layout: usize| {
        Rows::input(stream, dtype, values, cols, case.layouts[layout]).map_err(fail)
    };
    let x = rows(dtype, &inputs.x, hidden, 0)?;
    let gain = rows(dtype, &inputs.gain, hidden, 0)?;
    // Rows cannot hold rows of nothing.
    let weights: Vec<f32> = inputs.weights.iter().map(|&weight| weight as f32).collect();
    let weights = Tensor::from_slice(stream, &[tokens, top_k], &weights).map_err(fail)?;
    let ids = Tensor::from_slice(stream, &[tokens, top_k], &inputs.ids).map_err(fail)?;
    let logits = rows(DType::F32, &inputs.logits, problem.experts, 5)?;
    let bias = rows(DType::F32, &inputs.bias, problem.experts, 5)?;
    let gate = rows(DType::F32, &inputs.gate, 1, 5)?;
    let mut out = match problem.store {
        Store::Add => rows(dtype, &inputs.out, hidden, 1)?,
        Store::Replace if case.in_place => rows(dtype, &inputs.out, hidden, 1)?,
        Store::Replace => Rows::output(stream, dtype, tokens, hidden, case.layouts[1]).map_err(fail)?,
    };
    let args = match router {
        None => FusedMoeArgs::new([ids.view(), weights.view()], experts, out.view_mut()),
        Some(_) => FusedMoeArgs::routed(logits.view(), experts, out.view_mut()),
    };
    let has_bias = router.is_some() && case.router.is_some_and(|router| router.has_bias);
    let args = FusedMoeArgs {
        x: (!case.in_place).then(|| x.view()),
        gain: norm.map(|_| gain.view().reshape(&[hidden])).transpose().map_err(fail)?,
        bias: has_bias.then(|| bias.view().reshape(&[problem.experts])).transpose().map_err(fail)?,
        shared_gate_up: shared.then_some(shared_gate_up),
        shared_down: shared.then_some(shared_down),
        gate: case.gated.then(|| gate.view()),
        ..args
    };
    plan.run(stream, args).map_err(fail)?;
    out.read(stream)
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        for tile in [FusedMoeTile::Pieces, FusedMoeTile::Elements] {
            let mut of_tile = VARIANTS.iter().filter(|variant| variant.tile == tile);
            if of_tile.any(|variant| variant.dtype == case.problem.dtype && wanted(variant.entry))
                && FusedMoe::plan_with(device, case.problem, tile).is_ok()
            {
                run(device, case, Some(tile))?;
            }
        }
    }
    Ok(())
}

/// Kernels of plain matrices.
fn plain_entries() -> impl Iterator<Item = &'static str> {
    abi::ops::entries("fused_moe").filter(|entry| !entry.contains("packed"))
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_kernels(
        plain_entries,
        &[|case: &mut Case| case.problem.tokens = 0, |case: &mut Case| case.problem.top_k = 0],
        case(),
        Case::work,
        run_variants,
    )?;
    packed::nothing()
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel_of(plain_entries(), case(), Case::work, run_variants)
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
    fn every_variant((case, on) in on_executors(case, Case::work)) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// Experts that are chosen of many, perhaps in groups.
    #[test]
    fn of_many((case, on) in on_executors(case_of_many, Case::work)) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// A token has the same bits alone as among others.
    #[test]
    fn tokens_are_apart((case, on) in on_executors(case, |case| 2 * case.work())) {
        let FusedMoeProblem { tokens, hidden, .. } = case.problem;
        for device in &on.devices() {
            let inputs = Inputs::of(&case).routed(device, &case)?;
            let all = sum(device, &case, None, &inputs)?;
            let Some(last) = tokens.checked_sub(1) else { continue };
            let alone = inputs.of_token(last, &case.problem);
            let one = Case { problem: FusedMoeProblem { tokens: 1, ..case.problem }, ..case.clone() };
            prop_assert_eq!(
                bits(&sum(device, &one, None, &alone)?),
                bits(&all[last * hidden..]),
                "{:?}",
                device
            );
        }
    }
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    let (dtype, norm) = (DType::BF16, RowNorm { eps: 1e-6, weight: NormWeight::Plain });
    let problem = FusedMoeProblem::new(4, [2, 3], [16, 8], dtype);
    for device in &devices() {
        let refused =
            |problem: FusedMoeProblem| FusedMoe::supports(device, &problem).unwrap_err().to_string();
        assert_eq!(
            refused(FusedMoeProblem { dtype: DType::I8, ..problem }),
            "fused_moe: problem: expected dtype f32, f16 or bf16, got i8"
        );
        assert_eq!(
            refused(FusedMoeProblem { activation: Activation::Sigmoid, ..problem }),
            "fused_moe: problem: expected SiLU or a GELU as the activation, got sigmoid"
        );
        assert_eq!(
            refused(FusedMoeProblem { norm: Some(RowNorm { eps: -1.0, ..norm }), ..problem }),
            "fused_moe: problem: expected a finite eps of at least 0, got -1"
        );
        let router = MoeRouterProblem::new(4, 3, 2, DType::F32);
        assert_eq!(
            refused(FusedMoeProblem { router: Some(MoeRouterProblem { top_k: 0, ..router }), ..problem }),
            "moe_router: problem: expected a top_k of 1 to 3, got 0"
        );
        for wrong in [
            MoeRouterProblem { tokens: 3, ..router },
            MoeRouterProblem { experts: 4, ..router },
            MoeRouterProblem { top_k: 1, ..router },
            MoeRouterProblem { dtype: DType::BF16, ..router },
            MoeRouterProblem { sort: Some(OwnExperts { first_expert: 0, experts: 3 }), ..router },
        ] {
            let expected = "fused_moe: problem: expected a router of the same tokens, experts and top_k, from f32 \
                            and without a sort, and an inner of at least 1, got";
            let message = refused(FusedMoeProblem { router: Some(wrong), ..problem });
            assert!(message.starts_with(expected), "{message}");
        }
        if device.limits().is_some() {
            let many = FusedMoeProblem { top_k: 65, experts: 128, ..problem };
            assert_eq!(
                refused(many),
                "fused_moe: problem: expected at most 64 experts of a token on a card, the shared one among them, got 65"
            );
        }
        let stream = device.stream()?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |problem, shapes: [&[usize]; 4], gain: Option<&[usize]>, gate: Option<&[usize]>| {
            let plan = FusedMoe::plan(device, problem)?;
            let [out, ids, gate_up, down] = shapes;
            let (mut out, ids, weights) =
                (tensor(out, dtype)?, tensor(ids, DType::U32)?, tensor(&[4, 2], DType::F32)?);
            let (gate_up, down) = (tensor(gate_up, dtype)?, tensor(down, dtype)?);
            let gain = gain.map(|shape| tensor(shape, dtype)).transpose()?;
            let gate = gate.map(|shape| tensor(shape, DType::F32)).transpose()?;
            let args = FusedMoeArgs {
                gain: gain.as_ref().map(Tensor::view),
                gate: gate.as_ref().map(Tensor::view),
                ..FusedMoeArgs::new(
                    [ids.view(), weights.view()],
                    [gate_up.view().into(), down.view().into()],
                    out.view_mut(),
                )
            };
            Ok::<_, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        let (out, ids, gate_up, down): (&[usize], &[usize], &[usize], &[usize]) =
            (&[4, 16], &[4, 2], &[3, 16, 16], &[3, 16, 8]);
        assert_eq!(
            message(problem, [&[5, 16], ids, gate_up, down], None, None)?,
            "fused_moe: out: expected at most 4 tokens, as planned, got 5"
        );
        assert_eq!(
            message(problem, [out, &[4, 3], gate_up, down], None, None)?,
            "fused_moe: ids: expected shape [4, 2], got [4, 3]"
        );
        assert_eq!(
            message(problem, [out, ids, &[3, 8, 16], down], None, None)?,
            "fused_moe: gate_up: expected shape [3, 16, 16], got [3, 8, 16]"
        );
        assert_eq!(
            message(problem, [out, ids, gate_up, &[2, 16, 8]], None, None)?,
            "fused_moe: down: expected shape [3, 16, 8], got [2, 16, 8]"
        );
        assert_eq!(
            message(problem, [out, ids, gate_up, down], Some(&[16]), None)?,
            "fused_moe: gain: expected none, as planned, got a tensor"
        );
        assert_eq!(
            message(problem, [out, ids, gate_up, down], None, Some(&[4, 1]))?,
            "fused_moe: gate: expected none without a shared expert, got a tensor"
        );
        let routed = FusedMoeProblem { router: Some(router), ..problem };
        assert_eq!(
            message(routed, [out, ids, gate_up, down], None, None)?,
            "fused_moe: ids: expected none, as planned with a router, got a tensor"
        );
        let with_logits = |problem, shape: &[usize]| {
            let plan = FusedMoe::plan(device, problem)?;
            let (logits, bias) = (tensor(shape, DType::F32)?, tensor(&[3], DType::F32)?);
            let (gate_up, down, mut out) =
                (tensor(gate_up, dtype)?, tensor(down, dtype)?, tensor(out, dtype)?);
            let experts = [gate_up.view().into(), down.view().into()];
            let args = FusedMoeArgs {
                bias: Some(bias.view()),
                ..FusedMoeArgs::routed(logits.view(), experts, out.view_mut())
            };
            Ok::<_, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        assert_eq!(with_logits(routed, &[4, 2])?, "fused_moe: logits: expected shape [4, 3], got [4, 2]");
        assert_eq!(
            with_logits(problem, &[4, 3])?,
            "fused_moe: ids: expected a tensor, as planned without a router, got none"
        );
        let with_shared = FusedMoeProblem { shared: true, ..problem };
        assert_eq!(
            message(with_shared, [out, ids, gate_up, down], None, None)?,
            "fused_moe: shared_gate_up: expected a tensor, as planned, got none"
        );
    }
    Ok(())
}
