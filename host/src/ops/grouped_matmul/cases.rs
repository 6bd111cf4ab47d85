//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{GroupedMatmul, GroupedMatmulArgs, GroupedMatmulProblem, GroupedRows, OP};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
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
    (experts, top_k): (usize, usize),
    n: usize,
    k: usize,
    projection: Projection,
) -> GroupedMatmulCase {
    let from = match projection {
        Projection::GateUp => GroupedRows::Gathered { fan_out: top_k },
        Projection::Down => GroupedRows::Sorted,
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
        "qwen3-coder-30b gate up" => ((128, 8), 1536, 2048, Projection::GateUp),
        "qwen3-coder-30b down" => ((128, 8), 2048, 768, Projection::Down),
        "qwen3-coder-next gate up" => ((512, 10), 1024, 2048, Projection::GateUp),
        "qwen3-coder-next down" => ((512, 10), 2048, 512, Projection::Down),
        "glm-4.7-flash gate up" => ((64, 4), 3072, 2048, Projection::GateUp),
        "glm-4.7-flash down" => ((64, 4), 2048, 1536, Projection::Down),
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
