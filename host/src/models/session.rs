//! Running a decoder: caches, buffers, and the forward pass.

use std::ops::Range;

use abi::DType;

use super::Model;
use super::config::DecoderConfig;
use super::modules::{DecoderLayer, Linear};
use super::plans::{PhaseSizes, Plans};
use crate::device::Place;
use crate::error::Error;
use crate::kernel::OptimizationReport;
use crate::nvtx;
use crate::ops::attention::AttentionArgs;
use crate::ops::embedding::EmbeddingArgs;
use crate::ops::glu::GluArgs;
use crate::ops::kv_append::KvAppendArgs;
use crate::ops::matmul::{Matmul, MatmulArgs};
use crate::ops::rmsnorm::RmsNormArgs;
use crate::ops::rope::{RopeArgs, RopeInput, RopeTables};
use crate::stream::{Graph, Stream};
use crate::tensor::{Tensor, TensorView, TensorViewMut};

const OP: &str = "Session";

/// The sizes of a session. All memory is taken when it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionOptions {
    /// Sequences that are decoded together.
    pub batch: usize,
    /// Most tokens of a sequence, prompt and continuation together: the size of its cache.
    pub capacity: usize,
    /// Tokens of a prompt that run at a time; a longer prompt runs in pieces.
    pub chunk: usize,
    /// Which rows of logits a prefill gives.
    pub logits: Logits,
}

impl Default for SessionOptions {
    fn default() -> Self {
        SessionOptions { batch: 1, capacity: 2048, chunk: 512, logits: Logits::Last }
    }
}

/// Which rows of logits a prefill computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// That of the last token.
    Last,
    /// Those of all tokens of a chunk, which cost `chunk · vocab · 4` bytes.
    All,
}

/// A batch of sequences in the making: their caches, the buffers of a forward pass, and the planned operators.
#[derive(Debug)]
pub struct Session {
    model: Model,
    options: SessionOptions,
    stream: Stream,
    prefill: Plans,
    decode: Plans,
    /// The recorded decode step, once there is one.
    decode_graph: DecodeGraph,
    ropes: RopeTables,
    caches: Vec<Cache>,
    buffers: Buffers,
    /// Tokens in the cache, per sequence.
    lens: Vec<usize>,
    /// Rows of the logits buffer that the last call gave.
    logit_rows: Range<usize>,
}

/// The decode step is run once as it is, so that everything that is lazy has happened, and recorded the next time.
#[derive(Debug)]
enum DecodeGraph {
    NotRun,
    RunOnce,
    Recorded(Graph),
    /// On the CPU.
    Never,
}

/// Keys and values of one layer, `[batch, capacity, heads_kv, head_dim]` each.
#[derive(Debug)]
struct Cache {
    k: Tensor,
    v: Tensor,
}

/// Activations, for as many tokens as the larger phase has.
#[derive(Debug)]
struct Buffers {
    /// `[4, tokens]` u32: ids, positions, slots, and the cache lengths of the sequences.
    inputs: Tensor,
    residual: Tensor,
    normed: Tensor,
    qkv: Tensor,
    q: Tensor,
    k: Tensor,
    attended: Tensor,
    projected: Tensor,
    gate_up: Tensor,
    activated: Tensor,
    logits: Tensor,
}

/// A tensor that an observer sees during a prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observed {
    /// The input of this layer, `[tokens, hidden]`.
    LayerInput(usize),
    /// The output of the final norm, `[tokens, hidden]`.
    FinalNorm,
}

/// Sees tensors of a forward pass while they are there.
pub type Observer<'a> = dyn FnMut(Observed, TensorView<'_>) -> Result<(), Error> + 'a;

/// One forward pass: which operators, on how many tokens, of which sequences.
struct Pass<'a> {
    plans: &'a Plans,
    batch: usize,
    seq: usize,
    /// The sequences of the cache that take part.
    sequences: Range<usize>,
    /// Keys that are visible to the last token: on the host where all sequences have as many, else from device memory.
    visible: Visible,
    logit_rows: LogitRows,
}

