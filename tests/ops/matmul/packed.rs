//! Products with packed weights: every layout, by every kernel, against the values that the layout stands for.

use std::sync::Arc;

use abi::weight::{Codes, Layout as WeightLayout, ScaleType};
use half::{bf16, f16};
use proptest::prelude::*;
use proptest::sample::select;
use testkit::round::round_to;
use testkit::simulator::Card;
use testkit::strategies::{Rng, Values, dims_from};
use warpforge::ops::glu::Activation;
use warpforge::ops::matmul::{
    Act, Bias, Epilogue, Matmul, MatmulArgs, MatmulB, MatmulProblem, PACKED_AHEAD_VARIANTS,
    PACKED_MMA_VARIANTS, PACKED_VARIANTS, PACKED_WGMMA_VARIANTS, PackedChoices, PackedVariant, RowNorm,
    select_packed,
};
use warpforge::ops::quantize_weight::reference;
use warpforge::ops::rmsnorm::NormWeight;
use warpforge::weight::{GateUp, Weight, WeightSource};
use warpforge::{Arch, DType, Device, Error, F8E4M3, Tensor};

use super::case::*;
use crate::harness::{
    EVERY, Layout, Rows, Wanted, all_cards, cards_of, devices_for, every_kernel_of, expect_loaded, fail,
    floats, on_executors,
};

/// A matrix of random codes and scales, and the values that they stand for.
pub(crate) struct Source {
    size: [usize; 2],
    layout: WeightLayout,
    codes: Vec<u16>,
    scales: Vec<u32>,
    zeros: Vec<u8>,
    minimums: Vec<u32>,
    supers: Vec<[u16; 2]>,
    /// The column at each place, if the layout is permuted: of all matrices of this width the same.
    order: Option<Vec<u32>>,
    pub(crate) global: f32,
}

impl Source {
    fn groups(&self) -> usize {
        let k = self.size[1];
        if self.layout.group == 0 { 1 } else { k.div_ceil(self.layout.group as usize) }
    }

    pub(crate) fn new([n, k]: [usize; 2], layout: WeightLayout, seed: u64) -> Self {
        let mut random = Rng::new(seed);
        let mut number = |below: usize| random.below(below) as u16;
        let codes = (0..n * k)
            .map(|_| match layout.codes {
                Codes::Int4 | Codes::E2m1 => number(16),
                Codes::Int8 => number(256),
                // Without its NaNs.
                Codes::E4m3 => number(127) | number(2) << 7,
                // 0, the least, and from 2^-9 to 2^7: so that sums are not of the largest alone.
                Codes::E6m9 => {
                    number(2) << 15 | [0, 1, number(16 << 9) + (22 << 9)][number(64).min(2) as usize]
                }
            })
            .collect();
        let groups = if layout.group == 0 { 1 } else { k.div_ceil(layout.group as usize) };
        let rows = n.div_ceil(layout.rows as usize);
        let mut random = Rng::new(seed ^ 0x51);
        let mut number = |signed: bool| {
            let value =
                (0.5 + random.uniform()) as f32 * if signed && random.below(2) == 1 { -0.02 } else { 0.02 };
            match layout.scale {
                ScaleType::F32 => value.to_bits(),
                ScaleType::F16 => f16::from_f32(value).to_bits().into(),
                ScaleType::Bf16 => bf16::from_f32(value).to_bits().into(),
                ScaleType::E8m0 => 118 + random.below(8) as u32,
                ScaleType::E4m3 => 1 + random.below(126) as u32,
                ScaleType::U8Super => random.below(64) as u32,
                ScaleType::I8Super => random.below(256) as u32,
            }
        };
        let count = rows * groups;
        let scales = (0..count).map(|_| number(false)).collect();
        let minimums = (0..count).map(|_| number(true)).collect();
        let mut random = Rng::new(seed ^ 0x52);
        let zeros = (0..count)
            .map(|_| random.below(if layout.codes == Codes::Int4 { 16 } else { 256 }) as u8)
            .collect();
        let mut half = || f16::from_f32(0.001 * (0.5 + random.uniform()) as f32).to_bits();
        let supers = (0..n * k.div_ceil(256)).map(|_| [half(), half()]).collect();
        let global = if layout.scale == ScaleType::E4m3 { 0.003 } else { 1.0 };
        let order = layout.permuted.then(|| {
            let (mut order, mut random) = ((0..k as u32).collect::<Vec<_>>(), Rng::new(k as u64));
            (1..k).for_each(|last| order.swap(last, random.below(last + 1)));
            order
        });
        Source { size: [n, k], layout, codes, scales, zeros, minimums, supers, order, global }
    }

