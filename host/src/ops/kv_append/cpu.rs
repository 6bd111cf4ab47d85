//! The append on the CPU: a copy per row.

use abi::DType;
use abi::ops::kv_append::KvAppendDims;
use half::{bf16, f16};

use super::{KvAppendArgs, KvAppendProblem};
use crate::tensor::Element;

pub(super) fn run(problem: KvAppendProblem, dims: &KvAppendDims, args: &mut KvAppendArgs<'_>) {
    match problem.dtype {
        DType::F16 => rows::<f16>(problem, dims, args),
        DType::BF16 => rows::<bf16>(problem, dims, args),
        _ => rows::<f32>(problem, dims, args),
    }
}

fn rows<T: Element>(problem: KvAppendProblem, dims: &KvAppendDims, args: &mut KvAppendArgs<'_>) {
    let slots = args.slots.host_slice::<u32>();
    let copy = |from: &[T], to: &mut [T], token_stride: u32, head_stride: u32| {
        for (token, &slot) in slots.iter().enumerate().filter(|&(_, &slot)| slot < dims.num_slots) {
            for head in 0..problem.heads {
                let source = token * token_stride as usize + head * head_stride as usize;
                let target =
                    slot as usize * dims.slot_stride as usize + head * dims.cache_head_stride as usize;
                to[target..][..problem.head_dim].copy_from_slice(&from[source..][..problem.head_dim]);
            }
        }
    };
    copy(args.k.host_slice(), args.k_cache.host_slice_mut(), dims.k_token_stride, dims.k_head_stride);
    if let (Some(v), Some(v_cache)) = (&args.v, &mut args.v_cache) {
        copy(v.host_slice(), v_cache.host_slice_mut(), dims.v_token_stride, dims.v_head_stride);
    }
}
