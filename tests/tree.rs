//! The shape of the source tree, as ARCHITECTURE describes it: one operator, one name, one path in each crate.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use testkit::gpu::workspace_root;

fn names(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(workspace_root().join(folder)).expect(folder);
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect(folder).path())
        .filter_map(|path| path.file_stem().map(|name| name.to_string_lossy().into_owned()))
        .collect();
    names.sort();
    // A file and the folder of its parts.
    names.dedup();
    names
}

/// A folder of operators has one file or folder for each, and what they share.
#[test]
fn folders_hold_the_operators_alone() {
    let families: Vec<String> = abi::ops::FAMILIES.iter().map(|name| name.to_string()).collect();
    for (folder, others) in [
        ("crates/abi/src/ops", &["mod"][..]),
        ("gpu/src/ops", &["mod"]),
        ("host/src/ops", &["fp8_rows", "mod", "packed", "parallel", "reference", "workspace"]),
        (
            "tests/ops",
            &[
                "arguments",
                "cascade",
                "fallback",
                "faults",
                "harness",
                "invariance",
                "latent",
                "main",
                "moe",
                "nothing",
                "packed",
                "places",
            ],
        ),
        ("benches/ops", &["harness", "main", "models", "sweep"]),
    ] {
        let found: Vec<String> =
            names(folder).into_iter().filter(|name| !others.contains(&name.as_str())).collect();
        assert_eq!(found, families, "{folder}");
    }
}

/// The files of CONTRIBUTING's list of this kind: `new` or `edit`.
fn steps(kind: &str) -> Vec<String> {
    let text = fs::read_to_string(workspace_root().join("CONTRIBUTING.md")).expect("CONTRIBUTING.md");
    let (_, list) = text.split_once("## Adding an operator").expect("a section");
    let list = list.split("```").nth(1).expect("a list");
    let of_kind = list.lines().filter_map(|line| line.strip_prefix(kind)?.split_whitespace().next());
    of_kind.map(String::from).collect()
}

/// Whether a text has this word, of letters, digits and underscores.
fn has_word(text: &str, word: &str) -> bool {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|found| found == word)
}

fn texts(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if !name.starts_with('.') && !["target", "assets", "golden", "record", "bundle"].contains(&&*name)
            {
                texts(&path, found);
            }
        } else if [".rs", ".toml", ".md", ".py"].iter().any(|end| name.ends_with(end)) {
            found.push(path);
        }
    }
}

/// CONTRIBUTING's list is what an operator takes: at most 13 files, of which at most four are there already.
#[test]
fn an_operator_takes_the_files_of_the_list() {
    let (new, edit) = (steps("new"), steps("edit"));
    assert!(new.len() + edit.len() <= 13 && edit.len() <= 4, "{new:?} {edit:?}");
    for family in abi::ops::FAMILIES {
        for path in new.iter().map(|path| path.replace("<op>", family)) {
            assert!(workspace_root().join(&path).is_file(), "{path} is missing");
        }
        for path in &edit {
            let text = fs::read_to_string(workspace_root().join(path)).expect(path);
            assert!(has_word(&text, family), "{path} does not name {family}");
        }
    }
    // What names nearly all of them is a list of them.
    let mut files = Vec::new();
    texts(&workspace_root(), &mut files);
    for file in files {
        let text = fs::read_to_string(&file).expect("a text");
        let path =
            file.strip_prefix(workspace_root()).expect("a file of the tree").to_string_lossy().into_owned();
        let named = abi::ops::FAMILIES.iter().filter(|family| has_word(&text, family)).count();
        // The README's table is made from the front page's.
        // And `cargo xtask package` lists the images that it has made.
        let is_made = path.starts_with("crates/images/") && path.ends_with("/images/images.rs");
        let is_listed =
            is_made || edit.contains(&path) || ["CHANGELOG.md", "README.md"].contains(&path.as_str());
        assert!(is_listed || named + 3 < abi::ops::FAMILIES.len(), "{path} names {named} operators");
    }
}

