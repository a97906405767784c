//! CRIU's files compared with the spec of the container that they are to become.
//!
//! CRIU runs as root and makes every task as the image describes it: credentials, namespaces, limits, mounts.
//! The maker of the image chose these. So everything that gives privileges is read here before CRIU runs.
//! What exceeds the container's own spec is refused; what is less than the spec allows is accepted. The
//! files' formats are CRIU's `images/*.proto`. Images older than CRIU 3.15, which hold the same in other
//! places, are refused.
//!
//! What CRIU has made is compared again while it is stopped: [`check_made`].
//!
//! Only [`UntrustedDir`] opens files, so that nothing but regular files is read; each is read up to a bound.

mod cgroups;
mod connections;
mod entries;
mod files;
mod huge_pages;
mod made;
pub mod memory;
mod mounts;
mod namespaces;
mod pids;
mod processes;
mod seccomp;
pub(crate) mod shared_memory;
mod stopped;
mod tasks;
mod timers;
mod unix_sockets;
mod volumes;
mod wire;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use serde::{Deserialize, Serialize};

pub use self::connections::{Connections, Continued, close_connections, has_connections};
pub use self::huge_pages::HugePages;
pub use self::made::{check as check_made, loosened};
pub use self::pids::Pids;
pub use self::processes::{Process, processes};
pub use self::stopped::was_stopped;
pub use self::timers::set_expired_timers;
pub use self::unix_sockets::close_unix_sockets;
pub use self::volumes::{VolumeFile, expect_files, expect_volumes, names_of_links};
use self::wire::{Message, WireError};
use firn_host::bounded::read_at_most;
use firn_host::{Problem, in_root, mountinfo};
use firn_oci::{Spec, SpecError};
use firn_store::UntrustedDir;

/// Largest file that is read: files of thousands of tasks and mounts stay below 1 MiB.
const MAX_BYTES: u64 = 16 << 20;

/// What comes first in every file but the inventory.
const COMMON_MAGIC: u32 = 0x5456_4319;

const INVENTORY_MAGIC: u32 = 0x5831_3116;

/// Longest part of the image that a message quotes.
const QUOTED: usize = 200;

/// Why an image must not become a container of this spec.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error, Problem)]
#[serde(rename_all = "snake_case")]
pub enum ImageFault {
    /// It asks for more than the spec allows.
    #[error(
        "{file} asks for more than the container's spec allows: {what} is {found}, and the spec has {allowed}"
    )]
    #[problem(
        "FIRN-IMAGE-PRIVILEGE",
        "give the container what its checkpoint had, if you trust where the checkpoint comes from"
    )]
    Privilege {
        file: String,
        what: String,
        found: String,
        allowed: String,
    },
    /// A file is not as CRIU writes it.
    #[error("{file} of the checkpoint is not as CRIU writes it: {reason}")]
    #[problem("FIRN-IMAGE-CORRUPT", "make the checkpoint again, with CRIU 3.15 or newer")]
    Malformed { file: String, reason: String },
    /// A file cannot be read, or is no regular file.
    #[error("cannot read {file} of the checkpoint: {reason}")]
    #[problem(
        "FIRN-IMAGE-UNREADABLE",
        "check the checkpoint directory; CRIU's files must be regular files"
    )]
    Unreadable { file: String, reason: String },
    /// A file of a volume that a process had open has another size by now.
    #[error(
        "a process had {path} open with {then} bytes, and {file} has {now} by now: CRIU opens it only with \
         as many"
    )]
    #[problem(
        "FIRN-FILE-SIZE",
        "give the copy the file as it was; where it only has more at its end, `truncate --size` cuts it, and \
         the copy writes that again"
    )]
    Size {
        path: String,
        /// The file of this node.
        file: String,
        then: u64,
        now: u64,
    },
    /// A file of a volume that a process had open is not there.
    #[error("a process had {path} open, and {file} is not there")]
    #[problem(
        "FIRN-FILE-GONE",
        "give the copy the volume that the container had, with its files"
    )]
    Gone { path: String, file: String },
    /// The node has too few huge pages.
    #[error("the processes have {needed} huge pages of {size} KiB, and this node has {free} to give")]
    #[problem(
        "FIRN-HUGE-PAGES",
        "raise nr_hugepages of that size below /sys/kernel/mm/hugepages by those that lack, or end what uses \
         them"
    )]
    HugePages {
        /// Of a page, in KiB.
        size: u64,
        needed: u64,
        free: u64,
    },
    /// Another process has an id that the container's had.
    #[error(
        "the container has no PID namespace of its own, and its process id {id} is taken by process {pid} of \
         the node ({comm})"
    )]
    #[problem(
        "FIRN-PID-TAKEN",
        "restore the container on a node or in a pod where its ids are free, or wait until that process has \
         ended"
    )]
    PidTaken { id: i32, pid: i32, comm: String },
    /// The container had a PID namespace, whose ids begin with 1, and the copy has that of others.
    #[error("the source had a PID namespace of its own, and this container joins another one")]
    #[problem(
        "FIRN-PID-TAKEN",
        "give the container a PID namespace of its own, as its source had (a pod without \
         shareProcessNamespace and hostPID)"
    )]
    PidNamespace,
    /// The spec cannot be read.
    #[error("{reason}")]
    #[problem("FIRN-SPEC-INVALID", "create the container again with a valid spec")]
    Spec { reason: String },
}

