//! Embedding on the CPU: rows in parallel.

use abi::DType;
use abi::ops::embedding::INVALID_ROW_BYTE;
use abi::weight::TILE_K;
use half::{bf16, f16};

use super::EmbeddingArgs;
use crate::ops::matmul::MatmulB;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;
use crate::weight::cpu::Packed;

/// With the strides of table and out.
pub(super) fn run(dtype: DType, strides: [u32; 2], args: &mut EmbeddingArgs<'_>) {
    match dtype {
        DType::F16 => rows::<f16>(strides, args),
        DType::BF16 => rows::<bf16>(strides, args),
        _ => rows::<f32>(strides, args),
    }
}

fn rows<T: FloatElement>(strides: [u32; 2], args: &mut EmbeddingArgs<'_>) {
    let (ids, cols) = (args.ids.host_slice::<u32>(), args.out.shape()[1]);
    let [table_stride, out_stride] = strides.map(|stride| stride as usize);
    if cols == 0 {
        return;
    }
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    // SAFETY: rows do not overlap within a view that is written (distinct rows have distinct elements).
    let row_of = |token: usize| unsafe { out.part(token * out_stride, cols) };
    match args.table {
        MatmulB::Matrix(matrix) => {
            let (vocab, table) = (matrix.shape()[0], matrix.host_slice::<T>());
            for_rows(ids.len(), ids.len() * cols, |token| {
                let (id, row) = (ids[token] as usize, row_of(token));
                if id < vocab {
                    row.copy_from_slice(&table[id * table_stride..][..cols]);
                } else {
                    bytemuck::cast_slice_mut(row).fill(INVALID_ROW_BYTE);
                }
            });
        }
        // Refused.
        MatmulB::Int8 { .. } => {}
        MatmulB::Packed(weight) => {
            let table = Packed::new(weight);
            // Sixteen rows are decoded for each.
            for_rows(ids.len(), 16 * ids.len() * cols, |token| {
                let (id, row) = (ids[token] as usize, row_of(token));
                if id >= weight.n() {
                    return bytemuck::cast_slice_mut(row).fill(INVALID_ROW_BYTE);
                }
                for (index, part) in row.chunks_mut(PART).enumerate() {
                    let mut values = [0.0; PART];
                    table.row(id, index * PART, &mut values[..part.len()]);
                    for (to, value) in std::iter::zip(part, values) {
                        *to = T::from_f32(value);
                    }
                }
            });
        }
    }
}

/// Columns that are decoded at a time: whole tiles, and in memory that no run has to allocate.
const PART: usize = 16 * TILE_K as usize;
