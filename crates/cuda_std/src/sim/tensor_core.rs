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
mod tests;
