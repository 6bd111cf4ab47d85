//! Barriers in shared memory that count arrivals and bytes of asynchronous copies.
//!
//! An mbarrier is 8 bytes of shared memory, 8-byte aligned. A *phase* completes when the expected arrivals have come
//! and the bytes that were announced ([`arrive_expect_tx`]) have been copied; then the next phase begins with the same
//! count. Waiting names the phase by its parity: the first has parity 0, and a fresh barrier counts as having completed
//! a phase of parity 1. A pipeline of s stages therefore waits in round i for `full[i % s]` with parity `(i / s) & 1`,
//! and for `empty[i % s]` with the opposite.
//!
//! A waiter may not fall two phases behind: it could not tell them apart. Waits see the writes of those who arrived
//! before.

/// `mbarrier.init.shared.b64 [barrier], count;` Floor sm_80.
///
/// Others may use it after a block barrier; TMA and other blocks of a cluster after [`fence_mbarrier_init`] and a
/// barrier.
///
/// # Safety
/// - *aligned(8)*, *in-bounds(dynamic shared memory)*, *exclusive*.
/// - `count` is 1 to 2^20 - 1.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn init(barrier: u32, count: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("mbarrier.init.shared.b64 [{}], {};", in(reg32) barrier, in(reg32) count,
                options(nostack));
        }
    } else {
        crate::sim::mbarrier_init(barrier, count)
    })
}

/// `mbarrier.inval.shared.b64 [barrier];` Ends its life: the memory may be used for something else. Floor sm_80.
///
/// # Safety
/// - *initialised(by [`init`])*, *exclusive*: nobody arrives or waits any more.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn invalidate(barrier: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { core::arch::asm!("mbarrier.inval.shared.b64 [{}];", in(reg32) barrier, options(nostack)) }
    } else {
        crate::sim::mbarrier_invalidate(barrier)
    })
}

/// `mbarrier.arrive.shared.b64 state, [barrier];` One arrival; releases the thread's earlier writes to the block's
/// waiters. Floor sm_80.
///
/// # Safety
/// - *initialised(by [`init`] and a barrier)*.
/// - The current phase still expects an arrival.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn arrive(barrier: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("{{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [{}]; }}", in(reg32) barrier,
                options(nostack));
        }
    } else {
        crate::sim::mbarrier_arrive(barrier)
    })
}

/// `mbarrier.test_wait.parity.shared.b64 p, [barrier], parity;` Whether the phase of that parity has completed, without
/// waiting. Floor sm_80.
///
/// # Safety
/// - *initialised(by [`init`] and a barrier)*; the phase asked for is the current or the one before.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn test_wait_parity(barrier: u32, parity: u32) -> bool {
    device!({
        let done: u32;
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!(
                "{{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [{}], {}; selp.u32 {}, 1, 0, p; }}",
                in(reg32) barrier, in(reg32) parity, out(reg32) done, options(nostack));
        }
        done != 0
    } else {
        crate::sim::mbarrier_test_wait_parity(barrier, parity)
    })
}

macro_rules! bytes {
    ($($item:item)*) => {
        $(#[cfg(not(lacks_tma))] $item)*
    };
}

bytes! {

/// `mbarrier.arrive.expect_tx.shared.b64 state, [barrier], bytes;` Announces bytes of asynchronous copies to the
/// current phase, then arrives. Floor sm_90a.
///
/// # Safety
/// - *initialised(by [`init`] and a barrier)*.
/// - The current phase still expects an arrival, and its bytes stay below 2^20.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn arrive_expect_tx(barrier: u32, bytes: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("{{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [{}], {}; }}",
                in(reg32) barrier, in(reg32) bytes, options(nostack));
        }
    } else {
        crate::sim::mbarrier_arrive_expect_tx(barrier, bytes)
    })
}

/// `mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [barrier], bytes;` Announces bytes without arriving. Floor sm_90a.
///
/// # Safety
/// - *initialised(by [`init`] and a barrier)*.
/// - The current phase cannot complete meanwhile (an arrival is missing), and its bytes stay below 2^20.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn expect_tx(barrier: u32, bytes: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{}], {};", in(reg32) barrier,
                in(reg32) bytes, options(nostack));
        }
    } else {
        crate::sim::mbarrier_expect_tx(barrier, bytes)
    })
}

