//! Rotary position embedding: `abi::ops::rope` has the kernel table, `gpu/src/ops/rope` the kernels,
//! `tests/ops/rope.rs` the properties, `benches/ops/rope.rs` the bench.

mod cases;
mod cpu;
pub mod reference;
mod select;
mod tables;

use abi::ops::rope::{BLOCK_PIECES_LOG2, HEADS_PER_THREAD, RopeDims, THREADS};
use abi::{DType, RowTiles};

use crate::device::Device;
use crate::error::Error;
use crate::kernel::{Kernel, OptimizationReport, Work, count};
use crate::launch::{Entry, Param};
use crate::nvtx;
use crate::ops::{check_blocks, check_size};
use crate::stream::Stream;
use crate::tensor::{TensorView, TensorViewMut};

pub use abi::ops::rope::{RopeStyle, RopeTile, RopeVariant, VARIANTS};
pub use cases::{CASES, RopeCase};
pub use select::{RopeChoice, select};
pub use tables::RopeTables;

const OP: &str = "rope";

/// What is to be rotated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeProblem {
    /// Most tokens of a run.
    pub tokens: usize,
    /// Heads of a token.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a head that are rotated, the first ones: even, at least 2. The rest passes through.
    pub rotary_dim: usize,
    /// Which elements form a pair.
    pub style: RopeStyle,
    /// Type of x and out.
    pub dtype: DType,
}

/// Where the heads come from.
#[derive(Clone, Copy, Debug)]
pub enum RopeInput<'a> {
    /// Another tensor of the shape of out.
    From(TensorView<'a>),
    /// Out holds them, and gets the result in their place.
    InPlace,
}

/// The tensors of a run. Heads are `[tokens, heads, head_dim]`: the q or k part of a joint projection, or a slice of a cache.
/// The last dimension must have stride 1; the others may have any stride.
#[derive(Debug)]
pub struct RopeArgs<'a> {
    /// Input.
    pub x: RopeInput<'a>,
    /// `[tokens]`, u32, on the device; any stride.
    ///
    /// A position beyond the tables is treated as their last: the kernel cannot report it, and reads nothing outside.
    /// Callers who take positions from outside check them before they upload them.
    pub positions: TensorView<'a>,
    /// cos and sin, `rotary_dim / 2` pairs.
    pub tables: &'a RopeTables,
    /// Output.
    pub out: TensorViewMut<'a>,
}

/// Rotary position embedding of the heads of tokens.
///
/// With c and s the table entries of a token's position and of pair (a, b): `(a, b) ← (a·c − b·s, b·c + a·s)`. The pairs
/// are those of [`RopeStyle`]; interleaved ones are rotated in place, not moved apart.
///
/// **Arithmetic**: f32, each result rounded once; elements that are not rotated keep their bits.
/// **Aliasing**: in place by [`RopeInput::InPlace`]; otherwise out may not overlap the other tensors.
/// **Determinism**: bitwise the same from run to run; a token's result does not depend on the other tokens or their number.
/// **Errors**: [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors; from sm_80 on bf16 is packed by the hardware.
/// **Source**: Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding* (2021), equation 34.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::rope::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let inv_freq: Vec<f64> = (0..64).map(|i| 1e6f64.powf(-2.0 * i as f64 / 128.0)).collect();
/// let tables = RopeTables::new(&stream, &inv_freq, 1.0, 40960)?;
/// let (style, dtype) = (RopeStyle::HalfSplit, DType::BF16);
/// let problem = RopeProblem { tokens: 3, heads: 16, head_dim: 128, rotary_dim: 128, style, dtype };
/// let rope = Rope::plan(&device, problem)?;
/// let mut q = Tensor::zeros(&stream, &[3, 16, 128], DType::BF16)?;
/// let positions = Tensor::from_slice(&stream, &[3], &[7u32, 8, 9])?;
/// let args =
///     RopeArgs { x: RopeInput::InPlace, positions: positions.view(), tables: &tables, out: q.view_mut() };
/// rope.run(&stream, args)?;
/// println!("{}", rope.report());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Rope {
    device: Device,
    problem: RopeProblem,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu,
    /// The chosen kernel, and the one for tensors that are not aligned to 16 bytes.
    Cuda {
        choice: RopeChoice,
        entry: Entry,
        unaligned: Entry,
    },
}

