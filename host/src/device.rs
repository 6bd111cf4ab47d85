//! Devices: the CPU, a CUDA card with the images that it can run, or a simulated card.

use std::alloc::Layout;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use abi::Arch;

use crate::error::Error;
use crate::images::{self, Image};
use crate::launch::Entry;
use crate::memory::{Backing, Pool};
use crate::simulator::{SimulatedMemory, Simulator};
use crate::stream::{Queue, Stream};
use crate::tensor_map::{TensorMap, Tiled};

#[cfg(feature = "cuda")]
#[path = "device/cuda/mod.rs"]
pub(crate) mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "device/no_cuda.rs"]
pub(crate) mod cuda;

/// Where a tensor's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The host's memory.
    Cpu,
    /// The memory of the CUDA device with this ordinal.
    Cuda(u32),
    /// The memory of a simulated card; the number tells them apart.
    Simulated(u32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Cpu => f.write_str("the CPU"),
            Place::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Place::Simulated(number) => write!(f, "simulated:{number}"),
        }
    }
}

/// How much of the hardware a plan may use: a bound on the choice of kernels, not a change of results' meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OptLevel {
    /// Portable SIMT kernels: the sm_61 floor.
    Basic,
    /// Tensor cores through `mma.sync`: the sm_80 floor.
    Medium,
    /// Everything the chip has.
    #[default]
    High,
}

impl OptLevel {
    /// The newest floor whose kernels this level takes.
    pub const fn max_floor(self) -> Arch {
        match self {
            OptLevel::Basic => Arch::Sm61,
            OptLevel::Medium => Arch::Sm80,
            OptLevel::High => Arch::Sm90a,
        }
    }
}

impl std::str::FromStr for OptLevel {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "basic" => Ok(OptLevel::Basic),
            "medium" => Ok(OptLevel::Medium),
            "high" => Ok(OptLevel::High),
            other => Err(format!("unknown level {other:?}: expected basic, medium or high")),
        }
    }
}

/// What the hardware is.
#[derive(Clone, Debug, PartialEq)]
pub struct HardwareProfile {
    /// The device's name.
    pub name: String,
    /// Where its memory is.
    pub place: Place,
    /// Major and minor number of the compute capability; none on a CPU.
    pub compute_capability: Option<(u32, u32)>,
    /// Where the card is on the PCI bus, `domain:bus:device.function` in hexadecimal, as nvidia-smi and NVML name it; none on
    /// a CPU.
    pub pci_bus_id: Option<String>,
    /// Which matrix units the chip has.
    pub tensor_cores: TensorCores,
    /// Streaming multiprocessors, or the CPU's hardware threads.
    pub num_sms: u32,
    /// Bytes of memory; 0 where unknown.
    pub memory_bytes: usize,
    /// Bytes of L2 cache; 0 where unknown.
    pub l2_bytes: usize,
    /// Most shared memory of a block, in bytes.
    pub smem_per_block_bytes: u32,
    /// Shared memory of a multiprocessor, in bytes.
    pub smem_per_sm_bytes: u32,
    /// 32-bit registers of a multiprocessor.
    pub registers_per_sm: u32,
    /// Most threads of a multiprocessor.
    pub threads_per_sm: u32,
    /// Peak memory bandwidth by the clock and bus width that the driver reports, in bytes per second; 0 where unknown.
    pub memory_bandwidth: f64,
    /// CUDA version that the driver supports.
    pub driver: Option<(u32, u32)>,
}

/// The generation of a chip's matrix units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorCores {
    /// None.
    None,
    /// Volta and Turing: f16.
    Gen1To2,
    /// Ampere: bf16, tf32, `mma.sync` as the sm_80 floor uses it.
    Gen3,
    /// Ada: with fp8.
    Gen4Ada,
    /// Hopper: `wgmma`.
    Gen4Hopper,
    /// Blackwell.
    Gen5,
}

impl TensorCores {
    /// The generation of a compute capability.
    pub const fn of(major: u32, minor: u32) -> Self {
        match (major, minor) {
            (7, _) => TensorCores::Gen1To2,
            (8, 9) => TensorCores::Gen4Ada,
            (8, _) => TensorCores::Gen3,
            (9, _) => TensorCores::Gen4Hopper,
            (10.., _) => TensorCores::Gen5,
            _ => TensorCores::None,
        }
    }
}

