//! Which kernels a matrix product takes.

use abi::ops::matmul::{
    AHEAD_MAX_K, AHEAD_MAX_NORMED, AHEAD_VARIANTS, MMA_ROW_BYTES, MMA_VARIANTS, MatmulTile, MatmulVariant,
    NEXT_MAY_START, STREAM_BK, STREAM_VARIANTS, VARIANTS, WARPS, WGMMA_ROW_BYTES, WGMMA_VARIANTS,
};
use abi::{DType, Need};

use super::tuning::{self, keeps_out};
use super::{MatmulProblem, OP, Precision};
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
        let split_log2 = split_log2(limits, n.saturating_mul(batch), k, dtype);
        // A block has both columns of a pair, the gate's and up's.
        let split_log2 = if problem.is_gated() { split_log2.min(GATED_MAX_SPLIT_LOG2) } else { split_log2 };
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
        MatmulTile::Stream { rows: ..=16, .. } => 2,
        MatmulTile::Wgmma { .. } | MatmulTile::Split { .. } if tile.smem_bytes(dtype) > HALF_OF_SMEM => 1,
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
mod tests {
    use abi::Arch;

    use super::super::{Act, Activation, Epilogue, RowNorm};
    use super::*;
    use crate::Invariance;
    use crate::ops::rmsnorm::NormWeight;

    const H200: DeviceLimits = DeviceLimits::new(Arch::Sm61, 132, 48 << 10);

    #[test]
    fn choice_by_rows() {
        let small = DeviceLimits { num_sms: 20, ..H200 };
        let table = [
            (H200, 1, 4096, DType::BF16, "matmul_bf16__gemv1__sm61"),
            (H200, 2, 4096, DType::F32, "matmul_f32__gemv2__sm61"),
            (H200, 3, 4096, DType::F16, "matmul_f16__gemv4__sm61"),
            (H200, 5, 4096, DType::BF16, "matmul_bf16__gemv8__sm61"),
            (H200, 16, 4096, DType::BF16, "matmul_bf16__gemv8__sm61"),
            (H200, 17, 4096, DType::BF16, "matmul_bf16__m64n64k32__sm61"),
            (H200, 512, 4096, DType::BF16, "matmul_bf16__m64n64k32__sm61"),
            (H200, 513, 4096, DType::BF16, "matmul_bf16__m128n128k16__sm61"),
            (H200, 65, 151_936, DType::F32, "matmul_f32__m128n128k8__sm61"),
            (small, 65, 4096, DType::F32, "matmul_f32__m128n128k8__sm61"),
            (H200, 0, 0, DType::F32, "matmul_f32__gemv1__sm61"),
        ];
        for (limits, m, n, dtype, entry) in table {
            let problem = MatmulProblem::new(m, n, 1024, dtype);
            let choices = select(&limits, &problem).unwrap();
            assert_eq!(choices.last().unwrap().variant.entry, entry, "{m} × {n} {dtype}");
            assert!(choices.is_sorted_by(|a, b| a.max_rows < b.max_rows));
            assert!(choices.last().unwrap().max_rows >= m);
        }
    }

    /// One row reads its weights ahead where they are on their way before the wait, and no more or fewer blocks than
    /// suit the card.
    #[test]
    fn what_is_read_ahead() {
        let hopper = DeviceLimits { floor: Arch::Sm90a, ..H200 };
        let norm = Some(RowNorm { eps: 1e-6, weight: NormWeight::Plain });
        // The layers of Qwen3-0.6B; its head, Qwen3-4B's q, k and v, a router; narrow, with a norm and without.
        let table = [
            (4096, 1024, None, true),
            (4096, 1024, norm, true),
            (1024, 2048, None, true),
            (1024, 3072, None, true),
            (151_936, 1024, None, false),
            (6144, 2560, None, false),
            (6144, 2560, norm, false),
            (128, 2048, None, false),
            (64, 256, norm, true),
            (64, 256, None, false),
        ];
        for (n, k, norm, wanted) in table {
            let problem = MatmulProblem { norm, ..MatmulProblem::new(1, n, k, DType::BF16) };
            assert_eq!(ahead(&hopper, &problem).is_some(), wanted, "{n} × {k}");
            let of_f32 = MatmulProblem { dtype: DType::F32, out_dtype: DType::F32, ..problem };
            assert_eq!((ahead(&hopper, &of_f32), ahead(&H200, &problem)), (None, None));
        }
        let act = Act::Gated(Activation::Silu);
        let gated =
            MatmulProblem { epilogue: Epilogue::of(act), ..MatmulProblem::new(1, 3072, 1024, DType::F16) };
        assert_eq!(ahead(&hopper, &gated).map(|variant| variant.entry), Some("matmul_f16__ahead__sm90a"));
    }

