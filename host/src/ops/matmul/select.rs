//! Which kernels a matrix product takes.

use abi::ops::matmul::{
    AHEAD_MAX_K, AHEAD_MAX_NORMED, AHEAD_VARIANTS, MMA_ROW_BYTES, MMA_VARIANTS, MatmulTile, MatmulVariant,
    NEXT_MAY_START, STREAM_BK, STREAM_NORMED_VARIANTS, STREAM_VARIANTS, VARIANTS, WARPS, WGMMA_ROW_BYTES,
    WGMMA_VARIANTS,
};
use abi::{DType, Need};

use super::tuning::{self, keeps_out};
use super::{MatmulProblem, OP, Precision, RowNorm};
use crate::device::DeviceLimits;
use crate::error::Error;

/// Up to so many rows the kernels for few rows are faster: they do only the rows' work, where the smallest tile always
/// does that of 64 rows, at the price of reading b again for every 8.
pub(crate) const GEMV_MAX_ROWS: usize = 16;

/// Warps per multiprocessor that it takes, with four loads per lane, to keep the memory busy, where up to four columns
/// share a warp.
const GEMV_WARPS_PER_SM: usize = 64;

/// Warps that a multiprocessor holds of one row's kernel. All that there are should be at work at once, since more of
/// them have less of a column's k each. (The times behind this file's numbers: `gpu/NOTES/matmul.md`.)
const ONE_ROW_WARPS_PER_SM: usize = 32;

/// Most of `split_log2` where the product is gated: two columns to a block of the narrowest tile.
const GATED_MAX_SPLIT_LOG2: u32 = (WARPS / 2).ilog2();

/// A kernel and how it is launched.
#[derive(Clone, Debug, PartialEq)]
pub struct MatmulChoice {
    /// The kernel.
    pub variant: &'static MatmulVariant,
    /// For up to so many rows.
    pub max_rows: usize,
    /// Binary logarithm of the warps that share a column's k.
    pub split_log2: u32,
    /// Why this one.
    pub why: String,
}

/// A tile for up to `max_rows` rows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rung {
    pub(crate) max_rows: usize,
    /// Rows of the tile, and whether it is one of few rows.
    pub(crate) tile: Wanted,
    pub(crate) why: String,
}

/// The tiles that products choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// For few rows.
    Gemv(u32),
    /// Square, of this edge.
    Simt(u32),
}

impl Wanted {
    pub(crate) fn is(self, tile: MatmulTile) -> bool {
        match (self, tile) {
            (Wanted::Gemv(wanted), MatmulTile::Gemv { rows, .. }) => wanted == rows,
            (Wanted::Simt(wanted), MatmulTile::Simt { bm, .. }) => wanted == bm,
            _ => false,
        }
    }
}

/// The tiles for every number of rows up to `m`, fewest rows first; n is the columns of all products together.
pub(crate) fn ladder(limits: &DeviceLimits, m: usize, n: usize) -> Vec<Rung> {
    if limits.is_invariant() {
        return vec![Rung { max_rows: usize::MAX, tile: Wanted::Simt(64), why: INVARIANT.into() }];
    }
    let num_sms = limits.num_sms.max(1) as usize;
    // From so many tile rows on the large tile gives every multiprocessor a block.
    let tile_rows = num_sms.div_ceil(n.div_ceil(128).max(1));
    let small = (tile_rows - 1) * 128;
    let rungs = [
        (1, Wanted::Gemv(1)),
        (2, Wanted::Gemv(2)),
        (4, Wanted::Gemv(4)),
        (GEMV_MAX_ROWS, Wanted::Gemv(8)),
        (small.max(64), Wanted::Simt(64)),
        (usize::MAX, Wanted::Simt(128)),
    ];
    let mut ladder = Vec::new();
    for (max_rows, tile) in rungs {
        let why = match tile {
            Wanted::Gemv(rows) => format!("up to {max_rows} rows, {rows} against each piece of b"),
            Wanted::Simt(64) => format!("larger tiles leave some of {num_sms} multiprocessors without work"),
            Wanted::Simt(_) => format!("{num_sms} multiprocessors have a tile each"),
        };
        ladder.push(Rung { max_rows, tile, why });
        if m <= max_rows {
            break;
        }
    }
    ladder
}

