//! The vision tower: weights, made by factories from the configuration, and the tower planned for the most patches.

use abi::DType;
use abi::ops::glu::Activation;

use super::{PatchGrid, Visual, invalid};
use crate::config::VisionConfig;
use crate::layers::Linear;
use crate::loader::{Loader, encode};
use host::Error;
use host::Stream;
use host::ops::Store;
use host::ops::attention::{
    self, Attention, AttentionArgs, AttentionProblem, KvScales, Mask, Offsets, ScoreTensors, Scores,
};
use host::ops::embedding_bag::{EmbeddingBag, EmbeddingBagArgs, EmbeddingBagProblem};
use host::ops::layernorm::{LayerNorm, LayerNormArgs, LayerNormProblem};
use host::ops::matmul::{Act, Bias, Epilogue, Matmul, MatmulProblem};
use host::ops::rope::{Rope, RopeArgs, RopeInput, RopeProblem, RopeStyle, RopeTables};
use host::{Constant, Tensor, TensorView, TensorViewMut};
use host::{Kernel, OptimizationReport};

/// Added to the variance in every layer norm of the tower; not in the file.
const EPS: f32 = 1e-6;
/// Table rows between which a position is.
const NEIGHBOURS: usize = 4;

/// A layer norm's gain and offset.
#[derive(Debug)]
pub struct LayerNormWeights {
    /// The gain.
    pub weight: Constant,
    /// The offset.
    pub bias: Constant,
}

impl LayerNormWeights {
    fn new(loader: &mut Loader<'_>, prefix: &str, len: usize) -> Result<Self, Error> {
        Ok(LayerNormWeights {
            weight: loader.gain(&format!("{prefix}.weight"), len)?,
            bias: loader.vectors(&[(format!("{prefix}.bias"), len.into())])?,
        })
    }

    /// The norm of x, or of the sum of x and the residual, which holds the sum then.
    fn run(
        &self,
        stream: &Stream,
        plan: &LayerNorm,
        x: TensorView<'_>,
        residual: Option<TensorViewMut<'_>>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let (weight, bias) = (self.weight.view(), self.bias.view());
        plan.run(stream, LayerNormArgs { x, residual, weight, bias, out })
    }
}

/// Bidirectional attention and an MLP without a gate, each behind a layer norm and around a residual.
#[derive(Debug)]
pub struct VisionBlock {
    /// Before attention.
    pub norm1: LayerNormWeights,
    /// q, k and v projections, above each other.
    pub qkv: Linear,
    /// Output projection.
    pub proj: Linear,
    /// Before the MLP.
    pub norm2: LayerNormWeights,
    /// Up.
    pub fc1: Linear,
    /// Down.
    pub fc2: Linear,
}

impl VisionBlock {
    fn new(config: &VisionConfig, loader: &mut Loader<'_>, prefix: &str) -> Result<Self, Error> {
        let &VisionConfig { hidden_size, intermediate_size, .. } = config;
        let name = |part: &str| format!("{prefix}.{part}");
        let mut linear = |part: &str, rows: usize, cols: usize| {
            Linear::new(loader, &[(name(part).as_str(), rows.into())], &cols.into(), true)
        };
        let qkv = linear("attn.qkv", 3 * hidden_size, hidden_size)?;
        let proj = linear("attn.proj", hidden_size, hidden_size)?;
        let fc1 = linear("mlp.linear_fc1", intermediate_size, hidden_size)?;
        let fc2 = linear("mlp.linear_fc2", hidden_size, intermediate_size)?;
        let norm1 = LayerNormWeights::new(loader, &name("norm1"), hidden_size)?;
        let norm2 = LayerNormWeights::new(loader, &name("norm2"), hidden_size)?;
        Ok(VisionBlock { norm1, qkv, proj, norm2, fc1, fc2 })
    }
}

/// Makes one feature of the patches that become a token: layer norm, and an MLP over all of them.
#[derive(Debug)]
pub struct PatchMerger {
    /// Over a patch in the last merger, before they are put together; over all of a token's patches in the others.
    pub norm: LayerNormWeights,
    /// As wide as the patches together.
    pub fc1: Linear,
    /// To the decoder's width.
    pub fc2: Linear,
}

