//! Products of groups of rows, each group with a weight of its own: [`GroupedMatmul`].

mod cases;
mod cpu;
mod packed;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::glu::Activation;
use abi::ops::grouped_matmul::{GroupedMatmulDims, WGMMA_X_ROWS};
use abi::ops::matmul::{
    A_BY_TMA, A_IN_PIECES, ACTIVATED, B_IN_PIECES, GATED, MatmulEpilogue, OUT_IN_PIECES, OUT_IN_QUADS,
    WGMMA_ROW_BYTES,
};

use crate::device::{Device, Invariance};
use crate::error::Error;
use crate::kernel::{Cut, OptimizationReport, Work, count};
use crate::ladder::{Ladder, Rung};
use crate::launch::Entry;
use crate::ops::matmul::{Activations, MatmulB, PackedVariant, curve, matrix_map, rows_aligned};
use crate::ops::{check_blocks, check_size};
use crate::plan::{Check, planned};
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};
use crate::tensor_map::{Axis, Swizzle, TensorMap, Tiled};
use crate::weight::Layout;
use packed::PackedKernels;

pub use abi::ops::grouped_matmul::{
    FP8_VARIANTS, GroupedMatmulTile, GroupedMatmulVariant, MMA_VARIANTS, PACKED_MMA_VARIANTS,
    PACKED_VARIANTS, QUANTISE_VARIANTS, UNPACK_VARIANTS, VARIANTS, WGMMA_VARIANTS,
};
pub use cases::{CASES, GroupedMatmulCase, samples};
pub use packed::{GroupedPackedChoice, GroupedPackedChoices, select as select_packed};
pub use select::{GroupedMatmulChoice, select};

pub(crate) const OP: &str = "grouped_matmul";

/// Which row of x a row of out is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupedRows {
    /// Row i of out of row i of x.
    Sorted,
    /// Row i of out of row `order[i] / fan_out` of x: of the token of a pair.
    Gathered {
        /// Rows of out for each row of x: experts of a token.
        fan_out: usize,
    },
}

/// What is to be multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupedMatmulProblem {
    /// Most rows of out in a run, of all groups.
    pub rows: usize,
    /// Groups, each with a weight of its own.
    pub experts: usize,
    /// Columns of out: rows of a weight, or, if the product is gated, half as many.
    pub n: usize,
    /// Columns of x and of the weights.
    pub k: usize,
    /// Type of all matrices.
    pub dtype: DType,
    /// Which row of x a row of out is made of.
    pub from: GroupedRows,
    /// How the weights are packed; none if they are plain matrices.
    pub weight: Option<Layout>,
    /// What may become of x.
    pub activations: Activations,
    /// A gated linear unit, of few rows and plain weights: each weight has `2 n` rows, those of the gate above those of
    /// up, and out is the activation of the gate's product times up's.
    pub gate: Option<Activation>,
}

impl GroupedMatmulProblem {
    /// With what it must have. The other fields do nothing: `from: GroupedRows::Sorted`, `weight: None`, `activations:
    /// Activations::AsGiven`.
    pub fn new(rows: usize, experts: usize, n: usize, k: usize, dtype: DType) -> Self {
        let (from, activations) = (GroupedRows::Sorted, Activations::AsGiven);
        GroupedMatmulProblem { rows, experts, n, k, dtype, from, weight: None, activations, gate: None }
    }

    /// Rows of a weight.
    pub(crate) fn w_rows(&self) -> usize {
        if self.gate.is_some() { self.n.saturating_mul(2) } else { self.n }
    }
}

/// The tensors of a run. Rows may have any stride, elements of a row are neighbours.
#[derive(Debug)]
pub struct GroupedMatmulArgs<'a> {
    /// `[rows, k]`; `[rows / fan_out, k]` if its rows are gathered.
    pub x: TensorView<'a>,
    /// `[experts, n, k]`, of a gated product `[experts, 2 n, k]`: weights as checkpoints store them, out features × in
    /// features; or packed ones of as many experts, as planned.
    pub w: MatmulB<'a>,
    /// `[experts + 1]` u32: rows `offsets[e]..offsets[e + 1]` of out are expert e's. Ascending, at most `rows`.
    pub offsets: TensorView<'a>,
    /// `[rows]` u32, there if rows are gathered.
    pub order: Option<TensorView<'a>>,
    /// `[rows, n]`; rows of no expert stay as they are.
    pub out: TensorViewMut<'a>,
}