/// The README has the front page's example and its table of operators, of which each has a line;
/// `WARPFORGE_UPDATE_README=1` writes them.
#[test]
fn the_readme_has_the_front_page_s_example_and_operators() {
    let root = workspace_root();
    let front = fs::read_to_string(root.join("src/lib.rs")).expect("src/lib.rs");
    let lines: Vec<&str> = front
        .lines()
        .map_while(|line| line.strip_prefix("//!"))
        .map(|line| line.strip_prefix(' ').unwrap_or(line))
        .collect();
    let example = lines.split(|line| line.starts_with("```")).nth(1).expect("an example").join("\n") + "\n";
    let rows = lines.iter().filter(|line| line.starts_with("| [`"));
    let (mut names, mut table) = (Vec::new(), "| operator | what |\n|---|---|\n".to_owned());
    for row in rows {
        let (name, what) = row.strip_prefix("| [`").and_then(|row| row.split_once("`](ops::")).expect(row);
        let what = what.strip_prefix(name).and_then(|rest| rest.strip_prefix(") |")).expect(row);
        names.push(name);
        table += &format!("| `{name}` |{what}\n");
    }
    assert_eq!(names, abi::ops::FAMILIES, "the front page's table");
    let path = root.join("README.md");
    let mut readme = fs::read_to_string(&path).expect("README.md");
    for (start, end, wanted) in
        [("```rust\n", "```\n", &example), ("<!-- ops -->\n", "<!-- /ops -->", &table)]
    {
        let first = readme.find(start).expect(start) + start.len();
        let last = first + readme[first..].find(end).expect(end);
        if std::env::var_os("WARPFORGE_UPDATE_README").is_some() {
            readme.replace_range(first..last, wanted);
        }
        let last = first + readme[first..].find(end).expect(end);
        assert_eq!(&readme[first..last], wanted, "run with WARPFORGE_UPDATE_README=1");
    }
    if std::env::var_os("WARPFORGE_UPDATE_README").is_some() {
        fs::write(&path, readme).expect("README.md");
    }
}

/// Cargo cannot take its features from the lists of operators and of collectives.
#[test]
fn every_family_is_a_feature_of_gpu() {
    let text = fs::read_to_string(workspace_root().join("gpu/Cargo.toml")).expect("gpu/Cargo.toml");
    let (_, features) = text.split_once("default = [").expect("default features");
    let (default, rest) = features.split_once(']').expect("a list");
    let default: Vec<&str> = default.split('"').skip(1).step_by(2).collect();
    let families: Vec<&str> = abi::families().collect();
    assert_eq!(default, families);
    let (rest, _) = rest.split_once("\n[").expect("the next section");
    let own: Vec<&str> = rest.lines().filter_map(|line| line.strip_suffix(" = []")).collect();
    assert_eq!(own, families);
}

/// A user passes the rows of these tables to `plan_with`.
#[test]
fn kernels_that_plans_take_have_public_names() {
    let mut found = 0;
    for family in abi::ops::FAMILIES {
        let read = |file| {
            let path = workspace_root().join(format!("host/src/ops/{family}/{file}.rs"));
            fs::read_to_string(path).expect("a source file")
        };
        let text = read("mod");
        let both = format!("{text}{}", read("select"));
        let Some((_, variant)) = both.split_once("variant: &'static ") else { continue };
        let variant = variant.split([',', ')']).next().expect("a type");
        let (_, names) = text.split_once(&format!("pub use abi::ops::{family}::{{")).expect(family);
        let (names, _) = names.split_once('}').expect(family);
        // The type of kernels for packed weights is matmul's.
        for wanted in [variant, "VARIANTS"].into_iter().filter(|wanted| *wanted != "PackedVariant") {
            assert!(
                names.split([',', ' ', '\n']).any(|name| name == wanted),
                "{family}: {wanted} is private"
            );
        }
        found += 1;
    }
    assert!(found > 15, "{found}");
}

/// Names that a program gets by `use warpforge::{*, models::*, ops::attention::*, ops::matmul::*, weight::*}` are of
/// one thing each.
#[test]
fn public_types_have_names_of_their_own() {
    let root = workspace_root();
    let read = |path: &Path| fs::read_to_string(path).expect("a source file");
    let (mut files, mut shared) = (Vec::new(), Vec::new());
    for folder in ["src", "host/src", "models/src"] {
        sources(&root.join(folder), &mut files);
    }
    sources(&root.join("crates/abi/src"), &mut shared);
    // Of what host and device share a user sees what the host names again.
    let named: BTreeSet<String> = files
        .iter()
        .flat_map(|file| {
            let text = read(file);
            let lists = text.split("pub use abi::").skip(1).filter_map(|rest| rest.split_once(';'));
            let names = |(list, _): (&str, &str)| {
                list.split(|c: char| !c.is_alphanumeric()).map(str::to_owned).collect::<Vec<_>>()
            };
            lists.flat_map(names).collect::<Vec<_>>()
        })
        .collect();
    let mut found = BTreeMap::<String, PathBuf>::new();
    for file in files.iter().chain(&shared).filter(|file| !file.ends_with("reference.rs")) {
        for line in read(file).lines() {
            let kinds = ["struct ", "enum ", "trait ", "unsafe trait ", "type ", "union "];
            let item = line.strip_prefix("pub ");
            let item = item.and_then(|item| kinds.iter().find_map(|kind| item.strip_prefix(kind)));
            let Some(item) = item else { continue };
            let name: String = item.chars().take_while(|c| c.is_alphanumeric()).collect();
            if file.starts_with(root.join("crates")) && !named.contains(&name) {
                continue;
            }
            if let Some(other) = found.insert(name.clone(), file.clone()) {
                panic!("{name}: {} and {}", other.display(), file.display());
            }
        }
    }
    for name in ["ScoreBias", "SessionSampler", "Element", "ScaleType", "WeightSource"] {
        assert!(found.contains_key(name), "{name} is not found");
    }
}

