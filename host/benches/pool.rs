//! What making and dropping a tensor takes where its memory is there already: `cargo bench --package warpforge-host
//! --bench pool`, on the CPU; with `--features cuda,cust` on the first card, if there is one.

use std::hint::black_box;
use std::time::Instant;

use host::{DType, Device, Error, Stream, Tensor};

const ROUNDS: u32 = 1_000_000;

fn main() -> Result<(), Error> {
    let device = Device::best();
    let streams = (0..8).map(|_| device.stream()).collect::<Result<Vec<Stream>, Error>>()?;
    println!("{}", device.describe());
    for bytes in [4096, 4 << 20] {
        for num_threads in [1, 8] {
            let start = Instant::now();
            let outcomes: Vec<Result<(), Error>> = std::thread::scope(|scope| {
                let rounds = |stream| {
                    move || {
                        (0..ROUNDS).try_for_each(|_| {
                            Tensor::empty(stream, &[bytes], DType::I8).map(|tensor| {
                                black_box(tensor);
                            })
                        })
                    }
                };
                let threads: Vec<_> =
                    streams[..num_threads].iter().map(|stream| scope.spawn(rounds(stream))).collect();
                let ended = |thread: std::thread::ScopedJoinHandle<'_, Result<(), Error>>| {
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                };
                threads.into_iter().map(ended).collect()
            });
            outcomes.into_iter().collect::<Result<(), Error>>()?;
            let each = start.elapsed() / ROUNDS;
            println!(
                "{bytes} bytes, {num_threads} threads with a stream each: {each:?} for one of each thread"
            );
        }
    }
    let stats = device.pool().stats();
    assert!(stats.reuse_rate() > 0.99, "the device was asked for memory: {stats:?}");
    Ok(())
}
