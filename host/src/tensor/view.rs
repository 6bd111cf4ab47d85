//! Views: strided tensors of borrowed memory.

use std::marker::PhantomData;
use std::ops::Range;

use abi::DType;

use super::{Dims, Element, MAX_RANK};
use crate::device::Device;
use crate::error::Error;
use crate::param::Param;
use crate::profile::Place;
use crate::staging::Download;
use crate::stream::Stream;

/// Address, shape, strides: what both kinds of view are made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawView {
    pub(super) address: u64,
    pub(super) shape: Dims,
    pub(super) strides: Dims,
    pub(super) dtype: DType,
    pub(super) place: Place,
    /// Whether nothing writes it as long as there are views of it.
    pub(super) constant: bool,
}

/// A strided tensor to read. Strides are in elements.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub(super) raw: RawView,
    life: PhantomData<&'a [u8]>,
}

/// A strided tensor to write. Strides are in elements.
#[derive(Debug)]
pub struct TensorViewMut<'a> {
    pub(super) raw: RawView,
    life: PhantomData<&'a mut [u8]>,
}

impl RawView {
    pub(super) fn len(&self) -> usize {
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

    /// Checks address and strides that did not come from a tensor, for the function `op`.
    fn expect_addressable(&self, op: &'static str) -> Result<(), Error> {
        if self.len() == 0 {
            return Ok(());
        }
        let bytes = self.dtype.bytes();
        if self.address == 0 || !self.address.is_multiple_of(bytes as u64) {
            let expected = format!("an address that is a multiple of {bytes}, and not null");
            return Err(Error::invalid(op, "address", expected, format!("{:#x}", self.address)));
        }
        let last = std::iter::zip(&*self.shape, &*self.strides)
            .try_fold(0usize, |last, (size, stride)| last.checked_add((size - 1).checked_mul(*stride)?));
        let span = last.and_then(|last| last.checked_add(1)?.checked_mul(bytes));
        let end = span.filter(|&span| span <= isize::MAX as usize);
        if end.and_then(|span| self.address.checked_add(span as u64)).is_none() {
            let expected = format!("elements within the address space for {:?}", self.shape);
            return Err(Error::invalid(op, "strides", expected, format!("{:?}", self.strides)));
        }
        Ok(())
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
            /// A view of what a tensor, borrowed as long, holds.
            pub(super) fn of(raw: RawView) -> Self {
                $view { raw, life: PhantomData }
            }

            /// A view of memory that the caller vouches for: another library's buffer, or a part of one.
            ///
            /// # Safety
            /// - `address` is valid on `device` from the first to the last of the elements that shape and strides
            ///   reach, for the life `'a` and until work that was enqueued with the view is done; for a `TensorViewMut`
            ///   nobody else uses them.
            /// - On the CPU all of this holds of the gaps between the elements too, since an operator has the view's
            ///   memory as one slice there: two mutable views of columns that interleave must not be used at a time. On
            ///   a card only the elements are accessed.
            ///
            /// **Errors**: [`Error::Invalid`] for more than [`MAX_RANK`] dimensions, as many strides as sizes are not,
            /// elements that reach beyond the address space, and, of a view with elements, an address that is null or
            /// not aligned to the element type.
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
                let place = device.place();
                let raw = RawView { address, shape, strides, dtype, place, constant: false };
                raw.expect_addressable(stringify!($view))?;
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

            /// Whether rows can be read in pieces of 16 bytes: address, all strides but the last, and the last
            /// dimension are multiples of 16 bytes.
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
    /// Whether nothing writes the elements as long as there are views of them: those of a
    /// [`Constant`](super::Constant).
    pub fn is_constant(&self) -> bool {
        self.raw.constant
    }

    /// The same as one of what nothing writes, for memory of another library that holds weights.
    ///
    /// # Safety
    /// - What has been written to the elements is there, and nothing writes them until all work that was enqueued with
    ///   the view, or is recorded with it, is done: kernels may read them before those ahead in the stream have ended.
    pub unsafe fn assume_constant(mut self) -> Self {
        self.raw.constant = true;
        self
    }

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

    /// Copies the elements in order to the host, after all work on `stream` so far, for which it waits; the view must
    /// be contiguous.
    ///
    /// **Errors**: [`Error::Invalid`] if `T` is another type, `data` of another length, the view has gaps, or `stream`
    /// is another device's; [`Error::Driver`] also for work of the stream that failed.
    pub fn read_into<T: Element>(&self, stream: &Stream, data: &mut [T]) -> Result<(), Error> {
        let data: &mut [u8] = bytemuck::cast_slice_mut(data);
        self.raw.expect_host("TensorView::read_into", stream, T::DTYPE, data.len())?;
        stream.queue().download(self.address(), data)
    }

    /// Copies the elements in order to the host, after all work on `stream` so far, and does not wait for it: the
    /// elements are read from what comes back, when they are there. The view must be contiguous; the tensor may be
    /// dropped at once where it belongs to `stream`.
    ///
    /// The elements go through the device's [staging memory](crate::Device::staging), which takes no allocation once it
    /// is warm. Where that has no room for them this waits, as [`TensorView::read_into`] does.
    ///
    /// **Errors**: [`Error::Invalid`] if `T` is another type, the view has gaps, or `stream` is another device's or is
    /// recorded; [`Error::Driver`].
    ///
    /// ```
    /// # fn main() -> Result<(), host::Error> {
    /// # let stream = host::Device::cpu().stream()?;
    /// let tokens = host::Tensor::from_slice(&stream, &[3], &[7u32, 8, 9])?;
    /// let mut download = tokens.view().enqueue_read::<u32>(&stream)?;
    /// drop(tokens); // and the host goes on
    /// assert_eq!(download.read()?, [7, 8, 9]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// To await the elements, await `Stream::finished` (feature `async`) from just behind this call.
    pub fn enqueue_read<T: Element>(&self, stream: &Stream) -> Result<Download<T>, Error> {
        let bytes = self.len() * size_of::<T>();
        self.raw.expect_host("TensorView::enqueue_read", stream, T::DTYPE, bytes)?;
        stream.device().staging().download(stream.queue(), self.address(), bytes).map(Download::new)
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

impl<'a> TensorView<'a> {
    /// A view of another shape and type at this place, which stands for something of that size: nothing may be read by
    /// it.
    pub(crate) fn outline(self, shape: &[usize], dtype: DType) -> Result<TensorView<'a>, Error> {
        let shape = Dims::new(shape)?;
        let raw = RawView { shape, strides: shape.contiguous_strides(), dtype, ..self.raw };
        Ok(TensorView { raw, life: PhantomData })
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

    /// Copies elements from the host, in order, after all work on `stream` so far; the view must be contiguous. `data`
    /// may be dropped or changed at once.
    ///
    /// **Errors**: [`Error::Invalid`] if `T` is another type, `data` of another length, the view has gaps, or `stream`
    /// is another device's; [`Error::Driver`].
    pub fn write<T: Element>(&mut self, stream: &Stream, data: &[T]) -> Result<(), Error> {
        self.upload("TensorViewMut::write", stream, T::DTYPE, bytemuck::cast_slice(data))
    }

    /// [`Self::write`] that does not wait for the device, whatever the size: the elements go through the device's
    /// [staging memory](crate::Device::staging), which takes no allocation once it is warm. Where that has no room for
    /// them this is [`Self::write`].
    ///
    /// `write` alone does not wait either where the driver has room for all elements, which is up to about a megabyte,
    /// and is faster for more where the stream has nothing to do, since the driver copies in parts.
    ///
    /// **Errors**: as [`Self::write`], and [`Error::Invalid`] while the stream is recorded.
    pub fn enqueue_write<T: Element>(&mut self, stream: &Stream, data: &[T]) -> Result<(), Error> {
        let data: &[u8] = bytemuck::cast_slice(data);
        self.raw.expect_host("TensorViewMut::enqueue_write", stream, T::DTYPE, data.len())?;
        stream.device().staging().upload(stream.queue(), self.address(), data)
    }

    /// Sets all elements to zero, in order, after all work on `stream` so far; the view must be contiguous.
    ///
    /// **Errors**: [`Error::Invalid`] if the view has gaps, or `stream` is another device's; [`Error::Driver`].
    pub fn fill_zero(&mut self, stream: &Stream) -> Result<(), Error> {
        let bytes = self.len() * self.dtype().bytes();
        self.raw.expect_host("TensorViewMut::fill_zero", stream, self.dtype(), bytes)?;
        stream.queue().fill_zero(self.address(), bytes)
    }

    /// [`Self::write`] of elements of the view's type given as their bytes in little-endian order.
    pub fn write_bytes(&mut self, stream: &Stream, data: &[u8]) -> Result<(), Error> {
        self.upload("TensorViewMut::write_bytes", stream, self.dtype(), data)
    }

    /// [`Self::write`] of elements of `dtype` given as their bytes, for the function `op`.
    pub(crate) fn upload(
        &mut self,
        op: &'static str,
        stream: &Stream,
        dtype: DType,
        data: &[u8],
    ) -> Result<(), Error> {
        self.raw.expect_host(op, stream, dtype, data.len())?;
        stream.queue().upload(self.address(), data)
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
        // SAFETY: host memory, valid and unshared for the view's life over its span — by Tensor, or promised to
        // from_raw.
        unsafe { std::slice::from_raw_parts_mut(self.raw.address as *mut T, self.raw.span()) }
    }
}

impl From<TensorView<'_>> for Param<'_> {
    fn from(view: TensorView<'_>) -> Self {
        Param::Address(view.address())
    }
}

/// Null for a tensor that is not there.
impl From<Option<TensorView<'_>>> for Param<'_> {
    fn from(view: Option<TensorView<'_>>) -> Self {
        view.map_or(Param::Address(0), Param::from)
    }
}

/// Null for a tensor that is not there.
impl From<Option<&TensorViewMut<'_>>> for Param<'_> {
    fn from(view: Option<&TensorViewMut<'_>>) -> Self {
        view.map_or(Param::Address(0), Param::from)
    }
}

impl From<&TensorViewMut<'_>> for Param<'_> {
    fn from(view: &TensorViewMut<'_>) -> Self {
        Param::Address(view.address())
    }
}

impl Stream {
    /// Copies a contiguous tensor to another of the same size and type by the driver's own copy; strides and casts are
    /// the operator [`crate::ops::copy`]'s.
    ///
    /// **Errors**: [`Error::Invalid`] for a shape, type or place that differs, and gaps between elements;
    /// [`Error::Driver`].
    pub fn copy(&self, from: TensorView<'_>, to: TensorViewMut<'_>) -> Result<(), Error> {
        const OP: &str = "Stream::copy";
        from.expect_same(OP, "from", self.device(), from.dtype(), from.shape())?;
        to.expect_same(OP, "to", self.device(), from.dtype(), from.shape())?;
        for (argument, contiguous) in [("from", from.is_contiguous()), ("to", to.is_contiguous())] {
            if !contiguous {
                return Err(Error::invalid(OP, argument, "a contiguous view", "gaps between the elements"));
            }
        }
        let bytes = from.len() * from.dtype().bytes();
        self.queue().copy(from.address(), to.address(), bytes)
    }
}
