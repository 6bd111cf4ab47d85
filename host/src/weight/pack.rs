//! From a source to the packed form.

use abi::weight::{BLOCK_SCALES, Codes, ScaleType, TILE_K, TILE_ROWS};
use rayon::prelude::*;

use super::cpu::number;
use super::{BYTES, Counts, Layout, OP, Tensors, Unmade, Weight, WeightSource};
use crate::error::Error;
use crate::plan::check_size;
use crate::stream::Stream;
use crate::tensor::Tensor;

/// Bytes of codes that are packed at a time.
const CHUNK_BYTES: usize = 8 << 20;

pub(super) fn pack<S: WeightSource>(
    stream: &Stream,
    experts: usize,
    mut source: impl FnMut(usize) -> Result<S, Error>,
) -> Result<Weight, Error> {
    if experts == 0 {
        return Err(Error::invalid(OP, "experts", "at least one", "none"));
    }
    let first = source(0)?;
    let (layout, [n, k]) = (first.layout(), first.size());
    check_experts(&layout, experts, [n, k])?;
    let mut weight = empty(stream, &layout, experts, [n, k])?;
    weight.order = order(stream, &first)?;
    let counts = weight.counts();
    let mut at = Offsets::default();
    let mut first = Some(first);
    for expert in 0..experts {
        let source = match first.take() {
            Some(first) => first,
            None => source(expert)?,
        };
        if source.layout() != layout || source.size() != [n, k] {
            let got = format!("{:?} of {:?}", source.layout(), source.size());
            let expected = format!("experts alike: {layout:?} of {:?}", [n, k]);
            return Err(Error::invalid(OP, "experts", expected, got));
        }
        weight.globals.push(source.global());
        let block_bytes = counts.tiles * layout.codes.tile_bytes() as usize;
        let chunk = (CHUNK_BYTES / block_bytes.max(1)).max(1);
        for start in (0..counts.row_blocks).step_by(chunk) {
            let blocks = start..counts.row_blocks.min(start + chunk);
            let packed: Vec<Parts> = blocks
                .into_par_iter()
                .map(|block| row_block(&source, &layout, &counts, [n, k], block))
                .collect();
            at.upload(stream, &mut weight, &Parts::joined(packed))?;
        }
        if layout.rows > 1 {
            at.upload(stream, &mut weight, &block_scales(&source, &layout, &counts, [n, k]))?;
        }
    }
    weight.upload_globals(stream)?;
    weight.finish(stream)
}

/// The order of a matrix's columns, uploaded.
///
/// **Errors**: [`Error::Invalid`] unless it is one, and there where the layout says so.
fn order(stream: &Stream, source: &impl WeightSource) -> Result<Option<Tensor>, Error> {
    let ([_, k], is_permuted) = (source.size(), source.layout().permuted);
    let order = match (source.order(), is_permuted) {
        (None, false) => return Ok(None),
        (Some(order), true) => order,
        (_, false) => {
            return Err(Error::invalid(OP, "source", "no order of columns, as the layout says", "one"));
        }
        (_, true) => {
            return Err(Error::invalid(OP, "source", "an order of columns, as the layout says", "none"));
        }
    };
    let mut seen = vec![false; k];
    let is_new =
        |&&column: &&u32| seen.get_mut(column as usize).is_some_and(|seen| !std::mem::replace(seen, true));
    let found = order.iter().filter(is_new).count();
    if order.len() != k || found != k {
        let expected = format!("an order of {k} columns, each of them once");
        return Err(Error::invalid(
            OP,
            "source",
            expected,
            format!("{} numbers, {found} of them", order.len()),
        ));
    }
    Tensor::from_slice(stream, &[k], order).map(Some)
}

