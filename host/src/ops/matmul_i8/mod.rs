//! Placeholder of matmul_i8.
