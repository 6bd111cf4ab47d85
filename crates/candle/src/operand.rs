//! Candle's storage as views of warpforge's, and back.

use std::borrow::Cow;
use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Shape};
use half::{bf16, f16};
use host::{DType, Device, Error, Stream, TensorView, TensorViewMut};

use crate::Refused;

/// The stream of the CPU, whose work is done at once.
pub(crate) fn cpu() -> Result<&'static Stream, Error> {
    static CPU: OnceLock<Stream> = OnceLock::new();
    match CPU.get() {
        Some(stream) => Ok(stream),
        None => {
            let stream = Device::cpu().stream()?;
            Ok(CPU.get_or_init(|| stream))
        }
    }
}

/// Address and number of the elements of a storage, and their type; none of a type that operators do not have.
fn elements(storage: &CpuStorage) -> Option<(u64, usize, DType)> {
    Some(match storage {
        CpuStorage::F32(values) => (values.as_ptr() as u64, values.len(), DType::F32),
        CpuStorage::F16(values) => (values.as_ptr() as u64, values.len(), DType::F16),
        CpuStorage::BF16(values) => (values.as_ptr() as u64, values.len(), DType::BF16),
        CpuStorage::U32(values) => (values.as_ptr() as u64, values.len(), DType::U32),
        _ => return None,
    })
}

/// A storage of so many zeros.
fn zeros(dtype: DType, len: usize) -> Option<CpuStorage> {
    Some(match dtype {
        DType::F32 => CpuStorage::F32(vec![0.0; len]),
        DType::F16 => CpuStorage::F16(vec![f16::ZERO; len]),
        DType::BF16 => CpuStorage::BF16(vec![bf16::ZERO; len]),
        DType::U32 => CpuStorage::U32(vec![0; len]),
        _ => return None,
    })
}

/// An argument of an operator: candle's memory, or a copy where an operator needs other strides.
pub(crate) struct Operand<'a> {
    op: &'static str,
    argument: &'static str,
    storage: Cow<'a, CpuStorage>,
    dtype: DType,
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl<'a> Operand<'a> {
    /// The tensor as it is, with any strides.
    pub(crate) fn new(
        op: &'static str,
        argument: &'static str,
        storage: &'a CpuStorage,
        layout: &Layout,
    ) -> Result<Self, Refused> {
        let got = storage.dtype();
        let expected = "f32, f16, bf16 or u32";
        let (_, _, dtype) = elements(storage).ok_or(Refused::DType { op, argument, expected, got })?;
        let (shape, strides) = (layout.dims().to_vec(), layout.stride().to_vec());
        let (storage, offset) = (Cow::Borrowed(storage), layout.start_offset());
        Ok(Operand { op, argument, storage, dtype, offset, shape, strides })
    }

    /// With the elements of the last axis side by side: copied if they are not.
    pub(crate) fn rows(
        op: &'static str,
        argument: &'static str,
        storage: &'a CpuStorage,
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
        storage: &'a CpuStorage,
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
        storage: &'a CpuStorage,
        layout: &Layout,
        keep: usize,
    ) -> Result<Self, Refused> {
        let mut operand = Self::rows(op, argument, storage, layout)?;
        let Some(lead) = operand.shape.len().checked_sub(keep) else {
            let (expected, got) = ("more axes", operand.shape);
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
        let mut copy = zeros(self.dtype, len).ok_or_else(|| self.too_large())?;
        self.storage.copy_strided_src(&mut copy, 0, &layout)?;
        self.storage = Cow::Owned(copy);
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

    /// The elements, to be read as long as the argument is there.
    pub(crate) fn view(&self) -> Result<TensorView<'_>, Refused> {
        let (address, len, dtype) = elements(&self.storage).ok_or_else(|| self.too_large())?;
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
        let (device, address) = (cpu()?.device(), address + offset as u64);
        // SAFETY: the storage is a vector, so all of its elements hold values; from the first to the last that shape
        // and strides reach they are in it, as was found above; it is borrowed, or owned, for the view's life, and
        // nobody writes it meanwhile.
        Ok(unsafe { TensorView::from_raw(device, address, &self.shape, &self.strides, dtype) }?)
    }
}

/// The product of sizes, if it is a usize.
pub(crate) fn product(sizes: &[usize]) -> Option<usize> {
    sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size))
}

/// The result of an operator, without gaps.
pub(crate) struct Output {
    storage: CpuStorage,
    dtype: DType,
    shape: Vec<usize>,
}

impl Output {
    /// For a shape and a type, one of those that an [`Operand`] has.
    pub(crate) fn new(op: &'static str, shape: &[usize], dtype: DType) -> Result<Self, Refused> {
        let bytes = product(shape).and_then(|len| len.checked_mul(dtype.bytes()));
        let fits = bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok());
        let storage = if fits { zeros(dtype, shape.iter().product()) } else { None };
        let (argument, expected, got) = ("out", "a size that fits the address space", shape.to_vec());
        let storage = storage.ok_or(Refused::Shape { op, argument, expected, got })?;
        Ok(Output { storage, dtype, shape: shape.to_vec() })
    }

    /// The elements in another shape of as many, to be written.
    pub(crate) fn view_mut(&mut self, shape: &[usize]) -> Result<TensorViewMut<'_>, Refused> {
        let len = product(&self.shape);
        let address = match &mut self.storage {
            CpuStorage::F32(values) => values.as_mut_ptr() as u64,
            CpuStorage::F16(values) => values.as_mut_ptr() as u64,
            CpuStorage::BF16(values) => values.as_mut_ptr() as u64,
            CpuStorage::U32(values) => values.as_mut_ptr() as u64,
            // `zeros` makes no other.
            _ => 0,
        };
        if product(shape) != len {
            let (op, argument, expected) = ("warpforge-candle", "out", "as many elements");
            return Err(Refused::Shape { op, argument, expected, got: shape.to_vec() });
        }
        let strides = Layout::contiguous(Shape::from(shape)).stride().to_vec();
        // SAFETY: a vector of as many elements, which is borrowed alone for the view's life.
        Ok(unsafe { TensorViewMut::from_raw(cpu()?.device(), address, shape, &strides, self.dtype) }?)
    }

    /// What candle takes.
    pub(crate) fn finish(self) -> (CpuStorage, Shape) {
        (self.storage, Shape::from(self.shape))
    }
}
