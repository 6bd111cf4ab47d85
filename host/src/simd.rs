//! Vectors on the CPU: the code of an operator's inner loops is written once, for sixteen numbers at a time, and
//! compiled for each set of instructions. Which one the CPU has is found when the program runs.
//!
//! All levels from [`Level::Avx2`] on give the same bits: sixteen lanes, products added with one rounding, sums of the
//! lanes in one order. So does [`Level::Portable`] where the target has such an addition (aarch64), else it rounds
//! twice. Products of pairs ([`Lanes::add_pairs`]) are an exception where numbers are subnormal.

#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

use abi::DType;
use abi::weight::e6m9_to_f32;

use crate::tensor::FloatElement;

/// Numbers of a vector.
pub(crate) const LANES: usize = 16;

/// A set of instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// What the compiler makes of arrays for the target: SSE2, NEON.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 with its doublewords and bytes, and the above.
    Avx512,
    /// AVX512_BF16, and the above: products of pairs of bfloat16.
    Avx512Bf16,
}

impl Level {
    /// Those that this CPU has, the best one last.
    pub(crate) fn available() -> &'static [Level] {
        static AVAILABLE: OnceLock<Vec<Level>> = OnceLock::new();
        AVAILABLE.get_or_init(|| {
            #[allow(unused_mut)]
            let mut levels = vec![Level::Portable];
            #[cfg(target_arch = "x86_64")]
            {
                use std::arch::is_x86_feature_detected as has;
                if has!("avx2") && has!("fma") && has!("f16c") {
                    levels.push(Level::Avx2);
                    if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                        levels.push(Level::Avx512);
                        if has!("avx512bf16") {
                            levels.push(Level::Avx512Bf16);
                        }
                    }
                }
            }
            levels
        })
    }

    /// The best that this CPU has, or a lower one that the environment names: `WARPFORGE_CPU_VECTORS=portable`, `avx2`
    /// or `avx512`.
    pub(crate) fn best() -> Level {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| {
            let most = match std::env::var("WARPFORGE_CPU_VECTORS").as_deref() {
                Ok("portable") => Level::Portable,
                Ok("avx2") => Level::Avx2,
                Ok("avx512") => Level::Avx512,
                _ => Level::Avx512Bf16,
            };
            Level::available().iter().copied().filter(|&level| level <= most).max().unwrap_or(Level::Portable)
        })
    }
}

/// Code for any vectors. What it calls with vectors must be `#[inline(always)]`, which closures cannot be: else it is
/// compiled without the instructions, and each becomes a call.
pub(crate) trait Work {
    type Out;
    /// Whether it multiplies pairs of bfloat16: other work is not compiled for the level that has an instruction for
    /// these alone.
    const OF_PAIRS: bool = false;

    fn with<V: Lanes>(self) -> Self::Out;
}

/// Does the work by the best instructions that the CPU has.
#[inline]
pub(crate) fn by_best<W: Work>(work: W) -> W::Out {
    // SAFETY: `best` is one of `available`.
    unsafe { by_level(Level::best(), work) }
}

/// The same by these instructions, which the CPU must have.
#[cfg(test)]
pub(crate) fn by<W: Work>(level: Level, work: W) -> W::Out {
    assert!(Level::available().contains(&level));
    // SAFETY: the assertion.
    unsafe { by_level(level, work) }
}