    /// With another order of columns.
    pub(super) fn with_order(self, order: Option<Vec<u32>>) -> Self {
        Source { order, ..self }
    }

    fn index(&self, row: usize, group: usize) -> usize {
        row / self.layout.rows as usize * self.groups() + group
    }

    /// What it stands for, by the definition.
    pub(crate) fn values(&self) -> Vec<f64> {
        self.each(|value, scale, minimum| value * scale - minimum)
    }

    /// The same with all terms taken absolute.
    pub(crate) fn sizes(&self) -> Vec<f64> {
        self.each(|value, scale, minimum| (value * scale).abs() + minimum.abs())
    }

    /// What kernels make of it that unpack it: in f32, and rounded to this type.
    fn unpacked(&self, dtype: DType) -> Vec<f64> {
        self.each(|value, scale, minimum| {
            let value = value as f32 * scale as f32 - minimum as f32;
            round_to(dtype, value.into())
        })
    }

    /// Of each element its number, the scale and the minimum.
    fn each(&self, value_of: impl Fn(f64, f64, f64) -> f64) -> Vec<f64> {
        let [n, k] = self.size;
        let number = |bits: u32, factor: f32| -> f64 {
            match self.layout.scale {
                ScaleType::F32 => f32::from_bits(bits).into(),
                ScaleType::F16 => f16::from_bits(bits as u16).into(),
                ScaleType::Bf16 => bf16::from_bits(bits as u16).into(),
                ScaleType::E8m0 => (f64::from(bits) - 127.0).exp2(),
                // As it is stored, or as kernels make it: in f32.
                ScaleType::E4m3 => (F8E4M3(bits as u8).to_f32() * factor).into(),
                ScaleType::U8Super => f64::from(bits) * f64::from(factor),
                ScaleType::I8Super => f64::from(bits as u8 as i8) * f64::from(factor),
            }
        };
        let mut values = Vec::new();
        for row in 0..n {
            let first = values.len();
            for col in 0..k {
                let group = if self.layout.group == 0 { 0 } else { col / self.layout.group as usize };
                let index = self.index(row, group);
                let supers =
                    self.supers[row * k.div_ceil(256) + col / 256].map(|half| f16::from_bits(half).to_f32());
                let factor = if self.layout.scale.has_supers() { supers } else { [self.global; 2] };
                let scale = number(self.scales[index], factor[0]);
                let code = self.codes[row * k + col];
                let zero = if self.layout.zeros { self.zeros[index] } else { self.layout.zero() };
                let value = match self.layout.codes {
                    Codes::Int4 | Codes::Int8 => f64::from(code) - f64::from(zero),
                    Codes::E2m1 => {
                        let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code % 8)];
                        if code < 8 { magnitude } else { -magnitude }
                    }
                    Codes::E4m3 => F8E4M3(code as u8).to_f32().into(),
                    Codes::E6m9 => reference::value(Codes::E6m9, 0, code),
                };
                let minimum =
                    if self.layout.minimums { number(self.minimums[index], factor[1]) } else { 0.0 };
                values.push(value_of(value, scale, minimum));
            }
            if let Some(order) = &self.order {
                let places = values[first..].to_vec();
                std::iter::zip(order, places).for_each(|(&col, value)| values[first + col as usize] = value);
            }
        }
        values
    }
}

impl WeightSource for Source {
    fn size(&self) -> [usize; 2] {
        self.size
    }

    fn layout(&self) -> WeightLayout {
        self.layout
    }

    fn codes(&self, row: usize, codes: &mut [u8]) {
        let bytes = self.layout.codes.bytes();
        for (to, code) in codes.chunks_mut(bytes).zip(&self.codes[row * self.size[1]..]) {
            to.copy_from_slice(&code.to_le_bytes()[..bytes]);
        }
    }

    fn scale(&self, row: usize, group: usize) -> u32 {
        self.scales[self.index(row, group)]
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        self.zeros[self.index(row, group)]
    }

