//! Transposition as plain loops: the specification.

/// The matrices `[batch, rows, cols]` as `[batch, cols, rows]`; see [`super::Transpose`].
pub fn transpose<T: Copy>(x: &[T], rows: usize, cols: usize) -> Vec<T> {
    let of_matrix = |matrix: &[T]| -> Vec<T> {
        (0..cols)
            .flat_map(|col| (0..rows).map(move |row| (row, col)))
            .map(|(r, c)| matrix[r * cols + c])
            .collect()
    };
    x.chunks(rows * cols).flat_map(of_matrix).collect()
}
