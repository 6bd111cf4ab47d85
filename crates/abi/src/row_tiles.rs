/// How the pieces of rows are dealt to blocks, for operators that treat every piece alike.
///
/// A block covers a tile of `2^cols_log2` pieces of each of `2^(block_log2 − cols_log2)` rows; the tiles of a row
/// follow one another. Both sides use it: the host to size the grid, the kernel to find its piece.
///
/// ```text
/// pieces    0 … C-1   C … 2C-1  …
/// row 0   | block 0 | block 1 | …        C = 2^cols_log2, C · R = 2^block_log2
///   …     |         |         |
/// row R-1 |_________|_________|
/// row R   | block n | …                  n = tiles_per_row
/// ```
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowTiles {
    /// Rows, below 2^31.
    pub rows: u32,
    /// Pieces of a row, below 2^31.
    pub pieces: u32,
    /// Logarithm of a tile's pieces per row.
    pub cols_log2: u32,
    /// Tiles side by side.
    pub tiles_per_row: u32,
}

/// Fewest pieces of a row in a tile (unless rows are shorter): 8 of 16 bytes are a cache line.
const MIN_COLS_LOG2: u32 = 3;

impl RowTiles {
    /// The tile shape with the fewest blocks, each of `2^block_log2` pieces; the widest of those.
    pub const fn new(rows: u32, pieces: u32, block_log2: u32) -> Self {
        let widest = ceil_log2(pieces);
        let mut cols_log2 = if widest < block_log2 { widest } else { block_log2 };
        let least = if cols_log2 < MIN_COLS_LOG2 { cols_log2 } else { MIN_COLS_LOG2 };
        let mut best = Self::with_cols(rows, pieces, cols_log2);
        while cols_log2 > least {
            cols_log2 -= 1;
            let tiles = Self::with_cols(rows, pieces, cols_log2);
            if tiles.blocks(block_log2) < best.blocks(block_log2) {
                best = tiles;
            }
        }
        best
    }

    const fn with_cols(rows: u32, pieces: u32, cols_log2: u32) -> Self {
        RowTiles { rows, pieces, cols_log2, tiles_per_row: pieces.div_ceil(1 << cols_log2) }
    }

    /// Blocks of the grid.
    pub const fn blocks(&self, block_log2: u32) -> u64 {
        self.rows.div_ceil(1 << (block_log2 - self.cols_log2)) as u64 * self.tiles_per_row as u64
    }

    /// Row and piece of place `index` in `block`; outside `rows` or `pieces` there is nothing to do.
    #[inline(always)]
    pub const fn locate(&self, block: u32, index: u32, block_log2: u32) -> (u32, u32) {
        // At least 1 wherever there is a block; the kernel's compiler would otherwise keep a panic path.
        let tiles_per_row = if self.tiles_per_row == 0 { 1 } else { self.tiles_per_row };
        let (tile_row, tile) = (block / tiles_per_row, block % tiles_per_row);
        let row = (tile_row << (block_log2 - self.cols_log2)) + (index >> self.cols_log2);
        let piece = (tile << self.cols_log2) + (index & ((1 << self.cols_log2) - 1));
        (row, piece)
    }
}

/// ⌈log2(n)⌉; 0 for 0.
const fn ceil_log2(n: u32) -> u32 {
    if n < 2 { 0 } else { 32 - (n - 1).leading_zeros() }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::RowTiles;
    use std::vec;

    #[test]
    fn every_piece_is_dealt_once() {
        for rows in [0, 1, 2, 3, 15, 16, 17, 100] {
            for pieces in [0, 1, 2, 5, 7, 8, 9, 31, 64, 65, 152, 300] {
                for block_log2 in [3, 6, 8] {
                    let tiles = RowTiles::new(rows, pieces, block_log2);
                    let mut seen = vec![0; (rows * pieces) as usize];
                    for block in 0..tiles.blocks(block_log2) as u32 {
                        for index in 0..1 << block_log2 {
                            let (row, piece) = tiles.locate(block, index, block_log2);
                            if row < rows && piece < pieces {
                                seen[(row * pieces + piece) as usize] += 1;
                            }
                        }
                    }
                    assert!(seen.iter().all(|&n| n == 1), "{rows} {pieces} {block_log2}");
                }
            }
        }
    }

    #[test]
    fn shapes() {
        let shape = |rows, pieces, block_log2| {
            let tiles = RowTiles::new(rows, pieces, block_log2);
            (1 << tiles.cols_log2, tiles.blocks(block_log2))
        };
        // Rows that are not a power of two: 1216 = 19 · 64, nothing idle.
        assert_eq!(shape(32768, 1216, 9), (64, 32768 * 1216 / 512));
        assert_eq!(shape(1, 1216, 10), (1024, 2));
        assert_eq!(shape(1 << 20, 16, 10), (16, 1 << 14));
        assert_eq!(shape(7, 1, 10), (1, 1));
        // As large as they get.
        assert_eq!(shape((1 << 31) - 1, (1 << 31) - 1, 10).1, (1 << 21) * ((1 << 31) - 1));
    }
}
