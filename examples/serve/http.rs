//! Routes, and what they answer.

use std::collections::hash_map::RandomState;
use std::convert::Infallible;
use std::hash::BuildHasher;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use text::{ChatOptions, ChatTemplate, Codec, StreamedText, TextError};
use tokio::sync::mpsc::{Receiver, UnboundedReceiver, channel};
use warpforge::models::{ModelConfig, TokenLogprobs};

use crate::api::{ApiError, Call, Prompt};
use crate::engine::{Engine, Event, Finish, Request};
use crate::metrics;
use crate::stop::StopText;

/// Pieces of a stream that wait for a reader; what comes behind them waits as tokens.
const PIECES: usize = 16;

/// What is served.
pub struct Served {
    pub name: String,
    /// Names of the model with an adapter, in the adapters' order.
    pub adapters: Vec<String>,
    pub config: ModelConfig,
    pub codec: Codec,
    pub template: Option<ChatTemplate>,
    /// Most tokens of a prompt and its answer.
    pub capacity: usize,
    pub engine: Engine,
    created: u64,
    calls: AtomicU64,
    /// Where seeds come from that clients do not give.
    random: RandomState,
}

impl Served {
    pub fn new(
        (name, adapters): (String, Vec<String>),
        config: ModelConfig,
        codec: Codec,
        template: Option<ChatTemplate>,
        capacity: usize,
        engine: Engine,
    ) -> Self {
        let (calls, random) = (AtomicU64::new(0), RandomState::new());
        Served { name, adapters, config, codec, template, capacity, engine, created: now(), calls, random }
    }

    /// Which adapter a name means, if it means one; none at all if nothing is called so.
    fn adapter(&self, name: &str) -> Option<Option<usize>> {
        if name == self.name {
            return Some(None);
        }
        self.adapters.iter().position(|adapter| adapter == name).map(Some)
    }

    fn model(&self, name: &str) -> Value {
        json!({ "id": name, "object": "model", "created": self.created, "owned_by": "warpforge",
            "max_model_len": self.capacity })
    }

    /// The tokens of a prompt.
    fn encode(&self, prompt: Prompt) -> Result<Vec<u32>, ApiError> {
        let param = prompt.param();
        let refused = |error: TextError| ApiError::bad(format!("{param}: {error}"));
        let ids = match prompt {
            Prompt::Ids(ids) => ids,
            Prompt::Text(text) => self.codec.encode(&text).map_err(refused)?,
            Prompt::Messages { messages, variables } => {
                let template = self.template.as_ref();
                let template =
                    template.ok_or_else(|| ApiError::bad("messages: the model has no chat template"))?;
                let options = ChatOptions { variables, ..ChatOptions::default() };
                let text = template.render(&messages, &options).map_err(refused)?;
                self.codec.encode_rendered(&text).map_err(refused)?
            }
        };
        if ids.is_empty() {
            return Err(ApiError::bad(format!("{param}: expected at least one token, got none")));
        }
        self.config.decoder.check_ids(&ids).map_err(|error| ApiError::bad(format!("{param}: {error}")))?;
        let images = self.config.vision.as_ref().map(|vision| [vision.image_token, vision.video_token]);
        if images.is_some_and(|images| ids.iter().any(|id| images.contains(id))) {
            return Err(ApiError::bad(format!("{param}: expected text, got the place of an image")));
        }
        Ok(ids)
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// All routes.
pub fn router(served: Arc<Served>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route(
            "/v1/models",
            get(async |State(served): Shared| {
                let names = std::iter::once(&served.name).chain(&served.adapters);
                let models: Vec<Value> = names.map(|name| served.model(name)).collect();
                Json(json!({ "object": "list", "data": models }))
            }),
        )
        .route("/v1/models/{*name}", get(model))
        .route("/health", get(health))
        .route(
            "/metrics",
            get(async |State(served): Shared| {
                let kind = "text/plain; version=0.0.4; charset=utf-8";
                ([(header::CONTENT_TYPE, kind)], metrics::text(&served.engine.counts()))
            }),
        )
        .fallback(async || ApiError::status(StatusCode::NOT_FOUND, "there is no such route"))
        .method_not_allowed_fallback(async || {
            ApiError::status(StatusCode::METHOD_NOT_ALLOWED, "the route has no such method")
        })
        .with_state(served)
}

type Shared = State<Arc<Served>>;
type Body = Result<Bytes, BytesRejection>;

async fn model(State(served): Shared, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    match served.adapter(&name) {
        Some(_) => Ok(Json(served.model(&name))),
        None => Err(ApiError::unknown_model(&name, &served.name)),
    }
}

async fn health(State(served): Shared) -> Response {
    let status = if !served.engine.is_running() {
        "stopped"
    } else if served.engine.is_failing() {
        "failing"
    } else {
        return Json(json!({ "status": "ok" })).into_response();
    };
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "status": status }))).into_response()
}

