//! Simulated cards: what a simulator does for a [`Device`](crate::Device).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use abi::Arch;

use crate::backing::{Backing, Released};
use crate::error::{DriverError, Error};
use crate::profile::HardwareProfile;
pub use crate::tensor_map::{Axis, Swizzle as TensorSwizzle, TensorMap, Tiled};

pub use crate::param::Param;

/// A card in software: memory, and kernels that run on it at once when they are launched.
///
/// It holds its kernels itself; they are asked for by the names of the tables in `abi`. Addresses are its own affair: a
/// device only hands them back to it, as they are or advanced into a block.
pub trait Simulator: fmt::Debug + Send + Sync {
    /// What hardware it plays. The device sets `place`, and `memory_bytes` bounds what it allocates.
    fn profile(&self) -> HardwareProfile;

    /// A block of `bytes` bytes, more than none, at a multiple of 256.
    fn allocate(&self, bytes: usize) -> u64;

    /// Takes back a block that [`Simulator::allocate`] gave.
    fn release(&self, address: u64);

    /// Says that a block has a new user, who has asked for its first `usable` bytes only; none if it has no user. What
    /// it held before is nobody's business any more.
    fn assign(&self, address: u64, block_bytes: usize, usable: usize);

    /// Says whether the block that an address is in holds what no kernel writes from here on; kernels may read that
    /// before they have waited for those ahead.
    fn set_constant(&self, _address: u64, _is_constant: bool) {}

    /// Writes bytes from the host.
    fn write(&self, address: u64, data: &[u8]);

    /// Reads bytes to the host.
    fn read(&self, address: u64, data: &mut [u8]);

    /// Sets bytes to zero.
    fn fill_zero(&self, address: u64, bytes: usize);

    /// Copies bytes within its memory; the two ranges may overlap.
    fn copy(&self, from: u64, to: u64, bytes: usize);

    /// Whether it has a kernel of this name in the code of this floor.
    fn has_kernel(&self, entry: &str, arch: Arch) -> bool;

    /// The error with which it refuses a launch, as a driver may; by default it takes all.
    fn refuses(&self, _launch: &Launch<'_>) -> Option<DriverError> {
        None
    }

    /// Encodes a tensor map. Which rule it breaks is text for people.
    fn tensor_map(&self, tiled: &Tiled) -> Result<TensorMap, String>;

    /// The number by which other simulated cards know this one's memory; none where they cannot access it.
    fn peer_id(&self) -> Option<u64> {
        None
    }

    /// Lets kernels of this card access the memory of that number: whether they can.
    fn enable_peer(&self, _peer: u64) -> bool {
        false
    }

    /// Runs a kernel to its end; one that waits for kernels of other cards, at the same time as those. What it found
    /// wrong is text for people.
    ///
    /// # Safety
    /// - The parameters are of the types that the kernel declares, in order.
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), String>;
}

/// One launch, as a [`Simulator`] gets it.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// The kernel's name.
    pub entry: &'static str,
    /// The floor whose code the device runs.
    pub arch: Arch,
    /// Blocks in x, y, z; none is 0.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Blocks of a cluster in x; 1 without clusters.
    pub cluster: u32,
    /// Dynamic shared memory of a block.
    pub smem_bytes: u32,
    /// The kernel's parameters, in order.
    pub params: &'a [Param<'a>],
    /// The launches of other cards that it waits for, if it does.
    pub together: Option<Together>,
}

/// A launch that waits for those of the other ranks of a group, which other threads make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Together {
    /// The group's number.
    pub group: u64,
    /// Whose launch this is.
    pub rank: usize,
    /// Ranks of the group.
    pub size: usize,
    /// How long to wait for the others' launches before it runs without those that have not come.
    pub timeout: Duration,
}

/// A simulator's memory behind the pool.
#[derive(Debug)]
pub(crate) struct SimulatedMemory {
    simulator: Arc<dyn Simulator>,
    name: String,
    total_bytes: usize,
    used_bytes: AtomicUsize,
}

impl SimulatedMemory {
    pub(crate) fn new(simulator: Arc<dyn Simulator>, profile: &HardwareProfile) -> Self {
        let (name, total_bytes) = (profile.name.clone(), profile.memory_bytes);
        SimulatedMemory { simulator, name, total_bytes, used_bytes: AtomicUsize::new(0) }
    }
}

