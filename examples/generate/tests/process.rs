//! `generate` as a process: its streams, its status, its signals.
#![cfg(unix)]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo-model")
}

/// With the demo model on the CPU.
fn generate(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_generate"));
    command.arg("--model").arg(demo()).args(arguments).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

const CPU: [&str; 2] = ["--device", "cpu"];

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_prompt_from_a_pipe() -> Outcome {
    let mut child =
        generate(&CPU).args(["--max-new-tokens", "3", "--print-ids"]).stdin(Stdio::piped()).spawn()?;
    child.stdin.take().ok_or("a pipe")?.write_all(b"The sea")?;
    let piped = child.wait_with_output()?;
    let given =
        generate(&CPU).args(["--max-new-tokens", "3", "--print-ids", "--prompt", "The sea"]).output()?;
    assert!(piped.status.success(), "{}", error(&piped));
    assert_eq!(piped.stdout, given.stdout);
    assert!(!serde_json::from_slice::<Vec<u32>>(&piped.stdout)?.is_empty());
    Ok(())
}

/// The demo model in a folder of its own.
fn copied() -> Result<tempfile::TempDir, Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    for file in std::fs::read_dir(demo())? {
        let file = file?;
        std::fs::copy(file.path(), folder.path().join(file.file_name()))?;
    }
    Ok(folder)
}

/// Weights that are quantised as they are loaded: near enough for the same first tokens, not for all; and a scheme that
/// there is not is an error with those that there are.
#[test]
fn quantised() -> Outcome {
    let behind = |prompt: &str, scheme: &str| -> Result<Vec<u32>, Box<dyn std::error::Error>> {
        let output = generate(&CPU)
            .args(["--prompt", prompt, "--print-ids", "--max-new-tokens", "12", "--quant", scheme])
            .output()?;
        assert!(output.status.success(), "{scheme}: {}", error(&output));
        Ok(serde_json::from_slice(&output.stdout)?)
    };
    let prompts = ["Once upon a time", "In the beginning"];
    let dense = [behind(prompts[0], "dense")?, behind(prompts[1], "dense")?];
    for scheme in ["int8", "fp8-channel", "e6m9", "requantise-int8", "int8+int8"] {
        let own = [behind(prompts[0], scheme)?, behind(prompts[1], scheme)?];
        assert!(own[0][..8] == dense[0][..8] && own[1][..4] == dense[1][..4], "{scheme}: {own:?}, {dense:?}");
        // The model's weights are in bfloat16, all of which e6m9 holds.
        assert!(own != dense || scheme == "e6m9", "{scheme}");
    }
    for scheme in ["int5", "int8+", "+int8", "int8+int5", "requantise-int8+int8"] {
        let output = generate(&CPU).args(["--prompt", "The sea", "--quant", scheme]).output()?;
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{scheme}");
        let told = error(&output);
        for part in [scheme, "as-stored", "nvfp4", "e6m9"] {
            assert!(told.contains(part), "{part}: {told}");
        }
    }
    Ok(())
}

/// The tokens behind a prompt.
fn ids(model: &Path, arguments: &[&str]) -> Result<Vec<u32>, Box<dyn std::error::Error>> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_generate"));
    command.arg("--model").arg(model).args(CPU).args(["--prompt", "The sea", "--print-ids"]);
    let output = command.args(["--max-new-tokens", "40"]).args(arguments).stdin(Stdio::null()).output()?;
    assert!(output.status.success(), "{}", error(&output));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// What generation_config.json says of penalties holds where no flag says something else.