impl Rope {
    /// Whether `device` can do it.
    pub fn supports(device: &Device, problem: &RopeProblem) -> Result<(), Error> {
        check_problem(problem)?;
        device.limits().map_or(Ok(()), |limits| select(&limits, problem).map(|_| ()))
    }

    /// Checks the problem, chooses a kernel and loads it.
    pub fn plan(device: &Device, problem: RopeProblem) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|limits| select(&limits, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    /// Plans with a kernel of the caller's choice; an error if it cannot do the problem.
    pub fn plan_with(
        device: &Device,
        problem: RopeProblem,
        variant: &'static RopeVariant,
    ) -> Result<Self, Error> {
        check_problem(&problem)?;
        let choice = device.limits().map(|_| RopeChoice::forced(variant, &problem)).transpose()?;
        Self::new(device, problem, choice)
    }

    fn new(device: &Device, problem: RopeProblem, choice: Option<RopeChoice>) -> Result<Self, Error> {
        let backend = match choice {
            None => Backend::Cpu,
            Some(choice) => {
                let entry = device.entry(OP, choice.variant.entry, 0)?;
                let unaligned = device.entry(OP, select::variant(&problem, RopeTile::Scalar)?.entry, 0)?;
                Backend::Cuda { choice, entry, unaligned }
            }
        };
        Ok(Rope { device: device.clone(), problem, backend })
    }

    /// Runs once. See [`Rope`].
    pub fn run(&self, stream: &Stream, mut args: RopeArgs<'_>) -> Result<(), Error> {
        let _range = nvtx::range(OP);
        let strides = self.check(&args)?;
        match &self.backend {
            Backend::Cpu => {
                cpu::run(&self.problem, &mut args);
                Ok(())
            }
            Backend::Cuda { choice, entry, unaligned } => {
                let RopeArgs { x, positions, tables, out } = &args;
                let (x_param, x_aligned) = match x {
                    RopeInput::From(x) => (Param::from(*x), x.is_aligned_16()),
                    RopeInput::InPlace => (Param::from(out), true),
                };
                let by_piece = choice.variant.tile == RopeTile::Pieces && x_aligned && out.is_aligned_16();
                let (entry, tile) =
                    if by_piece { (entry, RopeTile::Pieces) } else { (unaligned, RopeTile::Scalar) };
                let dims = self.dims(tile, &args, strides);
                let grid = check_blocks(OP, "out", dims.tiles.blocks(BLOCK_PIECES_LOG2))?;
                let (cos, sin) = (tables.cos.view(), tables.sin.view());
                let params =
                    [x_param, (*positions).into(), cos.into(), sin.into(), out.into(), (&dims).into()];
                // SAFETY: `check` found every head of x and out inside its view, and as many positions as tokens; the
                // tables have max_position rows, which the kernel keeps to. `by_piece` holds only for what can be read
                // in pieces of 16 bytes; the tables' rows are whole pieces then, and they start where a pool block does.
                unsafe { entry.launch(stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
            }
        }
    }

    fn dims(&self, tile: RopeTile, args: &RopeArgs<'_>, strides: Strides) -> RopeDims {
        let RopeProblem { heads, head_dim, rotary_dim, style, dtype, .. } = self.problem;
        let (per_unit, groups) = match tile {
            RopeTile::Pieces => (16 / dtype.bytes(), heads.div_ceil(HEADS_PER_THREAD as usize)),
            RopeTile::Scalar => (1, heads),
        };
        let rotated_units = match (tile, style) {
            (RopeTile::Pieces, RopeStyle::Interleaved) => rotary_dim / per_unit,
            _ => rotary_dim / 2 / per_unit,
        };
        let copied_units = match args.x {
            RopeInput::From(_) => (head_dim - rotary_dim) / per_unit,
            RopeInput::InPlace => 0,
        };
        let units = rotated_units + copied_units;
        let tokens = args.out.shape()[0] as u32;
        RopeDims {
            tiles: RowTiles::new(tokens, (groups * units) as u32, BLOCK_PIECES_LOG2),
            heads: heads as u32,
            groups: groups as u32,
            units: units as u32,
            rotated_units: rotated_units as u32,
            rotary_dim: rotary_dim as u32,
            max_position: args.tables.max_position() as u32,
            x_token_stride: strides.x[0],
            x_head_stride: strides.x[1],
            out_token_stride: strides.out[0],
            out_head_stride: strides.out[1],
            position_stride: strides.position,
        }
    }

    fn check(&self, args: &RopeArgs<'_>) -> Result<Strides, Error> {
        let RopeArgs { x, positions, tables, out } = args;
        let RopeProblem { tokens: max_tokens, heads, head_dim, rotary_dim, dtype, .. } = self.problem;
        out.expect(OP, "out", &self.device, dtype, &[None, Some(heads), Some(head_dim)])?;
        out.expect_inner_contiguous(OP, "out")?;
        let tokens = out.shape()[0];
        if tokens > max_tokens {
            let expected = format!("at most {max_tokens} tokens, as planned");
            return Err(Error::invalid(OP, "out", expected, tokens.to_string()));
        }
        positions.expect(OP, "positions", &self.device, DType::U32, &[Some(tokens)])?;
        let shape = [None, Some(rotary_dim / 2)];
        tables.cos.view().expect(OP, "tables", &self.device, DType::F32, &shape)?;
        let strides = |argument, strides: &[usize]| -> Result<[u32; 2], Error> {
            let token = check_size(OP, argument, "stride", strides[0])?;
            Ok([token, check_size(OP, argument, "stride", strides[1])?])
        };
        let out_strides = strides("out", out.strides())?;
        let x_strides = match x {
            RopeInput::From(x) => {
                x.expect(OP, "x", &self.device, dtype, &[Some(tokens), Some(heads), Some(head_dim)])?;
                x.expect_inner_contiguous(OP, "x")?;
                strides("x", x.strides())?
            }
            RopeInput::InPlace => out_strides,
        };
        let position = check_size(OP, "positions", "stride", positions.strides()[0])?;
        Ok(Strides { x: x_strides, out: out_strides, position })
    }

    /// What was chosen, and what a run of the planned size should take.
    pub fn report(&self) -> OptimizationReport {
        let RopeProblem { tokens, heads, head_dim, rotary_dim, style, dtype } = self.problem;
        let [tokens, heads, head_dim, rotary_dim] = [tokens, heads, head_dim, rotary_dim].map(count);
        let work = |why: &str, tile: String, threads| Work {
            problem: format!("{} {rotary_dim} of [{tokens}, {heads}, {head_dim}] {dtype}", style.name()),
            why: why.into(),
            tile,
            threads,
            // Each token's position and angles are read once.
            bytes: tokens
                * (count(2 * dtype.bytes()) * heads * head_dim + count(4) * (rotary_dim + count(1))),
            flops: count(3) * tokens * heads * rotary_dim,
        };
        match &self.backend {
            Backend::Cpu => {
                OptimizationReport::new(OP, &self.device, None, work("no card", "tokens".into(), 1))
            }
            Backend::Cuda { choice, entry, .. } => {
                let work = work(choice.why, format!("{:?}", choice.variant.tile), THREADS);
                OptimizationReport::new(OP, &self.device, Some(entry), work)
            }
        }
    }
}

/// In elements; token and head.
#[derive(Clone, Copy)]
struct Strides {
    x: [u32; 2],
    out: [u32; 2],
    position: u32,
}

impl Kernel for Rope {
    type Args<'a> = RopeArgs<'a>;

    fn op(&self) -> &'static str {
        OP
    }

    fn forward(&self, stream: &Stream, args: RopeArgs<'_>) -> Result<(), Error> {
        self.run(stream, args)
    }

    fn optimization_report(&self) -> OptimizationReport {
        self.report()
    }
}

fn check_problem(problem: &RopeProblem) -> Result<(), Error> {
    let RopeProblem { tokens, heads, head_dim, rotary_dim, dtype, .. } = *problem;
    check_size(OP, "problem", "tokens", tokens)?;
    check_size(OP, "problem", "elements of a token", heads.saturating_mul(head_dim))?;
    if rotary_dim < 2 || !rotary_dim.is_multiple_of(2) || rotary_dim > head_dim {
        let expected = format!("an even rotary_dim from 2 to head_dim {head_dim}");
        return Err(Error::invalid(OP, "problem", expected, rotary_dim.to_string()));
    }
    if !dtype.is_float() {
        return Err(Error::invalid(OP, "problem", "dtype f32, f16 or bf16", dtype.name()));
    }
    Ok(())
}
