//! Products with quantised weights.

use std::sync::Arc;

use candle_core::cpu_backend::CpuDevice;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Module, Result, Shape, Tensor};
use host::Stream;
use host::ops::matmul as ops;
use host::weight::{Quantised, Scheme, Weight, WeightSource};
use models::{GgmlType, QuantMatrix};

use crate::Refused;
use crate::operand::{Operand, Output, Storage};
use crate::plans::{Plans, most};

/// A linear layer whose weight `[n, k]` stays quantised: `[…, k]` becomes `[…, n]`. Activations are not quantised,
/// unlike by candle's own `QMatMul`. The weight is for the device that it was made on.
#[derive(Clone, Debug)]
pub struct QuantisedMatmul {
    weight: Arc<Weight>,
}

impl QuantisedMatmul {
    /// Of a tensor from a GGUF file, for its device, whose codes and scales are kept: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
    /// Q4_K, Q5_K or Q6_K.
    ///
    /// **Errors**: candle's, around a [`Refused`].
    pub fn from_qtensor(tensor: &QTensor) -> Result<Self> {
        let (n, k) = tensor.shape().dims2()?;
        let stream = stream_of(&tensor.device())?;
        let got = tensor.dtype();
        let kind = match got {
            GgmlDType::Q4_0 => GgmlType::Q4_0,
            GgmlDType::Q4_1 => GgmlType::Q4_1,
            GgmlDType::Q5_0 => GgmlType::Q5_0,
            GgmlDType::Q5_1 => GgmlType::Q5_1,
            GgmlDType::Q8_0 => GgmlType::Q8_0,
            GgmlDType::Q4K => GgmlType::Q4K,
            GgmlDType::Q5K => GgmlType::Q5K,
            GgmlDType::Q6K => GgmlType::Q6K,
            _ => return Err(Refused::Ggml { got }.into()),
        };
        let data = tensor.data()?;
        let source = QuantMatrix::of_blocks([n, k], kind, &data).and_then(QuantMatrix::weight_source);
        let (argument, expected, got) = ("weight", "rows of whole blocks", vec![n, k]);
        Self::pack(&stream, &source.ok_or(Refused::Shape { op: OP, argument, expected, got })?)
    }

    /// Quantises a weight `[n, k]` of floats, for its device.
    ///
    /// **Errors**: candle's, around a [`Refused`]; a value that is not finite is one.
    pub fn quantise(weight: &Tensor, scheme: Scheme) -> Result<Self> {
        let (n, k) = weight.dims2()?;
        let values = weight.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let row = |row: usize, into: &mut [f32]| into.copy_from_slice(&values[row * k..][..k]);
        let stream = stream_of(weight.device())?;
        Self::pack(&stream, &Quantised::new([n, k], scheme, row).map_err(Refused::from)?)
    }

    fn pack(stream: &Stream, source: &dyn WeightSource) -> Result<Self> {
        let weight = Weight::pack(stream, source).map_err(Refused::from)?;
        Ok(QuantisedMatmul { weight: Arc::new(weight) })
    }

    /// The weight, for warpforge's own operators.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    fn run<S: Storage>(&self, x: Operand<'_, S>, shape: &[usize]) -> std::result::Result<Output<S>, Refused> {
        static PLANS: Plans<ops::MatmulProblem, ops::Matmul> = Plans::new();
        let mut out = Output::new(OP, &x, shape, x.dtype())?;
        let (stream, m, n) = (x.stream()?, x.shape()[0], self.weight.n());
        let problem = ops::MatmulProblem {
            weight: Some(self.weight.layout()),
            ..ops::MatmulProblem::new(most(m), n, x.shape()[1], x.dtype())
        };
        let matmul = PLANS.of(stream.device(), problem, ops::Matmul::plan)?;
        matmul.run(&stream, ops::MatmulArgs::new(x.view()?, &*self.weight, out.view_mut(&[m, n])?))?;
        Ok(out)
    }
}

const OP: &str = "warpforge-quantised-matmul";

/// The stream of a device of candle's.
fn stream_of(device: &Device) -> Result<Stream> {
    Ok(match device {
        Device::Cpu => CpuStorage::stream(&CpuDevice)?,
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => candle_core::CudaStorage::stream(device)?,
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => return Err(Refused::Device { op: OP, device: "CUDA" }.into()),
        Device::Metal(_) => return Err(Refused::Device { op: OP, device: "Metal" }.into()),
    })
}

impl QuantisedMatmul {
    fn forward<S: Storage>(&self, [(storage, layout)]: [(&S, &Layout); 1]) -> Result<(S, Shape)> {
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
}

impl CustomOp1 for QuantisedMatmul {
    fn name(&self) -> &'static str {
        OP
    }

    crate::forward!(s1 l1);
}

impl Module for QuantisedMatmul {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.apply_op1(self.clone())
    }
}
