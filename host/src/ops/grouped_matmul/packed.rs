//! Grouped products with packed weights: few rows of each expert by kernels that read the weights as they are, many by
//! those for plain matrices, for which the experts that have rows are unpacked.

use abi::DType;
use abi::matmul_fp8::{self, QuantiseDims};
use abi::ops::grouped_matmul::{
    FP8_VARIANTS, GroupedMatmulDims, GroupedMatmulTile, GroupedMatmulVariant, PACKED_MMA_VARIANTS,
    PACKED_VARIANTS, SLOTS_ARE_ROWS, SLOTS_ARE_TILES, UNPACK_VARIANTS, UnpackDims, WGMMA_X_ROWS,
    packed_smem_bytes,
};
use abi::ops::matmul::{A_IN_PIECES, PackedTile, PackedVariant, THREADS, WARPS};
use abi::weight::{Layout, TILE_ROWS};

use super::select as plain;
use super::{GroupedMatmulArgs, GroupedMatmulProblem, OP, Planned};
use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::Cut;
use crate::ladder::Rung;
use crate::launch::Entry;
use crate::ops::check_blocks;
use crate::ops::fp8_rows::Fp8Rows;
use crate::ops::matmul::{
    Activations, FEW_MAX_ROWS_E6M9, INVARIANT_ROWS, matrix_map, packed_split_log2, takes, unpacks_early,
};
use crate::ops::workspace::Workspace;
use crate::stream::Stream;
use crate::tensor::Tensor;
use crate::weight::Weight;

/// Rows of a tile by the rows of an expert on average, in halves. Rows of experts differ: where two rows are the
/// average, few experts have more than 8, whose weights tiles of 8 rows read twice.
const RUNGS: [(usize, u32); 3] = [(2 * 2, 8), (2 * 8, 16), (usize::MAX, 64)];
/// Rows of an expert on average up to which weights are read as they are packed, on tensor cores: from there on it
/// costs less to unpack them.
const FEW_MAX_AVERAGE: usize = 24;
/// The same by ordinary arithmetic, which decodes the weights again for every two rows.
const FEW_MAX_AVERAGE_SIMT: usize = 8;
/// Rows of an expert on average from which on they are made fp8, where they may be: before that the experts' bytes
/// bound the product.
const FP8_MIN_AVERAGE: usize = 16;
/// Bytes of experts that are unpacked at a time; one expert at least.
const UNPACKED_BYTES: usize = 128 << 20;
/// Blocks that unpack an expert at most.
const UNPACK_BLOCKS: u32 = 64;

/// A kernel, and the most rows that it is chosen for.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedPackedChoice {
    /// The kernel.
    pub variant: &'static PackedVariant,
    /// Up to so many rows of all experts together.
    pub max_rows: usize,
}

/// What a plan does for a number of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedPackedChoices {
    /// Kernels of few rows for operands of any address.
    pub simt: Vec<GroupedPackedChoice>,
    /// Kernels of few rows on tensor cores, for rows aligned to 16 bytes, fewest rows first.
    pub mma: Vec<GroupedPackedChoice>,
    /// Rows of all experts from which on they are unpacked; none if there are not so many.
    pub dense_from: Option<usize>,
    /// Experts that are unpacked at a time.
    pub experts: usize,
    /// The product of fp8 by fp8, and the rows of all experts from which on it is taken; none if x may not become fp8.
    pub fp8: Option<(&'static GroupedMatmulVariant, usize)>,
    /// Binary logarithm of the warps that share a column's k.
    pub split_log2: u32,
}

/// Whether a kernel can do the problem.
fn fits(
    limits: &DeviceLimits,
    problem: &GroupedMatmulProblem,
    layout: &Layout,
    variant: &PackedVariant,
) -> bool {
    let shaped = match variant.tile {
        PackedTile::Mma { group, .. } => takes(group, layout) && problem.k.is_multiple_of(4),
        PackedTile::Simt { .. } => true,
        PackedTile::Ahead { .. } | PackedTile::Wgmma { .. } => false,
    };
    shaped
        && variant.dtype == problem.dtype
        && variant.codes == layout.codes
        && limits.floor.runs(variant.floor)
}

