//! Serves a model by HTTP: `cargo run --release --package serve`.
//!
//! `options` is the command line; `api` reads OpenAI's requests, `http` has the routes and writes the answers; `engine`
//! is the thread that owns the batch. A client that leaves drops its receiver, which cancels its request.

mod api;
mod engine;
mod http;
#[path = "../language/mod.rs"]
mod language;
mod metrics;
mod options;
#[path = "../output/mod.rs"]
mod output;
mod stop;
#[cfg(test)]
mod tests;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use engine::{Drafts, Engine};
use http::Served;
use options::Options;
use output::{Failure, note};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use warpforge::models::{Adapter, BatchOptions, Model, ModelConfig, ModelDraft, NgramDraft};
use warpforge::{DType, Invariance};

/// What clients have to read the end in, after requests were cancelled.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Tokens that a draft model drafts unless --draft says otherwise.
const DRAFT: usize = 4;

fn main() -> ExitCode {
    output::end("serve", run(&Options::parse()).map(|()| ExitCode::SUCCESS))
}

fn run(options: &Options) -> Result<(), Failure> {
    let (served, thread) = start(options)?;
    let engine = served.engine.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        let address = (options.host, options.port);
        let listener = TcpListener::bind(address)
            .await
            .map_err(|error| format!("cannot listen on {}:{}: {error}", options.host, options.port))?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let signal = async || {
            tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
        };
        note(format_args!("{} at http://{}/v1", served.name, listener.local_addr()?));
        serve(listener, served, signal, Duration::from_secs(options.grace)).await
    });
    engine.stop();
    // What it still holds of clients.
    runtime.shutdown_background();
    thread.join().map_err(|_| "the engine has panicked")?;
    outcome
}

/// Serves until a signal comes and what runs has ended, or the time for that has.
async fn serve(
    listener: TcpListener,
    served: Arc<Served>,
    mut signal: impl AsyncFnMut(),
    grace: Duration,
) -> Result<(), Failure> {
    let engine = served.engine.clone();
    let (stop, stopped) = oneshot::channel();
    let server = axum::serve(listener, http::router(served)).with_graceful_shutdown(async {
        // An error is that nobody can stop it any more.
        let _ = stopped.await;
    });
    let end = async move {
        signal().await;
        note(format_args!("stops when all requests have ended, or in {} s", grace.as_secs()));
        let _ = stop.send(());
        tokio::select! {
            () = signal() => {}
            () = tokio::time::sleep(grace) => {}
        }
        note(format_args!("ends the requests that are left"));
        engine.stop();
        tokio::time::sleep(LAST_WORDS).await;
    };
    tokio::select! {
        outcome = server.into_future() => Ok(outcome?),
        () = end => Ok(()),
    }
}

/// Everything but the server: whatever is wrong with the arguments comes before minutes of loading.
fn start(options: &Options) -> Result<(Arc<Served>, std::thread::JoinHandle<()>), Failure> {
    let config = ModelConfig::from_dir(&options.model)?;
    if let Some(folder) = &options.draft_model {
        ModelDraft::check(&ModelConfig::from_dir(folder)?, &config)
            .map_err(|error| format!("--draft-model {}: {error}", folder.display()))?;
    }
    let invariance = if options.invariant { Invariance::Batch } else { Invariance::None };
    let device = options.device.open()?.with_invariance(invariance);
    let own = if device.limits().is_some() { config.dtype.unwrap_or(DType::BF16) } else { DType::F32 };
    let dtype = options.dtype.unwrap_or(own);
    let name = match &options.name {
        Some(name) => name.clone(),
        None => {
            let path = options.model.canonicalize();
            let path = path.map_err(|error| format!("{}: {error}", options.model.display()))?;
            path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
        }
    };
    let codec = language::codec(&options.model, &config)?
        .ok_or_else(|| format!("no tokenizer in {}", options.model.display()))?;
    let template = language::template(&options.model)?;
    let capacity = options.context.unwrap_or(config.decoder.max_position_embeddings.min(8192));
    let batch = BatchOptions {
        max_sequences: options.sequences,
        max_step_tokens: options.step_tokens,
        capacity,
        cache_type: options.cache_type,
        ..BatchOptions::default()
    };
    // Drafts have rows of their own, for as many sequences as a step has several tokens of.
    let draft = options.draft.unwrap_or(if options.draft_model.is_some() { DRAFT } else { 0 });
    let drafts = draft.saturating_mul(batch.max_prompts.min(options.sequences));
    let batch = BatchOptions { max_logits: options.sequences.saturating_add(drafts), ..batch };
    let batch = batch.with_cache_bytes(&config, dtype, options.cache_mib.saturating_mul(1 << 20));
    batch.check().map_err(|error| {
        format!(
            "{error} (--context {capacity}, --sequences {}, --cache-mib {})",
            options.sequences, options.cache_mib
        )
    })?;
    let mut names: Vec<&str> = vec![&name];
    let mut adapters = Vec::new();
    for (name, folder) in &options.lora {
        if names.contains(&name.as_str()) {
            return Err(format!("--lora {name}: expected a name that nothing else has").into());
        }
        names.push(name);
        adapters.push(Adapter::open(folder)?);
    }
    let adapter_names: Vec<String> = names[1..].iter().map(|&name| name.to_owned()).collect();
    note(format_args!("device: {}; weights in {dtype}", device.describe()));
    let model = Model::load(&device, &options.model, dtype, &mut |_| {})?;
    if !model.report().is_empty() {
        note(format_args!("not used, or not as it is: {}", model.report()));
    }
    if template.is_none() {
        note(format_args!("no chat template: /v1/chat/completions has nothing to make a prompt with"));
    }
    let adapters: Vec<&Adapter> = adapters.iter().collect();
    let drafts = match &options.draft_model {
        None => Drafts::Ngrams(NgramDraft { tokens: draft, ..NgramDraft::default() }),
        Some(folder) => {
            let smaller = Model::load(&device, folder, dtype, &mut |_| {})?;
            let features = Engine::features(capacity);
            Drafts::Model(Box::new(ModelDraft::new(smaller.batch(batch)?, &model, features, draft)?))
        }
    };
    let (engine, thread) = Engine::start(&model, (batch, &adapters), options.queue, drafts)?;
    Ok((Arc::new(Served::new((name, adapter_names), config, codec, template, capacity, engine)), thread))
}
