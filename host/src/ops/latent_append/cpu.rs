//! Norm, rotation and append on the CPU: query heads in parallel, and rows by their slot, so that slots which are not
//! distinct are no data race.

use abi::DType;
use abi::ops::latent_append::LatentAppendDims;
use half::{bf16, f16};

use super::{LatentAppendArgs, LatentAppendProblem, RopeInput};
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::ops::rmsnorm::cpu::NormedRow;
use crate::ops::rope::cpu::rotate;
use crate::simd::by_best;
use crate::tensor::FloatElement;

/// Parts that the rows are dealt to, by their slots.
const PARTS: usize = 64;

pub(super) fn run(problem: &LatentAppendProblem, dims: &LatentAppendDims, args: &mut LatentAppendArgs<'_>) {
    match problem.dtype {
        DType::F16 => tokens::<f16>(problem, dims, args),
        DType::BF16 => tokens::<bf16>(problem, dims, args),
        _ => tokens::<f32>(problem, dims, args),
    }
}

fn tokens<T: FloatElement>(
    problem: &LatentAppendProblem,
    dims: &LatentAppendDims,
    args: &mut LatentAppendArgs<'_>,
) {
    let LatentAppendProblem { heads, latent, rope, style, .. } = *problem;
    let tokens = dims.tiles.rows as usize;
    if tokens == 0 {
        return;
    }
    let q = match &args.q {
        RopeInput::From(q) => Some(q.host_slice::<T>()),
        RopeInput::InPlace => None,
    };
    let (x, weight) = (args.x.host_slice::<T>(), args.weight.host_slice::<T>());
    let (positions, slots) = (args.positions.host_slice::<u32>(), args.slots.host_slice::<u32>());
    let (cos, sin) = (args.tables.cos().view(), args.tables.sin().view());
    let (cos, sin) = (cos.host_slice::<f32>(), sin.host_slice::<f32>());
    let q_out = SharedSlice::new(args.q_out.host_slice_mut::<T>());
    let cache = SharedSlice::new(args.cache.host_slice_mut::<T>());
    let rotated = |head: &mut [T], token: usize| {
        let position = positions[token * dims.position_stride as usize].min(dims.max_position - 1);
        let start = position as usize * (rope / 2);
        rotate(head, (&cos[start..][..rope / 2], &sin[start..][..rope / 2]), style);
    };
    let at = |token: usize, head: usize, token_stride: u32, head_stride: u32| {
        token * token_stride as usize + head * head_stride as usize
    };
    for_rows(heads + PARTS, tokens * ((heads + 1) * rope + latent), |part| {
        if part < heads {
            for token in 0..tokens {
                let start = at(token, part, dims.q_out_token_stride, dims.q_out_head_stride);
                // SAFETY: the heads of a view that is written do not overlap, and this thread alone has this head.
                let out = unsafe { q_out.part(start, rope) };
                if let Some(q) = q {
                    let start = at(token, part, dims.q_token_stride, dims.q_head_stride);
                    out.copy_from_slice(&q[start..][..rope]);
                }
                rotated(out, token);
            }
            return;
        }
        let is_own = |slot: u32| slot < dims.num_slots && slot as usize % PARTS == part - heads;
        for (token, &slot) in slots.iter().enumerate().take(tokens).filter(|&(_, &slot)| is_own(slot)) {
            let x = &x[token * dims.x_stride as usize..][..latent + rope];
            // SAFETY: the rows of a view that is written do not overlap, and this thread alone has this slot.
            let row = unsafe { cache.part(slot as usize * dims.slot_stride as usize, latent + rope) };
            let (to, key) = row.split_at_mut(latent);
            by_best(NormedRow {
                from: Some(&x[..latent]),
                weight,
                weight_offset: dims.weight_offset,
                inv_cols: dims.inv_latent,
                eps: dims.eps,
                gate: None,
                to,
            });
            key.copy_from_slice(&x[latent..]);
            rotated(key, token);
        }
    });
}
