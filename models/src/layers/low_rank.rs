//! What adapters add to projections: products of a low rank, of each row with the matrices of its own adapter.
//!
//! Rows are sorted by adapter once a step. A projection then takes three launches more: both products, of the rows of
//! adapters alone, and their results put where the rows are; onto them goes the product of the projection itself.

use std::collections::BTreeSet;

use abi::DType;
use abi::ops::moe_permute::MAX_BINS;

use super::{
    DeltaNet, FeedForward, LatentAttention, Phase, Plans, Projection, ProjectionPlan, SelfAttention, Step,
};
use crate::adapter::{Adapter, Matrices, Modules, check_used};
use crate::config::{DecoderConfig, FeedForwardConfig, LayerConfig, MixerConfig, MlpConfig};
use crate::decoder::DecoderLayer;
use crate::loader::encode;
use crate::part::{Cut, Part};
use host::ops::copy::{Copy, CopyArgs, CopyProblem};
use host::ops::glu::{Activation, Glu, GluArgs, GluProblem};
use host::ops::grouped_matmul::{GroupedMatmul, GroupedMatmulArgs, GroupedMatmulProblem, GroupedRows};
use host::ops::matmul::Residual;
use host::ops::moe_combine::{MoeCombine, MoeCombineArgs, MoeCombineProblem};
use host::ops::moe_permute::{MoePermute, MoePermuteArgs, MoePermuteProblem};
use host::{Constant, Error, Stream, Tensor, TensorView, TensorViewMut};

/// Ranks are filled up to a multiple of this, so that rows are whole pieces, and steps of the tensor cores.
const RANK_UNIT: usize = 16;

/// What adapters add to a projection.
#[derive(Debug)]
pub(crate) struct LowRank {
    /// `[adapters, rank, in]`; of experts `[adapters · experts, rank, in]`.
    pub(super) down: Constant,
    /// `[adapters, out, rank]`, times each adapter's scale; of experts likewise.
    pub(super) up: Constant,
}

/// A part of a layer to whose projections adapters may add.
#[derive(Clone, Copy, Debug)]
pub(super) enum Adapted {
    Attention,
    DeltaNet,
    Latent,
    Mlp,
    /// Its shared expert, and the routed ones.
    Mixture,
}

/// How many of them there are.
const PARTS: usize = Adapted::Mixture as usize + 1;

/// A projection of a part, by its place.
#[derive(Clone, Copy)]
pub(super) enum Which {
    First,
    /// Between the two, where there are three.
    Second,
    Last,
    /// Those of routed experts.
    ExpertsFirst,
    ExpertsLast,
}

/// Most projections of a part.
const PROJECTIONS: usize = Which::ExpertsLast as usize + 1;

/// What adapters add to the projections of a part of a layer.
#[derive(Debug, Default)]
pub(crate) struct PartAdapters([Option<LowRank>; PROJECTIONS]);

/// How many adapters there are, and the ranks of what they add to the projections of each part; 0 if nothing in any
/// layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdapterSizes {
    adapters: usize,
    ranks: [[usize; PROJECTIONS]; PARTS],
}

/// Adapters on a device, by layer: what they add to mixers and to feed-forward parts.
#[derive(Debug)]
pub(crate) struct Adapters {
    sizes: AdapterSizes,
    layers: Vec<[PartAdapters; 2]>,
}

/// The modules of a part's projections: of each those of one matrix, or of one for each expert, or none.
struct PartModules {
    part: Adapted,
    projections: [Vec<Modules>; PROJECTIONS],
}

