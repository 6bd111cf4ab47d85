//! What the processes of the tests do, by the names that `inside` knows.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use host::group::{Communicator, Group, Rendezvous};
use host::{DType, Device, Error, Tensor};

use super::{IMAGES, JOIN, RANKS, SLACK, TIMEOUT, devices};

/// All collectives.
pub fn collectives(rank: &Communicator) -> Result<(), Error> {
    let stream = rank.device().stream()?;
    let (own, size) = (rank.rank(), rank.size());
    let len = 2 * size;
    let values = |rank: usize| (0..len).map(|index| (10 * rank + index) as f32).collect::<Vec<f32>>();
    let x = Tensor::from_slice(&stream, &[len], &values(own))?;
    let sums: Vec<f32> =
        (0..len).map(|index| (0..size).map(|rank| (10 * rank + index) as f32).sum()).collect();

    // Before the first collective: what is behind it in the stream waits for the other ranks, and who uploads
    // waits too.
    let mut sum = Tensor::from_slice(&stream, &[len], &values(own))?;
    let mut part = Tensor::zeros(&stream, &[2], DType::F32)?;
    let mut all = Tensor::zeros(&stream, &[size, len], DType::F32)?;
    let mut of_last = Tensor::from_slice(&stream, &[len], &values(own))?;
    let mut of_left = Tensor::zeros(&stream, &[len], DType::F32)?;
    let mut passed = Tensor::zeros(&stream, &[len], DType::F32)?;
    let mut nothing = Tensor::zeros(&stream, &[0], DType::F32)?;

    rank.all_reduce(&stream, sum.view_mut())?;
    rank.reduce_scatter(&stream, x.view(), part.view_mut())?;
    rank.all_gather(&stream, x.view(), all.view_mut())?;
    rank.broadcast(&stream, of_last.view_mut(), size - 1)?;
    let (left, right) = ((own + size - 1) % size, (own + 1) % size);
    match own {
        _ if size == 1 => {}
        0 => rank.send(&stream, x.view(), 1)?,
        1 => rank.recv(&stream, passed.view_mut(), 0)?,
        _ => {}
    }
    if size > 1 {
        rank.exchange(&stream, (x.view(), right), (of_left.view_mut(), left))?;
    }
    // Of nothing: nobody is called.
    rank.all_reduce(&stream, nothing.view_mut())?;
    rank.synchronize(&stream)?;

    assert_eq!(sum.to_vec::<f32>(&stream)?, sums);
    assert_eq!(part.to_vec::<f32>(&stream)?, sums[2 * own..2 * own + 2]);
    assert_eq!(all.to_vec::<f32>(&stream)?, (0..size).flat_map(values).collect::<Vec<f32>>());
    assert_eq!(of_last.to_vec::<f32>(&stream)?, values(size - 1));
    if size > 1 {
        assert_eq!(of_left.to_vec::<f32>(&stream)?, values(left));
    }
    assert_eq!(passed.to_vec::<f32>(&stream)?, if own == 1 { values(0) } else { vec![0.0; len] });

    // bf16 and f16, whose sums here are exact.
    let total = 1.5 * size as f32;
    let mut sum = Tensor::from_slice(&stream, &[5], &[half::bf16::from_f32(1.5); 5])?;
    let mut other = Tensor::from_slice(&stream, &[5], &[half::f16::from_f32(1.5); 5])?;
    rank.all_reduce(&stream, sum.view_mut())?;
    rank.all_reduce(&stream, other.view_mut())?;
    rank.synchronize(&stream)?;
    assert_eq!(sum.to_vec::<half::bf16>(&stream)?, [half::bf16::from_f32(total); 5]);
    assert_eq!(other.to_vec::<half::f16>(&stream)?, [half::f16::from_f32(total); 5]);
    Ok(())
}

pub fn first_error(results: Vec<Result<(), Error>>) -> Result<(), Error> {
    let mut errors: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
    // What went wrong itself, before what it did to the others.
    let is_of_another = |text: String| text.contains("has ended") || text.contains("did not come");
    errors.sort_by_key(|error| is_of_another(error.to_string()));
    errors.into_iter().next().map_or(Ok(()), Err)
}

pub fn program_of_a_group() -> Result<(), Error> {
    let group = Group::with_timeout(&devices()?, Duration::from_secs(2))?;
    first_error(group.run(collectives))?;
    eprintln!("the work is done");
    Ok(())
}

