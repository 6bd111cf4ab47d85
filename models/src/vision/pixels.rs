//! From pixels to patches.

use super::{PatchGrid, invalid, resize};
use crate::config::{PixelConfig, VisionConfig};
use host::Error;

/// Largest ratio of the sides.
const MAX_ASPECT_RATIO: usize = 200;

impl VisionConfig {
    /// Height and width, in this order, to which an image of `height` and `width` pixels is resized: whole patches
    /// that become tokens, within the bounds of [`VisionConfig::pixels`], and about the same ratio.
    ///
    /// **Errors**: [`Error::Invalid`] for an empty image, and one that is more than 200 times as long as it is wide.
    pub fn resized(&self, height: usize, width: usize) -> Result<(usize, usize), Error> {
        self.check_pixels()?;
        let (short, long) = (height.min(width), height.max(width));
        if short == 0 || long > MAX_ASPECT_RATIO.saturating_mul(short) {
            let expected = format!("sides of a ratio of at most {MAX_ASPECT_RATIO}");
            return Err(invalid("image", expected, format!("{height} x {width}")));
        }
        let PixelConfig { min_pixels, max_pixels, .. } = self.pixels;
        let unit = self.patch_size * self.merge_size;
        let (exact_height, exact_width) = (height as f64, width as f64);
        let units = |size: f64| size / unit as f64;
        let of_units = |count: f64| count as usize * unit;
        let nearest = |size: f64| of_units(units(size).round_ties_even());
        let size = (nearest(exact_height), nearest(exact_width));
        let pixels = size.0.saturating_mul(size.1);
        Ok(if pixels > max_pixels {
            let shrink = (exact_height * exact_width / max_pixels as f64).sqrt();
            let fitting = |size: f64| of_units(units(size / shrink).floor().max(1.0));
            (fitting(exact_height), fitting(exact_width))
        } else if pixels < min_pixels {
            let grow = (min_pixels as f64 / (exact_height * exact_width)).sqrt();
            let covering = |size: f64| of_units(units(size * grow).ceil());
            (covering(exact_height), covering(exact_width))
        } else {
            size
        })
    }

    /// Resizes an image of interleaved bytes to the size that [`Self::resized`] gives, by a bicubic filter that is
    /// widened where it shrinks the image: with the bits of Pillow's (10 to 12). Returns height, width and bytes.
    ///
    /// **Errors**: those of [`Self::resized`], and [`Error::Invalid`] for a length that is not the size's.
    pub fn resize(
        &self,
        height: usize,
        width: usize,
        pixels: &[u8],
    ) -> Result<(usize, usize, Vec<u8>), Error> {
        let (new_height, new_width) = self.resized(height, width)?;
        let len = height.checked_mul(width).and_then(|area| area.checked_mul(self.channels));
        if len != Some(pixels.len()) {
            let expected = format!("{height} · {width} · {} values", self.channels);
            return Err(invalid("image", expected, pixels.len().to_string()));
        }
        let resized = resize::resize(pixels, (height, width), (new_height, new_width), self.channels);
        Ok((new_height, new_width, resized))
    }

