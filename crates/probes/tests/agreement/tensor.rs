use abi::Arch;
use cuda_std::sim::fragment::{Transpose, load_matrices, store_matrices};
use cuda_std::sim::tensor_core::{MmaKind, mma};
use half::{bf16, f16};
use probe_kernels::tensor::Mma;
use probes::{Case, same_bits};

use crate::agree;
use crate::random::Random;

/// Kinds of operands.
#[derive(Clone, Copy, Debug)]
enum Values {
    /// Small integers: every sum is exact.
    Integers,
    /// Of like size.
    Near,
    /// Of very different size, so that terms are cut off.
    Far,
    /// Any bits: infinite, NaN, subnormal.
    Bits,
}

fn value(values: Values, random: &mut Random) -> f32 {
    match values {
        Values::Integers => random.range(-16, 16) as f32,
        Values::Near => random.float(-2, 2),
        Values::Far => random.float(-13, 10),
        Values::Bits => f32::from_bits(random.word()),
    }
}

/// A register of elements of a or b.
fn operand(kind: Mma, values: Values, random: &mut Random) -> u32 {
    let mut half = |encode: fn(f32) -> u16| match values {
        Values::Bits => random.word(),
        _ => [0, 16]
            .into_iter()
            .fold(0, |word, shift| word | u32::from(encode(value(values, random))) << shift),
    };
    match kind {
        Mma::Bf16 => half(|x| bf16::from_f32(x).to_bits()),
        Mma::F16 | Mma::F16ToF16 => half(|x| f16::from_f32(x).to_bits()),
        Mma::Tf32 => value(values, random).to_bits(),
        Mma::S8 => random.word(),
    }
}

fn accumulator(kind: Mma, values: Values, random: &mut Random) -> u32 {
    match (kind, values) {
        (Mma::S8, _) | (_, Values::Bits) => random.word(),
        (Mma::F16ToF16, _) => operand(kind, values, random),
        _ => value(values, random).to_bits(),
    }
}

#[test]
fn every_mma() {
    let mut cases = Vec::new();
    for (kind, model) in
        Mma::ALL.into_iter().zip([MmaKind::Bf16, MmaKind::F16, MmaKind::F16ToF16, MmaKind::Tf32, MmaKind::S8])
    {
        for values in [Values::Integers, Values::Near, Values::Far, Values::Bits] {
            const BLOCKS: usize = 16;
            let mut random = Random::new(kind as u64 * 4 + values as u64);
            let mut input = Vec::new();
            for _ in 0..32 * BLOCKS {
                input.extend((0..6).map(|_| operand(kind, values, &mut random)));
                let last = if kind == Mma::F16ToF16 { 2 } else { 4 };
                input.extend(
                    (0..4).map(|i| if i < last { accumulator(kind, values, &mut random) } else { 0 }),
                );
            }
            let lanes = input.clone();
            let case = Case {
                grid: BLOCKS as u32,
                input,
                output: vec![0; 128 * BLOCKS],
                parameter: kind as u32,
                ..Case::new(format!("{kind:?} of {values:?}"), "probe_mma", Arch::Sm80)
            };
            cases.push(case.check(move |generation, got| {
                let mut expected = Vec::new();
                for block in lanes.chunks(320) {
                    fn part<const N: usize>(block: &[u32], first: usize) -> [[u32; N]; 32] {
                        core::array::from_fn(|lane| core::array::from_fn(|i| block[10 * lane + first + i]))
                    }
                    let d = mma(model, generation, &part(block, 0), &part(block, 4), &part(block, 6));
                    expected.extend(d.as_flattened());
                }
                same_bits(&expected, got)
            }));
        }
    }
    agree(&cases);
}

#[test]
fn matrices() {
    let mut random = Random::new(5);
    let mut cases = Vec::new();
    for (transpose, flag) in [(Transpose::No, 0), (Transpose::Yes, 8)] {
        for matrices in [1, 2, 4] {
            let name = format!("{matrices} matrices, transposed: {transpose:?}");
            let words: [[u32; 4]; 32] = core::array::from_fn(|_| core::array::from_fn(|_| random.word()));
            let order = random.permutation(32);
            let input: Vec<u32> = words.as_flattened().iter().chain(&order).copied().collect();
            let parameter = matrices as u32 + flag;
            let new = |kernel, floor, expected: Vec<u32>| Case {
                shared_bytes: 512,
                input: input.clone(),
                output: vec![0; 128],
                parameter,
                ..Case::new(name.clone(), kernel, floor).expect(expected)
            };
            let rows: Vec<[u32; 4]> = order[..8 * matrices].iter().map(|&row| words[row as usize]).collect();
            let loaded = load_matrices(&rows, transpose).into_flattened_vec();
            cases.push(new("probe_ldmatrix", Arch::Sm80, loaded));
            let mut stored = [[0; 4]; 32];
            for (row, words) in
                order.iter().zip(store_matrices(&words, matrices, transpose)).take(8 * matrices)
            {
                stored[*row as usize] = words;
            }
            cases.push(new("probe_stmatrix", Arch::Sm90a, stored.into_flattened_vec()));
        }
    }
    agree(&cases);
}

trait IntoFlattenedVec {
    fn into_flattened_vec(self) -> Vec<u32>;
}

impl IntoFlattenedVec for [[u32; 4]; 32] {
    fn into_flattened_vec(self) -> Vec<u32> {
        self.as_flattened().to_vec()
    }
}
