//! Latent attention (MLA): keys and values of all heads are made of one short row per token, which is what is cached.

use abi::DType;

use super::low_rank::{Adapted, LowRankBlock, PartAdapters, Which, run_adapted};
use super::{
    Group, GroupPhase, InPlace, Keys, Phase, Plans, Projection, ProjectionKind, ProjectionPlan, Span, Step,
    copy_row, planned,
};
use crate::config::LatentConfig;
use crate::loader::Loader;
use crate::part::{Cut, Part};
use host::Error;
use host::Stream;
use host::ops::attention::{Attention, AttentionArgs, AttentionProblem, KvScales, MAX_DECODE_QUERIES, Mask};
use host::ops::copy::{Copy, CopyArgs, CopyProblem};
use host::ops::embedding::{Embedding, EmbeddingArgs, EmbeddingProblem};
use host::ops::latent_append::{LatentAppend, LatentAppendArgs, LatentAppendProblem};
use host::ops::matmul::{Act, Bias, Epilogue, Matmul, MatmulArgs, MatmulProblem, Residual, RowNorm};
use host::ops::rmsnorm::{NormWeight, RmsNorm, RmsNormArgs, RmsNormProblem};
use host::ops::rope::RopeInput;
use host::{Constant, Tensor, TensorView, TensorViewMut};
use host::{Kernel, OptimizationReport};

/// Latent attention. A head's query and key are a part that is not rotated, *nope*, and one that is, *rope*; the
/// rotated part of the key is the same for all heads.
#[derive(Debug)]
pub struct LatentAttention {
    /// The hidden state to the query's latent row, if there is one, and to the cached row, above each other.
    pub a: Projection,
    /// The query's latent row, or where there is none the hidden state, to the queries `[heads, nope + rope]`.
    pub q_b: Projection,
    /// Gain of the norm of the query's latent row.
    pub q_norm: Option<Constant>,
    /// Gain of the norm of the cached row's latent part.
    pub kv_norm: Constant,
    /// The latent row to every head's key part and value, `[heads · (nope + value), latent]`.
    pub kv_b: Constant,
    /// The key parts of `kv_b` transposed, `[heads, latent, nope]`: queries into the latent space.
    pub k_b: Constant,
    /// Output projection.
    pub o: Projection,
}

impl LatentAttention {
    pub(super) fn new(
        config: &LatentConfig,
        hidden_size: usize,
        loader: &mut Loader<'_>,
        prefix: &str,
    ) -> Result<Self, Error> {
        let &LatentConfig { heads, q_latent, latent, value, bias, .. } = config;
        let name = |part: &str| format!("{prefix}.{part}");
        let part = loader.part();
        let heads = Cut::range(heads, part.latent_heads(config));
        let hidden = hidden_size.into();
        let (a_parts, (q, q_rows)) = Self::parts(config, part, prefix);
        let a_parts: Vec<(&str, Cut)> =
            a_parts.iter().map(|(name, rows)| (name.as_str(), rows.clone())).collect();
        let a = Projection::new(loader, &a_parts, &hidden, bias)?;
        let q_norm = q_latent.map(|width| loader.gain(&name("q_a_layernorm.weight"), width)).transpose()?;
        let q_cols = q_latent.unwrap_or(hidden_size).into();
        let q_b = Projection::new(loader, &[(&q, q_rows)], &q_cols, false)?;
        let kv_norm = loader.gain(&name("kv_a_layernorm.weight"), latent)?;
        let kv_b = loader.matrix(&name("kv_b_proj.weight"), heads.times(config.nope + value), latent)?;
        let k_b = transposed_keys(config, loader.stream(), &kv_b)?;
        let o_bias = bias && part.is_first();
        let o = Projection::new(loader, &[(&name("o_proj"), hidden)], &heads.times(value), o_bias)?;
        Ok(LatentAttention { a, q_b, q_norm, kv_norm, kv_b, k_b, o })
    }

    /// The modules that `a` is made of, with the rows of each; and the one of the queries.
    pub(super) fn parts(
        config: &LatentConfig,
        part: Part,
        prefix: &str,
    ) -> (Vec<(String, Cut)>, (String, Cut)) {
        let named = |name: &str, rows: Cut| (format!("{prefix}.{name}"), rows);
        let kv_a = named("kv_a_proj_with_mqa", config.row().into());
        let q_rows = Cut::range(config.heads, part.latent_heads(config)).times(config.head_dim());
        match config.q_latent {
            Some(width) => (vec![named("q_a_proj", width.into()), kv_a], named("q_b_proj", q_rows)),
            None => (vec![kv_a], named("q_proj", q_rows)),
        }
    }

