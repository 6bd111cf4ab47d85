//! Meetings of threads that are as processes: all that they share is the file or the address.

use std::net::Shutdown;
use std::sync::Barrier;

use proptest::prelude::*;

use super::*;

const OP: &str = "join";
const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(150);
/// A busy machine's.
const SLACK: Duration = Duration::from_secs(5);

/// A folder that goes with the value, and both kinds of meeting.
struct Places {
    folder: tempfile::TempDir,
    address: SocketAddr,
}

impl Places {
    fn new() -> Self {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        Places { folder: tempfile::tempdir().expect("a folder"), address: free.expect("a free port") }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("meeting")
    }

    fn meeting(&self, kind: Kind) -> Rendezvous {
        match kind {
            Kind::File => Rendezvous::File(self.file()),
            Kind::Tcp => Rendezvous::Tcp(self.address),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    File,
    Tcp,
}

const KINDS: [Kind; 2] = [Kind::File, Kind::Tcp];

/// A rank as it comes: its number, the size and the version that it thinks, and after how many milliseconds.
#[derive(Clone, Copy, Debug)]
struct Comer {
    rank: usize,
    size: usize,
    library: u32,
    delay: u64,
}

fn comer(rank: usize, size: usize) -> Comer {
    Comer { rank, size, library: 22_703, delay: 0 }
}

fn id_of(seed: u8) -> Id {
    std::array::from_fn(|index| (index as u8).wrapping_mul(31).wrapping_add(seed))
}

fn come(meeting: &Rendezvous, comer: Comer, timeout: Duration, seed: u8) -> Result<Id, Error> {
    std::thread::sleep(Duration::from_millis(comer.delay));
    let Comer { rank, size, library, .. } = comer;
    let who = Who { op: OP, rank, size, library, timeout, end: Instant::now() + timeout };
    exchange(meeting, &who, || Ok(id_of(seed)))
}

/// Who comes, each in a thread of its own.
fn meet(meeting: &Rendezvous, comers: &[Comer], timeout: Duration, seed: u8) -> Vec<Result<Id, Error>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            comers.iter().map(|&comer| scope.spawn(move || come(meeting, comer, timeout, seed))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn message(result: &Result<Id, Error>) -> String {
    result.as_ref().map_or_else(ToString::to_string, |_| "an id".into())
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).expect("a folder").next().is_none()
}

/// What an earlier run can have left.
fn leftovers() -> impl Strategy<Value = Vec<(usize, Vec<u8>)>> {
    let hello = (any::<u64>(), 1u32..5, 0u32..5, any::<u64>()).prop_map(|(number, size, rank, token)| {
        Hello { library: 22_703, size, rank, number, token }.to_bytes().to_vec()
    });
    let answers =
        proptest::collection::vec((any::<u64>(), 1u32..5, any::<u64>()), 0..5).prop_map(|answers| {
            let answer = |(number, size, token)| {
                let verdict = Verdict::Fine;
                Answer { library: 22_703, size, verdict, number, token, id: [7; 128] }.to_bytes()
            };
            answers.into_iter().flat_map(answer).collect::<Vec<u8>>()
        });
    let garbage = proptest::collection::vec(any::<u8>(), 0..400);
    let file = prop_oneof![hello.boxed(), answers.boxed(), garbage.boxed()];
    proptest::collection::vec((0usize..5, file), 0..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn all_get_the_id_of_rank_0(
        delays in proptest::collection::vec(0u64..40, 1..7),
        kind in proptest::sample::select(&KINDS[..]),
        leftovers in leftovers(),
        seed in any::<u8>(),
    ) {
        let places = Places::new();
        for (rank, bytes) in &leftovers {
            fs::write(file_of(&places.file(), *rank), bytes).expect("the folder is writable");
        }
        let size = delays.len();
        let comers: Vec<Comer> =
            delays.iter().enumerate().map(|(rank, &delay)| Comer { delay, ..comer(rank, size) }).collect();
        // And once more at the same place.
        for turn in 0..2u8 {
            let seed = seed.wrapping_add(turn);
            for result in meet(&places.meeting(kind), &comers, LONG, seed) {
                prop_assert_eq!(result.map_err(|error| error.to_string()), Ok(id_of(seed)));
            }
        }
        if kind == Kind::File && leftovers.iter().all(|&(rank, _)| rank < size) && size > 1 {
            prop_assert!(is_empty(places.folder.path()));
        }
    }

    #[test]
    fn what_is_read_is_what_was_written_or_nothing(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        (library, size, rank, number, token) in any::<(u32, u32, u32, u64, u64)>(),
        flip in any::<usize>(),
    ) {
        let hello = Hello { library, size, rank, number, token };
        prop_assert_eq!(Hello::parse(&hello.to_bytes()), Some(hello));
        let answer =
            Answer { library, size, verdict: Verdict::RankTwice, number, token, id: id_of(rank as u8) };
        prop_assert_eq!(Answer::parse(&answer.to_bytes()), Some(answer));
        // Of any bytes, without a panic.
        prop_assert_eq!(Hello::parse(&bytes).is_some(), bytes.len() == Hello::BYTES && bytes[..8] == MAGIC);
        let _ = Answer::parse(&bytes);
        let mut other = hello.to_bytes();
        other[flip % 8] ^= 1 << (flip / 8 % 8);
        prop_assert_eq!(Hello::parse(&other), None);
    }
}

#[test]
fn another_size_is_an_error_at_both_ranks() {
    for kind in KINDS {
        for (own, other) in [(3, 2), (3, 4), (2, 3)] {
            let places = Places::new();
            let begin = Instant::now();
            let comers = [comer(0, own), comer(1, other)];
            let results = meet(&places.meeting(kind), &comers, LONG, 1);
            let expected = [
                format!("join: size: expected {own}, as rank 0 has, got {other} at rank 1"),
                format!("join: size: expected {own}, as rank 0 has, got {other} at this one"),
            ];
            assert_eq!([message(&results[0]), message(&results[1])], expected, "{kind:?}");
            assert!(begin.elapsed() < SLACK, "{:?}", begin.elapsed());
        }
    }
}

#[test]
fn another_version_is_an_error_and_the_other_ranks_hear_of_it() {
    for kind in KINDS {
        let places = Places::new();
        let begin = Instant::now();
        let old = Comer { library: 21_800, delay: 60, ..comer(2, 3) };
        let results = meet(&places.meeting(kind), &[comer(0, 3), comer(1, 3), old], LONG, 1);
        let messages: Vec<String> = results.iter().map(message).collect();
        assert_eq!(
            messages[0], "join: NCCL: expected version 22703, as rank 0 has, got 21800 at rank 2",
            "{kind:?}"
        );
        assert_eq!(
            messages[2], "join: NCCL: expected version 22703, as rank 0 has, got 21800 at this one",
            "{kind:?}"
        );
        // By files it may have had its answer before the other one came; then NCCL misses that.
        let of_other = "join: rank 1 of 3: rank 0 has ended the meeting, since another rank does not fit";
        assert!(messages[1] == of_other || kind == Kind::File && messages[1] == "an id", "{messages:?}");
        assert!(begin.elapsed() < SLACK, "{:?}", begin.elapsed());
    }
}

#[test]
fn a_rank_that_is_there_twice_is_an_error() {
    let places = Places::new();
    let late = Comer { delay: 60, ..comer(1, 3) };
    let results = meet(&places.meeting(Kind::Tcp), &[comer(0, 3), comer(1, 3), late], LONG, 1);
    let expected = "join: rank: expected a process of its own for each, got ";
    assert_eq!(message(&results[0]), format!("{expected}two for rank 1"));
    assert_eq!(message(&results[2]), format!("{expected}another one for rank 1"));
    assert!(message(&results[1]).contains("another rank does not fit"), "{}", message(&results[1]));

    // By files the one that came first finds the other's.
    let places = Places::new();
    let results = meet(&places.meeting(Kind::File), &[comer(1, 3), late], Duration::from_secs(1), 1);
    assert_eq!(message(&results[0]), format!("{expected}another one for rank 1"));
    assert!(message(&results[1]).contains("rank 0 did not answer"), "{}", message(&results[1]));
}

#[test]
fn rank_0_twice_is_an_error() {
    let places = Places::new();
    let late = Comer { delay: 60, ..comer(0, 2) };
    let results = meet(&places.meeting(Kind::Tcp), &[comer(0, 2), late], Duration::from_secs(1), 1);
    assert!(message(&results[0]).contains("rank 1 did not come within 1s"), "{}", message(&results[0]));
    let expected =
        format!("join: meeting: expected an address at which rank 0 can listen, got {}", places.address);
    assert!(message(&results[1]).starts_with(&expected), "{}", message(&results[1]));

    let places = Places::new();
    let results = meet(&places.meeting(Kind::File), &[comer(0, 2), late], Duration::from_secs(1), 1);
    let expected = "join: rank: expected a process of its own for each, got two for rank 0";
    assert_eq!(message(&results[0]), expected);
}

#[test]
fn who_does_not_come_is_named_in_time() {
    for kind in KINDS {
        let places = Places::new();
        let meeting = places.meeting(kind);
        let begin = Instant::now();
        let results = meet(&meeting, &[comer(0, 4), comer(2, 4)], SHORT, 1);
        let first = message(&results[0]);
        assert_eq!(first, "join: rank 0 of 4: rank 1, rank 3 did not come within 150ms", "{kind:?}");
        let other = message(&results[1]);
        let is_heard = other == "an id" && kind == Kind::File;
        assert!(is_heard || other.starts_with("join: rank 2 of 4: rank 0 "), "{kind:?}: {other}");
        let alone = message(&come(&Places::new().meeting(kind), comer(1, 2), SHORT, 1));
        let expected = match kind {
            Kind::File => "within 150ms: there is no file of rank 0",
            Kind::Tcp => "within 150ms",
        };
        assert!(
            alone.starts_with("join: rank 1 of 2: rank 0 did not ") && alone.ends_with(expected),
            "{alone}"
        );
        assert!(begin.elapsed() < SLACK, "{:?}", begin.elapsed());
    }
}

#[test]
fn a_file_of_an_earlier_run_is_never_taken() {
    let places = Places::new();
    let answer = |number| {
        let verdict = Verdict::Fine;
        Answer { library: 22_703, size: 2, verdict, number, token: 5, id: [9; 128] }.to_bytes()
    };
    fs::write(places.file(), answer(77)).expect("the folder is writable");
    let old = Hello { library: 22_703, size: 2, rank: 1, number: 77, token: 5 };
    fs::write(file_of(&places.file(), 1), old.to_bytes()).expect("the folder is writable");
    let meeting = places.meeting(Kind::File);
    // Without rank 0 there is only the old answer.
    let alone = message(&come(&meeting, comer(1, 2), SHORT, 1));
    assert!(
        alone
            .ends_with("the file has no answer to this rank, as one of an earlier run or of another program"),
        "{alone}"
    );
    // Without rank 1 there is only its old file, which says that it was there.
    fs::write(file_of(&places.file(), 1), old.to_bytes()).expect("the folder is writable");
    assert!(message(&come(&meeting, comer(0, 2), SHORT, 1)).contains("rank 1 did not come"));
    // One of another size is named, since it may be a live one that does not hear.
    let other = Hello { size: 3, ..old };
    fs::write(file_of(&places.file(), 1), other.to_bytes()).expect("the folder is writable");
    let said = message(&come(&meeting, comer(0, 2), SHORT, 1));
    assert!(said.ends_with("there is a file of rank 1 of 3, maybe of an earlier run"), "{said}");
    // Together, whichever comes first.
    for (first, second) in [(0, 80), (80, 0)] {
        fs::write(places.file(), answer(77)).expect("the folder is writable");
        fs::write(file_of(&places.file(), 1), old.to_bytes()).expect("the folder is writable");
        let comers = [Comer { delay: first, ..comer(0, 2) }, Comer { delay: second, ..comer(1, 2) }];
        for result in meet(&meeting, &comers, LONG, 3) {
            assert_eq!(result.expect("both have come"), id_of(3));
        }
        assert!(is_empty(places.folder.path()));
    }
}

#[test]
fn a_place_that_cannot_be_written_is_an_error_at_once() {
    let meeting = Rendezvous::File("/nowhere/at/all/meeting".into());
    for rank in 0..2 {
        let said = message(&come(&meeting, comer(rank, 2), LONG, 1));
        assert!(
            said.starts_with("join: meeting: expected a file that every rank can write, got /nowhere"),
            "{said}"
        );
    }
    // Of nobody's network.
    let meeting = Rendezvous::Tcp(SocketAddr::from(([203, 0, 113, 1], 4000)));
    let said = message(&come(&meeting, comer(0, 2), LONG, 1));
    assert!(said.starts_with("join: meeting: expected an address at which rank 0 can listen"), "{said}");
}

/// Connects once somebody listens.
fn connect(address: SocketAddr) -> TcpStream {
    let end = Instant::now() + LONG;
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return stream,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn strangers_at_rank_0_s_address_do_no_harm() {
    let places = Places::new();
    let results = std::thread::scope(|scope| {
        scope.spawn(|| {
            for bytes in
                [&b"GET / HTTP/1.1\r\nHost: warpforge\r\nAccept: */*\r\n\r\n"[..], b"", &[0; 35], &MAGIC]
            {
                let mut stranger = connect(places.address);
                // It may be sent away meanwhile.
                let _ = stranger.write_all(bytes);
                let _ = stranger.shutdown(Shutdown::Write);
                let _ = stranger.read(&mut [0; 8]);
            }
        });
        let late = Comer { delay: 150, ..comer(1, 2) };
        meet(&places.meeting(Kind::Tcp), &[comer(0, 2), late], LONG, 4)
    });
    for result in results {
        assert_eq!(result.expect("both have come"), id_of(4));
    }
    // Where nobody else comes, they are told of.
    let places = Places::new();
    let said = std::thread::scope(|scope| {
        scope.spawn(|| connect(places.address).write_all(&[1; 64]).expect("it is listening"));
        message(&come(&places.meeting(Kind::Tcp), comer(0, 2), Duration::from_millis(400), 1))
    });
    assert!(
        said.contains("rank 1 did not come") && said.ends_with("connected and is no rank of a group"),
        "{said}"
    );
}

#[test]
fn one_who_says_nothing_is_not_waited_for() {
    let places = Places::new();
    let done = Barrier::new(2);
    let results = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut silent = connect(places.address);
            // A byte now and then is no reason either.
            for _ in 0..5 {
                let _ = silent.write_all(&MAGIC[..1]);
                std::thread::sleep(Duration::from_millis(100));
            }
            done.wait();
        });
        let late = Comer { delay: 100, ..comer(1, 2) };
        let begin = Instant::now();
        let results = meet(&Rendezvous::Tcp(places.address), &[comer(0, 2), late], LONG, 4);
        assert!(begin.elapsed() < HELLO + SLACK, "{:?}", begin.elapsed());
        done.wait();
        results
    });
    for result in results {
        assert_eq!(result.expect("both have come"), id_of(4));
    }
}

#[test]
fn another_program_at_the_address_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    // Another program's words; an answer to somebody else; none.
    let other =
        Answer { library: 22_703, size: 2, verdict: Verdict::Fine, number: 5, token: 1, id: [0; 128] };
    let program = "expected rank 0's address, got";
    for (answer, expected) in
        [(vec![b'x'; 500], program), (other.to_bytes().to_vec(), program), (vec![], "has ended")]
    {
        let said = std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().expect("it connects");
                stream.read_exact(&mut [0; Hello::BYTES]).expect("it says something");
                stream.write_all(&answer).expect("it listens");
            });
            message(&come(&Rendezvous::Tcp(address), comer(1, 2), LONG, 1))
        });
        assert!(said.contains(expected), "{said}");
    }
    // One that listens and never answers.
    let said = message(&come(&Rendezvous::Tcp(address), comer(1, 2), SHORT, 1));
    assert_eq!(said, "join: rank 1 of 2: rank 0 had not all ranks together within 150ms");
}
