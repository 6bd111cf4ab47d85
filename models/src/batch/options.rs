//! The sizes of a batch.

use abi::DType;

use super::SharedPrefix;
use crate::CacheType;
use crate::config::ModelConfig;
use host::Error;
use host::ops::attention::PAGE_SIZES;

const OP: &str = "Batch";

/// The sizes of a batch. All memory is taken when it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchOptions {
    /// Most sequences that are in the batch at a time, those that wait for pages too.
    pub max_sequences: usize,
    /// Most tokens of a step, over all sequences: its budget. What is between the layers has memory for so many.
    pub max_step_tokens: usize,
    /// Most sequences with several tokens in a step: prompts, and what is to be verified.
    pub max_prompts: usize,
    /// Most rows of logits of a step. There are always as many as sequences.
    pub max_logits: usize,
    /// Most tokens of a sequence, prompt and continuation together.
    pub capacity: usize,
    /// Tokens of a page of the caches: 16, 32, 64, 128 or 256. Also the grain of what sequences share.
    pub page_tokens: usize,
    /// Pages of the caches, for all sequences together: at least as many as one of `capacity` needs. With fewer than
    /// all sequences need at their longest a step may be [`crate::BatchError::OutOfPages`].
    pub pages: usize,
    /// Whether tokens that were computed are found again by later sequences that begin with them, with the same adapter
    /// and up to the first image. Without effect on a model with recurrent states.
    pub prefix_cache: bool,
    /// Most patches of the images and videos of a prompt; 0 for text alone, which takes no memory for a vision tower.
    pub max_patches: usize,
    /// What keys and values are stored as.
    pub cache_type: CacheType,
    /// Whether a step reads pages that its sequences share, forks or by the prefix cache, once for all of them: see
    /// [`Batch`](crate::Batch).
    pub shared_prefix: SharedPrefix,
}

impl Default for BatchOptions {
    fn default() -> Self {
        BatchOptions {
            max_sequences: 32,
            max_step_tokens: 512,
            max_prompts: 8,
            max_logits: 32,
            capacity: 2048,
            page_tokens: 64,
            pages: 1024,
            prefix_cache: true,
            max_patches: 0,
            cache_type: CacheType::Model,
            shared_prefix: SharedPrefix::Auto,
        }
    }
}

impl BatchOptions {
    /// With as many pages as fit into so many bytes, but no more than all sequences can use, for a model of this
    /// configuration and type.
    pub fn with_cache_bytes(self, config: &ModelConfig, dtype: DType, bytes: usize) -> Self {
        // What grows with a sequence; what does not is taken for each anyway.
        let of = |tokens| config.decoder.cache_bytes_as(dtype, self.cache_type, tokens);
        let page = of(self.page_tokens) - of(0);
        let all = self.max_sequences.saturating_mul(self.pages_of(self.capacity));
        let pages = bytes.checked_div(page);
        BatchOptions { pages: pages.map_or(all, |pages| pages.min(all)), ..self }
    }

    /// Pages of a sequence of so many tokens.
    pub(super) fn pages_of(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens.max(1))
    }

    /// Most sequences with one token in a step.
    pub(super) fn max_ones(&self) -> usize {
        self.max_sequences.min(self.max_step_tokens)
    }

    /// Most sequences with several.
    pub(super) fn max_severals(&self) -> usize {
        self.max_prompts.min(self.max_sequences).min(self.max_step_tokens / 2)
    }

    /// Most rows of logits.
    pub(super) fn logit_rows(&self) -> usize {
        self.max_logits.max(self.max_ones())
    }

    /// Whether a model can have such a batch, but for the memory: to be asked before it is loaded.
    ///
    /// **Errors**: [`Error::Invalid`] that names the field.
    pub fn check(&self) -> Result<(), Error> {
        let &BatchOptions {
            max_sequences,
            max_step_tokens,
            max_prompts,
            max_logits,
            capacity,
            page_tokens,
            pages,
            max_patches,
            ..
        } = self;
        // Rows, slots and the elements of tables are counted in 32 bits.
        const MOST: usize = 1 << 31;
        for (argument, size) in [
            ("max_sequences", max_sequences),
            ("max_step_tokens", max_step_tokens),
            ("max_prompts", max_prompts),
            ("capacity", capacity),
        ] {
            if !(1..MOST).contains(&size) {
                return Err(Error::invalid(OP, argument, "at least 1 and below 2^31", size.to_string()));
            }
        }
        if max_logits >= MOST {
            return Err(Error::invalid(OP, "max_logits", "below 2^31", max_logits.to_string()));
        }
        // They are attention's queries.
        if max_patches >= 1 << 30 {
            return Err(Error::invalid(OP, "max_patches", "below 2^30", max_patches.to_string()));
        }
        if !PAGE_SIZES.contains(&page_tokens) {
            return Err(Error::invalid(OP, "page_tokens", "16, 32, 64, 128 or 256", page_tokens.to_string()));
        }
        let least = self.pages_of(capacity);
        if pages < least || pages.saturating_mul(page_tokens) >= MOST {
            let expected =
                format!("at least {least} for a sequence of {capacity} tokens, and below 2^31 tokens");
            return Err(Error::invalid(OP, "pages", expected, pages.to_string()));
        }
        if max_sequences.saturating_mul(least) >= MOST {
            let got = format!("{max_sequences} · {capacity}");
            return Err(Error::invalid(OP, "capacity", "max_sequences · pages of one below 2^31", got));
        }
        Ok(())
    }
}