    fn minimum(&self, row: usize, group: usize) -> u32 {
        self.minimums[self.index(row, group)]
    }

    fn supers(&self, row: usize, stretch: usize) -> [u16; 2] {
        self.supers[row * self.size[1].div_ceil(256) + stretch]
    }

    fn global(&self) -> f32 {
        self.global
    }

    fn order(&self) -> Option<&[u32]> {
        self.order.as_deref()
    }
}

/// Every layout that kernels take, but for blocks of more rows, and with columns in order.
pub(crate) fn layouts() -> Vec<WeightLayout> {
    let mut layouts = Vec::new();
    for codes in Codes::ALL {
        for group in [0, 16, 32, 64, 128, 256] {
            for scale in ScaleType::ALL {
                for rows in [1, 16, 128] {
                    for (zeros, minimums) in [(false, false), (true, false), (false, true)] {
                        let permuted = false;
                        layouts.push(WeightLayout { codes, group, rows, scale, zeros, minimums, permuted });
                    }
                }
            }
        }
    }
    layouts.retain(|layout| layout.problem().is_none());
    // A minimum that is a power of two, or an fp8, is nobody's.
    layouts.retain(|layout| !layout.minimums || !matches!(layout.scale, ScaleType::E8m0 | ScaleType::E4m3));
    layouts
}

#[derive(Clone, Debug)]
pub(super) struct PackedCase {
    pub(super) case: Case,
    pub(super) layout: WeightLayout,
}

fn packed() -> impl Strategy<Value = PackedCase> {
    let m = prop_oneof![3 => 1usize..18, 1 => 18usize..70];
    let k = prop_oneof![2 => dims_from(1, &[16, 64, 128], 300), 1 => dims_from(1, &[256], 900)];
    let act = prop_oneof![
        3 => Just(Act::None),
        1 => Just(Act::Of(Activation::GeluTanh)),
        1 => Just(Act::Gated(Activation::Silu))
    ];
    let epilogue = (act, prop_oneof![Just(1.0f32), Just(-0.37)], any::<bool>())
        .prop_map(|(act, scale, residual)| Epilogue { scale, act, residual });
    let place = || {
        let offset = prop_oneof![3 => Just(0usize), 1 => 1usize..9];
        let padding = prop_oneof![2 => Just(0usize), 1 => Just(8), 1 => 1usize..9];
        (padding, offset).prop_map(|(padding, offset)| Layout { padding, offset })
    };
    let parts = (floats(), m, dims_from(1, &[16, 32], 90), k, epilogue, any::<bool>());
    // To f32: all that kernels of few rows do so, and anything.
    let to_f32 = prop_oneof![3 => Just((false, false)), 1 => Just((true, true)), 1 => Just((true, false))];
    let layout = (select(layouts()), prop_oneof![3 => Just(false), 1 => Just(true)])
        .prop_map(|(layout, permuted)| WeightLayout { permuted, ..layout });
    (parts, layout, (place(), place()), (to_f32, any::<u64>())).prop_map(
        |((dtype, m, n, k, epilogue, bias), layout, (a_layout, out_layout), ((to_f32, is_plain), seed))| {
            let scale = epilogue.scale;
            let epilogue = if is_plain { Epilogue { scale, ..Epilogue::NONE } } else { epilogue };
            let gated = matches!(epilogue.act, Act::Gated(_));
            let bias = if bias && !gated && !is_plain { Bias::PerColumn } else { Bias::None };
            let out_dtype = if to_f32 { DType::F32 } else { dtype };
            let problem = MatmulProblem {
                bias,
                epilogue,
                out_dtype,
                weight: Some(layout),
                ..MatmulProblem::new(m, n, k, dtype)
            };
            let place = Layout::default();
            let case = Case { problem, a_layout, b_layout: place, out_layout, kind: Values::Normal, seed };
            PackedCase { case, layout }
        },
    )
}

