//! Host images of device buffers, with guard bands around them and poison inside.
//!
//! A test copies [`Guarded::as_padded`] to the device, gives the kernel the elements of [`Guarded::payload_range`],
//! copies the whole back, puts it into [`Guarded::from_padded`] and calls [`Guarded::check_guards`]: a write outside
//! the payload is reported with its place. A read outside shows in floating-point results, since the guards are NaN.

use crate::element::{Element, show};
use std::ops::Range;

/// Bytes of each guard band; a multiple of the device's allocation alignment, so the payload keeps that alignment.
pub const GUARD_BYTES: usize = 256;

/// A payload with a guard band before and after it.
#[derive(Clone, Debug)]
pub struct Guarded<T> {
    padded: Vec<T>,
    payload: Range<usize>,
}

/// A write where none may be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BufferError {
    /// A guard element changed.
    #[error(
        "guard element {distance} {side} the payload of {len} was overwritten: it holds {found}, not {expected}"
    )]
    Guard {
        /// "before" or "after".
        side: &'static str,
        /// 1 for the element next to the payload.
        distance: usize,
        /// Length of the payload.
        len: usize,
        /// What is there now.
        found: String,
        /// The guard pattern.
        expected: String,
    },
    /// An element between two rows changed.
    #[error("padding after row {row} was overwritten: column {col} of a stride of {stride} holds {found}")]
    Padding {
        /// The row before the padding.
        row: usize,
        /// The column, at or beyond the row's length.
        col: usize,
        /// Elements from one row to the next.
        stride: usize,
        /// What is there now.
        found: String,
    },
}

impl<T: Element> Guarded<T> {
    /// A buffer that holds `values`.
    ///
    /// `offset` elements are added to the first guard band: 0 keeps the payload aligned to [`GUARD_BYTES`], 1 gives the
    /// worst alignment that a view of a tensor can have.
    pub fn new(values: &[T], offset: usize) -> Self {
        let guard = GUARD_BYTES / size_of::<T>();
        let payload = guard + offset..guard + offset + values.len();
        let mut padded = vec![T::GUARD; payload.end + guard];
        padded[payload.clone()].copy_from_slice(values);
        Guarded { padded, payload }
    }

    /// An output of `len` elements, all poison.
    pub fn poisoned(len: usize, offset: usize) -> Self {
        Self::new(&vec![T::POISON; len], offset)
    }

    /// Rows of `cols` values each, `stride` elements apart, with poison between them.
    ///
    /// # Panics
    /// When `values` is not a whole number of rows or `stride < cols`.
    pub fn strided(values: &[T], cols: usize, stride: usize, offset: usize) -> Self {
        assert!(cols > 0 && values.len().is_multiple_of(cols), "{} values in rows of {cols}", values.len());
        assert!(stride >= cols, "stride {stride} is less than the {cols} columns");
        let mut spaced = vec![T::POISON; values.len() / cols * stride];
        for (from, to) in values.chunks_exact(cols).zip(spaced.chunks_exact_mut(stride)) {
            to[..cols].copy_from_slice(from);
        }
        Self::new(&spaced, offset)
    }

    /// The buffer as it came back from the device: what [`Guarded::as_padded`] gave, with the same payload range.
    ///
    /// # Panics
    /// When the range does not lie in `padded`.
    pub fn from_padded(padded: Vec<T>, payload_range: Range<usize>) -> Self {
        assert!(
            payload_range.start <= payload_range.end && payload_range.end <= padded.len(),
            "payload {payload_range:?} in {} elements",
            padded.len()
        );
        Guarded { padded, payload: payload_range }
    }

    /// Where the payload lies in [`Guarded::as_padded`].
    pub fn payload_range(&self) -> Range<usize> {
        self.payload.clone()
    }

    /// Guards and payload.
    pub fn as_padded(&self) -> &[T] {
        &self.padded
    }

    /// The payload alone.
    pub fn payload(&self) -> &[T] {
        &self.padded[self.payload.clone()]
    }

    /// The first `cols` elements of each `stride` of the payload, one row after another.
    pub fn rows(&self, cols: usize, stride: usize) -> Vec<T> {
        self.payload().chunks(stride).flat_map(|row| &row[..cols.min(row.len())]).copied().collect()
    }

    /// Index of the first payload element that still holds the poison pattern.
    ///
    /// For floats and wide integers that means it was never written; an 8-bit result may hold the pattern by chance.
    pub fn first_unwritten(&self) -> Option<usize> {
        self.payload().iter().position(|value| value.bits() == T::POISON.bits())
    }

