use std::fs;

use proptest::prelude::*;
use safetensors::serialize_to_file;
use safetensors::tensor::TensorView;
use tempfile::TempDir;

use super::*;

/// A tensor to write.
#[derive(Clone, Debug)]
struct Stored {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    fn zeros(name: &str, dtype: Dtype, shape: &[usize]) -> Stored {
        let bytes = vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8];
        Stored { name: name.into(), dtype, shape: shape.into(), bytes }
    }
}

fn write(path: &Path, tensors: &[Stored]) {
    let views = tensors.iter().map(|tensor| {
        (&tensor.name, TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap())
    });
    serialize_to_file(views, None, path).unwrap();
}

/// Writes tensor `i` to shard `i % shards`, and the index.
fn write_sharded(dir: &Path, tensors: &[Stored], shards: usize) {
    let file = |shard: usize| format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
    for shard in 0..shards {
        let part: Vec<Stored> = tensors.iter().skip(shard).step_by(shards).cloned().collect();
        write(&dir.join(file(shard)), &part);
    }
    let map: serde_json::Map<_, _> =
        tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), file(i % shards).into())).collect();
    let index = serde_json::json!({ "metadata": { "total_size": 0 }, "weight_map": map });
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

fn dir_with(tensors: &[Stored]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("model.safetensors"), tensors);
    dir
}

fn dir_with_bytes(bytes: &[u8]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    dir
}

fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// The message of opening `dir`, without the directory's name.
fn message(dir: &TempDir) -> String {
    let prefix = format!("{}/", dir.path().display());
    Weights::open(dir.path()).unwrap_err().to_string().replace(&prefix, "")
}

fn tensor(dtype: DType, bytes: &[u8]) -> TensorData<'_> {
    TensorData { name: "w", dtype, shape: &[], bytes }
}

#[test]
fn missing_directory_and_files() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent");
    let text = Weights::open(&absent).unwrap_err().to_string();
    assert_eq!(text, format!("{} does not exist", absent.display()));

    let text = Weights::open(dir.path()).unwrap_err().to_string();
    assert_eq!(
        text,
        format!(
            "no weights in {}: neither model.safetensors nor model.safetensors.index.json",
            dir.path().display()
        )
    );

    fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    assert_eq!(message(&dir), "model.safetensors is not a regular file");
}

#[test]
fn truncated_and_malformed_files() {
    let whole = dir_with(&[Stored::zeros("a", Dtype::F32, &[2, 3])]);
    let bytes = fs::read(whole.path().join("model.safetensors")).unwrap();
    let reason = |bytes: &[u8]| {
        let text = message(&dir_with_bytes(bytes));
        text.strip_prefix("model.safetensors is not a valid safetensors file: ").unwrap().to_owned()
    };
    let header_bytes = bytes.len() - 8 - 24;

    assert_eq!(reason(&[]), "0 bytes are too few for the header's length");
    assert_eq!(reason(&bytes[..7]), "7 bytes are too few for the header's length");
    assert_eq!(reason(&bytes[..20]), format!("truncated: the header claims {header_bytes} bytes, 12 follow"));
    assert_eq!(
        reason(&bytes[..bytes.len() - 1]),
        "truncated: the header describes 24 bytes of tensors, 23 follow it"
    );
    assert_eq!(
        reason(&[&bytes[..], &[0; 4]].concat()),
        "bytes behind the last tensor: the header describes 24 bytes of tensors, 28 follow it"
    );
    assert_eq!(
        reason(&u64::MAX.to_le_bytes()),
        "the header claims 18446744073709551615 bytes; the limit is 100000000"
    );
    assert_eq!(
        reason(&with_header("{\"a\"", &[])),
        "malformed header: EOF while parsing an object at line 1 column 4"
    );
    assert!(reason(&with_header("\u{7f}", &[])).starts_with("malformed header: "));
    let entry = |shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    assert_eq!(
        reason(&with_header(&entry("[2]", "[0,4]"), &[0; 4])),
        "malformed header: invalid shape, data type, or offset for tensor"
    );
    assert_eq!(
        reason(&with_header(&entry("[1]", "[4,8]"), &[0; 8])),
        "malformed header: invalid offset for tensor `a`"
    );
    assert_eq!(
        reason(&with_header(&entry("[4294967296, 4294967296]", "[0,8]"), &[0; 8])),
        "malformed header: overflow computing buffer size from shape and/or element type"
    );
}

