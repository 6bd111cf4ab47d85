//! Known figures to beat whose operators are still to come: listed, so that the peers are timed at them. A row moves to
//! the operator's `cases.rs` when there is one.

use serde_json::json;

use super::{Bencher, Work};

/// Bytes of a bf16 or f16 number.
const HALF: u64 = 2;

pub fn list(bencher: &mut Bencher) {
    let size: u64 = 8192;
    bencher.announce(
        "matmul_fp8",
        "anchor 8192",
        Work {
            dtype: "f8e4m3",
            shape: json!({ "m": size, "n": size, "k": size }),
            bytes: 2 * size * size + HALF * size * size,
            flops: 2 * size.pow(3),
        },
    );
    // Weights of 4 bits; a scale and a zero point for each 128 along k.
    let group: u64 = 128;
    for (m, n, k) in
        [(1, 4096, 4096), (16, 4096, 4096), (1, 28672, 8192), (16, 28672, 8192), (64, 28672, 8192_u64)]
    {
        let weights = n * k / 2 + 2 * HALF * n * k / group;
        bencher.announce(
            "matmul_i4",
            &format!("anchor {m}x{n}x{k}"),
            Work {
                dtype: "bf16",
                shape: json!({ "m": m, "n": n, "k": k, "group": group }),
                bytes: weights + HALF * (m * k + m * n),
                flops: 2 * m * n * k,
            },
        );
    }
}
