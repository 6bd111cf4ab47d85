//! How ranks in processes of their own find each other: each gets the 128 bytes that rank 0 has made.
//!
//! Every rank says `Hello` and rank 0 answers, by TCP or by files, with the same bytes. Each side checks
//! that the other one speaks this protocol, has the same version of NCCL, and means a group of the same
//! size. A `Hello` has a random number, which the answer repeats, so that nobody takes an answer that was
//! for another run.
//!
//! # Files
//!
//! Rank r writes `PATH.r` with its `Hello`, rank 0 writes `PATH` with an answer to each `Hello` that it
//! sees, and again where one changes. Rank r takes only an answer to its own number, then writes into
//! `PATH.r` rank 0's number as well. Rank 0 waits for that from everyone and removes the files. So what an
//! earlier run has left, wherever it ended, is never taken: an old `PATH` has no answer to a new number, and
//! an old `PATH.r` is replaced when rank r comes. Files come to their names by renaming, so none is ever
//! seen in part.

use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::Error;

/// Where the ranks of a group that are in processes of their own meet: [`super::Communicator::join`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rendezvous {
    /// A file in a folder that all processes can write, of which there is none after the meeting. Beside it
    /// they write others, whose names begin with its name. What an earlier run has left there does no harm;
    /// two groups that meet at the same time need a file each.
    File(PathBuf),
    /// An address of rank 0's machine, at which rank 0 listens and to which the others connect. Whoever can
    /// connect to it can take a rank's place, so it is for networks that are trusted, as NCCL's own traffic
    /// is.
    Tcp(SocketAddr),
}

/// Bytes that the ranks get.
pub(super) type Id = [u8; 128];

/// Who comes to a meeting.
#[derive(Clone, Copy, Debug)]
pub(super) struct Who {
    pub(super) op: &'static str,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// The version of the library that the id is for.
    pub(super) library: u32,
    /// For messages.
    pub(super) timeout: Duration,
    pub(super) end: Instant,
}

/// The id that rank 0 makes, at every rank.
pub(super) fn exchange(
    meeting: &Rendezvous,
    who: &Who,
    make: impl FnOnce() -> Result<Id, Error>,
) -> Result<Id, Error> {
    match (meeting, who.rank) {
        (_, 0) if who.size == 1 => make(),
        (Rendezvous::File(path), 0) => offer_file(path, who, &make()?),
        (Rendezvous::File(path), _) => take_file(path, who),
        (Rendezvous::Tcp(address), 0) => offer_tcp(*address, who, &make()?),
        (Rendezvous::Tcp(address), _) => take_tcp(*address, who),
    }
}

const MAGIC: [u8; 8] = *b"wforge\x00\x01";
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(5);
/// No file of a meeting is longer.
const LONGEST: usize = 1 << 24;
/// How long one connection may take to say `Hello`: others wait meanwhile.
const HELLO: Duration = Duration::from_secs(2);

/// What a rank says. `token` is 0 until it has an answer, then rank 0's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hello {
    library: u32,
    size: u32,
    rank: u32,
    number: u64,
    token: u64,
}

/// How rank 0 finds a `Hello`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Verdict {
    Fine = 1,
    OtherSize = 2,
    OtherLibrary = 3,
    NoSuchRank = 4,
    RankTwice = 5,
    /// Another rank's `Hello` was wrong.
    Over = 6,
}

/// What rank 0 says to a `Hello`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Answer {
    library: u32,
    size: u32,
    verdict: Verdict,
    /// That of the `Hello`.
    number: u64,
    /// Rank 0's own.
    token: u64,
    id: Id,
}

impl Hello {
    const BYTES: usize = 36;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.library.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.size.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.rank.to_le_bytes());
        bytes[20..28].copy_from_slice(&self.number.to_le_bytes());
        bytes[28..].copy_from_slice(&self.token.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let hello = Hello {
            library: u32_at(bytes, 8),
            size: u32_at(bytes, 12),
            rank: u32_at(bytes, 16),
            number: u64_at(bytes, 20),
            token: u64_at(bytes, 28),
        };
        (bytes[..8] == MAGIC).then_some(hello)
    }
}

