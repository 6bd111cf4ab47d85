//! Rotary position embedding of heads: [`Rope`].

mod cases;
pub(crate) mod cpu;
pub mod reference;
mod select;
mod tables;

use abi::ops::rope::{BLOCK_PIECES_LOG2, HEADS_PER_THREAD, RopeDims, THREADS};
use abi::{DType, RowTiles};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::ops::check_blocks;
use crate::plan::{Check, Choice, Operator, Pair, Plan, Run, check_floats, planned};
use crate::tensor::{Mirror, TensorView, TensorViewMut, Views};

pub use abi::ops::rope::{RopeStyle, RopeTile, RopeVariant, VARIANTS};
pub use cases::{CASES, RopeCase, samples};
pub use select::select;
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

impl RopeProblem {
    /// With what it must have. The other fields do nothing: `rotary_dim: head_dim`, `style: RopeStyle::HalfSplit`.
    pub fn new(tokens: usize, heads: usize, head_dim: usize, dtype: DType) -> Self {
        RopeProblem { tokens, heads, head_dim, rotary_dim: head_dim, style: RopeStyle::HalfSplit, dtype }
    }
}

/// Where the heads come from.
#[derive(Clone, Copy, Debug)]
pub enum RopeInput<'a> {
    /// Another tensor of the shape of out.
    From(TensorView<'a>),
    /// Out holds them, and gets the result in their place.
    InPlace,
}

impl Views for RopeInput<'_> {
    fn bring(&mut self, name: &'static str, mirror: &mut Mirror<'_>) -> Result<(), Error> {
        match self {
            RopeInput::From(x) => x.bring(name, mirror),
            RopeInput::InPlace => Ok(()),
        }
    }
}

/// The tensors of a run. Heads are `[tokens, heads, head_dim]`: the q or k part of a joint projection, or a slice of a
/// cache. The last dimension must have stride 1; the others may have any stride.
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

impl<'a> RopeArgs<'a> {
    /// With what it must have, which is all there is so far.
    pub fn new(
        x: RopeInput<'a>,
        positions: TensorView<'a>,
        tables: &'a RopeTables,
        out: TensorViewMut<'a>,
    ) -> Self {
        RopeArgs { x, positions, tables, out }
    }
}

/// Rotary position embedding of the heads of tokens.
///
/// With c and s the table entries of a token's position and of pair (a, b): `(a, b) ← (a·c − b·s, b·c + a·s)`. The
/// pairs are those of [`RopeStyle`]; interleaved ones are rotated in place, not moved apart.
///
/// **Arithmetic**: f32, each result rounded once; elements that are not rotated keep their bits. **Aliasing**: in place
/// by [`RopeInput::InPlace`]; otherwise out may not overlap the other tensors. **Determinism**: bitwise the same from
/// run to run; a token's result does not depend on the other tokens or their number. **Errors**: [`Error::Invalid`] for
/// a shape, stride, type or place that does not fit; never after work was enqueued. **Architectures**: the same kernels
/// on all floors; from sm_80 on bf16 is packed by the hardware. **Source**: Su et al., *RoFormer: Enhanced Transformer
/// with Rotary Position Embedding* (2021), equation 34.
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
pub struct Rope(Plan<Self>);

planned!(Rope, RopeProblem, RopeArgs { x, positions, tables, out }, &'static RopeVariant);

/// Strides of token and head, that of the positions, and the tokens of a run.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    x: [u32; 2],
    out: [u32; 2],
    position: u32,
    tokens: u32,
}

impl Operator for Rope {
    const OP: &'static str = OP;
    const CPU_TILE: &'static str = "tokens";
    type Problem = RopeProblem;
    type Args<'a> = RopeArgs<'a>;
    type Dims = Rows;
    type Variant = &'static RopeVariant;
    type Kernels = Pair;

    fn check_problem(problem: &RopeProblem) -> Result<(), Error> {
        let RopeProblem { tokens, heads, head_dim, rotary_dim, dtype, .. } = *problem;
        if rotary_dim < 2 || !rotary_dim.is_multiple_of(2) || rotary_dim > head_dim {
            let expected = format!("an even rotary_dim from 2 to head_dim {head_dim}");
            return Err(Error::invalid(OP, "problem", expected, rotary_dim.to_string()));
        }
        let of_token = heads.saturating_mul(head_dim);
        check_floats(OP, dtype, &[("tokens", tokens), ("elements of a token", of_token)])
    }

    fn select(limits: &DeviceLimits, problem: &RopeProblem) -> Result<Choice<Self::Variant>, Error> {
        select(limits, problem)
    }

