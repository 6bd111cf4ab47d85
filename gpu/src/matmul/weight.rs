//! Packed weights (`abi::weight`): codes as the operands of `mma` or as f32, and their scales.
//!
//! A lane reads its codes of a tile by 16-byte loads, and they are its registers of `mma`'s first operand, in the order
//! of k that the other operand follows. Codes become 16-bit floats exactly, so all of a weight's rounding is in its
//! scales, which multiply sums in f32.

use abi::weight::{BLOCK_SCALES, Codes, SUPER_K, ScaleType, TILE_K, WeightDims, e6m9_to_f32};
#[cfg(not(lacks_mma_sync))]
use cuda_std::cp_async;
use cuda_std::cvt::{self, Element, f16};
#[cfg(not(lacks_mma_sync))]
use cuda_std::cvt::{bf16, bf16x2_fma, f16x2_fma};
use cuda_std::{global, math, thread};

#[cfg(not(lacks_mma_sync))]
use super::multiplicand::Multiplicand;

/// Where a packed weight lies; what it has not is null.
#[derive(Clone, Copy)]
pub struct Packed {
    /// Codes.
    pub codes: *const u32,
    /// Scales.
    pub scales: *const u8,
    /// Zero points.
    pub zeros: *const u8,
    /// Minimums.
    pub minimums: *const u8,
    /// Factors of the scales.
    pub supers: *const u16,
    /// Factors of the minimums.
    pub super_minimums: *const u16,
    /// Layout and sizes.
    pub dims: WeightDims,
}

/// The scales of a tile for two rows of a lane, as they lie in memory.
#[derive(Clone, Copy)]
pub struct RawScales {
    scales: [u32; 2],
    minimums: [u32; 2],
    /// Of both rows, one in either half.
    supers: u32,
    super_minimums: u32,
}

impl RawScales {
    /// Those of no tile.
    pub const NONE: RawScales = RawScales { scales: [0; 2], minimums: [0; 2], supers: 0, super_minimums: 0 };

    /// Those of a tile, or of none: then they are 0, or next to it.
    #[inline(always)]
    pub fn of_tile(self, exists: bool) -> Self {
        if exists { self } else { Self::NONE }
    }
}

/// Groups along k that a kernel takes: all of a tile's k shares a scale.
pub const WIDE: u32 = TILE_K;
/// Groups of 32.
pub const OF_32: u32 = 32;
/// Groups of any length, by ordinary arithmetic also with minimums.
pub const ANY: u32 = 16;

/// Integers count from the middle of their range, floats from 0.
pub const MIDDLE: u32 = 0;
/// Integers count from zero points.
pub const ZEROS: u32 = 1;
/// Integers count from 0, and there are minimums.
pub const MINIMUMS: u32 = 2;

/// What a tile of the codes comes to.
pub trait Code {
    /// As in the layout.
    const CODES: Codes;
    /// Whether they are integers, which alone have zero points, minimums and super scales.
    const INTEGERS: bool = matches!(Self::CODES, Codes::Int4 | Codes::Int8);
    /// A lane's words of a tile.
    type Words: Copy;

    /// Reads them, from the lane's first on.
    ///
    /// # Safety
    /// - *in-bounds*: the tile exists; it is *aligned(16)*.
    unsafe fn load(at: *const u32) -> Self::Words;

    /// A code: of row `lane / 4 + 8 · row`, in a step the one of the lane's four.
    fn code(words: &Self::Words, step: usize, row: usize, i: usize) -> u32;
}

/// Of 4 and 8 bits, of which a lane has 4 or 8 words.
pub type FewWords = [u32; 8];

