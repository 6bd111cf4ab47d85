//! When a prefix that sequences share is read once for all of them.

use abi::DType;

use super::BatchOptions;
use crate::config::{AttentionConfig, DecoderConfig, MixerConfig};

/// Whether a step reads pages that its sequences share once for all of them, instead of once for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SharedPrefix {
    /// Once for each. Takes no memory.
    Off,
    /// Once for all where that should save time: from some 100 MiB on that a layer would read again.
    #[default]
    Auto,
    /// Once for all wherever two sequences share a page: to try what it does.
    Always,
}

/// Bytes that a layer must save for a cascade to pay: those of a prefix, once for each sequence but one. It has two
/// launches more than a plain attention, or three where parts of the prefix have to be put together, each of which
/// waits for the one before, and reads what is left less evenly: `benches/record/h200/2026-11-28-cascade.md`.
const LEAST_SAVED_BYTES: usize = 96 << 20;

/// Bytes that must be saved besides for each query and column of its heads: its part of the prefix is made, and merged.
const QUERY_COLUMN_BYTES: usize = 768;

/// When it pays.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sharing {
    /// Bytes of a token's keys and values in a layer that can do it.
    key_bytes: usize,
    /// Bytes that must be saved in such a layer for each query.
    query_bytes: usize,
    /// What must be saved besides.
    least_bytes: usize,
}

impl Sharing {
    /// None if no step of such a batch could gain by it: then there are no plans for it.
    pub(super) fn new(options: &BatchOptions, config: &DecoderConfig, dtype: DType) -> Option<Self> {
        let shares = |mixer: &MixerConfig| match *mixer {
            MixerConfig::Attention(AttentionConfig { heads_q, heads_kv, head_dim, window: None, .. }) => {
                Some([heads_q * head_dim, heads_kv * head_dim])
            }
            _ => None,
        };
        // Of several kinds of layers the one with most keys.
        let layers = config.layers.iter().filter_map(|layer| shares(&layer.mixer));
        let [q_cols, kv_cols] = layers.max_by_key(|&[_, kv_cols]| kv_cols)?;
        let key_bytes = 2 * kv_cols * options.cache_type.dtype(dtype).bytes();
        let own = match options.shared_prefix {
            SharedPrefix::Off => return None,
            SharedPrefix::Auto => {
                let query_bytes = QUERY_COLUMN_BYTES * q_cols;
                Sharing { key_bytes, query_bytes, least_bytes: LEAST_SAVED_BYTES }
            }
            SharedPrefix::Always => Sharing { key_bytes, query_bytes: 0, least_bytes: 1 },
        };
        let most = options.max_sequences;
        own.pays(most, most, options.capacity).then_some(own)
    }

    /// Whether so many sequences, with so many of a step's tokens in all, gain by reading a prefix of so many once.
    pub(super) fn pays(&self, sequences: usize, tokens: usize, prefix: usize) -> bool {
        let again = sequences.saturating_sub(1).saturating_mul(prefix).saturating_mul(self.key_bytes);
        again >= self.least_bytes.saturating_add(tokens.saturating_mul(self.query_bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::CacheType;
    use crate::config::ModelConfig;

    fn config(json: &str) -> DecoderConfig {
        ModelConfig::from_json(json, Path::new("config.json")).unwrap().decoder
    }

    /// Qwen3-4B has 4 KiB of keys and values for a token and layer.
    #[test]
    fn it_pays_from_some_mib_on() {
        let qwen3 = config(include_str!("../../../assets/configs/qwen3-4b-instruct-2507.json"));
        let shared_prefix = SharedPrefix::Auto;
        let options = BatchOptions { capacity: 8448, shared_prefix, ..BatchOptions::default() };
        let own = Sharing::new(&options, &qwen3, DType::BF16).unwrap();
        for (sequences, tokens, prefix, pays) in [
            (32, 32, 2048, true),
            (128, 128, 2048, true),
            (32, 32, 512, false),
            (4, 4, 4096, false),
            (4, 4, 16384, true),
            (2, 2, 8192, false),
            (1, 1, 1 << 20, false),
            // Chunks, which multiply as much as they read.
            (8, 512, 8192, false),
            (8, 512, 1 << 20, true),
        ] {
            assert_eq!(own.pays(sequences, tokens, prefix), pays, "{sequences} {tokens} {prefix}");
        }
        // Half of the bytes.
        let fp8 = BatchOptions { cache_type: CacheType::Fp8, ..options };
        let fp8 = Sharing::new(&fp8, &qwen3, DType::BF16).unwrap();
        assert_eq!([8192, 32768].map(|prefix| fp8.pays(5, 5, prefix)), [false, true]);
    }

    #[test]
    fn never_where_nothing_can_be_gained() {
        let qwen3 = config(include_str!("../../../assets/configs/qwen3-0.6b.json"));
        let glm = config(include_str!("../../../assets/configs/glm-4.7-flash.json"));
        let has = |config: &DecoderConfig, shared_prefix, max_sequences, capacity| {
            let options = BatchOptions { shared_prefix, max_sequences, capacity, ..BatchOptions::default() };
            Sharing::new(&options, config, DType::BF16).is_some()
        };
        use SharedPrefix::{Always, Auto, Off};
        assert!(has(&qwen3, Auto, 32, 2048) && !has(&qwen3, Auto, 4, 2048) && !has(&qwen3, Auto, 32, 256));
        assert!(has(&qwen3, Always, 2, 16) && !has(&qwen3, Always, 1, 2048) && !has(&qwen3, Off, 32, 2048));
        // Of one row for all heads, by other kernels.
        assert!(!has(&glm, Auto, 128, 1 << 16) && !has(&glm, Always, 128, 1 << 16));
        let always = BatchOptions { shared_prefix: Always, ..BatchOptions::default() };
        let always = Sharing::new(&always, &qwen3, DType::BF16).unwrap();
        assert!(always.pays(2, 512, 16) && !always.pays(2, 2, 0) && !always.pays(1, 1, 16));
    }
}
