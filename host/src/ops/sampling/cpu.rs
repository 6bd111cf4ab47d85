//! Sampling on the CPU: rows in parallel, each by the same integers as on a card, so the tokens are the same.

use std::cell::RefCell;

use abi::DType;
use abi::ops::sampling::{
    BINS, LOG2_E, RowParams, depth, digit_shift, draw, edited, exponent, index_of, key, log_sum, logit,
    logprob, mean, moment, nearness, nucleus, point, ranked, step, ties, weight, weight_at,
};
use half::{bf16, f16};

use super::{Dims, Logprobs, PARAMS_LEN, SamplingArgs, SamplingProblem};
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;

thread_local! {
    /// The values that typical sampling has to choose from.
    static KEPT: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// A row.
    static ROW: RefCell<Row> = const { RefCell::new(Row { logits: Vec::new(), counts: Vec::new(), bias: Vec::new() }) };
}

/// A row's logits, how often each token was generated, and the bits of what is added to it.
struct Row {
    logits: Vec<f32>,
    counts: Vec<u32>,
    bias: Vec<u32>,
}

pub(super) fn run(problem: &SamplingProblem, dims: &Dims, args: &mut SamplingArgs<'_>) {
    match problem.dtype {
        DType::F16 => rows::<f16>(problem, dims, args),
        DType::BF16 => rows::<bf16>(problem, dims, args),
        _ => rows::<f32>(problem, dims, args),
    }
}

/// Where a row's part of a tensor begins, of so many elements.
fn part<T>(slice: &[T], row: usize, stride: u32, len: usize) -> &[T] {
    &slice[row * stride as usize..][..len]
}

fn rows<T: FloatElement>(problem: &SamplingProblem, dims: &Dims, args: &mut SamplingArgs<'_>) {
    let SamplingProblem { vocab, features, .. } = *problem;
    let num_rows = args.logits.shape()[0];
    let Dims { sampling, edit, logprobs: told } = dims;
    let logits = args.logits.host_slice::<T>();
    let words = args.params.as_ref().map(|params| params.host_slice::<u32>());
    let histories = args.history.as_ref().map(|history| history.host_slice::<u32>());
    let biases =
        args.bias.as_ref().map(|bias| (bias.ids.host_slice::<u32>(), bias.values.host_slice::<f32>()));
    let masks = args.masks.as_ref().map(|masks| masks.host_slice::<u32>());
    let ids = SharedSlice::new(args.ids.host_slice_mut::<u32>());
    let out = args.logprobs.as_mut().map(|Logprobs { chosen, top_ids, top }| {
        let chosen = SharedSlice::new(chosen.host_slice_mut::<f32>());
        let top_ids = SharedSlice::new(top_ids.host_slice_mut::<u32>());
        (chosen, top_ids, SharedSlice::new(top.host_slice_mut::<f32>()))
    });
    for_rows(num_rows, num_rows * vocab, |index| {
        let given = part(logits, index, edit.logits_stride, vocab);
        let mut row_words = [0; PARAMS_LEN];
        if let Some(words) = words {
            row_words.copy_from_slice(part(words, index, sampling.params_stride, PARAMS_LEN));
        }
        let params = RowParams::of_words(row_words);
        ROW.with_borrow_mut(|row| {
            row.logits.clear();
            row.logits.extend(given.iter().map(|value| value.to_f32()));
            if features.history > 0 || features.bias > 0 {
                let history = histories.map(|all| part(all, index, edit.history_stride, features.history));
                let bias = biases.map(|(ids, values)| {
                    let [of_ids, of_values] = edit.bias_strides;
                    (part(ids, index, of_ids, features.bias), part(values, index, of_values, features.bias))
                });
                change(row, &params, history.unwrap_or(&[]), bias.unwrap_or((&[], &[])));
            }
            if let Some(masks) = masks
                && params.is_masked != 0
            {
                let mask = part(masks, index, edit.mask_stride, vocab.div_ceil(32));
                for (token, logit) in row.logits.iter_mut().enumerate() {
                    if mask[token / 32] >> (token % 32) & 1 == 0 {
                        *logit = f32::NAN;
                    }
                }
            }
            let id = choose(&row.logits, &params, params.steps(sampling.planned, sampling.vocab));
            // SAFETY: each row has an id of its own.
            unsafe { ids.part(index, 1)[0] = id };
            let Some((chosen, top_ids, top)) = &out else { return };
            row.logits.clear();
            row.logits.extend(given.iter().map(|value| value.to_f32()));
            let (n, [of_ids, of_values]) =
                (told.top as usize, told.top_strides.map(|stride| stride as usize));
            // SAFETY: and a value, and a part of each of the others, which do not overlap.
            unsafe {
                let (top_ids, top) = (top_ids.part(index * of_ids, n), top.part(index * of_values, n));
                chosen.part(index, 1)[0] = tell(&row.logits, id, top_ids, top);
            }
        });
    });
}