#[derive(Clone, Copy)]
enum Visible {
    Uniform(usize),
    PerSequence,
}

#[derive(Clone, Copy)]
enum LogitRows {
    None,
    /// From this token on.
    From(usize),
}

impl Session {
    pub(super) fn new(model: Model, options: SessionOptions) -> Result<Self, Error> {
        let SessionOptions { batch, capacity, chunk, logits } = options;
        for (argument, size) in [("batch", batch), ("capacity", capacity), ("chunk", chunk)] {
            if size == 0 {
                return Err(Error::invalid(OP, argument, "at least 1", "0"));
            }
        }
        let chunk = chunk.min(capacity);
        let options = SessionOptions { chunk, ..options };
        let config = &model.config().decoder;
        let &DecoderConfig {
            hidden_size, intermediate_size, heads_q, heads_kv, head_dim, vocab_size, ..
        } = config;
        let stream = model.device().stream()?;
        let prefill_rows = match logits {
            Logits::Last => 1,
            Logits::All => chunk,
        };
        let prefill =
            Plans::new(&model, PhaseSizes { batch: 1, seq: chunk, capacity, logit_rows: prefill_rows })?;
        let decode = Plans::new(&model, PhaseSizes { batch, seq: 1, capacity, logit_rows: batch })?;
        let (tokens, dtype) = (chunk.max(batch), model.dtype());
        let empty = |shape: &[usize], dtype| Tensor::empty(&stream, shape, dtype);
        let cache = || {
            let shape = [batch, capacity, heads_kv, head_dim];
            Ok(Cache { k: empty(&shape, dtype)?, v: empty(&shape, dtype)? })
        };
        let caches = (0..config.num_layers).map(|_| cache()).collect::<Result<_, Error>>()?;
        let buffers = Buffers {
            inputs: empty(&[4, tokens], DType::U32)?,
            residual: empty(&[tokens, hidden_size], dtype)?,
            normed: empty(&[tokens, hidden_size], dtype)?,
            qkv: empty(&[tokens, (heads_q + 2 * heads_kv) * head_dim], dtype)?,
            q: empty(&[tokens, heads_q, head_dim], dtype)?,
            k: empty(&[tokens, heads_kv, head_dim], dtype)?,
            attended: empty(&[tokens, heads_q * head_dim], dtype)?,
            projected: empty(&[tokens, hidden_size], dtype)?,
            gate_up: empty(&[tokens, 2 * intermediate_size], dtype)?,
            activated: empty(&[tokens, intermediate_size], dtype)?,
            logits: empty(&[prefill_rows.max(batch), vocab_size], DType::F32)?,
        };
        let rope = &config.rope;
        let inv_freq = rope.inv_freq(rope.rotary_dim(head_dim));
        let ropes = RopeTables::new(&stream, &inv_freq, rope.attention_factor(), capacity)?;
        let decode_graph = if matches!(model.device().place(), Place::Cuda(_)) {
            DecodeGraph::NotRun
        } else {
            DecodeGraph::Never
        };
        let lens = vec![0; batch];
        Ok(Session {
            model,
            options,
            stream,
            prefill,
            decode,
            decode_graph,
            ropes,
            caches,
            buffers,
            lens,
            logit_rows: 0..0,
        })
    }

    /// Its model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The stream that all work of the session runs on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Its sizes.
    pub fn options(&self) -> SessionOptions {
        self.options
    }

    /// Tokens in the cache of a sequence.
    pub fn len(&self, sequence: usize) -> usize {
        self.lens.get(sequence).copied().unwrap_or(0)
    }

    /// Whether no sequence has any tokens.
    pub fn is_empty(&self) -> bool {
        self.lens.iter().all(|&len| len == 0)
    }

    /// Forgets the tokens of a sequence from `len` on.
    pub fn truncate(&mut self, sequence: usize, len: usize) {
        if let Some(current) = self.lens.get_mut(sequence) {
            *current = len.min(*current);
        }
    }

