//! `cargo xtask tune`: what the tiles of Hopper's 16-bit products take, fitted to a sweep that has timed every kernel
//! of each shape.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use abi::ops::matmul::{MatmulTile, TIME_TERMS, TimedTile, WGMMA_VARIANTS};
use serde_json::Value;

use crate::error::Error;

/// Rows from which on the choice goes by these factors.
const FEWEST_ROWS: u64 = 65;
/// A tile's time counts by its share of the best one's to this power: what is far from being chosen may be modelled
/// worse.
const NEARNESS: i32 = 6;
/// Rounds of the least squares, one factor after the other.
const ROUNDS: usize = 4000;
/// The table that is written.
const TABLE: &str = "host/src/ops/matmul/tuned.rs";

/// Multiprocessors of the cards whose sweeps are known.
fn num_sms(card: &str) -> Option<u32> {
    match card {
        "NVIDIA H200" | "NVIDIA H100 80GB HBM3" => Some(132),
        _ => None,
    }
}

/// A shape, and what tiles took of it, in microseconds.
#[derive(Debug)]
struct Shape {
    sizes: [u32; 3],
    times: BTreeMap<TimedTile, (MatmulTile, f64)>,
}

impl Shape {
    fn best(&self) -> f64 {
        self.times.values().map(|&(_, us)| us).fold(f64::INFINITY, f64::min)
    }
}

/// The tile of a kernel that has factors: those of bf16 are timed.
fn tile_of(entry: &str) -> Option<(TimedTile, MatmulTile)> {
    let of_bf16 = |entry: &str| entry.starts_with("matmul_bf16__");
    let variant = WGMMA_VARIANTS.iter().find(|variant| variant.entry == entry && of_bf16(entry))?;
    Some((variant.tile.timed()?, variant.tile))
}

/// The card and the shapes of what `cargo bench --bench ops -- --sweep matmul --json FILE` has written.
fn read(path: &Path) -> Result<(String, Vec<Shape>), Error> {
    let text = fs::read_to_string(path).map_err(|source| Error::File { path: path.into(), source })?;
    let (mut card, mut shapes) = (String::new(), Vec::new());
    for (index, line) in text.lines().enumerate() {
        let wrong = |reason: String| Error::Table { path: path.into(), line: index + 1, reason };
        let line: Value = serde_json::from_str(line).map_err(|source| Error::Json {
            path: path.into(),
            line: index + 1,
            source,
        })?;
        match line["kind"].as_str() {
            Some("run") => card = line["device"].as_str().unwrap_or_default().to_owned(),
            Some("case") if line["op"] == "matmul" => {
                let size = |name: &str| {
                    let size = line["shape"][name].as_u64().filter(|&size| size <= u64::from(u32::MAX));
                    size.ok_or_else(|| wrong(format!("a shape without {name}")))
                };
                let (m, n, k) = (size("m")?, size("n")?, size("k")?);
                let others = line["others"].as_object().into_iter().flatten();
                let others = others.filter_map(|(entry, us)| Some((entry.as_str(), us.as_f64()?)));
                let chosen = line["kernel"].as_str().zip(line["us"].as_f64());
                let times: BTreeMap<_, _> = others
                    .chain(chosen)
                    .filter_map(|(entry, us)| tile_of(entry).map(|(key, tile)| (key, (tile, us))))
                    .collect();
                if m >= FEWEST_ROWS && times.len() > 1 {
                    shapes.push(Shape { sizes: [m, n, k].map(|size| size as u32), times });
                }
            }
            _ => {}
        }
    }
    Ok((card, shapes))
}

