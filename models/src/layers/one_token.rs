//! All layers of a step of one token, in one launch.

use std::sync::atomic::{AtomicBool, Ordering};

use abi::DType;
use abi::ops::glu::Activation;

use super::{Cache, CacheType, FeedForward, Group, Keys, Mixer, Phase, ProjectionWeight, Step, Visible};
use crate::config::{AttentionConfig, DecoderConfig, FeedForwardConfig, LayerConfig, MixerConfig, MlpConfig};
use crate::decoder::DecoderLayer;
use host::ops::decoder_layers::{self, DecoderLayers, DecoderLayersArgs, DecoderLayersProblem};
use host::{Device, Error, Fallback, Kernel, OptimizationReport, TensorView, TensorViewMut};

/// The layers of a decoder whose layers are all of attention and an MLP, planned for one token of one sequence.
#[derive(Debug)]
pub(crate) struct OneToken {
    plan: DecoderLayers,
    config: AttentionConfig,
    /// The device has refused a launch.
    is_refused: AtomicBool,
}

impl OneToken {
    /// None where layers are others than the kernel's, where it is not for the card, and where nothing may depend on
    /// how many sequences there are: its bits are not those of the operators one by one.
    pub(crate) fn new(phase: &Phase<'_>, layers: &[DecoderLayer]) -> Result<Option<Self>, Error> {
        let device = phase.stream.device();
        let (Some(MixerConfig::Attention(config)), Some(problem)) =
            (phase.config.layers.first().map(|layer| layer.mixer), Self::problem(phase, layers))
        else {
            return Ok(None);
        };
        // Where the device refuses it, the operators one by one stand in, and not the CPU.
        let itself = device.with_fallback(Fallback::Error);
        if device.limits().is_none() || DecoderLayers::supports(&itself, &problem).is_err() {
            return Ok(None);
        }
        match DecoderLayers::plan(&itself, problem) {
            Ok(plan) => Ok(Some(OneToken { plan, config, is_refused: AtomicBool::new(false) })),
            Err(error) => stand_in(device, error).map(|()| None),
        }
    }

    fn problem(phase: &Phase<'_>, layers: &[DecoderLayer]) -> Option<DecoderLayersProblem> {
        let &DecoderConfig { hidden_size, norm, ref rope, layers: ref configs, .. } = phase.config;
        // The first group is that of one token for each sequence.
        let group = phase.groups.first().filter(|group| group.seq == 1 && !group.ragged)?;
        let of = |layer: &LayerConfig| match (layer.mixer, layer.feed_forward) {
            (MixerConfig::Attention(attention), FeedForwardConfig::Mlp(mlp)) => Some((attention, mlp)),
            _ => None,
        };
        let (attention, mlp) = configs.first().and_then(of)?;
        let are_alike = configs.iter().all(|config| of(config) == Some((attention, mlp)));
        let AttentionConfig { heads_q, heads_kv, head_dim, bias, output_bias, qk_norm, window, output_gate } =
            attention;
        let is_plain = !bias && !output_bias && !output_gate && window.is_none();
        let is_alone = phase.rank.is_none() && !phase.is_invariant() && phase.cache_type == CacheType::Model;
        let has_heads = head_dim == decoder_layers::reference::HEAD_DIM && rope.rotary_dim == head_dim;
        let MlpConfig { intermediate_size, activation } = mlp;
        let is_wanted = are_alike
            && is_plain
            && is_alone
            && has_heads
            && activation == Activation::Silu
            && phase.dtype == DType::BF16
            && layers.iter().all(|layer| tensors(layer).is_some());
        let sizes = [hidden_size, intermediate_size];
        let heads = [heads_q, heads_kv];
        is_wanted.then(|| DecoderLayersProblem {
            page_size: group.page_tokens,
            weight: norm.weight,
            qk_norm,
            ..DecoderLayersProblem::new(configs.len(), sizes, heads, group.capacity, phase.dtype, norm.eps)
        })
    }

    /// What was chosen, unless the device has refused it.
    pub(crate) fn report(&self) -> Option<OptimizationReport> {
        (!self.is_refused.load(Ordering::Relaxed)).then(|| self.plan.optimization_report())
    }

