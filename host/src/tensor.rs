//! Tensors and views of them.

use std::fmt;
use std::ops::Deref;

use abi::DType;
use half::{bf16, f16};

use crate::error::Error;
use crate::fp8::F8E4M3;
use crate::memory::Block;
use crate::profile::Place;
use crate::stream::Stream;

#[cfg(feature = "ndarray")]
mod arrays;
mod constant;
mod mirror;
mod view;

#[cfg(test)]
mod tests;

pub use constant::Constant;
pub(crate) use mirror::{Mirror, Views, views};
use view::RawView;
pub use view::{TensorView, TensorViewMut};

/// Most dimensions that a tensor has.
pub const MAX_RANK: usize = 5;

/// A list of up to [`MAX_RANK`] sizes or strides, outermost first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    values: [usize; MAX_RANK],
    rank: usize,
}

impl Dims {
    /// The list; an error if it is longer than [`MAX_RANK`].
    pub fn new(values: &[usize]) -> Result<Self, Error> {
        if values.len() > MAX_RANK {
            return Err(Error::invalid(
                "Dims",
                "shape",
                format!("at most {MAX_RANK} dimensions"),
                format!("{values:?}"),
            ));
        }
        let mut dims = Dims { values: [0; MAX_RANK], rank: values.len() };
        dims.values[..values.len()].copy_from_slice(values);
        Ok(dims)
    }

    /// Number of elements of a shape; none if that, or a stride of the contiguous tensor, is too large for a usize.
    fn volume(shape: &[usize]) -> Option<usize> {
        let stride = shape.iter().try_fold(1usize, |volume, &size| volume.checked_mul(size.max(1)))?;
        Some(if shape.contains(&0) { 0 } else { stride })
    }

    /// Bytes of this many elements, which are an argument of `op`; an error if they do not fit the address space.
    fn checked_bytes(&self, op: &'static str, argument: &'static str, dtype: DType) -> Result<usize, Error> {
        let bytes = Dims::volume(self).and_then(|volume| volume.checked_mul(dtype.bytes()));
        bytes.filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(|| {
            Error::invalid(op, argument, "a size that fits the address space", format!("{self:?}"))
        })
    }

    /// Strides of a contiguous tensor of this shape, in elements.
    fn contiguous_strides(&self) -> Self {
        let mut strides = *self;
        let mut step = 1;
        for axis in (0..self.rank).rev() {
            strides.values[axis] = step;
            step *= self.values[axis].max(1);
        }
        strides
    }
}

impl Deref for Dims {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.values[..self.rank]
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// A Rust type that a tensor holds.
pub trait Element: bytemuck::Pod + PartialEq + fmt::Debug + Send + Sync {
    /// Its name in a tensor.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),*) => {$(
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
elements!(f32 => F32, f16 => F16, bf16 => BF16, F8E4M3 => F8E4M3, i8 => I8, i32 => I32, u32 => U32);

/// A contiguous tensor that owns its memory, taken from its device's pool and given back when it is dropped.
///
/// It belongs to the stream that it was made with: its memory is reused in that stream's order. Work on another stream
/// that uses it must be ordered by [`Stream::wait_for`] before the first use and before the drop.
pub struct Tensor {
    block: Block,
    shape: Dims,
    dtype: DType,
    place: Place,
}

impl Tensor {
    /// A tensor whose elements have no defined values until something writes them.
    ///
    /// **Errors**: [`Error::Invalid`] for more than [`MAX_RANK`] dimensions or a size beyond the address space;
    /// [`Error::OutOfMemory`] and [`Error::Driver`] from the device.
    #[track_caller]
    pub fn empty(stream: &Stream, shape: &[usize], dtype: DType) -> Result<Self, Error> {
        let dims = Dims::new(shape)?;
        let bytes = dims.checked_bytes("Tensor::empty", "shape", dtype)?;
        let block = stream.device().pool().allocate(bytes, stream.queue())?;
        Ok(Tensor { block, shape: dims, dtype, place: stream.device().place() })
    }

    /// The tensor belongs to this stream from here on, which has waited for whoever used it before.
    pub(crate) fn give_to(&mut self, stream: &Stream) {
        self.block.give_to(stream.queue());
    }

    /// A tensor whose elements are all zero.
    ///
    /// **Errors**: as [`Tensor::empty`].
    #[track_caller]
    pub fn zeros(stream: &Stream, shape: &[usize], dtype: DType) -> Result<Self, Error> {
        let mut tensor = Self::empty(stream, shape, dtype)?;
        tensor.view_mut().fill_zero(stream)?;
        Ok(tensor)
    }

    /// A tensor of these elements, outermost dimension first. [`TensorViewMut::write`] is for a tensor that is there.
    ///
    /// **Errors**: as [`Tensor::empty`], and [`Error::Invalid`] for more or fewer elements than `shape` has.
    #[track_caller]
    pub fn from_slice<T: Element>(stream: &Stream, shape: &[usize], data: &[T]) -> Result<Self, Error> {
        let mut tensor = Self::empty(stream, shape, T::DTYPE)?;
        tensor.view_mut().upload("Tensor::from_slice", stream, T::DTYPE, bytemuck::cast_slice(data))?;
        Ok(tensor)
    }

    /// A tensor of elements given as their bytes in little-endian order.
    ///
    /// **Errors**: as [`Tensor::from_slice`].
    #[track_caller]
    pub fn from_bytes(stream: &Stream, shape: &[usize], dtype: DType, data: &[u8]) -> Result<Self, Error> {
        let mut tensor = Self::empty(stream, shape, dtype)?;
        tensor.view_mut().upload("Tensor::from_bytes", stream, dtype, data)?;
        Ok(tensor)
    }

