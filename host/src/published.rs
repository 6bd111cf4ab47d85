//! Sizes of published models, read from their configurations as this is compiled: the cases of tests and benches are
//! made of them. A key that a configuration lacks is an error of the compiler. `configs` has links to `assets/configs`,
//! which a package holds as files.

macro_rules! config {
    ($name:literal) => {
        Config { json: include_str!(concat!("../configs/", $name, ".json")).as_bytes(), start: 0 }
    };
}

/// A text decoder.
#[derive(Clone, Copy)]
pub(crate) struct Decoder {
    /// Elements of a token between layers.
    pub hidden: usize,
    /// Query heads, and heads of keys and of values.
    pub heads: (usize, usize),
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a head that are rotated.
    pub rotary_dim: usize,
    /// Elements of a dense layer's gate, and of up.
    pub intermediate: usize,
    /// Tokens that there are.
    pub vocab: usize,
}

/// A mixture of experts.
#[derive(Clone, Copy)]
pub(crate) struct Experts {
    /// Experts of a layer.
    pub count: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Elements of an expert's gate, and of up.
    pub intermediate: usize,
    /// The same of the expert that all tokens share; 0 if there is none.
    pub shared: usize,
}

/// A gated delta net.
#[derive(Clone, Copy)]
pub(crate) struct DeltaNet {
    /// Heads of q and of k, and heads of v.
    pub heads: (usize, usize),
    /// Elements of a key head, and of a value head.
    pub dims: (usize, usize),
    /// Taps of the convolution.
    pub width: usize,
}

/// Latent attention.
#[derive(Clone, Copy)]
pub(crate) struct Latent {
    /// Heads.
    pub heads: usize,
    /// Elements of a token's latent queries.
    pub q_rank: usize,
    /// Elements of a token's latent keys and values.
    pub kv_rank: usize,
    /// Elements of a key head that are not rotated.
    pub nope: usize,
    /// Elements of a key head that are.
    pub rope: usize,
    /// Elements of a value head.
    pub v: usize,
}

/// A vision tower.
#[derive(Clone, Copy)]
pub(crate) struct Vision {
    /// Elements of a patch between blocks.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Elements between the layers of an MLP.
    pub intermediate: usize,
    /// Elements of a patch's pixels.
    pub pixels: usize,
    /// Elements of the patches that are merged into a token.
    pub merged: usize,
    /// Elements of that token.
    pub out: usize,
    /// Places of the table of positions.
    pub positions: usize,
}

impl Decoder {
    /// Rows of the joint projection to q, k and v.
    pub const fn qkv(self) -> usize {
        self.q() + 2 * self.heads.1 * self.head_dim
    }

    /// Rows of the projection to q.
    pub const fn q(self) -> usize {
        self.heads.0 * self.head_dim
    }

    const fn of(config: Config) -> Self {
        let head_dim = match config.find("head_dim") {
            Some(head_dim) => head_dim,
            None => config.get("qk_nope_head_dim") + config.get("qk_rope_head_dim"),
        };
        let rotary = match config.thousandths("partial_rotary_factor") {
            Some(thousandths) => head_dim * thousandths / 1000,
            None => head_dim,
        };
        Decoder {
            hidden: config.get("hidden_size"),
            heads: (config.get("num_attention_heads"), config.get("num_key_value_heads")),
            head_dim,
            rotary_dim: rotary,
            intermediate: config.get("intermediate_size"),
            vocab: config.get("vocab_size"),
        }
    }
}

impl Experts {
    const fn of(config: Config) -> Self {
        let intermediate = config.get("moe_intermediate_size");
        let (count, shared) = match config.find("n_routed_experts") {
            Some(count) => (count, config.get("n_shared_experts") * intermediate),
            None => (config.get("num_experts"), config.get("shared_expert_intermediate_size")),
        };
        Experts { count, top_k: config.get("num_experts_per_tok"), intermediate, shared }
    }
}

impl DeltaNet {
    /// Elements of q, of k and of v of all heads: the channels of the convolution.
    pub const fn channels(self) -> usize {
        2 * self.heads.0 * self.dims.0 + self.v()
    }

    /// Elements of v of all heads.
    pub const fn v(self) -> usize {
        self.heads.1 * self.dims.1
    }

    const fn of(config: Config) -> Self {
        DeltaNet {
            heads: (config.get("linear_num_key_heads"), config.get("linear_num_value_heads")),
            dims: (config.get("linear_key_head_dim"), config.get("linear_value_head_dim")),
            width: config.get("linear_conv_kernel_dim"),
        }
    }
}

impl Latent {
    const fn of(config: Config) -> Self {
        Latent {
            heads: config.get("num_attention_heads"),
            q_rank: config.get("q_lora_rank"),
            kv_rank: config.get("kv_lora_rank"),
            nope: config.get("qk_nope_head_dim"),
            rope: config.get("qk_rope_head_dim"),
            v: config.get("v_head_dim"),
        }
    }
}

impl Vision {
    /// Elements of a head.
    pub const fn head_dim(self) -> usize {
        self.hidden / self.heads
    }

    const fn of(config: Config) -> Self {
        let (hidden, merge) = (config.get("hidden_size"), config.get("spatial_merge_size"));
        let patch = config.get("patch_size");
        Vision {
            hidden,
            heads: config.get("num_heads"),
            intermediate: config.get("intermediate_size"),
            pixels: config.get("in_channels") * config.get("temporal_patch_size") * patch * patch,
            merged: hidden * merge * merge,
            out: config.get("out_hidden_size"),
            positions: config.get("num_position_embeddings"),
        }
    }
}

