//! A whole decoder: its weights, its operators planned for a phase, and the forward pass.

use std::ops::Range;

use abi::DType;

use super::config::DecoderConfig;
use super::layers::{
    Cache, FeedForward, FeedForwardBlock, InPlace, Mixer, MixerBlock, OneToken, Phase, Plans,
    ProjectionWeight, Step,
};
use super::loader::Loader;
use super::part::{Cut, Part};
use host::Error;
use host::Invariance;
use host::group::Communicator;
use host::ops::copy::{Copy, CopyArgs, CopyProblem};
use host::ops::embedding::{Embedding, EmbeddingArgs, EmbeddingProblem};
use host::ops::matmul::{Matmul, MatmulArgs, MatmulB, MatmulProblem};
use host::ops::rmsnorm::{RmsNorm, RmsNormArgs};
use host::weight::Layout;
use host::{Constant, Tensor, TensorView, TensorViewMut};
use host::{Kernel, OptimizationReport, Stream};

/// One layer: norm, mixer, norm, feed-forward, each pair around a residual.
#[derive(Debug)]
pub struct DecoderLayer {
    /// Gain of the norm before the mixer.
    pub input_norm: Constant,
    /// What mixes the tokens.
    pub mixer: Mixer,
    /// Gain of the norm before the feed-forward part.
    pub post_attention_norm: Constant,
    /// What follows.
    pub feed_forward: FeedForward,
}

impl DecoderLayer {
    fn new(
        config: &DecoderConfig,
        loader: &mut Loader<'_>,
        prefix: &str,
        index: usize,
    ) -> Result<Self, Error> {
        let prefix = format!("{prefix}.layers.{index}");
        let name = |part: &str| format!("{prefix}.{part}");
        let (layer, hidden_size) = (&config.layers[index], config.hidden_size);
        let input_norm = loader.gain(&name("input_layernorm.weight"), hidden_size)?;
        let mixer = Mixer::new(&layer.mixer, hidden_size, loader, &prefix)?;
        let post_attention_norm = loader.gain(&name("post_attention_layernorm.weight"), hidden_size)?;
        let feed_forward = FeedForward::new(&layer.feed_forward, hidden_size, loader, &prefix)?;
        Ok(DecoderLayer { input_norm, mixer, post_attention_norm, feed_forward })
    }
}

/// All weights of a decoder.
#[derive(Debug)]
pub struct Decoder {
    /// `[vocab, hidden]`, quantised or not.
    pub embedding: ProjectionWeight,
    /// The layers.
    pub layers: Vec<DecoderLayer>,
    /// Gain of the final norm.
    pub norm: Constant,
    /// `[vocab, hidden]`, at a rank of a group its rows of it; none if the embedding serves as the head.
    pub head: Option<ProjectionWeight>,
    /// The tokens that are of this rank.
    rows: Range<usize>,
}

impl Decoder {
    /// Of tensors whose names begin with `prefix`.
    pub(super) fn new(config: &DecoderConfig, loader: &mut Loader<'_>, prefix: &str) -> Result<Self, Error> {
        let &DecoderConfig { vocab_size, hidden_size, tie_word_embeddings, .. } = config;
        const HEAD: &str = "lm_head.weight";
        let name = format!("{prefix}.embed_tokens.weight");
        // One of two tied tensors is enough; where a file has both, it is right about whether they are the same.
        let (table, has_head) = match (tie_word_embeddings, loader.contains(HEAD), loader.contains(&name)) {
            (false, ..) => (name.as_str(), true),
            (true, true, false) => (HEAD, false),
            (true, true, true) => (name.as_str(), !loader.is_same(&name, HEAD)),
            (true, false, _) => (name.as_str(), false),
        };
        // Of a tied table a rank's head are some rows, which a packed one cannot be taken apart into.
        let is_whole = loader.part() == Part::WHOLE;
        let embedding = if has_head || is_whole {
            loader.table(table, vocab_size.into(), hidden_size)?
        } else {
            ProjectionWeight::Plain(loader.matrix(table, vocab_size.into(), hidden_size)?)
        };
        let layers = (0..config.layers.len())
            .map(|index| DecoderLayer::new(config, loader, prefix, index))
            .collect::<Result<_, _>>()?;
        let norm = loader.gain(&format!("{prefix}.norm.weight"), hidden_size)?;
        let rows = loader.part().tokens(vocab_size);
        let head_rows = Cut::range(vocab_size, rows.clone());
        let head = if has_head { Some(loader.table(HEAD, head_rows, hidden_size)?) } else { None };
        Ok(Decoder { embedding, layers, norm, head, rows })
    }

