//! From an image's file to RGB bytes, as the model's own processor has them.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageReader};
use warpforge::models::VisionConfig;

use crate::output::Failure;

/// Most pixels of a file, as Pillow has it: a header of a few bytes can claim any number.
const MAX_PIXELS: u64 = 178_956_970;
/// Most bytes of a decoded file.
const MAX_BYTES: u64 = 1 << 30;

/// An image, `[height, width, 3]`.
pub struct Rgb {
    pub height: usize,
    pub width: usize,
    pub bytes: Vec<u8>,
}

/// Reads a PNG or JPEG file and turns it upright. What is transparent in it is laid on white; of 16 bits the upper 8
/// are taken.
///
/// What its header says is checked before anything is decoded: the size, the ratio of the sides, and the memory.
pub fn read(config: &VisionConfig, path: &Path) -> Result<Rgb, Failure> {
    let file = open(path)?;
    let named = |error: &dyn std::fmt::Display| -> Failure { format!("{}: {error}", path.display()).into() };
    let reader = ImageReader::new(BufReader::new(file)).with_guessed_format().map_err(|e| named(&e))?;
    decode(config, reader.into_decoder().map_err(|e| named(&e))?).map_err(|e| named(&e))
}

/// A regular file: a pipe or a device would hang, or never end.
pub fn open(path: &Path) -> Result<File, Failure> {
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => format!("{} does not exist", path.display()),
        _ => format!("cannot read {}: {error}", path.display()),
    };
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(format!("{}: expected a regular file, got something else", path.display()).into());
    }
    Ok(File::open(path).map_err(failed)?)
}

fn decode(config: &VisionConfig, mut decoder: impl ImageDecoder) -> Result<Rgb, Failure> {
    let (width, height) = decoder.dimensions();
    let (pixels, bytes) = (u64::from(width) * u64::from(height), decoder.total_bytes());
    if pixels > MAX_PIXELS || bytes > MAX_BYTES {
        return Err(format!(
            "its header says {width} x {height} pixels and {bytes} bytes: expected at most {MAX_PIXELS} and {MAX_BYTES}"
        )
        .into());
    }
    config.resized(height as usize, width as usize)?;
    let mut limits = image::Limits::no_limits();
    limits.max_alloc = Some(2 * MAX_BYTES);
    decoder.set_limits(limits)?;
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let mut image = DynamicImage::from_decoder(decoder)?;
    image.apply_orientation(orientation);
    Ok(on_white(image))
}

/// An image without transparency.
fn on_white(image: DynamicImage) -> Rgb {
    let (height, width) = (image.height() as usize, image.width() as usize);
    let upper = |value: &u16| (value >> 8) as u8;
    let bytes = match image {
        DynamicImage::ImageRgb8(image) => image.into_raw(),
        DynamicImage::ImageLuma8(image) => image.iter().flat_map(|&v| [v; 3]).collect(),
        DynamicImage::ImageLumaA8(image) => {
            image.chunks_exact(2).flat_map(|p| [blend(p[0], p[1]); 3]).collect()
        }
        DynamicImage::ImageRgba8(image) => image.chunks_exact(4).flat_map(blended).collect(),
        DynamicImage::ImageRgb16(image) => image.iter().map(upper).collect(),
        DynamicImage::ImageLuma16(image) => image.iter().flat_map(|v| [upper(v); 3]).collect(),
        DynamicImage::ImageLumaA16(image) => {
            image.chunks_exact(2).flat_map(|p| [blend(upper(&p[0]), upper(&p[1])); 3]).collect()
        }
        DynamicImage::ImageRgba16(image) => {
            image.chunks_exact(4).flat_map(|p| blended(&[0, 1, 2, 3].map(|i| upper(&p[i])))).collect()
        }
        other => other.to_rgba8().chunks_exact(4).flat_map(blended).collect(),
    };
    Rgb { height, width, bytes }
}

fn blended(pixel: &[u8]) -> [u8; 3] {
    [0, 1, 2].map(|channel| blend(pixel[channel], pixel[3]))
}