    /// What its plans depend on.
    pub(super) fn kinds(&self) -> Vec<ProjectionKind> {
        vec![self.a.kind(), self.q_b.kind(), self.o.kind()]
    }
}

/// The key parts of `kv_b`, `[heads, latent, nope]`; no elements while the loader only notes what it will load.
fn transposed_keys(config: &LatentConfig, stream: &Stream, kv_b: &Tensor) -> Result<Constant, Error> {
    let &LatentConfig { nope, latent, value, .. } = config;
    let dtype = kv_b.dtype();
    if kv_b.is_empty() {
        return Constant::new(Tensor::empty(stream, &[0], dtype)?, stream);
    }
    // A rank of a group has some of them.
    let heads = kv_b.shape()[0] / (nope + value);
    let mut k_b = Tensor::empty(stream, &[heads, latent, nope], dtype)?;
    let keys = kv_b.view().reshape(&[heads, nope + value, latent])?.slice(1, 0..nope)?;
    let copy = Copy::plan(stream.device(), CopyProblem { elements: keys.len(), src: dtype, dst: dtype })?;
    copy.run(stream, CopyArgs { src: keys.swap_axes(1, 2)?, dst: k_b.view_mut() })?;
    Constant::new(k_b, stream)
}

/// Rows of a latent part, after its norm, and a rotated part, `[batch, capacity, latent + rope]` or `[pages,
/// page_tokens, latent + rope]`.
#[derive(Debug)]
pub(crate) struct LatentRows {
    rows: Tensor,
}

impl LatentRows {
    pub(super) fn new(
        config: &LatentConfig,
        stream: &Stream,
        dtype: DType,
        [outer, inner]: [usize; 2],
    ) -> Result<Self, Error> {
        // Prompts take pages as a whole, also what nobody has written yet.
        Ok(LatentRows { rows: Tensor::zeros(stream, &[outer, inner, config.row()], dtype)? })
    }

    pub(super) fn bytes(&self) -> usize {
        self.rows.bytes()
    }

    pub(super) fn copy_sequence(
        &mut self,
        stream: &Stream,
        (from, to): (usize, usize),
        len: usize,
    ) -> Result<(), Error> {
        copy_row(stream, &mut self.rows, (from, to), len)
    }
}

#[derive(Debug)]
pub(crate) struct LatentBlock {
    config: LatentConfig,
    plans: Plans<LatentPlans>,
    /// Of a, q_b and o, where adapters add to them.
    low_rank: [Option<LowRankBlock>; 3],
    /// Of each group.
    forms: Vec<Form>,
    /// `[tokens, q_latent + latent + rope]`, or a few columns more.
    a: Tensor,
    /// `[tokens, q_latent]`
    q_a: Tensor,
    /// `[tokens, heads, nope + rope]`
    q: Tensor,
    /// `[tokens, heads, value]`
    attended: Tensor,
}

#[derive(Debug)]
struct LatentPlans {
    a: ProjectionPlan,
    q_norm: Option<RmsNorm>,
    q_b: ProjectionPlan,
    append: LatentAppend,
    o: ProjectionPlan,
    /// Of the residual behind its norm, of the query's latent row behind its own, and added to the residual, where that
    /// is possible.
    a_normed: Option<ProjectionPlan>,
    q_b_normed: Option<ProjectionPlan>,
    o_added: Option<ProjectionPlan>,
}

/// The two ways to compute the same: few queries go into the latent space, where the cached rows are keys and values of
/// a single head; for many it is less work to make every head's keys and values. Under [`host::Invariance::Batch`] the
/// former takes all, with memory of its attention for each query that a group may have.
#[derive(Debug)]
enum Form {
    Absorbed(Box<Absorbed>),
    Naive(Box<Naive>),
}

#[derive(Debug)]
struct Absorbed {
    products: Plans<AbsorbedPlans>,
    attention: Attention,
    /// `[tokens, heads, latent + rope]`
    q: Tensor,
    /// `[tokens, heads, latent]`
    attended: Tensor,
}

