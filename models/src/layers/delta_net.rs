//! The gated delta net: linear attention with a state of fixed size.

use std::ops::Range;

use abi::DType;

use super::low_rank::{Adapted, LowRankBlock, PartAdapters, Which, run_adapted};
use super::{
    GroupPhase, InPlace, Phase, Plans, Projection, ProjectionKind, ProjectionPlan, Step, copy_row, planned,
};
use crate::config::DeltaNetConfig;
use crate::loader::Loader;
use crate::part::{Cut, Part};
use host::Error;
use host::Stream;
use host::ops::causal_conv1d::{CausalConv1d, CausalConv1dArgs, CausalConv1dProblem};
use host::ops::gated_delta::{GatedDelta, GatedDeltaArgs, GatedDeltaProblem};
use host::ops::matmul::{Act, Residual};
use host::ops::rmsnorm::{NormWeight, RmsNorm, RmsNormArgs, RmsNormProblem};
use host::{Constant, Tensor, TensorView, TensorViewMut};
use host::{Kernel, OptimizationReport};

/// Gated delta net: projections, a short convolution over time, the delta rule, a gated norm per head.
#[derive(Debug)]
pub struct DeltaNet {
    /// All projections of the input above each other: q, k, v, z, b, a, each head by head. b and a, a row for each head
    /// that decides how its state decays, are floats in any case.
    pub input: Projection,
    /// `[channels, width]`: taps of the convolution over q, k and v.
    pub conv: Constant,
    /// `[heads_v]` f32: logarithm of the rate of decay.
    pub a_log: Constant,
    /// `[heads_v]` f32: added to a.
    pub dt_bias: Constant,
    /// `[dim_v]`: gain of the norm of each head.
    pub norm: Constant,
    /// Output projection.
    pub out: Projection,
}

impl DeltaNet {
    pub(super) fn new(
        config: &DeltaNetConfig,
        hidden_size: usize,
        loader: &mut Loader<'_>,
        prefix: &str,
    ) -> Result<Self, Error> {
        let &DeltaNetConfig { heads_k, heads_v, dim_k, dim_v, conv_width } = config;
        if heads_k == 0 || !heads_v.is_multiple_of(heads_k) {
            let expected = "heads of v in a multiple of those of k";
            return Err(Error::invalid("Model", "config", expected, format!("{heads_v} and {heads_k}")));
        }
        let name = |part: &str| format!("{prefix}.{part}");
        let (rows, value_cols) = Self::parts(config, loader.part(), prefix);
        let (out, heads) = (name("out_proj"), loader.part().key_heads(config));
        let own_values = Cut::range(heads_k, heads.clone()).times(heads_v / heads_k);
        // Those of q, of k and of v.
        let mut channels = Cut::range(heads_k, heads.clone()).times(dim_k).repeated(2);
        let keys = channels.of;
        channels.of = config.channels();
        channels
            .ranges
            .extend(own_values.times(dim_v).ranges.iter().map(|range| keys + range.start..keys + range.end));
        let per_value_head = |part: &str| [(name(part), own_values.clone())];
        Ok(DeltaNet {
            input: Projection::beside_floats(loader, [&rows[..1], &rows[1..]], &hidden_size.into())?,
            conv: loader.depthwise(&name("conv1d.weight"), channels, conv_width)?,
            a_log: loader.vectors_as(DType::F32, &per_value_head("A_log"))?,
            dt_bias: loader.vectors_as(DType::F32, &per_value_head("dt_bias"))?,
            norm: loader.gain(&name("norm.weight"), dim_v)?,
            out: Projection::new(loader, &[(out.as_str(), hidden_size.into())], &value_cols, false)?,
        })
    }
}

