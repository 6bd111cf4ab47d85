//! `--dump-logits`: a file that is there whole or not at all.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};

use crate::output::Failure;

/// A file beside the one that is asked for, which takes its place at the end. It is made at once, so that a folder that
/// cannot be written to is known before a model is loaded.
#[derive(Debug)]
pub struct LogitsFile {
    path: PathBuf,
    beside: PathBuf,
}

impl LogitsFile {
    pub fn create(path: &Path) -> Result<Self, Failure> {
        let name = path.file_name().ok_or_else(|| format!("{}: expected a file's name", path.display()))?;
        // A device or a pipe would be replaced by a file.
        if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
            return Err(format!("cannot write {}: it is no regular file", path.display()).into());
        }
        let mut beside = name.to_owned();
        beside.push(format!(".{}.part", std::process::id()));
        let beside = path.with_file_name(beside);
        File::create(&beside).map_err(|error| cannot_write(path, &error))?;
        Ok(LogitsFile { path: path.into(), beside })
    }

    /// `[tokens, vocab]` as the tensor `logits`.
    pub fn write(self, logits: &[f32], tokens: usize) -> Result<(), Failure> {
        let shape = vec![tokens, logits.len() / tokens.max(1)];
        let view = TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(logits))?;
        safetensors::serialize_to_file(HashMap::from([("logits", view)]), None, &self.beside)
            .map_err(|error| cannot_write(&self.path, &error))?;
        fs::rename(&self.beside, &self.path).map_err(|error| cannot_write(&self.path, &error))?;
        Ok(())
    }
}

impl Drop for LogitsFile {
    fn drop(&mut self) {
        // Not there if it has been renamed.
        let _ = fs::remove_file(&self.beside);
    }
}

fn cannot_write(path: &Path, error: &dyn std::error::Error) -> Failure {
    format!("cannot write {}: {error}", path.display()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_or_not_at_all() -> Result<(), Failure> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("a.safetensors");
        let files = || fs::read_dir(folder.path()).map(Iterator::count);
        fs::write(&path, "old")?;
        drop(LogitsFile::create(&path)?);
        assert_eq!((fs::read(&path)?.as_slice(), files()?), (&b"old"[..], 1));
        LogitsFile::create(&path)?.write(&[1.0, 2.0, 3.0, 4.0], 2)?;
        assert_eq!(files()?, 1);
        let bytes = fs::read(&path)?;
        let tensors = safetensors::SafeTensors::deserialize(&bytes)?;
        assert_eq!(tensors.tensor("logits")?.shape(), [2, 2]);

        for path in [folder.path().join("none/a.safetensors"), folder.path().to_owned(), "/dev/null".into()] {
            let message = LogitsFile::create(&path).err().ok_or("an error")?.to_string();
            assert!(message.starts_with(&format!("cannot write {}: ", path.display())), "{message}");
        }
        Ok(())
    }
}
