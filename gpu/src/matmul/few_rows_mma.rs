//! Matrix products of few rows on tensor cores: b streams from memory through registers, without shared memory or
//! barriers.
//!
//! ```text
//! out [ROWS, n] = a · bᵀ: a warp makes 16 columns for all rows; rows of b are the rows of `mma`, rows of a its columns
//!
//! row of b   | 128 of k: part 0 | 128 of k: part 1 | … | part 0 | …
//!            2 to 8 warps of a block share k where columns are few
//! 64 of k    a line of 128 bytes of each row of b: 8 lanes take 16 bytes each, so a load takes four rows. Lanes 4 r'
//!            to 4 r' + 3 are a row of `mma`, so a row of b is two of them, r' even and odd, and each has half of it:
//!
//!            mma's rows   0            1             2            3             …
//!            b's row      0, first ½   0, second ½   1, first ½   1, second ½   …
//!            `mma` with a's first halves counts for the even ones, that with its second halves for the odd ones
//!
//!            of a lane's 8 elements words 0 and 1 are the operands of one `mma` m16n8k16 and words 2 and 3 those of
//!            the next; the same of a, so that both agree on which k is which
//! at the end the halves by a shuffle, the parts' sums through shared memory, in their order
//! ```
//!
//! - What few rows need is bytes of b on their way, 64 KiB to a multiprocessor, and whole lines: with four lanes to a
//!   row (`LANES`), as the kernels of 32 rows and some with an out of f32 have it, which have no registers for twice as
//!   many sums, L2 is asked twice as often. Half of what the tensor cores multiply is thrown away; they have nothing
//!   else to do. a is small and comes out of L1 and L2.
//! - A fragment of an `mma` is eight rows by 16 of k in any order of k that both operands share, so a lane's operands
//!   are neighbours in memory: no `ldmatrix`, no staging.
//! - How k is shared depends on n, k and the card alone, and all orders are fixed: a row's result depends on that row
//!   alone, and is the same for every `ROWS` and `LANES`: first and second halves of lines are summed up by themselves
//!   in both.
//! - The first bytes of b are on their way before the kernel ahead has ended: [`early`](super::early). Where all
//!   multiprocessors are full the next kernel may start when all blocks have multiplied.
//! - Rows may be normed ([`row_scale`](super::row_scale)), of up to 8: each warp adds up the squares of one.
//! - Bounds: memory from some 20 MB on; below that a launch and two trips to memory.
//!
//! What was measured and tried: `gpu/NOTES/matmul.md`.

use abi::ops::matmul::{MatmulDims, NEXT_MAY_START, STREAM_BK, THREADS, WARPS};
use cuda_std::cvt::Element;
use cuda_std::{global, grid, shared, thread, warp};

use super::epilogue::Epilogue;
use super::multiplicand::Multiplicand;
use super::row_scale::RowScale;

/// Elements of k that a step of a warp multiplies: a line of 128 bytes of each row of b.
const STEP: u32 = 64;
const STEPS: usize = (STREAM_BK / STEP) as usize;

/// Bytes of each row of b that a block brings to L2 at first, see [`early`](super::early): what its warps load first.
/// Where blocks come as those of the kernel ahead end, of what that leaves room for 512.
#[inline(always)]
pub fn early_bytes(dims: &MatmulDims) -> u32 {
    if dims.access & NEXT_MAY_START != 0 { (2 * STREAM_BK) << dims.split_log2 } else { 512 }
}

/// Where the sum of a row and column lies among those of a warp of `cols` columns.
#[inline(always)]
fn sum_address(row: u32, col: u32, cols: u32) -> u32 {
    (row * cols + (col ^ (row / 2 % 4 * 8 % cols))) * 4
}

/// Some columns of the product for up to `ROWS = 8 · FRAGMENTS` rows from `first_row` on. `a_row` and `b_row` say where
/// a row begins. `NORMED`: rows are normed, 8 of 16 columns.
///
/// # Safety
/// - *converged*: all 256 threads of the block; shared memory as `MatmulTile::smem_bytes` says.
/// - Tensors *in-bounds* for `dims`, rows of a and b and the gains aligned to 16 bytes, k a multiple of 8 — checked in
///   `run`.
#[inline(always)]
pub unsafe fn multiply<
    T: Multiplicand,
    O: Element,
    const ROWS: usize,
    const LANES: u32,
    const FRAGMENTS: usize,
    const TILES: usize,
    const PIECES: usize,
    const UNROLL: usize,
    const NORMED: bool,
