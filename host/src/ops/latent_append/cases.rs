//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{LatentAppend, LatentAppendArgs, LatentAppendProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::ops::rope::{RopeInput, RopeTables};
use crate::published::{GLM_4_7_FLASH_LATENT, Latent};
use crate::sample::{Sample, tensor};

/// One shape; pairs are neighbours.
#[derive(Clone, Copy, Debug)]
pub struct LatentAppendCase {
    /// Model and phase.
    pub name: &'static str,
    /// New tokens.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Elements of a row that are normalised.
    pub latent: usize,
    /// Elements of a row, and of a head, that are rotated.
    pub rope: usize,
}

const fn case(name: &'static str, phase: Phase, model: Latent) -> LatentAppendCase {
    let Latent { heads, kv_rank: latent, rope, .. } = model;
    LatentAppendCase { name, tokens: phase.tokens(), heads, latent, rope }
}

/// The shapes.
pub const CASES: &[LatentAppendCase] = cases! {
    case;
    one: [];
    phases: ["glm-4.7-flash" => (GLM_4_7_FLASH_LATENT)];
    decode: [];
    prefill: [];
};

/// A run of so many tokens, for what tries every operator.
pub fn samples(device: &Device, tokens: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (heads, latent, rope) = (2, 64, 32);
    let plan =
        LatentAppend::plan(device, LatentAppendProblem::new(tokens, heads, [latent, rope], dtype, 1e-6))?;
    let tables = RopeTables::new(&device.stream()?, &[1.0; 16], 1.0, 16)?;
    let (queries, rows) = ([tokens, heads, rope], [tokens, latent + rope]);
    let tensors = [
        tensor("q", &queries, dtype),
        tensor("x", &rows, dtype),
        tensor("weight", &[latent], dtype),
        tensor("positions", &[tokens], DType::U32).of_any_strides(),
        tensor("slots", &[tokens], DType::U32),
        tensor("q_out", &queries, dtype),
        tensor("cache", &rows, dtype).or_more(),
    ];
    let sample = Sample::new(OP, tensors, move |stream, tensors| {
        let [q, x, weight, positions, slots, q_out, cache] = tensors;
        let args = LatentAppendArgs::new(
            RopeInput::From(q.as_view()),
            [x.as_view(), weight.as_view()],
            positions.as_view(),
            &tables,
            slots.as_view(),
            q_out.reborrow(),
            cache.reborrow(),
        );
        plan.run(stream, args)
    });
    Ok(vec![sample])
}
