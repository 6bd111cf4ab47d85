//! Placeholder of copy.
