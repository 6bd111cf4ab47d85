//! Candle's storage of the CPU.

use std::sync::OnceLock;

use candle_core::CpuStorage;
use candle_core::cpu_backend::CpuDevice;
use half::{bf16, f16};
use host::{DType, Device, Error, Stream};

use crate::Refused;
use crate::operand::{Elements, Storage};

/// The stream of the CPU, whose work is done at once.
pub(crate) fn cpu() -> Result<&'static Stream, Error> {
    static CPU: OnceLock<Stream> = OnceLock::new();
    match CPU.get() {
        Some(stream) => Ok(stream),
        None => {
            let stream = Device::cpu().stream()?;
            Ok(CPU.get_or_init(|| stream))
        }
    }
}

impl Storage for CpuStorage {
    fn stream(_: &CpuDevice) -> Result<Stream, Refused> {
        Ok(cpu()?.clone())
    }

    fn elements(&self) -> Option<Elements> {
        let (address, len, dtype) = match self {
            CpuStorage::F32(values) => (values.as_ptr() as u64, values.len(), DType::F32),
            CpuStorage::F16(values) => (values.as_ptr() as u64, values.len(), DType::F16),
            CpuStorage::BF16(values) => (values.as_ptr() as u64, values.len(), DType::BF16),
            CpuStorage::U32(values) => (values.as_ptr() as u64, values.len(), DType::U32),
            _ => return None,
        };
        Some(Elements { address, len, dtype })
    }

    fn elements_mut(&mut self) -> Option<Elements> {
        let (address, len, dtype) = match self {
            CpuStorage::F32(values) => (values.as_mut_ptr() as u64, values.len(), DType::F32),
            CpuStorage::F16(values) => (values.as_mut_ptr() as u64, values.len(), DType::F16),
            CpuStorage::BF16(values) => (values.as_mut_ptr() as u64, values.len(), DType::BF16),
            CpuStorage::U32(values) => (values.as_mut_ptr() as u64, values.len(), DType::U32),
            _ => return None,
        };
        Some(Elements { address, len, dtype })
    }

    fn made(_: &CpuDevice, dtype: DType, len: usize) -> candle_core::Result<Option<Self>> {
        Ok(Some(match dtype {
            DType::F32 => CpuStorage::F32(vec![0.0; len]),
            DType::F16 => CpuStorage::F16(vec![f16::ZERO; len]),
            DType::BF16 => CpuStorage::BF16(vec![bf16::ZERO; len]),
            DType::U32 => CpuStorage::U32(vec![0; len]),
            _ => return Ok(None),
        }))
    }
}
