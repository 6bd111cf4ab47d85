//! Each way to store a matrix, on small tensors whose values are worked out here; what is wrong with tensors and
//! configurations.

use host::weight::ScaleType;
use models::{Checkpoint, CodeType, DecoderConfig, Origin, Origins, QuantMatrix};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::Outcome;
use super::writer::{Kv, Tensor, Writer};

/// A tensor of a file: name, type, shape, bytes.
type Stored = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn open(tensors: &[Stored], quantization: &str) -> Result<(tempfile::TempDir, Checkpoint), String> {
    let folder = tempfile::tempdir().expect("a folder");
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (*name, TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor"))
    });
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).expect("a file");
    let config = format!(r#"{{"model_type": "qwen3", "quantization_config": {quantization}}}"#);
    std::fs::write(folder.path().join("config.json"), config).expect("a file");
    let message =
        |error: models::ModelError| error.to_string().replace(&format!("{}/", folder.path().display()), "");
    let checkpoint = Checkpoint::open(folder.path()).map_err(message)?;
    Ok((folder, checkpoint))
}

/// The rows of a matrix; each is also what codes, scales and origins give.
fn rows(matrix: &QuantMatrix<'_>) -> Vec<Vec<f32>> {
    let row = |row: usize| {
        let (mut values, mut codes) = (vec![f32::NAN; matrix.k()], vec![0xee; matrix.k()]);
        matrix.dequantise_row(row, &mut values);
        matrix.row_codes(row, &mut codes);
        for (k, (&value, &code)) in values.iter().zip(&codes).enumerate() {
            assert!(u32::from(code) < 1 << matrix.code_type().bits());
            let group = matrix.group_of().map_or(k / matrix.group_k(), |groups| groups[k] as usize);
            let scale = matrix.scale(row, group);
            let again = match (matrix.code_type(), matrix.origin(row, group)) {
                (CodeType::Int { .. }, Origin::Zero(zero)) => (f32::from(code) - zero as f32) * scale,
                (CodeType::Int { .. }, Origin::Minimum(minimum)) => f32::from(code) * scale + minimum,
                _ => continue,
            };
            assert_eq!(value, again, "row {row}, column {k}");
        }
        values
    };
    (0..matrix.n()).map(row).collect()
}

fn values(checkpoint: &Checkpoint, name: &str) -> Vec<Vec<f32>> {
    rows(
        &checkpoint
            .quantised(name)
            .expect("sound tensors")
            .unwrap_or_else(|| panic!("{name} is not quantised")),
    )
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn f16s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&value| half::f16::from_f32(value).to_le_bytes()).collect()
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// 1, −2, 0.5, 448, 0, 1.125, 2^−9, −1.
const FP8: [u8; 8] = [0x38, 0xc0, 0x30, 0x7e, 0x00, 0x39, 0x01, 0xb8];
const FP8_VALUES: [f32; 8] = [1.0, -2.0, 0.5, 448.0, 0.0, 1.125, 0.001953125, -1.0];

