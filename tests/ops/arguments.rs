//! Arguments that do not fit: every operator refuses each of its tensors where the type, a size or a stride is wrong, and says which
//! tensor that is. The operators' own tests have what else can be wrong, and the words of the messages.

use warpforge::ops::Store;
use warpforge::ops::causal_conv1d::{CausalConv1d, CausalConv1dArgs, CausalConv1dProblem};
use warpforge::ops::embedding::{Embedding, EmbeddingArgs, EmbeddingProblem};
use warpforge::ops::embedding_bag::{EmbeddingBag, EmbeddingBagArgs, EmbeddingBagProblem};
use warpforge::ops::gated_delta::{GatedDelta, GatedDeltaArgs, GatedDeltaProblem};
use warpforge::ops::glu::{Activation, Glu, GluArgs, GluProblem};
use warpforge::ops::grouped_matmul::{GroupedMatmul, GroupedMatmulArgs, GroupedMatmulProblem, GroupedRows};
use warpforge::ops::kv_append::{KvAppend, KvAppendArgs, KvAppendProblem};
use warpforge::ops::layernorm::{LayerNorm, LayerNormArgs, LayerNormProblem};
use warpforge::ops::matmul::Bias;
use warpforge::ops::matmul_i8::{MatmulI8, MatmulI8Args, MatmulI8Problem};
use warpforge::ops::moe_combine::{MoeCombine, MoeCombineArgs, MoeCombineProblem};
use warpforge::ops::moe_permute::{MoePermute, MoePermuteArgs, MoePermuteProblem};
use warpforge::ops::moe_router::{MoeRouter, MoeRouterArgs, MoeRouterProblem, RouterScore, RouterWeights};
use warpforge::ops::qk_norm_rope::{QkNorm, QkNormRope, QkNormRopeArgs, QkNormRopeProblem, QkNormWeights};
use warpforge::ops::rmsnorm::{NormWeight, RmsNorm, RmsNormArgs, RmsNormProblem};
use warpforge::ops::rope::{Rope, RopeArgs, RopeInput, RopeProblem, RopeStyle, RopeTables};
use warpforge::ops::sampling::{Sampler, Sampling, SamplingArgs, SamplingProblem};
use warpforge::ops::scatter_rows::{ScatterRows, ScatterRowsArgs, ScatterRowsProblem};
use warpforge::{DType, Error, Stream, Tensor, TensorView, TensorViewMut};

use crate::harness::devices;

const F32: DType = DType::F32;
const U32: DType = DType::U32;

/// What is wrong with a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    Nothing,
    Type,
    /// One more than there should be, along this axis.
    Longer(usize),
    /// Elements that are not next to each other.
    Gaps,
}

/// A tensor's name, shape and type.
type Signature = (&'static str, &'static [usize], DType);

/// A tensor, perhaps of every second element.
struct Argument {
    tensor: Tensor,
    shape: Vec<usize>,
}

impl Argument {
    fn new(stream: &Stream, (_, shape, dtype): Signature, mistake: Mistake) -> Result<Self, Error> {
        let (mut shape, mut dtype, mut apart) = (shape.to_vec(), dtype, 1);
        match mistake {
            Mistake::Nothing => {}
            Mistake::Type => dtype = if dtype == DType::I32 { U32 } else { DType::I32 },
            Mistake::Longer(axis) => shape[axis] += 1,
            Mistake::Gaps => apart = 2,
        }
        let whole = [&shape[..], &[apart]].concat();
        let tensor = match dtype {
            // Numbers of rows, and where groups begin: ascending.
            DType::U32 => Tensor::from_slice(
                stream,
                &whole,
                &(0..whole.iter().product::<usize>() as u32).collect::<Vec<_>>(),
            )?,
            _ => Tensor::zeros(stream, &whole, dtype)?,
        };
        Ok(Argument { tensor, shape })
    }

    fn view(&self) -> Result<TensorView<'_>, Error> {
        self.tensor.view().slice(self.shape.len(), 0..1)?.reshape(&self.shape)
    }

    fn view_mut(&mut self) -> Result<TensorViewMut<'_>, Error> {
        self.tensor.view_mut().slice(self.shape.len(), 0..1)?.reshape(&self.shape)
    }
}

