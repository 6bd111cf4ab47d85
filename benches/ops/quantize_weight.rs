//! Plain matrices as quantised weights, at the shapes of their cases.

use serde_json::json;
use warpforge::ops::quantize_weight::{
    CASES, QuantizeWeight, QuantizeWeightArgs, QuantizeWeightCase, QuantizeWeightProblem, reference,
};
use warpforge::{DType, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work};

const DTYPE: DType = DType::BF16;

struct Set {
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    largest: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("quantize_weight", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &QuantizeWeightCase) -> Result<(), Failure> {
    let &QuantizeWeightCase { rows, k, scheme, .. } = case;
    let problem = QuantizeWeightProblem::new(rows, k, DTYPE, scheme);
    let plan = QuantizeWeight::plan(&bencher.device, problem)?;
    let report = plan.report();
    let shape = json!({
        "rows": rows,
        "k": k,
        "bits": scheme.codes.bits(),
        "codes": scheme.codes.name(),
        "group": scheme.group,
        "block": scheme.rows,
    });
    let work = Work { dtype: DTYPE.name(), shape, bytes: report.bytes, flops: report.flops };
    if !bencher.starts(work)? {
        return Ok(());
    }
    let [codes, scales, _] = problem.bytes(rows).ok_or("a size that cannot be counted")?;
    let mut sets = bencher.sets(|bencher, seed| {
        let part = |bytes: usize| Tensor::empty(&bencher.stream, &[bytes], DType::I8);
        Ok(Set {
            rows: bencher.random(&[rows, k], DTYPE, seed)?,
            codes: part(codes)?,
            scales: part(scales)?,
            largest: Tensor::zeros(&bencher.stream, &[1], DType::F32)?,
        })
    })?;
    let run = |stream: &Stream, set: &mut Set| {
        let parts = [set.codes.view_mut(), set.scales.view_mut(), set.largest.view_mut()];
        plan.run(stream, QuantizeWeightArgs::new(set.rows.view(), parts))
    };
    // The first row's codes; of blocks, those of all rows that share its scales.
    let verify = |stream: &Stream, set: &Set| -> Result<(), Failure> {
        let block = (scheme.rows as usize).min(rows);
        let matrix = set.rows.view().slice(0, 0..block)?.to_vec::<half::bf16>(stream)?;
        let matrix: Vec<f32> = matrix.into_iter().map(f32::from).collect();
        let want = reference::quantize_weight(&matrix, k, &scheme, 1.0);
        let tiles = set.codes.view().slice(0, 0..codes / rows.div_ceil(16))?.to_vec::<i8>(stream)?;
        let bits = scheme.codes.bits();
        for (col, &want) in want.codes[..k].iter().enumerate() {
            let (word, bit) = scheme.codes.place(0, (col % 64) as u32);
            let at = col / 64 * scheme.codes.tile_bytes() as usize + (4 * word + bit / 8) as usize;
            let word =
                i32::from_le_bytes(std::array::from_fn(|i| tiles.get(at + i).map_or(0, |&byte| byte as u8)));
            let got = (word >> (bit % 8)) as u16 & (u16::MAX >> (16 - bits));
            if got != want {
                return Err(format!("column {col}: code {got} instead of {want}").into());
            }
        }
        Ok(())
    };
    bencher.time(&report, &mut sets, run, verify)
}