/// Binary logarithm of the warps that share a column's k: enough warps for the memory, but four pieces for every lane.
/// Where the tensor cores do all but one row, as many warps as there is room for, but three pieces for every lane.
///
/// It decides the order of a sum, so it depends on n (of all products together), k, type and device only, not on the
/// number of rows.
pub(crate) fn split_log2(limits: &DeviceLimits, n: usize, k: usize, dtype: DType) -> u32 {
    let pieces = k / (16 / dtype.bytes());
    let num_sms = limits.num_sms.max(1) as usize;
    let is_one_row = limits.floor.has(Need::MmaSync) && dtype.bytes() == 2;
    let may_double = |split: u32| {
        if is_one_row {
            n << (split + 1) <= ONE_ROW_WARPS_PER_SM * num_sms && pieces >= 96 << (split + 1)
        } else {
            n << split < GEMV_WARPS_PER_SM * num_sms && pieces >= 128 << (split + 1)
        }
    };
    let mut split = 0;
    while 1 << (split + 1) <= WARPS && may_double(split) {
        split += 1;
    }
    split
}

/// Whether the blocks of a launch can be counted by a grid.
pub(crate) fn check_blocks(
    op: &'static str,
    tile: MatmulTile,
    split_log2: u32,
    m: usize,
    n: usize,
) -> Result<(), Error> {
    let blocks = tile.blocks(m as u32, n as u32, split_log2);
    if blocks <= i32::MAX as u64 {
        Ok(())
    } else {
        Err(Error::invalid(op, "problem", "at most 2^31 - 1 blocks", format!("{m} × {n} in {blocks} blocks")))
    }
}

impl MatmulChoice {
    /// This kernel for any number of rows, if it can do the problem.
    pub(super) fn forced(
        limits: &DeviceLimits,
        variant: &'static MatmulVariant,
        problem: &MatmulProblem,
    ) -> Result<Self, Error> {
        let MatmulProblem { batch, m, k, dtype, out_dtype, precision, .. } = *problem;
        let n = problem.b_rows();
        if (variant.dtype, variant.out_dtype) != (dtype, out_dtype) || !limits.floor.runs(variant.floor) {
            let expected = format!("{} to {} on {}", variant.dtype, variant.out_dtype, variant.floor);
            let got = format!("{dtype} to {out_dtype} on {}", limits.floor);
            return Err(Error::invalid(OP, "variant", expected, got));
        }
        if variant.is_tf32() && precision == Precision::Full {
            return Err(Error::invalid(OP, "variant", "one of full precision", "tf32"));
        }
        let columns = n.saturating_mul(batch);
        let split_log2 = match variant.tile {
            MatmulTile::StreamNormed { .. } => stream_split_log2(limits.num_sms, columns, k),
            _ => split_log2(limits, columns, k, dtype),
        };
        // A block has both columns of a pair, the gate's and up's.
        let splits_pairs = problem.is_gated() && !matches!(variant.tile, MatmulTile::StreamNormed { .. });
        let split_log2 = if splits_pairs { split_log2.min(GATED_MAX_SPLIT_LOG2) } else { split_log2 };
        check_blocks(OP, variant.tile, split_log2, m, n)?;
        Ok(MatmulChoice { variant, max_rows: usize::MAX, split_log2, why: "asked for".into() })
    }
}

/// The kernels for every number of rows up to the problem's, fewest rows first: a run takes the first that is for its
/// rows.
pub fn select(limits: &DeviceLimits, problem: &MatmulProblem) -> Result<Vec<MatmulChoice>, Error> {
    let MatmulProblem { batch, m, dtype, out_dtype, .. } = *problem;
    let n = problem.b_rows();
    let mut choices = Vec::new();
    for Rung { max_rows, tile, why } in ladder(limits, m, n.saturating_mul(batch)) {
        let fits = |variant: &&MatmulVariant| {
            (variant.dtype, variant.out_dtype) == (dtype, out_dtype)
                && limits.floor.runs(variant.floor)
                && tile.is(variant.tile)
        };
        let Some(variant) = VARIANTS.iter().find(fits) else {
            let expected = "dtype f32, f16 or bf16, and out_dtype the same or f32";
            return Err(Error::invalid(OP, "problem", expected, format!("{dtype} to {out_dtype}")));
        };
        let largest = MatmulProblem { m: m.min(max_rows), ..*problem };
        choices.push(MatmulChoice { max_rows, why, ..MatmulChoice::forced(limits, variant, &largest)? });
    }
    Ok(choices)
}

