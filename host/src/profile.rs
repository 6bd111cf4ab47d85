//! What hardware is: data that plans choose by, and that reports show.

use std::fmt;

use abi::Arch;

/// Where a tensor's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The host's memory.
    Cpu,
    /// The memory of the CUDA device with this ordinal.
    Cuda(u32),
    /// The memory of a simulated card; the number tells them apart.
    Simulated(u32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Cpu => f.write_str("the CPU"),
            Place::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Place::Simulated(number) => write!(f, "simulated:{number}"),
        }
    }
}

/// How much of the hardware a plan may use: a bound on the choice of kernels, not a change of results' meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OptLevel {
    /// Portable SIMT kernels: the sm_61 floor.
    Basic,
    /// Tensor cores through `mma.sync`: the sm_80 floor.
    Medium,
    /// Everything the chip has.
    #[default]
    High,
}

impl OptLevel {
    /// The floor whose kernels a plan may choose at this level, for a device that runs the images of `floor`.
    pub const fn bound(self, floor: Arch) -> Arch {
        match self {
            OptLevel::Basic => Arch::Sm61,
            OptLevel::Medium if floor.runs(Arch::Sm80) => Arch::Sm80,
            OptLevel::Medium | OptLevel::High => floor,
        }
    }
}

impl fmt::Display for OptLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            OptLevel::Basic => "basic",
            OptLevel::Medium => "medium",
            OptLevel::High => "high",
        })
    }
}

impl std::str::FromStr for OptLevel {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "basic" => Ok(OptLevel::Basic),
            "medium" => Ok(OptLevel::Medium),
            "high" => Ok(OptLevel::High),
            other => Err(format!("unknown level {other:?}: expected basic, medium or high")),
        }
    }
}

#[cfg(feature = "serde")]
abi::serde_by_name!(OptLevel);

/// What the bits of a row's result may depend on besides the row: a restriction of the choice of kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Invariance {
    /// Each plan takes the kernels that are the fastest for its numbers of rows, sequences and keys. Each operator's
    /// documentation says what that does to the last bits.
    #[default]
    None,
    /// Kernels, tiles and splits of sums are chosen by the sizes of weights and heads alone. A row's result has the
    /// same bits whatever rows, sequences or tokens are beside it, planned or run: so a sequence's logits are the same
    /// alone, in any batch, in chunks of any size, token by token, behind a prefix that is found again, after a fork
    /// and after a pre-emption. Few rows are slower for it, and so are recurrent prompts.
    ///
    /// It holds for what an operator chooses by itself, with the same kernels: on the same card and floor or the same
    /// CPU, with the same build, and as long as no [`Fallback`] stands in. `plan_with` takes what it is given. How rows
    /// are aligned still counts, where the stride of a single row does not: columns of a wider matrix are to begin at
    /// multiples of 16 bytes, in rows that do, or there are such of one row and others of many. What cannot be held is
    /// refused: a product with a norm before it ([`MatmulProblem::norm`](crate::ops::matmul::MatmulProblem::norm)),
    /// which is of a single row, and models over several devices, whose sums go ways that depend on sizes.
    Batch,
}

impl fmt::Display for Invariance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Invariance::None => "none",
            Invariance::Batch => "batch",
        })
    }
}

impl std::str::FromStr for Invariance {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Invariance::None),
            "batch" => Ok(Invariance::Batch),
            other => Err(format!("unknown invariance {other:?}: expected none or batch")),
        }
    }
}

/// What a plan does where its device refuses it: the driver does not take a kernel or its launch, a capability lacks,
/// or there is no memory for what the plan holds.
///
/// A caller's mistake is an error in any case, and so is what may have left the device's context unusable: nothing is
/// tried again then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fallback {
    /// It is an error.
    #[default]
    Error,
    /// The same operator runs by the kernels of the next floor whose code the card runs too, with that floor's last
    /// bits. An error if none is left.
    LowerFloor,
    /// The same, and behind the last floor on the CPU: a run waits for the stream, brings its tensors to the host,
    /// and their results back. It cannot be recorded into a graph.
    Cpu,
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Fallback::Error => "error",
            Fallback::LowerFloor => "lower-floor",
            Fallback::Cpu => "cpu",
        })
    }
}

impl std::str::FromStr for Fallback {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "error" => Ok(Fallback::Error),
            "lower-floor" => Ok(Fallback::LowerFloor),
            "cpu" => Ok(Fallback::Cpu),
            other => Err(format!("unknown fallback {other:?}: expected error, lower-floor or cpu")),
        }
    }
}

