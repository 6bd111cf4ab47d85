//! The tensor memory accelerator (Hopper): one thread has whole tiles copied between global and shared memory. Floor
//! sm_90a.
//!
//! A [`TensorMap`], which the host encodes, says where a tensor lies and how large the box is that one instruction
//! copies. Coordinates are in elements, the innermost dimension first, and may be negative or beyond the tensor: such
//! elements are read as the map's fill value and not written. No manual says the following, but an H200 does it: a box
//! that does not begin at a multiple of 16 bytes of a row, and a store at a negative coordinate, stop with an illegal
//! instruction; and a store writes whole 16 bytes, also beyond the end of a row whose length is no multiple of them.
//!
//! Loads announce their bytes to an mbarrier ([`mbarrier::arrive_expect_tx`](crate::mbarrier::arrive_expect_tx) expects
//! the whole box, filled elements included). Stores belong to the group that the thread commits next. Shared memory
//! that threads wrote needs [`fence::proxy_async_shared`](crate::fence::proxy_async_shared) by each writer and a
//! barrier before a store reads it. One thread issues: `if elect(..)` or a fixed one.

#[cfg(not(target_arch = "nvptx64"))]
use crate::sim;

/// An encoded tensor map (`CUtensorMap`): 128 opaque bytes.
///
/// The instructions read it at the address they are given, which has to be a multiple of 64 in constant, parameter or
/// global memory. rustc cannot pass types aligned to more than 16 bytes by value to a kernel, hence the device's
/// alignment; `#[kernel]` takes care of parameters marked `#[grid_constant]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(target_arch = "nvptx64", repr(C, align(16)))]
#[cfg_attr(not(target_arch = "nvptx64"), repr(C, align(64)))]
pub struct TensorMap(pub [u64; 16]);

/// How long L2 should keep what is copied: a policy as `createpolicy` makes them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum CachePolicy {
    /// As usual.
    EvictNormal = 0x1000_0000_0000_0000,
    /// Read or written once.
    EvictFirst = 0x12f0_0000_0000_0000,
    /// Read by many blocks.
    EvictLast = 0x14f0_0000_0000_0000,
}

/// Coordinates of a box in a tensor of one to five dimensions, innermost first: `[i32; 1]` to `[i32; 5]`.
pub trait Coordinates: Copy + sealed::Instructions {}

/// One method per instruction, which the functions below document.
#[cfg(target_arch = "nvptx64")]
mod sealed {
    use super::TensorMap;

