//! The convolution as plain loops: the specification.

use crate::ops::glu::Activation;
use crate::ops::glu::reference::act;
use crate::ops::reference::Real;

/// Convolves one sequence `x [tokens, channels]`; see [`super::CausalConv1d`]. `state [channels, width − 1]` is brought
/// up to date. Returns out, and what the error of each element is relative to: Σ|w · x| (+ |bias|) times a bound of the
/// activation's slope for the sum s, σ(s) · (1 + |s| (1 − σ(s))) with σ the sigmoid.
///
/// `store` is the rounding of a value that is stored: the identity for the specification.
pub fn causal_conv1d<A: Real>(
    x: &[f64],
    weight: &[f64],
    bias: Option<&[f64]>,
    state: &mut [f64],
    channels: usize,
    store: impl Fn(A) -> A,
) -> (Vec<f64>, Vec<f64>) {
    let width = weight.len() / channels;
    let tokens = x.len() / channels;
    let mut out = vec![0.0; x.len()];
    let mut terms = vec![0.0; x.len()];
    for channel in 0..channels {
        let state = &mut state[channel * (width - 1)..][..width - 1];
        let mut inputs = state.to_vec();
        inputs.extend((0..tokens).map(|t| x[t * channels + channel]));
        for t in 0..tokens {
            let bias = bias.map_or(0.0, |bias| bias[channel]);
            let (mut sum, mut term) = (A::real(bias), bias.abs());
            for j in 0..width {
                let (tap, input) = (weight[channel * width + j], inputs[t + j]);
                sum = sum + A::real(tap) * A::real(input);
                term += (tap * input).abs();
            }
            out[t * channels + channel] = store(act(Activation::Silu, sum)).to_real();
            let sum = sum.to_real();
            let sigmoid = act::<f64>(Activation::Sigmoid, sum);
            let slope = sigmoid * (1.0 + sum.abs() * act::<f64>(Activation::Sigmoid, -sum));
            terms[t * channels + channel] = term * slope;
        }
        state.copy_from_slice(&inputs[tokens..]);
    }
    (out, terms)
}
