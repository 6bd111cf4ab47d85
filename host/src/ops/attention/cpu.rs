//! Attention on the CPU: online softmax over tiles of keys, tiles of queries in parallel.

use std::ops::Range;

use abi::DType;
use abi::ops::attention::{ADDED, AttentionDims, SEEN};
use half::{bf16, f16};

use super::{AttentionArgs, AttentionProblem, scores, visible};
use crate::error::Error;
use crate::fp8::F8E4M3;
use crate::ops::packed::sequence;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::simd::{LANES, Lanes, Work, by_best, exp, load_rest, store_rest};
use crate::tensor::{FloatElement, TensorView};

/// Queries of a tile.
const QUERIES: usize = 16;
/// Keys of a tile; tiles start at multiples of it, so that the order of a row's sums depends on the row alone.
const KEYS: usize = 64;

pub(super) fn run(
    problem: &AttentionProblem,
    dims: &AttentionDims,
    args: &mut AttentionArgs<'_>,
) -> Result<(), Error> {
    match (problem.dtype, problem.dtype_kv) {
        (DType::F16, DType::F8E4M3) => tiles::<f16, F8E4M3>(problem, dims, args),
        (DType::BF16, DType::F8E4M3) => tiles::<bf16, F8E4M3>(problem, dims, args),
        (DType::F16, _) => tiles::<f16, f16>(problem, dims, args),
        (DType::BF16, _) => tiles::<bf16, bf16>(problem, dims, args),
        _ => tiles::<f32, f32>(problem, dims, args),
    }
    Ok(())
}

/// The state of one row: `sum` and `out` are relative to e^`max`.
struct Row {
    max: f32,
    sum: f32,
    /// With zeros to whole vectors.
    out: Vec<[f32; LANES]>,
}

impl Row {
    /// One more score, which has no value.
    fn join(&mut self, score: f32) {
        let max = self.max.max(score);
        let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let decay = (self.max - base).exp();
        self.max = max;
        self.sum = self.sum * decay + (score - base).exp();
        self.out.as_flattened_mut().iter_mut().for_each(|out| *out *= decay);
    }
}