/// Why a kernel is chosen under [`Invariance::Batch`](crate::Invariance::Batch).
pub(crate) const INVARIANT: &str = "one kernel for any number of rows";

/// Rows that the tile of such products is chosen for: decode steps read their weights at the pace of many blocks, while
/// wide weights have large tiles for prompts.
const INVARIANT_ROWS: u32 = 64;

/// The tensor cores' kernel that products take whatever their rows; none for other cards and types. Of the kinds that
/// share no sum among blocks or warps, the tile that is the fastest for [`INVARIANT_ROWS`].
pub(super) fn invariant(limits: &DeviceLimits, problem: &MatmulProblem) -> Option<&'static MatmulVariant> {
    let whole =
        |variant: &&MatmulVariant| matches!(variant.tile, MatmulTile::Wgmma { .. } | MatmulTile::Mma { .. });
    let tiles: Vec<_> = tensor(limits, problem).into_iter().filter(whole).map(|tile| (tile, ())).collect();
    let [n, k] = [problem.b_rows(), problem.k].map(|size| size.min(u32::MAX as usize) as u32);
    let batch = problem.batch.min(u32::MAX as usize) as u32;
    fastest(&tiles, problem, batch, [INVARIANT_ROWS, n, k], limits.num_sms).map(|&(variant, ())| variant)
}

/// The kernel of one row with constant b, which reads that ahead of the wait for the kernel before, if it pays: where
/// its blocks are all there at once, and all that they read is on its way before the wait. Of blocks for less than half
/// of the multiprocessors, the next kernel's, which it lets start, would be in the way.
pub(super) fn ahead(limits: &DeviceLimits, problem: &MatmulProblem) -> Option<&'static MatmulVariant> {
    let MatmulProblem { batch, k, dtype, out_dtype, .. } = *problem;
    let n = problem.b_rows().saturating_mul(batch);
    let split = split_log2(limits, n, k, dtype);
    let [least, most_blocks] = [1, 2 * AHEAD_BLOCKS_PER_SM].map(|half| u64::from(half * limits.num_sms / 2));
    // A norm of its own takes longer than anything that blocks can be in the way of.
    let wanted = if problem.norm.is_some() { 0..=most_blocks } else { least..=most_blocks };
    let fits = |variant: &&MatmulVariant| {
        let MatmulTile::Ahead { unroll, .. } = variant.tile else { return false };
        let first_round = (unroll as usize * 16 / dtype.bytes() * 32) << split;
        (variant.dtype, variant.out_dtype) == (dtype, out_dtype)
            && limits.floor.runs(variant.floor)
            && k <= first_round.min(ahead_max_k(problem) as usize)
            && wanted.contains(&variant.tile.blocks(1, n as u32, split))
    };
    AHEAD_VARIANTS.iter().find(fits)
}

/// The kernel of a problem with a norm, if it pays: of one row that which reads ahead, of more the tensor cores', where
/// its blocks are all there at once and each warp has no more than two turns. Longer ones are bound by instructions
/// then, and take longer than with a norm before.
pub(super) fn normed(limits: &DeviceLimits, problem: &MatmulProblem) -> Result<Option<MatmulChoice>, Error> {
    let MatmulProblem { m, k, dtype, out_dtype, .. } = *problem;
    let turns = 2 * STREAM_BK as usize;
    let fits = |variant: &&MatmulVariant| {
        let split = stream_split_log2(limits.num_sms, problem.b_rows(), k);
        (variant.dtype, variant.out_dtype) == (dtype, out_dtype)
            && limits.floor.runs(variant.floor)
            && k <= turns << split
            && variant.tile.blocks(m as u32, problem.b_rows() as u32, split) <= u64::from(2 * limits.num_sms)
    };
    let (variant, why) = if m <= 1 {
        (ahead(limits, problem), "one row: b is loaded before the kernel ahead has ended")
    } else {
        (STREAM_NORMED_VARIANTS.iter().find(fits), "few rows, normed beside the product")
    };
    let choice =
        |variant| Ok(MatmulChoice { why: why.into(), ..MatmulChoice::forced(limits, variant, problem)? });
    variant.map(choice).transpose()
}

