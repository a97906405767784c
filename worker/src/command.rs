//! Command line of `firn-gpu`.

use std::env;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Write as _};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{self, Command};
use std::thread;
use std::time::Duration;

use firn_gpu::protocol::{ProcessReply, Reply, Request};
use firn_host::Chain;
use serde::Serialize;

use crate::complain;
use crate::cuda::{Held, HoldError};
use crate::node::{Node, Refusal};
use crate::session::serve;
use crate::sys;

const OK: u8 = 0;
const FAILED: u8 = 1;
const USAGE: u8 = 2;

const HELP: &str = "\
firn-gpu: driver worker of the firn container runtime

usage:
  firn-gpu serve --fd N [--descriptors M]
                               answer requests on the socket that is descriptor N (started by the shim); M is
                               the socket for descriptors of GPU memory
  firn-gpu inventory           print driver version and GPUs of this node, as JSON
  firn-gpu hold                keep 1 MiB of GPU memory and compare it every 100 ms (for firn doctor --deep)
  firn-gpu discover PID...     print which of these processes use CUDA, with their GPU memory, as JSON
  firn-gpu --help | --version

exit codes: 0 done, 1 failed, 2 wrong usage
";

/// What the command line asks for.
#[derive(Debug, PartialEq, Eq)]
enum Action {
    Serve { fd: RawFd, descriptors: Option<RawFd> },
    Inventory,
    Hold,
    Discover { pids: Vec<i32> },
    Help,
    Version,
}

#[derive(Debug, thiserror::Error)]
enum UsageError {
    #[error("no command given")]
    Nothing,
    #[error("unknown argument {0:?}")]
    Unknown(OsString),
    #[error("{0}")]
    Missing(&'static str),
    #[error("{0:?} is not a positive number")]
    NoNumber(OsString),
}

#[derive(Debug, thiserror::Error)]
enum CommandError {
    #[error("cannot run again without CUDA_* variables")]
    Exec(#[source] io::Error),
    #[error("cannot serve")]
    Serve(#[source] io::Error),
    #[error("cannot print")]
    Print(#[source] io::Error),
    #[error("{message}. hint: {hint}")]
    Failed { message: String, hint: String },
    #[error(transparent)]
    Hold(#[from] HoldError),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

impl From<Refusal<'_>> for CommandError {
    fn from(refusal: Refusal<'_>) -> Self {
        Self::Failed {
            message: Chain(&refusal).to_string(),
            hint: refusal.hint().to_owned(),
        }
    }
}

/// Runs the command line of this process and ends it.
pub fn main() -> ! {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        process::abort();
    }));
    let code = match parse(env::args_os().skip(1)) {
        Ok(action) => match run(action) {
            Ok(()) => OK,
            Err(error) => {
                complain(Chain(&error));
                FAILED
            }
        },
        Err(error) => {
            complain(format_args!("{error}. hint: see firn-gpu --help"));
            USAGE
        }
    };
    sys::leave(code)
}

fn parse(mut args: impl Iterator<Item = OsString>) -> Result<Action, UsageError> {
    let command = args.next().ok_or(UsageError::Nothing)?;
    let action = match command.to_str() {
        Some("serve") => match (args.next(), args.next()) {
            (Some(flag), _) if flag != "--fd" => return Err(UsageError::Unknown(flag)),
            (Some(_), Some(fd)) => Action::Serve {
                fd: number(fd)?,
                descriptors: descriptors(&mut args)?,
            },
            _ => return Err(UsageError::Missing("serve needs --fd N")),
        },
        Some("inventory") => Action::Inventory,
        Some("hold") => Action::Hold,
        Some("discover") => {
            let pids: Vec<i32> = args.by_ref().map(number).collect::<Result<_, _>>()?;
            if pids.is_empty() {
                return Err(UsageError::Missing("discover needs a PID"));
            }
            Action::Discover { pids }
        }
        Some("--help" | "-h" | "help") => Action::Help,
        Some("--version" | "-V") => Action::Version,
        _ => return Err(UsageError::Unknown(command)),
    };
    match args.next() {
        Some(extra) => Err(UsageError::Unknown(extra)),
        None => Ok(action),
    }
}

fn descriptors(args: &mut impl Iterator<Item = OsString>) -> Result<Option<RawFd>, UsageError> {
    match args.next() {
        None => Ok(None),
        Some(flag) if flag == "--descriptors" => {
            let fd = args.next();
            let fd = fd.ok_or(UsageError::Missing("--descriptors needs a number"))?;
            number(fd).map(Some)
        }
        Some(other) => Err(UsageError::Unknown(other)),
    }
}

fn number(arg: OsString) -> Result<i32, UsageError> {
    let parsed = arg
        .to_str()
        .and_then(|text| text.parse().ok())
        .filter(|number| *number > 0);
    parsed.ok_or(UsageError::NoNumber(arg))
}

fn run(action: Action) -> Result<(), CommandError> {
    match action {
        Action::Help => print(HELP),
        Action::Version => print(concat!("firn-gpu ", env!("CARGO_PKG_VERSION"), "\n")),
        Action::Serve { fd, descriptors } => {
            leave_cuda_variables()?;
            let socket = sys::inherited_socket(fd).map_err(CommandError::Serve)?;
            let descriptors = descriptors.map(sys::inherited_socket).transpose();
            let descriptors = descriptors.map_err(CommandError::Serve)?;
            serve(socket, descriptors.map(OwnedFd::from), Node::host()).map_err(CommandError::Serve)
        }
        Action::Inventory => {
            leave_cuda_variables()?;
            print_json(&Node::host().inventory()?)
        }
        Action::Hold => hold(),
        Action::Discover { pids } => {
            leave_cuda_variables()?;
            discover(pids)
        }
    }
}

/// Starts this program again without the variables that libcuda would honour; returns when there are none.
fn leave_cuda_variables() -> Result<(), CommandError> {
    let is_cuda = |name: &OsString| name.as_encoded_bytes().starts_with(b"CUDA_");
    let mut found = env::vars_os().map(|(name, _)| name).filter(is_cuda).peekable();
    if found.peek().is_none() {
        return Ok(());
    }
    let mut again = Command::new("/proc/self/exe");
    again.arg0("firn-gpu").args(env::args_os().skip(1));
    for name in found {
        again.env_remove(name);
    }
    Err(CommandError::Exec(again.exec()))
}

/// Prints a line for each comparison. Ends with the first that fails.
fn hold() -> Result<(), CommandError> {
    const PAUSE: Duration = Duration::from_millis(100);
    let held = Held::take()?;
    loop {
        held.compare()?;
        print("whole\n")?;
        thread::sleep(PAUSE);
    }
}

/// As a session with the shim would answer. Where the driver does not report the memory of processes, none
/// has any.
fn discover(pids: Vec<i32>) -> Result<(), CommandError> {
    let (ours, theirs) = UnixStream::pair().map_err(CommandError::Serve)?;
    thread::spawn(move || serve(theirs, None, Node::host()));
    let mut session = BufReader::new(ours);
    let mut found = answers(&mut session, &Request::Discover { pids: pids.clone() })?;
    for reported in answers(&mut session, &Request::Memory { pids }).unwrap_or_default() {
        if let Some(process) = found.iter_mut().find(|process| process.pid == reported.pid) {
            process.gpu_memory = reported.gpu_memory;
        }
    }
    found.sort_by_key(|process| process.pid);
    if let Some(ProcessReply {
        pid,
        error: Some(error),
        ..
    }) = found.iter().find(|process| process.error.is_some())
    {
        return Err(CommandError::Failed {
            message: format!("the driver does not report the state of process {pid}: {error}"),
            hint: "try again: the process may have ended meanwhile".to_owned(),
        });
    }
    print_json(&found)
}

/// What a session answers of each process.
fn answers(
    session: &mut BufReader<UnixStream>,
    request: &Request,
) -> Result<Vec<ProcessReply>, CommandError> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    session.get_mut().write_all(&line).map_err(CommandError::Serve)?;
    let mut found = Vec::new();
    loop {
        let mut line = String::new();
        session.read_line(&mut line).map_err(CommandError::Serve)?;
        match serde_json::from_str(&line)? {
            Reply::Process(reply) => found.push(reply),
            Reply::Failed { message, hint } => return Err(CommandError::Failed { message, hint }),
            Reply::Done { .. } | Reply::Inventory { .. } | Reply::NoMemory { .. } => return Ok(found),
        }
    }
}

fn print_json(value: &impl Serialize) -> Result<(), CommandError> {
    print(&(serde_json::to_string_pretty(value)? + "\n"))
}

fn print(text: &str) -> Result<(), CommandError> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(CommandError::Print)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Action, String> {
        parse(line.split_whitespace().map(OsString::from)).map_err(|error| error.to_string())
    }

