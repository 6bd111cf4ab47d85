//! The same of packed weights, on tensor cores: sixteen rows of a weight to a warp, which decodes them in registers
//! (`packed_walk`).
//!
//! ```text
//! up     block: a pair, 16 elements     warps 0 to 3: the gate's rows, a quarter of k each; warps 4 to 7: up's
//! down   block: a token, 16 columns     an eighth of the tiles of all its experts, one after the other, to a warp
//! ```
//!
//! Rows between the products are taken as they are, and a slot's sums are multiplied by its weight. Parts are added up
//! in their order, so a token's result is the same whatever the others are.

use abi::ops::fused_moe::{FusedMoeDims, HEAD_BYTES, PACKED_SUMS_BYTES, THREADS, WARPS};
use abi::ops::matmul::MatmulNorm;
use abi::weight::{TILE_K, TILE_ROWS, WeightDims};
use cuda_std::cvt::{Element, bf16, f16};
use cuda_std::{global, grid, kernel, math, shared, thread};

use super::{Choice, NOBODY, load_piece, row_at, slot_at, store_slot};
use crate::matmul::operand::Operand;
use crate::matmul::packed_walk::Walk;
use crate::matmul::weight::{Code, E2m1, E4m3, Experts, FewWords, Int4, Int8, Packed, Pair};
use crate::tile::activation;
use crate::tile::row_norm::{for_pieces, norm_row};

/// Warps that share the k of a row of tiles of the gate, or of up.
const PARTS: u32 = WARPS / 2;
/// Bytes of a warp's sums.
const SUMS_BYTES: u32 = TILE_ROWS * 4;

/// Stores a warp's sums of 16 rows of the weight at `base`.
///
/// # Safety
/// - *converged*: all 32 lanes; *exclusive*: [`WARPS`] times [`SUMS_BYTES`] of shared memory at `base`.
#[inline(always)]
unsafe fn store_sums(base: u32, sums: [f32; 2]) {
    let lane = thread::lane();
    if lane.is_multiple_of(4) {
        let at = base + thread::warp_idx() * SUMS_BYTES + lane;
        // SAFETY: the caller's promise.
        unsafe {
            shared::store_f32(at, sums[0]);
            shared::store_f32(at + 32, sums[1]);
        }
    }
}

/// The sum of a row over some warps, in their order.
///
/// # Safety
/// - *initialised*: a barrier since [`store_sums`].
#[inline(always)]
unsafe fn total(base: u32, [first, warps]: [u32; 2], row: u32) -> f32 {
    let at = base + first * SUMS_BYTES + row * 4;
    // SAFETY: the caller's promise.
    unsafe {
        let mut total = shared::load_f32(at);
        let mut warp = 1;
        while warp < warps {
            total += shared::load_f32(at + warp * SUMS_BYTES);
            warp += 1;
        }
        total
    }
}

/// What `up` reads.
struct UpInputs<T> {
    x: *const T,
    /// Null if x is taken as it is.
    gain: *const T,
    choice: Choice,
    gate_up: Experts,
    /// Of the shared expert, whose gate and up have their rows in turn.
    shared: Packed,
}

