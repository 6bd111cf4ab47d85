//! Transposition on the CPU: bands of columns in parallel, each by square blocks that fit the first cache.

use super::TransposeArgs;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::Element;

/// Rows and columns of a block: 32 KiB of 4-byte elements read and written.
const BLOCK: usize = 64;

pub(super) fn run<T: Element>(args: &mut TransposeArgs<'_>) {
    let [batch, rows, cols] = *args.x.shape() else { return };
    let (x_strides, out_strides) = (args.x.strides(), args.out.strides().to_vec());
    if args.x.is_empty() {
        return;
    }
    let x = args.x.host_slice::<T>();
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    let bands = cols.div_ceil(BLOCK);
    for_rows(batch * bands, batch * rows * cols, |i| {
        let (matrix, first_col) = (i / bands, i % bands * BLOCK);
        let (x_start, out_start) = (matrix * x_strides[0], matrix * out_strides[0]);
        for first_row in (0..rows).step_by(BLOCK) {
            for col in first_col..cols.min(first_col + BLOCK) {
                for row in first_row..rows.min(first_row + BLOCK) {
                    let at = out_start + col * out_strides[1] + row * out_strides[2];
                    // SAFETY: the elements of a view that is written are distinct, and the bands disjoint.
                    let out = unsafe { out.part(at, 1) };
                    out[0] = x[x_start + row * x_strides[1] + col * x_strides[2]];
                }
            }
        }
    });
}
