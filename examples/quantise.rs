//! Quantises a checkpoint, and writes it as others read it (compressed-tensors in safetensors).
//!
//! `cargo run --release --example quantise -- MODEL SCHEME OUT`, with a folder of `config.json` and safetensors, one of
//! the schemes that are named without arguments, and a folder to be made. Writes what became of each tensor.

mod output;

use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;

use output::{Failure, note, write};
use warpforge::models::{Checkpoint, QuantReport};
use warpforge::weight::Scheme;

fn main() -> ExitCode {
    output::end("quantise", run().map(|()| ExitCode::SUCCESS))
}

fn run() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, scheme, out] = &arguments[..] else {
        let schemes = Scheme::NAMED.map(|(name, _)| name).join(", ");
        return Err(format!("expected MODEL SCHEME OUT, where SCHEME is one of {schemes}").into());
    };
    let report = quantise(Path::new(model), scheme.parse()?, Path::new(out))?;
    write(format_args!("{}\n", output::printable(&report.to_string())))
}

fn quantise(model: &Path, scheme: Scheme, out: &Path) -> Result<QuantReport, Failure> {
    let mut told = 0;
    let report = Checkpoint::open(model)?.save_quantised(&scheme, out, &mut |so_far| {
        let percent = (so_far.loaded_bytes * 100).checked_div(so_far.total_bytes).unwrap_or(100);
        // A line for each tenth: it may be minutes.
        if percent / 10 > told {
            told = percent / 10;
            note(format_args!("{percent} % of {} MiB", so_far.total_bytes >> 20));
        }
        ControlFlow::Continue(())
    })?;
    Ok(report)
}

#[cfg(test)]
mod tests {
    use warpforge::models::{Model, SessionOptions};
    use warpforge::{DType, Device};

    use super::*;

    /// The demo model in eight bits is a third of itself, and its logits are near its own.
    #[test]
    fn the_demo_model() -> Result<(), Failure> {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model");
        let place = tempfile::tempdir()?;
        let out = place.path().join("int8");
        let report = quantise(&demo, "int8".parse()?, &out)?;
        assert!(report.kept.is_empty() && report.bytes_after < report.bytes_before);
        let logits = |folder: &Path| -> Result<Vec<f32>, Failure> {
            let model = Model::load(&Device::cpu(), folder, DType::F32, &mut |_| {})?;
            let mut session = model.session(SessionOptions { capacity: 16, ..SessionOptions::default() })?;
            let stream = session.stream().clone();
            Ok(session.prefill(0, &[1, 2, 3, 4])?.to_vec(&stream)?)
        };
        let error = testkit::compare::relative_l2(&logits(&out)?, &logits(&demo)?);
        assert!(error > 1e-5 && error < 0.05, "{error}");
        Ok(())
    }
}
