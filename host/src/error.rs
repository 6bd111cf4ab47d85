//! The one error type of the library.

use abi::Arch;

/// What can go wrong, with the facts in fields.
///
/// Three families, to be treated differently by a caller: *unsupported* (this device or type cannot do it: take another
/// path), *invalid* (the caller's mistake), and *driver* (CUDA said no; the driver's own words are in `source`).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument does not fit the operator or the plan.
    #[error("{op}: {argument}: expected {expected}, got {got}")]
    Invalid {
        /// The operator or function.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What came.
        got: String,
    },
    /// The device has no kernel for this problem.
    #[error("{op}: not supported on {device}: {reason}")]
    Unsupported {
        /// The operator.
        op: &'static str,
        /// The device's name and floor.
        device: String,
        /// Why not.
        reason: String,
    },
    /// There is no CUDA driver on this machine, or this build has no CUDA backend.
    #[error("no CUDA driver: {reason}")]
    NoDriver {
        /// What was tried and what the system said.
        reason: String,
    },
    /// The driver is there but reports no usable card, or not the one asked for.
    #[error("no CUDA device {ordinal}: the driver reports {count} device(s)")]
    NoDevice {
        /// The ordinal that was asked for.
        ordinal: usize,
        /// How many devices the driver reports.
        count: usize,
    },
    /// The card is older than every image, or cannot run the floor that was asked for.
    #[error("{name} has compute capability {major}.{minor}: {reason}")]
    UnsupportedCapability {
        /// The card's name.
        name: String,
        /// Major number of its compute capability.
        major: u32,
        /// Minor number of its compute capability.
        minor: u32,
        /// What it cannot run.
        reason: String,
    },
    /// The driver is too old for the PTX version of an image.
    #[error(
        "image {family} for {arch} is PTX {ptx_major}.{ptx_minor}, which needs a CUDA {needed_major}.{needed_minor} \
         driver (branch {branch} or later); the installed driver supports CUDA {found_major}.{found_minor}"
    )]
    DriverTooOld {
        /// The operator family of the image.
        family: &'static str,
        /// The floor of the image.
        arch: Arch,
        /// Major number of the PTX version.
        ptx_major: u32,
        /// Minor number of the PTX version.
        ptx_minor: u32,
        /// Major number of the first CUDA version that takes it.
        needed_major: u32,
        /// Minor number of the first CUDA version that takes it.
        needed_minor: u32,
        /// The first driver branch of that CUDA version.
        branch: u32,
        /// Major number of the CUDA version that the driver supports.
        found_major: u32,
        /// Minor number of the CUDA version that the driver supports.
        found_minor: u32,
    },
    /// This build holds no image for the operator and floor.
    #[error("no image of {family} for {arch} in this build; it holds: {available}")]
    MissingImage {
        /// The operator family.
        family: &'static str,
        /// The floor.
        arch: Arch,
        /// The images that are there.
        available: String,
    },
    /// The driver refused an image.
    #[error("the driver refused the image {family} for {arch}: {log}")]
    Image {
        /// The operator family of the image.
        family: &'static str,
        /// The floor of the image.
        arch: Arch,
        /// The driver's own assembler log.
        log: String,
        /// The driver's error.
        source: DriverError,
    },
    /// The driver refused a program's own PTX, see [`Module`](crate::Module).
    #[error("the driver refused PTX for {target}: {log}")]
    Module {
        /// As the PTX says.
        target: String,
        /// The driver's own assembler log.
        log: String,
        /// The driver's error.
        source: DriverError,
    },
    /// A kernel launch failed.
    #[error(
        "launch of {entry} with grid {grid:?}, block {block:?}, {smem_bytes} bytes of shared memory failed"
    )]
    Launch {
        /// The kernel's entry name.
        entry: &'static str,
        /// Blocks in x, y, z.
        grid: [u32; 3],
        /// Threads of a block in x, y, z.
        block: [u32; 3],
        /// Dynamic shared memory per block.
        smem_bytes: u32,
        /// The driver's error.
        source: DriverError,
    },
    /// A simulated card stopped a kernel for what it did.
    #[error("{entry} failed on {device}: {report}")]
    Simulation {
        /// The kernel's entry name.
        entry: &'static str,
        /// The simulated card's name and floor.
        device: String,
        /// What was wrong, and how to see it again.
        report: String,
    },
    /// A rank of a group cannot go on: another one did not come in time, has ended, or came with another call.
    #[error("{op}: rank {rank} of {size}: {reason}")]
    Group {
        /// The collective.
        op: &'static str,
        /// The rank that says so.
        rank: usize,
        /// Ranks of the group.
        size: usize,
        /// What happened.
        reason: String,
    },
    /// Any other driver call failed.
    #[error("{call} failed")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The driver's error.
        source: DriverError,
    },
    /// The device has not enough memory.
    #[error(
        "out of memory on {device}: {requested} bytes requested; this pool has {in_use} in use of {reserved} reserved{}{}{}",
        in_pieces(*reserved - *in_use, *largest_free),
        free_of(*free, *total),
        too_many(*requested, *free, *total)
    )]
    OutOfMemory {
        /// The device's name.
        device: String,
        /// Size of the request.
        requested: usize,
        /// Bytes of the pool that live tensors hold.
        in_use: usize,
        /// Bytes that the pool has taken from the device.
        reserved: usize,
        /// Bytes of the pool's largest free piece, after all that could go back to the device did.
        largest_free: usize,
        /// Free bytes as the device, or the host's system, reports them; 0 where `total` is.
        free: usize,
        /// Bytes of the device altogether; 0 where nothing says.
        total: usize,
    },
    /// A model's files are wrong: an error of the crate `models`, which converts into this one, and back by
    /// `ModelError::of`.
    #[error(transparent)]
    Model(Box<dyn std::error::Error + Send + Sync>),
}

