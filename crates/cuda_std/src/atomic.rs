//! Atomics on global memory, with scope and order spelled out: those with `system` in their names are atomic and
//! ordered for all devices, the others for one.
//!
//! Rust's own atomics compile to relaxed operations on this target whatever order they name, and to compile errors on
//! sm_61. On sm_61 the ordered forms are the relaxed ones between `membar.gl`.

#[cfg(not(target_arch = "nvptx64"))]
use crate::sim::Scope;

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
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn fence_device() {
    device!({
        // SAFETY: a fence has no precondition.
        unsafe { core::arch::asm!("membar.gl;", options(nostack)) }
    } else {
        if crate::sim::is_running() {
            crate::sim::fence(crate::sim::Fence::Membar);
        } else {
            core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
        }
    })
}

macro_rules! atomic_u32 {
    ($(#[$doc:meta])* $name:ident, $ptx:literal, $host:ident, $change:expr) => {
        $(#[$doc])*
        ///
        #[doc = concat!("`", $ptx, " d, [pointer], value;` at device scope. Returns the old value.")]
        ///
        /// # Safety
        /// - *aligned(4)* and *in-bounds(the buffer of `pointer`)*; other threads access it only by atomics meanwhile.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
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
                if crate::sim::is_running() {
                    let change: fn(u32, u32) -> u32 = $change;
                    return crate::sim::atomic_global(pointer, order, $ptx, |old| change(old, value));
                }
                // SAFETY: the caller's promise.
                let cell = unsafe { core::sync::atomic::AtomicU32::from_ptr(pointer) };
                cell.$host(value, core::sync::atomic::Ordering::SeqCst)
            })
        }
    };
}

atomic_u32!(
    /// Adds, wrapping.
    add_u32, "atom.global.add.u32", fetch_add, u32::wrapping_add);
atomic_u32!(
    /// Bitwise and.
    and_u32, "atom.global.and.b32", fetch_and, |old, value| old & value);
atomic_u32!(
    /// Bitwise or.
    or_u32, "atom.global.or.b32", fetch_or, |old, value| old | value);
atomic_u32!(
    /// Unsigned maximum.
    max_u32, "atom.global.max.u32", fetch_max, u32::max);
atomic_u32!(
    /// Replaces.
    exchange_u32, "atom.global.exch.b32", swap, |_, value| value);

/// Compares and swaps: writes `value` if `*pointer` is `expected`.
///
/// `atom.global.cas.b32 d, [pointer], expected, value;` at device scope. Returns the old value: `expected` if it was
/// replaced.
///
/// # Safety
/// - *aligned(4)* and *in-bounds(the buffer of `pointer`)*; other threads access it only by atomics meanwhile.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn compare_exchange_u32(pointer: *mut u32, expected: u32, value: u32, order: Order) -> u32 {
    device!({
        if matches!(order, Order::Release | Order::AcqRel) {
            fence_device();
        }
        let old: u32;
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("atom.global.cas.b32 {}, [{}], {}, {};", out(reg32) old, in(reg64) pointer,
                in(reg32) expected, in(reg32) value, options(nostack));
        }
        if matches!(order, Order::Acquire | Order::AcqRel) {
            fence_device();
        }
        old
    } else {
        if crate::sim::is_running() {
            let change = |old| if old == expected { value } else { old };
            return crate::sim::atomic_global(pointer, order, "atom.global.cas.b32", change);
        }
        // SAFETY: the caller's promise.
        let cell = unsafe { core::sync::atomic::AtomicU32::from_ptr(pointer) };
        let order = core::sync::atomic::Ordering::SeqCst;
        cell.compare_exchange(expected, value, order, order).unwrap_or_else(|old| old)
    })
}

