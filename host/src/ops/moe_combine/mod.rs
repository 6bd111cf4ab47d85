//! Weighted sum of experts' results: `abi::ops::moe_combine` has the kernel table, `gpu/src/ops/moe_combine` the kernels,
//! `tests/ops/moe_combine.rs` the properties, `benches/ops/moe_combine.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::ops::moe_combine::{BLOCK_PIECES_LOG2, MoeCombineDims, THREADS};
use abi::{DType, RowTiles};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::Entry;
use crate::nvtx;
use crate::ops::matmul::{optional, row_stride};
use crate::ops::{check_blocks, check_size};
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::moe_combine::{MoeCombineTile, MoeCombineVariant, VARIANTS};
pub use cases::{CASES, MoeCombineCase, SharedTerm};
pub use select::select;

const OP: &str = "moe_combine";

/// What is to be summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeCombineProblem {
    /// Most tokens of a run.
    pub tokens: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Type of the results and out.
    pub dtype: DType,
}

/// The tensors of a run. Rows may have any stride, elements of a row are neighbours.
#[derive(Debug)]
pub struct MoeCombineArgs<'a> {
    /// `[any, cols]`: the experts' results.
    pub y: TensorView<'a>,
    /// `[tokens, top_k]` f32, contiguous.
    pub weights: TensorView<'a>,
    /// `[tokens, top_k]` u32, contiguous: the row of y of each; one beyond y is left out.
    pub positions: TensorView<'a>,
    /// `[tokens, cols]`: the shared expert's result, added to the sum.
    pub shared: Option<TensorView<'a>>,
    /// `[tokens, 1]` f32, rows of any stride: the logit of the shared expert's gate; none: the gate is 1.
    pub gate: Option<TensorView<'a>>,
    /// `[tokens, cols]`.
    pub out: TensorViewMut<'a>,
}

/// Sums the results of each token's experts by weight, and adds the shared expert's.
///
/// `out[t] = Σ_j weights[t, j] · y[positions[t, j]] + sigmoid(gate[t]) · shared[t]`, without the last term or its gate where
/// there is none. An empty sum is 0.
///
/// **Arithmetic**: f32, in the order of j, the shared expert last; out is rounded once.
/// **Determinism**: bitwise the same from run to run; a token's result depends on its own rows alone.
/// **Aliasing**: out may not overlap the other tensors.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors.
/// **Source**: Shazeer et al., *Outrageously Large Neural Networks* (2017), equation 1.
#[derive(Debug)]
pub struct MoeCombine {
    device: Device,
    problem: MoeCombineProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// The chosen kernel, and the one for tensors that are not aligned to 16 bytes.
    Cuda {
        variant: &'static MoeCombineVariant,
        entry: Entry,
        unaligned: Entry,
    },
}