/// Adds the bias and applies penalties to a row's logits.
fn change(row: &mut Row, params: &RowParams, history: &[u32], (ids, values): (&[u32], &[f32])) {
    /// In a count: the prompt has the token.
    const SEEN: u32 = 1 << 31;
    let Row { logits, counts, bias } = row;
    for table in [&mut *counts, &mut *bias] {
        table.clear();
        table.resize(logits.len(), 0);
    }
    let num_bias = ids.len().min(params.num_bias as usize);
    for (&id, value) in std::iter::zip(ids, values).take(num_bias) {
        if let Some(bias) = bias.get_mut(id as usize) {
            *bias = value.to_bits();
        }
    }
    let history = &history[..history.len().min(params.history_len as usize)];
    let (prompt, generated) = history.split_at(history.len().min(params.prompt_len as usize));
    for &id in prompt {
        if let Some(count) = counts.get_mut(id as usize) {
            *count = SEEN;
        }
    }
    for &id in generated {
        if let Some(count) = counts.get_mut(id as usize) {
            *count += 1;
        }
    }
    for ((logit, &count), &bias) in logits.iter_mut().zip(&*counts).zip(&*bias) {
        *logit = edited(*logit, f32::from_bits(bias), count != 0, count & !SEEN, params);
    }
}

/// [`ranked`] of the largest logit below a bound; 0 if there is none.
fn largest_below(logits: &[f32], bound: u64) -> u64 {
    let numbers = logits.iter().zip(0..).map(|(&value, index)| ranked(key(value), index));
    numbers.filter(|&number| number < bound).max().unwrap_or(0)
}

/// Tells the most probable tokens and what the chosen one has.
fn tell(logits: &[f32], id: u32, top_ids: &mut [u32], top: &mut [f32]) -> f32 {
    let mut number = largest_below(logits, u64::MAX);
    let max = logit((number >> 32) as u32);
    let log_sum = log_sum(logits.iter().map(|&value| weight(value, max, LOG2_E)).sum());
    for (id, value) in std::iter::zip(top_ids, top) {
        (*id, *value) = (index_of(number), logprob(logit((number >> 32) as u32), max, log_sum));
        number = largest_below(logits, number);
    }
    logprob(logits.get(id as usize).copied().unwrap_or(f32::NAN), max, log_sum)
}

/// The token of a row, by some steps.
fn choose(logits: &[f32], params: &RowParams, steps: u32) -> u32 {
    let takes = |step| steps & step::bit(step) != 0;
    let largest = largest_below(logits, u64::MAX);
    if largest == 0 || !takes(step::SUM) {
        return index_of(largest);
    }
    let max = logit((largest >> 32) as u32);
    let exponent_of = |value: f32| exponent(value, max, params.scale);
    let weight_of = |value: f32| weight_at(exponent_of(value));
    // What is kept: keys above this one, and some ties at it, lowest index first.
    let (mut kept_key, mut num_ties) = (0, 0);
    if takes(step::COUNT) {
        let target = u64::from(params.top_k);
        let (key, above) = threshold(logits, target, key, |_| 1);
        (kept_key, num_ties) = (key, target - above);
    }
    // The sum over what is kept of a function of the value, in 64 bits.
    let sum = |kept_key: u32, num_ties: u64, of: &dyn Fn(f32) -> u64| -> u64 {
        let above =
            logits.iter().filter(|&&value| key(value) > kept_key).map(|&value| of(value)).sum::<u64>();
        above + num_ties * of(logit(kept_key))
    };
    if takes(step::WEIGH) {
        let target = nucleus(sum(kept_key, num_ties, &weight_of), params.top_p);
        let (key, above) = threshold(logits, target, key, weight_of);
        (kept_key, num_ties) = (key, ties(target - above, weight_of(logit(key))));
    }
    let likely =
        |value: f32| Some(weight_of(value)).filter(|&weight| weight >= params.min_weight()).unwrap_or(0);
    let mut least_near = 0;
    let mut mean_depth = 0;
    let depth_of = |value: f32| depth(exponent_of(value));
    if takes(step::MEAN) {
        let weights = sum(kept_key, num_ties, &likely);
        let of_moment = |value: f32| match likely(value) {
            0 => 0,
            weight => moment(weight, depth_of(value)),
        };
        mean_depth = mean(sum(kept_key, num_ties, &of_moment), weights);
        let near = |value: f32| nearness(depth_of(value), mean_depth);
        let mut left = num_ties;
        let kept = |value: &f32| match key(*value) {
            key if key == kept_key && left > 0 => {
                left -= 1;
                true
            }
            key => key > kept_key,
        };
        let kept = logits.iter().copied().filter(kept).filter(|&value| likely(value) != 0);
        KEPT.with_borrow_mut(|values| {
            values.clear();
            values.extend(kept);
            least_near = threshold(values, nucleus(weights, params.typical_p), near, likely).0;
        });
    }
    let typical = |value: f32| match likely(value) {
        0 => 0,
        weight if least_near == 0 || nearness(depth_of(value), mean_depth) >= least_near => weight,
        _ => 0,
    };
    let mut left = point(draw(params.seed, params.step), sum(kept_key, num_ties, &typical));
    for (index, &value) in logits.iter().enumerate() {
        let key = key(value);
        if key == kept_key && num_ties > 0 {
            num_ties -= 1;
        } else if key <= kept_key {
            continue;
        }
        let weight = typical(value);
        if left < weight {
            return index as u32;
        }
        left -= weight;
    }
    unreachable!("the point lies below the sum of the kept weights")
}

/// The key at which the weights, summed from the largest key down, reach `target`, and the sum over the keys above it.
fn threshold(
    logits: &[f32],
    target: u64,
    key_of: impl Fn(f32) -> u32,
    weight_of: impl Fn(f32) -> u64,
) -> (u32, u64) {
    let (mut prefix, mut mask, mut above) = (0u32, 0u32, 0u64);
    for shift in [0, 1, 2].map(digit_shift) {
        let mut histogram = [0u64; BINS as usize];
        for &value in logits {
            let key = key_of(value);
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
