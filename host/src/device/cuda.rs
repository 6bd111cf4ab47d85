//! CUDA behind [`crate::device`]: context, streams, memory, modules. All driver handles of the crate live here.
//!
//! `cust` has contexts, devices and allocation; streams, events, copies, modules and launches go through
//! `cuda_loader::driver`, which says why.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
};

use abi::{Arch, DType};
use cuda_loader::driver::{
    self, FuncAttribute, LaunchAttributes, Overlap, TensorMapDataType, TensorMapInterleave,
    TensorMapL2Promotion, TensorMapOobFill, TensorMapParams, TensorMapSwizzle,
};
use cust::context::CurrentContext;
use cust::device::DeviceAttribute;
use cust::error::CudaError;
use cust::sys::{CUevent, CUfunction, CUmodule, CUstream};

use crate::device::{HardwareProfile, Place, TensorCores};
use crate::error::{DriverError, Error};
use crate::images::Image;
use crate::launch::{Entry, Resources};
use crate::memory::Backing;
use crate::tensor_map::{TensorMap, Tiled};

impl From<cuda_loader::DriverError> for DriverError {
    fn from(error: cuda_loader::DriverError) -> Self {
        DriverError { code: error.code, name: error.name, description: error.description }
    }
}

/// An [`Error::Driver`] of this call.
fn failed(call: &'static str) -> impl Fn(cuda_loader::DriverError) -> Error {
    move |source| Error::Driver { call, source: source.into() }
}

/// The same for an error of `cust`.
fn cust_failed(call: &'static str) -> impl Fn(CudaError) -> Error {
    move |error| Error::Driver { call, source: cuda_loader::DriverError::from_code(error as u32).into() }
}

/// `CUDA_ERROR_NO_DEVICE`: what a driver without cards, or with none that the program may see, answers to `cuInit`.
const NO_DEVICE: u32 = 100;

/// Loads and initialises the driver, and counts its devices.
pub(crate) fn device_count() -> Result<usize, Error> {
    cuda_loader::load().map_err(|error| Error::NoDriver { reason: error.to_string() })?;
    match cuda_loader::init() {
        Ok(()) => {}
        Err(error) if error.code == NO_DEVICE => return Ok(0),
        Err(error) => return Err(Error::NoDriver { reason: format!("the driver does not start: {error}") }),
    }
    Ok(cuda_loader::device_count().map_err(failed("cuDeviceGetCount"))? as usize)
}

/// Read-locked while a graph is recorded. The driver ends every recording of a context, with an error, when someone waits for
/// the whole context meanwhile; and all devices of an ordinal share its primary context.
static RECORDING: RwLock<()> = RwLock::new(());

/// What keeps recordings from beginning.
struct NoRecording {
    _none: RwLockWriteGuard<'static, ()>,
    _only: MutexGuard<'static, ()>,
}

impl NoRecording {
    /// None while a graph is recorded; waits for another of its kind.
    fn begin() -> Option<Self> {
        // Of its own, or one that waits for its device would look like a recording to the others.
        static ONLY: Mutex<()> = Mutex::new(());
        let only = ONLY.lock().unwrap_or_else(PoisonError::into_inner);
        let none = match RECORDING.try_write() {
            Ok(none) => none,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(NoRecording { _none: none, _only: only })
    }
}

/// A device's primary context.
#[derive(Debug)]
pub(crate) struct Context {
    context: cust::context::Context,
    profile: HardwareProfile,
}

impl Context {
    /// Encodes a tensor map.
    pub(crate) fn tensor_map(&self, tiled: &Tiled) -> Result<TensorMap, Error> {
        let (dims, strides_bytes, box_dims, rank) = tiled.dims();
        let data_type = match tiled.dtype {
            DType::F32 => TensorMapDataType::F32,
            DType::F16 => TensorMapDataType::F16,
            DType::BF16 => TensorMapDataType::Bf16,
            DType::F8E4M3 | DType::I8 => TensorMapDataType::U8,
            DType::I32 => TensorMapDataType::I32,
            DType::U32 => TensorMapDataType::U32,
        };
        let params = TensorMapParams {
            data_type,
            address: tiled.address,
            dims: &dims[..rank],
            strides_bytes: &strides_bytes[..rank - 1],
            box_dims: &box_dims[..rank],
            element_strides: &[1; 4][..rank],
            interleave: TensorMapInterleave::None,
            swizzle: TensorMapSwizzle::Bytes128,
            l2_promotion: TensorMapL2Promotion::Bytes256,
            oob_fill: TensorMapOobFill::Zeros,
        };
        let map = driver::tensor_map_encode_tiled(&params).map_err(failed("cuTensorMapEncodeTiled"))?;
        Ok(TensorMap(map.0))
    }

