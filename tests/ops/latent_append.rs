//! Norm, rotation and append of latent rows against their reference, and against the operators one after another.

mod case;

use abi::ops::latent_append::{LatentAppendVariant, PIECES_PER_THREAD, VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::round::round_all;
use testkit::strategies::Values;
use warpforge::ops::kv_append::{KvAppend, KvAppendArgs, KvAppendProblem};
use warpforge::ops::latent_append::{LatentAppend, LatentAppendArgs, LatentAppendProblem, reference};
use warpforge::ops::rmsnorm::{RmsNorm, RmsNormArgs, RmsNormProblem};
use warpforge::ops::rope::reference::{RopeShape, rope};
use warpforge::ops::rope::{Rope, RopeArgs, RopeInput, RopeProblem, RopeStyle, RopeTables};
use warpforge::{DType, Device, Error, Stream, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, devices_for, every_kernel, fail, heads_of, on_executors,
    one_apart, store, swapped, through_every_kernel, values,
};
use crate::places::{adds_as_rmsnorm, angles, expect_bits, inv_freq};
use case::{Case, Inputs, Layouts, Outputs, Place, case, split, work};

fn run(
    device: &Device,
    case: &Case,
    variant: Option<&'static LatentAppendVariant>,
) -> Result<(), TestCaseError> {
    let LatentAppendProblem { heads, latent, rope: head_dim, style, dtype, .. } = case.problem;
    let stream = device.stream().map_err(fail)?;
    let plan = case.plan(device, variant).map_err(fail)?;
    let inputs = Inputs::new(&stream, case)?;
    let mut outputs = Outputs::new(&stream, case, &inputs)?;
    outputs.run(&stream, &plan, case, &inputs).map_err(fail)?;

    let what = plan.report().variant;
    let [q, cache] = outputs.read(&stream, case)?;
    let [cos, sin] = angles(&stream, &inputs.tables).map_err(fail)?;
    let (positions, tables) = (&inputs.positions[..], (&cos[..], &sin[..]));
    if heads > 0 {
        let shape = RopeShape { heads, head_dim, rotary_dim: head_dim, style };
        let x = split(&inputs.q, &case.problem, case.gaps[0]).0;
        let (want, terms) = rope::<f64>(&x, positions, tables, shape, |v| v);
        let (naive, _) = rope::<f32>(&x, positions, tables, shape, store(dtype));
        check(&format!("{what}: q"), &q, &want, &naive, &Tolerance::new(dtype, Scale::Given(&terms), 3))?;
    }
    let (x, weight) = (&inputs.x, &inputs.weight);
    let (want, want_key, terms) =
        reference::latent_rows::<f64>(x, weight, positions, tables, &case.problem, |v| v);
    let (naive, naive_key, _) =
        reference::latent_rows::<f32>(x, weight, positions, tables, &case.problem, store(dtype));
    // In the cache: what was there in the slots of no token, and those of the others by what they must be.
    let (mut cached, mut normed, mut keys) = (outputs.before[1].clone(), want.clone(), want_key.clone());
    let row = latent + head_dim;
    for (token, &slot) in inputs.slots.iter().enumerate() {
        let slot = slot as usize * row..(slot as usize + 1) * row;
        if let Some(got) = cache.get(slot.clone()) {
            normed[token * latent..][..latent].copy_from_slice(&got[..latent]);
            keys[token * head_dim..][..head_dim].copy_from_slice(&got[latent..]);
            cached[slot].copy_from_slice(got);
        }
    }
    prop_assert_eq!(cache, cached, "{}: slots of no token", what);
    // As for `rmsnorm` and for `rope`.
    let tolerance = Tolerance::new(dtype, Scale::Rows(latent), latent + 8);
    check(&format!("{what}: latent"), &normed, &want, &naive, &tolerance)?;
    let tolerance = Tolerance::new(dtype, Scale::Given(&terms), 3);
    check(&format!("{what}: key"), &keys, &want_key, &naive_key, &tolerance)
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        for variant in VARIANTS.iter().filter(|variant| variant.dtype == case.problem.dtype) {
            if wanted(variant.entry) && case.plan(device, Some(variant)).is_ok() {
                run(device, case, Some(variant))?;
            }
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "latent_append",
        &[
            |case: &mut Case| case.tokens = 0,
            |case: &mut Case| case.num_slots = 0,
            |case: &mut Case| case.problem.heads = 0,
        ],
        case(),
        |case| 2 * case.work(),
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("latent_append", case(), |case| 2 * case.work(), run_variants)
}

/// What the operators leave in q and the cache, one after another.
fn one_after_another(stream: &Stream, case: &Case, inputs: &Inputs) -> Result<[Vec<f64>; 2], TestCaseError> {
    let Case { problem, tokens, num_slots, .. } = *case;
    let LatentAppendProblem { heads, latent, rope, style, dtype, eps, weight, .. } = problem;
    let device = stream.device();
    let row = latent + rope;
    let plain = Layout::default();
    let data = |values: &[f64], cols| Rows::input(stream, dtype, values, cols, plain).map_err(fail);
    let x = data(&inputs.x, row)?;
    let gain = data(&inputs.weight, latent)?;
    let q = data(&split(&inputs.q, &problem, case.gaps[0]).0, heads.max(1) * rope)?;
    let before = values(Values::Normal, dtype, num_slots * row, case.seed ^ 5);
    let (mut rows, mut cache) = (data(&inputs.x, row)?, data(&before, row)?);
    let mut q_out = Rows::output(stream, dtype, tokens * heads, rope, plain).map_err(fail)?;
    let mut run = || -> Result<(), Error> {
        let norm = RmsNorm::plan(device, RmsNormProblem { rows: tokens, cols: latent, dtype, eps, weight })?;
        let (from, to) = (x.view().slice(1, 0..latent)?, rows.view_mut().slice(1, 0..latent)?);
        norm.run(stream, RmsNormArgs::new(from, gain.view().reshape(&[latent])?, to))?;
        let (positions, tables) = (inputs.positions()?, &inputs.tables);
        let rotate = |heads| {
            let (head_dim, rotary_dim) = (rope, rope);
            Rope::plan(device, RopeProblem { tokens, heads, head_dim, rotary_dim, style, dtype })
        };
        let key = x.view().slice(1, latent..row)?.reshape(&[tokens, 1, rope])?;
        let out = rows.view_mut().slice(1, latent..row)?.reshape(&[tokens, 1, rope])?;
        rotate(1)?.run(stream, RopeArgs { x: RopeInput::From(key), positions, tables, out })?;
        if heads > 0 {
            let shape = [tokens, heads, rope];
            let (x, out) = (RopeInput::From(q.view().reshape(&shape)?), q_out.view_mut().reshape(&shape)?);
            rotate(heads)?.run(stream, RopeArgs { x, positions, tables, out })?;
        }
        let append = KvAppend::plan(device, KvAppendProblem::new(tokens, 1, row, dtype))?;
        let args = KvAppendArgs::new(
            rows.view().reshape(&[tokens, 1, row])?,
            inputs.slot_tensor.view(),
            cache.view_mut().reshape(&[num_slots, 1, row])?,
        );
        append.run(stream, args)
    };
    run().map_err(fail)?;
    Ok([q_out.read(stream)?, cache.read(stream)?])
}

/// Whether the squares of an aligned row are added in the order in which `rmsnorm` does it.
fn adds_alike(problem: &LatentAppendProblem) -> bool {
    adds_as_rmsnorm(problem.dtype, problem.style, (problem.latent, 512), problem.rope)
}

/// The columns of rows.
fn columns(rows: &[f64], row: usize, range: std::ops::Range<usize>) -> Vec<f64> {
    rows.chunks(row).flat_map(|row| &row[range.clone()]).copied().collect()
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(256))]

    /// What `plan` chooses, on every device.
    #[test]
    fn planned((case, on) in on_executors(case, Case::work)) {
        for device in &on.devices() {
            run(device, &case, None)?;
        }
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_variant((case, on) in on_executors(case, |case| 2 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// The bits are those of the operators, however many heads a thread takes: always of what is rotated, and of the
    /// norm where all is aligned.
    #[test]
    fn as_the_operators(((case, is_aligned), on) in on_executors(
        || (case(), any::<bool>()),
        |(case, _)| 2 * case.work(),
    )) {
        let case = if is_aligned {
            Case { gaps: [0; 2], layouts: Layouts::default(), ..case }
        } else {
            case
        };
        let LatentAppendProblem { latent, rope, .. } = case.problem;
        let row = latent + rope;
        for device in &on.devices() {
            let stream = device.stream().map_err(fail)?;
            let inputs = Inputs::new(&stream, &case)?;
            let [q, cache] = one_after_another(&stream, &case, &inputs)?;
            let fits = VARIANTS.iter().find(|variant| case.plan(device, Some(variant)).is_ok());
            let plan = case.plan(device, fits).map_err(fail)?;
            let mut outputs = Outputs::new(&stream, &case, &inputs)?;
            outputs.run(&stream, &plan, &case, &inputs).map_err(fail)?;
            let [got_q, got_cache] = outputs.read(&stream, &case)?;
            expect_bits("q", &got_q, &q)?;
            expect_bits("key", &columns(&got_cache, row, latent..row), &columns(&cache, row, latent..row))?;
            if device.limits().is_none() || (is_aligned && adds_alike(&case.problem)) {
                expect_bits("latent", &columns(&got_cache, row, 0..latent), &columns(&cache, row, 0..latent))?;
            }
        }
    }
}

/// GLM-4.7-Flash's, and DeepSeek's.
fn published(tokens: usize, heads: usize, dtype: DType) -> Case {
    let problem = LatentAppendProblem {
        style: RopeStyle::Interleaved,
        ..LatentAppendProblem::new(tokens, heads, [512, 64], dtype, 1e-5)
    };
    Case {
        problem,
        tokens,
        num_slots: tokens + 2,
        gaps: [192, 512],
        layouts: Layouts::default(),
        position_stride: 1,
        place: Place::Apart,
        heads_per_thread: PIECES_PER_THREAD,
        kind: Values::Normal,
        seed: 3,
    }
}

/// Decode steps of published sizes, by the kernel for pieces, whose bits are those of the operators.
#[test]
fn published_sizes() -> Result<(), TestCaseError> {
    for (tokens, heads, dtype) in
        [(1, 20, DType::BF16), (8, 20, DType::BF16), (1, 128, DType::F16), (2, 20, DType::F32)]
    {
        let case = published(tokens, heads, dtype);
        for device in &devices_for(case.work()) {
            let stream = device.stream()?;
            let plan = case.plan(device, None)?;
            if device.limits().is_some() {
                prop_assert!(plan.report().variant.contains("__warps"), "{}", plan.report().variant);
            }
            let inputs = Inputs::new(&stream, &case)?;
            let mut outputs = Outputs::new(&stream, &case, &inputs)?;
            outputs.run(&stream, &plan, &case, &inputs)?;
            let (got, want) = (outputs.read(&stream, &case)?, one_after_another(&stream, &case, &inputs)?);
            for (got, want) in std::iter::zip(got, want) {
                expect_bits("published", &got, &want)?;
            }
        }
    }
    Ok(())
}

/// One tensor's own stride; and one that cannot be read in pieces of 16 bytes is enough for the kernel that reads none.
#[test]
fn one_tensor_apart() -> Result<(), TestCaseError> {
    for (index, [q, x, weight, q_out, cache]) in one_apart().enumerate() {
        let problem = LatentAppendProblem {
            style: RopeStyle::ALL[index % 2],
            ..LatentAppendProblem::new(3, 2, [64, 16], DType::BF16, 1e-6)
        };
        let layouts = Layouts { q, x, weight, q_out, cache };
        let case = Case { problem, layouts, gaps: [0; 2], ..published(3, 2, DType::BF16) };
        for device in &devices() {
            run(device, &case, None)?;
        }
    }
    Ok(())
}

/// Rows whose squares overflow or underflow in f32, among ordinary ones, which keep their bits.
#[test]
fn squares_beyond_f32() -> Result<(), TestCaseError> {
    let rope = 16;
    for (dtype, latent) in
        [DType::F32, DType::BF16].into_iter().flat_map(|dtype| [37, 64, 512].map(|latent| (dtype, latent)))
    {
        // The row of each size, and epsilon.
        for (size, eps) in [(1e20, 1e-6), (1.1e38, 0.1), (1e-22, 1e-44), (1e-30, 0.0), (1e-40, 0.0)] {
            let (row, problem) =
                (latent + rope, LatentAppendProblem::new(3, 0, [latent, rope], dtype, eps as f32));
            let pattern = [1.0, -1.0, 2.0, 3.0];
            let huge: Vec<f64> = (0..row).map(|col| pattern[col % 4] * size).collect();
            let huge = round_all(dtype, &huge);
            let usual = values(Values::Normal, dtype, row, 1);
            let squares = huge[..latent].iter().map(|value| value * value / latent as f64);
            let mean = squares.sum::<f64>() + f64::from(problem.eps);
            let case =
                |tokens| Case { problem, tokens, num_slots: 3, gaps: [0; 2], ..published(tokens, 0, dtype) };
            for device in &devices_for(work(3, &problem)) {
                let stream = device.stream()?;
                let run = |rows: &[&[f64]], variant| -> Result<Vec<f64>, TestCaseError> {
                    let case = case(rows.len());
                    let mut inputs = Inputs::new(&stream, &case)?;
                    inputs.x = rows.concat();
                    inputs.x_rows = Rows::input(&stream, dtype, &inputs.x, row, Layout::default())?;
                    inputs.weight = vec![1.0; latent];
                    inputs.weight_row =
                        Rows::input(&stream, dtype, &inputs.weight, latent, Layout::default())?;
                    inputs.slots = (0..rows.len() as u32).collect();
                    inputs.slot_tensor = Tensor::from_slice(&stream, &[rows.len()], &inputs.slots)?;
                    let mut outputs = Outputs::new(&stream, &case, &inputs)?;
                    outputs.run(&stream, &case.plan(device, variant)?, &case, &inputs)?;
                    let [_, cache] = outputs.read(&stream, &case)?;
                    let [_, want] = one_after_another(&stream, &case, &inputs)?;
                    let of_rmsnorm = device.limits().is_none() || (variant.is_none() && adds_alike(&problem));
                    if of_rmsnorm {
                        expect_bits(
                            "as rmsnorm",
                            &columns(&cache, row, 0..latent),
                            &columns(&want, row, 0..latent),
                        )?;
                    }
                    Ok(columns(&cache, row, 0..latent))
                };
                let fits = |variant: &&'static LatentAppendVariant| {
                    variant.dtype == dtype && case(3).plan(device, Some(variant)).is_ok()
                };
                for variant in std::iter::once(None).chain(VARIANTS.iter().filter(fits).map(Some)) {
                    let got = run(&[&usual, &huge, &usual], variant)?;
                    let what = format!("{variant:?} {dtype} {latent} {size:e} {eps:e} {device:?}");
                    let alone = run(&[&usual], variant)?;
                    prop_assert_eq!(&got[..latent], &alone[..latent], "{}", what);
                    prop_assert_eq!(&got[2 * latent..], &alone[..latent], "{}", what);
                    for (got, value) in got[latent..2 * latent].iter().zip(&huge) {
                        let want = value / mean.sqrt();
                        // Of a sum one after the other, as on the CPU.
                        let of_sum = latent as f64 * 2f64.powi(-24);
                        let bound = if dtype == DType::F32 { 2e-6 + of_sum } else { 4e-3 + of_sum };
                        prop_assert!((got - want).abs() <= bound * want.abs(), "{}: {} {}", what, got, want);
                    }
                }
            }
        }
    }
    Ok(())
}

/// q and q_out head by head in memory: the bits are those of contiguous tensors.
#[test]
fn strides_of_heads() -> Result<(), TestCaseError> {
    let (tokens, heads, latent, rope) = (5, 3, 64, 32);
    let shape = [tokens, heads, rope];
    for (dtype, style) in
        DType::FLOATS.into_iter().flat_map(|dtype| RopeStyle::ALL.map(|style| (dtype, style)))
    {
        let problem = LatentAppendProblem {
            style,
            ..LatentAppendProblem::new(tokens, heads, [latent, rope], dtype, 1e-6)
        };
        let case = Case { problem, ..published(tokens, heads, dtype) };
        let q = values(Values::Normal, dtype, tokens * heads * rope, 7);
        for device in &devices() {
            let stream = device.stream()?;
            let inputs = Inputs::new(&stream, &case)?;
            let plan = case.plan(device, None)?;
            let run = |apart: bool| -> Result<[Vec<f64>; 2], TestCaseError> {
                // With a gap of each tensor's own.
                let gap = |pieces: usize| Layout { padding: if apart { 8 * pieces } else { 0 }, offset: 0 };
                let data = if apart { swapped(&q, shape) } else { q.clone() };
                let q = Rows::input(&stream, dtype, &data, rope, gap(1))?;
                let mut q_out = Rows::output(&stream, dtype, tokens * heads, rope, gap(2))?;
                let before = vec![1.0; case.num_slots * (latent + rope)];
                let mut cache = Rows::input(&stream, dtype, &before, latent + rope, gap(3))?;
                let out = if apart {
                    q_out.view_mut().reshape(&[heads, tokens, rope])?.swap_axes(0, 1)?
                } else {
                    q_out.view_mut().reshape(&shape)?
                };
                let args = LatentAppendArgs::new(
                    RopeInput::From(heads_of(q.view(), shape, apart)?),
                    [inputs.x_rows.view(), inputs.weight()?],
                    inputs.positions()?,
                    &inputs.tables,
                    inputs.slot_tensor.view(),
                    out,
                    cache.view_mut(),
                );
                plan.run(&stream, args)?;
                let q = q_out.read(&stream)?;
                let q = if apart { swapped(&q, [heads, tokens, rope]) } else { q };
                Ok([q, cache.read(&stream)?])
            };
            assert_eq!(run(true)?, run(false)?, "{dtype} {style:?} {device:?}");
        }
    }
    Ok(())
}

#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = LatentAppendProblem::new(4, 3, [64, 32], DType::F32, 1e-6);
        let plan = LatentAppend::plan(device, problem)?;
        let zeros = |shape: &[usize]| Tensor::zeros(&stream, shape, DType::F32);
        let (q, x, weight) = (zeros(&[4, 3, 32])?, zeros(&[4, 96])?, zeros(&[64])?);
        let tables = RopeTables::new(&stream, &inv_freq(32), 1.0, 8)?;
        let numbers = Tensor::zeros(&stream, &[4], DType::U32)?;
        let (mut q_out, mut cache) = (zeros(&[4, 3, 32])?, zeros(&[9, 96])?);
        let mut message = |change: &dyn Fn(LatentAppendArgs<'_>) -> Result<(), Error>| -> String {
            let args = LatentAppendArgs::new(
                RopeInput::From(q.view()),
                [x.view(), weight.view()],
                numbers.view(),
                &tables,
                numbers.view(),
                q_out.view_mut(),
                cache.view_mut(),
            );
            change(args).unwrap_err().to_string()
        };
        let run = |args: LatentAppendArgs<'_>| plan.run(&stream, args);
        let (short, floats) = (zeros(&[3, 3, 32])?, zeros(&[4])?);
        assert_eq!(
            message(&|args| run(LatentAppendArgs { q: RopeInput::From(short.view()), ..args })),
            "latent_append: q: expected shape [4, 3, 32], got [3, 3, 32]"
        );
        assert_eq!(
            message(&|args| run(LatentAppendArgs { x: weight.view(), ..args })),
            "latent_append: x: expected shape [any, 96], got [64]"
        );
        let narrow = zeros(&[32])?;
        assert_eq!(
            message(&|args| run(LatentAppendArgs { weight: narrow.view(), ..args })),
            "latent_append: weight: expected shape [64], got [32]"
        );
        assert_eq!(
            message(&|args| run(LatentAppendArgs { slots: floats.view(), ..args })),
            "latent_append: slots: expected u32, got f32"
        );
        let others = RopeTables::new(&stream, &inv_freq(64), 1.0, 8)?;
        assert_eq!(
            message(&|args| run(LatentAppendArgs { tables: &others, ..args })),
            "latent_append: tables: expected shape [any, 16], got [8, 32]"
        );
        assert_eq!(
            message(&|args| {
                let mut halves = zeros(&[9, 64])?;
                run(LatentAppendArgs { cache: halves.view_mut(), ..args })
            }),
            "latent_append: cache: expected shape [any, 96], got [9, 64]"
        );
        let smaller = LatentAppend::plan(device, LatentAppendProblem { tokens: 3, ..problem })?;
        assert_eq!(
            message(&|args| smaller.run(&stream, args)),
            "latent_append: x: expected at most 3 tokens, as planned, got 4"
        );
        let error =
            |problem: LatentAppendProblem| LatentAppend::supports(device, &problem).unwrap_err().to_string();
        assert_eq!(
            error(LatentAppendProblem { latent: 0, ..problem }),
            "latent_append: problem: expected latent at least 1, got 0"
        );
        for rope in [0, 33] {
            assert_eq!(
                error(LatentAppendProblem { rope, ..problem }),
                format!("latent_append: problem: expected an even rope, at least 2, got {rope}")
            );
        }
        assert_eq!(
            error(LatentAppendProblem { dtype: DType::I32, ..problem }),
            "latent_append: problem: expected dtype f32, f16 or bf16, got i32"
        );
        assert_eq!(
            error(LatentAppendProblem { eps: -1.0, ..problem }),
            "latent_append: problem: expected a finite eps of at least 0, got -1"
        );
    }
    Ok(())
}