/// # Safety
/// The CPU has the instructions.
#[inline]
unsafe fn by_level<W: Work>(level: Level, work: W) -> W::Out {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise.
        Level::Avx512Bf16 if W::OF_PAIRS => unsafe { by_avx512_bf16(work) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise, and a level has all instructions of those below it.
        Level::Avx512Bf16 | Level::Avx512 => unsafe { by_avx512(work) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 => unsafe { by_avx2(work) },
        _ => work.with::<Portable>(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn by_avx512_bf16<W: Work>(work: W) -> W::Out {
    work.with::<x86::Avx512<true>>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn by_avx512<W: Work>(work: W) -> W::Out {
    work.with::<x86::Avx512<false>>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn by_avx2<W: Work>(work: W) -> W::Out {
    work.with::<x86::Avx2>()
}

/// Sixteen numbers.
pub(crate) trait Lanes: Copy {
    /// Vectors that fit the registers as sums, beside what is added to them.
    const SUMS: usize;
    /// The instructions.
    #[cfg_attr(not(feature = "gemm"), allow(dead_code))]
    const LEVEL: Level;

    fn splat(value: f32) -> Self;
    fn load(from: &[f32; LANES]) -> Self;
    fn store(self, to: &mut [f32; LANES]);
    /// bfloat16 by their bits.
    fn load_bf16(from: &[u16; LANES]) -> Self;
    /// binary16 by their bits.
    fn load_f16(from: &[u16; LANES]) -> Self;
    /// Bytes as numbers from 0 to 255.
    fn load_bytes(from: &[u8; LANES]) -> Self;
    /// fp8 (e4m3) by their bits.
    fn load_e4m3(from: &[u8; LANES]) -> Self;
    /// 1-6-9 floats by their bits.
    fn load_e6m9(from: &[u16; LANES]) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// `self · by + sum`, with one rounding where the CPU has that.
    fn mul_add(self, by: Self, sum: Self) -> Self;

    /// The upper and the lower half of each lane, which are bfloat16, as numbers.
    fn halves(self) -> [Self; 2];
    /// The products of the upper halves are added to `sum`, then those of the lower halves, with one rounding each.
    #[inline(always)]
    fn add_products_of_halves(self, by: Self, sum: Self) -> Self {
        let ([upper, lower], [by_upper, by_lower]) = (self.halves(), by.halves());
        lower.mul_add(by_lower, upper.mul_add(by_upper, sum))
    }
    /// The same by one instruction, where the CPU has that, which takes subnormal numbers for zeros and makes zeros of
    /// them: halves, sums and results.
    #[inline(always)]
    fn add_pairs(self, by: Self, sum: Self) -> Self {
        self.add_products_of_halves(by, sum)
    }

    /// The larger ones; of a NaN in `self` and a number the number, of one in `other` NaN.
    fn max(self, other: Self) -> Self;
    /// Minus the magnitudes.
    fn neg_abs(self) -> Self;
    /// Where this has the sign bit `negative`, elsewhere `other`.
    fn where_negative(self, negative: Self, other: Self) -> Self;
    /// 2^(n + 32), for n from −158 to 95, of sums of n and [`ROUNDER`].
    fn power_of_two(self) -> Self;
    /// Rounds to nearest, to bfloat16 and binary16; a NaN stays one.
    fn store_bf16(self, to: &mut [u16; LANES]);
    fn store_f16(self, to: &mut [u16; LANES]);

    /// Brings the line so many bytes from the start of these to the cache, if the target can be told; it need not be
    /// theirs.
    fn prefetch(from: &[u8], at: usize);

    /// Sixteen words of 32 bits, as eight fields of four bits each.
    type Words: Copy;

    fn words(from: &[u8; 4 * LANES]) -> Self::Words;
    /// For each word the number that its field stands for in the table.
    fn look_up(words: Self::Words, field: u32, table: Self) -> Self;
    /// For each word its field as a number, less `zero`: the numbers of this table.
    #[inline(always)]
    fn integers(words: Self::Words, field: u32, _zero: Self, less_zero: Self) -> Self {
        Self::look_up(words, field, less_zero)
    }

    /// The sum of the lanes: halves, quarters, pairs.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes);
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
            width /= 2;
        }
        lanes[0]
    }
}

/// Sixteen elements as numbers.
#[inline(always)]
pub(crate) fn load<V: Lanes, T: FloatElement>(from: &[T; LANES]) -> V {
    match T::DTYPE {
        DType::F16 => V::load_f16(bytemuck::cast_ref(from)),
        DType::BF16 => V::load_bf16(bytemuck::cast_ref(from)),
        _ => V::load(bytemuck::cast_ref(from)),
    }
}

/// Sixteen numbers, rounded, as elements.
#[inline(always)]
pub(crate) fn store<V: Lanes, T: FloatElement>(numbers: V, to: &mut [T; LANES]) {
    match T::DTYPE {
        DType::F16 => numbers.store_f16(bytemuck::cast_mut(to)),
        DType::BF16 => numbers.store_bf16(bytemuck::cast_mut(to)),
        _ => numbers.store(bytemuck::cast_mut(to)),
    }
}

/// The first of sixteen numbers, as many as there is room for.
#[inline(always)]
pub(crate) fn store_rest<V: Lanes, T: FloatElement>(numbers: V, to: &mut [T]) {
    if let Ok(to) = to.try_into() {
        return store(numbers, to);
    }
    let mut all = [T::zeroed(); LANES];
    store(numbers, &mut all);
    to.copy_from_slice(&all[..to.len()]);
}

/// The last elements, at most sixteen, and zeros.
#[inline(always)]
pub(crate) fn load_rest<V: Lanes, T: FloatElement>(rest: &[T]) -> V {
    if let Ok(all) = rest.try_into() {
        return load(all);
    }
    let mut padded = [T::zeroed(); LANES];
    padded[..rest.len()].copy_from_slice(rest);
    load(&padded)
}

/// A number that is added to round to an integer, which is then in the lowest bits of the sum.
pub(crate) const ROUNDER: f32 = 12_582_912.0; // 1.5 · 2^23

/// e^x for x up to 0, within 2 ulps.
#[inline(always)]
pub(crate) fn exp<V: Lanes>(x: V) -> V {
    // ln 2 in two parts, the first with zeros at the end: its product with n is exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    // Of (e^r − 1 − r) / r², for r up to ½ ln 2 (Cephes).
    const TERMS: [f32; 6] = [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    // Below that it is 0.
    let x = V::splat(-104.0).max(x);
    let rounded = x.mul_add(V::splat(std::f32::consts::LOG2_E), V::splat(ROUNDER));
    let n = rounded.sub(V::splat(ROUNDER));
    let r = n.mul_add(V::splat(-LN_2[1]), n.mul_add(V::splat(-LN_2[0]), x));
    let mut sum = V::splat(TERMS[0]);
    for term in &TERMS[1..] {
        sum = sum.mul_add(r, V::splat(*term));
    }
    // Not at once: the power of two may be subnormal, and the result then has fewer digits.
    let scaled = sum.mul_add(r.mul(r), r.add(V::splat(1.0))).mul(rounded.power_of_two());
    scaled.mul(V::splat(1.0 / (1u64 << 32) as f32))
}

/// An array, for any target.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Portable([f32; LANES]);

/// Whether the target adds a product with one rounding; elsewhere `mul_add` would be a call.
const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

impl Portable {
    #[inline(always)]
    fn each(value: impl Fn(usize) -> f32) -> Self {
        let mut lanes = [0.0; LANES];
        for (i, lane) in lanes.iter_mut().enumerate() {
            *lane = value(i);
        }
        Portable(lanes)
    }
}

/// Without a branch, so that loops over it become vectors.
#[inline(always)]
fn f16_to_f32(bits: u16) -> f32 {
    let bits = u32::from(bits);
    // Exponent and mantissa where f32 has them, and its bias made up for: right for subnormals too.
    let value = f32::from_bits((bits & 0x7fff) << 13) * 2f32.powi(112);
    let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(value.to_bits() | special | (bits & 0x8000) << 16)
}

impl Lanes for Portable {
    const SUMS: usize = 4;
    const LEVEL: Level = Level::Portable;
    type Words = [u32; LANES];

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Portable([value; LANES])
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        Portable(*from)
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        *to = self.0;
    }

    #[inline(always)]
    fn load_bf16(from: &[u16; LANES]) -> Self {
        Self::each(|i| f32::from_bits(u32::from(from[i]) << 16))
    }

    #[inline(always)]
    fn load_f16(from: &[u16; LANES]) -> Self {
        Self::each(|i| f16_to_f32(from[i]))
    }

    #[inline(always)]
    fn load_bytes(from: &[u8; LANES]) -> Self {
        Self::each(|i| f32::from(from[i]))
    }

    #[inline(always)]
    fn load_e4m3(from: &[u8; LANES]) -> Self {
        Self::each(|i| {
            let code = u32::from(from[i]);
            let value = f32::from_bits((code & 0x80) << 24 | (code & 0x7f) << 20) * 2f32.powi(120);
            if code & 0x7f == 0x7f { f32::NAN } else { value }
        })
    }

    #[inline(always)]
    fn load_e6m9(from: &[u16; LANES]) -> Self {
        Self::each(|i| e6m9_to_f32(from[i]))
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self::each(|i| self.0[i] + other.0[i])
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self::each(|i| self.0[i] - other.0[i])
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self::each(|i| self.0[i] * other.0[i])
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self::each(|i| self.0[i] / other.0[i])
    }

    #[inline(always)]
    fn mul_add(self, by: Self, sum: Self) -> Self {
        Self::each(
            |i| if FUSED { self.0[i].mul_add(by.0[i], sum.0[i]) } else { self.0[i] * by.0[i] + sum.0[i] },
        )
    }

    #[inline(always)]
    fn halves(self) -> [Self; 2] {
        [
            Self::each(|i| f32::from_bits(self.0[i].to_bits() & 0xffff_0000)),
            Self::each(|i| f32::from_bits(self.0[i].to_bits() << 16)),
        ]
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self::each(|i| if self.0[i] > other.0[i] { self.0[i] } else { other.0[i] })
    }

    #[inline(always)]
    fn neg_abs(self) -> Self {
        Self::each(|i| -self.0[i].abs())
    }

    #[inline(always)]
    fn where_negative(self, negative: Self, other: Self) -> Self {
        Self::each(|i| if self.0[i].is_sign_negative() { negative.0[i] } else { other.0[i] })
    }

    #[inline(always)]
    fn power_of_two(self) -> Self {
        Self::each(|i| f32::from_bits((self.0[i].to_bits() << 23).wrapping_add(159 << 23)))
    }

    #[inline(always)]
    fn store_bf16(self, to: &mut [u16; LANES]) {
        for (to, value) in std::iter::zip(to, self.0) {
            let bits = value.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            let quiet = bits >> 16 | 0x40;
            *to = if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded } as u16;
        }
    }

    #[inline(always)]
    fn store_f16(self, to: &mut [u16; LANES]) {
        for (to, value) in std::iter::zip(to, self.0) {
            *to = half::f16::from_f32(value).to_bits();
        }
    }

    #[inline(always)]
    fn prefetch(_: &[u8], _: usize) {}

    #[inline(always)]
    fn words(from: &[u8; 4 * LANES]) -> Self::Words {
        let mut words: [u32; LANES] = bytemuck::cast(*from);
        for word in &mut words {
            *word = u32::from_le(*word);
        }
        words
    }

    #[inline(always)]
    fn look_up(words: Self::Words, field: u32, table: Self) -> Self {
        Self::each(|i| table.0[(words[i] >> (4 * field) & 15) as usize])
    }
}
