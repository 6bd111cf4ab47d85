//! How an operator is timed.
//!
//! CUDA events around a recorded graph of runs, so that launch gaps stay out; each run of the graph takes other
//! buffers, over more than three times the L2 cache, so that nothing is read from it; random data, never zeros. The
//! graph runs for a third of a second before that, so that what takes the card to its power is timed at the clocks that
//! last. The median over the graph's launches counts, and the spread is the distance between the quartiles. A wrong
//! result is not timed.
//!
//! What is measured is set against what the same card did in the same run: see [`roofline`]. Results go to standard
//! output as a table and, with `--json`, to a file of one JSON object per line, told apart by `kind`:
//!
//! | kind | what |
//! |---|---|
//! | `run` | the device, its driver, the copy's rate and the peak matrix rates |
//! | `case` | a case; with `--list` what it is, else with its times |
//! | `failed` | a case that could not be timed, with the reason |

pub mod anchors;
mod energy;
mod roofline;
mod timing;

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::num::NonZero;
use std::path::PathBuf;
use std::time::UNIX_EPOCH;

use clap::{Parser, ValueEnum};
use serde_json::{Value, json};
use testkit::round::round_to;
use testkit::strategies::Rng;
use warpforge::{
    Arch, DType, Device, DeviceChoice, Error, F8E4M3, OptimizationReport, Stream, Tensor, TensorView,
};

pub use energy::Meter;
use roofline::Roofline;
use timing::{Effort, Timing};

/// Why a case was not timed.
pub type Failure = Box<dyn StdError>;

/// Command line of the benches.
#[derive(Parser)]
pub struct Options {
    /// Only cases whose "operator name" contains one of these texts.
    filters: Vec<String>,
    /// Device: auto, cpu, cuda or cuda:N.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Floor whose images are run: sm_61, sm_80, sm_90a or sm_100; what the card takes if not given.
    #[arg(long)]
    floor: Option<Arch>,
    /// Also write the results to this file, one JSON object per line.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Only list the cases, as JSON on standard output; needs no card.
    #[arg(long)]
    list: bool,
    /// Peak matrix rates that another program measured on this card, as benches/peers writes them.
    #[arg(long)]
    peaks: Option<PathBuf>,
    /// Of which cases the energy is measured, half a second each.
    #[arg(long, value_enum, default_value_t = Energy::Anchors)]
    energy: Energy,
    /// Times this operator over a grid of shapes, instead of all at those of their cases: quickly, and with each
    /// kernel that can do a shape beside the one that a plan chooses, where there are several.
    #[arg(long, value_enum)]
    sweep: Vec<Sweep>,
    /// In a sweep, only the kernels that plans choose.
    #[arg(long)]
    chosen_only: bool,
    /// In a sweep, fails where another kernel takes less time than the one that a plan chooses: by more than a
    /// twentieth and the spread, in three measurements of both in turn.
    #[arg(long, conflicts_with = "chosen_only", requires = "sweep")]
    check_choice: bool,
    /// Only each so many-th case.
    #[arg(long, default_value_t = NonZero::<usize>::MIN)]
    every: NonZero<usize>,
    /// Times this kernel of a product, of attention or of RMSNorm, and not the one that a plan chooses.
    #[arg(long)]
    kernel: Option<String>,
    /// What `cargo bench` passes; no effect.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Of which cases the energy is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Energy {
    /// None.
    Off,
    /// The anchors and whole models.
    Anchors,
    /// All.
    All,
}

/// What is swept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sweep {
    /// The matrix product.
    Matmul,
    /// Attention.
    Attention,
    /// The grouped product.
    Grouped,
    /// The operators of rows.
    Rowwise,
}

/// How much longer than the best kernel the chosen one may take, with `--check-choice`.
const MOST_BEHIND: f64 = 1.05;
/// Elements of the block of random numbers that all tensors are filled from.
const BLOCK: usize = 1 << 20;
/// The most that a case may take on the CPU, where a run of more would take seconds.
const CPU_BYTES: u64 = 1 << 28;
const CPU_FLOPS: u64 = 20_000_000_000;

