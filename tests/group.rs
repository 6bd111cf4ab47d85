//! Sums of groups whose ranks access each other's memory: on simulated cards, and on the real ones of this machine if
//! there are several.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use half::{bf16, f16};
use proptest::prelude::*;
use testkit::buffer::Guarded;
use testkit::simulator::Card;
use testkit::strategies::Rng;
use warpforge::group::{Communicator, Group, PeerOptions};
use warpforge::{Arch, DType, Device, Error, Stream, Tensor};

/// What is summed.
trait Sums: testkit::Element + warpforge::Element + PartialEq {
    fn of(value: f32) -> Self;
    fn value(self) -> f32;
}

impl Sums for f32 {
    fn of(value: f32) -> Self {
        value
    }
    fn value(self) -> f32 {
        self
    }
}

macro_rules! halves {
    ($($type:ident),*) => {$(
        impl Sums for $type {
            fn of(value: f32) -> Self {
                $type::from_f32(value)
            }
            fn value(self) -> f32 {
                self.to_f32()
            }
        }
    )*};
}
halves!(bf16, f16);

/// What a sum must be, to the bit.
fn sum<T: Sums>(values: impl Iterator<Item = T>) -> T {
    T::of(values.map(T::value).reduce(|sum, value| sum + value).expect("a rank"))
}

/// Which kernels a group takes.
#[derive(Clone, Copy, Debug)]
enum Kernels {
    OneShot,
    TwoShot,
    /// One-shot up to so many bytes.
    Both(usize),
}

#[derive(Clone, Debug)]
struct Case {
    size: usize,
    kernels: Kernels,
    slot_pieces: u32,
    max_blocks: u32,
    floor: Arch,
    /// A call each: pieces, elements above or below them, elements from an aligned address, type.
    calls: Vec<(usize, usize, usize, DType)>,
    seed: u64,
}

