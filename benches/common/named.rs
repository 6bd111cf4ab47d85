//! Models of the benchmarks of whole models.

use serde_json::Value;
use warpforge::models::{ModelConfig, Quantise};

use crate::Failure;

/// A published model, as an argument names it: a file of `assets/configs` without `.json`; behind a colon a scheme,
/// behind an @ layers, if not all.
pub struct Named {
    pub config: ModelConfig,
    pub quantise: Quantise,
}

impl Named {
    /// Reads its configuration.
    pub fn new(name: &str) -> Result<Self, Failure> {
        let (name, layers) = name.split_once('@').map_or((name, None), |(name, layers)| (name, Some(layers)));
        let (file, scheme) = name.split_once(':').map_or((name, None), |(file, scheme)| (file, Some(scheme)));
        let folder = testkit::gpu::workspace_root().join("assets/configs");
        let path = folder.join(format!("{file}.json"));
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut json: Value = serde_json::from_str(&text)?;
        if let Some(layers) = layers {
            json["num_hidden_layers"] = layers.parse::<usize>()?.into();
        }
        let config = ModelConfig::from_json(&json.to_string(), &path)?;
        let quantise = scheme.map_or(Ok(Quantise::Dense), str::parse)?;
        Ok(Named { config, quantise })
    }
}