/// Runs with all tensors right, then with each mistake of each tensor but the `allowed` ones. A size may be another tensor's fault.
fn refuses<const N: usize>(
    op: &str,
    signatures: [Signature; N],
    allowed: &[(&str, Mistake)],
    run: impl Fn(&Stream, &mut [Argument; N]) -> Result<(), Error>,
) -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let run = |at: usize, mistake: Mistake| -> Result<(), Error> {
            let mut arguments = Vec::new();
            for (index, signature) in signatures.into_iter().enumerate() {
                let mistake = if index == at { mistake } else { Mistake::Nothing };
                arguments.push(Argument::new(&stream, signature, mistake)?);
            }
            let Ok(mut arguments) = <[Argument; N]>::try_from(arguments) else { unreachable!() };
            run(&stream, &mut arguments)
        };
        run(0, Mistake::Nothing)?;
        for (at, (name, shape, _)) in signatures.into_iter().enumerate() {
            let longer = (0..shape.len()).map(Mistake::Longer);
            for mistake in longer.chain([Mistake::Type, Mistake::Gaps]) {
                if allowed.contains(&(name, mistake)) {
                    continue;
                }
                let Err(error) = run(at, mistake) else { panic!("{op}: {name}: {mistake:?} on {device:?}") };
                let whose = if matches!(mistake, Mistake::Longer(_)) {
                    format!("{op}: ")
                } else {
                    format!("{op}: {name}: expected ")
                };
                assert!(error.to_string().starts_with(&whose), "{name}, {mistake:?}: {error}");
            }
        }
    }
    Ok(())
}

#[test]
fn norms_and_activations() -> Result<(), Error> {
    let rows: &[usize] = &[4, 64];
    let names = [
        ("x", rows, F32),
        ("residual", rows, F32),
        ("weight", &[64], F32),
        ("gate", rows, F32),
        ("out", rows, F32),
    ];
    refuses("rmsnorm", names, &[], |stream, [x, residual, weight, gate, out]| {
        let problem = RmsNormProblem { rows: 4, cols: 64, dtype: F32, eps: 1e-6, weight: NormWeight::Plain };
        let args = RmsNormArgs {
            x: x.view()?,
            residual: Some(residual.view_mut()?),
            weight: weight.view()?,
            gate: Some(gate.view()?),
            out: out.view_mut()?,
        };
        RmsNorm::plan(stream.device(), problem)?.run(stream, args)
    })?;
    let names = [
        ("x", rows, F32),
        ("residual", rows, F32),
        ("weight", &[64], F32),
        ("bias", &[64], F32),
        ("out", rows, F32),
    ];
    refuses("layernorm", names, &[], |stream, [x, residual, weight, bias, out]| {
        let problem = LayerNormProblem { rows: 4, cols: 64, dtype: F32, eps: 1e-6 };
        let args = LayerNormArgs {
            x: x.view()?,
            residual: Some(residual.view_mut()?),
            weight: weight.view()?,
            bias: bias.view()?,
            out: out.view_mut()?,
        };
        LayerNorm::plan(stream.device(), problem)?.run(stream, args)
    })?;
    refuses(
        "glu",
        [("gate", rows, F32), ("up", rows, F32), ("out", rows, F32)],
        &[],
        |stream, [gate, up, out]| {
            let problem = GluProblem { rows: 4, cols: 64, dtype: F32, activation: Activation::Silu };
            let args = GluArgs { gate: gate.view()?, up: Some(up.view()?), out: out.view_mut()? };
            Glu::plan(stream.device(), problem)?.run(stream, args)
        },
    )
}

