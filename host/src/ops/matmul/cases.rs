//! Shapes that occur, for tests and benches.

use abi::DType;
use abi::ops::glu::Activation;

use super::{Act, Bias, Epilogue, Matmul, MatmulArgs, MatmulProblem, OP, Precision, Residual};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Phase;
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

/// A product for each of the heads of so many tokens.
const fn per_head(name: &'static str, heads: usize, tokens: usize, n: usize, k: usize) -> MatmulCase {
    MatmulCase { batch: heads, ..plain(name, tokens, n, k) }
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
        plain("anchor 128x16384x4096", 128, 16384, 4096),
        fused("anchor 128x16384x4096 gelu", 128, 16384, 4096, Act::Of(Activation::GeluErf)),
        fused("anchor 128x16384x4096 gelu tanh", 128, 16384, 4096, Act::Of(Activation::GeluTanh)),
        fused("anchor 128x16384x4096 silu", 128, 16384, 4096, Act::Of(Activation::Silu)),
        // As "gate+up" below, with the gate.
        fused("anchor 2048x9728x2560 swiglu", 2048, 9728, 2560, SWIGLU),
        fused("qwen3-4b swiglu decode 1", 1, 9728, 2560, SWIGLU),
        fused("qwen3-4b swiglu decode 8", 8, 9728, 2560, SWIGLU),
        fused("qwen3-4b swiglu decode 32", 32, 9728, 2560, SWIGLU),
        fused("qwen3-4b swiglu prefill 16384", 16384, 9728, 2560, SWIGLU),
        fused("qwen3-vl-2b vision fc1+gelu prefill 4096", 4096, 4096, 1024, Act::Of(Activation::GeluTanh)),
        // An image of 1024 × 1024: 4096 patches, merged to 1024 tokens.
        plain("qwen3-vl-2b vision patch prefill 4096", 4096, 1024, 1536),
        plain("qwen3-vl-2b vision qkv prefill 4096", 4096, 3072, 1024),
        plain("qwen3-vl-2b vision proj prefill 4096", 4096, 1024, 1024),
        plain("qwen3-vl-2b vision fc1 prefill 4096", 4096, 4096, 1024),
        plain("qwen3-vl-2b vision fc2 prefill 4096", 4096, 1024, 4096),
        plain("qwen3-vl-2b merger fc1 prefill 1024", 1024, 4096, 4096),
        plain("qwen3-vl-2b merger fc2 prefill 1024", 1024, 2048, 4096),
        // Latent attention: queries into the latent space, results out of it.
        per_head("glm-4.7-flash w_uk decode 1", 20, 1, 512, 192),
        per_head("glm-4.7-flash w_uk decode 8", 20, 8, 512, 192),
        per_head("glm-4.7-flash w_uk decode 32", 20, 32, 512, 192),
        per_head("glm-4.7-flash w_uk decode 128", 20, 128, 512, 192),
        per_head("glm-4.7-flash w_uv decode 1", 20, 1, 256, 512),
        per_head("glm-4.7-flash w_uv decode 8", 20, 8, 256, 512),
        per_head("glm-4.7-flash w_uv decode 32", 20, 32, 256, 512),
        per_head("glm-4.7-flash w_uv decode 128", 20, 128, 256, 512),
    ];
    phases: [
        "qwen3-0.6b qkv" => (4096, 1024),
        "qwen3-0.6b o" => (1024, 2048),
        "qwen3-0.6b gate+up" => (6144, 1024),
        "qwen3-0.6b down" => (1024, 3072),
        "qwen3-4b qkv" => (6144, 2560),
        "qwen3-4b o" => (2560, 4096),
        "qwen3-4b gate+up" => (19456, 2560),
        "qwen3-4b down" => (2560, 9728),
        "qwen3-coder-30b qkv" => (5120, 2048),
        "qwen3-coder-30b o" => (2048, 4096),
        "qwen3-coder-30b router" => (128, 2048),
        "qwen3-coder-next qkvz" => (12288, 2048),
        "qwen3-coder-next ba" => (64, 2048),
        "qwen3-coder-next qkv" => (9216, 2048),
        "qwen3-coder-next router" => (512, 2048),
        "qwen3-coder-next shared gate+up" => (1024, 2048),
        "qwen3-coder-next shared down" => (2048, 512),
        "glm-4.7-flash qkv_a" => (1344, 2048),
        "glm-4.7-flash q_b" => (5120, 768),
        "glm-4.7-flash o" => (2048, 5120),
        "glm-4.7-flash dense gate+up" => (20480, 2048),
        "glm-4.7-flash dense down" => (2048, 10240),
        "glm-4.7-flash shared gate+up" => (3072, 2048),
        "glm-4.7-flash shared down" => (2048, 1536),
        "qwen3-vl-2b qkv" => (4096, 2048),
        "qwen3-vl-2b o" => (2048, 2048),
        "qwen3-vl-2b gate+up" => (12288, 2048),
        "qwen3-vl-2b down" => (2048, 6144),
    ];
    decode: [
        "qwen3-0.6b head" => (151_936, 1024),
        "qwen3-4b head" => (151_936, 2560),
        "qwen3-coder-30b head" => (151_936, 2048),
        "glm-4.7-flash head" => (154_880, 2048),
    ];
    prefill: [
        "glm-4.7-flash kv_b" => (8960, 512),
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
    Ok(vec![sample])
}
