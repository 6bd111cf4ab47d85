//! Vectors on the CPU: the code of an operator's inner loops is written once, for sixteen numbers at a time, and
//! compiled for each set of instructions. Which one the CPU has is found when the program runs.
//!
//! [`Level::Avx512`] and [`Level::Avx2`] give the same bits: sixteen lanes, products added with one rounding, sums of
//! the lanes in one order. So does [`Level::Portable`] where the target has such an addition (aarch64), else it rounds
//! twice.

use std::sync::OnceLock;

use abi::DType;

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
                    }
                }
            }
            levels
        })
    }

    /// The best that this CPU has, or a lower one that the environment names: `WARPFORGE_CPU_VECTORS=portable` or
    /// `avx2`.
    pub(crate) fn best() -> Level {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| {
            let most = match std::env::var("WARPFORGE_CPU_VECTORS").as_deref() {
                Ok("portable") => Level::Portable,
                Ok("avx2") => Level::Avx2,
                _ => Level::Avx512,
            };
            Level::available().iter().copied().filter(|&level| level <= most).max().unwrap_or(Level::Portable)
        })
    }
}

/// Code for any vectors. What it calls with vectors must be `#[inline(always)]`, which closures cannot be: else it is
/// compiled without the instructions, and each becomes a call.
pub(crate) trait Work {
    type Out;

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
        Level::Avx512 => unsafe { by_avx512(work) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx2 => unsafe { by_avx2(work) },
        _ => work.with::<Portable>(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn by_avx512<W: Work>(work: W) -> W::Out {
    work.with::<x86::Avx512>()
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
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// `self · by + sum`, with one rounding where the CPU has that.
    fn mul_add(self, by: Self, sum: Self) -> Self;

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

    /// Brings the line of the first byte to the cache, if there is one and the target can be told.
    fn prefetch(from: &[u8]);

    /// Sixteen words of 32 bits, as eight fields of four bits each.
    type Words: Copy;

    fn words(from: &[u8; 4 * LANES]) -> Self::Words;
    /// For each word the number that its field stands for in the table.
    fn look_up(words: Self::Words, field: u32, table: Self) -> Self;

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
    fn prefetch(_: &[u8]) {}

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

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{LANES, Lanes, Level};

    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(__m256, __m256);

    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(__m512);

    /// Methods whose bodies are intrinsics.
    macro_rules! methods {
        ($($(#[$attribute:meta])* fn $name:ident($($argument:tt)*) $(-> $out:ty)? $body:block)*) => {$(
            $(#[$attribute])*
            #[inline(always)]
            fn $name($($argument)*) $(-> $out)? {
                // SAFETY: reached through `super::by_level` alone, where the CPU has the instructions; loads and stores
                // are within the arrays that are passed, and need no alignment.
                unsafe { $body }
            }
        )*};
    }

    impl Lanes for Avx2 {
        const SUMS: usize = 4;
        const LEVEL: Level = Level::Avx2;
        type Words = (__m256i, __m256i);

        methods! {
            fn splat(value: f32) -> Self {
                Avx2(_mm256_set1_ps(value), _mm256_set1_ps(value))
            }
            fn load(from: &[f32; LANES]) -> Self {
                Avx2(_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8)))
            }
            fn store(self, to: &mut [f32; LANES]) {
                _mm256_storeu_ps(to.as_mut_ptr(), self.0);
                _mm256_storeu_ps(to.as_mut_ptr().add(8), self.1);
            }
            fn load_bf16(from: &[u16; LANES]) -> Self {
                let lower = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
                let upper = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().add(8).cast()));
                Avx2(
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(lower)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(upper)),
                )
            }
            fn load_f16(from: &[u16; LANES]) -> Self {
                let lower = _mm_loadu_si128(from.as_ptr().cast());
                let upper = _mm_loadu_si128(from.as_ptr().add(8).cast());
                Avx2(_mm256_cvtph_ps(lower), _mm256_cvtph_ps(upper))
            }
            fn load_bytes(from: &[u8; LANES]) -> Self {
                let lower = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.as_ptr().cast()));
                let upper = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.as_ptr().add(8).cast()));
                Avx2(_mm256_cvtepi32_ps(lower), _mm256_cvtepi32_ps(upper))
            }
            fn load_e4m3(from: &[u8; LANES]) -> Self {
                let halves = e4m3_as_f16(from);
                let scale = _mm256_set1_ps(256.0);
                Avx2(
                    _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), scale),
                    _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)), scale),
                )
            }
            fn add(self, other: Self) -> Self {
                Avx2(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1))
            }
            fn sub(self, other: Self) -> Self {
                Avx2(_mm256_sub_ps(self.0, other.0), _mm256_sub_ps(self.1, other.1))
            }
            fn mul(self, other: Self) -> Self {
                Avx2(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1))
            }
            fn div(self, other: Self) -> Self {
                Avx2(_mm256_div_ps(self.0, other.0), _mm256_div_ps(self.1, other.1))
            }
            fn mul_add(self, by: Self, sum: Self) -> Self {
                Avx2(_mm256_fmadd_ps(self.0, by.0, sum.0), _mm256_fmadd_ps(self.1, by.1, sum.1))
            }
            fn max(self, other: Self) -> Self {
                Avx2(_mm256_max_ps(self.0, other.0), _mm256_max_ps(self.1, other.1))
            }
            fn neg_abs(self) -> Self {
                let sign = _mm256_set1_ps(-0.0);
                Avx2(_mm256_or_ps(self.0, sign), _mm256_or_ps(self.1, sign))
            }
            fn where_negative(self, negative: Self, other: Self) -> Self {
                Avx2(
                    _mm256_blendv_ps(other.0, negative.0, self.0),
                    _mm256_blendv_ps(other.1, negative.1, self.1),
                )
            }
            fn power_of_two(self) -> Self {
                let one = _mm256_set1_epi32(159 << 23);
                let lower = _mm256_slli_epi32::<23>(_mm256_castps_si256(self.0));
                let upper = _mm256_slli_epi32::<23>(_mm256_castps_si256(self.1));
                Avx2(
                    _mm256_castsi256_ps(_mm256_add_epi32(lower, one)),
                    _mm256_castsi256_ps(_mm256_add_epi32(upper, one)),
                )
            }
            fn store_bf16(self, to: &mut [u16; LANES]) {
                // Packed within halves, whose middle quarters then change places.
                let packed = _mm256_packus_epi32(bf16_of_eight(self.0), bf16_of_eight(self.1));
                _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
            }
            fn store_f16(self, to: &mut [u16; LANES]) {
                let lower = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
                let upper = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1);
                _mm_storeu_si128(to.as_mut_ptr().cast(), lower);
                _mm_storeu_si128(to.as_mut_ptr().add(8).cast(), upper);
            }
            fn prefetch(from: &[u8]) {
                _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().cast());
            }
            fn words(from: &[u8; 4 * LANES]) -> Self::Words {
                (_mm256_loadu_si256(from.as_ptr().cast()), _mm256_loadu_si256(from.as_ptr().add(32).cast()))
            }
            fn look_up(words: Self::Words, field: u32, table: Self) -> Self {
                Avx2(look_up_eight(words.0, field, table), look_up_eight(words.1, field, table))
            }
        }
    }

    impl Lanes for Avx512 {
        const SUMS: usize = 16;
        const LEVEL: Level = Level::Avx512;
        type Words = __m512i;

        methods! {
            fn splat(value: f32) -> Self {
                Avx512(_mm512_set1_ps(value))
            }
            fn load(from: &[f32; LANES]) -> Self {
                Avx512(_mm512_loadu_ps(from.as_ptr()))
            }
            fn store(self, to: &mut [f32; LANES]) {
                _mm512_storeu_ps(to.as_mut_ptr(), self.0);
            }
            fn load_bf16(from: &[u16; LANES]) -> Self {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
                Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)))
            }
            fn load_f16(from: &[u16; LANES]) -> Self {
                Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
            }
            fn load_bytes(from: &[u8; LANES]) -> Self {
                Avx512(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()))))
            }
            fn load_e4m3(from: &[u8; LANES]) -> Self {
                Avx512(_mm512_mul_ps(_mm512_cvtph_ps(e4m3_as_f16(from)), _mm512_set1_ps(256.0)))
            }
            fn add(self, other: Self) -> Self {
                Avx512(_mm512_add_ps(self.0, other.0))
            }
            fn sub(self, other: Self) -> Self {
                Avx512(_mm512_sub_ps(self.0, other.0))
            }
            fn mul(self, other: Self) -> Self {
                Avx512(_mm512_mul_ps(self.0, other.0))
            }
            fn div(self, other: Self) -> Self {
                Avx512(_mm512_div_ps(self.0, other.0))
            }
            fn mul_add(self, by: Self, sum: Self) -> Self {
                Avx512(_mm512_fmadd_ps(self.0, by.0, sum.0))
            }
            fn max(self, other: Self) -> Self {
                Avx512(_mm512_max_ps(self.0, other.0))
            }
            fn neg_abs(self) -> Self {
                Avx512(_mm512_or_ps(self.0, _mm512_set1_ps(-0.0)))
            }
            fn where_negative(self, negative: Self, other: Self) -> Self {
                Avx512(_mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(self.0)), other.0, negative.0))
            }
            fn power_of_two(self) -> Self {
                let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(self.0));
                Avx512(_mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(159 << 23))))
            }
            fn store_bf16(self, to: &mut [u16; LANES]) {
                let bits = _mm512_castps_si512(self.0);
                let upper = _mm512_srli_epi32::<16>(bits);
                let half = _mm512_add_epi32(_mm512_and_si512(upper, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
                let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
                let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
                let quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
                let rounded = _mm512_mask_blend_epi32(is_nan, rounded, quiet);
                _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(rounded));
            }
            fn store_f16(self, to: &mut [u16; LANES]) {
                let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
                _mm256_storeu_si256(to.as_mut_ptr().cast(), halves);
            }
            fn prefetch(from: &[u8]) {
                _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().cast());
            }
            fn words(from: &[u8; 4 * LANES]) -> Self::Words {
                _mm512_loadu_si512(from.as_ptr().cast())
            }
            fn look_up(words: Self::Words, field: u32, table: Self) -> Self {
                let index = _mm512_srl_epi32(words, _mm_cvtsi32_si128(4 * field as i32));
                Avx512(_mm512_permutexvar_ps(index, table.0))
            }
        }
    }

    /// Eight numbers as bfloat16, each in a word.
    ///
    /// # Safety
    /// The CPU has AVX2.
    #[inline(always)]
    unsafe fn bf16_of_eight(numbers: __m256) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            let bits = _mm256_castps_si256(numbers);
            let upper = _mm256_srli_epi32::<16>(bits);
            let half =
                _mm256_add_epi32(_mm256_and_si256(upper, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
            let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(numbers, numbers));
            _mm256_blendv_epi8(rounded, _mm256_or_si256(upper, _mm256_set1_epi32(0x40)), is_nan)
        }
    }

    /// The numbers of a table that fields of eight words stand for.
    ///
    /// # Safety
    /// The CPU has AVX2.
    #[inline(always)]
    unsafe fn look_up_eight(words: __m256i, field: u32, table: Avx2) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            let index = _mm256_srl_epi32(words, _mm_cvtsi32_si128(4 * field as i32));
            let lower = _mm256_permutevar8x32_ps(table.0, index);
            let upper = _mm256_permutevar8x32_ps(table.1, index);
            // The fourth bit of the field, where a blend looks.
            _mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index)))
        }
    }

    /// A 256th of each as binary16, which has a place for every bit; NaN as NaN.
    ///
    /// # Safety
    /// The CPU has AVX2.
    #[inline(always)]
    unsafe fn e4m3_as_f16(from: &[u8; LANES]) -> __m256i {
        // SAFETY: the caller's promise; the load is within the array.
        unsafe {
            let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.as_ptr().cast()));
            // Sign in the highest bit, then a bit of no use, then exponent and mantissa.
            let halves = _mm256_and_si256(_mm256_slli_epi16::<7>(wide), _mm256_set1_epi16(0xbf80_u16 as i16));
            let most = _mm256_set1_epi16(0x3f80);
            let is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(halves, most), most);
            _mm256_or_si256(halves, is_nan)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fp8::F8E4M3;
    use half::{bf16, f16};

    /// What a vector's lanes are.
    fn lanes<V: Lanes>(vector: V) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        vector.store(&mut lanes);
        lanes
    }

    fn same(got: f32, want: f32) -> bool {
        got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan()
    }

    /// Every code of 8 and 16 bits becomes its value, by all instructions.
    struct Widened;

    impl Work for Widened {
        type Out = ();

        #[inline(always)]
        fn with<V: Lanes>(self) {
            for first in (0..=u16::MAX).step_by(LANES) {
                let bits: [u16; LANES] = std::array::from_fn(|i| first + i as u16);
                let of_bf16 = lanes(V::load_bf16(&bits));
                let of_f16 = lanes(V::load_f16(&bits));
                for i in 0..LANES {
                    assert!(
                        same(of_bf16[i], bf16::from_bits(bits[i]).to_f32()),
                        "{:?} {:x}",
                        V::LEVEL,
                        bits[i]
                    );
                    assert!(
                        same(of_f16[i], f16::from_bits(bits[i]).to_f32()),
                        "{:?} {:x}",
                        V::LEVEL,
                        bits[i]
                    );
                }
            }
            for first in (0..=u8::MAX).step_by(LANES) {
                let codes: [u8; LANES] = std::array::from_fn(|i| first + i as u8);
                let (bytes, floats) = (lanes(V::load_bytes(&codes)), lanes(V::load_e4m3(&codes)));
                for i in 0..LANES {
                    assert_eq!(bytes[i], f32::from(codes[i]));
                    assert!(same(floats[i], F8E4M3(codes[i]).to_f32()), "{:?} {}", V::LEVEL, codes[i]);
                }
            }
        }
    }

    /// Every field of a word finds every place of a table.
    struct Fields;

    impl Work for Fields {
        type Out = ();

        #[inline(always)]
        fn with<V: Lanes>(self) {
            let table: [f32; LANES] = std::array::from_fn(|i| i as f32 * 1.5 - 7.0);
            let bytes: [u8; 4 * LANES] = std::array::from_fn(|i| (i * 167 % 256) as u8);
            for field in 0..8 {
                let got = lanes(V::look_up(V::words(&bytes), field, V::load(&table)));
                for i in 0..LANES {
                    let byte = bytes[4 * i + field as usize / 2];
                    assert_eq!(got[i], table[usize::from(byte >> (4 * (field % 2)) & 15)], "{:?}", V::LEVEL);
                }
            }
        }
    }

    /// Arithmetic lane by lane, and the sum of the lanes.
    struct Arithmetic;

    impl Work for Arithmetic {
        type Out = f32;

        #[inline(always)]
        fn with<V: Lanes>(self) -> f32 {
            let of = |seed: usize| -> [f32; LANES] {
                std::array::from_fn(|i| ((i + seed) * 7919 % 2003) as f32 / 1001.5 - 1.0)
            };
            let (a, b, c) = (of(1), of(2), of(3));
            let [x, y, z] = [&a, &b, &c].map(V::load);
            for i in 0..LANES {
                assert_eq!(lanes(x.add(y))[i], a[i] + b[i]);
                assert_eq!(lanes(x.sub(y))[i], a[i] - b[i]);
                assert_eq!(lanes(x.mul(y))[i], a[i] * b[i]);
                assert_eq!(lanes(V::splat(c[i]))[i], c[i]);
                let fused = lanes(x.mul_add(y, z))[i];
                let want = if V::LEVEL == Level::Portable && !FUSED {
                    a[i] * b[i] + c[i]
                } else {
                    a[i].mul_add(b[i], c[i])
                };
                assert_eq!(fused, want);
            }
            x.sum()
        }
    }

    /// Numbers of every exponent, with few bits of mantissa and with many.
    fn numbers() -> impl Iterator<Item = f32> {
        (0..=u16::MAX).flat_map(|bits| {
            [0, 1, 0x7fff, 0x8000, 0x8001].map(|low| f32::from_bits(u32::from(bits) << 16 | low))
        })
    }

    /// Every number is rounded as `half` does, by all instructions.
    struct Rounded;

    impl Work for Rounded {
        type Out = ();

        #[inline(always)]
        fn with<V: Lanes>(self) {
            let all: Vec<f32> = numbers().collect();
            for values in all.as_chunks().0 {
                let (mut bf16s, mut f16s) = ([0; LANES], [0; LANES]);
                V::load(values).store_bf16(&mut bf16s);
                V::load(values).store_f16(&mut f16s);
                for i in 0..LANES {
                    let (b, h) = (bf16::from_bits(bf16s[i]).to_f32(), f16::from_bits(f16s[i]).to_f32());
                    assert!(same(b, bf16::from_f32(values[i]).to_f32()), "{:?} {}", V::LEVEL, values[i]);
                    assert!(same(h, f16::from_f32(values[i]).to_f32()), "{:?} {}", V::LEVEL, values[i]);
                }
            }
        }
    }

    /// Powers of e within 2 ulps, also subnormal ones, NaN and −inf; and what chooses.
    struct Powers;

    impl Work for Powers {
        type Out = ();

        #[inline(always)]
        fn with<V: Lanes>(self) {
            let negative =
                (0..200_000).map(|i| -(i as f32) * 5.3e-4).chain([-0.0, f32::NEG_INFINITY, f32::NAN]);
            let all: Vec<f32> = negative.chain(numbers().filter(|x| *x < 0.0)).collect();
            for values in all.as_chunks().0 {
                let got = lanes(exp(V::load(values)));
                for (&x, got) in std::iter::zip(values, got) {
                    let want = f64::from(x).exp();
                    if x.is_nan() {
                        assert!(got.is_nan());
                    } else {
                        let error = (f64::from(got) - want).abs();
                        let ulp = f64::from(f32::EPSILON) * want.max(f32::MIN_POSITIVE.into());
                        assert!(error <= 2.0 * ulp, "{:?} {x}: {got} {error}", V::LEVEL);
                    }
                }
            }
            let mut x = [0.0; LANES];
            x[..6].copy_from_slice(&[1.0, -1.0, -0.0, f32::NAN, f32::NEG_INFINITY, 3.0]);
            let v = V::load(&x);
            assert_eq!(lanes(v.neg_abs())[..3], [-1.0, -1.0, 0.0]);
            assert_eq!(lanes(V::splat(0.5).max(v))[..3], [1.0, 0.5, 0.5]);
            assert!(lanes(V::splat(0.5).max(v))[3].is_nan());
            assert_eq!(lanes(v.where_negative(V::splat(7.0), V::splat(8.0)))[..3], [8.0, 7.0, 7.0]);
            assert_eq!(lanes(v.div(V::splat(2.0)))[5], 1.5);
        }
    }

    #[test]
    fn all_instructions_agree() {
        let mut sums = Vec::new();
        for &level in Level::available() {
            by(level, Widened);
            by(level, Fields);
            by(level, Rounded);
            by(level, Powers);
            sums.push(by(level, Arithmetic).to_bits());
        }
        assert!(sums.iter().all(|&sum| sum == sums[0]), "{sums:?}");
    }
}
