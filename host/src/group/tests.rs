//! Groups of the CPU: what they compute, and that no rank waits for ever for one that does not come.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::tensor::Tensor;

const ALL: [DType; 7] =
    [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::I8, DType::I32, DType::U32];
/// Nobody may wait for this long.
const LONG: Duration = Duration::from_secs(30);
/// A busy machine's.
const SLACK: Duration = Duration::from_secs(10);

fn group(ranks: usize, timeout: Duration) -> Group {
    let devices: Vec<Device> = std::iter::repeat_with(Device::cpu).take(ranks).collect();
    Group::with_timeout(&devices, timeout).expect("CPUs make a group")
}

fn tensor(stream: &Stream, dtype: DType, bytes: &[u8]) -> Result<Tensor, Error> {
    let mut tensor = Tensor::zeros(stream, &[bytes.len() / dtype.bytes()], dtype)?;
    tensor.view_mut().write_bytes(stream, bytes)?;
    Ok(tensor)
}

fn bytes(stream: &Stream, tensor: &Tensor) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; tensor.view().len() * tensor.dtype().bytes()];
    stream.queue().download(tensor.view().address(), &mut bytes)?;
    Ok(bytes)
}

fn to_bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    let each = |value: &f32| match dtype {
        DType::F16 => f16::from_f32(*value).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(*value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    };
    values.iter().flat_map(each).collect()
}

/// As stored.
fn rounded(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// The sum over ranks, in f32 and their order, rounded once.
fn reference(dtype: DType, ranks: &[Vec<f32>]) -> Vec<u8> {
    let sums: Vec<f32> = (0..ranks[0].len())
        .map(|index| {
            let mut sum = rounded(dtype, ranks[0][index]);
            for rank in &ranks[1..] {
                sum += rounded(dtype, rank[index]);
            }
            sum
        })
        .collect();
    to_bytes(dtype, &sums)
}

fn floats() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => -4.0f32..4.0,
        1 => -60000.0f32..60000.0,
        1 => -1e-5f32..1e-5,
        1 => Just(0.0f32),
        1 => Just(-0.0f32),
        1 => Just(f32::INFINITY),
    ]
}

/// So many ranks with so many values each; their number is a multiple of the ranks'.
fn values(multiple: bool) -> impl Strategy<Value = Vec<Vec<f32>>> {
    (1usize..=8, 0usize..=300).prop_flat_map(move |(ranks, len)| {
        let len = if multiple { len / ranks * ranks } else { len };
        proptest::collection::vec(proptest::collection::vec(floats(), len), ranks)
    })
}

fn sums() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)]
}

/// So many ranks with so many bytes each, of a type.
fn contents() -> impl Strategy<Value = (DType, Vec<Vec<u8>>)> {
    (1usize..=8, 0usize..=300, proptest::sample::select(&ALL[..])).prop_flat_map(|(ranks, len, dtype)| {
        let rank = proptest::collection::vec(any::<u8>(), len * dtype.bytes());
        (Just(dtype), proptest::collection::vec(rank, ranks))
    })
}

