//! A case of norm, rotation and append of latent rows: its inputs, its outputs, and how a device makes these.

use abi::ops::latent_append::{LatentAppendTile, LatentAppendVariant, PIECES_PER_THREAD};
use proptest::prelude::*;
use testkit::strategies::{Rng, Values, dims, finite_values, stride_padding};
use warpforge::ops::latent_append::{
    LatentAppend, LatentAppendArgs, LatentAppendKernel, LatentAppendProblem,
};
use warpforge::ops::rmsnorm::NormWeight;
use warpforge::ops::rope::{RopeInput, RopeStyle, RopeTables};
use warpforge::{Device, Error, Stream, Tensor, TensorView, TensorViewMut};

use crate::harness::{Layout, Rows, fail, floats, layouts, values};
use crate::places::{self, MAX_POSITION, inv_freq};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Place {
    InPlace,
    Apart,
}

/// How the tensors lie in memory; the weight has one row.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Layouts {
    pub(super) q: Layout,
    pub(super) x: Layout,
    pub(super) weight: Layout,
    pub(super) q_out: Layout,
    pub(super) cache: Layout,
}

#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) problem: LatentAppendProblem,
    /// Those of the run: at most as many as are planned.
    pub(super) tokens: usize,
    pub(super) num_slots: usize,
    /// Elements between heads: of q, and of q_out.
    pub(super) gaps: [usize; 2],
    pub(super) layouts: Layouts,
    pub(super) position_stride: usize,
    pub(super) place: Place,
    pub(super) heads_per_thread: u32,
    pub(super) kind: Values,
    pub(super) seed: u64,
}

/// Of the kernel that takes a block of 256 threads for a row, and a thread for a pair.
pub(super) fn work(tokens: usize, problem: &LatentAppendProblem) -> usize {
    let LatentAppendProblem { heads, latent, rope, .. } = *problem;
    tokens * (256 * 60 + 5 * latent + 20 * (heads + 1) * rope)
}

impl Case {
    pub(super) fn work(&self) -> usize {
        work(self.tokens, &self.problem)
    }
}

fn problem() -> impl Strategy<Value = LatentAppendProblem> {
    // Sizes of models, sizes beyond what a warp holds, and any.
    let sizes = prop_oneof![
        4 => proptest::sample::select(vec![[512, 64], [64, 32], [256, 16], [32, 8], [8, 16], [136, 24], [520, 16]]),
        1 => (1usize..200, 1usize..20).prop_map(|(latent, pairs)| [latent, 2 * pairs]),
    ];
    let weight = prop_oneof![Just(NormWeight::Plain), Just(NormWeight::ZeroCentred)];
    let eps = prop_oneof![Just(1e-6f32), Just(1e-5), Just(0.1)];
    let style = proptest::sample::select(&RopeStyle::ALL[..]);
    (floats(), dims(&[4], 12), 0usize..8, sizes, style, weight, eps).prop_map(
        |(dtype, tokens, heads, [latent, rope], style, weight, eps)| LatentAppendProblem {
            tokens,
            heads,
            latent,
            rope,
            style,
            dtype,
            eps,
            weight,
        },
    )
}

pub(super) fn case() -> impl Strategy<Value = Case> {
    let layout = || {
        let offset = prop_oneof![6 => Just(0usize), 1 => 1usize..9];
        (stride_padding(), offset).prop_map(|(padding, offset)| Layout { padding, offset })
    };
    let layouts =
        layouts(layout).prop_map(|[q, x, weight, q_out, cache]| Layouts { q, x, weight, q_out, cache });
    let gap = || prop_oneof![4 => Just(0usize), 1 => Just(8), 1 => 1usize..9];
    let place = prop_oneof![Just(Place::InPlace), Just(Place::Apart)];
    let memory = ([gap(), gap()], layouts, 1usize..3, place);
    let sizes = (problem(), prop_oneof![3 => Just(0usize), 1 => 1usize..9], 0usize..30);
    (sizes, memory, 1..=PIECES_PER_THREAD, finite_values(), any::<u64>()).prop_map(
        |((problem, spare, num_slots), memory, heads_per_thread, kind, seed)| {
            let (gaps, layouts, position_stride, place) = memory;
            let tokens = problem.tokens;
            let problem = LatentAppendProblem { tokens: tokens + spare, ..problem };
            Case {
                problem,
                tokens,
                num_slots,
                gaps,
                layouts,
                position_stride,
                place,
                heads_per_thread,
                kind,
                seed,
            }
        },
    )
}

