//! `cargo xtask bench-report --timeline FILE.csv`: one step of a model, kernel after kernel, as Nsight Compute has
//! measured each by itself: how long it took, and how many bytes it moved.

use std::path::{Path, PathBuf};

use super::plots;
use super::record::read;
use crate::error::Error;

/// A launch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Launch {
    /// The entry point's name.
    pub(super) kernel: String,
    /// How long it took by itself.
    pub(super) ns: f64,
    /// What it read from memory and wrote there.
    pub(super) bytes: f64,
}

impl Launch {
    /// The operator: what the kernel's name begins with, up to a type.
    pub(super) fn op(&self) -> &str {
        const ENDS: [&str; 10] =
            ["_f32", "_f16", "_bf16", "_u32", "_b128", "_b64", "_b32", "_b16", "_b8", "__"];
        let end = ENDS.iter().filter_map(|end| self.kernel.find(end)).min();
        &self.kernel[..end.unwrap_or(self.kernel.len())]
    }
}

/// A step, and what it is called.
pub(super) struct Step {
    pub(super) title: String,
    pub(super) launches: Vec<Launch>,
}

/// Draws the step in a file of Nsight Compute's next to it, as SVG.
pub(super) fn run(csv: &Path) -> Result<(), Error> {
    let launches = one_step(launches(csv, &read(csv)?)?);
    let name = csv.file_stem().unwrap_or_default().to_string_lossy();
    let total: f64 = launches.iter().map(|launch| launch.ns).sum();
    let title = format!("{name}: {} launches, {:.0} µs one by one", launches.len(), total / 1e3);
    let svg: PathBuf = csv.with_extension("svg");
    plots::timeline(&Step { title, launches }, &svg)?;
    println!("{}", svg.display());
    Ok(())
}

/// What the file says of each launch, in their order.
fn launches(path: &Path, text: &str) -> Result<Vec<Launch>, Error> {
    let bad = |line: usize, reason: &str| Error::Table { path: path.into(), line, reason: reason.into() };
    // The profiled program's own lines come first.
    let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, fields(line)));
    let names = ["ID", "Kernel Name", "Metric Name", "Metric Value"];
    let place = |header: &[String]| -> Option<Vec<usize>> {
        names.iter().map(|name| header.iter().position(|field| field == name)).collect()
    };
    let Some(places) = lines.by_ref().find_map(|(_, header)| place(&header)) else {
        return Err(bad(1, "expected a line of names with ID, Kernel Name, Metric Name and Metric Value"));
    };
    let mut launches: Vec<(String, Launch)> = Vec::new();
    for (line, row) in lines {
        let fields: Option<Vec<&String>> = places.iter().map(|&place| row.get(place)).collect();
        // Behind the table the program may say more.
        let Some([id, kernel, metric, value]) = fields.as_deref() else { continue };
        let value = value.replace(',', "");
        let value: f64 = value.parse().map_err(|_| bad(line, "expected a number as the metric's value"))?;
        if launches.last().is_none_or(|(last, _)| last != *id) {
            launches.push(((*id).clone(), Launch { kernel: (*kernel).clone(), ..Launch::default() }));
        }
        let Some((_, launch)) = launches.last_mut() else { continue };
        match metric.as_str() {
            "gpu__time_duration.sum" => launch.ns = value,
            "dram__bytes.sum" => launch.bytes = value,
            _ => {}
        }
    }
    Ok(launches.into_iter().map(|(_, launch)| launch).collect())
}

/// From the first kernel of a step, the one that looks up embeddings, to the next one's; all if there are not two.
fn one_step(launches: Vec<Launch>) -> Vec<Launch> {
    let mut starts = (0..launches.len()).filter(|&index| launches[index].op() == "embedding");
    match (starts.next(), starts.next()) {
        (Some(from), Some(to)) => launches[from..to].to_vec(),
        _ => launches,
    }
}

/// The fields of a line, which may be quoted.
fn fields(line: &str) -> Vec<String> {
    let (mut fields, mut is_quoted) = (vec![String::new()], false);
    for letter in line.chars() {
        match letter {
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => fields.push(String::new()),
            _ => fields.iter_mut().last().into_iter().for_each(|field| field.push(letter)),
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
some line of the program, with a comma
\"ID\",\"Kernel Name\",\"Metric Name\",\"Metric Unit\",\"Metric Value\"
\"0\",\"matmul_bf16__gemv__sm80\",\"dram__bytes.sum\",\"byte\",\"5\"
\"0\",\"matmul_bf16__gemv__sm80\",\"gpu__time_duration.sum\",\"ns\",\"7\"
\"1\",\"embedding_b128__row__sm61\",\"dram__bytes.sum\",\"byte\",\"1,024\"
\"1\",\"embedding_b128__row__sm61\",\"gpu__time_duration.sum\",\"ns\",\"2,000.5\"
\"2\",\"rmsnorm_bf16__one__sm61\",\"gpu__time_duration.sum\",\"ns\",\"3\"
\"3\",\"embedding_b128__row__sm61\",\"gpu__time_duration.sum\",\"ns\",\"4\"
";

    #[test]
    fn a_step_of_a_file() {
        let all = launches(Path::new("x.csv"), TEXT).unwrap();
        assert_eq!(all.len(), 4);
        assert_eq!((all[0].op(), all[0].ns, all[0].bytes), ("matmul", 7.0, 5.0));
        let step = one_step(all);
        let ops: Vec<_> = step.iter().map(|launch| (launch.op(), launch.ns, launch.bytes)).collect();
        assert_eq!(ops, [("embedding", 2000.5, 1024.0), ("rmsnorm", 3.0, 0.0)]);
    }

    #[test]
    fn what_is_no_such_file() {
        let message = launches(Path::new("x.csv"), "a,b\n").unwrap_err().to_string();
        assert!(message.contains("x.csv") && message.contains("Kernel Name"), "{message}");
        let message = launches(Path::new("x.csv"), &TEXT.replace("2,000.5", "n/a")).unwrap_err().to_string();
        assert!(message.contains("x.csv:6"), "{message}");
    }

    #[test]
    fn a_picture() {
        let folder = tempfile::tempdir().unwrap();
        let csv = folder.path().join("qwen3-0.6b decode 1.csv");
        std::fs::write(&csv, TEXT).unwrap();
        run(&csv).unwrap();
        let svg = read(&csv.with_extension("svg")).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("2 launches, 2 µs one by one"), "{svg}");
    }
}
