//! Weights that are not plain matrices: quantised, and packed in the order in which kernels read them.
//!
//! A [`Weight`] is made once from a [`WeightSource`] and never changes: a plan, a graph or a kernel may rely on that.
//! What its layout is and how it lies in memory is said in [`abi::weight`].

pub(crate) mod cpu;
mod pack;
mod quantise;
mod source;

use std::fmt;

use abi::DType;
use abi::weight::{BLOCK_SCALES, SUPER_K, TILE_K, TILE_ROWS, WeightDims};

use crate::device::Device;
use crate::error::Error;
use crate::param::Param;
use crate::profile::Place;
use crate::stream::Stream;
use crate::tensor::{Constant, Mirror, Tensor, TensorView, Views};
use crate::tensor_map::{Axis, Swizzle, TensorMap, Tiled};

pub use abi::weight::{Codes, Layout, ScaleType};
pub use quantise::{QuantErrors, Quantised, Scheme};
pub use source::{GateUp, Part, RowScales, Stack, WeightSource};

pub(crate) use cpu::number;
pub(crate) use pack::stored_bits;

const OP: &str = "Weight::pack";

/// A packed weight `[n, k]`, or one for each expert.
pub struct Weight {
    layout: Layout,
    experts: usize,
    n: usize,
    k: usize,
    /// Of each expert.
    globals: Vec<f32>,
    /// The same in device memory, where the layout has them and experts differ.
    device_globals: Option<Tensor>,
    /// `[k]` u32: the column at each place, where the layout is permuted.
    order: Option<Constant>,
    /// Constants, which kernels may read ahead.
    tensors: Tensors<Constant>,
}

/// A weight that is being made.
pub(crate) struct Unmade {
    layout: Layout,
    experts: usize,
    n: usize,
    k: usize,
    globals: Vec<f32>,
    device_globals: Option<Tensor>,
    order: Option<Tensor>,
    tensors: Tensors<Tensor>,
}

/// What a weight is in memory; there if the layout has it.
struct Tensors<T> {
    codes: T,
    scales: T,
    zeros: Option<T>,
    minimums: Option<T>,
    supers: Option<T>,
    super_minimums: Option<T>,
}

impl<T> Tensors<T> {
    /// In the order of the kernels' parameters.
    fn each(&self) -> [Option<&T>; 6] {
        let Tensors { codes, scales, zeros, minimums, supers, super_minimums } = self;
        let [zeros, minimums, supers, super_minimums] =
            [zeros, minimums, supers, super_minimums].map(Option::as_ref);
        [Some(codes), Some(scales), zeros, minimums, supers, super_minimums]
    }

    fn each_mut(&mut self) -> [Option<&mut T>; 6] {
        let Tensors { codes, scales, zeros, minimums, supers, super_minimums } = self;
        let [zeros, minimums, supers, super_minimums] =
            [zeros, minimums, supers, super_minimums].map(Option::as_mut);
        [Some(codes), Some(scales), zeros, minimums, supers, super_minimums]
    }

    /// The same of something else.
    fn map<U>(self, mut to: impl FnMut(T) -> Result<U, Error>) -> Result<Tensors<U>, Error> {
        Ok(Tensors {
            codes: to(self.codes)?,
            scales: to(self.scales)?,
            zeros: self.zeros.map(&mut to).transpose()?,
            minimums: self.minimums.map(&mut to).transpose()?,
            supers: self.supers.map(&mut to).transpose()?,
            super_minimums: self.super_minimums.map(&mut to).transpose()?,
        })
    }
}

impl Unmade {
    /// Room for a weight that is to be made on its device, with these global scales of its experts.
    ///
    /// **Errors**: as [`Weight::pack`].
    pub(crate) fn new(
        stream: &Stream,
        layout: Layout,
        size: [usize; 2],
        globals: Vec<f32>,
    ) -> Result<Self, Error> {
        pack::check_experts(&layout, globals.len(), size)?;
        let mut weight = pack::empty(stream, &layout, globals.len(), size)?;
        weight.globals = globals;
        weight.upload_globals(stream)?;
        Ok(weight)
    }

    /// Gives kernels the experts' global scales, if they take some and these differ.
    fn upload_globals(&mut self, stream: &Stream) -> Result<(), Error> {
        let differ = self.globals.iter().any(|&global| global != self.globals[0]);
        if differ && self.layout.stored_scale() == ScaleType::E4m3 {
            self.device_globals = Some(Tensor::from_slice(stream, &[self.experts], &self.globals)?);
        }
        Ok(())
    }

    /// What it is to be: the layout, experts, and rows and columns of each.
    pub(crate) fn what(&self) -> (Layout, usize, [usize; 2]) {
        (self.layout, self.experts, [self.n, self.k])
    }

