//! `generation_config.json`: how the model's publisher wants its next tokens to be chosen.

use serde_json::Value;

use super::fields::Fields;
use crate::ModelError;
use host::ops::sampling::SamplingParams;

/// How next tokens are to be chosen. Absent fields have transformers' defaults: the most likely token; where
/// `do_sample` is set, a temperature of 1 and the 50 most likely.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GenerationConfig {
    /// Whether tokens are drawn; the most likely one is taken if not.
    pub do_sample: bool,
    /// What logits are divided by, from 1e-30 to 1e30, or 0, which takes the most likely token.
    pub temperature: f32,
    /// The most likely tokens that are drawn from; `None`: all.
    pub top_k: Option<u32>,
    /// What the probabilities of the tokens that are drawn from sum up to, above 0 and at most 1.
    pub top_p: f32,
    /// How probable a token that is drawn is at least, as a part of the most probable one's probability; 0 to 1.
    pub min_p: f32,
    /// What logits of tokens that the text has already are divided by, or multiplied where they are negative; 1 does
    /// nothing. Also where the most likely token is taken.
    pub repetition_penalty: f32,
}

impl Default for GenerationConfig {
    fn default() -> Self {
        GenerationConfig {
            do_sample: false,
            temperature: 1.0,
            top_k: Some(50),
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
        }
    }
}

impl GenerationConfig {
    /// As the operator takes it. A penalty wants the text's tokens as the row's history.
    pub fn sampling(&self, seed: u64) -> SamplingParams {
        let &GenerationConfig { do_sample, temperature, top_k, top_p, min_p, repetition_penalty } = self;
        let greedy = SamplingParams { repetition_penalty, ..SamplingParams::default() };
        if do_sample && temperature != 0.0 {
            SamplingParams { temperature, top_k, top_p, min_p, seed, ..greedy }
        } else {
            greedy
        }
    }
}

pub(super) fn read(fields: &Fields) -> Result<GenerationConfig, ModelError> {
    let default = GenerationConfig::default();
    // −1 is what some publishers write for all.
    let top_k = fields.nullable("top_k", "an integer from -1 to 4294967295", |value: &Value| {
        value.as_i64().filter(|k| (-1..=i64::from(u32::MAX)).contains(k))
    })?;
    // Others are not normal numbers in f32, or no numbers.
    let fits = |t: f64| t == 0.0 || (1e-30..=1e30).contains(&t);
    let temperature = fields.number("temperature", "0 or a number from 1e-30 to 1e30", fits)?;
    let top_p = fields.number("top_p", "a number above 0 and at most 1", |p| p > 0.0 && p <= 1.0)?;
    let min_p = fields.number("min_p", "a number from 0 to 1", |p| (0.0..=1.0).contains(&p))?;
    let expected = "a number from 1e-6 to 1e6";
    let penalty = fields.number("repetition_penalty", expected, |p| (1e-6..=1e6).contains(&p))?;
    Ok(GenerationConfig {
        do_sample: fields
            .nullable("do_sample", "true or false", Value::as_bool)?
            .unwrap_or(default.do_sample),
        temperature: temperature.map_or(default.temperature, |t| t as f32),
        top_k: top_k.map_or(default.top_k, |k| u32::try_from(k).ok().filter(|&k| k > 0)),
        top_p: top_p.map_or(default.top_p, |p| p as f32),
        min_p: min_p.map_or(default.min_p, |p| p as f32),
        repetition_penalty: penalty.map_or(default.repetition_penalty, |p| p as f32),
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::fields::Seen;
    use super::*;

    fn of(text: &str) -> Result<GenerationConfig, ModelError> {
        let value = serde_json::from_str(text).expect("JSON");
        let seen = Seen::default();
        read(&Fields::top(&value, Path::new("generation_config.json"), &seen)?)
    }

    #[test]
    fn defaults_and_values() -> Result<(), ModelError> {
        let greedy = SamplingParams::default();
        let random =
            |temperature, top_k, top_p| SamplingParams { temperature, top_k, top_p, seed: 3, ..greedy };
        let qwen3 =
            r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "pad_token_id": 7}"#;
        for (text, want) in [
            ("{}", greedy),
            (r#"{"temperature": 0.6, "top_k": 20}"#, greedy),
            (r#"{"do_sample": null}"#, greedy),
            (r#"{"do_sample": true}"#, random(1.0, Some(50), 1.0)),
            (r#"{"do_sample": true, "top_k": 0}"#, random(1.0, None, 1.0)),
            (r#"{"do_sample": true, "top_k": -1, "top_p": 1}"#, random(1.0, None, 1.0)),
            (r#"{"do_sample": true, "temperature": 0.0}"#, greedy),
            (qwen3, random(0.6, Some(20), 0.95)),
            (r#"{"min_p": 0.1, "repetition_penalty": null}"#, greedy),
            (
                r#"{"do_sample": true, "top_k": 0, "min_p": 0.25, "repetition_penalty": 1.05}"#,
                SamplingParams { min_p: 0.25, repetition_penalty: 1.05, ..random(1.0, None, 1.0) },
            ),
            // Of the most likely token too.
            (r#"{"repetition_penalty": 1.5}"#, SamplingParams { repetition_penalty: 1.5, ..greedy }),
        ] {
            assert_eq!(of(text)?.sampling(3), want, "{text}");
        }
        Ok(())
    }

    #[test]
    fn refused_values() {
        for (text, want) in [
            (r#"{"temperature": -1}"#, "temperature: expected 0 or a number from 1e-30 to 1e30, got -1"),
            (
                r#"{"temperature": 1e-40}"#,
                "temperature: expected 0 or a number from 1e-30 to 1e30, got 1e-40",
            ),
            (r#"{"top_p": 0}"#, "top_p: expected a number above 0 and at most 1, got 0"),
            (r#"{"top_k": -2}"#, "top_k: expected an integer from -1 to 4294967295, got -2"),
            (r#"{"min_p": 1.5}"#, "min_p: expected a number from 0 to 1, got 1.5"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty: expected a number from 1e-6 to 1e6, got 0"),
            (r#"{"do_sample": 1}"#, "do_sample: expected true or false, got 1"),
        ] {
            let message = of(text).expect_err(text).to_string();
            assert_eq!(message, format!("generation_config.json: {want}"));
        }
    }
}
