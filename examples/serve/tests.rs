//! The whole server over the demo model, on the CPU.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::thread::JoinHandle;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use axum::response::Response;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;
use warpforge::models::{
    Adapter, Checkpoint, FeedForwardConfig, GenerationConfig, SessionOptions, SessionSampler, save_tensors,
};
use warpforge::ops::sampling::SamplingParams;
use warpforge::{Device, Tensor};

use super::*;

type Outcome = Result<(), Failure>;

const TEMPLATE: &str =
    "{% for m in messages %}# {{ m.role }}\n\n{{ m.content }}\n\n{% endfor %}# {{ who or 'assistant' }}\n\n";
const PROMPTS: [&str; 4] = ["The borrow checker", "fn main() {\n    let", "A vector", "An iterator that"];

fn demo() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo-model")
}

/// A server in this process.
struct Server {
    router: Router,
    served: Arc<Served>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Over the demo model with a chat template.
    fn start(arguments: &[&str]) -> Result<Self, Failure> {
        let folder = tempfile::tempdir()?;
        for file in std::fs::read_dir(demo())? {
            let file = file?;
            std::fs::copy(file.path(), folder.path().join(file.file_name()))?;
        }
        std::fs::write(folder.path().join("chat_template.jinja"), TEMPLATE)?;
        let model = folder.path().to_str().ok_or("a path")?;
        let all = ["serve", "--device", "cpu", "--name", "demo", "--context", "256", "--model", model];
        let (served, thread) = start(&Options::parse_from([&all, arguments].concat()))?;
        Ok(Server { router: http::router(served.clone()), served, thread: Some(thread) })
    }

    async fn send(&self, method: &str, path: &str, body: impl Into<Body>) -> Result<Response, Failure> {
        let request = Request::builder().method(method).uri(path).body(body.into())?;
        Ok(self.router.clone().oneshot(request).await?)
    }

    async fn post(&self, path: &str, body: &Value) -> Result<(StatusCode, Value), Failure> {
        let response = self.send("POST", path, body.to_string()).await?;
        let status = response.status();
        Ok((status, serde_json::from_str(&text(response).await?)?))
    }

    /// The text of a completion and how it ended.
    async fn complete(&self, body: &Value) -> Result<(String, String), Failure> {
        let (status, value) = self.post("/v1/completions", body).await?;
        assert_eq!(status, StatusCode::OK, "{value}");
        let choice = &value["choices"][0];
        let of = |name: &str| choice[name].as_str().map(str::to_owned).ok_or_else(|| format!("{value}"));
        Ok((of("text")?, of("finish_reason")?))
    }

