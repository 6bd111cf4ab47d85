//! Placeholder of embedding.
