//! Plain matrices as quantised ones, on the CPU: scales, then rows of tiles, in parallel.

use abi::DType;
use abi::ops::quantize_weight::{QuantizeWeightDims, covered_rank, magnitude_of_rank};
use abi::weight::{BLOCK_SCALES, TILE_K, TILE_ROWS, scale_place};
use half::{bf16, f16};

use super::{QuantizeWeightArgs, QuantizeWeightProblem};
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;
use crate::weight::{Scheme, number, stored_bits};

pub(super) fn run(
    problem: &QuantizeWeightProblem,
    dims: &QuantizeWeightDims,
    args: &mut QuantizeWeightArgs<'_>,
) {
    match problem.dtype {
        DType::F16 => of_type::<f16>(problem, dims, args),
        DType::BF16 => of_type::<bf16>(problem, dims, args),
        _ => of_type::<f32>(problem, dims, args),
    }
}

fn of_type<T: FloatElement>(
    problem: &QuantizeWeightProblem,
    dims: &QuantizeWeightDims,
    args: &mut QuantizeWeightArgs<'_>,
) {
    let QuantizeWeightArgs { rows, second, codes, scales, zeros, largest } = args;
    let QuantizeWeightProblem { scheme, global, .. } = *problem;
    if dims.n == 0 {
        return;
    }
    let first = rows.host_slice::<T>();
    let starts = [first, second.as_ref().map_or(first, |second| second.host_slice::<T>())];
    let matrix = Matrix { starts, dims, scheme, global };
    let met = largest.host_slice_mut::<f32>();
    let all = (0..dims.n).flat_map(|row| matrix.row(row)).map(|x| x.to_f32().abs().to_bits());
    // The bits of what is not negative are in its order, and those of NaN above.
    met[0] = f32::from_bits(all.fold(met[0].to_bits(), u32::max));
    let scales = bytemuck::cast_slice_mut(scales.host_slice_mut::<i8>());
    let mut zeros = zeros.as_mut().map(|zeros| bytemuck::cast_slice_mut(zeros.host_slice_mut::<i8>()));
    matrix.make_scales(scales, zeros.as_deref_mut());
    let codes = SharedSlice::new(bytemuck::cast_slice_mut(codes.host_slice_mut::<i8>()));
    let (blocks, bytes) = (dims.weight.row_blocks as usize, matrix.row_bytes());
    let (scales, zeros): (&[u8], Option<&[u8]>) = (scales, zeros.as_deref());
    for_rows(blocks, blocks * bytes, |block| {
        // SAFETY: a part for each row of tiles.
        let tiles = unsafe { codes.part(block * bytes, bytes) };
        matrix.make_codes(block as u32, (scales, zeros), tiles);
    });
}

/// The matrices whose rows the weight's are.
struct Matrix<'a, T> {
    starts: [&'a [T]; 2],
    dims: &'a QuantizeWeightDims,
    scheme: Scheme,
    global: f32,
}