/// Runs cases and prints their results.
pub struct Bencher {
    pub device: Device,
    pub stream: Stream,
    /// The kernel that `--kernel` names.
    pub kernel: Option<String>,
    /// What `--sweep` names.
    pub sweeps: Vec<Sweep>,
    chosen_only: bool,
    check_choice: bool,
    every: NonZero<usize>,
    /// Cases that the filters have let through.
    num_seen: usize,
    filters: Vec<String>,
    energy: Energy,
    /// What the energy is read from, and what a card has reached; neither where cases are only listed.
    meter: Option<Meter>,
    roofline: Option<Roofline>,
    json: Option<File>,
    /// Two [`BLOCK`]s of random numbers for each type, the second like the first.
    blocks: Vec<Tensor>,
    /// Bytes that the blocks hold of the device's memory.
    blocks_bytes: usize,
    current: Option<Current>,
    num_timed: usize,
    num_skipped: usize,
    num_failed: usize,
}

/// What a case does, as the list of cases says it.
pub struct Work {
    /// Element type of the operands.
    pub dtype: &'static str,
    /// Sizes and options, by name.
    pub shape: Value,
    /// Fewest bytes and operations of one run.
    pub bytes: u64,
    pub flops: u64,
}

/// The case at hand.
struct Current {
    op: &'static str,
    label: String,
    work: Option<Work>,
    /// Bytes of the device's memory that one set of buffers and what the plan holds take.
    memory_bytes: Option<usize>,
    /// Microseconds of other kernels than the one that a plan chooses.
    others: Vec<(&'static str, f64)>,
}

impl Bencher {
    pub fn new(options: Options) -> Result<Self, Failure> {
        let mut device = if options.list { Device::cpu() } else { options.device.open()? };
        if let Some(floor) = options.floor {
            device = device.with_arch(floor)?;
        }
        let stream = device.stream()?;
        let json = options.json.map(File::create).transpose()?;
        let mut bencher = Bencher {
            device,
            stream,
            kernel: options.kernel,
            sweeps: options.sweep,
            chosen_only: options.chosen_only,
            check_choice: options.check_choice,
            every: options.every,
            num_seen: 0,
            filters: options.filters,
            energy: options.energy,
            meter: None,
            roofline: None,
            json,
            blocks: Vec::new(),
            blocks_bytes: 0,
            current: None,
            num_timed: 0,
            num_skipped: 0,
            num_failed: 0,
        };
        if !options.list {
            bencher.prepare(options.peaks)?;
        }
        Ok(bencher)
    }

