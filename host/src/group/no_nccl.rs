//! What stands in for NCCL in a build without CUDA.

use std::sync::Arc;
use std::time::Duration;

use super::Transport;
use super::rendezvous::Rendezvous;
use crate::device::Device;
use crate::error::Error;

pub(super) struct Nccl;

fn none(op: &'static str, device: &Device) -> Error {
    let reason = "this build has no CUDA backend (cargo feature `cuda`)".into();
    Error::Unsupported { op, device: device.describe(), reason }
}

impl Nccl {
    pub(super) fn transports(
        op: &'static str,
        devices: &[Device],
        _timeout: Duration,
    ) -> Result<Vec<Arc<dyn Transport>>, Error> {
        devices.iter().map(|device| Err(none(op, device))).collect()
    }

    pub(super) fn join(
        op: &'static str,
        device: &Device,
        _rank: (usize, usize),
        _meeting: &Rendezvous,
        _timeout: Duration,
    ) -> Result<Arc<dyn Transport>, Error> {
        Err(none(op, device))
    }
}