#[derive(Debug)]
struct AbsorbedPlans {
    to_latent: Matmul,
    from_latent: Matmul,
}

/// A chunk of a prompt makes the keys and values of all tokens before it anew, so larger chunks are less work.
#[derive(Debug)]
struct Naive {
    /// The pages of a sequence in a row, `[pages, page_tokens · (latent + rope)]`, if there are pages.
    pages: Option<(Embedding, Tensor)>,
    kv_b_plan: Matmul,
    copy: Copy,
    attention: Attention,
    /// `[capacity, heads, nope + value]`: of one sequence.
    kv: Tensor,
    /// `[capacity, heads, nope + rope]`
    k: Tensor,
}

impl LatentPlans {
    fn new(phase: &Phase<'_>, config: &LatentConfig, weights: &LatentAttention) -> Result<Self, Error> {
        let &LatentConfig { heads, q_latent, latent, rope, value, eps, style, .. } = config;
        let &Phase { dtype, stream, tokens, .. } = phase;
        let (device, hidden_size) = (stream.device(), phase.config.hidden_size);
        let norm = |cols| {
            let weight = NormWeight::Plain;
            RmsNorm::plan(device, RmsNormProblem { rows: tokens, cols, dtype, eps, weight })
        };
        let (q_cols, a_cols) = (heads * config.head_dim(), q_latent.unwrap_or(0) + config.row());
        let append = LatentAppendProblem {
            style,
            ..LatentAppendProblem::new(tokens, heads, [latent, rope], dtype, eps)
        };
        let in_place =
            |weights, n, k, norm| ProjectionPlan::in_place(phase, (weights, [n, k], Act::None), norm);
        // Without a latent row of its own the query is made of the residual.
        let q_row_norm = match q_latent {
            Some(_) => RowNorm { eps, weight: NormWeight::Plain },
            None => phase.row_norm(),
        };
        let q_k = q_latent.unwrap_or(hidden_size);
        Ok(LatentPlans {
            a_normed: in_place(&weights.a, a_cols, hidden_size, Some(phase.row_norm()))?,
            q_b_normed: in_place(&weights.q_b, q_cols, q_k, Some(q_row_norm))?,
            o_added: in_place(&weights.o, hidden_size, heads * value, None)?,
            a: ProjectionPlan::new(phase, &weights.a, a_cols, hidden_size)?,
            q_norm: q_latent.map(norm).transpose()?,
            q_b: ProjectionPlan::new(phase, &weights.q_b, q_cols, q_k)?,
            append: LatentAppend::plan(device, append)?,
            o: ProjectionPlan::new(phase, &weights.o, hidden_size, heads * value)?,
        })
    }

    fn reports(&self) -> Vec<OptimizationReport> {
        let mut reports: Vec<OptimizationReport> =
            self.a_normed.as_ref().unwrap_or(&self.a).reports().collect();
        let q_norm = self.q_norm.as_ref().filter(|_| self.q_b_normed.is_none());
        reports.extend(q_norm.map(Kernel::optimization_report));
        reports.extend(self.q_b_normed.as_ref().unwrap_or(&self.q_b).reports());
        reports.push(self.append.optimization_report());
        reports.extend(self.o_added.as_ref().unwrap_or(&self.o).reports());
        reports
    }
}