    /// Measures what the results are set against, and prints the head of the table.
    fn prepare(&mut self, peaks: Option<PathBuf>) -> Result<(), Failure> {
        self.blocks = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::I8]
            .into_iter()
            .map(|dtype| {
                let mut rng = Rng::new(1);
                // Int8 fills its range like quantised data.
                let scale = if dtype == DType::I8 { 32.0 } else { 1.0 };
                let block: Vec<f64> = (0..BLOCK).map(|_| round_to(dtype, scale * rng.normal())).collect();
                let block = testkit::round::encode(dtype, &[block.as_slice(), &block].concat());
                Tensor::from_bytes(&self.stream, &[2 * BLOCK], dtype, &block)
            })
            .collect::<Result<_, _>>()?;
        self.blocks_bytes = self.held_bytes();
        let mut roofline = Roofline::measure(self)?;
        if let Some(file) = peaks {
            roofline.read_peaks(&file)?;
        }
        let meter = match self.energy {
            Energy::Off => Err("not asked for".to_owned()),
            _ => Meter::open(&self.device),
        };
        println!("{}; {roofline}", self.device.describe());
        if let Err(reason) = &meter {
            println!("energy is not measured: {reason}");
        }
        let card = meter.as_ref().ok().map(Meter::describe);
        let run = json!({
            "kind": "run", "source": "warpforge", "version": env!("CARGO_PKG_VERSION"),
            "unix_time": UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs()),
            "device": self.device.profile().name, "floor": self.floor(), "card": card,
            "warm_seconds": self.effort().warm_seconds,
            "roofline": roofline.to_json(),
        });
        self.write(&run)?;
        self.meter = meter.ok();
        self.roofline = Some(roofline);
        println!(
            "{:<52} {:>10} {:>7} {:>8} {:>7} {:>8} {:>5} {:>8} {:>8} {:>4} {:>6} {:>5} {:>7}  kernel",
            "case", "µs", "±", "call", "GB/s", "TFLOP/s", "roof", "mJ", "Gop/J", "regs", "smem", "occ", "MiB"
        );
        Ok(())
    }

    /// The floor whose images run; none on the CPU.
    fn floor(&self) -> Option<&'static str> {
        self.device.limits().map(|limits| limits.floor.name())
    }

    /// One case: `body` plans, says by [`Self::starts`] what it is about to do, and times it. A failure is printed and
    /// counted, and the next case goes on.
    pub fn case(
        &mut self,
        op: &'static str,
        label: &str,
        body: impl FnOnce(&mut Self) -> Result<(), Failure>,
    ) {
        let name = format!("{op} {label}");
        if !self.filters.is_empty() && !self.filters.iter().any(|filter| name.contains(filter)) {
            return;
        }
        self.num_seen += 1;
        if !(self.num_seen - 1).is_multiple_of(self.every.get()) {
            return;
        }
        self.current =
            Some(Current { op, label: label.to_owned(), work: None, memory_bytes: None, others: Vec::new() });
        if let Err(error) = body(self) {
            println!("{name:<52} FAILED: {error}");
            self.num_failed += 1;
            let failed = json!({ "kind": "failed", "name": name, "reason": error.to_string() });
            if let Err(error) = self.write(&failed) {
                println!("{error}");
            }
        }
    }

    /// Whether the case is timed now: not when cases are only listed, nor on a CPU that would be at it for long.
    pub fn starts(&mut self, work: Work) -> Result<bool, Failure> {
        let (bytes, flops) = (work.bytes, work.flops);
        let current = self.current.as_mut().ok_or("no case has begun")?;
        current.work = Some(work);
        if self.roofline.is_none() {
            println!("{}", current.describe());
            return Ok(false);
        }
        if self.is_cpu() && (bytes > CPU_BYTES || flops > CPU_FLOPS) {
            self.num_skipped += 1;
            return Ok(false);
        }
        Ok(true)
    }

    /// Lists a case that has no operator yet. Nothing where cases are timed.
    pub fn announce(&mut self, op: &'static str, label: &str, work: Work) {
        if self.roofline.is_none() {
            self.case(op, label, |bencher| bencher.starts(work).map(|_| ()));
        }
    }

    /// Sets of buffers for the case's runs, enough to go over three times the L2 cache; one on the CPU.
    pub fn sets<S>(&mut self, make: impl Fn(&Self, u64) -> Result<S, Failure>) -> Result<Vec<S>, Failure> {
        let bytes =
            self.current.as_ref().and_then(|current| current.work.as_ref()).map_or(0, |work| work.bytes);
        let l2_bytes = self.device.profile().l2_bytes as u64;
        let num_sets = if self.is_cpu() { 1 } else { (3 * l2_bytes).div_ceil(bytes.max(1)).clamp(2, 256) };
        let mut sets = vec![make(self, 0)?];
        let held = self.held_bytes() - self.blocks_bytes;
        if let Some(current) = &mut self.current {
            current.memory_bytes = Some(held);
        }
        for seed in 1..num_sets {
            sets.push(make(self, seed)?);
        }
        Ok(sets)
    }

    /// A tensor of normally distributed numbers. A block of a million repeats, begun at a place that the seed gives:
    /// enough to be random for caches and power.
    pub fn random(&self, shape: &[usize], dtype: DType, seed: u64) -> Result<Tensor, Failure> {
        let len: usize = shape.iter().product();
        let mut tensor = Tensor::empty(&self.stream, shape, dtype)?;
        let Some(block) = self.blocks.iter().find(|block| block.dtype() == dtype) else {
            return Err(format!(
                "there are no random numbers of type {dtype}: f32, f16, bf16, f8e4m3 and i8 have some"
            )
            .into());
        };
        // In steps of 16 elements, so that the copies stay aligned.
        let first = Rng::new(seed).below(BLOCK / 16) * 16;
        for start in (0..len).step_by(BLOCK) {
            let part = BLOCK.min(len - start);
            let target = tensor.view_mut().reshape(&[len])?.slice(0, start..start + part)?;
            self.stream.copy(block.view().slice(0, first..first + part)?, target)?;
        }
        Ok(tensor)
    }

    /// Runs on the first set of buffers, checks the result with `verify`, times and prints.
    pub fn time<S>(
        &mut self,
        report: &OptimizationReport,
        sets: &mut [S],
        run: impl Fn(&Stream, &mut S) -> Result<(), Error>,
        verify: impl Fn(&Stream, &S) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        run(&self.stream, &mut sets[0])?;
        self.stream.synchronize()?;
        verify(&self.stream, &sets[0]).map_err(|error| format!("wrong result: {error}"))?;
        let meter = self.meter.as_ref().filter(|_| self.wants_energy());
        let (timing, joules) = timing::time(&self.stream, sets, &run, self.effort(), meter)?;
        self.print(timing, joules, Some(report))
    }

    /// As [`Self::time`] of the plan that was chosen; in a sweep the other kernels that can do the case are timed
    /// before it, but none that takes several times as long as another.
    pub fn time_among<S, P>(
        &mut self,
        report: &OptimizationReport,
        sets: &mut [S],
        (kernels, plan): (impl IntoIterator<Item = &'static str>, impl Fn(&'static str) -> Result<P, Error>),
        chosen: &P,
        run: impl Fn(&P, &Stream, &mut S) -> Result<(), Error>,
        verify: impl Fn(&Stream, &S) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        const TOO_LONG: f64 = 3.0;
        // The fastest of the others so far: its name, microseconds and plan.
        let mut best: Option<(&str, f64, P)> = None;
        let is_alone = self.sweeps.is_empty() || self.chosen_only || self.is_cpu();
        for kernel in kernels.into_iter().filter(|kernel| !is_alone && *kernel != report.variant) {
            let Ok(plan) = plan(kernel) else { continue };
            let run = |stream: &Stream, set: &mut S| run(&plan, stream, set);
            run(&self.stream, &mut sets[0])?;
            let start = self.stream.record()?;
            run(&self.stream, &mut sets[1])?;
            let once_us = f64::from(self.stream.record()?.elapsed_ms(&start)?) * 1e3;
            let best_us = best.as_ref().map_or(f64::INFINITY, |best| best.1);
            // A call by itself takes some microseconds on the host.
            if once_us > TOO_LONG * best_us + 20.0 {
                continue;
            }
            let (timing, _) = timing::time(&self.stream, sets, &run, self.effort(), None)?;
            if let Some(current) = &mut self.current {
                current.others.push((kernel, timing.median_us));
            }
            if timing.median_us < best_us {
                best = Some((kernel, timing.median_us, plan));
            }
        }
        let of_chosen = |stream: &Stream, set: &mut S| run(chosen, stream, set);
        self.time(report, sets, of_chosen, verify)?;
        let Some((kernel, _, plan)) = best.filter(|_| self.check_choice) else { return Ok(()) };
        let of_best = |stream: &Stream, set: &mut S| run(&plan, stream, set);
        let mut least = f64::INFINITY;
        for _ in 0..3 {
            let (best, _) = timing::time(&self.stream, sets, &of_best, self.effort(), None)?;
            let (ours, _) = timing::time(&self.stream, sets, &of_chosen, self.effort(), None)?;
            let behind = (ours.median_us - ours.spread_us) / (best.median_us + best.spread_us);
            least = least.min(behind);
            if least <= MOST_BEHIND {
                return Ok(());
            }
        }
        Err(format!("{kernel} takes less than {} by {:.0} %", report.variant, (least - 1.0) * 100.0).into())
    }

    fn effort(&self) -> Effort {
        if self.sweeps.is_empty() { Effort::CASE } else { Effort::SWEEP }
    }

    /// Prints a case that was timed elsewhere: microseconds of each run, and the joules of one.
    pub fn record(&mut self, samples: Vec<f64>, joules: Option<f64>) -> Result<(), Failure> {
        let held = self.held_bytes() - self.blocks_bytes;
        if let Some(current) = &mut self.current {
            current.memory_bytes = Some(held);
        }
        self.print(Timing::of(samples)?, joules, None)
    }

    /// What reads the energy, if that of the case at hand is wanted and there is something to read.
    pub fn meter(&self) -> Option<&Meter> {
        self.meter.as_ref().filter(|_| self.wants_energy())
    }

    fn wants_energy(&self) -> bool {
        let is_anchor = |current: &Current| current.op == "model" || current.label.starts_with("anchor");
        match self.energy {
            Energy::Off => false,
            Energy::Anchors => self.current.as_ref().is_some_and(is_anchor),
            Energy::All => true,
        }
    }

    fn print(
        &mut self,
        timing: Timing,
        joules: Option<f64>,
        report: Option<&OptimizationReport>,
    ) -> Result<(), Failure> {
        let Timing { median_us, spread_us, num_samples, call_us } = timing;
        let current = self.current.take().ok_or("no case has begun")?;
        let work = current.work.as_ref().ok_or("the case has not said what it does")?;
        let roofline = self.roofline.as_ref().ok_or("nothing was measured to compare with")?;
        let rate = work.bytes as f64 / median_us * 1e-3;
        let flop_rate = work.flops as f64 / median_us * 1e-6;
        let floor_us = roofline.floor_us(work);
        let ops_per_joule = joules.map(|joules| work.flops as f64 / joules);
        let variant = report.map_or("", |report| report.variant);
        let resources = report.and_then(|report| report.resources);
        let occupancy = report.and_then(|report| report.occupancy);
        let mebibytes = current.memory_bytes.map(|bytes| bytes as f64 / (1 << 20) as f64);
        let fastest = current.others.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        let beside = match fastest {
            Some((kernel, us)) if *us < 0.98 * median_us => format!("  {kernel} takes {us:.2}"),
            _ => String::new(),
        };
        println!(
            "{:<52} {median_us:>10.2} {spread_us:>7.2} {:>8} {rate:>7.0} {flop_rate:>8.2} {:>4.0}% {:>8} {:>8} {:>4} {:>6} {:>5} {:>7}  {variant}{beside}",
            current.name(),
            or_dash(call_us.map(|us| format!("{us:.2}"))),
            floor_us / median_us * 100.0,
            or_dash(joules.map(|joules| format!("{:.3}", joules * 1e3))),
            or_dash(ops_per_joule.map(|ops| format!("{:.1}", ops * 1e-9))),
            or_dash(resources.map(|resources| resources.registers)),
            or_dash(resources.map(|resources| resources.smem_bytes)),
            or_dash(occupancy.map(|occupancy| format!("{:.0}%", occupancy * 100.0))),
            or_dash(mebibytes.map(|mebibytes| format!("{mebibytes:.1}"))),
        );
        let mut line = current.describe();
        let measured = json!({
            "us": median_us, "spread_us": spread_us, "samples": num_samples, "call_us": call_us, "joules": joules,
            "kernel": variant, "registers": resources.map(|resources| resources.registers),
            "smem_bytes": resources.map(|resources| resources.smem_bytes), "occupancy": occupancy,
            "memory_bytes": current.memory_bytes, "floor_us": floor_us,
            "others": current.others.iter().copied().collect::<BTreeMap<_, _>>(),
        });
        if let (Value::Object(line), Value::Object(measured)) = (&mut line, measured) {
            line.extend(measured);
        }
        self.num_timed += 1;
        self.write(&line)
    }

    fn write(&mut self, line: &Value) -> Result<(), Failure> {
        if let Some(json) = &mut self.json {
            writeln!(json, "{line}").map_err(|error| format!("cannot write the results: {error}"))?;
        }
        Ok(())
    }

    /// Says how many cases were timed; an error if any failed, or if the filters left none.
    pub fn finish(self) -> Result<(), Failure> {
        let Bencher { num_timed, num_skipped, num_failed, .. } = self;
        if self.roofline.is_none() {
            return Ok(());
        }
        println!("{num_timed} timed, {num_skipped} too large for the CPU, {num_failed} failed");
        if num_failed > 0 {
            return Err(format!("{num_failed} cases failed").into());
        }
        if num_timed + num_skipped == 0 {
            return Err(format!("no case is named like {}", self.filters.join(" or ")).into());
        }
        Ok(())
    }

    pub fn is_cpu(&self) -> bool {
        self.device.limits().is_none()
    }

    fn held_bytes(&self) -> usize {
        self.device.pool().stats().in_use_bytes
    }
}

