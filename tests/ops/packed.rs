//! Attention over packed sequences: the bits of each sequence by itself, and nothing outside of them.

use abi::ops::attention::AttentionVariant;
use proptest::prelude::*;
use proptest::sample::select;
use testkit::compare::check_bits_eq;
use testkit::strategies::Values;
use warpforge::ops::attention::{
    self as op, Attention, AttentionArgs, AttentionProblem, KvScales, Mask, Offsets, ScoreTensors, Scores,
};
use warpforge::{Arch, DType, Device, Tensor};

use crate::harness::{
    Layout, Rows, cards_of, devices, fail, floats, on_executors, one_sm, values, with_little_memory,
};

/// What is in a row before the run.
const BEFORE: f64 = 77.0;
const PAGE: usize = 16;

/// How keys lie in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Keys {
    /// One sequence after the other.
    Packed,
    /// Each with room for the longest.
    Padded,
    /// In pages of 16.
    Paged,
}

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    /// Queries and keys of each sequence.
    lens: Vec<(usize, usize)>,
    /// Most queries that are planned: some sequences may have more.
    seq_q: usize,
    /// Rows before the first sequence and behind the last one.
    gaps: (usize, usize),
    keys: Keys,
    /// Whether k and v are fp8, where they may be.
    is_fp8: bool,
    heads: (usize, usize),
    head_dims: (usize, usize),
    mask: Mask,
    window: Option<usize>,
    soft_cap: Option<f32>,
    /// What q, k and v hold.
    kind: Values,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let few = prop::collection::vec((0usize..6, 0usize..700), 1..4);
    let many = prop::collection::vec((0usize..230, 0usize..200), 1..5);
    let dims = select(vec![(64, 64), (128, 128), (40, 32), (192, 128), (256, 256), (96, 96)]);
    let sizes = (
        floats(),
        prop_oneof![1 => few, 2 => many],
        0usize..3,
        (0usize..3, 0usize..70),
        (
            select(vec![Keys::Packed, Keys::Padded, Keys::Paged]),
            prop_oneof![3 => Just(false), 1 => Just(true)],
        ),
        select(vec![(1, 1), (2, 2), (2, 1), (6, 2)]),
        dims,
    );
    let options = (
        select(vec![Mask::None, Mask::Causal]),
        prop_oneof![3 => Just(None), 1 => (1usize..80).prop_map(Some)],
        prop_oneof![3 => Just(None), 1 => Just(Some(2.0))],
        select(vec![Values::Normal, Values::WithNan]),
        any::<u64>(),
    );
    (sizes, options).prop_map(|(sizes, (mask, window, soft_cap, kind, seed))| {
        let (dtype, lens, less, gaps, (keys, is_fp8), heads, head_dims) = sizes;
        let most = lens.iter().map(|len| len.0).max().unwrap_or(0);
        let seq_q = most.saturating_sub(less);
        Case { dtype, lens, seq_q, gaps, keys, is_fp8, heads, head_dims, mask, window, soft_cap, kind, seed }
    })
}

impl Case {
    fn dtype_kv(&self) -> DType {
        let (head_dim, head_dim_v) = self.head_dims;
        let may_be =
            self.dtype != DType::F32 && self.keys != Keys::Packed && (head_dim | head_dim_v) % 16 == 0;
        if self.is_fp8 && may_be { DType::F8E4M3 } else { self.dtype }
    }

    fn seq_kv(&self) -> usize {
        self.lens.iter().map(|len| len.1).max().unwrap_or(0)
    }

    fn work(&self) -> usize {
        let rows: usize = self.lens.iter().map(|len| len.0.next_multiple_of(64)).sum();
        let products = rows * self.seq_kv().next_multiple_of(64) * self.heads.0;
        2 * products * (16 + (self.head_dims.0 + self.head_dims.1) / 4)
    }