    /// What the operators chose, for prefill and for decode.
    pub fn optimization_reports(&self) -> [(&'static str, Vec<OptimizationReport>); 2] {
        [("prefill", self.prefill.reports()), ("decode", self.decode.reports())]
    }

    /// Appends a prompt, or a part of one, to a sequence. Returns the logits of its last token, `[1, vocab]` f32, which
    /// stay until the next call.
    pub fn prefill(&mut self, sequence: usize, ids: &[u32]) -> Result<TensorView<'_>, Error> {
        self.prefill_with(sequence, ids, &mut |_, _| Ok(()), &mut |_, _| Ok(()))?;
        self.logits()
    }

    /// Like [`Self::prefill`], showing inner tensors to `observe`, and to `logits` for each chunk the index of its first
    /// token and its logits `[rows, vocab]`: of all tokens or the last, as the session's options say.
    pub fn prefill_with(
        &mut self,
        sequence: usize,
        ids: &[u32],
        observe: &mut Observer<'_>,
        logits: &mut dyn FnMut(usize, TensorView<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let _range = nvtx::range("prefill");
        self.check_ids(ids)?;
        let Some(&len) = self.lens.get(sequence) else {
            let expected = format!("a sequence below {}", self.options.batch);
            return Err(Error::invalid(OP, "sequence", expected, sequence.to_string()));
        };
        if ids.is_empty() {
            return Err(Error::invalid(OP, "ids", "at least one token", "none"));
        }
        self.check_room(len, ids.len())?;
        let SessionOptions { chunk, capacity, .. } = self.options;
        let num_chunks = ids.len().div_ceil(chunk);
        for (index, part) in ids.chunks(chunk).enumerate() {
            let start = self.lens[sequence];
            let tokens = part.len();
            let positions = start..start + tokens;
            let slots = positions.clone().map(|position| sequence * capacity + position);
            self.set_inputs(part.iter().copied(), positions.map(|p| p as u32), slots, &[])?;
            let is_last = index + 1 == num_chunks;
            let logit_rows = match self.options.logits {
                Logits::All => LogitRows::From(0),
                Logits::Last if is_last => LogitRows::From(tokens - 1),
                Logits::Last => LogitRows::None,
            };
            let pass = Pass {
                plans: &self.prefill,
                batch: 1,
                seq: tokens,
                sequences: sequence..sequence + 1,
                visible: Visible::Uniform(start + tokens),
                logit_rows,
            };
            let (model, stream, ropes) = (&self.model, &self.stream, &self.ropes);
            forward(model, stream, ropes, &mut self.caches, &mut self.buffers, &pass, observe)?;
            self.lens[sequence] += tokens;
            match logit_rows {
                LogitRows::None => {}
                LogitRows::From(first) => {
                    self.logit_rows = tokens - first - 1..tokens - first;
                    let rows = self.buffers.logits.view().slice(0, 0..tokens - first)?;
                    logits(index * chunk + first, rows)?;
                }
            }
        }
        Ok(())
    }

    /// Appends one token to every sequence. Returns their logits, `[batch, vocab]` f32, which stay until the next call.
    pub fn decode(&mut self, ids: &[u32]) -> Result<TensorView<'_>, Error> {
        let _range = nvtx::range("decode");
        let SessionOptions { batch, capacity, .. } = self.options;
        if ids.len() != batch {
            let got = ids.len().to_string();
            return Err(Error::invalid(OP, "ids", format!("one token for each of {batch} sequences"), got));
        }
        self.check_ids(ids)?;
        for &len in &self.lens {
            self.check_room(len, 1)?;
        }
        let lens: Vec<u32> = self.lens.iter().map(|&len| len as u32 + 1).collect();
        let positions: Vec<u32> = self.lens.iter().map(|&len| len as u32).collect();
        let slots: Vec<usize> =
            self.lens.iter().enumerate().map(|(sequence, &len)| sequence * capacity + len).collect();
        self.set_inputs(ids.iter().copied(), positions.into_iter(), slots.into_iter(), &lens)?;
        let pass = Pass {
            plans: &self.decode,
            batch,
            seq: 1,
            sequences: 0..batch,
            visible: Visible::PerSequence,
            logit_rows: LogitRows::From(0),
        };
        let (model, ropes, caches, buffers) = (&self.model, &self.ropes, &mut self.caches, &mut self.buffers);
        let mut run =
            |stream: &Stream| forward(model, stream, ropes, caches, buffers, &pass, &mut |_, _| Ok(()));
        match &self.decode_graph {
            DecodeGraph::Never => run(&self.stream)?,
            DecodeGraph::NotRun => {
                run(&self.stream)?;
                self.decode_graph = DecodeGraph::RunOnce;
            }
            DecodeGraph::RunOnce => {
                let graph = self.stream.capture(run)?;
                // SAFETY: as below.
                unsafe { graph.launch(&self.stream)? };
                self.decode_graph = DecodeGraph::Recorded(graph);
            }
            // SAFETY: it was recorded with the session's own buffers and weights, which live as long as the session.
            DecodeGraph::Recorded(graph) => unsafe { graph.launch(&self.stream)? },
        }
        for len in &mut self.lens {
            *len += 1;
        }
        self.logit_rows = 0..batch;
        self.logits()
    }

