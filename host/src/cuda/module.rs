//! Modules and their kernels.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

use abi::Arch;
use cuda_loader::driver::sys::{CUfunction, CUmodule};
use cuda_loader::driver::{self, FuncAttribute};

use super::recording::NoRecording;
use super::{Context, failed, primary};
use crate::error::{DriverError, Error};
use crate::images::{Image, PtxModule, cubin_runs_on};
use crate::profile::Resources;
use crate::trace;

/// A kernel's function, which its module keeps alive.
#[derive(Clone, Debug)]
pub(crate) struct EntryHandle {
    pub(super) function: CUfunction,
    module: Arc<Module>,
}

// SAFETY: function handles may be used from any thread whose current context is theirs — the driver's own rule.
unsafe impl Send for EntryHandle {}
// SAFETY: as above.
unsafe impl Sync for EntryHandle {}

impl EntryHandle {
    /// Whether it may be started before the kernel ahead of it in the stream has ended.
    pub(super) fn overlaps(&self) -> bool {
        self.module.overlaps
    }

    /// Blocks of `threads` threads that fit on a multiprocessor at a time.
    pub(crate) fn blocks_per_sm(&self, threads: u32, smem_bytes: u32) -> Result<u32, Error> {
        self.module.context.enter()?;
        // SAFETY: the module keeps the function alive.
        unsafe { driver::occupancy_max_active_blocks(self.function, threads, smem_bytes as usize) }
            .map_err(failed("cuOccupancyMaxActiveBlocksPerMultiprocessor"))
    }

    /// Clusters of blocks of `threads` threads that the card holds at a time.
    pub(crate) fn clusters_at_a_time(
        &self,
        threads: u32,
        smem_bytes: u32,
        cluster: u32,
    ) -> Result<u32, Error> {
        self.module.context.enter()?;
        // SAFETY: the module keeps the function alive.
        unsafe { driver::occupancy_max_active_clusters(self.function, threads, smem_bytes, cluster) }
            .map_err(failed("cuOccupancyMaxActiveClusters"))
    }
}

#[derive(Debug)]
struct Module {
    module: CUmodule,
    /// Whether its kernels may be started before the one ahead of them in the stream has ended.
    overlaps: bool,
    context: Arc<Context>,
}

// SAFETY: as for EntryHandle.
unsafe impl Send for Module {}
// SAFETY: as for EntryHandle.
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        // While a graph is recorded its kernels cannot be waited for: then the module stays, until its context goes. So
        // it does where the driver fails, and nobody is there to be told; an error of the device's work stays with the
        // context, for whoever uses that next.
        let Some(_no_recording) = NoRecording::begin() else { return };
        if self.context.enter().is_ok() && primary::synchronize().is_ok() {
            // SAFETY: loaded in Modules::module or Modules::load; every EntryHandle of it is gone, as each holds the
            // Arc, no graph has its kernels, as each holds its device, and none of them is still queued.
            let _ = unsafe { driver::module_unload(self.module) };
        }
    }
}

/// The first CUDA version whose graphs keep the overlap of launches.
const OVERLAP_DRIVER: (u32, u32) = (12, 3);

/// Whether each kernel waits for the one ahead of it, as `#[kernel]` makes those for Hopper do.
fn all_kernels_wait(ptx: &str) -> bool {
    let mut kernels = ptx.split(".entry ").skip(1).peekable();
    kernels.peek().is_some() && kernels.all(|kernel| kernel.contains("griddepcontrol.wait;"))
}

/// The images of a build, of which the modules are loaded that operators want.
pub(crate) struct Modules {
    context: Arc<Context>,
    images: &'static [Image],
    /// By name and floor.
    loaded: Mutex<HashMap<(&'static str, Arch), Arc<Module>>>,
    /// What is none of the build's.
    own: Mutex<Vec<Arc<Module>>>,
}

/// PTX that a program has loaded itself.
#[derive(Clone, Debug)]
pub(crate) struct LoadedModule(Arc<Module>);

impl Modules {
    pub(crate) fn new(context: Arc<Context>, images: &'static [Image]) -> Self {
        Modules { context, images, loaded: Mutex::default(), own: Mutex::default() }
    }

    pub(crate) fn entry(
        &self,
        family: &'static str,
        arch: Arch,
        name: &'static str,
        smem_bytes: u32,
    ) -> Result<(EntryHandle, Resources), Error> {
        let module = self.module(family, arch, name)?;
        let refused = |source: DriverError| {
            let log = format!("it has no entry {name}");
            Error::Image { family, arch, log, source }
        };
        self.entry_of(module, family, name, smem_bytes, refused)
    }

    /// PTX that is no image of the build's. It stays loaded as long as the device is there, as graphs may have its
    /// kernels.
    pub(crate) fn load(&self, op: &'static str, ptx: &str, target: &str) -> Result<LoadedModule, Error> {
        self.context.enter()?;
        let driver_version = self.context.profile.driver.unwrap_or((0, 0));
        let overlaps = driver_version >= OVERLAP_DRIVER && all_kernels_wait(ptx);
        let text =
            CString::new(ptx).map_err(|_| Error::invalid(op, "ptx", "PTX text", "a NUL byte in it"))?;
        let module = driver::module_load_data(&text).map_err(|error| {
            let target = target.to_owned();
            Error::Module { target, log: error.log, source: error.source.into() }
        })?;
        let module = Arc::new(Module { module, overlaps, context: self.context.clone() });
        self.own.lock().unwrap_or_else(PoisonError::into_inner).push(module.clone());
        Ok(LoadedModule(module))
    }

