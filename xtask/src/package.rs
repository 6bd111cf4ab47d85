//! `cargo xtask package`: the crates that are published, with their images, as files that a registry takes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use crate::error::Error;
use crate::process::{cargo, line, output, probe, run as run_command};
use crate::test::OPTIONAL;

/// Where the packages are put, seen from the repository's root.
const FOLDER: &str = "target/xtask/packages";
/// The largest file that crates.io takes.
const LIMIT_BYTES: u64 = 10 << 20;
/// The shares of the images that the root's build script makes, each of a crate: the folder there and the crate's in
/// `crates/images`.
const SHARES: [(&str, &str); 5] = [
    ("sm_61", "sm61"),
    ("sm_80", "sm80"),
    ("sm_90a", "sm90a"),
    ("sm_90a_attention", "sm90a_attention"),
    ("sm_100", "sm100"),
];
/// The floors whose kernels are assembled, those of most cards: the crate in `crates/cubins`, the architecture, and the
/// shares.
const ASSEMBLED: [(&str, &str, &[&str]); 2] =
    [("sm80", "sm_80", &["sm80"]), ("sm90a", "sm_90a", &["sm90a", "sm90a_attention"])];
/// Builds a crate from the packages alone, without a network, and runs it.
const CONSUMER: &str = include_str!("consumer.sh");

/// Which images go into the packages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Images {
    /// Those of every floor, built if they are not there.
    All,
    /// Those that the tests are built with, so that nothing is built anew: for a check.
    OfTests,
}

/// Builds the images and packs every crate into [`FOLDER`].
pub fn run(root: &Path, images: Images) -> Result<PathBuf, Error> {
    let metadata = json(&output(&mut cargo(root, &["metadata", "--no-deps", "--format-version", "1"]))?)?;
    let crates = in_order(&metadata);
    if images == Images::All {
        let test = ["test", "--package", "warpforge", "--test", "images", "--", "--ignored", "built_again"];
        run_command(&mut cargo(root, &test))?;
    }
    let shares = stage_images(root, images)?;
    stage_cubins(root, images)?;
    let target = metadata["target_directory"].as_str().unwrap_or_default();
    let packed = Path::new(target).join("package");
    // What an earlier run has left would be taken for one of these.
    if packed.exists() {
        at(&packed, fs::remove_dir_all)?;
    }
    let mut package = cargo(root, &["package", "--no-verify", "--allow-dirty", "--quiet"]);
    for (name, _) in &crates {
        package.args(["--package", name]);
    }
    run_command(&mut package)?;

    let folder = root.join(FOLDER);
    if folder.exists() {
        at(&folder, fs::remove_dir_all)?;
    }
    at(&folder, fs::create_dir_all)?;
    let mut order = String::new();
    for (name, version) in &crates {
        let file = format!("{name}-{version}.crate");
        let bytes = at(&packed.join(&file), |from| fs::copy(from, folder.join(&file)))?;
        println!("{bytes:>11} {file}");
        if bytes > LIMIT_BYTES {
            return Err(Error::TooLarge { path: folder.join(file), bytes, limit: LIMIT_BYTES });
        }
        order += &format!("{name}\n");
    }
    at(&folder.join("ORDER"), |path| fs::write(path, order))?;
    println!("packed, in the order in which they can be published: {}", folder.display());
    if images == Images::All {
        println!(
            "images of {}; to publish: cargo publish --package NAME for each line of ORDER",
            shares.join(", ")
        );
    }
    Ok(folder)
}

/// Packs, then builds and runs a crate that has nothing but the packages.
pub fn check(root: &Path) -> Result<(), Error> {
    let folder = run(root, Images::OfTests)?;
    let script = root.join("target/xtask/consumer.sh");
    at(&script, |path| fs::write(path, CONSUMER))?;
    run_command(Command::new("bash").arg(&script).arg(&folder).current_dir(root))
}

/// The published crates of the workspace, name and version, each behind those that it depends on.
fn in_order(metadata: &Value) -> Vec<(String, String)> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut left: Vec<Value> = list(&metadata["packages"]);
    // An empty list of registries is `publish = false`.
    left.retain(|package| package["publish"].as_array().is_none_or(|registries| !registries.is_empty()));
    let mut done: Vec<(String, String)> = Vec::new();
    while !left.is_empty() {
        let waiting: BTreeSet<String> = left.iter().map(|package| text(&package["name"])).collect();
        let is_ready = |package: &Value| {
            list(&package["dependencies"])
                .iter()
                // Those without a version are for the tests, and not of the package.
                .filter(|dependency| dependency["kind"] != "dev")
                .all(|dependency| !waiting.contains(dependency["name"].as_str().unwrap_or_default()))
        };
        let (ready, rest): (Vec<Value>, Vec<Value>) = left.into_iter().partition(is_ready);
        // Cargo allows no circle; were there one, its crates would come last.
        let (ready, rest) = if ready.is_empty() { (rest, Vec::new()) } else { (ready, rest) };
        done.extend(ready.iter().map(|package| (text(&package["name"]), text(&package["version"]))));
        left = rest;
    }
    done
}