impl Adapters {
    /// Of these adapters, for a decoder whose tensors' names begin with `prefix`.
    ///
    /// **Errors**: [`crate::ModelError::Tensors`] for those that have no place in it or do not fit, and of memory.
    pub(crate) fn new(
        stream: &Stream,
        (config, layers, prefix): (&DecoderConfig, &[DecoderLayer], &str),
        dtype: DType,
        adapters: &[&Adapter],
    ) -> Result<Self, Error> {
        let hidden_size = config.hidden_size;
        let (mut modules, mut others) = (Vec::new(), Vec::new());
        for (index, (config, weights)) in std::iter::zip(&config.layers, layers).enumerate() {
            let prefix = format!("{prefix}.layers.{index}");
            let mixer = PartModules::of_mixer(&config.mixer, hidden_size, &prefix);
            let feed_forward = (&config.feed_forward, &weights.feed_forward);
            let feed_forward = PartModules::of_feed_forward(feed_forward, hidden_size, &prefix);
            modules.push([mixer, feed_forward]);
            others.extend(not_adapted(config, &prefix));
        }
        let mut ranks = [[0; PROJECTIONS]; PARTS];
        for own in modules.iter().flatten() {
            for (rank, modules) in std::iter::zip(&mut ranks[own.part as usize], &own.projections) {
                for modules in modules {
                    modules.check(adapters)?;
                    *rank = modules.rank(adapters).next_multiple_of(RANK_UNIT).max(*rank);
                }
                check_experts(modules.len(), *rank, adapters.len())?;
            }
        }
        let mut used = vec![BTreeSet::new(); adapters.len()];
        let mut layers = Vec::new();
        for layer in &modules {
            let mut own = [PartAdapters::default(), PartAdapters::default()];
            for (PartAdapters(own), modules) in std::iter::zip(&mut own, layer) {
                let PartModules { part, projections } = modules;
                for (place, modules) in projections.iter().enumerate() {
                    let rank = ranks[*part as usize][place];
                    let read = |modules: &Modules| modules.read(adapters, rank, &mut used);
                    let matrices: Vec<Option<Matrices>> =
                        modules.iter().map(read).collect::<Result<_, _>>()?;
                    let Some(first) = modules.first().filter(|_| matrices.iter().any(Option::is_some)) else {
                        continue;
                    };
                    // Of each adapter one matrix after the other.
                    let constant = |[rows, cols]: [usize; 2], of: fn(&Matrices) -> &[f32]| {
                        let (len, count) = (rows * cols, matrices.len());
                        let mut values = vec![0.0; adapters.len() * count * len];
                        for (index, matrices) in matrices.iter().enumerate() {
                            let Some(matrices) = matrices else { continue };
                            for (adapter, own) in of(matrices).chunks_exact(len).enumerate() {
                                values[(adapter * count + index) * len..][..len].copy_from_slice(own);
                            }
                        }
                        let shape = [adapters.len() * count, rows, cols];
                        let tensor = Tensor::from_bytes(stream, &shape, dtype, &encode(&values, dtype))?;
                        Constant::new(tensor, stream)
                    };
                    own[place] = Some(LowRank {
                        down: constant([rank, first.cols], |matrices| &matrices.down)?,
                        up: constant([first.rows(), rank], |matrices| &matrices.up)?,
                    });
                }
            }
            layers.push(own);
        }
        check_used(adapters, &used, &others)?;
        Ok(Adapters { sizes: AdapterSizes { adapters: adapters.len(), ranks }, layers })
    }

    pub(crate) fn sizes(&self) -> AdapterSizes {
        self.sizes
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.sizes.adapters
    }
}

impl PartModules {
    /// Of a part whose projections are made of these modules, with the columns of each.
    fn new(
        part: Adapted,
        (first, first_cols): (Vec<(String, Cut)>, usize),
        (last, last_cols): (String, usize),
        hidden_size: usize,
    ) -> Self {
        let mut projections = [const { Vec::new() }; PROJECTIONS];
        projections[Which::First as usize].push(Modules { parts: first, cols: first_cols, in_turn: false });
        let last = Modules { parts: vec![(last, hidden_size.into())], cols: last_cols, in_turn: false };
        projections[Which::Last as usize].push(last);
        PartModules { part, projections }
    }