impl Current {
    fn name(&self) -> String {
        format!("{} {}", self.op, self.label)
    }

    /// The case without its times.
    fn describe(&self) -> Value {
        let Some(Work { dtype, shape, bytes, flops }) = &self.work else { return Value::Null };
        json!({
            "kind": "case", "name": self.name(), "op": self.op, "model": model(&self.label),
            "phase": phase(&self.label), "dtype": dtype, "shape": shape, "bytes": bytes, "flops": flops,
        })
    }
}

/// The model that a case's label begins with.
fn model(label: &str) -> Option<&str> {
    let first = label.split([' ', ',']).next()?;
    ["qwen3", "glm"].iter().any(|family| first.starts_with(family)).then_some(first)
}

/// What the model does in a case, if its label says so: `prefill 2048`, `decode 8`.
fn phase(label: &str) -> Option<String> {
    let words: Vec<&str> = label.split(' ').collect();
    let pair = words.windows(2).find(|pair| {
        ["prefill", "decode"].contains(&pair[0]) && pair[1].chars().all(|c| c.is_ascii_digit())
    })?;
    Some(pair.join(" "))
}

fn or_dash(value: Option<impl fmt::Display>) -> String {
    value.map_or_else(|| "-".into(), |value| value.to_string())
}

/// Checks a sample of a result against the reference: the relative L2 error may be what rounding to `dtype` explains.
pub fn expect_close(dtype: DType, got: &[f64], want: &[f64]) -> Result<(), Failure> {
    let bound = match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 2e-3,
        _ => 1e-2,
    };
    let error = testkit::compare::relative_l2(got, want);
    if error <= bound {
        Ok(())
    } else {
        Err(format!("relative L2 error {error:.2e} is over {bound:.0e}").into())
    }
}

/// The innermost row at the start of a tensor of floats.
pub fn first_row(tensor: &Tensor, stream: &Stream) -> Result<Vec<f64>, Error> {
    let cols = tensor.shape().last().copied().unwrap_or(1);
    floats(tensor.view().reshape(&[tensor.len()])?.slice(0, 0..cols)?, stream)
}

/// What a view of floats holds.
pub fn floats(view: TensorView<'_>, stream: &Stream) -> Result<Vec<f64>, Error> {
    Ok(match view.dtype() {
        DType::F16 => view.to_vec::<half::f16>(stream)?.into_iter().map(f64::from).collect(),
        DType::BF16 => view.to_vec::<half::bf16>(stream)?.into_iter().map(f64::from).collect(),
        DType::F8E4M3 => {
            view.to_vec::<F8E4M3>(stream)?.into_iter().map(|value| value.to_f32().into()).collect()
        }
        _ => view.to_vec::<f32>(stream)?.into_iter().map(f64::from).collect(),
    })
}