impl<'a> GroupedMatmulArgs<'a> {
    /// With what it must have. The other fields do nothing: `order: None`.
    pub fn new(
        x: TensorView<'a>,
        w: impl Into<MatmulB<'a>>,
        offsets: TensorView<'a>,
        out: TensorViewMut<'a>,
    ) -> Self {
        GroupedMatmulArgs { x, w: w.into(), offsets, order: None, out }
    }
}

/// Matrix product of groups of rows, each group with a weight of its own.
///
/// `out[i, j] = Σ_l x[row(i), l] · w[e, j, l]` for `offsets[e] ≤ i < offsets[e + 1]`, with `row(i)` of [`GroupedRows`].
///
/// With a [gate](GroupedMatmulProblem::gate): `out[i, j] = act(Σ_l x[row(i), l] · w[e, j, l]) · Σ_l x[row(i), l] ·
/// w[e, n + j, l]`, in f32 until out is rounded. On a card for few rows: up to 16 per expert on average, on Hopper's
/// tensor cores 31 altogether; not under [`Invariance::Batch`]. `supports` says so.
///
/// Groups may be of any size, also empty. Their bounds are read on the device, so that a recorded graph is right for
/// whatever [`super::moe_permute`] found: only `rows` decides about the launch. An empty sum (k = 0) is 0.
///
/// **Arithmetic**: products and sums in f32, whatever the type; out is rounded once. On tensor cores the sums of 16
/// products are cut off below the 25th bit. Where Σ|x·w| is more than 3.4e38, out may be infinite or NaN, by the order
/// of the sums.
/// **Determinism**: bitwise the same from run to run. On a card there are several kinds of kernels, which sum in
/// different orders. For f16 and bf16 from sm_80 on, where k and the addresses and strides of x and w are multiples of
/// 16 bytes: on Hopper for up to 31 rows, and for more; else for up to 16 rows per expert on average, and for more. By
/// ordinary arithmetic also for up to 16 rows per expert on average, and for more. Among the products of one kind,
/// which the number of rows alone decides, a row's result depends on that row and its expert, not on the other rows,
/// their number or their experts. On the CPU it depends on whether its expert has up to 8 rows or more, and beyond 8
/// on which place among them it has. Under [`Invariance::Batch`] there is one kernel for any
/// number of rows, of plain and of packed weights, as for [`Matmul`](crate::ops::matmul::Matmul).
/// **fp8 by fp8**: with [`Activations::Fp8`] rows of x may become fp8, which see. Each 128 of k are then summed by
/// themselves, with at least 13 bits of the largest of their sums, multiplied by both scales and added up in f32; a NaN
/// or an infinity in a row makes all of its results NaN.
/// **Packed weights**: up to some rows per expert on average kernels read the weights as they are packed, of the
/// experts that have rows only; these sum in orders of their own, which the planned number of rows decides. For more
/// the experts that have rows are unpacked, some at a time, into memory of the plan, rounded to `dtype`, and
/// multiplied as plain matrices.
/// **Aliasing**: out may not overlap the other tensors.
/// **Bounds**: offsets and order are not checked on the host. Wrong ones give wrong rows, never an access out of
/// bounds.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the kernels by ordinary arithmetic on all floors; tensor cores for f16 and bf16 from sm_80 on,
/// Hopper's own for many rows from sm_90a on.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::grouped_matmul::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let (tokens, top_k, experts, n, k, dtype) = (4, 8, 128, 1536, 2048, DType::BF16);
/// let from = GroupedRows::Gathered { fan_out: top_k };
/// let problem = GroupedMatmulProblem { from, ..GroupedMatmulProblem::new(tokens * top_k, experts, n, k, dtype) };
/// let product = GroupedMatmul::plan(&device, problem)?;
/// let x = Tensor::zeros(&stream, &[tokens, k], dtype)?;
/// let w = Tensor::zeros(&stream, &[experts, n, k], dtype)?;
/// let offsets = Tensor::zeros(&stream, &[experts + 1], DType::U32)?;
/// let order = Tensor::zeros(&stream, &[tokens * top_k], DType::U32)?;
/// let mut out = Tensor::empty(&stream, &[tokens * top_k, n], dtype)?;
/// let order = Some(order.view());
/// let args = GroupedMatmulArgs::new(x.view(), w.view(), offsets.view(), out.view_mut());
/// let args = GroupedMatmulArgs { order, ..args };
/// product.run(&stream, args)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct GroupedMatmul(Ladder<Planned>);

