//! The driver calls against a real device. Without one the tests say why they skip; `REQUIRE_GPU=1` makes that a
//! failure.

use std::ffi::{CStr, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda_loader::driver::{
    self, DeviceAttribute, FuncAttribute, LaunchAttributes, Overlap, TensorMapDataType, TensorMapParams,
    TensorMapSwizzle, Timing,
};
use cust::context::Context;
use cust::device::Device;
use cust::memory::{cuda_free, cuda_malloc};
use cust::sys::{CUdeviceptr, CUevent, CUfunction, CUmodule, CUstream};

/// Adds `add` to each of `n` words.
const ADD: &CStr = c"
.version 6.3
.target sm_61
.address_size 64
.visible .entry add_to_all(.param .u64 words, .param .u32 n, .param .u32 add) {
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [words];
    ld.param.u32 %r1, [n];
    ld.param.u32 %r2, [add];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r6, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd1, %rd1;
    mul.wide.u32 %rd2, %r6, 4;
    add.u64 %rd3, %rd1, %rd2;
    ld.global.u32 %r7, [%rd3];
    add.u32 %r7, %r7, %r2;
    st.global.u32 [%rd3], %r7;
DONE:
    ret;
}
";

/// Each block writes its rank in its cluster.
const RANKS: &CStr = c"
.version 7.8
.target sm_90
.address_size 64
.visible .entry ranks(.param .u64 words) {
    .reg .b32 %r<3>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [words];
    cvta.to.global.u64 %rd1, %rd1;
    griddepcontrol.wait;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %cluster_ctarank;
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r2;
    ret;
}
";

/// The primary context of device 0, current on this thread, for one test at a time: memory that one frees, or a module
/// that it unloads, is no business of what another records.
struct Gpu {
    device: Device,
    _context: Context,
    _alone: MutexGuard<'static, ()>,
}

fn gpu() -> Option<Gpu> {
    let reason = match cuda_loader::load().map_err(|error| error.to_string()) {
        Ok(()) => match cuda_loader::init().and_then(|()| cuda_loader::device_count()) {
            Ok(0) => String::from("the driver reports no device"),
            Ok(_) => {
                let device = Device::get_device(0).expect("device 0");
                static ALONE: Mutex<()> = Mutex::new(());
                let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
                let _context = Context::new(device).expect("its primary context");
                return Some(Gpu { device, _context, _alone });
            }
            Err(error) => error.to_string(),
        },
        Err(reason) => reason,
    };
    assert!(std::env::var_os("REQUIRE_GPU").is_none_or(|value| value != "1"), "REQUIRE_GPU=1, but {reason}");
    eprintln!("skipped: {reason}");
    None
}

/// A module with one kernel, a stream and 1024 words of device memory, all of the current context.
struct Bench {
    module: CUmodule,
    function: CUfunction,
    stream: CUstream,
    words: CUdeviceptr,
}

const WORDS: u32 = 1024;

impl Bench {
    fn new(ptx: &CStr, entry: &CStr) -> Self {
        let module = driver::module_load_data(ptx).expect("the driver takes the image");
        // SAFETY: the module was loaded above; nothing else uses the new memory.
        unsafe {
            let function = driver::module_get_function(module, entry).expect("the entry is there");
            let words = cuda_malloc::<u32>(WORDS as usize).expect("four KiB").as_raw();
            Bench { module, function, stream: driver::stream_create().expect("a stream"), words }
        }
    }

    /// Sets every word.
    fn fill(&self, value: u32) {
        // SAFETY: `words` has this size, and all work on it is on this stream.
        unsafe { driver::memset_d32_async(self.words, value, WORDS as usize, self.stream) }.expect("fills");
    }

    /// Adds to every word; `smem_bytes` is asked for and not used.
    fn add(&self, stream: CUstream, mut add: u32, smem_bytes: u32) -> Result<(), cuda_loader::DriverError> {
        let (mut words, mut n) = (self.words, WORDS);
        let mut params = [pointer(&mut words), pointer(&mut n), pointer(&mut add)];
        // SAFETY: the three parameters are those of `add_to_all`, `words` has `n` words, and all handles are live.
        unsafe {
            driver::launch_kernel(
                self.function,
                [WORDS / 256, 1, 1],
                [256, 1, 1],
                smem_bytes,
                stream,
                &mut params,
            )
        }
    }

    fn read(&self) -> Vec<u32> {
        let mut host = vec![0u32; WORDS as usize];
        // SAFETY: both sides have `WORDS` words, and `host` is read after the copy is done.
        unsafe {
            let bytes = size_of_val(&host[..]);
            driver::memcpy_dtoh_async(host.as_mut_ptr().cast(), self.words, bytes, self.stream)
                .expect("copies");
            driver::stream_synchronize(self.stream).expect("no kernel failed");
        }
        host
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // SAFETY: all are live and used no more; the stream is done before the module goes.
        unsafe {
            let _ = driver::stream_synchronize(self.stream);
            let _ = driver::stream_destroy(self.stream);
            let _ = cuda_free(cust::memory::DevicePointer::<u32>::from_raw(self.words));
            let _ = driver::module_unload(self.module);
        }
    }
}

fn pointer<T>(value: &mut T) -> *mut c_void {
    std::ptr::from_mut(value).cast()
}

#[test]
fn kernels_run_and_describe_themselves() {
    let Some(gpu) = gpu() else { return };
    let bench = Bench::new(ADD, c"add_to_all");
    bench.fill(40);
    bench.add(bench.stream, 2, 0).expect("launches");
    assert_eq!(bench.read(), [42; WORDS as usize]);

    // SAFETY: the bench's handles are live.
    unsafe {
        let attribute = |which| driver::func_attribute(bench.function, which).expect("an attribute");
        assert_eq!(attribute(FuncAttribute::LocalBytes), 0);
        assert_eq!(attribute(FuncAttribute::StaticSharedBytes), 0);
        assert_eq!(attribute(FuncAttribute::PtxVersion), 61);
        assert!((1..=255).contains(&attribute(FuncAttribute::NumRegs)));
        assert!(attribute(FuncAttribute::BinaryVersion) >= 61);
        assert_eq!(attribute(FuncAttribute::MaxThreadsPerBlock), 1024);
        let blocks = driver::occupancy_max_active_blocks(bench.function, 256, 0).expect("an occupancy");
        assert!(blocks >= 2, "{blocks}");
        let has_clusters = driver::device_attribute(gpu.device.as_raw(), DeviceAttribute::ClusterLaunch);
        if has_clusters == Ok(1) {
            let clusters = |blocks| {
                driver::occupancy_max_active_clusters(bench.function, 1024, 0, blocks).expect("a number")
            };
            assert!(clusters(4) >= 1 && clusters(2) >= 2 * clusters(4), "{} {}", clusters(2), clusters(4));
        }
        let missing = driver::module_get_function(bench.module, c"no_such_entry").unwrap_err();
        assert_eq!(missing.name, "CUDA_ERROR_NOT_FOUND");
    }

    let optin = driver::device_attribute(gpu.device.as_raw(), DeviceAttribute::MaxSharedMemoryPerBlockOptin);
    let optin = optin.expect("an attribute") as u32;
    if optin > 48 * 1024 {
        assert_eq!(bench.add(bench.stream, 1, optin).unwrap_err().name, "CUDA_ERROR_INVALID_VALUE");
        // SAFETY: the function is live.
        unsafe {
            driver::set_max_dynamic_shared(bench.function, optin).expect("the device has it");
            let set = driver::func_attribute(bench.function, FuncAttribute::MaxDynamicSharedBytes);
            assert_eq!(set, Ok(optin as i32));
            let refused = driver::set_max_dynamic_shared(bench.function, optin + 1).unwrap_err();
            assert_eq!(refused.name, "CUDA_ERROR_INVALID_VALUE");
        }
        bench.add(bench.stream, 1, optin).expect("launches");
        assert_eq!(bench.read(), [43; WORDS as usize]);
    }
}

#[test]
fn a_broken_image_is_refused_with_the_assemblers_words() {
    let Some(_gpu) = gpu() else { return };
    let error =
        driver::module_load_data(c".version 6.3\n.target sm_61\n.address_size 64\nnonsense;\n").unwrap_err();
    assert_eq!(error.source.name, "CUDA_ERROR_INVALID_PTX");
    assert!(error.log.contains("nonsense"), "{error}");
}

#[test]
fn events_order_two_streams_and_measure() {
    let Some(_gpu) = gpu() else { return };
    let bench = Bench::new(ADD, c"add_to_all");
    let other = driver::stream_create().expect("a stream");
    let events: [CUevent; 2] =
        [Timing::Enabled; 2].map(|timing| driver::event_create(timing).expect("an event"));
    let untimed = driver::event_create(Timing::Disabled).expect("an event");
    // SAFETY: all handles are live, and of one context.
    unsafe {
        driver::event_record(events[0], bench.stream).expect("records");
        bench.fill(0);
        for turn in 0..50 {
            let (from, to) = if turn % 2 == 0 { (bench.stream, other) } else { (other, bench.stream) };
            driver::event_record(untimed, from).expect("records");
            driver::stream_wait_event(to, untimed).expect("waits");
            bench.add(to, 1, 0).expect("launches");
        }
        driver::event_record(events[1], bench.stream).expect("records");
        driver::event_synchronize(events[1]).expect("completes");
        assert_eq!(driver::event_query(events[1]), Ok(true));
        assert_eq!(driver::stream_query(bench.stream), Ok(true));
        assert_eq!(bench.read(), [50; WORDS as usize]);
        let milliseconds = driver::event_elapsed_ms(events[0], events[1]).expect("both are timed");
        assert!(milliseconds > 0.0 && milliseconds < 1000.0, "{milliseconds}");
        let untimed_error = driver::event_elapsed_ms(events[0], untimed).unwrap_err();
        assert_eq!(untimed_error.name, "CUDA_ERROR_INVALID_HANDLE");
        driver::stream_destroy(other).expect("destroys");
        for event in [events[0], events[1], untimed] {
            driver::event_destroy(event).expect("destroys");
        }
    }
}

#[test]
fn a_captured_graph_replays() {
    let Some(_gpu) = gpu() else { return };
    let bench = Bench::new(ADD, c"add_to_all");
    bench.fill(0);
    let other = driver::stream_create().expect("a stream");
    // SAFETY: all handles are live, and the memory outlives the launches, which `read` waits for.
    unsafe {
        assert!(!driver::stream_is_capturing(bench.stream).expect("answers"));
        driver::stream_begin_capture(bench.stream).expect("captures");
        assert!(driver::stream_is_capturing(bench.stream).expect("answers"));
        for add in [1, 10, 100] {
            bench.add(bench.stream, add, 0).expect("is recorded");
            let _relaxed = driver::RelaxedCapture::begin().expect("relaxes");
            driver::stream_synchronize(other).expect("is not captured");
        }
        let graph = driver::stream_end_capture(bench.stream).expect("a graph");
        assert!(!driver::stream_is_capturing(bench.stream).expect("answers"));
        let exec = graph.instantiate().expect("a launchable graph");
        drop(graph);
        assert_eq!(bench.read(), [0; WORDS as usize]);
        exec.launch(bench.stream).expect("launches");
        exec.launch(bench.stream).expect("launches");
        assert_eq!(bench.read(), [222; WORDS as usize]);
        assert!(driver::stream_end_capture(bench.stream).is_err(), "no capture is under way");
        driver::stream_destroy(other).expect("destroys");
    }
}

#[test]
fn memory_that_the_driver_knows() {
    let Some(_gpu) = gpu() else { return };
    let bench = Bench::new(ADD, c"add_to_all");
    assert!(
        driver::is_known_memory(bench.words as usize as *const c_void).expect("the driver answers"),
        "the device's"
    );
    let pinned = cust::memory::LockedBuffer::new(&0u32, 1024).expect("pinned memory");
    assert!(driver::is_known_memory(pinned.as_ptr().cast()).expect("the driver answers"));
    assert!(!driver::is_known_memory(vec![0u32; 1024].as_ptr().cast()).expect("the driver answers"));
}

#[test]
fn copies_and_byte_fills_reach_their_bytes() {
    let Some(_gpu) = gpu() else { return };
    let bench = Bench::new(ADD, c"add_to_all");
    bench.fill(0);
    let host: Vec<u32> = (0..WORDS).collect();
    // SAFETY: every range is within `words` and `host`, `host` outlives the copy, and `read` waits for all.
    unsafe {
        let half = WORDS as usize / 2 * 4;
        driver::memcpy_htod_async(bench.words, host.as_ptr().cast(), half, bench.stream).expect("copies");
        driver::memcpy_dtod_async(bench.words + half as u64, bench.words, half - 4, bench.stream)
            .expect("copies");
        driver::memset_d8_async(bench.words + 4 * u64::from(WORDS) - 3, 0xab, 3, bench.stream)
            .expect("fills");
    }
    let half = WORDS / 2;
    let expected: Vec<u32> = (0..half).chain(0..half - 1).chain([0xabab_ab00]).collect();
    assert_eq!(bench.read(), expected);
}

#[test]
fn clusters_and_dependent_launches_run_on_hopper() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device.as_raw();
    if driver::device_attribute(device, DeviceAttribute::ClusterLaunch) != Ok(1) {
        eprintln!("skipped: the device has no clusters");
        return;
    }
    let bench = Bench::new(RANKS, c"ranks");
    let launch = |attributes: LaunchAttributes, blocks: u32| {
        let mut words = bench.words;
        let mut params = [pointer(&mut words)];
        // SAFETY: the one parameter is that of `ranks`, which writes one word per block and waits for the kernel ahead.
        unsafe {
            let (grid, block) = ([blocks, 1, 1], [32, 1, 1]);
            driver::launch_kernel_ex(bench.function, grid, block, 0, bench.stream, &attributes, &mut params)
        }
    };
    let plain = LaunchAttributes::default();
    for overlap in [Overlap::None, Overlap::Programmatic] {
        bench.fill(99);
        launch(LaunchAttributes { cluster: Some([4, 1, 1]), overlap, ..plain }, 8).expect("launches");
        launch(LaunchAttributes { cluster: Some([4, 1, 1]), overlap, ..plain }, 8).expect("launches");
        assert_eq!(bench.read()[..9], [0, 1, 2, 3, 0, 1, 2, 3, 99]);
        launch(LaunchAttributes { cluster: None, overlap, ..plain }, 8).expect("launches");
        assert_eq!(bench.read()[..9], [0, 0, 0, 0, 0, 0, 0, 0, 99]);
    }
    bench.fill(99);
    launch(LaunchAttributes { cooperative: true, ..plain }, 8).expect("launches");
    assert_eq!(bench.read()[..9], [0, 0, 0, 0, 0, 0, 0, 0, 99]);
    let error = launch(LaunchAttributes { cluster: Some([4, 1, 1]), ..plain }, 7).unwrap_err();
    assert!(error.name.starts_with("CUDA_ERROR_"), "{error}");
}

