//! Tensors and views of them.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, Range};

use abi::DType;
use half::{bf16, f16};

use crate::device::{Device, Place};
use crate::error::Error;
use crate::fp8::F8E4M3;
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
#[derive(Debug)]
pub struct Tensor {
    block: Block,
    shape: Dims,
    dtype: DType,
    place: Place,
}

impl Tensor {
    /// A tensor with undefined contents.
    ///
    /// **Errors**: [`Error::Invalid`] for more than [`MAX_RANK`] dimensions or a size beyond the address space;
    /// [`Error::OutOfMemory`] and [`Error::Driver`] from the device.
    pub fn empty(stream: &Stream, shape: &[usize], dtype: DType) -> Result<Self, Error> {
        let dims = Dims::new(shape)?;
        let bytes = dims.checked_bytes("Tensor::empty", "shape", dtype)?;
        let block = stream.device().pool().allocate(bytes, stream)?;
        Ok(Tensor { block, shape: dims, dtype, place: stream.device().place() })
    }

    /// A tensor of zero bytes.
    ///
    /// **Errors**: as [`Tensor::empty`].
    pub fn zeros(stream: &Stream, shape: &[usize], dtype: DType) -> Result<Self, Error> {
        let tensor = Self::empty(stream, shape, dtype)?;
        stream.fill_zero(tensor.block.address(), tensor.bytes())?;
        Ok(tensor)
    }

    /// A tensor of these elements, outermost dimension first. [`TensorViewMut::write`] is for a tensor that is there.
    ///
    /// **Errors**: as [`Tensor::empty`], and [`Error::Invalid`] for more or fewer elements than `shape` has.
    pub fn from_slice<T: Element>(stream: &Stream, shape: &[usize], data: &[T]) -> Result<Self, Error> {
        let mut tensor = Self::empty(stream, shape, T::DTYPE)?;
        tensor.view_mut().upload("Tensor::from_slice", stream, T::DTYPE, bytemuck::cast_slice(data))?;
        Ok(tensor)
    }

    /// A tensor of elements given as their bytes in little-endian order.
    ///
    /// **Errors**: as [`Tensor::from_slice`].
    pub fn from_bytes(stream: &Stream, shape: &[usize], dtype: DType, data: &[u8]) -> Result<Self, Error> {
        let mut tensor = Self::empty(stream, shape, dtype)?;
        tensor.view_mut().upload("Tensor::from_bytes", stream, dtype, data)?;
        Ok(tensor)
    }

