//! Times sums over the ranks of a group: `x = Σ_r x_r` of bf16, by each way that there is.
//!
//! `cargo bench --bench group -- [--devices 0,1] [--max-bytes N] [--json FILE]`. A rank is a thread. Every way is
//! checked at every size, for a call and for a recorded graph of them, and then timed: two launches of the graph, of
//! which the first brings the ranks together and the second lies between two events; the median of the slowest rank's.
//! Bus bandwidth is what a link must carry at least, 2 (n − 1) / n times the bytes, over the time.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use clap::Parser;
use half::bf16;
use warpforge::group::{Communicator, Group, PeerOptions};
use warpforge::{Device, Error, Event, Tensor};

#[derive(Parser)]
struct Options {
    /// Ordinals of the ranks' cards; all of the machine's, if nothing is said.
    #[arg(long, value_delimiter = ',')]
    devices: Vec<usize>,
    /// The least size.
    #[arg(long, default_value_t = 1 << 10)]
    min_bytes: usize,
    /// The largest size.
    #[arg(long, default_value_t = 256 << 20)]
    max_bytes: usize,
    /// Only ways that have this in their names.
    #[arg(long)]
    way: Option<String>,
    /// Where a JSON object for each time goes.
    #[arg(long)]
    json: Option<PathBuf>,
    /// What cargo passes.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Calls of a graph.
const CALLS: usize = 20;
/// Launches that are measured.
const SAMPLES: usize = 21;
/// Bytes that a way sums before it is measured, so that the cards have found their clocks; and most launches for that.
const WARM_BYTES: usize = 4 << 30;
const MAX_WARM: usize = 200;

type Failure = Box<dyn std::error::Error>;

/// A way to sum, and its group if this machine has it.
struct Way {
    name: &'static str,
    group: Result<Group, Error>,
}

/// All ways. `Group::new` is what the build takes by itself: where that is NCCL for all sizes, its times are NCCL's.
fn ways(devices: &[Device]) -> Vec<Way> {
    let over_peers = |one_shot_bytes| {
        let mut options = PeerOptions::default();
        (options.one_shot_bytes, options.two_shot_bytes) = (Some(one_shot_bytes), Some(usize::MAX));
        Group::over_peers(devices, options)
    };
    vec![
        Way { name: "one-shot", group: over_peers(usize::MAX) },
        Way { name: "two-shot", group: over_peers(0) },
        Way { name: "default", group: Group::new(devices) },
    ]
}

/// What a rank's element is before a call: small integers, whose sums are exact.
fn before(index: usize, rank: usize) -> f32 {
    (index % 13) as f32 + rank as f32
}

/// What it is after so many calls, each of which sums what the last has left.
fn after(index: usize, size: usize, calls: usize) -> bf16 {
    let sum = (0..size).map(|rank| before(index, rank)).sum::<f32>();
    let again = |value: bf16| bf16::from_f32((1..size).fold(value.to_f32(), |sum, _| sum + value.to_f32()));
    (1..calls).fold(bf16::from_f32(sum), |value, _| again(value))
}

/// The microseconds of a call, for each sample.
fn time(rank: &Communicator, bytes: usize) -> Result<Vec<f64>, Error> {
    let stream = rank.device().stream()?;
    let (len, size) = (bytes / 2, rank.size());
    let data: Vec<bf16> = (0..len).map(|index| bf16::from_f32(before(index, rank.rank()))).collect();
    let mut x = Tensor::from_slice(&stream, &[len], &data)?;
    let check = |x: &Tensor, calls: usize| {
        let expected: Vec<bf16> = (0..13).map(|index| after(index, size, calls)).collect();
        let got = x.to_vec::<bf16>(&stream)?;
        match got.iter().enumerate().find(|&(index, got)| *got != expected[index % 13]) {
            None => Ok(()),
            Some((index, got)) => {
                let expected = format!("{} at element {index} after {calls} calls", expected[index % 13]);
                Err(Error::invalid("all_reduce", "x", expected, got.to_string()))
            }
        }
    };
    rank.all_reduce(&stream, x.view_mut())?;
    rank.synchronize(&stream)?;
    check(&x, 1)?;
    let graph =
        stream.capture(|stream| (0..CALLS).try_for_each(|_| rank.all_reduce(stream, x.view_mut())))?;
    // SAFETY: x, graph and group are there until the stream has been waited for, here and below.
    let launch = || unsafe { graph.launch(&stream) };
    x.view_mut().write(&stream, &data)?;
    launch()?;
    rank.synchronize(&stream)?;
    check(&x, CALLS)?;
    // Zeros stay zeros.
    x.view_mut().fill_zero(&stream)?;
    for _ in 0..(WARM_BYTES / (CALLS * bytes)).clamp(2, MAX_WARM) {
        launch()?;
    }
    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        launch()?;
        let start: Event = stream.record()?;
        launch()?;
        samples.push(f64::from(stream.record()?.elapsed_ms(&start)?) * 1e3 / CALLS as f64);
    }
    rank.synchronize(&stream)?;
    Ok(samples)
}