#[test]
fn tensor_maps_are_encoded_on_hopper() {
    let Some(gpu) = gpu() else { return };
    if driver::device_attribute(gpu.device.as_raw(), DeviceAttribute::TensorMapAccess) != Ok(1) {
        eprintln!("skipped: the device has no tensor maps");
        return;
    }
    let bench = Bench::new(ADD, c"add_to_all");
    let good = TensorMapParams {
        data_type: TensorMapDataType::Bf16,
        address: bench.words,
        dims: &[64, 32],
        strides_bytes: &[128],
        box_dims: &[64, 8],
        element_strides: &[1, 1],
        interleave: Default::default(),
        swizzle: TensorMapSwizzle::Bytes128,
        l2_promotion: Default::default(),
        oob_fill: Default::default(),
    };
    let map = driver::tensor_map_encode_tiled(&good).expect("the driver encodes");
    let moved = driver::tensor_map_encode_tiled(&TensorMapParams { address: bench.words + 1024, ..good });
    assert_ne!(map.0, [0; 16]);
    assert_ne!(moved.expect("the driver encodes"), map);
    let too_wide = TensorMapParams { box_dims: &[128, 8], ..good };
    assert_eq!(driver::tensor_map_encode_tiled(&too_wide).unwrap_err().name, "CUDA_ERROR_INVALID_VALUE");
}
