//! `config.json`: which model, and the numbers that define its computation.

mod check;
mod fields;
mod generation;
mod glm4_moe_lite;
mod llama;
mod pixels;
mod quantization;
mod qwen3;
mod qwen3_moe;
mod qwen3_next;
mod qwen3_vl;
mod rope;

use std::path::Path;

use abi::DType;
use abi::ops::glu::Activation;
use abi::ops::rope::RopeStyle;
use serde_json::Value;

use super::ModelError;
use super::gguf::{Gguf, config_json};
use crate::CacheType;
use fields::{Fields, Seen, whole};
pub(super) use fields::{parse_json, read_json, read_text};
pub use generation::GenerationConfig;
use host::Error;
use host::ops::moe_router::{ExpertGroups, RouterScore, RouterWeights};
pub(super) use host::ops::rmsnorm::NormWeight;
pub use pixels::PixelConfig;
pub(super) use quantization::{QuantConfig, Scheme};
pub use rope::{RopeConfig, RopeKind, YarnRope};

/// Largest configuration file, in bytes.
pub(super) const MAX_CONFIG_BYTES: u64 = 1 << 22;
/// Largest size, count or position: kernels take them as 32-bit integers.
const MAX_SIZE: usize = i32::MAX as usize;
/// Bound on the layer count, so that a wrong file cannot ask for an absurd allocation: a name for each expert of each
/// layer.
const MAX_LAYERS: usize = 1 << 10;
/// Most heads: kernels have them as a grid's second axis, and as a batch of products.
const MAX_HEADS: usize = (1 << 16) - 1;
/// Widest MLP: the rows of its gate are counted with those above them.
const MAX_INTERMEDIATE: usize = MAX_SIZE / 2;
/// Widest head whose values are as wide as its keys.
const MAX_HEAD_DIM: usize = abi::ops::attention::MAX_HEAD_DIM_V as usize;

/// A model's configuration, from `config.json` and, where present, `generation_config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Which model.
    pub architecture: Architecture,
    /// The numbers of its text decoder.
    pub decoder: DecoderConfig,
    /// Those of its vision tower, if it has one.
    pub vision: Option<VisionConfig>,
    /// The type in which the weights were published, if the file says so.
    pub dtype: Option<DType>,
    /// Tokens that end a generation; may be empty.
    pub eos_token_ids: Vec<u32>,
    /// The token that starts a sequence. Whether a prompt gets one is the tokenizer's decision.
    pub bos_token_id: Option<u32>,
    /// How its next tokens are to be chosen, if nobody says otherwise.
    pub generation: GenerationConfig,
    /// Keys of `config.json` that nobody asked for and that may be of effect elsewhere, with dots between the levels.
    /// Those that transformers ignores for the model type have none here either.
    pub unread_keys: Vec<String>,
}

/// The models that are built, one per `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Architecture {
    /// Dense Qwen3: grouped-query attention with per-head q and k norms, SwiGLU.
    Qwen3,
    /// Qwen3 with a mixture of experts.
    Qwen3Moe,
    /// Gated delta nets, with gated attention in every fourth layer, and a mixture of experts.
    Qwen3Next,
    /// The same decoder with a vision tower: Qwen3-VL.
    Qwen3Vl,
    /// Llama and what is built like it: grouped-query attention, SwiGLU.
    Llama,
    /// The same with a sliding window.
    Mistral,
    /// The same with biases of q, k and v.
    Qwen2,
    /// GLM-4.7-Flash: latent attention; experts, chosen by sigmoid scores with a correction.
    Glm4MoeLite,
    /// One of a caller's own: see [`ModelConfig::of_decoder`].
    Custom,
}

/// The numbers of a text decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Rows of the embedding and of the output head; may exceed the ids that the tokenizer uses.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// The norms around the layers, after the last one, and of query and key heads.
    pub norm: NormConfig,
    /// The layers, from the first on.
    pub layers: Vec<LayerConfig>,
    /// Whether the output head is the embedding matrix, unless a checkpoint has one of other values.
    pub tie_word_embeddings: bool,
    /// Longest sequence that the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Rotary position embedding.
    pub rope: RopeConfig,
}

impl DecoderConfig {
    /// Whether the embedding has a row for each of these tokens.
    ///
    /// **Errors**: [`Error::Invalid`] that names the first one without, and its place.
    pub fn check_ids(&self, ids: &[u32]) -> Result<(), Error> {
        match ids.iter().position(|&id| id as usize >= self.vocab_size) {
            None => Ok(()),
            Some(index) => {
                let expected = format!("token ids below {}", self.vocab_size);
                Err(Error::invalid("Session", "ids", expected, format!("{} at index {index}", ids[index])))
            }
        }
    }