#[test]
fn names_that_are_there_twice() {
    let entry = |name: &str, at: usize| {
        format!(r#""{name}":{{"dtype":"F32","shape":[1],"data_offsets":[{at},{}]}}"#, at + 4)
    };
    let dir = dir_with_bytes(&with_header(&format!("{{{},{}}}", entry("a", 0), entry("b", 4)), &[0; 8]));
    assert_eq!(Weights::open(dir.path()).unwrap().names().count(), 2);
    // The second is another spelling of the first.
    for (first, second) in [("a", "a"), ("a", r"\u0061"), ("\u{1b}[0m", r"\u001b[0m")] {
        let header = format!("{{{},{}}}", entry(first, 0).replace('\u{1b}', r"\u001b"), entry(second, 0));
        let text = message(&dir_with_bytes(&with_header(&header, &[0; 4])));
        let name = first.replace('\u{1b}', r"\u{1b}");
        assert!(text.contains(&format!("malformed header: two tensors are named {name}")), "{text:?}");
    }
}

/// Eight tensors of almost 2^61 bytes: header length plus data length wraps around to the file's real length.
#[test]
fn lengths_that_wrap_around() {
    let each = (1usize << 61) - 1;
    let entry = |i: usize, from: usize, to: usize| {
        format!(r#""{i}":{{"dtype":"U8","shape":[{}],"data_offsets":[{from},{to}]}}"#, to - from)
    };
    let mut entries: Vec<String> = (0..8).map(|i| entry(i, i * each, (i + 1) * each)).collect();
    entries.push(entry(8, 8 * each, usize::MAX));
    let header = format!("{{{}}}", entries.join(","));
    let dir = dir_with_bytes(&with_header(&header, &[0; 7]));
    assert_eq!(
        message(&dir),
        "model.safetensors is not a valid safetensors file: truncated: the header describes 18446744073709551615 \
         bytes of tensors, 7 follow it"
    );
}

#[test]
fn bad_indices() {
    let dir = tempfile::tempdir().unwrap();
    let index = |text: &str| fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
    index("{\"weight_map\": {");
    assert_eq!(
        message(&dir),
        "model.safetensors.index.json:1:16: not valid JSON: EOF while parsing an object"
    );
    index("{}");
    assert_eq!(message(&dir), "model.safetensors.index.json: weight_map: expected an object, got nothing");
    for path in ["\"../other.safetensors\"", "\"/etc/passwd\"", "\"sub/a\"", "\"\"", "\"a/\"", "7"] {
        index(&format!("{{\"weight_map\": {{\"a\": {path}}}}}"));
        assert_eq!(
            message(&dir),
            format!(
                "model.safetensors.index.json: weight_map.a: expected the name of a file in the same directory, \
                 got {path}"
            )
        );
    }
    // The second is another spelling of the first; numbers are as Python writes them.
    for text in [
        r#"{"weight_map": {"a": "s1", "b": "s1", "a": "s2"}}"#,
        r#"{"n": NaN, "weight_map": {"a": "s1", "\u0061": "s1"}}"#,
    ] {
        index(text);
        assert_eq!(
            message(&dir),
            "model.safetensors.index.json: weight_map.a: expected each tensor once, got it twice"
        );
    }
    index(r#"{"weight_map": {"b": "s2", "z": "s1", "a": "s2"}}"#);
    write(&dir.path().join("s1"), &[Stored::zeros("z", Dtype::F32, &[1])]);
    assert_eq!(message(&dir), "shard s2 does not exist; the index places tensor a in it");
    write(&dir.path().join("s2"), &[Stored::zeros("c", Dtype::F32, &[1])]);
    assert_eq!(message(&dir), "shard s2 does not hold what the index places in it: a, b");
}

#[test]
fn tensors_that_the_index_omits_do_not_exist() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = ["a", "b"].map(|name| Stored::zeros(name, Dtype::F16, &[4]));
    write(&dir.path().join("s"), &tensors);
    fs::write(dir.path().join("model.safetensors.index.json"), r#"{"weight_map": {"b": "s"}}"#).unwrap();
    let weights = Weights::open(dir.path()).unwrap();
    assert_eq!((weights.names().collect::<Vec<_>>(), weights.total_bytes()), (vec!["b"], 8));
}

#[test]
fn requirements_report_everything() {
    let dir = dir_with(&[
        Stored::zeros("norm.weight", Dtype::BF16, &[64]),
        Stored::zeros("embed.weight", Dtype::F32, &[8, 64]),
        Stored::zeros("scales", Dtype::F8_E4M3, &[8]),
        Stored::zeros("ids", Dtype::I32, &[8]),
    ]);
    let weights = Weights::open(dir.path()).unwrap();

    let mut need = weights.require();
    need.tensor("norm.weight", &[64]).tensor(String::from("embed.weight"), &[8, 64]);
    need.finish().unwrap();

    let mut need = weights.require();
    need.tensor("norm.weight", &[128])
        .tensor("layers.0.q_proj.weight", &[16, 64])
        .tensor("embed.weight", &[8, 64])
        .tensor("layers.1.q_proj.weight", &[16, 64])
        .tensor("scales", &[8])
        .tensor("ids", &[8])
        .tensor("embed.weight", &[512]);
    assert_eq!(
        need.finish().unwrap_err().to_string(),
        format!(
            "{}: unusable tensors (6):\n  norm.weight: expected shape [128], got [64]\n  \
             layers.0.q_proj.weight: missing, expected shape [16, 64]\n  \
             layers.1.q_proj.weight: missing, expected shape [16, 64]\n  \
             scales: type F8_E4M3 is not supported; supported: f32, f16, bf16\n  \
             ids: type I32 is not supported; supported: f32, f16, bf16\n  \
             embed.weight: expected shape [512], got [8, 64]",
            dir.path().display()
        )
    );
}

/// A configuration of a kilobyte may ask for millions of tensors.
#[test]
fn messages_of_many_tensors_are_short() {
    let dir = dir_with(&[Stored::zeros("a", Dtype::F32, &[1])]);
    let weights = Weights::open(dir.path()).unwrap();
    let mut need = weights.require();
    for index in 0..=2000 {
        need.tensor(format!("layers.{index}.{}", "x".repeat(1 + index)), &[1; 100]);
    }
    for _ in 0..100_000 {
        need.tensor("missing", &[1; 8]);
    }
    let error = need.finish().unwrap_err();
    let ModelError::Tensors { count, ref problems, .. } = error else { panic!("{error}") };
    assert_eq!((count, problems.len()), (102_001, MAX_PROBLEMS));
    let text = error.to_string();
    assert!(text.len() < 40_000 && text.ends_with("\n  … and 101969 more"), "{}", text.len());
}

#[test]
fn get_and_conversion_errors() {
    let dir = dir_with(&[Stored::zeros("q", Dtype::F8_E4M3, &[8]), Stored::zeros("ids", Dtype::I32, &[2])]);
    let weights = Weights::open(dir.path()).unwrap();
    assert!(weights.contains("q") && !weights.contains("x"));
    let text = |name: &str| weights.get(name).unwrap_err().to_string();
    let prefix = format!("{}: unusable tensors (1):\n  ", dir.path().display());
    assert_eq!(text("x"), format!("{prefix}x: missing"));
    assert_eq!(
        text("q"),
        format!("{prefix}q: type F8_E4M3 is not supported; supported: f32, f16, bf16, i8, i32, u32")
    );
    let ids = weights.get("ids").unwrap();
    assert!(matches!(ids.convert(DType::I32).unwrap(), Cow::Borrowed([0, 0, 0, 0, 0, 0, 0, 0])));
    let expected = "no conversion from i32 to f32; only f32, f16 and bf16 convert into each other";
    assert_eq!(ids.to_f32().unwrap_err().to_string(), format!("tensor ids: {expected}"));
    assert!(matches!(ids.convert(DType::BF16), Err(ModelError::Conversion { to: DType::BF16, .. })));
    let float = tensor(DType::F32, &[]);
    assert!(matches!(float.convert(DType::U32), Err(ModelError::Conversion { from: DType::F32, .. })));
}

#[test]
fn golden_checkpoint() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/qwen3");
    let weights = Weights::open(&dir).unwrap();
    let mut need = weights.require();
    need.tensor("model.embed_tokens.weight", &[384, 128])
        .tensor("model.layers.2.self_attn.q_proj.weight", &[256, 128])
        .tensor("model.layers.2.self_attn.k_norm.weight", &[64])
        .tensor("model.norm.weight", &[128]);
    need.finish().unwrap();
    assert!(!weights.contains("lm_head.weight"));
    assert!(weights.get("model.norm.weight").unwrap().to_f32().unwrap().iter().all(|x| x.is_finite()));
}

#[test]
fn scalars_and_empty_tensors() {
    let dir =
        dir_with(&[Stored::zeros("empty", Dtype::BF16, &[0, 4]), Stored::zeros("one", Dtype::F32, &[])]);
    let weights = Weights::open(dir.path()).unwrap();
    let empty = weights.get("empty").unwrap();
    assert_eq!((empty.shape, empty.to_f32().unwrap()), (&[0, 4][..], vec![]));
    assert_eq!(empty.convert(DType::F16).unwrap().len(), 0);
    let one = weights.get("one").unwrap();
    assert_eq!((one.shape, one.to_f32().unwrap()), (&[][..], vec![0.0]));
}

#[test]
fn rounding_is_to_nearest_even() {
    let bf16_of = |bits: u32| {
        let bytes = bits.to_le_bytes();
        u16::from_le_bytes(tensor(DType::F32, &bytes).convert(DType::BF16).unwrap()[..].try_into().unwrap())
    };
    assert_eq!(bf16_of(0x3f80_8000), 0x3f80, "a tie goes to the even neighbour below");
    assert_eq!(bf16_of(0x3f81_8000), 0x3f82, "a tie goes to the even neighbour above");
    assert_eq!(bf16_of(0x3f80_8001), 0x3f81);
    assert_eq!(bf16_of(f32::MAX.to_bits()), 0x7f80, "overflow is infinity");
    let halves = [0x7f7f_u16, 0x0001].map(u16::to_le_bytes).concat();
    let converted = tensor(DType::BF16, &halves).convert(DType::F16).unwrap();
    assert_eq!(converted[..], [0x7c00_u16, 0].map(u16::to_le_bytes).concat());
}

/// Every f16 and bf16 value, through all conversions, against the scalar conversions of `half`.
#[test]
fn all_halves_convert_as_half_does() {
    let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let floats = |dtype| tensor(dtype, &bytes).to_f32().unwrap();
    let halves = |from, to| {
        let converted = tensor(from, &bytes).convert(to).unwrap();
        converted.chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect::<Vec<_>>()
    };
    let (f16s, bf16s) = (floats(DType::F16), floats(DType::BF16));
    let (to_bf16, to_f16) = (halves(DType::F16, DType::BF16), halves(DType::BF16, DType::F16));
    for bits in 0..=u16::MAX {
        let (i, as_f16, as_bf16) = (bits as usize, f16::from_bits(bits), bf16::from_bits(bits));
        assert!(same(f16s[i], as_f16.to_f32()), "{bits:#x}");
        assert!(same(bf16s[i], as_bf16.to_f32()), "{bits:#x}");
        let expected = bf16::from_f32(as_f16.to_f32()).to_f32();
        assert!(same(bf16::from_bits(to_bf16[i]).to_f32(), expected), "{bits:#x}");
        let expected = f16::from_f32(as_bf16.to_f32()).to_f32();
        assert!(same(f16::from_bits(to_f16[i]).to_f32(), expected), "{bits:#x}");
    }
}

/// Equal bits, or both NaN: instructions differ in what they keep of a NaN.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Up to eight tensors of any type, with random bytes and up to three dimensions, zeros included.
fn tensors() -> impl Strategy<Value = Vec<Stored>> {
    let types: Vec<Dtype> =
        DTYPES.iter().map(|(stored, _)| *stored).chain([Dtype::I64, Dtype::BOOL]).collect();
    let one = (prop::sample::select(types), prop::collection::vec(0usize..7, 0..4)).prop_flat_map(
        |(dtype, shape)| {
            let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            prop::collection::vec(any::<u8>(), len).prop_map(move |bytes| (dtype, shape.clone(), bytes))
        },
    );
    prop::collection::vec(one, 1..9).prop_map(|tensors| {
        let name = |i| format!("layer.{i}.weight");
        let stored = |(i, (dtype, shape, bytes))| Stored { name: name(i), dtype, shape, bytes };
        tensors.into_iter().enumerate().map(stored).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn written_tensors_read_back(tensors in tensors(), shards in 1usize..4) {
        let single = dir_with(&tensors);
        let sharded = tempfile::tempdir().unwrap();
        write_sharded(sharded.path(), &tensors, shards.min(tensors.len()));
        for dir in [single, sharded] {
            let weights = Weights::open(dir.path()).unwrap();
            prop_assert_eq!(weights.names().count(), tensors.len());
            prop_assert_eq!(weights.total_bytes(), tensors.iter().map(|t| t.bytes.len()).sum::<usize>());
            for stored in &tensors {
                let dtype = DTYPES.iter().find(|(file, _)| *file == stored.dtype);
                let Some((_, dtype)) = dtype else {
                    let refused = matches!(weights.get(&stored.name), Err(ModelError::Tensors { .. }));
                    prop_assert!(refused);
                    continue;
                };
                let read = weights.get(&stored.name).unwrap();
                prop_assert_eq!(read.name, &stored.name);
                prop_assert_eq!((read.dtype, read.shape, read.bytes), (*dtype, &stored.shape[..], &stored.bytes[..]));
                let borrows = matches!(read.convert(*dtype).unwrap(), Cow::Borrowed(_));
                prop_assert!(borrows);
            }
        }
    }

    #[test]
    fn any_prefix_and_any_flipped_byte_is_an_error_or_sound(
        tensors in tensors(), cut in any::<prop::sample::Index>(), flip in any::<u8>(),
    ) {
        let dir = dir_with(&tensors);
        let mut bytes = fs::read(dir.path().join("model.safetensors")).unwrap();
        let at = cut.index(bytes.len());
        let cut_dir = dir_with_bytes(&bytes[..at]);
        let refused = matches!(Weights::open(cut_dir.path()), Err(ModelError::Safetensors { .. }));
        prop_assert!(refused);
        bytes[at] ^= flip;
        let flipped = dir_with_bytes(&bytes);
        if let Ok(weights) = Weights::open(flipped.path()) {
            for name in weights.names() {
                let _ = weights.get(name);
            }
        }
    }

    #[test]
    fn floats_convert_as_half_does(values in prop::collection::vec(any::<u32>(), 1..3000), offset in 0usize..4) {
        // Shifted, to lose the alignment.
        let mut bytes = vec![0; offset];
        bytes.extend(values.iter().flat_map(|bits| bits.to_le_bytes()));
        let source = tensor(DType::F32, &bytes[offset..]);
        let as_f16 = source.convert(DType::F16).unwrap();
        let as_bf16 = source.convert(DType::BF16).unwrap();
        let back = tensor(DType::BF16, &as_bf16).convert(DType::F32).unwrap();
        prop_assert_eq!(tensor(DType::F32, &back).to_f32().unwrap().len(), values.len());
        for (i, (value, read)) in values.iter().zip(source.to_f32().unwrap()).enumerate() {
            let value = f32::from_bits(*value);
            prop_assert_eq!(value.to_bits(), read.to_bits());
            let half = |bytes: &[u8]| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
            prop_assert!(same(f16::from_bits(half(&as_f16)).to_f32(), f16::from_f32(value).to_f32()));
            let expected = bf16::from_f32(value).to_f32();
            prop_assert!(same(bf16::from_bits(half(&as_bf16)).to_f32(), expected));
            let round_trip = f32::from_le_bytes(back[4 * i..4 * i + 4].try_into().unwrap());
            prop_assert!(same(round_trip, expected));
        }
    }
}

/// Larger than a task, with an odd tail: the pieces land where they belong.
#[test]
fn large_tensors_convert_in_pieces() {
    let count = 3 * TASK_ELEMS + BLOCK_ELEMS + 7;
    let bytes: Vec<u8> = (0..count).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let halves = tensor(DType::F32, &bytes).convert(DType::BF16).unwrap();
    let floats = tensor(DType::BF16, &halves).to_f32().unwrap();
    assert_eq!(floats.len(), count);
    for (i, value) in floats.iter().enumerate() {
        assert_eq!(*value, bf16::from_f32(i as f32).to_f32());
    }
}
