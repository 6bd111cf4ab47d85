//! The kernels on a card, launched with `cust` as Rust-CUDA's users do.

use std::time::Duration;

use cust::context::Context;
use cust::device::Device;
use cust::event::{Event, EventFlags};
use cust::launch;
use cust::memory::{CopyDestination, DeviceBuffer};
use cust::module::Module;
use cust::stream::{Stream, StreamFlags};

use crate::{DType, Invalid, Softmax};

const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/kernels.ptx"));

/// Why a run gave no result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What was asked for is none of the operator's.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The driver refused something.
    #[error(transparent)]
    Driver(#[from] cust::error::CudaError),
}

/// The first card of the machine, with the kernels loaded.
pub struct Card {
    name: String,
    module: Module,
    stream: Stream,
    /// Dropped last: the others live in it.
    _context: Context,
}

/// What a run gave.
pub struct Output {
    /// The probabilities.
    pub out: Vec<f32>,
    /// Of one launch, the mean of several.
    pub time: Duration,
}

impl Card {
    /// Opens the first card; `Err` says why there is none.
    pub fn open() -> Result<Self, String> {
        cuda_loader::load().map_err(|error| error.to_string())?;
        let count = cuda_loader::init().and_then(|()| cuda_loader::device_count());
        match count.map_err(|error| error.to_string())? {
            0 => Err("the driver knows no card".into()),
            _ => Self::first().map_err(|error| format!("the first card does not open: {error}")),
        }
    }

    fn first() -> Result<Self, cust::error::CudaError> {
        let device = Device::get_device(0)?;
        let context = Context::new(device)?;
        let module = Module::from_ptx(PTX, &[])?;
        // Not `NON_BLOCKING`: it is ordered after the uploads, which are on their way when `from_slice` returns.
        let stream = Stream::new(StreamFlags::DEFAULT, None)?;
        Ok(Card { name: device.name()?, module, stream, _context: context })
    }

    /// What the driver calls the card.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Computes the softmax of `x` and times it over `launches` more launches.
    pub fn run(&self, softmax: &Softmax, x: &[f32], launches: u32) -> Result<Output, Error> {
        let bytes = softmax.encode(x)?;
        let x = DeviceBuffer::from_slice(&bytes)?;
        let out = DeviceBuffer::from_slice(&bytes)?;
        self.launch(softmax, &x, &out)?;
        let (start, stop) = (Event::new(EventFlags::DEFAULT)?, Event::new(EventFlags::DEFAULT)?);
        start.record(&self.stream)?;
        for _ in 0..launches {
            self.launch(softmax, &x, &out)?;
        }
        stop.record(&self.stream)?;
        stop.synchronize()?;
        let time = stop.elapsed(&start)? / launches.max(1);
        let mut result = vec![0; bytes.len()];
        out.copy_to(&mut result)?;
        Ok(Output { out: softmax.dtype().decode(&result), time })
    }

    fn launch(
        &self,
        softmax: &Softmax,
        x: &DeviceBuffer<u8>,
        out: &DeviceBuffer<u8>,
    ) -> Result<(), cust::error::CudaError> {
        let (stream, kernel) = (&self.stream, self.module.get_function(softmax.dtype().kernel())?);
        let (x, out) = (x.as_device_ptr(), out.as_device_ptr());
        // SAFETY: both buffers have the elements of `rows` rows and begin at multiples of 256 bytes — `run` and the
        // driver; a block per row, of whole warps, with the shared memory that the kernel asks for.
        unsafe {
            launch!(kernel<<<softmax.rows(), Softmax::THREADS, Softmax::SHARED_BYTES, stream>>>(
                x, out, softmax.cols(), softmax.scale()
            ))
        }
    }
}

/// Bytes that a launch reads and writes at least.
pub fn bytes_moved(softmax: &Softmax) -> u64 {
    let element = match softmax.dtype() {
        DType::F32 => 4,
        DType::Bf16 => 2,
    };
    2 * element * u64::from(softmax.rows()) * u64::from(softmax.cols())
}