macro_rules! codes {
    ($($name:ident)*) => {$(
        #[doc = concat!("`Codes::", stringify!($name), "`.")]
        pub struct $name;

        impl Code for $name {
            const CODES: Codes = Codes::$name;
            type Words = FewWords;

            #[inline(always)]
            unsafe fn load(at: *const u32) -> FewWords {
                // SAFETY: the caller's promise.
                unsafe {
                    let low = global::load_stream_x4(at);
                    let high = if Self::CODES.bits() == 8 {
                        global::load_stream_x4(at.wrapping_add(128))
                    } else {
                        [0; 4]
                    };
                    [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]]
                }
            }

            #[inline(always)]
            fn code(words: &FewWords, step: usize, row: usize, i: usize) -> u32 {
                if Self::CODES.bits() == 4 {
                    words[step] >> (4 * (2 * (i / 2) + row) + 16 * (i % 2)) & 15
                } else {
                    words[4 * row + step] >> (8 * i) & 0xff
                }
            }
        }
    )*};
}
codes! { Int4 Int8 E2m1 E4m3 }

/// `Codes::E6m9`.
pub struct E6m9;

impl Code for E6m9 {
    const CODES: Codes = Codes::E6m9;
    type Words = [[u32; 4]; 4];

    #[inline(always)]
    unsafe fn load(at: *const u32) -> [[u32; 4]; 4] {
        let mut words = [[0; 4]; 4];
        let mut line = 0;
        while line < 4 {
            // SAFETY: the caller's promise.
            words[line] = unsafe { global::load_stream_x4(at.wrapping_add(128 * line)) };
            line += 1;
        }
        words
    }

    #[inline(always)]
    fn code(words: &[[u32; 4]; 4], step: usize, row: usize, i: usize) -> u32 {
        words[2 * row + step / 2][step % 2 * 2 + i / 2] >> (16 * (i % 2)) & 0xffff
    }
}

#[inline(always)]
fn e4m3_to_f32(byte: u32) -> f32 {
    Element::to_f32(f16::from_bits(cvt::f16x2_from_e4m3x2(byte as u16) as u16))
}

#[inline(always)]
const fn bytes_of(kind: u32) -> u32 {
    if kind == ScaleType::F32 as u32 {
        4
    } else if kind <= ScaleType::Bf16 as u32 {
        2
    } else {
        1
    }
}

/// Numbers of two rows of a lane, `bytes` (1, 2 or 4) each, which lie together. They are taken apart where they are
/// used ([`of_rows`]): here nothing may wait for them.
///
/// # Safety
/// - *in-bounds*, and aligned to their number.
#[inline(always)]
unsafe fn load_pair(from: *const u8, bytes: u32) -> [u32; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        match bytes {
            1 => [global::load(from.cast::<u16>()).into(), 0],
            2 => [global::load(from.cast::<u32>()), 0],
            _ => {
                let pair = global::load(from.cast::<u64>());
                [pair as u32, (pair >> 32) as u32]
            }
        }
    }
}

/// The numbers of either row, above which there may be others.
#[inline(always)]
fn of_rows(pair: [u32; 2], bytes: u32) -> [u32; 2] {
    match bytes {
        1 => [pair[0], pair[0] >> 8],
        2 => [pair[0], pair[0] >> 16],
        _ => pair,
    }
}

/// A number from each half, of groups of 32.
#[inline(always)]
fn halves(words: [u32; 2], decode: impl Fn(u32) -> f32) -> [[f32; 2]; 4] {
    let first = [decode(words[0] & 0xffff), decode(words[1] & 0xffff)];
    let second = [decode(words[0] >> 16), decode(words[1] >> 16)];
    [first, first, second, second]
}

