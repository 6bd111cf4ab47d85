//! The matrix product on the CPU.
//!
//! Few rows: dot products, parallel over columns, since reading b is what takes the time ([`super::dot`]). More rows:
//! tiles, parallel over them, whose panels are widened to f32, or pairs of bf16 ([`super::tile`]). All of it needs
//! scratch of each thread, which grows to what is needed and stays.

use std::cell::RefCell;
use std::ops::Range;
use std::thread::LocalKey;

use abi::DType;
use abi::ops::glu::Activation;
use abi::ops::matmul::{GATED, MatmulDims, MatmulEpilogue};
use half::{bf16, f16};

use super::dot::FewRows;
use super::tile::{self, PairTile, Panels, Tile};
use super::{MatmulArgs, Residual, RowNorm};
use crate::ops::glu::cpu::activate;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::ops::rmsnorm::cpu::NormedRow;
use crate::simd::{LANES, Lanes, Level, Work, by_best, load, load_rest, store_rest};
use crate::tensor::{FloatElement, TensorView};
use crate::weight::Weight;
use crate::weight::cpu::{FEW_ROWS, Packed, ROWS};

/// Up to so many rows are done by dot products.
const DOT_MAX_ROWS: usize = FEW_ROWS;
/// Columns that a thread takes at a time, by dot products.
const DOT_COLS: usize = 32;
/// Blocks of sixteen rows of a tile: what a panel of b is made for.
const TILE_BLOCKS: usize = 16;

/// A line of the cache: vectors that begin at one are loaded at once.
#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([f32; LANES]);

type Buffer = RefCell<Vec<Line>>;

thread_local! {
    /// Rows of a, as the product wants them.
    static PACKED_ROWS: Buffer = const { RefCell::new(Vec::new()) };
    /// A row of a behind its norm, in its own type.
    static NORMED: Buffer = const { RefCell::new(Vec::new()) };
    /// A panel of b, and sums.
    static BLOCK: Buffer = const { RefCell::new(Vec::new()) };
}

/// Calls `body` with so many numbers of this thread's, whatever they are: they are allocated when there are more than
/// ever before. A thread that waits in `body` may do other work, which finds none and allocates its own.
fn with_buffer<R>(buffer: &'static LocalKey<Buffer>, len: usize, body: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut own = buffer.take();
    let lines = len.div_ceil(LANES);
    if own.len() < lines {
        own.resize(lines, Line([0.0; LANES]));
    }
    let result = body(&mut bytemuck::cast_slice_mut(&mut own)[..len]);
    buffer.replace(own);
    result
}

/// The products; `few`: rows are done a few at a time, so that each has the same bits among any number.
pub(super) fn run(
    dtype: DType,
    out_dtype: DType,
    batch: u32,
    dims: (&MatmulDims, bool),
    how: ((&MatmulEpilogue, Option<Activation>), Option<RowNorm>),
    args: (Result<&Weight, TensorView<'_>>, &mut MatmulArgs<'_>),
) {
    match (dtype, out_dtype) {
        (DType::F16, DType::F16) => products::<f16, f16>(batch, dims, how, args),
        (DType::F16, _) => products::<f16, f32>(batch, dims, how, args),
        (DType::BF16, DType::BF16) => products::<bf16, bf16>(batch, dims, how, args),
        (DType::BF16, _) => products::<bf16, f32>(batch, dims, how, args),
        _ => products::<f32, f32>(batch, dims, how, args),
    }
}