    /// The elements, after all work on `stream` so far. [`TensorView::read_into`] is for a slice that is there.
    ///
    /// **Errors**: [`Error::Invalid`] if `T` is another type or `stream` another device's; [`Error::Driver`] also for
    /// work of the stream that failed.
    pub fn to_vec<T: Element>(&self, stream: &Stream) -> Result<Vec<T>, Error> {
        self.view().to_vec(stream)
    }

    /// The elements as f32, whatever float type they are stored in.
    ///
    /// **Errors**: as [`Tensor::to_vec`], and [`Error::Invalid`] for a type that is no float.
    pub fn to_f32_vec(&self, stream: &Stream) -> Result<Vec<f32>, Error> {
        match self.dtype {
            DType::F32 => self.to_vec(stream),
            DType::F16 => Ok(self.to_vec::<f16>(stream)?.into_iter().map(f16::to_f32).collect()),
            DType::BF16 => Ok(self.to_vec::<bf16>(stream)?.into_iter().map(bf16::to_f32).collect()),
            DType::F8E4M3 => Ok(self.to_vec::<F8E4M3>(stream)?.into_iter().map(F8E4M3::to_f32).collect()),
            other => Err(Error::invalid("Tensor::to_f32_vec", "tensor", "a float type", other.name())),
        }
    }

    /// A tensor of its own with the same elements, copied in `stream`'s order.
    ///
    /// **Errors**: as [`Tensor::empty`], and [`Error::Invalid`] for another device's stream.
    #[track_caller]
    pub fn try_clone(&self, stream: &Stream) -> Result<Self, Error> {
        let mut copy = Self::empty(stream, &self.shape, self.dtype)?;
        stream.copy(self.view(), copy.view_mut())?;
        Ok(copy)
    }

    /// The same elements in another shape of as many; nothing is copied. [`TensorView::reshape`] is for a view.
    ///
    /// **Errors**: [`Error::Invalid`] for more than [`MAX_RANK`] dimensions or another number of elements; the tensor
    /// is dropped then.
    pub fn reshape(mut self, shape: &[usize]) -> Result<Self, Error> {
        let dims = Dims::new(shape)?;
        if Dims::volume(shape) != Some(self.len()) {
            let expected = format!("{} elements as in {:?}", self.len(), self.shape);
            return Err(Error::invalid("Tensor::reshape", "shape", expected, format!("{shape:?}")));
        }
        self.shape = dims;
        Ok(self)
    }

    /// The same tensor, which belongs to `stream` from here on. That one waits for the work that the tensor's stream
    /// so far has now, and its memory is reused in that one's order.
    ///
    /// **Errors**: [`Error::Invalid`] for another device's stream, and those of [`Stream::wait_for`]; the tensor is
    /// dropped then.
    pub fn into_stream(mut self, stream: &Stream) -> Result<Self, Error> {
        let (expected, got) = (self.place, stream.device().place());
        if expected != got {
            let of = |place| format!("a stream of {place}");
            return Err(Error::invalid("Tensor::into_stream", "stream", of(expected), of(got)));
        }
        stream.queue().wait_for(self.block.queue())?;
        self.give_to(stream);
        Ok(self)
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of the elements in bytes.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.bytes()
    }

    /// The whole tensor, to read.
    pub fn view(&self) -> TensorView<'_> {
        TensorView::of(self.raw())
    }

    /// The whole tensor, to write.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        TensorViewMut::of(self.raw())
    }

    /// As [`Tensor::view_mut`], of a tensor that is shared.
    ///
    /// # Safety
    /// - *exclusive*: while the view is used, and until work that was enqueued with it is done, nobody else uses the
    ///   tensor, but for work in the same stream.
    pub(crate) unsafe fn view_mut_alone(&self) -> TensorViewMut<'_> {
        TensorViewMut::of(self.raw())
    }

    /// The elements of a tensor in host memory.
    pub(crate) fn host_slice<T: Element>(&self) -> &[T] {
        assert!(self.place == Place::Cpu && self.dtype == T::DTYPE, "CPU backend on {self:?}");
        if self.is_empty() {
            return &[];
        }
        // SAFETY: host memory of so many elements, which nobody writes while the tensor is borrowed.
        unsafe { std::slice::from_raw_parts(self.block.address() as *const T, self.len()) }
    }

    /// The bytes of a tensor in host memory.
    fn host_bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.place == Place::Cpu, "CPU backend on {self:?}");
        if self.is_empty() {
            return &mut [];
        }
        // SAFETY: host memory of so many bytes, which nobody else has while the tensor is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.block.address() as *mut u8, self.bytes()) }
    }

    fn raw(&self) -> RawView {
        RawView {
            address: self.block.address(),
            shape: self.shape,
            strides: self.shape.contiguous_strides(),
            dtype: self.dtype,
            place: self.place,
            constant: false,
        }
    }
}

/// What it is and where, not what it holds.
impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tensor { block, shape, dtype, place } = self;
        let address = block.address();
        write!(f, "Tensor({dtype} {shape:?} at {address:#x} of {place})")
    }
}

/// A float type that a tensor holds, for the CPU backend's arithmetic in f32.
pub(crate) trait FloatElement: Element {
    fn to_f32(self) -> f32;
    fn from_f32(value: f32) -> Self;
}

impl FloatElement for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl FloatElement for f16 {
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
}

impl FloatElement for bf16 {
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
}

impl FloatElement for F8E4M3 {
    fn to_f32(self) -> f32 {
        F8E4M3::to_f32(self)
    }
    fn from_f32(value: f32) -> Self {
        F8E4M3::from_f32(value)
    }
}
