//! Transposition: parameters and entry points.

/// Sizes and strides of one launch; strides in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransposeDims {
    /// From one matrix to the next, one row to the next, one column to the next, in x.
    pub x_strides: [u64; 3],
    /// From one matrix to the next, one row to the next (a column of x), one column to the next, in out.
    pub out_strides: [u64; 3],
    /// Rows of a matrix of x.
    pub rows: u32,
    /// Columns of a matrix of x.
    pub cols: u32,
    /// Tiles that the rows make.
    pub row_tiles: u32,
    /// Tiles that the columns make.
    pub col_tiles: u32,
}

const _: () = assert!(size_of::<TransposeDims>() == 64);
impl crate::Params for TransposeDims {}

/// Threads of a block.
pub const THREADS: u32 = 256;
/// 32-bit words of a tile's row.
pub const TILE_WORDS: u32 = 32;

/// How elements are read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransposeAccess {
    /// By words of 4 bytes.
    Words,
    /// Element by element: any stride and alignment.
    Scalar,
}

/// One kernel of the operator.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct TransposeVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Size of an element in bytes.
    pub element_bytes: usize,
    /// How elements are read and written.
    pub access: TransposeAccess,
}

/// Elements of this size in a word.
pub const fn per_word(element_bytes: usize) -> u32 {
    4 / element_bytes as u32
}

/// Rows of a tile: at least 64, so that a thread has 8 words or more in flight.
pub const fn tile_rows(element_bytes: usize) -> u32 {
    let square = tile_cols(element_bytes);
    if square < 64 { 64 } else { square }
}

/// Columns of a tile.
pub const fn tile_cols(element_bytes: usize) -> u32 {
    TILE_WORDS * per_word(element_bytes)
}

/// Where word `word` of row `row` of a tile lies in shared memory, in words.
///
/// A word holds p elements of a row; transposed, a lane needs the same word of p neighbouring rows. The rows are
/// therefore dealt to p groups by their remainder, and each row takes 33 words:
///
/// ```text
/// address(row, word) = (row / p + (row mod p) · tile_rows / p) · 33 + word
/// write: lane l writes word l of one row:               bank = const + l,       32 different ones
/// read:  lane l reads word w of rows p·l + k, k fixed:  bank = const + 33·l = const + l (mod 32), the same
/// ```
#[inline(always)]
pub const fn tile_address(row: u32, word: u32, element_bytes: usize) -> u32 {
    let p = per_word(element_bytes);
    (row / p + row % p * (tile_rows(element_bytes) / p)) * (TILE_WORDS + 1) + word
}

/// Shared memory of a block.
pub const fn smem_bytes(element_bytes: usize) -> u32 {
    tile_rows(element_bytes) * (TILE_WORDS + 1) * 4
}

/// Hands every row of the table to the macro `$callback`: the type that the device code sees, its size, the access.
#[macro_export]
macro_rules! transpose_table {
    ($callback:path) => {
        $callback! {
            transpose_b8__m128n128__sm61 => u8, 1, Words;
            transpose_b8_scalar__m128n128__sm61 => u8, 1, Scalar;
            transpose_b16__m64n64__sm61 => u16, 2, Words;
            transpose_b16_scalar__m64n64__sm61 => u16, 2, Scalar;
            transpose_b32__m64n32__sm61 => u32, 4, Words;
            transpose_b32_scalar__m64n32__sm61 => u32, 4, Scalar;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $bytes:literal, $access:ident;)*) => {
        /// Every kernel of the operator.
        pub const VARIANTS: &[TransposeVariant] = &[$(TransposeVariant {
            entry: stringify!($entry),
            element_bytes: $bytes,
            access: TransposeAccess::$access,
        }),*];
    };
}
transpose_table!(variants);

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_tile_fills_its_memory_without_overlap() {
        for bytes in [1, 2, 4] {
            let words = (0..tile_rows(bytes)).flat_map(|row| (0..TILE_WORDS).map(move |word| (row, word)));
            let addresses: BTreeSet<u32> = words.map(|(row, word)| tile_address(row, word, bytes)).collect();
            assert_eq!(addresses.len() as u32, tile_rows(bytes) * TILE_WORDS);
            assert!(addresses.last().unwrap() * 4 < smem_bytes(bytes));
            assert!(smem_bytes(bytes) <= 48 << 10);
        }
    }

    #[test]
    fn no_bank_conflicts() {
        let banks = |addresses: &mut dyn Iterator<Item = u32>| {
            addresses.map(|address| address % 32).collect::<BTreeSet<u32>>().len()
        };
        for bytes in [1, 2, 4] {
            let p = per_word(bytes);
            for row in 0..tile_rows(bytes) {
                assert_eq!(banks(&mut (0..32).map(|lane| tile_address(row, lane, bytes))), 32);
            }
            for word in 0..TILE_WORDS {
                for k in 0..p {
                    for first in (0..tile_rows(bytes) / p).step_by(32) {
                        let read = |lane| tile_address((first + lane) * p + k, word, bytes);
                        assert_eq!(banks(&mut (0..32).map(read)), 32, "{bytes} {word} {k} {first}");
                    }
                }
            }
        }
    }
}
