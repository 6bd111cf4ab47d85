//! The int8 product and the quantisation against their references, bit for bit.

use std::collections::BTreeSet;

use abi::ops::matmul::MatmulTile;
use abi::ops::matmul_i8::{MMA_VARIANTS, MatmulI8Variant, VARIANTS, WGMMA_VARIANTS};
use proptest::prelude::*;
use testkit::compare::check_bits_eq;
use testkit::strategies::{Values, any_values, dims, dims_from, stride_padding};
use warpforge::ops::matmul::Bias;
use warpforge::ops::matmul_i8::reference;
use warpforge::ops::matmul_i8::{
    MAX_K, MatmulI8, MatmulI8Args, MatmulI8Problem, QuantizeRows, QuantizeRowsArgs, QuantizeRowsProblem,
};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, devices, devices_for, every_kernel, expect_loaded, fail, floats, is_new,
    on_executors, one_sm, runs, store, values,
};

#[derive(Clone, Debug)]
struct Case {
    problem: MatmulI8Problem,
    a_layout: Layout,
    b_layout: Layout,
    out_layout: Layout,
    kind: Values,
    seed: u64,
}

fn layout() -> impl Strategy<Value = Layout> {
    let offset = prop_oneof![3 => Just(0usize), 1 => 1usize..17];
    let padding = prop_oneof![3 => stride_padding(), 1 => Just(16usize)];
    let any = (padding, offset).prop_map(|(padding, offset)| Layout { padding, offset });
    // The tensor cores want multiples of 16 bytes.
    let in_pieces = (0usize..3, 0usize..3)
        .prop_map(|(padding, offset)| Layout { padding: 16 * padding, offset: 16 * offset });
    prop_oneof![in_pieces, any]
}

fn case() -> impl Strategy<Value = Case> {
    let m = prop_oneof![2 => dims(&[2, 4, 8], 17), 1 => dims(&[64], 140)];
    let n = dims_from(1, &[8, 64], 140);
    let k = prop_oneof![
        3 => dims_from(1, &[16, 32, 64], 200),
        3 => (1usize..=20).prop_map(|pieces| 16 * pieces),
        1 => dims_from(1, &[256, 512], 2300),
    ];
    let bias = prop_oneof![Just(Bias::None), Just(Bias::PerColumn)];
    let kinds = prop_oneof![Just(Values::Normal), Just(Values::Huge), Just(Values::Mixed)];
    ((floats(), m, n, k, bias), (layout(), layout(), layout()), kinds, any::<u64>()).prop_map(
        |((out_dtype, m, n, k, bias), (a_layout, b_layout, out_layout), kind, seed)| {
            let problem = MatmulI8Problem { m, n, k, out_dtype, bias };
            Case { problem, a_layout, b_layout, out_layout, kind, seed }
        },
    )
}

struct Inputs {
    qa: Vec<f64>,
    qb: Vec<f64>,
    a_scale: Vec<f64>,
    b_scale: Vec<f64>,
    bias: Option<Vec<f64>>,
}

/// Of few rows: a warp per column and 8 rows. Of many: tiles of 64, whose operands are read from shared memory.
fn work(problem: &MatmulI8Problem) -> usize {
    let &MatmulI8Problem { m, n, k, .. } = problem;
    m.div_ceil(8) * n * (1500 + 2 * k) + m.next_multiple_of(64) * n.next_multiple_of(64) * (k + 100) / 16
}

impl Case {
    fn work(&self) -> usize {
        work(&self.problem)
    }
}

impl Inputs {
    fn of(case: &Case) -> Self {
        let MatmulI8Problem { m, n, k, out_dtype, bias } = case.problem;
        let (kind, seed) = (case.kind, case.seed);
        let mut qa = values(kind, DType::I8, m * k, seed);
        // The one value without a counterpart.
        if let Some(last) = qa.last_mut() {
            *last = -128.0;
        }
        Inputs {
            qa,
            qb: values(kind, DType::I8, n * k, seed ^ 1),
            a_scale: values(Values::Normal, DType::F32, m, seed ^ 2),
            b_scale: values(Values::Mixed, DType::F32, n, seed ^ 3),
            bias: (bias == Bias::PerColumn).then(|| values(Values::Normal, out_dtype, n, seed ^ 4)),
        }
    }