impl Packed {
    /// An expert's weight, whose rows of tiles begin behind those of the experts before.
    #[inline(always)]
    pub fn of_expert(self, codes: Codes, expert: u32) -> Self {
        let blocks = expert as usize * self.dims.row_blocks as usize;
        let WeightDims { tiles, stretches, rows_log2, scale, .. } = self.dims;
        let scales = if rows_log2 == 0 {
            blocks * stretches as usize * 16 * self.per_stretch() as usize
        } else {
            (blocks >> (rows_log2 - 4)) * stretches as usize * BLOCK_SCALES as usize
        };
        let bytes = scales * bytes_of(scale) as usize;
        let supers = blocks * tiles.div_ceil(SUPER_K / TILE_K) as usize * 16;
        Packed {
            codes: self.codes.wrapping_add(blocks * tiles as usize * (codes.tile_bytes() / 4) as usize),
            scales: self.scales.wrapping_add(bytes),
            zeros: if self.zeros.is_null() { self.zeros } else { self.zeros.wrapping_add(scales) },
            minimums: if self.minimums.is_null() { self.minimums } else { self.minimums.wrapping_add(bytes) },
            supers: self.supers.wrapping_add(supers),
            super_minimums: self.super_minimums.wrapping_add(supers),
            dims: self.dims,
        }
    }

    /// Scales in a stretch.
    #[inline(always)]
    fn per_stretch(&self) -> u32 {
        if self.dims.group_log2 < 2 { 4 >> self.dims.group_log2 } else { 1 }
    }

    /// Whether there are minimums.
    #[inline(always)]
    pub fn has_minimums<C: Code>(&self) -> bool {
        C::INTEGERS && !self.minimums.is_null()
    }

