//! Attention at the shapes of its cases.

use warpforge::ops::attention::reference::{self, Sequence};
use warpforge::ops::attention::{Attention, AttentionArgs, AttentionProblem, CASES, Mask};
use warpforge::{DType, Stream, Tensor, TensorView};

use crate::harness::{Bencher, Case, expect_close};

struct Set {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) -> Result<(), Box<dyn std::error::Error>> {
    const DTYPE: DType = DType::BF16;
    for case in CASES {
        let name = format!("attention {}", case.name);
        if !bencher.wants(&name) {
            continue;
        }
        let (seq_q, seq_kv, head_dim) = (case.seq_q, case.seq_kv, case.head_dim);
        let problem = AttentionProblem {
            batch: case.batch,
            seq_q,
            seq_kv,
            heads_q: case.heads_q,
            heads_kv: case.heads_kv,
            head_dim,
            dtype: DTYPE,
            scale: None,
            mask: case.mask,
            window: None,
        };
        let plan = Attention::plan(&bencher.device, problem)?;
        let report = plan.report();
        let (bytes, flops) = (report.bytes, report.flops);
        let q_shape = [case.batch, seq_q, case.heads_q, head_dim];
        let kv_shape = [case.batch, seq_kv, case.heads_kv, head_dim];
        let mut sets = bencher.sets(bytes, |seed| {
            let tensor = |shape: &[usize], seed| bencher.random(shape, DTYPE, seed);
            let (q, k, v) =
                (tensor(&q_shape, seed)?, tensor(&kv_shape, 1000 + seed)?, tensor(&kv_shape, 2000 + seed)?);
            Ok(Set { q, k, v, out: Tensor::empty(&bencher.stream, &q_shape, DTYPE)? })
        })?;
        // Checked: the first head of the first sequence's last query, which sees every key.
        let row = |stream: &Stream, tensor: &Tensor| {
            let row = tensor.view().slice(0, 0..1)?.slice(1, seq_q - 1..seq_q)?.slice(2, 0..1)?;
            to_f64(stream, row)
        };
        let column = |tensor: &Tensor| -> Result<Vec<f64>, warpforge::Error> {
            let all = to_f64(&bencher.stream, tensor.view().slice(0, 0..1)?)?;
            Ok(all.chunks(case.heads_kv * head_dim).flat_map(|row| &row[..head_dim]).copied().collect())
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
        let (q, k, v) = (row(&bencher.stream, &sets[0].q)?, column(&sets[0].k)?, column(&sets[0].v)?);
        let (want, _) = reference::attention::<f64>(&sequence, &q, &k, &v, |value| value);
        let run = |stream: &Stream, set: &mut Set| {
            let (q, k, v) = (set.q.view(), set.k.view(), set.v.view());
            plan.run(stream, AttentionArgs { q, k, v, kv_lens: None, out: set.out.view_mut(), lse: None })
        };
        let verify = |stream: &Stream, set: &Set| expect_close(DTYPE, &row(stream, &set.out)?, &want);
        bencher.bench(Case { name, report, bytes, flops }, &mut sets, run, verify)?;
    }
    Ok(())
}

fn to_f64(stream: &Stream, view: TensorView<'_>) -> Result<Vec<f64>, warpforge::Error> {
    Ok(view.to_vec::<half::bf16>(stream)?.into_iter().map(f64::from).collect())
}