    /// The elements, after all work on `stream` so far. [`TensorView::read_into`] is for a slice that is there.
    ///
    /// **Errors**: [`Error::Invalid`] if `T` is another type or `stream` another device's; [`Error::Driver`] also for work of
    /// the stream that failed.
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
        if self.len() == 0 {
            return true;
        }
        let mut step = 1;
        for axis in (0..self.shape.rank).rev() {
            if self.shape[axis] != 1 && self.strides[axis] != step {
                return false;
            }
            step *= self.shape[axis];
        }
        true
    }

    /// Checks that `bytes` bytes of `dtype` on the host are what a copy in `stream`'s order moves to or from this view.
    fn expect_host(
        &self,
        op: &'static str,
        stream: &Stream,
        dtype: DType,
        bytes: usize,
    ) -> Result<(), Error> {
        if dtype != self.dtype {
            return Err(Error::invalid(op, "dtype", self.dtype.name(), dtype.name()));
        }
        if !self.is_contiguous() {
            let got = format!("shape {:?} with strides {:?}", self.shape, self.strides);
            return Err(Error::invalid(op, "view", "a contiguous view", got));
        }
        if self.place != stream.device().place() {
            let (expected, got) = (self.place.to_string(), stream.device().place().to_string());
            return Err(Error::invalid(op, "stream", expected, got));
        }
        let wanted = self.len() * dtype.bytes();
        if bytes != wanted {
            let expected = format!("{wanted} bytes for {:?} of {dtype}", self.shape);
            return Err(Error::invalid(op, "data", expected, format!("{bytes} bytes")));
        }
        Ok(())
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
        if Dims::volume(shape) != Some(self.len()) {
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
                shape.checked_bytes(stringify!($view), "shape", dtype)?;
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

            /// The same elements with two axes in each other's place.
            pub fn swap_axes(mut self, a: usize, b: usize) -> Result<Self, Error> {
                let rank = self.raw.shape.rank;
                if a >= rank || b >= rank {
                    let expected = format!("axes of {:?}", self.raw.shape);
                    return Err(Error::invalid(
                        "TensorView::swap_axes",
                        "axes",
                        expected,
                        format!("{a} and {b}"),
                    ));
                }
                self.raw.shape.values.swap(a, b);
                self.raw.strides.values.swap(a, b);
                Ok(self)
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

            /// [`Self::expect`] of all sizes: those of another argument.
            pub(crate) fn expect_same(
                &self,
                op: &'static str,
                argument: &'static str,
                device: &Device,
                dtype: DType,
                shape: &[usize],
            ) -> Result<(), Error> {
                let mut sizes = [None; MAX_RANK];
                for (size, &wanted) in std::iter::zip(&mut sizes, shape) {
                    *size = Some(wanted);
                }
                self.expect(op, argument, device, dtype, &sizes[..shape.len()])
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

            /// Checks that the elements lie without gaps.
            pub(crate) fn expect_contiguous(
                &self,
                op: &'static str,
                argument: &'static str,
            ) -> Result<(), Error> {
                if self.is_contiguous() {
                    Ok(())
                } else {
                    Err(Error::invalid(op, argument, "contiguous", format!("strides {:?}", self.strides())))
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
    /// The same elements so many times along an axis of size 1, without a copy.
    ///
    /// **Errors**: [`Error::Invalid`] for an axis of another size, and for more elements than fit the address space.
    pub fn repeat(mut self, axis: usize, times: usize) -> Result<Self, Error> {
        if self.raw.shape.get(axis) != Some(&1) {
            let expected = format!("an axis of size 1 of {:?}", self.raw.shape);
            return Err(Error::invalid("TensorView::repeat", "axis", expected, axis.to_string()));
        }
        self.raw.shape.values[axis] = times;
        self.raw.strides.values[axis] = 0;
        // There is no such memory, but sizes in elements and bytes are computed of any view.
        self.raw.shape.checked_bytes("TensorView::repeat", "times", self.raw.dtype)?;
        Ok(self)
    }

    /// The elements in order, after all work on `stream` so far; the view must be contiguous.
    ///
    /// **Errors**: as [`TensorView::read_into`].
    pub fn to_vec<T: Element>(&self, stream: &Stream) -> Result<Vec<T>, Error> {
        // Before so much is allocated.
        self.raw.expect_host("TensorView::to_vec", stream, T::DTYPE, self.len() * size_of::<T>())?;
        let mut data = vec![T::zeroed(); self.len()];
        self.read_into(stream, &mut data)?;
        Ok(data)
    }

    /// Copies the elements in order to the host, after all work on `stream` so far, for which it waits; the view must be
    /// contiguous.
    ///
    /// **Errors**: [`Error::Invalid`] if `T` is another type, `data` of another length, the view has gaps, or `stream` is
    /// another device's; [`Error::Driver`] also for work of the stream that failed.
    pub fn read_into<T: Element>(&self, stream: &Stream, data: &mut [T]) -> Result<(), Error> {
        let data: &mut [u8] = bytemuck::cast_slice_mut(data);
        self.raw.expect_host("TensorView::read_into", stream, T::DTYPE, data.len())?;
        stream.download(self.address(), data)
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

    /// Copies elements from the host, in order, after all work on `stream` so far; the view must be contiguous. `data` may
    /// be dropped or changed at once.
    ///
    /// **Errors**: [`Error::Invalid`] if `T` is another type, `data` of another length, the view has gaps, or `stream` is
    /// another device's; [`Error::Driver`].
    pub fn write<T: Element>(&mut self, stream: &Stream, data: &[T]) -> Result<(), Error> {
        self.upload("TensorViewMut::write", stream, T::DTYPE, bytemuck::cast_slice(data))
    }

    /// [`Self::write`] of elements of `dtype` given as their bytes in little-endian order, for the function `op`.
    pub(crate) fn upload(
        &mut self,
        op: &'static str,
        stream: &Stream,
        dtype: DType,
        data: &[u8],
    ) -> Result<(), Error> {
        self.raw.expect_host(op, stream, dtype, data.len())?;
        stream.upload(self.address(), data)
    }

    /// The rows of axis 0 before `at`, and the others.
    pub fn split(self, at: usize) -> Result<(Self, Self), Error> {
        let raw = self.raw;
        let rows = raw.shape.first().copied().unwrap_or(0);
        let (before, after) = (raw.slice(0, 0..at.min(rows))?, raw.slice(0, at..rows.max(at))?);
        // Or the parts would interleave.
        if raw.len() > 0 && raw.slice(0, 0..1)?.span() > raw.strides[0] && rows > 1 {
            let (expected, got) = ("axis 0 outermost", format!("strides {:?}", raw.strides));
            return Err(Error::invalid("TensorViewMut::split", "view", expected, got));
        }
        let view = |raw| TensorViewMut { raw, life: PhantomData };
        Ok((view(before), view(after)))
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

impl FloatElement for F8E4M3 {
    fn to_f32(self) -> f32 {
        F8E4M3::to_f32(self)
    }
    fn from_f32(value: f32) -> Self {
        F8E4M3::from_f32(value)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Where a view's elements lie relative to its first, in order: the definition, index by index.
    fn offsets(shape: &[usize], strides: &[usize]) -> Vec<usize> {
        let mut offsets = vec![0];
        for (&size, &stride) in std::iter::zip(shape, strides) {
            offsets = offsets.iter().flat_map(|&o| (0..size).map(move |index| o + index * stride)).collect();
        }
        offsets
    }

    /// Offsets of a view of f32 from `start`.
    fn view_offsets(view: &TensorView<'_>, start: u64) -> Vec<usize> {
        let first = (view.address() - start) as usize / 4;
        offsets(view.shape(), view.strides()).into_iter().map(|offset| first + offset).collect()
    }

    /// Whether some strides give these offsets, found by trying the only candidates.
    fn needs_no_copy(offsets: &[usize], shape: &[usize]) -> bool {
        let mut step = 1;
        let mut strides = vec![0; shape.len()];
        for axis in (0..shape.len()).rev() {
            if shape[axis] > 1 {
                match offsets[step].checked_sub(offsets[0]) {
                    Some(stride) => strides[axis] = stride,
                    None => return false,
                }
            }
            step *= shape[axis];
        }
        let found = self::offsets(shape, &strides).into_iter().map(|offset| offsets[0] + offset);
        found.eq(offsets.iter().copied())
    }

    /// Shapes of up to [`MAX_RANK`] small axes, with ones among them.
    fn shape() -> impl Strategy<Value = Vec<usize>> {
        prop::collection::vec(prop_oneof![1 => Just(1usize), 4 => 1usize..7, 1 => Just(8usize)], 0..=MAX_RANK)
    }

    /// A shape with strides: contiguous or with gaps, sometimes with its axes permuted.
    fn strided() -> impl Strategy<Value = (Vec<usize>, Vec<usize>)> {
        let gaps = prop::collection::vec(prop_oneof![3 => Just(0usize), 1 => 1usize..9], MAX_RANK);
        (shape(), gaps, prop_oneof![3 => Just(0usize), 1 => 0usize..MAX_RANK]).prop_map(
            |(shape, gaps, turn)| {
                let mut step = 1;
                let mut axes: Vec<(usize, usize)> = Vec::new();
                for (&size, gap) in std::iter::zip(shape.iter().rev(), gaps) {
                    axes.push((size, step));
                    step = step * size + gap;
                }
                axes.reverse();
                let turn = turn % axes.len().max(1);
                axes.rotate_left(turn);
                axes.into_iter().unzip()
            },
        )
    }

    /// A shape of the same number of elements: the prime factors of the first in a new grouping.
    fn regrouped(shape: &[usize], choices: &[usize]) -> Vec<usize> {
        let mut groups = vec![1; 1 + choices[0] % MAX_RANK];
        let mut choices = choices.iter().cycle();
        let mut group = 0;
        for &size in shape {
            let mut rest = size;
            while rest > 1 {
                let factor = (2..=rest).find(|factor| rest % factor == 0).unwrap_or(rest);
                rest /= factor;
                // In order, so that many regroupings need no copy.
                if choices.next().is_some_and(|choice| choice % 2 == 0) && group + 1 < groups.len() {
                    group += 1;
                }
                groups[group] *= factor;
            }
        }
        groups
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4000) })]

        /// A reshaped view has the same elements in the same order; it fails only where that needs a copy.
        #[test]
        fn reshape_keeps_elements(
            (shape, strides) in strided(),
            choices in prop::collection::vec(0usize..100, 1..12),
        ) {
            // SAFETY: the memory is not read.
            let view = unsafe { TensorView::from_raw(&Device::cpu(), 1 << 20, &shape, &strides, DType::F32) };
            let view = view.map_err(|e| TestCaseError::fail(e.to_string()))?;
            let before = view_offsets(&view, 1 << 20);
            let wanted = regrouped(&shape, &choices);
            match view.reshape(&wanted) {
                Ok(new) => {
                    prop_assert_eq!(new.shape(), &wanted[..]);
                    prop_assert_eq!(view_offsets(&new, 1 << 20), before, "{:?} {:?}", shape, strides);
                }
                Err(error) => {
                    prop_assert!(!needs_no_copy(&before, &wanted), "{}", error);
                    let expected = format!(
                        "TensorView::reshape: shape: expected a shape that needs no copy, got {wanted:?} from {shape:?} \
                         with strides {strides:?}"
                    );
                    prop_assert_eq!(error.to_string(), expected);
                }
            }
        }

        /// A slice has the elements whose index on the axis is in the range.
        #[test]
        fn slice_keeps_elements((shape, strides) in strided(), axis: usize, from: usize, to: usize) {
            prop_assume!(!shape.is_empty());
            let axis = axis % shape.len();
            let (from, to) = (from % (shape[axis] + 1), to % (shape[axis] + 1));
            let range = from.min(to)..from.max(to);
            // SAFETY: the memory is not read.
            let view = unsafe { TensorView::from_raw(&Device::cpu(), 1 << 20, &shape, &strides, DType::F32) };
            let view = view.map_err(|e| TestCaseError::fail(e.to_string()))?;
            let inner: usize = shape[axis + 1..].iter().product();
            let wanted: Vec<usize> = view_offsets(&view, 1 << 20)
                .into_iter()
                .enumerate()
                .filter(|(index, _)| range.contains(&(index / inner % shape[axis])))
                .map(|(_, offset)| offset)
                .collect();
            let part = view.slice(axis, range.clone()).map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert_eq!(part.shape()[axis], range.len());
            prop_assert_eq!(view_offsets(&part, 1 << 20), wanted);
        }
    }

    #[test]
    fn swapped_axes() -> Result<(), Error> {
        let stream = Device::cpu().stream()?;
        let tensor = Tensor::zeros(&stream, &[2, 3, 5], DType::F32)?;
        let view = tensor.view().swap_axes(0, 1)?;
        assert_eq!((view.shape(), view.strides()), (&[3, 2, 5][..], &[5, 15, 1][..]));
        assert_eq!(
            view.swap_axes(0, 3).unwrap_err().to_string(),
            "TensorView::swap_axes: axes: expected axes of [3, 2, 5], got 0 and 3"
        );
        Ok(())
    }

    #[test]
    fn repeated_axes() -> Result<(), Error> {
        let stream = Device::cpu().stream()?;
        let tensor = Tensor::zeros(&stream, &[2, 1, 5], DType::F32)?;
        let view = tensor.view().repeat(1, 3)?;
        assert_eq!((view.shape(), view.strides()), (&[2, 3, 5][..], &[5, 0, 1][..]));
        assert!(!view.is_contiguous());
        assert_eq!(
            view.repeat(0, 3).unwrap_err().to_string(),
            "TensorView::repeat: axis: expected an axis of size 1 of [2, 3, 5], got 0"
        );
        Ok(())
    }

    #[test]
    fn slice_refuses_what_is_outside() -> Result<(), Error> {
        let stream = Device::cpu().stream()?;
        let tensor = Tensor::zeros(&stream, &[3, 5], DType::F32)?;
        let message = |axis, range| tensor.view().slice(axis, range).unwrap_err().to_string();
        assert_eq!(
            message(1, 2..6),
            "TensorView::slice: range: expected a range inside axis 1 of [3, 5], got 2..6"
        );
        assert_eq!(
            message(2, 0..0),
            "TensorView::slice: range: expected a range inside axis 2 of [3, 5], got 0..0"
        );
        #[expect(clippy::reversed_empty_ranges)]
        let reversed = message(0, 2..1);
        assert_eq!(reversed, "TensorView::slice: range: expected a range inside axis 0 of [3, 5], got 2..1");
        assert!(tensor.view().slice(1, 5..5)?.is_empty());
        Ok(())
    }

    #[test]
    fn empty_views() -> Result<(), Error> {
        let stream = Device::cpu().stream()?;
        let tensor = Tensor::zeros(&stream, &[3, 5], DType::F32)?;
        // Without elements there are no gaps between them.
        let empty = tensor.view().slice(1, 2..2)?;
        assert!(empty.is_contiguous());
        assert!(empty.to_vec::<f32>(&stream)?.is_empty());
        assert_eq!(empty.reshape(&[0, 7, 2])?.shape(), [0, 7, 2]);
        let error = empty.reshape(&[1, 1]).unwrap_err().to_string();
        assert_eq!(error, "TensorView::reshape: shape: expected 0 elements as in [3, 0], got [1, 1]");
        Ok(())
    }

    /// Sizes whose product does not fit are refused, also beside a 0, where wrapping arithmetic would find it right.
    #[test]
    fn huge_shapes_are_refused() -> Result<(), Error> {
        let stream = Device::cpu().stream()?;
        for shape in [&[usize::MAX, 2][..], &[1 << 62, 1], &[0, usize::MAX, 2], &[1 << 32, 1 << 32, 0]] {
            let error = Tensor::empty(&stream, shape, DType::F32).unwrap_err().to_string();
            assert_eq!(
                error,
                format!("Tensor::empty: shape: expected a size that fits the address space, got {shape:?}")
            );
        }
        let tensor = Tensor::zeros(&stream, &[0, 5], DType::F32)?;
        let error = tensor.view().reshape(&[1 << 32, 1 << 32]).unwrap_err().to_string();
        assert_eq!(
            error,
            "TensorView::reshape: shape: expected 0 elements as in [0, 5], got [4294967296, 4294967296]"
        );
        assert_eq!(
            Tensor::empty(&stream, &[1; 6], DType::F32).unwrap_err().to_string(),
            "Dims: shape: expected at most 5 dimensions, got [1, 1, 1, 1, 1, 1]"
        );
        Ok(())
    }

    #[test]
    fn bytes_and_types_are_checked() -> Result<(), Error> {
        let stream = Device::cpu().stream()?;
        for len in [0, 11, 13] {
            let error =
                Tensor::from_bytes(&stream, &[2, 3], DType::BF16, &vec![0; len]).unwrap_err().to_string();
            assert_eq!(
                error,
                format!("Tensor::from_bytes: data: expected 12 bytes for [2, 3] of bf16, got {len} bytes")
            );
        }
        let tensor = Tensor::from_bytes(&stream, &[2], DType::BF16, &[0x80, 0x3f, 0, 0xc0])?;
        assert_eq!(tensor.to_f32_vec(&stream)?, [1.0, -2.0]);
        assert_eq!(
            tensor.to_vec::<f16>(&stream).unwrap_err().to_string(),
            "TensorView::to_vec: dtype: expected bf16, got f16"
        );
        let ints = Tensor::from_slice(&stream, &[2], &[1u32, 2])?;
        assert_eq!(
            ints.to_f32_vec(&stream).unwrap_err().to_string(),
            "Tensor::to_f32_vec: tensor: expected a float type, got u32"
        );
        let columns = Tensor::from_slice(&stream, &[2, 2], &[1u32, 2, 3, 4])?;
        assert_eq!(
            columns.view().slice(1, 0..1)?.to_vec::<u32>(&stream).unwrap_err().to_string(),
            "TensorView::to_vec: view: expected a contiguous view, got shape [2, 1] with strides [2, 1]"
        );
        assert_eq!(columns.view().slice(0, 1..2)?.to_vec::<u32>(&stream)?, [3, 4]);
        assert_eq!(
            Tensor::from_slice(&stream, &[2, 2], &[1i8, 2, 3]).unwrap_err().to_string(),
            "Tensor::from_slice: data: expected 4 bytes for [2, 2] of i8, got 3 bytes"
        );
        // SAFETY: it is refused before there is a view.
        let view = unsafe { TensorView::from_raw(&Device::cpu(), 0, &[2, 2], &[1], DType::F32) };
        assert_eq!(
            view.unwrap_err().to_string(),
            "TensorView: strides: expected 2 strides for [2, 2], got [1]"
        );
        Ok(())
    }

    /// Elements go to and come from a part of a tensor that is there, and nothing else of it changes.
    #[test]
    fn parts_are_written_and_read() -> Result<(), Error> {
        let stream = Device::cpu().stream()?;
        let mut tensor = Tensor::from_slice(&stream, &[3, 2], &[0u32, 1, 2, 3, 4, 5])?;
        tensor.view_mut().slice(0, 1..2)?.write(&stream, &[20u32, 30])?;
        assert_eq!(tensor.to_vec::<u32>(&stream)?, [0, 1, 20, 30, 4, 5]);
        let mut last = [9u32; 4];
        tensor.view().slice(0, 1..3)?.read_into(&stream, &mut last)?;
        assert_eq!(last, [20, 30, 4, 5]);
        tensor.view_mut().slice(0, 3..3)?.write::<u32>(&stream, &[])?;
        tensor.view().slice(1, 0..0)?.read_into::<u32>(&stream, &mut [])?;

        let written = |tensor: &mut Tensor, range, data: &[u32]| {
            tensor.view_mut().slice(1, range)?.write(&stream, data)
        };
        let read = |range, data: &mut [u32]| tensor.view().slice(1, range)?.read_into(&stream, data);
        let message = |result: Result<(), Error>| result.unwrap_err().to_string();
        let gaps = "view: expected a contiguous view, got shape [3, 1] with strides [2, 1]";
        let short = "data: expected 24 bytes for [3, 2] of u32, got 20 bytes";
        assert_eq!(message(read(0..1, &mut [7; 3])), format!("TensorView::read_into: {gaps}"));
        assert_eq!(message(read(0..2, &mut [7; 5])), format!("TensorView::read_into: {short}"));
        assert_eq!(
            message(tensor.view().read_into(&stream, &mut [0f32; 6])),
            "TensorView::read_into: dtype: expected u32, got f32"
        );
        assert_eq!(message(written(&mut tensor, 0..1, &[7; 3])), format!("TensorViewMut::write: {gaps}"));
        assert_eq!(message(written(&mut tensor, 0..2, &[7; 5])), format!("TensorViewMut::write: {short}"));
        assert_eq!(
            message(tensor.view_mut().write(&stream, &[0i32; 6])),
            "TensorViewMut::write: dtype: expected u32, got i32"
        );
        assert_eq!(tensor.to_vec::<u32>(&stream)?, [0, 1, 20, 30, 4, 5]);
        Ok(())
    }

    /// Views beyond the address space have no size in elements or bytes.
    #[test]
    fn huge_views_are_refused() -> Result<(), Error> {
        let stream = Device::cpu().stream()?;
        let tensor = Tensor::zeros(&stream, &[1, 4], DType::F32)?;
        for times in [1 << 59, 1 << 62, usize::MAX] {
            assert_eq!(
                tensor.view().repeat(0, times).map(|view| view.len()).unwrap_err().to_string(),
                format!(
                    "TensorView::repeat: times: expected a size that fits the address space, got [{times}, 4]"
                )
            );
        }
        assert_eq!(tensor.view().repeat(0, 1 << 58)?.len(), 1 << 60);
        // SAFETY: it is refused before there is a view.
        let view = unsafe { TensorViewMut::from_raw(&Device::cpu(), 0, &[1 << 62, 4], &[0, 1], DType::I8) };
        assert_eq!(
            view.unwrap_err().to_string(),
            "TensorViewMut: shape: expected a size that fits the address space, got [4611686018427387904, 4]"
        );
        Ok(())
    }

    /// What the kernels' 16-byte paths ask of a view.
    #[test]
    fn alignment_of_rows() -> Result<(), Error> {
        // SAFETY: the memory is not read.
        let view = |address, shape: &[usize], strides: &[usize]| unsafe {
            TensorView::from_raw(&Device::cpu(), address, shape, strides, DType::BF16)
        };
        assert!(view(4096, &[3, 16], &[24, 1])?.is_aligned_16());
        assert!(!view(4104, &[3, 16], &[24, 1])?.is_aligned_16());
        assert!(!view(4096, &[3, 12], &[24, 1])?.is_aligned_16());
        assert!(!view(4096, &[3, 16], &[20, 1])?.is_aligned_16());
        // There is no second row that the stride could put out of place.
        assert!(view(4096, &[1, 16], &[20, 1])?.is_aligned_16());
        assert!(!view(4096, &[], &[])?.is_aligned_16());
        Ok(())
    }
}
