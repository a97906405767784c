//! The command line, in the form of Go's shims: flags with one dash (two are accepted), then an action.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use firn_transaction::look;

/// What `-h` prints.
pub const USAGE: &str = "\
usage: containerd-shim-firn-v2 [flags] [start | delete]

The shim is run by containerd, once per pod or container; there is no need to run it by hand.
  (no action)  serve the task API on the listener inherited as descriptor 3
  start        make the socket, start the server and print where it listens
  delete       clean up a container whose shim is gone

flags:
  -id ID                 id of the task
  -namespace NAMESPACE   containerd namespace of the task
  -address PATH          containerd's gRPC socket
  -publish-binary PATH   containerd's binary; accepted and not used, events go to TTRPC_ADDRESS
  -bundle PATH           bundle, when it is not the working directory (delete)
  -socket PATH           serve on a socket of this name instead
  -debug                 debug lines in the log
  -info                  read options from stdin, print what the runtime can do, both protobuf
  -v, -version           print the version
  -h, -help              print this
";

/// What the shim is asked to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Action {
    /// Serve the task API.
    #[default]
    Serve,
    /// Start a server and print where it listens.
    Start,
    /// Clean up after a dead shim.
    Delete,
    /// Look at files for the shim that has started this process.
    Look,
    /// Print the features of the runtime.
    Info,
    /// Print the version.
    Version,
    /// Print [`USAGE`].
    Help,
}

/// The command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Args {
    /// What to do.
    pub action: Action,
    /// Id of the task.
    pub id: String,
    /// containerd namespace.
    pub namespace: String,
    /// containerd's gRPC socket.
    pub address: String,
    /// Bundle, when it is not the working directory.
    pub bundle: Option<PathBuf>,
    /// Socket to serve on instead of the inherited one.
    pub socket: Option<PathBuf>,
    /// Debug lines in the log.
    pub debug: bool,
}

