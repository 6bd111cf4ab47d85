//! The loader against a driver of a few functions, built here from C: calls arrive with their arguments intact, and
//! what the driver lacks answers `CUDA_ERROR_NOT_FOUND`. Needs a C compiler (`cc`); without one the tests say so and
//! pass.
//!
//! The fake must be found before any real driver, and the process's library path is read at its start: so each test
//! runs this binary again, with the path set.

#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use cuda_loader::driver::sys::{CUfunction, CUstream};
use cuda_loader::driver::{
    self, LaunchAttributes, Overlap, TensorMapDataType, TensorMapL2Promotion, TensorMapOobFill,
    TensorMapParams, TensorMapSwizzle,
};

const INSIDE: &str = "CUDA_LOADER_TEST_INSIDE";

/// The folder with the fake `libcuda.so.1`, or `None` without a C compiler.
fn fake_driver() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_driver");
        std::fs::create_dir_all(&folder).expect("the temporary folder is writable");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_driver/libcuda.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]);
        let status = compiler.arg(folder.join("libcuda.so.1")).arg(&source).status().ok()?;
        assert!(status.success(), "cc failed on {}", source.display());
        Some(folder)
    };
    FOLDER.get_or_init(build).as_deref()
}

/// Runs `check` in a process that finds the fake driver. `test` is the calling test's name.
fn with_fake_driver(test: &str, check: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        return check();
    }
    let Some(folder) = fake_driver() else {
        eprintln!("skipped: no C compiler (cc)");
        return;
    };
    let output = Command::new(std::env::current_exe().expect("this binary has a path"))
        .args([test, "--exact", "--nocapture"])
        .env(INSIDE, "1")
        .env("LD_LIBRARY_PATH", folder)
        .output()
        .expect("this binary runs");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

fn handle<T>(address: usize) -> *mut T {
    std::ptr::without_provenance_mut(address)
}

#[cfg(feature = "cust")]
#[test]
fn cust_reaches_the_driver_without_a_call_to_load() {
    with_fake_driver("cust_reaches_the_driver_without_a_call_to_load", || {
        let version = cust::CudaApiVersion::get().expect("the fake driver answers");
        assert_eq!((version.major(), version.minor()), (12, 4));
        cust::init(cust::CudaFlags::empty()).expect("the fake driver starts");
        assert_eq!(cust::device::Device::num_devices(), Ok(7));
    });
}

#[test]
fn many_threads_start_it_at_once() {
    with_fake_driver("many_threads_start_it_at_once", || {
        let gate = std::sync::Barrier::new(32);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..32)
                .map(|index| {
                    let gate = &gate;
                    scope.spawn(move || {
                        gate.wait();
                        match index % 3 {
                            0 => cuda_loader::load().expect("the fake driver is found"),
                            1 => assert_eq!(cuda_loader::driver_version(), Ok((12, 4))),
                            _ => cuda_loader::init().expect("the fake driver starts"),
                        }
                        cuda_loader::init().expect("the fake driver starts");
                        assert_eq!(cuda_loader::device_count(), Ok(7));
                    })
                })
                .collect();
            for thread in threads {
                thread.join().expect("no panic");
            }
        });
    });
}

#[test]
fn what_the_driver_lacks_answers_not_found() {
    with_fake_driver("what_the_driver_lacks_answers_not_found", || {
        cuda_loader::load().expect("the fake driver is found");
        let error = driver::stream_create().unwrap_err();
        assert_eq!(
            error.to_string(),
            "CUDA_ERROR_NOT_FOUND (500): the installed CUDA driver lacks this function"
        );
        assert_eq!(driver::mem_get_info(), Err(error));
        #[cfg(feature = "cust")]
        {
            assert_eq!(cust::memory::mem_get_info(), Err(cust::error::CudaError::NotFound));
            // SAFETY: the driver has no such function, so nothing is followed.
            let status = unsafe { cust::sys::cuGraphDestroy(std::ptr::null_mut()) };
            assert_eq!(status, cust::sys::CUresult::CUDA_ERROR_NOT_FOUND);
        }
    });
}

#[test]
fn eleven_arguments_arrive_intact_and_newer_codes_pass() {
    with_fake_driver("eleven_arguments_arrive_intact_and_newer_codes_pass", || {
        cuda_loader::load().expect("the fake driver is found");
        let mut seen = [0u64; 11];
        let mut params: [*mut c_void; 1] = [seen.as_mut_ptr().cast()];
        let (function, stream): (CUfunction, CUstream) = (handle(0x1234_5678_9abc), handle(0xfedc_ba98_7654));
        // SAFETY: the fake follows the first parameter only, to the eleven words above.
        let launched = unsafe {
            driver::launch_kernel(function, [u32::MAX, 2, 3], [4, 5, 6], 0x8000_0007, stream, &mut params)
        };
        let list = params.as_ptr() as u64;
        let expected =
            [0x1234_5678_9abc, u32::MAX as u64, 2, 3, 4, 5, 6, 0x8000_0007, 0xfedc_ba98_7654, list, 0];
        assert_eq!(seen, expected);
        let error = launched.unwrap_err();
        assert_eq!((error.code, error.name.as_str()), (912, "CUDA_ERROR_INVALID_CLUSTER_SIZE"));
    });
}

