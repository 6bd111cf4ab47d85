//! Tensors and views of them.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, Range};

use abi::DType;
use half::{bf16, f16};

use crate::device::{Device, Place};
use crate::error::Error;
use crate::memory::Block;
use crate::stream::Stream;

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
elements!(f32 => F32, f16 => F16, bf16 => BF16, i8 => I8, i32 => I32, u32 => U32);

/// A contiguous tensor that owns its memory, taken from its device's pool and given back when it is dropped.
///
/// It belongs to the stream that it was made with: its memory is reused in that stream's order. Work on another stream
/// that uses it must be ordered by [`Stream::wait_for`] before the first use and before the drop.
#[derive(Debug)]
pub struct Tensor {
    block: Block,
    shape: Dims,
    dtype: DType,
    place: Place,
}

impl Tensor {
    /// A tensor with undefined contents.
    pub fn empty(stream: &Stream, shape: &[usize], dtype: DType) -> Result<Self, Error> {
        let dims = Dims::new(shape)?;
        let bytes = shape.iter().try_fold(dtype.bytes(), |bytes, &size| bytes.checked_mul(size));
        let Some(bytes) = bytes.filter(|&bytes| bytes <= isize::MAX as usize) else {
            return Err(Error::invalid(
                "Tensor::empty",
                "shape",
                "a size that fits the address space",
                format!("{shape:?}"),
            ));
        };
        let block = stream.device().pool().allocate(bytes, stream)?;
        Ok(Tensor { block, shape: dims, dtype, place: stream.device().place() })
    }

    /// A tensor of zero bytes.
    pub fn zeros(stream: &Stream, shape: &[usize], dtype: DType) -> Result<Self, Error> {
        let tensor = Self::empty(stream, shape, dtype)?;
        stream.fill_zero(tensor.block.address(), tensor.bytes())?;
        Ok(tensor)
    }

    /// A tensor of these elements, outermost dimension first.
    pub fn from_slice<T: Element>(stream: &Stream, shape: &[usize], data: &[T]) -> Result<Self, Error> {
        Self::from_bytes(stream, shape, T::DTYPE, bytemuck::cast_slice(data))
    }

    /// A tensor of elements given as their bytes in little-endian order.
    pub fn from_bytes(stream: &Stream, shape: &[usize], dtype: DType, data: &[u8]) -> Result<Self, Error> {
        let tensor = Self::empty(stream, shape, dtype)?;
        if data.len() != tensor.bytes() {
            let expected = format!("{} bytes for {shape:?} of {dtype}", tensor.bytes());
            return Err(Error::invalid(
                "Tensor::from_bytes",
                "data",
                expected,
                format!("{} bytes", data.len()),
            ));
        }
        stream.upload(tensor.block.address(), data)?;
        Ok(tensor)
    }

    /// The elements, after all work on `stream` so far.
    pub fn to_vec<T: Element>(&self, stream: &Stream) -> Result<Vec<T>, Error> {
        self.view().to_vec(stream)
    }

    /// The elements as f32, whatever float type they are stored in.
    pub fn to_f32_vec(&self, stream: &Stream) -> Result<Vec<f32>, Error> {
        match self.dtype {
            DType::F32 => self.to_vec(stream),
            DType::F16 => Ok(self.to_vec::<f16>(stream)?.into_iter().map(f16::to_f32).collect()),
            DType::BF16 => Ok(self.to_vec::<bf16>(stream)?.into_iter().map(bf16::to_f32).collect()),
            other => Err(Error::invalid("Tensor::to_f32_vec", "tensor", "a float type", other.name())),
        }
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
        TensorView { raw: self.raw(), life: PhantomData }
    }

    /// The whole tensor, to write.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        TensorViewMut { raw: self.raw(), life: PhantomData }
    }

    fn raw(&self) -> RawView {
        RawView {
            address: self.block.address(),
            shape: self.shape,
            strides: self.shape.contiguous_strides(),
            dtype: self.dtype,
            place: self.place,
        }
    }
}

/// Address, shape, strides: what both kinds of view are made of.
#[derive(Clone, Copy, Debug)]
struct RawView {
    address: u64,
    shape: Dims,
    strides: Dims,
    dtype: DType,
    place: Place,
}

/// A strided tensor to read. Strides are in elements.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    raw: RawView,
    life: PhantomData<&'a [u8]>,
}

/// A strided tensor to write. Strides are in elements.
#[derive(Debug)]
pub struct TensorViewMut<'a> {
    raw: RawView,
    life: PhantomData<&'a mut [u8]>,
}

impl RawView {
    fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements from the first to one past the last, gaps included.
    fn span(&self) -> usize {
        if self.len() == 0 {
            return 0;
        }
        1 + std::iter::zip(&*self.shape, &*self.strides)
            .map(|(size, stride)| (size - 1) * stride)
            .sum::<usize>()
    }

    fn is_contiguous(&self) -> bool {
        let mut step = 1;
        for axis in (0..self.shape.rank).rev() {
            if self.shape[axis] != 1 && self.strides[axis] != step {
                return false;
            }
            step *= self.shape[axis].max(1);
        }
        true
    }

