//! Values from block to block: words that a reader finds whole, with the number of their layer.

use cuda_std::atomic;

/// Tells a value of a layer.
///
/// # Safety
/// - *in-bounds*: a word of the exchange, which this thread alone writes in this layer.
#[inline(always)]
pub(super) unsafe fn tell(word: *mut u64, value: f32, layer: u32) {
    // SAFETY: the caller's promise.
    unsafe { atomic::store_u64(word, u64::from(value.to_bits()) | u64::from(layer) << 32) }
}

/// The value of a word, once it is of the layer.
///
/// # Safety
/// - *in-bounds*: a word of the exchange, which some block tells in this layer.
#[inline(always)]
pub(super) unsafe fn hear(word: *const u64, layer: u32) -> f32 {
    loop {
        // SAFETY: the caller's promise.
        let heard = unsafe { atomic::load_u64(word) };
        if (heard >> 32) as u32 == layer {
            return f32::from_bits(heard as u32);
        }
    }
}

/// The values of two neighbouring words each, those of them that are wanted.
///
/// # Safety
/// - As for [`hear`]; *aligned(16)*.
#[inline(always)]
pub(super) unsafe fn hear_pairs<const N: usize>(
    words: [*const u64; N],
    wanted: [bool; N],
    layer: u32,
) -> [[f32; 2]; N] {
    loop {
        let (mut values, mut is_heard) = ([[0.0; 2]; N], true);
        let mut i = 0;
        while i < N {
            if wanted[i] {
                // SAFETY: the caller's promise.
                let heard = unsafe { atomic::load_u64x2(words[i]) };
                is_heard &= (heard[0] >> 32) as u32 == layer && (heard[1] >> 32) as u32 == layer;
                values[i] = [f32::from_bits(heard[0] as u32), f32::from_bits(heard[1] as u32)];
            }
            i += 1;
        }
        if is_heard {
            return values;
        }
    }
}
