//! The causal convolution at the shapes of its cases.

use serde_json::json;
use warpforge::ops::causal_conv1d::{
    CASES, CausalConv1d, CausalConv1dArgs, CausalConv1dCase, CausalConv1dProblem, reference,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

const DTYPE: DType = DType::BF16;

struct Set {
    x: Tensor,
    state: Tensor,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("causal_conv1d", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &CausalConv1dCase) -> Result<(), Failure> {
    let &CausalConv1dCase { tokens: len, sequences, channels, width, .. } = case;
    let tokens = len * sequences;
    let problem = CausalConv1dProblem { tokens, sequences, channels, width, dtype: DTYPE };
    let plan = CausalConv1d::plan(&bencher.device, problem)?;
    let report = plan.report();
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({ "tokens": len, "sequences": sequences, "channels": channels, "width": width }),
        bytes: report.bytes,
        flops: report.flops,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let weight = bencher.random(&[channels, width], DTYPE, 1)?;
    let offsets: Vec<u32> = (0..=sequences).map(|sequence| (sequence * len) as u32).collect();
    let offsets = Tensor::from_slice(&bencher.stream, &[sequences + 1], &offsets)?;
    let slots: Vec<u32> = (0..sequences as u32).collect();
    let slots = Tensor::from_slice(&bencher.stream, &[sequences], &slots)?;
    let mut sets = bencher.sets(|bencher, seed| {
        Ok(Set {
            x: bencher.random(&[tokens, channels], DTYPE, seed)?,
            state: bencher.random(&[sequences, channels, width - 1], DTYPE, 1000 + seed)?,
            out: Tensor::empty(&bencher.stream, &[tokens, channels], DTYPE)?,
        })
    })?;
    // The first token of the first sequence, before a run changes the state.
    let mut state: Vec<f64> = sets[0]
        .state
        .to_f32_vec(&bencher.stream)?
        .into_iter()
        .map(f64::from)
        .take(channels * (width - 1))
        .collect();
    let taps: Vec<f64> = weight.to_f32_vec(&bencher.stream)?.into_iter().map(f64::from).collect();
    let x = first_row(&sets[0].x, &bencher.stream)?;
    let (want, _) = reference::causal_conv1d::<f64>(&x, &taps, None, &mut state, channels, |v| v);
    let run = |stream: &Stream, set: &mut Set| {
        let args = CausalConv1dArgs {
            x: set.x.view(),
            weight: weight.view(),
            bias: None,
            offsets: offsets.view(),
            slots: slots.view(),
            state: set.state.view_mut(),
            out: set.out.view_mut(),
        };
        plan.run(stream, args)
    };
    let verify = |stream: &Stream, set: &Set| expect_close(DTYPE, &first_row(&set.out, stream)?, &want);
    bencher.time(&report, &mut sets, run, verify)
}
