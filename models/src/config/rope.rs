//! Rotary position embedding: the frequencies, and how they are stretched for long contexts.

use std::f64::consts::PI;

use serde_json::{Map, Value};

use super::MAX_SIZE;
use super::fields::Fields;
use crate::ModelError;
use host::Error;

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
    /// `None` if heads of this type are rotated as a whole, whatever the file says.
    pub(super) partial_rotary_factor: Option<f64>,
    pub(super) head_dim: usize,
    pub(super) max_position_embeddings: usize,
}

impl RopeConfig {
    /// The angle per position of each rotated pair, `f_i = theta^(-2i / rotary_dim)` for `i < rotary_dim / 2`, stretched
    /// as [`RopeKind`] says; in radians.
    ///
    /// **Errors**: [`Error::Invalid`] for numbers that no file may say.
    pub fn inv_freq(&self) -> Result<Vec<f64>, Error> {
        self.check()?;
        let Self { rotary_dim, .. } = *self;
        let pairs = rotary_dim / 2;
        let base = (0..pairs).map(|i| self.theta.powf(-2.0 * i as f64 / rotary_dim as f64));
        Ok(match self.kind {
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
        })
    }

    /// The factor on cos and sin; 1 except for YaRN.
    pub fn attention_factor(&self) -> f64 {
        match self.kind {
            RopeKind::Default | RopeKind::Linear { .. } | RopeKind::Llama3 { .. } => 1.0,
            RopeKind::Yarn(yarn) => yarn.attention_factor,
        }
    }

    /// Reads either spelling: keys at the top level with the object `rope_scaling`, or the object `rope_parameters`. A
    /// `rope_scaling` that is not empty comes first, and keys that the object lacks are taken from the top level, then from
    /// `defaults`.
    ///
    /// `partial_rotary_factor` is not read for a type that rotates whole heads, as by transformers; stretched as well it would be an
    /// error there, and is one here.
    pub(super) fn read(top: &Fields, defaults: RopeDefaults) -> Result<RopeConfig, ModelError> {
        let (path, empty) = (top.path, Map::new());
        let rope = rope_fields(top, &empty)?;
        if let Some((key, value)) = rope.first_object() {
            return Err(rope.unsupported(key, value.to_string(), &["one set of parameters for all layers"]));
        }

        let RopeDefaults { theta, partial_rotary_factor, head_dim, max_position_embeddings } = defaults;
        let kind = RopeKind::read(top, &rope, max_position_embeddings)?;
        let partial = |fields: &Fields| {
            fields.number("partial_rotary_factor", "a number above 0, at most 1", |part| {
                part > 0.0 && part <= 1.0
            })
        };
        let factor = match partial_rotary_factor {
            Some(default) => partial(&rope)?.or(partial(top)?).unwrap_or(default),
            None => {
                for fields in [&rope, top] {
                    fields.assume("partial_rotary_factor", |part| part.as_f64() == Some(1.0));
                    if kind != RopeKind::Default
                        && let Some(part) = partial(fields)?.filter(|&part| part != 1.0)
                    {
                        return Err(fields.unsupported("partial_rotary_factor", part.to_string(), &["1"]));
                    }
                }
                1.0
            }
        };
        let rotary_dim = (head_dim as f64 * factor) as usize;
        if rotary_dim < 2 || !rotary_dim.is_multiple_of(2) {
            return Err(ModelError::Inconsistent {
                path: path.into(),
                rule: "head_dim · partial_rotary_factor must be even and at least 2",
                got: format!("{head_dim} · {factor}"),
            });
        }
        Ok(RopeConfig { theta: read_theta(top, &rope, theta)?, kind, rotary_dim })
    }
}

pub(super) fn read_theta(top: &Fields, rope: &Fields, default: f64) -> Result<f64, ModelError> {
    let theta = |fields: &Fields| fields.number("rope_theta", "a number above 1", |theta| theta > 1.0);
    Ok(theta(rope)?.or(theta(top)?).unwrap_or(default))
}

