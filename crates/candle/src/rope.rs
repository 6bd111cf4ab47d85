//! Rotary embedding.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use host::DType;
use host::ops::rope as ops;

use crate::operand::{Operand, Output, cpu};
use crate::{Refused, RopeStyle};

/// Rotary position embedding: the first tensor has the heads, `[batch, heads, tokens, head_dim]`, the second the
/// positions, `[tokens]` or `[batch, tokens]` in u32. Transposed heads are not copied.
#[derive(Clone, Debug)]
pub struct Rope {
    tables: Arc<ops::RopeTables>,
    rotary_dim: usize,
    positions: u32,
    style: RopeStyle,
}

impl Rope {
    /// Tables of the positions below `positions`. Pair i of a head turns by `inv_freq[i]` radians from one position to
    /// the next; what is left of a head behind all pairs passes through.
    ///
    /// **Errors**: candle's, around a [`Refused`].
    pub fn new(inv_freq: &[f64], positions: u32, style: RopeStyle) -> Result<Self> {
        let stream = cpu().map_err(Refused::from)?;
        let tables =
            ops::RopeTables::new(stream, inv_freq, 1.0, positions as usize).map_err(Refused::from)?;
        Ok(Rope { tables: Arc::new(tables), rotary_dim: 2 * inv_freq.len(), positions, style })
    }

    /// The usual frequencies: `theta^(−2i / head_dim)`.
    ///
    /// **Errors**: as [`Rope::new`].
    pub fn of_theta(theta: f64, head_dim: usize, positions: u32, style: RopeStyle) -> Result<Self> {
        let power = |pair: usize| theta.powf(-2.0 * pair as f64 / head_dim as f64);
        let inv_freq: Vec<f64> = (0..head_dim / 2).map(power).collect();
        Self::new(&inv_freq, positions, style)
    }

    /// The heads, turned by their positions.
    ///
    /// **Errors**: candle's, around a [`Refused`]; a position beyond the tables is one.
    pub fn apply(&self, x: &Tensor, positions: &Tensor) -> Result<Tensor> {
        x.apply_op2(positions, self.clone())
    }

    fn run(&self, x: Operand<'_>, positions: Operand<'_>) -> std::result::Result<Output, Refused> {
        let op = self.name();
        let &[batch, heads, tokens, head_dim] = x.shape() else {
            let (argument, expected) = ("x", "[batch, heads, tokens, head_dim]");
            return Err(Refused::Shape { op, argument, expected, got: x.shape().to_vec() });
        };
        let all = positions.view()?;
        let all = match *positions.shape() {
            [rows] if rows == tokens => all.reshape(&[1, tokens])?.repeat(0, batch)?,
            [rows, each] if (rows, each) == (batch, tokens) => all,
            _ => {
                let (argument, expected) = ("positions", "[tokens] or [batch, tokens]");
                return Err(Refused::Shape { op, argument, expected, got: positions.shape().to_vec() });
            }
        };
        let mut out = Output::new(op, x.shape(), x.dtype())?;
        let stream = cpu()?;
        let problem = ops::RopeProblem {
            rotary_dim: self.rotary_dim,
            style: self.style,
            ..ops::RopeProblem::new(tokens, heads, head_dim, x.dtype())
        };
        let rope = ops::Rope::plan(stream.device(), problem)?;
        let mut left = out.view_mut(&[batch, heads, tokens, head_dim])?;
        for sequence in 0..batch {
            let of = sequence..sequence + 1;
            let turned = |axes: &[usize]| [axes[1], axes[2], axes[3]];
            let from = x.view()?.slice(0, of.clone())?;
            let from = from.reshape(&turned(from.shape()))?.swap_axes(0, 1)?;
            let (out, rest) = left.split(1)?;
            left = rest;
            let out = out.reshape(&[heads, tokens, head_dim])?.swap_axes(0, 1)?;
            let positions = all.slice(0, of)?.reshape(&[tokens])?;
            let args = ops::RopeArgs::new(ops::RopeInput::From(from), positions, &self.tables, out);
            rope.run(stream, args)?;
        }
        Ok(out)
    }
}

impl CustomOp2 for Rope {
    fn name(&self) -> &'static str {
        "warpforge-rope"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = Operand::rows(self.name(), "x", s1, l1)?;
        let positions = Operand::dense(self.name(), "positions", s2, l2)?;
        if positions.dtype() != DType::U32 {
            let (op, argument, got) = (self.name(), "positions", s2.dtype());
            return Err(Refused::DType { op, argument, expected: "u32", got }.into());
        }
        // The operator takes those beyond the tables for their last; here they can be read before.
        let stream = cpu().map_err(Refused::from)?;
        let known = positions.view()?.to_vec::<u32>(stream).map_err(Refused::from)?;
        if let Some(&beyond) = known.iter().find(|&&position| position >= self.positions) {
            let (op, argument, got) = (self.name(), "positions", vec![beyond as usize]);
            return Err(
                Refused::Shape { op, argument, expected: "positions that the tables have", got }.into()
            );
        }
        Ok(self.run(x, positions)?.finish())
    }

    crate::on_the_cpu_alone!(_a, _b);
}
