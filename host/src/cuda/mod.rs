//! CUDA behind a device: context, streams, memory, modules. All driver handles of the crate live here.
//!
//! Contexts, devices and allocation are in `primary`; streams, events, copies, modules and launches go through
//! `cuda_loader::driver`, which says why.

mod memory;
mod module;
mod peer;
mod pinned;
mod primary;
mod recording;
mod reserved;
mod stream;

use abi::DType;
use cuda_loader::driver::{
    self, DeviceAttribute, TensorMapDataType, TensorMapInterleave, TensorMapL2Promotion, TensorMapOobFill,
    TensorMapParams, TensorMapSwizzle,
};

use crate::error::{DriverError, Error};
use crate::profile::{HardwareProfile, Place, TensorCores};
use crate::tensor_map::{Swizzle, TensorMap, Tiled};

pub(crate) use memory::DeviceMemory;
pub(crate) use module::{EntryHandle, LoadedModule, Modules};
pub(crate) use peer::HostWord;
pub(crate) use pinned::Pinned;
pub(crate) use stream::{Event, Graph, LaunchFailure, Stream};

impl From<cuda_loader::DriverError> for DriverError {
    fn from(error: cuda_loader::DriverError) -> Self {
        DriverError { code: error.code, name: error.name, description: error.description }
    }
}

/// An [`Error::Driver`] of this call.
fn failed(call: &'static str) -> impl Fn(cuda_loader::DriverError) -> Error {
    move |source| Error::Driver { call, source: source.into() }
}

/// `CUDA_ERROR_NO_DEVICE`: what a driver without cards, or with none that the program may see, answers to `cuInit`.
const NO_DEVICE: u32 = 100;

/// Loads and initialises the driver, and counts its devices.
pub(crate) fn device_count() -> Result<usize, Error> {
    cuda_loader::load().map_err(|error| Error::NoDriver { reason: error.to_string() })?;
    match cuda_loader::init() {
        Ok(()) => {}
        Err(error) if error.code == NO_DEVICE => return Ok(0),
        Err(error) => return Err(Error::NoDriver { reason: format!("the driver does not start: {error}") }),
    }
    Ok(cuda_loader::device_count().map_err(failed("cuDeviceGetCount"))? as usize)
}

/// A device's primary context.
#[derive(Debug)]
pub(crate) struct Context {
    primary: primary::Primary,
    profile: HardwareProfile,
}

impl Context {
    /// Encodes a tensor map.
    pub(crate) fn tensor_map(&self, tiled: &Tiled) -> Result<TensorMap, Error> {
        let (dims, strides_bytes, box_dims, rank) = tiled.dims();
        let data_type = match tiled.dtype {
            DType::F32 => TensorMapDataType::F32,
            DType::F16 => TensorMapDataType::F16,
            DType::BF16 => TensorMapDataType::Bf16,
            DType::F8E4M3 | DType::I8 => TensorMapDataType::U8,
            DType::I32 => TensorMapDataType::I32,
            DType::U32 => TensorMapDataType::U32,
        };
        let params = TensorMapParams {
            data_type,
            address: tiled.address,
            dims: &dims[..rank],
            strides_bytes: &strides_bytes[..rank - 1],
            box_dims: &box_dims[..rank],
            element_strides: &[1; 4][..rank],
            interleave: TensorMapInterleave::None,
            swizzle: match tiled.swizzle {
                Swizzle::Bytes64 => TensorMapSwizzle::Bytes64,
                Swizzle::Bytes128 => TensorMapSwizzle::Bytes128,
            },
            l2_promotion: TensorMapL2Promotion::Bytes256,
            oob_fill: TensorMapOobFill::Zeros,
        };
        let map = driver::tensor_map_encode_tiled(&params).map_err(failed("cuTensorMapEncodeTiled"))?;
        Ok(TensorMap(map.0))
    }

    pub(crate) fn open(ordinal: usize) -> Result<Self, Error> {
        let device = find(ordinal)?;
        let profile = profile(device, ordinal as u32)?;
        Ok(Context { primary: primary::Primary::retain(device)?, profile })
    }

    pub(crate) fn profile(&self) -> &HardwareProfile {
        &self.profile
    }

    /// Makes this context the calling thread's: every driver call below wants that first.
    pub(crate) fn enter(&self) -> Result<(), Error> {
        self.primary.enter()
    }
}

/// What the device of this ordinal is; takes no context, and so no memory of it.
pub(crate) fn detect(ordinal: usize) -> Result<HardwareProfile, Error> {
    profile(find(ordinal)?, ordinal as u32)
}

fn find(ordinal: usize) -> Result<primary::Device, Error> {
    let count = device_count()?;
    if ordinal >= count {
        return Err(Error::NoDevice { ordinal, count });
    }
    primary::Device::get(ordinal as u32)
}

fn profile(device: primary::Device, ordinal: u32) -> Result<HardwareProfile, Error> {
    let get =
        |attribute| driver::device_attribute(device.raw(), attribute).map_err(failed("cuDeviceGetAttribute"));
    let (major, minor) = (
        get(DeviceAttribute::ComputeCapabilityMajor)? as u32,
        get(DeviceAttribute::ComputeCapabilityMinor)? as u32,
    );
    let [domain, bus, slot] =
        [DeviceAttribute::PciDomainId, DeviceAttribute::PciBusId, DeviceAttribute::PciDeviceId];
    let pci_bus_id = format!("{:08x}:{:02x}:{:02x}.0", get(domain)?, get(bus)?, get(slot)?);
    // Kilohertz, two transfers per clock, bits.
    let clock = f64::from(get(DeviceAttribute::MemoryClockRate)?) * 1e3;
    let memory_bandwidth = 2.0 * clock * f64::from(get(DeviceAttribute::GlobalMemoryBusWidth)?) / 8.0;
    Ok(HardwareProfile {
        name: device.name()?,
        place: Place::Cuda(ordinal),
        compute_capability: Some((major, minor)),
        pci_bus_id: Some(pci_bus_id),
        tensor_cores: TensorCores::of(major, minor),
        num_sms: get(DeviceAttribute::MultiprocessorCount)? as u32,
        memory_bytes: device.total_memory()?,
        l2_bytes: get(DeviceAttribute::L2CacheSize)? as usize,
        smem_per_block_bytes: get(DeviceAttribute::MaxSharedMemoryPerBlockOptin)? as u32,
        smem_per_sm_bytes: get(DeviceAttribute::MaxSharedMemoryPerMultiprocessor)? as u32,
        registers_per_sm: get(DeviceAttribute::MaxRegistersPerMultiprocessor)? as u32,
        threads_per_sm: get(DeviceAttribute::MaxThreadsPerMultiprocessor)? as u32,
        memory_bandwidth,
        driver: Some(cuda_loader::driver_version().map_err(failed("cuDriverGetVersion"))?),
    })
}
