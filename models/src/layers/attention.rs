//! Grouped-query attention, perhaps with a norm per head on q and k, and a gate on its output.

use std::ops::Range;

use abi::DType;

use super::group::GroupAttention;
use super::low_rank::{Adapted, LowRankBlock, PartAdapters, Which, run_adapted};
use super::{InPlace, Phase, Plans, Projection, ProjectionKind, ProjectionPlan, Step, copy_row, planned};
use crate::config::AttentionConfig;
use crate::loader::Loader;
use crate::part::{Cut, Part};
use host::Error;
use host::Stream;
use host::ops::attention::{AttentionProblem, KvScales, Mask};
use host::ops::glu::{Activation, Glu, GluArgs, GluProblem};
use host::ops::matmul::{Act, Residual};
use host::ops::qk_norm_rope::{QkNorm, QkNormRope, QkNormRopeArgs, QkNormRopeProblem, QkNormWeights};
use host::ops::rope::{RopeInput, RopeStyle};
use host::{Constant, Tensor, TensorView, TensorViewMut};
use host::{Kernel, OptimizationReport};

/// Grouped-query attention, perhaps with a norm per head on q and k.
#[derive(Debug)]
pub struct SelfAttention {
    /// q, k and v projections, above each other; with an output gate, its rows below them.
    pub qkv: Projection,
    /// Gain of the norm of each query head, if they are normed.
    pub q_norm: Option<Constant>,
    /// Gain of the norm of each key head, if they are normed.
    pub k_norm: Option<Constant>,
    /// Output projection.
    pub o: Projection,
    /// `[heads_kv]` f32 each: what keys and values of an fp8 cache are multiplied by.
    pub kv_scales: [Constant; 2],
}

impl SelfAttention {
    pub(super) fn new(
        config: &AttentionConfig,
        hidden_size: usize,
        loader: &mut Loader<'_>,
        prefix: &str,
    ) -> Result<Self, Error> {
        let &AttentionConfig { head_dim, bias, output_bias, qk_norm, .. } = config;
        let name = |part: &str| format!("{prefix}.{part}");
        let (part, cols, o) = (loader.part(), hidden_size.into(), name("o_proj"));
        let (parts, q_rows) = Self::parts(config, part, prefix);
        let parts: Vec<(&str, Cut)> =
            parts.iter().map(|(name, rows)| (name.as_str(), rows.clone())).collect();
        let qkv = Projection::new(loader, &parts, &cols, bias)?;
        let mut gain = |part| if qk_norm { loader.gain(&name(part), head_dim).map(Some) } else { Ok(None) };
        let (q_norm, k_norm) = (gain("q_norm.weight")?, gain("k_norm.weight")?);
        let [_, kv_heads] = part.heads(config);
        let heads = Cut::range(config.heads_kv, kv_heads);
        let scales = |of: &str| [format!("{prefix}.{of}_scale"), format!("{prefix}.{of}_proj.{of}_scale")];
        let kv_scales =
            [loader.head_scales(&scales("k"), &heads)?, loader.head_scales(&scales("v"), &heads)?];
        Ok(SelfAttention {
            qkv,
            q_norm,
            k_norm,
            kv_scales,
            o: Projection::new(
                loader,
                &[(o.as_str(), hidden_size.into())],
                &q_rows,
                output_bias && part.is_first(),
            )?,
        })
    }
}

impl SelfAttention {
    /// The modules that `qkv` is made of, with the rows of each; and the columns of the output projection.
    pub(super) fn parts(config: &AttentionConfig, part: Part, prefix: &str) -> (Vec<(String, Cut)>, Cut) {
        let &AttentionConfig { heads_q, heads_kv, head_dim, output_gate, .. } = config;
        let [q_heads, kv_heads] = part.heads(config);
        let q_rows = Cut::range(heads_q, q_heads.clone()).times(head_dim);
        let kv_rows = Cut::range(heads_kv, kv_heads).times(head_dim);
        let named = |name: &str, rows: Cut| (format!("{prefix}.{name}"), rows);
        let (k, v) = (named("k_proj", kv_rows.clone()), named("v_proj", kv_rows));
        let parts = if output_gate {
            // A checkpoint has the rows of each head's q, then those of its gate.
            let rows = |gate: usize| {
                let ranges = q_heads.clone().map(|head| 2 * head + gate..2 * head + gate + 1).collect();
                named("q_proj", Cut { of: 2 * heads_q, ranges }.times(head_dim))
            };
            vec![rows(0), k, v, rows(1)]
        } else {
            vec![named("q_proj", q_rows.clone()), k, v]
        };
        (parts, q_rows)
    }

