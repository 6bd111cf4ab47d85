//! The files of a measurement, and the record that they are joined to.
//!
//! `ours.jsonl` comes from `cargo bench --bench ops -- --json`, `peers.jsonl` from `benches/peers/peers.py --json`: one
//! JSON object per line, told apart by `kind`. Both name a case alike, which is what they are joined by.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Error;

/// A measurement of one card.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    pub run: Run,
    /// What the peers were; none if they were not run.
    pub peers: Option<Value>,
    pub cases: Vec<Case>,
}

/// What was measured on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    pub version: String,
    /// Seconds since 1970.
    pub unix_time: u64,
    pub device: String,
    /// The floor whose images ran; none on a CPU.
    pub floor: Option<String>,
    /// Seconds that a case ran before it was timed; none in records from before there was such a time.
    pub warm_seconds: Option<f64>,
    /// Driver, power limit and clocks, as far as they could be read.
    pub card: Option<Value>,
    pub roofline: Roofline,
}

/// What the card reached in this run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Roofline {
    /// Of a device-to-device copy, bytes read and written.
    pub copy_gb_per_s: f64,
    pub peaks: Vec<Peak>,
}

/// A matrix rate.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Peak {
    pub dtype: String,
    pub tflop_per_s: f64,
    pub by: String,
}

/// What a case is, and how long it took.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Case {
    #[serde(flatten)]
    pub work: Work,
    /// None if there is no such operator yet, or if it failed.
    pub ours: Option<Ours>,
    pub peers: Vec<Peer>,
    pub missing: Vec<Missing>,
}

/// What a case is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Work {
    pub name: String,
    pub op: String,
    pub model: Option<String>,
    pub phase: Option<String>,
    pub dtype: String,
    pub shape: Value,
    /// Fewest bytes and operations of one run.
    pub bytes: u64,
    pub flops: u64,
}

/// Our time of a case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ours {
    /// Median, and distance between the quartiles.
    pub us: f64,
    pub spread_us: f64,
    pub samples: usize,
    /// Of a single call that is not in a graph.
    pub call_us: Option<f64>,
    pub joules: Option<f64>,
    pub kernel: String,
    pub registers: Option<u32>,
    pub smem_bytes: Option<u32>,
    pub occupancy: Option<f64>,
    /// Device memory of one set of tensors and of what the plan holds.
    pub memory_bytes: Option<u64>,
    /// Of a sweep: microseconds of other kernels at the case.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub others: BTreeMap<String, f64>,
}

/// A peer's time of a case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Peer {
    pub peer: String,
    pub us: f64,
    pub spread_us: f64,
    pub samples: usize,
    /// Of a single call that is not in a graph.
    pub call_us: Option<f64>,
    pub joules: Option<f64>,
    /// What should be known of the number.
    pub note: String,
}

/// What has no time, and why. Nobody is our own.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Missing {
    pub peer: Option<String>,
    pub reason: String,
}

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum OurLine {
    Run(Run),
    Case {
        #[serde(flatten)]
        work: Work,
        #[serde(flatten)]
        ours: Ours,
    },
    Failed {
        name: String,
        reason: String,
    },
}

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum PeerLine {
    Run(Value),
    Peer {
        #[serde(flatten)]
        work: Work,
        #[serde(flatten)]
        time: Peer,
    },
    Missing {
        name: String,
        peer: String,
        reason: String,
    },
    /// Already in our run's roofline.
    Peak {},
}

impl Record {
    /// Joins `ours.jsonl` and `peers.jsonl` of a folder; the latter may be missing.
    pub fn join(folder: &Path) -> Result<Self, Error> {
        let ours = folder.join("ours.jsonl");
        let mut run = None;
        let mut cases = Cases::default();
        for line in lines(&ours)? {
            match line {
                OurLine::Run(value) => run = Some(value),
                OurLine::Case { work, ours: time } => {
                    let case = cases.of(&work);
                    if case.ours.replace(time).is_some() {
                        return Err(Error::TwiceTimed { path: ours, name: work.name });
                    }
                }
                OurLine::Failed { name, reason } => cases.miss(name, None, reason),
            }
        }
        let Some(mut run) = run else { return Err(Error::NoRun { path: ours }) };
        let (file, mut peers) = (folder.join("peers.jsonl"), None);
        if file.exists() {
            for line in lines(&file)? {
                match line {
                    PeerLine::Run(value) => peers = Some(value),
                    PeerLine::Peer { work, time } => cases.of(&work).peers.push(time),
                    PeerLine::Missing { name, peer, reason } => cases.miss(name, Some(peer), reason),
                    PeerLine::Peak {} => {}
                }
            }
        }
        let cases = cases.finish();
        run.roofline.raise(&cases);
        Ok(Record { run, peers, cases })
    }