    #[test]
    fn every_type_has_every_tile() {
        for dtype in DType::FLOATS {
            for out_dtype in [dtype, DType::F32] {
                let problem = MatmulProblem { out_dtype, ..MatmulProblem::new(9999, 512, 64, dtype) };
                let choices = select(&H200, &problem).unwrap();
                assert_eq!(choices.len(), 6);
                assert!(choices.iter().all(|choice| choice.variant.out_dtype == out_dtype));
            }
        }
    }

    fn of_bf16([m, n, k]: [usize; 3]) -> MatmulProblem {
        let dtype = DType::BF16;
        MatmulProblem::new(m, n, k, dtype)
    }

    /// The kernel among those of a kind that the clocks say is the fastest.
    fn of_least_clocks(
        limits: &DeviceLimits,
        [m, n, k]: [usize; 3],
        is_of_kind: impl Fn(MatmulTile) -> bool,
    ) -> &'static str {
        let clocks = |variant: &&MatmulVariant| {
            tensor_clocks(variant.tile, 1, m as u32, n as u32, k as u32, limits.num_sms)
        };
        let kernels = tensor(limits, &of_bf16([m, n, k])).into_iter();
        kernels.filter(|variant| is_of_kind(variant.tile)).min_by_key(clocks).expect("a tile").entry
    }

    /// What an H200 was faster by with the kernels for Ampere.
    #[test]
    fn tiles_of_mma_by_shape() {
        let ampere = DeviceLimits { floor: Arch::Sm80, smem_per_block_bytes: 163 << 10, ..H200 };
        for ([m, n, k], fastest) in [
            ([8192, 8192, 8192], "matmul_bf16__m128n256__sm80"),
            ([4096, 4096, 4096], "matmul_bf16__m128n256__sm80"),
            ([4096, 4096, 2560], "matmul_bf16__m128n256__sm80"),
            ([128, 16384, 4096], "matmul_bf16__m128n128__sm80"),
            ([128, 2560, 2560], "matmul_bf16__m64n64__sm80"),
        ] {
            let is_mma = |tile| matches!(tile, MatmulTile::Mma { .. });
            assert_eq!(of_least_clocks(&ampere, [m, n, k], is_mma), fastest, "{m} × {n} × {k}");
        }
    }

    /// The fastest of an H200's tiles at the shapes where all were timed, or one within 4 % of it.
    #[test]
    fn tiles_of_wgmma_by_shape() {
        let hopper = DeviceLimits { floor: Arch::Sm90a, smem_per_block_bytes: 227 << 10, ..H200 };
        for ([m, n, k], fastest) in [
            ([8192, 8192, 8192], &["n192c2", "n256c2"][..]),
            ([4096, 4096, 4096], &["n256c2"]),
            ([2048, 19456, 2560], &["n192c2", "n256c2"]),
            ([4096, 4096, 2560], &["n256c2"]),
            ([2048, 1536, 2048], &["n192c2"]),
            ([128, 16384, 4096], &["n128"]),
            ([64, 4096, 4096], &["m64n64c4"]),
            ([32, 19456, 2560], &["n192", "n128"]),
            ([128, 2560, 9728], &["m64n64c4"]),
            ([128, 4096, 1024], &["n64"]),
            ([2048, 128, 2048], &["n64"]),
            ([32, 151_936, 1024], &["n192"]),
            ([32, 151_936, 2560], &["n128", "n192"]),
            ([128, 151_936, 2560], &["n128", "n192"]),
            ([128, 19456, 2560], &["n192"]),
            ([128, 12288, 2048], &["n128"]),
            ([32, 12288, 2048], &["n128"]),
            ([32, 20480, 2048], &["n192", "n128"]),
            ([32, 6144, 1024], &["n64"]),
            ([32, 6144, 2560], &["n64"]),
            ([32, 5120, 2048], &["m64n64c4"]),
            ([32, 5120, 768], &["m64n64c4"]),
            ([32, 9216, 2048], &["n128"]),
            ([128, 9216, 2560], &["n128", "n64"]),
        ] {
            let is_wgmma = |tile| matches!(tile, MatmulTile::Wgmma { .. });
            let entry = of_least_clocks(&hopper, [m, n, k], is_wgmma);
            let name = entry.trim_start_matches("matmul_bf16__").trim_end_matches("__sm90a");
            assert!(fastest.contains(&name), "{m} × {n} × {k}: {name}");
        }
        assert!(tensor(&H200, &of_bf16([512, 512, 64])).is_empty());
    }

    /// Which kind a launch takes: few rows stream, few columns share k, the rest is `wgmma`'s, also with rows and
    /// columns swapped, and without it `mma`'s. Of more than 64 rows on Hopper those that were measured to be the
    /// fastest (`benches/record/h200/2026-11-28-sweep.md`, `2026-11-28-choice.md`).
    #[test]
    fn kinds_of_the_tensor_cores_by_shape() {
        let hopper = DeviceLimits { floor: Arch::Sm90a, smem_per_block_bytes: 227 << 10, ..H200 };
        let ampere = DeviceLimits { floor: Arch::Sm80, smem_per_block_bytes: 163 << 10, ..H200 };
        let kind = |limits: &DeviceLimits, problem: &MatmulProblem| {
            let loaded: Vec<_> = tensor(limits, problem).into_iter().map(|variant| (variant, ())).collect();
            let sizes = [problem.m, problem.b_rows(), problem.k].map(|size| size as u32);
            let taken = fastest(&loaded, problem, problem.batch as u32, sizes, limits.num_sms);
            taken.map(|(variant, ())| match variant.tile {
                MatmulTile::Stream { .. } => "stream".to_owned(),
                MatmulTile::Split { bn, cluster, .. } => format!("split {bn} by {cluster}"),
                MatmulTile::Wgmma { bn, .. } => format!("wgmma {bn}"),
                MatmulTile::Swapped { bm, bn, cluster, .. } => format!("swapped {bm} × {bn} by {cluster}"),
                tile => format!("{tile:?}").split_whitespace().next().unwrap_or_default().to_lowercase(),
            })
        };
        for (sizes, on_hopper, on_ampere) in [
            ([2, 4096, 4096], "stream", "stream"),
            ([16, 19456, 2560], "stream", "stream"),
            ([17, 19456, 2560], "wgmma", "stream"),
            ([32, 2048, 6144], "split 64 by 4", "stream"),
            ([64, 4096, 4096], "split 64 by 2", "stream"),
            ([65, 19456, 2560], "wgmma", "mma"),
            ([65, 4096, 4096], "swapped 64 × 96 by 2", "mma"),
            ([128, 2560, 9728], "swapped 64 × 128 by 2", "mma"),
            ([128, 28672, 4096], "wgmma 128", "mma"),
            ([129, 2560, 9728], "swapped 64 × 160 by 2", "mma"),
            ([129, 19456, 2560], "swapped 192 × 160 by 1", "mma"),
            ([768, 6144, 2560], "swapped 192 × 192 by 1", "mma"),
            ([129, 4096, 4096], "swapped 64 × 160 by 2", "mma"),
            ([192, 28672, 4096], "swapped 128 × 192 by 1", "mma"),
            ([512, 10240, 8192], "wgmma 192", "mma"),
            ([8192, 8192, 8192], "wgmma", "mma"),
        ] {
            for (limits, want) in [(&hopper, on_hopper), (&ampere, on_ampere)] {
                let kind = kind(limits, &of_bf16(sizes)).expect("a kernel");
                assert!(kind.starts_with(want), "{sizes:?} on {}: {kind}", limits.floor);
            }
        }
        // Several products at a time are not for TMA.
        for (m, want) in [(32, "stream"), (64, "stream"), (65, "mma")] {
            let problem = MatmulProblem { batch: 20, ..of_bf16([m, 512, 1024]) };
            assert_eq!(kind(&hopper, &problem).as_deref(), Some(want), "{m} rows");
        }
        // Half a tile of the gate is whole boxes.
        let epilogue = Epilogue { act: Act::Gated(Activation::Silu), ..Epilogue::NONE };
        let gated = MatmulProblem { epilogue, ..of_bf16([2048, 9728, 2560]) };
        assert!(matches!(kind(&hopper, &gated).as_deref(), Some("wgmma 128" | "wgmma 256")));
        assert_eq!(kind(&H200, &of_bf16([512, 512, 64])), None);
    }

    #[test]
    fn few_columns_split_k() {
        let one_row = [
            (1024, 2048, 1),
            (1024, 3072, 2),
            (1024, 1024, 0),
            (2560, 9728, 0),
            (2048, 10_240, 1),
            (6144, 2560, 0),
            (256, 65536, 3),
        ];
        for (n, k, split) in one_row {
            let ampere = DeviceLimits { floor: Arch::Sm80, ..H200 };
            assert_eq!(split_log2(&ampere, n, k, DType::BF16), split, "{n} {k}");
        }
        let table = [
            (1024, 2048, DType::BF16, 1),
            (1024, 3072, DType::BF16, 1),
            (1024, 1024, DType::BF16, 0),
            (2560, 9728, DType::BF16, 2),
            (151_936, 9728, DType::BF16, 0),
            (256, 65536, DType::F32, 3),
            (1024, 4096, DType::I8, 1),
        ];
        for (n, k, dtype, split) in table {
            assert_eq!(split_log2(&H200, n, k, dtype), split, "{n} {k} {dtype}");
        }
    }

    #[test]
    fn next_starts_early_behind_full_multiprocessors() {
        let gemv = |rows, cols| MatmulTile::Gemv { rows, cols, unroll: 4 };
        let stream = |rows| MatmulTile::Stream { rows, cols: 16, lanes: 8, unroll: 2 };
        let wgmma =
            |bn, stages| MatmulTile::Wgmma { bm: 128, bn, threads: 384, stages, cluster: 1, shares_a: false };
        for (tile, blocks, may) in [
            (gemv(1, 1), 464, true),
            (gemv(1, 1), 463, false),
            (gemv(1, 1), u64::MAX, true),
            (gemv(2, 1), 528, false),
            (stream(16), 232, true),
            (stream(16), 231, false),
            (stream(32), 264, false),
            (wgmma(128, 6), 116, true),
            (wgmma(128, 6), 115, false),
            (wgmma(64, 2), 132, false),
        ] {
            let bits = next_may_start(tile, DType::BF16, blocks, 132);
            assert_eq!(bits, if may { NEXT_MAY_START } else { 0 }, "{tile:?} {blocks}");
        }
    }

    #[test]
    fn narrow_products_of_long_k_share_it() {
        for (m, n, k, tile) in [
            (64, 2560, 9728, Some([64, 4])),
            (64, 2816, 1024, Some([64, 4])),
            (64, 2817, 1024, Some([64, 2])),
            (64, 4224, 1024, Some([64, 2])),
            (64, 4225, 4096, None),
            (64, 4096, 1016, None),
            (64, 64, 1016, None),
            (65, 1408, 1024, Some([64, 4])),
            (65, 1409, 1024, Some([64, 2])),
            (128, 2112, 1024, Some([64, 2])),
            (128, 2113, 4095, None),
            (128, 2113, 4096, Some([128, 4])),
            (128, 2816, 9728, Some([128, 4])),
            (128, 2817, 9728, None),
            (129, 1024, 4096, None),
        ] {
            assert_eq!(split_tile(132, m, n, k), tile, "{m} {n} {k}");
        }
    }

    /// Whatever rows there are: one choice, which has no sums that others share.
    #[test]
    fn invariant_choices_know_no_rows() {
        let layout = crate::weight::Scheme::INT4.layout();
        let shapes = [[1024, 2048], [6144, 2560], [2560, 9728], [151_936, 1024], [80, 528], [128, 2048]];
        for (floor, smem_per_block_bytes) in
            [(Arch::Sm61, 48 << 10), (Arch::Sm80, 163 << 10), (Arch::Sm90a, 227 << 10)]
        {
            let limits = DeviceLimits { floor, smem_per_block_bytes, invariance: Invariance::Batch, ..H200 };
            for ([n, k], dtype, batch) in shapes
                .into_iter()
                .flat_map(|size| DType::FLOATS.map(|dtype| (size, dtype)))
                .flat_map(|(size, dtype)| [1, 20].map(|batch| (size, dtype, batch)))
            {
                for epilogue in [Epilogue::NONE, Epilogue::of(Act::Gated(Activation::Silu))] {
                    let of = |m| {
                        let problem = MatmulProblem { batch, epilogue, ..MatmulProblem::new(m, n, k, dtype) };
                        let packed = super::super::select_packed(&limits, &problem, &layout);
                        (select(&limits, &problem).unwrap(), invariant(&limits, &problem), packed)
                    };
                    let (choices, tensor, packed) = of(1);
                    assert!(packed.dense_from.is_none() && packed.simt.len() <= 1 && packed.mma.len() <= 1);
                    assert_eq!((choices.len(), choices[0].max_rows), (1, usize::MAX));
                    let has_tensor = floor != Arch::Sm61 && dtype != DType::F32;
                    assert_eq!(tensor.is_some(), has_tensor, "{n} × {k} {dtype} {batch} on {floor}");
                    for m in [0, 2, 3, 8, 16, 17, 31, 64, 65, 128, 129, 512, 2048, 8192] {
                        let same = of(m) == (choices.clone(), tensor, packed.clone());
                        assert!(same, "{m} × {n} × {k} {dtype} on {floor}");
                    }
                }
            }
        }
    }

    #[test]
    fn more_blocks_than_a_grid_has() {
        let most = (1 << 31) - 1;
        let problem = MatmulProblem::new(most, most, 1, DType::F32);
        let message = select(&H200, &problem).unwrap_err().to_string();
        assert!(message.starts_with("matmul: problem: expected at most 2^31 - 1 blocks, got "), "{message}");
    }
}