/// The activated rows of a pair.
///
/// # Safety
/// - Blocks of [`THREADS`] threads (*converged*), for each pair one for every 16 elements; shared memory for the head
///   and the tiles of a row of x; tensors *in-bounds* for `dims`, `inner` a multiple of 16 — checked in
///   `FusedMoe::run`.
#[inline(always)]
unsafe fn up<C: Code<Words = FewWords>, T: Pair + Operand + Element, const TILES: usize, const GROUP: u32>(
    inputs: &UpInputs<T>,
    activated: *mut T,
    dims: &FusedMoeDims,
    norm: &MatmulNorm,
) {
    // At least 1; `max` tells the compiler, which would otherwise keep a panic path.
    let slots = dims.slots.max(1);
    let (pair, block, hidden) = (thread::block_idx_y(), thread::block_idx_x(), dims.hidden);
    let (token, slot) = (pair / slots, pair % slots);
    // SAFETY: a pair of the grid, before anything lies in shared memory; rows of x and tiles that there are; each
    // thread norms what it has stored, and all read behind the barrier; elements are below `inner`, and their places in
    // the workspace the pair's own.
    unsafe {
        let expert = inputs.choice.expert((token, slot), dims);
        // The same for the whole block.
        if expert == NOBODY {
            return;
        }
        let is_shared = slot >= dims.top_k;
        let packed = if is_shared { inputs.shared } else { inputs.gate_up.of(expert) };
        let (half, part) = (thread::warp_idx() / PARTS, thread::warp_idx() % PARTS);
        let row_block = if is_shared { 2 * block + half } else { block + half * (dims.inner / TILE_ROWS) };
        let tiles = packed.dims.tiles;
        let of_part = tiles.div_ceil(PARTS);
        let first = tiles.min(part * of_part);
        let end = tiles.min(first + of_part);
        let walk = Walk { packed: &packed, weight: packed.row::<C>(row_block), first, end };
        let held = walk.first_tiles::<C, TILES, GROUP>();

        // Zeros behind the row, up to the end of its last tile.
        let num_pieces = tiles * (TILE_K / T::PER_PIECE);
        let x = inputs.x.wrapping_add(token as usize * dims.x_stride as usize);
        let load = |row: *const T, piece: u32| {
            if dims.in_pieces != 0 {
                load_piece::<T, true>(row, piece, hidden)
            } else {
                load_piece::<T, false>(row, piece, hidden)
            }
        };
        for_pieces::<THREADS>(num_pieces, |piece| shared::store_u32x4(row_at(piece), load(x, piece)));
        if !inputs.gain.is_null() {
            norm_row::<T, THREADS>(row_at(0), num_pieces, |piece| load(inputs.gain, piece), norm);
        }
        thread::sync_threads();
        let sums = walk.sums::<C, T, TILES, GROUP>(row_at(0), held);
        // Behind the row, which others may still read.
        let base = row_at(num_pieces);
        store_sums(base, sums);
        thread::sync_threads();
        let element = thread::thread_idx_x();
        if element < TILE_ROWS {
            let (gate, up) = if is_shared {
                // Rows in turn: eight elements to a row of tiles.
                let (first, row) = (element / (TILE_ROWS / 2) * PARTS, element % (TILE_ROWS / 2) * 2);
                (total(base, [first, PARTS], row), total(base, [first, PARTS], row + 1))
            } else {
                (total(base, [0, PARTS], element), total(base, [PARTS, PARTS], element))
            };
            let out = activated.wrapping_add(pair as usize * dims.activated_stride as usize);
            let value = activation::curve(gate, &dims.curve) * up;
            global::store(out.wrapping_add((block * TILE_ROWS + element) as usize), T::from_f32(value));
        }
    }
    grid::near_end();
}

/// What `down` reads.
struct DownInputs<T> {
    activated: *const T,
    ids: *const u32,
    weights: *const f32,
    down: Experts,
    /// Of the shared expert.
    shared: Packed,
    /// Null if the shared expert has no gate.
    gate: *const f32,
}

/// Some columns of a token's out.
///
/// # Safety
/// - Blocks of [`THREADS`] threads (*converged*), for each token one for every 16 columns; shared memory for the head,
///   the tiles of the token's rows and the sums; tensors *in-bounds* for `dims`, `inner` a multiple of 16 — checked in
///   `FusedMoe::run`.
#[inline(always)]
unsafe fn down<
    C: Code<Words = FewWords>,
    T: Pair + Operand + Element,
    const TILES: usize,
    const GROUP: u32,
>(
    inputs: &DownInputs<T>,
    out: *mut T,
    dims: &FusedMoeDims,
) {
    let (token, block, inner) = (thread::block_idx_y(), thread::block_idx_x(), dims.inner);
    let member = thread::thread_idx_x();
    let tiles = inner.div_ceil(TILE_K);
    let of_slot = tiles * (TILE_K / T::PER_PIECE);
    let all = dims.slots * tiles;
    let of_warp = all.div_ceil(WARPS);
    // SAFETY: slots below `slots` have their places in the head, which all read behind the barrier; rows of experts
    // that there are — `FusedMoe::run`; each column is finished by one thread.
    unsafe {
        if member < dims.slots {
            store_slot(inputs.ids, inputs.weights, inputs.gate, (token, member), dims);
        }
        thread::sync_threads();
        // The rows as they are; zeros behind each, and of an expert that there is not.
        let first_row = token as usize * dims.slots as usize;
        for_pieces::<THREADS>(dims.slots * of_slot, |piece| {
            // At least 1 here; `max` tells the compiler.
            let (slot, of_row) = (piece / of_slot.max(1), piece % of_slot.max(1));
            let [expert, _] = shared::load_u32x2(slot_at(slot));
            let mut held = [0; 4];
            if expert != NOBODY {
                let row = (first_row + slot as usize) * dims.activated_stride as usize;
                held = load_piece::<T, true>(inputs.activated.wrapping_add(row), of_row, inner);
            }
            shared::store_u32x4(row_at(piece), held);
        });
        let (col, out) =
            (block * TILE_ROWS + member, out.wrapping_add(token as usize * dims.out_stride as usize));
        let finishes = member < TILE_ROWS && col < dims.hidden;
        let mut added = 0.0;
        if dims.adds != 0 && finishes {
            added = global::load(out.wrapping_add(col as usize)).to_f32();
        }
        thread::sync_threads();

        let mut sums = [0f32; 2];
        let mut at = all.min(thread::warp_idx() * of_warp);
        let end = all.min(at + of_warp);
        while at < end {
            let (slot, first) = (at / tiles.max(1), at % tiles.max(1));
            let end_of_slot = tiles.min(first + (end - at));
            at += end_of_slot - first;
            let [expert, weight] = shared::load_u32x2(slot_at(slot));
            if expert != NOBODY {
                let packed = if slot < dims.top_k { inputs.down.of(expert) } else { inputs.shared };
                let weight_row = packed.row::<C>(block);
                let walk = Walk { packed: &packed, weight: weight_row, first, end: end_of_slot };
                let held = walk.first_tiles::<C, TILES, GROUP>();
                let of_row = walk.sums::<C, T, TILES, GROUP>(row_at(slot * of_slot), held);
                let mut i = 0;
                while i < 2 {
                    sums[i] = math::fma(f32::from_bits(weight), of_row[i], sums[i]);
                    i += 1;
                }
            }
        }
        let base = row_at(dims.slots * of_slot);
        store_sums(base, sums);
        thread::sync_threads();
        if finishes {
            let sum = total(base, [0, WARPS], member);
            global::store(out.wrapping_add(col as usize), T::from_f32(sum + added));
        }
    }
    grid::near_end();
}