    /// Bytes of a sequence's caches with room for `capacity` tokens, in all layers; `usize::MAX` if they are more.
    pub fn cache_bytes(&self, dtype: DType, capacity: usize) -> usize {
        self.cache_bytes_as(dtype, CacheType::Model, capacity)
    }

    /// The same with keys and values stored so.
    pub fn cache_bytes_as(&self, dtype: DType, cache_type: CacheType, capacity: usize) -> usize {
        let of_layer = |layer: &LayerConfig| layer.mixer.cache_bytes(dtype, cache_type, capacity);
        self.layers.iter().map(of_layer).fold(0, usize::saturating_add)
    }
}

impl MixerConfig {
    fn cache_bytes(&self, dtype: DType, cache_type: CacheType, capacity: usize) -> usize {
        match self {
            MixerConfig::Attention(AttentionConfig { heads_kv, head_dim, .. }) => {
                [2, *heads_kv, *head_dim, cache_type.dtype(dtype).bytes()]
                    .into_iter()
                    .fold(capacity, usize::saturating_mul)
            }
            MixerConfig::DeltaNet(net) => {
                let product = |sizes: [usize; 4]| sizes.into_iter().fold(1, usize::saturating_mul);
                let state = product([net.heads_v, net.dim_k, net.dim_v, DType::F32.bytes()]);
                let taps = net.conv_width.saturating_sub(1);
                state.saturating_add(product([net.channels(), taps, dtype.bytes(), 1]))
            }
            MixerConfig::Latent(latent) => {
                capacity.saturating_mul(latent.row()).saturating_mul(dtype.bytes())
            }
        }
    }
}

/// An RMSNorm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormConfig {
    /// Added to the mean square inside the root.
    pub eps: f32,
    /// What the stored gain means.
    pub weight: NormWeight,
}

/// A layer: what mixes tokens, and what follows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerConfig {
    /// What lets tokens see each other.
    pub mixer: MixerConfig,
    /// What works on each token alone.
    pub feed_forward: FeedForwardConfig,
}

/// What mixes the tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum MixerConfig {
    /// Softmax attention over cached keys and values.
    Attention(AttentionConfig),
    /// A gated delta net, whose state has a fixed size.
    DeltaNet(DeltaNetConfig),
    /// Softmax attention over cached latent rows.
    Latent(LatentConfig),
}

/// Grouped-query attention, perhaps with a norm per head on q and k.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Query heads.
    pub heads_q: usize,
    /// Key and value heads; divides `heads_q`.
    pub heads_kv: usize,
    /// Width of a head, a multiple of 8. Not tied to `hidden_size / heads_q`.
    pub head_dim: usize,
    /// Whether the q, k and v projections have biases.
    pub bias: bool,
    /// Whether the output projection has one.
    pub output_bias: bool,
    /// Whether heads of q and k are normed.
    pub qk_norm: bool,
    /// The sliding window in tokens, the query's own position included; `None` attends to everything before.
    pub window: Option<usize>,
    /// Whether the attended values are multiplied by the sigmoid of a gate, which the q projection gives beside each
    /// head.
    pub output_gate: bool,
}

/// A gated delta net: a short convolution over q, k and v, the gated delta rule, a gated norm per head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaNetConfig {
    /// Heads of q and k.
    pub heads_k: usize,
    /// Heads of v, a multiple of `heads_k`.
    pub heads_v: usize,
    /// Width of a head of q and k.
    pub dim_k: usize,
    /// Width of a head of v.
    pub dim_v: usize,
    /// Tokens that the convolution sees, the own included.
    pub conv_width: usize,
}

impl DeltaNetConfig {
    /// Channels of the convolution: q, k and v.
    pub(super) fn channels(&self) -> usize {
        let keys = self.heads_k.saturating_mul(self.dim_k).saturating_mul(2);
        keys.saturating_add(self.heads_v.saturating_mul(self.dim_v))
    }

    /// Rows of all input projections: q, k, v, z, b and a.
    pub(super) fn input_rows(&self) -> usize {
        self.channels() + self.heads_v * (self.dim_v + 2)
    }
}