    /// Codes, scales and zero points, to be made.
    pub(crate) fn parts(&mut self) -> (&mut Tensor, &mut Tensor, Option<&mut Tensor>) {
        let Tensors { codes, scales, zeros, .. } = &mut self.tensors;
        (codes, scales, zeros.as_mut())
    }

    fn counts(&self) -> Counts {
        Counts::new(&self.layout, self.n, self.k)
    }

    /// The weight, as what the stream has made of it by now.
    ///
    /// **Errors**: [`Error::Driver`].
    pub(crate) fn finish(self, stream: &Stream) -> Result<Weight, Error> {
        let Unmade { layout, experts, n, k, globals, device_globals, order, tensors } = self;
        let order = order.map(|order| Constant::new(order, stream)).transpose()?;
        let tensors = tensors.map(|tensor| Constant::new(tensor, stream))?;
        Ok(Weight { layout, experts, n, k, globals, device_globals, order, tensors })
    }
}

macro_rules! debug {
    ($name:ident) => {
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let $name { layout, experts, n, k, globals, .. } = self;
                f.debug_struct(stringify!($name))
                    .field("layout", layout)
                    .field("experts", experts)
                    .field("n", n)
                    .field("k", k)
                    .field("globals", globals)
                    .finish_non_exhaustive()
            }
        }
    };
}
debug!(Weight);
debug!(Unmade);

/// How many numbers of each kind a weight has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    row_blocks: usize,
    tiles: usize,
    stretches: usize,
    per_stretch: usize,
    supers: usize,
}

impl Counts {
    pub(crate) fn new(layout: &Layout, n: usize, k: usize) -> Self {
        let tiles = k.div_ceil(TILE_K as usize);
        let group = if layout.group == 0 { usize::MAX } else { layout.group as usize };
        let wide = group >= TILE_K as usize;
        Counts {
            row_blocks: n.div_ceil(TILE_ROWS as usize),
            tiles,
            stretches: if wide { k.div_ceil(group).max(1) } else { tiles },
            per_stretch: if wide { 1 } else { TILE_K as usize / group },
            supers: k.div_ceil(SUPER_K as usize),
        }
    }

    /// Bytes of the codes.
    pub(crate) fn codes(&self, layout: &Layout) -> Option<usize> {
        self.row_blocks.checked_mul(self.tiles)?.checked_mul(layout.codes.tile_bytes() as usize)
    }

    /// Scales.
    pub(crate) fn scales(&self, layout: &Layout) -> Option<usize> {
        if layout.rows > 1 {
            self.row_blocks
                .div_ceil((layout.rows / TILE_ROWS) as usize)
                .checked_mul(BLOCK_SCALES as usize * self.stretches)
        } else {
            self.row_blocks.checked_mul(self.stretches)?.checked_mul(self.per_stretch * TILE_ROWS as usize)
        }
    }

    /// What kernels are told of it, with a global scale of 1.
    pub(crate) fn dims(&self, layout: &Layout) -> WeightDims {
        let Layout { group, rows, .. } = *layout;
        WeightDims {
            tiles: self.tiles as u32,
            stretches: self.stretches as u32,
            group_log2: if group == 0 { 31 } else { (group / 16).ilog2() },
            rows_log2: if rows > 1 { rows.ilog2() } else { 0 },
            scale: layout.stored_scale() as u32,
            global: 1.0,
            row_blocks: self.row_blocks as u32,
            first_block: 0,
        }
    }
}

impl Weight {
    /// Packs a matrix, uploads it, and waits until it is there: products of any stream may take it. Takes some
    /// megabytes of host memory, whatever its size.
    ///
    /// **Errors**: [`Error::Invalid`] for a layout that kernels cannot take, or a size of 2^31 or more;
    /// [`Error::OutOfMemory`]; [`Error::Driver`].
    pub fn pack(stream: &Stream, source: &dyn WeightSource) -> Result<Self, Error> {
        pack::pack(stream, 1, |_| Ok(source))
    }

    /// Packs the weights of several experts, all of one size and layout, as one. `source` makes that of an expert when
    /// its turn comes.
    ///
    /// **Errors**: as [`Weight::pack`], those of `source`, and for no experts or such that differ.
    pub fn pack_experts<S: WeightSource>(
        stream: &Stream,
        experts: usize,
        source: impl FnMut(usize) -> Result<S, Error>,
    ) -> Result<Self, Error> {
        pack::pack(stream, experts, source)
    }

    /// A weight with codes that are drawn and one scale for all, so that values come to about 0.02: to measure what
    /// has no checkpoint at hand. The same for the same seed.
    ///
    /// **Errors**: as [`Weight::pack`].
    pub fn random(
        stream: &Stream,
        layout: Layout,
        experts: usize,
        size: [usize; 2],
        seed: u64,
    ) -> Result<Self, Error> {
        pack::random(stream, &layout, experts, size, seed)
    }

