//! Clusters of blocks that reach each other's shared memory (Hopper). Floor sm_90a.
//!
//! [`map_shared`] turns an address of the block's own shared memory into that of the same place in another block. A
//! block must not end while others may still access its memory: end with a cluster barrier.

#[cfg(target_arch = "nvptx64")]
#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.read.ptx.sreg.cluster.ctarank"]
    fn llvm_ctarank() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.cluster.nctarank"]
    fn llvm_nctarank() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.clusterid.x"]
    fn llvm_clusterid_x() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.nclusterid.x"]
    fn llvm_nclusterid_x() -> u32;
    #[link_name = "llvm.nvvm.barrier.cluster.arrive.aligned"]
    fn llvm_arrive();
    #[link_name = "llvm.nvvm.barrier.cluster.arrive.relaxed.aligned"]
    fn llvm_arrive_relaxed();
    #[link_name = "llvm.nvvm.barrier.cluster.wait.aligned"]
    fn llvm_wait();
}

macro_rules! special_register {
    ($(#[$doc:meta])* $name:ident, $intrinsic:ident, $variant:ident) => {
        $(#[$doc])*
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub fn $name() -> u32 {
            device!({
                // SAFETY: reading a special register has no precondition.
                unsafe { $intrinsic() }
            } else {
                crate::sim::cluster_register(crate::sim::ClusterRegister::$variant)
            })
        }
    };
}

special_register!(
    /// `%cluster_ctarank`: the block's index in its cluster, 0 without clusters.
    block_rank, llvm_ctarank, BlockRank);
special_register!(
    /// `%cluster_nctarank`: blocks in a cluster, 1 without clusters.
    num_blocks, llvm_nctarank, NumBlocks);
special_register!(
    /// `%clusterid.x`: index of the cluster in the grid.
    cluster_idx_x, llvm_clusterid_x, ClusterIdxX);
special_register!(
    /// `%nclusterid.x`: clusters in the grid.
    grid_dim_x, llvm_nclusterid_x, GridDimX);

/// `mapa.shared::cluster.u32 d, address, rank;` The address, for the functions of this module and whatever takes a
/// cluster address, of the same place in the shared memory of block `rank`.
///
/// # Safety
/// - `rank` is below [`num_blocks`]; *in-bounds(dynamic shared memory)*.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn map_shared(address: u32, rank: u32) -> u32 {
    device!({
        let mapped: u32;
        // SAFETY: address arithmetic.
        unsafe {
            core::arch::asm!("mapa.shared::cluster.u32 {}, {}, {};", out(reg32) mapped, in(reg32) address,
                in(reg32) rank, options(pure, nomem, nostack));
        }
        mapped
    } else {
        crate::sim::map_shared(address, rank)
    })
}

/// `barrier.cluster.arrive.aligned;` Comes to the cluster's barrier without waiting; releases the thread's writes to
/// those who wait.
///
/// # Safety
/// - *converged*: all lanes of the warp execute it, and all threads of the cluster that have not ended will.
/// - [`wait`] comes before the next arrival.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn arrive() {
    device!({
        // SAFETY: the caller's promise.
        unsafe { llvm_arrive() }
    } else {
        crate::sim::cluster_arrive("barrier.cluster.arrive", crate::atomic::Order::Release)
    })
}

/// `barrier.cluster.arrive.relaxed.aligned;` [`arrive`] that orders no memory accesses: for a cluster that only has to
/// be still there, and for mbarriers, of which [`fence_mbarrier_init`](crate::mbarrier::fence_mbarrier_init) tells the
/// others.
///
/// # Safety
/// As for [`arrive`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn arrive_relaxed() {
    device!({
        // SAFETY: the caller's promise.
        unsafe { llvm_arrive_relaxed() }
    } else {
        crate::sim::cluster_arrive("barrier.cluster.arrive.relaxed", crate::atomic::Order::Relaxed)
    })
}

/// `barrier.cluster.wait.aligned;` Waits until all threads of the cluster have arrived; acquires their released writes.
///
/// # Safety
/// - *converged*: all lanes of the warp execute it, after their [`arrive`] or [`arrive_relaxed`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn wait() {
    device!({
        // SAFETY: the caller's promise.
        unsafe { llvm_wait() }
    } else {
        crate::sim::cluster_wait("barrier.cluster.wait")
    })
}

/// [`arrive`], then [`wait`].
///
/// # Safety
/// As for both.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn sync() {
    // SAFETY: the same contract.
    unsafe {
        arrive();
        wait();
    }
}

macro_rules! access {
    ($load:ident, $store:ident, $type:ty, $suffix:literal) => {
        #[doc = concat!("`ld.shared::cluster", $suffix, " d, [address];`")]
        ///
        /// # Safety
        /// - *aligned(4)*; `address` is from [`map_shared`], its block has started (a cluster barrier) and not ended.
        /// - *initialised*: by a write and a cluster barrier before.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $load(address: u32) -> $type {
            device!({
                let value: $type;
                // SAFETY: the caller's promise.
                unsafe {
                    core::arch::asm!(concat!("ld.shared::cluster", $suffix, " {}, [{}];"), out(reg32) value,
                        in(reg32) address, options(nostack, readonly));
                }
                value
            } else {
                crate::sim::load_cluster(address, concat!("ld.shared::cluster", $suffix))
            })
        }

        #[doc = concat!("`st.shared::cluster", $suffix, " [address], value;`")]
        ///
        /// # Safety
        /// - *aligned(4)*; `address` is from [`map_shared`], its block has started (a cluster barrier) and not ended.
        /// - *exclusive*: no other thread touches it until the next cluster barrier.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $store(address: u32, value: $type) {
            device!({
                // SAFETY: the caller's promise.
                unsafe {
                    core::arch::asm!(concat!("st.shared::cluster", $suffix, " [{}], {};"), in(reg32) address,
                        in(reg32) value, options(nostack));
                }
            } else {
                crate::sim::store_cluster(address, value, concat!("st.shared::cluster", $suffix))
            })
        }
    };
}

access!(load_u32, store_u32, u32, ".b32");
access!(load_f32, store_f32, f32, ".f32");

/// `ld.shared::cluster.v4.b32 {r0, r1, r2, r3}, [address];`
///
/// # Safety
/// - *aligned(16)*; `address` is from [`map_shared`], its block has started (a cluster barrier) and not ended.
/// - *initialised*: by a write and a cluster barrier before.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load_x4(address: u32) -> [u32; 4] {
    device!({
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("ld.shared::cluster.v4.b32 {{{}, {}, {}, {}}}, [{}];", out(reg32) a, out(reg32) b,
                out(reg32) c, out(reg32) d, in(reg32) address, options(nostack, readonly));
        }
        [a, b, c, d]
    } else {
        crate::sim::load_cluster(address, "ld.shared::cluster.v4.b32")
    })
}

/// `st.shared::cluster.v4.b32 [address], {r0, r1, r2, r3};`
///
/// # Safety
/// - *aligned(16)*; `address` is from [`map_shared`], its block has started (a cluster barrier) and not ended.
/// - *exclusive*: no other thread touches it until the next cluster barrier.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn store_x4(address: u32, value: [u32; 4]) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("st.shared::cluster.v4.b32 [{}], {{{}, {}, {}, {}}};", in(reg32) address,
                in(reg32) value[0], in(reg32) value[1], in(reg32) value[2], in(reg32) value[3], options(nostack));
        }
    } else {
        crate::sim::store_cluster(address, value, "st.shared::cluster.v4.b32")
    })
}
