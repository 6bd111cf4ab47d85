//! `mma.sync`, `ldmatrix` and `stmatrix`. Blocks of 32 threads.

use cuda_std::{kernel, matrix, mma, shared, thread};

use crate::{load, store};

/// Forms of `mma.sync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum Mma {
    Bf16,
    F16,
    F16ToF16,
    Tf32,
    S8,
}

impl Mma {
    /// Every form.
    pub const ALL: [Mma; 5] = [Mma::Bf16, Mma::F16, Mma::F16ToF16, Mma::Tf32, Mma::S8];
}

/// Input of a block: for each lane four words of a, two of b, four of c. Results: four words for each lane. Parameter:
/// the [`Mma`].
#[kernel(max_threads = 32)]
pub unsafe fn probe_mma(input: *const u32, output: *mut u32, _maps: *const u64, parameter: u32) {
    let lane = thread::lane();
    // SAFETY: the buffers are as documented, and all lanes take part.
    unsafe {
        let word = |i| load(input, 320, 10 * lane + i);
        let a = [word(0), word(1), word(2), word(3)];
        let b = [word(4), word(5)];
        let c = [word(6), word(7), word(8), word(9)];
        let d = match parameter {
            0 => mma::m16n8k16_f32_bf16(a, b, c.map(f32::from_bits)).map(f32::to_bits),
            1 => mma::m16n8k16_f32_f16(a, b, c.map(f32::from_bits)).map(f32::to_bits),
            2 => {
                let [d0, d1] = mma::m16n8k16_f16_f16(a, b, [c[0], c[1]]);
                [d0, d1, 0, 0]
            }
            3 => mma::m16n8k8_f32_tf32(a, b, c.map(f32::from_bits)).map(f32::to_bits),
            _ => mma::m16n8k32_s32_s8(a, b, c.map(|x| x as i32)).map(|x| x as u32),
        };
        let mut i = 0;
        while i < 4 {
            store(output, 128, 4 * lane + i, d[i as usize]);
            i += 1;
        }
    }
}

/// Input of a block: 32 rows of four words, then for each lane the number of the row whose address it gives. Results:
/// four words for each lane. Parameter: matrices (1, 2, 4), plus 8 for transposed. Shared memory: 512 bytes.
#[kernel(max_threads = 32)]
pub unsafe fn probe_ldmatrix(input: *const u32, output: *mut u32, _maps: *const u64, parameter: u32) {
    let lane = thread::lane();
    // SAFETY: the buffers are as documented; lanes write rows of their own, and all take part.
    unsafe {
        let row = [0, 1, 2, 3].map(|i| load(input, 160, 4 * lane + i));
        shared::store_u32x4(shared::base() + 16 * lane, row);
        thread::sync_threads();
        let address = shared::base() + 16 * load(input, 160, 128 + lane);
        let pair = |[a, b]: [u32; 2]| [a, b, 0, 0];
        let result = match parameter {
            1 => [matrix::load_x1(address)[0], 0, 0, 0],
            2 => pair(matrix::load_x2(address)),
            4 => matrix::load_x4(address),
            9 => [matrix::load_x1_trans(address)[0], 0, 0, 0],
            10 => pair(matrix::load_x2_trans(address)),
            _ => matrix::load_x4_trans(address),
        };
        let mut i = 0;
        while i < 4 {
            store(output, 128, 4 * lane + i, result[i as usize]);
            i += 1;
        }
    }
}

/// Input of a block: for each lane four registers, then the number of the row whose address it gives. Results: 32 rows
/// of four words, zero where no matrix went. Parameter and shared memory as for [`probe_ldmatrix`].
#[cfg(not(lacks_stmatrix))]
#[kernel(max_threads = 32)]
pub unsafe fn probe_stmatrix(input: *const u32, output: *mut u32, _maps: *const u64, parameter: u32) {
    let lane = thread::lane();
    // SAFETY: the buffers are as documented; row numbers are a permutation, and all lanes take part.
    unsafe {
        shared::store_u32x4(shared::base() + 16 * lane, [0; 4]);
        thread::sync_threads();
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| load(input, 160, 4 * lane + i));
        let address = shared::base() + 16 * load(input, 160, 128 + lane);
        match parameter {
            1 => matrix::store_x1(address, [a]),
            2 => matrix::store_x2(address, [a, b]),
            4 => matrix::store_x4(address, [a, b, c, d]),
            9 => matrix::store_x1_trans(address, [a]),
            10 => matrix::store_x2_trans(address, [a, b]),
            _ => matrix::store_x4_trans(address, [a, b, c, d]),
        }
        thread::sync_threads();
        let row = shared::load_u32x4(shared::base() + 16 * lane);
        let mut i = 0;
        while i < 4 {
            store(output, 128, 4 * lane + i, row[i as usize]);
            i += 1;
        }
    }
}
