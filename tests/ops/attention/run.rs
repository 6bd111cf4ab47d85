//! How a device computes a case of attention, and what is expected of it.

use abi::ops::attention::{
    AttentionVariant, DECODE_LATENT_VARIANTS, DECODE_LATENT_WGMMA_VARIANTS, DECODE_RING_FP8_VARIANTS,
    DECODE_RING_VARIANTS, GATHER_VARIANTS, PREFILL_MMA_VARIANTS, VARIANTS, WGMMA_VARIANTS,
};
use proptest::prelude::*;
use testkit::compare::{Scale, Tolerance};
use testkit::round::round_to;
use warpforge::ops::attention::reference::{attention, magnitudes};
use warpforge::ops::attention::{Attention, AttentionArgs, KvScales, Offsets, ScoreBias, ScoreTensors};
use warpforge::{DType, Device, Need, Tensor, TensorView};

use super::case::*;
use crate::harness::{Contents, Executors, Layout, Rows, Wanted, check, fail, restrict, store};

/// The keys of all sequences in pages of a pool, what is the same once, and the table.
struct Pool {
    pub(super) k: Vec<f64>,
    pub(super) v: Vec<f64>,
    pub(super) table: Vec<u32>,
    /// Pages of each sequence that there is room for in the table.
    max_pages: usize,
    num_pages: usize,
}

impl Pool {
    pub(super) fn new(case: &Case, page_size: usize, k: &[f64], v: &[f64]) -> Self {
        let Case { capacity, heads: (_, heads_kv), head_dim, head_dim_v, ref lens, .. } = *case;
        let max_pages = capacity.div_ceil(page_size);
        let mut pages: Vec<[Vec<f64>; 2]> = Vec::new();
        let mut table = vec![u32::MAX; lens.len() * max_pages];
        for (sequence, &len) in lens.iter().enumerate() {
            for page in 0..len.div_ceil(page_size) {
                let keys = page * page_size..((page + 1) * page_size).min(capacity);
                let content = [(k, head_dim), (v, head_dim_v)].map(|(from, width)| {
                    let start = (sequence * capacity + keys.start) * heads_kv * width;
                    let mut rows = from[start..][..keys.len() * heads_kv * width].to_vec();
                    rows.resize(page_size * heads_kv * width, f64::NAN);
                    rows
                });
                let number = pages.iter().position(|page| *page == content).unwrap_or(pages.len());
                if number == pages.len() {
                    pages.push(content);
                }
                table[sequence * max_pages + page] = number as u32;
            }
        }
        // One that nobody has, and the last first.
        pages.push([head_dim, head_dim_v].map(|width| vec![f64::NAN; page_size * heads_kv * width]));
        pages.reverse();
        let num_pages = pages.len();
        for number in table.iter_mut().filter(|number| **number != u32::MAX) {
            *number = num_pages as u32 - 1 - *number;
        }
        let all = |i: usize| pages.iter().flat_map(|page| &page[i]).copied().collect();
        Pool { k: all(0), v: all(1), table, max_pages, num_pages }
    }
}

/// out and log-sum-exp of all sequences.
type Results = (Vec<f64>, Vec<f64>);

/// The rows of a mask in its shape.
fn mask_view<'a>(
    rows: &'a Option<Rows>,
    mask: &Option<([usize; 4], Vec<f64>)>,
) -> Result<Option<TensorView<'a>>, TestCaseError> {
    let parts = rows.as_ref().zip(mask.as_ref());
    parts.map(|(rows, (shape, _))| rows.view().reshape(shape)).transpose().map_err(fail)
}