#[test]
fn rows_by_number() -> Result<(), Error> {
    let names = [("ids", &[4][..], U32), ("table", &[9, 64], F32), ("out", &[4, 64], F32)];
    refuses("embedding", names, &[], |stream, [ids, table, out]| {
        let problem = EmbeddingProblem { tokens: 4, vocab: 9, cols: 64, dtype: F32 };
        let args = EmbeddingArgs { ids: ids.view()?, table: table.view()?, out: out.view_mut()? };
        Embedding::plan(stream.device(), problem)?.run(stream, args)
    })?;
    let names = [
        ("table", &[9, 64][..], F32),
        ("ids", &[4, 2], U32),
        ("weights", &[4, 2], F32),
        ("out", &[4, 64], F32),
    ];
    refuses("embedding_bag", names, &[], |stream, [table, ids, weights, out]| {
        let problem =
            EmbeddingBagProblem { tokens: 4, bag: 2, vocab: 9, cols: 64, dtype: F32, store: Store::Replace };
        let (table, ids, weights) = (table.view()?, ids.view()?, weights.view()?);
        EmbeddingBag::plan(stream.device(), problem)?
            .run(stream, EmbeddingBagArgs { table, ids, weights, out: out.view_mut()? })
    })?;
    // As many rows of out as there are.
    let allowed = [("out", Mistake::Longer(0))];
    let names = [("x", &[4, 64][..], F32), ("ids", &[4], U32), ("out", &[9, 64], F32)];
    refuses("scatter_rows", names, &allowed, |stream, [x, ids, out]| {
        let problem = ScatterRowsProblem { rows: 4, cols: 64, dtype: F32, store: Store::Add };
        let args = ScatterRowsArgs { x: x.view()?, ids: ids.view()?, out: out.view_mut()? };
        ScatterRows::plan(stream.device(), problem)?.run(stream, args)
    })?;
    let names = [("logits", &[4, 64][..], F32), ("ids", &[4], U32)];
    refuses("sampling", names, &[], |stream, [logits, ids]| {
        let problem = SamplingProblem { rows: 4, vocab: 64, dtype: F32, method: Sampling::Greedy };
        let args = SamplingArgs { logits: logits.view()?, ids: ids.view_mut()?, step: 0 };
        Sampler::plan(stream.device(), problem)?.run(stream, args)
    })
}

#[test]
fn heads_and_caches() -> Result<(), Error> {
    let (tokens, heads, head_dim) = (3, 2, 8);
    let of_tokens: &[usize] = &[3, 2, 8];
    let cache: &[usize] = &[9, 2, 8];
    let names = [
        ("k", of_tokens, F32),
        ("v", of_tokens, F32),
        ("slots", &[3], U32),
        ("k_cache", cache, F32),
        ("v_cache", cache, F32),
    ];
    refuses("kv_append", names, &[], |stream, [k, v, slots, k_cache, v_cache]| {
        let args = KvAppendArgs {
            k: k.view()?,
            v: Some(v.view()?),
            slots: slots.view()?,
            k_cache: k_cache.view_mut()?,
            v_cache: Some(v_cache.view_mut()?),
        };
        KvAppend::plan(stream.device(), KvAppendProblem { tokens, heads, head_dim, dtype: F32 })?
            .run(stream, args)
    })?;
    let angles: Vec<f64> = (0..4).map(f64::from).collect();
    // Positions may have any stride.
    let allowed = [("positions", Mistake::Gaps)];
    let names = [("x", of_tokens, F32), ("positions", &[3], U32), ("out", of_tokens, F32)];
    refuses("rope", names, &allowed, |stream, [x, positions, out]| {
        let (rotary_dim, style) = (head_dim, RopeStyle::HalfSplit);
        let problem = RopeProblem { tokens, heads, head_dim, rotary_dim, style, dtype: F32 };
        let tables = RopeTables::new(stream, &angles, 1.0, 16)?;
        let (x, positions) = (RopeInput::From(x.view()?), positions.view()?);
        Rope::plan(stream.device(), problem)?
            .run(stream, RopeArgs { x, positions, tables: &tables, out: out.view_mut()? })
    })?;
    let fp8 = DType::F8E4M3;
    let names = [
        ("q", of_tokens, F32),
        ("k", of_tokens, F32),
        ("v", of_tokens, F32),
        ("weights.q", &[8], F32),
        ("weights.k", &[8], F32),
        ("positions", &[3], U32),
        ("slots", &[3], U32),
        ("q_out", of_tokens, F32),
        ("k_cache", cache, fp8),
        ("v_cache", cache, fp8),
        ("k_scale", &[2], F32),
        ("v_scale", &[2], F32),
    ];
    refuses("qk_norm_rope", names, &allowed, |stream, arguments| {
        let [q, k, v, q_weight, k_weight, positions, slots, q_out, k_cache, v_cache, k_scale, v_scale] =
            arguments;
        let problem = QkNormRopeProblem {
            tokens,
            heads_q: heads,
            heads_kv: heads,
            head_dim,
            rotary_dim: head_dim,
            style: RopeStyle::HalfSplit,
            dtype: F32,
            cache_dtype: fp8,
            norm: Some(QkNorm { eps: 1e-6, weight: NormWeight::Plain }),
        };
        let tables = RopeTables::new(stream, &angles, 1.0, 16)?;
        let args = QkNormRopeArgs {
            q: RopeInput::From(q.view()?),
            k: k.view()?,
            v: v.view()?,
            weights: Some(QkNormWeights { q: q_weight.view()?, k: k_weight.view()? }),
            positions: positions.view()?,
            tables: &tables,
            slots: slots.view()?,
            q_out: q_out.view_mut()?,
            k_cache: k_cache.view_mut()?,
            v_cache: v_cache.view_mut()?,
            k_scale: Some(k_scale.view()?),
            v_scale: Some(v_scale.view()?),
        };
        QkNormRope::plan(stream.device(), problem)?.run(stream, args)
    })
}

