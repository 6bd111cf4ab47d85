//! Attention over two parts of the keys as attention over all of them, on the CPU: rows in parallel.

use abi::DType;
use half::{bf16, f16};

use super::AttentionMergeArgs;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;

pub(super) fn run(dtype: DType, args: &mut AttentionMergeArgs<'_>) {
    match dtype {
        DType::F16 => of_type::<f16>(args),
        DType::BF16 => of_type::<bf16>(args),
        _ => of_type::<f32>(args),
    }
}

fn of_type<T: FloatElement>(args: &mut AttentionMergeArgs<'_>) {
    let AttentionMergeArgs { a, a_lse, b, b_lse, out, lse } = args;
    let [tokens, heads, dim] = *out.shape() else { return };
    if tokens * heads == 0 {
        return;
    }
    let strides = |strides: &[usize]| [strides[0], strides[1]];
    let (of_a, of_b, of_out) = (strides(a.strides()), strides(b.strides()), strides(out.strides()));
    let (of_a_lse, of_b_lse) = (a_lse.strides()[0], b_lse.strides()[0]);
    let of_lse = lse.as_ref().map_or(0, |lse| lse.strides()[0]);
    let (a_lse, b_lse) = (a_lse.host_slice::<f32>(), b_lse.host_slice::<f32>());
    let lse = lse.as_mut().map(|lse| SharedSlice::new(lse.host_slice_mut::<f32>()));
    let (a, b) = (a.host_slice::<T>(), b.host_slice::<T>());
    let out = SharedSlice::new(out.host_slice_mut::<T>());
    for_rows(tokens * heads, tokens * heads * dim, |row| {
        let (token, head) = (row / heads, row % heads);
        let (a_lse, b_lse) = (a_lse[head * of_a_lse + token], b_lse[head * of_b_lse + token]);
        let most = a_lse.max(b_lse);
        let none = a_lse == f32::NEG_INFINITY && b_lse == f32::NEG_INFINITY;
        let power = |lse: f32| match () {
            _ if none => 0.0,
            _ if lse == most => 1.0,
            _ => (lse - most).exp(),
        };
        let powers = [power(a_lse), power(b_lse)];
        let sum = powers[0] + powers[1];
        if let Some(lse) = &lse {
            // SAFETY: a place for each row, which one thread has.
            let place = unsafe { lse.part(head * of_lse + token, 1) };
            place[0] = if none { f32::NEG_INFINITY } else { most + sum.ln() };
        }
        let weights = if none { powers } else { powers.map(|power| power / sum) };
        let at = |strides: [usize; 2]| token * strides[0] + head * strides[1];
        let (a, b) = (&a[at(of_a)..][..dim], &b[at(of_b)..][..dim]);
        // SAFETY: the rows of a view that is written do not overlap.
        let out = unsafe { out.part(at(of_out), dim) };
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            // A weight of 0 hides what it is of.
            let part = |weight: f32, value: f32| if weight == 0.0 { 0.0 } else { weight * value };
            *out = T::from_f32(part(weights[0], a.to_f32()) + part(weights[1], b.to_f32()));
        }
    });
}
