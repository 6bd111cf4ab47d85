use abi::Arch;

use super::super::{Act, Activation, Epilogue, RowNorm};
use super::*;
use crate::Invariance;
use crate::ops::rmsnorm::NormWeight;

const H200: DeviceLimits = DeviceLimits::new(Arch::Sm61, 132, 48 << 10);

#[test]
fn choice_by_rows() {
    let small = DeviceLimits { num_sms: 20, ..H200 };
    let table = [
        (H200, 1, 4096, DType::BF16, "matmul_bf16__gemv1__sm61"),
        (H200, 2, 4096, DType::F32, "matmul_f32__gemv2__sm61"),
        (H200, 3, 4096, DType::F16, "matmul_f16__gemv4__sm61"),
        (H200, 5, 4096, DType::BF16, "matmul_bf16__gemv8__sm61"),
        (H200, 16, 4096, DType::BF16, "matmul_bf16__gemv8__sm61"),
        (H200, 17, 4096, DType::BF16, "matmul_bf16__m64n64k32__sm61"),
        (H200, 512, 4096, DType::BF16, "matmul_bf16__m64n64k32__sm61"),
        (H200, 513, 4096, DType::BF16, "matmul_bf16__m128n128k16__sm61"),
        (H200, 65, 151_936, DType::F32, "matmul_f32__m128n128k8__sm61"),
        (small, 65, 4096, DType::F32, "matmul_f32__m128n128k8__sm61"),
        (H200, 0, 0, DType::F32, "matmul_f32__gemv1__sm61"),
    ];
    for (limits, m, n, dtype, entry) in table {
        let problem = MatmulProblem::new(m, n, 1024, dtype);
        let choices = select(&limits, &problem).unwrap();
        assert_eq!(choices.last().unwrap().variant.entry, entry, "{m} × {n} {dtype}");
        assert!(choices.is_sorted_by(|a, b| a.max_rows < b.max_rows));
        assert!(choices.last().unwrap().max_rows >= m);
    }
}

/// One row reads its weights ahead where they are on their way before the wait, and no more or fewer blocks than
/// suit the card.
#[test]
fn what_is_read_ahead() {
    let hopper = DeviceLimits { floor: Arch::Sm90a, ..H200 };
    let norm = Some(RowNorm { eps: 1e-6, weight: NormWeight::Plain });
    // The layers of Qwen3-0.6B; its head, Qwen3-4B's q, k and v, a router; narrow, with a norm and without.
    let table = [
        (4096, 1024, None, true),
        (4096, 1024, norm, true),
        (1024, 2048, None, true),
        (1024, 3072, None, true),
        (151_936, 1024, None, false),
        (6144, 2560, None, false),
        (6144, 2560, norm, false),
        (128, 2048, None, false),
        (64, 256, norm, true),
        (64, 256, None, false),
    ];
    for (n, k, norm, wanted) in table {
        let problem = MatmulProblem { norm, ..MatmulProblem::new(1, n, k, DType::BF16) };
        assert_eq!(ahead(&hopper, &problem).is_some(), wanted, "{n} × {k}");
        let of_f32 = MatmulProblem { dtype: DType::F32, out_dtype: DType::F32, ..problem };
        assert_eq!((ahead(&hopper, &of_f32), ahead(&H200, &problem)), (None, None));
    }
    let act = Act::Gated(Activation::Silu);
    let gated =
        MatmulProblem { epilogue: Epilogue::of(act), ..MatmulProblem::new(1, 3072, 1024, DType::F16) };
    assert_eq!(ahead(&hopper, &gated).map(|variant| variant.entry), Some("matmul_f16__ahead__sm90a"));
}

