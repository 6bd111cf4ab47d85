//! What the wrappers of `cuda_std` become: the instruction that their documentation names, once, and nothing that
//! calls, panics or lies in local memory.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use abi::{Arch, Need};
use testkit::gpu::skip_optional;
use testkit::ptx::{Entry, assemble, count_instructions, entries, find_ptxas};

use super::Fixture;

struct Image {
    arch: Arch,
    text: String,
    entries: Vec<Entry>,
}

/// The fixture for all architectures, built once for all tests.
fn images() -> &'static [Image] {
    static IMAGES: OnceLock<Vec<Image>> = OnceLock::new();
    IMAGES.get_or_init(|| {
        let Some(fixture) = Fixture::new("wrappers") else { return Vec::new() };
        std::thread::scope(|scope| {
            let build = |arch: Arch| {
                let builder = fixture.builder().arch(arch.into());
                scope.spawn(move || {
                    let path = builder.build().unwrap_or_else(|error| panic!("{arch}: {error}"));
                    let text = std::fs::read_to_string(path).expect("PTX");
                    let entries = entries(&text).unwrap_or_else(|error| panic!("{arch}: {error}"));
                    Image { arch, text, entries }
                })
            };
            let threads = Arch::ALL.map(build);
            threads.into_iter().map(|thread| thread.join().expect("a build")).collect()
        })
    })
}

/// Instructions of an entry as `opcode` or `opcode operand`, and how often they occur.
type Instructions = &'static [(&'static str, usize)];

