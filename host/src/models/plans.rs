//! The operators of a decoder, planned for one phase.

use std::collections::{BTreeMap, BTreeSet};

use super::Model;
use super::config::DecoderConfig;
use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport};
use crate::ops::attention::{Attention, AttentionProblem, Mask};
use crate::ops::embedding::{Embedding, EmbeddingProblem};
use crate::ops::glu::{Glu, GluProblem};
use crate::ops::kv_append::{KvAppend, KvAppendProblem};
use crate::ops::matmul::{Bias, Matmul, MatmulProblem};
use crate::ops::rmsnorm::{NormWeight, RmsNorm, RmsNormProblem};
use crate::ops::rope::{Rope, RopeProblem, RopeStyle};

/// The sizes of a phase: sequences that are run together, and most new tokens of each.
#[derive(Clone, Copy, Debug)]
pub(super) struct PhaseSizes {
    pub(super) batch: usize,
    pub(super) seq: usize,
    /// Slots of the cache per sequence.
    pub(super) capacity: usize,
    /// Most rows of logits.
    pub(super) logit_rows: usize,
}

/// Every operator of a decoder, planned for the same sizes; the layers share them.
#[derive(Debug)]
pub(super) struct Plans {
    pub(super) embedding: Embedding,
    pub(super) norm: RmsNorm,
    pub(super) qkv: Matmul,
    pub(super) q_norm: RmsNorm,
    pub(super) k_norm: RmsNorm,
    pub(super) q_rope: Rope,
    pub(super) k_rope: Rope,
    pub(super) append: KvAppend,
    /// By sliding window.
    pub(super) attention: BTreeMap<Option<usize>, Attention>,
    pub(super) o: Matmul,
    pub(super) gate_up: Matmul,
    pub(super) glu: Glu,
    pub(super) down: Matmul,
    pub(super) head: Matmul,
}

impl Plans {
    pub(super) fn new(model: &Model, sizes: PhaseSizes) -> Result<Self, Error> {
        let (device, dtype): (&Device, _) = (model.device(), model.dtype());
        let config: &DecoderConfig = &model.config().decoder;
        let PhaseSizes { batch, seq, capacity, logit_rows } = sizes;
        let tokens = batch * seq;
        let &DecoderConfig {
            hidden_size, intermediate_size, heads_q, heads_kv, head_dim, vocab_size, ..
        } = config;
        let norm = |rows, cols| {
            let (eps, weight) = (config.rms_norm_eps, NormWeight::Plain);
            RmsNorm::plan(device, RmsNormProblem { rows, cols, dtype, eps, weight })
        };
        let matmul = |m, n, k, out_dtype, bias| {
            Matmul::plan(device, MatmulProblem { m, n, k, dtype, out_dtype, bias })
        };
        let bias = if config.attention_bias { Bias::PerColumn } else { Bias::None };
        let rope = |heads| {
            let (rotary_dim, style) = (config.rope.rotary_dim(head_dim), RopeStyle::HalfSplit);
            Rope::plan(device, RopeProblem { tokens, heads, head_dim, rotary_dim, dtype, style })
        };
        let attention = |window| {
            let (mask, scale) = (Mask::Causal, None);
            Attention::plan(
                device,
                AttentionProblem {
                    batch,
                    seq_q: seq,
                    seq_kv: capacity,
                    heads_q,
                    heads_kv,
                    head_dim,
                    dtype,
                    scale,
                    mask,
                    window,
                },
            )
        };
        let windows: BTreeSet<Option<usize>> = config.layer_windows.iter().copied().collect();
        let attention = windows
            .into_iter()
            .map(|window| Ok((window, attention(window)?)))
            .collect::<Result<_, Error>>()?;
        let q_cols = heads_q * head_dim;
        let qkv_cols = (heads_q + 2 * heads_kv) * head_dim;
        Ok(Plans {
            embedding: Embedding::plan(
                device,
                EmbeddingProblem { tokens, vocab: vocab_size, cols: hidden_size, dtype },
            )?,
            norm: norm(tokens, hidden_size)?,
            qkv: matmul(tokens, qkv_cols, hidden_size, dtype, bias)?,
            q_norm: norm(tokens * heads_q, head_dim)?,
            k_norm: norm(tokens * heads_kv, head_dim)?,
            q_rope: rope(heads_q)?,
            k_rope: rope(heads_kv)?,
            append: KvAppend::plan(device, KvAppendProblem { tokens, heads: heads_kv, head_dim, dtype })?,
            attention,
            o: matmul(tokens, hidden_size, q_cols, dtype, bias)?,
            gate_up: matmul(tokens, 2 * intermediate_size, hidden_size, dtype, Bias::None)?,
            glu: Glu::plan(
                device,
                GluProblem { rows: tokens, cols: intermediate_size, dtype, activation: config.activation },
            )?,
            down: matmul(tokens, hidden_size, intermediate_size, dtype, Bias::None)?,
            head: matmul(logit_rows, vocab_size, hidden_size, abi::DType::F32, Bias::None)?,
        })
    }

    /// What each operator chose, in the order in which a layer runs them.
    pub(super) fn reports(&self) -> Vec<OptimizationReport> {
        let mut reports = vec![
            self.embedding.optimization_report(),
            self.norm.optimization_report(),
            self.qkv.optimization_report(),
            self.q_norm.optimization_report(),
            self.k_norm.optimization_report(),
            self.q_rope.optimization_report(),
            self.k_rope.optimization_report(),
            self.append.optimization_report(),
        ];
        reports.extend(self.attention.values().map(Kernel::optimization_report));
        reports.extend([
            self.o.optimization_report(),
            self.gate_up.optimization_report(),
            self.glu.optimization_report(),
            self.down.optimization_report(),
            self.head.optimization_report(),
        ]);
        reports
    }
}
