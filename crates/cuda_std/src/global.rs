//! Loads and stores of global memory.
//!
//! [`load`] and [`store`] are plain accesses, which the compiler may combine; pass pointers that are kernel parameters
//! of their own, since from those it knows the address space (`ld.global`), while a pointer inside a struct gives the
//! slower generic forms. The others are 16-byte accesses with an explicit cache policy, four 32-bit registers each.

/// A plain load.
///
/// # Safety
/// - *aligned(`size_of::<T>()`)* and *in-bounds(the buffer of `pointer`)*.
/// - *initialised*: by an earlier kernel or copy, or by this thread.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load<T: Copy>(pointer: *const T) -> T {
    device!({
        // SAFETY: the caller's promise.
        unsafe { *pointer }
    } else {
        // SAFETY: the caller's promise.
        unsafe { crate::sim::load_global(pointer, "ld.global") }
    })
}

/// A plain store.
///
/// # Safety
/// - *aligned(`size_of::<T>()`)* and *in-bounds(the buffer of `pointer`)*.
/// - *exclusive*: no other thread touches it during this kernel.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn store<T: Copy>(pointer: *mut T, value: T) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { *pointer = value }
    } else {
        // SAFETY: the caller's promise.
        unsafe { crate::sim::store_global(pointer, value, "st.global") }
    })
}

/// Brings contiguous bytes to L2 where the floor has a form for it (TMA): `cp.async.bulk.prefetch.L2.global [pointer],
/// bytes;`
///
/// Nobody sees that it has: what is written to them meanwhile, by a kernel ahead too, is seen as ever, since all of the
/// card's writes come together in L2.
///
/// # Safety
/// - *aligned(16)*, `bytes` a multiple of 16; *in-bounds(the buffer of `pointer`)*.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn prefetch_l2<T>(pointer: *const T, bytes: u32) {
    device!({
        #[cfg(not(lacks_tma))]
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("cp.async.bulk.prefetch.L2.global [{}], {};", in(reg64) pointer, in(reg32) bytes,
                options(nostack));
        }
        #[cfg(lacks_tma)]
        let _ = (pointer, bytes);
    } else {
        crate::sim::bulk_prefetch(pointer.cast(), bytes)
    })
}

