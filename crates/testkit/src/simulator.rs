//! A simulated card: `cuda_std`'s simulator as a device of `host`, with every kernel of this program. Those of the
//! operators are there with the feature `kernels`, those of another crate if the program names it (`use its_name as
//! _;`).
//!
//! The order of threads and the moments of asynchronous operations come from a seed, which is made anew for each launch
//! from what is launched: the same launch in another place of a test takes the same course. `WARPFORGE_SIM_SEED` gives
//! all launches another course.

use std::collections::BTreeSet;
use std::env;
use std::ffi::c_void;
use std::fmt::{Display, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use abi::{Arch, DType};
use cuda_std::sim::tensor_map::{self, Element, Fill};
use cuda_std::sim::{self, Memory};
use cuda_std::wgmma::Swizzle;
use host::device::{HardwareProfile, TensorCores};
use host::simulator::{Launch, Param, Simulator, TensorMap, TensorSwizzle, Tiled};
use host::{DriverError, Place};

// The kernels: a crate that is not named is not linked.
#[cfg(feature = "kernels")]
use gpu as _;

use crate::strategies::Rng;
use together::Request;

mod together;

/// A simulated card, to be made a device by `Device::simulated`.
#[derive(Debug)]
pub struct Card {
    model: Model,
    /// Fewer than it has.
    num_sms: Option<u32>,
    memory_bytes: usize,
    base_seed: u64,
    state: Arc<Mutex<State>>,
}

/// What there is to know of a card.
#[derive(Clone, Copy, Debug)]
struct Model {
    name: &'static str,
    compute_capability: (u32, u32),
    num_sms: u32,
    l2_mib: usize,
    /// Shared memory of a block.
    smem_kib: u32,
    /// Shared memory of a multiprocessor.
    sm_smem_kib: u32,
}

impl Model {
    const fn new(
        name: &'static str,
        compute_capability: (u32, u32),
        num_sms: u32,
        l2_mib: usize,
        smem_kib: u32,
        sm_smem_kib: u32,
    ) -> Self {
        Model { name, compute_capability, num_sms, l2_mib, smem_kib, sm_smem_kib }
    }

    /// The oldest card of a floor.
    const fn of(floor: Arch) -> Self {
        match floor {
            Arch::Sm61 => Model::new("simulated GTX 1080", (6, 1), 20, 2, 48, 96),
            Arch::Sm80 => Model::new("simulated A100", (8, 0), 108, 40, 163, 164),
            Arch::Sm90a => Model::new("simulated H200", (9, 0), 132, 50, 227, 228),
            Arch::Sm100 => Model::new("simulated B200", (10, 0), 148, 126, 227, 228),
        }
    }
}

#[derive(Debug, Default)]
struct State {
    memory: Memory,
    loaded: BTreeSet<&'static str>,
    launched: BTreeSet<&'static str>,
}

impl Card {
    /// The oldest card of a floor: a GTX 1080, an A100, an H200, or a B200.
    ///
    /// # Panics
    /// When `WARPFORGE_SIM_SEED` is set and is not a number.
    pub fn new(floor: Arch) -> Self {
        Card::of(Model::of(floor))
    }

    /// An RTX 5090: of Blackwell as a B200, with less shared memory.
    ///
    /// # Panics
    /// As [`Card::new`].
    pub fn rtx_5090() -> Self {
        Card::of(Model::new("simulated RTX 5090", (12, 0), 170, 96, 99, 100))
    }

    fn of(model: Model) -> Self {
        let base_seed = parse_seed(env::var("WARPFORGE_SIM_SEED").ok().as_deref())
            .unwrap_or_else(|message| panic!("{message}"));
        // What a test may want of the host.
        Card { model, num_sms: None, memory_bytes: 1 << 30, base_seed, state: Arc::default() }
    }

    /// The same with so many multiprocessors: on one, a block of a kernel whose blocks stay does all of the work.
    ///
    /// # Panics
    /// As [`Card::new`].
    pub fn with_sms(floor: Arch, num_sms: u32) -> Self {
        Card { num_sms: Some(num_sms), ..Card::new(floor) }
    }

    /// The same with so much memory.
    ///
    /// # Panics
    /// As [`Card::new`].
    pub fn with_memory(floor: Arch, memory_bytes: usize) -> Self {
        Card { memory_bytes, ..Card::new(floor) }
    }

    /// Puts bytes out of bounds for kernels, until the host writes them or their block has another user.
    pub fn forbid(&self, address: u64, bytes: usize) {
        self.lock().memory.forbid(address, bytes);
    }

    /// Takes the contents from bytes: a kernel that reads them before it wrote them is reported.
    pub fn uninitialise(&self, address: u64, bytes: usize) {
        self.lock().memory.uninitialise(address, bytes);
    }

    /// The kernels that plans have loaded since the last time that this was asked.
    pub fn take_loaded(&self) -> BTreeSet<&'static str> {
        std::mem::take(&mut self.lock().loaded)
    }

    /// The kernels that have run to their end without a report.
    pub fn launched(&self) -> BTreeSet<&'static str> {
        self.lock().launched.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // A kernel that panicked has left bytes half written at worst.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The seed of all launches where `WARPFORGE_SIM_SEED` gives no other.
const BASE_SEED: u64 = 0;

fn parse_seed(value: Option<&str>) -> Result<u64, String> {
    match value.map(str::trim) {
        None | Some("") => Ok(BASE_SEED),
        Some(text) => {
            text.parse().map_err(|_| format!("WARPFORGE_SIM_SEED: expected a number, got {text:?}"))
        }
    }
}

/// The seed of one launch: of everything about it but its addresses, which depend on what ran before.
fn launch_seed(base: u64, launch: &Launch<'_>) -> u64 {
    let Launch { entry, arch, grid, block, cluster, smem_bytes, params, .. } = *launch;
    let mut text = format!("{entry} {arch} {grid:?} {block:?} {cluster} {smem_bytes}");
    for param in params {
        if let Param::Struct(value) = param {
            let _ = write!(text, " {value:?}");
        }
    }
    text.bytes().fold(base, |seed, byte| Rng::new(seed ^ u64::from(byte)).next_u64())
}

impl Simulator for Card {
    fn profile(&self) -> HardwareProfile {
        let Model { name, compute_capability, num_sms, l2_mib, smem_kib, sm_smem_kib } = self.model;
        HardwareProfile {
            name: name.into(),
            place: Place::Cpu,
            compute_capability: Some(compute_capability),
            tensor_cores: TensorCores::of(compute_capability.0, compute_capability.1),
            num_sms: self.num_sms.unwrap_or(num_sms),
            memory_bytes: self.memory_bytes,
            l2_bytes: l2_mib << 20,
            smem_per_block_bytes: smem_kib << 10,
            smem_per_sm_bytes: sm_smem_kib << 10,
            registers_per_sm: 64 << 10,
            threads_per_sm: 2048,
            pci_bus_id: None,
            // No times are simulated.
            memory_bandwidth: 0.0,
            driver: None,
        }
    }

    fn allocate(&self, bytes: usize) -> u64 {
        self.lock().memory.allocate(&format!("a block of {bytes} bytes"), bytes)
    }

    fn release(&self, address: u64) {
        self.lock().memory.free(address);
    }

    fn assign(&self, address: u64, block_bytes: usize, usable: usize) {
        let memory = &mut self.lock().memory;
        memory.uninitialise(address, usable);
        memory.forbid(address + usable as u64, block_bytes - usable);
    }

    fn set_constant(&self, address: u64, is_constant: bool) {
        self.lock().memory.set_constant(address, is_constant);
    }

    fn write(&self, address: u64, data: &[u8]) {
        self.lock().memory.write(address, data);
    }

    fn read(&self, address: u64, data: &mut [u8]) {
        self.lock().memory.read(address, data);
    }

    fn fill_zero(&self, address: u64, bytes: usize) {
        self.write(address, &vec![0; bytes]);
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) {
        let mut data = vec![0; bytes];
        self.read(from, &mut data);
        self.write(to, &data);
    }

    fn peer_id(&self) -> Option<u64> {
        Some(together::enter(&self.state))
    }

    fn enable_peer(&self, peer: u64) -> bool {
        self.lock().memory.enable_peer(peer);
        true
    }

    fn has_kernel(&self, entry: &str, _: Arch) -> bool {
        let kernel = sim::kernel(entry);
        self.lock().loaded.extend(kernel.map(|kernel| kernel.name));
        kernel.is_some()
    }

    fn tensor_map(&self, tiled: &Tiled) -> Result<TensorMap, String> {
        let (dims, strides_bytes, box_dims, rank) = tiled.dims();
        let element = match tiled.dtype {
            DType::F32 => Element::F32,
            DType::F16 => Element::F16,
            DType::BF16 => Element::Bf16,
            DType::F8E4M3 | DType::I8 => Element::U8,
            DType::I32 => Element::I32,
            DType::U32 => Element::U32,
        };
        let map = tensor_map::encode(&tensor_map::Tiled {
            element,
            address: tiled.address,
            dims: &dims[..rank],
            strides_bytes: &strides_bytes[..rank - 1],
            box_dims: &box_dims[..rank],
            element_strides: &[1; 4][..rank],
            swizzle: match tiled.swizzle {
                TensorSwizzle::Bytes64 => Swizzle::Bytes64,
                TensorSwizzle::Bytes128 => Swizzle::Bytes128,
            },
            fill: Fill::Zeros,
        });
        map.map(|map| TensorMap(map.0)).map_err(|error| error.to_string())
    }

    #[allow(unsafe_code)]
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), String> {
        let Launch { entry, arch, grid, block, cluster, smem_bytes, params, together } = *launch;
        let kernel = sim::kernel(entry).ok_or("no crate of this program has the kernel")?;
        let sizes: Vec<usize> = params.iter().map(Param::bytes).collect();
        if sizes != kernel.params {
            return Err(format!("the kernel's parameters have {:?} bytes, not {sizes:?}", kernel.params));
        }
        let threads = block.iter().map(|&size| u64::from(size)).product::<u64>();
        if let Some(max) = kernel.max_threads.filter(|&max| threads > u64::from(max)) {
            return Err(format!("blocks of {threads} threads; the kernel was compiled for at most {max}"));
        }
        if smem_bytes > self.model.smem_kib << 10 {
            return Err(format!(
                "{smem_bytes} bytes of shared memory per block; the card has {} KiB",
                self.model.smem_kib
            ));
        }
        let seed = launch_seed(self.base_seed, launch);
        let cluster = [cluster, 1, 1];
        let simulated =
            sim::Launch { kernel: entry, grid, block, cluster, shared_bytes: smem_bytes, arch, seed };
        if let Some(together) = together {
            let request = Request::new(kernel, &simulated, params, &self.state);
            // SAFETY: as below.
            let ran = unsafe { request.run(together) };
            return ran.map_err(|report| self.explain(launch, &report));
        }
        let addresses: Vec<*const c_void> = params.iter().map(Param::address).collect();
        let state = &mut *self.lock();
        // SAFETY: as many parameters as the kernel declares, of its sizes; their types — the caller.
        let run = || unsafe { (kernel.launch)(&addresses) };
        sim::simulate(&mut state.memory, &simulated, run).map_err(|report| self.explain(launch, &report))?;
        state.launched.insert(kernel.name);
        Ok(())
    }
}

