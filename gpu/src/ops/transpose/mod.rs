//! Placeholder of transpose.
