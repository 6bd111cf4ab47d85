//! A case of the matrix product: what it is made of, how a device computes it, what is expected of it.

use abi::ops::matmul::{
    AHEAD_VARIANTS, MMA_VARIANTS, MatmulTile, MatmulVariant, STREAM_NORMED_VARIANTS, STREAM_VARIANTS,
    VARIANTS, WGMMA_VARIANTS,
};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::round::{min_normal, round_to};
use testkit::strategies::{Values, dims, dims_from, finite_values, stride_padding};
use warpforge::ops::glu::Activation;
use warpforge::ops::matmul::reference;
use warpforge::ops::matmul::{
    Act, Bias, Epilogue, Matmul, MatmulArgs, MatmulProblem, Precision, Residual, RowNorm,
};
use warpforge::ops::rmsnorm::NormWeight;
use warpforge::weight::Weight;
use warpforge::{DType, Device, Error, Stream, TensorView};

use crate::harness::{Layout, Rows, Wanted, check, fail, floats, runs, store, values};

#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) problem: MatmulProblem,
    pub(super) a_layout: Layout,
    pub(super) b_layout: Layout,
    pub(super) out_layout: Layout,
    pub(super) kind: Values,
    pub(super) seed: u64,
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

/// A product of these sizes and nothing else.
pub(super) fn plain([m, n, k]: [usize; 3], dtype: DType) -> MatmulProblem {
    MatmulProblem::new(m, n, k, dtype)
}

/// A problem of a strategy's parts. Every second product of f32 may be one of tf32.
fn drawn(
    sizes: [usize; 3],
    (dtype, out_dtype): (DType, DType),
    (bias, epilogue): (Bias, Epilogue),
    seed: u64,
) -> MatmulProblem {
    let precision = if dtype == DType::F32 && seed & 8 == 0 { Precision::Tf32 } else { Precision::Full };
    MatmulProblem { out_dtype, precision, bias, epilogue, ..plain(sizes, dtype) }
}

pub(super) fn case() -> impl Strategy<Value = Case> {
    let m = prop_oneof![2 => dims(&[2, 4, 8], 17), 1 => dims(&[64], 140)];
    let n = dims_from(1, &[8, 64], 140);
    let k = prop_oneof![3 => dims_from(1, &[8, 16, 32], 130), 1 => dims_from(1, &[128, 512], 1100)];
    let ends = (bias(), epilogue());
    ((types(), m, n, k, ends), (layout(), layout(), layout()), finite_values(), any::<u64>()).prop_map(
        |(((dtype, out_dtype), m, n, k, (bias, epilogue)), (a_layout, b_layout, out_layout), kind, seed)| {
            let problem = drawn([m, n, k], (dtype, out_dtype), (bias, epilogue), seed);
            Case { problem, a_layout, b_layout, out_layout, kind, seed }
        },
    )
}

/// Few rows and contiguous operands, and where the operands of one row lie.
pub(super) fn few_rows() -> impl Strategy<Value = (Case, Layout)> {
    let sizes = (2usize..9, dims_from(1, &[8, 64], 100), dims_from(1, &[128, 1024], 5000));
    (types(), sizes, (bias(), epilogue()), layout(), any::<u64>()).prop_map(
        |((dtype, out_dtype), (m, n, k), (bias, epilogue), moved, seed)| {
            let problem = drawn([m, n, k], (dtype, out_dtype), (bias, epilogue), seed);
            (contiguous(problem, seed), moved)
        },
    )
}

pub(super) fn streamed_rows() -> impl Strategy<Value = Case> {
    let rows = prop_oneof![1usize..17, 17usize..65];
    let sizes = (rows, dims_from(1, &[8, 64], 200), dims_from(1, &[16, 128], 300));
    let types = types().prop_filter("of 16 bits", |(dtype, _)| *dtype != DType::F32);
    let ends = (bias(), epilogue());
    (types, sizes, ends, any::<u64>()).prop_map(|((dtype, out_dtype), (m, n, k), (bias, epilogue), seed)| {
        contiguous(drawn([m, n, 8 * k], (dtype, out_dtype), (bias, epilogue), seed), seed)
    })
}

/// What the tensor cores' kernels take in pieces, with all that an epilogue can be.
pub(super) fn aligned() -> impl Strategy<Value = Case> {
    let sizes = (1usize..150, 1usize..24, 1usize..20);
    (types(), sizes, bias(), epilogue(), any::<u64>()).prop_map(
        |((dtype, out_dtype), (m, n, k), bias, epilogue, seed)| {
            contiguous(drawn([m, 8 * n, 8 * k], (dtype, out_dtype), (bias, epilogue), seed), seed)
        },
    )
}

