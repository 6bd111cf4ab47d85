//! `--check`: where a value first became infinite or NaN.

use half::{bf16, f16};
use warpforge::models::Observed;
use warpforge::{DType, Error, Stream, TensorView};

/// Looks at the tensors of a forward pass, in their order.
#[derive(Default)]
pub struct Check {
    found: Option<String>,
}

impl Check {
    /// What an observer does.
    pub fn look(&mut self, stream: &Stream, observed: Observed, tensor: TensorView<'_>) -> Result<(), Error> {
        self.look_at(stream, &observed, tensor)
    }

    pub fn look_at_logits(&mut self, stream: &Stream, logits: TensorView<'_>) -> Result<(), Error> {
        self.look_at(stream, &"the logits", logits)
    }

    fn look_at(
        &mut self,
        stream: &Stream,
        what: &dyn std::fmt::Display,
        tensor: TensorView<'_>,
    ) -> Result<(), Error> {
        if self.found.is_some() {
            return Ok(());
        }
        let values: Vec<f32> = match tensor.dtype() {
            DType::F16 => tensor.to_vec::<f16>(stream)?.into_iter().map(f16::to_f32).collect(),
            DType::BF16 => tensor.to_vec::<bf16>(stream)?.into_iter().map(bf16::to_f32).collect(),
            _ => tensor.to_vec::<f32>(stream)?,
        };
        let Some(index) = values.iter().position(|value| !value.is_finite()) else { return Ok(()) };
        let columns = tensor.shape().last().copied().unwrap_or(1).max(1);
        let value = values[index];
        let largest =
            values.iter().filter(|value| value.is_finite()).fold(0.0f32, |most, x| most.max(x.abs()));
        self.found = Some(format!(
            "{value} in {what}: token {}, column {}; the largest finite value of this tensor is {largest:e}, its type {}{}",
            index / columns,
            index % columns,
            tensor.dtype(),
            if tensor.dtype() == DType::F16 { ", which ends at 65504: try --dtype bf16" } else { "" }
        ));
        Ok(())
    }

    /// The error if something was found.
    pub fn end(&self) -> Result<(), String> {
        self.found.as_ref().map_or(Ok(()), |found| Err(format!("the first value that is no number: {found}")))
    }
}

#[cfg(test)]
mod tests {
    use warpforge::{Device, Tensor};

    use super::*;

    #[test]
    fn the_first_one_is_named() -> Result<(), crate::output::Failure> {
        let stream = Device::cpu().stream()?;
        let of = |values: &[f16]| Tensor::from_slice(&stream, &[2, 3], values);
        let mut values = [1.0, -7.5, 2.0, 0.0, 3.0, 4.0].map(f16::from_f32);
        let fine = of(&values)?;
        values[4] = f16::INFINITY;
        let first = of(&values)?;
        values[0] = f16::NAN;
        let second = of(&values)?;
        let mut check = Check::default();
        check.look(&stream, Observed::LayerInput(0), fine.view())?;
        assert_eq!(check.end(), Ok(()));
        check.look(&stream, Observed::FeedForwardOutput(3), first.view())?;
        check.look(&stream, Observed::FinalNorm, second.view())?;
        let want = "the first value that is no number: inf in layer 3, the feed-forward part's output: token 1, column 1; \
                    the largest finite value of this tensor is 7.5e0, its type f16, which ends at 65504: try --dtype bf16";
        assert_eq!(check.end(), Err(want.into()));
        Ok(())
    }
}
