//! `cp.async`: each thread copies 4, 8 or 16 bytes from global to shared memory without waiting. Floor sm_80.
//!
//! Copies belong to the group that the thread commits next; groups complete in order. A wait covers the copies of the
//! calling thread alone: what other threads copied is visible after a wait of theirs and a barrier. `ca` keeps the data
//! in L1, `cg` only in L2. The `fill` forms read the first `source_bytes` of the source and write zeros for the rest,
//! so that a tail needs no branch.

macro_rules! copy {
    ($name:ident, $fill:ident, $bytes:literal, $ptx:literal) => {
        #[doc = concat!("`", $ptx, " [shared], [global], ", $bytes, ";`")]
        ///
        /// # Safety
        #[doc = concat!("- *aligned(", $bytes, ")* both; *in-bounds(dynamic shared memory)* and *in-bounds(the buffer of `global`)*.")]
        /// - *initialised(by an earlier kernel or copy)*: `global`.
        /// - *exclusive*: nobody touches the shared bytes before this thread has waited, and others after a barrier
        ///   too.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $name<T>(shared: u32, global: *const T) {
            device!({
                // SAFETY: the caller's promise.
                unsafe {
                    core::arch::asm!(concat!($ptx, " [{}], [{}], ", $bytes, ";"), in(reg32) shared, in(reg64) global,
                        options(nostack));
                }
            } else {
                crate::sim::cp_async(shared, global.cast(), $bytes, $bytes)
            })
        }

        #[doc = concat!("`", $ptx, " [shared], [global], ", $bytes, ", source_bytes;` Zeros after `source_bytes`.")]
        ///
        /// # Safety
        #[doc = concat!("- *aligned(", $bytes, ")* both; *in-bounds(dynamic shared memory)*; of `global` only `source_bytes` bytes are read.")]
        #[doc = concat!("- `source_bytes` is at most ", $bytes, ".")]
        /// - *initialised(by an earlier kernel or copy)*: the bytes that are read.
        /// - *exclusive*: nobody touches the shared bytes before this thread has waited, and others after a barrier
        ///   too.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $fill<T>(shared: u32, global: *const T, source_bytes: u32) {
            device!({
                // SAFETY: the caller's promise.
                unsafe {
                    core::arch::asm!(concat!($ptx, " [{}], [{}], ", $bytes, ", {};"), in(reg32) shared,
                        in(reg64) global, in(reg32) source_bytes, options(nostack));
                }
            } else {
                crate::sim::cp_async(shared, global.cast(), $bytes, source_bytes)
            })
        }
    };
}

copy!(ca_4, ca_4_fill, 4, "cp.async.ca.shared.global");
copy!(ca_8, ca_8_fill, 8, "cp.async.ca.shared.global");
copy!(ca_16, ca_16_fill, 16, "cp.async.ca.shared.global");
copy!(cg_16, cg_16_fill, 16, "cp.async.cg.shared.global");

#[cfg(target_arch = "nvptx64")]
#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.cp.async.commit.group"]
    fn llvm_commit_group();
    #[link_name = "llvm.nvvm.cp.async.wait.group"]
    fn llvm_wait_group(pending: i32);
    #[link_name = "llvm.nvvm.cp.async.wait.all"]
    fn llvm_wait_all();
}

/// `cp.async.commit_group;` The thread's copies since the last commit become a group, also where there were none.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn commit_group() {
    device!({
        // SAFETY: no precondition.
        unsafe { llvm_commit_group() }
    } else {
        crate::sim::cp_async_commit_group()
    })
}

/// `cp.async.wait_group N;` Waits until at most the `N` newest of the thread's groups are under way.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn wait_group<const N: u32>() {
    device!({
        // SAFETY: no precondition.
        unsafe { llvm_wait_group(const { N as i32 }) }
    } else {
        crate::sim::cp_async_wait_group(N)
    })
}

/// `cp.async.wait_all;` Waits for all copies of the thread, committed or not.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn wait_all() {
    device!({
        // SAFETY: no precondition.
        unsafe { llvm_wait_all() }
    } else {
        crate::sim::cp_async_wait_all()
    })
}

/// `cp.async.mbarrier.arrive.noinc.shared.b64 [barrier];` Arrives at the barrier once the thread's copies so far are
/// done.
///
/// The barrier's count includes this arrival (`noinc`).
///
/// # Safety
/// - *initialised(by [`mbarrier::init`](crate::mbarrier::init) and a barrier)*, *aligned(8)*.
/// - The barrier's current phase still expects an arrival.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn mbarrier_arrive_noinc(barrier: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("cp.async.mbarrier.arrive.noinc.shared.b64 [{}];", in(reg32) barrier, options(nostack));
        }
    } else {
        crate::sim::cp_async_mbarrier_arrive_noinc(barrier)
    })
}
