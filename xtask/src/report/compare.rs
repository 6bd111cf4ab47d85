//! A record against those before it.

use std::path::{Path, PathBuf};

use super::record::{Case, Ours, Record};

/// Slower by more than this, beyond its own spread, is a regression.
const LIMIT: f64 = 0.05;

/// What changed since the records before.
pub struct Comparison {
    /// Where the last one is.
    pub folder: PathBuf,
    /// Why it and this one say nothing of each other, if so.
    pub not_comparable: Option<String>,
    /// Of each case since the last record that has it: a run may be of some operators alone.
    pub slower: Vec<Change>,
    pub faster: Vec<Change>,
    /// Cases that the last one has and this one has not, or has with other work under their name.
    pub gone: Vec<String>,
}

/// A case that takes another time than before.
#[derive(Debug)]
pub struct Change {
    pub name: String,
    pub before_us: f64,
    pub now_us: f64,
}

/// The folders of the records beside `folder` that are older by their names, the last first.
pub fn before(folder: &Path) -> Vec<PathBuf> {
    let (Some(name), Some(parent)) = (folder.file_name(), folder.parent()) else { return Vec::new() };
    let siblings = parent.read_dir().into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let is_older = |path: &PathBuf| {
        path.file_name().is_some_and(|other| other < name) && path.join("results.json").is_file()
    };
    let mut folders: Vec<PathBuf> = siblings.filter(is_older).collect();
    folders.sort_by(|a, b| b.cmp(a));
    folders
}

/// Against the records before, the last first; none if there are none.
pub fn compare(before: &[(PathBuf, Record)], now: &Record) -> Option<Comparison> {
    let (folder, last) = before.first()?;
    let mut comparison = Comparison {
        folder: folder.clone(),
        not_comparable: None,
        slower: Vec::new(),
        faster: Vec::new(),
        gone: Vec::new(),
    };
    // Where a card's power sets the clock, it is another one for the first 50 ms.
    let what = |record: &Record| {
        (record.run.device.clone(), record.run.floor.clone(), record.run.warm_seconds.unwrap_or(0.0))
    };
    let of_the_same = |record: &Record| what(record) == what(now);
    if !of_the_same(last) {
        let describe = |record: &Record| {
            let (device, floor, warm) = what(record);
            format!("{device} with {}, warm for {warm} s", floor.as_deref().unwrap_or("no images"))
        };
        comparison.not_comparable = Some(format!("{} there, {} here", describe(last), describe(now)));
        return Some(comparison);
    }
    let same = |record: &'_ Record, case: &Case| {
        let found = record.case(&case.work.name);
        let found =
            found.filter(|found| (found.work.bytes, found.work.flops) == (case.work.bytes, case.work.flops));
        found.and_then(|found| found.ours.clone())
    };
    for case in last.cases.iter().filter(|case| case.ours.is_some()) {
        if same(now, case).is_none() {
            comparison.gone.push(case.work.name.clone());
        }
    }
    let comparable: Vec<&Record> =
        before.iter().map(|(_, record)| record).filter(|record| of_the_same(record)).collect();
    for case in &now.cases {
        let Some(new) = &case.ours else { continue };
        let Some(old) = comparable.iter().find_map(|record| same(record, case)) else { continue };
        let change = Change { name: case.work.name.clone(), before_us: old.us, now_us: new.us };
        if is_slower(&old, new) {
            comparison.slower.push(change);
        } else if is_slower(new, &old) {
            comparison.faster.push(change);
        }
    }
    Some(comparison)
}

fn is_slower(before: &Ours, now: &Ours) -> bool {
    now.us - before.spread_us.max(now.spread_us) > before.us * (1.0 + LIMIT)
}
