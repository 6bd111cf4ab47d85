//! Tensor cores and TMA: a small matrix product of each kind.

use half::bf16;

use super::*;
use crate::sim::tensor_map::{Element, Fill, Tiled, encode};
use crate::tma::TensorMap;
use crate::wgmma::{Accumulate, Descriptor, KMajor, Swizzle};
use crate::{fence, matrix, mbarrier, mma, registers, tma, wgmma};

const K: usize = 256;

/// Small integers, exact in bf16, and so are their products' sums in f32.
fn operand(rows: usize, seed: usize) -> Vec<bf16> {
    (0..rows * K).map(|i| bf16::from_f32(((i * 7 + i / K * 13 + seed) % 9) as f32 - 4.0)).collect()
}

fn bytes(values: &[bf16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn product(a: &[bf16], b: &[bf16], n: usize) -> Vec<f32> {
    let row =
        |x: &[bf16], i: usize| -> Vec<f32> { x[i * K..][..K].iter().map(|value| value.to_f32()).collect() };
    let m = a.len() / K;
    (0..m * n)
        .map(|i| row(a, i / n).iter().zip(row(b, i % n)).map(|(a, b)| a * b).sum::<f32>())
        .map(|value| bf16::from_f32(value).to_f32())
        .collect()
}

fn map(address: u64, rows: usize, cols: usize, box_rows: u32) -> TensorMap {
    encode(&Tiled {
        element: Element::Bf16,
        address,
        dims: &[cols as u64, rows as u64],
        strides_bytes: &[2 * cols as u64],
        box_dims: &[64, box_rows],
        element_strides: &[1, 1],
        swizzle: Swizzle::Bytes128,
        fill: Fill::Zeros,
    })
    .unwrap()
}

/// What a kernel leaves out.
#[derive(Clone, Copy, PartialEq)]
enum Left {
    Nothing,
    WaitForMultiply,
    WaitForStage,
    RegisterFence,
    ProxyFence,
    LastWait,
}

const M: usize = 100;
const N: usize = 64;
const STAGE: u32 = 2 * 8192;

/// 64 × 64 of out per block: a producer warp loads 64 of k at a time into two stages, a warpgroup multiplies, and the
/// tile goes out through shared memory.
unsafe fn gemm(maps: [*const TensorMap; 3], left: Left) {
    // SAFETY: a block per 64 rows; shared memory holds two stages, the tile and the barriers.
    unsafe {
        let base = shared::base();
        let (tile, bars) = (base + 2 * STAGE, base + 2 * STAGE + 8192);
        let (full, empty) = (|stage: u32| bars + 8 * stage, |stage: u32| bars + 16 + 8 * stage);
        let row = (64 * thread::block_idx_x()) as i32;
        if tid() == 0 {
            for stage in 0..2 {
                mbarrier::init(full(stage), 1);
                mbarrier::init(empty(stage), 1);
            }
            mbarrier::fence_mbarrier_init();
        }
        thread::sync_threads();
        let steps = K as u32 / 64;
        if tid() >= 128 {
            registers::decrease::<24>();
            if tid() != 128 {
                return;
            }
            for step in 0..steps {
                let (stage, parity) = (step % 2, (step / 2) & 1);
                mbarrier::wait_parity(empty(stage), parity ^ 1);
                mbarrier::arrive_expect_tx(full(stage), STAGE);
                let at = base + stage * STAGE;
                tma::load(at, maps[0], [64 * step as i32, row], full(stage));
                tma::load(at + 8192, maps[1], [64 * step as i32, 0], full(stage));
            }
            return;
        }
        registers::increase::<240>();
        let mut sums = [0f32; 32];
        for step in 0..steps {
            let (stage, parity) = (step % 2, (step / 2) & 1);
            if left != Left::WaitForStage {
                mbarrier::wait_parity(full(stage), parity);
            }
            let at = base + stage * STAGE;
            let a = Descriptor::<KMajor>::new(at, Swizzle::Bytes128, 16, 1024);
            let b = Descriptor::<KMajor>::new(at + 8192, Swizzle::Bytes128, 16, 1024);
            if left != Left::RegisterFence {
                wgmma::fence();
            }
            for k in 0..4 {
                let accumulate = if step + k > 0 { Accumulate::Add } else { Accumulate::Overwrite };
                wgmma::ss::<bf16, _, _, _>(&mut sums, a.advance(32 * k), b.advance(32 * k), accumulate);
            }
            wgmma::commit_group();
            if left != Left::WaitForMultiply {
                wgmma::wait_group::<0>(&mut sums);
            }
            // The instruction is one for all warps of the group: one thread's wait speaks for all.
            if tid() == 0 {
                mbarrier::arrive(empty(stage));
            }
        }
        if left == Left::WaitForMultiply {
            wgmma::wait_group::<0>(&mut sums);
        }
        let (warp, lane) = (tid() / 32, tid() % 32);
        for j in 0..4 {
            let registers = [0, 1, 2, 3]
                .map(|m| crate::cvt::bf16x2_from_f32(sums[8 * j + 2 * m], sums[8 * j + 2 * m + 1]));
            let row = 16 * warp + (lane & 7) + 8 * (lane >> 3 & 1);
            let chunk = 2 * j as u32 + (lane >> 4);
            matrix::store_x4(tile + row * 128 + ((chunk ^ (row & 7)) << 4), registers);
        }
        if left != Left::ProxyFence {
            fence::proxy_async_shared();
        }
        crate::barrier::sync(1, 128);
        if tid() == 0 {
            tma::store(maps[2], [0, row], tile);
            tma::commit_group();
            if left != Left::LastWait {
                tma::wait_group_read::<0>();
            }
        }
    }
}

fn run_gemm(left: Left, seed: u64) -> Result<Vec<f32>, Report> {
    let (a, b) = (operand(M, 1), operand(N, 5));
    let mut memory = Memory::new();
    let places = [("a", &a, M), ("b", &b, N)].map(|(name, values, rows)| {
        let address = memory.allocate_from(name, &bytes(values));
        map(address, rows, K, 64)
    });
    let out = memory.allocate("out", 2 * M * N);
    let maps = [places[0], places[1], map(out, M, N, 64)];
    let launch = Launch::new("gemm", [2, 1, 1], [256, 1, 1]).shared_bytes(2 * STAGE + 8192 + 64).seed(seed);
    simulate(&mut memory, &launch, || unsafe {
        gemm([&raw const maps[0], &raw const maps[1], &raw const maps[2]], left)
    })?;
    let mut data = std::vec![0; 2 * M * N];
    memory.read(out, &mut data);
    let values = data.as_chunks().0.iter().map(|&bytes| bf16::from_le_bytes(bytes).to_f32()).collect();
    assert_eq!(values, product(&a, &b, N), "seed {seed}");
    Ok(values)
}

#[test]
fn a_warp_specialised_product() {
    for seed in 0..8 {
        run_gemm(Left::Nothing, seed).unwrap_or_else(|report| panic!("{report}"));
    }
}

#[test]
fn a_warp_specialised_product_that_forgets_something() {
    for (left, defect) in [
        (Left::WaitForStage, Defect::Uninitialised),
        (Left::RegisterFence, Defect::Asynchronous),
        (Left::ProxyFence, Defect::ProxyFence),
        (Left::LastWait, Defect::Asynchronous),
        (Left::WaitForMultiply, Defect::Race),
    ] {
        let report = run_gemm(left, 1).unwrap_err();
        let alike =
            report.defect == defect || (defect == Defect::Uninitialised && report.defect == Defect::Race);
        assert!(alike, "{report}");
    }
}

/// A warp's 16 × 8 with operands from `ldmatrix`, and the transposed load.
#[test]
fn a_product_of_a_warp() {
    let (a, b) = (operand(16, 3), operand(8, 2));
    for seed in 0..10 {
        let mut memory = Memory::new();
        let places = [&a, &b].map(|values| memory.allocate_from("operand", &bytes(values)));
        let out = memory.allocate("out", 4 * 128);
        let launch = launch(1, 32).arch(Arch::Sm80).seed(seed).shared_bytes(24 * 32);
        simulate(&mut memory, &launch, || unsafe {
            let [a, b] = places.map(|place| place as *const bf16);
            let (base, lane) = (shared::base(), tid());
            let mut sums = [0f32; 4];
            for step in 0..K as u32 / 16 {
                // Rows of 32 bytes: 16 of a, then 8 of b.
                for piece in [lane, lane + 32] {
                    let (row, half) = (piece / 2, piece % 2);
                    let from =
                        if row < 16 { a.add(row as usize * K) } else { b.add((row as usize - 16) * K) };
                    if row < 24 {
                        let value = global::load_x4(from.add((16 * step + 8 * half) as usize));
                        shared::store_u32x4(base + row * 32 + half * 16, value);
                    }
                }
                warp::sync_warp(warp::FULL_MASK);
                let x = matrix::load_x4(base + (lane & 15) * 32 + (lane >> 4) * 16);
                let y = matrix::load_x2(base + (16 + (lane & 7)) * 32 + (lane >> 3 & 1) * 16);
                sums = mma::m16n8k16_f32_bf16(x, y, sums);
                warp::sync_warp(warp::FULL_MASK);
            }
            let (g, t) = (lane / 4, lane % 4);
            for (i, sum) in sums.into_iter().enumerate() {
                let (row, column) = (g as usize + 8 * (i / 2), 2 * t as usize + i % 2);
                global::store((out as *mut f32).add(row * 8 + column), sum);
            }
        })
        .unwrap();
        let mut data = std::vec![0; 512];
        memory.read(out, &mut data);
        let got: Vec<f32> = data
            .as_chunks()
            .0
            .iter()
            .map(|&bytes| bf16::from_f32(f32::from_le_bytes(bytes)).to_f32())
            .collect();
        assert_eq!(got, product(&a, &b, 8));
    }
}
