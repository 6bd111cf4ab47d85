//! Models from published files: `config.json` and safetensors in, tokens out.
//!
//! [`Model::load`] reads the configuration, builds the modules from it by their factories and loads their weights;
//! [`Model::session`] plans the operators and takes all memory; [`Session`] runs prompts and decode steps.

mod config;
mod error;
mod loader;
mod model;
mod modules;
mod plans;
mod sampler;
mod session;
mod weights;

pub use config::{Architecture, DecoderConfig, ModelConfig, RopeConfig, RopeKind, YarnRope};
pub use error::{ModelError, TensorProblem};
pub use loader::LoadProgress;
pub use model::Model;
pub use modules::{Attention, Decoder, DecoderLayer, Linear, Mlp};
pub use sampler::Sampler;
pub use session::{Logits, Observed, Observer, Session, SessionOptions};
pub use weights::{Requirements, TensorData, Weights};