/// Puts the images that the root's build script lists into the crates that carry them. Returns their names.
fn stage_images(root: &Path, images: Images) -> Result<Vec<&'static str>, Error> {
    let mut build = match images {
        Images::All => cargo(root, &["check", "--package", "warpforge", "--features", "sm100"]),
        Images::OfTests => cargo(root, &[&["test", "--workspace", "--no-run"], &OPTIONAL[..]].concat()),
    };
    let messages = output(build.args(["--quiet", "--message-format=json"]))?;
    let out_dir = messages
        .lines()
        .filter_map(|line| json(line).ok())
        .filter(|message| message["reason"] == "build-script-executed")
        .filter(|message| message["env"].as_array().is_some_and(|env| env.iter().any(names_images)))
        .find_map(|message| message["out_dir"].as_str().map(PathBuf::from))
        .ok_or(Error::NothingBuilt { kind: "device images" })?;
    let commit = probe(Command::new("git").args(["rev-parse", "HEAD"]).current_dir(root))
        .unwrap_or_else(|_| String::from("unknown"));
    let changed = probe(Command::new("git").args(["status", "--porcelain"]).current_dir(root));
    let changed = if changed.is_ok_and(|changes| changes.is_empty()) { "" } else { ", with changes" };
    let mut staged = Vec::new();
    for (share, folder) in SHARES {
        let (from, to) = (out_dir.join(share), images_of(root, folder));
        if to.exists() {
            at(&to, fs::remove_dir_all)?;
        }
        if !from.is_dir() {
            println!("no images of {share}: its crate has none");
            continue;
        }
        at(&to, fs::create_dir_all)?;
        for file in at(&from, fs::read_dir)?.flatten() {
            at(&file.path(), |path| fs::copy(path, to.join(file.file_name())))?;
        }
        let origin = to.join("ORIGIN");
        let compiler = at(&origin, fs::read_to_string)?;
        let text = format!("warpforge {}, commit {commit}{changed}, {compiler}", env!("CARGO_PKG_VERSION"));
        at(&origin, |path| fs::write(path, text))?;
        staged.push(share);
    }
    Ok(staged)
}

/// Where the crate of a share has its images.
fn images_of(root: &Path, folder: &str) -> PathBuf {
    root.join("crates/images").join(folder).join("images")
}

/// Assembles the kernels of [`ASSEMBLED`]; for a check none.
fn stage_cubins(root: &Path, images: Images) -> Result<(), Error> {
    for (floor, arch, shares) in ASSEMBLED {
        let to = root.join("crates/cubins").join(floor).join("cubins");
        if to.exists() {
            at(&to, fs::remove_dir_all)?;
        }
        if images == Images::OfTests {
            continue;
        }
        for from in shares.iter().map(|folder| images_of(root, folder)).filter(|from| from.is_dir()) {
            at(&to, fs::create_dir_all)?;
            assemble_all(&crate::setup::ptxas(root)?, arch, &from, &to)?;
        }
    }
    Ok(())
}

