//! What stands in for CUDA in a build without it: types that have no values, so nothing of them can run.

use std::any::Any;
use std::convert::Infallible;
use std::ffi::c_void;
use std::sync::Arc;

use abi::Arch;

use crate::backing::{Backing, Released};
use crate::error::{DriverError, Error};
use crate::images::Image;
use crate::param::LaunchShape;
use crate::profile::{HardwareProfile, Place, Resources};
use crate::tensor_map::{TensorMap, Tiled};

fn no_driver() -> Error {
    Error::NoDriver { reason: "this build has no CUDA backend (cargo feature `cuda`)".into() }
}

pub(crate) fn device_count() -> Result<usize, Error> {
    Err(no_driver())
}

pub(crate) fn detect(_ordinal: usize) -> Result<HardwareProfile, Error> {
    Err(no_driver())
}

#[derive(Debug)]
pub(crate) struct Context(Infallible);

impl Context {
    pub(crate) fn open(_ordinal: usize) -> Result<Self, Error> {
        Err(no_driver())
    }

    pub(crate) fn profile(&self) -> &HardwareProfile {
        match self.0 {}
    }

    pub(crate) fn tensor_map(&self, _tiled: &Tiled) -> Result<TensorMap, Error> {
        match self.0 {}
    }
}

impl Context {
    pub(crate) fn enable_peer(&self, _other: &Context) -> Result<bool, Error> {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct HostWord(Infallible);

impl HostWord {
    pub(crate) fn new(context: Arc<Context>) -> Result<Self, Error> {
        match context.0 {}
    }

    pub(crate) fn address(&self) -> u64 {
        match self.0 {}
    }

    pub(crate) fn read(&self) -> u32 {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct Pinned(Infallible);

impl Pinned {
    pub(crate) fn new(context: Arc<Context>, _bytes: usize) -> Result<Option<Self>, Error> {
        match context.0 {}
    }

    pub(crate) fn bytes(&self) -> usize {
        match self.0 {}
    }

    pub(crate) fn upload(self, _stream: &Stream, _address: u64, _data: &[u8]) -> Result<Self, Error> {
        match self.0 {}
    }

    pub(crate) fn download(self, _stream: &Stream, _address: u64, _bytes: usize) -> Result<Self, Error> {
        match self.0 {}
    }

    pub(crate) fn has_passed(&self) -> Result<bool, Error> {
        match self.0 {}
    }

    pub(crate) fn close(self) -> Result<(), Error> {
        match self.0 {}
    }

    pub(crate) fn wait(&self) -> Result<(), Error> {
        match self.0 {}
    }

    /// # Safety
    /// None: it cannot be called.
    pub(crate) unsafe fn read(&self, _bytes: usize) -> &[u8] {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct Stream(Infallible);

impl Stream {
    pub(crate) fn new(context: Arc<Context>) -> Result<Self, Error> {
        match context.0 {}
    }

    /// # Safety
    /// None: it cannot be called.
    pub(crate) unsafe fn of_caller(
        context: Arc<Context>,
        _handle: *mut c_void,
        _owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Self, Error> {
        match context.0 {}
    }

    pub(crate) fn place(&self) -> Place {
        match self.0 {}
    }

    pub(crate) fn handle(&self) -> *mut c_void {
        match self.0 {}
    }

    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        match self.0 {}
    }

    pub(crate) fn wait_for(&self, _other: &Stream) -> Result<(), Error> {
        match self.0 {}
    }

    pub(crate) fn is_done(&self) -> Result<bool, Error> {
        match self.0 {}
    }

    #[cfg(feature = "async")]
    pub(crate) fn end_when_passed(&self, _signal: Arc<crate::signal::Signal>) -> Result<(), Error> {
        match self.0 {}
    }

    #[cfg(feature = "async")]
    pub(crate) fn outcome(&self, _status: u32) -> Result<(), Error> {
        match self.0 {}
    }

    pub(crate) fn can_be_waited_for(&self) -> Result<bool, Error> {
        match self.0 {}
    }

    pub(crate) fn is_recorded(&self) -> Result<bool, Error> {
        match self.0 {}
    }

    pub(crate) fn upload(&self, _address: u64, _data: &[u8]) -> Result<(), Error> {
        match self.0 {}
    }

    pub(crate) fn download(&self, _address: u64, _data: &mut [u8]) -> Result<(), Error> {
        match self.0 {}
    }

    pub(crate) fn copy(&self, _from: u64, _to: u64, _bytes: usize) -> Result<(), Error> {
        match self.0 {}
    }

    pub(crate) fn fill_zero(&self, _address: u64, _bytes: usize) -> Result<(), Error> {
        match self.0 {}
    }

    /// # Safety
    /// None: it cannot be called.
    pub(crate) unsafe fn launch(
        &self,
        _entry: &EntryHandle,
        _shape: LaunchShape,
        _params: &mut [*mut c_void],
    ) -> Result<(), LaunchFailure> {
        match self.0 {}
    }

    pub(crate) fn capture(&self, _enqueue: impl FnOnce() -> Result<(), Error>) -> Result<Graph, Error> {
        match self.0 {}
    }

    pub(crate) fn record(&self) -> Result<Event, Error> {
        match self.0 {}
    }

    /// # Safety
    /// None: it cannot be called.
    pub(crate) unsafe fn launch_graph(&self, _graph: &Graph) -> Result<(), Error> {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct Event(Infallible);

impl Event {
    pub(crate) fn query(&self) -> Result<bool, Error> {
        match self.0 {}
    }

    pub(crate) fn elapsed_ms(&self, _earlier: &Event) -> Result<f32, Error> {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct Graph(#[allow(dead_code)] Infallible);

#[derive(Debug)]
pub(crate) enum LaunchFailure {
    #[expect(dead_code, reason = "nothing is launched")]
    Launch(DriverError),
    #[expect(dead_code, reason = "nothing is launched")]
    Other(Error),
}

#[derive(Clone, Debug)]
pub(crate) struct EntryHandle(Infallible);

impl EntryHandle {
    pub(crate) fn blocks_per_sm(&self, _threads: u32, _smem_bytes: u32) -> Result<u32, Error> {
        match self.0 {}
    }

    pub(crate) fn clusters_at_a_time(
        &self,
        _threads: u32,
        _smem_bytes: u32,
        _cluster: u32,
    ) -> Result<u32, Error> {
        match self.0 {}
    }
}

#[derive(Clone, Debug)]
pub(crate) struct LoadedModule(Infallible);

pub(crate) struct Modules(Infallible);

impl Modules {
    pub(crate) fn new(context: Arc<Context>, _images: &'static [Image]) -> Self {
        match context.0 {}
    }

    pub(crate) fn entry(
        &self,
        _family: &'static str,
        _arch: Arch,
        _name: &'static str,
        _smem_bytes: u32,
    ) -> Result<(EntryHandle, Resources), Error> {
        match self.0 {}
    }

    pub(crate) fn load(&self, _op: &'static str, _ptx: &str, _target: &str) -> Result<LoadedModule, Error> {
        match self.0 {}
    }

    pub(crate) fn entry_in(
        &self,
        _module: &LoadedModule,
        _target: &str,
        _name: &'static str,
        _smem_bytes: u32,
    ) -> Result<(EntryHandle, Resources), Error> {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct DeviceMemory(Infallible);

impl DeviceMemory {
    pub(crate) fn new(context: Arc<Context>) -> Result<Self, Error> {
        match context.0 {}
    }
}

impl Backing for DeviceMemory {
    fn allocate(&self, _bytes: usize) -> Result<Option<u64>, Error> {
        match self.0 {}
    }

    unsafe fn release(&self, _blocks: &[(u64, usize)]) -> Result<Released, Error> {
        match self.0 {}
    }

    fn report(&self) -> (usize, usize, String) {
        match self.0 {}
    }
}
