//! Transposition of the matrices of a batch: `out[b, col, row] = x[b, row, col]`.
//!
//! Work split: a block of 8 warps moves a tile through shared memory, so that a warp reads 32 words of a row of x and
//! writes 32 words of a row of out: whole lines both ways. A word holds p = 4, 2 or 1 elements of 1, 2 or 4 bytes; a
//! tile is 32 words wide and at least 64 rows high:
//!
//! ```text
//! x     row r      | word 0 | … | word 31 |  warp w reads rows w, w + 8, …, lane l word l            → shared memory
//! out   row p·j+k  | word 0 | … |            warp w writes rows p·j + k for j = w, w + 8, …, all k
//!                    lane l: element k of word j of rows p·l … p·l + p−1 of the tile
//! ```
//!
//! A lane that reads word j of p neighbouring rows has a p × p square of elements: transposed in registers it is one
//! word of each of p rows of out. `abi::ops::transpose::tile_address` has the layout in shared memory and its bank
//! arithmetic: no conflicts, neither way.
//!
//! 8 to 16 words are in flight per thread; with 2048 threads per SM that is 64 KiB and more.

use abi::ops::transpose::{THREADS, TILE_WORDS, TransposeDims, per_word, tile_address, tile_cols, tile_rows};
use cuda_std::{global, kernel, shared, thread};

const WARPS: u32 = THREADS / 32;

/// An unsigned integer of 1, 2 or 4 bytes.
trait Bits: Copy {
    /// In the lowest bits.
    fn to_word(self) -> u32;
    /// From the lowest bits.
    fn from_word(word: u32) -> Self;
}

macro_rules! bits {
    ($($type:ident),*) => {$(
        impl Bits for $type {
            #[inline(always)]
            fn to_word(self) -> u32 {
                self as u32
            }

            #[inline(always)]
            fn from_word(word: u32) -> Self {
                word as $type
            }
        }
    )*};
}
bits!(u8, u16, u32);

/// Elements `first..first + p` of a line of `len` elements, `stride` apart, as a word; those beyond `len` are 0.
///
/// # Safety
/// - The line is *in-bounds*; with `WORDS` its stride is 1, and its start and `first` are *aligned(4)*.
#[inline(always)]
unsafe fn load_word<T: Bits, const WORDS: bool>(line: *const T, first: u32, len: u32, stride: u64) -> u32 {
    let p = per_word(size_of::<T>());
    // SAFETY: every element that is read lies below `len`.
    unsafe {
        if WORDS && first + p <= len {
            return global::load(line.add(first as usize).cast::<u32>());
        }
        let mut word = 0;
        let mut k = 0;
        while k < p {
            if first + k < len {
                let element = global::load(line.add((u64::from(first + k) * stride) as usize));
                word |= element.to_word() << (k * 8 * size_of::<T>() as u32);
            }
            k += 1;
        }
        word
    }
}

/// Stores a word as elements `first..first + p` of a line of `len` elements; those beyond `len` are dropped.
///
/// # Safety
/// - As [`load_word`], and *exclusive*.
#[inline(always)]
unsafe fn store_word<T: Bits, const WORDS: bool>(line: *mut T, first: u32, len: u32, stride: u64, word: u32) {
    let p = per_word(size_of::<T>());
    // SAFETY: every element that is written lies below `len`.
    unsafe {
        if WORDS && first + p <= len {
            global::store(line.add(first as usize).cast::<u32>(), word);
            return;
        }
        let mut k = 0;
        while k < p {
            if first + k < len {
                let element = T::from_word(word >> (k * 8 * size_of::<T>() as u32));
                global::store(line.add((u64::from(first + k) * stride) as usize), element);
            }
            k += 1;
        }
    }
}

/// The p × p square of elements in p words, transposed.
#[inline(always)]
fn transpose_square<T>(words: [u32; 4]) -> [u32; 4] {
    let [a, b, c, d] = words;
    match size_of::<T>() {
        1 => {
            // Two steps: 16-bit halves between words two apart, then bytes between neighbours.
            let (ac_low, bd_low) = (a & 0xffff | c << 16, b & 0xffff | d << 16);
            let (ac_high, bd_high) = (a >> 16 | c & 0xffff_0000, b >> 16 | d & 0xffff_0000);
            let even = |x: u32, y: u32| x & 0x00ff_00ff | (y & 0x00ff_00ff) << 8;
            let odd = |x: u32, y: u32| (x >> 8) & 0x00ff_00ff | y & 0xff00_ff00;
            [even(ac_low, bd_low), odd(ac_low, bd_low), even(ac_high, bd_high), odd(ac_high, bd_high)]
        }
        2 => [a & 0xffff | b << 16, a >> 16 | b & 0xffff_0000, 0, 0],
        _ => words,
    }
}

