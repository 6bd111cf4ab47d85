//! Norm, rotation and append of q, k and v against their reference, and against the three operators.

mod case;

use abi::ops::qk_norm_rope::{QkNormRopeVariant, VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::round::{max_finite, round_to};
use testkit::strategies::Values;
use warpforge::ops::kv_append::{self, KvAppend, KvAppendArgs, KvAppendProblem};
use warpforge::ops::qk_norm_rope::{
    QkNorm, QkNormRope, QkNormRopeArgs, QkNormRopeProblem, QkNormWeights, reference,
};
use warpforge::ops::rmsnorm::{NormWeight, RmsNorm, RmsNormArgs, RmsNormProblem};
use warpforge::ops::rope::{Rope, RopeArgs, RopeInput, RopeProblem, RopeStyle, RopeTables};
use warpforge::{DType, Device, Error, F8E4M3, Stream, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, every_kernel, fail, heads_of, on_executors, store, swapped,
    through_every_kernel, values,
};
use crate::places::{MAX_POSITION, adds_as_rmsnorm, angles, expect_bits, inv_freq};
use case::{Case, Inputs, Outputs, Place, case, split};

fn run(
    device: &Device,
    case: &Case,
    variant: Option<&'static QkNormRopeVariant>,
) -> Result<(), TestCaseError> {
    let QkNormRopeProblem { heads_q, heads_kv, head_dim, dtype, cache_dtype, norm, .. } = case.problem;
    let stream = device.stream().map_err(fail)?;
    let plan = case.plan(device, variant).map_err(fail)?;
    let inputs = Inputs::new(&stream, case)?;
    let mut outputs = Outputs::new(&stream, case, &inputs)?;
    outputs.run(&stream, &plan, case, &inputs).map_err(fail)?;

    let what = plan.report().variant;
    let [q, k_cache, v_cache] = outputs.read(&stream, case)?;
    let [cos, sin] = angles(&stream, &inputs.tables).map_err(fail)?;
    let width = heads_kv * head_dim;
    for (part, heads, got) in [(0, heads_q, &q), (1, heads_kv, &k_cache)] {
        let (x, shape) = (inputs.numbers(case, part), case.shape(heads));
        let norm = norm.map(|norm| (norm, &inputs.weights[part][..]));
        let (positions, tables) = (&inputs.positions[..], (&cos[..], &sin[..]));
        let (want, terms) = reference::qk_norm_rope::<f64>(&x, norm, positions, tables, shape, |v| v);
        let (naive, _) = reference::qk_norm_rope::<f32>(&x, norm, positions, tables, shape, store(dtype));
        let tolerance = Tolerance::new(dtype, Scale::Given(&terms), head_dim + 12);
        if part == 0 {
            check(&format!("{what}: q"), got, &want, &naive, &tolerance)?;
            continue;
        }
        let scaled = |values: &[f64]| -> Vec<f64> {
            let scale = |i: usize| f64::from(inputs.scales[0][i / head_dim % heads_kv]);
            values.iter().enumerate().map(|(i, value)| value / scale(i)).collect()
        };
        let (mut want, mut naive, terms) = (scaled(&want), scaled(&naive), scaled(&terms));
        if cache_dtype == DType::F8E4M3 {
            let most = max_finite(cache_dtype);
            want.iter_mut().for_each(|value| *value = value.clamp(-most, most));
            naive.iter_mut().for_each(|value| *value = round_to(cache_dtype, *value));
        }
        let tolerance = Tolerance {
            dtype: cache_dtype,
            ..Tolerance::new(cache_dtype, Scale::Given(&terms), tolerance.roundings)
        };
        // In the cache: what was there in the slots of no token, and those of the others by what they must be.
        let mut cached = split(&outputs.before[1], head_dim, case.gaps[1]).0;
        let mut of_tokens = vec![0.0; want.len()];
        for (token, &slot) in inputs.slots.iter().enumerate() {
            let row = token * width..(token + 1) * width;
            let slot = slot as usize * width..(slot as usize + 1) * width;
            match got.get(slot.clone()) {
                None => of_tokens[row.clone()].copy_from_slice(&want[row]),
                Some(got) => {
                    of_tokens[row].copy_from_slice(got);
                    cached[slot].copy_from_slice(got);
                }
            }
        }
        prop_assert_eq!(got, &cached, "{}: slots of no token", what);
        check(&format!("{what}: k"), &of_tokens, &want, &naive, &tolerance)?;
    }
    let mut want = split(&outputs.before[2], head_dim, case.gaps[1]).0;
    let mut v = inputs.numbers(case, 2);
    if cache_dtype == DType::F8E4M3 {
        for (i, value) in v.iter_mut().enumerate() {
            let inverse = 1.0 / inputs.scales[1][i / head_dim % heads_kv];
            *value = F8E4M3::from_f32(*value as f32 * inverse).to_f32().into();
        }
    }
    kv_append::reference::kv_append(&v, &inputs.slots, &mut want, width);
    prop_assert_eq!(v_cache, want, "{}: v", what);
    Ok(())
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
        "qk_norm_rope",
        &[|case: &mut Case| case.problem.tokens = 0, |case: &mut Case| case.num_slots = 0],
        case(),
        |case| 3 * case.work(),
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("qk_norm_rope", case(), |case| 3 * case.work(), run_variants)
}

/// What the three operators leave in q and the caches, one after another.
fn one_after_another(
    stream: &Stream,
    case: &Case,
    inputs: &Inputs,
    outputs: &mut Outputs,
) -> Result<(), Error> {
    let QkNormRopeProblem { tokens, heads_q, heads_kv, head_dim, rotary_dim, style, dtype, norm, .. } =
        case.problem;
    let device = stream.device();
    let turn = |part: usize, heads: usize| -> Result<Tensor, Error> {
        let mut out = Tensor::empty(stream, &[tokens, heads, head_dim], dtype)?;
        let mut x = RopeInput::From(inputs.part(case, part)?);
        if let Some(QkNorm { eps, weight }) = norm {
            let problem = RmsNormProblem { rows: tokens * heads, cols: head_dim, dtype, eps, weight };
            let (x, weight) = (inputs.part(case, part)?, inputs.weight(part)?);
            let args = RmsNormArgs { x, residual: None, weight, gate: None, out: out.view_mut() };
            RmsNorm::plan(device, problem)?.run(stream, args)?;
        }
        if norm.is_some() {
            x = RopeInput::InPlace;
        }
        let (positions, tables) = (inputs.position_tensor.view(), &inputs.tables);
        let problem = RopeProblem { tokens, heads, head_dim, rotary_dim, style, dtype };
        Rope::plan(device, problem)?.run(stream, RopeArgs { x, positions, tables, out: out.view_mut() })?;
        Ok(out)
    };
    stream.copy(turn(0, heads_q)?.view(), outputs.q.view_mut().reshape(&[tokens, heads_q, head_dim])?)?;
    let (k, shape) = (turn(1, heads_kv)?, [case.num_slots, heads_kv, head_dim]);
    let args = KvAppendArgs {
        k: k.view(),
        v: Some(inputs.part(case, 2)?),
        slots: inputs.slot_tensor.view(),
        k_cache: outputs.k_cache.view_mut().reshape(&shape)?,
        v_cache: Some(outputs.v_cache.view_mut().reshape(&shape)?),
    };
    KvAppend::plan(device, KvAppendProblem { tokens, heads: heads_kv, head_dim, dtype })?.run(stream, args)
}

/// Whether the squares of a head are added in the order in which `rmsnorm` does it.
fn adds_alike(problem: &QkNormRopeProblem) -> bool {
    let most = 32 * (16 / problem.dtype.bytes());
    adds_as_rmsnorm(problem.dtype, problem.style, (problem.head_dim, most), problem.rotary_dim)
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
    fn every_variant((case, on) in on_executors(case, |case| 3 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// The bits are those of the three operators, however many heads a group takes.
    #[test]
    fn as_three_operators((case, on) in on_executors(
        || case().prop_filter("another order", |case| case.problem.norm.is_none() || adds_alike(&case.problem)),
        |case| 2 * case.work(),
    )) {
        for device in &on.devices() {
            expect_three_operators(device, &case)?;
        }
    }
}

/// That the bits are those of the three operators, of tensors that they take in pieces.
fn expect_three_operators(device: &Device, case: &Case) -> Result<(), TestCaseError> {
    let aligned = Layout::default();
    let problem = QkNormRopeProblem { cache_dtype: case.problem.dtype, ..case.problem };
    let (place, weight_offset) = (Place::Apart, 0);
    let case =
        Case { problem, gaps: [0; 2], from: aligned, to: aligned, weight_offset, place, ..case.clone() };
    let stream = device.stream().map_err(fail)?;
    let inputs = Inputs::new(&stream, &case)?;
    let mut want = Outputs::new(&stream, &case, &inputs)?;
    one_after_another(&stream, &case, &inputs, &mut want).map_err(fail)?;
    let mut got = Outputs::new(&stream, &case, &inputs)?;
    let fits = VARIANTS.iter().find(|variant| case.plan(device, Some(variant)).is_ok());
    let plan = case.plan(device, fits).map_err(fail)?;
    got.run(&stream, &plan, &case, &inputs).map_err(fail)?;
    let (got, want) = (got.read(&stream, &case)?, want.read(&stream, &case)?);
    for (part, (got, want)) in std::iter::zip(got, want).enumerate() {
        expect_bits(["q", "k", "v"][part], &got, &want)?;
    }
    Ok(())
}

/// Heads with elements so large that their squares do not fit f32, and others that are next to nothing beside them.
#[test]
fn huge_and_tiny_elements_as_three_operators() -> Result<(), TestCaseError> {
    let norm = Some(QkNorm { eps: 1e-6, weight: NormWeight::Plain });
    let problem = QkNormRopeProblem {
        tokens: 6,
        heads_q: 3,
        heads_kv: 2,
        head_dim: 48,
        rotary_dim: 32,
        style: RopeStyle::HalfSplit,
        dtype: DType::BF16,
        cache_dtype: DType::BF16,
        norm,
    };
    // The first was found by a run on a card.
    for seed in (0..6).map(|i| 17584009981058321647u64.wrapping_add(i)) {
        let layout = Layout::default();
        let case = Case {
            problem,
            num_slots: 9,
            gaps: [0; 2],
            from: layout,
            to: layout,
            weight_offset: 0,
            place: Place::Apart,
            heads_per_group: 1,
            kind: Values::Mixed,
            seed,
        };
        for device in &devices() {
            expect_three_operators(device, &case)?;
        }
    }
    Ok(())
}

/// q, k, v and q_out with strides of their own, and every second of some positions: the bits are those of contiguous
/// tensors.
#[test]
fn strides_of_their_own() -> Result<(), TestCaseError> {
    let (tokens, heads_q, heads_kv, head_dim, num_slots) = (5, 3, 2, 64, 9);
    let (positions, slots) = ([7u32, 3, 90, 0, 41], [4u32, 8, 0, 9, 2]);
    let norm = Some(QkNorm { eps: 1e-6, weight: NormWeight::Plain });
    for (dtype, style) in
        DType::FLOATS.into_iter().flat_map(|dtype| RopeStyle::ALL.map(|style| (dtype, style)))
    {
        let rotary_dim = 32;
        let problem = QkNormRopeProblem {
            tokens,
            heads_q,
            heads_kv,
            head_dim,
            rotary_dim,
            style,
            dtype,
            cache_dtype: dtype,
            norm,
        };
        let shapes = [heads_q, heads_kv, heads_kv].map(|heads| [tokens, heads, head_dim]);
        let data: Vec<Vec<f64>> = std::iter::zip(shapes, 1u64..)
            .map(|(shape, seed)| values(Values::Normal, dtype, shape.iter().product(), seed))
            .collect();
        let weight = values(Values::Normal, dtype, head_dim, 5);
        for device in &devices() {
            let stream = device.stream()?;
            let plan = QkNormRope::plan(device, problem)?;
            let tables = RopeTables::new(&stream, &inv_freq(rotary_dim), 1.0, MAX_POSITION)?;
            let weight_row = Rows::input(&stream, dtype, &weight, head_dim, Layout::default())?;
            let weight_view = weight_row.view().reshape(&[head_dim])?;
            let slots = Tensor::from_slice(&stream, &[tokens], &slots)?;
            // Of each position only the first of two numbers counts.
            let spread: Vec<u32> = positions.iter().flat_map(|&position| [position, 11]).collect();
            let close = Tensor::from_slice(&stream, &[tokens], &positions)?;
            let spread = Tensor::from_slice(&stream, &[tokens, 2], &spread)?;
            let run = |apart: bool| -> Result<[Vec<f64>; 3], TestCaseError> {
                // Head by head in memory, with a gap of each tensor's own.
                let gap = |pieces: usize| Layout { padding: if apart { 8 * pieces } else { 0 }, offset: 0 };
                let input = |i: usize| {
                    let values = if apart { swapped(&data[i], shapes[i]) } else { data[i].clone() };
                    Rows::input(&stream, dtype, &values, head_dim, gap(i))
                };
                let [q, k, v] = [input(0)?, input(1)?, input(2)?];
                let mut q_out = Rows::output(&stream, dtype, tokens * heads_q, head_dim, gap(3))?;
                let q_out_view = if apart {
                    q_out.view_mut().reshape(&[heads_q, tokens, head_dim])?.swap_axes(0, 1)?
                } else {
                    q_out.view_mut().reshape(&shapes[0])?
                };
                let before = vec![1.0; num_slots * heads_kv * head_dim];
                let cache = || Rows::input(&stream, dtype, &before, head_dim, gap(4));
                let (mut k_cache, mut v_cache) = (cache()?, cache()?);
                let cache_shape = [num_slots, heads_kv, head_dim];
                let args = QkNormRopeArgs {
                    q: RopeInput::From(heads_of(q.view(), shapes[0], apart)?),
                    k: heads_of(k.view(), shapes[1], apart)?,
                    v: heads_of(v.view(), shapes[2], apart)?,
                    weights: Some(QkNormWeights { q: weight_view, k: weight_view }),
                    positions: if apart {
                        spread.view().slice(1, 0..1)?.reshape(&[tokens])?
                    } else {
                        close.view()
                    },
                    tables: &tables,
                    slots: slots.view(),
                    q_out: q_out_view,
                    k_cache: k_cache.view_mut().reshape(&cache_shape)?,
                    v_cache: v_cache.view_mut().reshape(&cache_shape)?,
                    k_scale: None,
                    v_scale: None,
                };
                plan.run(&stream, args)?;
                let q = q_out.read(&stream)?;
                let q = if apart { swapped(&q, [heads_q, tokens, head_dim]) } else { q };
                Ok([q, k_cache.read(&stream)?, v_cache.read(&stream)?])
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
        let problem = QkNormRopeProblem {
            tokens: 4,
            heads_q: 4,
            heads_kv: 2,
            head_dim: 64,
            rotary_dim: 32,
            style: RopeStyle::HalfSplit,
            dtype: DType::F32,
            cache_dtype: DType::F32,
            norm: Some(QkNorm { eps: 1e-6, weight: NormWeight::Plain }),
        };
        let plan = QkNormRope::plan(device, problem)?;
        let zeros = |shape: &[usize]| Tensor::zeros(&stream, shape, DType::F32);
        let (q, kv, weight) = (zeros(&[4, 4, 64])?, zeros(&[4, 2, 64])?, zeros(&[64])?);
        let tables = RopeTables::new(&stream, &inv_freq(32), 1.0, 8)?;
        let numbers = Tensor::zeros(&stream, &[4], DType::U32)?;
        let (mut q_out, mut k_cache, mut v_cache) =
            (zeros(&[4, 4, 64])?, zeros(&[9, 2, 64])?, zeros(&[9, 2, 64])?);
        let mut message = |change: &dyn Fn(QkNormRopeArgs<'_>) -> Result<(), Error>| -> String {
            let weights = Some(QkNormWeights { q: weight.view(), k: weight.view() });
            let args = QkNormRopeArgs {
                q: RopeInput::From(q.view()),
                k: kv.view(),
                v: kv.view(),
                weights,
                positions: numbers.view(),
                tables: &tables,
                slots: numbers.view(),
                q_out: q_out.view_mut(),
                k_cache: k_cache.view_mut(),
                v_cache: v_cache.view_mut(),
                k_scale: None,
                v_scale: None,
            };
            change(args).unwrap_err().to_string()
        };
        let run = |args: QkNormRopeArgs<'_>| plan.run(&stream, args);
        let (short, floats) = (zeros(&[3, 2, 64])?, zeros(&[4])?);
        assert_eq!(
            message(&|args| run(QkNormRopeArgs { v: short.view(), ..args })),
            "qk_norm_rope: v: expected shape [4, 2, 64], got [3, 2, 64]"
        );
        assert_eq!(
            message(&|args| run(QkNormRopeArgs { q: RopeInput::From(kv.view()), ..args })),
            "qk_norm_rope: q: expected shape [4, 4, 64], got [4, 2, 64]"
        );
        assert_eq!(
            message(&|args| run(QkNormRopeArgs { weights: None, ..args })),
            "qk_norm_rope: weights: expected tensors, as the problem has a norm, got none"
        );
        let narrow = zeros(&[32])?;
        assert_eq!(
            message(&|args| {
                let weights = Some(QkNormWeights { q: weight.view(), k: narrow.view() });
                run(QkNormRopeArgs { weights, ..args })
            }),
            "qk_norm_rope: weights.k: expected shape [64], got [32]"
        );
        assert_eq!(
            message(&|args| run(QkNormRopeArgs { slots: floats.view(), ..args })),
            "qk_norm_rope: slots: expected u32, got f32"
        );
        let others = RopeTables::new(&stream, &inv_freq(64), 1.0, 8)?;
        assert_eq!(
            message(&|args| run(QkNormRopeArgs { tables: &others, ..args })),
            "qk_norm_rope: tables: expected shape [any, 16], got [8, 32]"
        );
        assert_eq!(
            message(&|args| {
                let mut spread = zeros(&[9, 2, 65])?;
                let v_cache = spread.view_mut().slice(2, 0..64)?;
                run(QkNormRopeArgs { v_cache, ..args })
            }),
            "qk_norm_rope: v_cache: expected strides [128, 64, 1], got [130, 65, 1]"
        );
        assert_eq!(
            message(&|args| run(QkNormRopeArgs { k_scale: Some(weight.view()), ..args })),
            "qk_norm_rope: k_scale: expected none, as the caches are not fp8, got a tensor"
        );
        let fp8 = QkNormRope::plan(device, QkNormRopeProblem { cache_dtype: DType::F8E4M3, ..problem })?;
        assert_eq!(
            message(&|args| fp8.run(&stream, args)),
            "qk_norm_rope: k_cache: expected f8e4m3, got f32"
        );
        assert_eq!(
            message(&|args| {
                let cache = || Tensor::zeros(&stream, &[9, 2, 64], DType::F8E4M3);
                let (mut k, mut v) = (cache()?, cache()?);
                fp8.run(&stream, QkNormRopeArgs { k_cache: k.view_mut(), v_cache: v.view_mut(), ..args })
            }),
            "qk_norm_rope: k_scale: expected a tensor, as the caches are fp8, got none"
        );
        let without = QkNormRope::plan(device, QkNormRopeProblem { norm: None, ..problem })?;
        assert_eq!(
            message(&|args| without.run(&stream, args)),
            "qk_norm_rope: weights: expected none, as the problem has no norm, got tensors"
        );
        let smaller = QkNormRope::plan(device, QkNormRopeProblem { tokens: 3, ..problem })?;
        assert_eq!(
            message(&|args| smaller.run(&stream, args)),
            "qk_norm_rope: q_out: expected at most 3 tokens, as planned, got 4"
        );
        let error =
            |problem: QkNormRopeProblem| QkNormRope::supports(device, &problem).unwrap_err().to_string();
        assert_eq!(
            error(QkNormRopeProblem { heads_kv: 0, ..problem }),
            "qk_norm_rope: problem: expected at least one query head and one key head, got 4 and 0"
        );
        assert_eq!(
            error(QkNormRopeProblem { rotary_dim: 66, ..problem }),
            "qk_norm_rope: problem: expected an even rotary_dim from 2 to head_dim 64, got 66"
        );
        assert_eq!(
            error(QkNormRopeProblem { dtype: DType::I32, ..problem }),
            "qk_norm_rope: problem: expected dtype f32, f16 or bf16, got i32"
        );
        assert_eq!(
            error(QkNormRopeProblem { cache_dtype: DType::BF16, ..problem }),
            "qk_norm_rope: problem: expected cache_dtype f32 or f8e4m3, got bf16"
        );
        let norm = Some(QkNorm { eps: -1.0, weight: NormWeight::Plain });
        assert_eq!(
            error(QkNormRopeProblem { norm, ..problem }),
            "qk_norm_rope: problem: expected a finite eps of at least 0, got -1"
        );
    }
    Ok(())
}
