//! The driver's functions by name, each with a slot that holds where its calls go.
//!
//! This crate calls through the slots (`driver::ffi`). With the feature `cust` each function that `cust_raw` declares
//! is also defined here by its link name, as a jump through its slot: a jump keeps the caller's registers and stack as
//! they are, so no signature has to be repeated. Without it no such name is defined, and another crate of the program
//! may link `libcuda` as it likes.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::error::{NOT_FOUND, NOT_INITIALIZED, error_name, error_string};
use crate::load::{first_init, first_version};

/// What every slot but four holds until a driver is loaded. It takes no arguments, so any call may end here.
extern "C" fn not_loaded() -> u32 {
    NOT_INITIALIZED
}

/// What the slot of a symbol that the loaded driver lacks holds.
extern "C" fn missing() -> u32 {
    NOT_FOUND
}

/// One function: its link name and where its jump goes.
struct Entry {
    name: &'static CStr,
    slot: &'static AtomicPtr<c_void>,
}

/// Fills the table: what `address` does not find will answer `CUDA_ERROR_NOT_FOUND`.
///
/// # Safety
/// `address` returns only the driver's function of that name, and the driver stays loaded for the life of the process.
pub(crate) unsafe fn fill(address: impl Fn(&CStr) -> Option<*mut c_void>) {
    for entry in TABLE {
        let target = address(entry.name).unwrap_or(missing as *mut c_void);
        entry.slot.store(target, Ordering::Release);
    }
}

/// Defines one driver function. Hidden, so that it is not exported from the finished binary: it would otherwise take
/// the place of the driver's own function inside the driver, and in other libraries of the process.
#[cfg(all(feature = "cust", target_os = "linux", target_arch = "x86_64"))]
macro_rules! thunk {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub(super) unsafe extern "C" fn $name() -> u32 {
            core::arch::naked_asm!(
                concat!(".hidden ", stringify!($name)),
                "jmp qword ptr [rip + {slot}]",
                slot = sym super::slot::$name,
            )
        }
    };
}

#[cfg(all(feature = "cust", target_os = "linux", target_arch = "aarch64"))]
macro_rules! thunk {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub(super) unsafe extern "C" fn $name() -> u32 {
            // x16 is the register that a call may change on its way to the callee.
            core::arch::naked_asm!(
                concat!(".hidden ", stringify!($name)),
                "adrp x16, {slot}",
                "ldr x16, [x16, :lo12:{slot}]",
                "br x16",
                slot = sym super::slot::$name,
            )
        }
    };
}

/// Elsewhere the answer is always the same.
#[cfg(all(
    feature = "cust",
    not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))
))]
macro_rules! thunk {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $name() -> u32 {
            crate::error::NOT_INITIALIZED
        }
    };
}

