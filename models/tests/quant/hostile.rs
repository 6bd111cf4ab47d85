//! Files that are broken or meant to do harm: errors, no panic, no memory beyond a multiple of the file.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Instant;

use half::{bf16, f16};
use host::{DType, Device};
use models::{Checkpoint, Gguf, Model};

use super::writer::{Kv, Tensor, Writer, text};
use super::{GOLDEN, Outcome, folder};

/// Counts what each thread has allocated at most since it was last asked.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // Threads that end have no counter any more.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
}

// SAFETY: all is left to the system's allocator; the counters are not allocated.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Most bytes that this thread had beyond those that it has now while `work` ran.
fn peak(work: impl FnOnce()) -> usize {
    let before = LIVE.get();
    PEAK.set(before);
    work();
    (PEAK.get() - before).max(0) as usize
}

fn sound() -> Writer {
    let mut writer = Writer::new("qwen3");
    let numbers = [
        ("block_count", 1),
        ("context_length", 8),
        ("embedding_length", 8),
        ("feed_forward_length", 8),
        ("attention.head_count", 1),
        ("attention.key_length", 8),
    ];
    writer.numbers("qwen3", &numbers);
    writer.set("qwen3.attention.layer_norm_rms_epsilon", Kv::F32(1e-6));
    writer.floats("token_embd.weight", &[2, 8], &[0.5; 16]);
    writer
}

fn message(bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    fs::write(&path, bytes).expect("a file");
    let error = Checkpoint::open(&path).err().map(|error| error.to_string()).unwrap_or_default();
    error.replace(&format!("{}: ", path.display()), "")
}

