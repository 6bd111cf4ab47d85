//! Resizing pixels, with the bits of the library that models were trained with.

/// Resizes rows of `channels` interleaved bytes from `(height, width)` to another height and width, by a cubic filter
/// (a = −½) that is widened where it shrinks the image, first along rows and then along columns.
///
/// **Arithmetic**: weights are normalised in f64 and rounded to 22 bits behind the point; sums are exact, rounded half
/// up, and clamped to 0 to 255 after *each* of the two passes. So the result is that of `resize` with `BICUBIC` in
/// Pillow 10 to 12, bit for bit; Pillow 13 goes along columns first where that is less work.
pub(super) fn resize(
    pixels: &[u8],
    (height, width): (usize, usize),
    (new_height, new_width): (usize, usize),
    channels: usize,
) -> Vec<u8> {
    let (columns, rows) = (Taps::all(width, new_width), Taps::all(height, new_height));
    let along_rows: Vec<u8> = if new_width == width {
        pixels.to_vec()
    } else {
        let row = |row: &[u8]| -> Vec<u8> {
            let of = |taps: &Taps, channel: usize| taps.sum(|x| row[x * channels + channel]);
            columns.iter().flat_map(|taps| (0..channels).map(move |channel| of(taps, channel))).collect()
        };
        pixels.chunks(width * channels).flat_map(row).collect()
    };
    if new_height == height {
        return along_rows;
    }
    let stride = new_width * channels;
    let column = |taps: &Taps, x: usize| taps.sum(|y| along_rows[y * stride + x]);
    rows.iter().flat_map(|taps| (0..stride).map(move |x| column(taps, x))).collect()
}

/// Bits behind the point of a weight: 8 for a pixel and 2 for the sum of the weights' absolute values stay free in 32.
const PRECISION: u32 = 32 - 8 - 2;

/// What a pixel of the result is made of.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

impl Taps {
    /// Of each of `to` pixels from `from`.
    fn all(from: usize, to: usize) -> Vec<Taps> {
        let scale = from as f64 / to as f64;
        let stretch = scale.max(1.0);
        let support = 2.0 * stretch;
        let taps = |pixel: usize| {
            let center = (pixel as f64 + 0.5) * scale;
            // Casts cut off, and make 0 of what is below it.
            let first = (center - support + 0.5) as usize;
            let end = ((center + support + 0.5) as usize).min(from);
            // Products with the inverse, as there: quotients have other bits.
            let inverse = 1.0 / stretch;
            let weight = |x: usize| cubic((x as f64 - center + 0.5) * inverse);
            let weights: Vec<f64> = (first..end).map(weight).collect();
            let sum: f64 = weights.iter().sum();
            let fixed = |weight: &f64| {
                let weight = if sum == 0.0 { *weight } else { weight / sum } * f64::from(1 << PRECISION);
                (weight + if weight < 0.0 { -0.5 } else { 0.5 }) as i32
            };
            Taps { first, weights: weights.iter().map(fixed).collect() }
        };
        (0..to).map(taps).collect()
    }

    fn sum(&self, pixel: impl Fn(usize) -> u8) -> u8 {
        let half = 1 << (PRECISION - 1);
        let product = |(tap, weight): (usize, &i32)| i32::from(pixel(self.first + tap)) * weight;
        let sum = half + self.weights.iter().enumerate().map(product).sum::<i32>();
        (sum >> PRECISION).clamp(0, 255) as u8
    }
}

fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A generator that the script of the golden values has too.
    fn noise(seed: u32, len: usize, hard: bool) -> Vec<u8> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        // Black and white are what the sums overshoot at.
        (0..len).map(|_| if hard { if next() < 128 { 0 } else { 255 } } else { next() }).collect()
    }

    fn fnv(bytes: &[u8]) -> u64 {
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }

    /// Sizes, seed, black and white or not, and the hash of what PIL makes of it.
    const GOLDEN: &str = include_str!("resize_golden.txt");

    #[test]
    fn bits_of_pil() {
        let mut cases = 0;
        for line in GOLDEN.lines().filter(|line| !line.starts_with('#')) {
            let fields: Vec<&str> = line.split(' ').collect();
            let number = |field: usize| fields[field].parse::<usize>().unwrap();
            let (from, to) = ((number(0), number(1)), (number(2), number(3)));
            let (seed, hard) = (number(4) as u32, number(5) == 1);
            let pixels = noise(seed, from.0 * from.1 * 3, hard);
            let got = resize(&pixels, from, to, 3);
            assert_eq!(got.len(), to.0 * to.1 * 3, "{line}");
            assert_eq!(format!("{:016x}", fnv(&got)), fields[6], "{line}: begins with {:?}", &got[..3]);
            cases += 1;
        }
        assert_eq!(cases, 120);
    }
}
