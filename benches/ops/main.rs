//! Benchmarks of every operator.

fn main() {}
