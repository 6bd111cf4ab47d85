//! A case on a card.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, c_void};

use abi::Arch;
use cuda_loader::driver::{
    self, LaunchAttributes, TensorMapDataType, TensorMapInterleave, TensorMapL2Promotion, TensorMapOobFill,
    TensorMapParams, TensorMapSwizzle,
};
use cuda_std::sim::tensor_core::Generation;
use cuda_std::sim::tensor_map::{Element, Fill};
use cuda_std::wgmma::Swizzle;
use cust::context::{Context, CurrentContext};
use cust::device::{Device, DeviceAttribute};
use cust::memory::{CopyDestination, DeviceBuffer};
use cust::sys::CUmodule;

use crate::{Buffer, Case, Failed, IMAGES, Map};

/// The first card.
pub struct Card {
    // Modules are unloaded with the context, which outlives them.
    modules: RefCell<HashMap<(&'static str, Arch), CUmodule>>,
    name: String,
    capability: (i32, i32),
    _context: Context,
}

impl Card {
    /// Opens it; the message says what is missing.
    pub fn open() -> Result<Self, Failed> {
        if IMAGES.is_empty() {
            return Err(Failed("the probes were built without a device compiler".into()));
        }
        cuda_loader::load()?;
        cuda_loader::init()?;
        if cuda_loader::device_count()? == 0 {
            return Err(Failed("the driver has no card".into()));
        }
        let device = Device::get_device(0)?;
        let capability = (
            device.get_attribute(DeviceAttribute::ComputeCapabilityMajor)?,
            device.get_attribute(DeviceAttribute::ComputeCapabilityMinor)?,
        );
        let context = Context::new(device)?;
        CurrentContext::set_current(&context)?;
        Ok(Card { modules: RefCell::default(), name: device.name()?, capability, _context: context })
    }

    /// Its name and compute capability.
    pub fn describe(&self) -> String {
        format!("{} ({}.{})", self.name, self.capability.0, self.capability.1)
    }

    /// Whether it runs images of this floor.
    pub fn runs(&self, floor: Arch) -> bool {
        floor.runs_on(self.capability.0 as u32, self.capability.1 as u32)
    }

    /// How its tensor cores sum.
    pub fn generation(&self) -> Generation {
        if self.capability.0 >= 9 { Generation::Hopper } else { Generation::Ampere }
    }

    /// Runs a case with the image of a floor; returns the output.
    pub fn run(&self, case: &Case, arch: Arch) -> Result<Vec<u32>, Failed> {
        let module = self.module(case.image, arch)?;
        let name = CString::new(case.kernel)?;
        // SAFETY: the module is loaded, and stays so.
        let function = unsafe { driver::module_get_function(module, &name) }?;
        if case.shared_bytes > 48 * 1024 {
            // SAFETY: of a loaded module.
            unsafe { driver::set_max_dynamic_shared(function, case.shared_bytes) }?;
        }
        // A buffer has at least one word.
        let buffer = |words: &[u32]| DeviceBuffer::from_slice(if words.is_empty() { &[0] } else { words });
        let (input, output) = (buffer(&case.input)?, buffer(&case.output)?);
        let mut maps = Vec::new();
        for map in &case.maps {
            let address = match map.buffer {
                Buffer::Input => input.as_device_ptr(),
                Buffer::Output => output.as_device_ptr(),
            };
            maps.extend(encode(map, address.as_raw())?.0);
        }
        let maps = DeviceBuffer::from_slice(if maps.is_empty() { &[0] } else { &maps[..] })?;
        let addresses =
            [input.as_device_ptr().as_raw(), output.as_device_ptr().as_raw(), maps.as_device_ptr().as_raw()];
        let mut parameters: Vec<*mut c_void> =
            addresses.iter().map(|address| (&raw const *address).cast_mut().cast()).collect();
        parameters.push((&raw const case.parameter).cast_mut().cast());
        let stream = driver::stream_create()?;
        let cluster = (case.cluster > 1).then_some([case.cluster, 1, 1]);
        let attributes = LaunchAttributes { cluster, ..LaunchAttributes::default() };
        // SAFETY: function and stream are live; the parameters are those of every probe, and the buffers what the
        // kernel asks for — the tests.
        unsafe {
            driver::launch_kernel_ex(
                function,
                [case.grid, 1, 1],
                [case.block, 1, 1],
                case.shared_bytes,
                stream,
                &attributes,
                &mut parameters,
            )?;
            driver::stream_synchronize(stream)?;
            driver::stream_destroy(stream)?;
        }
        let mut result = vec![0; output.len()];
        output.copy_to(&mut result)?;
        result.truncate(case.output.len());
        Ok(result)
    }

    fn module(&self, image: &'static str, arch: Arch) -> Result<CUmodule, Failed> {
        if let Some(module) = self.modules.borrow().get(&(image, arch)) {
            return Ok(*module);
        }
        let missing = || Failed(format!("there is no image {image} for {arch}"));
        let (.., deflated) =
            IMAGES.iter().find(|other| (other.0, other.1) == (image, arch)).ok_or_else(missing)?;
        let text =
            miniz_oxide::inflate::decompress_to_vec(deflated).map_err(|error| Failed(error.to_string()))?;
        let module = driver::module_load_data(&CString::new(text)?)?;
        self.modules.borrow_mut().insert((image, arch), module);
        Ok(module)
    }
}

fn encode(map: &Map, address: u64) -> Result<driver::TensorMap, Failed> {
    let data_type = match map.element {
        Element::U8 => TensorMapDataType::U8,
        Element::U16 => TensorMapDataType::U16,
        Element::U32 => TensorMapDataType::U32,
        Element::I32 => TensorMapDataType::I32,
        Element::U64 => TensorMapDataType::U64,
        Element::I64 => TensorMapDataType::I64,
        Element::F16 => TensorMapDataType::F16,
        Element::F32 => TensorMapDataType::F32,
        Element::F64 => TensorMapDataType::F64,
        Element::Bf16 => TensorMapDataType::Bf16,
    };
    let params = TensorMapParams {
        data_type,
        address: address + map.offset_bytes,
        dims: &map.dims,
        strides_bytes: &map.strides_bytes,
        box_dims: &map.box_dims,
        element_strides: &vec![1; map.dims.len()],
        interleave: TensorMapInterleave::None,
        swizzle: match map.swizzle {
            Swizzle::None => TensorMapSwizzle::None,
            Swizzle::Bytes32 => TensorMapSwizzle::Bytes32,
            Swizzle::Bytes64 => TensorMapSwizzle::Bytes64,
            Swizzle::Bytes128 => TensorMapSwizzle::Bytes128,
        },
        l2_promotion: TensorMapL2Promotion::None,
        oob_fill: match map.fill {
            Fill::Zeros => TensorMapOobFill::Zeros,
            Fill::Nan => TensorMapOobFill::Nan,
        },
    };
    Ok(driver::tensor_map_encode_tiled(&params)?)
}
