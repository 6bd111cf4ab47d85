//! `wgmma`: the 128 threads of a warpgroup multiply matrices on the tensor cores, asynchronously (Hopper). Floor
//! sm_90a.
//!
//! An instruction computes `d = a·b` or `d += a·b` with d 64 × N in registers, b K × N in shared memory, and a 64 × K
//! in shared memory ([`ss`]) or in registers ([`rs`]). K is 32 bytes of elements. N follows from d: `[f32; N / 2]`, N a
//! multiple of 8 up to 256 (for `i8` 8, 16, 24, 32 and then multiples of 16).
//!
//! | elements | d | K | operands in shared memory |
//! |---|---|---|---|
//! | `bf16`, `f16` | f32 | 16 | either [`Major`] |
//! | f32, of which the lower 13 bits are ignored (tf32) | f32 | 8 | [`KMajor`] |
//! | [`E4m3`] | f32, summed with fewer bits | 32 | [`KMajor`] |
//! | i8 | i32, wrapping | 32 | [`KMajor`] |
//!
//! With `g = lane / 4`, `t = lane % 4` and warp w of the four, register i of d is row `16·w + g + 8·(i / 2 % 2)`,
//! column `8·(i / 4) + 2·t + i % 2`. Registers of a are those of [`mma`](crate::mma), rows `16·w` further down.
//!
//! # Order
//!
//! ```text
//! fence(); ss(&mut d, ..); ss(&mut d, ..); ..; commit_group(); .. wait_group::<0>(&mut d);
//! ```
//!
//! Between [`fence`] and [`commit_group`] stand instructions alone: what computes a register of d or a comes before the
//! fence. From the first instruction on, d and the registers of a belong to the hardware: only the [`wait_group`] that
//! is given them gives them back, and that is why it takes them: the compiler knows nothing of what is under way, and
//! would move reads above a wait that does not name them.
//!
//! Each function is one instruction, not a chain with its fence and commit: ptxas joins them. For a main loop of four
//! `m64n256k16` with one group in flight over the back edge (154 registers), and for a loop of attention with two sets
//! of accumulators and a from registers (189), it gives chains of `HGMMA` on the same registers without moves,
//! serialisation or local memory (ptxas 13.0, `-unroll-threshold=20000`). That needs what any use of arrays in
//! registers needs: constant indices after unrolling, no calls, no branch around part of a chain. A sum starts with
//! [`Accumulate::Overwrite`]: zeros would be put into the registers after the fence, and ptxas then adds a fence of its
//! own (C7519).

use core::marker::PhantomData;

use half::{bf16, f16};

use crate::cvt::E4m3;
#[cfg(not(target_arch = "nvptx64"))]
use crate::sim::{self, tensor_core::WgmmaKind};

/// Which index of an operand in shared memory is contiguous.
pub trait Major: sealed::Major {}

/// Rows of k: `[m, k]` for a, `[n, k]` for b.
#[derive(Clone, Copy, Debug)]
pub enum KMajor {}

/// Rows of m or n: `[k, m]` for a, `[k, n]` for b.
#[derive(Clone, Copy, Debug)]
pub enum MnMajor {}

impl Major for KMajor {}
impl Major for MnMajor {}

/// The pattern in which 16-byte pieces of a tile in shared memory are permuted.
///
/// Bits 4.. of the address are exclusive-ored with bits 7..: one, two or three of them. A TMA load with the same
/// pattern writes what an instruction with it reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Swizzle {
    /// None.
    None,
    /// Rows of 32 bytes, repeats after 256 bytes.
    Bytes32,
    /// Rows of 64 bytes, repeats after 512 bytes.
    Bytes64,
    /// Rows of 128 bytes, repeats after 1024 bytes.
    Bytes128,
}

/// Where an operand lies in shared memory.
pub struct Descriptor<M> {
    low: u32,
    high: u32,
    major: PhantomData<M>,
}

impl<M> Clone for Descriptor<M> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Descriptor<M> {}

