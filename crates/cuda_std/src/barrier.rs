//! The sixteen named barriers of a block, for part of its warps. Barrier 0 is the one of
//! [`sync_threads`](crate::thread::sync_threads).
//!
//! A barrier opens when `threads` threads have come, waiting ([`sync`]) or not ([`arrive`]): a warp counts with all its
//! 32 lanes. Writes of all that came are visible to those who waited. `arrive` by one group and `sync` by another hand
//! something over without making the first wait.

#[cfg(target_arch = "nvptx64")]
#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    fn llvm_sync(id: i32, threads: i32);
    #[link_name = "llvm.nvvm.barrier.cta.arrive.aligned.count"]
    fn llvm_arrive(id: i32, threads: i32);
}

/// `bar.sync id, threads;` Waits until `threads` threads have come to barrier `id`.
///
/// # Safety
/// - *converged*: all lanes of the warp execute it.
/// - `id` is below 16; `threads` is a multiple of 32, the same in every call until the barrier opens.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn sync(id: u32, threads: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { llvm_sync(id as i32, threads as i32) }
    } else {
        crate::sim::barrier("bar.sync", id, Some(threads), crate::sim::Arrival::Wait)
    })
}

/// `bar.arrive id, threads;` Comes to barrier `id` without waiting.
///
/// # Safety
/// - *converged*: all lanes of the warp execute it.
/// - `id` is below 16; `threads` is a multiple of 32, the same in every call until the barrier opens.
/// - The warp does not come a second time before the barrier has opened.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn arrive(id: u32, threads: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { llvm_arrive(id as i32, threads as i32) }
    } else {
        crate::sim::barrier("bar.arrive", id, Some(threads), crate::sim::Arrival::Count)
    })
}
