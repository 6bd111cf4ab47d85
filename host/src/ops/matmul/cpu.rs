//! The matrix product on the CPU.
//!
//! Few rows: dot products, parallel over columns, since reading b is what takes the time. More rows: tiles, parallel
//! over them, whose panels are widened to f32 and multiplied by the `gemm` crate, or without that feature by dot
//! products. All of it needs scratch of each thread, which grows to what is needed and stays.

use std::cell::RefCell;
use std::ops::Range;
use std::thread::LocalKey;

use abi::DType;
use abi::ops::glu::Activation;
use abi::ops::matmul::{GATED, MatmulDims, MatmulEpilogue};
use abi::range;
use abi::weight::TILE_K;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::dot::{dot, dot_bf16};
use super::{MatmulArgs, Residual, RowNorm};
use crate::ops::glu::cpu::act;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::{FloatElement, TensorView};
use crate::weight::Weight;
use crate::weight::cpu::{Packed, ROWS};

/// Up to so many rows are done by dot products.
const DOT_MAX_ROWS: usize = 8;
/// Columns that a thread takes at a time, by dot products.
const DOT_COLS: usize = 32;
/// Rows and columns of a tile, and elements of k of a panel.
const TILE_ROWS: usize = 128;
const TILE_COLS: usize = 128;
const PANEL: usize = 512;

thread_local! {
    /// A panel of a, one of b, and a tile of sums.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// Rows of a, and the rows of a tile of a packed weight.
    static ROWS_IN_F32: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// A row of a behind its norm, in its own type.
    static NORMED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    static BLOCK: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Calls `body` with so many numbers of this thread's, whatever they are: they are allocated when there are more than
/// ever before. A thread that waits in `body` may do other work, which finds none and allocates its own.
fn with_buffer<R>(
    buffer: &'static LocalKey<RefCell<Vec<f32>>>,
    len: usize,
    body: impl FnOnce(&mut [f32]) -> R,
) -> R {
    let mut own = buffer.take();
    if own.len() < len {
        own.resize(len, 0.0);
    }
    let result = body(&mut own[..len]);
    buffer.replace(own);
    result
}

/// Calls `body` with this thread's scratch.
fn with_scratch(body: impl FnOnce(&mut [f32], &mut [f32], &mut [f32])) {
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.resize(TILE_ROWS * PANEL + TILE_COLS * PANEL + TILE_ROWS * TILE_COLS, 0.0);
        let (a, rest) = scratch.split_at_mut(TILE_ROWS * PANEL);
        let (b, sums) = rest.split_at_mut(TILE_COLS * PANEL);
        body(a, b, sums);
    });
}

pub(super) fn run(
    dtype: DType,
    out_dtype: DType,
    batch: u32,
    dims: &MatmulDims,
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
    dims: &MatmulDims,
    ((how, activation), norm): ((&MatmulEpilogue, Option<Activation>), Option<RowNorm>),
    (b, args): (Result<&Weight, TensorView<'_>>, &mut MatmulArgs<'_>),
) {
    let (row, gain) = (args.a, args.gain);
    let a = row.host_slice::<T>();
    if let (Some(norm), Some(gain)) = (norm, gain) {
        // Of one row.
        let elements = a.len();
        return with_buffer(&NORMED, elements, |buffer| {
            let normed = &mut bytemuck::cast_slice_mut::<f32, T>(buffer)[..elements];
            norm_row(a, gain.host_slice::<T>(), norm, normed);
            all_products::<T, O>(batch, dims, (how, activation), normed, (b, args));
        });
    }
    all_products::<T, O>(batch, dims, (how, activation), a, (b, args));
}

/// A row behind its norm.
fn norm_row<T: FloatElement>(row: &[T], gain: &[T], norm: RowNorm, normed: &mut [T]) {
    let values = row.iter().map(|value| value.to_f32());
    let (factor, mean) = range::mean_of_squares(values.clone(), 1.0 / row.len() as f32, norm.eps);
    let scale = 1.0 / mean.sqrt();
    for ((to, value), gain) in normed.iter_mut().zip(values).zip(gain) {
        *to = T::from_f32(value * factor * scale * (gain.to_f32() + norm.weight.offset()));
    }
}

