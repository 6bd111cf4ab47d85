//! Chat templates against what transformers made of the same: `golden/write.py` wrote it.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use text::{ChatOptions, ChatTemplate, Message, Value, from_json};

type Outcome = Result<(), Box<dyn Error>>;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The special tokens of Qwen3, as the tokenizer that wrote the cases has them.
const TOKENS: [(&str, &str); 2] = [("eos_token", "<|im_end|>"), ("pad_token", "<|endoftext|>")];

#[test]
fn as_transformers() -> Outcome {
    let cases = from_json(&fs::read_to_string(golden("cases.json"))?)?;
    let mut compared = 0;
    for (index, case) in cases.try_iter()?.enumerate() {
        let field = |name: &str| case.get_attr(name);
        let source = fs::read_to_string(golden(field("template")?.as_str().ok_or("a name")?))?;
        let template = ChatTemplate::new(&source, &TOKENS)?;
        let messages: Vec<Message> = field("messages")?.try_iter()?.map(Message::from).collect();
        let mut options = ChatOptions {
            add_generation_prompt: field("add_generation_prompt")?.is_true(),
            ..ChatOptions::default()
        };
        if !field("tools")?.is_undefined() {
            options.tools = field("tools")?.try_iter()?.collect();
        }
        if !field("enable_thinking")?.is_undefined() {
            options.variables.push(("enable_thinking".into(), field("enable_thinking")?));
        }
        let got = template.render(&messages, &options);
        match field("error")?.as_str() {
            Some(error) => {
                let got = got.err().ok_or("an error")?.to_string();
                assert_eq!(got, format!("chat template: {error}"), "case {index}");
            }
            None => assert_eq!(got?, field("text")?.as_str().ok_or("a text")?, "case {index}"),
        }
        compared += 1;
    }
    assert_eq!(compared, 24);
    Ok(())
}

fn render(source: &str) -> Result<String, text::TextError> {
    ChatTemplate::new(source, &[])?.render(&[Message::text("user", "hello")], &ChatOptions::default())
}

/// A template is a file from elsewhere: it can neither run for ever nor take all memory, and it ends with its own
/// words.
#[test]
fn templates_are_bounded() -> Outcome {
    let message = |source: &str| render(source).err().map(|error| error.to_string()).unwrap_or_default();
    for endless in [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='xxxxxxxx') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ 'x' * 9999999999 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ] {
        assert!(message(endless).starts_with("chat template: "), "{endless}: {}", message(endless));
    }
    assert_eq!(message("{{ raise_exception('No, ' + messages[0].content) }}"), "chat template: No, hello");
    assert!(message("{% if %}").contains("syntax error"), "{}", message("{% if %}"));
    assert!(message("{{ messages[0] | tojson(sepparators=1) }}").contains("sepparators"));
    assert!(
        message("{{ strftime_now('%!') }}").contains("strftime_now"),
        "{}",
        message("{{ strftime_now('%!') }}")
    );
    assert!(message("{% include '/etc/passwd' %}").starts_with("chat template: "));
    Ok(())
}

#[test]
fn json_as_python_writes_it() -> Outcome {
    let values = from_json(r#"{"b": [], "a": {}, "c": [1, -2, 1.5, 1e20, true, null, "\u0001\"\\é"]}"#)?;
    let table = [
        ("{{ v | tojson }}", r#"{"b": [], "a": {}, "c": [1, -2, 1.5, 1e+20, true, null, "\u0001\"\\é"]}"#),
        ("{{ v.c[6] | tojson(ensure_ascii=true) }}", r#""\u0001\"\\\u00e9""#),
        ("{{ v.a | tojson(indent=4) }}{{ {'x': [1]} | tojson(indent=1) }}", "{}{\n \"x\": [\n  1\n ]\n}"),
        ("{{ '😀' | tojson(ensure_ascii=true) }}", r#""\ud83d\ude00""#),
    ];
    for (source, want) in table {
        let options = ChatOptions { variables: vec![("v".into(), values.clone())], ..ChatOptions::default() };
        assert_eq!(ChatTemplate::new(source, &[])?.render(&[], &options)?, want, "{source}");
    }
    Ok(())
}

/// Where a model's folder has its template.
#[test]
fn places_of_templates() -> Outcome {
    let folder = tempfile::tempdir()?;
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text);
    let text = |options: &ChatOptions| -> Result<Option<String>, text::TextError> {
        ChatTemplate::from_dir(folder.path())?.map(|template| template.render(&[], options)).transpose()
    };
    let plain = ChatOptions::default();
    let with_tools = ChatOptions { tools: vec![Value::from(1)], ..ChatOptions::default() };
    assert_eq!(text(&plain)?, None);
    write("tokenizer_config.json", r#"{"eos_token": {"content": "</s>"}}"#)?;
    assert_eq!(text(&plain)?, None);
    write("chat_template.json", r#"{"chat_template": "json{{ eos_token }}"}"#)?;
    assert_eq!(text(&plain)?.as_deref(), Some("json</s>"));
    write("tokenizer_config.json", r#"{"chat_template": "config", "eos_token": null}"#)?;
    assert_eq!(text(&plain)?.as_deref(), Some("config"));
    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}"#,
    )?;
    assert_eq!((text(&plain)?.as_deref(), text(&with_tools)?.as_deref()), (Some("d"), Some("t")));
    let message =
        || ChatTemplate::from_dir(folder.path()).err().map(|error| error.to_string()).unwrap_or_default();
    write("tokenizer_config.json", r#"{"chat_template": [{"name": "default"}]}"#)?;
    assert!(message().contains("tokenizer_config.json: expected chat_template with a name"), "{}", message());
    write("tokenizer_config.json", r#"{"chat_template": 7}"#)?;
    assert!(
        message()
            .ends_with("tokenizer_config.json: expected chat_template as a text or a list, got a number")
    );
    write("chat_template.jinja", "{% if %}")?;
    assert!(
        message().contains("chat_template.jinja: expected a chat template, got syntax error"),
        "{}",
        message()
    );
    write("chat_template.jinja", "file{{ eos_token }}\n")?;
    assert_eq!(text(&plain)?.as_deref(), Some("file"));
    Ok(())
}

/// Images are parts of a message's content.
#[test]
fn images_in_messages() -> Outcome {
    let source = "{% for part in messages[0].content %}{{ part.type }} {{ part.text }};{% endfor %}";
    let message = Message::images("user", 2, "what?");
    let text = ChatTemplate::new(source, &[])?.render(&[message], &ChatOptions::default())?;
    assert_eq!(text, "image ;image ;text what?;");
    Ok(())
}
