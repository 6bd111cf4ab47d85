//! `config.json`: which model, and the numbers that define its computation.

use std::f64::consts::PI;
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use abi::DType;
use abi::ops::glu::Activation;
use serde_json::{Map, Value};

use super::ModelError;

/// Largest size, count or position: kernels take them as 32-bit integers.
const MAX_SIZE: usize = i32::MAX as usize;
/// Bound on the layer count, so that a wrong file cannot ask for an absurd allocation.
const MAX_LAYERS: usize = 1 << 16;

/// A model's configuration, from `config.json` and, where present, `generation_config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Which model.
    pub architecture: Architecture,
    /// The numbers of its text decoder.
    pub decoder: DecoderConfig,
    /// The type in which the weights were published, if the file says so.
    pub dtype: Option<DType>,
    /// Tokens that end a generation; may be empty.
    pub eos_token_ids: Vec<u32>,
    /// The token that starts a sequence. Whether a prompt gets one is the tokenizer's decision.
    pub bos_token_id: Option<u32>,
}

/// The models that are built, one per `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Architecture {
    /// Dense Qwen3: grouped-query attention with per-head q and k norms, SwiGLU.
    Qwen3,
}

/// The numbers of a text decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Rows of the embedding and of the output head; may exceed the ids that the tokenizer uses.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP's inner activation.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key and value heads; divides `heads_q`.
    pub heads_kv: usize,
    /// Width of a head, even. Not tied to `hidden_size / heads_q`.
    pub head_dim: usize,
    /// The MLP's activation.
    pub activation: Activation,
    /// Added to the mean square inside the root of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Whether the q, k, v and o projections have biases.
    pub attention_bias: bool,
    /// Whether the output head is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// Per layer: the sliding window in tokens, the query's own position included; `None` attends to everything before.
    pub layer_windows: Vec<Option<usize>>,
    /// Longest sequence that the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Rotary position embedding.
    pub rope: RopeConfig,
}

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies, above 1.
    pub theta: f64,
    /// How the frequencies are stretched for longer contexts.
    pub kind: RopeKind,
    /// Part of each head that is rotated, in (0, 1].
    pub partial_rotary_factor: f64,
}

/// How rotary frequencies are stretched for contexts longer than in training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeKind {
    /// Not at all.
    Default,
    /// Every frequency divided by `factor`.
    Linear {
        /// The stretch.
        factor: f64,
    },
    /// YaRN: low frequencies divided, high ones kept, a ramp between.
    Yarn(YarnRope),
}

/// The parameters of YaRN (Peng et al. 2023, arXiv:2309.00071, section 3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct YarnRope {
    /// The stretch of the low frequencies.
    pub factor: f64,
    /// Context length before stretching, in tokens.
    pub original_max_position_embeddings: usize,
    /// Turns over the original context above which a frequency is kept.
    pub beta_fast: f64,
    /// Turns over the original context below which a frequency is divided by `factor`.
    pub beta_slow: f64,
    /// Whether the ends of the ramp are rounded outwards to whole dimensions.
    pub truncate: bool,
    /// Factor on cos and sin.
    pub attention_factor: f64,
}

impl ModelConfig {
    /// Reads `config.json` in `dir`, and the token ids of `generation_config.json` over it where that file exists.
    ///
    /// # Errors
    /// [`ModelError::Missing`] or [`ModelError::Unreadable`] for `config.json`, [`ModelError::Json`] for either file, and
    /// those of [`ModelConfig::from_json`].
    pub fn from_dir(dir: &Path) -> Result<ModelConfig, ModelError> {
        let path = dir.join("config.json");
        let mut config = ModelConfig::from_value(&read_json(&path)?, &path)?;
        let path = dir.join("generation_config.json");
        match read_json(&path) {
            Ok(generation) => config.read_token_ids(&Fields::top(&generation, &path)?)?,
            Err(ModelError::Missing { .. }) => {}
            Err(error) => return Err(error),
        }
        Ok(config)
    }

    /// Reads the text of a `config.json`; `path` is for messages only.
    ///
    /// Keys without effect on inference are ignored, absent ones take the defaults of the model type.
    ///
    /// # Errors
    /// [`ModelError::Json`], [`ModelError::Field`], [`ModelError::UnknownModelType`], [`ModelError::Unsupported`] and
    /// [`ModelError::Inconsistent`].
    pub fn from_json(text: &str, path: &Path) -> Result<ModelConfig, ModelError> {
        ModelConfig::from_value(&parse_json(text, path)?, path)
    }

