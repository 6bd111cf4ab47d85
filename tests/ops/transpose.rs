//! Transposition against its reference, bit for bit.

use abi::ops::transpose::{TransposeVariant, VARIANTS};
use proptest::prelude::*;
use testkit::strategies::{Values, dims, stride_padding};
use warpforge::ops::transpose::{CASES, Transpose, TransposeArgs, TransposeProblem, reference};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, devices, devices_for, every_kernel, fail, on_executors,
    through_every_kernel, values,
};

const DTYPES: [DType; 6] = [DType::F32, DType::F16, DType::BF16, DType::I8, DType::I32, DType::U32];

#[derive(Clone, Debug)]
struct Case {
    problem: TransposeProblem,
    x: Layout,
    out: Layout,
    seed: u64,
}

impl Case {
    fn work(&self) -> usize {
        5 * self.problem.batch * self.problem.rows * self.problem.cols
    }
}

fn layout() -> impl Strategy<Value = Layout> {
    let padding = prop_oneof![3 => Just(0usize), 1 => stride_padding()];
    let offset = prop_oneof![4 => Just(0usize), 1 => 1usize..9];
    (padding, offset).prop_map(|(padding, offset)| Layout { padding, offset })
}

fn case() -> impl Strategy<Value = Case> {
    let size = || dims(&[32, 64, 128], 150);
    (proptest::sample::select(&DTYPES[..]), 0usize..4, size(), size(), layout(), layout(), any::<u64>())
        .prop_map(|(dtype, batch, rows, cols, x, out, seed)| Case {
            problem: TransposeProblem { batch, rows, cols, dtype },
            x,
            out,
            seed,
        })
}