/// **Errors**: [`Error::Invalid`] unless there are experts, kernels take the layout, and experts are whole blocks.
pub(super) fn check_experts(layout: &Layout, experts: usize, [n, k]: [usize; 2]) -> Result<(), Error> {
    if experts == 0 {
        return Err(Error::invalid(OP, "experts", "at least one", "none"));
    }
    if let Some(problem) = layout.problem() {
        return Err(Error::invalid(OP, "layout", problem, format!("{layout:?}")));
    }
    for (name, size) in [("n", n), ("k", k), ("experts", experts)] {
        check_size(OP, "source", name, size)?;
    }
    if layout.permuted && experts > 1 {
        let expected = "columns that are in order, of several experts";
        return Err(Error::invalid(OP, "layout", expected, format!("{layout:?}")));
    }
    if layout.rows > 1 && experts > 1 && !n.is_multiple_of(layout.rows as usize) {
        let expected = format!("experts of whole blocks of {} rows", layout.rows);
        return Err(Error::invalid(OP, "source", expected, format!("{n} rows")));
    }
    Ok(())
}

/// A weight of this size, of which nothing is there yet.
pub(super) fn empty(
    stream: &Stream,
    layout: &Layout,
    experts: usize,
    [n, k]: [usize; 2],
) -> Result<Unmade, Error> {
    let counts = Counts::new(layout, n, k);
    let too_large =
        || Error::invalid(OP, "source", "a size that can be counted", format!("{experts} of {n} × {k}"));
    // Kernels count rows of tiles in 32 bits.
    let blocks = counts.row_blocks.checked_mul(experts).filter(|&blocks| u32::try_from(blocks).is_ok());
    let blocks = blocks.ok_or_else(too_large)?;
    let times = |count: Option<usize>| count.and_then(|count| count.checked_mul(experts));
    let code_bytes = times(counts.codes(layout)).ok_or_else(too_large)?;
    let scales = times(counts.scales(layout)).ok_or_else(too_large)?;
    let scale_bytes = scales.checked_mul(layout.stored_scale().bytes() as usize).ok_or_else(too_large)?;
    let super_bytes = blocks.checked_mul(counts.supers * TILE_ROWS as usize * 2).ok_or_else(too_large)?;
    let tensor = |bytes: usize| Tensor::empty(stream, &[bytes], BYTES);
    let optional = |wanted: bool, bytes: usize| wanted.then(|| tensor(bytes)).transpose();
    let tensors = Tensors {
        codes: tensor(code_bytes)?,
        scales: tensor(scale_bytes)?,
        zeros: optional(layout.zeros, scales)?,
        minimums: optional(layout.minimums, scale_bytes)?,
        supers: optional(layout.scale.has_supers(), super_bytes)?,
        super_minimums: optional(layout.scale.has_supers() && layout.minimums, super_bytes)?,
    };
    Ok(Unmade {
        layout: *layout,
        experts,
        n,
        k,
        globals: Vec::new(),
        device_globals: None,
        order: None,
        tensors,
    })
}

/// Bytes that are drawn at a time; of a larger tensor they are repeated.
const RANDOM_BYTES: usize = 1 << 20;

