//! Rows into places that are named by number, against their reference.

use abi::ops::scatter_rows::{ScatterRowsVariant, VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::{Rng, Values, any_values, dims, dims_from, stride_padding};
use warpforge::ops::Store;
use warpforge::ops::scatter_rows::{ScatterRows, ScatterRowsArgs, ScatterRowsProblem, reference};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, check, devices, every_kernel, fail, floats, on_executors, store,
    through_every_kernel, values,
};

#[derive(Clone, Debug)]
struct Case {
    problem: ScatterRowsProblem,
    num_rows: usize,
    x: Layout,
    out: Layout,
    kind: Values,
    seed: u64,
}

fn layout() -> impl Strategy<Value = Layout> {
    (stride_padding(), prop_oneof![5 => Just(0usize), 1 => 1usize..9])
        .prop_map(|(padding, offset)| Layout { padding, offset })
}

fn case() -> impl Strategy<Value = Case> {
    let sizes = (floats(), dims(&[8, 32], 70), 0usize..90, dims_from(1, &[8, 64, 1024], 2100));
    let stores = prop_oneof![Just(Store::Replace), Just(Store::Add)];
    let layouts =
        prop_oneof![layout().prop_map(|all| [all; 2]), (layout(), layout()).prop_map(|(x, o)| [x, o])];
    (sizes, stores, layouts, any_values(), any::<u64>()).prop_map(
        |((dtype, rows, num_rows, cols), store, [x, out], kind, seed)| Case {
            problem: ScatterRowsProblem { rows, cols, dtype, store },
            num_rows,
            x,
            out,
            kind,
            seed,
        },
    )
}

impl Case {
    fn work(&self) -> usize {
        5 * self.problem.rows * self.problem.cols
    }

    /// Distinct numbers in a random order, some of them beyond out.
    fn ids(&self) -> Vec<u32> {
        let mut ids: Vec<u32> = (0..(self.num_rows.max(self.problem.rows) + 3) as u32).collect();
        if let Some(last) = ids.last_mut() {
            *last = u32::MAX;
        }
        let mut rng = Rng::new(self.seed ^ 5);
        for i in (1..ids.len()).rev() {
            ids.swap(i, rng.below(i + 1));
        }
        ids.truncate(self.problem.rows);
        ids
    }
}

fn run(
    device: &Device,
    case: &Case,
    variant: Option<&'static ScatterRowsVariant>,
) -> Result<(), TestCaseError> {
    let ScatterRowsProblem { rows, cols, dtype, store: kind } = case.problem;
    let stream = device.stream().map_err(fail)?;
    let plan = match variant {
        None => ScatterRows::plan(device, case.problem),
        Some(variant) => ScatterRows::plan_with(device, case.problem, variant),
    };
    let plan = plan.map_err(fail)?;
    let (x, ids) = (values(case.kind, dtype, rows * cols, case.seed), case.ids());
    let before = values(case.kind, dtype, case.num_rows * cols, case.seed ^ 1);
    let x_rows = Rows::input(&stream, dtype, &x, cols, case.x).map_err(fail)?;
    let ids_tensor = Tensor::from_slice(&stream, &[rows], &ids).map_err(fail)?;
    let mut out = Rows::input(&stream, dtype, &before, cols, case.out).map_err(fail)?;
    let args = ScatterRowsArgs { x: x_rows.view(), ids: ids_tensor.view(), out: out.view_mut() };
    plan.run(&stream, args).map_err(fail)?;
    let (mut want, mut naive) = (before.clone(), before);
    reference::scatter_rows::<f64>(&x, &ids, &mut want, cols, kind, |v| v);
    reference::scatter_rows::<f32>(&x, &ids, &mut naive, cols, kind, store(dtype));
    let (what, got) = (plan.report().variant, out.read(&stream)?);
    if kind == Store::Replace {
        for (index, (got, want)) in std::iter::zip(&got, &want).enumerate() {
            let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            prop_assert!(same, "{what}: element {index} is {got:e}, expected {want:e}");
        }
    }
    check(what, &got, &want, &naive, &Tolerance::new(dtype, Scale::Element, 1))
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        for variant in VARIANTS.iter().filter(|variant| variant.dtype == case.problem.dtype) {
            if wanted(variant.entry) && ScatterRows::plan_with(device, case.problem, variant).is_ok() {
                run(device, case, Some(variant))?;
            }
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "scatter_rows",
        &[|case: &mut Case| case.problem.rows = 0, |case: &mut Case| case.num_rows = 0],
        case(),
        |case| 2 * case.work(),
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("scatter_rows", case(), |case| 2 * case.work(), run_variants)
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
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = ScatterRowsProblem { rows: 4, cols: 64, dtype: DType::F32, store: Store::Replace };
        let plan = ScatterRows::plan(device, problem)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |x: [usize; 2], ids: (usize, DType), out: [usize; 2]| {
            let (x, ids) = (tensor(&x, DType::F32)?, tensor(&[ids.0], ids.1)?);
            let mut out = tensor(&out, DType::F32)?;
            let args = ScatterRowsArgs { x: x.view(), ids: ids.view(), out: out.view_mut() };
            Ok::<String, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        assert_eq!(
            message([4, 65], (4, DType::U32), [9, 64])?,
            "scatter_rows: x: expected shape [any, 64], got [4, 65]"
        );
        assert_eq!(
            message([5, 64], (5, DType::U32), [9, 64])?,
            "scatter_rows: x: expected at most 4 rows, as planned, got 5"
        );
        assert_eq!(
            message([4, 64], (3, DType::U32), [9, 64])?,
            "scatter_rows: ids: expected shape [4], got [3]"
        );
        assert_eq!(message([4, 64], (4, DType::I32), [9, 64])?, "scatter_rows: ids: expected u32, got i32");
        assert_eq!(
            message([4, 64], (4, DType::U32), [9, 63])?,
            "scatter_rows: out: expected shape [any, 64], got [9, 63]"
        );
        assert_eq!(
            ScatterRows::supports(device, &ScatterRowsProblem { dtype: DType::U32, ..problem })
                .unwrap_err()
                .to_string(),
            "scatter_rows: problem: expected dtype f32, f16 or bf16, got u32"
        );
    }
    Ok(())
}
