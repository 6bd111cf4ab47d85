//! Rotary position embedding: each pair (a, b) of a head becomes `(a·cos − b·sin, b·cos + a·sin)` of its token's
//! angles.
//!
//! Work split: a thread takes the same place of four heads of a token, so that it reads cos and sin once for them. A
//! place (unit) is two pieces of 16 bytes, one of each half (half-split, 8 pairs of 16-bit elements), or one piece
//! (interleaved, 4 pairs); places beyond the rotated part are copied. Neighbouring lanes take neighbouring places and
//! then neighbouring heads, so a warp's load is whole lines:
//!
//! ```text
//! head, 128 bf16 | 0 | 1 | … | 7 | 8 | 9 | … | 15 |     thread u: pieces u and u + 8 of heads g, g + G, g + 2G, g + 3G
//! lanes            0   1       7   0   1        7          (G groups)
//! ```
//!
//! Eight loads of 16 bytes per thread are issued before the first use: with 512 threads per SM that is 64 KiB in
//! flight. The tables are f32 and are read through the read-only path; a token's heads share them in L1.
//!
//! x and out may be the same memory: a thread reads all that it will write before it writes, and nobody else reads it.
//! x is therefore not read through the read-only path.

use abi::ops::rope::{BLOCK_PIECES_LOG2, HEADS_PER_THREAD, RopeDims, RopeStyle};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, kernel, thread};

use crate::tile::rotation::{load_angles, rotate};

const HEADS: usize = HEADS_PER_THREAD as usize;

/// What a thread works on.
struct Place {
    /// Whether there is anything to do.
    is_inside: bool,
    /// First head of the group.
    head: u32,
    unit: u32,
    /// Where the token's data start in x and out, and its angles in the tables.
    x: usize,
    out: usize,
    table: usize,
}

impl Place {
    /// # Safety
    /// - `positions` is *in-bounds* for `tiles.rows` tokens — checked in `Rope::run`.
    #[inline(always)]
    unsafe fn new(positions: *const u32, dims: &RopeDims) -> Self {
        let (token, piece) =
            dims.tiles.locate(thread::block_idx_x(), thread::thread_idx_x(), BLOCK_PIECES_LOG2);
        let is_inside = token < dims.tiles.rows && piece < dims.tiles.pieces;
        // `units` is at least 1 (Rope::run); `max` tells the compiler, which would otherwise keep a panic path.
        let units = dims.units.max(1);
        let position = if is_inside {
            // SAFETY: token < rows — Rope::run.
            unsafe { global::load(positions.add(token as usize * dims.position_stride as usize)) }
        } else {
            0
        };
        // A position beyond the tables takes the last row: a kernel has no way to refuse, and must not read outside.
        let position = position.min(dims.max_position - 1);
        Place {
            is_inside,
            head: piece / units,
            unit: piece % units,
            x: token as usize * dims.x_token_stride as usize,
            out: token as usize * dims.out_token_stride as usize,
            table: position as usize * (dims.rotary_dim / 2) as usize,
        }
    }

    #[inline(always)]
    fn x(&self, head: u32, dims: &RopeDims) -> usize {
        self.x + head as usize * dims.x_head_stride as usize
    }

    #[inline(always)]
    fn out(&self, head: u32, dims: &RopeDims) -> usize {
        self.out + head as usize * dims.out_head_stride as usize
    }
}

/// Copies one piece of each head of the group: the part of a head that is not rotated.
///
/// # Safety
/// - As for the callers; `col` is a piece inside the head.
#[inline(always)]
unsafe fn copy_piece<T: Element>(x: *const T, out: *mut T, dims: &RopeDims, place: &Place, col: usize) {
    let mut held = [[0u32; 4]; HEADS];
    // SAFETY: head < heads and the piece inside the head keep every access inside the views — Rope::run.
    unsafe {
        let mut i = 0;
        while i < HEADS {
            let head = place.head + i as u32 * dims.groups;
            if head < dims.heads {
                held[i] = global::load_x4(x.add(place.x(head, dims) + col));
            }
            i += 1;
        }
        let mut i = 0;
        while i < HEADS {
            let head = place.head + i as u32 * dims.groups;
            if head < dims.heads {
                global::store_x4(out.add(place.out(head, dims) + col), held[i]);
            }
            i += 1;
        }
    }
}