/// Runs on a device, with the kernels that `plan` chooses or with a given one.
pub(super) fn compute(
    device: &Device,
    case: &Case,
    [q, k, v]: &[Vec<f64>; 3],
    variant: Option<&'static AttentionVariant>,
) -> Result<Results, TestCaseError> {
    let Case { dtype, seq_q, capacity, heads: (heads_q, heads_kv), q_layout, kv_layout, .. } = *case;
    let Case { head_dim, head_dim_v, is_fp8, .. } = *case;
    let batch = case.lens.len();
    let stream = device.stream().map_err(fail)?;
    let plan = match variant {
        None => Attention::plan(device, case.problem()),
        Some(variant) => Attention::plan_with(device, case.problem(), variant),
    };
    let plan = plan.map_err(fail)?;
    let pool = case.page_size.map(|page_size| (page_size, Pool::new(case, page_size, k, v)));
    let (k, v) = pool.as_ref().map_or((k, v), |(_, pool)| (&pool.k, &pool.v));
    let q_rows = Rows::input(&stream, dtype, q, head_dim, q_layout).map_err(fail)?;
    let scales = case.kv_scales();
    let cached = |values: &[f64], width, scales| {
        let mut stored = values.to_vec();
        // Exact, as the product was.
        scale_heads(&mut stored, width, scales, |value, scale| value / scale);
        Rows::input(&stream, case.dtype_kv(), &stored, width, kv_layout).map_err(fail)
    };
    let (k_rows, v_rows) = (cached(k, head_dim, &scales[0])?, cached(v, head_dim_v, &scales[1])?);
    let is_scaled = is_fp8 && scales.iter().flatten().any(|&scale| scale != 1.0);
    let [k_scale, v_scale] = scales.map(|scales| Tensor::from_slice(&stream, &[heads_kv], &scales));
    let (k_scale, v_scale) = (k_scale.map_err(fail)?, v_scale.map_err(fail)?);
    let mut out =
        Rows::output(&stream, dtype, batch * seq_q * heads_q, head_dim_v, q_layout).map_err(fail)?;
    let mut lse =
        Rows::output(&stream, DType::F32, batch * heads_q, seq_q, Layout::default()).map_err(fail)?;
    // More than there is room for means all.
    let lens = case.lens.iter().map(|&len| if len == capacity { u32::MAX } else { len as u32 });
    let lens: Vec<u32> = lens.collect();
    let kv_lens = Tensor::from_slice(&stream, &[batch], &lens).map_err(fail)?;
    let sinks = case.sinks().map(|sinks| sinks.iter().map(|&sink| sink as f32).collect::<Vec<_>>());
    let sinks =
        sinks.map(|sinks| Tensor::from_slice(&stream, &[heads_q], &sinks)).transpose().map_err(fail)?;
    let word = |&word: &u32| f64::from(word);
    let bias = (case.scores.bias != ScoreBias::None).then(|| case.bias());
    let blocks = case.scores.blocks.map(|size| case.blocks(size));
    let blocks = blocks.map(|(shape, words)| (shape, words.iter().map(word).collect::<Vec<_>>()));
    let bias_dtype = if case.scores.bias == ScoreBias::Boolean { DType::I8 } else { dtype };
    let rows_of = |dtype, mask: &Option<([usize; 4], Vec<f64>)>| {
        let rows = |(shape, values): &([usize; 4], Vec<f64>)| {
            Rows::input(&stream, dtype, values, shape[3], q_layout)
        };
        mask.as_ref().map(rows).transpose().map_err(fail)
    };
    let (bias_rows, blocks_rows) = (rows_of(bias_dtype, &bias)?, rows_of(DType::U32, &blocks)?);
    let all = case.lens.iter().all(|&len| len == capacity);
    let (outer, tokens) =
        pool.as_ref().map_or((batch, capacity), |(page_size, pool)| (pool.num_pages, *page_size));
    let table = match &pool {
        None => None,
        Some((_, pool)) => {
            let table = Tensor::from_slice(&stream, &[batch, pool.max_pages], &pool.table).map_err(fail)?;
            let used = (0..pool.table.len()).filter(|&at| pool.table[at] != u32::MAX).map(|at| at..at + 1);
            if !pool.table.is_empty() {
                restrict(&stream, &table, used, Contents::Kept).map_err(fail)?;
            }
            Some(table)
        }
    };
    let kv_shape = |width| [outer, tokens, heads_kv, width];
    let q_shape = |width| [batch, seq_q, heads_q, width];
    let k = k_rows.view().reshape(&kv_shape(head_dim)).map_err(fail)?;
    let args = AttentionArgs {
        q: q_rows.view().reshape(&q_shape(head_dim)).map_err(fail)?,
        k,
        v: match case.values {
            Place::Apart => v_rows.view().reshape(&kv_shape(head_dim_v)).map_err(fail)?,
            Place::InKeys => k.slice(3, 0..head_dim_v).map_err(fail)?,
        },
        kv_lens: (!all || pool.is_some() || case.seed.is_multiple_of(2)).then(|| kv_lens.view()),
        kv_scales: KvScales { k: is_scaled.then(|| k_scale.view()), v: is_scaled.then(|| v_scale.view()) },
        out: out.view_mut().reshape(&q_shape(head_dim_v)).map_err(fail)?,
        lse: Some(lse.view_mut().reshape(&[batch, heads_q, seq_q]).map_err(fail)?),
        scores: ScoreTensors {
            sinks: sinks.as_ref().map(Tensor::view),
            bias: mask_view(&bias_rows, &bias)?,
            blocks: mask_view(&blocks_rows, &blocks)?,
        },
        offsets: Offsets::default(),
        page_table: table.as_ref().map(Tensor::view),
    };
    plan.run(&stream, args).map_err(fail)?;
    let lse = if seq_q == 0 { Vec::new() } else { lse.read(&stream)? };
    Ok((out.read(&stream)?, lse))
}