    fn of_mixer(config: &MixerConfig, hidden_size: usize, prefix: &str) -> Self {
        let whole = Part::WHOLE;
        match config {
            MixerConfig::Attention(config) => {
                let prefix = format!("{prefix}.self_attn");
                let (qkv, cols) = SelfAttention::parts(config, whole, &prefix);
                let o = (format!("{prefix}.o_proj"), cols.len());
                Self::new(Adapted::Attention, (qkv, hidden_size), o, hidden_size)
            }
            MixerConfig::DeltaNet(config) => {
                let prefix = format!("{prefix}.linear_attn");
                let (input, cols) = DeltaNet::parts(config, whole, &prefix);
                let out = (format!("{prefix}.out_proj"), cols.len());
                Self::new(Adapted::DeltaNet, (input.into(), hidden_size), out, hidden_size)
            }
            MixerConfig::Latent(config) => {
                let prefix = format!("{prefix}.self_attn");
                let (a, q) = LatentAttention::parts(config, whole, &prefix);
                let o = (format!("{prefix}.o_proj"), config.heads * config.value);
                let mut own = Self::new(Adapted::Latent, (a, hidden_size), o, hidden_size);
                let cols = config.q_latent.unwrap_or(hidden_size);
                own.projections[Which::Second as usize].push(Modules {
                    parts: vec![q],
                    cols,
                    in_turn: false,
                });
                own
            }
        }
    }

    fn of_feed_forward(of: (&FeedForwardConfig, &FeedForward), hidden_size: usize, prefix: &str) -> Self {
        let of_mlp = |part: Adapted, config: &MlpConfig, in_turn: bool, prefix: String| {
            let inner = config.intermediate_size;
            let gate_up = ["gate_proj", "up_proj"].map(|part| (format!("{prefix}.{part}"), inner.into()));
            let down = (format!("{prefix}.down_proj"), inner);
            let mut own = Self::new(part, (gate_up.into(), hidden_size), down, hidden_size);
            own.projections[Which::First as usize].iter_mut().for_each(|gate_up| gate_up.in_turn = in_turn);
            own
        };
        match of {
            (FeedForwardConfig::Mlp(config), FeedForward::Mlp(mlp)) => {
                of_mlp(Adapted::Mlp, config, mlp.gate_up.is_in_turn(), format!("{prefix}.mlp"))
            }
            (FeedForwardConfig::Moe(config), FeedForward::Moe(moe)) => {
                let shared = config.shared.as_ref().zip(moe.shared.as_ref());
                let mut own = match shared {
                    Some((config, mlp)) => {
                        let prefix = format!("{prefix}.mlp.{}", config.name);
                        of_mlp(Adapted::Mixture, &config.mlp, mlp.gate_up.is_in_turn(), prefix)
                    }
                    None => Self::of_nothing(Adapted::Mixture),
                };
                for expert in moe.experts.clone() {
                    let prefix = format!("{prefix}.mlp.experts.{expert}");
                    let PartModules { projections, .. } =
                        of_mlp(Adapted::Mixture, &config.expert, false, prefix);
                    let [first, _, last, ..] = projections;
                    own.projections[Which::ExpertsFirst as usize].extend(first);
                    own.projections[Which::ExpertsLast as usize].extend(last);
                }
                own
            }
            _ => Self::of_nothing(Adapted::Mlp),
        }
    }

    fn of_nothing(part: Adapted) -> Self {
        PartModules { part, projections: [const { Vec::new() }; PROJECTIONS] }
    }
}

/// **Errors**: [`Error::Invalid`] for matrices of so many experts of more adapters than can be sorted.
fn check_experts(experts: usize, rank: usize, adapters: usize) -> Result<(), Error> {
    let most = MAX_BINS as usize / experts.max(1);
    if experts > 1 && rank > 0 && adapters > most {
        let expected =
            format!("at most {most} where some are of routed experts, of which there are {experts}");
        return Err(Error::invalid("Batch", "adapters", expected, adapters.to_string()));
    }
    Ok(())
}