    /// The logits of the last call: `[1, vocab]` of a prompt's last token, `[batch, vocab]` after a decode step, no rows
    /// before either. They are overwritten by the next call.
    pub fn logits(&self) -> Result<TensorView<'_>, Error> {
        self.buffers.logits.view().slice(0, self.logit_rows.clone())
    }

    /// Token ids that the embedding has; the kernels cannot report others.
    fn check_ids(&self, ids: &[u32]) -> Result<(), Error> {
        let vocab = self.model.config().decoder.vocab_size;
        match ids.iter().position(|&id| id as usize >= vocab) {
            None => Ok(()),
            Some(index) => {
                let got = format!("{} at index {index}", ids[index]);
                Err(Error::invalid(OP, "ids", format!("token ids below {vocab}"), got))
            }
        }
    }

    fn check_room(&self, len: usize, tokens: usize) -> Result<(), Error> {
        let capacity = self.options.capacity;
        if tokens <= capacity.saturating_sub(len) {
            return Ok(());
        }
        let expected =
            format!("at most {} more tokens (the cache holds {len} of {capacity})", capacity - len);
        Err(Error::invalid(OP, "ids", expected, tokens.to_string()))
    }

    /// Uploads ids, positions, slots and cache lengths in one copy.
    fn set_inputs(
        &mut self,
        ids: impl Iterator<Item = u32>,
        positions: impl Iterator<Item = u32>,
        slots: impl Iterator<Item = usize>,
        lens: &[u32],
    ) -> Result<(), Error> {
        let width = self.buffers.inputs.shape()[1];
        let mut inputs = vec![0u32; 4 * width];
        let mut rows = inputs.chunks_exact_mut(width);
        let mut fill = |values: &mut dyn Iterator<Item = u32>| {
            for (slot, value) in std::iter::zip(rows.next().into_iter().flatten(), values) {
                *slot = value;
            }
        };
        fill(&mut ids.into_iter());
        fill(&mut positions.into_iter());
        fill(&mut slots.map(|slot| slot as u32));
        fill(&mut lens.iter().copied());
        self.stream.upload(self.buffers.inputs.view().address(), bytemuck::cast_slice(&inputs))
    }
}