/// Heads with a gap after each, `[tokens, heads, rope]`, of rows that hold at least one.
fn heads_in<'a>(
    rows: TensorView<'a>,
    problem: &LatentAppendProblem,
    gap: usize,
) -> Result<TensorView<'a>, Error> {
    let shape = [rows.shape()[0], problem.heads.max(1), problem.rope + gap];
    rows.reshape(&shape)?.slice(1, 0..problem.heads)?.slice(2, 0..problem.rope)
}

/// The same to write.
fn heads_in_mut<'a>(
    rows: TensorViewMut<'a>,
    problem: &LatentAppendProblem,
    gap: usize,
) -> Result<TensorViewMut<'a>, Error> {
    let shape = [rows.shape()[0], problem.heads.max(1), problem.rope + gap];
    rows.reshape(&shape)?.slice(1, 0..problem.heads)?.slice(2, 0..problem.rope)
}

/// The numbers of such heads, and all others.
pub(super) fn split(rows: &[f64], problem: &LatentAppendProblem, gap: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut heads, mut others) = (Vec::new(), Vec::new());
    let spread = problem.rope + gap;
    for (i, head) in rows.chunks(spread).enumerate() {
        let len = if i % problem.heads.max(1) < problem.heads { problem.rope } else { 0 };
        heads.extend_from_slice(&head[..len]);
        others.extend_from_slice(&head[len..]);
    }
    (heads, others)
}

/// What a case begins with, as numbers and on a device.
pub(super) struct Inputs {
    pub(super) q: Vec<f64>,
    pub(super) q_rows: Rows,
    pub(super) x: Vec<f64>,
    pub(super) x_rows: Rows,
    pub(super) weight: Vec<f64>,
    pub(super) weight_row: Rows,
    pub(super) positions: Vec<u32>,
    pub(super) position_tensor: Tensor,
    pub(super) slots: Vec<u32>,
    pub(super) slot_tensor: Tensor,
    pub(super) tables: RopeTables,
}

impl Inputs {
    pub(super) fn new(stream: &Stream, case: &Case) -> Result<Self, TestCaseError> {
        let Case { problem, tokens, num_slots, layouts, position_stride, kind, seed, .. } = *case;
        let LatentAppendProblem { heads, latent, rope, dtype, .. } = problem;
        let rows =
            |data: &[f64], width, layout| Rows::input(stream, dtype, data, width, layout).map_err(fail);
        let q_width = heads.max(1) * (rope + case.gaps[0]);
        let q = values(kind, dtype, tokens * q_width, seed);
        let x = values(kind, dtype, tokens * (latent + rope), seed ^ 1);
        let weight = values(Values::Normal, dtype, latent, seed ^ 2);
        let mut rng = Rng::new(seed ^ 3);
        let positions = places::positions(&mut rng, tokens);
        let slots = places::slots(&mut rng, tokens, num_slots);
        // Of each position only the first number counts.
        let spread: Vec<u32> =
            positions.iter().flat_map(|&position| [position, 11].into_iter().take(position_stride)).collect();
        Ok(Inputs {
            q_rows: rows(&q, q_width, layouts.q)?,
            q,
            x_rows: rows(&x, latent + rope, layouts.x)?,
            x,
            weight_row: rows(&weight, latent, Layout { padding: 0, ..layouts.weight })?,
            weight,
            position_tensor: Tensor::from_slice(stream, &[tokens, position_stride], &spread).map_err(fail)?,
            positions,
            slot_tensor: Tensor::from_slice(stream, &[tokens], &slots).map_err(fail)?,
            slots,
            tables: RopeTables::new(stream, &inv_freq(rope), 1.0, MAX_POSITION).map_err(fail)?,
        })
    }

