//! Operators: one module each, all of the same form.
//!
//! `supports` says whether a device can do it; `plan` checks the problem, chooses a kernel and loads it; `run` checks
//! the tensors and enqueues the work, without allocating. A problem's sizes are upper bounds: `run` takes tensors up to
//! them. Beside each `mod.rs`: `select.rs`, the choice (pure, testable without a device); `cpu.rs`, the CPU backend;
//! `reference.rs`, the formula as plain loops, which is the specification; `cases.rs`, the shapes of tests and benches,
//! and a sample of the tensors of a run.
//!
//! # Problems and arguments grow
//! A problem or the arguments of a run may get a field; what it does is then nothing until it is set. Write
//! `..Problem::new(…)`, which takes what a problem must have, and a program goes on to compile:
//!
//! ```
//! # extern crate host as warpforge;
//! use warpforge::{DType, ops::attention::*};
//!
//! let heads = [32, 8];
//! let problem = AttentionProblem {
//!     mask: Mask::Causal,
//!     page_size: Some(64),
//!     ..AttentionProblem::new(1, [512, 4096], heads, 128, DType::BF16)
//! };
//! assert_eq!((problem.seq_q, problem.heads_kv, problem.head_dim_v), (512, 8, 128));
//! ```

/// A list of cases: those spelled out in `one`, then each layer of `phases` in all six phases, of `decode` in the four
/// of decoding, of `prefill` in the two of prompts. The constructor gets the case's name, the phase, and the arguments.
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

macro_rules! operators {
    ($($op:ident $name:literal $tables:tt;)*) => {
        $(pub mod $op;)*

        /// Runs of every operator, each over so many rows (or tokens, or queries) of a type: for what tries every
        /// operator alike.
        ///
        /// **Errors**: those of the operators' plans.
        pub fn samples(device: &Device, rows: usize, dtype: DType) -> Result<Vec<(&'static str, Vec<Sample>)>, Error> {
            Ok(vec![$(($name, $op::samples(device, rows, dtype)?)),*])
        }
    };
}
abi::for_each_operator!(operators);

pub(crate) mod fp8_rows;
pub(crate) mod packed;
pub(crate) mod parallel;
pub mod reference;
pub(crate) mod workspace;

use abi::DType;

use crate::device::Device;
use crate::error::Error;
pub(crate) use crate::plan::{check_blocks, check_size};
use crate::sample::Sample;

/// What a result does to what its tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Store {
    /// It takes its place.
    Replace,
    /// It is added to it, in f32, and the sum rounded once.
    Add,
}

#[cfg(test)]
mod tests {
    use abi::DType;

    use super::attention::{Attention, AttentionProblem, Mask, Scores};
    use super::glu::{Activation, Glu, GluProblem};
    use super::matmul::{Matmul, MatmulProblem};
    use super::transpose::{Transpose, TransposeProblem};
    use crate::device::Device;
    use crate::error::Error;

    /// Sizes that are fine one by one have products that no u64 holds.
    #[test]
    fn reports_of_huge_problems() -> Result<(), Error> {
        let (device, dtype, most) = (Device::cpu(), DType::F32, (1 << 31) - 1);
        let activation = Activation::Silu;
        let glu = Glu::plan(&device, GluProblem { rows: most, cols: most, dtype, activation })?.report();
        assert_eq!((glu.bytes, glu.flops), (u64::MAX, u64::MAX));
        let problem = TransposeProblem { batch: most, rows: most, cols: most, dtype };
        assert_eq!(Transpose::plan(&device, problem)?.report().bytes, u64::MAX);
        let problem = MatmulProblem::new(1 << 30, 1 << 30, 1, dtype);
        let matmul = Matmul::plan(&device, problem)?.report();
        assert_eq!((matmul.bytes, matmul.flops), ((1 << 62) + (1 << 33), 1 << 61));
        let problem = AttentionProblem {
            batch: 256,
            seq_q: 1 << 20,
            seq_kv: 1 << 20,
            heads_q: 128,
            heads_kv: 128,
            head_dim: 128,
            head_dim_v: 128,
            dtype: DType::BF16,
            dtype_kv: DType::BF16,
            scale: None,
            mask: Mask::None,
            window: None,
            scores: Scores::default(),
            page_size: None,
        };
        let attention = Attention::plan(&device, problem)?.report();
        assert_eq!((attention.bytes, attention.flops), (1 << 45, u64::MAX));
        let causal = Attention::plan(&device, AttentionProblem { mask: Mask::Causal, ..problem })?.report();
        assert_eq!(causal.flops, (1 << 63) + (1 << 43));
        Ok(())
    }
}