impl LatentBlock {
    pub(super) fn new(
        phase: &Phase<'_>,
        config: &LatentConfig,
        weights: &LatentAttention,
    ) -> Result<Self, Error> {
        let &LatentConfig { heads, q_latent, nope, rope, value, .. } = config;
        let (hidden_size, a_cols) = (phase.config.hidden_size, q_latent.unwrap_or(0) + config.row());
        let widths = [nope, rope, config.latent, value].map(|width| width * phase.dtype.bytes());
        if phase.is_invariant() && heads == 1 && widths.iter().any(|bytes| !bytes.is_multiple_of(16)) {
            // A single row of it is aligned where several are not.
            let expected = "parts of whole 16 bytes in a single latent head, under Invariance::Batch";
            return Err(Error::invalid("Session", "layer", expected, format!("{widths:?} bytes")));
        }
        let form = |group: &GroupPhase| {
            // One of the two for any number of tokens, where they are to have the same bits.
            Ok(if group.seq <= MAX_DECODE_QUERIES || phase.is_invariant() {
                Form::Absorbed(Box::new(Absorbed::new(phase, group, config)?))
            } else {
                Form::Naive(Box::new(Naive::new(phase, group, config)?))
            })
        };
        let q_size = [heads * config.head_dim(), q_latent.unwrap_or(hidden_size)];
        let low_rank = LowRankBlock::of_part(
            phase,
            Adapted::Latent,
            [
                (Which::First, &weights.a, [a_cols, hidden_size]),
                (Which::Second, &weights.q_b, q_size),
                (Which::Last, &weights.o, [hidden_size, heads * value]),
            ],
        );
        Ok(LatentBlock {
            config: *config,
            plans: phase.plans(|phase| LatentPlans::new(&phase, config, weights))?,
            low_rank: low_rank?,
            forms: phase.groups.iter().map(form).collect::<Result<_, Error>>()?,
            a: phase.wide_rows(a_cols)?,
            q_a: phase.rows(&[q_latent.unwrap_or(0)])?,
            q: phase.rows(&[heads, nope + rope])?,
            attended: phase.rows(&[heads, value])?,
        })
    }

    pub(super) fn reports(&self) -> Vec<OptimizationReport> {
        let mut reports: Vec<_> = self.plans.iter().flat_map(LatentPlans::reports).collect();
        for form in &self.forms {
            match form {
                Form::Absorbed(form) => {
                    reports.extend(form.products.iter().flat_map(|products| {
                        [products.to_latent.optimization_report(), products.from_latent.optimization_report()]
                    }));
                    reports.push(form.attention.optimization_report());
                }
                Form::Naive(form) => {
                    reports.extend(form.pages.iter().map(|(pages, _)| pages.optimization_report()));
                    reports.extend([
                        form.kv_b_plan.optimization_report(),
                        form.copy.optimization_report(),
                        form.attention.optimization_report(),
                    ]);
                }
            }
        }
        reports
    }

    pub(super) fn run(
        &mut self,
        step: &Step<'_>,
        (weights, adapters): (&LatentAttention, Option<&PartAdapters>),
        cache: &mut LatentRows,
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let LatentConfig { heads, q_latent, nope, rope, value, .. } = self.config;
        let (stream, tokens) = (step.stream, step.tokens);
        let plans = self.plans.holding(tokens)?;
        let q_cols = q_latent.unwrap_or(0);
        let mut a = self.a.view_mut().slice(0, 0..tokens)?.slice(1, 0..q_cols + self.config.row())?;
        let mut q_a = self.q_a.view_mut().slice(0, 0..tokens)?;
        let [low_rank_a, low_rank_q, _] = &mut self.low_rank;
        let of_a = (&plans.a, low_rank_a);
        run_adapted(step, of_a, &weights.a, (adapters, Which::First), x, a.reborrow())?;
        let x = match (&plans.q_norm, &weights.q_norm) {
            (Some(norm), Some(gain)) => {
                let (x, weight) = (a.as_view().slice(1, 0..q_cols)?, gain.view());
                norm.run(stream, RmsNormArgs { x, residual: None, gate: None, weight, out: q_a.reborrow() })?;
                q_a.as_view()
            }
            _ => x,
        };
        let queries = self.q.view_mut().slice(0, 0..tokens)?.reshape(&[tokens, heads * (nope + rope)])?;
        run_adapted(step, (&plans.q_b, low_rank_q), &weights.q_b, (adapters, Which::Second), x, queries)?;
        self.attend(step, weights, cache)?;
        let plans = (&self.plans.holding(tokens)?.o, &mut self.low_rank[2]);
        let attended = self.attended.view().slice(0, 0..tokens)?.reshape(&[tokens, heads * value])?;
        run_adapted(step, plans, &weights.o, (adapters, Which::Last), attended, out)
    }

    pub(super) fn works_in_place(&self, tokens: usize) -> bool {
        let is_normed = |plans: &LatentPlans| {
            plans.a_normed.is_some() && (plans.q_norm.is_some() || plans.q_b_normed.is_some())
        };
        self.adds_in_place(tokens) && self.plans.holding(tokens).is_ok_and(is_normed)
    }

    pub(super) fn adds_in_place(&self, tokens: usize) -> bool {
        self.plans.holding(tokens).is_ok_and(|plans| plans.o_added.is_some())
    }

