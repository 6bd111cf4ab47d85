//! Times every operator at the shapes of `host/src/ops/<op>/cases.rs`: see CONTRIBUTING, "Benchmarks".

mod harness;

mod attention;
mod causal_conv1d;
mod copy;
mod embedding;
mod embedding_bag;
mod gated_delta;
mod glu;
mod grouped_matmul;
mod kv_append;
mod layernorm;
mod matmul;
mod matmul_i8;
mod models;
mod moe_combine;
mod moe_permute;
mod moe_router;
mod qk_norm_rope;
mod rmsnorm;
mod rope;
mod sampling;
mod scatter_rows;
mod transpose;

use clap::Parser;
use harness::{Bencher, Failure, Options, anchors};

fn main() -> Result<(), Failure> {
    let mut bencher = Bencher::new(Options::parse())?;
    attention::bench(&mut bencher);
    causal_conv1d::bench(&mut bencher);
    copy::bench(&mut bencher);
    embedding::bench(&mut bencher);
    embedding_bag::bench(&mut bencher);
    gated_delta::bench(&mut bencher);
    glu::bench(&mut bencher);
    grouped_matmul::bench(&mut bencher);
    kv_append::bench(&mut bencher);
    layernorm::bench(&mut bencher);
    matmul::bench(&mut bencher);
    matmul_i8::bench(&mut bencher);
    moe_combine::bench(&mut bencher);
    moe_permute::bench(&mut bencher);
    moe_router::bench(&mut bencher);
    qk_norm_rope::bench(&mut bencher);
    rmsnorm::bench(&mut bencher);
    rope::bench(&mut bencher);
    sampling::bench(&mut bencher);
    scatter_rows::bench(&mut bencher);
    transpose::bench(&mut bencher);
    models::bench(&mut bencher);
    anchors::list(&mut bencher);
    bencher.finish()
}
