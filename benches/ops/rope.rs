//! Rotary embedding at the shapes of its cases, from one tensor to another; positions in order.

use serde_json::json;
use warpforge::ops::rope::{
    CASES, Rope, RopeArgs, RopeCase, RopeInput, RopeProblem, RopeStyle, RopeTables, reference,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

const DTYPE: DType = DType::BF16;
/// The first token's position; not 0, where nothing is rotated.
const FIRST: u32 = 5;

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("rope", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &RopeCase) -> Result<(), Failure> {
    let &RopeCase { tokens, heads, head_dim, rotary_dim, style, .. } = case;
    let problem = RopeProblem { tokens, heads, head_dim, rotary_dim, style, dtype: DTYPE };
    let plan = Rope::plan(&bencher.device, problem)?;
    let style_name = match style {
        RopeStyle::HalfSplit => "half_split",
        RopeStyle::Interleaved => "interleaved",
    };
    let elements = tokens * heads * head_dim;
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({
            "tokens": tokens, "heads": heads, "head_dim": head_dim, "rotary_dim": rotary_dim,
            "style": style_name,
        }),
        // Positions and angles are read once, too.
        bytes: (2 * elements * DTYPE.bytes() + 4 * tokens * (rotary_dim + 1)) as u64,
        flops: (3 * tokens * heads * rotary_dim) as u64,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let inv_freq: Vec<f64> =
        (0..rotary_dim / 2).map(|i| 1e6f64.powf(-2.0 * i as f64 / rotary_dim as f64)).collect();
    let max_position = tokens + FIRST as usize;
    let tables = RopeTables::new(&bencher.stream, &inv_freq, 1.0, max_position)?;
    let positions: Vec<u32> = (FIRST..).take(tokens).collect();
    let positions = Tensor::from_slice(&bencher.stream, &[tokens], &positions)?;
    let shape = [tokens, heads, head_dim];
    let mut sets = bencher.sets(|bencher, seed| {
        Ok((bencher.random(&shape, DTYPE, seed)?, Tensor::empty(&bencher.stream, &shape, DTYPE)?))
    })?;
    let run = |stream: &Stream, (x, out): &mut (Tensor, Tensor)| {
        let (x, out) = (RopeInput::From(x.view()), out.view_mut());
        plan.run(stream, RopeArgs { x, positions: positions.view(), tables: &tables, out })
    };
    // Of the first token, the first head.
    let verify = |stream: &Stream, (x, out): &(Tensor, Tensor)| {
        let (cos, sin) = reference::tables(&inv_freq, 1.0, max_position);
        let head = reference::RopeShape { heads: 1, head_dim, rotary_dim, style };
        let x = first_row(x, stream)?;
        let (want, _) = reference::rope::<f64>(&x, &[FIRST], (&cos, &sin), head, |v| v);
        expect_close(DTYPE, &first_row(out, stream)?, &want)
    };
    bencher.time(&plan.report(), &mut sets, run, verify)
}