    /// A kernel of such PTX.
    pub(crate) fn entry_in(
        &self,
        module: &LoadedModule,
        target: &str,
        name: &'static str,
        smem_bytes: u32,
    ) -> Result<(EntryHandle, Resources), Error> {
        self.context.enter()?;
        let refused = |source: DriverError| {
            let (target, log) = (target.to_owned(), format!("it has no entry {name}"));
            Error::Module { target, log, source }
        };
        self.entry_of(module.0.clone(), "Module::function", name, smem_bytes, refused)
    }

    /// A kernel of a module, in whose context the thread is.
    fn entry_of(
        &self,
        module: Arc<Module>,
        op: &'static str,
        name: &'static str,
        smem_bytes: u32,
        refused: impl Fn(DriverError) -> Error,
    ) -> Result<(EntryHandle, Resources), Error> {
        let c_name =
            CString::new(name).map_err(|_| Error::invalid(op, "entry", "a name without NUL", name))?;
        // SAFETY: the module is live; the caller did enter the context.
        let function = unsafe { driver::module_get_function(module.module, &c_name) }
            .map_err(|source| refused(source.into()))?;
        let get = |attribute| {
            // SAFETY: the module keeps the function alive.
            unsafe { driver::func_attribute(function, attribute) }.map_err(failed("cuFuncGetAttribute"))
        };
        let static_smem = get(FuncAttribute::StaticSharedBytes)? as u32;
        // Up to 48 KiB, static and dynamic together, need no permission. It is given for as much as there is: plans
        // that launch the kernel with less share the function with those that need more.
        if smem_bytes + static_smem > 48 << 10 {
            let most = self.context.profile.smem_per_block_bytes.saturating_sub(static_smem);
            // SAFETY: as above.
            unsafe { driver::set_max_dynamic_shared(function, most.max(smem_bytes)) }
                .map_err(failed("cuFuncSetAttribute"))?;
        }
        let resources = Resources {
            registers: get(FuncAttribute::NumRegs)? as u32,
            local_bytes: get(FuncAttribute::LocalBytes)? as u32,
            max_threads: get(FuncAttribute::MaxThreadsPerBlock)? as u32,
            smem_bytes: smem_bytes + static_smem,
        };
        let handle = EntryHandle { function, module };
        Ok((handle, resources))
    }

    /// A kernel's machine code, loaded; none where the build has none, or card or driver do not take it: a driver older
    /// than the assembler may not.
    fn assembled(&self, arch: Arch, kernel: &PtxModule) -> Result<Option<CUmodule>, Error> {
        let runs = self.context.profile.compute_capability.is_some_and(|card| cubin_runs_on(arch, card));
        let Some(cubin) = kernel.cubin()?.filter(|_| runs) else { return Ok(None) };
        // SAFETY: whole: the images are what `ptxas` wrote — whoever made the device promises it — and inflating checks
        // their ends.
        Ok(unsafe { driver::module_load_cubin(&cubin) }.ok())
    }

    /// The module of a kernel.
    fn module(&self, family: &'static str, arch: Arch, kernel: &str) -> Result<Arc<Module>, Error> {
        self.context.enter()?;
        let Some(image) = self.images.iter().find(|image| (image.family, image.arch) == (family, arch))
        else {
            let held: Vec<String> =
                self.images.iter().map(|image| format!("{} {}", image.family, image.arch)).collect();
            return Err(Error::MissingImage { family, arch, available: held.join(", ") });
        };
        let own = image.module_of(kernel)?;
        let mut loaded = self.loaded.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(module) = loaded.get(&(own.name, arch)) {
            return Ok(module.clone());
        }
        let driver_version = self.context.profile.driver.unwrap_or((0, 0));
        image.check_driver(driver_version)?;
        let text = own.text()?;
        let overlaps = driver_version >= OVERLAP_DRIVER && all_kernels_wait(&text);
        let assembled = self.assembled(arch, &own)?;
        trace::loaded(own.name, arch.name(), assembled.is_some());
        let module = match assembled {
            Some(module) => module,
            None => {
                let ptx = CString::new(text.into_owned())
                    .map_err(|_| Error::invalid(family, "image", "PTX text", "a NUL byte in it"))?;
                driver::module_load_data(&ptx).map_err(|error| Error::Image {
                    family,
                    arch,
                    log: error.log,
                    source: error.source.into(),
                })?
            }
        };
        let module = Arc::new(Module { module, overlaps, context: self.context.clone() });
        loaded.insert((own.name, arch), module.clone());
        Ok(module)
    }
}

#[cfg(test)]
mod tests {
    use super::all_kernels_wait;

    /// One that does not wait would read what the kernel ahead of it still writes.
    #[test]
    fn kernels_overlap_if_all_wait() {
        let waits = ".visible .entry a() {\n\tgriddepcontrol.wait;\n\tret;\n}\n";
        let does_not = ".visible .entry b() {\n\tret;\n}\n";
        assert!(all_kernels_wait(waits));
        assert!(all_kernels_wait(&format!("{waits}{waits}")));
        for image in [does_not, "", &format!("{waits}{does_not}"), &format!("{does_not}{waits}")] {
            assert!(!all_kernels_wait(image), "{image}");
        }
    }
}
