//! Candle's storage as views of warpforge's, and back.

use candle_core::backend::BackendStorage;
use candle_core::{Layout, Shape};
use host::{DType, Stream, TensorView, TensorViewMut};

use crate::Refused;

/// Storage of candle's that operators compute with: on the CPU, and with the feature `cuda` on a card.
pub(crate) trait Storage: BackendStorage {
    /// The stream in whose order candle uses the memory.
    fn stream(device: &Self::Device) -> Result<Stream, Refused>;

    /// The elements, to read; none of a type that operators do not have. What the stream does behind this call comes
    /// behind whoever writes them now, and what it has done before it before whoever will write them.
    fn elements(&self) -> Option<Elements>;

    /// The elements, to write; the same for whoever reads or writes them.
    fn elements_mut(&mut self) -> Option<Elements>;

    /// A storage of so many elements, whatever they are; none of a type that operators do not have.
    fn made(device: &Self::Device, dtype: DType, len: usize) -> candle_core::Result<Option<Self>>;
}

/// Where elements lie, how many there are, and of what type.
pub(crate) struct Elements {
    pub(crate) address: u64,
    pub(crate) len: usize,
    pub(crate) dtype: DType,
}

/// A storage of candle's, or a copy.
enum Lent<'a, S> {
    Candles(&'a S),
    Own(S),
}

impl<S> Lent<'_, S> {
    fn get(&self) -> &S {
        match self {
            Lent::Candles(storage) => storage,
            Lent::Own(storage) => storage,
        }
    }
}

/// An argument of an operator: candle's memory, or a copy where an operator needs other strides.
pub(crate) struct Operand<'a, S: Storage> {
    op: &'static str,
    argument: &'static str,
    storage: Lent<'a, S>,
    dtype: DType,
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl<'a, S: Storage> Operand<'a, S> {
    /// The tensor as it is, with any strides.
    pub(crate) fn new(
        op: &'static str,
        argument: &'static str,
        storage: &'a S,
        layout: &Layout,
    ) -> Result<Self, Refused> {
        let got = storage.dtype();
        let expected = "f32, f16, bf16 or u32";
        let dtype = match got {
            candle_core::DType::F32 => DType::F32,
            candle_core::DType::F16 => DType::F16,
            candle_core::DType::BF16 => DType::BF16,
            candle_core::DType::U32 => DType::U32,
            _ => return Err(Refused::DType { op, argument, expected, got }),
        };
        let (shape, strides) = (layout.dims().to_vec(), layout.stride().to_vec());
        let (storage, offset) = (Lent::Candles(storage), layout.start_offset());
        Ok(Operand { op, argument, storage, dtype, offset, shape, strides })
    }

    /// With the elements of the last axis side by side: copied if they are not.
    pub(crate) fn rows(
        op: &'static str,
        argument: &'static str,
        storage: &'a S,
        layout: &Layout,
    ) -> Result<Self, Refused> {
        let mut operand = Self::new(op, argument, storage, layout)?;
        if let (Some(1), Some(stride)) = (operand.shape.last(), operand.strides.last_mut()) {
            *stride = 1;
        }
        if operand.strides.last().is_some_and(|&stride| stride != 1) {
            operand.gather()?;
        }
        Ok(operand)
    }

    /// Without any gaps: copied if there are some.
    pub(crate) fn dense(
        op: &'static str,
        argument: &'static str,
        storage: &'a S,
        layout: &Layout,
    ) -> Result<Self, Refused> {
        let mut operand = Self::new(op, argument, storage, layout)?;
        if !operand.view()?.is_contiguous() {
            operand.gather()?;
        }
        Ok(operand)
    }

    /// As [`Operand::rows`], with all axes but the last `keep` as one: copied if they do not merge.
    pub(crate) fn merged(
        op: &'static str,
        argument: &'static str,
        storage: &'a S,
        layout: &Layout,
        keep: usize,
    ) -> Result<Self, Refused> {
        let mut operand = Self::rows(op, argument, storage, layout)?;
        let Some(lead) = operand.shape.len().checked_sub(keep) else {
            let (expected, got) = ("more axes", operand.shape.clone());
            return Err(Refused::Shape { op, argument, expected, got });
        };
        let axes: Vec<usize> = (0..lead).filter(|&axis| operand.shape[axis] != 1).collect();
        let (shape, strides) = (&operand.shape, &operand.strides);
        let merge = axes.windows(2).all(|pair| strides[pair[0]] == strides[pair[1]] * shape[pair[1]]);
        if !merge && !shape.contains(&0) {
            operand.gather()?;
        }
        let rows = product(&operand.shape[..lead]).ok_or_else(|| operand.too_large())?;
        let inner: usize = operand.shape[lead..].iter().product();
        // The innermost of the merged axes steps as all of them do; a single row steps by what it holds.
        let stride = axes.last().map_or(inner, |&axis| operand.strides[axis]);
        operand.shape.splice(..lead, [rows]);
        operand.strides.splice(..lead, [stride]);
        Ok(operand)
    }

    /// A copy without gaps.
    fn gather(&mut self) -> Result<(), Refused> {
        // What candle copies is what the layout reaches, so it has to be within the storage.
        self.view()?;
        let len = product(&self.shape).ok_or_else(|| self.too_large())?;
        let layout = Layout::new(Shape::from(&self.shape[..]), self.strides.clone(), self.offset);
        let storage = self.storage.get();
        let copy = S::made(storage.device(), self.dtype, len)?;
        let mut copy = copy.ok_or_else(|| self.too_large())?;
        storage.copy_strided_src(&mut copy, 0, &layout)?;
        self.storage = Lent::Own(copy);
        self.offset = 0;
        self.strides = Layout::contiguous(Shape::from(&self.shape[..])).stride().to_vec();
        Ok(())
    }

    fn too_large(&self) -> Refused {
        let (op, argument, got) = (self.op, self.argument, self.shape.clone());
        Refused::Shape { op, argument, expected: "sizes whose product is a usize", got }
    }

    /// Sizes, outermost first.
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Type of the elements.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device of candle's that has it.
    pub(crate) fn device(&self) -> &S::Device {
        self.storage.get().device()
    }

    /// The stream in whose order candle uses it.
    pub(crate) fn stream(&self) -> Result<Stream, Refused> {
        S::stream(self.device())
    }

    /// The elements, to be read as long as the argument is there.
    pub(crate) fn view(&self) -> Result<TensorView<'_>, Refused> {
        let Elements { address, len, dtype } =
            self.storage.get().elements().ok_or_else(|| self.too_large())?;
        let outside = || Refused::Layout { op: self.op, argument: self.argument, len };
        let mut offset = 0;
        if !self.shape.contains(&0) {
            let mut axes = self.shape.iter().zip(&self.strides);
            let last = axes.try_fold(self.offset, |last, (&size, &stride)| {
                last.checked_add((size - 1).checked_mul(stride)?)
            });
            last.filter(|&last| last < len).ok_or_else(outside)?;
            offset = self.offset * dtype.bytes();
        }
        let (stream, address) = (self.stream()?, address + offset as u64);
        // SAFETY: candle has given all of the storage's elements values; from the first to the last that shape and
        // strides reach they are in it, as was found above; it is borrowed, or owned, for the view's life, and nobody
        // writes it meanwhile: on a card candle writes and frees it in the order of this stream, or behind what that
        // has done by the time that this operand is dropped.
        Ok(unsafe { TensorView::from_raw(stream.device(), address, &self.shape, &self.strides, dtype) }?)
    }
}

