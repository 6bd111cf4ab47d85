//! Against a small hub of HTTP on this machine.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;

use super::*;

const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

/// Answers by path: a status, and the body; asked for, by path with what the user is known by.
#[derive(Default)]
struct Answers {
    files: Mutex<BTreeMap<String, (u16, Vec<u8>)>>,
    asked: Mutex<Vec<(String, Option<String>)>>,
}

/// A hub that answers as long as the process is there; its address.
fn serve(answers: &Arc<Answers>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let answers = answers.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            answer(&answers, stream.unwrap());
        }
    });
    address
}

fn answer(answers: &Answers, mut stream: TcpStream) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let of = |name: &str| {
        let (_, value) = headers
            .iter()
            .filter_map(|line| line.split_once(": "))
            .find(|(key, _)| key.eq_ignore_ascii_case(name))?;
        Some(value.to_owned())
    };
    answers.asked.lock().unwrap().push((path.clone(), of("authorization")));
    let found = answers.files.lock().unwrap().get(&path).cloned();
    let (status, body) = found.unwrap_or((404, b"no such thing".to_vec()));
    let mut head = format!("HTTP/1.1 {status} X\r\nConnection: close\r\n");
    match status {
        // The body is where.
        302 => head += &format!("Location: {}\r\nContent-Length: 0\r\n\r\n", String::from_utf8_lossy(&body)),
        _ => head += &format!("Content-Length: {}\r\n\r\n", body.len()),
    }
    let body = if status == 302 { Vec::new() } else { body };
    // Who does not wait for the end has hung up.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
}

/// A hub with a repository of these files, and a cache.
fn hub(files: &[(&str, &str)]) -> (Arc<Answers>, Hub, tempfile::TempDir) {
    let (answers, cache) = (Arc::new(Answers::default()), tempfile::tempdir().unwrap());
    describe(&answers, files, 0);
    for (name, text) in files {
        set(&answers, &format!("/org/name/resolve/{SHA}/{name}"), 200, text);
    }
    let endpoint = serve(&answers);
    (answers, Hub { endpoint, cache: cache.path().into(), token: None }, cache)
}

fn set(answers: &Answers, path: &str, status: u16, body: &str) {
    answers.files.lock().unwrap().insert(path.into(), (status, body.into()));
}

/// With sizes that are off by so many bytes.
fn describe(answers: &Answers, files: &[(&str, &str)], off: usize) {
    let siblings: Vec<_> = files
        .iter()
        .map(|(name, text)| serde_json::json!({"rfilename": name, "size": text.len() + off}))
        .collect();
    let text = serde_json::json!({"sha": SHA, "siblings": siblings}).to_string();
    for revision in ["main", "refs%2Fpr%2F1"] {
        set(answers, &format!("/api/models/org/name/revision/{revision}?blobs=true"), 200, &text);
    }
}

fn asked(answers: &Answers) -> usize {
    answers.asked.lock().unwrap().len()
}

const FILES: &[(&str, &str)] = &[
    ("config.json", "{}"),
    ("model-00001-of-00001.safetensors", "weights"),
    ("model.safetensors.index.json", "{\"index\": 1}"),
    ("tokenizer.json", "[]"),
    ("chat_template.jinja", ""),
    ("pytorch_model.bin", "pickles"),
    ("consolidated.safetensors", "the same again"),
    ("onnx/model.safetensors", "another form"),
    ("../evil.json", "out of the cache"),
    (".hidden.json", "a part"),
    ("README.md", "text"),
];

#[test]
fn what_models_are_read_from_lands_in_the_cache() {
    let (answers, hub, cache) = hub(FILES);
    let mut told = Vec::new();
    let folder = hub.download("org/name", "main", &mut |progress| {
        told.push((progress.file.to_owned(), progress.done_bytes, progress.total_bytes));
    });
    let folder = folder.unwrap();
    assert_eq!(folder, cache.path().join("models--org--name/snapshots").join(SHA));
    assert_eq!(find(cache.path(), "org/name", "main").unwrap(), folder);
    let mut names: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(
        names,
        [
            "chat_template.jinja",
            "config.json",
            "model-00001-of-00001.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json"
        ]
    );
    for name in &names {
        let expected = FILES.iter().find(|(other, _)| other == name).unwrap().1;
        assert_eq!(fs::read_to_string(folder.join(name)).unwrap(), expected);
    }
    assert_eq!(told[0], ("config.json".to_owned(), 0, 2));
    assert_eq!(asked(&answers), 6);
    // By another revision of the same commit, whose files are there.
    let again = hub.download("org/name", "refs/pr/1", &mut |_| {}).unwrap();
    assert_eq!(again, folder);
    assert_eq!(find(cache.path(), "org/name", "refs/pr/1").unwrap(), folder);
}

