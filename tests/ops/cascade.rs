//! Attention behind a prefix that all sequences share: that over the prefix and each sequence's own keys behind it.

use proptest::prelude::*;
use proptest::sample::select;
use testkit::strategies::{Rng, Values};
use warpforge::ops::attention::reference::{Options, Sequence, attention, magnitudes};
use warpforge::ops::attention::{
    Attention, AttentionArgs, AttentionProblem, CascadeArgs, CascadeAttention, CascadeProblem, Mask, Offsets,
    Prefix, ScoreBias, ScoreTensors, Scores, VARIANTS, select as choose,
};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{Layout, Rows, devices, fail, floats, on_executors, values};

const PAGE: usize = 16;

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    /// Keys of the prefix, and room beside them.
    prefix: (usize, usize),
    /// Queries of each sequence, and its keys besides as many.
    lens: Vec<(usize, usize)>,
    heads: (usize, usize),
    head_dims: (usize, usize),
    mask: Mask,
    soft_cap: Option<f32>,
    paged: bool,
    /// Whether a mask of one's own says which of its own keys a query sees: of one sequence.
    tree: bool,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let lens = prop_oneof![
        2 => prop::collection::vec((1usize..4, 0usize..40), 1..6),
        1 => prop::collection::vec((1usize..60, 0usize..40), 1..4),
    ];
    let sizes = (floats(), (prop_oneof![1 => 0usize..40, 1 => 40usize..300], 0usize..20), lens);
    let shapes = (select(vec![(1, 1), (4, 2), (6, 2)]), select(vec![(64, 64), (128, 128), (40, 32)]));
    let options = (
        select(vec![Mask::Causal, Mask::None]),
        prop_oneof![3 => Just(None), 1 => Just(Some(2.0))],
        any::<bool>(),
        prop_oneof![2 => Just(false), 1 => Just(true)],
        any::<u64>(),
    );
    (sizes, shapes, options).prop_map(
        |((dtype, prefix, mut lens), (heads, head_dims), (mask, soft_cap, paged, tree, seed))| {
            if tree {
                lens.truncate(1);
                lens[0].1 = 0;
            }
            let mask = if tree { Mask::None } else { mask };
            Case { dtype, prefix, lens, heads, head_dims, mask, soft_cap, paged, tree, seed }
        },
    )
}

impl Case {
    fn tokens(&self) -> usize {
        self.lens.iter().map(|len| len.0).sum()
    }

    /// Most queries, and most of its own keys, of a sequence.
    fn most(&self) -> (usize, usize) {
        let most = |of: fn(&(usize, usize)) -> usize| self.lens.iter().map(of).max().unwrap_or(0);
        (most(|len| len.0), most(|len| len.0 + len.1))
    }

    fn work(&self) -> usize {
        let keys = self.prefix.0 + self.prefix.1 + self.most().1 + 128;
        2 * (self.tokens().next_multiple_of(64) + 64 * self.lens.len())
            * keys
            * self.heads.0
            * (16 + (self.head_dims.0 + self.head_dims.1) / 4)
    }

    fn rows(&self, count: usize, width: usize, seed: u64) -> Vec<f64> {
        values(Values::Normal, self.dtype, count * width, self.seed ^ seed)
    }

    /// Which drafts a draft of a tree sees: itself, the one that it follows, and what that sees.
    fn sees(&self) -> Vec<Vec<bool>> {
        let (drafts, mut rng) = (self.tokens(), Rng::new(self.seed ^ 9));
        let mut sees: Vec<Vec<bool>> = Vec::new();
        for draft in 0..drafts {
            let mut own = match draft {
                0 => vec![false; drafts],
                _ => sees[rng.below(draft)].clone(),
            };
            own[draft] = true;
            sees.push(own);
        }
        sees
    }
}

/// Rows of keys in pages, from the last page to the first, or as they are; what nobody has is NaN.
fn placed(rows: &[f64], keys: usize, room: usize, row: usize, paged: bool) -> Vec<f64> {
    let pages = room.div_ceil(PAGE);
    let mut all = vec![f64::NAN; if paged { pages * PAGE } else { room } * row];
    for key in 0..keys {
        let place = if paged { (pages - 1 - key / PAGE) * PAGE + key % PAGE } else { key };
        all[place * row..][..row].copy_from_slice(&rows[key * row..][..row]);
    }
    all
}

