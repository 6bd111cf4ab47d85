//! What is known of every byte of a memory: who wrote it last, and who read it since.
//!
//! Kept per word of four bytes; a word that is accessed in parts keeps it per byte.

use std::vec;
use std::vec::Vec;

use super::clock::{Clock, Covers, Stamp};

/// How an access takes part in ordering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    /// A read through the read-only path, which does not see what the kernel itself writes.
    ConstantRead,
    Write,
    /// A read that may run against atomic writes: volatile, relaxed or acquire.
    AtomicRead,
    /// A read-modify-write, or a store that may run against others.
    AtomicWrite,
    /// Reads and writes of the asynchronous proxy on behalf of the clock's actor.
    AsyncRead,
    AsyncWrite,
}

impl Kind {
    fn is_write(self) -> bool {
        matches!(self, Kind::Write | Kind::AtomicWrite | Kind::AsyncWrite)
    }

    fn is_atomic(self) -> bool {
        matches!(self, Kind::AtomicRead | Kind::AtomicWrite)
    }

    fn is_async(self) -> bool {
        matches!(self, Kind::AsyncRead | Kind::AsyncWrite)
    }

    fn needs_value(self) -> bool {
        // An atomic store and a read-modify-write are not told apart here; the latter checks its value itself.
        matches!(self, Kind::Read | Kind::ConstantRead | Kind::AtomicRead | Kind::AsyncRead)
    }
}

/// Who accesses, and how.
pub(super) struct Access<'a> {
    pub(super) kind: Kind,
    /// Whose order it is in.
    pub(super) clock: &'a Clock,
    /// What is remembered: the clock's own stamp, or that of an asynchronous actor.
    pub(super) stamp: Stamp,
    /// The memory that this is the shadow of.
    pub(super) memory: Covers,
    /// Number of the source line.
    pub(super) line: u16,
    /// Drops one of three concurrent readers.
    pub(super) coin: bool,
}

/// What an access runs against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Conflict {
    Uninitialised,
    Forbidden,
    Mbarrier,
    /// An earlier access with no order between the two.
    Race {
        earlier: Stamp,
        line: u16,
        was: Kind,
    },
    /// Ordered, but the asynchronous proxy does not see it without a proxy fence.
    Proxy {
        earlier: Stamp,
        line: u16,
    },
    /// Ordered, but the read-only path does not see it at all.
    ReadOnly {
        earlier: Stamp,
        line: u16,
    },
}

#[derive(Clone, Copy, Debug)]
struct Cell {
    write: Stamp,
    /// Two readers since, neither before the other.
    reads: [Stamp; 2],
    write_line: u16,
    read_lines: [u16; 2],
    write_kind: Kind,
    /// The word is kept per byte, at this index + 1.
    split: u32,
}

const FRESH: Cell = Cell {
    write: Stamp::NEVER,
    reads: [Stamp::NEVER; 2],
    write_line: 0,
    read_lines: [0; 2],
    write_kind: Kind::Write,
    split: 0,
};

impl Cell {
    fn marked(mark: Stamp) -> Cell {
        Cell { write: mark, ..FRESH }
    }

    #[inline]
    fn access(&mut self, access: &Access<'_>) -> Result<(), Conflict> {
        let Access { kind, clock, stamp, memory, line, .. } = *access;
        let written = self.write;
        if written.is_mark() {
            match written {
                Stamp::FORBIDDEN => return Err(Conflict::Forbidden),
                Stamp::MBARRIER => return Err(Conflict::Mbarrier),
                Stamp::NEVER if kind.needs_value() => return Err(Conflict::Uninitialised),
                _ => {}
            }
        } else {
            let both_atomic = kind.is_atomic() && self.write_kind == Kind::AtomicWrite;
            if !both_atomic && !clock.is_after(written) {
                return Err(Conflict::Race { earlier: written, line: self.write_line, was: self.write_kind });
            }
            if kind.is_async() && !self.write_kind.is_async() && !clock.is_proxied(written, memory) {
                return Err(Conflict::Proxy { earlier: written, line: self.write_line });
            }
            if kind == Kind::ConstantRead {
                return Err(Conflict::ReadOnly { earlier: written, line: self.write_line });
            }
        }
        if kind.is_write() {
            for (read, line) in self.reads.into_iter().zip(self.read_lines) {
                if read != Stamp::NEVER && !clock.is_after(read) {
                    return Err(Conflict::Race { earlier: read, line, was: Kind::Read });
                }
            }
            *self = Cell { write: stamp, write_line: line, write_kind: kind, split: self.split, ..FRESH };
        } else if kind != Kind::AtomicRead {
            // A reader that lies before this one need not be remembered: whoever is after this one is after it.
            let replaceable = |read: Stamp| read == Stamp::NEVER || read == stamp || clock.is_after(read);
            let slot = if replaceable(self.reads[0]) {
                0
            } else if replaceable(self.reads[1]) || access.coin {
                1
            } else {
                return Ok(());
            };
            self.reads[slot] = stamp;
            self.read_lines[slot] = line;
        }
        Ok(())
    }

