//! A case in the simulator.

use abi::Arch;
use cuda_std::sim::tensor_map::{Tiled, encode};
use cuda_std::sim::{self, Launch, Memory};
// The kernels are found by name, so something has to name their crate.
use probe_kernels as _;

use crate::{Buffer, Case, Failed};

/// Runs a case on a floor; returns the output.
pub fn simulate(case: &Case, arch: Arch, seed: u64) -> Result<Vec<u32>, Failed> {
    let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let mut memory = Memory::new();
    let input = memory.allocate_from("input", &bytes(&case.input));
    let output = memory.allocate_from("output", &bytes(&case.output));
    let mut maps = Vec::new();
    for map in &case.maps {
        let buffer = match map.buffer {
            Buffer::Input => input,
            Buffer::Output => output,
        };
        let tiled = Tiled {
            element: map.element,
            address: buffer + map.offset_bytes,
            dims: &map.dims,
            strides_bytes: &map.strides_bytes,
            box_dims: &map.box_dims,
            element_strides: &vec![1; map.dims.len()],
            swizzle: map.swizzle,
            fill: map.fill,
        };
        maps.extend(encode(&tiled)?.0.iter().flat_map(|word| word.to_le_bytes()));
    }
    let maps = memory.allocate_from("maps", &maps);
    let kernel =
        sim::kernel(case.kernel).ok_or_else(|| Failed(format!("there is no kernel {}", case.kernel)))?;
    let launch = Launch::new(case.kernel, [case.grid, 1, 1], [case.block, 1, 1])
        .cluster([case.cluster, 1, 1])
        .shared_bytes(case.shared_bytes)
        .arch(arch)
        .seed(seed);
    let parameter = case.parameter;
    sim::simulate(&mut memory, &launch, || {
        let addresses = [
            (&raw const input).cast(),
            (&raw const output).cast(),
            (&raw const maps).cast(),
            (&raw const parameter).cast(),
        ];
        // SAFETY: the parameters of every probe; the case's buffers are what the kernel asks for — the tests.
        unsafe { (kernel.launch)(&addresses) }
    })?;
    let mut result = vec![0; 4 * case.output.len()];
    memory.read(output, &mut result);
    Ok(result.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}
