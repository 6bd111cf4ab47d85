//! Prefix sums over a block, of exact integers.

use cuda_std::warp::FULL_MASK;
use cuda_std::{shared, thread, warp};

/// The value of lane `source`.
///
/// # Safety
/// - *converged*: all 32 lanes execute it.
#[inline(always)]
pub unsafe fn shuffle_idx_u64(value: u64, source: u32) -> u64 {
    // SAFETY: all lanes take part — the caller.
    unsafe {
        let low = warp::shuffle_idx(FULL_MASK, value as u32, source);
        let high = warp::shuffle_idx(FULL_MASK, (value >> 32) as u32, source);
        u64::from(low) | u64::from(high) << 32
    }
}

/// Sum over this lane and all lanes below it.
///
/// # Safety
/// - *converged*: all 32 lanes execute it.
#[inline(always)]
pub unsafe fn warp_scan_u64(mut value: u64) -> u64 {
    let lane = thread::lane();
    let mut step = 1;
    while step < 32 {
        // SAFETY: all lanes take part — the caller.
        let below = unsafe {
            let low = warp::shuffle_up(FULL_MASK, value as u32, step);
            let high = warp::shuffle_up(FULL_MASK, (value >> 32) as u32, step);
            u64::from(low) | u64::from(high) << 32
        };
        value += if lane >= step { below } else { 0 };
        step *= 2;
    }
    value
}

/// A u64 of two words.
///
/// # Safety
/// - As `shared::load_u32`, for both words.
#[inline(always)]
pub unsafe fn load_u64(address: u32) -> u64 {
    // SAFETY: the same contract.
    unsafe { u64::from(shared::load_u32(address)) | u64::from(shared::load_u32(address + 4)) << 32 }
}

/// A u64 as two words.
///
/// # Safety
/// - As `shared::store_u32`, for both words.
#[inline(always)]
pub unsafe fn store_u64(address: u32, value: u64) {
    // SAFETY: the same contract.
    unsafe {
        shared::store_u32(address, value as u32);
        shared::store_u32(address + 4, (value >> 32) as u32);
    }
}

/// What a thread learns from a scan over its block.
pub struct Scan {
    /// Sum over all threads before this one.
    pub before: u64,
    /// Sum over all threads.
    pub total: u64,
}

/// Sums over the threads of a block in their order. Two barriers; the scratch may be used again at once.
///
/// # Safety
/// - *converged*: all threads of a block of 1024 execute it.
/// - *exclusive*: `scratch` is the shared address of 256 bytes that nothing else uses meanwhile.
#[inline(always)]
pub unsafe fn block_scan_u64(value: u64, scratch: u32) -> Scan {
    let (lane, warp) = (thread::lane(), thread::warp_idx());
    // SAFETY: all threads take part — the caller. Slot `warp` is this warp's own; all 32 are written before the first
    // barrier and read before the second.
    unsafe {
        let through = warp_scan_u64(value);
        if lane == 31 {
            store_u64(scratch + 8 * warp, through);
        }
        thread::sync_threads();
        let warps = warp_scan_u64(load_u64(scratch + 8 * lane));
        thread::sync_threads();
        let warps_before = shuffle_idx_u64(warps, warp.wrapping_sub(1));
        let warps_before = if warp == 0 { 0 } else { warps_before };
        Scan { before: warps_before + through - value, total: shuffle_idx_u64(warps, 31) }
    }
}

/// Maximum over the threads of a block; every thread gets it. Two barriers, as [`block_scan_u64`].
///
/// # Safety
/// - As [`block_scan_u64`].
#[inline(always)]
pub unsafe fn block_max_u64(value: u64, scratch: u32) -> u64 {
    // SAFETY: as in `block_scan_u64`.
    unsafe {
        let through = warp_max_u64(value);
        if thread::lane() == 0 {
            store_u64(scratch + 8 * thread::warp_idx(), through);
        }
        thread::sync_threads();
        let max = warp_max_u64(load_u64(scratch + 8 * thread::lane()));
        thread::sync_threads();
        max
    }
}

/// Maximum over the lanes; every lane gets it.
///
/// # Safety
/// - *converged*: all 32 lanes execute it.
#[inline(always)]
unsafe fn warp_max_u64(mut value: u64) -> u64 {
    let mut step = 16;
    while step > 0 {
        // SAFETY: all lanes take part — the caller.
        let other = unsafe {
            let low = warp::shuffle_xor(FULL_MASK, value as u32, step);
            let high = warp::shuffle_xor(FULL_MASK, (value >> 32) as u32, step);
            u64::from(low) | u64::from(high) << 32
        };
        value = value.max(other);
        step /= 2;
    }
    value
}