    /// After the kernel: what was written is there, and nobody is reading.
    fn settle(&mut self) {
        if !self.write.is_mark() {
            self.write = Stamp::HOST;
        }
        self.reads = [Stamp::NEVER; 2];
        self.write_kind = Kind::Write;
    }
}

const PAGE_WORDS: usize = 1024;

/// The shadow of a memory.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    words: Vec<Cell>,
    split: Vec<[Cell; 4]>,
    free: Vec<u32>,
    /// Which pages were accessed since the last `settle`.
    touched: Vec<bool>,
}

impl Shadow {
    pub(super) fn new(bytes: usize) -> Self {
        let words = bytes.div_ceil(4);
        Shadow {
            words: vec![FRESH; words],
            split: Vec::new(),
            free: Vec::new(),
            touched: vec![false; words.div_ceil(PAGE_WORDS)],
        }
    }

    /// The first of some bytes that kernels may not touch.
    pub(super) fn first_forbidden(&self, offset: usize, bytes: usize) -> Option<usize> {
        (offset..offset + bytes).find(|at| {
            let cell = self.words[at / 4];
            let cell = cell.split.checked_sub(1).map_or(cell, |index| self.split[index as usize][at % 4]);
            cell.write == Stamp::FORBIDDEN
        })
    }

    /// Checks an access of `bytes` bytes at `offset` and remembers it. On a conflict: the byte, and what it is.
    #[inline]
    pub(super) fn access(
        &mut self,
        offset: usize,
        bytes: usize,
        access: &Access<'_>,
    ) -> Result<(), (usize, Conflict)> {
        let end = offset + bytes;
        for page in offset / 4 / PAGE_WORDS..end.div_ceil(4).div_ceil(PAGE_WORDS) {
            self.touched[page] = true;
        }
        let mut at = offset;
        while at < end {
            let (word, first) = (at / 4, at % 4);
            let last = (end - word * 4).min(4);
            if last - first == 4 && self.words[word].split == 0 {
                self.words[word].access(access).map_err(|conflict| (at, conflict))?;
            } else {
                let index = self.split(word);
                for (byte, cell) in self.split[index][first..last].iter_mut().enumerate() {
                    cell.access(access).map_err(|conflict| (at + byte, conflict))?;
                }
                if last - first == 4 && access.kind.is_write() {
                    self.unite(word);
                }
            }
            at = word * 4 + last;
        }
        Ok(())
    }

    /// The index of the word's bytes.
    fn split(&mut self, word: usize) -> usize {
        let cell = self.words[word];
        if cell.split == 0 {
            let index = match self.free.pop() {
                Some(index) => index,
                None => {
                    self.split.push([FRESH; 4]);
                    self.split.len() as u32 - 1
                }
            };
            self.split[index as usize] = [cell; 4];
            self.words[word].split = index + 1;
        }
        self.words[word].split as usize - 1
    }

    /// All four bytes of the word are in the same state again.
    fn unite(&mut self, word: usize) {
        let index = self.words[word].split - 1;
        self.words[word] = Cell { split: 0, ..self.split[index as usize][0] };
        self.free.push(index);
    }

    /// Marks bytes, whatever was known of them.
    pub(super) fn mark(&mut self, offset: usize, bytes: usize, mark: Stamp) {
        let end = offset + bytes;
        let mut at = offset;
        while at < end {
            let (word, first) = (at / 4, at % 4);
            let last = (end - word * 4).min(4);
            if last - first == 4 {
                if self.words[word].split != 0 {
                    self.free.push(self.words[word].split - 1);
                }
                self.words[word] = Cell::marked(mark);
            } else {
                let index = self.split(word);
                self.split[index][first..last].fill(Cell::marked(mark));
            }
            at = word * 4 + last;
        }
    }

    /// The kernel has ended: everything it did is before what comes.
    pub(super) fn settle(&mut self) {
        for (page, touched) in self.touched.iter_mut().enumerate() {
            if !std::mem::take(touched) {
                continue;
            }
            let words = page * PAGE_WORDS..self.words.len().min((page + 1) * PAGE_WORDS);
            for word in &mut self.words[words] {
                if word.split != 0 {
                    self.split[word.split as usize - 1].iter_mut().for_each(Cell::settle);
                }
                word.settle();
            }
        }
    }
}
