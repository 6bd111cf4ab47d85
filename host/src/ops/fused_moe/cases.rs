//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{FusedMoe, FusedMoeArgs, FusedMoeProblem, OP};
use crate::device::Device;
use crate::error::Error;
use crate::ops::Store;
use crate::ops::matmul::RowNorm;
use crate::ops::rmsnorm::NormWeight;
use crate::published::{
    Decoder, Experts, GLM_4_7_FLASH, GLM_4_7_FLASH_EXPERTS, QWEN3_CODER_30B, QWEN3_CODER_30B_EXPERTS,
    QWEN3_CODER_NEXT, QWEN3_CODER_NEXT_EXPERTS,
};
use crate::sample::{Sample, tensor};

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct FusedMoeCase {
    /// Model and phase.
    pub name: &'static str,
    /// Tokens.
    pub tokens: usize,
    /// Experts of a token, and all.
    pub experts: [usize; 2],
    /// Elements of a row of x, and of an expert's gate.
    pub sizes: [usize; 2],
    /// Whether there is a shared expert.
    pub shared: bool,
}

const fn case(name: &'static str, tokens: usize, model: Decoder, experts: Experts) -> FusedMoeCase {
    FusedMoeCase {
        name,
        tokens,
        experts: [experts.top_k, experts.count],
        sizes: [model.hidden, experts.intermediate],
        shared: experts.shared > 0,
    }
}

/// The shapes.
pub const CASES: &[FusedMoeCase] = &[
    case("qwen3-coder-30b decode 1", 1, QWEN3_CODER_30B, QWEN3_CODER_30B_EXPERTS),
    case("qwen3-coder-30b decode 8", 8, QWEN3_CODER_30B, QWEN3_CODER_30B_EXPERTS),
    case("qwen3-coder-next decode 1", 1, QWEN3_CODER_NEXT, QWEN3_CODER_NEXT_EXPERTS),
    case("qwen3-coder-next decode 8", 8, QWEN3_CODER_NEXT, QWEN3_CODER_NEXT_EXPERTS),
    case("glm-4.7-flash decode 1", 1, GLM_4_7_FLASH, GLM_4_7_FLASH_EXPERTS),
    case("glm-4.7-flash decode 8", 8, GLM_4_7_FLASH, GLM_4_7_FLASH_EXPERTS),
];

/// A run of so many tokens, for what tries every operator.
pub fn samples(device: &Device, tokens: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let (top_k, experts, hidden, inner) = (2, 8, 64, 32);
    let norm = Some(RowNorm { eps: 1e-6, weight: NormWeight::Plain });
    let problem = FusedMoeProblem::new(tokens, [top_k, experts], [hidden, inner], dtype);
    let plan = FusedMoe::plan(device, FusedMoeProblem { shared: true, norm, store: Store::Add, ..problem })?;
    let tensors = [
        tensor("x", &[tokens, hidden], dtype),
        tensor("gain", &[hidden], dtype),
        tensor("ids", &[tokens, top_k], DType::U32),
        tensor("weights", &[tokens, top_k], DType::F32),
        tensor("gate_up", &[experts, 2 * inner, hidden], dtype),
        tensor("down", &[experts, hidden, inner], dtype),
        tensor("shared_gate_up", &[2 * inner, hidden], dtype),
        tensor("shared_down", &[hidden, inner], dtype),
        tensor("gate", &[tokens, 1], DType::F32).of_any_strides(),
        tensor("out", &[tokens, hidden], dtype),
    ];
    let sample = Sample::new(OP, tensors, move |stream, tensors| {
        let [x, gain, ids, weights, gate_up, down, shared_gate_up, shared_down, gate, out] = tensors;
        let chosen = [ids.as_view(), weights.as_view()];
        let experts = [gate_up.as_view().into(), down.as_view().into()];
        let args = FusedMoeArgs {
            x: Some(x.as_view()),
            gain: Some(gain.as_view()),
            shared_gate_up: Some(shared_gate_up.as_view().into()),
            shared_down: Some(shared_down.as_view().into()),
            gate: Some(gate.as_view()),
            ..FusedMoeArgs::new(chosen, experts, out.reborrow())
        };
        plan.run(stream, args)
    });
    Ok(vec![sample])
}