    /// Checks that both guard bands are as they were.
    pub fn check_guards(&self) -> Result<(), BufferError> {
        let (before, rest) = self.padded.split_at(self.payload.start);
        let after = &rest[self.payload.len()..];
        let changed = |value: &T| value.bits() != T::GUARD.bits();
        // The one nearest to the payload: an overrun starts there.
        let hit = match (before.iter().rev().position(changed), after.iter().position(changed)) {
            (Some(i), _) => ("before", i + 1, before[before.len() - 1 - i]),
            (None, Some(i)) => ("after", i + 1, after[i]),
            (None, None) => return Ok(()),
        };
        Err(BufferError::Guard {
            side: hit.0,
            distance: hit.1,
            len: self.payload.len(),
            found: show(hit.2),
            expected: show(T::GUARD),
        })
    }

    /// Checks that the elements from `cols` to `stride` of each row still hold poison.
    pub fn check_row_padding(&self, cols: usize, stride: usize) -> Result<(), BufferError> {
        for (row, elements) in self.payload().chunks(stride).enumerate() {
            for (col, value) in elements.iter().enumerate().skip(cols) {
                if value.bits() != T::POISON.bits() {
                    return Err(BufferError::Padding { row, col, stride, found: show(*value) });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn payload_lies_between_whole_guards() {
        for offset in [0, 1, 3] {
            let buffer = Guarded::new(&[1i8, 2, 3], offset);
            assert_eq!(buffer.payload(), [1, 2, 3]);
            assert_eq!(buffer.payload_range(), 256 + offset..259 + offset);
            assert_eq!(buffer.as_padded().len(), 2 * 256 + offset + 3);
            assert_eq!(buffer.check_guards(), Ok(()));
        }
        assert_eq!(Guarded::new(&[1.0f32], 0).payload_range().start * 4 % GUARD_BYTES, 0);
        assert!(Guarded::<f32>::poisoned(0, 0).payload().is_empty());
    }

    #[test]
    fn any_changed_guard_is_found_and_located() {
        let buffer = Guarded::<bf16>::poisoned(5, 1);
        let range = buffer.payload_range();
        for i in 0..buffer.as_padded().len() {
            let mut padded = buffer.as_padded().to_vec();
            padded[i] = bf16::NAN;
            let result = Guarded::from_padded(padded, range.clone()).check_guards();
            match result {
                Ok(()) => assert!(range.contains(&i), "element {i}"),
                Err(BufferError::Guard { side, distance, .. }) => {
                    let expected = if i < range.start {
                        ("before", range.start - i)
                    } else {
                        ("after", i + 1 - range.end)
                    };
                    assert_eq!((side, distance), expected);
                }
                Err(other) => panic!("{other}"),
            }
        }
    }

    #[test]
    fn messages() {
        let buffer = Guarded::new(&[0i32; 4], 0);
        let mut padded = buffer.as_padded().to_vec();
        padded[buffer.payload_range().end + 1] = 7;
        let error = Guarded::from_padded(padded, buffer.payload_range()).check_guards().unwrap_err();
        assert_eq!(
            error.to_string(),
            "guard element 2 after the payload of 4 was overwritten: it holds 7 (0x00000007), \
             not -1515870811 (0xa5a5a5a5)"
        );
    }

    #[test]
    fn unwritten_elements_and_row_padding() {
        let rows = Guarded::strided(&[1.0f32, 2.0, 3.0, 4.0], 2, 3, 0);
        assert_eq!(rows.first_unwritten(), Some(2));
        assert_eq!(rows.rows(2, 3), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(rows.check_row_padding(2, 3), Ok(()));
        let mut padded = rows.as_padded().to_vec();
        padded[rows.payload_range().start + 5] = f32::NAN;
        let error = Guarded::from_padded(padded, rows.payload_range()).check_row_padding(2, 3).unwrap_err();
        assert_eq!(
            error.to_string(),
            "padding after row 1 was overwritten: column 2 of a stride of 3 holds NaN (0x7fc00000)"
        );
        assert_eq!(Guarded::new(&[f32::NAN], 0).first_unwritten(), None);
    }

    #[test]
    #[should_panic(expected = "stride 2 is less than the 3 columns")]
    fn stride_below_row_length() {
        Guarded::strided(&[0.0f32; 3], 3, 2, 0);
    }

    #[test]
    #[should_panic(expected = "payload 1..9 in 4 elements")]
    fn payload_outside() {
        Guarded::from_padded(vec![0u8; 4], 1..9);
    }
}
