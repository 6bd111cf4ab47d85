//! The one place from which kernels are launched.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::Arc;

use abi::Arch;

use crate::cuda;
use crate::device::{Backend, Device};
use crate::error::Error;
use crate::param::{LaunchShape, MAX_PARAMS};
use crate::profile::{Place, Resources};
use crate::queue::Queue;
use crate::simulator::{Launch, Simulator, Together};
use crate::stream::Stream;

pub(crate) use crate::param::Param;

/// A kernel that is loaded and ready to be launched.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    kernel: Arc<Kernel>,
    dynamic_smem_bytes: u32,
    /// Blocks of a cluster in x; 1 without clusters.
    cluster: u32,
    /// Clusters that the device holds at a time; not known without clusters.
    clusters_at_a_time: u32,
    /// Whether blocks wait for each other, so that all must be there at once.
    all_at_once: bool,
}

/// What an [`Entry`] launches.
#[derive(Debug)]
struct Kernel {
    /// The operator that it belongs to.
    op: &'static str,
    name: &'static str,
    /// The card that it was loaded for.
    place: Place,
    code: Code,
}

/// Where the kernel is.
#[derive(Debug)]
enum Code {
    Cuda(cuda::EntryHandle, Resources),
    Simulated(Arc<dyn Simulator>, Arch),
}

impl Device {
    /// The kernel `entry` of an operator family, its image loaded if it was not yet, ready for `smem_bytes` of dynamic
    /// shared memory.
    pub(crate) fn entry(
        &self,
        family: &'static str,
        entry: &'static str,
        smem_bytes: u32,
    ) -> Result<Entry, Error> {
        let refused = |reason| Error::Unsupported { op: family, device: self.describe(), reason };
        let code = match self.backend() {
            Backend::Cpu => return Err(refused("the CPU has no kernels to load".into())),
            Backend::Cuda(_, modules) => {
                let (handle, resources) = modules.entry(family, self.arch(), entry, smem_bytes)?;
                Code::Cuda(handle, resources)
            }
            Backend::Simulated(simulator) if simulator.has_kernel(entry, self.arch()) => {
                Code::Simulated(simulator.clone(), self.arch())
            }
            Backend::Simulated(_) => return Err(refused(format!("the simulator has no kernel {entry}"))),
        };
        Ok(Entry::of_module(family, entry, self.place(), code, smem_bytes))
    }
}

impl Entry {
    /// A kernel of no family, that is there already.
    fn of_module(op: &'static str, name: &'static str, place: Place, code: Code, smem_bytes: u32) -> Self {
        let kernel = Arc::new(Kernel { op, name, place, code });
        let (cluster, clusters_at_a_time) = (1, 0);
        Entry { kernel, dynamic_smem_bytes: smem_bytes, cluster, clusters_at_a_time, all_at_once: false }
    }

    /// A kernel of PTX that the program has loaded itself.
    pub(crate) fn of_ptx(
        device: &Device,
        op: &'static str,
        name: &'static str,
        smem_bytes: u32,
        (handle, resources): (cuda::EntryHandle, Resources),
    ) -> Self {
        Entry::of_module(op, name, device.place(), Code::Cuda(handle, resources), smem_bytes)
    }

    /// A kernel that a simulator has.
    pub(crate) fn of_simulator(
        device: &Device,
        op: &'static str,
        name: &'static str,
        smem_bytes: u32,
        simulator: &Arc<dyn Simulator>,
    ) -> Self {
        let code = Code::Simulated(simulator.clone(), device.arch());
        Entry::of_module(op, name, device.place(), code, smem_bytes)
    }
}

thread_local! {
    static ENQUEUED: Cell<u64> = const { Cell::new(0) };
}

/// Kernels that this thread has enqueued so far: a run whose first one is refused has done nothing yet.
pub(crate) fn enqueued() -> u64 {
    ENQUEUED.get()
}

impl Entry {
    /// The same kernel, launched in clusters of so many blocks of `threads` threads in x, which divide every grid.
    pub(crate) fn in_clusters(self, cluster: u32, threads: u32, num_sms: u32) -> Result<Self, Error> {
        let clusters = match &self.kernel.code {
            Code::Cuda(handle, _) if cluster > 1 => {
                handle.clusters_at_a_time(threads, self.dynamic_smem_bytes, cluster)?
            }
            _ => num_sms / cluster,
        };
        Ok(Entry { cluster, clusters_at_a_time: clusters.max(1), ..self })
    }

