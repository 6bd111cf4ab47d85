//! How an operator is timed.
//!
//! CUDA events around a recorded graph of runs, so that launch gaps stay out; each run of the graph takes other buffers,
//! over more than three times the L2 cache, so that nothing is read from it; random data, never zeros. The median over
//! the graph's launches counts, and the spread is the distance between the quartiles. A wrong result is not timed.
//!
//! The device-to-device copy of the same run is the yardstick of memory-bound work.

use std::fmt;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use testkit::strategies::Rng;
use warpforge::{Arch, DType, Device, DeviceChoice, Error, Event, OptimizationReport, Stream, Tensor};

/// Command line of the benches.
#[derive(Parser)]
pub struct Options {
    /// Only cases whose "operator name" contains this text.
    filter: Option<String>,
    /// Device: auto, cpu, cuda or cuda:N.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Floor whose images are run: sm_61, sm_80 or sm_90a; the card's newest if not given.
    #[arg(long, value_parser = parse_arch)]
    floor: Option<Arch>,
    /// Also write the results to this file, one JSON object per line.
    #[arg(long)]
    json: Option<PathBuf>,
    /// What `cargo bench` passes; no effect.
    #[arg(long, hide = true)]
    bench: bool,
}

fn parse_arch(text: &str) -> Result<Arch, String> {
    text.parse().map_err(|()| format!("unknown floor {text:?}: expected sm_61, sm_80 or sm_90a"))
}

/// Runs cases and prints their results.
pub struct Bencher {
    pub device: Device,
    pub stream: Stream,
    filter: Option<String>,
    json: Option<File>,
    /// GB/s of a device-to-device copy, bytes read and written.
    copy_rate: f64,
    num_failed: usize,
}

/// One case.
pub struct Case {
    /// Operator and case.
    pub name: String,
    /// What the plan says of itself.
    pub report: OptimizationReport,
    /// Fewest bytes and operations of one run.
    pub bytes: u64,
    pub flops: u64,
}

/// Microseconds of one run.
#[derive(Clone, Copy)]
struct Timing {
    median: f64,
    spread: f64,
}

impl Bencher {
    pub fn new(options: Options) -> Result<Self, Box<dyn std::error::Error>> {
        let mut device = options.device.open()?;
        if let Some(floor) = options.floor {
            device = device.with_arch(floor)?;
        }
        let stream = device.stream()?;
        let json = options.json.map(File::create).transpose()?;
        let mut bencher =
            Bencher { device, stream, filter: options.filter, json, copy_rate: 0.0, num_failed: 0 };
        bencher.copy_rate = bencher.measure_copy()?;
        println!("{}; copy {:.0} GB/s", bencher.device.describe(), bencher.copy_rate);
        println!(
            "{:<52} {:>10} {:>8} {:>8} {:>8} {:>6}  kernel",
            "case", "µs", "±", "GB/s", "TFLOP/s", "copy"
        );
        Ok(bencher)
    }

    /// Whether a case is wanted.
    pub fn wants(&self, name: &str) -> bool {
        self.filter.as_deref().is_none_or(|filter| name.contains(filter))
    }

    /// Sets of buffers of `bytes` each, enough to go over three times the L2 cache; one on the CPU.
    pub fn sets<S>(&self, bytes: u64, make: impl Fn(u64) -> Result<S, Error>) -> Result<Vec<S>, Error> {
        let l2_bytes = self.device.profile().l2_bytes as u64;
        let num_sets = if self.is_cpu() { 1 } else { (3 * l2_bytes).div_ceil(bytes.max(1)).clamp(2, 256) };
        (0..num_sets).map(make).collect()
    }

    /// A tensor of normally distributed numbers. A block of a million repeats: enough to be random for caches and power.
    pub fn random(&self, shape: &[usize], dtype: DType, seed: u64) -> Result<Tensor, Error> {
        let len: usize = shape.iter().product();
        let mut rng = Rng::new(seed);
        let block: Vec<f64> = (0..len.min(1 << 20)).map(|_| rng.normal()).collect();
        let block = testkit::round::encode(dtype, &block);
        let block_len = len.min(1 << 20);
        let block = Tensor::from_bytes(&self.stream, &[block_len], dtype, &block)?;
        let mut tensor = Tensor::empty(&self.stream, shape, dtype)?;
        for start in (0..len).step_by(1 << 20) {
            let part = block_len.min(len - start);
            let target = tensor.view_mut().reshape(&[len])?.slice(0, start..start + part)?;
            self.stream.copy(block.view().slice(0, 0..part)?, target)?;
        }
        Ok(tensor)
    }

    /// Runs on the first set of buffers, checks the result with `verify`, times and prints.
    pub fn bench<S>(
        &mut self,
        case: Case,
        sets: &mut [S],
        run: impl Fn(&Stream, &mut S) -> Result<(), Error>,
        verify: impl Fn(&Stream, &S) -> Result<(), Box<dyn std::error::Error>>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let Case { name, report, bytes, flops } = case;
        run(&self.stream, &mut sets[0])?;
        if let Err(error) = verify(&self.stream, &sets[0]) {
            println!("{name:<52} WRONG RESULT: {error}");
            self.num_failed += 1;
            return Ok(());
        }
        let timing = self.time(sets, &run)?;
        self.print(&name, bytes, flops, timing, Some(&report))
    }

    /// Prints a case that was timed elsewhere: microseconds of each run.
    pub fn record(
        &mut self,
        name: &str,
        bytes: u64,
        flops: u64,
        samples: Vec<f64>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        self.print(name, bytes, flops, Timing::of(samples), None)
    }

