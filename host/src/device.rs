//! Devices: the CPU, a CUDA card with the images that it can run, or a simulated card.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use abi::Arch;

use crate::backing::HostMemory;
use crate::cuda;
use crate::error::Error;
use crate::images::{self, Image, ProgramImages};
use crate::memory::Pool;
use crate::queue::Queue;
use crate::simulator::{SimulatedMemory, Simulator};
use crate::staging::{Source, Staging};
use crate::stream::Stream;
use crate::tensor_map::{TensorMap, Tiled};
use crate::trace;

pub use crate::profile::{DeviceLimits, Fallback, HardwareProfile, Invariance, OptLevel, Place, TensorCores};

impl HardwareProfile {
    /// The profile of the first CUDA device if there is one, else of the CPU. Needs no images.
    pub fn detect() -> Self {
        cuda::detect(0).unwrap_or_else(|_| Self::cpu())
    }
}

/// A device to plan and run on: the CPU, a CUDA card, or a simulated one. Cheap to clone.
#[derive(Clone)]
pub struct Device {
    shared: Arc<Shared>,
    /// The floor whose images are loaded; unused on the CPU.
    arch: Arch,
    level: OptLevel,
    invariance: Invariance,
    fallback: Fallback,
}

struct Shared {
    backend: Backend,
    pool: Arc<Pool>,
    staging: Arc<Staging>,
    profile: HardwareProfile,
    /// What runs elsewhere than was asked for, a line each.
    fallen: Mutex<Vec<String>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.pool.say_leaks();
    }
}

/// What runs a device's work.
pub(crate) enum Backend {
    Cpu,
    Cuda(Arc<cuda::Context>, cuda::Modules),
    Simulated(Arc<dyn Simulator>),
}

impl Device {
    /// The CPU.
    pub fn cpu() -> Self {
        let profile = HardwareProfile::cpu();
        let pool = Pool::new(Box::new(HostMemory));
        Device::new(Backend::Cpu, pool, profile, Arch::Sm61)
    }

    /// The CUDA device of ordinal 0 if it can be had, else the CPU. [`Device::cuda`] says why it cannot.
    pub fn best() -> Self {
        Self::cuda(0).unwrap_or_else(|_| Self::cpu())
    }

    /// The CUDA device of this ordinal, running the images that the program is built with: of their floors that card
    /// and driver can run, the [preferred](Arch::PREFERRED) one.
    ///
    /// **Errors**: those of [`Device::cuda_with_images`].
    pub fn cuda(ordinal: usize) -> Result<Self, Error> {
        // SAFETY: whoever has entered the images promised it.
        unsafe { Self::cuda_with_images(ordinal, ProgramImages::entered()) }
    }

    /// The CUDA device of this ordinal, running these images.
    ///
    /// **Errors**: [`Error::NoDriver`], [`Error::NoDevice`], [`Error::UnsupportedCapability`] if no image is for such a
    /// card, [`Error::DriverTooOld`] if the driver takes the PTX of none that is, [`Error::Driver`] if the card cannot
    /// be had.
    ///
    /// # Safety
    /// - A kernel of the images that has the name of one of `abi`'s tables takes the same parameters, and accesses no
    ///   memory but what the operator's documentation says.
    pub unsafe fn cuda_with_images(ordinal: usize, images: &'static [Image]) -> Result<Self, Error> {
        let context = cuda::Context::open(ordinal)?;
        let profile = context.profile().clone();
        let (major, minor) = profile.compute_capability.unwrap_or((0, 0));
        let driver = profile.driver.unwrap_or((0, 0));
        let Some(arch) = images::preferred_floor(images, (major, minor), driver)? else {
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
        let pool = Pool::new(Box::new(cuda::DeviceMemory::new(context.clone())?));
        Ok(Device::new(Backend::Cuda(context, modules), pool, profile, arch))
    }

    /// A card that is simulated on this host, at the floor that its compute capability takes. It has all of a
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
        Ok(Device::new(Backend::Simulated(simulator), pool, profile, arch))
    }