fn tiles<T: FloatElement, C: FloatElement>(
    problem: &AttentionProblem,
    dims: &AttentionDims,
    args: &mut AttentionArgs<'_>,
) {
    let scale = problem.scale();
    let (seq_q, head_dim, head_dim_v) =
        (dims.seq_q as usize, dims.head_dim as usize, dims.head_dim_v as usize);
    let (heads_kv, group) = (dims.heads_kv as usize, dims.group as usize);
    let (q, k, v) = (args.q.host_slice::<T>(), args.k.host_slice::<C>(), args.v.host_slice::<C>());
    let [k_scales, v_scales] = [&args.kv_scales.k, &args.kv_scales.v]
        .map(|scale| scale.as_ref().map(|scale| scale.host_slice::<f32>()));
    let kv_lens = words(&args.kv_lens);
    let kv_offsets = words(&args.offsets.kv);
    // Made to ascend whatever they say: sequences are done side by side and may not write the same rows.
    let q_offsets = words(&args.offsets.q).map(|offsets| {
        let mut most = 0;
        let ascending = offsets.iter().map(|&offset| {
            most = offset.max(most);
            most
        });
        ascending.collect::<Vec<u32>>()
    });
    // Of a packed sequence, the first token and how many there are, at most `most`.
    let packed = |offsets: &[u32], batch: usize, tokens: u32, most: u32| {
        let tokens = sequence(offsets, batch, tokens);
        (tokens.start, (tokens.len() as u32).min(most))
    };
    let queries_of = |batch: usize| match &q_offsets {
        Some(offsets) => packed(offsets, batch, dims.tokens_q, dims.seq_q),
        None => (0, dims.seq_q),
    };
    let keys_of = |batch: usize| match (kv_offsets, kv_lens) {
        (Some(offsets), _) => packed(offsets, batch, dims.tokens_kv, dims.seq_kv),
        (None, Some(kv_lens)) => (0, kv_lens[batch].min(dims.seq_kv)),
        (None, None) => (0, dims.seq_kv),
    };
    let sinks = args.scores.sinks.as_ref().map(|sinks| sinks.host_slice::<f32>());
    let page_table = words(&args.page_table);
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    let lse = args.lse.as_mut().map(|lse| SharedSlice::new(lse.host_slice_mut::<f32>()));
    let place = |index: usize, stride: u32| index * stride as usize;
    // Where a key's row of the first head starts, by the strides of k or v.
    let row = |batch: usize, key: usize, page_stride: u32, token_stride: u32| {
        let page = page_table.map_or(batch, |table| {
            let at = place(batch, dims.table_stride) + (key >> dims.page_log2);
            table[at].min(dims.num_pages - 1) as usize
        });
        let (page, first) = if kv_offsets.is_some() { (0, keys_of(batch).0) } else { (page, 0) };
        place(page, page_stride) + place(first + (key & ((1 << dims.page_log2) - 1)), token_stride)
    };
    let query_tiles = seq_q.div_ceil(QUERIES);
    let [cap_in, cap_out] = scores::cap(problem, None);
    let blocks = words(&args.scores.blocks);
    let added = (dims.scores.bias == ADDED)
        .then(|| args.scores.bias.as_ref().map(|bias| bias.host_slice::<T>()))
        .flatten();
    let seen = (dims.scores.bias == SEEN)
        .then(|| args.scores.bias.as_ref().map(|bias| bias.host_slice::<i8>()))
        .flatten();
    let bias_row = |batch: usize, query: usize, head: usize| {
        place(batch, dims.scores.bias_batch_stride)
            + place(query, dims.scores.bias_query_stride)
            + place(head, dims.scores.bias_head_stride)
    };
    // What is added to a score; none if the key is hidden.
    let term = |[batch, head, query]: [usize; 3], key: usize| -> Option<f32> {
        if blocks.is_some_and(|blocks| !scores::in_block(dims, blocks, [batch, head, query], key)) {
            return None;
        }
        let at = bias_row(batch, query, head) + key;
        if seen.is_some_and(|seen| seen[at] == 0) {
            return None;
        }
        Some(added.map_or(0.0, |added| added[at].to_f32())).filter(|&term| term != f32::NEG_INFINITY)
    };

    let has_terms = blocks.is_some() || seen.is_some() || added.is_some();
    // A task is a tile of queries of all the heads that share a key head: k and v are converted once for them.
    let num_tasks = dims.batch as usize * heads_kv * query_tiles;
    let num_products = num_tasks * QUERIES.min(seq_q) * group * dims.seq_kv as usize * head_dim;
    for_rows(num_tasks, num_products, |task| {
        let (tile, rest) = (task % query_tiles, task / query_tiles);
        let (head_kv, batch) = (rest % heads_kv, rest / heads_kv);
        let ((first_query, seq_q), (_, len)) = (queries_of(batch), keys_of(batch));
        let queries = tile * QUERIES..((tile + 1) * QUERIES).min(seq_q as usize);
        if queries.is_empty() {
            return;
        }
        let own = [len, seq_q];
        let (any_lo, _) = visible(dims, own, queries.start as u32);
        let (_, any_hi) = visible(dims, own, queries.end as u32 - 1);

        // Rows in the order (query, head).
        let pairs = || {
            queries.clone().flat_map(|query| (head_kv * group..).take(group).map(move |head| (query, head)))
        };
        // Rows of whole vectors, with zeros behind them.
        let [length, length_v] = [head_dim, head_dim_v].map(|dim| dim.div_ceil(LANES));
        let mut scaled = vec![[0.0; LANES]; pairs().count() * length];
        for ((query, head), scaled) in pairs().zip(scaled.chunks_mut(length)) {
            let start = place(batch, dims.q_batch_stride)
                + place(first_query + query, dims.q_token_stride)
                + place(head, dims.q_head_stride);
            by_best(Widen { from: &q[start..][..head_dim], scale, to: scaled });
        }
        let new_row = |_| Row { max: f32::NEG_INFINITY, sum: 0.0, out: vec![[0.0; LANES]; length_v] };
        let mut rows: Vec<Row> = pairs().map(new_row).collect();
        let (mut keys, mut values) = (vec![[0.0; LANES]; KEYS * length], vec![[0.0; LANES]; KEYS * length_v]);
        let mut weights = [[0.0; LANES]; KEYS / LANES];
        let [k_scale, v_scale] =
            [k_scales, v_scales].map(|scales| scales.map_or(1.0, |scales| scales[head_kv]));
        for first in (any_lo / KEYS * KEYS..any_hi).step_by(KEYS) {
            let span = first.max(any_lo)..(first + KEYS).min(any_hi);
            for key in span {
                let at = |width: usize| (key - first) * width..(key - first + 1) * width;
                let k_row = row(batch, key, dims.k_batch_stride, dims.k_token_stride)
                    + place(head_kv, dims.k_head_stride);
                let v_row = row(batch, key, dims.v_batch_stride, dims.v_token_stride)
                    + place(head_kv, dims.v_head_stride);
                let from = &k[k_row..][..head_dim];
                by_best(Widen { from, scale: k_scale, to: &mut keys[at(length)] });
                let from = &v[v_row..][..head_dim_v];
                by_best(Widen { from, scale: v_scale, to: &mut values[at(length_v)] });
            }
            for (index, (row, (query, head))) in std::iter::zip(&mut rows, pairs()).enumerate() {
                let place = [batch, head, query];
                let (lo, hi) = visible(dims, own, query as u32);
                let span = lo.max(first)..hi.min(first + KEYS);
                if span.is_empty() {
                    continue;
                }
                let span = span.start - first..span.end - first;
                let query = &scaled[index * length..][..length];
                by_best(Scores { query, keys: &keys, span: span.clone(), weights: &mut weights });
                if has_terms || cap_in != 0.0 {
                    for key in span.clone() {
                        let weight = &mut weights.as_flattened_mut()[key];
                        let Some(term) = term(place, first + key) else {
                            *weight = f32::NEG_INFINITY;
                            continue;
                        };
                        if cap_in != 0.0 {
                            *weight = cap_out * (cap_in * *weight).tanh();
                        }
                        *weight += term;
                    }
                }
                by_best(Update { row, values: &values, span, weights: &mut weights });
            }
        }

        for (row, (query, head)) in std::iter::zip(&mut rows, pairs()) {
            if let Some(sinks) = sinks {
                row.join(sinks[head]);
            }
            let start = place(batch, dims.out_batch_stride)
                + place(first_query + query, dims.out_token_stride)
                + place(head, dims.out_head_stride);
            // SAFETY: rows do not overlap within a view that is written (distinct rows have distinct elements), and
            // offsets that ascend give each row to one sequence.
            let out = unsafe { out.part(start, head_dim_v) };
            let (inverse, empty) = (1.0 / row.sum, row.sum == 0.0);
            if empty {
                out.fill(T::zeroed());
            } else {
                by_best(Scaled { values: &row.out, by: inverse, out });
            }
            if let Some(lse) = &lse {
                let start = place(batch, dims.lse_batch_stride)
                    + place(head, dims.lse_head_stride)
                    + first_query
                    + query;
                // SAFETY: as for out.
                let lse = unsafe { lse.part(start, 1) };
                lse[0] = if empty { f32::NEG_INFINITY } else { row.max + row.sum.ln() };
            }
        }
    });
}

