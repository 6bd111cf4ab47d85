//! Weights that a card quantises as they are loaded.

use std::ops::ControlFlow;

use testkit::golden;
use warpforge::group::Group;
use warpforge::models::{Checkpoint, FeedForward, Mixer, ProjectionWeight, QuantReport, Quantise};
use warpforge::weight::{ScaleType, Scheme};

use super::saving::SCHEMES;
use super::*;

/// The bytes of every packed weight of a model's layers and tables.
fn packed(model: &Model) -> Result<Vec<Vec<i8>>, warpforge::Error> {
    let decoder = model.decoder();
    let mut weights: Vec<&ProjectionWeight> = [&decoder.embedding].into_iter().chain(&decoder.head).collect();
    for layer in &decoder.layers {
        match &layer.mixer {
            Mixer::Attention(attention) => weights.extend([&attention.qkv.weight, &attention.o.weight]),
            Mixer::DeltaNet(net) => {
                weights.push(&net.out.weight);
                match &net.input.weight {
                    ProjectionWeight::Mixed(parts) => weights.extend(parts),
                    other => weights.push(other),
                }
            }
            Mixer::Latent(latent) => {
                weights.extend([&latent.a.weight, &latent.q_b.weight, &latent.o.weight]);
            }
            other => panic!("{other:?}"),
        }
        match &layer.feed_forward {
            FeedForward::Mlp(mlp) => weights.extend([&mlp.gate_up.weight, &mlp.down.weight]),
            FeedForward::Moe(moe) => {
                weights.extend([&moe.gate_up, &moe.down]);
                let shared = moe.shared.iter().flat_map(|mlp| [&mlp.gate_up.weight, &mlp.down.weight]);
                weights.extend(shared);
            }
            other => panic!("{other:?}"),
        }
    }
    let parts = weights.into_iter().flat_map(|weight| match weight {
        ProjectionWeight::Packed(parts) => &parts[..],
        _ => &[],
    });
    let stream = model.device().stream()?;
    parts.flat_map(|weight| weight.parts()).flatten().map(|part| part.to_vec::<i8>(&stream)).collect()
}

/// What a card quantises is what the host does, bit for bit, and it is the card that does it.
#[test]
fn a_card_quantises_as_the_host_does() -> Outcome {
    for name in ["qwen3", "qwen3_moe", "qwen3_next", "glm4_moe_lite"] {
        let checkpoint = Checkpoint::open(&golden::folder(name))?;
        for (title, scheme) in SCHEMES.into_iter().chain([("e6m9", Scheme::E6M9)]) {
            let load = |device: &Device| -> Result<Vec<Vec<i8>>, warpforge::Error> {
                let model =
                    Model::quantised(device, &checkpoint, DType::F32, Quantise::By(scheme), &mut |_| {})?;
                packed(&model)
            };
            let want = load(&Device::cpu())?;
            assert!(!want.is_empty(), "{name}, {title}");
            let simulated = Arc::new(Card::new(Arch::Sm80));
            assert!(load(&Device::simulated(simulated.clone())?)? == want, "{name}, {title}");
            // The factor of fp8 scales is of the whole matrix.
            let is_own = simulated.launched().iter().any(|entry| entry.starts_with("quantize_weight"));
            assert_eq!(is_own, scheme.scale != ScaleType::E4m3, "{name}, {title}");
            for card in cards() {
                assert!(load(&card)? == want, "{name}, {title}, {card:?}");
            }
        }
    }
    Ok(())
}

