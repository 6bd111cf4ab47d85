//! Matrix products.

use candle_core::{CustomOp2, Layout, Result, Shape, Tensor};
use host::ops::matmul as ops;

use crate::Refused;
use crate::operand::{Operand, Output, Storage};
use crate::plans::{Plans, most};

/// The product of candle's `a.matmul(b)`: `[…, m, k]` times `[…, k, n]`, or times one `[k, n]` for all. A transposed b,
/// `weight.t()` of a linear layer, is not copied; any other is, since the operator reads it by columns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Matmul;

impl Matmul {
    fn run<S: Storage>(
        a: Operand<'_, S>,
        b: Operand<'_, S>,
        shape: &[usize],
    ) -> std::result::Result<Output<S>, Refused> {
        static PLANS: Plans<ops::MatmulProblem, ops::Matmul> = Plans::new();
        let mut out = Output::new(Self.name(), &a, shape, a.dtype())?;
        let stream = a.stream()?;
        let (a_shape, b_shape) = (a.shape(), b.shape());
        let (batch, m, n, k) = match (a_shape, b_shape) {
            (&[m, k], &[n, _]) => (1, m, n, k),
            (&[batch, m, k], &[_, n, _]) => (batch, m, n, k),
            _ => {
                let (op, argument, got) = (Self.name(), "b", b_shape.to_vec());
                return Err(Refused::Shape { op, argument, expected: "as many axes as a", got });
            }
        };
        let problem = ops::MatmulProblem { batch, ..ops::MatmulProblem::new(most(m), n, k, a.dtype()) };
        let matmul = PLANS.of(stream.device(), problem, ops::Matmul::plan)?;
        let whole = [batch, m, n];
        let out_view = out.view_mut(&whole[usize::from(a_shape.len() == 2)..])?;
        matmul.run(&stream, ops::MatmulArgs::new(a.view()?, b.view()?, out_view))?;
        Ok(out)
    }
}

impl Matmul {
    fn forward<S: Storage>(&self, [(s1, l1), (s2, l2)]: [(&S, &Layout); 2]) -> Result<(S, Shape)> {
        let op = self.name();
        let (a_rank, b_rank) = (l1.dims().len(), l2.dims().len());
        let wrong = |argument, expected, layout: &Layout| {
            let got = layout.dims().to_vec();
            candle_core::Error::from(Refused::Shape { op, argument, expected, got })
        };
        if a_rank < 2 {
            return Err(wrong("a", "[…, m, k]", l1));
        }
        let lead = &l1.dims()[..a_rank - 2];
        if b_rank < 2 || (b_rank != 2 && l2.dims()[..b_rank - 2] != *lead) {
            return Err(wrong("b", "[k, n], or a's leading axes before it", l2));
        }
        let (k, n) = (l2.dims()[b_rank - 2], l2.dims()[b_rank - 1]);
        if l1.dims()[a_rank - 1] != k {
            return Err(wrong("b", "as many rows as a has columns", l2));
        }
        let transposed = l2.transpose(b_rank - 2, b_rank - 1)?;
        let shape = [lead, &[l1.dims()[a_rank - 2], n]].concat();
        let (a, b) = if b_rank == 2 {
            (Operand::merged(op, "a", s1, l1, 1)?, Operand::rows(op, "b", s2, &transposed)?)
        } else {
            (Operand::merged(op, "a", s1, l1, 2)?, Operand::merged(op, "b", s2, &transposed, 2)?)
        };
        Ok(Self::run(a, b, &shape)?.finish())
    }
}

impl CustomOp2 for Matmul {
    fn name(&self) -> &'static str {
        "warpforge-matmul"
    }

    crate::forward!(s1 l1, s2 l2);
}

/// `a · b`.
///
/// **Errors**: candle's, around a [`Refused`].
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.apply_op2(b, Matmul)
}