/// Rows that are normed before they are multiplied, one half of the time, perhaps with something between them. No
/// element is so large that one which is rounded the other way leaves the naive error behind.
pub(super) fn normed_rows() -> impl Strategy<Value = Case> {
    let k = prop_oneof![1 => 1usize..16, 8 => 16usize..140, 2 => 500usize..513];
    let m = prop_oneof![Just(1), 2..=RowNorm::MAX_ROWS];
    let sizes = (m, dims_from(1, &[8, 16, 64], 200), k, prop_oneof![Just(0usize), 1usize..5]);
    let norm = (
        prop_oneof![Just(1e-6f32), Just(0.5)],
        prop_oneof![Just(NormWeight::Plain), Just(NormWeight::ZeroCentred)],
    );
    let types = prop_oneof![Just(DType::BF16), Just(DType::F16)];
    let ends = (bias(), epilogue());
    (types, sizes, norm, ends, any::<u64>()).prop_map(
        |(dtype, (m, n, k, padding), (eps, weight), (bias, epilogue), seed)| {
            let problem = drawn([m, n, 8 * k], (dtype, dtype), (bias, epilogue), seed);
            let norm = Some(RowNorm { eps, weight });
            let between = Layout { padding: 8 * padding, offset: 0 };
            Case { a_layout: between, ..contiguous(MatmulProblem { norm, ..problem }, seed) }
        },
    )
}

pub(super) fn many_rows() -> impl Strategy<Value = Case> {
    let sizes = (18usize..300, dims_from(1, &[64, 128], 300), dims_from(1, &[8, 16, 32], 200));
    (types(), sizes, epilogue(), any::<u64>()).prop_map(|((dtype, out_dtype), (m, n, k), epilogue, seed)| {
        contiguous(drawn([m, n, k], (dtype, out_dtype), (Bias::None, epilogue), seed), seed)
    })
}

pub(super) fn contiguous(problem: MatmulProblem, seed: u64) -> Case {
    let place = Layout::default();
    Case { problem, a_layout: place, b_layout: place, out_layout: place, kind: Values::Normal, seed }
}

/// How the matrices of a stack lie in memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
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
pub(super) fn batched() -> impl Strategy<Value = (Case, [Order; 3])> {
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
            let problem =
                MatmulProblem { batch, ..drawn([m, n, k], (dtype, out_dtype), (bias, epilogue), seed) };
            let kind = Values::Normal;
            (Case { problem, a_layout, b_layout, out_layout, kind, seed }, [a, b, out])
        },
    )
}

/// Rows of b: twice as many if the product is gated.
pub(super) fn b_rows(problem: &MatmulProblem) -> usize {
    if matches!(problem.epilogue.act, Act::Gated(_)) { 2 * problem.n } else { problem.n }
}

impl Case {
    pub(super) fn work(&self) -> usize {
        let MatmulProblem { batch, m, k, .. } = self.problem;
        let n = b_rows(&self.problem);
        // Of few rows: a warp per column and 8 rows.
        batch * (m.div_ceil(8) * n * (1500 + 4 * k) + self.work_in_tiles())
    }

    /// Tiles of 64, whose operands are read from shared memory.
    pub(super) fn work_in_tiles(&self) -> usize {
        let MatmulProblem { m, k, .. } = self.problem;
        let n = b_rows(&self.problem);
        m.next_multiple_of(64) * n.next_multiple_of(64) * (k + 100) / 8
    }
}

/// Inputs as exact f64; the rows of b are those of the gate, then those of up.
#[derive(Clone)]
pub(super) struct Inputs {
    pub(super) a: Vec<f64>,
    pub(super) b: Vec<f64>,
    /// Of values of b that are sums, as where a packed weight has minimums: how large their terms are together.
    pub(super) b_sizes: Option<Vec<f64>>,
    pub(super) gain: Option<Vec<f64>>,
    pub(super) bias: Option<Vec<f64>>,
    pub(super) residual: Option<Vec<f64>>,
}

impl Inputs {
    /// The rows `rows` of a and the residual.
    pub(super) fn rows(
        &self,
        rows: std::ops::Range<usize>,
        &MatmulProblem { n, k, .. }: &MatmulProblem,
    ) -> Inputs {
        let part = |values: &[f64], cols: usize| values[rows.start * cols..rows.end * cols].to_vec();
        let residual = self.residual.as_ref().map(|residual| part(residual, n));
        Inputs { a: part(&self.a, k), residual, ..self.clone() }
    }
}