async fn completions(State(served): Shared, body: Body) -> Result<Response, ApiError> {
    answer(served, body, false).await
}

async fn chat(State(served): Shared, body: Body) -> Result<Response, ApiError> {
    answer(served, body, true).await
}

async fn answer(served: Arc<Served>, body: Body, is_chat: bool) -> Result<Response, ApiError> {
    let body = body.map_err(|rejected| ApiError::status(rejected.status(), rejected.body_text()))?;
    let number = served.calls.fetch_add(1, Ordering::Relaxed);
    let seed = served.random.hash_one(number);
    let call = Call::parse(&body, is_chat, &served.config.generation, seed)?;
    let Some(adapter) = served.adapter(&call.model) else {
        return Err(ApiError::unknown_model(&call.model, &served.name));
    };
    let Call { model, prompt, max_tokens, sampling, bias, logprobs, stop, stream, include_usage, .. } = call;
    let vocab = served.config.decoder.vocab_size;
    if let Some(&(id, _)) = bias.iter().find(|&&(id, _)| id as usize >= vocab) {
        return Err(ApiError::value("logit_bias", &format!("token ids below {vocab}"), &json!(id)));
    }
    let param = prompt.param();
    // Megabytes of text take a while.
    let encoder = served.clone();
    let encoded = tokio::task::spawn_blocking(move || encoder.encode(prompt)).await;
    let prompt = encoded.map_err(|error| ApiError::internal(error.to_string()))??;

    let room = served.capacity.saturating_sub(prompt.len());
    // As OpenAI has it where a request says nothing: 16 tokens, of an answer in a conversation what there is room for.
    let max_tokens = max_tokens.unwrap_or(if is_chat { room.max(1) } else { room.clamp(1, 16) });
    if max_tokens > room {
        return Err(ApiError::too_long(param, prompt.len(), max_tokens, served.capacity));
    }
    let kind = if is_chat { "chatcmpl" } else { "cmpl" };
    let id = format!("{kind}-{:x}-{number:x}", served.created);
    let prompt_tokens = prompt.len();
    let request = Request { prompt, adapter, max_tokens, sampling, bias, logprobs: logprobs.is_some() };
    let events = served.engine.submit(request)?;
    let form = Form { id, is_chat, created: now(), prompt_tokens };
    let wanted = logprobs.map(|top| Wanted { is_chat, top });
    if !stream {
        let mut writer = Writer::new(&served.codec, stop, events, wanted);
        let (mut text, mut logprobs) = (String::new(), wanted.map(|wanted| wanted.none()));
        let finish = loop {
            let next = writer.next().await?;
            text += &next.text;
            if let (Some(all), Some(own)) = (&mut logprobs, next.logprobs) {
                append(all, own);
            }
            if let Some(finish) = next.finish {
                break finish;
            }
        };
        return Ok(Json(form.whole(&model, &text, finish, logprobs, writer.tokens)).into_response());
    }
    let (pieces, receiver) = channel(PIECES);
    tokio::spawn(async move {
        let send = async |data: String| pieces.send(sse::Event::default().data(data)).await.is_ok();
        // The writer, and with it the request, goes with the client.
        let write = async {
            let mut writer = Writer::new(&served.codec, stop, events, wanted);
            if is_chat && !send(form.piece(&model, Delta::Role).to_string()).await {
                return;
            }
            loop {
                let Next { text, logprobs, finish } = match writer.next().await {
                    Ok(next) => next,
                    Err(error) => {
                        send(error.to_json().to_string()).await;
                        return;
                    }
                };
                let has_any = !text.is_empty() || logprobs.is_some();
                let piece = Delta::Text(&text, logprobs);
                if has_any && !send(form.piece(&model, piece).to_string()).await {
                    return;
                }
                let Some(finish) = finish else { continue };
                let mut last = vec![form.piece(&model, Delta::End(finish)).to_string()];
                if include_usage {
                    last.push(form.usage_piece(&model, writer.tokens).to_string());
                }
                last.push("[DONE]".into());
                for data in last {
                    if !send(data).await {
                        return;
                    }
                }
                return;
            }
        };
        tokio::select! {
            () = write => {}
            () = pieces.closed() => {}
        }
    });
    Ok(Sse::new(Pieces(receiver)).keep_alive(KeepAlive::default()).into_response())
}

