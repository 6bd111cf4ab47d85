//! The matrix product against its reference.

mod case;
mod fp8;
mod int8;
mod mistakes;
pub(crate) mod packed;
mod permute;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;

use abi::Need;
use abi::ops::matmul::{MatmulTile, MatmulVariant};
use abi::weight::{Codes, Layout as WeightLayout, ScaleType};
use half::bf16;
use proptest::prelude::*;
use testkit::simulator::Card;
use warpforge::ops::glu::Activation;
use warpforge::ops::matmul::{
    Act, Bias, Epilogue, Matmul, MatmulArgs, MatmulB, MatmulProblem, Precision, RowNorm, reference,
};
use warpforge::ops::rmsnorm::NormWeight;
use warpforge::weight::Weight;
use warpforge::{Arch, Constant, DType, Device, Error, Tensor, TensorView};

use crate::harness::{
    EVERY, Layout, Rows, cards_of, devices, devices_for, every_kernel_of, expect_loaded, fail, is_new,
    is_simulated, on_executors, one_sm, runs,
};
use case::*;

/// The kernels of this file; the other tests have the others.
fn of_matrices(entry: &str) -> bool {
    !packed::is_packed(entry) && !fp8::is_fp8(entry) && !permute::is_permutation(entry)
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    let plain = abi::ops::entries("matmul").filter(|entry| of_matrices(entry));
    let cases = prop_oneof![3 => case(), 1 => normed_rows()];
    every_kernel_of(plain, cases, |case| 16 * case.work(), run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(128))]

    /// What `plan` chooses, on every device.
    #[test]
    fn planned((case, on) in on_executors(case, Case::work)) {
        let inputs = inputs(&case);
        let expected = Expected::of(&case.problem, &inputs);
        for device in &on.devices() {
            let plan = plan(device, case.problem, None)?;
            let got = product(device, &plan, &case, &inputs)?;
            expected.check(plan.report().variant, &got, &case.problem)?;
        }
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_variant((case, on) in on_executors(case, |case| 4 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// The same with operands in pieces, which the tensor cores' kernels take: one of the kernels for each case.
    #[test]
    fn a_variant_aligned((case, on) in on_executors(aligned, |case| 4 * case.work())) {
        for card in on.cards() {
            let fits: Vec<_> = variants(&case.problem).filter(|variant| runs(&card, variant.floor)).collect();
            let chosen = fits[case.seed as usize / 6 % fits.len()].entry;
            run_variants(&[card], &case, &|entry| entry == chosen)?;
        }
    }

    /// Rows that are normed first, where that can be done: on the CPU, one row on Hopper, and more of bf16 where there
    /// are tensor cores.
    #[test]
    fn normed((case, on) in on_executors(normed_rows, Case::work)) {
        let inputs = inputs(&case);
        let expected = Expected::of(&case.problem, &inputs);
        let MatmulProblem { m, k, dtype, .. } = case.problem;
        for device in &on.devices() {
            let fits = Matmul::supports(device, &case.problem).is_ok();
            let wanted = device.limits().is_none_or(|limits| match m {
                1 => limits.floor == Arch::Sm90a,
                _ => dtype == DType::BF16 && limits.floor.has(Need::MmaSync),
            });
            // A longer row is not always all on its way before the wait, nor multiplied in two turns.
            if device.limits().is_none() || k <= 256 || m == 1 && k <= 1024 {
                prop_assert_eq!(fits, wanted, "{:?}", device);
            }
            if fits {
                let plan = plan(device, case.problem, None)?;
                let got = product(device, &plan, &case, &inputs)?;
                expected.check(plan.report().variant, &got, &case.problem)?;
            }
        }
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// A row that is normed gives the same bits alone and among others, wherever those lie.
    #[test]
    fn normed_rows_are_independent((case, on) in on_executors(normed_rows, |case| 2 * case.work())) {
        let problem = MatmulProblem { m: RowNorm::MAX_ROWS, ..case.problem };
        let MatmulProblem { n, .. } = problem;
        let inputs = inputs(&case);
        for device in on.devices().iter().filter(|device| Matmul::supports(device, &problem).is_ok()) {
            let plan = plan(device, problem, None)?;
            let all = product(device, &plan, &case, &inputs)?;
            let row = case.seed as usize / 7 % case.problem.m;
            let alone = Case { problem: MatmulProblem { m: 1, ..case.problem }, ..case.clone() };
            let got = product(device, &plan, &alone, &inputs.rows(row..row + 1, &problem))?;
            prop_assert_eq!(&got[..], &all[row * n..(row + 1) * n], "row {} on {:?}", row, device);
        }
    }

    /// Several products at once, stacked or with their rows in turns.
    #[test]
    fn several_products((case, on) in on_executors(batched, |(case, _)| case.work())) {
        for device in &on.devices() {
            run_batched(device, &case, None)?;
        }
    }

    /// The same by every kernel that has the layers of blocks.
    #[test]
    fn several_products_by_every_variant(
        (case, on) in on_executors(batched, |(case, _)| 4 * case.work()),
    ) {
        for device in &on.cards() {
            let single = |tile| {
                matches!(
                    tile,
                    MatmulTile::Wgmma { .. } | MatmulTile::Split { .. } | MatmulTile::Swapped { .. }
                )
            };
            let layered = |v: &&MatmulVariant| !single(v.tile) && runs(device, v.floor);
            for variant in variants(&case.0.problem).filter(layered) {
                run_batched(device, &case, Some(variant))?;
            }
        }
    }

    /// A row gives the same bits alone and among others, wherever it lies in memory, among the products of few rows;
    /// for the types of the tensor cores wherever that is at multiples of 16 bytes.
    #[test]
    fn few_rows_are_independent(((case, moved), on) in on_executors(few_rows, |(case, _)| 2 * case.work())) {
        let problem = case.problem;
        let MatmulProblem { m, n, .. } = problem;
        let inputs = inputs(&case);
        for device in &on.devices() {
            let plan = plan(device, problem, None)?;
            let together = product(device, &plan, &case, &inputs)?;
            // A single row of the tensor cores' types has kernels of its own.
            let (rows, moved) = match problem.dtype {
                DType::F32 => (1, moved),
                _ => (2, Layout { padding: 8 * moved.padding.div_ceil(8), offset: 8 * moved.offset }),
            };
            let row = case.seed as usize % (m + 1 - rows);
            let part = Case {
                problem: MatmulProblem { m: rows, ..problem },
                a_layout: moved,
                b_layout: moved,
                ..case.clone()
            };
            let alone = product(device, &plan, &part, &inputs.rows(row..row + rows, &problem))?;
            prop_assert_eq!(&together[row * n..][..rows * n], &alone[..], "{:?}", device);
        }
    }

    /// The same by the tensor cores' kernels for few rows, whichever of them.
    #[test]
    fn streamed_rows_are_independent((case, on) in on_executors(streamed_rows, |case| 4 * case.work())) {
        let problem = case.problem;
        let MatmulProblem { m, n, .. } = problem;
        let inputs = inputs(&case);
        for device in &on.cards() {
            let mut alone = None;
            for variant in variants(&problem).filter(|variant| runs(device, variant.floor)) {
                if !matches!(variant.tile, MatmulTile::Stream { .. }) {
                    continue;
                }
                let row = case.seed as usize % m;
                if alone.is_none() {
                    let one = Case { problem: MatmulProblem { m: 1, ..problem }, ..case.clone() };
                    let plan = plan(device, problem, Some(variant))?;
                    alone = Some(product(device, &plan, &one, &inputs.rows(row..row + 1, &problem))?);
                }
                let plan = plan(device, problem, Some(variant))?;
                let together = product(device, &plan, &case, &inputs)?;
                prop_assert_eq!(Some(&together[row * n..][..n]), alone.as_deref(), "{}", variant.entry);
            }
        }
    }

    /// The same among the products of more rows, on a card: the tiles' sums run in the order of k.
    #[test]
    fn many_rows_are_independent((case, on) in on_executors(many_rows, |case| 8 * case.work_in_tiles())) {
        let problem = case.problem;
        let MatmulProblem { m, n, .. } = problem;
        let cards = on.cards();
        if !cards.is_empty() {
            let inputs = inputs(&case);
            for device in &cards {
                let mut all: [Vec<Vec<f64>>; 5] = Default::default();
                for variant in variants(&problem).filter(|variant| runs(device, variant.floor)) {
                    let kind = match variant.tile {
                        MatmulTile::Simt { .. } => 0,
                        MatmulTile::Mma { .. } => 1,
                        MatmulTile::Wgmma { .. } | MatmulTile::Swapped { cluster: 1, .. } => 2,
                        MatmulTile::Split { cluster: 4, .. } | MatmulTile::Swapped { cluster: 4, .. } => 3,
                        MatmulTile::Split { .. } | MatmulTile::Swapped { .. } => 4,
                        _ => continue,
                    };
                    let plan = plan(device, problem, Some(variant))?;
                    let part = 17 + case.seed as usize % (m - 17);
                    let fewer = Case { problem: MatmulProblem { m: part, ..problem }, ..case.clone() };
                    let together = product(device, &plan, &case, &inputs)?;
                    let apart = product(device, &plan, &fewer, &inputs.rows(m - part..m, &problem))?;
                    prop_assert_eq!(&together[(m - part) * n..], &apart[..], "{}", variant.entry);
                    all[kind].push(together);
                }
                prop_assert!(all.iter().all(|kind| kind.windows(2).all(|pair| pair[0] == pair[1])));
            }
        }
    }
}

/// Tiles one after the other in one block, or in one cluster, have the bits that they have in blocks of their own, also
/// with an epilogue. And where a card is full, of one multiprocessor's always, kernels of few rows bring weights to L2
/// before they begin.
#[test]
fn tiles_of_one_block() -> Result<(), TestCaseError> {
    let (own, one_sm) = (&cards_of(Arch::Sm90a)[0], &one_sm());
    let gated = Epilogue { act: Act::Gated(Activation::Silu), residual: true, ..Epilogue::NONE };
    // Two tiles of the largest kind by two, more of the others; then few rows, and columns that do not fill a tile. Two
    // steps of k.
    for (dtype, epilogue, [m, n]) in [
        (DType::BF16, Epilogue::NONE, [130, 264]),
        (DType::F16, gated, [130, 136]),
        (DType::BF16, Epilogue::NONE, [9, 136]),
        (DType::F16, gated, [9, 72]),
    ] {
        let problem = MatmulProblem { epilogue, ..plain([m, n, 72], dtype) };
        let case = contiguous(problem, 5);
        let inputs = inputs(&case);
        for variant in variants(&problem) {
            let walks_or_prefetches = match variant.tile {
                MatmulTile::Wgmma { .. } => true,
                MatmulTile::Split { .. } | MatmulTile::Stream { .. } => m < 64,
                _ => false,
            };
            if walks_or_prefetches {
                let run = |device| product(device, &plan(device, problem, Some(variant))?, &case, &inputs);
                prop_assert_eq!(run(one_sm)?, run(own)?, "{}", variant.entry);
            }
        }
    }
    Ok(())
}

/// Sizes of 0 and 1 through every kernel, also where no plan would choose it: an empty sum is 0, and an empty product
/// nothing.
pub fn nothing() -> Result<(), TestCaseError> {
    let sizes = [0, 1, 40]
        .into_iter()
        .flat_map(|m| [0, 1, 70].into_iter().flat_map(move |n| [0, 1].map(|k| [m, n, k])));
    let floats = DType::FLOATS.map(|dtype| (dtype, dtype, Precision::Full));
    let wide = [DType::F16, DType::BF16].map(|dtype| (dtype, DType::F32, Precision::Full));
    let types = floats.into_iter().chain(wide).chain([(DType::F32, DType::F32, Precision::Tf32)]);
    for (dtype, out_dtype, precision) in types {
        // Sizes of 1 for one type: of the others the properties draw them.
        let own = sizes.clone().filter(|sizes| dtype == DType::BF16 || sizes.contains(&0) && sizes[0] < 40);
        let mut done = BTreeSet::new();
        for (device, [m, n, k]) in
            devices().iter().flat_map(|device| own.clone().map(move |sizes| (device, sizes)))
        {
            let stream = device.stream().map_err(fail)?;
            let tensor = |shape: &[usize], value: f64| {
                let values = vec![value; shape.iter().product()];
                Tensor::from_bytes(&stream, shape, dtype, &testkit::round::encode(dtype, &values))
            };
            let (a, b, added) = (tensor(&[m, k], 1.0)?, tensor(&[n, k], 1.0)?, tensor(&[n], 2.0)?);
            for bias in [Bias::None, Bias::PerColumn] {
                let problem = MatmulProblem { out_dtype, precision, bias, ..plain([m, n, k], dtype) };
                let variants = variants(&problem).filter(|variant| runs(device, variant.floor));
                for variant in std::iter::once(None).chain(variants.map(Some)) {
                    let case = variant.map(|variant| (variant.entry, [m, n, k], bias == Bias::None));
                    if case.is_some_and(|case| !is_new(device, &mut done, case)) {
                        continue;
                    }
                    let plan = plan(device, problem, variant)?;
                    let mut out = Rows::output(&stream, out_dtype, m, n, Layout::default()).map_err(fail)?;
                    let args = MatmulArgs {
                        bias: (bias == Bias::PerColumn).then(|| added.view()),
                        ..MatmulArgs::new(a.view(), b.view(), out.view_mut())
                    };
                    let what = format!("{:?} {m} {n} {k} {bias:?} {}", device.place(), plan.report().variant);
                    plan.run(&stream, args).map_err(|error| fail(format!("{what}: {error}")))?;
                    let want = k as f64 + if bias == Bias::PerColumn { 2.0 } else { 0.0 };
                    assert_eq!(out.read(&stream)?, vec![want; m * n], "{what}");
                }
            }
        }
    }
    nothing_normed().map_err(fail)?;
    expect_loaded(abi::ops::entries("matmul").filter(|entry| of_matrices(entry)))?;
    fp8::nothing()?;
    packed::nothing()
}

/// The same of rows of ones that are normed, by gains of one: each stays what it is.
fn nothing_normed() -> Result<(), Error> {
    let norm = Some(RowNorm { eps: 0.0, weight: NormWeight::Plain });
    let (k, dtype) = (8, DType::BF16);
    for device in devices() {
        let stream = device.stream()?;
        let ones =
            |shape: &[usize]| Tensor::from_slice(&stream, shape, &vec![bf16::ONE; shape.iter().product()]);
        let gain = Constant::new(ones(&[k])?, &stream)?;
        for (m, n) in [0, 1, RowNorm::MAX_ROWS].into_iter().flat_map(|m| [0, 1, 70].map(|n| (m, n))) {
            let problem = MatmulProblem { norm, ..plain([m, n, k], dtype) };
            let (a, b) = (ones(&[m, k])?, Constant::new(ones(&[n, k])?, &stream)?);
            for variant in variants(&problem).filter(|variant| runs(&device, variant.floor)) {
                let plan = Matmul::plan_with(&device, problem, variant)?;
                let mut out = Tensor::empty(&stream, &[m, n], dtype)?;
                let args = MatmulArgs::new(a.view(), b.view(), out.view_mut());
                plan.run(&stream, MatmulArgs { gain: Some(gain.view()), ..args })?;
                let want = vec![bf16::from_f32(k as f32); m * n];
                assert_eq!(out.to_vec::<bf16>(&stream)?, want, "{} {m} {n} on {device:?}", variant.entry);
            }
        }
    }
    Ok(())
}

/// Each activation, by itself and as a gate, at the end of each kernel; in the simulator on the oldest card that has
/// it.
#[test]
fn every_activation() -> Result<(), TestCaseError> {
    let of_matrices = abi::ops::entries("matmul").filter(|entry| of_matrices(entry));
    let missing = RefCell::new(of_matrices.collect::<BTreeSet<&str>>());
    let types = [
        (DType::F16, DType::F16, Precision::Full),
        (DType::F16, DType::F32, Precision::Full),
        (DType::BF16, DType::BF16, Precision::Full),
        (DType::BF16, DType::F32, Precision::Full),
        (DType::F32, DType::F32, Precision::Tf32),
    ];
    for activation in [Activation::Silu, Activation::GeluTanh, Activation::GeluErf] {
        // Beside it a bias or a residual.
        for (act, residual) in [(Act::Of(activation), false), (Act::Gated(activation), true)] {
            let bias = if residual { Bias::None } else { Bias::PerColumn };
            for (dtype, out_dtype, precision) in types {
                let epilogue = Epilogue { scale: 1.5, act, residual };
                let plain =
                    MatmulProblem { out_dtype, precision, bias, epilogue, ..plain([18, 72, 64], dtype) };
                let norm = Some(RowNorm { eps: 1e-6, weight: NormWeight::Plain });
                let normed = MatmulProblem { m: RowNorm::MAX_ROWS, norm, ..plain };
                let done = RefCell::new(BTreeSet::new());
                let first = |entry: &str| {
                    missing.borrow_mut().remove(entry);
                    done.borrow_mut().insert(entry.to_owned())
                };
                for (arch, problem) in Arch::ALL.into_iter().flat_map(|arch| [(arch, plain), (arch, normed)])
                {
                    let (simulated, real): (Vec<Device>, Vec<Device>) =
                        cards_of(arch).into_iter().partition(is_simulated);
                    run_variants(&simulated, &contiguous(problem, 7), &first)?;
                    run_variants(&real, &contiguous(problem, 7), &|_| true)?;
                }
            }
        }
    }
    prop_assert!(missing.borrow().is_empty(), "no case has run {:?}", missing.borrow());
    Ok(())
}

/// NaN and infinities stay in their rows and columns.
#[test]
fn special_values() -> Result<(), TestCaseError> {
    for (m, n, k) in [(1, 9, 40), (7, 33, 257), (70, 66, 50)] {
        for dtype in DType::FLOATS {
            let case = contiguous(plain([m, n, k], dtype), 4);
            for device in &devices_for(case.work()) {
                let mut inputs = inputs(&case);
                inputs.a[(m - 1) * k + k - 1] = f64::NAN;
                inputs.b[3 * k + 5] = f64::INFINITY;
                let plan = plan(device, case.problem, None)?;
                let got = product(device, &plan, &case, &inputs)?;
                for (index, value) in got.iter().enumerate() {
                    let (row, col) = (index / n, index % n);
                    if row == m - 1 {
                        assert!(value.is_nan(), "{dtype} [{row}, {col}] = {value}");
                    } else if col == 3 {
                        assert_eq!(*value, f64::INFINITY * inputs.a[row * k + 5], "{dtype} [{row}, {col}]");
                    } else {
                        assert!(value.is_finite(), "{dtype} [{row}, {col}] = {value}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// A long k, of whole pieces and not, shared by several warps: Qwen3's down projection with few columns. One row of
/// 2560 or 10,240 is done by fives.
#[test]
fn long_k() -> Result<(), TestCaseError> {
    for (m, k) in
        [(1, 2560), (1, 10_240), (1, 10_248), (1, 9728), (3, 9731), (8, 9728), (12, 9730), (20, 9728)]
    {
        let problem = MatmulProblem {
            out_dtype: DType::F32,
            bias: Bias::PerColumn,
            epilogue: Epilogue::of(Act::Of(Activation::Silu)),
            ..plain([m, 37, k], DType::BF16)
        };
        let case = contiguous(problem, 9);
        let inputs = inputs(&case);
        let expected = Expected::of(&problem, &inputs);
        for device in &devices_for(case.work()) {
            let plan = plan(device, problem, None)?;
            let got = product(device, &plan, &case, &inputs)?;
            expected.check(plan.report().variant, &got, &problem)?;
        }
    }
    Ok(())
}

/// One row takes the kernel that reads weights ahead where b is a constant that lies at multiples of 16 bytes, and gets
/// the bits that it gets without.
#[test]
fn constants_are_read_ahead() -> Result<(), Error> {
    let values = |count: usize, of: usize| -> Vec<bf16> {
        (0..count).map(|i| bf16::from_f32((i * of % 31) as f32 / 16.0 - 1.0)).collect()
    };
    for (constant, offset, wanted) in [
        (true, 0, "matmul_bf16__ahead__sm90a"),
        (true, 1, "matmul_bf16__gemv1__sm61"),
        (false, 0, "matmul_bf16__gemv1__sm61"),
    ] {
        let card = Arc::new(Card::new(Arch::Sm90a));
        let device = Device::simulated(card.clone())?;
        let stream = device.stream()?;
        let (n, k) = (1056, 256);
        let a = Tensor::from_slice(&stream, &[1, k], &values(k, 7))?;
        let b = Tensor::from_slice(
            &stream,
            &[n * k + 8],
            &[vec![bf16::ONE; offset], values(n * k + 8 - offset, 11)].concat(),
        )?;
        let mut out = Tensor::empty(&stream, &[1, n], DType::BF16)?;
        let plan = Matmul::plan(&device, MatmulProblem::new(4, n, k, DType::BF16))?;
        fn part(b: TensorView<'_>, from: usize, shape: [usize; 2]) -> Result<TensorView<'_>, Error> {
            b.slice(0, from..from + shape[0] * shape[1])?.reshape(&shape)
        }
        if constant {
            let b = Constant::new(b, &stream)?;
            assert!(b.view().is_constant());
            plan.run(&stream, MatmulArgs::new(a.view(), part(b.view(), offset, [n, k])?, out.view_mut()))?;
        } else {
            assert!(!b.view().is_constant());
            plan.run(&stream, MatmulArgs::new(a.view(), part(b.view(), offset, [n, k])?, out.view_mut()))?;
        }
        assert_eq!(card.launched().into_iter().collect::<Vec<_>>(), [wanted]);
        let cpu = |values: &[bf16]| values.iter().map(|value| value.to_f64()).collect::<Vec<f64>>();
        let want =
            reference::matmul::<f64>(&cpu(&values(k, 7)), &cpu(&values(n * k, 11)), None, [1, n, k], |v| v);
        let got = out.to_vec::<bf16>(&stream)?;
        assert!(
            std::iter::zip(&got, want).all(|(got, want)| (got.to_f64() - want).abs() <= want.abs() / 128.0),
            "{wanted}"
        );
    }
    Ok(())
}

/// A row whose squares do not fit f32 is normed as the same row times a power of two is.
#[test]
fn far_rows_are_normed() -> Result<(), Error> {
    let int4 = WeightLayout {
        codes: Codes::Int4,
        group: 64,
        rows: 1,
        scale: ScaleType::Bf16,
        zeros: true,
        minimums: false,
        permuted: false,
    };
    let fp8 = WeightLayout { codes: Codes::E4m3, group: 0, zeros: false, ..int4 };
    for layout in [None, Some(int4), Some(fp8)] {
        far_rows_by(layout)?;
    }
    Ok(())
}

fn far_rows_by(layout: Option<WeightLayout>) -> Result<(), Error> {
    let (n, k) = (24, 72);
    let mut devices = devices();
    devices.push(Device::simulated(Arc::new(Card::new(Arch::Sm90a)))?);
    let norm = Some(RowNorm { eps: 0.0, weight: NormWeight::Plain });
    let rows = [1, 3, RowNorm::MAX_ROWS];
    let problems =
        rows.map(|m| MatmulProblem { norm, weight: layout, ..MatmulProblem::new(m, n, k, DType::BF16) });
    let mut plans = 0;
    for (device, problem) in devices.iter().flat_map(|device| problems.map(|problem| (device, problem))) {
        if Matmul::supports(device, &problem).is_err() {
            continue;
        }
        plans += 1;
        let (stream, m) = (device.stream()?, problem.m);
        let plan = Matmul::plan(device, problem)?;
        let values = |count: usize, of: usize| (0..count).map(move |i| (i * of % 37) as f32 / 16.0 - 1.0);
        let constant = |shape: &[usize], of: usize| {
            let values: Vec<bf16> = values(shape.iter().product(), of).map(bf16::from_f32).collect();
            Constant::new(Tensor::from_slice(&stream, shape, &values)?, &stream)
        };
        let (b, gain) = (constant(&[n, k], 7)?, constant(&[k], 5)?);
        let source = layout.map(|layout| packed::Source::new([n, k], layout, 7));
        let weight = source.map(|source| Weight::pack(&stream, &source)).transpose()?;
        // Each row by a power of its own.
        let normed = |exponent: &dyn Fn(usize) -> i32| {
            let far = |(i, x): (usize, f32)| bf16::from_f32(x * 2f32.powi(exponent(i / k)));
            let rows: Vec<bf16> = values(m * k, 11).enumerate().map(far).collect();
            let a = Tensor::from_slice(&stream, &[m, k], &rows)?;
            let mut out = Tensor::empty(&stream, &[m, n], DType::BF16)?;
            let (gain, b) = (Some(gain.view()), weight.as_ref().map_or(b.view().into(), MatmulB::from));
            plan.run(&stream, MatmulArgs { gain, ..MatmulArgs::new(a.view(), b, out.view_mut()) })?;
            out.to_vec::<bf16>(&stream)
        };
        let near = normed(&|_| 0)?;
        assert!(near.iter().any(|x| x.to_f32().abs() > 0.5), "{device:?}: {near:?}");
        for exponent in [-100, -80, 70, 100] {
            assert_eq!(normed(&|_| exponent)?, near, "2^{exponent} on {device:?}");
            let mixed = normed(&|row| [0, exponent, -exponent][row % 3])?;
            assert_eq!(mixed, near, "some by 2^{exponent} on {device:?}");
        }
    }
    assert!(plans > 2, "{layout:?}");
    Ok(())
}