/// What each rank has in the end; all have come through.
fn results(
    ranks: usize,
    work: impl Fn(&Communicator, &Stream) -> Result<Vec<u8>, Error> + Sync,
) -> Vec<Vec<u8>> {
    let run = |rank: &Communicator| {
        let stream = rank.device().stream()?;
        let result = work(rank, &stream)?;
        rank.synchronize(&stream)?;
        Ok::<_, Error>(result)
    };
    group(ranks, LONG).run(run).into_iter().map(|result| result.expect("all have come")).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn all_reduce_is_the_sum_with_the_same_bits_everywhere(dtype in sums(), data in values(false)) {
        let expected = reference(dtype, &data);
        let found = results(data.len(), |rank, stream| {
            let mut x = tensor(stream, dtype, &to_bytes(dtype, &data[rank.rank()]))?;
            // Twice: a meeting leaves nothing for the next one.
            rank.all_reduce(stream, x.view_mut())?;
            x = tensor(stream, dtype, &to_bytes(dtype, &data[rank.rank()]))?;
            rank.all_reduce(stream, x.view_mut())?;
            bytes(stream, &x)
        });
        for found in found {
            prop_assert_eq!(&found, &expected);
        }
    }

    #[test]
    fn reduce_scatter_is_each_rank_s_part_of_the_sum(dtype in sums(), data in values(true)) {
        let expected = reference(dtype, &data);
        let part = expected.len() / data.len();
        let found = results(data.len(), |rank, stream| {
            let x = tensor(stream, dtype, &to_bytes(dtype, &data[rank.rank()]))?;
            let mut out = Tensor::zeros(stream, &[part / dtype.bytes()], dtype)?;
            rank.reduce_scatter(stream, x.view(), out.view_mut())?;
            bytes(stream, &out)
        });
        prop_assert_eq!(found.concat(), expected);
    }

    #[test]
    fn all_gather_and_broadcast_move_bytes_of_every_type((dtype, data) in contents(), root in any::<usize>()) {
        let (ranks, root) = (data.len(), root % data.len());
        let found = results(ranks, |rank, stream| {
            let mut x = tensor(stream, dtype, &data[rank.rank()])?;
            let mut out = Tensor::zeros(stream, &[ranks, x.view().len()], dtype)?;
            rank.all_gather(stream, x.view(), out.view_mut())?;
            rank.broadcast(stream, x.view_mut(), root)?;
            Ok([bytes(stream, &out)?, bytes(stream, &x)?].concat())
        });
        let expected = [data.concat(), data[root].clone()].concat();
        for found in found {
            prop_assert_eq!(&found, &expected);
        }
    }

    #[test]
    fn rings_and_rows_pass_bytes_of_every_type((dtype, data) in contents(), step in any::<usize>()) {
        let ranks = data.len();
        if ranks == 1 {
            return Ok(());
        }
        let step = 1 + step % (ranks - 1);
        let found = results(ranks, |rank, stream| {
            let (own, len) = (rank.rank(), data[0].len());
            let (to, from) = ((own + step) % ranks, (own + ranks - step) % ranks);
            let x = tensor(stream, dtype, &data[own])?;
            let mut out = tensor(stream, dtype, &vec![0; len])?;
            rank.exchange(stream, (x.view(), to), (out.view_mut(), from))?;
            // From rank to rank, in order.
            let mut passed = tensor(stream, dtype, &data[own])?;
            if own > 0 {
                rank.recv(stream, passed.view_mut(), own - 1)?;
            }
            if own + 1 < ranks {
                rank.send(stream, passed.view(), own + 1)?;
            }
            Ok([bytes(stream, &out)?, bytes(stream, &passed)?].concat())
        });
        for (own, found) in found.into_iter().enumerate() {
            prop_assert_eq!(found, [&data[(own + ranks - step) % ranks][..], &data[0]].concat());
        }
    }
}

/// How a rank fails the others.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// It makes no call.
    Absent,
    OtherCall,
    OtherLength,
    OtherType,
    OtherRoot,
    Error,
    Panic,
}

const WAYS: [Way; 7] =
    [Way::Absent, Way::OtherCall, Way::OtherLength, Way::OtherType, Way::OtherRoot, Way::Error, Way::Panic];

/// What all but one do.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Recv,
}

