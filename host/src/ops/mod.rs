//! Operators: one module each, all of the same form.
//!
//! `supports` says whether a device can do it; `plan` checks the problem, chooses a kernel and loads it; `run` checks
//! the tensors and enqueues the work, without allocating. A problem's sizes are upper bounds: `run` takes tensors up to
//! them. Beside each `mod.rs`: `select.rs`, the choice (pure, testable without a device); `cpu.rs`, the CPU backend;
//! `reference.rs`, the formula as plain loops, which is the specification; `cases.rs`, the shapes of tests and benches.

pub mod attention;
pub mod copy;
pub mod embedding;
pub mod glu;
pub mod kv_append;
pub mod matmul;
pub mod matmul_i8;
pub mod rmsnorm;
pub mod rope;
pub mod sampling;
pub mod transpose;

pub(crate) mod parallel;
pub mod reference;

use crate::error::Error;

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
