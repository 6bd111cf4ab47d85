//! Tensors of others.

use std::fmt;

use dlpark::ffi::{DLDataType, DLDevice, DLDeviceType};
use dlpark::{AllocationDeleter, DlpackFlags, Managed, ManagedTensorBase, TensorRef};
use host::{DType, Error, Place, Stream, TensorView, TensorViewMut};

use crate::DlpackError;
use crate::export::dtype;

/// A tensor that another library has made. It belongs to a stream, which is waited for before it goes back.
pub struct DlpackTensor {
    /// Valid as long as the deleter is not called; handed out for as long as `self` is borrowed.
    view: TensorView<'static>,
    is_read_only: bool,
    stream: Stream,
    /// Called when it is dropped, behind [`DlpackTensor::drop`].
    _deleter: AllocationDeleter,
}

/// Takes a tensor of another library, in either layout, to be used in `stream`. Its deleter is called once: when the
/// result is dropped, after all work of `stream`, or here if it is refused.
///
/// An address in C's hands becomes a [`Managed`] by [`Managed::from_raw`], which refuses, and releases, a tensor of
/// another major version.
///
/// # Safety
/// - The description is true: the elements are valid memory of the device that it names, until the deleter is called.
///   On the CPU that holds of the gaps between them too, see [`TensorView::from_raw`]. A CUDA device's number is the
///   driver's ordinal, and the memory can be used in its primary context.
/// - Nobody writes the elements (on the CPU, nor the gaps) meanwhile; where [`DlpackTensor::view_mut`] is used, nobody
///   reads them either. Unless the tensor says that it is for reading only, it may be written.
/// - What the producer has enqueued is done, or `stream` has waited for it. What is enqueued with it in other streams
///   is done when it is dropped, or `stream` has waited for it.
///
/// **Errors**: see [`DlpackError`].
pub unsafe fn from_dlpack<M: ManagedTensorBase>(
    stream: &Stream,
    managed: Managed<M>,
) -> Result<DlpackTensor, DlpackError> {
    let tensor = managed.validate()?;
    let found = place(tensor.device())?;
    let place = stream.device().place();
    if found != place {
        return Err(DlpackError::OtherDevice { tensor: found, stream: place });
    }
    let dtype = known(tensor.dtype())?;
    let shape: Vec<usize> = tensor.shape().iter().map(|&size| size as usize).collect();
    let strides = strides(&tensor, &shape)?;
    let address = address(&tensor, dtype)?;
    // SAFETY: the caller's promise. The life is that of the deleter: `DlpackTensor` hands the view out for no longer.
    let view = unsafe { TensorView::from_raw(stream.device(), address, &shape, &strides, dtype) }?;
    let is_read_only = managed.flags().contains(DlpackFlags::READ_ONLY);
    let stream = stream.clone();
    Ok(DlpackTensor { view, is_read_only, stream, _deleter: managed.into_deleter() })
}

impl DlpackTensor {
    /// The elements, to read.
    pub fn view(&self) -> TensorView<'_> {
        self.view
    }

    /// The elements, to write.
    ///
    /// **Errors**: [`DlpackError::ReadOnly`] if the producer says so, [`DlpackError::Overlapping`] for strides by which
    /// several elements may lie at one address.
    pub fn view_mut(&mut self) -> Result<TensorViewMut<'_>, DlpackError> {
        if self.is_read_only {
            return Err(DlpackError::ReadOnly);
        }
        let (shape, strides) = (self.view.shape(), self.view.strides());
        if !are_apart(shape, strides) {
            let (shape, strides) = (shape.to_vec(), strides.to_vec());
            return Err(DlpackError::Overlapping { shape, strides });
        }
        let (device, address) = (self.stream.device(), self.view.address());
        // SAFETY: the memory is valid until the deleter is called, may be written and is nobody else's — the caller of
        // `from_dlpack`; views of this tensor end before this one begins, by the borrow.
        Ok(unsafe { TensorViewMut::from_raw(device, address, shape, strides, self.view.dtype()) }?)
    }

    /// Whether the producer allows no writes.
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// The stream that it belongs to.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Gives it back, with the error of the stream's work if there is one; a drop says nothing of that.
    pub fn release(self) -> Result<(), Error> {
        self.stream.synchronize()
    }
}

impl Drop for DlpackTensor {
    fn drop(&mut self) {
        // After an error the context's memory cannot be used by anybody; the stream's next user is told of it.
        let _ = self.stream.synchronize();
    }
}