    /// Waits until nothing runs; then every page is free again.
    async fn idle(&self) -> Outcome {
        for _ in 0..3000 {
            let counts = self.served.engine.counts();
            if counts.running + counts.waiting == 0 {
                assert_eq!(counts.batch.free_pages, counts.batch.pages);
                assert_eq!(counts.batch.sequences, 0);
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Err("requests go on".into())
    }

    async fn until_cancelled(&self, count: u64) -> Outcome {
        for _ in 0..3000 {
            if self.served.engine.counts().cancelled == count {
                return self.idle().await;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Err(format!("{} requests were cancelled", self.served.engine.counts().cancelled).into())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.served.engine.stop();
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok() || std::thread::panicking(), "the engine has panicked");
        }
    }
}

async fn text(response: Response) -> Result<String, Failure> {
    Ok(String::from_utf8(to_bytes(response.into_body(), usize::MAX).await?.to_vec())?)
}

/// The data of events, whose last is [DONE].
fn events(text: &str) -> Result<Vec<Value>, Failure> {
    let mut data: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(data.pop(), Some("[DONE]"), "{text}");
    Ok(data.into_iter().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

fn greedy(prompt: &str, max_tokens: usize) -> Value {
    json!({ "model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0 })
}

/// What `generate` writes: a session of one sequence.
fn generated(served: &Served, ids: &[u32], most: usize) -> Result<String, Failure> {
    written(&Model::load(&Device::cpu(), &demo(), DType::F32, &mut |_| {})?, served, ids, most)
}

fn written(model: &Model, served: &Served, ids: &[u32], most: usize) -> Result<String, Failure> {
    let mut session = model.session(SessionOptions { capacity: 256, ..SessionOptions::default() })?;
    let mut sampler = SessionSampler::new(&session, SamplingParams::default())?;
    session.prefill(0, ids)?;
    let mut new = Vec::new();
    while new.len() < most {
        let id = sampler.sample(&session)?[0];
        new.push(id);
        if model.config().eos_token_ids.contains(&id) {
            break;
        }
        session.decode(&[id])?;
    }
    Ok(served.codec.decode(&new)?)
}

/// The greedy texts that transformers has written, and what `generate` makes of a conversation.
#[tokio::test]
async fn answers_are_the_models() -> Outcome {
    let server = Server::start(&[])?;
    let expected: Value = serde_json::from_str(&std::fs::read_to_string(demo().join("expected.json"))?)?;
    for case in expected.as_array().ok_or("cases")? {
        let ids =
            |name: &str| -> Result<Vec<u32>, Failure> { Ok(serde_json::from_value(case[name].clone())?) };
        let new = ids("greedy")?;
        let ends = new.iter().any(|id| server.served.config.eos_token_ids.contains(id));
        let want = (server.served.codec.decode(&new)?, if ends { "stop" } else { "length" }.to_owned());
        let prompt = case["prompt"].as_str().ok_or("a prompt")?;
        assert_eq!(server.complete(&greedy(prompt, new.len())).await?, want, "{prompt:?}");
        let mut by_ids = greedy("", new.len());
        by_ids["prompt"] = json!(ids("ids")?);
        assert_eq!(server.complete(&by_ids).await?, want, "{prompt:?}");
    }

    let body = json!({
        "model": "demo", "temperature": 0, "max_completion_tokens": 24, "user": "somebody", "n": 1,
        "messages": [
            { "role": "system", "content": "Terse." },
            { "role": "user", "content": [{ "type": "text", "text": "What is" }, { "type": "text", "text": "a slice?" }] },
        ],
        "chat_template_kwargs": { "who": "answer" },
    });
    // Jinja leaves a template's last line end out.
    let rendered = "# system\n\nTerse.\n\n# user\n\nWhat is\na slice?\n\n# answer\n";
    let ids = server.served.codec.encode_rendered(rendered)?;
    let want = generated(&server.served, &ids, 24)?;
    let (status, value) = server.post("/v1/chat/completions", &body).await?;
    assert_eq!(status, StatusCode::OK, "{value}");
    assert_eq!(value["object"], "chat.completion");
    assert_eq!(value["choices"][0]["message"], json!({ "role": "assistant", "content": want }));
    assert_eq!(value["usage"]["prompt_tokens"], ids.len());
    server.idle().await
}

/// Pieces make up the whole, of both kinds, with stop strings and seeds.
#[tokio::test]
async fn streams() -> Outcome {
    let server = Server::start(&[])?;
    let (whole, _) = server.complete(&greedy(PROMPTS[0], 40)).await?;
    let stop: String = whole.chars().skip(30).take(5).collect();
    for more in [
        json!({}),
        json!({ "stop": [stop, "\u{0}"] }),
        json!({ "temperature": 0.9, "top_k": 40, "seed": -7 }),
    ] {
        for (path, is_chat) in [("/v1/completions", false), ("/v1/chat/completions", true)] {
            let mut body = if is_chat {
                json!({ "model": "demo", "temperature": 0, "max_tokens": 40,
                    "messages": [{ "role": "user", "content": PROMPTS[0] }] })
            } else {
                greedy(PROMPTS[0], 40)
            };
            for (name, value) in more.as_object().ok_or("an object")? {
                body[name] = value.clone();
            }
            let (status, whole) = server.post(path, &body).await?;
            assert_eq!(status, StatusCode::OK, "{whole}");
            body["stream"] = true.into();
            body["stream_options"] = json!({ "include_usage": true });
            let response = server.send("POST", path, body.to_string()).await?;
            assert_eq!(response.headers()["content-type"], "text/event-stream");
            let mut events = events(&text(response).await?)?;
            let usage = events.pop().ok_or("usage")?;
            assert_eq!((&usage["usage"], &usage["choices"]), (&whole["usage"], &json!([])));
            let choice = |event: &Value| event["choices"][0].clone();
            let last = choice(events.last().ok_or("a last one")?);
            assert_eq!(last["finish_reason"], whole["choices"][0]["finish_reason"]);
            assert!(events[..events.len() - 1].iter().all(|event| choice(event)["finish_reason"].is_null()));
            let of = |event: &Value| {
                let choice = choice(event);
                let text = if is_chat { &choice["delta"]["content"] } else { &choice["text"] };
                text.as_str().unwrap_or_default().to_owned()
            };
            let want = &whole["choices"][0];
            let want = if is_chat { &want["message"]["content"] } else { &want["text"] };
            assert!(events.len() > 3, "{events:?}");
            assert_eq!(events.iter().map(of).collect::<String>(), want.as_str().ok_or("a text")?);
        }
    }
    let mut body = greedy(PROMPTS[0], 40);
    body["stop"] = stop.clone().into();
    let before = whole.split(&stop).next().ok_or("a text")?.to_owned();
    assert_eq!(server.complete(&body).await?, (before, "stop".into()));
    server.idle().await
}

/// Log-probabilities are of the tokens that are written, in both forms, whole and in pieces; the most probable of a
/// greedy answer are its own.
#[tokio::test]
async fn logprobs() -> Outcome {
    let server = Server::start(&[])?;
    let mut body = greedy(PROMPTS[0], 12);
    body["logprobs"] = 3.into();
    let (status, value) = server.post("/v1/completions", &body).await?;
    assert_eq!(status, StatusCode::OK, "{value}");
    let (written, logprobs) = (&value["choices"][0]["text"], &value["choices"][0]["logprobs"]);
    let list = |name: &str| logprobs[name].as_array().cloned().unwrap_or_default();
    let [tokens, chosen, top, offsets] =
        ["tokens", "token_logprobs", "top_logprobs", "text_offset"].map(list);
    assert_eq!([tokens.len(), chosen.len(), top.len(), offsets.len()], [12; 4]);
    let joined: String = tokens.iter().filter_map(Value::as_str).collect();
    assert_eq!(joined, written.as_str().ok_or("a text")?);
    for i in 0..12 {
        let (own, top) = (chosen[i].as_f64().ok_or("a number")?, top[i].as_object().ok_or("an object")?);
        assert_eq!(top[tokens[i].as_str().ok_or("a text")?].as_f64(), Some(own));
        assert!(own <= 0.0 && (1..=3).contains(&top.len()));
        assert!(top.values().all(|other| other.as_f64().is_some_and(|other| other <= own)));
        let before: usize = tokens[..i].iter().filter_map(Value::as_str).map(|t| t.chars().count()).sum();
        assert_eq!(offsets[i], before);
    }
    let mut chat = json!({ "model": "demo", "temperature": 0, "max_tokens": 8, "logprobs": true, "top_logprobs": 2,
        "messages": [{ "role": "user", "content": PROMPTS[0] }] });
    let (status, whole) = server.post("/v1/chat/completions", &chat).await?;
    assert_eq!(status, StatusCode::OK, "{whole}");
    let content = whole["choices"][0]["logprobs"]["content"].as_array().ok_or("a list")?;
    assert!(!content.is_empty() && content.len() <= 8);
    for entry in content {
        let bytes = entry["token"].as_str().map(str::as_bytes);
        assert_eq!(entry["bytes"], json!(bytes));
        assert_eq!(entry["top_logprobs"][0]["logprob"], entry["logprob"]);
        assert_eq!(entry["top_logprobs"].as_array().map(Vec::len), Some(2));
    }
    chat["stream"] = true.into();
    let response = server.send("POST", "/v1/chat/completions", chat.to_string()).await?;
    let events = events(&text(response).await?)?;
    let pieces = events.iter().filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(&pieces.flatten().cloned().collect::<Vec<_>>(), content);
    // Nobody who has not asked gets any.
    let (_, value) = server.post("/v1/completions", &greedy(PROMPTS[0], 2)).await?;
    assert!(value["choices"][0]["logprobs"].is_null());
    server.idle().await
}

/// A bias decides, and penalties keep a text from repeating itself; other requests beside them are as they are alone.
#[tokio::test]
async fn penalties_and_biases() -> Outcome {
    let server = Server::start(&[])?;
    let plain = greedy(PROMPTS[0], 60);
    let (want, _) = server.complete(&plain).await?;
    let id = server.served.codec.encode("!")?.pop().ok_or("a token")?;
    let mut biased = plain.clone();
    biased["logit_bias"] = json!({ id.to_string(): 100 });
    let mut penalised = plain.clone();
    penalised["repetition_penalty"] = 50.0.into();
    penalised["presence_penalty"] = 2.into();
    penalised["frequency_penalty"] = 2.into();
    let (biased, penalised, plain) =
        tokio::join!(server.complete(&biased), server.complete(&penalised), server.complete(&plain));
    assert_eq!(plain?.0, want);
    assert_eq!(biased?.0, server.served.codec.decode(&[id; 60])?);
    // No token comes twice, nor one of the prompt.
    let penalised = penalised?.0;
    assert_ne!(penalised, want);
    server.idle().await
}

/// An adapter of the demo model, and the model with it in its weights.
fn adapter() -> Result<(tempfile::TempDir, Model), Failure> {
    let folder = tempfile::tempdir()?;
    std::fs::write(
        folder.path().join("adapter_config.json"),
        r#"{"r": 2, "lora_alpha": 2, "peft_type": "LORA"}"#,
    )?;
    let stream = Device::cpu().stream()?;
    let config = ModelConfig::from_dir(&demo())?;
    let FeedForwardConfig::Mlp(mlp) = config.decoder.layers[0].feed_forward else {
        return Err("an MLP".into());
    };
    let tensor = |rows: usize, cols: usize, scale: f32| {
        let values: Vec<f32> = (0..rows * cols).map(|i| scale * ((i * 37 % 11) as f32 - 5.0)).collect();
        Tensor::from_slice(&stream, &[rows, cols], &values)
    };
    let (a, b) = (tensor(2, mlp.intermediate_size, 0.1)?, tensor(config.decoder.hidden_size, 2, 0.3)?);
    let module = "base_model.model.model.layers.0.mlp.down_proj";
    let [name_a, name_b] = ["A", "B"].map(|which| format!("{module}.lora_{which}.weight"));
    let file = folder.path().join("adapter_model.safetensors");
    save_tensors(&file, &stream, [(&*name_a, &a), (&*name_b, &b)])?;
    let checkpoint = Checkpoint::open(&demo())?.with_adapter(Adapter::open(folder.path())?)?;
    let model = Model::from_checkpoint(&Device::cpu(), &checkpoint, DType::F32, &mut |_| {})?;
    Ok((folder, model))
}

/// Requests name an adapter as a model, beside others of the model alone.
#[tokio::test]
async fn adapters_are_models() -> Outcome {
    let (folder, merged) = adapter()?;
    let lora = format!("pirate={}", folder.path().display());
    let server = Server::start(&["--lora", &lora])?;
    let plain = greedy(PROMPTS[0], 40);
    let mut adapted = plain.clone();
    adapted["model"] = "pirate".into();
    let (got, other) = tokio::join!(server.complete(&adapted), server.complete(&plain));
    let (got, other) = (got?.0, other?.0);
    let ids = server.served.codec.encode(PROMPTS[0])?;
    assert_eq!(got, written(&merged, &server.served, &ids, 40)?);
    assert_eq!(other, generated(&server.served, &ids, 40)?);
    assert_ne!(got, other);
    let (_, value) = server.post("/v1/completions", &adapted).await?;
    assert_eq!(value["model"], "pirate");
    let models: Value = serde_json::from_str(&text(server.send("GET", "/v1/models", "").await?).await?)?;
    assert_eq!([&models["data"][0]["id"], &models["data"][1]["id"]], ["demo", "pirate"]);
    assert_eq!(server.send("GET", "/v1/models/pirate", "").await?.status(), StatusCode::OK);
    assert_eq!(server.send("GET", "/v1/models/parrot", "").await?.status(), StatusCode::NOT_FOUND);
    adapted["model"] = "parrot".into();
    assert_eq!(server.post("/v1/completions", &adapted).await?.0, StatusCode::NOT_FOUND);
    let twice = Server::start(&["--lora", &lora, "--lora", &lora]).err().map(|error| error.to_string());
    assert_eq!(twice.as_deref(), Some("--lora pirate: expected a name that nothing else has"));
    server.idle().await
}

/// What generation_config.json says is what a request has that says nothing.
#[test]
fn defaults_of_the_model() -> Outcome {
    let qwen = GenerationConfig {
        do_sample: true,
        temperature: 0.6,
        top_k: Some(20),
        top_p: 0.95,
        min_p: 0.1,
        repetition_penalty: 1.05,
    };
    let of = |own: &GenerationConfig, more: Value| -> Result<SamplingParams, Failure> {
        let mut body = json!({ "model": "demo", "prompt": "a" });
        for (name, value) in more.as_object().ok_or("an object")? {
            body[name] = value.clone();
        }
        let call = api::Call::parse(body.to_string().as_bytes(), false, own, 3);
        Ok(call.map_err(|error| error.to_json().to_string())?.sampling)
    };
    assert_eq!(of(&qwen, json!({}))?, qwen.sampling(3));
    let greedy = GenerationConfig { do_sample: false, ..qwen };
    let plain = SamplingParams { temperature: 1.0, seed: 3, ..SamplingParams::default() };
    assert_eq!(of(&greedy, json!({}))?, SamplingParams { repetition_penalty: 1.05, ..plain });
    let asked = json!({ "min_p": 0, "repetition_penalty": 1, "top_k": 0, "top_p": 1, "temperature": 1 });
    assert_eq!(of(&qwen, asked)?, plain);
    Ok(())
}

/// Drafts change nothing but the number of passes.
#[tokio::test]
async fn drafts() -> Outcome {
    let plain = Server::start(&[])?;
    let drafting = Server::start(&["--draft", "6"])?;
    // The model itself, so that each of its drafts is right.
    let demo = demo();
    let doubled = Server::start(&["--draft-model", demo.to_str().ok_or("a path")?, "--draft", "3"])?;
    for more in [
        json!({}),
        json!({ "temperature": 0.7, "seed": 11, "top_k": 20 }),
        json!({ "frequency_penalty": 0.5, "stop": "zz" }),
    ] {
        // What repeats itself.
        for prompt in ["let a = 1;\nlet b = 1;\nlet a = 1;\nlet b", PROMPTS[0]] {
            let mut body = greedy(prompt, 80);
            for (name, value) in more.as_object().ok_or("an object")? {
                body[name] = value.clone();
            }
            let want = plain.complete(&body).await?;
            assert_eq!(drafting.complete(&body).await?, want, "{body}");
            assert_eq!(doubled.complete(&body).await?, want, "{body}");
        }
    }
    let [plain, drafting, doubled] =
        [&plain, &drafting, &doubled].map(|server| server.served.engine.counts());
    assert_eq!([drafting.new_tokens, doubled.new_tokens], [plain.new_tokens; 2]);
    assert_eq!(doubled.accepted_tokens, doubled.drafted_tokens);
    // A token and three drafts, but for the first of each answer and where little is left of it.
    assert!(3 * doubled.batch.steps < plain.batch.steps, "{doubled:?} {plain:?}");
    assert_eq!((plain.drafted_tokens, plain.accepted_tokens), (0, 0));
    assert!(drafting.accepted_tokens > 0 && drafting.accepted_tokens <= drafting.drafted_tokens);
    assert!(drafting.batch.steps < plain.batch.steps, "{drafting:?} {plain:?}");
    Ok(())
}

#[test]
fn draft_models_that_do_not_fit() {
    let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/qwen3");
    let error =
        Server::start(&["--draft-model", &golden.to_string_lossy()]).err().map(|error| error.to_string());
    let error = error.unwrap_or_default();
    assert!(error.contains("a draft model of 384 tokens for a model of"), "{error}");
    assert!(error.starts_with("--draft-model"), "{error}");
}

/// Clients at once get what they get alone, also where pages are few and requests lose theirs; and nothing is left.
#[tokio::test]
async fn many_clients() -> Outcome {
    let server =
        Server::start(&["--sequences", "16", "--queue", "48", "--cache-mib", "2", "--step-tokens", "64"])?;
    let bodies: Vec<Value> = (0..64)
        .map(|client: usize| {
            let mut body = greedy(PROMPTS[client % PROMPTS.len()], 40 + 8 * (client % 5));
            if client % 3 == 1 {
                body["temperature"] = 0.8.into();
                body["top_p"] = 0.9.into();
                body["seed"] = client.into();
            }
            body
        })
        .collect();
    let mut alone = Vec::new();
    for body in &bodies {
        alone.push(server.complete(body).await?);
    }
    server.idle().await?;
    let server = Arc::new(server);
    let tasks: Vec<_> = bodies
        .into_iter()
        .map(|body| {
            let server = server.clone();
            tokio::spawn(async move { server.complete(&body).await.map_err(|error| error.to_string()) })
        })
        .collect();
    for (client, (task, want)) in std::iter::zip(tasks, alone).enumerate() {
        assert_eq!(task.await??, want, "client {client}");
    }
    server.idle().await?;
    let counts = server.served.engine.counts();
    assert!(counts.batch.preemptions > 0, "{counts:?}");
    assert_eq!((counts.stopped + counts.cut, counts.cancelled, counts.failed), (128, 0, 0));
    let metrics = text(server.send("GET", "/metrics", "").await?).await?;
    let pages = counts.batch.pages;
    for line in [
        format!("serve_free_pages {pages}"),
        format!("serve_pages {pages}"),
        "serve_requests_running 0".into(),
    ] {
        assert!(metrics.lines().any(|own| own == line), "{line}: {metrics}");
    }
    Ok(())
}

/// Each refusal has its status, the field's name and OpenAI's form.
#[tokio::test]
async fn bad_requests() -> Outcome {
    let server = Server::start(&[])?;
    let bad = StatusCode::BAD_REQUEST;
    for (more, status, param, code) in [
        (json!({ "model": "other" }), StatusCode::NOT_FOUND, "model", "model_not_found"),
        (json!({ "model": null }), bad, "model", ""),
        (json!({ "prompt": null }), bad, "prompt", ""),
        (json!({ "prompt": ["a", "b"] }), bad, "prompt", ""),
        (json!({ "prompt": [1, -1] }), bad, "prompt", ""),
        (json!({ "temperature": -1 }), bad, "temperature", ""),
        (json!({ "temperature": "hot" }), bad, "temperature", ""),
        (json!({ "temperature": 1e-40 }), bad, "temperature", ""),
        (json!({ "top_p": 0 }), bad, "top_p", ""),
        (json!({ "top_k": -2 }), bad, "top_k", ""),
        (json!({ "seed": 1.5 }), bad, "seed", ""),
        (json!({ "max_tokens": 0 }), bad, "max_tokens", ""),
        (json!({ "max_tokens": 256 }), bad, "prompt", "context_length_exceeded"),
        (json!({ "prompt": "a ".repeat(600) }), bad, "prompt", "context_length_exceeded"),
        (json!({ "stop": "" }), bad, "stop", ""),
        (json!({ "stop": ["a", "b", "c", "d", "e"] }), bad, "stop", ""),
        (json!({ "stream": 1 }), bad, "stream", ""),
        (json!({ "stream_options": {} }), bad, "stream_options", "unsupported_parameter"),
        (json!({ "n": 2 }), bad, "n", "unsupported_parameter"),
        (json!({ "logprobs": 6 }), bad, "logprobs", ""),
        (json!({ "logprobs": true }), bad, "logprobs", ""),
        (json!({ "top_logprobs": 1 }), bad, "top_logprobs", "unsupported_parameter"),
        (json!({ "typical_p": 0 }), bad, "typical_p", ""),
        (json!({ "logit_bias": { "a": 1 } }), bad, "logit_bias", ""),
        (json!({ "logit_bias": { "1": 101 } }), bad, "logit_bias", ""),
        (json!({ "logit_bias": { "1": 1, "01": 2 } }), bad, "logit_bias", ""),
        (json!({ "logit_bias": { "4000000000": 1 } }), bad, "logit_bias", ""),
        (json!({ "echo": true }), bad, "echo", "unsupported_parameter"),
        (json!({ "presence_penalty": 2.5 }), bad, "presence_penalty", ""),
        (json!({ "frequency_penalty": "a" }), bad, "frequency_penalty", ""),
        (json!({ "repetition_penalty": 0 }), bad, "repetition_penalty", ""),
        (json!({ "messages": [] }), bad, "messages", "unsupported_parameter"),
        (json!({ "no_such": 1 }), bad, "no_such", "unsupported_parameter"),
    ] {
        let mut body = greedy(PROMPTS[0], 1);
        for (name, value) in more.as_object().ok_or("an object")? {
            body[name] = value.clone();
        }
        let (got, value) = server.post("/v1/completions", &body).await?;
        let error = &value["error"];
        assert_eq!((got, &error["param"]), (status, &json!(param)), "{more}: {value}");
        assert_eq!(error["code"].as_str().unwrap_or_default(), code, "{more}: {value}");
        assert_eq!(error["type"], "invalid_request_error", "{value}");
        assert!(error["message"].as_str().is_some_and(|message| message.starts_with(param)), "{value}");
    }
    // What says nothing else than what happens anyway is fine.
    let mut body = greedy(PROMPTS[0], 1);
    for (name, value) in [
        ("n", json!(1)),
        ("presence_penalty", json!(0.0)),
        ("logprobs", Value::Null),
        ("suffix", Value::Null),
    ] {
        body[name] = value;
    }
    server.complete(&body).await?;

    let user = |content: Value| json!({ "messages": [{ "role": "user", "content": content }] });
    for (more, param) in [
        (json!({ "messages": [] }), "messages"),
        (json!({ "messages": ["a"] }), "messages[0]"),
        (json!({ "messages": [{ "content": "a" }] }), "messages[0].role"),
        (user(Value::Null), "messages[0].content"),
        (user(json!([{ "type": "image_url", "image_url": {} }])), "messages[0].content[0].type"),
        (json!({ "tools": [{ "type": "function" }] }), "tools"),
        (json!({ "logprobs": 1 }), "logprobs"),
        (json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs"),
        (json!({ "top_logprobs": 1 }), "top_logprobs"),
        (json!({ "response_format": { "type": "json_object" } }), "response_format"),
    ] {
        let mut body = json!({ "model": "demo", "messages": [{ "role": "user", "content": "a" }] });
        for (name, value) in more.as_object().ok_or("an object")? {
            body[name] = value.clone();
        }
        let (got, value) = server.post("/v1/chat/completions", &body).await?;
        assert_eq!((got, &value["error"]["param"]), (bad, &json!(param)), "{more}: {value}");
    }

    let too_large = StatusCode::PAYLOAD_TOO_LARGE;
    for (method, path, body, status) in [
        ("POST", "/v1/completions", "{".to_owned(), bad),
        ("POST", "/v1/completions", "[]".to_owned(), bad),
        ("POST", "/v1/completions", "[".repeat(100_000), bad),
        ("POST", "/v1/completions", " ".repeat(3 << 20), too_large),
        ("GET", "/v1/completions", String::new(), StatusCode::METHOD_NOT_ALLOWED),
        ("GET", "/v1/none", String::new(), StatusCode::NOT_FOUND),
        ("GET", "/v1/models/none", String::new(), StatusCode::NOT_FOUND),
    ] {
        let response = server.send(method, path, body).await?;
        assert_eq!(response.status(), status, "{method} {path}");
        let value: Value = serde_json::from_str(&text(response).await?)?;
        assert!(value["error"]["message"].is_string(), "{value}");
    }
    for path in ["/v1/models", "/v1/models/demo", "/health", "/metrics"] {
        assert_eq!(server.send("GET", path, "").await?.status(), StatusCode::OK, "{path}");
    }
    let models: Value = serde_json::from_str(&text(server.send("GET", "/v1/models", "").await?).await?)?;
    assert_eq!(models["data"][0]["id"], "demo");
    server.idle().await
}

/// A full server says so; one who leaves makes room, whether he runs or waits.
#[tokio::test]
async fn clients_that_leave() -> Outcome {
    let server = Server::start(&["--sequences", "1", "--queue", "1"])?;
    let mut long = greedy(PROMPTS[0], 200);
    long["stream"] = true.into();
    let want = server.complete(&greedy(PROMPTS[1], 8)).await?;

    let mut running = server.send("POST", "/v1/completions", long.to_string()).await?.into_body();
    let first = running.frame().await.ok_or("a piece")??;
    assert!(first.into_data().is_ok_and(|data| data.starts_with(b"data: {")));
    let waiting = server.send("POST", "/v1/completions", long.to_string()).await?;
    let refused = server.send("POST", "/v1/completions", long.to_string()).await?;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.headers()["retry-after"], "1");
    let value: Value = serde_json::from_str(&text(refused).await?)?;
    assert_eq!(value["error"]["code"], "rate_limit_exceeded");
    drop((running, waiting));
    server.until_cancelled(2).await?;
    assert_eq!(server.complete(&greedy(PROMPTS[1], 8)).await?, want);
    // A whole answer that nobody waits for any more.
    let mut whole = greedy(PROMPTS[0], 200);
    whole["stop"] = "\u{0}".into();
    let answer = server.send("POST", "/v1/completions", whole.to_string());
    assert!(tokio::time::timeout(Duration::from_millis(50), answer).await.is_err());
    server.until_cancelled(3).await?;
    assert_eq!(server.complete(&greedy(PROMPTS[1], 8)).await?, want);
    server.idle().await
}

/// What failed with the requests that were answered so does not make the server unhealthy, also if nobody asks it for
/// anything else.
#[tokio::test]
async fn a_step_that_fails() -> Outcome {
    let server = Server::start(&[])?;
    let sampling = SamplingParams { temperature: 1.0, top_p: 0.0, ..SamplingParams::default() };
    let (prompt, bias) = (vec![1, 2], Vec::new());
    let request = engine::Request { prompt, adapter: None, max_tokens: 1, sampling, bias, logprobs: false };
    let event = server.served.engine.submit(request).map_err(|_| "refused")?.recv().await;
    assert!(matches!(event, Some(engine::Event::Failed(reason)) if reason.contains("top_p")));
    for _ in 0..1000 {
        if server.send("GET", "/health", "").await?.status() == StatusCode::OK {
            return server.idle().await;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Err("it stays unhealthy".into())
}

/// As many may wait as there can be.
#[tokio::test]
async fn a_queue_without_an_end() -> Outcome {
    let server = Server::start(&["--queue", &usize::MAX.to_string()])?;
    server.complete(&greedy(PROMPTS[0], 1)).await?;
    server.idle().await
}

/// Writes a request, and reads all that comes.
fn by_socket(address: SocketAddr, body: &Value) -> Result<String, String> {
    let exchange = || -> std::io::Result<String> {
        let (mut socket, body) = (TcpStream::connect(address)?, body.to_string());
        let head =
            format!("POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n", body.len());
        socket.write_all((head + &body).as_bytes())?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer)?;
        Ok(answer)
    };
    exchange().map_err(|error| error.to_string())
}

/// After a signal what runs is finished, if there is time for it, else it is told; nothing new is taken.
#[tokio::test]
async fn the_end() -> Outcome {
    for grace in [Duration::from_secs(60), Duration::ZERO] {
        let server = Server::start(&[])?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (sender, mut receiver) = tokio::sync::mpsc::channel::<()>(1);
        let mut body = greedy(PROMPTS[0], 100);
        body["stream"] = true.into();
        let client = tokio::task::spawn_blocking(move || by_socket(address, &body));
        let engine = server.served.engine.clone();
        // The second signal never comes.
        let signal = async || match receiver.recv().await {
            Some(()) => {}
            None => std::future::pending().await,
        };
        let end = async move {
            while engine.counts().new_tokens < 3 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            sender.send(()).await
        };
        let (outcome, sent) = tokio::join!(serve(listener, server.served.clone(), signal, grace), end);
        outcome?;
        sent?;
        let answer = client.await??;
        if grace.is_zero() {
            assert!(answer.contains("the server stops") && !answer.contains("[DONE]"), "{answer}");
            assert_eq!(server.send("GET", "/health", "").await?.status(), StatusCode::SERVICE_UNAVAILABLE);
            let (status, _) = server.post("/v1/completions", &greedy("a", 1)).await?;
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        } else {
            assert!(answer.contains("[DONE]"), "{answer}");
            assert!(TcpStream::connect(address).is_err());
        }
        server.idle().await?;
    }
    Ok(())
}
