//! Candle's storage of cards, by cudarc, in candle's stream.

use std::sync::{Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DevicePtrMut, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice, DeviceId};
use candle_core::{CudaDevice, CudaStorage};
use half::{bf16, f16};
use host::{DType, Device, Stream};
use warpforge_cudarc::SharedStream;

use crate::Refused;
use crate::operand::{Elements, Storage};

/// Candle's devices whose streams are kept: a program has few.
const KEPT: usize = 16;

/// The streams of candle's devices as warpforge's, those used last at the end.
static STREAMS: Mutex<Vec<(DeviceId, SharedStream)>> = Mutex::new(Vec::new());

impl Storage for CudaStorage {
    fn stream(device: &CudaDevice) -> Result<Stream, Refused> {
        let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = match streams.iter().position(|(id, _)| *id == device.id()) {
            Some(place) => streams.remove(place).1,
            None => {
                let stream = device.cuda_stream();
                // The legacy one is null, and the driver's other names of default streams are 1 and 2.
                if stream.cu_stream() as usize <= 2 {
                    return Err(Refused::DefaultStream);
                }
                // Another of candle's devices on the same card has warpforge's device already.
                let own = streams.iter().map(|(_, shared)| shared.stream().device());
                let ordinal = stream.context().ordinal();
                let own = own.cloned().find(|own| own.place() == host::Place::Cuda(ordinal as u32));
                let own = own.map_or_else(|| Device::cuda(ordinal), Ok)?;
                SharedStream::new(&own, &stream)?
            }
        };
        let stream = shared.stream().clone();
        if streams.len() == KEPT {
            streams.remove(0);
        }
        streams.push((device.id(), shared));
        Ok(stream)
    }

    fn elements(&self) -> Option<Elements> {
        let stream = self.device.cuda_stream();
        macro_rules! of {
            ($($kind:ident)*) => {
                match &self.slice {
                    $(CudaStorageSlice::$kind(slice) => {
                        let (address, _used) = slice.device_ptr(&stream);
                        Some(Elements { address, len: slice.len(), dtype: DType::$kind })
                    })*
                    _ => None,
                }
            };
        }
        of!(F32 F16 BF16 U32)
    }

    fn elements_mut(&mut self) -> Option<Elements> {
        let stream = self.device.cuda_stream();
        macro_rules! of {
            ($($kind:ident)*) => {
                match &mut self.slice {
                    $(CudaStorageSlice::$kind(slice) => {
                        let len = slice.len();
                        let (address, _used) = slice.device_ptr_mut(&stream);
                        Some(Elements { address, len, dtype: DType::$kind })
                    })*
                    _ => None,
                }
            };
        }
        of!(F32 F16 BF16 U32)
    }

    fn made(device: &CudaDevice, dtype: DType, len: usize) -> candle_core::Result<Option<Self>> {
        fn of<T: CudaDType + DeviceRepr>(
            device: &CudaDevice,
            len: usize,
        ) -> candle_core::Result<CudaStorage> {
            // SAFETY: of numbers, which have a value whatever their bits; whoever reads them comes behind the work that
            // writes them.
            let slice = unsafe { device.alloc::<T>(len) }?;
            Ok(CudaStorage::wrap_cuda_slice(slice, device.clone()))
        }
        Ok(Some(match dtype {
            DType::F32 => of::<f32>(device, len)?,
            DType::F16 => of::<f16>(device, len)?,
            DType::BF16 => of::<bf16>(device, len)?,
            DType::U32 => of::<u32>(device, len)?,
            _ => return Ok(None),
        }))
    }
}
