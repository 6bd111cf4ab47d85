//! Latent attention (MLA): keys and values of all heads are made of one short row per token, which is what is cached.

use abi::DType;

use super::{Phase, Projection, ProjectionKind, ProjectionPlan, Step, Visible, copy_row};
use crate::config::LatentConfig;
use crate::loader::Loader;
use host::Error;
use host::Stream;
use host::ops::attention::{
    Attention, AttentionArgs, AttentionProblem, KvScales, MAX_DECODE_QUERIES, Mask, Offsets, ScoreTensors,
    Scores,
};
use host::ops::copy::{Copy, CopyArgs, CopyProblem};
use host::ops::kv_append::{KvAppend, KvAppendArgs, KvAppendProblem};
use host::ops::matmul::{Bias, Epilogue, Matmul, MatmulArgs, MatmulProblem, Precision};
use host::ops::rmsnorm::{NormWeight, RmsNorm, RmsNormArgs, RmsNormProblem};
use host::ops::rope::{Rope, RopeArgs, RopeInput, RopeProblem};
use host::{Kernel, OptimizationReport};
use host::{Tensor, TensorView, TensorViewMut};

/// Latent attention. A head's query and key are a part that is not rotated, *nope*, and one that is, *rope*; the rotated part
/// of the key is the same for all heads.
#[derive(Debug)]
pub struct LatentAttention {
    /// The hidden state to the query's latent row, if there is one, and to the cached row, above each other.
    pub a: Projection,
    /// The query's latent row, or where there is none the hidden state, to the queries `[heads, nope + rope]`.
    pub q_b: Projection,
    /// Gain of the norm of the query's latent row.
    pub q_norm: Option<Tensor>,
    /// Gain of the norm of the cached row's latent part.
    pub kv_norm: Tensor,
    /// The latent row to every head's key part and value, `[heads · (nope + value), latent]`.
    pub kv_b: Tensor,
    /// The key parts of `kv_b` transposed, `[heads, latent, nope]`: queries into the latent space.
    pub k_b: Tensor,
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
        let (q_a, kv_a) = (name("q_a_proj"), name("kv_a_proj_with_mqa"));
        let (q_cols, cached) = (heads * config.head_dim(), config.row());
        let (a, q_norm, q_b) = match q_latent {
            Some(width) => (
                Projection::new(loader, &[(&q_a, width), (&kv_a, cached)], hidden_size, bias)?,
                Some(loader.gain(&name("q_a_layernorm.weight"), width)?),
                Projection::new(loader, &[(&name("q_b_proj"), q_cols)], width, false)?,
            ),
            None => (
                Projection::new(loader, &[(&kv_a, cached)], hidden_size, bias)?,
                None,
                Projection::new(loader, &[(&name("q_proj"), q_cols)], hidden_size, false)?,
            ),
        };
        let kv_norm = loader.gain(&name("kv_a_layernorm.weight"), latent)?;
        let kv_b = loader.matrix(&name("kv_b_proj.weight"), heads * (config.nope + value), latent)?;
        let k_b = transposed_keys(config, loader.stream(), &kv_b)?;
        let o = Projection::new(loader, &[(&name("o_proj"), hidden_size)], heads * value, bias)?;
        Ok(LatentAttention { a, q_b, q_norm, kv_norm, kv_b, k_b, o })
    }

    /// What its plans depend on.
    pub(super) fn kinds(&self) -> Vec<ProjectionKind> {
        vec![self.a.kind(), self.q_b.kind(), self.o.kind()]
    }
}

/// The key parts of `kv_b`, `[heads, latent, nope]`; no elements while the loader only notes what it will load.
fn transposed_keys(config: &LatentConfig, stream: &Stream, kv_b: &Tensor) -> Result<Tensor, Error> {
    let &LatentConfig { heads, nope, latent, value, .. } = config;
    let dtype = kv_b.dtype();
    if kv_b.is_empty() {
        return Tensor::empty(stream, &[0], dtype);
    }
    let mut k_b = Tensor::empty(stream, &[heads, latent, nope], dtype)?;
    let keys = kv_b.view().reshape(&[heads, nope + value, latent])?.slice(1, 0..nope)?;
    let copy = Copy::plan(stream.device(), CopyProblem { elements: keys.len(), src: dtype, dst: dtype })?;
    copy.run(stream, CopyArgs { src: keys.swap_axes(1, 2)?, dst: k_b.view_mut() })?;
    Ok(k_b)
}

