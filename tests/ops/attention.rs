//! Attention against its reference.

use abi::ops::attention::{
    AttentionVariant, DECODE_LATENT_VARIANTS, DECODE_RING_FP8_VARIANTS, DECODE_RING_VARIANTS,
    GATHER_PAGES_VARIANTS, GATHER_VARIANTS, PREFILL_MMA_VARIANTS, VARIANTS, WGMMA_VARIANTS,
};
use proptest::prelude::*;
use proptest::sample::select;
use testkit::compare::{Scale, Tolerance};
use testkit::round::round_to;
use testkit::strategies::{Rng, Values, dims, finite_values, stride_padding};
use warpforge::ops::attention::reference::{Options, Sequence, attention, magnitudes};
use warpforge::ops::attention::{
    Attention, AttentionArgs, AttentionProblem, Bias, KvScales, Mask, Offsets, PAGE_SIZES, ScoreTensors,
    Scores,
};
use warpforge::{Arch, DType, Device, Error, Tensor, TensorView};

use crate::harness::{
    Contents, EVERY, Executors, Layout, Rows, Wanted, cards_of, check, devices, devices_for, every_kernel,
    fail, floats, on_executors, restrict, store, values,
};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// In rows of its own.
    Apart,
    /// The first columns of k's rows.
    InKeys,
}

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    seq_q: usize,
    /// Keys of each sequence.
    lens: Vec<usize>,
    /// Keys that the views have room for.
    capacity: usize,
    /// Query heads, and heads of k and v.
    heads: (usize, usize),
    head_dim: usize,
    head_dim_v: usize,
    /// Where v is.
    values: Place,
    mask: Mask,
    window: Option<usize>,
    scale: Option<f32>,
    scores: Scores,
    /// Of every other head, from the first on; the others have 1.
    sinks: Option<f64>,
    /// What q is multiplied by, besides: how large the scores are.
    gain: f64,
    /// Of v.
    kind: Values,
    q_layout: Layout,
    kv_layout: Layout,
    /// Keys of a page, if k and v are in pages.
    page_size: Option<usize>,
    /// Whether k and v are stored as fp8.
    is_fp8: bool,
    seed: u64,
}

impl Case {
    fn problem(&self) -> AttentionProblem {
        let Case {
            dtype,
            seq_q,
            capacity,
            heads,
            head_dim,
            head_dim_v,
            mask,
            window,
            scale,
            scores,
            page_size,
            ..
        } = *self;
        let (heads_q, heads_kv) = heads;
        let batch = self.lens.len();
        AttentionProblem {
            batch,
            seq_q,
            seq_kv: capacity,
            heads_q,
            heads_kv,
            head_dim,
            head_dim_v,
            dtype,
            dtype_kv: self.dtype_kv(),
            scale,
            mask,
            window,
            scores,
            page_size,
        }
    }

    fn dtype_kv(&self) -> DType {
        if self.is_fp8 { DType::F8E4M3 } else { self.dtype }
    }

    /// Scales of the key heads, of k and v; none are given if all are 1.
    fn kv_scales(&self) -> [Vec<f32>; 2] {
        let is_scaled = self.is_fp8 && !self.seed.is_multiple_of(4);
        [0.25f32, 0.05].map(|first| {
            let scale = |head: usize| first * (1.1 + head as f32) * (1.0 + (self.seed % 7) as f32 / 8.0);
            (0..self.heads.1).map(|head| if is_scaled { scale(head) } else { 1.0 }).collect()
        })
    }

    /// Tiles of 64 queries of a head, and 64 keys; wide heads have kernels for fewer queries only.
    fn work(&self) -> usize {
        let tile = if self.head_dim.max(self.head_dim_v) <= 256 { 64 } else { 4 };
        let rows = self.lens.len() * self.heads.0 * self.seq_q.next_multiple_of(tile);
        let masks = if self.has_masks() { 16 } else { 0 };
        rows * self.capacity.next_multiple_of(64) * (16 + masks + (self.head_dim + self.head_dim_v) / 4)
    }

    /// The heads' sinks.
    fn sinks(&self) -> Option<Vec<f64>> {
        let of_head = |sink: f64, head: usize| if head.is_multiple_of(2) { sink } else { 1.0 };
        self.sinks.map(|sink| (0..self.heads.0).map(|head| of_head(sink, head)).collect())
    }

    fn sequence<'a>(&self, len: usize, own: &'a Own) -> Sequence<'a> {
        let Case { seq_q, heads: (heads_q, heads_kv), head_dim, head_dim_v, mask, window, .. } = *self;
        let scale = f64::from(self.problem().scale());
        let options = Options {
            soft_cap: self.scores.soft_cap.map(f64::from),
            sinks: own.sinks.as_deref(),
            bias: own.bias.as_deref(),
            blocks: self.scores.blocks.zip(own.blocks.as_deref()),
        };
        Sequence { seq_q, len, heads_q, heads_kv, head_dim, head_dim_v, scale, mask, window, options }
    }

    fn has_masks(&self) -> bool {
        self.scores.bias != Bias::None || self.scores.blocks.is_some()
    }

    /// Sizes 1 at random.
    fn broadcast(&self, sizes: [usize; 3], bit: u32) -> [usize; 3] {
        [0, 1, 2].map(|axis| if self.seed >> (bit + axis as u32) & 1 == 0 { sizes[axis] } else { 1 })
    }

    /// The bias, and its shape. A third of the keys is hidden from single queries, every seventh from all; every fifth query sees none.
    fn bias(&self) -> ([usize; 4], Vec<f64>) {
        let [batch, heads, queries] = self.broadcast([self.lens.len(), self.heads.0, self.seq_q], 40);
        let mut rng = Rng::new(self.seed ^ 3);
        let mut bias = Vec::new();
        for row in 0..batch * heads * queries {
            for key in 0..self.capacity {
                let is_hidden = rng.below(3) == 0 || key % 7 == 3 || (queries > 1 && row % queries % 5 == 4);
                let value = round_to(self.dtype, rng.below(64) as f64 / 8.0 - 4.0);
                bias.push(match (self.scores.bias, is_hidden) {
                    (Bias::Boolean, _) => f64::from(!is_hidden),
                    (_, true) => f64::NEG_INFINITY,
                    (_, false) => value,
                });
            }
        }
        ([batch, heads, queries, self.capacity], bias)
    }

    /// The words of the block mask, and their shape: half of the blocks or few of them.
    fn blocks(&self, size: usize) -> ([usize; 4], Vec<u32>) {
        let [batch, ..] = self.broadcast([self.lens.len(), 1, 1], 44);
        let heads = [self.heads.0, self.heads.1, 1][(self.seed >> 46) as usize % 3];
        let shape = [batch, heads, self.seq_q.div_ceil(size), self.capacity.div_ceil(size).div_ceil(32)];
        let mut rng = Rng::new(self.seed ^ 4);
        let few = self.seed >> 48 & 1 != 0;
        let mut word = || {
            let half = rng.next_u64() as u32;
            if few {
                half & rng.next_u64() as u32 & rng.next_u64() as u32 & rng.next_u64() as u32
            } else {
                half
            }
        };
        (shape, (0..shape.iter().product()).map(|_| word()).collect())
    }

    /// What the tensors of scores say of a sequence.
    fn own(&self, index: usize, len: usize) -> Own {
        let Case { seq_q, heads: (heads, _), .. } = *self;
        let at = |shape: [usize; 4], head: usize, query: usize| {
            let place = |axis: usize, index: usize| if shape[axis] == 1 { 0 } else { index };
            (place(0, index) * shape[1] + head) * shape[2] + place(2, query)
        };
        let bias = (self.scores.bias != Bias::None).then(|| {
            let (shape, bias) = self.bias();
            let value = |value: f64| match self.scores.bias {
                Bias::Boolean if value == 0.0 => f64::NEG_INFINITY,
                Bias::Boolean => 0.0,
                _ => value,
            };
            let rows = (0..heads).flat_map(|head| (0..seq_q).map(move |query| (head, query)));
            rows.flat_map(|(head, query)| {
                let row = at(shape, if shape[1] == 1 { 0 } else { head }, query);
                bias[row * shape[3]..][..len].iter().map(|&bias| value(bias)).collect::<Vec<_>>()
            })
            .collect()
        });
        let blocks = self.scores.blocks.map(|size| {
            let (shape, words) = self.blocks(size);
            let mut blocks = Vec::new();
            for (head, query) in (0..heads).flat_map(|head| (0..shape[2]).map(move |query| (head, query))) {
                let row = ((if shape[0] == 1 { 0 } else { index }) * shape[1] + head / (heads / shape[1]))
                    * shape[2]
                    + query;
                let bit = |block: usize| words[row * shape[3] + block / 32] >> (block % 32) & 1 != 0;
                blocks.extend((0..len.div_ceil(size)).map(bit));
            }
            blocks
        });
        Own { sinks: self.sinks(), bias, blocks }
    }

    /// q, k and v; beyond the keys of a sequence k and v are NaN.
    fn data(&self) -> [Vec<f64>; 3] {
        let Case { dtype, seq_q, capacity, heads: (heads_q, heads_kv), head_dim, head_dim_v, .. } = *self;
        let batch = self.lens.len();
        let mut q = values(Values::Normal, dtype, batch * seq_q * heads_q * head_dim, self.seed);
        q.iter_mut().for_each(|q| *q = round_to(dtype, *q * self.gain));
        let stored =
            |kind, width, seed| values(kind, self.dtype_kv(), batch * capacity * heads_kv * width, seed);
        let mut k = stored(Values::Normal, head_dim, self.seed ^ 1);
        let mut v = match self.values {
            Place::Apart => stored(self.kind, head_dim_v, self.seed ^ 2),
            Place::InKeys => k.chunks(head_dim).flat_map(|row| &row[..head_dim_v]).copied().collect(),
        };
        let [k_scale, v_scale] = self.kv_scales();
        scale_heads(&mut k, head_dim, &k_scale, |value, scale| value * scale);
        scale_heads(&mut v, head_dim_v, &v_scale, |value, scale| value * scale);
        for (sequence, &len) in self.lens.iter().enumerate() {
            let unused = |width: usize| {
                (sequence * capacity + len) * heads_kv * width..(sequence + 1) * capacity * heads_kv * width
            };
            k[unused(head_dim)].fill(f64::NAN);
            v[unused(head_dim_v)].fill(f64::NAN);
            if !self.has_masks() {
                continue;
            }
            // Nor is anybody to be harmed by what nobody sees.
            let own = self.own(sequence, len);
            let seen = self.sequence(len, &own);
            for (key, head_kv) in (0..len).flat_map(|key| (0..heads_kv).map(move |head| (key, head))) {
                let group = heads_q / heads_kv;
                let mut heads = head_kv * group..(head_kv + 1) * group;
                if !heads.any(|head| (0..seq_q).any(|query| seen.sees(head, query, key))) {
                    let row = (sequence * capacity + key) * heads_kv + head_kv;
                    k[row * head_dim..][..head_dim].fill(f64::NAN);
                    v[row * head_dim_v..][..head_dim_v].fill(f64::NAN);
                }
            }
        }
        [q, k, v]
    }
}