    fn problem(&self, batch: usize) -> AttentionProblem {
        AttentionProblem {
            batch,
            seq_q: self.seq_q,
            seq_kv: self.seq_kv(),
            heads_q: self.heads.0,
            heads_kv: self.heads.1,
            head_dim: self.head_dims.0,
            head_dim_v: self.head_dims.1,
            dtype: self.dtype,
            dtype_kv: self.dtype_kv(),
            scale: None,
            mask: self.mask,
            window: self.window,
            scores: Scores { soft_cap: self.soft_cap, ..Scores::PLAIN },
            page_size: None,
        }
    }

    /// The sequences' first tokens, and the end of the last one.
    fn offsets(&self, first: usize, len: impl Fn(&(usize, usize)) -> usize) -> Vec<u32> {
        let mut end = first as u32;
        let ends = self.lens.iter().map(|lens| {
            end += len(lens) as u32;
            end
        });
        [first as u32].into_iter().chain(ends.collect::<Vec<_>>()).collect()
    }

    fn rows(&self, dtype: DType, count: usize, width: usize, seed: u64) -> Vec<f64> {
        values(self.kind, dtype, count * width, self.seed ^ seed)
    }
}

/// out and lse of a run, by rows `[token, head, column]` and `[head, token]`.
type Results = (Vec<f64>, Vec<f64>);

/// k or v: rows of `[token, head, column]`, packed without gaps.
#[derive(Clone, Copy)]
struct Cached<'a> {
    values: &'a [f64],
    width: usize,
}

fn run_packed(
    device: &Device,
    case: &Case,
    variant: Option<&'static AttentionVariant>,
    q: &[f64],
    [k, v]: [Cached<'_>; 2],
) -> Result<Results, TestCaseError> {
    let Case { dtype, heads: (heads_q, heads_kv), head_dims: (head_dim, head_dim_v), gaps, keys, .. } = *case;
    let batch = case.lens.len();
    let stream = device.stream().map_err(fail)?;
    let page_size = (keys == Keys::Paged).then_some(PAGE);
    let problem = AttentionProblem { page_size, ..case.problem(batch) };
    let plan = match variant {
        Some(variant) => Attention::plan_with(device, problem, variant),
        None => Attention::plan(device, problem),
    };
    let plan = plan.map_err(fail)?;
    let words = |words: &[u32]| Tensor::from_slice(&stream, &[words.len()], words).map_err(fail);
    let q_offsets = case.offsets(gaps.0, |len| len.0);
    let starts = case.offsets(0, |len| len.1);
    let total_q = *q_offsets.last().unwrap_or(&0) as usize + gaps.1;
    // Where sequence `s` begins in the pool of rows, and the pool's rows.
    let max_pages = case.seq_kv().div_ceil(PAGE);
    let place = |s: usize, key: usize| match keys {
        Keys::Packed => starts[s] as usize + key + gaps.0,
        Keys::Padded => s * case.seq_kv() + key,
        // Pages of a sequence from the last to the first.
        Keys::Paged => (s * max_pages + max_pages - 1 - key / PAGE) * PAGE + key % PAGE,
    };
    let shape = match keys {
        Keys::Packed => [1, gaps.0 + starts[batch] as usize + gaps.1, heads_kv],
        Keys::Padded => [batch, case.seq_kv(), heads_kv],
        Keys::Paged => [batch * max_pages, PAGE, heads_kv],
    };
    let pool = |Cached { values, width }: Cached<'_>| {
        let row = heads_kv * width;
        let mut pool = vec![f64::NAN; shape[0] * shape[1] * row];
        for (s, &(_, len)) in case.lens.iter().enumerate() {
            for key in 0..len {
                let from = (starts[s] as usize + key) * row;
                pool[place(s, key) * row..][..row].copy_from_slice(&values[from..][..row]);
            }
        }
        Rows::input(&stream, case.dtype_kv(), &pool, width, Layout::default()).map_err(fail)
    };
    let (k_rows, v_rows) = (pool(k)?, pool(v)?);
    let q_rows = Rows::input(&stream, dtype, q, head_dim, Layout::default()).map_err(fail)?;
    let before = |count: usize| vec![BEFORE; count];
    let input = |dtype, count: usize, width| {
        Rows::input(&stream, dtype, &before(count * width), width, Layout::default()).map_err(fail)
    };
    let mut out = input(dtype, total_q * heads_q, head_dim_v)?;
    let mut lse = input(DType::F32, heads_q, total_q)?;
    let numbers: Vec<u32> = (0..batch as u32 * max_pages as u32)
        .map(|at| at / max_pages as u32 * max_pages as u32 + max_pages as u32 - 1 - at % max_pages as u32)
        .collect();
    let table = Tensor::from_slice(&stream, &[batch, max_pages], &numbers).map_err(fail)?;
    let lens: Vec<u32> = case.lens.iter().map(|len| len.1 as u32).collect();
    let kv_offsets: Vec<u32> = starts.iter().map(|start| start + gaps.0 as u32).collect();
    let (q_offsets, kv_offsets, lens) = (words(&q_offsets)?, words(&kv_offsets)?, words(&lens)?);
    let kv = |width: usize| [shape[0], shape[1], shape[2], width];
    let args = AttentionArgs {
        q: q_rows.view().reshape(&[1, total_q, heads_q, head_dim]).map_err(fail)?,
        k: k_rows.view().reshape(&kv(head_dim)).map_err(fail)?,
        v: v_rows.view().reshape(&kv(head_dim_v)).map_err(fail)?,
        kv_lens: (keys != Keys::Packed).then(|| lens.view()),
        out: out.view_mut().reshape(&[1, total_q, heads_q, head_dim_v]).map_err(fail)?,
        lse: Some(lse.view_mut().reshape(&[1, heads_q, total_q]).map_err(fail)?),
        scores: ScoreTensors::default(),
        kv_scales: KvScales::default(),
        offsets: Offsets { q: Some(q_offsets.view()), kv: (keys == Keys::Packed).then(|| kv_offsets.view()) },
        page_table: (keys == Keys::Paged).then(|| table.view()),
    };
    plan.run(&stream, args).map_err(fail)?;
    Ok((out.read(&stream)?, lse.read(&stream)?))
}

