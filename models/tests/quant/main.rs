//! Quantised checkpoints against what the tools that wrote them, and transformers, make of them.

mod architectures;
mod formats;
mod hostile;
mod smollm2;
mod writer;

use std::collections::HashMap;
use std::error::Error as StdError;
use std::ops::ControlFlow;
use std::path::PathBuf;

use host::group::Group;
use host::ops::matmul::Activations;
use host::ops::sampling::SamplingParams;
use host::weight::{Codes, Layout, ScaleType, Scheme};
use host::{DType, Device};
use models::{
    Checkpoint, ExpertSharding, FeedForward, Logits, Mixer, Model, ModelError, ProjectionWeight, Quantise,
    Session, SessionOptions, SessionSampler, Shard,
};
use testkit::compare::relative_l2;
use testkit::golden::{self, Array};
use testkit::gpu::workspace_root;

type Outcome = Result<(), Box<dyn StdError>>;

/// The folders of the golden checkpoints; `tests/golden-quant/README.md` says what they are.
const GOLDEN: [&str; 28] = [
    "awq_int4",
    "awq_int4_moe",
    "ct_fp8_channel",
    "ct_fp8_tensor",
    "ct_mxfp4a16",
    "ct_nvfp4a16",
    "ct_w4a16_asym_g128",
    "ct_w4a16_g32",
    "ct_w8a16",
    "ct_w8a8_int8",
    "fp8_block",
    "fp8_block_moe",
    "fp8_block_ragged",
    "fp8_tensor",
    "gguf_bf16",
    "gguf_f16",
    "gguf_moe_mxfp4",
    "gguf_q4_0",
    "gguf_q4_1",
    "gguf_q4_k_m",
    "gguf_q4_k_m_fallback",
    "gguf_q5_1",
    "gguf_q5_k",
    "gptq_int4_asym_g64",
    "gptq_int4_desc_act",
    "gptq_int8",
    "gptq_v2_int4_asym_g32",
    "modelopt_nvfp4",
];

fn folder() -> PathBuf {
    workspace_root().join("tests/golden-quant")
}

/// A checkpoint's path: the folder, or the GGUF file in it.
fn checkpoint(name: &str) -> PathBuf {
    let folder = folder().join(name);
    if name.starts_with("gguf_") { folder.join("model.gguf") } else { folder }
}

fn case(name: &str) -> Result<HashMap<String, Array>, golden::GoldenError> {
    golden::load(&folder().join(name).join("case.safetensors"))
}

/// A checkpoint whose rows are multiplied as they are given, as those of its logits were.
fn opened(name: &str) -> Result<Checkpoint, ModelError> {
    Ok(Checkpoint::open(&checkpoint(name))?.with_activations(Activations::AsGiven))
}

fn session(device: &Device, checkpoint: &Checkpoint) -> Result<Session, host::Error> {
    let model = Model::from_checkpoint(device, checkpoint, DType::F32, &mut |_| {})?;
    model.session(SessionOptions {
        capacity: 96,
        chunk: 64,
        logits: Logits::All,
        ..SessionOptions::default()
    })
}

/// The prompts of a case.
fn prompts(case: &HashMap<String, Array>) -> Vec<Vec<u32>> {
    let input = &case["input_ids"];
    ids(input).chunks(input.shape[1]).map(<[u32]>::to_vec).collect()
}

fn greedy(session: &mut Session, prompt: &[u32], num_tokens: usize) -> Result<Vec<u32>, host::Error> {
    session.truncate(0, 0)?;
    session.prefill(0, prompt)?;
    let mut sampler = SessionSampler::new(session, SamplingParams::default())?;
    let mut ids = Vec::new();
    while ids.len() < num_tokens {
        ids.push(sampler.sample(session)?[0]);
        session.decode(&ids[ids.len() - 1..])?;
    }
    Ok(ids)
}

/// Logits of all prompts, one after the other.
fn logits(session: &mut Session, prompts: &[Vec<u32>]) -> Result<Vec<f32>, host::Error> {
    let mut logits = Vec::new();
    for prompt in prompts {
        session.truncate(0, 0)?;
        let stream = session.stream().clone();
        session.prefill_visual_with(0, prompt, &[], &mut |_, _| Ok(()), &mut |_, rows| {
            logits.extend(rows.to_vec::<f32>(&stream)?);
            Ok(())
        })?;
    }
    Ok(logits)
}

fn ids(array: &Array) -> Vec<u32> {
    array.i32().expect("ids").iter().map(|&id| id as u32).collect()
}

