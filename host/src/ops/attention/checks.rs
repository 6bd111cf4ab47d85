//! What a plan and a run ask of their problem and tensors before anything is launched.

use abi::DType;
use abi::ops::attention::{AttentionDims, MAX_HEAD_DIM, MAX_HEAD_DIM_V, SPLIT_KEYS};

use super::dims::Checked;
use super::select::section;
use super::{AttentionArgs, AttentionProblem, Mask, OP, PAGE_SIZES, Planned};
use crate::error::Error;
use crate::plan::{Check, check_size, no_float};
use crate::tensor::TensorView;

/// Where a run's keys are: fields of [`AttentionDims`].
struct Cache {
    seq_kv: usize,
    k_strides: [u32; 3],
    page_log2: u32,
    num_pages: u32,
    table_stride: u32,
}

pub(super) fn check_problem(problem: &AttentionProblem) -> Result<(), Error> {
    let AttentionProblem { batch, seq_q, seq_kv, heads_q, heads_kv, head_dim, head_dim_v, dtype, .. } =
        *problem;
    let invalid = |expected: &str, got: String| Err(Error::invalid(OP, "problem", expected, got));
    check_size(OP, "problem", "batch", batch)?;
    // The second axis of the merge's grid.
    if heads_q >= 1 << 16 {
        return invalid("heads_q below 2^16", heads_q.to_string());
    }
    // The kernels add and subtract the two and the window in i32.
    for (name, size) in [("seq_q", seq_q), ("seq_kv", seq_kv)] {
        if size >= 1 << 30 {
            return invalid(&format!("{name} below 2^30"), size.to_string());
        }
    }
    if heads_kv == 0 || heads_q == 0 || !heads_q.is_multiple_of(heads_kv) {
        return invalid(
            "heads_q a multiple of heads_kv, both at least 1",
            format!("{heads_q} and {heads_kv}"),
        );
    }
    for (name, size, most) in
        [("head_dim", head_dim, MAX_HEAD_DIM), ("head_dim_v", head_dim_v, MAX_HEAD_DIM_V)]
    {
        if !(8..=most as usize).contains(&size) || !size.is_multiple_of(8) {
            return invalid(&format!("{name} a multiple of 8 from 8 to {most}"), size.to_string());
        }
    }
    if !dtype.is_float() {
        return Err(no_float(OP, dtype));
    }
    if problem.dtype_kv != dtype {
        if !problem.is_fp8() || dtype == DType::F32 {
            let expected = if dtype == DType::F32 {
                "dtype_kv f32".into()
            } else {
                format!("dtype_kv {dtype} or f8e4m3")
            };
            return invalid(&expected, problem.dtype_kv.name().into());
        }
        for (name, size) in [("head_dim", head_dim), ("head_dim_v", head_dim_v)] {
            if !size.is_multiple_of(16) {
                return invalid(&format!("{name} a multiple of 16, as k and v are fp8"), size.to_string());
            }
        }
    }
    if !problem.scale().is_finite() {
        return invalid("a finite scale", problem.scale().to_string());
    }
    if let Some(page_size) = problem.page_size.filter(|size| !PAGE_SIZES.contains(size)) {
        return invalid("pages of 16, 32, 64, 128 or 256 keys", page_size.to_string());
    }
    if problem.window == Some(0) {
        return invalid("a window of at least 1 key", "0".into());
    }
    problem.scores.check()
}