/// A sequence by itself.
fn run_alone(
    device: &Device,
    case: &Case,
    variant: Option<&'static AttentionVariant>,
    (seq_q, len): (usize, usize),
    [q, k, v]: [&[f64]; 3],
) -> Result<Results, TestCaseError> {
    let Case { dtype, heads: (heads_q, heads_kv), head_dims: (head_dim, head_dim_v), .. } = *case;
    let stream = device.stream().map_err(fail)?;
    let plan = match variant {
        Some(variant) => Attention::plan_with(device, case.problem(1), variant),
        None => Attention::plan(device, case.problem(1)),
    };
    let rows =
        |dtype, values, width| Rows::input(&stream, dtype, values, width, Layout::default()).map_err(fail);
    let cached = |values, width| rows(case.dtype_kv(), values, width);
    let (q_rows, k_rows, v_rows) = (rows(dtype, q, head_dim)?, cached(k, head_dim)?, cached(v, head_dim_v)?);
    let output =
        |dtype, rows, width| Rows::output(&stream, dtype, rows, width, Layout::default()).map_err(fail);
    let (mut out, mut lse) =
        (output(dtype, seq_q * heads_q, head_dim_v)?, output(DType::F32, heads_q, seq_q)?);
    let args = AttentionArgs {
        q: q_rows.view().reshape(&[1, seq_q, heads_q, head_dim]).map_err(fail)?,
        k: k_rows.view().reshape(&[1, len, heads_kv, head_dim]).map_err(fail)?,
        v: v_rows.view().reshape(&[1, len, heads_kv, head_dim_v]).map_err(fail)?,
        kv_lens: None,
        out: out.view_mut().reshape(&[1, seq_q, heads_q, head_dim_v]).map_err(fail)?,
        lse: Some(lse.view_mut().reshape(&[1, heads_q, seq_q]).map_err(fail)?),
        scores: ScoreTensors::default(),
        kv_scales: KvScales::default(),
        offsets: Offsets::default(),
        page_table: None,
    };
    plan.map_err(fail)?.run(&stream, args).map_err(fail)?;
    Ok((out.read(&stream)?, lse.read(&stream)?))
}