fn all_products<T: FloatElement, O: FloatElement>(
    batch: u32,
    dims: &MatmulDims,
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
    let act: fn(f32) -> f32 = activation.map_or(|x| x, act);
    let k = dims.k as usize;
    for product in 0..batch as usize {
        // No elements of an operand if k is 0.
        let a = a.get(product * dims.a_batch_stride as usize..).unwrap_or_default();
        let b = b.get(product * dims.b_batch_stride as usize..).unwrap_or_default();
        let up = up.map(|up| up.get(product * dims.b_batch_stride as usize..).unwrap_or_default());
        let biased = |col: usize, sum: f32| sum * how.scale + bias.map_or(0.0, |bias| bias[col].to_f32());
        let n = if gated { dims.n as usize / 2 } else { dims.n as usize };
        let value = |col: usize, sums: &[f32], i: usize| match gated {
            false => act(biased(col, sums[i])),
            true => act(biased(col, sums[2 * i])) * biased(n + col, sums[2 * i + 1]),
        };
        let store = |row: usize, col: usize, sums: &[f32]| {
            let (col, len) = if gated { (col / 2, sums.len() / 2) } else { (col, sums.len()) };
            let start = product * dims.out_batch_stride as usize + row * dims.out_stride as usize + col;
            // SAFETY: rows do not overlap (Matmul::run), and each stretch of a row is stored once.
            let out = unsafe { out.part(start, len) };
            let added = residual.map(|residual| {
                let start = product * how.residual_batch_stride as usize;
                &residual[start + row * how.residual_stride as usize + col..][..len]
            });
            for (i, out) in out.iter_mut().enumerate() {
                let value = value(col + i, sums, i);
                *out = O::from_f32(match added {
                    Some(added) => value + added[i].to_f32(),
                    None if in_place => value + out.to_f32(),
                    None => value,
                });
            }
        };
        let a = Strided { values: a, stride: dims.a_stride as usize, len: k };
        match (&packed, up) {
            (Some(packed), _) => packed_sums(|row| a.row(row), (packed, 0), dims, store),
            (None, None) => {
                sums(a, Strided { values: b, stride: dims.b_stride as usize, len: k }, dims, store)
            }
            (None, Some(up)) => {
                // The rows of the gate and of up in turn, so that a stretch of sums has both.
                let b_row = |row: usize| {
                    let values = if row.is_multiple_of(2) { b } else { up };
                    &values[row / 2 * dims.b_stride as usize..][..k]
                };
                sums(a, b_row, dims, store);
            }
        }
    }
}

/// As [`sums`], of an expert's packed weight: rows of tiles are decoded by turns, 16 columns at a time.
pub(crate) fn packed_sums<'a, T: FloatElement>(
    a_row: impl Fn(usize) -> &'a [T] + Sync + Send,
    (packed, expert): (&Packed<'_>, usize),
    dims: &MatmulDims,
    store: impl Fn(usize, usize, &[f32]) + Sync + Send,
) {
    let [m, n, k] = [dims.m, dims.n, dims.k].map(|size| size as usize);
    let stride = k.next_multiple_of(TILE_K as usize);
    with_buffer(&ROWS_IN_F32, m * k, |rows| {
        for (row, values) in rows.chunks_mut(k.max(1)).enumerate() {
            widen(a_row(row), values);
        }
        let rows = &*rows;
        let blocks = if m > DOT_MAX_ROWS { TILE_COLS / 2 / ROWS } else { 1 };
        for_rows(n.div_ceil(blocks * ROWS), m * n * k, |part| {
            let first = part * blocks * ROWS;
            let cols = (blocks * ROWS).min(n - first);
            with_buffer(&BLOCK, blocks * ROWS * stride + m * cols, |buffer| {
                let (weights, sums) = buffer.split_at_mut(blocks * ROWS * stride);
                for (block, weights) in weights.chunks_mut((ROWS * stride).max(1)).enumerate() {
                    if block * ROWS < cols {
                        packed.row_block(expert, part * blocks + block, weights);
                    }
                }
                if blocks > 1 {
                    sums.fill(0.0);
                    multiply([m, cols, k], (rows, k), (weights, stride), (sums, cols));
                } else {
                    for (row, sums) in sums.chunks_mut(cols).enumerate() {
                        for (col, sum) in sums.iter_mut().enumerate() {
                            *sum = dot(&rows[row * k..][..k], &weights[col * stride..][..k]);
                        }
                    }
                }
                sums.chunks(cols).enumerate().for_each(|(row, sums)| store(row, first, sums));
            });
        });
    });
}

