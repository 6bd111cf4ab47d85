//! Products with a packed weight: few rows by kernels that read it as it is, many by the dense product's, for which
//! stripes of it are unpacked, or of fp8 by fp8, as of a group by itself.

use std::cmp::Reverse;

use abi::ops::matmul::{
    A_IN_PIECES, B_IS_CONSTANT, MatmulDims, MatmulEpilogue, MatmulNorm, MatmulVariant, NEXT_MAY_START,
    OUT_IN_F32, OUT_IN_QUADS, PACKED_AHEAD_VARIANTS, PACKED_MMA_VARIANTS, PACKED_VARIANTS,
    PACKED_WGMMA_VARIANTS, PackedTile, PackedVariant, THREADS, UNPACK_VARIANTS, WARPS,
};
use abi::weight::{Codes, Layout, TILE_K, TILE_ROWS, WeightDims};
use abi::{Arch, DType};

use super::fp8::{self, Fp8};
use super::select::ahead_max_k;
use super::{Act, Bias, Epilogue, MatmulArgs, MatmulProblem, OP, Planned, Residual, residual};
use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::Cut;
use crate::ladder::Rung;
use crate::launch::Entry;
use crate::ops::workspace::Workspace;
use crate::stream::Stream;
use crate::tensor::Tensor;
use crate::weight::Weight;

/// Up to so many rows the weight is read as it is packed, on tensor cores.
const FEW_MAX_ROWS: usize = 64;
/// Up to so many rows by `wgmma`, of which a block has 64 at most: further blocks decode the weight again.
const FEW_MAX_ROWS_WGMMA: usize = 128;
/// Up to so many rows `mma.sync` costs no more than `wgmma`.
const MMA_MAX_ROWS: usize = 16;
/// Columns of a block by `wgmma`.
const WGMMA_COLS: usize = 128;
/// The same by ordinary arithmetic, which decodes the weight again for every two rows.
const FEW_MAX_ROWS_SIMT: usize = 8;
/// The same of 16-bit codes where the dense product is on tensor cores: unpacking costs less than a second decoding.
pub(crate) const FEW_MAX_ROWS_E6M9: usize = 2;
/// Bytes of a stripe of the weight that is unpacked at a time, which stay in L2 until they are multiplied.
const STRIPE_BYTES: usize = 24 << 20;
/// Blocks of the kernel of one row that a multiprocessor holds.
const AHEAD_BLOCKS_PER_SM: usize = 4;
/// Tiles of a warp that are on their way before the wait.
const AHEAD_TILES: usize = 8;
/// Warps of a multiprocessor that share columns' k until all of them have work.
const WARPS_PER_SM: usize = 16;

/// A kernel, and the most rows that it is chosen for.
#[derive(Clone, Debug, PartialEq)]
pub struct PackedChoice {
    /// The kernel.
    pub variant: &'static PackedVariant,
    /// Up to so many rows.
    pub max_rows: usize,
}

/// What a plan does for a number of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct PackedChoices {
    /// The kernel of one row that is aligned to 16 bytes, which reads the weight ahead; none if there is none.
    pub ahead: Option<&'static PackedVariant>,
    /// Kernels of few rows for operands of any address, fewest rows first.
    pub simt: Vec<PackedChoice>,
    /// Kernels of few rows on tensor cores, for rows aligned to 16 bytes.
    pub mma: Vec<PackedChoice>,
    /// Rows from which on stripes are unpacked for the dense product; none if there are not so many.
    pub dense_from: Option<usize>,
    /// Columns of out of a stripe, a multiple of 16 unless it is all of them.
    pub stripe: usize,
    /// The kernels of fp8 by fp8, none if a may not become fp8, and the rows from which on one is taken.
    pub fp8: (Vec<&'static MatmulVariant>, usize),
    /// Binary logarithm of the warps that share a column's k.
    pub split_log2: u32,
}

