//! What tensor cores compute.
//!
//! Products are exact. A sum takes a block of k and the accumulator together: every term is shifted to the largest
//! exponent among them and cut off some bits below it; the cut terms are added exactly, and the sum is rounded towards
//! zero to f32 (to nearest even for f16). NaN comes out as 0x7fffffff (0x7fff), a zero sum as +0, and subnormal numbers
//! count. Blocks follow one another in the order of k. This is the model of Xie et al., "MMA-Sim: Bit-Accurate
//! Reference Model of Tensor Cores and Matrix Cores" (arXiv 2511.10909, 2025), which others confirm (Khattak and
//! Mikaitis, arXiv 2512.07004); [`Summation`] has its numbers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::vec::Vec;

use super::fragment;
use super::swizzle::Operand;
use crate::wgmma::Accumulate;

/// The forms of `mma.sync`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum MmaKind {
    /// m16n8k16, bf16 to f32.
    Bf16,
    /// m16n8k16, f16 to f32.
    F16,
    /// m16n8k16, f16 to f16.
    F16ToF16,
    /// m16n8k8, tf32 to f32.
    Tf32,
    /// m16n8k32, s8 to s32.
    S8,
}

/// The element types of `wgmma`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum WgmmaKind {
    /// k16, to f32.
    Bf16,
    /// k16, to f32.
    F16,
    /// k8, to f32.
    Tf32,
    /// k32, to f32.
    E4m3,
    /// k32, to s32.
    S8,
}

/// Which index of an operand in shared memory is contiguous.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Major {
    /// k.
    K,
    /// m or n.
    Mn,
}

/// Tensor cores that differ in how they sum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Generation {
    /// Compute capability 8.0.
    Ampere,
    /// Compute capability 9.0.
    Hopper,
}

/// How products are summed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Summation {
    /// Products that are added at once, with the accumulator.
    pub block: usize,
    /// Bits after the point that a term keeps when it is shifted to the largest exponent.
    pub fraction_bits: u32,
    /// Bits after the point of an f32 result.
    pub result_bits: u32,
}

impl Summation {
    /// For elements of a bits: 8 (e4m3), 16, or 32 (tf32).
    const fn new(generation: Generation, bits: u32) -> Self {
        // A block is what the hardware does at once, in bytes of k.
        let (bytes, fraction_bits) = match generation {
            Generation::Ampere => (16, 24),
            Generation::Hopper => (32, 25),
        };
        let block = bytes * 8 / bits as usize;
        match bits {
            8 => Summation { block, fraction_bits: 13, result_bits: 13 },
            _ => Summation { block, fraction_bits, result_bits: 23 },
        }
    }
}

/// The first operand of `wgmma`, as a thread gives it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WgmmaA {
    /// In shared memory.
    Shared {
        /// The 64 bits of the descriptor.
        descriptor: u64,
        /// Its contiguous index.
        major: Major,
    },
    /// The thread's part.
    Registers([u32; 4]),
}

/// A floating-point format: bits of exponent and mantissa.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Format {
    exponent: u32,
    mantissa: u32,
    /// Whether the largest exponent means infinity and NaN; else (e4m3) only all ones are NaN.
    infinity: bool,
}

const F32: Format = Format { exponent: 8, mantissa: 23, infinity: true };
const BF16: Format = Format { exponent: 8, mantissa: 7, infinity: true };
const F16: Format = Format { exponent: 5, mantissa: 10, infinity: true };
const TF32: Format = Format { exponent: 8, mantissa: 10, infinity: true };
const E4M3: Format = Format { exponent: 4, mantissa: 3, infinity: false };

/// A number taken apart: `significand · 2^exponent`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Number {
    Nan,
    Infinity { negative: bool },
    Finite { significand: i64, exponent: i32 },
}

impl Format {
    const fn bias(self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }

    fn decode(self, bits: u32) -> Number {
        let negative = bits >> (self.exponent + self.mantissa) & 1 == 1;
        let exponent = bits >> self.mantissa & ((1 << self.exponent) - 1);
        let mantissa = bits & ((1 << self.mantissa) - 1);
        let ones = exponent == (1 << self.exponent) - 1;
        match (self.infinity, ones) {
            (true, true) if mantissa == 0 => return Number::Infinity { negative },
            (true, true) => return Number::Nan,
            (false, true) if mantissa == (1 << self.mantissa) - 1 => return Number::Nan,
            _ => {}
        }
        let hidden = if exponent == 0 { 0 } else { 1 << self.mantissa };
        let significand = i64::from(mantissa | hidden);
        Number::Finite {
            significand: if negative { -significand } else { significand },
            // Subnormal numbers have the exponent of the smallest normal ones.
            exponent: exponent.max(1) as i32 - self.bias() - self.mantissa as i32,
        }
    }
}