    /// Reads a record that was written before.
    pub fn read(file: &Path) -> Result<Self, Error> {
        let text = read(file)?;
        serde_json::from_str(&text).map_err(|source| Error::Json { path: file.into(), line: 1, source })
    }

    /// As JSON, each case on a line of its own, so that two records can be told apart line by line.
    pub fn to_json(&self) -> serde_json::Result<String> {
        let run = serde_json::to_string(&self.run)?;
        let peers = serde_json::to_string(&self.peers)?;
        let cases = self.cases.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
        Ok(format!("{{\"run\":{run},\n\"peers\":{peers},\n\"cases\":[\n{}\n]}}\n", cases.join(",\n")))
    }

    /// The operators in order of their names, models last, with their cases.
    pub fn operators(&self) -> Vec<(&str, Vec<&Case>)> {
        let mut operators: BTreeMap<(bool, &str), Vec<&Case>> = BTreeMap::new();
        for case in &self.cases {
            let op = case.work.op.as_str();
            operators.entry((op == "model", op)).or_default().push(case);
        }
        operators.into_iter().map(|((_, op), cases)| (op, cases)).collect()
    }

    pub fn case(&self, name: &str) -> Option<&Case> {
        self.cases.iter().find(|case| case.work.name == name)
    }
}

impl Case {
    /// The fastest peer.
    pub fn best_peer(&self) -> Option<&Peer> {
        self.peers.iter().min_by(|a, b| a.us.total_cmp(&b.us))
    }

    /// The fastest peer's time over ours: above 1 we are faster.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.best_peer()?.us / self.ours.as_ref()?.us)
    }
}

impl Roofline {
    /// A rate that a case reached is one that the card reaches.
    fn raise(&mut self, cases: &[Case]) {
        for Case { work, ours, peers, .. } in cases {
            let reached = peers.iter().map(|peer| (peer.peer.as_str(), peer.us));
            for (by, us) in reached.chain(ours.as_ref().map(|ours| ("warpforge", ours.us))) {
                let (dtype, rate) = (peak_dtype(&work.dtype), work.flops as f64 / us * 1e-6);
                if let Some(peak) = self.peaks.iter_mut().find(|peak| peak.dtype == dtype)
                    && rate > peak.tflop_per_s
                {
                    (peak.tflop_per_s, peak.by) = (rate, format!("{by} at {}", work.name));
                }
            }
        }
    }

    /// Microseconds that the work takes at least.
    pub fn floor_us(&self, work: &Work) -> f64 {
        let memory = work.bytes as f64 / self.copy_gb_per_s * 1e-3;
        let peak = self.peaks.iter().find(|peak| peak.dtype == peak_dtype(&work.dtype));
        peak.map_or(memory, |peak| memory.max(work.flops as f64 / peak.tflop_per_s * 1e-6))
    }
}

/// The type whose peak counts: the tensor cores do f16 and bf16 at one rate.
fn peak_dtype(dtype: &str) -> &str {
    if dtype == "f16" { "bf16" } else { dtype }
}

/// Cases in the order in which they were met.
#[derive(Default)]
struct Cases {
    cases: Vec<Case>,
    places: BTreeMap<String, usize>,
    missing: Vec<(String, Missing)>,
}

impl Cases {
    fn of(&mut self, work: &Work) -> &mut Case {
        let cases = &mut self.cases;
        let place = *self.places.entry(work.name.clone()).or_insert_with(|| {
            cases.push(Case { work: work.clone(), ours: None, peers: Vec::new(), missing: Vec::new() });
            cases.len() - 1
        });
        &mut cases[place]
    }

    fn miss(&mut self, name: String, peer: Option<String>, reason: String) {
        self.missing.push((name, Missing { peer, reason }));
    }

    /// What is missing at a case that nobody has timed leaves no trace but this: there is nothing to show of it.
    fn finish(mut self) -> Vec<Case> {
        for (name, missing) in self.missing {
            if let Some(&place) = self.places.get(&name) {
                self.cases[place].missing.push(missing);
            } else {
                println!("{name}: {}", missing.reason);
            }
        }
        self.cases
    }
}

fn lines<T: DeserializeOwned>(file: &Path) -> Result<Vec<T>, Error> {
    let text = read(file)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(index, line)| {
            serde_json::from_str(line).map_err(|source| Error::Json {
                path: file.into(),
                line: index + 1,
                source,
            })
        })
        .collect()
}

pub fn read(file: &Path) -> Result<String, Error> {
    fs::read_to_string(file).map_err(|source| Error::File { path: file.into(), source })
}