/// One row in pieces of 16 bytes, which may be normed before it is multiplied: of one round of tiles, or of several.
fn packed_row() -> impl Strategy<Value = PackedCase> {
    let k = prop_oneof![3 => 16usize..140, 1 => 260usize..300];
    let norm = (
        any::<bool>(),
        prop_oneof![Just(1e-6f32), Just(0.5)],
        prop_oneof![Just(NormWeight::Plain), Just(NormWeight::ZeroCentred)],
    );
    let types = prop_oneof![Just(DType::BF16), Just(DType::F16)];
    let act = prop_oneof![
        2 => Just(Act::None),
        1 => Just(Act::Of(Activation::GeluTanh)),
        1 => Just(Act::Gated(Activation::Silu))
    ];
    let ends = (act, any::<bool>(), any::<bool>());
    let layouts = layouts().into_iter().filter(|layout| layout.codes != Codes::E6m9).collect::<Vec<_>>();
    let parts = (types, dims_from(1, &[16, 32], 50), k, ends);
    (parts, norm, select(layouts), any::<u64>()).prop_map(
        |((dtype, n, k, (act, residual, bias)), (is_normed, eps, weight), layout, seed)| {
            let gated = matches!(act, Act::Gated(_));
            let problem = MatmulProblem {
                bias: if bias && !gated { Bias::PerColumn } else { Bias::None },
                epilogue: Epilogue { act, residual, ..Epilogue::NONE },
                weight: Some(layout),
                norm: is_normed.then_some(RowNorm { eps, weight }),
                ..MatmulProblem::new(1, n, 8 * k, dtype)
            };
            PackedCase { case: contiguous(problem, seed), layout }
        },
    )
}

pub(super) fn work(case: &PackedCase) -> usize {
    let MatmulProblem { m, k, .. } = case.case.problem;
    let n = b_rows(&case.case.problem);
    n.next_multiple_of(16) * k.next_multiple_of(64) * (8 + m)
}

impl PackedCase {
    pub(super) fn sources(&self) -> [Source; 2] {
        let MatmulProblem { n, k, .. } = self.case.problem;
        [0, 1].map(|i| Source::new([n, k], self.layout, self.case.seed ^ i))
    }

    fn is_gated(&self) -> bool {
        matches!(self.case.problem.epilogue.act, Act::Gated(_))
    }

    /// The layout that is planned: a gate's and up's blocks of rows are one block in turn.
    pub(super) fn problem(&self) -> MatmulProblem {
        let rows = self.layout.rows;
        let rows = if self.is_gated() && rows > 1 { 2 * rows } else { rows };
        let layout = WeightLayout { rows, ..self.layout };
        MatmulProblem { weight: Some(layout), ..self.case.problem }
    }

    /// The inputs with the weight's values, perhaps rounded to the operands' type.
    pub(super) fn inputs(&self, [gate, up]: &[Source; 2], rounded: bool) -> Inputs {
        let values = |source: &Source| match rounded {
            true => source.unpacked(self.case.problem.dtype),
            false => source.values(),
        };
        let both = |of: &dyn Fn(&Source) -> Vec<f64>| {
            let mut both = of(gate);
            if self.is_gated() {
                both.extend(of(up));
            }
            both
        };
        Inputs { b: both(&values), b_sizes: Some(both(&Source::sizes)), ..inputs(&self.case) }
    }

    pub(super) fn pack(&self, device: &Device, [gate, up]: &[Source; 2]) -> Result<Weight, TestCaseError> {
        let stream = device.stream().map_err(fail)?;
        let weight = if self.is_gated() {
            Weight::pack(&stream, &GateUp(gate, up))
        } else {
            Weight::pack(&stream, gate)
        };
        weight.map_err(fail)
    }

    pub(super) fn run(
        &self,
        device: &Device,
        plan: &Matmul,
        sources: &[Source; 2],
    ) -> Result<(), TestCaseError> {
        let weight = self.pack(device, sources)?;
        prop_assert_eq!(weight.order().is_some(), self.layout.permuted);
        let variant = plan.report().variant;
        let inputs = self.inputs(sources, variant.contains("unpack"));
        let got = product_of(device, plan, &self.case, &inputs, Some(&weight))?;
        Expected::of(&self.case.problem, &inputs).check(variant, &got, &self.case.problem)
    }
}

/// Every kernel that reads weights as they are packed.
fn packed_variants() -> impl Iterator<Item = &'static PackedVariant> {
    PACKED_VARIANTS
        .iter()
        .chain(PACKED_MMA_VARIANTS)
        .chain(PACKED_AHEAD_VARIANTS)
        .chain(PACKED_WGMMA_VARIANTS)
}