impl Answer {
    const BYTES: usize = 164;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.library.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.size.to_le_bytes());
        bytes[16..20].copy_from_slice(&(self.verdict as u32).to_le_bytes());
        bytes[20..28].copy_from_slice(&self.number.to_le_bytes());
        bytes[28..36].copy_from_slice(&self.token.to_le_bytes());
        bytes[36..].copy_from_slice(&self.id);
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        use Verdict::*;
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let verdict = u32_at(bytes, 16);
        let all = [Fine, OtherSize, OtherLibrary, NoSuchRank, RankTwice, Over];
        let answer = Answer {
            library: u32_at(bytes, 8),
            size: u32_at(bytes, 12),
            verdict: all.into_iter().find(|&known| known as u32 == verdict)?,
            number: u64_at(bytes, 20),
            token: u64_at(bytes, 28),
            id: bytes[36..].try_into().ok()?,
        };
        (bytes[..8] == MAGIC).then_some(answer)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

/// A number that no other process has, and no earlier run had; never 0.
fn number() -> u64 {
    // Keys from the system's randomness.
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    if let Ok(now) = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH) {
        hasher.write_u128(now.as_nanos());
    }
    hasher.finish().max(1)
}

impl Who {
    fn hello(&self, number: u64) -> Hello {
        Hello { library: self.library, size: self.size as u32, rank: self.rank as u32, number, token: 0 }
    }

    /// What rank 0 says to a `Hello`, whose place is free.
    fn verdict(&self, hello: &Hello) -> Verdict {
        if hello.library != self.library {
            Verdict::OtherLibrary
        } else if hello.size as usize != self.size {
            Verdict::OtherSize
        } else if hello.rank == 0 {
            // That is this one.
            Verdict::RankTwice
        } else if hello.rank as usize >= self.size {
            Verdict::NoSuchRank
        } else {
            Verdict::Fine
        }
    }

    /// Rank 0's error for a `Hello` that does not fit.
    fn refused(&self, hello: &Hello, verdict: Verdict) -> Error {
        let rank = hello.rank;
        let invalid = |argument, expected: String, got: String| {
            Error::invalid(self.op, argument, expected, format!("{got} at rank {rank}"))
        };
        match verdict {
            Verdict::OtherLibrary => {
                invalid("NCCL", format!("version {}, as rank 0 has", self.library), hello.library.to_string())
            }
            Verdict::OtherSize => {
                invalid("size", format!("{}, as rank 0 has", self.size), hello.size.to_string())
            }
            Verdict::NoSuchRank => {
                Error::invalid(self.op, "rank", format!("one below {}", self.size), rank.to_string())
            }
            Verdict::RankTwice => Error::invalid(
                self.op,
                "rank",
                "a process of its own for each",
                format!("two for rank {rank}"),
            ),
            Verdict::Fine | Verdict::Over => self.failed("rank 0 has ended the meeting"),
        }
    }

    /// The id in an answer, or the error in it.
    fn take(&self, answer: &Answer) -> Result<Id, Error> {
        let got = |value: usize| format!("{value} at this one");
        match answer.verdict {
            // Looked at here too, whatever rank 0 thinks of it.
            _ if answer.library != self.library => {
                let expected = format!("version {}, as rank 0 has", answer.library);
                Err(Error::invalid(self.op, "NCCL", expected, got(self.library as usize)))
            }
            _ if answer.size as usize != self.size => {
                let expected = format!("{}, as rank 0 has", answer.size);
                Err(Error::invalid(self.op, "size", expected, got(self.size)))
            }
            Verdict::Fine => Ok(answer.id),
            Verdict::RankTwice => {
                let got = format!("another one for rank {}", self.rank);
                Err(Error::invalid(self.op, "rank", "a process of its own for each", got))
            }
            Verdict::Over => {
                Err(self.failed("rank 0 has ended the meeting, since another rank does not fit"))
            }
            Verdict::OtherSize | Verdict::OtherLibrary | Verdict::NoSuchRank => {
                Err(self.failed("rank 0 does not take this rank"))
            }
        }
    }