/// Adds a float. The order of additions is that in which threads come: the sum's last bits differ from run to run.
///
/// `atom.global.add.f32 d, [pointer], value;` at device scope, relaxed. Returns the old value.
///
/// # Safety
/// - *aligned(4)* and *in-bounds(the buffer of `pointer`)*; other threads access it only by atomics meanwhile.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn add_f32(pointer: *mut f32, value: f32) -> f32 {
    device!({
        let old: f32;
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("atom.global.add.f32 {}, [{}], {};", out(reg32) old, in(reg64) pointer, in(reg32) value,
                options(nostack));
        }
        old
    } else {
        if crate::sim::is_running() {
            return crate::sim::atomic_global(pointer, Order::Relaxed, "atom.global.add.f32", |old| old + value);
        }
        // SAFETY: the caller's promise.
        let cell = unsafe { core::sync::atomic::AtomicU32::from_ptr(pointer.cast()) };
        let order = core::sync::atomic::Ordering::SeqCst;
        let sum = |bits| Some((f32::from_bits(bits) + value).to_bits());
        f32::from_bits(cell.fetch_update(order, order, sum).unwrap_or_else(|bits| bits))
    })
}

/// Looks at a word that other threads change: for loops that wait.
///
/// `ld.volatile.global.u32 d, [pointer];`, with [`Order::Acquire`] followed by a fence.
///
/// # Safety
/// - *aligned(4)* and *in-bounds(the buffer of `pointer`)*; other threads access it only by atomics meanwhile.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load_u32(pointer: *const u32, order: Order) -> u32 {
    device!({
        let value: u32;
        // SAFETY: the caller's promise. Other threads write it, so it is read every time.
        unsafe {
            core::arch::asm!("ld.volatile.global.u32 {}, [{}];", out(reg32) value, in(reg64) pointer,
                options(nostack));
        }
        if matches!(order, Order::Acquire | Order::AcqRel) {
            fence_device();
        }
        value
    } else {
        if crate::sim::is_running() {
            return crate::sim::atomic_load(pointer, order, Scope::Device, "ld.volatile.global.u32");
        }
        // SAFETY: the caller's promise.
        let cell = unsafe { core::sync::atomic::AtomicU32::from_ptr(pointer.cast_mut()) };
        cell.load(core::sync::atomic::Ordering::SeqCst)
    })
}

/// Writes a word that other threads look at.
///
/// `st.volatile.global.u32 [pointer], value;`, with [`Order::Release`] after a fence.
///
/// # Safety
/// - *aligned(4)* and *in-bounds(the buffer of `pointer`)*; other threads access it only by atomics meanwhile.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn store_u32(pointer: *mut u32, value: u32, order: Order) {
    device!({
        if matches!(order, Order::Release | Order::AcqRel) {
            fence_device();
        }
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("st.volatile.global.u32 [{}], {};", in(reg64) pointer, in(reg32) value,
                options(nostack));
        }
    } else {
        if crate::sim::is_running() {
            return crate::sim::atomic_store(pointer, value, order, Scope::Device, "st.volatile.global.u32");
        }
        // SAFETY: the caller's promise.
        let cell = unsafe { core::sync::atomic::AtomicU32::from_ptr(pointer) };
        cell.store(value, core::sync::atomic::Ordering::SeqCst);
    })
}

/// Looks at a double word that other threads change: for loops that wait.
///
/// `ld.relaxed.gpu.global.u64 d, [pointer];`, on sm_61 `ld.volatile.global.u64`.
///
/// # Safety
/// - *aligned(8)* and *in-bounds(the buffer of `pointer`)*; other threads access it only by atomics meanwhile.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load_u64(pointer: *const u64) -> u64 {
    device!({
        let value: u64;
        // SAFETY: the caller's promise. Other threads write it, so it is read every time.
        unsafe {
            #[cfg(not(lacks_memory_model))]
            core::arch::asm!("ld.relaxed.gpu.global.u64 {}, [{}];", out(reg64) value, in(reg64) pointer,
                options(nostack));
            #[cfg(lacks_memory_model)]
            core::arch::asm!("ld.volatile.global.u64 {}, [{}];", out(reg64) value, in(reg64) pointer,
                options(nostack));
        }
        value
    } else {
        if crate::sim::is_running() {
            return crate::sim::atomic_load(pointer, Order::Relaxed, Scope::Device, "ld.relaxed.gpu.global.u64");
        }
        // SAFETY: the caller's promise.
        let cell = unsafe { core::sync::atomic::AtomicU64::from_ptr(pointer.cast_mut()) };
        cell.load(core::sync::atomic::Ordering::SeqCst)
    })
}

