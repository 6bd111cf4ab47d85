//! Attention as plain loops: the specification.

use crate::ops::reference::Real;

/// Sizes and mask of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Queries.
    pub seq_q: usize,
    /// Keys, all of which are in use.
    pub len: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Elements of a head of q and k.
    pub head_dim: usize,
    /// Elements of a head of v and out.
    pub head_dim_v: usize,
    /// What the scores are multiplied by.
    pub scale: f64,
    /// Which keys a query sees.
    pub mask: super::Mask,
    /// How many of them, the last ones.
    pub window: Option<usize>,
    /// What changes scores besides.
    pub options: Options<'a>,
}

/// What changes scores besides scale and mask.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// A score s becomes `cap · tanh(s / cap)`.
    pub soft_cap: Option<f64>,
    /// `[heads_q]`: scores without a key.
    pub sinks: Option<&'a [f64]>,
    /// `[heads_q, seq_q, len]`: is added to a score; −∞ hides the key.
    pub bias: Option<&'a [f64]>,
    /// The queries, and keys, of a block, and `[heads_q, blocks of queries, blocks of keys]`: whether these see those.
    pub blocks: Option<(usize, &'a [bool])>,
}

impl Sequence<'_> {
    /// Whether `query` of `head` sees `key`.
    pub fn sees(&self, head: usize, query: usize, key: usize) -> bool {
        self.sees_place(query, key)
            && self.bias(head, query, key) != f64::NEG_INFINITY
            && self.options.blocks.is_none_or(|(size, blocks)| {
                let (rows, cols) = (self.seq_q.div_ceil(size), self.len.div_ceil(size));
                blocks[(head * rows + query / size) * cols + key / size]
            })
    }

    fn sees_place(&self, query: usize, key: usize) -> bool {
        let (query, key) = (query as i64 + self.len as i64 - self.seq_q as i64, key as i64);
        (self.mask == super::Mask::None || key <= query)
            && self.window.is_none_or(|window| key > query - window as i64)
    }

    /// What is added to the score.
    fn bias(&self, head: usize, query: usize, key: usize) -> f64 {
        self.options.bias.map_or(0.0, |bias| bias[(head * self.seq_q + query) * self.len + key])
    }

    /// The score of a product that was multiplied by the scale.
    fn score<A: Real>(&self, product: A) -> A {
        match self.options.soft_cap {
            Some(cap) => A::real(cap) * (product / A::real(cap)).tanh(),
            None => product,
        }
    }

    /// The score without a key; −∞ if there is none.
    fn sink(&self, head: usize) -> f64 {
        self.options.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[head])
    }

    /// What the error of a score is in proportion to, if that of the product is to `terms`.
    fn condition(&self, product: f64, terms: f64) -> f64 {
        match self.options.soft_cap {
            Some(cap) => terms * (1.0 - (product / cap).tanh().powi(2)) + self.score(product).abs(),
            None => terms,
        }
    }
}

/// Attention of one sequence, `q` `[seq_q, heads_q, head_dim]`, `k` `[len, heads_kv, head_dim]` and `v`
/// `[len, heads_kv, head_dim_v]`. Returns out, `[seq_q, heads_q, head_dim_v]`, and the log-sum-exp of the scores,
/// `[heads_q, seq_q]`.
///
/// The softmax in two passes: maximum, then sums. `store` is the rounding of a value that is stored: the identity for
/// the specification.
pub fn attention<A: Real>(
    sequence: &Sequence,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    store: impl Fn(A) -> A,
) -> (Vec<f64>, Vec<f64>) {
    let Sequence { seq_q, len, heads_q, heads_kv, head_dim, head_dim_v, scale, .. } = *sequence;
    let group = heads_q / heads_kv;
    let mut out = vec![0.0; seq_q * heads_q * head_dim_v];
    let mut lse = vec![f64::NEG_INFINITY; heads_q * seq_q];
    for head in 0..heads_q {
        let kv_row = |key: usize, width: usize| (key * heads_kv + head / group) * width;
        for query in 0..seq_q {
            let place = query * heads_q + head;
            let row = &q[place * head_dim..][..head_dim];
            let keys: Vec<usize> = (0..len).filter(|&key| sequence.sees(head, query, key)).collect();
            let dot = |key: usize| -> A {
                std::iter::zip(row, &k[kv_row(key, head_dim)..][..head_dim])
                    .map(|(&a, &b)| A::real(a) * A::real(b))
                    .sum()
            };
            let score = |&key: &usize| {
                sequence.score(dot(key) * A::real(scale)) + A::real(sequence.bias(head, query, key))
            };
            let scores: Vec<A> = keys.iter().map(score).collect();
            // Not −∞ where every score is: −∞ − −∞ has no value.
            let sink = A::real(sequence.sink(head));
            let max = scores.iter().copied().fold(sink, A::max);
            let base = if max == A::neg_infinity() { A::zero() } else { max };
            let weights: Vec<A> = scores.iter().map(|&score| (score - base).exp()).collect();
            let sum = weights.iter().copied().sum::<A>() + (sink - base).exp();
            if sum == A::zero() {
                continue;
            }
            lse[head * seq_q + query] = (max + sum.ln()).to_real();
            for (col, out) in out[place * head_dim_v..][..head_dim_v].iter_mut().enumerate() {
                let terms = std::iter::zip(&weights, &keys);
                let total: A =
                    terms.map(|(&weight, &key)| weight * A::real(v[kv_row(key, head_dim_v) + col])).sum();
                *out = store(total / sum).to_real();
            }
        }
    }
    (out, lse)
}

