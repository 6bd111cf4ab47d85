//! Softmax over the rows of a matrix: an operator of one's own, with its kernel in [Rust](../../kernels/src/lib.rs), on
//! warpforge's tensors and in its streams. It can be recorded into a graph like any other.
//!
//! `tests/softmax.rs` runs it on simulated cards and, where there is one, on a card.

use half::bf16;
use warpforge::module::{In, Module, Out};
use warpforge::{Device, Element, Error, Function, Stream, TensorView, TensorViewMut};

/// The kernels, by `build.rs`. The simulator finds them by their names and needs no text.
const PTX: &str = {
    #[cfg(feature = "cuda")]
    {
        include_str!(concat!(env!("OUT_DIR"), "/kernels.ptx"))
    }
    #[cfg(not(feature = "cuda"))]
    {
        ""
    }
};

/// A type of elements that there is a kernel for.
pub trait Stored: Element {
    /// The kernel's name.
    const KERNEL: &'static str;
    /// What rounding a result to this type may cost, relative to it; 0 for the type that is computed in.
    const ROUNDING: f64;
}

impl Stored for f32 {
    const KERNEL: &'static str = "softmax_f32";
    const ROUNDING: f64 = 0.0;
}

impl Stored for bf16 {
    const KERNEL: &'static str = "softmax_bf16";
    const ROUNDING: f64 = 1.0 / 256.0;
}

/// `out[r, c] = exp(scale · x[r, c]) / Σ exp(scale · x[r, ·])`, planned for a device.
///
/// Arithmetic is in f32; the sum is that of each of 256 threads over its elements, then over the threads. Elements of
/// -inf have probability 0; a row of nothing else gives NaN, as do rows with NaN or +inf.
#[derive(Clone, Debug)]
pub struct Softmax<T> {
    /// `x`, `out`, columns, scale.
    kernel: Function<(In<T>, Out<T>, u32, f32)>,
    rows: u32,
    cols: u32,
    scale: f32,
}

impl<T: Stored> Softmax<T> {
    /// Threads of a block.
    pub const THREADS: u32 = 256;
    /// Shared memory of a block: a maximum and a sum of each of up to 32 warps.
    pub const SHARED_BYTES: u32 = 256;

    /// Checks shape and scale, and loads the kernel.
    pub fn plan(device: &Device, rows: usize, cols: usize, scale: f32) -> Result<Self, Error> {
        let count = |n: usize| u32::try_from(n).ok().filter(|n| (1..1 << 31).contains(n));
        let (Some(r), Some(c)) = (count(rows), count(cols)) else {
            return Err(invalid("shape", "1 to 2^31 - 1 rows and columns", format!("{rows} × {cols}")));
        };
        // The kernel takes the product with the largest element for the largest product.
        if !(scale > 0.0 && scale.is_finite()) {
            return Err(invalid("scale", "a positive number", scale.to_string()));
        }
        let kernel = Module::load(device, PTX)?.function_with(T::KERNEL, Self::SHARED_BYTES)?;
        Ok(Softmax { kernel, rows: r, cols: c, scale })
    }

    /// Enqueues the softmax of `x`, both without gaps between their elements.
    pub fn run(&self, stream: &Stream, x: TensorView<'_>, out: TensorViewMut<'_>) -> Result<(), Error> {
        let shape = [self.rows as usize, self.cols as usize];
        let fits = |shape_of: &[usize], is_contiguous, address: u64| {
            shape_of == shape && is_contiguous && address.is_multiple_of(16)
        };
        let expected = || format!("{shape:?} without gaps, from a multiple of 16 bytes on");
        if !fits(x.shape(), x.is_contiguous(), x.address()) {
            return Err(invalid("x", &expected(), format!("{x:?}")));
        }
        if !fits(out.shape(), out.is_contiguous(), out.address()) {
            return Err(invalid("out", &expected(), format!("{out:?}")));
        }
        let (grid, block) = ([self.rows, 1, 1], [Self::THREADS, 1, 1]);
        // SAFETY: the kernel's parameters are those of `Function`; both tensors have `cols` elements for each of `rows`
        // blocks and begin at multiples of 16 bytes, as checked; the blocks are of whole warps, with 256 bytes of
        // shared memory. Types and devices are checked by `launch`.
        unsafe { self.kernel.launch(stream, grid, block, (x, out, self.cols, self.scale)) }
    }

    /// The largest error of `out` in multiples of what it may be, against f64: at most 1 if the kernel is right.
    ///
    /// A probability p = exp(d) / sum may be off by the rounding of d and by `exp` (2 ulp + |d|·2^-23), by the sum's
    /// additions one after another in a thread and over the threads, by three more roundings, and by that to its type.
    /// Below the smallest normal number it may be 0.
    pub fn error(&self, x: &[f32], out: &[f32]) -> f64 {
        let ulp = 2f64.powi(-23);
        let additions = f64::from(self.cols) / f64::from(Self::THREADS) + 18.0;
        let cols = self.cols as usize;
        let mut worst: f64 = 0.0;
        for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact(cols)) {
            let scaled: Vec<f64> = x.iter().map(|&x| f64::from(x) * f64::from(self.scale)).collect();
            let largest = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scaled.iter().map(|value| (value - largest).exp()).sum();
            for (value, &got) in scaled.iter().zip(out) {
                let d = value - largest;
                let exact = d.exp() / sum;
                // A distance of -inf has the exact probability 0.
                let relative = ulp * (6.0 - 2.0 * d + additions) + T::ROUNDING;
                let bound = if exact > 0.0 { exact * relative } else { 0.0 };
                let error = (f64::from(got) - exact).abs() / (bound + f64::from(f32::MIN_POSITIVE));
                // NaN is never right here, and `max` would drop it.
                worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
            }
        }
        worst
    }
}

fn invalid(argument: &'static str, expected: &str, got: String) -> Error {
    Error::Invalid { op: "softmax", argument, expected: expected.into(), got }
}

/// Values from -8 to 8 to try it with, the same each time.
pub fn values(n: usize) -> Vec<f32> {
    let value = |i: usize| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (0..n).map(|i| value(i) as f32 / 2f32.powi(20) - 8.0).collect()
}
