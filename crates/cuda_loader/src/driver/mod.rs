//! The driver's calls, on raw handles ([`sys`]).
//!
//! `cust` 0.3.2 has many of them too, and lacks others: its streams always wait for the legacy default stream, its
//! events are used up by waiting for them, its modules keep no assembler log, and none of the three takes a caller's
//! raw handle. Devices, contexts and memory can be had of either.
//!
//! # Safety of handles
//!
//! A function that takes a stream, event, function or module handle is `unsafe`, because the driver follows the handle
//! without a check. The contract is the same for all: the handle is **live**, that is, made by the driver, not yet
//! destroyed, and its context has not been destroyed either. A null stream is live; it is the legacy default stream.
//!
//! Functions that make something need a current context ([`PrimaryContext::set_current`]) and return
//! `CUDA_ERROR_INVALID_CONTEXT` without one. Any call can also return an error of earlier asynchronous work.

mod device;
pub(crate) mod ffi;
mod function;
mod graph;
mod memory;
mod module;
mod stream;
pub mod sys;
mod tensor_map;
mod virtual_memory;

pub use device::{
    DeviceAttribute, PrimaryContext, can_access_peer, device_attribute, device_get, device_name,
    device_total_memory, enable_peer_access, synchronize_context,
};
pub use function::{
    FuncAttribute, LaunchAttributes, Overlap, func_attribute, launch_kernel, launch_kernel_ex,
    occupancy_max_active_blocks, occupancy_max_active_clusters, set_max_dynamic_shared,
};
pub use graph::{
    Graph, GraphExec, RelaxedCapture, stream_begin_capture, stream_end_capture, stream_is_capturing,
};
pub use memory::{
    is_known_memory, mem_alloc, mem_free, mem_free_host, mem_get_info, mem_host_alloc, memcpy_dtod_async,
    memcpy_dtoh_async, memcpy_htod_async, memset_d8_async, memset_d32_async,
};
pub use module::{ModuleError, module_get_function, module_load_cubin, module_load_data, module_unload};
pub use stream::{
    StreamCallback, Timing, event_create, event_destroy, event_elapsed_ms, event_query, event_record,
    event_synchronize, stream_add_callback, stream_create, stream_destroy, stream_query, stream_synchronize,
    stream_wait_event,
};
pub use tensor_map::{
    TensorMap, TensorMapDataType, TensorMapInterleave, TensorMapL2Promotion, TensorMapOobFill,
    TensorMapParams, TensorMapSwizzle, tensor_map_encode_tiled,
};
pub use virtual_memory::{
    MemoryHandle, mem_address_free, mem_address_reserve, mem_create, mem_granularity, mem_map, mem_release,
    mem_set_access, mem_unmap,
};