/// What the names of a layer's other linear modules begin with, and what such a one is.
fn not_adapted(config: &LayerConfig, prefix: &str) -> Vec<(String, &'static str)> {
    let mut others = Vec::new();
    if let MixerConfig::Latent(_) = config.mixer {
        let what = "one of kv_b_proj, which is absorbed into the queries and results of all sequences alike";
        others.push((format!("{prefix}.self_attn.kv_b_proj."), what));
    }
    if let FeedForwardConfig::Moe(_) = config.feed_forward {
        let experts = "one of routed experts that is no expert's gate_proj, up_proj or down_proj";
        others.push((format!("{prefix}.mlp.experts."), experts));
        for gate in ["gate", "shared_expert_gate"] {
            others.push((
                format!("{prefix}.mlp.{gate}."),
                "one of a router, which is the same for all sequences",
            ));
        }
    }
    others
}

/// Sorts a step's rows by adapter.
#[derive(Debug)]
pub(crate) struct RowSorter {
    permute: Plans<MoePermute>,
    /// `[adapters + 1]`: where each adapter's rows begin, and their end.
    offsets: Tensor,
    /// `[tokens]`: the sorted rows, and `[tokens, 1]`: where each row is among them.
    order: Tensor,
    positions: Tensor,
    /// `[tokens, 1]` f32.
    ones: Tensor,
}

impl RowSorter {
    pub(crate) fn new(phase: &Phase<'_>, adapters: usize) -> Result<Self, Error> {
        let &Phase { stream, tokens, .. } = phase;
        let device = stream.device();
        let ones = vec![1.0f32; tokens];
        Ok(RowSorter {
            permute: phase
                .plans(|phase| MoePermute::plan(device, MoePermuteProblem::new(phase.tokens, 1, adapters)))?,
            offsets: Tensor::empty(stream, &[adapters + 1], DType::U32)?,
            order: Tensor::empty(stream, &[tokens], DType::U32)?,
            positions: Tensor::empty(stream, &[tokens, 1], DType::U32)?,
            ones: Tensor::from_slice(stream, &[tokens, 1], &ones)?,
        })
    }

    /// By `ids` `[tokens]` u32, the adapter of each row; one that is none's has none.
    pub(crate) fn run<'a>(
        &'a mut self,
        stream: &Stream,
        ids: TensorView<'a>,
        adapters: &'a Adapters,
    ) -> Result<AdaptedRows<'a>, Error> {
        let tokens = ids.shape()[0];
        let order = self.order.view_mut().slice(0, 0..tokens)?;
        let positions = self.positions.view_mut().slice(0, 0..tokens)?;
        let args = MoePermuteArgs::new(ids.reshape(&[tokens, 1])?, self.offsets.view_mut(), order, positions);
        self.permute.holding(tokens)?.run(stream, args)?;
        Ok(AdaptedRows {
            ids,
            offsets: self.offsets.view(),
            order: self.order.view().slice(0, 0..tokens)?,
            positions: self.positions.view().slice(0, 0..tokens)?,
            ones: self.ones.view().slice(0, 0..tokens)?,
            adapters,
        })
    }
}

/// A step's rows, sorted by adapter, and what the adapters are.
pub(crate) struct AdaptedRows<'a> {
    /// `[tokens]`: the adapter of each.
    pub(super) ids: TensorView<'a>,
    offsets: TensorView<'a>,
    order: TensorView<'a>,
    positions: TensorView<'a>,
    ones: TensorView<'a>,
    adapters: &'a Adapters,
}

impl Step<'_> {
    /// What adapters add to a layer's mixer and to its feed-forward part, if some row has one.
    pub(crate) fn adapters(&self, layer: usize) -> [Option<&PartAdapters>; 2] {
        match self.adapted.and_then(|rows| rows.adapters.layers.get(layer)) {
            Some([mixer, feed_forward]) => [Some(mixer), Some(feed_forward)],
            None => [None, None],
        }
    }
}

/// A projection that adapters may add to, planned for one phase.
#[derive(Debug)]
pub(crate) struct LowRankBlock {
    plans: Plans<LowRankPlans>,
    /// `[tokens, rank]` and `[tokens, n]`, or a few columns more: both products, of the sorted rows.
    inner: Tensor,
    added: Tensor,
}

