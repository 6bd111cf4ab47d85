//! Sampling on the CPU: rows in parallel, each by the same integers as on a card, so the tokens are the same.

use abi::DType;
use abi::ops::sampling::{
    BINS, SamplingDims, TOP_P_ONE, digit_shift, draw, key, logit, nucleus, point, ties, weight,
};
use half::{bf16, f16};

use super::SamplingArgs;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;

pub(super) fn run(dtype: DType, dims: &SamplingDims, args: &mut SamplingArgs<'_>) {
    match dtype {
        DType::F16 => rows::<f16>(dims, args),
        DType::BF16 => rows::<bf16>(dims, args),
        _ => rows::<f32>(dims, args),
    }
}

fn rows<T: FloatElement>(dims: &SamplingDims, args: &mut SamplingArgs<'_>) {
    let (rows, vocab) = (args.logits.shape()[0], args.logits.shape()[1]);
    let stride = dims.logits_stride as usize;
    let logits = args.logits.host_slice::<T>();
    let ids = SharedSlice::new(args.ids.host_slice_mut::<u32>());
    for_rows(rows, rows * vocab, |row| {
        let logits = &logits[row * stride..][..vocab];
        // SAFETY: each row has an id of its own.
        let id = unsafe { ids.part(row, 1) };
        id[0] = if dims.is_greedy != 0 { argmax(logits).1 } else { random(logits, dims, row as u32) };
    });
}

/// Key and index of the largest logit, the lowest index among equals; 0 if all are NaN.
fn argmax<T: FloatElement>(logits: &[T]) -> (u32, u32) {
    let mut best = (0, 0);
    for (index, value) in logits.iter().enumerate() {
        let key = key(value.to_f32());
        if key > best.0 {
            best = (key, index as u32);
        }
    }
    best
}

fn random<T: FloatElement>(logits: &[T], dims: &SamplingDims, row: u32) -> u32 {
    let (max_key, _) = argmax(logits);
    if max_key == 0 {
        return 0;
    }
    let max = logit(max_key);
    let weight_of = |value: f32| weight(value, max, dims.scale);
    // What is kept: keys above this one, and some ties at it, lowest index first.
    let (mut kept_key, mut num_ties) = (0, 0);
    if dims.top_k < dims.vocab {
        let target = u64::from(dims.top_k);
        let (key, above) = threshold(logits, target, |_| 1);
        (kept_key, num_ties) = (key, target - above);
    }
    let above: u64 =
        logits.iter().map(|value| value.to_f32()).filter(|&value| key(value) > kept_key).map(weight_of).sum();
    let mut total = above + num_ties * weight_of(logit(kept_key));
    if dims.top_p_q32 < TOP_P_ONE {
        let target = nucleus(total, dims.top_p_q32);
        let (key, above) = threshold(logits, target, weight_of);
        let tie_weight = weight_of(logit(key));
        (kept_key, num_ties) = (key, ties(target - above, tie_weight));
        total = above + num_ties * tie_weight;
    }
    let mut left = point(draw(dims.seed, dims.step, row), total);
    for (index, value) in logits.iter().enumerate() {
        let value = value.to_f32();
        let key = key(value);
        if key == kept_key && num_ties > 0 {
            num_ties -= 1;
        } else if key <= kept_key {
            continue;
        }
        let weight = weight_of(value);
        if left < weight {
            return index as u32;
        }
        left -= weight;
    }
    unreachable!("the point lies below the sum of the kept weights")
}

/// The key at which the weights, summed from the largest key down, reach `target`, and the sum over the keys above it.
fn threshold<T: FloatElement>(logits: &[T], target: u64, weight_of: impl Fn(f32) -> u64) -> (u32, u64) {
    let (mut prefix, mut mask, mut above) = (0u32, 0u32, 0u64);
    for shift in [0, 1, 2].map(digit_shift) {
        let mut histogram = [0u64; BINS as usize];
        for value in logits {
            let value = value.to_f32();
            let key = key(value);
            if key & mask == prefix {
                histogram[((key >> shift) % BINS) as usize] += weight_of(value);
            }
        }
        let mut bin = BINS - 1;
        while bin > 0 && above + histogram[bin as usize] < target {
            above += histogram[bin as usize];
            bin -= 1;
        }
        prefix |= bin << shift;
        mask = u32::MAX << shift;
    }
    (prefix, above)
}