impl<M: Major> Descriptor<M> {
    /// An operand whose first element is at shared address `address`, for tiles that start at a multiple of the
    /// swizzle's repeat. The two distances are in bytes, multiples of 16:
    ///
    /// | | `leading_bytes` | `stride_bytes` |
    /// |---|---|---|
    /// | [`KMajor`], no swizzle | from 16 bytes of k to the next | from 8 rows to the next |
    /// | [`KMajor`], swizzle | not used | from 8 rows to the next: 8 times the swizzle's width |
    /// | [`MnMajor`], no swizzle | from 8 k to the next | from 16 bytes of m or n to the next |
    /// | [`MnMajor`], swizzle | from a swizzle's width of m or n to the next | from 8 k to the next |
    #[inline(always)]
    pub const fn new(address: u32, swizzle: Swizzle, leading_bytes: u32, stride_bytes: u32) -> Self {
        let layout = match swizzle {
            Swizzle::None => 0,
            Swizzle::Bytes128 => 1,
            Swizzle::Bytes64 => 2,
            Swizzle::Bytes32 => 3,
        };
        let low = (address & 0x3_ffff) >> 4 | (leading_bytes & 0x3_ffff) >> 4 << 16;
        let high = (stride_bytes & 0x3_ffff) >> 4 | layout << 30;
        Descriptor { low, high, major: PhantomData }
    }

    /// The operand `bytes` (a multiple of 16) further on, before the swizzle: the next k of a [`KMajor`] operand is 32
    /// bytes on within the swizzle's width.
    #[inline(always)]
    pub const fn advance(self, bytes: u32) -> Self {
        // No carry out of the address: shared memory ends below 256 KiB.
        Descriptor { low: self.low.wrapping_add(bytes >> 4), ..self }
    }

    /// The 64 bits of the hardware.
    #[inline(always)]
    pub const fn bits(self) -> u64 {
        self.low as u64 | (self.high as u64) << 32
    }
}

/// What becomes of the accumulators' old values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Accumulate {
    /// `d = a·b`.
    Overwrite = 0,
    /// `d += a·b`.
    Add = 1,
}

/// Element types that an instruction accumulates in `D`, for each `D` that has one.
pub trait Multiply<D>: sealed::Multiply<D> {}

/// Arrays of registers that [`wait_group`] gives back: `[f32; R]`, `[u32; R]`, `[i32; R]` with R a multiple of 4 up to
/// 128, and `(&mut _, &mut _)` of such.
pub trait Registers: sealed::Registers {}

mod sealed {
    #[cfg(target_arch = "nvptx64")]
    use super::{Accumulate, Descriptor};

    pub trait Major {
        /// The instruction's transpose bit.
        const TRANSPOSE: u32;
    }

    #[cfg(target_arch = "nvptx64")]
    #[allow(clippy::missing_safety_doc)]
    pub trait Multiply<D> {
        unsafe fn ss<A: super::Major, B: super::Major>(
            d: &mut D,
            a: Descriptor<A>,
            b: Descriptor<B>,
            accumulate: Accumulate,
        );
        unsafe fn rs<B: super::Major>(d: &mut D, a: [u32; 4], b: Descriptor<B>, accumulate: Accumulate);
    }

    #[cfg(not(target_arch = "nvptx64"))]
    pub trait Multiply<D> {
        const KIND: crate::sim::tensor_core::WgmmaKind;
        fn words(d: &mut D) -> &mut [u32];
    }

    pub trait Registers {
        /// Whatever reads the registers stays behind this.
        fn give_back(&mut self);
    }
}

impl sealed::Major for KMajor {
    const TRANSPOSE: u32 = 0;
}

impl sealed::Major for MnMajor {
    const TRANSPOSE: u32 = 1;
}

#[cfg(target_arch = "nvptx64")]
#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.wgmma.fence.sync.aligned"]
    fn llvm_fence();
    #[link_name = "llvm.nvvm.wgmma.commit_group.sync.aligned"]
    fn llvm_commit_group();
    #[link_name = "llvm.nvvm.wgmma.wait_group.sync.aligned"]
    fn llvm_wait_group(pending: i64);
}

