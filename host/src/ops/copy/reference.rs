//! Strided copy and cast as plain loops: the specification.

/// The elements of a strided tensor in order, outermost dimension first.
pub fn gather<T: Copy>(data: &[T], shape: &[usize], strides: &[usize]) -> Vec<T> {
    let mut offsets = vec![0];
    for (&size, &stride) in std::iter::zip(shape, strides) {
        let inner = |start: usize| (0..size).map(move |i| start + i * stride);
        offsets = offsets.into_iter().flat_map(inner).collect();
    }
    offsets.into_iter().map(|offset| data[offset]).collect()
}

/// Copies `values`, given in order, to a strided tensor, each rounded by `store`; see [`super::Copy`].
pub fn scatter<T: Copy>(
    values: &[T],
    data: &mut [T],
    shape: &[usize],
    strides: &[usize],
    store: impl Fn(T) -> T,
) {
    let places: Vec<usize> = (0..data.len()).collect();
    for (place, &value) in gather(&places, shape, strides).into_iter().zip(values) {
        data[place] = store(value);
    }
}