    fn expected(&self, case: &Case) -> Vec<f64> {
        let MatmulI8Problem { k, out_dtype, .. } = case.problem;
        let int8 = |values: &[f64]| values.iter().map(|&value| value as i8).collect::<Vec<i8>>();
        let (qa, qb) = (int8(&self.qa), int8(&self.qb));
        let store = store(out_dtype);
        reference::matmul_i8::<f32>(&qa, &qb, &self.a_scale, &self.b_scale, self.bias.as_deref(), k, store)
    }
}

/// The product by a plan.
fn product(
    device: &Device,
    plan: &MatmulI8,
    case: &Case,
    inputs: &Inputs,
) -> Result<Vec<f64>, TestCaseError> {
    let MatmulI8Problem { m, n, k, out_dtype, .. } = case.problem;
    let stream = device.stream().map_err(fail)?;
    let input = |dtype, values: &[f64], cols, layout| Rows::input(&stream, dtype, values, cols, layout);
    let qa = input(DType::I8, &inputs.qa, k, case.a_layout).map_err(fail)?;
    let qb = input(DType::I8, &inputs.qb, k, case.b_layout).map_err(fail)?;
    let place = Layout::default();
    // One row each, so that the guard bands lie around it.
    let a_scale = input(DType::F32, &inputs.a_scale, m, place).map_err(fail)?;
    let b_scale = input(DType::F32, &inputs.b_scale, n, place).map_err(fail)?;
    let bias = inputs.bias.as_ref().map(|bias| input(out_dtype, bias, n, place)).transpose().map_err(fail)?;
    let bias = bias.as_ref().map(|bias| bias.view().reshape(&[n])).transpose().map_err(fail)?;
    let mut out = Rows::output(&stream, out_dtype, m, n, case.out_layout).map_err(fail)?;
    let args = MatmulI8Args {
        qa: qa.view(),
        qb: qb.view(),
        a_scale: a_scale.view().reshape(&[m]).map_err(fail)?,
        b_scale: b_scale.view().reshape(&[n]).map_err(fail)?,
        bias,
        out: out.view_mut(),
    };
    plan.run(&stream, args).map_err(fail)?;
    out.read(&stream)
}

/// Checks bits: exact f64 copies of the stored values have the same bits if those have.
fn check(what: &str, got: &[f64], want: &[f64]) -> Result<(), TestCaseError> {
    check_bits_eq(got, want).map_err(|mismatch| TestCaseError::fail(format!("{what}: {mismatch}")))
}

/// Kernels of the out type that the device can run.
fn variants(device: &Device, out_dtype: DType) -> impl Iterator<Item = &'static MatmulI8Variant> {
    VARIANTS
        .iter()
        .chain(MMA_VARIANTS)
        .chain(WGMMA_VARIANTS)
        .filter(move |variant| variant.out_dtype == out_dtype && runs(device, variant.floor))
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let inputs = Inputs::of(case);
    let mut want = None;
    for device in cards {
        for variant in variants(device, case.problem.out_dtype).filter(|v| wanted(v.entry)) {
            let plan = MatmulI8::plan_with(device, case.problem, variant).map_err(fail)?;
            let got = product(device, &plan, case, &inputs)?;
            check(variant.entry, &got, want.get_or_insert_with(|| inputs.expected(case)))?;
        }
    }
    Ok(())
}

/// Rows to be quantised.
#[derive(Clone, Debug)]
struct ToQuantize {
    problem: QuantizeRowsProblem,
    x: Layout,
    q: Layout,
    kind: Values,
    seed: u64,
}