#[test]
fn fp8_by_tensor_row_and_block() -> Outcome {
    let weight = |name, shape: &[usize]| (name, Dtype::F8_E4M3, shape.to_vec(), FP8.to_vec());
    let scaled = |scales: [f32; 2]| -> Vec<Vec<f32>> {
        (0..2)
            .map(|row| FP8_VALUES[4 * row..][..4].iter().map(|value| value * scales[row]).collect())
            .collect()
    };
    for (shape, scales, want) in [
        (vec![], vec![3.0], [3.0, 3.0]),
        (vec![1], vec![3.0], [3.0, 3.0]),
        (vec![1, 1], vec![3.0], [3.0, 3.0]),
        (vec![2, 1], vec![3.0, -0.25], [3.0, -0.25]),
        (vec![2], vec![3.0, -0.25], [3.0, -0.25]),
    ] {
        for name in ["m.weight_scale", "m.weight_scale_inv"] {
            let scale = (name, Dtype::F32, shape.clone(), f32s(&scales));
            let (_folder, checkpoint) =
                open(&[weight("m.weight", &[2, 4]), scale], r#"{"quant_method": "fp8"}"#)?;
            assert_eq!(values(&checkpoint, "m.weight"), scaled(want), "{shape:?}");
        }
    }
    // Blocks of 1 × 3: the last of a row has one column. Powers of two are a type of their own.
    let exponents = vec![127, 128, 126, 0];
    let scale = ("m.weight_scale_inv", Dtype::F8_E8M0, vec![2, 2], exponents);
    let config = r#"{"quant_method": "fp8", "weight_block_size": [1, 3]}"#;
    let (_folder, checkpoint) = open(&[weight("m.weight", &[2, 4]), scale], config)?;
    let want = vec![vec![1.0, -2.0, 0.5, 896.0], vec![0.0, 0.5625, 0.0009765625, -(2f32.powi(-127))]];
    assert_eq!(values(&checkpoint, "m.weight"), want);
    let matrix = checkpoint.quantised("m.weight")?.ok_or("a matrix")?;
    assert_eq!((matrix.code_type(), matrix.scale_type()), (CodeType::E4m3, ScaleType::E8m0));
    assert_eq!((matrix.group_k(), matrix.block_n(), matrix.groups()), (3, 1, 2));
    assert_eq!((matrix.origins(), matrix.global_scale()), (Origins::Constant(0), None));

    // Of compressed-tensors and of modelopt.
    let group = r#"{"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0":
        {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}"#;
    for (config, shape) in
        [(group, vec![2, 1]), (r#"{"quant_method": "modelopt", "quant_algo": "FP8"}"#, vec![2])]
    {
        let scale = ("m.weight_scale", Dtype::F32, shape, f32s(&[2.0, 4.0]));
        let (_folder, checkpoint) = open(&[weight("m.weight", &[2, 4]), scale], config)?;
        assert_eq!(values(&checkpoint, "m.weight"), scaled([2.0, 4.0]));
    }
    Ok(())
}

/// Eight rows of 16 columns in two groups of 8: codes are (row + column) % 16, zero points what the words say.
fn gptq(zeros: [u32; 2], g_idx: Option<Vec<u32>>) -> Vec<Stored> {
    let word = |first: usize, row: usize| -> u32 {
        (0..8).map(|col| ((first + col + row) as u32 % 16) << (4 * col)).sum()
    };
    let codes: Vec<u32> =
        [0, 8].into_iter().flat_map(|first| (0..8).map(move |row| word(first, row))).collect();
    let scales: Vec<f32> = (0..16).map(|index| 0.5 + index as f32).collect();
    let mut tensors = vec![
        ("m.qweight", Dtype::I32, vec![2, 8], words(&codes)),
        ("m.qzeros", Dtype::I32, vec![2, 1], words(&zeros)),
        ("m.scales", Dtype::F16, vec![2, 8], f16s(&scales)),
    ];
    tensors.extend(g_idx.map(|groups| ("m.g_idx", Dtype::I32, vec![16], words(&groups))));
    tensors
}

#[test]
fn gptq_versions_and_orders() -> Outcome {
    let config = |format: &str| {
        format!(r#"{{"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": "{format}"}}"#)
    };
    let want = |zero: &dyn Fn(usize, usize) -> i32, group: &dyn Fn(usize) -> usize| -> Vec<Vec<f32>> {
        let value = |row: usize, col: usize| {
            let code = ((row + col) % 16) as i32;
            (code - zero(group(col), row)) as f32 * (0.5 + (8 * group(col) + row) as f32)
        };
        (0..8).map(|row| (0..16).map(|col| value(row, col)).collect()).collect()
    };
    let in_order = |col: usize| col / 8;
    let (_folder, checkpoint) = open(&gptq([0x8888_8888, 0x7654_3210], None), &config("gptq_v2"))?;
    let zero = |group: usize, row: usize| if group == 0 { 8 } else { row as i32 };
    assert_eq!(values(&checkpoint, "m.weight"), want(&zero, &in_order));
    // Version 1 has 1 less, taken from whole words: 0x76543210 − 0x11111111 has borrowed.
    let (_folder, checkpoint) = open(&gptq([0x7777_7777, 0x6543_20ff], None), &config("gptq"))?;
    assert_eq!(values(&checkpoint, "m.weight"), want(&zero, &in_order));
    // Columns in another order, with groups that are stated.
    let order: Vec<u32> = (0..16).map(|col| (col % 3 == 0).into()).collect();
    let (_folder, checkpoint) =
        open(&gptq([0x8888_8888, 0x7654_3210], Some(order.clone())), &config("gptq_v2"))?;
    assert_eq!(values(&checkpoint, "m.weight"), want(&zero, &|col| usize::from(col % 3 == 0)));
    assert_eq!(checkpoint.quantised("m.weight")?.ok_or("a matrix")?.group_of(), Some(&order[..]));
    let regular = (0..16).map(|col| col / 8).collect();
    let (_folder, checkpoint) = open(&gptq([0, 0], Some(regular)), &config("gptq_v2"))?;
    assert_eq!(checkpoint.quantised("m.weight")?.ok_or("a matrix")?.group_of(), None);
    // What single modules have, and that they have nothing.
    let dynamic = r#"{"quant_method": "gptq", "bits": 8, "group_size": 128, "checkpoint_format": "gptq_v2",
        "dynamic": {"+:.*m$": {"bits": 4, "group_size": 8}, "-:other": {}}}"#;
    let (_folder, checkpoint) = open(&gptq([0x8888_8888, 0x7654_3210], None), dynamic)?;
    assert_eq!(values(&checkpoint, "m.weight"), want(&zero, &in_order));
    let skipped = dynamic.replace("-:other", "-:m");
    let (_folder, checkpoint) = open(&gptq([0x8888_8888, 0x7654_3210], None), &skipped)?;
    assert!(checkpoint.quantised("m.weight")?.is_none());
    Ok(())
}

fn packed(bits: u32, more: &str) -> String {
    format!(
        r#"{{"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups":
        {{"group_0": {{"targets": ["Linear"], "weights": {{"num_bits": {bits}, "type": "int", {more}}}}}}}}}"#
    )
}

#[test]
fn packed_integers() -> Outcome {
    // 8 bits: two rows of 6 columns, in two words each.
    let codes = words(&[0x0302_0180, 0xaaaa_7fff, 0x8182_8384, 0x0000_0001]);
    let tensors = [
        ("m.weight_packed", Dtype::I32, vec![2, 2], codes),
        (
            "m.weight_scale",
            Dtype::BF16,
            vec![2, 2],
            [0x3f80u16, 0x4000, 0x3f00, 0xc000].map(u16::to_le_bytes).concat(),
        ),
        ("m.weight_shape", Dtype::I64, vec![2], [2i64, 6].map(i64::to_le_bytes).concat()),
    ];
    let grouped = packed(8, r#""strategy": "group", "group_size": 3, "symmetric": true"#);
    let (_folder, checkpoint) = open(&tensors, &grouped)?;
    let want = [[0.0, -127.0, -126.0, -250.0, 254.0, -2.0], [2.0, 1.5, 1.0, -2.0, 254.0, 256.0]];
    assert_eq!(values(&checkpoint, "m.weight"), want);
    // The groups of columns in another order, and zero points along the rows: 8 rows of 4 bits.
    let mut tensors = vec![
        ("m.weight_packed", Dtype::I32, vec![8, 1], words(&[0x7654_3210; 8])),
        ("m.weight_scale", Dtype::F32, vec![8, 2], f32s(&[1.0; 16])),
        ("m.weight_shape", Dtype::I64, vec![2], [8i64, 8].map(i64::to_le_bytes).concat()),
        ("m.weight_zero_point", Dtype::I32, vec![1, 2], words(&[0x8888_8888, 0xfedc_ba98])),
    ];
    let config = packed(4, r#""strategy": "group", "group_size": 4, "symmetric": false"#);
    let (_folder, checkpoint) = open(&tensors, &config)?;
    let want = |group: &dyn Fn(usize) -> usize| -> Vec<Vec<f32>> {
        let zero = |row: usize, col| if group(col) == 0 { 8 } else { 8 + row as i32 };
        (0..8).map(|row| (0..8).map(|col| (col as i32 - zero(row, col)) as f32).collect()).collect()
    };
    assert_eq!(values(&checkpoint, "m.weight"), want(&|col| col / 4));
    tensors.push(("m.weight_g_idx", Dtype::I32, vec![8], words(&[1, 0, 1, 0, 1, 0, 1, 0])));
    let (_folder, checkpoint) = open(&tensors, &config)?;
    assert_eq!(values(&checkpoint, "m.weight"), want(&|col| (col + 1) % 2));
    Ok(())
}

#[test]
fn bytes_with_zero_points_and_blocks_of_mxfp4() -> Outcome {
    let config = r#"{"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0":
        {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": false}}}}"#;
    let tensors = [
        ("m.weight", Dtype::I8, vec![2, 3], vec![0x80, 0x00, 0x7f, 0x01, 0xff, 0x05]),
        ("m.weight_scale", Dtype::F32, vec![2, 1], f32s(&[0.5, 2.0])),
        ("m.weight_zero_point", Dtype::I8, vec![2, 1], vec![0xfe, 0x03]),
    ];
    let (_folder, checkpoint) = open(&tensors, config)?;
    assert_eq!(values(&checkpoint, "m.weight"), [[-63.0, 1.0, 64.5], [-4.0, -8.0, 4.0]]);

    let blocks: Vec<u8> = (0..64).map(|index| (index * 37 % 256) as u8).collect();
    let scales = vec![127, 130, 120, 128];
    let tensors = [
        ("experts.gate_up_proj_blocks", Dtype::U8, vec![2, 1, 2, 16], blocks.clone()),
        ("experts.gate_up_proj_scales", Dtype::U8, vec![2, 1, 2], scales.clone()),
    ];
    let (_folder, checkpoint) = open(&tensors, r#"{"quant_method": "mxfp4"}"#)?;
    let table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let value = |index: usize| {
        let code = blocks[index / 2] >> (4 * (index % 2)) & 15;
        table[usize::from(code)] * 2f32.powi(i32::from(scales[index / 32]) - 127)
    };
    let want: Vec<Vec<f32>> = (0..2).map(|row| (0..64).map(|col| value(64 * row + col)).collect()).collect();
    assert_eq!(values(&checkpoint, "experts.gate_up_proj"), want);
    Ok(())
}

/// Modules that are not quantised are read as they are, though a scale is beside them; a name says more than a class.
#[test]
fn targets_and_exceptions() -> Outcome {
    let tensors = |module: &str| -> Vec<(String, Dtype, Vec<usize>, Vec<u8>)> {
        vec![
            (format!("{module}.weight"), Dtype::F8_E4M3, vec![2, 4], FP8.to_vec()),
            (format!("{module}.weight_scale"), Dtype::F32, vec![2, 1], f32s(&[1.0, 1.0])),
        ]
    };
    let modules =
        ["model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj", "model.layers.10.mlp.up_proj", "lm_head"];
    let stored: Vec<_> = modules.iter().flat_map(|module| tensors(module)).collect();
    let stored: Vec<Stored> =
        stored.into_iter().map(|(name, dtype, shape, bytes)| (&*name.leak(), dtype, shape, bytes)).collect();
    let quantised = |config: &str| -> Result<Vec<bool>, Box<dyn std::error::Error>> {
        let (_folder, checkpoint) = open(&stored, config)?;
        let mut found = Vec::new();
        for module in modules {
            found.push(checkpoint.quantised(&format!("{module}.weight"))?.is_some());
        }
        Ok(found)
    };
    let fp8 = |list: &str| format!(r#"{{"quant_method": "fp8", "modules_to_not_convert": {list}}}"#);
    let compressed = |targets: &str, ignore: &str| {
        format!(
            r#"{{"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": {ignore}, "config_groups":
            {{"group_0": {{"targets": {targets}, "weights": {{"num_bits": 8, "type": "float", "strategy": "channel"}}}}}}}}"#
        )
    };
    for (config, want) in [
        (fp8("null"), [true; 4]),
        (fp8(r#"["mlp.gate", "lm_head"]"#), [false, true, true, false]),
        (fp8(r#"["model.layers.1"]"#), [false, false, true, true]),
        (fp8(r#"["layers.*.mlp.gate*"]"#), [false, false, true, true]),
        (compressed(r#"["Linear"]"#, r#"["lm_head", "re:.*mlp.gate$"]"#), [false, true, true, false]),
        (compressed(r#"["re:.*layers\\.\\d+\\..*(gate|up)_proj$"]"#, "[]"), [false, true, true, false]),
        (compressed(r#"["lm_head"]"#, "[]"), [false, false, false, true]),
    ] {
        assert_eq!(quantised(&config)?, want, "{config}");
    }
    // Two schemes, of which the second is for one module by its name.
    let both = r#"{"quant_method": "compressed-tensors", "ignore": [], "config_groups": {"all": {"targets": ["Linear"],
        "format": "pack-quantized", "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}, "one": {"targets":
        ["lm_head"], "format": "float-quantized", "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}"#;
    assert_eq!(quantised(both)?, [false, false, false, true]);
    Ok(())
}

#[test]
fn schemes_that_are_not_read_are_named() {
    let message = |config: &str| open(&[], config).err().unwrap_or_default();
    let cases = [
        (
            r#"{"quant_method": "bitsandbytes"}"#,
            "quantization_config.quant_method: bitsandbytes is not supported; supported: fp8, gptq, awq, mxfp4, \
             compressed-tensors, modelopt",
        ),
        (r#"{}"#, "quantization_config.quant_method: expected a string, got nothing"),
        (r#"3"#, "quantization_config: expected an object, got 3"),
        (r#"{"quant_method": "fp8", "fmt": "e5m2"}"#, "fmt: e5m2 is not supported; supported: e4m3"),
        (
            r#"{"quant_method": "gptq", "bits": 3}"#,
            "quantization_config.bits: 3 is not supported; supported: 4, 8",
        ),
        (
            r#"{"quant_method": "gptq", "bits": 4, "group_size": 0}"#,
            "group_size: expected a size, or -1, got 0",
        ),
        (r#"{"quant_method": "gptq", "bits": 4, "format": "marlin"}"#, "format: marlin is not supported"),
        (
            r#"{"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}"#,
            r#"dynamic: "(" is not supported"#,
        ),
        (
            r#"{"quant_method": "awq", "version": "gemv_fast"}"#,
            "version: gemv_fast is not supported; supported: gemm",
        ),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}"#,
            "quant_algo: NVFP4_AWQ is not supported",
        ),
        (
            r#"{"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"group_0": {"targets":
            ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}}"#,
            "config_groups.group_0.format: marlin-24 is not supported; supported: pack-quantized, int-quantized",
        ),
        (
            r#"{"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"targets":
            ["Linear"], "weights": {"num_bits": 3, "type": "int"}}}}"#,
            "config_groups.group_0.weights.num_bits: int of 3 is not supported; supported: int of 4, int of 8",
        ),
        (
            r#"{"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": {"format": "sparse-24"}}"#,
            r#"sparsity_config: "sparse-24" is not supported"#,
        ),
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["re:(?!a)"]}"#,
            r#"ignore: "(?!a)" is not supported; supported: regular expressions without look-around"#,
        ),
    ];
    for (config, want) in cases {
        let got = message(config);
        assert!(got.contains(want), "{config}: {got}");
    }
}

/// A method over weights of floats alone is refused, by each file that may name one; one that quantises no weights
/// says nothing of them.
#[test]
fn methods_over_plain_weights() -> Outcome {
    let plain = [("model.layers.0.mlp.up_proj.weight", Dtype::BF16, vec![1, 2], vec![0; 4])];
    let group = |targets: &str| {
        format!(
            r#"{{"config_groups": {{"g": {{"targets": ["Linear"]{targets}}}}}, "format": "float-quantized", "ignore": []}}"#
        )
    };
    let weights = r#", "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}"#;
    for (config, field, method) in [
        (r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#.to_owned(), "quant_method", "fp8"),
        (r#"{"quant_method": "gptq", "bits": 4, "group_size": 128}"#.to_owned(), "quant_method", "gptq"),
        (r#"{"quant_method": "awq", "bits": 4}"#.to_owned(), "quant_method", "awq"),
        (r#"{"quant_method": "mxfp4"}"#.to_owned(), "quant_method", "mxfp4"),
        (r#"{"quant_method": "modelopt", "quant_algo": "FP8"}"#.to_owned(), "quant_method", "modelopt"),
        (group(weights), "config_groups", "compressed-tensors"),
    ] {
        assert_eq!(
            open(&plain, &config).map(|_| ()),
            Err(format!(
                "config.json: quantization_config.{field}: expected tensors that are quantised by {method}, or no such \
                 field, got tensors of floats alone"
            ))
        );
    }
    for config in
        [group(""), r#"{"quant_method": "compressed-tensors", "format": "dense"}"#.into(), "null".into()]
    {
        open(&plain, &config)?;
    }
    for (file, text, field) in [
        ("hf_quant_config.json", r#"{"quantization": {"quant_algo": "NVFP4"}}"#, "quantization.quant_algo"),
        ("quantize_config.json", r#"{"bits": 4, "desc_act": true}"#, "desc_act"),
        ("quant_config.json", r#"{"w_bit": 4, "version": "GEMM"}"#, "w_bit"),
    ] {
        let (folder, _) = open(&plain, "null")?;
        std::fs::write(folder.path().join(file), text)?;
        let message = Checkpoint::open(folder.path()).unwrap_err().to_string();
        let expected = format!("{file}: {field}: expected tensors that are quantised by ");
        assert!(message.contains(&expected), "{message}");
    }
    Ok(())
}

#[test]
fn tensors_that_do_not_fit_each_other() -> Outcome {
    let gptq_config =
        r#"{"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": "gptq_v2"}"#;
    let block = r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#;
    let awq = r#"{"quant_method": "awq", "group_size": 3}"#;
    let zeros = |name, dtype, shape: &[usize]| -> Stored {
        let bytes = match dtype {
            Dtype::I32 | Dtype::F32 => 4,
            Dtype::F16 => 2,
            Dtype::I64 => 8,
            _ => 1,
        };
        (name, dtype, shape.to_vec(), vec![0; bytes * shape.iter().product::<usize>()])
    };
    let with = |index: usize, tensor: Stored| {
        let mut tensors = gptq([0, 0], None);
        tensors[index] = tensor;
        tensors
    };
    let cases = [
        (
            with(1, zeros("m.qzeros", Dtype::I32, &[1, 1])),
            gptq_config,
            "m.qzeros: expected shape [2, 1], got [1, 1]",
        ),
        (
            with(2, zeros("m.scales", Dtype::F16, &[8, 2])),
            gptq_config,
            "m.scales: expected shape [2, 8], got [8, 2]",
        ),
        (
            with(2, zeros("m.scales", Dtype::I32, &[2, 8])),
            gptq_config,
            "m.scales: expected scales of type F32, F16, BF16 or F8_E8M0, got I32",
        ),
        (
            with(0, zeros("m.qweight", Dtype::F32, &[2, 8])),
            gptq_config,
            "m.qweight: expected type I32 or U32, got F32",
        ),
        (
            with(0, zeros("m.qweight", Dtype::I32, &[16])),
            gptq_config,
            "m.qweight: expected a matrix, got [16]",
        ),
        (with(1, zeros("m.other", Dtype::I32, &[1])), gptq_config, "m.qzeros: missing"),
        (
            gptq([0, 0], Some([&[0; 15][..], &[2]].concat())),
            gptq_config,
            "m.g_idx: expected groups below 2, got 2",
        ),
        (gptq([0, 0], Some([&[0; 15][..], &[u32::MAX]].concat())), gptq_config, "groups below 2, got -1"),
        (
            vec![
                zeros("m.qweight", Dtype::I32, &[16, 1]),
                zeros("m.qzeros", Dtype::I32, &[5, 1]),
                zeros("m.scales", Dtype::F16, &[5, 8]),
            ],
            awq,
            "m.weight: expected columns in whole groups of 3, got 16 columns",
        ),
        (
            vec![
                zeros("m.weight", Dtype::F8_E4M3, &[129, 1]),
                zeros("m.weight_scale_inv", Dtype::F32, &[1, 1]),
            ],
            block,
            "m.weight_scale_inv: expected shape [2, 1], got [1, 1]",
        ),
        (
            vec![
                zeros("m.weight_packed", Dtype::I32, &[2, 2]),
                zeros("m.weight_scale", Dtype::F32, &[2, 1]),
                ("m.weight_shape", Dtype::I64, vec![2], [2i64, -1].map(i64::to_le_bytes).concat()),
            ],
            &packed(4, r#""strategy": "channel""#),
            "m.weight_packed: expected words of 2 × 18446744073709551615 codes, got [2, 2]",
        ),
        (
            vec![
                zeros("m.weight_packed", Dtype::U8, &[1, 8]),
                zeros("m.weight_scale", Dtype::F8_E4M3, &[1, 1]),
            ],
            r#"{"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0":
            {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}}}"#,
            "m.weight_global_scale: missing",
        ),
    ];
    for (tensors, config, want) in cases {
        let (_folder, checkpoint) = open(&tensors, config)?;
        let got = checkpoint.quantised("m.weight").err().map(|error| error.to_string()).unwrap_or_default();
        assert!(got.contains(want), "{want}: {got}");
    }
    Ok(())
}

/// A file of one matrix of ggml's blocks.
fn gguf(kind: u32, [n, k]: [usize; 2], bytes: Vec<u8>) -> Writer {
    let mut writer = Writer::new("qwen3");
    writer.numbers(
        "qwen3",
        &[
            ("block_count", 1),
            ("context_length", 8),
            ("embedding_length", 8),
            ("feed_forward_length", 8),
            ("attention.head_count", 1),
            ("attention.key_length", 8),
        ],
    );
    writer.set("qwen3.attention.layer_norm_rms_epsilon", Kv::F32(1e-6));
    writer.floats("token_embd.weight", &[2, 8], &[0.0; 16]);
    writer.tensors.push(Tensor { name: "blk.0.attn_q.weight".into(), shape: vec![n, k], kind, bytes });
    writer
}

/// Random blocks against their definition, element by element.
#[test]
fn blocks_of_ggml() -> Outcome {
    let f16 = |bytes: &[u8]| half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
    let six = |s: &[u8], j: usize| {
        if j < 4 {
            (f32::from(s[j] & 63), f32::from(s[j + 4] & 63))
        } else {
            let low = f32::from(s[j + 4] & 15 | (s[j - 4] >> 6) << 4);
            (low, f32::from(s[j + 4] >> 4 | (s[j] >> 6) << 4))
        }
    };
    let nibble = |qs: &[u8], i: usize| if i < 16 { qs[i] & 15 } else { qs[i - 16] >> 4 };
    let bit = |qh: &[u8], i: usize| qh[i / 8] >> (i % 8) & 1;
    let e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let value = |kind: u32, b: &[u8], i: usize| -> f32 {
        match kind {
            2 => f16(b) * (f32::from(nibble(&b[2..], i)) - 8.0),
            3 => f16(b) * f32::from(nibble(&b[4..], i)) + f16(&b[2..]),
            6 => f16(b) * (f32::from(nibble(&b[6..], i) | bit(&b[2..], i) << 4) - 16.0),
            7 => f16(b) * f32::from(nibble(&b[8..], i) | bit(&b[4..], i) << 4) + f16(&b[2..]),
            8 => f16(b) * f32::from(b[2 + i] as i8),
            12 | 13 => {
                let (run, place) = (i / 32, i % 32);
                let qs = if kind == 12 { &b[16..] } else { &b[48..] };
                let byte = qs[run / 2 * 32 + place];
                let mut q = if run % 2 == 0 { byte & 15 } else { byte >> 4 };
                if kind == 13 {
                    q |= (b[16 + place] >> run & 1) << 4;
                }
                let (scale, minimum) = six(&b[4..16], run);
                f16(b) * scale * f32::from(q) - f16(&b[2..]) * minimum
            }
            14 => {
                let (half, l) = (i / 128, i % 32);
                let (ql, qh) = (&b[64 * half..], b[128 + 32 * half + l]);
                let q = match i % 128 / 32 {
                    0 => ql[l] & 15 | (qh & 3) << 4,
                    1 => ql[l + 32] & 15 | (qh >> 2 & 3) << 4,
                    2 => ql[l] >> 4 | (qh >> 4 & 3) << 4,
                    _ => ql[l + 32] >> 4 | (qh >> 6) << 4,
                };
                f16(&b[208..]) * f32::from(b[192 + i / 16] as i8) * (f32::from(q) - 32.0)
            }
            39 => {
                let code = nibble(&b[1..], i);
                let magnitude = e2m1[usize::from(code & 7)] * 2f32.powi(i32::from(b[0]) - 127);
                if code > 7 { -magnitude } else { magnitude }
            }
            _ => panic!("type {kind}"),
        }
    };
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    for (kind, elements, bytes, halves) in [
        (2, 32, 18, &[0][..]),
        (3, 32, 20, &[0, 2]),
        (6, 32, 22, &[0]),
        (7, 32, 24, &[0, 2]),
        (8, 32, 34, &[0]),
        (12, 256, 144, &[0, 2]),
        (13, 256, 176, &[0, 2]),
        (14, 256, 210, &[208]),
        (39, 32, 17, &[]),
    ] {
        let (n, k) = (3, 2 * elements);
        let mut data: Vec<u8> = (0..6 * bytes).map(|_| random()).collect();
        for block in data.chunks_mut(bytes) {
            for &at in halves {
                // No NaN, no infinity: the exponent's highest bit is off.
                block[at + 1] &= 0xbf;
            }
            if kind == 39 {
                block[0] = 100 + block[0] % 50;
            }
        }
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, gguf(kind, [n, k], data.clone()).bytes())?;
        let checkpoint = Checkpoint::open(&path)?;
        let got = values(&checkpoint, "model.layers.0.self_attn.q_proj.weight");
        let blocks: Vec<&[u8]> = data.chunks(bytes).collect();
        for (row, got) in got.iter().enumerate() {
            for (col, &got) in got.iter().enumerate() {
                let want = value(kind, blocks[2 * row + col / elements], col % elements);
                assert_eq!(got, want, "type {kind}, row {row}, column {col}");
            }
        }
        let DecoderConfig { hidden_size, .. } = checkpoint.config().decoder;
        assert_eq!(hidden_size, 8);
    }
    Ok(())
}
