use std::io;
use std::path::PathBuf;

use firn_host::{Absent, Problem};
use nix::errno::Errno;

use super::index::IndexError;
use super::{Digest, layout};

const EMPTY: &str = "name an empty directory, or the store's own directory, in `[images] store`";
const NEW_KEY: &str = "`openssl rand -hex 32` makes a key; write it into a file of mode 600 that is root's";
const PRIVATE: &str = "a store holds the memory of containers: let root own it, and nobody else enter it";

/// A store that cannot be used, or lacks what is looked for.
#[derive(Debug, thiserror::Error, Problem)]
#[problem("FIRN-STORE-UNUSABLE", EMPTY)]
pub enum StoreError {
    /// There is none.
    #[error("there is no store at {}", path.display())]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "`[images] store` names the directory; a checkpoint and `firn store pull` make the store"
    )]
    Absent { path: PathBuf },
    /// There is none, where there was one on a file system that is not mounted.
    #[error(
        "store {id} at {} is on the file system of {}, which is not mounted; this node knows by {}",
        path.display(),
        mount_point.display(),
        record.display()
    )]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "mount the file system; if the store was given up, remove the file that the message names last"
    )]
    NotMounted {
        path: PathBuf,
        id: String,
        mount_point: PathBuf,
        record: PathBuf,
    },
    /// A directory with checkpoints lies on a file system that is not mounted.
    #[error(
        "{} was on {}, which is not mounted, as {} has noted; nothing was removed",
        path.display(), mount_point.display(), record.display()
    )]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "mount the file system; if its checkpoints were given up, remove the file that the message names last"
    )]
    RootNotMounted {
        path: PathBuf,
        mount_point: PathBuf,
        record: PathBuf,
    },
    /// A note of where something was mounted is damaged.
    #[error("{} cannot be understood; nothing was removed", path.display())]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "remove it once all file systems with checkpoints are mounted"
    )]
    Record { path: PathBuf },
    /// There is something else.
    #[error("{} is not a store: {found} is in the way", path.display())]
    Foreign { path: PathBuf, found: String },
    /// It is a link, or no directory.
    #[error("{} of the store is a link or not a directory", path.display())]
    NotADirectory { path: PathBuf },
    /// It is another user's.
    #[error("{} of the store belongs to user {owner}", path.display())]
    #[problem("FIRN-STORE-UNUSABLE", PRIVATE)]
    Owner { path: PathBuf, owner: u32 },
    /// Others may read or write there.
    #[error("{} of the store has mode {mode:o} instead of 700", path.display())]
    #[problem("FIRN-STORE-UNUSABLE", PRIVATE)]
    Mode { path: PathBuf, mode: u32 },
    /// The description of the store is damaged.
    #[error("{} does not describe a store", path.display())]
    Description {
        path: PathBuf,
        source: Option<serde_json::Error>,
    },
    /// It was made by a newer firn.
    #[error(
        "{} has version {found} of the store's format, this firn reads version {}",
        path.display(),
        layout::VERSION
    )]
    #[problem("FIRN-STORE-UNUSABLE", "upgrade firn on this node")]
    Version { path: PathBuf, found: u64 },
    /// The file of a key cannot be read.
    #[error("cannot read the key {}", path.display())]
    #[problem("FIRN-STORE-KEY", NEW_KEY)]
    KeyFile { path: PathBuf, source: io::Error },
    /// It has no key, or others can read it.
    #[error("the key {} {why}", path.display())]
    #[problem("FIRN-STORE-KEY", NEW_KEY)]
    Key { path: PathBuf, why: &'static str },
    /// A store is encrypted, and no key was named.
    #[error("the store at {} is encrypted", path.display())]
    #[problem(
        "FIRN-STORE-KEY",
        "name the file of its key: `[images] store-key` for the node's store, --store-key for that of \
         --store, --key for that of a push or pull"
    )]
    Encrypted { path: PathBuf },
    /// A key was named for a store that is not encrypted.
    #[error("the store at {} is not encrypted, and a key was named for it", path.display())]
    #[problem(
        "FIRN-STORE-KEY",
        "leave the key out, or push into a new store: a store is encrypted from its beginning or never"
    )]
    NotEncrypted { path: PathBuf },
    #[error("the store at {} is encrypted with another key", path.display())]
    #[problem("FIRN-STORE-KEY", "name the file of the key with which the store was made")]
    WrongKey { path: PathBuf },
    #[error("the store at {} does not compress, and is to", path.display())]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "leave --compress out, or push into a new store: a store compresses from its beginning or never"
    )]
    NotCompressed { path: PathBuf },
    /// Another process has locked it for longer than anybody waits.
    #[error("store {} is in use", path.display())]
    #[problem(
        "FIRN-STORE-BUSY",
        "try again when no checkpoint, pull or `firn store gc` works on the store"
    )]
    Busy { path: PathBuf },
    /// It has no extent or index of this name.
    #[error("store {id} at {} lacks {kind} {}", path.display(), digest.short())]
    #[problem(
        "FIRN-STORE-MISSING",
        "bring the memory of the checkpoint here with `firn store pull URL ID`, or copy the store"
    )]
    Missing {
        path: PathBuf,
        id: String,
        /// `extent` or `index`.
        kind: &'static str,
        digest: Digest,
    },
    /// An extent has not the content that its name stands for.
    #[error("extent {} is damaged", path.display())]
    #[problem(
        "FIRN-STORE-DAMAGED",
        "`firn store verify --repair` removes damaged extents; `firn store pull URL ID` brings them again"
    )]
    Extent { path: PathBuf },
    /// An index that is to be written is none that could be read.
    #[error("cannot describe the memory of the checkpoint")]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "checkpoint without the store: `[images] bulk = \"inline\"`"
    )]
    Unwritable { source: IndexError },
    /// An index cannot be used.
    #[error("index {} cannot be used", path.display())]
    #[problem(
        "FIRN-STORE-DAMAGED",
        "bring it again with `firn store pull URL ID`, or copy the store"
    )]
    Index { path: PathBuf, source: IndexError },
    /// Not enough room, on the disk or below the cap.
    #[error("store {} has room for {free} bytes more by {limit}, {needed} are needed", path.display())]
    #[problem(
        "FIRN-STORE-FULL",
        "remove checkpoints and run `firn store gc`, or raise `[images] store-cap` or the file system's size"
    )]
    Full {
        path: PathBuf,
        needed: u64,
        free: u64,
        /// `its cap` or `its file system`.
        limit: &'static str,
    },
    /// The file system refused something.
    #[error("cannot {action} {}", path.display())]
    #[problem(
        "FIRN-STORE-IO",
        "check the store's file system, and the kernel's log for its errors"
    )]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

/// The file system's error in this action on that path.
pub(super) fn io<E: Into<io::Error>>(
    action: &'static str,
    path: impl Into<PathBuf>,
) -> impl FnOnce(E) -> StoreError {
    move |error| StoreError::Io {
        action,
        path: path.into(),
        source: error.into(),
    }
}

/// Whether there is no room left for this user.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().map(Errno::from_raw),
        Some(Errno::ENOSPC | Errno::EDQUOT)
    )
}

/// Whether there is nothing of the name, or nothing of the kind that was looked for.
pub(super) fn is_not_there(error: &io::Error) -> bool {
    error.is_absent() || is_wrong_kind(error)
}

/// Whether what was opened is a link, or of another kind than was expected.
pub(super) fn is_wrong_kind(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    error.kind() == io::ErrorKind::InvalidInput || matches!(errno, Some(Errno::ELOOP | Errno::ENOTDIR))
}
