//! Placeholder of matmul.
