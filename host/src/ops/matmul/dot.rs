//! Dot products on the CPU by the widest vectors that it has: what products of few rows are made of, which are bound by
//! reading their weights.
//!
//! A sum is that of fixed lanes, added up in a fixed order, so its bits depend on the CPU's vectors alone, not on
//! threads or on what else is computed.

use half::bf16;

/// An element that becomes f32 within the loop.
trait Lane: Copy {
    fn widen(self) -> f32;
}

impl Lane for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Lane for bf16 {
    /// Bit by bit: half's own conversion branches on NaN, which keeps the loop from being vectorised.
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

/// The sum of the products of elements in the same places; of slices of one length.
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f32 {
    widest(x, y)
}

/// The same with the second factors in bfloat16.
pub(crate) fn dot_bf16(x: &[f32], y: &[bf16]) -> f32 {
    widest(x, y)
}

fn widest<T: Lane>(x: &[f32], y: &[T]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the CPU has what the function is compiled for, as it has just said.
        return unsafe { by_avx2(x, y) };
    }
    by_lanes::<T, 16, false>(x, y)
}

/// Eight registers of sums, so that additions do not wait for each other.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn by_avx2<T: Lane>(x: &[f32], y: &[T]) -> f32 {
    by_lanes::<T, 64, true>(x, y)
}

#[inline(always)]
fn by_lanes<T: Lane, const LANES: usize, const FUSED: bool>(x: &[f32], y: &[T]) -> f32 {
    let add = |x: f32, y: f32, sum: f32| if FUSED { x.mul_add(y, sum) } else { x * y + sum };
    let mut lanes = [0.0f32; LANES];
    let (x, y) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let rest = std::iter::zip(x.remainder(), y.remainder()).fold(0.0, |sum, (&x, y)| add(x, y.widen(), sum));
    for (x, y) in std::iter::zip(x, y) {
        for i in 0..LANES {
            lanes[i] = add(x[i], y[i].widen(), lanes[i]);
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0] + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All lengths beside the lanes', against f64; both ways of adding.
    #[test]
    fn sums_of_any_length() {
        let value = |i: usize, seed: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0;
        for len in (0..200).chain([511, 512, 4097]) {
            let x: Vec<f32> = (0..len).map(|i| value(i, 1)).collect();
            let y: Vec<f32> = (0..len).map(|i| value(i, 2)).collect();
            let halves: Vec<bf16> = y.iter().map(|&y| bf16::from_f32(y)).collect();
            let want = |y: &dyn Fn(usize) -> f64| -> (f64, f64) {
                let products = (0..len).map(|i| f64::from(x[i]) * y(i));
                products.fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()))
            };
            let (sum, size) = want(&|i| f64::from(y[i]));
            let (half, half_size) = want(&|i| halves[i].to_f64());
            for (got, want, size) in [
                (dot(&x, &y), sum, size),
                (by_lanes::<_, 16, false>(&x, &y), sum, size),
                (dot_bf16(&x, &halves), half, half_size),
                (by_lanes::<_, 16, false>(&x, &halves), half, half_size),
            ] {
                assert!((f64::from(got) - want).abs() <= 1e-6 * size, "{len}: {got} {want}");
            }
        }
    }

    /// What is not finite comes through wherever it is.
    #[test]
    fn values_that_are_not_finite() {
        for len in [1, 63, 64, 65, 200] {
            for place in [0, len / 2, len - 1] {
                let mut y = vec![1.0; len];
                y[place] = f32::NAN;
                assert!(dot(&vec![1.0; len], &y).is_nan());
                y[place] = f32::INFINITY;
                assert_eq!(dot(&vec![1.0; len], &y), f32::INFINITY);
                let halves: Vec<bf16> = y.iter().map(|&y| bf16::from_f32(y)).collect();
                assert_eq!(dot_bf16(&vec![1.0; len], &halves), f32::INFINITY);
            }
        }
    }
}