    fn new(backend: Backend, pool: Arc<Pool>, profile: HardwareProfile, arch: Arch) -> Self {
        let staging = Staging::new(match &backend {
            Backend::Cpu | Backend::Simulated(_) => Source::Heap,
            Backend::Cuda(context, _) => Source::Pinned(context.clone()),
        });
        let shared = Arc::new(Shared { backend, pool, staging, profile, fallen: Mutex::default() });
        let (level, invariance, fallback) = <(OptLevel, Invariance, Fallback)>::default();
        Device { shared, arch, level, invariance, fallback }
    }

    /// How many CUDA devices the driver reports.
    pub fn cuda_count() -> Result<usize, Error> {
        cuda::device_count()
    }

    /// The same device, running the images of another floor: a Hopper card can run all three. On the CPU, itself.
    ///
    /// **Errors**: [`Error::UnsupportedCapability`] if the card cannot run the floor. That this build has images of it
    /// is not asked here: plans say [`Error::MissingImage`].
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

    /// The same device, with other things that the last bits of results may depend on.
    pub fn with_invariance(&self, invariance: Invariance) -> Self {
        Device { invariance, ..self.clone() }
    }

    /// The same device, with another way to go on where it refuses a plan.
    pub fn with_fallback(&self, fallback: Fallback) -> Self {
        Device { fallback, ..self.clone() }
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

    /// What the last bits of results may depend on.
    pub fn invariance(&self) -> Invariance {
        self.invariance
    }

    /// What plans do where the device refuses them.
    pub fn fallback(&self) -> Fallback {
        self.fallback
    }

    /// What runs by another floor's kernels, on the CPU or by other operators, because this device (or one that was
    /// made of it) refused it: operator, what stands in and the reason of each, once. Each was also written to standard
    /// error, when it happened.
    pub fn fallen(&self) -> Vec<String> {
        self.lock_fallen().clone()
    }

    /// Says that this stands in for an operator, because the device has refused it with this error: for what goes on in
    /// another way by itself. It is one of [`Self::fallen`].
    pub fn say_stands_in(&self, op: &str, instead: &str, error: &Error) {
        self.say_fallen(format!(
            "{op} falls back to {instead}, for {}: {}",
            self.describe(),
            error.in_a_line()
        ));
    }

    /// Says so, the first time.
    pub(crate) fn say_fallen(&self, line: String) {
        let mut fallen = self.lock_fallen();
        if !fallen.contains(&line) {
            // Nobody is to stop because nobody reads it.
            let _ = writeln!(std::io::stderr(), "warpforge: {line}");
            trace::fallen(&line);
            fallen.push(line);
        }
    }

    fn lock_fallen(&self) -> MutexGuard<'_, Vec<String>> {
        // A list of whole lines at any time.
        self.shared.fallen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What may stand in for this device, by its policy: the floors that this one runs and the card too, the best
    /// first, then the CPU.
    pub(crate) fn lower(&self) -> impl Iterator<Item = Device> {
        let is_card = !matches!(self.shared.backend, Backend::Cpu);
        let floors = is_card && self.fallback != Fallback::Error;
        let below = move |arch: &Arch| floors && *arch != self.arch && self.arch.runs(*arch);
        let floors = Arch::PREFERRED.into_iter().filter(below).filter_map(|arch| self.with_arch(arch).ok());
        let cpu = || Device::cpu().with_invariance(self.invariance);
        floors.chain((is_card && self.fallback == Fallback::Cpu).then(cpu))
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

    /// The host's memory that copies go through which do not wait: [`TensorViewMut::enqueue_write`] and
    /// [`TensorView::enqueue_read`].
    ///
    /// [`TensorViewMut::enqueue_write`]: crate::TensorViewMut::enqueue_write
    /// [`TensorView::enqueue_read`]: crate::TensorView::enqueue_read
    pub fn staging(&self) -> &Arc<Staging> {
        &self.shared.staging
    }

    /// What runs its work.
    pub(crate) fn backend(&self) -> &Backend {
        &self.shared.backend
    }

    /// The floor whose images are loaded.
    pub(crate) fn arch(&self) -> Arch {
        self.arch
    }

    /// A new stream.
    pub fn stream(&self) -> Result<Stream, Error> {
        let queue = match &self.shared.backend {
            Backend::Cpu => Queue::Cpu,
            Backend::Cuda(context, _) => Queue::Cuda(Arc::new(cuda::Stream::new(context.clone())?)),
            Backend::Simulated(simulator) => Queue::Simulated(simulator.clone(), self.place()),
        };
        Ok(Stream::new(self.clone(), queue))
    }

    /// A stream of another library: what is enqueued in it by either runs in order. CUDA only.
    ///
    /// # Safety
    /// `handle` is a `CUstream` (or `cudaStream_t`) of this device's primary context. It is not destroyed as long as
    /// this device, its clones, or what they made are there: the pool remembers in whose order memory was used.
    /// [`Device::stream_of_owner`] sees to that itself.
    ///
    /// **Errors**: [`Error::Unsupported`] where the device is no CUDA card; [`Error::Invalid`] for a default stream:
    /// what is in the legacy one waits for other streams, and the per-thread one is another in each thread.
    pub unsafe fn stream_from_raw(&self, handle: *mut c_void) -> Result<Stream, Error> {
        // SAFETY: the caller's promise.
        unsafe { self.stream_of_caller("Device::stream_from_raw", handle, None) }
    }

    /// The same of a stream that `owner` destroys when it is dropped: the stream and the pool keep it as long as they
    /// use it.
    ///
    /// # Safety
    /// `handle` is a `CUstream` (or `cudaStream_t`) of this device's primary context, and is not destroyed as long as
    /// there is `owner`.
    ///
    /// **Errors**: as [`Device::stream_from_raw`].
    pub unsafe fn stream_of_owner(
        &self,
        handle: *mut c_void,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Stream, Error> {
        // SAFETY: the caller's promise; the stream has the owner as long as it is there itself.
        unsafe { self.stream_of_caller("Device::stream_of_owner", handle, Some(owner)) }
    }

    /// # Safety
    /// As [`Device::stream_of_owner`], and where there is no owner as [`Device::stream_from_raw`].
    unsafe fn stream_of_caller(
        &self,
        op: &'static str,
        handle: *mut c_void,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Stream, Error> {
        let Backend::Cuda(context, _) = &self.shared.backend else {
            let (device, reason) = (self.describe(), "only CUDA has stream handles".into());
            return Err(Error::Unsupported { op, device, reason });
        };
        // Null and `CU_STREAM_LEGACY`; `CU_STREAM_PER_THREAD`.
        let default = match handle.addr() {
            0 | 1 => Some("the legacy default stream"),
            2 => Some("the per-thread default stream"),
            _ => None,
        };
        if let Some(got) = default {
            return Err(Error::invalid(op, "handle", "a stream that was created", got));
        }
        // SAFETY: the caller's promise.
        let stream = unsafe { cuda::Stream::of_caller(context.clone(), handle, owner)? };
        Ok(Stream::new(self.clone(), Queue::Cuda(Arc::new(stream))))
    }

    /// What `select` knows of a card; none on the CPU, where there is nothing to select.
    pub fn limits(&self) -> Option<DeviceLimits> {
        let profile = &self.shared.profile;
        match self.shared.backend {
            Backend::Cpu => None,
            Backend::Cuda(..) | Backend::Simulated(_) => Some(DeviceLimits {
                floor: self.level.bound(self.arch),
                num_sms: profile.num_sms,
                smem_per_block_bytes: profile.smem_per_block_bytes,
                invariance: self.invariance,
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
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {:?}, {:?})", self.describe(), self.level, self.invariance)
    }
}