    fn failed(&self, reason: impl Into<String>) -> Error {
        Error::Group { op: self.op, rank: self.rank, size: self.size, reason: reason.into() }
    }

    /// A place that is of no use.
    fn unusable(&self, expected: &str, place: impl std::fmt::Display, error: &io::Error) -> Error {
        Error::invalid(self.op, "meeting", expected, format!("{place}: {error}"))
    }

    fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    fn is_late(&self) -> bool {
        self.left().is_zero()
    }

    /// The others that `came` does not have did not come in time.
    fn missing(&self, came: impl Fn(usize) -> bool, noted: Option<&str>) -> Error {
        let ranks: Vec<String> =
            (1..self.size).filter(|&rank| !came(rank)).map(|rank| format!("rank {rank}")).collect();
        let noted = noted.map(|noted| format!("; {noted}")).unwrap_or_default();
        self.failed(format!("{} did not come within {:?}{noted}", ranks.join(", "), self.timeout))
    }
}

/// At most so many bytes, so that a wrong address or file does no harm.
fn read_exactly(stream: &mut TcpStream, bytes: &mut [u8], until: Instant) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes[done..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Rank 0 by TCP.
fn offer_tcp(address: SocketAddr, who: &Who, id: &Id) -> Result<Id, Error> {
    let unusable = |error| who.unusable("an address at which rank 0 can listen", address, &error);
    let listener = TcpListener::bind(address).map_err(unusable)?;
    listener.set_nonblocking(true).map_err(unusable)?;
    let token = number();
    let answer = |hello: &Hello, verdict| {
        let (library, size) = (who.library, who.size as u32);
        // Whoever does not belong here does not get the id.
        let id = if verdict == Verdict::Fine { *id } else { [0; 128] };
        Answer { library, size, verdict, number: hello.number, token, id }
    };
    let mut came: Vec<Option<(Hello, TcpStream)>> = std::iter::repeat_with(|| None).take(who.size).collect();
    let mut noted = None;
    let refusal = loop {
        if came.iter().skip(1).all(Option::is_some) {
            break None;
        }
        if who.is_late() {
            break Some(who.missing(|rank| came[rank].is_some(), noted.as_deref()));
        }
        let (mut stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                std::thread::sleep(PAUSE.min(who.left()));
                continue;
            }
            Err(error) => {
                // Of one connection, as one that has ended in the queue.
                noted = Some(format!("a connection failed: {error}"));
                std::thread::sleep(PAUSE.min(who.left()));
                continue;
            }
        };
        match hear(&mut stream, who) {
            Ok(hello) => {
                let verdict = match who.verdict(&hello) {
                    Verdict::Fine if came[hello.rank as usize].is_some() => Verdict::RankTwice,
                    verdict => verdict,
                };
                if verdict != Verdict::Fine {
                    tell(&mut stream, &answer(&hello, verdict), who);
                    break Some(who.refused(&hello, verdict));
                }
                came[hello.rank as usize] = Some((hello, stream));
            }
            // No rank of this protocol, or one that has ended: the others may still come.
            Err(what) => noted = Some(format!("{from} {what}")),
        }
    };
    let verdict = if refusal.is_some() { Verdict::Over } else { Verdict::Fine };
    for (hello, stream) in came.iter_mut().flatten() {
        // One that does not hear it is missed when the communicators are made.
        tell(stream, &answer(hello, verdict), who);
    }
    refusal.map_or(Ok(*id), Err)
}

/// What a connection says first, or what is wrong with it.
fn hear(stream: &mut TcpStream, who: &Who) -> Result<Hello, String> {
    let mut bytes = [0; Hello::BYTES];
    // On some systems it is as the listener.
    let heard = stream
        .set_nonblocking(false)
        .and_then(|()| read_exactly(stream, &mut bytes, Instant::now() + HELLO.min(who.left())));
    heard.map_err(|error| format!("connected and said nothing: {error}"))?;
    Hello::parse(&bytes).ok_or_else(|| "connected and is no rank of a group".into())
}

