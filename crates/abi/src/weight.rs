//! How a weight `[n, k]` lies in device memory when it is not a plain matrix: quantised, and packed for the kernels.
//!
//! ```text
//! codes    [n / 16][k / 64] tiles of 16 rows and 64 of k, 512 bytes each for 4 bits, 1024 for 8, 2048 for 16. Lane l
//!          of a warp takes 16 bytes (for 8 bits twice): of rows l / 4 and l / 4 + 8, and of k 16 j + 4 (l % 4) to + 3
//!          for j = 0 … 3. That is what `mma` m16n8k16 wants of its first operand in a lane, so codes go from memory
//!          through registers into the product. Tiles of 8 bits are also rows of 64 bytes, as `wgmma` takes them from
//!          shared memory; their k are not in order ([`byte_place`]), nor need they be, if those of the other operand
//!          are not.
//! 4 bits   word j has k's 16 of step j: pair i = 2 p + h (p: k's + 0, 1 or + 2, 3; h: the upper eight rows) has its
//!          first element at bit 4 i and its second at bit 16 + 4 i
//! 8 bits   word j has k's four of step j, in order; those of row l / 4 are in the first 512 bytes, of l / 4 + 8 in the
//!          others
//! 16 bits  a lane takes 16 bytes four times, 512 bytes apart: of row l / 4 and steps 0 and 1, of that row and steps 2
//!          and 3, then of row l / 4 + 8; in each k's four of one step, in order, and those of the next
//! scales   [n / 16][k / max(64, group)][16 rows][max(1, 64 / group)], rows in the order 0, 8, 1, 9, …, so that a
//!          lane's two are neighbours, in binary32 for groups of 64 and more; or two for `2^rows_log2` rows, that of
//!          the even ones and that of the odd ones, each twice: [n / rows][k / group][4]. A gate's and up's rows in
//!          turn have blocks so, too
//! minimums, zero points: as the scales
//! order    [k], 32 bits: which column lies at each place, where they are not in order
//! supers   [n / 16][k / 256][16 rows], in the same order, binary16: factors of the scales; those of the minimums
//!          likewise
//! ```
//!
//! Rows and columns beyond n and k are there with codes of value 0, so that whole tiles can be read.
//!
//! The value of an element is `scale · (code − zero) − minimum`. Without zero points, integers count from the middle of
//! their range ([`Codes::zero`]), or from 0 where there are minimums.

/// Rows of a tile.
pub const TILE_ROWS: u32 = 16;
/// Elements of k of a tile.
pub const TILE_K: u32 = 64;
/// Elements of k for which all scales are the same at least: a step of `mma`.
pub const STEP_K: u32 = 16;
/// Elements of k that share a super scale.
pub const SUPER_K: u32 = 256;

/// Scales of a block of rows: of the even ones, twice, and of the odd ones, twice.
pub const BLOCK_SCALES: u32 = 4;

/// Where the element of k is in a row of a tile of 8 bits.
pub const fn byte_place(k: u32) -> u32 {
    k % 16 / 4 * 16 + k / 16 * 4 + k % 4
}

/// Where the scale of a row of a tile lies among those of its 16 rows.
pub const fn scale_place(row: u32) -> u32 {
    row % 8 * 2 + row / 8
}

/// The largest number of 6 bits of exponent and 9 of mantissa: `(2 − 2^-8) · 2^32`.
pub const E6M9_MAX: f32 = 8_573_157_376.0;
/// From the exponents of those 16-bit floats to those of binary32, in place.
const E6M9_BIAS: u32 = (127 - 31) << 23;

/// The value of a 16-bit float with 6 bits of exponent (bias 31) and 9 of mantissa, exactly: `± (1 + mantissa / 512) ·
/// 2^(exponent − 31)`. There are no subnormal numbers; 15 bits of 0 are 0, 15 of 1 NaN, and there is no infinity
/// (DLFloat: Agrawal et al., ARITH 2019).
#[inline(always)]
pub const fn e6m9_to_f32(code: u16) -> f32 {
    let magnitude = (code & 0x7fff) as u32;
    let bits = if magnitude == 0 {
        0
    } else if magnitude == 0x7fff {
        0x7fc0_0000
    } else {
        (magnitude << 14) + E6M9_BIAS
    };
    f32::from_bits(((code & 0x8000) as u32) << 16 | bits)
}

