//! Moving registers between the warpgroups of a block (Hopper). Floor sm_90a.
//!
//! A block starts with the same number of registers for every thread. Producers give most of theirs back, consumers
//! take them: `dec` first, then `inc`, each right where the roles part. The kernel must state `max_threads`, without
//! which ptxas ignores both. `N` is a multiple of 8 from 24 to 256.

#[cfg(target_arch = "nvptx64")]
#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.setmaxnreg.inc.sync.aligned.u32"]
    fn llvm_inc(registers: i32);
    #[link_name = "llvm.nvvm.setmaxnreg.dec.sync.aligned.u32"]
    fn llvm_dec(registers: i32);
}

macro_rules! set_max_registers {
    ($(#[$doc:meta])* $name:ident, $intrinsic:ident, $ptx:literal) => {
        #[doc = concat!("`", $ptx, " N;`")]
        $(#[$doc])*
        ///
        /// # Safety
        /// - *converged*: all 128 threads of the warpgroup execute it.
        /// - It changes the number in the direction of its name.
        #[inline(always)]
        #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
        pub unsafe fn $name<const N: u32>() {
            const { assert!(N >= 24 && N <= 256 && N.is_multiple_of(8), "N is a multiple of 8 from 24 to 256") };
            device!({
                // SAFETY: the caller's promise.
                unsafe { $intrinsic(const { N as i32 }) }
            } else {
                crate::sim::set_max_registers($ptx, N)
            })
        }
    };
}

set_max_registers!(
    /// Waits until the block has that many registers to spare, then takes them.
    increase, llvm_inc, "setmaxnreg.inc.sync.aligned.u32");
set_max_registers!(
    /// Gives registers back.
    decrease, llvm_dec, "setmaxnreg.dec.sync.aligned.u32");