fn tell(stream: &mut TcpStream, answer: &Answer, who: &Who) {
    // A rank that has ended meanwhile is missed later.
    let wait = HELLO.min(who.left()).max(Duration::from_millis(100));
    let _ = stream.set_write_timeout(Some(wait)).and_then(|()| stream.write_all(&answer.to_bytes()));
}

/// The other ranks by TCP.
fn take_tcp(address: SocketAddr, who: &Who) -> Result<Id, Error> {
    let mut stream = loop {
        if who.is_late() {
            return Err(who.failed(format!("rank 0 did not listen at {address} within {:?}", who.timeout)));
        }
        match TcpStream::connect_timeout(&address, who.left().max(Duration::from_millis(1))) {
            Ok(stream) => break stream,
            // It has not begun.
            Err(_) => std::thread::sleep(PAUSE.min(who.left())),
        }
    };
    let hello = who.hello(number());
    let mut bytes = [0; Answer::BYTES];
    let ended = |error: io::Error| match error.kind() {
        io::ErrorKind::TimedOut => {
            who.failed(format!("rank 0 had not all ranks together within {:?}", who.timeout))
        }
        _ => who.failed(format!("rank 0 at {address} has ended: {error}")),
    };
    stream.write_all(&hello.to_bytes()).map_err(ended)?;
    // A little more than rank 0 has, so that its reason comes before this one's.
    let until = who.end + 10 * PAUSE;
    read_exactly(&mut stream, &mut bytes, until).map_err(ended)?;
    match Answer::parse(&bytes) {
        Some(answer) if answer.number == hello.number => who.take(&answer),
        _ => Err(Error::invalid(
            who.op,
            "meeting",
            "rank 0's address",
            format!("{address}, where another program answers"),
        )),
    }
}

/// `PATH.rank`, or `PATH` for rank 0.
fn file_of(path: &Path, rank: usize) -> PathBuf {
    if rank == 0 {
        return path.into();
    }
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{rank}"));
    name.into()
}

/// The file's bytes if there are so many at most; nothing where there is none yet.
fn read_file(path: &Path, at_most: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = fs::File::open(path).ok()?;
    file.take(at_most as u64 + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() <= at_most).then_some(bytes)
}

/// Writes a file as a whole.
fn write_file(path: &Path, number: u64, bytes: &[u8], who: &Who) -> Result<(), Error> {
    let mut part = path.as_os_str().to_owned();
    part.push(format!(".{number:016x}"));
    let part = PathBuf::from(part);
    let written = fs::write(&part, bytes).and_then(|()| fs::rename(&part, path));
    written.map_err(|error| {
        // It may not be there; the first error is told.
        let _ = fs::remove_file(&part);
        who.unusable("a file that every rank can write", path.display(), &error)
    })
}

/// Rank 0 by files: an [`Answer`] for each other rank, one after another.
fn offer_file(path: &Path, who: &Who, id: &Id) -> Result<Id, Error> {
    let offered = offer(path, who, id, number());
    // So that nothing is left but what the others are still to read. Where that fails it does no harm.
    if offered.is_ok() {
        let _ = fs::remove_file(path);
        for rank in 1..who.size {
            let _ = fs::remove_file(file_of(path, rank));
        }
    }
    offered
}

