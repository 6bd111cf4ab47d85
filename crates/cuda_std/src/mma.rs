//! `mma.sync`: a warp multiplies small matrices on its tensor cores and adds: d = a·b + c. Floor sm_80.
//!
//! The operands are spread over the lanes. With `g = lane / 4` and `t = lane % 4`:
//!
//! | operand | register | 16-bit types, k16 | tf32, k8 | s8, k32 |
//! |---|---|---|---|---|
//! | a, 16 × k | 0 | row g, k 2t, 2t+1 | row g, k t | row g, k 4t..4t+4 |
//! | | 1 | row g+8, the same k | row g+8, the same k | row g+8, the same k |
//! | | 2 | row g, k 2t+8, 2t+9 | row g, k t+4 | row g, k 4t+16..4t+20 |
//! | | 3 | row g+8, the same k | row g+8, the same k | row g+8, the same k |
//! | b, k × 8 | 0 | k 2t, 2t+1, column g | k t, column g | k 4t..4t+4, column g |
//! | | 1 | k 2t+8, 2t+9, column g | k t+4, column g | k 4t+16..4t+20, column g |
//! | c, d, 16 × 8 | 0, 1 | row g, columns 2t, 2t+1 | the same | the same |
//! | | 2, 3 | row g+8, columns 2t, 2t+1 | the same | the same |
//!
//! The lowest k is in the lowest bits. Column-major b is a weight matrix `[n, k]` as it is stored. Products are exact;
//! their sum is neither rounded to nearest nor kept in order, and differs between architectures in its last bits.

#[cfg(not(target_arch = "nvptx64"))]
use crate::sim::tensor_core::MmaKind;

#[cfg(target_arch = "nvptx64")]
#[repr(C)]
struct F32x4(f32, f32, f32, f32);

#[cfg(target_arch = "nvptx64")]
#[repr(C)]
struct I32x4(i32, i32, i32, i32);

#[cfg(target_arch = "nvptx64")]
#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.mma.m16n8k16.row.col.bf16"]
    fn llvm_bf16(
        a0: u32,
        a1: u32,
        a2: u32,
        a3: u32,
        b0: u32,
        b1: u32,
        c0: f32,
        c1: f32,
        c2: f32,
        c3: f32,
    ) -> F32x4;
    #[link_name = "llvm.nvvm.mma.m16n8k8.row.col.tf32"]
    fn llvm_tf32(
        a0: u32,
        a1: u32,
        a2: u32,
        a3: u32,
        b0: u32,
        b1: u32,
        c0: f32,
        c1: f32,
        c2: f32,
        c3: f32,
    ) -> F32x4;
    #[link_name = "llvm.nvvm.mma.m16n8k32.row.col.s8"]
    fn llvm_s8(
        a0: u32,
        a1: u32,
        a2: u32,
        a3: u32,
        b0: u32,
        b1: u32,
        c0: i32,
        c1: i32,
        c2: i32,
        c3: i32,
    ) -> I32x4;
}

/// `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d..}, {a..}, {b..}, {c..};`
///
/// # Safety
/// - *converged*: all 32 lanes execute it.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn m16n8k16_f32_bf16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    device!({
        // SAFETY: convergence is the caller's promise.
        let d = unsafe { llvm_bf16(a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]) };
        [d.0, d.1, d.2, d.3]
    } else {
        crate::sim::mma(MmaKind::Bf16, a, b, c.map(f32::to_bits)).map(f32::from_bits)
    })
}

/// `mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {d..}, {a..}, {b..}, {c..};`
///
/// # Safety
/// - *converged*: all 32 lanes execute it.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn m16n8k16_f32_f16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    device!({
        crate::lanes::converge();
        let mut d = c;
        // SAFETY: convergence is the caller's promise. Not pure: the compiler could move it into a branch.
        unsafe {
            core::arch::asm!(
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{d0}, {d1}, {d2}, {d3}}}, \
                 {{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, {{{d0}, {d1}, {d2}, {d3}}};",
                d0 = inout(reg32) d[0], d1 = inout(reg32) d[1], d2 = inout(reg32) d[2], d3 = inout(reg32) d[3],
                a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                b0 = in(reg32) b[0], b1 = in(reg32) b[1], options(nomem, nostack));
        }
        d
    } else {
        crate::sim::mma(MmaKind::F16, a, b, c.map(f32::to_bits)).map(f32::from_bits)
    })
}

/// `mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {d0, d1}, {a..}, {b..}, {c0, c1};` Accumulates in f16.
///
/// c and d hold two columns to a register: 0 is row g, 1 is row g+8.
///
/// # Safety
/// - *converged*: all 32 lanes execute it.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn m16n8k16_f16_f16(a: [u32; 4], b: [u32; 2], c: [u32; 2]) -> [u32; 2] {
    device!({
        crate::lanes::converge();
        let mut d = c;
        // SAFETY: convergence is the caller's promise. Not pure: the compiler could move it into a branch.
        unsafe {
            core::arch::asm!(
                "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {{{d0}, {d1}}}, {{{a0}, {a1}, {a2}, {a3}}}, \
                 {{{b0}, {b1}}}, {{{d0}, {d1}}};",
                d0 = inout(reg32) d[0], d1 = inout(reg32) d[1],
                a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                b0 = in(reg32) b[0], b1 = in(reg32) b[1], options(nomem, nostack));
        }
        d
    } else {
        let d = crate::sim::mma(MmaKind::F16ToF16, a, b, [c[0], c[1], 0, 0]);
        [d[0], d[1]]
    })
}

/// `mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {d..}, {a..}, {b..}, {c..};`
///
/// a and b are f32 of which the lower 13 bits are ignored: round with
/// [`tf32_from_f32`](crate::cvt::tf32_from_f32) first, or truncate.
///
/// # Safety
/// - *converged*: all 32 lanes execute it.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn m16n8k8_f32_tf32(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    device!({
        // SAFETY: convergence is the caller's promise.
        let d = unsafe { llvm_tf32(a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]) };
        [d.0, d.1, d.2, d.3]
    } else {
        crate::sim::mma(MmaKind::Tf32, a, b, c.map(f32::to_bits)).map(f32::from_bits)
    })
}

/// `mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {d..}, {a..}, {b..}, {c..};` Exact, wrapping.
///
/// # Safety
/// - *converged*: all 32 lanes execute it.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn m16n8k32_s32_s8(a: [u32; 4], b: [u32; 2], c: [i32; 4]) -> [i32; 4] {
    device!({
        // SAFETY: convergence is the caller's promise.
        let d = unsafe { llvm_s8(a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]) };
        [d.0, d.1, d.2, d.3]
    } else {
        crate::sim::mma(MmaKind::S8, a, b, c.map(|x| x as u32)).map(|x| x as i32)
    })
}
