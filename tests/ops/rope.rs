//! Rotary position embedding against its reference.

use abi::ops::rope::{RopeVariant, VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::{Rng, Values, dims, finite_values};
use warpforge::ops::rope::reference::{self, RopeShape};
use warpforge::ops::rope::{Rope, RopeArgs, RopeInput, RopeProblem, RopeStyle, RopeTables};
use warpforge::{DType, Device, Error, Tensor, TensorView};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, every_kernel, fail, floats, heads_of, on_executors, store,
    swapped, through_every_kernel, values,
};
use crate::places::{MAX_POSITION, angles, inv_freq, positions};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    InPlace,
    Apart,
}

#[derive(Clone, Debug)]
struct Case {
    problem: RopeProblem,
    /// Elements before and after the heads in a token's row, as in a joint projection.
    x_margin: (usize, usize),
    out_margin: (usize, usize),
    offset: usize,
    place: Place,
    attention_factor: f64,
    kind: Values,
    seed: u64,
}

impl Case {
    fn work(&self) -> usize {
        5 * self.problem.tokens * self.problem.heads * self.problem.head_dim
    }
}

fn style() -> impl Strategy<Value = RopeStyle> {
    proptest::sample::select(&RopeStyle::ALL[..])
}

fn case() -> impl Strategy<Value = Case> {
    // Sizes of models, sizes that fit no piece of 16 bytes, and any.
    let head = prop_oneof![
        3 => proptest::sample::select(vec![(128usize, 128usize), (64, 64), (256, 64), (16, 16), (32, 16), (8, 8)]),
        2 => (1usize..40, 0usize..20).prop_map(|(pairs, rest)| (2 * pairs + rest, 2 * pairs)),
    ];
    let problem = (floats(), dims(&[8, 16], 40), dims(&[4, 8], 18), head, style()).prop_map(
        |(dtype, tokens, heads, (head_dim, rotary_dim), style)| RopeProblem {
            tokens,
            heads,
            head_dim,
            rotary_dim,
            style,
            dtype,
        },
    );
    let margin = || {
        let aligned = || (0usize..3).prop_map(|pieces| 8 * pieces);
        prop_oneof![4 => (aligned(), aligned()), 1 => (0usize..9, 0usize..9)]
    };
    let layout = (margin(), margin(), prop_oneof![6 => Just(0usize), 1 => 1usize..9]);
    let rest = (
        prop_oneof![Just(Place::InPlace), Just(Place::Apart)],
        prop_oneof![3 => Just(1.0), 1 => Just(1.138_629_436)],
        finite_values(),
        any::<u64>(),
    );
    (problem, layout, rest).prop_map(
        |(problem, (x_margin, out_margin, offset), (place, attention_factor, kind, seed))| {
            let x_margin = if place == Place::InPlace { out_margin } else { x_margin };
            Case { problem, x_margin, out_margin, offset, place, attention_factor, kind, seed }
        },
    )
}

fn shape_of(problem: &RopeProblem) -> RopeShape {
    let RopeProblem { heads, head_dim, rotary_dim, style, .. } = *problem;
    RopeShape { heads, head_dim, rotary_dim, style }
}

/// The heads inside rows of a wider tensor.
fn heads<'a>(
    rows: TensorView<'a>,
    problem: &RopeProblem,
    margin: (usize, usize),
) -> Result<TensorView<'a>, Error> {
    let len = problem.heads * problem.head_dim;
    rows.slice(1, margin.0..margin.0 + len)?.reshape(&[rows.shape()[0], problem.heads, problem.head_dim])
}

