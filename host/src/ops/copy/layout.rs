//! Two strided tensors of one shape as rows.

use super::OP;
use crate::error::Error;
use crate::ops::check_size;
use crate::tensor::MAX_RANK;

/// Most dimensions, after those that lie without gaps in both tensors are merged.
pub(super) const MAX_DIMS: usize = 4;

/// A shape of exactly [`MAX_DIMS`] dimensions, the last of which is a row, and its strides in src and dst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(super) shape: [usize; MAX_DIMS],
    pub(super) src: [usize; MAX_DIMS],
    pub(super) dst: [usize; MAX_DIMS],
}

impl Layout {
    /// The layout; dimensions of size 1 vanish and mergeable ones merge, as far as a row stays below 2^31 elements.
    pub(super) fn new(shape: &[usize], src: &[usize], dst: &[usize]) -> Result<Self, Error> {
        // Innermost first.
        let (mut dims, mut rank) = ([(1, 0, 0); MAX_RANK], 0);
        for axis in (0..shape.len()).rev().filter(|&axis| shape[axis] != 1) {
            match dims[..rank].last_mut() {
                Some((size, src_stride, dst_stride))
                    if *size * *src_stride == src[axis]
                        && *size * *dst_stride == dst[axis]
                        && *size * shape[axis] < 1 << 31 =>
                {
                    *size *= shape[axis];
                }
                _ => {
                    dims[rank] = (shape[axis], src[axis], dst[axis]);
                    rank += 1;
                }
            }
        }
        if rank > MAX_DIMS {
            let got = format!("{shape:?} with strides {src:?} and {dst:?}");
            let expected = format!("at most {MAX_DIMS} dimensions that cannot be merged");
            return Err(Error::invalid(OP, "dst", expected, got));
        }
        let mut layout = Layout { shape: [1; MAX_DIMS], src: [0; MAX_DIMS], dst: [0; MAX_DIMS] };
        // A single element is a row of stride 1.
        (layout.src[MAX_DIMS - 1], layout.dst[MAX_DIMS - 1]) = (1, 1);
        for (axis, (size, src, dst)) in std::iter::zip((0..MAX_DIMS).rev(), &dims[..rank]) {
            (layout.shape[axis], layout.src[axis], layout.dst[axis]) = (*size, *src, *dst);
        }
        for size in layout.shape {
            check_size(OP, "dst", "dimension", size)?;
        }
        check_size(OP, "dst", "rows", layout.rows())?;
        Ok(layout)
    }

    pub(super) fn rows(&self) -> usize {
        self.shape[..MAX_DIMS - 1].iter().fold(1, |rows: usize, &size| rows.saturating_mul(size))
    }

    pub(super) fn cols(&self) -> usize {
        self.shape[MAX_DIMS - 1]
    }

    /// Where row `row` starts in src and dst.
    pub(super) fn row_offsets(&self, row: usize) -> (usize, usize) {
        let [_, middle, inner, _] = self.shape;
        let index = [row / inner / middle, row / inner % middle, row % inner];
        let offset = |strides: &[usize]| std::iter::zip(index, strides).map(|(i, stride)| i * stride).sum();
        (offset(&self.src), offset(&self.dst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging() {
        let layout = |shape: &[usize], src: &[usize], dst: &[usize]| Layout::new(shape, src, dst).unwrap();
        let contiguous = layout(&[2, 3, 4, 5], &[60, 20, 5, 1], &[60, 20, 5, 1]);
        assert_eq!((contiguous.shape, contiguous.src[3]), ([1, 1, 1, 120], 1));
        // A gap in dst after two dimensions.
        let gap = layout(&[2, 3, 4], &[12, 4, 1], &[100, 4, 1]);
        assert_eq!((gap.shape, gap.src, gap.dst), ([1, 1, 2, 12], [0, 0, 12, 1], [0, 0, 100, 1]));
        assert_eq!((gap.row_offsets(1), gap.rows(), gap.cols()), ((12, 100), 2, 12));
        let one = layout(&[1, 1], &[7, 9], &[3, 2]);
        assert_eq!((one.shape, one.src[3], one.dst[3]), ([1; 4], 1, 1));
        assert_eq!(layout(&[3, 0], &[0, 1], &[0, 1]).cols(), 0);
        // 2^32 elements stay two dimensions.
        let large = 1 << 16;
        assert_eq!(layout(&[large, large], &[large, 1], &[large, 1]).shape, [1, 1, large, large]);
        let permuted = layout(&[2, 3, 4], &[1, 2, 6], &[12, 4, 1]);
        assert_eq!((permuted.shape, permuted.row_offsets(5)), ([1, 2, 3, 4], (1 + 2 * 2, 12 + 2 * 4)));
        let error = Layout::new(&[2; 5], &[16, 8, 4, 2, 1], &[1, 2, 4, 8, 16]).unwrap_err();
        assert!(
            error.to_string().starts_with("copy: dst: expected at most 4 dimensions that cannot be merged")
        );
    }
}