/// Factors, none below 0, of the least weighted squares of `row · factors − 1`.
fn least_squares(rows: &[([f64; TIME_TERMS], f64)]) -> [f64; TIME_TERMS] {
    let sum = |term: &dyn Fn(&[f64; TIME_TERMS]) -> f64| {
        rows.iter().map(|(row, weight)| weight * term(row)).sum::<f64>()
    };
    let square: [[f64; TIME_TERMS]; TIME_TERMS] =
        std::array::from_fn(|i| std::array::from_fn(|j| sum(&|row| row[i] * row[j])));
    let right: [f64; TIME_TERMS] = std::array::from_fn(|i| sum(&|row| row[i]));
    let mut factors = [0.0f64; TIME_TERMS];
    for _ in 0..ROUNDS {
        for i in 0..TIME_TERMS {
            if square[i][i] > 0.0 {
                let of_others: f64 =
                    (0..TIME_TERMS).filter(|&j| j != i).map(|j| square[i][j] * factors[j]).sum();
                factors[i] = ((right[i] - of_others) / square[i][i]).max(0.0);
            }
        }
    }
    factors
}

type Factors = BTreeMap<TimedTile, [f64; TIME_TERMS]>;

/// The factors of each tile.
fn fit(shapes: &[Shape], num_sms: u32) -> Factors {
    let mut rows: BTreeMap<TimedTile, Vec<([f64; TIME_TERMS], f64)>> = BTreeMap::new();
    for shape in shapes {
        let best = shape.best();
        for (&key, &(tile, us)) in &shape.times {
            if let Some(terms) = tile.time_terms(shape.sizes, num_sms) {
                let row = terms.map(|term| f64::from(term) / us);
                rows.entry(key).or_default().push((row, (best / us).powi(NEARNESS)));
            }
        }
    }
    rows.into_iter().map(|(key, rows)| (key, least_squares(&rows))).collect()
}

/// How many times as long as the best tile the one of the least modelled time takes: the geometric mean over the
/// shapes.
fn behind(shapes: &[Shape], factors: &Factors, num_sms: u32) -> f64 {
    let of_shape = |shape: &Shape| {
        let modelled = |(key, &(tile, us)): (&TimedTile, &(MatmulTile, f64))| {
            let factors = factors.get(key)?.map(|factor| factor as f32);
            Some((tile.micros(factors, shape.sizes, num_sms)?, us))
        };
        let modelled = shape.times.iter().filter_map(modelled);
        let chosen = modelled.min_by(|a, b| a.0.partial_cmp(&b.0).unwrap_or(Ordering::Equal));
        chosen.map_or(0.0, |(_, us)| (us / shape.best()).ln())
    };
    (shapes.iter().map(of_shape).sum::<f64>() / shapes.len() as f64).exp()
}

/// The table's source.
fn table(factors: &Factors, [shapes, card, behind, record]: [&str; 4]) -> String {
    let mut text = format!(
        "//! What the tiles of Hopper's 16-bit products take: written by `cargo xtask tune`, not by hand.\n//!\n\
         //! From {shapes} shapes on an {card}, where the tile of the least modelled time took {behind} of the\n\
         //! best one's in the mean: `{record}`.\n\n\
         use abi::ops::matmul::TileKind;\n\nuse super::tuning::Tuned;\n\npub(super) const TUNED: &[Tuned] = &[\n"
    );
    for ((kind, rows, cols, cluster), factors) in factors {
        let numbers = factors.map(|factor| format!("{factor:.5}")).join(", ");
        // A text takes all that is written.
        let _ =
            writeln!(text, "    Tuned::new((TileKind::{kind:?}, {rows}, {cols}, {cluster}), [{numbers}]),");
    }
    text + "];\n"
}