/// The numbers of a tensor that there may be.
fn words<'a>(view: &'a Option<TensorView<'_>>) -> Option<&'a [u32]> {
    view.as_ref().map(|view| view.host_slice())
}

/// Elements times a number, with zeros to whole vectors.
struct Widen<'s, T> {
    from: &'s [T],
    scale: f32,
    to: &'s mut [[f32; LANES]],
}

impl<T: FloatElement> Work for Widen<'_, T> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        for (to, from) in std::iter::zip(self.to, self.from.chunks(LANES)) {
            if T::DTYPE == DType::F8E4M3 {
                let mut codes = [0; LANES];
                codes[..from.len()].copy_from_slice(bytemuck::cast_slice(from));
                V::load_e4m3(&codes).mul(V::splat(self.scale)).store(to);
            } else {
                load_rest::<V, T>(from).mul(V::splat(self.scale)).store(to);
            }
        }
    }
}

/// Values times a number, as elements.
struct Scaled<'s, T> {
    values: &'s [[f32; LANES]],
    by: f32,
    out: &'s mut [T],
}

impl<T: FloatElement> Work for Scaled<'_, T> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        for (out, values) in std::iter::zip(self.out.chunks_mut(LANES), self.values) {
            store_rest(V::load(values).mul(V::splat(self.by)), out);
        }
    }
}

