//! Linear layers.

use crate::loader::Loader;
use crate::part::Cut;
use host::Error;
use host::Stream;
use host::ops::matmul::{Matmul, MatmulArgs};
use host::{Constant, TensorView, TensorViewMut};

/// `y = x · weightᵀ (+ bias)`.
#[derive(Debug)]
pub struct Linear {
    /// `[out, in]`, as checkpoints store it.
    pub weight: Constant,
    /// `[out]`.
    pub bias: Option<Constant>,
}

impl Linear {
    /// Several projections of the same input as one: their rows above each other.
    pub(crate) fn new(
        loader: &mut Loader<'_>,
        parts: &[(&str, Cut)],
        cols: &Cut,
        bias: bool,
    ) -> Result<Self, Error> {
        let named = |suffix: &str| -> Vec<(String, Cut)> {
            parts.iter().map(|(name, rows)| (format!("{name}.{suffix}"), rows.clone())).collect()
        };
        let weight = loader.stacked(&named("weight"), cols)?;
        let bias = if bias { Some(loader.vectors(&named("bias"))?) } else { None };
        Ok(Linear { weight, bias })
    }

    /// With the product planned for it.
    pub(crate) fn run(
        &self,
        stream: &Stream,
        plan: &Matmul,
        x: TensorView<'_>,
        out: TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let bias = self.bias.as_ref().map(Constant::view);
        plan.run(stream, MatmulArgs { bias, ..MatmulArgs::new(x, self.weight.view(), out) })
    }
}
