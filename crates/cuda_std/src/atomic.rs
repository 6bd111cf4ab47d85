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