/// Whether a kernel norms the rows of a problem; an error if it does not.
pub(super) fn check_norms(problem: &MatmulProblem, tile: MatmulTile) -> Result<(), Error> {
    let rows = match tile {
        MatmulTile::Ahead { .. } => 1,
        MatmulTile::StreamNormed { .. } => RowNorm::MAX_ROWS,
        _ => 0,
    };
    if problem.m.max(1) <= rows {
        return Ok(());
    }
    Err(Error::invalid(OP, "variant", format!("one that norms {} rows", problem.m), format!("{tile:?}")))
}

/// Longest row that the kernel that reads ahead takes.
pub(super) const fn ahead_max_k(problem: &MatmulProblem) -> u32 {
    if problem.norm.is_some() { AHEAD_MAX_NORMED } else { AHEAD_MAX_K }
}

/// Blocks of the kernel that reads ahead on a multiprocessor.
const AHEAD_BLOCKS_PER_SM: u32 = 4;

/// The tensor cores' kernels for a problem; none for other cards and types.
pub(super) fn tensor(limits: &DeviceLimits, problem: &MatmulProblem) -> Vec<&'static MatmulVariant> {
    let MatmulProblem { dtype, out_dtype, precision, .. } = *problem;
    let fits = |variant: &&MatmulVariant| {
        (variant.dtype, variant.out_dtype) == (dtype, out_dtype)
            && (precision == Precision::Tf32 || !variant.is_tf32())
            && limits.floor.runs(variant.floor)
            && variant.tile.smem_bytes(dtype) <= limits.smem_per_block_bytes
    };
    WGMMA_VARIANTS.iter().chain(MMA_VARIANTS).chain(STREAM_VARIANTS).filter(fits).collect()
}

/// The kernel that a launch takes among those of the tensor cores that are loaded: of many rows on Hopper the one of
/// the least measured time ([`tuning`]), else of the first kind of `Stream`, `Split`, `Wgmma` and `Mma` that can be
/// used at all the tile of the least clocks. n counts the rows of b.
pub(super) fn fastest<'a, T>(
    loaded: &'a [(&'static MatmulVariant, T)],
    problem: &MatmulProblem,
    batch: u32,
    [m, n, k]: [u32; 3],
    num_sms: u32,
) -> Option<&'a (&'static MatmulVariant, T)> {
    let clocks = |(variant, _): &&(&'static MatmulVariant, T)| match variant.tile {
        tile if keeps_out(tile, problem.is_gated()) => (u64::MAX, 0),
        // A row of f32 takes the tensor cores as long as one of twice as many halves.
        tile => tensor_clocks(tile, batch, m, n, k / 2 * problem.dtype.bytes() as u32, num_sms),
    };
    let best = |kind: &dyn Fn(MatmulTile) -> bool| {
        loaded.iter().filter(|(variant, _)| kind(variant.tile)).min_by_key(clocks)
    };
    if batch == 1
        && let Some(fastest) = tuning::fastest(loaded, problem.is_gated(), [m, n, k], num_sms)
    {
        return Some(fastest);
    }
    let single = |tile| matches!(tile, MatmulTile::Wgmma { .. }) && batch == 1;
    let any = |tile| matches!(tile, MatmulTile::Mma { .. });
    // Swapped ones for so few rows only where there is no other.
    let swapped = |tile| matches!(tile, MatmulTile::Swapped { .. }) && batch == 1;
    let many = best(&single).or_else(|| best(&swapped)).or_else(|| best(&any));
    let on_hopper = many.is_some_and(|(variant, _)| single(variant.tile));
    let streams = m <= if on_hopper { STREAM_MAX_ROWS_ON_HOPPER } else { STREAM_MAX_ROWS };
    let few = |tile| matches!(tile, MatmulTile::Stream { .. }) && (streams || many.is_none());
    let wanted = split_tile(num_sms, m, problem.b_rows(), problem.k);
    let split = |tile| {
        let MatmulTile::Split { bn, cluster, .. } = tile else { return false };
        batch == 1 && (wanted == Some([bn, cluster]) || many.is_none())
    };
    best(&few).or_else(|| best(&split)).or(many)
}

