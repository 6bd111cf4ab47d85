//! What the operators' tests share: where they run, and buffers with guard bands on the device.

use std::ops::Range;
use std::sync::OnceLock;

use half::{bf16, f16};
use proptest::test_runner::TestCaseError;
use testkit::buffer::Guarded;
use testkit::compare::{Tolerance, check_within_naive};
use testkit::round::round_to;
use warpforge::{Arch, DType, Device, Error, Stream, Tensor, TensorView, TensorViewMut};

/// The CPU, and the card once for every floor that it runs. Says so if there is no card (`REQUIRE_GPU=1`: fails).
pub fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    let devices = DEVICES.get_or_init(|| {
        let cards = Device::cuda(0)
            .map(|card| Arch::ALL.into_iter().filter_map(move |arch| card.with_arch(arch).ok()));
        let mut devices = vec![Device::cpu()];
        devices.extend(cards.into_iter().flatten());
        devices
    });
    if devices.len() == 1
        && let Err(error) = Device::cuda(0)
    {
        testkit::gpu::skip(&format!("the kernels were not run: {error}"));
    }
    devices
}

/// The cards among [`devices`].
pub fn cards() -> impl Iterator<Item = &'static Device> {
    devices().iter().filter(|device| device.limits().is_some())
}

/// Calls `$body` with `$type` as the Rust type of `$dtype`.
macro_rules! with_type {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $type = f32;
                $body
            }
            DType::F16 => {
                type $type = f16;
                $body
            }
            DType::BF16 => {
                type $type = bf16;
                $body
            }
            DType::I8 => {
                type $type = i8;
                $body
            }
            DType::I32 => {
                type $type = i32;
                $body
            }
            DType::U32 => {
                type $type = u32;
                $body
            }
        }
    };
}

/// Rows on a device, between guard bands and with poison between the rows.
pub struct Rows {
    tensor: Tensor,
    payload: Range<usize>,
    rows: usize,
    cols: usize,
    stride: usize,
    is_output: bool,
}

/// How rows lie in a buffer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Layout {
    /// Elements between the end of a row and the start of the next.
    pub padding: usize,
    /// Elements by which the first row is moved away from an aligned address.
    pub offset: usize,
}

impl Rows {
    /// Rows that hold `values` (rounded to `dtype`).
    pub fn input(
        stream: &Stream,
        dtype: DType,
        values: &[f64],
        cols: usize,
        layout: Layout,
    ) -> Result<Self, Error> {
        let stride = cols + layout.padding;
        let (tensor, payload) = with_type!(dtype, T => {
            let values: Vec<T> = bytemuck::allocation::pod_collect_to_vec(&testkit::round::encode(dtype, values));
            upload(stream, &Guarded::strided(&values, cols.max(1), stride.max(1), layout.offset))?
        });
        Ok(Rows { tensor, payload, rows: values.len() / cols.max(1), cols, stride, is_output: false })
    }

    /// Rows full of poison (NaN for floats).
    pub fn output(
        stream: &Stream,
        dtype: DType,
        rows: usize,
        cols: usize,
        layout: Layout,
    ) -> Result<Self, Error> {
        let stride = cols + layout.padding;
        let (tensor, payload) = with_type!(dtype, T => {
            upload(stream, &Guarded::<T>::poisoned(rows * stride, layout.offset))?
        });
        Ok(Rows { tensor, payload, rows, cols, stride, is_output: true })
    }

    /// `[rows, cols]`.
    pub fn view(&self) -> TensorView<'_> {
        let all = self.tensor.view().slice(0, self.payload.clone());
        all.and_then(|all| all.reshape(&[self.rows, self.stride])?.slice(1, 0..self.cols))
            .expect("a view of the payload")
    }

    /// `[rows, cols]`, to write.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let all = self.tensor.view_mut().slice(0, self.payload.clone());
        all.and_then(|all| all.reshape(&[self.rows, self.stride])?.slice(1, 0..self.cols))
            .expect("a view of the payload")
    }

    /// The rows, after checking that nothing but them was written, and for an output that all of them were.
    pub fn read(&self, stream: &Stream) -> Result<Vec<f64>, TestCaseError> {
        let dtype = self.tensor.dtype();
        with_type!(dtype, T => {
            let padded = self.tensor.to_vec::<T>(stream).map_err(fail)?;
            let guarded = Guarded::from_padded(padded, self.payload.clone());
            guarded.check_guards().map_err(fail)?;
            guarded.check_row_padding(self.cols, self.stride.max(1)).map_err(fail)?;
            let rows: Vec<T> = guarded.rows(self.cols, self.stride.max(1));
            let unwritten = rows.iter().position(|value| {
                bytemuck::bytes_of(value) == bytemuck::bytes_of(&<T as testkit::Element>::POISON)
            });
            if let (true, true, Some(index)) = (self.is_output, dtype != DType::I8, unwritten) {
                return Err(TestCaseError::fail(format!("element {index} was not written")));
            }
            Ok(testkit::round::decode(dtype, bytemuck::cast_slice(&rows)))
        })
    }
}

fn upload<T: testkit::Element + warpforge::Element>(
    stream: &Stream,
    guarded: &Guarded<T>,
) -> Result<(Tensor, Range<usize>), Error> {
    let padded = guarded.as_padded();
    Ok((Tensor::from_slice(stream, &[padded.len()], padded)?, guarded.payload_range()))
}

/// Turns any error into a failed case.
pub fn fail(error: impl std::fmt::Display) -> TestCaseError {
    TestCaseError::fail(error.to_string())
}

/// The error bound of the project; `what` names the device and variant in the message.
pub fn check(
    what: &str,
    got: &[f64],
    reference: &[f64],
    naive: &[f64],
    tolerance: &Tolerance<'_>,
) -> Result<(), TestCaseError> {
    match check_within_naive(got, reference, naive, tolerance) {
        Ok(_) => Ok(()),
        Err(mismatch) => Err(TestCaseError::fail(format!("{what}: {mismatch}"))),
    }
}

/// Rounds an f32 result of the naive computation to the storage type.
pub fn store(dtype: DType) -> impl Fn(f32) -> f32 {
    move |value| round_to(dtype, f64::from(value)) as f32
}

/// Values of a kind as f64, exactly representable in `dtype`.
pub fn values(kind: testkit::strategies::Values, dtype: DType, n: usize, seed: u64) -> Vec<f64> {
    testkit::strategies::fill(kind, dtype, n, seed).into_iter().map(f64::from).collect()
}

/// A float type.
pub fn floats() -> impl proptest::strategy::Strategy<Value = DType> {
    proptest::sample::select(&DType::FLOATS[..])
}
