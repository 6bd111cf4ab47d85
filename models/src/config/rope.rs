//! Rotary position embedding: the frequencies, and how they are stretched for long contexts.

use std::f64::consts::PI;

use serde_json::{Map, Value};

use super::MAX_SIZE;
use super::fields::Fields;
use crate::ModelError;

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies, above 1.
    pub theta: f64,
    /// How the frequencies are stretched for longer contexts.
    pub kind: RopeKind,
    /// Dimensions of each head that are rotated, the first ones; even.
    pub rotary_dim: usize,
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
    /// That of Llama 3: the same with a ramp over turns, not over pairs.
    Llama3 {
        /// The stretch of the low frequencies.
        factor: f64,
        /// Turns over the original context below which a frequency is divided.
        low_freq_factor: f64,
        /// Turns over the original context above which a frequency is kept.
        high_freq_factor: f64,
        /// Context length before stretching, in tokens.
        original_max_position_embeddings: usize,
    },
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

/// What a model type says where its file is silent, and the sizes that the rotation depends on.
pub(super) struct RopeDefaults {
    pub(super) theta: f64,
    pub(super) partial_rotary_factor: f64,
    pub(super) head_dim: usize,
    pub(super) max_position_embeddings: usize,
}

impl RopeConfig {
    /// The angle per position of each rotated pair, `f_i = theta^(-2i / rotary_dim)` for `i < rotary_dim / 2`, stretched
    /// as [`RopeKind`] says; in radians.
    pub fn inv_freq(&self) -> Vec<f64> {
        let Self { rotary_dim, .. } = *self;
        let pairs = rotary_dim / 2;
        let base = (0..pairs).map(|i| self.theta.powf(-2.0 * i as f64 / rotary_dim as f64));
        match self.kind {
            RopeKind::Default => base.collect(),
            RopeKind::Linear { factor } => base.map(|freq| freq / factor).collect(),
            RopeKind::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => base
                .map(|freq| {
                    let context = original_max_position_embeddings;
                    RopeKind::llama3_frequency(freq, factor, low_freq_factor, high_freq_factor, context)
                })
                .collect(),
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
            RopeKind::Default | RopeKind::Linear { .. } | RopeKind::Llama3 { .. } => 1.0,
            RopeKind::Yarn(yarn) => yarn.attention_factor,
        }
    }

    /// Reads either spelling: keys at the top level with the object `rope_scaling`, or the object `rope_parameters`. A
    /// non-null `rope_scaling` comes first, and keys that the object lacks are taken from the top level, then from
    /// `defaults`.
    pub(super) fn read(top: &Fields, defaults: RopeDefaults) -> Result<RopeConfig, ModelError> {
        let (path, empty) = (top.path, Map::new());
        let rope = rope_fields(top, &empty)?;
        if let Some((key, value)) = rope.map.iter().find(|(_, value)| value.is_object()) {
            return Err(rope.unsupported(key, value.to_string(), &["one set of parameters for all layers"]));
        }

        let theta = |fields: &Fields| fields.number("rope_theta", "a number above 1", |theta| theta > 1.0);
        let partial = |fields: &Fields| {
            fields.number("partial_rotary_factor", "a number above 0, at most 1", |part| {
                part > 0.0 && part <= 1.0
            })
        };
        let RopeDefaults { theta: default_theta, partial_rotary_factor, head_dim, max_position_embeddings } =
            defaults;
        let factor = partial(&rope)?.or(partial(top)?).unwrap_or(partial_rotary_factor);
        let rotary_dim = (head_dim as f64 * factor) as usize;
        if rotary_dim < 2 || !rotary_dim.is_multiple_of(2) {
            return Err(ModelError::Inconsistent {
                path: path.into(),
                rule: "head_dim · partial_rotary_factor must be even and at least 2",
                got: format!("{head_dim} · {factor}"),
            });
        }
        Ok(RopeConfig {
            theta: theta(&rope)?.or(theta(top)?).unwrap_or(default_theta),
            kind: RopeKind::read(&rope, max_position_embeddings)?,
            rotary_dim,
        })
    }
}

