//! Products of int8 by int8, of rows that become int8: the bits of the operators that they are made of, and near the
//! formula.

use proptest::prelude::*;
use proptest::sample::select;
use testkit::strategies::{Values, any_values, dims_from, fill};
use warpforge::ops::glu::{Activation, Glu, GluArgs, GluProblem};
use warpforge::ops::matmul::{
    Act, Activations, Bias, Epilogue, Matmul, MatmulArgs, MatmulB, MatmulProblem, Residual,
};
use warpforge::ops::matmul_i8::{
    MatmulI8, MatmulI8Args, MatmulI8Problem, QuantizeRows, QuantizeRowsArgs, QuantizeRowsProblem,
};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{Layout, Rows, devices, fail, floats, on_executors, values};

#[derive(Clone, Debug)]
struct Case {
    problem: MatmulProblem,
    a: Layout,
    out: Layout,
    kind: Values,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let act = select(vec![Act::None, Act::Of(Activation::GeluTanh), Act::Gated(Activation::Silu)]);
    let place = || {
        (prop_oneof![2 => Just(0usize), 1 => 1usize..9], 0usize..9)
            .prop_map(|(padding, offset)| Layout { padding, offset })
    };
    let m = prop_oneof![2 => 1usize..20, 1 => 20usize..90];
    let sizes = (floats(), m, dims_from(1, &[16, 64], 90), dims_from(1, &[16, 128], 300));
    (sizes, act, (any::<bool>(), any::<bool>()), (place(), place()), any_values(), any::<u64>()).prop_map(
        |((dtype, m, n, k), act, (has_bias, to_f32), (a, out), kind, seed)| {
            let bias = if has_bias { Bias::PerColumn } else { Bias::None };
            let is_bare = act == Act::None && !has_bias;
            let problem = MatmulProblem {
                bias,
                epilogue: Epilogue::of(act),
                activations: Activations::Int8,
                out_dtype: if is_bare && to_f32 { DType::F32 } else { dtype },
                ..MatmulProblem::new(m, n, k, dtype)
            };
            Case { problem, a, out, kind, seed }
        },
    )
}

impl Case {
    fn rows_of_b(&self) -> usize {
        let gated = matches!(self.problem.epilogue.act, Act::Gated(_));
        self.problem.n * if gated { 2 } else { 1 }
    }

    fn work(&self) -> usize {
        let MatmulProblem { m, k, .. } = self.problem;
        m.next_multiple_of(64) * self.rows_of_b().next_multiple_of(64) * (k + 100) / 8 + m * k * 20
    }