/// Changes rows of heads, each by its scale.
fn scale_heads(values: &mut [f64], width: usize, scales: &[f32], change: impl Fn(f64, f64) -> f64) {
    for (head, row) in values.chunks_mut(width).enumerate() {
        let scale = f64::from(scales[head % scales.len()]);
        row.iter_mut().for_each(|value| *value = change(*value, scale));
    }
}

/// What a sequence's tensors of scores say, as the reference takes it.
struct Own {
    sinks: Option<Vec<f64>>,
    bias: Option<Vec<f64>>,
    blocks: Option<Vec<bool>>,
}

const HEADS: [(usize, usize); 8] = [(1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (5, 1), (8, 1), (18, 2)];
/// Of q and k, and of v.
const HEAD_DIMS: [(usize, usize); 21] = [
    (64, 64),
    (128, 128),
    (8, 8),
    (16, 16),
    (24, 8),
    (32, 32),
    (40, 40),
    (72, 72),
    (80, 80),
    (96, 96),
    (136, 136),
    (200, 200),
    (256, 256),
    (192, 128),
    (40, 32),
    (48, 32),
    (64, 136),
    (32, 256),
    (576, 512),
    (264, 40),
    (96, 328),
];

/// Cases of up to this many products of a query and a key element.
const MAX_PRODUCTS: usize = 600_000;

fn case(
    seq_q: impl Strategy<Value = usize>,
    seq_kv: impl Strategy<Value = usize>,
) -> impl Strategy<Value = Case> {
    let sizes = (floats(), 0usize..4, seq_q, seq_kv, select(&HEADS[..]), select(&HEAD_DIMS[..]));
    let masks = (
        select(&[Mask::None, Mask::Causal][..]),
        prop_oneof![2 => Just(None), 1 => (1usize..80).prop_map(Some), 1 => Just(Some(1 << 40))],
        prop_oneof![3 => Just(None), 1 => Just(Some(0.25f32)), 1 => Just(Some(-0.125)), 1 => Just(Some(0.0))],
    );
    let layout = || (stride_padding(), prop_oneof![3 => Just(0usize), 1 => 1usize..9]);
    let soft_cap = || prop_oneof![4 => Just(None), 1 => Just(Some(2.0)), 1 => Just(Some(50.0))];
    let sinks = || {
        let values = select(&[0.0, 4.0, -1e30, 1e30, f64::NEG_INFINITY][..]);
        prop_oneof![4 => Just(None), 1 => values.prop_map(|sink| Some(f64::from(sink as f32)))]
    };
    let bias = || prop_oneof![8 => Just(Bias::None), 1 => Just(Bias::Additive), 1 => Just(Bias::Boolean)];
    let blocks = || prop_oneof![4 => Just(None), 1 => select(&[16, 32, 64, 128][..]).prop_map(Some)];
    let of_plan = (soft_cap(), bias(), blocks());
    let of_plan = of_plan.prop_map(|(soft_cap, bias, blocks)| Scores { soft_cap, bias, blocks });
    let scores = (of_plan, sinks());
    let kinds = (select(&[1.0, 0.25, 16.0][..]), finite_values(), layout(), layout(), any::<u64>());
    (sizes, masks, scores, kinds).prop_map(
        |(sizes, (mask, window, scale), (scores, sinks), (gain, kind, q_layout, kv_layout, seed))| {
            let (dtype, mut batch, mut seq_q, mut capacity, heads, (head_dim, head_dim_v)) = sizes;
            let row = heads.0 * head_dim.max(head_dim_v);
            capacity = capacity.min(MAX_PRODUCTS / row);
            seq_q = seq_q.min(MAX_PRODUCTS / row / capacity.max(1));
            batch = batch.min(MAX_PRODUCTS / row / (capacity * seq_q).max(1));
            // The first sequence is as long as there is room, unless none is.
            let mut lens: Vec<usize> =
                (0..batch).map(|i| (seed >> (8 * i)) as usize % (capacity + 1)).collect();
            if let (Some(len), true) = (lens.first_mut(), seed % 8 != 0) {
                *len = capacity;
            }
            // Weights below 2^-126 may be flushed: a value of 2^60 must not make them count.
            let kind = if gain == 1.0 && scale.is_none() { kind } else { Values::Normal };
            let values = if head_dim_v <= head_dim && seed % 3 == 0 { Place::InKeys } else { Place::Apart };
            let layout = |(padding, offset)| Layout { padding, offset };
            let (q_layout, kv_layout) = (layout(q_layout), layout(kv_layout));
            Case {
                dtype,
                seq_q,
                lens,
                capacity,
                heads,
                head_dim,
                head_dim_v,
                values,
                mask,
                window,
                scale,
                scores,
                sinks,
                gain,
                kind,
                q_layout,
                kv_layout,
                page_size: None,
                is_fp8: false,
                seed,
            }
        },
    )
}

/// The same with keys in fp8 and, if there are any, in pages.
fn fp8_case() -> impl Strategy<Value = Case> {
    let few = case(1usize..18, dims(&[64, 256], 600));
    let sizes = prop_oneof![2 => few, 1 => case(dims(&[16, 64], 80), dims(&[64], 150))];
    let pages = prop_oneof![1 => Just(None), 1 => select(&PAGE_SIZES[..]).prop_map(Some)];
    (sizes, pages).prop_map(|(case, page_size)| {
        let layout = |layout: Layout, by| Layout { padding: layout.padding * by, offset: layout.offset * by };
        Case {
            dtype: if case.dtype == DType::F32 { DType::BF16 } else { case.dtype },
            head_dim: case.head_dim.next_multiple_of(16),
            head_dim_v: case.head_dim_v.next_multiple_of(16),
            q_layout: layout(case.q_layout, 8),
            kv_layout: layout(case.kv_layout, 16),
            page_size,
            is_fp8: true,
            ..case
        }
    })
}

fn prefill_case() -> impl Strategy<Value = Case> {
    case(dims(&[16, 32, 64], 140), dims(&[16, 32, 64], 200))
}

fn decode_case() -> impl Strategy<Value = Case> {
    case(1usize..6, dims(&[64, 256], 1100))
}

/// Latent attention in its absorbed form: rows of 576, of which the first 512 are the values, for up to two tiles of rows.
fn latent_case() -> impl Strategy<Value = Case> {
    let heads = select(&[(1, 1), (5, 1), (6, 2), (20, 1), (40, 1)][..]);
    let pages = prop_oneof![1 => Just(None), 1 => select(&PAGE_SIZES[..]).prop_map(Some)];
    (case(1usize..9, dims(&[32, 64, 256], 330)), heads, select(&[DType::F16, DType::BF16][..]), pages)
        .prop_map(|(case, heads, dtype, page_size)| {
            // Rows of the kernel are aligned.
            let aligned = |layout: Layout| Layout { padding: layout.padding / 8 * 8, offset: 0 };
            Case {
                dtype,
                seq_q: case.seq_q.min(64 / heads.0),
                heads,
                head_dim: 576,
                head_dim_v: 512,
                values: Place::InKeys,
                scores: Scores::default(),
                page_size,
                q_layout: aligned(case.q_layout),
                kv_layout: aligned(case.kv_layout),
                ..case
            }
        })
}

/// The keys of all sequences in pages of a pool, what is the same once, and the table.
struct Pool {
    k: Vec<f64>,
    v: Vec<f64>,
    table: Vec<u32>,
    /// Pages of each sequence that there is room for in the table.
    max_pages: usize,
    num_pages: usize,
}

impl Pool {
    fn new(case: &Case, page_size: usize, k: &[f64], v: &[f64]) -> Self {
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
fn compute(
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
    let bias = (case.scores.bias != Bias::None).then(|| case.bias());
    let blocks = case.scores.blocks.map(|size| case.blocks(size));
    let blocks = blocks.map(|(shape, words)| (shape, words.iter().map(word).collect::<Vec<_>>()));
    let bias_dtype = if case.scores.bias == Bias::Boolean { DType::I8 } else { dtype };
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
struct Expected {
    reference: Results,
    /// In several orders of the sums over the head, see [`ROWS`].
    naive: Vec<Results>,
    magnitudes: Results,
}

/// All columns of a row share the errors of its scores, so a case has as many independent errors as rows; the largest of a
/// few may be next to nothing by luck. The naive result is therefore computed in as many orders as make up this many rows,
/// at most 256.
const ROWS: usize = 512;

fn expect(case: &Case, [q, k, v]: &[Vec<f64>; 3]) -> Expected {
    let Case { dtype, seq_q, capacity, heads: (heads_q, heads_kv), head_dim, head_dim_v, .. } = *case;
    let empty = || (Vec::new(), Vec::new());
    let orders = ROWS.div_ceil((case.lens.len() * seq_q * heads_q).max(1)).min(head_dim).min(256);
    let mut expected = Expected { reference: empty(), naive: vec![empty(); orders], magnitudes: empty() };
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

fn verify(what: &str, case: &Case, (out, lse): &Results, expected: &Expected) -> Result<(), TestCaseError> {
    let Expected { reference, naive, magnitudes } = expected;
    let roundings = case.head_dim + case.capacity;
    // Against every naive order at once: the largest naive error is then that of enough rows.
    let repeat = |values: &[f64]| values.repeat(naive.len());
    let naive_out: Vec<f64> = naive.iter().flat_map(|(out, _)| out).copied().collect();
    let scale = repeat(&magnitudes.0);
    let tolerance = Tolerance::new(case.dtype, Scale::Given(&scale), roundings);
    check(what, &repeat(out), &repeat(&reference.0), &naive_out, &tolerance)?;
    // Near a sum of 1 the hardware's logarithm has an absolute error of 2^-22, four times the naive one's.
    let scale = Scale::Given(&magnitudes.1);
    let tolerance = Tolerance { factor: 8.0, ..Tolerance::new(DType::F32, scale, roundings) };
    check(&format!("{what}, lse"), lse, &reference.1, &naive[0].1, &tolerance)
}

fn planned(case: &Case, on: Executors) -> Result<(), TestCaseError> {
    let data = case.data();
    let expected = expect(case, &data);
    for device in &on.devices() {
        let results = compute(device, case, &data, None)?;
        verify(&format!("{device:?}"), case, &results, &expected)?;
    }
    Ok(())
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let mut expected = None;
    for device in cards {
        let variants = [
            VARIANTS,
            DECODE_RING_VARIANTS,
            DECODE_RING_FP8_VARIANTS,
            DECODE_LATENT_VARIANTS,
            PREFILL_MMA_VARIANTS,
            WGMMA_VARIANTS,
        ];
        let gathers = [GATHER_VARIANTS, GATHER_PAGES_VARIANTS].into_iter().flatten().any(|gather| {
            let is_for = gather.dtype == case.dtype && gather.dtype_kv == case.dtype_kv();
            is_for && (case.is_fp8 || case.page_size.is_some()) && wanted(gather.entry)
        });
        for variant in variants.into_iter().flatten().filter(|variant| variant.dtype == case.dtype) {
            if (wanted(variant.entry) || gathers)
                && Attention::plan_with(device, case.problem(), variant).is_ok()
            {
                let data = case.data();
                let results = compute(device, case, &data, Some(variant))?;
                let expected = expected.get_or_insert_with(|| expect(case, &data));
                verify(&format!("{} on {device:?}", variant.entry), case, &results, expected)?;
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(8))]

    /// Values in the keys' rows, on tensor cores, also of simulated cards each time.
    #[test]
    fn latent_decode(
        case in latent_case().prop_filter("too much work", |case| case.work() <= 1 << 22),
        floor in select(&[Arch::Sm80, Arch::Sm90a][..]),
    ) {
        let data = case.data();
        let expected = expect(&case, &data);
        for device in &cards_of(floor) {
            let results = compute(device, &case, &data, None)?;
            verify(&format!("{device:?}"), &case, &results, &expected)?;
        }
    }
}

/// The same bits; any NaN equals any NaN.
fn same_bits(what: &str, got: &[f64], want: &[f64]) -> Result<(), TestCaseError> {
    testkit::compare::check_bits_eq(got, want).map_err(|mismatch| fail(format!("{what}: {mismatch}")))
}

#[test]
fn every_kernel_is_simulated() -> TestResult {
    let paged = case(1usize..20, dims(&[16], 40)).prop_map(|case| {
        let layout = Layout::default();
        Case { page_size: Some(16), q_layout: layout, kv_layout: layout, ..case }
    });
    let cases = prop_oneof![
        4 => prefill_case(), 4 => decode_case(), 2 => latent_case(), 2 => fp8_case(), 1 => paged
    ];
    every_kernel("attention", cases, |case| 4 * case.work(), run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(128))]

    /// What `plan` chooses, on every device.
    #[test]
    fn planned_prefill((case, on) in on_executors(prefill_case, Case::work)) {
        planned(&case, on)?;
    }

    /// The same for few queries and long caches.
    #[test]
    fn planned_decode((case, on) in on_executors(decode_case, Case::work)) {
        planned(&case, on)?;
    }

    /// The same with keys in fp8.
    #[test]
    fn planned_fp8((case, on) in on_executors(fp8_case, Case::work)) {
        planned(&case, on)?;
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_variant_prefill((case, on) in on_executors(prefill_case, |case| 4 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// The same for few queries and long caches.
    #[test]
    fn every_variant_decode((case, on) in on_executors(decode_case, |case| 4 * case.work())) {
        run_variants(&on.cards(), &case, EVERY)?;
    }

    /// A sequence gives the same bits alone, in views with less room and without `kv_lens`.
    #[test]
    fn sequences_are_independent(
        (case, on) in on_executors(
            || prop_oneof![case(1usize..80, dims(&[64], 150)), case(1usize..5, dims(&[256], 700))],
            |case| 2 * case.work(),
        ),
    ) {
        // Another alignment may take other kernels.
        let scores = Scores { soft_cap: case.scores.soft_cap, ..Scores::PLAIN };
        let case = Case { q_layout: Layout::default(), kv_layout: Layout::default(), scores, ..case };
        let Case { seq_q, capacity, heads: (heads_q, heads_kv), head_dim, head_dim_v, .. } = case;
        let data = case.data();
        for device in &on.devices() {
            let (out, lse) = compute(device, &case, &data, None)?;
            for (index, &len) in case.lens.iter().enumerate() {
                let alone = Case { lens: vec![len], capacity: len, seed: 1, ..case.clone() };
                let part = |data: &[f64], row: usize, len: usize| data[index * row..][..len].to_vec();
                let cached = |data: &[f64], width: usize| {
                    part(data, capacity * heads_kv * width, len * heads_kv * width)
                };
                let q_row = seq_q * heads_q * head_dim;
                let data =
                    [part(&data[0], q_row, q_row), cached(&data[1], head_dim), cached(&data[2], head_dim_v)];
                let (out_alone, lse_alone) = compute(device, &alone, &data, None)?;
                let out_row = seq_q * heads_q * head_dim_v;
                same_bits(&format!("{device:?}, out"), &out[index * out_row..][..out_row], &out_alone)?;
                let lse_row = heads_q * seq_q;
                same_bits(&format!("{device:?}, lse"), &lse[index * lse_row..][..lse_row], &lse_alone)?;
            }
        }
    }

    /// Queries give the same bits together and one by one where the same kernels do both.
    #[test]
    fn queries_are_independent(
        (case, on) in on_executors(
            || case(2usize..5, dims(&[256], 700)),
            |case| (1 + case.seq_q) * case.work(),
        ),
    ) {
        let layout = Layout::default();
        let scores = Scores { soft_cap: case.scores.soft_cap, ..Scores::PLAIN };
        let case = Case { q_layout: layout, kv_layout: layout, mask: Mask::Causal, scores, ..case };
        let Case { seq_q, capacity, heads: (heads_q, _), head_dim, head_dim_v, .. } = case;
        prop_assume!(case.lens.iter().all(|&len| len >= seq_q));
        let [q, k, v] = case.data();
        for device in &on.devices() {
            let (out, _) = compute(device, &case, &[q.clone(), k.clone(), v.clone()], None)?;
            for query in 0..seq_q {
                // The keys up to the query's own place.
                let lens: Vec<usize> = case.lens.iter().map(|len| len + query + 1 - seq_q).collect();
                let one = Case { seq_q: 1, lens, capacity, ..case.clone() };
                let rows = |data: &[f64], width: usize| -> Vec<f64> {
                    let row = heads_q * width;
                    data.chunks(seq_q * row).flat_map(|rows| &rows[query * row..][..row]).copied().collect()
                };
                let (alone, _) = compute(device, &one, &[rows(&q, head_dim), k.clone(), v.clone()], None)?;
                same_bits(&format!("{device:?}, query {query}"), &rows(&out, head_dim_v), &alone)?;
            }
        }
    }
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(64))]

    /// Keys in pages, also in shared ones, give the same bits as in one piece.
    #[test]
    fn pages_change_nothing(
        (case, on) in on_executors(
            || prop_oneof![case(1usize..80, dims(&[64], 150)), case(1usize..6, dims(&[256], 500))],
            |case| 3 * case.work(),
        ),
        page_size in select(&PAGE_SIZES[..]),
    ) {
        let case = Case { q_layout: Layout::default(), kv_layout: Layout::default(), ..case };
        let Case { capacity, heads: (_, heads_kv), head_dim, head_dim_v, ref lens, .. } = case;
        let [q, mut k, mut v] = case.data();
        for sequence in (1..lens.len()).filter(|&sequence| lens[sequence].min(lens[0]) >= page_size) {
            for (values, width) in [(&mut k, head_dim), (&mut v, head_dim_v)] {
                values.copy_within(..page_size * heads_kv * width, sequence * capacity * heads_kv * width);
            }
        }
        let data = [q, k, v];
        let paged = Case { page_size: Some(page_size), ..case.clone() };
        for device in &on.devices() {
            let (out, lse) = compute(device, &paged, &data, None)?;
            let (want, want_lse) = compute(device, &case, &data, None)?;
            same_bits(&format!("{device:?}, out"), &out, &want)?;
            same_bits(&format!("{device:?}, lse"), &lse, &want_lse)?;
        }
    }
}

/// A case of one sequence without masks, to be changed.
fn plain(dtype: DType, seq_q: usize, len: usize, heads: (usize, usize), head_dim: usize) -> Case {
    let layout = Layout::default();
    Case {
        dtype,
        seq_q,
        lens: vec![len],
        capacity: len,
        heads,
        head_dim,
        head_dim_v: head_dim,
        values: Place::Apart,
        mask: Mask::None,
        window: None,
        scale: None,
        scores: Scores::default(),
        sinks: None,
        gain: 1.0,
        kind: Values::Normal,
        q_layout: layout,
        kv_layout: layout,
        page_size: None,
        is_fp8: false,
        seed: 7,
    }
}

type TestResult = Result<(), TestCaseError>;

/// Rows that see no key, with and without sinks: more queries than keys under a causal mask, no keys at all, lengths of 0.
#[test]
fn rows_without_keys() -> TestResult {
    let kinds = [(DType::F32, None), (DType::F16, Some(0.5)), (DType::BF16, None), (DType::BF16, Some(-1.0))];
    for (dtype, sinks) in kinds {
        for (seq_q, lens, capacity) in [
            (70, vec![3, 0, 10], 10),
            (3, vec![2, 0, 300], 300),
            (5, vec![0], 0),
            (1, vec![0, 0], 0),
            (0, vec![4], 4),
        ] {
            let case =
                Case { lens, capacity, sinks, mask: Mask::Causal, ..plain(dtype, seq_q, 0, (4, 2), 64) };
            let data = case.data();
            let expected = expect(&case, &data);
            for device in &devices_for(case.work()) {
                let (out, lse) = compute(device, &case, &data, None)?;
                verify(&format!("{device:?}"), &case, &(out.clone(), lse.clone()), &expected)?;
                for (sequence, &len) in case.lens.iter().enumerate() {
                    for query in 0..seq_q.saturating_sub(len) {
                        let row = (sequence * seq_q + query) * 4 * 64;
                        assert!(out[row..][..4 * 64].iter().all(|&value| value == 0.0), "{device:?}");
                        for head in 0..4 {
                            let lse = lse[(sequence * 4 + head) * seq_q + query];
                            match case.sinks() {
                                None => assert_eq!(lse, f64::NEG_INFINITY, "{device:?}"),
                                Some(sinks) => assert!((lse - sinks[head]).abs() < 1e-6, "{device:?}"),
                            }
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// Scores of ±1e30: equal ones share the weight equally, a larger one takes it all. No sentinel hides among them.
#[test]
fn huge_scores() -> TestResult {
    let (heads, head_dim, len) = ((2, 1), 64, 300);
    for dtype in [DType::F32, DType::BF16] {
        for (seq_q, sign, best) in
            [(1, -1.0, None), (70, -1.0, None), (1, 1.0, None), (1, -1.0, Some(280)), (9, -1.0, Some(5))]
        {
            let case = Case { scale: Some(1.0), ..plain(dtype, seq_q, len, heads, head_dim) };
            let [mut q, mut k, v] = case.data();
            let huge = round_to(dtype, 1e15);
            for row in q.chunks_mut(head_dim) {
                row.fill(0.0);
                row[0] = huge;
            }
            for row in k.chunks_mut(head_dim) {
                row.fill(0.0);
                row[0] = sign * huge;
            }
            if let Some(best) = best {
                k[best * head_dim] = 0.0;
            }
            for device in &devices_for(case.work()) {
                let data = [q.clone(), k.clone(), v.clone()];
                let (out, lse) = compute(device, &case, &data, None)?;
                for (index, row) in out.chunks(head_dim).enumerate() {
                    for (col, &got) in row.iter().enumerate() {
                        let (want, tolerance) = match best {
                            Some(best) => (v[best * head_dim + col], 0.0),
                            None => {
                                let mean: f64 =
                                    v.iter().skip(col).step_by(head_dim).sum::<f64>() / len as f64;
                                (mean, if dtype == DType::F32 { 1e-6 } else { 2e-3 })
                            }
                        };
                        assert!(
                            (got - want).abs() <= tolerance,
                            "{device:?} row {index} col {col}: {got} {want}"
                        );
                    }
                }
                let want = if best.is_some() { 0.0 } else { sign * huge * huge };
                assert!(
                    lse.iter().all(|lse| (lse - want).abs() <= 1e-6 * want.abs()),
                    "{device:?}: {lse:?}, {want}"
                );
            }
        }
    }
    Ok(())
}

/// Runs a case with a NaN in q (0), k (1) or v (2) at the query or key of that number, in the last head: it stays in the rows
/// (of v: and the column) that it enters, and all other bits are as without it.
fn nan_stays(device: &Device, case: &Case, places: &[(usize, usize)]) -> TestResult {
    let (len, (heads_q, heads_kv), head_dim) = (case.lens[0], case.heads, case.head_dim);
    let width = case.head_dim_v;
    let own = case.own(0, len);
    let sequence = case.sequence(len, &own);
    let clean = case.data();
    let (want, _) = compute(device, case, &clean, None)?;
    for &(tensor, place) in places {
        let mut data = clean.clone();
        let element = match tensor {
            0 => (place * heads_q + heads_q - 1) * head_dim + 5,
            _ => (place * heads_kv + heads_kv - 1) * head_dim + 9,
        };
        data[tensor][element] = f64::NAN;
        let (got, _) = compute(device, case, &data, None)?;
        for (index, (got, want)) in std::iter::zip(&got, &want).enumerate() {
            let (row, head, col) = (index / width / heads_q, index / width % heads_q, index % width);
            let enters = sequence.sees(head, row, place) && head >= heads_q - heads_q / heads_kv;
            let hit = match tensor {
                0 => row == place && head == heads_q - 1,
                1 => enters,
                _ => enters && col == 9,
            };
            let what = format!("{device:?} {case:?} tensor {tensor} at {place} [{row}, {head}, {col}]");
            if hit {
                assert!(got.is_nan(), "{what}: {got}");
            } else {
                assert_eq!(got.to_bits(), want.to_bits(), "{what}");
            }
        }
    }
    Ok(())
}

/// A NaN at the place of the query before the last.
#[test]
fn nan_stays_where_it_is() -> TestResult {
    for dtype in DType::FLOATS {
        for (seq_q, len) in [(70, 90), (3, 300), (4, 256)] {
            let case = Case { mask: Mask::Causal, ..plain(dtype, seq_q, len, (4, 2), 64) };
            for device in &devices_for(case.work()) {
                nan_stays(device, &case, &[(0, seq_q - 2), (1, len - 2), (2, len - 2)])?;
            }
        }
    }
    Ok(())
}

/// Tiles of queries and steps of keys on tensor cores, at both of whose ends a mask cuts: results, and NaNs that some rows of a
/// tile see and others do not.
#[test]
fn borders_on_tensor_cores() -> TestResult {
    for device in &[Arch::Sm80, Arch::Sm90a].into_iter().flat_map(cards_of).collect::<Vec<_>>() {
        for (dtype, heads, head_dim, window, page_size, place) in [
            (DType::BF16, (2, 1), 64, None, None, Some((0, 140))),
            (DType::F16, (1, 1), 128, Some(100), Some(64), Some((1, 180))),
            (DType::BF16, (1, 1), 256, Some(150), Some(32), None),
        ] {
            let mask = Mask::Causal;
            let case = Case { mask, window, page_size, ..plain(dtype, 200, 290, heads, head_dim) };
            let data = case.data();
            let results = compute(device, &case, &data, None)?;
            verify(&format!("{device:?}"), &case, &results, &expect(&case, &data))?;
            // Keys that are cut off by the mask at either end.
            let places: Vec<_> = place.into_iter().chain([(2, 120), (2, 260)]).collect();
            nan_stays(device, &case, &places)?;
            // All that lies beyond a sequence's keys is NaN.
            let case = Case { lens: vec![150], capacity: 200, ..case };
            let data = case.data();
            let results = compute(device, &case, &data, None)?;
            verify(&format!("{device:?}"), &case, &results, &expect(&case, &data))?;
        }
    }
    Ok(())
}

/// Block masks over many words, of which few blocks are seen, on every device; and those whose blocks are smaller and larger than the
/// steps of Hopper's tensor cores, some rows of which see a block.
#[test]
fn blocks() -> TestResult {
    let few = 1 << 48;
    for (dtype, seq_q, len, head_dim, size, seed) in [
        (DType::F32, 70, 1100, 64, 16, few),
        (DType::BF16, 200, 1000, 128, 128, few + 1),
        (DType::F16, 130, 300, 256, 32, 1),
        (DType::BF16, 200, 290, 64, 64, 2),
    ] {
        let scores = Scores { blocks: Some(size), ..Scores::PLAIN };
        let case = Case { scores, seed, ..plain(dtype, seq_q, len, (2, 1), head_dim) };
        let data = case.data();
        let expected = expect(&case, &data);
        for device in
            &cards_of(Arch::Sm90a).into_iter().chain(devices_for(case.work() / 4)).collect::<Vec<_>>()
        {
            let results = compute(device, &case, &data, None)?;
            verify(&format!("{device:?} {case:?}"), &case, &results, &expected)?;
            if len < 300 {
                nan_stays(device, &case, &[(1, 150), (2, 40), (2, 250)])?;
            }
        }
    }
    Ok(())
}

/// The same for few queries, which see different keys of one block.
#[test]
fn borders_of_few_queries_on_tensor_cores() -> TestResult {
    for device in &cards_of(Arch::Sm80) {
        for (dtype, head_dim, window, page_size, is_fp8) in [
            (DType::BF16, 64, None, Some(16), false),
            (DType::F16, 128, Some(40), None, false),
            (DType::BF16, 256, Some(200), Some(32), false),
            (DType::BF16, 128, Some(40), Some(16), true),
        ] {
            let mask = Mask::Causal;
            let case = Case { mask, window, page_size, is_fp8, ..plain(dtype, 9, 300, (4, 2), head_dim) };
            let data = case.data();
            let results = compute(device, &case, &data, None)?;
            verify(&format!("{device:?}"), &case, &results, &expect(&case, &data))?;
            let first = 300 - window.unwrap_or(300);
            nan_stays(device, &case, &[(0, 5), (1, 296), (2, 296), (2, 100), (2, first)])?;
        }
    }
    Ok(())
}

/// The same where the values are in the keys' rows: a NaN in one makes those rows NaN that see it.
#[test]
fn borders_of_latent_decode() -> TestResult {
    for device in &cards_of(Arch::Sm80) {
        // Two tiles of rows, three steps of keys.
        let (mask, window, page_size) = (Mask::Causal, Some(50), Some(16));
        let (head_dim_v, values) = (512, Place::InKeys);
        let plain = plain(DType::BF16, 3, 70, (11, 1), 576);
        let case = Case { mask, window, page_size, head_dim_v, values, ..plain };
        nan_stays(device, &case, &[(0, 1), (1, 68), (1, 69), (1, 18)])?;
    }
    Ok(())
}

/// A page number that the pool does not have is taken as its last page: nothing outside is touched.
#[test]
fn pages_beyond_the_pool() -> TestResult {
    for (seq_q, dtype) in [(20, DType::BF16), (1, DType::BF16), (20, DType::F32), (1, DType::F32)] {
        for device in &devices() {
            let stream = device.stream()?;
            let problem =
                AttentionProblem { page_size: Some(16), ..plain(dtype, seq_q, 30, (4, 1), 64).problem() };
            let plan = Attention::plan(device, problem)?;
            let tensor = |rows: usize, seed| {
                Rows::input(
                    &stream,
                    dtype,
                    &values(Values::Normal, dtype, rows * 64, seed),
                    64,
                    Layout::default(),
                )
            };
            let (q, pool) = (tensor(seq_q * 4, 1)?, tensor(2 * 16, 2)?);
            let kv_lens = Tensor::from_slice(&stream, &[1], &[30u32])?;
            let run = |table: [u32; 2]| -> Result<Vec<f64>, TestCaseError> {
                let table = Tensor::from_slice(&stream, &[1, 2], &table)?;
                let mut out = Rows::output(&stream, dtype, seq_q * 4, 64, Layout::default())?;
                let args = AttentionArgs {
                    q: q.view().reshape(&[1, seq_q, 4, 64])?,
                    k: pool.view().reshape(&[2, 16, 1, 64])?,
                    v: pool.view().reshape(&[2, 16, 1, 64])?,
                    kv_lens: Some(kv_lens.view()),
                    kv_scales: KvScales::default(),
                    out: out.view_mut().reshape(&[1, seq_q, 4, 64])?,
                    lse: None,
                    scores: ScoreTensors::default(),
                    offsets: Offsets::default(),
                    page_table: Some(table.view()),
                };
                plan.run(&stream, args)?;
                out.read(&stream)
            };
            same_bits(&format!("{device:?}"), &run([u32::MAX, 2])?, &run([1, 1])?)?;
        }
    }
    Ok(())
}

/// A prompt in pieces, then token by token, into a cache: each within the bound of the whole.
#[test]
fn chunks_then_decode() -> TestResult {
    let (heads, head_dim, total, capacity) = ((8, 2), 128, 300, 320);
    for dtype in DType::FLOATS {
        let whole = Case { mask: Mask::Causal, ..plain(dtype, total, total, heads, head_dim) };
        let data = whole.data();
        let expected = expect(&whole, &data);
        let row = heads.0 * head_dim;
        let cached = |values: &[f64]| {
            let mut cache = values.to_vec();
            cache.resize(capacity * heads.1 * head_dim, f64::NAN);
            cache
        };
        let (k, v) = (cached(&data[1]), cached(&data[2]));
        for device in &devices_for(whole.work()) {
            let stream = device.stream()?;
            let tensor = |values: &[f64]| Rows::input(&stream, dtype, values, head_dim, Layout::default());
            let (q, k, v) = (tensor(&data[0])?, tensor(&k)?, tensor(&v)?);
            let mut out = Rows::output(&stream, dtype, total * heads.0, head_dim, Layout::default())?;
            let problem = AttentionProblem { seq_kv: capacity, ..whole.problem() };
            let plan = Attention::plan(device, problem)?;
            let ends = [130, 131, 200, 296, 297, 298, 300];
            let mut start = 0;
            for end in ends {
                let cache = [1, capacity, heads.1, head_dim];
                let args = AttentionArgs {
                    q: q.view().reshape(&[1, total, heads.0, head_dim])?.slice(1, start..end)?,
                    k: k.view().reshape(&cache)?.slice(1, 0..end)?,
                    v: v.view().reshape(&cache)?.slice(1, 0..end)?,
                    kv_lens: None,
                    kv_scales: KvScales::default(),
                    out: out.view_mut().reshape(&[1, total, heads.0, head_dim])?.slice(1, start..end)?,
                    lse: None,
                    scores: ScoreTensors::default(),
                    offsets: Offsets::default(),
                    page_table: None,
                };
                plan.run(&stream, args)?;
                start = end;
            }
            let got = out.read(&stream)?;
            assert_eq!(got.len(), total * row);
            let tolerance = Tolerance::new(dtype, Scale::Given(&expected.magnitudes.0), head_dim + total);
            check(&format!("{device:?}"), &got, &expected.reference.0, &expected.naive[0].0, &tolerance)?;
        }
    }
    Ok(())
}

/// q, k and v as parts of a joint projection.
#[test]
fn joint_projection() -> TestResult {
    let (tokens, (heads_q, heads_kv), head_dim) = (40, (4, 2), 96);
    let width = (heads_q + 2 * heads_kv) * head_dim;
    let dtype = DType::BF16;
    let case = Case { mask: Mask::Causal, ..plain(dtype, tokens, tokens, (heads_q, heads_kv), head_dim) };
    let joint = values(Values::Normal, dtype, tokens * width, 11);
    let part = |start: usize, heads: usize| -> Vec<f64> {
        joint.chunks(width).flat_map(|row| &row[start * head_dim..][..heads * head_dim]).copied().collect()
    };
    let data = [part(0, heads_q), part(heads_q, heads_kv), part(heads_q + heads_kv, heads_kv)];
    let expected = expect(&case, &data);
    for device in &devices_for(case.work()) {
        let stream = device.stream()?;
        let rows = Rows::input(&stream, dtype, &joint, width, Layout::default())?;
        let view = |start: usize, heads: usize| {
            let part = rows.view().slice(1, start * head_dim..(start + heads) * head_dim)?;
            part.reshape(&[1, tokens, heads, head_dim])
        };
        let mut out = Tensor::zeros(&stream, &[1, tokens, heads_q, head_dim], dtype)?;
        let args = AttentionArgs {
            q: view(0, heads_q)?,
            k: view(heads_q, heads_kv)?,
            v: view(heads_q + heads_kv, heads_kv)?,
            kv_lens: None,
            kv_scales: KvScales::default(),
            out: out.view_mut(),
            lse: None,
            scores: ScoreTensors::default(),
            offsets: Offsets::default(),
            page_table: None,
        };
        Attention::plan(device, case.problem())?.run(&stream, args)?;
        let got: Vec<f64> = out.to_f32_vec(&stream)?.into_iter().map(f64::from).collect();
        let tolerance = Tolerance::new(dtype, Scale::Given(&expected.magnitudes.0), head_dim + tokens);
        check(&format!("{device:?}"), &got, &expected.reference.0, &expected.naive[0].0, &tolerance)?;
    }
    Ok(())
}

/// Runs of one plan in turns in two streams, whose workspace is the same.
#[test]
fn two_streams() -> TestResult {
    let case = plain(DType::BF16, 1, 2000, (8, 2), 64);
    let [q, k, v] = case.data();
    for device in &devices_for(20 * case.work()) {
        let (want, _) = compute(device, &case, &[q.clone(), k.clone(), v.clone()], None)?;
        let plan = Attention::plan(device, case.problem())?;
        let streams = [device.stream()?, device.stream()?];
        let tensor = |values: &[f64], shape: &[usize]| -> Result<Tensor, Error> {
            let values = testkit::round::encode(DType::BF16, values);
            Tensor::from_bytes(&streams[0], shape, DType::BF16, &values)
        };
        let (q, k, v) =
            (tensor(&q, &[1, 1, 8, 64])?, tensor(&k, &[1, 2000, 2, 64])?, tensor(&v, &[1, 2000, 2, 64])?);
        streams[0].synchronize()?;
        let mut outs = Vec::new();
        for turn in 0..20 {
            let stream = &streams[turn % 2];
            let mut out = Tensor::empty(stream, &[1, 1, 8, 64], DType::BF16)?;
            let (q, k, v) = (q.view(), k.view(), v.view());
            let args = AttentionArgs {
                q,
                k,
                v,
                kv_lens: None,
                kv_scales: KvScales::default(),
                out: out.view_mut(),
                lse: None,
                scores: ScoreTensors::default(),
                offsets: Offsets::default(),
                page_table: None,
            };
            plan.run(stream, args)?;
            outs.push((turn, out));
        }
        for (turn, out) in &outs {
            let got: Vec<f64> = out.to_f32_vec(&streams[turn % 2])?.into_iter().map(f64::from).collect();
            assert_eq!(got, want, "{device:?} turn {turn}");
        }
        streams[1].synchronize()?;
    }
    Ok(())
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = plain(DType::F32, 4, 8, (4, 2), 64).problem();
        let plan = Attention::plan(device, problem)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |q: &Tensor, k: &Tensor, v: &Tensor, kv_lens: Option<&Tensor>, out: &mut Tensor| {
            let (q, k, v, kv_lens) = (q.view(), k.view(), v.view(), kv_lens.map(Tensor::view));
            let args = AttentionArgs {
                q,
                k,
                v,
                kv_lens,
                kv_scales: KvScales::default(),
                out: out.view_mut(),
                lse: None,
                scores: ScoreTensors::default(),
                offsets: Offsets::default(),
                page_table: None,
            };
            plan.run(&stream, args).unwrap_err().to_string()
        };
        let (q, kv) = (tensor(&[1, 4, 4, 64], DType::F32)?, tensor(&[1, 8, 2, 64], DType::F32)?);
        let mut out = tensor(&[1, 4, 4, 64], DType::F32)?;
        assert_eq!(
            message(&tensor(&[1, 4, 3, 64], DType::F32)?, &kv, &kv, None, &mut out),
            "attention: q: expected shape [any, any, 4, 64], got [1, 4, 3, 64]"
        );
        assert_eq!(
            message(&q, &tensor(&[1, 8, 2, 64], DType::BF16)?, &kv, None, &mut out),
            "attention: k: expected f32, got bf16"
        );
        assert_eq!(
            message(&q, &kv, &tensor(&[1, 7, 2, 64], DType::F32)?, None, &mut out),
            "attention: v: expected shape [1, 8, 2, 64], got [1, 7, 2, 64]"
        );
        assert_eq!(
            message(&q, &kv, &kv, Some(&tensor(&[2], DType::U32)?), &mut out),
            "attention: kv_lens: expected shape [1], got [2]"
        );
        assert_eq!(
            message(&q, &kv, &kv, Some(&tensor(&[1], DType::I32)?), &mut out),
            "attention: kv_lens: expected u32, got i32"
        );
        assert_eq!(
            message(&q, &kv, &kv, None, &mut tensor(&[1, 4, 4, 32], DType::F32)?),
            "attention: out: expected shape [1, 4, 4, 64], got [1, 4, 4, 32]"
        );
        let sinks = tensor(&[3], DType::F32)?;
        let args = AttentionArgs {
            q: q.view(),
            k: kv.view(),
            v: kv.view(),
            kv_lens: None,
            kv_scales: KvScales::default(),
            out: out.view_mut(),
            lse: None,
            scores: ScoreTensors { sinks: Some(sinks.view()), ..ScoreTensors::default() },
            offsets: Offsets::default(),
            page_table: None,
        };
        assert_eq!(
            plan.run(&stream, args).unwrap_err().to_string(),
            "attention: sinks: expected shape [4], got [3]"
        );
        let scores = Scores { bias: Bias::Boolean, blocks: Some(16), ..Scores::PLAIN };
        let masked = Attention::plan(device, AttentionProblem { scores, ..problem })?;
        let (bias, floats) = (tensor(&[1, 4, 1, 8], DType::I8)?, tensor(&[1, 4, 1, 8], DType::F32)?);
        let wide = tensor(&[1, 3, 1, 1], DType::U32)?;
        let mut of_masks = |bias: Option<&Tensor>, blocks: Option<&Tensor>| {
            let (bias, blocks) = (bias.map(Tensor::view), blocks.map(Tensor::view));
            let scores = ScoreTensors { bias, blocks, ..ScoreTensors::default() };
            let (q, k, v) = (q.view(), kv.view(), kv.view());
            let args = AttentionArgs {
                q,
                k,
                v,
                kv_lens: None,
                kv_scales: KvScales::default(),
                out: out.view_mut(),
                lse: None,
                scores,
                offsets: Offsets::default(),
                page_table: None,
            };
            masked.run(&stream, args).unwrap_err().to_string()
        };
        assert_eq!(of_masks(None, None), "attention: bias: expected a tensor, as planned, got none");
        assert_eq!(of_masks(Some(&bias), None), "attention: blocks: expected a tensor, as planned, got none");
        assert_eq!(
            of_masks(Some(&floats), None),
            "attention: blocks: expected a tensor, as planned, got none"
        );
        assert_eq!(of_masks(Some(&floats), Some(&wide)), "attention: bias: expected i8, got f32");
        assert_eq!(
            of_masks(Some(&bias), Some(&wide)),
            "attention: blocks: expected shape [1, 4, 1, 1], got [1, 3, 1, 1]"
        );
        let mut of_offsets = |q_words: Option<&Tensor>, kv_words: Option<&Tensor>, lens: Option<&Tensor>| {
            let offsets = Offsets { q: q_words.map(Tensor::view), kv: kv_words.map(Tensor::view) };
            let kv_lens = lens.map(Tensor::view);
            let (q, k, v) = (q.view(), kv.view(), kv.view());
            let (out, scores, page_table) = (out.view_mut(), ScoreTensors::default(), None);
            let kv_scales = KvScales::default();
            let args =
                AttentionArgs { q, k, v, kv_lens, kv_scales, offsets, out, lse: None, scores, page_table };
            plan.run(&stream, args).unwrap_err().to_string()
        };
        let words = |count| tensor(&[count], DType::U32);
        let (none, one, two, three) = (words(0)?, words(1)?, words(2)?, words(3)?);
        assert_eq!(
            of_offsets(Some(&none), None, None),
            "attention: offsets.q: expected the sequences' first tokens and the end, got no number"
        );
        assert_eq!(
            of_offsets(Some(&kv), None, None),
            "attention: offsets.q: expected shape [any], got [1, 8, 2, 64]"
        );
        assert_eq!(
            of_offsets(Some(&three), Some(&three), None),
            "attention: q: expected at most 1 sequences, as planned, got 2"
        );
        assert_eq!(
            of_offsets(Some(&two), Some(&three), None),
            "attention: offsets.kv: expected shape [2], got [3]"
        );
        assert_eq!(
            of_offsets(Some(&two), Some(&two), Some(&one)),
            "attention: kv_lens: expected none, as keys are packed, got a tensor"
        );
        let narrow = AttentionProblem { head_dim_v: 32, ..problem };
        let args = AttentionArgs {
            q: q.view(),
            k: kv.view(),
            v: kv.view(),
            kv_lens: None,
            kv_scales: KvScales::default(),
            out: out.view_mut(),
            lse: None,
            scores: ScoreTensors::default(),
            offsets: Offsets::default(),
            page_table: None,
        };
        assert_eq!(
            Attention::plan(device, narrow)?.run(&stream, args).unwrap_err().to_string(),
            "attention: v: expected shape [1, 8, 2, 32], got [1, 8, 2, 64]"
        );
        let long = tensor(&[1, 9, 2, 64], DType::F32)?;
        assert_eq!(
            message(&q, &long, &long, None, &mut out),
            "attention: k: expected at most 8 keys, as planned, got 9"
        );
        let mut lse = tensor(&[1, 4, 5], DType::F32)?;
        let args = AttentionArgs {
            q: q.view(),
            k: kv.view(),
            v: kv.view(),
            kv_lens: None,
            kv_scales: KvScales::default(),
            out: out.view_mut(),
            lse: Some(lse.view_mut()),
            scores: ScoreTensors::default(),
            offsets: Offsets::default(),
            page_table: None,
        };
        assert_eq!(
            plan.run(&stream, args).unwrap_err().to_string(),
            "attention: lse: expected shape [1, 4, 4], got [1, 4, 5]"
        );
        let lens = tensor(&[1], DType::U32)?;
        let message = |page_size, k: &Tensor, kv_lens: Option<&Tensor>, table: Option<&Tensor>| {
            let mut out = Tensor::zeros(&stream, &[1, 4, 4, 64], DType::F32)?;
            let (kv_lens, page_table) = (kv_lens.map(Tensor::view), table.map(Tensor::view));
            let (q, k, v, out) = (q.view(), k.view(), k.view(), out.view_mut());
            let scores = ScoreTensors::default();
            let args = AttentionArgs {
                q,
                k,
                v,
                kv_lens,
                kv_scales: KvScales::default(),
                out,
                lse: None,
                scores,
                offsets: Offsets::default(),
                page_table,
            };
            let plan = Attention::plan(device, AttentionProblem { page_size, ..problem })?;
            Ok::<_, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        let (pool, table) = (tensor(&[3, 16, 2, 64], DType::F32)?, tensor(&[1, 1], DType::U32)?);
        let pages = Some(16);
        assert_eq!(
            message(None, &kv, Some(&lens), Some(&table))?,
            "attention: page_table: expected none, as planned without pages, got a table"
        );
        assert_eq!(
            message(pages, &pool, Some(&lens), None)?,
            "attention: page_table: expected a table, as planned, got none"
        );
        assert_eq!(
            message(pages, &pool, None, Some(&table))?,
            "attention: kv_lens: expected the sequences' lengths, as there are pages, got none"
        );
        assert_eq!(
            message(pages, &kv, Some(&lens), Some(&table))?,
            "attention: k: expected shape [any, 16, 2, 64], got [1, 8, 2, 64]"
        );
        assert_eq!(
            message(pages, &pool, Some(&lens), Some(&tensor(&[2, 1], DType::U32)?))?,
            "attention: page_table: expected shape [1, any], got [2, 1]"
        );
        assert_eq!(
            message(pages, &pool, Some(&lens), Some(&tensor(&[1, 2], DType::U32)?))?,
            "attention: page_table: expected at most 1 pages of a sequence, as planned, got 2"
        );
        let one = tensor(&[2], DType::F32)?;
        let message = |problem: AttentionProblem, kv: &Tensor, scale: &Tensor| {
            let mut out = Tensor::zeros(&stream, &[1, 4, 4, 64], problem.dtype)?;
            let q = Tensor::zeros(&stream, &[1, 4, 4, 64], problem.dtype)?;
            let (q, k, v, out, page_table) = (q.view(), kv.view(), kv.view(), out.view_mut(), None);
            let kv_scales = KvScales { k: None, v: Some(scale.view()) };
            let scores = ScoreTensors::default();
            let args = AttentionArgs {
                q,
                k,
                v,
                kv_lens: None,
                kv_scales,
                offsets: Offsets::default(),
                out,
                lse: None,
                scores,
                page_table,
            };
            Ok::<_, Error>(Attention::plan(device, problem)?.run(&stream, args).unwrap_err().to_string())
        };
        let fp8 = AttentionProblem { dtype: DType::BF16, dtype_kv: DType::F8E4M3, ..problem };
        assert_eq!(
            message(problem, &kv, &one)?,
            "attention: v_scale: expected none, as k and v are not fp8, got a tensor"
        );
        assert_eq!(message(fp8, &kv, &one)?, "attention: k: expected f8e4m3, got f32");
        let kv8 = tensor(&[1, 8, 2, 64], DType::F8E4M3)?;
        assert_eq!(
            message(fp8, &kv8, &tensor(&[3], DType::F32)?)?,
            "attention: v_scale: expected shape [2], got [3]"
        );
        let unsupported = [
            (
                AttentionProblem { heads_kv: 3, ..problem },
                "heads_q a multiple of heads_kv, both at least 1, got 4 and 3",
            ),
            (
                AttentionProblem { heads_kv: 0, ..problem },
                "heads_q a multiple of heads_kv, both at least 1, got 4 and 0",
            ),
            (AttentionProblem { head_dim: 68, ..problem }, "head_dim a multiple of 8 from 8 to 576, got 68"),
            (
                AttentionProblem { head_dim: 584, ..problem },
                "head_dim a multiple of 8 from 8 to 576, got 584",
            ),
            (
                AttentionProblem { head_dim_v: 520, ..problem },
                "head_dim_v a multiple of 8 from 8 to 512, got 520",
            ),
            (
                AttentionProblem { head_dim_v: 28, ..problem },
                "head_dim_v a multiple of 8 from 8 to 512, got 28",
            ),
            (AttentionProblem { dtype: DType::I8, ..problem }, "dtype f32, f16 or bf16, got i8"),
            (
                AttentionProblem { page_size: Some(48), ..problem },
                "pages of 16, 32, 64, 128 or 256 keys, got 48",
            ),
            (AttentionProblem { window: Some(0), ..problem }, "a window of at least 1 key, got 0"),
            (AttentionProblem { scale: Some(f32::NAN), ..problem }, "a finite scale, got NaN"),
            (
                AttentionProblem { scores: Scores { soft_cap: Some(0.0), ..Scores::PLAIN }, ..problem },
                "a soft cap from 1e-30 to 1e30, got 0",
            ),
            (
                AttentionProblem { scores: Scores { blocks: Some(48), ..Scores::PLAIN }, ..problem },
                "blocks of 16, 32, 64 or 128, got 48",
            ),
            (AttentionProblem { dtype_kv: DType::F8E4M3, ..problem }, "dtype_kv f32, got f8e4m3"),
            (AttentionProblem { dtype_kv: DType::F16, ..fp8 }, "dtype_kv bf16 or f8e4m3, got f16"),
            (
                AttentionProblem { head_dim_v: 40, ..fp8 },
                "head_dim_v a multiple of 16, as k and v are fp8, got 40",
            ),
            (AttentionProblem { seq_kv: 1 << 30, ..problem }, "seq_kv below 2^30, got 1073741824"),
        ];
        for (problem, message) in unsupported {
            let error = Attention::supports(device, &problem).unwrap_err().to_string();
            assert_eq!(error, format!("attention: problem: expected {message}"));
        }
    }
    Ok(())
}