/// Each sequence's rows have the bits that it has alone by the same kernel, and rows outside of all sequences, or
/// beyond the planned queries of one, are left as they were.
fn has_bits_of_single_sequences(case: &Case, devices: &[Device]) -> Result<(), TestCaseError> {
    let Case { heads: (heads_q, heads_kv), head_dims: (head_dim, head_dim_v), ref lens, gaps, .. } = *case;
    let total = |len: fn(&(usize, usize)) -> usize| lens.iter().map(len).sum::<usize>();
    let total_q = gaps.0 + total(|len| len.0) + gaps.1;
    let q = case.rows(case.dtype, total_q * heads_q, head_dim, 1);
    let k = case.rows(case.dtype_kv(), total(|len| len.1) * heads_kv, head_dim, 2);
    let v = case.rows(case.dtype_kv(), total(|len| len.1) * heads_kv, head_dim_v, 3);
    for device in devices {
        let page_size = (case.keys == Keys::Paged).then_some(PAGE);
        let chosen = |page_size| -> Result<_, TestCaseError> {
            let problem = AttentionProblem { page_size, ..case.problem(lens.len()) };
            let choice = device.limits().map(|limits| op::select(&limits, &problem, case.seq_q));
            Ok(choice.transpose().map_err(fail)?.map(|choice| choice.variant))
        };
        // Alone keys are in one piece, for which some kernels have a form of their own.
        let (variant, variant_alone) = (chosen(page_size)?, chosen(None)?);
        let cached = [Cached { values: &k, width: head_dim }, Cached { values: &v, width: head_dim_v }];
        let (out, lse) = run_packed(device, case, variant, &q, cached)?;
        let mut want = (vec![BEFORE; out.len()], vec![BEFORE; lse.len()]);
        let (mut first_q, mut first_kv) = (gaps.0, 0);
        for &(seq_q, len) in lens {
            // What is beyond the planned queries counts as not there: the rest is aligned to the last key.
            let done = seq_q.min(case.seq_q);
            let part = |data: &[f64], first: usize, count: usize, row: usize| {
                data[first * row..][..count * row].to_vec()
            };
            let own = [
                part(&q, first_q, done, heads_q * head_dim),
                part(&k, first_kv, len, heads_kv * head_dim),
                part(&v, first_kv, len, heads_kv * head_dim_v),
            ];
            if done > 0 {
                let data = [&own[0][..], &own[1], &own[2]];
                let (own_out, own_lse) = run_alone(device, case, variant_alone, (done, len), data)?;
                let row = heads_q * head_dim_v;
                want.0[first_q * row..][..done * row].copy_from_slice(&own_out);
                for head in 0..heads_q {
                    want.1[head * total_q + first_q..][..done]
                        .copy_from_slice(&own_lse[head * done..][..done]);
                }
            }
            (first_q, first_kv) = (first_q + seq_q, first_kv + len);
        }
        let what = variant.map_or("CPU", |variant| variant.entry);
        let same = |got: &[f64], want: &[f64]| {
            check_bits_eq(got, want).map_err(|mismatch| fail(format!("{what} on {device:?}: {mismatch}")))
        };
        same(&out, &want.0)?;
        same(&lse, &want.1)?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(64))]

    /// Queries packed, keys packed, with room or in pages.
    #[test]
    fn bits_of_single_sequences((case, on) in on_executors(case, Case::work)) {
        // Hopper's tiles in one block: it is there that they meet.
        let hopper = cards_of(Arch::Sm90a)[0].place();
        let meet = |device: Device| if device.place() == hopper { one_sm() } else { device };
        has_bits_of_single_sequences(&case, &on.devices().into_iter().map(meet).collect::<Vec<_>>())?;
    }
}

