//! Writes text with a model: `cargo run --release --package generate`.
//!
//! `options` is the command line; `prompt` and `pictures` (with `decode`) make what the model gets; `answer` runs it,
//! `chat` again and again. Whatever can be refused is refused before the weights are loaded.

mod answer;
mod chat;
mod check;
mod decode;
mod interrupt;
#[path = "../language/mod.rs"]
mod language;
mod logits;
mod options;
#[path = "../output/mod.rs"]
mod output;
mod pictures;
mod prompt;
mod ranks;

use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Instant;

use answer::{Writer, print_speed};
use check::Check;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use logits::LogitsFile;
use options::Options;
use output::{Failure, note};
use pictures::Pictures;
use prompt::Conversation;
use ranks::Followers;
use text::Codec;
use warpforge::group::{Communicator, Group};
use warpforge::models::{
    Adapter, CacheType, LoadProgress, Logits, Model, ModelConfig, SessionOptions, SessionSampler, Shard,
};
use warpforge::ops::sampling::{PARAMS_LEN, SamplingFeatures, SamplingParams, SamplingProblem};
use warpforge::{DType, Device};

fn main() -> ExitCode {
    output::end("generate", Options::parse().found().and_then(|options| run(&options)))
}

/// Everything that is known before the weights are.
struct Plan {
    /// One, or those of a group.
    devices: Vec<Device>,
    config: ModelConfig,
    dtype: DType,
    codec: Option<Codec>,
    sampling: SamplingParams,
    session: SessionOptions,
    task: Task,
    dump: Option<LogitsFile>,
}

/// What there is to do.
enum Task {
    Continue { ids: Vec<u32>, pictures: Pictures },
    Talk(Box<Conversation>),
}

fn run(options: &Options) -> Result<ExitCode, Failure> {
    let plan = plan(options)?;
    if let [device] = &plan.devices[..] {
        let model = load(options, device, None, plan.dtype)?;
        return lead(options, plan, model, Followers::default());
    }
    let group = Group::new(&plan.devices)?;
    note(format_args!("a group of {}", plan.devices.len()));
    let (dtype, session) = (plan.dtype, plan.session);
    let (followers, orders) = Followers::new(plan.devices.len() - 1);
    let orders: Vec<Mutex<_>> = orders.into_iter().map(Mutex::new).collect();
    let leader = Mutex::new(Some((plan, followers)));
    let outcomes = group.run(|rank| {
        let taken = match rank.rank() {
            0 => leader.lock().map_err(|_| "the leader was taken")?.take(),
            other => {
                let orders = orders[other - 1].lock().map_err(|_| "the orders were taken")?;
                return ranks::follow(rank, options, (dtype, session), &orders).map(|()| None);
            }
        };
        let (plan, followers) = taken.ok_or("there is one leader")?;
        let model = load(options, rank.device(), Some(rank), dtype)?;
        lead(options, plan, model, followers).map(Some)
    });
    let first = outcomes.into_iter().next().ok_or("a group has ranks")?;
    Ok(first?.unwrap_or(ExitCode::SUCCESS))
}

/// Does what there is to do, with a model or its first part.
fn lead(options: &Options, plan: Plan, model: Model, followers: Followers) -> Result<ExitCode, Failure> {
    let Plan { config, codec, sampling, session, task, dump, .. } = plan;
    let session = model.session(session)?;
    if options.report {
        for (phase, reports) in session.optimization_reports() {
            for report in reports {
                note(format_args!("{phase}: {report}"));
            }
        }
    }
    interrupt::watch()?;
    let sampler = SessionSampler::new(&session, sampling)?;
    let mut writer = Writer::new(session, sampler, codec.as_ref(), &config.eos_token_ids);
    writer.followers = followers;
    writer.max_new_tokens = options.max_new_tokens();
    writer.is_shown = !options.print_ids;
    writer.check = options.check.then(Check::default);
    match task {
        Task::Talk(conversation) => {
            let codec = codec.as_ref().ok_or("--chat needs a tokenizer.json")?;
            chat::talk(&mut writer, codec, &config, *conversation, std::io::stdin().lock())?;
            Ok(ExitCode::SUCCESS)
        }
        Task::Continue { ids, pictures } => {
            let mut dumped = Vec::new();
            let mut logits = |rows: Vec<f32>| dumped.extend(rows);
            let prefill = writer.read(&ids, &pictures.visuals(), &mut logits, dump.is_some())?;
            if let Some(file) = dump {
                file.write(&dumped, ids.len())?;
            }
            let answer = writer.write()?;
            if options.print_ids {
                output::write(format_args!("{}\n", serde_json::to_string(&answer.ids)?))?;
            }
            print_speed(ids.len(), prefill, answer.ids.len(), answer.time);
            Ok(if answer.is_interrupted { ExitCode::from(output::INTERRUPTED) } else { ExitCode::SUCCESS })
        }
    }
}