    fn from_value(root: &Value, path: &Path) -> Result<ModelConfig, ModelError> {
        let fields = Fields::top(root, path)?;
        let architecture = Architecture::read(&fields)?;
        let decoder = match architecture {
            Architecture::Qwen3 => DecoderConfig::qwen3(&fields)?,
        };
        let mut config = ModelConfig {
            architecture,
            decoder,
            dtype: read_dtype(&fields)?,
            eos_token_ids: Vec::new(),
            bos_token_id: None,
        };
        config.read_token_ids(&fields)?;
        Ok(config)
    }

    /// Takes the ids that `fields` states and keeps the others.
    fn read_token_ids(&mut self, fields: &Fields) -> Result<(), ModelError> {
        let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let many = |value: &Value| match value {
            Value::Array(ids) => ids.iter().map(one).collect(),
            id => one(id).map(|id| vec![id]),
        };
        if let Some(ids) = fields.nullable("eos_token_id", "a token id or a list of them", many)? {
            self.eos_token_ids = ids;
        }
        if let Some(id) = fields.nullable("bos_token_id", "a token id", one)? {
            self.bos_token_id = Some(id);
        }
        Ok(())
    }
}

impl Architecture {
    /// The values of `model_type` that are built.
    pub const MODEL_TYPES: &'static [&'static str] = &["qwen3"];

    fn read(fields: &Fields) -> Result<Architecture, ModelError> {
        match fields.required("model_type", "a string", Value::as_str)? {
            "qwen3" => Ok(Architecture::Qwen3),
            found => Err(ModelError::UnknownModelType {
                path: fields.path.into(),
                found: found.into(),
                supported: Self::MODEL_TYPES,
            }),
        }
    }
}

impl DecoderConfig {
    /// `model_type: "qwen3"`, with the defaults of its configuration class.
    fn qwen3(fields: &Fields) -> Result<DecoderConfig, ModelError> {
        let num_layers = fields.integer("num_hidden_layers", 1..=MAX_LAYERS)?.unwrap_or(32);
        let heads_q = fields.size("num_attention_heads", 32)?;
        let heads_kv = match fields.map.get("num_key_value_heads") {
            Some(Value::Null) => heads_q,
            _ => fields.size("num_key_value_heads", 32)?,
        };
        let max_position_embeddings = fields.size("max_position_embeddings", 32768)?;
        let positive_f32 = |eps: f64| eps as f32 > 0.0 && (eps as f32).is_finite();
        let eps = fields.number("rms_norm_eps", "a positive number in the range of f32", positive_f32)?;
        let config = DecoderConfig {
            vocab_size: fields.size("vocab_size", 151936)?,
            hidden_size: fields.size("hidden_size", 4096)?,
            intermediate_size: fields.size("intermediate_size", 22016)?,
            num_layers,
            heads_q,
            heads_kv,
            head_dim: fields.size("head_dim", 128)?,
            activation: read_activation(fields)?,
            rms_norm_eps: eps.unwrap_or(1e-6) as f32,
            attention_bias: fields.flag("attention_bias")?.unwrap_or(false),
            tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
            layer_windows: layer_windows(fields, num_layers)?,
            max_position_embeddings,
            rope: RopeConfig::read(fields, max_position_embeddings)?,
        };
        if config.rope.partial_rotary_factor != 1.0 {
            let value = config.rope.partial_rotary_factor.to_string();
            return Err(fields.unsupported("partial_rotary_factor", value, &["1"]));
        }
        config.check(fields.path)?;
        Ok(config)
    }

    fn check(&self, path: &Path) -> Result<(), ModelError> {
        let inconsistent = |rule, got| Err(ModelError::Inconsistent { path: path.into(), rule, got });
        if !self.heads_q.is_multiple_of(self.heads_kv) {
            let rule = "num_attention_heads must be a multiple of num_key_value_heads";
            return inconsistent(rule, format!("{} and {}", self.heads_q, self.heads_kv));
        }
        if !self.head_dim.is_multiple_of(2) {
            return inconsistent("head_dim must be even", self.head_dim.to_string());
        }
        Ok(())
    }
}

