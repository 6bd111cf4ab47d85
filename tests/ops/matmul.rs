//! The matrix product against its reference.

use abi::ops::matmul::{MMA_VARIANTS, MatmulTile, MatmulVariant, STREAM_VARIANTS, VARIANTS, WGMMA_VARIANTS};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::strategies::{Values, dims, dims_from, finite_values, stride_padding};
use warpforge::ops::glu::Activation;
use warpforge::ops::matmul::reference;
use warpforge::ops::matmul::{Act, Bias, Epilogue, Matmul, MatmulArgs, MatmulProblem, Precision, Residual};
use warpforge::{Arch, DType, Device, Error, Stream, Tensor, TensorView, TensorViewMut};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, cards_of, check, devices, devices_for, every_kernel, fail, floats,
    on_executors, one_sm, store, values,
};

#[derive(Clone, Debug)]
struct Case {
    problem: MatmulProblem,
    a_layout: Layout,
    b_layout: Layout,
    out_layout: Layout,
    kind: Values,
    seed: u64,
}

fn layout() -> impl Strategy<Value = Layout> {
    let offset = prop_oneof![3 => Just(0usize), 1 => 1usize..9];
    (stride_padding(), offset).prop_map(|(padding, offset)| Layout { padding, offset })
}

fn bias() -> impl Strategy<Value = Bias> {
    prop_oneof![Just(Bias::None), Just(Bias::PerColumn)]
}

/// None half of the time; of the others, each activation by itself and as a gate.
fn epilogue() -> impl Strategy<Value = Epilogue> {
    let activation =
        prop_oneof![Just(Activation::Silu), Just(Activation::GeluTanh), Just(Activation::GeluErf)];
    let act = (0..4, activation).prop_map(|(kind, activation)| match kind {
        0 => Act::None,
        1 => Act::Of(activation),
        _ => Act::Gated(activation),
    });
    let scale = prop_oneof![Just(1.0), Just(-0.37f32)];
    let fused =
        (act, scale, any::<bool>()).prop_map(|(act, scale, residual)| Epilogue { scale, act, residual });
    prop_oneof![Just(Epilogue::NONE), fused]
}

/// The type of the operands, and of out.
fn types() -> impl Strategy<Value = (DType, DType)> {
    (floats(), any::<bool>()).prop_map(|(dtype, wide)| (dtype, if wide { DType::F32 } else { dtype }))
}

fn case() -> impl Strategy<Value = Case> {
    let m = prop_oneof![2 => dims(&[2, 4, 8], 17), 1 => dims(&[64], 140)];
    let n = dims_from(1, &[8, 64], 140);
    let k = prop_oneof![3 => dims_from(1, &[8, 16, 32], 130), 1 => dims_from(1, &[128, 512], 1100)];
    let ends = (bias(), epilogue());
    ((types(), m, n, k, ends), (layout(), layout(), layout()), finite_values(), any::<u64>()).prop_map(
        |(((dtype, out_dtype), m, n, k, (bias, epilogue)), (a_layout, b_layout, out_layout), kind, seed)| {
            let problem = MatmulProblem {
                batch: 1,
                m,
                n,
                k,
                dtype,
                out_dtype,
                precision: precision(dtype, seed),
                bias,
                epilogue,
            };
            Case { problem, a_layout, b_layout, out_layout, kind, seed }
        },
    )
}

/// Few rows and contiguous operands, and where the operands of one row lie.
fn few_rows() -> impl Strategy<Value = (Case, Layout)> {
    let sizes = (2usize..9, dims_from(1, &[8, 64], 100), dims_from(1, &[128, 1024], 5000));
    (types(), sizes, (bias(), epilogue()), layout(), any::<u64>()).prop_map(
        |((dtype, out_dtype), (m, n, k), (bias, epilogue), moved, seed)| {
            let problem = MatmulProblem {
                batch: 1,
                m,
                n,
                k,
                dtype,
                out_dtype,
                precision: precision(dtype, seed),
                bias,
                epilogue,
            };
            (contiguous(problem, seed), moved)
        },
    )
}

fn streamed_rows() -> impl Strategy<Value = Case> {
    let rows = prop_oneof![1usize..17, 17usize..65];
    let sizes = (rows, dims_from(1, &[8, 64], 200), dims_from(1, &[16, 128], 300));
    let types = types().prop_filter("of 16 bits", |(dtype, _)| *dtype != DType::F32);
    let ends = (bias(), epilogue());
    (types, sizes, ends, any::<u64>()).prop_map(|((dtype, out_dtype), (m, n, k), (bias, epilogue), seed)| {
        contiguous(
            MatmulProblem {
                batch: 1,
                m,
                n,
                k: 8 * k,
                dtype,
                out_dtype,
                precision: precision(dtype, seed),
                bias,
                epilogue,
            },
            seed,
        )
    })
}

