//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{
    MatmulI8, MatmulI8Args, MatmulI8Problem, OP, QuantizeRows, QuantizeRowsArgs, QuantizeRowsProblem,
};
use crate::device::Device;
use crate::error::Error;
use crate::ops::matmul::{Bias, MatmulCase, linear, plain};
use crate::published::{QWEN3_0_6B, QWEN3_4B};
use crate::sample::{Sample, tensor};

/// The shapes of the product.
pub const CASES: &[MatmulCase] = cases! {
    linear;
    one: [
        plain("anchor 4096", 4096, 4096, 4096),
        plain("anchor 8192", 8192, 8192, 8192),
        plain("anchor 128x4096x4096", 128, 4096, 4096),
        plain("anchor 128x16384x4096", 128, 16384, 4096),
    ];
    phases: [
        "qwen3-0.6b qkv" => (QWEN3_0_6B.qkv(), QWEN3_0_6B.hidden),
        "qwen3-0.6b o" => (QWEN3_0_6B.hidden, QWEN3_0_6B.q()),
        "qwen3-0.6b gate+up" => (2 * QWEN3_0_6B.intermediate, QWEN3_0_6B.hidden),
        "qwen3-0.6b down" => (QWEN3_0_6B.hidden, QWEN3_0_6B.intermediate),
        "qwen3-4b qkv" => (QWEN3_4B.qkv(), QWEN3_4B.hidden),
        "qwen3-4b o" => (QWEN3_4B.hidden, QWEN3_4B.q()),
        "qwen3-4b gate+up" => (2 * QWEN3_4B.intermediate, QWEN3_4B.hidden),
        "qwen3-4b down" => (QWEN3_4B.hidden, QWEN3_4B.intermediate),
    ];
    decode: [];
    prefill: [];
};

/// Runs of so many rows, for what tries every operator: a product, and the quantisation of its operand.
pub fn samples(device: &Device, m: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (n, k) = (256, 128);
    let problem = MatmulI8Problem { bias: Bias::PerColumn, ..MatmulI8Problem::new(m, n, k, dtype) };
    let plan = MatmulI8::plan(device, problem)?;
    let tensors = [
        tensor("qa", &[m, k], DType::I8),
        tensor("qb", &[n, k], DType::I8),
        tensor("a_scale", &[m], DType::F32),
        tensor("b_scale", &[n], DType::F32),
        tensor("bias", &[n], dtype),
        tensor("out", &[m, n], dtype),
    ];
    let product = Sample::new(OP, tensors, move |stream, [qa, qb, a_scale, b_scale, bias, out]| {
        let (a_scale, b_scale) = (a_scale.as_view(), b_scale.as_view());
        let args = MatmulI8Args {
            bias: Some(bias.as_view()),
            ..MatmulI8Args::new(qa.as_view(), qb.as_view(), a_scale, b_scale, out.reborrow())
        };
        plan.run(stream, args)
    });
    let plan = QuantizeRows::plan(device, QuantizeRowsProblem::new(m, k, dtype))?;
    let tensors =
        [tensor("x", &[m, k], dtype), tensor("q", &[m, k], DType::I8), tensor("scale", &[m], DType::F32)];
    let quantisation = Sample::new("quantize_rows", tensors, move |stream, [x, q, scale]| {
        plan.run(stream, QuantizeRowsArgs::new(x.as_view(), q.reborrow(), scale.reborrow()))
    });
    Ok(vec![product, quantisation])
}