#[derive(Debug)]
struct LowRankPlans {
    down: GroupedMatmul,
    up: GroupedMatmul,
    put: MoeCombine,
    /// The projection itself, onto that.
    product: ProjectionPlan,
}

impl LowRankBlock {
    /// None if nothing is ever added: of rank 0.
    fn new(
        phase: &Phase<'_>,
        (adapters, rank): (usize, usize),
        weights: &Projection,
        [n, k]: [usize; 2],
    ) -> Result<Option<Self>, Error> {
        if rank == 0 {
            return Ok(None);
        }
        let &Phase { dtype, stream, .. } = phase;
        let device = stream.device();
        let plans = phase.plans(|phase| {
            let rows = phase.tokens;
            let from = GroupedRows::Gathered { fan_out: 1 };
            let down =
                GroupedMatmulProblem { from, ..GroupedMatmulProblem::new(rows, adapters, rank, k, dtype) };
            let up = GroupedMatmulProblem::new(rows, adapters, n, rank, dtype);
            Ok(LowRankPlans {
                down: GroupedMatmul::plan(device, down)?,
                up: GroupedMatmul::plan(device, up)?,
                put: MoeCombine::plan(device, MoeCombineProblem::new(rows, 1, n, dtype))?,
                product: ProjectionPlan::onto(&phase, weights, n, k)?,
            })
        })?;
        // Hopper's kernel loads rows beside those that have an adapter, which nobody writes.
        let inner = Tensor::zeros(stream, &[phase.tokens, rank], dtype)?;
        Ok(Some(LowRankBlock { plans, inner, added: phase.wide_rows(n)? }))
    }

    /// Of projections of a part, each with its size.
    pub(super) fn of_part<const N: usize>(
        phase: &Phase<'_>,
        part: Adapted,
        projections: [(Which, &Projection, [usize; 2]); N],
    ) -> Result<[Option<Self>; N], Error> {
        let mut blocks = [const { None }; N];
        let Some(AdapterSizes { adapters, ranks }) = phase.adapters else { return Ok(blocks) };
        for (block, (which, weights, size)) in std::iter::zip(&mut blocks, projections) {
            let rank = ranks[part as usize][which as usize];
            *block = Self::new(phase, (adapters, rank), weights, size)?;
        }
        Ok(blocks)
    }

    fn run(
        &mut self,
        stream: &Stream,
        rows: &AdaptedRows<'_>,
        (weights, low_rank): (&Projection, &LowRank),
        x: TensorView<'_>,
        mut out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let (tokens, cols) = (x.shape()[0], out.shape()[1]);
        let LowRankPlans { down, up, put, product } = self.plans.holding(tokens)?;
        let mut inner = self.inner.view_mut().slice(0, 0..tokens)?;
        let mut added = self.added.view_mut().slice(0, 0..tokens)?.slice(1, 0..cols)?;
        let args = GroupedMatmulArgs::new(x, low_rank.down.view(), rows.offsets, inner.reborrow());
        down.run(stream, GroupedMatmulArgs { order: Some(rows.order), ..args })?;
        let args =
            GroupedMatmulArgs::new(inner.as_view(), low_rank.up.view(), rows.offsets, added.reborrow());
        up.run(stream, args)?;
        let args = MoeCombineArgs::new(added.as_view(), rows.ones, rows.positions, out.reborrow());
        put.run(stream, args)?;
        product.run_fused(stream, weights, (x, None), (out, Some(Residual::InPlace)))
    }
}

/// Runs a projection, with what adapters add to it if some row of the step has one and there is something.
pub(super) fn run_adapted(
    step: &Step<'_>,
    (plan, block): (&ProjectionPlan, &mut Option<LowRankBlock>),
    weights: &Projection,
    (adapters, which): (Option<&PartAdapters>, Which),
    x: TensorView<'_>,
    out: TensorViewMut<'_>,
) -> Result<(), Error> {
    match (block, step.adapted, adapters.and_then(|own| own.of(which))) {
        (Some(block), Some(rows), Some(low_rank)) => {
            block.run(step.stream, rows, (weights, low_rank), x, out)
        }
        _ => plan.run(step.stream, weights, x, out),
    }
}

