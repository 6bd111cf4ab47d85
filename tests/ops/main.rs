//! Properties of every operator against its f64 reference, on the CPU backend and on every kernel that the card can run;
//! and what happens where a device does not fit.

mod arguments;
mod faults;
mod harness;
mod latent;
mod packed;

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
mod moe;
mod moe_combine;
mod moe_permute;
mod moe_router;
mod qk_norm_rope;
mod rmsnorm;
mod rope;
mod sampling;
mod scatter_rows;
mod transpose;
