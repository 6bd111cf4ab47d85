//! Experts of few tokens, from the router's choice to their weighted sum: [`FusedMoe`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use std::num::Saturating;

use abi::DType;
use abi::ops::fused_moe::{
    DOWN_PIECES, FusedMoeDims, HEAD_BYTES, MAX_ROW_BYTES, MAX_SLOTS, PACKED_SUMS_BYTES, THREADS, WARPS,
};
use abi::ops::glu::Activation;
use abi::ops::matmul::MatmulNorm;
use abi::weight::{Layout, TILE_K, TILE_ROWS, WeightDims};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::launch::{Entry, Param};
use crate::ops::Store;
use crate::ops::matmul::{MatmulB, RowNorm, curve};
use crate::ops::moe_router::{MoeRouter, MoeRouterProblem};
use crate::ops::workspace::Workspace;
use crate::plan::{self, Check, Choice, Operator, Plan, Run, check_eps, check_floats, planned};
use crate::tensor::{Tensor, TensorView, TensorViewMut};
use crate::weight::Weight;

pub use abi::ops::fused_moe::{
    FusedMoeStage, FusedMoeTile, FusedMoeVariant, PACKED_VARIANTS, PackedFusedMoeVariant, VARIANTS,
};
pub use cases::{CASES, FusedMoeCase, samples};
pub use select::select;

const OP: &str = "fused_moe";

/// What is to be computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FusedMoeProblem {
    /// Most tokens of a run.
    pub tokens: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Experts that there are.
    pub experts: usize,
    /// Elements of a row of x and of out.
    pub hidden: usize,
    /// Elements of an expert's gate, and of up.
    pub inner: usize,
    /// Type of all matrices.
    pub dtype: DType,
    /// Activation of the gate: SiLU or a GELU.
    pub activation: Activation,
    /// Whether there is an expert that all tokens have, of the same sizes.
    pub shared: bool,
    /// The norm of x; none if it is taken as it is.
    pub norm: Option<RowNorm>,
    /// How experts are chosen from the router's logits, in f32, with the bits of [`MoeRouter`]: of as many tokens and
    /// experts, not sorted, and with an `inner` of at least 1. None: they are chosen already.
    pub router: Option<MoeRouterProblem>,
    /// What becomes of what out holds.
    pub store: Store,
    /// How gate_up is packed; none if its experts are plain matrices.
    pub gate_up: Option<Layout>,
    /// How down is packed.
    pub down: Option<Layout>,
    /// How the shared expert's gate_up is packed: there if that of the others is.
    pub shared_gate_up: Option<Layout>,
    /// How the shared expert's down is packed: there if that of the others is.
    pub shared_down: Option<Layout>,
}

impl FusedMoeProblem {
    /// With what it must have. The other fields do nothing: `activation: Activation::Silu`, `shared: false`, `norm:
    /// None`, `router: None`, `store: Store::Replace`, no layout of packed weights.
    pub fn new(
        tokens: usize,
        [top_k, experts]: [usize; 2],
        [hidden, inner]: [usize; 2],
        dtype: DType,
    ) -> Self {
        FusedMoeProblem {
            tokens,
            top_k,
            experts,
            hidden,
            inner,
            dtype,
            activation: Activation::Silu,
            shared: false,
            norm: None,
            router: None,
            store: Store::Replace,
            gate_up: None,
            down: None,
            shared_gate_up: None,
            shared_down: None,
        }
    }

    /// How the weights of a stage are packed, the experts' and the shared one's.
    fn layouts(&self, stage: FusedMoeStage) -> [Option<Layout>; 2] {
        match stage {
            FusedMoeStage::Up => [self.gate_up, self.shared_gate_up],
            FusedMoeStage::Down => [self.down, self.shared_down],
        }
    }

    /// Experts of a token with the shared one.
    fn slots(&self) -> usize {
        self.top_k.saturating_add(self.shared.into())
    }

    /// From one row between the products to the next.
    fn activated_stride(&self) -> usize {
        self.inner.next_multiple_of(16 / self.dtype.bytes())
    }
}

