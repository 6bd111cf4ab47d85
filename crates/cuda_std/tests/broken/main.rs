//! Kernels with one defect each, which the simulator must catch, beside their repaired forms, which must pass.
//!
//! A kernel takes its [`Form`](harness::Form): the branch on it is the defect, and all that differs between the two. In
//! the kernel's text comments mark lines: one marked `reported` is blamed by the report, one marked `named` is in its
//! text, and one marked `cause` is either.
//!
//! Most of the defects are from reports about published code; their doc comments say which.
#![allow(
    unsafe_op_in_unsafe_fn,
    clippy::undocumented_unsafe_blocks,
    reason = "in a simulation every access is checked, and these kernels break their promises on purpose"
)]

mod alignment;
mod bounds;
mod bulk;
mod clusters;
mod copies;
mod divergence;
mod harness;
mod limits;
mod mbarriers;
mod order;
mod peers;
mod races;
mod tensors;
mod uninitialised;
mod waits;
mod wgmma;
