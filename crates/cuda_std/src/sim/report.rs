//! What the simulator says of a defect.

use core::fmt;
use core::panic::Location;
use std::string::String;

use super::Arch;

/// The kind of a defect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Defect {
    /// An access outside the buffers, or outside the block's shared memory.
    OutOfBounds,
    /// An address that is not a multiple of the access's size.
    Misaligned,
    /// A read of memory that nothing has written.
    Uninitialised,
    /// Two accesses, one of them a write, with no order between them.
    Race,
    /// The asynchronous proxy reads or overwrites what ordinary stores wrote, without a proxy fence between.
    ProxyFence,
    /// Threads that must execute an instruction together do not.
    Divergence,
    /// Threads wait for what cannot happen any more.
    Deadlock,
    /// An mbarrier that is used against its rules.
    Mbarrier,
    /// Asynchronous work that is not waited for, or a wait that does not match.
    Asynchronous,
    /// A launch or an instruction that the floor does not have, or arguments that PTX does not allow.
    Unsupported,
    /// The kernel panicked (an index, an overflow, …) or trapped.
    Panic,
}

/// A defect that the simulator found: where, and what.
#[derive(Debug, thiserror::Error)]
pub struct Report {
    /// What kind of defect it is.
    pub defect: Defect,
    /// The kernel's name.
    pub kernel: String,
    /// The floor that was simulated.
    pub arch: Arch,
    /// The seed of the simulation.
    pub seed: u64,
    /// The card of that thread, where the kernel ran on several.
    pub device: Option<usize>,
    /// Block and thread, if one is to blame.
    pub thread: Option<([u32; 3], [u32; 3])>,
    /// The kernel's source line.
    pub location: Option<&'static Location<'static>>,
    /// What happened, with the earlier access if there is one.
    pub text: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel `{}`", self.kernel)?;
        if let Some(device) = self.device {
            write!(f, ", card {device}")?;
        }
        if let Some((block, thread)) = self.thread {
            write!(f, ", block {}, thread {}", Index(block), Index(thread))?;
        }
        if let Some(location) = self.location {
            write!(f, ", {}:{}", location.file(), location.line())?;
        }
        write!(f, ": {} [{}, seed {}]", self.text, self.arch, self.seed)
    }
}

/// An index in x, y, z; one number if it has one dimension.
pub(super) struct Index(pub(super) [u32; 3]);

impl fmt::Display for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [x, 0, 0] => write!(f, "{x}"),
            [x, y, z] => write!(f, "({x}, {y}, {z})"),
        }
    }
}