#[test]
fn gguf_limits() {
    assert_eq!(message(&sound().bytes()), "");
    let changed = |at: usize, bytes: &[u8]| {
        let mut file = sound().bytes();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        message(&file)
    };
    let many = u64::MAX.to_le_bytes();
    // The header: magic, version, tensors, keys; then the first key's length.
    for (at, bytes, want) in [
        (0, &b"GGML"[..], "the magic number: expected GGUF, got [71, 71, 77, 76]"),
        (4, &[1, 0, 0, 0], "the version: expected 2 or 3, got 1"),
        (4, &[4, 0, 0, 0], "the version: expected 2 or 3, got 4"),
        (
            4,
            &[0, 0, 0, 3],
            "the version: expected 3 in little-endian order, got 0x3000000, of another byte order",
        ),
        (8, &many, "the number of tensors: expected as many as fit into"),
        (16, &many, "the number of keys: expected as many as fit into"),
        (
            24,
            &(1u64 << 40).to_le_bytes(),
            "key 0: expected a string of at most 1073741824 bytes, got 1099511627776",
        ),
        (24, &many, "key 0: expected a string of at most 1073741824 bytes"),
        (24, &(1u64 << 30).to_le_bytes(), "key 0: expected 1073741824 bytes, got the file's end after"),
    ] {
        assert!(changed(at, bytes).contains(want), "{want}: {}", changed(at, bytes));
    }
    let with = |change: &dyn Fn(&mut Writer)| {
        let mut writer = sound();
        change(&mut writer);
        message(&writer.bytes())
    };
    let key =
        |key: &'static str, value: Kv| with(&|writer| writer.metadata.push((key.into(), value.clone())));
    let tensor = |name: &str, shape: &[usize], kind: u32, bytes: usize| {
        with(&|writer| {
            let (name, shape) = (name.to_owned(), shape.to_vec());
            writer.tensors.push(Tensor { name, shape, kind, bytes: vec![0; bytes] });
        })
    };
    let huge = usize::MAX / 2;
    for (got, want) in [
        (
            key("qwen3.block_count", Kv::U32(1)),
            "qwen3.block_count: expected a key that is there once, got it again",
        ),
        (
            key("general.alignment", Kv::U32(48)),
            "general.alignment: expected a power of two below 2^32, got 48",
        ),
        (key("general.alignment", Kv::U32(0)), "a power of two below 2^32, got 0"),
        (key("general.alignment", Kv::Bool(true)), "a power of two below 2^32, got true"),
        (
            key("split.count", Kv::U32(2)),
            "split.count: expected the first file, which ends in -00001-of-00002.gguf",
        ),
        (
            tensor("token_embd.weight", &[1], 0, 4),
            "token_embd.weight: expected a tensor that is there once, got it again",
        ),
        (tensor(&"x".repeat(64), &[1], 0, 4), "expected a name of at most 63 bytes, got 64"),
        (tensor("x", &[1; 5], 0, 4), "x: expected at most 4 dimensions, got 5"),
        (
            tensor("x", &[2, huge], 0, 4),
            "x: expected rows of whole blocks of 1, and a size that can be counted",
        ),
        (
            tensor("x", &[huge, huge], 0, 4),
            "x: expected rows of whole blocks of 1, and a size that can be counted",
        ),
        (tensor("x", &[1, usize::MAX], 0, 4), "x: expected sizes below 2^63"),
        (
            tensor("x", &[3, 33], 2, 18),
            "x: expected rows of whole blocks of 32, and a size that can be counted, got Q4_0 [3, 33]",
        ),
        (tensor("x", &[1, 32], 20, 18), "x: expected one of the types F32, F16, BF16, Q4_0, Q4_1"),
        (tensor("x", &[1, 32], 20, 18), ", got IQ4_NL"),
        (tensor("x", &[1, 32], 4000, 18), ", got ggml type 4000"),
        (tensor("x", &[64], 0, 4), "x: expected data up to byte 320 of the data section"),
    ] {
        assert!(got.contains(want), "{want}: {got}");
    }
    // Offsets must follow each other.
    let mut file = sound().bytes();
    let at =
        file.windows(17).position(|bytes| bytes == b"token_embd.weight").expect("a name") + 17 + 4 + 16 + 4;
    file[at] = 32;
    assert!(
        message(&file)
            .contains("token_embd.weight: expected its data at 0, behind the tensor before, got 32")
    );
    // Arrays: of too many, of arrays, of an unknown type.
    let array = |kind: u32, len: u64| {
        let mut file = sound().bytes()[..16].to_vec();
        file.extend(1u64.to_le_bytes());
        text(&mut file, "k");
        file.extend([9u32.to_le_bytes(), kind.to_le_bytes()].concat());
        file.extend(len.to_le_bytes());
        file.extend([0; 64]);
        message(&file)
    };
    assert!(
        array(0, 1 << 31).contains("k: expected an array of at most 1073741824 elements, got 2147483648")
    );
    assert!(array(12, 1 << 30).contains("k: expected 8589934592 bytes, got the file's end after 64"));
    assert!(array(8, 1 << 30).contains("k: expected 4 bytes, got the file's end after 0"));
    assert!(array(9, 1).contains("k: expected an array of numbers or strings, got an array of arrays"));
    assert!(array(13, 1).contains("k: expected a type from 0 to 12, got 13"));
}

#[test]
fn gguf_metadata_that_do_not_fit() {
    let set = |key: &str, value: Option<Kv>| {
        let mut writer = sound();
        writer.metadata.retain(|(known, _)| known != key);
        writer.metadata.extend(value.map(|value| (key.to_owned(), value)));
        message(&writer.bytes())
    };
    for (key, value, want) in [
        ("general.architecture", None, "general.architecture: expected one of llama, qwen2, qwen3"),
        ("general.architecture", Some(Kv::Text("gemma3".into())), "deepseek2, got gemma3"),
        ("general.architecture", Some(Kv::U32(3)), "general.architecture: expected a string, got 3"),
        ("qwen3.block_count", None, "qwen3.block_count: expected a number, got nothing"),
        ("qwen3.block_count", Some(Kv::F32(1.0)), "qwen3.block_count: expected a number without sign, got 1"),
        (
            "qwen3.block_count",
            Some(Kv::U32(u32::MAX)),
            "num_hidden_layers: expected an integer from 1 to 1024",
        ),
        (
            "qwen3.embedding_length",
            Some(Kv::U32(9)),
            "qwen3.embedding_length: expected 8, as token_embd has, got 9",
        ),
        ("qwen3.attention.head_count", Some(Kv::U32(0)), "num_attention_heads: expected an integer from 1"),
        (
            "qwen3.attention.layer_norm_rms_epsilon",
            Some(Kv::F32(f32::NAN)),
            "expected a finite float, got NaN",
        ),
        (
            "qwen3.rope.scaling.type",
            Some(Kv::Text("longrope".into())),
            "expected none, linear or yarn, got longrope",
        ),
        (
            "qwen3.rope.dimension_count",
            Some(Kv::U32(9)),
            "qwen3.rope.dimension_count: expected at most 8, got 9",
        ),
        ("qwen3.attention.value_length", Some(Kv::U32(4)), "expected 8, as keys have, got 4"),
    ] {
        let got = set(key, value);
        assert!(got.contains(want), "{want}: {got}");
    }
}

