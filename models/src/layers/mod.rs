//! The parts of a decoder, a file each: its weights, made by a factory from the configuration; its block, which is the
//! operators planned for a phase with the memory between them; and its cache.
//!
//! A session has a block for each *kind* of part, a configuration, in each phase, and a cache for each layer.

mod attention;
mod cache;
mod delta_net;
mod expert_low_rank;
mod group;
mod latent;
mod linear;
mod low_rank;
mod mlp;
mod moe;
mod one_token;
mod projection;

pub use attention::SelfAttention;
pub use cache::CacheType;
pub use delta_net::DeltaNet;
pub use latent::LatentAttention;
pub use linear::Linear;
pub use mlp::Mlp;
pub use moe::Moe;
pub use projection::{Projection, ProjectionWeight};

use abi::DType;

use super::config::{DecoderConfig, FeedForwardConfig, MixerConfig};
use super::loader::Loader;
use super::vision::VisualRows;
use attention::AttentionBlock;
pub(super) use cache::Cache;
use delta_net::DeltaNetBlock;
pub(super) use group::{Group, GroupPhase, Keys, SharedPages, Span, Visible};
use host::Error;
use host::Invariance;
use host::OptimizationReport;
use host::Stream;
use host::group::Communicator;
use host::ops::matmul::{Act, Activations, Bias, Epilogue, Matmul, MatmulProblem, RowNorm};
use host::ops::rmsnorm::{RmsNorm, RmsNormProblem};
use host::ops::rope::RopeTables;
use host::{Tensor, TensorView, TensorViewMut};
use latent::LatentBlock;
use low_rank::Adapted;
pub(super) use low_rank::{AdaptedRows, AdapterSizes, Adapters, PartAdapters, RowSorter};
use mlp::MlpBlock;
use moe::MoeBlock;
pub(super) use one_token::OneToken;
use projection::ProjectionPlan;
pub(super) use projection::{Form, ProjectionKind};

/// What mixes the tokens of a sequence.
#[derive(Debug)]
#[non_exhaustive]
// A few kilobytes for all layers of a model.
#[expect(clippy::large_enum_variant)]
pub enum Mixer {
    /// Softmax attention.
    Attention(SelfAttention),
    /// A gated delta net.
    DeltaNet(Box<DeltaNet>),
    /// Softmax attention over latent rows.
    Latent(Box<LatentAttention>),
}

/// What works on each token alone.
// One per layer, which stays where it is made.
#[expect(clippy::large_enum_variant)]
#[derive(Debug)]
#[non_exhaustive]
pub enum FeedForward {
    /// A gated MLP.
    Mlp(Mlp),
    /// A mixture of experts.
    Moe(Moe),
}

impl Mixer {
    /// Of the layer whose tensors' names begin with `prefix`.
    pub(super) fn new(
        config: &MixerConfig,
        hidden_size: usize,
        loader: &mut Loader<'_>,
        prefix: &str,
    ) -> Result<Self, Error> {
        match config {
            MixerConfig::Attention(config) => Ok(Mixer::Attention(SelfAttention::new(
                config,
                hidden_size,
                loader,
                &format!("{prefix}.self_attn"),
            )?)),
            MixerConfig::DeltaNet(config) => Ok(Mixer::DeltaNet(Box::new(DeltaNet::new(
                config,
                hidden_size,
                loader,
                &format!("{prefix}.linear_attn"),
            )?))),
            MixerConfig::Latent(config) => Ok(Mixer::Latent(Box::new(LatentAttention::new(
                config,
                hidden_size,
                loader,
                &format!("{prefix}.self_attn"),
            )?))),
        }
    }
}

impl FeedForward {
    /// Of the layer whose tensors' names begin with `prefix`.
    pub(super) fn new(
        config: &FeedForwardConfig,
        hidden_size: usize,
        loader: &mut Loader<'_>,
        prefix: &str,
    ) -> Result<Self, Error> {
        let prefix = format!("{prefix}.mlp");
        match config {
            FeedForwardConfig::Mlp(config) => {
                Ok(FeedForward::Mlp(Mlp::new(config, hidden_size, loader, &prefix)?))
            }
            FeedForwardConfig::Moe(config) => {
                Ok(FeedForward::Moe(Moe::new(config, hidden_size, loader, &prefix)?))
            }
        }
    }
}

