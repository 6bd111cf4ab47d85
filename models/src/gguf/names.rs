//! A file's tensors under the names, and in the form, that the model was published with.

use std::ops::Range;

use super::{Gguf, GgufTensor};
use crate::TensorProblem;
use crate::checkpoint::{Data, Stored};
use crate::config::NormWeight;
use crate::config::{AttentionConfig, DeltaNetConfig, LatentConfig, MixerConfig, ModelConfig};
use crate::quant::{GgmlType, QuantMatrix};
use crate::weights::decode;
use abi::DType;

/// Parts of a layer's names, the published one first. What is not here is not stored as it was published.
const PARTS: [(&str, &str); 25] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("linear_attn.in_proj_qkvz", "ssm_in"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("linear_attn.dt", "ssm_dt"),
];

/// The same of a block of a vision tower.
const TOWER_PARTS: [(&str, &str); 6] = [
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_out"),
    ("mlp.linear_fc1", "ffn_up"),
    ("mlp.linear_fc2", "ffn_down"),
    ("norm1", "ln1"),
    ("norm2", "ln2"),
];

/// A checkpoint's files and what they are the files of.
#[derive(Clone, Copy)]
pub(crate) struct Named<'a> {
    pub(crate) file: &'a Gguf,
    pub(crate) tower: Option<&'a Gguf>,
    pub(crate) config: &'a ModelConfig,
    /// Whether the rows of q and k are in the order of a rotation whose pairs are beside each other.
    pub(crate) is_permuted: bool,
}

impl<'a> GgufTensor<'a> {
    /// As it lies there.
    fn data(&self) -> Data<'a> {
        let dtype = match self.kind {
            GgmlType::F32 => DType::F32,
            GgmlType::F16 => DType::F16,
            GgmlType::Bf16 => DType::BF16,
            kind => {
                let (&k, outer) = self.shape.split_last().unwrap_or((&1, &[]));
                // The file's reader has compared the sizes.
                return match QuantMatrix::of_blocks([outer.iter().product(), k], kind, self.bytes) {
                    Some(matrix) => Data::Quantised(matrix),
                    None => Data::Values(Vec::new()),
                };
            }
        };
        Data::Dense { dtype, bytes: self.bytes }
    }

    /// All elements.
    fn values(&self) -> Vec<f32> {
        if let Some(values) = self.dense_f32() {
            return values;
        }
        let Data::Quantised(matrix) = self.data() else { return Vec::new() };
        let mut values = vec![0.0; matrix.n() * matrix.k()];
        for (row, out) in values.chunks_exact_mut(matrix.k().max(1)).enumerate() {
            matrix.dequantise_row(row, out);
        }
        values
    }

    /// The elements of a tensor that is not quantised.
    pub(super) fn dense_f32(&self) -> Option<Vec<f32>> {
        let Data::Dense { dtype, bytes } = self.data() else { return None };
        let mut values = vec![0.0; bytes.len() / dtype.bytes()];
        decode(dtype, bytes, &mut values);
        Some(values)
    }

    fn shaped(&self, shape: &[usize]) -> Result<(), TensorProblem> {
        if self.shape == shape {
            return Ok(());
        }
        Err(TensorProblem::Shape { name: self.name.into(), expected: shape.into(), got: self.shape.into() })
    }
}

/// What a name ends in, and what is before.
fn split_suffix(name: &str) -> Option<(&str, &str)> {
    let (part, suffix) = name.rsplit_once('.')?;
    matches!(suffix, "weight" | "bias").then_some((part, suffix))
}

impl<'a> Named<'a> {
    /// Whether there is a tensor of this published name.
    pub(crate) fn contains(&self, name: &str) -> bool {
        matches!(self.tensor(name), Ok(Some(_)) | Err(_))
    }

