//! Shapes that occur, for tests and benches.

use abi::DType;
use abi::ops::glu::Activation;

use super::{
    Act, Bias, Epilogue, Matmul, MatmulArgs, MatmulProblem, OP, PermuteColumns, PermuteColumnsArgs,
    PermuteColumnsProblem, Precision, Residual,
};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
use crate::published::{
    GLM_4_7_FLASH as GLM, GLM_4_7_FLASH_EXPERTS as GLM_EXPERTS, GLM_4_7_FLASH_LATENT as LATENT, QWEN3_0_6B,
    QWEN3_4B, QWEN3_CODER_30B, QWEN3_CODER_30B_EXPERTS, QWEN3_CODER_NEXT as NEXT,
    QWEN3_CODER_NEXT_DELTA as DELTA, QWEN3_CODER_NEXT_EXPERTS as NEXT_EXPERTS, QWEN3_VL_2B,
    QWEN3_VL_2B_VISION as VISION,
};
use crate::sample::{Sample, tensor};

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct MatmulCase {
    /// Model, layer and phase.
    pub name: &'static str,
    /// Products.
    pub batch: usize,
    /// Rows of a: tokens.
    pub m: usize,
    /// Columns of out: output features.
    pub n: usize,
    /// Columns of both: input features.
    pub k: usize,
    /// The activation, or gate.
    pub act: Act,
    /// Type of all tensors.
    pub dtype: DType,
    /// What f32 may lose.
    pub precision: Precision,
}

/// One product as it is.
pub(crate) const fn plain(name: &'static str, m: usize, n: usize, k: usize) -> MatmulCase {
    MatmulCase { name, batch: 1, m, n, k, act: Act::None, dtype: DType::BF16, precision: Precision::Full }
}

const fn fused(name: &'static str, m: usize, n: usize, k: usize, act: Act) -> MatmulCase {
    MatmulCase { act, ..plain(name, m, n, k) }
}

/// A square one of f32.
const fn f32(name: &'static str, size: usize, precision: Precision) -> MatmulCase {
    MatmulCase { dtype: DType::F32, precision, ..plain(name, size, size, size) }
}

const SWIGLU: Act = Act::Gated(Activation::Silu);

/// A product for each of the latent heads of so many tokens.
const fn per_head(name: &'static str, tokens: usize, n: usize, k: usize) -> MatmulCase {
    MatmulCase { batch: LATENT.heads, ..plain(name, tokens, n, k) }
}

/// A linear layer of n output and k input features.
pub(crate) const fn linear(name: &'static str, phase: Phase, n: usize, k: usize) -> MatmulCase {
    plain(name, phase.tokens(), n, k)
}