/// The kernels for a problem with weights of this layout.
///
/// **Errors**: [`Error::Invalid`] for more blocks than a launch has.
pub fn select(
    limits: &DeviceLimits,
    problem: &GroupedMatmulProblem,
    layout: &Layout,
) -> Result<GroupedPackedChoices, Error> {
    let GroupedMatmulProblem { rows, experts, n, k, dtype, .. } = *problem;
    let of = |variants: &'static [PackedVariant], tile_rows: u32| {
        // Of several that of the longest groups.
        let group = |variant: &&PackedVariant| match variant.tile {
            PackedTile::Mma { group, .. } => group,
            _ => 0,
        };
        variants
            .iter()
            .filter(|variant| fits(limits, problem, layout, variant) && variant.tile.rows() == tile_rows)
            .max_by_key(group)
    };
    let simt: Vec<_> = PACKED_VARIANTS
        .iter()
        .filter(|variant| fits(limits, problem, layout, variant))
        .map(|variant| GroupedPackedChoice { variant, max_rows: usize::MAX })
        .collect();
    let mma: Vec<_> = RUNGS
        .iter()
        .filter_map(|&(halves, tile_rows)| {
            let max_rows = if halves == usize::MAX { usize::MAX } else { experts.saturating_mul(halves) / 2 };
            Some(GroupedPackedChoice { variant: of(PACKED_MMA_VARIANTS, tile_rows)?, max_rows })
        })
        .collect();
    let is_invariant = limits.is_invariant();
    let of_any_rows = mma
        .iter()
        .find(|choice: &&GroupedPackedChoice| is_invariant && choice.variant.tile.rows() >= INVARIANT_ROWS);
    let mma = match of_any_rows.cloned() {
        Some(choice) => vec![GroupedPackedChoice { max_rows: usize::MAX, ..choice }],
        None if is_invariant => mma.into_iter().next_back().into_iter().collect(),
        None => mma,
    };
    let average = match mma.is_empty() {
        true if unpacks_early(limits, dtype, layout) => FEW_MAX_ROWS_E6M9,
        true => FEW_MAX_AVERAGE_SIMT,
        false => FEW_MAX_AVERAGE,
    };
    let most = if is_invariant { usize::MAX } else { experts.saturating_mul(average) };
    let at_a_time = UNPACKED_BYTES / (n * k * dtype.bytes()).max(1);
    // All in as many steps as are wanted, of nearly the same number.
    let steps = experts.div_ceil(at_a_time.clamp(1, MAX_EXPERTS)).max(1);
    let choices = GroupedPackedChoices {
        simt,
        mma,
        dense_from: (rows > most).then(|| most + 1),
        experts: experts.div_ceil(steps),
        fp8: if is_invariant { None } else { fp8(limits, problem, layout) },
        // As many experts have rows as can. It decides the order of a sum, so it does not depend on a run's rows.
        split_log2: {
            let with_rows = if is_invariant { experts } else { experts.min(rows).max(1) };
            packed_split_log2(limits, n.saturating_mul(with_rows), k)
        },
    };
    for choice in choices.simt.iter().chain(&choices.mma) {
        let few = if choices.dense_from.is_some() { most } else { rows };
        blocks(choice.variant.tile, few.min(choice.max_rows) as u32, problem, choices.split_log2)?;
    }
    Ok(choices)
}

/// The product of fp8 by fp8, if it can do the problem, and the rows from which on it is taken, if there are so many.
fn fp8(
    limits: &DeviceLimits,
    problem: &GroupedMatmulProblem,
    layout: &Layout,
) -> Option<(&'static GroupedMatmulVariant, usize)> {
    let from = problem.experts.saturating_mul(FP8_MIN_AVERAGE);
    let variant = fp8_variant(limits, problem, layout).filter(|_| problem.rows >= from)?;
    Some((variant, from))
}

/// The kernel of fp8 by fp8, if it can do the problem with any number of rows.
fn fp8_variant(
    limits: &DeviceLimits,
    problem: &GroupedMatmulProblem,
    layout: &Layout,
) -> Option<&'static GroupedMatmulVariant> {
    let GroupedMatmulProblem { experts, n, k, dtype, .. } = *problem;
    // Blocks of an expert's scales may not reach into the next one's.
    let fits = problem.activations == Activations::Fp8
        && matmul_fp8::takes(layout)
        && k > 0
        && k.is_multiple_of(16 / dtype.bytes())
        && (experts == 1 || n.is_multiple_of(layout.rows as usize));
    let variant = FP8_VARIANTS.iter().find(|variant| {
        variant.dtype == dtype
            && limits.floor.runs(variant.floor)
            && variant.tile.smem_bytes() <= limits.smem_per_block_bytes
    });
    variant.filter(|_| fits)
}