/// Looks at two neighbouring double words, each by itself a [`load_u64`], with one instruction.
///
/// `ld.relaxed.gpu.global.v2.u64 {d0, d1}, [pointer];`, on sm_61 `ld.volatile.global.v2.u64`.
///
/// # Safety
/// - As for [`load_u64`], both, and *aligned(16)*.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load_u64x2(pointer: *const u64) -> [u64; 2] {
    device!({
        let (first, second): (u64, u64);
        // SAFETY: the caller's promise. Other threads write them, so they are read every time.
        unsafe {
            #[cfg(not(lacks_memory_model))]
            core::arch::asm!("ld.relaxed.gpu.global.v2.u64 {{{}, {}}}, [{}];", out(reg64) first, out(reg64) second,
                in(reg64) pointer, options(nostack));
            #[cfg(lacks_memory_model)]
            core::arch::asm!("ld.volatile.global.v2.u64 {{{}, {}}}, [{}];", out(reg64) first, out(reg64) second,
                in(reg64) pointer, options(nostack));
        }
        [first, second]
    } else {
        // SAFETY: the caller's promise.
        unsafe { [load_u64(pointer), load_u64(pointer.wrapping_add(1))] }
    })
}

/// Writes a double word that other threads look at, as a whole.
///
/// `st.relaxed.gpu.global.u64 [pointer], value;`, on sm_61 `st.volatile.global.u64`.
///
/// # Safety
/// - As for [`load_u64`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn store_u64(pointer: *mut u64, value: u64) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            #[cfg(not(lacks_memory_model))]
            core::arch::asm!("st.relaxed.gpu.global.u64 [{}], {};", in(reg64) pointer, in(reg64) value,
                options(nostack));
            #[cfg(lacks_memory_model)]
            core::arch::asm!("st.volatile.global.u64 [{}], {};", in(reg64) pointer, in(reg64) value,
                options(nostack));
        }
    } else {
        if crate::sim::is_running() {
            const INSTRUCTION: &str = "st.relaxed.gpu.global.u64";
            return crate::sim::atomic_store(pointer, value, Order::Relaxed, Scope::Device, INSTRUCTION);
        }
        // SAFETY: the caller's promise.
        let cell = unsafe { core::sync::atomic::AtomicU64::from_ptr(pointer) };
        cell.store(value, core::sync::atomic::Ordering::SeqCst);
    })
}

/// Looks at a word that threads of other devices change: for loops that wait. What they wrote before their
/// [`store_release_system_u32`] is visible after it.
///
/// `ld.acquire.sys.global.u32 d, [pointer];`, on sm_61 `ld.volatile.global.u32` followed by `membar.sys`.
///
/// # Safety
/// - *aligned(4)* and *in-bounds(the buffer of `pointer`)*, of this device or of one whose memory it may access; other
///   threads access it only by atomics meanwhile.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load_acquire_system_u32(pointer: *const u32) -> u32 {
    device!({
        let value: u32;
        // SAFETY: the caller's promise. Other threads write it, so it is read every time.
        unsafe {
            #[cfg(not(lacks_memory_model))]
            core::arch::asm!("ld.acquire.sys.global.u32 {}, [{}];", out(reg32) value, in(reg64) pointer,
                options(nostack));
            #[cfg(lacks_memory_model)]
            core::arch::asm!("ld.volatile.global.u32 {}, [{}]; membar.sys;", out(reg32) value, in(reg64) pointer,
                options(nostack));
        }
        value
    } else {
        if crate::sim::is_running() {
            return crate::sim::atomic_load(pointer, Order::Acquire, Scope::System, "ld.acquire.sys.global.u32");
        }
        // SAFETY: the caller's promise.
        let cell = unsafe { core::sync::atomic::AtomicU32::from_ptr(pointer.cast_mut()) };
        cell.load(core::sync::atomic::Ordering::SeqCst)
    })
}