/// The object with the parameters; `empty` where there is none.
fn rope_fields<'a>(top: &Fields<'a>, empty: &'a Map<String, Value>) -> Result<Fields<'a>, ModelError> {
    let (path, object) = (top.path, "an object");
    let scaling = top.nullable("rope_scaling", object, Value::as_object)?;
    Ok(match (scaling, top.nullable("rope_parameters", object, Value::as_object)?) {
        (Some(map), _) => Fields { path, prefix: "rope_scaling.", map },
        (None, Some(map)) => Fields { path, prefix: "rope_parameters.", map },
        (None, None) => Fields { path, prefix: "", map: empty },
    })
}

/// What latent attention multiplies its scores by besides the width's root: 1, or the square of `mscale_all_dim`'s magnitude
/// where frequencies are stretched.
pub(super) fn score_factor(top: &Fields) -> Result<f64, ModelError> {
    let empty = Map::new();
    let rope = rope_fields(top, &empty)?;
    let number = |key| rope.number(key, "a number of at least 0", |number| number >= 0.0);
    let is_default = match rope.map.get("rope_type").or_else(|| rope.map.get("type")) {
        None | Some(Value::Null) => true,
        Some(kind) => kind == "default",
    };
    match (number("factor")?, number("mscale_all_dim")?) {
        (Some(factor), Some(scale)) if !is_default => Ok(magnitude(factor, scale).powi(2)),
        _ => Ok(1.0),
    }
}

/// YaRN's `m(factor, scale)`.
fn magnitude(factor: f64, scale: f64) -> f64 {
    if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 }
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
            Some((_, "llama3")) => {
                let positive = |value: &Value| value.as_f64().filter(|number| *number > 0.0);
                let number = |key| rope.required(key, "a positive number", positive);
                let context = rope.integer("original_max_position_embeddings", 1..=MAX_SIZE)?;
                let (low_freq_factor, high_freq_factor) =
                    (number("low_freq_factor")?, number("high_freq_factor")?);
                if low_freq_factor >= high_freq_factor {
                    let expected = format!("a number above low_freq_factor, {low_freq_factor}");
                    return Err(rope.error("high_freq_factor", &expected, high_freq_factor.to_string()));
                }
                Ok(RopeKind::Llama3 {
                    factor: factor()?,
                    low_freq_factor,
                    high_freq_factor,
                    original_max_position_embeddings: context.unwrap_or(max_position_embeddings),
                })
            }
            Some((key, other)) => {
                Err(rope.unsupported(key, other.into(), &["default", "linear", "yarn", "llama3"]))
            }
        }
    }

    /// A frequency, in radians a token, stretched as Llama 3 does.
    pub(crate) fn llama3_frequency(
        frequency: f64,
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: usize,
    ) -> f64 {
        let turns = original_max_position_embeddings as f64 * frequency / (2.0 * PI);
        let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
        frequency / factor * (1.0 - kept) + frequency * kept
    }
}

impl YarnRope {
    fn read(rope: &Fields, factor: f64, max_position_embeddings: usize) -> Result<YarnRope, ModelError> {
        let positive = |key| rope.number(key, "a positive number", |number| number > 0.0);
        let scale = |key| rope.number(key, "a number of at least 0", |number| number >= 0.0);
        let attention_factor =
            match (positive("attention_factor")?, scale("mscale")?, scale("mscale_all_dim")?) {
                (Some(stated), _, _) => stated,
                (None, Some(part), Some(all)) if part != 0.0 && all != 0.0 => {
                    magnitude(factor, part) / magnitude(factor, all)
                }
                _ => magnitude(factor, 1.0),
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
    pub(super) fn ramp(&self, theta: f64, rotary_dim: usize) -> (f64, f64) {
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