impl<T: FloatElement> Matrix<'_, T> {
    /// A row of the weight.
    fn row(&self, row: u32) -> &[T] {
        let (matrix, row) = (row % self.dims.matrices, row / self.dims.matrices);
        self.row_of(matrix, row)
    }

    fn row_of(&self, matrix: u32, row: u32) -> &[T] {
        let start = row as usize * self.dims.strides[matrix as usize] as usize;
        &self.starts[matrix as usize][start..][..self.dims.k as usize]
    }

    /// Bytes of a row of tiles.
    fn row_bytes(&self) -> usize {
        (self.dims.weight.tiles * self.scheme.codes.tile_bytes()) as usize
    }

    /// Scales of a stretch of a row.
    fn per_stretch(&self) -> u32 {
        if self.dims.group < TILE_K { TILE_K / self.dims.group } else { 1 }
    }

    /// Which scale is that of a row of the weight, in a group.
    fn index(&self, row: u32, group: u32) -> usize {
        let stretches = self.dims.weight.stretches as usize;
        if self.dims.rows > 1 {
            let block = (row / (self.dims.rows * self.dims.matrices)) as usize;
            return (block * stretches + group as usize) * BLOCK_SCALES as usize + (row % 2 * 2) as usize;
        }
        let (stretch, within) = (group / self.per_stretch(), group % self.per_stretch());
        let block = (row / TILE_ROWS) as usize * stretches + stretch as usize;
        let place = block * TILE_ROWS as usize + scale_place(row % TILE_ROWS) as usize;
        place * self.per_stretch() as usize + within as usize
    }

    /// The range of a group of a row.
    fn range(&self, elements: &[T]) -> [f32; 2] {
        let values = || elements.iter().map(|x| x.to_f32());
        if self.scheme.percentile < 1.0 && !self.scheme.asymmetric {
            let rank = covered_rank(elements.len() as u32, self.scheme.percentile);
            let count = |bits| values().filter(|x| x.abs().to_bits() <= bits).count() as u32;
            let covered = magnitude_of_rank(rank, count);
            return [-covered, covered];
        }
        values().fold([0.0; 2], |[low, high], x| [low.min(x), high.max(x)])
    }

    fn make_scales(&self, scales: &mut [u8], zeros: Option<&mut [u8]>) {
        let QuantizeWeightDims { n, k, group, rows, matrices, .. } = *self.dims;
        let layout = self.scheme.layout();
        let bytes = layout.stored_scale().bytes() as usize;
        // Rows and groups that are not there have none.
        scales.fill(0);
        let mut zeros = zeros;
        if let Some(zeros) = &mut zeros {
            zeros.fill(0);
        }
        let (scales, zeros) = (SharedSlice::new(scales), zeros.map(SharedSlice::new));
        let blocks = (n / matrices).div_ceil(rows);
        for_rows((blocks * matrices) as usize, (n as usize) * k as usize, |line| {
            let (matrix, block) = (line as u32 % matrices, line as u32 / matrices);
            let of_block = block * rows..(n / matrices).min((block + 1) * rows);
            for index in 0..k.div_ceil(group) {
                let part = (index * group) as usize..k.min((index + 1) * group) as usize;
                let ranges = of_block.clone().map(|row| self.range(&self.row_of(matrix, row)[part.clone()]));
                let range =
                    ranges.fold([0.0f32; 2], |[low, high], range| [low.min(range[0]), high.max(range[1])]);
                let (bits, zero) = self.scheme.scale_of(range, self.global);
                let bits = stored_bits(&layout, bits, self.global).to_le_bytes();
                let first = self.index(of_block.start * matrices + matrix, index);
                // Of a block's even rows, or its odd ones, or all of them: each twice.
                let places = match (rows, matrices) {
                    (1, _) => first..first + 1,
                    (_, 1) => first..first + BLOCK_SCALES as usize,
                    _ => first..first + BLOCK_SCALES as usize / 2,
                };
                for place in places {
                    // SAFETY: each row, or each matrix's block, has scales of its own.
                    let place = unsafe { scales.part(place * bytes, bytes) };
                    place.copy_from_slice(&bits[..bytes]);
                }
                if let Some(zeros) = &zeros {
                    // SAFETY: as above.
                    let place = unsafe { zeros.part(first, 1) };
                    place[0] = zero;
                }
            }
        });
    }

    /// A row of tiles.
    fn make_codes(&self, block: u32, (scales, zeros): (&[u8], Option<&[u8]>), tiles: &mut [u8]) {
        let QuantizeWeightDims { n, group, .. } = *self.dims;
        let (codes, layout) = (self.scheme.codes, self.scheme.layout());
        let stored = layout.stored_scale();
        let bytes = stored.bytes() as usize;
        tiles.fill(0);
        for in_tile in 0..TILE_ROWS {
            let row = block * TILE_ROWS + in_tile;
            let elements = if row < n { self.row(row) } else { &[] };
            let mut level = (0.0, codes.zero());
            for col in 0..self.dims.weight.tiles * TILE_K {
                let code: u16 = match elements.get(col as usize) {
                    Some(value) => {
                        if col % group == 0 {
                            let at = self.index(row, col / group);
                            let scale = number(stored, &scales[at * bytes..], self.global);
                            level = (scale, zeros.map_or(codes.zero(), |zeros| zeros[at]));
                        }
                        self.scheme.code_of(value.to_f32(), level)
                    }
                    // What is beyond the matrix counts from the zero point.
                    None => codes.zero().into(),
                };
                let (word, bit) = codes.place(in_tile, col % TILE_K);
                let tile = (col / TILE_K * codes.tile_bytes()) as usize;
                let at = tile + (4 * word + bit / 8) as usize;
                let placed = (u32::from(code) << (bit % 8)).to_le_bytes();
                std::iter::zip(&mut tiles[at..at + codes.bytes()], placed).for_each(|(to, byte)| *to |= byte);
            }
        }
    }
}