/// Text from tokens, up to a stop string.
struct Writer<'a> {
    codec: &'a Codec,
    text: Option<(StreamedText<'a>, StopText)>,
    events: UnboundedReceiver<Event>,
    wanted: Option<Wanted>,
    /// Tokens that the model has written.
    tokens: usize,
    /// Characters of the tokens whose log-probabilities have been written.
    offset: usize,
}

/// What comes next of an answer.
struct Next {
    text: String,
    /// Of the token, in OpenAI's form.
    logprobs: Option<Value>,
    /// At the end why it ends.
    finish: Option<&'static str>,
}

impl<'a> Writer<'a> {
    fn new(
        codec: &'a Codec,
        stops: Vec<String>,
        events: UnboundedReceiver<Event>,
        wanted: Option<Wanted>,
    ) -> Self {
        let text = Some((StreamedText::new(Some(codec)), StopText::new(stops)));
        Writer { codec, text, events, wanted, tokens: 0, offset: 0 }
    }

    /// What comes next. Not to be asked again behind the end.
    async fn next(&mut self) -> Result<Next, ApiError> {
        let failed = |error: TextError| ApiError::internal(error.to_string());
        let Some(event) = self.events.recv().await else {
            return Err(ApiError::internal("the engine has ended"));
        };
        match (event, &mut self.text) {
            (Event::Token(id, found), Some((text, stop))) => {
                self.tokens += 1;
                let (piece, is_stopped) = stop.push(&text.push(id).map_err(failed)?);
                if is_stopped {
                    // Cancels what is left of the request.
                    self.events.close();
                }
                let logprobs = match (self.wanted, found) {
                    (Some(wanted), Some(found)) => {
                        let (value, characters) =
                            wanted.of_token(self.codec, id, &found, self.offset).map_err(failed)?;
                        self.offset += characters;
                        Some(value)
                    }
                    _ => None,
                };
                Ok(Next { text: piece, logprobs, finish: is_stopped.then_some("stop") })
            }
            (Event::End(finish), text) => {
                self.tokens += usize::from(finish == Finish::Stop);
                let reason = if finish == Finish::Stop { "stop" } else { "length" };
                let end = |text, finish| Next { text, logprobs: None, finish: Some(finish) };
                let Some((text, mut stop)) = text.take() else { return Ok(end(String::new(), reason)) };
                let (mut piece, is_stopped) = stop.push(&text.finish().map_err(failed)?);
                if is_stopped {
                    return Ok(end(piece, "stop"));
                }
                piece += &stop.finish();
                Ok(end(piece, reason))
            }
            (Event::Failed(reason), _) => Err(ApiError::internal(reason)),
            (Event::Stopped, _) => Err(ApiError::stopped()),
            (Event::Token(..), None) => Err(ApiError::internal("a token behind the end")),
        }
    }
}

/// Log-probabilities that a request asks for: of the tokens, and of so many most probable ones in their places.
#[derive(Clone, Copy)]
struct Wanted {
    is_chat: bool,
    top: usize,
}

