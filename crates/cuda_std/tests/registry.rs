//! `#[kernel]` on the host: found by name, called with the addresses of its parameters.

use core::ffi::c_void;

use cuda_std::sim::{Kernel, kernel};

/// A parameter struct.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Dims {
    scale: f32,
    offset: f32,
}

/// # Safety
/// `out` is one float.
#[cuda_std::kernel(max_threads = 64)]
pub unsafe fn scaled(out: *mut f32, value: u16, dims: Dims) {
    // SAFETY: the caller's promise.
    unsafe { out.write(f32::from(value) * dims.scale + dims.offset) }
}

/// # Safety
/// None.
#[cfg(false)]
#[cuda_std::kernel]
pub unsafe fn configured_out() {}

mod inner {
    #[cuda_std::kernel]
    unsafe fn private() {}
}

#[test]
fn a_kernel_is_called_with_the_addresses_of_its_parameters() {
    let Kernel { name, max_threads, params, launch } = *kernel("scaled").expect("a kernel of this program");
    assert_eq!((name, max_threads, params), ("scaled", Some(64), &[8, 2, 8][..]));
    let mut result = 0.0f32;
    let (out, value, dims) = (&raw mut result, 7u16, Dims { scale: 2.0, offset: 0.5 });
    let addresses = [(&raw const out).cast::<c_void>(), (&raw const value).cast(), (&raw const dims).cast()];
    // SAFETY: values of the declared types; `out` is a float.
    unsafe { launch(&addresses) };
    assert_eq!(result, 14.5);
}

#[test]
fn what_is_found() {
    let private = kernel("private").expect("also kernels of private modules");
    assert_eq!((private.max_threads, private.params), (None, &[][..]));
    assert!(kernel("configured_out").is_none());
    assert!(kernel("scale").is_none() && kernel("").is_none());
}
