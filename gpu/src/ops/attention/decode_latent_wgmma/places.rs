//! Where all of it lies in shared memory, and what the warpgroup of scores tells those of values there.

use abi::ops::attention::{LATENT_NOTE_BYTES, LATENT_NUMBERS_BYTES, LATENT_STAGES, MAX_HEAD_DIM};
use cuda_std::shared;

use super::{KEYS, OWN, ROWS};

pub(super) const STEP_BYTES: u32 = KEYS * MAX_HEAD_DIM * 2;
const Q_BYTES: u32 = ROWS * MAX_HEAD_DIM * 2;
pub(super) const WEIGHT_BYTES: u32 = KEYS * ROWS * 2;

/// What the warpgroups of values are told of a step: nothing, as there is none;
pub(super) const NONE: u32 = 1;
/// it is the first of its split, the last;
pub(super) const FIRST: u32 = 2;
pub(super) const LAST: u32 = 4;
/// some older sum changes;
pub(super) const DECAYS: u32 = 8;
/// its split is the last of its result, and of all.
pub(super) const LAST_SPLIT: u32 = 16;
pub(super) const END: u32 = 32;

/// The slot of a row that there is not.
pub(super) const NO_SLOT: u32 = u32::MAX;

/// A number of steps, or of tiles of q: its place among [`LATENT_STAGES`], and how often that was used before.
#[derive(Clone, Copy)]
pub(super) struct Turn(pub(super) u32);

impl Turn {
    #[inline(always)]
    fn place(self) -> u32 {
        self.0 % LATENT_STAGES
    }

    #[inline(always)]
    pub(super) fn parity(self) -> u32 {
        self.0 / LATENT_STAGES % 2
    }

    #[inline(always)]
    pub(super) fn keys(self) -> u32 {
        shared::base() + self.place() * STEP_BYTES
    }

    #[inline(always)]
    pub(super) fn q(self) -> u32 {
        shared::base() + LATENT_STAGES * STEP_BYTES + self.place() * Q_BYTES
    }

    #[inline(always)]
    pub(super) fn weights(self) -> u32 {
        shared::base() + LATENT_STAGES * (STEP_BYTES + Q_BYTES) + self.place() * WEIGHT_BYTES
    }

    /// A word, then of each row what older sums are multiplied by, what the split's result and those before it are, and
    /// its slot.
    #[inline(always)]
    pub(super) fn note(self) -> u32 {
        shared::base()
            + LATENT_STAGES * (STEP_BYTES + Q_BYTES + WEIGHT_BYTES)
            + self.place() * LATENT_NOTE_BYTES
    }

    #[inline(always)]
    pub(super) fn decays(self) -> u32 {
        self.note() + 16
    }

    #[inline(always)]
    pub(super) fn factors(self) -> [u32; 2] {
        [self.decays() + ROWS * 4, self.decays() + 2 * ROWS * 4]
    }

    #[inline(always)]
    pub(super) fn slots(self) -> u32 {
        self.decays() + 3 * ROWS * 4
    }

    /// Of four warps the largest score of each row, in one of two places.
    #[inline(always)]
    pub(super) fn maxima(self) -> u32 {
        numbers() + self.0 % 2 * 4 * ROWS * 4
    }

    /// Of four warps whether they want new bases, in one of two places.
    #[inline(always)]
    pub(super) fn votes(self) -> u32 {
        largest() + ROWS * 4 + self.0 % 2 * 16
    }

    #[inline(always)]
    fn barrier(self, kind: u32) -> u32 {
        numbers() + LATENT_NUMBERS_BYTES - (5 - kind) * LATENT_STAGES * 8 + self.place() * 8
    }

    #[inline(always)]
    pub(super) fn full_k(self) -> u32 {
        self.barrier(0)
    }

    #[inline(always)]
    pub(super) fn empty_k(self) -> u32 {
        self.barrier(1)
    }

    #[inline(always)]
    pub(super) fn full_q(self) -> u32 {
        self.barrier(2)
    }

    #[inline(always)]
    pub(super) fn empty_q(self) -> u32 {
        self.barrier(3)
    }

    #[inline(always)]
    pub(super) fn full_p(self) -> u32 {
        self.barrier(4)
    }
}

#[inline(always)]
fn numbers() -> u32 {
    shared::base() + LATENT_STAGES * (STEP_BYTES + Q_BYTES + WEIGHT_BYTES + LATENT_NOTE_BYTES)
}

/// Of four warps the sums of each row's weights.
#[inline(always)]
pub(super) fn totals() -> u32 {
    numbers() + 2 * 4 * ROWS * 4
}

/// What each row's weights of a split are relative to.
#[inline(always)]
pub(super) fn largest() -> u32 {
    totals() + 4 * ROWS * 4
}

/// A thread's numbers of 32 rows: `8·j + 2·t` and the next one for each j.
///
/// # Safety
/// - *initialised*: inside shared memory.
#[inline(always)]
pub(super) unsafe fn load_own(at: u32, member: u32) -> [f32; OWN] {
    let mut own = [0.0; OWN];
    let mut i = 0;
    while i < OWN {
        // SAFETY: the caller's promise.
        [own[i], own[i + 1]] = unsafe { shared::load_f32x2(at + (4 * i as u32 + 2 * member) * 4) };
        i += 2;
    }
    own
}

/// The other way round.
///
/// # Safety
/// - *exclusive*: inside shared memory.
#[inline(always)]
pub(super) unsafe fn store_own(at: u32, member: u32, own: [f32; OWN]) {
    let mut i = 0;
    while i < OWN {
        // SAFETY: the caller's promise.
        unsafe { shared::store_f32x2(at + (4 * i as u32 + 2 * member) * 4, [own[i], own[i + 1]]) };
        i += 2;
    }
}