const WRAPPERS: &[(&str, Instructions)] = &[
    ("thread_thread_idx_x", &[("mov.u32 %tid.x", 1)]),
    ("thread_thread_idx_y", &[("mov.u32 %tid.y", 1)]),
    ("thread_thread_idx_z", &[("mov.u32 %tid.z", 1)]),
    ("thread_block_idx_x", &[("mov.u32 %ctaid.x", 1)]),
    ("thread_block_idx_y", &[("mov.u32 %ctaid.y", 1)]),
    ("thread_block_idx_z", &[("mov.u32 %ctaid.z", 1)]),
    ("thread_block_dim_x", &[("mov.u32 %ntid.x", 1)]),
    ("thread_block_dim_y", &[("mov.u32 %ntid.y", 1)]),
    ("thread_block_dim_z", &[("mov.u32 %ntid.z", 1)]),
    ("thread_grid_dim_x", &[("mov.u32 %nctaid.x", 1)]),
    ("thread_grid_dim_y", &[("mov.u32 %nctaid.y", 1)]),
    ("thread_grid_dim_z", &[("mov.u32 %nctaid.z", 1)]),
    ("thread_lane", &[("mov.u32 %tid.x", 1), ("and.b32 31", 1)]),
    ("thread_warp_idx", &[("mov.u32 %tid.x", 1), ("shr.u32 5", 1)]),
    // The constant, and the copy that hides it.
    ("thread_opaque", &[("mov.u32", 1), ("mov.b32 77", 1)]),
    ("thread_sync_threads", &[("bar.sync 0", 1), ("bar", 1)]),
    ("warp_shuffle_xor", &[("shfl.sync.bfly.b32 31, -1", 1), ("shfl", 1)]),
    ("warp_shuffle_idx", &[("shfl.sync.idx.b32 31, -1", 1), ("shfl", 1)]),
    ("warp_shuffle_up", &[("shfl.sync.up.b32 0, -1", 1), ("shfl", 1)]),
    ("warp_shuffle_down", &[("shfl.sync.down.b32 31, -1", 1), ("shfl", 1)]),
    ("warp_shuffle_xor_f32", &[("shfl.sync.bfly.b32 31, -1", 1), ("shfl", 1)]),
    ("warp_shuffle_idx_f32", &[("shfl.sync.idx.b32 31, -1", 1), ("shfl", 1)]),
    ("warp_shuffle_up_f32", &[("shfl.sync.up.b32 0, -1", 1), ("shfl", 1)]),
    ("warp_shuffle_down_f32", &[("shfl.sync.down.b32 31, -1", 1), ("shfl", 1)]),
    ("warp_ballot", &[("vote.sync.ballot.b32 -1", 1), ("vote", 1)]),
    ("warp_any", &[("vote.sync.any.pred -1", 1), ("vote", 1)]),
    ("warp_all", &[("vote.sync.all.pred -1", 1), ("vote", 1)]),
    ("warp_sync_warp", &[("bar.warp.sync", 1), ("bar", 1)]),
    ("warp_sum_f32_32", &[("shfl.sync.bfly.b32", 5), ("add.rn.f32", 5), ("bra", 0)]),
    ("warp_sum_f32_8", &[("shfl.sync.bfly.b32", 3), ("add.rn.f32", 3), ("bra", 0)]),
    ("warp_max_f32_32", &[("shfl.sync.bfly.b32", 5), ("max.f32", 5), ("bra", 0)]),
    ("global_load_u16", &[("ld.global.b16", 1), ("st.global.b16", 1)]),
    ("global_load_f32", &[("ld.global.b32", 1), ("st.global.b32", 1)]),
    ("global_load_x4", &[("ld.global.v4.b32", 1), ("ld.global", 1)]),
    ("global_load_nc_x4", &[("ld.global.nc.v4.b32", 1), ("ld.global", 1)]),
    ("global_store_u16", &[("st.global.b16", 1)]),
    ("global_store_f32", &[("st.global.b32", 1)]),
    ("global_store_x4", &[("st.global.v4.b32", 1), ("st", 1)]),
    ("global_store_stream_x4", &[("st.global.cs.v4.b32", 1), ("st", 1)]),
    ("atomic_fence_device", &[("membar.gl", 1)]),
    ("atomic_add_u32", &[("atom.global.add.u32", 1), ("membar", 0)]),
    ("atomic_and_u32", &[("atom.global.and.b32", 1), ("membar", 0)]),
    ("atomic_or_u32", &[("atom.global.or.b32", 1), ("membar", 0)]),
    ("atomic_max_u32", &[("atom.global.max.u32", 1), ("membar", 0)]),
    ("atomic_exchange_u32", &[("atom.global.exch.b32", 1), ("membar", 0)]),
    ("atomic_acquire", &[("atom.global.add.u32", 1), ("membar.gl", 1)]),
    ("atomic_release", &[("atom.global.add.u32", 1), ("membar.gl", 1)]),
    ("atomic_acq_rel", &[("atom.global.add.u32", 1), ("membar.gl", 2)]),
    ("math_ex2", &[("ex2.approx.ftz.f32", 1)]),
    ("math_ex2_subnormal", &[("ex2.approx.f32", 1)]),
    ("math_lg2", &[("lg2.approx.ftz.f32", 1)]),
    ("math_rcp", &[("rcp.approx.ftz.f32", 1)]),
    ("math_rsqrt", &[("rsqrt.approx.f32", 1)]),
    ("math_sqrt", &[("sqrt.rn.f32", 1)]),
    ("math_abs", &[("abs.f32", 1)]),
    ("math_fma", &[("fma.rn.f32", 1)]),
    ("math_max", &[("max.f32", 1)]),
    ("math_min", &[("min.f32", 1)]),
    ("math_div", &[("div.rn.f32", 1)]),
    ("math_exp", &[("mul.rn.f32", 1), ("ex2.approx.ftz.f32", 1)]),
    ("math_silu", &[("ex2.approx.ftz.f32", 1), ("rcp.approx.ftz.f32", 1), ("div", 0)]),
    ("math_dp4a", &[("dp4a.s32.s32", 1)]),
    ("math_mul_hi", &[("mul.hi.u32", 1)]),
    ("math_round_i8", &[("cvt.rni.sat.s8.f32", 1)]),
    ("cvt_f16_to_f32", &[("cvt.f32.f16", 1), ("cvt", 1)]),
    ("cvt_f16_from_f32", &[("cvt.rn.f16.f32", 1), ("cvt", 1)]),
    ("cvt_bf16_to_f32", &[("shl.b32 16", 1)]),
    ("cvt_bf16_from_f32", &[("cvt.rn", 0), ("bra", 0)]),
    ("cvt_unpack_f16", &[("cvt.f32.f16", 8), ("ld.global.v4.b32", 1)]),
    ("cvt_unpack_bf16", &[("cvt.rn", 0), ("ld.global.v4.b32", 1)]),
    ("shared_base", &[("mov.u32 dyn_smem", 1)]),
    ("shared_load_f32", &[("ld.shared.f32", 1), ("ld.shared", 1)]),
    ("shared_load_u32", &[("ld.shared.b32", 1), ("ld.shared", 1)]),
    ("shared_load_u16", &[("ld.shared.b16", 1), ("ld.shared", 1)]),
    ("shared_load_f32x4", &[("ld.shared.v4.f32", 1), ("ld.shared", 1)]),
    ("shared_load_u32x4", &[("ld.shared.v4.b32", 1), ("ld.shared", 1)]),
    ("shared_store_f32", &[("st.shared.f32", 1), ("st", 1)]),
    ("shared_store_u32", &[("st.shared.b32", 1), ("st", 1)]),
    ("shared_store_u16", &[("st.shared.b16", 1), ("st", 1)]),
    ("shared_store_f32x4", &[("st.shared.v4.f32", 1), ("st", 1)]),
    ("shared_store_u32x4", &[("st.shared.v4.b32", 1), ("st", 1)]),
    ("shared_add_u32", &[("atom.shared.add.u32", 1), ("atom", 1)]),
    ("debug_trap", &[("trap", 1)]),
    ("debug_printf", &[("call.uni vprintf", 1), ("call", 1)]),
];