    /// A row of tiles, as the lane reads it.
    #[inline(always)]
    pub fn row<C: Code>(&self, row_block: u32) -> Row<'_> {
        self.row_of_lane::<C>(row_block, thread::lane())
    }

    /// The same as another lane reads it.
    #[inline(always)]
    pub fn row_of_lane<C: Code>(&self, row_block: u32, lane: u32) -> Row<'_> {
        let WeightDims { tiles, stretches, group_log2, rows_log2, scale, .. } = self.dims;
        let (row_block, lane) = ((self.dims.first_block + row_block) as usize, lane as usize);
        let words = (C::CODES.tile_bytes() / 4) as usize;
        let count = self.per_stretch() as usize;
        let bytes = count as u32 * bytes_of(scale);
        let (first, own) = if rows_log2 == 0 {
            (row_block * stretches as usize * 16 * count, lane / 4 * 2 * count)
        } else {
            let first = (row_block >> (rows_log2 - 4)) * stretches as usize;
            // Of even rows or of odd ones, which both of the lane's are.
            (first * BLOCK_SCALES as usize, lane / 4 % 2 * 2)
        };
        let of_scales = (first + own) * bytes_of(scale) as usize;
        let supers = row_block * tiles.div_ceil(SUPER_K / TILE_K) as usize * 16 + lane / 4 * 2;
        Row {
            packed: self,
            codes: self.codes.wrapping_add(row_block * tiles as usize * words + 4 * lane),
            scales: self.scales.wrapping_add(of_scales),
            zeros: self.zeros.wrapping_add(first + own),
            minimums: self.minimums.wrapping_add(of_scales),
            supers: self.supers.wrapping_add(supers),
            super_minimums: self.super_minimums.wrapping_add(supers),
            bytes,
            of_stretch: if rows_log2 == 0 { 16 * bytes } else { BLOCK_SCALES * bytes },
            tiles_log2: group_log2.max(2) - 2,
        }
    }

    /// Which of a stretch's scales is that of a step.
    #[inline(always)]
    fn of_step(&self, step: u32) -> u32 {
        if self.dims.group_log2 < 2 { step >> self.dims.group_log2 } else { 0 }
    }

    /// What the codes count from: [`MIDDLE`], [`ZEROS`] or [`MINIMUMS`].
    #[inline(always)]
    pub fn origin<C: Code>(&self) -> u32 {
        if !C::INTEGERS {
            MIDDLE
        } else if !self.zeros.is_null() {
            ZEROS
        } else if self.has_minimums::<C>() {
            MINIMUMS
        } else {
            MIDDLE
        }
    }

    /// The scales and the minimums of either row in the tile's four steps.
    ///
    /// The type is the same for the whole launch: a branch each, with all numbers of the tile in it, and none that
    /// would become a table of jumps.
    #[inline(always)]
    pub fn numbers<C: Code, const GROUP: u32>(
        &self,
        raw: &RawScales,
        has_minimums: bool,
    ) -> [[[f32; 2]; 4]; 2] {
        let kind = self.dims.scale;
        let plain = [[f32::from_bits(raw.scales[0]), f32::from_bits(raw.scales[1])]; 4];
        let none = [[0.0; 2]; 4];
        if GROUP == WIDE {
            return [plain, none];
        }
        let bytes = self.per_stretch() * bytes_of(kind);
        let scales = of_rows(raw.scales, bytes);
        let minimums = if has_minimums { of_rows(raw.minimums, bytes) } else { [0; 2] };
        macro_rules! both {
            (|$words:ident, $supers:ident| $decode:expr) => {{
                let decode = |$words: [u32; 2], $supers: u32| $decode;
                [
                    decode(scales, raw.supers),
                    if has_minimums { decode(minimums, raw.super_minimums) } else { none },
                ]
            }};
        }
        if kind <= ScaleType::Bf16 as u32 {
            // Halves are of groups of 32: a stretch has four bytes of them at most.
            if kind == ScaleType::F16 as u32 {
                both!(|words, _supers| halves(words, |half| Element::to_f32(f16::from_bits(half as u16))))
            } else if kind == ScaleType::Bf16 as u32 {
                both!(|words, _supers| halves(words, |half| f32::from_bits(half << 16)))
            } else {
                [plain, none]
            }
        } else if C::INTEGERS {
            let factor = |half: u32| Element::to_f32(f16::from_bits(half as u16));
            // 1.5 · 2^23, whose last place is 1, plus the byte by its bits; a multiple of it by a binary16 is exact.
            const BASE: u32 = 0x4b40_0000;
            let signed = kind == ScaleType::I8Super as u32;
            both!(|words, supers| {
                let factors = [factor(supers), factor(supers >> 16)];
                let less = [-f32::from_bits(BASE) * factors[0], -f32::from_bits(BASE) * factors[1]];
                self.bytes::<GROUP>(words, |row, byte| {
                    let number = if signed { byte as u8 as i8 as u32 } else { byte };
                    math::fma(f32::from_bits(BASE.wrapping_add(number)), factors[row], less[row])
                })
            })
        } else if kind == ScaleType::E8m0 as u32 {
            both!(|words, _supers| {
                self.bytes::<GROUP>(words, |_, byte| {
                    // 0 is 2^-127, which is subnormal, and 0xff NaN.
                    f32::from_bits((byte << 23).max(0x0040_0000) | ((byte + 1) & 0x100) << 14)
                })
            })
        } else {
            both!(|words, _supers| self.bytes::<GROUP>(words, |_, byte| e4m3_to_f32(byte) * self.dims.global))
        }
    }

    /// A number from each byte: of groups of 16, or of 32.
    #[inline(always)]
    fn bytes<const GROUP: u32>(&self, words: [u32; 2], decode: impl Fn(usize, u32) -> f32) -> [[f32; 2]; 4] {
        let of = |row: usize, index: u32| decode(row, words[row] >> (8 * index) & 0xff);
        let (first, second) = ([of(0, 0), of(1, 0)], [of(0, 1), of(1, 1)]);
        if GROUP == ANY && self.dims.group_log2 == 0 {
            [first, second, [of(0, 2), of(1, 2)], [of(0, 3), of(1, 3)]]
        } else {
            [first, first, second, second]
        }
    }

    /// The zero point of either row in a step of the tile, whatever the codes count from.
    #[inline(always)]
    pub fn any_zero<C: Code>(&self, zeros: [u32; 2], step: u32) -> [u32; 2] {
        match self.origin::<C>() {
            ZEROS => self.zero::<C, ANY, ZEROS>(zeros, step),
            MINIMUMS => self.zero::<C, ANY, MINIMUMS>(zeros, step),
            _ => self.zero::<C, ANY, MIDDLE>(zeros, step),
        }
    }

    /// The zero point of either row in a step of the tile.
    #[inline(always)]
    pub fn zero<C: Code, const GROUP: u32, const ORIGIN: u32>(&self, zeros: [u32; 2], step: u32) -> [u32; 2] {
        if ORIGIN != ZEROS {
            return [if ORIGIN == MINIMUMS { 0 } else { C::CODES.zero() as u32 }; 2];
        }
        let (index, count) = match GROUP {
            WIDE => (0, 1),
            OF_32 => (step / 2, 2),
            _ => (self.of_step(step), self.per_stretch()),
        };
        let words = of_rows(zeros, count);
        [words[0] >> (8 * index) & 0xff, words[1] >> (8 * index) & 0xff]
    }
}