impl DeltaNet {
    /// The modules that `input` is made of, with the rows of each; and the columns of the output projection.
    pub(super) fn parts(config: &DeltaNetConfig, part: Part, prefix: &str) -> ([(String, Cut); 2], Cut) {
        let &DeltaNetConfig { heads_k, heads_v, dim_k, dim_v, .. } = config;
        // A checkpoint has them by key head: q | k | v | z of the first, of the second, …; then b | a in the same way.
        let group = heads_v / heads_k;
        let (values, per_head) = (group * dim_v, 2 * dim_k + 2 * group * dim_v);
        let heads = part.key_heads(config);
        let by_head = |per_head: usize, parts: &[Range<usize>]| {
            let of_part = |part: &Range<usize>| {
                let (start, end) = (part.start, part.end);
                heads.clone().map(move |head| head * per_head + start..head * per_head + end)
            };
            Cut { of: heads_k * per_head, ranges: parts.iter().flat_map(of_part).collect() }
        };
        let ends = [0, dim_k, 2 * dim_k, 2 * dim_k + values, per_head];
        let parts = [0, 1, 2, 3].map(|part| ends[part]..ends[part + 1]);
        let rows = [
            (format!("{prefix}.in_proj_qkvz"), by_head(per_head, &parts)),
            (format!("{prefix}.in_proj_ba"), by_head(2 * group, &[0..group, group..2 * group])),
        ];
        (rows, Cut::range(heads_k, heads.clone()).times(values))
    }

    /// What its plans depend on.
    pub(super) fn kinds(&self) -> Vec<ProjectionKind> {
        vec![self.input.kind(), self.out.kind()]
    }
}

/// What is left of all tokens: a fixed size, which cannot be cropped.
#[derive(Debug)]
pub(crate) struct DeltaState {
    /// `[batch, channels, width − 1]`: the last inputs of the convolution.
    window: Tensor,
    /// `[batch, heads_v, dim_k, dim_v]` f32.
    state: Tensor,
}

impl DeltaState {
    pub(super) fn new(
        config: &DeltaNetConfig,
        stream: &Stream,
        dtype: DType,
        batch: usize,
    ) -> Result<Self, Error> {
        let &DeltaNetConfig { heads_v, dim_k, dim_v, conv_width, .. } = config;
        Ok(DeltaState {
            window: Tensor::zeros(stream, &[batch, config.channels(), conv_width - 1], dtype)?,
            state: Tensor::zeros(stream, &[batch, heads_v, dim_k, dim_v], DType::F32)?,
        })
    }

    pub(super) fn bytes(&self) -> usize {
        self.window.bytes() + self.state.bytes()
    }

    pub(super) fn copy_sequence(&mut self, stream: &Stream, (from, to): (usize, usize)) -> Result<(), Error> {
        for tensor in [&mut self.window, &mut self.state] {
            let whole = tensor.shape()[1];
            copy_row(stream, tensor, (from, to), whole)?;
        }
        Ok(())
    }