/// `wgmma.fence.sync.aligned;` What the threads wrote to registers before is what the instructions after it read.
///
/// Shared memory needs [`proxy_async_shared`](crate::fence::proxy_async_shared) instead, unless TMA wrote it.
///
/// # Safety
/// - *converged*: all 128 threads of the warpgroup execute it.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn fence() {
    device!({
        // SAFETY: the caller's promise.
        unsafe { llvm_fence() }
    } else {
        sim::wgmma_fence()
    })
}

/// `wgmma.commit_group.sync.aligned;` The instructions since the last commit become a group.
///
/// # Safety
/// - *converged*: all 128 threads of the warpgroup execute it.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn commit_group() {
    device!({
        // SAFETY: the caller's promise.
        unsafe { llvm_commit_group() }
    } else {
        sim::wgmma_commit_group()
    })
}

/// `wgmma.wait_group.sync.aligned N;` Waits until at most the `N` newest groups are under way, and gives back
/// `registers`: all accumulators and registers of a whose groups are done and that are read or written next.
///
/// # Safety
/// - *converged*: all 128 threads of the warpgroup execute it.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn wait_group<const N: u32>(registers: &mut impl Registers) {
    const { assert!(N <= 7, "N is at most 7") };
    device!({
        // SAFETY: the caller's promise.
        unsafe { llvm_wait_group(const { N as i64 }) }
    } else {
        sim::wgmma_wait_group(N)
    });
    registers.give_back();
}

/// Both operands in shared memory.
///
/// ```text
/// wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16 {d..}, a, b, accumulate, 1, 1, transpose a, transpose b;
/// wgmma.mma_async.sync.aligned.m64nNk16.f32.f16.f16   {d..}, a, b, accumulate, 1, 1, transpose a, transpose b;
/// wgmma.mma_async.sync.aligned.m64nNk8.f32.tf32.tf32  {d..}, a, b, accumulate, 1, 1;
/// wgmma.mma_async.sync.aligned.m64nNk32.f32.e4m3.e4m3 {d..}, a, b, accumulate, 1, 1;
/// wgmma.mma_async.sync.aligned.m64nNk32.s32.s8.s8     {d..}, a, b, accumulate;
/// ```
///
/// # Safety
/// - *converged* and *uniform*: all 128 threads of the warpgroup execute it with the same descriptors.
/// - *in-bounds(dynamic shared memory)*: all that the descriptors name.
/// - *initialised*: by TMA, or by writes, `fence::proxy_async_shared` of each writer, and a barrier.
/// - *exclusive*: until the wait nobody writes the operands, and d is touched by such instructions of the same shape
///   alone.
/// - [`fence`] comes after whatever wrote d before.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn ss<T: Multiply<D>, D, A: Major, B: Major>(
    d: &mut D,
    a: Descriptor<A>,
    b: Descriptor<B>,
    accumulate: Accumulate,
) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { T::ss(d, a, b, accumulate) }
    } else {
        let operand = crate::sim::tensor_core::WgmmaA::Shared { descriptor: a.bits(), major: major::<A>() };
        sim::wgmma(T::KIND, T::words(d), operand, b.bits(), major::<B>(), accumulate)
    })
}

/// a in registers: `{a0, a1, a2, a3}` in place of its descriptor, and no transpose of a. Else as [`ss`].
///
/// # Safety
/// As for [`ss`], and
/// - *exclusive*: the registers of a are not touched until the wait that is given them.
/// - [`fence`] comes after whatever wrote a.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn rs<T: Multiply<D>, D, B: Major>(
    d: &mut D,
    a: [u32; 4],
    b: Descriptor<B>,
    accumulate: Accumulate,
) {
    device!({
        // SAFETY: the caller's promise.
        unsafe { T::rs(d, a, b, accumulate) }
    } else {
        let operand = crate::sim::tensor_core::WgmmaA::Registers(a);
        sim::wgmma(T::KIND, T::words(d), operand, b.bits(), major::<B>(), accumulate)
    })
}

