//! What keys and values in fp8 are to be multiplied by.

use abi::DType;

use super::AttentionProblem;
use crate::error::Error;
use crate::plan::Check;
use crate::tensor::{TensorView, views};

/// Scales of keys and values in fp8: none is 1.
#[derive(Clone, Copy, Debug, Default)]
pub struct KvScales<'a> {
    /// `[heads_kv]` f32: what is read from k is multiplied by its head's.
    pub k: Option<TensorView<'a>>,
    /// The same for v.
    pub v: Option<TensorView<'a>>,
}

views!(KvScales { k, v });

impl KvScales<'_> {
    pub(super) fn check(&self, at: &Check<'_>, problem: &AttentionProblem) -> Result<(), Error> {
        for (argument, scale) in [("k_scale", self.k), ("v_scale", self.v)] {
            let Some(scale) = scale else { continue };
            if !problem.is_fp8() {
                return at.refuse(argument, "none, as k and v are not fp8", "a tensor");
            }
            let [] = at.elements(argument, scale, DType::F32, &[Some(problem.heads_kv)])?;
        }
        Ok(())
    }
}
