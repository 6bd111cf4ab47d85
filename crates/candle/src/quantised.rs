//! Products with quantised weights.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Module, Result, Shape, Tensor};
use host::ops::matmul as ops;
use host::weight::{Codes, Layout as Packing, Quantised, ScaleType, Scheme, Weight, WeightSource};

use crate::Refused;
use crate::operand::{Operand, Output, cpu};

/// A linear layer whose weight `[n, k]` stays quantised: `[…, k]` becomes `[…, n]`. Activations are not quantised,
/// unlike by candle's own `QMatMul`.
#[derive(Clone, Debug)]
pub struct QuantisedMatmul {
    weight: Arc<Weight>,
}

impl QuantisedMatmul {
    /// Of a tensor from a GGUF file: Q4_0, Q4_1 or Q8_0, whose codes and scales are kept.
    ///
    /// **Errors**: candle's, around a [`Refused`].
    pub fn from_qtensor(tensor: &QTensor) -> Result<Self> {
        let (n, k) = tensor.shape().dims2()?;
        let got = tensor.dtype();
        let kind = match got {
            GgmlDType::Q4_0 => Kind::Q4_0,
            GgmlDType::Q4_1 => Kind::Q4_1,
            GgmlDType::Q8_0 => Kind::Q8_0,
            _ => return Err(Refused::Ggml { got }.into()),
        };
        if !matches!(tensor.device(), candle_core::Device::Cpu) {
            return Err(Refused::Device { op: OP, device: "CUDA" }.into());
        }
        let blocks = Blocks { kind, size: [n, k], data: tensor.data()? };
        // Rows are whole blocks, as candle has checked; or the reads below would be outside.
        let expected = "rows of whole blocks";
        if !k.is_multiple_of(BLOCK) || blocks.data.len() != n * (k / BLOCK) * kind.bytes() {
            return Err(Refused::Shape { op: OP, argument: "weight", expected, got: vec![n, k] }.into());
        }
        Self::pack(&blocks)
    }

    /// Quantises a weight `[n, k]` of floats.
    ///
    /// **Errors**: candle's, around a [`Refused`]; a value that is not finite is one.
    pub fn quantise(weight: &Tensor, scheme: Scheme) -> Result<Self> {
        let (n, k) = weight.dims2()?;
        let values = weight.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let row = |row: usize, into: &mut [f32]| into.copy_from_slice(&values[row * k..][..k]);
        Self::pack(&Quantised::new([n, k], scheme, row).map_err(Refused::from)?)
    }

    fn pack(source: &dyn WeightSource) -> Result<Self> {
        let weight = cpu().and_then(|stream| Weight::pack(stream, source)).map_err(Refused::from)?;
        Ok(QuantisedMatmul { weight: Arc::new(weight) })
    }

    /// The weight, for warpforge's own operators.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    fn run(&self, x: Operand<'_>, shape: &[usize]) -> std::result::Result<Output, Refused> {
        let mut out = Output::new(OP, shape, x.dtype())?;
        let (stream, m, n) = (cpu()?, x.shape()[0], self.weight.n());
        let problem = ops::MatmulProblem {
            weight: Some(self.weight.layout()),
            ..ops::MatmulProblem::new(m, n, x.shape()[1], x.dtype())
        };
        let matmul = ops::Matmul::plan(stream.device(), problem)?;
        matmul.run(stream, ops::MatmulArgs::new(x.view()?, &*self.weight, out.view_mut(&[m, n])?))?;
        Ok(out)
    }
}

const OP: &str = "warpforge-quantised-matmul";

impl CustomOp1 for QuantisedMatmul {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = Operand::merged(OP, "x", storage, layout, 1)?;
        let (&last, lead) = layout.dims().split_last().ok_or_else(|| {
            let (argument, expected, got) = ("x", "[…, k]", Vec::new());
            candle_core::Error::from(Refused::Shape { op: OP, argument, expected, got })
        })?;
        if last != self.weight.k() {
            let (argument, got) = ("x", layout.dims().to_vec());
            return Err(
                Refused::Shape { op: OP, argument, expected: "as many columns as the weight", got }.into()
            );
        }
        Ok(self.run(x, &[lead, &[self.weight.n()]].concat())?.finish())
    }

    crate::on_the_cpu_alone!(_a);
}

impl Module for QuantisedMatmul {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.apply_op1(self.clone())
    }
}

/// Elements of a block.
const BLOCK: usize = 32;

/// A type of ggml's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A scale, then 32 codes of 4 bits around 8: the lower halves of 16 bytes, then the upper ones.
    Q4_0,
    /// The same with a minimum behind the scale, around 0.
    Q4_1,
    /// A scale, then 32 bytes with a sign.
    Q8_0,
}

impl Kind {
    /// Bytes of a block.
    fn bytes(self) -> usize {
        match self {
            Kind::Q4_0 => 18,
            Kind::Q4_1 => 20,
            Kind::Q8_0 => 34,
        }
    }
}

/// A tensor of ggml's blocks.
struct Blocks<'a> {
    kind: Kind,
    size: [usize; 2],
    data: Cow<'a, [u8]>,
}

impl Blocks<'_> {
    fn block(&self, row: usize, group: usize) -> &[u8] {
        let bytes = self.kind.bytes();
        &self.data[(row * (self.size[1] / BLOCK) + group) * bytes..][..bytes]
    }
}

impl WeightSource for Blocks<'_> {
    fn size(&self) -> [usize; 2] {
        self.size
    }

    fn layout(&self) -> Packing {
        Packing {
            codes: if self.kind == Kind::Q8_0 { Codes::Int8 } else { Codes::Int4 },
            group: BLOCK as u32,
            rows: 1,
            scale: ScaleType::F16,
            zeros: false,
            minimums: self.kind == Kind::Q4_1,
        }
    }

    fn codes(&self, row: usize, codes: &mut [u8]) {
        for (group, codes) in codes.chunks_exact_mut(BLOCK).enumerate() {
            let block = self.block(row, group);
            match self.kind {
                Kind::Q8_0 => {
                    for (code, byte) in codes.iter_mut().zip(&block[2..]) {
                        // From around 0 to around the zero point, 128.
                        *code = byte ^ 0x80;
                    }
                }
                Kind::Q4_0 | Kind::Q4_1 => {
                    let (low, high) = codes.split_at_mut(BLOCK / 2);
                    let bytes = &block[self.kind.bytes() - BLOCK / 2..];
                    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
                        (*low, *high) = (byte & 15, byte >> 4);
                    }
                }
            }
        }
    }

    fn scale(&self, row: usize, group: usize) -> u32 {
        let block = self.block(row, group);
        u16::from_le_bytes([block[0], block[1]]).into()
    }

    fn minimum(&self, row: usize, group: usize) -> u32 {
        match self.kind {
            // Ggml adds it, a layout subtracts it: the sign is the other one.
            Kind::Q4_1 => {
                let block = self.block(row, group);
                (u16::from_le_bytes([block[2], block[3]]) ^ 0x8000).into()
            }
            Kind::Q4_0 | Kind::Q8_0 => 0,
        }
    }
}