    pub(crate) fn open(ordinal: usize) -> Result<Self, Error> {
        let device = find(ordinal)?;
        let profile = profile(device, ordinal as u32)?;
        let context = cust::context::Context::new(device).map_err(cust_failed("cuDevicePrimaryCtxRetain"))?;
        Ok(Context { context, profile })
    }

    pub(crate) fn profile(&self) -> &HardwareProfile {
        &self.profile
    }

    /// Makes this context the calling thread's: every driver call below wants that first.
    fn enter(&self) -> Result<(), Error> {
        CurrentContext::set_current(&self.context).map_err(cust_failed("cuCtxSetCurrent"))
    }
}

/// What the device of this ordinal is; takes no context, and so no memory of it.
pub(crate) fn detect(ordinal: usize) -> Result<HardwareProfile, Error> {
    profile(find(ordinal)?, ordinal as u32)
}

fn find(ordinal: usize) -> Result<cust::device::Device, Error> {
    let count = device_count()?;
    if ordinal >= count {
        return Err(Error::NoDevice { ordinal, count });
    }
    cust::device::Device::get_device(ordinal as u32).map_err(cust_failed("cuDeviceGet"))
}

fn profile(device: cust::device::Device, ordinal: u32) -> Result<HardwareProfile, Error> {
    let get = |attribute| device.get_attribute(attribute).map_err(cust_failed("cuDeviceGetAttribute"));
    let (major, minor) = (
        get(DeviceAttribute::ComputeCapabilityMajor)? as u32,
        get(DeviceAttribute::ComputeCapabilityMinor)? as u32,
    );
    let smem_per_block =
        driver::device_attribute(device.as_raw(), driver::DeviceAttribute::MaxSharedMemoryPerBlockOptin)
            .map_err(failed("cuDeviceGetAttribute"))?;
    let [domain, bus, slot] =
        [DeviceAttribute::PciDomainId, DeviceAttribute::PciBusId, DeviceAttribute::PciDeviceId];
    let pci_bus_id = format!("{:08x}:{:02x}:{:02x}.0", get(domain)?, get(bus)?, get(slot)?);
    // Kilohertz, two transfers per clock, bits.
    let clock = f64::from(get(DeviceAttribute::MemoryClockRate)?) * 1e3;
    let memory_bandwidth = 2.0 * clock * f64::from(get(DeviceAttribute::GlobalMemoryBusWidth)?) / 8.0;
    Ok(HardwareProfile {
        name: device.name().map_err(cust_failed("cuDeviceGetName"))?,
        place: Place::Cuda(ordinal),
        compute_capability: Some((major, minor)),
        pci_bus_id: Some(pci_bus_id),
        tensor_cores: TensorCores::of(major, minor),
        num_sms: get(DeviceAttribute::MultiprocessorCount)? as u32,
        memory_bytes: device.total_memory().map_err(cust_failed("cuDeviceTotalMem"))?,
        l2_bytes: get(DeviceAttribute::L2CacheSize)? as usize,
        smem_per_block_bytes: smem_per_block as u32,
        smem_per_sm_bytes: get(DeviceAttribute::MaxSharedMemoryPerMultiprocessor)? as u32,
        registers_per_sm: get(DeviceAttribute::MaxRegistersPerMultiprocessor)? as u32,
        threads_per_sm: get(DeviceAttribute::MaxThreadsPerMultiprocessor)? as u32,
        memory_bandwidth,
        driver: Some(cuda_loader::driver_version().map_err(failed("cuDriverGetVersion"))?),
    })
}

/// A CUDA stream, and the event by which other streams wait for it.
#[derive(Debug)]
pub(crate) struct Stream {
    stream: CUstream,
    owner: Owner,
    event: CUevent,
    context: Arc<Context>,
}

/// Who destroys a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Library,
    Caller,
}

