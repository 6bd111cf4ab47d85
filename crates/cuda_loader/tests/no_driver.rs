//! What a program sees on a machine without a CUDA driver. With a driver these tests say so and pass.

#![cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]

use cuda_loader::driver::{self, DeviceAttribute, TensorMapDataType, TensorMapParams};
use cuda_loader::{DriverError, LoadError};

fn driver_is_there() -> bool {
    let there = cuda_loader::load().is_ok();
    if there {
        eprintln!("skipped: this machine has a CUDA driver");
    }
    there
}

#[test]
fn load_names_what_was_tried() {
    if driver_is_there() {
        return;
    }
    let error = cuda_loader::load().unwrap_err();
    let LoadError::NotFound { attempts } = &error else { panic!("{error:?}") };
    assert_eq!(
        attempts.iter().map(|attempt| attempt.name).collect::<Vec<_>>(),
        ["libcuda.so.1", "libcuda.so"]
    );
    assert!(attempts[0].message.contains("cannot open shared object file"), "{error}");
    let message = error.to_string();
    assert!(
        message.starts_with("the CUDA driver library cannot be loaded; tried libcuda.so.1 ("),
        "{message}"
    );
    assert!(message.contains("), libcuda.so ("), "{message}");
}

#[test]
fn every_thread_gets_the_same_answer() {
    let first = cuda_loader::load();
    std::thread::scope(|scope| {
        let answers: Vec<_> = (0..32).map(|_| scope.spawn(cuda_loader::load)).collect();
        for answer in answers {
            assert_eq!(answer.join().expect("load does not panic"), first);
        }
    });
}

#[test]
fn our_calls_name_the_code() {
    if driver_is_there() {
        return;
    }
    let missing = DriverError {
        code: 303,
        name: "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED".into(),
        description: "the CUDA driver library cannot be loaded".into(),
    };
    assert_eq!(cuda_loader::init(), Err(missing.clone()));
    assert_eq!(cuda_loader::driver_version(), Err(missing.clone()));
    let error = cuda_loader::device_count().unwrap_err();
    assert_eq!(
        error.to_string(),
        "CUDA_ERROR_NOT_INITIALIZED (3): the CUDA driver is not loaded or not initialized"
    );
    assert_eq!(driver::device_attribute(0, DeviceAttribute::ClusterLaunch), Err(error.clone()));
    assert_eq!(driver::stream_create(), Err(error.clone()));
    let refused = driver::module_load_data(c".version 6.3").unwrap_err();
    assert_eq!((refused.source, refused.log.as_str()), (error, ""));
}

#[test]
fn codes_without_a_name_are_still_errors() {
    let error = DriverError::from_code(12_345);
    assert_eq!((error.code, error.name.as_str()), (12_345, "CUresult 12345"));
}

#[test]
fn bad_tensor_maps_are_refused_before_the_driver_reads_past_a_list() {
    let good = TensorMapParams {
        data_type: TensorMapDataType::Bf16,
        address: 0x1000,
        dims: &[128, 64, 2],
        strides_bytes: &[256, 256 * 64],
        box_dims: &[64, 64, 1],
        element_strides: &[1, 1, 1],
        interleave: Default::default(),
        swizzle: Default::default(),
        l2_promotion: Default::default(),
        oob_fill: Default::default(),
    };
    let refusal = |params: TensorMapParams<'_>| {
        let error = driver::tensor_map_encode_tiled(&params).unwrap_err();
        assert_eq!(error.code, 1);
        error.description
    };
    assert_eq!(
        refusal(TensorMapParams { strides_bytes: &[256], ..good }),
        "strides_bytes of a tensor map of rank 3: expected 2 values, got 1"
    );
    assert_eq!(
        refusal(TensorMapParams { box_dims: &[64, 64], ..good }),
        "box_dims of a tensor map of rank 3: expected 3 values, got 2"
    );
    assert_eq!(
        refusal(TensorMapParams { element_strides: &[1; 4], ..good }),
        "element_strides of a tensor map of rank 3: expected 3 values, got 4"
    );
    assert_eq!(
        refusal(TensorMapParams { dims: &[], strides_bytes: &[], ..good }),
        "a tensor map has 1 to 5 dimensions, got 0"
    );
    assert_eq!(
        refusal(TensorMapParams { dims: &[1; 6], strides_bytes: &[16; 5], ..good }),
        "a tensor map has 1 to 5 dimensions, got 6"
    );
}