#[test]
fn sequences_with_a_state() -> Result<(), Error> {
    // As many slots as there are.
    let allowed = [("state", Mistake::Longer(0))];
    let names = [
        ("x", &[4, 8][..], F32),
        ("weight", &[8, 4], F32),
        ("bias", &[8], F32),
        ("offsets", &[3], U32),
        ("slots", &[2], U32),
        ("state", &[5, 8, 3], F32),
        ("out", &[4, 8], F32),
    ];
    refuses("causal_conv1d", names, &allowed, |stream, [x, weight, bias, offsets, slots, state, out]| {
        let problem = CausalConv1dProblem { tokens: 4, sequences: 2, channels: 8, width: 4, dtype: F32 };
        let args = CausalConv1dArgs {
            x: x.view()?,
            weight: weight.view()?,
            bias: Some(bias.view()?),
            offsets: offsets.view()?,
            slots: slots.view()?,
            state: state.view_mut()?,
            out: out.view_mut()?,
        };
        CausalConv1d::plan(stream.device(), problem)?.run(stream, args)
    })?;
    let keys: &[usize] = &[4, 2, 8];
    let values: &[usize] = &[4, 2, 4];
    let names = [
        ("q", keys, F32),
        ("k", keys, F32),
        ("v", values, F32),
        ("b", &[4, 2], F32),
        ("a", &[4, 2], F32),
        ("a_log", &[2], F32),
        ("dt_bias", &[2], F32),
        ("offsets", &[3], U32),
        ("slots", &[2], U32),
        ("state", &[5, 2, 8, 4], F32),
        ("out", values, F32),
    ];
    refuses(
        "gated_delta",
        names,
        &allowed,
        |stream, [q, k, v, b, a, a_log, dt_bias, offsets, slots, state, out]| {
            let (heads_k, heads_v, dim_k, dim_v) = (2, 2, 8, 4);
            let problem = GatedDeltaProblem {
                tokens: 4,
                sequences: 2,
                longest: 4,
                heads_k,
                heads_v,
                dim_k,
                dim_v,
                dtype: F32,
            };
            let args = GatedDeltaArgs {
                q: q.view()?,
                k: k.view()?,
                v: v.view()?,
                b: b.view()?,
                a: a.view()?,
                a_log: a_log.view()?,
                dt_bias: dt_bias.view()?,
                offsets: offsets.view()?,
                slots: slots.view()?,
                state: state.view_mut()?,
                out: out.view_mut()?,
            };
            GatedDelta::plan(stream.device(), problem)?.run(stream, args)
        },
    )
}