fn products<T: FloatElement, O: FloatElement>(
    batch: u32,
    dims: (&MatmulDims, bool),
    ((how, activation), norm): ((&MatmulEpilogue, Option<Activation>), Option<RowNorm>),
    (b, args): (Result<&Weight, TensorView<'_>>, &mut MatmulArgs<'_>),
) {
    let (rows, gain) = (args.a, args.gain);
    let a = rows.host_slice::<T>();
    if let (Some(norm), Some(gain)) = (norm, gain) {
        // One after the other, whatever the stride.
        let (of_launch, few) = dims;
        let (m, k) = (of_launch.m as usize, of_launch.k as usize);
        return with_buffer(&NORMED, m * k, |buffer| {
            let normed = &mut bytemuck::cast_slice_mut::<f32, T>(buffer)[..m * k];
            for (row, to) in normed.chunks_exact_mut(k.max(1)).enumerate() {
                by_best(NormedRow {
                    from: Some(&a[row * of_launch.a_stride as usize..][..k]),
                    weight: gain.host_slice::<T>(),
                    weight_offset: norm.weight.offset(),
                    inv_cols: 1.0 / k as f32,
                    eps: norm.eps,
                    gate: None,
                    to,
                });
            }
            let dims = MatmulDims { a_stride: of_launch.k, ..*of_launch };
            all_products::<T, O>(batch, (&dims, few), (how, activation), normed, (b, args));
        });
    }
    all_products::<T, O>(batch, dims, (how, activation), a, (b, args));
}

fn all_products<T: FloatElement, O: FloatElement>(
    batch: u32,
    (dims, few): (&MatmulDims, bool),
    (how, activation): (&MatmulEpilogue, Option<Activation>),
    a: &[T],
    (b, args): (Result<&Weight, TensorView<'_>>, &mut MatmulArgs<'_>),
) {
    let packed = b.ok().map(Packed::new);
    let b: &[T] = b.as_ref().err().map_or(&[], |b| b.host_slice::<T>());
    let gated = how.options & GATED != 0;
    let up = args.up.as_ref().map(|up| up.host_slice::<T>());
    let bias = args.bias.as_ref().map(|bias| bias.host_slice::<T>());
    let residual = match &args.residual {
        Some(Residual::Tensor(residual)) => Some(residual.host_slice::<O>()),
        Some(Residual::InPlace) | None => None,
    };
    let in_place = matches!(args.residual, Some(Residual::InPlace));
    let out = SharedSlice::new(args.out.host_slice_mut::<O>());
    let k = dims.k as usize;
    for product in 0..batch as usize {
        // No elements of an operand if k is 0.
        let a = a.get(product * dims.a_batch_stride as usize..).unwrap_or_default();
        let b = b.get(product * dims.b_batch_stride as usize..).unwrap_or_default();
        let up = up.map(|up| up.get(product * dims.b_batch_stride as usize..).unwrap_or_default());
        let n = if gated { dims.n as usize / 2 } else { dims.n as usize };
        let store = |row: usize, col: usize, sums: &[f32]| {
            let (col, len) = if gated { (col / 2, sums.len() / 2) } else { (col, sums.len()) };
            let start = product * dims.out_batch_stride as usize + row * dims.out_stride as usize + col;
            // SAFETY: rows do not overlap (Matmul::run), and each stretch of a row is stored once.
            let out = unsafe { out.part(start, len) };
            let added = residual.map(|residual| {
                let start = product * how.residual_batch_stride as usize;
                &residual[start + row * how.residual_stride as usize + col..][..len]
            });
            by_best(Finish {
                sums,
                n: gated.then_some(n),
                scale: how.scale,
                activation,
                bias: bias.map(|bias| &bias[col..]),
                added,
                in_place,
                out,
            });
        };
        let a = Strided { values: a, stride: dims.a_stride as usize, len: k };
        match (&packed, up) {
            (Some(packed), _) => packed_sums(|row| a.row(row), (packed, 0), (dims, few), store),
            (None, None) => {
                let b = Strided { values: b, stride: dims.b_stride as usize, len: k };
                sums(|row| a.row(row), |row| b.row(row), (dims, few), store);
            }
            (None, Some(up)) => {
                // The rows of the gate and of up in turn, so that a stretch of sums has both.
                let b_row = |row: usize| {
                    let values = if row.is_multiple_of(2) { b } else { up };
                    Strided { values, stride: dims.b_stride as usize, len: k }.row(row / 2)
                };
                sums(|row| a.row(row), b_row, (dims, few), store);
            }
        }
    }
}

