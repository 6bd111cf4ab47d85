//! `ldmatrix` and `stmatrix`: 8 × 8 matrices of 16-bit elements between shared memory and the fragments of
//! [`mma`](crate::mma) and [`wgmma`](crate::wgmma).
//!
//! A matrix has eight rows of 16 bytes, anywhere in shared memory. Lane l gives the address of row `l % 8` of matrix
//! `l / 8`; addresses of lanes beyond the matrices asked for are not used. Register m of lane l holds columns
//! `2·(l % 4)` and the next of row `l / 4` of matrix m, or with `trans` of its transpose. Rows of 8-bit elements work
//! as pairs, but not transposed.

macro_rules! ldmatrix {
    ($(#[$doc:meta])* $name:ident, $registers:literal, $transpose:ident, $ptx:literal, $($d:ident)+) => {
        $(#[$doc])*
        ///
        #[doc = concat!("`", $ptx, " {r..}, [address];` Floor sm_80 (sm_75).")]
        ///
        /// # Safety
        /// - *converged*: all 32 lanes execute it.
        /// - *aligned(16)* and *in-bounds(dynamic shared memory)*: the addresses that are used, 16 bytes each.
        /// - *initialised*: by a write and a barrier before.
        #[cfg(not(lacks_mma_sync))]
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $name(address: u32) -> [u32; $registers] {
            device!({
                crate::lanes::converge();
                $(let $d: u32;)+
                // SAFETY: the caller's promise. Reads memory, so neither pure nor nomem.
                unsafe {
                    core::arch::asm!(concat!($ptx, " {{", vector_operands!($($d)+), "}}, [{address}];"),
                        $($d = out(reg32) $d,)+ address = in(reg32) address, options(nostack, readonly));
                }
                [$($d),+]
            } else {
                let [$($d,)+ ..] = crate::sim::ldmatrix($registers, crate::sim::fragment::Transpose::$transpose, address);
                [$($d),+]
            })
        }
    };
}

macro_rules! stmatrix {
    ($(#[$doc:meta])* $name:ident, $registers:literal, $transpose:ident, $ptx:literal, $($d:ident)+) => {
        $(#[$doc])*
        ///
        #[doc = concat!("`", $ptx, " [address], {r..};` Floor sm_90a.")]
        ///
        /// # Safety
        /// - *converged*: all 32 lanes execute it.
        /// - *aligned(16)* and *in-bounds(dynamic shared memory)*: the addresses that are used, 16 bytes each.
        /// - *exclusive*: no other thread touches the rows until the next barrier, and no two rows overlap.
        #[cfg(not(lacks_stmatrix))]
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $name(address: u32, registers: [u32; $registers]) {
            device!({
                crate::lanes::converge();
                let [$($d),+] = registers;
                // SAFETY: the caller's promise.
                unsafe {
                    core::arch::asm!(concat!($ptx, " [{address}], {{", vector_operands!($($d)+), "}};"),
                        $($d = in(reg32) $d,)+ address = in(reg32) address, options(nostack));
                }
            } else {
                let mut all = [0; 4];
                all[..$registers].copy_from_slice(&registers);
                crate::sim::stmatrix($registers, crate::sim::fragment::Transpose::$transpose, address, all)
            })
        }
    };
}

ldmatrix!(
    /// One matrix.
    load_x1, 1, No, "ldmatrix.sync.aligned.m8n8.x1.shared.b16", a);
ldmatrix!(
    /// Two matrices.
    load_x2, 2, No, "ldmatrix.sync.aligned.m8n8.x2.shared.b16", a b);
ldmatrix!(
    /// Four matrices.
    load_x4, 4, No, "ldmatrix.sync.aligned.m8n8.x4.shared.b16", a b c d);
ldmatrix!(
    /// One matrix, transposed.
    load_x1_trans, 1, Yes, "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16", a);
ldmatrix!(
    /// Two matrices, transposed.
    load_x2_trans, 2, Yes, "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16", a b);
ldmatrix!(
    /// Four matrices, transposed.
    load_x4_trans, 4, Yes, "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", a b c d);

stmatrix!(
    /// One matrix.
    store_x1, 1, No, "stmatrix.sync.aligned.m8n8.x1.shared.b16", a);
stmatrix!(
    /// Two matrices.
    store_x2, 2, No, "stmatrix.sync.aligned.m8n8.x2.shared.b16", a b);
stmatrix!(
    /// Four matrices.
    store_x4, 4, No, "stmatrix.sync.aligned.m8n8.x4.shared.b16", a b c d);
stmatrix!(
    /// One matrix, transposed.
    store_x1_trans, 1, Yes, "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16", a);
stmatrix!(
    /// Two matrices, transposed.
    store_x2_trans, 2, Yes, "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16", a b);
stmatrix!(
    /// Four matrices, transposed.
    store_x4_trans, 4, Yes, "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16", a b c d);