impl Format {
    /// Significand, and the exponent of the point after its first bit.
    fn at_point(self, number: Number) -> (i64, i32) {
        match number {
            Number::Finite { significand, exponent } if significand != 0 => {
                (significand, exponent + self.mantissa as i32)
            }
            _ => (0, ZERO),
        }
    }
}

/// A format for sums.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Result {
    /// f32, rounded towards zero to so many bits after the point.
    F32(u32),
    /// f16, to nearest even.
    F16,
}

impl Result {
    const fn format(self) -> Format {
        match self {
            Result::F32(_) => F32,
            Result::F16 => F16,
        }
    }

    const fn nan(self) -> u32 {
        match self {
            Result::F32(_) => 0x7fff_ffff,
            Result::F16 => 0x7fff,
        }
    }

    const fn infinity(self, negative: bool) -> u32 {
        let Format { exponent, mantissa, .. } = self.format();
        ((1 << exponent) - 1) << mantissa | (negative as u32) << (exponent + mantissa)
    }

    /// `sum · 2^exponent` rounded.
    fn round(self, sum: i64, exponent: i32) -> u32 {
        let format = self.format();
        if sum == 0 {
            return 0;
        }
        let magnitude = sum.unsigned_abs();
        let leading = magnitude.ilog2() as i32 + exponent;
        let bits = match self {
            Result::F32(bits) => bits,
            Result::F16 => format.mantissa,
        };
        // The last place that stays.
        let last = leading.max(1 - format.bias()) - bits as i32;
        let drop = last - exponent;
        let mut kept = match drop {
            ..=0 => magnitude << -drop,
            1..=63 => magnitude >> drop,
            _ => 0,
        };
        if self == Result::F16 && (1..=64).contains(&drop) {
            let rest = magnitude & (u64::MAX >> (64 - drop));
            let half = 1 << (drop - 1);
            kept += u64::from(rest > half || (rest == half && kept & 1 == 1));
        }
        // With the hidden bit the mantissa adds one to the exponent; a carry out of the mantissa adds another.
        let stored = kept << (format.mantissa - bits);
        let exponent_field = (last + bits as i32 + format.bias() - 1) as u64;
        let code = (exponent_field << format.mantissa) + stored;
        let negative = sum < 0;
        let infinity = self.infinity(false);
        let code = u32::try_from(code).map_or(infinity, |code| code.min(infinity));
        code | u32::from(negative) << (format.exponent + format.mantissa)
    }
}

/// Numbers of a row of a or a column of b, for the sums of their products.
struct Vector {
    /// Significand and the exponent of the point after its first bit; a zero's exponent is below all others.
    finite: Vec<(i64, i32)>,
    /// The numbers, if one of them is infinite or NaN.
    special: Option<Vec<Number>>,
}

/// The exponent of zeros.
const ZERO: i32 = -10_000;

impl Vector {
    fn new(format: Format, bits: impl Iterator<Item = u32>) -> Self {
        let numbers: Vec<Number> = bits.map(|bits| format.decode(bits)).collect();
        let finite = numbers.iter().map(|number| format.at_point(*number)).collect();
        let is_special = numbers.iter().any(|number| !matches!(number, Number::Finite { .. }));
        Vector { finite, special: is_special.then_some(numbers) }
    }

    /// Infinity or NaN at `i`, else any finite number that is zero exactly if this one is.
    fn number(&self, i: usize) -> Number {
        match &self.special {
            Some(numbers) => numbers[i],
            None => Number::Finite { significand: self.finite[i].0, exponent: 0 },
        }
    }
}

/// Whether the product of two numbers is infinite (and negative), NaN, or neither.
fn special_product(a: Number, b: Number) -> Option<Number> {
    let is_negative = |number| match number {
        Number::Infinity { negative } => negative,
        Number::Finite { significand, .. } => significand < 0,
        Number::Nan => false,
    };
    match (a, b) {
        (Number::Nan, _) | (_, Number::Nan) => Some(Number::Nan),
        (Number::Finite { .. }, Number::Finite { .. }) => None,
        (Number::Finite { significand: 0, .. }, _) | (_, Number::Finite { significand: 0, .. }) => {
            Some(Number::Nan)
        }
        _ => Some(Number::Infinity { negative: is_negative(a) != is_negative(b) }),
    }
}

/// An accumulator plus the products of a row and a column, for floating-point types.
#[derive(Clone, Copy, Debug)]
struct Dot {
    element: Format,
    summation: Summation,
    result: Result,
}

impl Dot {
    fn sum(&self, a: &Vector, b: &Vector, accumulator: u32) -> u32 {
        if a.special.is_some() || b.special.is_some() {
            return self.special_sum(a, b, accumulator);
        }
        let block = self.summation.block;
        let blocks = a.finite.chunks(block).zip(b.finite.chunks(block));
        blocks.fold(accumulator, |sum, (a, b)| self.block(a, b, sum))
    }