/// A recorded collective keeps its communicator, and is launched when the group is long gone.
pub fn program_that_records() -> Result<(), Error> {
    let group = Group::with_timeout(&devices()?, TIMEOUT)?;
    let recorded = group.run(|rank| {
        let stream = rank.device().stream()?;
        let mut x = Tensor::zeros(&stream, &[4], DType::F32)?;
        let graph = stream.capture(|stream| {
            rank.all_reduce(stream, x.view_mut())?;
            let error = rank.synchronize(stream).unwrap_err();
            assert!(error.to_string().contains("expected one that is not being recorded"), "{error}");
            rank.all_reduce(stream, x.view_mut())
        })?;
        // A recording that fails keeps nothing.
        let failed = stream.capture(|stream| {
            rank.all_reduce(stream, x.view_mut())?;
            Err(Error::invalid("test", "x", "nothing", "something"))
        });
        assert!(failed.is_err());
        Ok::<_, Error>((graph, x, stream))
    });
    drop(group);
    // No communicator ends before the graph that has its work.
    let log = std::env::var_os("FAKE_NCCL_LOG").expect("the fake writes down its calls");
    let log = std::fs::read_to_string(log).expect("the fake has written it");
    assert!(!log.contains("ncclCommFinalize") && !log.contains("ncclCommAbort"), "{log}");
    for graph in recorded {
        let (graph, x, stream) = graph?;
        // SAFETY: the tensor is there, and nobody else uses it.
        unsafe { graph.launch(&stream)? };
        stream.synchronize()?;
        drop((graph, x));
    }
    eprintln!("the work is done");
    Ok(())
}

/// Rank 1 ends in a way of its own; the others wait for it, and must hear of it.
pub fn program_of_a_rank_that(how: &str) -> Result<(), Error> {
    let devices = devices()?;
    let timeout = if how == "does not come" { TIMEOUT } else { Duration::from_secs(30) };
    let group = Group::with_timeout(&devices, timeout)?;
    let begin = Instant::now();
    let work = |rank: &Communicator| {
        let stream = rank.device().stream()?;
        let mut x = Tensor::zeros(&stream, &[4], DType::F32)?;
        if rank.rank() == 1 {
            // So that the others are waiting.
            std::thread::sleep(TIMEOUT / 2);
            match how {
                "fails" => return Err(Error::invalid("test", "x", "one thing", "another")),
                "panics" => panic!("as it is to"),
                "comes with another call" => {
                    let mut other = Tensor::zeros(&stream, &[5], DType::F32)?;
                    let error = rank.all_reduce(&stream, other.view_mut()).unwrap_err();
                    assert!(error.to_string().contains("and rank 1 with AllReduce(F32, 5)"), "{error}");
                }
                // It is there, and does something else.
                _ => std::thread::sleep(3 * TIMEOUT),
            }
            return Ok(());
        }
        rank.all_reduce(&stream, x.view_mut())?;
        let error = rank.synchronize(&stream).unwrap_err();
        eprintln!("rank {} hears: {error}", rank.rank());
        assert!(matches!(error, Error::Group { op: "synchronize", size: RANKS, .. }), "{error:?}");
        // The stream's work has ended, so this does not hang, and every later call says why.
        stream.synchronize()?;
        let again = rank.all_reduce(&stream, x.view_mut()).unwrap_err();
        assert!(matches!(again, Error::Group { op: "all_reduce", .. }), "{again:?}");
        Ok(())
    };
    let results = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| group.run(work)));
    assert_eq!(results.is_err(), how == "panics");
    let limit = if how == "does not come" { 3 * TIMEOUT + SLACK } else { SLACK };
    assert!(begin.elapsed() < limit, "{:?}", begin.elapsed());
    if let Ok(results) = results {
        assert!(results[0].is_ok() && results[2].is_ok() && results[1].is_err() == (how == "fails"));
    }
    eprintln!("the work is done");
    Ok(())
}

