//! What examples write: to a reader that may have gone, and to a disk that may be full.

// Each example uses what it needs.
#![allow(dead_code)]

use std::fmt::Arguments;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

/// The status of a program whose reader has gone: what a shell shows for the signal that ends others there.
const CLOSED_PIPE: u8 = 128 + 13;
/// The status after Ctrl-C.
pub const INTERRUPTED: u8 = 128 + 2;

/// Why an example ends early.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The reader of standard output has gone: no error, but nothing more to do.
#[derive(Debug)]
struct ClosedPipe;

impl std::fmt::Display for ClosedPipe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the reader of standard output has gone")
    }
}

impl std::error::Error for ClosedPipe {}

/// Writes to standard output, at once.
pub fn write(text: Arguments<'_>) -> Result<(), Failure> {
    write_to(&mut io::stdout().lock(), text)
}

fn write_to(out: &mut dyn Write, text: Arguments<'_>) -> Result<(), Failure> {
    out.write_fmt(text).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => ClosedPipe.into(),
        _ => format!("cannot write to standard output: {error}").into(),
    })
}

/// Writes a line to standard error. If nobody can read it there is nobody to tell.
pub fn note(text: Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// The status of a program that ended so; what went wrong is written to standard error, with its causes.
pub fn end(program: &str, outcome: Result<ExitCode, Failure>) -> ExitCode {
    match outcome {
        Ok(code) => code,
        Err(error) if error.is::<ClosedPipe>() => ExitCode::from(CLOSED_PIPE),
        Err(error) => {
            let mut text = format!("{program}: {error}");
            let mut cause = error.source();
            while let Some(error) = cause {
                text += &format!(": {error}");
                cause = error.source();
            }
            note(format_args!("{}", printable(&text)));
            ExitCode::FAILURE
        }
    }
}

/// Text of a model for standard output: as it is, but without what steers a terminal where that is one.
pub fn for_reader(text: impl Into<String>) -> String {
    let text = text.into();
    if io::stdout().is_terminal() { printable(&text) } else { text }
}

/// Text from files without what steers a terminal.
pub fn printable(text: &str) -> String {
    let steers = |c: char| c.is_control() && c != '\n' && c != '\t';
    text.chars().map(|c| if steers(c) { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails with this.
    struct Broken(io::ErrorKind);

    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn endings() {
        let outcome = |kind| write_to(&mut Broken(kind), format_args!("x")).map(|()| ExitCode::SUCCESS);
        let closed = outcome(io::ErrorKind::BrokenPipe);
        assert_eq!(end("test", closed), ExitCode::from(141));
        let full = outcome(io::ErrorKind::StorageFull);
        let text = full.as_ref().map_err(|error| error.to_string()).unwrap_err();
        assert!(text.starts_with("cannot write to standard output: "), "{text}");
        assert_eq!(end("test", full), ExitCode::FAILURE);
        assert_eq!(end("test", Ok(ExitCode::SUCCESS)), ExitCode::SUCCESS);
        assert_eq!(printable("a\x1b[31mb\tc\n\u{9b}"), "a\u{fffd}[31mb\tc\n\u{fffd}");
    }
}