/// What blocks are planned for.
#[derive(Clone, Copy)]
pub(super) struct Phase<'a> {
    pub(super) stream: &'a Stream,
    pub(super) config: &'a DecoderConfig,
    pub(super) dtype: DType,
    /// What keys and values are stored as.
    pub(super) cache_type: CacheType,
    /// What becomes of rows before products with fp8 weights.
    pub(super) activations: Activations,
    /// Most tokens of a step: what there is memory for.
    pub(super) tokens: usize,
    /// Numbers of tokens, ascending and below `tokens`, that have plans of their own besides.
    pub(super) sizes: &'a [usize],
    /// The groups of a step.
    pub(super) groups: &'a [GroupPhase],
    /// Most rows of logits.
    pub(super) logit_rows: usize,
    /// Whether they may be of tokens by number.
    pub(super) chooses: bool,
    /// The rank of a group whose part of the model it is, if there are others.
    pub(super) rank: Option<&'a Communicator>,
    /// What adapters add, if there are any.
    pub(super) adapters: Option<AdapterSizes>,
}

impl<'a> Phase<'a> {
    /// The same for so many tokens at most, and no other number of them.
    fn of(&self, tokens: usize) -> Phase<'a> {
        Phase { tokens, sizes: &[], ..*self }
    }

    /// What works on rows one by one, planned for each number of tokens.
    pub(super) fn plans<T>(
        &self,
        plan: impl FnMut(Phase<'a>) -> Result<T, Error>,
    ) -> Result<Plans<T>, Error> {
        self.plans_to(self.tokens, plan)
    }

    /// The same for up to `most` rows.
    pub(super) fn plans_to<T>(
        &self,
        most: usize,
        mut plan: impl FnMut(Phase<'a>) -> Result<T, Error>,
    ) -> Result<Plans<T>, Error> {
        let sizes = self.sizes.iter().copied().filter(|&size| size < most).chain([most]);
        Ok(Plans(sizes.map(|size| Ok((size, plan(self.of(size))?))).collect::<Result<_, Error>>()?))
    }

    /// `act([tokens, k] · [n, k]ᵀ + bias)`, or gated, with a weight that may be quantised.
    pub(super) fn product(
        &self,
        n: usize,
        k: usize,
        bias: bool,
        act: Act,
        form: Option<Form>,
    ) -> Result<Matmul, Error> {
        Matmul::plan(self.stream.device(), self.problem(n, k, bias, act, form))
    }

    fn problem(&self, n: usize, k: usize, bias: bool, act: Act, form: Option<Form>) -> MatmulProblem {
        let (weight, activations) = match form {
            Some(Form::Packed(layout)) => (Some(layout), self.activations),
            Some(Form::Int8) => (None, Activations::Int8),
            None => (None, Activations::AsGiven),
        };
        let bias = if bias { Bias::PerColumn } else { Bias::None };
        let problem = MatmulProblem::new(self.tokens, n, k, self.dtype);
        MatmulProblem { bias, epilogue: Epilogue::of(act), weight, activations, ..problem }
    }

    /// Whether parts of a layer may work on the residual itself ([`MixerBlock::run_in_place`]), where kernels are: for
    /// few tokens, whose layer is as long as its launches are many. A rank of a group has sums to add up first.
    fn may_work_in_place(&self) -> bool {
        self.tokens <= RowNorm::MAX_ROWS
            && self.rank.is_none()
            && !self.is_invariant()
            && self.stream.device().limits().is_some()
    }

    /// Whether nothing may depend on how many rows and sequences there are.
    fn is_invariant(&self) -> bool {
        self.stream.device().invariance() == Invariance::Batch
    }

    /// The decoder's norm over rows of `cols`.
    pub(super) fn norm(&self, rows: usize, cols: usize) -> Result<RmsNorm, Error> {
        RmsNorm::plan(self.stream.device(), self.norm_problem(rows, cols))
    }

    /// The same in the product behind it.
    pub(super) fn row_norm(&self) -> RowNorm {
        let norm = self.config.norm;
        RowNorm { eps: norm.eps, weight: norm.weight }
    }

    fn norm_problem(&self, rows: usize, cols: usize) -> RmsNormProblem {
        let (dtype, norm) = (self.dtype, self.config.norm);
        RmsNormProblem { rows, cols, dtype, eps: norm.eps, weight: norm.weight }
    }

    /// Memory for a row of so many columns of each token, whose rows begin at multiples of 16 bytes: kernels that are
    /// chosen by how columns of them are aligned are the same for one row and for many.
    pub(super) fn wide_rows(&self, cols: usize) -> Result<Tensor, Error> {
        self.rows(&[cols.next_multiple_of(16 / self.dtype.bytes())])
    }

    /// Memory for a row of each token.
    pub(super) fn rows(&self, shape: &[usize]) -> Result<Tensor, Error> {
        Tensor::empty(self.stream, &[&[self.tokens], shape].concat(), self.dtype)
    }
}

/// Plans of one thing, each with the most rows that it is for, ascending.
#[derive(Debug)]
pub(super) struct Plans<T>(Vec<(usize, T)>);

impl<T> Plans<T> {
    /// Those for the fewest rows that these are among.
    pub(super) fn holding(&self, rows: usize) -> Result<&T, Error> {
        let most = self.0.last().map_or(0, |&(most, _)| most);
        let plan = self.0.iter().find(|&&(most, _)| rows <= most);
        plan.map(|(_, plan)| plan).ok_or_else(|| {
            Error::invalid("Session", "rows", format!("at most {most}, as planned"), rows.to_string())
        })
    }

    /// All, from few rows to many.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|(_, plan)| plan)
    }
}

