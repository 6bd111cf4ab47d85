//! Kernels: their attributes and their launch.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;

use super::sys::{CUfunction, CUstream};

use super::ffi;
use crate::error::{DriverError, check};

/// What the driver knows about a loaded kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FuncAttribute {
    /// Threads of a block that registers and `.maxntid` allow.
    MaxThreadsPerBlock = 0,
    /// Bytes of statically declared shared memory.
    StaticSharedBytes = 1,
    /// Bytes of local memory per thread: anything but 0 is a spill or an array that did not fit registers.
    LocalBytes = 3,
    /// Registers per thread.
    NumRegs = 4,
    /// Virtual architecture that the PTX was written for, as 10 × major + minor.
    PtxVersion = 5,
    /// Architecture that it was assembled for, as 10 × major + minor.
    BinaryVersion = 6,
    /// Bytes of dynamic shared memory that a launch may ask for; see [`set_max_dynamic_shared`].
    MaxDynamicSharedBytes = 8,
}

/// Reads an attribute of a kernel.
///
/// # Safety
/// `function` is live.
pub unsafe fn func_attribute(function: CUfunction, attribute: FuncAttribute) -> Result<i32, DriverError> {
    let mut value: c_int = 0;
    // SAFETY: `function` is live — the caller; `value` is writable — a local.
    check(unsafe { ffi::cuFuncGetAttribute(&mut value, attribute as c_int, function) })?;
    Ok(value)
}

/// Lets launches of the kernel ask for up to `bytes` of dynamic shared memory; without this the limit is 48 KiB.
///
/// `CUDA_ERROR_INVALID_VALUE` if static and dynamic bytes together exceed
/// [`DeviceAttribute::MaxSharedMemoryPerBlockOptin`](super::DeviceAttribute::MaxSharedMemoryPerBlockOptin).
///
/// # Safety
/// `function` is live.
pub unsafe fn set_max_dynamic_shared(function: CUfunction, bytes: u32) -> Result<(), DriverError> {
    let value = c_int::try_from(bytes).map_err(|_| {
        DriverError::invalid_value(format!(
            "{bytes} bytes of dynamic shared memory are more than {}",
            c_int::MAX
        ))
    })?;
    // SAFETY: `function` is live — the caller.
    check(unsafe { ffi::cuFuncSetAttribute(function, FuncAttribute::MaxDynamicSharedBytes as c_int, value) })
}

/// How many blocks of the kernel one multiprocessor holds at a time.
///
/// # Safety
/// `function` is live.
pub unsafe fn occupancy_max_active_blocks(
    function: CUfunction,
    block_size: u32,
    dynamic_smem_bytes: usize,
) -> Result<u32, DriverError> {
    let block_size = c_int::try_from(block_size).map_err(|_| {
        DriverError::invalid_value(format!("a block of {block_size} threads is more than {}", c_int::MAX))
    })?;
    let mut blocks: c_int = 0;
    // SAFETY: `function` is live — the caller; `blocks` is writable — a local.
    check(unsafe {
        ffi::cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &mut blocks,
            function,
            block_size,
            dynamic_smem_bytes,
        )
    })?;
    Ok(blocks.unsigned_abs())
}

/// How many clusters of `cluster` blocks in x of the kernel the device holds at a time: fewer than its multiprocessors
/// would, since a cluster lies in one of their groups, and groups are not of one size. `CUDA_ERROR_NOT_FOUND` from a
/// driver before CUDA 11.8.
///
/// # Safety
/// `function` is live.
pub unsafe fn occupancy_max_active_clusters(
    function: CUfunction,
    block_size: u32,
    dynamic_smem_bytes: u32,
    cluster: u32,
) -> Result<u32, DriverError> {
    let mut list = [LaunchAttribute::new(CLUSTER_DIMENSION, [cluster, 1, 1])];
    let config = LaunchConfig {
        grid: [cluster, 1, 1],
        block: [block_size, 1, 1],
        smem_bytes: dynamic_smem_bytes,
        stream: std::ptr::null_mut(),
        attributes: list.as_mut_ptr(),
        num_attributes: 1,
    };
    let mut clusters: c_int = 0;
    // SAFETY: `function` is live — the caller; `config`, the attribute that it points to and `clusters` are locals.
    check(unsafe { ffi::cuOccupancyMaxActiveClusters(&mut clusters, function, &config) })?;
    Ok(clusters.unsigned_abs())
}

