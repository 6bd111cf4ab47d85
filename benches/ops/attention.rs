//! Attention at the shapes of its cases.

use serde_json::json;
use warpforge::ops::attention::reference::{self, Sequence};
use warpforge::ops::attention::{Attention, AttentionArgs, AttentionCase, AttentionProblem, CASES, Mask};
use warpforge::{DType, Error, Stream, Tensor, TensorView};

use crate::harness::{Bencher, Failure, Work, expect_close};

const DTYPE: DType = DType::BF16;

struct Set {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("attention", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &AttentionCase) -> Result<(), Failure> {
    let &AttentionCase { batch, seq_q, seq_kv, heads_q, heads_kv, head_dim, mask, .. } = case;
    let problem = AttentionProblem {
        batch,
        seq_q,
        seq_kv,
        heads_q,
        heads_kv,
        head_dim,
        dtype: DTYPE,
        scale: None,
        mask,
        window: None,
    };
    let plan = Attention::plan(&bencher.device, problem)?;
    let report = plan.report();
    let mask_name = match mask {
        Mask::None => "none",
        Mask::Causal => "causal",
    };
    let shape = json!({
        "batch": batch, "seq_q": seq_q, "seq_kv": seq_kv, "heads_q": heads_q, "heads_kv": heads_kv,
        "head_dim": head_dim, "mask": mask_name,
    });
    let (bytes, flops) = (report.bytes, report.flops);
    if !bencher.starts(Work { dtype: DTYPE.name(), shape, bytes, flops })? {
        return Ok(());
    }
    let q_shape = [batch, seq_q, heads_q, head_dim];
    let kv_shape = [batch, seq_kv, heads_kv, head_dim];
    let mut sets = bencher.sets(|bencher, seed| {
        Ok(Set {
            q: bencher.random(&q_shape, DTYPE, seed)?,
            k: bencher.random(&kv_shape, DTYPE, 1000 + seed)?,
            v: bencher.random(&kv_shape, DTYPE, 2000 + seed)?,
            out: Tensor::empty(&bencher.stream, &q_shape, DTYPE)?,
        })
    })?;
    let run = |stream: &Stream, set: &mut Set| {
        let (q, k, v) = (set.q.view(), set.k.view(), set.v.view());
        plan.run(stream, AttentionArgs { q, k, v, kv_lens: None, out: set.out.view_mut(), lse: None })
    };
    // The first head of the first sequence's last query, which sees every key.
    let verify = |stream: &Stream, set: &Set| {
        let row = |tensor: &Tensor| {
            let row = tensor.view().slice(0, 0..1)?.slice(1, seq_q - 1..seq_q)?.slice(2, 0..1)?;
            to_f64(stream, row)
        };
        let column = |tensor: &Tensor| -> Result<Vec<f64>, Error> {
            let all = to_f64(stream, tensor.view().slice(0, 0..1)?)?;
            Ok(all.chunks(heads_kv * head_dim).flat_map(|row| &row[..head_dim]).copied().collect())
        };
        let sequence = Sequence {
            seq_q: 1,
            len: seq_kv,
            heads_q: 1,
            heads_kv: 1,
            head_dim,
            scale: f64::from(problem.scale()),
            mask: Mask::None,
            window: None,
        };
        let (q, k, v) = (row(&set.q)?, column(&set.k)?, column(&set.v)?);
        let (want, _) = reference::attention::<f64>(&sequence, &q, &k, &v, |value| value);
        expect_close(DTYPE, &row(&set.out)?, &want)
    };
    bencher.time(&report, &mut sets, run, verify)
}

fn to_f64(stream: &Stream, view: TensorView<'_>) -> Result<Vec<f64>, Error> {
    Ok(view.to_vec::<half::bf16>(stream)?.into_iter().map(f64::from).collect())
}