/// Several rows are normed within a product whose blocks are all there at once, each warp in two turns.
#[test]
fn what_is_normed() {
    let hopper = DeviceLimits { floor: Arch::Sm90a, ..H200 };
    let ampere = DeviceLimits { floor: Arch::Sm80, ..H200 };
    let entry = |limits: &DeviceLimits, m, [n, k]: [usize; 2], dtype| {
        let norm = Some(RowNorm { eps: 1e-6, weight: NormWeight::Plain });
        let problem = MatmulProblem { norm, ..MatmulProblem::new(m, n, k, dtype) };
        normed(limits, &problem).unwrap().map(|choice| choice.variant.entry)
    };
    let (several, one) = ("matmul_bf16__streamnormed__sm80", "matmul_bf16__ahead__sm90a");
    // Qwen3-0.6B's q, k and v, and gate and up; Qwen3-4B's.
    for (m, sizes, wanted) in [
        (2, [4096, 1024], Some(several)),
        (8, [6144, 1024], Some(several)),
        (1, [4096, 1024], Some(one)),
        (8, [6144, 2560], None),
        (8, [19456, 2560], None),
    ] {
        assert_eq!(entry(&hopper, m, sizes, DType::BF16), wanted, "{m} × {sizes:?}");
        assert_eq!(entry(&ampere, m, sizes, DType::BF16), wanted.filter(|_| m > 1), "{m} × {sizes:?}");
        let of_f16 = entry(&hopper, m, sizes, DType::F16);
        assert_eq!(of_f16, wanted.filter(|_| m == 1).map(|_| "matmul_f16__ahead__sm90a"), "{m} × {sizes:?}");
    }
}

#[test]
fn every_type_has_every_tile() {
    for dtype in DType::FLOATS {
        for out_dtype in [dtype, DType::F32] {
            let problem = MatmulProblem { out_dtype, ..MatmulProblem::new(9999, 512, 64, dtype) };
            let choices = select(&H200, &problem).unwrap();
            assert_eq!(choices.len(), 6);
            assert!(choices.iter().all(|choice| choice.variant.out_dtype == out_dtype));
        }
    }
}

/// A router's logits, in f32 and of few columns, take tiles that fill the card.
#[test]
fn few_columns_of_f32_out() {
    let hopper = DeviceLimits { floor: Arch::Sm90a, smem_per_block_bytes: 227 << 10, ..H200 };
    for (m, n, k, entry) in [
        (2048, 128, 2048, "matmul_bf16_f32__m64n64k2__sm90a"),
        (2048, 512, 2048, "matmul_bf16_f32__n128__sm90a"),
        (65, 64, 2048, "matmul_bf16_f32__m64n64k4__sm90a"),
    ] {
        let problem = MatmulProblem { out_dtype: DType::F32, ..of_bf16([m, n, k]) };
        let loaded: Vec<_> = tensor(&hopper, &problem).into_iter().map(|variant| (variant, ())).collect();
        let sizes = [m, n, k].map(|size| size as u32);
        let (variant, ()) = fastest(&loaded, &problem, 1, sizes, hopper.num_sms).unwrap();
        assert_eq!(variant.entry, entry, "{m} × {n} × {k}");
    }
}

fn of_bf16([m, n, k]: [usize; 3]) -> MatmulProblem {
    let dtype = DType::BF16;
    MatmulProblem::new(m, n, k, dtype)
}

/// The kernel among those of a kind that the clocks say is the fastest.
fn of_least_clocks(
    limits: &DeviceLimits,
    [m, n, k]: [usize; 3],
    is_of_kind: impl Fn(MatmulTile) -> bool,
) -> &'static str {
    let clocks = |variant: &&MatmulVariant| {
        tensor_clocks(variant.tile, 1, m as u32, n as u32, k as u32, limits.num_sms)
    };
    let kernels = tensor(limits, &of_bf16([m, n, k])).into_iter();
    kernels.filter(|variant| is_of_kind(variant.tile)).min_by_key(clocks).expect("a tile").entry
}

/// What an H200 was faster by with the kernels for Ampere.
#[test]
fn tiles_of_mma_by_shape() {
    let ampere = DeviceLimits { floor: Arch::Sm80, smem_per_block_bytes: 163 << 10, ..H200 };
    for ([m, n, k], fastest) in [
        ([8192, 8192, 8192], "matmul_bf16__m128n256__sm80"),
        ([4096, 4096, 4096], "matmul_bf16__m128n256__sm80"),
        ([4096, 4096, 2560], "matmul_bf16__m128n256__sm80"),
        ([128, 16384, 4096], "matmul_bf16__m128n128__sm80"),
        ([128, 2560, 2560], "matmul_bf16__m64n64__sm80"),
    ] {
        let is_mma = |tile| matches!(tile, MatmulTile::Mma { .. });
        assert_eq!(of_least_clocks(&ampere, [m, n, k], is_mma), fastest, "{m} × {n} × {k}");
    }
}

