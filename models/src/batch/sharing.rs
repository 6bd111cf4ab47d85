//! When a prefix that sequences share is read once for all of them.

use abi::DType;

use super::BatchOptions;
use crate::config::{AttentionConfig, DecoderConfig, MixerConfig};

/// Whether a step reads pages that its sequences share once for all of them, instead of once for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SharedPrefix {
    /// Once for each. Takes no memory.
    #[default]
    Off,
    /// Once for all where that should save time: from some MiB on that a layer would read again.
    Auto,
    /// Once for all wherever two sequences share a page: to try what it does.
    Always,
}

/// Bytes that a layer must save for a cascade to pay: those of a prefix, once for each sequence but one. It has two
/// launches more than a plain attention, or three where parts of the prefix have to be put together, each of which
/// waits for the one before: some 10 µs, in which a card of 3.3 TB/s reads 32 MiB. A slower card reads less meanwhile,
/// and gains a little earlier than this says.
const LEAST_SAVED_BYTES: usize = 32 << 20;

/// Results that are moved besides for each query and head: two parts are written and read where a plain attention has
/// none, and their merge is written as its result is.
const MERGED_ROWS: usize = 4;

/// When it pays.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sharing {
    /// Bytes of a token's keys and values in a layer that can do it.
    key_bytes: usize,
    /// Bytes that a query's merge moves in such a layer.
    merge_bytes: usize,
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
                let merge_bytes = MERGED_ROWS * q_cols * dtype.bytes();
                Sharing { key_bytes, merge_bytes, least_bytes: LEAST_SAVED_BYTES }
            }
            SharedPrefix::Always => Sharing { key_bytes, merge_bytes: 0, least_bytes: 1 },
        };
        let most = options.max_sequences;
        own.pays(most, most, options.capacity).then_some(own)
    }

    /// Whether so many sequences, with so many of a step's tokens in all, gain by reading a prefix of so many once.
    pub(super) fn pays(&self, sequences: usize, tokens: usize, prefix: usize) -> bool {
        let again = sequences.saturating_sub(1).saturating_mul(prefix).saturating_mul(self.key_bytes);
        again >= self.least_bytes.saturating_add(tokens.saturating_mul(self.merge_bytes))
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
            (32, 32, 256, false),
            (32, 32, 320, true),
            (4, 4, 2048, false),
            (4, 4, 4096, true),
            (2, 2, 8192, false),
            (2, 2, 8448, true),
            (1, 1, 1 << 20, false),
            // Chunks, whose merge moves as much as is saved.
            (8, 512, 1024, false),
            (8, 512, 2048, true),
        ] {
            assert_eq!(own.pays(sequences, tokens, prefix), pays, "{sequences} {tokens} {prefix}");
        }
        // Half of the bytes.
        let fp8 = BatchOptions { cache_type: CacheType::Fp8, ..options };
        let fp8 = Sharing::new(&fp8, &qwen3, DType::BF16).unwrap();
        assert_eq!([2048, 8192].map(|prefix| fp8.pays(5, 5, prefix)), [false, true]);
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