    #[allow(clippy::missing_safety_doc)]
    pub trait Instructions {
        unsafe fn load(self, shared: u32, map: *const TensorMap, barrier: u32);
        unsafe fn load_hint(self, shared: u32, map: *const TensorMap, barrier: u32, policy: u64);
        unsafe fn load_multicast(self, shared: u32, map: *const TensorMap, barrier: u32, blocks: u16);
        unsafe fn load_multicast_hint(
            self,
            shared: u32,
            map: *const TensorMap,
            barrier: u32,
            blocks: u16,
            policy: u64,
        );
        unsafe fn store(self, map: *const TensorMap, shared: u32);
        unsafe fn store_hint(self, map: *const TensorMap, shared: u32, policy: u64);
        unsafe fn reduce_add(self, map: *const TensorMap, shared: u32);
        unsafe fn prefetch(self, map: *const TensorMap);
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod sealed {
    pub trait Instructions {
        fn as_slice(&self) -> &[i32];
    }
}

#[cfg(target_arch = "nvptx64")]
macro_rules! instruction {
    ($n:literal [$first:ident $($c:ident)*] $name:ident($($argument:ident: $type:ty as $class:ident),*)
        $ptx:literal $kind:literal $before:literal $after:literal) => {
        #[inline(always)]
        unsafe fn $name(self, $($argument: $type),*) {
            let [$first $(, $c)*] = self;
            // SAFETY: the caller's promise.
            unsafe {
                core::arch::asm!(
                    concat!($ptx, $n, $kind, " ", $before, "[{map}, {{{", stringify!($first), "}",
                        $(", {", stringify!($c), "}",)* "}}]", $after, ";"),
                    $($argument = in($class) $argument,)* $first = in(reg32) $first, $($c = in(reg32) $c,)*
                    options(nostack));
            }
        }
    };
}

macro_rules! dimensions {
    ($n:literal $c:tt) => {
        impl Coordinates for [i32; $n] {}

        #[cfg(not(target_arch = "nvptx64"))]
        impl sealed::Instructions for [i32; $n] {
            fn as_slice(&self) -> &[i32] {
                self
            }
        }

        #[cfg(target_arch = "nvptx64")]
        impl sealed::Instructions for [i32; $n] {
            instruction!($n $c load(shared: u32 as reg32, map: *const TensorMap as reg64, barrier: u32 as reg32)
                "cp.async.bulk.tensor." "d.shared::cluster.global.mbarrier::complete_tx::bytes"
                "[{shared}], " ", [{barrier}]");
            instruction!($n $c load_hint(shared: u32 as reg32, map: *const TensorMap as reg64, barrier: u32 as reg32,
                policy: u64 as reg64)
                "cp.async.bulk.tensor." "d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                "[{shared}], " ", [{barrier}], {policy}");
            instruction!($n $c load_multicast(shared: u32 as reg32, map: *const TensorMap as reg64,
                barrier: u32 as reg32, blocks: u16 as reg16)
                "cp.async.bulk.tensor." "d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                "[{shared}], " ", [{barrier}], {blocks}");
            instruction!($n $c load_multicast_hint(shared: u32 as reg32, map: *const TensorMap as reg64,
                barrier: u32 as reg32, blocks: u16 as reg16, policy: u64 as reg64)
                "cp.async.bulk.tensor."
                "d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
                "[{shared}], " ", [{barrier}], {blocks}, {policy}");
            instruction!($n $c store(map: *const TensorMap as reg64, shared: u32 as reg32)
                "cp.async.bulk.tensor." "d.global.shared::cta.bulk_group" "" ", [{shared}]");
            instruction!($n $c store_hint(map: *const TensorMap as reg64, shared: u32 as reg32, policy: u64 as reg64)
                "cp.async.bulk.tensor." "d.global.shared::cta.bulk_group.L2::cache_hint" "" ", [{shared}], {policy}");
            instruction!($n $c reduce_add(map: *const TensorMap as reg64, shared: u32 as reg32)
                "cp.reduce.async.bulk.tensor." "d.global.shared::cta.add.bulk_group" "" ", [{shared}]");
            instruction!($n $c prefetch(map: *const TensorMap as reg64)
                "cp.async.bulk.prefetch.tensor." "d.L2.global" "" "");
        }
    };
}

dimensions!(1[c0]);
dimensions!(2 [c0 c1]);
dimensions!(3 [c0 c1 c2]);
dimensions!(4 [c0 c1 c2 c3]);
dimensions!(5 [c0 c1 c2 c3 c4]);

/// `cp.async.bulk.tensor.Nd.shared::cluster.global.mbarrier::complete_tx::bytes [shared], [map, {c..}], [barrier];`
///
/// Copies the box at `coordinates` to shared memory; its bytes complete at `barrier`.
///
/// # Safety
/// - `map` is an encoded map of that many dimensions, *aligned(64)*, not in local memory.
/// - *aligned(128)* `shared`, and to the swizzle's pattern (256, 512 or 1024 bytes); *in-bounds(dynamic shared
///   memory)*: the box.
/// - *exclusive*: nobody touches the box before waiting for `barrier`, which is initialised and expects the bytes.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load<C: Coordinates>(shared: u32, map: *const TensorMap, coordinates: C, barrier: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { coordinates.load(shared, map, barrier) }
    } else {
        sim::tma_load(shared, map, coordinates.as_slice(), barrier, None)
    })
}

/// [`load`] with `.L2::cache_hint`.
///
/// # Safety
/// As for [`load`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load_hint<C: Coordinates>(
    shared: u32,
    map: *const TensorMap,
    coordinates: C,
    barrier: u32,
    policy: CachePolicy,
) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { coordinates.load_hint(shared, map, barrier, policy as u64) }
    } else {
        let _ = policy;
        sim::tma_load(shared, map, coordinates.as_slice(), barrier, None)
    })
}

