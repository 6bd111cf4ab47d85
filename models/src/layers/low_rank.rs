//! What adapters add to projections: products of a low rank, of each row with the matrices of its own adapter.
//!
//! Rows are sorted by adapter once a step. A projection then takes three launches more: both products, of the rows of
//! adapters alone, and their results put where the rows are; onto them goes the product of the projection itself.

use std::collections::BTreeSet;

use abi::DType;

use super::{Mixer, Phase, Plans, Projection, ProjectionPlan, ProjectionWeight, SelfAttention, Step};
use crate::adapter::{Adapter, Modules, check_used};
use crate::config::{AttentionConfig, DecoderConfig, FeedForwardConfig, MixerConfig, MlpConfig};
use crate::decoder::DecoderLayer;
use crate::layers::FeedForward;
use crate::loader::encode;
use crate::part::Part;
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
    /// `[adapters, rank, in]`
    down: Constant,
    /// `[adapters, out, rank]`, times each adapter's scale.
    up: Constant,
}

/// What adapters add to the first and to the last projection of a part of a layer.
#[derive(Debug, Default)]
pub(crate) struct PartAdapters {
    first: Option<LowRank>,
    last: Option<LowRank>,
}

/// How many adapters there are, and the ranks of what they add: to the projections of a mixer, and of a feed-forward
/// part; 0 if nothing in any layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdapterSizes {
    adapters: usize,
    mixer: [usize; 2],
    feed_forward: [usize; 2],
}

/// Adapters on a device, by layer: what they add to mixers and to feed-forward parts.
#[derive(Debug)]
pub(crate) struct Adapters {
    sizes: AdapterSizes,
    layers: Vec<[PartAdapters; 2]>,
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
        let modules = std::iter::zip(&config.layers, layers).enumerate().map(|(index, (config, weights))| {
            let prefix = format!("{prefix}.layers.{index}");
            let mixer = match (&config.mixer, &weights.mixer) {
                (MixerConfig::Attention(config), Mixer::Attention(_)) => {
                    Some(of_attention(config, hidden_size, &prefix))
                }
                _ => None,
            };
            let feed_forward = match (&config.feed_forward, &weights.feed_forward) {
                (FeedForwardConfig::Mlp(config), FeedForward::Mlp(mlp)) => {
                    let in_turn = matches!(mlp.gate_up.weight, ProjectionWeight::Packed(_));
                    Some(of_mlp(config, hidden_size, &prefix, in_turn))
                }
                _ => None,
            };
            [mixer, feed_forward]
        });
        let modules: Vec<[Option<[Modules; 2]>; 2]> = modules.collect();
        modules.iter().flatten().flatten().flatten().try_for_each(|modules| modules.check(adapters))?;
        let rank = |part: usize, which: usize| {
            let own = modules.iter().filter_map(|layer| layer[part].as_ref());
            let rank = own.map(|own| own[which].rank(adapters)).max().unwrap_or(0);
            rank.next_multiple_of(RANK_UNIT)
        };
        let ranks = [0, 1].map(|part| [0, 1].map(|which| rank(part, which)));
        let mut used = vec![BTreeSet::new(); adapters.len()];
        let mut layers = Vec::new();
        for layer in &modules {
            let mut own = [PartAdapters::default(), PartAdapters::default()];
            for ((part, ranks), modules) in std::iter::zip(std::iter::zip(&mut own, ranks), layer) {
                let Some(modules) = modules else { continue };
                let mut read = |which: usize| -> Result<Option<LowRank>, Error> {
                    let (modules, rank) = (&modules[which], ranks[which]);
                    let Some(matrices) = modules.read(adapters, rank, &mut used)? else { return Ok(None) };
                    let constant = |shape: [usize; 2], values: &[f32]| {
                        let shape = [adapters.len(), shape[0], shape[1]];
                        let tensor = Tensor::from_bytes(stream, &shape, dtype, &encode(values, dtype))?;
                        Constant::new(tensor, stream)
                    };
                    Ok(Some(LowRank {
                        down: constant([rank, modules.cols], &matrices.down)?,
                        up: constant([modules.rows(), rank], &matrices.up)?,
                    }))
                };
                *part = PartAdapters { first: read(0)?, last: read(1)? };
            }
            layers.push(own);
        }
        check_used(adapters, &used)?;
        let [mixer, feed_forward] = ranks;
        Ok(Adapters { sizes: AdapterSizes { adapters: adapters.len(), mixer, feed_forward }, layers })
    }

    pub(crate) fn sizes(&self) -> AdapterSizes {
        self.sizes
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.sizes.adapters
    }
}