/// What a card refuses, as a driver may.
#[derive(Clone, Copy, Debug)]
pub enum Refuses {
    /// Nothing.
    Nothing,
    /// Kernels, by name and by the floor of their code, when they are loaded.
    Kernels(fn(&str, Arch) -> bool),
    /// The same when they are launched.
    Launches(fn(&str, Arch) -> bool),
    /// More memory than so many bytes.
    MemoryBeyond(usize),
}

/// A simulated card that refuses.
#[derive(Debug)]
pub struct Refusing {
    card: Card,
    refuses: Refuses,
}

impl Refusing {
    /// That card, refusing this.
    pub fn new(card: Card, refuses: Refuses) -> Self {
        Refusing { card, refuses }
    }
}

impl Simulator for Refusing {
    fn profile(&self) -> HardwareProfile {
        let profile = self.card.profile();
        match self.refuses {
            Refuses::MemoryBeyond(memory_bytes) => HardwareProfile { memory_bytes, ..profile },
            _ => profile,
        }
    }

    fn allocate(&self, bytes: usize) -> u64 {
        self.card.allocate(bytes)
    }

    fn release(&self, address: u64) {
        self.card.release(address);
    }

    fn assign(&self, address: u64, block_bytes: usize, usable: usize) {
        self.card.assign(address, block_bytes, usable);
    }