/// Rows of a latent part, after its norm, and a rotated part, `[batch, capacity, latent + rope]`.
#[derive(Debug)]
pub(crate) struct LatentRows {
    rows: Tensor,
}

impl LatentRows {
    pub(super) fn new(
        config: &LatentConfig,
        stream: &Stream,
        dtype: DType,
        batch: usize,
        capacity: usize,
    ) -> Result<Self, Error> {
        Ok(LatentRows { rows: Tensor::empty(stream, &[batch, capacity, config.row()], dtype)? })
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
    a_plan: ProjectionPlan,
    q_norm: Option<RmsNorm>,
    kv_norm: RmsNorm,
    q_b_plan: ProjectionPlan,
    q_rope: Rope,
    k_rope: Rope,
    append: KvAppend,
    form: Form,
    o_plan: ProjectionPlan,
    /// `[tokens, q_latent + latent + rope]`
    a: Tensor,
    /// `[tokens, q_latent]`
    q_a: Tensor,
    /// `[tokens, heads, nope + rope]`
    q: Tensor,
    /// `[tokens, latent + rope]`: what is appended.
    row: Tensor,
    /// `[tokens, heads, value]`
    attended: Tensor,
}

/// The two ways to compute the same: few queries go into the latent space, where the cached rows are keys and values of a
/// single head; for many it is less work to make every head's keys and values.
#[derive(Debug)]
enum Form {
    Absorbed(Box<Absorbed>),
    Naive(Box<Naive>),
}

#[derive(Debug)]
struct Absorbed {
    to_latent: Matmul,
    attention: Attention,
    from_latent: Matmul,
    /// `[tokens, heads, latent + rope]`
    q: Tensor,
    /// `[tokens, heads, latent]`
    attended: Tensor,
}

/// A chunk of a prompt makes the keys and values of all tokens before it anew, so larger chunks are less work.
#[derive(Debug)]
struct Naive {
    kv_b_plan: Matmul,
    copy: Copy,
    attention: Attention,
    /// `[capacity, heads, nope + value]`: of one sequence.
    kv: Tensor,
    /// `[capacity, heads, nope + rope]`
    k: Tensor,
}

impl LatentBlock {
    pub(super) fn new(
        phase: &Phase<'_>,
        config: &LatentConfig,
        weights: &LatentAttention,
    ) -> Result<Self, Error> {
        let &LatentConfig { heads, q_latent, latent, nope, rope, value, bias, eps, style, .. } = config;
        let &Phase { dtype, stream, .. } = phase;
        let (device, tokens, hidden_size) = (stream.device(), phase.tokens(), phase.config.hidden_size);
        let norm = |cols| {
            let weight = NormWeight::Plain;
            RmsNorm::plan(device, RmsNormProblem { rows: tokens, cols, dtype, eps, weight })
        };
        let rotated = |heads| {
            let (head_dim, rotary_dim) = (rope, rope);
            Rope::plan(device, RopeProblem { tokens, heads, head_dim, rotary_dim, style, dtype })
        };
        let (q_cols, a_cols) = (heads * config.head_dim(), q_latent.unwrap_or(0) + config.row());
        let form = if phase.seq <= MAX_DECODE_QUERIES {
            Form::Absorbed(Box::new(Absorbed::new(phase, config)?))
        } else {
            Form::Naive(Box::new(Naive::new(phase, config)?))
        };
        Ok(LatentBlock {
            config: *config,
            a_plan: ProjectionPlan::new(phase, &weights.a, a_cols, hidden_size, bias)?,
            q_norm: q_latent.map(norm).transpose()?,
            kv_norm: norm(latent)?,
            q_b_plan: ProjectionPlan::new(
                phase,
                &weights.q_b,
                q_cols,
                q_latent.unwrap_or(hidden_size),
                false,
            )?,
            q_rope: rotated(heads)?,
            k_rope: rotated(1)?,
            append: KvAppend::plan(
                device,
                KvAppendProblem { tokens, heads: 1, head_dim: config.row(), dtype },
            )?,
            form,
            o_plan: ProjectionPlan::new(phase, &weights.o, hidden_size, heads * value, bias)?,
            a: phase.rows(&[a_cols])?,
            q_a: phase.rows(&[q_latent.unwrap_or(0)])?,
            q: phase.rows(&[heads, nope + rope])?,
            row: phase.rows(&[config.row()])?,
            attended: phase.rows(&[heads, value])?,
        })
    }