/// What becomes of sums: scale, bias, activation, gate, what is added, and the type of the result.
struct Finish<'s, T, O> {
    sums: &'s [f32],
    /// Columns of the gate, where sums are those of the gate and of up by turns.
    n: Option<usize>,
    scale: f32,
    activation: Option<Activation>,
    /// From the first column on.
    bias: Option<&'s [T]>,
    added: Option<&'s [O]>,
    in_place: bool,
    out: &'s mut [O],
}

impl<T: FloatElement, O: FloatElement> Work for Finish<'_, T, O> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        let Finish { sums, n, scale, activation, bias, added, in_place, out } = self;
        let len = out.len();
        let scale = V::splat(scale);
        for start in (0..len).step_by(LANES) {
            let own = LANES.min(len - start);
            // Of the gate, or of all there is, and of up.
            let mut numbers = [[0.0; LANES]; 2];
            if n.is_some() {
                let turns: [f32; 2 * LANES] = padded(&sums[2 * start..][..2 * own]);
                for (i, turn) in turns.as_chunks::<2>().0.iter().enumerate() {
                    (numbers[0][i], numbers[1][i]) = (turn[0], turn[1]);
                }
            } else {
                numbers[0] = padded(&sums[start..][..own]);
            }
            let mut value = V::load(&numbers[0]).mul(scale);
            let mut up = V::load(&numbers[1]).mul(scale);
            if let Some(bias) = bias {
                value = value.add(load_rest(&bias[start..][..own]));
                if let Some(n) = n {
                    up = up.add(load_rest(&bias[n + start..][..own]));
                }
            }
            if let Some(activation) = activation {
                value = activate(activation, value);
            }
            if n.is_some() {
                value = value.mul(up);
            }
            let out = &mut out[start..][..own];
            if let Some(added) = added {
                value = value.add(load_rest(&added[start..][..own]));
            } else if in_place {
                value = value.add(load_rest(out));
            }
            store_rest(value, out);
        }
    }
}

/// A gated linear unit of the sums of a gate and of up by turns.
pub(crate) fn gated<T: FloatElement>(sums: &[f32], activation: Activation, out: &mut [T]) {
    by_best(Finish::<T, T> {
        sums,
        n: Some(out.len()),
        scale: 1.0,
        activation: Some(activation),
        bias: None,
        added: None,
        in_place: false,
        out,
    });
}

/// So many numbers, with zeros behind those that there are.
#[inline(always)]
fn padded<const N: usize>(numbers: &[f32]) -> [f32; N] {
    if let Ok(all) = numbers.try_into() {
        return all;
    }
    let mut padded = [0.0; N];
    padded[..numbers.len()].copy_from_slice(numbers);
    padded
}

/// As [`sums`], of an expert's packed weight.
pub(crate) fn packed_sums<'a, T: FloatElement>(
    a_row: impl Fn(usize) -> &'a [T] + Sync + Send,
    (packed, expert): (&Packed<'_>, usize),
    (dims, few): (&MatmulDims, bool),
    store: impl Fn(usize, usize, &[f32]) + Sync + Send,
) {
    if dims.m as usize <= DOT_MAX_ROWS || few {
        for_few_rows(dims, |first, dims| {
            let store = |row: usize, col: usize, sums: &[f32]| store(first + row, col, sums);
            packed_dots(|row| a_row(first + row), (packed, expert), dims, store);
        });
    } else {
        let order = Some(packed.places());
        tiles(a_row, &OfExpert { packed, expert }, (packed.columns(), order), dims, store);
    }
}