/// What the errors of [`attention`] are relative to: the terms of the sums taken absolute, and the condition of the
/// softmax.
///
/// A score errs in proportion to `a = scale · Σ|q·k|` (under a soft cap to that times the slope there, and to itself),
/// and to what is added to it, and `∂out/∂score = p·(v − out)`. So out errs in proportion to
/// `Σ p·|v| + Σ p·|v − out|·(1 + a)`: next to nothing of the second term is left where one key has all the weight, as
/// with scores far apart. The log-sum-exp errs in proportion to `1 + |lse| + Σ p·a`.
pub fn magnitudes(sequence: &Sequence, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let Sequence { seq_q, len, heads_q, heads_kv, head_dim, head_dim_v, scale, .. } = *sequence;
    let group = heads_q / heads_kv;
    let mut out = vec![0.0; seq_q * heads_q * head_dim_v];
    let mut lse = vec![0.0; heads_q * seq_q];
    for head in 0..heads_q {
        let kv_row = |key: usize, width: usize| (key * heads_kv + head / group) * width;
        for query in 0..seq_q {
            let place = query * heads_q + head;
            let row = &q[place * head_dim..][..head_dim];
            let keys: Vec<usize> = (0..len).filter(|&key| sequence.sees(head, query, key)).collect();
            let dots = |absolute: fn(f64) -> f64| -> Vec<f64> {
                let dot = |&key: &usize| -> f64 {
                    std::iter::zip(row, &k[kv_row(key, head_dim)..][..head_dim])
                        .map(|(a, b)| absolute(a * b * scale))
                        .sum()
                };
                keys.iter().map(dot).collect()
            };
            let (products, terms) = (dots(|term| term), dots(f64::abs));
            let biases: Vec<f64> = keys.iter().map(|&key| sequence.bias(head, query, key)).collect();
            let scores: Vec<f64> = std::iter::zip(&products, &biases)
                .map(|(&product, bias)| sequence.score(product) + bias)
                .collect();
            let terms: Vec<f64> = std::iter::zip(products, terms)
                .map(|(product, terms)| sequence.condition(product, terms))
                .zip(&biases)
                .map(|(terms, bias)| terms + bias.abs())
                .collect();
            let sink = sequence.sink(head);
            let max = scores.iter().copied().fold(sink, f64::max);
            let sum: f64 = scores.iter().chain([&sink]).map(|score| (score - max).exp()).sum();
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp() / sum).collect();
            let condition: f64 = std::iter::zip(&weights, &terms).map(|(p, a)| p * a).sum();
            lse[head * seq_q + query] = 1.0 + (max + sum.ln()).abs() + condition;
            for (col, out) in out[place * head_dim_v..][..head_dim_v].iter_mut().enumerate() {
                let value = |key: usize| v[kv_row(key, head_dim_v) + col];
                let mean: f64 = std::iter::zip(&weights, &keys).map(|(p, &key)| p * value(key)).sum();
                for ((p, a), &key) in weights.iter().zip(&terms).zip(&keys) {
                    *out += p * (value(key).abs() + (value(key) - mean).abs() * (1.0 + a));
                }
            }
        }
    }
    (out, lse)
}