/// Fits the factors to the results of a sweep, of which `record` is the record, and writes the table.
pub fn run(root: &Path, results: &str, record: &str) -> Result<(), Error> {
    let path = PathBuf::from(results);
    let (card, shapes) = read(&path)?;
    let wrong = |reason: String| Error::Table { path: path.clone(), line: 1, reason };
    let num_sms = num_sms(&card)
        .ok_or_else(|| wrong(format!("a sweep of an H100 or H200 is wanted, not of `{card}`")))?;
    if shapes.is_empty() {
        return Err(wrong("no shape of 65 rows or more has times of several tiles".into()));
    }
    let factors = fit(&shapes, num_sms);
    let behind = format!("{:.3}", behind(&shapes, &factors, num_sms));
    let text = table(&factors, [&shapes.len().to_string(), &card, &behind, record]);
    let to = root.join(TABLE);
    fs::write(&to, text).map_err(|source| Error::File { path: to, source })?;
    println!(
        "{TABLE}: {} tiles from {} shapes, {behind} of the best tile's time in the mean",
        factors.len(),
        shapes.len()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times that the model makes give their factors back, and the tile of the least time is chosen.
    #[test]
    fn factors_come_back() {
        // All far above what the memory takes.
        let want = |key: &TimedTile| [1.0, 2.0, 0.0, f64::from(key.2) / 10.0, 0.0, 15.0];
        let variants = || WGMMA_VARIANTS.iter().filter(|variant| variant.entry.starts_with("matmul_bf16__"));
        let mut lines = vec![r#"{"kind": "run", "device": "NVIDIA H200"}"#.to_owned()];
        for (m, n, k) in
            [(65, 4096, 4096), (128, 2560, 9728), (300, 1024, 3072), (777, 6144, 2560), (2000, 8192, 1024)]
                .into_iter()
                .flat_map(|(m, n, k)| [(m, n, k), (2 * m, n, k), (m, 3 * n, k)])
        {
            let time = |tile: MatmulTile| {
                let terms = tile.time_terms([m, n, k], 132).unwrap();
                let factors = want(&tile.timed().unwrap());
                std::iter::zip(terms, factors).map(|(term, factor)| f64::from(term) * factor).sum::<f64>()
            };
            let times: BTreeMap<&str, f64> =
                variants().map(|variant| (variant.entry, time(variant.tile))).collect();
            let (kernel, us) = times.iter().next().unwrap();
            let others = serde_json::to_string(&times).unwrap();
            lines.push(format!(
                r#"{{"kind": "case", "op": "matmul", "shape": {{"m": {m}, "n": {n}, "k": {k}}}, "kernel": "{kernel}", "us": {us}, "others": {others}}}"#
            ));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ours.jsonl");
        fs::write(&path, lines.join("\n")).unwrap();
        let (card, shapes) = read(&path).unwrap();
        assert_eq!((card.as_str(), shapes.len()), ("NVIDIA H200", 15));
        let factors = fit(&shapes, 132);
        assert_eq!(
            factors.len(),
            variants()
                .filter_map(|variant| variant.tile.timed())
                .collect::<std::collections::BTreeSet<_>>()
                .len()
        );
        for (key, found) in &factors {
            for shape in &shapes {
                let (tile, us) = shape.times[key];
                let terms = tile.time_terms(shape.sizes, 132).unwrap();
                let modelled: f64 =
                    std::iter::zip(terms, found).map(|(term, factor)| f64::from(term) * factor).sum();
                assert!((modelled / us - 1.0).abs() < 0.02, "{key:?} at {:?}: {modelled}, {us}", shape.sizes);
            }
        }
        assert!(behind(&shapes, &factors, 132) < 1.01);
        fs::create_dir_all(folder.path().join("host/src/ops/matmul")).unwrap();
        run(folder.path(), path.to_str().unwrap(), "a record").unwrap();
        let text = fs::read_to_string(folder.path().join(TABLE)).unwrap();
        assert!(text.contains("From 15 shapes on an NVIDIA H200") && text.contains("`a record`"), "{text}");
        assert!(text.contains("Tuned::new((TileKind::Swapped, 128, 96, 2), ["), "{text}");
    }

    /// A card that is not known, and a line that is none, are named.
    #[test]
    fn bad_sweeps() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ours.jsonl");
        let message = |text: &str| {
            fs::write(&path, text).unwrap();
            run(folder.path(), path.to_str().unwrap(), "").unwrap_err().to_string()
        };
        assert!(message(r#"{"kind": "run", "device": "NVIDIA A100"}"#).ends_with("not of `NVIDIA A100`"));
        assert!(message(r#"{"kind": "run", "device": "NVIDIA H200"}"#).contains("several tiles"));
        assert!(message("{}\n{").contains(", line 2: "), "{}", message("{}\n{"));
        assert!(message(r#"{"kind": "case", "op": "matmul", "shape": {"m": 1}}"#).ends_with("without n"));
    }
}
