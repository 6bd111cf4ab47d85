//! Arithmetic on packed pieces of 16 bytes.

use cuda_std::cvt::Element;

/// Elementwise sum of two packed pieces, rounded to `T`.
#[inline(always)]
pub fn add_packed<T: Element>(a: [u32; 4], b: [u32; 4]) -> [u32; 4] {
    let (mut x, mut y) = ([0.0; 8], [0.0; 8]);
    T::unpack(a, &mut x);
    T::unpack(b, &mut y);
    let mut j = 0;
    while j < T::PER_16_BYTES {
        x[j] += y[j];
        j += 1;
    }
    T::pack(&x)
}
