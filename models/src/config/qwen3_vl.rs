//! `model_type: "qwen3_vl"`: a dense Qwen3 decoder that sees images and videos through a vision tower.

use serde_json::{Map, Value};

use super::fields::{Fields, whole};
use super::rope::{read_theta, rope_fields};
use super::{DecoderConfig, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_SIZE, PixelConfig, VisionConfig, qwen3};
use crate::ModelError;

/// Longest side of the patches that become a token: that of the largest square image.
pub(super) const MAX_TOKEN_SIDE: usize = 4096;

/// The decoder, and the tower.
pub(super) fn read(top: &Fields) -> Result<(DecoderConfig, VisionConfig), ModelError> {
    let text = object(top, "text_config")?;
    // The architecture has no windows: what the file may say of them is not read.
    text.assume("layer_types", |types| {
        types.as_array().is_some_and(|types| types.iter().all(|kind| kind == "full_attention"))
    });
    let windows = vec![None; qwen3::read_num_layers(&text)?];
    let decoder = DecoderConfig {
        tie_word_embeddings: top.flag("tie_word_embeddings")?.unwrap_or(false),
        ..qwen3::read_dense(&text, windows, 500_000.0, 128_000)?
    };
    text.assume("tie_word_embeddings", |value| *value == decoder.tie_word_embeddings);
    let vision = read_vision(top, &object(top, "vision_config")?)?;
    let inconsistent = |rule, got| Err(top.inconsistent(rule, got));
    if vision.out_hidden_size != decoder.hidden_size {
        let rule = "vision_config.out_hidden_size must be text_config.hidden_size";
        return inconsistent(rule, format!("{} and {}", vision.out_hidden_size, decoder.hidden_size));
    }
    if vision.deepstack_blocks.len() > decoder.layers.len() {
        let rule = "there must be a decoder layer for each of vision_config.deepstack_visual_indexes";
        return inconsistent(rule, format!("{} and {}", decoder.layers.len(), vision.deepstack_blocks.len()));
    }
    let mrope_section = read_sections(&text)?;
    let pairs = decoder.rope.rotary_dim / 2;
    if mrope_section.iter().sum::<usize>() != pairs {
        let rule = "the sections of mrope_section must make up half the head";
        return inconsistent(rule, format!("{mrope_section:?} and {pairs}"));
    }
    Ok((decoder, VisionConfig { mrope_section, ..vision }))
}

/// The object `key` of the file.
pub(super) fn object<'a>(top: &Fields<'a>, key: &str) -> Result<Fields<'a>, ModelError> {
    top.required(key, "an object", Value::as_object)?;
    top.object(key)?.ok_or_else(|| top.error(key, "an object", "nothing".into()))
}

fn read_vision(top: &Fields, fields: &Fields) -> Result<VisionConfig, ModelError> {
    let inconsistent = |rule, got| Err(fields.inconsistent(rule, got));
    let depth = fields.integer("depth", 1..=MAX_LAYERS)?.unwrap_or(27);
    let positions = fields.size("num_position_embeddings", 2304)?;
    let grid = positions.isqrt();
    if grid * grid != positions {
        return inconsistent("num_position_embeddings must be a square", positions.to_string());
    }
    let hidden_size = fields.size("hidden_size", 1152)?;
    let heads = match fields.get("num_heads") {
        None => fields.size_up_to("num_attention_heads", MAX_HEADS, 16)?,
        Some(_) => fields.size_up_to("num_heads", MAX_HEADS, 16)?,
    };
    if !hidden_size.is_multiple_of(8 * heads) || hidden_size / heads > MAX_HEAD_DIM {
        let rule = "vision_config.hidden_size must be a multiple of eight times num_heads, up to 512 times";
        return inconsistent(rule, format!("{hidden_size} and {heads}"));
    }
    let channels = fields.size("in_channels", 3)?;
    let temporal_patch_size = fields.size("temporal_patch_size", 2)?;
    let patch_size = fields.size_up_to("patch_size", MAX_TOKEN_SIDE, 16)?;
    let merge_size = fields.size_up_to("spatial_merge_size", MAX_TOKEN_SIDE, 2)?;
    if patch_size * merge_size > MAX_TOKEN_SIDE {
        let rule = "vision_config.patch_size · spatial_merge_size must be at most 4096";
        return inconsistent(rule, format!("{patch_size} · {merge_size}"));
    }
    if channels.saturating_mul(temporal_patch_size).saturating_mul(patch_size * patch_size) > MAX_SIZE {
        let rule =
            "a patch, vision_config.in_channels · temporal_patch_size · patch_size², must be below 2^31";
        return inconsistent(rule, format!("{channels} · {temporal_patch_size} · {patch_size}²"));
    }
    if hidden_size.saturating_mul(merge_size * merge_size) > MAX_SIZE {
        let rule = "a token's patches, vision_config.hidden_size · spatial_merge_size², must be below 2^31";
        return inconsistent(rule, format!("{hidden_size} · {merge_size}²"));
    }
    let blocks = |value: &Value| -> Option<Vec<usize>> { value.as_array()?.iter().map(whole).collect() };
    let deepstack_blocks = fields.optional("deepstack_visual_indexes", "a list of block numbers", blocks)?;
    let deepstack_blocks = deepstack_blocks.unwrap_or_else(|| vec![8, 16, 24]);
    if !deepstack_blocks.is_sorted_by(|a, b| a < b)
        || deepstack_blocks.last().is_some_and(|&last| last >= depth)
    {
        let rule = "vision_config.deepstack_visual_indexes must ascend and be below depth";
        return inconsistent(rule, format!("{deepstack_blocks:?} and {depth}"));
    }
    let token = |key: &str, default: usize| -> Result<u32, ModelError> {
        Ok(top.integer(key, 0..=MAX_SIZE)?.unwrap_or(default) as u32)
    };
    Ok(VisionConfig {
        depth,
        hidden_size,
        heads,
        intermediate_size: fields.size("intermediate_size", 4304)?,
        activation: qwen3::read_activation(fields, "gelu_pytorch_tanh")?,
        channels,
        temporal_patch_size,
        patch_size,
        merge_size,
        out_hidden_size: fields.size("out_hidden_size", 3584)?,
        position_grid: grid,
        rope_theta: read_axial_theta(fields)?,
        deepstack_blocks,
        mrope_section: [0; 3],
        image_token: token("image_token_id", 151655)?,
        video_token: token("video_token_id", 151656)?,
        vision_start_token: token("vision_start_token_id", 151652)?,
        vision_end_token: token("vision_end_token_id", 151653)?,
        pixels: PixelConfig::default(),
    })
}