planned!(
    GroupedMatmul,
    GroupedMatmulProblem,
    GroupedMatmulArgs { x, w, offsets, order, out },
    &'static GroupedMatmulVariant,
    Planned
);

impl GroupedMatmul {
    /// Plans a product with packed weights by a kernel of the caller's choice, for all numbers of rows; an error if it
    /// cannot do the problem. One of the tensor cores is left out where an operand's address or stride does not suit
    /// it.
    pub fn plan_packed_with(
        device: &Device,
        problem: GroupedMatmulProblem,
        variant: &'static PackedVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let planned = match device.limits() {
            Some(limits) => {
                Planned::with_packed(device, problem, packed::forced(&limits, &problem, variant)?)
            }
            None => Planned::new(device, problem, Vec::new(), Vec::new()),
        };
        Ladder::from_rung(device, problem, planned).map(GroupedMatmul)
    }

    /// Plans a product with packed weights by choices of the caller's, as [`select_packed`] makes them.
    pub fn plan_packed(
        device: &Device,
        problem: GroupedMatmulProblem,
        choices: GroupedPackedChoices,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        Ladder::from_rung(device, problem, Planned::with_packed(device, problem, choices)).map(GroupedMatmul)
    }
}

/// A product, planned for a floor of a card, or the CPU.
#[derive(Debug)]
pub(crate) struct Planned {
    device: Device,
    problem: GroupedMatmulProblem,
    /// Kernels for every number of rows up to the planned one, fewest first, which take any address and stride; none
    /// on the CPU.
    kernels: Vec<(GroupedMatmulChoice, Entry)>,
    /// The tensor cores' kernels, which take operands in pieces of 16 bytes; none on other cards.
    tensor: Vec<(GroupedMatmulChoice, Entry)>,
    /// Those for packed weights, in the place of all others.
    packed: Option<Box<PackedKernels>>,
}

impl Rung for Planned {
    const OP: &'static str = OP;
    type Problem = GroupedMatmulProblem;
    type Args<'a> = GroupedMatmulArgs<'a>;
    type Variant = &'static GroupedMatmulVariant;

    fn supports(device: &Device, problem: &GroupedMatmulProblem) -> Result<(), Error> {
        check_problem(problem)?;
        let Some(limits) = device.limits() else { return Ok(()) };
        if let Some(layout) = &problem.weight
            && select_packed(&limits, problem, layout)?.dense_from.is_none()
        {
            return Ok(());
        }
        // Packed weights of many rows are multiplied as plain ones.
        select(&limits, problem)?;
        select::tensor(&limits, problem).map(|_| ())
    }

    fn plan(device: &Device, problem: GroupedMatmulProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        match device.limits() {
            None => Self::new(device, problem, Vec::new(), Vec::new()),
            Some(limits) if let Some(layout) = &problem.weight => {
                Self::with_packed(device, problem, select_packed(&limits, &problem, layout)?)
            }
            Some(limits) => {
                let tensor = select::tensor(&limits, &problem)?;
                Self::new(device, problem, select(&limits, &problem)?, tensor)
            }
        }
    }

    fn plan_with(
        device: &Device,
        problem: GroupedMatmulProblem,
        variant: &'static GroupedMatmulVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let Some(limits) = device.limits() else {
            return Self::new(device, problem, Vec::new(), Vec::new());
        };
        let choice = GroupedMatmulChoice::forced(&limits, variant, &problem)?;
        match variant.tile {
            GroupedMatmulTile::Simt { .. } | GroupedMatmulTile::Gemv { .. } => {
                Self::new(device, problem, vec![choice], Vec::new())
            }
            _ => Self::new(device, problem, select(&limits, &problem)?, vec![choice]),
        }
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn is_repeatable(&self) -> bool {
        true
    }