impl PatchMerger {
    fn new(
        config: &VisionConfig,
        loader: &mut Loader<'_>,
        prefix: &str,
        norm_cols: usize,
    ) -> Result<Self, Error> {
        let merged = config.patches_per_token() * config.hidden_size;
        let mut linear = |part: &str, rows: usize| {
            Linear::new(loader, &[(format!("{prefix}.{part}").as_str(), rows.into())], &merged.into(), true)
        };
        let (fc1, fc2) = (linear("linear_fc1", merged)?, linear("linear_fc2", config.out_hidden_size)?);
        let norm = LayerNormWeights::new(loader, &format!("{prefix}.norm"), norm_cols)?;
        Ok(PatchMerger { norm, fc1, fc2 })
    }
}

/// All weights of a vision tower.
#[derive(Debug)]
pub struct VisionTower {
    /// From a patch's pixels to its features.
    pub patch_embed: Linear,
    /// Learned positions, `[position_grid², hidden]`.
    pub positions: Constant,
    /// The blocks.
    pub blocks: Vec<VisionBlock>,
    /// What the last block's output goes through.
    pub merger: PatchMerger,
    /// What the output of each of [`VisionConfig::deepstack_blocks`] goes through.
    pub deepstack: Vec<PatchMerger>,
}

impl VisionTower {
    pub(crate) fn new(config: &VisionConfig, loader: &mut Loader<'_>) -> Result<Self, Error> {
        let &VisionConfig { hidden_size, channels, temporal_patch_size, patch_size, .. } = config;
        let name = |part: &str| format!("model.visual.{part}");
        let patch = [channels, temporal_patch_size, patch_size, patch_size];
        let patch_embed = Linear {
            weight: loader.flattened(&name("patch_embed.proj.weight"), hidden_size, &patch)?,
            bias: Some(loader.vectors(&[(name("patch_embed.proj.bias"), hidden_size.into())])?),
        };
        let rows = config.position_grid * config.position_grid;
        let positions = loader.matrix(&name("pos_embed.weight"), rows.into(), hidden_size)?;
        let blocks = (0..config.depth)
            .map(|index| VisionBlock::new(config, loader, &name(&format!("blocks.{index}"))))
            .collect::<Result<_, _>>()?;
        let merger = PatchMerger::new(config, loader, &name("merger"), hidden_size)?;
        let merged = config.patches_per_token() * hidden_size;
        let deepstack = (0..config.deepstack_blocks.len())
            .map(|index| {
                PatchMerger::new(config, loader, &name(&format!("deepstack_merger_list.{index}")), merged)
            })
            .collect::<Result<_, _>>()?;
        Ok(VisionTower { patch_embed, positions, blocks, merger, deepstack })
    }
}

/// The tower planned for so many patches, with the memory between its operators.
#[derive(Debug)]
pub(super) struct TowerBlock {
    config: VisionConfig,
    max_patches: usize,
    dtype: DType,
    patch_embed: Matmul,
    add_positions: EmbeddingBag,
    norm: LayerNorm,
    qkv_plan: Matmul,
    rope: Rope,
    attention: Attention,
    proj_plan: Matmul,
    /// With the activation, as `merge1_plan`.
    fc1_plan: Matmul,
    fc2_plan: Matmul,
    merged_norm: LayerNorm,
    merge1_plan: Matmul,
    merge2_plan: Matmul,
    /// `[patches, NEIGHBOURS]` u32 and f32.
    neighbours: Tensor,
    neighbour_weights: Tensor,
    ropes: RopeTables,
    /// `[patches]` u32, 0, 1, 2, …: where in `ropes` each patch's angles are.
    places: Tensor,
    /// `[patches, patch_len]`
    pixels: Tensor,
    /// The residual stream, without the last sublayer's output, which is in `projected`; `[patches, hidden]` as those
    /// up to `projected`.
    residual: Tensor,
    normed: Tensor,
    attended: Tensor,
    projected: Tensor,
    /// `[patches, 3 · hidden]`
    qkv: Tensor,
    /// `[patches, intermediate]`
    activated: Tensor,
    /// `[tokens, patches_per_token · hidden]`
    merged: Tensor,
    /// `[tokens, out_hidden]` each: the last merger's, then the others'.
    features: Vec<Tensor>,
}

