//! An operator on cudarc's memory, in cudarc's stream, on a card. Without one the test says so; `REQUIRE_GPU=1` makes
//! that a failure.

use cudarc::driver::CudaContext;
use half::f16;
use warpforge::ops::rmsnorm::{RmsNorm, RmsNormArgs, RmsNormProblem};
use warpforge::{DType, Device, Tensor};
use warpforge_cudarc::{CudarcError, SharedStream};

#[test]
fn a_card_norms_cudarc_s_rows() -> Result<(), CudarcError> {
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(reason) => {
            let required =
                std::env::var_os("REQUIRE_GPU").is_some_and(|value| !value.is_empty() && value != "0");
            assert!(!required, "REQUIRE_GPU is set, but: {reason}");
            eprintln!("skipped: {reason}");
            return Ok(());
        }
    };
    let (rows, cols) = (37, 512);
    let values: Vec<f16> =
        (0..rows * cols).map(|i| f16::from_f32((i * 7919 % 251) as f32 / 32.0 - 3.0)).collect();
    let context = CudaContext::new(0)?;
    let (stream, other) = (context.new_stream()?, context.new_stream()?);
    let shared = SharedStream::new(&device, &stream)?;
    let plan = RmsNorm::plan(&device, RmsNormProblem::new(rows, cols, DType::F16, 1e-6))?;
    // Written in one stream, normed in the second, read in the first: cudarc's events are between.
    let (x, weight) = (other.clone_htod(&values)?, other.clone_htod(&vec![f16::ONE; cols])?);
    let mut out = other.alloc_zeros::<f16>(rows * cols)?;
    for _ in 0..100 {
        shared.scope(|scope| {
            let (x, weight) = (scope.input(&x, &[rows, cols])?, scope.input(&weight, &[cols])?);
            Ok(plan
                .run(scope.stream(), RmsNormArgs::new(x, weight, scope.output(&mut out, &[rows, cols])?))?)
        })?;
    }
    let got = other.clone_dtoh(&out)?;
    for (x, out) in values.chunks(cols).zip(got.chunks(cols)) {
        let square: f64 = x.iter().map(|x| x.to_f64().powi(2)).sum();
        let scale = (square / cols as f64 + 1e-6).sqrt().recip();
        for (x, out) in x.iter().zip(out) {
            let exact = x.to_f64() * scale;
            assert!((out.to_f64() - exact).abs() <= exact.abs() / 512.0 + 1e-6, "{out} for {exact}");
        }
    }
    // A tensor of warpforge's, written by cudarc in another stream.
    let mut lent = shared.lend::<f16>(Tensor::zeros(&device.stream()?, &[rows * cols], DType::F16)?)?;
    other.memcpy_dtod(&out, &mut lent.view_mut())?;
    assert_eq!(lent.into_tensor().to_vec::<f16>(shared.stream())?, got);
    Ok(())
}
