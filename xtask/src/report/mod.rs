//! `cargo xtask bench-report`: a measurement as a record of the repository, against the one before.

mod compare;
mod markdown;
mod plots;
mod record;
mod sweep;
mod timeline;

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::Error;
use compare::{before, compare};
use record::{Record, read};

/// What is between these lines of the README is written by this recipe.
const BEGIN: &str = "<!-- bench-report -->";
const END: &str = "<!-- end of bench-report -->";

/// Where things are read and written.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The folder that `bundle/run bench` wrote.
    from: PathBuf,
    /// The record's folder; by the card and the date if not given.
    out: Option<PathBuf>,
    /// `YYYY-MM-DD`; the day of the run if not given.
    date: Option<String>,
    readme: Readme,
    of: Of,
}

/// What was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Of {
    /// The cases, to be compared with those of the record before.
    #[default]
    Cases,
    /// A grid of shapes.
    Sweep,
    /// The launches of a model's step.
    Timeline,
}

/// Whether the README gets the new figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Readme {
    #[default]
    Keep,
    Write,
}

impl Options {
    /// Reads the words behind `bench-report`; none for what it does not know.
    pub fn parse(words: &[&str]) -> Option<Self> {
        let mut options = Options::default();
        let mut words = words.iter();
        while let Some(&word) = words.next() {
            match word {
                "--out" => options.out = Some(words.next()?.into()),
                "--date" => options.date = Some(words.next()?.to_string()),
                "--readme" => options.readme = Readme::Write,
                "--sweep" => options.of = Of::Sweep,
                "--timeline" => options.of = Of::Timeline,
                _ if word.starts_with('-') || !options.from.as_os_str().is_empty() => return None,
                _ => options.from = word.into(),
            }
        }
        (!options.from.as_os_str().is_empty()).then_some(options)
    }
}

/// Writes the record, and fails if a case became slower.
pub fn run(root: &Path, options: &Options) -> Result<(), Error> {
    if options.of == Of::Timeline {
        return timeline::run(&options.from);
    }
    let record = Record::join(&options.from)?;
    let date = options.date.clone().unwrap_or_else(|| date(record.run.unix_time));
    let kind = if options.of == Of::Sweep { "-sweep" } else { "" };
    let relative = format!("benches/record/{}/{date}{kind}", folder_name(&record.run.device));
    let out = options.out.clone().unwrap_or_else(|| root.join(&relative));
    if options.of == Of::Sweep {
        fs::create_dir_all(&out).map_err(|source| Error::File { path: out.clone(), source })?;
        return sweep::run(&record, &date, &out);
    }
    let with_record = |folder: PathBuf| -> Result<(PathBuf, Record), Error> {
        let record = Record::read(&folder.join("results.json"))?;
        Ok((folder, record))
    };
    let before = before(&out).into_iter().map(with_record).collect::<Result<Vec<_>, Error>>()?;
    let comparison = compare(&before, &record);

    fs::create_dir_all(&out).map_err(|source| Error::File { path: out.clone(), source })?;
    let results = out.join("results.json");
    let json = record.to_json().map_err(|source| Error::Json { path: results.clone(), line: 1, source })?;
    write(&results, &json)?;
    write(&out.join("report.md"), &markdown::report(&record, &date, comparison.as_ref()))?;
    plots::roofline(&record, &out.join("roofline.svg"))?;
    plots::ratio_bars(&record, &out.join("ratios.svg"))?;
    if options.readme == Readme::Write {
        let file = root.join("README.md");
        let text = between_markers(&file, &read(&file)?, &markdown::readme(&record, &date, &relative))?;
        write(&file, &text)?;
    }
    println!("{}", out.join("report.md").display());

    let slower = comparison.map(|comparison| comparison.slower).unwrap_or_default();
    for change in &slower {
        println!("slower: {} took {:.2} µs, now {:.2} µs", change.name, change.before_us, change.now_us);
    }
    match slower.len() {
        0 => Ok(()),
        count => Err(Error::Slower { count }),
    }
}

fn write(file: &Path, text: &str) -> Result<(), Error> {
    fs::write(file, text).map_err(|source| Error::File { path: file.into(), source })
}

/// `NVIDIA H200` is `h200`.
fn folder_name(device: &str) -> String {
    let name = device.strip_prefix("NVIDIA ").unwrap_or(device).to_lowercase();
    name.split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join("-")
}

/// The day of a time in seconds since 1970, UTC, in the Gregorian calendar.
fn date(unix_time: u64) -> String {
    // Years begin in March, so that the leap day is the last; an era is 400 years, which have 146 097 days.
    let days = unix_time / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
    format!("{:04}-{month:02}-{day:02}", year + 400 * era)
}

fn between_markers(file: &Path, text: &str, content: &str) -> Result<String, Error> {
    let parts = text.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
    let Some((before, after)) = parts else {
        return Err(Error::NoMarkers { path: file.into(), begin: BEGIN, end: END });
    };
    Ok(format!("{before}{BEGIN}\n{content}{END}{after}"))
}

#[cfg(test)]
mod tests;
