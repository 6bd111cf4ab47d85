//! Sampling as a plain sort in f64: the specification.

/// The index of the largest logit; see [`super::Sampler`].
pub fn greedy(logits: &[f64]) -> u32 {
    ranked(logits, 1.0, None).first().map_or(0, |&(index, _)| index)
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

/// The token for `uniform` in [0, 1); see [`super::Sampler`].
pub fn random(logits: &[f64], temperature: f64, top_k: Option<u32>, top_p: f64, uniform: f64) -> u32 {
    let mut kept = ranked(logits, temperature, top_k);
    kept.truncate(nucleus(&kept, top_p));
    kept.sort_by_key(|&(index, _)| index);
    let total: f64 = kept.iter().map(|&(_, p)| p).sum();
    let mut sum = 0.0;
    let found = kept.iter().find(|&&(_, p)| {
        sum += p / total;
        uniform < sum
    });
    found.or(kept.last()).map_or(0, |&(index, _)| index)
}