    fn slice(mut self, axis: usize, range: Range<usize>) -> Result<Self, Error> {
        let size = self.shape.get(axis).copied().unwrap_or(0);
        if range.start > range.end || range.end > size || axis >= self.shape.rank {
            let expected = format!("a range inside axis {axis} of {:?}", self.shape);
            return Err(Error::invalid("TensorView::slice", "range", expected, format!("{range:?}")));
        }
        self.shape.values[axis] = range.len();
        if !range.is_empty() {
            self.address += (range.start * self.strides[axis] * self.dtype.bytes()) as u64;
        }
        Ok(self)
    }

    fn reshape(mut self, shape: &[usize]) -> Result<Self, Error> {
        let dims = Dims::new(shape)?;
        if shape.iter().product::<usize>() != self.len() {
            let expected = format!("{} elements as in {:?}", self.len(), self.shape);
            return Err(Error::invalid("TensorView::reshape", "shape", expected, format!("{shape:?}")));
        }
        // Axes merge and split freely where they are contiguous among themselves: match the old and new axes in groups
        // of equal size.
        let mut strides = dims.contiguous_strides();
        if self.len() > 0 && !self.is_contiguous() {
            let unsplittable = || {
                let got = format!("{shape:?} from {:?} with strides {:?}", self.shape, self.strides);
                Error::invalid("TensorView::reshape", "shape", "a shape that needs no copy", got)
            };
            let (mut old, mut new) = (self.shape.rank, dims.rank);
            while old > 0 || new > 0 {
                // One group: axes from the right until the products agree.
                let (mut old_size, mut new_size) = (1, 1);
                let (old_end, new_end) = (old, new);
                loop {
                    if old_size == new_size && old < old_end && new < new_end {
                        break;
                    }
                    if old_size <= new_size && old > 0 {
                        old -= 1;
                        old_size *= self.shape[old];
                    } else if new > 0 {
                        new -= 1;
                        new_size *= dims[new];
                    } else if old_size == new_size {
                        break;
                    } else {
                        return Err(unsplittable());
                    }
                }
                let group = old..old_end;
                let axes: Vec<usize> = group.filter(|&axis| self.shape[axis] != 1).collect();
                let mergeable = axes
                    .windows(2)
                    .all(|pair| self.strides[pair[0]] == self.strides[pair[1]] * self.shape[pair[1]]);
                if !mergeable {
                    return Err(unsplittable());
                }
                let mut step = axes.last().map_or(1, |&axis| self.strides[axis]);
                for axis in (new..new_end).rev() {
                    strides.values[axis] = step;
                    step *= dims[axis];
                }
            }
        }
        self.shape = dims;
        self.strides = strides;
        Ok(self)
    }
}