/// Half-split pairs, by pieces of 16 bytes.
///
/// # Safety
/// - Pointers, strides, half the rotary dimension and the head dimension are *in-bounds* and *aligned(16)* — checked in
///   `Rope::run`, which takes the scalar tile otherwise. x is out or does not overlap it.
#[inline(always)]
unsafe fn half_split_pieces<T: Element>(
    x: *const T,
    positions: *const u32,
    cos: *const f32,
    sin: *const f32,
    out: *mut T,
    dims: &RopeDims,
) {
    // SAFETY: the caller's promise; the tables have max_position rows of rotary_dim / 2, and unit < rotated_units.
    unsafe {
        let place = Place::new(positions, dims);
        if !place.is_inside {
            return;
        }
        let col = place.unit as usize * T::PER_16_BYTES;
        let half = (dims.rotary_dim / 2) as usize;
        if place.unit >= dims.rotated_units {
            // Units beyond count from the middle of the rotated part: its second half has no units of its own.
            return copy_piece(x, out, dims, &place, col + half);
        }
        let mut held = [[[0u32; 4]; 2]; HEADS];
        let mut i = 0;
        while i < HEADS {
            let head = place.head + i as u32 * dims.groups;
            if head < dims.heads {
                let start = x.add(place.x(head, dims) + col);
                held[i] = [global::load_x4(start), global::load_x4(start.add(half))];
            }
            i += 1;
        }
        let (cos, sin) = (cos.add(place.table + col), sin.add(place.table + col));
        let (cos, sin) = if T::PER_16_BYTES == 8 {
            (load_angles::<8>(cos), load_angles::<8>(sin))
        } else {
            (load_angles::<4>(cos), load_angles::<4>(sin))
        };
        let mut i = 0;
        while i < HEADS {
            let head = place.head + i as u32 * dims.groups;
            if head < dims.heads {
                let (mut a, mut b) = ([0.0; 8], [0.0; 8]);
                T::unpack(held[i][0], &mut a);
                T::unpack(held[i][1], &mut b);
                let mut j = 0;
                while j < T::PER_16_BYTES {
                    (a[j], b[j]) = rotate(a[j], b[j], cos[j], sin[j]);
                    j += 1;
                }
                let start = out.add(place.out(head, dims) + col);
                global::store_x4(start, T::pack(&a));
                global::store_x4(start.add(half), T::pack(&b));
            }
            i += 1;
        }
    }
}

/// Interleaved pairs, by pieces of 16 bytes.
///
/// # Safety
/// - As [`half_split_pieces`], with the rotary dimension instead of half of it.
#[inline(always)]
unsafe fn interleaved_pieces<T: Element>(
    x: *const T,
    positions: *const u32,
    cos: *const f32,
    sin: *const f32,
    out: *mut T,
    dims: &RopeDims,
) {
    // SAFETY: the caller's promise; the tables have max_position rows of rotary_dim / 2, and unit < rotated_units.
    unsafe {
        let place = Place::new(positions, dims);
        if !place.is_inside {
            return;
        }
        let col = place.unit as usize * T::PER_16_BYTES;
        if place.unit >= dims.rotated_units {
            return copy_piece(x, out, dims, &place, col);
        }
        let mut held = [[0u32; 4]; HEADS];
        let mut i = 0;
        while i < HEADS {
            let head = place.head + i as u32 * dims.groups;
            if head < dims.heads {
                held[i] = global::load_x4(x.add(place.x(head, dims) + col));
            }
            i += 1;
        }
        let (cos, sin) = (cos.add(place.table + col / 2), sin.add(place.table + col / 2));
        let (cos, sin) = if T::PER_16_BYTES == 8 {
            (load_angles::<4>(cos), load_angles::<4>(sin))
        } else {
            (load_angles::<2>(cos), load_angles::<2>(sin))
        };
        let mut i = 0;
        while i < HEADS {
            let head = place.head + i as u32 * dims.groups;
            if head < dims.heads {
                let mut values = [0.0; 8];
                T::unpack(held[i], &mut values);
                let mut j = 0;
                while j < T::PER_16_BYTES / 2 {
                    (values[2 * j], values[2 * j + 1]) =
                        rotate(values[2 * j], values[2 * j + 1], cos[j], sin[j]);
                    j += 1;
                }
                global::store_x4(out.add(place.out(head, dims) + col), T::pack(&values));
            }
            i += 1;
        }
    }
}

