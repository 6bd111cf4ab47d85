//! The matrix product at the shapes of its cases.

use abi::ops::matmul::{
    AHEAD_VARIANTS, MMA_VARIANTS, MatmulTile, STREAM_NORMED_VARIANTS, STREAM_VARIANTS, VARIANTS,
    WGMMA_VARIANTS,
};
use serde_json::json;
use warpforge::ops::matmul::{
    Act, Activations, Bias, CASES, Epilogue, FP8_VARIANTS, Matmul, MatmulArgs, MatmulCase, MatmulProblem,
    PackedChoices, PermuteColumns, PermuteColumnsArgs, PermuteColumnsProblem, Precision, reference,
    select_packed,
};
use warpforge::weight::{Codes, Layout, Quantised, ScaleType, Scheme, Weight, WeightSource};
use warpforge::{Constant, DType, F8E4M3, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row, floats};

/// Columns of the first row that are checked.
const CHECKED: usize = 64;

struct Set {
    a: Tensor,
    /// A weight.
    b: Constant,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("matmul", case.name, |bencher| time(bencher, case));
    }
    for (rows, cols) in [1, 8, 128, 2048].into_iter().flat_map(|rows| [2560, 4096, 9728].map(|k| (rows, k))) {
        let label = format!("{rows}x{cols}");
        bencher.case("permute_columns", &label, |bencher| permutation(bencher, rows, cols));
    }
    for (name, scheme) in Scheme::NAMED {
        for [n, k] in PACKED_SIZES {
            for m in PACKED_ROWS {
                let label = format!("packed {name} {m}x{n}x{k}");
                let source =
                    |seed| Ok(Box::new(Quantised::new([n, k], scheme, rows(seed))?) as Box<dyn Rows>);
                let how = (scheme.layout(), Activations::AsGiven);
                bencher.case("matmul", &label, |bencher| time_packed(bencher, how, [m, n, k], source));
            }
        }
    }
    let rows_of = [("by fp8", Activations::Fp8), ("as given", Activations::AsGiven)];
    for ((name, scheme), (what, activations)) in
        FP8.into_iter().flat_map(|scheme| rows_of.map(|rows| (scheme, rows)))
    {
        for [m, n, k] in FP8_SIZES {
            let label = format!("packed {name} {what} {m}x{n}x{k}");
            let source = |seed| Ok(Box::new(Quantised::new([n, k], scheme, rows(seed))?) as Box<dyn Rows>);
            let how = (scheme.layout(), activations);
            bencher.case("matmul", &label, |bencher| time_packed(bencher, how, [m, n, k], source));
        }
    }
    for (name, layout) in GGUF {
        for [n, k] in PACKED_SIZES {
            for m in PACKED_ROWS {
                let label = format!("packed {name} {m}x{n}x{k}");
                let source = |seed| Ok(Box::new(GgufRows { layout, size: [n, k], seed }) as Box<dyn Rows>);
                let how = (layout, Activations::AsGiven);
                bencher.case("matmul", &label, |bencher| time_packed(bencher, how, [m, n, k], source));
            }
        }
    }
}

/// Rows before weights whose columns have an order of their own: of the projections of Qwen3-4B.
fn permutation(bencher: &mut Bencher, rows: usize, cols: usize) -> Result<(), Failure> {
    let dtype = DType::BF16;
    let plan = PermuteColumns::plan(&bencher.device, PermuteColumnsProblem::new(rows, cols, dtype))?;
    let report = plan.report();
    let shape = json!({ "rows": rows, "cols": cols });
    let work = Work { dtype: dtype.name(), shape, bytes: report.bytes, flops: report.flops };
    if !bencher.starts(work)? {
        return Ok(());
    }
    // Every column once: the factor is a prime that no width has.
    let order: Vec<u32> = (0..cols).map(|place| (place * 7919 % cols) as u32).collect();
    let mut sets = bencher.sets(|bencher, seed| {
        let x = bencher.random(&[rows, cols], dtype, seed)?;
        let places = Tensor::from_slice(&bencher.stream, &[cols], &order)?;
        Ok((x, places, Tensor::empty(&bencher.stream, &[rows, cols], dtype)?))
    })?;
    let run = |stream: &Stream, (x, order, out): &mut (Tensor, Tensor, Tensor)| {
        plan.run(stream, PermuteColumnsArgs::new(x.view(), order.view(), out.view_mut()))
    };
    let verify = |stream: &Stream, (x, _, out): &(Tensor, Tensor, Tensor)| {
        let want = reference::permute_columns(&first_row(x, stream)?, cols, &order);
        if first_row(out, stream)? == want { Ok(()) } else { Err("a row differs from the reference".into()) }
    };
    bencher.time(&report, &mut sets, run, verify)
}