/// A value over white, rounded to the nearest as Pillow's `paste` does.
fn blend(value: u8, alpha: u8) -> u8 {
    let sum = u32::from(value) * u32::from(alpha) + 255 * u32::from(255 - alpha) + 128;
    (((sum >> 8) + sum) >> 8) as u8
}

#[cfg(test)]
mod tests {
    use image::codecs::jpeg::JpegEncoder;
    use warpforge::models::ModelConfig;

    use super::*;

    fn config() -> Result<VisionConfig, Failure> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/qwen3_vl");
        Ok(ModelConfig::from_dir(&folder)?.vision.ok_or("no tower")?)
    }

    /// An image in the bytes of a file.
    fn read_bytes(config: &VisionConfig, bytes: &[u8]) -> Result<Rgb, Failure> {
        let reader = ImageReader::new(std::io::Cursor::new(bytes)).with_guessed_format()?;
        decode(config, reader.into_decoder()?)
    }

    /// A PNG with these bits and this kind of colour; `extra` chunks, and rows each with its filter in front.
    fn png(size: (u32, u32), depth: u8, color: u8, extra: &[(&[u8; 4], &[u8])], rows: &[u8]) -> Vec<u8> {
        let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
        let mut chunk = |kind: &[u8; 4], data: &[u8]| {
            file.extend((data.len() as u32).to_be_bytes());
            file.extend(kind);
            file.extend(data);
            file.extend(crc(&[&kind[..], data].concat()).to_be_bytes());
        };
        let sizes = [size.0.to_be_bytes(), size.1.to_be_bytes()].concat();
        chunk(b"IHDR", &[&sizes[..], &[depth, color, 0, 0, 0]].concat());
        extra.iter().for_each(|(kind, data)| chunk(kind, data));
        chunk(b"IDAT", &stored(rows));
        chunk(b"IEND", &[]);
        file
    }

    /// Bytes as zlib has them, not compressed.
    fn stored(bytes: &[u8]) -> Vec<u8> {
        let len = bytes.len() as u16;
        let (mut a, mut b) = (1u32, 0u32);
        for &byte in bytes {
            a = (a + u32::from(byte)) % 65521;
            b = (b + a) % 65521;
        }
        let sum = (b << 16 | a).to_be_bytes();
        [&[0x78, 1, 1][..], &len.to_le_bytes(), &(!len).to_le_bytes(), bytes, &sum].concat()
    }

    fn crc(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0u32, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |crc, _| crc >> 1 ^ (0xedb8_8320 * (crc & 1)))
        })
    }

    /// Colours of two pixels, by kind; what Pillow 13.0.0 has for them after `paste` on white with their alpha as the
    /// mask, or, of what is opaque, after `convert("RGB")`.
    #[test]
    fn transparency_is_white() -> Result<(), Failure> {
        let config = config()?;
        let of = |depth, color, extra: &[(&[u8; 4], &[u8])], row: &[u8]| -> Result<Vec<u8>, Failure> {
            let file = png((2, 1), depth, color, extra, &[&[0], row].concat());
            Ok(read_bytes(&config, &file)?.bytes)
        };
        let palette: &[u8] = &[10, 20, 30, 40, 50, 60];
        assert_eq!(of(8, 6, &[], &[10, 20, 30, 0, 10, 20, 30, 128])?, [255, 255, 255, 132, 137, 142]);
        assert_eq!(of(8, 6, &[], &[10, 20, 30, 255, 1, 2, 3, 1])?, [10, 20, 30, 254, 254, 254]);
        assert_eq!(of(8, 4, &[], &[10, 0, 10, 128])?, [255, 255, 255, 132, 132, 132]);
        assert_eq!(of(8, 3, &[(b"PLTE", palette), (b"tRNS", &[0])], &[0, 1])?, [255, 255, 255, 40, 50, 60]);
        assert_eq!(
            of(8, 3, &[(b"PLTE", palette), (b"tRNS", &[128, 64])], &[0, 1])?,
            [132, 137, 142, 201, 204, 206]
        );
        assert_eq!(of(8, 3, &[(b"PLTE", palette)], &[0, 1])?, palette);
        let key: &[u8] = &[0, 1, 0, 2, 0, 3];
        assert_eq!(of(8, 2, &[(b"tRNS", key)], &[1, 2, 3, 4, 5, 6])?, [255, 255, 255, 4, 5, 6]);
        assert_eq!(of(8, 0, &[(b"tRNS", &[0, 1])], &[1, 2])?, [255, 255, 255, 2, 2, 2]);
        assert_eq!(of(8, 0, &[], &[1, 2])?, [1, 1, 1, 2, 2, 2]);
        // 16 bits: the upper ones.
        let sixteen = [0x12, 0xff, 0, 0x80, 0, 0x7f, 0xff, 0xff, 0xff, 0, 0x12, 0x80];
        assert_eq!(of(16, 2, &[], &sixteen)?, [18, 0, 0, 255, 255, 18]);
        assert_eq!(of(16, 0, &[], &[0x12, 0xff, 0, 0x80])?, [18, 18, 18, 0, 0, 0]);
        let sixteen = [0x12, 0xff, 0, 0x80, 0, 0x7f, 0xff, 0xff, 0xff, 0, 0x12, 0x80, 0, 0, 0, 0];
        assert_eq!(of(16, 6, &[], &sixteen)?, [18, 0, 0, 255, 255, 255]);
        Ok(())
    }

    /// Small files whose headers claim what no machine has: refused by what they claim.
    #[test]
    fn headers_are_not_trusted() -> Result<(), Failure> {
        let config = config()?;
        let message = |bytes: &[u8]| read_bytes(&config, bytes).err().map(|error| error.to_string());
        let claims = |size| png(size, 16, 6, &[], &[0; 500]);
        assert_eq!(claims((65535, 65535)).len(), 568);
        let bound = "expected at most 178956970 and 1073741824";
        let large = "its header says 65535 x 65535 pixels and 34358689800 bytes: ";
        assert_eq!(message(&claims((65535, 65535))), Some(format!("{large}{bound}")));
        let thin = "Session: image: expected sides of a ratio of at most 200, got 1 x 65535";
        assert_eq!(message(&claims((65535, 1))).as_deref(), Some(thin));
        // Few enough pixels, too many bytes.
        let deep = "its header says 13000 x 13000 pixels and 1352000000 bytes: ";
        assert_eq!(message(&claims((13000, 13000))), Some(format!("{deep}{bound}")));

        let mut jpeg = Vec::new();
        JpegEncoder::new(&mut jpeg).encode(&[7; 3 * 64], 8, 8, image::ExtendedColorType::Rgb8)?;
        assert!(message(&jpeg).is_none());
        let frame = jpeg.windows(2).position(|bytes| bytes == [0xff, 0xc0]).ok_or("a frame")?;
        jpeg[frame + 5..frame + 9].copy_from_slice(&[0xff, 0xdc, 0xff, 0xdc]);
        assert!(jpeg.len() < 1150, "{}", jpeg.len());
        let large = "its header says 65500 x 65500 pixels and 12870750000 bytes: ";
        assert_eq!(message(&jpeg), Some(format!("{large}{bound}")));
        Ok(())
    }

    #[test]
    fn files_that_are_none() -> Result<(), Failure> {
        let (config, folder) = (config()?, tempfile::tempdir()?);
        let message =
            |path: &Path| read(&config, path).err().map(|error| error.to_string()).unwrap_or_default();
        let missing = folder.path().join("none.png");
        assert_eq!(message(&missing), format!("{} does not exist", missing.display()));
        for path in [folder.path(), Path::new("/dev/zero")] {
            let want = format!("{}: expected a regular file, got something else", path.display());
            assert_eq!(message(path), want);
        }
        let path = folder.path().join("text.png");
        std::fs::write(&path, "no image")?;
        assert!(message(&path).starts_with(&format!("{}: ", path.display())), "{}", message(&path));
        Ok(())
    }
}