    fn run(&self, stream: &Stream, args: &mut GroupedMatmulArgs<'_>) -> Result<(), Error> {
        let at = Check::new(OP, &self.device);
        at.stream(stream)?;
        let mut dims = self.check(&at, args)?;
        if self.device.limits().is_none() {
            let few = self.device.invariance() == Invariance::Batch;
            cpu::run(&self.problem, (&dims, few), args);
            return Ok(());
        }
        let rows = dims.rows as usize;
        if let (Some(kernels), MatmulB::Packed(weight)) = (&self.packed, args.w) {
            // No rows or columns: nothing is launched.
            if rows == 0 || dims.n == 0 {
                return Ok(());
            }
            let GroupedMatmulArgs { x, w, offsets, order, .. } = *args;
            let args = GroupedMatmulArgs { x, w, offsets, order, out: args.out.reborrow() };
            return kernels.run(stream, (args, weight), dims);
        }
        let MatmulB::Matrix(w) = args.w else {
            return at.refuse("w", "matrices, as planned", "packed weights");
        };
        let operands = A_IN_PIECES | B_IN_PIECES;
        let in_pieces = self.k_in_pieces() && dims.access & operands == operands && rows > 0 && dims.n > 0;
        let Some((choice, entry)) = self.kernel(rows, in_pieces) else {
            let expected = format!("at most {} rows, as planned", self.problem.rows);
            return Err(Error::invalid(OP, "out", expected, rows.to_string()));
        };
        let tile = choice.variant.tile;
        dims.split_log2 = choice.split_log2;
        dims.col_blocks = tile.col_blocks(dims.n, dims.split_log2);
        let (kind, slots) = tile.slots(dims.rows, dims.experts);
        dims.slots = kind;
        let blocks = slots * u64::from(dims.col_blocks);
        let grid = if rows == 0 { 0 } else { check_blocks(OP, "out", blocks)? };
        let GroupedMatmulArgs { x, offsets, order, out, .. } = &*args;
        let [offsets, order, out] = [(*offsets).into(), (*order).into(), out.into()];
        let GroupedMatmulTile::Wgmma { bn, .. } = tile else {
            let how = self.epilogue();
            let params = [(*x).into(), w.into(), offsets, order, out, (&dims).into(), (&how).into()];
            // SAFETY: `check` found every row of every tensor inside its view and set `access` by what is aligned,
            // which `kernel` looks at for the tensor cores; the grid has every column of every slot; threads and
            // shared memory are the tile's.
            return unsafe { entry.launch(stream, [grid, 1, 1], [tile.threads(), 1, 1], &params) };
        };
        let w_map = self.map_of_weights(&w, &dims, bn / 2)?;
        // Rows that lie over each other, as after a broadcast, are not for tensor maps.
        let by_tma = dims.fan_out == 0 && (dims.x_rows <= 1 || dims.x_stride >= dims.k);
        let x_map = if by_tma {
            dims.access |= A_BY_TMA;
            let sizes = [dims.x_rows, dims.k, dims.x_stride];
            matrix_map(OP, &self.device, self.problem.dtype, x.address(), sizes, WGMMA_X_ROWS)?
        } else {
            w_map
        };
        // Its blocks walk over the tiles.
        let grid = grid.min(self.device.profile().num_sms);
        let params = [(&dims).into(), (&x_map).into(), (&w_map).into(), (*x).into(), offsets, order, out];
        // SAFETY: as above; the blocks walk over the slots and their columns, and the maps have x's and the weights'
        // sizes and strides.
        unsafe { entry.launch(stream, [grid, 1, 1], [tile.threads(), 1, 1], &params) }
    }

    // If every expert has rows.
    fn report(&self) -> OptimizationReport {
        let GroupedMatmulProblem { rows, experts, n: columns, k, dtype, from, weight, .. } = self.problem;
        let n = self.problem.w_rows();
        let x_rows = match from {
            GroupedRows::Sorted => rows,
            GroupedRows::Gathered { fan_out } => rows / fan_out.max(1),
        };
        let last = self.kernel(rows, self.k_in_pieces());
        let bits = weight.map_or(8.0 * dtype.bytes() as f32, |layout| layout.bits_per_weight(k as u32));
        let expert_bytes = count((n as f64 * k as f64 * f64::from(bits) / 8.0) as usize);
        let most_rows = rows;
        let [rows, x_rows, experts, n, k, columns] = [rows, x_rows, experts, n, k, columns].map(count);
        let work = Work {
            problem: format!("[{rows}, {k}] · {experts} of [{n}, {k}]ᵀ {dtype}"),
            bytes: experts.min(rows) * expert_bytes + (x_rows * k + rows * columns) * count(dtype.bytes()),
            flops: count(2) * rows * n * k,
        };
        if let Some(packed) = &self.packed {
            let (entry, cut) = packed.report(most_rows);
            return OptimizationReport::new(OP, &self.device, entry, work, cut);
        }
        let cut = |choice: &GroupedMatmulChoice| {
            let tile = choice.variant.tile;
            Cut { why: choice.why.clone(), tile: format!("{tile:?}"), threads: tile.threads() }
        };
        let cut = last.map_or_else(|| Cut::cpu("panels"), |(choice, _)| cut(choice));
        OptimizationReport::new(OP, &self.device, last.map(|(_, entry)| entry), work, cut)
    }
}

