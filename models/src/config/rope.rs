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
    /// The angle per position of each rotated pair, `f_i = theta^(-2i / rotary_dim)` for `i < rotary_dim / 2`,
    /// stretched as [`RopeKind`] says; in radians.
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
    /// `rope_scaling` that is not empty comes first, and keys that the object lacks are taken from the top level, then
    /// from `defaults`.
    ///
    /// `partial_rotary_factor` is not read for a type that rotates whole heads, as by transformers; stretched as well
    /// it would be an error there, and is one here.
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

/// What latent attention multiplies its scores by besides the width's root: 1, or the square of `mscale_all_dim`'s
/// magnitude where frequencies are stretched.
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

#[cfg(test)]
mod tests {
    use super::super::tests::*;
    use super::super::*;

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
            "config.json: rope_scaling.rope_type: dynamic is not supported; supported: default, linear, yarn, \
             llama3"
        );
        assert_eq!(
            message(r#""rope_parameters": {"type": "yarn"}"#),
            "config.json: rope_parameters.factor: expected a positive number, got nothing"
        );
        assert_eq!(
            message(r#""rope_theta": 0"#),
            "config.json: rope_theta: expected a number above 1, got 0"
        );
        let partial =
            parse(r#"{"model_type": "qwen3_next", "head_dim": 128, "partial_rotary_factor": 0.01}"#);
        assert_eq!(
            partial.unwrap_err().to_string(),
            "config.json: head_dim · partial_rotary_factor must be even and at least 2, got 128 · 0.01"
        );
        assert_eq!(
            message(r#""rope_scaling": {"type": "linear", "factor": 2}, "partial_rotary_factor": 0.5"#),
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
        let rope = RopeConfig { rotary_dim: 8, ..default_rope(10000.0) };
        let freqs = rope.inv_freq().unwrap();
        for (freq, expected) in freqs.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((freq / expected - 1.0).abs() < 1e-14, "{freq} {expected}");
        }
        assert_eq!((freqs.len(), rope.attention_factor()), (4, 1.0));
        let linear = RopeConfig { kind: RopeKind::Linear { factor: 4.0 }, ..rope };
        let quarters: Vec<f64> = freqs.iter().map(|freq| freq / 4.0).collect();
        assert_eq!((linear.inv_freq().unwrap(), linear.attention_factor()), (quarters, 1.0));
    }

    #[test]
    fn partial_rotation() {
        let rotary_dim = |fields: &str| {
            let config =
                parse(&format!(r#"{{"model_type": "qwen3_next", "head_dim": 256, {fields}}}"#)).unwrap();
            assert_eq!(config.unread_keys, [""; 0]);
            config.decoder.rope.rotary_dim
        };
        assert_eq!(rotary_dim(r#""partial_rotary_factor": 0.75"#), 192);
        assert_eq!(rotary_dim(r#""rope_parameters": {"partial_rotary_factor": 0.5}"#), 128);
        // Heads of the other types are rotated as a whole.
        let whole = qwen3(r#""partial_rotary_factor": 0.5"#).unwrap();
        assert_eq!(
            (whole.decoder.rope.rotary_dim, &whole.unread_keys[..]),
            (128, &["partial_rotary_factor".into()][..])
        );
        assert_eq!(qwen3(r#""partial_rotary_factor": 1.0"#).unwrap().unread_keys, [""; 0]);
    }

    /// The documented long-context option of the Qwen3 models: theta 1e6, factor 4 over 32768 positions, 128
    /// dimensions. A pair makes 32 turns at index 23.60 and one turn at 39.65, so the ramp goes from 23 to 40.
    #[test]
    fn yarn_frequencies() {
        let yarn = r#""rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768"#;
        let rounded = rope(&format!(r#""rope_theta": 1e6, "rope_scaling": {{{yarn}}}"#));
        let plain = default_rope(1e6).inv_freq().unwrap();
        let freqs = rounded.inv_freq().unwrap();
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
        assert_eq!(exact.inv_freq().unwrap()[23], plain[23]);
        assert!(exact.inv_freq().unwrap()[24] < plain[24]);
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

    /// Stretching by 1 is not stretching, whatever the other parameters, and every frequency lies between the kept and
    /// the divided one.
    #[test]
    fn stretches() {
        for theta in [1e4, 1e6, 5e6] {
            let plain = default_rope(theta).inv_freq().unwrap();
            for original in [512usize, 4096, 32768, 262144] {
                for (factor, truncate) in [(1.0, true), (1.0, false), (2.0, true), (4.0, false), (40.0, true)]
                {
                    for kind in ["linear", "yarn"] {
                        let stretched = rope(&format!(
                            r#""rope_theta": {theta}, "rope_scaling": {{"rope_type": "{kind}", "factor": {factor},
                            "original_max_position_embeddings": {original}, "truncate": {truncate}}}"#
                        ));
                        assert_eq!(stretched.attention_factor() == 1.0, factor == 1.0 || kind == "linear");
                        for (freq, plain) in std::iter::zip(stretched.inv_freq().unwrap(), &plain) {
                            let range = plain / factor * (1.0 - 1e-14)..=plain * (1.0 + 1e-14);
                            assert!(range.contains(&freq), "{kind} {factor}: {freq} not in {range:?}");
                        }
                    }
                }
            }
        }
    }

    /// With a context of a few tokens both ends of the ramp fall on 0.
    #[test]
    fn yarn_ramp_of_no_width_stays_finite() {
        let yarn =
            rope(r#""rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 6}"#);
        let RopeKind::Yarn(parameters) = yarn.kind else { panic!("{yarn:?}") };
        assert_eq!(parameters.ramp(yarn.theta, 128), (0.0, 0.001));
        let halved: Vec<f64> =
            default_rope(1e4).inv_freq().unwrap()[1..].iter().map(|freq| freq / 2.0).collect();
        let freqs = yarn.inv_freq().unwrap();
        assert_eq!((freqs[0], &freqs[1..]), (1.0, &halved[..]));
    }
}
