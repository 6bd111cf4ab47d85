//! Where a thread is, and the barrier of its block.

macro_rules! special_register {
    ($(#[$doc:meta])* $name:ident, $intrinsic:ident, $register:literal, $host:ident) => {
        $(#[$doc])*
        #[inline(always)]
        pub fn $name() -> u32 {
            device!({
                // SAFETY: reading a special register has no precondition.
                unsafe { core::arch::nvptx::$intrinsic() as u32 }
            } else {
                crate::sim::register(crate::sim::Register::$host, $register)
            })
        }
    };
}

special_register!(
    /// `%tid.x`: index of the thread in its block.
    thread_idx_x, _thread_idx_x, "%tid.x", ThreadX);
special_register!(
    /// `%tid.y`.
    thread_idx_y, _thread_idx_y, "%tid.y", ThreadY);
special_register!(
    /// `%tid.z`.
    thread_idx_z, _thread_idx_z, "%tid.z", ThreadZ);
special_register!(
    /// `%ctaid.x`: index of the block in the grid.
    block_idx_x, _block_idx_x, "%ctaid.x", BlockX);
special_register!(
    /// `%ctaid.y`.
    block_idx_y, _block_idx_y, "%ctaid.y", BlockY);
special_register!(
    /// `%ctaid.z`.
    block_idx_z, _block_idx_z, "%ctaid.z", BlockZ);
special_register!(
    /// `%ntid.x`: threads in a block.
    block_dim_x, _block_dim_x, "%ntid.x", BlockDimX);
special_register!(
    /// `%ntid.y`.
    block_dim_y, _block_dim_y, "%ntid.y", BlockDimY);
special_register!(
    /// `%ntid.z`.
    block_dim_z, _block_dim_z, "%ntid.z", BlockDimZ);
special_register!(
    /// `%nctaid.x`: blocks in the grid.
    grid_dim_x, _grid_dim_x, "%nctaid.x", GridDimX);
special_register!(
    /// `%nctaid.y`.
    grid_dim_y, _grid_dim_y, "%nctaid.y", GridDimY);
special_register!(
    /// `%nctaid.z`.
    grid_dim_z, _grid_dim_z, "%nctaid.z", GridDimZ);

/// The thread's lane in its warp, for blocks of one dimension.
#[inline(always)]
pub fn lane() -> u32 {
    thread_idx_x() & 31
}

/// The thread's warp in its block, for blocks of one dimension.
#[inline(always)]
pub fn warp_idx() -> u32 {
    thread_idx_x() >> 5
}

#[cfg(target_arch = "nvptx64")]
#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.all"]
    fn barrier_all(id: i32);
}

/// `bar.sync 0;` Waits for all threads of the block; their earlier writes to shared and global memory are then visible
/// to the whole block.
///
/// An LLVM intrinsic, since those are marked convergent and `asm!` is not: LLVM would clone it into divergent branches.
///
/// # Safety
/// - *converged*: every thread of the block that has not returned executes this same barrier.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn sync_threads() {
    device!({
        // SAFETY: barrier 0 exists in every block; convergence is the caller's promise.
        unsafe { barrier_all(0) }
    } else {
        crate::sim::barrier("bar.sync", 0, None, crate::sim::Arrival::Wait)
    })
}

/// `%globaltimer`: nanoseconds of a clock that all multiprocessors share. Some cards renew it once in a microsecond.
#[inline(always)]
pub fn global_timer_ns() -> u64 {
    device!({
        let time: u64;
        // SAFETY: reading a special register has no precondition. Another value each time: not pure.
        unsafe { core::arch::asm!("mov.u64 {}, %globaltimer;", out(reg64) time, options(nomem, nostack)) };
        time
    } else {
        crate::sim::timer()
    })
}

/// The same value, of which the compiler knows nothing any more. `mov.u32 d, a;`
///
/// It starts the counter of a loop with barriers and large bodies: LLVM unrolls loops whose number of rounds it knows.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    device!({
        let same: u32;
        // SAFETY: register arithmetic.
        unsafe { core::arch::asm!("mov.u32 {}, {};", out(reg32) same, in(reg32) value, options(pure, nomem, nostack)) };
        same
    } else {
        core::hint::black_box(value)
    })
}
