//! Tensors as memory of cudarc's.

use std::fmt;
use std::mem::ManuallyDrop;

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtrMut};
use host::{Element, Tensor};

use crate::{CudarcError, SharedStream};

/// A tensor of warpforge's that cudarc uses as memory: see [`SharedStream::lend`]. It goes back to its pool when it is
/// dropped, behind all that cudarc's streams do with it by then.
pub struct LentTensor<T> {
    /// Dropped first: the stream waits then for what cudarc has done.
    slice: Slice<T>,
    tensor: Tensor,
}

/// Memory that cudarc does not free.
struct Slice<T>(ManuallyDrop<CudaSlice<T>>);

impl<T: Element> LentTensor<T> {
    /// Of a tensor of `T` that belongs to this stream.
    pub(crate) fn new(shared: &SharedStream, mut tensor: Tensor) -> Result<Self, CudarcError> {
        let (stream, len) = (shared.cudarc(), tensor.len());
        // What fails here would be a panic in `upgrade_device_ptr`, which makes two of them.
        drop(stream.context().new_event(None)?);
        let address = tensor.view_mut().address();
        // SAFETY: a tensor's memory of so many elements, which all have a value whatever their bits — `Element`; it is
        // there as long as the tensor, and so longer than the slice, which does not free it.
        let slice = unsafe { stream.upgrade_device_ptr::<T>(address, len) };
        let mut lent = LentTensor { slice: Slice(ManuallyDrop::new(slice)), tensor };
        // What the stream does with the tensor now counts as a use, which cudarc's other streams wait for.
        drop(lent.slice.0.device_ptr_mut(stream));
        stream.context().check_err()?;
        Ok(lent)
    }
}

impl<T> LentTensor<T> {
    /// Its elements, to read.
    pub fn view(&self) -> CudaView<'_, T> {
        self.slice.0.as_view()
    }

    /// Its elements, to write.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.0.as_view_mut()
    }

    /// The tensor, which belongs to the shared stream. That waits for what cudarc's other streams do with it now.
    pub fn into_tensor(self) -> Tensor {
        let LentTensor { slice, tensor } = self;
        drop(slice);
        tensor
    }
}

impl<T> Drop for Slice<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, and nobody looks at it behind this.
        let slice = unsafe { ManuallyDrop::take(&mut self.0) };
        // The stream waits for the events of its uses; the memory is the tensor's.
        slice.leak();
    }
}

impl<T> fmt::Debug for LentTensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LentTensor").field(&self.tensor).finish()
    }
}
