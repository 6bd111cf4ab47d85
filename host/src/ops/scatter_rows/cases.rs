//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{OP, ScatterRows, ScatterRowsArgs, ScatterRowsProblem};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Store;
use crate::published::QWEN3_VL_2B;
use crate::sample::{Sample, tensor};

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct ScatterRowsCase {
    /// Model and phase.
    pub name: &'static str,
    /// Rows that are moved.
    pub rows: usize,
    /// Rows that they are moved among.
    pub num_rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// What becomes of what is there.
    pub store: Store,
}

const fn case(name: &'static str, rows: usize, num_rows: usize, store: Store) -> ScatterRowsCase {
    ScatterRowsCase { name, rows, num_rows, cols: QWEN3_VL_2B.hidden, store }
}

/// The shapes: features of images into the rows of a prompt.
pub const CASES: &[ScatterRowsCase] = &[
    case("qwen3-vl-2b images prefill 16384", 8192, 16384, Store::Replace),
    case("qwen3-vl-2b images prefill 2048", 1024, 2048, Store::Replace),
    case("qwen3-vl-2b deepstack prefill 16384", 8192, 16384, Store::Add),
    case("qwen3-vl-2b deepstack prefill 2048", 1024, 2048, Store::Add),
];

/// A run of so many rows, for what tries every operator.
pub fn samples(device: &Device, rows: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (cols, shape) = (64, [rows, 64]);
    let problem = ScatterRowsProblem { store: Store::Add, ..ScatterRowsProblem::new(rows, cols, dtype) };
    let plan = ScatterRows::plan(device, problem)?;
    let tensors = [
        tensor("x", &shape, dtype),
        tensor("ids", &[rows], DType::U32),
        tensor("out", &shape, dtype).or_more(),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [x, ids, out]| {
        plan.run(stream, ScatterRowsArgs::new(x.as_view(), ids.as_view(), out.reborrow()))
    });
    Ok(vec![sample])
}