/// Calls `part(first row, sizes)` for so many rows at a time as dot products take.
fn for_few_rows(dims: &MatmulDims, part: impl Fn(usize, &MatmulDims)) {
    for first in (0..dims.m).step_by(DOT_MAX_ROWS) {
        let m = (dims.m - first).min(DOT_MAX_ROWS as u32);
        part(first as usize, &MatmulDims { m, ..*dims });
    }
}

/// As [`packed_sums`], of few rows.
fn packed_dots<'a, T: FloatElement>(
    a_row: impl Fn(usize) -> &'a [T] + Sync + Send,
    (packed, expert): (&Packed<'_>, usize),
    dims: &MatmulDims,
    store: impl Fn(usize, usize, &[f32]) + Sync + Send,
) {
    let [m, n, k] = [dims.m, dims.n, dims.k].map(|size| size as usize);
    with_buffer(&PACKED_ROWS, packed.ordered_len() * m, |rows| {
        let (rows, _) = rows.as_chunks_mut();
        // No columns have no tiles.
        let length = (packed.ordered_len() / LANES).max(1);
        for (row, ordered) in rows.chunks_mut(length).enumerate() {
            packed.order(a_row(row), ordered);
        }
        let rows = &*rows;
        for_rows(n.div_ceil(ROWS), n * k, |block| {
            let cols = ROWS.min(n - block * ROWS);
            let mut sums = [[0.0; ROWS]; FEW_ROWS];
            packed.few_rows(expert, block, rows, &mut sums[..m]);
            for (row, sums) in sums[..m].iter().enumerate() {
                store(row, block * ROWS, &sums[..cols]);
            }
        });
    });
}

/// The rows of an expert's weight.
struct OfExpert<'a> {
    packed: &'a Packed<'a>,
    expert: usize,
}

impl Panels for OfExpert<'_> {
    #[inline(always)]
    fn panel<V: Lanes>(
        &self,
        first: usize,
        cols: usize,
        depth: Range<usize>,
        panel: &mut [[f32; tile::STRIDE]],
    ) {
        for (block, panel) in panel.chunks_mut(ROWS).take(cols.div_ceil(ROWS)).enumerate() {
            let block = (self.expert, first / ROWS + block);
            self.packed.row_block::<V>(block, depth.clone(), (panel.as_flattened_mut(), tile::STRIDE));
        }
    }
}

/// Calls `store(row, first column, sums)` for the columns of every row, in stretches that begin at multiples of 16;
/// `a` and `b` give the operands' rows. `few`: as for [`run`].
pub(crate) fn sums<'a, T: FloatElement>(
    a: impl Fn(usize) -> &'a [T] + Sync,
    b: impl Fn(usize) -> &'a [T] + Sync,
    (dims, few): (&MatmulDims, bool),
    store: impl Fn(usize, usize, &[f32]) + Sync + Send,
) {
    if dims.m as usize <= DOT_MAX_ROWS || few {
        for_few_rows(dims, |first, dims| {
            let store = |row: usize, col: usize, sums: &[f32]| store(first + row, col, sums);
            dots(|row| a(first + row), &b, dims, store);
        });
    } else if !tiles_of_pairs(&a, &b, dims, &store) {
        tiles(a, &OfMatrix(b), (dims.k as usize, None), dims, store);
    }
}

/// Rows of so many elements that are evenly apart.
#[derive(Clone, Copy)]
pub(crate) struct Strided<'a, T> {
    pub(crate) values: &'a [T],
    pub(crate) stride: usize,
    pub(crate) len: usize,
}

impl<'a, T> Strided<'a, T> {
    pub(crate) fn row(&self, row: usize) -> &'a [T] {
        // No elements have no place.
        if self.len == 0 { &[] } else { &self.values[row * self.stride..][..self.len] }
    }
}

/// The rows of a matrix that this gives.
struct OfMatrix<F>(F);