/// Those that are another instruction where the floor has something: where it has not, and where it has.
const BY_NEED: &[(&str, Need, Instructions, Instructions)] = &[
    (
        "global_load_stream_x4",
        Need::MemoryModel,
        &[("ld.global.nc.v4.b32", 1), ("ld.global", 1)],
        &[("ld.global.nc.L1::no_allocate.v4.b32", 1), ("ld.global", 1)],
    ),
    (
        "cvt_bf16x2_from_f32",
        Need::PackedMath,
        &[("cvt.rn", 0), ("bra", 0)],
        &[("cvt.rn.bf16x2.f32", 1), ("cvt.rn", 1)],
    ),
    (
        "cvt_pack_bf16",
        Need::PackedMath,
        &[("cvt.rn", 0), ("bra", 0)],
        &[("cvt.rn.bf16x2.f32", 4), ("cvt.rn", 4)],
    ),
    (
        "cvt_f16x2_from_f32",
        Need::PackedMath,
        &[("cvt.rn.f16.f32", 2)],
        &[("cvt.rn.f16x2.f32", 1), ("cvt.rn", 1)],
    ),
    ("cvt_pack_f16", Need::PackedMath, &[("cvt.rn.f16.f32", 8)], &[("cvt.rn.f16x2.f32", 4), ("cvt.rn", 4)]),
    ("global_prefetch_l2", Need::Tma, &[("cp", 0)], &[("cp.async.bulk.prefetch.L2.global", 1), ("cp", 1)]),
    (
        "grid_begin",
        Need::DependentLaunch,
        &[("griddepcontrol", 0), ("mov.u32", 0)],
        &[("griddepcontrol.wait", 1), ("griddepcontrol.launch_dependents", 1), ("mov.u32 %nctaid", 3)],
    ),
    (
        "grid_near_end",
        Need::DependentLaunch,
        &[("griddepcontrol", 0)],
        &[("griddepcontrol.launch_dependents", 1)],
    ),
];

/// What stands between two branches in `fixture/src/divergence.rs`.
const BETWEEN_BRANCHES: &[(&str, &str, &str)] = &[
    ("barrier", "bar.sync", "bar"),
    ("warp_barrier", "bar.warp.sync", "bar"),
    ("shuffle", "shfl.sync.bfly.b32", "shfl"),
    ("shuffle_idx", "shfl.sync.idx.b32", "shfl"),
    ("ballot", "vote.sync.ballot.b32", "vote"),
    ("any", "vote.sync.any.pred", "vote"),
    ("all", "vote.sync.all.pred", "vote"),
];

/// Only floors with TMA have tensor maps.
const GRID_CONSTANT: &str = "bounds_grid_constant";

const BOUNDS: &[(&str, &[&str])] = &[
    (GRID_CONSTANT, &[".maxntid 32, 1, 1"]),
    ("bounds_none", &[]),
    ("bounds_none_", &[".maxntid 64, 1, 1"]),
    ("bounds_occupancy", &[".maxntid 256, 1, 1", ".minnctapersm 2"]),
    ("bounds_registers", &[".maxntid 128, 1, 1", ".maxnreg 64"]),
];

/// Statements of `body` that have the opcode and, behind it, the operand that `instruction` names.
fn count(body: &str, instruction: &str) -> usize {
    let (opcode, operand) = instruction.split_once(' ').unwrap_or((instruction, ""));
    let statements = body.split([';', '{', '}']);
    statements.filter(|text| count_instructions(text, opcode) == 1 && text.contains(operand)).count()
}

fn assert_instructions(image: &Image, name: &str, instructions: &[(&str, usize)]) {
    let entry = image.entries.iter().find(|entry| entry.name == name);
    let body = &entry.unwrap_or_else(|| panic!("{}: no kernel {name}", image.arch)).body;
    for &(instruction, expected) in instructions {
        let found = count(body, instruction);
        assert_eq!(found, expected, "{}: {instruction} in {name}:\n{body}", image.arch);
    }
}

