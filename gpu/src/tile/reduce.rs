//! Reductions over a block.

use cuda_std::{shared, thread, warp};

/// Sum over all threads of the block; every thread gets it, the same bits each.
///
/// Uses the first 128 bytes of the dynamic shared memory. One barrier: each warp adds up the warps' sums itself.
///
/// # Safety
/// - *converged*: all threads of the block, a multiple of 32 and at most 1024, execute it.
/// - *exclusive*: nothing else lives in those 128 bytes, and one call per kernel: a second would need a barrier
///   between.
#[inline(always)]
pub unsafe fn block_sum_f32(value: f32) -> f32 {
    // SAFETY: all threads take part — the caller. Slot `warp_idx` < 32 is this warp's own; the reads come after the
    // barrier that follows the writes, and only of slots that a warp of the block wrote.
    unsafe {
        let sum = warp::sum_f32::<32>(value);
        let (lane, base) = (thread::lane(), shared::base());
        if lane == 0 {
            shared::store_f32(base + 4 * thread::warp_idx(), sum);
        }
        thread::sync_threads();
        let num_warps = thread::block_dim_x() / 32;
        let partial = if lane < num_warps { shared::load_f32(base + 4 * lane) } else { 0.0 };
        warp::sum_f32::<32>(partial)
    }
}
