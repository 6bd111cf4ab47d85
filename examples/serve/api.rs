//! OpenAI's requests and errors. What a request says and the server does not do is refused by name.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use text::Message;
use warpforge::models::GenerationConfig;
use warpforge::ops::sampling::{PARAMS_LEN, SamplingFeatures, SamplingParams, SamplingProblem};
use warpforge::{DType, Error};

use crate::engine::{MAX_BIAS, MAX_TOP_LOGPROBS, Refused};

/// What a client is told, as OpenAI's errors are.
#[derive(Debug)]
pub struct ApiError {
    pub status: StatusCode,
    message: String,
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        ApiError { status, message: message.into(), kind, param: None, code: None }
    }

    /// A request that is wrong in itself.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A value that is not what it should be.
    pub fn value(param: &str, expected: &str, got: &Value) -> Self {
        let mut got = got.to_string();
        if got.len() > 80 {
            got = got.chars().take(80).chain("…".chars()).collect();
        }
        ApiError {
            param: Some(param.into()),
            ..Self::bad(format!("{param}: expected {expected}, got {got}"))
        }
    }

    fn unsupported(param: &str, what: &str) -> Self {
        let message = format!("{param}: {what}");
        ApiError { param: Some(param.into()), code: Some("unsupported_parameter"), ..Self::bad(message) }
    }

    /// Of a text that has no room.
    pub fn too_long(param: &str, prompt: usize, max_tokens: usize, capacity: usize) -> Self {
        let message = format!(
            "{param}: the context has room for {capacity} tokens; the prompt has {prompt}, and {max_tokens} more are asked for"
        );
        ApiError { param: Some(param.into()), code: Some("context_length_exceeded"), ..Self::bad(message) }
    }

    pub fn unknown_model(got: &str, known: &str) -> Self {
        let message = format!("model: {got:?} is not served here, {known:?} is");
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message);
        ApiError { param: Some("model".into()), code: Some("model_not_found"), ..error }
    }

    pub fn status(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    pub fn stopped() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "the server stops")
    }

    pub fn to_json(&self) -> Value {
        let ApiError { message, kind, param, code, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Full => {
                let message = "as many requests wait as may: try again later";
                let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
                ApiError { code: Some("rate_limit_exceeded"), ..error }
            }
            Refused::Stopped => Self::stopped(),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.to_json())).into_response();
        if [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&self.status) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// What is to be continued.
#[derive(Debug)]
pub enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Messages { messages: Vec<Message>, variables: Vec<(String, text::Value)> },
}

impl Prompt {
    /// The field that it comes from.
    pub fn param(&self) -> &'static str {
        if matches!(self, Prompt::Messages { .. }) { "messages" } else { "prompt" }
    }
}

/// A request for text.
#[derive(Debug)]
pub struct Call {
    pub model: String,
    pub prompt: Prompt,
    pub max_tokens: Option<usize>,
    pub sampling: SamplingParams,
    /// What is added to the logits of some tokens.
    pub bias: Vec<(u32, f32)>,
    /// Whether log-probabilities are asked for, and those of how many most probable tokens.
    pub logprobs: Option<usize>,
    pub stop: Vec<String>,
    pub stream: bool,
    pub include_usage: bool,
}

/// Most stop strings, as OpenAI has it.
const MAX_STOPS: usize = 4;