/// Latent attention (MLA): all heads' keys and values are made of one latent row per token. A head of q and k has a
/// part that is not rotated, *nope*, and one that is, *rope*, which is the same for the keys of all heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentConfig {
    /// Heads.
    pub heads: usize,
    /// Width of the latent row that queries are made of; `None` makes them of the hidden state.
    pub q_latent: Option<usize>,
    /// Width of the latent row that keys and values are made of.
    pub latent: usize,
    /// Width of a head's part of q and k that is not rotated.
    pub nope: usize,
    /// Width of the part that is rotated; even.
    pub rope: usize,
    /// Width of a head's value.
    pub value: usize,
    /// Whether the projections into the latent space and out of attention have biases.
    pub bias: bool,
    /// Of the norms of the latent rows.
    pub eps: f32,
    /// What the scores are multiplied by.
    pub scale: f32,
    /// Which elements of a rotated part form a pair.
    pub style: RopeStyle,
}

impl LatentConfig {
    /// Width of a head of q and k.
    pub fn head_dim(&self) -> usize {
        self.nope.saturating_add(self.rope)
    }

    /// Width of a cached row.
    pub fn row(&self) -> usize {
        self.latent.saturating_add(self.rope)
    }
}

/// What follows the mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum FeedForwardConfig {
    /// A gated MLP.
    Mlp(MlpConfig),
    /// A mixture of experts.
    Moe(MoeConfig),
}

/// A gated MLP: `down(act(gate(x)) ⊙ up(x))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlpConfig {
    /// Width of the inner activation.
    pub intermediate_size: usize,
    /// The gate's activation.
    pub activation: Activation,
}

/// A mixture of experts, each a gated MLP, of which a router chooses some for each token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeConfig {
    /// Experts.
    pub num_experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// An expert.
    pub expert: MlpConfig,
    /// What a router's logit is turned into.
    pub score: RouterScore,
    /// Whether a bias is added to the scores for the choice.
    pub correction_bias: bool,
    /// Groups that bound the choice.
    pub groups: Option<ExpertGroups>,
    /// What the chosen experts' weights are.
    pub weights: RouterWeights,
    /// What the weights are multiplied by.
    pub scale: f32,
    /// Whether the weights are rounded to the type of the activations.
    pub round_weights: bool,
    /// An expert that every token has.
    pub shared: Option<SharedExpertConfig>,
}

/// An expert that every token has, besides those that are chosen for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedExpertConfig {
    /// The expert.
    pub mlp: MlpConfig,
    /// Its name in a checkpoint, below the layer's `mlp`.
    pub name: &'static str,
    /// Whether its result is multiplied by the sigmoid of a logit of its own, `shared_expert_gate` in a checkpoint.
    pub gate: bool,
}

impl MoeConfig {
    /// Whether the router has a row for the shared expert.
    pub(super) fn has_shared_gate(&self) -> bool {
        self.shared.is_some_and(|shared| shared.gate)
    }

    /// Rows of the router: one for each expert, and one for that gate.
    pub(super) fn router_rows(&self) -> usize {
        self.num_experts + usize::from(self.has_shared_gate())
    }
}

/// The numbers of a vision tower, and of how its output enters the decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Number of blocks.
    pub depth: usize,
    /// Width of a patch's features; a multiple of eight times `heads`.
    pub hidden_size: usize,
    /// Attention heads of a block.
    pub heads: usize,
    /// Width of the inner activation of a block's MLP.
    pub intermediate_size: usize,
    /// That activation.
    pub activation: Activation,
    /// Channels of a pixel.
    pub channels: usize,
    /// Frames of a patch.
    pub temporal_patch_size: usize,
    /// Height and width of a patch, in pixels.
    pub patch_size: usize,
    /// Patches that become a token are so many in height and in width.
    pub merge_size: usize,
    /// Width of the features that the decoder gets: its hidden size.
    pub out_hidden_size: usize,
    /// Height and width of the table of learned positions.
    pub position_grid: usize,
    /// Base of the rotary frequencies, above 1.
    pub rope_theta: f64,
    /// Blocks after which features are taken for the first decoder layers, ascending: the n-th for layer n.
    pub deepstack_blocks: Vec<usize>,
    /// Of the decoder's rotary frequencies, how many turn with a token's time, its row and its column.
    pub mrope_section: [usize; 3],
    /// The token in whose place a part of an image goes.
    pub image_token: u32,
    /// The same for a frame of a video.
    pub video_token: u32,
    /// The token before an image or frame.
    pub vision_start_token: u32,
    /// The token after it.
    pub vision_end_token: u32,
    /// How pixels become numbers.
    pub pixels: PixelConfig,
}

impl VisionConfig {
    /// Numbers of a patch: its pixels' channels.
    pub fn patch_len(&self) -> usize {
        let pixels = self.patch_size.saturating_mul(self.patch_size);
        self.channels.saturating_mul(self.temporal_patch_size).saturating_mul(pixels)
    }