    pub(super) fn run_in_place(
        &mut self,
        step: &Step<'_>,
        weights: &LatentAttention,
        cache: &mut LatentRows,
        rows: InPlace<'_>,
    ) -> Result<(), Error> {
        let LatentConfig { heads, q_latent, nope, rope, value, .. } = self.config;
        let (stream, tokens) = (step.stream, step.tokens);
        let plans = self.plans.holding(tokens)?;
        let q_cols = q_latent.unwrap_or(0);
        let (x, gain) = rows.input();
        let mut a = self.a.view_mut().slice(0, 0..tokens)?.slice(1, 0..q_cols + self.config.row())?;
        let first = planned(gain.map_or(Some(&plans.a), |_| plans.a_normed.as_ref()))?;
        first.run_fused(stream, &weights.a, (x, gain), (a.reborrow(), None))?;
        let q_row = a.as_view().slice(1, 0..q_cols)?;
        let mut q_a = self.q_a.view_mut().slice(0, 0..tokens)?;
        let (second, x) = match (&plans.q_norm, &weights.q_norm, &plans.q_b_normed) {
            (Some(_), Some(q_gain), Some(normed)) => (normed, (q_row, Some(q_gain.view()))),
            (Some(norm), Some(q_gain), None) => {
                let (weight, out) = (q_gain.view(), q_a.reborrow());
                norm.run(stream, RmsNormArgs { x: q_row, residual: None, gate: None, weight, out })?;
                (&plans.q_b, (q_a.as_view(), None))
            }
            _ => (planned(gain.map_or(Some(&plans.q_b), |_| plans.q_b_normed.as_ref()))?, (x, gain)),
        };
        let queries = self.q.view_mut().slice(0, 0..tokens)?.reshape(&[tokens, heads * (nope + rope)])?;
        second.run_fused(stream, &weights.q_b, x, (queries, None))?;
        self.attend(step, weights, cache)?;
        let o = planned(self.plans.holding(tokens)?.o_added.as_ref())?;
        let attended = self.attended.view().slice(0, 0..tokens)?.reshape(&[tokens, heads * value])?;
        o.run_fused(stream, &weights.o, (attended, None), (rows.residual, Some(Residual::InPlace)))
    }

    /// From the latent rows and the queries to what the output projection gets.
    fn attend(
        &mut self,
        step: &Step<'_>,
        weights: &LatentAttention,
        cache: &mut LatentRows,
    ) -> Result<(), Error> {
        let LatentConfig { q_latent, nope, rope, .. } = self.config;
        let (stream, tokens, row_cols) = (step.stream, step.tokens, self.config.row());
        let append = &self.plans.holding(tokens)?.append;
        let q_cols = q_latent.unwrap_or(0);
        let mut attended = self.attended.view_mut().slice(0, 0..tokens)?;
        let weight = weights.kv_norm.view();

        // Zipped by hand: a form has memory of its own.
        for (form, group) in std::iter::zip(&mut self.forms, step.groups) {
            let Some(group) = group else { continue };
            let rows = group.rows.clone();
            let [positions, slots] = [step.positions, step.slots].map(|of| of.slice(0, rows.clone()));
            let x = self.a.view().slice(0, rows.clone())?.slice(1, q_cols..q_cols + row_cols)?;
            let mut q = self.q.view_mut().slice(0, rows.clone())?;
            let out = attended.reborrow().slice(0, rows)?;
            let all_slots = cache.rows.shape()[0] * cache.rows.shape()[1];
            let (rotated, unrotated) = (nope..nope + rope, q.as_view());
            let (q_rope, q_out) = match form {
                Form::Absorbed(form) => {
                    let from = RopeInput::From(unrotated.slice(2, rotated)?);
                    (from, form.rotated(&self.config, group)?)
                }
                Form::Naive(_) => (RopeInput::InPlace, q.reborrow().slice(2, rotated)?),
            };
            let to = cache.rows.view_mut().reshape(&[all_slots, row_cols])?;
            let args = LatentAppendArgs {
                q: q_rope,
                x,
                weight,
                positions: positions?,
                tables: step.ropes,
                slots: slots?,
                q_out,
                cache: to,
            };
            append.run(stream, args)?;
            match form {
                Form::Absorbed(form) => {
                    form.run(stream, group, &self.config, weights, cache, q.as_view(), out)?;
                }
                Form::Naive(form) => {
                    form.run(stream, group, &self.config, weights, cache, q.as_view(), out)?;
                }
            }
        }
        Ok(())
    }
}

