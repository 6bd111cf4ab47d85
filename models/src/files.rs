//! The files of a model's folder, none of which is trusted.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use super::ModelError;

/// Opens a regular file. A pipe or a device, which would be waited for or read without an end, is refused before it is
/// opened.
pub(super) fn open_file(path: &Path) -> Result<File, ModelError> {
    let failed = |source| ModelError::io(path, source);
    let check = |metadata: fs::Metadata| {
        if metadata.is_file() { Ok(()) } else { Err(ModelError::NotAFile { path: path.into() }) }
    };
    check(fs::metadata(path).map_err(failed)?)?;
    let file = File::open(path).map_err(failed)?;
    // Another one may have come in its place.
    check(file.metadata().map_err(failed)?)?;
    Ok(file)
}

/// The bytes of a file of a model's folder: a regular file of at most `most` bytes.
///
/// # Errors
/// [`ModelError::Missing`], [`ModelError::NotAFile`], [`ModelError::TooLarge`] and [`ModelError::Unreadable`].
pub fn read_file(path: &Path, most: u64) -> Result<Vec<u8>, ModelError> {
    let mut bytes = Vec::new();
    let file = open_file(path)?;
    file.take(most.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|source| ModelError::io(path, source))?;
    if bytes.len() as u64 > most {
        return Err(ModelError::TooLarge { path: path.into(), most });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regular_files_of_a_bounded_size() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let message = |path: &Path| read_file(path, 4).unwrap_err().to_string();
        assert_eq!(message(&path), format!("{} does not exist", path.display()));
        fs::write(&path, "1234").unwrap();
        assert_eq!(read_file(&path, 4).unwrap(), b"1234");
        fs::write(&path, "12345").unwrap();
        assert_eq!(message(&path), format!("{} is larger than 4 bytes", path.display()));
        assert_eq!(message(dir.path()), format!("{} is not a regular file", dir.path().display()));
    }

    /// None of these ends by itself: devices, and a pipe that nobody writes to.
    #[cfg(unix)]
    #[test]
    fn devices_and_pipes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        for device in ["/dev/zero", "/dev/null"] {
            std::os::unix::fs::symlink(device, &path).unwrap();
            assert!(matches!(read_file(&path, 1 << 20), Err(ModelError::NotAFile { .. })), "{device}");
            fs::remove_file(&path).unwrap();
        }
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        if made.is_ok_and(|status| status.success()) {
            assert!(matches!(read_file(&path, 1 << 20), Err(ModelError::NotAFile { .. })));
            assert!(matches!(crate::Weights::open(dir.path()), Err(ModelError::NoWeights { .. })));
            fs::rename(&path, dir.path().join("model.safetensors")).unwrap();
            assert!(matches!(crate::Weights::open(dir.path()), Err(ModelError::NotAFile { .. })));
        }
    }
}
