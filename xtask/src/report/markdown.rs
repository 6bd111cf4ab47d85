//! A record as tables.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::Value;

use super::compare::{Change, Comparison};
use super::record::{Case, Record};

/// The cases of the README's table.
const HEADLINES: [&str; 6] = [
    "matmul anchor 8192",
    "matmul anchor 1x19456x2560",
    "matmul_i8 anchor 8192",
    "attention anchor B4 H32 S4096 D128 causal",
    "attention anchor decode B64 H32/8 kv4096 D128",
    "attention anchor decode B1 H32/8 kv32768 D128",
];

/// Geometric mean, smallest and largest.
pub struct Spread {
    pub mean: f64,
    pub least: f64,
    pub most: f64,
    pub count: usize,
}

/// Of the ratios to the fastest peers; none if no case has both.
pub fn ratios<'a>(cases: impl IntoIterator<Item = &'a Case>) -> Option<Spread> {
    let ratios: Vec<f64> = cases.into_iter().filter_map(Case::ratio).collect();
    let logs: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
    Some(Spread {
        mean: (logs / ratios.len() as f64).exp(),
        least: ratios.iter().copied().reduce(f64::min)?,
        most: ratios.iter().copied().reduce(f64::max)?,
        count: ratios.len(),
    })
}

/// The whole report.
pub fn report(record: &Record, date: &str, comparison: Option<&Comparison>) -> String {
    let mut text = format!("# {}, {date}\n\n", record.run.device);
    text += &conditions(record);
    text += "\nThe ratio is the fastest peer's time over ours: above 1 we are faster. *Roof* is the share of what the card \
             reached in this run:\nthe bytes at the copy's rate or the operations at the peak matrix rate, whichever takes \
             longer. Energy is the whole board's.\n*One call* is \
             a run by itself, from event to event, with what it takes on the host; all other times are of graphs.\n\n\
             ![Roofline](roofline.svg)\n\n![Ratios](ratios.svg)\n\n## Operators\n\n";
    text += &summary(record);
    let _ = write!(text, "\n{}", peers_ahead(record));
    text += "\n## Models\n\n";
    text += &models(record);
    text += "\n## Since the last record\n\n";
    text += &changes(comparison);
    for (op, cases) in record.operators() {
        let _ = write!(text, "\n## {op}\n\n{}", cases_table(record, &cases));
    }
    text += "\n## Missing\n\n";
    text += &missing(record);
    text
}

/// What the README says of speed.
pub fn readme(record: &Record, date: &str, folder: &str) -> String {
    let mut text = format!(
        "{}, {date}: [the whole record]({folder}/report.md). Every result was checked before it was timed.\n\
         The ratio is the fastest peer's time over ours: above 1 we are faster.\n\n",
        record.run.device,
    );
    text += "| what | time | fastest peer | ratio |\n|---|---|---|---|\n";
    for case in HEADLINES.iter().filter_map(|name| record.case(name)) {
        if let Some(ours) = &case.ours {
            let name = case.work.name.replace(" anchor ", " ");
            let (time, peer, ratio) = (duration(ours.us), peer_cell(case), ratio_cell(case));
            let _ = writeln!(text, "| {name} | {time} | {peer} | {ratio} |");
        }
    }
    let (count, behind) = behind(record);
    if let Some((worst, _)) = behind.first() {
        let _ = write!(
            text,
            "\nOf the {count} cases that have a peer, the peer was faster in {}, at most with {}.\n",
            behind.len(),
            two(*worst)
        );
    }
    let _ = write!(text, "\n{}", rates_of_models(record));
    text
}

/// The number of cases that have a peer, and those in which it was faster, the worst first.
fn behind(record: &Record) -> (usize, Vec<(f64, &str)>) {
    let mut ratios: Vec<(f64, &str)> =
        record.cases.iter().filter_map(|case| Some((case.ratio()?, case.work.name.as_str()))).collect();
    let count = ratios.len();
    ratios.retain(|&(ratio, _)| ratio < 0.995);
    ratios.sort_by(|a, b| a.0.total_cmp(&b.0));
    (count, ratios)
}