/// Loading may take minutes: whatever is wrong with the arguments comes before.
fn plan(options: &Options) -> Result<Plan, Failure> {
    let config = ModelConfig::from_dir(&options.model)?;
    let sampling = options.sampling(&config.generation)?;
    let devices = options.devices()?;
    let device = &devices[0];
    let checkpoint_dtype = config.dtype.unwrap_or(DType::BF16);
    let dtype =
        options.dtype.unwrap_or(if device.limits().is_some() { checkpoint_dtype } else { DType::F32 });
    let vocab = config.decoder.vocab_size;
    // With tokens for a penalty to look at.
    let features = SamplingFeatures { history: 1, ..SamplingFeatures::of(&[sampling]) };
    let problem = SamplingProblem { features, ..SamplingProblem::new(1, vocab, DType::F32) };
    problem.write_params(&[sampling], &mut [0; PARAMS_LEN])?;
    note(format_args!("device: {}; weights in {dtype}", device.describe()));

    let codec = prompt::codec(options, &config)?;
    let task = task(options, &config, codec.as_ref())?;
    let most = config.decoder.max_position_embeddings;
    let (tokens, max_patches) = match &task {
        Task::Continue { ids, pictures } => (ids.len(), pictures.num_patches()),
        Task::Talk(_) => (0, 0),
    };
    let needed = tokens.saturating_add(options.max_new_tokens());
    let capacity = match (&task, options.context) {
        (_, Some(context)) => context,
        (Task::Continue { .. }, None) => needed,
        (Task::Talk(_), None) => most.min(8192),
    };
    if needed > capacity {
        return Err(format!(
            "--context: expected room for {tokens} tokens of the prompt and --max-new-tokens {}, got {capacity}",
            options.max_new_tokens()
        )
        .into());
    }
    let cache_type = options.cache_type;
    let session = SessionOptions { capacity, max_patches, cache_type, ..SessionOptions::default() };
    let session = if options.dump_logits.is_some() {
        // All rows of logits of a chunk, half a megabyte each for a large vocabulary.
        SessionOptions { chunk: 512, logits: Logits::All, ..session }
    } else {
        session
    };
    session.check(&config)?;
    // A group's ranks have parts of it.
    if devices.len() == 1 {
        check_memory(device, &config, (dtype, cache_type), capacity)?;
    }
    if capacity > most {
        note(format_args!(
            "warning: prompt and continuation are up to {capacity} tokens; the model was made for {most}"
        ));
    }
    let dump = options.dump_logits.as_deref().map(LogitsFile::create).transpose()?;
    Ok(Plan { devices, config, dtype, codec, sampling, session, task, dump })
}

fn task(options: &Options, config: &ModelConfig, codec: Option<&Codec>) -> Result<Task, Failure> {
    let has_pictures = !options.image.is_empty() || options.pixel_values.is_some();
    let pictures = match (&config.vision, &options.pixel_values) {
        _ if !has_pictures => Pictures::default(),
        (None, _) => return Err("this model does not see images".into()),
        (Some(vision), Some(path)) => Pictures::from_tensors(vision, path)?,
        (Some(vision), None) => Pictures::from_files(vision, &options.image)?,
    };
    let ids = match (&options.ids, codec) {
        (Some(ids), _) => ids.clone(),
        (None, None) => return Err("--prompt needs a tokenizer.json; use --ids without one".into()),
        (None, Some(codec)) if options.chat => {
            let mut conversation = Conversation::new(options)?;
            let Some(question) = prompt::text(options)? else {
                if has_pictures {
                    return Err("--image and --pixel-values go with --prompt".into());
                }
                return Ok(Task::Talk(Box::new(conversation)));
            };
            codec.encode_rendered(&conversation.ask(&question, pictures.len())?)?
        }
        (None, Some(codec)) => codec.encode(&prompt::text(options)?.unwrap_or_default())?,
    };
    let ids = match &config.vision {
        Some(vision) if has_pictures => pictures.insert(vision, &ids)?,
        _ => ids,
    };
    if ids.is_empty() {
        return Err("the prompt has no tokens".into());
    }
    config.decoder.check_ids(&ids)?;
    Ok(Task::Continue { ids, pictures })
}

/// The caches of a session must fit into the memory, beside what else there is: known before minutes of loading.
fn check_memory(
    device: &Device,
    config: &ModelConfig,
    (dtype, cache_type): (DType, CacheType),
    capacity: usize,
) -> Result<(), Failure> {
    let memory = match device.profile().memory_bytes {
        0 => host_memory(),
        bytes => Some(bytes),
    };
    let needed = config.decoder.cache_bytes_as(dtype, cache_type, capacity);
    match memory {
        Some(memory) if needed > memory => Err(format!(
            "--max-new-tokens or --context: {capacity} tokens need {needed} bytes of cache; {} has {memory}",
            device.describe()
        )
        .into()),
        _ => Ok(()),
    }
}

