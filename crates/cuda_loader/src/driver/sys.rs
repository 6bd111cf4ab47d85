//! The driver's handle types: `cust`'s with that feature, else the same by their names in C.

#[cfg(feature = "cust")]
pub use cust::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream,
};

#[cfg(not(feature = "cust"))]
pub use own::*;

#[cfg(not(feature = "cust"))]
mod own {
    /// A device, which is a number.
    pub type CUdevice = std::ffi::c_int;
    /// An address in a device's memory.
    pub type CUdeviceptr = std::ffi::c_ulonglong;

    macro_rules! handles {
        ($($(#[$doc:meta])* $name:ident: $to:ident;)*) => {$(
            /// What the handle points to, which only the driver knows.
            #[repr(C)]
            #[derive(Debug, Clone, Copy)]
            #[allow(non_camel_case_types, reason = "the name in C")]
            pub struct $to {
                _unknown: [u8; 0],
            }
            $(#[$doc])*
            pub type $name = *mut $to;
        )*};
    }

    handles! {
        /// A context.
        CUcontext: CUctx_st;
        /// An event.
        CUevent: CUevent_st;
        /// A kernel of a module.
        CUfunction: CUfunc_st;
        /// A recorded graph.
        CUgraph: CUgraph_st;
        /// A graph that can be launched.
        CUgraphExec: CUgraphExec_st;
        /// A module.
        CUmodule: CUmod_st;
        /// A stream; null is the legacy default stream.
        CUstream: CUstream_st;
    }
}
