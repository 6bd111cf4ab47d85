//! The router as plain loops: the specification.

use std::cmp::Ordering;

use super::{ExpertGroups, MoeRouterProblem, RouterScore, RouterWeights};
use crate::ops::reference::Real;

/// The scores of a token's logits.
pub fn scores<A: Real>(logits: &[f64], score: RouterScore) -> Vec<A> {
    let logits = logits.iter().map(|&logit| A::real(logit));
    match score {
        RouterScore::Sigmoid => logits.map(|x| A::one() / (A::one() + (-x).exp())).collect(),
        RouterScore::Softmax => {
            let max = logits.clone().fold(A::neg_infinity(), A::max);
            let powers: Vec<A> = logits.map(|x| (x - max).exp()).collect();
            let sum = powers.iter().copied().sum();
            powers.into_iter().map(|power| power / sum).collect()
        }
    }
}

/// The experts of a token.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The experts, best first.
    pub ids: Vec<u32>,
    /// The smallest difference, relative to the larger value or absolute below 1, that decided between two experts or
    /// groups. Ties apart, in which all that goes into the two values is equal.
    pub margin: f64,
}

/// Chooses a token's experts; see [`super::MoeRouter`].
pub fn choose(logits: &[f64], bias: Option<&[f64]>, problem: &MoeRouterProblem) -> Choice {
    let scores = scores::<f64>(logits, problem.score);
    let value = |expert: usize| scores[expert] + bias.map_or(0.0, |bias| bias[expert]);
    // What decides between experts, and what it is made of.
    let rank = |expert: usize| if bias.is_some() { value(expert) } else { logits[expert] };
    let origin = |expert: usize| (logits[expert] + 0.0, bias.map_or(0.0, |bias| bias[expert] + 0.0));
    let mut margin = f64::INFINITY;
    let mut sorted: Vec<usize> = (0..logits.len()).collect();
    if let Some(ExpertGroups { num_groups, top_groups }) = problem.groups {
        let size = logits.len() / num_groups;
        let best_two = |group: usize| {
            let mut members: Vec<usize> = (group * size..(group + 1) * size).collect();
            members.sort_by(|&a, &b| descending(rank(a), rank(b)));
            [members[0], members[1]]
        };
        let score = |group: usize| best_two(group).map(value).iter().sum::<f64>();
        let mut groups: Vec<usize> = (0..num_groups).collect();
        groups.sort_by(|&a, &b| descending(score(a), score(b)));
        if top_groups < num_groups {
            let [a, b] = [groups[top_groups - 1], groups[top_groups]];
            if best_two(a).map(origin) != best_two(b).map(origin) {
                margin = distance(score(a), score(b));
            }
        }
        sorted.retain(|expert| groups[..top_groups].contains(&(expert / size)));
    }
    sorted.sort_by(|&a, &b| descending(rank(a), rank(b)));
    for pair in sorted[..sorted.len().min(problem.top_k + 1)].windows(2) {
        // Logits are compared as they are: their order is exact.
        if bias.is_some() && origin(pair[0]) != origin(pair[1]) {
            margin = margin.min(distance(rank(pair[0]), rank(pair[1])));
        }
    }
    Choice { ids: sorted[..problem.top_k].iter().map(|&expert| expert as u32).collect(), margin }
}

/// NaN last; what is equal stays as it is.
fn descending(a: f64, b: f64) -> Ordering {
    b.partial_cmp(&a).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

fn distance(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() {
        // That a value is NaN is not a matter of rounding.
        return f64::INFINITY;
    }
    if a == b { 0.0 } else { (a - b).abs() / a.abs().max(b.abs()).max(1.0) }
}

/// The weights of these experts. `store` is the rounding of a weight: the identity for the specification.
pub fn weights<A: Real>(
    logits: &[f64],
    ids: &[u32],
    problem: &MoeRouterProblem,
    store: impl Fn(A) -> A,
) -> Vec<f64> {
    let scores = scores::<A>(logits, problem.score);
    let chosen: Vec<A> = ids.iter().map(|&id| scores[id as usize]).collect();
    let eps = A::real(if problem.score == RouterScore::Sigmoid { 1e-20 } else { 0.0 });
    let sum = match problem.weights {
        RouterWeights::Scores => A::one(),
        RouterWeights::Normalised => chosen.iter().copied().sum::<A>() + eps,
    };
    let scale = A::real(f64::from(problem.scale));
    chosen.into_iter().map(|score| store(score / sum * scale).to_real()).collect()
}
