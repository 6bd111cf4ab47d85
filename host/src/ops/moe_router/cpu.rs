//! The router on the CPU: tokens in parallel, with the arithmetic of `abi::ops::moe_router` in the order of the
//! kernels.

use std::cell::RefCell;

use abi::DType;
use abi::ops::moe_router::{MoeRouterDims, NORMALISED, ROUND_BF16, ROUND_F16, SIGMOID, Scores, weight};
use abi::ops::sampling::{key, logit};
use half::{bf16, f16};

use super::{MoeRouterArgs, MoeRouterProblem, OwnExperts, SortedPairs};
use crate::ops::moe_permute::{self, MoePermuteArgs, MoePermuteProblem};
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;

thread_local! {
    /// A key for each expert.
    static KEYS: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

pub(super) fn run(problem: &MoeRouterProblem, dims: &MoeRouterDims, args: &mut MoeRouterArgs<'_>) {
    match problem.dtype {
        DType::F16 => of_type::<f16>(dims, args),
        DType::BF16 => of_type::<bf16>(dims, args),
        _ => of_type::<f32>(dims, args),
    }
    if let (Some(own), Some(SortedPairs { offsets, order, positions })) = (problem.sort, &mut args.sorted) {
        let OwnExperts { first_expert, experts } = own;
        let MoeRouterProblem { tokens, top_k, .. } = *problem;
        let problem = MoePermuteProblem { first_expert, ..MoePermuteProblem::new(tokens, top_k, experts) };
        let (offsets, order, positions) = (offsets.reborrow(), order.reborrow(), positions.reborrow());
        moe_permute::cpu::run(
            &problem,
            &mut MoePermuteArgs::new(args.ids.as_view(), offsets, order, positions),
        );
    }
}

fn of_type<T: FloatElement>(dims: &MoeRouterDims, args: &mut MoeRouterArgs<'_>) {
    let logits = args.logits.host_slice::<T>();
    let bias = args.bias.as_ref().map(|bias| bias.host_slice::<f32>());
    tokens(dims, (logits, bias), args.ids.host_slice_mut::<u32>(), args.weights.host_slice_mut::<f32>());
}

/// Routes all tokens.
pub(crate) fn tokens<T: FloatElement>(
    dims: &MoeRouterDims,
    (logits, bias): (&[T], Option<&[f32]>),
    ids: &mut [u32],
    weights: &mut [f32],
) {
    let (ids, weights) = (SharedSlice::new(ids), SharedSlice::new(weights));
    let [tokens, experts, top_k] = [dims.tokens, dims.experts, dims.top_k].map(|size| size as usize);
    for_rows(tokens, tokens * experts * (top_k + 16), |token| {
        let row = &logits[token * dims.logits_stride as usize..][..experts];
        // SAFETY: each token has rows of its own.
        let (ids, weights) = unsafe { (ids.part(token * top_k, top_k), weights.part(token * top_k, top_k)) };
        KEYS.with_borrow_mut(|keys| {
            keys.clear();
            keys.extend(row.iter().map(|value| key(value.to_f32())));
            route(dims, |expert| row[expert].to_f32(), bias, keys, ids, weights);
        });
    });
}

/// Routes a token; `keys` are those of its logits.
fn route(
    dims: &MoeRouterDims,
    logit_of: impl Fn(usize) -> f32,
    bias: Option<&[f32]>,
    keys: &mut [u32],
    ids: &mut [u32],
    weights: &mut [f32],
) {
    let scores = if dims.options & SIGMOID != 0 {
        Scores::SIGMOID
    } else {
        let max = logit(keys.iter().copied().max().unwrap_or(0));
        Scores::softmax(max, sum_of_lanes(keys.len(), |expert| Scores::power(logit(keys[expert]), max)))
    };
    if let Some(bias) = bias {
        for (key_of, bias) in std::iter::zip(&mut *keys, bias) {
            *key_of = key(scores.of(logit(*key_of)) + bias);
        }
    }
    // One more than the key: 0 is not to be chosen.
    keys.iter_mut().for_each(|key| *key += 1);
    if dims.num_groups > 1 {
        let value = |entry: u32| {
            let value = logit(entry.saturating_sub(1));
            if bias.is_some() { value } else { scores.of(value) }
        };
        drop_groups(dims, value, keys);
    }
    for id in &mut *ids {
        *id = largest(keys);
        keys[*id as usize] = 0;
    }
    let mut sum = 0.0;
    for (weight, &id) in std::iter::zip(&mut *weights, &*ids) {
        *weight = scores.of(logit_of(id as usize));
        sum += if dims.options & NORMALISED != 0 { *weight } else { 0.0 };
    }
    for value in weights {
        let exact = weight(*value, sum, dims.options, dims.scale);
        *value = match dims.options & (ROUND_F16 | ROUND_BF16) {
            0 => exact,
            ROUND_F16 => f16::from_f32(exact).to_f32(),
            _ => bf16::from_f32(exact).to_f32(),
        };
    }
}

/// The sum as a warp makes it: 32 lanes with every 32nd element each, then by halves.
fn sum_of_lanes(len: usize, term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; 32];
    for index in 0..len {
        lanes[index % 32] += term(index);
    }
    let mut width = 32;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    lanes[0]
}

/// Index of the largest, the lowest among equals.
fn largest(keys: &[u32]) -> u32 {
    let mut best = 0;
    for (index, &key) in keys.iter().enumerate() {
        if key > keys[best] {
            best = index;
        }
    }
    best as u32
}

/// Makes the keys of all groups but the best 0.
fn drop_groups(dims: &MoeRouterDims, value: impl Fn(u32) -> f32, keys: &mut [u32]) {
    let mut groups = [0u32; 32];
    let groups = &mut groups[..dims.num_groups as usize];
    for (group, keys) in std::iter::zip(&mut *groups, keys.chunks_exact(dims.group_size as usize)) {
        let (mut first, mut second) = (0, 0);
        for &key in keys {
            (first, second) = if key > first { (key, first) } else { (first, key.max(second)) };
        }
        *group = key(value(first) + value(second)) + 1;
    }
    let mut kept = 0u32;
    for _ in 0..dims.top_groups {
        let group = largest(groups);
        kept |= 1 << group;
        groups[group as usize] = 0;
    }
    for (group, keys) in keys.chunks_exact_mut(dims.group_size as usize).enumerate() {
        if kept >> group & 1 == 0 {
            keys.fill(0);
        }
    }
}
