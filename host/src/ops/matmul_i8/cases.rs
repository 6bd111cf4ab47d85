//! Shapes that occur, for tests and benches.

use crate::ops::matmul::MatmulCase;

/// The shapes of the product.
pub const CASES: &[MatmulCase] = &[
    MatmulCase { name: "anchor 4096", m: 4096, n: 4096, k: 4096 },
    MatmulCase { name: "anchor 8192", m: 8192, n: 8192, k: 8192 },
    MatmulCase { name: "qwen3-0.6b qkv decode 1", m: 1, n: 4096, k: 1024 },
    MatmulCase { name: "qwen3-0.6b gate+up decode 1", m: 1, n: 6144, k: 1024 },
    MatmulCase { name: "qwen3-0.6b down decode 1", m: 1, n: 1024, k: 3072 },
    MatmulCase { name: "qwen3-4b qkv decode 1", m: 1, n: 6144, k: 2560 },
    MatmulCase { name: "qwen3-4b gate+up decode 1", m: 1, n: 19456, k: 2560 },
    MatmulCase { name: "qwen3-4b down decode 1", m: 1, n: 2560, k: 9728 },
    MatmulCase { name: "qwen3-4b gate+up decode 8", m: 8, n: 19456, k: 2560 },
    MatmulCase { name: "qwen3-4b gate+up prefill 2048", m: 2048, n: 19456, k: 2560 },
];
