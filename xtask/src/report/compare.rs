//! A record against the one before it.

use std::path::{Path, PathBuf};

use super::record::{Ours, Record};

/// Slower by more than this, beyond its own spread, is a regression.
const LIMIT: f64 = 0.05;

/// What changed since the record before.
pub struct Comparison {
    /// Where that one is.
    pub folder: PathBuf,
    /// Why the two say nothing of each other, if so.
    pub not_comparable: Option<String>,
    pub slower: Vec<Change>,
    pub faster: Vec<Change>,
    /// Cases that the one before has and this one has not, or has with other work under their name.
    pub gone: Vec<String>,
}

/// A case that takes another time than before.
#[derive(Debug)]
pub struct Change {
    pub name: String,
    pub before_us: f64,
    pub now_us: f64,
}

/// The folder of the last record beside `folder` that is older by its name.
pub fn last_before(folder: &Path) -> Option<PathBuf> {
    let name = folder.file_name()?;
    let siblings = folder.parent()?.read_dir().ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    siblings
        .filter(|path| {
            path.file_name().is_some_and(|other| other < name) && path.join("results.json").is_file()
        })
        .max()
}

pub fn compare(folder: PathBuf, before: &Record, now: &Record) -> Comparison {
    let mut comparison =
        Comparison { folder, not_comparable: None, slower: Vec::new(), faster: Vec::new(), gone: Vec::new() };
    if (&before.run.device, &before.run.floor) != (&now.run.device, &now.run.floor) {
        let describe = |record: &Record| {
            format!("{} with {}", record.run.device, record.run.floor.as_deref().unwrap_or("no images"))
        };
        comparison.not_comparable = Some(format!("{} there, {} here", describe(before), describe(now)));
        return comparison;
    }
    for case in &before.cases {
        let Some(old) = &case.ours else { continue };
        let name = case.work.name.clone();
        let same = now
            .case(&name)
            .filter(|now| (now.work.bytes, now.work.flops) == (case.work.bytes, case.work.flops));
        let Some(new) = same.and_then(|case| case.ours.as_ref()) else {
            comparison.gone.push(name);
            continue;
        };
        let change = Change { name, before_us: old.us, now_us: new.us };
        if is_slower(old, new) {
            comparison.slower.push(change);
        } else if is_slower(new, old) {
            comparison.faster.push(change);
        }
    }
    comparison
}

fn is_slower(before: &Ours, now: &Ours) -> bool {
    now.us - before.spread_us.max(now.spread_us) > before.us * (1.0 + LIMIT)
}