/// Reference, naive result and magnitudes of a case.
pub(super) struct Expected {
    pub(super) reference: Results,
    /// In several orders of the sums over the head, see [`ROWS`].
    pub(super) naive: Vec<Results>,
    /// Exact, of keys and values rounded as where fp8 is gathered: of a product that f32 makes a tie of, the naive
    /// result may have the other neighbour, and by luck a much smaller error.
    gathered: Results,
    pub(super) magnitudes: Results,
}

/// All columns of a row share the errors of its scores, so a case has as many independent errors as rows; the largest
/// of a few may be next to nothing by luck. The naive result is therefore computed in as many orders as make up this
/// many rows, at most 256.
const ROWS: usize = 512;

pub(super) fn expect(case: &Case, [q, k, v]: &[Vec<f64>; 3]) -> Expected {
    let Case { dtype, seq_q, capacity, heads: (heads_q, heads_kv), head_dim, head_dim_v, .. } = *case;
    let empty = || (Vec::new(), Vec::new());
    let orders = ROWS.div_ceil((case.lens.len() * seq_q * heads_q).max(1)).min(head_dim).min(256);
    let mut expected =
        Expected { reference: empty(), naive: vec![empty(); orders], gathered: empty(), magnitudes: empty() };
    for (index, &len) in case.lens.iter().enumerate() {
        let own = case.own(index, len);
        let sequence = case.sequence(len, &own);
        let part = |data: &[f64], row: usize, rows: usize| data[index * row..][..rows].to_vec();
        let q_row = seq_q * heads_q * head_dim;
        let q = part(q, q_row, q_row);
        let cached =
            |data: &[f64], width: usize| part(data, capacity * heads_kv * width, len * heads_kv * width);
        let (k, v) = (cached(k, head_dim), cached(v, head_dim_v));
        // What a user without fp8 would have: the nearest of the type.
        let rounded = |data: &[f64]| data.iter().map(|&value| round_to(dtype, value)).collect::<Vec<_>>();
        let (k_rounded, v_rounded) = (rounded(&k), rounded(&v));
        let append = |to: &mut Results, (out, lse): Results| {
            to.0.extend(out);
            to.1.extend(lse);
        };
        append(&mut expected.reference, attention::<f64>(&sequence, &q, &k, &v, |value| value));
        let gathered = |data: &[f64]| rounded(&data.iter().map(|&x| f64::from(x as f32)).collect::<Vec<_>>());
        append(&mut expected.gathered, attention::<f64>(&sequence, &q, &gathered(&k), &gathered(&v), |x| x));
        append(&mut expected.magnitudes, magnitudes(&sequence, &q, &k, &v));
        // A rotation of all heads changes the order of the scores' sums and nothing else.
        let rotated = |data: &[f64], by: usize| -> Vec<f64> {
            data.chunks_exact(head_dim).flat_map(|head| [&head[by..], &head[..by]].concat()).collect()
        };
        for (order, naive) in expected.naive.iter_mut().enumerate() {
            let by = order * head_dim / orders;
            let (q, k) = (rotated(&q, by), rotated(&k_rounded, by));
            append(naive, attention::<f32>(&sequence, &q, &k, &v_rounded, store(dtype)));
        }
    }
    expected
}