/// The shapes. Layers that share their input are stacked; a shape that several models have stands once, under the
/// first. The head runs for the last token of a prompt only.
pub const CASES: &[MatmulCase] = cases! {
    linear;
    one: [
        plain("anchor 8192", 8192, 8192, 8192),
        plain("anchor 4096", 4096, 4096, 4096),
        f32("anchor 4096 f32", 4096, Precision::Full),
        f32("anchor 4096 tf32", 4096, Precision::Tf32),
        f32("anchor 8192 tf32", 8192, Precision::Tf32),
        plain("anchor 2048x19456x2560", 2048, 19456, 2560),
        plain("anchor 4096x4096x2560", 4096, 4096, 2560),
        plain("anchor 2048x1536x2048", 2048, 1536, 2048),
        plain("anchor 1x4096x4096", 1, 4096, 4096),
        plain("anchor 16x4096x4096", 16, 4096, 4096),
        plain("anchor 64x4096x4096", 64, 4096, 4096),
        plain("anchor 1x19456x2560", 1, 19456, 2560),
        // Beside int8 and packed weights of these sizes.
        plain("anchor 128x4096x4096", 128, 4096, 4096),
        plain("anchor 1x28672x8192", 1, 28672, 8192),
        plain("anchor 16x28672x8192", 16, 28672, 8192),
        plain("anchor 64x28672x8192", 64, 28672, 8192),
        plain("anchor 4096x28672x8192", 4096, 28672, 8192),
        plain("anchor 128x16384x4096", 128, 16384, 4096),
        fused("anchor 128x16384x4096 gelu", 128, 16384, 4096, Act::Of(Activation::GeluErf)),
        fused("anchor 128x16384x4096 gelu tanh", 128, 16384, 4096, Act::Of(Activation::GeluTanh)),
        fused("anchor 128x16384x4096 silu", 128, 16384, 4096, Act::Of(Activation::Silu)),
        // As "gate+up" below, with the gate.
        fused("anchor 2048x9728x2560 swiglu", 2048, 9728, 2560, SWIGLU),
        fused("qwen3-4b swiglu decode 1", 1, QWEN3_4B.intermediate, QWEN3_4B.hidden, SWIGLU),
        fused("qwen3-4b swiglu decode 8", 8, QWEN3_4B.intermediate, QWEN3_4B.hidden, SWIGLU),
        fused("qwen3-4b swiglu decode 32", 32, QWEN3_4B.intermediate, QWEN3_4B.hidden, SWIGLU),
        fused("qwen3-4b swiglu prefill 16384", 16384, QWEN3_4B.intermediate, QWEN3_4B.hidden, SWIGLU),
        fused("qwen3-vl-2b vision fc1+gelu prefill 4096", 4096, VISION.intermediate, VISION.hidden, Act::Of(Activation::GeluTanh)),
        // An image of 1024 × 1024: 4096 patches, merged to 1024 tokens.
        plain("qwen3-vl-2b vision patch prefill 4096", 4096, VISION.hidden, VISION.pixels),
        plain("qwen3-vl-2b vision qkv prefill 4096", 4096, 3 * VISION.hidden, VISION.hidden),
        plain("qwen3-vl-2b vision proj prefill 4096", 4096, VISION.hidden, VISION.hidden),
        plain("qwen3-vl-2b vision fc1 prefill 4096", 4096, VISION.intermediate, VISION.hidden),
        plain("qwen3-vl-2b vision fc2 prefill 4096", 4096, VISION.hidden, VISION.intermediate),
        plain("qwen3-vl-2b merger fc1 prefill 1024", 1024, VISION.merged, VISION.merged),
        plain("qwen3-vl-2b merger fc2 prefill 1024", 1024, VISION.out, VISION.merged),
        // Latent attention: queries into the latent space, results out of it.
        per_head("glm-4.7-flash w_uk decode 1", 1, LATENT.kv_rank, LATENT.nope),
        per_head("glm-4.7-flash w_uk decode 8", 8, LATENT.kv_rank, LATENT.nope),
        per_head("glm-4.7-flash w_uk decode 32", 32, LATENT.kv_rank, LATENT.nope),
        per_head("glm-4.7-flash w_uk decode 128", 128, LATENT.kv_rank, LATENT.nope),
        per_head("glm-4.7-flash w_uv decode 1", 1, LATENT.v, LATENT.kv_rank),
        per_head("glm-4.7-flash w_uv decode 8", 8, LATENT.v, LATENT.kv_rank),
        per_head("glm-4.7-flash w_uv decode 32", 32, LATENT.v, LATENT.kv_rank),
        per_head("glm-4.7-flash w_uv decode 128", 128, LATENT.v, LATENT.kv_rank),
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
        "qwen3-coder-30b qkv" => (QWEN3_CODER_30B.qkv(), QWEN3_CODER_30B.hidden),
        "qwen3-coder-30b o" => (QWEN3_CODER_30B.hidden, QWEN3_CODER_30B.q()),
        "qwen3-coder-30b router" => (QWEN3_CODER_30B_EXPERTS.count, QWEN3_CODER_30B.hidden),
        "qwen3-coder-next qkvz" => (DELTA.channels() + DELTA.v(), NEXT.hidden),
        "qwen3-coder-next ba" => (2 * DELTA.heads.1, NEXT.hidden),
        "qwen3-coder-next qkv" => (NEXT.q() + NEXT.qkv(), NEXT.hidden),
        "qwen3-coder-next router" => (NEXT_EXPERTS.count, NEXT.hidden),
        "qwen3-coder-next shared gate+up" => (2 * NEXT_EXPERTS.shared, NEXT.hidden),
        "qwen3-coder-next shared down" => (NEXT.hidden, NEXT_EXPERTS.shared),
        "glm-4.7-flash qkv_a" => (LATENT.q_rank + LATENT.kv_rank + LATENT.rope, GLM.hidden),
        "glm-4.7-flash q_b" => (GLM.q(), LATENT.q_rank),
        "glm-4.7-flash o" => (GLM.hidden, LATENT.heads * LATENT.v),
        "glm-4.7-flash dense gate+up" => (2 * GLM.intermediate, GLM.hidden),
        "glm-4.7-flash dense down" => (GLM.hidden, GLM.intermediate),
        "glm-4.7-flash shared gate+up" => (2 * GLM_EXPERTS.shared, GLM.hidden),
        "glm-4.7-flash shared down" => (GLM.hidden, GLM_EXPERTS.shared),
        "qwen3-vl-2b qkv" => (QWEN3_VL_2B.qkv(), QWEN3_VL_2B.hidden),
        "qwen3-vl-2b o" => (QWEN3_VL_2B.hidden, QWEN3_VL_2B.q()),
        "qwen3-vl-2b gate+up" => (2 * QWEN3_VL_2B.intermediate, QWEN3_VL_2B.hidden),
        "qwen3-vl-2b down" => (QWEN3_VL_2B.hidden, QWEN3_VL_2B.intermediate),
    ];
    decode: [
        "qwen3-0.6b head" => (QWEN3_0_6B.vocab, QWEN3_0_6B.hidden),
        "qwen3-4b head" => (QWEN3_4B.vocab, QWEN3_4B.hidden),
        "qwen3-coder-30b head" => (QWEN3_CODER_30B.vocab, QWEN3_CODER_30B.hidden),
        "glm-4.7-flash head" => (GLM.vocab, GLM.hidden),
    ];
    prefill: [
        "glm-4.7-flash kv_b" => (LATENT.heads * (LATENT.nope + LATENT.v), LATENT.kv_rank),
    ];
};