impl ImageFault {
    pub(crate) fn exceeds(
        file: impl Display,
        what: impl Display,
        found: impl Display,
        allowed: impl Display,
    ) -> Self {
        Self::Privilege {
            file: shown(file),
            what: shown(what),
            found: shown(found),
            allowed: shown(allowed),
        }
    }

    fn malformed(file: &str, reason: impl Display) -> Self {
        Self::Malformed {
            file: shown(file),
            reason: shown(reason),
        }
    }

    fn unreadable(file: &str, source: &io::Error) -> Self {
        Self::Unreadable {
            file: shown(file),
            reason: source.to_string(),
        }
    }
}

impl From<SpecError> for ImageFault {
    fn from(error: SpecError) -> Self {
        Self::Spec {
            reason: error.to_string(),
        }
    }
}

/// What of the image may be shown on a terminal.
fn shown(text: impl Display) -> String {
    let text = text.to_string().replace(char::is_control, "?");
    text.chars().take(QUOTED).collect()
}

/// What of this node decides, in addition to the spec.
pub struct Host {
    /// Names of the cgroup hierarchies and controllers; the unified one has none.
    pub cgroups: BTreeSet<String>,
    /// What a container gets whose spec does not set it.
    pub oom_score_adj: i32,
    /// Whether there is something at a path of /proc or /sys.
    pub exists: fn(&Path) -> bool,
    /// Number of the namespace that a path leads to.
    pub namespace: fn(&Path) -> Option<u64>,
    /// The container's root file system, in which the places of the spec's mounts are looked up. Without it
    /// they count as they are.
    pub root: Option<OwnedFd>,
    /// Numbers of the file systems that are mounted on this node. Empty where devices are another node's.
    pub mounted: BTreeSet<u32>,
}

impl Host {
    /// The node on which this runs.
    pub fn this() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let lines = read("/proc/self/cgroup");
        let controllers = lines.lines().filter_map(|line| line.split(':').nth(1));
        Self {
            cgroups: firn_host::ordered::set_of(
                controllers.flat_map(|list| list.split(',')).map(str::to_owned),
            ),
            oom_score_adj: read("/proc/self/oom_score_adj").trim().parse().unwrap_or(0),
            exists: Path::exists,
            namespace: |path| {
                use std::os::unix::fs::MetadataExt;
                #[expect(clippy::disallowed_methods, reason = "all namespaces are on one device")]
                let number = path.metadata().ok().map(|file| file.ino());
                number
            },
            root: None,
            mounted: BTreeSet::new(),
        }
    }

    /// The node, for a container with this root file system that is to be made.
    ///
    /// # Errors
    /// The directory cannot be opened.
    pub fn before(root: &Path) -> io::Result<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(Self {
            root: Some(open(root, flags, Mode::empty())?),
            ..Self::this()
        })
    }

    /// The node, for the container that was made with this first process.
    ///
    /// # Errors
    /// Its root directory cannot be opened, or the node's mounts cannot be read.
    pub fn of(init: i32) -> io::Result<Self> {
        let mounted = mountinfo::mounted()?;
        Ok(Self {
            mounted: firn_host::ordered::set_of(mounted.iter().filter_map(mounts::device)),
            ..Self::before(Path::new(&format!("/proc/{init}/root")))?
        })
    }

    /// Where a place of the spec is in the container.
    fn place(&self, destination: &Path) -> io::Result<PathBuf> {
        match &self.root {
            Some(root) => in_root(root, destination),
            None => Ok(destination.components().collect()),
        }
    }
}

/// Compares the image with the spec. The first thing that exceeds it is the error.
pub fn check(spec: &Spec, image: &Path, host: &Host) -> Result<(), ImageFault> {
    let image = Image::open(image)?;
    entries::check(&image)?;
    // CRIU makes nothing of what is no image. The runtime reports that, with CRIU's log.
    let Some(inventory) = Inventory::read(&image)? else {
        return Ok(());
    };
    let tasks = tasks::check(spec, &image, host)?;
    let namespaces = namespaces::check(spec, &image, &inventory, &tasks, host)?;
    cgroups::check(spec, &image, &inventory, &tasks, host)?;
    mounts::check(spec, &image, &namespaces, host)?;
    files::check(spec, &image)
}

/// The files.
struct Image {
    dir: UntrustedDir,
}

impl Image {
    fn open(dir: &Path) -> Result<Self, ImageFault> {
        let dir = UntrustedDir::open(dir);
        let dir = dir.map_err(|source| ImageFault::unreadable("the directory", &source))?;
        Ok(Self { dir })
    }