    /// A sum with infinite or NaN factors: it does not matter where the blocks end.
    fn special_sum(&self, a: &Vector, b: &Vector, accumulator: u32) -> u32 {
        let products = (0..a.finite.len()).filter_map(|i| special_product(a.number(i), b.number(i)));
        let (mut nan, mut infinite) = (false, [false; 2]);
        for term in products.chain([self.result.format().decode(accumulator)]) {
            match term {
                Number::Nan => nan = true,
                Number::Infinity { negative } => infinite[usize::from(negative)] = true,
                Number::Finite { .. } => {}
            }
        }
        match infinite {
            _ if nan => self.result.nan(),
            [true, false] => self.result.infinity(false),
            [false, true] => self.result.infinity(true),
            _ => self.result.nan(),
        }
    }

    fn block(&self, a: &[(i64, i32)], b: &[(i64, i32)], accumulator: u32) -> u32 {
        let Dot { element, summation: Summation { fraction_bits, .. }, result } = *self;
        let format = result.format();
        let accumulated = format.decode(accumulator);
        match accumulated {
            Number::Nan => return result.nan(),
            Number::Infinity { negative } => return result.infinity(negative),
            Number::Finite { .. } => {}
        }
        let (c, c_exponent) = format.at_point(accumulated);
        let largest = a.iter().zip(b).fold(c_exponent, |largest, (a, b)| largest.max(a.1 + b.1));
        let last = largest - fraction_bits as i32;
        let products =
            a.iter().zip(b).map(|(a, b)| cut(a.0 * b.0, a.1 + b.1 - 2 * element.mantissa as i32 - last));
        let sum = products.sum::<i64>() + cut(c, c_exponent - format.mantissa as i32 - last);
        result.round(sum, last)
    }
}

/// `significand · 2^shift` without what is after the point.
fn cut(significand: i64, shift: i32) -> i64 {
    match shift {
        0.. => significand << shift.min(63),
        // Towards zero, hence by magnitude.
        -63..0 => significand.signum() * (significand.unsigned_abs() >> -shift) as i64,
        _ => 0,
    }
}

impl MmaKind {
    /// Bits of an element of a and b.
    pub const fn element_bits(self) -> u32 {
        match self {
            MmaKind::Bf16 | MmaKind::F16 | MmaKind::F16ToF16 => 16,
            MmaKind::Tf32 => 32,
            MmaKind::S8 => 8,
        }
    }

    /// How its sums go; `None` for integers.
    pub const fn summation(self, generation: Generation) -> Option<Summation> {
        match self {
            MmaKind::S8 => None,
            _ => Some(Summation::new(generation, self.element_bits())),
        }
    }

    fn dot(self, generation: Generation) -> Option<Dot> {
        let summation = self.summation(generation)?;
        let f32 = Result::F32(summation.result_bits);
        let (element, result) = match self {
            MmaKind::Bf16 => (BF16, f32),
            MmaKind::F16 => (F16, f32),
            MmaKind::F16ToF16 => (F16, Result::F16),
            MmaKind::Tf32 => (TF32, f32),
            MmaKind::S8 => return None,
        };
        Some(Dot { element, summation, result })
    }
}

impl WgmmaKind {
    /// Bytes of an element of a and b.
    pub const fn element_bytes(self) -> u32 {
        match self {
            WgmmaKind::Bf16 | WgmmaKind::F16 => 2,
            WgmmaKind::Tf32 => 4,
            WgmmaKind::E4m3 | WgmmaKind::S8 => 1,
        }
    }

    /// The extent of k.
    pub const fn k(self) -> u32 {
        32 / self.element_bytes()
    }

    /// How its sums go; `None` for integers.
    pub const fn summation(self) -> Option<Summation> {
        match self {
            WgmmaKind::S8 => None,
            _ => Some(Summation::new(Generation::Hopper, 8 * self.element_bytes())),
        }
    }

    fn dot(self) -> Option<Dot> {
        let summation = self.summation()?;
        let element = match self {
            WgmmaKind::Bf16 => BF16,
            WgmmaKind::F16 => F16,
            WgmmaKind::Tf32 => TF32,
            WgmmaKind::E4m3 => E4M3,
            WgmmaKind::S8 => return None,
        };
        Some(Dot { element, summation, result: Result::F32(summation.result_bits) })
    }
}

/// The exact products of signed bytes, added wrapping.
fn dot_s8(a: &[u32], b: &[u32], accumulator: u32) -> u32 {
    let signed = |bits: u32| i32::from(bits as u8 as i8);
    a.iter().zip(b).fold(accumulator as i32, |sum, (&a, &b)| sum.wrapping_add(signed(a) * signed(b))) as u32
}

/// Elements of a row by row, or of b column by column, by their bits.
struct Elements {
    k: usize,
    bits: Vec<u32>,
}

