//! A run's checks and its launch allocate nothing on the host, up to the driver's door: on a card that does nothing, so
//! that all that is counted is the library's own.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use host::group::{Group, PeerOptions};
use host::simulator::{Launch, Simulator, TensorMap, Tiled};
use host::{Arch, DType, Device, Error, HardwareProfile, Place, Sample, Tensor, TensorCores, ops};

/// The system's allocator, which counts.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does it all; the count is a number of the thread, which takes no allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A Hopper card that has every kernel, and does nothing.
#[derive(Debug)]
struct Idle {
    next: AtomicU64,
}

impl Simulator for Idle {
    fn profile(&self) -> HardwareProfile {
        HardwareProfile {
            name: "Idle".into(),
            place: Place::Cpu,
            compute_capability: Some((9, 0)),
            pci_bus_id: None,
            tensor_cores: TensorCores::Gen4Hopper,
            num_sms: 132,
            memory_bytes: 1 << 40,
            l2_bytes: 50 << 20,
            smem_per_block_bytes: 227 << 10,
            smem_per_sm_bytes: 228 << 10,
            registers_per_sm: 1 << 16,
            threads_per_sm: 2048,
            memory_bandwidth: 0.0,
            driver: None,
        }
    }
    fn allocate(&self, bytes: usize) -> u64 {
        self.next.fetch_add(bytes.next_multiple_of(256) as u64, Ordering::Relaxed)
    }
    fn release(&self, _address: u64) {}
    fn assign(&self, _address: u64, _block_bytes: usize, _usable: usize) {}
    fn write(&self, _address: u64, _data: &[u8]) {}
    fn read(&self, _address: u64, _data: &mut [u8]) {}
    fn fill_zero(&self, _address: u64, _bytes: usize) {}
    fn copy(&self, _from: u64, _to: u64, _bytes: usize) {}
    fn peer_id(&self) -> Option<u64> {
        Some(0)
    }
    fn enable_peer(&self, _peer: u64) -> bool {
        true
    }
    fn has_kernel(&self, _entry: &str, _: Arch) -> bool {
        true
    }
    fn tensor_map(&self, _tiled: &Tiled) -> Result<TensorMap, String> {
        Ok(TensorMap([0; 16]))
    }
    unsafe fn launch(&self, _launch: &Launch<'_>) -> Result<(), String> {
        Ok(())
    }
}

/// What the second of two runs allocates.
fn allocations(device: &Device, sample: &Sample) -> Result<usize, Error> {
    let stream = device.stream()?;
    let tensor = |of: &host::SampleTensor| Tensor::zeros(&stream, &of.shape, of.dtype);
    let mut tensors = sample.tensors.iter().map(tensor).collect::<Result<Vec<_>, _>>()?;
    let mut views: Vec<_> = tensors.iter_mut().map(Tensor::view_mut).collect();
    sample.run(&stream, &mut views)?;
    let before = ALLOCATIONS.get();
    sample.run(&stream, &mut views)?;
    Ok(ALLOCATIONS.get() - before)
}

#[test]
fn runs_allocate_nothing() -> Result<(), Error> {
    let card = Device::simulated(Arc::new(Idle { next: AtomicU64::new(256) }))?;
    let (mut all, mut met) = (BTreeSet::new(), BTreeSet::new());
    for arch in Arch::ALL.into_iter().filter(|arch| arch.runs_on(9, 0)) {
        let device = card.with_arch(arch)?;
        // Kernels of few rows, and of many: pairs for one block, and for more; token by token, and in chunks.
        for rows in [1, 4, 300, 4096] {
            for dtype in [DType::BF16, DType::F32] {
                for (op, samples) in ops::samples(&device, rows, dtype)? {
                    all.insert(op);
                    for sample in samples {
                        met.insert(op);
                        let count = allocations(&device, &sample)?;
                        assert_eq!(count, 0, "{sample:?} on {}", device.describe());
                    }
                }
            }
        }
    }
    // Not each is of all types and floors.
    assert_eq!(met, all);
    Ok(())
}

/// Copies that do not wait find their memory.
#[test]
fn warm_copies_allocate_nothing() -> Result<(), Error> {
    let card = Device::simulated(Arc::new(Idle { next: AtomicU64::new(256) }))?;
    for device in [card, Device::cpu()] {
        let stream = device.stream()?;
        let mut tensor = Tensor::zeros(&stream, &[5000], DType::F32)?;
        let data = vec![1f32; 5000];
        let mut before = 0;
        for _ in 0..3 {
            before = ALLOCATIONS.get();
            tensor.view_mut().enqueue_write(&stream, &data)?;
            let mut download = tensor.view().enqueue_read::<f32>(&stream)?;
            assert_eq!(download.read()?.len(), 5000);
        }
        assert_eq!(ALLOCATIONS.get() - before, 0, "{}", device.describe());
        assert_eq!(device.staging().stats().num_reused, 2);
    }
    Ok(())
}

/// A sum over peers, in one stream and in another one by turns, is a launch and no more.
#[test]
fn sums_over_peers_allocate_nothing() -> Result<(), Error> {
    let card = || Device::simulated(Arc::new(Idle { next: AtomicU64::new(256) }));
    let group = Group::over_peers(&[card()?, card()?], PeerOptions::default())?;
    let rank = &group.ranks()[0];
    let streams = [rank.device().stream()?, rank.device().stream()?];
    let mut x = Tensor::zeros(&streams[0], &[1000], DType::BF16)?;
    let mut call = |stream| rank.all_reduce(stream, x.view_mut());
    call(&streams[0])?;
    let before = ALLOCATIONS.get();
    streams.iter().try_for_each(&mut call)?;
    assert_eq!(ALLOCATIONS.get() - before, 0);
    Ok(())
}
