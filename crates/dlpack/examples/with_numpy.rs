//! An operator for Python, by DLPack and `ctypes` alone: `with_numpy.py` beside this calls it.
//!
//! ```sh
//! cargo build --package warpforge-dlpack --example with_numpy
//! python3 crates/dlpack/examples/with_numpy.py target/debug/examples/libwith_numpy.so
//! ```

use std::ffi::c_char;

use dlpark::ffi::DLManagedTensorVersioned;
use host::ops::rmsnorm::{NormWeight, RmsNorm, RmsNormArgs, RmsNormProblem};
use host::{Device, Tensor};
use warpforge_dlpack::{ManagedTensor, dlpark, from_dlpack, to_dlpack};

/// Root mean squares of the last axis become 1. Null, with the reason in `message`, where that cannot be.
///
/// # Safety
/// `x` is a tensor that nobody else releases, and what it says of itself is true; `message` has room for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpforge_normed(
    x: *mut DLManagedTensorVersioned,
    message: *mut c_char,
    room: usize,
) -> *mut DLManagedTensorVersioned {
    // SAFETY: the caller's promise.
    match unsafe { normed(x) } {
        Ok(managed) => managed.into_raw(),
        Err(error) => {
            let text = error.to_string();
            let length = text.len().min(room.saturating_sub(1));
            if room > 0 {
                // SAFETY: `length` bytes and the zero behind them are within the caller's `room`.
                unsafe {
                    std::ptr::copy_nonoverlapping(text.as_ptr(), message.cast::<u8>(), length);
                    message.add(length).write(0);
                }
            }
            std::ptr::null_mut()
        }
    }
}

/// # Safety
/// As above, of `x`.
unsafe fn normed(x: *mut DLManagedTensorVersioned) -> Result<ManagedTensor, Box<dyn std::error::Error>> {
    let stream = Device::cpu().stream()?;
    // SAFETY: the caller's promise.
    let x = unsafe { from_dlpack(&stream, ManagedTensor::from_raw(x)?) }?;
    let (view, dtype) = (x.view(), x.view().dtype());
    let [rows, cols] = *view.shape() else { return Err("a matrix is wanted".into()) };
    let problem = RmsNormProblem { rows, cols, dtype, eps: 1e-6, weight: NormWeight::Plain };
    let rmsnorm = RmsNorm::plan(stream.device(), problem)?;
    let ones: Vec<u8> = match dtype {
        host::DType::F16 => half::f16::ONE.to_le_bytes().to_vec(),
        host::DType::BF16 => half::bf16::ONE.to_le_bytes().to_vec(),
        _ => 1f32.to_le_bytes().to_vec(),
    };
    let weight = Tensor::from_bytes(&stream, &[cols], dtype, &ones.repeat(cols))?;
    let mut out = Tensor::empty(&stream, &[rows, cols], dtype)?;
    let args =
        RmsNormArgs { x: view, residual: None, weight: weight.view(), gate: None, out: out.view_mut() };
    rmsnorm.run(&stream, args)?;
    Ok(to_dlpack(out)?)
}
