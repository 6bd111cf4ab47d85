//! One module per operator: its parameter structs and its table of kernel entry points.
//!
//! A table is written once, as a macro that hands its rows to another: here they become the list that the host chooses
//! from, in `gpu` the entry points themselves. An entry is named `<op>_<dtype>__<tile>__<floor>`.
//!
//! Nobody else makes a row, nor a copy of one to change: what a kernel may be asked follows from its row.

pub mod attention;
pub mod causal_conv1d;
pub mod copy;
pub mod embedding;
pub mod embedding_bag;
pub mod gated_delta;
pub mod glu;
pub mod grouped_matmul;
pub mod kv_append;
pub mod layernorm;
pub mod matmul;
pub mod matmul_i8;
pub mod moe_combine;
pub mod moe_permute;
pub mod moe_router;
pub mod qk_norm_rope;
pub mod rmsnorm;
pub mod rope;
pub mod sampling;
pub mod scatter_rows;
pub mod transpose;

/// Every operator family: a feature of the `gpu` crate, and an image of its own per floor.
pub const FAMILIES: &[&str] = &[
    "attention",
    "causal_conv1d",
    "copy",
    "embedding",
    "embedding_bag",
    "gated_delta",
    "glu",
    "grouped_matmul",
    "kv_append",
    "layernorm",
    "matmul",
    "matmul_i8",
    "moe_combine",
    "moe_permute",
    "moe_router",
    "qk_norm_rope",
    "rmsnorm",
    "rope",
    "sampling",
    "scatter_rows",
    "transpose",
];

/// The names of a family's kernels; none for an unknown family.
pub fn entries(family: &str) -> impl Iterator<Item = &'static str> {
    macro_rules! named {
        ($($module:ident::$list:ident),*) => {
            core::iter::empty()$(.chain($module::$list.iter().map(|variant| (stringify!($module), variant.entry))))*
        };
    }
    let all = named!(
        attention::VARIANTS,
        attention::DECODE_RING_VARIANTS,
        attention::DECODE_LATENT_VARIANTS,
        attention::DECODE_LATENT_WGMMA_VARIANTS,
        attention::DECODE_RING_FP8_VARIANTS,
        attention::GATHER_VARIANTS,
        attention::GATHER_PAGES_VARIANTS,
        attention::PREFILL_MMA_VARIANTS,
        attention::WGMMA_VARIANTS,
        causal_conv1d::VARIANTS,
        copy::VARIANTS,
        embedding::VARIANTS,
        embedding_bag::VARIANTS,
        gated_delta::VARIANTS,
        glu::VARIANTS,
        grouped_matmul::VARIANTS,
        grouped_matmul::MMA_VARIANTS,
        grouped_matmul::WGMMA_VARIANTS,
        kv_append::VARIANTS,
        layernorm::VARIANTS,
        matmul::VARIANTS,
        matmul::MMA_VARIANTS,
        matmul::STREAM_VARIANTS,
        matmul::WGMMA_VARIANTS,
        matmul_i8::VARIANTS,
        matmul_i8::MMA_VARIANTS,
        matmul_i8::WGMMA_VARIANTS,
        matmul_i8::QUANTIZE_VARIANTS,
        moe_combine::VARIANTS,
        moe_permute::VARIANTS,
        moe_router::VARIANTS,
        qk_norm_rope::VARIANTS,
        rmsnorm::VARIANTS,
        rope::VARIANTS,
        sampling::VARIANTS,
        scatter_rows::VARIANTS,
        transpose::VARIANTS
    );
    all.filter(move |(name, _)| *name == family).map(|(_, entry)| entry)
}
