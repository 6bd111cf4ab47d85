//! The layers of a dense decoder for one token as plain loops: the specification.

use super::DecoderLayersProblem;
use crate::ops::glu::Activation;
use crate::ops::glu::reference::act;
use crate::ops::reference::Real;
use crate::ops::rmsnorm::reference::{Input, rmsnorm};
use crate::ops::rope::RopeStyle;
use crate::ops::rope::reference::{RopeShape, rope};

/// Elements of a head.
pub const HEAD_DIM: usize = abi::ops::decoder_layers::HEAD_DIM as usize;

/// A layer's tensors, as [`super::LayerTensors`] has them.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// `[(heads_q + 2 heads_kv) · 128, hidden]`.
    pub qkv: &'a [f64],
    /// `[hidden, heads_q · 128]`.
    pub o: &'a [f64],
    /// `[2 · intermediate, hidden]`.
    pub gate_up: &'a [f64],
    /// `[hidden, intermediate]`.
    pub down: &'a [f64],
    /// `[hidden]`.
    pub input_norm: &'a [f64],
    /// `[hidden]`.
    pub post_attention_norm: &'a [f64],
    /// `[128]` each: of q and k.
    pub qk_norms: Option<[&'a [f64]; 2]>,
    /// `[keys, heads_kv, 128]` each: of the tokens before.
    pub cache: [&'a [f64]; 2],
}

/// What a launch leaves.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// `[hidden]`.
    pub out: Vec<f64>,
    /// Of each layer the token's key and value, `[heads_kv, 128]` each.
    pub kept: Vec<[Vec<f64>; 2]>,
}

/// All layers for a token; see [`super::DecoderLayers`]. `angles` are those of its position.
///
/// `store` is the rounding of a value that is stored: the identity for the specification.
pub fn decoder_layers<A: Real>(
    x: &[f64],
    layers: &[Layer<'_>],
    angles: (&[f64], &[f64]),
    problem: &DecoderLayersProblem,
    store: impl Fn(A) -> A,
) -> Outcome {
    let DecoderLayersProblem { hidden, intermediate, heads_q, heads_kv, eps, weight, .. } = *problem;
    let (eps, offset) = (f64::from(eps), f64::from(weight.offset()));
    let norm = |x: &[f64], weight: &[f64]| {
        rmsnorm(Input { x, residual: None, weight, gate: None }, weight.len(), eps, offset, &store).0
    };
    let product = |x: &[f64], weight: &[f64]| -> Vec<A> {
        let row = |row: &[f64]| std::iter::zip(row, x).map(|(&a, &b)| A::real(a) * A::real(b)).sum::<A>();
        weight.chunks(x.len()).map(row).collect()
    };
    let stored =
        |values: Vec<A>| -> Vec<f64> { values.into_iter().map(|value| store(value).to_real()).collect() };
    let added = |x: &[f64], values: Vec<A>| -> Vec<f64> {
        std::iter::zip(x, values).map(|(&x, value)| store(A::real(x) + store(value)).to_real()).collect()
    };
    let rotated = |heads: &[f64]| {
        let (head_dim, style) = (HEAD_DIM, RopeStyle::HalfSplit);
        let shape = RopeShape { heads: heads.len() / HEAD_DIM, head_dim, rotary_dim: HEAD_DIM, style };
        rope(heads, &[0], angles, shape, &store).0
    };
    let (q_len, kv_len) = (heads_q * HEAD_DIM, heads_kv * HEAD_DIM);
    let mut x = x.to_vec();
    let mut kept = Vec::new();
    for layer in layers {
        let qkv = stored(product(&norm(&x, layer.input_norm), layer.qkv));
        let (mut q, mut k) = (qkv[..q_len].to_vec(), qkv[q_len..][..kv_len].to_vec());
        let v = qkv[q_len + kv_len..].to_vec();
        if let Some([of_q, of_k]) = layer.qk_norms {
            (q, k) = (norm(&q, of_q), norm(&k, of_k));
        }
        let (q, k) = (rotated(&q), rotated(&k));
        let of_head = |rows: &[f64], own: &[f64], head: usize| -> Vec<Vec<A>> {
            let rows = rows.chunks(kv_len).chain([own]);
            let head = |row: &[f64]| row[head * HEAD_DIM..][..HEAD_DIM].iter().map(|&x| A::real(x)).collect();
            rows.map(head).collect()
        };
        let mut attended = Vec::with_capacity(q_len);
        for (index, query) in q.chunks(HEAD_DIM).enumerate() {
            let head = index / (heads_q / heads_kv);
            let (keys, values) = (of_head(layer.cache[0], &k, head), of_head(layer.cache[1], &v, head));
            let scale = A::one() / A::real(HEAD_DIM as f64).sqrt();
            let dot = |key: &Vec<A>| std::iter::zip(query, key).map(|(&a, &b)| A::real(a) * b).sum::<A>();
            let scores: Vec<A> = keys.iter().map(|key| dot(key) * scale).collect();
            let most = scores.iter().copied().fold(A::neg_infinity(), A::max);
            let weights: Vec<A> = scores.iter().map(|&score| (score - most).exp()).collect();
            let all: A = weights.iter().copied().sum();
            attended.extend((0..HEAD_DIM).map(|i| {
                let sum =
                    std::iter::zip(&weights, &values).map(|(&weight, value)| weight * value[i]).sum::<A>();
                store(sum / all).to_real()
            }));
        }
        kept.push([k, v]);
        x = added(&x, product(&attended, layer.o));
        let (gates, ups) = layer.gate_up.split_at(intermediate * hidden);
        let normed = norm(&x, layer.post_attention_norm);
        let gated = std::iter::zip(product(&normed, gates), product(&normed, ups));
        let activated = stored(gated.map(|(gate, up)| act(Activation::Silu, gate) * up).collect());
        x = added(&x, product(&activated, layer.down));
    }
    Outcome { out: x, kept }
}