#[test]
fn logits_and_greedy_tokens() -> Outcome {
    for name in GOLDEN {
        let case = case(name)?;
        let prompts = prompts(&case);
        let mut session = session(&Device::cpu(), &opened(name)?)?;
        let error = relative_l2(&logits(&mut session, &prompts)?, case["logits"].f32().expect("logits"));
        println!("{name}: {error:.2e}");
        assert!(error <= 1e-5, "{name}: logits: {error:.2e}");
        let want = ids(&case["greedy"]);
        assert_eq!(greedy(&mut session, &prompts[0], want.len())?, want, "{name}");
    }
    Ok(())
}

/// Rows become int8 where the checkpoint says so: the logits are those of rows that were quantised and dequantised in
/// f32.
#[test]
fn rows_become_int8() -> Outcome {
    let name = "ct_w8a8_int8";
    let (case, checkpoint) = (case(name)?, Checkpoint::open(&checkpoint(name))?);
    let prompts = prompts(&case);
    let mut session = session(&Device::cpu(), &checkpoint)?;
    let got = logits(&mut session, &prompts)?;
    let error = relative_l2(&got, case["logits_act"].f32().expect("logits"));
    assert!(error <= 1e-5, "{error:.2e}");
    let as_given = relative_l2(&got, case["logits"].f32().expect("logits"));
    assert!(as_given > 1e-3, "no row was quantised: {as_given:.2e}");
    let want = ids(&case["greedy_act"]);
    assert_eq!(greedy(&mut session, &prompts[0], want.len())?, want);
    let model = Model::from_checkpoint(&Device::cpu(), &checkpoint, DType::F32, &mut |_| {})?;
    let FeedForward::Mlp(mlp) = &model.decoder().layers[0].feed_forward else {
        return Err("a gated MLP".into());
    };
    assert!(matches!(mlp.gate_up.weight, ProjectionWeight::Int8 { .. }));
    assert!(matches!(mlp.down.weight, ProjectionWeight::Int8 { .. }));
    // Weights of another kind stay what they are, whatever is asked for.
    let other = Checkpoint::open(&folder().join("gptq_int8"))?.with_activations(Activations::Int8);
    let model = Model::from_checkpoint(&Device::cpu(), &other, DType::F32, &mut |_| {})?;
    let FeedForward::Mlp(mlp) = &model.decoder().layers[0].feed_forward else {
        return Err("a gated MLP".into());
    };
    assert!(matches!(mlp.gate_up.weight, ProjectionWeight::Packed(_)));
    Ok(())
}

/// What a configuration says of rows and is not done is in the report, unless it is asked for to be so.
#[test]
fn rows_that_stay_as_given_are_reported() -> Outcome {
    let groups = "quantization_config.config_groups.group_0.input_activations";
    for (name, from, to, key) in [
        ("ct_w8a8_int8", "\"dynamic\": true", "\"dynamic\": false", groups),
        (
            "fp8_block",
            "\"activation_scheme\": \"dynamic\"",
            "\"activation_scheme\": \"static\"",
            "quantization_config.activation_scheme",
        ),
    ] {
        let (from_folder, to_folder) = (folder().join(name), tempfile::tempdir()?);
        let config = std::fs::read_to_string(from_folder.join("config.json"))?;
        assert!(config.contains(from), "{name}");
        std::fs::write(to_folder.path().join("config.json"), config.replacen(from, to, 1))?;
        let weights = "model.safetensors";
        std::fs::copy(from_folder.join(weights), to_folder.path().join(weights))?;
        let report = |checkpoint: &Checkpoint| -> Result<Vec<String>, host::Error> {
            let model = Model::from_checkpoint(&Device::cpu(), checkpoint, DType::F32, &mut |_| {})?;
            Ok(model.report().unread_keys.clone())
        };
        assert_eq!(report(&Checkpoint::open(&from_folder)?)?, [""; 0], "{name}");
        let changed = Checkpoint::open(to_folder.path())?;
        assert_eq!(report(&changed)?, [key], "{name}");
        assert_eq!(report(&changed.with_activations(Activations::AsGiven))?, [""; 0], "{name}");
    }
    Ok(())
}