/// Weights of projections: a large one, and those of Qwen3-4B.
const PACKED_SIZES: [[usize; 2]; 4] = [[28672, 8192], [19456, 2560], [6144, 2560], [2560, 9728]];
const PACKED_ROWS: [usize; 8] = [1, 8, 16, 32, 64, 128, 256, 4096];

/// fp8 with scales of blocks, and of rows.
const FP8: [(&str, Scheme); 2] =
    [("fp8", Scheme::FP8), ("fp8 channel", Scheme { rows: 1, group: 0, ..Scheme::FP8 })];
/// Rows that become fp8: of a square, and of the projections of Qwen3-4B.
const FP8_SIZES: [[usize; 3]; 12] = [
    [8192, 8192, 8192],
    [4096, 28672, 8192],
    [4096, 19456, 2560],
    [4096, 6144, 2560],
    [4096, 2560, 9728],
    [1024, 19456, 2560],
    [1024, 2560, 9728],
    [256, 19456, 2560],
    [256, 2560, 9728],
    [128, 19456, 2560],
    [128, 6144, 2560],
    [80, 2560, 9728],
];

/// GGUF's Q4_K and Q6_K, as they are packed.
const GGUF: [(&str, Layout); 2] = [
    (
        "q4_k",
        Layout {
            codes: Codes::Int4,
            group: 32,
            rows: 1,
            scale: ScaleType::U8Super,
            zeros: false,
            minimums: true,
            permuted: false,
        },
    ),
    (
        "q6_k",
        Layout {
            codes: Codes::Int8,
            group: 16,
            rows: 1,
            scale: ScaleType::I8Super,
            zeros: false,
            minimums: false,
            permuted: false,
        },
    ),
];