/// Writes a word that threads of other devices look at. What this thread did and saw before is visible to whoever reads
/// the word by [`load_acquire_system_u32`].
///
/// `st.release.sys.global.u32 [pointer], value;`, on sm_61 `st.volatile.global.u32` after `membar.sys`.
///
/// # Safety
/// - As for [`load_acquire_system_u32`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn store_release_system_u32(pointer: *mut u32, value: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            #[cfg(not(lacks_memory_model))]
            core::arch::asm!("st.release.sys.global.u32 [{}], {};", in(reg64) pointer, in(reg32) value,
                options(nostack));
            #[cfg(lacks_memory_model)]
            core::arch::asm!("membar.sys; st.volatile.global.u32 [{}], {};", in(reg64) pointer, in(reg32) value,
                options(nostack));
        }
    } else {
        if crate::sim::is_running() {
            const INSTRUCTION: &str = "st.release.sys.global.u32";
            return crate::sim::atomic_store(pointer, value, Order::Release, Scope::System, INSTRUCTION);
        }
        // SAFETY: the caller's promise.
        let cell = unsafe { core::sync::atomic::AtomicU32::from_ptr(pointer) };
        cell.store(value, core::sync::atomic::Ordering::SeqCst);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU32;
    use std::thread;

    const ORDERS: [Order; 4] = [Order::Relaxed, Order::Acquire, Order::Release, Order::AcqRel];

    #[test]
    fn each_gives_the_old_value_and_leaves_the_new_one() {
        type Operation = unsafe fn(*mut u32, u32, Order) -> u32;
        let cases: [(&str, Operation, u32, u32, u32); 8] = [
            ("add", add_u32, 5, 7, 12),
            ("add", add_u32, u32::MAX, 2, 1),
            ("and", and_u32, 0b1100, 0b1010, 0b1000),
            ("or", or_u32, 0b1100, 0b1010, 0b1110),
            ("max", max_u32, 5, 7, 7),
            ("max", max_u32, 7, 5, 7),
            ("max", max_u32, 1, u32::MAX, u32::MAX),
            ("exchange", exchange_u32, 5, 7, 7),
        ];
        for order in ORDERS {
            for (name, operation, before, value, after) in cases {
                let mut cell = before;
                // SAFETY: an aligned u32 of this thread alone.
                assert_eq!(unsafe { operation(&mut cell, value, order) }, before, "{name}");
                assert_eq!(cell, after, "{name}");
            }
        }
    }

    #[test]
    fn words_and_sums_of_one_thread() {
        for order in ORDERS {
            let (mut cell, mut sum) = (5, 1.5f32);
            // SAFETY: aligned words of this thread alone.
            unsafe {
                assert_eq!(compare_exchange_u32(&mut cell, 4, 9, order), 5);
                assert_eq!(load_u32(&cell, order), 5);
                assert_eq!(compare_exchange_u32(&mut cell, 5, 9, order), 5);
                assert_eq!(load_u32(&cell, order), 9);
                store_u32(&mut cell, 10, order);
                assert_eq!(load_acquire_system_u32(&cell), 10);
                store_release_system_u32(&mut cell, 11);
                assert_eq!(add_f32(&mut sum, 0.25), 1.5);
            }
            assert_eq!((cell, sum), (11, 1.75));
        }
    }

    #[test]
    fn threads_lose_no_addition_and_hand_over_their_writes() {
        let (sum, largest, ready, data) =
            (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0));
        thread::scope(|scope| {
            for thread in 0..4u32 {
                let (sum, largest) = (&sum, &largest);
                scope.spawn(move || {
                    for i in 0..10_000 {
                        // SAFETY: both are u32 that all threads access by atomics.
                        unsafe {
                            add_u32(sum.as_ptr(), thread + 1, Order::Relaxed);
                            max_u32(largest.as_ptr(), i * 4 + thread, Order::AcqRel);
                        }
                    }
                });
            }
            scope.spawn(|| {
                data.store(42, core::sync::atomic::Ordering::Relaxed);
                // SAFETY: as above.
                unsafe { exchange_u32(ready.as_ptr(), 1, Order::Release) };
            });
            // SAFETY: as above.
            while unsafe { or_u32(ready.as_ptr(), 0, Order::Acquire) } == 0 {
                thread::yield_now();
            }
            assert_eq!(data.load(core::sync::atomic::Ordering::Relaxed), 42);
        });
        fence_device();
        assert_eq!(sum.into_inner(), 10_000 * (1 + 2 + 3 + 4));
        assert_eq!(largest.into_inner(), 9_999 * 4 + 3);
    }
}