/// The wanted kernels that can do a case.
fn run_variants(cards: &[Device], case: &PackedCase, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let sources = case.sources();
    for device in cards {
        for variant in packed_variants().filter(|v| wanted(v.entry)) {
            if let Ok(plan) = Matmul::plan_packed_with(device, case.problem(), variant) {
                case.run(device, &plan, &sources)?;
            }
        }
        // What unpacks runs where it is planned: for many rows.
        if wanted_unpack(case, wanted) {
            let problem = MatmulProblem { m: 65, norm: None, ..case.problem() };
            let many = PackedCase { case: Case { problem, ..case.case.clone() }, layout: case.layout };
            case_of_many(device, &many)?;
        }
    }
    Ok(())
}

fn wanted_unpack(case: &PackedCase, wanted: Wanted<'_>) -> bool {
    abi::ops::matmul::UNPACK_VARIANTS.iter().any(|variant| {
        (variant.dtype, variant.codes) == (case.case.problem.dtype, case.layout.codes)
            && wanted(variant.entry)
    })
}

pub(super) fn case_of_many(device: &Device, case: &PackedCase) -> Result<(), TestCaseError> {
    let plan = Matmul::plan(device, case.problem()).map_err(fail)?;
    case.run(device, &plan, &case.sources())
}

/// The kernels of plain matrices are the other tests'.
pub(super) fn is_packed(entry: &str) -> bool {
    entry.contains("packed") || entry.contains("unpack")
}

/// Sizes of 0 through every kernel.
pub(super) fn nothing() -> Result<(), TestCaseError> {
    for (layout, dtype) in layouts().into_iter().flat_map(|layout| DType::FLOATS.map(|dtype| (layout, dtype)))
    {
        for [m, n, k] in [[0, 32, 64], [4, 0, 64], [4, 32, 0], [0, 0, 0]] {
            let source = Source::new([n, k], layout, 0);
            let problem = MatmulProblem { weight: Some(layout), ..MatmulProblem::new(m, n, k, dtype) };
            for device in &all_cards() {
                let stream = device.stream()?;
                let weight = Weight::pack(&stream, &source)?;
                let mut plans: Vec<Matmul> = packed_variants()
                    .filter_map(|variant| Matmul::plan_packed_with(device, problem, variant).ok())
                    .collect();
                // What unpacks is for many rows.
                plans.push(Matmul::plan(device, MatmulProblem { m: 65, ..problem })?);
                let a = Tensor::zeros(&stream, &[m, k], dtype)?;
                let many = Tensor::zeros(&stream, &[65 * usize::from(m > 0), k], dtype)?;
                for (index, plan) in plans.iter().enumerate() {
                    let a = if index + 1 == plans.len() { &many } else { &a };
                    let rows = a.shape()[0];
                    let mut out = Rows::output(&stream, dtype, rows, n, Layout::default())?;
                    let what = format!("{layout:?} {rows} {n} {k} {}", plan.report().variant);
                    let args = MatmulArgs::new(a.view(), &weight, out.view_mut());
                    plan.run(&stream, args).map_err(|error| fail(format!("{what}: {error}")))?;
                    assert_eq!(out.read(&stream)?, vec![0.0; rows * n], "{what}");
                }
            }
        }
    }
    expect_loaded(abi::ops::entries("matmul").filter(|entry| is_packed(entry)))
}