impl Elements {
    fn vectors(&self, format: Format) -> Vec<Vector> {
        // tf32 are the upper 19 bits of an f32.
        let shift = if format == TF32 { 13 } else { 0 };
        self.bits
            .chunks(self.k)
            .map(|bits| Vector::new(format, bits.iter().map(|bits| bits >> shift)))
            .collect()
    }
}

/// `update` gets every row and column, and what adds their product to an accumulator.
fn multiply(
    dot: Option<Dot>,
    a: &Elements,
    b: &Elements,
    mut update: impl FnMut(usize, usize, &dyn Fn(u32) -> u32),
) {
    match dot {
        Some(dot) => {
            let (a, b) = (a.vectors(dot.element), b.vectors(dot.element));
            for (row, a) in a.iter().enumerate() {
                for (column, b) in b.iter().enumerate() {
                    update(row, column, &|c| dot.sum(a, b, c));
                }
            }
        }
        None => {
            for (row, a) in a.bits.chunks(a.k).enumerate() {
                for (column, b) in b.bits.chunks(b.k).enumerate() {
                    update(row, column, &|c| dot_s8(a, b, c));
                }
            }
        }
    }
}

/// The elements of a in the registers of a warp.
fn fragment_a(registers: &[[u32; 4]; 32], bits: u32) -> Elements {
    let k = 256 / bits as usize;
    let elements = (0..16 * k).map(|i| fragment::a(i / k, i % k, bits).get(registers, bits)).collect();
    Elements { k, bits: elements }
}

/// `mma.sync`, all lanes at once: d = a·b + c. Of an f16 c and d only the first two registers count.
pub fn mma(
    kind: MmaKind,
    generation: Generation,
    a: &[[u32; 4]; 32],
    b: &[[u32; 2]; 32],
    c: &[[u32; 4]; 32],
) -> [[u32; 4]; 32] {
    let bits = kind.element_bits();
    let k = 256 / bits as usize;
    let result_bits = if kind == MmaKind::F16ToF16 { 16 } else { 32 };
    let columns = (0..8 * k).map(|i| fragment::b(i % k, i / k, bits).get(b, bits)).collect();
    let mut d = [[0; 4]; 32];
    multiply(
        kind.dot(generation),
        &fragment_a(a, bits),
        &Elements { k, bits: columns },
        |row, column, sum| {
            let place = fragment::d(row, column, result_bits);
            place.set(&mut d, result_bits, sum(place.get(c, result_bits)));
        },
    );
    d
}

/// The first operand of `wgmma`, for one of the four warps.
#[derive(Clone, Copy, Debug)]
pub enum WarpA<'a> {
    /// In shared memory, all 64 rows.
    Shared(Operand),
    /// In the registers of the warp's lanes.
    Registers(&'a [[u32; 4]; 32]),
}

/// The part of one of the four warps in `wgmma.mma_async`: rows `16·warp` to `16·warp + 15`.
///
/// `d` has the registers of the warp's lanes one lane after another, n/2 each. `read` gives 16 bytes of shared memory;
/// it is asked once for each that the warp's part of a and the whole of b need, and its error ends the multiplication.
pub fn wgmma<E>(
    kind: WgmmaKind,
    warp: usize,
    a: WarpA<'_>,
    b: Operand,
    accumulate: Accumulate,
    mut read: impl FnMut(u32) -> core::result::Result<[u8; 16], E>,
    d: &mut [u32],
) -> core::result::Result<(), E> {
    let bits = 8 * kind.element_bytes();
    let registers = d.len() / 32;
    let a = match a {
        WarpA::Shared(operand) => shared_elements(kind, operand, 16 * warp..16 * warp + 16, &mut read)?,
        WarpA::Registers(registers) => fragment_a(registers, bits),
    };
    let b = shared_elements(kind, b, 0..2 * registers, &mut read)?;
    multiply(kind.dot(), &a, &b, |row, column, sum| {
        let place = fragment::d(row, column, 32);
        let register = &mut d[registers * place.lane + place.register];
        let old = match accumulate {
            Accumulate::Overwrite => 0,
            Accumulate::Add => *register,
        };
        *register = sum(old);
    });
    Ok(())
}

/// Rows of a or columns of b in shared memory.
fn shared_elements<E>(
    kind: WgmmaKind,
    operand: Operand,
    range: core::ops::Range<usize>,
    read: &mut impl FnMut(u32) -> core::result::Result<[u8; 16], E>,
) -> core::result::Result<Elements, E> {
    let (bytes, k) = (kind.element_bytes(), kind.k());
    let mut pieces = HashMap::new();
    let mut bits = Vec::with_capacity(range.len() * k as usize);
    for mn in range {
        for k in 0..k {
            let address = operand.address(mn as u32, k, bytes);
            let piece = match pieces.entry(address & !15) {
                Entry::Occupied(piece) => *piece.get(),
                Entry::Vacant(place) => *place.insert(read(address & !15)?),
            };
            let mut word = [0; 4];
            word[..bytes as usize].copy_from_slice(&piece[(address & 15) as usize..][..bytes as usize]);
            bits.push(u32::from_le_bytes(word));
        }
    }
    Ok(Elements { k: k as usize, bits })
}