/// The files of the first one's name, and no other.
#[test]
fn split_files() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = |number: usize| folder.path().join(format!("m-{number:05}-of-00002.gguf"));
    let mut first = sound();
    first.set("split.count", Kv::U32(2));
    fs::write(path(1), first.bytes())?;
    let message =
        |path: &Path| Checkpoint::open(path).err().map(|error| error.to_string()).unwrap_or_default();
    assert_eq!(message(&path(1)), format!("{} does not exist", path(2).display()));
    let mut second = Writer::default();
    second.floats("output.weight", &[2, 8], &[0.0; 16]);
    fs::write(path(2), second.bytes())?;
    let checkpoint = Checkpoint::open(&path(1))?;
    assert!(!checkpoint.config().decoder.tie_word_embeddings);
    second.floats("token_embd.weight", &[2, 8], &[0.0; 16]);
    fs::write(path(2), second.bytes())?;
    assert!(
        message(&path(1)).contains("token_embd.weight: expected a name that no other file has, got it again")
    );
    Ok(())
}

/// Scales of every format that are no numbers, or stand for none, are found when they are read.
#[test]
fn scales_that_are_no_numbers() -> Outcome {
    let f32s = |values: &[f32]| values.iter().map(|value| value.to_le_bytes().to_vec()).collect::<Vec<_>>();
    let f16s = || [f16::NAN, f16::INFINITY].map(|value| value.to_le_bytes().to_vec()).to_vec();
    let bf16s = || [bf16::NAN, bf16::INFINITY].map(|value| value.to_le_bytes().to_vec()).to_vec();
    let all = f32s(&[f32::NAN, f32::INFINITY]);
    let module = "model.layers.0.self_attn.v_proj";
    let copy = tempfile::tempdir()?;
    for (name, scale, unsound) in [
        ("awq_int4", "scales", f16s()),
        ("gptq_int8", "scales", f16s()),
        ("gptq_int4_asym_g64", "scales", f16s()),
        ("gptq_int4_desc_act", "scales", f16s()),
        ("fp8_block", "weight_scale_inv", all.clone()),
        ("fp8_block_ragged", "weight_scale_inv", all.clone()),
        ("ct_w4a16_asym_g128", "weight_scale", bf16s()),
        ("ct_w8a8_int8", "weight_scale", bf16s()),
        // The one NaN that there is.
        ("ct_mxfp4a16", "weight_scale", vec![vec![0xff]]),
        ("ct_nvfp4a16", "weight_scale", vec![vec![0x7f], vec![0xff]]),
        ("modelopt_nvfp4", "weight_scale", vec![vec![0x7f], vec![0xff]]),
        // It divides.
        ("ct_nvfp4a16", "weight_global_scale", f32s(&[f32::NAN, f32::INFINITY, 0.0, 1e-39])),
        ("modelopt_nvfp4", "weight_scale_2", all),
    ] {
        for unsound in unsound {
            let from = folder().join(name);
            for file in fs::read_dir(&from)?.filter_map(Result::ok) {
                if file.path().extension().is_some_and(|extension| extension == "json") {
                    fs::copy(file.path(), copy.path().join(file.file_name()))?;
                }
            }
            let mut bytes = fs::read(from.join("model.safetensors"))?;
            let header = u64::from_le_bytes(bytes[..8].try_into()?) as usize;
            let json: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header])?;
            let entry = &json[format!("{module}.{scale}")];
            let end = 8 + header + entry["data_offsets"][1].as_u64().ok_or("an offset")? as usize;
            bytes[end - unsound.len()..end].copy_from_slice(&unsound);
            fs::write(copy.path().join("model.safetensors"), bytes)?;
            let error = Model::load(&Device::cpu(), copy.path(), DType::F32, &mut |_| {}).err();
            let message = error.ok_or_else(|| format!("{name}, {scale}, {unsound:?}: no error"))?.to_string();
            assert!(message.contains(module) && message.contains("finite"), "{name}, {scale}: {message}");
        }
        for file in fs::read_dir(copy.path())?.filter_map(Result::ok) {
            fs::remove_file(file.path())?;
        }
    }
    Ok(())
}