/// One forward pass: the tokens, packed, and the groups of sequences that they belong to.
pub(super) struct Step<'a> {
    pub(super) stream: &'a Stream,
    pub(super) ropes: &'a RopeTables,
    pub(super) tokens: usize,
    /// `[tokens]` u32: token ids.
    pub(super) ids: TensorView<'a>,
    /// `[tokens]` u32: rows of `ropes`: positions in their sequences, or places in a chunk whose angles are its own.
    pub(super) positions: TensorView<'a>,
    /// `[tokens]` u32: rows of the cache, all its sequences or pages in one; one beyond it for a token that leaves
    /// nothing.
    pub(super) slots: TensorView<'a>,
    /// Those that were planned, in their order; none where a step has no tokens of it.
    pub(super) groups: &'a [Option<Group<'a>>],
    /// Features of images that take the places of tokens, if the prompt has any.
    pub(super) visual: Option<&'a VisualRows<'a>>,
    /// Rows by their adapters, if some have any.
    pub(super) adapted: Option<&'a AdaptedRows<'a>>,
}

impl Step<'_> {
    /// Its groups, each with what a mixer has for that group.
    pub(super) fn groups<'b, T>(&'b self, of: &'b [T]) -> impl Iterator<Item = (&'b T, &'b Group<'b>)> {
        std::iter::zip(of, self.groups).filter_map(|(of, group)| Some((of, group.as_ref()?)))
    }
}

impl Mixer {
    /// What its plans depend on besides the configuration.
    pub(super) fn kinds(&self) -> Vec<ProjectionKind> {
        match self {
            Mixer::Attention(mixer) => mixer.kinds(),
            Mixer::DeltaNet(mixer) => mixer.kinds(),
            Mixer::Latent(mixer) => mixer.kinds(),
        }
    }
}

/// The residual that parts of a layer work on themselves: their first products norm it, and their last one adds to it.
pub(super) struct InPlace<'a> {
    /// `[tokens, hidden]`.
    pub(super) residual: TensorViewMut<'a>,
    /// `[hidden]`.
    pub(super) gain: TensorView<'a>,
    /// `[tokens, hidden]`: the residual behind its norm, of a part that [only adds](MixerBlock::adds_in_place).
    pub(super) normed: Option<TensorView<'a>>,
}

impl<'a> InPlace<'a> {
    /// What the first products are of: the normed residual, or that itself and the norm's gain.
    pub(super) fn input(&self) -> (TensorView<'_>, Option<TensorView<'a>>) {
        self.normed.map_or((self.residual.as_view(), Some(self.gain)), |normed| (normed, None))
    }
}

impl FeedForward {
    /// What its plans depend on besides the configuration.
    pub(super) fn kinds(&self) -> Vec<ProjectionKind> {
        match self {
            FeedForward::Mlp(mlp) => mlp.kinds(),
            FeedForward::Moe(moe) => moe.kinds(),
        }
    }
}

/// A mixer planned for one phase, with the memory between its operators.
#[derive(Debug)]
pub(super) enum MixerBlock {
    /// Of a rank that has none of the heads.
    Idle,
    Attention(Box<AttentionBlock>),
    DeltaNet(Box<DeltaNetBlock>),
    Latent(Box<LatentBlock>),
}

impl MixerBlock {
    /// For layers whose weights are quantised as these are.
    pub(super) fn new(phase: &Phase<'_>, config: &MixerConfig, weights: &Mixer) -> Result<Self, Error> {
        let heads = match config {
            MixerConfig::Attention(config) => config.heads_q,
            MixerConfig::DeltaNet(config) => config.heads_k,
            MixerConfig::Latent(config) => config.heads,
        };
        match (config, weights) {
            _ if heads == 0 => Ok(MixerBlock::Idle),
            (MixerConfig::Attention(config), Mixer::Attention(weights)) => {
                Ok(MixerBlock::Attention(Box::new(AttentionBlock::new(phase, config, weights)?)))
            }
            (MixerConfig::DeltaNet(config), Mixer::DeltaNet(weights)) => {
                Ok(MixerBlock::DeltaNet(Box::new(DeltaNetBlock::new(phase, config, weights)?)))
            }
            (MixerConfig::Latent(config), Mixer::Latent(weights)) => {
                Ok(MixerBlock::Latent(Box::new(LatentBlock::new(phase, config, weights)?)))
            }
            _ => Err(Error::invalid("Session", "layer", "the parts of one mixer", "those of several")),
        }
    }

