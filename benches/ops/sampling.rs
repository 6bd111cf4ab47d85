//! Placeholder of sampling.
