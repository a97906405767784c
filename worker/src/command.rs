//! Command line of `firn-gpu`.

use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write as _};
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{self, Command};
use std::thread;

use firn_gpu::protocol::{ProcessReply, Reply, Request};
use firn_gpu::{CudaState, DeviceNode, Inventory, NodeType};

use crate::node::{Node, Refusal};
use crate::session::serve;
use crate::sys;
use crate::{chain, complain};

const OK: u8 = 0;
const FAILED: u8 = 1;
const USAGE: u8 = 2;

const HELP: &str = "\
firn-gpu: driver worker of the firn container runtime

usage:
  firn-gpu serve --fd N        answer requests on the socket that is descriptor N (started by the shim)
  firn-gpu inventory [--json]  print driver version and GPUs of this node
  firn-gpu discover PID...     print which of these processes use CUDA, with their GPU memory, as JSON
  firn-gpu state PID...        print the CUDA state of processes
  firn-gpu --help | --version

exit codes: 0 done, 1 failed, 2 wrong usage
";

/// What the command line asks for.
#[derive(Debug, PartialEq, Eq)]
enum Action {
    Serve { fd: RawFd },
    Inventory { json: bool },
    Discover { pids: Vec<i32> },
    State { pids: Vec<i32> },
    Help,
    Version,
}

