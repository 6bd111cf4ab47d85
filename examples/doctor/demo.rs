//! The demo model, which the program carries with it: a self-test needs no checkout.

use warpforge::models::{Model, Session, SessionOptions, SessionSampler};
use warpforge::ops::sampling::SamplingParams;
use warpforge::{DType, Device, Error};

use crate::output::Failure;

const FILES: [(&str, &[u8]); 3] = [
    ("config.json", include_bytes!("../../assets/demo-model/config.json")),
    ("generation_config.json", include_bytes!("../../assets/demo-model/generation_config.json")),
    ("model.safetensors", include_bytes!("../../assets/demo-model/model.safetensors")),
];
const EXPECTED: &[u8] = include_bytes!("../../assets/demo-model/expected.json");

/// The model's files, in a folder that goes with this.
pub struct Demo {
    folder: tempfile::TempDir,
    /// Prompt's ids and those that follow.
    cases: Vec<(Vec<u32>, Vec<u32>)>,
}

impl Demo {
    pub fn unpack() -> Result<Self, Failure> {
        let failed = |error| format!("cannot unpack the demo model into a temporary folder: {error}");
        let folder = tempfile::tempdir().map_err(failed)?;
        for (name, bytes) in FILES {
            std::fs::write(folder.path().join(name), bytes).map_err(failed)?;
        }
        let expected: Vec<serde_json::Value> = serde_json::from_slice(EXPECTED)?;
        let ids = |value: &serde_json::Value| serde_json::from_value(value.clone());
        let case = |case: &serde_json::Value| Ok((ids(&case["ids"])?, ids(&case["greedy"])?));
        let cases = expected.iter().map(case).collect::<Result<_, serde_json::Error>>()?;
        Ok(Demo { folder, cases })
    }

    /// Continues the demo's prompts greedily, in f32, where models write the expected text exactly. Returns the
    /// session, and how many tokens were compared.
    pub fn test(&self, device: &Device) -> Result<(Session, usize), Failure> {
        let model = Model::load(device, self.folder.path(), DType::F32, &mut |_| {})?;
        let mut session = model.session(SessionOptions { capacity: 256, ..SessionOptions::default() })?;
        let mut num_tokens = 0;
        for (prompt, expected) in &self.cases {
            let got = continue_greedily(&mut session, prompt, expected.len())?;
            if got != *expected {
                return Err(format!("after {prompt:?}: expected {expected:?}, got {got:?}").into());
            }
            num_tokens += expected.len();
        }
        Ok((session, num_tokens))
    }
}

fn continue_greedily(session: &mut Session, prompt: &[u32], num_tokens: usize) -> Result<Vec<u32>, Error> {
    session.truncate(0, 0)?;
    let mut sampler = SessionSampler::new(session, SamplingParams::default())?;
    session.prefill(0, prompt)?;
    let mut ids = Vec::new();
    while ids.len() < num_tokens {
        let id = sampler.sample(session)?[0];
        ids.push(id);
        session.decode(&[id])?;
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_well_and_a_text_that_is_not() -> Result<(), Failure> {
        let mut demo = Demo::unpack()?;
        let (_, num_tokens) = demo.test(&Device::cpu())?;
        assert!(num_tokens > 20, "{num_tokens}");
        demo.cases[0].1[3] ^= 1;
        let message = demo.test(&Device::cpu()).err().ok_or("an error")?.to_string();
        assert!(message.starts_with("after ["), "{message}");
        Ok(())
    }
}
