//! The images of a prompt: from files, or from tensors that another program made of them.

use std::io::Read;
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensors};
use warpforge::models::{PatchGrid, VisionConfig, Visual};

use crate::decode;
use crate::output::Failure;

/// Images, cut into patches.
#[derive(Default)]
pub struct Pictures {
    pictures: Vec<(PatchGrid, Vec<f32>)>,
}

impl Pictures {
    /// Reads, resizes and cuts PNG and JPEG files.
    pub fn from_files(config: &VisionConfig, paths: &[PathBuf]) -> Result<Self, Failure> {
        let read = |path: &PathBuf| {
            let decode::Rgb { height, width, bytes } = decode::read(config, path)?;
            let (height, width, bytes) = config.resize(height, width, &bytes)?;
            Ok(config.patches(height, width, &[&bytes])?)
        };
        Ok(Pictures { pictures: paths.iter().map(read).collect::<Result<_, Failure>>()? })
    }

    /// Reads `pixel_values` and `image_grid_thw` of a safetensors file.
    pub fn from_tensors(config: &VisionConfig, path: &Path) -> Result<Self, Failure> {
        let mut file = Vec::new();
        let named =
            |error: &dyn std::fmt::Display| -> Failure { format!("{}: {error}", path.display()).into() };
        decode::open(path)?.read_to_end(&mut file).map_err(|error| named(&error))?;
        Self::of_tensors(config, &file).map_err(|error| named(&error))
    }

    fn of_tensors(config: &VisionConfig, file: &[u8]) -> Result<Self, Failure> {
        let tensors = parse(file)?;
        let (values, grids) = (tensors.tensor("pixel_values")?, tensors.tensor("image_grid_thw")?);
        if values.dtype() != Dtype::F32 {
            return Err(format!("pixel_values is {}, expected F32", values.dtype()).into());
        }
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(values.data());
        let sizes: Vec<i64> = match grids.dtype() {
            Dtype::I64 => bytemuck::pod_collect_to_vec(grids.data()),
            Dtype::I32 => {
                bytemuck::pod_collect_to_vec::<u8, i32>(grids.data()).into_iter().map(i64::from).collect()
            }
            other => return Err(format!("image_grid_thw is {other}, expected I64 or I32").into()),
        };
        let mut rest = &values[..];
        let mut pictures = Vec::new();
        for size in sizes.chunks(3) {
            // Far beyond what there are patches for, and their product still no overflow.
            let checked = |&size: &i64| usize::try_from(size).ok().filter(|&size| size < 1 << 16);
            let sizes: Option<Vec<usize>> = size.iter().map(checked).collect();
            let Some(&[frames, rows, cols]) = sizes.as_deref() else {
                return Err(format!("image_grid_thw has {size:?}, expected three sizes").into());
            };
            let grid = PatchGrid { frames, rows, cols };
            let numbers = grid.patches().saturating_mul(config.patch_len());
            let Some((own, others)) = rest.split_at_checked(numbers) else {
                return Err("pixel_values has fewer patches than image_grid_thw says".into());
            };
            pictures.push((grid, own.to_vec()));
            rest = others;
        }
        if rest.is_empty() {
            Ok(Pictures { pictures })
        } else {
            Err("pixel_values has more patches than image_grid_thw says".into())
        }
    }

    /// As a session takes them.
    pub fn visuals(&self) -> Vec<Visual<'_>> {
        self.pictures.iter().map(|(grid, patches)| Visual { grid: *grid, patches }).collect()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.pictures.len()
    }

    /// Patches altogether.
    pub fn num_patches(&self) -> usize {
        self.pictures.iter().map(|(grid, _)| grid.patches()).sum()
    }

    /// The prompt with a placeholder for each token of the images: as it is if it has them all, with each single
    /// placeholder repeated if it has one for each image, and behind the images if it has none.
    pub fn insert(&self, config: &VisionConfig, prompt: &[u32]) -> Result<Vec<u32>, Failure> {
        let tokens: Vec<usize> =
            self.pictures.iter().map(|(grid, _)| grid.patches() / config.patches_per_token()).collect();
        let run = |tokens: &usize| std::iter::repeat_n(config.image_token, *tokens);
        let found = prompt.iter().filter(|&&id| id == config.image_token).count();
        if found == tokens.iter().sum::<usize>() {
            Ok(prompt.to_vec())
        } else if found == tokens.len() {
            let mut left = tokens.iter();
            let times = |&id: &u32| if id == config.image_token { left.next().copied() } else { None };
            let times = prompt.iter().map(times).map(|times| times.unwrap_or(1));
            Ok(std::iter::zip(prompt, times)
                .flat_map(|(&id, times)| std::iter::repeat_n(id, times))
                .collect())
        } else if found == 0 {
            let marked = tokens.iter().flat_map(|tokens| {
                let (start, end) = (config.vision_start_token, config.vision_end_token);
                std::iter::once(start).chain(run(tokens)).chain([end])
            });
            Ok(marked.chain(prompt.iter().copied()).collect())
        } else {
            Err(format!("{} images, but {found} image tokens in the prompt", tokens.len()).into())
        }
    }
}