/// Tables that a file has quantised stay so, tied ones too; those of ranks that share out a tied one do not.
#[test]
fn tables_stay_quantised() -> Outcome {
    let is_packed = |weight: &ProjectionWeight| matches!(weight, ProjectionWeight::Packed(_));
    for name in GOLDEN {
        let stored = opened(name)?;
        let load = |quantise| Model::quantised(&Device::cpu(), &stored, DType::F32, quantise, &mut |_| {});
        let model = load(Quantise::AsStored)?;
        let decoder = model.decoder();
        let has_quantised = name.starts_with("gguf_") && !["gguf_bf16", "gguf_f16"].contains(&name);
        assert_eq!(is_packed(&decoder.embedding), has_quantised, "{name}");
        assert!(decoder.head.as_ref().is_none_or(|head| is_packed(head) == has_quantised), "{name}");
        assert!(!is_packed(&load(Quantise::Dense)?.decoder().embedding), "{name}");
    }
    Ok(())
}

/// Columns that were quantised in an order of their own (`desc_act`) stay quantised: all projections are as small as
/// those of a file whose columns are in order.
#[test]
fn columns_in_an_order_of_their_own_stay_quantised() -> Outcome {
    let device = Device::cpu();
    let load = |name: &str, quantise| -> Result<Vec<(bool, usize)>, Box<dyn StdError>> {
        let model = Model::quantised(&device, &opened(name)?, DType::BF16, quantise, &mut |_| {})?;
        let mut projections = Vec::new();
        for layer in &model.decoder().layers {
            let (FeedForward::Mlp(mlp), Mixer::Attention(attention)) = (&layer.feed_forward, &layer.mixer)
            else {
                return Err("attention and a gated MLP".into());
            };
            for projection in [&attention.qkv, &attention.o, &mlp.gate_up, &mlp.down] {
                let is_permuted = match &projection.weight {
                    ProjectionWeight::Packed(parts) => parts.iter().all(|part| part.layout().permuted),
                    _ => false,
                };
                projections.push((is_permuted, projection.bytes()));
            }
        }
        Ok(projections)
    };
    let permuted = load("gptq_int4_desc_act", Quantise::AsStored)?;
    // The columns of o are in order there.
    let are_permuted: Vec<bool> = permuted.iter().map(|(is_permuted, _)| *is_permuted).collect();
    assert!(are_permuted.chunks(4).all(|layer| layer == [true, false, true, true]), "{permuted:?}");
    let dense = load("gptq_int4_desc_act", Quantise::Dense)?;
    for ((_, bytes), (_, dense)) in std::iter::zip(permuted, dense) {
        assert!(bytes * 3 < dense, "{bytes} of {dense} bytes");
    }
    let ordered = load("gptq_int8", Quantise::AsStored)?;
    assert!(ordered.iter().all(|(is_permuted, _)| !is_permuted), "{ordered:?}");
    Ok(())
}

/// What a file has quantised is floats on the device where it has to be, and the report says so.
#[test]
fn what_became_floats_is_reported() -> Outcome {
    for name in GOLDEN {
        for quantise in [Quantise::AsStored, Quantise::Dense, Quantise::Requantise(Scheme::INT8)] {
            let model = Model::quantised(&Device::cpu(), &opened(name)?, DType::F32, quantise, &mut |_| {})?;
            assert_eq!(model.report().dequantised_tensors, [""; 0], "{name} {quantise:?}");
        }
    }
    // Ranks have some of the columns of an MLP's second weight, and all rows that there are; of attention's too.
    let stored = opened("gptq_int4_desc_act")?;
    let group = Group::new(&[Device::cpu(), Device::cpu()])?;
    let reports = group.run(|rank| {
        let mut go_on = |_| ControlFlow::Continue(());
        let model = Model::of_rank(rank, &stored, DType::F32, Quantise::AsStored, &mut go_on)?;
        Ok::<_, host::Error>(model.report().clone())
    });
    for report in reports {
        let report = report?;
        let is_cut = |name: &String| name.ends_with("down_proj.weight") || name.ends_with("o_proj.weight");
        assert!(report.dequantised_tensors.iter().all(is_cut), "{report:?}");
        assert!(!report.dequantised_tensors.is_empty(), "{report:?}");
        assert!(report.to_string().contains("quantised tensors, which became floats"), "{report}");
    }
    Ok(())
}