/// One pair or one copied element per thread: the fallback for any size, stride and alignment.
///
/// # Safety
/// - Pointers and strides are *in-bounds* — checked in `Rope::run`. x is out or does not overlap it.
#[inline(always)]
unsafe fn by_pair<T: Element>(
    x: *const T,
    positions: *const u32,
    cos: *const f32,
    sin: *const f32,
    out: *mut T,
    dims: &RopeDims,
    style: RopeStyle,
) {
    // SAFETY: the caller's promise; head < heads, since there are as many groups, and unit < units.
    unsafe {
        let place = Place::new(positions, dims);
        if !place.is_inside {
            return;
        }
        let (x, out) = (x.add(place.x(place.head, dims)), out.add(place.out(place.head, dims)));
        let unit = place.unit as usize;
        if place.unit >= dims.rotated_units {
            let col = unit + (dims.rotary_dim / 2) as usize;
            global::store(out.add(col), global::load(x.add(col)));
            return;
        }
        let (first, second) = match style {
            RopeStyle::HalfSplit => (unit, unit + (dims.rotary_dim / 2) as usize),
            RopeStyle::Interleaved => (2 * unit, 2 * unit + 1),
        };
        let (a, b) = (global::load(x.add(first)).to_f32(), global::load(x.add(second)).to_f32());
        let (cos, sin) =
            (global::load(cos.add(place.table + unit)), global::load(sin.add(place.table + unit)));
        let (a, b) = rotate(a, b, cos, sin);
        global::store(out.add(first), T::from_f32(a));
        global::store(out.add(second), T::from_f32(b));
    }
}

macro_rules! body {
    (HalfSplit, Pieces, $x:ident, $p:ident, $c:ident, $s:ident, $o:ident, $dims:ident) => {
        half_split_pieces($x, $p, $c, $s, $o, &$dims)
    };
    (Interleaved, Pieces, $x:ident, $p:ident, $c:ident, $s:ident, $o:ident, $dims:ident) => {
        interleaved_pieces($x, $p, $c, $s, $o, &$dims)
    };
    (HalfSplit, Scalar, $x:ident, $p:ident, $c:ident, $s:ident, $o:ident, $dims:ident) => {
        by_pair($x, $p, $c, $s, $o, &$dims, RopeStyle::HalfSplit)
    };
    (Interleaved, Scalar, $x:ident, $p:ident, $c:ident, $s:ident, $o:ident, $dims:ident) => {
        by_pair($x, $p, $c, $s, $o, &$dims, RopeStyle::Interleaved)
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $style:ident, $tile:ident;)*) => {$(
        /// Entry point; see the module and `abi::ops::rope`.
        ///
        /// # Safety
        /// - Arguments as `Rope::run` checks them.
        #[kernel(max_threads = 256)]
        #[allow(non_snake_case)]
        pub unsafe fn $entry(x: *const $type, positions: *const u32, cos: *const f32, sin: *const f32, out: *mut $type, dims: RopeDims) {
            // SAFETY: arguments as the body asks, by `Rope::run`.
            unsafe { body!($style, $tile, x, positions, cos, sin, out, dims) }
        }
    )*};
}
abi::rope_table!(entries);