/// Bytes of this machine's memory, if the system says so.
fn host_memory() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse::<usize>().ok()?.checked_mul(1024)
}

fn load(
    options: &Options,
    device: &Device,
    rank: Option<&Communicator>,
    dtype: DType,
) -> Result<Model, Failure> {
    let started = Instant::now();
    let bar = ProgressBar::new(0)
        .with_style(ProgressStyle::with_template("loading {bytes}/{total_bytes} {bar:40} {eta}")?);
    let mut checkpoint = options.checkpoint()?;
    if let Some(folder) = &options.lora {
        checkpoint = checkpoint.with_adapter(Adapter::open(folder)?)?;
    }
    let mut progress = |so_far: LoadProgress| {
        bar.set_length(so_far.total_bytes);
        bar.set_position(so_far.loaded_bytes);
        ControlFlow::Continue(())
    };
    let model = match rank {
        Some(rank) => {
            let shard = Shard::from(rank).with_experts(options.experts);
            Model::of_rank(shard, &checkpoint, dtype, options.quant, &mut progress)?
        }
        None => Model::quantised_while(device, &checkpoint, dtype, options.quant, &mut progress)?,
    };
    bar.finish_and_clear();
    note(format_args!("loaded in {:.2} s", started.elapsed().as_secs_f64()));
    if !model.report().is_empty() {
        note(format_args!("not used, or not as it is: {}", model.report()));
    }
    Ok(model)
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    fn demo() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo-model")
    }

    /// A checkpoint that cannot be loaded: what is wrong with the arguments is said before that is.
    #[test]
    fn arguments_are_checked_before_loading() -> Result<(), Failure> {
        let folder = tempfile::tempdir()?;
        for file in ["config.json", "tokenizer.json"] {
            std::fs::copy(demo().join(file), folder.path().join(file))?;
        }
        let message = |arguments: &[&str]| {
            let model = folder.path().to_str().unwrap_or_default();
            let all = [&["generate", "--device", "cpu", "--model", model], arguments].concat();
            run(&Options::parse_from(all)).err().map(|error| error.to_string()).unwrap_or_default()
        };
        for (arguments, want) in [
            (&["--temperature", "-1", "--prompt", "a"][..], "sampling: temperature: expected "),
            (&["--temperature", "1", "--top-p", "7", "--prompt", "a"], "sampling: top_p: expected "),
            (&["--prompt", ""], "the prompt has no tokens"),
            (&["--ids", "1,2,99999"], "Session: ids: expected token ids below 2048, got 99999 at index 2"),
            (
                &["--ids", "1", "--max-new-tokens", "2147483648"],
                "Session: capacity: expected batch · capacity below 2^31, got 1 · 2147483649",
            ),
            (
                &["--ids", "1", "--max-new-tokens", "9", "--context", "9"],
                "--context: expected room for 1 tokens of the prompt and --max-new-tokens 9, got 9",
            ),
            (
                &["--ids", "1", "--max-new-tokens", "2000000000"],
                "--max-new-tokens or --context: 2000000001 tokens need ",
            ),
            (&["--ids", "1", "--image", "x.png"], "this model does not see images"),
            (&["--ids", "1", "--dump-logits", "/none/x"], "cannot write /none/x: "),
            (&["--chat", "--prompt", "a"], "no chat template in "),
            (&["--ids", "1,2"], "no weights in "),
        ] {
            assert!(message(arguments).starts_with(want), "{arguments:?}: {}", message(arguments));
        }
        Ok(())
    }

    /// Every file that is not there is named.
    #[test]
    fn missing_files() -> Result<(), Failure> {
        let folder = tempfile::tempdir()?;
        let path = |name: &str| folder.path().join(name).display().to_string();
        let model = folder.path().to_str().unwrap_or_default();
        let message = |more: &[&str]| {
            let all = [&["generate", "--device", "cpu", "--model", model, "--prompt", "a"], more].concat();
            run(&Options::parse_from(all)).err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(message(&[]), format!("{} does not exist", path("config.json")));
        std::fs::copy(
            demo().join("../../tests/golden/qwen3_vl/config.json"),
            folder.path().join("config.json"),
        )?;
        assert_eq!(message(&[]), format!("{} does not exist", path("tokenizer.json")));
        std::fs::copy(demo().join("tokenizer.json"), folder.path().join("tokenizer.json"))?;
        for flag in ["--image", "--pixel-values"] {
            assert_eq!(message(&[flag, &path("none")]), format!("{} does not exist", path("none")));
        }
        Ok(())
    }
}
