//! The parts of a decoder: weights, made by factories from the configuration. What runs them is in `plans` and `session`.

use abi::ops::glu::Activation;

use super::config::DecoderConfig;
use super::loader::Loader;
use crate::error::Error;
use crate::tensor::Tensor;

/// `y = x · weightᵀ (+ bias)`.
#[derive(Debug)]
pub struct Linear {
    /// `[out, in]`, as checkpoints store it.
    pub weight: Tensor,
    /// `[out]`.
    pub bias: Option<Tensor>,
}

impl Linear {
    /// Several projections of the same input as one: their rows above each other.
    fn new(loader: &mut Loader<'_>, parts: &[(&str, usize)], cols: usize, bias: bool) -> Result<Self, Error> {
        let named = |suffix: &str| -> Vec<(String, usize)> {
            parts.iter().map(|&(name, rows)| (format!("{name}.{suffix}"), rows)).collect()
        };
        let weight = loader.stacked(&named("weight"), cols)?;
        let bias = if bias { Some(loader.vectors(&named("bias"))?) } else { None };
        Ok(Linear { weight, bias })
    }
}

/// Grouped-query attention with a norm per head on q and k.
#[derive(Debug)]
pub struct Attention {
    /// q, k and v projections, above each other.
    pub qkv: Linear,
    /// Gain of the norm of each query head.
    pub q_norm: Tensor,
    /// Gain of the norm of each key head.
    pub k_norm: Tensor,
    /// Output projection.
    pub o: Linear,
    /// Sliding window in tokens, if this layer has one.
    pub window: Option<usize>,
}

impl Attention {
    pub(super) fn new(
        config: &DecoderConfig,
        loader: &mut Loader<'_>,
        prefix: &str,
        window: Option<usize>,
    ) -> Result<Self, Error> {
        let &DecoderConfig { hidden_size, heads_q, heads_kv, head_dim, attention_bias, .. } = config;
        let name = |part: &str| format!("{prefix}.{part}");
        let (q, k, v, o) = (name("q_proj"), name("k_proj"), name("v_proj"), name("o_proj"));
        let (q_rows, kv_rows) = (heads_q * head_dim, heads_kv * head_dim);
        let rows = [(q.as_str(), q_rows), (k.as_str(), kv_rows), (v.as_str(), kv_rows)];
        Ok(Attention {
            qkv: Linear::new(loader, &rows, hidden_size, attention_bias)?,
            q_norm: loader.gain(&name("q_norm.weight"), head_dim)?,
            k_norm: loader.gain(&name("k_norm.weight"), head_dim)?,
            o: Linear::new(loader, &[(o.as_str(), hidden_size)], q_rows, attention_bias)?,
            window,
        })
    }
}

/// Gated MLP: `down(act(gate(x)) ⊙ up(x))`.
#[derive(Debug)]
pub struct Mlp {
    /// gate and up projections, above each other.
    pub gate_up: Linear,
    /// Down projection.
    pub down: Linear,
    /// The gate's activation.
    pub activation: Activation,
}

impl Mlp {
    pub(super) fn new(config: &DecoderConfig, loader: &mut Loader<'_>, prefix: &str) -> Result<Self, Error> {
        let &DecoderConfig { hidden_size, intermediate_size, activation, .. } = config;
        let (gate, up, down) =
            (format!("{prefix}.gate_proj"), format!("{prefix}.up_proj"), format!("{prefix}.down_proj"));
        let rows = [(gate.as_str(), intermediate_size), (up.as_str(), intermediate_size)];
        Ok(Mlp {
            gate_up: Linear::new(loader, &rows, hidden_size, false)?,
            down: Linear::new(loader, &[(down.as_str(), hidden_size)], intermediate_size, false)?,
            activation,
        })
    }
}

/// One layer: norm, attention, norm, MLP, each pair around a residual.
#[derive(Debug)]
pub struct DecoderLayer {
    /// Gain of the norm before attention.
    pub input_norm: Tensor,
    /// Attention.
    pub attention: Attention,
    /// Gain of the norm before the MLP.
    pub post_attention_norm: Tensor,
    /// MLP.
    pub mlp: Mlp,
}

impl DecoderLayer {
    pub(super) fn new(config: &DecoderConfig, loader: &mut Loader<'_>, index: usize) -> Result<Self, Error> {
        let prefix = format!("model.layers.{index}");
        let hidden_size = config.hidden_size;
        let window = config.layer_windows[index];
        Ok(DecoderLayer {
            input_norm: loader.gain(&format!("{prefix}.input_layernorm.weight"), hidden_size)?,
            attention: Attention::new(config, loader, &format!("{prefix}.self_attn"), window)?,
            post_attention_norm: loader
                .gain(&format!("{prefix}.post_attention_layernorm.weight"), hidden_size)?,
            mlp: Mlp::new(config, loader, &format!("{prefix}.mlp"))?,
        })
    }
}

/// All weights of a decoder.
#[derive(Debug)]
pub struct Decoder {
    /// `[vocab, hidden]`.
    pub embedding: Tensor,
    /// The layers.
    pub layers: Vec<DecoderLayer>,
    /// Gain of the final norm.
    pub norm: Tensor,
    /// `[vocab, hidden]`; none if the embedding serves as the head.
    pub head: Option<Tensor>,
}

impl Decoder {
    pub(super) fn new(config: &DecoderConfig, loader: &mut Loader<'_>) -> Result<Self, Error> {
        let &DecoderConfig { vocab_size, hidden_size, num_layers, tie_word_embeddings, .. } = config;
        let embedding = loader.matrix("model.embed_tokens.weight", vocab_size, hidden_size)?;
        let layers = (0..num_layers)
            .map(|index| DecoderLayer::new(config, loader, index))
            .collect::<Result<_, _>>()?;
        let norm = loader.gain("model.norm.weight", hidden_size)?;
        let head = if tie_word_embeddings {
            None
        } else {
            Some(loader.matrix("lm_head.weight", vocab_size, hidden_size)?)
        };
        Ok(Decoder { embedding, layers, norm, head })
    }

    /// The matrix of the output head.
    pub fn head(&self) -> &Tensor {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}
