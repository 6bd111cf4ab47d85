//! Where patches and tokens are: the tower's positions on the grid of an image, and the decoder's in time, row and
//! column.

use std::ops::Range;

use super::{PatchGrid, Visual, invalid};
use crate::config::VisionConfig;
use host::Error;

impl PatchGrid {
    /// Row and column of each patch of a frame: the patches that become one token follow each other, `merge` rows of
    /// `merge`.
    pub(super) fn places(&self, merge: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let Self { rows, cols, .. } = *self;
        (0..rows / merge).flat_map(move |block_row| {
            (0..cols / merge).flat_map(move |block_col| {
                (0..merge * merge)
                    .map(move |patch| (block_row * merge + patch / merge, block_col * merge + patch % merge))
            })
        })
    }

    /// Rows of a table of `side · side` learned positions, and their weights, for a patch: between its four neighbours,
    /// with the corners of the grid on those of the table.
    pub(super) fn neighbours(&self, side: usize, (row, col): (usize, usize)) -> [(u32, f32); 4] {
        let along = |place: usize, len: usize| {
            let at = (place * (side - 1)) as f64 / (len - 1).max(1) as f64;
            let low = at.floor() as usize;
            (low, (low + 1).min(side - 1), (at - at.floor()) as f32)
        };
        let (top, bottom, down) = along(row, self.rows);
        let (left, right, across) = along(col, self.cols);
        [
            ((top * side + left) as u32, (1.0 - down) * (1.0 - across)),
            ((top * side + right) as u32, (1.0 - down) * across),
            ((bottom * side + left) as u32, down * (1.0 - across)),
            ((bottom * side + right) as u32, down * across),
        ]
    }
}

/// Where the tokens of a prompt are, and which of them stand for images.
#[derive(Debug)]
pub(crate) struct PromptPositions {
    /// Time, row and column of each token.
    axes: Vec<[usize; 3]>,
    /// Tokens in whose place features go, ascending; as many as there are features.
    visual_tokens: Vec<usize>,
    /// Tokens of the sequence, those before the prompt included, from which on positions are behind them by so much.
    shifts: Vec<(usize, usize)>,
}

