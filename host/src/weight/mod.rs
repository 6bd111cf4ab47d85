//! Weights that are not plain matrices: quantised, and packed in the order in which kernels read them.
//!
//! A [`Weight`] is made once from a [`WeightSource`] and never changes: a plan, a graph or a kernel may rely on that.
//! What its layout is and how it lies in memory is said in [`abi::weight`].

pub(crate) mod cpu;
mod pack;
mod quantise;

use std::fmt;
use std::ops::{Deref, Range};

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

pub(crate) use cpu::number;
pub(crate) use pack::stored_bits;

const OP: &str = "Weight::pack";

/// A quantised matrix `[n, k]` in any form, to be packed: what a file holds, or a quantiser makes.
///
/// A group is `layout().group` neighbouring elements of a row, or all of them; the last may be shorter.
pub trait WeightSource: Sync {
    /// Rows and columns.
    fn size(&self) -> [usize; 2];

    /// What is to be packed.
    fn layout(&self) -> Layout;

    /// The codes of a row, `k` of them, a byte each; those of 16 bits two bytes, the low one first.
    fn codes(&self, row: usize, codes: &mut [u8]);

    /// The bits of a group's scale in the layout's type.
    fn scale(&self, row: usize, group: usize) -> u32;

    /// The zero point of a group, where the layout has them.
    fn zero(&self, _row: usize, _group: usize) -> u8 {
        self.layout().zero()
    }

    /// The bits of a group's minimum, where the layout has them: what is subtracted from `scale · code`.
    fn minimum(&self, _row: usize, _group: usize) -> u32 {
        0
    }

    /// The binary16 that a scale and a minimum of this stretch of 256 are multiplied by, where the layout has them.
    fn supers(&self, _row: usize, _stretch: usize) -> [u16; 2] {
        [0; 2]
    }

    /// What scales of [`ScaleType::E4m3`] are multiplied by.
    fn global(&self) -> f32 {
        1.0
    }

    /// Where the layout is [permuted](Layout::permuted), which column lies at each place: `k` numbers, all that there
    /// are. Codes and groups are those of places.
    fn order(&self) -> Option<&[u32]> {
        None
    }
}

impl<P: Deref<Target: WeightSource> + Sync> WeightSource for P {
    fn size(&self) -> [usize; 2] {
        (**self).size()
    }

    fn layout(&self) -> Layout {
        (**self).layout()
    }

    fn codes(&self, row: usize, codes: &mut [u8]) {
        (**self).codes(row, codes);
    }

    fn scale(&self, row: usize, group: usize) -> u32 {
        (**self).scale(row, group)
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        (**self).zero(row, group)
    }

    fn minimum(&self, row: usize, group: usize) -> u32 {
        (**self).minimum(row, group)
    }

    fn supers(&self, row: usize, stretch: usize) -> [u16; 2] {
        (**self).supers(row, stretch)
    }

    fn global(&self) -> f32 {
        (**self).global()
    }

    fn order(&self) -> Option<&[u32]> {
        (**self).order()
    }
}

/// A matrix whose blocks of rows share their scales, with a scale for each row: for experts that end inside of a block.
pub struct RowScales<S>(pub S);

impl<S: WeightSource> WeightSource for RowScales<S> {
    fn size(&self) -> [usize; 2] {
        self.0.size()
    }

    fn layout(&self) -> Layout {
        Layout { rows: 1, ..self.0.layout() }
    }

    fn codes(&self, row: usize, codes: &mut [u8]) {
        self.0.codes(row, codes);
    }

    fn scale(&self, row: usize, group: usize) -> u32 {
        self.0.scale(row, group)
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        self.0.zero(row, group)
    }

    fn minimum(&self, row: usize, group: usize) -> u32 {
        self.0.minimum(row, group)
    }

    fn supers(&self, row: usize, stretch: usize) -> [u16; 2] {
        self.0.supers(row, stretch)
    }

    fn global(&self) -> f32 {
        self.0.global()
    }

    fn order(&self) -> Option<&[u32]> {
        self.0.order()
    }
}

/// Some of a matrix's rows, in this order, and of each these columns.
pub struct Part<S> {
    source: S,
    rows: Vec<Range<usize>>,
    cols: Range<usize>,
}

impl<S: WeightSource> Part<S> {
    /// None if they are not in the matrix, or what shares a scale is not taken as a whole: groups of columns, blocks of
    /// rows (but for the last block). Nor of columns in an order of their own, unless it is all of them.
    pub fn new(source: S, rows: Vec<Range<usize>>, cols: Range<usize>) -> Option<Self> {
        let fits = Self::fits(&source.layout(), source.size(), &rows, &cols);
        fits.then_some(Part { source, rows, cols })
    }

    /// Whether a matrix of this layout and size can be cut there.
    pub fn fits(layout: &Layout, [n, k]: [usize; 2], rows: &[Range<usize>], cols: &Range<usize>) -> bool {
        let block = layout.rows as usize;
        let group = match layout.group as usize {
            _ if layout.scale.has_supers() => SUPER_K as usize,
            0 => 1,
            group => group,
        };
        let last = rows.len().saturating_sub(1);
        let is_whole = |(index, range): (usize, &Range<usize>)| {
            let ends = index == last || range.end.is_multiple_of(block);
            range.start <= range.end && range.end <= n && range.start.is_multiple_of(block) && ends
        };
        let are_rows = rows.iter().enumerate().all(is_whole);
        let are_cols = cols.start <= cols.end && cols.end <= k && cols.start.is_multiple_of(group);
        let ends = cols.end == k || cols.end.is_multiple_of(group);
        let are_in_order = !layout.permuted || *cols == (0..k);
        are_rows && are_cols && ends && are_in_order
    }

