//! Memory of cudarc's as views, for as long as its use is known.

use std::cell::RefCell;
use std::marker::PhantomData;

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};
use host::{Element, Stream, TensorView, TensorViewMut};

use crate::stream::expect_context;
use crate::{CudarcError, SharedStream};

mod sealed {
    pub trait Sealed {}
}

/// Memory of cudarc's that can be read: a [`CudaSlice`], or a view of one.
///
/// Of cudarc's own types alone, since [`DevicePtr`] is a safe trait: another's address may be of anything.
pub trait Memory<T>: DevicePtr<T> + sealed::Sealed {}

/// Memory of cudarc's that can be written: a [`CudaSlice`], or a [`CudaViewMut`] of one.
pub trait MemoryMut<T>: DevicePtrMut<T> + sealed::Sealed {}

impl<T> sealed::Sealed for CudaSlice<T> {}
impl<T> sealed::Sealed for CudaView<'_, T> {}
impl<T> sealed::Sealed for CudaViewMut<'_, T> {}
impl<T> Memory<T> for CudaSlice<T> {}
impl<T> Memory<T> for CudaView<'_, T> {}
impl<T> Memory<T> for CudaViewMut<'_, T> {}
impl<T> MemoryMut<T> for CudaSlice<T> {}
impl<T> MemoryMut<T> for CudaViewMut<'_, T> {}

/// Where views of cudarc's memory are had: see [`SharedStream::scope`]. They end with it.
#[derive(Debug)]
pub struct Scope<'scope, 'env: 'scope> {
    shared: &'env SharedStream,
    /// Ended behind the scope, which records them in the stream.
    uses: &'scope RefCell<Vec<SyncOnDrop<'env>>>,
    /// Of neither life may there be a shorter one.
    lives: PhantomData<(&'scope mut &'scope (), &'env mut &'env ())>,
}

impl<'scope, 'env> Scope<'scope, 'env> {
    pub(crate) fn new(shared: &'env SharedStream, uses: &'scope RefCell<Vec<SyncOnDrop<'env>>>) -> Self {
        Scope { shared, uses, lives: PhantomData }
    }

    /// The stream, as warpforge's.
    pub fn stream(&self) -> &'env Stream {
        self.shared.stream()
    }

    /// Memory as a tensor of this shape without gaps, to read. The stream waits for who writes it now.
    ///
    /// **Errors**: [`CudarcError::Elements`] for a shape of more or fewer elements, [`CudarcError::OtherDevice`] and
    /// [`CudarcError::NotPrimary`] for memory of another context, [`CudarcError::Cudarc`] where the stream cannot wait,
    /// and those of [`TensorView::from_raw`].
    pub fn input<T: Element>(
        &'scope self,
        memory: &'env impl Memory<T>,
        shape: &[usize],
    ) -> Result<TensorView<'scope>, CudarcError> {
        let strides = self.check(memory, shape)?;
        let (address, guard) = memory.device_ptr(self.shared.cudarc());
        self.uses.borrow_mut().push(guard);
        self.shared.cudarc().context().check_err()?;
        let device = self.shared.stream().device();
        // SAFETY: cudarc's memory of this device, of as many elements as the shape has — `check` — which is borrowed
        // for longer than the view. When it is freed, cudarc waits for the work of this scope, whose end `uses` marks.
        Ok(unsafe { TensorView::from_raw(device, address, shape, &strides, T::DTYPE) }?)
    }

    /// The same to write. The stream waits for who reads or writes it now.
    ///
    /// **Errors**: as [`Scope::input`].
    pub fn output<T: Element>(
        &'scope self,
        memory: &'env mut impl MemoryMut<T>,
        shape: &[usize],
    ) -> Result<TensorViewMut<'scope>, CudarcError> {
        let strides = self.check(memory, shape)?;
        let (address, guard) = memory.device_ptr_mut(self.shared.cudarc());
        self.uses.borrow_mut().push(guard);
        self.shared.cudarc().context().check_err()?;
        let device = self.shared.stream().device();
        // SAFETY: as in `input`; nobody else has it, since it is borrowed to be written.
        Ok(unsafe { TensorViewMut::from_raw(device, address, shape, &strides, T::DTYPE) }?)
    }

    /// Strides of the shape, if it is that of this memory, and the memory is of the stream's device.
    fn check<T>(&self, memory: &impl DeviceSlice<T>, shape: &[usize]) -> Result<Vec<usize>, CudarcError> {
        expect_context(self.shared.stream().device().place(), "memory", memory.stream().context())?;
        strides(shape, memory.len())
            .ok_or_else(|| CudarcError::Elements { shape: shape.to_vec(), got: memory.len() })
    }
}

/// Strides of a tensor of this shape without gaps; none if it has not so many elements.
fn strides(shape: &[usize], elements: usize) -> Option<Vec<usize>> {
    let mut strides = vec![1usize; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis].checked_mul(shape[axis].max(1))?;
    }
    let has_none = shape.contains(&0);
    let volume =
        if has_none { Some(0) } else { shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size)) };
    (volume == Some(elements)).then_some(strides)
}

#[cfg(test)]
mod tests {
    use super::strides;

    #[test]
    fn shapes_have_the_memory_s_elements() {
        assert_eq!(strides(&[2, 3, 4], 24), Some(vec![12, 4, 1]));
        assert_eq!(strides(&[], 1), Some(vec![]));
        assert_eq!(strides(&[3, 0, 2], 0), Some(vec![2, 2, 1]));
        for (shape, elements) in [
            (&[2usize, 3][..], 5),
            (&[2, 3], 7),
            (&[], 0),
            (&[0], 1),
            (&[1 << 63, 2], 0),
            (&[1 << 40, 0, 1 << 40], 1),
        ] {
            assert_eq!(strides(shape, elements), None, "{shape:?} of {elements}");
        }
    }
}
