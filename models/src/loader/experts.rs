//! Experts that stay quantised.

use super::{Loader, Quantise, can_be_cut, part_of, tell};
use crate::TensorProblem;
use crate::checkpoint::{Checkpoint, Data, Stored};
use crate::part::Cut;
use crate::quant::{Packable, of_tensor};
use host::Error;
use host::weight::{Layout, Quantised, RowScales, ScaleType, Stack, Weight, WeightSource};

type Source<'a> = Box<dyn WeightSource + 'a>;

/// Where the matrices of experts are: a tensor for each part of each expert, or one for all.
struct Places<'a, 'n> {
    checkpoint: &'a Checkpoint,
    names: &'n [Vec<String>],
    /// Experts that share a tensor.
    fused: Option<usize>,
    /// Rows and columns of a part in the files.
    size: [usize; 2],
    /// What is taken of each part.
    rows: Vec<Cut>,
    cols: &'n Cut,
    quantise: Quantise,
}

impl<'a> Places<'a, '_> {
    fn unusable(&self, problem: TensorProblem) -> Error {
        self.checkpoint.unusable(1, vec![problem]).into()
    }

    /// The tensor that holds a part of an expert, its name, and the part's first row in it.
    fn tensor(&self, expert: usize, part: usize) -> Result<(&str, Data<'a>, usize), Error> {
        let [rows, cols] = self.size;
        let (name, shape, first) = match self.fused {
            Some(experts) => (&self.names[0][part], vec![experts, rows, cols], expert * rows),
            None => (&self.names[expert][part], vec![rows, cols], 0),
        };
        let Stored { data, .. } =
            self.checkpoint.tensor(name, &shape).map_err(|problem| self.unusable(problem))?;
        Ok((name, data, first))
    }

    /// The part's matrix of a file, if that is quantised so that it can be packed.
    fn packable(&self, data: Data<'a>, first: usize) -> Option<Packable<'a>> {
        let Data::Quantised(matrix) = data else { return None };
        let [rows, _] = self.size;
        if matrix.n() == rows {
            return Packable::new(matrix);
        }
        // Blocks of rows would begin elsewhere.
        let own = (first..first + rows).map(u32::try_from).collect::<Result<_, _>>().ok()?;
        (matrix.block_n() == 1).then(|| Packable::new(matrix.with_rows(own)))?
    }

    /// How a part of an expert is packed; none if it cannot be.
    fn layout(&self, expert: usize, part: usize) -> Result<Option<Layout>, Error> {
        let (_, data, first) = self.tensor(expert, part)?;
        Ok(match self.quantise.scheme(&data) {
            Some(scheme) => {
                let layout = scheme.layout();
                can_be_cut(&layout, &self.rows[part], self.cols).then_some(layout)
            }
            None => {
                let source = self.packable(data, first);
                let source = source.and_then(|source| part_of(Box::new(source), &self.rows[part], self.cols));
                source.map(|source| source.layout()).filter(|layout| !layout.permuted)
            }
        })
    }

    /// A part of an expert, of which [`Self::layout`] has found one.
    fn source(&self, expert: usize, part: usize) -> Result<Source<'a>, Error> {
        let (name, data, first) = self.tensor(expert, part)?;
        let unfit = |expected: &str, got: String| {
            self.unusable(TensorProblem::Unfit { name: name.into(), expected: expected.into(), got })
        };
        let source: Source<'a> = match self.quantise.scheme(&data) {
            Some(scheme) => {
                let read = move |row: usize, values: &mut [f32]| data.floats(first + row, values);
                Box::new(Quantised::new(self.size, scheme, read).map_err(of_tensor(name))?)
            }
            None => {
                let source = self.packable(data, first);
                let source = source.ok_or_else(|| unfit("a layout that can be packed", "another".into()))?;
                if let Some(got) = source.unsound() {
                    return Err(unfit("finite scales", got));
                }
                Box::new(source)
            }
        };
        let cut = part_of(source, &self.rows[part], self.cols);
        let source = cut.ok_or_else(|| unfit("a layout that can be cut there", "another".into()))?;
        let blocks = source.layout().rows as usize;
        let [rows, _] = source.size();
        Ok(if rows.is_multiple_of(blocks) { source } else { Box::new(RowScales(source)) })
    }
}

impl<'a> Loader<'a> {
    /// The experts' matrices packed, in one weight, or one for each part where the parts differ; none if they cannot
    /// be. Sources are made one expert at a time.
    pub(super) fn packed_experts(
        &mut self,
        checkpoint: &'a Checkpoint,
        (names, is_fused): (&[Vec<String>], bool),
        own: &Cut,
        [rows, cols]: [&Cut; 2],
    ) -> Result<Option<Vec<Weight>>, Error> {
        let parts = names.first().map_or(0, Vec::len);
        let experts: Vec<usize> = own.ranges.iter().cloned().flatten().collect();
        let (Some(&first_expert), true) = (experts.first(), parts > 0) else { return Ok(None) };
        let (quantise, size) = (self.quantise, [rows.of / parts, cols.of]);
        let own_rows: Vec<Cut> = (0..parts).map(|part| rows.within(parts, part)).collect();
        let of_part = rows.len() / parts;
        let fused = is_fused.then_some(own.of);
        let places = Places { checkpoint, names, fused, size, rows: own_rows, cols, quantise };
        let mut layouts = Vec::new();
        for part in 0..parts {
            let Some(layout) = places.layout(first_expert, part)? else { return Ok(None) };
            for &expert in &experts[1..] {
                if places.layout(expert, part)? != Some(layout) {
                    return Ok(None);
                }
            }
            layouts.push(layout);
        }
        // Global scales differ from part to part.
        let alike = layouts.iter().all(|layout| *layout == layouts[0] && layout.scale != ScaleType::E4m3);
        let together = if alike { parts } else { 1 };
        let Loader { stream, dtype, loaded_bytes, total_bytes, progress, .. } = self;
        let mut weights = Vec::new();
        for first in (0..parts).step_by(together) {
            let bytes = (together * of_part * cols.len() * dtype.bytes()) as u64;
            let weight = Weight::pack_experts(stream, experts.len(), |index| {
                let sources = (first..first + together).map(|part| places.source(experts[index], part));
                let stack = Stack::new(sources.collect::<Result<Vec<_>, Error>>()?);
                // Counted as the matrices that they stand for, as in the total.
                *loaded_bytes += bytes;
                tell(progress, *loaded_bytes, *total_bytes)?;
                let alike = "parts of one layout and global scale";
                stack.ok_or_else(|| Error::invalid("Model", "experts", alike, "others"))
            })?;
            weights.push(weight);
        }
        Ok(Some(weights))
    }
}
