//! The block's dynamic shared memory, addressed by byte offsets from its start.
//!
//! Offsets are u32 shared-space addresses: `ld.shared` and `st.shared` with 32-bit arithmetic, where a generic pointer
//! would cost 64-bit arithmetic and slower instructions. The block is aligned to 1024 bytes, which is what the widest
//! TMA swizzle asks for.

#[cfg(target_arch = "nvptx64")]
core::arch::global_asm!(".extern .shared .align 1024 .b8 dyn_smem[];");

/// Shared-space address of the first byte of the dynamic shared memory.
#[inline(always)]
pub fn base() -> u32 {
    device!({
        let address: u32;
        // SAFETY: takes the address of a symbol, which every kernel has.
        unsafe { core::arch::asm!("mov.u32 {}, dyn_smem;", out(reg32) address, options(pure, nomem, nostack)) };
        address
    } else {
        crate::sim::shared_base("mov.u32 %r, dyn_smem")
    })
}

macro_rules! shared_access {
    ($load:ident, $store:ident, $type:ty, $width:literal, $suffix:literal) => {
        #[doc = concat!("`ld.shared", $suffix, "`: one ", stringify!($type), " at shared address `address`.")]
        ///
        /// # Safety
        #[doc = concat!("- *aligned(", $width, ")* and *in-bounds(dynamic shared memory)*.")]
        /// - *initialised*: by a write and a barrier before.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $load(address: u32) -> $type {
            device!({
                let value: $type;
                // SAFETY: the caller's promise. Reads memory, so neither pure nor nomem: it keeps its order.
                unsafe {
                    core::arch::asm!(concat!("ld.shared", $suffix, " {}, [{}];"), out(reg32) value, in(reg32) address,
                        options(nostack, readonly));
                }
                value
            } else {
                crate::sim::load_shared(address, concat!("ld.shared", $suffix))
            })
        }

        #[doc = concat!("`st.shared", $suffix, "`: one ", stringify!($type), " to shared address `address`.")]
        ///
        /// # Safety
        #[doc = concat!("- *aligned(", $width, ")* and *in-bounds(dynamic shared memory)*.")]
        /// - *exclusive*: no other thread touches it until the next barrier.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $store(address: u32, value: $type) {
            device!({
                // SAFETY: the caller's promise.
                unsafe {
                    core::arch::asm!(concat!("st.shared", $suffix, " [{}], {};"), in(reg32) address, in(reg32) value,
                        options(nostack));
                }
            } else {
                crate::sim::store_shared(address, value, concat!("st.shared", $suffix))
            })
        }
    };
}

shared_access!(load_f32, store_f32, f32, 4, ".f32");
shared_access!(load_u32, store_u32, u32, 4, ".b32");

macro_rules! shared_access_vector {
    ($load:ident, $store:ident, $type:ty, $number:literal, $bytes:literal, $suffix:literal, $($i:tt: $v:ident)+) => {
        #[doc = concat!("`ld.shared", $suffix, "`: ", $number, " neighbouring ", stringify!($type), ".")]
        ///
        /// # Safety
        #[doc = concat!("- *aligned(", $bytes, ")* and *in-bounds(dynamic shared memory)*.")]
        /// - *initialised*: by a write and a barrier before.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $load(address: u32) -> [$type; $number] {
            device!({
                $(let $v: $type;)+
                // SAFETY: the caller's promise.
                unsafe {
                    core::arch::asm!(concat!("ld.shared", $suffix, " {{", vector_operands!($($v)+), "}}, [{address}];"),
                        $($v = out(reg32) $v,)+ address = in(reg32) address, options(nostack, readonly));
                }
                [$($v),+]
            } else {
                crate::sim::load_shared(address, concat!("ld.shared", $suffix))
            })
        }

        #[doc = concat!("`st.shared", $suffix, "`: ", $number, " neighbouring ", stringify!($type), ".")]
        ///
        /// # Safety
        #[doc = concat!("- *aligned(", $bytes, ")* and *in-bounds(dynamic shared memory)*.")]
        /// - *exclusive*: no other thread touches it until the next barrier.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $store(address: u32, value: [$type; $number]) {
            device!({
                // SAFETY: the caller's promise.
                unsafe {
                    core::arch::asm!(concat!("st.shared", $suffix, " [{address}], {{", vector_operands!($($v)+), "}};"),
                        $($v = in(reg32) value[$i],)+ address = in(reg32) address, options(nostack));
                }
            } else {
                crate::sim::store_shared(address, value, concat!("st.shared", $suffix))
            })
        }
    };
}

shared_access_vector!(load_f32x2, store_f32x2, f32, 2, 8, ".v2.f32", 0: a 1: b);
shared_access_vector!(load_u32x2, store_u32x2, u32, 2, 8, ".v2.b32", 0: a 1: b);
shared_access_vector!(load_f32x4, store_f32x4, f32, 4, 16, ".v4.f32", 0: a 1: b 2: c 3: d);
shared_access_vector!(load_u32x4, store_u32x4, u32, 4, 16, ".v4.b32", 0: a 1: b 2: c 3: d);

/// `ld.shared.b16`: 16 bits from a 2-byte aligned shared address.
///
/// # Safety
/// - *aligned(2)* and *in-bounds(dynamic shared memory)*.
/// - *initialised*: by a write and a barrier before.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load_u16(address: u32) -> u16 {
    device!({
        let value: u16;
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("ld.shared.b16 {}, [{}];", out(reg16) value, in(reg32) address, options(nostack, readonly));
        }
        value
    } else {
        crate::sim::load_shared(address, "ld.shared.b16")
    })
}

/// `st.shared.b16`: 16 bits to a 2-byte aligned shared address.
///
/// # Safety
/// - *aligned(2)* and *in-bounds(dynamic shared memory)*.
/// - *exclusive*: no other thread touches it until the next barrier.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn store_u16(address: u32, value: u16) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("st.shared.b16 [{}], {};", in(reg32) address, in(reg16) value, options(nostack));
        }
    } else {
        crate::sim::store_shared(address, value, "st.shared.b16")
    })
}

/// `atom.shared.add.u32 d, [address], value;`: adds to one u32 at `address`, wrapping; returns the old value.
///
/// Relaxed: barriers order it with other accesses.
///
/// # Safety
/// - *aligned(4)* and *in-bounds(dynamic shared memory)*.
/// - *initialised*: by a write and a barrier before; other threads access it only by atomics until the next barrier.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn add_u32(address: u32, value: u32) -> u32 {
    device!({
        let old: u32;
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("atom.shared.add.u32 {}, [{}], {};", out(reg32) old, in(reg32) address, in(reg32) value,
                options(nostack));
        }
        old
    } else {
        crate::sim::atomic_shared(address, "atom.shared.add.u32", |old: u32| old.wrapping_add(value))
    })
}