macro_rules! view_methods {
    ($view:ident) => {
        impl<'a> $view<'a> {
            /// A view of memory that the caller vouches for: another library's buffer, or a part of one.
            ///
            /// # Safety
            /// - `address` is valid on `device` for the elements that shape and strides reach, for the life `'a` and until
            ///   work that was enqueued with the view is done; for a `TensorViewMut` nobody else uses them.
            /// - It is aligned to the element type.
            pub unsafe fn from_raw(
                device: &Device,
                address: u64,
                shape: &[usize],
                strides: &[usize],
                dtype: DType,
            ) -> Result<Self, Error> {
                if shape.len() != strides.len() {
                    let expected = format!("{} strides for {shape:?}", shape.len());
                    return Err(Error::invalid(
                        stringify!($view),
                        "strides",
                        expected,
                        format!("{strides:?}"),
                    ));
                }
                let (shape, strides) = (Dims::new(shape)?, Dims::new(strides)?);
                let raw = RawView { address, shape, strides, dtype, place: device.place() };
                Ok($view { raw, life: PhantomData })
            }

            /// Sizes, outermost first.
            pub fn shape(&self) -> &[usize] {
                &self.raw.shape
            }

            /// Strides in elements, outermost first.
            pub fn strides(&self) -> &[usize] {
                &self.raw.strides
            }

            /// Type of the elements.
            pub fn dtype(&self) -> DType {
                self.raw.dtype
            }

            /// Number of elements.
            pub fn len(&self) -> usize {
                self.raw.len()
            }

            /// Whether there are no elements.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// Whether the elements lie without gaps, the last dimension innermost.
            pub fn is_contiguous(&self) -> bool {
                self.raw.is_contiguous()
            }

            /// Where the memory is.
            pub fn place(&self) -> Place {
                self.raw.place
            }

            /// Address of the first element, on the device.
            pub fn address(&self) -> u64 {
                self.raw.address
            }

            /// The part of `axis` in `range`.
            pub fn slice(self, axis: usize, range: Range<usize>) -> Result<Self, Error> {
                Ok($view { raw: self.raw.slice(axis, range)?, life: PhantomData })
            }

            /// The same elements in another shape; an error where that would need a copy.
            pub fn reshape(self, shape: &[usize]) -> Result<Self, Error> {
                Ok($view { raw: self.raw.reshape(shape)?, life: PhantomData })
            }

            /// Checks rank, sizes, type and place, for the operator `op` and its argument `argument`. A size of `None`
            /// takes any.
            pub(crate) fn expect(
                &self,
                op: &'static str,
                argument: &'static str,
                device: &Device,
                dtype: DType,
                shape: &[Option<usize>],
            ) -> Result<(), Error> {
                let fits = self.shape().len() == shape.len()
                    && std::iter::zip(self.shape(), shape)
                        .all(|(&size, wanted)| wanted.is_none_or(|w| w == size));
                if !fits {
                    let wanted: Vec<String> =
                        shape.iter().map(|size| size.map_or("any".into(), |size| size.to_string())).collect();
                    let expected = format!("shape [{}]", wanted.join(", "));
                    return Err(Error::invalid(op, argument, expected, format!("{:?}", self.shape())));
                }
                if self.dtype() != dtype {
                    return Err(Error::invalid(op, argument, dtype.name(), self.dtype().name()));
                }
                if self.place() != device.place() {
                    return Err(Error::invalid(
                        op,
                        argument,
                        device.place().to_string(),
                        self.place().to_string(),
                    ));
                }
                Ok(())
            }

            /// Checks that the last dimension has stride 1 (or at most one element).
            pub(crate) fn expect_inner_contiguous(
                &self,
                op: &'static str,
                argument: &'static str,
            ) -> Result<(), Error> {
                match (self.shape().last(), self.strides().last()) {
                    (Some(&size), Some(&stride)) if size > 1 && stride != 1 => Err(Error::invalid(
                        op,
                        argument,
                        "stride 1 in the last dimension",
                        stride.to_string(),
                    )),
                    _ => Ok(()),
                }
            }

            /// Whether rows can be read in pieces of 16 bytes: address, all strides but the last, and the last dimension
            /// are multiples of 16 bytes.
            pub(crate) fn is_aligned_16(&self) -> bool {
                let per_16 = 16 / self.dtype().bytes();
                let (inner, outer) = match self.shape().len() {
                    0 => return false,
                    rank => (self.shape()[rank - 1], &self.strides()[..rank - 1]),
                };
                let outer_sizes = &self.shape()[..outer.len()];
                self.address() % 16 == 0
                    && inner % per_16 == 0
                    && std::iter::zip(outer, outer_sizes)
                        .all(|(stride, &size)| size <= 1 || stride % per_16 == 0)
            }
        }
    };
}
view_methods!(TensorView);
view_methods!(TensorViewMut);

impl TensorView<'_> {
    /// The elements in order, after all work on `stream` so far; the view must be contiguous.
    pub fn to_vec<T: Element>(&self, stream: &Stream) -> Result<Vec<T>, Error> {
        self.expect_type::<T>("TensorView::to_vec")?;
        if !self.is_contiguous() {
            let got = format!("shape {:?} with strides {:?}", self.shape(), self.strides());
            return Err(Error::invalid("TensorView::to_vec", "view", "a contiguous view", got));
        }
        if self.place() != stream.device().place() {
            let (expected, got) = (self.place().to_string(), stream.device().place().to_string());
            return Err(Error::invalid("TensorView::to_vec", "stream", expected, got));
        }
        let mut data = vec![T::zeroed(); self.len()];
        stream.download(self.address(), bytemuck::cast_slice_mut(&mut data))?;
        Ok(data)
    }

    fn expect_type<T: Element>(&self, op: &'static str) -> Result<(), Error> {
        if T::DTYPE == self.dtype() {
            Ok(())
        } else {
            Err(Error::invalid(op, "dtype", self.dtype().name(), T::DTYPE.name()))
        }
    }

    /// The elements in host memory from the first to the last, gaps included: what the CPU backend computes on.
    ///
    /// Callers have checked place and type with `expect`; a mismatch here is a bug of the backend.
    pub(crate) fn host_slice<T: Element>(&self) -> &[T] {
        assert!(self.place() == Place::Cpu && self.dtype() == T::DTYPE, "CPU backend on {self:?}");
        if self.is_empty() {
            return &[];
        }
        // SAFETY: host memory, valid for the view's life over its span — by Tensor, or promised to from_raw.
        unsafe { std::slice::from_raw_parts(self.raw.address as *const T, self.raw.span()) }
    }
}

impl TensorViewMut<'_> {
    /// The same view, to read.
    pub fn as_view(&self) -> TensorView<'_> {
        TensorView { raw: self.raw, life: PhantomData }
    }

    /// The same view for a shorter time.
    pub fn reborrow(&mut self) -> TensorViewMut<'_> {
        TensorViewMut { raw: self.raw, life: PhantomData }
    }

    /// Like `TensorView::host_slice`.
    pub(crate) fn host_slice_mut<T: Element>(&mut self) -> &mut [T] {
        assert!(self.place() == Place::Cpu && self.dtype() == T::DTYPE, "CPU backend on {self:?}");
        if self.is_empty() {
            return &mut [];
        }
        // SAFETY: host memory, valid and unshared for the view's life over its span — by Tensor, or promised to from_raw.
        unsafe { std::slice::from_raw_parts_mut(self.raw.address as *mut T, self.raw.span()) }
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
