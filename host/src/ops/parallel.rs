//! How the CPU backend spreads work over threads.

use rayon::prelude::*;

/// Below this many elements a loop is not worth handing to other threads.
const MIN_PARALLEL_ELEMENTS: usize = 1 << 14;

/// Calls `body(row)` for every row below `rows`, in parallel if `elements` altogether are enough to pay for it.
pub(crate) fn for_rows(rows: usize, elements: usize, body: impl Fn(usize) + Sync + Send) {
    // One loop over threads for all bodies: it takes longer to compile than most of them.
    let body: &(dyn Fn(usize) + Sync) = &body;
    if elements < MIN_PARALLEL_ELEMENTS || rows < 2 {
        (0..rows).for_each(body);
    } else {
        (0..rows).into_par_iter().for_each(body);
    }
}

/// A mutable slice that several threads write, each its own elements.
#[derive(Clone, Copy)]
pub(crate) struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    life: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it hands out disjoint parts of a slice that is borrowed mutably — the callers of `part` keep them disjoint.
unsafe impl<T: Send> Send for SharedSlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        SharedSlice { start: slice.as_mut_ptr(), len: slice.len(), life: std::marker::PhantomData }
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    /// No two parts that are alive at the same time overlap.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start, "part {start}+{len} of {}", self.len);
        // SAFETY: inside the slice, by the assertion; unshared — the caller.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}