#[test]
fn penalties_of_the_model() -> Outcome {
    let folder = copied()?;
    std::fs::write(folder.path().join("generation_config.json"), r#"{"repetition_penalty": 1000}"#)?;
    let (plain, penalised) = (ids(&demo(), &[])?, ids(folder.path(), &[])?);
    let distinct: std::collections::BTreeSet<u32> = penalised.iter().copied().collect();
    assert_eq!(distinct.len(), penalised.len(), "{penalised:?}");
    assert_ne!(plain, penalised);
    assert_eq!(ids(folder.path(), &["--repetition-penalty", "1"])?, plain);
    assert_eq!(ids(&demo(), &["--repetition-penalty", "1000"])?, penalised);
    Ok(())
}

/// An adapter changes what is written; one of zeros does not.
#[test]
fn adapters() -> Outcome {
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(demo().join("config.json"))?)?;
    let size =
        |key: &str| config[key].as_u64().and_then(|size| usize::try_from(size).ok()).ok_or(key.to_owned());
    let (hidden, inner) = (size("hidden_size")?, size("intermediate_size")?);
    let stream = warpforge::Device::cpu().stream()?;
    let plain = ids(&demo(), &[])?;
    for scale in [0.0f32, 0.5] {
        let folder = tempfile::tempdir()?;
        let config = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 2}"#;
        std::fs::write(folder.path().join("adapter_config.json"), config)?;
        let tensor = |rows: usize, cols: usize, scale: f32| {
            let values: Vec<f32> = (0..rows * cols).map(|i| scale * ((i * 37 % 11) as f32 - 5.0)).collect();
            warpforge::Tensor::from_slice(&stream, &[rows, cols], &values)
        };
        let (a, b) = (tensor(2, inner, 0.1)?, tensor(hidden, 2, scale)?);
        let module = "base_model.model.model.layers.0.mlp.down_proj";
        let [name_a, name_b] = ["A", "B"].map(|which| format!("{module}.lora_{which}.weight"));
        let file = folder.path().join("adapter_model.safetensors");
        warpforge::models::save_tensors(&file, &stream, [(&*name_a, &a), (&*name_b, &b)])?;
        let got = ids(&demo(), &["--lora", &folder.path().to_string_lossy()])?;
        assert_eq!(got == plain, scale == 0.0, "{got:?}");
    }
    let output = generate(&CPU).args(["--prompt", "a", "--lora", "/none"]).output()?;
    assert!(error(&output).contains("/none/adapter_config.json does not exist"), "{}", error(&output));
    Ok(())
}

/// Quietly, with the status that a shell shows for it.
#[test]
fn a_closed_pipe() -> Outcome {
    for shows in [&["--print-ids"][..], &[]] {
        let mut child = generate(&CPU).args(["--prompt", "The sea"]).args(shows).spawn()?;
        drop(child.stdout.take());
        let output = child.wait_with_output()?;
        assert_eq!(output.status.code(), Some(141), "{}", error(&output));
        assert!(!error(&output).contains("generate:"), "{}", error(&output));
    }
    Ok(())
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk() -> Outcome {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full")?;
    let output = generate(&CPU).args(["--prompt", "The sea"]).stdout(full).output()?;
    assert_eq!(output.status.code(), Some(1));
    assert!(error(&output).contains("generate: cannot write to standard output: "), "{}", error(&output));
    Ok(())
}

/// Nobody is there to be told, and the answer is written all the same.
#[test]
fn a_closed_standard_error() -> Outcome {
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec \"$0\" \"$@\" 2>&-", env!("CARGO_BIN_EXE_generate"), "--model"]);
    shell.arg(demo()).args(CPU).args(["--ids", "5,9,100", "--max-new-tokens", "3", "--print-ids"]);
    let output = shell.stdin(Stdio::null()).stdout(Stdio::piped()).output()?;
    assert!(output.status.success(), "{:?}", output.status);
    assert_eq!(serde_json::from_slice::<Vec<u32>>(&output.stdout)?.len(), 3);
    Ok(())
}

#[test]
fn an_empty_folder() -> Outcome {
    let folder = tempfile::tempdir()?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_generate"));
    let output = command.arg("--model").arg(folder.path()).args(["--prompt", "a"]).output()?;
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
    let missing = format!("generate: {} does not exist\n", folder.path().join("config.json").display());
    assert!(error(&output).ends_with(&missing), "{}", error(&output));
    Ok(())
}

/// Ctrl-C ends an answer at a token, with the figures.
#[test]
fn an_interrupt() -> Outcome {
    let mut child = generate(&CPU).args(["--prompt", "The sea", "--max-new-tokens", "100000"]).spawn()?;
    let mut shown = BufReader::new(child.stdout.take().ok_or("a pipe")?);
    // An answer is under way.
    let mut first = [0];
    shown.read_exact(&mut first)?;
    // The shell's own: a program of that name need not be there.
    let sent = Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status()?;
    assert!(sent.success());
    let mut rest = Vec::new();
    shown.read_to_end(&mut rest)?;
    let mut told = String::new();
    for line in BufReader::new(child.stderr.take().ok_or("a pipe")?).lines() {
        told += &(line? + "\n");
    }
    assert_eq!(child.wait()?.code(), Some(130), "{told}");
    assert!(told.contains("; continuation: "), "{told}");
    Ok(())
}

/// Over several devices: the same tokens.
#[test]
fn several_devices() -> Outcome {
    let ids = |devices: &[&str]| -> Result<Vec<u8>, Box<dyn std::error::Error>> {
        let output = generate(devices).args(["--prompt", "The sea", "--print-ids"]).output()?;
        assert!(output.status.success(), "{}", error(&output));
        Ok(output.stdout)
    };
    assert_eq!(ids(&CPU)?, ids(&["--devices", "cpu,cpu,cpu"])?);
    Ok(())
}
