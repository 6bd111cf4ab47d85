//! What there is on this machine and in this build.

use serde_json::{Value, json};
use warpforge::models::{Session, WEIGHT_FORMATS};
use warpforge::ops::matmul::{Matmul, MatmulProblem};
use warpforge::{Arch, DType, Device, IMAGES};

use crate::demo::Demo;

/// An architecture's images.
pub fn images() -> Vec<Value> {
    let of = |arch| {
        let images: Vec<_> = IMAGES.iter().filter(|image| image.arch == arch).collect();
        let modules: Vec<_> = images.iter().flat_map(|image| image.modules()).collect();
        let bytes: usize =
            modules.iter().filter_map(|module| module.text().ok()).map(|text| text.len()).sum();
        let needed = images.first().and_then(|image| image.needed_driver());
        json!({
            "arch": arch.to_string(),
            "families": images.len(),
            "kernels": modules.len(),
            "ptx_bytes": bytes,
            "driver": needed.map(|needed| needed.branch),
            "cuda": needed.map(|needed| format!("{}.{}", needed.cuda.0, needed.cuda.1)),
        })
    };
    Arch::ALL.into_iter().map(of).collect()
}

/// What the driver says of each card, or why there is none.
pub struct Cards {
    pub facts: Vec<Value>,
    pub none: Option<String>,
    /// The CPU, and every card with every floor that it runs.
    pub devices: Vec<Device>,
}

pub fn cards() -> Cards {
    let mut cards = Cards { facts: Vec::new(), none: None, devices: vec![Device::cpu()] };
    let count = match Device::cuda_count() {
        Ok(count) => count,
        Err(error) => {
            cards.none = Some(error.to_string());
            0
        }
    };
    for ordinal in 0..count {
        let fact = match Device::cuda(ordinal) {
            Ok(card) => {
                let profile = card.profile();
                let version =
                    |pair: Option<(u32, u32)>| pair.map(|(major, minor)| format!("{major}.{minor}"));
                let built = Arch::ALL.into_iter().filter(holds_images);
                cards.devices.extend(built.filter_map(|arch| card.with_arch(arch).ok()));
                json!({
                    "card": ordinal,
                    "name": profile.name,
                    "capability": version(profile.compute_capability),
                    "multiprocessors": profile.num_sms,
                    "memory_bytes": profile.memory_bytes,
                    "cuda": version(profile.driver),
                })
            }
            Err(error) => json!({"card": ordinal, "error": error.to_string()}),
        };
        cards.facts.push(fact);
    }
    cards
}

/// Whether the demo model writes on a device what it should; and the session that did.
pub fn self_test(demo: &Demo, device: &Device) -> (Value, Option<Session>) {
    match demo.test(device) {
        Ok((session, tokens)) => {
            (json!({"device": device.describe(), "ok": true, "tokens": tokens}), Some(session))
        }
        Err(error) => (json!({"device": device.describe(), "ok": false, "error": error.to_string()}), None),
    }
}

/// What the operators of a session chose.
pub fn choices(session: &Session) -> Vec<Value> {
    let reports = session.optimization_reports();
    let all = reports.into_iter().flat_map(|(phase, reports)| reports.into_iter().map(move |r| (phase, r)));
    all.map(|(phase, report)| {
        json!({"phase": phase, "operator": report.op, "variant": report.variant, "why": report.why})
    })
    .collect()
}

/// Rows of products that formats are shown for: of a step, of a few sequences, of a prompt.
pub const FORMAT_ROWS: [(&str, usize); 3] = [("rows_1", 1), ("rows_16", 16), ("rows_2048", 2048)];

/// What each format of quantised weights is multiplied by on a device: the kernel of a product with a weight of 4096 by
/// 4096, or why there is none.
pub fn formats(device: &Device) -> Vec<Value> {
    let dtype = if device.limits().is_some() { DType::BF16 } else { DType::F32 };
    let of = |(name, layout): (&str, _)| {
        let mut fact = json!({"weights": name});
        for (key, rows) in FORMAT_ROWS {
            let problem =
                MatmulProblem { weight: Some(layout), ..MatmulProblem::new(rows, 4096, 4096, dtype) };
            let kernel = Matmul::plan(device, problem).map(|plan| plan.report().variant.to_owned());
            fact[key] = kernel.unwrap_or_else(|error| error.to_string()).into();
        }
        fact
    };
    WEIGHT_FORMATS.iter().copied().map(of).collect()
}

/// Whether this build has images of the floor.
fn holds_images(arch: &Arch) -> bool {
    IMAGES.iter().any(|image| image.arch == *arch)
}