/// The base of the tower's rotary frequencies.
fn read_axial_theta(fields: &Fields) -> Result<f64, ModelError> {
    let empty = Map::new();
    let rope = rope_fields(fields, &empty)?;
    for key in ["rope_type", "type"] {
        if let Some(kind) = rope.nullable(key, "a string", Value::as_str)?
            && !["axial", "default"].contains(&kind)
        {
            return Err(rope.unsupported(key, kind.into(), &["axial", "default"]));
        }
    }
    read_theta(fields, &rope, 10_000.0)
}

/// `mrope_section`, where the rotary parameters are.
fn read_sections(text: &Fields) -> Result<[usize; 3], ModelError> {
    let sections = |value: &Value| {
        let sizes: Option<Vec<usize>> =
            value.as_array()?.iter().map(|size| whole(size).filter(|&size| size <= MAX_SIZE)).collect();
        <[usize; 3]>::try_from(sizes?).ok()
    };
    let empty = Map::new();
    let rope = rope_fields(text, &empty)?;
    Ok(rope.nullable("mrope_section", "a list of three sizes", sections)?.unwrap_or([24, 20, 20]))
}

#[cfg(test)]
mod tests {
    use super::super::tests::*;
    use super::super::*;

    #[test]
    fn vision_configs() {
        let config = published("qwen3-vl-2b-instruct");
        let decoder = DecoderConfig {
            hidden_size: 2048,
            tie_word_embeddings: true,
            max_position_embeddings: 262144,
            ..dense(28, heads(16, 8, 128), 6144, 5e6)
        };
        let vision = VisionConfig {
            depth: 24,
            hidden_size: 1024,
            heads: 16,
            intermediate_size: 4096,
            activation: Activation::GeluTanh,
            channels: 3,
            temporal_patch_size: 2,
            patch_size: 16,
            merge_size: 2,
            out_hidden_size: 2048,
            position_grid: 48,
            rope_theta: 1e4,
            deepstack_blocks: vec![5, 11, 17],
            mrope_section: [24, 20, 20],
            image_token: 151655,
            video_token: 151656,
            vision_start_token: 151652,
            vision_end_token: 151653,
            pixels: PixelConfig::default(),
        };
        assert_eq!(vision.patch_len(), 1536);
        assert_eq!((config.architecture, config.decoder), (Architecture::Qwen3Vl, decoder));
        assert_eq!((config.vision.as_ref(), config.dtype), (Some(&vision), Some(DType::BF16)));
        assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![151645], Some(151643)));

        let golden = repository("tests/golden/qwen3_vl");
        let small = golden.vision.unwrap();
        assert_eq!((small.mrope_section, small.position_grid, small.depth), ([6, 5, 5], 8, 3));
        assert_eq!((golden.decoder.rope.theta, golden.decoder.tie_word_embeddings), (5e6, false));
        assert_eq!((golden.dtype, golden.eos_token_ids), (Some(DType::F32), vec![1]));

        // With the defaults of the classes, of which the widths do not fit each other.
        let defaults = qwen3_vl(r#""hidden_size": 3584"#, "", "").unwrap();
        assert_eq!(defaults.decoder.rope.theta, 5e5);
        let large = VisionConfig {
            depth: 27,
            hidden_size: 1152,
            intermediate_size: 4304,
            out_hidden_size: 3584,
            deepstack_blocks: vec![8, 16, 24],
            ..vision
        };
        assert_eq!(defaults.vision, Some(large));
    }

    #[test]
    fn vision_configs_that_contradict_themselves() {
        let message = |text: &str, vision: &str| qwen3_vl(text, vision, "").unwrap_err().to_string();
        let fits = r#""hidden_size": 3584"#;
        assert_eq!(
            message("", ""),
            "config.json: vision_config.out_hidden_size must be text_config.hidden_size, got 3584 and 4096"
        );
        assert!(message(fits, r#""num_position_embeddings": 2305"#).contains("must be a square"));
        assert!(message(fits, r#""num_heads": 7"#).contains("eight times num_heads"));
        assert!(message(fits, r#""deepstack_visual_indexes": [5, 27]"#).contains("below depth"));
        assert!(message(fits, r#""deepstack_visual_indexes": [5, 5]"#).contains("must ascend"));
        assert!(message(fits, r#""depth": 20"#).contains("below depth"));
        assert!(
            message(r#""hidden_size": 3584, "num_hidden_layers": 2"#, "")
                .contains("a decoder layer for each")
        );
        let sections = r#""hidden_size": 3584, "rope_scaling": {"mrope_section": [24, 20, 21]}"#;
        assert!(message(sections, "").contains("mrope_section"));
        assert!(parse(r#"{"model_type": "qwen3_vl"}"#).unwrap_err().to_string().contains("text_config"));
    }
}
