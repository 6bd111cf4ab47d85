//! What the lanes of a warp find out together beyond [`warp`](crate::warp): who is active, who holds the same value,
//! sums and extrema of integers in one instruction, shuffles among part of a warp.

#[cfg(target_arch = "nvptx64")]
#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.activemask"]
    fn llvm_activemask() -> i32;
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn shfl_bfly(mask: i32, value: i32, lane_mask: i32, clamp: i32) -> i32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn shfl_idx(mask: i32, value: i32, lane: i32, clamp: i32) -> i32;
    #[link_name = "llvm.nvvm.shfl.sync.up.i32"]
    fn shfl_up(mask: i32, value: i32, delta: i32, clamp: i32) -> i32;
    #[link_name = "llvm.nvvm.shfl.sync.down.i32"]
    fn shfl_down(mask: i32, value: i32, delta: i32, clamp: i32) -> i32;
}

#[cfg(all(target_arch = "nvptx64", not(lacks_redux)))]
#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.match.any.sync.i32"]
    fn llvm_match_any(mask: i32, value: i32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.add"]
    fn llvm_redux_add(value: i32, mask: i32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.umin"]
    fn llvm_redux_umin(value: i32, mask: i32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.umax"]
    fn llvm_redux_umax(value: i32, mask: i32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.min"]
    fn llvm_redux_min(value: i32, mask: i32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.max"]
    fn llvm_redux_max(value: i32, mask: i32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.and"]
    fn llvm_redux_and(value: i32, mask: i32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.or"]
    fn llvm_redux_or(value: i32, mask: i32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.xor"]
    fn llvm_redux_xor(value: i32, mask: i32) -> i32;
}

/// Keeps LLVM from cloning the `asm!` beside it into divergent branches: `asm!` is not marked convergent, this
/// intrinsic is, and a basic block is duplicated as a whole or not at all. ptxas drops the unused `activemask`.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub(crate) fn converge() {
    // SAFETY: reads which lanes are active.
    unsafe { llvm_activemask() };
}

/// `activemask.b32 d;` The lanes that execute this instruction together at this moment.
///
/// Hardware decides who is together: after a branch some lanes may still be on their way, so this is no mask for the
/// `sync` operations, only for what is right for any subset (aggregating an atomic).
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn activemask() -> u32 {
    device!({
        // SAFETY: reads which lanes are active.
        unsafe { llvm_activemask() as u32 }
    } else {
        crate::sim::activemask()
    })
}

macro_rules! shuffle_within {
    ($(#[$doc:meta])* $name:ident, $intrinsic:ident, $argument:ident, $clamp:literal, $mode:ident) => {
        $(#[$doc])*
        ///
        /// `WIDTH` is a power of two up to 32; the groups are the lanes `WIDTH·i .. WIDTH·(i + 1)`.
        ///
        /// # Safety
        /// - *converged*: all lanes of `mask` execute it, and the calling lane is one of them.
        /// - The source lane is in `mask`.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $name<const WIDTH: u32>(mask: u32, value: u32, $argument: u32) -> u32 {
            const { assert!(WIDTH.is_power_of_two() && WIDTH <= 32, "WIDTH is a power of two up to 32") };
            let clamp = (32 - WIDTH) << 8 | $clamp;
            device!({
                // SAFETY: convergence is the caller's promise.
                unsafe { $intrinsic(mask as i32, value as i32, $argument as i32, clamp as i32) as u32 }
            } else {
                crate::sim::shuffle(crate::sim::Shuffle::$mode, mask, value, $argument, clamp)
            })
        }
    };
}

shuffle_within!(
    /// `shfl.sync.bfly.b32`: the value of lane `lane ^ lane_mask`, or the lane's own if that is in a later group; lanes
    /// of earlier groups are read.
    shuffle_xor_within, shfl_bfly, lane_mask, 31, Xor);
shuffle_within!(
    /// `shfl.sync.idx.b32`: the value of lane `source % WIDTH` of the group.
    shuffle_idx_within, shfl_idx, source, 31, Index);
shuffle_within!(
    /// `shfl.sync.up.b32`: the value of the lane `delta` below, or the lane's own if that is outside the group.
    shuffle_up_within, shfl_up, delta, 0, Up);
shuffle_within!(
    /// `shfl.sync.down.b32`: the value of the lane `delta` above, or the lane's own if that is outside the group.
    shuffle_down_within, shfl_down, delta, 31, Down);

/// `match.any.sync.b32 d, value, mask;` The lanes of `mask` that hold the same value as this one. Floor sm_80 (sm_70).
///
/// # Safety
/// - *converged*: all lanes of `mask` execute it, and the calling lane is one of them.
#[cfg(not(lacks_redux))]
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn match_any(mask: u32, value: u32) -> u32 {
    device!({
        // SAFETY: convergence is the caller's promise.
        unsafe { llvm_match_any(mask as i32, value as i32) as u32 }
    } else {
        crate::sim::match_any(mask, value)
    })
}

macro_rules! redux {
    ($(#[$doc:meta])* $name:ident, $type:ty, $intrinsic:ident, $mode:ident, $ptx:literal) => {
        $(#[$doc])*
        ///
        #[doc = concat!("`", $ptx, " d, value, mask;` Every lane of the mask gets it. Floor sm_80.")]
        ///
        /// # Safety
        /// - *converged*: all lanes of `mask` execute it with the same mask, and the calling lane is one of them.
        #[cfg(not(lacks_redux))]
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $name(mask: u32, value: $type) -> $type {
            device!({
                // SAFETY: convergence is the caller's promise.
                unsafe { $intrinsic(value as i32, mask as i32) as $type }
            } else {
                crate::sim::redux(crate::sim::Redux::$mode, mask, value as u32) as $type
            })
        }
    };
}

redux!(
    /// Sum over the lanes of `mask`, wrapping.
    redux_add, u32, llvm_redux_add, Add, "redux.sync.add.s32");
redux!(
    /// Smallest over the lanes of `mask`.
    redux_min, u32, llvm_redux_umin, Min, "redux.sync.min.u32");
redux!(
    /// Largest over the lanes of `mask`.
    redux_max, u32, llvm_redux_umax, Max, "redux.sync.max.u32");
redux!(
    /// Smallest over the lanes of `mask`, signed.
    redux_min_i32, i32, llvm_redux_min, MinSigned, "redux.sync.min.s32");
redux!(
    /// Largest over the lanes of `mask`, signed.
    redux_max_i32, i32, llvm_redux_max, MaxSigned, "redux.sync.max.s32");
redux!(
    /// Bitwise and over the lanes of `mask`.
    redux_and, u32, llvm_redux_and, And, "redux.sync.and.b32");
redux!(
    /// Bitwise or over the lanes of `mask`.
    redux_or, u32, llvm_redux_or, Or, "redux.sync.or.b32");
redux!(
    /// Bitwise exclusive or over the lanes of `mask`.
    redux_xor, u32, llvm_redux_xor, Xor, "redux.sync.xor.b32");

/// `elect.sync _|p, mask;` Whether this lane is the one of `mask` that was chosen to do what one thread does for all.
/// Floor sm_90a.
///
/// # Safety
/// - *converged*: all lanes of `mask` execute it, and the calling lane is one of them.
#[cfg(not(lacks_tma))]
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn elect(mask: u32) -> bool {
    device!({
        converge();
        let chosen: u32;
        // SAFETY: convergence is the caller's promise.
        unsafe {
            core::arch::asm!("{{ .reg .pred p; elect.sync _|p, {}; selp.u32 {}, 1, 0, p; }}", in(reg32) mask,
                out(reg32) chosen, options(nomem, nostack));
        }
        chosen != 0
    } else {
        crate::sim::elect(mask)
    })
}