/// The nearest of these floats, ties to the even code; beyond the largest, that (also for infinity); NaN stays NaN.
#[inline(always)]
pub const fn e6m9_from_f32(value: f32) -> u16 {
    const LEAST: u32 = e6m9_to_f32(1).to_bits();
    let (sign, bits) = ((value.to_bits() >> 16 & 0x8000) as u16, value.to_bits() & 0x7fff_ffff);
    let magnitude = if bits > 0x7f80_0000 {
        0x7fff
    } else if bits <= LEAST - (1 << 23) {
        // Up to half of the least.
        0
    } else if bits <= LEAST {
        1
    } else {
        let rounded = (bits - E6M9_BIAS + 0x1fff + (bits >> 14 & 1)) >> 14;
        if rounded > 0x7ffe { 0x7ffe } else { rounded as u16 }
    };
    sign | magnitude
}

/// What a code stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codes {
    /// 4 bits, 0 to 15, less a zero point: 8 where there are neither those nor minimums.
    Int4,
    /// 8 bits, 0 to 255, less a zero point: 128 where there are neither those nor minimums. Signed integers are stored
    /// with 128 added.
    Int8,
    /// fp4: sign, 2 bits of exponent, 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    E2m1,
    /// fp8: sign, 4 bits of exponent, 3 of mantissa, at most 448.
    E4m3,
    /// 16 bits: sign, 6 bits of exponent, 9 of mantissa ([`e6m9_to_f32`]).
    E6m9,
}

impl Codes {
    /// All of them.
    pub const ALL: [Codes; 5] = [Codes::Int4, Codes::Int8, Codes::E2m1, Codes::E4m3, Codes::E6m9];

    /// Bits of a code.
    pub const fn bits(self) -> u32 {
        match self {
            Codes::Int4 | Codes::E2m1 => 4,
            Codes::Int8 | Codes::E4m3 => 8,
            Codes::E6m9 => 16,
        }
    }

    /// Bytes of a code by itself.
    pub const fn bytes(self) -> usize {
        self.bits().div_ceil(8) as usize
    }

    /// 32-bit words of a tile that a lane has.
    pub const fn words(self) -> u32 {
        self.bits()
    }

    /// Bytes of a tile.
    pub const fn tile_bytes(self) -> u32 {
        TILE_ROWS * TILE_K * self.bits() / 8
    }

    /// The zero point where none is stored; that of floats is not used.
    pub const fn zero(self) -> u8 {
        match self {
            Codes::Int4 => 8,
            Codes::Int8 => 128,
            Codes::E2m1 | Codes::E4m3 | Codes::E6m9 => 0,
        }
    }

    /// The largest magnitude that they stand for. Quantisers put the largest value of a group on it; of 4-bit integers
    /// that is between two codes, so that neither end of their range is wasted.
    pub const fn largest(self) -> f32 {
        match self {
            Codes::Int4 => 7.5,
            Codes::Int8 => 127.0,
            Codes::E2m1 => 6.0,
            Codes::E4m3 => 448.0,
            Codes::E6m9 => E6M9_MAX,
        }
    }

    /// The largest code of an integer.
    pub const fn most(self) -> u8 {
        if self.bits() == 4 { 15 } else { 255 }
    }

    /// The name in entry points and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Codes::Int4 => "int4",
            Codes::Int8 => "int8",
            Codes::E2m1 => "e2m1",
            Codes::E4m3 => "e4m3",
            Codes::E6m9 => "e6m9",
        }
    }

    /// Where the code of a row and column of a tile lies: word of the tile, and bit of the word.
    pub const fn place(self, row: u32, k: u32) -> (u32, u32) {
        match self.bits() {
            4 => {
                let (pair, second, upper) = (k % 4 / 2, k % 2, row / 8);
                let lane = row % 8 * 4 + k % 16 / 4;
                (lane * 4 + k / 16, 4 * (2 * pair + upper) + 16 * second)
            }
            8 => {
                let byte = row * TILE_K + byte_place(k);
                (byte / 4, 8 * (byte % 4))
            }
            _ => {
                let (lane, step) = (row % 8 * 4 + k % 16 / 4, k / 16);
                let line = row / 8 * 2 + step / 2;
                (line * 128 + lane * 4 + step % 2 * 2 + k % 4 / 2, 16 * (k % 2))
            }
        }
    }
}