    /// What it is.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Rows of an expert: columns of a product.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Columns.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Experts; 1 for a single weight.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Where it lies.
    pub fn place(&self) -> Place {
        self.tensors.codes.view().place()
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        let tensors = self.tensors.each().into_iter().flatten().map(|tensor| tensor.bytes());
        let order = self.order.as_ref().map_or(0, |order| order.bytes());
        tensors.sum::<usize>() + self.device_globals.as_ref().map_or(0, Tensor::bytes) + order
    }

    /// `[k]` u32, where the layout is [permuted](Layout::permuted): the column at each place.
    pub fn order(&self) -> Option<TensorView<'_>> {
        self.order.as_ref().map(|order| order.view())
    }

    /// The matrix that it stands for, of which nothing may be read: for checks of sizes and places.
    pub(crate) fn outline(&self, dtype: DType) -> Result<TensorView<'_>, Error> {
        self.tensors.codes.view().outline(&[self.n, self.k], dtype)
    }

    /// The same of all experts.
    pub(crate) fn outline_of_experts(&self, dtype: DType) -> Result<TensorView<'_>, Error> {
        self.tensors.codes.view().outline(&[self.experts, self.n, self.k], dtype)
    }

    fn counts(&self) -> Counts {
        Counts::new(&self.layout, self.n, self.k)
    }

    /// What kernels are told of it.
    pub(crate) fn dims(&self) -> WeightDims {
        WeightDims { global: self.globals[0], ..self.counts().dims(&self.layout) }
    }

    /// The addresses of its parts, in the order of the kernels' parameters.
    pub(crate) fn params(&self) -> [Param<'_>; 6] {
        self.tensors.each().map(|tensor| Param::Address(tensor.map_or(0, |tensor| tensor.view().address())))
    }

    /// The tiles of 8 bits of all experts as rows of 64 bytes, in boxes of a tile of `rows` rows of the weight, which
    /// lie one above the other there.
    pub(crate) fn tiles_map(&self, op: &'static str, device: &Device, rows: u32) -> Result<TensorMap, Error> {
        let counts = self.counts();
        let block_bytes = counts.tiles as u64 * u64::from(self.layout.codes.tile_bytes());
        let blocks = Axis { size: (self.experts * counts.row_blocks) as u64, stride_bytes: block_bytes };
        let tiled = Tiled {
            dtype: DType::I8,
            address: self.tensors.codes.view().address(),
            rows: counts.tiles as u64 * u64::from(TILE_ROWS),
            cols: u64::from(TILE_K),
            stride_bytes: u64::from(TILE_K),
            outer: Some([blocks, Axis { size: 1, ..blocks }]),
            box_rows: TILE_ROWS,
            box_cols: TILE_K,
            box_matrices: rows / TILE_ROWS,
            swizzle: Swizzle::Bytes64,
        };
        device.tensor_map(op, &tiled)
    }

    /// The address of the experts' global scales; null where all have that of [`Weight::dims`].
    pub(crate) fn globals_param(&self) -> Param<'_> {
        Param::Address(self.device_globals.as_ref().map_or(0, |globals| globals.view().address()))
    }

    /// Bytes as they are packed, for tests and for saving: codes, scales, zero points, minimums, super scales, those
    /// of the minimums.
    pub fn parts(&self) -> [Option<&Tensor>; 6] {
        self.tensors.each().map(|tensor| tensor.map(|constant| &**constant))
    }
}

impl Views for &Weight {
    fn bring(&mut self, name: &'static str, mirror: &mut Mirror<'_>) -> Result<(), Error> {
        let Weight { layout, experts, n, k, .. } = **self;
        let Tensors { codes, scales, zeros, minimums, supers, super_minimums } = &self.tensors;
        let mut copy = |tensor: &Constant| mirror.constant(name, tensor);
        let (codes, scales) = (copy(codes)?, copy(scales)?);
        let mut optional = |tensor: &Option<Constant>| tensor.as_ref().map(&mut copy).transpose();
        let (zeros, minimums) = (optional(zeros)?, optional(minimums)?);
        let (supers, super_minimums) = (optional(supers)?, optional(super_minimums)?);
        let tensors = Tensors { codes, scales, zeros, minimums, supers, super_minimums };
        let device_globals = self.device_globals.as_ref();
        let device_globals = device_globals.map(|globals| mirror.tensor(name, globals)).transpose()?;
        let order = self.order.as_ref().map(|order| mirror.constant(name, order)).transpose()?;
        let globals = self.globals.clone();
        let weight = Weight { layout, experts, n, k, globals, device_globals, order, tensors };
        // SAFETY: put among the arguments.
        *self = unsafe { mirror.hold(weight) };
        Ok(())
    }
}

/// The type of the tensors that hold bytes.
const BYTES: DType = DType::I8;