    /// The messages of a file; none when it is not there.
    fn read<T>(
        &self,
        name: &str,
        magic: u32,
        each: impl Fn(&Message<'_>) -> Result<T, WireError>,
    ) -> Result<Option<Vec<T>>, ImageFault> {
        let Some(bytes) = self.bytes(name)? else {
            return Ok(None);
        };
        let read = |message| Message::parse(message).and_then(|message| each(&message));
        let all = messages(name, magic, &bytes)?.into_iter().map(read);
        let all = all.collect::<Result<_, _>>();
        all.map(Some).map_err(|error| ImageFault::malformed(name, error))
    }

    /// The only message of a file.
    fn read_one<T>(
        &self,
        name: &str,
        magic: u32,
        each: impl Fn(&Message<'_>) -> Result<T, WireError>,
    ) -> Result<Option<T>, ImageFault> {
        let Some(mut all) = self.read(name, magic, each)? else {
            return Ok(None);
        };
        match (all.pop(), all.is_empty()) {
            (Some(one), true) => Ok(Some(one)),
            _ => Err(ImageFault::malformed(name, "it holds not one message")),
        }
    }

    /// The only message of a file that has to be there.
    fn required<T>(
        &self,
        name: &str,
        magic: u32,
        each: impl Fn(&Message<'_>) -> Result<T, WireError>,
    ) -> Result<T, ImageFault> {
        self.read_one(name, magic, each)?.ok_or_else(|| missing(name))
    }

    fn bytes(&self, name: &str) -> Result<Option<Vec<u8>>, ImageFault> {
        let file = match self.dir.file(name) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(ImageFault::unreadable(name, &error)),
        };
        let bytes = read_at_most(file, MAX_BYTES);
        let bytes = bytes.map_err(|error| ImageFault::unreadable(name, &error))?;
        bytes
            .map(Some)
            .ok_or_else(|| ImageFault::malformed(name, "it is too large"))
    }
}

fn missing(name: &str) -> ImageFault {
    ImageFault::malformed(name, "it is not there")
}

/// The bytes of the messages of a file.
fn messages<'a>(name: &str, magic: u32, bytes: &'a [u8]) -> Result<Vec<&'a [u8]>, ImageFault> {
    each_message(name, magic, bytes)?.collect()
}

/// The same one by one. Nothing comes after an error.
fn each_message<'a>(
    name: &str,
    magic: u32,
    bytes: &'a [u8],
) -> Result<impl Iterator<Item = Result<&'a [u8], ImageFault>>, ImageFault> {
    let mut rest = bytes;
    let inventory = magic == INVENTORY_MAGIC;
    if !inventory && word(&mut rest) != Some(COMMON_MAGIC) || word(&mut rest) != Some(magic) {
        return Err(ImageFault::malformed(name, "another kind of file"));
    }
    Ok(std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let length = word(&mut rest).and_then(|length| usize::try_from(length).ok());
        let split = length.and_then(|length| rest.split_at_checked(length));
        let (message, left) = split.unzip();
        rest = left.unwrap_or_default();
        Some(message.ok_or_else(|| ImageFault::malformed(name, "it ends too early")))
    }))
}

fn word(bytes: &mut &[u8]) -> Option<u32> {
    let (word, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u32::from_le_bytes(*word))
}

/// The numbers in a line of /proc.
fn numbers<T: FromStr>(text: &str) -> Vec<T> {
    text.split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect()
}

/// A path without `.`, doubled slashes or a slash at the end; none when it climbs or is relative.
fn clean(path: &str) -> Option<PathBuf> {
    use std::path::Component;
    let path = Path::new(path);
    let plain = |part: &Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    (path.is_absolute() && path.components().all(|part| plain(&part))).then(|| path.components().collect())
}

/// What is known of the whole image.
struct Inventory {
    /// Ids of what CRIU itself had at the dump: a task with the same gets CRIU's own at a restore.
    criu: namespaces::Ids,
    /// The cgroups of CRIU itself.
    cgroups: Option<u32>,
}

impl Inventory {
    fn read(image: &Image) -> Result<Option<Self>, ImageFault> {
        const NAME: &str = "inventory.img";
        /// Images with a common magic number.
        const VERSION: u32 = 2;
        let read = image.read_one(NAME, INVENTORY_MAGIC, |message| {
            let criu = message.message(3)?.ok_or(WireError { field: 3 })?;
            let own = Self {
                criu: namespaces::Ids::read(&criu)?,
                cgroups: message.number(5)?,
            };
            // Without the last, namespaces lie in files that are named after tasks.
            Ok((message.required(1)?, message.number(4)?, own))
        })?;
        match read {
            None => Ok(None),
            Some((VERSION, Some(1), inventory)) => Ok(Some(inventory)),
            Some(_) => Err(ImageFault::malformed(NAME, "the image is too old")),
        }
    }
}

#[cfg(test)]
mod fault_tests;
#[cfg(test)]
pub(crate) mod tests;
