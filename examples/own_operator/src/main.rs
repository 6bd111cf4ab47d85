//! Runs the operator on the first card: time, rate, error. Without a card it says so; the tests need none.

#[path = "../../output/mod.rs"]
mod output;

use std::process::ExitCode;

fn main() -> ExitCode {
    output::end("own_operator", run())
}

#[cfg(not(feature = "cuda"))]
fn run() -> Result<ExitCode, output::Failure> {
    let advice = "cargo test -p own_operator runs the kernels in the simulator";
    output::write(format_args!("built without the feature `cuda`; {advice}\n"))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(feature = "cuda")]
fn run() -> Result<ExitCode, output::Failure> {
    use own_operator::card::Card;
    let card = match Card::open() {
        Ok(card) => card,
        Err(reason) => {
            let advice = "cargo test -p own_operator runs the kernels in the simulator";
            output::write(format_args!("no card: {reason}; {advice}\n"))?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    output::write(format_args!("{}\n", card.name()))?;
    if measure(&card)? { Ok(ExitCode::SUCCESS) } else { Err("an error is above its bound".into()) }
}

/// Prints a line for each type and shape; whether all errors are within their bounds.
#[cfg(feature = "cuda")]
fn measure(card: &own_operator::card::Card) -> Result<bool, output::Failure> {
    use own_operator::card::bytes_moved;
    use own_operator::{DType, Softmax};
    output::write(format_args!(
        "{:>6} {:>6} {:>5} {:>10} {:>9} {:>15}\n",
        "rows", "cols", "type", "time", "rate", "error / bound"
    ))?;
    let mut is_right = true;
    for dtype in [DType::F32, DType::Bf16] {
        for (rows, cols) in [(4096, 1000), (4096, 4096), (512, 32001), (64, 151936)] {
            let softmax = Softmax::new(rows, cols, dtype, 0.125)?;
            let x = dtype.decode(&softmax.encode(&own_operator::values(rows * cols))?);
            let output = card.run(&softmax, &x, 20)?;
            let rate = bytes_moved(&softmax) as f64 / output.time.as_secs_f64();
            let error = softmax.error(&x, &output.out);
            is_right &= error <= 1.0;
            let (time, gigabytes) = (output.time.as_secs_f64() * 1e6, rate / 1e9);
            output::write(format_args!(
                "{rows:>6} {cols:>6} {dtype:>5?} {time:>7.1} µs {gigabytes:>4.0} GB/s {error:>15.3}\n"
            ))?;
        }
    }
    Ok(is_right)
}