/// Every second product of f32 may be one of tf32.
fn precision(dtype: DType, seed: u64) -> Precision {
    if dtype == DType::F32 && seed & 8 == 0 { Precision::Tf32 } else { Precision::Full }
}

/// What the tensor cores' kernels take in pieces, with all that an epilogue can be.
fn aligned() -> impl Strategy<Value = Case> {
    let sizes = (1usize..150, 1usize..24, 1usize..20);
    (types(), sizes, bias(), epilogue(), any::<u64>()).prop_map(
        |((dtype, out_dtype), (m, n, k), bias, epilogue, seed)| {
            let (n, k) = (8 * n, 8 * k);
            contiguous(
                MatmulProblem {
                    batch: 1,
                    m,
                    n,
                    k,
                    dtype,
                    out_dtype,
                    precision: precision(dtype, seed),
                    bias,
                    epilogue,
                },
                seed,
            )
        },
    )
}

fn many_rows() -> impl Strategy<Value = Case> {
    let sizes = (18usize..300, dims_from(1, &[64, 128], 300), dims_from(1, &[8, 16, 32], 200));
    (types(), sizes, epilogue(), any::<u64>()).prop_map(|((dtype, out_dtype), (m, n, k), epilogue, seed)| {
        let bias = Bias::None;
        contiguous(
            MatmulProblem {
                batch: 1,
                m,
                n,
                k,
                dtype,
                out_dtype,
                precision: precision(dtype, seed),
                bias,
                epilogue,
            },
            seed,
        )
    })
}

fn contiguous(problem: MatmulProblem, seed: u64) -> Case {
    let place = Layout::default();
    Case { problem, a_layout: place, b_layout: place, out_layout: place, kind: Values::Normal, seed }
}

/// How the matrices of a stack lie in memory.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// One after the other.
    Stacked,
    /// A row of each in turn, as the heads of tokens do.
    Interleaved,
}

impl Order {
    /// Rows of a stack, in the order of memory; and back, where sizes are swapped.
    fn rows(self, values: &[f64], [outer, inner, cols]: [usize; 3]) -> Vec<f64> {
        match self {
            Order::Stacked => values.to_vec(),
            Order::Interleaved => (0..inner)
                .flat_map(|row| (0..outer).map(move |matrix| (matrix * inner + row) * cols))
                .flat_map(|start| &values[start..][..cols])
                .copied()
                .collect(),
        }
    }

    /// The stack that rows in memory are.
    fn view<'a>(
        self,
        rows: TensorView<'a>,
        [batch, inner, cols]: [usize; 3],
    ) -> Result<TensorView<'a>, Error> {
        match self {
            Order::Stacked => rows.reshape(&[batch, inner, cols]),
            Order::Interleaved => rows.reshape(&[inner, batch, cols])?.swap_axes(0, 1),
        }
    }
}

/// Several products of a run, and how a, b and out lie.
fn batched() -> impl Strategy<Value = (Case, [Order; 3])> {
    let m = prop_oneof![3 => 0usize..10, 1 => dims(&[16, 64], 70)];
    let sizes = (0usize..6, m, dims_from(1, &[8, 64], 70), dims_from(1, &[8, 64, 256], 300));
    let order = || prop_oneof![Just(Order::Stacked), Just(Order::Interleaved)];
    let orders = (order(), order(), order());
    let ends = (bias(), epilogue());
    (types(), sizes, ends, (layout(), layout(), layout()), orders, any::<u64>()).prop_map(
        |((dtype, out_dtype), (batch, m, n, k), (bias, epilogue), layouts, (a, b, out), seed)| {
            let (a_layout, b_layout, out_layout) = layouts;
            // Planned for more than run, now and then.
            let batch = batch.max(usize::from(seed % 4 != 0));
            let problem = MatmulProblem {
                batch,
                m,
                n,
                k,
                dtype,
                out_dtype,
                precision: precision(dtype, seed),
                bias,
                epilogue,
            };
            let kind = Values::Normal;
            (Case { problem, a_layout, b_layout, out_layout, kind, seed }, [a, b, out])
        },
    )
}

/// Rows of b: twice as many if the product is gated.
fn b_rows(problem: &MatmulProblem) -> usize {
    if matches!(problem.epilogue.act, Act::Gated(_)) { 2 * problem.n } else { problem.n }
}

impl Case {
    fn work(&self) -> usize {
        let MatmulProblem { batch, m, k, .. } = self.problem;
        let n = b_rows(&self.problem);
        // Of few rows: a warp per column and 8 rows.
        batch * (m.div_ceil(8) * n * (1500 + 4 * k) + self.work_in_tiles())
    }

