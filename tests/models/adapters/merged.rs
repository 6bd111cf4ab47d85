//! Adapters that are added to the weights as they are loaded.

use super::*;

/// An adapter that is added to the weights as they are loaded, also those of delta nets and latent attention.
#[test]
fn merged_while_loading() -> Outcome {
    for (name, ends) in [
        ("qwen3", &[&ATTENTION[..], &MLP].concat()[..]),
        ("qwen3_next", &["q_proj", "linear_attn.in_proj_qkvz", "linear_attn.out_proj"]),
        ("glm4_moe_lite", &["q_a_proj", "kv_b_proj", "shared_experts.down_proj"]),
    ] {
        let base = Base::open(name)?;
        let made = base.adapter(5, (4, 6.0, false), ends)?;
        let open = || -> Result<Checkpoint, Box<dyn StdError>> {
            let checkpoint = Checkpoint::open(&golden::folder(name))?;
            Ok(checkpoint.with_adapter(Adapter::open(made.folder.path())?)?)
        };
        for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 1e-2)] {
            let model = Model::from_checkpoint(&Device::cpu(), &open()?, dtype, &mut |_| {})?;
            let (got, want) =
                (alone(&model, PROMPTS[0])?, alone(&base.merged(&made, &Device::cpu(), dtype)?, PROMPTS[0])?);
            let plain =
                alone(&Model::load(&Device::cpu(), &golden::folder(name), dtype, &mut |_| {})?, PROMPTS[0])?;
            for ((got, want), plain) in got.iter().zip(&want).zip(&plain) {
                let (error, apart) = (relative_l2(got, want), relative_l2(plain, want));
                assert!(error <= bound && apart >= 0.01, "{name} {dtype}: {error:.2e}, apart {apart:.2e}");
            }
        }
    }
    Ok(())
}

/// Ranks read their parts of the sums: rows and columns, as of the weights alone.
#[test]
fn merged_at_ranks() -> Outcome {
    let base = Base::open("qwen3")?;
    let made = base.adapter(5, (4, 6.0, false), &[&ATTENTION[..], &MLP].concat())?;
    let open = || Checkpoint::open(&golden::folder("qwen3"));
    let checkpoint = open()?.with_adapter(Adapter::open(made.folder.path())?)?;
    let want = alone(&base.merged(&made, &Device::cpu(), DType::F32)?, PROMPTS[0])?;
    let got = Group::new(&vec![Device::cpu(); 3])?.run(|rank| {
        let mut go_on = |_| ControlFlow::Continue(());
        let model = Model::of_rank(rank, &checkpoint, DType::F32, Quantise::AsStored, &mut go_on);
        model.and_then(|model| alone(&model, PROMPTS[0])).map_err(|error| error.to_string())
    });
    for of_rank in got {
        for (got, want) in std::iter::zip(of_rank?, &want) {
            let error = relative_l2(&got, want);
            assert!(error <= 1e-5, "{error:.2e}");
        }
    }
    Ok(())
}

/// What cannot be merged is said by name.
#[test]
fn what_cannot_be_merged() -> Outcome {
    let base = Base::open("qwen3")?;
    let made = base.adapter(5, (4, 6.0, false), &["layers.0.self_attn.q_proj"])?;
    let adapter = || Adapter::open(made.folder.path());
    let other = Checkpoint::open(&golden::folder("glm4_moe_lite"))?;
    let error = other.with_adapter(adapter()?).unwrap_err().to_string();
    assert!(error.contains("self_attn.q_proj.lora_A.weight: expected lora_A or lora_B"), "{error}");
    let other = Checkpoint::open(&golden::folder("qwen3_sliding"))?.with_adapter(adapter()?)?;
    let error =
        Model::from_checkpoint(&Device::cpu(), &other, DType::F32, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("q_proj.weight: expected an adapter's matrices that fit"), "{error}");
    let (place, merged) = (tempfile::tempdir()?, Checkpoint::open(&base.folder)?.with_adapter(adapter()?)?);
    let mut go_on = |_| ControlFlow::Continue(());
    let error = merged.save_quantised(&Scheme::INT8, &place.path().join("saved"), &mut go_on);
    let error = error.map(|_| ()).unwrap_err().to_string();
    assert!(error.starts_with("save_quantised: self: expected a checkpoint without an adapter"), "{error}");
    assert_eq!(fs::read_dir(place.path())?.count(), 0);
    let quantised = testkit::gpu::workspace_root().join("tests/golden-quant");
    let mut tried = 0;
    for folder in fs::read_dir(quantised)? {
        let Ok(checkpoint) = Checkpoint::open(&folder?.path()) else { continue };
        let Ok(checkpoint) = checkpoint.with_adapter(adapter()?) else { continue };
        let error = Model::from_checkpoint(&Device::cpu(), &checkpoint, DType::F32, &mut |_| {});
        let error = error.map(|_| ()).unwrap_err().to_string();
        tried += usize::from(error.contains("expected a weight in floats, to add an adapter to"));
    }
    assert!(tried > 0);
    Ok(())
}
