//! Properties of the parser of stdio strings, for arbitrary input.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::uri::Target;
use super::{Request, StdioConfig};

/// Stdin, stdout and stderr, a line each.
pub fn stdio(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.splitn(3, '\n');
    let mut line = || lines.next().unwrap_or_default();
    let (stdin, stdout, stderr) = (line(), line(), line());
    let parse = |stdin: &str, stdout: &str, stderr: &str| {
        StdioConfig::parse(&Request {
            id: "c1",
            namespace: "default",
            stdin,
            stdout,
            stderr,
            terminal: false,
        })
    };
    let Ok(config) = parse(stdin, stdout, stderr) else {
        return;
    };
    assert_eq!(config.stdin.is_none(), stdin.is_empty());
    if let Target::Fifos {
        stdout: out,
        stderr: err,
    } = &config.target
    {
        assert_eq!(
            (out.is_none(), err.is_none()),
            (stdout.is_empty(), stderr.is_empty())
        );
    }
    if let Target::Binary(binary) = &config.target {
        assert!(binary.args.len() % 2 == 0, "a value for each key");
        let keys: Vec<_> = binary.args.iter().step_by(2).collect();
        assert!(
            (1..keys.len()).all(|at| !keys[..at].contains(&keys[at])),
            "a key twice"
        );
    }
    let stdin = config.stdin.as_deref().map_or(String::new(), fifo);
    let (stdout, stderr) = written(&config.target);
    let again = parse(&stdin, &stdout, &stderr);
    assert_eq!(again.ok(), Some(config), "{stdin:?} {stdout:?} {stderr:?}");
}

/// The target in the form in which a client sends it.
fn written(target: &Target) -> (String, String) {
    let word = |given: bool| if given { "x" } else { "" }.to_owned();
    match target {
        Target::Fifos { stdout, stderr } => {
            let uri = |path: &Option<std::path::PathBuf>| path.as_deref().map_or(String::new(), fifo);
            (uri(stdout), uri(stderr))
        }
        Target::File { path, stderr } => (absolute("file", path), word(*stderr)),
        Target::Binary(binary) => {
            let scheme = if binary.ready_byte { "binary-v2" } else { "binary" };
            let pairs = binary
                .args
                .chunks(2)
                .map(|pair| format!("{}={}", escape(&pair[0]), escape(&pair[1])));
            let query = pairs.collect::<Vec<_>>().join("&");
            (
                format!("{}?{query}", absolute(scheme, &binary.program)),
                String::new(),
            )
        }
    }
}

fn absolute(scheme: &str, path: &Path) -> String {
    assert!(path.is_absolute(), "{}", path.display());
    format!("{scheme}://{}", escape(path.as_os_str()))
}

/// A path that is not absolute was given without a scheme.
fn fifo(path: &Path) -> String {
    match path.to_str() {
        Some(plain) if !path.is_absolute() => plain.to_owned(),
        _ => absolute("fifo", path),
    }
}

fn escape(text: &OsStr) -> String {
    let escaped = text.as_bytes().iter().map(|byte| match byte {
        b'/' | b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(*byte).to_string(),
        byte => format!("%{byte:02x}"),
    });
    escaped.collect()
}