/// The kernels for a problem with a weight of this layout.
pub fn select(limits: &DeviceLimits, problem: &MatmulProblem, layout: &Layout) -> PackedChoices {
    let MatmulProblem { m, k, dtype, .. } = *problem;
    let few = few_can(problem);
    let of = |variants: &'static [PackedVariant]| {
        let mut rungs: Vec<PackedChoice> = variants
            .iter()
            .filter(|variant| can(limits, problem, layout, variant))
            .map(|variant| PackedChoice { variant, max_rows: variant.tile.rows() as usize })
            .collect();
        // Of several those of the longest groups.
        let group = |rung: &PackedChoice| match rung.variant.tile {
            PackedTile::Mma { group, .. } => group,
            _ => 0,
        };
        rungs.sort_by_key(|rung| (rung.max_rows, Reverse(group(rung))));
        rungs.dedup_by_key(|rung| rung.max_rows);
        if let Some(last) = rungs.last_mut() {
            last.max_rows = usize::MAX;
        }
        rungs
    };
    let (mut simt, mut mma) = (of(PACKED_VARIANTS), of(PACKED_MMA_VARIANTS));
    let is_invariant = limits.is_invariant();
    if is_invariant {
        [&mut simt, &mut mma].into_iter().for_each(invariant);
    }
    // Where a third of the multiprocessors have columns: a block has their whole k.
    let are_busy = 3 * problem.b_rows().div_ceil(WGMMA_COLS) >= limits.num_sms as usize;
    let wgmma = if is_invariant || !are_busy { Vec::new() } else { of(PACKED_WGMMA_VARIANTS) };
    let has_wgmma = !wgmma.is_empty();
    if has_wgmma {
        mma.retain(|rung| rung.variant.tile.rows() as usize <= MMA_MAX_ROWS);
        if let Some(last) = mma.last_mut() {
            last.max_rows = MMA_MAX_ROWS;
        }
        mma.extend(wgmma);
    }
    let most = match (few, mma.is_empty()) {
        (false, _) => 0,
        (true, _) if is_invariant => usize::MAX,
        (true, true) if unpacks_early(limits, dtype, layout) => FEW_MAX_ROWS_E6M9,
        (true, true) => FEW_MAX_ROWS_SIMT,
        (true, false) if has_wgmma => FEW_MAX_ROWS_WGMMA,
        (true, false) => FEW_MAX_ROWS,
    };
    let dense_from = (m > most).then(|| most + 1);
    PackedChoices {
        ahead: ahead(limits, problem, layout),
        simt,
        mma,
        dense_from,
        stripe: stripe(problem),
        fp8: (fp8::variants(limits, problem, layout), FEW_MAX_ROWS + 1),
        split_log2: split_log2(limits, problem.b_rows(), k),
    }
}

/// The kernel of one row that reads the weight ahead: where its blocks are all there at once.
fn ahead(limits: &DeviceLimits, problem: &MatmulProblem, layout: &Layout) -> Option<&'static PackedVariant> {
    let split_log2 = split_log2(limits, problem.b_rows(), problem.k);
    let blocks = problem.b_rows().div_ceil((TILE_ROWS * WARPS) as usize >> split_log2);
    let num_sms = limits.num_sms.max(1) as usize;
    // Where blocks are few and a warp has many tiles, the other kernel has more of them on their way.
    let is_short = problem.k.div_ceil(TILE_K as usize) <= AHEAD_TILES << split_log2;
    let pays = !limits.is_invariant()
        && blocks <= AHEAD_BLOCKS_PER_SM * num_sms
        && (problem.norm.is_some() || is_short || 2 * blocks >= 3 * num_sms);
    // Of several the one of the longest groups.
    let group = |variant: &&PackedVariant| match variant.tile {
        PackedTile::Ahead { group, .. } => group,
        _ => 0,
    };
    let fits = |variant: &&PackedVariant| pays && can(limits, problem, layout, variant);
    PACKED_AHEAD_VARIANTS.iter().filter(fits).max_by_key(group)
}

/// Whether a kernel can do a problem, of any number of rows or of one.
fn can(limits: &DeviceLimits, problem: &MatmulProblem, layout: &Layout, variant: &PackedVariant) -> bool {
    let is_one_row = matches!(variant.tile, PackedTile::Ahead { .. });
    let ends = if is_one_row {
        problem.out_dtype == problem.dtype && problem.k <= ahead_max_k(problem) as usize
    } else {
        few_can(problem) && problem.norm.is_none()
    };
    ends && (variant.dtype, variant.codes) == (problem.dtype, layout.codes)
        && limits.floor.runs(variant.floor)
        && variant.tile.smem_bytes() <= limits.smem_per_block_bytes
        && suits(variant.tile, layout, problem.k)
}

