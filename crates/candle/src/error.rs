//! What an operator does not take.

use candle_core::quantized::GgmlDType;

/// Why an operator has not run. Candle's error carries it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// A tensor on Metal, or on CUDA without the feature `cuda`.
    #[error(
        "{op} takes no tensors on {device} as it is built: bring them to the CPU by `to_device(&Device::Cpu)`"
    )]
    Device {
        /// The operator.
        op: &'static str,
        /// Where the tensor is.
        device: &'static str,
    },
    /// A device of candle's that has a default stream, which may be another one in each thread.
    #[error("candle's device is in a default stream: make it by `Device::new_cuda_with_stream`")]
    DefaultStream,
    /// Elements of a type that the operator does not have.
    #[error("{op}: {argument}: expected {expected}, got {got:?}")]
    DType {
        /// The operator.
        op: &'static str,
        /// The tensor's name.
        argument: &'static str,
        /// The types that it may have.
        expected: &'static str,
        /// The type that it has.
        got: candle_core::DType,
    },
    /// A tensor of another shape than is wanted.
    #[error("{op}: {argument}: expected {expected}, got {got:?}")]
    Shape {
        /// The operator.
        op: &'static str,
        /// The tensor's name.
        argument: &'static str,
        /// What it may be.
        expected: &'static str,
        /// What it is.
        got: Vec<usize>,
    },
    /// A layout that reaches beyond its storage.
    #[error("{op}: {argument}: its layout reaches beyond its {len} elements")]
    Layout {
        /// The operator.
        op: &'static str,
        /// The tensor's name.
        argument: &'static str,
        /// Elements of the storage.
        len: usize,
    },
    /// A quantised tensor of a type that is not read.
    #[error("quantised matmul of {got:?}: expected Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K")]
    Ggml {
        /// The type that it has.
        got: GgmlDType,
    },
    /// What warpforge says.
    #[error(transparent)]
    Host(#[from] host::Error),
    /// What cannot be shared with cudarc.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cudarc(#[from] warpforge_cudarc::CudarcError),
    /// What candle says.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl From<Refused> for candle_core::Error {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Candle(error) => error,
            Refused::Device { device: "CUDA", .. } => candle_core::Error::Cuda(Box::new(refused)),
            other => candle_core::Error::wrap(other),
        }
    }
}