fn run(device: &Device, case: &Case, variant: Option<&'static RopeVariant>) -> Result<(), TestCaseError> {
    let problem = case.problem;
    let RopeProblem { tokens, heads: num_heads, head_dim, rotary_dim, dtype, .. } = problem;
    let stream = device.stream().map_err(fail)?;
    let plan = match variant {
        None => Rope::plan(device, problem),
        Some(variant) => Rope::plan_with(device, problem, variant),
    };
    let plan = plan.map_err(fail)?;
    let len = num_heads * head_dim;
    let widths = [case.x_margin, case.out_margin].map(|margin| margin.0 + len + margin.1);
    if widths.contains(&0) {
        // Rows cannot tell how many empty rows there are.
        return Ok(());
    }
    let layout = Layout { padding: 0, offset: case.offset };
    let x_wide = values(case.kind, dtype, tokens * widths[0], case.seed);
    let before = values(Values::Normal, dtype, tokens * widths[1], case.seed ^ 3);
    let x: Vec<f64> =
        x_wide.chunks(widths[0]).flat_map(|row| &row[case.x_margin.0..][..len]).copied().collect();
    let position_list = positions(&mut Rng::new(case.seed ^ 1), tokens);

    let tables =
        RopeTables::new(&stream, &inv_freq(rotary_dim), case.attention_factor, MAX_POSITION).map_err(fail)?;
    let position_tensor = Tensor::from_slice(&stream, &[tokens], &position_list).map_err(fail)?;
    let x_rows = Rows::input(&stream, dtype, &x_wide, widths[0], layout).map_err(fail)?;
    let out_values = if case.place == Place::InPlace { &x_wide } else { &before };
    let mut out_rows = Rows::input(&stream, dtype, out_values, widths[1], layout).map_err(fail)?;
    let out = out_rows.view_mut().slice(1, case.out_margin.0..case.out_margin.0 + len).map_err(fail)?;
    let out = out.reshape(&[tokens, num_heads, head_dim]).map_err(fail)?;
    let input = match case.place {
        Place::InPlace => RopeInput::InPlace,
        Place::Apart => RopeInput::From(heads(x_rows.view(), &problem, case.x_margin).map_err(fail)?),
    };
    plan.run(&stream, RopeArgs { x: input, positions: position_tensor.view(), tables: &tables, out })
        .map_err(fail)?;

    let got_wide = out_rows.read(&stream)?;
    let [cos, sin] = angles(&stream, &tables).map_err(fail)?;
    let shape = shape_of(&problem);
    let (want, terms) = reference::rope::<f64>(&x, &position_list, (&cos, &sin), shape, |v| v);
    let (naive, _) = reference::rope::<f32>(&x, &position_list, (&cos, &sin), shape, store(dtype));
    let mut got = Vec::new();
    for (row, before) in std::iter::zip(got_wide.chunks(widths[1]), out_values.chunks(widths[1])) {
        let (start, end) = (case.out_margin.0, case.out_margin.0 + len);
        prop_assert_eq!(&row[..start], &before[..start], "before the heads");
        prop_assert_eq!(&row[end..], &before[end..], "after the heads");
        got.extend_from_slice(&row[start..end]);
    }
    let what = plan.report().variant;
    for (i, (got, x)) in std::iter::zip(&got, &x).enumerate() {
        if i % head_dim >= rotary_dim {
            prop_assert_eq!(got.to_bits(), x.to_bits(), "{}: element {} beyond the rotated part", what, i);
        }
    }
    check(what, &got, &want, &naive, &Tolerance::new(dtype, Scale::Given(&terms), 3))
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let RopeProblem { dtype, style, .. } = case.problem;
    for device in cards {
        for variant in VARIANTS.iter().filter(|v| v.dtype == dtype && v.style == style) {
            if wanted(variant.entry) && Rope::plan_with(device, case.problem, variant).is_ok() {
                run(device, case, Some(variant))?;
            }
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "rope",
        &[|case: &mut Case| case.problem.tokens = 0, |case: &mut Case| case.problem.heads = 0],
        case(),
        Case::work,
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("rope", case(), Case::work, run_variants)
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
    fn every_variant((case, on) in on_executors(case, Case::work)) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// A token gives the same bits alone and among others.
    #[test]
    fn tokens_are_independent(
        ((dtype, style, tokens, heads, seed), on) in on_executors(
            || (floats(), style(), 2usize..30, 1usize..10, any::<u64>()),
            |&(_, _, tokens, heads, _)| 5 * tokens * heads * 32,
        ),
    ) {
        let (head_dim, len) = (32, heads * 32);
        for device in &on.devices() {
            let stream = device.stream().map_err(fail)?;
            let tables = RopeTables::new(&stream, &inv_freq(head_dim), 1.0, MAX_POSITION).map_err(fail)?;
            let data = values(Values::Normal, dtype, tokens * len, seed);
            let at = positions(&mut Rng::new(seed), tokens);
            let run = |data: &[f64], at: &[u32]| -> Result<Vec<f64>, TestCaseError> {
                let tokens = at.len();
                let problem = RopeProblem { tokens, heads, head_dim, rotary_dim: head_dim, style, dtype };
                let mut rows = Rows::input(&stream, dtype, data, len, Layout::default()).map_err(fail)?;
                let positions = Tensor::from_slice(&stream, &[tokens], at).map_err(fail)?;
                let out = rows.view_mut().reshape(&[tokens, heads, head_dim]).map_err(fail)?;
                let args = RopeArgs { x: RopeInput::InPlace, positions: positions.view(), tables: &tables, out };
                Rope::plan(device, problem).map_err(fail)?.run(&stream, args).map_err(fail)?;
                rows.read(&stream)
            };
            let together = run(&data, &at)?;
            let token = seed as usize % tokens;
            let alone = run(&data[token * len..][..len], &at[token..][..1])?;
            prop_assert_eq!(&together[token * len..][..len], &alone[..], "{:?}", device);
        }
    }
}

/// x head by head in memory, out token by token, and every second of some positions: the bits are those of contiguous
/// tensors.
#[test]
fn strides_of_their_own() -> Result<(), TestCaseError> {
    let (tokens, heads) = (7, 5);
    for (dtype, (head_dim, rotary_dim)) in
        DType::FLOATS.into_iter().flat_map(|dtype| [(32, 32), (48, 16), (21, 10)].map(|dims| (dtype, dims)))
    {
        let shape = [tokens, heads, head_dim];
        let data = values(Values::Normal, dtype, shape.iter().product(), 3);
        let at = positions(&mut Rng::new(5), tokens);
        // Of each position only the first of two numbers counts.
        let spread: Vec<u32> = at.iter().flat_map(|&position| [position, 11]).collect();
        for (style, device) in
            RopeStyle::ALL.into_iter().flat_map(|style| devices().into_iter().map(move |d| (style, d)))
        {
            let stream = device.stream()?;
            let tables = RopeTables::new(&stream, &inv_freq(rotary_dim), 1.0, MAX_POSITION)?;
            let plan =
                Rope::plan(&device, RopeProblem { tokens, heads, head_dim, rotary_dim, style, dtype })?;
            let close = Tensor::from_slice(&stream, &[tokens], &at)?;
            let spread = Tensor::from_slice(&stream, &[tokens, 2], &spread)?;
            let run = |apart: bool| -> Result<Vec<f64>, TestCaseError> {
                let x = if apart { swapped(&data, shape) } else { data.clone() };
                let gap = |gap| Layout { padding: if apart { gap } else { 0 }, offset: 0 };
                let x = Rows::input(&stream, dtype, &x, head_dim, gap(8))?;
                let mut out = Rows::output(&stream, dtype, tokens * heads, head_dim, gap(16))?;
                let positions = spread.view().slice(1, 0..1)?.reshape(&[tokens])?;
                let args = RopeArgs {
                    x: RopeInput::From(heads_of(x.view(), shape, apart)?),
                    positions: if apart { positions } else { close.view() },
                    tables: &tables,
                    out: out.view_mut().reshape(&shape)?,
                };
                plan.run(&stream, args)?;
                out.read(&stream)
            };
            assert_eq!(run(true)?, run(false)?, "{dtype} {style:?} {head_dim} {device:?}");
        }
    }
    Ok(())
}

/// Latent attention: the last columns of every query head, and of the keys' joint projection, in place or to other
/// rows.
#[test]
fn parts_of_heads() -> Result<(), TestCaseError> {
    let (tokens, style) = (5, RopeStyle::Interleaved);
    for (heads, width, rotary_dim) in [(20, 256, 64), (1, 576, 64), (4, 40, 16), (3, 37, 10)] {
        for dtype in DType::FLOATS {
            let problem = RopeProblem { tokens, heads, head_dim: rotary_dim, rotary_dim, style, dtype };
            let start = width - rotary_dim;
            let data = values(Values::Normal, dtype, tokens * heads * width, 3);
            let part: Vec<f64> = data.chunks(width).flat_map(|head| &head[start..]).copied().collect();
            let at = positions(&mut Rng::new(5), tokens);
            for device in &devices() {
                let stream = device.stream()?;
                let tables = RopeTables::new(&stream, &inv_freq(rotary_dim), 1.0, MAX_POSITION)?;
                let [cos, sin] = angles(&stream, &tables)?;
                let shape = shape_of(&problem);
                let (want, terms) = reference::rope::<f64>(&part, &at, (&cos, &sin), shape, |v| v);
                let (naive, _) = reference::rope::<f32>(&part, &at, (&cos, &sin), shape, store(dtype));
                let at = Tensor::from_slice(&stream, &[tokens], &at)?;
                let row = heads * width;
                let mut rows = Rows::input(&stream, dtype, &data, row, Layout::default())?;
                let mut apart = Rows::input(&stream, dtype, &data, row, Layout::default())?;
                let plan = Rope::plan(device, problem)?;
                let (shape, range) = ([tokens, heads, width], start..width);
                let x = RopeInput::From(rows.view().reshape(&shape)?.slice(2, range.clone())?);
                let out = apart.view_mut().reshape(&shape)?.slice(2, range.clone())?;
                plan.run(&stream, RopeArgs { x, positions: at.view(), tables: &tables, out })?;
                let out = rows.view_mut().reshape(&shape)?.slice(2, range)?;
                plan.run(
                    &stream,
                    RopeArgs { x: RopeInput::InPlace, positions: at.view(), tables: &tables, out },
                )?;
                let got = rows.read(&stream)?;
                assert_eq!(got, apart.read(&stream)?, "{device:?} {dtype} {heads} of {width}");
                for (got, before) in std::iter::zip(got.chunks(width), data.chunks(width)) {
                    assert_eq!(got[..start], before[..start], "{device:?}: before the rotated part");
                }
                let got: Vec<f64> = got.chunks(width).flat_map(|head| &head[start..]).copied().collect();
                let tolerance = Tolerance::new(dtype, Scale::Given(&terms), 3);
                check(&format!("{device:?}"), &got, &want, &naive, &tolerance)?;
            }
        }
    }
    Ok(())
}

/// cos and sin are the f64 values rounded once, at every position.
#[test]
fn tables() -> Result<(), TestCaseError> {
    for device in &devices() {
        let stream = device.stream()?;
        for (freqs, factor, max_position) in
            [(inv_freq(64), 1.0, 1), (inv_freq(2), 1.25, 1000), (inv_freq(34), 1.138, 300)]
        {
            let tables = RopeTables::new(&stream, &freqs, factor, max_position)?;
            assert_eq!((tables.max_position(), tables.pairs()), (max_position, freqs.len()));
            let (cos, sin) = reference::tables(&freqs, factor, max_position);
            let f32s = |values: &[f64]| values.iter().map(|&v| v as f32).collect::<Vec<f32>>();
            testkit::compare::assert_bits_eq(&tables.cos().to_vec::<f32>(&stream)?, &f32s(&cos));
            testkit::compare::assert_bits_eq(&tables.sin().to_vec::<f32>(&stream)?, &f32s(&sin));
            let angles: Vec<f64> =
                (0..max_position).flat_map(|p| freqs.iter().map(move |freq| p as f64 * freq)).collect();
            let given = RopeTables::from_angles(&stream, &angles, freqs.len(), factor)?;
            testkit::compare::assert_bits_eq(&given.cos().to_vec::<f32>(&stream)?, &f32s(&cos));
            testkit::compare::assert_bits_eq(&given.sin().to_vec::<f32>(&stream)?, &f32s(&sin));
            // Others written over them, in whole or in part: the rest stays.
            let mut set = RopeTables::from_angles(&stream, &vec![1.0; angles.len()], freqs.len(), 1.0)?;
            for rows in [max_position, max_position / 2] {
                set.set_angles(&stream, &angles[..rows * freqs.len()], factor)?;
                testkit::compare::assert_bits_eq(&set.cos().to_vec::<f32>(&stream)?, &f32s(&cos));
                testkit::compare::assert_bits_eq(&set.sin().to_vec::<f32>(&stream)?, &f32s(&sin));
            }
            let too_many = set.set_angles(&stream, &vec![0.0; angles.len() + freqs.len()], factor);
            assert_eq!(
                too_many.unwrap_err().to_string(),
                format!(
                    "rope: angles: expected a multiple of {} angles, at most {}, got {}",
                    freqs.len(),
                    angles.len(),
                    angles.len() + freqs.len()
                )
            );
        }
    }
    Ok(())
}

/// The last position of a long context, 262143 radians at the highest frequency, against a reduction by 2π in two
/// parts.
#[test]
fn long_context() -> Result<(), Error> {
    let stream = Device::cpu().stream()?;
    let tables = RopeTables::new(&stream, &inv_freq(128), 1.0, 262_144)?;
    let last = tables.cos().view().slice(0, 262_143..262_144)?.reshape(&[64])?.to_vec::<f32>(&stream)?;
    let turns = (262_143.0 / std::f64::consts::TAU).floor();
    let angle = (-turns).mul_add(std::f64::consts::TAU, 262_143.0) - turns * 2.449_293_598_294_706_4e-16;
    assert!((f64::from(last[0]) - angle.cos()).abs() < 1e-7, "{} {}", last[0], angle.cos());
    // Where one part of the table ends and the next begins.
    for position in [65_535, 65_536, 262_143] {
        let row = |table: &Tensor| {
            table.view().slice(0, position..position + 1)?.reshape(&[64])?.to_vec::<f32>(&stream)
        };
        let angles = inv_freq(128).into_iter().map(|freq| position as f64 * freq);
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.map(|a| (a.cos() as f32, a.sin() as f32)).unzip();
        testkit::compare::assert_bits_eq(&row(tables.cos())?, &cos);
        testkit::compare::assert_bits_eq(&row(tables.sin())?, &sin);
    }
    Ok(())
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = RopeProblem {
            tokens: 4,
            heads: 2,
            head_dim: 64,
            rotary_dim: 32,
            style: RopeStyle::HalfSplit,
            dtype: DType::F32,
        };
        let plan = Rope::plan(device, problem)?;
        let tables = RopeTables::new(&stream, &inv_freq(32), 1.0, 8)?;
        let message = |x: Option<&[usize]>, positions: usize, tables: &RopeTables, out: &[usize]| {
            let x = x.map(|shape| Tensor::zeros(&stream, shape, DType::F32)).transpose()?;
            let positions = Tensor::zeros(&stream, &[positions], DType::U32)?;
            let mut out = Tensor::zeros(&stream, out, DType::F32)?;
            let args = RopeArgs {
                x: x.as_ref().map_or(RopeInput::InPlace, |x| RopeInput::From(x.view())),
                positions: positions.view(),
                tables,
                out: out.view_mut(),
            };
            Ok::<String, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        assert_eq!(
            message(None, 4, &tables, &[4, 2, 65])?,
            "rope: out: expected shape [any, 2, 64], got [4, 2, 65]"
        );
        assert_eq!(
            message(None, 5, &tables, &[5, 2, 64])?,
            "rope: out: expected at most 4 tokens, as planned, got 5"
        );
        assert_eq!(message(None, 3, &tables, &[4, 2, 64])?, "rope: positions: expected shape [4], got [3]");
        assert_eq!(
            message(Some(&[3, 2, 64]), 4, &tables, &[4, 2, 64])?,
            "rope: x: expected shape [4, 2, 64], got [3, 2, 64]"
        );
        let narrow = RopeTables::new(&stream, &inv_freq(30), 1.0, 8)?;
        assert_eq!(
            message(None, 4, &narrow, &[4, 2, 64])?,
            "rope: tables: expected shape [any, 16], got [8, 15]"
        );
        let problem_error = |problem: RopeProblem| Rope::supports(device, &problem).unwrap_err().to_string();
        for rotary_dim in [0, 33, 66] {
            assert_eq!(
                problem_error(RopeProblem { rotary_dim, ..problem }),
                format!("rope: problem: expected an even rotary_dim from 2 to head_dim 64, got {rotary_dim}")
            );
        }
        assert_eq!(
            problem_error(RopeProblem { dtype: DType::I32, ..problem }),
            "rope: problem: expected dtype f32, f16 or bf16, got i32"
        );
        assert_eq!(
            RopeTables::new(&stream, &inv_freq(32), 1.0, 0).unwrap_err().to_string(),
            "rope: tables: expected at least one position and one pair, got 0 positions of 16 pairs"
        );
        assert_eq!(
            RopeTables::from_angles(&stream, &[0.0; 7], 2, 1.0).unwrap_err().to_string(),
            "rope: angles: expected a multiple of 2 angles, at least 1, got 7"
        );
    }
    Ok(())
}
