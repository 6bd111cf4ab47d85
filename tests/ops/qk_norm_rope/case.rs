//! A case of norm, rotation and append of q, k and v: its inputs, its outputs, and how a device makes these.

use abi::ops::qk_norm_rope::{MAX_HEADS_PER_GROUP, QkNormRopeTile, QkNormRopeVariant};
use proptest::prelude::*;
use testkit::strategies::{Rng, Values, dims, finite_values, stride_padding};
use warpforge::ops::qk_norm_rope::{
    QkNorm, QkNormRope, QkNormRopeArgs, QkNormRopeKernel, QkNormRopeProblem, QkNormWeights,
};
use warpforge::ops::rmsnorm::NormWeight;
use warpforge::ops::rope::reference::RopeShape;
use warpforge::ops::rope::{RopeInput, RopeStyle, RopeTables};
use warpforge::{DType, Device, Error, Stream, Tensor, TensorView};

use crate::harness::{Layout, Rows, fail, floats, values};
use crate::places::{self, MAX_POSITION, inv_freq};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Place {
    InPlace,
    Apart,
}

#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) problem: QkNormRopeProblem,
    pub(super) num_slots: usize,
    /// Elements between heads: of the joint projection, and of q_out and the caches.
    pub(super) gaps: [usize; 2],
    pub(super) from: Layout,
    pub(super) to: Layout,
    /// Elements by which the weights are moved away from an aligned address.
    pub(super) weight_offset: usize,
    pub(super) place: Place,
    pub(super) heads_per_group: u32,
    pub(super) kind: Values,
    pub(super) seed: u64,
}

impl Case {
    /// Of the kernel that takes a block of 256 threads for a head.
    pub(super) fn work(&self) -> usize {
        let QkNormRopeProblem { tokens, heads_q, heads_kv, head_dim, .. } = self.problem;
        tokens * (heads_q + 2 * heads_kv) * (256 * 40 + 20 * head_dim)
    }
}

fn problem() -> impl Strategy<Value = QkNormRopeProblem> {
    // Sizes of models, sizes that fit no piece of 16 bytes, and any.
    let head = prop_oneof![
        4 => proptest::sample::select(vec![(128, 128), (64, 64), (256, 64), (16, 16), (32, 16), (48, 32), (8, 8)]),
        1 => (1usize..40, 0usize..20).prop_map(|(pairs, rest)| (2 * pairs + rest, 2 * pairs)),
    ];
    let norm = prop_oneof![
        1 => Just(None),
        2 => Just(Some(QkNorm { eps: 1e-6, weight: NormWeight::Plain })),
        1 => Just(Some(QkNorm { eps: 1e-3, weight: NormWeight::ZeroCentred })),
    ];
    let style = proptest::sample::select(&RopeStyle::ALL[..]);
    let dtypes = (floats(), prop_oneof![3 => Just(None), 1 => Just(Some(DType::F8E4M3))]);
    (dtypes, dims(&[4], 12), 1usize..7, 1usize..4, head, style, norm).prop_map(
        |((dtype, cache), tokens, heads_q, heads_kv, (head_dim, rotary_dim), style, norm)| {
            QkNormRopeProblem {
                tokens,
                heads_q,
                heads_kv,
                head_dim,
                rotary_dim,
                style,
                dtype,
                cache_dtype: cache.unwrap_or(dtype),
                norm,
            }
        },
    )
}

pub(super) fn case() -> impl Strategy<Value = Case> {
    let layout = || {
        let offset = prop_oneof![6 => Just(0usize), 1 => 1usize..9];
        (stride_padding(), offset).prop_map(|(padding, offset)| Layout { padding, offset })
    };
    let gap = || prop_oneof![4 => Just(0usize), 1 => Just(8), 1 => 1usize..9];
    let place = prop_oneof![Just(Place::InPlace), Just(Place::Apart)];
    let weight_offset = prop_oneof![3 => Just(0usize), 1 => 1usize..9];
    let layouts = ([gap(), gap()], layout(), layout(), weight_offset, place);
    (problem(), 0usize..30, layouts, 1..=MAX_HEADS_PER_GROUP, finite_values(), any::<u64>()).prop_map(
        |(problem, num_slots, (gaps, from, to, weight_offset, place), heads_per_group, kind, seed)| Case {
            problem,
            num_slots,
            gaps,
            from,
            to,
            weight_offset,
            place,
            heads_per_group,
            kind,
            seed,
        },
    )
}