    /// The matrix of the output head, at a rank of a group its rows of it.
    ///
    /// **Errors**: none of a decoder that has been loaded.
    pub fn head(&self) -> Result<MatmulB<'_>, Error> {
        match (&self.head, &self.embedding) {
            (Some(head), _) => Ok(head.operand()),
            (None, ProjectionWeight::Plain(table)) => Ok(table.view().slice(0, self.rows.clone())?.into()),
            (None, table) => Ok(table.operand()),
        }
    }

    /// How the head is packed, if it is.
    fn head_layout(&self) -> Option<Layout> {
        self.head.as_ref().unwrap_or(&self.embedding).layout()
    }
}

/// A tensor that an observer sees, `[tokens, hidden]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Observed {
    /// The input of this layer: the sum of all that came before.
    LayerInput(usize),
    /// What this layer's mixer gets: its input behind the norm.
    MixerInput(usize),
    /// What this layer's mixer adds.
    MixerOutput(usize),
    /// What this layer's feed-forward part gets: the sum so far, behind the norm.
    FeedForwardInput(usize),
    /// What this layer's feed-forward part adds.
    FeedForwardOutput(usize),
    /// The output of the final norm.
    FinalNorm,
}

impl std::fmt::Display for Observed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Observed::LayerInput(layer) => write!(f, "layer {layer}, its input"),
            Observed::MixerInput(layer) => write!(f, "layer {layer}, input_layernorm's output"),
            Observed::MixerOutput(layer) => write!(f, "layer {layer}, the mixer's output"),
            Observed::FeedForwardInput(layer) => {
                write!(f, "layer {layer}, post_attention_layernorm's output")
            }
            Observed::FeedForwardOutput(layer) => write!(f, "layer {layer}, the feed-forward part's output"),
            Observed::FinalNorm => f.write_str("the final norm's output"),
        }
    }
}

/// Sees tensors of a forward pass while they are there.
pub type Observer<'a> = dyn FnMut(Observed, TensorView<'_>) -> Result<(), Error> + 'a;

/// A decoder planned for one phase.
#[derive(Debug)]
pub(super) struct DecoderBlock {
    plans: Plans<DecoderPlans>,
    /// All layers of a step of one token, if there is a kernel for that.
    one_token: Option<OneToken>,
    /// One for each configuration that a layer has.
    mixers: Vec<MixerBlock>,
    feed_forwards: Vec<FeedForwardBlock>,
    /// Per layer, which of them.
    of_layer: Vec<(usize, usize)>,
    /// Of the rows of logits.
    heads: Plans<Head>,
    /// With the other ranks of a group, if there is one.
    shared: Option<Shared>,
    /// The residual stream, without the last sublayer's output, which is in `projected`.
    residual: Tensor,
    normed: Tensor,
    projected: Tensor,
    /// `[logit_rows, hidden]`: those of the tokens whose logits are asked for by number, if that is possible.
    chosen: Option<Tensor>,
}

#[derive(Debug)]
struct DecoderPlans {
    embedding: Embedding,
    norm: RmsNorm,
}

#[derive(Debug)]
struct Head {
    /// The tokens that are asked for by number.
    choose: Option<Embedding>,
    product: Matmul,
}

/// What a rank has in common with the others of its group.
#[derive(Debug)]
struct Shared {
    rank: Communicator,
    /// From a rank's logits to those of all.
    copy: Copy,
    /// `[rows, most]` f32: logits of this rank's tokens, and those of all ranks, `[ranks, rows, most]`.
    own: Tensor,
    all: Tensor,
}

