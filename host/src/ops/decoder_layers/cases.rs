//! Shapes that occur, for tests and benches.

use abi::DType;

use super::{DecoderLayers, DecoderLayersArgs, DecoderLayersProblem, LayerTensors, OP};
use crate::device::Device;
use crate::error::Error;
use crate::ops::rope::RopeTables;
use crate::sample::{Sample, tensor};

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct DecoderLayersCase {
    /// Model and phase.
    pub name: &'static str,
    /// Layers.
    pub layers: usize,
    /// Columns of the residual, and between the MLP's products.
    pub sizes: [usize; 2],
    /// Query and key heads.
    pub heads: [usize; 2],
    /// Keys.
    pub keys: usize,
}

const fn case(name: &'static str, layers: usize, sizes: [usize; 2], heads: [usize; 2]) -> DecoderLayersCase {
    DecoderLayersCase { name, layers, sizes, heads, keys: 2048 }
}

/// The shapes.
pub const CASES: &[DecoderLayersCase] = &[
    case("qwen3-0.6b decode 1", 28, [1024, 3072], [16, 8]),
    case("qwen3-4b decode 1", 36, [2560, 9728], [32, 8]),
    case("qwen3-vl-2b decode 1", 28, [2048, 6144], [16, 8]),
];

/// A run, for what tries every operator: of the one type and the one token that there are, where a device has it.
pub fn samples(device: &Device, tokens: usize, dtype: DType) -> Result<Vec<Sample>, Error> {
    let problem = DecoderLayersProblem::new(1, [64, 32], [2, 1], 16, DType::BF16, 1e-6);
    if tokens == 0 || dtype != DType::BF16 {
        return Ok(Vec::new());
    }
    let plan = match DecoderLayers::plan(device, problem) {
        // It is of one floor alone.
        Err(Error::Unsupported { .. }) => return Ok(Vec::new()),
        plan => plan?,
    };
    let tables = RopeTables::new(&device.stream()?, &[1.0; 64], 1.0, 16)?;
    let tensors = [
        tensor("x", &[1, 64], dtype),
        tensor("qkv", &[4 * 128, 64], dtype),
        tensor("o", &[64, 2 * 128], dtype),
        tensor("gate_up", &[64, 64], dtype),
        tensor("down", &[64, 32], dtype),
        tensor("input_norm", &[64], dtype),
        tensor("post_attention_norm", &[64], dtype),
        tensor("k_cache", &[16, 1, 128], dtype),
        tensor("v_cache", &[16, 1, 128], dtype),
        tensor("positions", &[1], DType::U32),
        tensor("slots", &[1], DType::U32),
        tensor("lens", &[1], DType::U32),
        tensor("out", &[1, 64], dtype),
    ];
    let sample = Sample::new(OP, tensors, move |stream, tensors| {
        let [x, qkv, o, gate_up, down, input_norm, post_norm, k_cache, v_cache, positions, slots, lens, out] =
            tensors;
        let layer = LayerTensors {
            qkv: qkv.as_view(),
            o: o.as_view(),
            gate_up: gate_up.as_view(),
            down: down.as_view(),
            input_norm: input_norm.as_view(),
            post_attention_norm: post_norm.as_view(),
            q_norm: None,
            k_norm: None,
            k_cache: k_cache.reborrow(),
            v_cache: v_cache.reborrow(),
        };
        let (layers, numbers) = (&mut [layer], [positions.as_view(), slots.as_view(), lens.as_view()]);
        let args = DecoderLayersArgs::new(x.as_view(), layers, numbers, &tables, out.reborrow());
        plan.run(stream, args)
    });
    Ok(vec![sample])
}