/// Whether no tensor core takes the codes, but they take what is unpacked.
pub(crate) fn unpacks_early(limits: &DeviceLimits, dtype: DType, layout: &Layout) -> bool {
    layout.codes == Codes::E6m9 && dtype != DType::F32 && limits.floor.runs(Arch::Sm80)
}

/// Whether the kernels of few rows can do what becomes of the sums: they round to the operands' type, or store the
/// scaled sums in f32, as an output head wants them.
fn few_can(problem: &MatmulProblem) -> bool {
    let MatmulProblem { dtype, out_dtype, bias, epilogue: Epilogue { act, residual, .. }, .. } = *problem;
    out_dtype == dtype || bias == Bias::None && act == Act::None && !residual
}

/// Leaves the one kernel that takes any number of rows under [`Invariance::Batch`](crate::Invariance::Batch): of as
/// many rows to a tile as cost no more than one while memory sets the pace.
fn invariant(rungs: &mut Vec<PackedChoice>) {
    let rows = |rung: &PackedChoice| rung.variant.tile.rows();
    let kept = rungs.iter().find(|rung| rows(rung) >= INVARIANT_ROWS).or(rungs.last()).cloned();
    *rungs = kept.into_iter().map(|kept| PackedChoice { max_rows: usize::MAX, ..kept }).collect();
}

/// Rows of such a kernel's tile, if there is one.
pub(crate) const INVARIANT_ROWS: u32 = 16;

/// Whether kernels of this kind of groups take a layout.
pub(crate) fn takes(group: u32, layout: &Layout) -> bool {
    match group {
        TILE_K => layout.is_wide(),
        16 => !layout.minimums,
        group => layout.group == group,
    }
}

/// Whether a tile takes a layout and this k.
fn suits(tile: PackedTile, layout: &Layout, k: usize) -> bool {
    match tile {
        PackedTile::Simt { .. } => true,
        PackedTile::Mma { group, .. } => takes(group, layout) && k.is_multiple_of(4),
        PackedTile::Ahead { group, .. } => takes(group, layout) && k.is_multiple_of(8),
        PackedTile::Wgmma { .. } => takes(TILE_K, layout) && !layout.minimums && k.is_multiple_of(8),
    }
}

/// This kernel for any number of rows, if it can do the problem.
pub(super) fn forced(
    limits: &DeviceLimits,
    problem: &MatmulProblem,
    variant: &'static PackedVariant,
) -> Result<PackedChoices, Error> {
    let Some(layout) = &problem.weight else {
        return Err(Error::invalid(OP, "problem", "a packed weight", "none"));
    };
    if !can(limits, problem, layout, variant) {
        let got = format!("{problem:?} on {}", limits.floor);
        return Err(Error::invalid(OP, "variant", format!("what {} can do", variant.entry), got));
    }
    let mut choices = select(limits, problem, layout);
    choices.dense_from = None;
    choices.fp8.0.clear();
    choices.ahead = None;
    let only = vec![PackedChoice { variant, max_rows: usize::MAX }];
    match variant.tile {
        PackedTile::Mma { .. } | PackedTile::Wgmma { .. } => choices.mma = only,
        PackedTile::Ahead { .. } => choices.ahead = Some(variant),
        PackedTile::Simt { .. } => (choices.simt, choices.mma) = (only, Vec::new()),
    }
    Ok(choices)
}

/// Warps that share a column's k: until all multiprocessors have work, but at least two tiles for each. It decides the
/// order of a sum, so it does not depend on the number of rows.
pub(crate) fn split_log2(limits: &DeviceLimits, n: usize, k: usize) -> u32 {
    let (blocks, tiles) = (n.div_ceil(TILE_ROWS as usize), k.div_ceil(TILE_K as usize));
    let wanted = WARPS_PER_SM * limits.num_sms.max(1) as usize;
    (0..WARPS.ilog2()).take_while(|split| blocks << split < wanted && tiles >= 4 << split).count() as u32
}