/// The same as a sentence.
fn peers_ahead(record: &Record) -> String {
    let (count, behind) = behind(record);
    let names: Vec<String> = behind.iter().map(|(ratio, name)| format!("{name} ({})", two(*ratio))).collect();
    let names = if names.is_empty() { "none".to_owned() } else { names.join("; ") };
    format!("Of the {count} cases that have a peer, the peer was faster in {}: {names}.\n", behind.len())
}

/// Tokens per second of the models, a line each.
fn rates_of_models(record: &Record) -> String {
    let (mut phases, mut rows) = (Vec::new(), Vec::<(&str, BTreeMap<&str, f64>)>::new());
    for case in record.cases.iter().filter(|case| case.work.op == "model") {
        let (Some(ours), Some(phase)) = (&case.ours, case.work.phase.as_deref()) else { continue };
        let name = label(case).strip_suffix(phase).unwrap_or(label(case)).trim_end_matches([',', ' ']);
        if !phases.contains(&phase) {
            phases.push(phase);
        }
        if rows.last().is_none_or(|(last, _)| *last != name) {
            rows.push((name, BTreeMap::new()));
        }
        if let Some((_, rates)) = rows.last_mut() {
            rates.insert(phase, tokens_of(phase) / ours.us * 1e6);
        }
    }
    let mut text = format!("| tokens/s, bf16, random weights | {} |\n|---|", phases.join(" | "));
    text += &"---|".repeat(phases.len());
    for (name, rates) in rows {
        let cells = phases.iter().map(|phase| or_dash(rates.get(phase).map(|rate| format!("{rate:.0}"))));
        let _ = write!(text, "\n| {name} | {} |", cells.collect::<Vec<_>>().join(" | "));
    }
    text + "\n"
}

/// Tokens of one call: a prefill's number is its tokens, a decode step's its sequences.
fn tokens_of(phase: &str) -> f64 {
    phase.split(' ').nth(1).and_then(|count| count.parse().ok()).unwrap_or(1.0)
}