fn call(
    rank: &Communicator,
    stream: &Stream,
    call: Call,
    dtype: DType,
    (len, root): (usize, usize),
) -> Result<(), Error> {
    let size = rank.size();
    let mut x = Tensor::zeros(stream, &[len * size], dtype)?;
    match call {
        Call::AllReduce => rank.all_reduce(stream, x.view_mut()),
        Call::AllGather => {
            let mut out = Tensor::zeros(stream, &[len * size * size], dtype)?;
            rank.all_gather(stream, x.view(), out.view_mut())
        }
        Call::ReduceScatter => {
            let mut out = Tensor::zeros(stream, &[len], dtype)?;
            rank.reduce_scatter(stream, x.view(), out.view_mut())
        }
        Call::Broadcast => rank.broadcast(stream, x.view_mut(), root),
        Call::Recv => rank.recv(stream, x.view_mut(), root),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_rank_that_fails_fails_all_and_nobody_hangs(
        ranks in 2usize..=8,
        bad in any::<usize>(),
        way in proptest::sample::select(&WAYS[..]),
        what in proptest::sample::select(
            &[Call::AllReduce, Call::AllGather, Call::ReduceScatter, Call::Broadcast, Call::Recv][..]
        ),
        len in 1usize..40,
    ) {
        let bad = bad % ranks;
        // From the bad rank, who sends nothing.
        let is_recv = what == Call::Recv;
        if is_recv && !matches!(way, Way::Absent | Way::Error | Way::Panic) {
            return Ok(());
        }
        // Where the others cannot know better, the timeout is what ends it.
        let timeout = if way == Way::Absent { Duration::from_millis(60) } else { LONG };
        let group = group(ranks, timeout);
        let begin = Instant::now();
        let errors: Vec<std::sync::Mutex<Option<Error>>> =
            std::iter::repeat_with(Default::default).take(ranks).collect();
        let work = |rank: &Communicator| {
            let stream = rank.device().stream()?;
            let own = rank.rank();
            let root = if is_recv { bad } else { 0 };
            let result = if own == bad {
                match way {
                    Way::Absent => return Ok(()),
                    Way::Error => return Err(Error::invalid("test", "x", "one thing", "another")),
                    Way::Panic => panic!("rank {own} ends as it is to"),
                    Way::OtherCall if what == Call::AllReduce => {
                        call(rank, &stream, Call::Broadcast, DType::F32, (len, 0))
                    }
                    Way::OtherCall => call(rank, &stream, Call::AllReduce, DType::F32, (len, 0)),
                    Way::OtherLength => call(rank, &stream, what, DType::F32, (len + 1, 0)),
                    Way::OtherRoot if what == Call::Broadcast => {
                        call(rank, &stream, what, DType::F32, (len, 1))
                    }
                    // No other call has a root.
                    Way::OtherType | Way::OtherRoot => call(rank, &stream, what, DType::BF16, (len, 0)),
                }
            } else {
                call(rank, &stream, what, DType::F32, (len, root))
            };
            let error = result.expect_err("one rank does not do the same");
            // And so from here on.
            let again = call(rank, &stream, Call::AllReduce, DType::F32, (1, 0)).expect_err("it has ended");
            assert!(matches!(again, Error::Group { .. }), "{again}");
            *errors[own].lock().expect("nobody panics with it") = Some(error);
            Ok(())
        };
        let results = catch_unwind(AssertUnwindSafe(|| group.run(work)));
        prop_assert!(begin.elapsed() < timeout.min(SLACK) + SLACK, "{:?}", begin.elapsed());
        prop_assert_eq!(results.is_err(), way == Way::Panic);
        if let Ok(results) = results {
            prop_assert_eq!(results[bad].is_err(), way == Way::Error);
        }
        for (own, error) in errors.iter().enumerate() {
            let error = error.lock().expect("nobody panics with it");
            if own == bad && matches!(way, Way::Absent | Way::Error | Way::Panic) {
                continue;
            }
            let Some(Error::Group { rank, size, reason, .. }) = &*error else {
                return Err(TestCaseError::fail(format!("rank {own}: {error:?}")));
            };
            prop_assert_eq!((*rank, *size), (own, ranks));
            let names_it = match way {
                Way::Absent if is_recv => format!("what rank {bad} sends did not come within 60ms"),
                Way::Absent => format!("rank {bad} did not come within 60ms"),
                Way::Error => format!("rank {bad} has ended: test: x: expected one thing, got another"),
                Way::Panic => format!("rank {bad} has ended: it panicked"),
                _ => "rank 0 came with".into(),
            };
            prop_assert!(reason.contains(&names_it), "{}: {}", reason, names_it);
        }
    }
}

#[test]
fn a_timeout_without_end_is_one() {
    assert_eq!(results_of_two(Duration::MAX), [[3.0], [3.0]]);
}

fn results_of_two(timeout: Duration) -> Vec<Vec<f32>> {
    let sums = group(2, timeout).run(|rank| {
        let stream = rank.device().stream()?;
        let mut x = Tensor::from_slice(&stream, &[1], &[1.0 + rank.rank() as f32])?;
        rank.all_reduce(&stream, x.view_mut())?;
        x.to_vec::<f32>(&stream)
    });
    sums.into_iter().map(|sum| sum.expect("both have come")).collect()
}

#[test]
fn arguments_are_checked_before_anybody_is_met() {
    let group = group(2, LONG);
    let rank = &group.ranks()[0];
    let stream = rank.device().stream().expect("a stream");
    let x = Tensor::zeros(&stream, &[4], DType::F32).expect("memory");
    let mut out = Tensor::zeros(&stream, &[4], DType::F32).expect("memory");
    let mut say = |to, from| {
        rank.exchange(&stream, (x.view(), to), (out.view_mut(), from)).expect_err("no such ranks").to_string()
    };
    assert_eq!(say(0, 1), "exchange: to: expected another rank, got this one");
    assert_eq!(say(1, 2), "exchange: from: expected a rank below 2, got 2");
}