/// Columns of out of a stripe.
fn stripe(problem: &MatmulProblem) -> usize {
    let rows_of_column = if problem.is_gated() { 2 } else { 1 };
    let row_bytes = problem.k.max(1) * problem.dtype.bytes() * rows_of_column;
    let most = (STRIPE_BYTES / row_bytes / 256).max(1) * 256;
    problem.n.min(most)
}

/// The kernels of a plan.
#[derive(Debug)]
pub(super) struct PackedKernels {
    ahead: Option<(&'static PackedVariant, Entry)>,
    simt: Vec<(PackedChoice, Entry)>,
    mma: Vec<(PackedChoice, Entry)>,
    split_log2: u32,
    dense: Option<Dense>,
    fp8: Option<Fp8>,
}

#[derive(Debug)]
struct Dense {
    from: usize,
    unpack: Entry,
    /// The product of a stripe, and of the last one if that is shorter.
    matmul: Box<Planned>,
    last: Option<Box<Planned>>,
    /// Columns of out of a stripe.
    stripe: usize,
    workspace: Workspace<1>,
}

/// Checks what does not depend on the device.
pub(super) fn check_problem(problem: &MatmulProblem, layout: &Layout) -> Result<(), Error> {
    if let Some(expected) = layout.problem() {
        return Err(Error::invalid(
            OP,
            "problem",
            format!("a weight with {expected}"),
            format!("{layout:?}"),
        ));
    }
    if problem.batch != 1 {
        let got = problem.batch.to_string();
        return Err(Error::invalid(OP, "problem", "batch 1 with a packed weight", got));
    }
    if layout.permuted && problem.norm.is_some() {
        let expected = "no norm of rows that are brought into a weight's order";
        return Err(Error::invalid(OP, "problem", expected, "one"));
    }
    if problem.is_gated() && problem.bias == Bias::PerColumn {
        return Err(Error::invalid(OP, "problem", "no bias with a packed gate and up", "a bias"));
    }
    Ok(())
}

impl PackedKernels {
    pub(super) fn new(
        device: &Device,
        problem: &MatmulProblem,
        choices: PackedChoices,
    ) -> Result<Self, Error> {
        let PackedChoices { ahead, simt, mma, dense_from, stripe, fp8, split_log2 } = choices;
        let entry = |variant: &PackedVariant| device.entry(OP, variant.entry, variant.tile.smem_bytes());
        let load = |choices: Vec<PackedChoice>| {
            choices
                .into_iter()
                .map(|choice| {
                    let entry = entry(choice.variant)?;
                    Ok((choice, entry))
                })
                .collect::<Result<Vec<_>, Error>>()
        };
        let layout =
            problem.weight.ok_or_else(|| Error::invalid(OP, "problem", "a packed weight", "none"))?;
        let dense =
            dense_from.map(|from| Dense::new(device, problem, &layout, (from, stripe))).transpose()?;
        let has_fp8 = !fp8.0.is_empty() && problem.m >= fp8.1;
        let fp8 = has_fp8.then(|| Fp8::new(device, problem, fp8)).transpose()?;
        let ahead = ahead.map(|variant| Ok::<_, Error>((variant, entry(variant)?))).transpose()?;
        Ok(PackedKernels { ahead, simt: load(simt)?, mma: load(mma)?, split_log2, dense, fp8 })
    }

    /// Whether a launch takes the kernel of one row, which alone norms it.
    pub(super) fn norms(&self, dims: &MatmulDims) -> bool {
        let wanted = A_IN_PIECES | B_IS_CONSTANT;
        self.ahead.is_some() && dims.m == 1 && dims.k > 0 && dims.access & wanted == wanted
    }