fn conditions(record: &Record) -> String {
    let run = &record.run;
    let mut text = format!("warpforge {}", run.version);
    if let Some(floor) = &run.floor {
        let _ = write!(text, ", images of {floor}");
    }
    if let Some(Value::Object(card)) = &run.card {
        let known = card.iter().filter(|(_, value)| !value.is_null());
        for (name, value) in known {
            let _ = write!(text, ", {} {}", name.replace('_', " "), plain(value));
        }
    }
    text += match &record.peers {
        Some(Value::Object(peers)) if peers.contains_key("missing") => "; no peers",
        Some(Value::Object(_)) => "; peers:",
        _ => "; no peers",
    };
    if let Some(Value::Object(peers)) = &record.peers {
        let known = peers
            .iter()
            .filter(|(name, value)| !["source", "device"].contains(&&***name) && !value.is_null());
        for (name, value) in known {
            let _ = write!(text, " {name} {}", plain(value));
        }
    }
    let _ = write!(text, ". Copy {:.0} GB/s", run.roofline.copy_gb_per_s);
    for peak in &run.roofline.peaks {
        let _ = write!(text, "; {} {:.1} TFLOP/s ({})", peak.dtype, peak.tflop_per_s, peak.by);
    }
    text + ".\n"
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn summary(record: &Record) -> String {
    let mut text =
        "| operator | cases | with a peer | ratio, geometric mean | least | most | median roof |\n\
                    |---|---|---|---|---|---|---|\n"
            .to_owned();
    for (op, cases) in record.operators() {
        let timed: Vec<&Case> = cases.iter().copied().filter(|case| case.ours.is_some()).collect();
        if timed.is_empty() {
            continue;
        }
        let [mean, least, most, count] = match ratios(cases.iter().copied()) {
            Some(Spread { mean, least, most, count }) => {
                [two(mean), two(least), two(most), count.to_string()]
            }
            None => ["–", "–", "–", "0"].map(str::to_owned),
        };
        let mut roofs: Vec<f64> = timed.iter().filter_map(|case| roof(record, case)).collect();
        roofs.sort_by(f64::total_cmp);
        let median = roofs.get(roofs.len() / 2).copied().unwrap_or(0.0);
        let _ = writeln!(
            text,
            "| {op} | {} | {count} | {mean} | {least} | {most} | {median:.0} % |",
            timed.len()
        );
    }
    text
}

fn models(record: &Record) -> String {
    let mut text = "| model, bf16, random weights | time | tokens/s | memory floor | fastest peer | ratio | J per token |\n\
                    |---|---|---|---|---|---|---|\n"
        .to_owned();
    for case in record.cases.iter().filter(|case| case.work.op == "model") {
        let Some(ours) = &case.ours else { continue };
        let phase = case.work.phase.as_deref().unwrap_or("");
        let tokens = tokens_of(phase);
        let floor = case.work.bytes as f64 / record.run.roofline.copy_gb_per_s * 1e-3;
        let _ = writeln!(
            text,
            "| {} | {} | {:.0} | {} | {} | {} | {} |",
            label(case),
            time_cell(case),
            tokens / ours.us * 1e6,
            duration(floor),
            peer_cell(case),
            ratio_cell(case),
            or_dash(ours.joules.map(|joules| format!("{:.3}", joules / tokens))),
        );
    }
    text
}

fn changes(comparison: Option<&Comparison>) -> String {
    let Some(Comparison { folder, not_comparable, slower, faster, gone }) = comparison else {
        return "There is none of this card.\n".into();
    };
    let before = folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    if let Some(reason) = not_comparable {
        return format!("[{before}](../{before}/report.md) is of something else: {reason}.\n");
    }
    let mut text = format!(
        "Against [{before}](../{before}/report.md): {} slower by more than 5 % beyond their spread, {} faster, {} gone.\n",
        slower.len(),
        faster.len(),
        gone.len()
    );
    for (title, changes) in [("slower", slower), ("faster", faster)] {
        if !changes.is_empty() {
            let _ = write!(text, "\n| {title} | before | now | now / before |\n|---|---|---|---|\n");
        }
        for Change { name, before_us, now_us } in changes {
            let (before, now) = (duration(*before_us), duration(*now_us));
            let _ = writeln!(text, "| {name} | {before} | {now} | {} |", two(now_us / before_us));
        }
    }
    if !gone.is_empty() {
        let _ = write!(text, "\nGone: {}.\n", gone.join("; "));
    }
    text
}

fn cases_table(record: &Record, cases: &[&Case]) -> String {
    let mut text = "| case | time | rate | roof | fastest peer | ratio | one call | peer's | other peers | energy | peer's | Gop/J | kernel | \
                    registers | shared | occupancy | memory |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for case in cases {
        let ours = case.ours.as_ref();
        let best = case.best_peer();
        let others: Vec<String> = case
            .peers
            .iter()
            .filter(|peer| best.is_none_or(|best| best.peer != peer.peer))
            .map(|peer| format!("{} {}", peer.peer, duration(peer.us)))
            .collect();
        let joules = ours.and_then(|ours| ours.joules);
        let memory = ours.and_then(|ours| ours.memory_bytes);
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            label(case),
            time_cell(case),
            rate_cell(case),
            roof_cell(record, case),
            peer_cell(case),
            ratio_cell(case),
            or_dash(ours.and_then(|ours| ours.call_us).map(duration)),
            or_dash(best.and_then(|best| best.call_us).map(duration)),
            or_dash((!others.is_empty()).then(|| others.join("; "))),
            or_dash(joules.map(energy)),
            or_dash(best.and_then(|best| best.joules).map(energy)),
            or_dash(joules.map(|joules| format!("{:.0}", case.work.flops as f64 / joules * 1e-9))),
            or_dash(ours.map(|ours| ours.kernel.clone()).filter(|kernel| !kernel.is_empty())),
            or_dash(ours.and_then(|ours| ours.registers).map(|registers| registers.to_string())),
            or_dash(ours.and_then(|ours| ours.smem_bytes).map(|bytes| format!("{bytes} B"))),
            or_dash(ours.and_then(|ours| ours.occupancy).map(|share| format!("{:.0} %", share * 100.0))),
            or_dash(memory.map(|bytes| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)))),
        );
    }
    text
}

