//! What a kernel is launched with.

use std::ffi::c_void;

/// Most parameters of a kernel.
pub(crate) const MAX_PARAMS: usize = 24;

/// The shape of a launch.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "nothing is launched on a card"))]
pub(crate) struct LaunchShape {
    /// Blocks.
    pub(crate) grid: [u32; 3],
    /// Threads of a block.
    pub(crate) block: [u32; 3],
    /// Blocks of a cluster in x.
    pub(crate) cluster: u32,
    /// Dynamic shared memory of a block.
    pub(crate) smem_bytes: u32,
    /// Whether no block begins before there is room for all.
    pub(crate) all_at_once: bool,
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug)]
pub enum Param<'a> {
    /// A device address; 0 for a tensor that is not there.
    Address(u64),
    /// A struct, passed by value.
    Struct(&'a dyn abi::Params),
}

impl Param<'_> {
    /// Where the parameter's value is: what `cuLaunchKernel` is given.
    pub fn address(&self) -> *const c_void {
        match self {
            Param::Address(address) => (&raw const *address).cast(),
            Param::Struct(value) => (&raw const **value).cast(),
        }
    }

    /// Size of the parameter's value.
    pub fn bytes(&self) -> usize {
        match self {
            Param::Address(address) => size_of_val(address),
            Param::Struct(value) => size_of_val(*value),
        }
    }
}

impl<'a, P: abi::Params> From<&'a P> for Param<'a> {
    fn from(value: &'a P) -> Self {
        Param::Struct(value)
    }
}
