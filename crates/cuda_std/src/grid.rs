//! Programmatic dependent launch: a kernel starts while the one before it in the stream still runs. Floor sm_90a.

#[cfg(target_arch = "nvptx64")]
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