/// Experts that a launch unpacks at most, each by blocks of its own.
const MAX_EXPERTS: usize = (1 << 16) - 1;

/// This kernel for any number of rows, if it can do the problem.
pub(super) fn forced(
    limits: &DeviceLimits,
    problem: &GroupedMatmulProblem,
    variant: &'static PackedVariant,
) -> Result<GroupedPackedChoices, Error> {
    let Some(layout) = &problem.weight else {
        return Err(Error::invalid(OP, "problem", "packed weights", "none"));
    };
    if !fits(limits, problem, layout, variant) {
        let got = format!("{problem:?} on {}", limits.floor);
        return Err(Error::invalid(OP, "variant", format!("what {} can do", variant.entry), got));
    }
    let mut choices = select(limits, problem, layout)?;
    blocks(variant.tile, problem.rows as u32, problem, choices.split_log2)?;
    (choices.dense_from, choices.fp8) = (None, None);
    let only = vec![GroupedPackedChoice { variant, max_rows: usize::MAX }];
    match variant.tile {
        PackedTile::Mma { .. } | PackedTile::Ahead { .. } | PackedTile::Wgmma { .. } => choices.mma = only,
        PackedTile::Simt { .. } => (choices.simt, choices.mma) = (only, Vec::new()),
    }
    Ok(choices)
}

/// What slots are, stretches of columns, and blocks.
fn blocks(
    tile: PackedTile,
    rows: u32,
    problem: &GroupedMatmulProblem,
    split_log2: u32,
) -> Result<(u32, u32, u32), Error> {
    let tiles = u64::from(rows / tile.rows()) + problem.experts as u64;
    let by_row = u64::from(rows) < tiles;
    let (slots, count) = if by_row { (SLOTS_ARE_ROWS, rows.into()) } else { (SLOTS_ARE_TILES, tiles) };
    let cols = (problem.n as u32).div_ceil(TILE_ROWS * (WARPS >> split_log2));
    let blocks = check_blocks(OP, "out", count * u64::from(cols))?;
    Ok((slots, cols, blocks))
}

/// The kernels of a plan.
#[derive(Debug)]
pub(super) struct PackedKernels {
    problem: GroupedMatmulProblem,
    simt: Vec<(GroupedPackedChoice, Entry)>,
    mma: Vec<(GroupedPackedChoice, Entry)>,
    split_log2: u32,
    dense: Option<Dense>,
    fp8: Option<Fp8>,
}

/// The product of fp8 by fp8.
#[derive(Debug)]
struct Fp8 {
    from: usize,
    rows: Fp8Rows,
    tile: GroupedMatmulTile,
    product: Entry,
}

#[derive(Debug)]
struct Dense {
    from: usize,
    unpack: Entry,
    /// The product of some experts, and of the last ones if those are fewer.
    product: Box<Planned>,
    last: Option<Box<Planned>>,
    /// Experts that are unpacked at a time.
    experts: usize,
    workspace: Workspace<1>,
}

impl PackedKernels {
    pub(super) fn new(
        device: &Device,
        problem: &GroupedMatmulProblem,
        choices: GroupedPackedChoices,
    ) -> Result<Self, Error> {
        let GroupedPackedChoices { simt, mma, dense_from, experts, fp8, split_log2 } = choices;
        let load = |choices: Vec<GroupedPackedChoice>| {
            choices
                .into_iter()
                .map(|choice| {
                    let smem_bytes = packed_smem_bytes(choice.variant.tile);
                    let entry = device.entry(OP, choice.variant.entry, smem_bytes)?;
                    Ok((choice, entry))
                })
                .collect::<Result<Vec<_>, Error>>()
        };
        let dense = dense_from.map(|from| Dense::new(device, problem, (from, experts))).transpose()?;
        let fp8 = fp8.map(|choice| Fp8::new(device, problem, choice)).transpose()?;
        Ok(PackedKernels { problem: *problem, simt: load(simt)?, mma: load(mma)?, split_log2, dense, fp8 })
    }