const _: () = assert!(PACKED_SUMS_BYTES == WARPS * SUMS_BYTES && HEAD_BYTES.is_multiple_of(16));

macro_rules! entry {
    ($entry:ident, $type:ident, $codes:ident, Up, $tiles:literal, $group:literal) => {
        /// Entry point; see the module and `abi::ops::fused_moe`.
        ///
        /// # Safety
        /// - Arguments as `FusedMoe::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 3)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            x: *const $type,
            gain: *const $type,
            logits: *const f32,
            bias: *const f32,
            ids: *mut u32,
            weights: *mut f32,
            codes: *const u32,
            scales: *const u8,
            zeros: *const u8,
            minimums: *const u8,
            supers: *const u16,
            super_minimums: *const u16,
            globals: *const f32,
            weight: WeightDims,
            shared_codes: *const u32,
            shared_scales: *const u8,
            shared_zeros: *const u8,
            shared_minimums: *const u8,
            shared_supers: *const u16,
            shared_super_minimums: *const u16,
            shared_weight: WeightDims,
            activated: *mut $type,
            dims: FusedMoeDims,
            norm: MatmulNorm,
        ) {
            let packed = Packed { codes, scales, zeros, minimums, supers, super_minimums, dims: weight };
            let shared = Packed {
                codes: shared_codes,
                scales: shared_scales,
                zeros: shared_zeros,
                minimums: shared_minimums,
                supers: shared_supers,
                super_minimums: shared_super_minimums,
                dims: shared_weight,
            };
            let choice = Choice { logits, bias, ids, weights };
            let inputs = UpInputs { x, gain, choice, gate_up: Experts { packed, globals }, shared };
            // SAFETY: arguments as the body asks, by `FusedMoe::run`.
            unsafe { up::<$codes, $type, $tiles, $group>(&inputs, activated, &dims, &norm) }
        }
    };
    ($entry:ident, $type:ident, $codes:ident, Down, $tiles:literal, $group:literal) => {
        /// Entry point; see the module and `abi::ops::fused_moe`.
        ///
        /// # Safety
        /// - Arguments as `FusedMoe::run` checks them.
        #[kernel(max_threads = 256, min_blocks = 2)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $entry(
            activated: *const $type,
            ids: *const u32,
            weights: *const f32,
            codes: *const u32,
            scales: *const u8,
            zeros: *const u8,
            minimums: *const u8,
            supers: *const u16,
            super_minimums: *const u16,
            globals: *const f32,
            weight: WeightDims,
            shared_codes: *const u32,
            shared_scales: *const u8,
            shared_zeros: *const u8,
            shared_minimums: *const u8,
            shared_supers: *const u16,
            shared_super_minimums: *const u16,
            shared_weight: WeightDims,
            gate: *const f32,
            out: *mut $type,
            dims: FusedMoeDims,
        ) {
            let packed = Packed { codes, scales, zeros, minimums, supers, super_minimums, dims: weight };
            let shared = Packed {
                codes: shared_codes,
                scales: shared_scales,
                zeros: shared_zeros,
                minimums: shared_minimums,
                supers: shared_supers,
                super_minimums: shared_super_minimums,
                dims: shared_weight,
            };
            let inputs =
                DownInputs { activated, ids, weights, down: Experts { packed, globals }, shared, gate };
            // SAFETY: arguments as the body asks, by `FusedMoe::run`.
            unsafe { down::<$codes, $type, $tiles, $group>(&inputs, out, &dims) }
        }
    };
}

macro_rules! entries {
    ($($entry:ident => $type:ident, $dtype:ident, $codes:ident, $floor:ident,
       $stage:ident { tiles: $tiles:literal, group: $group:literal };)*) => {
        $(entry!($entry, $type, $codes, $stage, $tiles, $group);)*
    };
}
abi::fused_moe_packed_table!(entries);