#[test]
fn each_wrapper_is_the_instruction_that_it_names() {
    for image in images() {
        for (name, instructions) in WRAPPERS {
            assert_instructions(image, name, instructions);
        }
        for (name, need, without, with) in BY_NEED {
            assert_instructions(image, name, if image.arch.has(*need) { with } else { without });
        }
    }
}

/// No kernel of the fixture is without a line in the tables above.
#[test]
fn the_tables_cover_the_fixture() {
    for image in images() {
        let names = WRAPPERS.iter().map(|row| row.0).chain(BY_NEED.iter().map(|row| row.0));
        let mut expected: Vec<String> =
            names.chain(BOUNDS.iter().map(|row| row.0)).map(String::from).collect();
        expected.retain(|name| name != GRID_CONSTANT || image.arch.has(Need::Tma));
        for (name, ..) in BETWEEN_BRANCHES {
            expected.extend(["thread", "data", "loop"].map(|condition| format!("{condition}_{name}")));
        }
        expected.sort();
        let mut found: Vec<&str> = image.entries.iter().map(|entry| entry.name.as_str()).collect();
        found.sort();
        assert_eq!(found, expected, "{}", image.arch);
    }
}

/// One in the source is one in the entry: none is cloned into the arms of a branch.
#[test]
fn what_the_whole_warp_executes_is_not_cloned() {
    for image in images() {
        for (name, instruction, family) in BETWEEN_BRANCHES {
            for condition in ["thread", "data", "loop"] {
                let entry = format!("{condition}_{name}");
                assert_instructions(image, &entry, &[(instruction, 1), (family, 1)]);
                // The shape is still there: a compiler that turned it into selects would prove nothing.
                let body =
                    &image.entries.iter().find(|found| found.name == entry).expect("checked above").body;
                assert!(
                    count(body, "bra") + body.matches("@").count() > 0,
                    "{entry} does not branch:\n{body}"
                );
            }
        }
    }
}

#[test]
fn launch_bounds_are_on_their_own_entries() {
    let expected: BTreeMap<&str, &[&str]> = BOUNDS.iter().copied().collect();
    for image in images() {
        for entry in &image.entries {
            let bounds = expected.get(entry.name.as_str()).copied().unwrap_or_default();
            assert_eq!(entry.directives, bounds, "{}: {}", image.arch, entry.name);
        }
        assert!(!image.text.contains("cuda_std.kernel"), "{}: a comment of #[kernel] is left", image.arch);
    }
}

/// Aligned as TMA wants it, and its address taken where it is.
#[test]
fn tensor_maps_stay_in_parameter_memory() {
    for image in images().iter().filter(|image| image.arch.has(Need::Tma)) {
        let parameter = ".param .align 64 .b8 bounds_grid_constant_param_1[128]";
        assert!(image.text.contains(parameter), "{}", image.text);
        let instructions = [("cvta.param.u64", 1), ("prefetch.tensormap", 1), ("ld.param", 2)];
        assert_instructions(image, GRID_CONSTANT, &instructions);
    }
}

#[test]
fn nothing_panics_calls_or_spills() {
    for image in images() {
        for entry in image.entries.iter().filter(|entry| entry.name != "debug_printf") {
            for forbidden in ["call", ".local"] {
                assert_eq!(count(&entry.body, forbidden), 0, "{}: {forbidden} in {}", image.arch, entry.name);
            }
            if entry.name != "debug_trap" {
                assert_eq!(count(&entry.body, "trap"), 0, "{}: {}", image.arch, entry.name);
            }
        }
        let functions: Vec<&str> = image.text.lines().filter(|line| line.contains(".func")).collect();
        assert!(
            functions.iter().all(|line| line.contains(".extern") && line.contains("vprintf")),
            "{functions:?}"
        );
        assert!(!image.text.contains("panic"), "{}: a panic path", image.arch);
    }
}

#[test]
fn images_assemble() {
    let Some(ptxas) = find_ptxas() else { return skip_optional("no ptxas: set WARPFORGE_PTXAS") };
    for image in images() {
        let rows =
            assemble(&ptxas, &image.text, image.arch).unwrap_or_else(|log| panic!("{}: {log}", image.arch));
        for row in rows.iter().filter(|row| row.name != "debug_printf") {
            assert_eq!(
                (row.stack_bytes, row.spill_stores, row.spill_loads),
                (0, 0, 0),
                "{}: {row:?}",
                image.arch
            );
        }
        assert!(rows.len() >= image.entries.len(), "{}: {} kernels", image.arch, rows.len());
    }
}