    fn print(
        &mut self,
        name: &str,
        bytes: u64,
        flops: u64,
        timing: Timing,
        report: Option<&OptimizationReport>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let Timing { median, spread } = timing;
        let (rate, flop_rate) = (bytes as f64 / median * 1e-3, flops as f64 / median * 1e-6);
        let share = rate / self.copy_rate;
        let variant = report.map_or("", |report| report.variant);
        println!(
            "{name:<52} {median:>10.2} {spread:>8.2} {rate:>8.0} {flop_rate:>8.2} {:>5.0}%  {variant}",
            share * 100.0
        );
        if let Some(json) = &mut self.json {
            let resources = report.and_then(|report| report.resources);
            let line = serde_json::json!({
                "case": name, "device": self.device.describe(), "variant": variant, "us": median, "spread_us": spread,
                "bytes": bytes, "flops": flops, "gb_per_s": rate, "tflop_per_s": flop_rate,
                "share_of_copy": share, "copy_gb_per_s": self.copy_rate,
                "registers": resources.map(|r| r.registers), "smem_bytes": resources.map(|r| r.smem_bytes),
                "occupancy": report.and_then(|report| report.occupancy),
            });
            writeln!(json, "{line}")?;
        }
        Ok(())
    }

    /// An error if any case was wrong.
    pub fn finish(self) -> Result<(), Box<dyn std::error::Error>> {
        match self.num_failed {
            0 => Ok(()),
            n => Err(format!("{n} cases gave wrong results").into()),
        }
    }

    fn is_cpu(&self) -> bool {
        self.device.limits().is_none()
    }

    fn time<S>(
        &self,
        sets: &mut [S],
        run: &impl Fn(&Stream, &mut S) -> Result<(), Error>,
    ) -> Result<Timing, Error> {
        if self.is_cpu() {
            return self.time_on_cpu(&mut sets[0], run);
        }
        // As many runs as take about a millisecond, and at least every set once.
        let started = Instant::now();
        for set in &mut *sets {
            run(&self.stream, set)?;
        }
        self.stream.synchronize()?;
        let once = started.elapsed().as_secs_f64();
        let rounds = (1e-3 / once).ceil().clamp(1.0, 64.0) as usize;
        let runs = rounds * sets.len();
        let graph = self.stream.capture(|stream| {
            (0..rounds).try_for_each(|_| sets.iter_mut().try_for_each(|set| run(stream, set)))
        })?;
        let mut samples = Vec::new();
        for launch in 0..24 {
            let start: Event = self.stream.record()?;
            // SAFETY: the buffers are the caller's, who holds them beyond this function.
            unsafe { graph.launch(&self.stream)? };
            let elapsed = self.stream.record()?.elapsed_ms(&start)?;
            // The first launches warm up.
            if launch >= 4 {
                samples.push(f64::from(elapsed) * 1e3 / runs as f64);
            }
        }
        Ok(Timing::of(samples))
    }

    fn time_on_cpu<S>(
        &self,
        set: &mut S,
        run: &impl Fn(&Stream, &mut S) -> Result<(), Error>,
    ) -> Result<Timing, Error> {
        let mut samples = Vec::new();
        let started = Instant::now();
        while samples.len() < 3 || (started.elapsed().as_secs_f64() < 0.5 && samples.len() < 100) {
            let start = Instant::now();
            run(&self.stream, set)?;
            samples.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(Timing::of(samples))
    }

    /// Not recorded: in a graph the driver gives copies to the slower copy engines.
    fn measure_copy(&self) -> Result<f64, Error> {
        let len = if self.is_cpu() { 1 << 26 } else { 1 << 30 };
        let from = self.random(&[len], DType::I8, 1)?;
        let mut to = Tensor::empty(&self.stream, &[len], DType::I8)?;
        let mut samples = Vec::new();
        for round in 0..16 {
            let start = self.stream.record()?;
            self.stream.copy(from.view(), to.view_mut())?;
            let elapsed = self.stream.record()?.elapsed_ms(&start)?;
            if round >= 4 {
                samples.push(f64::from(elapsed) * 1e3);
            }
        }
        let timing = Timing::of(samples);
        Ok(2.0 * len as f64 / timing.median * 1e-3)
    }
}

impl Timing {
    fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |share: f64| samples[(share * (samples.len() - 1) as f64).round() as usize];
        Timing { median: at(0.5), spread: at(0.75) - at(0.25) }
    }
}

/// Checks a sample of a result against the reference: the relative L2 error may be what rounding to `dtype` explains.
pub fn expect_close(dtype: DType, got: &[f64], want: &[f64]) -> Result<(), Box<dyn std::error::Error>> {
    let bound = match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 2e-3,
        _ => 1e-2,
    };
    let error = testkit::compare::relative_l2(got, want);
    if error <= bound { Ok(()) } else { Err(Wrong { error, bound }.into()) }
}

#[derive(Debug)]
struct Wrong {
    error: f64,
    bound: f64,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "relative L2 error {:.2e} is over {:.0e}", self.error, self.bound)
    }
}

impl std::error::Error for Wrong {}

/// The innermost row at the start of a tensor of floats.
pub fn first_row(tensor: &Tensor, stream: &Stream) -> Result<Vec<f64>, Error> {
    let cols = tensor.shape().last().copied().unwrap_or(1);
    let row = tensor.view().reshape(&[tensor.len()])?.slice(0, 0..cols)?;
    Ok(match tensor.dtype() {
        DType::F16 => row.to_vec::<half::f16>(stream)?.into_iter().map(f64::from).collect(),
        DType::BF16 => row.to_vec::<half::bf16>(stream)?.into_iter().map(f64::from).collect(),
        _ => row.to_vec::<f32>(stream)?.into_iter().map(f64::from).collect(),
    })
}