/// How a scale or minimum is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum ScaleType {
    /// Binary32.
    F32 = 0,
    /// Binary16.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
    /// A power of two: 2^(byte − 127).
    E8m0 = 3,
    /// fp8 times the layout's global scale.
    E4m3 = 4,
    /// A byte from 0 to 255 times the super scale of its 256 of k.
    U8Super = 5,
    /// A byte from −128 to 127 times the super scale of its 256 of k.
    I8Super = 6,
}

impl ScaleType {
    /// All of them, by their numbers.
    pub const ALL: [ScaleType; 7] = [
        ScaleType::F32,
        ScaleType::F16,
        ScaleType::Bf16,
        ScaleType::E8m0,
        ScaleType::E4m3,
        ScaleType::U8Super,
        ScaleType::I8Super,
    ];

    /// Bytes of one.
    pub const fn bytes(self) -> u32 {
        match self {
            ScaleType::F32 => 4,
            ScaleType::F16 | ScaleType::Bf16 => 2,
            _ => 1,
        }
    }

    /// Whether super scales belong to it.
    pub const fn has_supers(self) -> bool {
        matches!(self, ScaleType::U8Super | ScaleType::I8Super)
    }
}

/// A layout: everything about a packed weight but its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// What a code stands for.
    pub codes: Codes,
    /// Elements of k that share a scale: 16, 32, 64, … or 0 for all of a row.
    pub group: u32,
    /// Rows that share their scales: 1, or a power of two from 16 on, of which the even ones share one and the odd ones
    /// another, which may be the same.
    pub rows: u32,
    /// What scales are; how they are stored says [`Layout::stored_scale`].
    pub scale: ScaleType,
    /// Whether each scale has a zero point, a byte; for integers.
    pub zeros: bool,
    /// Whether each scale has a minimum, stored as the scales are.
    pub minimums: bool,
    /// Whether the columns lie in an order of their own, in which those of a group are neighbours (GPTQ's `desc_act`):
    /// a `u32` for each of k says which column lies there. Rows that are multiplied are brought into that order first.
    pub permuted: bool,
}

impl Layout {
    /// Why the kernels cannot take it, if they cannot.
    pub const fn problem(&self) -> Option<&'static str> {
        let Layout { codes, group, rows, scale, zeros, minimums, permuted: _ } = *self;
        if group != 0 && (!group.is_power_of_two() || group < STEP_K || group > 1 << 15) {
            return Some("a group of 16, 32, 64, … 32768, or of all of a row");
        }
        if !rows.is_power_of_two() || (rows > 1 && rows < TILE_ROWS) {
            return Some("scales for one row, or for 16, 32, 64, …");
        }
        if group != 0 && group < TILE_K && TILE_K / group * scale.bytes() > 4 {
            return Some("scales of at most 4 bytes for 64 elements of a row");
        }
        if rows > 1 && (group != 0 && group < TILE_K || zeros || minimums || scale.has_supers()) {
            return Some(
                "scales of several rows for 64 elements at least, without zero points, minimums or super scales",
            );
        }
        if scale.has_supers() && (group == 0 || group >= TILE_K) {
            return Some("super scales of groups below 64");
        }
        let is_one = group == 0 && rows == 1 && matches!(scale, ScaleType::F32);
        if matches!(codes, Codes::E6m9) && !is_one {
            return Some("one scale in binary32 for a row of 16-bit floats");
        }
        let integers = matches!(codes, Codes::Int4 | Codes::Int8);
        if (zeros || minimums || scale.has_supers()) && !integers {
            return Some("zero points, minimums and super scales of integers");
        }
        if minimums && (zeros || group != 32) {
            return Some("minimums of groups of 32, without zero points beside them");
        }
        if matches!(scale, ScaleType::E8m0 | ScaleType::E4m3) && integers {
            return Some("scales that are powers of two or fp8 of floats");
        }
        if zeros && group != 0 && group < TILE_K && TILE_K / group > 4 {
            return Some("at most 4 zero points for 64 elements of a row");
        }
        None
    }

    /// Why kernels that take rows as they are given cannot take it, if they cannot: those of experts and tables.
    pub const fn problem_in_order(&self) -> Option<&'static str> {
        if self.permuted { Some("columns that are in order") } else { self.problem() }
    }

    /// The zero point where none is stored.
    pub const fn zero(&self) -> u8 {
        if self.minimums { 0 } else { self.codes.zero() }
    }

    /// Whether all of a tile's k shares a scale.
    pub const fn is_wide(&self) -> bool {
        self.group == 0 || self.group >= TILE_K
    }

    /// How scales lie in device memory: where all of a tile's k shares one, in binary32, with the global scale
    /// multiplied in.
    pub const fn stored_scale(&self) -> ScaleType {
        if self.is_wide() { ScaleType::F32 } else { self.scale }
    }

    /// Bits of a weight, its scales and all: what a product reads.
    pub fn bits_per_weight(&self, k: u32) -> f32 {
        let group = if self.group == 0 { k.max(1) } else { self.group } as f32 * self.rows as f32;
        let parts = self.stored_scale().bytes() * (1 + self.minimums as u32) + self.zeros as u32;
        let supers = if self.scale.has_supers() { 16 * (1 + self.minimums as u32) } else { 0 };
        self.codes.bits() as f32 + (8 * parts) as f32 / group + supers as f32 / SUPER_K as f32
    }
}