/// A model that is loaded is quantised in place, to the bits of one that is quantised as it is loaded; what it was is
/// given back, and the report says of each weight how far it is from that.
#[test]
fn quantised_in_place() -> Outcome {
    let mut devices = cards();
    devices.extend([Device::cpu(), Device::simulated(Arc::new(Card::new(Arch::Sm80)))?]);
    for name in ["qwen3", "qwen3_moe", "qwen3_next", "glm4_moe_lite"] {
        let checkpoint = Checkpoint::open(&golden::folder(name))?;
        for (device, (title, scheme)) in
            devices.iter().flat_map(|device| SCHEMES.into_iter().map(move |scheme| (device, scheme)))
        {
            let load = |quantise| Model::quantised(device, &checkpoint, DType::F32, quantise, &mut |_| {});
            let mut model = load(Quantise::Dense)?;
            let mut told = Vec::new();
            let report = model.quantise(scheme, &mut |so_far| {
                told.push(so_far);
                ControlFlow::Continue(())
            })?;
            let wanted = load(Quantise::By(scheme))?;
            let what = format!("{name}, {title}, {device:?}");
            // Blocks of rows go over the borders of q, k and v.
            if scheme.rows == 1 {
                assert!(packed(&model)? == packed(&wanted)?, "{what}");
            } else {
                let [got, want] = [packed(&model)?, packed(&wanted)?].map(|all| all.concat().len());
                assert!(got.abs_diff(want) * 10 < want, "{what}: {got} bytes of {want}");
            }
            assert!(told.windows(2).all(|two| two[0].loaded_bytes <= two[1].loaded_bytes), "{what}");
            assert!(told.last().is_some_and(|last| last.loaded_bytes == last.total_bytes), "{what}");
            assert!(report.bytes_after < report.bytes_before, "{what}: {report}");
            let most = if scheme.codes.bits() == 4 { 0.2 } else { 0.05 };
            for tensor in &report.tensors {
                let error = tensor.errors.relative;
                assert!(error > 0.0 && error < most, "{what}: {}: {error}", tensor.name);
                assert!(tensor.bytes_after < tensor.bytes_before, "{what}: {tensor:?}");
            }
            let experts = model.config().decoder.layers.len() * 8 * 3;
            let per_expert = report.tensors.iter().filter(|tensor| tensor.name.contains(".experts.")).count();
            assert!(name == "qwen3" || (experts / 2..=experts).contains(&per_expert), "{what}: {per_expert}");
            // Once more there is nothing to do.
            let before = packed(&model)?;
            let again = model.quantise(Scheme::INT8, &mut |_| ControlFlow::Continue(()))?;
            assert!(again.tensors.is_empty() && again.bytes_before == again.bytes_after, "{what}: {again}");
            assert!(packed(&model)? == before, "{what}");
        }
    }
    Ok(())
}