#[cfg(test)]
mod tests {
    use super::super::swizzle::Operand;
    use super::*;
    use crate::wgmma::Swizzle;
    use half::{bf16, f16};
    use proptest::prelude::*;
    use std::vec;
    use std::vec::Vec;

    const GENERATIONS: [Generation; 2] = [Generation::Ampere, Generation::Hopper];
    const FLOATS: [MmaKind; 4] = [MmaKind::Bf16, MmaKind::F16, MmaKind::F16ToF16, MmaKind::Tf32];

    fn encode(kind: MmaKind, value: f32) -> u32 {
        match kind {
            MmaKind::Bf16 => bf16::from_f32(value).to_bits().into(),
            MmaKind::F16 | MmaKind::F16ToF16 => f16::from_f32(value).to_bits().into(),
            MmaKind::Tf32 => value.to_bits(),
            MmaKind::S8 => u32::from(value as i8 as u8),
        }
    }

    /// c + Σ a·b with one sum.
    fn dot(kind: MmaKind, generation: Generation, a: &[f32], b: &[f32], c: u32) -> u32 {
        let dot = kind.dot(generation).expect("a floating-point type");
        let vector = |values: &[f32]| {
            let bits = values.iter().map(|&value| encode(kind, value)).collect();
            Elements { k: values.len().max(1), bits }.vectors(dot.element).pop()
        };
        let empty = || Vector::new(dot.element, [].into_iter());
        dot.sum(&vector(a).unwrap_or_else(empty), &vector(b).unwrap_or_else(empty), c)
    }

    fn power(exponent: i32) -> f32 {
        f64::from(exponent).exp2() as f32
    }

    #[test]
    fn terms_are_cut_off_below_the_largest() {
        use Generation::{Ampere, Hopper};
        let one = 1f32.to_bits();
        let small = |exponent: i32| [power(exponent - exponent / 2); 16];
        let sums = |generation, exponent: i32| {
            f32::from_bits(dot(MmaKind::Bf16, generation, &small(exponent), &[power(exponent / 2); 16], one))
        };
        assert_eq!(sums(Hopper, -24), 1.0 + power(-20));
        assert_eq!(sums(Hopper, -25), 1.0 + power(-21));
        assert_eq!(sums(Hopper, -26), 1.0);
        assert_eq!(sums(Ampere, -24), 1.0 + power(-20));
        assert_eq!(sums(Ampere, -25), 1.0);
        // Two blocks of eight, each rounded: 8 · 2^-27 vanishes twice, or would be 2^-23 at once.
        let with = |generation, products: usize| {
            let mut a = [0.0; 16];
            a[..products].fill(power(-24));
            f32::from_bits(dot(MmaKind::Bf16, generation, &a, &[1.0; 16], one))
        };
        assert_eq!(with(Hopper, 2), 1.0 + power(-23));
        assert_eq!(with(Hopper, 3), 1.0 + power(-23));
        let mut a = [0.0; 16];
        (a[0], a[8]) = (power(-24), power(-24));
        assert_eq!(f32::from_bits(dot(MmaKind::Bf16, Hopper, &a, &[1.0; 16], one)), 1.0 + power(-23));
        assert_eq!(f32::from_bits(dot(MmaKind::Bf16, Ampere, &a, &[1.0; 16], one)), 1.0);
        // Towards zero, from either side.
        let minus = |value: f32| f32::from_bits(dot(MmaKind::Bf16, Hopper, &[value], &[1.0], one));
        assert_eq!(minus(-power(-25)), 1.0 - power(-24));
        assert_eq!(minus(-power(-26)), 1.0);
        assert_eq!(
            f32::from_bits(dot(MmaKind::Bf16, Hopper, &[power(-25)], &[1.0], (-1f32).to_bits())),
            power(-24) - 1.0
        );
    }

    /// 1.5 · 1.5 has the exponent of 1 · 1, unnormalised.
    #[test]
    fn products_are_not_normalised() {
        let c = power(-25).to_bits();
        let sum = |a: f32| f32::from_bits(dot(MmaKind::F16, Generation::Hopper, &[a, -a], &[a, a], c));
        assert_eq!((sum(1.0), sum(1.5)), (power(-25), power(-25)));
        assert_eq!(sum(2.0), 0.0);
    }