    /// Tiles of 64, whose operands are read from shared memory.
    fn work_in_tiles(&self) -> usize {
        let MatmulProblem { m, k, .. } = self.problem;
        let n = b_rows(&self.problem);
        m.next_multiple_of(64) * n.next_multiple_of(64) * (k + 100) / 8
    }
}

/// Inputs as exact f64; the rows of b are those of the gate, then those of up.
#[derive(Clone)]
struct Inputs {
    a: Vec<f64>,
    b: Vec<f64>,
    bias: Option<Vec<f64>>,
    residual: Option<Vec<f64>>,
}

impl Inputs {
    /// The rows `rows` of a and the residual.
    fn rows(&self, rows: std::ops::Range<usize>, &MatmulProblem { n, k, .. }: &MatmulProblem) -> Inputs {
        let part = |values: &[f64], cols: usize| values[rows.start * cols..rows.end * cols].to_vec();
        let residual = self.residual.as_ref().map(|residual| part(residual, n));
        Inputs { a: part(&self.a, k), residual, ..self.clone() }
    }
}

/// The inputs of a case, of all its products.
fn inputs(case: &Case) -> Inputs {
    let MatmulProblem { batch, m, n, k, dtype, out_dtype, bias, epilogue, .. } = case.problem;
    let b_rows = b_rows(&case.problem);
    Inputs {
        a: values(case.kind, dtype, batch * m * k, case.seed),
        b: values(case.kind, dtype, batch * b_rows * k, case.seed ^ 1),
        bias: (bias == Bias::PerColumn).then(|| values(case.kind, dtype, b_rows, case.seed ^ 2)),
        residual: epilogue.residual.then(|| values(case.kind, out_dtype, batch * m * n, case.seed ^ 3)),
    }
}

/// Memory for the bias and for the residual if it has its own, and out, which may hold it.
struct Ends {
    bias: Option<Rows>,
    residual: Option<Rows>,
    out: Rows,
}

impl Ends {
    /// Residual and out of these rows, one after the other.
    fn new(stream: &Stream, case: &Case, inputs: &Inputs, rows: usize) -> Result<Self, Error> {
        let MatmulProblem { n, dtype, out_dtype, .. } = case.problem;
        let bias = |bias: &Vec<f64>| Rows::input(stream, dtype, bias, bias.len(), Layout::default());
        // Strides of its own, unless it lies in out.
        let in_place = case.seed.is_multiple_of(2);
        let residual = |values: &Vec<f64>, layout| Rows::input(stream, out_dtype, values, n, layout);
        let (out, own) = match &inputs.residual {
            Some(values) if in_place => (residual(values, case.out_layout)?, None),
            values => {
                let own = values.as_ref().map(|values| residual(values, case.a_layout)).transpose()?;
                (Rows::output(stream, out_dtype, rows, n, case.out_layout)?, own)
            }
        };
        Ok(Ends { bias: inputs.bias.as_ref().map(bias).transpose()?, residual: own, out })
    }
}

/// The product by a plan.
fn product(device: &Device, plan: &Matmul, case: &Case, inputs: &Inputs) -> Result<Vec<f64>, TestCaseError> {
    let MatmulProblem { m, n, k, dtype, epilogue, .. } = case.problem;
    let stream = device.stream().map_err(fail)?;
    let a = Rows::input(&stream, dtype, &inputs.a, k, case.a_layout).map_err(fail)?;
    // A gated product's rows: gate above up, apart, or each row of the gate beside one of up.
    let gated = matches!(epilogue.act, Act::Gated(_));
    let (gate, up) = inputs.b.split_at(n * k);
    let rows = |values: &[f64], cols| Rows::input(&stream, dtype, values, cols, case.b_layout).map_err(fail);
    let (b, apart) = match case.seed % 3 {
        0 if gated => (rows(gate, k)?, Some(rows(up, k)?)),
        1 if gated => {
            let beside = std::iter::zip(gate.chunks(k), up.chunks(k)).flat_map(|(gate, up)| [gate, up]);
            (rows(&beside.collect::<Vec<_>>().concat(), 2 * k)?, None)
        }
        _ => (rows(&inputs.b, k)?, None),
    };
    let (b, up) = match apart.as_ref() {
        Some(up) => (b.view(), Some(up.view())),
        None if gated && case.seed % 3 == 1 => {
            let half = |cols| b.view().slice(1, cols).map_err(fail);
            (half(0..k)?, Some(half(k..2 * k)?))
        }
        None => (b.view(), None),
    };
    let mut ends = Ends::new(&stream, case, inputs, m).map_err(fail)?;
    let residual = match &ends.residual {
        Some(residual) => Some(Residual::Tensor(residual.view())),
        None => epilogue.residual.then_some(Residual::InPlace),
    };
    let bias = ends.bias.as_ref().map(|bias| bias.view().reshape(&[b_rows(&case.problem)])).transpose();
    let bias = bias.map_err(fail)?;
    let args = MatmulArgs { a: a.view(), b, up, bias, residual, out: ends.out.view_mut() };
    plan.run(&stream, args).map_err(fail)?;
    ends.out.read(&stream)
}