/// Calls `store(row, first column, sums)` for the columns of every row, in stretches that begin at multiples of 32;
/// a and b are the operands' rows.
pub(crate) fn sums<'a, T: FloatElement>(
    a: impl Rows<'a, T>,
    b: impl Rows<'a, T>,
    dims: &MatmulDims,
    store: impl Fn(usize, usize, &[f32]) + Sync + Send,
) {
    if dims.m as usize <= DOT_MAX_ROWS {
        dots(a, b, dims, store);
    } else {
        tiles(a, b, dims, store);
    }
}

/// The rows of an operand, wherever they are.
pub(crate) trait Rows<'a, T: FloatElement>: Sync {
    fn row(&self, row: usize) -> &'a [T];

    /// All of them, and how far they are apart, if they are evenly.
    fn strided(&self) -> Option<(&'a [T], usize)> {
        None
    }
}

impl<'a, T: FloatElement, F: Fn(usize) -> &'a [T] + Sync> Rows<'a, T> for F {
    fn row(&self, row: usize) -> &'a [T] {
        self(row)
    }
}

/// Rows of so many elements that are evenly apart.
#[derive(Clone, Copy)]
pub(crate) struct Strided<'a, T> {
    pub(crate) values: &'a [T],
    pub(crate) stride: usize,
    pub(crate) len: usize,
}

impl<'a, T: FloatElement> Rows<'a, T> for Strided<'a, T> {
    fn row(&self, row: usize) -> &'a [T] {
        // No elements have no place.
        if self.len == 0 { &[] } else { &self.values[row * self.stride..][..self.len] }
    }

    fn strided(&self) -> Option<(&'a [T], usize)> {
        Some((self.values, self.stride))
    }
}

/// Columns of some rows in f32, and how far the rows are apart: as they are where that is possible, else in `buffer`.
fn panel<'b, 'a: 'b, T: FloatElement>(
    from: &impl Rows<'a, T>,
    rows: Range<usize>,
    columns: Range<usize>,
    buffer: &'b mut [f32],
) -> (&'b [f32], usize) {
    if T::DTYPE == DType::F32
        && let Some((values, stride)) = from.strided()
    {
        return (&bytemuck::cast_slice(values)[rows.start * stride + columns.start..], stride);
    }
    for (row, out) in std::iter::zip(rows, buffer.chunks_exact_mut(PANEL)) {
        widen(&from.row(row)[columns.clone()], &mut out[..columns.len()]);
    }
    (buffer, PANEL)
}

/// `values` in f32.
fn widen<T: FloatElement>(values: &[T], out: &mut [f32]) {
    match T::DTYPE {
        DType::F16 => bytemuck::cast_slice::<T, f16>(values).convert_to_f32_slice(out),
        DType::BF16 => {
            // Bit by bit: half's own conversion branches on NaN, which keeps the loop from being vectorised.
            for (out, value) in std::iter::zip(out, bytemuck::cast_slice::<T, u16>(values)) {
                *out = f32::from_bits(u32::from(*value) << 16);
            }
        }
        _ => out.copy_from_slice(bytemuck::cast_slice(values)),
    }
}

/// The same, without a copy where they are in f32.
fn widened<'v, T: FloatElement>(values: &'v [T], buffer: &'v mut [f32]) -> &'v [f32] {
    if T::DTYPE == DType::F32 {
        return bytemuck::cast_slice(values);
    }
    let buffer = &mut buffer[..values.len()];
    widen(values, buffer);
    buffer
}

/// The dot product of a row in f32 and one as it is; the buffer has room for it.
fn dot_with<T: FloatElement>(x: &[f32], y: &[T], buffer: &mut [f32]) -> f32 {
    match T::DTYPE {
        DType::BF16 => dot_bf16(x, bytemuck::cast_slice(y)),
        _ => dot(x, widened(y, buffer)),
    }
}

