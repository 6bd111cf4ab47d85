//! The tests of `warpforge-candle` with candle's tensors on a card, which are built with the feature `cuda` alone.
//! `REQUIRE_GPU=1` makes it a failure that there is none.
#![cfg(feature = "cuda")]

#[path = "../../../crates/candle/tests/operators/mod.rs"]
mod operators;

use std::sync::OnceLock;

use candle_core::{DType, Device, Tensor};
// The kernels.
use warpforge as _;

/// A card, in a stream of its own; without one the CPU, where they are right too.
fn device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    let make = || match warpforge::Device::cuda(0) {
        Ok(_) => Device::new_cuda_with_stream(0).expect("candle finds the card, too"),
        Err(reason) => {
            let required =
                std::env::var_os("REQUIRE_GPU").is_some_and(|value| !value.is_empty() && value != "0");
            assert!(!required, "REQUIRE_GPU is set, but: {reason}");
            eprintln!("without a card: {reason}");
            Device::Cpu
        }
    };
    DEVICE.get_or_init(make).clone()
}

/// Candle's usual device has CUDA's per-thread default stream, which an operator cannot tell from another thread's.
#[test]
fn the_default_stream_is_refused() -> candle_core::Result<()> {
    if device().is_cpu() {
        return Ok(());
    }
    let usual = Device::new_cuda(0)?;
    let x = Tensor::ones((2, 16), DType::F32, &usual)?;
    let weight = Tensor::ones(16, DType::F32, &usual)?;
    let error = warpforge_candle::rmsnorm(&x, &weight, 1e-6).unwrap_err().to_string();
    assert!(error.contains("new_cuda_with_stream"), "{error}");
    Ok(())
}

/// What is read from one device of candle's in another's stream comes behind what writes it.
#[test]
fn work_keeps_its_order() -> candle_core::Result<()> {
    let device = device();
    let weight = Tensor::ones(4096, DType::F32, &device)?;
    for round in 0..50 {
        let mut x = Tensor::full(round as f32 + 1.0, (512, 4096), &device)?;
        for _ in 0..4 {
            // Of rows of one number: all ones, whatever it is.
            x = (warpforge_candle::rmsnorm(&x, &weight, 0.0)? * 3.0)?;
        }
        let apart = (x - 3.0)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(apart < 1e-5, "{round}: {apart}");
    }
    Ok(())
}
