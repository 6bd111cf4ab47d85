//! Placeholder of rope.
