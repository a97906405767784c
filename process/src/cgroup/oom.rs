//! Reports when the kernel ran out of a cgroup's memory. A watch ends when its cgroup is removed.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use firn_host::FileId;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::read::FlatKeyed;
use super::{Cgroup, CgroupError, Version};

/// v1: takes the descriptors of an eventfd and of the file to watch.
const EVENT_CONTROL: &str = "cgroup.event_control";

/// v2: counts the kills.
const MEMORY_EVENTS: &str = "memory.events";

/// v2: shows whether the cgroup has processes.
const CGROUP_EVENTS: &str = "cgroup.events";

/// Out-of-memory events of one cgroup. Each is reported once, to the first caller.
#[derive(Debug)]
pub struct OomWatch {
    cgroup: Incarnation,
    source: Source,
    ended: AtomicBool,
}

/// The directory of a cgroup, distinguished by its inode from a later one with the same name.
#[derive(Debug)]
struct Incarnation {
    dir: PathBuf,
    file: FileId,
}

impl Incarnation {
    fn of(dir: &Path) -> io::Result<Self> {
        let file = FileId::of(&dir.metadata()?);
        Ok(Self {
            dir: dir.to_owned(),
            file,
        })
    }

    fn is_gone(&self) -> bool {
        !self.dir.metadata().is_ok_and(|now| FileId::of(&now) == self.file)
    }
}

/// What reports its events, and for v2 the number of kills that are known.
#[derive(Debug)]
enum Source {
    V1(AsyncFd<EventFd>),
    V2(AsyncFd<Changes>, AtomicU64),
}

impl Cgroup {
    /// Starts the watch; needs the async runtime's reactor.
    pub fn watch_oom(&self) -> Result<OomWatch, CgroupError> {
        let dir = self.dir("memory").ok_or(CgroupError::NoMemory)?;
        if self.version == Version::V2 && dir.is_dir() && !dir.join(MEMORY_EVENTS).exists() {
            return Err(CgroupError::NoMemory);
        }
        let watch = || {
            Ok(OomWatch {
                cgroup: Incarnation::of(&dir)?,
                source: match self.version {
                    Version::V1 => watch_v1(&dir),
                    Version::V2 => watch_v2(&dir),
                }?,
                ended: AtomicBool::new(false),
            })
        };
        watch().map_err(|source| CgroupError::OomWatch {
            path: dir.clone(),
            source,
        })
    }
}

impl OomWatch {
    /// Whether memory has run out since the last report. For the moment before an exit is published.
    pub fn take(&self) -> bool {
        // The removal of the cgroup, which is an event too, is left to `recv`.
        !self.cgroup.is_gone()
            && match &self.source {
                Source::V1(events) => events.get_ref().read().is_ok(),
                Source::V2(_, kills) => new_kills(&self.cgroup.dir, kills).unwrap_or(false),
            }
    }

    /// Waits until memory runs out again; none once the cgroup has ended. May be dropped and called again.
    pub async fn recv(&self) -> Option<()> {
        while !self.ended.load(Ordering::Relaxed) {
            let happened = match &self.source {
                Source::V1(events) => self.v1_event(events).await,
                Source::V2(changes, kills) => self.v2_event(changes, kills).await,
            };
            match happened {
                Ok(true) => return Some(()),
                Ok(false) => {}
                Err(error) => {
                    log::warn!("out-of-memory events are lost: {error}");
                    self.ended.store(true, Ordering::Relaxed);
                }
            }
        }
        None
    }

    async fn v1_event(&self, events: &AsyncFd<EventFd>) -> io::Result<bool> {
        let mut ready = events.readable().await?;
        match ready.try_io(|events| Ok(events.get_ref().read()?)) {
            Err(_not_ready) => Ok(false),
            Ok(count) => {
                // The removal of the cgroup is an event too, the last one.
                let removed = self.cgroup.is_gone();
                self.ended.store(removed, Ordering::Relaxed);
                Ok(count? > u64::from(removed))
            }
        }
    }

    async fn v2_event(&self, changes: &AsyncFd<Changes>, kills: &AtomicU64) -> io::Result<bool> {
        if self.cgroup.is_gone() {
            self.ended.store(true, Ordering::Relaxed);
            return Ok(false);
        }
        let dir = &self.cgroup.dir;
        // Order matters: the kills are read after the end was seen, so the last of them is not missed.
        let populated = FlatKeyed::read(&dir.join(CGROUP_EVENTS)).map_err(io::Error::other)?;
        let empty = populated.is_none_or(|events| events.get("populated") == 0);
        self.ended.store(empty, Ordering::Relaxed);
        if new_kills(dir, kills)? {
            return Ok(true);
        }
        if empty {
            return Ok(false);
        }
        let mut ready = changes.readable().await?;
        match ready.try_io(|changes| changes.get_ref().read()) {
            Err(_not_ready) => Ok(false),
            Ok(drained) => drained.map(|()| false),
        }
    }
}

fn watch_v1(dir: &Path) -> io::Result<Source> {
    let events = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
    let oom = File::open(dir.join("memory.oom_control"))?;
    let order = format!("{} {}", events.as_raw_fd(), oom.as_raw_fd());
    OpenOptions::new()
        .write(true)
        .open(dir.join(EVENT_CONTROL))?
        .write_all(order.as_bytes())?;
    Ok(Source::V1(watched(events)?))
}

fn watch_v2(dir: &Path) -> io::Result<Source> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
    for file in [MEMORY_EVENTS, CGROUP_EVENTS] {
        inotify.add_watch(
            &dir.join(file),
            AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_DELETE_SELF,
        )?;
    }
    // Order matters: a kill between the two calls is counted here, and its change event then adds nothing.
    let kills = AtomicU64::new(count_kills(dir)?);
    Ok(Source::V2(watched(Changes(Some(inotify)))?, kills))
}

fn new_kills(dir: &Path, kills: &AtomicU64) -> io::Result<bool> {
    let now = count_kills(dir)?;
    Ok(kills.fetch_max(now, Ordering::Relaxed) < now)
}

fn count_kills(dir: &Path) -> io::Result<u64> {
    let events = FlatKeyed::read(&dir.join(MEMORY_EVENTS)).map_err(io::Error::other)?;
    Ok(events.map_or(0, |events| events.get("oom_kill")))
}

/// An inotify instance as the reactor needs it. It is `Some` until it is dropped.
///
/// The kernel takes about 10 ms to close one; no other work of the shim must wait for that.
#[derive(Debug)]
struct Changes(Option<Inotify>);

impl Changes {
    /// Reads the pending events.
    fn read(&self) -> io::Result<()> {
        match &self.0 {
            Some(inotify) => Ok(inotify.read_events().map(drop)?),
            None => Ok(()),
        }
    }
}

impl AsRawFd for Changes {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_ref().map_or(-1, |inotify| inotify.as_fd().as_raw_fd())
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        let inotify = self.0.take();
        // Without a thread the instance is closed here, which blocks.
        let _detached = thread::Builder::new().spawn(move || drop(inotify));
    }
}

fn watched<T: AsRawFd>(fd: T) -> io::Result<AsyncFd<T>> {
    #[expect(
        deprecated,
        reason = "its successor is unsafe for types whose descriptor may change; these cannot"
    )]
    AsyncFd::with_interest(fd, Interest::READABLE)
}