impl<S: Storage> Drop for Operand<'_, S> {
    fn drop(&mut self) {
        self.storage.get().elements();
    }
}

/// The product of sizes, if it is a usize.
pub(crate) fn product(sizes: &[usize]) -> Option<usize> {
    sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size))
}

/// The result of an operator, without gaps.
pub(crate) struct Output<S> {
    storage: S,
    dtype: DType,
    shape: Vec<usize>,
}

impl<S: Storage> Output<S> {
    /// For a shape and a type, one of those that an [`Operand`] has, beside that operand.
    pub(crate) fn new(
        op: &'static str,
        beside: &Operand<'_, S>,
        shape: &[usize],
        dtype: DType,
    ) -> Result<Self, Refused> {
        let bytes = product(shape).and_then(|len| len.checked_mul(dtype.bytes()));
        let fits = bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok());
        let storage = if fits { S::made(beside.device(), dtype, shape.iter().product())? } else { None };
        let (argument, expected, got) = ("out", "a size that fits the address space", shape.to_vec());
        let storage = storage.ok_or(Refused::Shape { op, argument, expected, got })?;
        Ok(Output { storage, dtype, shape: shape.to_vec() })
    }

    /// The elements in another shape of as many, to be written.
    pub(crate) fn view_mut(&mut self, shape: &[usize]) -> Result<TensorViewMut<'_>, Refused> {
        let stream = S::stream(self.storage.device())?;
        let len = product(&self.shape);
        // `new` has made no type that operators do not have.
        let address = self.storage.elements_mut().map_or(0, |elements| elements.address);
        if product(shape) != len {
            let (op, argument, expected) = ("warpforge-candle", "out", "as many elements");
            return Err(Refused::Shape { op, argument, expected, got: shape.to_vec() });
        }
        let strides = Layout::contiguous(Shape::from(shape)).stride().to_vec();
        // SAFETY: memory of as many elements, which is borrowed alone for the view's life; on a card candle frees it in
        // the order of this stream.
        Ok(unsafe { TensorViewMut::from_raw(stream.device(), address, shape, &strides, self.dtype) }?)
    }

    /// What candle takes: whatever it does with it now, also in other streams, comes behind the work that writes it.
    pub(crate) fn finish(mut self) -> (S, Shape) {
        self.storage.elements_mut();
        (self.storage, Shape::from(self.shape))
    }
}