impl Shared {
    fn new(phase: &Phase<'_>, rank: &Communicator) -> Result<Self, Error> {
        let (stream, rows) = (phase.stream, phase.logit_rows);
        let most = phase.config.vocab_size.div_ceil(rank.size());
        let (src, dst) = (DType::F32, DType::F32);
        let copy = CopyProblem { elements: rows.saturating_mul(most), src, dst };
        Ok(Shared {
            rank: rank.clone(),
            copy: Copy::plan(stream.device(), copy)?,
            own: Tensor::empty(stream, &[rows, most], DType::F32)?,
            all: Tensor::empty(stream, &[rank.size() * rows, most], DType::F32)?,
        })
    }

    /// The logits of all tokens, of those that each rank has.
    fn gather(&mut self, stream: &Stream, mut out: TensorViewMut<'_>) -> Result<(), Error> {
        let &[rows, vocab_size] = out.shape() else {
            return Err(Error::invalid("Session", "logits", "[rows, vocab]", format!("{:?}", out.shape())));
        };
        let (ranks, most) = (self.rank.size(), self.own.shape()[1]);
        let own = self.own.view().slice(0, 0..rows)?;
        if rows == 1 && ranks * most == vocab_size {
            return self.rank.all_gather(stream, own, out);
        }
        let mut all = self.all.view_mut().slice(0, 0..ranks * rows)?;
        self.rank.all_gather(stream, own, all.reborrow())?;
        for rank in 0..ranks {
            let tokens = Part::new(rank, ranks).tokens(vocab_size);
            let src = all.as_view().slice(0, rank * rows..(rank + 1) * rows)?.slice(1, 0..tokens.len())?;
            self.copy.run(stream, CopyArgs { src, dst: out.reborrow().slice(1, tokens)? })?;
        }
        Ok(())
    }
}

/// Logits that a forward pass gives.
pub(super) struct LogitArgs<'a> {
    /// `[rows]` u32: of which tokens; the last ones, if none.
    pub(super) tokens: Option<TensorView<'a>>,
    /// `[rows, vocab]` f32.
    pub(super) out: TensorViewMut<'a>,
}

impl DecoderBlock {
    pub(super) fn new(phase: &Phase<'_>, decoder: &Decoder) -> Result<Self, Error> {
        let &Phase { stream, config, dtype, logit_rows, .. } = phase;
        let &DecoderConfig { vocab_size, hidden_size, .. } = config;
        let device = stream.device();
        if phase.rank.is_some() && device.invariance() == Invariance::Batch {
            let expected = "without Invariance::Batch for a model over several devices, whose sums go ways that \
                            depend on sizes";
            return Err(Error::invalid("Session", "device", expected, device.describe()));
        }
        // Layers of one configuration, whose weights are quantised alike, share what is planned.
        let (mut mixer_kinds, mut feed_forward_kinds) = (Vec::new(), Vec::new());
        let (mut mixers, mut feed_forwards) = (Vec::new(), Vec::new());
        let mut of_layer = Vec::new();
        for (layer, weights) in std::iter::zip(&config.layers, &decoder.layers) {
            let mixer = index_of(&mut mixer_kinds, (layer.mixer, weights.mixer.kinds()));
            if mixer == mixers.len() {
                mixers.push(MixerBlock::new(phase, &layer.mixer, &weights.mixer)?);
            }
            let feed_forward =
                index_of(&mut feed_forward_kinds, (layer.feed_forward, weights.feed_forward.kinds()));
            if feed_forward == feed_forwards.len() {
                feed_forwards.push(FeedForwardBlock::new(phase, &layer.feed_forward, &weights.feed_forward)?);
            }
            of_layer.push((mixer, feed_forward));
        }
        let hidden = || phase.rows(&[hidden_size]);
        let plans = phase.plans(|phase| {
            let table = EmbeddingProblem {
                weight: decoder.embedding.layout(),
                ..EmbeddingProblem::new(phase.tokens, vocab_size, hidden_size, dtype)
            };
            let norm = phase.norm(phase.tokens, hidden_size)?;
            Ok(DecoderPlans { embedding: Embedding::plan(device, table)?, norm })
        });
        let heads = phase.plans_to(logit_rows, |part| {
            let rows = part.tokens;
            let chosen = EmbeddingProblem::new(rows, phase.tokens, hidden_size, dtype);
            let product = MatmulProblem {
                out_dtype: DType::F32,
                weight: decoder.head_layout(),
                ..MatmulProblem::new(rows, decoder.rows.len().max(1), hidden_size, dtype)
            };
            let choose = phase.chooses.then(|| Embedding::plan(device, chosen)).transpose()?;
            Ok(Head { choose, product: Matmul::plan(device, product)? })
        });
        Ok(DecoderBlock {
            plans: plans?,
            one_token: OneToken::new(phase, &decoder.layers)?,
            mixers,
            feed_forwards,
            of_layer,
            heads: heads?,
            shared: phase.rank.map(|rank| Shared::new(phase, rank)).transpose()?,
            residual: hidden()?,
            normed: hidden()?,
            projected: hidden()?,
            chosen: phase
                .chooses
                .then(|| Tensor::empty(stream, &[logit_rows, hidden_size], dtype))
                .transpose()?,
        })
    }

