//! The shape of the source tree, as ARCHITECTURE describes it: one operator, one name, one path in each crate.

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

#[test]
fn every_operator_has_its_five_places() {
    for family in abi::ops::FAMILIES {
        for path in [
            format!("crates/abi/src/ops/{family}.rs"),
            format!("gpu/src/ops/{family}/mod.rs"),
            format!("host/src/ops/{family}/mod.rs"),
            format!("tests/ops/{family}.rs"),
            format!("benches/ops/{family}.rs"),
        ] {
            assert!(workspace_root().join(&path).is_file(), "{path} is missing");
        }
    }
    let families: Vec<String> = abi::ops::FAMILIES.iter().map(|name| name.to_string()).collect();
    for (folder, others) in [
        ("crates/abi/src/ops", &["mod"][..]),
        ("gpu/src/ops", &["mod"]),
        ("host/src/ops", &["mod", "packed", "parallel", "reference", "workspace"]),
        ("tests/ops", &["arguments", "faults", "harness", "latent", "main", "moe", "packed"]),
        ("benches/ops", &["harness", "main", "models"]),
    ] {
        let found: Vec<String> =
            names(folder).into_iter().filter(|name| !others.contains(&name.as_str())).collect();
        assert_eq!(found, families, "{folder}");
    }
}

/// A user passes the rows of these tables to `plan_with`.
#[test]
fn kernels_that_plans_take_have_public_names() {
    for family in abi::ops::FAMILIES {
        let path = workspace_root().join(format!("host/src/ops/{family}/mod.rs"));
        let text = fs::read_to_string(path).expect("a source file");
        let Some((_, variant)) = text.split_once("variant: &'static ") else { continue };
        let variant = variant.split(',').next().expect("a type");
        let (_, names) = text.split_once(&format!("pub use abi::ops::{family}::{{")).expect(family);
        let (names, _) = names.split_once('}').expect(family);
        for wanted in [variant, "VARIANTS"] {
            assert!(
                names.split([',', ' ', '\n']).any(|name| name == wanted),
                "{family}: {wanted} is private"
            );
        }
    }
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