    #[test]
    fn e4m3_keeps_thirteen_bits() {
        let dot = WgmmaKind::E4m3.dot().expect("a floating-point type");
        assert_eq!(dot.summation, Summation { block: 32, fraction_bits: 13, result_bits: 13 });
        let sum = |a: &[u8], c: f32| {
            let numbers = Vector::new(E4M3, a.iter().map(|&code| code.into()));
            let ones = Vector::new(E4M3, a.iter().map(|_| 0x38));
            f32::from_bits(dot.sum(&numbers, &ones, c.to_bits()))
        };
        assert_eq!(sum(&[0; 32], 1.0 + power(-13)), 1.0 + power(-13));
        assert_eq!(sum(&[0; 32], 1.0 + power(-14)), 1.0);
        assert_eq!(sum(&[0; 32], -(1.0 + 3.0 * power(-14))), -(1.0 + power(-13)));
        assert_eq!(sum(&[0x38; 32], 0.0), 32.0);
        assert_eq!(sum(&[0x01; 32], 0.0), 32.0 * power(-9));
        // 16 and 2^-9 are 13 places apart.
        assert_eq!(sum(&[0x58, 0x01], 0.0), 16.0 + power(-9));
        assert_eq!(sum(&[0x60, 0x01], 0.0), 32.0);
        assert!(sum(&[0x7f], 0.0).is_nan());
        assert_eq!(sum(&[0x7e; 32], 0.0), 448.0 * 32.0);
    }