/// The forward pass, over tokens whose ids, positions and slots are in the input buffer.
fn forward(
    model: &Model,
    stream: &Stream,
    ropes: &RopeTables,
    caches: &mut [Cache],
    buffers: &mut Buffers,
    pass: &Pass<'_>,
    observe: &mut Observer<'_>,
) -> Result<(), Error> {
    let decoder = model.decoder();
    let tokens = pass.batch * pass.seq;
    let Buffers { inputs, residual, normed, qkv, q, k, attended, projected, gate_up, activated, logits } =
        buffers;
    let input = |row: usize, len: usize| -> Result<TensorView<'_>, Error> {
        inputs.view().slice(0, row..row + 1)?.slice(1, 0..len)?.reshape(&[len])
    };
    let (ids, positions, slots) = (input(0, tokens)?, input(1, tokens)?, input(2, tokens)?);
    let kv_lens = match pass.visible {
        Visible::Uniform(_) => None,
        Visible::PerSequence => Some(input(3, pass.batch)?),
    };
    let mut step = Step {
        model,
        stream,
        ropes,
        pass,
        positions,
        slots,
        kv_lens,
        residual: residual.view_mut().slice(0, 0..tokens)?,
        normed: normed.view_mut().slice(0, 0..tokens)?,
        qkv: qkv.view_mut().slice(0, 0..tokens)?,
        q: q.view_mut().slice(0, 0..tokens)?,
        k: k.view_mut().slice(0, 0..tokens)?,
        attended: attended.view_mut().slice(0, 0..tokens)?,
        projected: projected.view_mut().slice(0, 0..tokens)?,
        gate_up: gate_up.view_mut().slice(0, 0..tokens)?,
        activated: activated.view_mut().slice(0, 0..tokens)?,
    };
    let args = EmbeddingArgs { ids, table: decoder.embedding.view(), out: step.residual.reborrow() };
    pass.plans.embedding.run(stream, args)?;
    for (index, (layer, cache)) in std::iter::zip(&decoder.layers, caches).enumerate() {
        step.layer(index, layer, cache, observe)?;
    }
    step.norm_added(&decoder.norm)?;
    observe(Observed::FinalNorm, step.normed.as_view())?;
    if let LogitRows::From(first) = pass.logit_rows {
        let last_rows = step.normed.as_view().slice(0, first..tokens)?;
        let out = logits.view_mut().slice(0, 0..tokens - first)?;
        let args = MatmulArgs { a: last_rows, b: decoder.head().view(), bias: None, out };
        pass.plans.head.run(stream, args)?;
    }
    Ok(())
}

/// The views of one forward pass.
struct Step<'a> {
    model: &'a Model,
    stream: &'a Stream,
    ropes: &'a RopeTables,
    pass: &'a Pass<'a>,
    positions: TensorView<'a>,
    slots: TensorView<'a>,
    kv_lens: Option<TensorView<'a>>,
    /// The residual stream, without the last sublayer's output, which is in `projected`.
    residual: TensorViewMut<'a>,
    normed: TensorViewMut<'a>,
    qkv: TensorViewMut<'a>,
    q: TensorViewMut<'a>,
    k: TensorViewMut<'a>,
    attended: TensorViewMut<'a>,
    projected: TensorViewMut<'a>,
    gate_up: TensorViewMut<'a>,
    activated: TensorViewMut<'a>,
}