/// Results of a device, by a kernel of the caller's choice if there is one.
pub(super) fn verify(
    (device, variant): (&Device, Option<&AttentionVariant>),
    case: &Case,
    (out, lse): &Results,
    expected: &Expected,
) -> Result<(), TestCaseError> {
    let what =
        format!("{} on {device:?} {case:?}", variant.map_or("what is planned", |variant| variant.entry));
    let Expected { reference, naive, gathered, magnitudes } = expected;
    let roundings = case.head_dim + case.capacity;
    // Against every naive order at once: the largest naive error is then that of enough rows.
    let repeat = |values: &[f64]| values.repeat(naive.len());
    let further = |((&naive, &gathered), &exact): ((&f64, &f64), &f64)| {
        if (gathered - exact).abs() > (naive - exact).abs() { gathered } else { naive }
    };
    let yardstick = |naive: &[f64], gathered: &[f64], exact: &[f64]| -> Vec<f64> {
        std::iter::zip(naive, gathered).zip(exact).map(further).collect()
    };
    let naive_out: Vec<f64> =
        naive.iter().flat_map(|(out, _)| yardstick(out, &gathered.0, &reference.0)).collect();
    let scale = repeat(&magnitudes.0);
    // Tensor cores take weights in the storage type; other kernels keep them in f32.
    let floor = device.limits().map(|limits| variant.map_or(limits.floor, |variant| variant.floor));
    let terms = floor.filter(|floor| floor.has(Need::MmaSync)).map(|_| case.dtype);
    // Values are added up with weights of up to 2^8, before the sum of the weights divides them.
    let sums: Vec<f64> = scale.iter().map(|scale| scale * 256.0 * case.capacity as f64).collect();
    let tolerance = Tolerance {
        terms,
        on_the_way: Some(&sums),
        ..Tolerance::new(case.dtype, Scale::Given(&scale), roundings)
    };
    check(&what, &repeat(out), &repeat(&reference.0), &naive_out, &tolerance)?;
    // Near a sum of 1 the hardware's logarithm has an absolute error of 2^-22, four times the naive one's.
    let scale = Scale::Given(&magnitudes.1);
    let tolerance = Tolerance { factor: 8.0, ..Tolerance::new(DType::F32, scale, roundings) };
    let naive_lse = yardstick(&naive[0].1, &gathered.1, &reference.1);
    check(&format!("{what}, lse"), lse, &reference.1, &naive_lse, &tolerance)
}

pub(super) fn planned(case: &Case, on: Executors) -> Result<(), TestCaseError> {
    let data = case.data();
    let expected = expect(case, &data);
    for device in &on.devices() {
        let results = compute(device, case, &data, None)?;
        verify((device, None), case, &results, &expected)?;
    }
    Ok(())
}

/// The wanted kernels that can do the case.
pub(super) fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let mut expected = None;
    for device in cards {
        let variants = [
            VARIANTS,
            DECODE_RING_VARIANTS,
            DECODE_RING_FP8_VARIANTS,
            DECODE_LATENT_VARIANTS,
            DECODE_LATENT_WGMMA_VARIANTS,
            PREFILL_MMA_VARIANTS,
            WGMMA_VARIANTS,
        ];
        let is_for = |gather: &AttentionVariant| gather.dtype == case.dtype && wanted(gather.entry);
        let gathers = case.is_fp8 && GATHER_VARIANTS.iter().any(is_for);
        for variant in variants.into_iter().flatten().filter(|variant| variant.dtype == case.dtype) {
            if (wanted(variant.entry) || gathers)
                && Attention::plan_with(device, case.problem(), variant).is_ok()
            {
                let data = case.data();
                let results = compute(device, case, &data, Some(variant))?;
                let expected = expected.get_or_insert_with(|| expect(case, &data));
                verify((device, Some(variant)), case, &results, expected)?;
            }
        }
    }
    Ok(())
}

/// The same bits; any NaN equals any NaN.
pub(super) fn same_bits(what: &str, got: &[f64], want: &[f64]) -> Result<(), TestCaseError> {
    testkit::compare::check_bits_eq(got, want).map_err(|mismatch| fail(format!("{what}: {mismatch}")))
}
