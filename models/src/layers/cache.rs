//! What layers keep of the tokens that they have seen.

use abi::DType;

use super::attention::KeysValues;
use super::delta_net::DeltaState;
use super::latent::LatentRows;
use crate::config::{AttentionConfig, DecoderConfig, MixerConfig};
use host::Error;
use host::Stream;

/// What the keys and values of attention are stored as. Recurrent states stay as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheType {
    /// In the model's type.
    #[default]
    Model,
    /// fp8 (e4m3), half of the memory: `x / scale` rounded to nearest even, at most ±448. The scales are 1, or what the
    /// checkpoint has: `k_scale` and `v_scale` of a layer's `self_attn`, or of its `k_proj` and `v_proj`, for all heads
    /// or each. For models in f16 and bf16 with heads of a multiple of 16, without latent attention.
    ///
    /// Keys and values err by up to 2^-4 of themselves. Kernels of many queries, and all without tensor cores, read
    /// them by way of memory of the plan, for as many keys as a step may meet, in the model's type.
    Fp8,
}

impl CacheType {
    /// The type of keys and values in a model of this type.
    pub fn dtype(self, model: DType) -> DType {
        match self {
            CacheType::Model => model,
            CacheType::Fp8 => DType::F8E4M3,
        }
    }

    /// Refuses a model that cannot have it.
    pub(crate) fn check(self, op: &'static str, config: &DecoderConfig, dtype: DType) -> Result<(), Error> {
        let unfit = |mixer: &MixerConfig| match mixer {
            MixerConfig::Attention(AttentionConfig { head_dim, .. }) if !head_dim.is_multiple_of(16) => {
                Some(format!("heads of {head_dim}"))
            }
            MixerConfig::Latent(_) => Some("latent attention".to_owned()),
            MixerConfig::Attention(_) | MixerConfig::DeltaNet(_) => None,
        };
        let got = match self {
            CacheType::Model => None,
            CacheType::Fp8 if !matches!(dtype, DType::F16 | DType::BF16) => Some(dtype.name().to_owned()),
            CacheType::Fp8 => config.layers.iter().find_map(|layer| unfit(&layer.mixer)),
        };
        let expected =
            "the model's type; or fp8 for f16 and bf16, heads of a multiple of 16, no latent attention";
        got.map_or(Ok(()), |got| Err(Error::invalid(op, "cache_type", expected, got)))
    }
}

impl std::str::FromStr for CacheType {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "model" => Ok(CacheType::Model),
            "fp8" => Ok(CacheType::Fp8),
            _ => Err(Error::invalid("CacheType", "name", "model or fp8", name)),
        }
    }
}

/// What a layer keeps of the tokens that it has seen.
#[derive(Debug)]
pub(crate) enum Cache {
    KeysValues(KeysValues),
    Delta(DeltaState),
    LatentRows(LatentRows),
}

impl Cache {
    /// Of what is kept for each token `rows` times so many, a sequence's or a page's; of what is kept for a sequence
    /// `states`. Of a model of this type, with what its keys and values are stored as.
    pub(crate) fn new(
        config: &MixerConfig,
        stream: &Stream,
        (dtype, kept): (DType, CacheType),
        rows: [usize; 2],
        states: usize,
    ) -> Result<Self, Error> {
        match config {
            MixerConfig::Attention(config) => {
                Ok(Cache::KeysValues(KeysValues::new(config, stream, kept.dtype(dtype), rows)?))
            }
            MixerConfig::DeltaNet(config) => {
                Ok(Cache::Delta(DeltaState::new(config, stream, dtype, states)?))
            }
            MixerConfig::Latent(config) => {
                Ok(Cache::LatentRows(LatentRows::new(config, stream, dtype, rows)?))
            }
        }
    }

    /// Bytes of device memory.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Cache::KeysValues(cache) => cache.bytes(),
            Cache::Delta(cache) => cache.bytes(),
            Cache::LatentRows(cache) => cache.bytes(),
        }
    }

    /// Makes page `to` what page `from`, another one with `len` tokens, is; of a state nothing.
    pub(crate) fn copy_page(
        &mut self,
        stream: &Stream,
        pages: (usize, usize),
        len: usize,
    ) -> Result<(), Error> {
        match self {
            Cache::KeysValues(_) | Cache::LatentRows(_) => self.copy_sequence(stream, pages, len),
            Cache::Delta(_) => Ok(()),
        }
    }

    /// Makes the state `to` what `from`, another one, is; of pages nothing.
    pub(crate) fn copy_state(&mut self, stream: &Stream, states: (usize, usize)) -> Result<(), Error> {
        match self {
            Cache::KeysValues(_) | Cache::LatentRows(_) => Ok(()),
            Cache::Delta(cache) => cache.copy_sequence(stream, states),
        }
    }

    /// Makes sequence `to` what sequence `from`, another one of `len` tokens, is.
    pub(crate) fn copy_sequence(
        &mut self,
        stream: &Stream,
        sequences: (usize, usize),
        len: usize,
    ) -> Result<(), Error> {
        match self {
            Cache::KeysValues(cache) => cache.copy_sequence(stream, sequences, len),
            Cache::Delta(cache) => cache.copy_sequence(stream, sequences),
            Cache::LatentRows(cache) => cache.copy_sequence(stream, sequences, len),
        }
    }

    /// Whether the last tokens of a sequence can be forgotten while those before are kept.
    pub(crate) fn can_be_cropped(&self) -> bool {
        match self {
            Cache::KeysValues(_) | Cache::LatentRows(_) => true,
            Cache::Delta(_) => false,
        }
    }

    /// Forgets all tokens of a sequence.
    pub(crate) fn clear(&mut self, stream: &Stream, sequence: usize) -> Result<(), Error> {
        match self {
            // Nobody reads beyond a sequence's length.
            Cache::KeysValues(_) | Cache::LatentRows(_) => Ok(()),
            Cache::Delta(cache) => cache.clear(stream, sequence),
        }
    }
}
