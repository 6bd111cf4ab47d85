//! RMSNorm of rows in cudarc's memory, in cudarc's stream: `cargo run --release --package beside_cudarc`. Without a
//! card it says so.

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("built without the feature `cuda`");
}

#[cfg(feature = "cuda")]
fn main() -> Result<(), warpforge_cudarc::CudarcError> {
    use cudarc::driver::CudaContext;
    use warpforge::ops::rmsnorm::{RmsNorm, RmsNormArgs, RmsNormProblem};
    use warpforge::{DType, Device};
    use warpforge_cudarc::SharedStream;

    // Asked first: cudarc stops the program where there is no driver.
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(reason) => {
            println!("no card: {reason}");
            return Ok(());
        }
    };
    let (rows, cols) = (4, 1024);
    let stream = CudaContext::new(0)?.new_stream()?;
    let x = stream.clone_htod(&vec![3.0f32; rows * cols])?;
    let weight = stream.clone_htod(&vec![2.0f32; cols])?;
    let mut out = stream.alloc_zeros::<f32>(rows * cols)?;

    let shared = SharedStream::new(&device, &stream)?;
    let rmsnorm = RmsNorm::plan(&device, RmsNormProblem::new(rows, cols, DType::F32, 1e-6))?;
    shared.scope(|scope| {
        let (x, weight) = (scope.input(&x, &[rows, cols])?, scope.input(&weight, &[cols])?);
        let out = scope.output(&mut out, &[rows, cols])?;
        Ok(rmsnorm.run(scope.stream(), RmsNormArgs::new(x, weight, out))?)
    })?;

    // Behind the operator, since it is the same stream.
    let out = stream.clone_dtoh(&out)?;
    let worst = out.iter().map(|value| (value - 2.0).abs()).fold(0.0f32, f32::max);
    println!("{}\nlargest error: {worst:e}", rmsnorm.report());
    Ok(())
}