impl Call {
    /// Of a body; what it leaves out of sampling is the model's own, and `seed` the seed.
    pub fn parse(body: &[u8], is_chat: bool, own: &GenerationConfig, seed: u64) -> Result<Self, ApiError> {
        let value: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::bad(format!("the body: expected JSON: {error}")))?;
        let Value::Object(map) = value else {
            return Err(ApiError::bad("the body: expected a JSON object"));
        };
        let mut fields = Fields(map);
        let fields = &mut fields;
        let model = fields.required("model", "a text", |value| value.as_str().map(str::to_owned))?;
        let prompt = if is_chat { fields.chat()? } else { fields.prompt()? };
        let mut max_tokens = fields.count("max_tokens")?;
        if is_chat {
            max_tokens = fields.count("max_completion_tokens")?.or(max_tokens);
        }
        let sampling = fields.sampling(own, seed)?;
        let bias = fields.bias()?;
        let logprobs = fields.logprobs(is_chat)?;
        let stop = fields.stop()?;
        let stream = fields.flag("stream")?;
        let include_usage = fields.stream_options(stream)?;
        // It names a person, for whoever counts them.
        fields.0.remove("user");
        fields.neutral()?;
        Ok(Call { model, prompt, max_tokens, sampling, bias, logprobs, stop, stream, include_usage })
    }
}

/// Fields that are taken out one by one.
struct Fields(Map<String, Value>);

