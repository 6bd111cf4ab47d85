//! Models from published files: `config.json` and safetensors, or GGUF, in; tokens out.
//!
//! [`Model::load`] reads the configuration, builds the modules from it by their factories and loads their weights;
//! [`Model::session`] plans the operators and takes all memory; [`Session`] runs prompts and decode steps of a batch
//! that stays, [`Batch`] of sequences that come and go. A [`Visual`] is an image or a video of a prompt.

mod adapter;
mod batch;
mod checkpoint;
mod config;
mod decoder;
mod error;
mod files;
mod gguf;
mod hub;
mod layers;
mod loader;
mod model;
mod part;
mod quant;
mod recording;
mod sampler;
mod session;
mod tensors;
mod vision;
mod weights;

pub use adapter::Adapter;
pub use batch::{
    Batch, BatchError, BatchOptions, BatchSampler, BatchStats, ChosenToken, DraftNode, DraftRequest,
    ModelDraft, NgramDraft, Prompt, PromptVisual, RequestId, RowSampling, ScheduledStep, Scheduler,
    SequenceId, SharedPrefix, StepOutput, TokenLogprobs, Work, WorkLogits,
};
pub use checkpoint::{Checkpoint, StoredName};
pub use config::{
    Architecture, AttentionConfig, DecoderConfig, DeltaNetConfig, FeedForwardConfig, GenerationConfig,
    LatentConfig, LayerConfig, MixerConfig, MlpConfig, ModelConfig, MoeConfig, NormConfig, PixelConfig,
    RopeConfig, RopeKind, SharedExpertConfig, VisionConfig, YarnRope,
};
pub use decoder::{Decoder, DecoderLayer, Observed, Observer};
pub use error::{ModelError, TensorProblem};
pub use files::read_file;
pub use gguf::{Gguf, GgufVocabulary};
pub use hub::cached_repo;
#[cfg(feature = "hub")]
pub use hub::{DownloadProgress, download_repo};
pub use layers::{
    CacheType, DeltaNet, FeedForward, LatentAttention, Linear, Mixer, Mlp, Moe, Projection, ProjectionWeight,
    SelfAttention,
};
pub use loader::{LoadProgress, Quantise};
pub use model::{LoadReport, Model};
pub use part::{ExpertSharding, Shard};
pub use quant::{
    CodeType, GgmlType, Origin, Origins, QuantMatrix, QuantReport, QuantisedTensor, WEIGHT_FORMATS,
};
pub use sampler::SessionSampler;
pub use session::{LogitRows, Logits, Session, SessionOptions};
pub use tensors::{load_tensors, save_tensors};
pub use vision::{LayerNormWeights, PatchGrid, PatchMerger, VisionBlock, VisionTower, Visual};
pub use weights::{Requirements, TensorData, Weights};
