//! How the rows of a run are sampled: what each asks for, and what a plan can do.

use abi::DType;
use abi::ops::sampling::{RowParams, digits, logprobs::MAX_TOP, step};

use super::{OP, SamplingProblem};
use crate::error::Error;

/// Words of a row's parameters in device memory.
pub const PARAMS_LEN: usize = RowParams::LEN;

/// How a row's token is chosen; [`Sampler`](super::Sampler) has the exact definition. The default is the largest logit,
/// and no field does anything.
///
/// Rows lie in device memory as [`PARAMS_LEN`] words each, which [`SamplingProblem::write_params`] writes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    /// What logits are divided by: 0 takes the largest logit; else neither infinite nor subnormal.
    pub temperature: f32,
    /// Only the so many largest logits; none, 0 or the vocabulary's size: all.
    pub top_k: Option<u32>,
    /// Of these only the most probable, until their probabilities sum up to this; above 0 and at most 1 (all).
    pub top_p: f32,
    /// Only those that are at least this as probable as the most probable; from 0 (all) to 1.
    pub min_p: f32,
    /// Of these only the most typical, until their probabilities sum up to this; above 0 and at most 1 (all).
    pub typical_p: f32,
    /// What logits of tokens of the history are divided by, or multiplied where they are not above 0; above 0, finite.
    /// 1 does nothing.
    pub repetition_penalty: f32,
    /// What is subtracted from the logits of tokens that were generated; finite.
    pub presence_penalty: f32,
    /// What is subtracted from them for each time; finite.
    pub frequency_penalty: f32,
    /// How many of the history's first tokens are the prompt's, …
    pub prompt_len: u32,
    /// … and how many tokens the history has, in the row's part of
    /// [`SamplingArgs::history`](super::SamplingArgs::history). Ids beyond the vocabulary are none of its tokens.
    pub history_len: u32,
    /// Entries of the row's bias.
    pub num_bias: u32,
    /// Whether the row's mask says which tokens are allowed.
    pub is_masked: bool,
    /// The generator's key.
    pub seed: u64,
    /// The generator's counter: another one for each token of a sequence.
    pub step: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            prompt_len: 0,
            history_len: 0,
            num_bias: 0,
            is_masked: false,
            seed: 0,
            step: 0,
        }
    }
}

/// What rows of a plan's runs may ask for. Each is paid for by all rows of a run in launches, and in memory of the
/// plan; the default, the largest logits alone, is the cheapest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SamplingFeatures {
    /// A temperature, and with it `min_p`.
    pub draws: bool,
    /// `top_k`.
    pub top_k: bool,
    /// `top_p`.
    pub top_p: bool,
    /// `typical_p`.
    pub typical_p: bool,
    /// Most tokens of a row's history, of which penalties are. 0: no history.
    pub history: usize,
    /// Most entries of a row's bias. 0: no bias.
    pub bias: usize,
    /// Masks.
    pub masks: bool,
    /// Log-probabilities of the chosen token and of so many most probable ones, at most 64.
    pub logprobs: Option<usize>,
}

impl SamplingFeatures {
    /// Largest logits alone.
    pub const GREEDY: Self = SamplingFeatures {
        draws: false,
        top_k: false,
        top_p: false,
        typical_p: false,
        history: 0,
        bias: 0,
        masks: false,
        logprobs: None,
    };

    /// What most requests ask for: a temperature, `top_k`, `top_p` and `min_p`.
    pub const DRAWS: Self = SamplingFeatures { draws: true, top_k: true, top_p: true, ..Self::GREEDY };

    /// What these rows ask for.
    pub fn of(rows: &[SamplingParams]) -> Self {
        let mut features = Self::GREEDY;
        for row in rows {
            let draws = row.temperature != 0.0;
            features.draws |= draws;
            features.top_k |= draws && row.top_k.is_some_and(|k| k > 0);
            features.top_p |= draws && row.top_p < 1.0;
            features.typical_p |= draws && row.typical_p < 1.0;
            features.history = features.history.max(row.history_len as usize);
            features.bias = features.bias.max(row.num_bias as usize);
            features.masks |= row.is_masked;
        }
        features
    }

    /// Whether logits are made anew before a token is chosen.
    pub(super) fn edits(&self) -> bool {
        self.history > 0 || self.bias > 0 || self.masks
    }

    /// Whether a run has parameters at all.
    pub(super) fn has_params(&self) -> bool {
        self.draws || self.edits()
    }

    /// The steps that some row may take, of logits of a type.
    pub(super) fn steps(&self, dtype: DType) -> u32 {
        let digits = digits(dtype.bytes());
        let parts = [
            (true, step::GREEDY),
            (self.draws, step::bit(step::SUM)),
            (self.top_k, step::search(step::COUNT, digits)),
            (self.top_p, step::search(step::WEIGH, digits)),
            (self.typical_p, step::TYPICAL),
        ];
        parts.into_iter().fold(0, |steps, (is_wanted, part)| if is_wanted { steps | part } else { steps })
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        if !self.draws && (self.top_k || self.top_p || self.typical_p) {
            let got = format!("{self:?}");
            return Err(Error::invalid(OP, "features", "draws, as what is drawn from is bounded", got));
        }
        if let Some(top) = self.logprobs
            && top > MAX_TOP as usize
        {
            return Err(Error::invalid(
                OP,
                "features",
                format!("logprobs of at most {MAX_TOP}"),
                top.to_string(),
            ));
        }
        Ok(())
    }
}