#[test]
fn every_packed_kernel_is_simulated() -> Result<(), TestCaseError> {
    let entries = abi::ops::entries("matmul").filter(|entry| is_packed(entry));
    let cases = prop_oneof![2 => packed(), 1 => packed_row()];
    every_kernel_of(entries, cases, |case| 4 * work(case), run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(64))]

    /// What `plan` chooses, on every device.
    #[test]
    fn packed_planned((case, on) in on_executors(packed, work)) {
        let sources = case.sources();
        for device in &on.devices() {
            let plan = Matmul::plan(device, case.problem()).map_err(fail)?;
            case.run(device, &plan, &sources)?;
        }
    }

    /// One row, perhaps normed first: on the CPU, and on Hopper where a kernel takes the layout. Without the norm it
    /// has the bits that it has among others.
    #[test]
    fn packed_normed_rows((case, on) in on_executors(packed_row, |case| 2 * work(case))) {
        let (sources, problem) = (case.sources(), case.problem());
        for device in &on.devices() {
            let fits = Matmul::supports(device, &problem).is_ok();
            let ahead = PACKED_AHEAD_VARIANTS.iter().any(|variant| {
                Matmul::plan_packed_with(device, problem, variant).is_ok()
            });
            prop_assert_eq!(fits, ahead || device.limits().is_none() || problem.norm.is_none(), "{:?}", device);
            if device.limits().is_some_and(|limits| limits.floor == Arch::Sm90a) && case.layout.is_wide() {
                prop_assert!(ahead, "{:?}", device);
            }
            if fits {
                let plan = Matmul::plan(device, problem).map_err(fail)?;
                case.run(device, &plan, &sources)?;
            }
            if device.limits().is_some() && ahead && problem.norm.is_none() {
                let weight = case.pack(device, &sources)?;
                let inputs = case.inputs(&sources, false);
                let run = |m| {
                    let plan = Matmul::plan(device, MatmulProblem { m, ..problem }).map_err(fail)?;
                    let rows = |values: &Vec<f64>| values.repeat(m);
                    let inputs = Inputs {
                        a: rows(&inputs.a),
                        residual: inputs.residual.as_ref().map(rows),
                        ..inputs.clone()
                    };
                    let problem = MatmulProblem { m, ..case.case.problem };
                    product_of(device, &plan, &Case { problem, ..case.case.clone() }, &inputs, Some(&weight))
                };
                prop_assert_eq!(&run(1)?[..], &run(3)?[..problem.n], "{:?}", device);
            }
        }
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_packed_variant((case, on) in on_executors(packed, |case| 4 * work(case))) {
        run_variants(&on.cards(), &case, EVERY)?;
    }
}

/// More rows than the kernels of few rows take: stripes are unpacked, also where the last is short.
#[test]
fn packed_stripes() -> Result<(), TestCaseError> {
    for (i, layout) in layouts().into_iter().step_by(37).enumerate() {
        let dtype = DType::FLOATS[i % 3];
        for act in [Act::None, Act::Gated(Activation::Silu)] {
            let epilogue = Epilogue { act, residual: true, ..Epilogue::NONE };
            let problem =
                MatmulProblem { epilogue, weight: Some(layout), ..MatmulProblem::new(70, 40, 200, dtype) };
            let case = PackedCase { case: contiguous(problem, i as u64), layout };
            for device in devices_for(work(&case)) {
                case_of_many(&device, &case)?;
                // The same in stripes of 16 columns, the last of 8.
                if let Some(limits) = device.limits() {
                    let choices = select_packed(&limits, &case.problem(), &layout);
                    let choices = PackedChoices { stripe: 16, ..choices };
                    let plan = Matmul::plan_packed(&device, case.problem(), choices).map_err(fail)?;
                    case.run(&device, &plan, &case.sources())?;
                }
            }
        }
    }
    Ok(())
}

/// Rows of few rows' kernels are independent of each other, and of how many there are. fp8 with small groups has none
/// on tensor cores.
#[test]
fn packed_rows_are_independent() -> Result<(), TestCaseError> {
    let mut layouts = layouts();
    // 16 bits are read as they are packed for two rows alone.
    let of_kind = |layout: &WeightLayout| match layout.codes {
        Codes::E4m3 => layout.is_wide(),
        codes => codes != Codes::E6m9,
    };
    layouts.retain(|layout| layout.rows == 1 && of_kind(layout));
    for (i, layout) in layouts.into_iter().step_by(11).enumerate() {
        let dtype = [DType::BF16, DType::F16][i % 2];
        let (m, n, k) = (40, 48, 512);
        let problem = MatmulProblem { weight: Some(layout), ..MatmulProblem::new(m, n, k, dtype) };
        let case = PackedCase { case: contiguous(problem, i as u64), layout };
        let sources = case.sources();
        for device in cards_of(abi::Arch::Sm80) {
            let stream = device.stream().map_err(fail)?;
            let weight = Weight::pack(&stream, &sources[0]).map_err(fail)?;
            let plan = Matmul::plan(&device, problem).map_err(fail)?;
            let inputs = inputs(&case.case);
            let all = product_of(&device, &plan, &case.case, &inputs, Some(&weight))?;
            for rows in [1, 9, 17] {
                let part = Case { problem: MatmulProblem { m: rows, ..problem }, ..case.case.clone() };
                let alone =
                    product_of(&device, &plan, &part, &inputs.rows(3..3 + rows, &problem), Some(&weight))?;
                prop_assert_eq!(&all[3 * n..(3 + rows) * n], &alone[..], "{} rows of {:?}", rows, layout);
            }
        }
    }
    Ok(())
}