    /// Patches that become a token.
    pub fn patches_per_token(&self) -> usize {
        self.merge_size.saturating_mul(self.merge_size)
    }
}

impl ModelConfig {
    /// Reads `config.json` in `dir`; where there are such files, the token ids of `generation_config.json` over it,
    /// with what that says of sampling; and for a model that sees, how images are made ready, of `image_processor` in
    /// `processor_config.json` or of `preprocessor_config.json`. In the place of a folder it takes a GGUF file, which
    /// has all of it in its metadata.
    ///
    /// # Errors
    /// [`ModelError::Missing`] or [`ModelError::Unreadable`] for `config.json`, [`ModelError::Json`] for any of the
    /// files, those of [`ModelConfig::from_json`], and [`ModelError::Inconsistent`] where the files contradict each
    /// other; [`ModelError::Gguf`] for a GGUF file.
    pub fn from_dir(dir: &Path) -> Result<ModelConfig, ModelError> {
        if dir.is_file() {
            return ModelConfig::from_gguf(&Gguf::open(dir)?, None);
        }
        let path = dir.join("config.json");
        let mut config = ModelConfig::from_value(&read_json(&path, MAX_CONFIG_BYTES)?, &path)?;
        let path = dir.join("generation_config.json");
        match read_json(&path, MAX_CONFIG_BYTES) {
            Ok(generation) => {
                let seen = Seen::default();
                let fields = Fields::top(&generation, &path, &seen)?;
                config.read_token_ids(&fields)?;
                config.generation = generation::read(&fields)?;
            }
            Err(ModelError::Missing { .. }) => {}
            Err(error) => return Err(error),
        }
        if let Some(vision) = &mut config.vision {
            vision.pixels = pixels::read(dir, vision)?;
        }
        Ok(config)
    }

    /// Of the metadata of a GGUF file, and of its vision tower's.
    pub(crate) fn from_gguf(file: &Gguf, tower: Option<&Gguf>) -> Result<ModelConfig, ModelError> {
        ModelConfig::from_value(&config_json(file, tower)?, file.path())
    }

    /// Reads the text of a `config.json`; `path` is for messages only.
    ///
    /// Absent keys take the defaults of the model type. Of those that nobody asked for, [`Self::unread_keys`] has the
    /// ones that may be of effect elsewhere; what would change results and is not built is an error.
    ///
    /// # Errors
    /// [`ModelError::Json`], [`ModelError::Field`], [`ModelError::UnknownModelType`], [`ModelError::Unsupported`] and
    /// [`ModelError::Inconsistent`].
    pub fn from_json(text: &str, path: &Path) -> Result<ModelConfig, ModelError> {
        ModelConfig::from_value(&parse_json(text, path)?, path)
    }

    fn from_value(root: &Value, path: &Path) -> Result<ModelConfig, ModelError> {
        let seen = Seen::default();
        let fields = Fields::top(root, path, &seen)?;
        let architecture = Architecture::read(&fields)?;
        check_variations(&fields)?;
        let (decoder, vision) = match architecture {
            Architecture::Qwen3 => (qwen3::read(&fields)?, None),
            Architecture::Qwen3Moe => (qwen3_moe::read(&fields)?, None),
            Architecture::Qwen3Next => (qwen3_next::read(&fields)?, None),
            Architecture::Llama => (llama::read(&fields)?, None),
            Architecture::Mistral => (llama::read_mistral(&fields)?, None),
            Architecture::Qwen2 => (llama::read_qwen2(&fields)?, None),
            Architecture::Glm4MoeLite => (glm4_moe_lite::read(&fields)?, None),
            Architecture::Qwen3Vl => {
                let (decoder, vision) = qwen3_vl::read(&fields)?;
                (decoder, Some(vision))
            }
            // No model type is read as one.
            Architecture::Custom => {
                let (path, supported) = (path.into(), Architecture::MODEL_TYPES);
                return Err(ModelError::UnknownModelType {
                    path,
                    found: "one of a caller's own".into(),
                    supported,
                });
            }
        };
        // Where the decoder's own fields are.
        let text = match architecture {
            Architecture::Qwen3Vl => Some(qwen3_vl::object(&fields, "text_config")?),
            _ => None,
        };
        if let Some(text) = &text {
            check_variations(text)?;
        }
        let dtype = match (read_dtype(&fields)?, &text) {
            (None, Some(text)) => read_dtype(text)?,
            (dtype, _) => dtype,
        };
        let mut config = ModelConfig {
            architecture,
            decoder,
            vision,
            dtype,
            eos_token_ids: Vec::new(),
            bos_token_id: None,
            generation: GenerationConfig::default(),
            unread_keys: Vec::new(),
        };
        if let Some(text) = text {
            config.read_token_ids(&text)?;
        }
        config.read_token_ids(&fields)?;
        config.unread_keys = root.as_object().map_or(Vec::new(), |map| seen.unread(map));
        Ok(config)
    }