/// The tensors of a run. Rows may have any stride, elements of a row are neighbours.
#[derive(Debug)]
pub struct FusedMoeArgs<'a> {
    /// `[tokens, hidden]`; none: the rows that out holds.
    pub x: Option<TensorView<'a>>,
    /// `[hidden]`, the gain of the norm; there if a norm was planned.
    pub gain: Option<TensorView<'a>>,
    /// `[tokens, top_k]` u32, contiguous, there unless a router was planned; an expert beyond those that there are is
    /// left out.
    pub ids: Option<TensorView<'a>>,
    /// `[tokens, top_k]` f32, contiguous, there unless a router was planned.
    pub weights: Option<TensorView<'a>>,
    /// `[tokens, experts]` f32, rows of any stride; there if a router was planned.
    pub logits: Option<TensorView<'a>>,
    /// `[experts]` f32: added to the router's scores for the choice only.
    pub bias: Option<TensorView<'a>>,
    /// `[experts, 2 inner, hidden]`: the rows of each gate above those of up; or packed ones, as planned.
    pub gate_up: MatmulB<'a>,
    /// `[experts, hidden, inner]`; or packed ones.
    pub down: MatmulB<'a>,
    /// `[2 inner, hidden]`: gate and up of the shared expert, there if one was planned; or a packed weight, whose rows
    /// are those of the gate and of up in turn, as [`Matmul`](super::matmul::Matmul) has them.
    pub shared_gate_up: Option<MatmulB<'a>>,
    /// `[hidden, inner]`, there if a shared expert was planned; or a packed weight.
    pub shared_down: Option<MatmulB<'a>>,
    /// `[tokens, 1]` f32, rows of any stride: the logit of the shared expert's gate; none: the gate is 1.
    pub gate: Option<TensorView<'a>>,
    /// `[tokens, hidden]`.
    pub out: TensorViewMut<'a>,
}

