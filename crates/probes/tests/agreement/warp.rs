use abi::Arch;
use probe_kernels::warp::Shuffle;
use probes::{Case, same_bits};

use crate::agree;
use crate::random::Random;

const BLOCKS: u32 = 64;

/// What lanes outside the mask leave in the output.
const UNTOUCHED: u32 = 0x5a5a_5a5a;

/// The lane that a lane reads, by the manual: the lane itself where there is none.
fn source(form: Shuffle, lane: u32, argument: u32) -> u32 {
    let within =
        |width: u32, other: Option<u32>| other.filter(|other| other / width == lane / width).unwrap_or(lane);
    match form {
        Shuffle::Xor => lane ^ argument,
        Shuffle::Index => argument % 32,
        Shuffle::Up => within(32, lane.checked_sub(argument)),
        Shuffle::Down => within(32, Some(lane + argument)),
        // Earlier groups are read, later ones not.
        Shuffle::XorWithin8 => Some(lane ^ argument).filter(|other| other / 8 <= lane / 8).unwrap_or(lane),
        Shuffle::IndexWithin4 => lane / 4 * 4 + argument % 4,
        Shuffle::UpWithin16 => within(16, lane.checked_sub(argument)),
        Shuffle::DownWithin8 => within(8, Some(lane + argument)),
    }
}

#[test]
fn shuffles() {
    let mut random = Random::new(1);
    let mut cases = Vec::new();
    for form in Shuffle::ALL {
        let (mut input, mut expected) = (Vec::new(), Vec::new());
        for block in 0..BLOCKS {
            let values = random.words(32);
            let arguments: Vec<u32> = match form {
                // One number for all, else pairs read each other's but not the same.
                Shuffle::Xor | Shuffle::XorWithin8 => vec![random.below(32); 32],
                _ => (0..32).map(|_| random.below(32)).collect(),
            };
            // Lanes read only lanes of the mask: take away lanes as long as that holds.
            let mut mask = u32::MAX;
            if block % 2 == 1 {
                mask = random.word() | 1;
                loop {
                    let strays = |lane: &u32| mask >> source(form, *lane, arguments[*lane as usize]) & 1 == 0;
                    let Some(stray) = (0..32).filter(|lane| mask >> lane & 1 == 1).find(strays) else {
                        break;
                    };
                    mask &= !(1 << stray);
                }
                if mask == 0 {
                    mask = u32::MAX;
                }
            }
            input.extend([form as u32, mask].iter().chain(&values).chain(&arguments));
            expected.extend((0..32u32).map(|lane| match mask >> lane & 1 {
                1 => values[source(form, lane, arguments[lane as usize]) as usize],
                _ => UNTOUCHED,
            }));
        }
        let case = Case::new(format!("{form:?}"), "probe_shuffle", Arch::Sm61);
        let output = vec![UNTOUCHED; expected.len()];
        cases.push(Case { grid: BLOCKS, input, output, ..case.expect(expected) });
    }
    agree(&cases);
}

#[test]
fn votes() {
    let mut random = Random::new(2);
    let (mut input, mut expected) = (Vec::new(), Vec::new());
    for block in 0..BLOCKS {
        let mask = if block % 4 == 0 { u32::MAX } else { random.word() | 1 << random.below(32) };
        let predicates = match block % 3 {
            0 => random.word(),
            1 => 0,
            _ => u32::MAX,
        };
        input.push(mask);
        input.extend((0..32).map(|lane| predicates >> lane & 1 | random.word() << 1));
        let ballot = predicates & mask;
        for value in [ballot, u32::from(ballot != 0), u32::from(ballot == mask)] {
            expected.extend((0..32).map(|lane| if mask >> lane & 1 == 1 { value } else { UNTOUCHED }));
        }
    }
    let case = Case::new("votes", "probe_vote", Arch::Sm61);
    let output = vec![UNTOUCHED; expected.len()];
    agree(&[Case { grid: BLOCKS, input, output, ..case.expect(expected) }]);
}

#[test]
fn equal_values_and_reductions() {
    let mut random = Random::new(3);
    let (mut input, mut expected) = (Vec::new(), Vec::new());
    for block in 0..BLOCKS {
        let mask = if block % 4 == 0 { u32::MAX } else { random.word() | 1 << random.below(32) };
        let few = random.words(3);
        let values: Vec<u32> =
            (0..32).map(|_| if block % 2 == 0 { random.word() } else { random.pick(&few) }).collect();
        let lanes: Vec<usize> = (0..32).filter(|lane| mask >> lane & 1 == 1).collect();
        let of = || lanes.iter().map(|&lane| values[lane]);
        let signed = || of().map(|value| value as i32);
        let reductions = [
            of().fold(0, u32::wrapping_add),
            of().min().expect("a lane"),
            of().max().expect("a lane"),
            signed().min().expect("a lane") as u32,
            signed().max().expect("a lane") as u32,
            of().fold(u32::MAX, |a, b| a & b),
            of().fold(0, |a, b| a | b),
            of().fold(0, |a, b| a ^ b),
        ];
        input.push(mask);
        input.extend(&values);
        let equal = |lane: usize| {
            lanes.iter().filter(|&&other| values[other] == values[lane]).fold(0, |m, l| m | 1 << l)
        };
        let present = |lane: usize| mask >> lane & 1 == 1;
        expected.extend((0..32).map(|lane| if present(lane) { equal(lane) } else { UNTOUCHED }));
        for value in reductions {
            expected.extend((0..32).map(|lane| if present(lane) { value } else { UNTOUCHED }));
        }
    }
    let case = Case::new("match and redux", "probe_redux", Arch::Sm80);
    let output = vec![UNTOUCHED; expected.len()];
    agree(&[Case { grid: BLOCKS, input, output, ..case.expect(expected) }]);
}

/// Which lane is elected is the hardware's choice.
#[test]
fn one_lane_is_elected() {
    let mut random = Random::new(4);
    let masks: Vec<u32> =
        (0..BLOCKS).map(|i| if i == 0 { u32::MAX } else { random.word() | 1 << random.below(32) }).collect();
    let input = masks.clone();
    let case = Case::new("elect", "probe_elect", Arch::Sm90a).check(move |_, got| {
        for (mask, lanes) in masks.iter().zip(got.chunks(32)) {
            let untouched: Vec<u32> =
                (0..32).map(|lane| if mask >> lane & 1 == 1 { 0 } else { UNTOUCHED }).collect();
            let chosen: Vec<usize> = (0..32).filter(|&lane| lanes[lane] == 1).collect();
            let [lane] = chosen[..] else { return Err(format!("of {mask:#x} lanes {chosen:?} are elected")) };
            let mut expected = untouched;
            expected[lane] = 1;
            if mask >> lane & 1 == 0 {
                return Err(format!("lane {lane} is elected, which is not in {mask:#x}"));
            }
            same_bits(&expected, lanes)?;
        }
        Ok(())
    });
    agree(&[Case { grid: BLOCKS, input, output: vec![UNTOUCHED; 32 * BLOCKS as usize], ..case }]);
}