    /// The same kernel, of whose blocks none begins before there is room for all: they wait for each other.
    pub(crate) fn all_at_once(self) -> Self {
        Entry { all_at_once: true, ..self }
    }

    /// Clusters for a kernel that stays on its multiprocessors and walks over so many tiles: see [`in_even_rounds`].
    pub(crate) fn clusters_for(&self, tiles: u64) -> u32 {
        in_even_rounds(tiles, self.clusters_at_a_time)
    }

    /// The rounds in which they do so, each of a tile for every cluster.
    pub(crate) fn rounds_of(&self, tiles: u64) -> u64 {
        tiles.div_ceil(self.clusters_at_a_time.max(1).into())
    }

    pub(crate) fn name(&self) -> &'static str {
        self.kernel.name
    }

    /// What the driver reports of the kernel; none where it is simulated, since nothing allots registers there.
    pub(crate) fn resources(&self) -> Option<Resources> {
        match &self.kernel.code {
            Code::Cuda(_, resources) => Some(*resources),
            Code::Simulated(..) => None,
        }
    }

    /// Blocks of `threads` threads that fit on a multiprocessor at a time; none where that is not known. It is for a
    /// report, which does without where the driver does not say.
    pub(crate) fn blocks_per_sm(&self, threads: u32) -> Option<u32> {
        match &self.kernel.code {
            Code::Cuda(handle, _) => handle.blocks_per_sm(threads, self.dynamic_smem_bytes).ok(),
            Code::Simulated(..) => None,
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
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(stream, grid, block, params, None) }
    }

    /// The same of a kernel that waits for those of the group's other ranks.
    ///
    /// # Safety
    /// - As for [`Entry::launch`].
    pub(crate) unsafe fn launch_with(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        block: [u32; 3],
        params: &[Param<'_>],
        together: Option<Together>,
    ) -> Result<(), Error> {
        if params.len() > MAX_PARAMS {
            let expected = format!("at most {MAX_PARAMS} parameters");
            return Err(Error::invalid(self.kernel.name, "params", expected, params.len().to_string()));
        }
        stream.expect_place(self.kernel.op, self.kernel.place)?;
        if grid.contains(&0) {
            return Ok(());
        }
        let (handle, queue) = match (&self.kernel.code, stream.queue()) {
            (Code::Cuda(handle, _), Queue::Cuda(queue)) => (handle, queue),
            (Code::Simulated(simulator, arch), Queue::Simulated(..)) => {
                let (entry, smem_bytes) = (self.kernel.name, self.dynamic_smem_bytes);
                let cluster = self.cluster;
                let launch =
                    Launch { entry, arch: *arch, grid, block, cluster, smem_bytes, params, together };
                if let Some(source) = simulator.refuses(&launch) {
                    return Err(Error::Launch { entry, grid, block, smem_bytes, source });
                }
                ENQUEUED.set(enqueued() + 1);
                // SAFETY: the caller's promise.
                return unsafe { simulator.launch(&launch) }.map_err(|report| {
                    let device = stream.device().describe();
                    Error::Simulation { entry, device, report }
                });
            }
            // Places that are equal are of one kind.
            _ => return Err(stream.of_another(self.kernel.op, self.kernel.place)),
        };
        let mut pointers: [*mut c_void; MAX_PARAMS] = [std::ptr::null_mut(); MAX_PARAMS];
        for (pointer, param) in std::iter::zip(&mut pointers, params) {
            // The driver only reads through it.
            *pointer = param.address().cast_mut();
        }
        let pointers = &mut pointers[..params.len()];
        let shape = LaunchShape {
            grid,
            block,
            cluster: self.cluster,
            smem_bytes: self.dynamic_smem_bytes,
            all_at_once: self.all_at_once,
        };
        // SAFETY: parameters and their meaning — the caller; they live until the call returns, which is when the driver
        // has copied them.
        unsafe { queue.launch(handle, shape, pointers) }.map_err(|failure| match failure {
            cuda::LaunchFailure::Launch(source) => {
                let (entry, smem_bytes) = (self.kernel.name, self.dynamic_smem_bytes);
                Error::Launch { entry, grid, block, smem_bytes, source }
            }
            cuda::LaunchFailure::Other(error) => error,
        })?;
        ENQUEUED.set(enqueued() + 1);
        Ok(())
    }
}

/// Clusters for so many tiles in as few rounds as there can be where `most` are held at a time: all begin at once, or
/// those that come late would have all their rounds still before them; and no more than each round has work for.
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