/// The same of GGUF's blocks, at each place where one has a scale or a minimum in binary16.
#[test]
fn blocks_whose_scales_are_no_numbers() -> Outcome {
    let copy = tempfile::tempdir()?;
    let path = copy.path().join("model.gguf");
    let mut met = Vec::new();
    for name in GOLDEN.into_iter().filter(|name| name.starts_with("gguf_")) {
        let from = folder().join(name).join("model.gguf");
        let (sound, file) = (fs::read(&from)?, Gguf::open(&from)?);
        // Of each tensor: the type, where its data begins among all data, and where the description ends.
        let described = |name: &str| {
            let key = [&(name.len() as u64).to_le_bytes(), name.as_bytes()].concat();
            let at = sound.windows(key.len()).position(|bytes| bytes == key).ok_or("a name")? + key.len();
            let number = |at: usize| u32::from_le_bytes(sound[at..at + 4].try_into().unwrap_or_default());
            let kind = at + 4 + 8 * number(at) as usize;
            Ok::<_, &str>((number(kind), number(kind + 4) as usize, kind + 12))
        };
        let names: Vec<&str> = file.names().collect();
        let all = names.iter().map(|name| described(name)).collect::<Result<Vec<_>, _>>()?;
        let data = all.iter().map(|(.., end)| *end).max().unwrap_or(0).next_multiple_of(32);
        for (tensor, (kind, start, _)) in std::iter::zip(names, all) {
            // The places of binary16 in a block: scale and minimum, or one scale.
            let places: &[usize] = match kind {
                2 | 6 | 8 => &[0],
                3 | 7 | 12 | 13 => &[0, 2],
                14 => &[208],
                _ => continue,
            };
            if met.iter().filter(|(known, _)| *known == kind).count() == 2 {
                continue;
            }
            met.push((kind, tensor.to_owned()));
            for place in places {
                for unsound in [f16::NAN, f16::INFINITY] {
                    let mut bytes = sound.clone();
                    let at = data + start + place;
                    bytes[at..at + 2].copy_from_slice(&unsound.to_le_bytes());
                    fs::write(&path, bytes)?;
                    let error = Model::load(&Device::cpu(), &path, DType::F32, &mut |_| {}).err();
                    let message =
                        error.ok_or_else(|| format!("{name}, {tensor}, {place}: no error"))?.to_string();
                    assert!(message.contains("finite scales, got"), "{name}, {tensor}: {message}");
                }
            }
        }
    }
    let kinds: std::collections::BTreeSet<u32> = met.iter().map(|(kind, _)| *kind).collect();
    assert!(kinds.is_superset(&[2, 3, 6, 7, 8, 12, 13, 14].into()), "{kinds:?}");
    Ok(())
}