    pub(super) fn reports(&self) -> Vec<OptimizationReport> {
        let mut reports: Vec<OptimizationReport> = self.a_plan.reports().collect();
        reports.extend(self.q_norm.as_ref().map(Kernel::optimization_report));
        reports.extend([self.kv_norm.optimization_report()]);
        reports.extend(self.q_b_plan.reports());
        reports.extend([
            self.q_rope.optimization_report(),
            self.k_rope.optimization_report(),
            self.append.optimization_report(),
        ]);
        reports.extend(match &self.form {
            Form::Absorbed(form) => [
                form.to_latent.optimization_report(),
                form.attention.optimization_report(),
                form.from_latent.optimization_report(),
            ],
            Form::Naive(form) => [
                form.kv_b_plan.optimization_report(),
                form.copy.optimization_report(),
                form.attention.optimization_report(),
            ],
        });
        reports.extend(self.o_plan.reports());
        reports
    }

    pub(super) fn run(
        &mut self,
        step: &Step<'_>,
        weights: &LatentAttention,
        cache: &mut LatentRows,
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let LatentConfig { heads, q_latent, latent, nope, rope, value, .. } = self.config;
        let (stream, tokens, row_cols) = (step.stream, step.tokens(), self.config.row());
        let (positions, tables) = (step.positions, step.ropes);
        let mut a = self.a.view_mut().slice(0, 0..tokens)?;
        let mut q_a = self.q_a.view_mut().slice(0, 0..tokens)?;
        let mut q = self.q.view_mut().slice(0, 0..tokens)?;
        let mut row = self.row.view_mut().slice(0, 0..tokens)?;
        let mut attended = self.attended.view_mut().slice(0, 0..tokens)?;
        self.a_plan.run(stream, &weights.a, x, a.reborrow())?;
        let a = a.as_view();
        let columns = |start: usize, width: usize| a.slice(1, start..start + width);
        let q_cols = q_latent.unwrap_or(0);

        let x = match (&self.q_norm, &weights.q_norm) {
            (Some(norm), Some(gain)) => {
                let (x, weight) = (columns(0, q_cols)?, gain.view());
                norm.run(stream, RmsNormArgs { x, residual: None, gate: None, weight, out: q_a.reborrow() })?;
                q_a.as_view()
            }
            _ => x,
        };
        self.q_b_plan.run(
            stream,
            &weights.q_b,
            x,
            q.reborrow().reshape(&[tokens, heads * (nope + rope)])?,
        )?;

        let (x, weight) = (columns(q_cols, latent)?, weights.kv_norm.view());
        let args =
            RmsNormArgs { x, residual: None, gate: None, weight, out: row.reborrow().slice(1, 0..latent)? };
        self.kv_norm.run(stream, args)?;
        let x = columns(q_cols + latent, rope)?.reshape(&[tokens, 1, rope])?;
        let rotated = row.reborrow().slice(1, latent..row_cols)?.reshape(&[tokens, 1, rope])?;
        self.k_rope.run(stream, RopeArgs { x: RopeInput::From(x), positions, tables, out: rotated })?;
        let slots = cache.rows.shape()[0] * cache.rows.shape()[1];
        let args = KvAppendArgs {
            k: row.as_view().reshape(&[tokens, 1, row_cols])?,
            v: None,
            slots: step.slots,
            k_cache: cache.rows.view_mut().reshape(&[slots, 1, row_cols])?,
            v_cache: None,
        };
        self.append.run(stream, args)?;

        match &mut self.form {
            Form::Absorbed(form) => {
                form.run(step, &self.config, &self.q_rope, weights, cache, q.as_view(), attended.reborrow())?;
            }
            Form::Naive(form) => {
                let (x, out) = (RopeInput::InPlace, q.reborrow().slice(2, nope..nope + rope)?);
                self.q_rope.run(stream, RopeArgs { x, positions, tables, out })?;
                form.run(step, &self.config, weights, cache, q.as_view(), attended.reborrow())?;
            }
        }
        let attended = attended.as_view().reshape(&[tokens, heads * value])?;
        self.o_plan.run(stream, &weights.o, attended, out)
    }
}

/// Attention of the queries of a phase's sequences.
fn attention(
    phase: &Phase<'_>,
    config: &LatentConfig,
    batch: usize,
    (heads_kv, head_dim, head_dim_v): (usize, usize, usize),
) -> Result<Attention, Error> {
    let problem = AttentionProblem {
        batch,
        seq_q: phase.seq,
        seq_kv: phase.capacity,
        heads_q: config.heads,
        heads_kv,
        head_dim,
        head_dim_v,
        dtype: phase.dtype,
        dtype_kv: phase.dtype,
        scale: Some(config.scale),
        mask: Mask::Causal,
        window: None,
        scores: Scores::default(),
        page_size: None,
    };
    Attention::plan(phase.stream.device(), problem)
}

impl Absorbed {
    fn new(phase: &Phase<'_>, config: &LatentConfig) -> Result<Self, Error> {
        let &LatentConfig { heads, latent, nope, value, .. } = config;
        let dtype = phase.dtype;
        let per_head = |n, k| {
            let (m, out_dtype, bias, epilogue) = (phase.tokens(), dtype, Bias::None, Epilogue::NONE);
            let problem = MatmulProblem {
                batch: heads,
                m,
                n,
                k,
                dtype,
                out_dtype,
                precision: Precision::Full,
                bias,
                epilogue,
                weight: None,
            };
            Matmul::plan(phase.stream.device(), problem)
        };
        Ok(Absorbed {
            to_latent: per_head(latent, nope)?,
            attention: attention(phase, config, phase.batch, (1, config.row(), latent))?,
            from_latent: per_head(value, latent)?,
            q: phase.rows(&[heads, config.row()])?,
            attended: phase.rows(&[heads, latent])?,
        })
    }

