//! What weights are packed from, and how such matrices are cut and put together.

use std::ops::{Deref, Range};

use abi::weight::SUPER_K;

use super::Layout;

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

    /// What scales of [`ScaleType::E4m3`](super::ScaleType::E4m3) are multiplied by.
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