/// What a case begins with, as numbers and on a device. Rows are heads with a gap after each.
pub(super) struct Inputs {
    /// q, k and v beside each other.
    pub(super) joint: Vec<f64>,
    pub(super) joint_rows: Rows,
    pub(super) weights: [Vec<f64>; 2],
    pub(super) weight_rows: [Rows; 2],
    pub(super) positions: Vec<u32>,
    pub(super) position_tensor: Tensor,
    pub(super) slots: Vec<u32>,
    pub(super) slot_tensor: Tensor,
    pub(super) tables: RopeTables,
    /// Of the key heads and the value heads of fp8 caches; all 1 in others, which take none.
    pub(super) scales: [Vec<f32>; 2],
    pub(super) scale_tensors: [Tensor; 2],
}

/// What it writes, and the numbers that were there before.
pub(super) struct Outputs {
    pub(super) q: Rows,
    pub(super) k_cache: Rows,
    pub(super) v_cache: Rows,
    pub(super) before: [Vec<f64>; 3],
}

impl Inputs {
    pub(super) fn new(stream: &Stream, case: &Case) -> Result<Self, TestCaseError> {
        let QkNormRopeProblem { tokens, head_dim, rotary_dim, dtype, .. } = case.problem;
        let seed = case.seed;
        let rows =
            |data: &[f64], width, layout| Rows::input(stream, dtype, data, width, layout).map_err(fail);
        let width = case.joint_heads() * (head_dim + case.gaps[0]);
        let joint = values(case.kind, dtype, tokens * width, seed);
        let weights = [1, 2].map(|i| values(Values::Normal, dtype, head_dim, seed ^ i));
        let weight_layout = Layout { padding: 0, offset: case.weight_offset };
        let weight = |i: usize| rows(&weights[i], head_dim, weight_layout);
        let mut rng = Rng::new(seed ^ 3);
        let positions = places::positions(&mut rng, tokens);
        let slots = places::slots(&mut rng, tokens, case.num_slots);
        let is_fp8 = case.problem.cache_dtype == DType::F8E4M3;
        let mut scale = |_| if is_fp8 { 0.004 + 0.05 * rng.uniform() as f32 } else { 1.0 };
        let scales: [Vec<f32>; 2] = [0, 1].map(|_| (0..case.problem.heads_kv).map(&mut scale).collect());
        let scale_tensor =
            |i: usize| Tensor::from_slice(stream, &[case.problem.heads_kv], &scales[i]).map_err(fail);
        Ok(Inputs {
            scale_tensors: [scale_tensor(0)?, scale_tensor(1)?],
            scales,
            joint_rows: rows(&joint, width, case.from)?,
            joint,
            weight_rows: [weight(0)?, weight(1)?],
            weights,
            position_tensor: Tensor::from_slice(stream, &[tokens], &positions).map_err(fail)?,
            positions,
            slot_tensor: Tensor::from_slice(stream, &[tokens], &slots).map_err(fail)?,
            slots,
            tables: RopeTables::new(stream, &inv_freq(rotary_dim), 1.0, MAX_POSITION).map_err(fail)?,
        })
    }

    /// q, k or v of the joint projection.
    pub(super) fn part(&self, case: &Case, part: usize) -> Result<TensorView<'_>, Error> {
        let QkNormRopeProblem { tokens, head_dim, .. } = case.problem;
        let shape = [tokens, case.joint_heads(), head_dim + case.gaps[0]];
        self.joint_rows.view().reshape(&shape)?.slice(1, case.heads_of(part))?.slice(2, 0..head_dim)
    }

    /// The same as numbers.
    pub(super) fn numbers(&self, case: &Case, part: usize) -> Vec<f64> {
        let stride = case.problem.head_dim + case.gaps[0];
        let heads = case.heads_of(part);
        let rows = self.joint.chunks(case.joint_heads() * stride);
        let parts = rows.flat_map(|row| &row[heads.start * stride..heads.end * stride]).copied();
        split(&parts.collect::<Vec<f64>>(), case.problem.head_dim, case.gaps[0]).0
    }

    pub(super) fn weight(&self, i: usize) -> Result<TensorView<'_>, Error> {
        let rows = self.weight_rows[i].view();
        rows.reshape(&[rows.len()])
    }
}

