//! The embedded PTX images: each kernel assembles by itself, nothing spills, and they hold the kernels of the tables
//! and no others.
#![cfg(feature = "cuda")]

use std::collections::BTreeSet;

use abi::ops::matmul::AHEAD_VARIANTS;
use testkit::ptx::{Assembler, Entry, KernelResources, count_instructions, entries};
#[cfg(not(feature = "sm100"))]
use testkit::ptx::{assemble_for, find_ptxas};
use testkit::sass::Together;
use warpforge::{Arch, IMAGES, Image, Need};

#[test]
fn one_image_per_family_and_floor() {
    let built = [
        (Arch::Sm61, cfg!(feature = "sm61")),
        (Arch::Sm80, cfg!(feature = "sm80")),
        (Arch::Sm90a, cfg!(feature = "sm90a")),
        (Arch::Sm100, cfg!(feature = "sm100")),
    ];
    assert_eq!(built.map(|(arch, _)| arch), Arch::ALL);
    for (arch, is_built) in built {
        let families: Vec<&str> =
            IMAGES.iter().filter(|image| image.arch == arch).map(|image| image.family).collect();
        assert_eq!(families, if is_built { abi::families().collect() } else { Vec::new() }, "{arch}");
    }
}

/// The kernels of an image, each in a module of its name.
fn kernels(image: &Image) -> impl Iterator<Item = Entry> {
    image.modules().map(|module| {
        let mut entries = entries(&module.text().expect("a sound module")).expect("PTX");
        let entry = entries.pop().expect("a kernel");
        assert_eq!((entries.len(), entry.name.as_str()), (0, module.name));
        entry
    })
}

/// Table and image agree both ways: no kernel is missing, none is an orphan.
#[test]
fn entry_points_match_the_tables() {
    for image in IMAGES {
        let in_image: BTreeSet<String> = kernels(image).map(|entry| entry.name).collect();
        let in_table: BTreeSet<String> = abi::entries(image.family)
            .filter(|entry| image.arch.runs(floor_of(entry)))
            .map(str::to_string)
            .collect();
        assert_eq!(in_image, in_table, "{image:?}");
    }
}

/// The floor at the end of an entry's name: `..__sm61`.
fn floor_of(entry: &str) -> Arch {
    match entry.rsplit("__").next() {
        Some("sm61") => Arch::Sm61,
        Some("sm80") => Arch::Sm80,
        Some("sm90a") => Arch::Sm90a,
        _ => panic!("{entry} does not end in its floor"),
    }
}

/// Every kernel is compiled for as many threads as it is launched with: without a bound the registers are not, and
/// there might be no room.
#[test]
fn every_kernel_has_launch_bounds() {
    for image in IMAGES {
        for entry in kernels(image) {
            let is_bounded = entry.directives.iter().any(|directive| directive.starts_with(".maxntid"));
            assert!(is_bounded, "{image:?}: {} has no bound on its threads", entry.name);
        }
    }
}

/// Every kernel of a floor with dependent launch waits for the one ahead of it, or the host would not let them overlap;
/// no other one can.
#[test]
fn kernels_that_overlap_wait() {
    for image in IMAGES {
        for entry in kernels(image) {
            let waits = count_instructions(&entry.body, "griddepcontrol.wait");
            assert_eq!(
                waits,
                usize::from(image.arch.has(Need::DependentLaunch)),
                "{image:?}: {}",
                entry.name
            );
        }
    }
}

/// Kernels that read constants ahead have their loads on the way before they let the next kernel start, whose own would
/// come first, and before they wait.
#[test]
fn constants_are_loaded_ahead() {
    let mut found = 0;
    for image in IMAGES.iter().filter(|image| image.family == "matmul") {
        for entry in kernels(image).filter(|entry| entry.name.contains("__ahead__")) {
            let (before, _) =
                entry.body.split_once("griddepcontrol.launch_dependents").expect("a next kernel");
            assert!(!before.contains("griddepcontrol.wait"), "{image:?}: {}", entry.name);
            // Two columns of four pieces.
            assert_eq!(count_instructions(before, "ld.global.nc"), 8, "{image:?}: {}", entry.name);
            assert_eq!(count_instructions(before, "ld.global"), 8, "{image:?}: {}", entry.name);
            found += 1;
        }
    }
    let images = IMAGES.iter().filter(|image| image.family == "matmul" && image.arch == Arch::Sm90a);
    assert_eq!(found, AHEAD_VARIANTS.len() * images.count());
}