impl Case {
    fn options(&self) -> PeerOptions {
        let mut options = PeerOptions::default();
        options.timeout = Duration::from_secs(60);
        options.slot_bytes = 16 * self.slot_pieces;
        options.max_blocks = self.max_blocks;
        let one_shot = match self.kernels {
            Kernels::OneShot => usize::MAX,
            Kernels::TwoShot => 0,
            Kernels::Both(bytes) => bytes,
        };
        (options.one_shot_bytes, options.two_shot_bytes) = (Some(one_shot), Some(usize::MAX));
        options
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let kernels =
        prop_oneof![Just(Kernels::OneShot), Just(Kernels::TwoShot), (0..2000usize).prop_map(Kernels::Both)];
    // Of one piece, less than a block has threads, about as many, more.
    let slots = prop_oneof![Just(1u32), 2..9u32, Just(511), Just(513), Just(2000)];
    let calls = move |slot: usize| {
        // Up to a few phases of each block.
        let pieces = prop_oneof![0..4usize, slot..slot + 3, 0..(3 * slot).min(1500)];
        let dtype = proptest::sample::select(vec![DType::F32, DType::F16, DType::BF16]);
        proptest::collection::vec((pieces, 0..8usize, 0..9usize, dtype), 1..5)
    };
    let floor = proptest::sample::select(&Arch::ALL[..]);
    let size = prop_oneof![3 => 1..5usize, 1 => 5..9usize];
    (size, kernels, slots, 1..4u32, floor, any::<u64>()).prop_flat_map(
        move |(size, kernels, slot_pieces, max_blocks, floor, seed)| {
            calls(slot_pieces as usize).prop_map(move |calls| Case {
                size,
                kernels,
                slot_pieces,
                max_blocks,
                floor,
                calls,
                seed,
            })
        },
    )
}

fn simulated(size: usize, floor: Arch) -> (Vec<Device>, Vec<Arc<Card>>) {
    let cards: Vec<Arc<Card>> = (0..size).map(|_| Arc::new(Card::new(floor))).collect();
    let device = |card: &Arc<Card>| Device::simulated(card.clone()).expect("a floor's own card");
    (cards.iter().map(device).collect(), cards)
}

/// The groups of real cards of this machine: the first two, and all of them.
fn real() -> Vec<Vec<Device>> {
    let count = Device::cuda_count().unwrap_or(0).min(8);
    match count {
        0 => testkit::gpu::skip("sums over peers run in the simulator only: there is no card"),
        1 => testkit::gpu::skip_optional("sums over peers run in the simulator only: there is one card"),
        _ => {}
    }
    if count < 2 {
        return Vec::new();
    }
    let cards: Vec<Device> = (0..count).filter_map(|ordinal| Device::cuda(ordinal).ok()).collect();
    let two = cards[..2].to_vec();
    if count > 2 { vec![two, cards] } else { vec![two] }
}

/// Values whose sums round, overflow and cancel.
fn values<T: Sums>(rank: usize, len: usize, seed: u64) -> Vec<T> {
    let mut random = Rng::new(seed ^ (rank as u64) << 40 ^ len as u64);
    let value = |random: &mut Rng| {
        let bits = random.next_u64();
        let mantissa = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        T::of(match bits % 16 {
            0 => 0.0,
            1 => -0.0,
            2 => 6e4 * mantissa,
            3 => 1e-6 * mantissa,
            _ => mantissa,
        })
    };
    (0..len).map(|_| value(&mut random)).collect()
}

/// One call of one rank, with guard bands around x.
fn call<T: Sums>(
    rank: &Communicator,
    stream: &Stream,
    (len, offset): (usize, usize),
    seed: u64,
) -> Result<Vec<T>, Error> {
    let before = Guarded::new(&values::<T>(rank.rank(), len, seed), offset);
    let padded = before.as_padded();
    let mut held = Tensor::from_slice(stream, &[padded.len()], padded)?;
    let range = before.payload_range();
    rank.all_reduce(stream, held.view_mut().slice(0, range.clone())?)?;
    rank.synchronize(stream)?;
    let after = Guarded::from_padded(held.to_vec::<T>(stream)?, range);
    after.check_guards().expect("guard bands");
    Ok(after.payload().to_vec())
}

fn check_call<T: Sums>(
    rank: &Communicator,
    stream: &Stream,
    at: (usize, usize),
    seed: u64,
) -> Result<(), Error> {
    let got = call::<T>(rank, stream, at, seed)?;
    let all: Vec<Vec<T>> = (0..rank.size()).map(|rank| values(rank, at.0, seed)).collect();
    for (index, got) in got.into_iter().enumerate() {
        let expected = sum(all.iter().map(|values| values[index]));
        assert_eq!(got.bits(), expected.bits(), "element {index} at rank {}", rank.rank());
    }
    Ok(())
}

fn check(case: &Case, devices: &[Device]) {
    let group = Group::over_peers(devices, case.options()).expect("a group");
    let results = group.run(|rank| {
        let stream = rank.device().stream()?;
        for (call, &(pieces, more, offset, dtype)) in case.calls.iter().enumerate() {
            let at = (pieces * 16 / dtype.bytes() + more, offset);
            let seed = case.seed ^ call as u64;
            match dtype {
                DType::F16 => check_call::<f16>(rank, &stream, at, seed)?,
                DType::BF16 => check_call::<bf16>(rank, &stream, at, seed)?,
                _ => check_call::<f32>(rank, &stream, at, seed)?,
            }
        }
        Ok::<(), Error>(())
    });
    for result in results {
        result.expect("a rank's calls");
    }
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(48))]

    #[test]
    fn sums_over_peers(case in cases()) {
        check(&case, &simulated(case.size, case.floor).0);
    }

    #[test]
    fn sums_over_peers_on_cards(case in cases()) {
        let _alone = CARDS.lock();
        for devices in real() {
            check(&Case { size: devices.len(), ..case.clone() }, &devices);
        }
    }
}

/// Ranks of a simulated group with small slots.
fn group(size: usize, timeout: Duration) -> Group {
    let mut options = PeerOptions::default();
    (options.slot_bytes, options.timeout) = (256, timeout);
    Group::over_peers(&simulated(size, Arch::Sm90a).0, options).expect("a group")
}

/// One call with `len` ones.
fn ones(rank: &Communicator, len: usize) -> Result<Vec<f32>, Error> {
    let stream = rank.device().stream()?;
    let mut x = Tensor::from_slice(&stream, &[len], &vec![1.0; len])?;
    rank.all_reduce(&stream, x.view_mut())?;
    x.to_vec(&stream)
}

#[test]
fn a_rank_that_never_comes_is_an_error_at_the_others() {
    let group = group(3, Duration::from_millis(300));
    let results = group.run(|rank| match rank.rank() {
        1 => Ok(vec![]),
        _ => ones(rank, 5),
    });
    for (rank, result) in results.into_iter().enumerate().filter(|&(rank, _)| rank != 1) {
        let message = format!("all_reduce: rank {rank} of 3: rank 1 did not come within 300ms");
        assert_eq!(result.unwrap_err().to_string(), message);
        // So it stays, without another wait.
        let rank = &group.ranks()[rank];
        assert!(matches!(ones(rank, 5), Err(Error::Group { .. })));
        let stream = rank.device().stream().expect("a stream");
        assert_eq!(rank.synchronize(&stream).unwrap_err().to_string(), message);
    }
}