impl Outputs {
    pub(super) fn new(stream: &Stream, case: &Case, inputs: &Inputs) -> Result<Self, TestCaseError> {
        let QkNormRopeProblem { tokens, heads_q, heads_kv, head_dim, dtype, cache_dtype, .. } = case.problem;
        let (gap, spread) = (case.gaps[1], head_dim + case.gaps[1]);
        let rows = |dtype, data: &[f64], heads: usize| {
            Rows::input(stream, dtype, data, heads * spread, case.to).map_err(fail)
        };
        let random = |dtype, rows: usize, heads: usize, seed| {
            values(Values::Normal, dtype, rows * heads * spread, case.seed ^ seed)
        };
        let caches = [5, 6].map(|seed| random(cache_dtype, case.num_slots, heads_kv, seed));
        let before = match case.place {
            Place::Apart => random(dtype, tokens, heads_q, 4),
            Place::InPlace => {
                let q = inputs.numbers(case, 0);
                q.chunks(head_dim).flat_map(|head| [head, &vec![1.0; gap]].concat()).collect()
            }
        };
        Ok(Outputs {
            q: if case.place == Place::Apart && gap == 0 {
                Rows::output(stream, dtype, tokens, heads_q * spread, case.to).map_err(fail)?
            } else {
                rows(dtype, &before, heads_q)?
            },
            k_cache: rows(cache_dtype, &caches[0], heads_kv)?,
            v_cache: rows(cache_dtype, &caches[1], heads_kv)?,
            before: {
                let [k, v] = caches;
                [before, k, v]
            },
        })
    }

    pub(super) fn run(
        &mut self,
        stream: &Stream,
        plan: &QkNormRope,
        case: &Case,
        inputs: &Inputs,
    ) -> Result<(), Error> {
        let QkNormRopeProblem { tokens, heads_q, heads_kv, head_dim, norm, .. } = case.problem;
        let spread = head_dim + case.gaps[1];
        let weights = match norm {
            None => None,
            Some(_) => Some(QkNormWeights { q: inputs.weight(0)?, k: inputs.weight(1)? }),
        };
        let cache = [case.num_slots, heads_kv, spread];
        let scale =
            |i: usize| (case.problem.cache_dtype == DType::F8E4M3).then(|| inputs.scale_tensors[i].view());
        let args = QkNormRopeArgs {
            q: match case.place {
                Place::InPlace => RopeInput::InPlace,
                Place::Apart => RopeInput::From(inputs.part(case, 0)?),
            },
            k: inputs.part(case, 1)?,
            v: inputs.part(case, 2)?,
            weights,
            positions: inputs.position_tensor.view(),
            tables: &inputs.tables,
            slots: inputs.slot_tensor.view(),
            q_out: self.q.view_mut().reshape(&[tokens, heads_q, spread])?.slice(2, 0..head_dim)?,
            k_cache: self.k_cache.view_mut().reshape(&cache)?.slice(2, 0..head_dim)?,
            v_cache: self.v_cache.view_mut().reshape(&cache)?.slice(2, 0..head_dim)?,
            k_scale: scale(0),
            v_scale: scale(1),
        };
        plan.run(stream, args)
    }

    /// The heads of q and of the caches, after checking what is between them.
    pub(super) fn read(&self, stream: &Stream, case: &Case) -> Result<[Vec<f64>; 3], TestCaseError> {
        let mut heads = Vec::new();
        for (rows, before) in std::iter::zip([&self.q, &self.k_cache, &self.v_cache], &self.before) {
            let (got, gaps) = split(&rows.read(stream)?, case.problem.head_dim, case.gaps[1]);
            let (_, before) = split(before, case.problem.head_dim, case.gaps[1]);
            prop_assert_eq!(gaps, before, "between heads");
            heads.push(got);
        }
        heads.try_into().map_err(|_| fail("three tensors"))
    }
}

impl Case {
    pub(super) fn joint_heads(&self) -> usize {
        self.problem.heads_q + 2 * self.problem.heads_kv
    }

    /// Of q, k or v in the joint projection.
    pub(super) fn heads_of(&self, part: usize) -> std::ops::Range<usize> {
        let QkNormRopeProblem { heads_q, heads_kv, .. } = self.problem;
        [0..heads_q, heads_q..heads_q + heads_kv, heads_q + heads_kv..self.joint_heads()][part].clone()
    }

    pub(super) fn shape(&self, heads: usize) -> RopeShape {
        let QkNormRopeProblem { head_dim, rotary_dim, style, .. } = self.problem;
        RopeShape { heads, head_dim, rotary_dim, style }
    }

    pub(super) fn plan(
        &self,
        device: &Device,
        variant: Option<&'static QkNormRopeVariant>,
    ) -> Result<QkNormRope, Error> {
        let Some(variant) = variant else { return QkNormRope::plan(device, self.problem) };
        let heads_per_group = if variant.tile == QkNormRopeTile::Block { 1 } else { self.heads_per_group };
        QkNormRope::plan_with(device, self.problem, QkNormRopeKernel { variant, heads_per_group })
    }
}

/// Heads, and the gaps that follow them.
pub(super) fn split(rows: &[f64], head_dim: usize, gap: usize) -> (Vec<f64>, Vec<f64>) {
    let heads = rows.chunks(head_dim + gap);
    (
        heads.clone().flat_map(|head| &head[..head_dim]).copied().collect(),
        heads.flat_map(|head| &head[head_dim..]).copied().collect(),
    )
}