/// [`load`] with `.multicast::cluster`: the box goes to the same offset in every block whose bit is set in `blocks`,
/// and its bytes complete at the same offset's barrier in each.
///
/// # Safety
/// As for [`load`], in every block of `blocks`, which are blocks of this cluster that have not ended.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load_multicast<C: Coordinates>(
    shared: u32,
    map: *const TensorMap,
    coordinates: C,
    barrier: u32,
    blocks: u16,
) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { coordinates.load_multicast(shared, map, barrier, blocks) }
    } else {
        sim::tma_load(shared, map, coordinates.as_slice(), barrier, Some(blocks))
    })
}

/// [`load_multicast`] with `.L2::cache_hint`.
///
/// # Safety
/// As for [`load_multicast`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load_multicast_hint<C: Coordinates>(
    shared: u32,
    map: *const TensorMap,
    coordinates: C,
    barrier: u32,
    blocks: u16,
    policy: CachePolicy,
) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { coordinates.load_multicast_hint(shared, map, barrier, blocks, policy as u64) }
    } else {
        let _ = policy;
        sim::tma_load(shared, map, coordinates.as_slice(), barrier, Some(blocks))
    })
}

/// `cp.async.bulk.tensor.Nd.global.shared::cta.bulk_group [map, {c..}], [shared];`
///
/// Copies a box from shared memory to `coordinates`; elements outside the tensor are left out.
///
/// # Safety
/// - `map` is an encoded map of that many dimensions, *aligned(64)*, not in local memory.
/// - *aligned(128)* `shared`, and to the swizzle's pattern (256, 512 or 1024 bytes); *in-bounds(dynamic shared
///   memory)*: the box.
/// - *initialised(by writes, `fence::proxy_async_shared` of each writer, and a barrier)*.
/// - *exclusive*: nobody writes the box before [`wait_group_read`], nor touches the tensor's elements before
///   [`wait_group`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn store<C: Coordinates>(map: *const TensorMap, coordinates: C, shared: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { coordinates.store(map, shared) }
    } else {
        sim::tma_store(map, coordinates.as_slice(), shared)
    })
}

/// [`store`] with `.L2::cache_hint`.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn store_hint<C: Coordinates>(
    map: *const TensorMap,
    coordinates: C,
    shared: u32,
    policy: CachePolicy,
) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { coordinates.store_hint(map, shared, policy as u64) }
    } else {
        let _ = policy;
        sim::tma_store(map, coordinates.as_slice(), shared)
    })
}

/// `cp.reduce.async.bulk.tensor.Nd.global.shared::cta.add.bulk_group [map, {c..}], [shared];`
///
/// As [`store`], but adds to what is there, in the map's element type and atomically for each element. The order in
/// which several boxes are added is not defined.
///
/// # Safety
/// As for [`store`]; other threads may add to the same elements meanwhile.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn reduce_add<C: Coordinates>(map: *const TensorMap, coordinates: C, shared: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { coordinates.reduce_add(map, shared) }
    } else {
        sim::tma_reduce_add(map, coordinates.as_slice(), shared)
    })
}

/// `cp.async.bulk.prefetch.tensor.Nd.L2.global [map, {c..}];` Brings a box to L2.
///
/// # Safety
/// - `map` is an encoded map of that many dimensions, *aligned(64)*, not in local memory.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn prefetch<C: Coordinates>(map: *const TensorMap, coordinates: C) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { coordinates.prefetch(map) }
    } else {
        sim::tma_prefetch(map, coordinates.as_slice())
    })
}

/// `prefetch.tensormap [map];` Brings the map itself to the accelerator's cache, before its first use.
///
/// # Safety
/// - `map` is an encoded map, *aligned(64)*, not in local memory.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn prefetch_map(map: *const TensorMap) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { core::arch::asm!("prefetch.tensormap [{}];", in(reg64) map, options(nostack)) }
    } else {
        sim::tma_prefetch_map(map)
    })
}