/// The fastest of an H200's tiles at the shapes where all were timed, or one within 4 % of it.
#[test]
fn tiles_of_wgmma_by_shape() {
    let hopper = DeviceLimits { floor: Arch::Sm90a, smem_per_block_bytes: 227 << 10, ..H200 };
    for ([m, n, k], fastest) in [
        ([8192, 8192, 8192], &["n192c2", "n256c2"][..]),
        ([4096, 4096, 4096], &["n256c2"]),
        ([2048, 19456, 2560], &["n192c2", "n256c2"]),
        ([4096, 4096, 2560], &["n256c2"]),
        ([2048, 1536, 2048], &["n192c2"]),
        ([128, 16384, 4096], &["n128"]),
        ([64, 4096, 4096], &["m64n64c4"]),
        ([32, 19456, 2560], &["n192", "n128"]),
        ([128, 2560, 9728], &["m64n64c4"]),
        ([128, 4096, 1024], &["n64"]),
        ([2048, 128, 2048], &["n64"]),
        ([32, 151_936, 1024], &["n192"]),
        ([32, 151_936, 2560], &["n128", "n192"]),
        ([128, 151_936, 2560], &["n128", "n192"]),
        ([128, 19456, 2560], &["n192"]),
        ([128, 12288, 2048], &["n128"]),
        ([32, 12288, 2048], &["n128"]),
        ([32, 20480, 2048], &["n192", "n128"]),
        ([32, 6144, 1024], &["n64"]),
        ([32, 6144, 2560], &["n64"]),
        ([32, 5120, 2048], &["m64n64c4"]),
        ([32, 5120, 768], &["m64n64c4"]),
        ([32, 9216, 2048], &["n128"]),
        ([128, 9216, 2560], &["n128", "n64"]),
    ] {
        let is_wgmma = |tile| matches!(tile, MatmulTile::Wgmma { .. });
        let entry = of_least_clocks(&hopper, [m, n, k], is_wgmma);
        let name = entry.trim_start_matches("matmul_bf16__").trim_end_matches("__sm90a");
        assert!(fastest.contains(&name), "{m} × {n} × {k}: {name}");
    }
    assert!(tensor(&H200, &of_bf16([512, 512, 64])).is_empty());
}

