//! Rows into places that are named by number, at the shapes of their cases.

use serde_json::json;
use warpforge::ops::Store;
use warpforge::ops::scatter_rows::{
    CASES, ScatterRows, ScatterRowsArgs, ScatterRowsCase, ScatterRowsProblem,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row};

const DTYPE: DType = DType::BF16;

struct Set {
    x: Tensor,
    out: Tensor,
    /// What the row of out that the first row of x goes to must be.
    want: Vec<f64>,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("scatter_rows", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &ScatterRowsCase) -> Result<(), Failure> {
    let &ScatterRowsCase { rows, num_rows, cols, store, .. } = case;
    let problem = ScatterRowsProblem { rows, cols, dtype: DTYPE, store };
    let plan = ScatterRows::plan(&bencher.device, problem)?;
    let (passes, name, flops) = match store {
        Store::Replace => (2, "replace", 0),
        Store::Add => (3, "add", rows * cols),
    };
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({ "rows": rows, "num_rows": num_rows, "cols": cols, "store": name }),
        bytes: (passes * rows * cols * DTYPE.bytes() + 4 * rows) as u64,
        flops: flops as u64,
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    // Backwards from the last row, so that the numbers matter.
    let ids: Vec<u32> = (0..rows).map(|row| (num_rows - 1 - row) as u32).collect();
    let ids = Tensor::from_slice(&bencher.stream, &[rows], &ids)?;
    let last_row = |out: &Tensor, stream: &Stream| -> Result<Vec<f64>, Failure> {
        let row = out.view().slice(0, num_rows - 1..num_rows)?.to_vec::<half::bf16>(stream)?;
        Ok(row.into_iter().map(f64::from).collect())
    };
    let mut sets = bencher.sets(|bencher, seed| {
        let x = bencher.random(&[rows, cols], DTYPE, seed)?;
        let out = bencher.random(&[num_rows, cols], DTYPE, 1000 + seed)?;
        let mut want = first_row(&x, &bencher.stream)?;
        if store == Store::Add {
            let before =
                out.view().slice(0, num_rows - 1..num_rows)?.to_vec::<half::bf16>(&bencher.stream)?;
            want.iter_mut().zip(before).for_each(|(want, before)| *want += f64::from(before));
        }
        Ok(Set { x, out, want })
    })?;
    let run = |stream: &Stream, set: &mut Set| {
        plan.run(stream, ScatterRowsArgs { x: set.x.view(), ids: ids.view(), out: set.out.view_mut() })
    };
    let verify = |stream: &Stream, set: &Set| expect_close(DTYPE, &last_row(&set.out, stream)?, &set.want);
    bencher.time(&plan.report(), &mut sets, run, verify)
}