impl<'b, T: FloatElement, F: Fn(usize) -> &'b [T]> Panels for OfMatrix<F> {
    #[inline(always)]
    fn panel<V: Lanes>(
        &self,
        first: usize,
        cols: usize,
        depth: Range<usize>,
        panel: &mut [[f32; tile::STRIDE]],
    ) {
        for (col, panel) in panel.iter_mut().take(cols).enumerate() {
            widen_into::<V, T>(&(self.0)(first + col)[depth.clone()], panel.as_chunks_mut().0);
        }
    }
}

/// Elements as numbers, with zeros to a multiple of sixteen.
#[inline(always)]
fn widen_into<V: Lanes, T: FloatElement>(from: &[T], to: &mut [[f32; LANES]]) {
    let (whole, rest) = from.as_chunks::<LANES>();
    for (to, from) in std::iter::zip(&mut *to, whole) {
        load::<V, T>(from).store(to);
    }
    if !rest.is_empty() {
        load_rest::<V, T>(rest).store(&mut to[whole.len()]);
    }
}

/// The same as work for any vectors.
struct Widen<'s, T>(&'s [T], &'s mut [[f32; LANES]]);

impl<T: FloatElement> Work for Widen<'_, T> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        widen_into::<V, T>(self.0, self.1);
    }
}

/// As [`sums`].
fn dots<'a, T: FloatElement>(
    a: impl Fn(usize) -> &'a [T] + Sync,
    b: impl Fn(usize) -> &'a [T] + Sync,
    dims: &MatmulDims,
    store: impl Fn(usize, usize, &[f32]) + Sync + Send,
) {
    let [m, n, k] = [dims.m, dims.n, dims.k].map(|size| size as usize);
    let length = k.div_ceil(LANES);
    with_buffer(&PACKED_ROWS, m * length * LANES, |rows| {
        let (rows, _) = rows.as_chunks_mut();
        for (row, widened) in rows.chunks_mut(length.max(1)).enumerate() {
            by_best(Widen(a(row), widened));
        }
        let rows = &*rows;
        for_rows(n.div_ceil(DOT_COLS), n * k, |block| {
            let first = block * DOT_COLS;
            let cols = DOT_COLS.min(n - first);
            let mut sums = [0.0; DOT_MAX_ROWS * DOT_COLS];
            let column = &|col: usize| b(first + col);
            by_best(FewRows { rows, count: m, column, cols, sums: &mut sums, stride: DOT_COLS });
            for row in 0..m {
                store(row, first, &sums[row * DOT_COLS..][..cols]);
            }
        });
    });
}

/// As [`sums`], along `k` columns of a in this order.
fn tiles<'a, T: FloatElement>(
    a: impl Fn(usize) -> &'a [T] + Sync,
    panels: &(impl Panels + Sync),
    (k, order): (usize, Option<&[u8; tile::ORDERED]>),
    dims: &MatmulDims,
    store: impl Fn(usize, usize, &[f32]) + Sync + Send,
) {
    let pack = |rows: [&[T]; LANES], columns: &mut _, _: &mut _| {
        by_best(tile::Columns { rows, order, columns });
    };
    for_tiles(a, (k, pack), dims, store, |part, panel, sums| {
        let Part { rows, least, first, cols } = part;
        by_best(Tile { rows, blocks: least.len(), panels, first, cols, panel, sums });
    });
}

