//! Images and videos: from pixels to rows of a prompt.
//!
//! [`VisionConfig::resize`] and [`VisionConfig::patches`] cut images into patches. The tower turns patches into
//! features, four of them into one, and the features take the place of a prompt's placeholder tokens; further ones are
//! added after the first layers of the decoder. [`super::Session::prefill_visual`] does all of it.
//!
//! Source: Bai et al., *Qwen3-VL Technical Report* (2025), and its model class in Hugging Face transformers.

mod pixels;
mod positions;
mod resize;
mod tower;

pub use tower::{LayerNormWeights, PatchMerger, VisionBlock, VisionTower};

use std::ops::Range;

use abi::DType;

use super::config::{DecoderConfig, VisionConfig};
use host::Error;
use host::Stream;
use host::ops::Store;
use host::ops::rope::RopeTables;
use host::ops::scatter_rows::{ScatterRows, ScatterRowsArgs, ScatterRowsProblem};
use host::{Kernel, OptimizationReport};
use host::{Tensor, TensorView, TensorViewMut};
pub(super) use positions::PromptPositions;
use positions::angles;
use tower::TowerBlock;

const OP: &str = "Session";

/// How many patches an image or a video has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchGrid {
    /// In time: 1 for an image.
    pub frames: usize,
    /// From top to bottom; a multiple of [`VisionConfig::merge_size`].
    pub rows: usize,
    /// From left to right; a multiple of it too.
    pub cols: usize,
}

impl PatchGrid {
    /// All of them.
    pub fn patches(&self) -> usize {
        self.frames * self.rows * self.cols
    }
}

/// An image or a video of a prompt, cut into patches.
#[derive(Clone, Copy, Debug)]
pub struct Visual<'a> {
    /// How many patches.
    pub grid: PatchGrid,
    /// `[patches, patch_len]` in the order of [`VisionConfig::patches`].
    pub patches: &'a [f32],
}

/// What a session or a batch has for images: the tower planned for the most patches, and what puts its features into a
/// prompt.
#[derive(Debug)]
pub(super) struct VisualInputs {
    config: VisionConfig,
    tower: TowerBlock,
    /// Frequencies of the decoder's rotary embedding, and the factor on cos and sin.
    inv_freq: Vec<f64>,
    attention_factor: f64,
    /// Angles of the tokens of a chunk.
    ropes: RopeTables,
    /// `[chunk]` u32, 0, 1, 2, …: where in `ropes` each token's angles are.
    places: Tensor,
    /// `[chunk]` u32: the chunk's rows that get features.
    rows: Tensor,
    replace: ScatterRows,
    add: ScatterRows,
}

impl VisualInputs {
    /// For up to `max_patches` patches a prompt, and chunks of so many tokens.
    pub(super) fn new(
        stream: &Stream,
        (vision, decoder): (&VisionConfig, &DecoderConfig),
        dtype: DType,
        max_patches: usize,
        chunk: usize,
    ) -> Result<Self, Error> {
        let tower = TowerBlock::new(stream, vision, dtype, max_patches)?;
        let inv_freq = decoder.rope.inv_freq()?;
        let scatter = |store| {
            let rows = chunk.min(max_patches / vision.patches_per_token());
            let cols = decoder.hidden_size;
            ScatterRows::plan(stream.device(), ScatterRowsProblem { rows, cols, dtype, store })
        };
        let places: Vec<u32> = (0..chunk as u32).collect();
        Ok(VisualInputs {
            config: vision.clone(),
            tower,
            ropes: RopeTables::from_angles(stream, &vec![0.0; chunk * inv_freq.len()], inv_freq.len(), 1.0)?,
            attention_factor: decoder.rope.attention_factor(),
            inv_freq,
            places: Tensor::from_slice(stream, &[chunk], &places)?,
            rows: Tensor::empty(stream, &[chunk], DType::U32)?,
            replace: scatter(Store::Replace)?,
            add: scatter(Store::Add)?,
        })
    }

    /// What each operator chose, in the order in which they run.
    pub(super) fn reports(&self) -> Vec<OptimizationReport> {
        let mut reports = self.tower.reports();
        reports.extend([self.replace.optimization_report(), self.add.optimization_report()]);
        reports
    }

    /// Checks a prompt, and says where its tokens are. It begins after `len` tokens, the next of which would be at
    /// `len − shift`.
    pub(super) fn place(
        &self,
        ids: &[u32],
        visuals: &[Visual<'_>],
        (len, shift): (usize, usize),
    ) -> Result<PromptPositions, Error> {
        self.tower.check(visuals)?;
        PromptPositions::new(&self.config, ids, visuals, (len, shift))
    }

    /// Computes the features of images and videos that were checked by [`Self::place`].
    pub(super) fn encode(
        &mut self,
        stream: &Stream,
        weights: &VisionTower,
        visuals: &[Visual<'_>],
    ) -> Result<(), Error> {
        self.tower.run(stream, weights, visuals)
    }

    /// For a step whose rows are at these times, rows and columns, and of which these get these features.
    pub(super) fn rows_of(
        &mut self,
        stream: &Stream,
        axes: &[[usize; 3]],
        (rows, features): (&[u32], Range<usize>),
    ) -> Result<VisualRows<'_>, Error> {
        let angles = angles(axes, &self.inv_freq, self.config.mrope_section);
        self.ropes.set_angles(stream, &angles, self.attention_factor)?;
        self.rows.view_mut().slice(0, 0..rows.len())?.write(stream, rows)?;
        let views = self.tower.features().map(|level| level.view().slice(0, features.clone()));
        Ok(VisualRows {
            ropes: &self.ropes,
            positions: self.places.view().slice(0, 0..axes.len())?,
            rows: self.rows.view().slice(0, 0..rows.len())?,
            features: views.collect::<Result<_, _>>()?,
            replace: &self.replace,
            add: &self.add,
        })
    }
}

/// What a chunk of a prompt with images is run with.
#[derive(Debug)]
pub(super) struct VisualRows<'a> {
    pub(super) ropes: &'a RopeTables,
    /// `[tokens]` u32: rows of `ropes`.
    pub(super) positions: TensorView<'a>,
    /// `[visual tokens]` u32: their rows in the chunk.
    rows: TensorView<'a>,
    /// Of the visual tokens, `[visual tokens, hidden]` each: what takes their place, then what layer after layer adds.
    features: Vec<TensorView<'a>>,
    replace: &'a ScatterRows,
    add: &'a ScatterRows,
}

impl VisualRows<'_> {
    /// Puts the features into the places of their tokens.
    pub(super) fn replace(&self, stream: &Stream, out: TensorViewMut<'_>) -> Result<(), Error> {
        match self.features.first() {
            Some(&x) => self.replace.run(stream, ScatterRowsArgs { x, ids: self.rows, out }),
            None => Ok(()),
        }
    }

    /// Adds the features that are for the output of this layer, if there are such.
    pub(super) fn add(&self, stream: &Stream, layer: usize, out: TensorViewMut<'_>) -> Result<(), Error> {
        match self.features.get(1 + layer) {
            Some(&x) => self.add.run(stream, ScatterRowsArgs { x, ids: self.rows, out }),
            None => Ok(()),
        }
    }
}

fn invalid(argument: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Error {
    Error::invalid(OP, argument, expected, got)
}