    fn set_constant(&self, address: u64, is_constant: bool) {
        self.card.set_constant(address, is_constant);
    }

    fn write(&self, address: u64, data: &[u8]) {
        self.card.write(address, data);
    }

    fn read(&self, address: u64, data: &mut [u8]) {
        self.card.read(address, data);
    }

    fn fill_zero(&self, address: u64, bytes: usize) {
        self.card.fill_zero(address, bytes);
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) {
        self.card.copy(from, to, bytes);
    }

    fn has_kernel(&self, entry: &str, arch: Arch) -> bool {
        let is_refused = matches!(self.refuses, Refuses::Kernels(refuses) if refuses(entry, arch));
        !is_refused && self.card.has_kernel(entry, arch)
    }

    fn refuses(&self, launch: &Launch<'_>) -> Option<DriverError> {
        let Refuses::Launches(refuses) = self.refuses else { return None };
        let (name, description) =
            ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch");
        refuses(launch.entry, launch.arch).then(|| DriverError {
            code: 701,
            name: name.into(),
            description: description.into(),
        })
    }

    fn tensor_map(&self, tiled: &Tiled) -> Result<TensorMap, String> {
        self.card.tensor_map(tiled)
    }

    #[allow(unsafe_code)]
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), String> {
        // SAFETY: the caller's promise.
        unsafe { self.card.launch(launch) }
    }
}