impl PromptPositions {
    /// Of a prompt after `len` tokens, whose first is at position `len − shift`.
    ///
    /// A token of text is at the next position on all axes. Those of an image or a frame are all at that time, and
    /// their rows and columns count from it; what follows is beyond the largest of them.
    pub(super) fn new(
        config: &VisionConfig,
        ids: &[u32],
        visuals: &[Visual<'_>],
        (len, shift): (usize, usize),
    ) -> Result<Self, Error> {
        let is_visual = |id: u32| id == config.image_token || id == config.video_token;
        let mut frames = visuals.iter().flat_map(|visual| {
            let PatchGrid { frames, rows, cols } = visual.grid;
            (0..frames).map(move |_| (rows / config.merge_size, cols / config.merge_size))
        });
        let (mut axes, mut visual_tokens, mut shifts) =
            (Vec::with_capacity(ids.len()), Vec::new(), Vec::new());
        let mut next = len - shift;
        while axes.len() < ids.len() {
            let token = axes.len();
            if !is_visual(ids[token]) {
                axes.push([next; 3]);
                next += 1;
                continue;
            }
            let Some((rows, cols)) = frames.next() else {
                let got = format!("another placeholder at token {token}");
                return Err(invalid("visuals", "an image or frame for each run of placeholders", got));
            };
            let tokens = rows * cols;
            let run = ids[token..].iter().take(tokens).take_while(|&&id| id == ids[token]).count();
            if run < tokens {
                let expected = format!("{tokens} placeholders for {rows} rows of {cols} at token {token}");
                return Err(invalid("ids", expected, run.to_string()));
            }
            axes.extend((0..tokens).map(|place| [next, next + place / cols, next + place % cols]));
            visual_tokens.extend(token..token + tokens);
            next += rows.max(cols);
            shifts.push((len + axes.len(), len + axes.len() - next));
        }
        match frames.count() {
            0 => Ok(PromptPositions { axes, visual_tokens, shifts }),
            left => Err(invalid("ids", "placeholders for every image and frame", format!("{left} without"))),
        }
    }

    /// Time, row and column of each token.
    pub(crate) fn axes(&self) -> &[[usize; 3]] {
        &self.axes
    }

    /// By how much the position of a token of text is behind its number in the sequence.
    pub(crate) fn shift(&self, token: usize) -> usize {
        let behind = self.shifts.partition_point(|&(from, _)| from <= token);
        behind.checked_sub(1).map_or(0, |last| self.shifts[last].1)
    }

    /// Tokens in whose place features go, ascending.
    pub(crate) fn visual_tokens(&self) -> &[usize] {
        &self.visual_tokens
    }

    /// Tokens of the sequence, among these, from which on positions are behind their numbers, and by how much.
    pub(crate) fn shifts(&self, tokens: Range<usize>) -> impl Iterator<Item = (usize, usize)> {
        self.shifts.iter().copied().filter(move |(from, _)| tokens.contains(from))
    }

    /// The features that go into these tokens' places.
    pub(crate) fn features(&self, tokens: Range<usize>) -> Range<usize> {
        let before = |token: usize| self.visual_tokens.partition_point(|&visual| visual < token);
        before(tokens.start)..before(tokens.end)
    }
}

/// The angles of tokens at these times, rows and columns, `[tokens, frequencies]`: the frequencies are dealt to time,
/// row and column in turn until rows and columns have their number; time has the others.
pub(super) fn angles(axes: &[[usize; 3]], inv_freq: &[f64], [_, rows, cols]: [usize; 3]) -> Vec<f64> {
    let axis = |pair: usize| match pair % 3 {
        1 if pair < 3 * rows => 1,
        2 if pair < 3 * cols => 2,
        _ => 0,
    };
    let turns: Vec<(usize, f64)> =
        inv_freq.iter().enumerate().map(|(pair, &freq)| (axis(pair), freq)).collect();
    let of_token = |at: &[usize; 3]| turns.iter().map(|&(axis, freq)| at[axis] as f64 * freq).collect();
    axes.iter().flat_map::<Vec<f64>, _>(of_token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> VisionConfig {
        let text = r#"{"model_type": "qwen3_vl", "text_config": {"hidden_size": 3584}, "vision_config": {},
            "image_token_id": 7, "video_token_id": 8}"#;
        let config = crate::ModelConfig::from_json(text, std::path::Path::new("config.json"));
        config.unwrap().vision.unwrap()
    }

    fn visual(frames: usize, rows: usize, cols: usize) -> Visual<'static> {
        Visual { grid: PatchGrid { frames, rows, cols }, patches: &[] }
    }