    /// Cuts frames of one size into patches: the frame of an image, or those of a video, of which the last is repeated
    /// until they are a multiple of [`VisionConfig::temporal_patch_size`].
    ///
    /// A frame is `[height, width, channels]`, of a size that [`Self::resized`] gives; values become
    /// `(x/255 − mean) / std` of [`VisionConfig::pixels`]. Patches are ordered by frame, then so that those that become
    /// a token follow each other; the numbers of a patch by channel, frame, row and column.
    ///
    /// **Errors**: [`Error::Invalid`] for no frames, and sizes that do not fit.
    pub fn patches(
        &self,
        height: usize,
        width: usize,
        frames: &[&[u8]],
    ) -> Result<(PatchGrid, Vec<f32>), Error> {
        let &VisionConfig { channels, temporal_patch_size, patch_size, merge_size, .. } = self;
        self.check_pixels()?;
        let unit = patch_size * merge_size;
        if !height.is_multiple_of(unit) || !width.is_multiple_of(unit) {
            let expected = format!("height and width in multiples of {unit}");
            return Err(invalid("frames", expected, format!("{height} x {width}")));
        }
        let Some(len) = height.checked_mul(width).and_then(|pixels| pixels.checked_mul(channels)) else {
            let expected = "a size that fits the address space";
            return Err(invalid("frames", expected, format!("{height} x {width}")));
        };
        if let Some(frame) = frames.iter().find(|frame| frame.len() != len) {
            return Err(invalid("frames", format!("{len} values each"), frame.len().to_string()));
        }
        let Some(last) = frames.last() else {
            return Err(invalid("frames", "at least one", "none"));
        };
        let PixelConfig { mean, std, .. } = &self.pixels;
        let grid = PatchGrid {
            frames: frames.len().div_ceil(temporal_patch_size),
            rows: height / patch_size,
            cols: width / patch_size,
        };
        let mut patches = Vec::with_capacity(grid.patches() * self.patch_len());
        for first in (0..frames.len()).step_by(temporal_patch_size) {
            for (row, col) in grid.places(merge_size) {
                for channel in 0..channels {
                    let of_channel = |numbers: &[f32]| numbers[channel.min(numbers.len() - 1)];
                    let (mean, std) = (of_channel(mean), of_channel(std));
                    for frame in first..first + temporal_patch_size {
                        let frame = frames.get(frame).unwrap_or(last);
                        for y in row * patch_size..(row + 1) * patch_size {
                            let start = y * width + col * patch_size;
                            let value = |x: usize| f32::from(frame[x * channels + channel]);
                            patches
                                .extend((start..start + patch_size).map(|x| (value(x) / 255.0 - mean) / std));
                        }
                    }
                }
            }
        }
        Ok((grid, patches))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(extra: &str) -> VisionConfig {
        let text = format!(
            r#"{{"model_type": "qwen3_vl", "text_config": {{"hidden_size": 3584}}, "vision_config": {{{extra}}}}}"#
        );
        let config = crate::ModelConfig::from_json(&text, std::path::Path::new("config.json"));
        config.unwrap().vision.unwrap()
    }

    #[test]
    fn sizes_of_images() {
        let table = [
            // Multiples of 32 in bounds stay; others go to the nearest one, halves to the even one.
            ((256, 256), (256, 256)),
            ((1024, 768), (1024, 768)),
            ((480, 640), (480, 640)),
            ((1080, 1920), (1088, 1920)),
            ((300, 400), (288, 384)),
            ((272, 304), (256, 320)),
            ((336, 400), (320, 384)),
            // Too small: grown to at least 65536 pixels, sides rounded up.
            ((100, 100), (256, 256)),
            ((10, 1000), (32, 2560)),
            ((1, 200), (32, 3648)),
            ((15, 3000), (32, 3648)),
            // Too large: shrunk to at most 16777216, sides rounded down.
            ((8000, 6000), (4704, 3520)),
            ((5000, 5000), (4096, 4096)),
            ((100, 20000), (96, 20000)),
        ];
        for ((height, width), want) in table {
            assert_eq!(config("").resized(height, width).unwrap(), want, "{height} x {width}");
        }
        for (height, width) in [(0, 5), (1, 201), (40000, 100)] {
            let message = config("").resized(height, width).unwrap_err().to_string();
            let want = "Session: image: expected sides of a ratio of at most 200, got ";
            assert_eq!(message, format!("{want}{height} x {width}"));
        }
    }

    /// Patches of 2 × 2 pixels, two channels, two frames: every number says where it is from.
    #[test]
    fn order_of_patches() {
        let config = config(r#""patch_size": 2, "in_channels": 2"#);
        let (height, width) = (4, 8);
        let frame =
            |frame: usize| -> Vec<u8> { (0..height * width * 2).map(|i| (i + 64 * frame) as u8).collect() };
        let number = |frame: usize, y: usize, x: usize, channel: usize| {
            let value = (64 * frame + (y * width + x) * 2 + channel) as f32;
            (value / 255.0 - 0.5) / 0.5
        };
        let frames = [frame(0), frame(1), frame(2)];
        let frames: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
        let (grid, patches) = config.patches(height, width, &frames).unwrap();
        assert_eq!(grid, PatchGrid { frames: 2, rows: 2, cols: 4 });
        let mut want = Vec::new();
        // The second pair of frames is the third one twice.
        for pair in [[0, 1], [2, 2]] {
            for (row, col) in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)] {
                for channel in 0..2 {
                    for frame in pair {
                        for (y, x) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                            want.push(number(frame, 2 * row + y, 2 * col + x, channel));
                        }
                    }
                }
            }
        }
        assert_eq!(patches, want);
    }

    #[test]
    fn frames_must_fit() {
        let config = config("");
        let message =
            |height, width, frames: &[&[u8]]| config.patches(height, width, frames).unwrap_err().to_string();
        assert_eq!(
            message(48, 32, &[&[]]),
            "Session: frames: expected height and width in multiples of 32, got 48 x 32"
        );
        assert_eq!(message(32, 32, &[&[0; 7]]), "Session: frames: expected 3072 values each, got 7");
        assert_eq!(message(32, 32, &[]), "Session: frames: expected at least one, got none");
    }
    /// Bounds, means and deviations are the configuration's.
    #[test]
    fn pixels_of_the_configuration() {
        let pixels = PixelConfig {
            min_pixels: 32 * 32,
            max_pixels: 64 * 64,
            mean: vec![0.1, 0.2, 0.3],
            std: vec![0.5, 1.0, 2.0],
        };
        let config = VisionConfig { pixels, ..config("") };
        assert_eq!(config.resized(32, 32).unwrap(), (32, 32));
        assert_eq!(config.resized(640, 320).unwrap(), (64, 32));
        let (height, width, image) = config.resize(2, 1, &[51, 102, 204, 51, 102, 204]).unwrap();
        assert_eq!((height, width, image.len()), (64, 32, 64 * 32 * 3));
        let (_, patches) = config.patches(height, width, &[&image]).unwrap();
        for (channel, want) in
            [(0.2 - 0.1) / 0.5, (0.4 - 0.2) / 1.0, (0.8 - 0.3) / 2.0f32].into_iter().enumerate()
        {
            assert!((patches[channel * 512] - want).abs() < 1e-6, "{} {want}", patches[channel * 512]);
        }
        let message = config.resize(2, 1, &[0; 5]).unwrap_err().to_string();
        assert_eq!(message, "Session: image: expected 2 · 1 · 3 values, got 5");
    }
}