impl TowerBlock {
    pub(super) fn new(
        stream: &Stream,
        config: &VisionConfig,
        dtype: DType,
        max_patches: usize,
    ) -> Result<Self, Error> {
        let &VisionConfig { hidden_size, heads, intermediate_size, out_hidden_size, activation, .. } = config;
        let (device, patches, per_token) = (stream.device(), max_patches, config.patches_per_token());
        let (tokens, merged, head_dim) = (patches / per_token, per_token * hidden_size, hidden_size / heads);
        let fused = |m, n, k, act| {
            let (out_dtype, bias, epilogue) = (dtype, Bias::PerColumn, Epilogue::of(act));
            Matmul::plan(
                device,
                MatmulProblem { out_dtype, bias, epilogue, ..MatmulProblem::new(m, n, k, dtype) },
            )
        };
        let matmul = |m, n, k| fused(m, n, k, Act::None);
        let norm = |rows, cols| LayerNorm::plan(device, LayerNormProblem { rows, cols, dtype, eps: EPS });
        let vocab = config.position_grid * config.position_grid;
        let (bag, cols, store) = (NEIGHBOURS, hidden_size, Store::Add);
        let positions = EmbeddingBagProblem { tokens: patches, bag, vocab, cols, dtype, store };
        let (rotary_dim, style) = (head_dim, RopeStyle::HalfSplit);
        let rope = RopeProblem { tokens: patches, heads, head_dim, rotary_dim, dtype, style };
        let empty = |shape: &[usize], dtype| Tensor::empty(stream, shape, dtype);
        let rows = |cols| empty(&[patches, cols], dtype);
        let pairs = head_dim / 2;
        // The device says first whether so many patches fit: what the host makes of them is smaller.
        let (pixels, activated) = (rows(config.patch_len())?, rows(intermediate_size)?);
        let (residual, normed, qkv) = (rows(hidden_size)?, rows(hidden_size)?, rows(3 * hidden_size)?);
        let (attended, projected) = (rows(hidden_size)?, rows(hidden_size)?);
        let places: Vec<u32> = (0..patches as u32).collect();
        Ok(TowerBlock {
            config: config.clone(),
            max_patches,
            dtype,
            patch_embed: matmul(patches, hidden_size, config.patch_len())?,
            add_positions: EmbeddingBag::plan(device, positions)?,
            norm: norm(patches, hidden_size)?,
            qkv_plan: matmul(patches, 3 * hidden_size, hidden_size)?,
            rope: Rope::plan(device, rope)?,
            attention: plan_attention(stream, config, dtype, patches)?,
            proj_plan: matmul(patches, hidden_size, hidden_size)?,
            fc1_plan: fused(patches, intermediate_size, hidden_size, Act::Of(activation))?,
            fc2_plan: matmul(patches, hidden_size, intermediate_size)?,
            merged_norm: norm(tokens, merged)?,
            merge1_plan: fused(tokens, merged, merged, Act::Of(Activation::GeluErf))?,
            merge2_plan: matmul(tokens, out_hidden_size, merged)?,
            neighbours: empty(&[patches, NEIGHBOURS], DType::U32)?,
            neighbour_weights: empty(&[patches, NEIGHBOURS], DType::F32)?,
            ropes: RopeTables::from_angles(stream, &vec![0.0; patches * pairs], pairs, 1.0)?,
            places: Tensor::from_slice(stream, &[patches], &places)?,
            pixels,
            residual,
            normed,
            attended,
            projected,
            qkv,
            activated,
            merged: empty(&[tokens, merged], dtype)?,
            features: (0..=config.deepstack_blocks.len())
                .map(|_| empty(&[tokens, out_hidden_size], dtype))
                .collect::<Result<_, _>>()?,
        })
    }

