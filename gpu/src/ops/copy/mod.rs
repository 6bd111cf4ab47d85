//! Strided copy and cast.
//!
//! Work split: as for all elementwise operators, `abi::RowTiles` deals the pieces of rows to blocks, and thread t of a
//! block takes places t, t + 256, t + 512 and t + 768 of its tile. A row is the innermost dimension; the host merges
//! dimensions that lie without gaps in both tensors, so that a contiguous copy is one long row.
//!
//! ```text
//! place → (row, piece);  row → (i0, i1, i2) by the sizes of dimensions 1 and 2;  offset = Σ i · stride
//! move: 16 bytes → 16 bytes       cast: 8 elements, 16 or 32 bytes → 16 or 32 bytes
//! ```
//!
//! Four pieces are in flight per thread, 64 bytes or more: with 1024 threads per SM that is above the 48 KiB that
//! Hopper's memory needs. What a row has beyond its whole pieces are units of one element.

use abi::ops::copy::{BLOCK_PIECES_LOG2, CopyDims, PIECES_PER_THREAD, THREADS};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, thread};

const PIECES: usize = PIECES_PER_THREAD as usize;

/// A piece between load and store: 8 elements are up to 32 bytes.
type Held = [[u32; 4]; 2];

/// From `S` to `D`: how an element and how a piece get from src to dst.
trait Transfer<S, D> {
    /// Elements of a piece.
    const PER_PIECE: usize;

    fn element(value: S) -> D;

    /// # Safety
    /// - *aligned(16)* and *in-bounds* for a piece.
    unsafe fn load(src: *const S) -> Held;

    /// # Safety
    /// - *aligned(16)*, *in-bounds* and *exclusive* for a piece.
    unsafe fn store(dst: *mut D, held: Held);
}

/// The element as it is.
struct Move;

impl<T: Copy> Transfer<T, T> for Move {
    const PER_PIECE: usize = 16 / size_of::<T>();

    #[inline(always)]
    fn element(value: T) -> T {
        value
    }

    #[inline(always)]
    unsafe fn load(src: *const T) -> Held {
        // SAFETY: the caller's promise.
        [unsafe { global::load_stream_x4(src) }, [0; 4]]
    }

    #[inline(always)]
    unsafe fn store(dst: *mut T, held: Held) {
        // SAFETY: the caller's promise.
        unsafe { global::store_x4(dst, held[0]) }
    }
}

/// The element rounded to nearest even.
struct Cast;

impl<S: Element, D: Element> Transfer<S, D> for Cast {
    const PER_PIECE: usize = 8;

    #[inline(always)]
    fn element(value: S) -> D {
        D::from_f32(value.to_f32())
    }

    #[inline(always)]
    unsafe fn load(src: *const S) -> Held {
        // SAFETY: the caller's promise: 8 elements are one or two times 16 bytes.
        unsafe {
            let low = global::load_stream_x4(src);
            let high = if S::PER_16_BYTES == 4 { global::load_stream_x4(src.add(4)) } else { [0; 4] };
            [low, high]
        }
    }

    #[inline(always)]
    unsafe fn store(dst: *mut D, held: Held) {
        let mut values = [0.0; 8];
        S::unpack(held[0], &mut values);
        if S::PER_16_BYTES == 4 {
            let mut high = [0.0; 8];
            S::unpack(held[1], &mut high);
            (values[4], values[5], values[6], values[7]) = (high[0], high[1], high[2], high[3]);
        }
        // SAFETY: the caller's promise: 8 elements are one or two times 16 bytes.
        unsafe {
            global::store_x4(dst, D::pack(&values));
            if D::PER_16_BYTES == 4 {
                let high = [values[4], values[5], values[6], values[7], 0.0, 0.0, 0.0, 0.0];
                global::store_x4(dst.add(4), D::pack(&high));
            }
        }
    }
}