/// A number for each place, as good as random.
fn scramble(seed: u64, row: usize, index: usize) -> u64 {
    let mut state = seed ^ (row as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (index as u64) << 1;
    state = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ state >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    state >> 33
}

/// What is packed, and what it stands for.
trait Rows: WeightSource {
    fn values(&self, row: usize, values: &mut [f32]);
}

/// Rows that are made, and not stored, before they are quantised.
fn rows(seed: u64) -> impl Fn(usize, &mut [f32]) + Sync {
    move |row, values| {
        for (index, value) in values.iter_mut().enumerate() {
            *value = (scramble(seed, row, index) as f32 / (1u64 << 30) as f32 - 1.0) * 0.03;
        }
    }
}

impl<R: Fn(usize, &mut [f32]) + Sync> Rows for Quantised<R> {
    fn values(&self, row: usize, values: &mut [f32]) {
        self.dequantise(row, values);
    }
}

/// Codes of a layout with super scales, as a file has them.
struct GgufRows {
    layout: Layout,
    size: [usize; 2],
    seed: u64,
}

/// The factor of all scales and minimums, a power of two.
const SUPER: f32 = 1.0 / 8192.0;

impl WeightSource for GgufRows {
    fn size(&self) -> [usize; 2] {
        self.size
    }

    fn layout(&self) -> Layout {
        self.layout
    }

    fn codes(&self, row: usize, codes: &mut [u8]) {
        for (index, code) in codes.iter_mut().enumerate() {
            // 4 bits, or 6 bits that count from 32, as 8 that count from 128.
            let random = scramble(self.seed, row, index);
            *code = if self.layout.codes.bits() == 4 { random % 16 } else { 96 + random % 64 } as u8;
        }
    }

    fn scale(&self, row: usize, group: usize) -> u32 {
        1 + (scramble(!self.seed, row, group) % 63) as u32
    }

    fn minimum(&self, row: usize, group: usize) -> u32 {
        (scramble(!self.seed, row, group) >> 8) as u32 % 63
    }

    fn supers(&self, _row: usize, _stretch: usize) -> [u16; 2] {
        [half::f16::from_f32(SUPER).to_bits(); 2]
    }
}

impl Rows for GgufRows {
    fn values(&self, row: usize, values: &mut [f32]) {
        let mut codes = vec![0; values.len()];
        self.codes(row, &mut codes);
        for (index, (value, code)) in values.iter_mut().zip(codes).enumerate() {
            let group = index / self.layout.group as usize;
            let minimum = if self.layout.minimums { self.minimum(row, group) as f32 } else { 0.0 };
            let code = f32::from(code) - f32::from(self.layout.zero());
            *value = SUPER * (self.scale(row, group) as f32 * code - minimum);
        }
    }
}

/// What 128 elements of a row are when they have become fp8.
pub fn as_fp8(block: &[f64]) -> Vec<f64> {
    let scale = block.iter().fold(0.0, |most: f64, value| most.max(value.abs())) / 448.0;
    let value =
        |x: &f64| f64::from(F8E4M3::from_f32((x / scale.max(f64::MIN_POSITIVE)) as f32).to_f32()) * scale;
    block.iter().map(value).collect()
}

fn time_packed(
    bencher: &mut Bencher,
    (layout, activations): (Layout, Activations),
    [m, n, k]: [usize; 3],
    source: impl Fn(u64) -> Result<Box<dyn Rows>, Failure>,
) -> Result<(), Failure> {
    let dtype = DType::BF16;
    let problem = MatmulProblem { weight: Some(layout), activations, ..MatmulProblem::new(m, n, k, dtype) };
    let device = bencher.device.clone();
    let named = bencher.kernel.as_deref();
    let variant = FP8_VARIANTS.iter().find(|variant| Some(variant.entry) == named);
    let plan = match (variant, device.limits()) {
        (Some(variant), Some(limits)) if activations == Activations::Fp8 => {
            let choices = select_packed(&limits, &problem, &layout);
            Matmul::plan_packed(&device, problem, PackedChoices { fp8: (vec![variant], 0), ..choices })?
        }
        _ => Matmul::plan(&device, problem)?,
    };
    let report = plan.report();
    let is_fp8 = FP8_VARIANTS.iter().any(|variant| variant.entry == report.variant);
    let shape = json!({ "m": m, "n": n, "k": k, "weight": format!("{layout:?}") });
    let work = Work { dtype: dtype.name(), shape, bytes: report.bytes, flops: report.flops };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let mut sets = bencher.sets(|bencher, seed| {
        let a = bencher.random(&[m, k], dtype, seed)?;
        let weight = Weight::pack(&bencher.stream, &*source(seed)?)?;
        Ok((a, weight, Tensor::empty(&bencher.stream, &[m, n], dtype)?, seed))
    })?;
    let run = |stream: &Stream, (a, weight, out, _): &mut (Tensor, Weight, Tensor, u64)| {
        plan.run(stream, MatmulArgs::new(a.view(), &*weight, out.view_mut()))
    };
    let verify = |stream: &Stream, (a, _, out, seed): &(Tensor, Weight, Tensor, u64)| {
        let a = first_row(a, stream)?;
        let a = if is_fp8 { a.chunks(128).flat_map(as_fp8).collect() } else { a };
        let (source, mut row) = (source(*seed)?, vec![0.0; k]);
        let mut b = Vec::new();
        for index in 0..CHECKED {
            source.values(index, &mut row);
            b.extend(row.iter().map(|&value| f64::from(value)));
        }
        let want = reference::matmul::<f64>(&a, &b, None, [1, CHECKED, k], |v| v);
        expect_close(dtype, &first_row(out, stream)?[..want.len()], &want)
    };
    bencher.time(&report, &mut sets, run, verify)
}

pub fn time(bencher: &mut Bencher, case: &MatmulCase) -> Result<(), Failure> {
    let &MatmulCase { batch, m, n, k, act, dtype, precision, .. } = case;
    let epilogue = Epilogue::of(act);
    let bias = Bias::None;
    let problem = MatmulProblem { batch, precision, bias, epilogue, ..MatmulProblem::new(m, n, k, dtype) };
    // The gate's rows, then up's.
    let (b_rows, activation) = match act {
        Act::None => (n, None),
        Act::Of(activation) => (n, Some(activation)),
        Act::Gated(activation) => (2 * n, Some(activation)),
    };
    let mut shape = json!({ "batch": batch, "m": m, "n": n, "k": k });
    if let Some(activation) = activation {
        shape["activation"] = json!(activation.name());
        shape["gated"] = json!(b_rows != n);
    }
    if precision == Precision::Tf32 {
        shape["tf32"] = json!(true);
    }
    let variants = || {
        let first = WGMMA_VARIANTS.iter().chain(MMA_VARIANTS).chain(STREAM_VARIANTS);
        first.chain(AHEAD_VARIANTS).chain(STREAM_NORMED_VARIANTS).chain(VARIANTS)
    };
    let device = bencher.device.clone();
    let planned = |entry: &str| match variants().find(|variant| variant.entry == entry) {
        Some(variant) => Matmul::plan_with(&device, problem, variant),
        None => Matmul::plan(&device, problem),
    };
    let plan = planned(bencher.kernel.as_deref().unwrap_or_default())?;
    let report = plan.report();
    let work = Work { dtype: dtype.name(), shape, bytes: report.bytes, flops: report.flops };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let mut sets = bencher.sets(|bencher, seed| {
        let a = bencher.random(&[batch * m, k], dtype, seed)?;
        let b = Constant::new(bencher.random(&[batch * b_rows, k], dtype, 1000 + seed)?, &bencher.stream)?;
        Ok(Set { a, b, out: Tensor::empty(&bencher.stream, &[batch * m, n], dtype)? })
    })?;
    let run = |plan: &Matmul, stream: &Stream, set: &mut Set| {
        let (a, b, out) = (set.a.view(), set.b.view(), set.out.view_mut());
        let args = match batch {
            1 => MatmulArgs::new(a, b, out),
            _ => MatmulArgs::new(
                a.reshape(&[batch, m, k])?,
                b.reshape(&[batch, b_rows, k])?,
                out.reshape(&[batch, m, n])?,
            ),
        };
        plan.run(stream, args)
    };
    let verify = |stream: &Stream, set: &Set| {
        let a = first_row(&set.a, stream)?;
        let checked = CHECKED.min(n);
        let mut b = Vec::new();
        for first in (0..b_rows).step_by(n) {
            b.extend(floats(set.b.view().slice(0, first..first + checked)?, stream)?);
        }
        let want = reference::fused::<f64>((&a, &b), None, None, [1, checked, k], &epilogue, |v| v);
        // tf32 has as many bits as f16.
        let close_as = if precision == Precision::Tf32 { DType::F16 } else { dtype };
        expect_close(close_as, &first_row(&set.out, stream)?[..want.len()], &want)
    };
    // Ordinary arithmetic is never faster where the tensor cores have the type.
    let is_slow = |tile| matches!(tile, MatmulTile::Simt { .. } | MatmulTile::Gemv { .. }) && m > 1;
    let entries = variants().filter(|variant| !is_slow(variant.tile)).map(|variant| variant.entry);
    bencher.time_among(&report, &mut sets, (entries, planned), &plan, run, verify)
}