    /// Runs the product of checked tensors.
    pub(super) fn run(
        &self,
        stream: &Stream,
        (args, weight): (MatmulArgs<'_>, &Weight),
        mut dims: MatmulDims,
        (how, norm): (&MatmulEpilogue, &MatmulNorm),
    ) -> Result<(), Error> {
        let rows = dims.m as usize;
        if let Some(fp8) = &self.fp8
            && rows >= fp8.from()
            && dims.access & A_IN_PIECES != 0
        {
            return fp8.run(stream, (args, weight), dims, how);
        }
        if let Some(dense) = &self.dense
            && rows >= dense.from
        {
            return dense.run(stream, args, weight, &dims);
        }
        dims.split_log2 = self.split_log2;
        if let Some((variant, entry)) = &self.ahead
            && self.norms(&dims)
        {
            dims.access |= NEXT_MAY_START;
            return launch(stream, (variant.tile, entry), (&args, weight), &dims, (how, norm));
        }
        let aligned = dims.access & A_IN_PIECES != 0 && !self.mma.is_empty();
        let kernels = if aligned { &self.mma } else { &self.simt };
        let Some((choice, entry)) = kernels.iter().find(|(choice, _)| rows <= choice.max_rows) else {
            return Err(Error::invalid(OP, "a", "rows as planned", rows.to_string()));
        };
        let mut how = *how;
        if args.out.dtype() != choice.variant.dtype {
            how.options |= OUT_IN_F32;
        }
        let tile = choice.variant.tile;
        if matches!(tile, PackedTile::Wgmma { .. }) {
            // Each warp has its columns' whole k.
            dims.split_log2 = 0;
        }
        launch(stream, (tile, entry), (&args, weight), &dims, (&how, norm))
    }

    /// The kernel for the planned rows, and how the product is cut up, and why.
    pub(super) fn report(&self, [m, b_rows, k]: [usize; 3]) -> (Option<&Entry>, Cut) {
        let cut = |tile: String, threads, why: String| Cut { why, tile, threads };
        if let Some(fp8) = &self.fp8
            && m >= fp8.from()
            && let Some((variant, entry)) = fp8.kernel([m as u32, b_rows as u32, k as u32])
        {
            let why = format!("from {} rows on they are made fp8, as the weight is", fp8.from());
            return (Some(entry), cut(format!("{:?}", variant.tile), variant.tile.threads(), why));
        }
        if let Some(dense) = &self.dense
            && m >= dense.from
        {
            let why = format!("from {} rows on stripes of {} columns are unpacked", dense.from, dense.stripe);
            return (Some(&dense.unpack), cut("dense".into(), THREADS, why));
        }
        if let Some((variant, entry)) = &self.ahead
            && m == 1
        {
            let why = "one row: the weight is loaded before the kernel ahead has ended".into();
            return (Some(entry), cut(format!("{:?}", variant.tile), variant.tile.threads(), why));
        }
        let kernels = if self.mma.is_empty() { &self.simt } else { &self.mma };
        match kernels.iter().find(|(choice, _)| m <= choice.max_rows) {
            Some((choice, entry)) => {
                let tile = choice.variant.tile;
                let why = format!("{} rows against each tile of the weight", tile.rows());
                (Some(entry), cut(format!("{tile:?}"), tile.threads(), why))
            }
            None => (None, cut(String::new(), THREADS, String::new())),
        }
    }
}

/// A kernel that reads the weight as it is packed, of few rows.
fn launch(
    stream: &Stream,
    (tile, entry): (PackedTile, &Entry),
    (args, weight): (&MatmulArgs<'_>, &Weight),
    dims: &MatmulDims,
    (how, norm): (&MatmulEpilogue, &MatmulNorm),
) -> Result<(), Error> {
    let cols = TILE_ROWS * (WARPS >> dims.split_log2);
    let blocks = dims.m.div_ceil(tile.rows()) * dims.n.div_ceil(cols);
    let of_weight = weight.dims();
    let [codes, scales, zeros, minimums, supers, super_minimums] = weight.params();
    let params = [
        args.a.into(),
        codes,
        scales,
        zeros,
        minimums,
        supers,
        super_minimums,
        args.bias.into(),
        residual(args),
        (&args.out).into(),
        dims.into(),
        how.into(),
        (&of_weight).into(),
        args.gain.into(),
        norm.into(),
    ];
    // The others norm nothing.
    let params = match tile {
        PackedTile::Ahead { .. } => &params[..],
        _ => &params[..13],
    };
    // SAFETY: `check` found every row of every tensor inside its view, and the weight's layout and size to be the
    // planned ones; the grid covers the product exactly; rows of a are aligned where the tensor cores' kernels take
    // them, and constants where one reads ahead, of a k that it takes (`can`); shared memory is the tile's.
    unsafe { entry.launch(stream, [blocks, 1, 1], [tile.threads(), 1, 1], params) }
}

impl Dense {
    fn new(
        device: &Device,
        problem: &MatmulProblem,
        layout: &Layout,
        (from, stripe): (usize, usize),
    ) -> Result<Self, Error> {
        if stripe != problem.n && !stripe.is_multiple_of(TILE_ROWS as usize) {
            return Err(Error::invalid(
                OP,
                "choices",
                "stripes of a multiple of 16 columns",
                stripe.to_string(),
            ));
        }
        let variant = UNPACK_VARIANTS
            .iter()
            .find(|variant| variant.dtype == problem.dtype && variant.codes == layout.codes)
            .ok_or_else(|| {
                Error::invalid(OP, "problem", "a layout that can be unpacked", format!("{layout:?}"))
            })?;
        let plan =
            |n: usize| Planned::plan(device, MatmulProblem { n, weight: None, ..*problem }).map(Box::new);
        let matmul = plan(stripe)?;
        let rest = problem.n.checked_rem(stripe).unwrap_or(0);
        let last = if rest == 0 { None } else { Some(plan(rest)?) };
        let rows = if problem.is_gated() { 2 * stripe } else { stripe };
        let workspace =
            Workspace::new(device, |stream| Ok([Tensor::empty(stream, &[rows, problem.k], problem.dtype)?]))?;
        let unpack = device.entry(OP, variant.entry, 0)?;
        Ok(Dense { from, unpack, matmul, last, stripe, workspace })
    }

    fn run(
        &self,
        stream: &Stream,
        args: MatmulArgs<'_>,
        weight: &Weight,
        dims: &MatmulDims,
    ) -> Result<(), Error> {
        let MatmulArgs { a, bias, residual, mut out, .. } = args;
        let gated = self.matmul.problem.is_gated();
        let cols = out.shape()[1];
        let [unpacked] = &self.workspace.tensors;
        let _alone = self.workspace.enter(stream)?;
        let num_sms = self.matmul.device.profile().num_sms.max(1);
        for start in (0..cols).step_by(self.stripe) {
            let end = cols.min(start + self.stripe);
            let rows_of_column = if gated { 2 } else { 1 };
            let rows = (end - start) * rows_of_column;
            let of_weight =
                WeightDims { first_block: (start * rows_of_column) as u32 / TILE_ROWS, ..weight.dims() };
            // A matrix of `rows` rows of k.
            let shape = MatmulDims {
                n: rows as u32,
                out_stride: dims.k,
                access: OUT_IN_QUADS * u32::from(dims.k.is_multiple_of(4)),
                ..*dims
            };
            let [codes, scales, zeros, minimums, supers, super_minimums] = weight.params();
            let stripe = unpacked.view().slice(0, 0..rows)?;
            let params = [
                codes,
                scales,
                zeros,
                minimums,
                supers,
                super_minimums,
                stripe.into(),
                (&shape).into(),
                (&of_weight).into(),
            ];
            let tiles = (rows as u32).div_ceil(TILE_ROWS) * of_weight.tiles;
            // None where k is 0: the stripe has no elements, and its product is empty sums.
            let blocks = tiles.div_ceil(WARPS).min(8 * num_sms);
            // SAFETY: the weight has these rows of tiles, since a stripe begins at a multiple of 16 rows; the stripe
            // is of the workspace, which nobody else has entered.
            unsafe { self.unpack.launch(stream, [blocks, 1, 1], [THREADS, 1, 1], &params)? };
            let (b, up) = if gated {
                // The rows of the gate and of up in turn.
                let k = weight.k();
                let pairs = stripe.reshape(&[end - start, 2 * k])?;
                (pairs.slice(1, 0..k)?, Some(pairs.slice(1, k..2 * k)?))
            } else {
                (stripe, None)
            };
            let residual = match &residual {
                Some(Residual::Tensor(view)) => Some(Residual::Tensor(view.slice(1, start..end)?)),
                Some(Residual::InPlace) => Some(Residual::InPlace),
                None => None,
            };
            let bias = bias.map(|bias| bias.slice(0, start..end)).transpose()?;
            let out = out.reborrow().slice(1, start..end)?;
            let matmul = self.last.as_ref().filter(|_| end - start < self.stripe).unwrap_or(&self.matmul);
            matmul.run(stream, &mut MatmulArgs { a, b: b.into(), up, gain: None, bias, residual, out })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::rmsnorm::NormWeight;
    use abi::weight::ScaleType;

    use super::*;
    use crate::Invariance;

    const INT4: Layout = Layout {
        codes: Codes::Int4,
        group: 128,
        rows: 1,
        scale: ScaleType::Bf16,
        zeros: false,
        minimums: false,
        permuted: false,
    };

    #[test]
    fn choice_by_rows() {
        let hopper = DeviceLimits::new(Arch::Sm90a, 132, 227 << 10);
        let ampere = DeviceLimits::new(Arch::Sm80, 108, 163 << 10);
        let invariant = DeviceLimits { invariance: Invariance::Batch, ..hopper };
        let narrow = Layout { group: 32, ..INT4 };
        let wide = Layout { codes: Codes::E6m9, group: 0, scale: ScaleType::F32, ..INT4 };
        // None: what is unpacked.
        for (limits, layout, n, rows, entry) in [
            (&hopper, INT4, 19456, 1, Some("matmul_bf16_int4__packedahead__sm90a")),
            (&hopper, INT4, 151936, 1, Some("matmul_bf16_int4__packed8__sm80")),
            (&hopper, narrow, 19456, 1, Some("matmul_bf16_int4__packedaheadg32__sm90a")),
            (&ampere, INT4, 19456, 1, Some("matmul_bf16_int4__packed8__sm80")),
            (&invariant, INT4, 19456, 1, Some("matmul_bf16_int4__packed16__sm80")),
            (&hopper, INT4, 19456, 16, Some("matmul_bf16_int4__packed16__sm80")),
            (&hopper, INT4, 19456, 17, Some("matmul_bf16_int4__packedw32__sm90a")),
            (&hopper, INT4, 19456, 32, Some("matmul_bf16_int4__packedw32__sm90a")),
            (&hopper, INT4, 19456, 33, Some("matmul_bf16_int4__packedw64__sm90a")),
            (&hopper, INT4, 19456, 128, Some("matmul_bf16_int4__packedw64__sm90a")),
            (&hopper, INT4, 19456, 129, None),
            (&hopper, INT4, 2560, 17, Some("matmul_bf16_int4__packed32__sm80")),
            (&hopper, INT4, 2560, 64, Some("matmul_bf16_int4__packed64__sm80")),
            (&hopper, INT4, 2560, 65, None),
            (&hopper, narrow, 19456, 64, Some("matmul_bf16_int4__packed64g32__sm80")),
            (&ampere, INT4, 19456, 64, Some("matmul_bf16_int4__packed64__sm80")),
            (&ampere, INT4, 19456, 65, None),
            (&invariant, INT4, 19456, 500, Some("matmul_bf16_int4__packed16__sm80")),
            (&hopper, wide, 19456, 2, Some("matmul_bf16_e6m9__packed2__sm61")),
            (&hopper, wide, 19456, 3, None),
        ] {
            let problem = MatmulProblem::new(rows, n, 2560, DType::BF16);
            let choices = select(limits, &problem, &layout);
            let ladder = if choices.mma.is_empty() { &choices.simt } else { &choices.mma };
            let chosen = ladder.iter().find(|choice| rows <= choice.max_rows);
            let chosen = chosen.filter(|_| choices.dense_from.is_none()).map(|choice| choice.variant);
            let chosen = choices.ahead.filter(|_| rows == 1).or(chosen).map(|variant| variant.entry);
            assert_eq!(chosen, entry, "{layout:?} {rows} × {n}");
        }
        // Few columns of long k are read ahead only for a norm's sake.
        let norm = Some(crate::ops::matmul::RowNorm { eps: 1e-6, weight: NormWeight::Plain });
        for (k, norm, is_ahead) in [(4096, None, true), (6144, None, false), (6144, norm, true)] {
            let problem = MatmulProblem { norm, ..MatmulProblem::new(1, 2560, k, DType::BF16) };
            assert_eq!(select(&hopper, &problem, &INT4).ahead.is_some(), is_ahead, "{k} {norm:?}");
        }
    }
}
