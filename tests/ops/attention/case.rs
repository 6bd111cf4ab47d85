//! A case of attention: what it is made of, and its sizes.

use proptest::prelude::*;
use proptest::sample::select;
use testkit::round::round_to;
use testkit::strategies::{Rng, Values, dims, finite_values, stride_padding};
use warpforge::DType;
use warpforge::ops::attention::reference::{Options, Sequence};
use warpforge::ops::attention::{AttentionProblem, Mask, PAGE_SIZES, ScoreBias, Scores};

use crate::harness::{Layout, floats, values};

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

    pub(super) fn dtype_kv(&self) -> DType {
        if self.is_fp8 { DType::F8E4M3 } else { self.dtype }
    }

    /// Scales of the key heads, of k and v; none are given if all are 1.
    pub(super) fn kv_scales(&self) -> [Vec<f32>; 2] {
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
    pub(super) fn bias(&self) -> ([usize; 4], Vec<f64>) {
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
    pub(super) fn blocks(&self, size: usize) -> ([usize; 4], Vec<u32>) {
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
pub(super) fn scale_heads(
    values: &mut [f64],
    width: usize,
    scales: &[f32],
    change: impl Fn(f64, f64) -> f64,
) {
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

/// Prompts whose keys are in pages, in 16 bits and with rows that tensor cores take; often with a mask by element.
pub(super) fn paged_case() -> impl Strategy<Value = Case> {
    let bias = prop_oneof![2 => Just(ScoreBias::None), 1 => Just(ScoreBias::Additive), 1 => Just(ScoreBias::Boolean)];
    let types = select(&[DType::F16, DType::BF16][..]);
    (prefill_case(), select(&PAGE_SIZES[..]), types, bias).prop_map(|(case, page_size, dtype, bias)| {
        let aligned = |layout: Layout| Layout { padding: layout.padding / 8 * 8, offset: 0 };
        Case {
            dtype,
            scores: Scores { bias, blocks: None, ..case.scores },
            q_layout: aligned(case.q_layout),
            kv_layout: aligned(case.kv_layout),
            page_size: Some(page_size),
            ..case
        }
    })
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
