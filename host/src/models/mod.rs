//! Models from published files: `config.json` and safetensors in, decoder modules out.

mod config;
mod error;
mod weights;

pub use config::{Activation, Architecture, DecoderConfig, ModelConfig, RopeConfig, RopeKind, YarnRope};
pub use error::{ModelError, TensorProblem};
pub use weights::{Requirements, TensorData, Weights};