/// Where a row starts in src and dst.
#[inline(always)]
fn row_offsets(row: u32, dims: &CopyDims) -> (usize, usize) {
    if dims.tiles.rows == 1 {
        return (0, 0);
    }
    // Sizes are at least 1 (Copy::run); `max` tells the compiler, which would otherwise keep a panic path.
    let (middle, inner) = (dims.outer[0].max(1), dims.outer[1].max(1));
    let (rest, i2) = (row / inner, row % inner);
    let (i0, i1) = (rest / middle, rest % middle);
    let offset = |strides: &[u64; 4]| {
        (u64::from(i0) * strides[0] + u64::from(i1) * strides[1] + u64::from(i2) * strides[2]) as usize
    };
    (offset(&dims.src_strides), offset(&dims.dst_strides))
}

/// By pieces.
///
/// # Safety
/// - Pointers and strides are *in-bounds* and *aligned(16)*, the last strides are 1 — checked in `Copy::run`, which
///   takes the scalar tile otherwise.
#[inline(always)]
unsafe fn by_piece<S: Copy, D: Copy, T: Transfer<S, D>>(src: *const S, dst: *mut D, dims: &CopyDims) {
    let mut held = [[[0u32; 4]; 2]; PIECES];
    let mut targets = [dst; PIECES];
    let mut is_whole = [false; PIECES];
    // SAFETY: row < rows and unit < units keep every access inside the views — Copy::run.
    unsafe {
        let mut i = 0;
        while i < PIECES {
            let index = thread::thread_idx_x() + i as u32 * THREADS;
            let (row, unit) = dims.tiles.locate(thread::block_idx_x(), index, BLOCK_PIECES_LOG2);
            if row < dims.tiles.rows && unit < dims.tiles.pieces {
                let (src_row, dst_row) = row_offsets(row, dims);
                is_whole[i] = unit < dims.whole_pieces;
                if is_whole[i] {
                    let col = unit as usize * T::PER_PIECE;
                    held[i] = T::load(src.add(src_row + col));
                    targets[i] = dst.add(dst_row + col);
                } else {
                    let before = dims.whole_pieces as usize * (T::PER_PIECE - 1);
                    let col = before + unit as usize;
                    global::store(dst.add(dst_row + col), T::element(global::load(src.add(src_row + col))));
                }
            }
            i += 1;
        }
        let mut i = 0;
        while i < PIECES {
            if is_whole[i] {
                T::store(targets[i], held[i]);
            }
            i += 1;
        }
    }
}

/// Element by element: the fallback for any stride and alignment.
///
/// # Safety
/// - Pointers and strides are *in-bounds* — checked in `Copy::run`.
#[inline(always)]
unsafe fn by_element<S: Copy, D: Copy, T: Transfer<S, D>>(src: *const S, dst: *mut D, dims: &CopyDims) {
    let mut i = 0;
    while i < PIECES_PER_THREAD {
        let index = thread::thread_idx_x() + i * THREADS;
        let (row, col) = dims.tiles.locate(thread::block_idx_x(), index, BLOCK_PIECES_LOG2);
        if row < dims.tiles.rows && col < dims.tiles.pieces {
            let (src_row, dst_row) = row_offsets(row, dims);
            let at = |row: usize, stride: u64| row + (u64::from(col) * stride) as usize;
            // SAFETY: row < rows and col < cols keep both accesses inside the views — Copy::run.
            unsafe {
                let value = global::load(src.add(at(src_row, dims.src_strides[3])));
                global::store(dst.add(at(dst_row, dims.dst_strides[3])), T::element(value));
            }
        }
        i += 1;
    }
}

macro_rules! body {
    (Pieces, $kind:ident) => {
        by_piece::<_, _, $kind>
    };
    (Scalar, $kind:ident) => {
        by_element::<_, _, $kind>
    };
}

macro_rules! entries {
    ($($entry:ident => $src:ident, $dst:ident, $kind:ident($($of:tt),*), $tile:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::copy`.
        ///
        /// # Safety
        /// - Arguments as `Copy::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(src: *const $src, dst: *mut $dst, dims: CopyDims) {
            // SAFETY: arguments as the body asks, by `Copy::run`.
            unsafe { body!($tile, $kind)(src, dst, &dims) }
        }
    )*};
}
abi::copy_table!(entries);