    /// What each operator chose, in the order in which they run.
    pub(super) fn reports(&self) -> Vec<OptimizationReport> {
        vec![
            self.patch_embed.optimization_report(),
            self.add_positions.optimization_report(),
            self.norm.optimization_report(),
            self.qkv_plan.optimization_report(),
            self.rope.optimization_report(),
            self.attention.optimization_report(),
            self.proj_plan.optimization_report(),
            self.fc1_plan.optimization_report(),
            self.fc2_plan.optimization_report(),
            self.merged_norm.optimization_report(),
            self.merge1_plan.optimization_report(),
            self.merge2_plan.optimization_report(),
        ]
    }

    /// The features of the last run: what takes the place of a prompt's tokens, then what decoder layers add.
    pub(super) fn features(&self) -> impl Iterator<Item = &Tensor> {
        self.features.iter()
    }

    /// An error if the tower cannot see these.
    pub(super) fn check(&self, visuals: &[Visual<'_>]) -> Result<(), Error> {
        let (merge, len) = (self.config.merge_size, self.config.patch_len());
        let mut patches = 0usize;
        for Visual { grid, patches: data } in visuals {
            let &PatchGrid { frames, rows, cols } = grid;
            let whole = rows.is_multiple_of(merge) && cols.is_multiple_of(merge);
            let size = frames.checked_mul(rows).and_then(|patches| patches.checked_mul(cols));
            let Some(size) = size.filter(|&size| whole && size > 0 && size <= self.max_patches) else {
                let most = self.max_patches;
                let expected = format!("rows and columns in multiples of {merge}, 1 to {most} patches");
                return Err(invalid("visuals", expected, format!("{frames} x {rows} x {cols}")));
            };
            if data.len() != size * len {
                let expected = format!("{len} numbers for each of {size} patches");
                return Err(invalid("visuals", expected, data.len().to_string()));
            }
            patches += size;
        }
        if patches > self.max_patches {
            let expected = format!("at most {} patches altogether", self.max_patches);
            return Err(invalid("visuals", expected, patches.to_string()));
        }
        Ok(())
    }

    /// Computes the features of checked images and videos.
    pub(super) fn run(
        &mut self,
        stream: &Stream,
        weights: &VisionTower,
        visuals: &[Visual<'_>],
    ) -> Result<(), Error> {
        let patches = self.upload(stream, visuals)?;
        let &VisionConfig { depth, .. } = &self.config;
        let all = 0..patches;
        weights.patch_embed.run(
            stream,
            &self.patch_embed,
            self.pixels.view().slice(0, all.clone())?,
            self.residual.view_mut().slice(0, all.clone())?,
        )?;
        let args = EmbeddingBagArgs {
            table: weights.positions.view(),
            ids: self.neighbours.view().slice(0, all.clone())?,
            weights: self.neighbour_weights.view().slice(0, all.clone())?,
            out: self.residual.view_mut().slice(0, all.clone())?,
        };
        self.add_positions.run(stream, args)?;
        for (index, block) in weights.blocks.iter().enumerate() {
            if index == 0 {
                let x = self.residual.view().slice(0, all.clone())?;
                block.norm1.run(
                    stream,
                    &self.norm,
                    x,
                    None,
                    self.normed.view_mut().slice(0, all.clone())?,
                )?;
            } else {
                self.norm_added(stream, &block.norm1, patches)?;
                self.deepstack(stream, weights, index - 1, patches)?;
            }
            self.attention(stream, block, visuals, patches)?;
            self.norm_added(stream, &block.norm2, patches)?;
            self.mlp(stream, block, patches)?;
        }
        self.norm_added(stream, &weights.merger.norm, patches)?;
        self.deepstack(stream, weights, depth - 1, patches)?;
        self.merge(stream, &weights.merger, 0, patches)
    }

    /// Uploads the patches, and where they are. Returns how many they are.
    fn upload(&mut self, stream: &Stream, visuals: &[Visual<'_>]) -> Result<usize, Error> {
        let &VisionConfig { hidden_size, heads, merge_size, position_grid, rope_theta, .. } = &self.config;
        let rotary_dim = hidden_size / heads;
        // Half of the frequencies turn with the row, half with the column.
        let freqs: Vec<f64> =
            (0..rotary_dim / 4).map(|i| rope_theta.powf(-2.0 * i as f64 / (rotary_dim / 2) as f64)).collect();
        let (mut ids, mut bag_weights, mut angles) = (Vec::new(), Vec::new(), Vec::new());
        let mut patches = 0;
        for visual in visuals {
            let first = patches;
            patches += visual.grid.patches();
            let bytes = encode(visual.patches, self.dtype);
            self.pixels.view_mut().slice(0, first..patches)?.write_bytes(stream, &bytes)?;
            for _ in 0..visual.grid.frames {
                for (row, col) in visual.grid.places(merge_size) {
                    for (id, weight) in visual.grid.neighbours(position_grid, (row, col)) {
                        ids.push(id);
                        bag_weights.push(weight);
                    }
                    for place in [row, col] {
                        angles.extend(freqs.iter().map(|freq| place as f64 * freq));
                    }
                }
            }
        }
        self.neighbours.view_mut().slice(0, 0..patches)?.write(stream, &ids)?;
        self.neighbour_weights.view_mut().slice(0, 0..patches)?.write(stream, &bag_weights)?;
        self.ropes.set_angles(stream, &angles, 1.0)?;
        Ok(patches)
    }

    /// `residual += projected; normed = norm(residual)`.
    fn norm_added(
        &mut self,
        stream: &Stream,
        weights: &LayerNormWeights,
        patches: usize,
    ) -> Result<(), Error> {
        let x = self.projected.view().slice(0, 0..patches)?;
        let residual = Some(self.residual.view_mut().slice(0, 0..patches)?);
        weights.run(stream, &self.norm, x, residual, self.normed.view_mut().slice(0, 0..patches)?)
    }

    /// From `normed` to `projected`; patches see those of their own frame.
    fn attention(
        &mut self,
        stream: &Stream,
        block: &VisionBlock,
        visuals: &[Visual<'_>],
        patches: usize,
    ) -> Result<(), Error> {
        let &VisionConfig { hidden_size, heads, .. } = &self.config;
        let head_dim = hidden_size / heads;
        let all = 0..patches;
        let mut qkv = self.qkv.view_mut().slice(0, all.clone())?;
        let normed = self.normed.view().slice(0, all.clone())?;
        block.qkv.run(stream, &self.qkv_plan, normed, qkv.reborrow())?;
        for part in 0..2 {
            let out = qkv.reborrow().slice(1, part * hidden_size..(part + 1) * hidden_size)?;
            let positions = self.places.view().slice(0, all.clone())?;
            let (x, tables) = (RopeInput::InPlace, &self.ropes);
            let out = out.reshape(&[patches, heads, head_dim])?;
            self.rope.run(stream, RopeArgs { x, positions, tables, out })?;
        }
        let mut first = 0;
        // Frames of one size that follow each other are a batch.
        for alike in visuals.chunk_by(|a, b| (a.grid.rows, a.grid.cols) == (b.grid.rows, b.grid.cols)) {
            let frames: usize = alike.iter().map(|visual| visual.grid.frames).sum();
            let size = alike[0].grid.rows * alike[0].grid.cols;
            let shape = [frames, size, heads, head_dim];
            let part = |part: usize| {
                let rows = qkv.as_view().slice(0, first..first + frames * size)?;
                rows.slice(1, part * hidden_size..(part + 1) * hidden_size)?.reshape(&shape)
            };
            let out = self.attended.view_mut().slice(0, first..first + frames * size)?.reshape(&shape)?;
            let (q, k, v) = (part(0)?, part(1)?, part(2)?);
            let (scores, page_table) = (ScoreTensors::default(), None);
            let args = AttentionArgs {
                q,
                k,
                v,
                kv_lens: None,
                kv_scales: KvScales::default(),
                out,
                lse: None,
                scores,
                offsets: Offsets::default(),
                page_table,
            };
            self.attention.run(stream, args)?;
            first += frames * size;
        }
        let attended = self.attended.view().slice(0, all.clone())?;
        block.proj.run(stream, &self.proj_plan, attended, self.projected.view_mut().slice(0, all)?)
    }

    /// From `normed` to `projected`.
    fn mlp(&mut self, stream: &Stream, block: &VisionBlock, patches: usize) -> Result<(), Error> {
        let all = 0..patches;
        let normed = self.normed.view().slice(0, all.clone())?;
        let mut activated = self.activated.view_mut().slice(0, all.clone())?;
        block.fc1.run(stream, &self.fc1_plan, normed, activated.reborrow())?;
        let out = self.projected.view_mut().slice(0, all)?;
        block.fc2.run(stream, &self.fc2_plan, activated.as_view(), out)
    }

    /// Features of the residual behind this block, if they are wanted; `projected` is used on the way.
    fn deepstack(
        &mut self,
        stream: &Stream,
        weights: &VisionTower,
        block: usize,
        patches: usize,
    ) -> Result<(), Error> {
        let Some(level) = self.config.deepstack_blocks.iter().position(|&of| of == block) else {
            return Ok(());
        };
        let shape = self.merged_shape(patches);
        let x = self.residual.view().slice(0, 0..patches)?.reshape(&shape)?;
        let out = self.projected.view_mut().slice(0, 0..patches)?.reshape(&shape)?;
        let merger = &weights.deepstack[level];
        merger.norm.run(stream, &self.merged_norm, x, None, out)?;
        let normed = self.projected.view().slice(0, 0..patches)?.reshape(&shape)?;
        let memory = [&mut self.merged, &mut self.features[1 + level]];
        merge(stream, [&self.merge1_plan, &self.merge2_plan], merger, normed, memory)
    }

    /// Features of `normed`, at this level.
    fn merge(
        &mut self,
        stream: &Stream,
        merger: &PatchMerger,
        level: usize,
        patches: usize,
    ) -> Result<(), Error> {
        let normed = self.normed.view().slice(0, 0..patches)?.reshape(&self.merged_shape(patches))?;
        let memory = [&mut self.merged, &mut self.features[level]];
        merge(stream, [&self.merge1_plan, &self.merge2_plan], merger, normed, memory)
    }

    /// Tokens, and the width of their patches together.
    fn merged_shape(&self, patches: usize) -> [usize; 2] {
        let per_token = self.config.patches_per_token();
        [patches / per_token, per_token * self.config.hidden_size]
    }
}

/// A merger's MLP; `memory` is for its inner activation and the result.
fn merge(
    stream: &Stream,
    [plan1, plan2]: [&Matmul; 2],
    weights: &PatchMerger,
    x: TensorView<'_>,
    memory: [&mut Tensor; 2],
) -> Result<(), Error> {
    let rows = 0..x.shape()[0];
    let [merged, out] = memory;
    let mut merged = merged.view_mut().slice(0, rows.clone())?;
    weights.fc1.run(stream, plan1, x, merged.reborrow())?;
    weights.fc2.run(stream, plan2, merged.as_view(), out.view_mut().slice(0, rows)?)
}

/// Attention within frames of any size and number, `patches` altogether.
///
/// The kernel is the one for the largest frame, for small ones too: those for few queries have a workspace for the most
/// frames of the largest size.
fn plan_attention(
    stream: &Stream,
    config: &VisionConfig,
    dtype: DType,
    patches: usize,
) -> Result<Attention, Error> {
    let (device, heads) = (stream.device(), config.heads);
    let problem = AttentionProblem {
        batch: patches / config.patches_per_token(),
        seq_q: patches,
        seq_kv: patches,
        heads_q: heads,
        heads_kv: heads,
        head_dim: config.hidden_size / heads,
        head_dim_v: config.hidden_size / heads,
        dtype,
        dtype_kv: dtype,
        scale: None,
        mask: Mask::None,
        window: None,
        scores: Scores::default(),
        page_size: None,
    };
    match device.limits() {
        Some(limits) => {
            let many = patches.max(attention::MAX_TENSOR_DECODE_QUERIES + 1);
            let choice = attention::select(&limits, &problem, many)?;
            Attention::plan_with(device, problem, choice.variant)
        }
        None => Attention::plan(device, problem),
    }
}