fn to_quantize() -> impl Strategy<Value = ToQuantize> {
    let cols = prop_oneof![dims_from(1, &[8, 64], 200), dims_from(1, &[1024], 4200)];
    (floats(), dims(&[4], 20), cols, layout(), layout(), any_values(), any::<u64>()).prop_map(
        |(dtype, rows, cols, x, q, kind, seed)| ToQuantize {
            problem: QuantizeRowsProblem { rows, cols, dtype },
            x,
            q,
            kind,
            seed,
        },
    )
}

impl ToQuantize {
    /// A block of 256 threads for a row, which looks for the largest value.
    fn work(&self) -> usize {
        self.problem.rows * (256 * 60 + 3 * self.problem.cols)
    }

    fn run(&self, devices: &[Device]) -> Result<(), TestCaseError> {
        let QuantizeRowsProblem { rows, cols, dtype } = self.problem;
        let x = values(self.kind, dtype, rows * cols, self.seed);
        let (want, want_scale) = reference::quantize_rows::<f32>(&x, cols);
        let want: Vec<f64> = want.into_iter().map(f64::from).collect();
        for device in devices {
            let stream = device.stream().map_err(fail)?;
            let plan = QuantizeRows::plan(device, self.problem).map_err(fail)?;
            let x = Rows::input(&stream, dtype, &x, cols, self.x).map_err(fail)?;
            let mut q = Rows::output(&stream, DType::I8, rows, cols, self.q).map_err(fail)?;
            let mut scale = Rows::output(&stream, DType::F32, 1, rows, Layout::default()).map_err(fail)?;
            let scale_view = scale.view_mut().reshape(&[rows]).map_err(fail)?;
            let args = QuantizeRowsArgs { x: x.view(), q: q.view_mut(), scale: scale_view };
            plan.run(&stream, args).map_err(fail)?;
            check("scale", &scale.read(&stream)?, &want_scale)?;
            check("q", &q.read(&stream)?, &want)?;
        }
        Ok(())
    }
}