/// As [`sums`], of pairs of bf16 where the CPU multiplies those: whether it does.
fn tiles_of_pairs<'a, T: FloatElement>(
    a: &(impl Fn(usize) -> &'a [T] + Sync),
    b: &(impl Fn(usize) -> &'a [T] + Sync),
    dims: &MatmulDims,
    store: &(impl Fn(usize, usize, &[f32]) + Sync + Send),
) -> bool {
    if T::DTYPE != DType::BF16 || Level::best() < Level::Avx512Bf16 {
        return false;
    }
    let pack = |rows: [&[T]; LANES], columns: &mut _, least: &mut _| {
        by_best(tile::PairColumns { rows: rows.map(bytemuck::cast_slice), columns, least });
    };
    for_tiles(a, (dims.k.div_ceil(2) as usize, pack), dims, store, |part, panel, sums| {
        let Part { rows, least, first, cols } = part;
        let column = &|col: usize| bytemuck::cast_slice(b(col));
        by_best(PairTile { rows, least, column, first, cols, columns: dims.n as usize, panel, sums });
    });
    true
}

/// What a tile is made of.
struct Part<'s> {
    /// Blocks of sixteen rows of a, packed.
    rows: &'s [[f32; LANES]],
    /// A line for each block.
    least: &'s [[f32; LANES]],
    first: usize,
    cols: usize,
}

/// Packs blocks of sixteen rows of a, each into as many lines as there are `steps` and one for itself, and calls
/// `store` as [`sums`] does for the sums that `multiply` makes of parts with a panel.
fn for_tiles<'a, T: FloatElement>(
    a: impl Fn(usize) -> &'a [T] + Sync,
    (steps, pack): (usize, impl Fn([&[T]; LANES], &mut [[f32; LANES]], &mut [f32; LANES]) + Sync + Send),
    dims: &MatmulDims,
    store: impl Fn(usize, usize, &[f32]) + Sync + Send,
    multiply: impl Fn(Part<'_>, &mut [[f32; tile::STRIDE]], &mut [[f32; LANES]]) + Sync + Send,
) {
    let [m, n, k] = [dims.m, dims.n, dims.k].map(|size| size as usize);
    let blocks = m.div_ceil(LANES);
    with_buffer(&PACKED_ROWS, blocks * (steps + 1) * LANES, |rows| {
        let (rows, least) = rows.as_chunks_mut::<LANES>().0.split_at_mut(blocks * steps);
        let (packed, lines) = (SharedSlice::new(rows), SharedSlice::new(least));
        for_rows(blocks, m * k, |block| {
            // SAFETY: each block is one call's.
            let (columns, line) = unsafe { (packed.part(block * steps, steps), lines.part(block, 1)) };
            let own = LANES.min(m - block * LANES);
            let of_block: [&[T]; LANES] =
                std::array::from_fn(|row| if row < own { a(block * LANES + row) } else { &[] });
            pack(of_block, columns, &mut line[0]);
        });
        let (rows, least) = (&*rows, &*least);
        let parts = blocks.div_ceil(TILE_BLOCKS);
        for_rows(parts * n.div_ceil(tile::COLS), m * n * k.max(1), |part| {
            let (first_block, first) = (part % parts * TILE_BLOCKS, part / parts * tile::COLS);
            let blocks = TILE_BLOCKS.min(blocks - first_block);
            let cols = tile::COLS.min(n - first);
            let panel_len = tile::COLS * tile::STRIDE;
            with_buffer(&BLOCK, panel_len + tile::COLS * blocks * LANES, |buffer| {
                let (panel, sums) = buffer.split_at_mut(panel_len);
                let ((panel, _), (sums, _)) = (panel.as_chunks_mut(), sums.as_chunks_mut::<LANES>());
                let rows = &rows[first_block * steps..][..blocks * steps];
                let least = &least[first_block..][..blocks];
                multiply(Part { rows, least, first, cols }, panel, sums);
                for block in 0..blocks {
                    let first_row = (first_block + block) * LANES;
                    let mut of_rows = [[0.0; tile::COLS]; LANES];
                    for col in 0..cols {
                        for row in 0..LANES {
                            of_rows[row][col] = sums[col * blocks + block][row];
                        }
                    }
                    for (row, sums) in of_rows.iter().enumerate().take(m.saturating_sub(first_row)) {
                        store(first_row + row, first, &sums[..cols]);
                    }
                }
            });
        });
    });
}