#[cfg(feature = "cust")]
#[test]
fn floats_arrive_intact() {
    with_fake_driver("floats_arrive_intact", || {
        cuda_loader::load().expect("the fake driver is found");
        // SAFETY: the fake follows nothing.
        let status = unsafe { cust::sys::cuParamSetf(std::ptr::null_mut(), 5, 2.5) };
        assert_eq!(status, cust::sys::CUresult::CUDA_SUCCESS);
    });
}

#[test]
fn launch_attributes_have_the_layout_of_c() {
    with_fake_driver("launch_attributes_have_the_layout_of_c", || {
        cuda_loader::load().expect("the fake driver is found");
        let launch = |attributes: LaunchAttributes| {
            let mut seen = [0u64; 16];
            let mut params: [*mut c_void; 1] = [seen.as_mut_ptr().cast()];
            // SAFETY: the fake follows the first parameter only, and writes at most fourteen words there.
            unsafe {
                let (function, stream) = (handle(0x77), handle(0x88));
                driver::launch_kernel_ex(
                    function,
                    [8, 9, 10],
                    [32, 2, 1],
                    4096,
                    stream,
                    &attributes,
                    &mut params,
                )
            }
            .expect("the fake driver launches");
            seen
        };
        let plain = [0x77, 8, 9, 10, 32, 2, 1, 4096, 0x88, 0];
        assert_eq!(launch(LaunchAttributes::default())[..], [&plain[..], &[0; 6]].concat());
        let overlap = LaunchAttributes { overlap: Overlap::Programmatic, ..LaunchAttributes::default() };
        assert_eq!(launch(overlap)[..], [&plain[..], &[1, 0, 0, 0, 0, 0]].concat());
        let both = LaunchAttributes { cluster: Some([2, 3, 4]), ..overlap };
        assert_eq!(launch(both)[..], [&plain[..], &[2, 3, 4, 1, 0, 0]].concat());
        let all = LaunchAttributes { cooperative: true, ..both };
        assert_eq!(launch(all)[..], [&plain[..], &[2, 3, 4, 1, 1, 0]].concat());
    });
}

#[test]
fn callbacks_get_what_they_were_added_with() {
    unsafe extern "C" fn callback(stream: CUstream, status: u32, data: *mut c_void) {
        // SAFETY: the words below, which are there until the call has returned.
        unsafe { *data.cast::<[usize; 2]>() = [stream as usize, status as usize] };
    }
    with_fake_driver("callbacks_get_what_they_were_added_with", || {
        cuda_loader::load().expect("the fake driver is found");
        let mut seen = [0usize; 2];
        // SAFETY: the fake does not follow the stream, and calls before it returns.
        unsafe { driver::stream_add_callback(handle(0x99), callback, (&raw mut seen).cast()) }
            .expect("the fake driver calls back");
        assert_eq!(seen, [0x99, 700]);
        // SAFETY: the fake refuses it.
        let refused =
            unsafe { driver::stream_add_callback(handle(0), callback, (&raw mut seen).cast()) }.unwrap_err();
        assert_eq!(refused.code, 1);
    });
}

#[test]
fn tensor_maps_are_encoded_from_all_their_parameters() {
    with_fake_driver("tensor_maps_are_encoded_from_all_their_parameters", || {
        cuda_loader::load().expect("the fake driver is found");
        let params = TensorMapParams {
            data_type: TensorMapDataType::Bf16,
            address: 0x7f00_0000_1000,
            dims: &[4096, 333],
            strides_bytes: &[8192],
            box_dims: &[64, 128],
            element_strides: &[1, 2],
            interleave: Default::default(),
            swizzle: TensorMapSwizzle::Bytes128,
            l2_promotion: TensorMapL2Promotion::Bytes256,
            oob_fill: TensorMapOobFill::Nan,
        };
        let map = driver::tensor_map_encode_tiled(&params).expect("the fake driver encodes");
        assert_eq!(map.0, [9, 2, 0x7f00_0000_1000, 4096, 333, 8192, 64, 128, 1, 2, 0, 3, 3, 1, 0, 99]);
    });
}

#[test]
fn a_refused_image_comes_with_its_log() {
    with_fake_driver("a_refused_image_comes_with_its_log", || {
        cuda_loader::load().expect("the fake driver is found");
        let error = driver::module_load_data(c"bad").unwrap_err();
        assert_eq!(error.log, "line 1: bad\ncompiling for nothing");
        assert_eq!((error.source.code, error.source.name.as_str()), (218, "CUresult 218"));
        assert_eq!(
            error.to_string(),
            format!("the image was refused: CUresult 218 (218): unrecognized error code\n{}", error.log)
        );
    });
}
