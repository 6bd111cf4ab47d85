//! Recordings, and what must not happen while there are any.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

/// Read-locked while a graph is recorded. The driver ends every recording of a context, with an error, when someone
/// waits for the whole context meanwhile; and all devices of an ordinal share its primary context.
static RECORDING: RwLock<()> = RwLock::new(());

/// What keeps recordings from beginning.
pub(super) struct NoRecording {
    _none: RwLockWriteGuard<'static, ()>,
    _only: MutexGuard<'static, ()>,
}

/// Of its own, or one that waits for its device would look like a recording to the others.
static ONLY: Mutex<()> = Mutex::new(());

impl NoRecording {
    /// None while a graph is recorded; waits for another of its kind.
    pub(super) fn begin() -> Option<Self> {
        Self::with(ONLY.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The same without waiting: none also while there is another of its kind.
    pub(super) fn try_begin() -> Option<Self> {
        match ONLY.try_lock() {
            Ok(only) => Self::with(only),
            Err(TryLockError::Poisoned(poisoned)) => Self::with(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn with(only: MutexGuard<'static, ()>) -> Option<Self> {
        let none = match RECORDING.try_write() {
            Ok(none) => none,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(NoRecording { _none: none, _only: only })
    }
}

/// A recording, while which nobody waits for a whole context.
pub(super) fn begin() -> RwLockReadGuard<'static, ()> {
    RECORDING.read().unwrap_or_else(PoisonError::into_inner)
}
