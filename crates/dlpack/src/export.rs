//! Tensors for others.

use std::ffi::c_void;
use std::sync::Arc;

use dlpark::ffi::{DLDataType, DLDevice, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::{DlpackFlags, Managed, ManagedTensorBase, OpaqueContext};
use host::{DType, Error, Place, Tensor, TensorView};

use crate::DlpackError;

/// A tensor in the layout of DLPack 1.x: Python's capsule `dltensor_versioned`. Dropping it calls its deleter.
pub type ManagedTensor = dlpark::versioned::Dlpack;

/// A tensor in the layout of DLPack before 1.0: Python's capsule `dltensor`. Dropping it calls its deleter.
pub type LegacyTensor = dlpark::legacy::Dlpack;

/// Gives a tensor away, to be read and written by its taker, whose deleter gives the memory back to the pool.
///
/// Work of the tensor that is still enqueued is not waited for: see the [crate](crate#streams).
///
/// **Errors**: [`DlpackError::NoNumber`] for a tensor of a simulated card, [`DlpackError::Sizes`] for a tensor without
/// elements one of whose sizes is above `i64::MAX`.
pub fn to_dlpack(tensor: Tensor) -> Result<ManagedTensor, DlpackError> {
    whole(tensor)
}

/// [`to_dlpack`] in the older layout, for takers that know no other.
///
/// **Errors**: as [`to_dlpack`].
pub fn to_legacy_dlpack(tensor: Tensor) -> Result<LegacyTensor, DlpackError> {
    whole(tensor)
}

/// Shows a part of a tensor, with the part's own strides, to be read. The tensor is there until the deleter is called
/// and the last of its owners is gone.
///
/// ```
/// # extern crate host as warpforge;
/// use std::sync::Arc;
/// use warpforge::{Device, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let stream = Device::cpu().stream()?;
/// let tensor = Arc::new(Tensor::from_slice(&stream, &[2, 3], &[0i32, 1, 2, 3, 4, 5])?);
/// let column = warpforge_dlpack::share(&tensor, |view| view.slice(1, 2..3))?;
/// assert_eq!(column.validate()?.strides(), Some(&[3, 1][..]));
/// # Ok(())
/// # }
/// ```
///
/// **Errors**: as [`to_dlpack`], and those of `part`.
pub fn share(
    tensor: &Arc<Tensor>,
    part: impl for<'a> FnOnce(TensorView<'a>) -> Result<TensorView<'a>, Error>,
) -> Result<ManagedTensor, DlpackError> {
    let view = Part::of(part(tensor.view())?);
    let flags = DlpackFlags::READ_ONLY;
    // SAFETY: the part is of the tensor, which the context keeps, or of something that is there for ever, since the
    // view's life is any that `part` is given; it is for reading only.
    unsafe { managed::<DLManagedTensorVersioned, _>(&view, Arc::clone(tensor), flags) }
}

fn whole<M: ManagedTensorBase>(tensor: Tensor) -> Result<Managed<M>, DlpackError> {
    let view = Part::of(tensor.view());
    // SAFETY: the tensor owns this memory, which stays where it is, and is the context alone from here on.
    unsafe { managed(&view, Box::new(tensor), DlpackFlags::empty()) }
}

/// What of a view is written down.
struct Part {
    address: u64,
    shape: Vec<usize>,
    strides: Vec<usize>,
    dtype: DType,
    place: Place,
}

impl Part {
    fn of(view: TensorView<'_>) -> Self {
        // DLPack: a tensor without elements has no address.
        let address = if view.is_empty() { 0 } else { view.address() };
        let (shape, strides) = (view.shape().to_vec(), view.strides().to_vec());
        Part { address, shape, strides, dtype: view.dtype(), place: view.place() }
    }
}

/// # Safety
/// The elements of `part` are valid until the context is dropped, and may be written unless `flags` says otherwise.
unsafe fn managed<M: ManagedTensorBase, C: OpaqueContext>(
    part: &Part,
    context: C,
    flags: DlpackFlags,
) -> Result<Managed<M>, DlpackError> {
    let device = device(part.place).ok_or(DlpackError::NoNumber { place: part.place })?;
    let mut tensor = Dynamic::new(&part.shape[..], &part.strides[..]).prepare_as::<M>()?.initialize(context);
    // The byte offset stays 0: of several libraries it is said that they do not look at it.
    tensor.set_data(part.address as usize as *mut c_void).set_device(device).set_dtype(dtype(part.dtype));
    // SAFETY: no flag says that it is a copy; what they say of writing is the caller's promise.
    unsafe { tensor.set_flags_unchecked(flags) };
    // SAFETY: shape and strides are copies that the tensor owns; address, type and device are a view's, whose elements
    // are valid until the context is dropped — the caller.
    Ok(unsafe { tensor.finish() })
}

/// DLPack's number of a device.
fn device(place: Place) -> Option<DLDevice> {
    match place {
        Place::Cpu => Some(DLDevice::CPU),
        Place::Cuda(ordinal) => i32::try_from(ordinal).ok().map(DLDevice::cuda),
        Place::Simulated(_) => None,
    }
}

/// DLPack's number of a type.
pub(crate) const fn dtype(dtype: DType) -> DLDataType {
    match dtype {
        DType::F32 => DLDataType::F32,
        DType::F16 => DLDataType::F16,
        DType::BF16 => DLDataType::BF16,
        DType::F8E4M3 => DLDataType::F8E4M3FN,
        DType::I8 => DLDataType::I8,
        DType::I32 => DLDataType::I32,
        DType::U32 => DLDataType::U32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_dlpack_s_numbers() {
        assert_eq!(device(Place::Cpu).map(<(u32, i32)>::from), Some((1, 0)));
        assert_eq!(device(Place::Cuda(3)).map(<(u32, i32)>::from), Some((2, 3)));
        assert_eq!(device(Place::Cuda(u32::MAX)), None);
        assert_eq!(device(Place::Simulated(0)), None);
    }

    /// DLPack's header: float is 2, bfloat 4, int 0, uint 1, e4m3fn 10.
    #[test]
    fn types_have_dlpack_s_numbers() {
        let numbers = DType::ALL.map(|of| (dtype(of).code.0, usize::from(dtype(of).bits), dtype(of).lanes));
        let bits = |of: DType| of.bytes() * 8;
        let codes = [2, 2, 4, 10, 0, 0, 1];
        for ((of, number), code) in DType::ALL.into_iter().zip(numbers).zip(codes) {
            assert_eq!(number, (code, bits(of), 1), "{of}");
        }
    }
}
