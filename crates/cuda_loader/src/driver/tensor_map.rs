//! Tensor maps: the descriptors by which Hopper's TMA unit addresses a tensor.

use std::ffi::c_int;

use super::sys::CUdeviceptr;

use super::ffi;
use crate::error::{DriverError, check};

/// The driver's `CUtensorMap`: opaque, and 64-byte aligned wherever the device reads it.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap(pub [u64; 16]);

/// Type of an element. 8-bit floating-point and signed types travel as [`U8`](Self::U8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum TensorMapDataType {
    U8 = 0,
    U16 = 1,
    U32 = 2,
    I32 = 3,
    U64 = 4,
    I64 = 5,
    F16 = 6,
    F32 = 7,
    F64 = 8,
    Bf16 = 9,
    /// `f32` with subnormals read as zero.
    F32Ftz = 10,
    /// `f32` rounded to TF32.
    Tf32 = 11,
    /// Both.
    Tf32Ftz = 12,
}

/// Interleaved channel layouts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TensorMapInterleave {
    /// Plain strides.
    #[default]
    None = 0,
    /// Slices of 16 bytes.
    Bytes16 = 1,
    /// Slices of 32 bytes.
    Bytes32 = 2,
}

/// How 16-byte chunks are permuted in shared memory. The inner extent of the box must fit the width.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TensorMapSwizzle {
    /// Not at all.
    #[default]
    None = 0,
    /// Within 32 bytes.
    Bytes32 = 1,
    /// Within 64 bytes.
    Bytes64 = 2,
    /// Within 128 bytes.
    Bytes128 = 3,
}

/// To what an access that misses in L2 is widened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TensorMapL2Promotion {
    /// Not at all.
    #[default]
    None = 0,
    /// 64 bytes.
    Bytes64 = 1,
    /// 128 bytes.
    Bytes128 = 2,
    /// 256 bytes.
    Bytes256 = 3,
}

/// What reads outside the tensor give.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TensorMapOobFill {
    /// Zeros.
    #[default]
    Zeros = 0,
    /// A special NaN, for floating-point types.
    Nan = 1,
}

/// What [`tensor_map_encode_tiled`] encodes. All lists begin with the innermost dimension.
#[derive(Debug, Clone, Copy)]
pub struct TensorMapParams<'a> {
    /// Type of an element.
    pub data_type: TensorMapDataType,
    /// Device address of the first element, a multiple of 16.
    pub address: CUdeviceptr,
    /// Extents in elements, one to five of them, each 1 to 2³².
    pub dims: &'a [u64],
    /// Strides in bytes of all dimensions but the innermost, which is dense: multiples of 16 under 2⁴⁰.
    pub strides_bytes: &'a [u64],
    /// Extents of the box that one copy moves, in elements, each 1 to 256.
    pub box_dims: &'a [u32],
    /// Steps between the elements that a copy takes, each 1 to 8.
    pub element_strides: &'a [u32],
    /// Interleaved layout.
    pub interleave: TensorMapInterleave,
    /// Permutation in shared memory.
    pub swizzle: TensorMapSwizzle,
    /// Widening of L2 accesses.
    pub l2_promotion: TensorMapL2Promotion,
    /// Fill outside the tensor.
    pub oob_fill: TensorMapOobFill,
}

/// Encodes the map of a tiled tensor. A host-side computation: the address is stored, not followed.
///
/// `CUDA_ERROR_INVALID_VALUE` where a rule of [`TensorMapParams`] is broken (the driver does not say which),
/// `CUDA_ERROR_NOT_FOUND` from a driver before CUDA 12.0.
pub fn tensor_map_encode_tiled(params: &TensorMapParams<'_>) -> Result<TensorMap, DriverError> {
    let rank = params.dims.len();
    if !(1..=5).contains(&rank) {
        return Err(DriverError::invalid_value(format!("a tensor map has 1 to 5 dimensions, got {rank}")));
    }
    let lengths = [
        ("strides_bytes", params.strides_bytes.len(), rank - 1),
        ("box_dims", params.box_dims.len(), rank),
        ("element_strides", params.element_strides.len(), rank),
    ];
    if let Some((name, got, expected)) = lengths.into_iter().find(|(_, got, expected)| got != expected) {
        let description =
            format!("{name} of a tensor map of rank {rank}: expected {expected} values, got {got}");
        return Err(DriverError::invalid_value(description));
    }
    let mut map = TensorMap([0; 16]);
    // SAFETY: `map` is writable and aligned — a local of the type's alignment; the driver reads `rank` values of each
    // list and one less of the strides — the lengths were checked above.
    check(unsafe {
        ffi::cuTensorMapEncodeTiled(
            &mut map,
            params.data_type as c_int,
            rank as u32,
            params.address,
            params.dims.as_ptr(),
            params.strides_bytes.as_ptr(),
            params.box_dims.as_ptr(),
            params.element_strides.as_ptr(),
            params.interleave as c_int,
            params.swizzle as c_int,
            params.l2_promotion as c_int,
            params.oob_fill as c_int,
        )
    })?;
    Ok(map)
}
