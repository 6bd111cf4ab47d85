//! What a fake driver cannot show: on a card, with kernels of the test's own. Without one the tests say so and pass, or
//! fail where `REQUIRE_GPU` is set.

#![cfg(all(feature = "cuda", feature = "async"))]

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use host::module::Module;
use host::{Arch, DType, Device, Error, Image, Ptx, Stream, Tensor};

/// No operator runs here.
static IMAGES: &[Image] = &[Image {
    family: "rmsnorm",
    arch: Arch::Sm61,
    ptx: Ptx::Text(".version 6.3\n.target sm_61\n.address_size 64\n.visible .entry k() { ret; }\n"),
}];

/// `spin` takes so many nanoseconds; `fault` writes where nothing is.
const OWN: &str = ".version 6.3\n.target sm_61\n.address_size 64\n\
    .visible .entry spin(.param .u64 spin_param_0) {\n\
    .reg .u64 start, now, least;\n.reg .pred more;\n\
    ld.param.u64 least, [spin_param_0];\nmov.u64 start, %globaltimer;\n\
    again: mov.u64 now, %globaltimer;\nsub.u64 now, now, start;\nsetp.lt.u64 more, now, least;\n@more bra again;\nret;\n}\n\
    .visible .entry fault(.param .u64 fault_param_0) {\n\
    .reg .u64 to;\nld.param.u64 to, [fault_param_0];\nst.global.u64 [to], to;\nret;\n}\n";

/// Tests take turns: making a buffer waits for no other's, and what each counts is its own then.
static TURN: Mutex<()> = Mutex::new(());

/// The first card, for one test at a time; none is said, and a failure where one is required.
fn card() -> Option<(Device, MutexGuard<'static, ()>)> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: no operator of these images is planned.
    match unsafe { Device::cuda_with_images(0, IMAGES) } {
        Ok(device) => Some((device, turn)),
        Err(error) => {
            assert!(std::env::var_os("REQUIRE_GPU").is_none(), "no card: {error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// Enqueues a kernel of [`OWN`] with a number.
fn launch(stream: &Stream, name: &'static str, number: u64) -> Result<(), Error> {
    let module = Module::load(stream.device(), OWN)?;
    let kernel = module.function::<(u64,)>(name)?;
    // SAFETY: `spin` touches no memory; `fault` stops its context, which is what its caller wants.
    unsafe { kernel.launch(stream, [1, 1, 1], [1, 1, 1], (number,)) }
}

/// Copies larger than what the driver stages by itself, behind work that takes its time: the host does not wait, and
/// the second round locks no memory.
#[test]
fn staged_copies_do_not_wait() -> Result<(), Error> {
    let Some((device, _turn)) = card() else { return Ok(()) };
    let stream = device.stream()?;
    launch(&stream, "spin", 0)?;
    let mut tensor = Tensor::zeros(&stream, &[4 << 20], DType::F32)?;
    stream.synchronize()?;
    for round in 0..3 {
        let data: Vec<f32> = (0..4 << 20).map(|value| (value + round) as f32).collect();
        launch(&stream, "spin", 200_000_000)?;
        let start = Instant::now();
        tensor.view_mut().enqueue_write(&stream, &data)?;
        let mut download = tensor.view().enqueue_read::<f32>(&stream)?;
        let there = download.query()?;
        let enqueued = start.elapsed();
        // Locking memory for the first time takes long.
        assert!(round == 0 || (!there && enqueued < Duration::from_millis(150)), "{enqueued:?}");
        assert!(download.read()? == data && start.elapsed() >= Duration::from_millis(100));
    }
    let stats = device.staging().stats();
    assert_eq!((stats.num_staged, stats.num_reused, stats.num_waited), (6, 4, 0), "{stats:?}");
    Ok(())
}

mod futures {
    use std::future::Future;
    use std::pin::Pin;
    use std::process::Command;
    use std::task::{Context, Waker};

    use super::*;

    const INSIDE: &str = "CARD_INSIDE";

    #[test]
    fn a_future_is_ready_when_the_stream_is() -> Result<(), Error> {
        let Some((device, _turn)) = card() else { return Ok(()) };
        let stream = device.stream()?;
        // So that nothing is loaded later.
        launch(&stream, "spin", 0)?;
        stream.synchronize()?;
        let start = Instant::now();
        launch(&stream, "spin", 50_000_000)?;
        let mut finished = stream.finished();
        drop(stream.finished());
        assert!(Pin::new(&mut finished).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        pollster::block_on(finished)?;
        assert!(start.elapsed() >= Duration::from_millis(50), "{:?}", start.elapsed());
        assert!(stream.record()?.elapsed_ms(&stream.record()?).is_ok());
        Ok(())
    }

    /// In a process of its own, whose context is spoilt.
    #[test]
    fn a_fault_comes_out_of_the_future() -> Result<(), Error> {
        let Some((device, _turn)) = card() else { return Ok(()) };
        if std::env::var_os(INSIDE).is_some() {
            let stream = device.stream()?;
            launch(&stream, "spin", 20_000_000)?;
            launch(&stream, "fault", 8)?;
            let error = pollster::block_on(stream.finished()).unwrap_err();
            assert!(matches!(&error, Error::Driver { source, .. } if source.code == 700), "{error:?}");
            return Ok(());
        }
        let name = "futures::a_fault_comes_out_of_the_future";
        let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
        let output = command.args([name, "--exact"]).env(INSIDE, "1").output().expect("this binary runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        Ok(())
    }
}