impl MoeCombine {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &MoeCombineProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: MoeCombineProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let variant = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, variant)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: MoeCombineProblem,
        variant: &'static MoeCombineVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        select::check_fits(variant, &problem)?;
        Self::new(device, problem, device.limits().map(|_| variant))
    }

    fn new(
        device: &Device,
        problem: MoeCombineProblem,
        variant: Option<&'static MoeCombineVariant>,
    ) -> Result<Self, Error> {
        let backend = match variant {
            None => Backend::Cpu,
            Some(variant) => {
                let entry = device.entry(OP, variant.entry, 0)?;
                let unaligned = device.entry(OP, select::scalar(problem.dtype)?.entry, 0)?;
                Backend::Cuda { variant, entry, unaligned }
            }
        };
        Ok(MoeCombine { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`MoeCombine`].
    pub fn run(&self, stream: &Stream, mut args: MoeCombineArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let mut dims = self.check(&args)?;
        match &self.backend {
            Backend::Cpu => {
                cpu::run(self.problem, &dims, &mut args);
                Ok(())
            }
            Backend::Cuda { variant, entry, unaligned } => {
                let MoeCombineArgs { y, weights, positions, shared, gate, out } = &args;
                let aligned = variant.tile == MoeCombineTile::Pieces
                    && y.is_aligned_16()
                    && shared.is_none_or(|shared| shared.is_aligned_16())
                    && out.is_aligned_16();
                let (entry, per_piece) =
                    if aligned { (entry, 16 / self.problem.dtype.bytes()) } else { (unaligned, 1) };
                let pieces = (self.problem.cols / per_piece) as u32;
                dims.tiles = RowTiles::new(dims.tiles.rows, pieces, BLOCK_PIECES_LOG2);
                let grid = check_blocks(OP, "out", dims.tiles.blocks(BLOCK_PIECES_LOG2))?;
                let params = [
                    (*y).into(),
                    (*weights).into(),
                    (*positions).into(),
                    optional(shared.as_ref()),
                    optional(gate.as_ref()),
                    out.into(),
                    (&dims).into(),
                ];
                // SAFETY: `check` found every row of every tensor inside its view, and `aligned` what is moved in pieces of
                // 16 bytes; the grid has a thread for every piece.
                unsafe { entry.launch(stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
            }
        }
    }

    fn check(&self, args: &MoeCombineArgs<'_>) -> Result<MoeCombineDims, Error> {
        let MoeCombineArgs { y, weights, positions, shared, gate, out } = args;
        let MoeCombineProblem { tokens: max_tokens, top_k, cols, dtype } = self.problem;
        let device = &self.device;
        out.expect(OP, "out", device, dtype, &[None, Some(cols)])?;
        out.expect_inner_contiguous(OP, "out")?;
        let tokens = out.shape()[0];
        if tokens > max_tokens {
            let expected = format!("at most {max_tokens} tokens, as planned");
            return Err(Error::invalid(OP, "out", expected, tokens.to_string()));
        }
        y.expect(OP, "y", device, dtype, &[None, Some(cols)])?;
        y.expect_inner_contiguous(OP, "y")?;
        weights.expect(OP, "weights", device, DType::F32, &[Some(tokens), Some(top_k)])?;
        weights.expect_contiguous(OP, "weights")?;
        positions.expect(OP, "positions", device, DType::U32, &[Some(tokens), Some(top_k)])?;
        positions.expect_contiguous(OP, "positions")?;
        let mut strides = [0; 2];
        if let Some(shared) = shared {
            shared.expect(OP, "shared", device, dtype, &[Some(tokens), Some(cols)])?;
            shared.expect_inner_contiguous(OP, "shared")?;
            strides[0] = row_stride(OP, "shared", shared.shape(), shared.strides())?;
        }
        if let Some(gate) = gate {
            gate.expect(OP, "gate", device, DType::F32, &[Some(tokens), Some(1)])?;
            strides[1] = row_stride(OP, "gate", gate.shape(), gate.strides())?;
            if shared.is_none() {
                return Err(Error::invalid(OP, "gate", "none without a shared expert", "a tensor"));
            }
        }
        let out_stride = row_stride(OP, "out", out.shape(), out.strides())?;
        if tokens > 1 && (out_stride as usize) < cols {
            let expected = format!("rows that do not overlap: a stride of at least {cols}");
            return Err(Error::invalid(OP, "out", expected, out_stride.to_string()));
        }
        let [shared_stride, gate_stride] = strides;
        Ok(MoeCombineDims {
            tiles: RowTiles::new(tokens as u32, cols as u32, BLOCK_PIECES_LOG2),
            top_k: top_k as u32,
            y_rows: check_size(OP, "y", "rows", y.shape()[0])?,
            y_stride: row_stride(OP, "y", y.shape(), y.strides())?,
            shared_stride,
            gate_stride,
            out_stride,
        })
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let MoeCombineProblem { tokens, top_k, cols, dtype } = self.problem;
        let (entry, tile) = match &self.backend {
            Backend::Cpu => (None, "tokens".into()),
            Backend::Cuda { variant, entry, .. } => (Some(entry), format!("{:?}", variant.tile)),
        };
        let [tokens, top_k, cols, bytes] = [tokens, top_k, cols, dtype.bytes()].map(count);
        let work = Work {
            problem: format!("[{tokens}, {cols}] {dtype} of {top_k} experts"),
            why: "whole pieces of 16 bytes, or not".into(),
            tile,
            threads: THREADS,
            bytes: tokens * ((top_k + count(1)) * cols * bytes + top_k * count(8)),
            flops: count(2) * tokens * top_k * cols,
        };
        OptimizationReport::new(OP, &self.device, entry, work)
    }
}

impl Kernel for MoeCombine {
    type Args<'a> = MoeCombineArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: MoeCombineArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &MoeCombineProblem) -> Result<(), Error> {
    let MoeCombineProblem { tokens, top_k, cols, dtype } = *problem;
    check_size(OP, "problem", "tokens", tokens)?;
    check_size(OP, "problem", "cols", cols)?;
    check_size(OP, "problem", "number of pairs", tokens.saturating_mul(top_k))?;
    if !dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", dtype.name()));
    }
    Ok(())
}
