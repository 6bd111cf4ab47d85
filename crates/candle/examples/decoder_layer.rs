//! A decoder layer on candle's tensors, by candle's own operators and by warpforge's: how far they are apart, and the
//! time of each. `cargo run --release --package warpforge-candle --example decoder_layer`

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use warpforge_candle::{Attention, Rope, RopeStyle, attention, matmul, rmsnorm, swiglu};

const TOKENS: usize = 128;
const HIDDEN: usize = 512;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const INNER: usize = 1536;

struct Layer {
    norms: [Tensor; 2],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

impl Layer {
    fn new(device: &Device) -> Result<Self> {
        let weight = |n: usize, k: usize| Tensor::randn(0f32, 1.0 / (k as f32).sqrt(), (n, k), device);
        let norm = || Tensor::rand(0.5f32, 1.5, HIDDEN, device);
        Ok(Layer {
            norms: [norm()?, norm()?],
            query: weight(HEADS * HEAD_DIM, HIDDEN)?,
            key: weight(KV_HEADS * HEAD_DIM, HIDDEN)?,
            value: weight(KV_HEADS * HEAD_DIM, HIDDEN)?,
            out: weight(HIDDEN, HEADS * HEAD_DIM)?,
            gate: weight(INNER, HIDDEN)?,
            up: weight(INNER, HIDDEN)?,
            down: weight(HIDDEN, INNER)?,
        })
    }

    /// Heads outside of tokens, as both take them.
    fn heads(x: &Tensor, heads: usize) -> Result<Tensor> {
        x.reshape((1, TOKENS, heads, HEAD_DIM))?.transpose(1, 2)
    }

    fn by_warpforge(&self, x: &Tensor, rope: &Rope, positions: &Tensor) -> Result<Tensor> {
        let normed = rmsnorm(x, &self.norms[0], 1e-6)?;
        let project = |weight: &Tensor| matmul(&normed, &weight.t()?);
        let q = rope.apply(&Self::heads(&project(&self.query)?, HEADS)?, positions)?;
        let k = rope.apply(&Self::heads(&project(&self.key)?, KV_HEADS)?, positions)?;
        let v = Self::heads(&project(&self.value)?, KV_HEADS)?;
        let seen =
            attention(&q, &k, &v, Attention::causal())?.transpose(1, 2)?.flatten_from(2)?.squeeze(0)?;
        let x = (x + matmul(&seen, &self.out.t()?)?)?;
        let normed = rmsnorm(&x, &self.norms[1], 1e-6)?;
        let inner = swiglu(&matmul(&normed, &self.gate.t()?)?, &matmul(&normed, &self.up.t()?)?)?;
        x + matmul(&inner, &self.down.t()?)?
    }

    fn by_candle(&self, x: &Tensor, [cos, sin, mask]: &[Tensor; 3]) -> Result<Tensor> {
        let normed = candle_nn::ops::rms_norm(x, &self.norms[0], 1e-6)?;
        let project = |weight: &Tensor| normed.matmul(&weight.t()?);
        let q = candle_nn::rotary_emb::rope(
            &Self::heads(&project(&self.query)?, HEADS)?.contiguous()?,
            cos,
            sin,
        )?;
        let k = candle_nn::rotary_emb::rope(
            &Self::heads(&project(&self.key)?, KV_HEADS)?.contiguous()?,
            cos,
            sin,
        )?;
        let v = Self::heads(&project(&self.value)?, KV_HEADS)?;
        let repeat = |x: &Tensor| {
            let shape = (1, KV_HEADS, HEADS / KV_HEADS, TOKENS, HEAD_DIM);
            x.unsqueeze(2)?.broadcast_as(shape)?.reshape((1, HEADS, TOKENS, HEAD_DIM))
        };
        let scores = (q.matmul(&repeat(&k)?.t()?)? / (HEAD_DIM as f64).sqrt())?.broadcast_add(mask)?;
        let seen = candle_nn::ops::softmax_last_dim(&scores)?.matmul(&repeat(&v)?)?;
        let seen = seen.transpose(1, 2)?.flatten_from(2)?.squeeze(0)?;
        let x = (x + seen.matmul(&self.out.t()?)?)?;
        let normed = candle_nn::ops::rms_norm(&x, &self.norms[1], 1e-6)?;
        let gate = candle_nn::ops::silu(&normed.matmul(&self.gate.t()?)?)?;
        x + (gate * normed.matmul(&self.up.t()?)?)?.matmul(&self.down.t()?)?
    }
}

fn main() -> Result<()> {
    let device = Device::Cpu;
    let layer = Layer::new(&device)?;
    let x = Tensor::randn(0f32, 1., (TOKENS, HIDDEN), &device)?;
    let positions = Tensor::arange(0u32, TOKENS as u32, &device)?;
    let rope = Rope::of_theta(1e4, HEAD_DIM, TOKENS as u32, RopeStyle::HalfSplit)?;
    let inv_freq: Vec<f32> =
        (0..HEAD_DIM / 2).map(|pair| 1e4f32.powf(-2.0 * pair as f32 / HEAD_DIM as f32)).collect();
    let inv_freq = Tensor::from_vec(inv_freq, (1, HEAD_DIM / 2), &device)?;
    let angles = positions.to_dtype(DType::F32)?.unsqueeze(1)?.matmul(&inv_freq)?;
    let hidden = |at: usize| if at % TOKENS > at / TOKENS { f32::NEG_INFINITY } else { 0.0 };
    let mask = Tensor::from_vec((0..TOKENS * TOKENS).map(hidden).collect(), (TOKENS, TOKENS), &device)?;
    let tables = [angles.cos()?, angles.sin()?, mask];

    let timed = |run: &dyn Fn() -> Result<Tensor>| -> Result<(Tensor, f64)> {
        let first = run()?;
        let start = Instant::now();
        for _ in 0..10 {
            run()?;
        }
        Ok((first, start.elapsed().as_secs_f64() * 100.0))
    };
    let (ours, our_time) = timed(&|| layer.by_warpforge(&x, &rope, &positions))?;
    let (theirs, their_time) = timed(&|| layer.by_candle(&x, &tables))?;
    let apart = (ours - &theirs)?.abs()?.max_all()?.to_scalar::<f32>()?;
    println!("candle {their_time:.2} ms, warpforge {our_time:.2} ms, at most {apart:.1e} apart");
    if apart < 1e-3 { Ok(()) } else { candle_core::bail!("the results differ") }
}
