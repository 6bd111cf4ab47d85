//! Operators: one module each, all of the same form.
//!
//! `supports` says whether a device can do it; `plan` checks the problem, chooses a kernel and loads it; `run` checks
//! the tensors and enqueues the work, without allocating. A problem's sizes are upper bounds: `run` takes tensors up to
//! them. Beside each `mod.rs`: `select.rs`, the choice (pure, testable without a device); `cpu.rs`, the CPU backend;
//! `reference.rs`, the formula as plain loops, which is the specification; `cases.rs`, the shapes of tests and benches.

/// A list of cases: those spelled out in `one`, then each layer of `phases` in all six phases, of `decode` in the four of
/// decoding, of `prefill` in the two of prompts. The constructor gets the case's name, the phase, and the arguments.
macro_rules! cases {
    (
        $case:path;
        one: [$($one:expr),* $(,)?];
        phases: [$($all:literal => ($($all_arg:expr),*)),* $(,)?];
        decode: [$($decode:literal => ($($decode_arg:expr),*)),* $(,)?];
        prefill: [$($prefill:literal => ($($prefill_arg:expr),*)),* $(,)?];
    ) => {
        &[
            $($one,)*
            $(
                $case(concat!($all, " prefill 2048"), $crate::ops::Phase::Prefill(2048), $($all_arg),*),
                $case(concat!($all, " prefill 16384"), $crate::ops::Phase::Prefill(16384), $($all_arg),*),
                $case(concat!($all, " decode 1"), $crate::ops::Phase::Decode(1), $($all_arg),*),
                $case(concat!($all, " decode 8"), $crate::ops::Phase::Decode(8), $($all_arg),*),
                $case(concat!($all, " decode 32"), $crate::ops::Phase::Decode(32), $($all_arg),*),
                $case(concat!($all, " decode 128"), $crate::ops::Phase::Decode(128), $($all_arg),*),
            )*
            $(
                $case(concat!($decode, " decode 1"), $crate::ops::Phase::Decode(1), $($decode_arg),*),
                $case(concat!($decode, " decode 8"), $crate::ops::Phase::Decode(8), $($decode_arg),*),
                $case(concat!($decode, " decode 32"), $crate::ops::Phase::Decode(32), $($decode_arg),*),
                $case(concat!($decode, " decode 128"), $crate::ops::Phase::Decode(128), $($decode_arg),*),
            )*
            $(
                $case(concat!($prefill, " prefill 2048"), $crate::ops::Phase::Prefill(2048), $($prefill_arg),*),
                $case(concat!($prefill, " prefill 16384"), $crate::ops::Phase::Prefill(16384), $($prefill_arg),*),
            )*
        ]
    };
}

/// What a model does in a case.
#[derive(Clone, Copy)]
pub(crate) enum Phase {
    /// Reads a prompt of so many tokens, of one sequence.
    Prefill(usize),
    /// Writes a token of each of so many sequences.
    Decode(usize),
}

impl Phase {
    /// Tokens that pass through the model at once.
    const fn tokens(self) -> usize {
        match self {
            Phase::Prefill(tokens) | Phase::Decode(tokens) => tokens,
        }
    }
}

pub mod attention;
pub mod causal_conv1d;
pub mod copy;
pub mod embedding;
pub mod embedding_bag;
pub mod gated_delta;
pub mod glu;
pub mod grouped_matmul;
pub mod kv_append;
pub mod layernorm;
pub mod matmul;
pub mod matmul_i8;
pub mod moe_combine;
pub mod moe_permute;
pub mod moe_router;
pub mod qk_norm_rope;
pub mod rmsnorm;
pub mod rope;
pub mod sampling;
pub mod scatter_rows;
pub mod transpose;

pub(crate) mod packed;
pub(crate) mod parallel;
pub mod reference;
pub(crate) mod workspace;

use crate::error::Error;

/// What a result does to what its tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Store {
    /// It takes its place.
    Replace,
    /// It is added to it, in f32, and the sum rounded once.
    Add,
}

/// A size or stride as the kernels take it: below 2^31.
pub(crate) fn check_size(
    op: &'static str,
    argument: &'static str,
    what: &'static str,
    value: usize,
) -> Result<u32, Error> {
    if value < 1 << 31 {
        Ok(value as u32)
    } else {
        Err(Error::invalid(op, argument, format!("{what} below 2^31"), value.to_string()))
    }
}

/// The blocks of a one-dimensional grid: a card takes fewer than 2^31.
pub(crate) fn check_blocks(op: &'static str, argument: &'static str, blocks: u64) -> Result<u32, Error> {
    if blocks < 1 << 31 {
        Ok(blocks as u32)
    } else {
        Err(Error::invalid(op, argument, "a tensor that takes fewer than 2^31 blocks", blocks.to_string()))
    }
}