/// In place nothing is lost: where it ends early, or cannot begin, the model goes on.
#[test]
fn quantised_in_place_or_not() -> Outcome {
    let case = Case::load("qwen3")?;
    let checkpoint = Checkpoint::open(&case.folder)?;
    let prompt = &case.prompts()[0];
    let mut model = Model::quantised(&Device::cpu(), &checkpoint, DType::F32, Quantise::Dense, &mut |_| {})?;
    let logits = |model: &Model| -> Result<Vec<f32>, warpforge::Error> {
        model.session(options(&case, 64))?.prefill(0, prompt)?.to_host()
    };
    let want = logits(&model)?;
    let mut go_on = |_| ControlFlow::Continue(());
    let session = model.session(options(&case, 64))?;
    let error = model.quantise(Scheme::INT8, &mut go_on).err().ok_or("an error")?.to_string();
    assert!(error.contains("a model whose weights nothing else has"), "{error}");
    drop(session);
    let bad = Scheme { group: 24, ..Scheme::INT4 };
    let error = model.quantise(bad, &mut go_on).err().ok_or("an error")?.to_string();
    assert!(error.contains("a group of 16, 32"), "{error}");
    assert_eq!(logits(&model)?, want);
    let mut steps = 0;
    let stopped = model.quantise(Scheme::INT8, &mut |_| {
        steps += 1;
        if steps == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let error = stopped.err().ok_or("an error")?.to_string();
    assert!(error.contains("stopped"), "{error}");
    let error = relative_l2(&logits(&model)?, &want);
    assert!(error > 1e-5 && error < 0.02, "{error:.2e}");
    let report = model.quantise(Scheme::INT8, &mut go_on)?;
    assert_eq!(report.kept.iter().filter(|(_, reason)| reason == "quantised already").count(), 3, "{report}");
    let error = relative_l2(&logits(&model)?, &want);
    assert!(error > 1e-5 && error < 0.02, "{error:.2e}");
    // What is reported is of what is packed: blocks of rows begin anew with up.
    let scheme = Scheme { group: 64, rows: 512, ..Scheme::FP8 };
    let mut model = Model::quantised(&Device::cpu(), &checkpoint, DType::F32, Quantise::Dense, &mut |_| {})?;
    let report = model.quantise(scheme, &mut go_on)?;
    let place = tempfile::tempdir()?;
    let saved = checkpoint.save_quantised(&scheme, &place.path().join("saved"), &mut go_on)?;
    for part in ["gate", "up"] {
        let of = |report: &QuantReport, name: &str| {
            report.tensors.iter().find(|tensor| tensor.name == name).map(|tensor| tensor.errors)
        };
        let own = of(&report, &format!("layers.0.{part}")).ok_or("a part")?;
        assert_eq!(Some(own), of(&saved, &format!("model.layers.0.mlp.{part}_proj.weight")), "{part}");
    }
    Ok(())
}

/// Tables by a scheme of their own: a card's bits are the host's, one scheme is the layers' alone, and tables that a
/// file has quantised stay as they are.
#[test]
fn tables_are_quantised_by_their_own_scheme() -> Outcome {
    let layouts = |weight: &ProjectionWeight| match weight {
        ProjectionWeight::Packed(parts) => parts.iter().map(|part| part.layout()).collect(),
        _ => Vec::new(),
    };
    // With one table, and with two.
    for name in ["qwen3", "qwen3_moe"] {
        let case = Case::load(name)?;
        let checkpoint = Checkpoint::open(&case.folder)?;
        let prompt = &case.prompts()[0];
        let load = |device: &Device, quantise: Quantise| {
            Model::quantised(device, &checkpoint, DType::F32, quantise, &mut |_| {})
        };
        let steps = |device: &Device, quantise: Quantise| -> Result<Vec<f32>, warpforge::Error> {
            let mut session = load(device, quantise)?.session(options(&case, 64))?;
            let mut logits = session.prefill(0, &prompt[..3])?.to_host()?;
            logits.extend(session.decode(&prompt[3..4])?.to_host()?);
            Ok(logits)
        };
        let dense = steps(&Device::cpu(), Quantise::Dense)?;
        for (title, tables) in Scheme::NAMED {
            let quantise = Quantise::WithTables { projections: Scheme::INT8, tables };
            let host = load(&Device::cpu(), quantise)?;
            let (decoder, by_one) = (host.decoder(), load(&Device::cpu(), Quantise::By(Scheme::INT8))?);
            assert_eq!(decoder.head.is_some(), name == "qwen3_moe");
            for (table, plain) in std::iter::zip(
                [&decoder.embedding].into_iter().chain(&decoder.head),
                [&by_one.decoder().embedding].into_iter().chain(&by_one.decoder().head),
            ) {
                assert_eq!(layouts(table), [tables.layout()], "{name}, {title}");
                assert_eq!(layouts(plain), [], "{name}, {title}");
                assert!(table.bytes() < plain.bytes(), "{name}, {title}");
            }
            let simulated = Arc::new(Card::new(Arch::Sm90a));
            let mut devices = cards();
            devices.push(Device::simulated(simulated.clone())?);
            let want = packed(&host)?;
            let error = relative_l2(&steps(&Device::cpu(), quantise)?, &dense);
            let allowed = if tables.codes.bits() == 4 { 0.5 } else { 0.1 };
            // Of a mixture other experts may be chosen.
            let allowed = if name == "qwen3" { allowed } else { 1.0 };
            assert!(error > 0.0 && error <= allowed, "{name}, {title}: {error:.3}");
            for device in devices {
                assert!(packed(&load(&device, quantise)?)? == want, "{name}, {title}, {device:?}");
                let error = relative_l2(&steps(&device, quantise)?, &steps(&Device::cpu(), quantise)?);
                assert!(error <= 1e-4, "{name}, {title}, {device:?}: {error:.2e}");
            }
            let launched = simulated.launched();
            let gathered =
                launched.iter().any(|entry| entry.starts_with("embedding_f32_") && entry.contains("packed"));
            assert!(gathered, "{name}, {title}: {launched:?}");
        }
        // Random weights have the same layouts.
        let config = checkpoint.config().clone();
        let quantise = Quantise::WithTables { projections: Scheme::INT8, tables: Scheme::INT8 };
        let random = Model::random_quantised(&Device::cpu(), config, DType::F32, quantise, 1)?;
        assert_eq!(layouts(&random.decoder().embedding), [Scheme::INT8.layout()], "{name}");
    }
    // Ranks of a group: all of the embedding, and rows of a head that is another table, but not inside of blocks.
    let checkpoint = Checkpoint::open(&golden::folder("qwen3_moe"))?;
    let group = Group::new(&[Device::cpu(), Device::cpu(), Device::cpu()])?;
    for (title, tables) in Scheme::NAMED {
        let quantise = Quantise::WithTables { projections: Scheme::INT8, tables };
        let parts = group.run(|rank| {
            let mut go_on = |_| ControlFlow::Continue(());
            Model::of_rank(rank, &checkpoint, DType::F32, quantise, &mut go_on)
        });
        for part in parts {
            match part {
                Ok(model) => {
                    let decoder = model.decoder();
                    let head = decoder.head.as_ref().ok_or("a head")?;
                    assert_eq!(
                        [layouts(&decoder.embedding), layouts(head)].concat(),
                        [tables.layout(); 2],
                        "{title}"
                    );
                }
                Err(error) => {
                    let message = error.to_string();
                    assert!(
                        tables.rows > 1 && message.contains("a scale for each row"),
                        "{title}: {message}"
                    );
                }
            }
        }
    }
    let stored = Checkpoint::open(&workspace_root().join("tests/golden-quant/gguf_q4_1/model.gguf"))?;
    let quantise = Quantise::WithTables { projections: Scheme::INT8, tables: Scheme::INT8 };
    let [as_stored, by_table] = [Quantise::AsStored, quantise]
        .map(|quantise| Model::quantised(&Device::cpu(), &stored, DType::F32, quantise, &mut |_| {}));
    assert!(packed(&as_stored?)? == packed(&by_table?)?);
    Ok(())
}

/// A value that is not finite is reported with the tensor's name, by a card and by the host.
#[test]
fn values_that_are_not_finite_are_named() -> Outcome {
    let folder = golden::folder("qwen3");
    let place = tempfile::tempdir()?;
    std::fs::copy(folder.join("config.json"), place.path().join("config.json"))?;
    let mut bytes = std::fs::read(folder.join("model.safetensors"))?;
    let name = "model.layers.0.mlp.down_proj.weight";
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into()?) as usize;
    let described: serde_json::Value = serde_json::from_slice(&bytes[8..header])?;
    let start = described[name]["data_offsets"][0].as_u64().ok_or("an offset")? as usize + header;
    // A NaN in bf16 as in f32.
    bytes[start..start + 4].fill(0xff);
    std::fs::write(place.path().join("model.safetensors"), bytes)?;
    let checkpoint = Checkpoint::open(place.path())?;
    for device in [Device::cpu(), Device::simulated(Arc::new(Card::new(Arch::Sm80)))?] {
        let quantise = Quantise::By(Scheme::INT8);
        let error = Model::quantised(&device, &checkpoint, DType::F32, quantise, &mut |_| {});
        let message = error.err().ok_or("an error")?.to_string();
        assert!(message.contains("finite values") && message.contains(name), "{device:?}: {message}");
    }
    Ok(())
}

/// Token by token in bf16, as a sequence of one decodes, against the same weights in f32. From Hopper on layers norm
/// and add the residual in their products with packed weights, as with plain ones.
#[test]
fn quantised_steps() -> Outcome {
    let case = Case::load("qwen3")?;
    let checkpoint = Checkpoint::open(&case.folder)?;
    let prompt = &case.prompts()[0];
    for (scheme, codes) in [(Scheme::INT4, "int4"), (Scheme::INT8, "int8")] {
        let steps = |device: &Device, dtype: DType| -> Result<Vec<f32>, warpforge::Error> {
            let quantise = Quantise::By(scheme);
            let model = Model::quantised(device, &checkpoint, dtype, quantise, &mut |_| {})?;
            let mut session = model.session(options(&case, 64))?;
            let stream = session.stream().clone();
            session.prefill(0, &prompt[..2])?;
            let mut logits = Vec::new();
            for &id in &prompt[2..8] {
                logits.extend(session.decode(&[id])?.to_vec::<f32>(&stream)?);
            }
            Ok(logits)
        };
        let want = steps(&Device::cpu(), DType::F32)?;
        let allowed = 1.5 * relative_l2(&steps(&Device::cpu(), DType::BF16)?, &want);
        let simulated = Arc::new(Card::new(Arch::Sm90a));
        let mut devices = cards();
        devices.push(Device::simulated(simulated.clone())?);
        for device in devices {
            let error = relative_l2(&steps(&device, DType::BF16)?, &want);
            assert!(error <= allowed, "{codes} on {device:?}: error {error:.4}, allowed {allowed:.4}");
        }
        let launched = simulated.launched();
        let is_ahead = |entry: &&str| entry.starts_with(&format!("matmul_bf16_{codes}__packedahead"));
        assert!(launched.iter().any(|entry| is_ahead(&&**entry)), "{codes}: {launched:?}");
    }
    Ok(())
}
