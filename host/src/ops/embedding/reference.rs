//! Embedding as plain loops: the specification.

/// Rows of `table` by index; see [`super::Embedding`]. NaN for ids that the table does not have.
pub fn embedding(table: &[f64], ids: &[u32], cols: usize) -> Vec<f64> {
    let mut out = Vec::with_capacity(ids.len() * cols);
    for &id in ids {
        match table.chunks_exact(cols.max(1)).nth(id as usize) {
            Some(row) => out.extend_from_slice(row),
            None => out.extend(std::iter::repeat_n(f64::NAN, cols)),
        }
    }
    out
}