impl fmt::Debug for DlpackTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (view, writes) = (&self.view, if self.is_read_only { ", read only" } else { "" });
        let (dtype, shape, strides) = (view.dtype(), view.shape(), view.strides());
        write!(f, "DlpackTensor({dtype} {shape:?} with strides {strides:?} of {}{writes})", view.place())
    }
}

/// The place of a device; pinned memory is the host's.
fn place(device: DLDevice) -> Result<Place, DlpackError> {
    let unknown = DlpackError::UnknownDevice { device };
    match device.device_type {
        DLDeviceType::CPU | DLDeviceType::CUDAHOST => Ok(Place::Cpu),
        DLDeviceType::CUDA => u32::try_from(device.device_id).map(Place::Cuda).map_err(|_| unknown),
        _ => Err(unknown),
    }
}

fn known(found: DLDataType) -> Result<DType, DlpackError> {
    if found.lanes != 1 {
        return Err(DlpackError::Lanes { lanes: found.lanes });
    }
    let unknown = DlpackError::UnknownDType { dtype: found };
    DType::ALL.into_iter().find(|&known| dtype(known).matches(found)).ok_or(unknown)
}

/// Strides in elements; where an axis' stride is never used, as that of a single element, the one of a tensor without
/// gaps.
fn strides(tensor: &TensorRef<'_>, shape: &[usize]) -> Result<Vec<usize>, DlpackError> {
    let mut strides = vec![0; shape.len()];
    let is_empty = shape.contains(&0);
    let mut step = 1usize;
    for axis in (0..shape.len()).rev() {
        strides[axis] = match tensor.strides() {
            Some(given) if !is_empty && shape[axis] > 1 => {
                let stride = given[axis];
                usize::try_from(stride).map_err(|_| DlpackError::NegativeStride { axis, stride })?
            }
            _ => step,
        };
        // That of an empty tensor is never used; others' sizes were multiplied by `validate`.
        step = step.saturating_mul(shape[axis].max(1));
    }
    Ok(strides)
}

/// Address of the first element; 0 if there is none.
fn address(tensor: &TensorRef<'_>, dtype: DType) -> Result<u64, DlpackError> {
    if tensor.num_elements() == 0 {
        return Ok(0);
    }
    let (data, byte_offset) = (tensor.data_ptr() as usize as u64, tensor.byte_offset());
    let address = data.checked_add(byte_offset).filter(|_| data != 0);
    let address = address.ok_or(DlpackError::NoData { data, byte_offset })?;
    let bytes = dtype.bytes();
    if !address.is_multiple_of(bytes as u64) {
        return Err(DlpackError::Misaligned { address, bytes });
    }
    Ok(address)
}

/// Whether no two elements can lie at one address, as far as can be seen from each axis being outside of those with
/// smaller strides.
fn are_apart(shape: &[usize], strides: &[usize]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut axes: Vec<(usize, usize)> = std::iter::zip(strides.iter().copied(), shape.iter().copied())
        .filter(|&(_, size)| size > 1)
        .collect();
    axes.sort_unstable();
    let mut span = 1usize;
    axes.into_iter().all(|(stride, size)| {
        let is_outside = stride >= span;
        // `from_raw` has found the whole to be within the address space.
        span = span.saturating_add(stride.saturating_mul(size - 1));
        is_outside
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_memory_is_the_host_s() {
        let of = |device_type, device_id| place(DLDevice { device_type, device_id }).ok();
        assert_eq!(of(DLDeviceType::CPU, 0), Some(Place::Cpu));
        assert_eq!(of(DLDeviceType::CUDAHOST, 0), Some(Place::Cpu));
        assert_eq!(of(DLDeviceType::CUDA, 7), Some(Place::Cuda(7)));
        assert_eq!(of(DLDeviceType::CUDA, -1), None);
        for other in [DLDeviceType::CUDAMANAGED, DLDeviceType::ROCM, DLDeviceType::METAL, DLDeviceType(99)] {
            assert_eq!(of(other, 0), None, "{other:?}");
        }
    }

    #[test]
    fn elements_that_may_share_an_address() {
        for (shape, strides, wanted) in [
            (&[2usize, 3][..], &[3usize, 1][..], true),
            (&[3, 2], &[1, 3], true),
            (&[2, 3], &[8, 2], true),
            (&[2, 3], &[2, 1], false),
            (&[2, 3], &[0, 1], false),
            (&[1, 3], &[0, 1], true),
            (&[0, 3], &[0, 0], true),
            (&[], &[], true),
            (&[2, 2, 2], &[1, 2, 3], false),
        ] {
            assert_eq!(are_apart(shape, strides), wanted, "{shape:?} {strides:?}");
        }
    }
}