/// Codes that are drawn, each as likely as the others, and the same scale for all.
pub(super) fn random(
    stream: &Stream,
    layout: &Layout,
    experts: usize,
    [n, k]: [usize; 2],
    seed: u64,
) -> Result<Weight, Error> {
    /// What the codes' mean square is, so that values come to about 0.02.
    fn spread(codes: Codes) -> f32 {
        match codes {
            Codes::Int4 => 4.6,
            Codes::Int8 => 74.0,
            Codes::E2m1 => 3.0,
            Codes::E4m3 => 116.0,
            // Of those that are drawn, from 1 to 2.
            Codes::E6m9 => 1.53,
        }
    }
    check_experts(layout, experts, [n, k])?;
    let scale = 0.02 / spread(layout.codes);
    let global = if layout.scale == ScaleType::E4m3 { scale } else { 1.0 };
    let mut weight = empty(stream, layout, experts, [n, k])?;
    weight.globals = vec![global; experts];
    let (mut state, mut is_low) = (seed, false);
    let codes = std::iter::repeat_with(|| {
        // An LCG (Knuth's MMIX constants), of which the upper bits are the good ones.
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let byte = (state >> 56) as u8;
        match layout.codes {
            // Two codes of fp8 are NaN.
            Codes::E4m3 if byte & 0x7f == 0x7f => byte ^ 1,
            // Of 16 bits the upper byte, which comes second, has the exponent of 1.
            Codes::E6m9 => {
                is_low = !is_low;
                if is_low { byte } else { byte & 0x81 | 0x3e }
            }
            _ => byte,
        }
    });
    let tensors = &mut weight.tensors;
    fill(stream, Some(&mut tensors.codes), codes)?;
    let half = half::f16::from_f32(scale).to_bits().to_le_bytes();
    let of_scale = match layout.stored_scale() {
        ScaleType::F32 => scale.to_le_bytes().to_vec(),
        ScaleType::F16 => half.to_vec(),
        ScaleType::Bf16 => half::bf16::from_f32(scale).to_le_bytes().to_vec(),
        ScaleType::E8m0 => vec![(127.0 + scale.log2().round()) as u8],
        // 1, of the global scale.
        ScaleType::E4m3 => vec![0x38],
        // 1, of the super scale.
        ScaleType::U8Super | ScaleType::I8Super => vec![1],
    };
    fill(stream, Some(&mut tensors.scales), of_scale.into_iter().cycle())?;
    fill(stream, tensors.zeros.as_mut(), std::iter::repeat(layout.codes.zero()))?;
    fill(stream, tensors.minimums.as_mut(), std::iter::repeat(0))?;
    fill(stream, tensors.supers.as_mut(), half.into_iter().cycle())?;
    fill(stream, tensors.super_minimums.as_mut(), half.into_iter().cycle())?;
    if layout.permuted {
        // The last column first.
        let order: Vec<u32> = (0..k as u32).rev().collect();
        weight.order = Some(Tensor::from_slice(stream, &[k], &order)?);
    }
    weight.finish(stream)
}

/// Fills bytes with the first ones of `pattern`, over and over.
fn fill(
    stream: &Stream,
    target: Option<&mut Tensor>,
    pattern: impl Iterator<Item = u8>,
) -> Result<(), Error> {
    let Some(target) = target else { return Ok(()) };
    let bytes = target.bytes();
    let block: Vec<i8> = pattern.take(RANDOM_BYTES.min(bytes)).map(|byte| byte as i8).collect();
    let block = Tensor::from_slice(stream, &[block.len()], &block)?;
    for start in (0..bytes).step_by(RANDOM_BYTES) {
        let end = bytes.min(start + RANDOM_BYTES);
        stream.copy(block.view().slice(0, 0..end - start)?, target.view_mut().slice(0, start..end)?)?;
    }
    Ok(())
}

/// A part of everything, as bytes.
#[derive(Default)]
struct Parts {
    codes: Vec<u8>,
    scales: Vec<u8>,
    zeros: Vec<u8>,
    minimums: Vec<u8>,
    supers: Vec<u8>,
    super_minimums: Vec<u8>,
}

impl Parts {
    /// One after the other.
    fn joined(parts: Vec<Parts>) -> Parts {
        let mut joined = Parts::default();
        for part in parts {
            joined.codes.extend(part.codes);
            joined.scales.extend(part.scales);
            joined.zeros.extend(part.zeros);
            joined.minimums.extend(part.minimums);
            joined.supers.extend(part.supers);
            joined.super_minimums.extend(part.super_minimums);
        }
        joined
    }
}

/// How much has been uploaded of everything.
#[derive(Default)]
struct Offsets([usize; 6]);

impl Offsets {
    fn upload(&mut self, stream: &Stream, weight: &mut Unmade, parts: &Parts) -> Result<(), Error> {
        let Parts { codes, scales, zeros, minimums, supers, super_minimums } = parts;
        let parts = [codes, scales, zeros, minimums, supers, super_minimums];
        for ((at, target), bytes) in self.0.iter_mut().zip(weight.tensors.each_mut()).zip(parts) {
            if let Some(target) = target
                && !bytes.is_empty()
            {
                let mut view = target.view_mut();
                view.reborrow().slice(0, *at..*at + bytes.len())?.write_bytes(stream, bytes)?;
                *at += bytes.len();
            }
        }
        Ok(())
    }
}

fn push(bytes: &mut Vec<u8>, bits: u32, count: u32) {
    bytes.extend_from_slice(&bits.to_le_bytes()[..count as usize]);
}