impl Planned {
    fn with_packed(
        device: &Device,
        problem: GroupedMatmulProblem,
        choices: GroupedPackedChoices,
    ) -> Result<Self, Error> {
        let packed = Some(Box::new(PackedKernels::new(device, &problem, choices)?));
        Ok(Planned { packed, ..Self::new(device, problem, Vec::new(), Vec::new())? })
    }

    fn new(
        device: &Device,
        problem: GroupedMatmulProblem,
        choices: Vec<GroupedMatmulChoice>,
        tensor: Vec<GroupedMatmulChoice>,
    ) -> Result<Self, Error> {
        let load = |choice: GroupedMatmulChoice| {
            let variant = choice.variant;
            let entry = device.entry(OP, variant.entry, variant.tile.smem_bytes())?;
            Ok::<_, Error>((choice, entry))
        };
        let kernels = choices.into_iter().map(load).collect::<Result<_, _>>()?;
        let tensor = tensor.into_iter().map(load).collect::<Result<_, _>>()?;
        Ok(Planned { device: device.clone(), problem, kernels, tensor, packed: None })
    }

    /// The kernel for so many rows, whose operands are in pieces or not; none on the CPU, or for more than were
    /// planned.
    fn kernel(&self, rows: usize, in_pieces: bool) -> Option<&(GroupedMatmulChoice, Entry)> {
        let fits = |(choice, _): &&(GroupedMatmulChoice, Entry)| rows <= choice.max_rows;
        let in_pieces = in_pieces && !self.tensor.is_empty();
        if in_pieces { &self.tensor } else { &self.kernels }.iter().find(fits)
    }

    /// What becomes of the sums.
    fn epilogue(&self) -> MatmulEpilogue {
        let (options, curve) = match self.problem.gate {
            Some(activation) => (ACTIVATED | GATED, curve(activation)),
            None => (0, [0.0; _]),
        };
        MatmulEpilogue { options, scale: 1.0, residual_stride: 0, residual_batch_stride: 0, curve }
    }

    /// Whether k is one that operands in pieces can have.
    fn k_in_pieces(&self) -> bool {
        let GroupedMatmulProblem { k, dtype, .. } = self.problem;
        k > 0 && k.is_multiple_of(16 / dtype.bytes())
    }

    /// All weights as a stack of matrices, in boxes of `box_rows` rows and 128 bytes.
    fn map_of_weights(
        &self,
        w: &TensorView<'_>,
        dims: &GroupedMatmulDims,
        box_rows: u32,
    ) -> Result<TensorMap, Error> {
        let &GroupedMatmulDims { experts, n, k, w_stride, w_expert_stride, .. } = dims;
        let dtype = self.problem.dtype;
        let bytes = dtype.bytes() as u64;
        // The stride of a single row or weight is not used; it must be one all the same.
        let stride = |size: u32, stride: u32| {
            bytes * if size <= 1 { u64::from(k).next_multiple_of(16) } else { u64::from(stride) }
        };
        let outer = Axis { size: u64::from(experts), stride_bytes: stride(experts, w_expert_stride) };
        let tiled = Tiled {
            dtype,
            address: w.address(),
            rows: u64::from(n),
            cols: u64::from(k),
            stride_bytes: stride(n, w_stride),
            outer: Some([outer, Axis { size: 1, stride_bytes: outer.stride_bytes }]),
            box_rows,
            box_cols: WGMMA_ROW_BYTES / dtype.bytes() as u32,
            box_matrices: 1,
            swizzle: Swizzle::Bytes128,
        };
        self.device.tensor_map(OP, &tiled)
    }