fn offer(path: &Path, who: &Who, id: &Id, token: u64) -> Result<Id, Error> {
    let mut written: Option<Vec<u8>> = None;
    loop {
        let hellos: Vec<Option<Hello>> = (1..who.size)
            .map(|rank| {
                let hello = Hello::parse(&read_file(&file_of(path, rank), Hello::BYTES)?)?;
                (hello.rank as usize == rank).then_some(hello)
            })
            .collect();
        // An old file may say anything; who repeats this run's number is there.
        let mut came = hellos.iter().flatten().filter(|hello| hello.token == token);
        let refused = came.clone().find(|hello| who.verdict(hello) != Verdict::Fine);
        if refused.is_none() && came.by_ref().count() == who.size - 1 {
            return Ok(*id);
        }
        let answer = |hello: &Option<Hello>| {
            let (library, size) = (who.library, who.size as u32);
            let number = hello.as_ref().map_or(0, |hello| hello.number);
            let verdict = match hello.as_ref().map(|hello| who.verdict(hello)) {
                None => Verdict::Over,
                Some(Verdict::Fine) if refused.is_some() => Verdict::Over,
                Some(verdict) => verdict,
            };
            let id = if verdict == Verdict::Fine { *id } else { [0; 128] };
            Answer { library, size, verdict, number, token, id }.to_bytes()
        };
        let bytes: Vec<u8> = hellos.iter().flat_map(answer).collect();
        if let Some(other) = refused {
            write_file(path, token, &bytes, who)?;
            return Err(who.refused(other, who.verdict(other)));
        }
        // What stands there now is this one's, or an old run's that is replaced once.
        let stands = read_file(path, LONGEST);
        let is_mine = |stands: &[u8]| {
            stands.get(..Answer::BYTES).and_then(Answer::parse).is_some_and(|answer| answer.token == token)
        };
        match (&stands, &written) {
            (Some(stands), Some(_)) if !is_mine(stands) => {
                return Err(Error::invalid(
                    who.op,
                    "rank",
                    "a process of its own for each",
                    "two for rank 0",
                ));
            }
            (Some(_), Some(written)) if *written == bytes => {}
            _ => {
                write_file(path, token, &bytes, who)?;
                written = Some(bytes);
            }
        }
        if who.is_late() {
            let came = |rank: usize| hellos[rank - 1].is_some_and(|hello| hello.token == token);
            let wrong = hellos.iter().flatten().find(|hello| who.verdict(hello) != Verdict::Fine);
            let noted = wrong.map(|hello| {
                format!("there is a file of rank {} of {}, maybe of an earlier run", hello.rank, hello.size)
            });
            return Err(who.missing(came, noted.as_deref()));
        }
        std::thread::sleep(PAUSE.min(who.left()));
    }
}

/// The other ranks by files.
fn take_file(path: &Path, who: &Who) -> Result<Id, Error> {
    let own = file_of(path, who.rank);
    let mut hello = who.hello(number());
    let mut has_written = false;
    let mut noted = "there is no file of rank 0";
    loop {
        match read_file(&own, Hello::BYTES).as_deref().and_then(Hello::parse) {
            Some(other) if has_written && other.number != hello.number => {
                let got = format!("another one for rank {}", who.rank);
                return Err(Error::invalid(who.op, "rank", "a process of its own for each", got));
            }
            Some(_) if has_written => {}
            // An old one is replaced, and what somebody has removed is written again.
            _ => {
                write_file(&own, hello.number, &hello.to_bytes(), who)?;
                has_written = true;
            }
        }
        // Rank 0 may have more ranks than this one thinks, or fewer.
        let bytes = read_file(path, LONGEST);
        let mut answers =
            bytes.iter().flat_map(|bytes| bytes.chunks(Answer::BYTES)).filter_map(Answer::parse);
        if let Some(answer) = answers.find(|answer| answer.number == hello.number) {
            // Rank 0 hears that it was heard, also of what does not fit.
            hello.token = answer.token;
            write_file(&own, hello.number, &hello.to_bytes(), who)?;
            return who.take(&answer);
        }
        if bytes.is_some() {
            noted = "the file has no answer to this rank, as one of an earlier run or of another program";
        }
        if who.is_late() {
            let reason =
                format!("rank 0 did not answer in {} within {:?}: {noted}", path.display(), who.timeout);
            let _ = fs::remove_file(&own);
            return Err(who.failed(reason));
        }
        std::thread::sleep(PAUSE.min(who.left()));
    }
}

#[cfg(test)]
#[path = "rendezvous_tests.rs"]
mod tests;