    /// The token's keys, if the step is one of a token that has nothing of its own.
    pub(crate) fn keys<'a>(step: &'a Step<'_>) -> Option<(TensorView<'a>, Option<TensorView<'a>>)> {
        if step.tokens != 1 || step.visual.is_some() || step.adapted.is_some() {
            return None;
        }
        let (Some(Some(Group { sequences: 1, ragged: false, keys, .. })), true) =
            (step.groups.first(), step.groups.iter().skip(1).all(Option::is_none))
        else {
            return None;
        };
        match keys {
            Keys::Rows { sequences, visible: Visible::PerSequence(lens) } if *sequences == (0..1) => {
                Some((*lens, None))
            }
            Keys::Pages { table, lens, shared: None } => Some((*lens, Some(*table))),
            Keys::Rows { .. } | Keys::Pages { .. } => None,
        }
    }

    /// From the token's embedding to the residual behind the last layer. Whether that is done: not where the device
    /// refuses it and lets others stand in.
    pub(crate) fn run(
        &self,
        step: &Step<'_>,
        (lens, pages): (TensorView<'_>, Option<TensorView<'_>>),
        layers: &[DecoderLayer],
        caches: &mut [Cache],
        (x, out): (TensorView<'_>, TensorViewMut<'_>),
    ) -> Result<bool, Error> {
        if self.is_refused.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let AttentionConfig { heads_kv, head_dim, .. } = self.config;
        let mut own = Vec::with_capacity(layers.len());
        for (layer, cache) in std::iter::zip(layers, caches) {
            let (Some([qkv, o, gate_up, down]), Mixer::Attention(attention), Cache::KeysValues(cache)) =
                (tensors(layer), &layer.mixer, cache)
            else {
                return Err(Error::invalid("Session", "layer", "attention and an MLP", "others"));
            };
            let [k_cache, v_cache] = cache.views_mut();
            let slots = k_cache.shape()[0] * k_cache.shape()[1];
            own.push(decoder_layers::LayerTensors {
                qkv,
                o,
                gate_up,
                down,
                input_norm: layer.input_norm.view(),
                post_attention_norm: layer.post_attention_norm.view(),
                q_norm: attention.q_norm.as_ref().map(|gain| gain.view()),
                k_norm: attention.k_norm.as_ref().map(|gain| gain.view()),
                k_cache: k_cache.reshape(&[slots, heads_kv, head_dim])?,
                v_cache: v_cache.reshape(&[slots, heads_kv, head_dim])?,
            });
        }
        let args = DecoderLayersArgs {
            x,
            layers: &mut own,
            positions: step.positions,
            tables: step.ropes,
            slots: step.slots,
            lens,
            pages,
            out,
        };
        match self.plan.run(step.stream, args) {
            Ok(()) => Ok(true),
            Err(error) => {
                stand_in(step.stream.device(), error)?;
                self.is_refused.store(true, Ordering::Relaxed);
                Ok(false)
            }
        }
    }
}

/// Says that the operators one by one stand in, where the device has refused all layers at once and lets them; the
/// error itself otherwise.
fn stand_in(device: &Device, error: Error) -> Result<(), Error> {
    if device.fallback() == Fallback::Error || !error.is_refusal() {
        return Err(error);
    }
    device.say_stands_in("decoder_layers", "the operators one by one", &error);
    Ok(())
}

/// The weights of a layer: of q, k and v; of attention's output; of gate and up; of down. None if they are others, or
/// not plain.
fn tensors(layer: &DecoderLayer) -> Option<[TensorView<'_>; 4]> {
    let (Mixer::Attention(attention), FeedForward::Mlp(mlp)) = (&layer.mixer, &layer.feed_forward) else {
        return None;
    };
    let mut views = [&attention.qkv, &attention.o, &mlp.gate_up, &mlp.down].into_iter().map(|projection| {
        match (&projection.weight, &projection.bias) {
            (ProjectionWeight::Plain(weight), None) => Some(weight.view()),
            _ => None,
        }
    });
    let mut next = || views.next().flatten();
    Some([next()?, next()?, next()?, next()?])
}