/// Which kind a launch takes: few rows stream, few columns share k, the rest is `wgmma`'s, also with rows and
/// columns swapped, and without it `mma`'s. Of more than 64 rows on Hopper those that were measured to be the
/// fastest (`benches/record/h200/2026-11-28-sweep.md`, `2026-11-28-choice.md`, `2026-11-29-narrow.md`).
#[test]
fn kinds_of_the_tensor_cores_by_shape() {
    let hopper = DeviceLimits { floor: Arch::Sm90a, smem_per_block_bytes: 227 << 10, ..H200 };
    let ampere = DeviceLimits { floor: Arch::Sm80, smem_per_block_bytes: 163 << 10, ..H200 };
    let kind = |limits: &DeviceLimits, problem: &MatmulProblem| {
        let loaded: Vec<_> = tensor(limits, problem).into_iter().map(|variant| (variant, ())).collect();
        let sizes = [problem.m, problem.b_rows(), problem.k].map(|size| size as u32);
        let taken = fastest(&loaded, problem, problem.batch as u32, sizes, limits.num_sms);
        taken.map(|(variant, ())| match variant.tile {
            MatmulTile::Stream { .. } => "stream".to_owned(),
            MatmulTile::Split { bn, cluster, .. } => format!("split {bn} by {cluster}"),
            MatmulTile::Wgmma { bn, .. } => format!("wgmma {bn}"),
            MatmulTile::Swapped { bm, bn, cluster, .. } => format!("swapped {bm} × {bn} by {cluster}"),
            tile => format!("{tile:?}").split_whitespace().next().unwrap_or_default().to_lowercase(),
        })
    };
    for (sizes, on_hopper, on_ampere) in [
        ([2, 4096, 4096], "stream", "stream"),
        ([16, 19456, 2560], "stream", "stream"),
        ([17, 19456, 2560], "wgmma", "stream"),
        ([32, 2048, 6144], "split 64 by 4", "stream"),
        ([64, 4096, 4096], "split 64 by 2", "stream"),
        ([65, 19456, 2560], "wgmma", "mma"),
        ([65, 4096, 4096], "swapped 64 × 96 by 2", "mma"),
        ([128, 2560, 9728], "swapped 64 × 160 by 2", "mma"),
        ([128, 16384, 4096], "wgmma 128", "mma"),
        ([128, 28672, 4096], "wgmma 128", "mma"),
        ([129, 2560, 9728], "swapped 64 × 160 by 2", "mma"),
        ([129, 19456, 2560], "swapped 192 × 160 by 1", "mma"),
        ([768, 6144, 2560], "swapped 192 × 192 by 1", "mma"),
        ([129, 4096, 4096], "swapped 64 × 160 by 2", "mma"),
        ([192, 28672, 4096], "swapped 128 × 192 by 1", "mma"),
        ([512, 10240, 8192], "wgmma 192", "mma"),
        ([8192, 8192, 8192], "wgmma", "mma"),
    ] {
        for (limits, want) in [(&hopper, on_hopper), (&ampere, on_ampere)] {
            let kind = kind(limits, &of_bf16(sizes)).expect("a kernel");
            assert!(kind.starts_with(want), "{sizes:?} on {}: {kind}", limits.floor);
        }
    }
    // Several products at a time are not for TMA.
    for (m, want) in [(32, "stream"), (64, "stream"), (65, "mma")] {
        let problem = MatmulProblem { batch: 20, ..of_bf16([m, 512, 1024]) };
        assert_eq!(kind(&hopper, &problem).as_deref(), Some(want), "{m} rows");
    }
    // Half a tile of the gate is whole boxes.
    let epilogue = Epilogue { act: Act::Gated(Activation::Silu), ..Epilogue::NONE };
    let gated = MatmulProblem { epilogue, ..of_bf16([2048, 9728, 2560]) };
    assert!(matches!(kind(&hopper, &gated).as_deref(), Some("wgmma 128" | "wgmma 256")));
    assert_eq!(kind(&H200, &of_bf16([512, 512, 64])), None);
}

#[test]
fn few_columns_split_k() {
    let one_row = [
        (1024, 2048, 1),
        (1024, 3072, 2),
        (1024, 1024, 0),
        (2560, 9728, 0),
        (2048, 10_240, 1),
        (6144, 2560, 0),
        (256, 65536, 3),
    ];
    for (n, k, split) in one_row {
        let ampere = DeviceLimits { floor: Arch::Sm80, ..H200 };
        assert_eq!(split_log2(&ampere, n, k, DType::BF16), split, "{n} {k}");
    }
    let table = [
        (1024, 2048, DType::BF16, 1),
        (1024, 3072, DType::BF16, 1),
        (1024, 1024, DType::BF16, 0),
        (2560, 9728, DType::BF16, 2),
        (151_936, 9728, DType::BF16, 0),
        (256, 65536, DType::F32, 3),
        (1024, 4096, DType::I8, 1),
    ];
    for (n, k, dtype, split) in table {
        assert_eq!(split_log2(&H200, n, k, dtype), split, "{n} {k} {dtype}");
    }
}