/// The median of the slowest rank's samples, and the distance between the quartiles.
fn slowest(ranks: &[Vec<f64>]) -> (f64, f64) {
    let slowest = |sample: usize| ranks.iter().map(|samples| samples[sample]).fold(0.0, f64::max);
    let mut samples: Vec<f64> = (0..SAMPLES).map(slowest).collect();
    samples.sort_by(f64::total_cmp);
    let at = |share: f64| samples[(share * (SAMPLES - 1) as f64).round() as usize];
    (at(0.5), at(0.75) - at(0.25))
}

fn main() -> Result<(), Failure> {
    let mut options = Options::parse();
    if options.devices.is_empty() {
        options.devices = (0..Device::cuda_count()?.min(8)).collect();
    }
    let devices: Vec<Device> =
        options.devices.iter().map(|&ordinal| Device::cuda(ordinal)).collect::<Result<_, _>>()?;
    let size = devices.len();
    if size < 2 {
        return Err("a group needs two cards".into());
    }
    let mut ways = ways(&devices);
    ways.retain(|way| options.way.as_ref().is_none_or(|wanted| way.name.contains(wanted.as_str())));
    let mut json = options.json.as_ref().map(File::create).transpose()?;
    let card = &devices[0].profile().name;
    println!("{size} ranks on {card}, bf16, graphs of {CALLS} calls");
    for way in &ways {
        if let Err(error) = &way.group {
            println!("{}: not here: {error}", way.name);
        }
    }
    println!("{:>10}  {:<10} {:>10} {:>8} {:>8}", "bytes", "way", "µs", "±", "GB/s bus");
    let mut failed = 0;
    let mut bytes = options.min_bytes.next_multiple_of(2).max(2);
    while bytes <= options.max_bytes {
        for way in &mut ways {
            let Ok(group) = &way.group else { continue };
            let ranks: Result<Vec<Vec<f64>>, Error> =
                group.run(|rank| time(rank, bytes)).into_iter().collect();
            match ranks {
                Ok(ranks) => {
                    let (us, spread) = slowest(&ranks);
                    let bus = 2.0 * (size - 1) as f64 / size as f64 * bytes as f64 / us * 1e-3;
                    println!("{bytes:>10}  {:<10} {us:>10.2} {spread:>8.2} {bus:>8.1}", way.name);
                    if let Some(json) = &mut json {
                        let line = serde_json::json!({
                            "kind": "all_reduce", "way": way.name, "ranks": size, "card": card, "bytes": bytes,
                            "us": us, "spread_us": spread, "bus_gb_s": bus,
                        });
                        writeln!(json, "{line}")?;
                    }
                }
                Err(error) => {
                    println!("{bytes:>10}  {:<10} {error}", way.name);
                    failed += 1;
                    // A group that has failed stays so.
                    way.group = Err(error);
                }
            }
        }
        bytes *= 2;
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} failed").into()) }
}
