use abi::Arch;
use probe_kernels::copies::Wait;
use probes::Case;

use crate::agree;
use crate::random::Random;

#[test]
fn asynchronous_copies_fill_with_zeros() {
    const BLOCKS: usize = 4;
    let mut random = Random::new(6);
    let mut cases = Vec::new();
    for (form, size) in [4, 8, 16, 16].into_iter().enumerate() {
        for wait in Wait::ALL {
            let (mut input, mut expected) = (Vec::new(), Vec::new());
            for _ in 0..BLOCKS {
                let heads: Vec<(u32, u32)> = (0..64)
                    .map(|_| {
                        (random.below(64), if random.below(3) == 0 { 17 } else { random.below(size + 1) })
                    })
                    .collect();
                let pieces = random.words(256);
                for (from, bytes) in &heads {
                    input.extend([*from, *bytes]);
                    let source = pieces[4 * *from as usize..][..4].iter().flat_map(|word| word.to_le_bytes());
                    let mut piece: Vec<u8> = source.take(size as usize).collect();
                    piece[(*bytes).min(size) as usize..].fill(0);
                    let rest = [0xdead_beefu32; 4].map(u32::to_le_bytes).concat();
                    piece.extend(&rest[size as usize..]);
                    expected.extend(piece.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)));
                }
                input.extend(pieces);
            }
            cases.push(Case {
                grid: BLOCKS as u32,
                block: 64,
                shared_bytes: 1040,
                input,
                output: vec![0; expected.len()],
                parameter: form as u32 + 4 * wait as u32,
                ..Case::new(format!("{size} bytes, form {form}, {wait:?}"), "probe_cp_async", Arch::Sm80)
                    .expect(expected)
            });
        }
    }
    agree(&cases);
}

#[test]
fn stages_and_named_barriers_hand_over() {
    const BLOCKS: usize = 4;
    let mut random = Random::new(7);
    let input = random.words(512 * BLOCKS);
    let mut sums = Vec::new();
    for block in input.chunks(512) {
        let mut sum = [0u32; 32];
        for round in block.chunks(32) {
            for (sum, word) in sum.iter_mut().zip(round) {
                *sum = sum.wrapping_add(*word);
            }
            sums.extend(sum);
        }
    }
    let opposite = input.chunks(64).flat_map(|round| round.iter().rev().copied()).collect();
    let new = |name, kernel, block, shared_bytes, expected| Case {
        grid: BLOCKS as u32,
        block,
        shared_bytes,
        input: input.clone(),
        output: vec![0; 512 * BLOCKS],
        ..Case::new(name, kernel, Arch::Sm80).expect(expected)
    };
    agree(&[
        new("a pipeline of mbarriers", "probe_pipeline", 64, 288, sums),
        new("named barriers", "probe_named_barriers", 128, 256, opposite),
    ]);
}