/// Registers alone: a call is a panic path or a function that was not inlined.
#[test]
fn no_local_memory_no_calls() {
    for image in IMAGES {
        for entry in kernels(image) {
            for forbidden in [".local", "call"] {
                let found = count_instructions(&entry.body, forbidden);
                assert_eq!(found, 0, "{image:?}: {} holds {forbidden}", entry.name);
            }
        }
    }
}

/// Whole warps come to barriers and other aligned instructions together, and whole warpgroups to `wgmma`: what these
/// depend on is decided alike for all of them, in the source and in what the compiler made of it. ARCHITECTURE,
/// "JumpThreading off".
#[test]
fn aligned_instructions_are_reached_together() {
    let mut strays = Vec::new();
    for image in IMAGES {
        for entry in kernels(image) {
            let name = &entry.name;
            let found =
                testkit::uniform::strays(&entry).unwrap_or_else(|error| panic!("{image:?}: {name}: {error}"));
            strays.extend(found.into_iter().map(|stray| format!("{image:?}: {name}: {stray}")));
        }
    }
    assert!(strays.is_empty(), "{} in all:\n{}", strays.len(), strays[..strays.len().min(20)].join("\n"));
}

/// Where ptxas knows that a warp stays together, at most two words move to uniform registers between one `wgmma` and
/// the next of its group; where it does not, four: ARCHITECTURE, "Uniform registers".
fn check_descriptors(kernel: &KernelResources) {
    // Those that promote their sums to f32, for few rows, are so as yet.
    let most = if kernel.name.contains("_f32__m64n64") { 4 } else { 2 };
    let moves = kernel.moves_between_products;
    // What reads ahead, or stays, multiplies by ordinary arithmetic or `mma.sync`, and what makes rows fp8 not at all.
    let others = ["__ahead__", "__packedahead", "__persistent__", "__quantise__"];
    let is_other = others.iter().any(|part| kernel.name.contains(part));
    let by_wgmma = kernel.name.ends_with("__sm90a") && !is_other;
    assert_eq!(moves.is_some(), by_wgmma, "{}: products by wgmma", kernel.name);
    assert!(moves <= Some(most), "{}: {moves:?} R2UR between one product and the next", kernel.name);
}

/// ptxas makes no copies of what whole warpgroups execute together, nor of barriers in kernels that do: what holds for
/// the PTX (above) holds for the code. In other kernels it may copy a barrier: beside a shuffle it keeps a second way
/// for warps that it does not know to be converged (`BRA.DIV`), and a barrier between two shuffles is on that way too,
/// as in sampling. Which way is taken is its own, for the whole warp.
fn check_copies(kernel: &KernelResources, entry: &Entry) {
    let count = |opcodes: &[&str]| opcodes.iter().map(|opcode| count_instructions(&entry.body, opcode)).sum();
    let in_ptx = Together {
        products: count(&["wgmma.mma_async"]),
        syncs: count(&["wgmma.fence", "wgmma.wait_group"]),
        // Whoever has waited for a cluster's barrier waits at one of the block.
        barriers: count(&["bar.sync", "bar.arrive", "bar.red", "barrier.cluster.wait"]),
    };
    let in_code = kernel.together;
    assert_eq!(
        (in_code.products, in_code.syncs),
        (in_ptx.products, in_ptx.syncs),
        "{}: code, PTX",
        kernel.name
    );
    if in_ptx.products > 0 {
        assert_eq!(
            in_code.barriers, in_ptx.barriers,
            "{}: barriers in the code, and in the PTX",
            kernel.name
        );
    } else {
        assert!(in_code.barriers >= in_ptx.barriers, "{}: {in_code:?}, {in_ptx:?}", kernel.name);
    }
}