impl HardwareProfile {
    /// The profile of the first CUDA device if there is one, else of the CPU. Needs no images.
    pub fn detect() -> Self {
        cuda::detect(0).unwrap_or_else(|_| Self::cpu())
    }

    fn cpu() -> Self {
        let num_threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        HardwareProfile {
            name: format!("CPU with {num_threads} threads"),
            place: Place::Cpu,
            compute_capability: None,
            pci_bus_id: None,
            tensor_cores: TensorCores::None,
            num_sms: num_threads,
            memory_bytes: 0,
            l2_bytes: 0,
            smem_per_block_bytes: 0,
            smem_per_sm_bytes: 0,
            registers_per_sm: 0,
            threads_per_sm: 1,
            memory_bandwidth: 0.0,
            driver: None,
        }
    }
}

/// What `select` knows of a device: pure data, so that choices can be tested without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// The newest floor whose kernels may be chosen: what the card runs, bounded by the [`OptLevel`].
    pub floor: Arch,
    /// Streaming multiprocessors.
    pub num_sms: u32,
    /// Most shared memory of a block, in bytes.
    pub smem_per_block_bytes: u32,
}

/// A device to plan and run on: the CPU, a CUDA card, or a simulated one. Cheap to clone.
#[derive(Clone)]
pub struct Device {
    shared: Arc<Shared>,
    /// The floor whose images are loaded; unused on the CPU.
    arch: Arch,
    level: OptLevel,
}

struct Shared {
    backend: Backend,
    pool: Arc<Pool>,
    profile: HardwareProfile,
}

enum Backend {
    Cpu,
    Cuda(Arc<cuda::Context>, cuda::Modules),
    Simulated(Arc<dyn Simulator>),
}

impl Device {
    /// The CPU.
    pub fn cpu() -> Self {
        let profile = HardwareProfile::cpu();
        let pool = Pool::new(Box::new(HostMemory));
        let shared = Shared { backend: Backend::Cpu, pool, profile };
        Device { shared: Arc::new(shared), arch: Arch::Sm61, level: OptLevel::default() }
    }

    /// The CUDA device of this ordinal, running these images: the newest floor among them that card and driver can run.
    ///
    /// **Errors**: [`Error::NoDriver`], [`Error::NoDevice`], [`Error::UnsupportedCapability`] if no image is for such a card,
    /// [`Error::DriverTooOld`] if the driver takes the PTX of none that is, [`Error::Driver`] if the card cannot be had.
    ///
    /// # Safety
    /// - A kernel of the images that has the name of one of `abi`'s tables takes the same parameters, and accesses no memory but what the
    ///   operator's documentation says.
    pub unsafe fn cuda(ordinal: usize, images: &'static [Image]) -> Result<Self, Error> {
        let context = cuda::Context::open(ordinal)?;
        let profile = context.profile().clone();
        let (major, minor) = profile.compute_capability.unwrap_or((0, 0));
        let driver = profile.driver.unwrap_or((0, 0));
        let Some(arch) = images::newest_floor(images, (major, minor), driver)? else {
            let mut held: Vec<String> = images.iter().map(|image| image.arch.to_string()).collect();
            held.dedup();
            let reason = format!(
                "this build has images for {}",
                if held.is_empty() { "nothing".into() } else { held.join(", ") }
            );
            return Err(Error::UnsupportedCapability { name: profile.name, major, minor, reason });
        };
        let context = Arc::new(context);
        let modules = cuda::Modules::new(context.clone(), images);
        let pool = Pool::new(Box::new(cuda::DeviceMemory(context.clone())));
        let shared = Shared { backend: Backend::Cuda(context, modules), pool, profile };
        Ok(Device { shared: Arc::new(shared), arch, level: OptLevel::default() })
    }

