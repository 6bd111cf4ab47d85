//! What the Hugging Face hub's own client has downloaded, found by a repository's name. Nothing is fetched, but with
//! the feature `hub` by [`download_repo`].

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::ModelError;
use super::files::read_file;

#[cfg(feature = "hub")]
mod download;
#[cfg(feature = "hub")]
pub use download::{DownloadProgress, download_repo};

/// A commit's name, and some room.
const MAX_REF_BYTES: u64 = 256;

/// The folder with a repository's files in the hub's cache: `models--org--name/snapshots/<commit>`. `id` is `org/name`
/// or `name`, `revision` a branch, a tag or a commit's whole name, `main` if none.
///
/// The cache is the folder that `HF_HUB_CACHE` names, else `hub` in that of `HF_HOME`, else `huggingface/hub` in that
/// of `XDG_CACHE_HOME`, else `~/.cache/huggingface/hub`.
///
/// # Errors [`ModelError::NotCached`] for what is no name of a repository or a revision, and where the revision has not
/// been downloaded; [`ModelError::Unreadable`].
pub fn cached_repo(id: &str, revision: Option<&str>) -> Result<PathBuf, ModelError> {
    find(&cache(id)?, id, revision.unwrap_or("main"))
}

/// The hub's cache, in which a repository is looked for.
fn cache(id: &str) -> Result<PathBuf, ModelError> {
    let cache = cache_folder(|name| variable(name).map(PathBuf::from));
    cache.ok_or_else(|| not_cached(id, "there is no home directory to look for a cache in"))
}

/// A variable of the environment that says something.
fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn not_cached(id: &str, reason: impl Into<String>) -> ModelError {
    ModelError::NotCached { id: id.into(), reason: reason.into() }
}

fn cache_folder(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    variable("HF_HUB_CACHE")
        .or_else(|| Some(variable("HF_HOME")?.join("hub")))
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("huggingface/hub")))
        .or_else(|| Some(variable("HOME")?.join(".cache/huggingface/hub")))
}

/// Whether a part of a name can lead nowhere else.
fn is_part(part: &str) -> bool {
    !part.is_empty()
        && !part.starts_with(['.', '-'])
        && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
}

/// Checks the names of a repository and a revision, neither of which may lead out of the cache.
fn checked(id: &str, revision: &str) -> Result<(), ModelError> {
    let parts: Vec<&str> = id.split('/').collect();
    if parts.len() > 2 || !parts.iter().all(|part| is_part(part) && !part.contains("--")) {
        return Err(not_cached(id, "a repository is named org/name, or name"));
    }
    if !revision.split('/').all(is_part) {
        return Err(not_cached(id, format!("{revision:?} is no name of a branch, a tag or a commit")));
    }
    Ok(())
}

fn find(cache: &Path, id: &str, revision: &str) -> Result<PathBuf, ModelError> {
    checked(id, revision)?;
    let repository = cache.join(format!("models--{}", id.replace('/', "--")));
    let commit = match read_file(&repository.join("refs").join(revision), MAX_REF_BYTES) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).trim().to_owned(),
        // A commit has no file there.
        Err(ModelError::Missing { .. } | ModelError::NotAFile { .. }) => revision.to_owned(),
        Err(error) => return Err(error),
    };
    if commit.is_empty() || !commit.chars().all(|c| c.is_ascii_hexdigit()) {
        let reason = format!("{} has not been downloaded, or not {revision}", repository.display());
        return Err(not_cached(id, reason));
    }
    let folder = repository.join("snapshots").join(commit);
    match folder.is_dir() {
        true => Ok(folder),
        false => Err(not_cached(id, format!("{} is not there", folder.display()))),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_cache_is_where_the_client_has_it() {
        let folder = |set: &[&str]| {
            cache_folder(|name| set.contains(&name).then(|| PathBuf::from(format!("/{name}"))))
                .map(|path| path.display().to_string())
        };
        assert_eq!(
            folder(&["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"]).as_deref(),
            Some("/HF_HUB_CACHE")
        );
        assert_eq!(folder(&["HF_HOME", "XDG_CACHE_HOME", "HOME"]).as_deref(), Some("/HF_HOME/hub"));
        assert_eq!(folder(&["XDG_CACHE_HOME", "HOME"]).as_deref(), Some("/XDG_CACHE_HOME/huggingface/hub"));
        assert_eq!(folder(&["HOME"]).as_deref(), Some("/HOME/.cache/huggingface/hub"));
        assert_eq!(folder(&[]), None);
    }

    #[test]
    fn a_revision_is_a_reference_or_a_commit() {
        let cache = tempfile::tempdir().unwrap();
        let repository = cache.path().join("models--Qwen--Qwen3-0.6B");
        let (main, other) = ("c1899de289a04d12100db370d81485cdf75e47ca", "0123456789abcdef");
        for commit in [main, other] {
            fs::create_dir_all(repository.join("snapshots").join(commit)).unwrap();
        }
        fs::create_dir_all(repository.join("refs/refs/pr")).unwrap();
        fs::write(repository.join("refs/main"), main).unwrap();
        fs::write(repository.join("refs/refs/pr/1"), format!("{other}\n")).unwrap();
        fs::write(repository.join("refs/gone"), "ffff").unwrap();
        fs::write(repository.join("refs/evil"), "../../..").unwrap();
        let found = |id, revision| find(cache.path(), id, revision);
        let id = "Qwen/Qwen3-0.6B";
        for (revision, commit) in [("main", main), ("refs/pr/1", other), (other, other)] {
            assert_eq!(found(id, revision).unwrap(), repository.join("snapshots").join(commit), "{revision}");
        }
        for (id, revision, expected) in [
            (id, "v2", "or not v2"),
            (id, "gone", "snapshots/ffff is not there"),
            (id, "abc123", "snapshots/abc123 is not there"),
            (id, "evil", "or not evil"),
            (id, "../main", "is no name of a branch"),
            (id, "", "is no name of a branch"),
            ("gpt2", "main", "has not been downloaded"),
            ("../x", "main", "a repository is named org/name"),
            ("a/b/c", "main", "a repository is named org/name"),
            ("a--b", "main", "a repository is named org/name"),
            ("", "main", "a repository is named org/name"),
        ] {
            let message = found(id, revision).unwrap_err().to_string();
            assert!(message.contains(expected), "{id} {revision}: {message}");
        }
    }
}
