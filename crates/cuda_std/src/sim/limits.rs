//! What a launch may ask of a card.

use std::format;
use std::string::String;

use super::unit::Failure;
use super::{Arch, Defect, Launch, Need, registry};

/// Dynamic shared memory that a block can have.
pub(super) fn max_shared_bytes(arch: Arch) -> u32 {
    match arch {
        Arch::Sm61 => 48 << 10,
        Arch::Sm80 => 163 << 10,
        Arch::Sm90a | Arch::Sm100 => 227 << 10,
    }
}

/// Whether the card can do it.
pub(super) fn check(launch: &Launch<'_>) -> Result<(), Failure> {
    let Launch { grid, block, cluster, shared_bytes, arch, .. } = *launch;
    let refuse = |text: String| Err(Failure(Defect::Unsupported, text));
    let threads = volume(block);
    if threads == 0 || threads > 1024 || block[2] > 64 {
        return refuse(format!("a block of {block:?} threads: expected 1 to 1024, at most 64 in z"));
    }
    let max = max_shared_bytes(arch);
    if shared_bytes > max {
        return refuse(format!("{shared_bytes} bytes of shared memory per block: {arch} has {max}"));
    }
    let blocks = volume(cluster);
    if blocks == 0 || blocks > 8 || [0, 1, 2].into_iter().any(|i| !grid[i].is_multiple_of(cluster[i].max(1)))
    {
        return refuse(format!(
            "clusters of {cluster:?} blocks in a grid of {grid:?}: expected up to 8, dividing it"
        ));
    }
    if blocks > 1 && !arch.has(Need::Clusters) {
        return refuse(format!("clusters need {}, and this is {arch}", Need::Clusters.since()));
    }
    if volume(grid) == 0 {
        return refuse(format!("a grid of {grid:?} blocks: expected one at least"));
    }
    if let Some(most) = registry::kernel(launch.kernel).and_then(|kernel| kernel.max_threads)
        && threads > most
    {
        return refuse(format!("a block of {block:?} threads: the kernel is for up to {most}"));
    }
    if grid[0] > i32::MAX as u32 || grid[1] > 65535 || grid[2] > 65535 || volume(grid) >= 1 << 24 {
        return refuse(format!("a grid of {grid:?} blocks: the simulator takes up to {}", (1 << 24) - 1));
    }
    Ok(())
}

/// Elements of a box.
pub(super) fn volume(size: [u32; 3]) -> u32 {
    size.into_iter().fold(1, u32::saturating_mul)
}
