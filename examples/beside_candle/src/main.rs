//! A decoder layer on candle's tensors on a card, by candle's own operators and by warpforge's: how far they are apart,
//! and the time of each. `cargo run --release --package beside_candle --features cuda,sm90a`, with `nvcc` on the path,
//! which candle's build wants. Without the feature, and without a card, on the CPU.

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
// The kernels.
use warpforge as _;
use warpforge_candle::{Attention, Rope, RopeStyle, attention, matmul, rmsnorm, swiglu};

/// Sizes of Qwen3-0.6B.
const HIDDEN: usize = 1024;
const HEADS: usize = 16;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const INNER: usize = 3072;

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

/// Heads outside of tokens, as both take them.
fn heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    x.reshape((1, x.dim(0)?, heads, HEAD_DIM))?.transpose(1, 2)
}

impl Layer {
    fn new(device: &Device, dtype: DType) -> Result<Self> {
        let weight = |n: usize, k: usize| {
            Tensor::randn(0f32, 1.0 / (k as f32).sqrt(), (n, k), device)?.to_dtype(dtype)
        };
        let norm = || Tensor::rand(0.5f32, 1.5, HIDDEN, device)?.to_dtype(dtype);
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

    fn by_warpforge(&self, x: &Tensor, rope: &Rope, positions: &Tensor) -> Result<Tensor> {
        let normed = rmsnorm(x, &self.norms[0], 1e-6)?;
        let project = |weight: &Tensor| matmul(&normed, &weight.t()?);
        let q = rope.apply(&heads(&project(&self.query)?, HEADS)?, positions)?;
        let k = rope.apply(&heads(&project(&self.key)?, KV_HEADS)?, positions)?;
        let v = heads(&project(&self.value)?, KV_HEADS)?;
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
        let turned = |x: Tensor| candle_nn::rotary_emb::rope(&x.contiguous()?, cos, sin);
        let q = turned(heads(&project(&self.query)?, HEADS)?)?;
        let k = turned(heads(&project(&self.key)?, KV_HEADS)?)?;
        let v = heads(&project(&self.value)?, KV_HEADS)?;
        let tokens = x.dim(0)?;
        let repeat = |x: &Tensor| {
            let shape = (1, KV_HEADS, HEADS / KV_HEADS, tokens, HEAD_DIM);
            x.contiguous()?.unsqueeze(2)?.broadcast_as(shape)?.reshape((1, HEADS, tokens, HEAD_DIM))
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

/// The device and its name: a card in a stream of its own, since operators take no default stream.
fn device() -> Result<(Device, String)> {
    if cfg!(feature = "cuda") {
        match warpforge::Device::cuda(0) {
            Ok(card) => {
                return Ok((Device::new_cuda_with_stream(0)?, card.profile().name.to_string()));
            }
            Err(reason) => println!("no card: {reason}"),
        }
    }
    Ok((Device::Cpu, "CPU".into()))
}

fn main() -> Result<()> {
    let (device, name) = device()?;
    let (dtype, lengths, rounds) = if device.is_cpu() {
        (DType::F32, &[64][..], 3)
    } else {
        (DType::BF16, &[1, 128, 1024, 4096][..], 50)
    };
    println!("{name}, {dtype:?}, one layer of Qwen3-0.6B");
    let layer = Layer::new(&device, dtype)?;
    for &tokens in lengths {
        let x = Tensor::randn(0f32, 1., (tokens, HIDDEN), &device)?.to_dtype(dtype)?;
        let positions = Tensor::arange(0u32, tokens as u32, &device)?;
        let rope = Rope::of_theta(1e6, HEAD_DIM, tokens as u32, RopeStyle::HalfSplit)?;
        let inv_freq: Vec<f32> =
            (0..HEAD_DIM / 2).map(|pair| 1e6f32.powf(-2.0 * pair as f32 / HEAD_DIM as f32)).collect();
        let inv_freq = Tensor::from_vec(inv_freq, (1, HEAD_DIM / 2), &device)?;
        let angles = positions.to_dtype(DType::F32)?.unsqueeze(1)?.matmul(&inv_freq)?;
        let hidden = |at: usize| if at % tokens > at / tokens { f32::NEG_INFINITY } else { 0.0 };
        let mask = Tensor::from_vec((0..tokens * tokens).map(hidden).collect(), (tokens, tokens), &device)?;
        let typed = |x: Tensor| x.to_dtype(dtype);
        let tables = [typed(angles.cos()?)?, typed(angles.sin()?)?, typed(mask)?];
        let timed = |run: &dyn Fn() -> Result<Tensor>| -> Result<(Tensor, f64)> {
            let first = run()?;
            run()?;
            device.synchronize()?;
            let start = Instant::now();
            for _ in 0..rounds {
                run()?;
            }
            device.synchronize()?;
            Ok((first.to_dtype(DType::F32)?, start.elapsed().as_secs_f64() * 1e6 / f64::from(rounds)))
        };
        let (ours, our_time) = timed(&|| layer.by_warpforge(&x, &rope, &positions))?;
        let (theirs, their_time) = timed(&|| layer.by_candle(&x, &tables))?;
        let apart = (ours - &theirs)?.abs()?.max_all()?.to_scalar::<f32>()?;
        println!(
            "{tokens:5} tokens: candle {their_time:8.1} µs, warpforge {our_time:8.1} µs ({:.2} times as fast), at most \
             {apart:.1e} apart",
            their_time / our_time
        );
        if apart > if dtype == DType::F32 { 1e-3 } else { 0.25 } {
            candle_core::bail!("the results differ");
        }
    }
    Ok(())
}
