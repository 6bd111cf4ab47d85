//! Runs a kernel's two forms and judges what came of them.

use std::ops::Range;
use std::panic::Location;

use cuda_std::sim::{Defect, Launch, Memory, Report, simulate};
use cuda_std::thread;

/// Which form of a kernel runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// With the defect.
    Broken,
    /// Without it.
    Repaired,
}

/// Series of seeds, each of which must find the defect.
const SERIES: u64 = 4;
/// Seeds with which the repaired form must pass.
const REPAIRED_SEEDS: u64 = 50;

/// A kernel with a defect, and what it is launched with.
pub struct Defective {
    /// The text of the kernel's file.
    source: &'static str,
    launch: Launch<'static>,
    repaired: Launch<'static>,
    buffers: Vec<Buffer>,
}

struct Buffer {
    name: &'static str,
    words: usize,
    /// Its words before the launch; uninitialised if there are none.
    before: Option<Vec<u32>>,
    /// Bytes that kernels may not touch.
    gaps: Vec<Range<usize>>,
    /// Its words after the repaired kernel.
    after: Option<Vec<u32>>,
}

impl Defective {
    /// `source` is the text of the file in which the function `launch.kernel` stands.
    pub fn new(source: &'static str, launch: Launch<'static>) -> Self {
        Defective { source, launch, repaired: launch, buffers: Vec::new() }
    }

    /// The repaired form is launched otherwise.
    pub fn repaired(self, launch: Launch<'static>) -> Self {
        Defective { repaired: launch, ..self }
    }

    fn buffer(
        mut self,
        name: &'static str,
        words: usize,
        before: Option<Vec<u32>>,
        after: Option<Vec<u32>>,
    ) -> Self {
        self.buffers.push(Buffer { name, words, before, gaps: Vec::new(), after });
        self
    }

    /// A buffer with these words.
    pub fn input(self, name: &'static str, words: impl IntoIterator<Item = u32>) -> Self {
        let words: Vec<u32> = words.into_iter().collect();
        self.buffer(name, words.len(), Some(words), None)
    }

    /// A buffer of so many uninitialised words, whose contents in the end do not matter.
    pub fn scratch(self, name: &'static str, words: usize) -> Self {
        self.buffer(name, words, None, None)
    }

    /// An uninitialised buffer, and what the repaired kernel writes there.
    pub fn output(self, name: &'static str, after: impl IntoIterator<Item = u32>) -> Self {
        let after: Vec<u32> = after.into_iter().collect();
        self.buffer(name, after.len(), None, Some(after))
    }

    /// A buffer that holds `before`, and what the repaired kernel makes of it.
    pub fn in_place(
        self,
        name: &'static str,
        before: impl IntoIterator<Item = u32>,
        after: impl IntoIterator<Item = u32>,
    ) -> Self {
        let after: Vec<u32> = after.into_iter().collect();
        self.buffer(name, after.len(), Some(before.into_iter().collect()), Some(after))
    }

    /// Bytes of the last buffer that belong to nobody.
    pub fn gap(mut self, bytes: Range<usize>) -> Self {
        self.buffers.last_mut().expect("a buffer before its gap").gaps.push(bytes);
        self
    }

    /// Asserts that of any `seeds` seeds in a row one reports this defect with a text that contains `text`, and that
    /// the repaired form passes and gives the right result. `kernel` gets the buffers' addresses in order.
    #[track_caller]
    pub fn caught<const N: usize>(
        &self,
        seeds: u64,
        defect: Defect,
        text: &str,
        kernel: impl Fn(Form, [u64; N]),
    ) {
        let file = Location::caller().file();
        for first in (0..SERIES).map(|series| series * seeds) {
            let reports: Vec<Report> = (first..first + seeds)
                .filter_map(|seed| self.run(Form::Broken, seed, &kernel).err())
                .collect();
            let fits = |report: &&Report| report.defect == defect && report.text.contains(text);
            let Some(report) = reports.iter().find(fits) else {
                let seeds = format!("with seeds {first} to {}", first + seeds - 1);
                let reports: Vec<String> = reports.iter().map(|r| format!("{:?}: {r}\n", r.defect)).collect();
                panic!(
                    "{}: {seeds} no {defect:?} with {text:?}, but:\n{}",
                    self.launch.kernel,
                    reports.concat()
                );
            };
            self.check_lines(report, file);
        }
        for seed in 0..REPAIRED_SEEDS {
            let contents =
                self.run(Form::Repaired, seed, &kernel).unwrap_or_else(|report| panic!("repaired: {report}"));
            for (buffer, found) in self.buffers.iter().zip(contents) {
                let Some(expected) = &buffer.after else { continue };
                assert_eq!(found, *expected, "{}, `{}`, seed {seed}", self.repaired.kernel, buffer.name);
            }
        }
    }