impl Backing for SimulatedMemory {
    fn allocate(&self, bytes: usize) -> Result<Option<u64>, Error> {
        let grow = |used: usize| used.checked_add(bytes).filter(|&used| used <= self.total_bytes);
        let room = self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow);
        Ok(room.is_ok().then(|| self.simulator.allocate(bytes)))
    }

    /// Each block stays what the simulator gave: it reports an access beyond a block's end, and would not beyond a
    /// piece's.
    fn divided_from(&self) -> usize {
        usize::MAX
    }

    unsafe fn release(&self, blocks: &[(u64, usize)]) -> Result<Released, Error> {
        for &(address, bytes) in blocks {
            self.simulator.release(address);
            self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        Ok(Released::Gone(Ok(())))
    }

    fn assign(&self, address: u64, block_bytes: usize, usable: usize) {
        self.simulator.assign(address, block_bytes, usable);
    }

    fn set_constant(&self, address: u64, is_constant: bool) {
        self.simulator.set_constant(address, is_constant);
    }

    fn report(&self) -> (usize, usize, String) {
        let free = self.total_bytes - self.used_bytes.load(Ordering::Relaxed);
        (free, self.total_bytes, self.name.clone())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Mutex;

    use super::{Launch, Simulator, TensorMap, Tiled};
    use crate::device::{Device, HardwareProfile, Place, TensorCores};
    use crate::ops::rmsnorm::{NormWeight, RmsNorm, RmsNormArgs, RmsNormProblem};
    use crate::{DType, Error, OptLevel, Stream, Tensor};
    use abi::Arch;
    use std::sync::Arc;

    /// 1 KiB of bytes from address 4096 on, a log of what was asked, and kernels that do as they are told.
    #[derive(Debug)]
    pub(crate) struct Script {
        bytes: Mutex<Vec<u8>>,
        log: Mutex<Vec<String>>,
        capability: (u32, u32),
        outcome: Result<(), String>,
    }

    const START: u64 = 4096;

    impl Script {
        pub(crate) fn new(capability: (u32, u32), outcome: Result<(), String>) -> Arc<Self> {
            let (bytes, log) = (Mutex::new(vec![0xee; 1024]), Mutex::default());
            Arc::new(Script { bytes, log, capability, outcome })
        }

        fn say(&self, line: String) {
            self.log.lock().unwrap().push(line);
        }

        pub(crate) fn said(&self) -> Vec<String> {
            std::mem::take(&mut self.log.lock().unwrap())
        }
    }

    impl Simulator for Script {
        fn profile(&self) -> HardwareProfile {
            let (major, minor) = self.capability;
            HardwareProfile {
                name: "Script".into(),
                compute_capability: Some(self.capability),
                tensor_cores: TensorCores::of(major, minor),
                num_sms: 7,
                memory_bytes: 1024,
                smem_per_block_bytes: 48 << 10,
                ..HardwareProfile::detect()
            }
        }
        fn allocate(&self, bytes: usize) -> u64 {
            self.say(format!("allocate {bytes}"));
            START
        }
        fn release(&self, address: u64) {
            self.say(format!("release {address}"));
        }
        fn assign(&self, address: u64, block_bytes: usize, usable: usize) {
            self.say(format!("assign {address} {block_bytes} {usable}"));
        }
        fn write(&self, address: u64, data: &[u8]) {
            self.bytes.lock().unwrap()[(address - START) as usize..][..data.len()].copy_from_slice(data);
        }
        fn read(&self, address: u64, data: &mut [u8]) {
            data.copy_from_slice(&self.bytes.lock().unwrap()[(address - START) as usize..][..data.len()]);
        }
        fn fill_zero(&self, address: u64, bytes: usize) {
            self.bytes.lock().unwrap()[(address - START) as usize..][..bytes].fill(0);
        }
        fn copy(&self, from: u64, to: u64, bytes: usize) {
            let from = (from - START) as usize;
            self.bytes.lock().unwrap().copy_within(from..from + bytes, (to - START) as usize);
        }
        fn has_kernel(&self, entry: &str, _: Arch) -> bool {
            entry.starts_with("rmsnorm_f32")
        }
        fn tensor_map(&self, tiled: &Tiled) -> Result<TensorMap, String> {
            Err(format!("no map of {} rows", tiled.rows))
        }
        unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), String> {
            let Launch { entry, arch, grid, block, smem_bytes, params, .. } = *launch;
            let sizes: Vec<usize> = params.iter().map(|param| param.bytes()).collect();
            self.say(format!("{entry} {arch} {grid:?} {block:?} {smem_bytes} {sizes:?}"));
            self.outcome.clone()
        }
    }

    const PROBLEM: RmsNormProblem =
        RmsNormProblem { rows: 2, cols: 4, dtype: DType::F32, eps: 1e-6, weight: NormWeight::Plain };

    /// Runs [`PROBLEM`] with all tensors in one.
    fn run(plan: &RmsNorm, device: &Device) -> Result<(), Error> {
        run_in(plan, device, &device.stream()?)
    }

    /// The same in a stream that need not be the device's.
    fn run_in(plan: &RmsNorm, device: &Device, wrong: &Stream) -> Result<(), Error> {
        let stream = device.stream()?;
        let mut all = Tensor::zeros(&stream, &[5, 4], DType::F32)?;
        let address = all.view().address();
        let part = |row: u64, shape: &[usize], strides: &[usize]| {
            // SAFETY: inside the tensor, which lives longer; nothing touches its bytes.
            unsafe { crate::TensorView::from_raw(device, address + row * 16, shape, strides, DType::F32) }
        };
        let (x, weight) = (part(0, &[2, 4], &[4, 1])?, part(2, &[4], &[1])?);
        let out = all.view_mut().slice(0, 3..5)?;
        plan.run(wrong, RmsNormArgs { x, residual: None, weight, gate: None, out })
    }

    #[test]
    fn a_launch_goes_to_the_simulator() -> Result<(), Error> {
        let script = Script::new((9, 0), Ok(()));
        let device = Device::simulated(script.clone())?;
        assert_eq!(device.describe(), format!("Script ({}, sm_90a)", device.place()));
        let older = device.with_arch(Arch::Sm61)?;
        let plan = RmsNorm::plan(&older, PROBLEM)?;
        run(&plan, &older)?;
        assert_eq!(
            script.said(),
            [
                "allocate 512",
                "assign 4096 512 80",
                "rmsnorm_f32__lanes8__sm61 sm_61 [1, 1, 1] [256, 1, 1] 128 [8, 8, 8, 8, 8, 56]",
                "assign 4096 512 0"
            ]
        );
        let report = plan.report();
        assert_eq!((report.resources, report.occupancy), (None, None));
        drop((device, older, plan));
        assert_eq!(script.said(), ["release 4096"]);
        Ok(())
    }

    #[test]
    fn what_the_simulator_finds_is_an_error() -> Result<(), Error> {
        let device = Device::simulated(Script::new((8, 0), Err("block 0 reads too much".into())))?;
        let error = run(&RmsNorm::plan(&device, PROBLEM)?, &device).unwrap_err();
        let expected =
            format!("rmsnorm_f32__lanes8__sm61 failed on {}: block 0 reads too much", device.describe());
        assert_eq!(error.to_string(), expected);
        assert!(matches!(error, Error::Simulation { entry: "rmsnorm_f32__lanes8__sm61", .. }));
        let missing = RmsNormProblem { dtype: DType::BF16, ..PROBLEM };
        assert_eq!(
            RmsNorm::plan(&device, missing).unwrap_err().to_string(),
            format!(
                "rmsnorm: not supported on {}: the simulator has no kernel rmsnorm_bf16__scalar__sm61",
                device.describe()
            )
        );
        Ok(())
    }

    #[test]
    fn a_simulated_card_is_a_device_like_others() -> Result<(), Error> {
        let script = Script::new((8, 0), Ok(()));
        let (device, other) = (Device::simulated(script.clone())?, Device::simulated(script)?);
        assert!(matches!(device.place(), Place::Simulated(_)) && device.place() != other.place());
        assert!(matches!(device.profile().place, Place::Simulated(_)));
        let limits = device.with_level(OptLevel::Basic).limits().unwrap();
        assert_eq!((limits.floor, limits.num_sms), (Arch::Sm61, 7));
        assert_eq!(device.limits().unwrap().floor, Arch::Sm80);
        assert_eq!(
            device.with_arch(Arch::Sm90a).unwrap_err().to_string(),
            "Script has compute capability 8.0: it cannot run sm_90a code"
        );
        let pascal = Device::simulated(Script::new((6, 0), Ok(()))).unwrap_err().to_string();
        assert_eq!(pascal, "Script has compute capability 6.0: no floor runs on it");

        let stream = device.stream()?;
        let data: Vec<u32> = (0..9).collect();
        let mut tensor = Tensor::from_slice(&stream, &[9], &data)?;
        assert_eq!(tensor.to_vec::<u32>(&stream)?, data);
        let from = tensor.view().slice(0, 1..8)?;
        // SAFETY: inside the tensor.
        let to =
            unsafe { crate::TensorViewMut::from_raw(&device, from.address() + 4, &[7], &[1], DType::U32)? };
        stream.copy(from, to)?;
        assert_eq!(tensor.to_vec::<u32>(&stream)?, [0, 1, 1, 2, 3, 4, 5, 6, 7]);
        let start = stream.record()?;
        assert!(stream.record()?.elapsed_ms(&start)? >= 0.0 && start.query()?);
        stream.synchronize()?;
        assert_eq!(
            stream.capture(|_| Ok(())).unwrap_err().to_string(),
            format!(
                "Stream::capture: not supported on {}: only CUDA streams can be recorded",
                device.describe()
            )
        );
        assert_eq!(
            tensor.to_vec::<u32>(&other.stream()?).unwrap_err().to_string(),
            format!("TensorView::to_vec: stream: expected {}, got {}", device.place(), other.place())
        );
        assert_eq!(
            tensor.view_mut().write(&other.stream()?, &data).unwrap_err().to_string(),
            format!("TensorViewMut::write: stream: expected {}, got {}", device.place(), other.place())
        );
        assert_eq!(
            Tensor::empty(&stream, &[1000], DType::I8).unwrap_err().to_string(),
            "out of memory on Script: 1000 bytes requested; this pool has 512 in use of 512 reserved; the device has 512 \
             free of 1024, 488 too few"
        );
        Ok(())
    }

    /// A plan of one simulated card in a stream of another.
    #[test]
    fn streams_of_another_card() -> Result<(), Error> {
        let devices = [(8, 0), (9, 0)].map(|capability| Device::simulated(Script::new(capability, Ok(()))));
        let [a, b] = devices;
        let (a, b) = (a?, b?);
        let plan = RmsNorm::plan(&a, PROBLEM)?;
        let expected = |plan: &Device, stream: &Device| {
            let (plan, stream) = (plan.place(), stream.place());
            format!("rmsnorm: stream: expected a stream of {plan}, got a stream of {stream}")
        };
        // With the tensors of the other, with its own, and where one of the two is the CPU.
        assert_eq!(run(&plan, &b).unwrap_err().to_string(), expected(&a, &b));
        assert_eq!(run_in(&plan, &a, &b.stream()?).unwrap_err().to_string(), expected(&a, &b));
        let cpu = Device::cpu();
        assert_eq!(run_in(&plan, &a, &cpu.stream()?).unwrap_err().to_string(), expected(&a, &cpu));
        let on_cpu = RmsNorm::plan(&cpu, PROBLEM)?;
        assert_eq!(run_in(&on_cpu, &cpu, &a.stream()?).unwrap_err().to_string(), expected(&cpu, &a));
        // Another's tensors in its own stream.
        let message = run_in(&plan, &b, &a.stream()?).unwrap_err().to_string();
        assert_eq!(message, format!("rmsnorm: x: expected {}, got {}", a.place(), b.place()));
        Ok(())
    }

    /// A wait that would not happen.
    #[test]
    fn streams_of_other_kinds_cannot_wait() -> Result<(), Error> {
        let (card, cpu) = (Device::simulated(Script::new((8, 0), Ok(())))?, Device::cpu());
        let other = Device::simulated(Script::new((9, 0), Ok(())))?;
        let (on_card, on_cpu) = (card.stream()?, cpu.stream()?);
        on_card.wait_for(&card.stream()?)?;
        on_card.wait_for(&other.stream()?)?;
        on_cpu.wait_for(&cpu.stream()?)?;
        let place = card.place();
        for (stream, waited_for, expected) in [
            (
                &on_card,
                &on_cpu,
                format!("a stream of the same kind of device as {place}, got one of the CPU"),
            ),
            (
                &on_cpu,
                &on_card,
                format!("a stream of the same kind of device as the CPU, got one of {place}"),
            ),
        ] {
            let message = stream.wait_for(waited_for).unwrap_err().to_string();
            assert_eq!(message, format!("Stream::wait_for: other: expected {expected}"));
        }
        Ok(())
    }
}