/// A file that is missing is an error, and until all are there the cache has nothing; what was whole is not asked for
/// again.
#[test]
fn a_download_that_breaks_off_goes_on() {
    let (answers, hub, cache) = hub(FILES);
    let path = format!("/org/name/resolve/{SHA}/tokenizer.json");
    set(&answers, &path, 503, "later");
    let message = hub.download("org/name", "main", &mut |_| {}).unwrap_err().to_string();
    assert!(
        message.contains("org/name") && message.contains("tokenizer.json") && message.contains("503"),
        "{message}"
    );
    assert!(matches!(find(cache.path(), "org/name", "main"), Err(ModelError::NotCached { .. })));
    set(&answers, &path, 200, "[]");
    let before = asked(&answers);
    hub.download("org/name", "main", &mut |_| {}).unwrap();
    // The description, and those behind the one that broke off.
    let after: Vec<String> =
        answers.asked.lock().unwrap()[before..].iter().map(|(path, _)| path.clone()).collect();
    assert!(after.contains(&path) && !after.iter().any(|path| path.ends_with("/config.json")), "{after:?}");
    let left = fs::read_dir(cache.path().join("models--org--name")).unwrap();
    let mut left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["refs", "snapshots"]);
}

#[test]
fn sizes_are_what_the_hub_said() {
    for (off, expected) in [(1, "expected 3 bytes, got 2"), (usize::MAX, "expected 1 bytes, got more")] {
        let (answers, hub, cache) = hub(FILES);
        let files = [("config.json", "{}"), ("model.safetensors", "weights")];
        match off {
            1 => describe(&answers, &files, 1),
            _ => set(
                &answers,
                "/api/models/org/name/revision/main?blobs=true",
                200,
                &format!(
                    r#"{{"sha":"{SHA}","siblings":[{{"rfilename":"config.json","size":1}},{{"rfilename":"model.safetensors","size":7}}]}}"#
                ),
            ),
        }
        let error = hub.download("org/name", "main", &mut |_| {}).unwrap_err();
        assert!(matches!(error, ModelError::NotDownloaded { .. }), "{error:?}");
        assert!(error.to_string().contains(expected), "{error}");
        let incoming = cache.path().join(format!("models--org--name/incoming-{SHA}"));
        assert_eq!(fs::read_dir(incoming).unwrap().count(), 0, "no part stays");
    }
}

#[test]
fn what_is_refused_says_why() {
    let (answers, hub, _cache) = hub(&FILES[..1]);
    let message = |id: &str, revision: &str| hub.download(id, revision, &mut |_| {}).unwrap_err().to_string();
    assert!(message("org/name", "main").contains("no file model*.safetensors"));
    assert!(message("org/name", "v2").contains("404"));
    let before = asked(&answers);
    assert!(message("../x", "main").contains("a repository is named org/name"));
    assert!(message("org/name", "../x").contains("is no name of a branch"));
    assert_eq!(asked(&answers), before, "names are looked at before anybody is asked");
    for (body, expected) in [
        ("{", "EOF"),
        (r#"{"sha": "../..", "siblings": []}"#, "is no name of a commit"),
        (r#"{"sha": "ab", "siblings": [{"rfilename": "model.safetensors"}]}"#, "does not say its size"),
    ] {
        set(&answers, "/api/models/org/name/revision/main?blobs=true", 200, body);
        let message = message("org/name", "main");
        assert!(message.contains(expected), "{message}");
    }
    // Nobody answers there; and who answers does not speak TLS.
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for endpoint in [format!("http://{closed}/"), hub.endpoint.replace("http:", "https:")] {
        let hub = Hub { endpoint, cache: hub.cache.clone(), token: None };
        let error = hub.download("org/name", "main", &mut |_| {}).unwrap_err();
        assert!(matches!(error, ModelError::NotDownloaded { .. }), "{error:?}");
    }
}

/// The hub redirects to where the files are; what it knows the user by is not for others.
#[test]
fn the_token_stays_with_the_hub() {
    let (answers, mut hub, _cache) = hub(FILES);
    let elsewhere = Arc::new(Answers::default());
    let address = serve(&elsewhere).replace("127.0.0.1", "localhost");
    set(&elsewhere, "/blob", 200, "weights");
    let path = format!("/org/name/resolve/{SHA}/model-00001-of-00001.safetensors");
    set(&answers, &path, 302, &format!("{address}/blob"));
    hub.token = Some("secret".into());
    hub.download("org/name", "main", &mut |_| {}).unwrap();
    let asked = answers.asked.lock().unwrap();
    assert!(asked.iter().all(|(_, token)| token.as_deref() == Some("Bearer secret")), "{asked:?}");
    assert_eq!(*elsewhere.asked.lock().unwrap(), [("/blob".to_owned(), None)]);
}