/// A CUDA driver error: its number, its name and its description, as the driver gives them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} ({code}): {description}")]
pub struct DriverError {
    /// The `CUresult`.
    pub code: u32,
    /// For example `CUDA_ERROR_INVALID_PTX`.
    pub name: String,
    /// The driver's sentence about it.
    pub description: String,
}

/// The driver's errors that are about the call and leave the context as it was. What is not among them, as
/// `CUDA_ERROR_UNKNOWN` and all faults of a kernel, may not.
const REFUSALS: [u32; 17] = [
    1,   // CUDA_ERROR_INVALID_VALUE
    2,   // CUDA_ERROR_OUT_OF_MEMORY
    200, // CUDA_ERROR_INVALID_IMAGE
    209, // CUDA_ERROR_NO_BINARY_FOR_GPU
    215, // CUDA_ERROR_UNSUPPORTED_LIMIT
    218, // CUDA_ERROR_INVALID_PTX
    221, // CUDA_ERROR_JIT_COMPILER_NOT_FOUND
    222, // CUDA_ERROR_UNSUPPORTED_PTX_VERSION
    223, // CUDA_ERROR_JIT_COMPILATION_DISABLED
    300, // CUDA_ERROR_INVALID_SOURCE
    303, // CUDA_ERROR_SHARED_OBJECT_INIT_FAILED
    500, // CUDA_ERROR_NOT_FOUND
    701, // CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    720, // CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
    800, // CUDA_ERROR_NOT_PERMITTED
    801, // CUDA_ERROR_NOT_SUPPORTED
    912, // CUDA_ERROR_INVALID_CLUSTER_SIZE
];

/// What of a pool is free and could not go back to the device, since it lies between memory in use.
fn in_pieces(free: usize, largest: usize) -> String {
    match free {
        0 => String::new(),
        _ => format!(", and {free} free between what is in use, at most {largest} in one piece"),
    }
}

/// By how much a request is above what the device says is free.
fn too_many(requested: usize, free: usize, total: usize) -> String {
    match requested.checked_sub(free) {
        Some(over) if total != 0 && over != 0 => format!(", {over} too few"),
        _ => String::new(),
    }
}

/// The end of an out of memory: what the device says, if it does.
fn free_of(free: usize, total: usize) -> String {
    if total == 0 { String::new() } else { format!("; the device has {free} free of {total}") }
}

impl Error {
    /// A caller's mistake in `argument` of `op`.
    pub fn invalid(
        op: &'static str,
        argument: &'static str,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Self {
        Error::Invalid { op, argument, expected: expected.into(), got: got.into() }
    }

    /// Whether a device has refused something and is as it was: another kernel may do it, or another device. Not so
    /// where the caller is wrong, a kernel was stopped, or the driver's context may be unusable.
    pub fn is_refusal(&self) -> bool {
        match self {
            Error::Unsupported { .. }
            | Error::UnsupportedCapability { .. }
            | Error::DriverTooOld { .. }
            | Error::MissingImage { .. }
            | Error::OutOfMemory { .. } => true,
            Error::Image { source, .. } | Error::Launch { source, .. } | Error::Driver { source, .. } => {
                REFUSALS.contains(&source.code)
            }
            _ => false,
        }
    }

    /// The error and what it comes from in a line: an assembler's log has many.
    pub(crate) fn in_a_line(&self) -> String {
        const MOST: usize = 200;
        let mut text = self.to_string();
        if let Some(source) = std::error::Error::source(self) {
            text = format!("{text}: {source}");
        }
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let mut line = lines.collect::<Vec<_>>().join("; ");
        if line.chars().count() > MOST {
            line = line.chars().take(MOST).chain(['…']).collect();
        }
        line
    }
}