    /// A card that is simulated on this host, at the newest floor that its compute capability runs. It has all of a
    /// device's behaviour but for speed: streams run their work at once, and cannot be recorded.
    ///
    /// **Errors**: [`Error::UnsupportedCapability`] if the simulator's profile is of a card that no floor runs on.
    pub fn simulated(simulator: Arc<dyn Simulator>) -> Result<Self, Error> {
        static NUM_SIMULATED: AtomicU32 = AtomicU32::new(0);
        let place = Place::Simulated(NUM_SIMULATED.fetch_add(1, Ordering::Relaxed));
        let profile = HardwareProfile { place, ..simulator.profile() };
        let (major, minor) = profile.compute_capability.unwrap_or((0, 0));
        let Some(arch) = Arch::for_compute_capability(major, minor) else {
            let (name, reason) = (profile.name, "no floor runs on it".into());
            return Err(Error::UnsupportedCapability { name, major, minor, reason });
        };
        let pool = Pool::new(Box::new(SimulatedMemory::new(simulator.clone(), &profile)));
        let shared = Shared { backend: Backend::Simulated(simulator), pool, profile };
        Ok(Device { shared: Arc::new(shared), arch, level: OptLevel::default() })
    }

    /// How many CUDA devices the driver reports.
    pub fn cuda_count() -> Result<usize, Error> {
        cuda::device_count()
    }

    /// The same device, running the images of another floor: a Hopper card can run all three. On the CPU, itself.
    ///
    /// **Errors**: [`Error::UnsupportedCapability`] if the card cannot run the floor. That this build has images of it is
    /// not asked here: plans say [`Error::MissingImage`].
    pub fn with_arch(&self, arch: Arch) -> Result<Self, Error> {
        if let Some((major, minor)) = self.shared.profile.compute_capability
            && !arch.runs_on(major, minor)
        {
            let (name, reason) = (self.shared.profile.name.clone(), format!("it cannot run {arch} code"));
            return Err(Error::UnsupportedCapability { name, major, minor, reason });
        }
        Ok(Device { arch, ..self.clone() })
    }

    /// The same device, with another bound on the kernels that plans choose.
    pub fn with_level(&self, level: OptLevel) -> Self {
        Device { level, ..self.clone() }
    }

    /// What the hardware is.
    pub fn profile(&self) -> &HardwareProfile {
        &self.shared.profile
    }

    /// Where its tensors' memory is.
    pub fn place(&self) -> Place {
        self.shared.profile.place
    }

    /// The bound on the kernels that plans choose.
    pub fn level(&self) -> OptLevel {
        self.level
    }

    /// Name and floor, for messages.
    pub fn describe(&self) -> String {
        match self.shared.backend {
            Backend::Cpu => self.shared.profile.name.clone(),
            Backend::Cuda(..) | Backend::Simulated(_) => {
                format!("{} ({}, {})", self.shared.profile.name, self.place(), self.arch)
            }
        }
    }