#[test]
fn mixtures_of_experts() -> Result<(), Error> {
    let pairs: &[usize] = &[4, 2];
    let names =
        [("logits", &[4, 8][..], F32), ("bias", &[8], F32), ("ids", pairs, U32), ("weights", pairs, F32)];
    refuses("moe_router", names, &[], |stream, [logits, bias, ids, weights]| {
        let problem = MoeRouterProblem {
            tokens: 4,
            experts: 8,
            top_k: 2,
            dtype: F32,
            score: RouterScore::Softmax,
            groups: None,
            weights: RouterWeights::Scores,
            scale: 1.0,
            weight_dtype: F32,
        };
        let args = MoeRouterArgs {
            logits: logits.view()?,
            bias: Some(bias.view()?),
            ids: ids.view_mut()?,
            weights: weights.view_mut()?,
        };
        MoeRouter::plan(stream.device(), problem)?.run(stream, args)
    })?;
    let names =
        [("ids", pairs, U32), ("offsets", &[9], U32), ("order", &[8], U32), ("positions", pairs, U32)];
    refuses("moe_permute", names, &[], |stream, [ids, offsets, order, positions]| {
        let args = MoePermuteArgs {
            ids: ids.view()?,
            offsets: offsets.view_mut()?,
            order: order.view_mut()?,
            positions: positions.view_mut()?,
        };
        MoePermute::plan(stream.device(), MoePermuteProblem { tokens: 4, top_k: 2, experts: 8 })?
            .run(stream, args)
    })?;
    let names = [
        ("x", &[4, 8][..], F32),
        ("w", &[3, 6, 8], F32),
        ("offsets", &[4], U32),
        ("order", &[8], U32),
        ("out", &[8, 6], F32),
    ];
    refuses("grouped_matmul", names, &[], |stream, [x, w, offsets, order, out]| {
        let from = GroupedRows::Gathered { fan_out: 2 };
        let problem = GroupedMatmulProblem { rows: 8, experts: 3, n: 6, k: 8, dtype: F32, from };
        let args = GroupedMatmulArgs {
            x: x.view()?,
            w: w.view()?,
            offsets: offsets.view()?,
            order: Some(order.view()?),
            out: out.view_mut()?,
        };
        GroupedMatmul::plan(stream.device(), problem)?.run(stream, args)
    })?;
    // As many rows of y as there are; the gate is one number a row.
    let allowed = [("y", Mistake::Longer(0)), ("gate", Mistake::Gaps)];
    let names = [
        ("y", &[8, 16][..], F32),
        ("weights", pairs, F32),
        ("positions", pairs, U32),
        ("shared", &[4, 16], F32),
        ("gate", &[4, 1], F32),
        ("out", &[4, 16], F32),
    ];
    refuses("moe_combine", names, &allowed, |stream, [y, weights, positions, shared, gate, out]| {
        let args = MoeCombineArgs {
            y: y.view()?,
            weights: weights.view()?,
            positions: positions.view()?,
            shared: Some(shared.view()?),
            gate: Some(gate.view()?),
            out: out.view_mut()?,
        };
        let problem = MoeCombineProblem { tokens: 4, top_k: 2, cols: 16, dtype: F32 };
        MoeCombine::plan(stream.device(), problem)?.run(stream, args)
    })
}

#[test]
fn products_of_int8() -> Result<(), Error> {
    let i8 = DType::I8;
    let names = [
        ("qa", &[4, 8][..], i8),
        ("qb", &[6, 8], i8),
        ("a_scale", &[4], F32),
        ("b_scale", &[6], F32),
        ("bias", &[6], F32),
        ("out", &[4, 6], F32),
    ];
    refuses("matmul_i8", names, &[], |stream, [qa, qb, a_scale, b_scale, bias, out]| {
        let problem = MatmulI8Problem { m: 4, n: 6, k: 8, out_dtype: F32, bias: Bias::PerColumn };
        let args = MatmulI8Args {
            qa: qa.view()?,
            qb: qb.view()?,
            a_scale: a_scale.view()?,
            b_scale: b_scale.view()?,
            bias: Some(bias.view()?),
            out: out.view_mut()?,
        };
        MatmulI8::plan(stream.device(), problem)?.run(stream, args)
    })
}