macro_rules! load_16 {
    ($(#[$doc:meta])* $name:ident, $ptx:literal, $simulated:ident) => {
        $(#[$doc])*
        ///
        #[doc = concat!("`", $ptx, " {r0, r1, r2, r3}, [pointer];`")]
        ///
        /// # Safety
        /// - *aligned(16)* and *in-bounds(the buffer of `pointer`)*.
        /// - *initialised*: by an earlier kernel or copy; for the `nc` forms nothing writes it while this kernel runs.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $name<T: Copy>(pointer: *const T) -> [u32; 4] {
            device!({
                let (a, b, c, d): (u32, u32, u32, u32);
                // SAFETY: the caller's promise. Only read: no clobber beyond that.
                unsafe {
                    core::arch::asm!(concat!($ptx, " {{{}, {}, {}, {}}}, [{}];"), out(reg32) a, out(reg32) b,
                        out(reg32) c, out(reg32) d, in(reg64) pointer, options(nostack, readonly));
                }
                [a, b, c, d]
            } else {
                // SAFETY: the caller's promise.
                unsafe { crate::sim::$simulated(pointer.cast::<[u32; 4]>(), $ptx) }
            })
        }
    };
}

load_16!(
    /// 16 bytes, cached as usual: data that other blocks read too.
    load_x4, "ld.global.v4.b32", load_global);
load_16!(
    /// 16 bytes through the read-only path: weights and tables that many blocks read.
    load_nc_x4, "ld.global.nc.v4.b32", load_constant);
load_16!(
    /// 16 bytes that are read once: streamed past L1 where the floor has a form for it (sm_80).
    #[cfg(not(lacks_memory_model))]
    load_stream_x4, "ld.global.nc.L1::no_allocate.v4.b32", load_constant);
load_16!(
    /// 16 bytes that are read once: streamed past L1 where the floor has a form for it (sm_80).
    #[cfg(lacks_memory_model)]
    load_stream_x4, "ld.global.nc.v4.b32", load_constant);

macro_rules! store_16 {
    ($(#[$doc:meta])* $name:ident, $ptx:literal) => {
        $(#[$doc])*
        ///
        #[doc = concat!("`", $ptx, " [pointer], {r0, r1, r2, r3};`")]
        ///
        /// # Safety
        /// - *aligned(16)* and *in-bounds(the buffer of `pointer`)*.
        /// - *exclusive*: no other thread touches it during this kernel.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $name<T: Copy>(pointer: *mut T, value: [u32; 4]) {
            device!({
                // SAFETY: the caller's promise.
                unsafe {
                    core::arch::asm!(concat!($ptx, " [{}], {{{}, {}, {}, {}}};"), in(reg64) pointer, in(reg32) value[0],
                        in(reg32) value[1], in(reg32) value[2], in(reg32) value[3], options(nostack));
                }
            } else {
                // SAFETY: the caller's promise.
                unsafe {
                    crate::sim::store_global(pointer.cast::<[u32; 4]>(), value, $ptx);
                }
            })
        }
    };
}

store_16!(
    /// 16 bytes, cached as usual: a result that the next kernel reads soon.
    store_x4, "st.global.v4.b32");
store_16!(
    /// 16 bytes that are written once and not read soon: evicted first.
    store_stream_x4, "st.global.cs.v4.b32");

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C, align(16))]
    struct Aligned<T>([T; 24]);

    #[test]
    fn plain_accesses_of_every_width() {
        fn check<T: Copy + PartialEq + core::fmt::Debug>(values: [T; 3], new: T) {
            let mut memory = values;
            // SAFETY: the three elements of an array.
            unsafe {
                assert_eq!([0, 1, 2].map(|i| load(memory.as_ptr().add(i))), values);
                store(memory.as_mut_ptr().add(1), new);
            }
            assert_eq!(memory, [values[0], new, values[2]]);
        }
        check([1u8, 2, 3], 9);
        check([1i8, -2, 3], -9);
        check([1u16, 2, 3], 9);
        check([1u32, 2, 3], 9);
        check([1u64, 2, 3], 9);
        check([1.5f32, -0.0, f32::INFINITY], 9.0);
        check([half::bf16::ONE, half::bf16::ZERO, half::bf16::MAX], half::bf16::NEG_ONE);
    }

    /// Words in memory order, and not a byte beyond the 16.
    #[test]
    fn sixteen_bytes_in_memory_order() {
        let mut bytes = Aligned(core::array::from_fn(|i| i as u16 * 0x101 + 0x8000));
        let before = bytes.0;
        let words: [u32; 4] =
            core::array::from_fn(|i| u32::from(before[8 + 2 * i]) | u32::from(before[9 + 2 * i]) << 16);
        // SAFETY: elements 8..16 of the 24, aligned by their type.
        unsafe {
            let source = bytes.0.as_ptr().add(8);
            assert_eq!(load_x4(source), words);
            assert_eq!(load_nc_x4(source), words);
            assert_eq!(load_stream_x4(source), words);
            for put in [store_x4::<u16>, store_stream_x4::<u16>] {
                put(bytes.0.as_mut_ptr().add(8), words.map(|word| !word));
                assert_eq!(bytes.0[..8], before[..8]);
                assert_eq!(bytes.0[16..], before[16..]);
                assert!(bytes.0[8..16].iter().zip(&before[8..16]).all(|(new, old)| *new == !old));
                put(bytes.0.as_mut_ptr().add(8), words);
                assert_eq!(bytes.0, before);
            }
        }
    }
}
