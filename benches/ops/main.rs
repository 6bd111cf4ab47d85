//! Times every operator at the shapes of `host/src/ops/<op>/cases.rs`: see CONTRIBUTING, "Benchmarks".

mod harness;

mod embedding;
mod kv_append;
mod matmul;
mod matmul_i8;
mod rmsnorm;
mod sampling;

use clap::Parser;
use harness::{Bencher, Options};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut bencher = Bencher::new(Options::parse())?;
    embedding::bench(&mut bencher)?;
    kv_append::bench(&mut bencher)?;
    matmul::bench(&mut bencher)?;
    matmul_i8::bench(&mut bencher)?;
    rmsnorm::bench(&mut bencher)?;
    sampling::bench(&mut bencher)?;
    bencher.finish()
}