#[test]
fn a_rank_that_fails_ends_the_others_next_calls() {
    let group = group(2, Duration::from_millis(300));
    let results = group.run(|rank| {
        ones(rank, 100)?;
        if rank.rank() == 0 {
            return Err(Error::invalid("test", "rank", "another one", "0"));
        }
        // Until the other one has said so, or does not come.
        ones(rank, 100)
    });
    assert!(matches!(results[1], Err(Error::Group { rank: 1, .. })), "{:?}", results[1]);
}

/// On a card they would wait for each other, or sum what does not belong together.
#[test]
fn ranks_of_different_lengths_are_found_by_the_simulator() {
    let group = group(2, Duration::from_secs(60));
    let results = group.run(|rank| ones(rank, if rank.rank() == 0 { 5000 } else { 1 }));
    for result in results {
        let message = result.unwrap_err().to_string();
        assert!(
            message.contains("rank 1 launches Shape { entry: \"all_reduce_f32_one_shot__ranks2__sm61\""),
            "{message}"
        );
    }
}

/// A sum for each of several streams, one after the other; and what is not a sum goes the other way.
#[test]
fn streams_and_other_collectives() {
    let group = group(2, Duration::from_secs(60));
    let results = group.run(|rank| {
        let streams = [rank.device().stream()?, rank.device().stream()?];
        let mut x = Tensor::from_slice(&streams[0], &[33], &[1.0f32; 33])?;
        for call in 0..5 {
            let stream = &streams[call % 2];
            stream.wait_for(&streams[(call + 1) % 2])?;
            rank.all_reduce(stream, x.view_mut())?;
        }
        rank.broadcast(&streams[0], x.view_mut(), 1)?;
        // Nothing to sum.
        rank.all_reduce(&streams[0], x.view_mut().slice(0, 0..0)?)?;
        x.to_vec::<f32>(&streams[0])
    });
    for result in results {
        assert_eq!(result.expect("a rank"), [32.0; 33]);
    }
}

/// Held while a group's kernels wait for each other on real cards: those of several groups, none of which is whole on
/// the cards, would wait for ever.
static CARDS: Mutex<()> = Mutex::new(());

/// A launch that is recorded counts its phases each time that it runs: replays, and calls between them.
#[test]
fn recorded_sums() {
    let _alone = CARDS.lock();
    for devices in real() {
        let group = Group::over_peers(&devices, PeerOptions::default()).expect("a group");
        let size = devices.len() as f32;
        let results = group.run(|rank| {
            let stream = rank.device().stream()?;
            let mut x = Tensor::from_slice(&stream, &[3001], &[1.0f32; 3001])?;
            rank.all_reduce(&stream, x.view_mut())?;
            rank.synchronize(&stream)?;
            let graph =
                stream.capture(|stream| (0..3).try_for_each(|_| rank.all_reduce(stream, x.view_mut())))?;
            for _ in 0..2 {
                // SAFETY: x and the group are there until the stream has been waited for.
                unsafe { graph.launch(&stream)? };
            }
            rank.all_reduce(&stream, x.view_mut())?;
            rank.synchronize(&stream)?;
            x.to_vec::<f32>(&stream)
        });
        for result in results {
            assert_eq!(result.expect("a rank"), vec![size.powi(8); 3001]);
        }
    }
}

/// Sums as large as a group's real slots take several times.
#[test]
fn large_sums_on_cards() {
    let _alone = CARDS.lock();
    for devices in real() {
        for one_shot_bytes in [0, usize::MAX] {
            let mut options = PeerOptions::default();
            (options.one_shot_bytes, options.two_shot_bytes) = (Some(one_shot_bytes), Some(usize::MAX));
            let group = Group::over_peers(&devices, options).expect("a group");
            let results = group.run(|rank| {
                let stream = rank.device().stream()?;
                check_call::<bf16>(rank, &stream, (12_345_677, 0), 1)?;
                check_call::<bf16>(rank, &stream, (12_345_677, 1), 2)
            });
            results.into_iter().for_each(|result| result.expect("a rank"));
        }
    }
}
