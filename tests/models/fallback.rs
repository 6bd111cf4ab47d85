//! Cards that refuse kernels, when they are loaded or when they are launched: under a policy to go on, models write the
//! same tokens.

use testkit::golden;
use testkit::simulator::{Refuses, Refusing};
use warpforge::Fallback;

use super::*;

/// A simulated Hopper card that refuses.
fn card(refuses: Refuses, fallback: Fallback) -> Result<Device, warpforge::Error> {
    Ok(Device::simulated(Arc::new(Refusing::new(Card::new(Arch::Sm90a), refuses)))?.with_fallback(fallback))
}

/// All kernels at once: everything is on the CPU.
const ALL: Refuses = Refuses::Kernels(|_, _| true);

/// Each model on the CPU alone, one by an older floor's kernels, and by both in turn.
#[test]
fn sessions_go_on_where_a_card_refuses() -> Outcome {
    let options = SessionOptions { capacity: 16, ..SessionOptions::default() };
    let prompt = [5, 6, 7, 8, 9];
    let cpu =
        |name| greedy(&mut session(&Device::cpu(), &golden::folder(name), DType::F32, options)?, &prompt, 4);
    let on_cpu = GOLDEN.map(|name| (name, ALL, Fallback::Cpu, true));
    let attends: fn(&str, Arch) -> bool = |entry, arch| arch == Arch::Sm90a && entry.starts_with("attention");
    let norms: fn(&str, Arch) -> bool = |entry, _| entry.contains("norm");
    let in_part = [
        ("qwen3", Refuses::Kernels(attends), Fallback::LowerFloor, false),
        ("qwen3", Refuses::Launches(norms), Fallback::Cpu, false),
    ];
    for (name, refuses, fallback, is_whole) in on_cpu.into_iter().chain(in_part) {
        let device = card(refuses, fallback)?;
        let mut session = session(&device, &golden::folder(name), DType::F32, options)?;
        assert_eq!(greedy(&mut session, &prompt, 4)?, cpu(name)?, "{name}, {refuses:?}");
        assert!(!device.fallen().is_empty(), "{name}, {refuses:?}");
        for (phase, reports) in session.optimization_reports() {
            for report in reports {
                let fell = report.fallback.is_some();
                assert!(
                    fell == (report.variant == "cpu") || fallback == Fallback::LowerFloor,
                    "{name}: {report}"
                );
                assert!(fell || !is_whole, "{name}, {phase}: {report}");
            }
        }
    }
    Ok(())
}

/// The kernels for packed weights.
fn packed(entry: &str, _: Arch) -> bool {
    entry.contains("packed")
}

/// The same of the newest floor alone.
fn packed_of_the_newest(entry: &str, arch: Arch) -> bool {
    arch == Arch::Sm90a && packed(entry, arch)
}

/// Weights that stay quantised, of every way in which a file has them: what transformers writes with the dequantised
/// ones, on the CPU alone.
#[test]
fn packed_weights_go_on_on_the_cpu() -> Outcome {
    let mut names: Vec<String> = std::fs::read_dir(workspace_root().join("tests/golden-quant"))?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_, std::io::Error>>()?;
    names.retain(|name| !name.contains('.'));
    assert!(names.len() >= 17, "{names:?}");
    for name in names {
        packed_weights_go_on(&name, ALL, Fallback::Cpu)?;
    }
    Ok(())
}

/// The same by the next floor's kernels, and where the products alone are refused, as they are loaded and as they are
/// launched: matrices and experts.
#[test]
fn packed_weights_go_on_in_part() -> Outcome {
    for name in ["awq_int4", "gguf_q4_k_m", "fp8_block_moe"] {
        packed_weights_go_on(name, Refuses::Kernels(packed_of_the_newest), Fallback::LowerFloor)?;
        packed_weights_go_on(name, Refuses::Launches(packed_of_the_newest), Fallback::LowerFloor)?;
        packed_weights_go_on(name, Refuses::Kernels(packed), Fallback::Cpu)?;
        packed_weights_go_on(name, Refuses::Launches(packed), Fallback::Cpu)?;
    }
    Ok(())
}