    #[allow(clippy::too_many_arguments)]
    fn run(
        &mut self,
        step: &Step<'_>,
        config: &LatentConfig,
        rope_plan: &Rope,
        weights: &LatentAttention,
        cache: &LatentRows,
        q: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let &LatentConfig { heads, latent, nope, rope, value, .. } = config;
        let &Step { stream, batch, seq, ref sequences, visible, positions, ropes: tables, .. } = step;
        let (tokens, row) = (step.tokens(), config.row());
        let mut absorbed = self.q.view_mut().slice(0, 0..tokens)?;
        let mut attended = self.attended.view_mut().slice(0, 0..tokens)?;
        let a = q.slice(2, 0..nope)?.swap_axes(0, 1)?;
        let projected = absorbed.reborrow().slice(2, 0..latent)?.swap_axes(0, 1)?;
        self.to_latent.run(stream, MatmulArgs::new(a, weights.k_b.view(), projected))?;
        let x = RopeInput::From(q.slice(2, nope..nope + rope)?);
        let rotated = absorbed.reborrow().slice(2, latent..row)?;
        rope_plan.run(stream, RopeArgs { x, positions, tables, out: rotated })?;

        let (visible, kv_lens) = match visible {
            Visible::Uniform(keys) => (keys, None),
            Visible::PerSequence(lens) => (cache.rows.shape()[1], Some(lens)),
        };
        let k = cache.rows.view().slice(0, sequences.clone())?.slice(1, 0..visible)?;
        let k = k.reshape(&[batch, visible, 1, row])?;
        let args = AttentionArgs {
            q: absorbed.as_view().reshape(&[batch, seq, heads, row])?,
            k,
            v: k.slice(3, 0..latent)?,
            kv_lens,
            kv_scales: KvScales::default(),
            out: attended.reborrow().reshape(&[batch, seq, heads, latent])?,
            lse: None,
            scores: ScoreTensors::default(),
            offsets: Offsets::default(),
            page_table: None,
        };
        self.attention.run(stream, args)?;
        let a = attended.as_view().swap_axes(0, 1)?;
        let v_b =
            weights.kv_b.view().reshape(&[heads, nope + value, latent])?.slice(1, nope..nope + value)?;
        self.from_latent.run(stream, MatmulArgs::new(a, v_b, out.swap_axes(0, 1)?))
    }
}

impl Naive {
    fn new(phase: &Phase<'_>, config: &LatentConfig) -> Result<Self, Error> {
        let &LatentConfig { heads, latent, nope, rope, value, .. } = config;
        let &Phase { stream, dtype, capacity, .. } = phase;
        let device = stream.device();
        let (n, k, out_dtype) = (heads * (nope + value), latent, dtype);
        let (bias, epilogue) = (Bias::None, Epilogue::NONE);
        let kv_b = MatmulProblem {
            batch: 1,
            m: capacity,
            n,
            k,
            dtype,
            out_dtype,
            precision: Precision::Full,
            bias,
            epilogue,
            weight: None,
        };
        let elements = capacity.saturating_mul(heads).saturating_mul(nope.max(rope));
        let keys = |width| Tensor::empty(stream, &[capacity, heads, width], dtype);
        Ok(Naive {
            kv_b_plan: Matmul::plan(device, kv_b)?,
            copy: Copy::plan(device, CopyProblem { elements, src: dtype, dst: dtype })?,
            attention: attention(phase, config, 1, (heads, nope + rope, value))?,
            kv: keys(nope + value)?,
            k: keys(nope + rope)?,
        })
    }

