//! Programmatic dependent launch: a kernel starts while the one before it in the stream still runs. Floor sm_90a, but
//! for how a kernel of all floors begins and ends: that is nothing below it, nor in the simulator, where kernels run
//! one after another.

#[cfg(all(target_arch = "nvptx64", not(lacks_dependent_launch)))]
#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.griddepcontrol.wait"]
    fn llvm_wait();
    #[link_name = "llvm.nvvm.griddepcontrol.launch.dependents"]
    fn llvm_launch_dependents();
}

/// `griddepcontrol.wait;` Waits until the kernels that this one depends on have ended and their writes are visible.
///
/// Before it a kernel may not read what they write, nor write what they read. Without such kernels it does nothing.
#[cfg(not(lacks_dependent_launch))]
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn wait() {
    device!({
        // SAFETY: no precondition.
        unsafe { llvm_wait() }
    } else {
        crate::sim::grid_wait()
    })
}

/// `griddepcontrol.launch_dependents;` Kernels that depend on this one may start once every block has said so or ended.
#[cfg(not(lacks_dependent_launch))]
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn launch_dependents() {
    device!({
        // SAFETY: no precondition.
        unsafe { llvm_launch_dependents() }
    } else {
        crate::sim::grid_launch_dependents()
    })
}

/// A part of a `#[grid_constant]` parameter: a load from memory each, so what is wanted often is kept elsewhere.
///
/// # Safety
/// - *in-bounds*, *aligned*: the parameter, whose address the kernel was given.
#[inline(always)]
pub unsafe fn load_parameter<T: Copy>(pointer: *const T) -> T {
    // SAFETY: the caller's promise; also in the simulator it is the launch's own memory, which nobody writes.
    unsafe { pointer.read() }
}

/// Blocks of a grid that leave most of a card of Hopper idle.
#[cfg(all(target_arch = "nvptx64", not(lacks_dependent_launch)))]
const FEW_BLOCKS: u32 = 64;

/// What a kernel begins with: [`wait`]. Of few blocks, [`launch_dependents`] then, so that the next kernel is there,
/// and has done what it can do early, when this one ends (`gpu/NOTES/launches.md`).
///
/// Of more, the next one's blocks would go where there is room first, and no longer evenly.
#[inline(always)]
pub fn begin() {
    begin_with(|| ());
}

/// What a kernel begins with that reads constants ahead: `early` loads what no kernel writes, into registers; then the
/// next one may start if it may so early, behind these loads, which it would delay otherwise; then [`wait`].
///
/// The simulator refuses other accesses to global memory in `early`.
#[cfg(not(lacks_dependent_launch))]
#[inline(always)]
pub fn begin_ahead<R>(early: impl FnOnce() -> R, next_may_start: bool) -> R {
    device!({
        let loaded = early();
        if next_may_start {
            launch_dependents();
        }
        wait();
        loaded
    } else {
        let _ = next_may_start;
        crate::sim::grid_ahead(true);
        let loaded = early();
        crate::sim::grid_ahead(false);
        loaded
    })
}

/// The same of a kernel that has something to do while the ones ahead still run: see [`begin_early`].
#[inline(always)]
pub fn begin_with(early: impl FnOnce()) {
    device!({
        #[cfg(not(lacks_dependent_launch))]
        {
            use crate::thread::{grid_dim_x, grid_dim_y, grid_dim_z};
            begin_early(early, grid_dim_x() * grid_dim_y() * grid_dim_z() <= FEW_BLOCKS);
        }
        #[cfg(lacks_dependent_launch)]
        let _ = early;
    } else {
        early();
    })
}

/// The same of a kernel that has something to do while the ones ahead still run, and knows whether the next one may
/// start.
///
/// `early` may not read what kernels ahead write, nor write what they read.
#[inline(always)]
pub fn begin_early(early: impl FnOnce(), next_may_start: bool) {
    device!({
        #[cfg(not(lacks_dependent_launch))]
        {
            early();
            wait();
            if next_may_start {
                launch_dependents();
            }
        }
        #[cfg(lacks_dependent_launch)]
        let _ = (early, next_may_start);
    } else {
        let _ = next_may_start;
        early();
    })
}

/// What a kernel of all floors says when it has little left to do: [`launch_dependents`]. The next one's blocks then
/// come as this one's end, where the multiprocessors are full of these; where there is room beside them they come at
/// once.
#[inline(always)]
pub fn near_end() {
    device!({
        #[cfg(not(lacks_dependent_launch))]
        launch_dependents();
    } else {})
}
