//! Images and videos of a batch's prompts.

use std::ops::Range;
use std::sync::{Arc, Weak};

use super::{BatchError, OP, SequenceId};
use crate::vision::{PatchGrid, PromptPositions, VisionTower, Visual, VisualInputs, VisualRows};
use host::{Error, Stream};

/// An image or a video of a prompt, cut into patches, as [`Visual`] has them. Cheap to clone.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptVisual {
    /// How many patches.
    pub grid: PatchGrid,
    /// `[patches, patch_len]` in the order of [`VisionConfig::patches`](crate::VisionConfig::patches).
    pub patches: Arc<[f32]>,
}

impl PromptVisual {
    fn view(&self) -> Visual<'_> {
        Visual { grid: self.grid, patches: &self.patches }
    }
}

/// What a sequence has of the images of its prompt.
#[derive(Debug)]
pub(super) struct SequenceVisual {
    positions: PromptPositions,
    visuals: Vec<PromptVisual>,
}

impl SequenceVisual {
    /// The position of a token of text. An image has more tokens than it takes positions.
    fn position(&self, token: usize) -> usize {
        token - self.positions.shift(token)
    }

    /// Time, row and column of a token.
    fn axes(&self, token: usize) -> [usize; 3] {
        let own = self.positions.axes().get(token).filter(|_| token < self.end());
        own.copied().unwrap_or([self.position(token); 3])
    }

    /// The first token that stands for a part of an image.
    fn first(&self) -> usize {
        self.positions.visual_tokens().first().copied().unwrap_or(0)
    }

    /// Behind the last one.
    pub(super) fn end(&self) -> usize {
        self.positions.visual_tokens().last().map_or(0, |last| last + 1)
    }

    /// Whether some of these tokens stand for parts of images.
    fn is_in(&self, tokens: Range<usize>) -> bool {
        !self.positions.features(tokens).is_empty()
    }
}

impl super::Sequence {
    /// Whether some of its tokens `computed..computed + tokens` stand for parts of images.
    pub(super) fn sees(&self, tokens: usize) -> bool {
        let range = self.computed..self.computed + tokens;
        self.visual.as_ref().is_some_and(|visual| visual.is_in(range))
    }

    /// The position of a token, as one of text.
    pub(super) fn position(&self, token: usize) -> usize {
        self.visual.as_ref().map_or(token, |visual| visual.position(token))
    }

    /// Time, row and column of a token.
    pub(super) fn axes(&self, token: usize) -> [usize; 3] {
        self.visual.as_ref().map_or([token; 3], |visual| visual.axes(token))
    }

    /// How many of its first tokens are the same for all sequences with these tokens: those before its first image.
    pub(super) fn plain_tokens(&self) -> usize {
        self.visual.as_ref().map_or(usize::MAX, |visual| visual.first())
    }
}

/// The images of a step: of one sequence.
#[derive(Clone, Debug, Default)]
pub(super) struct StepVisual {
    /// Rows of the step that stand for parts of images, and the features that go there.
    pub(super) rows: Vec<u32>,
    pub(super) features: Range<usize>,
    /// Time, row and column of each row.
    pub(super) axes: Vec<[usize; 3]>,
}

impl StepVisual {
    /// Tokens of a sequence that are the step's rows from `row` on.
    pub(super) fn put(&mut self, visual: &SequenceVisual, tokens: Range<usize>, row: usize) {
        self.features = visual.positions.features(tokens.clone());
        let of_step = &visual.positions.visual_tokens()[self.features.clone()];
        self.rows.extend(of_step.iter().map(|token| (token - tokens.start + row) as u32));
    }
}

/// The tower of a batch, and whose features it has.
#[derive(Debug)]
pub(super) struct BatchVisual {
    inputs: VisualInputs,
    encoded: Weak<SequenceVisual>,
}

impl BatchVisual {
    pub(super) fn new(inputs: VisualInputs) -> Self {
        BatchVisual { inputs, encoded: Weak::new() }
    }

    /// Where the tokens of a prompt are.
    ///
    /// **Errors**: [`Error::Invalid`] for placeholders and images that do not fit each other, or are too many.
    pub(super) fn place(&self, ids: &[u32], visuals: &[PromptVisual]) -> Result<PromptPositions, Error> {
        let views: Vec<Visual<'_>> = visuals.iter().map(PromptVisual::view).collect();
        self.inputs.place(ids, &views, (0, 0)).map_err(|error| match error {
            Error::Invalid { argument, expected, got, .. } => Error::invalid(OP, argument, expected, got),
            other => other,
        })
    }

    /// What a sequence with this prompt has of its images.
    pub(super) fn of_prompt(
        &self,
        ids: &[u32],
        visuals: Vec<PromptVisual>,
    ) -> Result<Arc<SequenceVisual>, Error> {
        Ok(Arc::new(SequenceVisual { positions: self.place(ids, &visuals)?, visuals }))
    }

    /// What a step is run with that computes such tokens: the tower runs unless it has the features already.
    pub(super) fn rows_of(
        &mut self,
        stream: &Stream,
        tower: &VisionTower,
        (visual, step): (&Arc<SequenceVisual>, &StepVisual),
    ) -> Result<VisualRows<'_>, Error> {
        if !std::ptr::eq(self.encoded.as_ptr(), Arc::as_ptr(visual)) {
            // Of nobody, if this fails.
            self.encoded = Weak::new();
            let views: Vec<Visual<'_>> = visual.visuals.iter().map(PromptVisual::view).collect();
            self.inputs.encode(stream, tower, &views)?;
            self.encoded = Arc::downgrade(visual);
        }
        self.inputs.rows_of(stream, &step.axes, (&step.rows, step.features.clone()))
    }
}

/// **Errors**: [`BatchError::Images`] for a sequence whose images would be cut.
pub(super) fn check_cut(
    id: SequenceId,
    visual: Option<&Arc<SequenceVisual>>,
    tokens: usize,
) -> Result<(), BatchError> {
    match visual.map(|visual| visual.end()).filter(|&end| tokens < end) {
        Some(images) => Err(BatchError::Images { id, tokens, images }),
        None => Ok(()),
    }
}