#[cfg(not(target_arch = "nvptx64"))]
fn major<M: Major>() -> crate::sim::tensor_core::Major {
    match M::TRANSPOSE {
        0 => crate::sim::tensor_core::Major::K,
        _ => crate::sim::tensor_core::Major::Mn,
    }
}

impl<A: Registers, B: Registers> Registers for (&mut A, &mut B) {}

impl<A: Registers, B: Registers> sealed::Registers for (&mut A, &mut B) {
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn give_back(&mut self) {
        self.0.give_back();
        self.1.give_back();
    }
}

/// An operand of a list, after the first.
#[cfg(target_arch = "nvptx64")]
macro_rules! next_operand {
    ($i:literal) => {
        ", {}"
    };
}

/// One element type with one N: `$r` accumulators, indices `$first $i..`. `$ss` and `$rs` are what follows the
/// predicate, with the operands that they name.
macro_rules! multiply {
    ($type:ty, $accumulator:ty, $kind:ident, $n:literal, $r:literal, [$first:literal $($i:literal)*], $shape:literal,
        $majors:expr, $ss:literal [$($ss_operand:tt)*], $rs:literal [$($rs_operand:tt)*]) => {
        impl Multiply<[$accumulator; $r]> for $type {}

        #[cfg(not(target_arch = "nvptx64"))]
        impl sealed::Multiply<[$accumulator; $r]> for $type {
            const KIND: WgmmaKind = WgmmaKind::$kind;

            fn words(d: &mut [$accumulator; $r]) -> &mut [u32] {
                words(d)
            }
        }

        #[cfg(target_arch = "nvptx64")]
        impl sealed::Multiply<[$accumulator; $r]> for $type {
            #[inline(always)]
            unsafe fn ss<A: Major, B: Major>(
                d: &mut [$accumulator; $r],
                a: Descriptor<A>,
                b: Descriptor<B>,
                accumulate: Accumulate,
            ) {
                const { assert!($majors || A::TRANSPOSE + B::TRANSPOSE == 0, "this type's operands are K-major") };
                // SAFETY: the caller's promise.
                unsafe {
                    core::arch::asm!(
                        concat!("{{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, {accumulate}, 0; ",
                            "mov.b64 a, {{{a0}, {a1}}}; mov.b64 b, {{{b0}, {b1}}}; ",
                            "wgmma.mma_async.sync.aligned.m64n", $n, $shape, " {{{}", $(next_operand!($i),)* "}}, a, b, p",
                            $ss, "; }}"),
                        inout(reg32) d[$first], $(inout(reg32) d[$i],)* accumulate = in(reg32) accumulate as u32,
                        a0 = in(reg32) a.low, a1 = in(reg32) a.high, b0 = in(reg32) b.low, b1 = in(reg32) b.high,
                        $($ss_operand)* options(nostack));
                }
            }

            #[inline(always)]
            unsafe fn rs<B: Major>(
                d: &mut [$accumulator; $r],
                a: [u32; 4],
                b: Descriptor<B>,
                accumulate: Accumulate,
            ) {
                const { assert!($majors || B::TRANSPOSE == 0, "this type's operands are K-major") };
                // SAFETY: the caller's promise.
                unsafe {
                    core::arch::asm!(
                        concat!("{{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, {accumulate}, 0; ",
                            "mov.b64 b, {{{b0}, {b1}}}; wgmma.mma_async.sync.aligned.m64n", $n, $shape, " {{{}",
                            $(next_operand!($i),)* "}}, {{{a0}, {a1}, {a2}, {a3}}}, b, p", $rs, "; }}"),
                        inout(reg32) d[$first], $(inout(reg32) d[$i],)* accumulate = in(reg32) accumulate as u32,
                        a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                        b0 = in(reg32) b.low, b1 = in(reg32) b.high, $($rs_operand)* options(nostack));
                }
            }
        }
    };
}

