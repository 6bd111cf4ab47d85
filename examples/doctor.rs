//! What is on this machine and does it work: `cargo run --example doctor`.
//!
//! Prints the driver, the cards, the images of this build and what operators choose, then runs the demo model on every
//! device and floor and compares its text with what it should write.

use std::path::Path;

use warpforge::models::{Model, Sampler, Session, SessionOptions};
use warpforge::ops::sampling::Sampling;
use warpforge::{Arch, DType, Device, Error, IMAGES};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    print_images();
    let devices = find_devices();
    let folder = Path::new("assets/demo-model");
    let expected: serde_json::Value = serde_json::from_slice(&std::fs::read(folder.join("expected.json"))?)?;
    let mut num_failed = 0;
    for (index, device) in devices.iter().enumerate() {
        println!("\n{}", device.describe());
        // Models in f32 write the expected text exactly.
        match self_test(device, folder, &expected) {
            Ok((session, num_tokens)) => {
                println!("  self-test: {num_tokens} tokens of the demo model as expected");
                if index + 1 == devices.len() {
                    print_choices(&session);
                }
            }
            Err(error) => {
                println!("  self-test FAILED: {error}");
                num_failed += 1;
            }
        }
    }
    if num_failed > 0 { Err(format!("{num_failed} self-tests failed").into()) } else { Ok(()) }
}

fn print_images() {
    println!("images of this build:");
    for arch in Arch::ALL {
        let images: Vec<_> = IMAGES.iter().filter(|image| image.arch == arch).collect();
        let Some(first) = images.first() else {
            println!("  {arch}: none");
            continue;
        };
        let modules: Vec<_> = images.iter().flat_map(|image| image.modules()).collect();
        let bytes: usize =
            modules.iter().filter_map(|module| module.text().ok()).map(|text| text.len()).sum();
        let needed = first.needed_driver().map_or("unknown".into(), |needed| {
            format!("driver {} or later (CUDA {}.{})", needed.branch, needed.cuda.0, needed.cuda.1)
        });
        let (families, kernels) = (images.len(), modules.len());
        println!("  {arch}: {families} families, {kernels} kernels, {} KiB of PTX, {needed}", bytes >> 10);
    }
}

/// The CPU, and every card with every floor that it runs.
fn find_devices() -> Vec<Device> {
    let mut devices = vec![Device::cpu()];
    let count = match warpforge::Device::cuda_count() {
        Ok(count) => count,
        Err(error) => {
            println!("no card: {error}");
            0
        }
    };
    for ordinal in 0..count {
        match Device::cuda(ordinal) {
            Ok(card) => {
                let profile = card.profile();
                let (major, minor) = profile.compute_capability.unwrap_or_default();
                let driver = profile.driver.unwrap_or_default();
                println!(
                    "card {ordinal}: {}, compute capability {major}.{minor}, {} SMs, {} GiB, driver for CUDA {}.{}",
                    profile.name,
                    profile.num_sms,
                    profile.memory_bytes >> 30,
                    driver.0,
                    driver.1
                );
                devices.extend(Arch::ALL.into_iter().filter_map(|arch| card.with_arch(arch).ok()));
            }
            Err(error) => println!("card {ordinal}: {error}"),
        }
    }
    devices
}

/// Continues the demo model's prompts greedily. Returns the session, and how many tokens were compared.
fn self_test(
    device: &Device,
    folder: &Path,
    expected: &serde_json::Value,
) -> Result<(Session, usize), Box<dyn std::error::Error>> {
    let model = Model::load(device, folder, DType::F32, &mut |_| {})?;
    let mut session = model.session(SessionOptions { capacity: 256, ..SessionOptions::default() })?;
    let mut num_tokens = 0;
    for case in expected.as_array().ok_or("expected.json is not a list")? {
        let ids = |field: &str| -> Result<Vec<u32>, serde_json::Error> {
            serde_json::from_value(case[field].clone())
        };
        let (prompt, greedy) = (ids("ids")?, ids("greedy")?);
        let got = continue_greedily(&mut session, &prompt, greedy.len())?;
        if got != greedy {
            return Err(format!("after {:?}: expected {greedy:?}, got {got:?}", case["prompt"]).into());
        }
        num_tokens += greedy.len();
    }
    Ok((session, num_tokens))
}

fn continue_greedily(session: &mut Session, prompt: &[u32], num_tokens: usize) -> Result<Vec<u32>, Error> {
    session.truncate(0, 0)?;
    let mut sampler = Sampler::new(session, Sampling::Greedy)?;
    session.prefill(0, prompt)?;
    let mut ids = Vec::new();
    while ids.len() < num_tokens {
        let id = sampler.sample(session)?[0];
        ids.push(id);
        session.decode(&[id])?;
    }
    Ok(ids)
}

fn print_choices(session: &Session) {
    println!("\nwhat the operators of the demo model choose on the last of these:");
    for (phase, reports) in session.optimization_reports() {
        for report in reports {
            println!("  {phase:<8} {:<10} {:<44} {}", report.op, report.variant, report.why);
        }
    }
}