/// Attention of heads that are as wide as this.
fn problem(
    phase: &Phase<'_>,
    config: &LatentConfig,
    (heads_kv, head_dim, head_dim_v): (usize, usize, usize),
) -> AttentionProblem {
    AttentionProblem {
        head_dim_v,
        scale: Some(config.scale),
        mask: Mask::Causal,
        ..AttentionProblem::new(1, [0, 0], [config.heads, heads_kv], head_dim, phase.dtype)
    }
}

impl Absorbed {
    fn new(phase: &Phase<'_>, group: &GroupPhase, config: &LatentConfig) -> Result<Self, Error> {
        let &LatentConfig { heads, latent, nope, value, .. } = config;
        let &Phase { stream, dtype, .. } = phase;
        let per_head = |m, n, k| {
            let (out_dtype, bias, epilogue) = (dtype, Bias::None, Epilogue::NONE);
            let problem = MatmulProblem {
                batch: heads,
                out_dtype,
                bias,
                epilogue,
                ..MatmulProblem::new(m, n, k, dtype)
            };
            Matmul::plan(stream.device(), problem)
        };
        let products = phase.plans_to(group.tokens, |phase| {
            let to_latent = per_head(phase.tokens, latent, nope)?;
            Ok(AbsorbedPlans { to_latent, from_latent: per_head(phase.tokens, value, latent)? })
        });
        let rows = |width| Tensor::empty(stream, &[group.tokens, heads, width], dtype);
        Ok(Absorbed {
            products: products?,
            attention: group.attention(phase, problem(phase, config, (1, config.row(), latent)))?,
            q: rows(config.row())?,
            attended: rows(latent)?,
        })
    }

    /// Where the rotated parts of the group's queries go.
    fn rotated(&mut self, config: &LatentConfig, group: &Group<'_>) -> Result<TensorViewMut<'_>, Error> {
        self.q.view_mut().slice(0, 0..group.rows.len())?.slice(2, config.latent..config.row())
    }

    /// With the rotated parts there.
    #[allow(clippy::too_many_arguments)]
    fn run(
        &mut self,
        stream: &Stream,
        group: &Group<'_>,
        config: &LatentConfig,
        weights: &LatentAttention,
        cache: &LatentRows,
        q: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let &LatentConfig { heads, latent, nope, value, .. } = config;
        let (tokens, row) = (group.rows.len(), config.row());
        let products = self.products.holding(tokens)?;
        let mut absorbed = self.q.view_mut().slice(0, 0..tokens)?;
        let mut attended = self.attended.view_mut().slice(0, 0..tokens)?;
        let a = q.slice(2, 0..nope)?.swap_axes(0, 1)?;
        let projected = absorbed.reborrow().slice(2, 0..latent)?.swap_axes(0, 1)?;
        products.to_latent.run(stream, MatmulArgs::new(a, weights.k_b.view(), projected))?;

        let [outer, inner, _] = [0, 1, 2].map(|axis| cache.rows.shape()[axis]);
        let k = cache.rows.view().reshape(&[outer, inner, 1, row])?;
        let v = k.slice(3, 0..latent)?;
        let keys = ([k, v], KvScales::default());
        group.attend(stream, &self.attention, absorbed.as_view(), keys, attended.reborrow())?;
        let a = attended.as_view().swap_axes(0, 1)?;
        let v_b =
            weights.kv_b.view().reshape(&[heads, nope + value, latent])?.slice(1, nope..nope + value)?;
        products.from_latent.run(stream, MatmulArgs::new(a, v_b, out.swap_axes(0, 1)?))
    }
}

impl Naive {
    fn new(phase: &Phase<'_>, group: &GroupPhase, config: &LatentConfig) -> Result<Self, Error> {
        let &LatentConfig { heads, latent, nope, rope, value, .. } = config;
        let (&Phase { stream, dtype, .. }, &GroupPhase { capacity, page_tokens, .. }) = (phase, group);
        let device = stream.device();
        let (n, k, out_dtype) = (heads * (nope + value), latent, dtype);
        let (bias, epilogue) = (Bias::None, Epilogue::NONE);
        let kv_b = MatmulProblem { out_dtype, bias, epilogue, ..MatmulProblem::new(capacity, n, k, dtype) };
        let elements = capacity.saturating_mul(heads).saturating_mul(nope.max(rope));
        let keys = |width| Tensor::empty(stream, &[capacity, heads, width], dtype);
        let pages = |page_tokens: usize| -> Result<_, Error> {
            let (tokens, cols) = (capacity.div_ceil(page_tokens), page_tokens * config.row());
            let vocab = group.pages;
            let plan = Embedding::plan(device, EmbeddingProblem::new(tokens, vocab, cols, dtype))?;
            Ok((plan, Tensor::empty(stream, &[tokens, cols], dtype)?))
        };
        // A sequence at a time, so that its keys have their number.
        let alone = GroupPhase { sequences: 1, ragged: false, page_tokens: None, ..*group };
        Ok(Naive {
            pages: page_tokens.map(pages).transpose()?,
            kv_b_plan: Matmul::plan(device, kv_b)?,
            copy: Copy::plan(device, CopyProblem { elements, src: dtype, dst: dtype })?,
            attention: alone.attention(phase, problem(phase, config, (heads, nope + rope, value)))?,
            kv: keys(nope + value)?,
            k: keys(nope + rope)?,
        })
    }