/// The matrices have different sizes in every run of a case, so the plan's are upper bounds.
fn run(
    device: &Device,
    case: &Case,
    variant: Option<&'static TransposeVariant>,
) -> Result<(), TestCaseError> {
    let TransposeProblem { batch, rows, cols, dtype } = case.problem;
    let stream = device.stream().map_err(fail)?;
    let problem = TransposeProblem { batch: batch + 1, ..case.problem };
    let plan = match variant {
        None => Transpose::plan(device, problem),
        Some(variant) => Transpose::plan_with(device, problem, variant),
    };
    let plan = plan.map_err(fail)?;
    if rows == 0 || cols == 0 {
        // Rows cannot tell how many empty rows there are.
        let x = Tensor::empty(&stream, &[batch, rows, cols], dtype).map_err(fail)?;
        let mut out = Tensor::empty(&stream, &[batch, cols, rows], dtype).map_err(fail)?;
        return plan.run(&stream, TransposeArgs { x: x.view(), out: out.view_mut() }).map_err(fail);
    }
    let data = values(Values::Normal, dtype, batch * rows * cols, case.seed);
    let x = Rows::input(&stream, dtype, &data, cols, case.x).map_err(fail)?;
    let mut out = Rows::output(&stream, dtype, batch * cols, rows, case.out).map_err(fail)?;
    let args = TransposeArgs {
        x: x.view().reshape(&[batch, rows, cols]).map_err(fail)?,
        out: out.view_mut().reshape(&[batch, cols, rows]).map_err(fail)?,
    };
    plan.run(&stream, args).map_err(fail)?;
    let (got, want) = (out.read(&stream)?, reference::transpose(&data, rows, cols));
    let wrong = (0..want.len()).find(|&i| got[i].to_bits() != want[i].to_bits());
    prop_assert_eq!(wrong, None, "{}: {:?}", plan.report().variant, wrong.map(|i| (got[i], want[i])));
    Ok(())
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let element_bytes = case.problem.dtype.bytes();
    for device in cards {
        for variant in VARIANTS.iter().filter(|v| v.element_bytes == element_bytes && wanted(v.entry)) {
            run(device, case, Some(variant))?;
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "transpose",
        &[
            |case: &mut Case| case.problem.batch = 0,
            |case: &mut Case| case.problem.rows = 0,
            |case: &mut Case| case.problem.cols = 0,
        ],
        case(),
        Case::work,
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("transpose", case(), Case::work, run_variants)
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
}

/// x of which every second column is taken, and out with a gap after every element: neither has stride 1.
#[test]
fn strides_in_the_last_dimension() -> Result<(), TestCaseError> {
    let (batch, rows, cols) = (2, 67, 35);
    for dtype in DTYPES {
        for device in &devices() {
            let stream = device.stream()?;
            let data = values(Values::Normal, dtype, batch * rows * cols * 2, 3);
            let x = Rows::input(&stream, dtype, &data, 2, Layout::default())?;
            let mut out =
                Rows::output(&stream, dtype, batch * cols * rows, 1, Layout { padding: 2, offset: 1 })?;
            let args = TransposeArgs {
                x: x.view().slice(1, 1..2)?.reshape(&[batch, rows, cols])?,
                out: out.view_mut().reshape(&[batch, cols, rows])?,
            };
            Transpose::plan(device, TransposeProblem { batch, rows, cols, dtype })?.run(&stream, args)?;
            let odd: Vec<f64> = data.chunks(2).map(|pair| pair[1]).collect();
            assert_eq!(out.read(&stream)?, reference::transpose(&odd, rows, cols), "{dtype} {device:?}");
        }
    }
    Ok(())
}

/// Matrices with a gap between them, in x and in out.
#[test]
fn strides_between_matrices() -> Result<(), TestCaseError> {
    let (batch, rows, cols) = (3, 36, 70);
    for dtype in DTYPES {
        for device in &devices() {
            let stream = device.stream()?;
            let data = values(Values::Normal, dtype, batch * (rows + 4) * cols, 3);
            let x = Rows::input(&stream, dtype, &data, cols, Layout::default())?;
            let before = values(Values::Normal, dtype, batch * (cols + 8) * rows, 4);
            let mut out = Rows::input(&stream, dtype, &before, rows, Layout::default())?;
            let args = TransposeArgs {
                x: x.view().reshape(&[batch, rows + 4, cols])?.slice(1, 0..rows)?,
                out: out.view_mut().reshape(&[batch, cols + 8, rows])?.slice(1, 0..cols)?,
            };
            Transpose::plan(device, TransposeProblem { batch, rows, cols, dtype })?.run(&stream, args)?;
            let mut want = before;
            for (x, out) in std::iter::zip(data.chunks((rows + 4) * cols), want.chunks_mut((cols + 8) * rows))
            {
                let matrix = reference::transpose(&x[..rows * cols], rows, cols);
                out[..cols * rows].copy_from_slice(&matrix);
            }
            assert_eq!(out.read(&stream)?, want, "{dtype} {device:?}");
        }
    }
    Ok(())
}

/// The shapes of the benches, cut down; the odd ones stay odd.
#[test]
fn cases() -> Result<(), TestCaseError> {
    for case in CASES {
        let problem = TransposeProblem {
            batch: case.batch.min(3),
            rows: case.rows.min(200 + case.rows % 2),
            cols: case.cols.min(300 + case.cols % 2),
            dtype: case.dtype,
        };
        let case = Case { problem, x: Layout::default(), out: Layout::default(), seed: 4 };
        for device in &devices_for(case.work()) {
            run(device, &case, None)?;
        }
    }
    Ok(())
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = TransposeProblem { batch: 2, rows: 3, cols: 4, dtype: DType::F16 };
        let plan = Transpose::plan(device, problem)?;
        let message = |x: &[usize], out: (&[usize], DType)| {
            let x = Tensor::zeros(&stream, x, DType::F16)?;
            let mut out = Tensor::zeros(&stream, out.0, out.1)?;
            let args = TransposeArgs { x: x.view(), out: out.view_mut() };
            Ok::<String, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        assert_eq!(
            message(&[2, 3, 4], (&[2, 3, 4], DType::F16))?,
            "transpose: out: expected shape [2, 4, 3], got [2, 3, 4]"
        );
        assert_eq!(message(&[2, 3, 4], (&[2, 4, 3], DType::BF16))?, "transpose: out: expected f16, got bf16");
        assert_eq!(
            message(&[3, 4], (&[4, 3], DType::F16))?,
            "transpose: x: expected shape [any, any, any], got [3, 4]"
        );
        assert_eq!(
            message(&[2, 4, 4], (&[2, 4, 4], DType::F16))?,
            "transpose: x: expected at most [2, 3, 4], as planned, got [2, 4, 4]"
        );
        let large = TransposeProblem { rows: 1 << 31, ..problem };
        assert_eq!(
            Transpose::supports(device, &large).unwrap_err().to_string(),
            "transpose: problem: expected rows below 2^31, got 2147483648"
        );
    }
    Ok(())
}
