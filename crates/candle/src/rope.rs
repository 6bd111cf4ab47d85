//! Rotary embedding.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CustomOp2, Layout, Result, Shape, Tensor};
use host::ops::rope as ops;
use host::{DType, Place, Stream};

use crate::cpu::cpu;
use crate::operand::{Operand, Output, Storage};
use crate::plans::{Plans, most};
use crate::{Refused, RopeStyle};

/// Rotary position embedding: the first tensor has the heads, `[batch, heads, tokens, head_dim]`, the second the
/// positions, `[tokens]` or `[batch, tokens]` in u32. Transposed heads are not copied.
#[derive(Clone, Debug)]
pub struct Rope {
    inv_freq: Arc<[f64]>,
    /// For each device that heads have been on.
    tables: Arc<Mutex<Vec<OfDevice>>>,
    positions: u32,
    style: RopeStyle,
}

/// Tables in the memory of a device.
type OfDevice = (Place, Arc<ops::RopeTables>);

impl Rope {
    /// Tables of the positions below `positions`. Pair i of a head turns by `inv_freq[i]` radians from one position to
    /// the next; what is left of a head behind all pairs passes through.
    ///
    /// **Errors**: candle's, around a [`Refused`].
    pub fn new(inv_freq: &[f64], positions: u32, style: RopeStyle) -> Result<Self> {
        let rope = Rope { inv_freq: inv_freq.into(), tables: Arc::default(), positions, style };
        rope.tables_for(cpu().map_err(Refused::from)?)?;
        Ok(rope)
    }

    /// The tables in the memory of a stream's device.
    fn tables_for(&self, stream: &Stream) -> std::result::Result<Arc<ops::RopeTables>, Refused> {
        let place = stream.device().place();
        let mut all = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, tables)) = all.iter().find(|(of, _)| *of == place) {
            return Ok(Arc::clone(tables));
        }
        let tables = ops::RopeTables::new(stream, &self.inv_freq, 1.0, self.positions as usize)?;
        // Another stream may be the next to read them.
        stream.synchronize()?;
        let tables = Arc::new(tables);
        all.push((place, Arc::clone(&tables)));
        Ok(tables)
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
    /// **Errors**: candle's, around a [`Refused`]; a position beyond the tables is one, but for positions on a card:
    /// those are not looked at by the host, and one beyond the tables counts as their last.
    pub fn apply(&self, x: &Tensor, positions: &Tensor) -> Result<Tensor> {
        x.apply_op2(positions, self.clone())
    }

    fn run<S: Storage>(
        &self,
        x: Operand<'_, S>,
        positions: Operand<'_, S>,
    ) -> std::result::Result<Output<S>, Refused> {
        static PLANS: Plans<ops::RopeProblem, ops::Rope> = Plans::new();
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
        let mut out = Output::new(op, &x, x.shape(), x.dtype())?;
        let stream = x.stream()?;
        let tables = self.tables_for(&stream)?;
        let problem = ops::RopeProblem {
            rotary_dim: 2 * self.inv_freq.len(),
            style: self.style,
            ..ops::RopeProblem::new(most(tokens), heads, head_dim, x.dtype())
        };
        let rope = PLANS.of(stream.device(), problem, ops::Rope::plan)?;
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
            let args = ops::RopeArgs::new(ops::RopeInput::From(from), positions, &tables, out);
            rope.run(&stream, args)?;
        }
        Ok(out)
    }
}

impl Rope {
    fn forward<S: Storage>(&self, [(s1, l1), (s2, l2)]: [(&S, &Layout); 2]) -> Result<(S, Shape)> {
        let x = Operand::rows(self.name(), "x", s1, l1)?;
        let positions = Operand::dense(self.name(), "positions", s2, l2)?;
        if positions.dtype() != DType::U32 {
            let (op, argument, got) = (self.name(), "positions", s2.dtype());
            return Err(Refused::DType { op, argument, expected: "u32", got }.into());
        }
        // The operator takes those beyond the tables for their last; in the host's memory they can be read before.
        let stream = positions.stream()?;
        let known = match stream.device().place() {
            Place::Cpu => positions.view()?.to_vec::<u32>(&stream).map_err(Refused::from)?,
            _ => Vec::new(),
        };
        if let Some(&beyond) = known.iter().find(|&&position| position >= self.positions) {
            let (op, argument, got) = (self.name(), "positions", vec![beyond as usize]);
            return Err(
                Refused::Shape { op, argument, expected: "positions that the tables have", got }.into()
            );
        }
        Ok(self.run(x, positions)?.finish())
    }
}

impl CustomOp2 for Rope {
    fn name(&self) -> &'static str {
        "warpforge-rope"
    }

    crate::forward!(s1 l1, s2 l2);
}