    /// An architecture of a caller's own, made of the parts that a decoder has here: text alone, without ids that begin
    /// or end anything.
    ///
    /// The caller reads its `config.json` into a [`DecoderConfig`], and tells
    /// [`Checkpoint::open_custom`](super::Checkpoint::open_custom) what its tensors are called.
    pub fn of_decoder(decoder: DecoderConfig) -> Self {
        ModelConfig {
            architecture: Architecture::Custom,
            decoder,
            vision: None,
            dtype: None,
            eos_token_ids: Vec::new(),
            bos_token_id: None,
            generation: GenerationConfig::default(),
            unread_keys: Vec::new(),
        }
    }

    /// Takes the ids that `fields` states and keeps the others. A negative id is one that no token has.
    fn read_token_ids(&mut self, fields: &Fields) -> Result<(), ModelError> {
        let one = |value: &Value| match whole(value) {
            Some(id) => u32::try_from(id).ok().map(Some),
            None => value.as_i64().map(|_| None),
        };
        let many = |value: &Value| match value {
            Value::Array(ids) => {
                let ids: Option<Vec<Option<u32>>> = ids.iter().map(one).collect();
                Some(ids?.into_iter().flatten().collect())
            }
            id => one(id).map(|id| id.into_iter().collect()),
        };
        if let Some(ids) = fields.nullable("eos_token_id", "a token id or a list of them", many)? {
            self.eos_token_ids = ids;
        }
        if let Some(id) = fields.nullable("bos_token_id", "a token id", one)? {
            self.bos_token_id = id;
        }
        Ok(())
    }
}

impl Architecture {
    /// What the names of the decoder's tensors begin with, but for the head's.
    pub(super) fn decoder_prefix(self) -> &'static str {
        match self {
            Architecture::Qwen3Vl => "model.language_model",
            _ => "model",
        }
    }

    /// The values of `model_type` that are built.
    pub const MODEL_TYPES: &'static [&'static str] =
        &["qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "glm4_moe_lite", "llama", "mistral", "qwen2"];

    fn read(fields: &Fields) -> Result<Architecture, ModelError> {
        match fields.required("model_type", "a string", Value::as_str)? {
            "qwen3" => Ok(Architecture::Qwen3),
            "qwen3_moe" => Ok(Architecture::Qwen3Moe),
            "qwen3_next" => Ok(Architecture::Qwen3Next),
            "qwen3_vl" => Ok(Architecture::Qwen3Vl),
            "glm4_moe_lite" => Ok(Architecture::Glm4MoeLite),
            "llama" => Ok(Architecture::Llama),
            "mistral" => Ok(Architecture::Mistral),
            "qwen2" => Ok(Architecture::Qwen2),
            found => Err(ModelError::UnknownModelType {
                path: fields.path.into(),
                found: found.into(),
                supported: Self::MODEL_TYPES,
            }),
        }
    }
}

/// An error for what makes another model of any type, in transformers, and is not built.
fn check_variations(fields: &Fields) -> Result<(), ModelError> {
    // `QuantConfig` reads them.
    for key in ["quantization_config", "compression_config"] {
        fields.get(key);
    }
    if fields.flag("is_causal")? == Some(false) {
        return Err(fields.unsupported("is_causal", "false".into(), &["true"]));
    }
    match fields.get("per_layer_config") {
        None | Some(Value::Null) => Ok(()),
        Some(value) => Err(fields.unsupported(
            "per_layer_config",
            value.to_string(),
            &["one configuration for all layers"],
        )),
    }
}

/// `dtype`, or under its older name `torch_dtype`.
fn read_dtype(fields: &Fields) -> Result<Option<DType>, ModelError> {
    for key in ["dtype", "torch_dtype"] {
        if let Some(name) = fields.nullable(key, "a string", Value::as_str)? {
            return match name {
                "float32" => Ok(Some(DType::F32)),
                "float16" => Ok(Some(DType::F16)),
                "bfloat16" => Ok(Some(DType::BF16)),
                other => Err(fields.unsupported(key, other.into(), &["float32", "float16", "bfloat16"])),
            };
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