/// One row takes the kernel that reads weights ahead where it lies at multiples of 16 bytes.
#[test]
fn packed_weights_are_read_ahead() -> Result<(), Error> {
    let layout = WeightLayout {
        codes: Codes::Int4,
        group: 64,
        rows: 1,
        scale: ScaleType::F16,
        zeros: false,
        minimums: false,
        permuted: false,
    };
    let (n, k) = (72, 256);
    for (offset, rows, wanted) in [
        (0, 1, "matmul_bf16_int4__packedahead__sm90a"),
        (1, 1, "matmul_bf16_int4__packed1__sm61"),
        (0, 2, "matmul_bf16_int4__packed8__sm80"),
    ] {
        let card = Arc::new(Card::new(Arch::Sm90a));
        let device = Device::simulated(card.clone())?;
        let stream = device.stream()?;
        let weight = Weight::pack(&stream, &Source::new([n, k], layout, 3))?;
        let a = Tensor::zeros(&stream, &[offset + rows * k], DType::BF16)?;
        let a = a.view().slice(0, offset..offset + rows * k)?.reshape(&[rows, k])?;
        let mut out = Tensor::empty(&stream, &[rows, n], DType::BF16)?;
        let problem = MatmulProblem { weight: Some(layout), ..MatmulProblem::new(4, n, k, DType::BF16) };
        let plan = Matmul::plan(&device, problem)?;
        plan.run(&stream, MatmulArgs::new(a, &weight, out.view_mut()))?;
        assert_eq!(card.launched().into_iter().collect::<Vec<_>>(), [wanted]);
        assert!(out.to_vec::<bf16>(&stream)?.iter().all(|value| value.to_f32() == 0.0));
    }
    Ok(())
}

/// What does not fit is an error that says so.
#[test]
fn packed_mistakes() -> Result<(), Error> {
    let device = Device::cpu();
    let stream = device.stream()?;
    let layout = WeightLayout {
        codes: Codes::Int4,
        group: 32,
        rows: 1,
        scale: ScaleType::F16,
        zeros: false,
        minimums: false,
        permuted: false,
    };
    let weight = Weight::pack(&stream, &Source::new([32, 64], layout, 1))?;
    let problem = MatmulProblem { weight: Some(layout), ..MatmulProblem::new(2, 32, 64, DType::F32) };
    let a = warpforge::Tensor::zeros(&stream, &[2, 64], DType::F32)?;
    let b = warpforge::Tensor::zeros(&stream, &[32, 64], DType::F32)?;
    let mut out = warpforge::Tensor::empty(&stream, &[2, 32], DType::F32)?;
    let mut refused = |problem: MatmulProblem, b: MatmulB<'_>, expected: &str| {
        let result = Matmul::plan(&device, problem)
            .and_then(|plan| plan.run(&stream, MatmulArgs::new(a.view(), b, out.view_mut())));
        let message = result.expect_err(expected).to_string();
        assert!(message.starts_with("matmul: ") && message.contains(expected), "{message}");
    };
    refused(problem, b.view().into(), "a packed weight, as planned");
    refused(MatmulProblem { weight: None, ..problem }, (&weight).into(), "a matrix, as planned");
    let other = WeightLayout { group: 64, ..layout };
    refused(MatmulProblem { weight: Some(other), ..problem }, (&weight).into(), "as planned");
    refused(MatmulProblem { n: 16, ..problem }, (&weight).into(), "experts, rows and columns [1, 16, 64]");
    refused(MatmulProblem { batch: 2, ..problem }, (&weight).into(), "batch 1");
    let bad = WeightLayout { group: 24, ..layout };
    refused(MatmulProblem { weight: Some(bad), ..problem }, (&weight).into(), "a group of 16, 32");
    let message = Weight::pack(&stream, &Source::new([32, 64], WeightLayout { group: 8, ..layout }, 1));
    assert!(message.expect_err("a group of 8").to_string().contains("a group of 16, 32"));
    Ok(())
}