fn run(device: &Device, case: &Case) -> Result<(), TestCaseError> {
    let Case { dtype, ref lens, heads: (heads, heads_kv), head_dims: (dim, dim_v), paged, .. } = *case;
    let (prefix, room) = (case.prefix.0, case.prefix.0 + case.prefix.1);
    let (tokens, batch, (seq_q, seq_kv)) = (case.tokens(), lens.len(), case.most());
    let stream = device.stream().map_err(fail)?;
    let bias = if case.tree { ScoreBias::Boolean } else { ScoreBias::None };
    let own = AttentionProblem {
        head_dim_v: dim_v,
        mask: case.mask,
        scores: Scores { soft_cap: case.soft_cap, bias, ..Scores::PLAIN },
        page_size: paged.then_some(PAGE),
        ..AttentionProblem::new(batch, [seq_q, seq_kv], [heads, heads_kv], dim, dtype)
    };
    // A run may have fewer tokens than planned.
    let problem = CascadeProblem { prefix: room, tokens: tokens + case.seed as usize % 3, own };
    let plan = CascadeAttention::plan(device, problem).map_err(fail)?;

    let q = case.rows(tokens * heads, dim, 1);
    let (prefix_k, prefix_v) = (case.rows(prefix * heads_kv, dim, 2), case.rows(prefix * heads_kv, dim_v, 3));
    let of_sequence = |s: usize, width: usize, seed: u64| {
        case.rows((lens[s].0 + lens[s].1) * heads_kv, width, seed + 16 * s as u64)
    };
    let upload = |values: &[f64], width: usize| {
        Rows::input(&stream, dtype, values, width, Layout::default()).map_err(fail)
    };
    let of_prefix =
        |rows: &[f64], width: usize| upload(&placed(rows, prefix, room, heads_kv * width, paged), width);
    let of_own = |width: usize, seed: u64| {
        let all = (0..batch).flat_map(|s| {
            let keys = lens[s].0 + lens[s].1;
            placed(&of_sequence(s, width, seed), keys, seq_kv, heads_kv * width, paged)
        });
        upload(&all.collect::<Vec<f64>>(), width)
    };
    let (q_rows, pk, pv) = (upload(&q, dim)?, of_prefix(&prefix_k, dim)?, of_prefix(&prefix_v, dim_v)?);
    let (ok, ov) = (of_own(dim, 4)?, of_own(dim_v, 5)?);
    let table = |sequences: usize, room: usize| {
        let pages = room.div_ceil(PAGE) as u32;
        let numbers: Vec<u32> =
            (0..sequences as u32).flat_map(|s| (0..pages).rev().map(move |page| s * pages + page)).collect();
        Tensor::from_slice(&stream, &[sequences, pages as usize], &numbers).map_err(fail)
    };
    let (prefix_table, own_table) = (table(1, room)?, table(batch, seq_kv)?);
    let words = |words: &[u32]| Tensor::from_slice(&stream, &[words.len()], words).map_err(fail);
    let mut end = 0;
    let ends = lens.iter().map(|len| {
        end += len.0 as u32;
        end
    });
    let offsets = words(&[0].into_iter().chain(ends).collect::<Vec<u32>>())?;
    let own_lens = words(&lens.iter().map(|len| (len.0 + len.1) as u32).collect::<Vec<u32>>())?;
    let prefix_len = words(&[prefix as u32])?;
    let sees = case.sees();
    let visible: Vec<i8> = sees.iter().flatten().map(|&sees| i8::from(sees)).collect();
    let visible = match case.tree {
        true => Some(Tensor::from_slice(&stream, &[1, 1, tokens, tokens], &visible).map_err(fail)?),
        false => None,
    };
    let mut out = Rows::output(&stream, dtype, tokens * heads, dim_v, Layout::default()).map_err(fail)?;
    let mut lse = Rows::output(&stream, DType::F32, heads, tokens, Layout::default()).map_err(fail)?;
    let shape = |sequences: usize, room: usize, width: usize| match paged {
        true => [sequences * room.div_ceil(PAGE), PAGE, heads_kv, width],
        false => [sequences, room, heads_kv, width],
    };
    let args = AttentionArgs {
        kv_lens: Some(own_lens.view()),
        offsets: Offsets { q: Some(offsets.view()), ..Offsets::default() },
        lse: Some(lse.view_mut().reshape(&[1, heads, tokens]).map_err(fail)?),
        scores: ScoreTensors { bias: visible.as_ref().map(Tensor::view), ..ScoreTensors::default() },
        page_table: paged.then(|| own_table.view()),
        ..AttentionArgs::new(
            q_rows.view().reshape(&[1, tokens, heads, dim]).map_err(fail)?,
            ok.view().reshape(&shape(batch, seq_kv, dim)).map_err(fail)?,
            ov.view().reshape(&shape(batch, seq_kv, dim_v)).map_err(fail)?,
            out.view_mut().reshape(&[1, tokens, heads, dim_v]).map_err(fail)?,
        )
    };
    let prefix_args = Prefix {
        k: pk.view().reshape(&shape(1, room, dim)).map_err(fail)?,
        v: pv.view().reshape(&shape(1, room, dim_v)).map_err(fail)?,
        len: Some(prefix_len.view()),
        page_table: paged.then(|| prefix_table.view()),
    };
    plan.run(&stream, CascadeArgs { own: args, prefix: prefix_args }).map_err(fail)?;
    let (got, got_lse) = (out.read(&stream)?, lse.read(&stream)?);

    let mut first = 0;
    for (s, &(queries, besides)) in lens.iter().enumerate() {
        let keys = queries + besides;
        // A tree's mask, beside which all of the prefix is seen.
        let bias: Option<Vec<f64>> = case.tree.then(|| {
            let row = |own: &Vec<bool>| -> Vec<f64> {
                let own = own.iter().map(|&sees| if sees { 0.0 } else { f64::NEG_INFINITY });
                std::iter::repeat_n(0.0, prefix).chain(own).collect()
            };
            let one: Vec<f64> = sees.iter().flat_map(row).collect();
            one.repeat(heads)
        });
        let options =
            Options { soft_cap: case.soft_cap.map(f64::from), bias: bias.as_deref(), ..Options::default() };
        let sequence = Sequence {
            seq_q: queries,
            len: prefix + keys,
            heads_q: heads,
            heads_kv,
            head_dim: dim,
            head_dim_v: dim_v,
            scale: f64::from(own.scale()),
            mask: case.mask,
            window: None,
            options,
        };
        let whole = |before: &[f64], width: usize, seed: u64| [before, &of_sequence(s, width, seed)].concat();
        let (k, v) = (whole(&prefix_k, dim, 4), whole(&prefix_v, dim_v, 5));
        let q = &q[first * heads * dim..][..queries * heads * dim];
        let (want, want_lse) = attention::<f64>(&sequence, q, &k, &v, |value| value);
        let (sizes, lse_sizes) = magnitudes(&sequence, q, &k, &v);
        // The weights and both parts are rounded to the type; sums are of f32.
        let epsilon = match dtype {
            DType::BF16 => 2f64.powi(-8),
            DType::F16 => 2f64.powi(-11),
            _ => 2f64.powi(-19),
        };
        for (i, (want, size)) in want.iter().zip(&sizes).enumerate() {
            let got = got[first * heads * dim_v + i];
            let allowed = 4.0 * epsilon * (size + want.abs()) + 1e-6;
            prop_assert!((got - want).abs() <= allowed, "{s}, {i}: {got}, expected {want} ± {allowed:e}");
        }
        for head in 0..heads {
            for query in 0..queries {
                let at = head * queries + query;
                let got = got_lse[head * tokens + first + query];
                // Of 16-bit q and k their products are exact, and scores f32.
                let allowed = 1e-4 * (1.0 + lse_sizes[at]);
                let want = want_lse[at];
                prop_assert!((got - want).abs() <= allowed, "lse of {s}, {head}, {query}: {got}, {want}");
            }
        }
        first += queries;
    }
    Ok(())
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(64))]

    #[test]
    fn cascades((case, on) in on_executors(case, Case::work)) {
        for device in &on.devices() {
            run(device, &case)?;
        }
    }
}