/// Queues a kernel. `grid` is in blocks and `block` in threads, both x, y, z.
///
/// # Safety
/// - `function` and `stream` are live and of the same context.
/// - `params` holds one pointer per parameter of the kernel, each to a readable value of that parameter's type.
/// - What the kernel does with these values is sound, until the stream has passed it.
pub unsafe fn launch_kernel(
    function: CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    smem_bytes: u32,
    stream: CUstream,
    params: &mut [*mut c_void],
) -> Result<(), DriverError> {
    let ([gx, gy, gz], [bx, by, bz]) = (grid, block);
    let extra = std::ptr::null_mut();
    // SAFETY: handles and parameters are as the driver needs them — the caller; the driver copies the values at once.
    check(unsafe {
        ffi::cuLaunchKernel(function, gx, gy, gz, bx, by, bz, smem_bytes, stream, params.as_mut_ptr(), extra)
    })
}

/// Whether a kernel may start before the one ahead of it in the stream has finished.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Overlap {
    /// It starts when everything ahead is done.
    #[default]
    None,
    /// Programmatic dependent launch: it may start once every block ahead has executed
    /// `griddepcontrol.launch_dependents` or has ended, and must itself execute `griddepcontrol.wait` before it touches
    /// their results.
    Programmatic,
}

/// What [`launch_kernel_ex`] can ask for beyond a plain launch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LaunchAttributes {
    /// Blocks of a cluster in x, y, z; the grid must be a multiple of it. `None` where the kernel has none.
    pub cluster: Option<[u32; 3]>,
    /// Overlap with the kernel ahead.
    pub overlap: Overlap,
    /// Whether blocks wait for each other: none begins before there is room for all, and a grid for which there never
    /// is any is `CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE`.
    pub cooperative: bool,
}

/// Queues a kernel with attributes. `CUDA_ERROR_NOT_FOUND` from a driver before CUDA 11.8.
///
/// # Safety
/// As [`launch_kernel`]. With [`Overlap::Programmatic`] the kernel waits as described there.
pub unsafe fn launch_kernel_ex(
    function: CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    smem_bytes: u32,
    stream: CUstream,
    attributes: &LaunchAttributes,
    params: &mut [*mut c_void],
) -> Result<(), DriverError> {
    let mut list = [LaunchAttribute::new(IGNORE, [0; 3]); 3];
    if let Some(cluster) = attributes.cluster {
        list[0] = LaunchAttribute::new(CLUSTER_DIMENSION, cluster);
    }
    if attributes.overlap == Overlap::Programmatic {
        list[1] = LaunchAttribute::new(PROGRAMMATIC_STREAM_SERIALIZATION, [1, 0, 0]);
    }
    if attributes.cooperative {
        list[2] = LaunchAttribute::new(COOPERATIVE, [1, 0, 0]);
    }
    let config =
        LaunchConfig { grid, block, smem_bytes, stream, attributes: list.as_mut_ptr(), num_attributes: 3 };
    // SAFETY: `config` and the attributes that it points to outlive the call — locals; the rest as in `launch_kernel`.
    check(unsafe { ffi::cuLaunchKernelEx(&config, function, params.as_mut_ptr(), std::ptr::null_mut()) })
}

const IGNORE: c_int = 0;
const COOPERATIVE: c_int = 2;
const CLUSTER_DIMENSION: c_int = 4;
const PROGRAMMATIC_STREAM_SERIALIZATION: c_int = 6;

/// `CUlaunchAttribute` of the CUDA 12 and 13 headers: a number, and a union of 64 bytes after it.
#[repr(C)]
#[derive(Clone, Copy)]
struct LaunchAttribute {
    id: c_int,
    pad: u32,
    /// The union's members that are used here are one to three 32-bit numbers at its start.
    value: [u64; 8],
}

impl LaunchAttribute {
    fn new(id: c_int, [x, y, z]: [u32; 3]) -> Self {
        let mut bytes = [0u8; 64];
        for (target, number) in bytes.chunks_exact_mut(4).zip([x, y, z]) {
            target.copy_from_slice(&number.to_ne_bytes());
        }
        let mut value = [0u64; 8];
        for (target, bytes) in value.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *target = u64::from_ne_bytes(*bytes);
        }
        LaunchAttribute { id, pad: 0, value }
    }
}

/// `CUlaunchConfig` of the CUDA 12 and 13 headers.
#[repr(C)]
pub(super) struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    smem_bytes: u32,
    stream: CUstream,
    attributes: *mut LaunchAttribute,
    num_attributes: u32,
}

// Sizes and offsets as a C compiler gives them for the headers' structs on 64-bit Linux.
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<LaunchAttribute>() == 72 && offset_of!(LaunchAttribute, value) == 8);
    assert!(size_of::<LaunchConfig>() == 56 && offset_of!(LaunchConfig, stream) == 32);
    assert!(offset_of!(LaunchConfig, attributes) == 40 && offset_of!(LaunchConfig, num_attributes) == 48);
};
