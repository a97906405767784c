//! `firn logs`: the output of a container that goes to a file, and the file that a restore gives it.

pub mod args;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use firn_config::names;
use firn_host::Problem;
use firn_transaction::stdio::log_file;
use nix::fcntl::OFlag;
use tokio::time::sleep;

use self::args::LogsArgs;
use crate::containerd::{CallError, Container, Containerd, TaskState, block_on, is_id};
use crate::output;

/// How often `--follow` looks for more.
const POLL: Duration = Duration::from_millis(300);

/// For how long the file of a task that has ended must not grow. The shim gives up what a pipe still has
/// after 2 s without a byte.
const REST: Duration = Duration::from_secs(3);

/// How much is read at once.
const PIECE: u64 = 1 << 20;

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error, Problem)]
enum LogError {
    #[error("containerd knows no container {id} in namespace {namespace}")]
    #[problem("FIRN-NO-CONTAINER", "see `ctr containers list` and --namespace")]
    NoContainer { id: String, namespace: String },
    #[error("no file gets the output of container {id}: it is discarded")]
    #[problem(
        "FIRN-NO-LOG",
        "start it with `ctr run --log-uri file:///FILE`, or restore it with `firn restore`"
    )]
    Discarded { id: String },
    #[error("no file gets the output of container {id}, but {to}")]
    #[problem(
        "FIRN-NO-LOG",
        "ask the client that has started it: `nerdctl logs`, `kubectl logs`, `ctr tasks attach`"
    )]
    Elsewhere { id: String, to: String },
    #[error("cannot read {}", path.display())]
    #[problem("FIRN-FILE", "see the cause")]
    Read { path: PathBuf, source: io::Error },
    #[error(transparent)]
    #[problem("FIRN-CONTAINERD", "see containerd's log; --address names its socket")]
    Call(#[from] CallError),
}

/// True: done.
pub fn run(args: &LogsArgs) -> Result<bool> {
    match block_on(show(args))? {
        Ok(()) => Ok(true),
        Err(error) => output::failed(false, firn_host::ProblemLine(&error)),
    }
}

async fn show(args: &LogsArgs) -> Result<(), LogError> {
    let at = &args.containerd;
    let containerd = Containerd::connect(&at.socket.address, &at.namespace).await?;
    let (id, path) = find(&containerd, &at.namespace, &args.container).await?;
    let read = |source| LogError::Read {
        path: path.clone(),
        source,
    };
    let mut log = Log::open(&path).map_err(read)?.ok_or(LogError::Elsewhere {
        id: id.clone(),
        to: path.display().to_string(),
    })?;
    // What is written meanwhile would have no end.
    print(&mut log).map_err(read)?;
    let mut grown = Instant::now();
    while args.follow && !output::is_closed() {
        // Order matters: what was written before the end of the task is printed after it.
        let state = containerd.task_state(&id).await?;
        if print(&mut log).map_err(read)? {
            grown = Instant::now();
        }
        match state {
            None => break,
            // The shim may still write what was in the pipe.
            Some(TaskState::Stopped) if grown.elapsed() > REST => break,
            Some(_) => sleep(POLL).await,
        }
    }
    Ok(())
}

/// Prints what the file has by now. Returns whether that was more than before.
fn print(log: &mut Log) -> io::Result<bool> {
    let mut left = log.more()?;
    let is_more = left > 0;
    while left > 0 && !output::is_closed() {
        let piece = log.next(left)?;
        if piece.is_empty() {
            break;
        }
        left -= piece.len() as u64;
        output::bytes(&piece);
    }
    Ok(is_more)
}