/// The inputs of a case, of all its products.
pub(super) fn inputs(case: &Case) -> Inputs {
    let MatmulProblem { batch, m, n, k, dtype, out_dtype, bias, epilogue, norm, .. } = case.problem;
    let b_rows = b_rows(&case.problem);
    Inputs {
        a: values(case.kind, dtype, batch * m * k, case.seed),
        b: values(case.kind, dtype, batch * b_rows * k, case.seed ^ 1),
        b_sizes: None,
        gain: norm.map(|_| values(case.kind, dtype, k, case.seed ^ 4)),
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
pub(super) fn product(
    device: &Device,
    plan: &Matmul,
    case: &Case,
    inputs: &Inputs,
) -> Result<Vec<f64>, TestCaseError> {
    product_of(device, plan, case, inputs, None)
}

/// The same, perhaps with a packed weight in the place of b.
pub(super) fn product_of(
    device: &Device,
    plan: &Matmul,
    case: &Case,
    inputs: &Inputs,
    packed: Option<&Weight>,
) -> Result<Vec<f64>, TestCaseError> {
    let MatmulProblem { m, n, k, dtype, epilogue, .. } = case.problem;
    let stream = device.stream().map_err(fail)?;
    let a = Rows::input(&stream, dtype, &inputs.a, k, case.a_layout).map_err(fail)?;
    // A gated product's rows: gate above up, apart, or each row of the gate beside one of up.
    let gated = matches!(epilogue.act, Act::Gated(_));
    let (gate, up) = inputs.b.split_at(n * k);
    // A weight: a row of a takes the kernel that reads it ahead, where there is one.
    let rows = |values: &[f64], cols| {
        let rows = Rows::input(&stream, dtype, values, cols, case.b_layout);
        rows.and_then(|rows| rows.constant(&stream)).map_err(fail)
    };
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
    let gain = inputs.gain.as_ref().map(|gain| {
        let gain = Rows::input(&stream, dtype, gain, k, Layout::default())?.constant(&stream)?;
        Ok::<_, Error>(gain)
    });
    let gain = gain.transpose().map_err(fail)?;
    let gain = gain.as_ref().map(|gain| gain.view().reshape(&[k])).transpose().map_err(fail)?;
    let mut ends = Ends::new(&stream, case, inputs, m).map_err(fail)?;
    let residual = match &ends.residual {
        Some(residual) => Some(Residual::Tensor(residual.view())),
        None => epilogue.residual.then_some(Residual::InPlace),
    };
    let bias = ends.bias.as_ref().map(|bias| bias.view().reshape(&[b_rows(&case.problem)])).transpose();
    let bias = bias.map_err(fail)?;
    let (b, up) = match packed {
        Some(weight) => (weight.into(), None),
        None => (b.into(), up),
    };
    let args = MatmulArgs { a: a.view(), b, up, gain, bias, residual, out: ends.out.view_mut() };
    plan.run(&stream, args).map_err(fail)?;
    ends.out.read(&stream)
}

/// The specification, the naive computation, and the sum of the terms' absolute values.
pub(super) struct Expected {
    want: Vec<f64>,
    naive: Vec<f64>,
    terms: Vec<f64>,
    /// The sizes of a product's terms added up, before the scale, or of what becomes of it.
    sums: Vec<f64>,
    /// The residual, or zeros.
    added: Vec<f64>,
}

impl Expected {
    pub(super) fn of(problem: &MatmulProblem, inputs: &Inputs) -> Self {
        let &MatmulProblem { m, n, k, out_dtype, precision, ref epilogue, .. } = problem;
        let sizes = [m, n, k];
        let Inputs { a, b, b_sizes, gain, bias, residual } = inputs;
        // The naive computation rounds the row behind its norm.
        let normed = |store: &dyn Fn(f64) -> f64| match (gain, &problem.norm) {
            (Some(gain), Some(norm)) => reference::normed::<f64>(a, gain, norm, store),
            _ => a.clone(),
        };
        let (a, rounded) = (&normed(&|value| value), &normed(&|value| round_to(problem.dtype, value)));
        let (bias, residual) = (bias.as_deref(), residual.as_deref());
        // What tf32 takes of an f32.
        let lost = if precision == Precision::Tf32 { 13 } else { 0 };
        let cut = |values: &[f64]| {
            let part = |&value: &f64| f64::from(f32::from_bits((value as f32).to_bits() >> lost << lost));
            values.iter().map(part).collect::<Vec<f64>>()
        };
        // Tensor cores shift a product as if a subnormal f16 had the exponent of the smallest normal number, and cut
        // off what is then below the last bit (crates/cuda_std/src/sim/tensor_core.rs).
        let least = if problem.dtype == DType::F16 { min_normal(DType::F16) } else { 0.0 };
        let size = |&value: &f64| if value == 0.0 { 0.0 } else { value.abs().max(least) };
        let absolute = |values: &[f64]| values.iter().map(size).collect::<Vec<f64>>();
        // Without the activation, whose slope is at most 1.13: of a gated product both factors.
        let b_rows = b_rows(problem);
        let scale = f64::from(epilogue.scale.abs());
        let b_terms = absolute(b_sizes.as_ref().unwrap_or(b));
        let sums = reference::matmul::<f64>(&absolute(a), &b_terms, None, [m, b_rows, k], |v| v);
        let linear = |row: usize, col: usize| {
            scale * sums[row * b_rows + col] + bias.map_or(0.0, |bias| bias[col].abs())
        };
        let term = |index: usize| {
            let (row, col) = (index / n, index % n);
            let up = if b_rows == n { 1.0 } else { linear(row, n + col) };
            linear(row, col) * up + residual.map_or(0.0, |residual| residual[index].abs())
        };
        let terms: Vec<f64> = (0..m * n).map(term).collect();
        let largest = |(index, &term): (usize, &f64)| {
            let of_row = &sums[index / n * b_rows..][..b_rows];
            let up = if b_rows == n { 0.0 } else { of_row[n + index % n] };
            term.max(of_row[index % n]).max(up)
        };
        Expected {
            sums: terms.iter().enumerate().map(largest).collect(),
            want: reference::fused::<f64>((a, b), bias, residual, sizes, epilogue, |v| v),
            naive: reference::fused::<f32>(
                (&cut(rounded), &cut(b)),
                bias,
                residual,
                sizes,
                epilogue,
                store(out_dtype),
            ),
            terms,
            added: residual.map_or_else(|| vec![0.0; m * n], <[f64]>::to_vec),
        }
    }

    pub(super) fn check(
        &self,
        what: &str,
        got: &[f64],
        problem: &MatmulProblem,
    ) -> Result<(), TestCaseError> {
        // A multiplication, an addition, six operations of an activation and two behind it.
        let steps = if problem.epilogue == Epilogue::NONE { 1 } else { 10 };
        // Tensor cores, which take no f32 as it is, cut off where f32 arithmetic rounds. That errs twice as much: four
        // times the roundings, of whose number the root counts.
        let is_cut = problem.dtype != DType::F32 || problem.precision == Precision::Tf32;
        let roundings = if is_cut { 4 * problem.k } else { problem.k } + steps;
        let tolerance = Tolerance {
            on_the_way: Some(&self.sums),
            activated: (problem.epilogue.act != Act::None).then_some(&self.added),
            ..Tolerance::new(problem.out_dtype, Scale::Given(&self.terms), roundings)
        };
        check(what, got, &self.want, &self.naive, &tolerance)
    }
}

pub(super) fn plan(
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
pub(super) fn variants(problem: &MatmulProblem) -> impl Iterator<Item = &'static MatmulVariant> {
    let MatmulProblem { m, dtype, out_dtype, precision, norm, .. } = *problem;
    VARIANTS
        .iter()
        .chain(AHEAD_VARIANTS)
        .chain(STREAM_NORMED_VARIANTS)
        .chain(MMA_VARIANTS)
        .chain(STREAM_VARIANTS)
        .chain(WGMMA_VARIANTS)
        .filter(move |variant| (variant.dtype, variant.out_dtype) == (dtype, out_dtype))
        .filter(move |variant| precision == Precision::Tf32 || !variant.is_tf32())
        .filter(move |variant| match variant.tile {
            MatmulTile::Ahead { .. } => norm.is_none() || m == 1,
            MatmulTile::StreamNormed { .. } => norm.is_some(),
            _ => norm.is_none(),
        })
}

/// The wanted kernels that can do the case.
pub(super) fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let inputs = inputs(case);
    let mut expected = None;
    for device in cards {
        for variant in variants(&case.problem).filter(|v| runs(device, v.floor) && wanted(v.entry)) {
            let plan = plan(device, case.problem, Some(variant))?;
            let got = product(device, &plan, case, &inputs)?;
            let expected = expected.get_or_insert_with(|| Expected::of(&case.problem, &inputs));
            expected.check(variant.entry, &got, &case.problem)?;
        }
    }
    Ok(())
}

/// Several products by the planned kernels or given ones, each against its reference.
pub(super) fn run_batched(
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
        b: b_order.view(b_memory.view(), [batch, b_rows, k]).map_err(fail)?.into(),
        up: None,
        gain: None,
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
            gain: None,
            a: part(&inputs.a, m * k),
            b: part(&inputs.b, b_rows * k),
            b_sizes: None,
            bias: inputs.bias.clone(),
            residual: inputs.residual.as_ref().map(|residual| part(residual, m * n)),
        };
        let what = format!("{}, product {product}", plan.report().variant);
        Expected::of(&case.problem, &own).check(&what, &part(&got, m * n), &case.problem)?;
    }
    Ok(())
}
