//! Grids of shapes, for `--sweep`: at and beside the edges of tiles, powers of two and primes, over the weights of
//! public models.

use warpforge::DType;
use warpforge::ops::attention::{AttentionCase, Mask, Scores};
use warpforge::ops::glu::{Activation, GluCase};
use warpforge::ops::grouped_matmul::{GroupedMatmulCase, GroupedRows};
use warpforge::ops::matmul::{Act, MatmulCase, Precision};
use warpforge::ops::rmsnorm::{Gate, NormResidual, NormWeight, RmsNormCase};

use super::{attention, glu, grouped_matmul, matmul, rmsnorm};
use crate::harness::{Bencher, Sweep};

pub fn run(bencher: &mut Bencher) {
    for sweep in bencher.sweeps.clone() {
        match sweep {
            Sweep::Matmul => sweep_matmul(bencher),
            Sweep::Attention => sweep_attention(bencher),
            Sweep::Grouped => sweep_grouped(bencher),
            Sweep::Rowwise => sweep_rowwise(bencher),
        }
    }
}

/// Rows of b and its columns, of the projections of ten models: Qwen3-0.6B, Qwen3-4B, Llama-3-8B (and Mistral-7B),
/// Llama-3-70B, Qwen2.5-7B, Phi-3-mini, SmolLM2-1.7B, Qwen3-Coder-30B, Qwen3-Coder-Next, GLM-4.7-Flash.
const WEIGHTS: [[usize; 2]; 20] = [
    [4096, 1024],
    [1024, 3072],
    [6144, 2560],
    [2560, 4096],
    [19456, 2560],
    [2560, 9728],
    [6144, 4096],
    [4096, 4096],
    [28672, 4096],
    [4096, 14336],
    [10240, 8192],
    [8192, 28672],
    [4608, 3584],
    [3584, 18944],
    [3072, 8192],
    [2048, 2048],
    [2048, 8192],
    [5120, 2048],
    [12288, 2048],
    [2048, 5120],
];

/// Rows of a.
const ROWS: [usize; 38] = [
    1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 48, 64, 65, 80, 96, 127, 128, 129, 160, 192, 251, 256, 257, 320, 384,
    512, 513, 640, 768, 1000, 1024, 1280, 1536, 2000, 2048, 3000, 4096, 8191,
];

/// More operations than these take the whole sweep's time.
const MAX_FLOPS: usize = 1 << 40;

fn sweep_matmul(bencher: &mut Bencher) {
    for [n, k] in WEIGHTS {
        for m in ROWS {
            if 2 * m * n * k > MAX_FLOPS {
                continue;
            }
            let case = MatmulCase {
                name: "",
                batch: 1,
                m,
                n,
                k,
                act: Act::None,
                dtype: DType::BF16,
                precision: Precision::Full,
            };
            bencher.case("matmul", &format!("sweep {m}x{n}x{k}"), |bencher| matmul::time(bencher, &case));
        }
    }
}

/// Query heads, key heads, and their width.
const HEADS: [(usize, usize, usize); 6] =
    [(16, 8, 128), (32, 8, 128), (32, 4, 128), (32, 32, 64), (16, 2, 256), (40, 8, 128)];

fn sweep_attention(bencher: &mut Bencher) {
    let mut cases = Vec::new();
    for heads in HEADS {
        let prompts =
            [(1, 128), (8, 128), (32, 256), (4, 500), (1, 512), (1, 1000), (4, 1024), (1, 2048), (1, 6000)];
        cases.extend(prompts.map(|(batch, seq)| ("prompt", batch, seq, seq, heads)));
        for keys in [3000, 16384] {
            let chunks = [17, 32, 64, 100, 128, 256, 512, 2048];
            cases.extend(chunks.map(|queries| ("chunk", 1, queries, keys, heads)));
        }
        cases.extend([2, 4, 8].map(|queries| ("verify", 4, queries, 4096, heads)));
        for keys in [512, 2048, 8192, 32768] {
            for batch in [1, 3, 8, 33, 64, 256] {
                // Of keys and values, 4 GiB.
                if batch * keys * heads.1 * heads.2 <= 1 << 30 {
                    cases.push(("decode", batch, 1, keys, heads));
                }
            }
        }
    }
    for (kind, batch, seq_q, seq_kv, (heads_q, heads_kv, head_dim)) in cases {
        let case = AttentionCase {
            name: "",
            batch,
            seq_q,
            seq_kv,
            heads_q,
            heads_kv,
            head_dim,
            head_dim_v: head_dim,
            is_latent: false,
            mask: Mask::Causal,
            scores: Scores::PLAIN,
            has_sinks: false,
            page_size: None,
            is_fp8: false,
        };
        let label = format!("sweep {kind} {batch}x{seq_q}x{seq_kv} {heads_q}/{heads_kv} of {head_dim}");
        bencher.case("attention", &label, |bencher| attention::time(bencher, &case));
    }
}

fn sweep_grouped(bencher: &mut Bencher) {
    // Experts, those of a token, rows and columns of gate and up; down has the columns of one of them.
    for (experts, fan_out, n, k) in
        [(128, 8, 1536, 2048), (512, 10, 1024, 2048), (64, 4, 3072, 2048), (60, 4, 2816, 2048)]
    {
        for tokens in [1, 2, 4, 8, 17, 32, 64, 128, 500, 512, 1024, 2048, 4096] {
            let rows = tokens * fan_out;
            let gate_up =
                GroupedMatmulCase { name: "", rows, experts, n, k, from: GroupedRows::Gathered { fan_out } };
            let down = GroupedMatmulCase { n: k, k: n / 2, from: GroupedRows::Sorted, ..gate_up };
            for (part, case) in [("gate up", gate_up), ("down", down)] {
                let label = format!("sweep {part} {experts} experts, {tokens} tokens of {fan_out}");
                bencher.case("grouped_matmul", &label, |bencher| grouped_matmul::time(bencher, &case));
            }
        }
    }
}

fn sweep_rowwise(bencher: &mut Bencher) {
    for cols in [768, 1024, 2560, 4096, 9728, 14336] {
        for rows in [1, 8, 64, 500, 2048, 8192] {
            let label = format!("sweep {rows}x{cols}");
            let norm = RmsNormCase {
                name: "",
                rows,
                cols,
                residual: NormResidual::Add,
                weight: NormWeight::Plain,
                gate: Gate::None,
            };
            bencher.case("rmsnorm", &label, |bencher| rmsnorm::time(bencher, &norm));
            let glu = GluCase { name: "", rows, cols, activation: Activation::Silu, has_up: true };
            bencher.case("glu", &label, |bencher| glu::time(bencher, &glu));
        }
    }
}
