//! Shapes that occur, for tests and benches.

use crate::ops::matmul::{MatmulCase, linear, plain};

/// The shapes of the product.
pub const CASES: &[MatmulCase] = cases! {
    linear;
    one: [
        plain("anchor 4096", 4096, 4096, 4096),
        plain("anchor 8192", 8192, 8192, 8192),
    ];
    phases: [
        "qwen3-0.6b qkv" => (4096, 1024),
        "qwen3-0.6b o" => (1024, 2048),
        "qwen3-0.6b gate+up" => (6144, 1024),
        "qwen3-0.6b down" => (1024, 3072),
        "qwen3-4b qkv" => (6144, 2560),
        "qwen3-4b o" => (2560, 4096),
        "qwen3-4b gate+up" => (19456, 2560),
        "qwen3-4b down" => (2560, 9728),
    ];
    decode: [];
    prefill: [];
};
