//! Weights that are quantised on the card as they are loaded: the file's own floats go there, some rows at a time.

use std::ops::Range;

use abi::DType;
use abi::weight::TILE_ROWS;

use super::{BUFFER_ELEMS, Loader, Quantise, Source, height, tell};
use crate::checkpoint::{Checkpoint, Data, Stored};
use crate::part::Cut;
use crate::quant::of_tensor;
use crate::weights::MAX_PROBLEMS;
use host::ops::quantize_weight::Quantizer;
use host::weight::{ScaleType, Scheme, Weight};
use host::{Error, Tensor};

/// Rows of a file's matrix of floats.
struct Rows<'a> {
    name: String,
    dtype: DType,
    bytes: &'a [u8],
    ranges: Vec<Range<usize>>,
}

impl Rows<'_> {
    fn len(&self) -> usize {
        self.ranges.iter().map(ExactSizeIterator::len).sum()
    }
}

/// How matrices are put together.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Order {
    /// Above each other.
    Above,
    /// Two, whose rows come in turn.
    InTurn,
}

impl<'a> Loader<'a> {
    /// The scheme that the card is to quantise by, if it is. Scales that are fp8 are made on the host: their factor is
    /// of the whole matrix, which would have to be there twice.
    fn scheme_of_card(&self, quantise: Quantise) -> Option<(&'a Checkpoint, Scheme)> {
        let &Source::Checkpoint(checkpoint) = &self.source else { return None };
        let scheme = quantise.of_projections()?;
        let is_card = self.stream.device().limits().is_some();
        (is_card && scheme.scale != ScaleType::E4m3).then_some((checkpoint, scheme))
    }