    /// What the operators make of it that are its parts, and what it makes by itself.
    fn run(&self, device: &Device) -> Result<[Vec<f64>; 2], TestCaseError> {
        let Case { problem, a, out, kind, seed } = *self;
        let MatmulProblem { m, n, k, dtype, out_dtype, bias, .. } = problem;
        let (stream, b_rows) = (device.stream()?, self.rows_of_b());
        let a = Rows::input(&stream, dtype, &values(kind, dtype, m * k, seed), k, a).map_err(fail)?;
        let codes: Vec<i8> =
            fill(Values::Normal, DType::I8, b_rows * k, seed ^ 1).iter().map(|&code| code as i8).collect();
        let codes = Tensor::from_slice(&stream, &[b_rows, k], &codes)?;
        let scales: Vec<f32> = (0..b_rows).map(|row| 0.001 * (1 + row % 7) as f32).collect();
        let scales = Tensor::from_slice(&stream, &[b_rows], &scales)?;
        let columns = Rows::input(
            &stream,
            dtype,
            &values(Values::Normal, dtype, b_rows, seed ^ 2),
            b_rows,
            Layout::default(),
        )
        .map_err(fail)?;
        let columns = columns.view().reshape(&[b_rows])?;
        let columns = (bias == Bias::PerColumn).then_some(columns);

        let mut q = Tensor::empty(&stream, &[m, k], DType::I8)?;
        let mut scale = Tensor::empty(&stream, &[m], DType::F32)?;
        let mut sums = Rows::output(&stream, out_dtype, m, b_rows, Layout::default()).map_err(fail)?;
        QuantizeRows::plan(device, QuantizeRowsProblem::new(m, k, dtype))?
            .run(&stream, QuantizeRowsArgs::new(a.view(), q.view_mut(), scale.view_mut()))?;
        let product = MatmulI8Problem { bias, ..MatmulI8Problem::new(m, b_rows, k, out_dtype) };
        let args = MatmulI8Args::new(q.view(), codes.view(), scale.view(), scales.view(), sums.view_mut());
        MatmulI8::plan(device, product)?.run(&stream, MatmulI8Args { bias: columns, ..args })?;
        let mut parts = Rows::output(&stream, out_dtype, m, n, Layout::default()).map_err(fail)?;
        let want = match problem.epilogue.act {
            Act::None => sums.read(&stream)?,
            Act::Of(activation) | Act::Gated(activation) => {
                let gated = b_rows > n;
                let gate = sums.view().slice(1, 0..n)?;
                let up = if gated { Some(sums.view().slice(1, n..2 * n)?) } else { None };
                Glu::plan(device, GluProblem::new(m, n, dtype, activation))?
                    .run(&stream, GluArgs { gate, up, out: parts.view_mut() })?;
                parts.read(&stream)?
            }
        };

        let mut out = Rows::output(&stream, out_dtype, m, n, out).map_err(fail)?;
        let b = MatmulB::Int8 { codes: codes.view(), scales: scales.view() };
        let args = MatmulArgs { bias: columns, ..MatmulArgs::new(a.view(), b, out.view_mut()) };
        Matmul::plan(device, problem)?.run(&stream, args)?;
        Ok([want, out.read(&stream)?])
    }
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(64))]

    /// The bits are those of the parts on every device, and the same on all of them but for the activation.
    #[test]
    fn int8_planned((case, on) in on_executors(case, Case::work)) {
        let mut known: Option<Vec<u64>> = None;
        for device in &on.devices() {
            let [want, got] = case.run(device)?.map(|values| {
                // Any NaN is as good as another.
                values.iter().map(|value| if value.is_nan() { f64::NAN } else { *value }.to_bits()).collect::<Vec<u64>>()
            });
            prop_assert_eq!(&got, &want, "{:?}", device);
            if case.problem.epilogue.act == Act::None {
                prop_assert_eq!(known.get_or_insert_with(|| got.clone()), &got, "{:?}", device);
            }
        }
    }
}

/// A row has the same bits alone and among others; fewer rows than planned are fine, and none.
#[test]
fn int8_rows_are_independent() -> Result<(), Error> {
    let (m, n, k) = (40, 48, 136);
    let epilogue = Epilogue::of(Act::Gated(Activation::Silu));
    let problem = MatmulProblem {
        epilogue,
        activations: Activations::Int8,
        ..MatmulProblem::new(m, n, k, DType::BF16)
    };
    for device in &devices() {
        let stream = device.stream()?;
        let plan = Matmul::plan(device, problem)?;
        let a = values(Values::Normal, DType::BF16, m * k, 5);
        let a = Rows::input(&stream, DType::BF16, &a, k, Layout::default())?;
        let codes: Vec<i8> = (0..2 * n * k).map(|i| (i * 37 % 255) as u8 as i8).collect();
        let codes = Tensor::from_slice(&stream, &[2 * n, k], &codes)?;
        let scales = Tensor::from_slice(&stream, &[2 * n], &vec![0.004f32; 2 * n])?;
        let run = |rows: std::ops::Range<usize>| -> Result<Vec<half::bf16>, Error> {
            let mut out = Tensor::zeros(&stream, &[rows.len(), n], DType::BF16)?;
            let b = MatmulB::Int8 { codes: codes.view(), scales: scales.view() };
            plan.run(&stream, MatmulArgs::new(a.view().slice(0, rows)?, b, out.view_mut()))?;
            out.to_vec(&stream)
        };
        let all = run(0..m)?;
        assert!(all.iter().any(|value| value.to_f32() != 0.0));
        for rows in [0..1, 17..18, 3..19, 20..40, 7..7] {
            assert_eq!(run(rows.clone())?, all[rows.start * n..rows.end * n], "{device:?} {rows:?}");
        }
    }
    Ok(())
}

