//! One module per operator: its parameter structs and its table of kernel entry points.
//!
//! A table is written once, as a macro that hands its rows to another: here they become the list that the host chooses
//! from, in `gpu` the entry points themselves. An entry is named `<op>_<dtype>__<tile>__<floor>`.
//!
//! [`for_each_operator!`](crate::for_each_operator) is the one list of operators: it makes the modules here, in `gpu`,
//! `host`, the tests and the benches. Files that a macro declares are not found by `cargo fmt`; `cargo xtask fmt`
//! formats them too.
//!
//! Nobody else makes a row, nor a copy of one to change: what a kernel may be asked follows from its row.

/// Hands every operator to a macro: its module, its name, and the tables of its kernels.
///
/// The name is a feature of the `gpu` crate, and the operator has an image of its own per floor.
#[macro_export]
macro_rules! for_each_operator {
    ($callback:path) => {
        $callback! {
            attention "attention" [
                VARIANTS DECODE_RING_VARIANTS DECODE_LATENT_VARIANTS DECODE_LATENT_WGMMA_VARIANTS
                DECODE_RING_FP8_VARIANTS GATHER_VARIANTS PREFILL_MMA_VARIANTS COMBINE_VARIANTS
                WGMMA_VARIANTS
            ];
            attention_merge "attention_merge" [VARIANTS];
            causal_conv1d "causal_conv1d" [VARIANTS];
            copy "copy" [VARIANTS];
            decoder_layers "decoder_layers" [VARIANTS];
            embedding "embedding" [VARIANTS PACKED_VARIANTS];
            embedding_bag "embedding_bag" [VARIANTS];
            fused_moe "fused_moe" [VARIANTS PACKED_VARIANTS];
            gated_delta "gated_delta" [VARIANTS MMA_VARIANTS];
            glu "glu" [VARIANTS];
            grouped_matmul "grouped_matmul" [
                VARIANTS MMA_VARIANTS WGMMA_VARIANTS PACKED_VARIANTS PACKED_MMA_VARIANTS UNPACK_VARIANTS FP8_VARIANTS
                QUANTISE_VARIANTS
            ];
            kv_append "kv_append" [VARIANTS];
            latent_append "latent_append" [VARIANTS];
            layernorm "layernorm" [VARIANTS];
            matmul "matmul" [
                VARIANTS AHEAD_VARIANTS MMA_VARIANTS STREAM_VARIANTS STREAM_NORMED_VARIANTS WGMMA_VARIANTS PACKED_VARIANTS
                PACKED_MMA_VARIANTS PACKED_AHEAD_VARIANTS PACKED_WGMMA_VARIANTS UNPACK_VARIANTS FP8_VARIANTS
                PERMUTE_VARIANTS
            ];
            matmul_i8 "matmul_i8" [VARIANTS MMA_VARIANTS WGMMA_VARIANTS QUANTIZE_VARIANTS];
            moe_combine "moe_combine" [VARIANTS];
            moe_permute "moe_permute" [VARIANTS];
            moe_router "moe_router" [VARIANTS];
            qk_norm_rope "qk_norm_rope" [VARIANTS];
            quantize_weight "quantize_weight" [VARIANTS SCALES_VARIANTS];
            rmsnorm "rmsnorm" [VARIANTS];
            rope "rope" [VARIANTS];
            sampling "sampling" [VARIANTS EDIT_VARIANTS LOGPROBS_VARIANTS];
            scatter_rows "scatter_rows" [VARIANTS];
            transpose "transpose" [VARIANTS];
        }
    };
}

macro_rules! operators {
    ($($op:ident $name:literal [$($table:ident)*];)*) => {
        $(pub mod $op;)*

        /// Every operator family.
        pub const FAMILIES: &[&str] = &[$($name),*];

        /// The names of a family's kernels; none for an unknown family.
        pub fn entries(family: &str) -> impl Iterator<Item = &'static str> {
            // Those of an operator together: one chain of all is a type too deep for the compiler.
            let all = core::iter::empty()$(.chain(
                core::iter::empty()$(.chain($op::$table.iter().map(|variant| ($name, variant.entry))))*
            ))*;
            all.filter(move |(name, _)| *name == family).map(|(_, entry)| entry)
        }
    };
}
for_each_operator!(operators);
