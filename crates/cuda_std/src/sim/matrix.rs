//! `ldmatrix`, `stmatrix` and `mma.sync`.

use core::panic::Location;

use super::Need;
use super::access::Space;
use super::fragment::{self, Transpose};
use super::shadow::Kind;
use super::tensor_core::{self, MmaKind};
use super::warp::{Operation, Together, collective};

const fn aligned(instruction: &'static str, need: Need) -> Operation {
    Operation { instruction, together: Together::Aligned, need: Some(need) }
}

/// `ldmatrix`: registers beyond the matrices are 0.
#[track_caller]
pub(crate) fn ldmatrix(matrices: usize, transpose: Transpose, address: u32) -> [u32; 4] {
    let line = Location::caller();
    let mut input = [0; 12];
    input[0] = address;
    let immediate = matrices as u64 * 2 + u64::from(transpose == Transpose::Yes);
    let operation = aligned("ldmatrix.sync", Need::MmaSync);
    let received = collective(operation, u32::MAX, immediate, input, line, |access, inputs| {
        let mut rows = [[0; 4]; 32];
        for (lane, row) in rows.iter_mut().enumerate().take(8 * matrices) {
            let place = access.of_lane(lane, |machine| {
                machine.access(Space::OwnShared(inputs[lane][0]), 16, 16, Kind::Read, None, line)
            })?;
            // SAFETY: `access` found 16 bytes of shared memory there.
            *row = unsafe { place.cast::<[u32; 4]>().read_unaligned() };
        }
        let registers = fragment::load_matrices(&rows[..8 * matrices], transpose);
        Ok(registers.map(|[a, b, c, d]| [a, b, c, d, 0, 0, 0, 0]))
    });
    [received[0], received[1], received[2], received[3]]
}

/// `stmatrix`.
#[track_caller]
pub(crate) fn stmatrix(matrices: usize, transpose: Transpose, address: u32, registers: [u32; 4]) {
    let line = Location::caller();
    let mut input = [0; 12];
    input[0] = address;
    input[1..5].copy_from_slice(&registers);
    let immediate = matrices as u64 * 2 + u64::from(transpose == Transpose::Yes);
    let operation = aligned("stmatrix.sync", Need::StMatrix);
    collective(operation, u32::MAX, immediate, input, line, |access, inputs| {
        let registers = inputs.map(|input| [input[1], input[2], input[3], input[4]]);
        let rows = fragment::store_matrices(&registers, matrices, transpose);
        for (lane, row) in rows.into_iter().enumerate().take(8 * matrices) {
            let place = access.of_lane(lane, |machine| {
                machine.access(Space::OwnShared(inputs[lane][0]), 16, 16, Kind::Write, None, line)
            })?;
            // SAFETY: `access` found 16 bytes of shared memory there; the machine alone touches them now.
            unsafe { place.cast::<[u32; 4]>().write_unaligned(row) };
        }
        Ok([[0; 8]; 32])
    });
}

/// `mma.sync`.
#[track_caller]
pub(crate) fn mma(kind: MmaKind, a: [u32; 4], b: [u32; 2], c: [u32; 4]) -> [u32; 4] {
    let mut input = [0; 12];
    input[..4].copy_from_slice(&a);
    input[4..6].copy_from_slice(&b);
    input[6..10].copy_from_slice(&c);
    let operation = aligned("mma.sync", Need::MmaSync);
    let received =
        collective(operation, u32::MAX, kind as u64, input, Location::caller(), |access, inputs| {
            let a = inputs.map(|input| [input[0], input[1], input[2], input[3]]);
            let b = inputs.map(|input| [input[4], input[5]]);
            let c = inputs.map(|input| [input[6], input[7], input[8], input[9]]);
            let d = tensor_core::mma(kind, access.machine.generation(), &a, &b, &c);
            Ok(d.map(|[a, b, c, d]| [a, b, c, d, 0, 0, 0, 0]))
        });
    [received[0], received[1], received[2], received[3]]
}
