//! `preprocessor_config.json`: how images are made ready for a vision tower.

use std::path::Path;

use serde_json::Value;

use super::fields::{Fields, Seen, read_json, whole};
use super::{MAX_CONFIG_BYTES, MAX_SIZE, VisionConfig};
use crate::ModelError;

/// How the pixels of an image become numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct PixelConfig {
    /// Fewest pixels of an image after it is resized; at least 1.
    pub min_pixels: usize,
    /// Most pixels.
    pub max_pixels: usize,
    /// What is subtracted from a channel's values, which are from 0 to 1; of each channel, or one for all.
    pub mean: Vec<f32>,
    /// What they are divided by then.
    pub std: Vec<f32>,
}

impl Default for PixelConfig {
    /// What Qwen3-VL was published with.
    fn default() -> Self {
        PixelConfig { min_pixels: 256 * 256, max_pixels: 4096 * 4096, mean: vec![0.5], std: vec![0.5] }
    }
}

/// Most pixels that a file can ask for: an image is resized to at least `min_pixels`, in memory.
pub(super) const MAX_PIXELS: usize = 1 << 28;

/// What the files of `dir` say, over the defaults.
pub(super) fn read(dir: &Path, vision: &VisionConfig) -> Result<PixelConfig, ModelError> {
    let path = dir.join("processor_config.json");
    let (processor, seen) = (optional(&path)?, Seen::default());
    if let Some(file) = processor.as_ref().filter(|file| file.get("image_processor").is_some()) {
        let fields = Fields::top(file, &path, &seen)?;
        let nested = fields.required("image_processor", "an object", Value::as_object)?;
        return read_fields(&fields.inside("image_processor.", nested), vision);
    }
    let path = dir.join("preprocessor_config.json");
    match optional(&path)? {
        Some(file) => read_fields(&Fields::top(&file, &path, &seen)?, vision),
        None => Ok(PixelConfig::default()),
    }
}