/// Keys in fp8 on a card with room for those of two sequences: the others' rows are nobody's of a launch.
#[test]
fn bits_of_gathered_sequences() -> Result<(), TestCaseError> {
    for (dtype, floor, keys) in [
        (DType::BF16, Arch::Sm61, Keys::Padded),
        (DType::F16, Arch::Sm80, Keys::Paged),
        (DType::BF16, Arch::Sm80, Keys::Padded),
        (DType::BF16, Arch::Sm90a, Keys::Paged),
    ] {
        let case = Case {
            dtype,
            lens: vec![(19, 200), (70, 90), (0, 50), (3, 0), (33, 199)],
            seq_q: 69,
            gaps: (5, 66),
            keys,
            is_fp8: true,
            heads: (2, 2),
            head_dims: (64, 64),
            mask: Mask::Causal,
            window: None,
            soft_cap: None,
            kind: Values::Normal,
            seed: 1,
        };
        has_bits_of_single_sequences(&case, &[with_little_memory(floor)])?;
    }
    Ok(())
}

/// A run of three sequences, 40 queries and 24 keys, with offsets as they are, and of keys if they are packed.
fn run_offsets(
    device: &Device,
    dtype: DType,
    offsets: [u32; 4],
    kv: Option<[u32; 4]>,
) -> Result<Vec<f64>, TestCaseError> {
    let stream = device.stream().map_err(fail)?;
    let (tokens, width) = (40, 64);
    let problem = AttentionProblem {
        batch: 3,
        seq_q: tokens,
        seq_kv: 8,
        heads_q: 1,
        heads_kv: 1,
        head_dim: width,
        head_dim_v: width,
        dtype,
        dtype_kv: dtype,
        scale: None,
        mask: Mask::None,
        window: None,
        scores: Scores::PLAIN,
        page_size: None,
    };
    let rows = |count: usize, seed| values(Values::Normal, dtype, count * width, seed);
    let layout = Layout::default();
    let q = Rows::input(&stream, dtype, &rows(tokens, 1), width, layout).map_err(fail)?;
    let k = Rows::input(&stream, dtype, &rows(24, 2), width, layout).map_err(fail)?;
    let before = vec![BEFORE; tokens * width];
    let mut out = Rows::input(&stream, dtype, &before, width, layout).map_err(fail)?;
    let tensor = |offsets: [u32; 4]| Tensor::from_slice(&stream, &[4], &offsets).map_err(fail);
    let (q_offsets, kv_offsets) = (tensor(offsets)?, kv.map(tensor).transpose()?);
    let keys = if kv.is_some() { [1, 24, 1, width] } else { [3, 8, 1, width] };
    let keys = k.view().reshape(&keys).map_err(fail)?;
    let args = AttentionArgs {
        q: q.view().reshape(&[1, tokens, 1, width]).map_err(fail)?,
        k: keys,
        v: keys,
        kv_lens: None,
        kv_scales: KvScales::default(),
        offsets: Offsets { q: Some(q_offsets.view()), kv: kv_offsets.as_ref().map(Tensor::view) },
        out: out.view_mut().reshape(&[1, tokens, 1, width]).map_err(fail)?,
        lse: None,
        scores: ScoreTensors::default(),
        page_table: None,
    };
    Attention::plan(device, problem).map_err(fail)?.run(&stream, args).map_err(fail)?;
    out.read(&stream)
}

/// On the CPU, offsets that do not ascend: no two sequences write a row, and the first sequence is what it is alone.
#[test]
fn offsets_that_do_not_ascend() -> Result<(), TestCaseError> {
    let run = |offsets| run_offsets(&Device::cpu(), DType::F32, offsets, None);
    // The second sequence has nothing, and the third what is behind the first.
    check_bits_eq(&run([0, 30, 10, 40])?, &run([0, 30, 30, 40])?).map_err(fail)
}

/// No token is beyond the tensors, whatever the offsets say.
#[test]
fn offsets_beyond_the_tokens() -> Result<(), TestCaseError> {
    for device in &devices() {
        for dtype in [DType::F32, DType::BF16] {
            let run = |offsets, kv| run_offsets(device, dtype, offsets, kv);
            let (want, got) = (run([0, 30, 35, 40], None)?, run([0, 30, 35, 4000], None)?);
            check_bits_eq(&got, &want).map_err(fail)?;
            let kv = [0, 8, 16, 24];
            let (want, got) = (run([0, 30, 35, 40], Some(kv))?, run([0, 30, 35, 41], Some([0, 8, 16, 99]))?);
            check_bits_eq(&got, &want).map_err(fail)?;
        }
    }
    Ok(())
}
