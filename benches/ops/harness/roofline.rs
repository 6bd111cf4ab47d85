//! What the card reaches, measured in this run: the least time that a case's bytes and operations take at those rates.
//!
//! - **Memory**: the bytes that a device-to-device copy reads and writes. Reading alone can be a little faster.
//! - **Matrix rates**: the best 8192³ product of each type, of this library's or of the peers' where their rates are
//!   given. Other arithmetic (norms, activations) is far below what would count.

use std::fmt;
use std::path::Path;

use serde_json::{Value, json};
use warpforge::ops::matmul::{Bias, Matmul, MatmulArgs, MatmulProblem};
use warpforge::ops::matmul_i8::{MatmulI8, MatmulI8Args, MatmulI8Problem};
use warpforge::{DType, Tensor};

use super::timing::{self, Effort, Timing};
use super::{Bencher, Failure, Work};

/// What the card reaches.
pub struct Roofline {
    /// GB/s, bytes read and written.
    copy: f64,
    peaks: Vec<Peak>,
}

/// A matrix rate.
struct Peak {
    /// Type of the operands.
    dtype: String,
    /// TFLOP/s; of integers, 10^12 operations.
    rate: f64,
    /// Whose product.
    by: String,
}

impl Roofline {
    pub fn measure(bencher: &Bencher) -> Result<Self, Failure> {
        let mut roofline = Roofline { copy: measure_copy(bencher)?, peaks: Vec::new() };
        let size: usize = if bencher.is_cpu() { 512 } else { 8192 };
        for (dtype, us) in
            [(DType::BF16, product_us(bencher, size)), (DType::I8, product_i8_us(bencher, size))]
        {
            match us {
                Ok(us) => {
                    let rate = 2.0 * (size as f64).powi(3) / us * 1e-6;
                    roofline.raise(dtype.name(), rate, &format!("this library's product of {size}³"));
                }
                Err(error) => println!("the peak matrix rate of {dtype} is not measured: {error}"),
            }
        }
        Ok(roofline)
    }

    /// Takes the rates of a file that benches/peers wrote, where they are higher.
    pub fn read_peaks(&mut self, file: &Path) -> Result<(), Failure> {
        let text = std::fs::read_to_string(file)
            .map_err(|error| format!("cannot read the peaks in {}: {error}", file.display()))?;
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let line: Value = serde_json::from_str(line)
                .map_err(|error| format!("{}: {error} in `{line}`", file.display()))?;
            if line["kind"] == "peak" {
                match (line["dtype"].as_str(), line["tflop_per_s"].as_f64(), line["by"].as_str()) {
                    (Some(dtype), Some(rate), Some(by)) => self.raise(dtype, rate, by),
                    _ => return Err(format!("{}: not a peak: {line}", file.display()).into()),
                }
            }
        }
        Ok(())
    }

    fn raise(&mut self, dtype: &str, rate: f64, by: &str) {
        match self.peaks.iter_mut().find(|peak| peak.dtype == dtype) {
            Some(peak) if peak.rate >= rate => {}
            Some(peak) => (peak.rate, peak.by) = (rate, by.into()),
            None => self.peaks.push(Peak { dtype: dtype.into(), rate, by: by.into() }),
        }
    }

    /// Microseconds that the case takes at least. The tensor cores do f16 and bf16 at one rate.
    pub fn floor_us(&self, work: &Work) -> f64 {
        let dtype = if work.dtype == "f16" { "bf16" } else { work.dtype };
        let memory = work.bytes as f64 / self.copy * 1e-3;
        let peak = self.peaks.iter().find(|peak| peak.dtype == dtype);
        peak.map_or(memory, |peak| memory.max(work.flops as f64 / peak.rate * 1e-6))
    }

    pub fn to_json(&self) -> Value {
        let peaks = self
            .peaks
            .iter()
            .map(|Peak { dtype, rate, by }| json!({ "dtype": dtype, "tflop_per_s": rate, "by": by }));
        json!({ "copy_gb_per_s": self.copy, "peaks": peaks.collect::<Vec<_>>() })
    }
}

impl fmt::Display for Roofline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "copy {:.0} GB/s", self.copy)?;
        for Peak { dtype, rate, by } in &self.peaks {
            write!(f, "; {dtype} {rate:.1} TFLOP/s by {by}")?;
        }
        Ok(())
    }
}

/// Not recorded: in a graph the driver gives copies to the slower copy engines.
fn measure_copy(bencher: &Bencher) -> Result<f64, Failure> {
    let len = if bencher.is_cpu() { 1 << 26 } else { 1 << 30 };
    let from = bencher.random(&[len], DType::I8, 1)?;
    let mut to = Tensor::empty(&bencher.stream, &[len], DType::I8)?;
    let mut samples = Vec::new();
    for round in 0..16 {
        let start = bencher.stream.record()?;
        bencher.stream.copy(from.view(), to.view_mut())?;
        let elapsed = bencher.stream.record()?.elapsed_ms(&start)?;
        // The first ones warm up.
        if round >= 4 {
            samples.push(f64::from(elapsed) * 1e3);
        }
    }
    Ok(2.0 * len as f64 / Timing::of(samples)?.median_us * 1e-3)
}

fn product_us(bencher: &Bencher, size: usize) -> Result<f64, Failure> {
    const DTYPE: DType = DType::BF16;
    let problem = MatmulProblem::new(size, size, size, DTYPE);
    let plan = Matmul::plan(&bencher.device, problem)?;
    let [a, b] = [1, 2].map(|seed| bencher.random(&[size, size], DTYPE, seed));
    let (a, b) = (a?, b?);
    let mut out = [Tensor::empty(&bencher.stream, &[size, size], DTYPE)?];
    let (timing, _) = timing::time(
        &bencher.stream,
        &mut out,
        &|stream, out: &mut Tensor| plan.run(stream, MatmulArgs::new(a.view(), b.view(), out.view_mut())),
        Effort::CASE,
        None,
    )?;
    Ok(timing.median_us)
}

fn product_i8_us(bencher: &Bencher, size: usize) -> Result<f64, Failure> {
    let problem = MatmulI8Problem { m: size, n: size, k: size, out_dtype: DType::BF16, bias: Bias::None };
    let plan = MatmulI8::plan(&bencher.device, problem)?;
    let [qa, qb] = [1, 2].map(|seed| bencher.random(&[size, size], DType::I8, seed));
    let (qa, qb) = (qa?, qb?);
    let scale = bencher.random(&[size], DType::F32, 3)?;
    let mut out = [Tensor::empty(&bencher.stream, &[size, size], DType::BF16)?];
    let (timing, _) = timing::time(
        &bencher.stream,
        &mut out,
        &|stream, out: &mut Tensor| {
            let (a_scale, b_scale) = (scale.view(), scale.view());
            let (qa, qb, out) = (qa.view(), qb.view(), out.view_mut());
            plan.run(stream, MatmulI8Args { qa, qb, a_scale, b_scale, bias: None, out })
        },
        Effort::CASE,
        None,
    )?;
    Ok(timing.median_us)
}