/// A command line that makes no sense.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    /// No such flag.
    #[error("unknown flag {0:?} hint: -h lists the flags")]
    UnknownFlag(OsString),
    /// The flag stands at the end.
    #[error("flag -{0} needs a value")]
    NoValue(&'static str),
    /// The value is not one that the flag takes.
    #[error("flag -{flag} does not take {value:?}")]
    BadValue {
        /// The flag.
        flag: &'static str,
        /// What was given.
        value: OsString,
    },
    /// No such action.
    #[error("unknown action {0:?} hint: start, delete or none")]
    UnknownAction(OsString),
    /// Every action on a task needs this.
    #[error("flag -{0} is required")]
    Required(&'static str),
}

const VALUE_FLAGS: [&str; 6] = ["id", "namespace", "address", "publish-binary", "bundle", "socket"];
const SWITCHES: [&str; 6] = ["debug", "info", "v", "version", "h", "help"];

impl Args {
    /// Reads the command line, without the program's name.
    pub fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Self, ArgsError> {
        let mut words = words.into_iter();
        let mut args = Self::default();
        let mut question = None;
        while let Some(word) = words.next() {
            let Some((name, value)) = split_flag(&word) else {
                // As with Go's flags, the action ends them.
                args.action = action(&word)?;
                break;
            };
            if let Some(flag) = VALUE_FLAGS.into_iter().find(|flag| *flag == name) {
                let value = value.or_else(|| words.next()).ok_or(ArgsError::NoValue(flag))?;
                args.set(flag, value)?;
            } else if let Some(flag) = SWITCHES.into_iter().find(|flag| *flag == name) {
                let on = switch(flag, value)?;
                match flag {
                    "debug" => args.debug = on,
                    "info" if on => question = question.or(Some(Action::Info)),
                    "v" | "version" if on => question = Some(Action::Version),
                    "h" | "help" if on => question = Some(Action::Help),
                    _ => {}
                }
            } else {
                return Err(ArgsError::UnknownFlag(word));
            }
        }
        match question {
            Some(question) => args.action = question,
            None if args.action == Action::Look => {}
            None if args.namespace.is_empty() => return Err(ArgsError::Required("namespace")),
            None if args.id.is_empty() => return Err(ArgsError::Required("id")),
            None => {}
        }
        Ok(args)
    }

    fn set(&mut self, flag: &'static str, value: OsString) -> Result<(), ArgsError> {
        let path = (!value.is_empty()).then(|| PathBuf::from(&value));
        let text = |is_fit: fn(&str) -> bool| {
            let text = value.to_str().filter(|text| is_fit(text)).map(str::to_owned);
            text.ok_or_else(|| ArgsError::BadValue {
                flag,
                value: value.clone(),
            })
        };
        let is_segment = |name: &str| !name.contains('/') && name != "." && name != "..";
        match flag {
            // Both become path segments.
            "id" => self.id = text(is_segment)?,
            "namespace" => self.namespace = text(is_segment)?,
            "address" => self.address = text(|_| true)?,
            "bundle" => self.bundle = path,
            "socket" => self.socket = path,
            // publish-binary: events go straight to containerd's socket.
            _ => {}
        }
        Ok(())
    }
}

/// Name and inline value of a flag; `None` for a word that is none.
fn split_flag(word: &OsStr) -> Option<(&str, Option<OsString>)> {
    let bytes = word.as_bytes();
    let body = bytes.strip_prefix(b"--").or_else(|| bytes.strip_prefix(b"-"))?;
    let (name, value) = match body.iter().position(|byte| *byte == b'=') {
        Some(at) => (&body[..at], Some(OsStr::from_bytes(&body[at + 1..]).to_owned())),
        None => (body, None),
    };
    // A name that is not UTF-8 is no flag of ours either.
    Some((std::str::from_utf8(name).unwrap_or_default(), value))
}

fn switch(flag: &'static str, value: Option<OsString>) -> Result<bool, ArgsError> {
    match value {
        None => Ok(true),
        Some(value) => match value.to_str() {
            Some("1" | "t" | "T" | "true" | "TRUE" | "True") => Ok(true),
            Some("0" | "f" | "F" | "false" | "FALSE" | "False") => Ok(false),
            _ => Err(ArgsError::BadValue { flag, value }),
        },
    }
}

fn action(word: &OsStr) -> Result<Action, ArgsError> {
    match word.to_str() {
        Some("start") => Ok(Action::Start),
        Some("delete") => Ok(Action::Delete),
        Some(look::ACTION) => Ok(Action::Look),
        Some("") => Ok(Action::Serve),
        _ => Err(ArgsError::UnknownAction(word.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, ArgsError> {
        Args::parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn the_call_that_containerd_makes() {
        let line = "-namespace k8s.io -address /run/containerd/containerd.sock \
                    -publish-binary /usr/bin/containerd -id c1 -debug start";
        let args = parse(line).unwrap();
        assert_eq!(args.action, Action::Start);
        assert_eq!((args.namespace.as_str(), args.id.as_str()), ("k8s.io", "c1"));
        assert_eq!(args.address, "/run/containerd/containerd.sock");
        assert!(args.debug);
        let args = parse("-namespace n -address a -id c1 -bundle /b/c1 delete").unwrap();
        assert_eq!((args.action, args.bundle), (Action::Delete, Some("/b/c1".into())));
        let args = parse("-namespace n -id c1 -address a").unwrap();
        assert_eq!(
            (args.action, args.debug, args.bundle),
            (Action::Serve, false, None)
        );
    }

    #[test]
    fn flags_are_those_of_go() {
        let args = parse("--namespace=n -id=c1 -debug=false --socket=/s -address a=b").unwrap();
        assert!(!args.debug);
        assert_eq!((args.address.as_str(), args.socket), ("a=b", Some("/s".into())));
        for line in ["-v", "--version", "-id c -namespace n -v start", "-info -version"] {
            assert_eq!(parse(line).unwrap().action, Action::Version, "{line}");
        }
        assert_eq!(parse("-info").unwrap().action, Action::Info);
        assert_eq!(parse("-h").unwrap().action, Action::Help);
        assert!(
            VALUE_FLAGS
                .iter()
                .chain(&SWITCHES)
                .all(|flag| USAGE.contains(&format!("-{flag}")))
        );
    }

    #[test]
    fn nonsense_is_refused() {
        for (line, message) in [
            ("-bogus", "unknown flag \"-bogus\" hint: -h lists the flags"),
            ("-id", "flag -id needs a value"),
            ("-debug=maybe", "flag -debug does not take \"maybe\""),
            ("-id ../x -namespace n", "flag -id does not take \"../x\""),
            ("-id x -namespace ..", "flag -namespace does not take \"..\""),
            (
                "-id x -namespace n stop",
                "unknown action \"stop\" hint: start, delete or none",
            ),
            ("-id x start", "flag -namespace is required"),
            ("-namespace n start", "flag -id is required"),
        ] {
            assert_eq!(parse(line).unwrap_err().to_string(), message);
        }
    }
}
