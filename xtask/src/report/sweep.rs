//! A sweep as a record: a table of each operator, its worst shapes, and a heat map.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use super::plots;
use super::record::{Case, Record};
use super::write;
use crate::error::Error;

/// Shapes of the table of the worst.
const WORST: usize = 20;

/// Writes `sweep.md`, and `<operator>.svg` for each operator that a peer has been timed beside.
pub fn run(record: &Record, date: &str, out: &Path) -> Result<(), Error> {
    write(&out.join("sweep.md"), &markdown(record, date))?;
    for (op, cases) in record.operators() {
        let cells: Vec<_> = cases.iter().filter_map(|case| Some((place(case), case.ratio()?))).collect();
        if !cells.is_empty() {
            let title = format!("{op} on {}: the fastest peer's time over ours", record.run.device);
            plots::heat_map(&title, &cells, &out.join(format!("{op}.svg")))?;
        }
    }
    println!("{}", out.join("sweep.md").display());
    Ok(())
}

/// Where a case stands in the heat map: its row, and its column.
fn place(case: &Case) -> (String, String) {
    let label = case.work.name.split_once(" sweep ").map_or(case.work.name.as_str(), |(_, label)| label);
    // Products by their weights; attention by its heads; experts by the part; rows by their columns.
    let (col, row) = match case.work.op.as_str() {
        "attention" => {
            let mut words = label.splitn(3, ' ');
            let (kind, sizes) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            return (words.next().unwrap_or_default().into(), format!("{kind} {sizes}"));
        }
        "grouped_matmul" => {
            let (row, col) = label.rsplit_once(", ").unwrap_or(("", label));
            (col, row)
        }
        _ => label.split_once('x').unwrap_or((label, "")),
    };
    (row.into(), col.into())
}

/// The mean of ratios, which is geometric; 1 of none.
fn mean(ratios: impl Iterator<Item = f64> + Clone) -> f64 {
    let count = ratios.clone().count().max(1);
    (ratios.map(f64::ln).sum::<f64>() / count as f64).exp()
}

fn markdown(record: &Record, date: &str) -> String {
    let mut text = format!("# A sweep, {}, {date}\n\n", record.run.device);
    text.push_str(
        "The fastest peer's time over ours, of each shape once, for 40 ms, warm (`cargo bench --bench ops -- --sweep`). \
         *Behind the best*: our time over that of the best of the kernels that were timed at the shape, where they were.\n\n",
    );
    text.push_str("| operator | shapes | mean | below 1.00 | below 0.95 | least | behind the best |\n");
    text.push_str("|---|---|---|---|---|---|---|\n");
    for (op, cases) in record.operators() {
        let ratios = cases.iter().filter_map(|case| case.ratio());
        let below = |limit: f64| ratios.clone().filter(|ratio| *ratio < limit).count();
        let behind = cases.iter().filter_map(|case| behind(case));
        let behind = match behind.clone().count() {
            0 => "-".to_owned(),
            _ => format!("{:.3}", mean(behind)),
        };
        let (count, least) = (ratios.clone().count(), ratios.clone().fold(f64::INFINITY, f64::min));
        let _ = writeln!(
            text,
            "| {op} | {count} | {:.2} | {} | {} | {least:.2} | {behind} |",
            mean(ratios.clone()),
            below(1.0),
            below(0.95)
        );
    }
    for (op, cases) in record.operators() {
        let mut groups: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for case in &cases {
            if let Some(ratio) = case.ratio() {
                groups.entry(group(case)).or_default().push(ratio);
            }
        }
        if groups.len() > 1 {
            let _ = writeln!(text, "\n## {op} by kind\n\n| kind | shapes | mean | below 0.95 | least |");
            text.push_str("|---|---|---|---|---|\n");
            for (group, ratios) in groups {
                let low = ratios.iter().filter(|ratio| **ratio < 0.95).count();
                let (least, all) = (ratios.iter().copied().fold(f64::INFINITY, f64::min), ratios.len());
                let mean = mean(ratios.iter().copied());
                let _ = writeln!(text, "| {group} | {all} | {mean:.2} | {low} | {least:.2} |");
            }
        }
        let mut worst: Vec<_> = cases.iter().filter_map(|case| Some((case.ratio()?, *case))).collect();
        worst.sort_by(|a, b| a.0.total_cmp(&b.0));
        let _ = writeln!(
            text,
            "\n## {op}: the worst\n\n| shape | µs | peer | ratio | kernel | behind the best |"
        );
        text.push_str("|---|---|---|---|---|---|\n");
        for (ratio, case) in worst.into_iter().take(WORST) {
            let (Some(ours), Some(peer)) = (&case.ours, case.best_peer()) else { continue };
            let behind = behind(case).map_or("-".into(), |behind| format!("{behind:.2}"));
            let name =
                case.work.name.split_once(" sweep ").map_or(case.work.name.as_str(), |(_, label)| label);
            let _ = writeln!(
                text,
                "| {name} | {:.1} | {:.1} ({}) | {ratio:.2} | `{}` | {behind} |",
                ours.us, peer.us, peer.peer, ours.kernel
            );
        }
    }
    text
}

