//! A repository's files from the hub into its cache: feature `hub`.
//!
//! A snapshot is made beside the cache's own, file by file, each under another name until it is whole, and becomes one
//! of the cache's by a rename when all files are there: so what [`cached_repo`](super::cached_repo) finds is complete,
//! whenever a download ends, and what is there already is not asked for again. Files lie in the snapshot itself, as the
//! hub's own client has them where a system knows no links.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use ureq::tls::{RootCerts, TlsConfig};

use super::{cache, checked, find, is_part, not_cached, variable};
use crate::ModelError;

/// Most bytes of the hub's description of a repository.
const MAX_DESCRIPTION_BYTES: u64 = 16 << 20;

/// Bytes that are written at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// How long the hub may take to be reached, and to begin its answer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Where repositories are asked for, and kept.
struct Hub {
    endpoint: String,
    cache: PathBuf,
    token: Option<String>,
}

#[derive(Deserialize)]
struct Description {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
}

/// A file that is on its way: what whoever waits is told.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DownloadProgress<'a> {
    /// Its name.
    pub file: &'a str,
    /// Bytes of it that are there.
    pub done_bytes: u64,
    /// Bytes of all of it, as the hub says.
    pub total_bytes: u64,
}

/// The folder with a repository's files, which are downloaded into the hub's cache where it lacks them; names and cache
/// are those of [`cached_repo`](super::cached_repo). `progress` is told of each file at its beginning, and of each
/// megabyte.
///
/// What models and tokenizers are read from is downloaded, and nothing else: of the files that are in no folder of the
/// repository, `model*.safetensors`, and those that end in `.json`, `.jinja`, `.txt` and `.model`. A file whose size is
/// not what the hub said is an error; what was whole before an error is not downloaded again.
///
/// `HF_ENDPOINT` names another hub than <https://huggingface.co>, and `HF_TOKEN` is what the hub knows the user by,
/// sent to no other host. `HF_HUB_OFFLINE` forbids it all, unless it is `0`. Certificates are the system's.
///
/// # Errors
/// [`ModelError::NotCached`] for what is no name of a repository or a revision, and where nothing may be downloaded;
/// [`ModelError::NotDownloaded`] with what the hub or the network said, also of a repository that is not there or not
/// for this user, or has no safetensors; [`ModelError::Unwritten`] for what the cache does not take.
pub fn download_repo(
    id: &str,
    revision: Option<&str>,
    progress: &mut dyn FnMut(DownloadProgress<'_>),
) -> Result<PathBuf, ModelError> {
    let revision = revision.unwrap_or("main");
    let (cache, text) = (cache(id)?, |name| variable(name)?.into_string().ok());
    match find(&cache, id, revision) {
        Err(ModelError::NotCached { .. }) => {}
        found => return found,
    }
    if text("HF_HUB_OFFLINE").is_some_and(|value| value != "0") {
        return Err(not_cached(id, "HF_HUB_OFFLINE forbids to download it"));
    }
    let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
    Hub { endpoint, cache, token: text("HF_TOKEN") }.download(id, revision, progress)
}

/// Whether a model or its tokenizer is read from a file of this name.
fn is_wanted(name: &str) -> bool {
    let is_weights = name.starts_with("model") && name.ends_with(".safetensors");
    is_part(name)
        && (is_weights || [".json", ".jinja", ".txt", ".model"].iter().any(|end| name.ends_with(end)))
}

fn unwritten(path: &Path) -> impl Fn(std::io::Error) -> ModelError {
    move |error| ModelError::Unwritten { path: path.into(), reason: error.to_string() }
}

impl Hub {
    fn download(
        &self,
        id: &str,
        revision: &str,
        progress: &mut dyn FnMut(DownloadProgress<'_>),
    ) -> Result<PathBuf, ModelError> {
        checked(id, revision)?;
        let failed = |reason: String| ModelError::NotDownloaded { id: id.into(), reason };
        let endpoint = self.endpoint.trim_end_matches('/');
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::PlatformVerifier)
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build();
        let agent = ureq::Agent::config_builder()
            .tls_config(tls)
            .timeout_connect(Some(TIMEOUT))
            .timeout_recv_response(Some(TIMEOUT))
            .user_agent(concat!("warpforge/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        let get = |url: &str| {
            let mut request = agent.get(url);
            if let Some(token) = &self.token {
                // Not sent on where the hub redirects to another host.
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            let response = request.call().map_err(|error| failed(format!("{url}: {error}")))?;
            Ok::<_, ModelError>(response.into_body())
        };
        let url = format!("{endpoint}/api/models/{id}/revision/{}?blobs=true", revision.replace('/', "%2F"));
        let text = get(&url)?.with_config().limit(MAX_DESCRIPTION_BYTES).read_to_vec();
        let text = text.map_err(|error| failed(format!("{url}: {error}")))?;
        let Description { sha, siblings } =
            serde_json::from_slice(&text).map_err(|error| failed(format!("{url}: {error}")))?;
        if sha.is_empty() || !sha.chars().all(|c| c.is_ascii_hexdigit()) {
            return Err(failed(format!("{url}: {sha:?} is no name of a commit")));
        }
        let wanted: Vec<Sibling> = siblings.into_iter().filter(|file| is_wanted(&file.rfilename)).collect();
        if !wanted.iter().any(|file| file.rfilename.ends_with(".safetensors")) {
            return Err(failed(format!("{url}: it has no file model*.safetensors")));
        }

        let repository = self.cache.join(format!("models--{}", id.replace('/', "--")));
        let incoming = repository.join(format!("incoming-{sha}"));
        fs::create_dir_all(&incoming).map_err(unwritten(&incoming))?;
        for file in &wanted {
            let name = file.rfilename.as_str();
            let url = format!("{endpoint}/{id}/resolve/{sha}/{name}");
            let total_bytes =
                file.size.ok_or_else(|| failed(format!("{url}: the hub does not say its size")))?;
            let mut tell = |done_bytes| progress(DownloadProgress { file: name, done_bytes, total_bytes });
            let path = incoming.join(name);
            if fs::metadata(&path).is_ok_and(|metadata| metadata.is_file() && metadata.len() == total_bytes) {
                tell(total_bytes);
                continue;
            }
            tell(0);
            // Another process may be at the same file.
            let part = incoming.join(format!(".{name}.{}", std::process::id()));
            let written = copy(get(&url)?.into_reader(), &part, total_bytes, &mut tell);
            let written = written.map_err(|error| match error {
                Failure::Read(reason) => failed(format!("{url}: {reason}")),
                Failure::Write(error) => unwritten(&part)(error),
            });
            if written.is_err() {
                // Where it stays nobody is there to be told, and nobody reads it.
                let _ = fs::remove_file(&part);
            }
            written?;
            fs::rename(&part, &path).map_err(unwritten(&path))?;
        }

        let snapshots = repository.join("snapshots");
        let snapshot = snapshots.join(&sha);
        fs::create_dir_all(&snapshots).map_err(unwritten(&snapshots))?;
        if let Err(error) = fs::rename(&incoming, &snapshot)
            // Another process may have been first.
            && !wanted.iter().all(|file| snapshot.join(&file.rfilename).is_file())
        {
            return Err(unwritten(&snapshot)(error));
        }
        if revision != sha {
            let reference = repository.join("refs").join(revision);
            let folder = reference.parent().unwrap_or(&repository);
            fs::create_dir_all(folder).map_err(unwritten(folder))?;
            fs::write(&reference, &sha).map_err(unwritten(&reference))?;
        }
        find(&self.cache, id, revision)
    }
}

enum Failure {
    Read(String),
    Write(std::io::Error),
}

/// Writes exactly so many bytes to a new file.
fn copy(mut from: impl Read, to: &Path, bytes: u64, tell: &mut dyn FnMut(u64)) -> Result<(), Failure> {
    let mut file = File::create(to).map_err(Failure::Write)?;
    let (mut chunk, mut done) = (vec![0; CHUNK_BYTES], 0u64);
    loop {
        let count = from.read(&mut chunk).map_err(|error| Failure::Read(error.to_string()))?;
        if count == 0 {
            break;
        }
        let before = done;
        done += count as u64;
        if done > bytes {
            return Err(Failure::Read(format!("expected {bytes} bytes, got more")));
        }
        file.write_all(&chunk[..count]).map_err(Failure::Write)?;
        if done / CHUNK_BYTES as u64 > before / CHUNK_BYTES as u64 {
            tell(done);
        }
    }
    if done < bytes {
        return Err(Failure::Read(format!("expected {bytes} bytes, got {done}")));
    }
    file.sync_all().map_err(Failure::Write)
}

#[cfg(test)]
mod tests;
