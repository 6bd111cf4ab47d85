//! Tensor copies of TMA.

use core::panic::Location;
use std::format;
use std::vec::Vec;

use super::access::Space;
use super::copies::{Combine, From, Piece};
use super::machine::{CLUSTER_WINDOW, Machine, attempt};
use super::shadow::Kind;
use super::tensor_map::{Decoded, Element};
use super::unit::Failure;
use super::{Defect, Need};
use crate::tma::TensorMap;

const LOAD: &str = "cp.async.bulk.tensor.shared::cluster.global";
const STORE: &str = "cp.async.bulk.tensor.global.shared::cta";
const REDUCE: &str = "cp.reduce.async.bulk.tensor";

impl Machine {
    /// Reads the map of an instruction: from global memory, or from the kernel's parameters.
    fn tensor_map(
        &mut self,
        instruction: &str,
        map: *const TensorMap,
        coordinates: &[i32],
        line: &'static Location<'static>,
    ) -> Result<Decoded, Failure> {
        self.needs(Need::Tma, instruction)?;
        if map.is_null() {
            return Err(Failure(Defect::Unsupported, format!("`{instruction}` without a tensor map")));
        }
        let is_global = self.memory_and_unit().0.find(map.addr(), 1).is_some();
        let place = if is_global {
            self.access(Space::Global(map.addr()), 128, 64, Kind::Read, None, line)?
                .cast::<TensorMap>()
                .cast_const()
        } else {
            map
        };
        // SAFETY: in a buffer, as `access` found; else a parameter of the kernel, as it is marked `#[grid_constant]`.
        let map = unsafe { place.read_unaligned() };
        let decoded = Decoded::new(&map)
            .map_err(|error| Failure(Defect::Unsupported, format!("`{instruction}`: {error}")))?;
        if decoded.rank != coordinates.len() {
            let text = format!(
                "`{instruction}` with {} coordinates and a map of rank {}",
                coordinates.len(),
                decoded.rank
            );
            return Err(Failure(Defect::Unsupported, text));
        }
        Ok(decoded)
    }

    /// The box in pieces, for a copy between `shared` and the tensor.
    fn pieces(
        &mut self,
        instruction: &str,
        map: &Decoded,
        coordinates: &[i32],
        shared: u32,
    ) -> Result<Vec<Piece>, Failure> {
        let align = map.swizzle.repeat().max(128);
        if !(shared % CLUSTER_WINDOW).is_multiple_of(align) {
            let text = format!(
                "`{instruction}`: address {shared:#x} in shared memory, which is not aligned to {align} bytes"
            );
            return Err(Failure(Defect::Misaligned, text));
        }
        let first = i64::from(coordinates[0]) * i64::from(map.element.bytes());
        if first % 16 != 0 {
            let text = format!(
                "`{instruction}`: the box begins at byte {first} of a row, which is not a multiple of 16: an illegal \
                 instruction on the card"
            );
            return Err(Failure(Defect::Misaligned, text));
        }
        let fill = map.fill_bytes();
        let piece = |piece: super::tensor_map::Piece| Piece {
            shared: piece.shared as usize,
            global: piece
                .global
                .map_or(From::Fill(fill), |offset| From::Global((map.address + offset) as usize)),
            bytes: piece.bytes as usize,
        };
        Ok(map.pieces(coordinates).into_iter().map(piece).collect())
    }
}