    /// Runs the product of checked tensors that have elements.
    pub(super) fn run(
        &self,
        stream: &Stream,
        (args, weight): (GroupedMatmulArgs<'_>, &Weight),
        mut dims: GroupedMatmulDims,
    ) -> Result<(), Error> {
        let rows = dims.rows as usize;
        if let Some(fp8) = &self.fp8
            && rows >= fp8.from
            && dims.access & A_IN_PIECES != 0
        {
            return fp8.run(stream, args, weight, dims);
        }
        if let Some(dense) = &self.dense
            && rows >= dense.from
        {
            return dense.run(stream, args, weight);
        }
        let aligned = dims.access & A_IN_PIECES != 0 && !self.mma.is_empty();
        let kernels = if aligned { &self.mma } else { &self.simt };
        let Some((choice, entry)) = kernels.iter().find(|(choice, _)| rows <= choice.max_rows) else {
            return Err(Error::invalid(OP, "out", "rows as planned", rows.to_string()));
        };
        let grid;
        dims.split_log2 = self.split_log2;
        (dims.slots, dims.col_blocks, grid) =
            blocks(choice.variant.tile, dims.rows, &self.problem, self.split_log2)?;
        let of_weight = weight.dims();
        let [codes, scales, zeros, minimums, supers, super_minimums] = weight.params();
        let params = [
            args.x.into(),
            codes,
            scales,
            zeros,
            minimums,
            supers,
            super_minimums,
            weight.globals_param(),
            args.offsets.into(),
            args.order.into(),
            (&args.out).into(),
            (&dims).into(),
            (&of_weight).into(),
        ];
        // SAFETY: `check` found every row of every tensor inside its view, and the weights' layout, number and size to
        // be the planned ones; the grid has every column of every slot; rows of x are aligned where the tensor cores'
        // kernels take them; shared memory is the tile's.
        unsafe { entry.launch(stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
    }

    /// The kernel for the planned rows, and what a report says of it.
    pub(super) fn report(&self, rows: usize) -> (Option<&Entry>, Cut) {
        if let Some(fp8) = &self.fp8
            && rows >= fp8.from
        {
            let why = format!("from {} rows on they are made fp8, as the weights are", fp8.from);
            let cut = Cut { why, tile: format!("{:?}", fp8.tile), threads: fp8.tile.threads() };
            return (Some(&fp8.product), cut);
        }
        if let Some(dense) = &self.dense
            && rows >= dense.from
        {
            let why = format!("from {} rows on {} experts at a time are unpacked", dense.from, dense.experts);
            return (Some(&dense.unpack), Cut { why, tile: "dense".into(), threads: THREADS });
        }
        let kernels = if self.mma.is_empty() { &self.simt } else { &self.mma };
        match kernels.iter().find(|(choice, _)| rows <= choice.max_rows) {
            Some((choice, entry)) => {
                let tile = choice.variant.tile;
                let why = format!("{} rows of an expert against each tile of its weight", tile.rows());
                (Some(entry), Cut { why, tile: format!("{tile:?}"), threads: THREADS })
            }
            None => (None, Cut::cpu("panels")),
        }
    }
}

impl Fp8 {
    fn new(
        device: &Device,
        problem: &GroupedMatmulProblem,
        (variant, from): (&'static GroupedMatmulVariant, usize),
    ) -> Result<Self, Error> {
        let GroupedMatmulProblem { rows, k, dtype, .. } = *problem;
        let product = device.entry(OP, variant.entry, variant.tile.smem_bytes())?;
        Ok(Fp8 { from, rows: Fp8Rows::new(OP, device, [rows, k], dtype)?, tile: variant.tile, product })
    }

    /// Runs the product of checked tensors that have elements, of rows of x in pieces.
    fn run(
        &self,
        stream: &Stream,
        args: GroupedMatmulArgs<'_>,
        weight: &Weight,
        mut dims: GroupedMatmulDims,
    ) -> Result<(), Error> {
        let GroupedMatmulArgs { x, offsets, order, out, .. } = args;
        let GroupedMatmulTile::Wgmma { bn, .. } = self.tile else {
            return Err(Error::invalid(OP, "variant", "a tile of wgmma", format!("{:?}", self.tile)));
        };
        let device = stream.device();
        let num_sms = device.profile().num_sms.max(1);
        let GroupedMatmulDims { rows, x_rows, fan_out, k, x_stride, .. } = dims;
        let of_rows = QuantiseDims { rows, x_rows, fan_out, k, x_stride, q_stride: 0 };
        // SAFETY: `check` found x's rows inside its view, here in pieces of 16 bytes with k in such, and a number of
        // the order for each.
        let rows = unsafe { self.rows.make(stream, (x, order.into()), of_rows)? };

        // Sorted as they are fp8.
        (dims.k, dims.x_stride, dims.x_rows, dims.fan_out) = (rows.stride, rows.stride, dims.rows, 0);
        dims.col_blocks = self.tile.col_blocks(dims.n, 0);
        let (_, slots) = self.tile.slots(dims.rows, dims.experts);
        let grid = check_blocks(OP, "out", slots * u64::from(dims.col_blocks))?.min(num_sms);
        let sizes = [dims.x_rows, dims.k, dims.x_stride];
        let x_map = matrix_map(OP, device, DType::F8E4M3, rows.q.address(), sizes, WGMMA_X_ROWS)?;
        let w_map = weight.tiles_map(OP, device, bn)?;
        let of_weight = weight.dims();
        let [_, scales, ..] = weight.params();
        let params = [
            (&dims).into(),
            (&x_map).into(),
            (&w_map).into(),
            rows.q.into(),
            rows.scales.into(),
            scales,
            offsets.into(),
            (&out).into(),
            (&of_weight).into(),
        ];
        // SAFETY: as for the plain product; x is as the launch before has made it, with as many rows; the maps have its
        // sizes and the weight's; the weight's layout is the planned one, whose scales are of blocks as the kernel has
        // tiles.
        unsafe { self.product.launch(stream, [grid, 1, 1], [self.tile.threads(), 1, 1], &params) }
    }
}

impl Dense {
    fn new(
        device: &Device,
        problem: &GroupedMatmulProblem,
        (from, at_a_time): (usize, usize),
    ) -> Result<Self, Error> {
        let GroupedMatmulProblem { experts, n, k, dtype, weight, .. } = *problem;
        if !(1..=experts.min(MAX_EXPERTS)).contains(&at_a_time) {
            let got = at_a_time.to_string();
            return Err(Error::invalid(OP, "choices", format!("1 to {experts} experts at a time"), got));
        }
        let layout = weight.ok_or_else(|| Error::invalid(OP, "problem", "packed weights", "none"))?;
        let variant =
            UNPACK_VARIANTS.iter().find(|variant| variant.dtype == dtype && variant.codes == layout.codes);
        let variant = variant.ok_or_else(|| {
            Error::invalid(OP, "problem", "a layout that can be unpacked", format!("{layout:?}"))
        })?;
        let Some(limits) = device.limits() else {
            return Err(Error::invalid(OP, "choices", "none on the CPU", "some"));
        };
        // Kernels as for all experts together: it is their rows that are shared out.
        let whole = GroupedMatmulProblem { weight: None, ..*problem };
        let plan = |experts: usize| {
            let choices = plain::select(&limits, &whole)?;
            let tensor = plain::tensor(&limits, &whole)?;
            let problem = GroupedMatmulProblem { experts, ..whole };
            Planned::new(device, problem, choices, tensor).map(Box::new)
        };
        let product = plan(at_a_time)?;
        let rest = experts % at_a_time;
        let last = if rest == 0 { None } else { Some(plan(rest)?) };
        let workspace =
            Workspace::new(device, |stream| Ok([Tensor::empty(stream, &[at_a_time, n, k], dtype)?]))?;
        let unpack = device.entry(OP, variant.entry, 0)?;
        Ok(Dense { from, unpack, product, last, experts: at_a_time, workspace })
    }

    fn run(&self, stream: &Stream, args: GroupedMatmulArgs<'_>, weight: &Weight) -> Result<(), Error> {
        let GroupedMatmulArgs { x, offsets, order, mut out, .. } = args;
        let [unpacked] = &self.workspace.tensors;
        let _alone = self.workspace.enter(stream)?;
        let of_weight = weight.dims();
        let tiles = of_weight.tiles.saturating_mul(of_weight.row_blocks);
        let blocks = tiles.div_ceil(WARPS).clamp(1, UNPACK_BLOCKS);
        for first in (0..weight.experts()).step_by(self.experts) {
            let end = weight.experts().min(first + self.experts);
            let experts = end - first;
            let matrices = unpacked.view().slice(0, 0..experts)?;
            let dims = UnpackDims {
                first: first as u32,
                experts: experts as u32,
                n: weight.n() as u32,
                k: weight.k() as u32,
            };
            let [codes, scales, zeros, minimums, supers, super_minimums] = weight.params();
            let params = [
                codes,
                scales,
                zeros,
                minimums,
                supers,
                super_minimums,
                weight.globals_param(),
                offsets.into(),
                matrices.into(),
                (&dims).into(),
                (&of_weight).into(),
            ];
            // SAFETY: these experts are some of the weight's, and `check` found an offset for each and one more; the
            // matrices are of the workspace, which nobody else has entered, and there is a y of the grid for each.
            unsafe { self.unpack.launch(stream, [blocks, experts as u32, 1], [THREADS, 1, 1], &params)? };
            let product = self.last.as_ref().filter(|_| experts < self.experts).unwrap_or(&self.product);
            let mut args = GroupedMatmulArgs {
                x,
                w: matrices.into(),
                offsets: offsets.slice(0, first..end + 1)?,
                order,
                out: out.reborrow(),
            };
            product.run(stream, &mut args)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use abi::weight::{Codes, ScaleType};
    use abi::{Arch, DType};

    use super::*;

    const LAYOUT: Layout = Layout {
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
        let ampere = DeviceLimits::new(Arch::Sm80, 132, 99 << 10);
        let pascal = DeviceLimits::new(Arch::Sm61, 20, 48 << 10);
        let problem = |rows| GroupedMatmulProblem::new(rows, 128, 1536, 2048, DType::BF16);
        let narrow = Layout { group: 32, scale: ScaleType::F16, ..LAYOUT };
        for (limits, layout, rows, entry) in [
            (&ampere, LAYOUT, 8, "grouped_matmul_bf16_int4__packed8__sm80"),
            (&ampere, LAYOUT, 257, "grouped_matmul_bf16_int4__packed16__sm80"),
            (&ampere, narrow, 8, "grouped_matmul_bf16_int4__packed8g32__sm80"),
            (&ampere, LAYOUT, 3072, "grouped_matmul_bf16_int4__packed64__sm80"),
            (&pascal, LAYOUT, 8, "grouped_matmul_bf16_int4__packed2__sm61"),
        ] {
            let choices = select(limits, &problem(rows), &layout).unwrap();
            let ladder = if choices.mma.is_empty() { &choices.simt } else { &choices.mma };
            let chosen = ladder.iter().find(|choice| rows <= choice.max_rows).unwrap();
            assert_eq!((chosen.variant.entry, choices.dense_from), (entry, None), "{rows}");
        }
        let many = select(&ampere, &problem(3073), &LAYOUT).unwrap();
        assert_eq!((many.dense_from, many.experts), (Some(3073), 19));
        assert_eq!(select(&pascal, &problem(1025), &LAYOUT).unwrap().dense_from, Some(1025));
        // No tensor core takes them, but those of Ampere take what is unpacked.
        let wide = Layout { codes: Codes::E6m9, group: 0, scale: ScaleType::F32, ..LAYOUT };
        let from = |limits, rows| select(limits, &problem(rows), &wide).unwrap().dense_from;
        assert_eq!([from(&ampere, 256), from(&ampere, 257)], [None, Some(257)]);
        assert_eq!([from(&pascal, 1024), from(&pascal, 1025)], [None, Some(1025)]);
    }

    #[test]
    fn invariant_choices_know_no_rows() {
        use crate::Invariance;
        for (floor, entry) in [
            (Arch::Sm61, "grouped_matmul_bf16_int4__packed2__sm61"),
            (Arch::Sm80, "grouped_matmul_bf16_int4__packed16__sm80"),
        ] {
            let limits =
                DeviceLimits { invariance: Invariance::Batch, ..DeviceLimits::new(floor, 132, 99 << 10) };
            let of = |rows| {
                let problem = GroupedMatmulProblem::new(rows, 128, 1536, 2048, DType::BF16);
                select(&limits, &problem, &LAYOUT).unwrap()
            };
            let first = of(1);
            let ladder = if first.mma.is_empty() { &first.simt } else { &first.mma };
            assert_eq!((ladder.len(), ladder[0].variant.entry, first.dense_from), (1, entry, None));
            for rows in [0, 8, 257, 1025, 16_384, 16_385, 1 << 20] {
                assert_eq!(of(rows), first, "{rows} on {floor}");
            }
        }
    }

    /// Few experts of a large card share k among warps.
    #[test]
    fn warps_of_a_column() {
        let limits = DeviceLimits::new(Arch::Sm90a, 132, 227 << 10);
        for (rows, split_log2) in [(8, 2), (64, 0), (4096, 0)] {
            let problem = GroupedMatmulProblem::new(rows, 128, 1536, 2048, DType::BF16);
            assert_eq!(select(&limits, &problem, &LAYOUT).unwrap().split_log2, split_log2, "{rows}");
        }
    }
}
