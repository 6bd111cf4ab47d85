//! Fences: between threads (`acq_rel`) and between the ways of accessing memory (`proxy`).
//!
//! TMA and `wgmma` access memory through the *async proxy*. What a thread wrote with ordinary stores is visible there
//! only after that thread's proxy fence; what TMA wrote is visible to those who waited for its mbarrier.

macro_rules! fence {
    ($(#[$doc:meta])* $name:ident, $ptx:literal, $lacking:ident, $op:ident) => {
        #[doc = concat!("`", $ptx, ";`")]
        $(#[$doc])*
        #[cfg(not($lacking))]
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub fn $name() {
            device!({
                // SAFETY: a fence has no precondition.
                unsafe { core::arch::asm!(concat!($ptx, ";"), options(nostack)) }
            } else {
                crate::sim::fence(crate::sim::Fence::$op)
            })
        }
    };
}

fence!(
    /// Orders this thread's accesses before and after it, for the threads of its block. Floor sm_80 (sm_70).
    acq_rel_block, "fence.acq_rel.cta", lacks_memory_model, AcqRelBlock);
fence!(
    /// The same for the threads of its cluster. Floor sm_90a.
    acq_rel_cluster, "fence.acq_rel.cluster", lacks_clusters, AcqRelCluster);
fence!(
    /// The same for all threads of the device. Floor sm_80 (sm_70); [`fence_device`](crate::atomic::fence_device) on
    /// every floor.
    acq_rel_device, "fence.acq_rel.gpu", lacks_memory_model, AcqRelDevice);
fence!(
    /// Between ordinary and asynchronous accesses of shared and global memory. Floor sm_90a.
    proxy_async, "fence.proxy.async", lacks_tma, ProxyAsync);
fence!(
    /// The same for the block's shared memory alone. Floor sm_90a.
    proxy_async_shared, "fence.proxy.async.shared::cta", lacks_tma, ProxyAsyncShared);
fence!(
    /// The same for global memory alone. Floor sm_90a.
    proxy_async_global, "fence.proxy.async.global", lacks_tma, ProxyAsyncGlobal);
