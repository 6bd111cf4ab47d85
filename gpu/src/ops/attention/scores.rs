//! What changes scores besides the scale and the mask by places.

use abi::ops::attention::AttentionDims;
use cuda_std::cvt::Element;
use cuda_std::global;

use crate::tile::activation::tanh;
use crate::tile::softmax::in_unit;

/// Whether there is a soft cap: the same for all threads.
#[inline(always)]
pub(super) fn has_cap(dims: &AttentionDims) -> bool {
    dims.scores.cap_in != 0.0
}

/// A score under the soft cap.
#[inline(always)]
pub(super) fn capped(score: f32, dims: &AttentionDims) -> f32 {
    dims.scores.cap_out * tanh(score * dims.scores.cap_in)
}

/// A head's sink, in the unit of the scores; −∞ if there are none.
///
/// # Safety
/// - `sinks` is null or has an element for every head — checked in `Attention::run`.
#[inline(always)]
pub(super) unsafe fn sink<T: Element>(sinks: *const f32, head: u32) -> f32 {
    if sinks.is_null() {
        return f32::NEG_INFINITY;
    }
    // SAFETY: the caller's promise.
    in_unit::<T>(unsafe { global::load(sinks.add(head as usize)) })
}
