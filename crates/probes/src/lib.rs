//! Runs a kernel of `probe_kernels` in the simulator and on a card.
//!
//! The tests (`tests/agreement`) make [`Case`]s of random inputs; a case says what the results must be.

use std::fmt;

use abi::Arch;
use cuda_std::sim::tensor_core::Generation;
use cuda_std::sim::tensor_map::{Element, Fill};
use cuda_std::wgmma::Swizzle;

mod card;
mod simulator;

pub use card::Card;
pub use simulator::simulate;

/// An image: its feature of `probe_kernels`, its floor, and the deflated PTX.
type Image = (&'static str, Arch, &'static [u8]);

/// None if no device compiler was there to build them.
static IMAGES: &[Image] = include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// One launch of a probe.
pub struct Case {
    /// What is tried, for messages.
    pub name: String,
    /// The entry point.
    pub kernel: &'static str,
    /// The image that it is in.
    pub image: &'static str,
    /// The lowest floor that has it.
    pub floor: Arch,
    /// Blocks.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
    /// Blocks of a cluster, 1 without.
    pub cluster: u32,
    /// Shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// The input buffer.
    pub input: Vec<u32>,
    /// What the output buffer has before.
    pub output: Vec<u32>,
    /// The tensor maps.
    pub maps: Vec<Map>,
    /// The kernel's last parameter.
    pub parameter: u32,
    /// What the output must be after.
    pub check: Box<Check>,
}

/// Judges an output; tensor cores differ by generation.
pub type Check = dyn Fn(Generation, &[u32]) -> Result<(), String>;

impl Case {
    /// A case of the image `base` without clusters, shared memory and maps.
    pub fn new(name: impl Into<String>, kernel: &'static str, floor: Arch) -> Self {
        Case {
            name: name.into(),
            kernel,
            image: "base",
            floor,
            grid: 1,
            block: 32,
            cluster: 1,
            shared_bytes: 0,
            input: Vec::new(),
            output: Vec::new(),
            maps: Vec::new(),
            parameter: 0,
            check: Box::new(|_, _| Ok(())),
        }
    }

    /// The output must have these bits.
    pub fn expect(self, expected: Vec<u32>) -> Self {
        self.check(move |_, got| same_bits(&expected, got))
    }

    /// The output must satisfy this.
    pub fn check(self, check: impl Fn(Generation, &[u32]) -> Result<(), String> + 'static) -> Self {
        Case { check: Box::new(check), ..self }
    }
}

/// Whether two outputs have the same bits, and if not, where they begin to differ.
pub fn same_bits(expected: &[u32], got: &[u32]) -> Result<(), String> {
    if expected.len() != got.len() {
        return Err(format!("{} words instead of {}", got.len(), expected.len()));
    }
    let differing: Vec<usize> = (0..got.len()).filter(|&i| got[i] != expected[i]).collect();
    let Some(&first) = differing.first() else { return Ok(()) };
    let list: Vec<String> = differing
        .iter()
        .take(8)
        .map(|&i| format!("word {i}: {:#010x}, expected {:#010x}", got[i], expected[i]))
        .collect();
    Err(format!(
        "{} of {} words differ, from {first} on:\n    {}",
        differing.len(),
        got.len(),
        list.join("\n    ")
    ))
}

/// Which of the two buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Buffer {
    Input,
    Output,
}

/// A tensor map, still without the address of its buffer.
#[derive(Clone, Debug)]
pub struct Map {
    /// Where the tensor is.
    pub buffer: Buffer,
    /// Where it begins there, in bytes.
    pub offset_bytes: u64,
    /// Type of an element.
    pub element: Element,
    /// Extents in elements, innermost first.
    pub dims: Vec<u64>,
    /// Strides in bytes, of all dimensions but the innermost.
    pub strides_bytes: Vec<u64>,
    /// Extents of the box.
    pub box_dims: Vec<u32>,
    /// Permutation in shared memory.
    pub swizzle: Swizzle,
    /// Fill outside.
    pub fill: Fill,
}

/// Why a case did not run to its end.
#[derive(Debug)]
pub struct Failed(pub String);

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<E: std::error::Error> From<E> for Failed {
    fn from(error: E) -> Self {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            text += &format!(": {error}");
            cause = error.source();
        }
        Failed(text)
    }
}
