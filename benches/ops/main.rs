//! Times every operator at the shapes of `host/src/ops/<op>/cases.rs`: see CONTRIBUTING, "Benchmarks".

mod harness;

mod models;
mod sweep;

macro_rules! operators {
    ($($op:ident $name:literal $tables:tt;)*) => {
        $(mod $op;)*

        fn bench_operators(bencher: &mut Bencher) {
            $($op::bench(bencher);)*
        }
    };
}
abi::for_each_operator!(operators);

use clap::Parser;
use harness::{Bencher, Failure, Options, anchors};

fn main() -> Result<(), Failure> {
    let mut bencher = Bencher::new(Options::parse())?;
    if !bencher.sweeps.is_empty() {
        sweep::run(&mut bencher);
        return bencher.finish();
    }
    bench_operators(&mut bencher);
    models::bench(&mut bencher);
    anchors::list(&mut bencher);
    bencher.finish()
}