impl Wanted {
    /// Those of no tokens.
    fn none(self) -> Value {
        if self.is_chat {
            json!({ "content": [] })
        } else {
            json!({ "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [] })
        }
    }

    /// Those of a token, and how many characters it has. JSON has no infinities: a token that cannot come has −9999, as
    /// in OpenAI's API.
    fn of_token(
        self,
        codec: &Codec,
        id: u32,
        found: &TokenLogprobs,
        offset: usize,
    ) -> Result<(Value, usize), TextError> {
        let number = |logprob: f32| if logprob.is_finite() { logprob } else { -9999.0 };
        let text = codec.decode(&[id])?;
        let top =
            found.top.iter().take(self.top).map(|&(id, logprob)| Ok((codec.decode(&[id])?, number(logprob))));
        let top: Vec<(String, f32)> = top.collect::<Result<_, TextError>>()?;
        let characters = text.chars().count();
        if self.is_chat {
            let entry = |text: &str, logprob: f32| {
                // Part of a character is no text, and the codec does not tell its bytes.
                let bytes = (!text.contains('\u{fffd}')).then_some(text.as_bytes());
                json!({ "token": text, "logprob": logprob, "bytes": bytes })
            };
            let mut own = entry(&text, number(found.chosen));
            own["top_logprobs"] = top.iter().map(|(text, logprob)| entry(text, *logprob)).collect();
            return Ok((json!({ "content": [own] }), characters));
        }
        let top: Value = top.into_iter().map(|(text, logprob)| (text, json!(logprob))).collect();
        let value = json!({ "tokens": [text], "token_logprobs": [number(found.chosen)], "top_logprobs": [top],
            "text_offset": [offset] });
        Ok((value, characters))
    }
}

/// Appends the lists of an object to those of another.
fn append(all: &mut Value, own: Value) {
    let Value::Object(own) = own else { return };
    for (name, list) in own {
        if let (Some(all), Value::Array(list)) = (all[&name].as_array_mut(), list) {
            all.extend(list);
        }
    }
}

/// What an answer looks like.
struct Form {
    id: String,
    is_chat: bool,
    created: u64,
    prompt_tokens: usize,
}

/// What a piece of a stream has.
enum Delta<'a> {
    Role,
    Text(&'a str, Option<Value>),
    End(&'static str),
}

impl Form {
    fn of(&self, model: &str, [text, chat]: [&str; 2], choices: Value) -> Value {
        let object = if self.is_chat { chat } else { text };
        json!({ "id": self.id, "object": object, "created": self.created, "model": model, "choices": choices })
    }

    fn usage(&self, tokens: usize) -> Value {
        let prompt = self.prompt_tokens;
        json!({ "prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens })
    }

    fn whole(&self, model: &str, text: &str, finish: &str, logprobs: Option<Value>, tokens: usize) -> Value {
        let mut choice = json!({ "index": 0, "finish_reason": finish, "logprobs": logprobs });
        if self.is_chat {
            choice["message"] = json!({ "role": "assistant", "content": text });
        } else {
            choice["text"] = text.into();
        }
        let mut whole = self.of(model, ["text_completion", "chat.completion"], json!([choice]));
        whole["usage"] = self.usage(tokens);
        whole
    }

    fn piece(&self, model: &str, delta: Delta<'_>) -> Value {
        let mut choice = json!({ "index": 0, "finish_reason": null, "logprobs": null });
        let (text, message) = match delta {
            Delta::Role => ("", json!({ "role": "assistant", "content": "" })),
            Delta::Text(text, logprobs) => {
                choice["logprobs"] = logprobs.into();
                (text, json!({ "content": text }))
            }
            Delta::End(finish) => {
                choice["finish_reason"] = finish.into();
                ("", json!({}))
            }
        };
        if self.is_chat {
            choice["delta"] = message;
        } else {
            choice["text"] = text.into();
        }
        self.of(model, ["text_completion", "chat.completion.chunk"], json!([choice]))
    }

    fn usage_piece(&self, model: &str, tokens: usize) -> Value {
        let mut piece = self.of(model, ["text_completion", "chat.completion.chunk"], json!([]));
        piece["usage"] = self.usage(tokens);
        piece
    }
}

/// The pieces of an answer as they come.
struct Pieces(Receiver<sse::Event>);

impl futures_core::Stream for Pieces {
    type Item = Result<sse::Event, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|piece| piece.map(Ok))
    }
}