/// A product or a quantisation, since both are of the family.
#[derive(Clone, Debug)]
enum Either {
    Product(Case),
    Quantization(ToQuantize),
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    let cases =
        prop_oneof![3 => case().prop_map(Either::Product), 1 => to_quantize().prop_map(Either::Quantization)];
    let work = |case: &Either| match case {
        Either::Product(case) => 4 * case.work(),
        Either::Quantization(rows) => rows.work(),
    };
    every_kernel("matmul_i8", cases, work, |cards, case, wanted| match case {
        Either::Product(case) => run_variants(cards, case, wanted),
        Either::Quantization(rows) => rows.run(cards),
    })
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(128))]

    /// What `plan` chooses, on every device.
    #[test]
    fn planned((case, on) in on_executors(case, Case::work)) {
        let inputs = Inputs::of(&case);
        let want = inputs.expected(&case);
        for device in &on.devices() {
            let plan = MatmulI8::plan(device, case.problem).map_err(fail)?;
            check(plan.report().variant, &product(device, &plan, &case, &inputs)?, &want)?;
        }
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_variant((case, on) in on_executors(case, |case| 4 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// Quantised rows, on every device.
    #[test]
    fn quantized((rows, on) in on_executors(to_quantize, ToQuantize::work)) {
        rows.run(&on.devices())?;
    }
}

/// What the documentation says of zeros, ties, tiny rows, infinities and NaN.
#[test]
fn quantization_of_special_rows() -> Result<(), Error> {
    let least = f32::from_bits(1);
    let table: [([f32; 5], f32, [i8; 5]); 7] = [
        ([127.0, 0.5, 1.5, -2.5, -127.0], 1.0, [127, 0, 2, -2, -127]),
        ([-254.0, 1.0, 3.0, 253.0, 0.0], 2.0, [-127, 0, 2, 126, 0]),
        ([0.0, -0.0, 0.0, 0.0, 0.0], 0.0, [0; 5]),
        ([least, -least, 0.0, least, 0.0], 0.0, [0; 5]),
        ([f32::INFINITY, 1.0, -1.0, 0.0, 2.0], f32::INFINITY, [0; 5]),
        ([1.0, f32::NAN, 2.0, 3.0, f32::INFINITY], f32::NAN, [0; 5]),
        ([f32::MAX, -f32::MAX, 0.0, 1.0, 2.0], f32::MAX / 127.0, [127, -127, 0, 0, 0]),
    ];
    for device in &devices() {
        let stream = device.stream()?;
        let x: Vec<f32> = table.iter().flat_map(|(row, ..)| *row).collect();
        let rows = table.len();
        let plan = QuantizeRows::plan(device, QuantizeRowsProblem { rows, cols: 5, dtype: DType::F32 })?;
        let x = Tensor::from_slice(&stream, &[rows, 5], &x)?;
        let mut q = Tensor::zeros(&stream, &[rows, 5], DType::I8)?;
        let mut scale = Tensor::zeros(&stream, &[rows], DType::F32)?;
        plan.run(&stream, QuantizeRowsArgs { x: x.view(), q: q.view_mut(), scale: scale.view_mut() })?;
        let (q, scale) = (q.to_vec::<i8>(&stream)?, scale.to_vec::<f32>(&stream)?);
        for (row, (_, want_scale, want)) in table.iter().enumerate() {
            assert_eq!(q[row * 5..][..5], *want, "row {row}");
            let same = scale[row] == *want_scale || (scale[row].is_nan() && want_scale.is_nan());
            assert!(same, "row {row}: {} for {want_scale}", scale[row]);
        }
    }
    Ok(())
}

/// The longest k with the largest products of either sign fits the sum.
#[test]
fn longest_k() -> Result<(), Error> {
    // The last on tensor cores, where there are such.
    for (m, k) in [(1, MAX_K), (4, MAX_K), (20, MAX_K), (20, MAX_K / 16 * 16)] {
        let n = 2;
        let problem = MatmulI8Problem { m, n, k, out_dtype: DType::F32, bias: Bias::None };
        for device in &devices_for(work(&problem)) {
            let stream = device.stream()?;
            let qa = Tensor::from_slice(&stream, &[m, k], &vec![-128i8; m * k])?;
            let qb = [vec![-128i8; k], vec![127i8; k]].concat();
            let qb = Tensor::from_slice(&stream, &[n, k], &qb)?;
            let ones = Tensor::from_slice(&stream, &[m.max(n)], &vec![1f32; m.max(n)])?;
            let mut out = Tensor::zeros(&stream, &[m, n], DType::F32)?;
            let args = MatmulI8Args {
                qa: qa.view(),
                qb: qb.view(),
                a_scale: ones.view().slice(0, 0..m)?,
                b_scale: ones.view().slice(0, 0..n)?,
                bias: None,
                out: out.view_mut(),
            };
            MatmulI8::plan(device, problem)?.run(&stream, args)?;
            let want = [(16384 * k) as f32, (-16256 * k as i64) as f32].repeat(m);
            assert_eq!(out.to_vec::<f32>(&stream)?, want, "{m} rows of {k} on {device:?}");
        }
    }
    Ok(())
}

/// Tiles one after the other in one block, or in one cluster, are right too, beyond a ring of stages.
#[test]
fn tiles_of_one_block() -> Result<(), TestCaseError> {
    for variant in WGMMA_VARIANTS.iter().filter(|variant| matches!(variant.tile, MatmulTile::Wgmma { .. })) {
        // Two tiles of the largest kind by two, more of the others; two steps of k.
        let problem =
            MatmulI8Problem { m: 130, n: 264, k: 144, out_dtype: variant.out_dtype, bias: Bias::PerColumn };
        let [a_layout, b_layout, out_layout] = [Layout::default(); 3];
        let case = Case { problem, a_layout, b_layout, out_layout, kind: Values::Mixed, seed: 5 };
        let (device, inputs) = (one_sm(), Inputs::of(&case));
        let plan = MatmulI8::plan_with(&device, problem, variant).map_err(fail)?;
        check(variant.entry, &product(&device, &plan, &case, &inputs)?, &inputs.expected(&case))?;
    }
    Ok(())
}

/// Blocks that share k: some without a step, and more steps than a ring has stages; rows below and beyond a tile's,
/// columns that fill no block's part.
#[test]
fn parts_of_k() -> Result<(), TestCaseError> {
    for ([m, n, k], out_dtype) in [
        ([20, 72, 16], DType::BF16),
        ([64, 130, 400], DType::F16),
        ([33, 136, 3712], DType::F32),
        ([70, 24, 528], DType::BF16),
    ] {
        let problem = MatmulI8Problem { m, n, k, out_dtype, bias: Bias::PerColumn };
        let [a_layout, b_layout, out_layout] = [Layout::default(); 3];
        let case = Case { problem, a_layout, b_layout, out_layout, kind: Values::Mixed, seed: 5 };
        run_variants(&devices_for(work(&problem)), &case, &|entry| entry.contains("k4__"))?;
    }
    Ok(())
}

/// Sizes of 0 and 1 through every kernel, also where no plan would choose it: an empty sum is 0, and an empty product
/// nothing.
pub fn nothing() -> Result<(), TestCaseError> {
    let sizes = [0, 1, 40]
        .into_iter()
        .flat_map(|m| [0, 1, 70].into_iter().flat_map(move |n| [0, 1].map(|k| [m, n, k])));
    let mut done = BTreeSet::new();
    for device in &devices() {
        let stream = device.stream()?;
        for ([m, n, k], dtype) in sizes.clone().flat_map(|sizes| DType::FLOATS.map(|dtype| (sizes, dtype))) {
            let problem = MatmulI8Problem { m, n, k, out_dtype: dtype, bias: Bias::PerColumn };
            let ones =
                |shape: &[usize]| Tensor::from_slice(&stream, shape, &vec![1i8; shape.iter().product()]);
            let scales = |len: usize| Tensor::from_slice(&stream, &[len], &vec![2f32; len]);
            let (qa, qb, a_scale, b_scale) = (ones(&[m, k])?, ones(&[n, k])?, scales(m)?, scales(n)?);
            let floats = |shape: &[usize], value: f64| {
                let values = vec![value; shape.iter().product()];
                Tensor::from_bytes(&stream, shape, dtype, &testkit::round::encode(dtype, &values))
            };
            let bias = floats(&[n], 1.5)?;
            for variant in std::iter::once(None).chain(variants(device, dtype).map(Some)) {
                if variant.is_some_and(|variant| !is_new(device, &mut done, (variant.entry, [m, n, k]))) {
                    continue;
                }
                let plan = match variant {
                    None => MatmulI8::plan(device, problem)?,
                    Some(variant) => MatmulI8::plan_with(device, problem, variant)?,
                };
                let mut out = floats(&[m, n], -1.0)?;
                let args = MatmulI8Args {
                    qa: qa.view(),
                    qb: qb.view(),
                    a_scale: a_scale.view(),
                    b_scale: b_scale.view(),
                    bias: Some(bias.view()),
                    out: out.view_mut(),
                };
                plan.run(&stream, args)?;
                let want = vec![1.5 + 4.0 * k as f32; m * n];
                assert_eq!(out.to_f32_vec(&stream)?, want, "{m} {n} {k} {}", plan.report().variant);
            }
        }
        for ([rows, cols], dtype) in
            [[0, 4], [4, 0], [0, 0]].into_iter().flat_map(|sizes| DType::FLOATS.map(|dtype| (sizes, dtype)))
        {
            let plan = QuantizeRows::plan(device, QuantizeRowsProblem { rows, cols, dtype })?;
            let x = Tensor::zeros(&stream, &[rows, cols], dtype)?;
            let mut q = Tensor::zeros(&stream, &[rows, cols], DType::I8)?;
            let mut scale = Tensor::from_slice(&stream, &[rows], &vec![7f32; rows])?;
            plan.run(&stream, QuantizeRowsArgs { x: x.view(), q: q.view_mut(), scale: scale.view_mut() })?;
            assert_eq!(scale.to_vec::<f32>(&stream)?, vec![0.0; rows]);
        }
    }
    expect_loaded(abi::ops::entries("matmul_i8"))
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = MatmulI8Problem { m: 4, n: 6, k: 8, out_dtype: DType::F32, bias: Bias::None };
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let plan = MatmulI8::plan(device, problem)?;
        let message = |qa: &Tensor, qb: &Tensor, a_scale: &Tensor, b_scale: &Tensor, out: &mut Tensor| {
            let args = MatmulI8Args {
                qa: qa.view(),
                qb: qb.view(),
                a_scale: a_scale.view(),
                b_scale: b_scale.view(),
                bias: None,
                out: out.view_mut(),
            };
            plan.run(&stream, args).unwrap_err().to_string()
        };
        let (qa, qb) = (tensor(&[4, 8], DType::I8)?, tensor(&[6, 8], DType::I8)?);
        let (a_scale, b_scale) = (tensor(&[4], DType::F32)?, tensor(&[6], DType::F32)?);
        let mut out = tensor(&[4, 6], DType::F32)?;
        assert_eq!(
            message(&tensor(&[4, 8], DType::BF16)?, &qb, &a_scale, &b_scale, &mut out),
            "matmul_i8: qa: expected i8, got bf16"
        );
        assert_eq!(
            message(&tensor(&[5, 8], DType::I8)?, &qb, &a_scale, &b_scale, &mut out),
            "matmul_i8: qa: expected at most 4 rows, as planned, got 5"
        );
        assert_eq!(
            message(&qa, &tensor(&[6, 9], DType::I8)?, &a_scale, &b_scale, &mut out),
            "matmul_i8: qb: expected shape [6, 8], got [6, 9]"
        );
        assert_eq!(
            message(&qa, &qb, &b_scale, &b_scale, &mut out),
            "matmul_i8: a_scale: expected shape [4], got [6]"
        );
        assert_eq!(
            message(&qa, &qb, &a_scale, &tensor(&[6], DType::F16)?, &mut out),
            "matmul_i8: b_scale: expected f32, got f16"
        );
        assert_eq!(
            message(&qa, &qb, &a_scale, &b_scale, &mut tensor(&[4, 7], DType::F32)?),
            "matmul_i8: out: expected shape [4, 6], got [4, 7]"
        );
        let unsupported =
            |problem: MatmulI8Problem| MatmulI8::supports(device, &problem).unwrap_err().to_string();
        assert_eq!(
            unsupported(MatmulI8Problem { k: MAX_K + 1, ..problem }),
            "matmul_i8: problem: expected k of at most 131071, so that no sum overflows, got 131072"
        );
        assert_eq!(
            unsupported(MatmulI8Problem { out_dtype: DType::I32, ..problem }),
            "matmul_i8: problem: expected out_dtype f32, f16 or bf16, got i32"
        );
        let plan = QuantizeRows::plan(device, QuantizeRowsProblem { rows: 4, cols: 8, dtype: DType::F32 })?;
        let x = tensor(&[4, 8], DType::F32)?;
        let mut q = tensor(&[4, 9], DType::I8)?;
        let mut scale = tensor(&[4], DType::F32)?;
        let args = QuantizeRowsArgs { x: x.view(), q: q.view_mut(), scale: scale.view_mut() };
        assert_eq!(
            plan.run(&stream, args).unwrap_err().to_string(),
            "quantize_rows: q: expected shape [4, 8], got [4, 9]"
        );
        assert_eq!(
            QuantizeRows::supports(device, &QuantizeRowsProblem { rows: 1, cols: 1, dtype: DType::I8 })
                .unwrap_err()
                .to_string(),
            "quantize_rows: problem: expected dtype f32, f16 or bf16, got i8"
        );
    }
    Ok(())
}