/// The weights of all experts.
#[derive(Clone, Copy)]
pub struct Experts {
    /// Of all: that of the first.
    pub packed: Packed,
    /// The global scale of each, or null.
    pub globals: *const f32,
}

impl Experts {
    /// The weight of one: that of all from its first row of tiles on, so that the addresses stay the launch's.
    ///
    /// # Safety
    /// - It is one of them; the globals, if there are any, are as many.
    #[inline(always)]
    pub unsafe fn of(&self, expert: u32) -> Packed {
        let mut packed = self.packed;
        packed.dims.first_block = expert * packed.dims.row_blocks;
        if !self.globals.is_null() {
            // SAFETY: the caller's promise.
            packed.dims.global = unsafe { global::load(self.globals.add(expert as usize)) };
        }
        packed
    }
}

/// A row of tiles of a packed weight, as a lane reads it: where its own parts lie.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    packed: &'a Packed,
    codes: *const u32,
    scales: *const u8,
    zeros: *const u8,
    minimums: *const u8,
    supers: *const u16,
    super_minimums: *const u16,
    /// Bytes of the scales of a row in a stretch.
    bytes: u32,
    /// Bytes of scales from one stretch to the next.
    of_stretch: u32,
    /// Binary logarithm of the tiles that share a stretch.
    tiles_log2: u32,
}

