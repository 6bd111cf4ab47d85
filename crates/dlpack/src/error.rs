//! What cannot be exchanged.

use dlpark::ffi::{DLDataType, DLDevice};
use host::Place;

/// Why a tensor could not be given or taken. It has been released then, by its deleter.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DlpackError {
    /// A tensor of a device that DLPack has no number for: a simulated card.
    #[error("DLPack has no number for {place}")]
    NoNumber {
        /// Where the tensor is.
        place: Place,
    },
    /// The memory is of a kind of device that warpforge has none of.
    #[error("a tensor on a device of DLPack's type {} (number {}): expected the CPU (1), pinned memory (3) or CUDA (2)",
        .device.device_type.0, .device.device_id)]
    UnknownDevice {
        /// As the tensor says.
        device: DLDevice,
    },
    /// The memory is of another device than the stream.
    #[error("a tensor of {tensor} for a stream of {stream}")]
    OtherDevice {
        /// Where the tensor is.
        tensor: Place,
        /// Whose stream it was to belong to.
        stream: Place,
    },
    /// Elements that are vectors.
    #[error("elements of {lanes} lanes: expected 1")]
    Lanes {
        /// Numbers of an element.
        lanes: u16,
    },
    /// Elements of a type that warpforge's tensors do not have.
    #[error(
        "elements of DLPack's type {} with {} bits: expected f32, f16, bf16, f8e4m3, i8, i32 or u32",
        .dtype.code.0, .dtype.bits
    )]
    UnknownDType {
        /// As the tensor says.
        dtype: DLDataType,
    },
    /// The first element's address is no multiple of an element's size.
    #[error("elements of {bytes} bytes at {address:#x}, which is no multiple of that")]
    Misaligned {
        /// Of the first element.
        address: u64,
        /// Of an element.
        bytes: usize,
    },
    /// The tensor has elements, and no address, or one that its byte offset takes beyond the address space.
    #[error("elements at {data:#x} with a byte offset of {byte_offset}")]
    NoData {
        /// As the tensor says.
        data: u64,
        /// As the tensor says.
        byte_offset: u64,
    },
    /// The tensor goes backwards in memory.
    #[error("a stride of {stride} in axis {axis}: expected none below 0")]
    NegativeStride {
        /// The axis, from the outermost.
        axis: usize,
        /// In elements.
        stride: i64,
    },
    /// The producer allows no writes.
    #[error("the tensor is for reading only")]
    ReadOnly,
    /// Several elements may lie at one address, so that none of them can be written.
    #[error("shape {shape:?} with strides {strides:?} may have elements at one address: it can only be read")]
    Overlapping {
        /// Sizes, outermost first.
        shape: Vec<usize>,
        /// In elements.
        strides: Vec<usize>,
    },
    /// The description does not hold together: a negative size, no shape, sizes beyond the address space.
    #[error("the tensor's description: {0}")]
    Description(#[from] dlpark::tensor::Error),
    /// Sizes that DLPack's numbers do not hold.
    #[error("the tensor's sizes: {0}")]
    Sizes(#[from] dlpark::metadata::Error),
    /// What warpforge refuses of a tensor: more than [`MAX_RANK`](host::MAX_RANK) dimensions, or elements beyond the
    /// address space.
    #[error(transparent)]
    Tensor(#[from] host::Error),
}
