//! Times every operator at the shapes of `host/src/ops/<op>/cases.rs`: see CONTRIBUTING, "Benchmarks".

mod harness;

mod kv_append;
mod rmsnorm;

use clap::Parser;
use harness::{Bencher, Options};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut bencher = Bencher::new(Options::parse())?;
    kv_append::bench(&mut bencher)?;
    rmsnorm::bench(&mut bencher)?;
    bencher.finish()
}