impl Step<'_> {
    fn layer(
        &mut self,
        index: usize,
        layer: &DecoderLayer,
        cache: &mut Cache,
        observe: &mut Observer<'_>,
    ) -> Result<(), Error> {
        if index == 0 {
            self.norm_first(&layer.input_norm)?;
        } else {
            self.norm_added(&layer.input_norm)?;
        }
        observe(Observed::LayerInput(index), self.residual.as_view())?;
        self.attention(layer, cache)?;
        self.norm_added(&layer.post_attention_norm)?;
        self.mlp(layer)
    }

    /// `normed = norm(residual)`.
    fn norm_first(&mut self, gain: &Tensor) -> Result<(), Error> {
        let (x, out) = (self.residual.as_view(), self.normed.reborrow());
        self.pass.plans.norm.run(self.stream, RmsNormArgs { x, residual: None, weight: gain.view(), out })
    }

    /// `residual += projected; normed = norm(residual)`.
    fn norm_added(&mut self, gain: &Tensor) -> Result<(), Error> {
        let residual = Some(self.residual.reborrow());
        let (x, out) = (self.projected.as_view(), self.normed.reborrow());
        self.pass.plans.norm.run(self.stream, RmsNormArgs { x, residual, weight: gain.view(), out })
    }

    fn attention(&mut self, layer: &DecoderLayer, cache: &mut Cache) -> Result<(), Error> {
        let &DecoderConfig { heads_q, heads_kv, head_dim, .. } = &self.model.config().decoder;
        let Pass { plans, batch, seq, ref sequences, visible, .. } = *self.pass;
        let attention = &layer.attention;
        linear(self.stream, &plans.qkv, &attention.qkv, self.normed.as_view(), self.qkv.reborrow())?;

        // The joint projection holds the query heads, then the key heads, then the value heads.
        let tokens = batch * seq;
        let (k_start, v_start) = (heads_q * head_dim, (heads_q + heads_kv) * head_dim);
        let joint = self.qkv.as_view();
        let heads = |range: Range<usize>| -> Result<TensorView<'_>, Error> {
            let heads = range.len() / head_dim;
            joint.slice(1, range)?.reshape(&[tokens, heads, head_dim])
        };
        let (q, k, v) =
            (heads(0..k_start)?, heads(k_start..v_start)?, heads(v_start..v_start + heads_kv * head_dim)?);
        let norms = [
            (&plans.q_norm, &plans.q_rope, q, &attention.q_norm, &mut self.q),
            (&plans.k_norm, &plans.k_rope, k, &attention.k_norm, &mut self.k),
        ];
        for (norm, rope, x, gain, out) in norms {
            let args = RmsNormArgs { x, residual: None, weight: gain.view(), out: out.reborrow() };
            norm.run(self.stream, args)?;
            let (x, positions, tables) = (RopeInput::InPlace, self.positions, self.ropes);
            rope.run(self.stream, RopeArgs { x, positions, tables, out: out.reborrow() })?;
        }

        let slots = cache.k.shape()[0] * cache.k.shape()[1];
        let args = KvAppendArgs {
            k: self.k.as_view(),
            v,
            slots: self.slots,
            k_cache: cache.k.view_mut().reshape(&[slots, heads_kv, head_dim])?,
            v_cache: cache.v.view_mut().reshape(&[slots, heads_kv, head_dim])?,
        };
        plans.append.run(self.stream, args)?;

        let Some(plan) = plans.attention.get(&attention.window) else {
            let got = format!("{:?}", attention.window);
            return Err(Error::invalid(OP, "layer", "a window that was planned", got));
        };
        let visible = match visible {
            Visible::Uniform(keys) => keys,
            Visible::PerSequence => cache.k.shape()[1],
        };
        let args = AttentionArgs {
            q: self.q.as_view().reshape(&[batch, seq, heads_q, head_dim])?,
            k: cache.k.view().slice(0, sequences.clone())?.slice(1, 0..visible)?,
            v: cache.v.view().slice(0, sequences.clone())?.slice(1, 0..visible)?,
            kv_lens: self.kv_lens,
            out: self.attended.reborrow().reshape(&[batch, seq, heads_q, head_dim])?,
            lse: None,
        };
        plan.run(self.stream, args)?;
        linear(self.stream, &plans.o, &attention.o, self.attended.as_view(), self.projected.reborrow())
    }

    fn mlp(&mut self, layer: &DecoderLayer) -> Result<(), Error> {
        let (plans, stream, mlp) = (self.pass.plans, self.stream, &layer.mlp);
        linear(stream, &plans.gate_up, &mlp.gate_up, self.normed.as_view(), self.gate_up.reborrow())?;
        let intermediate = self.model.config().decoder.intermediate_size;
        let gate = self.gate_up.as_view().slice(1, 0..intermediate)?;
        let up = self.gate_up.as_view().slice(1, intermediate..2 * intermediate)?;
        plans.glu.run(stream, GluArgs { gate, up, out: self.activated.reborrow() })?;
        linear(stream, &plans.down, &mlp.down, self.activated.as_view(), self.projected.reborrow())
    }
}

fn linear(
    stream: &Stream,
    plan: &Matmul,
    linear: &Linear,
    a: TensorView<'_>,
    out: TensorViewMut<'_>,
) -> Result<(), Error> {
    let bias = linear.bias.as_ref().map(Tensor::view);
    plan.run(stream, MatmulArgs { a, b: linear.weight.view(), bias, out })
}