impl<'a> FusedMoeArgs<'a> {
    /// With what it must have where experts are chosen already: their ids and weights, the experts' gate_up and down,
    /// and out. The other fields do nothing: `x: None`, `gain: None`, `logits: None`, `bias: None`, `shared_gate_up:
    /// None`, `shared_down: None`, `gate: None`.
    pub fn new(
        [ids, weights]: [TensorView<'a>; 2],
        experts: [MatmulB<'a>; 2],
        out: TensorViewMut<'a>,
    ) -> Self {
        FusedMoeArgs {
            ids: Some(ids),
            weights: Some(weights),
            logits: None,
            ..Self::routed(ids, experts, out)
        }
    }

    /// With what it must have where they are chosen here: the router's logits in place of ids and weights.
    pub fn routed(logits: TensorView<'a>, [gate_up, down]: [MatmulB<'a>; 2], out: TensorViewMut<'a>) -> Self {
        FusedMoeArgs {
            x: None,
            gain: None,
            ids: None,
            weights: None,
            logits: Some(logits),
            bias: None,
            gate_up,
            down,
            shared_gate_up: None,
            shared_down: None,
            gate: None,
            out,
        }
    }
}

/// The experts of few tokens: their gated linear units, and the weighted sum of them, perhaps behind a norm and added
/// to what out holds.
///
/// ```text
/// ids[t], weights[t] = as given, or as `MoeRouter` chooses them from logits[t] (and the bias)
/// x̂[t]    = rmsnorm(x[t]) · gain, rounded, or x[t]
/// a[t, j] = act(x̂[t] · gate[e]ᵀ) ⊙ (x̂[t] · up[e]ᵀ), rounded                  of expert e = ids[t, j]
/// out[t]  = Σ_j weights[t, j] · (a[t, j] · down[e]ᵀ) + sigmoid(gate[t]) · (shared expert) (+ out[t])
/// ```
///
/// For many tokens [`MoePermute`](super::moe_permute::MoePermute),
/// [`GroupedMatmul`](super::grouped_matmul::GroupedMatmul) and [`MoeCombine`](super::moe_combine::MoeCombine) read each
/// expert's weights once for all of its tokens. Here each pair of a token and an expert reads them for itself, in two
/// launches and without a sort.
///
/// Weights may be packed, each as its layout says: their values are `scale · (code − zero) − minimum`, and nothing else
/// is rounded. A card reads those from sm_80 on, of rows in f16 or bf16, that
/// [`GroupedMatmul`](super::grouped_matmul::GroupedMatmul) reads by tensor cores.
///
/// **Arithmetic**: products and sums in f32; x̂, a and out are rounded once. Where the sizes of a sum's terms add up to
/// more than 3.4e38, out may be infinite or NaN. **Determinism**: bitwise the same from run to run; a token's result
/// depends on its own row and experts alone. **Limits**: on a card up to 64 experts of a token, the shared one among
/// them; rows of x, and of a token's a, of up to 47.5 KiB, where those are counted in f32 if down is plain; fewer than
/// 65536 pairs of a token and an expert; packed weights of an `inner` that is a multiple of 16: `supports` says so.
/// **Streams**: a plan has a workspace, so a run in another stream than the last one waits for that. A recorded graph
/// does not know of later runs: do not let it run at the same time as the plan in another stream, nor outlive the plan.
/// **Aliasing**: out may not overlap the other tensors; to add to a residual, leave x out. **Errors**:
/// [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors; those by packed weights from sm_80 on. **Source**: Shazeer et
/// al., *Outrageously Large Neural Networks* (2017), equation 1; Shazeer, *GLU Variants Improve Transformer* (2020).
#[derive(Debug)]
pub struct FusedMoe(Plan<Self>);

planned!(
    FusedMoe,
    FusedMoeProblem,
    FusedMoeArgs {
        x,
        gain,
        ids,
        weights,
        logits,
        bias,
        gate_up,
        down,
        shared_gate_up,
        shared_down,
        gate,
        out
    },
    FusedMoeTile
);

/// Both kernels.
#[derive(Debug)]
struct Stages {
    up: Entry,
    down: Entry,
}

/// What is loaded for a plan.
#[derive(Debug)]
pub(crate) struct Kernels {
    chosen: Stages,
    /// Those for tensors that are not aligned.
    any: Stages,
    /// The rows between the products; numbers and weights of chosen experts, where a router was planned.
    workspace: Workspace<3>,
}

impl plan::Kernels for Kernels {
    fn reported(&self) -> &Entry {
        &self.chosen.up
    }
}

/// Bytes of the rows that a block of a kernel holds, and of the sums behind them.
fn row_bytes(problem: &FusedMoeProblem, stage: FusedMoeStage) -> usize {
    let bytes = problem.dtype.bytes();
    let per_piece = 16 / bytes;
    let is_packed = problem.layouts(stage)[0].is_some();
    let in_tiles = |elements: usize| elements.next_multiple_of(TILE_K as usize).saturating_mul(bytes);
    match stage {
        FusedMoeStage::Up if is_packed => in_tiles(problem.hidden).saturating_add(PACKED_SUMS_BYTES as usize),
        FusedMoeStage::Up => 16 * problem.hidden.div_ceil(per_piece),
        FusedMoeStage::Down if is_packed => {
            in_tiles(problem.inner).saturating_mul(problem.slots()).saturating_add(PACKED_SUMS_BYTES as usize)
        }
        FusedMoeStage::Down => {
            let pieces = problem.inner.div_ceil(per_piece).next_multiple_of(DOWN_PIECES as usize);
            problem.slots().saturating_mul(pieces * per_piece * size_of::<f32>())
        }
    }
}

/// Bytes of shared memory of a kernel, whose rows `select` has found to fit.
fn smem_bytes(problem: &FusedMoeProblem, stage: FusedMoeStage) -> u32 {
    // The router's keys lie where the rows will.
    let keys =
        if stage == FusedMoeStage::Up { problem.router.map_or(0, |router| 4 * router.experts) } else { 0 };
    HEAD_BYTES + row_bytes(problem, stage).max(keys) as u32
}

/// Parameters of packed weights.
const PACKED_PARAMS: usize = 15;

/// The experts' packed weight, and the shared one's: their addresses and sizes.
struct PackedParams<'a> {
    of_experts: &'a Weight,
    shared: Option<&'a Weight>,
    dims: [WeightDims; 2],
}