/// Threads that are as processes: each has a device, and all but the file or the address is its own.
pub fn joined(
    meetings: &[Rendezvous],
    work: impl Fn(Communicator) -> Result<(), Error> + Sync,
) -> Result<Vec<Result<(), Error>>, Error> {
    let devices = devices()?;
    Ok(std::thread::scope(|scope| {
        let begin = |(rank, meeting): (usize, &Rendezvous)| {
            let (device, meeting, work) = (devices[rank].clone(), meeting.clone(), &work);
            scope.spawn(move || work(Communicator::join(&device, rank, RANKS, &meeting, JOIN)?))
        };
        let threads: Vec<_> = meetings.iter().enumerate().map(begin).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    }))
}

pub fn meetings() -> (tempfile::TempDir, [Rendezvous; 2]) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = Rendezvous::File(folder.path().join("meeting"));
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    (folder, [file, Rendezvous::Tcp(free.expect("a free port"))])
}

pub fn program_that_joins() -> Result<(), Error> {
    let (_folder, both) = meetings();
    for meeting in both {
        first_error(joined(&[meeting.clone(), meeting.clone(), meeting], |rank| collectives(&rank))?)?;
    }
    eprintln!("the work is done");
    Ok(())
}

/// A rank that has met the others, and then does not start NCCL or does not come to a call.
pub fn program_whose_rank_is_gone() -> Result<(), Error> {
    let (_folder, [meeting, _]) = meetings();
    let begin = Instant::now();
    let results = joined(&[meeting.clone(), meeting.clone(), meeting], |rank| {
        let stream = rank.device().stream()?;
        let mut x = Tensor::zeros(&stream, &[4], DType::F32)?;
        if rank.rank() == 2 {
            // Longer than the others wait.
            std::thread::sleep(3 * JOIN);
            return Ok(());
        }
        rank.all_reduce(&stream, x.view_mut())?;
        rank.synchronize(&stream)
    })?;
    assert!(begin.elapsed() < 3 * JOIN + 2 * SLACK, "{:?}", begin.elapsed());
    for result in &results[..2] {
        let error = result.as_ref().unwrap_err().to_string();
        assert!(error.contains("the other ranks did not come within 800ms"), "{error}");
    }
    assert!(results[2].is_ok(), "{results:?}");
    eprintln!("the work is done");
    Ok(())
}

/// What is refused before NCCL is asked, or since there is none.
pub fn program_that_is_refused() -> Result<(), Error> {
    let devices = devices()?;
    let twice = [devices[0].clone(), devices[1].clone(), devices[0].clone()];
    let error = Group::new(&twice).unwrap_err();
    assert_eq!(
        error.to_string(),
        "Group: devices: expected a card of its own for each rank, got cuda:0 for ranks 0 and 2"
    );
    // A card alone needs no NCCL.
    let alone = Group::new(&devices[..1])?;
    first_error(alone.run(|rank| {
        let stream = rank.device().stream()?;
        let mut x = Tensor::from_slice(&stream, &[2], &[1.0f32, 2.0])?;
        rank.all_reduce(&stream, x.view_mut())?;
        rank.synchronize(&stream)?;
        assert_eq!(x.to_vec::<f32>(&stream)?, [1.0, 2.0]);
        Ok(())
    }))?;
    eprintln!("the work is done");
    let meeting = Rendezvous::File("/nowhere/meeting".into());
    let joined = Communicator::join(&devices[0], 0, 2, &meeting, TIMEOUT).unwrap_err();
    eprintln!("join: {joined}");
    Group::new(&devices).map(|_| ())
}