fn packed_weights_go_on(name: &str, refuses: Refuses, fallback: Fallback) -> Outcome {
    let folder = workspace_root().join("tests/golden-quant").join(name);
    let arrays = testkit::golden::load(&folder.join("case.safetensors"))?;
    let path = if name.starts_with("gguf") { folder.join("model.gguf") } else { folder.clone() };
    let case = Case { name: "quantised", folder, arrays };
    let want = case.greedy().ok_or("no continuation")?;
    let device = card(refuses, fallback)?;
    let options = SessionOptions { capacity: 32, chunk: 32, ..SessionOptions::default() };
    let mut session = session(&device, &path, DType::F32, options)?;
    let got = greedy(&mut session, &case.prompts()[0], 3)?;
    assert_eq!(got, want[..3], "{name}, {refuses:?}, {fallback:?}");
    let fallen = device.fallen();
    assert!(fallen.iter().any(|line| line.contains("matmul falls back to ")), "{name}: {fallen:?}");
    Ok(())
}

/// Sequences that come and go, prompts beside decode steps: of each model the tokens of the CPU, on the CPU alone.
#[test]
fn batches_go_on_on_the_cpu() -> Outcome {
    for name in ["qwen3", "qwen3_sliding", "qwen3_moe", "qwen3_next", "glm4_moe_lite"] {
        batches_go_on(&golden::folder(name), ALL, Fallback::Cpu)?;
    }
    batches_go_on(&workspace_root().join("tests/golden-quant/awq_int4_moe"), ALL, Fallback::Cpu)
}

/// The same tokens by older floors' kernels, and by both in turn; with packed weights too.
#[test]
fn batches_go_on_in_part() -> Outcome {
    let qwen3 = golden::folder("qwen3");
    let newest: fn(&str, Arch) -> bool = |_, arch| arch == Arch::Sm90a;
    batches_go_on(&qwen3, Refuses::Kernels(newest), Fallback::LowerFloor)?;
    batches_go_on(&qwen3, Refuses::Launches(newest), Fallback::LowerFloor)?;
    batches_go_on(&qwen3, Refuses::Launches(|entry, _| entry.contains("norm")), Fallback::Cpu)?;
    let quantised = workspace_root().join("tests/golden-quant/awq_int4_moe");
    batches_go_on(&quantised, Refuses::Kernels(packed_of_the_newest), Fallback::LowerFloor)?;
    batches_go_on(&quantised, Refuses::Launches(packed), Fallback::Cpu)
}

fn batches_go_on(folder: &Path, refuses: Refuses, fallback: Fallback) -> Outcome {
    let prompts: [Vec<u32>; 3] = [vec![5, 6, 7, 8, 9], vec![100, 2, 17], vec![99]];
    let write = |device: &Device| -> Result<_, Box<dyn StdError>> {
        Ok(together(Model::load(device, folder, DType::F32, &mut |_| {})?, &prompts)?)
    };
    let (device, name) = (card(refuses, fallback)?, folder.display());
    assert_eq!(write(&device)?, write(&Device::cpu())?, "{name}, {refuses:?}, {fallback:?}");
    assert!(!device.fallen().is_empty(), "{name}, {refuses:?}, {fallback:?}");
    Ok(())
}

/// Without a policy the first of them is the error that it was.
#[test]
fn without_a_policy_a_model_stops() -> Outcome {
    for (refuses, fallback) in [(ALL, Fallback::Error), (ALL, Fallback::LowerFloor)] {
        let model = Model::load(&card(refuses, fallback)?, &golden::folder("qwen3"), DType::F32, &mut |_| {});
        let error = model.and_then(|model| model.session(SessionOptions::default())).err();
        let text = error.ok_or("an error")?.to_string();
        assert!(text.contains(": not supported on simulated "), "{fallback:?}: {text}");
    }
    Ok(())
}
