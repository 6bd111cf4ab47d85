//! What is on this machine and does it work: `cargo run --package doctor`.
//!
//! Shows the driver, the cards, the images of this build, what operators choose and which kernels take quantised
//! weights. Runs the demo model, which the program holds, on every device and floor, and compares its text with what it
//! should write. With `--memory` it draws what the pools hold then, and with `--memory-timeline` it writes what they
//! did.

mod demo;
mod facts;
mod memory;
#[path = "../output/mod.rs"]
mod output;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use demo::Demo;
use output::{Failure, printable};
use serde_json::json;
use table::table;
use warpforge::PoolTimeline;

/// More than the self-tests of a device take.
const TIMELINE_EVENTS: usize = 1 << 16;

/// Shows what warpforge finds on this machine, and tests it with a small model that the program holds. The status is 1
/// if a test fails.
#[derive(Parser)]
#[command(name = "doctor", version)]
struct Options {
    /// Everything as one JSON object, at the end.
    #[arg(long)]
    json: bool,
    /// A map of each device's memory while the demo model is there; with a file's name as a picture (SVG) too.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    memory: Option<Option<PathBuf>>,
    /// What each device's memory pool does in the self-tests, as JSON for <https://ui.perfetto.dev> or
    /// chrome://tracing.
    #[arg(long, value_name = "FILE")]
    memory_timeline: Option<PathBuf>,
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
    let (mut pools, mut timelines) = (Vec::new(), Vec::new());
    for device in &cards.devices {
        if options.memory_timeline.is_some() {
            device.pool().start_timeline(TIMELINE_EVENTS);
        }
        let (fact, session) = facts::self_test(&demo, device);
        let outcome = match fact["error"].as_str() {
            Some(error) => format!("FAILED: {error}"),
            None => format!("{} tokens as expected", fact["tokens"]),
        };
        say(format!("  {}: {outcome}\n", device.describe()))?;
        tests.push(fact);
        timelines.extend(device.pool().timeline().map(|timeline| (device.describe(), timeline)));
        // While the session has its tensors. Floors of a card share a pool.
        if session.is_some() {
            pools.push((device.describe(), device.pool().map()));
        }
        last = session.map(|session| (device.describe(), facts::choices(&session))).or(last);
    }
    let failed = tests.iter().filter(|test| test["ok"] == false).count();
    if let Some((device, choices)) = &last {
        let columns = [("phase", "phase"), ("operator", "operator"), ("variant", "kernel"), ("why", "why")];
        say(format!("\nwhat the demo model's operators choose on {device}\n{}", table(choices, &columns)))?;
    }
    let mut formats = Vec::new();
    for device in &cards.devices {
        let own = facts::formats(device);
        let titles = ["weights", "1 row", "16 rows", "2048 rows"];
        let keys = ["weights"].into_iter().chain(facts::FORMAT_ROWS.map(|(key, _)| key));
        let columns: Vec<(&str, &str)> = std::iter::zip(keys, titles).collect();
        let name = device.describe();
        say(format!("\nkernels for quantised weights on {name}\n{}", table(&own, &columns)))?;
        formats.push(json!({"device": name, "weights": own}));
    }
    if let Some(file) = &options.memory {
        for (device, map) in &pools {
            say(format!("\nmemory of {device}\n{}", memory::text(map)))?;
        }
        if let Some(file) = file {
            let failed = |error| format!("cannot write {}: {error}", file.display());
            std::fs::write(file, memory::svg(&pools)).map_err(failed)?;
        }
    }
    if let Some(file) = &options.memory_timeline {
        let failed = |error| format!("cannot write {}: {error}", file.display());
        std::fs::write(file, PoolTimeline::json(&timelines)).map_err(failed)?;
    }
    if options.json {
        let memory = pools.iter().map(|(device, map)| json!({"device": device, "pool": memory::facts(map)}));
        let all = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "images": images,
            "cards": cards.facts,
            "no_cards": cards.none,
            "tests": tests,
            "memory": memory.collect::<Vec<_>>(),
            "formats": formats,
            "choices": last.map(|(device, choices)| json!({"device": device, "operators": choices})),
        });
        output::write(format_args!("{}\n", serde_json::to_string_pretty(&all)?))?;
    }
    if failed > 0 {
        return Err(format!("{failed} of {} self-tests failed", tests.len()).into());
    }
    Ok(ExitCode::SUCCESS)
}