// SAFETY: stream and event handles may be used from any thread whose current context is theirs — the driver's own rule;
// every method enters the context first.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver serialises calls on one stream.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new(context: Arc<Context>) -> Result<Self, Error> {
        context.enter()?;
        let stream = driver::stream_create().map_err(failed("cuStreamCreate"))?;
        match driver::event_create(driver::Timing::Disabled) {
            Ok(event) => Ok(Stream { stream, owner: Owner::Library, event, context }),
            Err(error) => {
                // SAFETY: just made, and not used.
                let _ = unsafe { driver::stream_destroy(stream) };
                Err(failed("cuEventCreate")(error))
            }
        }
    }

    /// A stream of the caller's.
    ///
    /// # Safety
    /// The handle is live as long as the value, and of this context.
    pub(crate) unsafe fn of_caller(context: Arc<Context>, handle: *mut c_void) -> Result<Self, Error> {
        context.enter()?;
        let event = driver::event_create(driver::Timing::Disabled).map_err(failed("cuEventCreate"))?;
        Ok(Stream { stream: handle.cast(), owner: Owner::Caller, event, context })
    }

    pub(crate) fn handle(&self) -> *mut c_void {
        self.stream.cast()
    }

    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        self.context.enter()?;
        // SAFETY: live while `self` is.
        unsafe { driver::stream_synchronize(self.stream) }.map_err(failed("cuStreamSynchronize"))
    }

    pub(crate) fn wait_for(&self, other: &Stream) -> Result<(), Error> {
        self.context.enter()?;
        // Recording anew replaces what the event stood for; waits that are already enqueued keep their meaning.
        // SAFETY: all three are live while `self` and `other` are.
        unsafe {
            driver::event_record(other.event, other.stream).map_err(failed("cuEventRecord"))?;
            driver::stream_wait_event(self.stream, other.event).map_err(failed("cuStreamWaitEvent"))
        }
    }

    /// Whether what is enqueued is recorded: a stream that waits for this one would be recorded too.
    pub(crate) fn is_recorded(&self) -> Result<bool, Error> {
        self.context.enter()?;
        // SAFETY: live while `self` is.
        unsafe { driver::stream_is_capturing(self.stream) }.map_err(failed("cuStreamIsCapturing"))
    }

    pub(crate) fn upload(&self, address: u64, data: &[u8]) -> Result<(), Error> {
        self.context.enter()?;
        // SAFETY: the stream is live; a contiguous view has `data.len()` bytes at `address`; `data` may go when this returns, since from
        // pageable memory the driver copies before it returns, and for other memory it is waited below.
        unsafe { driver::memcpy_htod_async(address, data.as_ptr().cast(), data.len(), self.stream) }
            .map_err(failed("cuMemcpyHtoDAsync"))?;
        if driver::is_known_memory(data.as_ptr().cast()) { self.synchronize() } else { Ok(()) }
    }

    pub(crate) fn download(&self, address: u64, data: &mut [u8]) -> Result<(), Error> {
        self.context.enter()?;
        // SAFETY: the stream is live; the view spans `data.len()` bytes at `address`; the copy is waited for below.
        unsafe { driver::memcpy_dtoh_async(data.as_mut_ptr().cast(), address, data.len(), self.stream) }
            .map_err(failed("cuMemcpyDtoHAsync"))?;
        self.synchronize()
    }

    pub(crate) fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
        self.context.enter()?;
        // SAFETY: the stream is live; Stream::copy found both views to span `bytes` bytes on this device.
        unsafe { driver::memcpy_dtod_async(to, from, bytes, self.stream) }
            .map_err(failed("cuMemcpyDtoDAsync"))
    }

    pub(crate) fn fill_zero(&self, address: u64, bytes: usize) -> Result<(), Error> {
        self.context.enter()?;
        // SAFETY: the stream is live; Tensor allocated `bytes` bytes at `address`.
        unsafe { driver::memset_d8_async(address, 0, bytes, self.stream) }.map_err(failed("cuMemsetD8Async"))
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// The kernel behind `entry` takes these parameters and is sound with their values.
    pub(crate) unsafe fn launch(
        &self,
        entry: &EntryHandle,
        grid: [u32; 3],
        block: [u32; 3],
        cluster: u32,
        smem_bytes: u32,
        params: &mut [*mut c_void],
    ) -> Result<(), LaunchFailure> {
        self.context.enter().map_err(LaunchFailure::Other)?;
        let overlap = if entry.module.overlaps { Overlap::Programmatic } else { Overlap::None };
        let launched = if cluster == 1 && overlap == Overlap::None {
            // SAFETY: function and stream are live, since their owners are; parameters — the caller.
            unsafe { driver::launch_kernel(entry.function, grid, block, smem_bytes, self.stream, params) }
        } else {
            let cluster = (cluster != 1).then_some([cluster, 1, 1]);
            let attributes = LaunchAttributes { cluster, overlap };
            // SAFETY: as above; every kernel of a module that overlaps waits first — `Modules::module`.
            unsafe {
                driver::launch_kernel_ex(
                    entry.function,
                    grid,
                    block,
                    smem_bytes,
                    self.stream,
                    &attributes,
                    params,
                )
            }
        };
        launched.map_err(|error| LaunchFailure::Launch(error.into()))
    }

    /// Records what `enqueue` enqueues instead of running it.
    pub(crate) fn capture(&self, enqueue: impl FnOnce() -> Result<(), Error>) -> Result<Graph, Error> {
        let recording = Recording::begin(self)?;
        enqueue()?;
        let graph = recording.end()?;
        DeviceMemory::free_left();
        // SAFETY: the recorded work's addresses are the caller's contract, at the launch.
        let exec = unsafe { graph.instantiate() }.map_err(failed("cuGraphInstantiate"))?;
        Ok(Graph { exec: Mutex::new(exec), context: self.context.clone() })
    }

    /// A marker in the stream with a time.
    pub(crate) fn record(&self) -> Result<Event, Error> {
        self.context.enter()?;
        let event = driver::event_create(driver::Timing::Enabled).map_err(failed("cuEventCreate"))?;
        let event = Event { event, context: self.context.clone() };
        // SAFETY: both are live.
        unsafe { driver::event_record(event.event, self.stream) }.map_err(failed("cuEventRecord"))?;
        Ok(event)
    }

    /// Enqueues a recorded graph.
    ///
    /// # Safety
    /// The memory that the recorded work uses is still allocated for it.
    pub(crate) unsafe fn launch_graph(&self, graph: &Graph) -> Result<(), Error> {
        self.context.enter()?;
        let exec = graph.exec.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // SAFETY: live while `graph` and `self` are; memory — the caller.
        unsafe { exec.launch(self.stream) }.map_err(failed("cuGraphLaunch"))
    }
}