    /// One sequence after the other: the memory for keys and values is that of one.
    #[allow(clippy::too_many_arguments)]
    fn run(
        &mut self,
        stream: &Stream,
        group: &Group<'_>,
        config: &LatentConfig,
        weights: &LatentAttention,
        cache: &LatentRows,
        q: TensorView<'_>,
        mut out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let &LatentConfig { heads, latent, nope, rope, value, .. } = config;
        let (row, [outer, inner]) = (config.row(), [0, 1].map(|axis| cache.rows.shape()[axis]));
        for (index, Span { rows: tokens, keys }) in group.spans.iter().enumerate() {
            let (seq, keys) = (tokens.len(), *keys);
            let rows = match (&group.keys, &mut self.pages) {
                (Keys::Pages { table, .. }, Some((plan, in_a_row))) => {
                    let pages = keys.div_ceil(inner);
                    let rows = cache.rows.view().reshape(&[outer, inner * row])?;
                    let ids = table.slice(0, index..index + 1)?.slice(1, 0..pages)?.reshape(&[pages])?;
                    let to = in_a_row.view_mut().slice(0, 0..pages)?;
                    plan.run(stream, EmbeddingArgs::new(rows, ids, to))?;
                    in_a_row.view().slice(0, 0..pages)?.reshape(&[pages * inner, row])?.slice(0, 0..keys)?
                }
                (Keys::Rows { sequences, .. }, _) => {
                    let sequence = sequences.start + index;
                    let rows = cache.rows.view().slice(0, sequence..sequence + 1)?.slice(1, 0..keys)?;
                    rows.reshape(&[keys, row])?
                }
                _ => return Err(Error::invalid("Session", "keys", "in pages only as planned", "pages")),
            };
            let mut kv = self.kv.view_mut().slice(0, 0..keys)?;
            let mut k = self.k.view_mut().slice(0, 0..keys)?;
            let all = kv.reborrow().reshape(&[keys, heads * (nope + value)])?;
            let args = MatmulArgs::new(rows.slice(1, 0..latent)?, weights.kv_b.view(), all);
            self.kv_b_plan.run(stream, args)?;
            let (kv, parts) = (kv.as_view(), rows.slice(1, latent..row)?);
            let rotated = parts.reshape(&[keys, 1, rope])?.repeat(1, heads)?;
            for (src, columns) in [(kv.slice(2, 0..nope)?, 0..nope), (rotated, nope..nope + rope)] {
                self.copy.run(stream, CopyArgs { src, dst: k.reborrow().slice(2, columns)? })?;
            }
            let args = AttentionArgs::new(
                q.slice(0, tokens.clone())?.reshape(&[1, seq, heads, nope + rope])?,
                k.as_view().reshape(&[1, keys, heads, nope + rope])?,
                kv.slice(2, nope..nope + value)?.reshape(&[1, keys, heads, value])?,
                out.reborrow().slice(0, tokens.clone())?.reshape(&[1, seq, heads, value])?,
            );
            self.attention.run(stream, args)?;
        }
        Ok(())
    }
}