impl Row<'_> {
    /// Brings the codes of some tiles to L2, where the floor can: nothing is read, so it may be early.
    ///
    /// # Safety
    /// - *in-bounds*: the tiles exist.
    #[inline(always)]
    pub unsafe fn to_l2<C: Code>(&self, tile: u32, tiles: u32) {
        if thread::lane() == 0 && tiles > 0 {
            let words = (C::CODES.tile_bytes() / 4) as usize;
            // SAFETY: the caller's promise; tiles are multiples of 512 bytes, and those of a row lie together.
            unsafe {
                global::prefetch_l2(
                    self.codes.wrapping_add(tile as usize * words),
                    tiles * C::CODES.tile_bytes(),
                )
            };
        }
    }

    /// The lane's words of a tile.
    ///
    /// # Safety
    /// - *in-bounds*: the tile exists.
    #[inline(always)]
    pub unsafe fn words<C: Code>(&self, tile: u32) -> C::Words {
        let at = self.codes.wrapping_add(tile as usize * (C::CODES.tile_bytes() / 4) as usize);
        // SAFETY: the caller's promise; tiles are multiples of 512 bytes.
        unsafe { C::load(at) }
    }

    /// Starts the copies of the lane's words of a tile to shared memory: 16 bytes, and of 8 bits as many 512 bytes
    /// behind.
    ///
    /// # Safety
    /// - *in-bounds*: the tile exists; the bytes in shared memory are *exclusive*.
    #[cfg(not(lacks_mma_sync))]
    #[inline(always)]
    pub unsafe fn copy<C: Code<Words = FewWords>>(&self, tile: u32, to: u32) {
        let at = self.codes.wrapping_add(tile as usize * (C::CODES.tile_bytes() / 4) as usize);
        // SAFETY: the caller's promise; tiles are multiples of 512 bytes.
        unsafe {
            cp_async::cg_16(to, at);
            if C::CODES.bits() == 8 {
                cp_async::cg_16(to + 512, at.wrapping_add(128));
            }
        }
    }

    /// The scales of the lane's rows `lane / 4` and `lane / 4 + 8` of a tile.
    ///
    /// # Safety
    /// - *in-bounds*: the tile exists.
    #[inline(always)]
    pub unsafe fn raw_scales<C: Code, const GROUP: u32>(&self, tile: u32, has_minimums: bool) -> RawScales {
        let stretch = tile >> self.tiles_log2;
        // A row of tiles has less than 2^32 bytes of scales.
        let at = (stretch * self.of_stretch) as usize;
        let mut raw = RawScales::NONE;
        // SAFETY: the caller's promise, and the layout.
        unsafe {
            // Wide groups' are in f32, which the packing has seen to.
            // Narrow groups' are 2 or 4 bytes of a row and stretch.
            let bytes = if GROUP == WIDE || self.bytes != 2 { 4 } else { 2 };
            raw.scales = load_pair(self.scales.wrapping_add(at), bytes);
            if GROUP != WIDE && has_minimums {
                raw.minimums = load_pair(self.minimums.wrapping_add(at), bytes);
            }
            if GROUP != WIDE && C::INTEGERS && self.packed.dims.scale >= ScaleType::U8Super as u32 {
                let at = (tile / (SUPER_K / TILE_K)) as usize * 16;
                raw.supers = global::load(self.supers.wrapping_add(at).cast());
                if has_minimums {
                    raw.super_minimums = global::load(self.super_minimums.wrapping_add(at).cast());
                }
            }
        }
        raw
    }

    /// The zero points of the lane's rows of a tile, if there are any.
    ///
    /// # Safety
    /// - *in-bounds*: the tile exists.
    #[inline(always)]
    pub unsafe fn raw_zeros<C: Code, const GROUP: u32>(&self, tile: u32) -> [u32; 2] {
        if !C::INTEGERS || self.packed.zeros.is_null() {
            return [0; 2];
        }
        let count = match GROUP {
            WIDE => 1,
            OF_32 => 2,
            _ => self.packed.per_stretch(),
        };
        let at = ((tile >> self.tiles_log2) * 16 * count) as usize;
        // SAFETY: the caller's promise, and the layout.
        unsafe { load_pair(self.zeros.wrapping_add(at), count) }
    }
}

/// The lane's four values of k of either row in a step, in f32.
#[inline(always)]
pub fn values<C: Code>(words: &C::Words, step: usize, zero: [u32; 2]) -> [[f32; 4]; 2] {
    let mut values = [[0.0; 4]; 2];
    // 2^23, whose last place is 1.
    const BASE: u32 = 0x4b00_0000;
    let mut row = 0;
    while row < 2 {
        let mut i = 0;
        while i < 4 {
            let code = C::code(words, step, row, i);
            values[row][i] = match C::CODES {
                Codes::Int4 | Codes::Int8 => f32::from_bits(BASE | code) - f32::from_bits(BASE | zero[row]),
                // As if it were a binary32 of the smallest exponents, times 2^126.
                Codes::E2m1 => {
                    f32::from_bits((code & 8) << 28 | (code & 7) << 22) * f32::from_bits(0x7e80_0000)
                }
                Codes::E4m3 => e4m3_to_f32(code),
                Codes::E6m9 => e6m9_to_f32(code as u16),
            };
            i += 1;
        }
        row += 1;
    }
    values
}

/// How codes become pairs of a 16-bit type.
#[cfg(not(lacks_mma_sync))]
pub trait Pair: Multiplicand {
    /// 1 twice.
    const ONES: u32;
    /// What makes an integer of 4 bits a number: 128 or 1024 for 0.
    const BASE: u32;
    /// How many bits up the three lower bits of an e2m1 go, and the power of two that then makes them its value.
    const E2M1: (u32, u32);

    /// `a · b + c`.
    fn fma(a: u32, b: u32, c: u32) -> u32;

    /// Bytes `2 h` and `2 h + 1` of a word, less the zero point.
    fn of_bytes(word: u32, h: u32, zero: u32) -> u32;

