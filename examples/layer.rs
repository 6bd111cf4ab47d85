//! A decoder layer in the hands of an inference engine: plans and memory once, keys and values in pages, and a decode
//! step that is recorded where there is CUDA and replayed for every token, with nothing but its tables written in
//! between.
//!
//! ```text
//! x ─ norm ─ q k v in one product ─ norm, rotation, append to the pages ─ attention ─ product, + x
//!   └ norm ─ gate and up in one product, SwiGLU ─ product, + x
//! ```
//!
//! `cargo run --release --example layer`. It runs twice, with the pages in two orders, and compares the bits.

mod output;

use std::process::ExitCode;
use std::time::Instant;

use warpforge::ops::attention::{Attention, AttentionArgs, AttentionProblem, Mask};
use warpforge::ops::glu::Activation;
use warpforge::ops::matmul::{Act, Epilogue, Matmul, MatmulArgs, MatmulProblem, Residual};
use warpforge::ops::qk_norm_rope::{QkNorm, QkNormRope, QkNormRopeArgs, QkNormRopeProblem, QkNormWeights};
use warpforge::ops::rmsnorm::{NormWeight, RmsNorm, RmsNormArgs, RmsNormProblem};
use warpforge::ops::rope::{RopeInput, RopeTables};
use warpforge::{DType, Device, Stream, Tensor};

const BATCH: usize = 4;
const HIDDEN: usize = 1024;
const HEADS_Q: usize = 16;
const HEADS_KV: usize = 8;
const HEAD_DIM: usize = 128;
const INTERMEDIATE: usize = 3072;
const PAGE: usize = 16;
/// Pages of a sequence, in a pool that has as many for each.
const PAGES: usize = 4;
const TOKENS: usize = 24;
const DTYPE: DType = DType::BF16;
const EPS: f32 = 1e-6;

type Outcome<T> = Result<T, output::Failure>;

/// Reproducible values around 0, of this deviation.
fn random(stream: &Stream, shape: &[usize], deviation: f32, seed: u64) -> Outcome<Tensor> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let values: Vec<half::bf16> = (0..shape.iter().product())
        .map(|_| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            half::bf16::from_f32(((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 1.7 * deviation)
        })
        .collect();
    Ok(Tensor::from_slice(stream, shape, &values)?)
}

fn product(device: &Device, n: usize, k: usize, epilogue: Epilogue) -> Outcome<Matmul> {
    Ok(Matmul::plan(device, MatmulProblem { epilogue, ..MatmulProblem::new(BATCH, n, k, DTYPE) })?)
}