/// What does not fit is an error that says so.
#[test]
fn cascade_mistakes() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let own = AttentionProblem::new(2, [1, 8], [2, 1], 64, DType::F32);
        let problem = CascadeProblem { prefix: 4, tokens: 2, own };
        let windowed = AttentionProblem { window: Some(3), ..own };
        let error = CascadeAttention::plan(device, CascadeProblem { own: windowed, ..problem }).unwrap_err();
        assert!(error.to_string().starts_with("cascade_attention: problem: expected no window"), "{error}");
        let plan = CascadeAttention::plan(device, problem)?;
        let zeros = |shape: &[usize]| Tensor::zeros(&stream, shape, DType::F32);
        let (k, prefix) = (zeros(&[2, 8, 1, 64])?, zeros(&[1, 4, 1, 64])?);
        let offsets = Tensor::from_slice(&stream, &[3], &[0u32, 1, 2])?;
        let message = |q: &[usize], out: &[usize], is_packed: bool| -> Result<String, Error> {
            let (q, mut out) = (zeros(q)?, zeros(out)?);
            let own = AttentionArgs {
                offsets: Offsets { q: is_packed.then(|| offsets.view()), ..Offsets::default() },
                ..AttentionArgs::new(q.view(), k.view(), k.view(), out.view_mut())
            };
            let prefix = Prefix { k: prefix.view(), v: prefix.view(), len: None, page_table: None };
            Ok(plan.run(&stream, CascadeArgs { own, prefix }).unwrap_err().to_string())
        };
        for (q, out, is_packed, expected) in [
            ([2, 1, 2, 64], [1, 2, 2, 64], true, "cascade_attention: q: expected packed queries"),
            ([1, 2, 2, 64], [1, 2, 2, 64], false, "cascade_attention: offsets.q: expected where"),
            ([1, 3, 2, 64], [1, 3, 2, 64], true, "cascade_attention: q: expected at most 2 tokens"),
            ([1, 2, 2, 64], [1, 2, 2, 32], true, "cascade_attention: out: expected shape [1, 2, 2, 64]"),
            ([1, 2, 2, 32], [1, 2, 2, 64], true, "attention: q: expected"),
        ] {
            let message = message(&q, &out, is_packed)?;
            assert!(message.starts_with(expected), "{message}");
        }
    }
    Ok(())
}