macro_rules! registers {
    ($type:ty, $r:literal, [$first:literal $($i:literal)*]) => {
        impl Registers for [$type; $r] {}

        impl sealed::Registers for [$type; $r] {
            #[inline(always)]
            #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
            fn give_back(&mut self) {
                device!({
                    // SAFETY: a comment, which names the registers.
                    unsafe {
                        core::arch::asm!(concat!("// {}", $(next_operand!($i),)*), inout(reg32) self[$first],
                            $(inout(reg32) self[$i],)* options(nostack));
                    }
                } else {
                    sim::wgmma_give_back(words(self))
                })
            }
        }
    };
}

/// The registers' bits.
#[cfg(not(target_arch = "nvptx64"))]
fn words<T: Copy, const R: usize>(registers: &mut [T; R]) -> &mut [u32] {
    const { assert!(size_of::<T>() == 4 && align_of::<T>() == 4) };
    // SAFETY: R elements of 4 bytes, every pattern of which is valid for u32 and for the three T — the macros above.
    unsafe { core::slice::from_raw_parts_mut(registers.as_mut_ptr().cast(), R) }
}

macro_rules! tiles {
    ([$($i:literal)*]) => {};
    ([$($i:literal)*] $n:literal $r:literal: $a:literal $b:literal $c:literal $d:literal $($int:ident)?; $($rest:tt)*) => {
        tiles!(@one $n $r [$($i)* $a $b $c $d] $($int)?);
        tiles!([$($i)* $a $b $c $d] $($rest)*);
    };
    (@one $n:literal $r:literal $i:tt int) => {
        tiles!(@one $n $r $i);
        multiply!(i8, i32, S8, $n, $r, $i, "k32.s32.s8.s8", false, "" [], "" []);
    };
    (@one $n:literal $r:literal $i:tt) => {
        registers!(f32, $r, $i);
        registers!(u32, $r, $i);
        registers!(i32, $r, $i);
        multiply!(bf16, f32, Bf16, $n, $r, $i, "k16.f32.bf16.bf16", true,
            ", 1, 1, {ta}, {tb}" [ta = const A::TRANSPOSE, tb = const B::TRANSPOSE,],
            ", 1, 1, {tb}" [tb = const B::TRANSPOSE,]);
        multiply!(f16, f32, F16, $n, $r, $i, "k16.f32.f16.f16", true,
            ", 1, 1, {ta}, {tb}" [ta = const A::TRANSPOSE, tb = const B::TRANSPOSE,],
            ", 1, 1, {tb}" [tb = const B::TRANSPOSE,]);
        multiply!(f32, f32, Tf32, $n, $r, $i, "k8.f32.tf32.tf32", false, ", 1, 1" [], ", 1, 1" []);
        multiply!(E4m3, f32, E4m3, $n, $r, $i, "k32.f32.e4m3.e4m3", false, ", 1, 1" [], ", 1, 1" []);
    };
}

// N, the number of registers, and the indices that it has beyond the N before; `int` where i8 has it.
tiles! { []
    8 4: 0 1 2 3 int;
    16 8: 4 5 6 7 int;
    24 12: 8 9 10 11 int;
    32 16: 12 13 14 15 int;
    40 20: 16 17 18 19;
    48 24: 20 21 22 23 int;
    56 28: 24 25 26 27;
    64 32: 28 29 30 31 int;
    72 36: 32 33 34 35;
    80 40: 36 37 38 39 int;
    88 44: 40 41 42 43;
    96 48: 44 45 46 47 int;
    104 52: 48 49 50 51;
    112 56: 52 53 54 55 int;
    120 60: 56 57 58 59;
    128 64: 60 61 62 63 int;
    136 68: 64 65 66 67;
    144 72: 68 69 70 71 int;
    152 76: 72 73 74 75;
    160 80: 76 77 78 79 int;
    168 84: 80 81 82 83;
    176 88: 84 85 86 87 int;
    184 92: 88 89 90 91;
    192 96: 92 93 94 95 int;
    200 100: 96 97 98 99;
    208 104: 100 101 102 103 int;
    216 108: 104 105 106 107;
    224 112: 108 109 110 111 int;
    232 116: 112 113 114 115;
    240 120: 116 117 118 119 int;
    248 124: 120 121 122 123;
    256 128: 124 125 126 127 int;
}