/// Decodes TOKENS tokens; sequence s has its i-th page at `page(s, i)` in the pool. Returns the last hidden states.
fn decode(device: &Device, page: impl Fn(usize, usize) -> usize) -> Outcome<Vec<half::bf16>> {
    let stream = device.stream()?;
    let (q_cols, kv_cols) = (HEADS_Q * HEAD_DIM, HEADS_KV * HEAD_DIM);

    let norm = RmsNorm::plan(device, RmsNormProblem::new(BATCH, HIDDEN, DTYPE, EPS))?;
    let qkv_plan = product(device, q_cols + 2 * kv_cols, HIDDEN, Epilogue::NONE)?;
    let residual = Epilogue { residual: true, ..Epilogue::NONE };
    let o_plan = product(device, HIDDEN, q_cols, residual)?;
    let up_plan = product(device, INTERMEDIATE, HIDDEN, Epilogue::of(Act::Gated(Activation::Silu)))?;
    let down_plan = product(device, HIDDEN, INTERMEDIATE, residual)?;
    let rope_plan = QkNormRope::plan(
        device,
        QkNormRopeProblem {
            norm: Some(QkNorm { eps: EPS, weight: NormWeight::Plain }),
            ..QkNormRopeProblem::new(BATCH, [HEADS_Q, HEADS_KV], HEAD_DIM, DTYPE)
        },
    )?;
    let attention = Attention::plan(
        device,
        AttentionProblem {
            mask: Mask::Causal,
            page_size: Some(PAGE),
            ..AttentionProblem::new(BATCH, [1, PAGES * PAGE], [HEADS_Q, HEADS_KV], HEAD_DIM, DTYPE)
        },
    )?;

    let weight = |rows, cols, seed| random(&stream, &[rows, cols], 0.5 / (cols as f32).sqrt(), seed);
    let (qkv_weight, o_weight) = (weight(q_cols + 2 * kv_cols, HIDDEN, 1)?, weight(HIDDEN, q_cols, 2)?);
    let (up_weight, down_weight) = (weight(2 * INTERMEDIATE, HIDDEN, 3)?, weight(HIDDEN, INTERMEDIATE, 4)?);
    let ones = |len| Tensor::from_slice(&stream, &[len], &vec![half::bf16::ONE; len]);
    let (gain, head_gain) = (ones(HIDDEN)?, ones(HEAD_DIM)?);
    let inv_freq: Vec<f64> =
        (0..HEAD_DIM / 2).map(|i| 1e6f64.powf(-2.0 * i as f64 / HEAD_DIM as f64)).collect();
    let ropes = RopeTables::new(&stream, &inv_freq, 1.0, PAGES * PAGE)?;

    let pool = || Tensor::zeros(&stream, &[BATCH * PAGES, PAGE, HEADS_KV, HEAD_DIM], DTYPE);
    let (mut k_pool, mut v_pool) = (pool()?, pool()?);
    let rows = |cols| Tensor::zeros(&stream, &[BATCH, cols], DTYPE);
    let mut x = random(&stream, &[BATCH, HIDDEN], 1.0, 5)?;
    let (mut normed, mut qkv, mut attended) = (rows(HIDDEN)?, rows(q_cols + 2 * kv_cols)?, rows(q_cols)?);
    let (mut q, mut gated) = (rows(q_cols)?, rows(INTERMEDIATE)?);
    // What differs from step to step is read from device memory when the kernels run.
    let words = || Tensor::zeros(&stream, &[BATCH], DType::U32);
    let (mut positions, mut slots, mut lens) = (words()?, words()?, words()?);
    let table: Vec<u32> = (0..BATCH * PAGES).map(|place| page(place / PAGES, place % PAGES) as u32).collect();
    let table = Tensor::from_slice(&stream, &[BATCH, PAGES], &table)?;

    let mut step = |stream: &Stream, [positions, slots, lens]: [&Tensor; 3]| {
        norm.run(stream, RmsNormArgs::new(x.view(), gain.view(), normed.view_mut()))?;
        qkv_plan.run(stream, MatmulArgs::new(normed.view(), qkv_weight.view(), qkv.view_mut()))?;
        let heads = |from: usize, heads: usize| {
            qkv.view().slice(1, from..from + heads * HEAD_DIM)?.reshape(&[BATCH, heads, HEAD_DIM])
        };
        let entries = [BATCH * PAGES * PAGE, HEADS_KV, HEAD_DIM];
        rope_plan.run(
            stream,
            QkNormRopeArgs {
                weights: Some(QkNormWeights { q: head_gain.view(), k: head_gain.view() }),
                ..QkNormRopeArgs::new(
                    RopeInput::From(heads(0, HEADS_Q)?),
                    [heads(q_cols, HEADS_KV)?, heads(q_cols + kv_cols, HEADS_KV)?],
                    positions.view(),
                    &ropes,
                    slots.view(),
                    q.view_mut().reshape(&[BATCH, HEADS_Q, HEAD_DIM])?,
                    [k_pool.view_mut().reshape(&entries)?, v_pool.view_mut().reshape(&entries)?],
                )
            },
        )?;
        let queries = [BATCH, 1, HEADS_Q, HEAD_DIM];
        let (queries, out) = (q.view().reshape(&queries)?, attended.view_mut().reshape(&queries)?);
        attention.run(
            stream,
            AttentionArgs {
                kv_lens: Some(lens.view()),
                page_table: Some(table.view()),
                ..AttentionArgs::new(queries, k_pool.view(), v_pool.view(), out)
            },
        )?;
        let args = MatmulArgs::new(attended.view(), o_weight.view(), x.view_mut());
        o_plan.run(stream, MatmulArgs { residual: Some(Residual::InPlace), ..args })?;
        norm.run(stream, RmsNormArgs::new(x.view(), gain.view(), normed.view_mut()))?;
        up_plan.run(stream, MatmulArgs::new(normed.view(), up_weight.view(), gated.view_mut()))?;
        let args = MatmulArgs::new(gated.view(), down_weight.view(), x.view_mut());
        down_plan.run(stream, MatmulArgs { residual: Some(Residual::InPlace), ..args })
    };

    let mut graph = None;
    let started = Instant::now();
    for token in 0..TOKENS {
        let slot = |sequence| (page(sequence, token / PAGE) * PAGE + token % PAGE) as u32;
        positions.view_mut().write(&stream, &[token as u32; BATCH])?;
        slots.view_mut().write(&stream, &std::array::from_fn::<u32, BATCH, _>(slot))?;
        lens.view_mut().write(&stream, &[token as u32 + 1; BATCH])?;
        let tables = [&positions, &slots, &lens];
        // The first step is run, so that all kernels are loaded; the second is recorded.
        match (&graph, token) {
            (_, 0) => step(&stream, tables)?,
            (None, 1) if stream.as_raw().is_some() => {
                graph = Some(stream.capture(|stream| step(stream, tables))?);
            }
            (None, _) => step(&stream, tables)?,
            (Some(_), _) => {}
        }
        if let Some(graph) = &graph {
            // SAFETY: plans and tensors live to the end of the function, which waits for the stream, and nobody else
            // uses them.
            unsafe { graph.launch(&stream)? };
        }
    }
    let last = x.to_vec(&stream)?;
    output::note(format_args!(
        "{:.1} µs a step on {}",
        started.elapsed().as_secs_f64() * 1e6 / TOKENS as f64,
        device.describe()
    ));
    Ok(last)
}

fn main() -> ExitCode {
    output::end("layer", run())
}

fn run() -> Outcome<ExitCode> {
    let device = Device::best();
    let in_order = decode(&device, |sequence, index| sequence * PAGES + index)?;
    let scattered = decode(&device, |sequence, index| (PAGES - 1 - index) * BATCH + sequence)?;
    assert!(in_order.iter().all(|value| value.is_finite()));
    assert_eq!(in_order, scattered, "the order of the pages makes no difference");
    output::write(format_args!(
        "{TOKENS} tokens of {BATCH} sequences; the order of the pages makes no difference\n"
    ))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_runs() {
        super::run().unwrap();
    }
}
