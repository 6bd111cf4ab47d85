//! The clock: a graph of runs between two events on a card, the wall clock on the CPU.

use std::time::{Duration, Instant};

use warpforge::{Error, Event, Graph, Stream};

use super::Failure;
use super::energy::Meter;

/// Microseconds of one run.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    pub median_us: f64,
    /// Distance between the quartiles.
    pub spread_us: f64,
    pub num_samples: usize,
    /// The same of a single call, by itself and not in a graph; none on the CPU, and of whole models.
    pub call_us: Option<f64>,
}

impl Timing {
    pub fn of(mut samples: Vec<f64>) -> Result<Self, Failure> {
        if samples.is_empty() {
            return Err("no run was timed".into());
        }
        samples.sort_by(f64::total_cmp);
        let at = |share: f64| samples[(share * (samples.len() - 1) as f64).round() as usize];
        let (median_us, spread_us) = (at(0.5), at(0.75) - at(0.25));
        Ok(Timing { median_us, spread_us, num_samples: samples.len(), call_us: None })
    }
}

/// How long a case is timed.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Time that a graph runs before it is measured: a card that is at its power has found its clocks by then. A rested
    /// one is up to an eighth faster for its first 50 ms, and where in that a measurement fell was most of what
    /// differed from run to run.
    pub warm_seconds: f64,
    /// Time that the measured launches of a graph take together, unless that is less than `launches` allow.
    seconds: f64,
    /// Fewest and most launches of a graph that are measured.
    launches: (usize, usize),
    /// Calls that are timed by themselves.
    calls: usize,
}

impl Effort {
    /// Of a case.
    pub const CASE: Effort = Effort { warm_seconds: 0.3, seconds: 0.1, launches: (8, 24), calls: 50 };
    /// Of a case of a sweep, one of hundreds in a row, which keep the card warm.
    pub const SWEEP: Effort = Effort { warm_seconds: 0.02, seconds: 0.02, launches: (4, 12), calls: 0 };
}

/// Time that a graph should take at least, so that the events' resolution does not count, and most rounds over the sets
/// for that.
const GRAPH_SECONDS: f64 = 1e-3;
const MAX_ROUNDS: f64 = 64.0;

/// Times `run` over all sets, and measures its energy if there is a meter: the joules of one run.
pub fn time<S>(
    stream: &Stream,
    sets: &mut [S],
    run: &impl Fn(&Stream, &mut S) -> Result<(), Error>,
    effort: Effort,
    meter: Option<&Meter>,
) -> Result<(Timing, Option<f64>), Failure> {
    if stream.device().limits().is_none() {
        return Ok((time_on_cpu(stream, &mut sets[0], run)?, None));
    }
    let started = Instant::now();
    for set in &mut *sets {
        run(stream, set)?;
    }
    stream.synchronize()?;
    let once = started.elapsed().as_secs_f64();
    let rounds = (GRAPH_SECONDS / once).ceil().clamp(1.0, MAX_ROUNDS) as usize;
    let runs = rounds * sets.len();
    let graph = stream.capture(|stream| {
        (0..rounds).try_for_each(|_| sets.iter_mut().try_for_each(|set| run(stream, set)))
    })?;

    // The first launch uploads the graph, the last tells how long one takes.
    launch(&graph, stream)?;
    let started = Instant::now();
    let mut graph_ms = launch(&graph, stream)?;
    while started.elapsed().as_secs_f64() < effort.warm_seconds {
        graph_ms = launch(&graph, stream)?;
    }
    let (fewest, most) = effort.launches;
    let launches = (effort.seconds / (f64::from(graph_ms) * 1e-3)).clamp(fewest as f64, most as f64);
    let mut samples = Vec::new();
    for _ in 0..launches as usize {
        samples.push(f64::from(launch(&graph, stream)?) * 1e3 / runs as f64);
    }
    let timing = Timing::of(samples)?;
    let call_us = if effort.calls > 0 { Some(time_calls(stream, sets, effort.calls, run)?) } else { None };
    let watts = match meter {
        Some(meter) => watts(meter, stream, &graph, timing.median_us * 1e-6 * runs as f64)?,
        None => None,
    };
    let timing = Timing { call_us, ..timing };
    Ok((timing, watts.map(|watts| watts * timing.median_us * 1e-6)))
}

/// Median of the microseconds between two events around a single run that the card waits for: with the time that the
/// call takes on the host.
fn time_calls<S>(
    stream: &Stream,
    sets: &mut [S],
    calls: usize,
    run: &impl Fn(&Stream, &mut S) -> Result<(), Error>,
) -> Result<f64, Failure> {
    let num_sets = sets.len();
    let mut samples = Vec::new();
    for call in 0..calls {
        stream.synchronize()?;
        let start = stream.record()?;
        run(stream, &mut sets[call % num_sets])?;
        samples.push(f64::from(stream.record()?.elapsed_ms(&start)?) * 1e3);
    }
    Ok(Timing::of(samples)?.median_us)
}

/// Milliseconds of one launch.
fn launch(graph: &Graph, stream: &Stream) -> Result<f32, Error> {
    let start: Event = stream.record()?;
    // SAFETY: the graph's tensors are the sets of `time`'s caller, who holds them until it returns.
    unsafe { graph.launch(stream)? };
    stream.record()?.elapsed_ms(&start)
}

/// Power while the graph runs without a pause, for half a second or one launch.
fn watts(meter: &Meter, stream: &Stream, graph: &Graph, graph_s: f64) -> Result<Option<f64>, Error> {
    /// Longer than several of the counter's steps.
    const SECONDS: f64 = 0.5;
    /// The driver holds so many launches back before it makes the caller wait.
    const MAX_LAUNCHES: f64 = 900.0;
    let launches = (SECONDS / graph_s).ceil().clamp(1.0, MAX_LAUNCHES) as usize;
    let busy = launches as f64 * graph_s;
    let mut reading = meter.begin();
    let started = Instant::now();
    for index in 0..launches {
        // SAFETY: as in `launch`.
        unsafe { graph.launch(stream)? };
        if index % 16 == 0 {
            reading.poll();
        }
    }
    // Not to the very end, where the card may be idle already.
    while started.elapsed().as_secs_f64() < 0.95 * busy {
        reading.poll();
        std::thread::sleep(Duration::from_millis(1));
    }
    stream.synchronize()?;
    Ok(reading.watts())
}

fn time_on_cpu<S>(
    stream: &Stream,
    set: &mut S,
    run: &impl Fn(&Stream, &mut S) -> Result<(), Error>,
) -> Result<Timing, Failure> {
    let mut samples = Vec::new();
    let started = Instant::now();
    while samples.len() < 3 || (started.elapsed().as_secs_f64() < 0.2 && samples.len() < 100) {
        let start = Instant::now();
        run(stream, set)?;
        samples.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Timing::of(samples)
}
