//! Rotations of pairs by the angles of a table.

use cuda_std::{global, math};

/// The pair (a, b) rotated by the angle of `cos` and `sin`, in f32.
#[inline(always)]
pub fn rotate(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    (math::fma(a, cos, -(b * sin)), math::fma(b, cos, a * sin))
}

/// `N` = 2, 4 or 8 table entries.
///
/// # Safety
/// - *in-bounds*, and *aligned(16)* for `N` of 4 and 8.
#[inline(always)]
pub unsafe fn load_angles<const N: usize>(table: *const f32) -> [f32; 8] {
    let mut angles = [0.0; 8];
    // SAFETY: the caller's promise.
    unsafe {
        if N == 2 {
            angles[0] = global::load(table);
            angles[1] = global::load(table.add(1));
        } else {
            let mut i = 0;
            while i < N {
                let four = global::load_nc_x4(table.add(i));
                angles[i] = f32::from_bits(four[0]);
                angles[i + 1] = f32::from_bits(four[1]);
                angles[i + 2] = f32::from_bits(four[2]);
                angles[i + 3] = f32::from_bits(four[3]);
                i += 4;
            }
        }
    }
    angles
}