#[test]
fn next_starts_early_behind_full_multiprocessors() {
    let gemv = |rows, cols| MatmulTile::Gemv { rows, cols, unroll: 4 };
    let stream = |rows| MatmulTile::Stream { rows, cols: 16, lanes: 8, unroll: 2 };
    let wgmma =
        |bn, stages| MatmulTile::Wgmma { bm: 128, bn, threads: 384, stages, cluster: 1, shares_a: false };
    for (tile, blocks, may) in [
        (gemv(1, 1), 464, true),
        (gemv(1, 1), 463, false),
        (gemv(1, 1), u64::MAX, true),
        (gemv(2, 1), 528, false),
        (stream(16), 232, true),
        (stream(16), 231, false),
        (stream(32), 264, false),
        (wgmma(128, 6), 116, true),
        (wgmma(128, 6), 115, false),
        (wgmma(64, 2), 132, false),
    ] {
        let bits = next_may_start(tile, DType::BF16, blocks, 132);
        assert_eq!(bits, if may { NEXT_MAY_START } else { 0 }, "{tile:?} {blocks}");
    }
}

#[test]
fn narrow_products_of_long_k_share_it() {
    for (m, n, k, tile) in [
        (64, 2560, 9728, Some([64, 4])),
        (64, 2816, 1024, Some([64, 4])),
        (64, 2817, 1024, Some([64, 2])),
        (64, 4224, 1024, Some([64, 2])),
        (64, 4225, 4096, None),
        (64, 4096, 1016, None),
        (64, 64, 1016, None),
        (65, 1408, 1024, Some([64, 4])),
        (65, 1409, 1024, Some([64, 2])),
        (128, 2112, 1024, Some([64, 2])),
        (128, 2113, 4095, None),
        (128, 2113, 4096, Some([128, 4])),
        (128, 2816, 9728, Some([128, 4])),
        (128, 2817, 9728, None),
        (129, 1024, 4096, None),
    ] {
        assert_eq!(split_tile(132, m, n, k), tile, "{m} {n} {k}");
    }
}

/// Whatever rows there are: one choice, which has no sums that others share.
#[test]
fn invariant_choices_know_no_rows() {
    let layout = crate::weight::Scheme::INT4.layout();
    let shapes = [[1024, 2048], [6144, 2560], [2560, 9728], [151_936, 1024], [80, 528], [128, 2048]];
    for (floor, smem_per_block_bytes) in
        [(Arch::Sm61, 48 << 10), (Arch::Sm80, 163 << 10), (Arch::Sm90a, 227 << 10)]
    {
        let limits = DeviceLimits { floor, smem_per_block_bytes, invariance: Invariance::Batch, ..H200 };
        for ([n, k], dtype, batch) in shapes
            .into_iter()
            .flat_map(|size| DType::FLOATS.map(|dtype| (size, dtype)))
            .flat_map(|(size, dtype)| [1, 20].map(|batch| (size, dtype, batch)))
        {
            for epilogue in [Epilogue::NONE, Epilogue::of(Act::Gated(Activation::Silu))] {
                let of = |m| {
                    let problem = MatmulProblem { batch, epilogue, ..MatmulProblem::new(m, n, k, dtype) };
                    let packed = super::super::select_packed(&limits, &problem, &layout);
                    (select(&limits, &problem).unwrap(), invariant(&limits, &problem), packed)
                };
                let (choices, tensor, packed) = of(1);
                assert!(packed.dense_from.is_none() && packed.simt.len() <= 1 && packed.mma.len() <= 1);
                assert_eq!((choices.len(), choices[0].max_rows), (1, usize::MAX));
                let has_tensor = floor != Arch::Sm61 && dtype != DType::F32;
                assert_eq!(tensor.is_some(), has_tensor, "{n} × {k} {dtype} {batch} on {floor}");
                for m in [0, 2, 3, 8, 16, 17, 31, 64, 65, 128, 129, 512, 2048, 8192] {
                    let same = of(m) == (choices.clone(), tensor, packed.clone());
                    assert!(same, "{m} × {n} × {k} {dtype} on {floor}");
                }
            }
        }
    }
}

#[test]
fn more_blocks_than_a_grid_has() {
    let most = (1 << 31) - 1;
    let problem = MatmulProblem::new(most, most, 1, DType::F32);
    let message = select(&H200, &problem).unwrap_err().to_string();
    assert!(message.starts_with("matmul: problem: expected at most 2^31 - 1 blocks, got "), "{message}");
}
