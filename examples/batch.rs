//! Continuous batching: more requests than there are places for, of prompts of different lengths, in one batch whose
//! sequences come and go.
//!
//! `cargo run --release --example batch [-- MODEL PROMPT…]`, without arguments with the demo model. Each line that is
//! written is a request that is complete; the last says what the batch did.

mod output;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use output::{Failure, write};
use text::Codec;
use warpforge::models::{BatchOptions, Model, RequestId, Scheduler};
use warpforge::{DType, Device, Place};

/// Most tokens of an answer.
const TOKENS: usize = 32;

fn main() -> ExitCode {
    output::end("batch", run().map(|()| ExitCode::SUCCESS))
}

fn run() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let demo = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model");
    let folder = arguments.next().map_or_else(demo, PathBuf::from);
    let mut prompts: Vec<String> = arguments.collect();
    if prompts.is_empty() {
        let endings = ["", " returns", " of a vector", " is implemented for", " may be", " has no"];
        prompts = endings.iter().map(|ending| format!("The iterator{ending}")).collect();
    }

    let device = Device::best();
    let dtype = if device.place() == Place::Cpu { DType::F32 } else { DType::BF16 };
    let model = Model::load(&device, &folder, dtype, &mut |_| {})?;
    let config = model.config();
    let codec = Codec::from_dir(&folder, config.bos_token_id)?;
    // Four at a time, and pages for fewer than four of the longest.
    let options = BatchOptions {
        max_sequences: 4,
        capacity: 256,
        page_tokens: 16,
        pages: 40,
        ..BatchOptions::default()
    };
    let mut scheduler = Scheduler::new(model.batch(options)?);
    let mut ends: BTreeMap<RequestId, usize> = BTreeMap::new();
    for prompt in &prompts {
        let ids = codec.encode(prompt)?;
        ends.insert(scheduler.submit(&ids)?, (ids.len() + TOKENS).min(options.capacity));
    }

    while let Some(step) = scheduler.step()? {
        let (logits, vocab) = (step.logits.to_host()?, step.logits.shape()[1]);
        for (request, rows) in step.requests {
            let row = &logits[rows.start * vocab..][..vocab];
            let Some(best) = (0..vocab).max_by(|&a, &b| row[a].total_cmp(&row[b])) else { continue };
            let is_end = config.eos_token_ids.contains(&(best as u32));
            if !is_end {
                scheduler.push(request, best as u32)?;
            }
            if is_end || scheduler.tokens(request)?.len() >= ends[&request] {
                let text = codec.decode(scheduler.tokens(request)?)?;
                write(format_args!("{request}: {}\n", output::printable(&text)))?;
                scheduler.finish(request)?;
            }
        }
    }
    let stats = scheduler.batch().stats();
    write(format_args!(
        "{} tokens in {} steps, {} found again; {} of {} pages are free\n",
        stats.computed_tokens, stats.steps, stats.reused_tokens, stats.free_pages, stats.pages
    ))
}