    /// As before a sequence's first token.
    pub(super) fn clear(&mut self, stream: &Stream, sequence: usize) -> Result<(), Error> {
        for tensor in [&mut self.window, &mut self.state] {
            tensor.view_mut().slice(0, sequence..sequence + 1)?.fill_zero(stream)?;
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(crate) struct DeltaNetBlock {
    config: DeltaNetConfig,
    plans: Plans<DeltaNetPlans>,
    /// Of both projections, where adapters add to them.
    low_rank: [Option<LowRankBlock>; 2],
    /// Of each group.
    over_time: Vec<(CausalConv1d, GatedDelta)>,
    /// `[tokens, channels + heads_v · dim_v + 2 · heads_v]`, or a few columns more: q, k, v, z, b, a.
    projected: Tensor,
    /// `[tokens, channels]`: q, k, v.
    convolved: Tensor,
    /// `[tokens, heads_v, dim_v]`
    mixed: Tensor,
    /// `[tokens, heads_v, dim_v]`
    normed: Tensor,
}

#[derive(Debug)]
struct DeltaNetPlans {
    input: ProjectionPlan,
    norm: RmsNorm,
    out: ProjectionPlan,
    /// Added to the residual, where that is possible.
    out_added: Option<ProjectionPlan>,
}

impl DeltaNetBlock {
    pub(super) fn new(phase: &Phase<'_>, config: &DeltaNetConfig, weights: &DeltaNet) -> Result<Self, Error> {
        let &DeltaNetConfig { heads_k, heads_v, dim_k, dim_v, conv_width: width } = config;
        let &Phase { stream, dtype, tokens, .. } = phase;
        let (device, hidden_size) = (stream.device(), phase.config.hidden_size);
        let (channels, cols) = (config.channels(), config.input_rows());
        let plans = phase.plans(|phase| {
            let norm = RmsNormProblem {
                rows: phase.tokens * heads_v,
                cols: dim_v,
                dtype,
                eps: phase.config.norm.eps,
                // Whatever the other norms' weights mean.
                weight: NormWeight::Plain,
            };
            Ok(DeltaNetPlans {
                input: ProjectionPlan::new(&phase, &weights.input, cols, hidden_size)?,
                norm: RmsNorm::plan(device, norm)?,
                out: ProjectionPlan::new(&phase, &weights.out, hidden_size, heads_v * dim_v)?,
                out_added: ProjectionPlan::in_place(
                    &phase,
                    (&weights.out, [hidden_size, heads_v * dim_v], Act::None),
                    None,
                )?,
            })
        })?;
        let over_time = |group: &GroupPhase| -> Result<_, Error> {
            let &GroupPhase { sequences, seq: longest, tokens, .. } = group;
            let conv = CausalConv1dProblem { tokens, sequences, channels, width, dtype };
            let rule =
                GatedDeltaProblem { tokens, sequences, longest, heads_k, heads_v, dim_k, dim_v, dtype };
            Ok((CausalConv1d::plan(device, conv)?, GatedDelta::plan(device, rule)?))
        };
        // Rows of sequences without a state are left out by the operators over time, and read by those behind.
        let zeros = |cols: &[usize]| Tensor::zeros(stream, &[&[tokens], cols].concat(), dtype);
        let low_rank = LowRankBlock::of_part(
            phase,
            Adapted::DeltaNet,
            [
                (Which::First, &weights.input, [cols, hidden_size]),
                (Which::Last, &weights.out, [hidden_size, heads_v * dim_v]),
            ],
        );
        Ok(DeltaNetBlock {
            config: *config,
            plans,
            low_rank: low_rank?,
            over_time: phase.groups.iter().map(over_time).collect::<Result<_, _>>()?,
            projected: phase.wide_rows(cols)?,
            convolved: zeros(&[channels])?,
            mixed: zeros(&[heads_v, dim_v])?,
            normed: phase.rows(&[heads_v, dim_v])?,
        })
    }

    pub(super) fn reports(&self) -> Vec<OptimizationReport> {
        let mut reports = Vec::new();
        for plans in self.plans.iter() {
            reports.extend(plans.input.reports());
            reports.push(plans.norm.optimization_report());
            reports.extend(plans.out_added.as_ref().unwrap_or(&plans.out).reports());
        }
        for (conv, rule) in &self.over_time {
            reports.extend([conv.optimization_report(), rule.optimization_report()]);
        }
        reports
    }

    pub(super) fn adds_in_place(&self, tokens: usize) -> bool {
        self.plans.holding(tokens).is_ok_and(|plans| plans.out_added.is_some())
    }

    pub(super) fn run_in_place(
        &mut self,
        step: &Step<'_>,
        weights: &DeltaNet,
        cache: &mut DeltaState,
        rows: InPlace<'_>,
    ) -> Result<(), Error> {
        let tokens = step.tokens;
        self.mix(step, (weights, None), cache, *planned(rows.normed.as_ref())?)?;
        let out = planned(self.plans.holding(tokens)?.out_added.as_ref())?;
        let x = mixed_rows(&self.normed, tokens)?;
        out.run_fused(step.stream, &weights.out, (x, None), (rows.residual, Some(Residual::InPlace)))
    }

    pub(super) fn run(
        &mut self,
        step: &Step<'_>,
        (weights, adapters): (&DeltaNet, Option<&PartAdapters>),
        cache: &mut DeltaState,
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        self.mix(step, (weights, adapters), cache, x)?;
        let x = mixed_rows(&self.normed, step.tokens)?;
        let plans = (&self.plans.holding(step.tokens)?.out, &mut self.low_rank[1]);
        run_adapted(step, plans, &weights.out, (adapters, Which::Last), x, out)
    }

    /// From the normed rows to what the output projection gets.
    fn mix(
        &mut self,
        step: &Step<'_>,
        (weights, adapters): (&DeltaNet, Option<&PartAdapters>),
        cache: &mut DeltaState,
        x: TensorView<'_>,
    ) -> Result<(), Error> {
        let DeltaNetConfig { heads_k, heads_v, dim_k, dim_v, .. } = self.config;
        let (stream, tokens) = (step.stream, step.tokens);
        let plans = self.plans.holding(tokens)?;
        let (keys, values, channels) = (heads_k * dim_k, heads_v * dim_v, self.config.channels());
        let cols = self.config.input_rows();
        let mut projected = self.projected.view_mut().slice(0, 0..tokens)?.slice(1, 0..cols)?;
        let mut convolved = self.convolved.view_mut().slice(0, 0..tokens)?;
        let mut mixed = self.mixed.view_mut().slice(0, 0..tokens)?;
        let mut normed = self.normed.view_mut().slice(0, 0..tokens)?;
        let input = (&plans.input, &mut self.low_rank[0]);
        run_adapted(step, input, &weights.input, (adapters, Which::First), x, projected.reborrow())?;
        let projected = projected.as_view();

        let gates = channels + values;
        for ((conv, rule), group) in step.groups(&self.over_time) {
            let (rows, tokens) = (group.rows.clone(), group.rows.len());
            let projected = projected.slice(0, rows.clone())?;
            let mut convolved = convolved.reborrow().slice(0, rows.clone())?;
            let args = CausalConv1dArgs {
                x: projected.slice(1, 0..channels)?,
                weight: weights.conv.view(),
                bias: None,
                offsets: group.offsets,
                slots: group.states,
                state: cache.window.view_mut(),
                out: convolved.reborrow(),
            };
            conv.run(stream, args)?;

            let convolved = convolved.as_view();
            let args = GatedDeltaArgs {
                q: convolved.slice(1, 0..keys)?.reshape(&[tokens, heads_k, dim_k])?,
                k: convolved.slice(1, keys..2 * keys)?.reshape(&[tokens, heads_k, dim_k])?,
                v: convolved.slice(1, 2 * keys..channels)?.reshape(&[tokens, heads_v, dim_v])?,
                b: projected.slice(1, gates..gates + heads_v)?,
                a: projected.slice(1, gates + heads_v..gates + 2 * heads_v)?,
                a_log: weights.a_log.view(),
                dt_bias: weights.dt_bias.view(),
                offsets: group.offsets,
                slots: group.states,
                state: cache.state.view_mut(),
                out: mixed.reborrow().slice(0, rows)?,
            };
            rule.run(stream, args)?;
        }

        let z = projected.slice(1, channels..gates)?.reshape(&[tokens, heads_v, dim_v])?;
        let args = RmsNormArgs {
            x: mixed.as_view(),
            residual: None,
            weight: weights.norm.view(),
            gate: Some(z),
            out: normed.reborrow(),
        };
        plans.norm.run(stream, args)
    }
}

/// What the output projection gets.
fn mixed_rows(normed: &Tensor, tokens: usize) -> Result<TensorView<'_>, Error> {
    let cols = normed.shape()[1] * normed.shape()[2];
    normed.view().slice(0, 0..tokens)?.reshape(&[tokens, cols])
}