    fn check(&self, at: &Check<'_>, args: &GroupedMatmulArgs<'_>) -> Result<GroupedMatmulDims, Error> {
        let GroupedMatmulArgs { x, offsets, order, out, .. } = args;
        let GroupedMatmulProblem { rows: most, experts, n, k, dtype, from, .. } = self.problem;
        let [out_stride] = at.elements("out", out.as_view(), dtype, &[None, Some(n)])?;
        let len = out.shape()[0];
        let rows = at.planned("out", "rows", len, most)?;
        let (fan_out, x_rows) = match from {
            GroupedRows::Sorted => (0, len),
            GroupedRows::Gathered { fan_out } if len.is_multiple_of(fan_out) => (fan_out, len / fan_out),
            GroupedRows::Gathered { fan_out } => {
                return at.refuse("out", format!("a multiple of {fan_out} rows"), len.to_string());
            }
        };
        let [x_stride] = at.elements("x", *x, dtype, &[x_rows, k].map(Some))?;
        // Packed weights are as matrices of their size to all that follows, which reads none of them.
        let w_rows = self.problem.w_rows();
        let of_w = (Some(experts), [w_rows, k]);
        let w = args.w.planned(at, "w", (self.problem.weight, dtype), of_w)?;
        let [w_expert_stride, w_stride] = at.elements("w", w, dtype, &[experts, w_rows, k].map(Some))?;
        at.contiguous("offsets", *offsets, DType::U32, &[Some(experts + 1)])?;
        if let Some(order) = at.given("order", from != GroupedRows::Sorted, *order, ["planned"; 2])? {
            at.contiguous("order", order, DType::U32, &[Some(len)])?;
        }
        at.apart("out", out_stride, out.shape())?;
        let per_piece = 16 / dtype.bytes();
        let mut access = 0;
        for (flag, is_set) in [
            (A_IN_PIECES, rows_aligned(*x, per_piece)),
            (B_IN_PIECES, rows_aligned(w, per_piece)),
            (OUT_IN_QUADS, rows_aligned(out.as_view(), 4)),
            (OUT_IN_PIECES, rows_aligned(out.as_view(), per_piece)),
        ] {
            access |= if is_set { flag } else { 0 };
        }
        Ok(GroupedMatmulDims {
            rows,
            x_rows: x_rows as u32,
            experts: experts as u32,
            n: w_rows as u32,
            k: k as u32,
            fan_out: fan_out as u32,
            x_stride,
            w_stride,
            w_expert_stride,
            out_stride,
            access,
            split_log2: 0,
            col_blocks: 0,
            slots: 0,
        })
    }
}

fn check_problem(problem: &GroupedMatmulProblem) -> Result<(), Error> {
    let GroupedMatmulProblem { rows, experts, n, k, dtype, from, weight, gate, .. } = *problem;
    for (name, size) in [("rows", rows), ("experts", experts), ("n", n), ("k", k)] {
        check_size(OP, "problem", name, size)?;
    }
    check_size(OP, "problem", "size of a weight", problem.w_rows().saturating_mul(k))?;
    // A slot's number and the offsets are added up in 32 bits.
    check_size(OP, "problem", "rows and experts", rows + experts)?;
    if experts == 0 {
        return Err(Error::invalid(OP, "problem", "at least one expert", "0"));
    }
    if from == (GroupedRows::Gathered { fan_out: 0 }) {
        return Err(Error::invalid(OP, "problem", "a fan_out of at least 1", "0"));
    }
    if problem.activations == Activations::Int8 {
        let expected = "rows as they are given, or fp8";
        return Err(Error::invalid(OP, "problem", expected, "int8"));
    }
    if !dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", dtype.name()));
    }
    if gate == Some(Activation::Sigmoid) {
        return Err(Error::invalid(OP, "problem", "a gate of silu, gelu_tanh or gelu_erf", "sigmoid"));
    }
    if gate.is_some() && weight.is_some() {
        return Err(Error::invalid(OP, "problem", "plain weights of a gated product", "packed ones"));
    }
    if let Some(layout) = weight
        && let Some(expected) = layout.problem_in_order()
    {
        let got = format!("{layout:?}");
        return Err(Error::invalid(OP, "problem", format!("weights with {expected}"), got));
    }
    Ok(())
}