/// The object with the parameters; `empty` where there is none.
pub(super) fn rope_fields<'a>(
    top: &Fields<'a>,
    empty: &'a Map<String, Value>,
) -> Result<Fields<'a>, ModelError> {
    if let Some(scaling) = top.object("rope_scaling")?.filter(|scaling| !scaling.is_empty()) {
        // What it takes the place of.
        top.nullable("rope_parameters", "an object", Value::as_object)?;
        return Ok(scaling);
    }
    Ok(top.object("rope_parameters")?.unwrap_or_else(|| top.none(empty)))
}

/// What latent attention multiplies its scores by besides the width's root: 1, or the square of `mscale_all_dim`'s magnitude
/// where frequencies are stretched.
pub(super) fn score_factor(top: &Fields) -> Result<f64, ModelError> {
    let empty = Map::new();
    let rope = rope_fields(top, &empty)?;
    let number = |key| rope.number(key, "a number of at least 0", |number| number >= 0.0);
    let is_default = match rope.get("rope_type").or_else(|| rope.get("type")) {
        None | Some(Value::Null) => true,
        Some(kind) => kind == "default",
    };
    match (rope.get("factor"), number("mscale_all_dim")?) {
        (Some(_), Some(scale)) if !is_default && scale != 0.0 => {
            let factor = rope.required("factor", "a number of at least 0", |factor| {
                factor.as_f64().filter(|&factor| factor >= 0.0)
            })?;
            Ok(magnitude(factor, scale).powi(2))
        }
        _ => Ok(1.0),
    }
}

/// YaRN's `m(factor, scale)`.
fn magnitude(factor: f64, scale: f64) -> f64 {
    if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 }
}

/// The context length before stretching: the top level comes first in this, and in nothing else.
fn original_positions(top: &Fields, rope: &Fields, default: usize) -> Result<usize, ModelError> {
    const KEY: &str = "original_max_position_embeddings";
    let of_top = match top.get(KEY) {
        Some(Value::Null) => None,
        _ => top.integer(KEY, 1..=MAX_SIZE)?,
    };
    let inside = rope.integer(KEY, 1..=MAX_SIZE)?;
    Ok(of_top.or(inside).unwrap_or(default))
}

impl RopeKind {
    fn read(top: &Fields, rope: &Fields, max_position_embeddings: usize) -> Result<RopeKind, ModelError> {
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
                // Of no factor it is made of the lengths, if one says so.
                let factor = match rope.get("factor") {
                    Some(Value::Null) => None,
                    _ => Some(factor()?),
                };
                Ok(RopeKind::Yarn(YarnRope::read(top, rope, factor, max_position_embeddings)?))
            }
            Some((_, "llama3")) => {
                let positive = |value: &Value| value.as_f64().filter(|number| *number > 0.0);
                let number = |key| rope.required(key, "a positive number", positive);
                let context = original_positions(top, rope, max_position_embeddings)?;
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
                    original_max_position_embeddings: context,
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
    fn read(
        top: &Fields,
        rope: &Fields,
        factor: Option<f64>,
        max_position_embeddings: usize,
    ) -> Result<YarnRope, ModelError> {
        let original = original_positions(top, rope, max_position_embeddings)?;
        let factor = factor.unwrap_or(max_position_embeddings as f64 / original as f64);
        let positive = |key| rope.number(key, "a positive number", |number| number > 0.0);
        // 0 asks for the default.
        let turns = |key| {
            let turns = rope.number(key, "a number of at least 0", |number| number >= 0.0)?;
            Ok(turns.filter(|&turns| turns > 0.0))
        };
        let scale = |key| rope.number(key, "a number of at least 0", |number| number >= 0.0);
        let attention_factor =
            match (positive("attention_factor")?, scale("mscale")?, scale("mscale_all_dim")?) {
                (Some(stated), _, _) => stated,
                (None, Some(part), Some(all)) if part != 0.0 && all != 0.0 => {
                    magnitude(factor, part) / magnitude(factor, all)
                }
                _ => magnitude(factor, 1.0),
            };
        let truncate = match rope.get("truncate") {
            Some(Value::Null) => false,
            _ => rope.flag("truncate")?.unwrap_or(true),
        };
        Ok(YarnRope {
            factor,
            original_max_position_embeddings: original,
            beta_fast: turns("beta_fast")?.unwrap_or(32.0),
            beta_slow: turns("beta_slow")?.unwrap_or(1.0),
            truncate,
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