    #[test]
    fn command_lines() {
        let serve = |descriptors| Ok(Action::Serve { fd: 3, descriptors });
        assert_eq!(parsed("serve --fd 3"), serve(None));
        assert_eq!(parsed("serve --fd 3 --descriptors 4"), serve(Some(4)));
        assert_eq!(parsed("inventory"), Ok(Action::Inventory));
        assert_eq!(parsed("hold"), Ok(Action::Hold));
        assert_eq!(parsed("discover 7 8"), Ok(Action::Discover { pids: vec![7, 8] }));
        assert_eq!(parsed("--version"), Ok(Action::Version));
        assert_eq!(parsed("--help"), Ok(Action::Help));
    }

    #[test]
    fn wrong_command_lines_name_what_is_wrong() {
        assert_eq!(parsed("").unwrap_err(), "no command given");
        assert_eq!(
            parsed("frobnicate").unwrap_err(),
            "unknown argument \"frobnicate\""
        );
        assert_eq!(parsed("serve").unwrap_err(), "serve needs --fd N");
        assert_eq!(parsed("serve --fd").unwrap_err(), "serve needs --fd N");
        assert_eq!(
            parsed("serve --fd x").unwrap_err(),
            "\"x\" is not a positive number"
        );
        assert_eq!(
            parsed("serve --fd 3 --descriptors").unwrap_err(),
            "--descriptors needs a number"
        );
        assert_eq!(parsed("serve --fb 3").unwrap_err(), "unknown argument \"--fb\"");
        assert_eq!(parsed("inventory more").unwrap_err(), "unknown argument \"more\"");
        assert_eq!(parsed("discover").unwrap_err(), "discover needs a PID");
        assert_eq!(
            parsed("discover -1").unwrap_err(),
            "\"-1\" is not a positive number"
        );
    }
}