/// `cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [shared], [global], bytes, [barrier];`
///
/// Copies contiguous bytes; they complete at `barrier`.
///
/// # Safety
/// - *aligned(16)* both, `bytes` a multiple of 16; *in-bounds(dynamic shared memory)* and *in-bounds(the buffer of
///   `global`)*.
/// - *initialised(by an earlier kernel or copy)*: the source.
/// - *exclusive*: nobody touches the destination before waiting for `barrier`, which is initialised and expects the
///   bytes.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn load_bulk<T>(shared: u32, global: *const T, bytes: u32, barrier: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}], {}, [{}];",
                in(reg32) shared, in(reg64) global, in(reg32) bytes, in(reg32) barrier, options(nostack));
        }
    } else {
        sim::bulk_load(shared, global.cast(), bytes, barrier)
    })
}

/// `cp.async.bulk.global.shared::cta.bulk_group [global], [shared], bytes;` Copies contiguous bytes.
///
/// # Safety
/// - *aligned(16)* both, `bytes` a multiple of 16; *in-bounds(dynamic shared memory)* and *in-bounds(the buffer of
///   `global`)*.
/// - *initialised(by writes, `fence::proxy_async_shared` of each writer, and a barrier)*: the source.
/// - *exclusive*: nobody writes the source before [`wait_group_read`], nor touches the destination before
///   [`wait_group`].
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn store_bulk<T>(global: *mut T, shared: u32, bytes: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("cp.async.bulk.global.shared::cta.bulk_group [{}], [{}], {};", in(reg64) global,
                in(reg32) shared, in(reg32) bytes, options(nostack));
        }
    } else {
        sim::bulk_store(global.cast(), shared, bytes)
    })
}

/// `cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [global], [shared], bytes;` Adds contiguous f32,
/// atomically for each; the order in which several copies are added is not defined.
///
/// # Safety
/// As for [`store_bulk`]; other threads may add to the same elements meanwhile.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn reduce_add_bulk_f32(global: *mut f32, shared: u32, bytes: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{}], [{}], {};",
                in(reg64) global, in(reg32) shared, in(reg32) bytes, options(nostack));
        }
    } else {
        sim::bulk_reduce_add_f32(global, shared, bytes)
    })
}

/// `cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [remote], [shared], bytes, [barrier];`
///
/// Copies from this block's shared memory to another block's; the bytes complete at a barrier of that block. Both its
/// addresses are from [`cluster::map_shared`](crate::cluster::map_shared).
///
/// # Safety
/// - *aligned(16)* both, `bytes` a multiple of 16; *in-bounds(dynamic shared memory)* of either block; the other has
///   not ended.
/// - *initialised(by writes, `fence::proxy_async_shared` of each writer, and a barrier)*: the source.
/// - *exclusive*: nobody touches the destination before waiting for `barrier`, which is initialised and expects the
///   bytes.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn copy_bulk_to_block(remote: u32, shared: u32, bytes: u32, barrier: u32) {
    device!({
        // SAFETY: the caller's promise.
        unsafe {
            core::arch::asm!(
                "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [{}], [{}], {}, [{}];",
                in(reg32) remote, in(reg32) shared, in(reg32) bytes, in(reg32) barrier, options(nostack));
        }
    } else {
        sim::bulk_copy_to_block(remote, shared, bytes, barrier)
    })
}

/// `cp.async.bulk.commit_group;` The thread's stores since the last commit become a group, also where there were none.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn commit_group() {
    device!({
        // SAFETY: no precondition.
        unsafe { core::arch::asm!("cp.async.bulk.commit_group;", options(nostack)) }
    } else {
        sim::bulk_commit_group()
    })
}

/// `cp.async.bulk.wait_group N;` Waits until at most the `N` newest of the thread's groups are under way; what the
/// others wrote is visible to this thread.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn wait_group<const N: u32>() {
    device!({
        // SAFETY: no precondition.
        unsafe { core::arch::asm!("cp.async.bulk.wait_group {};", const N, options(nostack)) }
    } else {
        sim::bulk_wait_group(N)
    })
}

/// `cp.async.bulk.wait_group.read N;` Waits until all but the `N` newest of the thread's groups have read their
/// sources, which may then be written again.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn wait_group_read<const N: u32>() {
    device!({
        // SAFETY: no precondition.
        unsafe { core::arch::asm!("cp.async.bulk.wait_group.read {};", const N, options(nostack)) }
    } else {
        sim::bulk_wait_group_read(N)
    })
}
