//! Runs the operator on the first card: time, rate, error. Without a card it says so; the tests need none.

#[path = "../../output/mod.rs"]
mod output;

use std::process::ExitCode;

use half::bf16;
use own_operator::{Softmax, Stored, values};
use warpforge::{Device, Tensor};

fn main() -> ExitCode {
    output::end("own_operator", run())
}

fn run() -> Result<ExitCode, output::Failure> {
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(reason) => {
            let advice = "cargo test -p own_operator runs the kernels in the simulator";
            output::write(format_args!("no card: {reason}; {advice}\n"))?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    output::write(format_args!("{}\n", device.describe()))?;
    output::write(format_args!(
        "{:>6} {:>6} {:>5} {:>10} {:>9} {:>15}\n",
        "rows", "cols", "type", "time", "rate", "error / bound"
    ))?;
    let mut worst: f64 = 0.0;
    for (rows, cols) in [(4096, 1000), (4096, 4096), (512, 32001), (64, 151936)] {
        worst = worst.max(measure(&device, rows, cols, |x| x)?);
        worst = worst.max(measure(&device, rows, cols, bf16::from_f32)?);
    }
    if worst <= 1.0 { Ok(ExitCode::SUCCESS) } else { Err("an error is above its bound".into()) }
}

/// Writes a line for a type and a shape; returns the error over its bound.
fn measure<T: Stored>(
    device: &Device,
    rows: usize,
    cols: usize,
    round: fn(f32) -> T,
) -> Result<f64, output::Failure> {
    const LAUNCHES: u16 = 20;
    let stream = device.stream()?;
    let softmax = Softmax::<T>::plan(device, rows, cols, 0.125)?;
    let data: Vec<T> = values(rows * cols).into_iter().map(round).collect();
    let x = Tensor::from_slice(&stream, &[rows, cols], &data)?;
    let mut out = Tensor::empty(&stream, &[rows, cols], T::DTYPE)?;
    softmax.run(&stream, x.view(), out.view_mut())?;
    let start = stream.record()?;
    for _ in 0..LAUNCHES {
        softmax.run(&stream, x.view(), out.view_mut())?;
    }
    let micros = f64::from(stream.record()?.elapsed_ms(&start)?) * 1e3 / f64::from(LAUNCHES);
    let error = softmax.error(&x.to_f32_vec(&stream)?, &out.to_f32_vec(&stream)?);
    let gigabytes = (x.bytes() + out.bytes()) as f64 / micros / 1e3;
    let dtype = T::DTYPE.name();
    output::write(format_args!(
        "{rows:>6} {cols:>6} {dtype:>5} {micros:>7.1} µs {gigabytes:>4.0} GB/s {error:>15.3}\n"
    ))?;
    Ok(error)
}