/// The specification, the naive computation, and the sum of the terms' absolute values.
struct Expected {
    want: Vec<f64>,
    naive: Vec<f64>,
    terms: Vec<f64>,
}

impl Expected {
    fn of(problem: &MatmulProblem, inputs: &Inputs) -> Self {
        let &MatmulProblem { m, n, k, out_dtype, precision, ref epilogue, .. } = problem;
        let sizes = [m, n, k];
        let Inputs { a, b, bias, residual } = inputs;
        let (bias, residual) = (bias.as_deref(), residual.as_deref());
        // What tf32 takes of an f32.
        let lost = if precision == Precision::Tf32 { 13 } else { 0 };
        let cut = |values: &[f64]| {
            let part = |&value: &f64| f64::from(f32::from_bits((value as f32).to_bits() >> lost << lost));
            values.iter().map(part).collect::<Vec<f64>>()
        };
        let absolute = |values: &[f64]| values.iter().map(|value| value.abs()).collect::<Vec<f64>>();
        // Without the activation, whose slope is at most 1.13: of a gated product both factors.
        let b_rows = b_rows(problem);
        let scale = f64::from(epilogue.scale.abs());
        let sums = reference::matmul::<f64>(&absolute(a), &absolute(b), None, [m, b_rows, k], |v| v);
        let linear = |row: usize, col: usize| {
            scale * sums[row * b_rows + col] + bias.map_or(0.0, |bias| bias[col].abs())
        };
        let term = |index: usize| {
            let (row, col) = (index / n, index % n);
            let up = if b_rows == n { 1.0 } else { linear(row, n + col) };
            linear(row, col) * up + residual.map_or(0.0, |residual| residual[index].abs())
        };
        Expected {
            want: reference::fused::<f64>((a, b), bias, residual, sizes, epilogue, |v| v),
            naive: reference::fused::<f32>(
                (&cut(a), &cut(b)),
                bias,
                residual,
                sizes,
                epilogue,
                store(out_dtype),
            ),
            terms: (0..m * n).map(term).collect(),
        }
    }

    fn check(&self, what: &str, got: &[f64], problem: &MatmulProblem) -> Result<(), TestCaseError> {
        // A multiplication, an addition, six operations of an activation and two behind it.
        let steps = if problem.epilogue == Epilogue::NONE { 1 } else { 10 };
        let tolerance = Tolerance::new(problem.out_dtype, Scale::Given(&self.terms), problem.k + steps);
        check(what, got, &self.want, &self.naive, &tolerance)
    }
}

fn plan(
    device: &Device,
    problem: MatmulProblem,
    variant: Option<&'static MatmulVariant>,
) -> Result<Matmul, TestCaseError> {
    let plan = match variant {
        None => Matmul::plan(device, problem),
        Some(variant) => Matmul::plan_with(device, problem, variant),
    };
    plan.map_err(fail)
}

/// Kernels of the operand and out types.
fn variants(problem: &MatmulProblem) -> impl Iterator<Item = &'static MatmulVariant> {
    let MatmulProblem { dtype, out_dtype, precision, .. } = *problem;
    VARIANTS
        .iter()
        .chain(MMA_VARIANTS)
        .chain(STREAM_VARIANTS)
        .chain(WGMMA_VARIANTS)
        .filter(move |variant| (variant.dtype, variant.out_dtype) == (dtype, out_dtype))
        .filter(move |variant| precision == Precision::Tf32 || !variant.is_tf32())
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let inputs = inputs(case);
    let mut expected = None;
    for device in cards {
        let floor = device.limits().map(|limits| limits.floor);
        for variant in variants(&case.problem).filter(|v| Some(v.floor) <= floor && wanted(v.entry)) {
            let plan = plan(device, case.problem, Some(variant))?;
            let got = product(device, &plan, case, &inputs)?;
            let expected = expected.get_or_insert_with(|| Expected::of(&case.problem, &inputs));
            expected.check(variant.entry, &got, &case.problem)?;
        }
    }
    Ok(())
}