/// What the hardware is.
#[derive(Clone, Debug, PartialEq)]
pub struct HardwareProfile {
    /// The device's name.
    pub name: String,
    /// Where its memory is.
    pub place: Place,
    /// Major and minor number of the compute capability; none on a CPU.
    pub compute_capability: Option<(u32, u32)>,
    /// Where the card is on the PCI bus, `domain:bus:device.function` in hexadecimal, as nvidia-smi and NVML name it;
    /// none on a CPU.
    pub pci_bus_id: Option<String>,
    /// Which matrix units the chip has.
    pub tensor_cores: TensorCores,
    /// Streaming multiprocessors, or the CPU's hardware threads.
    pub num_sms: u32,
    /// Bytes of memory; 0 where unknown.
    pub memory_bytes: usize,
    /// Bytes of L2 cache; 0 where unknown.
    pub l2_bytes: usize,
    /// Most shared memory of a block, in bytes.
    pub smem_per_block_bytes: u32,
    /// Shared memory of a multiprocessor, in bytes.
    pub smem_per_sm_bytes: u32,
    /// 32-bit registers of a multiprocessor.
    pub registers_per_sm: u32,
    /// Most threads of a multiprocessor.
    pub threads_per_sm: u32,
    /// Peak memory bandwidth by the clock and bus width that the driver reports, in bytes per second; 0 where unknown.
    pub memory_bandwidth: f64,
    /// CUDA version that the driver supports.
    pub driver: Option<(u32, u32)>,
}

/// The generation of a chip's matrix units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorCores {
    /// None.
    None,
    /// Volta and Turing: f16.
    Gen1To2,
    /// Ampere: bf16, tf32, `mma.sync` as the sm_80 floor uses it.
    Gen3,
    /// Ada: with fp8.
    Gen4Ada,
    /// Hopper: `wgmma`.
    Gen4Hopper,
    /// Blackwell.
    Gen5,
}

impl TensorCores {
    /// The generation of a compute capability.
    pub const fn of(major: u32, minor: u32) -> Self {
        match (major, minor) {
            (7, _) => TensorCores::Gen1To2,
            (8, 9) => TensorCores::Gen4Ada,
            (8, _) => TensorCores::Gen3,
            (9, _) => TensorCores::Gen4Hopper,
            (10.., _) => TensorCores::Gen5,
            _ => TensorCores::None,
        }
    }
}

impl HardwareProfile {
    pub(crate) fn cpu() -> Self {
        let num_threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        HardwareProfile {
            name: format!("CPU with {num_threads} threads"),
            place: Place::Cpu,
            compute_capability: None,
            pci_bus_id: None,
            tensor_cores: TensorCores::None,
            num_sms: num_threads,
            memory_bytes: 0,
            l2_bytes: 0,
            smem_per_block_bytes: 0,
            smem_per_sm_bytes: 0,
            registers_per_sm: 0,
            threads_per_sm: 1,
            memory_bandwidth: 0.0,
            driver: None,
        }
    }
}

/// What `select` knows of a device: pure data, so that choices can be tested without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// The floor whose kernels may be chosen, and those that it [runs](Arch::runs): of the device's images, bounded by
    /// the [`OptLevel`].
    pub floor: Arch,
    /// Streaming multiprocessors.
    pub num_sms: u32,
    /// Most shared memory of a block, in bytes.
    pub smem_per_block_bytes: u32,
    /// What choices may depend on.
    pub invariance: Invariance,
}

impl DeviceLimits {
    /// Of a floor, so many multiprocessors, and so much shared memory of a block; choices may depend on anything.
    pub const fn new(floor: Arch, num_sms: u32, smem_per_block_bytes: u32) -> Self {
        DeviceLimits { floor, num_sms, smem_per_block_bytes, invariance: Invariance::None }
    }

    /// Whether numbers of rows may decide about nothing.
    pub(crate) fn is_invariant(&self) -> bool {
        self.invariance == Invariance::Batch
    }
}

/// What a kernel takes of a multiprocessor, as the driver reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// 32-bit registers per thread.
    pub registers: u32,
    /// Local memory per thread in bytes: not zero means spills.
    pub local_bytes: u32,
    /// Most threads of a block that it can be launched with.
    pub max_threads: u32,
    /// Shared memory of a block in bytes, static and dynamic.
    pub smem_bytes: u32,
}

#[cfg(all(test, feature = "serde"))]
mod tests {
    use super::*;

    #[test]
    fn choices_are_written_by_name() {
        let written = serde_json::json!([Arch::Sm90a, abi::DType::BF16, OptLevel::Basic]);
        assert_eq!(written.to_string(), r#"["sm_90a","bf16","basic"]"#);
        let read: (Arch, abi::DType, OptLevel) = serde_json::from_value(written).expect("names");
        assert_eq!(read, (Arch::Sm90a, abi::DType::BF16, OptLevel::Basic));
        let refused = serde_json::from_str::<abi::DType>("\"f64\"").unwrap_err().to_string();
        assert!(refused.starts_with("unknown element type: expected f32, "), "{refused}");
    }
}
