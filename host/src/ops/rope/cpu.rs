//! Rotary position embedding on the CPU: tokens in parallel.

use abi::DType;
use half::{bf16, f16};

use super::{RopeArgs, RopeInput, RopeProblem, RopeStyle};
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;

pub(super) fn run(problem: &RopeProblem, args: &mut RopeArgs<'_>) {
    match problem.dtype {
        DType::F16 => tokens::<f16>(problem, args),
        DType::BF16 => tokens::<bf16>(problem, args),
        _ => tokens::<f32>(problem, args),
    }
}

fn tokens<T: FloatElement>(problem: &RopeProblem, args: &mut RopeArgs<'_>) {
    let RopeProblem { heads, head_dim, rotary_dim, style, .. } = *problem;
    if args.out.is_empty() {
        return;
    }
    let (tokens, pairs) = (args.out.shape()[0], rotary_dim / 2);
    let (out_token_stride, out_head_stride) = (args.out.strides()[0], args.out.strides()[1]);
    let x = match &args.x {
        RopeInput::From(view) => Some((view.host_slice::<T>(), view.strides()[0], view.strides()[1])),
        RopeInput::InPlace => None,
    };
    let (cos, sin) = (args.tables.cos.view(), args.tables.sin.view());
    let (cos, sin) = (cos.host_slice::<f32>(), sin.host_slice::<f32>());
    let last_position = args.tables.max_position() - 1;
    let (positions, position_stride) = (args.positions.host_slice::<u32>(), args.positions.strides()[0]);
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    for_rows(tokens, tokens * heads * head_dim, |token| {
        let position = (positions[token * position_stride] as usize).min(last_position);
        let (cos, sin) = (&cos[position * pairs..][..pairs], &sin[position * pairs..][..pairs]);
        for head in 0..heads {
            // SAFETY: the heads of a view that is written do not overlap.
            let out = unsafe { out.part(token * out_token_stride + head * out_head_stride, head_dim) };
            if let Some((x, token_stride, head_stride)) = x {
                out.copy_from_slice(&x[token * token_stride + head * head_stride..][..head_dim]);
            }
            rotate(out, (cos, sin), style);
        }
    });
}

/// Rotates a head by the angle of each of its pairs.
pub(crate) fn rotate<T: FloatElement>(head: &mut [T], (cos, sin): (&[f32], &[f32]), style: RopeStyle) {
    let pairs = cos.len();
    for (i, (cos, sin)) in std::iter::zip(cos, sin).enumerate() {
        let (first, second) = match style {
            RopeStyle::HalfSplit => (i, i + pairs),
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
        };
        let (a, b) = (head[first].to_f32(), head[second].to_f32());
        head[first] = T::from_f32(a * cos - b * sin);
        head[second] = T::from_f32(b * cos + a * sin);
    }
}