/// Why `fastest` has taken a tile, of so many of the tensor cores.
pub(crate) fn why_of_tensor(tile: MatmulTile, tiles: usize) -> String {
    match tile {
        MatmulTile::Stream { .. } => "few rows: b goes through registers".into(),
        MatmulTile::Split { .. } => "few rows and columns: the blocks of a cluster share k".into(),
        MatmulTile::Swapped { .. } => format!("the least time of {tiles} tiles, whose columns are a's rows"),
        _ => format!("the least time of {tiles} tiles by waves and steps"),
    }
}

/// Most rows of the `Stream` tiles where `Mma` does the rest.
const STREAM_MAX_ROWS: u32 = 64;

/// Most rows of the `Stream` tiles where `Wgmma` does the rest. Of a few rows more both take as long until columns are
/// many.
const STREAM_MAX_ROWS_ON_HOPPER: u32 = 16;

/// Fewest rows for the tensor cores. A single one is for ordinary arithmetic; few of f32 have no kernels there.
pub(super) fn tensor_min_rows(dtype: DType) -> usize {
    if dtype == DType::F32 { GEMV_MAX_ROWS + 1 } else { 2 }
}

/// Columns of the `Split` tile that a launch takes, and blocks that share its k, if it takes one: where tiles of 64
/// columns leave half of the multiprocessors idle, and k is long enough to be shared. By four where there is about a
/// multiprocessor for each of them, else by two, which have one each and twice the stages.
///
/// More than 64 rows are two tiles, which read the same b at about the same time. Those of 128 columns are half as
/// many.
///
/// Tiles whose k is shared by as many blocks have the same order of a sum.
fn split_tile(num_sms: u32, m: u32, n: usize, k: usize) -> Option<[u32; 2]> {
    let num_sms = num_sms as usize;
    let tiles = |columns: usize| m.div_ceil(64) as usize * n.div_ceil(columns);
    if m > 128 || k < 1024 {
        None
    } else if 3 * tiles(64) <= num_sms {
        Some([64, 4])
    } else if 2 * tiles(64) <= num_sms {
        Some([64, 2])
    } else if m > 64 && k >= 4096 && 3 * tiles(128) <= num_sms {
        Some([128, 4])
    } else {
        None
    }
}

/// [`NEXT_MAY_START`] where the next launch may start as blocks of this one end, else nothing: where all
/// multiprocessors but a few are full of these.
///
/// Beside others, on multiprocessors that are not, its blocks go where there is room first, and no longer evenly: two
/// multiprocessors share a way to L2. `Stream` lets it start when all blocks have multiplied.
pub(crate) fn next_may_start(tile: MatmulTile, dtype: DType, blocks: u64, num_sms: u32) -> u32 {
    // Of a multiprocessor of Hopper: the tiles for Ampere launch nothing early.
    const HALF_OF_SMEM: u32 = 114 << 10;
    let of_multiprocessor = match tile {
        MatmulTile::Gemv { rows: 1, .. } => 4,
        // It says so behind its loads, and leaves room for one of the next.
        MatmulTile::Ahead { .. } => return NEXT_MAY_START,
        MatmulTile::Stream { rows: ..=16, .. } | MatmulTile::StreamNormed { .. } => 2,
        MatmulTile::Wgmma { .. } | MatmulTile::Split { .. } | MatmulTile::Swapped { cluster: 2, .. }
            if tile.smem_bytes(dtype) > HALF_OF_SMEM =>
        {
            1
        }
        _ => return 0,
    };
    if blocks >= u64::from(of_multiprocessor * (num_sms - num_sms / 8)) { NEXT_MAY_START } else { 0 }
}

/// Groups of 16 columns in flight on a multiprocessor that keep the memory busy.
const STREAM_GROUPS_PER_SM: usize = 32;

