//! Shapes that occur, for tests and benches.

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct MatmulCase {
    /// Model, layer and phase.
    pub name: &'static str,
    /// Rows of a: tokens.
    pub m: usize,
    /// Rows of b: output features.
    pub n: usize,
    /// Columns of both: input features.
    pub k: usize,
}

/// The shapes.
pub const CASES: &[MatmulCase] = &[
    MatmulCase { name: "anchor 8192", m: 8192, n: 8192, k: 8192 },
    MatmulCase { name: "anchor 4096", m: 4096, n: 4096, k: 4096 },
    MatmulCase { name: "anchor 2048x19456x2560", m: 2048, n: 19456, k: 2560 },
    MatmulCase { name: "anchor 4096x4096x2560", m: 4096, n: 4096, k: 2560 },
    MatmulCase { name: "anchor 2048x1536x2048", m: 2048, n: 1536, k: 2048 },
    MatmulCase { name: "anchor 1x4096x4096", m: 1, n: 4096, k: 4096 },
    MatmulCase { name: "anchor 16x4096x4096", m: 16, n: 4096, k: 4096 },
    MatmulCase { name: "anchor 64x4096x4096", m: 64, n: 4096, k: 4096 },
    MatmulCase { name: "anchor 1x19456x2560", m: 1, n: 19456, k: 2560 },
    MatmulCase { name: "anchor 128x16384x4096", m: 128, n: 16384, k: 4096 },
    MatmulCase { name: "qwen3-0.6b qkv decode 1", m: 1, n: 4096, k: 1024 },
    MatmulCase { name: "qwen3-0.6b o decode 1", m: 1, n: 1024, k: 2048 },
    MatmulCase { name: "qwen3-0.6b gate+up decode 1", m: 1, n: 6144, k: 1024 },
    MatmulCase { name: "qwen3-0.6b down decode 1", m: 1, n: 1024, k: 3072 },
    MatmulCase { name: "qwen3-0.6b head decode 1", m: 1, n: 151_936, k: 1024 },
    MatmulCase { name: "qwen3-0.6b qkv decode 8", m: 8, n: 4096, k: 1024 },
    MatmulCase { name: "qwen3-0.6b gate+up decode 32", m: 32, n: 6144, k: 1024 },
    MatmulCase { name: "qwen3-0.6b gate+up prefill 2048", m: 2048, n: 6144, k: 1024 },
    MatmulCase { name: "qwen3-0.6b down prefill 2048", m: 2048, n: 1024, k: 3072 },
    MatmulCase { name: "qwen3-4b qkv decode 1", m: 1, n: 6144, k: 2560 },
    MatmulCase { name: "qwen3-4b o decode 1", m: 1, n: 2560, k: 4096 },
    MatmulCase { name: "qwen3-4b gate+up decode 1", m: 1, n: 19456, k: 2560 },
    MatmulCase { name: "qwen3-4b down decode 1", m: 1, n: 2560, k: 9728 },
    MatmulCase { name: "qwen3-4b head decode 1", m: 1, n: 151_936, k: 2560 },
    MatmulCase { name: "qwen3-4b down prefill 2048", m: 2048, n: 2560, k: 9728 },
];