/// What every file's weights are on a device is among the formats that are listed.
#[test]
fn formats_are_listed() -> Outcome {
    // Scales may be floats of any type, and groups of any size.
    let kind = |layout: Layout| {
        let scale = match layout.scale {
            ScaleType::F32 | ScaleType::F16 | ScaleType::Bf16 => ScaleType::F32,
            scale => scale,
        };
        (layout.codes, scale, layout.rows > 1, layout.zeros, layout.minimums)
    };
    let known: Vec<_> = models::WEIGHT_FORMATS.iter().map(|(_, layout)| kind(*layout)).collect();
    let mut met = Vec::new();
    for name in GOLDEN {
        let model = Model::from_checkpoint(&Device::cpu(), &opened(name)?, DType::F32, &mut |_| {})?;
        let decoder = model.decoder();
        let mut weights: Vec<&ProjectionWeight> =
            [&decoder.embedding].into_iter().chain(&decoder.head).collect();
        for layer in &decoder.layers {
            match &layer.feed_forward {
                FeedForward::Mlp(mlp) => weights.extend([&mlp.gate_up.weight, &mlp.down.weight]),
                FeedForward::Moe(moe) => weights.extend([&moe.gate_up, &moe.down]),
                other => panic!("{other:?}"),
            }
        }
        for weight in weights {
            if let ProjectionWeight::Packed(parts) = weight {
                for part in parts {
                    let layout = part.layout();
                    assert_eq!(layout.problem(), None, "{name}");
                    assert!(known.contains(&kind(layout)), "{name}: {layout:?}");
                    met.push(kind(layout));
                }
            }
        }
    }
    let unmet: Vec<_> =
        models::WEIGHT_FORMATS.iter().filter(|(_, layout)| !met.contains(&kind(*layout))).collect();
    let names: Vec<&str> = unmet.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, [""; 0]);
    Ok(())
}

/// Over the ranks of a group: the same logits, of weights that stay packed where they can be cut.
#[test]
fn parts_of_ranks() -> Outcome {
    use ExpertSharding::{Expert, Tensor};
    let packed = |model: &Model| -> usize {
        // Or nothing is here.
        let is_packed = |weight: &ProjectionWeight| match weight {
            ProjectionWeight::Packed(_) => 1,
            ProjectionWeight::Plain(weight) => usize::from(weight.is_empty()),
            ProjectionWeight::Int8 { .. } | ProjectionWeight::Mixed(_) => 0,
        };
        let of = |layer: &models::DecoderLayer| match &layer.feed_forward {
            FeedForward::Mlp(mlp) => is_packed(&mlp.gate_up.weight) + is_packed(&mlp.down.weight),
            FeedForward::Moe(moe) => is_packed(&moe.gate_up) + is_packed(&moe.down),
            _ => 0,
        };
        model.decoder().layers.iter().map(of).sum()
    };
    for name in GOLDEN {
        let case = case(name)?;
        let prompts = prompts(&case);
        let want = case["logits"].f32().expect("logits");
        let stored = opened(name)?;
        let whole = Model::from_checkpoint(&Device::cpu(), &stored, DType::F32, &mut |_| {})?;
        for (size, experts) in [(2, Tensor), (3, Tensor), (3, Expert)] {
            let group = Group::new(&vec![Device::cpu(); size])?;
            let parts = group.run(|rank| -> Result<(f64, usize), host::Error> {
                let mut go_on = |_| ControlFlow::Continue(());
                let model = Model::of_rank(
                    Shard::from(rank).with_experts(experts),
                    &stored,
                    DType::F32,
                    Quantise::AsStored,
                    &mut go_on,
                )?;
                let packed = packed(&model);
                let options = SessionOptions {
                    capacity: 96,
                    chunk: 64,
                    logits: Logits::All,
                    ..SessionOptions::default()
                };
                Ok((relative_l2(&logits(&mut model.session(options)?, &prompts)?, want), packed))
            });
            for (rank, part) in parts.into_iter().enumerate() {
                let (error, packed_here) = part?;
                let packed = packed(&whole);
                // Columns in an order of their own are not cut: of an MLP's two weights that is the second.
                let least = if name.ends_with("desc_act") { packed / 2 } else { packed };
                let is_packed = packed == 0 || (least..=packed).contains(&packed_here);
                assert!(is_packed, "{name}, rank {rank} of {size}: {packed_here}");
                assert!(error <= 1e-5, "{name}, rank {rank} of {size}: {error:.2e}");
            }
        }
    }
    Ok(())
}