/// Several products by the planned kernels or given ones, each against its reference.
fn run_batched(
    device: &Device,
    (case, orders): &(Case, [Order; 3]),
    variant: Option<&'static MatmulVariant>,
) -> Result<(), TestCaseError> {
    let MatmulProblem { batch, m, n, k, dtype, epilogue, .. } = case.problem;
    let (b_rows, inputs) = (b_rows(&case.problem), inputs(case));
    let [a_order, b_order, out_order] = *orders;
    let stream = device.stream().map_err(fail)?;
    let rows = |values: &[f64], layout| Rows::input(&stream, dtype, values, k, layout).map_err(fail);
    let a_rows = rows(&a_order.rows(&inputs.a, [batch, m, k]), case.a_layout)?;
    let b_memory = rows(&b_order.rows(&inputs.b, [batch, b_rows, k]), case.b_layout)?;
    let residual = inputs.residual.as_ref().map(|residual| out_order.rows(residual, [batch, m, n]));
    let mut ends =
        Ends::new(&stream, case, &Inputs { residual, ..inputs.clone() }, batch * m).map_err(fail)?;
    let residual = match &ends.residual {
        Some(residual) => {
            Some(Residual::Tensor(out_order.view(residual.view(), [batch, m, n]).map_err(fail)?))
        }
        None => epilogue.residual.then_some(Residual::InPlace),
    };
    let bias = ends.bias.as_ref().map(|bias| bias.view().reshape(&[b_rows])).transpose().map_err(fail)?;
    let args = MatmulArgs {
        a: a_order.view(a_rows.view(), [batch, m, k]).map_err(fail)?,
        b: b_order.view(b_memory.view(), [batch, b_rows, k]).map_err(fail)?,
        up: None,
        bias,
        residual,
        out: match out_order {
            Order::Stacked => ends.out.view_mut().reshape(&[batch, m, n]),
            Order::Interleaved => {
                ends.out.view_mut().reshape(&[m, batch, n]).and_then(|out| out.swap_axes(0, 1))
            }
        }
        .map_err(fail)?,
    };
    let problem = MatmulProblem { batch: batch.max(1), m: m + case.seed as usize % 3, ..case.problem };
    let plan = plan(device, problem, variant)?;
    plan.run(&stream, args).map_err(fail)?;
    let got = out_order.rows(&ends.out.read(&stream)?, [m, batch, n]);
    for product in 0..batch {
        let part = |values: &[f64], len: usize| values[product * len..][..len].to_vec();
        let own = Inputs {
            a: part(&inputs.a, m * k),
            b: part(&inputs.b, b_rows * k),
            bias: inputs.bias.clone(),
            residual: inputs.residual.as_ref().map(|residual| part(residual, m * n)),
        };
        let what = format!("{}, product {product}", plan.report().variant);
        Expected::of(&case.problem, &own).check(&what, &part(&got, m * n), &case.problem)?;
    }
    Ok(())
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("matmul", case(), |case| 16 * case.work(), run_variants)
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
            let floor = card.limits().map(|limits| limits.floor);
            let fits: Vec<_> = variants(&case.problem).filter(|variant| Some(variant.floor) <= floor).collect();
            let chosen = fits[case.seed as usize / 6 % fits.len()].entry;
            run_variants(&[card], &case, &|entry| entry == chosen)?;
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
            let floor = device.limits().map(|limits| limits.floor);
            let single = |tile| matches!(tile, MatmulTile::Wgmma { .. } | MatmulTile::Split { .. });
            let layered = |v: &&MatmulVariant| !single(v.tile) && Some(v.floor) <= floor;
            for variant in variants(&case.0.problem).filter(layered) {
                run_batched(device, &case, Some(variant))?;
            }
        }
    }

    /// A row gives the same bits alone and among others, wherever it lies in memory, among the products of few rows; for the
    /// types of the tensor cores wherever that is at multiples of 16 bytes.
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
            let floor = device.limits().map(|limits| limits.floor);
            let mut alone = None;
            for variant in variants(&problem).filter(|variant| Some(variant.floor) <= floor) {
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
    fn many_rows_are_independent((case, on) in on_executors(many_rows, |case| 4 * case.work_in_tiles())) {
        let problem = case.problem;
        let MatmulProblem { m, n, .. } = problem;
        let cards = on.cards();
        if !cards.is_empty() {
            let inputs = inputs(&case);
            for device in &cards {
                let floor = device.limits().map(|limits| limits.floor);
                let mut all: [Vec<Vec<f64>>; 4] = Default::default();
                for variant in variants(&problem).filter(|variant| Some(variant.floor) <= floor) {
                    let kind = match variant.tile {
                        MatmulTile::Simt { .. } => 0,
                        MatmulTile::Mma { .. } => 1,
                        MatmulTile::Wgmma { .. } => 2,
                        MatmulTile::Split { .. } => 3,
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

/// Tiles one after the other in one block, or in one cluster, have the bits that they have in blocks of their own, also with an
/// epilogue.
#[test]
fn tiles_of_one_block() -> Result<(), TestCaseError> {
    let (own, one_sm) = (&cards_of(Arch::Sm90a)[0], &one_sm());
    let epilogues =
        [Epilogue::NONE, Epilogue { act: Act::Gated(Activation::Silu), residual: true, ..Epilogue::NONE }];
    for (dtype, epilogue) in std::iter::zip([DType::BF16, DType::F16], epilogues) {
        // Two tiles of the largest kind by two, more of the others; two steps of k.
        let problem = MatmulProblem {
            batch: 1,
            m: 130,
            n: if epilogue == Epilogue::NONE { 264 } else { 136 },
            k: 72,
            dtype,
            out_dtype: dtype,
            precision: Precision::Full,
            bias: Bias::None,
            epilogue,
        };
        let layout = Layout::default();
        let (a_layout, b_layout, out_layout) = (layout, layout, layout);
        let case = Case { problem, a_layout, b_layout, out_layout, kind: Values::Normal, seed: 5 };
        let inputs = inputs(&case);
        for variant in variants(&problem) {
            if !matches!(variant.tile, MatmulTile::Wgmma { .. }) {
                continue;
            }
            let run = |device| product(device, &plan(device, problem, Some(variant))?, &case, &inputs);
            prop_assert_eq!(run(one_sm)?, run(own)?, "{}", variant.entry);
        }
    }
    Ok(())
}

/// Sizes of zero: nothing to do, or an empty sum.
#[test]
fn empty() -> Result<(), TestCaseError> {
    for device in &devices() {
        let stream = device.stream().map_err(fail)?;
        for [m, n, k] in [[0, 5, 7], [5, 0, 7], [0, 0, 0], [3, 70, 0], [40, 70, 0], [0, 70, 0], [3, 0, 0]] {
            for bias in [Bias::None, Bias::PerColumn] {
                let dtype = DType::BF16;
                let epilogue = Epilogue::NONE;
                let problem = MatmulProblem {
                    batch: 1,
                    m,
                    n,
                    k,
                    dtype,
                    out_dtype: DType::F32,
                    precision: Precision::Full,
                    bias,
                    epilogue,
                };
                let plan = plan(device, problem, None)?;
                let a = Tensor::zeros(&stream, &[m, k], dtype).map_err(fail)?;
                let b = Tensor::zeros(&stream, &[n, k], dtype).map_err(fail)?;
                let no_bias = Tensor::zeros(&stream, &[0], dtype).map_err(fail)?;
                let added = values(Values::Normal, dtype, n, 3);
                let added_rows = Rows::input(&stream, dtype, &added, n, Layout::default()).map_err(fail)?;
                let view = match bias {
                    Bias::None => None,
                    // A view of no columns has no row to be reshaped.
                    Bias::PerColumn if n == 0 => Some(no_bias.view()),
                    Bias::PerColumn => Some(added_rows.view().reshape(&[n]).map_err(fail)?),
                };
                let mut out = Rows::output(&stream, DType::F32, m, n, Layout::default()).map_err(fail)?;
                let args = MatmulArgs { bias: view, ..MatmulArgs::new(a.view(), b.view(), out.view_mut()) };
                plan.run(&stream, args).map_err(fail)?;
                let want: Vec<f64> = match bias {
                    Bias::None => vec![0.0; m * n],
                    Bias::PerColumn => added.repeat(m),
                };
                assert_eq!(out.read(&stream)?, want, "{m} {n} {k} {bias:?}");
            }
        }
    }
    Ok(())
}

/// NaN and infinities stay in their rows and columns.
#[test]
fn special_values() -> Result<(), TestCaseError> {
    for (m, n, k) in [(1, 9, 40), (7, 33, 257), (70, 66, 50)] {
        for dtype in DType::FLOATS {
            let case = contiguous(
                MatmulProblem {
                    batch: 1,
                    m,
                    n,
                    k,
                    dtype,
                    out_dtype: dtype,
                    precision: Precision::Full,
                    bias: Bias::None,
                    epilogue: Epilogue::NONE,
                },
                4,
            );
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

/// A long k, of whole pieces and not, shared by several warps: Qwen3's down projection with few columns.
#[test]
fn long_k() -> Result<(), TestCaseError> {
    for (m, k) in [(1, 9728), (3, 9731), (8, 9728), (12, 9730), (20, 9728)] {
        let dtype = DType::BF16;
        let problem = MatmulProblem {
            batch: 1,
            m,
            n: 37,
            k,
            dtype,
            out_dtype: DType::F32,
            precision: Precision::Full,
            bias: Bias::PerColumn,
            epilogue: Epilogue::of(Act::Of(Activation::Silu)),
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

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    let dtype = DType::BF16;
    for device in &devices() {
        let stream = device.stream()?;
        let (bias, epilogue) = (Bias::None, Epilogue::NONE);
        let problem = MatmulProblem {
            batch: 1,
            m: 4,
            n: 6,
            k: 8,
            dtype,
            out_dtype: dtype,
            precision: Precision::Full,
            bias,
            epilogue,
        };
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |bias, a: &Tensor, b: &Tensor, added: Option<&Tensor>, out: &mut Tensor| {
            let plan = Matmul::plan(device, MatmulProblem { bias, ..problem })?;
            let bias = added.map(Tensor::view);
            let args = MatmulArgs { bias, ..MatmulArgs::new(a.view(), b.view(), out.view_mut()) };
            Ok::<_, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        let (a, b) = (tensor(&[4, 8], dtype)?, tensor(&[6, 8], dtype)?);
        let (added, mut out) = (tensor(&[6], dtype)?, tensor(&[4, 6], dtype)?);
        let none = Bias::None;
        assert_eq!(
            message(none, &tensor(&[4, 7], dtype)?, &b, None, &mut out)?,
            "matmul: a: expected shape [any, 8], got [4, 7]"
        );
        assert_eq!(
            message(none, &tensor(&[5, 8], dtype)?, &b, None, &mut tensor(&[5, 6], dtype)?)?,
            "matmul: a: expected at most 4 rows, as planned, got 5"
        );
        assert_eq!(
            message(none, &a, &tensor(&[8, 6], dtype)?, None, &mut out)?,
            "matmul: b: expected shape [6, 8], got [8, 6]"
        );
        assert_eq!(
            message(none, &a, &tensor(&[6, 8], DType::F16)?, None, &mut out)?,
            "matmul: b: expected bf16, got f16"
        );
        assert_eq!(
            message(none, &a, &b, None, &mut tensor(&[4, 6], DType::F32)?)?,
            "matmul: out: expected bf16, got f32"
        );
        assert_eq!(
            message(none, &a, &b, Some(&added), &mut out)?,
            "matmul: bias: expected none, as planned, got a tensor"
        );
        assert_eq!(
            message(Bias::PerColumn, &a, &b, None, &mut out)?,
            "matmul: bias: expected a tensor, as planned, got none"
        );
        assert_eq!(
            message(Bias::PerColumn, &a, &b, Some(&tensor(&[7], dtype)?), &mut out)?,
            "matmul: bias: expected shape [6], got [7]"
        );
        let plan = Matmul::plan(device, problem)?;
        let transposed = tensor(&[8, 4], dtype)?;
        // SAFETY: 4 × 8 elements of the tensor, which lives longer.
        let columns =
            unsafe { TensorView::from_raw(device, transposed.view().address(), &[4, 8], &[1, 4], dtype)? };
        let args = MatmulArgs::new(columns, b.view(), out.view_mut());
        assert_eq!(
            plan.run(&stream, args).unwrap_err().to_string(),
            "matmul: a: expected stride 1 in the last dimension, got 4"
        );
        // SAFETY: inside the tensor, which lives longer and is not used otherwise.
        let overlapping =
            unsafe { TensorViewMut::from_raw(device, out.view().address(), &[4, 6], &[3, 1], dtype)? };
        let args = MatmulArgs::new(a.view(), b.view(), overlapping);
        assert_eq!(
            plan.run(&stream, args).unwrap_err().to_string(),
            "matmul: out: expected rows that do not overlap: a stride of at least 6, got 3"
        );
        let (a, b) = (tensor(&[2, 4, 8], dtype)?, tensor(&[2, 6, 8], dtype)?);
        let message = |batch, b: TensorView<'_>, out: TensorViewMut<'_>| {
            let plan = Matmul::plan(device, MatmulProblem { batch, ..problem })?;
            let args = MatmulArgs::new(a.view(), b, out);
            Ok::<_, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        let mut out = tensor(&[2, 4, 6], dtype)?;
        assert_eq!(
            message(1, b.view(), out.view_mut())?,
            "matmul: a: expected at most 1 products, as planned, got 2"
        );
        assert_eq!(
            message(2, b.view().slice(0, 0..1)?, out.view_mut())?,
            "matmul: b: expected shape [2, 6, 8], got [1, 6, 8]"
        );
        assert_eq!(
            message(2, b.view(), out.view_mut().reshape(&[8, 6])?)?,
            "matmul: out: expected shape [2, 4, 6], got [8, 6]"
        );
        for (strides, least) in [([23, 6, 1], 24), ([6, 11, 1], 12)] {
            // SAFETY: inside the tensor, which lives longer and is not used otherwise.
            let overlapping = unsafe {
                TensorViewMut::from_raw(device, out.view().address(), &[2, 4, 6], &strides, dtype)?
            };
            let got = strides[0].max(strides[1]);
            assert_eq!(
                message(2, b.view(), overlapping)?,
                format!(
                    "matmul: out: expected rows that do not overlap: a stride of at least {least}, got {got}"
                )
            );
        }
        let unsupported =
            |problem: MatmulProblem| Matmul::supports(device, &problem).unwrap_err().to_string();
        assert_eq!(
            unsupported(MatmulProblem { dtype: DType::I8, ..problem }),
            "matmul: problem: expected dtype f32, f16 or bf16, got i8"
        );
        assert_eq!(
            unsupported(MatmulProblem { out_dtype: DType::F16, ..problem }),
            "matmul: problem: expected out_dtype bf16 or f32, got f16"
        );
        assert_eq!(
            unsupported(MatmulProblem { k: 1 << 31, ..problem }),
            "matmul: problem: expected k below 2^31, got 2147483648"
        );
        for batch in [0, 1 << 16] {
            assert_eq!(
                unsupported(MatmulProblem { batch, ..problem }),
                format!("matmul: problem: expected batch from 1 to 65535, got {batch}")
            );
        }
        let epilogue = |act| Epilogue::of(act);
        assert_eq!(
            unsupported(MatmulProblem { epilogue: epilogue(Act::Gated(Activation::Sigmoid)), ..problem }),
            "matmul: problem: expected activation silu, gelu_tanh or gelu_erf, got sigmoid"
        );
        assert_eq!(
            unsupported(MatmulProblem {
                epilogue: Epilogue { scale: f32::NAN, ..Epilogue::NONE },
                ..problem
            }),
            "matmul: problem: expected a finite scale, got NaN"
        );
        let (a, mut out) = (tensor(&[4, 8], dtype)?, tensor(&[4, 6], dtype)?);
        let mut fused = |epilogue, b: TensorView<'_>, up, bias: Option<TensorView<'_>>, residual| {
            let planned = if bias.is_some() { Bias::PerColumn } else { Bias::None };
            let plan = Matmul::plan(device, MatmulProblem { epilogue, bias: planned, ..problem })?;
            let args = MatmulArgs { a: a.view(), b, up, bias, residual, out: out.view_mut() };
            Ok::<_, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        let gated = epilogue(Act::Gated(Activation::Silu));
        let added = Epilogue { residual: true, ..Epilogue::NONE };
        let (b, both, added_bias) =
            (tensor(&[6, 8], dtype)?, tensor(&[12, 16], dtype)?, tensor(&[6], dtype)?);
        let wide = both.view().slice(0, 0..6)?.slice(1, 0..8)?;
        let residual = tensor(&[4, 7], dtype)?;
        for (got, expected) in [
            (fused(gated, b.view(), None, None, None)?, "b: expected shape [12, 8], got [6, 8]"),
            (
                fused(gated, b.view(), Some(wide), None, None)?,
                "up: expected strides as of b: [8, 1], got [16, 1]",
            ),
            (
                fused(gated, both.view().slice(1, 0..8)?, None, Some(added_bias.view()), None)?,
                "bias: expected shape [12], got [6]",
            ),
            (
                fused(Epilogue::NONE, b.view(), Some(b.view()), None, None)?,
                "up: expected none, as planned, got a tensor",
            ),
            (fused(added, b.view(), None, None, None)?, "residual: expected a tensor, as planned, got none"),
            (
                fused(Epilogue::NONE, b.view(), None, None, Some(Residual::InPlace))?,
                "residual: expected none, as planned, got a tensor",
            ),
            (
                fused(added, b.view(), None, None, Some(Residual::Tensor(residual.view())))?,
                "residual: expected shape [4, 6], got [4, 7]",
            ),
        ] {
            assert_eq!(got, format!("matmul: {expected}"));
        }
        if device.limits().is_some() {
            let other =
                VARIANTS.iter().find(|variant| variant.dtype == DType::F32).expect("a kernel for f32");
            let message = Matmul::plan_with(device, problem, other).unwrap_err().to_string();
            assert!(
                message.starts_with("matmul: variant: expected f32 to f32 on sm_61, got bf16 to bf16 on "),
                "{message}"
            );
        }
    }
    Ok(())
}