    /// One sequence after the other: the memory for keys and values is that of one.
    fn run(
        &mut self,
        step: &Step<'_>,
        config: &LatentConfig,
        weights: &LatentAttention,
        cache: &LatentRows,
        q: TensorView<'_>,
        mut out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let &LatentConfig { heads, latent, nope, rope, value, .. } = config;
        let &Step { stream, batch, seq, ref sequences, visible, .. } = step;
        for index in 0..batch {
            let (keys, kv_lens) = match visible {
                Visible::Uniform(keys) => (keys, None),
                Visible::PerSequence(lens) => (cache.rows.shape()[1], Some(lens.slice(0, index..index + 1)?)),
            };
            let sequence = sequences.start + index;
            let rows = cache.rows.view().slice(0, sequence..sequence + 1)?.slice(1, 0..keys)?;
            let rows = rows.reshape(&[keys, config.row()])?;
            let mut kv = self.kv.view_mut().slice(0, 0..keys)?;
            let mut k = self.k.view_mut().slice(0, 0..keys)?;
            let all = kv.reborrow().reshape(&[keys, heads * (nope + value)])?;
            let args = MatmulArgs::new(rows.slice(1, 0..latent)?, weights.kv_b.view(), all);
            self.kv_b_plan.run(stream, args)?;
            let (kv, parts) = (kv.as_view(), rows.slice(1, latent..config.row())?);
            let rotated = parts.reshape(&[keys, 1, rope])?.repeat(1, heads)?;
            for (src, columns) in [(kv.slice(2, 0..nope)?, 0..nope), (rotated, nope..nope + rope)] {
                self.copy.run(stream, CopyArgs { src, dst: k.reborrow().slice(2, columns)? })?;
            }
            let tokens = index * seq..(index + 1) * seq;
            let args = AttentionArgs {
                q: q.slice(0, tokens.clone())?.reshape(&[1, seq, heads, nope + rope])?,
                k: k.as_view().reshape(&[1, keys, heads, nope + rope])?,
                v: kv.slice(2, nope..nope + value)?.reshape(&[1, keys, heads, value])?,
                kv_lens,
                kv_scales: KvScales::default(),
                out: out.reborrow().slice(0, tokens)?.reshape(&[1, seq, heads, value])?,
                lse: None,
                scores: ScoreTensors::default(),
                offsets: Offsets::default(),
                page_table: None,
            };
            self.attention.run(stream, args)?;
        }
        Ok(())
    }
}