macro_rules! driver_symbols {
    (
        called { $($called:ident)* }
        newer { $($newer:ident)* }
        works_unloaded { $($early:ident: $stand_in:path,)* }
        cust { $($cust:ident)* }
    ) => {
        /// Where the calls of each function go: a function's address, never null.
        #[allow(non_upper_case_globals)]
        pub(crate) mod slot {
            use super::*;
            $(pub(crate) static $called: AtomicPtr<c_void> = AtomicPtr::new(not_loaded as *mut c_void);)*
            $(pub(crate) static $newer: AtomicPtr<c_void> = AtomicPtr::new(not_loaded as *mut c_void);)*
            $(pub(crate) static $early: AtomicPtr<c_void> = AtomicPtr::new($stand_in as *mut c_void);)*
            $(#[cfg(feature = "cust")]
            pub(super) static $cust: AtomicPtr<c_void> = AtomicPtr::new(not_loaded as *mut c_void);)*
        }

        #[cfg(feature = "cust")]
        #[allow(non_snake_case)]
        mod thunk {
            $(thunk!($called);)*
            $(thunk!($early);)*
            $(thunk!($cust);)*
        }

        /// `cuInit` comes last: whoever gets through it finds the rest filled.
        static TABLE: &[Entry] = &[
            $(#[cfg(feature = "cust")] Entry::new(concat!(stringify!($cust), "\0"), &slot::$cust),)*
            $(Entry::new(concat!(stringify!($called), "\0"), &slot::$called),)*
            $(Entry::new(concat!(stringify!($newer), "\0"), &slot::$newer),)*
            $(Entry::new(concat!(stringify!($early), "\0"), &slot::$early),)*
        ];

        /// Name, address in this crate, and the address to which `cust_raw`'s declaration was linked.
        #[cfg(all(test, feature = "cust"))]
        fn bound() -> Vec<(&'static str, Thunk, usize)> {
            vec![
                $((stringify!($called), thunk::$called as Thunk, cust::sys::$called as *const () as usize),)*
                $((stringify!($early), thunk::$early as Thunk, cust::sys::$early as *const () as usize),)*
                $((stringify!($cust), thunk::$cust as Thunk, cust::sys::$cust as *const () as usize),)*
            ]
        }

        /// Those with an answer of their own before a driver is loaded.
        #[cfg(test)]
        const WORKS_UNLOADED: &[&str] = &[$(stringify!($early),)*];
    };
}

impl Entry {
    const fn new(with_nul: &'static str, slot: &'static AtomicPtr<c_void>) -> Self {
        match CStr::from_bytes_with_nul(with_nul.as_bytes()) {
            Ok(name) => Entry { name, slot },
            Err(_) => panic!("a symbol name has exactly one nul, at its end"),
        }
    }
}

driver_symbols! {
    // Called by crate::driver; cust_raw declares them too.
    called {
        cuCtxEnablePeerAccess cuCtxSetCurrent cuCtxSynchronize cuDeviceCanAccessPeer cuDeviceGet cuDeviceGetAttribute cuDeviceGetCount cuDeviceGetName
        cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain cuDeviceTotalMem_v2 cuEventCreate
        cuEventDestroy_v2 cuEventElapsedTime cuEventQuery cuEventRecord cuEventSynchronize
        cuFuncGetAttribute cuFuncSetAttribute cuGraphDestroy cuGraphExecDestroy cuGraphInstantiateWithFlags
        cuGraphLaunch cuLaunchKernel cuMemAlloc_v2 cuMemFreeHost cuMemFree_v2 cuMemGetInfo_v2 cuMemHostAlloc cuMemcpyDtoDAsync_v2
        cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity cuMemMap cuMemRelease
        cuMemSetAccess cuMemUnmap cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2 cuMemsetD32Async cuMemsetD8Async cuModuleGetFunction
        cuModuleLoadDataEx cuModuleUnload cuOccupancyMaxActiveBlocksPerMultiprocessor cuPointerGetAttributes
        cuStreamAddCallback cuStreamBeginCapture_v2 cuStreamCreate cuStreamDestroy_v2 cuStreamEndCapture cuStreamIsCapturing
        cuStreamQuery cuStreamSynchronize cuStreamWaitEvent cuThreadExchangeStreamCaptureMode
    }
    // Called by crate::driver; newer than cust_raw's bindings.
    newer {
        cuLaunchKernelEx cuOccupancyMaxActiveClusters cuTensorMapEncodeTiled
    }
    works_unloaded {
        cuGetErrorName: error_name,
        cuGetErrorString: error_string,
        cuDriverGetVersion: first_version,
        cuInit: first_init,
    }
    // The other link names that cust_raw 0.11.3 declares.
    cust {
        cuArray3DCreate_v2 cuArray3DGetDescriptor_v2 cuArrayCreate_v2 cuArrayDestroy cuArrayGetDescriptor_v2
        cuArrayGetPlane cuArrayGetSparseProperties cuCtxAttach cuCtxCreate_v2 cuCtxCreate_v3 cuCtxDestroy_v2
        cuCtxDetach cuCtxDisablePeerAccess cuCtxGetApiVersion cuCtxGetCacheConfig
        cuCtxGetCurrent cuCtxGetDevice cuCtxGetExecAffinity cuCtxGetFlags cuCtxGetLimit
        cuCtxGetSharedMemConfig cuCtxGetStreamPriorityRange cuCtxPopCurrent_v2 cuCtxPushCurrent_v2
        cuCtxResetPersistingL2Cache cuCtxSetCacheConfig cuCtxSetLimit cuCtxSetSharedMemConfig
        cuDestroyExternalMemory cuDestroyExternalSemaphore cuDeviceComputeCapability
        cuDeviceGetByPCIBusId cuDeviceGetDefaultMemPool cuDeviceGetExecAffinitySupport
        cuDeviceGetGraphMemAttribute cuDeviceGetLuid cuDeviceGetMemPool cuDeviceGetNvSciSyncAttributes
        cuDeviceGetP2PAttribute cuDeviceGetPCIBusId cuDeviceGetProperties cuDeviceGetTexture1DLinearMaxWidth
        cuDeviceGetUuid cuDeviceGetUuid_v2 cuDeviceGraphMemTrim cuDevicePrimaryCtxGetState
        cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxSetFlags_v2 cuDeviceSetGraphMemAttribute
        cuDeviceSetMemPool cuEventRecordWithFlags cuExternalMemoryGetMappedBuffer
        cuExternalMemoryGetMappedMipmappedArray cuFlushGPUDirectRDMAWrites cuFuncGetModule
        cuFuncSetBlockShape cuFuncSetCacheConfig cuFuncSetSharedMemConfig cuFuncSetSharedSize
        cuGetExportTable cuGetProcAddress cuGraphAddChildGraphNode cuGraphAddDependencies
        cuGraphAddEmptyNode cuGraphAddEventRecordNode cuGraphAddEventWaitNode
        cuGraphAddExternalSemaphoresSignalNode cuGraphAddExternalSemaphoresWaitNode cuGraphAddHostNode
        cuGraphAddKernelNode cuGraphAddMemAllocNode cuGraphAddMemFreeNode cuGraphAddMemcpyNode
        cuGraphAddMemsetNode cuGraphChildGraphNodeGetGraph cuGraphClone cuGraphCreate cuGraphDebugDotPrint
        cuGraphDestroyNode cuGraphEventRecordNodeGetEvent cuGraphEventRecordNodeSetEvent
        cuGraphEventWaitNodeGetEvent cuGraphEventWaitNodeSetEvent cuGraphExecChildGraphNodeSetParams
        cuGraphExecEventRecordNodeSetEvent cuGraphExecEventWaitNodeSetEvent
        cuGraphExecExternalSemaphoresSignalNodeSetParams cuGraphExecExternalSemaphoresWaitNodeSetParams
        cuGraphExecHostNodeSetParams cuGraphExecKernelNodeSetParams cuGraphExecMemcpyNodeSetParams
        cuGraphExecMemsetNodeSetParams cuGraphExecUpdate cuGraphExternalSemaphoresSignalNodeGetParams
        cuGraphExternalSemaphoresSignalNodeSetParams cuGraphExternalSemaphoresWaitNodeGetParams
        cuGraphExternalSemaphoresWaitNodeSetParams cuGraphGetEdges cuGraphGetNodes cuGraphGetRootNodes
        cuGraphHostNodeGetParams cuGraphHostNodeSetParams cuGraphInstantiate_v2
        cuGraphKernelNodeCopyAttributes cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams
        cuGraphKernelNodeSetAttribute cuGraphKernelNodeSetParams cuGraphMemAllocNodeGetParams
        cuGraphMemFreeNodeGetParams cuGraphMemcpyNodeGetParams cuGraphMemcpyNodeSetParams
        cuGraphMemsetNodeGetParams cuGraphMemsetNodeSetParams cuGraphNodeFindInClone
        cuGraphNodeGetDependencies cuGraphNodeGetDependentNodes cuGraphNodeGetType cuGraphReleaseUserObject
        cuGraphRemoveDependencies cuGraphRetainUserObject cuGraphUpload cuGraphicsMapResources
        cuGraphicsResourceGetMappedMipmappedArray cuGraphicsResourceGetMappedPointer_v2
        cuGraphicsResourceSetMapFlags_v2 cuGraphicsSubResourceGetMappedArray cuGraphicsUnmapResources
        cuGraphicsUnregisterResource cuImportExternalMemory cuImportExternalSemaphore cuIpcCloseMemHandle
        cuIpcGetEventHandle cuIpcGetMemHandle cuIpcOpenEventHandle cuIpcOpenMemHandle_v2 cuLaunch
        cuLaunchCooperativeKernel cuLaunchCooperativeKernelMultiDevice cuLaunchGrid cuLaunchGridAsync
        cuLaunchHostFunc cuLinkAddData_v2 cuLinkAddFile_v2 cuLinkComplete cuLinkCreate_v2 cuLinkDestroy
        cuMemAdvise cuMemAllocAsync cuMemAllocFromPoolAsync
        cuMemAllocHost_v2 cuMemAllocManaged cuMemAllocPitch_v2 cuMemExportToShareableHandle
        cuMemFreeAsync cuMemGetAccess cuMemGetAddressRange_v2 cuMemGetAllocationPropertiesFromHandle
        cuMemHostGetDevicePointer_v2 cuMemHostGetFlags
        cuMemHostRegister_v2 cuMemHostUnregister cuMemImportFromShareableHandle cuMemMapArrayAsync
        cuMemPoolCreate cuMemPoolDestroy cuMemPoolExportPointer cuMemPoolExportToShareableHandle
        cuMemPoolGetAccess cuMemPoolGetAttribute cuMemPoolImportFromShareableHandle cuMemPoolImportPointer
        cuMemPoolSetAccess cuMemPoolSetAttribute cuMemPoolTrimTo cuMemPrefetchAsync cuMemRangeGetAttribute
        cuMemRangeGetAttributes cuMemRetainAllocationHandle cuMemcpy
        cuMemcpy2DAsync_v2 cuMemcpy2DUnaligned_v2 cuMemcpy2D_v2 cuMemcpy3DAsync_v2 cuMemcpy3DPeer
        cuMemcpy3DPeerAsync cuMemcpy3D_v2 cuMemcpyAsync cuMemcpyAtoA_v2 cuMemcpyAtoD_v2 cuMemcpyAtoHAsync_v2
        cuMemcpyAtoH_v2 cuMemcpyDtoA_v2 cuMemcpyDtoD_v2 cuMemcpyDtoH_v2 cuMemcpyHtoAAsync_v2 cuMemcpyHtoA_v2
        cuMemcpyHtoD_v2 cuMemcpyPeer cuMemcpyPeerAsync cuMemsetD16Async cuMemsetD16_v2 cuMemsetD2D16Async
        cuMemsetD2D16_v2 cuMemsetD2D32Async cuMemsetD2D32_v2 cuMemsetD2D8Async cuMemsetD2D8_v2
        cuMemsetD32_v2 cuMemsetD8_v2 cuMipmappedArrayCreate cuMipmappedArrayDestroy cuMipmappedArrayGetLevel
        cuMipmappedArrayGetSparseProperties cuModuleGetGlobal_v2 cuModuleGetSurfRef cuModuleGetTexRef
        cuModuleLoad cuModuleLoadData cuModuleLoadFatBinary cuOccupancyAvailableDynamicSMemPerBlock
        cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxPotentialBlockSize
        cuOccupancyMaxPotentialBlockSizeWithFlags cuParamSetSize cuParamSetTexRef cuParamSetf cuParamSeti
        cuParamSetv cuPointerGetAttribute cuPointerSetAttribute cuProfilerInitialize cuProfilerStart
        cuProfilerStop cuSignalExternalSemaphoresAsync cuStreamAttachMemAsync
        cuStreamBatchMemOp cuStreamCopyAttributes cuStreamCreateWithPriority cuStreamGetAttribute
        cuStreamGetCaptureInfo cuStreamGetCaptureInfo_v2 cuStreamGetCtx cuStreamGetFlags cuStreamGetPriority
        cuStreamSetAttribute cuStreamUpdateCaptureDependencies cuStreamWaitValue32 cuStreamWaitValue64
        cuStreamWriteValue32 cuStreamWriteValue64 cuSurfObjectCreate cuSurfObjectDestroy
        cuSurfObjectGetResourceDesc cuSurfRefGetArray cuSurfRefSetArray cuTexObjectCreate cuTexObjectDestroy
        cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc cuTexRefCreate
        cuTexRefDestroy cuTexRefGetAddressMode cuTexRefGetAddress_v2 cuTexRefGetArray cuTexRefGetBorderColor
        cuTexRefGetFilterMode cuTexRefGetFlags cuTexRefGetFormat cuTexRefGetMaxAnisotropy
        cuTexRefGetMipmapFilterMode cuTexRefGetMipmapLevelBias cuTexRefGetMipmapLevelClamp
        cuTexRefGetMipmappedArray cuTexRefSetAddress2D_v3 cuTexRefSetAddressMode cuTexRefSetAddress_v2
        cuTexRefSetArray cuTexRefSetBorderColor cuTexRefSetFilterMode cuTexRefSetFlags cuTexRefSetFormat
        cuTexRefSetMaxAnisotropy cuTexRefSetMipmapFilterMode cuTexRefSetMipmapLevelBias
        cuTexRefSetMipmapLevelClamp cuTexRefSetMipmappedArray cuUserObjectCreate cuUserObjectRelease
        cuUserObjectRetain cuWaitExternalSemaphoresAsync
    }
}

#[cfg(all(test, feature = "cust"))]
type Thunk = unsafe extern "C" fn() -> u32;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    #[cfg(feature = "cust")]
    use std::path::PathBuf;

    use super::*;

    #[cfg(feature = "cust")]
    #[test]
    fn cust_is_linked_to_our_definitions() {
        for (name, thunk, linked) in bound() {
            assert_eq!(thunk as usize, linked, "{name} of cust_raw is not ours");
        }
    }

    #[test]
    fn every_slot_answers_not_initialized_before_load() {
        let early =
            |entry: &&Entry| WORKS_UNLOADED.iter().any(|name| name.as_bytes() == entry.name.to_bytes());
        for entry in TABLE.iter().filter(|entry| !early(entry)) {
            let target = entry.slot.load(Ordering::Acquire);
            // SAFETY: no driver is loaded — no test of this binary calls `load` —, so the slot holds a copy of
            // `not_loaded`, which takes no arguments. (A function's address says less: each codegen unit may have one.)
            let target: extern "C" fn() -> u32 = unsafe { std::mem::transmute(target) };
            let answer = target();
            assert_eq!(answer, NOT_INITIALIZED, "{:?}", entry.name);
        }
        let error = crate::driver::synchronize_context().unwrap_err();
        assert_eq!(error.code, NOT_INITIALIZED);
    }

    #[test]
    fn functions_have_slots_of_their_own() {
        let names: BTreeSet<&CStr> = TABLE.iter().map(|entry| entry.name).collect();
        let slots: BTreeSet<usize> = TABLE.iter().map(|entry| entry.slot as *const _ as usize).collect();
        assert_eq!((names.len(), slots.len()), (TABLE.len(), TABLE.len()));
    }

    #[cfg(feature = "cust")]
    #[test]
    fn every_jump_answers_not_initialized_before_load() {
        let thunks: BTreeSet<usize> = bound().iter().map(|row| row.1 as usize).collect();
        assert!(thunks.len() == bound().len() && !thunks.contains(&0));
        for (_, thunk, _) in bound().into_iter().filter(|row| !WORKS_UNLOADED.contains(&row.0)) {
            // SAFETY: no driver is loaded, so this ends in `not_loaded` — no test of this binary calls `load`.
            assert_eq!(unsafe { thunk() }, NOT_INITIALIZED);
        }
    }

    #[cfg(feature = "cust")]
    #[test]
    fn the_table_has_every_function_that_cust_raw_declares() {
        let Some(bindings) = cust_raw_bindings() else {
            eprintln!("skipped: the source of cust_raw is not in cargo's registry folder on this machine");
            return;
        };
        let declared: BTreeSet<&str> = bindings
            .lines()
            .filter_map(|line| line.trim().strip_prefix("pub fn "))
            .filter_map(|rest| rest.split('(').next())
            .collect();
        let ours: BTreeSet<&str> = bound().iter().map(|row| row.0).collect();
        assert!(declared.len() > 300, "the bindings were not understood: {} functions", declared.len());
        assert_eq!(declared, ours);
    }

    /// The bindings of the version that the lock file names.
    #[cfg(feature = "cust")]
    fn cust_raw_bindings() -> Option<String> {
        let lock = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.lock")).ok()?;
        let version = lock.split_once("name = \"cust_raw\"\nversion = \"")?.1.split('"').next()?;
        let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
        let home = home.or_else(|| Some(std::env::home_dir()?.join(".cargo")))?;
        let mut registries = std::fs::read_dir(home.join("registry/src")).ok()?.flatten();
        let file = format!("cust_raw-{version}/src/cuda.rs");
        registries.find_map(|registry| std::fs::read_to_string(registry.path().join(&file)).ok())
    }
}
