//! Signs by which the simulated driver finds CUDA processes from outside, without disturbing them.
//!
//! The restore thread's name carries the number of the descriptor through which it is reached, and the
//! process's state; the event thread's name carries the token under which the process owns GPU memory.
//! Reading names works while a process is frozen, and CRIU restores them.

use std::fs;
use std::io;

/// Start of the restore thread's name.
pub const SERVICE_PREFIX: &str = "cudart";
/// Start of the event thread's name.
pub const TOKEN_PREFIX: &str = "cuev";

/// Name of the restore thread: channel descriptor and state.
pub fn service_comm(channel: i32, state: i32) -> String {
    format!("{SERVICE_PREFIX}{channel}s{state}")
}

/// Name of the event thread: owner token (44 bits).
pub fn token_comm(token: u64) -> String {
    format!("{TOKEN_PREFIX}{token:011x}")
}

/// A process in which the simulated driver was initialised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaProcess {
    /// Its pid in the pid namespace of /proc.
    pub pid: i32,
    /// Its restore thread, in the same namespace.
    pub restore_tid: i32,
    /// The descriptor, in that process, that leads to the restore thread.
    pub channel: i32,
    /// 0 running, 1 locked, 2 checkpointed.
    pub state: i32,
    /// Token under which it owns GPU memory.
    pub token: u64,
}

impl CudaProcess {
    /// Looks at process `pid`; nothing when it has no CUDA or is gone.
    pub fn find(pid: i32) -> Option<Self> {
        let mut service = None;
        let mut token = None;
        for (tid, comm) in threads(pid).ok()? {
            if let Some((channel, state)) = parse_service(&comm) {
                service = Some((tid, channel, state));
            } else if let Some(text) = comm.strip_prefix(TOKEN_PREFIX) {
                token = u64::from_str_radix(text, 16).ok();
            }
        }
        let (restore_tid, channel, state) = service?;
        Some(Self {
            pid,
            restore_tid,
            channel,
            state,
            token: token?,
        })
    }

    /// All CUDA processes in /proc.
    pub fn all() -> Vec<Self> {
        numeric_entries("/proc")
            .unwrap_or_default()
            .into_iter()
            .filter_map(Self::find)
            .collect()
    }
}

fn parse_service(comm: &str) -> Option<(i32, i32)> {
    let (channel, state) = comm.strip_prefix(SERVICE_PREFIX)?.split_once('s')?;
    Some((channel.parse().ok()?, state.parse().ok()?))
}

fn threads(pid: i32) -> io::Result<Vec<(i32, String)>> {
    let tids = numeric_entries(&format!("/proc/{pid}/task"))?;
    let comm = |tid| {
        Some((
            tid,
            fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm")).ok()?,
        ))
    };
    let names = tids.into_iter().filter_map(comm);
    Ok(names
        .map(|(tid, name)| (tid, name.trim_end().to_owned()))
        .collect())
}

fn numeric_entries(dir: &str) -> io::Result<Vec<i32>> {
    let names = fs::read_dir(dir)?.flatten().map(|entry| entry.file_name());
    Ok(names.filter_map(|name| name.to_str()?.parse().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::{parse_service, service_comm, token_comm};

    #[test]
    fn thread_names_fit_and_parse() {
        assert_eq!(parse_service(&service_comm(1_048_575, 2)), Some((1_048_575, 2)));
        assert!(service_comm(1_048_575, 2).len() <= 15);
        assert_eq!(token_comm((1 << 44) - 1).len(), 15);
        assert_eq!(parse_service("cudarts"), None);
    }
}