/// A recording under way, which ends also where it fails or panics: else its stream could not be used any more.
struct Recording<'a> {
    stream: &'a Stream,
    has_ended: bool,
    _recording: RwLockReadGuard<'static, ()>,
}

impl<'a> Recording<'a> {
    fn begin(stream: &'a Stream) -> Result<Self, Error> {
        let recording = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
        stream.context.enter()?;
        // SAFETY: live while `stream` is.
        unsafe { driver::stream_begin_capture(stream.stream) }.map_err(failed("cuStreamBeginCapture"))?;
        Ok(Recording { stream, has_ended: false, _recording: recording })
    }

    fn end(mut self) -> Result<driver::Graph, Error> {
        self.stream.context.enter()?;
        self.has_ended = true;
        // SAFETY: live while the stream is.
        unsafe { driver::stream_end_capture(self.stream.stream) }.map_err(failed("cuStreamEndCapture"))
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if !self.has_ended && self.stream.context.enter().is_ok() {
            // SAFETY: live while the stream is.
            let _ = unsafe { driver::stream_end_capture(self.stream.stream) };
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Work that is still enqueued runs on: the driver destroys the stream after it.
        if self.context.enter().is_ok() {
            // SAFETY: made in `new` or `of_caller`, and ends here.
            let _ = unsafe { driver::event_destroy(self.event) };
            if self.owner == Owner::Library {
                // SAFETY: made in `new`, and ends here.
                let _ = unsafe { driver::stream_destroy(self.stream) };
            }
        }
    }
}

/// A point in a stream, with its time.
#[derive(Debug)]
pub(crate) struct Event {
    event: CUevent,
    context: Arc<Context>,
}

// SAFETY: as for Stream.
unsafe impl Send for Event {}
// SAFETY: as for Stream.
unsafe impl Sync for Event {}

impl Event {
    /// Milliseconds from `earlier` to this one, after waiting for this one.
    pub(crate) fn elapsed_ms(&self, earlier: &Event) -> Result<f32, Error> {
        self.context.enter()?;
        // SAFETY: both are live.
        unsafe {
            driver::event_synchronize(self.event).map_err(failed("cuEventSynchronize"))?;
            driver::event_elapsed_ms(earlier.event, self.event).map_err(failed("cuEventElapsedTime"))
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `record`, and ends here.
            let _ = unsafe { driver::event_destroy(self.event) };
        }
    }
}

/// Recorded work, ready to be launched again and again.
#[derive(Debug)]
pub(crate) struct Graph {
    exec: Mutex<driver::GraphExec>,
    context: Arc<Context>,
}

impl Drop for Graph {
    fn drop(&mut self) {
        // The executable graph is destroyed with the field, in this context.
        let _ = self.context.enter();
    }
}

/// Why a launch did not happen.
pub(crate) enum LaunchFailure {
    Launch(DriverError),
    Other(Error),
}

/// A kernel's function, which its module keeps alive.
#[derive(Clone, Debug)]
pub(crate) struct EntryHandle {
    function: CUfunction,
    context: Arc<Context>,
    module: Arc<Module>,
}

// SAFETY: function handles may be used from any thread whose current context is theirs — the driver's own rule.
unsafe impl Send for EntryHandle {}
// SAFETY: as above.
unsafe impl Sync for EntryHandle {}

impl EntryHandle {
    /// Whether a stream is of the kernel's card. Devices of an ordinal share its primary context.
    pub(crate) fn is_of(&self, stream: &Stream) -> bool {
        self.context.profile.place == stream.context.profile.place
    }

