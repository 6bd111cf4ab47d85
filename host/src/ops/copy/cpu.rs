//! Strided copy and cast on the CPU: rows in parallel.

use abi::DType;
use half::{bf16, f16};

use super::CopyArgs;
use super::layout::{Layout, MAX_DIMS};
use crate::fp8::F8E4M3;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::{Element, FloatElement};

pub(super) fn run(layout: &Layout, args: &mut CopyArgs<'_>) {
    match (args.src.dtype(), args.dst.dtype()) {
        (DType::F32, DType::F16) => cast::<f32, f16>(layout, args),
        (DType::F32, DType::BF16) => cast::<f32, bf16>(layout, args),
        (DType::F16, DType::F32) => cast::<f16, f32>(layout, args),
        (DType::F16, DType::BF16) => cast::<f16, bf16>(layout, args),
        (DType::BF16, DType::F32) => cast::<bf16, f32>(layout, args),
        (DType::BF16, DType::F16) => cast::<bf16, f16>(layout, args),
        (DType::F32, _) => rows::<f32, f32>(layout, args, |value| value),
        (DType::F16, _) => rows::<f16, f16>(layout, args, |value| value),
        (DType::BF16, _) => rows::<bf16, bf16>(layout, args, |value| value),
        (DType::F8E4M3, _) => rows::<F8E4M3, F8E4M3>(layout, args, |value| value),
        (DType::I8, _) => rows::<i8, i8>(layout, args, |value| value),
        (DType::I32, _) => rows::<i32, i32>(layout, args, |value| value),
        (DType::U32, _) => rows::<u32, u32>(layout, args, |value| value),
    }
}

fn cast<S: FloatElement, D: FloatElement>(layout: &Layout, args: &mut CopyArgs<'_>) {
    rows::<S, D>(layout, args, |value| D::from_f32(value.to_f32()));
}

fn rows<S: Element, D: Element>(
    layout: &Layout,
    args: &mut CopyArgs<'_>,
    convert: impl Fn(S) -> D + Sync + Send,
) {
    if args.dst.is_empty() {
        return;
    }
    let cols = layout.cols();
    let (src_stride, dst_stride) = (layout.src[MAX_DIMS - 1], layout.dst[MAX_DIMS - 1]);
    let src = args.src.host_slice::<S>();
    let dst = SharedSlice::new(args.dst.host_slice_mut::<D>());
    // A long row is cut up, so that one contiguous tensor is work for all threads.
    const PART: usize = 1 << 16;
    let parts = cols.div_ceil(PART);
    for_rows(layout.rows() * parts, layout.rows() * cols, |i| {
        let (row, start) = (i / parts, i % parts * PART);
        let len = PART.min(cols - start);
        let (src_row, dst_row) = layout.row_offsets(row);
        let src = &src[src_row + start * src_stride..];
        let dst_start = dst_row + start * dst_stride;
        if (src_stride, dst_stride) == (1, 1) {
            // SAFETY: the elements of a view that is written are distinct, and the parts disjoint.
            let dst = unsafe { dst.part(dst_start, len) };
            for (dst, src) in dst.iter_mut().zip(&src[..len]) {
                *dst = convert(*src);
            }
        } else {
            for col in 0..len {
                // SAFETY: as above; one element at a time, since other rows may lie between them.
                let dst = unsafe { dst.part(dst_start + col * dst_stride, 1) };
                dst[0] = convert(src[col * src_stride]);
            }
        }
    });
}
