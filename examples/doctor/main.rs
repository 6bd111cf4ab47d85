//! What is on this machine and does it work: `cargo run --example doctor`.
//!
//! Shows the driver, the cards, the images of this build and what operators choose, and runs the demo model, which the
//! program holds, on every device and floor, and compares its text with what it should write.

mod demo;
mod facts;
#[path = "../output/mod.rs"]
mod output;
mod table;

use std::process::ExitCode;

use clap::Parser;
use demo::Demo;
use output::{Failure, printable};
use serde_json::json;
use table::table;

/// Shows what warpforge finds on this machine, and tests it with a small model that the program holds. The status is 1
/// if a test fails.
#[derive(Parser)]
#[command(name = "doctor", version)]
struct Options {
    /// Everything as one JSON object, at the end.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    output::end("doctor", run(&Options::parse()))
}

fn run(options: &Options) -> Result<ExitCode, Failure> {
    let say = |text: String| {
        if options.json { Ok(()) } else { output::write(format_args!("{}", printable(&text))) }
    };
    let images = facts::images();
    let columns = [
        ("arch", "floor"),
        ("families", "families"),
        ("kernels", "kernels"),
        ("ptx_bytes", "PTX"),
        ("driver", "driver from"),
        ("cuda", "CUDA"),
    ];
    say(format!(
        "images of this build (warpforge {})\n{}",
        env!("CARGO_PKG_VERSION"),
        table(&images, &columns)
    ))?;

    let cards = facts::cards();
    let columns = [
        ("card", "card"),
        ("name", "name"),
        ("capability", "capability"),
        ("multiprocessors", "SMs"),
        ("memory_bytes", "memory"),
        ("cuda", "driver for CUDA"),
        ("error", "error"),
    ];
    say(match &cards.none {
        Some(reason) => format!("\ncards\n  none: {reason}\n"),
        None => format!("\ncards\n{}", table(&cards.facts, &columns)),
    })?;

    say("\nself-tests: the demo model's text, token by token\n".into())?;
    let demo = Demo::unpack()?;
    let mut tests = Vec::new();
    let mut last = None;
    for device in &cards.devices {
        let (fact, session) = facts::self_test(&demo, device);
        let outcome = match fact["error"].as_str() {
            Some(error) => format!("FAILED: {error}"),
            None => format!("{} tokens as expected", fact["tokens"]),
        };
        say(format!("  {}: {outcome}\n", device.describe()))?;
        tests.push(fact);
        last = session.map(|session| (device.describe(), facts::choices(&session))).or(last);
    }
    let failed = tests.iter().filter(|test| test["ok"] == false).count();
    if let Some((device, choices)) = &last {
        let columns = [("phase", "phase"), ("operator", "operator"), ("variant", "kernel"), ("why", "why")];
        say(format!("\nwhat the demo model's operators choose on {device}\n{}", table(choices, &columns)))?;
    }
    if options.json {
        let all = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "images": images,
            "cards": cards.facts,
            "no_cards": cards.none,
            "tests": tests,
            "choices": last.map(|(device, choices)| json!({"device": device, "operators": choices})),
        });
        output::write(format_args!("{}\n", serde_json::to_string_pretty(&all)?))?;
    }
    if failed > 0 {
        return Err(format!("{failed} of {} self-tests failed", tests.len()).into());
    }
    Ok(ExitCode::SUCCESS)
}
