//! Signs that a job holds GPU memory which its processes share, for jobs that release it in their hook
//! `prepare`.
//!
//! Measured with NCCL 2.28: a communicator shows neither in the mappings nor in the device descriptors of its
//! ranks, whether it uses NVLink or shared memory. It has a socket by which it exchanges handles of memory,
//! and PyTorch has threads that watch it. Both go with the communicator
//! (docs/design/decisions/0018-hooks-of-the-job.md).

use std::ops::ControlFlow;
use std::path::Path;

use firn_host::ordered::set_of;
use firn_host::{bounded, proc_maps};

use super::{Unreadable, open_files, socket_inode};
use crate::Refusal;

/// How the name of the abstract socket of a communicator begins.
const NCCL_SOCKET: &[u8] = b"@tmp/nccl-socket-";

/// The thread of PyTorch that watches a process group.
const WATCHDOG: &str = "pt_nccl_watchdg";

/// The directory of the channels by which GPU memory is shared between machines.
const IMEX: &str = "/dev/nvidia-caps-imex-channels/";

/// The first sign that is found.
pub(super) fn inspect(proc_root: &Path, dumped: &[i32]) -> Result<Option<Refusal>, Unreadable> {
    for &pid in dumped {
        if let Some(what) = of_process(proc_root, pid)? {
            let comm = proc_maps::comm(proc_root, pid);
            return Ok(Some(Refusal::Held { pid, comm, what }));
        }
    }
    Ok(None)
}

fn of_process(proc_root: &Path, pid: i32) -> Result<Option<String>, Unreadable> {
    let Some(files) = open_files(proc_root, pid)? else {
        return Ok(None);
    };
    let mut sockets = Vec::new();
    for (_, to) in files {
        if to.starts_with(IMEX) {
            return Ok(Some(format!("{} open", to.display())));
        }
        sockets.extend(socket_inode(&to));
    }
    let sockets = set_of(sockets);
    let mut is_held = false;
    let what = "net/unix";
    let process = proc_root.join(pid.to_string());
    let read = bounded::each(&process.join(what), b'\n', bounded::LINES, |line| {
        is_held = named(line).is_some_and(|inode| sockets.contains(&inode));
        if is_held {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    proc_maps::unless_gone(read).map_err(|source| Unreadable { pid, what, source })?;
    if is_held {
        return Ok(Some("the socket of an NCCL communicator".to_owned()));
    }
    let tasks = std::fs::read_dir(process.join("task"))
        .into_iter()
        .flatten()
        .flatten();
    let comm = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    let is_watched = tasks
        .filter_map(|task| comm(task).ok())
        .any(|comm| comm.trim_end() == WATCHDOG);
    Ok(is_watched.then(|| format!("a process group of PyTorch (thread {WATCHDOG})")))
}

/// The inode of a line of `net/unix`, if it is the socket of a communicator.
fn named(line: &[u8]) -> Option<u64> {
    let mut fields = line
        .split(u8::is_ascii_whitespace)
        .filter(|field| !field.is_empty());
    let inode = fields.nth(6)?;
    let is_nccl = fields.next()?.starts_with(NCCL_SOCKET);
    is_nccl
        .then(|| std::str::from_utf8(inode).ok()?.parse().ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::*;

    const UNIX: &str = "Num       RefCount Protocol Flags    Type St Inode Path\n\
        0000000000000000: 00000002 00000000 00010000 0005 01 16407 @cuda-uvmfd-4026531836-558@\n\
        0000000000000000: 00000003 00000000 00000000 0001 03 18725\n\
        0000000000000000: 00000002 00000000 00000000 0002 01 18726 @tmp/nccl-socket-0-89d2df94f9a0d073@@@@\n";

    fn process(fds: &[&str], threads: &[&str]) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let of = root.path().join("7");
        fs::create_dir_all(of.join("fd")).unwrap();
        fs::create_dir_all(of.join("net")).unwrap();
        fs::write(of.join("net/unix"), UNIX).unwrap();
        fs::write(of.join("comm"), "python\n").unwrap();
        for (fd, to) in fds.iter().enumerate() {
            symlink(to, of.join("fd").join(fd.to_string())).unwrap();
        }
        for (tid, comm) in threads.iter().enumerate() {
            let task = of.join("task").join((7 + tid).to_string());
            fs::create_dir_all(&task).unwrap();
            fs::write(task.join("comm"), format!("{comm}\n")).unwrap();
        }
        let path = root.path().to_owned();
        (root, path)
    }

    #[test]
    fn what_a_communicator_shows_is_found_and_what_cuda_alone_shows_is_not() {
        let cases: [(&[&str], &[&str], Option<&str>); 5] = [
            (
                &["socket:[16407]", "socket:[18725]", "/dev/nvidia0"],
                &["python", "cuda-EvtHandlr"],
                None,
            ),
            (
                &["socket:[18726]"],
                &["python"],
                Some("the socket of an NCCL communicator"),
            ),
            (&["socket:[1872]"], &["python"], None),
            (
                &[],
                &["python", "pt_nccl_watchdg"],
                Some("a process group of PyTorch (thread pt_nccl_watchdg)"),
            ),
            (
                &["/dev/nvidia-caps-imex-channels/channel0"],
                &["python"],
                Some("/dev/nvidia-caps-imex-channels/channel0 open"),
            ),
        ];
        for (fds, threads, expected) in cases {
            let (_root, path) = process(fds, threads);
            let found = inspect(&path, &[7, 8]).unwrap();
            let what = match found {
                Some(Refusal::Held { pid: 7, comm, what }) if comm == "python" => Some(what),
                None => None,
                other => panic!("{other:?}"),
            };
            assert_eq!(what.as_deref(), expected, "{fds:?} {threads:?}");
        }
    }
}
