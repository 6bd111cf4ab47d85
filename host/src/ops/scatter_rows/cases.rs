//! Shapes that occur, for tests and benches.

use crate::ops::Store;

/// One shape.
#[derive(Clone, Copy, Debug)]
pub struct ScatterRowsCase {
    /// Model and phase.
    pub name: &'static str,
    /// Rows that are moved.
    pub rows: usize,
    /// Rows that they are moved among.
    pub num_rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// What becomes of what is there.
    pub store: Store,
}

const fn case(name: &'static str, rows: usize, num_rows: usize, store: Store) -> ScatterRowsCase {
    ScatterRowsCase { name, rows, num_rows, cols: 2048, store }
}

/// The shapes: features of images into the rows of a prompt.
pub const CASES: &[ScatterRowsCase] = &[
    case("qwen3-vl-2b images prefill 16384", 8192, 16384, Store::Replace),
    case("qwen3-vl-2b images prefill 2048", 1024, 2048, Store::Replace),
    case("qwen3-vl-2b deepstack prefill 16384", 8192, 16384, Store::Add),
    case("qwen3-vl-2b deepstack prefill 2048", 1024, 2048, Store::Add),
];