/// Binary logarithm of the warps that share a column's k in the `Stream` tiles: enough of them for the memory, but
/// three turns for each, or two where multiprocessors would have no block.
///
/// It decides the order of a sum, so it depends on n (of all products together), k and the card only, not on the number
/// of rows.
pub(crate) fn stream_split_log2(num_sms: u32, n: usize, k: usize) -> u32 {
    let (groups, wanted) = (n.div_ceil(16), STREAM_GROUPS_PER_SM * num_sms.max(1) as usize);
    let turns = k / STREAM_BK as usize;
    let may_double = |split: u32| {
        let are_few = groups << split < (WARPS * num_sms) as usize;
        groups << split < wanted && turns >= (if are_few { 4 } else { 6 }) << split
    };
    (0..WARPS.ilog2()).find(|&split| !may_double(split)).unwrap_or(WARPS.ilog2())
}

/// About how many clocks a launch of a tile of the tensor cores takes, and its size, as of tiles that take as long the
/// smallest is the best: to compare tiles of a kind, not to foretell times. k is that of operands of 16 bits.
///
/// `Wgmma`: a multiprocessor makes its share of the tiles one after another. A step of 64 k takes the tensor cores half
/// a clock per column for each 64 rows and 16 k, or what it takes to read both from shared memory at 128 bytes per
/// clock, and a hundred and ten more to hand the stage over; the loads of a step come at 56 bytes per clock, a shared a
/// at 25. The constants are those that order the tiles as an H200 does, also where the memory is what bounds them.
///
/// `Mma`: a multiprocessor's tensor cores make 1024 multiply-adds per clock, the blocks that it holds share them, and a
/// step of a warp that has little to multiply waits for shared memory instead.
pub(crate) fn tensor_clocks(
    tile: MatmulTile,
    batch: u32,
    m: u32,
    n: u32,
    k: u32,
    num_sms: u32,
) -> (u64, u32) {
    let tiles = tile.blocks(m, n, 0) * u64::from(batch);
    match tile {
        MatmulTile::Wgmma { bm, bn, cluster, shares_a, .. } => {
            // Clusters of four leave some multiprocessors of a group over.
            let sms = if cluster > 2 { num_sms - num_sms / 11 } else { num_sms };
            let at_a_time = u64::from((sms / cluster).max(1));
            let waves = tiles.div_ceil(at_a_time);
            // Where there are 64 rows or fewer, the second half of a tile takes no part.
            let multiply = 4 * bm.min(m).div_ceil(64) * (bn / 2).max(16 + bn / 4);
            let steps = u64::from(k.div_ceil(WGMMA_ROW_BYTES / 2));
            let (fill, hand_over, epilogue) = (1500, 110, 300 + 6 * u64::from(bn));
            let step = if shares_a {
                // A tenth more where most clusters that there is room for are at work.
                let crowded = if 3 * tiles > 2 * at_a_time { 11 } else { 10 };
                u64::from(multiply.max(bm * 128 / 25)) * crowded / 10
            } else {
                // A block's own boxes of a have the rows that there are.
                u64::from(multiply.max((bm.min(m) + bn / cluster) * 128 / 56)) + hand_over
            };
            (waves * (steps * step + epilogue) + fill, bm * bn)
        }
        MatmulTile::Mma { bm, bn, blocks, .. } => {
            let steps = u64::from(k.div_ceil(MMA_ROW_BYTES / 2));
            let step = u64::from(bm * bn * MMA_ROW_BYTES / 2 / 1024).max(u64::from(bm + bn)) + 30;
            // Blocks of a multiprocessor in turn, as many as there are at most.
            let turns = tiles.div_ceil(u64::from(num_sms));
            let clocks =
                turns * (steps * step + u64::from(bm * bn / 32)) + 600 * turns.div_ceil(u64::from(blocks));
            (clocks, bm * bn)
        }
        // Each pass over b costs about as much as 16 rows do.
        MatmulTile::Stream { rows, .. } => (u64::from(m.div_ceil(rows) * (rows + 16)), rows),
        _ => (u64::MAX, 0),
    }
}

#[cfg(test)]
mod tests;
