//! The gated delta rule on the CPU: the recurrence, heads in parallel.

use abi::DType;
use abi::ops::gated_delta::GatedDeltaDims;
use half::{bf16, f16};

use super::GatedDeltaArgs;
use super::reference::{EPS, LEAST_LOG_DECAY};
use crate::ops::glu::sigmoid;
use crate::ops::packed::sequence;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;

pub(super) fn run(dtype: DType, dims: &GatedDeltaDims, args: &mut GatedDeltaArgs<'_>) {
    match dtype {
        DType::F16 => heads::<f16>(dims, args),
        DType::BF16 => heads::<bf16>(dims, args),
        _ => heads::<f32>(dims, args),
    }
}

/// The row divided by its length, times a factor.
fn unit<T: FloatElement>(row: &[T], factor: f32) -> Vec<f32> {
    let square: f32 = row.iter().map(|value| value.to_f32() * value.to_f32()).sum();
    let scale = factor / (square + EPS as f32).sqrt();
    row.iter().map(|value| value.to_f32() * scale).collect()
}

/// ln(1 + e^x).
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.max(0.0) + (-x.abs()).exp().ln_1p() }
}

/// −e^a_log · softplus(x), as in the kernels: neither factor overflows where the other is 0.
fn log_decay(a_log: f32, x: f32) -> f32 {
    let x = if x > f32::MAX { f32::MAX } else { x };
    if a_log > 88.0 || x < -87.0 { -(a_log + x).exp() } else { -a_log.exp() * softplus(x) }
}

fn heads<T: FloatElement>(dims: &GatedDeltaDims, args: &mut GatedDeltaArgs<'_>) {
    let (heads, dim_k, dim_v) = (dims.heads_v as usize, dims.dim_k as usize, dims.dim_v as usize);
    let (q, k, v) = (args.q.host_slice::<T>(), args.k.host_slice::<T>(), args.v.host_slice::<T>());
    let (b, a) = (args.b.host_slice::<T>(), args.a.host_slice::<T>());
    let (a_log, dt_bias) = (args.a_log.host_slice::<f32>(), args.dt_bias.host_slice::<f32>());
    let (offsets, slots) = (args.offsets.host_slice::<u32>(), args.slots.host_slice::<u32>());
    let state = SharedSlice::new(args.state.host_slice_mut::<f32>());
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    let row = |token: usize, token_stride: u32, head: usize, head_stride: u32| {
        token * token_stride as usize + head * head_stride as usize
    };
    let elements = dims.tokens as usize * heads * dim_k * dim_v;
    // By heads, whose parts of state and out are apart, whatever slots and offsets the caller has written: of a slot
    // that is there twice one sequence comes after the other.
    for_rows(heads, elements, |head| {
        for (index, &slot) in slots.iter().enumerate() {
            let tokens = sequence(offsets, index, dims.tokens);
            if slot >= dims.num_slots || tokens.is_empty() {
                continue;
            }
            let key_head = head / dims.group as usize;
            let start = slot as usize * dims.slot_stride as usize + head * dim_k * dim_v;
            // SAFETY: of the state's heads this one is this thread's.
            let state = unsafe { state.part(start, dim_k * dim_v) };
            for token in tokens {
                let q = unit(
                    &q[row(token, dims.q_token_stride, key_head, dims.q_head_stride)..][..dim_k],
                    dims.scale,
                );
                let k =
                    unit(&k[row(token, dims.k_token_stride, key_head, dims.k_head_stride)..][..dim_k], 1.0);
                let v = &v[row(token, dims.v_token_stride, head, dims.v_head_stride)..][..dim_v];
                let beta = sigmoid(b[row(token, dims.b_stride, head, 1)].to_f32());
                let x = a[row(token, dims.a_stride, head, 1)].to_f32() + dt_bias[head];
                let log_decay = log_decay(a_log[head], x);
                let decay = if log_decay < LEAST_LOG_DECAY as f32 { 0.0 } else { log_decay.exp() };
                let mut change: Vec<f32> = vec![0.0; dim_v];
                for (state, &k) in std::iter::zip(state.chunks_exact_mut(dim_v), &k) {
                    for (state, change) in std::iter::zip(state, &mut change) {
                        *state *= decay;
                        *change += *state * k;
                    }
                }
                for (change, v) in std::iter::zip(&mut change, v) {
                    *change = beta * (v.to_f32() - *change);
                }
                let mut read = vec![0.0; dim_v];
                for ((state, &k), &q) in state.chunks_exact_mut(dim_v).zip(&k).zip(&q) {
                    for ((state, &change), read) in state.iter_mut().zip(&change).zip(&mut read) {
                        *state += k * change;
                        *read += *state * q;
                    }
                }
                // SAFETY: and so are its rows of out.
                let out =
                    unsafe { out.part(row(token, dims.out_token_stride, head, dims.out_head_stride), dim_v) };
                for (out, read) in std::iter::zip(out, read) {
                    *out = T::from_f32(read);
                }
            }
        }
    });
}
