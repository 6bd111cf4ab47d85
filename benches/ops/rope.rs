//! Rotary embedding at the shapes of its cases, from one tensor to another; positions in order.

use warpforge::ops::rope::{CASES, Rope, RopeArgs, RopeInput, RopeProblem, RopeTables, reference};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Case, expect_close, first_row};

pub fn bench(bencher: &mut Bencher) -> Result<(), Box<dyn std::error::Error>> {
    const DTYPE: DType = DType::BF16;
    for case in CASES {
        let name = format!("rope {}", case.name);
        if !bencher.wants(&name) {
            continue;
        }
        let (tokens, heads, head_dim, rotary_dim) = (case.tokens, case.heads, case.head_dim, case.rotary_dim);
        let style = case.style;
        let problem = RopeProblem { tokens, heads, head_dim, rotary_dim, style, dtype: DTYPE };
        let plan = Rope::plan(&bencher.device, problem)?;
        // The first token's position is not 0, where nothing is rotated.
        const FIRST: u32 = 5;
        let inv_freq: Vec<f64> =
            (0..rotary_dim / 2).map(|i| 1e6f64.powf(-2.0 * i as f64 / rotary_dim as f64)).collect();
        let max_position = tokens + FIRST as usize;
        let tables = RopeTables::new(&bencher.stream, &inv_freq, 1.0, max_position)?;
        let positions: Vec<u32> = (FIRST..).take(tokens).collect();
        let positions = Tensor::from_slice(&bencher.stream, &[tokens], &positions)?;
        let elements = tokens * heads * head_dim;
        // Positions and angles are read once, too.
        let bytes = (2 * elements * DTYPE.bytes() + 4 * tokens * (rotary_dim + 1)) as u64;
        let shape = [tokens, heads, head_dim];
        let mut sets = bencher.sets(bytes, |seed| {
            Ok((bencher.random(&shape, DTYPE, seed)?, Tensor::empty(&bencher.stream, &shape, DTYPE)?))
        })?;
        let x = first_row(&sets[0].0, &bencher.stream)?;
        let (cos, sin) = reference::tables(&inv_freq, 1.0, max_position);
        // Of the first token, the first head.
        let head = reference::RopeShape { heads: 1, head_dim, rotary_dim, style };
        let (want, _) = reference::rope::<f64>(&x, &[FIRST], (&cos, &sin), head, |v| v);
        let run = |stream: &Stream, (x, out): &mut (Tensor, Tensor)| {
            let x = RopeInput::From(x.view());
            plan.run(
                stream,
                RopeArgs { x, positions: positions.view(), tables: &tables, out: out.view_mut() },
            )
        };
        let verify = |stream: &Stream, (_, out): &(Tensor, Tensor)| {
            expect_close(DTYPE, &first_row(out, stream)?, &want)
        };
        let case =
            Case { name, report: plan.report(), bytes, flops: (3 * tokens * heads * rotary_dim) as u64 };
        bencher.bench(case, &mut sets, run, verify)?;
    }
    Ok(())
}
