//! The vectors of AVX2 and AVX-512.

use std::arch::x86_64::*;

use abi::weight::e6m9_to_f32;

use super::{LANES, Lanes, Level};

#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

/// With products of pairs of bfloat16 (AVX512_BF16), or without.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const BF16: bool>(__m512);

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
        fn load_e6m9(from: &[u16; LANES]) -> Self {
            Avx2(e6m9_of_eight(from.as_ptr()), e6m9_of_eight(from.as_ptr().add(8)))
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
        fn halves(self) -> [Self; 2] {
            let upper = _mm256_castsi256_ps(_mm256_set1_epi32(0xffff_0000_u32 as i32));
            let lower = |numbers| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(numbers)));
            [
                Avx2(_mm256_and_ps(self.0, upper), _mm256_and_ps(self.1, upper)),
                Avx2(lower(self.0), lower(self.1)),
            ]
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
        fn prefetch(from: &[u8], at: usize) {
            // Of an address that is nothing's it is no more than a hint.
            _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(at).cast());
        }
        fn words(from: &[u8; 4 * LANES]) -> Self::Words {
            (_mm256_loadu_si256(from.as_ptr().cast()), _mm256_loadu_si256(from.as_ptr().add(32).cast()))
        }
        fn look_up(words: Self::Words, field: u32, table: Self) -> Self {
            Avx2(look_up_eight(words.0, field, table), look_up_eight(words.1, field, table))
        }
        fn integers(words: Self::Words, field: u32, zero: Self, _: Self) -> Self {
            // A table takes two permutations, which share a port.
            let number = |words: __m256i| {
                let fields = _mm256_srl_epi32(words, _mm_cvtsi32_si128(4 * field as i32));
                _mm256_cvtepi32_ps(_mm256_and_si256(fields, _mm256_set1_epi32(15)))
            };
            Avx2(_mm256_sub_ps(number(words.0), zero.0), _mm256_sub_ps(number(words.1), zero.1))
        }
    }
}

impl<const BF16: bool> Lanes for Avx512<BF16> {
    const SUMS: usize = 16;
    const LEVEL: Level = if BF16 { Level::Avx512Bf16 } else { Level::Avx512 };
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
        fn load_e6m9(from: &[u16; LANES]) -> Self {
            let codes = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            let most = _mm512_set1_epi32(0x7fff);
            let magnitude = _mm512_and_si512(codes, most);
            let bits = _mm512_add_epi32(_mm512_slli_epi32::<14>(magnitude), _mm512_set1_epi32(E6M9_BIAS));
            let bits = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(magnitude, magnitude), bits);
            let nan = _mm512_set1_epi32(0x7fc0_0000);
            let bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(magnitude, most), nan);
            let sign = _mm512_slli_epi32::<16>(_mm512_andnot_si512(most, codes));
            Avx512(_mm512_castsi512_ps(_mm512_or_si512(bits, sign)))
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
        fn halves(self) -> [Self; 2] {
            let bits = _mm512_castps_si512(self.0);
            [
                Avx512(_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32)))),
                Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))),
            ]
        }
        fn add_pairs(self, by: Self, sum: Self) -> Self {
            if BF16 {
                // The upper halves come first.
                let [own, by] = [self.0, by.0].map(|pairs| std::mem::transmute::<__m512, __m512bh>(pairs));
                Avx512(_mm512_dpbf16_ps(sum.0, own, by))
            } else {
                self.add_products_of_halves(by, sum)
            }
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
        fn prefetch(from: &[u8], at: usize) {
            // Of an address that is nothing's it is no more than a hint.
            _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(at).cast());
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

/// What a 1-6-9 float's exponent is less than that of f32, in the place where f32 has it.
const E6M9_BIAS: i32 = (e6m9_to_f32(1).to_bits() - (1 << 14)) as i32;

/// Eight 1-6-9 floats as numbers.
///
/// # Safety
/// The CPU has AVX2, and the codes are there.
#[inline(always)]
unsafe fn e6m9_of_eight(from: *const u16) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let codes = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        let most = _mm256_set1_epi32(0x7fff);
        let magnitude = _mm256_and_si256(codes, most);
        let bits = _mm256_add_epi32(_mm256_slli_epi32::<14>(magnitude), _mm256_set1_epi32(E6M9_BIAS));
        let is_zero = _mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256());
        let bits = _mm256_andnot_si256(is_zero, bits);
        let is_nan = _mm256_cmpeq_epi32(magnitude, most);
        let bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc0_0000), is_nan);
        let sign = _mm256_slli_epi32::<16>(_mm256_andnot_si256(most, codes));
        _mm256_castsi256_ps(_mm256_or_si256(bits, sign))
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
        let half = _mm256_add_epi32(_mm256_and_si256(upper, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
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