/// ptxas takes every kernel of the images of an architecture, without a stack or a spill.
fn assemble_without_spills(arch: Arch) {
    let Some(ptxas) = Assembler::find().expect("an assembler") else {
        testkit::gpu::skip_optional("there is no ptxas: `cargo xtask test` gets one");
        return;
    };
    for module in IMAGES.iter().filter(|image| image.arch == arch).flat_map(|image| image.modules()) {
        let (name, text) = (module.name, module.text().expect("a sound module"));
        let kernels = ptxas.assemble(&text, arch).unwrap_or_else(|error| panic!("{name}: {error}"));
        let entries = entries(&text).expect("PTX");
        assert_eq!((kernels.len(), entries.len()), (1, 1), "{name}");
        for (kernel, entry) in kernels.iter().zip(&entries) {
            let spills = (kernel.stack_bytes, kernel.spill_stores, kernel.spill_loads);
            assert_eq!(spills, (0, 0, 0), "{name}: stack, spill stores, spill loads");
            check_descriptors(kernel);
            check_copies(kernel, entry);
        }
    }
}

// A test per architecture, so that they run side by side.

#[test]
fn images_of_sm_61_assemble_without_spills() {
    assemble_without_spills(Arch::Sm61);
}

#[test]
fn images_of_sm_80_assemble_without_spills() {
    assemble_without_spills(Arch::Sm80);
}

#[test]
fn images_of_sm_90a_assemble_without_spills() {
    assemble_without_spills(Arch::Sm90a);
}

#[cfg(feature = "sm100")]
#[test]
fn images_of_sm_100_assemble_without_spills() {
    assemble_without_spills(Arch::Sm100);
}

/// What the images of Blackwell are like, which only the feature `sm100` builds: of two families, for cards of both of
/// its generations.
#[cfg(not(feature = "sm100"))]
#[test]
fn some_images_of_sm_100_assemble_without_spills() {
    let Some(ptxas) = find_ptxas() else {
        testkit::gpu::skip_optional("there is no ptxas: `cargo xtask test` gets one");
        return;
    };
    let target = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("cuda_builder");
    for family in ["glu", "matmul_i8"] {
        let builder = cuda_builder::CudaBuilder::new("gpu").arch(Arch::Sm100.into()).features([family]);
        let ptx = builder.target_dir(&target).build().unwrap_or_else(|error| panic!("{family}: {error}"));
        let ptx = std::fs::read_to_string(ptx).expect("the builder's PTX");
        let in_image: BTreeSet<String> =
            entries(&ptx).expect("PTX").into_iter().map(|entry| entry.name).collect();
        let in_table: BTreeSet<String> = abi::ops::entries(family)
            .filter(|entry| Arch::Sm100.runs(floor_of(entry)))
            .map(str::to_string)
            .collect();
        assert_eq!(in_image, in_table, "{family}");
        for card in ["sm_100", "sm_120"] {
            let kernels = assemble_for(&ptxas, &ptx, Arch::Sm100, card)
                .unwrap_or_else(|error| panic!("{family} for {card}: {error}"));
            assert_eq!(kernels.len(), in_image.len(), "{family} for {card}");
            for kernel in kernels {
                let spills = (kernel.stack_bytes, kernel.spill_stores, kernel.spill_loads);
                assert_eq!(spills, (0, 0, 0), "{} for {card}: stack, spill stores, spill loads", kernel.name);
            }
        }
    }
}

/// What packages carry can be made again: a family, with a `core` of its own in another folder, is the same text. Run
/// by `cargo xtask package`.
#[test]
#[ignore = "compiles core and a family anew"]
fn an_image_that_is_built_again_is_the_same() {
    let family = "scatter_rows";
    let target = tempfile::tempdir().expect("a folder");
    for image in IMAGES.iter().filter(|image| image.family == family) {
        let builder = cuda_builder::CudaBuilder::new("gpu").arch(image.arch.into()).features([family]);
        let ptx = builder.locked().target_dir(target.path()).build().expect("the family builds");
        let ptx = std::fs::read_to_string(ptx).expect("the builder's PTX");
        let (head, kernels) = cuda_builder::split_kernels(&ptx);
        let built: Vec<String> = kernels.into_iter().map(|(_, text)| head.to_owned() + text).collect();
        let embedded: Vec<String> =
            image.modules().map(|module| module.text().expect("a sound module").into_owned()).collect();
        assert!(!built.is_empty() && built == embedded, "{image:?} is another one");
    }
}