impl AdapterSizes {
    /// How many adapters there are.
    pub(super) fn len(&self) -> usize {
        self.adapters
    }

    /// The rank of what they add to a projection; 0 if nothing in any layer.
    pub(super) fn rank(&self, part: Adapted, which: Which) -> usize {
        self.ranks[part as usize][which as usize]
    }
}

impl PartAdapters {
    pub(super) fn of(&self, which: Which) -> Option<&LowRank> {
        self.0[which as usize].as_ref()
    }
}

/// A gate and up that adapters may add to: their product without the activation, which comes behind.
#[derive(Debug)]
pub(super) struct AdaptedGate {
    block: LowRankBlock,
    plans: Plans<GatePlans>,
    /// `[tokens, 2 · inner]`: gate and up, beside each other or in turn as the weight's rows; and beside each other.
    both: Tensor,
    parted: Option<Tensor>,
}

#[derive(Debug)]
struct GatePlans {
    glu: Glu,
    part: Option<Copy>,
}

impl AdaptedGate {
    /// With the last projection's.
    pub(super) fn of_mlp(
        phase: &Phase<'_>,
        part: Adapted,
        (gate_up, down): (&Projection, &Projection),
        (inner, activation): (usize, Activation),
    ) -> Result<(Option<Self>, Option<LowRankBlock>), Error> {
        let (hidden_size, dtype) = (phase.config.hidden_size, phase.dtype);
        let device = phase.stream.device();
        let gate_up_size = (Which::First, gate_up, [2 * inner, hidden_size]);
        let down_size = (Which::Last, down, [hidden_size, inner]);
        let [first, last] = LowRankBlock::of_part(phase, part, [gate_up_size, down_size])?;
        let Some(block) = first else { return Ok((None, last)) };
        let in_turn = gate_up.is_in_turn();
        let plans = phase.plans(|phase| {
            let rows = phase.tokens;
            let elements = rows.saturating_mul(2 * inner);
            let part = in_turn.then(|| Copy::plan(device, CopyProblem::new(elements, dtype, dtype)));
            let glu = Glu::plan(device, GluProblem { rows, cols: inner, dtype, activation })?;
            Ok(GatePlans { glu, part: part.transpose()? })
        })?;
        let both = phase.rows(&[2 * inner])?;
        let parted = in_turn.then(|| phase.rows(&[2 * inner])).transpose()?;
        Ok((Some(AdaptedGate { block, plans, both, parted }), last))
    }

    /// `act(gate) ⊙ up`, if some row has an adapter that adds to them; whether it has.
    pub(super) fn run(
        &mut self,
        step: &Step<'_>,
        (weights, adapters): (&Projection, Option<&PartAdapters>),
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<bool, Error> {
        let (Some(rows), Some(low_rank)) = (step.adapted, adapters.and_then(|own| own.of(Which::First)))
        else {
            return Ok(false);
        };
        let (stream, tokens, inner) = (step.stream, x.shape()[0], out.shape()[1]);
        let Self { block, plans, both, parted } = self;
        let GatePlans { glu, part } = plans.holding(tokens)?;
        let mut both = both.view_mut().slice(0, 0..tokens)?;
        block.run(stream, rows, (weights, low_rank), x, both.reborrow())?;
        let halves = match (part, parted) {
            (Some(part), Some(parted)) => {
                let src = both.as_view().reshape(&[tokens, inner, 2])?.swap_axes(1, 2)?;
                let dst = parted.view_mut().slice(0, 0..tokens)?.reshape(&[tokens, 2, inner])?;
                part.run(stream, CopyArgs { src, dst })?;
                parted.view().slice(0, 0..tokens)?
            }
            _ => both.as_view(),
        };
        let (gate, up) = (halves.slice(1, 0..inner)?, halves.slice(1, inner..2 * inner)?);
        glu.run(stream, GluArgs { gate, up: Some(up), out })?;
        Ok(true)
    }
}