impl Planned {
    /// Checks all arguments: the parameters of a launch.
    pub(super) fn check(&self, at: &Check<'_>, args: &AttentionArgs<'_>) -> Result<Checked, Error> {
        let AttentionArgs { q, k, v, kv_lens, kv_scales, offsets, out, lse, scores, page_table: _ } = args;
        let AttentionProblem { heads_q, heads_kv, head_dim, head_dim_v, dtype, dtype_kv, .. } = self.problem;
        let [q_batch_stride, q_token_stride, q_head_stride] =
            at.rows("q", *q, dtype, &[None, None, Some(heads_q), Some(head_dim)])?;
        let (outer_q, tokens_q) = (q.shape()[0], q.shape()[1]);
        let sequences = |argument, of: TensorView<'_>| {
            let [] = at.elements(argument, of, DType::U32, &[None])?;
            let expected = "the sequences' first tokens and the end";
            of.shape()[0].checked_sub(1).map_or_else(|| at.refuse(argument, expected, "no number"), Ok)
        };
        let (batch, seq_q) = match offsets.q {
            None => (outer_q, tokens_q),
            Some(of) if outer_q == 1 => (sequences("offsets.q", of)?, self.problem.seq_q),
            Some(_) => return at.refuse("q", "one row of packed sequences", outer_q.to_string()),
        };
        if let Some(of) = offsets.kv {
            let [] = at.elements("offsets.kv", of, DType::U32, &[Some(batch + 1)])?;
        }
        let cache = self.check_cache(at, args, batch)?;
        let Cache { seq_kv, k_strides: [k_batch_stride, k_token_stride, k_head_stride], .. } = cache;
        let [outer, tokens] = [k.shape()[0], k.shape()[1]];
        let [v_batch_stride, v_token_stride, v_head_stride] =
            at.rows("v", *v, dtype_kv, &[outer, tokens, heads_kv, head_dim_v].map(Some))?;
        let [out_batch_stride, out_token_stride, out_head_stride] =
            at.rows("out", out.as_view(), dtype, &[outer_q, tokens_q, heads_q, head_dim_v].map(Some))?;
        if let Some(kv_lens) = kv_lens {
            let [] = at.elements("kv_lens", *kv_lens, DType::U32, &[Some(batch)])?;
        }
        let lse_shape = [outer_q, heads_q, tokens_q].map(Some);
        let lse_strides = lse.as_ref().map(|lse| at.elements("lse", lse.as_view(), DType::F32, &lse_shape));
        let [lse_batch_stride, lse_head_stride] = lse_strides.transpose()?.unwrap_or_default();
        kv_scales.check(at, &self.problem)?;
        let scores = scores.check(at, &self.problem, [batch, seq_q, seq_kv])?;
        at.planned("q", "sequences", batch, self.problem.batch)?;
        at.planned("q", "queries", seq_q, self.problem.seq_q)?;
        at.planned("k", "keys", seq_kv, self.problem.seq_kv)?;
        // Packed sequences are told apart by their first rows.
        let of_sequence =
            |stride: u32, offsets: &Option<TensorView<'_>>| if offsets.is_some() { 0 } else { stride };
        let q_batch_stride = of_sequence(q_batch_stride, &offsets.q);
        let out_batch_stride = of_sequence(out_batch_stride, &offsets.q);
        let lse_batch_stride = of_sequence(lse_batch_stride, &offsets.q);
        let packed =
            |tokens: usize, offsets: &Option<TensorView<'_>>| if offsets.is_some() { tokens } else { 0 };
        Ok(Checked::new(AttentionDims {
            batch: batch as u32,
            seq_q: seq_q as u32,
            seq_kv: seq_kv as u32,
            sequences: batch as u32,
            tokens_q: at.size("q", "number of tokens", packed(tokens_q, &offsets.q))?,
            tokens_kv: at.size("k", "number of tokens", packed(tokens, &offsets.kv))?,
            heads_q: heads_q as u32,
            heads_kv: heads_kv as u32,
            group: (heads_q / heads_kv) as u32,
            head_dim: head_dim as u32,
            head_dim_v: head_dim_v as u32,
            causal: u32::from(self.problem.mask == Mask::Causal),
            window: self.problem.window.unwrap_or(seq_kv).min(seq_kv) as u32,
            vector: u32::from(at.is_aligned()),
            tiles: 0,
            splits: (seq_kv as u32).div_ceil(SPLIT_KEYS),
            section: section(&self.problem, seq_kv, batch * heads_kv),
            q_batch_stride,
            q_token_stride,
            q_head_stride,
            k_batch_stride,
            k_token_stride,
            k_head_stride,
            v_batch_stride,
            v_token_stride,
            v_head_stride,
            out_batch_stride,
            out_token_stride,
            out_head_stride,
            lse_batch_stride,
            lse_head_stride,
            scale: match self.problem.dtype {
                DType::F32 => self.problem.scale(),
                _ => self.problem.scale() * std::f32::consts::LOG2_E,
            },
            scores,
            page_log2: cache.page_log2,
            num_pages: cache.num_pages,
            table_stride: cache.table_stride,
            box_keys: 0,
            result_shift: 0,
            merge_parts: 0,
            grid: 0,
            key_parts_log2: 0,
        }))
    }

    /// Checks k, and what tells where a sequence's keys are.
    fn check_cache(&self, at: &Check<'_>, args: &AttentionArgs<'_>, batch: usize) -> Result<Cache, Error> {
        let AttentionArgs { k, kv_lens, offsets, page_table, .. } = args;
        let AttentionProblem { heads_kv, head_dim, dtype_kv, page_size, .. } = self.problem;
        let rows = |outer, tokens| [outer, tokens, Some(heads_kv), Some(head_dim)];
        let (page_size, table) = match (page_size, page_table) {
            (None, None) if offsets.kv.is_some() => {
                if self.problem.is_fp8() {
                    return at.refuse("offsets.kv", "none, as k and v are fp8", "a tensor");
                }
                let k_strides = at.rows("k", *k, dtype_kv, &rows(Some(1), None))?;
                if kv_lens.is_some() {
                    return at.refuse("kv_lens", "none, as keys are packed", "a tensor");
                }
                let seq_kv = if k.shape()[1] == 0 { 0 } else { self.problem.seq_kv };
                return Ok(Cache { seq_kv, k_strides, page_log2: 31, num_pages: 1, table_stride: 0 });
            }
            _ if offsets.kv.is_some() => {
                return at.refuse("offsets.kv", "none, as there are pages", "a tensor");
            }
            (None, None) => {
                let k_strides = at.rows("k", *k, dtype_kv, &rows(Some(batch), None))?;
                let seq_kv = k.shape()[1];
                return Ok(Cache { seq_kv, k_strides, page_log2: 31, num_pages: 1, table_stride: 0 });
            }
            (Some(_), None) => return at.refuse("page_table", "a table, as planned", "none"),
            (None, Some(_)) => {
                return at.refuse("page_table", "none, as planned without pages", "a table");
            }
            (Some(page_size), Some(table)) => (page_size, table),
        };
        let k_strides = at.rows("k", *k, dtype_kv, &rows(None, Some(page_size)))?;
        let [table_stride] = at.elements("page_table", *table, DType::U32, &[Some(batch), None])?;
        if kv_lens.is_none() {
            return at.refuse("kv_lens", "the sequences' lengths, as there are pages", "none");
        }
        let (num_pages, most) = (k.shape()[0], self.problem.seq_kv.div_ceil(page_size));
        if table.shape()[1] > most {
            let expected = format!("at most {most} pages of a sequence, as planned");
            return at.refuse("page_table", expected, table.shape()[1].to_string());
        }
        at.size("page_table", "number of elements", batch.saturating_mul(table_stride as usize))?;
        // Of a pool without pages there is nothing to see.
        let room = if num_pages == 0 { 0 } else { table.shape()[1] * page_size };
        Ok(Cache {
            seq_kv: room.min(self.problem.seq_kv),
            k_strides,
            page_log2: page_size.ilog2(),
            num_pages: at.size("k", "number of pages", num_pages)?.max(1),
            table_stride,
        })
    }
}

