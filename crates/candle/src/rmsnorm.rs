//! Norms of rows.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use host::ops::rmsnorm as ops;

use crate::Refused;
use crate::operand::{Operand, Output, cpu};

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
    fn run(
        &self,
        x: Operand<'_>,
        weight: Operand<'_>,
        shape: &[usize],
    ) -> std::result::Result<Output, Refused> {
        let mut out = Output::new(self.name(), shape, x.dtype())?;
        let (stream, rows) = (cpu()?, [x.shape()[0], x.shape()[1]]);
        let problem = ops::RmsNormProblem {
            weight: self.weight,
            ..ops::RmsNormProblem::new(rows[0], rows[1], x.dtype(), self.eps)
        };
        let norm = ops::RmsNorm::plan(stream.device(), problem)?;
        norm.run(stream, ops::RmsNormArgs::new(x.view()?, weight.view()?, out.view_mut(&rows)?))?;
        Ok(out)
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "warpforge-rmsnorm"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = Operand::merged(self.name(), "x", s1, l1, 1)?;
        let weight = Operand::rows(self.name(), "weight", s2, l2)?;
        Ok(self.run(x, weight, l1.dims())?.finish())
    }

    crate::on_the_cpu_alone!(_a, _b);
}

/// `x · rsqrt(mean(x²) + eps) · weight` over the last axis.
///
/// **Errors**: candle's, around a [`Refused`].
pub fn rmsnorm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    x.apply_op2(weight, RmsNorm { eps, weight: ops::NormWeight::Plain })
}