/// The attention over the own keys is one by itself, with the bits of another of the same problem; by a kernel that was
/// asked for, if it can do it.
#[test]
fn own_keys_alone() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let own = AttentionProblem {
            mask: Mask::Causal,
            ..AttentionProblem::new(2, [1, 24], [2, 1], 64, DType::F32)
        };
        let problem = CascadeProblem::new(16, 2, own);
        let mut rng = Rng::new(5);
        let mut normal = |shape: &[usize]| {
            let len = shape.iter().product();
            let values: Vec<f32> = (0..len).map(|_| rng.below(2001) as f32 / 1000.0 - 1.0).collect();
            Tensor::from_slice(&stream, shape, &values)
        };
        let (q, k, v) = (normal(&[2, 1, 2, 64])?, normal(&[2, 24, 1, 64])?, normal(&[2, 24, 1, 64])?);
        let run = |attention: &Attention| {
            let mut out = Tensor::zeros(&stream, &[2, 1, 2, 64], DType::F32)?;
            attention.run(&stream, AttentionArgs::new(q.view(), k.view(), v.view(), out.view_mut()))?;
            out.to_vec::<f32>(&stream)
        };
        let want = run(&Attention::plan(device, own)?)?;
        assert_eq!(run(CascadeAttention::plan(device, problem)?.own())?, want);
        let Some(limits) = device.limits() else { continue };
        let variant = choose(&limits, &own, 1)?.variant;
        assert_eq!(run(CascadeAttention::plan_with(device, problem, variant)?.own())?, want);
        let other = VARIANTS.iter().find(|variant| variant.dtype == DType::BF16).expect("one of them");
        let error = CascadeAttention::plan_with(device, problem, other).unwrap_err().to_string();
        assert!(error.starts_with("attention: variant: expected bf16"), "{error}");
    }
    Ok(())
}
