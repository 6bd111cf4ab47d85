//! A case of attention: what it is made of, how a device computes it, what is expected of it.

use abi::ops::attention::{
    AttentionVariant, DECODE_LATENT_VARIANTS, DECODE_LATENT_WGMMA_VARIANTS, DECODE_RING_FP8_VARIANTS,
    DECODE_RING_VARIANTS, GATHER_PAGES_VARIANTS, GATHER_VARIANTS, PREFILL_MMA_VARIANTS, VARIANTS,
    WGMMA_VARIANTS,
};
use proptest::prelude::*;
use proptest::sample::select;
use testkit::compare::{Scale, Tolerance};
use testkit::round::round_to;
use testkit::strategies::{Rng, Values, dims, finite_values, stride_padding};
use warpforge::ops::attention::reference::{Options, Sequence, attention, magnitudes};
use warpforge::ops::attention::{
    Attention, AttentionArgs, AttentionProblem, KvScales, Mask, Offsets, PAGE_SIZES, ScoreBias, ScoreTensors,
    Scores,
};
use warpforge::{DType, Device, Need, Tensor, TensorView};

use crate::harness::{
    Contents, Executors, Layout, Rows, Wanted, check, fail, floats, restrict, store, values,
};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Place {
    /// In rows of its own.
    Apart,
    /// The first columns of k's rows.
    InKeys,
}

#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) dtype: DType,
    pub(super) seq_q: usize,
    /// Keys of each sequence.
    pub(super) lens: Vec<usize>,
    /// Keys that the views have room for.
    pub(super) capacity: usize,
    /// Query heads, and heads of k and v.
    pub(super) heads: (usize, usize),
    pub(super) head_dim: usize,
    pub(super) head_dim_v: usize,
    /// Where v is.
    pub(super) values: Place,
    pub(super) mask: Mask,
    pub(super) window: Option<usize>,
    pub(super) scale: Option<f32>,
    pub(super) scores: Scores,
    /// Of every other head, from the first on; the others have 1.
    pub(super) sinks: Option<f64>,
    /// What q is multiplied by, besides: how large the scores are.
    pub(super) gain: f64,
    /// Of v.
    pub(super) kind: Values,
    pub(super) q_layout: Layout,
    pub(super) kv_layout: Layout,
    /// Keys of a page, if k and v are in pages.
    pub(super) page_size: Option<usize>,
    /// Whether k and v are stored as fp8.
    pub(super) is_fp8: bool,
    pub(super) seed: u64,
}

impl Case {
    pub(super) fn problem(&self) -> AttentionProblem {
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
    pub(super) fn work(&self) -> usize {
        let tile = if self.head_dim.max(self.head_dim_v) <= 256 { 64 } else { 4 };
        let rows = self.lens.len() * self.heads.0 * self.seq_q.next_multiple_of(tile);
        let masks = if self.has_masks() { 16 } else { 0 };
        rows * self.capacity.next_multiple_of(64) * (16 + masks + (self.head_dim + self.head_dim_v) / 4)
    }

    /// The heads' sinks.
    pub(super) fn sinks(&self) -> Option<Vec<f64>> {
        let of_head = |sink: f64, head: usize| if head.is_multiple_of(2) { sink } else { 1.0 };
        self.sinks.map(|sink| (0..self.heads.0).map(|head| of_head(sink, head)).collect())
    }

    pub(super) fn sequence<'a>(&self, len: usize, own: &'a Own) -> Sequence<'a> {
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
        self.scores.bias != ScoreBias::None || self.scores.blocks.is_some()
    }

    /// Sizes 1 at random.
    fn broadcast(&self, sizes: [usize; 3], bit: u32) -> [usize; 3] {
        [0, 1, 2].map(|axis| if self.seed >> (bit + axis as u32) & 1 == 0 { sizes[axis] } else { 1 })
    }

    /// The bias, and its shape. A third of the keys is hidden from single queries, every seventh from all; every fifth
    /// query sees none.
    fn bias(&self) -> ([usize; 4], Vec<f64>) {
        let [batch, heads, queries] = self.broadcast([self.lens.len(), self.heads.0, self.seq_q], 40);
        let mut rng = Rng::new(self.seed ^ 3);
        let mut bias = Vec::new();
        for row in 0..batch * heads * queries {
            for key in 0..self.capacity {
                let is_hidden = rng.below(3) == 0 || key % 7 == 3 || (queries > 1 && row % queries % 5 == 4);
                let value = round_to(self.dtype, rng.below(64) as f64 / 8.0 - 4.0);
                bias.push(match (self.scores.bias, is_hidden) {
                    (ScoreBias::Boolean, _) => f64::from(!is_hidden),
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
    pub(super) fn own(&self, index: usize, len: usize) -> Own {
        let Case { seq_q, heads: (heads, _), .. } = *self;
        let at = |shape: [usize; 4], head: usize, query: usize| {
            let place = |axis: usize, index: usize| if shape[axis] == 1 { 0 } else { index };
            (place(0, index) * shape[1] + head) * shape[2] + place(2, query)
        };
        let bias = (self.scores.bias != ScoreBias::None).then(|| {
            let (shape, bias) = self.bias();
            let value = |value: f64| match self.scores.bias {
                ScoreBias::Boolean if value == 0.0 => f64::NEG_INFINITY,
                ScoreBias::Boolean => 0.0,
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
    pub(super) fn data(&self) -> [Vec<f64>; 3] {
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
pub(super) struct Own {
    pub(super) sinks: Option<Vec<f64>>,
    pub(super) bias: Option<Vec<f64>>,
    pub(super) blocks: Option<Vec<bool>>,
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

pub(super) fn case(
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
    let bias = || prop_oneof![8 => Just(ScoreBias::None), 1 => Just(ScoreBias::Additive), 1 => Just(ScoreBias::Boolean)];
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
pub(super) fn fp8_case() -> impl Strategy<Value = Case> {
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

pub(super) fn prefill_case() -> impl Strategy<Value = Case> {
    case(dims(&[16, 32, 64], 140), dims(&[16, 32, 64], 200))
}

pub(super) fn decode_case() -> impl Strategy<Value = Case> {
    case(1usize..6, dims(&[64, 256], 1100))
}

/// Latent attention in its absorbed form: rows of 576, of which the first 512 are the values, for up to two tiles of
/// rows.
pub(super) fn latent_case() -> impl Strategy<Value = Case> {
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
    pub(super) gathered: Results,
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
    let naive_out: Vec<f64> = naive.iter().flat_map(|(out, _)| out).copied().collect();
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
    let further = |((&naive, &gathered), &exact): ((&f64, &f64), &f64)| {
        if (gathered - exact).abs() > (naive - exact).abs() { gathered } else { naive }
    };
    let naive_lse =
        std::iter::zip(&naive[0].1, &gathered.1).zip(&reference.1).map(further).collect::<Vec<_>>();
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

/// A case of one sequence without masks, to be changed.
pub(super) fn plain(dtype: DType, seq_q: usize, len: usize, heads: (usize, usize), head_dim: usize) -> Case {
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