fn optional(path: &Path) -> Result<Option<Value>, ModelError> {
    match read_json(path, MAX_CONFIG_BYTES) {
        Ok(value) => Ok(Some(value)),
        Err(ModelError::Missing { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn read_fields(fields: &Fields, vision: &VisionConfig) -> Result<PixelConfig, ModelError> {
    let inconsistent = |rule, got| Err(fields.inconsistent(rule, got));
    for (key, own, rule) in [
        ("patch_size", vision.patch_size, "patch_size must be vision_config.patch_size of config.json"),
        (
            "temporal_patch_size",
            vision.temporal_patch_size,
            "temporal_patch_size must be vision_config.temporal_patch_size of config.json",
        ),
        (
            "merge_size",
            vision.merge_size,
            "merge_size must be vision_config.spatial_merge_size of config.json",
        ),
    ] {
        if let Some(size) = fields.integer(key, 1..=MAX_SIZE)?
            && size != own
        {
            return inconsistent(rule, format!("{size} and {own}"));
        }
    }
    for key in ["do_resize", "do_rescale", "do_normalize"] {
        if fields.nullable(key, "true or false", Value::as_bool)? == Some(false) {
            return Err(fields.unsupported(key, "false".into(), &["true"]));
        }
    }
    for key in ["do_center_crop", "do_pad"] {
        if fields.nullable(key, "true or false", Value::as_bool)? == Some(true) {
            return Err(fields.unsupported(key, "true".into(), &["false"]));
        }
    }
    if let Some(filter) = fields.nullable("resample", "a filter's number", Value::as_u64)?
        && filter != 3
    {
        return Err(fields.unsupported("resample", filter.to_string(), &["3, bicubic"]));
    }
    if let Some(factor) = fields.number("rescale_factor", "a number", |_| true)?
        && (factor * 255.0 - 1.0).abs() > 1e-6
    {
        return Err(fields.unsupported("rescale_factor", factor.to_string(), &["1/255"]));
    }

    let default = PixelConfig::default();
    let (mut min_pixels, mut max_pixels) = (default.min_pixels, default.max_pixels);
    if let Some(map) = fields.nullable("size", "an object", Value::as_object)? {
        let size = fields.inside(format!("{}size.", fields.prefix()), map);
        let of = |key| match size.integer(key, 1..=MAX_PIXELS)? {
            Some(pixels) => Ok(pixels),
            None => Err(size.error(key, &format!("an integer from 1 to {MAX_PIXELS}"), "nothing".into())),
        };
        (min_pixels, max_pixels) = (of("shortest_edge")?, of("longest_edge")?);
    }
    // The older form, which goes first.
    let older = |key: &str| {
        let expected = format!("an integer from 1 to {MAX_PIXELS}");
        fields.nullable(key, &expected, |value: &Value| {
            whole(value).filter(|pixels| (1..=MAX_PIXELS).contains(pixels))
        })
    };
    min_pixels = older("min_pixels")?.unwrap_or(min_pixels);
    max_pixels = older("max_pixels")?.unwrap_or(max_pixels);
    if min_pixels > max_pixels {
        return inconsistent(
            "the fewest pixels must not be above the most (size or min_pixels, max_pixels)",
            format!("{min_pixels} and {max_pixels}"),
        );
    }
    let numbers = |key: &str, default: Vec<f32>, accepts: fn(f32) -> bool, expected: &str| {
        let expected = format!("{expected}, or a list of them for each of {} channels", vision.channels);
        let one = |value: &Value| value.as_f64().map(|n| n as f32).filter(|&n| n.is_finite() && accepts(n));
        let many = |value: &Value| match value {
            Value::Array(list) if list.len() == vision.channels => list.iter().map(one).collect(),
            Value::Array(_) => None,
            number => one(number).map(|number| vec![number]),
        };
        Ok(fields.nullable(key, &expected, many)?.unwrap_or(default))
    };
    Ok(PixelConfig {
        min_pixels,
        max_pixels,
        mean: numbers("image_mean", default.mean, |_| true, "a number")?,
        std: numbers("image_std", default.std, |std| std > 0.0, "a number above 0")?,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::ModelConfig;

    const CONFIG: &str =
        r#"{"model_type": "qwen3_vl", "text_config": {"hidden_size": 3584}, "vision_config": {}}"#;

    fn of(files: &[(&str, &str)]) -> Result<PixelConfig, String> {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in [("config.json", CONFIG)].iter().chain(files) {
            fs::write(folder.path().join(name), text).expect("a file");
        }
        let config = ModelConfig::from_dir(folder.path())
            .map_err(|error| error.to_string().replace(&format!("{}/", folder.path().display()), ""))?;
        Ok(config.vision.expect("a tower").pixels)
    }

    fn preprocessor(text: &str) -> Result<PixelConfig, String> {
        of(&[("preprocessor_config.json", text)])
    }

    #[test]
    fn forms() {
        let default = PixelConfig::default();
        let bounds =
            |min_pixels, max_pixels| PixelConfig { min_pixels, max_pixels, ..PixelConfig::default() };
        assert_eq!(of(&[]), Ok(default.clone()));
        let published = r#"{"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16,
            "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
            "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast"}"#;
        let each = PixelConfig { mean: vec![0.5; 3], std: vec![0.5; 3], ..default.clone() };
        assert_eq!(preprocessor(published), Ok(each));
        for (text, want) in [
            ("{}", default.clone()),
            (r#"{"size": {"shortest_edge": 100, "longest_edge": 5000}}"#, bounds(100, 5000)),
            (r#"{"min_pixels": 100}"#, bounds(100, 4096 * 4096)),
            (r#"{"min_pixels": null, "max_pixels": 70000, "size": null}"#, bounds(65536, 70000)),
            (r#"{"min_pixels": 3, "size": {"shortest_edge": 100, "longest_edge": 5000}}"#, bounds(3, 5000)),
            (
                r#"{"image_mean": [0.1, 0.2, 0.3], "image_std": 0.25, "rescale_factor": 0.00392156862745098, "resample": 3}"#,
                PixelConfig { mean: vec![0.1, 0.2, 0.3], std: vec![0.25], ..default.clone() },
            ),
        ] {
            assert_eq!(preprocessor(text), Ok(want), "{text}");
        }
        let nested = ("processor_config.json", r#"{"image_processor": {"max_pixels": 90000}}"#);
        let flat = ("preprocessor_config.json", r#"{"max_pixels": 80000}"#);
        assert_eq!(of(&[nested, flat]), Ok(bounds(65536, 90000)));
        assert_eq!(
            of(&[("processor_config.json", r#"{"processor_class": "x"}"#), flat]),
            Ok(bounds(65536, 80000))
        );
    }

    #[test]
    fn refusals() {
        for (text, want) in [
            (
                r#"{"patch_size": 14}"#,
                "patch_size must be vision_config.patch_size of config.json, got 14 and 16",
            ),
            (
                r#"{"merge_size": 3}"#,
                "merge_size must be vision_config.spatial_merge_size of config.json, got 3 and 2",
            ),
            (
                r#"{"temporal_patch_size": 1}"#,
                "temporal_patch_size must be vision_config.temporal_patch_size of config.json, got 1 and 2",
            ),
            (
                r#"{"min_pixels": 300, "max_pixels": 200}"#,
                "the fewest pixels must not be above the most (size or min_pixels, max_pixels), got 300 and 200",
            ),
            (
                r#"{"size": {"shortest_edge": 5}}"#,
                "size.longest_edge: expected an integer from 1 to 268435456, got nothing",
            ),
            (
                r#"{"min_pixels": 99999999999}"#,
                "min_pixels: expected an integer from 1 to 268435456, got 99999999999",
            ),
            (
                r#"{"image_std": [0.5, 0, 0.5]}"#,
                "image_std: expected a number above 0, or a list of them for each of 3 channels, got [0.5,0,0.5]",
            ),
            (
                r#"{"image_mean": [0.5]}"#,
                "image_mean: expected a number, or a list of them for each of 3 channels, got [0.5]",
            ),
            (r#"{"do_resize": false}"#, "do_resize: false is not supported; supported: true"),
            (r#"{"do_center_crop": true}"#, "do_center_crop: true is not supported; supported: false"),
            (r#"{"resample": 2}"#, "resample: 2 is not supported; supported: 3, bicubic"),
            (r#"{"rescale_factor": 1}"#, "rescale_factor: 1 is not supported; supported: 1/255"),
        ] {
            assert_eq!(preprocessor(text), Err(format!("preprocessor_config.json: {want}")));
        }
        let nested = [(
            "processor_config.json",
            r#"{"image_processor": {"size": {"shortest_edge": 0, "longest_edge": 5}}}"#,
        )];
        let want = "processor_config.json: image_processor.size.shortest_edge: expected an integer from 1 to 268435456, got 0";
        assert_eq!(of(&nested), Err(want.into()));
        let nested = of(&[("processor_config.json", r#"{"image_processor": 7}"#)]);
        assert_eq!(nested, Err("processor_config.json: image_processor: expected an object, got 7".into()));
    }
}