impl<'a> PackedParams<'a> {
    /// None of plain matrices.
    fn of(experts: MatmulB<'a>, shared: Option<MatmulB<'a>>) -> Option<Self> {
        let packed = |b| if let MatmulB::Packed(weight) = b { Some(weight) } else { None };
        let (of_experts, shared) = (packed(experts)?, shared.and_then(packed));
        // Of a shared expert that there is not nobody asks.
        let dims = [of_experts, shared.unwrap_or(of_experts)].map(Weight::dims);
        Some(PackedParams { of_experts, shared, dims })
    }

    fn list(&self) -> [Param<'_>; PACKED_PARAMS] {
        let [a, b, c, d, e, f] = self.of_experts.params();
        let none = [(); 6].map(|()| Param::Address(0));
        let [g, h, i, j, k, l] = self.shared.map_or(none, Weight::params);
        let [dims, shared_dims] = self.dims.each_ref().map(Param::from);
        [a, b, c, d, e, f, self.of_experts.globals_param(), dims, g, h, i, j, k, l, shared_dims]
    }
}

/// Parameters in front of those of packed weights, these, and the ones behind.
fn around<'p, const FIRST: usize, const LAST: usize, const ALL: usize>(
    first: [Param<'p>; FIRST],
    packed: [Param<'p>; PACKED_PARAMS],
    last: [Param<'p>; LAST],
) -> [Param<'p>; ALL] {
    const { assert!(FIRST + PACKED_PARAMS + LAST == ALL) };
    let mut all = first.into_iter().chain(packed).chain(last);
    std::array::from_fn(|_| all.next().unwrap_or(Param::Address(0)))
}

impl Operator for FusedMoe {
    const OP: &'static str = OP;
    const CPU_TILE: &'static str = "columns";
    type Problem = FusedMoeProblem;
    type Args<'a> = FusedMoeArgs<'a>;
    type Dims = FusedMoeDims;
    type Variant = FusedMoeTile;
    type Kernels = Kernels;

    fn check_problem(problem: &FusedMoeProblem) -> Result<(), Error> {
        let FusedMoeProblem { tokens, experts, hidden, inner, dtype, activation, norm, .. } = *problem;
        let sizes = [
            ("tokens", tokens),
            ("number of pairs", tokens.saturating_mul(problem.slots())),
            ("experts", experts),
            ("hidden", hidden),
            ("rows of gate_up", inner.saturating_mul(2)),
        ];
        check_floats(OP, dtype, &sizes)?;
        if activation == Activation::Sigmoid {
            return Err(Error::invalid(OP, "problem", "SiLU or a GELU as the activation", "sigmoid"));
        }
        let refuse = |expected: &'static str, got| Err(Error::invalid(OP, "problem", expected, got));
        for stage in [FusedMoeStage::Up, FusedMoeStage::Down] {
            let [experts, shared] = problem.layouts(stage);
            if shared.is_some() != (experts.is_some() && problem.shared) {
                return refuse(
                    "packed weights of the shared expert where the others' are",
                    format!("{problem:?}"),
                );
            }
            for layout in [experts, shared].into_iter().flatten() {
                if let Some(expected) = layout.problem_in_order() {
                    return refuse(expected, format!("{layout:?}"));
                }
            }
            if experts.is_some() && !inner.is_multiple_of(TILE_ROWS as usize) {
                return refuse("an inner that is a multiple of 16, of packed weights", inner.to_string());
            }
        }
        if let Some(router) = problem.router {
            MoeRouter::check_problem(&router)?;
            let got = (router.tokens, router.experts, router.top_k, router.dtype, router.sort);
            if got != (tokens, experts, problem.top_k, DType::F32, None) || inner == 0 {
                let expected = "a router of the same tokens, experts and top_k, from f32 and without a sort, and an inner of at \
                     least 1";
                return refuse(expected, format!("{problem:?}"));
            }
        }
        norm.map_or(Ok(()), |norm| check_eps(OP, norm.eps))
    }

    fn select(limits: &DeviceLimits, problem: &FusedMoeProblem) -> Result<Choice<FusedMoeTile>, Error> {
        select(limits, problem)
    }

    fn forced(tile: FusedMoeTile, problem: &FusedMoeProblem) -> Result<Choice<FusedMoeTile>, Error> {
        select::forced(tile, problem)
    }

    fn load(
        device: &Device,
        problem: &FusedMoeProblem,
        choice: &Choice<FusedMoeTile>,
    ) -> Result<Kernels, Error> {
        let stages = |tile| {
            let load = |stage| {
                let entry = select::entry(device, problem, stage, tile)?;
                device.entry(OP, entry, smem_bytes(problem, stage))
            };
            Ok::<_, Error>(Stages { up: load(FusedMoeStage::Up)?, down: load(FusedMoeStage::Down)? })
        };
        let shape = [problem.tokens * problem.slots(), problem.activated_stride()];
        let chosen = [if problem.router.is_some() { problem.tokens } else { 0 }, problem.top_k];
        let rows = |stream: &_| {
            let rows = Tensor::empty(stream, &shape, problem.dtype)?;
            let [ids, weights] = [DType::U32, DType::F32].map(|dtype| Tensor::empty(stream, &chosen, dtype));
            Ok([rows, ids?, weights?])
        };
        Ok(Kernels {
            chosen: stages(choice.variant)?,
            any: stages(FusedMoeTile::Elements)?,
            workspace: Workspace::new(device, rows)?,
        })
    }

    fn check(
        at: &Check<'_>,
        problem: &FusedMoeProblem,
        args: &FusedMoeArgs<'_>,
    ) -> Result<FusedMoeDims, Error> {
        let FusedMoeArgs { x, gain, ids, weights, logits, bias, gate_up, down, .. } = args;
        let FusedMoeArgs { shared_gate_up, shared_down, gate, out, .. } = args;
        let FusedMoeProblem { tokens: most, top_k, experts, hidden, inner, dtype, .. } = *problem;
        let [out_stride] = at.rows("out", out.as_view(), dtype, &[None, Some(hidden)])?;
        let tokens = out.shape()[0];
        at.planned("out", "tokens", tokens, most)?;
        at.apart("out", out_stride, out.shape())?;
        let x_stride = x.map(|x| at.rows("x", x, dtype, &[tokens, hidden].map(Some)));
        let [x_stride] = x_stride.transpose()?.unwrap_or([out_stride]);
        if let Some(gain) = at.given("gain", problem.norm.is_some(), *gain, ["planned"; 2])? {
            at.rows::<0>("gain", gain, dtype, &[Some(hidden)])?;
        }
        let is_routed = problem.router.is_some();
        let why = ["planned without a router", "planned with a router"];
        for (name, chosen, dtype) in [("ids", ids, DType::U32), ("weights", weights, DType::F32)] {
            if let Some(chosen) = at.given(name, !is_routed, *chosen, why)? {
                at.contiguous(name, chosen, dtype, &[tokens, top_k].map(Some))?;
            }
        }
        let mut logits_stride = 0;
        if let Some(logits) = at.given("logits", is_routed, *logits, ["planned"; 2])? {
            [logits_stride] = at.elements("logits", logits, DType::F32, &[tokens, experts].map(Some))?;
        }
        match bias {
            Some(_) if !is_routed => return at.refuse("bias", "none without a router", "a tensor"),
            Some(bias) => _ = at.elements::<0>("bias", *bias, DType::F32, &[Some(experts)])?,
            None => {}
        }
        // Packed weights are as matrices of their size to `planned`, and have no rows that kernels read.
        let of_experts = |name, given: &MatmulB<'_>, layout: Option<Layout>, [n, k]: [usize; 2]| {
            let matrices = given.planned(at, name, (layout, dtype), (Some(experts), [n, k]))?;
            if layout.is_some() {
                Ok([0; 2])
            } else {
                at.rows(name, matrices, dtype, &[experts, n, k].map(Some))
            }
        };
        let [gate_up_expert_stride, gate_up_stride] =
            of_experts("gate_up", gate_up, problem.gate_up, [2 * inner, hidden])?;
        let [down_expert_stride, down_stride] = of_experts("down", down, problem.down, [hidden, inner])?;
        let shared = |name, given: &Option<MatmulB<'_>>, layout: Option<Layout>, shape: [usize; 2]| {
            let Some(given) = at.given(name, problem.shared, *given, ["planned"; 2])? else { return Ok(0) };
            let matrix = given.planned(at, name, (layout, dtype), (None, shape))?;
            let [stride] =
                if layout.is_some() { [0] } else { at.rows(name, matrix, dtype, &shape.map(Some))? };
            Ok::<u32, Error>(stride)
        };
        let shared_gate_up_stride =
            shared("shared_gate_up", shared_gate_up, problem.shared_gate_up, [2 * inner, hidden])?;
        let shared_down_stride = shared("shared_down", shared_down, problem.shared_down, [hidden, inner])?;
        if gate.is_some() && !problem.shared {
            return at.refuse("gate", "none without a shared expert", "a tensor");
        }
        let gate_strides = gate.map(|gate| at.strided("gate", gate, DType::F32, &[tokens, 1].map(Some)));
        let [gate_stride] = gate_strides.transpose()?.unwrap_or_default();
        Ok(FusedMoeDims {
            top_k: top_k as u32,
            slots: problem.slots() as u32,
            experts: experts as u32,
            hidden: hidden as u32,
            inner: inner as u32,
            x_stride,
            gate_up_expert_stride,
            gate_up_stride,
            down_expert_stride,
            down_stride,
            shared_gate_up_stride,
            shared_down_stride,
            gate_stride,
            activated_stride: problem.activated_stride() as u32,
            out_stride,
            adds: (problem.store == Store::Add).into(),
            in_pieces: 0,
            curve: curve(problem.activation),
            router: problem
                .router
                .unwrap_or(MoeRouterProblem::new(most, 1, 1, DType::F32))
                .dims(tokens as u32, logits_stride),
        })
    }

    fn cpu(problem: &FusedMoeProblem, dims: &FusedMoeDims, args: &mut FusedMoeArgs<'_>) {
        cpu::run(problem, dims, args);
    }

    fn launch(run: &Run<'_, Self>, dims: FusedMoeDims, args: &FusedMoeArgs<'_>) -> Result<(), Error> {
        let FusedMoeArgs { x, gain, ids, weights, logits, bias, gate_up, down, .. } = args;
        let FusedMoeArgs { shared_gate_up, shared_down, gate, out, .. } = args;
        let in_pieces = run.is_aligned && run.choice.variant == FusedMoeTile::Pieces;
        let Kernels { chosen, any, workspace } = run.kernels;
        let stages = if in_pieces { chosen } else { any };
        let [activated, chosen_ids, chosen_weights] = &workspace.tensors;
        let between = activated.view();
        let ids = ids.unwrap_or(chosen_ids.view());
        let weights = weights.unwrap_or(chosen_weights.view());
        let tokens = out.shape()[0] as u32;
        let pairs = tokens * dims.slots;
        let norm = run.problem.norm.map(|RowNorm { eps, weight }| MatmulNorm {
            eps,
            inv_cols: 1.0 / dims.hidden as f32,
            offset: weight.offset(),
        });
        let norm = norm.unwrap_or(MatmulNorm { eps: 0.0, inv_cols: 0.0, offset: 0.0 });
        let dims = FusedMoeDims { in_pieces: in_pieces.into(), ..dims };
        let _alone = workspace.enter(run.stream)?;
        let threads = [THREADS, 1, 1];
        let plain = |b: MatmulB<'_>| match b {
            MatmulB::Matrix(matrix) => matrix.into(),
            _ => Param::Address(0),
        };
        let shared_param = |b: &Option<MatmulB<'_>>| b.map_or(Param::Address(0), plain);
        if dims.inner > 0 {
            let [x, gain, activated] = [x.unwrap_or(out.as_view()).into(), (*gain).into(), between.into()];
            let [logits, bias, ids, weights] = [(*logits).into(), (*bias).into(), ids.into(), weights.into()];
            let [sizes, norm] = [(&dims).into(), (&norm).into()];
            let launch = |blocks: u32, params: &[Param<'_>]| {
                // SAFETY: `check` found every row of every tensor inside its view, and the weights' layouts, number and
                // size to be the planned ones; `is_aligned` says what is moved in pieces of 16 bytes; the workspace has
                // a row for each pair of the planned tokens, and if experts are chosen here numbers and
                // weights for each; the grid has a row of blocks for each pair, of packed
                // weights one for each 16 elements, and the blocks the shared memory that a row of x takes
                // (`smem_bytes`).
                unsafe { stages.up.launch(run.stream, [blocks, pairs, 1], threads, params) }
            };
            match PackedParams::of(*gate_up, *shared_gate_up) {
                Some(packed) => {
                    let first = [x, gain, logits, bias, ids, weights];
                    let params: [_; 24] = around(first, packed.list(), [activated, sizes, norm]);
                    launch(dims.inner / TILE_ROWS, &params)?;
                }
                None => {
                    let [weight, shared] = [plain(*gate_up), shared_param(shared_gate_up)];
                    let blocks = select::up_blocks(run.device.profile().num_sms, pairs, dims.inner);
                    launch(
                        blocks,
                        &[x, gain, logits, bias, ids, weights, weight, shared, activated, sizes, norm],
                    )?;
                }
            }
        }
        let [activated, ids, weights, gate, out] =
            [between.into(), ids.into(), weights.into(), (*gate).into(), out.into()];
        let sizes = (&dims).into();
        let launch = |blocks: u32, params: &[Param<'_>]| {
            // SAFETY: as above; the grid has a warp for each column of each token, of packed weights a block for each
            // 16, and the blocks the shared memory that a token's rows take.
            unsafe { stages.down.launch(run.stream, [blocks, tokens, 1], threads, params) }
        };
        match PackedParams::of(*down, *shared_down) {
            Some(packed) => {
                let params: [_; 21] = around([activated, ids, weights], packed.list(), [gate, out, sizes]);
                launch(dims.hidden.div_ceil(TILE_ROWS), &params)
            }
            None => {
                let [weight, shared] = [plain(*down), shared_param(shared_down)];
                let blocks = dims.hidden.div_ceil(WARPS);
                launch(blocks, &[activated, ids, weights, weight, shared, gate, out, sizes])
            }
        }
    }

    // If no two tokens have the same expert.
    fn work(problem: &FusedMoeProblem) -> Work {
        let FusedMoeProblem { tokens, experts, hidden, inner, dtype, .. } = *problem;
        let slots = problem.slots();
        let pairs = tokens.saturating_mul(slots);
        let bits = |layout: Option<Layout>, k: usize| {
            layout.map_or(8.0 * dtype.bytes() as f32, |layout| layout.bits_per_weight(k as u32))
        };
        // Of an element of gate, up and down together.
        let weight_bits = 2.0 * bits(problem.gate_up, hidden) + bits(problem.down, inner);
        let [tokens, slots, experts, pairs, hidden, inner, bytes] =
            [tokens, slots, experts, pairs, hidden, inner, dtype.bytes()].map(count);
        let (elements, weights) = (count(3) * hidden * inner, (pairs * hidden * inner).0);
        let weight_bytes = Saturating((weights as f64 * f64::from(weight_bits) / 8.0) as u64);
        Work {
            problem: format!("[{tokens}, {hidden}] {dtype}, {slots} of {experts} experts of {inner}"),
            bytes: weight_bytes + count(2) * tokens * hidden * bytes,
            flops: count(2) * pairs * elements,
        }
    }

    fn tile(_: &Device, _: &FusedMoeProblem, choice: &Choice<FusedMoeTile>) -> String {
        format!("{:?}", choice.variant)
    }
}

/// Refuses what no kernel takes.
fn check_limits(problem: &FusedMoeProblem) -> Result<(), Error> {
    let slots = problem.slots();
    let refuse = |expected: String, got: usize| Err(Error::invalid(OP, "problem", expected, got.to_string()));
    if slots > MAX_SLOTS as usize {
        let expected = format!("at most {MAX_SLOTS} experts of a token on a card, the shared one among them");
        return refuse(expected, slots);
    }
    let pairs = problem.tokens.saturating_mul(slots.max(1));
    if pairs >= 1 << 16 {
        return refuse("fewer than 65536 pairs of a token and an expert on a card".into(), pairs);
    }
    let bytes = [FusedMoeStage::Up, FusedMoeStage::Down].map(|stage| row_bytes(problem, stage));
    let largest = bytes[0].max(bytes[1]);
    if largest > MAX_ROW_BYTES as usize {
        let most = MAX_ROW_BYTES;
        let expected =
            format!("rows of x, and of a token's experts in f32, of {most} bytes at most on a card");
        return refuse(expected, largest);
    }
    Ok(())
}
