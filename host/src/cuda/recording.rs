//! Recordings, and what must not happen while there are any.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

/// Read-locked while a graph is recorded. The driver ends every recording of a context, with an error, when someone waits for
/// the whole context meanwhile; and all devices of an ordinal share its primary context.
static RECORDING: RwLock<()> = RwLock::new(());

/// What keeps recordings from beginning.
pub(super) struct NoRecording {
    _none: RwLockWriteGuard<'static, ()>,
    _only: MutexGuard<'static, ()>,
}

impl NoRecording {
    /// None while a graph is recorded; waits for another of its kind.
    pub(super) fn begin() -> Option<Self> {
        // Of its own, or one that waits for its device would look like a recording to the others.
        static ONLY: Mutex<()> = Mutex::new(());
        let only = ONLY.lock().unwrap_or_else(PoisonError::into_inner);
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