    /// What its plans depend on.
    pub(super) fn kinds(&self) -> Vec<ProjectionKind> {
        vec![self.qkv.kind(), self.o.kind()]
    }
}

/// Keys and values, `[batch, capacity, heads_kv, head_dim]` or `[pages, page_tokens, heads_kv, head_dim]` each.
#[derive(Debug)]
pub(crate) struct KeysValues {
    k: Tensor,
    v: Tensor,
}

impl KeysValues {
    pub(super) fn new(
        config: &AttentionConfig,
        stream: &Stream,
        dtype: DType,
        [outer, inner]: [usize; 2],
    ) -> Result<Self, Error> {
        let shape = [outer, inner, config.heads_kv, config.head_dim];
        // Hopper's kernel of many queries loads pages as a whole, also what nobody has written yet.
        Ok(KeysValues { k: Tensor::zeros(stream, &shape, dtype)?, v: Tensor::zeros(stream, &shape, dtype)? })
    }

    pub(super) fn bytes(&self) -> usize {
        self.k.bytes() + self.v.bytes()
    }

    pub(super) fn views_mut(&mut self) -> [TensorViewMut<'_>; 2] {
        [self.k.view_mut(), self.v.view_mut()]
    }

    pub(super) fn copy_sequence(
        &mut self,
        stream: &Stream,
        (from, to): (usize, usize),
        len: usize,
    ) -> Result<(), Error> {
        copy_row(stream, &mut self.k, (from, to), len)?;
        copy_row(stream, &mut self.v, (from, to), len)
    }
}

#[derive(Debug)]
pub(crate) struct AttentionBlock {
    config: AttentionConfig,
    plans: Plans<AttentionPlans>,
    /// Of both projections, where adapters add to them.
    low_rank: [Option<LowRankBlock>; 2],
    /// Of each group.
    attention: Vec<GroupAttention>,
    /// `[tokens, (heads_q + 2 heads_kv) · head_dim]`: the query heads, then the key heads, then the value heads; then
    /// the gates of the query heads, if there are any.
    qkv: Tensor,
    /// `[tokens, heads_q, head_dim]`
    q: Tensor,
    /// `[tokens, heads_q · head_dim]`
    attended: Tensor,
    /// The same behind the gate, if there is one.
    gated: Option<Tensor>,
}

#[derive(Debug)]
struct AttentionPlans {
    qkv: ProjectionPlan,
    norm_rope: QkNormRope,
    /// Of the output.
    gate: Option<Glu>,
    o: ProjectionPlan,
    /// Of the residual behind its norm, and added to it, where that is possible.
    qkv_normed: Option<ProjectionPlan>,
    o_added: Option<ProjectionPlan>,
}

