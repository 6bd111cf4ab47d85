//! The append as plain loops: the specification.

/// `cache[slots[t]] = rows[t]` for rows of `width` elements; slots beyond the cache are skipped.
pub fn kv_append(rows: &[f64], slots: &[u32], cache: &mut [f64], width: usize) {
    for (row, &slot) in std::iter::zip(rows.chunks_exact(width), slots) {
        if let Some(target) = cache.chunks_exact_mut(width).nth(slot as usize) {
            target.copy_from_slice(row);
        }
    }
}
