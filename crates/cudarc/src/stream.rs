//! Streams that both libraries use.

use std::cell::RefCell;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};
use host::{Device, Element, Place, Stream, Tensor};

use crate::{CudarcError, LentTensor, Scope};

/// A stream of cudarc's that is one of warpforge's too.
#[derive(Clone, Debug)]
pub struct SharedStream {
    cudarc: Arc<CudaStream>,
    stream: Stream,
}

impl SharedStream {
    /// Shares a stream of cudarc's with a device of warpforge's, which must be the same card.
    ///
    /// **Errors**: [`CudarcError::OtherDevice`] and [`CudarcError::NotPrimary`] for another context; those of
    /// [`Device::stream_of_owner`], which takes no default stream ([`CudaContext::default_stream`],
    /// [`CudaContext::per_thread_stream`]).
    pub fn new(device: &Device, cudarc: &Arc<CudaStream>) -> Result<Self, CudarcError> {
        expect_context(device.place(), "stream", cudarc.context())?;
        let owner = Arc::clone(cudarc);
        // SAFETY: a stream of this device's primary context, as checked, which cudarc destroys with its last `Arc`; of
        // one that it has only borrowed, whoever gave it to cudarc has promised that it lives as long as those.
        let stream = unsafe { device.stream_of_owner(cudarc.cu_stream().cast(), owner) }?;
        Ok(SharedStream { cudarc: Arc::clone(cudarc), stream })
    }

    /// As warpforge's: for operators, tensors, events, graphs.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// As cudarc's.
    pub fn cudarc(&self) -> &Arc<CudaStream> {
        &self.cudarc
    }

    /// Calls `work`, which uses memory of cudarc's in this stream: through the [`Scope`], which views are had from.
    ///
    /// The memory counts as used in this stream until `work` has ended, in whatever way; what it has enqueued by then
    /// is waited for by whatever cudarc does with the memory later, in any stream.
    ///
    /// **Errors**: those of `work`; [`CudarcError::Cudarc`] if a use could not be marked.
    pub fn scope<'env, R>(
        &'env self,
        work: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<R, CudarcError>,
    ) -> Result<R, CudarcError> {
        let uses = RefCell::default();
        let result = work(&Scope::new(self, &uses))?;
        // Marks the uses; where `work` has failed or panicked, so does the drop.
        drop(uses);
        self.cudarc.context().check_err()?;
        Ok(result)
    }

    /// Lends a tensor to cudarc as memory. It belongs to this stream from here on, which waits for the work that the
    /// tensor's own stream has now.
    ///
    /// **Errors**: [`CudarcError::DType`] for elements of another type, those of [`Tensor::into_stream`], and
    /// [`CudarcError::Cudarc`]; the tensor is dropped then.
    pub fn lend<T: Element>(&self, tensor: Tensor) -> Result<LentTensor<T>, CudarcError> {
        if tensor.dtype() != T::DTYPE {
            return Err(CudarcError::DType { expected: T::DTYPE, got: tensor.dtype() });
        }
        LentTensor::new(self, tensor.into_stream(&self.stream)?)
    }
}

/// Checks that `what` is of the primary context of the device at `place`.
pub(crate) fn expect_context(
    place: Place,
    what: &'static str,
    context: &CudaContext,
) -> Result<(), CudarcError> {
    let ordinal = context.ordinal();
    if u32::try_from(ordinal).map(Place::Cuda) != Ok(place) {
        return Err(CudarcError::OtherDevice { what, expected: place, got: ordinal });
    }
    if !context.is_primary() {
        return Err(CudarcError::NotPrimary { what, ordinal });
    }
    Ok(())
}
