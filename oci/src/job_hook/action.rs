//! What a hook calls, from the value of its annotation.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

use nix::sys::signal::Signal;

/// Port of a URL without one.
const HTTP: u16 = 80;

/// Longest value, as of a label in containerd.
pub const MAX_VALUE: usize = 4096;

/// What a hook calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// A program in the container, with its arguments.
    Exec(Vec<String>),
    /// POST to a loopback address in the container's network namespace.
    Http {
        address: SocketAddr,
        /// Path and query, with the leading slash.
        path: String,
        /// Absent: the facts.
        body: Option<String>,
    },
    /// A signal for the container's init, which answers by a file.
    Signal(Signal),
    /// Nothing: the job looks at the file.
    Look,
}

/// A value that is no action.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ActionError {
    #[error("{0:?} begins with none of exec:, http://, signal: and file:")]
    Kind(String),
    #[error("exec: names no program")]
    NoProgram,
    #[error("the list after exec: is no JSON array of strings")]
    NoList,
    #[error(
        "the URL must be http://ADDRESS:PORT/PATH with a loopback address, 127.0.0.1, [::1] or localhost"
    )]
    Url,
    #[error("there is no signal {0:?}")]
    Signal(String),
    #[error("SIG{0} cannot be handled")]
    Fatal(&'static str),
    #[error("it is longer than {MAX_VALUE} bytes")]
    TooLong,
    #[error("file: is for hook-restored only")]
    NothingToCall,
}

impl Action {
    /// Reads the value of an annotation.
    pub(super) fn parse(value: &str) -> Result<Self, ActionError> {
        let value = value.trim();
        if value.len() > MAX_VALUE {
            Err(ActionError::TooLong)
        } else if let Some(command) = value.strip_prefix("exec:") {
            exec(command.trim())
        } else if let Some(url) = value.strip_prefix("http://") {
            http(url).ok_or(ActionError::Url)
        } else if let Some(signal) = value.strip_prefix("signal:") {
            signal_named(signal.trim())
        } else if value == "file:" {
            Ok(Self::Look)
        } else {
            Err(ActionError::Kind(value.chars().take(64).collect()))
        }
    }
}

fn exec(command: &str) -> Result<Action, ActionError> {
    let argv: Vec<String> = if command.starts_with('[') {
        serde_json::from_str(command).map_err(|_| ActionError::NoList)?
    } else {
        command.split_whitespace().map(str::to_owned).collect()
    };
    match argv.first() {
        Some(program) if !program.is_empty() => Ok(Action::Exec(argv)),
        _ => Err(ActionError::NoProgram),
    }
}

fn http(url: &str) -> Option<Action> {
    let (url, body) = match url.split_once(char::is_whitespace) {
        Some((url, body)) => (url, Some(body.trim().to_owned())),
        None => (url, None),
    };
    let at = url.find('/').unwrap_or(url.len());
    let (authority, path) = url.split_at(at);
    let address = match authority.strip_prefix("localhost") {
        Some("") => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), HTTP),
        Some(port) => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port.strip_prefix(':')?.parse().ok()?),
        None => authority
            .parse()
            .or_else(|_| authority.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, HTTP)))
            .ok()?,
    };
    let is_plain = |path: &str| path.bytes().all(|byte| byte.is_ascii_graphic());
    (address.ip().is_loopback() && is_plain(path)).then(|| Action::Http {
        address,
        path: if path.is_empty() { "/" } else { path }.to_owned(),
        body,
    })
}

fn signal_named(name: &str) -> Result<Action, ActionError> {
    let full = if name.starts_with("SIG") {
        name.to_owned()
    } else {
        format!("SIG{name}")
    };
    match Signal::from_str(&full) {
        Ok(Signal::SIGKILL) => Err(ActionError::Fatal("KILL")),
        Ok(Signal::SIGSTOP) => Err(ActionError::Fatal("STOP")),
        Ok(signal) => Ok(Action::Signal(signal)),
        Err(_) => Err(ActionError::Signal(name.chars().take(64).collect())),
    }
}
