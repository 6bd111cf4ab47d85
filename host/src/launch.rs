//! The one place from which kernels are launched.

use std::ffi::c_void;
use std::sync::Arc;

use abi::Arch;

use crate::device::cuda;
use crate::error::Error;
use crate::simulator::{Launch, Simulator};
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
    dynamic_smem_bytes: u32,
    /// Blocks of a cluster in x; 1 without clusters.
    cluster: u32,
    /// Clusters that the device holds at a time; not known without clusters.
    clusters_at_a_time: u32,
    kernel: Loaded,
}

/// Where the kernel is.
#[derive(Clone, Debug)]
enum Loaded {
    Cuda(cuda::EntryHandle, Resources),
    Simulated(Arc<dyn Simulator>, Arch),
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
        let kernel = Loaded::Cuda(handle, resources);
        Entry { name, dynamic_smem_bytes, cluster: 1, clusters_at_a_time: 0, kernel }
    }

    pub(crate) fn simulated(
        name: &'static str,
        dynamic_smem_bytes: u32,
        simulator: Arc<dyn Simulator>,
        arch: Arch,
    ) -> Self {
        let kernel = Loaded::Simulated(simulator, arch);
        Entry { name, dynamic_smem_bytes, cluster: 1, clusters_at_a_time: 0, kernel }
    }

    /// The same kernel, launched in clusters of so many blocks of `threads` threads in x, which divide every grid.
    pub(crate) fn in_clusters(self, cluster: u32, threads: u32, num_sms: u32) -> Self {
        let asked = match &self.kernel {
            Loaded::Cuda(handle, _) if cluster > 1 => {
                handle.clusters_at_a_time(threads, self.dynamic_smem_bytes, cluster).ok()
            }
            _ => None,
        };
        let clusters_at_a_time = asked.unwrap_or(num_sms / cluster).max(1);
        Entry { cluster, clusters_at_a_time, ..self }
    }

    /// Clusters for a kernel that stays on its multiprocessors and walks over so many tiles: see [`in_even_rounds`].
    pub(crate) fn clusters_for(&self, tiles: u64) -> u32 {
        in_even_rounds(tiles, self.clusters_at_a_time)
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// What the driver reports of the kernel; none where it is simulated, since nothing allots registers there.
    pub(crate) fn resources(&self) -> Option<Resources> {
        match &self.kernel {
            Loaded::Cuda(_, resources) => Some(*resources),
            Loaded::Simulated(..) => None,
        }
    }

    /// Blocks of `threads` threads that fit on a multiprocessor at a time; none where that is not known.
    pub(crate) fn blocks_per_sm(&self, threads: u32) -> Option<u32> {
        match &self.kernel {
            Loaded::Cuda(handle, _) => handle.blocks_per_sm(threads, self.dynamic_smem_bytes).ok(),
            Loaded::Simulated(..) => None,
        }
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
        params: &[Param<'_>],
    ) -> Result<(), Error> {
        if params.len() > MAX_PARAMS {
            let expected = format!("at most {MAX_PARAMS} parameters");
            return Err(Error::invalid(self.name, "params", expected, params.len().to_string()));
        }
        if grid.contains(&0) {
            return Ok(());
        }
        let (handle, queue) = match (&self.kernel, stream.queue()) {
            (Loaded::Cuda(handle, _), Queue::Cuda(queue)) if handle.is_of(queue) => (handle, queue),
            (Loaded::Simulated(simulator, arch), Queue::Simulated(queue))
                if Arc::ptr_eq(simulator, queue) =>
            {
                let (entry, smem_bytes) = (self.name, self.dynamic_smem_bytes);
                let cluster = self.cluster;
                let launch = Launch { entry, arch: *arch, grid, block, cluster, smem_bytes, params };
                // SAFETY: the caller's promise.
                return unsafe { simulator.launch(&launch) }.map_err(|report| {
                    let device = stream.device().describe();
                    Error::Simulation { entry, device, report }
                });
            }
            _ => {
                let got = stream.device().describe();
                return Err(Error::invalid(self.name, "stream", "a stream of the plan's device", got));
            }
        };
        let mut pointers: [*mut c_void; MAX_PARAMS] = [std::ptr::null_mut(); MAX_PARAMS];
        for (pointer, param) in std::iter::zip(&mut pointers, params) {
            // The driver only reads through it.
            *pointer = param.address().cast_mut();
        }
        let pointers = &mut pointers[..params.len()];
        // SAFETY: parameters and their meaning — the caller; they live until the call returns, which is when the driver
        // has copied them.
        unsafe { queue.launch(handle, grid, block, self.cluster, self.dynamic_smem_bytes, pointers) }.map_err(
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
const MAX_PARAMS: usize = 16;

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug)]
pub enum Param<'a> {
    /// A device address; 0 for a tensor that is not there.
    Address(u64),
    /// A struct, passed by value.
    Struct(&'a dyn abi::Params),
}

impl Param<'_> {
    /// The address of an optional tensor: null if there is none.
    pub(crate) fn optional(view: Option<&TensorViewMut<'_>>) -> Self {
        Param::Address(view.map_or(0, |view| view.address()))
    }

    /// Where the parameter's value is: what `cuLaunchKernel` is given.
    pub fn address(&self) -> *const c_void {
        match self {
            Param::Address(address) => (&raw const *address).cast(),
            Param::Struct(value) => (&raw const **value).cast(),
        }
    }

    /// Size of the parameter's value.
    pub fn bytes(&self) -> usize {
        match self {
            Param::Address(address) => size_of_val(address),
            Param::Struct(value) => size_of_val(*value),
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

/// Clusters for so many tiles in as few rounds as there can be where `most` are held at a time: all begin at once, or those that come late would have all
/// their rounds still before them; and no more than each round has work for.
fn in_even_rounds(tiles: u64, most: u32) -> u32 {
    let rounds = tiles.div_ceil(most.max(1).into()).max(1);
    tiles.div_ceil(rounds) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_cluster_more_than_rounds_have_work_for() {
        let table =
            [(0, 30, 0), (1, 30, 1), (30, 30, 30), (31, 30, 16), (76, 30, 26), (1024, 66, 64), (5, 1, 1)];
        for (tiles, most, clusters) in table {
            assert_eq!(in_even_rounds(tiles, most), clusters, "{tiles} {most}");
            assert!(tiles.div_ceil(u64::from(clusters.max(1))) == tiles.div_ceil(u64::from(most)));
        }
        assert_eq!(in_even_rounds(u64::from(u32::MAX), u32::MAX), u32::MAX);
    }
}