/// Moves one tile. `ROUNDS` is the tile's rows per warp; `HALVES` the words of a column of the tile over 32.
///
/// # Safety
/// - One block per tile, all its threads (*converged*), with the shared memory of a tile.
/// - Pointers and strides are *in-bounds*, with `WORDS` *aligned(4)* and 1 in the last dimension — checked in
///   `Transpose::run`, which takes the other kernel otherwise.
#[inline(always)]
unsafe fn tile<T: Bits, const WORDS: bool, const ROUNDS: usize, const HALVES: u32>(
    x: *const T,
    out: *mut T,
    dims: &TransposeDims,
) {
    let bytes = const { size_of::<T>() };
    let p = per_word(bytes);
    let (lane, warp) = (thread::lane(), thread::warp_idx());
    // At least 1 wherever there is a block; `max` tells the compiler, which would otherwise keep a panic path.
    let (row_tiles, col_tiles) = (dims.row_tiles.max(1), dims.col_tiles.max(1));
    let tile = thread::block_idx_x();
    let (rest, col_tile) = (tile / col_tiles, tile % col_tiles);
    let (batch, row_tile) = (u64::from(rest / row_tiles), rest % row_tiles);
    let (first_row, first_col) = (row_tile * tile_rows(bytes), col_tile * tile_cols(bytes));
    let base = shared::base();
    // SAFETY: row < rows and the columns below cols keep global accesses inside the views — Transpose::run. Shared
    // addresses are those of `tile_address`, each written by one lane; the barrier lies between writes and reads.
    unsafe {
        let matrix = x.add((batch * dims.x_strides[0]) as usize);
        let mut words = [0u32; ROUNDS];
        let mut i = 0;
        while i < ROUNDS {
            let row = first_row + warp + i as u32 * WARPS;
            if row < dims.rows {
                let line = matrix.add((u64::from(row) * dims.x_strides[1]) as usize);
                words[i] = load_word::<T, WORDS>(line, first_col + lane * p, dims.cols, dims.x_strides[2]);
            }
            i += 1;
        }
        let mut i = 0;
        while i < ROUNDS {
            let row = warp + i as u32 * WARPS;
            shared::store_u32(base + 4 * tile_address(row, lane, bytes), words[i]);
            i += 1;
        }
        thread::sync_threads();

        let matrix = out.add((batch * dims.out_strides[0]) as usize);
        let mut i = 0;
        while i < TILE_WORDS / WARPS {
            let word = warp + i * WARPS;
            let mut half = 0;
            while half < HALVES {
                let row = (half * 32 + lane) * p;
                let mut square = [0u32; 4];
                let mut k = 0;
                while k < p {
                    square[k as usize] = shared::load_u32(base + 4 * tile_address(row + k, word, bytes));
                    k += 1;
                }
                let square = transpose_square::<T>(square);
                let mut k = 0;
                while k < p {
                    let col = first_col + word * p + k;
                    if col < dims.cols {
                        let line = matrix.add((u64::from(col) * dims.out_strides[1]) as usize);
                        let value = square[k as usize];
                        store_word::<T, WORDS>(line, first_row + row, dims.rows, dims.out_strides[2], value);
                    }
                    k += 1;
                }
                half += 1;
            }
            i += 1;
        }
    }
}

macro_rules! body {
    (Words, $type:ident, $bytes:literal) => {
        tile::<$type, true, { (tile_rows($bytes) / WARPS) as usize }, { tile_rows($bytes) / tile_cols($bytes) }>
    };
    (Scalar, $type:ident, $bytes:literal) => {
        tile::<$type, false, { (tile_rows($bytes) / WARPS) as usize }, { tile_rows($bytes) / tile_cols($bytes) }>
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $bytes:literal, $access:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::transpose`.
        ///
        /// # Safety
        /// - Arguments as `Transpose::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(x: *const $type, out: *mut $type, dims: TransposeDims) {
            // SAFETY: arguments as the body asks, by `Transpose::run`.
            unsafe { body!($access, $type, $bytes)(x, out, &dims) }
        }
    )*};
}
abi::transpose_table!(entries);