/// `cp.async.bulk.tensor` from global to shared memory, of this block or of several of the cluster.
#[track_caller]
pub(crate) fn tma_load(
    shared: u32,
    map: *const TensorMap,
    coordinates: &[i32],
    barrier: u32,
    blocks: Option<u16>,
) {
    let line = Location::caller();
    attempt(LOAD, line, |machine| {
        let map = machine.tensor_map(LOAD, map, coordinates, line)?;
        let pieces = machine.pieces(LOAD, &map, coordinates, shared)?;
        let bytes = map.box_bytes();
        let Some(blocks) = blocks else {
            return machine.load_pieces(LOAD, &pieces, shared, barrier, bytes, line);
        };
        let in_cluster = machine.unit().blocks.len() as u32;
        if blocks == 0 || u32::from(blocks) >> in_cluster != 0 {
            let text = format!("`{LOAD}.multicast` to blocks {blocks:#b} of a cluster of {in_cluster}");
            return Err(Failure(Defect::OutOfBounds, text));
        }
        for rank in (0..in_cluster).filter(|rank| blocks >> rank & 1 == 1) {
            let window = (rank + 1) * CLUSTER_WINDOW;
            let (shared, barrier) = (window + shared % CLUSTER_WINDOW, window + barrier % CLUSTER_WINDOW);
            machine.load_pieces(LOAD, &pieces, shared, barrier, bytes, line)?;
        }
        Ok(())
    });
}

fn store(
    instruction: &'static str,
    map: *const TensorMap,
    coordinates: &[i32],
    shared: u32,
    line: &'static Location<'static>,
    combine: impl FnOnce(Element) -> Option<Combine>,
) {
    attempt(instruction, line, |machine| {
        let map = machine.tensor_map(instruction, map, coordinates, line)?;
        let pieces = machine.pieces(instruction, &map, coordinates, shared)?;
        let row_bytes = map.dims[0] * u64::from(map.element.bytes());
        if !row_bytes.is_multiple_of(16) {
            let text = format!(
                "`{instruction}` to rows of {row_bytes} bytes, which are no multiple of 16: the card writes beyond their end"
            );
            return Err(Failure(Defect::OutOfBounds, text));
        }
        if coordinates.iter().any(|&coordinate| coordinate < 0) {
            let text = format!(
                "`{instruction}` at {coordinates:?}: negative, which is an illegal instruction on the card"
            );
            return Err(Failure(Defect::OutOfBounds, text));
        }
        let Some(combine) = combine(map.element) else {
            let text = format!("`{instruction}` of a map of {:?}", map.element);
            return Err(Failure(Defect::Unsupported, text));
        };
        machine.store_pieces(&pieces, shared, combine, line)
    });
}

/// `cp.async.bulk.tensor` from shared to global memory.
#[track_caller]
pub(crate) fn tma_store(map: *const TensorMap, coordinates: &[i32], shared: u32) {
    store(STORE, map, coordinates, shared, Location::caller(), |_| Some(Combine::Replace));
}

/// `cp.reduce.async.bulk.tensor` with addition.
#[track_caller]
pub(crate) fn tma_reduce_add(map: *const TensorMap, coordinates: &[i32], shared: u32) {
    store(REDUCE, map, coordinates, shared, Location::caller(), |element| match element {
        Element::F32 => Some(Combine::AddF32),
        Element::F16 => Some(Combine::AddF16),
        Element::Bf16 => Some(Combine::AddBf16),
        Element::U32 | Element::I32 => Some(Combine::AddU32),
        Element::U64 | Element::I64 => Some(Combine::AddU64),
        _ => None,
    });
}

/// `cp.async.bulk.prefetch.tensor`: moves nothing that a kernel could see.
#[track_caller]
pub(crate) fn tma_prefetch(map: *const TensorMap, coordinates: &[i32]) {
    const INSTRUCTION: &str = "cp.async.bulk.prefetch.tensor";
    let line = Location::caller();
    attempt(INSTRUCTION, line, |machine| machine.tensor_map(INSTRUCTION, map, coordinates, line).map(|_| ()));
}

/// `prefetch.tensormap`.
#[track_caller]
pub(crate) fn tma_prefetch_map(_map: *const TensorMap) {
    const INSTRUCTION: &str = "prefetch.tensormap";
    attempt(INSTRUCTION, Location::caller(), |machine| machine.needs(Need::Tma, INSTRUCTION));
}