>(
    (a_row, norm): (impl Fn(u32) -> *const T, RowScale<'_, T>),
    b_row: impl Fn(u32) -> *const T,
    (first_row, col_block): (u32, u32),
    end: Epilogue<'_, T, O>,
) {
    let dims = end.dims;
    let rows_of_load = 32 / LANES;
    let (rows, cols, parts) = (ROWS as u32, rows_of_load * PIECES as u32, 1 << dims.split_log2);
    let groups = WARPS >> dims.split_log2;
    let (warp, lane) = (thread::warp_idx(), thread::lane());
    let (group, part) = (warp >> dims.split_log2, warp & (parts - 1));
    let first_col = |group: u32| (col_block * groups + group) * cols;

    // Rows past the end are computed from the last one, and not stored.
    let mut a = [core::ptr::null(); FRAGMENTS];
    let mut i = 0;
    while i < FRAGMENTS {
        a[i] = a_row((first_row + 8 * i as u32 + lane / 4).min(dims.m - 1));
        i += 1;
    }
    let mut b = [core::ptr::null(); PIECES];
    let mut j = 0;
    while j < PIECES {
        b[j] = b_row((first_col(group) + rows_of_load * j as u32 + lane / LANES).min(dims.n - 1));
        j += 1;
    }

    let (base, warp_bytes) = (shared::base(), rows * cols * 4);
    // Of the lane's row, if it is normed: what that is multiplied by, and its scale.
    let (mut factor, mut scale, mut is_again) = (1.0, 1.0, false);
    loop {
        let mut sums = [[[[0f32; 4]; 2]; FRAGMENTS]; TILES];
        let mut k = part * STREAM_BK;
        while k < dims.k {
            let mut step = 0;
            while step < STEPS {
                let (from, norm) = (k + step as u32 * STEP, (&norm, factor));
                // SAFETY: pieces below k lie in their rows — the caller.
                unsafe {
                    if k + STREAM_BK <= dims.k {
                        add_steps::<T, O, LANES, FRAGMENTS, TILES, PIECES, UNROLL, NORMED, false>(
                            (&a, norm),
                            &b,
                            (from, dims.k),
                            &mut sums,
                        );
                    } else {
                        add_steps::<T, O, LANES, FRAGMENTS, TILES, PIECES, UNROLL, NORMED, true>(
                            (&a, norm),
                            &b,
                            (from, dims.k),
                            &mut sums,
                        );
                    }
                }
                step += UNROLL;
            }
            k += parts * STREAM_BK;
        }

        if dims.access & NEXT_MAY_START != 0 {
            grid::near_end();
        }
        // SAFETY: each warp stores sums, and a row's squares, in its own words, and they are read after the barrier.
        unsafe {
            let mut i = 0;
            while i < TILES * FRAGMENTS * 4 {
                let (tile, fragment, element) = (i / 4 / FRAGMENTS, i / 4 % FRAGMENTS, i % 4);
                let [first, second] = [sums[tile][fragment][0][element], sums[tile][fragment][1][element]];
                let sum = if LANES == 8 {
                    // Four lanes have multiplied the first halves of a row, their neighbours the second.
                    let own = if lane / 4 % 2 == 0 { first } else { second };
                    own + warp::shuffle_xor_f32(warp::FULL_MASK, own, 4)
                } else {
                    first + second
                };
                let col = (2 * tile + element / 2) as u32 * rows_of_load + lane / LANES;
                let row = (fragment * 8 + element % 2) as u32 + lane % 4 * 2;
                if lane % LANES < 4 {
                    shared::store_f32(base + warp * warp_bytes + sum_address(row, col, cols), sum);
                }
                i += 1;
            }
            if !NORMED {
                break;
            }
            let squares = base + WARPS * warp_bytes;
            let row = a_row((first_row + warp).min(dims.m - 1));
            let of_row = warp::shuffle_idx_f32(warp::FULL_MASK, factor, 4 * warp);
            let square = RowScale::squares(row, (lane, 32), dims.k / T::PER_16_BYTES as u32, of_row);
            let square = warp::sum_f32::<32>(square);
            if lane == 0 {
                shared::store_f32(squares + 4 * warp, square);
            }
            thread::sync_threads();
            let (row_scale, needed) = norm.scale(shared::load_f32(squares + lane / 4 * 4), factor);
            scale = row_scale;
            // All rows are seen by each warp, so that all go on alike.
            if is_again || !warp::any(warp::FULL_MASK, needed != 1.0) {
                break;
            }
            (factor, is_again) = (needed, true);
            thread::sync_threads();
        }
    }
    // SAFETY: behind the barrier each quad of sums is read, and the elements that it comes to are stored, by one
    // thread.
    unsafe {
        if !NORMED {
            thread::sync_threads();
        }
        let quads = rows * cols / 4;
        let mut quad = thread::thread_idx_x();
        while quad < groups * quads {
            let (group, row, col) = (quad / quads, quad % quads * 4 / cols, quad * 4 % cols);
            let at = base + (group << dims.split_log2) * warp_bytes + sum_address(row, col, cols);
            let mut total = shared::load_f32x4(at);
            let mut part = 1;
            while part < parts {
                add(&mut total, shared::load_f32x4(at + part * warp_bytes));
                part += 1;
            }
            if NORMED {
                // Of 8 rows of 16 columns a lane finishes those of its row.
                let mut i = 0;
                while i < 4 {
                    total[i] *= scale;
                    i += 1;
                }
            }
            let (row, col) = (first_row + row, first_col(group) + col);
            if row < dims.m && col < dims.n {
                end.quad(row, col, total, &end.bias(col));
            }
            quad += THREADS;
        }
    }
}

/// Adds the products of `UNROLL` steps from the lane's element `from` on. `GUARDED`: pieces from `k` on are zero and
/// not read.
///
/// # Safety
/// - *converged*: all 32 lanes; the pieces *in-bounds* and *aligned(16)*.
#[inline(always)]
unsafe fn add_steps<
    T: Multiplicand,
    O: Element,
    const LANES: u32,
    const FRAGMENTS: usize,
    const TILES: usize,
    const PIECES: usize,
    const UNROLL: usize,
    const NORMED: bool,
    const GUARDED: bool,
>(
    (a, (norm, factor)): (&[*const T; FRAGMENTS], (&RowScale<'_, T>, f32)),
    b: &[*const T; PIECES],
    (from, k): (u32, u32),
    sums: &mut [[[[f32; 4]; 2]; FRAGMENTS]; TILES],
) {
    let lane = thread::lane();
    // Loads that take a line of a row of b.
    let loads = 8 / LANES as usize;
    let mut pieces_a = [[[[0; 4]; FRAGMENTS]; 2]; UNROLL];
    let mut pieces_b = [[[[0; 4]; PIECES]; 2]; UNROLL];
    // SAFETY: the caller's promise.
    unsafe {
        let mut l = 0;
        while l < loads * UNROLL {
            let at = from + (l as u32 * LANES + lane % LANES) * 8;
            if !GUARDED || at < k {
                let mut j = 0;
                while j < PIECES {
                    pieces_b[l / loads][l % loads][j] = global::load_stream_x4(b[j].add(at as usize));
                    j += 1;
                }
            }
            l += 1;
        }
        let mut h = 0;
        while h < 2 * UNROLL {
            let at = from + (h as u32 * 4 + lane % 4) * 8;
            if !GUARDED || at < k {
                let mut i = 0;
                while i < FRAGMENTS {
                    let piece = global::load_nc_x4(a[i].add(at as usize));
                    pieces_a[h / 2][h % 2][i] =
                        if NORMED { T::pack(&norm.values(piece, factor, at as usize)) } else { piece };
                    i += 1;
                }
            }
            h += 1;
        }
        // Where out is f32, each product is added by itself: see `mma_sync`.
        let promotes = size_of::<O>() == 4;
        let mut h = 0;
        while h < 4 * UNROLL {
            let (w, half, u) = (h % 2 * 2, h / 2 % 2, h / 4);
            let mut tile = 0;
            while tile < TILES {
                let pieces = &pieces_b[u][half % loads];
                let (upper, lower) = (pieces[2 * tile], pieces[2 * tile + 1]);
                let rows_b = [upper[w], lower[w], upper[w + 1], lower[w + 1]];
                let mut i = 0;
                while i < FRAGMENTS {
                    let piece = pieces_a[u][half][i];
                    let cols_a = [piece[w], piece[w + 1]];
                    let sum = &mut sums[tile][i][half];
                    if promotes {
                        add(sum, T::multiply_add(rows_b, cols_a, [0.0; 4]));
                    } else {
                        *sum = T::multiply_add(rows_b, cols_a, *sum);
                    }
                    i += 1;
                }
                tile += 1;
            }
            h += 1;
        }
    }
}

#[inline(always)]
fn add(total: &mut [f32; 4], part: [f32; 4]) {
    let mut i = 0;
    while i < 4 {
        total[i] += part[i];
        i += 1;
    }
}
