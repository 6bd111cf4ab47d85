//! An operator's tensors, described once: for the tests that try each of them wrong, alone in its row, and those that
//! count what a run allocates.

use std::fmt;

use abi::DType;

use crate::error::Error;
use crate::stream::Stream;
use crate::tensor::TensorViewMut;

/// A tensor of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleTensor {
    /// Its name, as errors call it.
    pub name: &'static str,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Type of the elements. Those of [`DType::U32`] are to ascend from 0: numbers of rows, and where groups begin.
    pub dtype: DType,
    /// Axes of which there may be more.
    pub free_axes: &'static [usize],
    /// Whether elements may be apart.
    pub strided: bool,
}

/// What is run with the tensors.
type RunOf = Box<dyn Fn(&Stream, &mut [TensorViewMut<'_>]) -> Result<(), Error>>;

/// A planned operator with the tensors of a run.
pub struct Sample {
    /// The operator.
    pub op: &'static str,
    /// The tensors, in the order that [`Sample::run`] takes them in.
    pub tensors: Vec<SampleTensor>,
    run: RunOf,
}

impl Sample {
    pub(crate) fn new<const N: usize>(
        op: &'static str,
        tensors: [SampleTensor; N],
        run: impl Fn(&Stream, &mut [TensorViewMut<'_>; N]) -> Result<(), Error> + 'static,
    ) -> Self {
        let run = move |stream: &Stream, tensors: &mut [TensorViewMut<'_>]| {
            let got = tensors.len();
            match tensors.try_into() {
                Ok(tensors) => run(stream, tensors),
                Err(_) => Err(Error::invalid(op, "tensors", format!("{N} of them"), got.to_string())),
            }
        };
        Sample { op, tensors: tensors.into(), run: Box::new(run) }
    }

    /// Runs once. It allocates nothing but what the operator does.
    pub fn run(&self, stream: &Stream, tensors: &mut [TensorViewMut<'_>]) -> Result<(), Error> {
        (self.run)(stream, tensors)
    }
}

impl fmt::Debug for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sample").field("op", &self.op).field("tensors", &self.tensors).finish()
    }
}

/// A tensor of exactly these sizes, whose innermost elements are neighbours.
pub(crate) fn tensor(name: &'static str, shape: &[usize], dtype: DType) -> SampleTensor {
    SampleTensor { name, shape: shape.into(), dtype, free_axes: &[], strided: false }
}

impl SampleTensor {
    /// Of which there may be more along the first axis.
    pub(crate) fn or_more(self) -> Self {
        SampleTensor { free_axes: &[0], ..self }
    }

    /// Whose elements may be apart.
    pub(crate) fn of_any_strides(self) -> Self {
        SampleTensor { strided: true, ..self }
    }
}
