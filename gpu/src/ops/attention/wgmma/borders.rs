//! Values that are not finite, where some rows of a tile see them and others do not.

use abi::ops::attention::AttentionDims;
use cuda_std::cvt::Element;
use cuda_std::{fence, global, mbarrier, shared, thread, warp};

use super::super::scores::Masks;
use super::super::{Pages, offset};
use super::walk::{Border, Places, Turn, Walk};
use super::{CLEANER_WARPS, ROW_BYTES};
use crate::matmul::multiplicand::{Multiplicand, finite_halves, not_finite};

/// Threads of the warps that clean.
const CLEANER_THREADS: u32 = 32 * CLEANER_WARPS;

/// Pieces that a thread looks at together.
const PIECES: usize = 4;

/// The warps that clean values at borders: of keys behind the last that some row sees, and whatever is not finite.
/// Marks the tile where that is found among the others.
///
/// Under a causal mask a tile begins at a border, and its first `p·v` waits for this: a first pass only looks, at
/// several pieces at a time.
///
/// # Safety
/// - Threads 32 to 127, *converged*.
#[inline(always)]
pub(super) unsafe fn clean<T: Multiplicand, const DIM_V: u32, const KEYS: u32>(places: Places) {
    let member = thread::thread_idx_x() - 32;
    let bad = not_finite::<T>;
    let kept = finite_halves::<T>;
    let mut turn = Turn(0);
    // SAFETY: values that have come and that no consumer is told of yet.
    unsafe {
        loop {
            mbarrier::wait_parity(places.raw_v(turn), places.border_parity(turn));
            let border = Border::load(places, turn);
            if border.is_end() {
                break;
            }
            turn.0 += 1;
            let (stage, full) = (places.stage_v(border.turn()), places.full_v(border.turn()));
            let pieces = KEYS * DIM_V / 8;
            let mut any = 0;
            let mut first = member;
            while first < pieces {
                let mut words = [[0; 4]; PIECES];
                let mut i = 0;
                while i < PIECES {
                    let piece = first + i as u32 * CLEANER_THREADS;
                    if piece < pieces {
                        words[i] = shared::load_u32x4(stage + piece * 16);
                    }
                    i += 1;
                }
                let mut i = 0;
                while i < PIECES {
                    let [a, b, c, d] = words[i];
                    any |= bad(a) | bad(b) | bad(c) | bad(d);
                    i += 1;
                }
                first += PIECES as u32 * CLEANER_THREADS;
            }
            let mut found = false;
            let mut piece = if any != 0 || border.keys() < KEYS { member } else { pieces };
            while piece < pieces {
                let at = stage + piece * 16;
                if piece / 8 % KEYS < border.keys() {
                    let [a, b, c, d] = shared::load_u32x4(at);
                    if bad(a) | bad(b) | bad(c) | bad(d) != 0 {
                        found = true;
                        shared::store_u32x4(at, [kept(a), kept(b), kept(c), kept(d)]);
                    }
                } else {
                    shared::store_u32x4(at, [0; 4]);
                }
                piece += CLEANER_THREADS;
            }
            let found = warp::any(warp::FULL_MASK, found);
            fence::proxy_async_shared();
            // The warp's values, and what it has read of the border, whose place the loader takes again when the
            // consumers have given these values back, come before its arrival.
            warp::sync_warp(warp::FULL_MASK);
            if thread::lane() == 0 {
                if found {
                    shared::store_u32(places.mark(border.round, member / 32), border.round);
                }
                mbarrier::arrive(full);
            }
            warp::sync_warp(warp::FULL_MASK);
        }
    }
}

/// Adds values that are not finite, and were therefore left out at borders, to the rows that see them. A thread does
/// two columns.
///
/// # Safety
/// - All 128 threads of the consumer, whose results are in the boxes; v and the masks *in-bounds* for `dims`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn spoil<
    T: Element,
    const KEYS: u32,
    const ROWS: u32,
    const MASKED: bool,
    const SPLIT: bool,
>(
    walk: &Walk,
    masks: Masks,
    boxes: u32,
    consumer: u32,
    member: u32,
    v: *const T,
    pages: Pages,
    dims: &AttentionDims,
) {
    let tile = &walk.tile;
    let v = v.wrapping_add(offset(0, 0, 0, 0, tile.head_kv, dims.v_head_stride));
    let first_query = tile.first_query + consumer * 64;
    let col = 2 * member;
    let keys = tile.keys::<KEYS, SPLIT>();
    let mut key = keys.lo;
    // SAFETY: keys that some row sees and columns of the head are inside v; a pair of columns is this thread's alone.
    unsafe {
        while col < dims.head_dim_v && key < keys.hi {
            if MASKED || walk.is_border::<KEYS>(key as u32 / KEYS, dims) {
                let at = pages.row(dims, key, dims.v_batch_stride, dims.v_token_stride);
                let at = v.add(at + col as usize);
                let values = [global::load(at).to_f32(), global::load(at.add(1)).to_f32()];
                // Opaque, so that the loop is not unrolled and its rows' places not kept in registers.
                let mut row = thread::opaque(0);
                let is_bad = [!values[0].is_finite(), !values[1].is_finite()];
                while (is_bad[0] || is_bad[1]) && row < 64 {
                    if walk.sees::<T, MASKED>(first_query + row, key, masks, dims) {
                        let piece = (col / 8 % 8) ^ (row & 7);
                        let at = boxes + (col / 64 * ROWS + row) * ROW_BYTES + piece * 16 + col % 8 * 2;
                        let mut pair = [0f32; 8];
                        T::unpack([shared::load_u32(at), 0, 0, 0], &mut pair);
                        let mut i = 0;
                        while i < 2 {
                            if is_bad[i] {
                                pair[i] += values[i];
                            }
                            i += 1;
                        }
                        shared::store_u32(at, T::pack(&pair)[0]);
                    }
                    row += 1;
                }
            }
            key += 1;
        }
    }
}