/// A share in units of 2^-32, at least one; 0 for all.
fn share(p: f32) -> u32 {
    let units = (f64::from(p) * (1u64 << 32) as f64).round() as u64;
    // Exact but for p below 2^-8, whose last bits may be rounded away.
    if units > u64::from(u32::MAX) { 0 } else { units.max(1) as u32 }
}

impl SamplingParams {
    /// As it lies in device memory, if the plan can do it.
    fn to_row(self, problem: &SamplingProblem) -> Result<RowParams, Error> {
        let SamplingProblem { features, .. } = *problem;
        let refuse = |argument, expected: &str, got: &dyn ToString| {
            Err(Error::invalid(OP, argument, expected, got.to_string()))
        };
        let SamplingParams { temperature, top_k, top_p, min_p, typical_p, .. } = self;
        let draws = temperature != 0.0;
        if draws && !(temperature > 0.0 && temperature.is_normal()) {
            return refuse("temperature", "0, or a normal number above 0", &temperature);
        }
        for (name, p) in [("top_p", top_p), ("typical_p", typical_p)] {
            if !(p > 0.0 && p <= 1.0) {
                return refuse(name, "a number above 0 and at most 1", &p);
            }
        }
        if !(0.0..=1.0).contains(&min_p) {
            return refuse("min_p", "a number from 0 to 1", &min_p);
        }
        let repetition = self.repetition_penalty;
        if !(repetition > 0.0 && repetition.is_finite()) {
            return refuse("repetition_penalty", "a finite number above 0", &repetition);
        }
        for (name, penalty) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            if !penalty.is_finite() {
                return refuse(name, "a finite number", &penalty);
            }
        }
        let top_k = top_k.filter(|_| draws).unwrap_or(0);
        let asked = [
            ("temperature", draws && !features.draws),
            ("top_k", top_k != 0 && !features.top_k),
            ("top_p", draws && top_p < 1.0 && !features.top_p),
            ("typical_p", draws && typical_p < 1.0 && !features.typical_p),
            ("is_masked", self.is_masked && !features.masks),
            ("repetition_penalty", repetition != 1.0 && features.history == 0),
            ("presence_penalty", self.presence_penalty != 0.0 && features.history == 0),
            ("frequency_penalty", self.frequency_penalty != 0.0 && features.history == 0),
        ];
        if let Some((name, _)) = asked.into_iter().find(|&(_, is_asked)| is_asked) {
            return refuse(name, "none, as the plan's features are without", &"one");
        }
        let lens = [
            ("history_len", self.history_len, features.history),
            ("num_bias", self.num_bias, features.bias),
            ("prompt_len", self.prompt_len, self.history_len as usize),
        ];
        for (name, len, most) in lens {
            if len as usize > most {
                return refuse(name, &format!("at most {most}"), &len);
            }
        }
        Ok(RowParams {
            seed: self.seed,
            step: self.step,
            // Finite, as the temperature is not subnormal.
            scale: if draws { (std::f64::consts::LOG2_E / f64::from(temperature)) as f32 } else { 0.0 },
            top_k,
            top_p: share(top_p),
            // 1 keeps those that equal the largest: no other weight comes so near.
            min_p: ((f64::from(min_p) * (1u64 << 32) as f64).round() as u64).min(u64::from(u32::MAX)) as u32,
            typical_p: share(typical_p),
            repetition,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
            prompt_len: self.prompt_len,
            history_len: self.history_len,
            num_bias: self.num_bias,
            is_masked: u32::from(self.is_masked),
        })
    }
}

impl SamplingProblem {
    /// Writes the parameters of some rows as they lie in device memory, [`PARAMS_LEN`] words each: `words` is to be
    /// written into [`SamplingArgs::params`](super::SamplingArgs::params), perhaps with other things of a step.
    ///
    /// **Errors**: [`Error::Invalid`] for a value out of its range, or that the plan's features do not have; `words` of
    /// another length. Then nothing is written of that row and those after it.
    pub fn write_params(&self, rows: &[SamplingParams], words: &mut [u32]) -> Result<(), Error> {
        if words.len() != rows.len() * PARAMS_LEN {
            let expected = format!("{PARAMS_LEN} words for each of {} rows", rows.len());
            return Err(Error::invalid(OP, "words", expected, words.len().to_string()));
        }
        for (row, words) in std::iter::zip(rows, words.chunks_exact_mut(PARAMS_LEN)) {
            words.copy_from_slice(&row.to_row(self)?.to_words());
        }
        Ok(())
    }
}