impl Card {
    /// The report, the launch, and how to see it again.
    fn explain(&self, launch: &Launch<'_>, report: &dyn Display) -> String {
        let Launch { grid, block, smem_bytes, params, .. } = launch;
        let mut text =
            format!("{report}\nwith grid {grid:?}, block {block:?}, {smem_bytes} bytes of shared memory,");
        for param in *params {
            if let Param::Struct(value) = param {
                let _ = write!(text, " {value:?}");
            }
        }
        let _ = write!(text, "\nsee it again: WARPFORGE_SIM_SEED={} cargo test", self.base_seed);
        // The test harness names each test's thread after the test, unless it runs one test at a time.
        if let Some(test) = std::thread::current().name().filter(|&name| name != "main") {
            let _ = write!(text, " {test}");
        }
        text
    }
}

#[cfg(all(test, feature = "kernels"))]
#[allow(unsafe_code)]
mod tests {
    use super::*;
    use abi::ops::embedding::{EmbeddingDims, EmbeddingVariant, VARIANTS};
    use host::Device;
    use std::sync::Arc;

    const EMBEDDING: &EmbeddingVariant = &VARIANTS[0];

    #[test]
    fn every_kernel_of_the_tables_is_there() {
        let card = Card::new(Arch::Sm61);
        for family in abi::families() {
            for entry in abi::entries(family) {
                assert!(card.has_kernel(entry, Arch::Sm61), "{entry}");
            }
        }
        assert!(!card.has_kernel("rmsnorm", Arch::Sm61));
    }

    #[test]
    fn seeds() {
        assert_eq!(parse_seed(None), Ok(BASE_SEED));
        assert_eq!(parse_seed(Some(" 17 ")), Ok(17));
        for bad in ["seven", "-1", "0x10"] {
            let message = format!("WARPFORGE_SIM_SEED: expected a number, got {bad:?}");
            assert_eq!(parse_seed(Some(bad)), Err(message));
        }
    }

    const DIMS: EmbeddingDims =
        EmbeddingDims { cols: 1, vocab: 2, table_stride: 1, out_stride: 1, in_quads: 0 };

    fn launch<'a>(entry: &'static str, threads: u32, params: &'a [Param<'a>]) -> Launch<'a> {
        let (grid, block) = ([1, 1, 1], [threads, 1, 1]);
        Launch { entry, arch: Arch::Sm61, grid, block, cluster: 1, smem_bytes: 0, params, together: None }
    }

    #[test]
    fn a_launch_takes_its_course_wherever_it_is() {
        let entry = EMBEDDING.entry;
        let seed = |address, dims: &EmbeddingDims, base| {
            launch_seed(base, &launch(entry, 32, &[Param::Address(address), Param::Struct(dims)]))
        };
        let first = seed(256, &DIMS, 0);
        assert_eq!(first, seed(512, &DIMS, 0));
        let wider = EmbeddingDims { cols: 2, ..DIMS };
        assert!(first != seed(256, &wider, 0) && first != seed(256, &DIMS, 1));
    }

    #[test]
    fn launches_that_a_driver_would_refuse() {
        let card = Card::new(Arch::Sm61);
        // SAFETY: nothing of these runs.
        let message = |launch: &Launch<'_>| unsafe { card.launch(launch) }.unwrap_err();
        let addresses = [Param::Address(0); 3];
        let with_dims = [addresses[0], addresses[1], addresses[2], Param::Struct(&DIMS)];
        assert_eq!(message(&launch("no_such", 32, &[])), "no crate of this program has the kernel");
        assert_eq!(
            message(&launch(EMBEDDING.entry, 32, &addresses)),
            "the kernel's parameters have [8, 8, 8, 20] bytes, not [8, 8, 8]"
        );
        assert_eq!(
            message(&launch(EMBEDDING.entry, 512, &with_dims)),
            "blocks of 512 threads; the kernel was compiled for at most 256"
        );
        assert!(card.launched().is_empty());
    }

    #[test]
    fn cards_are_devices_of_their_floor() {
        for floor in Arch::ALL {
            let device = Device::simulated(Arc::new(Card::new(floor))).expect("a device");
            let limits = device.limits().expect("a card");
            assert_eq!(limits.floor, floor);
            let kib = match floor {
                Arch::Sm61 => 48,
                Arch::Sm80 => 163,
                Arch::Sm90a | Arch::Sm100 => 227,
            };
            assert_eq!(limits.smem_per_block_bytes, kib << 10);
        }
    }
}
