//! The one place from which kernels are launched.

use std::ffi::c_void;

use crate::device::cuda;
use crate::error::Error;
use crate::stream::{Queue, Stream};
use crate::tensor::{TensorView, TensorViewMut};

/// What a kernel takes of a multiprocessor, as the driver reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// 32-bit registers per thread.
    pub registers: u32,
    /// Local memory per thread in bytes: not zero means spills.
    pub local_bytes: u32,
    /// Most threads of a block that it can be launched with.
    pub max_threads: u32,
    /// Shared memory of a block in bytes, static and dynamic.
    pub smem_bytes: u32,
}

/// A kernel that is loaded and ready to be launched.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    name: &'static str,
    resources: Resources,
    dynamic_smem_bytes: u32,
    handle: cuda::EntryHandle,
}

impl Entry {
    // Unused in a build without CUDA, which has no `EntryHandle` to make one of.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code))]
    pub(crate) fn new(
        name: &'static str,
        resources: Resources,
        dynamic_smem_bytes: u32,
        handle: cuda::EntryHandle,
    ) -> Self {
        Entry { name, resources, dynamic_smem_bytes, handle }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn resources(&self) -> Resources {
        self.resources
    }

    /// Blocks of `threads` threads that fit on a multiprocessor at a time.
    pub(crate) fn blocks_per_sm(&self, threads: u32) -> Result<u32, Error> {
        self.handle.blocks_per_sm(threads, self.dynamic_smem_bytes)
    }

    /// Enqueues the kernel; nothing if the grid is empty.
    ///
    /// # Safety
    /// - `params` are what the entry point declares, in order — `abi` and the test `entry_points` tie the two.
    /// - The kernel is sound with their values: pointers in bounds for its sizes and strides, as the operator's `run`
    ///   checked.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        block: [u32; 3],
        params: &mut [Param<'_>],
    ) -> Result<(), Error> {
        if grid.contains(&0) {
            return Ok(());
        }
        let Queue::Cuda(queue) = stream.queue() else {
            let got = stream.device().describe();
            return Err(Error::invalid(self.name, "stream", "a stream of the plan's device", got));
        };
        let mut pointers: [*mut c_void; MAX_PARAMS] = [std::ptr::null_mut(); MAX_PARAMS];
        for (pointer, param) in std::iter::zip(&mut pointers, params.iter_mut()) {
            *pointer = param.address();
        }
        let pointers = &mut pointers[..params.len()];
        // SAFETY: parameters and their meaning — the caller; they live until the call returns, which is when the driver
        // has copied them.
        unsafe { queue.launch(&self.handle, grid, block, self.dynamic_smem_bytes, pointers) }.map_err(
            |failure| match failure {
                cuda::LaunchFailure::Launch(source) => {
                    let (entry, smem_bytes) = (self.name, self.dynamic_smem_bytes);
                    Error::Launch { entry, grid, block, smem_bytes, source }
                }
                cuda::LaunchFailure::Other(error) => error,
            },
        )
    }
}

/// Most parameters of a kernel.
const MAX_PARAMS: usize = 12;

/// A parameter of a kernel: a device address, or a struct of `abi` by reference.
pub(crate) enum Param<'a> {
    Address(u64),
    Struct(&'a dyn abi::Params),
}

impl Param<'_> {
    /// The address of an optional tensor: null if there is none.
    pub(crate) fn optional(view: Option<&TensorViewMut<'_>>) -> Self {
        Param::Address(view.map_or(0, |view| view.address()))
    }

    fn address(&mut self) -> *mut c_void {
        match self {
            Param::Address(address) => (address as *mut u64).cast(),
            Param::Struct(value) => (*value as *const dyn abi::Params).cast::<c_void>().cast_mut(),
        }
    }
}

impl From<TensorView<'_>> for Param<'_> {
    fn from(view: TensorView<'_>) -> Self {
        Param::Address(view.address())
    }
}

impl From<&TensorViewMut<'_>> for Param<'_> {
    fn from(view: &TensorViewMut<'_>) -> Self {
        Param::Address(view.address())
    }
}

impl<'a, P: abi::Params> From<&'a P> for Param<'a> {
    fn from(value: &'a P) -> Self {
        Param::Struct(value)
    }
}