    fn positions(ids: &[u32], visuals: &[Visual<'_>], start: (usize, usize)) -> PromptPositions {
        PromptPositions::new(&config(), ids, visuals, start).unwrap()
    }

    fn axis(positions: &PromptPositions, axis: usize) -> Vec<usize> {
        positions.axes.iter().map(|at| at[axis]).collect()
    }

    #[test]
    fn patches_of_a_token_follow_each_other() {
        let places: Vec<_> = PatchGrid { frames: 1, rows: 4, cols: 4 }.places(2).collect();
        let first = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 0)];
        assert_eq!(places[..9], first);
        assert_eq!((places.len(), places[15]), (16, (3, 3)));
    }

    #[test]
    fn corners_of_the_grid_are_those_of_the_table() {
        let grid = PatchGrid { frames: 1, rows: 3, cols: 6 };
        let weight_of = |at, id: u32| -> f32 {
            grid.neighbours(8, at).iter().filter(|(of, _)| *of == id).map(|(_, weight)| weight).sum()
        };
        for (at, id) in [((0, 0), 0), ((0, 5), 7), ((2, 0), 56), ((2, 5), 63)] {
            assert_eq!(weight_of(at, id), 1.0, "{at:?}");
        }
        // Row 1 of 3 is at 3.5, column 2 of 6 at 2.8.
        let middle = grid.neighbours(8, (1, 2));
        assert_eq!(middle.map(|(id, _)| id), [26, 27, 34, 35]);
        for ((_, weight), want) in std::iter::zip(middle, [0.1, 0.4, 0.1, 0.4]) {
            assert!((weight - want).abs() < 1e-6, "{weight} {want}");
        }
        // A single row or column is at the table's first.
        assert_eq!(PatchGrid { frames: 1, rows: 1, cols: 1 }.neighbours(8, (0, 0))[0], (0, 1.0));
    }

    /// The example of two tokens, an image between its marks, and a token.
    #[test]
    fn an_image_between_text() {
        let ids = [1, 2, 5, 7, 7, 7, 7, 7, 7, 6, 3];
        let positions = positions(&ids, &[visual(1, 4, 6)], (0, 0));
        assert_eq!(axis(&positions, 0), [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7]);
        assert_eq!(axis(&positions, 1), [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7]);
        assert_eq!(axis(&positions, 2), [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]);
        assert_eq!(positions.visual_tokens(), [3, 4, 5, 6, 7, 8]);
        // The eleventh token is at 8, three behind.
        assert_eq!(positions.shifts, [(9, 3)]);
        assert_eq!([8, 9, 20].map(|token| positions.shift(token)), [0, 3, 3]);
        assert_eq!((positions.features(0..5), positions.features(5..11)), (0..2, 2..6));
    }

    /// Frames of a video are images one after another; a later prompt goes on where the last one ended.
    #[test]
    fn frames_and_a_second_prompt() {
        let ids = [5, 8, 8, 6, 9, 5, 8, 8, 6];
        let positions = positions(&ids, &[visual(2, 2, 4)], (10, 4));
        assert_eq!(axis(&positions, 0), [6, 7, 7, 9, 10, 11, 12, 12, 14]);
        assert_eq!(axis(&positions, 1), [6, 7, 7, 9, 10, 11, 12, 12, 14]);
        assert_eq!(axis(&positions, 2), [6, 7, 8, 9, 10, 11, 12, 13, 14]);
        assert_eq!(positions.shifts, [(13, 4), (18, 4)]);
    }

    #[test]
    fn frequencies_are_dealt_in_turn() {
        let positions = positions(&[7; 6], &[visual(1, 4, 6)], (100, 0));
        // The last token is at time 100, row 101, column 102.
        let angles = |freqs: &[f64], section| super::angles(&positions.axes()[5..6], freqs, section);
        let got = angles(&[1.0; 16], [6, 5, 5]);
        let mut want = [100.0, 101.0, 102.0].repeat(5);
        want.push(100.0);
        assert_eq!(got, want);
        let got = angles(&[1.0; 8], [5, 2, 1]);
        assert_eq!(got, [100.0, 101.0, 102.0, 100.0, 101.0, 100.0, 100.0, 100.0]);
    }

    #[test]
    fn placeholders_must_fit_the_images() {
        let message = |ids: &[u32], visuals: &[Visual<'_>]| {
            PromptPositions::new(&config(), ids, visuals, (0, 0)).unwrap_err().to_string()
        };
        assert_eq!(
            message(&[1, 7, 7, 2], &[visual(1, 4, 2), visual(1, 2, 2)]),
            "Session: ids: expected placeholders for every image and frame, got 1 without"
        );
        assert_eq!(
            message(&[1, 7, 7, 2], &[visual(1, 4, 4)]),
            "Session: ids: expected 4 placeholders for 2 rows of 2 at token 1, got 2"
        );
        assert_eq!(
            message(&[1, 7, 7, 2], &[visual(1, 2, 2)]),
            "Session: visuals: expected an image or frame for each run of placeholders, got another placeholder at token 2"
        );
    }
}
