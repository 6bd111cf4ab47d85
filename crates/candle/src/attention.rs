//! Attention.

use candle_core::{CustomOp3, Layout, Result, Shape, Tensor};
use host::ops::attention as ops;

use crate::Refused;
use crate::operand::{Operand, Output, Storage};
use crate::plans::{Plans, most};

/// Scaled dot product attention with grouped heads: queries `[batch, heads, tokens, head_dim]`, keys and values
/// `[batch, kv_heads, keys, …]`, where `heads` is a multiple of `kv_heads`: nothing has to be repeated, and transposed
/// heads are not copied. Head dims are multiples of 8.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Attention {
    /// What products are multiplied by; `head_dim`^−½ if none.
    pub scale: Option<f32>,
    /// Whether a query sees only the keys up to its own place, the last query's being that of the last key.
    pub causal: bool,
    /// How many of those it sees, if not all.
    pub window: Option<usize>,
    /// A soft cap of the scores, if any.
    pub soft_cap: Option<f32>,
}

impl Attention {
    /// With a causal mask.
    pub fn causal() -> Self {
        Attention { causal: true, ..Self::default() }
    }

    fn run<S: Storage>(
        &self,
        q: Operand<'_, S>,
        k: Operand<'_, S>,
        v: Operand<'_, S>,
    ) -> std::result::Result<Output<S>, Refused> {
        static PLANS: Plans<ops::AttentionProblem, ops::Attention> = Plans::new();
        let op = self.name();
        let four = |argument, operand: &Operand<'_, S>| match *operand.shape() {
            [batch, heads, tokens, dim] => Ok([batch, heads, tokens, dim]),
            _ => {
                let (expected, got) = ("[batch, heads, tokens, head_dim]", operand.shape().to_vec());
                Err(Refused::Shape { op, argument, expected, got })
            }
        };
        let ([batch, heads, tokens, dim], [_, kv_heads, keys, _]) = (four("q", &q)?, four("k", &k)?);
        let [_, _, _, dim_v] = four("v", &v)?;
        let mut out = Output::new(op, &q, &[batch, heads, tokens, dim_v], q.dtype())?;
        let problem = ops::AttentionProblem {
            head_dim_v: dim_v,
            scale: self.scale,
            mask: if self.causal { ops::Mask::Causal } else { ops::Mask::None },
            window: self.window,
            scores: ops::Scores { soft_cap: self.soft_cap, ..ops::Scores::default() },
            ..ops::AttentionProblem::new(batch, [most(tokens), most(keys)], [heads, kv_heads], dim, q.dtype())
        };
        let stream = q.stream()?;
        let attention = PLANS.of(stream.device(), problem, ops::Attention::plan)?;
        let (q, k, v) = (q.view()?.swap_axes(1, 2)?, k.view()?.swap_axes(1, 2)?, v.view()?.swap_axes(1, 2)?);
        let out_view = out.view_mut(&[batch, heads, tokens, dim_v])?.swap_axes(1, 2)?;
        attention.run(&stream, ops::AttentionArgs::new(q, k, v, out_view))?;
        Ok(out)
    }
}

impl Attention {
    fn forward<S: Storage>(&self, [(s1, l1), (s2, l2), (s3, l3)]: [(&S, &Layout); 3]) -> Result<(S, Shape)> {
        let q = Operand::rows(self.name(), "q", s1, l1)?;
        let k = Operand::rows(self.name(), "k", s2, l2)?;
        let v = Operand::rows(self.name(), "v", s3, l3)?;
        Ok(self.run(q, k, v)?.finish())
    }
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "warpforge-attention"
    }

    crate::forward!(s1 l1, s2 l2, s3 l3);
}

/// `softmax(scale · q·kᵀ + mask) · v`, of the queries' shape.
///
/// **Errors**: candle's, around a [`Refused`].
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, how: Attention) -> Result<Tensor> {
    q.apply_op3(k, v, how)
}