    fn row(&self, mut row: usize) -> usize {
        for range in &self.rows {
            if row < range.len() {
                return range.start + row;
            }
            row -= range.len();
        }
        // There is none; the source says so.
        usize::MAX
    }

    fn group(&self, group: usize) -> usize {
        // One of all of a row is the first.
        self.cols.start.checked_div(self.source.layout().group as usize).map_or(group, |first| first + group)
    }
}

impl<S: WeightSource> WeightSource for Part<S> {
    fn size(&self) -> [usize; 2] {
        [self.rows.iter().map(ExactSizeIterator::len).sum(), self.cols.len()]
    }

    fn layout(&self) -> Layout {
        self.source.layout()
    }

    fn codes(&self, row: usize, codes: &mut [u8]) {
        let ([_, k], bytes) = (self.source.size(), self.source.layout().codes.bytes());
        if self.cols == (0..k) {
            return self.source.codes(self.row(row), codes);
        }
        let mut all = vec![0; k * bytes];
        self.source.codes(self.row(row), &mut all);
        codes.copy_from_slice(&all[self.cols.start * bytes..self.cols.end * bytes]);
    }

    fn scale(&self, row: usize, group: usize) -> u32 {
        self.source.scale(self.row(row), self.group(group))
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        self.source.zero(self.row(row), self.group(group))
    }

    fn minimum(&self, row: usize, group: usize) -> u32 {
        self.source.minimum(self.row(row), self.group(group))
    }

    fn supers(&self, row: usize, stretch: usize) -> [u16; 2] {
        self.source.supers(self.row(row), self.cols.start / SUPER_K as usize + stretch)
    }

    fn global(&self) -> f32 {
        self.source.global()
    }

    fn order(&self) -> Option<&[u32]> {
        self.source.order()
    }
}

/// The rows of a gate and of up in turn, as one weight: what a gated product takes. Both have the same size, layout,
/// global scale and order of columns.
pub struct GateUp<'a>(pub &'a dyn WeightSource, pub &'a dyn WeightSource);

impl GateUp<'_> {
    /// The layout of such a weight, of two of this one: blocks are of as many rows of each, the even ones of one and
    /// the odd ones of the other.
    pub fn layout_of(each: Layout) -> Layout {
        let rows = if each.rows == 1 { 1 } else { each.rows.checked_mul(2).unwrap_or(each.rows) };
        Layout { rows, ..each }
    }

    fn row(&self, row: usize) -> (&dyn WeightSource, usize) {
        (if row.is_multiple_of(2) { self.0 } else { self.1 }, row / 2)
    }
}

impl WeightSource for GateUp<'_> {
    fn size(&self) -> [usize; 2] {
        let [n, k] = self.0.size();
        [2 * n, k]
    }

    fn layout(&self) -> Layout {
        GateUp::layout_of(self.0.layout())
    }

    fn codes(&self, row: usize, codes: &mut [u8]) {
        let (from, row) = self.row(row);
        from.codes(row, codes);
    }

    fn scale(&self, row: usize, group: usize) -> u32 {
        let (from, row) = self.row(row);
        from.scale(row, group)
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        let (from, row) = self.row(row);
        from.zero(row, group)
    }

    fn minimum(&self, row: usize, group: usize) -> u32 {
        let (from, row) = self.row(row);
        from.minimum(row, group)
    }

    fn supers(&self, row: usize, stretch: usize) -> [u16; 2] {
        let (from, row) = self.row(row);
        from.supers(row, stretch)
    }

    fn global(&self) -> f32 {
        self.0.global()
    }

    fn order(&self) -> Option<&[u32]> {
        self.0.order()
    }
}

/// Matrices of the same width, layout, global scale and order of columns above each other, as one.
pub struct Stack<S> {
    sources: Vec<S>,
    n: usize,
}

impl<S: WeightSource> Stack<S> {
    /// None if they are not alike, or one ends inside of a block of rows that share their scales.
    pub fn new(sources: Vec<S>) -> Option<Self> {
        let first = sources.first()?;
        let (layout, k) = (first.layout(), first.size()[1]);
        let alike = sources.iter().all(|source| {
            let [n, cols] = source.size();
            source.layout() == layout
                && cols == k
                && source.global() == first.global()
                && source.order() == first.order()
                && n.is_multiple_of(layout.rows as usize)
        });
        let n = sources.iter().map(|source| source.size()[0]).sum();
        (alike || sources.len() == 1).then_some(Stack { sources, n })
    }

    fn row(&self, mut row: usize) -> (&S, usize) {
        let mut last = &self.sources[0];
        for source in &self.sources {
            let [n, _] = source.size();
            if row < n {
                return (source, row);
            }
            (row, last) = (row - n, source);
        }
        (last, row)
    }
}

impl<S: WeightSource> WeightSource for Stack<S> {
    fn size(&self) -> [usize; 2] {
        [self.n, self.sources[0].size()[1]]
    }

    fn layout(&self) -> Layout {
        self.sources[0].layout()
    }

    fn codes(&self, row: usize, codes: &mut [u8]) {
        let (from, row) = self.row(row);
        from.codes(row, codes);
    }

    fn scale(&self, row: usize, group: usize) -> u32 {
        let (from, row) = self.row(row);
        from.scale(row, group)
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        let (from, row) = self.row(row);
        from.zero(row, group)
    }

    fn minimum(&self, row: usize, group: usize) -> u32 {
        let (from, row) = self.row(row);
        from.minimum(row, group)
    }

    fn supers(&self, row: usize, stretch: usize) -> [u16; 2] {
        let (from, row) = self.row(row);
        from.supers(row, stretch)
    }

    fn global(&self) -> f32 {
        self.sources[0].global()
    }

    fn order(&self) -> Option<&[u32]> {
        self.sources[0].order()
    }
}

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