    #[test]
    fn infinities_and_nan() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        for kind in FLOATS {
            let (infinity, not_a_number, negative) = match kind {
                MmaKind::F16ToF16 => (0x7c00, 0x7fff, 0xfc00),
                _ => (0x7f80_0000, 0x7fff_ffff, 0xff80_0000),
            };
            for generation in GENERATIONS {
                let sum = |a: &[f32], b: &[f32], c| dot(kind, generation, a, b, c);
                assert_eq!(sum(&[inf, 1.0], &[2.0, 1.0], 0), infinity);
                assert_eq!(sum(&[inf, 1.0], &[-2.0, 1.0], 0), negative);
                assert_eq!(sum(&[inf], &[-inf], 0), negative);
                assert_eq!(sum(&[1.0], &[1.0], negative), negative);
                assert_eq!(sum(&[inf], &[1.0], negative), not_a_number);
                assert_eq!(sum(&[inf, inf], &[1.0, -1.0], 0), not_a_number);
                assert_eq!(sum(&[inf], &[0.0], 0), not_a_number);
                assert_eq!(sum(&[nan], &[0.0], 0), not_a_number);
                assert_eq!(sum(&[-nan], &[1.0], 0), not_a_number);
                assert_eq!(sum(&[1.0], &[1.0], not_a_number | negative), not_a_number);
                assert_eq!(sum(&[-0.0], &[1.0], negative & !infinity), 0);
                assert_eq!(sum(&[], &[], 0), 0);
            }
        }
    }

    #[test]
    fn the_ends_of_the_ranges() {
        let hopper = |kind, a: &[f32], b: &[f32], c| dot(kind, Generation::Hopper, a, b, c);
        // Subnormal factors, sums, and accumulators count.
        let least = f32::from_bits(1);
        assert_eq!(hopper(MmaKind::Bf16, &[power(-133)], &[1.0], 0), power(-133).to_bits());
        assert_eq!(hopper(MmaKind::Bf16, &[power(-133)], &[power(-16)], 0), least.to_bits());
        assert_eq!(hopper(MmaKind::Bf16, &[power(-133)], &[power(-17)], 0), 0);
        assert_eq!(hopper(MmaKind::Bf16, &[0.0], &[1.0], 5), 5);
        assert_eq!(hopper(MmaKind::F16, &[power(-24)], &[power(-24)], 0), power(-48).to_bits());
        assert_eq!(hopper(MmaKind::F16ToF16, &[power(-24)], &[1.0], 1), 2);
        // Beyond the largest.
        let large = f32::from_bits(0x7f7f_0000);
        assert_eq!(hopper(MmaKind::Bf16, &[large, large], &[1.0, 1.0], 0), 0x7f80_0000);
        assert_eq!(hopper(MmaKind::Bf16, &[-large], &[large], 0), 0xff80_0000);
        // Sums of more than the largest may come back.
        assert_eq!(hopper(MmaKind::Bf16, &[large, large, -large], &[2.0, 1.0, 2.0], 0), large.to_bits());
        // Towards zero stays finite; to nearest may not.
        let largest = f32::MAX.to_bits();
        assert_eq!(hopper(MmaKind::Bf16, &[power(102)], &[1.0], largest), largest);
        let sum = |value: f32| hopper(MmaKind::F16ToF16, &[value], &[1.0], 0x7bff);
        assert_eq!((sum(8.0), sum(15.0), sum(16.0)), (0x7bff, 0x7bff, 0x7c00));
        // Ties to even.
        let one = |value: f32| hopper(MmaKind::F16ToF16, &[value], &[1.0], 0x3c00);
        assert_eq!((one(power(-11)), one(3.0 * power(-11))), (0x3c00, 0x3c02));
        assert_eq!(one(power(-11) * 1.0625), 0x3c01);
        assert_eq!(hopper(MmaKind::Tf32, &[f32::from_bits(0x3f80_1fff)], &[1.0], 0), 1f32.to_bits());
    }

    /// Small integers: every sum is exact.
    fn integers(seed: u64) -> impl FnMut() -> i32 {
        let mut state = seed;
        move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 59) as i32 - 16
        }
    }

    #[test]
    fn every_mma_multiplies_matrices() {
        for kind in [MmaKind::Bf16, MmaKind::F16, MmaKind::F16ToF16, MmaKind::Tf32, MmaKind::S8] {
            let bits = kind.element_bits();
            let k = 256 / bits as usize;
            let mut next = integers(7);
            let [a, b, c] = [16 * k, k * 8, 16 * 8].map(|n| (0..n).map(|_| next()).collect::<Vec<i32>>());
            let (mut lanes_a, mut lanes_b, mut lanes_c) = ([[0; 4]; 32], [[0; 2]; 32], [[0; 4]; 32]);
            let result = |value: i32| match kind {
                MmaKind::F16ToF16 => u32::from(f16::from_f32(value as f32).to_bits()),
                MmaKind::S8 => value as u32,
                _ => (value as f32).to_bits(),
            };
            let result_bits = if kind == MmaKind::F16ToF16 { 16 } else { 32 };
            for (i, &value) in a.iter().enumerate() {
                fragment::a(i / k, i % k, bits).set(&mut lanes_a, bits, encode(kind, value as f32));
            }
            for (i, &value) in b.iter().enumerate() {
                fragment::b(i / 8, i % 8, bits).set(&mut lanes_b, bits, encode(kind, value as f32));
            }
            for (i, &value) in c.iter().enumerate() {
                fragment::d(i / 8, i % 8, result_bits).set(&mut lanes_c, result_bits, result(value));
            }
            for generation in GENERATIONS {
                let d = mma(kind, generation, &lanes_a, &lanes_b, &lanes_c);
                for (i, &c) in c.iter().enumerate() {
                    let exact =
                        c + (0..k).map(|k_idx| a[i / 8 * k + k_idx] * b[k_idx * 8 + i % 8]).sum::<i32>();
                    let got = fragment::d(i / 8, i % 8, result_bits).get(&d, result_bits);
                    assert_eq!(got, result(exact), "{kind:?} {generation:?} {i}");
                }
            }
        }
    }

    #[test]
    fn s8_sums_wrap() {
        assert_eq!(dot_s8(&[0x80; 32], &[0x80; 32], 0), 32 * 16384);
        assert_eq!(dot_s8(&[0x80], &[0x80], i32::MAX as u32), i32::MAX.wrapping_add(16384) as u32);
        assert_eq!(dot_s8(&[0xff], &[0x7f], 0) as i32, -127);
    }

    /// Every type, layout and a few N, with a from either place.
    #[test]
    fn every_wgmma_multiplies_matrices() {
        for kind in [WgmmaKind::Bf16, WgmmaKind::F16, WgmmaKind::Tf32, WgmmaKind::E4m3, WgmmaKind::S8] {
            let (bytes, k) = (kind.element_bytes(), kind.k() as usize);
            let majors: &[Major] = if bytes == 2 { &[Major::K, Major::Mn] } else { &[Major::K] };
            let swizzles = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];
            for (case, (&major, swizzle)) in
                majors.iter().flat_map(|major| swizzles.map(|swizzle| (major, swizzle))).enumerate()
            {
                let n = [8, 64, 136][case % 3];
                let encode = |value: i32| match kind {
                    WgmmaKind::Bf16 => encode(MmaKind::Bf16, value as f32),
                    WgmmaKind::F16 => encode(MmaKind::F16, value as f32),
                    WgmmaKind::Tf32 => (value as f32).to_bits(),
                    WgmmaKind::E4m3 => u32::from(crate::cvt::E4m3::from_f32(value as f32).0),
                    WgmmaKind::S8 => u32::from(value as u8),
                };
                let result =
                    |value: i32| if kind == WgmmaKind::S8 { value as u32 } else { (value as f32).to_bits() };
                let mut next = integers(case as u64);
                let [a, b, c] = [64 * k, k * n, 64 * n].map(|n| (0..n).map(|_| next()).collect::<Vec<i32>>());
                let layout = |start: u32, mn: usize| {
                    let (leading, stride) = match (major, swizzle) {
                        (Major::K, Swizzle::None) => (128, 256),
                        (Major::K, _) => (0, swizzle.repeat()),
                        (Major::Mn, Swizzle::None) => (mn as u32 * bytes / 16 * 128, 128),
                        (Major::Mn, _) => (2 * swizzle.repeat(), swizzle.repeat()),
                    };
                    Operand { start, leading, stride, swizzle, major }
                };
                let (in_a, in_b) = (layout(0, 64), layout(0x1_0000, n));
                let mut memory = vec![0u8; 0x3_0000];
                let mut lanes_a = [[0; 4]; 128];
                let mut write = |address: u32, bits: u32| {
                    memory[address as usize..][..bytes as usize]
                        .copy_from_slice(&bits.to_le_bytes()[..bytes as usize]);
                };
                for (i, &value) in a.iter().enumerate() {
                    write(in_a.address((i / k) as u32, (i % k) as u32, bytes), encode(value));
                    fragment::a(i / k, i % k, 8 * bytes).set(&mut lanes_a, 8 * bytes, encode(value));
                }
                for (i, &value) in b.iter().enumerate() {
                    write(in_b.address((i % n) as u32, (i / n) as u32, bytes), encode(value));
                }
                let read = |address: u32| {
                    Ok::<[u8; 16], ()>(memory[address as usize..][..16].try_into().expect("16 bytes"))
                };
                for in_registers in [false, true] {
                    for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
                        let mut d = vec![0; 128 * n / 2];
                        let at = |i: usize| {
                            let place = fragment::d(i / n, i % n, 32);
                            place.lane * n / 2 + place.register
                        };
                        c.iter().enumerate().for_each(|(i, &value)| d[at(i)] = result(value));
                        for (warp, d) in d.chunks_mut(32 * n / 2).enumerate() {
                            let lanes = lanes_a[32 * warp..].first_chunk().expect("32 lanes");
                            let a = if in_registers { WarpA::Registers(lanes) } else { WarpA::Shared(in_a) };
                            assert_eq!(wgmma(kind, warp, a, in_b, accumulate, read, d), Ok(()));
                        }
                        for (i, &c) in c.iter().enumerate() {
                            let c = if accumulate == Accumulate::Add { c } else { 0 };
                            let exact = c + (0..k).map(|j| a[i / n * k + j] * b[j * n + i % n]).sum::<i32>();
                            assert_eq!(d[at(i)], result(exact), "{kind:?} {major:?} {swizzle:?} n{n} {i}");
                        }
                    }
                }
            }
        }
    }

    proptest! {
        #![proptest_config(testkit::gpu::proptest_config(2000))]

        /// Within what is cut off of each term, and the rounding of each block's sum.
        #[test]
        fn sums_are_near(values in prop::collection::vec((-8f32..8.0, -20i32..3, -8f32..8.0), 16), c in -100f32..100.0) {
            for kind in FLOATS {
                for generation in GENERATIONS {
                    let (round, c) = match kind {
                        MmaKind::F16ToF16 => (power(-10), f16::from_f32(c).to_f32()),
                        _ => (power(-22), c),
                    };
                    let exactly = |value: f32| match kind {
                        MmaKind::Bf16 => bf16::from_f32(value).to_f32(),
                        MmaKind::Tf32 => f32::from_bits(value.to_bits() & !0x1fff),
                        _ => f16::from_f32(value).to_f32(),
                    };
                    let k = if kind == MmaKind::Tf32 { 8 } else { 16 };
                    let a: Vec<f32> = values[..k].iter().map(|v| exactly(v.0 * power(v.1))).collect();
                    let b: Vec<f32> = values[..k].iter().map(|v| exactly(v.2)).collect();
                    let products = || a.iter().zip(&b).map(|(&a, &b)| f64::from(a) * f64::from(b));
                    let exact = f64::from(c) + products().sum::<f64>();
                    let scale = f64::from(c).abs() + products().map(f64::abs).sum::<f64>();
                    let bits = dot(kind, generation, &a, &b, if round > power(-20) { f16::from_f32(c).to_bits().into() } else { c.to_bits() });
                    let got = if kind == MmaKind::F16ToF16 { f16::from_bits(bits as u16).to_f32() } else { f32::from_bits(bits) };
                    let bound = scale * (17.0 * f64::from(power(-24)) + 2.0 * f64::from(round));
                    prop_assert!((f64::from(got) - exact).abs() <= bound, "{:?} {:?}: {} for {}", kind, generation, got, exact);
                }
            }
        }

        /// Decoding and rounding are inverses.
        #[test]
        fn numbers_come_back(bits in any::<u32>()) {
            for (result, bits) in [(Result::F32(23), bits), (Result::F16, bits & 0xffff)] {
                match result.format().decode(bits) {
                    Number::Finite { significand: 0, .. } => prop_assert_eq!(bits & bits.wrapping_sub(1), 0),
                    Number::Finite { significand, exponent } => prop_assert_eq!(result.round(significand, exponent), bits),
                    Number::Infinity { negative } => prop_assert_eq!(result.infinity(negative), bits),
                    Number::Nan => prop_assert!(bits & result.nan() > result.infinity(false)),
                }
            }
        }
    }
}