/// A row of tiles.
fn row_block(
    source: &impl WeightSource,
    layout: &Layout,
    counts: &Counts,
    [n, k]: [usize; 2],
    block: usize,
) -> Parts {
    let (tile_rows, tile_k) = (TILE_ROWS as usize, TILE_K as usize);
    let first = block * tile_rows;
    let rows = tile_rows.min(n - first);
    let codes_of = layout.codes;
    let words = codes_of.tile_bytes() as usize / 4;
    let mut tiles = vec![0u32; counts.tiles * words];
    // What is beyond the matrix counts from the zero point.
    let bytes = codes_of.bytes();
    let mut row_codes = vec![layout.zero(); counts.tiles * tile_k * bytes];
    for row in 0..tile_rows {
        if row < rows {
            source.codes(first + row, &mut row_codes[..k * bytes]);
        } else {
            row_codes.fill(layout.zero());
        }
        for (tile, codes) in tiles.chunks_mut(words).zip(row_codes.chunks(tile_k * bytes)) {
            for (col, code) in codes.chunks(bytes).enumerate() {
                let (word, bit) = codes_of.place(row as u32, col as u32);
                let code = code.iter().rev().fold(0, |code, &byte| code << 8 | u32::from(byte));
                tile[word as usize] |= code << bit;
            }
        }
    }
    let codes = tiles.into_iter().flat_map(u32::to_le_bytes).collect();
    let mut parts = Parts { codes, ..Parts::default() };
    if layout.rows > 1 {
        return parts;
    }
    let global = source.global();
    let groups = if layout.group == 0 { 1 } else { k.div_ceil(layout.group as usize) };
    let bytes = layout.stored_scale().bytes();
    for stretch in 0..counts.stretches {
        for row in rows_of_scales() {
            for i in 0..counts.per_stretch {
                let group = stretch * counts.per_stretch + i;
                let exists = row < rows && group < groups;
                let of = |bits: &dyn Fn() -> u32| if exists { bits() } else { 0 };
                let scale = of(&|| stored_bits(layout, source.scale(first + row, group), global));
                push(&mut parts.scales, scale, bytes);
                if layout.zeros {
                    parts.zeros.push(of(&|| source.zero(first + row, group).into()) as u8);
                }
                if layout.minimums {
                    let minimum = of(&|| stored_bits(layout, source.minimum(first + row, group), global));
                    push(&mut parts.minimums, minimum, bytes);
                }
            }
        }
    }
    if layout.scale.has_supers() {
        for stretch in 0..counts.supers {
            for row in rows_of_scales() {
                let supers = if row < rows { source.supers(first + row, stretch) } else { [0; 2] };
                push(&mut parts.supers, supers[0].into(), 2);
                if layout.minimums {
                    push(&mut parts.super_minimums, supers[1].into(), 2);
                }
            }
        }
    }
    parts
}

/// The bits of a scale or minimum as they are stored.
pub(crate) fn stored_bits(layout: &Layout, bits: u32, global: f32) -> u32 {
    if layout.is_wide() { number(layout.scale, &bits.to_le_bytes(), global).to_bits() } else { bits }
}

/// Rows of a tile in the order of their scales.
fn rows_of_scales() -> impl Iterator<Item = usize> {
    (0..TILE_ROWS as usize).map(|place| place % 2 * 8 + place / 2)
}

/// Scales that several rows share: the even ones, and the odd ones.
fn block_scales(source: &impl WeightSource, layout: &Layout, counts: &Counts, [n, k]: [usize; 2]) -> Parts {
    let mut parts = Parts::default();
    let global = source.global();
    let groups = if layout.group == 0 { 1 } else { k.div_ceil(layout.group as usize) };
    for first in (0..n).step_by(layout.rows as usize) {
        for stretch in 0..counts.stretches {
            for row in [first, (first + 1).min(n - 1)] {
                let exists = stretch < groups;
                let bits = if exists { stored_bits(layout, source.scale(row, stretch), global) } else { 0 };
                for _ in 0..BLOCK_SCALES / 2 {
                    push(&mut parts.scales, bits, layout.stored_scale().bytes());
                }
            }
        }
    }
    parts
}