/// What is quantised is quantised once more, by another scheme: also what can only be dequantised otherwise, and rows
/// in another order.
#[test]
fn quantised_by_another_scheme() -> Outcome {
    for name in GOLDEN {
        let case = case(name)?;
        let prompts = prompts(&case);
        let stored = opened(name)?;
        let of = |quantise: &str| -> Result<Vec<f32>, host::Error> {
            let device = Device::cpu();
            let model = Model::quantised(&device, &stored, DType::F32, quantise.parse()?, &mut |_| {})?;
            let options =
                SessionOptions { capacity: 96, chunk: 64, logits: Logits::All, ..SessionOptions::default() };
            logits(&mut model.session(options)?, &prompts)
        };
        let want = case["logits"].f32().expect("logits");
        let [by_8, by_4, by_none] = ["requantise-int8", "requantise-mxfp4", "int8"].map(of);
        let error = relative_l2(&by_8?, want);
        assert!(error > 1e-4 && error < 0.1, "{name}: {error:.2e}");
        let error = relative_l2(&by_4?, want);
        assert!(error < 0.7, "{name}: {error:.2e}");
        // By itself a scheme is for what is not quantised, of which there is nothing, or little.
        let error = relative_l2(&by_none?, want);
        assert!(error < 0.05, "{name}: {error:.2e}");
    }
    Ok(())
}

/// Codes of the parts of a model's experts, gate and up and then down; none of plain ones.
fn codes_of_experts(model: &Model) -> Vec<Vec<Codes>> {
    let codes = |weight: &ProjectionWeight| match weight {
        ProjectionWeight::Packed(parts) => parts.iter().map(|part| part.layout().codes).collect(),
        _ => Vec::new(),
    };
    let moes = model.decoder().layers.iter().filter_map(|layer| match &layer.feed_forward {
        FeedForward::Moe(moe) => Some(moe),
        _ => None,
    });
    moes.flat_map(|moe| [codes(&moe.gate_up), codes(&moe.down)]).collect()
}

/// Experts are on the device as they are in the file.
#[test]
fn experts_stay_quantised() -> Outcome {
    for (name, codes) in
        [("awq_int4_moe", Codes::Int4), ("fp8_block_moe", Codes::E4m3), ("gguf_moe_mxfp4", Codes::E2m1)]
    {
        let checkpoint = Checkpoint::open(&checkpoint(name))?;
        let load =
            |quantise| Model::quantised(&Device::cpu(), &checkpoint, DType::F32, quantise, &mut |_| {});
        assert_eq!(codes_of_experts(&load(Quantise::AsStored)?), [vec![codes], vec![codes]], "{name}");
        assert_eq!(codes_of_experts(&load(Quantise::Dense)?), [vec![], vec![]], "{name}");
    }
    Ok(())
}

/// Experts of a float checkpoint by every named scheme: near what they are, and gate and up apart where their global
/// scales differ.
#[test]
fn experts_are_quantised_as_they_load() -> Outcome {
    let folder = golden::folder("qwen3_moe");
    let case = golden::load(&folder.join("case.safetensors"))?;
    let prompts = prompts(&case);
    let checkpoint = Checkpoint::open(&folder)?;
    for (name, scheme) in Scheme::NAMED {
        let model =
            Model::quantised(&Device::cpu(), &checkpoint, DType::F32, Quantise::By(scheme), &mut |_| {})?;
        let all = codes_of_experts(&model);
        assert!(!all.is_empty() && all.iter().flatten().all(|codes| *codes == scheme.codes), "{name}");
        let parts = if name == "nvfp4" { 2 } else { 1 };
        assert_eq!((all[0].len(), all[1].len()), (parts, 1), "{name}");
        let mut session = model.session(SessionOptions {
            capacity: 96,
            chunk: 64,
            logits: Logits::All,
            ..SessionOptions::default()
        })?;
        let error = relative_l2(&logits(&mut session, &prompts)?, case["logits"].f32().expect("logits"));
        println!("{name}: {error:.2e}");
        assert!(error < 0.4 && error > 1e-4, "{name}: {error:.2e}");
    }
    Ok(())
}

/// The values are those of the tools, to the bit.
#[test]
fn dequantised_tensors() -> Outcome {
    // Files of floats have none.
    for name in GOLDEN.into_iter().filter(|name| !["gguf_bf16", "gguf_f16"].contains(name)) {
        let checkpoint = Checkpoint::open(&checkpoint(name))?;
        let mut tensors = 0;
        for (key, want) in case(name)? {
            let Some(tensor) = key.strip_prefix("dequant.") else { continue };
            let matrix = checkpoint.quantised(tensor)?.ok_or("a quantised tensor")?;
            assert_eq!([matrix.n(), matrix.k()], want.shape[..], "{name}: {tensor}");
            let mut row = vec![f32::NAN; matrix.k()];
            for (index, want) in want.f32().expect(&key).chunks(matrix.k()).enumerate() {
                matrix.dequantise_row(index, &mut row);
                assert_eq!(row, want, "{name}: row {index} of {tensor}");
            }
            tensors += 1;
        }
        assert_eq!(tensors, 1, "{name}");
    }
    Ok(())
}