    /// What each operator chose, in the order in which they run.
    pub(super) fn reports(&self) -> Vec<OptimizationReport> {
        let of =
            |plans: &DecoderPlans| [plans.embedding.optimization_report(), plans.norm.optimization_report()];
        let mut reports: Vec<_> = self.plans.iter().flat_map(of).collect();
        reports.extend(self.one_token.iter().filter_map(OneToken::report));
        reports.extend(self.mixers.iter().flat_map(MixerBlock::reports));
        reports.extend(self.feed_forwards.iter().flat_map(FeedForwardBlock::reports));
        reports.extend(self.heads.iter().map(|head| head.product.optimization_report()));
        reports
    }

    /// The forward pass. Where nobody observes it, parts of a layer may work on the residual itself.
    pub(super) fn run(
        &mut self,
        step: &Step<'_>,
        decoder: &Decoder,
        caches: &mut [Cache],
        logits: Option<LogitArgs<'_>>,
        mut observe: Option<&mut Observer<'_>>,
    ) -> Result<(), Error> {
        let (stream, tokens) = (step.stream, step.tokens);
        let is_observed = observe.is_some();
        let mut observe = |what: Observed, rows: TensorView<'_>| match &mut observe {
            Some(observe) => observe(what, rows),
            None => Ok(()),
        };
        // Whether `projected` is still to be added to the residual.
        let mut is_pending = false;
        let Self {
            plans,
            one_token,
            mixers,
            feed_forwards,
            of_layer,
            heads,
            shared,
            residual,
            normed: all,
            projected,
            chosen,
        } = self;
        let DecoderPlans { embedding, norm } = plans.holding(tokens)?;
        let mut residual = residual.view_mut().slice(0, 0..tokens)?;
        let mut normed = all.view_mut().slice(0, 0..tokens)?;
        let mut projected = projected.view_mut().slice(0, 0..tokens)?;
        let table = decoder.embedding.operand();
        embedding.run(stream, EmbeddingArgs::new(table, step.ids, residual.reborrow()))?;
        if let Some(rows) = step.visual {
            rows.replace(stream, residual.reborrow())?;
        }
        let of_one = one_token.as_ref().filter(|_| !is_observed).zip(OneToken::keys(step));
        // What is left to do.
        let mut layers = &decoder.layers[..];
        if let Some((one_token, keys)) = of_one {
            let rows = (residual.as_view(), projected.reborrow());
            if one_token.run(step, keys, layers, caches, rows)? {
                std::mem::swap(&mut residual, &mut projected);
                layers = &[];
            }
        }
        for (index, (layer, cache)) in std::iter::zip(layers, caches).enumerate() {
            let (mixer, feed_forward) = of_layer[index];
            let may_be_in_place = !is_observed && step.visual.is_none() && step.adapted.is_none();
            let [to_mixer, to_feed_forward] = step.adapters(index);
            let gain = layer.input_norm.view();
            let works_in_place = may_be_in_place && feed_forwards[feed_forward].works_in_place(tokens);
            if may_be_in_place && !is_pending && mixers[mixer].works_in_place(tokens) {
                let rows = InPlace { residual: residual.reborrow(), gain, normed: None };
                mixers[mixer].run_in_place(step, &layer.mixer, cache, rows)?;
            } else if works_in_place && mixers[mixer].adds_in_place(tokens) {
                norm_sum(stream, norm, gain, (&projected, is_pending), &mut residual, normed.reborrow())?;
                let rows = InPlace { residual: residual.reborrow(), gain, normed: Some(normed.as_view()) };
                mixers[mixer].run_in_place(step, &layer.mixer, cache, rows)?;
                is_pending = false;
            } else {
                norm_sum(stream, norm, gain, (&projected, is_pending), &mut residual, normed.reborrow())?;
                observe(Observed::LayerInput(index), residual.as_view())?;
                observe(Observed::MixerInput(index), normed.as_view())?;
                let weights = (&layer.mixer, to_mixer);
                mixers[mixer].run(step, weights, cache, normed.as_view(), projected.reborrow())?;
                if let Some(Shared { rank, .. }) = &shared {
                    rank.all_reduce(stream, projected.reborrow())?;
                }
                observe(Observed::MixerOutput(index), projected.as_view())?;
                is_pending = true;
            }
            let gain = layer.post_attention_norm.view();
            if works_in_place && !is_pending {
                let rows = InPlace { residual: residual.reborrow(), gain, normed: None };
                feed_forwards[feed_forward].run_in_place(step, &layer.feed_forward, rows)?;
                continue;
            }
            norm_sum(stream, norm, gain, (&projected, is_pending), &mut residual, normed.reborrow())?;
            if may_be_in_place && feed_forwards[feed_forward].adds_in_place(tokens) {
                let rows = InPlace { residual: residual.reborrow(), gain, normed: Some(normed.as_view()) };
                feed_forwards[feed_forward].run_in_place(step, &layer.feed_forward, rows)?;
                is_pending = false;
                continue;
            }
            observe(Observed::FeedForwardInput(index), normed.as_view())?;
            feed_forwards[feed_forward].run(
                step,
                (&layer.feed_forward, to_feed_forward),
                normed.as_view(),
                projected.reborrow(),
            )?;
            if let Some(Shared { rank, .. }) = &shared {
                rank.all_reduce(stream, projected.reborrow())?;
            }
            observe(Observed::FeedForwardOutput(index), projected.as_view())?;
            if let Some(rows) = step.visual {
                rows.add(stream, index, projected.reborrow())?;
            }
            is_pending = true;
        }
        let gain = decoder.norm.view();
        norm_sum(stream, norm, gain, (&projected, is_pending), &mut residual, normed.reborrow())?;
        observe(Observed::FinalNorm, normed.as_view())?;
        let Some(LogitArgs { tokens: which, out }) = logits else { return Ok(()) };
        let rows = out.shape()[0];
        let Head { choose, product } = heads.holding(rows)?;
        let a = match (which, choose, chosen) {
            (Some(ids), Some(choose), Some(chosen)) => {
                // A table of all rows that there are, as it has a planned number.
                let (table, out) = (all.view(), chosen.view_mut().slice(0, 0..rows)?);
                choose.run(stream, EmbeddingArgs::new(table, ids, out))?;
                chosen.view().slice(0, 0..rows)?
            }
            _ => all.view().slice(0, tokens - rows..tokens)?,
        };
        let Some(shared) = shared else {
            return product.run(stream, MatmulArgs::new(a, decoder.head()?, out));
        };
        if !decoder.rows.is_empty() {
            let own = shared.own.view_mut().slice(0, 0..rows)?.slice(1, 0..decoder.rows.len())?;
            product.run(stream, MatmulArgs::new(a, decoder.head()?, own))?;
        }
        shared.gather(stream, out)
    }
}

/// The norm of the residual, to which what a part has left is added first if that is pending.
fn norm_sum(
    stream: &Stream,
    norm: &RmsNorm,
    weight: TensorView<'_>,
    (projected, is_pending): (&TensorViewMut<'_>, bool),
    residual: &mut TensorViewMut<'_>,
    out: TensorViewMut<'_>,
) -> Result<(), Error> {
    let args = if is_pending {
        let residual = Some(residual.reborrow());
        RmsNormArgs { x: projected.as_view(), residual, weight, gate: None, out }
    } else {
        RmsNormArgs { x: residual.as_view(), residual: None, weight, gate: None, out }
    };
    norm.run(stream, args)
}

/// The place of `kind` in `kinds`, where it is put if it is not there.
fn index_of<T: PartialEq>(kinds: &mut Vec<T>, kind: T) -> usize {
    kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
        kinds.push(kind);
        kinds.len() - 1
    })
}