/// Opens a mutant and reads from it what a loader would, now and then all of it.
fn use_mutant(path: &Path, tensor: &str, loads: bool) {
    let Ok(checkpoint) = Checkpoint::open(path) else { return };
    if let Ok(Some(matrix)) = checkpoint.quantised(tensor) {
        let mut row = vec![0.0; matrix.k()];
        for index in [0, matrix.n().saturating_sub(1)] {
            if index < matrix.n() {
                matrix.dequantise_row(index, &mut row);
            }
        }
    }
    if let Some(file) = checkpoint.gguf() {
        let _ = file.vocabulary();
    }
    if loads {
        let _ = Model::from_checkpoint(&Device::cpu(), &checkpoint, DType::F32, &mut |_| {});
    }
}

/// Mutants of the golden files: bytes, words that are sizes, and lengths are changed; above all in headers.
#[test]
fn mutants_of_golden_files() -> Outcome {
    const PER_FILE: u64 = 620;
    // What would be other threads' work is this one's, and so is what it allocates.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build()?;
    assert_eq!(pool.current_thread_index(), Some(0));
    let started = Instant::now();
    let mut mutants = 0;
    for (number, name) in GOLDEN.into_iter().enumerate() {
        let scratch = tempfile::tempdir()?;
        let file = if name.starts_with("gguf_") { "model.gguf" } else { "model.safetensors" };
        let sound = fs::read(folder().join(name).join(file))?;
        let config = fs::read(folder().join(name).join("config.json")).ok();
        let config_path = scratch.path().join("config.json");
        if let Some(config) = &config {
            fs::write(&config_path, config)?;
        }
        let path = scratch.path().join(file);
        fs::write(&path, &sound)?;
        let opened = if config.is_some() { scratch.path() } else { path.as_path() };
        let tensor = match name {
            "fp8_block_moe" | "awq_int4_moe" | "gguf_moe_mxfp4" => {
                "model.layers.0.mlp.experts.1.down_proj.weight"
            }
            _ => "model.layers.0.mlp.down_proj.weight",
        };
        // The metadata and names; a golden file has a few kilobytes of them.
        let header = sound.len().min(12_000) as u64;
        let mut state = number as u64 + 1;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below.max(1)
        };
        let mut handle = fs::OpenOptions::new().write(true).open(&path)?;
        for mutant in 0..PER_FILE {
            let kind = random(12);
            let mut changed = Some(0..0);
            if kind == 0
                && let Some(config) = &config
            {
                let mut config = config.clone();
                for _ in 0..=random(3) {
                    let at = random(config.len() as u64) as usize;
                    config[at] = b"0123456789-\"{}[],:nulltrue"[random(26) as usize];
                }
                fs::write(&config_path, &config)?;
            } else if kind == 1 {
                handle.set_len(random(sound.len() as u64))?;
                changed = None;
            } else {
                let at = if kind == 2 { random(sound.len() as u64) } else { random(header) };
                let bytes = match random(4) {
                    0 => vec![random(256) as u8],
                    1 => vec![sound[at as usize] ^ 1 << random(8)],
                    2 => vec![0xff; 8],
                    _ => (1u64 << random(64)).to_le_bytes().to_vec(),
                };
                let bytes = &bytes[..bytes.len().min(sound.len() - at as usize)];
                handle.seek(SeekFrom::Start(at))?;
                handle.write_all(bytes)?;
                changed = Some(at as usize..at as usize + bytes.len());
            }
            let taken = peak(|| use_mutant(opened, tensor, mutant % 20 == 0));
            // What is loaded is in f32, and once more in a buffer.
            assert!(taken <= 32 * sound.len() + (1 << 20), "{name}, mutant {mutant}: {taken} bytes");
            match changed {
                Some(range) => {
                    handle.seek(SeekFrom::Start(range.start as u64))?;
                    handle.write_all(&sound[range])?;
                }
                None => {
                    handle.set_len(0)?;
                    handle.seek(SeekFrom::Start(0))?;
                    handle.write_all(&sound)?;
                }
            }
            if let (0, Some(config)) = (kind, &config) {
                fs::write(&config_path, config)?;
            }
            mutants += 1;
        }
    }
    println!("{mutants} mutants in {:.1} s", started.elapsed().as_secs_f64());
    assert!(mutants >= 10_000);
    Ok(())
}
