//! Operations of a warp. Blocks of 32 threads.

use cuda_std::{kernel, lanes, thread, warp};

use crate::{load, store};

/// Shuffles, by mode and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum Shuffle {
    Xor,
    Index,
    Up,
    Down,
    XorWithin8,
    IndexWithin4,
    UpWithin16,
    DownWithin8,
}

impl Shuffle {
    /// Every form.
    pub const ALL: [Shuffle; 8] = [
        Shuffle::Xor,
        Shuffle::Index,
        Shuffle::Up,
        Shuffle::Down,
        Shuffle::XorWithin8,
        Shuffle::IndexWithin4,
        Shuffle::UpWithin16,
        Shuffle::DownWithin8,
    ];
}

/// Input of a block: form, mask, 32 values, 32 arguments. Results: 32 words, of lanes in the mask.
#[kernel(max_threads = 32)]
pub unsafe fn probe_shuffle(input: *const u32, output: *mut u32, _maps: *const u64, _parameter: u32) {
    let lane = thread::lane();
    // SAFETY: the buffers are as documented; lanes outside the mask stay out.
    unsafe {
        let word = |i| load(input, 66, i);
        let (form, mask, value, argument) = (word(0), word(1), word(2 + lane), word(34 + lane));
        if mask >> lane & 1 == 0 {
            return;
        }
        let result = match form {
            0 => warp::shuffle_xor(mask, value, argument),
            1 => warp::shuffle_idx(mask, value, argument),
            2 => warp::shuffle_up(mask, value, argument),
            3 => warp::shuffle_down(mask, value, argument),
            4 => lanes::shuffle_xor_within::<8>(mask, value, argument),
            5 => lanes::shuffle_idx_within::<4>(mask, value, argument),
            6 => lanes::shuffle_up_within::<16>(mask, value, argument),
            _ => lanes::shuffle_down_within::<8>(mask, value, argument),
        };
        store(output, 32, lane, result);
    }
}

/// Input of a block: mask, 32 values, whose lowest bits are the predicates. Results: ballot, any, all of each lane in
/// the mask, 32 words each.
#[kernel(max_threads = 32)]
pub unsafe fn probe_vote(input: *const u32, output: *mut u32, _maps: *const u64, _parameter: u32) {
    let lane = thread::lane();
    // SAFETY: the buffers are as documented; lanes outside the mask stay out.
    unsafe {
        let (mask, predicate) = (load(input, 33, 0), load(input, 33, 1 + lane) & 1 == 1);
        if mask >> lane & 1 == 0 {
            return;
        }
        store(output, 96, lane, warp::ballot(mask, predicate));
        store(output, 96, 32 + lane, warp::any(mask, predicate).into());
        store(output, 96, 64 + lane, warp::all(mask, predicate).into());
        warp::sync_warp(mask);
    }
}

/// Input of a block: mask, 32 values. Results: nine times 32 words, of lanes in the mask: match_any, then redux add,
/// min, max, signed min and max, and, or, xor.
#[cfg(not(lacks_redux))]
#[kernel(max_threads = 32)]
pub unsafe fn probe_redux(input: *const u32, output: *mut u32, _maps: *const u64, _parameter: u32) {
    let lane = thread::lane();
    // SAFETY: the buffers are as documented; lanes outside the mask stay out.
    unsafe {
        let (mask, value) = (load(input, 33, 0), load(input, 33, 1 + lane));
        if mask >> lane & 1 == 0 {
            return;
        }
        let put = |i: u32, value: u32| store(output, 288, 32 * i + lane, value);
        put(0, lanes::match_any(mask, value));
        put(1, lanes::redux_add(mask, value));
        put(2, lanes::redux_min(mask, value));
        put(3, lanes::redux_max(mask, value));
        put(4, lanes::redux_min_i32(mask, value as i32) as u32);
        put(5, lanes::redux_max_i32(mask, value as i32) as u32);
        put(6, lanes::redux_and(mask, value));
        put(7, lanes::redux_or(mask, value));
        put(8, lanes::redux_xor(mask, value));
    }
}

/// Input of a block: mask. Results: 1 in the elected lane, 0 in the mask's others.
#[cfg(not(lacks_tma))]
#[kernel(max_threads = 32)]
pub unsafe fn probe_elect(input: *const u32, output: *mut u32, _maps: *const u64, _parameter: u32) {
    let lane = thread::lane();
    // SAFETY: the buffers are as documented; lanes outside the mask stay out.
    unsafe {
        let mask = load(input, 1, 0);
        if mask >> lane & 1 == 1 {
            store(output, 32, lane, lanes::elect(mask).into());
        }
    }
}
