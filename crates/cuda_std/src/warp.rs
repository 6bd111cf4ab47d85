//! Operations of the 32 lanes of a warp among themselves.
//!
//! All take part by `mask`: the lanes whose bits are set. # Safety for each: *converged*: all lanes of the mask execute
//! the same call, and the calling lane is in the mask.

/// All 32 lanes.
pub const FULL_MASK: u32 = 0xffff_ffff;

#[cfg(target_arch = "nvptx64")]
#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn vote_ballot(mask: i32, predicate: bool) -> i32;
    #[link_name = "llvm.nvvm.vote.any.sync"]
    fn vote_any(mask: i32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.vote.all.sync"]
    fn vote_all(mask: i32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn bar_warp_sync(mask: i32);
}

macro_rules! shuffle {
    ($(#[$doc:meta])* $name:ident, $name_f32:ident, $within:ident, $argument:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// - *converged*: all lanes of `mask` execute it, and the calling lane is one of them.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $name(mask: u32, value: u32, $argument: u32) -> u32 {
            // SAFETY: the same contract: a warp is one group of 32.
            unsafe { crate::lanes::$within::<32>(mask, value, $argument) }
        }

        /// The same for an f32.
        ///
        /// # Safety
        /// - *converged*: all lanes of `mask` execute it, and the calling lane is one of them.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $name_f32(mask: u32, value: f32, $argument: u32) -> f32 {
            // SAFETY: the same contract.
            f32::from_bits(unsafe { $name(mask, value.to_bits(), $argument) })
        }
    };
}

shuffle!(
    /// `shfl.sync.bfly.b32`: the value of lane `lane ^ lane_mask`.
    shuffle_xor, shuffle_xor_f32, shuffle_xor_within, lane_mask);
shuffle!(
    /// `shfl.sync.idx.b32`: the value of lane `source & 31`.
    shuffle_idx, shuffle_idx_f32, shuffle_idx_within, source);
shuffle!(
    /// `shfl.sync.up.b32`: the value of lane `lane - delta`, or the lane's own where there is none.
    shuffle_up, shuffle_up_f32, shuffle_up_within, delta);
shuffle!(
    /// `shfl.sync.down.b32`: the value of lane `lane + delta`, or the lane's own where there is none.
    shuffle_down, shuffle_down_f32, shuffle_down_within, delta);

/// `vote.sync.ballot.b32`: bit i is lane i's predicate (0 for lanes outside the mask).
///
/// # Safety
/// - *converged*: all lanes of `mask` execute it, and the calling lane is one of them.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn ballot(mask: u32, predicate: bool) -> u32 {
    device!({
        // SAFETY: convergence is the caller's promise.
        unsafe { vote_ballot(mask as i32, predicate) as u32 }
    } else {
        crate::sim::vote("vote.sync.ballot", mask, predicate, |ballot, _| ballot)
    })
}

/// `vote.sync.any.pred`: whether any lane's predicate holds.
///
/// # Safety
/// - *converged*: all lanes of `mask` execute it, and the calling lane is one of them.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn any(mask: u32, predicate: bool) -> bool {
    device!({
        // SAFETY: convergence is the caller's promise.
        unsafe { vote_any(mask as i32, predicate) }
    } else {
        crate::sim::vote("vote.sync.any", mask, predicate, |ballot, _| u32::from(ballot != 0)) != 0
    })
}

/// `vote.sync.all.pred`: whether every lane's predicate holds.
///
/// # Safety
/// - *converged*: all lanes of `mask` execute it, and the calling lane is one of them.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn all(mask: u32, predicate: bool) -> bool {
    device!({
        // SAFETY: convergence is the caller's promise.
        unsafe { vote_all(mask as i32, predicate) }
    } else {
        crate::sim::vote("vote.sync.all", mask, predicate, |ballot, mask| u32::from(ballot == mask)) != 0
    })
}

/// `bar.warp.sync mask;` Waits for the lanes of `mask`; their earlier memory writes are then visible to each other.
///
/// # Safety
/// - *converged*: all lanes of `mask` execute it, and the calling lane is one of them.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn sync_warp(mask: u32) {
    device!({
        // SAFETY: convergence is the caller's promise.
        unsafe { bar_warp_sync(mask as i32) }
    } else {
        crate::sim::sync_warp("bar.warp.sync", mask)
    })
}

/// Sum over groups of `WIDTH` neighbouring lanes (a power of two up to 32); every lane gets its group's sum.
///
/// A fixed butterfly, so the result does not depend on timing, and all lanes of a group get the same bits.
///
/// # Safety
/// - *converged*: all 32 lanes execute it.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn sum_f32<const WIDTH: u32>(mut value: f32) -> f32 {
    let mut step = WIDTH / 2;
    while step > 0 {
        // SAFETY: all lanes take part — the caller.
        value += unsafe { shuffle_xor_f32(FULL_MASK, value, step) };
        step /= 2;
    }
    value
}

/// Maximum over groups of `WIDTH` neighbouring lanes; NaN is ignored unless all are NaN (`max.f32`).
///
/// # Safety
/// - *converged*: all 32 lanes execute it.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn max_f32<const WIDTH: u32>(mut value: f32) -> f32 {
    let mut step = WIDTH / 2;
    while step > 0 {
        // SAFETY: all lanes take part — the caller.
        value = crate::math::max(value, unsafe { shuffle_xor_f32(FULL_MASK, value, step) });
        step /= 2;
    }
    value
}

/// Maximum over the warp: by `redux.sync.max.u32` where there is one, else by shuffles, as in the simulator.
///
/// # Safety
/// - *converged*: all 32 lanes execute it.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn max_u32(value: u32) -> u32 {
    // SAFETY: all lanes take part — the caller.
    unsafe {
        #[cfg(all(target_arch = "nvptx64", not(lacks_redux)))]
        {
            crate::lanes::redux_max(FULL_MASK, value)
        }
        #[cfg(not(all(target_arch = "nvptx64", not(lacks_redux))))]
        {
            let (mut value, mut step) = (value, 16);
            while step > 0 {
                value = value.max(shuffle_xor(FULL_MASK, value, step));
                step /= 2;
            }
            value
        }
    }
}