/// A packed weight's layout and sizes as kernels take them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightDims {
    /// Tiles of a row of tiles: k / 64, rounded up.
    pub tiles: u32,
    /// Scales of a row along k, in stretches of 64 or more.
    pub stretches: u32,
    /// Binary logarithm of the steps of 16 that share a scale; 31 where all do.
    pub group_log2: u32,
    /// Binary logarithm of the rows that share a scale, at least 4; 0 for one.
    pub rows_log2: u32,
    /// The [`ScaleType`].
    pub scale: u32,
    /// Factor of [`ScaleType::E4m3`].
    pub global: f32,
    /// Rows of tiles of an expert: from one expert's part to the next's.
    pub row_blocks: u32,
    /// The first row of tiles that is meant.
    pub first_block: u32,
}

const _: () = assert!(size_of::<WeightDims>() == 32);
impl crate::Params for WeightDims {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e6m9_is_the_nearest() {
        for code in 0..0x7ffe {
            let [low, high] = [code, code + 1].map(|code| f64::from(e6m9_to_f32(code)));
            let middle = ((low + high) / 2.0) as f32;
            let even = code + code % 2;
            let found = [middle.next_down(), middle, middle.next_up()].map(e6m9_from_f32);
            assert_eq!(found, [code, even, code + 1], "{low:e} to {high:e}");
            assert_eq!(e6m9_from_f32(-middle), 0x8000 | even);
            assert_eq!(e6m9_from_f32(high as f32), code + 1);
        }
        for large in [E6M9_MAX.next_up(), f32::MAX, f32::INFINITY] {
            assert_eq!([large, -large].map(e6m9_from_f32), [0x7ffe, 0xfffe]);
        }
        assert_eq!(e6m9_to_f32(0x7ffe), E6M9_MAX);
        assert!(e6m9_to_f32(0x7fff).is_nan() && e6m9_from_f32(f32::NAN) == 0x7fff);
        assert_eq!([1.0, -2.0, 1.5, 0.0, -0.0].map(e6m9_from_f32), [0x3e00, 0xc000, 0x3f00, 0, 0x8000]);
    }

    /// Every code of a tile has a place of its own.
    #[test]
    fn places_differ() {
        for codes in Codes::ALL {
            let mut taken = [[false; 32]; 512];
            for row in 0..TILE_ROWS {
                for k in 0..TILE_K {
                    let (word, bit) = codes.place(row, k);
                    assert!(word < codes.tile_bytes() / 4 && bit + codes.bits() <= 32);
                    assert!(bit % codes.bits() == 0);
                    let taken = &mut taken[word as usize][bit as usize];
                    assert!(!*taken, "{codes:?} {row} {k}");
                    *taken = true;
                }
            }
        }
    }
}