    pub(super) fn reports(&self) -> Vec<OptimizationReport> {
        match self {
            MixerBlock::Idle => Vec::new(),
            MixerBlock::Attention(block) => block.reports(),
            MixerBlock::DeltaNet(block) => block.reports(),
            MixerBlock::Latent(block) => block.reports(),
        }
    }

    /// Whether it has plans to work on the residual itself for so many tokens.
    pub(super) fn works_in_place(&self, tokens: usize) -> bool {
        match self {
            MixerBlock::Attention(block) => block.works_in_place(tokens),
            MixerBlock::Latent(block) => block.works_in_place(tokens),
            MixerBlock::Idle | MixerBlock::DeltaNet(_) => false,
        }
    }

    /// Whether it has plans to add to the residual itself what it makes of the normed rows of so many tokens.
    pub(super) fn adds_in_place(&self, tokens: usize) -> bool {
        match self {
            MixerBlock::Idle => false,
            MixerBlock::Attention(block) => block.adds_in_place(tokens),
            MixerBlock::DeltaNet(block) => block.adds_in_place(tokens),
            MixerBlock::Latent(block) => block.adds_in_place(tokens),
        }
    }

    /// Adds what the mixer makes of the residual, behind the norm, to it; of those that do so for as many tokens.
    pub(super) fn run_in_place(
        &mut self,
        step: &Step<'_>,
        weights: &Mixer,
        cache: &mut Cache,
        rows: InPlace<'_>,
    ) -> Result<(), Error> {
        match (self, weights, cache) {
            (MixerBlock::Attention(block), Mixer::Attention(weights), Cache::KeysValues(cache)) => {
                block.run_in_place(step, weights, cache, rows)
            }
            (MixerBlock::DeltaNet(block), Mixer::DeltaNet(weights), Cache::Delta(cache)) => {
                block.run_in_place(step, weights, cache, rows)
            }
            (MixerBlock::Latent(block), Mixer::Latent(weights), Cache::LatentRows(cache)) => {
                block.run_in_place(step, weights, cache, rows)
            }
            _ => Err(Error::invalid("Session", "layer", "the parts of one mixer", "those of several")),
        }
    }

    pub(super) fn run(
        &mut self,
        step: &Step<'_>,
        (weights, adapters): (&Mixer, Option<&PartAdapters>),
        cache: &mut Cache,
        x: TensorView<'_>,
        mut out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        match (self, weights, cache) {
            (MixerBlock::Idle, ..) => out.fill_zero(step.stream),
            (MixerBlock::Attention(block), Mixer::Attention(weights), Cache::KeysValues(cache)) => {
                block.run(step, (weights, adapters), cache, x, out)
            }
            (MixerBlock::DeltaNet(block), Mixer::DeltaNet(weights), Cache::Delta(cache)) => {
                block.run(step, (weights, adapters), cache, x, out)
            }
            (MixerBlock::Latent(block), Mixer::Latent(weights), Cache::LatentRows(cache)) => {
                block.run(step, (weights, adapters), cache, x, out)
            }
            // Weights, blocks and caches are made from one configuration.
            _ => Err(Error::invalid("Session", "layer", "the parts of one mixer", "those of several")),
        }
    }
}

/// A feed-forward part planned for one phase, with the memory between its operators.
// One per kind and phase, which stays where it is made.
#[expect(clippy::large_enum_variant)]
#[derive(Debug)]
pub(super) enum FeedForwardBlock {
    /// Of a rank that has none of the columns.
    Idle,
    Mlp(MlpBlock),
    Moe(MoeBlock),
}

