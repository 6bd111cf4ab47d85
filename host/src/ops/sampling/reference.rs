//! Sampling as a plain sort in f64: the specification.

use super::SamplingParams;

/// A row's logits with bias, penalties and mask, each operation rounded to f32; NaN for what is not allowed. See
/// [`super::Sampler`].
pub fn edited(
    logits: &[f64],
    params: &SamplingParams,
    history: &[u32],
    bias: &[(u32, f32)],
    mask: Option<&[bool]>,
) -> Vec<f64> {
    let round = |value: f64| f64::from(value as f32);
    let (prompt, generated) = history.split_at(params.prompt_len as usize);
    let edit = |(token, &logit): (usize, &f64)| {
        let token = token as u32;
        let mut x = logit;
        for (_, value) in bias.iter().filter(|&&(id, _)| id == token) {
            x = round(x + f64::from(*value));
        }
        let times = generated.iter().filter(|&&id| id == token).count();
        if times > 0 || prompt.contains(&token) {
            let penalty = f64::from(params.repetition_penalty);
            x = round(if x > 0.0 { x / penalty } else { x * penalty });
        }
        if times > 0 {
            x = round(x - round(f64::from(params.frequency_penalty) * times as f64));
            x = round(x - f64::from(params.presence_penalty));
        }
        if mask.is_none_or(|mask| mask[token as usize]) { x } else { f64::NAN }
    };
    logits.iter().enumerate().map(edit).collect()
}

/// The index of the largest logit, if there is one; see [`super::Sampler`].
pub fn greedy(logits: &[f64]) -> Option<u32> {
    ranked(logits, 1.0, None).first().map(|&(index, _)| index)
}

/// The tokens that can be drawn after temperature and top_k, in descending order, with their probabilities.
pub fn ranked(logits: &[f64], temperature: f64, top_k: Option<u32>) -> Vec<(u32, f64)> {
    let mut order: Vec<usize> = (0..logits.len()).filter(|&index| !logits[index].is_nan()).collect();
    order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).expect("no NaN").then(a.cmp(&b)));
    if let Some(k) = top_k.filter(|&k| k > 0) {
        order.truncate(k as usize);
    }
    let Some(max) = order.first().map(|&index| logits[index]) else { return Vec::new() };
    let weight = |index: usize| match logits[index] {
        value if value == max => 1.0,
        value => ((value - max) / temperature).exp(),
    };
    let total: f64 = order.iter().map(|&index| weight(index)).sum();
    order.into_iter().map(|index| (index as u32, weight(index) / total)).collect()
}

/// How many tokens of [`ranked`] are kept: the shortest prefix whose probabilities sum up to `top_p`.
pub fn nucleus(ranked: &[(u32, f64)], top_p: f64) -> usize {
    let mut sum = 0.0;
    let reached = ranked.iter().position(|&(_, p)| {
        sum += p;
        sum >= top_p
    });
    reached.map_or(ranked.len(), |last| last + 1)
}

/// Those of [`ranked`] that are at least `min_p` as probable as the first.
pub fn likely(mut ranked: Vec<(u32, f64)>, min_p: f64) -> Vec<(u32, f64)> {
    let least = ranked.first().map_or(0.0, |&(_, p)| p * min_p);
    ranked.retain(|&(_, p)| p >= least);
    ranked
}

/// The typical ones among these: those no farther from the entropy than where their probabilities sum up to
/// `typical_p`, and `slack` more.
pub fn typical(mut kept: Vec<(u32, f64)>, typical_p: f64, slack: f64) -> Vec<(u32, f64)> {
    let total: f64 = kept.iter().map(|&(_, p)| p).sum();
    let information = |p: f64| if p > 0.0 { -(p / total).ln() } else { f64::INFINITY };
    let mean = |&(_, p): &(u32, f64)| if p > 0.0 { p / total * information(p) } else { 0.0 };
    let entropy: f64 = kept.iter().map(mean).sum();
    let distance = |p: f64| (information(p) - entropy).abs();
    let mut order = kept.clone();
    order.sort_by(|a, b| distance(a.1).total_cmp(&distance(b.1)));
    let last = nucleus(&order, typical_p * total).saturating_sub(1);
    if let Some(&(_, p)) = order.get(last) {
        let most = distance(p) + slack;
        kept.retain(|&(_, p)| distance(p) <= most);
    }
    kept
}

/// What a row may draw, in descending order, with probabilities that sum up to 1; see [`super::Sampler`].
pub fn kept(logits: &[f64], params: &SamplingParams) -> Vec<(u32, f64)> {
    let mut kept = ranked(logits, f64::from(params.temperature), params.top_k);
    kept.truncate(nucleus(&kept, f64::from(params.top_p)));
    kept = likely(kept, f64::from(params.min_p));
    if params.typical_p < 1.0 {
        kept = typical(kept, f64::from(params.typical_p), 0.0);
    }
    let total: f64 = kept.iter().map(|&(_, p)| p).sum();
    kept.iter().map(|&(index, p)| (index, p / total)).collect()
}

/// The token of [`kept`] for `uniform` in [0, 1), if there is one; see [`super::Sampler`].
pub fn random(mut kept: Vec<(u32, f64)>, uniform: f64) -> Option<u32> {
    kept.sort_by_key(|&(index, _)| index);
    let mut sum = 0.0;
    let found = kept.iter().find(|&&(_, p)| {
        sum += p;
        uniform < sum
    });
    found.or(kept.last()).map(|&(index, _)| index)
}

/// The logarithm of each token's probability; −∞ for NaN.
pub fn logprobs(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().filter(|value| !value.is_nan()).fold(f64::NEG_INFINITY, f64::max);
    let relative = |value: f64| if value == max { 0.0 } else { value - max };
    let log_sum =
        logits.iter().map(|&value| relative(value)).filter(|x| !x.is_nan()).map(f64::exp).sum::<f64>().ln();
    let of = |&value: &f64| if value.is_nan() { f64::NEG_INFINITY } else { relative(value) - log_sum };
    logits.iter().map(of).collect()
}