/// The sliding window of each layer: the one width `sliding_window`, in the layers that `layer_types` marks, or else in
/// those from `max_window_layers` on.
fn layer_windows(fields: &Fields, num_layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let enabled = fields.flag("use_sliding_window")?.unwrap_or(false);
    let window = match fields.map.get("sliding_window") {
        Some(Value::Null) => None,
        _ if !enabled => None,
        _ => Some(fields.size("sliding_window", 4096)?),
    };
    let first_sliding = fields.integer("max_window_layers", 0..=MAX_SIZE)?.unwrap_or(28);
    let Some(types) = fields.nullable("layer_types", "a list of strings", Value::as_array)? else {
        return Ok((0..num_layers).map(|layer| window.filter(|_| layer >= first_sliding)).collect());
    };
    if types.len() != num_layers {
        return Err(ModelError::Inconsistent {
            path: fields.path.into(),
            rule: "layer_types must have num_hidden_layers entries",
            got: format!("{} and {num_layers}", types.len()),
        });
    }
    let layer_window = |(layer, kind): (usize, &Value)| match kind.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") if window.is_some() => Ok(window),
        Some("sliding_attention") => Err(ModelError::Inconsistent {
            path: fields.path.into(),
            rule: "layer_types with sliding_attention needs use_sliding_window and sliding_window",
            got: format!("sliding_attention in layer {layer} and no window"),
        }),
        _ => Err(fields.unsupported(
            &format!("layer_types[{layer}]"),
            kind.to_string(),
            &["full_attention", "sliding_attention"],
        )),
    };
    types.iter().enumerate().map(layer_window).collect()
}