    /// The tensor of this published name.
    pub(crate) fn tensor(&self, name: &str) -> Result<Option<Stored<'a>>, TensorProblem> {
        if let Some(part) = name.strip_prefix("model.visual.") {
            let Some(tower) = self.tower else { return Ok(None) };
            return self.of_tower(tower, part);
        }
        let prefix = self.config.architecture.decoder_prefix();
        let part = name.strip_prefix(prefix).and_then(|part| part.strip_prefix('.'));
        match part {
            None if name == "lm_head.weight" => self.plain("output.weight"),
            None => Ok(None),
            Some("embed_tokens.weight") => self.plain("token_embd.weight"),
            Some("norm.weight") => self.gain("output_norm.weight"),
            Some(part) => {
                let part = part.strip_prefix("layers.").and_then(|part| part.split_once('.'));
                let Some((layer, part)) = part else { return Ok(None) };
                match layer.parse::<usize>() {
                    Ok(layer) if layer < self.config.decoder.layers.len() => self.of_layer(layer, part),
                    _ => Ok(None),
                }
            }
        }
    }

    fn plain(&self, name: &str) -> Result<Option<Stored<'a>>, TensorProblem> {
        Ok(self.file.tensor(name).map(|tensor| Stored { shape: tensor.shape.into(), data: tensor.data() }))
    }

    /// The gain of a norm: what is added to 1, where the file has had the 1 added.
    fn gain(&self, name: &str) -> Result<Option<Stored<'a>>, TensorProblem> {
        if self.config.decoder.norm.weight != NormWeight::ZeroCentred {
            return self.plain(name);
        }
        let less_one = |value: f32| value - 1.0;
        Ok(self.computed(name, less_one))
    }

    fn computed(&self, name: &str, of: impl Fn(f32) -> f32) -> Option<Stored<'a>> {
        let tensor = self.file.tensor(name)?;
        let values = tensor.values().into_iter().map(of).collect();
        Some(Stored { shape: tensor.shape.into(), data: Data::Values(values) })
    }

    fn of_layer(&self, layer: usize, part: &str) -> Result<Option<Stored<'a>>, TensorProblem> {
        let name = |own: &str| format!("blk.{layer}.{own}");
        let mixer = &self.config.decoder.layers[layer].mixer;
        match part {
            "linear_attn.dt_bias" => return self.plain(&name("ssm_dt.bias")),
            "linear_attn.A_log" => return Ok(self.computed(&name("ssm_a"), |value| (-value).ln())),
            "mlp.gate.e_score_correction_bias" => return self.plain(&name("exp_probs_b.bias")),
            _ => {}
        }
        let Some((part, suffix)) = split_suffix(part) else { return Ok(None) };
        let named = |own: &str| name(&format!("{own}.{suffix}"));
        if let Some(expert) = part.strip_prefix("mlp.experts.") {
            let Some((expert, part)) = expert.split_once('.') else { return Ok(None) };
            let own = match part {
                "gate_proj" => "ffn_gate_exps",
                "up_proj" => "ffn_up_exps",
                "down_proj" => "ffn_down_exps",
                _ => return Ok(None),
            };
            return expert.parse().map_or(Ok(None), |expert| self.expert(&named(own), expert));
        }
        for shared in ["mlp.shared_expert.", "mlp.shared_experts."] {
            let own = match part.strip_prefix(shared) {
                Some("gate_proj") => "ffn_gate_shexp",
                Some("up_proj") => "ffn_up_shexp",
                Some("down_proj") => "ffn_down_shexp",
                _ => continue,
            };
            return self.plain(&named(own));
        }
        let Some((_, own)) = PARTS.iter().find(|(published, _)| *published == part) else { return Ok(None) };
        match (*own, mixer) {
            ("attn_norm" | "attn_q_norm" | "attn_k_norm", _) => self.gain(&named(own)),
            ("ffn_norm", _) if self.file.contains(&named("post_attention_norm")) => {
                self.gain(&named("post_attention_norm"))
            }
            ("ffn_norm", _) => self.gain(&named(own)),
            ("attn_q", MixerConfig::Attention(attention)) if self.is_permuted => {
                self.unpermuted(&named(own), attention, attention.heads_q)
            }
            ("attn_k", MixerConfig::Attention(attention)) if self.is_permuted => {
                self.unpermuted(&named(own), attention, attention.heads_kv)
            }
            ("attn_kv_b", MixerConfig::Latent(latent)) if !self.file.contains(&named(own)) => {
                self.keys_and_values(latent, &named("attn_k_b"), &named("attn_v_b"))
            }
            ("ssm_in", MixerConfig::DeltaNet(net)) if !self.file.contains(&named(own)) => {
                self.by_key_head(net, &named("attn_qkv"), &named("attn_gate"))
            }
            _ => self.plain(&named(own)),
        }
    }

    /// An expert's matrix of those of a layer.
    fn expert(&self, name: &str, expert: usize) -> Result<Option<Stored<'a>>, TensorProblem> {
        let Some(tensor) = self.file.tensor(name) else { return Ok(None) };
        let &[experts, rows, cols] = tensor.shape else {
            return Err(TensorProblem::Unfit {
                name: name.into(),
                expected: "three dimensions".into(),
                got: format!("{:?}", tensor.shape),
            });
        };
        if expert >= experts {
            return Ok(None);
        }
        // Experts have whole rows, and as many bytes.
        let bytes = tensor.bytes.len() / experts;
        let own = GgufTensor {
            bytes: &tensor.bytes[expert * bytes..(expert + 1) * bytes],
            shape: &tensor.shape[1..],
            ..tensor
        };
        Ok(Some(Stored { shape: vec![rows, cols], data: own.data() }))
    }

    /// Rows, or numbers, of heads whose halves were put beside each other, pair by pair.
    fn unpermuted(
        &self,
        name: &str,
        attention: &AttentionConfig,
        heads: usize,
    ) -> Result<Option<Stored<'a>>, TensorProblem> {
        let Some(tensor) = self.file.tensor(name) else { return Ok(None) };
        let head_dim = attention.head_dim;
        let (&rows, rest) = tensor.shape.split_first().unwrap_or((&0, &[]));
        if rest.len() > 1 || rows != heads * head_dim {
            return Err(TensorProblem::Unfit {
                name: name.into(),
                expected: format!("{heads} heads of {head_dim} rows"),
                got: format!("{:?}", tensor.shape),
            });
        }
        let order = (0..rows).map(|row| {
            let (head, place) = (row / head_dim, row % head_dim);
            (head * head_dim + place % (head_dim / 2) * 2 + place / (head_dim / 2)) as u32
        });
        let data = match tensor.data() {
            Data::Quantised(matrix) => Data::Quantised(matrix.with_rows(order.collect())),
            dense => Data::Rows {
                cols: rest.iter().product(),
                parts: vec![dense],
                order: order.map(|row| (0, row)).collect(),
            },
        };
        Ok(Some(Stored { shape: tensor.shape.into(), data }))
    }

    /// The projection to every head's key part and value, of which the file has the former transposed.
    fn keys_and_values(
        &self,
        config: &LatentConfig,
        keys: &str,
        values: &str,
    ) -> Result<Option<Stored<'a>>, TensorProblem> {
        let (Some(keys), Some(values)) = (self.file.tensor(keys), self.file.tensor(values)) else {
            return Ok(None);
        };
        let &LatentConfig { heads, nope, latent, value, .. } = config;
        keys.shaped(&[heads, latent, nope])?;
        values.shaped(&[heads, value, latent])?;
        let (keys, values) = (keys.values(), values.values());
        let mut both = Vec::with_capacity(keys.len() + values.len());
        for (keys, values) in keys.chunks_exact(latent * nope).zip(values.chunks_exact(value * latent)) {
            for row in 0..nope {
                both.extend((0..latent).map(|col| keys[col * nope + row]));
            }
            both.extend_from_slice(values);
        }
        Ok(Some(Stored { shape: vec![heads * (nope + value), latent], data: Data::Values(both) }))
    }

    /// The projections of a delta net by key head: q, k, v and z of the first, of the second, …; the file has all q,
    /// all k, all v, and all z in a tensor of its own.
    fn by_key_head(
        &self,
        config: &DeltaNetConfig,
        qkv: &str,
        z: &str,
    ) -> Result<Option<Stored<'a>>, TensorProblem> {
        let (Some(qkv), Some(z)) = (self.file.tensor(qkv), self.file.tensor(z)) else { return Ok(None) };
        let cols = self.config.decoder.hidden_size;
        let &DeltaNetConfig { heads_k, heads_v, dim_k, dim_v, .. } = config;
        let (keys, values) = (heads_k * dim_k, heads_v * dim_v);
        qkv.shaped(&[2 * keys + values, cols])?;
        z.shaped(&[values, cols])?;
        let per_head = values / heads_k;
        let mut order = Vec::with_capacity(2 * (keys + values));
        for head in 0..heads_k {
            let mut add = |part: u32, rows: Range<usize>| order.extend(rows.map(|row| (part, row as u32)));
            add(0, head * dim_k..(head + 1) * dim_k);
            add(0, keys + head * dim_k..keys + (head + 1) * dim_k);
            add(0, 2 * keys + head * per_head..2 * keys + (head + 1) * per_head);
            add(1, head * per_head..(head + 1) * per_head);
        }
        let data = Data::Rows { cols, parts: vec![qkv.data(), z.data()], order };
        Ok(Some(Stored { shape: vec![2 * (keys + values), cols], data }))
    }

    fn of_tower(&self, tower: &'a Gguf, part: &str) -> Result<Option<Stored<'a>>, TensorProblem> {
        let Some(config) = &self.config.vision else { return Ok(None) };
        let plain = |name: String| {
            let stored = |tensor: GgufTensor<'a>| Stored { shape: tensor.shape.into(), data: tensor.data() };
            Ok(tower.tensor(&name).map(stored))
        };
        if part == "patch_embed.proj.weight" {
            return self.patches(tower);
        }
        let Some((part, suffix)) = split_suffix(part) else { return Ok(None) };
        if let Some((block, part)) = part.strip_prefix("blocks.").and_then(|part| part.split_once('.')) {
            let own = TOWER_PARTS.iter().find(|(published, _)| *published == part);
            return own.map_or(Ok(None), |(_, own)| plain(format!("v.blk.{block}.{own}.{suffix}")));
        }
        if let Some((merger, part)) =
            part.strip_prefix("deepstack_merger_list.").and_then(|part| part.split_once('.'))
        {
            let own = match part {
                "norm" => "norm",
                "linear_fc1" => "fc1",
                "linear_fc2" => "fc2",
                _ => return Ok(None),
            };
            let block = merger.parse().ok().and_then(|merger: usize| config.deepstack_blocks.get(merger));
            return block.map_or(Ok(None), |block| plain(format!("v.deepstack.{block}.{own}.{suffix}")));
        }
        let own = match part {
            "patch_embed.proj" => "v.patch_embd",
            "pos_embed" => "v.position_embd",
            "merger.norm" => "v.post_ln",
            "merger.linear_fc1" => "mm.0",
            "merger.linear_fc2" => "mm.2",
            _ => return Ok(None),
        };
        plain(format!("{own}.{suffix}"))
    }

    /// The projection of patches of two frames, of which the file has each frame's in a tensor of its own.
    fn patches(&self, tower: &'a Gguf) -> Result<Option<Stored<'a>>, TensorProblem> {
        let (first, second) = ("v.patch_embd.weight", "v.patch_embd.weight.1");
        let (Some(first), Some(second)) = (tower.tensor(first), tower.tensor(second)) else {
            return Ok(None);
        };
        second.shaped(first.shape)?;
        let &[rows, channels, height, width] = first.shape else {
            return Err(TensorProblem::Unfit {
                name: first.name.into(),
                expected: "four dimensions".into(),
                got: format!("{:?}", first.shape),
            });
        };
        let shape = vec![rows, channels, 2, height, width];
        let (first, second) = (first.values(), second.values());
        let pixels = (height * width).max(1);
        let frames = first.chunks_exact(pixels).zip(second.chunks_exact(pixels));
        let values = frames.flat_map(|(first, second)| first.iter().chain(second)).copied().collect();
        Ok(Some(Stored { shape, data: Data::Values(values) }))
    }
}
