//! Norm, rotation and append on the CPU: heads in parallel, so that slots which are not distinct are no data race.

use abi::DType;
use abi::ops::qk_norm_rope::QkNormRopeDims;
use half::{bf16, f16};

use super::{QkNormRopeArgs, QkNormRopeProblem, RopeInput};
use crate::fp8::F8E4M3;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::ops::rmsnorm::cpu::NormedRow;
use crate::simd::{LANES, Lanes, Work, by_best, load_rest, store_rest};
use crate::tensor::{Element, FloatElement};

pub(super) fn run(problem: &QkNormRopeProblem, dims: &QkNormRopeDims, args: &mut QkNormRopeArgs<'_>) {
    match problem.dtype {
        DType::F16 => by_cache::<f16>(problem, dims, args),
        DType::BF16 => by_cache::<bf16>(problem, dims, args),
        _ => by_cache::<f32>(problem, dims, args),
    }
}

fn by_cache<T: FloatElement>(
    problem: &QkNormRopeProblem,
    dims: &QkNormRopeDims,
    args: &mut QkNormRopeArgs<'_>,
) {
    if problem.is_fp8() {
        heads::<T, F8E4M3>(dims, args, |value, inverse| F8E4M3::from_f32(value.to_f32() * inverse));
    } else {
        heads::<T, T>(dims, args, |value, _| value);
    }
}

/// `cached` is what a cache holds of a value, by the inverse of its head's scale.
fn heads<T: FloatElement, C: Element>(
    dims: &QkNormRopeDims,
    args: &mut QkNormRopeArgs<'_>,
    cached: impl Fn(T, f32) -> C + Sync,
) {
    let (tokens, heads_q, head_dim) = (dims.tokens as usize, dims.heads_q as usize, dims.head_dim as usize);
    if tokens == 0 {
        return;
    }
    let all_heads = heads_q + dims.heads_kv as usize;
    let q = match &args.q {
        RopeInput::From(q) => Some(q.host_slice::<T>()),
        RopeInput::InPlace => None,
    };
    let (k, v) = (args.k.host_slice::<T>(), args.v.host_slice::<T>());
    let weights =
        args.weights.as_ref().map(|weights| (weights.q.host_slice::<T>(), weights.k.host_slice::<T>()));
    let (positions, slots) = (args.positions.host_slice::<u32>(), args.slots.host_slice::<u32>());
    let (cos, sin) = (args.tables.cos().view(), args.tables.sin().view());
    let angles = Angles { cos: cos.host_slice(), sin: sin.host_slice() };
    let q_out = SharedSlice::new(args.q_out.host_slice_mut::<T>());
    let k_cache = SharedSlice::new(args.k_cache.host_slice_mut::<C>());
    let v_cache = SharedSlice::new(args.v_cache.host_slice_mut::<C>());
    let [k_scale, v_scale] =
        [&args.k_scale, &args.v_scale].map(|scale| scale.as_ref().map(|scale| scale.host_slice::<f32>()));
    let inverse = |scale: Option<&[f32]>, head: usize| scale.map_or(1.0, |scale| 1.0 / scale[head]);
    let at =
        |row: usize, head: usize, strides: [u32; 2]| row * strides[0] as usize + head * strides[1] as usize;
    for_rows(all_heads, tokens * all_heads * head_dim, |head| {
        let mut rotated = Vec::with_capacity(head_dim);
        for token in 0..tokens {
            let position = positions[token * dims.position_stride as usize].min(dims.max_position - 1);
            if head < heads_q {
                let start = at(token, head, [dims.q_out_token_stride, dims.q_out_head_stride]);
                // SAFETY: the heads of a view that is written do not overlap, and this thread alone has this head.
                let out = unsafe { q_out.part(start, head_dim) };
                if let Some(q) = q {
                    let start = at(token, head, [dims.q_token_stride, dims.q_head_stride]);
                    out.copy_from_slice(&q[start..][..head_dim]);
                }
                angles.norm_and_rotate(out, weights.map(|(q, _)| q), position, dims);
            } else if slots[token] < dims.num_slots {
                let head = head - heads_q;
                let start = at(slots[token] as usize, head, [dims.slot_stride, dims.cache_head_stride]);
                // SAFETY: as for q_out.
                let (key, value) = unsafe { (k_cache.part(start, head_dim), v_cache.part(start, head_dim)) };
                let from = at(token, head, [dims.k_token_stride, dims.k_head_stride]);
                rotated.clear();
                rotated.extend_from_slice(&k[from..][..head_dim]);
                angles.norm_and_rotate(&mut rotated, weights.map(|(_, k)| k), position, dims);
                let from = at(token, head, [dims.v_token_stride, dims.v_head_stride]);
                for (to, heads, scale) in [(key, &rotated[..], k_scale), (value, &v[from..], v_scale)] {
                    let inverse = inverse(scale, head);
                    for (to, &from) in std::iter::zip(to, heads) {
                        *to = cached(from, inverse);
                    }
                }
            }
        }
    });
}

/// The tables.
struct Angles<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Angles<'_> {
    /// One head, rounded after the norm and after the rotation.
    fn norm_and_rotate<T: FloatElement>(
        &self,
        head: &mut [T],
        weight: Option<&[T]>,
        position: u32,
        dims: &QkNormRopeDims,
    ) {
        if let Some(weight) = weight {
            by_best(NormedRow {
                from: None,
                weight,
                weight_offset: dims.weight_offset,
                inv_cols: dims.inv_head_dim,
                eps: dims.eps,
                gate: None,
                to: head,
            });
        }
        let pairs = dims.rotary_dim as usize / 2;
        let start = position as usize * pairs;
        let (cos, sin) = (&self.cos[start..][..pairs], &self.sin[start..][..pairs]);
        if dims.is_interleaved == 0 {
            let (firsts, seconds) = head[..2 * pairs].split_at_mut(pairs);
            by_best(Rotation { firsts, seconds, cos, sin });
            return;
        }
        for (pair, (cos, sin)) in std::iter::zip(head.chunks_exact_mut(2), std::iter::zip(cos, sin)) {
            let (a, b) = (pair[0].to_f32(), pair[1].to_f32());
            pair[0] = T::from_f32(a * cos - b * sin);
            pair[1] = T::from_f32(b * cos + a * sin);
        }
    }
}

/// Pairs of elements and the angles by which each is rotated.
struct Rotation<'s, T> {
    firsts: &'s mut [T],
    seconds: &'s mut [T],
    cos: &'s [f32],
    sin: &'s [f32],
}

impl<T: FloatElement> Work for Rotation<'_, T> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        let chunks = std::iter::zip(self.firsts.chunks_mut(LANES), self.seconds.chunks_mut(LANES));
        let angles = std::iter::zip(self.cos.chunks(LANES), self.sin.chunks(LANES));
        for ((firsts, seconds), (cos, sin)) in std::iter::zip(chunks, angles) {
            let (a, b): (V, V) = (load_rest(firsts), load_rest(seconds));
            let (cos, sin): (V, V) = (load_rest(cos), load_rest(sin));
            store_rest(a.mul(cos).sub(b.mul(sin)), firsts);
            store_rest(b.mul(cos).add(a.mul(sin)), seconds);
        }
    }
}