/// The products of a query and the keys of a span.
struct Scores<'s> {
    query: &'s [[f32; LANES]],
    keys: &'s [[f32; LANES]],
    span: Range<usize>,
    weights: &'s mut [[f32; LANES]; KEYS / LANES],
}

impl Work for Scores<'_> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        let Scores { query, keys, span, weights } = self;
        let weights = weights.as_flattened_mut();
        let length = query.len();
        let mut key = span.start;
        while key < span.end {
            // Four at a time, so that additions do not wait for each other.
            if span.end - key >= 4 {
                let of: [&[[f32; LANES]]; 4] = std::array::from_fn(|i| &keys[(key + i) * length..][..length]);
                let mut sums = [V::splat(0.0); 4];
                for i in 0..length {
                    let query = V::load(&query[i]);
                    for j in 0..4 {
                        sums[j] = query.mul_add(V::load(&of[j][i]), sums[j]);
                    }
                }
                for j in 0..4 {
                    weights[key + j] = sums[j].sum();
                }
                key += 4;
            } else {
                let of = &keys[key * length..][..length];
                let mut sum = V::splat(0.0);
                for i in 0..length {
                    sum = V::load(&query[i]).mul_add(V::load(&of[i]), sum);
                }
                weights[key] = sum.sum();
                key += 1;
            }
        }
    }
}

/// A step of the online softmax: scores become weights, and values times these are added.
struct Update<'s> {
    row: &'s mut Row,
    values: &'s [[f32; LANES]],
    span: Range<usize>,
    /// −inf for keys that are hidden.
    weights: &'s mut [[f32; LANES]; KEYS / LANES],
}

impl Work for Update<'_> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        let Update { row, values, span, weights } = self;
        let flat = weights.as_flattened_mut();
        // What is not of the span is as if it were hidden.
        flat[..span.start].fill(f32::NEG_INFINITY);
        flat[span.end..].fill(f32::NEG_INFINITY);
        let max = flat[span.clone()].iter().fold(row.max, |max, &weight| max.max(weight));
        let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let decay = (row.max - base).exp();
        row.max = max;
        let mut sum = V::splat(0.0);
        for weights in weights.iter_mut() {
            let weight = exp(V::load(weights).sub(V::splat(base)));
            weight.store(weights);
            sum = sum.add(weight);
        }
        row.sum = row.sum * decay + sum.sum();
        let length = row.out.len();
        let flat = weights.as_flattened();
        let decay = V::splat(decay);
        // Four vectors of a row of values at a time, which stay in registers.
        let mut start = 0;
        while start < length {
            start += if length - start >= 4 {
                add_values::<V, 4>((&mut row.out, start), decay, values, (flat, span.clone()))
            } else {
                add_values::<V, 1>((&mut row.out, start), decay, values, (flat, span.clone()))
            };
        }
    }
}

/// So many vectors of the values of keys, times their weights; how many.
#[inline(always)]
fn add_values<V: Lanes, const N: usize>(
    (out, start): (&mut [[f32; LANES]], usize),
    decay: V,
    values: &[[f32; LANES]],
    (weights, span): (&[f32], Range<usize>),
) -> usize {
    let length = out.len();
    let mut sums = [decay; N];
    for i in 0..N {
        sums[i] = decay.mul(V::load(&out[start + i]));
    }
    for key in span {
        // Not 0 · inf of a hidden key.
        if weights[key] == 0.0 {
            continue;
        }
        let weight = V::splat(weights[key]);
        let of = &values[key * length + start..][..N];
        for i in 0..N {
            sums[i] = weight.mul_add(V::load(&of[i]), sums[i]);
        }
    }
    for i in 0..N {
        sums[i].store(&mut out[start + i]);
    }
    N
}
