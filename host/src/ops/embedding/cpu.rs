//! Embedding on the CPU: rows in parallel.

use abi::DType;
use abi::ops::embedding::INVALID_ROW_BYTE;
use half::{bf16, f16};

use super::EmbeddingArgs;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::Element;

/// With the strides of table and out.
pub(super) fn run(dtype: DType, strides: [u32; 2], args: &mut EmbeddingArgs<'_>) {
    match dtype {
        DType::F16 => rows::<f16>(strides, args),
        DType::BF16 => rows::<bf16>(strides, args),
        _ => rows::<f32>(strides, args),
    }
}

fn rows<T: Element>(strides: [u32; 2], args: &mut EmbeddingArgs<'_>) {
    let (vocab, cols) = (args.table.shape()[0], args.table.shape()[1]);
    let [table_stride, out_stride] = strides.map(|stride| stride as usize);
    let (table, ids) = (args.table.host_slice::<T>(), args.ids.host_slice::<u32>());
    if cols == 0 {
        return;
    }
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    for_rows(ids.len(), ids.len() * cols, |token| {
        let id = ids[token] as usize;
        // SAFETY: rows do not overlap within a view that is written (distinct rows have distinct elements).
        let row = unsafe { out.part(token * out_stride, cols) };
        if id < vocab {
            row.copy_from_slice(&table[id * table_stride..][..cols]);
        } else {
            bytemuck::cast_slice_mut(row).fill(INVALID_ROW_BYTE);
        }
    });
}