    /// The memory pool.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.shared.pool
    }

    /// A new stream.
    pub fn stream(&self) -> Result<Stream, Error> {
        let queue = match &self.shared.backend {
            Backend::Cpu => Queue::Cpu,
            Backend::Cuda(context, _) => Queue::Cuda(Arc::new(cuda::Stream::new(context.clone())?)),
            Backend::Simulated(simulator) => Queue::Simulated(simulator.clone()),
        };
        Ok(Stream::new(self.clone(), queue))
    }

    /// A stream of another library: what is enqueued in it by either runs in order. CUDA only.
    ///
    /// # Safety
    /// `handle` is a `CUstream` (or `cudaStream_t`) of this device's primary context, not the legacy default stream. It is not destroyed as
    /// long as this device, its clones, or what they made are there: the pool remembers in whose order memory was used.
    ///
    /// **Errors**: [`Error::Unsupported`] where the device is no CUDA card.
    pub unsafe fn stream_from_raw(&self, handle: *mut c_void) -> Result<Stream, Error> {
        let Backend::Cuda(context, _) = &self.shared.backend else {
            let (device, reason) = (self.describe(), "only CUDA has stream handles".into());
            return Err(Error::Unsupported { op: "Device::stream_from_raw", device, reason });
        };
        // SAFETY: the caller's promise.
        let stream = unsafe { cuda::Stream::of_caller(context.clone(), handle)? };
        Ok(Stream::new(self.clone(), Queue::Cuda(Arc::new(stream))))
    }

    /// What `select` knows of a card; none on the CPU, where there is nothing to select.
    pub fn limits(&self) -> Option<DeviceLimits> {
        let profile = &self.shared.profile;
        match self.shared.backend {
            Backend::Cpu => None,
            Backend::Cuda(..) | Backend::Simulated(_) => Some(DeviceLimits {
                floor: self.arch.min(self.level.max_floor()),
                num_sms: profile.num_sms,
                smem_per_block_bytes: profile.smem_per_block_bytes,
            }),
        }
    }

    /// The tensor map of a matrix in the memory of this card, which must be one that has TMA.
    pub(crate) fn tensor_map(&self, op: &'static str, tiled: &Tiled) -> Result<TensorMap, Error> {
        match &self.shared.backend {
            Backend::Cpu => {
                let (device, reason) = (self.describe(), "the CPU has no TMA".into());
                Err(Error::Unsupported { op, device, reason })
            }
            Backend::Cuda(context, _) => context.tensor_map(tiled),
            Backend::Simulated(simulator) => {
                let refused = |reason| Error::Unsupported { op, device: self.describe(), reason };
                simulator.tensor_map(tiled).map_err(refused)
            }
        }
    }

    /// The kernel `entry` of an operator family, its image loaded if it was not yet, ready for `smem_bytes` of dynamic
    /// shared memory.
    pub(crate) fn entry(
        &self,
        family: &'static str,
        entry: &'static str,
        smem_bytes: u32,
    ) -> Result<Entry, Error> {
        match &self.shared.backend {
            Backend::Cpu => Err(Error::Unsupported {
                op: family,
                device: self.describe(),
                reason: "the CPU has no kernels to load".into(),
            }),
            Backend::Cuda(_, modules) => modules.entry(family, self.arch, entry, smem_bytes),
            Backend::Simulated(simulator) if simulator.has_kernel(entry) => {
                Ok(Entry::simulated(entry, smem_bytes, simulator.clone(), self.arch))
            }
            Backend::Simulated(_) => Err(Error::Unsupported {
                op: family,
                device: self.describe(),
                reason: format!("the simulator has no kernel {entry}"),
            }),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {:?})", self.describe(), self.level)
    }
}

/// The host's allocator behind the pool.
#[derive(Debug)]
struct HostMemory;

impl HostMemory {
    /// Cache lines and vector registers divide it; the same as the pool promises on a card.
    const ALIGN: usize = 256;

    /// What is asked of the system for a block: at its alignment, since only there it hands out fresh zeroed pages without
    /// touching them, and with room to align the block and to remember where the allocation starts.
    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes.checked_add(Self::ALIGN + size_of::<usize>())?, align_of::<usize>())
            .ok()
    }
}

impl Backing for HostMemory {
    fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error> {
        let Some(layout) = Self::layout(bytes) else { return Ok(None) };
        // Zeroed, since a slice of uninitialised memory would be undefined behaviour; the system's fresh pages are zero
        // anyway.
        // SAFETY: the pool asks for at least one byte.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        if start.is_null() {
            return Ok(None);
        }
        let block = (start as usize + size_of::<usize>()).next_multiple_of(Self::ALIGN);
        // SAFETY: in front of the block there is room for one usize, aligned as ALIGN is a multiple of its size.
        unsafe { (block as *mut usize).sub(1).write(start as usize) };
        Ok(Some(block as u64))
    }

    unsafe fn release(&self, blocks: &[(u64, usize)]) -> Result<bool, Error> {
        for &(address, bytes) in blocks {
            if let Some(layout) = Self::layout(bytes) {
                // SAFETY: `allocate` wrote the start in front of the block, and allocated it with this layout; the caller
                // gives it back once.
                unsafe { std::alloc::dealloc((address as *const usize).sub(1).read() as *mut u8, layout) };
            }
        }
        Ok(true)
    }

    fn report(&self) -> (usize, usize, String) {
        (0, 0, "the CPU".into())
    }
}
