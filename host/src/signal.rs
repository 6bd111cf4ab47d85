//! What a driver's callback and a future have in common: feature `async`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

/// A point that something passes, and whom to wake then.
#[derive(Debug)]
pub(crate) struct Signal(Mutex<State>);

#[derive(Debug)]
enum State {
    /// Whom to wake, if anybody has asked.
    Waiting(Option<Waker>),
    /// The `CUresult` of all work before the point.
    Ended(u32),
}

impl Signal {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Signal(Mutex::new(State::Waiting(None))))
    }

    /// The point is passed, or never will be. Does not unwind, whatever the waker does.
    #[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code, reason = "work is done at once"))]
    pub(crate) fn end(&self, status: u32) {
        let before = std::mem::replace(&mut *self.lock(), State::Ended(status));
        if let State::Waiting(Some(waker)) = before
            && let Err(payload) = catch_unwind(AssertUnwindSafe(|| waker.wake()))
        {
            // Whose drop could panic again.
            std::mem::forget(payload);
        }
    }

    /// The status; none if the point is not passed yet, and `waker` will be woken then.
    pub(crate) fn poll(&self, waker: &Waker) -> Option<u32> {
        // A waker that is replaced is a stranger's code to drop: after the lock.
        let _before = match &mut *self.lock() {
            State::Ended(status) => return Some(*status),
            State::Waiting(Some(known)) if known.will_wake(waker) => None,
            State::Waiting(known) => known.replace(waker.clone()),
        };
        None
    }

    /// Nobody waits any more.
    pub(crate) fn leave(&self) {
        let _waker = match &mut *self.lock() {
            State::Waiting(waker) => waker.take(),
            State::Ended(_) => None,
        };
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one assignment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
