//! Ctrl-C: once ends an answer at a token, twice the program.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::output::{Failure, INTERRUPTED};

/// An answer is being written, which ends at its next token.
static WRITING: AtomicBool = AtomicBool::new(false);
/// Ctrl-C was pressed meanwhile.
static PRESSED: AtomicBool = AtomicBool::new(false);

/// From now on. Before, while a model is loaded, Ctrl-C ends the program as it does others.
pub fn watch() -> Result<(), Failure> {
    ctrlc::set_handler(|| {
        if !WRITING.load(Ordering::SeqCst) || PRESSED.swap(true, Ordering::SeqCst) {
            std::process::exit(INTERRUPTED.into());
        }
    })
    .map_err(|error| format!("cannot watch for Ctrl-C: {error}").into())
}

/// While an answer is written; dropped at its end.
pub struct Answer(());

impl Answer {
    pub fn begin() -> Self {
        PRESSED.store(false, Ordering::SeqCst);
        WRITING.store(true, Ordering::SeqCst);
        Answer(())
    }

    /// Whether it is to end here.
    pub fn is_interrupted(&self) -> bool {
        PRESSED.load(Ordering::SeqCst)
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        WRITING.store(false, Ordering::SeqCst);
    }
}