/// What a case is summed up with: products by their rows, attention by what it does.
fn group(case: &Case) -> String {
    let (_, col) = place(case);
    match (case.work.op.as_str(), col.parse::<u32>()) {
        ("attention", _) => col.split(' ').next().unwrap_or_default().into(),
        ("matmul", Ok(rows)) => {
            // Padded, so that they sort by their numbers.
            let ranges = [(1, 1), (2, 16), (17, 64), (65, 128), (129, 512), (513, 2048), (2049, u32::MAX)];
            let range = ranges.iter().find(|(low, high)| (*low..=*high).contains(&rows));
            match range {
                Some((low, u32::MAX)) => format!("{low:>4} rows and more"),
                Some((low, high)) if low == high => format!("{low:>4} row"),
                Some((low, high)) => format!("{low:>4} to {high} rows"),
                None => String::new(),
            }
        }
        _ => String::new(),
    }
}

/// Our time over that of the best kernel that was timed; at least 1, as the one of a plan is one of them.
fn behind(case: &Case) -> Option<f64> {
    let ours = case.ours.as_ref()?;
    let best = ours.others.values().copied().reduce(f64::min)?;
    // The two times of one kernel differ by chance.
    let own = ours.others.get(&ours.kernel).copied().unwrap_or(ours.us);
    Some((own / best).max(1.0))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn case(name: &str, us: f64, peer: f64, others: serde_json::Value) -> Case {
        serde_json::from_value(json!({
            "name": name, "op": name.split(' ').next(), "model": null, "phase": null, "dtype": "bf16", "shape": {},
            "bytes": 1, "flops": 1,
            "ours": { "us": us, "spread_us": 0.1, "samples": 4, "call_us": null, "joules": null, "kernel": "a",
                "registers": null, "smem_bytes": null, "occupancy": null, "memory_bytes": null, "others": others },
            "peers": [{ "peer": "p", "us": peer, "spread_us": 0.1, "samples": 4, "call_us": null, "joules": null, "note": "" }],
            "missing": [],
        }))
        .unwrap()
    }

    #[test]
    fn places_and_what_is_behind() {
        let product = case("matmul sweep 129x4096x1024", 12.0, 10.0, json!({ "a": 11.0, "b": 10.0 }));
        assert_eq!(place(&product), ("4096x1024".into(), "129".into()));
        assert_eq!(group(&product), " 129 to 512 rows");
        assert_eq!(behind(&product), Some(1.1));
        let chunk = case("attention sweep chunk 1x17x3000 32/8 of 128", 1.0, 2.0, json!({}));
        assert_eq!(place(&chunk), ("32/8 of 128".into(), "chunk 1x17x3000".into()));
        assert_eq!((group(&chunk), behind(&chunk)), ("chunk".into(), None));
        let experts = case("grouped_matmul sweep down 64 experts, 8 tokens of 4", 1.0, 1.0, json!({}));
        assert_eq!(place(&experts), ("down 64 experts".into(), "8 tokens of 4".into()));
    }

    #[test]
    fn means_are_geometric() {
        assert_eq!(mean([0.5, 2.0].into_iter()), 1.0);
        assert_eq!(mean([].into_iter()), 1.0);
    }
}
