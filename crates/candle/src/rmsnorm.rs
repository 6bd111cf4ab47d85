//! Norms of rows.

use candle_core::{CustomOp2, Layout, Result, Shape, Tensor};
use host::ops::rmsnorm as ops;

use crate::Refused;
use crate::operand::{Operand, Output, Storage};
use crate::plans::{Plans, most};

/// Root mean square normalisation of the last axis: the first tensor is what is normalised, the second the weight, of
/// one axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    /// Added to the mean of the squares, inside the root.
    pub eps: f32,
    /// What the stored weights mean.
    pub weight: ops::NormWeight,
}

impl RmsNorm {
    fn run<S: Storage>(
        &self,
        x: Operand<'_, S>,
        weight: Operand<'_, S>,
        shape: &[usize],
    ) -> std::result::Result<Output<S>, Refused> {
        static PLANS: Plans<ops::RmsNormProblem, ops::RmsNorm> = Plans::new();
        let mut out = Output::new(self.name(), &x, shape, x.dtype())?;
        let (stream, rows) = (x.stream()?, [x.shape()[0], x.shape()[1]]);
        let problem = ops::RmsNormProblem {
            weight: self.weight,
            ..ops::RmsNormProblem::new(most(rows[0]), rows[1], x.dtype(), self.eps)
        };
        let norm = PLANS.of(stream.device(), problem, ops::RmsNorm::plan)?;
        norm.run(&stream, ops::RmsNormArgs::new(x.view()?, weight.view()?, out.view_mut(&rows)?))?;
        Ok(out)
    }
}

impl RmsNorm {
    fn forward<S: Storage>(&self, [(s1, l1), (s2, l2)]: [(&S, &Layout); 2]) -> Result<(S, Shape)> {
        let x = Operand::merged(self.name(), "x", s1, l1, 1)?;
        let weight = Operand::rows(self.name(), "weight", s2, l2)?;
        Ok(self.run(x, weight, l1.dims())?.finish())
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "warpforge-rmsnorm"
    }

    crate::forward!(s1 l1, s2 l2);
}

/// `x · rsqrt(mean(x²) + eps) · weight` over the last axis.
///
/// **Errors**: candle's, around a [`Refused`].
pub fn rmsnorm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    x.apply_op2(weight, RmsNorm { eps, weight: ops::NormWeight::Plain })
}
