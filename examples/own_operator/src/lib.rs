//! Softmax over the rows of a matrix, with a kernel of one's own in [Rust](../../kernels/src/lib.rs).
//!
//! What the host has to know of the kernel: what it computes, what it can be launched with, and how far its results may
//! be from the exact ones. `tests/softmax.rs` holds it to that in the simulator and, where there is one, on a card.

#[cfg(feature = "cuda")]
pub mod card;

use half::bf16;

/// In which type the matrices are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
}

impl DType {
    /// The name of the type's kernel.
    pub fn kernel(self) -> &'static str {
        match self {
            DType::F32 => "softmax_f32",
            DType::Bf16 => "softmax_bf16",
        }
    }

    /// The values' bytes, rounded to the nearest element.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            DType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            DType::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        }
    }

    /// The values of elements.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            DType::F32 => bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
            DType::Bf16 => {
                bytes.as_chunks().0.iter().map(|&bytes| bf16::from_le_bytes(bytes).to_f32()).collect()
            }
        }
    }
}

/// Why there is no such softmax.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Invalid {
    /// No elements, or more than a grid or an index can take.
    #[error("softmax of {rows} rows of {cols} elements: expected 1 to 2^31 - 1 of each")]
    Shape {
        /// Rows of the matrix.
        rows: usize,
        /// Elements of a row.
        cols: usize,
    },
    /// The kernel takes the largest product for that of the largest element.
    #[error("softmax with a scale of {0}: expected a positive number")]
    Scale(f32),
    /// The matrix has another number of elements.
    #[error("softmax of {expected} elements, got {got}")]
    Length {
        /// Rows times columns.
        expected: usize,
        /// Elements of the input.
        got: usize,
    },
}

/// `out[r, c] = exp(scale · x[r, c]) / Σ exp(scale · x[r, ·])` for row-major x and out without gaps.
///
/// Arithmetic is in f32; the sum is that of each of 256 threads over its elements, then over the threads. Elements of
/// -inf have probability 0; a row of nothing else gives NaN, as do rows with NaN or +inf.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Softmax {
    rows: u32,
    cols: u32,
    dtype: DType,
    scale: f32,
}

impl Softmax {
    /// Threads of a block.
    pub const THREADS: u32 = 256;
    /// Shared memory of a block: a maximum and a sum of each of up to 32 warps.
    pub const SHARED_BYTES: u32 = 256;

    /// Checks shape and scale.
    pub fn new(rows: usize, cols: usize, dtype: DType, scale: f32) -> Result<Self, Invalid> {
        let count = |n: usize| u32::try_from(n).ok().filter(|n| (1..1 << 31).contains(n));
        let (Some(r), Some(c)) = (count(rows), count(cols)) else {
            return Err(Invalid::Shape { rows, cols });
        };
        if scale > 0.0 && scale.is_finite() {
            Ok(Softmax { rows: r, cols: c, dtype, scale })
        } else {
            Err(Invalid::Scale(scale))
        }
    }

    /// Rows of the matrix, a block each.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Elements of a row.
    pub fn cols(&self) -> u32 {
        self.cols
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What elements are multiplied by.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The matrix's bytes, if it has as many elements.
    pub fn encode(&self, x: &[f32]) -> Result<Vec<u8>, Invalid> {
        let expected = self.rows as usize * self.cols as usize;
        if x.len() != expected {
            return Err(Invalid::Length { expected, got: x.len() });
        }
        Ok(self.dtype.encode(x))
    }

    /// The largest error of `out` in multiples of what it may be, against f64: at most 1 if the kernel is right. `x`
    /// holds the values that were stored.
    ///
    /// A probability p = exp(d) / sum may be off by the rounding of d and by `exp` (2 ulp + |d|·2^-23), by the sum's
    /// additions one after another in a thread and over the threads, by three more roundings, and by that to its type.
    /// Below the smallest normal number it may be 0.
    pub fn error(&self, x: &[f32], out: &[f32]) -> f64 {
        let ulp = 2f64.powi(-23);
        let additions = f64::from(self.cols) / f64::from(Self::THREADS) + 18.0;
        let stored = match self.dtype {
            DType::F32 => 0.0,
            DType::Bf16 => 2f64.powi(-8),
        };
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
                let bound =
                    if exact > 0.0 { exact * (ulp * (6.0 - 2.0 * d + additions) + stored) } else { 0.0 };
                let error = (f64::from(got) - exact).abs() / (bound + f64::from(f32::MIN_POSITIVE));
                // NaN is never right here, and `max` would drop it.
                worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
            }
        }
        worst
    }
}

/// Values from -8 to 8 to try it with, the same each time.
pub fn values(n: usize) -> Vec<f32> {
    let value = |i: usize| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (0..n).map(|i| value(i) as f32 / 2f32.powi(20) - 8.0).collect()
}