/// The tensors of a safetensors file. Its parser adds the lengths of header and tensors up, a sum that may wrap around
/// to the file's own: they are compared before.
fn parse(file: &[u8]) -> Result<SafeTensors<'_>, Failure> {
    let (length, rest) = file.split_first_chunk().ok_or("truncated: no header")?;
    let header = usize::try_from(u64::from_le_bytes(*length)).ok();
    let parts = header.and_then(|header| rest.split_at_checked(header));
    let (header, data) = parts.ok_or("truncated: the header is longer than the file")?;
    let described = serde_json::from_slice::<Metadata>(header)?.data_len();
    if described != data.len() {
        return Err(
            format!("the header describes {described} bytes of tensors, {} follow it", data.len()).into()
        );
    }
    Ok(SafeTensors::deserialize(file)?)
}

#[cfg(test)]
mod tests {
    use image::{Rgb, RgbImage};
    use warpforge::models::{Model, ModelConfig, SessionOptions};
    use warpforge::{DType, Device};

    use super::*;

    type Outcome = Result<(), Failure>;

    fn golden() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/qwen3_vl")
    }

    fn config() -> Result<VisionConfig, Failure> {
        Ok(ModelConfig::from_dir(&golden())?.vision.ok_or("no tower")?)
    }

    /// A patch's number as a pixel's value.
    fn pixel(value: f32) -> f32 {
        (value * 0.5 + 0.5) * 255.0
    }

    /// A file of the right size is cut as it is.
    #[test]
    fn files_of_the_right_size() -> Outcome {
        let (folder, config) = (tempfile::tempdir()?, config()?);
        let path = folder.path().join("a.png");
        let color = |x: u32, y: u32| [x as u8, y as u8, (x ^ y) as u8];
        RgbImage::from_fn(288, 256, |x, y| Rgb(color(x, y))).save(&path)?;
        let pictures = Pictures::from_files(&config, &[path])?;
        let [(grid, patches)] = &pictures.pictures[..] else { panic!("one picture") };
        assert_eq!(*grid, PatchGrid { frames: 1, rows: 16, cols: 18 });
        // The seventh patch is the third of the second block of 2 x 2: row 1, column 2.
        let patch = &patches[6 * 1536..7 * 1536];
        for (i, &value) in patch.iter().enumerate() {
            let (channel, y, x) = (i / 512, i / 16 % 16, i % 16);
            let want = f32::from(color(32 + x as u32, 16 + y as u32)[channel]);
            assert!((pixel(value) - want).abs() < 1e-3, "{i}: {} {want}", pixel(value));
        }
        Ok(())
    }

    /// A slope stays one when it is made smaller or larger, up to the rounding of pixels.
    #[test]
    fn files_of_other_sizes() -> Outcome {
        let (folder, config) = (tempfile::tempdir()?, config()?);
        for (name, width, height) in [("a.png", 2000u32, 1000u32), ("b.jpg", 500, 300), ("c.png", 90, 70)] {
            let path = folder.path().join(name);
            let share = |place: u32, len: u32| (f64::from(place) + 0.5) / f64::from(len);
            let color = |x: u32, y: u32| {
                Rgb([(40.0 + 160.0 * share(x, width)) as u8, (40.0 + 160.0 * share(y, height)) as u8, 90])
            };
            RgbImage::from_fn(width, height, color).save(&path)?;
            let pictures = Pictures::from_files(&config, &[path])?;
            let (grid, patches) = &pictures.pictures[0];
            let (want_height, want_width) = config.resized(height as usize, width as usize)?;
            assert_eq!((grid.rows * 16, grid.cols * 16), (want_height, want_width), "{name}");
            // The middle of the first patch, and of the last.
            for (patch, row, col) in [(0, 0, 0), (grid.patches() - 1, grid.rows - 1, grid.cols - 1)] {
                let value = |channel: usize| pixel(patches[patch * 1536 + channel * 512 + 8 * 16 + 8]);
                let along =
                    |place: usize, len: usize| 40.0 + 160.0 * (16 * place + 8) as f32 / (16 * len) as f32;
                let want = [along(col, grid.cols), along(row, grid.rows), 90.0];
                for (channel, want) in want.into_iter().enumerate() {
                    let got = value(channel);
                    assert!(
                        (got - want).abs() <= 3.0,
                        "{name}, patch {patch}, channel {channel}: {got} {want}"
                    );
                }
            }
        }
        let message = Pictures::from_files(&config, &[folder.path().join("none.png")]).err();
        assert!(message.ok_or("an error")?.to_string().contains("none.png"));
        Ok(())
    }

    /// Lengths that add up to the file's own only since they wrap around, and sizes whose product does.
    #[test]
    fn crafted_tensors() -> Outcome {
        let folder = tempfile::tempdir()?;
        let config = VisionConfig { channels: 1 << 20, ..config()? };
        let path = folder.path().join("a.safetensors");
        let message = |header: &str, data: &[u8]| -> Result<String, Failure> {
            let length = (header.len() as u64).to_le_bytes();
            std::fs::write(&path, [&length, header.as_bytes(), data].concat())?;
            let error = Pictures::from_tensors(&config, &path).err().ok_or("an error")?;
            Ok(error.to_string())
        };
        let each = (1usize << 61) - 1;
        let entry = |i: usize, from: usize, to: usize| {
            format!(r#""{i}":{{"dtype":"U8","shape":[{}],"data_offsets":[{from},{to}]}}"#, to - from)
        };
        let mut entries: Vec<String> = (0..8).map(|i| entry(i, i * each, (i + 1) * each)).collect();
        entries.push(entry(8, 8 * each, usize::MAX));
        let wrapped = message(&format!("{{{}}}", entries.join(",")), &[0; 7])?;
        assert!(
            wrapped.ends_with("describes 18446744073709551615 bytes of tensors, 7 follow it"),
            "{wrapped}"
        );
        assert!(message("{", &[])?.contains("EOF"));

        let header = r#"{"pixel_values":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
            "image_grid_thw":{"dtype":"I32","shape":[3],"data_offsets":[4,16]}}"#;
        let data = [[0u8; 4], [0, 128, 0, 0], [0, 128, 0, 0], [0, 128, 0, 0]].concat();
        let fewer = "a.safetensors: pixel_values has fewer patches than image_grid_thw says";
        assert!(message(header, &data)?.ends_with(fewer), "{}", message(header, &data)?);
        Ok(())
    }

    #[test]
    fn places_in_the_prompt() -> Outcome {
        let config = config()?;
        let grid = |rows, cols| (PatchGrid { frames: 1, rows, cols }, Vec::new());
        let pictures = Pictures { pictures: vec![grid(2, 4), grid(2, 2)] };
        let (start, image, end) = (config.vision_start_token, config.image_token, config.vision_end_token);
        let marked = [start, image, image, end, start, image, end, 5];
        assert_eq!(pictures.insert(&config, &[5])?, marked);
        assert_eq!(pictures.insert(&config, &marked)?, marked);
        assert_eq!(pictures.insert(&config, &[1, image, 2, image])?, [1, image, image, 2, image]);
        let error = pictures.insert(&config, &[1, image]).err().ok_or("an error")?.to_string();
        assert_eq!(error, "2 images, but 1 image tokens in the prompt");
        Ok(())
    }

    /// From a file to logits; and from the tensors of the golden case to those that transformers computed.
    #[test]
    fn from_pictures_to_logits() -> Outcome {
        let (folder, config) = (tempfile::tempdir()?, config()?);
        let model = Model::load(&Device::cpu(), &golden(), DType::F32, &mut |_| {})?;
        let options = SessionOptions { capacity: 128, max_patches: 256, ..SessionOptions::default() };
        let mut session = model.session(options)?;
        let stream = session.stream().clone();
        let mut logits_of = |pictures: &Pictures, ids: &[u32]| -> Result<Vec<f32>, Failure> {
            session.truncate(0, 0)?;
            let ids = pictures.insert(&config, ids)?;
            Ok(session.prefill_visual(0, &ids, &pictures.visuals())?.to_vec::<f32>(&stream)?)
        };
        let mut results = Vec::new();
        for shade in [0, 255] {
            let path = folder.path().join(format!("{shade}.png"));
            RgbImage::from_pixel(100, 100, Rgb([shade; 3])).save(&path)?;
            let pictures = Pictures::from_files(&config, &[path])?;
            results.push(logits_of(&pictures, &[5, 6, 7])?);
        }
        assert!(results.iter().flatten().all(|logit| logit.is_finite()));
        assert_ne!(results[0], results[1]);

        let case = golden().join("case.safetensors");
        let file = std::fs::read(&case)?;
        let tensors = SafeTensors::deserialize(&file)?;
        let ids: Vec<u32> = bytemuck::pod_collect_to_vec(tensors.tensor("input_ids")?.data());
        let want: Vec<f32> = bytemuck::pod_collect_to_vec(tensors.tensor("logits")?.data());
        let got = logits_of(&Pictures::from_tensors(&config, &case)?, &ids)?;
        let want = &want[want.len() - got.len()..];
        let distance = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum() };
        let error = (distance(&got, want) / distance(want, &vec![0.0; want.len()])).sqrt();
        assert!(error < 1e-4, "{error:e}");
        Ok(())
    }
}