impl FeedForwardBlock {
    /// For layers whose weights are quantised as these are.
    pub(super) fn new(
        phase: &Phase<'_>,
        config: &FeedForwardConfig,
        weights: &FeedForward,
    ) -> Result<Self, Error> {
        match (config, weights) {
            (FeedForwardConfig::Mlp(config), _) if config.intermediate_size == 0 => {
                Ok(FeedForwardBlock::Idle)
            }
            (FeedForwardConfig::Mlp(config), FeedForward::Mlp(weights)) => {
                Ok(FeedForwardBlock::Mlp(MlpBlock::new(phase, Adapted::Mlp, config, weights)?))
            }
            (FeedForwardConfig::Moe(config), FeedForward::Moe(weights)) => {
                Ok(FeedForwardBlock::Moe(MoeBlock::new(phase, config, weights)?))
            }
            _ => Err(Error::invalid("Session", "layer", "the parts of one feed-forward", "those of several")),
        }
    }

    pub(super) fn reports(&self) -> Vec<OptimizationReport> {
        match self {
            FeedForwardBlock::Idle => Vec::new(),
            FeedForwardBlock::Mlp(block) => block.reports(),
            FeedForwardBlock::Moe(block) => block.reports(),
        }
    }

    /// As [`MixerBlock::works_in_place`].
    pub(super) fn works_in_place(&self, tokens: usize) -> bool {
        match self {
            FeedForwardBlock::Mlp(block) => block.works_in_place(tokens),
            FeedForwardBlock::Moe(block) => block.works_in_place(tokens),
            FeedForwardBlock::Idle => false,
        }
    }

    /// As [`MixerBlock::adds_in_place`].
    pub(super) fn adds_in_place(&self, tokens: usize) -> bool {
        match self {
            FeedForwardBlock::Moe(block) => block.adds_in_place(tokens),
            FeedForwardBlock::Idle | FeedForwardBlock::Mlp(_) => false,
        }
    }

    /// As [`MixerBlock::run_in_place`].
    pub(super) fn run_in_place(
        &mut self,
        step: &Step<'_>,
        weights: &FeedForward,
        rows: InPlace<'_>,
    ) -> Result<(), Error> {
        match (self, weights) {
            (FeedForwardBlock::Mlp(block), FeedForward::Mlp(weights)) => {
                block.run_in_place(step, weights, rows)
            }
            (FeedForwardBlock::Moe(block), FeedForward::Moe(weights)) => {
                block.run_in_place(step, weights, rows)
            }
            _ => Err(Error::invalid("Session", "layer", "the parts of one feed-forward", "those of several")),
        }
    }

    pub(super) fn run(
        &mut self,
        step: &Step<'_>,
        (weights, adapters): (&FeedForward, Option<&PartAdapters>),
        x: TensorView<'_>,
        mut out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        match (self, weights) {
            (FeedForwardBlock::Idle, _) => out.fill_zero(step.stream),
            (FeedForwardBlock::Mlp(block), FeedForward::Mlp(weights)) => {
                block.run(step, (weights, adapters), x, out)
            }
            (FeedForwardBlock::Moe(block), FeedForward::Moe(weights)) => {
                block.run(step, (weights, adapters), x, out)
            }
            _ => Err(Error::invalid("Session", "layer", "the parts of one feed-forward", "those of several")),
        }
    }
}

/// A plan to work on the residual itself, of a part that has said that it does.
fn planned<T>(plan: Option<&T>) -> Result<&T, Error> {
    plan.ok_or_else(|| Error::invalid("Session", "layer", "plans to work on the residual", "none"))
}

/// Makes the first `len` entries of row `to` of a cache what those of row `from` are; the rows differ.
fn copy_row(
    stream: &Stream,
    cache: &mut Tensor,
    (from, to): (usize, usize),
    len: usize,
) -> Result<(), Error> {
    let (first, second) = (from.min(to), from.max(to));
    let (before, after) = cache.view_mut().split(second)?;
    let first = before.slice(0, first..first + 1)?.slice(1, 0..len)?;
    let second = after.slice(0, 0..1)?.slice(1, 0..len)?;
    if from < to { stream.copy(first.as_view(), second) } else { stream.copy(second.as_view(), first) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::Device;

    /// What is beyond a sequence's tokens is not copied: a cache may be of a hundred thousand, and a sequence of a few.
    #[test]
    fn copies_are_of_the_tokens_that_there_are() -> Result<(), Error> {
        let stream = Device::cpu().stream()?;
        for (from, to) in [(0, 2), (2, 1)] {
            for len in 0..=4 {
                let mut values: Vec<f32> = (0..3 * 4 * 5).map(|i| i as f32).collect();
                let mut cache = Tensor::from_slice(&stream, &[3, 4, 5], &values)?;
                copy_row(&stream, &mut cache, (from, to), len)?;
                values.copy_within(from * 20..from * 20 + len * 5, to * 20);
                assert_eq!(cache.to_vec::<f32>(&stream)?, values, "{from} to {to}, {len}");
            }
        }
        Ok(())
    }
}