impl AttentionBlock {
    pub(super) fn new(
        phase: &Phase<'_>,
        config: &AttentionConfig,
        weights: &SelfAttention,
    ) -> Result<Self, Error> {
        let &AttentionConfig { heads_q, heads_kv, head_dim, qk_norm, window, output_gate, .. } = config;
        let &Phase { stream, dtype, cache_type, .. } = phase;
        let cache_dtype = cache_type.dtype(dtype);
        let (hidden_size, rotary_dim) = (phase.config.hidden_size, phase.config.rope.rotary_dim);
        let (device, norm) = (stream.device(), phase.config.norm);
        let problem = AttentionProblem {
            mask: Mask::Causal,
            window,
            dtype_kv: cache_dtype,
            ..AttentionProblem::new(0, [0, 0], [heads_q, heads_kv], head_dim, dtype)
        };
        let q_cols = heads_q * head_dim;
        let gate_cols = if output_gate { q_cols } else { 0 };
        let qkv_cols = q_cols + 2 * heads_kv * head_dim + gate_cols;
        let plans = phase.plans(|phase| {
            let tokens = phase.tokens;
            let norm_rope = QkNormRopeProblem {
                tokens,
                heads_q,
                heads_kv,
                head_dim,
                rotary_dim,
                style: RopeStyle::HalfSplit,
                dtype,
                cache_dtype,
                norm: qk_norm.then_some(QkNorm { eps: norm.eps, weight: norm.weight }),
            };
            let gate = GluProblem { rows: tokens, cols: q_cols, dtype, activation: Activation::Sigmoid };
            Ok(AttentionPlans {
                qkv: ProjectionPlan::new(&phase, &weights.qkv, qkv_cols, hidden_size)?,
                norm_rope: QkNormRope::plan(device, norm_rope)?,
                gate: output_gate.then(|| Glu::plan(device, gate)).transpose()?,
                o: ProjectionPlan::new(&phase, &weights.o, hidden_size, q_cols)?,
                qkv_normed: ProjectionPlan::in_place(
                    &phase,
                    (&weights.qkv, [qkv_cols, hidden_size], Act::None),
                    Some(phase.row_norm()),
                )?,
                o_added: ProjectionPlan::in_place(
                    &phase,
                    (&weights.o, [hidden_size, q_cols], Act::None),
                    None,
                )?,
            })
        })?;
        let attention = phase.groups.iter().map(|group| group.shared_attention(phase, problem));
        Ok(AttentionBlock {
            config: *config,
            plans,
            low_rank: LowRankBlock::of_part(
                phase,
                Adapted::Attention,
                [
                    (Which::First, &weights.qkv, [qkv_cols, hidden_size]),
                    (Which::Last, &weights.o, [hidden_size, q_cols]),
                ],
            )?,
            attention: attention.collect::<Result<_, _>>()?,
            qkv: phase.rows(&[qkv_cols])?,
            q: phase.rows(&[heads_q, head_dim])?,
            attended: phase.rows(&[q_cols])?,
            gated: output_gate.then(|| phase.rows(&[q_cols])).transpose()?,
        })
    }

    pub(super) fn reports(&self) -> Vec<OptimizationReport> {
        let mut reports = Vec::new();
        for plans in self.plans.iter() {
            reports.extend(plans.qkv_normed.as_ref().unwrap_or(&plans.qkv).reports());
            reports.push(plans.norm_rope.optimization_report());
            reports.extend(plans.gate.iter().map(Kernel::optimization_report));
            reports.extend(plans.o_added.as_ref().unwrap_or(&plans.o).reports());
        }
        reports.extend(self.attention.iter().flat_map(GroupAttention::reports));
        reports
    }

    pub(super) fn works_in_place(&self, tokens: usize) -> bool {
        self.adds_in_place(tokens) && self.plans.holding(tokens).is_ok_and(|plans| plans.qkv_normed.is_some())
    }

    pub(super) fn adds_in_place(&self, tokens: usize) -> bool {
        self.plans.holding(tokens).is_ok_and(|plans| plans.o_added.is_some())
    }

    pub(super) fn run_in_place(
        &mut self,
        step: &Step<'_>,
        weights: &SelfAttention,
        cache: &mut KeysValues,
        rows: InPlace<'_>,
    ) -> Result<(), Error> {
        let tokens = step.tokens;
        let plans = self.plans.holding(tokens)?;
        let (x, gain) = rows.input();
        let qkv = planned(gain.map_or(Some(&plans.qkv), |_| plans.qkv_normed.as_ref()))?;
        let out = self.qkv.view_mut().slice(0, 0..tokens)?;
        qkv.run_fused(step.stream, &weights.qkv, (x, gain), (out, None))?;
        self.attend(step, weights, cache)?;
        let o = planned(self.plans.holding(tokens)?.o_added.as_ref())?;
        let x = attended_rows(&self.gated, &self.attended, tokens)?;
        o.run_fused(step.stream, &weights.o, (x, None), (rows.residual, Some(Residual::InPlace)))
    }