    /// The rows of a tensor, those from `first` on; none if they are no floats of the file, or are not alone.
    fn rows_of(
        checkpoint: &'a Checkpoint,
        (name, shape): (&str, &[usize]),
        (first, rows): (usize, &Cut),
    ) -> Result<Option<Rows<'a>>, Error> {
        let unusable = |problem| checkpoint.unusable(1, vec![problem]);
        let Stored { data, .. } = checkpoint.tensor(name, shape).map_err(unusable)?;
        let Data::Dense { dtype, bytes } = data else { return Ok(None) };
        if !dtype.is_float() || checkpoint.rows_become_int8(name) {
            return Ok(None);
        }
        let ranges = rows.ranges.iter().map(|range| first + range.start..first + range.end).collect();
        Ok(Some(Rows { name: name.to_owned(), dtype, bytes, ranges }))
    }

    /// A projection's weight, or a table, quantised by the card; none where the host does it: what is cut inside of
    /// tiles or blocks, or is no floats of the file.
    pub(super) fn quantised_by_card(
        &mut self,
        parts: &[(String, Cut)],
        cols: &Cut,
        quantise: Quantise,
        order: Order,
    ) -> Result<Option<Weight>, Error> {
        let Some((checkpoint, scheme)) = self.scheme_of_card(quantise) else { return Ok(None) };
        let (n, k) = (height(parts), cols.len());
        if n == 0 || k == 0 || !cols.is_all() {
            return Ok(None);
        }
        let mut all = Vec::new();
        for (name, rows) in parts {
            let Some(rows) = Self::rows_of(checkpoint, (name, &[rows.of, cols.of]), (0, rows))? else {
                return Ok(None);
            };
            all.push(rows);
        }
        if !fits(&scheme, &all, order) {
            return Ok(None);
        }
        let quantizer = match order {
            Order::Above => Quantizer::new(self.stream, scheme, 1, [n, k], 1.0),
            Order::InTurn => Quantizer::of_pairs(self.stream, scheme, 1, [n, k], 1.0),
        };
        let mut quantizer = quantizer?;
        self.push(&mut quantizer, (&scheme, k), &all, order)?;
        self.finish(quantizer, &all).map(Some)
    }

    /// The same of experts: `names` has the parts of each, or one of all, `rows` and `cols` of each part are taken.
    pub(super) fn experts_by_card(
        &mut self,
        (names, is_fused): (&[Vec<String>], bool),
        own: &Cut,
        [rows, cols]: [&Cut; 2],
    ) -> Result<Option<Weight>, Error> {
        let Some((checkpoint, scheme)) = self.scheme_of_card(self.quantise) else { return Ok(None) };
        let (parts, k) = (names.first().map_or(0, Vec::len), cols.len());
        let experts: Vec<usize> = own.ranges.iter().cloned().flatten().collect();
        if parts == 0 || !cols.is_all() {
            return Ok(None);
        }
        let height = rows.of / parts;
        let rows_of = |expert: usize| -> Result<Option<Vec<Rows<'a>>>, Error> {
            (0..parts)
                .map(|part| {
                    let (name, shape, first) = match is_fused {
                        true => (&names[0][part], vec![own.of, height, cols.of], expert * height),
                        false => (&names[expert][part], vec![height, cols.of], 0),
                    };
                    Self::rows_of(checkpoint, (name, &shape), (first, &rows.within(parts, part)))
                })
                .collect()
        };
        // All of them before anything is made.
        let mut all = Vec::new();
        for &expert in &experts {
            let Some(rows) = rows_of(expert)? else { return Ok(None) };
            let height: usize = rows.iter().map(Rows::len).sum();
            if !height.is_multiple_of(scheme.rows as usize) || !fits(&scheme, &rows, Order::Above) {
                return Ok(None);
            }
            all.push(rows);
        }
        let mut quantizer = Quantizer::new(self.stream, scheme, experts.len(), [rows.len(), k], 1.0)?;
        for rows in &all {
            self.push(&mut quantizer, (&scheme, k), rows, Order::Above)?;
        }
        let all: Vec<Rows<'_>> = all.into_iter().flatten().collect();
        self.finish(quantizer, &all).map(Some)
    }

    /// Uploads rows, some at a time, and has them quantised.
    fn push(
        &mut self,
        quantizer: &mut Quantizer,
        (scheme, k): (&Scheme, usize),
        parts: &[Rows<'_>],
        order: Order,
    ) -> Result<(), Error> {
        let stream = self.stream;
        let (unit, together) = match order {
            Order::Above => (scheme.rows.max(TILE_ROWS) as usize, 1),
            Order::InTurn => (scheme.rows.max(TILE_ROWS / 2) as usize, 2),
        };
        let step = (BUFFER_ELEMS / (k * together)).max(unit) / unit * unit;
        for parts in parts.chunks(together) {
            let most = parts[0].ranges.iter().map(ExactSizeIterator::len).max().unwrap_or(0).min(step);
            let buffer = |part: &Rows<'_>| Tensor::empty(stream, &[most, k], part.dtype);
            let mut buffers = parts.iter().map(buffer).collect::<Result<Vec<_>, Error>>()?;
            // Of a pair both have the same ranges.
            for range in &parts[0].ranges {
                for start in range.clone().step_by(step) {
                    let rows = start..range.end.min(start + step);
                    let count = rows.len();
                    for (part, buffer) in std::iter::zip(parts, &mut buffers) {
                        let row_bytes = k * part.dtype.bytes();
                        let bytes = &part.bytes[rows.start * row_bytes..rows.end * row_bytes];
                        buffer.view_mut().slice(0, 0..count)?.write_bytes(stream, bytes)?;
                    }
                    match &buffers[..] {
                        [rows] => quantizer.push(stream, rows.view().slice(0, 0..count)?)?,
                        [first, second, ..] => {
                            let pair = [first.view().slice(0, 0..count)?, second.view().slice(0, 0..count)?];
                            quantizer.push_pair(stream, pair)?;
                        }
                        [] => {}
                    }
                    // Counted as the matrix that it stands for, as in the total.
                    self.loaded_bytes += (together * count * k * self.dtype.bytes()) as u64;
                    tell(self.progress, self.loaded_bytes, self.total_bytes)?;
                }
            }
        }
        Ok(())
    }

    fn finish(&self, quantizer: Quantizer, parts: &[Rows<'_>]) -> Result<Weight, Error> {
        let mut names: Vec<&str> = parts.iter().map(|part| &*part.name).collect();
        names.dedup();
        names.truncate(MAX_PROBLEMS);
        quantizer.finish(self.stream).map_err(of_tensor(&names.join(" or ")))
    }
}

/// Whether all that is taken begins between the scheme's blocks, and ends between them and between the weight's tiles,
/// but for the end of the last; of a pair, whether the same is taken of both.
fn fits(scheme: &Scheme, parts: &[Rows<'_>], order: Order) -> bool {
    let (block, tile) = (scheme.rows as usize, TILE_ROWS as usize);
    let (unit, parts) = match (order, parts) {
        (Order::Above, parts) => (block.max(tile), parts),
        (Order::InTurn, [first, second]) if first.ranges == second.ranges && first.dtype == second.dtype => {
            (block.max(tile / 2), &parts[..1])
        }
        (Order::InTurn, _) => return false,
    };
    let ranges: Vec<&Range<usize>> = parts.iter().flat_map(|part| &part.ranges).collect();
    let is_between = |(index, range): (usize, &&Range<usize>)| {
        let is_last = index + 1 == ranges.len();
        range.start.is_multiple_of(block) && (is_last || range.len().is_multiple_of(unit))
    };
    ranges.iter().enumerate().all(is_between)
}
