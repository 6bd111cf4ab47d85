//! Weights that are loaded as they are quantised, or quantised as they are loaded.

use std::ops::Range;

use abi::DType;

use super::{BUFFER_ELEMS, Loader, Quantise, Source, height, part_of, tell};
use crate::TensorProblem;
use crate::checkpoint::{Data, Stored};
use crate::layers::ProjectionWeight;
use crate::part::Cut;
use crate::quant::{Packable, of_tensor};
use host::weight::{Codes, Layout, Quantised, ScaleType, Weight, WeightSource};
use host::{Constant, Error, Tensor};

impl<'a> Loader<'a> {
    /// The sources of packed weights, if all parts can be packed; while it is only checked what is there, none.
    pub(super) fn packable(
        &self,
        parts: &[(String, Cut)],
        cols: &Cut,
        quantise: Quantise,
    ) -> Result<Option<Vec<Box<dyn WeightSource + 'a>>>, Error> {
        let &Source::Checkpoint(checkpoint) = &self.source else { return Ok(None) };
        if quantise == Quantise::Dense || height(parts) * cols.len() == 0 {
            return Ok(None);
        }
        let unusable = |problem| checkpoint.unusable(1, vec![problem]);
        let stored = |name: &str, rows: &Cut| checkpoint.tensor(name, &[rows.of, cols.of]).map_err(unusable);
        let global = match quantise.of_projections() {
            Some(scheme) if scheme.scale == ScaleType::E4m3 => {
                let own = |(name, rows): &(String, Cut)| {
                    let Stored { data, .. } = stored(name, rows)?;
                    let read = move |row: usize, values: &mut [f32]| data.floats(row, values);
                    let own = Quantised::new([rows.of, cols.of], scheme, read).map_err(of_tensor(name))?;
                    Ok::<_, Error>(own.global())
                };
                // One factor for all of them, so that they are one product.
                let globals = parts.iter().map(own).collect::<Result<Vec<f32>, _>>()?;
                globals.into_iter().reduce(f32::max)
            }
            _ => None,
        };
        let mut sources: Vec<Box<dyn WeightSource + 'a>> = Vec::new();
        for (name, rows) in parts {
            let Stored { data, .. } = stored(name, rows)?;
            let unfit = |got| {
                let expected = "finite scales".to_owned();
                unusable(TensorProblem::Unfit { name: name.clone(), expected, got })
            };
            let source: Box<dyn WeightSource + 'a> = match (quantise.scheme(&data), data) {
                (Some(scheme), data) => {
                    let read = move |row: usize, values: &mut [f32]| data.floats(row, values);
                    Box::new(
                        Quantised::with_global([rows.of, cols.of], scheme, read, global)
                            .map_err(of_tensor(name))?,
                    )
                }
                (None, Data::Quantised(matrix)) => {
                    let Some(source) = Packable::new(matrix) else { return Ok(None) };
                    if let Some(got) = source.unsound() {
                        return Err(unfit(got).into());
                    }
                    Box::new(source)
                }
                (None, Data::Rows { parts, order, .. }) => {
                    let Some(runs) = quantised_runs(&parts, &order, rows) else { return Ok(None) };
                    for (source, rows) in runs {
                        if let Some(got) = source.unsound() {
                            return Err(unfit(got).into());
                        }
                        let Some(own) = part_of(Box::new(source), &rows, cols) else { return Ok(None) };
                        sources.push(own);
                    }
                    continue;
                }
                (None, _) => return Ok(None),
            };
            let Some(source) = part_of(source, rows, cols) else { return Ok(None) };
            sources.push(source);
        }
        Ok(Some(sources))
    }

    /// Whether rows become int8 before they are multiplied with these weights: the checkpoint says so, and they are
    /// int8 with a scale for each of their rows and without a zero point.
    pub(super) fn rows_become_int8(
        &self,
        parts: &[(String, Cut)],
        sources: &[Box<dyn WeightSource + 'a>],
    ) -> bool {
        let Source::Checkpoint(checkpoint) = self.source else { return false };
        let suits = |source: &dyn WeightSource| {
            let Layout { codes, group, rows, zeros, minimums, permuted, .. } = source.layout();
            !permuted && (codes, group, rows, zeros, minimums) == (Codes::Int8, 0, 1, false, false)
        };
        parts.iter().all(|(name, _)| checkpoint.rows_become_int8(name))
            && sources.iter().all(|source| suits(&**source))
    }

    /// int8 matrices above each other, for rows that become int8.
    pub(super) fn int8(&mut self, sources: &[Box<dyn WeightSource + 'a>]) -> Result<ProjectionWeight, Error> {
        let stream = self.stream;
        let k = sources.first().map_or(0, |source| source.size()[1]);
        let n = sources.iter().map(|source| source.size()[0]).sum();
        let mut codes = Tensor::empty(stream, &[n, k], DType::I8)?;
        let mut scales = Vec::with_capacity(n);
        let step = (BUFFER_ELEMS / k.max(1)).max(1);
        let (mut buffer, mut done) = (Vec::new(), 0);
        for source in sources {
            let Layout { scale, .. } = source.layout();
            let rows = source.size()[0];
            scales.extend((0..rows).map(|row| number(scale, source.scale(row, 0))));
            for start in (0..rows).step_by(step) {
                let rows = start..rows.min(start + step);
                buffer.resize(rows.len() * k, 0);
                for (row, codes) in std::iter::zip(rows.clone(), buffer.chunks_exact_mut(k.max(1))) {
                    source.codes(row, codes);
                    // Counted from the middle of their range.
                    codes.iter_mut().for_each(|code| *code ^= 0x80);
                }
                let mut to = codes.view_mut().slice(0, done..done + rows.len())?;
                to.write_bytes(stream, &buffer)?;
                done += rows.len();
                self.loaded_bytes += (rows.len() * k * self.dtype.bytes()) as u64;
                tell(self.progress, self.loaded_bytes, self.total_bytes)?;
            }
        }
        let scales = Tensor::from_slice(stream, &[n], &scales)?;
        Ok(ProjectionWeight::Int8 {
            codes: Constant::new(codes, stream)?,
            scales: Constant::new(scales, stream)?,
        })
    }

    pub(super) fn pack(&mut self, sources: &[&dyn WeightSource]) -> Result<Vec<Weight>, Error> {
        let mut weights = Vec::new();
        for source in sources {
            let weight = Weight::pack(self.stream, *source)?;
            // Counted as the matrix that it stands for, as in the total.
            let [n, k] = source.size();
            self.loaded_bytes += (n * k * self.dtype.bytes()) as u64;
            tell(self.progress, self.loaded_bytes, self.total_bytes)?;
            weights.push(weight);
        }
        Ok(weights)
    }
}

/// The quantised matrices that a tensor's rows are taken from, with the rows of each, where they come one after the
/// other; none if they come in turn, or one cannot be packed.
fn quantised_runs<'a>(
    parts: &[Data<'a>],
    order: &[(u32, u32)],
    rows: &Cut,
) -> Option<Vec<(Packable<'a>, Cut)>> {
    let mut runs: Vec<(u32, Vec<Range<usize>>)> = Vec::new();
    for &(part, row) in rows.ranges.iter().flat_map(|range| &order[range.clone()]) {
        let row = row as usize;
        if runs.last().is_none_or(|(last, _)| *last != part) {
            if runs.len() == parts.len() {
                return None;
            }
            runs.push((part, Vec::new()));
        }
        let (_, ranges) = runs.last_mut()?;
        match ranges.last_mut() {
            Some(range) if range.end == row => range.end += 1,
            _ => ranges.push(row..row + 1),
        }
    }
    let of_run = |(part, ranges): (u32, Vec<Range<usize>>)| match &parts[part as usize] {
        Data::Quantised(matrix) => {
            let rows = Cut { of: matrix.n(), ranges };
            Some((Packable::new(matrix.clone())?, rows))
        }
        _ => None,
    };
    runs.into_iter().map(of_run).collect()
}

/// The number that a scale's bits stand for: a float.
fn number(scale: ScaleType, bits: u32) -> f32 {
    match scale {
        ScaleType::F16 => half::f16::from_bits(bits as u16).to_f32(),
        ScaleType::Bf16 => half::bf16::from_bits(bits as u16).to_f32(),
        _ => f32::from_bits(bits),
    }
}