fn read_activation(fields: &Fields) -> Result<Activation, ModelError> {
    const SUPPORTED: &[&str] = &["silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new"];
    match fields.optional("hidden_act", "a string", Value::as_str)?.unwrap_or("silu") {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
        "gelu" => Ok(Activation::GeluErf),
        other => Err(fields.unsupported("hidden_act", other.into(), SUPPORTED)),
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

impl RopeConfig {
    /// Dimensions of a head that are rotated.
    pub fn rotary_dim(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.partial_rotary_factor) as usize
    }

    /// The angle per position of each rotated pair, `f_i = theta^(-2i / rotary_dim)` for `i < rotary_dim / 2`, stretched
    /// as [`RopeKind`] says; in radians.
    pub fn inv_freq(&self, rotary_dim: usize) -> Vec<f64> {
        let pairs = rotary_dim / 2;
        let base = (0..pairs).map(|i| self.theta.powf(-2.0 * i as f64 / rotary_dim as f64));
        match self.kind {
            RopeKind::Default => base.collect(),
            RopeKind::Linear { factor } => base.map(|freq| freq / factor).collect(),
            RopeKind::Yarn(yarn) => {
                let (low, high) = yarn.ramp(self.theta, rotary_dim);
                base.enumerate()
                    .map(|(i, freq)| {
                        let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                        freq * (1.0 - divided) + freq / yarn.factor * divided
                    })
                    .collect()
            }
        }
    }

    /// The factor on cos and sin; 1 except for YaRN.
    pub fn attention_factor(&self) -> f64 {
        match self.kind {
            RopeKind::Default | RopeKind::Linear { .. } => 1.0,
            RopeKind::Yarn(yarn) => yarn.attention_factor,
        }
    }

    /// Reads either spelling: keys at the top level with the object `rope_scaling`, or the object `rope_parameters`. A
    /// non-null `rope_scaling` comes first, and keys that the object lacks are taken from the top level.
    fn read(top: &Fields, max_position_embeddings: usize) -> Result<RopeConfig, ModelError> {
        let empty = Map::new();
        let (path, object) = (top.path, "an object");
        let scaling = top.nullable("rope_scaling", object, Value::as_object)?;
        let rope = match (scaling, top.nullable("rope_parameters", object, Value::as_object)?) {
            (Some(map), _) => Fields { path, prefix: "rope_scaling.", map },
            (None, Some(map)) => Fields { path, prefix: "rope_parameters.", map },
            (None, None) => Fields { path, prefix: "", map: &empty },
        };
        if let Some((key, value)) = rope.map.iter().find(|(_, value)| value.is_object()) {
            return Err(rope.unsupported(key, value.to_string(), &["one set of parameters for all layers"]));
        }

        let theta = |fields: &Fields| fields.number("rope_theta", "a number above 1", |theta| theta > 1.0);
        let partial = |fields: &Fields| {
            fields.number("partial_rotary_factor", "a number above 0, at most 1", |part| {
                part > 0.0 && part <= 1.0
            })
        };
        Ok(RopeConfig {
            theta: theta(&rope)?.or(theta(top)?).unwrap_or(10000.0),
            kind: RopeKind::read(&rope, max_position_embeddings)?,
            partial_rotary_factor: partial(&rope)?.or(partial(top)?).unwrap_or(1.0),
        })
    }
}

impl RopeKind {
    fn read(rope: &Fields, max_position_embeddings: usize) -> Result<RopeKind, ModelError> {
        let mut kind = None;
        for key in ["rope_type", "type"] {
            kind = kind.or(rope.nullable(key, "a string", Value::as_str)?.map(|kind| (key, kind)));
        }
        let factor = || {
            let positive = |value: &Value| value.as_f64().filter(|factor| *factor > 0.0);
            rope.required("factor", "a positive number", positive)
        };
        match kind {
            None | Some((_, "default")) => Ok(RopeKind::Default),
            Some((_, "linear")) => Ok(RopeKind::Linear { factor: factor()? }),
            Some((_, "yarn")) => {
                Ok(RopeKind::Yarn(YarnRope::read(rope, factor()?, max_position_embeddings)?))
            }
            Some((key, other)) => Err(rope.unsupported(key, other.into(), &["default", "linear", "yarn"])),
        }
    }
}

impl YarnRope {
    fn read(rope: &Fields, factor: f64, max_position_embeddings: usize) -> Result<YarnRope, ModelError> {
        let positive = |key| rope.number(key, "a positive number", |number| number > 0.0);
        let scale = |key| rope.number(key, "a number of at least 0", |number| number >= 0.0);
        let magnitude = |scale: f64| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
        let attention_factor =
            match (positive("attention_factor")?, scale("mscale")?, scale("mscale_all_dim")?) {
                (Some(stated), _, _) => stated,
                (None, Some(part), Some(all)) if part != 0.0 && all != 0.0 => {
                    magnitude(part) / magnitude(all)
                }
                _ => magnitude(1.0),
            };
        let original = rope.integer("original_max_position_embeddings", 1..=MAX_SIZE)?;
        Ok(YarnRope {
            factor,
            original_max_position_embeddings: original.unwrap_or(max_position_embeddings),
            beta_fast: positive("beta_fast")?.unwrap_or(32.0),
            beta_slow: positive("beta_slow")?.unwrap_or(1.0),
            truncate: rope.flag("truncate")?.unwrap_or(true),
            attention_factor,
        })
    }

    /// The pair indices between which the frequencies pass from kept to divided.
    fn ramp(&self, theta: f64, rotary_dim: usize) -> (f64, f64) {
        let dim = rotary_dim as f64;
        let context = self.original_max_position_embeddings as f64;
        let pair_with_turns = |turns: f64| dim * (context / (2.0 * PI * turns)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (pair_with_turns(self.beta_fast), pair_with_turns(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high { (low, high + 0.001) } else { (low, high) }
    }
}

/// Reads and parses a JSON file.
pub(super) fn read_json(path: &Path) -> Result<Value, ModelError> {
    parse_json(&fs::read_to_string(path).map_err(|source| ModelError::io(path, source))?, path)
}

fn parse_json(text: &str, path: &Path) -> Result<Value, ModelError> {
    serde_json::from_str(text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        let message = error.to_string();
        let reason = message.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&message);
        ModelError::Json { path: path.into(), line, column, reason: reason.into() }
    })
}

/// One JSON object, with what a message needs to name its fields.
struct Fields<'a> {
    path: &'a Path,
    /// In front of each field's name in messages.
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn top(root: &'a Value, path: &'a Path) -> Result<Fields<'a>, ModelError> {
        match root {
            Value::Object(map) => Ok(Fields { path, prefix: "", map }),
            other => Err(ModelError::Field {
                path: path.into(),
                field: "the file's content".into(),
                expected: "an object".into(),
                got: other.to_string(),
            }),
        }
    }

    /// The field's value by `parse`, which refuses with `None`; `None` if the field is absent.
    fn optional<T>(
        &self,
        key: &str,
        expected: &str,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.map.get(key) else { return Ok(None) };
        parse(value).map(Some).ok_or_else(|| self.error(key, expected, value.to_string()))
    }

    /// As [`Fields::optional`], with null read as absent.
    fn nullable<T>(
        &self,
        key: &str,
        expected: &str,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        if self.map.get(key).is_some_and(Value::is_null) {
            Ok(None)
        } else {
            self.optional(key, expected, parse)
        }
    }

    fn required<T>(
        &self,
        key: &str,
        expected: &str,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, ModelError> {
        self.optional(key, expected, parse)?.ok_or_else(|| self.error(key, expected, "nothing".into()))
    }

    fn integer(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, ModelError> {
        let expected = format!("an integer from {} to {}", range.start(), range.end());
        let parse = |value: &Value| {
            value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| range.contains(n))
        };
        self.optional(key, &expected, parse)
    }

    fn size(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        Ok(self.integer(key, 1..=MAX_SIZE)?.unwrap_or(default))
    }

    /// JSON has no infinities, so every number is finite.
    fn number(
        &self,
        key: &str,
        expected: &str,
        accepts: impl Fn(f64) -> bool,
    ) -> Result<Option<f64>, ModelError> {
        self.nullable(key, expected, |value| value.as_f64().filter(|number| accepts(*number)))
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.optional(key, "true or false", Value::as_bool)
    }

    fn error(&self, key: &str, expected: &str, got: String) -> ModelError {
        let field = format!("{}{key}", self.prefix);
        ModelError::Field { path: self.path.into(), field, expected: expected.into(), got }
    }

    fn unsupported(&self, key: &str, value: String, supported: &'static [&'static str]) -> ModelError {
        let field = format!("{}{key}", self.prefix);
        ModelError::Unsupported { path: self.path.into(), field, value, supported }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ModelConfig, ModelError> {
        ModelConfig::from_json(text, Path::new("config.json"))
    }

    /// A qwen3 configuration with these fields besides `model_type`.
    fn qwen3(fields: &str) -> Result<ModelConfig, ModelError> {
        let comma = if fields.is_empty() { "" } else { "," };
        parse(&format!(r#"{{"model_type":"qwen3"{comma}{fields}}}"#))
    }

    fn message(fields: &str) -> String {
        qwen3(fields).unwrap_err().to_string()
    }

    fn rope(fields: &str) -> RopeConfig {
        qwen3(fields).unwrap().decoder.rope
    }

    fn repository(dir: &str) -> ModelConfig {
        ModelConfig::from_dir(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(dir)).unwrap()
    }

    fn default_rope(theta: f64) -> RopeConfig {
        RopeConfig { theta, kind: RopeKind::Default, partial_rotary_factor: 1.0 }
    }

    #[test]
    fn defaults_are_the_model_types() {
        let expected = ModelConfig {
            architecture: Architecture::Qwen3,
            decoder: DecoderConfig {
                vocab_size: 151936,
                hidden_size: 4096,
                intermediate_size: 22016,
                num_layers: 32,
                heads_q: 32,
                heads_kv: 32,
                head_dim: 128,
                activation: Activation::Silu,
                rms_norm_eps: 1e-6,
                attention_bias: false,
                tie_word_embeddings: false,
                layer_windows: vec![None; 32],
                max_position_embeddings: 32768,
                rope: default_rope(10000.0),
            },
            dtype: None,
            eos_token_ids: vec![],
            bos_token_id: None,
        };
        assert_eq!(qwen3("").unwrap(), expected);
        assert_eq!(qwen3(r#""some_future_key": {"a": [1]}, "use_cache": null"#).unwrap(), expected);
    }

    #[test]
    fn golden_and_demo_configs() {
        let config = repository("tests/golden/qwen3");
        let expected = DecoderConfig {
            vocab_size: 384,
            hidden_size: 128,
            intermediate_size: 256,
            num_layers: 3,
            heads_q: 4,
            heads_kv: 2,
            head_dim: 64,
            activation: Activation::Silu,
            rms_norm_eps: 1e-6,
            attention_bias: false,
            tie_word_embeddings: true,
            layer_windows: vec![None; 3],
            max_position_embeddings: 4096,
            rope: default_rope(1e6),
        };
        assert_eq!(config.decoder, expected);
        assert_eq!(config.dtype, Some(DType::F32));
        assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![1], Some(0)));

        let config = repository("tests/golden/qwen3_sliding");
        let expected = DecoderConfig {
            hidden_size: 64,
            intermediate_size: 128,
            num_layers: 4,
            heads_kv: 1,
            head_dim: 32,
            tie_word_embeddings: false,
            layer_windows: vec![None, None, Some(8), Some(8)],
            max_position_embeddings: 32768,
            rope: default_rope(1e4),
            ..expected
        };
        assert_eq!(config.decoder, expected);

        let config = repository("assets/demo-model");
        let expected = DecoderConfig {
            vocab_size: 2048,
            hidden_size: 256,
            intermediate_size: 768,
            num_layers: 5,
            heads_kv: 2,
            head_dim: 64,
            tie_word_embeddings: true,
            layer_windows: vec![None; 5],
            max_position_embeddings: 2048,
            ..expected
        };
        assert_eq!(config.decoder, expected);
        assert_eq!(config.dtype, Some(DType::BF16));
        assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![0], Some(0)));
    }

    #[test]
    fn published_configs() {
        let config = qwen3(
            r#""architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
            "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
            "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null,
            "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
            "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936"#,
        )
        .unwrap();
        let small = DecoderConfig {
            vocab_size: 151936,
            hidden_size: 1024,
            intermediate_size: 3072,
            num_layers: 28,
            heads_q: 16,
            heads_kv: 8,
            head_dim: 128,
            activation: Activation::Silu,
            rms_norm_eps: 1e-6,
            attention_bias: false,
            tie_word_embeddings: true,
            layer_windows: vec![None; 28],
            max_position_embeddings: 40960,
            rope: default_rope(1e6),
        };
        assert_eq!(config.decoder, small);
        assert_eq!(config.dtype, Some(DType::BF16));
        assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![151645], Some(151643)));

        let config = qwen3(
            r#""attention_bias": false, "bos_token_id": 151643, "eos_token_id": [151645, 151643], "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
            "max_position_embeddings": 262144, "max_window_layers": 36, "num_attention_heads": 32,
            "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null,
            "rope_theta": 5000000, "sliding_window": null, "tie_word_embeddings": true,
            "torch_dtype": "bfloat16", "use_sliding_window": false, "vocab_size": 151936"#,
        )
        .unwrap();
        let large = DecoderConfig {
            hidden_size: 2560,
            intermediate_size: 9728,
            num_layers: 36,
            heads_q: 32,
            layer_windows: vec![None; 36],
            max_position_embeddings: 262144,
            rope: default_rope(5e6),
            ..small
        };
        assert_eq!(config.decoder, large);
        assert_eq!(config.eos_token_ids, [151645, 151643]);
    }

    #[test]
    fn kv_heads_default_and_null_differ() {
        assert_eq!(qwen3(r#""num_attention_heads": 64"#).unwrap().decoder.heads_kv, 32);
        let fields = r#""num_attention_heads": 6, "num_key_value_heads": null"#;
        assert_eq!(qwen3(fields).unwrap().decoder.heads_kv, 6);
    }

    #[test]
    fn activations() {
        let activation =
            |name: &str| qwen3(&format!(r#""hidden_act": "{name}""#)).unwrap().decoder.activation;
        assert_eq!(activation("swish"), Activation::Silu);
        assert_eq!(activation("gelu"), Activation::GeluErf);
        assert_eq!(activation("gelu_pytorch_tanh"), Activation::GeluTanh);
        assert_eq!(
            message(r#""hidden_act": "relu2""#),
            "config.json: hidden_act: relu2 is not supported; supported: silu, swish, gelu, gelu_pytorch_tanh, gelu_new"
        );
    }

    #[test]
    fn sliding_windows() {
        let windows = |fields: &str| {
            let fields = format!(r#""num_hidden_layers": 3, {fields}"#);
            qwen3(&fields).map(|config| config.decoder.layer_windows)
        };
        let on = r#""use_sliding_window": true, "sliding_window": 16"#;
        assert_eq!(windows(r#""sliding_window": 16, "max_window_layers": 0"#).unwrap(), [None; 3]);
        assert_eq!(windows(&format!(r#"{on}, "max_window_layers": 1"#)).unwrap(), [None, Some(16), Some(16)]);
        assert_eq!(windows(on).unwrap(), [None; 3]);
        assert_eq!(windows(r#""use_sliding_window": true, "max_window_layers": 2"#).unwrap()[2], Some(4096));
        let null = r#""use_sliding_window": true, "sliding_window": null, "max_window_layers": 0"#;
        assert_eq!(windows(null).unwrap(), [None; 3]);
        let types = r#""layer_types": ["sliding_attention", "full_attention", "sliding_attention"]"#;
        let overridden = windows(&format!(r#"{on}, "max_window_layers": 1, {types}"#)).unwrap();
        assert_eq!(overridden, [Some(16), None, Some(16)]);
        assert_eq!(
            windows(types).unwrap_err().to_string(),
            "config.json: layer_types with sliding_attention needs use_sliding_window and sliding_window, got \
             sliding_attention in layer 0 and no window"
        );
        assert_eq!(
            windows(r#""layer_types": ["full_attention"]"#).unwrap_err().to_string(),
            "config.json: layer_types must have num_hidden_layers entries, got 1 and 3"
        );
        let unknown = r#""layer_types": ["full_attention", "linear_attention", "full_attention"]"#;
        assert_eq!(
            windows(unknown).unwrap_err().to_string(),
            "config.json: layer_types[1]: \"linear_attention\" is not supported; supported: full_attention, \
             sliding_attention"
        );
    }

    #[test]
    fn both_rope_spellings_agree() {
        let old = rope(r#""rope_theta": 5e6, "rope_scaling": null"#);
        let new = rope(r#""rope_parameters": {"rope_theta": 5000000, "rope_type": "default"}"#);
        assert_eq!(old, default_rope(5e6));
        assert_eq!(new, old);

        let old = rope(
            r#""rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 32768}"#,
        );
        let new = rope(
            r#""rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4,
            "original_max_position_embeddings": 32768}"#,
        );
        assert_eq!(new, old);
        assert!(matches!(old.kind, RopeKind::Yarn(yarn) if yarn.original_max_position_embeddings == 32768));

        // rope_scaling wins over rope_parameters, and lets the top level fill in theta.
        let both = rope(
            r#""rope_theta": 7e6, "rope_scaling": {"rope_type": "linear", "factor": 2},
            "rope_parameters": {"rope_theta": 9e6}"#,
        );
        assert_eq!(both, RopeConfig { kind: RopeKind::Linear { factor: 2.0 }, ..default_rope(7e6) });
        assert_eq!(rope(r#""rope_theta": 3e4, "rope_parameters": {}"#), default_rope(3e4));
    }

    #[test]
    fn rope_errors() {
        assert_eq!(
            message(r#""rope_scaling": {"rope_type": "dynamic", "factor": 2.0}"#),
            "config.json: rope_scaling.rope_type: dynamic is not supported; supported: default, linear, yarn"
        );
        assert_eq!(
            message(r#""rope_parameters": {"type": "yarn"}"#),
            "config.json: rope_parameters.factor: expected a positive number, got nothing"
        );
        assert_eq!(
            message(r#""rope_theta": 0"#),
            "config.json: rope_theta: expected a number above 1, got 0"
        );
        assert_eq!(
            message(r#""partial_rotary_factor": 0.5"#),
            "config.json: partial_rotary_factor: 0.5 is not supported; supported: 1"
        );
        assert_eq!(
            message(r#""rope_parameters": {"full_attention": {"rope_theta": 1e4}}"#),
            "config.json: rope_parameters.full_attention: {\"rope_theta\":10000.0} is not supported; supported: one \
             set of parameters for all layers"
        );
        assert_eq!(message(r#""rope_scaling": 3"#), "config.json: rope_scaling: expected an object, got 3");
    }

    #[test]
    fn default_and_linear_frequencies() {
        let rope = default_rope(10000.0);
        let freqs = rope.inv_freq(8);
        for (freq, expected) in freqs.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((freq / expected - 1.0).abs() < 1e-14, "{freq} {expected}");
        }
        assert_eq!((freqs.len(), rope.attention_factor()), (4, 1.0));
        let linear = RopeConfig { kind: RopeKind::Linear { factor: 4.0 }, ..rope };
        let quarters: Vec<f64> = freqs.iter().map(|freq| freq / 4.0).collect();
        assert_eq!((linear.inv_freq(8), linear.attention_factor()), (quarters, 1.0));
        assert_eq!(RopeConfig { partial_rotary_factor: 0.25, ..rope }.rotary_dim(256), 64);
    }

    /// The documented long-context option of the Qwen3 models: theta 1e6, factor 4 over 32768 positions, 128 dimensions.
    /// A pair makes 32 turns at index 23.60 and one turn at 39.65, so the ramp goes from 23 to 40.
    #[test]
    fn yarn_frequencies() {
        let yarn = r#""rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768"#;
        let rounded = rope(&format!(r#""rope_theta": 1e6, "rope_scaling": {{{yarn}}}"#));
        let plain = default_rope(1e6).inv_freq(128);
        let freqs = rounded.inv_freq(128);
        assert_eq!(freqs[..24], plain[..24]);
        for i in 40..64 {
            assert_eq!(freqs[i], plain[i] / 4.0);
        }
        // Pair 30 is 7 of the ramp's 17 steps in: 10/17 + 7/17 / 4 = 47/68.
        assert!((freqs[30] / plain[30] - 47.0 / 68.0).abs() < 1e-14);
        assert!((rounded.attention_factor() - 1.138_629_436_111_989).abs() < 1e-14);

        let exact = rope(&format!(r#""rope_theta": 1e6, "rope_scaling": {{{yarn}, "truncate": false}}"#));
        let RopeKind::Yarn(parameters) = exact.kind else { panic!("{exact:?}") };
        let (low, high) = parameters.ramp(1e6, 128);
        assert!((low - 23.59595).abs() < 1e-4 && (high - 39.65088).abs() < 1e-4, "{low} {high}");
        assert_eq!(exact.inv_freq(128)[23], plain[23]);
        assert!(exact.inv_freq(128)[24] < plain[24]);
    }

    #[test]
    fn yarn_attention_factor() {
        let factor = |fields: &str| {
            let yarn = format!(r#""rope_scaling": {{"rope_type": "yarn", "factor": 4, {fields}}}"#);
            rope(&yarn).attention_factor()
        };
        let ln4 = 4f64.ln();
        assert_eq!(factor(r#""attention_factor": 1.5, "mscale": 2, "mscale_all_dim": 1"#), 1.5);
        let ratio = (0.2 * ln4 + 1.0) / (0.1 * ln4 + 1.0);
        assert!((factor(r#""mscale": 2, "mscale_all_dim": 1"#) - ratio).abs() < 1e-14);
        assert!((factor(r#""mscale": 2, "mscale_all_dim": 0"#) - (0.1 * ln4 + 1.0)).abs() < 1e-14);
        assert!((factor(r#""attention_factor": null"#) - (0.1 * ln4 + 1.0)).abs() < 1e-14);
        let shrink = rope(r#""rope_scaling": {"rope_type": "yarn", "factor": 0.5}"#);
        assert_eq!(shrink.attention_factor(), 1.0);
        let RopeKind::Yarn(yarn) = shrink.kind else { panic!("{shrink:?}") };
        assert_eq!(yarn.original_max_position_embeddings, 32768);
    }

    /// With a context of a few tokens both ends of the ramp fall on 0.
    #[test]
    fn yarn_ramp_of_no_width_stays_finite() {
        let yarn =
            rope(r#""rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 6}"#);
        let RopeKind::Yarn(parameters) = yarn.kind else { panic!("{yarn:?}") };
        assert_eq!(parameters.ramp(yarn.theta, 64), (0.0, 0.001));
        let halved: Vec<f64> = default_rope(1e4).inv_freq(64)[1..].iter().map(|freq| freq / 2.0).collect();
        let freqs = yarn.inv_freq(64);
        assert_eq!((freqs[0], &freqs[1..]), (1.0, &halved[..]));
    }

    #[test]
    fn wrong_fields() {
        let cases = [
            (
                r#""hidden_size": "1024""#,
                r#"hidden_size: expected an integer from 1 to 2147483647, got "1024""#,
            ),
            (r#""vocab_size": 0"#, "vocab_size: expected an integer from 1 to 2147483647, got 0"),
            (
                r#""intermediate_size": -3"#,
                "intermediate_size: expected an integer from 1 to 2147483647, got -3",
            ),
            (r#""head_dim": null"#, "head_dim: expected an integer from 1 to 2147483647, got null"),
            (
                r#""num_hidden_layers": 99999999999999"#,
                "num_hidden_layers: expected an integer from 1 to 65536, got 99999999999999",
            ),
            (
                r#""rms_norm_eps": 1e-300"#,
                "rms_norm_eps: expected a positive number in the range of f32, got 1e-300",
            ),
            (r#""attention_bias": 1"#, "attention_bias: expected true or false, got 1"),
            (r#""eos_token_id": [1, -1]"#, "eos_token_id: expected a token id or a list of them, got [1,-1]"),
            (
                r#""num_attention_heads": 4, "num_key_value_heads": 3"#,
                "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3",
            ),
            (r#""head_dim": 63"#, "head_dim must be even, got 63"),
            (
                r#""torch_dtype": "float8_e4m3fn""#,
                "torch_dtype: float8_e4m3fn is not supported; supported: float32, float16, bfloat16",
            ),
        ];
        for (fields, expected) in cases {
            assert_eq!(message(fields), format!("config.json: {expected}"));
        }
    }

    #[test]
    fn wrong_files() {
        let text = |text: &str| parse(text).unwrap_err().to_string();
        assert_eq!(
            text(r#"{"model_type": "llama"}"#),
            r#"config.json: unknown model_type "llama"; supported: qwen3"#
        );
        assert_eq!(text("{}"), "config.json: model_type: expected a string, got nothing");
        assert_eq!(text("[1]"), "config.json: the file's content: expected an object, got [1]");
        assert_eq!(text("{\n \"model_type\" \"qwen3\"}"), "config.json:2:15: not valid JSON: expected `:`");
        assert_eq!(text(""), "config.json:1:0: not valid JSON: EOF while parsing a value");
    }

    #[test]
    fn directories() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let error = ModelConfig::from_dir(dir.path()).unwrap_err();
        assert!(matches!(&error, ModelError::Missing { path: missing } if *missing == path("config.json")));
        assert_eq!(error.to_string(), format!("{} does not exist", path("config.json").display()));

        fs::write(path("config.json"), r#"{"model_type": "qwen3", "eos_token_id": 2, "bos_token_id": 1}"#)
            .unwrap();
        assert_eq!(ModelConfig::from_dir(dir.path()).unwrap().eos_token_ids, [2]);

        fs::write(path("generation_config.json"), r#"{"eos_token_id": [5, 6], "temperature": 0.7}"#).unwrap();
        let config = ModelConfig::from_dir(dir.path()).unwrap();
        assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![5, 6], Some(1)));

        fs::write(path("generation_config.json"), "{").unwrap();
        let text = ModelConfig::from_dir(dir.path()).unwrap_err().to_string();
        let expected = ":1:1: not valid JSON: EOF while parsing an object";
        assert_eq!(text, format!("{}{expected}", path("generation_config.json").display()));

        fs::write(path("config.json"), [0xff, 0xfe]).unwrap();
        let error = ModelConfig::from_dir(dir.path()).unwrap_err();
        assert!(matches!(error, ModelError::Unreadable { .. }));
        assert_eq!(error.to_string(), format!("cannot read {}", path("config.json").display()));
    }
}
