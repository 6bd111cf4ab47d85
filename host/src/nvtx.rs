//! Ranges on the timeline of a profiler that reads NVTX (Nsight Systems, Nsight Compute): feature `nvtx`, without which
//! they are nothing.
//!
//! A range spans what the host does: the checks and the launch. The profiler finds the kernels that were launched in
//! it. Work replayed from a graph has none, since the host does not come by.

use std::marker::PhantomData;

/// A range that is open until it is dropped, on the thread that opened it.
pub struct Range(PhantomData<*const ()>);

/// Opens a range. `name` holds no NUL.
pub fn range(name: &'static str) -> Range {
    #[cfg(feature = "nvtx")]
    nvtx::range_push!("{name}");
    let _ = name;
    Range(PhantomData)
}

impl Drop for Range {
    fn drop(&mut self) {
        #[cfg(feature = "nvtx")]
        nvtx::range_pop!();
    }
}
