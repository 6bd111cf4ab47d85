//! Atomics on global memory, with scope and order spelled out.
//!
//! Rust's own atomics compile to relaxed operations on this target whatever order they name, and to compile errors on
//! sm_61. On sm_61 the ordered forms are the relaxed ones between `membar.gl`.

/// How far an operation is ordered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// The operation alone is atomic.
    Relaxed,
    /// Writes of other threads before their release are visible after it.
    Acquire,
    /// This thread's earlier writes are visible to whoever acquires it.
    Release,
    /// Both.
    AcqRel,
}

/// `membar.gl;` Orders this thread's memory accesses before and after it, for all threads of the device.
#[inline(always)]
pub fn fence_device() {
    device!({
        // SAFETY: a fence has no precondition.
        unsafe { core::arch::asm!("membar.gl;", options(nostack)) }
    } else {
        core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst)
    })
}

macro_rules! atomic_u32 {
    ($(#[$doc:meta])* $name:ident, $ptx:literal, $host:ident) => {
        $(#[$doc])*
        ///
        #[doc = concat!("`", $ptx, " d, [pointer], value;` at device scope. Returns the old value.")]
        ///
        /// # Safety
        /// - *aligned(4)* and *in-bounds(the buffer of `pointer`)*; other threads access it only by atomics meanwhile.
        #[inline(always)]
        pub unsafe fn $name(pointer: *mut u32, value: u32, order: Order) -> u32 {
            device!({
                if matches!(order, Order::Release | Order::AcqRel) {
                    fence_device();
                }
                let old: u32;
                // SAFETY: the caller's promise.
                unsafe {
                    core::arch::asm!(concat!($ptx, " {}, [{}], {};"), out(reg32) old, in(reg64) pointer,
                        in(reg32) value, options(nostack));
                }
                if matches!(order, Order::Acquire | Order::AcqRel) {
                    fence_device();
                }
                old
            } else {
                // SAFETY: the caller's promise.
                let cell = unsafe { core::sync::atomic::AtomicU32::from_ptr(pointer) };
                let _ = order;
                cell.$host(value, core::sync::atomic::Ordering::SeqCst)
            })
        }
    };
}

atomic_u32!(
    /// Adds, wrapping.
    add_u32, "atom.global.add.u32", fetch_add);
atomic_u32!(
    /// Bitwise and.
    and_u32, "atom.global.and.b32", fetch_and);
atomic_u32!(
    /// Bitwise or.
    or_u32, "atom.global.or.b32", fetch_or);
atomic_u32!(
    /// Unsigned maximum.
    max_u32, "atom.global.max.u32", fetch_max);
atomic_u32!(
    /// Replaces.
    exchange_u32, "atom.global.exch.b32", swap);
