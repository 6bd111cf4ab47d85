//! Tensors that nothing writes any more.

use std::ops::Deref;

use super::{Tensor, TensorView};
use crate::error::Error;
use crate::stream::Stream;

/// A tensor that is not written any more, such as a weight: there is no way back to a [`TensorViewMut`].
///
/// Its views say so ([`TensorView::is_constant`]), and a kernel may read them before the kernels ahead of it in the
/// stream have ended (programmatic dependent launch, from Hopper on): a chain of short products is faster by that. A
/// simulated card reports a kernel that writes it all the same.
///
/// [`TensorViewMut`]: super::TensorViewMut
#[derive(Debug)]
pub struct Constant(Tensor);

impl Constant {
    /// From here on the tensor is what it is now: waits until what was enqueued in `stream` is done, the writes of the
    /// tensor among it. Those of other streams are to be ordered before (see [`Tensor`]).
    ///
    /// **Errors**: [`Error::Invalid`] for another device's stream; [`Error::Driver`] for work of the stream that
    /// failed, and while the stream is being recorded. The tensor is dropped then.
    pub fn new(tensor: Tensor, stream: &Stream) -> Result<Self, Error> {
        if tensor.place != stream.device().place() {
            let (expected, got) = (tensor.place.to_string(), stream.device().place().to_string());
            return Err(Error::invalid("Constant::new", "stream", expected, got));
        }
        stream.synchronize()?;
        tensor.block.set_constant(true);
        Ok(Constant(tensor))
    }

    /// The whole tensor, to read.
    pub fn view(&self) -> TensorView<'_> {
        let mut view = self.0.view();
        view.raw.constant = true;
        view
    }
}

/// What a tensor tells of itself.
impl Deref for Constant {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.0
    }
}

impl Drop for Constant {
    fn drop(&mut self) {
        self.0.block.set_constant(false);
    }
}