/// A field more in a problem or in the arguments of a run breaks nobody who writes `..new(…)`: see `host::ops`.
#[test]
fn problems_and_arguments_can_grow() {
    let mut files = Vec::new();
    sources(&workspace_root().join("host/src/ops"), &mut files);
    let mut found = 0;
    for file in files {
        let text = fs::read_to_string(&file).expect("a source file");
        for name in text.lines().filter_map(|line| line.strip_prefix("pub struct ")) {
            let name: String = name.chars().take_while(|c| c.is_alphanumeric()).collect();
            if name.ends_with("Problem") || name.ends_with("Args") {
                let own = text.split("impl").filter_map(|part| part.split_once('{')).any(|(of, body)| {
                    of.trim().trim_start_matches("<'a> ").trim_end_matches("<'a>") == name
                        && body.contains("pub fn new(")
                });
                assert!(own, "{name} has no `new`: {}", file.display());
                found += 1;
            }
        }
    }
    assert!(found >= 2 * abi::ops::FAMILIES.len(), "{found}");
}

/// Device code asks for what a floor lacks by a `cfg`; a name that is not in the list would be a warning, or no kernel
/// on any floor.
#[test]
fn needs_are_known_to_cargo() {
    let manifest = fs::read_to_string(workspace_root().join("Cargo.toml")).expect("the workspace's manifest");
    let known: Vec<&str> =
        manifest.lines().filter_map(|line| line.trim().strip_prefix("'cfg(lacks_")).collect();
    let needs: Vec<String> = abi::Need::ALL
        .iter()
        .map(|need| format!("{})',", need.lacking().strip_prefix("lacks_").expect("the prefix of all")))
        .collect();
    assert_eq!(known, needs);
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The words behind each `crate::` or `super::` of a file's code, that of its tests left out.
fn uses(text: &str, root: &str) -> Vec<String> {
    let tests = ["#[cfg(test)]\nmod tests {", "#[cfg(test)]\npub(crate) mod tests {"];
    let code = tests.iter().filter_map(|tests| text.find(tests)).min().map_or(text, |end| &text[..end]);
    let code: String = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let word = |text: &str| text.chars().take_while(|&c| is_word(c)).collect::<String>();
    let mut found = Vec::new();
    for rest in code.split(root).skip(1) {
        match rest.strip_prefix('{') {
            Some(list) => {
                let list = list.split('}').next().unwrap_or_default();
                found.extend(list.split(',').map(|name| word(name.trim_start())));
            }
            None => found.push(word(rest)),
        }
    }
    found
}

/// What can be reached from `from` by these arrows.
fn reached<'a>(arrows: &'a BTreeMap<String, BTreeSet<String>>, from: &'a str) -> BTreeSet<&'a str> {
    let (mut found, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(next) = open.pop() {
        for to in arrows.get(next).into_iter().flatten() {
            if found.insert(to.as_str()) {
                open.push(to);
            }
        }
    }
    found
}

/// In `host` a file looks down only, but for devices and streams: a device makes streams, and a stream knows its
/// device.
#[test]
fn the_host_core_has_one_circle() {
    let root = workspace_root().join("host/src");
    let upper = ["lib", "ops"];
    let mut core: Vec<String> =
        names("host/src").into_iter().filter(|name| !upper.contains(&name.as_str())).collect();
    // It stands in for `cuda`.
    core.retain(|name| name != "no_cuda");
    let mut arrows = BTreeMap::<String, BTreeSet<String>>::new();
    for module in &core {
        let mut files = Vec::new();
        match root.join(module) {
            folder if folder.is_dir() => sources(&folder, &mut files),
            _ => {}
        }
        files.extend(Some(root.join(format!("{module}.rs"))).filter(|file| file.is_file()));
        files.extend(Some(root.join("no_cuda.rs")).filter(|_| module == "cuda"));
        files.retain(|file| !file.ends_with("tests.rs"));
        assert!(!files.is_empty(), "{module}");
        for file in files {
            let text = fs::read_to_string(&file).expect("a source file");
            for used in uses(&text, "crate::") {
                assert!(core.contains(&used), "{module} uses {used}");
                if used != *module {
                    arrows.entry(module.clone()).or_default().insert(used);
                }
            }
        }
    }
    let in_circles: Vec<&String> =
        core.iter().filter(|module| reached(&arrows, module).contains(module.as_str())).collect();
    assert_eq!(in_circles, ["device", "stream"], "{arrows:?}");

    let mut arrows = BTreeMap::<String, BTreeSet<String>>::new();
    let files = names("host/src/cuda");
    for file in files.iter().filter(|file| *file != "mod") {
        let text = fs::read_to_string(root.join(format!("cuda/{file}.rs"))).expect("a source file");
        arrows.insert(
            file.clone(),
            uses(&text, "super::").into_iter().filter(|name| files.contains(name)).collect(),
        );
    }
    assert!(arrows["stream"].contains("recording"), "{arrows:?}");
    for file in arrows.keys() {
        assert!(!reached(&arrows, file).contains(file.as_str()), "{file}: {arrows:?}");
    }
}

#[test]
fn device_code_holds_no_assembly_and_no_raw_access() {
    let mut files = Vec::new();
    for folder in ["gpu/src", "examples/own_operator/kernels/src"] {
        let found = files.len();
        sources(&workspace_root().join(folder), &mut files);
        assert!(files.len() > found, "{folder}");
    }
    for path in files {
        let text = fs::read_to_string(&path).expect("a source file");
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for line in code {
            for forbidden in ["asm!", "read_volatile", "write_volatile", ".read()", ".write("] {
                assert!(!line.contains(forbidden), "{}: `{forbidden}` in `{}`", path.display(), line.trim());
            }
        }
    }
}

/// What a comment says of a time or a rate that was measured, if anything.
fn measurement(comment: &str) -> Option<String> {
    let is_space = |c: char| c.is_whitespace() || "()[],;:".contains(c);
    let words: Vec<&str> = comment.split(is_space).filter(|word| !word.is_empty()).collect();
    let is_number = |word: &str| word.starts_with(|c: char| c.is_ascii_digit());
    let found = (0..words.len()).find(|&at| {
        let word = |ahead: usize| words.get(at + ahead).copied().unwrap_or_default().trim_end_matches('.');
        let is_rate = word(0).contains("FLOP") || ["B/s", "op/s"].iter().any(|unit| word(0).ends_with(unit));
        let is_time = is_number(word(0)) && ["ns", "µs", "us", "ms"].contains(&word(1));
        let is_share = is_number(word(0))
            && word(1) == "%"
            && ["faster", "slower", "longer", "shorter", "more", "less"].contains(&word(2));
        let is_change =
            [word(0), word(1)] == ["instead", "of"] && is_number(word(2)) && word(2).contains('.');
        let is_count = word(0).starts_with("thousand") && comment.contains("cycles");
        is_rate || is_time || is_share || is_change || is_count
    });
    found.map(|at| words[at..].iter().take(3).copied().collect::<Vec<_>>().join(" "))
}

/// Where the code is are invariants and reasons; what was measured, which is true of one commit and one card, is in
/// `gpu/NOTES`.
#[test]
fn measurements_are_in_the_notes() {
    for (comment, want) in [
        ("takes 24.3 µs by two rounds of five", Some("24.3 µs by")),
        ("(8192³: 795 TFLOP/s, 1.09 of cuBLAS)", Some("TFLOP/s 1.09 of")),
        ("2 to 5 % faster in each of three runs.", Some("5 % faster")),
        ("8.7 instead of 8.2,", Some("instead of 8.2")),
        ("546 thousand cycles", Some("thousand cycles")),
        ("31 shuffles instead of 160, half of `i / 2 % 4`, at 128 bytes per clock", None),
    ] {
        assert_eq!(measurement(comment).as_deref(), want, "{comment}");
    }
    let mut files = Vec::new();
    for folder in ["gpu/src", "host/src/ops"] {
        sources(&workspace_root().join(folder), &mut files);
    }
    for file in files {
        let text = fs::read_to_string(&file).expect("a source file");
        for (number, line) in text.lines().enumerate() {
            let Some((_, comment)) = line.split_once("//") else { continue };
            if let Some(found) = measurement(comment) {
                panic!("{}:{}: `{found}` belongs in gpu/NOTES", file.display(), number + 1);
            }
        }
    }
}

/// `rustfmt` leaves comments as they are.
#[test]
fn comments_fit_their_lines() {
    let mut files = Vec::new();
    texts(&workspace_root(), &mut files);
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "rs")) {
        let text = fs::read_to_string(file).expect("a source file");
        for (number, line) in text.lines().enumerate() {
            let columns = line.chars().count();
            let is_comment = line.trim_start().starts_with("//");
            assert!(!is_comment || columns <= 120, "{}:{}: {columns} columns", file.display(), number + 1);
        }
    }
}

/// It is read in two minutes.
#[test]
fn the_readme_is_short() {
    let bytes = fs::metadata(workspace_root().join("README.md")).expect("README.md").len();
    assert!(bytes <= 8 << 10, "{bytes} bytes");
}
