//! Embedding on the CPU: rows in parallel.

use abi::DType;
use abi::ops::embedding::INVALID_ROW_BYTE;
use half::{bf16, f16};

use super::{EmbeddingArgs, row_stride};
use crate::error::Error;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::Element;

pub(super) fn run(dtype: DType, args: &mut EmbeddingArgs<'_>) -> Result<(), Error> {
    match dtype {
        DType::F16 => rows::<f16>(args),
        DType::BF16 => rows::<bf16>(args),
        _ => rows::<f32>(args),
    }
}

fn rows<T: Element>(args: &mut EmbeddingArgs<'_>) -> Result<(), Error> {
    let (vocab, cols) = (args.table.shape()[0], args.table.shape()[1]);
    let table_stride = row_stride("table", args.table.shape(), args.table.strides())? as usize;
    let out_stride = row_stride("out", args.out.shape(), args.out.strides())? as usize;
    let (table, ids) = (args.table.host_slice::<T>(), args.ids.host_slice::<u32>());
    if cols == 0 {
        return Ok(());
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
    Ok(())
}