impl Fields {
    fn get<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match read(&value) {
                Some(read) => Ok(Some(read)),
                None => Err(ApiError::value(name, expected, &value)),
            },
        }
    }

    fn required<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<T, ApiError> {
        let found = self.get(name, expected, read)?;
        found.ok_or_else(|| ApiError::value(name, expected, &Value::Null))
    }

    fn count(&mut self, name: &str) -> Result<Option<usize>, ApiError> {
        let read = |value: &Value| usize::try_from(value.as_u64()?).ok().filter(|&count| count > 0);
        self.get(name, "a whole number above 0", read)
    }

    fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        Ok(self.get(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    fn number(&mut self, name: &str, expected: &str, from: f64, to: f64) -> Result<Option<f32>, ApiError> {
        let read = |value: &Value| value.as_f64().filter(|number| (from..=to).contains(number));
        Ok(self.get(name, expected, read)?.map(|number| number as f32))
    }

    fn prompt(&mut self) -> Result<Prompt, ApiError> {
        self.required("prompt", "a text, a list of one text, or a list of token ids", |value| match value {
            Value::String(text) => Some(Prompt::Text(text.clone())),
            Value::Array(list) => match &list[..] {
                [Value::String(text)] => Some(Prompt::Text(text.clone())),
                // One list of ids, as for several prompts.
                [Value::Array(ids)] => ids.iter().map(id).collect::<Option<_>>().map(Prompt::Ids),
                ids => ids.iter().map(id).collect::<Option<_>>().map(Prompt::Ids),
            },
            _ => None,
        })
    }

    fn chat(&mut self) -> Result<Prompt, ApiError> {
        let expected = "a list of at least one message";
        let list = self.required("messages", expected, |value| value.as_array().cloned())?;
        if list.is_empty() {
            return Err(ApiError::value("messages", expected, &Value::Array(list)));
        }
        let messages = list.into_iter().enumerate().map(|(index, value)| message(index, value));
        let messages = messages.collect::<Result<_, _>>()?;
        // As vLLM has it: further variables of the template.
        let kwargs = self.get("chat_template_kwargs", "an object", |value| value.as_object().cloned())?;
        let variables =
            kwargs.unwrap_or_default().into_iter().map(|(name, value)| Ok((name, of_json(&value)?)));
        Ok(Prompt::Messages { messages, variables: variables.collect::<Result<_, ApiError>>()? })
    }

    fn sampling(&mut self, own: &GenerationConfig, seed: u64) -> Result<SamplingParams, ApiError> {
        // Where the model has no opinion: as OpenAI's models.
        let plain = GenerationConfig {
            do_sample: true,
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: own.repetition_penalty,
        };
        let own = if own.do_sample { own } else { &plain };
        let temperature = self.number("temperature", "a number from 0 to 2", 0.0, 2.0)?;
        // −1 and 0: all.
        let expected = "a whole number from -1 to 4294967295";
        let read = |value: &Value| value.as_i64().filter(|k| (-1..=i64::from(u32::MAX)).contains(k));
        let top_k = self.get("top_k", expected, read)?;
        let top_p = self.number("top_p", "a number above 0 and at most 1", f64::MIN_POSITIVE, 1.0)?;
        let min_p = self.number("min_p", "a number from 0 to 1", 0.0, 1.0)?;
        let typical_p = self.number("typical_p", "a number above 0 and at most 1", f64::MIN_POSITIVE, 1.0)?;
        // OpenAI's, and that of transformers and vLLM.
        let [presence, frequency] = ["presence_penalty", "frequency_penalty"]
            .map(|name| self.number(name, "a number from -2 to 2", -2.0, 2.0));
        let repetition = self.number("repetition_penalty", "a number from 0.01 to 100", 0.01, 100.0)?;
        let read = |value: &Value| value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
        let asked = self.get("seed", "a whole number of 64 bits", read)?;
        let params = SamplingParams {
            temperature: temperature.unwrap_or(own.temperature),
            top_k: top_k.map_or(own.top_k, |k| u32::try_from(k).ok().filter(|&k| k > 0)),
            top_p: top_p.unwrap_or(own.top_p),
            min_p: min_p.unwrap_or(own.min_p),
            typical_p: typical_p.unwrap_or(1.0),
            presence_penalty: presence?.unwrap_or(0.0),
            frequency_penalty: frequency?.unwrap_or(0.0),
            repetition_penalty: repetition.unwrap_or(own.repetition_penalty),
            seed: asked.unwrap_or(seed),
            ..SamplingParams::default()
        };
        // What the operator refuses beside.
        let features = SamplingFeatures { typical_p: true, history: 1, ..SamplingFeatures::DRAWS };
        let problem = SamplingProblem { features, ..SamplingProblem::new(1, 1, DType::F32) };
        match problem.write_params(&[params], &mut [0; PARAMS_LEN]) {
            Ok(()) => Ok(params),
            Err(Error::Invalid { argument, expected, got, .. }) => {
                let param = Some(argument.to_string());
                Err(ApiError {
                    param,
                    ..ApiError::bad(format!("{argument}: expected {expected}, got {got}"))
                })
            }
            Err(error) => Err(ApiError::bad(error.to_string())),
        }
    }

    /// Of tokens by their ids, as texts.
    fn bias(&mut self) -> Result<Vec<(u32, f32)>, ApiError> {
        let expected = format!("an object of numbers from -100 to 100 by token ids, at most {MAX_BIAS}");
        let read = |value: &Value| {
            let entry = |(id, value): (&String, &Value)| {
                let value = value.as_f64().filter(|value| (-100.0..=100.0).contains(value))?;
                Some((id.parse::<u32>().ok()?, value as f32))
            };
            let mut entries: Vec<_> = value.as_object()?.iter().map(entry).collect::<Option<_>>()?;
            entries.sort_by_key(|&(id, _)| id);
            // Two texts may be the same number.
            let is_set = entries.windows(2).all(|pair| pair[0].0 != pair[1].0);
            (is_set && entries.len() <= MAX_BIAS).then_some(entries)
        };
        Ok(self.get("logit_bias", &expected, read)?.unwrap_or_default())
    }

    /// How many most probable tokens' log-probabilities are asked for, if any are.
    fn logprobs(&mut self, is_chat: bool) -> Result<Option<usize>, ApiError> {
        let most = |most: usize| {
            move |value: &Value| usize::try_from(value.as_u64()?).ok().filter(|&count| count <= most)
        };
        if !is_chat {
            // As a request without any.
            if self.0.get("logprobs").is_some_and(|value| *value == false) {
                self.0.remove("logprobs");
            }
            return self.get("logprobs", "a whole number from 0 to 5", most(5));
        }
        let is_asked = self.flag("logprobs")?;
        let expected = format!("a whole number from 0 to {MAX_TOP_LOGPROBS}");
        let top = self.get("top_logprobs", &expected, most(MAX_TOP_LOGPROBS))?;
        match (is_asked, top) {
            (false, Some(1..)) => Err(ApiError::unsupported("top_logprobs", "goes with logprobs: true")),
            (false, _) => Ok(None),
            (true, top) => Ok(Some(top.unwrap_or(0))),
        }
    }

    fn stop(&mut self) -> Result<Vec<String>, ApiError> {
        let read = |value: &Value| {
            let stops: Vec<String> = match value {
                Value::String(text) => vec![text.clone()],
                Value::Array(list) => {
                    list.iter().map(|value| value.as_str().map(str::to_owned)).collect::<Option<_>>()?
                }
                _ => return None,
            };
            (stops.len() <= MAX_STOPS && stops.iter().all(|stop| !stop.is_empty())).then_some(stops)
        };
        Ok(self.get("stop", "a text or a list of at most 4, none of them empty", read)?.unwrap_or_default())
    }

    fn stream_options(&mut self, stream: bool) -> Result<bool, ApiError> {
        const NAME: &str = "stream_options";
        let Some(map) = self.get(NAME, "an object", |value| value.as_object().cloned())? else {
            return Ok(false);
        };
        if !stream {
            return Err(ApiError::unsupported(NAME, "goes with stream: true"));
        }
        let mut fields = Fields(map);
        let include_usage = fields.flag("include_usage")?;
        match fields.0.into_iter().find(|(_, value)| !value.is_null()) {
            Some((name, _)) => Err(ApiError::unsupported(&format!("{NAME}.{name}"), "is not supported")),
            None => Ok(include_usage),
        }
    }

    /// What is left may only say what happens anyway.
    fn neutral(&self) -> Result<(), ApiError> {
        for (name, value) in &self.0 {
            let allowed = match name.as_str() {
                "n" | "best_of" => json!(1),
                "echo" | "store" => json!(false),
                "tools" | "functions" => json!([]),
                "tool_choice" => json!("none"),
                "response_format" => json!({ "type": "text" }),
                "modalities" => json!(["text"]),
                "suffix" => json!(""),
                "parallel_tool_calls" => value.clone(),
                _ => Value::Null,
            };
            let is_same = value == &allowed || allowed.as_f64().is_some_and(|n| value.as_f64() == Some(n));
            if !value.is_null() && !is_same {
                let what = if allowed.is_null() {
                    "is not supported".to_owned()
                } else {
                    format!("nothing but {allowed} is supported")
                };
                return Err(ApiError::unsupported(name, &what));
            }
        }
        Ok(())
    }
}

fn id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// A message for a template: an object with a role, and a content that is a text. Parts that are texts are joined by
/// line ends, as vLLM does it for templates that take texts.
fn message(index: usize, value: Value) -> Result<Message, ApiError> {
    let at = format!("messages[{index}]");
    let Value::Object(mut message) = value else {
        return Err(ApiError::value(&at, "an object", &value));
    };
    let role = message.get("role").unwrap_or(&Value::Null);
    if !role.is_string() {
        return Err(ApiError::value(&format!("{at}.role"), "a text", role));
    }
    let content = message.remove("content").unwrap_or(Value::Null);
    let text = match content {
        Value::String(text) => text,
        Value::Array(parts) => {
            let mut texts = Vec::new();
            for (part, value) in parts.iter().enumerate() {
                let at = format!("{at}.content[{part}]");
                if value["type"] != "text" {
                    return Err(ApiError::value(&format!("{at}.type"), "\"text\"", &value["type"]));
                }
                let text = value["text"].as_str();
                texts.push(
                    text.ok_or_else(|| ApiError::value(&format!("{at}.text"), "a text", &value["text"]))?,
                );
            }
            texts.join("\n")
        }
        other => {
            return Err(ApiError::value(&format!("{at}.content"), "a text or a list of parts", &other));
        }
    };
    message.insert("content".into(), Value::String(text));
    of_json(&Value::Object(message)).map(Message::from)
}

fn of_json(value: &Value) -> Result<text::Value, ApiError> {
    text::from_json(&value.to_string()).map_err(|error| ApiError::bad(error.to_string()))
}
