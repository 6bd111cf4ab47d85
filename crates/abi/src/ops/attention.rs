//! Placeholder of attention.
