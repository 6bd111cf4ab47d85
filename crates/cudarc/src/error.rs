//! What cannot be shared.

use cudarc::driver::DriverError;
use host::{DType, Place};

/// Why memory or a stream could not be shared, or what was done with it failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudarcError {
    /// The stream or the memory is of another device.
    #[error("{what} of CUDA device {got}: expected one of {expected}")]
    OtherDevice {
        /// `stream` or `memory`.
        what: &'static str,
        /// The device of the other side.
        expected: Place,
        /// cudarc's ordinal.
        got: usize,
    },
    /// A context of one's own, in which nothing of warpforge's is valid.
    #[error("{what} of a context that is not the primary one of CUDA device {ordinal}")]
    NotPrimary {
        /// `stream` or `memory`.
        what: &'static str,
        /// cudarc's ordinal.
        ordinal: usize,
    },
    /// The shape has other elements than the memory.
    #[error("memory of {got} elements: expected those of shape {shape:?}")]
    Elements {
        /// As asked for, outermost first.
        shape: Vec<usize>,
        /// Elements of the memory.
        got: usize,
    },
    /// The tensor has elements of another type.
    #[error("a tensor of {got}: expected {expected}")]
    DType {
        /// The type that was asked for.
        expected: DType,
        /// The tensor's.
        got: DType,
    },
    /// cudarc's own, also of a call before this one: it keeps errors that it could not return until it is asked.
    #[error("cudarc: {0}")]
    Cudarc(#[from] DriverError),
    /// warpforge's own.
    #[error(transparent)]
    Warpforge(#[from] host::Error),
}
