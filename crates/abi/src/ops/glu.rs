//! Placeholder of glu.