    fn forced(variant: Self::Variant, problem: &RopeProblem) -> Result<Choice<Self::Variant>, Error> {
        select::forced(variant, problem)
    }

    fn load(device: &Device, problem: &RopeProblem, choice: &Choice<Self::Variant>) -> Result<Pair, Error> {
        Pair::load(device, OP, [choice.variant.entry, select::variant(problem, RopeTile::Scalar)?.entry], 0)
    }

    fn check(at: &Check<'_>, problem: &RopeProblem, args: &RopeArgs<'_>) -> Result<Rows, Error> {
        let RopeArgs { x, positions, tables, out } = args;
        let RopeProblem { tokens: most, heads, head_dim, rotary_dim, dtype, .. } = *problem;
        let shape = |tokens| [tokens, Some(heads), Some(head_dim)];
        let out_strides = at.rows("out", out.as_view(), dtype, &shape(None))?;
        let len = out.shape()[0];
        let tokens = at.planned("out", "tokens", len, most)?;
        let [position] = at.strided("positions", *positions, DType::U32, &[Some(len)])?;
        // The tables' rows are whole pieces where those of x are, and they start where a pool block does.
        at.contiguous("tables", tables.cos.view(), DType::F32, &[None, Some(rotary_dim / 2)])?;
        let x = match x {
            RopeInput::From(x) => at.rows("x", *x, dtype, &shape(Some(len)))?,
            RopeInput::InPlace => out_strides,
        };
        Ok(Rows { x, out: out_strides, position, tokens })
    }

    fn cpu(problem: &RopeProblem, _: &Rows, args: &mut RopeArgs<'_>) {
        cpu::run(problem, args);
    }

    fn launch(run: &Run<'_, Self>, rows: Rows, args: &RopeArgs<'_>) -> Result<(), Error> {
        let RopeArgs { x, positions, tables, out } = args;
        let x = match x {
            RopeInput::From(x) => (*x).into(),
            RopeInput::InPlace => out.into(),
        };
        let tile = if run.is_aligned { run.choice.variant.tile } else { RopeTile::Scalar };
        let dims = dims(run.problem, tile, args, rows);
        let grid = check_blocks(OP, "out", dims.tiles.blocks(BLOCK_PIECES_LOG2))?;
        let (cos, sin) = (tables.cos.view(), tables.sin.view());
        let params = [x, (*positions).into(), cos.into(), sin.into(), out.into(), (&dims).into()];
        let entry = run.kernels.fitting(run.is_aligned);
        // SAFETY: `check` found every head of x and out inside its view, and as many positions as tokens; the tables
        // have max_position rows, which the kernel keeps to. `is_aligned` holds only for what can be read in pieces of
        // 16 bytes.
        unsafe { entry.launch(run.stream, [grid, 1, 1], [THREADS, 1, 1], &params) }
    }

    fn work(problem: &RopeProblem) -> Work {
        let RopeProblem { tokens, heads, head_dim, rotary_dim, style, dtype } = *problem;
        let [tokens, heads, head_dim, rotary_dim] = [tokens, heads, head_dim, rotary_dim].map(count);
        Work {
            problem: format!("{} {rotary_dim} of [{tokens}, {heads}, {head_dim}] {dtype}", style.name()),
            // Each token's position and angles are read once.
            bytes: tokens
                * (count(2 * dtype.bytes()) * heads * head_dim + count(4) * (rotary_dim + count(1))),
            flops: count(3) * tokens * heads * rotary_dim,
        }
    }

    fn tile(_: &Device, _: &RopeProblem, choice: &Choice<Self::Variant>) -> String {
        format!("{:?}", choice.variant.tile)
    }
}

fn dims(problem: &RopeProblem, tile: RopeTile, args: &RopeArgs<'_>, rows: Rows) -> RopeDims {
    let RopeProblem { heads, head_dim, rotary_dim, style, dtype, .. } = *problem;
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
    let ([x_token_stride, x_head_stride], [out_token_stride, out_head_stride]) = (rows.x, rows.out);
    RopeDims {
        tiles: RowTiles::new(rows.tokens, (groups * units) as u32, BLOCK_PIECES_LOG2),
        heads: heads as u32,
        groups: groups as u32,
        units: units as u32,
        rotated_units: rotated_units as u32,
        rotary_dim: rotary_dim as u32,
        max_position: args.tables.max_position() as u32,
        x_token_stride,
        x_head_stride,
        out_token_stride,
        out_head_stride,
        position_stride: rows.position,
    }
}