fn of_attention(config: &AttentionConfig, hidden_size: usize, prefix: &str) -> [Modules; 2] {
    let prefix = format!("{prefix}.self_attn");
    let (parts, cols) = SelfAttention::parts(config, Part::WHOLE, &prefix);
    let o = (format!("{prefix}.o_proj"), hidden_size.into());
    [
        Modules { parts, cols: hidden_size, in_turn: false },
        Modules { parts: vec![o], cols: cols.len(), in_turn: false },
    ]
}

fn of_mlp(config: &MlpConfig, hidden_size: usize, prefix: &str, in_turn: bool) -> [Modules; 2] {
    let inner = config.intermediate_size;
    let name = |part: &str| format!("{prefix}.mlp.{part}");
    let parts = ["gate_proj", "up_proj"].map(|part| (name(part), inner.into()));
    let down = (name("down_proj"), hidden_size.into());
    [
        Modules { parts: parts.to_vec(), cols: hidden_size, in_turn },
        Modules { parts: vec![down], cols: inner, in_turn: false },
    ]
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
        ids: TensorView<'_>,
        adapters: &'a Adapters,
    ) -> Result<AdaptedRows<'a>, Error> {
        let tokens = ids.shape()[0];
        let args = MoePermuteArgs {
            ids: ids.reshape(&[tokens, 1])?,
            offsets: self.offsets.view_mut(),
            order: self.order.view_mut().slice(0, 0..tokens)?,
            positions: self.positions.view_mut().slice(0, 0..tokens)?,
        };
        self.permute.holding(tokens)?.run(stream, args)?;
        Ok(AdaptedRows {
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
    /// `[tokens, rank]` and `[tokens, n]`: both products, of the sorted rows.
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
        Ok(Some(LowRankBlock { plans, inner, added: phase.rows(&[n])? }))
    }

    /// Both projections of a mixer.
    pub(super) fn of_mixer(
        phase: &Phase<'_>,
        first: (&Projection, [usize; 2]),
        last: (&Projection, [usize; 2]),
    ) -> Result<[Option<Self>; 2], Error> {
        let Some(AdapterSizes { adapters, mixer: [a, b], .. }) = phase.adapters else {
            return Ok([None, None]);
        };
        Ok([
            Self::new(phase, (adapters, a), first.0, first.1)?,
            Self::new(phase, (adapters, b), last.0, last.1)?,
        ])
    }

    fn run(
        &mut self,
        stream: &Stream,
        rows: &AdaptedRows<'_>,
        (weights, low_rank): (&Projection, &LowRank),
        x: TensorView<'_>,
        mut out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let tokens = x.shape()[0];
        let LowRankPlans { down, up, put, product } = self.plans.holding(tokens)?;
        let mut inner = self.inner.view_mut().slice(0, 0..tokens)?;
        let mut added = self.added.view_mut().slice(0, 0..tokens)?;
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

/// The first or the last projection of a part.
#[derive(Clone, Copy)]
pub(super) enum Which {
    First,
    Last,
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

impl PartAdapters {
    fn of(&self, which: Which) -> Option<&LowRank> {
        match which {
            Which::First => self.first.as_ref(),
            Which::Last => self.last.as_ref(),
        }
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
        (gate_up, down): (&Projection, &Projection),
        inner: usize,
        activation: Activation,
    ) -> Result<(Option<Self>, Option<LowRankBlock>), Error> {
        let Some(AdapterSizes { adapters, feed_forward: [first, last], .. }) = phase.adapters else {
            return Ok((None, None));
        };
        let (hidden_size, dtype) = (phase.config.hidden_size, phase.dtype);
        let device = phase.stream.device();
        let last = LowRankBlock::new(phase, (adapters, last), down, [hidden_size, inner])?;
        let Some(block) = LowRankBlock::new(phase, (adapters, first), gate_up, [2 * inner, hidden_size])?
        else {
            return Ok((None, last));
        };
        let in_turn = matches!(gate_up.weight, ProjectionWeight::Packed(_));
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