/// `mbarrier.arrive.shared::cluster.b64 _, [barrier];` One arrival at the barrier of any block of the cluster; its
/// address is from [`cluster::map_shared`](crate::cluster::map_shared). Floor sm_90a.
///
/// It says that this thread has come this far: what it has read may be overwritten. What it wrote is not released to
/// the other block; that takes [`arrive_remote_release`], which waits until all of the thread's writes are visible
/// everywhere (`MEMBAR.ALL.GPU`, about a microsecond).
///
/// # Safety
/// - *initialised(by that block's [`init`], [`fence_mbarrier_init`] and a cluster barrier)*; that block has not ended.
/// - The current phase still expects an arrival.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn arrive_remote(barrier: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("mbarrier.arrive.shared::cluster.b64 _, [{}];", in(reg32) barrier, options(nostack));
        }
    } else {
        crate::sim::mbarrier_arrive_remote(barrier)
    })
}

/// `mbarrier.arrive.release.cluster.shared::cluster.b64 _, [barrier];` [`arrive_remote`] that also releases the
/// thread's writes to those who wait with [`wait_parity_cluster`]. Floor sm_90a.
///
/// # Safety
/// As for [`arrive_remote`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn arrive_remote_release(barrier: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{}];", in(reg32) barrier,
                options(nostack));
        }
    } else {
        crate::sim::mbarrier_arrive_remote(barrier)
    })
}

/// `mbarrier.try_wait.parity.shared.b64 p, [barrier], parity;` Whether the phase of that parity has completed; waits
/// for it up to a time that the hardware chooses. Floor sm_90a.
///
/// # Safety
/// - *initialised(by [`init`] and a barrier)*; the phase asked for is the current or the one before.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn try_wait_parity(barrier: u32, parity: u32) -> bool {
    device!({
        let done: u32;
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!(
                "{{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [{}], {}; selp.u32 {}, 1, 0, p; }}",
                in(reg32) barrier, in(reg32) parity, out(reg32) done, options(nostack));
        }
        done != 0
    } else {
        crate::sim::mbarrier_try_wait_parity(barrier, parity)
    })
}

/// `mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [barrier], parity;` [`try_wait_parity`] that also sees
/// what threads of other blocks of the cluster wrote before they arrived. Floor sm_90a.
///
/// # Safety
/// - *initialised(by [`init`] and a barrier)*; the phase asked for is the current or the one before.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn try_wait_parity_cluster(barrier: u32, parity: u32) -> bool {
    device!({
        let done: u32;
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!(
                "{{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [{}], {}; \
                 selp.u32 {}, 1, 0, p; }}",
                in(reg32) barrier, in(reg32) parity, out(reg32) done, options(nostack));
        }
        done != 0
    } else {
        crate::sim::mbarrier_try_wait_parity(barrier, parity)
    })
}

/// Waits until the phase of that parity has completed. Floor sm_90a.
///
/// # Safety
/// - *initialised(by [`init`] and a barrier)*; the phase asked for is the current or the one before.
/// - Those who complete the phase do not wait for this thread.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn wait_parity(barrier: u32, parity: u32) {
    // SAFETY: the same contract.
    while !unsafe { try_wait_parity(barrier, parity) } {}
}

/// [`wait_parity`] that also sees what other blocks of the cluster wrote before they arrived. Floor sm_90a.
///
/// # Safety
/// - *initialised(by [`init`] and a barrier)*; the phase asked for is the current or the one before.
/// - Those who complete the phase do not wait for this thread.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn wait_parity_cluster(barrier: u32, parity: u32) {
    // SAFETY: the same contract.
    while !unsafe { try_wait_parity_cluster(barrier, parity) } {}
}

/// `fence.mbarrier_init.release.cluster;` Makes the thread's [`init`]s visible to the other blocks of the cluster and
/// to TMA; a barrier still has to follow. Floor sm_90a.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn fence_mbarrier_init() {
    device!({
        // SAFETY: a fence has no precondition.
        unsafe { core::arch::asm!("fence.mbarrier_init.release.cluster;", options(nostack)) }
    } else {
        crate::sim::fence_mbarrier_init()
    })
}

}
