//! Gated linear units.

use candle_core::{CustomOp2, Layout, Result, Shape, Tensor};
use host::ops::glu as ops;

use crate::operand::{Operand, Output, Storage};
use crate::plans::{Plans, most};
use crate::{Activation, Refused};

/// `act(gate) · up`, of two tensors of one shape, gate first. Both may be halves of one: `joint.narrow(…)` is not
/// copied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Glu {
    /// What is made of the gate.
    pub activation: Activation,
}

impl Glu {
    fn run<S: Storage>(
        &self,
        gate: Operand<'_, S>,
        up: Operand<'_, S>,
        shape: &[usize],
    ) -> std::result::Result<Output<S>, Refused> {
        static PLANS: Plans<ops::GluProblem, ops::Glu> = Plans::new();
        let mut out = Output::new(self.name(), &gate, shape, gate.dtype())?;
        let (stream, rows) = (gate.stream()?, [gate.shape()[0], gate.shape()[1]]);
        let problem = ops::GluProblem::new(most(rows[0]), rows[1], gate.dtype(), self.activation);
        let glu = PLANS.of(stream.device(), problem, ops::Glu::plan)?;
        let out_view = out.view_mut(&rows)?;
        let args = ops::GluArgs { up: Some(up.view()?), ..ops::GluArgs::new(gate.view()?, out_view) };
        glu.run(&stream, args)?;
        Ok(out)
    }
}

impl Glu {
    fn forward<S: Storage>(&self, [(s1, l1), (s2, l2)]: [(&S, &Layout); 2]) -> Result<(S, Shape)> {
        if l1.dims() != l2.dims() {
            let (op, argument, got) = (self.name(), "up", l2.dims().to_vec());
            return Err(Refused::Shape { op, argument, expected: "the gate's shape", got }.into());
        }
        let gate = Operand::merged(self.name(), "gate", s1, l1, 1)?;
        let up = Operand::merged(self.name(), "up", s2, l2, 1)?;
        Ok(self.run(gate, up, l1.dims())?.finish())
    }
}

impl CustomOp2 for Glu {
    fn name(&self) -> &'static str {
        "warpforge-glu"
    }

    crate::forward!(s1 l1, s2 l2);
}

/// `silu(gate) · up`.
///
/// **Errors**: candle's, around a [`Refused`].
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    gate.apply_op2(up, Glu { activation: Activation::Silu })
}