/// Assembles the kernels of a folder of images.
fn assemble_all(ptxas: &Path, arch: &str, from: &Path, to: &Path) -> Result<(), Error> {
    let list = at(&from.join("images.rs"), fs::read_to_string)?;
    let kernels = kernels(&list);
    println!("{arch}: assembling {} kernels", kernels.len());
    let next = AtomicUsize::new(0);
    let work = || -> Result<(), Error> {
        while let Some((head, name)) = kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
            assemble(ptxas, arch, head, name, from, to)?;
        }
        Ok(())
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// The kernels of a list of images, each with the head of its text.
fn kernels(list: &str) -> Vec<(String, &str)> {
    let mut head = String::new();
    let mut found = Vec::new();
    for line in list.lines() {
        if let Some((_, text)) = line.split_once("head: \"") {
            // As Rust writes a text of lines.
            head = text.split('"').next().unwrap_or_default().replace("\\n", "\n").replace("\\t", "\t");
        } else if let Some((_, rest)) = line.split_once("EmbeddedKernel { name: \"") {
            found.push((head.clone(), rest.split('"').next().unwrap_or_default()));
        }
    }
    found
}

/// Assembles a kernel's deflated text, and deflates what comes of it.
fn assemble(ptxas: &Path, arch: &str, head: &str, name: &str, from: &Path, to: &Path) -> Result<(), Error> {
    let packed = from.join(format!("{name}.ptx.deflate"));
    let unsound = |_| Error::File { path: packed.clone(), source: std::io::ErrorKind::InvalidData.into() };
    let text = miniz_oxide::inflate::decompress_to_vec(&at(&packed, fs::read)?).map_err(unsound)?;
    let (ptx, cubin) = (to.join(format!("{name}.ptx")), to.join(format!("{name}.cubin")));
    at(&ptx, |path| fs::write(path, [head.as_bytes(), &text].concat()))?;
    let mut command = Command::new(ptxas);
    command.args(["-arch", arch, "-o"]).arg(&cubin).arg(&ptx);
    output_quietly(&mut command)?;
    let code = miniz_oxide::deflate::compress_to_vec(&at(&cubin, fs::read)?, 9);
    at(&to.join(format!("{name}.cubin.deflate")), |path| fs::write(path, code))?;
    at(&ptx, fs::remove_file)?;
    at(&cubin, fs::remove_file)
}

fn output_quietly(command: &mut Command) -> Result<(), Error> {
    let output = match command.output() {
        Ok(output) => output,
        Err(source) => return Err(Error::Start { command: line(command), source }),
    };
    if output.status.success() {
        return Ok(());
    }
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    Err(Error::Failed { command: line(command), status: output.status })
}

/// Whether a variable of the compiler, as cargo tells it, is that of a folder of images.
fn names_images(variable: &Value) -> bool {
    variable[0].as_str().is_some_and(|name| name.starts_with("WARPFORGE_IMAGES_"))
}

fn json(text: &str) -> Result<Value, Error> {
    serde_json::from_str(text).map_err(|source| Error::Json {
        path: "cargo's output".into(),
        line: 1,
        source,
    })
}

fn at<'a, T>(path: &'a Path, work: impl FnOnce(&'a Path) -> std::io::Result<T>) -> Result<T, Error> {
    work(path).map_err(|source| Error::File { path: path.to_path_buf(), source })
}

#[cfg(test)]
mod tests {
    use super::{assemble, in_order, kernels};

    #[test]
    fn crates_come_behind_what_they_depend_on() {
        let metadata = serde_json::json!({ "packages": [
            { "name": "top", "version": "1.0.0", "publish": null, "dependencies": [
                { "name": "middle", "kind": null }, { "name": "tests", "kind": "dev" } ] },
            { "name": "middle", "version": "1.1.0", "publish": null, "dependencies": [
                { "name": "base", "kind": "build" }, { "name": "elsewhere", "kind": null } ] },
            { "name": "tests", "version": "1.0.0", "publish": [], "dependencies": [{ "name": "top", "kind": null }] },
            { "name": "base", "version": "1.2.0", "publish": null, "dependencies": [{ "name": "top", "kind": "dev" }] },
        ] });
        let expected = [("base", "1.2.0"), ("middle", "1.1.0"), ("top", "1.0.0")];
        assert_eq!(
            in_order(&metadata),
            expected.map(|(name, version)| (name.to_owned(), version.to_owned()))
        );
    }

    #[test]
    fn kernels_of_a_list_have_their_heads() {
        let kernel = |name: &str| {
            format!("        host::EmbeddedKernel {{ name: \"{name}\", ptx: x, cubin: None }},\n")
        };
        let image = |head: &str, names: [&str; 2]| {
            format!("Image {{ head: {head:?},\n    kernels: &[\n{}    ],\n", names.map(kernel).concat())
        };
        let (a, b) = (".version 8.0\n.target sm_90a\n", ".version 7.4\n\t.x\n");
        let list = image(a, ["k", "l"]) + &image(b, ["m", "n"]);
        let expected = [(a, "k"), (a, "l"), (b, "m"), (b, "n")];
        assert_eq!(kernels(&list), expected.map(|(head, name)| (head.to_owned(), name)));
    }

    #[test]
    fn a_kernel_is_assembled_from_its_packed_text() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let named = std::env::var_os("WARPFORGE_PTXAS").map(std::path::PathBuf::from);
        let ptxas = named.unwrap_or_else(|| root.join("target/xtask/cuda/nvidia/cu13/bin/ptxas"));
        if !ptxas.is_file() {
            eprintln!("skipped: there is no ptxas (`cargo xtask setup`)");
            return;
        }
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let pack = |name: &str, text: &str| {
            let packed = miniz_oxide::deflate::compress_to_vec(text.as_bytes(), 6);
            std::fs::write(from.path().join(format!("{name}.ptx.deflate")), packed).unwrap();
        };
        pack("k", ".visible .entry k()\n{\n\tret;\n}\n");
        pack("bad", ".visible .entry bad()\n{\n\tno such thing;\n}\n");
        let head = ".version 7.4\n.target sm_80\n.address_size 64\n";
        let run = |name| assemble(&ptxas, "sm_80", head, name, from.path(), to.path());
        run("k").unwrap();
        let files: Vec<_> =
            std::fs::read_dir(to.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
        assert_eq!(files, ["k.cubin.deflate"]);
        let packed = std::fs::read(to.path().join("k.cubin.deflate")).unwrap();
        let code = miniz_oxide::inflate::decompress_to_vec(&packed).unwrap();
        assert!(code.starts_with(b"\x7fELF"));
        let message = run("bad").unwrap_err().to_string();
        assert!(message.contains("-arch sm_80") && message.contains("bad.ptx"), "{message}");
    }
}
