//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{OP, QuantizeWeight, QuantizeWeightArgs, QuantizeWeightProblem};
use crate::device::Device;
use crate::error::Error;
use crate::sample::{Sample, tensor};
use crate::weight::Scheme;

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeWeightCase {
    /// Model, projection and scheme.
    pub name: &'static str,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub k: usize,
    /// How it is quantised.
    pub scheme: Scheme,
}

const fn case(name: &'static str, rows: usize, k: usize, scheme: Scheme) -> QuantizeWeightCase {
    QuantizeWeightCase { name, rows, k, scheme }
}

/// The shapes: projections of Qwen3-4B.
pub const CASES: &[QuantizeWeightCase] = &[
    case("qwen3-4b down int4", 2560, 9728, Scheme::INT4),
    case("qwen3-4b down int8", 2560, 9728, Scheme::INT8),
    case("qwen3-4b gate fp8", 9728, 2560, Scheme::FP8),
    case("qwen3-4b gate mxfp4", 9728, 2560, Scheme::MXFP4),
];

/// A run of so many rows, for what tries every operator.
pub fn samples(device: &Device, rows: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let k = 64;
    let asymmetric = Scheme { asymmetric: true, ..Scheme::INT4 };
    let problem =
        QuantizeWeightProblem { in_turn: true, ..QuantizeWeightProblem::new(rows, k, dtype, asymmetric) };
    let [codes, scales, zeros] = problem.bytes(rows).unwrap_or_default();
    let plan = QuantizeWeight::plan(device, problem)?;
    let tensors = [
        tensor("rows", &[rows, k], dtype),
        tensor("second", &[rows, k], dtype),
        tensor("codes", &[codes], DType::I8),
        tensor("scales", &[scales], DType::I8),
        tensor("zeros", &[zeros], DType::I8),
        tensor("largest", &[1], DType::F32),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [x, second, codes, scales, zeros, largest]| {
        let args = QuantizeWeightArgs {
            rows: x.as_view(),
            second: Some(second.as_view()),
            codes: codes.reborrow(),
            scales: scales.reborrow(),
            zeros: Some(zeros.reborrow()),
            largest: largest.reborrow(),
        };
        plan.run(stream, args)
    });
    Ok(vec![sample])
}