/// What cards must do: collectives, also recorded, and ranks that do not come. With the fakes nothing is
/// computed by a graph.
pub fn program_of_cards() -> Result<(), Error> {
    let is_fake = std::env::var_os("FAKE_DEVICES").is_some();
    let count = Device::cuda_count()?;
    // SAFETY: no kernel of the images is run.
    let open = |ordinal| unsafe { Device::cuda_with_images(ordinal, IMAGES) };
    let devices: Vec<Device> = (0..count).map(open).collect::<Result<_, _>>()?;
    let begin = Instant::now();
    let group = Group::with_timeout(&devices, Duration::from_secs(60))?;
    eprintln!("{count} cards: a group in {:?}", begin.elapsed());
    first_error(group.run(collectives))?;
    eprintln!("collectives: right");

    // In place, twice in the graph, launched twice: the sum, and three times the number of ranks' multiple.
    first_error(group.run(|rank| {
        let stream = rank.device().stream()?;
        let data = vec![1.0f32 + rank.rank() as f32; 100_000];
        let mut x = Tensor::from_slice(&stream, &[data.len()], &data)?;
        let mut warm = Tensor::zeros(&stream, &[data.len()], DType::F32)?;
        rank.all_reduce(&stream, warm.view_mut())?;
        rank.synchronize(&stream)?;
        let graph = stream.capture(|stream| {
            rank.all_reduce(stream, x.view_mut())?;
            rank.all_reduce(stream, x.view_mut())
        })?;
        for _ in 0..2 {
            // SAFETY: the tensor is there until the stream is waited for, and nobody else uses it.
            unsafe { graph.launch(&stream)? };
        }
        rank.synchronize(&stream)?;
        let size = rank.size() as f32;
        let expected = size * (size + 1.0) / 2.0 * size.powi(3);
        let found = x.to_vec::<f32>(&stream)?;
        assert!(is_fake || found.iter().all(|&value| value == expected), "{} is not {expected}", found[0]);
        // What a call costs on the host, and to the end of its work.
        let begin = Instant::now();
        for _ in 0..100 {
            rank.all_reduce(&stream, warm.view_mut())?;
        }
        let called = begin.elapsed() / 100;
        rank.synchronize(&stream)?;
        if rank.rank() == 0 {
            eprintln!("all_reduce of 400 kB: {called:?} a call, {:?} with its work", begin.elapsed() / 100);
        }
        Ok(())
    }))?;
    drop(group);
    eprintln!("recorded collectives: right");

    for is_connected in [false, true] {
        for fails in [false, true] {
            let timeout = Duration::from_secs(if fails { 60 } else { 3 });
            let group = Group::with_timeout(&devices, timeout)?;
            if is_connected {
                first_error(group.run(collectives))?;
            }
            let begin = Instant::now();
            let results = group.run(|rank| {
                let stream = rank.device().stream()?;
                let mut x = Tensor::zeros(&stream, &[4096], DType::F32)?;
                if rank.rank() == 0 {
                    std::thread::sleep(Duration::from_secs(if fails { 1 } else { 5 }));
                    return if fails {
                        Err(Error::invalid("test", "x", "one thing", "another"))
                    } else {
                        Ok(())
                    };
                }
                let result = rank.all_reduce(&stream, x.view_mut()).and_then(|()| rank.synchronize(&stream));
                let error = result.expect_err("rank 0 has not come");
                assert!(matches!(error, Error::Group { .. }), "{error}");
                eprintln!("rank {} after {:?}: {error}", rank.rank(), begin.elapsed());
                // The card is as it was: its work has ended.
                stream.synchronize()
            });
            assert!(begin.elapsed() < Duration::from_secs(5) + SLACK, "{:?}", begin.elapsed());
            assert!(results[1..].iter().all(Result::is_ok), "{results:?}");
        }
    }
    eprintln!("ranks that do not come: given up");
    Ok(())
}

/// A process's rank: `CARD` is its rank, the size, what it does and where it meets the others.
pub fn program_of_one_card() -> Result<(), Error> {
    let card = std::env::var("CARD").expect("a card");
    let words: Vec<&str> = card.splitn(5, ' ').collect();
    let [rank, size, what, kind, place] = words[..] else { panic!("{card}") };
    let (rank, size): (usize, usize) = (rank.parse().expect("a rank"), size.parse().expect("a size"));
    let meeting = match kind {
        "file" => Rendezvous::File(place.into()),
        _ => Rendezvous::Tcp(place.parse().expect("an address")),
    };
    // SAFETY: no kernel of the images is run.
    let device = unsafe { Device::cuda_with_images(rank, IMAGES)? };
    let communicator = Communicator::join(&device, rank, size, &meeting, Duration::from_secs(20))?;
    collectives(&communicator)?;
    if what == "dies" {
        if rank + 1 == size {
            // As one that is killed: nothing is dropped.
            std::process::exit(3);
        }
        let stream = device.stream()?;
        let mut x = Tensor::zeros(&stream, &[4096], DType::F32)?;
        let begin = Instant::now();
        let result =
            communicator.all_reduce(&stream, x.view_mut()).and_then(|()| communicator.synchronize(&stream));
        let error = result.expect_err("a rank has died");
        assert!(matches!(error, Error::Group { .. }), "{error}");
        eprintln!("rank {rank} after {:?}: {error}", begin.elapsed());
        stream.synchronize()?;
    }
    Ok(())
}