    /// The same of fp8.
    fn of_e4m3(word: u32, h: usize) -> u32;
}

#[cfg(not(lacks_mma_sync))]
impl Pair for bf16 {
    const ONES: u32 = 0x3f80_3f80;
    const BASE: u32 = 0x4300_4300;
    const E2M1: (u32, u32) = (6, 0x7e80_7e80);

    #[inline(always)]
    fn fma(a: u32, b: u32, c: u32) -> u32 {
        bf16x2_fma(a, b, c)
    }

    #[inline(always)]
    fn of_bytes(word: u32, h: u32, zero: u32) -> u32 {
        // 8 bits and the base's place are more than bf16 has: by way of f32.
        const BASE: u32 = 0x4b00_0000;
        let less = f32::from_bits(BASE | zero);
        let value = |byte: u32| f32::from_bits(cvt::prmt(word, BASE, 0x7440 | byte)) - less;
        cvt::bf16x2_from_f32(value(2 * h), value(2 * h + 1))
    }

    #[inline(always)]
    fn of_e4m3(word: u32, h: usize) -> u32 {
        if h == 0 { cvt::bf16x2_from_e4m3::<0, 1>(word) } else { cvt::bf16x2_from_e4m3::<2, 3>(word) }
    }
}

#[cfg(not(lacks_mma_sync))]
impl Pair for f16 {
    const ONES: u32 = 0x3c00_3c00;
    const BASE: u32 = 0x6400_6400;
    const E2M1: (u32, u32) = (9, 0x7400_7400);

    #[inline(always)]
    fn fma(a: u32, b: u32, c: u32) -> u32 {
        f16x2_fma(a, b, c)
    }

    #[inline(always)]
    fn of_bytes(word: u32, h: u32, zero: u32) -> u32 {
        let pair = cvt::prmt(word, Self::BASE, if h == 0 { 0x5150 } else { 0x5352 });
        f16x2_fma(pair, Self::ONES, 0x8000_8000 | Self::BASE | (zero * 0x1_0001))
    }

    #[inline(always)]
    fn of_e4m3(word: u32, h: usize) -> u32 {
        if h == 0 { cvt::f16x2_from_e4m3::<0, 1>(word) } else { cvt::f16x2_from_e4m3::<2, 3>(word) }
    }
}

/// The lane's registers of `mma`'s first operand in a step: codes less their zero points.
#[cfg(not(lacks_mma_sync))]
#[inline(always)]
pub fn fragment<C: Code<Words = FewWords>, T: Pair>(
    words: &FewWords,
    step: usize,
    zero: [u32; 2],
) -> [u32; 4] {
    let mut pairs = [0; 4];
    let mut i = 0;
    while i < 4 {
        let (pair, row) = (i / 2, i % 2);
        pairs[i] = match C::CODES {
            Codes::Int4 => {
                // (word & nibbles) | base.
                let code = cvt::lop3::<0xea>(words[step] >> (4 * i), 0x000f_000f, T::BASE);
                T::fma(code, T::ONES, 0x8000_8000 | T::BASE | (zero[row] * 0x1_0001))
            }
            Codes::Int8 => T::of_bytes(words[4 * row + step], pair as u32, zero[row]),
            Codes::E2m1 => {
                // The sign to the top of either half, the other bits to the lowest exponents.
                let (up, power) = (T::E2M1.0 as i32 - 4 * i as i32, T::E2M1.1);
                let word = words[step];
                let rest = if up >= 0 { word << up } else { word >> -up };
                let sign = (word << (12 - 4 * i)) & 0x8000_8000;
                T::fma(cvt::lop3::<0xea>(rest, 0x0007_0007 << T::E2M1.0, sign), power, 0x8000_8000)
            }
            Codes::E4m3 => T::of_e4m3(words[4 * row + step], pair),
            // Of more words; its values are no 16-bit floats.
            Codes::E6m9 => 0,
        };
        i += 1;
    }
    pairs
}