/// Whether v is the first columns of k's rows.
pub(super) fn in_keys(args: &AttentionArgs<'_>) -> bool {
    let AttentionArgs { k, v, .. } = args;
    let mut axes = std::iter::zip(k.shape(), std::iter::zip(k.strides(), v.strides()));
    // The stride of one thing that is alone may be anything.
    k.address() == v.address() && axes.all(|(&size, (of_k, of_v))| size <= 1 || of_k == of_v)
}

/// An error where a tensor's rows are not aligned to 16 bytes, as no kernel takes fp8 then.
pub(super) fn expect_aligned(args: &AttentionArgs<'_>) -> Result<(), Error> {
    let AttentionArgs { q, k, v, out, .. } = args;
    for (argument, view) in [("q", q), ("k", k), ("v", v), ("out", &out.as_view())] {
        if !view.is_aligned_16() {
            let expected = "rows aligned to 16 bytes, as k and v are fp8";
            let got = format!("strides {:?} at {:#x}", view.strides(), view.address());
            return Err(Error::invalid(OP, argument, expected, got));
        }
    }
    Ok(())
}

/// Whether a tensor has a row in several places, as after a broadcast, of which tensor maps know nothing.
pub(super) fn repeats(view: &TensorView<'_>) -> bool {
    (0..3).any(|axis| view.shape()[axis] > 1 && view.strides()[axis] == 0)
}