    /// Blocks of `threads` threads that fit on a multiprocessor at a time.
    pub(crate) fn blocks_per_sm(&self, threads: u32, smem_bytes: u32) -> Result<u32, Error> {
        self.context.enter()?;
        // SAFETY: the module keeps the function alive.
        unsafe { driver::occupancy_max_active_blocks(self.function, threads, smem_bytes as usize) }
            .map_err(failed("cuOccupancyMaxActiveBlocksPerMultiprocessor"))
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
        // While a graph is recorded its kernels cannot be waited for: then the module stays, until its context goes.
        let Some(_no_recording) = NoRecording::begin() else { return };
        if self.context.enter().is_ok() && CurrentContext::synchronize().is_ok() {
            // SAFETY: loaded in Modules::module; every EntryHandle of it is gone, as each holds the Arc, no graph has its kernels, as
            // each holds its device, and none of them is still queued.
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
}

impl Modules {
    pub(crate) fn new(context: Arc<Context>, images: &'static [Image]) -> Self {
        Modules { context, images, loaded: Mutex::default() }
    }

    pub(crate) fn entry(
        &self,
        family: &'static str,
        arch: Arch,
        name: &'static str,
        smem_bytes: u32,
    ) -> Result<Entry, Error> {
        let module = self.module(family, arch, name)?;
        let c_name =
            CString::new(name).map_err(|_| Error::invalid(family, "entry", "a name without NUL", name))?;
        // SAFETY: the module is live; `module` did enter the context.
        let function = unsafe { driver::module_get_function(module.module, &c_name) }.map_err(|source| {
            Error::Image { family, arch, log: format!("it has no entry {name}"), source: source.into() }
        })?;
        let get = |attribute| {
            // SAFETY: the module keeps the function alive.
            unsafe { driver::func_attribute(function, attribute) }.map_err(failed("cuFuncGetAttribute"))
        };
        let static_smem = get(FuncAttribute::StaticSharedBytes)? as u32;
        // Up to 48 KiB, static and dynamic together, need no permission. It is given for as much as there is: plans that launch the
        // kernel with less share the function with those that need more.
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
        let handle = EntryHandle { function, context: self.context.clone(), module };
        Ok(Entry::new(name, resources, smem_bytes, handle))
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
        let ptx = CString::new(text.into_owned())
            .map_err(|_| Error::invalid(family, "image", "PTX text", "a NUL byte in it"))?;
        let module = driver::module_load_data(&ptx).map_err(|error| Error::Image {
            family,
            arch,
            log: error.log,
            source: error.source.into(),
        })?;
        let module = Arc::new(Module { module, overlaps, context: self.context.clone() });
        loaded.insert((own.name, arch), module.clone());
        Ok(module)
    }
}

/// The card's memory behind the pool.
#[derive(Debug)]
pub(crate) struct DeviceMemory(pub(crate) Arc<Context>);

/// Memory of pools that ended while a graph was recorded, with its context.
static LEFT: Mutex<Vec<(Arc<Context>, u64)>> = Mutex::new(Vec::new());

impl DeviceMemory {
    /// Frees what pools have left, unless a graph is being recorded.
    fn free_left() {
        let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
        if left.is_empty() {
            return;
        }
        let Some(_no_recording) = NoRecording::begin() else { return };
        for (context, address) in left.drain(..) {
            if context.enter().is_ok() && CurrentContext::synchronize().is_ok() {
                // SAFETY: from `allocate`; a pool that has ended gave it back; the device has just finished all its work.
                let _ =
                    unsafe { cust::memory::cuda_free(cust::memory::DevicePointer::<u8>::from_raw(address)) };
            }
        }
    }
}

impl Backing for DeviceMemory {
    fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error> {
        self.0.enter()?;
        // SAFETY: freed in `release`; contents are the tensors' business.
        match unsafe { cust::memory::cuda_malloc::<u8>(bytes) } {
            Ok(pointer) => Ok(Some(pointer.as_raw())),
            Err(CudaError::OutOfMemory) => Ok(None),
            Err(error) => Err(cust_failed("cuMemAlloc")(error)),
        }
    }

    unsafe fn release(&self, blocks: &[(u64, usize)]) -> Result<bool, Error> {
        let Some(_no_recording) = NoRecording::begin() else { return Ok(false) };
        self.0.enter()?;
        CurrentContext::synchronize().map_err(cust_failed("cuCtxSynchronize"))?;
        for &(address, _) in blocks {
            // SAFETY: from `allocate`, given back once — the caller; the device has just finished all its work.
            let _ = unsafe { cust::memory::cuda_free(cust::memory::DevicePointer::<u8>::from_raw(address)) };
        }
        Ok(true)
    }

    unsafe fn take_over(&self, blocks: &[(u64, usize)]) {
        let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
        left.extend(blocks.iter().map(|&(address, _)| (self.0.clone(), address)));
    }

    fn report(&self) -> (usize, usize, String) {
        let entered = self.0.enter().is_ok();
        let (free, total) = if entered { cust::memory::mem_get_info().unwrap_or((0, 0)) } else { (0, 0) };
        (free, total, self.0.profile.name.clone())
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