    /// Runs one form and returns the buffers' words.
    fn run<const N: usize>(
        &self,
        form: Form,
        seed: u64,
        kernel: impl Fn(Form, [u64; N]),
    ) -> Result<Vec<Vec<u32>>, Report> {
        let mut memory = Memory::new();
        let addresses: Vec<u64> = self.buffers.iter().map(|buffer| buffer.allocate(&mut memory)).collect();
        let arguments: [u64; N] = addresses[..].try_into().expect("as many buffers as the kernel takes");
        let launch = match form {
            Form::Broken => self.launch,
            Form::Repaired => self.repaired,
        };
        simulate(&mut memory, &launch.seed(seed), || kernel(form, arguments))?;
        let read = |(buffer, address): (&Buffer, u64)| {
            let mut bytes = vec![0; 4 * buffer.words];
            memory.read(address, &mut bytes);
            bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
        };
        Ok(self.buffers.iter().zip(addresses).map(read).collect())
    }

    /// The report blames a line marked `reported`, or none if there is none; its text mentions one marked `named`, if
    /// there are such; and either of them is one marked `cause`.
    fn check_lines(&self, report: &Report, file: &str) {
        let message = report.to_string();
        let kernel = self.launch.kernel;
        assert!(message.starts_with(&format!("kernel `{kernel}`")), "{message}");
        let reported = self.marked("reported");
        match report.location {
            Some(location) => {
                assert!(report.thread.is_some(), "{message}");
                assert_eq!(location.file(), file, "{message}");
                assert!(reported.contains(&location.line()), "expected one of lines {reported:?}: {message}");
            }
            None => assert_eq!(reported, [], "a line: {message}"),
        }
        for (mark, text) in [("named", &report.text), ("cause", &message)] {
            let lines = self.marked(mark);
            let mentioned = |line: &u32| {
                let place = format!("{file}:{line}");
                let ends = |rest: &str| rest.chars().next().is_none_or(|next| !next.is_ascii_digit());
                text.match_indices(&place).any(|(at, _)| ends(&text[at + place.len()..]))
            };
            let found = lines.is_empty() || lines.iter().any(mentioned);
            assert!(found, "expected one of lines {lines:?} ({mark}): {message}");
        }
    }

    /// The lines of the kernel with a mark.
    fn marked(&self, mark: &str) -> Vec<u32> {
        let head = format!("fn {}(", self.launch.kernel);
        let lines = self.source.lines().enumerate().skip_while(|(_, line)| !line.contains(&head));
        let mut lines = lines.take_while(|(_, line)| *line != "}").peekable();
        assert!(lines.peek().is_some(), "no function {}", self.launch.kernel);
        let has = |line: &str| {
            line.split_once("// ").is_some_and(|(_, comment)| comment.split(", ").any(|word| word == mark))
        };
        lines.filter(|(_, line)| has(line)).map(|(index, _)| index as u32 + 1).collect()
    }
}

impl Buffer {
    fn allocate(&self, memory: &mut Memory) -> u64 {
        let address = memory.allocate(self.name, 4 * self.words);
        if let Some(words) = &self.before {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            memory.write(address, &bytes);
        }
        for gap in &self.gaps {
            memory.forbid(address + gap.start as u64, gap.len());
        }
        address
    }
}

/// The launch of a kernel by its name, with so many blocks and threads in a block.
pub fn launch(kernel: &'static str, blocks: u32, threads: u32) -> Launch<'static> {
    Launch::new(kernel, [blocks, 1, 1], [threads, 1, 1])
}

/// The bits of each value.
pub fn floats(values: impl IntoIterator<Item = f32>) -> Vec<u32> {
    values.into_iter().map(f32::to_bits).collect()
}

/// The thread's index in its block.
pub fn tid() -> u32 {
    thread::thread_idx_x()
}

/// The block's index in the grid.
pub fn bid() -> u32 {
    thread::block_idx_x()
}
