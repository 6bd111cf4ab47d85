//! Models that the ranks of a group have together.

use std::ops::ControlFlow;

use warpforge::group::Group;
use warpforge::models::{Checkpoint, ExpertSharding, Quantise, Shard};

use super::golden::session_matches;
use super::*;

fn part<'a>(rank: impl Into<Shard<'a>>, folder: &Path, dtype: DType) -> Result<Model, warpforge::Error> {
    let mut go_on = |_| ControlFlow::Continue(());
    Model::of_rank(rank, &Checkpoint::open(folder)?, dtype, Quantise::AsStored, &mut go_on)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// What transformers computed, at every rank, with the same bits at all of them.
fn group_matches(group: &Group, case: &Case, chunk: usize, experts: ExpertSharding) -> Outcome {
    let logits = group.run(|rank| -> Result<Vec<u32>, String> {
        let of_rank = || -> Result<_, Box<dyn StdError>> {
            let model = part(Shard::from(rank).with_experts(experts), &case.folder, DType::F32)?;
            assert!(model.report().is_empty(), "{}", model.report());
            Ok(bits(&session_matches(&mut model.session(options(case, chunk))?, case)?))
        };
        of_rank().map_err(|error| error.to_string())
    });
    let logits = logits.into_iter().collect::<Result<Vec<_>, _>>()?;
    assert!(logits.iter().all(|of_rank| *of_rank == logits[0]), "{}: ranks differ", case.name);
    Ok(())
}

fn cpus(size: usize) -> Result<Group, warpforge::Error> {
    Group::new(&vec![Device::cpu(); size])
}

/// Also more ranks than there are heads, and numbers that divide nothing.
#[test]
fn golden_f32_over_cpus() -> Outcome {
    for name in GOLDEN {
        let case = Case::load(name)?;
        for (size, chunk) in [(1, 64), (2, 64), (3, 16), (4, 64), (8, 29)] {
            group_matches(&cpus(size)?, &case, chunk, ExpertSharding::Tensor)?;
        }
    }
    Ok(())
}

/// Also more ranks than there are experts.
#[test]
fn golden_f32_with_whole_experts_over_cpus() -> Outcome {
    for name in ["qwen3_moe", "qwen3_next", "glm4_moe_lite"] {
        let case = Case::load(name)?;
        for (size, chunk) in [(1, 64), (2, 64), (3, 16), (4, 29), (17, 64)] {
            group_matches(&cpus(size)?, &case, chunk, ExpertSharding::Expert)?;
        }
    }
    Ok(())
}

/// With the kernels that a rank's sizes get: a test for each model, so that they run side by side.
mod golden_f32_over_simulated_cards {
    use super::*;

    macro_rules! models {
        ($($test:ident: $name:ident over $size:literal, $experts:ident;)*) => {$(
            #[test]
            fn $test() -> Outcome {
                let card = |_| Device::simulated(Arc::new(Card::new(Arch::Sm90a)));
                let devices = (0..$size).map(card).collect::<Result<Vec<_>, _>>()?;
                group_matches(&Group::new(&devices)?, &Case::load(stringify!($name))?, 64, ExpertSharding::$experts)
            }
        )*};
    }

    models! {
        qwen3: qwen3 over 4, Tensor;
        qwen3_moe: qwen3_moe over 2, Tensor;
        qwen3_moe_whole_experts: qwen3_moe over 2, Expert;
        qwen3_next: qwen3_next over 2, Tensor;
        glm4_moe_lite: glm4_moe_lite over 3, Tensor;
        glm4_moe_lite_whole_experts: glm4_moe_lite over 3, Expert;
    }
}

/// Sums over ranks go ways that depend on their sizes.
#[test]
fn bits_that_depend_on_no_batch_are_of_one_device() -> Outcome {
    let devices = vec![Device::cpu().with_invariance(Invariance::Batch); 2];
    let messages = Group::new(&devices)?.run(|rank| -> Result<String, String> {
        let model = part(rank, &testkit::golden::folder("qwen3"), DType::F32);
        let session = model.map_err(|error| error.to_string())?.session(SessionOptions::default());
        Ok(session.err().map(|error| error.to_string()).unwrap_or_default())
    });
    for message in messages {
        let want = "Session: device: expected without Invariance::Batch for a model over several devices";
        let message = message?;
        assert!(message.starts_with(want), "{message}");
    }
    Ok(())
}

#[test]
fn golden_f32_over_cards() -> Outcome {
    let count = Device::cuda_count().unwrap_or(0);
    match count {
        0 => testkit::gpu::skip("groups were not run on cards: there is none"),
        1 => testkit::gpu::skip_optional("groups were not run on cards: there is one"),
        _ => {}
    }
    if count < 2 {
        return Ok(());
    }
    let devices = (0..count).map(Device::cuda).collect::<Result<Vec<_>, _>>()?;
    for name in GOLDEN {
        let case = Case::load(name)?;
        for size in 2..=count {
            match Group::new(&devices[..size]) {
                Ok(group) => {
                    group_matches(&group, &case, 64, ExpertSharding::Tensor)?;
                    group_matches(&group, &case, 64, ExpertSharding::Expert)?;
                }
                // Without NCCL.
                Err(error @ warpforge::Error::Unsupported { .. }) => {
                    testkit::gpu::skip_optional(&error.to_string());
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

/// Half precision: a rank's part of a sum is rounded once more, which may cost as much again.
#[test]
fn golden_bf16_over_cpus() -> Outcome {
    for name in GOLDEN {
        let case = Case::load(name)?;
        let errors = cpus(2)?.run(|rank| -> Result<(f64, f64), warpforge::Error> {
            let mut session = part(rank, &case.folder, DType::BF16)?.session(options(&case, 64))?;
            let (grids, patches) = case.images();
            let stream = session.stream().clone();
            let (mut got, mut want, mut yardstick) = (Vec::new(), Vec::new(), Vec::new());
            for (index, prompt) in case.prompts().iter().enumerate() {
                session.truncate(0, 0)?;
                let visuals = visuals((&grids, patches));
                session.prefill_visual_with(0, prompt, &visuals, &mut |_, _| Ok(()), &mut |_, rows| {
                    got.extend(rows.to_vec::<f32>(&stream)?);
                    Ok(())
                })?;
                want.extend_from_slice(case.sequence("logits", index));
                yardstick.extend_from_slice(case.sequence("logits_bf16_hf", index));
            }
            Ok((relative_l2(&got, &want), 2.0 * relative_l2(&yardstick, &want)))
        });
        for error in errors {
            let (error, allowed) = error?;
            println!("{name}: error {error:.4}, allowed {allowed:.4}");
            assert!(error <= allowed, "{name}: error {error:.4}, allowed {allowed:.4}");
        }
    }
    Ok(())
}

/// Sequences that come and go: the same tokens at every rank as on one device.
#[test]
fn batches_over_cpus() -> Outcome {
    for name in ["qwen3", "qwen3_moe", "qwen3_next", "glm4_moe_lite"] {
        let case = Case::load(name)?;
        let prompts = case.prompts();
        let alone = together(Model::load(&Device::cpu(), &case.folder, DType::F32, &mut |_| {})?, &prompts)?;
        for of_rank in cpus(2)?.run(|rank| together(part(rank, &case.folder, DType::F32)?, &prompts)) {
            assert_eq!(of_rank?, alone, "{name}");
        }
    }
    Ok(())
}

/// A rank whose files are missing does not leave the others waiting.
#[test]
fn a_rank_that_cannot_load() -> Outcome {
    let case = Case::load("qwen3")?;
    let results = cpus(3)?.run(|rank| -> Result<(), warpforge::Error> {
        let folder = if rank.rank() == 1 { case.folder.join("absent") } else { case.folder.clone() };
        let mut session = part(rank, &folder, DType::F32)?.session(options(&case, 64))?;
        session.prefill(0, &[1, 2, 3]).map(|_| ())
    });
    let messages: Vec<String> = results.into_iter().map(|result| result.unwrap_err().to_string()).collect();
    assert!(messages[1].contains("absent") && !messages[1].contains("rank"), "{messages:?}");
    for rank in [0, 2] {
        let start = format!("all_reduce: rank {rank} of 3: rank 1 has ended: ");
        assert!(messages[rank].starts_with(&start) && messages[rank].contains("absent"), "{messages:?}");
    }
    Ok(())
}