    pub(super) fn weight(&self) -> Result<TensorView<'_>, Error> {
        self.weight_row.view().reshape(&[self.weight.len()])
    }

    pub(super) fn positions(&self) -> Result<TensorView<'_>, Error> {
        self.position_tensor.view().slice(1, 0..1)?.reshape(&[self.positions.len()])
    }
}

/// What it writes, and the numbers that were there before.
pub(super) struct Outputs {
    pub(super) q: Rows,
    pub(super) cache: Rows,
    pub(super) before: [Vec<f64>; 2],
}

impl Outputs {
    pub(super) fn new(stream: &Stream, case: &Case, inputs: &Inputs) -> Result<Self, TestCaseError> {
        let LatentAppendProblem { heads, latent, rope, dtype, .. } = case.problem;
        let (spread, gap) = (rope + case.gaps[1], case.gaps[1]);
        let mut q = values(Values::Normal, dtype, case.tokens * heads.max(1) * spread, case.seed ^ 4);
        if case.place == Place::InPlace && heads > 0 {
            let from = split(&inputs.q, &case.problem, case.gaps[0]).0;
            for (to, from) in std::iter::zip(q.chunks_mut(rope + gap), from.chunks(rope)) {
                to[..rope].copy_from_slice(from);
            }
        }
        let cache = values(Values::Normal, dtype, case.num_slots * (latent + rope), case.seed ^ 5);
        let rows = |data: &[f64], width, layout| Rows::input(stream, dtype, data, width, layout);
        Ok(Outputs {
            q: rows(&q, heads.max(1) * spread, case.layouts.q_out).map_err(fail)?,
            cache: rows(&cache, latent + rope, case.layouts.cache).map_err(fail)?,
            before: [q, cache],
        })
    }

    pub(super) fn run(
        &mut self,
        stream: &Stream,
        plan: &LatentAppend,
        case: &Case,
        inputs: &Inputs,
    ) -> Result<(), Error> {
        let q = heads_in(inputs.q_rows.view(), &case.problem, case.gaps[0])?;
        let args = LatentAppendArgs {
            q: match case.place {
                Place::InPlace => RopeInput::InPlace,
                Place::Apart => RopeInput::From(q),
            },
            x: inputs.x_rows.view(),
            weight: inputs.weight()?,
            positions: inputs.positions()?,
            tables: &inputs.tables,
            slots: inputs.slot_tensor.view(),
            q_out: heads_in_mut(self.q.view_mut(), &case.problem, case.gaps[1])?,
            cache: self.cache.view_mut(),
        };
        plan.run(stream, args)
    }

    /// The query heads and the cache, after checking what is between the heads.
    pub(super) fn read(&self, stream: &Stream, case: &Case) -> Result<[Vec<f64>; 2], TestCaseError> {
        let (heads, others) = split(&self.q.read(stream)?, &case.problem, case.gaps[1]);
        let (_, before) = split(&self.before[0], &case.problem, case.gaps[1]);
        prop_assert_eq!(others, before, "between heads");
        Ok([heads, self.cache.read(stream)?])
    }
}

impl Case {
    pub(super) fn plan(
        &self,
        device: &Device,
        variant: Option<&'static LatentAppendVariant>,
    ) -> Result<LatentAppend, Error> {
        let Some(variant) = variant else { return LatentAppend::plan(device, self.problem) };
        let most = match (variant.tile, self.problem.style) {
            (LatentAppendTile::Block, _) => 1,
            (_, RopeStyle::HalfSplit) => PIECES_PER_THREAD / 2,
            (_, RopeStyle::Interleaved) => PIECES_PER_THREAD,
        };
        let heads_per_thread = self.heads_per_thread.min(most);
        LatentAppend::plan_with(device, self.problem, LatentAppendKernel { variant, heads_per_thread })
    }
}