/// The container's id, and the file that gets its output: of its task, or if it has none the one that firn
/// keeps for it.
async fn find(containerd: &Containerd, namespace: &str, word: &str) -> Result<(String, PathBuf), LogError> {
    let called = <[Container; 1]>::try_from(containerd.called(word).await?);
    let found = called.ok().map(|[container]| container.id);
    let id = found.clone().unwrap_or_else(|| word.to_owned());
    match containerd.stdout(&id).await? {
        Some(to) if to.is_empty() => Err(LogError::Discarded { id }),
        Some(to) => match log_file(&to) {
            Some(path) => Ok((id, path)),
            None => Err(LogError::Elsewhere { id, to }),
        },
        None => match own(namespace, &id).filter(|path| path.is_file()) {
            Some(path) => Ok((id, path)),
            None if found.is_some() => Err(LogError::Discarded { id }),
            None => Err(LogError::NoContainer {
                id,
                namespace: namespace.to_owned(),
            }),
        },
    }
}

/// The file that a restore gives a container for its output.
pub fn own(namespace: &str, id: &str) -> Option<PathBuf> {
    (is_id(namespace) && is_id(id)).then(|| Path::new(names::LOGS).join(namespace).join(format!("{id}.log")))
}

/// Makes such a file, for root alone, if it is not there.
pub fn make(log: &Path) -> io::Result<()> {
    let dir = log.parent().unwrap_or(Path::new("/"));
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600);
    options.open(log).map(drop)
}

/// A file that grows, or is emptied by whoever rotates it.
struct Log {
    file: File,
    read: u64,
}

impl Log {
    /// None: it is no file that could be read to an end.
    fn open(path: &Path) -> io::Result<Option<Self>> {
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .custom_flags(OFlag::O_NONBLOCK.bits())
            .open(path)?;
        let is_file = file.metadata()?.is_file();
        Ok(is_file.then_some(Self { file, read: 0 }))
    }

    /// How many bytes it has more than were read.
    fn more(&mut self) -> io::Result<u64> {
        let length = self.file.metadata()?.len();
        if length < self.read {
            self.read = self.file.seek(SeekFrom::Start(0))?;
        }
        Ok(length - self.read)
    }

    /// The next bytes, at most so many; none at its end.
    fn next(&mut self, most: u64) -> io::Result<Vec<u8>> {
        let mut piece = Vec::new();
        let count = (&self.file).take(most.min(PIECE)).read_to_end(&mut piece)?;
        self.read += count as u64;
        Ok(piece)
    }
}

/// Removes a file to which nothing was written.
pub fn remove_if_empty(log: &Path) {
    if fs::metadata(log).is_ok_and(|file| file.len() == 0) {
        // It keeps nothing, and costs nobody anything.
        let _left = fs::remove_file(log);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn names_are_no_paths() {
        let path = own("default", "job").unwrap();
        assert_eq!(path, Path::new(names::LOGS).join("default/job.log"));
        for (namespace, id) in [
            ("default", "../x"),
            ("..", "job"),
            ("", "job"),
            ("a/b", "job"),
            ("a", ""),
        ] {
            assert_eq!(own(namespace, id), None, "{namespace} {id}");
        }
    }

    #[test]
    fn what_is_added_is_read_and_an_emptied_file_from_its_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        fs::write(&path, "one\n").unwrap();
        let mut log = Log::open(&path).unwrap().unwrap();
        let mut next = || {
            let more = log.more().unwrap();
            String::from_utf8(log.next(more).unwrap()).unwrap()
        };
        assert_eq!(next(), "one\n");
        assert_eq!(next(), "");
        fs::write(&path, "one\ntwo\n").unwrap();
        assert_eq!(next(), "two\n");
        fs::write(&path, "new\n").unwrap();
        assert_eq!(next(), "new\n");
        assert_eq!(next(), "");
    }

    #[test]
    fn what_has_no_end_is_no_log() {
        assert!(Log::open(Path::new("/dev/null")).unwrap().is_none());
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(Log::open(&fifo).unwrap().is_none());
    }

    #[test]
    fn a_log_is_made_for_root_alone_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("logs/default/job.log");
        make(&log).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&log), mode(log.parent().unwrap())), (0o600, 0o700));
        fs::write(&log, "one\n").unwrap();
        make(&log).unwrap();
        remove_if_empty(&log);
        assert_eq!(fs::read_to_string(&log).unwrap(), "one\n");
        fs::write(&log, "").unwrap();
        remove_if_empty(&log);
        assert!(!log.exists());
    }
}