/// As [`sums`].
fn dots<'a, T: FloatElement>(
    a: impl Rows<'a, T>,
    b: impl Rows<'a, T>,
    dims: &MatmulDims,
    store: impl Fn(usize, usize, &[f32]) + Sync + Send,
) {
    let [m, n, k] = [dims.m, dims.n, dims.k].map(|size| size as usize);
    with_buffer(&ROWS_IN_F32, m * k, |rows| {
        for (row, values) in rows.chunks_mut(k.max(1)).enumerate() {
            widen(a.row(row), values);
        }
        let rows = &*rows;
        for_rows(n.div_ceil(DOT_COLS), n * k, |block| {
            let first = block * DOT_COLS;
            let cols = DOT_COLS.min(n - first);
            with_buffer(&BLOCK, k + m * DOT_COLS, |buffer| {
                let (b_buffer, sums) = buffer.split_at_mut(k);
                // Rows of b as they lie in memory, one after the other.
                for col in 0..cols {
                    let b = b.row(first + col);
                    if m == 1 {
                        sums[col] = dot_with(rows, b, b_buffer);
                        continue;
                    }
                    let b = widened(b, b_buffer);
                    for row in 0..m {
                        sums[row * DOT_COLS + col] = dot(&rows[row * k..][..k], b);
                    }
                }
                for row in 0..m {
                    store(row, first, &sums[row * DOT_COLS..][..cols]);
                }
            });
        });
    });
}

/// As [`sums`].
fn tiles<'a, T: FloatElement>(
    a: impl Rows<'a, T>,
    b: impl Rows<'a, T>,
    dims: &MatmulDims,
    store: impl Fn(usize, usize, &[f32]) + Sync + Send,
) {
    let [m, n, k] = [dims.m, dims.n, dims.k].map(|size| size as usize);
    let tile_rows = m.div_ceil(TILE_ROWS);
    for_rows(tile_rows * n.div_ceil(TILE_COLS), m * n * k.max(1), |tile| {
        let (first_row, first_col) = (tile % tile_rows * TILE_ROWS, tile / tile_rows * TILE_COLS);
        let (rows, cols) = (TILE_ROWS.min(m - first_row), TILE_COLS.min(n - first_col));
        with_scratch(|a_panel, b_panel, sums| {
            sums.fill(0.0);
            for start in (0..k).step_by(PANEL) {
                let len = PANEL.min(k - start);
                let columns = start..start + len;
                let a = panel(&a, first_row..first_row + rows, columns.clone(), a_panel);
                let b = panel(&b, first_col..first_col + cols, columns, b_panel);
                multiply([rows, cols, len], a, b, (sums, TILE_COLS));
            }
            for row in 0..rows {
                store(first_row + row, first_col, &sums[row * TILE_COLS..][..cols]);
            }
        });
    });
}

/// Adds to sums the products of rows of a and rows of b, each with its stride.
#[cfg(feature = "gemm")]
fn multiply(
    [rows, cols, len]: [usize; 3],
    (a, a_stride): (&[f32], usize),
    (b, b_stride): (&[f32], usize),
    (sums, stride): (&mut [f32], usize),
) {
    let spans = |count: usize, stride: usize, len: usize, held: usize| {
        count == 0 || (count - 1) * stride + len <= held
    };
    assert!(spans(rows, a_stride, len, a.len()) && spans(cols, b_stride, len, b.len()));
    assert!(spans(rows, stride, cols, sums.len()) && (rows < 2 || cols <= stride));
    let (a, b, sums) = (a.as_ptr(), b.as_ptr(), sums.as_mut_ptr());
    // SAFETY: `rows` and `cols` rows of `len`, and as many rows of sums, which nothing else points into, are within
    // their slices — the assertions, and the borrows.
    unsafe {
        gemm::gemm(
            rows,
            cols,
            len,
            sums,
            1,
            stride as isize,
            true,
            a,
            1,
            a_stride as isize,
            b,
            b_stride as isize,
            1,
            1.0f32,
            1.0f32,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// The same by dot products, slower.
#[cfg(not(feature = "gemm"))]
fn multiply(
    [rows, cols, len]: [usize; 3],
    (a, a_stride): (&[f32], usize),
    (b, b_stride): (&[f32], usize),
    (sums, stride): (&mut [f32], usize),
) {
    for row in 0..rows {
        for col in 0..cols {
            sums[row * stride + col] += dot(&a[row * a_stride..][..len], &b[col * b_stride..][..len]);
        }
    }
}