/// A case's name without its operator.
fn label(case: &Case) -> &str {
    case.work.name.strip_prefix(&*case.work.op).unwrap_or(&case.work.name).trim()
}

fn missing(record: &Record) -> String {
    let mut reasons: BTreeMap<(String, &str), Vec<&str>> = BTreeMap::new();
    for case in &record.cases {
        for missing in &case.missing {
            let who = missing.peer.clone().unwrap_or_else(|| "warpforge".into());
            reasons.entry((who, &missing.reason)).or_default().push(&case.work.name);
        }
    }
    if reasons.is_empty() {
        return "Nothing.\n".into();
    }
    let mut text = String::new();
    for ((who, reason), names) in reasons {
        let more = if names.len() > 3 { format!(" and {} more", names.len() - 3) } else { String::new() };
        let names = names[..names.len().min(3)].join("; ");
        let _ = writeln!(text, "- {who}: {reason} ({names}{more})");
    }
    text
}

fn roof(record: &Record, case: &Case) -> Option<f64> {
    Some(record.run.roofline.floor_us(&case.work) / case.ours.as_ref()?.us * 100.0)
}

fn roof_cell(record: &Record, case: &Case) -> String {
    or_dash(roof(record, case).map(|roof| format!("{roof:.0} %")))
}

fn time_cell(case: &Case) -> String {
    let cell = case.ours.as_ref().map(|ours| format!("{} ± {}", duration(ours.us), duration(ours.spread_us)));
    or_dash(cell)
}

/// What bounds the work decides: operations where there are many for each byte, as in a product, else bytes.
fn rate_cell(case: &Case) -> String {
    const MANY: u64 = 64;
    let work = &case.work;
    or_dash(case.ours.as_ref().map(|ours| {
        if work.flops >= MANY * work.bytes {
            format!("{:.1} TFLOP/s", work.flops as f64 / ours.us * 1e-6)
        } else {
            format!("{:.0} GB/s", work.bytes as f64 / ours.us * 1e-3)
        }
    }))
}

fn peer_cell(case: &Case) -> String {
    let cell = case.best_peer().map(|peer| {
        let note = if peer.note.is_empty() { String::new() } else { format!(" ({})", peer.note) };
        format!("{} {}{note}", peer.peer, duration(peer.us))
    });
    or_dash(cell)
}

fn ratio_cell(case: &Case) -> String {
    or_dash(case.ratio().map(two))
}

fn or_dash(cell: Option<String>) -> String {
    cell.unwrap_or_else(|| "–".into())
}

fn two(value: f64) -> String {
    format!("{value:.2}")
}

fn duration(us: f64) -> String {
    match us {
        1e6.. => format!("{:.2} s", us * 1e-6),
        1e4.. => format!("{:.1} ms", us * 1e-3),
        1e3.. => format!("{:.2} ms", us * 1e-3),
        100.0.. => format!("{us:.0} µs"),
        10.0.. => format!("{us:.1} µs"),
        _ => format!("{us:.2} µs"),
    }
}

fn energy(joules: f64) -> String {
    match joules {
        1.0.. => format!("{joules:.2} J"),
        1e-3.. => format!("{:.2} mJ", joules * 1e3),
        _ => format!("{:.2} µJ", joules * 1e6),
    }
}
