//! `examples/with_numpy.py` where there is a Python with numpy, and the example's library: `cargo test` builds it.

use std::path::Path;
use std::process::Command;

#[test]
fn numpy_s_arrays_come_and_go() {
    let python = || Command::new("python3");
    if !python().args(["-c", "import numpy"]).output().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: there is no python3 with numpy");
        return;
    }
    let program = std::env::current_exe().expect("this program");
    let folder = program.ancestors().nth(2).expect("the folder of the profile");
    let name = format!("{}with_numpy{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let library = folder.join("examples").join(name);
    if !library.is_file() {
        eprintln!("skipped: {} is not built (cargo build --example with_numpy)", library.display());
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/with_numpy.py");
    let output = python().arg(script).arg(library).output().expect("python3");
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("agrees"), "{text}");
}