const QWEN3_CODER_30B_CONFIG: Config = config!("qwen3-coder-30b-a3b-instruct");
const QWEN3_CODER_NEXT_CONFIG: Config = config!("qwen3-coder-next");
const GLM_4_7_FLASH_CONFIG: Config = config!("glm-4.7-flash");
const QWEN3_VL_2B_CONFIG: Config = config!("qwen3-vl-2b-instruct");

pub(crate) const QWEN3_0_6B: Decoder = Decoder::of(config!("qwen3-0.6b"));
pub(crate) const QWEN3_4B: Decoder = Decoder::of(config!("qwen3-4b-instruct-2507"));
pub(crate) const QWEN3_CODER_30B: Decoder = Decoder::of(QWEN3_CODER_30B_CONFIG);
pub(crate) const QWEN3_CODER_30B_EXPERTS: Experts = Experts::of(QWEN3_CODER_30B_CONFIG);
pub(crate) const QWEN3_CODER_NEXT: Decoder = Decoder::of(QWEN3_CODER_NEXT_CONFIG);
pub(crate) const QWEN3_CODER_NEXT_EXPERTS: Experts = Experts::of(QWEN3_CODER_NEXT_CONFIG);
pub(crate) const QWEN3_CODER_NEXT_DELTA: DeltaNet = DeltaNet::of(QWEN3_CODER_NEXT_CONFIG);
pub(crate) const GLM_4_7_FLASH: Decoder = Decoder::of(GLM_4_7_FLASH_CONFIG);
pub(crate) const GLM_4_7_FLASH_EXPERTS: Experts = Experts::of(GLM_4_7_FLASH_CONFIG);
pub(crate) const GLM_4_7_FLASH_LATENT: Latent = Latent::of(GLM_4_7_FLASH_CONFIG);
pub(crate) const QWEN3_VL_2B: Decoder = Decoder::of(QWEN3_VL_2B_CONFIG.within("text_config"));
pub(crate) const QWEN3_VL_2B_VISION: Vision = Vision::of(QWEN3_VL_2B_CONFIG.within("vision_config"));

/// A configuration from a place on. Keys are found by their names: the first of that name counts.
#[derive(Clone, Copy)]
struct Config {
    json: &'static [u8],
    start: usize,
}

impl Config {
    /// From the value of this key on.
    const fn within(self, key: &str) -> Self {
        match self.value(key) {
            Some(start) => Config { start, ..self },
            None => panic!("a configuration lacks a section"),
        }
    }

    /// A whole number.
    const fn get(self, key: &str) -> usize {
        match self.find(key) {
            Some(number) => number,
            None => panic!("a configuration lacks a number"),
        }
    }

    /// A whole number, if there is the key.
    const fn find(self, key: &str) -> Option<usize> {
        match self.thousandths(key) {
            Some(number) if number % 1000 == 0 => Some(number / 1000),
            Some(_) => panic!("a number is not whole"),
            None => None,
        }
    }

    /// A number of up to three decimals times 1000, if there is the key.
    const fn thousandths(self, key: &str) -> Option<usize> {
        let Some(mut i) = self.value(key) else { return None };
        assert!(self.json[i].is_ascii_digit(), "no number");
        let (mut number, mut decimals) = (0, None);
        loop {
            match (self.json[i], decimals) {
                (b'.', None) => decimals = Some(0),
                (digit @ b'0'..=b'9', _) => {
                    number = 10 * number + (digit - b'0') as usize;
                    if let Some(count) = decimals {
                        decimals = Some(count + 1);
                    }
                }
                _ => break,
            }
            i += 1;
        }
        let mut left = match decimals {
            Some(count) => 3 - count,
            None => 3,
        };
        while left > 0 {
            (number, left) = (10 * number, left - 1);
        }
        Some(number)
    }

    /// Where the value of a key begins.
    const fn value(self, key: &str) -> Option<usize> {
        let (json, key) = (self.json, key.as_bytes());
        let mut i = self.start;
        while i + key.len() + 1 < json.len() {
            if json[i] == b'"' && json[i + key.len() + 1] == b'"' {
                let mut same = 0;
                while same < key.len() && json[i + 1 + same] == key[same] {
                    same += 1;
                }
                if same == key.len() {
                    i += key.len() + 2;
                    while matches!(json[i], b':' | b' ') {
                        i += 1;
                    }
                    return Some(i);
                }
            }
            i += 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: Config = Config {
        json: br#"{"hidden": 5, "hidden_size" : 64, "half": 0.5, "inner": {"hidden_size":3}, "whole": 1.0}"#,
        start: 0,
    };

    #[test]
    fn numbers_of_a_configuration() {
        assert_eq!(EXAMPLE.find("hidden_size"), Some(64));
        assert_eq!(EXAMPLE.find("size"), None);
        assert_eq!(EXAMPLE.get("whole"), 1);
        assert_eq!(EXAMPLE.thousandths("half"), Some(500));
        assert_eq!(EXAMPLE.within("inner").get("hidden_size"), 3);
    }

    /// As the models' pages have them.
    #[test]
    fn published_sizes() {
        assert_eq!((QWEN3_4B.qkv(), QWEN3_4B.rotary_dim, QWEN3_4B.vocab), (6144, 128, 151_936));
        assert_eq!((QWEN3_CODER_NEXT.rotary_dim, QWEN3_CODER_NEXT_DELTA.channels()), (64, 8192));
        assert_eq!(
            (QWEN3_VL_2B.hidden, QWEN3_VL_2B_VISION.hidden, QWEN3_VL_2B_VISION.pixels),
            (2048, 1024, 1536)
        );
        assert_eq!((GLM_4_7_FLASH.head_dim, GLM_4_7_FLASH_EXPERTS.shared), (256, 1536));
        assert_eq!(QWEN3_CODER_30B_EXPERTS.shared, 0);
    }
}