/// A run of so many rows, for what tries every operator.
pub fn samples(device: &Device, m: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (n, k) = (256, 128);
    let epilogue = Epilogue { residual: true, ..Epilogue::default() };
    let problem = MatmulProblem { bias: Bias::PerColumn, epilogue, ..MatmulProblem::new(m, n, k, dtype) };
    let plan = Matmul::plan(device, problem)?;
    let tensors = [
        tensor("a", &[m, k], dtype),
        tensor("b", &[n, k], dtype),
        tensor("bias", &[n], dtype),
        tensor("residual", &[m, n], dtype),
        tensor("out", &[m, n], dtype),
    ];
    let sample = Sample::new(OP, tensors, move |stream, [a, b, bias, residual, out]| {
        let args = MatmulArgs {
            bias: Some(bias.as_view()),
            residual: Some(Residual::Tensor(residual.as_view())),
            ..MatmulArgs::new(a.as_view(), b.as_view(), out.reborrow())
        };
        plan.run(stream, args)
    });
    let plan = PermuteColumns::plan(device, PermuteColumnsProblem::new(m, k, dtype))?;
    let tensors =
        [tensor("x", &[m, k], dtype), tensor("order", &[k], DType::U32), tensor("out", &[m, k], dtype)];
    let permutation = Sample::new("permute_columns", tensors, move |stream, [x, order, out]| {
        plan.run(stream, PermuteColumnsArgs::new(x.as_view(), order.as_view(), out.reborrow()))
    });
    Ok(vec![sample, permutation])
}