    pub(super) fn run(
        &mut self,
        step: &Step<'_>,
        (weights, adapters): (&SelfAttention, Option<&PartAdapters>),
        cache: &mut KeysValues,
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let tokens = step.tokens;
        let qkv = self.qkv.view_mut().slice(0, 0..tokens)?;
        let plans = (&self.plans.holding(tokens)?.qkv, &mut self.low_rank[0]);
        run_adapted(step, plans, &weights.qkv, (adapters, Which::First), x, qkv)?;
        self.attend(step, weights, cache)?;
        let x = attended_rows(&self.gated, &self.attended, tokens)?;
        let plans = (&self.plans.holding(tokens)?.o, &mut self.low_rank[1]);
        run_adapted(step, plans, &weights.o, (adapters, Which::Last), x, out)
    }

    /// From the projections of q, k and v to what the output projection gets.
    fn attend(
        &mut self,
        step: &Step<'_>,
        weights: &SelfAttention,
        cache: &mut KeysValues,
    ) -> Result<(), Error> {
        let AttentionConfig { heads_q, heads_kv, head_dim, .. } = self.config;
        let (stream, tokens) = (step.stream, step.tokens);
        let plans = self.plans.holding(tokens)?;
        let qkv = self.qkv.view().slice(0, 0..tokens)?;
        let mut q = self.q.view_mut().slice(0, 0..tokens)?;
        let mut attended = self.attended.view_mut().slice(0, 0..tokens)?;

        let (k_start, v_start) = (heads_q * head_dim, (heads_q + heads_kv) * head_dim);
        let heads = |range: Range<usize>| -> Result<TensorView<'_>, Error> {
            let heads = range.len() / head_dim;
            qkv.slice(1, range)?.reshape(&[tokens, heads, head_dim])
        };
        let gates_start = v_start + heads_kv * head_dim;
        let slots = cache.k.shape()[0] * cache.k.shape()[1];
        let norms = match (&weights.q_norm, &weights.k_norm) {
            (Some(q), Some(k)) => Some(QkNormWeights { q: q.view(), k: k.view() }),
            _ => None,
        };
        let kv_scales = match cache.k.dtype() {
            DType::F8E4M3 => {
                let [k, v] = weights.kv_scales.each_ref().map(|scale| Some(scale.view()));
                KvScales { k, v }
            }
            _ => KvScales::default(),
        };
        let args = QkNormRopeArgs {
            q: RopeInput::From(heads(0..k_start)?),
            k: heads(k_start..v_start)?,
            v: heads(v_start..gates_start)?,
            weights: norms,
            positions: step.positions,
            tables: step.ropes,
            slots: step.slots,
            q_out: q.reborrow(),
            k_cache: cache.k.view_mut().reshape(&[slots, heads_kv, head_dim])?,
            v_cache: cache.v.view_mut().reshape(&[slots, heads_kv, head_dim])?,
            k_scale: kv_scales.k,
            v_scale: kv_scales.v,
        };
        plans.norm_rope.run(stream, args)?;

        for (plan, group) in step.groups(&self.attention) {
            let rows = group.rows.clone();
            let out =
                attended.reborrow().slice(0, rows.clone())?.reshape(&[rows.len(), heads_q, head_dim])?;
            let keys = ([cache.k.view(), cache.v.view()], kv_scales);
            group.attend_shared(stream, plan, q.as_view().slice(0, rows)?, keys, out)?;
        }
        let (Some(glu), Some(gated)) = (&plans.gate, &mut self.gated) else {
            return Ok(());
        };
        let mut gated = gated.view_mut().slice(0, 0..tokens)?;
        let gate = qkv.slice(1, gates_start..gates_start + heads_q * head_dim)?;
        glu.run(stream, GluArgs { gate, up: Some(attended.as_view()), out: gated.reborrow() })
    }
}

/// What the output projection gets.
fn attended_rows<'a>(
    gated: &'a Option<Tensor>,
    attended: &'a Tensor,
    tokens: usize,
) -> Result<TensorView<'a>, Error> {
    gated.as_ref().unwrap_or(attended).view().slice(0, 0..tokens)
}