/// Sizes of 0: nothing to do, or empty sums.
#[test]
fn int8_nothing() -> Result<(), TestCaseError> {
    for device in &devices() {
        let stream = device.stream()?;
        for act in [Act::None, Act::Gated(Activation::Silu)] {
            for [m, n, k] in [[0, 8, 16], [3, 0, 16], [3, 8, 0], [0, 0, 0]] {
                let problem = MatmulProblem {
                    epilogue: Epilogue::of(act),
                    activations: Activations::Int8,
                    ..MatmulProblem::new(m, n, k, DType::BF16)
                };
                let b_rows = if act == Act::None { n } else { 2 * n };
                let a = Tensor::zeros(&stream, &[m, k], DType::BF16)?;
                let codes = Tensor::zeros(&stream, &[b_rows, k], DType::I8)?;
                let scales = Tensor::zeros(&stream, &[b_rows], DType::F32)?;
                let mut out = Rows::output(&stream, DType::BF16, m, n, Layout::default())?;
                let b = MatmulB::Int8 { codes: codes.view(), scales: scales.view() };
                Matmul::plan(device, problem)?.run(&stream, MatmulArgs::new(a.view(), b, out.view_mut()))?;
                prop_assert_eq!(out.read(&stream)?, vec![0.0; m * n], "{:?} {:?}", device, [m, n, k]);
            }
        }
    }
    Ok(())
}

/// What is not done, and what does not fit, is an error that says so.
#[test]
fn int8_mistakes() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem =
            MatmulProblem { activations: Activations::Int8, ..MatmulProblem::new(2, 32, 64, DType::BF16) };
        let refused = |problem: MatmulProblem, expected: &str| {
            let message = Matmul::supports(device, &problem).expect_err(expected).to_string();
            assert!(message.contains(expected) && message.contains("of int8 by int8"), "{message}");
        };
        refused(MatmulProblem { batch: 2, ..problem }, "problem: expected batch 1");
        let residual = Epilogue { residual: true, ..Epilogue::NONE };
        refused(MatmulProblem { epilogue: residual, ..problem }, "no packed weight, norm, residual or scale");
        let scaled = Epilogue { scale: 2.0, ..Epilogue::NONE };
        refused(MatmulProblem { epilogue: scaled, ..problem }, "no packed weight, norm, residual or scale");
        let bias = Bias::PerColumn;
        refused(MatmulProblem { out_dtype: DType::F32, bias, ..problem }, "out_dtype as of a");

        let plan = Matmul::plan(device, problem)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let (a, b) = (tensor(&[2, 64], DType::BF16)?, tensor(&[32, 64], DType::BF16)?);
        let (codes, scales) = (tensor(&[32, 64], DType::I8)?, tensor(&[32], DType::F32)?);
        let mut out = tensor(&[2, 32], DType::BF16)?;
        let mut says = |args: &dyn Fn(MatmulArgs<'_>) -> Result<(), Error>,
                        b: MatmulB<'_>,
                        expected: &str| {
            let message = args(MatmulArgs::new(a.view(), b, out.view_mut())).expect_err(expected).to_string();
            assert!(message.starts_with("matmul: ") && message.contains(expected), "{message}");
        };
        let plain = |args: MatmulArgs<'_>| plan.run(&stream, args);
        let int8 = MatmulB::Int8 { codes: codes.view(), scales: scales.view() };
        says(&plain, b.view().into(), "b: expected int8 weights, as planned, got a matrix");
        let short = codes.view().slice(0, 0..31)?;
        says(&plain, MatmulB::Int8 { codes: short, scales: scales.view() }, "b: expected shape [32, 64]");
        let other = scales.view().slice(0, 0..31)?;
        says(
            &plain,
            MatmulB::Int8 { codes: codes.view(), scales: other },
            "scales of b: expected shape [32]",
        );
        let added = |args: MatmulArgs<'_>| {
            plan.run(&stream, MatmulArgs { residual: Some(Residual::InPlace), ..args })
        };
        says(&added, int8, "residual: expected none, as planned");
        let floats = Matmul::plan(device, MatmulProblem { activations: Activations::AsGiven, ..problem })?;
        let of_floats = |args: MatmulArgs<'_>| floats.run(&stream, args);
        says(&of_floats, int8, "b: expected a matrix, as planned, got int8 weights");
    }
    Ok(())
}
