//! Parses the client's stdio strings. No I/O.
//!
//! The scheme of stdout applies to stdout and stderr. A string without a scheme is a path, used verbatim.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, percent_encode};

use super::Error;

/// Where stdout and stderr go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// A fifo (or an existing file) each; nowhere without one.
    Fifos {
        stdout: Option<PathBuf>,
        stderr: Option<PathBuf>,
    },
    /// Both are appended to one file; `stderr` only if the client requested it.
    File { path: PathBuf, stderr: bool },
    /// Read by a program.
    Binary(Binary),
}

/// A logging binary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Binary {
    pub(super) program: PathBuf,
    pub(super) args: Vec<OsString>,
    /// The program must send a byte when it is ready; otherwise closing the pipe is enough.
    pub(super) ready_byte: bool,
}

impl Target {
    pub(super) fn parse(stdout: &str, stderr: &str) -> Result<Self, Error> {
        match split(stdout) {
            None | Some(("fifo", _)) => Ok(Self::Fifos {
                stdout: fifo(stdout)?,
                stderr: fifo(stderr)?,
            }),
            Some(("file", rest)) => Ok(Self::File {
                path: path(stdout, rest)?,
                stderr: !stderr.is_empty(),
            }),
            Some((scheme @ ("binary" | "binary-v2"), rest)) => Ok(Self::Binary(Binary {
                program: path(stdout, rest)?,
                args: query(rest),
                ready_byte: scheme == "binary-v2",
            })),
            Some((scheme, _)) => Err(unknown(scheme)),
        }
    }
}

/// What would end the path of a URI, or be taken for an escape.
const ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b'?').add(b'#');

/// The string by which a client has a task's output appended to this file. The path is absolute.
pub fn log_uri(path: &Path) -> String {
    let path = path.as_os_str().as_bytes();
    format!("file://{}", percent_encode(path, ESCAPED))
}

/// The file to which a task's output is appended, by its client's string for standard output. None: to no
/// file.
pub fn log_file(stdout: &str) -> Option<PathBuf> {
    match split(stdout)? {
        ("file", rest) => path(stdout, rest).ok(),
        _ => None,
    }
}

fn unknown(scheme: &str) -> Error {
    Error::UnknownScheme {
        scheme: scheme.to_owned(),
    }
}

/// The path of a fifo given as a plain path or as `fifo://`; none for the empty string.
pub(super) fn fifo(text: &str) -> Result<Option<PathBuf>, Error> {
    if text.is_empty() {
        return Ok(None);
    }
    match split(text) {
        None => Ok(Some(PathBuf::from(text))),
        Some(("fifo", rest)) => path(text, rest).map(Some),
        Some((scheme, _)) => Err(unknown(scheme)),
    }
}

/// The scheme, and the text after the colon.
fn split(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once(':')?;
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
    let starts = scheme
        .bytes()
        .next()
        .is_some_and(|byte| byte.is_ascii_alphabetic());
    (starts && scheme.bytes().all(legal)).then_some((scheme, rest))
}

/// The path component, without authority, query and fragment.
fn path(uri: &str, rest: &str) -> Result<PathBuf, Error> {
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    let path = match rest.strip_prefix("//") {
        Some(authority) => authority.find('/').map_or("", |slash| &authority[slash..]),
        None => rest,
    };
    if !path.starts_with('/') {
        return Err(Error::NoPath { uri: uri.to_owned() });
    }
    Ok(PathBuf::from(decode(path)))
}

/// The query as an argument list: key, value, key, value. The first value of a repeated key counts.
fn query(rest: &str) -> Vec<OsString> {
    let rest = rest.split('#').next().unwrap_or_default();
    let Some((_, query)) = rest.split_once('?') else {
        return Vec::new();
    };
    let mut pairs: Vec<(OsString, OsString)> = Vec::new();
    let query = query.replace('+', " ");
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let key = decode(key);
        if pairs.iter().all(|(known, _)| *known != key) {
            pairs.push((key, decode(value)));
        }
    }
    pairs.into_iter().flat_map(|(key, value)| [key, value]).collect()
}

/// Percent-decodes; text that is not an escape is kept.
fn decode(text: &str) -> OsString {
    OsString::from_vec(percent_decode_str(text).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fifos(stdout: Option<&str>, stderr: Option<&str>) -> Target {
        Target::Fifos {
            stdout: stdout.map(PathBuf::from),
            stderr: stderr.map(PathBuf::from),
        }
    }

    #[test]
    fn plain_paths_are_fifos_and_are_taken_verbatim() {
        assert_eq!(Target::parse("", "").unwrap(), fifos(None, None));
        assert_eq!(
            Target::parse("/a%20b?c", "").unwrap(),
            fifos(Some("/a%20b?c"), None)
        );
        assert_eq!(Target::parse("", "/err").unwrap(), fifos(None, Some("/err")));
        assert_eq!(
            Target::parse("/with:colon", "/err").unwrap(),
            fifos(Some("/with:colon"), Some("/err"))
        );
        assert_eq!(
            Target::parse("fifo:///out", "fifo:///err").unwrap(),
            fifos(Some("/out"), Some("/err"))
        );
    }

    #[test]
    fn file_takes_stderr_only_where_the_client_names_it() {
        let path = PathBuf::from("/var/log/a b");
        let both = Target::parse("file:///var/log/a%20b", "file:///var/log/a%20b").unwrap();
        assert_eq!(
            both,
            Target::File {
                path: path.clone(),
                stderr: true
            }
        );
        assert_eq!(
            Target::parse("file:///var/log/a%20b", "").unwrap(),
            Target::File { path, stderr: false }
        );
    }

    #[test]
    fn binary_query_becomes_arguments_in_order() {
        let uri = "binary:///usr/bin/log?id=a+b%2Bc&flag&id=second&x=1%";
        let Target::Binary(binary) = Target::parse(uri, uri).unwrap() else {
            panic!("not a binary")
        };
        assert_eq!(binary.program, PathBuf::from("/usr/bin/log"));
        assert_eq!(binary.args, ["id", "a b+c", "flag", "", "x", "1%"]);
        assert!(!binary.ready_byte);
        let Target::Binary(binary) = Target::parse("binary-v2:///log", "").unwrap() else {
            panic!("not a binary")
        };
        assert!(binary.ready_byte && binary.args.is_empty());
    }

    #[test]
    fn the_uri_of_a_log_is_that_of_its_path() {
        for path in ["/var/log/a", "/a b/50%/c?d#e", "/\u{e4}/%20", "/a:b"] {
            let uri = log_uri(Path::new(path));
            assert_eq!(log_file(&uri).as_deref(), Some(Path::new(path)), "{uri}");
        }
        for stdout in [
            "",
            "/run/fifo",
            "fifo:///run/fifo",
            "binary:///bin/log",
            "file://",
            "x:y",
        ] {
            assert_eq!(log_file(stdout), None, "{stdout}");
        }
    }

    #[test]
    fn unknown_schemes_and_missing_paths_are_refused() {
        let error = Target::parse("npipe:////./pipe/x", "").unwrap_err();
        assert!(
            matches!(&error, Error::UnknownScheme { scheme, .. } if scheme == "npipe"),
            "{error}"
        );
        assert!(matches!(
            Target::parse("file://host", ""),
            Err(Error::NoPath { .. })
        ));
        assert!(matches!(
            Target::parse("binary:relative", ""),
            Err(Error::NoPath { .. })
        ));
        assert!(matches!(fifo("file:///x"), Err(Error::UnknownScheme { .. })));
    }
}
