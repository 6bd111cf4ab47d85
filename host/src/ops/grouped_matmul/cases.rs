//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{GroupedMatmul, GroupedMatmulArgs, GroupedMatmulProblem, GroupedRows, OP};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{
    Decoder, Experts, GLM_4_7_FLASH, GLM_4_7_FLASH_EXPERTS, QWEN3_CODER_30B, QWEN3_CODER_30B_EXPERTS,
    QWEN3_CODER_NEXT, QWEN3_CODER_NEXT_EXPERTS,
};
use crate::sample::{Sample, tensor};

/// Of an expert.
enum Projection {
    GateUp,
    Down,
}

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct GroupedMatmulCase {
    /// Model, projection and phase.
    pub name: &'static str,
    /// Rows of out: tokens times experts of a token.
    pub rows: usize,
    /// Experts.
    pub experts: usize,
    /// Rows of a weight.
    pub n: usize,
    /// Columns of a weight.
    pub k: usize,
    /// Which row of x a row of out is made of.
    pub from: GroupedRows,
}

const fn case(
    name: &'static str,
    phase: Phase,
    Decoder { hidden, .. }: Decoder,
    Experts { count: experts, top_k, intermediate, .. }: Experts,
    projection: Projection,
) -> GroupedMatmulCase {
    let (n, k, from) = match projection {
        Projection::GateUp => (2 * intermediate, hidden, GroupedRows::Gathered { fan_out: top_k }),
        Projection::Down => (hidden, intermediate, GroupedRows::Sorted),
    };
    GroupedMatmulCase { name, rows: phase.tokens() * top_k, experts, n, k, from }
}

/// The shapes. Every expert has as many rows, or as near as it can be.
pub const CASES: &[GroupedMatmulCase] = cases! {
    case;
    one: [GroupedMatmulCase {
        name: "anchor 128 experts",
        rows: 32768,
        experts: 128,
        n: 1536,
        k: 2048,
        from: GroupedRows::Sorted,
    }];
    phases: [
        "qwen3-coder-30b gate up" => (QWEN3_CODER_30B, QWEN3_CODER_30B_EXPERTS, Projection::GateUp),
        "qwen3-coder-30b down" => (QWEN3_CODER_30B, QWEN3_CODER_30B_EXPERTS, Projection::Down),
        "qwen3-coder-next gate up" => (QWEN3_CODER_NEXT, QWEN3_CODER_NEXT_EXPERTS, Projection::GateUp),
        "qwen3-coder-next down" => (QWEN3_CODER_NEXT, QWEN3_CODER_NEXT_EXPERTS, Projection::Down),
        "glm-4.7-flash gate up" => (GLM_4_7_FLASH, GLM_4_7_FLASH_EXPERTS, Projection::GateUp),
        "glm-4.7-flash down" => (GLM_4_7_FLASH, GLM_4_7_FLASH_EXPERTS, Projection::Down),
    ];
    decode: [];
    prefill: [];
};

/// A run of the pairs of so many tokens, for what tries every operator.
pub fn samples(device: &Device, tokens: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (fan_out, experts, n, k) = (2, 3, 128, 128);
    let (rows, from) = (tokens * fan_out, GroupedRows::Gathered { fan_out });
    let problem = GroupedMatmulProblem { from, ..GroupedMatmulProblem::new(rows, experts, n, k, dtype) };
    let plan = GroupedMatmul::plan(device, problem)?;
    let tensors = [
        tensor("x", &[tokens, k], dtype),
        tensor("w", &[experts, n, k], dtype),
        tensor("offsets", &[experts + 1], DType::U32),
        tensor("order", &[rows], DType::U32),
        tensor("out", &[rows, n], dtype),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [x, w, offsets, order, out]| {
        let args = GroupedMatmulArgs {
            order: Some(order.as_view()),
            ..GroupedMatmulArgs::new(x.as_view(), w.as_view(), offsets.as_view(), out.reborrow())
        };
        plan.run(stream, args)
    });
    Ok(vec![sample])
}
