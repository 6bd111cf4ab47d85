//! The kernels of this program, by name.

use core::ffi::c_void;
use std::collections::HashMap;
use std::sync::OnceLock;

/// A kernel as `#[kernel]` left it for the host.
#[derive(Debug)]
pub struct Kernel {
    /// The entry point's name.
    pub name: &'static str,
    /// Most threads of a block, if `#[kernel(max_threads = N)]` gave a bound.
    pub max_threads: Option<u32>,
    /// Size of each parameter in bytes.
    pub params: &'static [usize],
    /// Calls the kernel with the parameters at these addresses, as `cuLaunchKernel` takes them.
    ///
    /// # Safety
    /// - There is an address for each of `params`, of a value of that parameter's type.
    /// - The kernel's own contract.
    pub launch: unsafe fn(&[*const c_void]),
}

inventory::collect!(Kernel);

/// The kernel of this name in any crate of the program.
///
/// A crate that nothing of the program names is not linked; `use its_name as _;` is enough. Of two kernels with one
/// name either may be found: on the device that is a link error.
pub fn kernel(name: &str) -> Option<&'static Kernel> {
    static KERNELS: OnceLock<HashMap<&'static str, &'static Kernel>> = OnceLock::new();
    let kernels = || inventory::iter::<Kernel>().map(|kernel| (kernel.name, kernel)).collect();
    KERNELS.get_or_init(kernels).get(name).copied()
}
