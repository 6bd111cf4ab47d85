//! Tensors from and to arrays of the crate `ndarray`: feature `ndarray`.

use ndarray::{ArrayBase, ArrayD, Data, Dimension, IxDyn};

use super::{Element, Tensor, TensorView};
use crate::error::Error;
use crate::stream::Stream;

impl Tensor {
    /// A tensor of an array's elements, in the array's order of axes, whatever its memory's. Feature `ndarray`.
    ///
    /// ```
    /// # extern crate host as warpforge;
    /// use ndarray::arr2;
    /// use warpforge::{Device, Error, Tensor};
    ///
    /// # fn main() -> Result<(), Error> {
    /// let stream = Device::cpu().stream()?;
    /// let array = arr2(&[[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]);
    /// let tensor = Tensor::from_ndarray(&stream, &array.t())?;
    /// assert_eq!(tensor.shape(), [3, 2]);
    /// assert_eq!(tensor.to_ndarray::<f32>(&stream)?, array.t().into_dyn());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// **Errors**: as [`Tensor::from_slice`].
    #[track_caller]
    pub fn from_ndarray<S, D>(stream: &Stream, array: &ArrayBase<S, D>) -> Result<Self, Error>
    where
        S: Data<Elem: Element>,
        D: Dimension,
    {
        match array.as_slice() {
            Some(elements) => Self::from_slice(stream, array.shape(), elements),
            None => Self::from_slice(stream, array.shape(), &array.iter().copied().collect::<Vec<_>>()),
        }
    }

    /// The elements as an array of the tensor's shape, after all work on `stream` so far. Feature `ndarray`.
    ///
    /// **Errors**: as [`Tensor::to_vec`].
    pub fn to_ndarray<T: Element>(&self, stream: &Stream) -> Result<ArrayD<T>, Error> {
        self.view().to_ndarray(stream)
    }
}

impl TensorView<'_> {
    /// The elements as an array of the view's shape, after all work on `stream` so far. Feature `ndarray`.
    ///
    /// **Errors**: as [`TensorView::to_vec`].
    pub fn to_ndarray<T: Element>(&self, stream: &Stream) -> Result<ArrayD<T>, Error> {
        let elements = self.to_vec(stream)?;
        // As many as the shape has: what ndarray refuses is a shape beyond its own bounds.
        ArrayD::from_shape_vec(IxDyn(self.shape()), elements).map_err(|error| {
            let (expected, got) = ("a shape that ndarray takes".to_owned(), format!("{:?}", self.shape()));
            Error::invalid("TensorView::to_ndarray", "shape", expected, format!("{got}: {error}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array, Array0, IxDyn, s};
    use proptest::prelude::*;

    use crate::device::Device;
    use crate::tensor::Tensor;

    proptest! {
        /// Axes in any order, and steps: element by element what the array says at each index.
        #[test]
        fn arrays_come_and_go(
            shape in prop::collection::vec(0usize..5, 1..5),
            turn in 0usize..5,
            step in 1isize..3,
        ) {
            let stream = Device::cpu().stream().unwrap();
            let mut count = 0;
            let array = Array::from_shape_simple_fn(IxDyn(&shape), || { count += 1; count });
            let mut axes: Vec<usize> = (0..shape.len()).collect();
            axes.rotate_left(turn % shape.len());
            let mut array = array.permuted_axes(axes);
            array.slice_each_axis_inplace(|_| ndarray::Slice::from(..).step_by(step));
            let tensor = Tensor::from_ndarray(&stream, &array).unwrap();
            prop_assert_eq!(tensor.shape(), array.shape());
            prop_assert_eq!(tensor.to_vec::<i32>(&stream).unwrap(), array.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(tensor.to_ndarray::<i32>(&stream).unwrap(), array);
        }
    }

    #[test]
    fn of_no_axes_parts_and_other_types() {
        let stream = Device::cpu().stream().unwrap();
        let one = Tensor::from_ndarray(&stream, &Array0::from_elem((), 3.5f32)).unwrap();
        assert_eq!((one.shape(), one.to_vec::<f32>(&stream).unwrap()), (&[][..], vec![3.5]));
        let array = Array::from_shape_fn((4, 3), |(row, col)| (10 * row + col) as u32);
        let part = Tensor::from_ndarray(&stream, &array.slice(s![1..;2, ..])).unwrap();
        assert_eq!(part.to_vec::<u32>(&stream).unwrap(), [10, 11, 12, 30, 31, 32]);
        let row = part.view().slice(0, 1..2).unwrap().to_ndarray::<u32>(&stream).unwrap();
        assert_eq!(row, array.slice(s![3..4, ..]).into_dyn());
        let error = part.to_ndarray::<f32>(&stream).unwrap_err().to_string();
        assert!(error.contains("expected u32, got f32"), "{error}");
        assert!(Tensor::from_ndarray(&stream, &Array::<i8, _>::zeros(IxDyn(&[1; 6]))).is_err());
    }
}