#[derive(Debug, thiserror::Error)]
enum UsageError {
    #[error("no command given")]
    Nothing,
    #[error("unknown argument {0:?}")]
    Unknown(OsString),
    #[error("{what} needs {needed}")]
    Missing {
        what: &'static str,
        needed: &'static str,
    },
    #[error("{0:?} is not {1}")]
    NoNumber(OsString, &'static str),
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
    Refused { message: String, hint: &'static str },
    #[error("{message}. hint: {hint}")]
    Failed { message: String, hint: String },
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

impl From<Refusal<'_>> for CommandError {
    fn from(refusal: Refusal<'_>) -> Self {
        Self::Refused {
            message: chain(&refusal),
            hint: refusal.hint(),
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
        Ok(action) => run(action).unwrap_or_else(|error| {
            complain(&chain(&error));
            FAILED
        }),
        Err(error) => {
            complain(&format!("{error}. hint: see firn-gpu --help"));
            USAGE
        }
    };
    sys::leave(code)
}

fn parse(mut args: impl Iterator<Item = OsString>) -> Result<Action, UsageError> {
    let command = args.next().ok_or(UsageError::Nothing)?;
    let action = match command.to_str() {
        Some("serve") => {
            let missing = UsageError::Missing {
                what: "serve",
                needed: "--fd N",
            };
            let fd = match args.next() {
                Some(flag) if flag == "--fd" => number(args.next().ok_or(missing)?)?,
                Some(other) => return Err(UsageError::Unknown(other)),
                None => return Err(missing),
            };
            Action::Serve { fd }
        }
        Some("inventory") => match args.next() {
            Some(flag) if flag == "--json" => Action::Inventory { json: true },
            Some(other) => return Err(UsageError::Unknown(other)),
            None => Action::Inventory { json: false },
        },
        Some("discover") => Action::Discover {
            pids: pids("discover", &mut args)?,
        },
        Some("state") => Action::State {
            pids: pids("state", &mut args)?,
        },
        Some("--help" | "-h" | "help") => Action::Help,
        Some("--version" | "-V") => Action::Version,
        _ => return Err(UsageError::Unknown(command)),
    };
    match args.next() {
        Some(extra) => Err(UsageError::Unknown(extra)),
        None => Ok(action),
    }
}

fn pids(what: &'static str, args: &mut impl Iterator<Item = OsString>) -> Result<Vec<i32>, UsageError> {
    let pids = args.map(number).collect::<Result<Vec<_>, _>>()?;
    if pids.is_empty() {
        let needed = "a PID";
        return Err(UsageError::Missing { what, needed });
    }
    Ok(pids)
}

fn number(arg: OsString) -> Result<i32, UsageError> {
    let parsed = arg
        .to_str()
        .and_then(|text| text.parse().ok())
        .filter(|number| *number > 0);
    parsed.ok_or(UsageError::NoNumber(arg, "a positive number"))
}

fn run(action: Action) -> Result<u8, CommandError> {
    match action {
        Action::Help => print(HELP),
        Action::Version => print(concat!("firn-gpu ", env!("CARGO_PKG_VERSION"), "\n")),
        Action::Serve { fd } => {
            leave_cuda_variables()?;
            let socket = sys::inherited_socket(fd).map_err(CommandError::Serve)?;
            serve(socket, Node::host()).map_err(CommandError::Serve)?;
            Ok(OK)
        }
        Action::Inventory { json } => {
            leave_cuda_variables()?;
            let node = Node::host();
            let inventory = node.inventory()?;
            if json {
                print(&(serde_json::to_string_pretty(&inventory)? + "\n"))
            } else {
                print(&describe(&inventory))
            }
        }
        Action::Discover { pids } => {
            leave_cuda_variables()?;
            discover(pids)
        }
        Action::State { pids } => {
            leave_cuda_variables()?;
            state(&Node::host(), &pids)
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

/// As a session with the shim would answer. Where the driver does not report the memory of processes, none
/// has any.
fn discover(pids: Vec<i32>) -> Result<u8, CommandError> {
    let (ours, theirs) = UnixStream::pair().map_err(CommandError::Serve)?;
    thread::spawn(move || serve(theirs, Node::host()));
    let mut session = BufReader::new(ours);
    let mut found = answers(&mut session, &Request::Discover { pids: pids.clone() })?;
    let memory = answers(&mut session, &Request::Memory { pids }).unwrap_or_default();
    for process in &mut found {
        let reported = memory.iter().find(|reported| reported.pid == process.pid);
        process.gpu_bytes = reported.and_then(|reported| reported.gpu_bytes);
    }
    found.sort_by_key(|process| process.pid);
    if let Some(ProcessReply {
        pid,
        error: Some(error),
        ..
    }) = found.iter().find(|process| process.error.is_some())
    {
        return Err(CommandError::Refused {
            message: format!("the driver does not report the state of process {pid}: {error}"),
            hint: "try again: the process may have ended meanwhile",
        });
    }
    print(&(serde_json::to_string_pretty(&found)? + "\n"))
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

fn state(node: &Node, pids: &[i32]) -> Result<u8, CommandError> {
    let (_, driver) = node.checkpointer()?;
    let mut code = OK;
    let mut text = String::new();
    for &pid in pids {
        let line = match driver.restore_tid(pid) {
            Err(error) => {
                code = FAILED;
                format!("{pid} no CUDA process: {error}\n")
            }
            Ok(tid) => match driver.state(pid) {
                Ok(state) => format!("{pid} {} restore-tid {tid}\n", state_word(state)),
                Err(error) => {
                    code = FAILED;
                    format!("{pid} state unknown: {error}\n")
                }
            },
        };
        text.push_str(&line);
    }
    print(&text)?;
    Ok(code)
}

fn state_word(state: CudaState) -> String {
    match state {
        CudaState::Running => "running".to_owned(),
        CudaState::Locked => "locked".to_owned(),
        CudaState::Checkpointed => "checkpointed".to_owned(),
        CudaState::Failed => "failed".to_owned(),
        CudaState::Unknown(number) => format!("state-{number}"),
    }
}

/// The inventory for people, one line per GPU.
fn describe(inventory: &Inventory) -> String {
    let mib = |bytes: u64| bytes >> 20;
    let on = |flag: bool| if flag { "on" } else { "off" };
    let mut text = String::new();
    let (major, minor) = (inventory.cuda_version / 1000, inventory.cuda_version % 1000 / 10);
    let api = if inventory.checkpoint_api { "yes" } else { "no" };
    let _ = writeln!(
        text,
        "driver {}, CUDA {major}.{minor}, process checkpoint: {api}",
        inventory.driver_version
    );
    for gpu in &inventory.gpus {
        let node = gpu
            .node
            .as_ref()
            .map_or_else(|| "no node".to_owned(), describe_node);
        let _ = writeln!(
            text,
            "{} {}, {} of {} MiB free, {}, {node}, MIG {}, persistence {}",
            gpu.uuid,
            gpu.name,
            mib(gpu.memory_free),
            mib(gpu.memory_total),
            gpu.pci_address,
            on(gpu.mig),
            on(gpu.persistence)
        );
    }
    for node in &inventory.common_nodes {
        let _ = writeln!(text, "{}", describe_node(node));
    }
    text
}

fn describe_node(node: &DeviceNode) -> String {
    let kind = match node.kind {
        NodeType::Char => 'c',
        NodeType::Block => 'b',
    };
    format!("{} {kind} {}:{}", node.path.display(), node.major, node.minor)
}

fn print(text: &str) -> Result<u8, CommandError> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(CommandError::Print)?;
    Ok(OK)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Action, String> {
        parse(line.split_whitespace().map(OsString::from)).map_err(|error| error.to_string())
    }

    #[test]
    fn command_lines() {
        assert_eq!(parsed("serve --fd 3"), Ok(Action::Serve { fd: 3 }));
        assert_eq!(parsed("inventory"), Ok(Action::Inventory { json: false }));
        assert_eq!(parsed("inventory --json"), Ok(Action::Inventory { json: true }));
        assert_eq!(parsed("state 1 2"), Ok(Action::State { pids: vec![1, 2] }));
        assert_eq!(parsed("discover 7"), Ok(Action::Discover { pids: vec![7] }));
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
            parsed("inventory --json more").unwrap_err(),
            "unknown argument \"more\""
        );
        assert_eq!(parsed("state").unwrap_err(), "state needs a PID");
        assert_eq!(parsed("state -1").unwrap_err(), "\"-1\" is not a positive number");
    }
}
