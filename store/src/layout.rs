//! The directories and the description of a store: made, opened, and refused when others could have reached
//! them.

use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use firn_host::bounded::read_at_most;
use firn_host::{UnlessAbsent, atomic_file};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::geteuid;

use super::error::{io, is_wrong_kind};
use super::form::{Form, Packing};
use super::{Description, StoreError};
use crate::dir::UntrustedDir;

const DESCRIPTION: &str = Description::NAME;
const LOCK: &str = "lock";
/// Extents, each in a directory of the first two digits of its name.
pub const EXTENTS: &str = "extents";
/// Indexes.
pub const IMAGES: &str = "images";
/// Names of indexes that gc keeps. Made with the first.
pub(super) const PINNED: &str = "pinned";
/// Names of indexes whose checkpoint somebody has stated to be gone. Made with the first.
pub(super) const RELEASED: &str = "released";
/// Names of indexes that nothing is seen to name, with the time since. Made with the first.
pub(super) const UNREFERENCED: &str = "unreferenced";
/// What is being written, a directory for each writer.
pub(super) const NEW: &str = "new";

pub(super) const VERSION: u64 = 1;
/// That of a store that compresses or encrypts.
pub(super) const PACKED_VERSION: u64 = 2;

/// What a directory may hold that becomes a store: what a killed maker has left, and what mkfs makes.
const HARMLESS: [&str; 6] = [LOCK, EXTENTS, IMAGES, NEW, ".firn-store.json.tmp", "lost+found"];

/// How long anybody waits for the lock. `gc` holds it for the time that it needs to remove files.
const PATIENCE: Duration = Duration::from_secs(30);
const STEP: Duration = Duration::from_millis(20);

/// For the owner alone.
const PRIVATE: Mode = Mode::S_IRWXU;

/// The root of a store, which nobody else can enter.
pub(super) fn root(path: &Path) -> Result<UntrustedDir, StoreError> {
    let dir = UntrustedDir::open_itself(path).map_err(|error| match error {
        error if error.kind() == io::ErrorKind::NotFound => absent(path),
        error => not_opened(path, error),
    })?;
    // Before the mode: whoever names another directory by mistake is not to be led to close that to others.
    if !has(&dir, DESCRIPTION, path)? {
        return Err(absent(path));
    }
    private(&dir, path)?;
    Ok(dir)
}

/// As [`root`]. Makes it where it is not there, and closes an empty directory to others.
pub(super) fn made_root(path: &Path) -> Result<UntrustedDir, StoreError> {
    let mut builder = DirBuilder::new();
    let made = builder.recursive(true).mode(PRIVATE.bits()).create(path);
    // What is there instead of a directory is named by the error of opening it.
    made.or_else(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => Ok(()),
        _ => Err(error),
    })
    .map_err(io("make", path))?;
    let dir = UntrustedDir::open_itself(path).map_err(|error| not_opened(path, error))?;
    // Order matters: another may make it meanwhile, and write into it.
    let empty = is_empty(&dir, path);
    if !has(&dir, DESCRIPTION, path)? {
        empty?;
        owned(&dir, path)?;
        let close = |dir: File| dir.set_permissions(Permissions::from_mode(PRIVATE.bits()));
        dir.handle()
            .and_then(close)
            .map_err(io("set the mode of", path))?;
    }
    private(&dir, path)?;
    Ok(dir)
}

/// A directory of the store.
pub(super) fn inside(
    dir: &UntrustedDir,
    root: &Path,
    name: &'static str,
) -> Result<UntrustedDir, StoreError> {
    let path = root.join(name);
    let inside = dir.inside(name).map_err(|error| match error {
        error if error.kind() == io::ErrorKind::NotFound => absent(&path),
        error => not_opened(&path, error),
    })?;
    private(&inside, &path)?;
    Ok(inside)
}

/// Makes a directory, unless it is there.
pub(super) fn make(dir: &UntrustedDir, name: &str) -> io::Result<()> {
    match mkdirat(dir, name, PRIVATE) {
        Err(Errno::EEXIST) => Ok(()),
        made => Ok(made?),
    }
}

/// Makes what a store consists of, where it is not there. Two that do so at once make one store.
pub(super) fn complete(dir: &UntrustedDir, root: &Path, packing: &Packing) -> Result<(), StoreError> {
    for name in [EXTENTS, IMAGES, NEW] {
        make(dir, name).map_err(io("make", root.join(name)))?;
    }
    // Without the lock, which writers hold.
    if has(dir, DESCRIPTION, root)? {
        return Ok(());
    }
    let _alone = lock(dir, root, FlockArg::LockExclusiveNonblock)?;
    if has(dir, DESCRIPTION, root)? {
        return Ok(());
    }
    let bytes = Description::random(packing)?.to_bytes(root)?;
    // Order matters: whoever sees the description finds the directories.
    atomic_file::write(&dir.path(), DESCRIPTION, &bytes, 0o600).map_err(io("write", root.join(DESCRIPTION)))
}

/// The id of the store, and how it writes.
pub(super) fn described(
    dir: &UntrustedDir,
    root: &Path,
    packing: &Packing,
) -> Result<(String, Form), StoreError> {
    let path = root.join(DESCRIPTION);
    let bytes = match dir
        .file(DESCRIPTION)
        .and_then(|file| read_at_most(file, Description::MAX_BYTES))
    {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(absent(root)),
        Err(error) if is_wrong_kind(&error) => None,
        read => read.map_err(io("read", &path))?,
    };
    let bytes = bytes.ok_or(StoreError::Description { path, source: None })?;
    let description = Description::from_bytes(&bytes, root)?;
    Ok((description.id().to_owned(), description.form(packing, root)?))
}

/// Takes the lock. `how` does not block: who holds it for long is reported.
pub(super) fn lock(dir: &UntrustedDir, root: &Path, how: FlockArg) -> Result<Flock<File>, StoreError> {
    let until = Instant::now() + PATIENCE;
    loop {
        match try_lock(dir, root, how)? {
            Some(lock) => return Ok(lock),
            None if Instant::now() < until => thread::sleep(STEP),
            None => {
                return Err(StoreError::Busy {
                    path: root.to_owned(),
                });
            }
        }
    }
}

/// Takes the lock unless another holds it.
pub(super) fn try_lock(
    dir: &UntrustedDir,
    root: &Path,
    how: FlockArg,
) -> Result<Option<Flock<File>>, StoreError> {
    let path = root.join(LOCK);
    // NFS wants to write to what it locks. A fifo would not let go without O_NONBLOCK.
    let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    let file = openat(dir, LOCK, flags, Mode::S_IRUSR | Mode::S_IWUSR).map_err(io("open", &path))?;
    match Flock::lock(File::from(file), how) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => Err(io("lock", &path)(error)),
    }
}

/// A name that nobody else has.
pub(super) fn random_id() -> Result<String, StoreError> {
    const SOURCE: &str = "/proc/sys/kernel/random/uuid";
    let id = std::fs::read_to_string(SOURCE).map_err(io("read", SOURCE))?;
    Ok(id.trim().to_owned())
}

fn absent(path: &Path) -> StoreError {
    StoreError::Absent {
        path: path.to_owned(),
    }
}

fn not_opened(path: &Path, error: io::Error) -> StoreError {
    if is_wrong_kind(&error) {
        StoreError::NotADirectory {
            path: path.to_owned(),
        }
    } else {
        io("open", path)(error)
    }
}

fn has(dir: &UntrustedDir, name: &str, root: &Path) -> Result<bool, StoreError> {
    let found = dir
        .metadata(name)
        .if_present()
        .map_err(io("look for", root.join(name)))?;
    Ok(found.is_some())
}

/// Whether nothing of anybody lies there.
fn is_empty(dir: &UntrustedDir, root: &Path) -> Result<(), StoreError> {
    let names = dir.names().map_err(io("list", root))?;
    let mut foreign = names
        .into_iter()
        .filter(|name| !HARMLESS.contains(&name.as_str()));
    let mut found = foreign.next();
    for name in [EXTENTS, IMAGES, NEW] {
        let inside = dir.inside(name).and_then(|inside| inside.names()).if_present();
        let first = inside
            .map_err(io("list", root.join(name)))?
            .unwrap_or_default()
            .pop();
        found = found.or(first.map(|first| format!("{name}/{first}")));
    }
    match found {
        None => Ok(()),
        Some(found) => Err(StoreError::Foreign {
            path: root.to_owned(),
            found,
        }),
    }
}

/// Whether others are kept out.
fn private(dir: &UntrustedDir, path: &Path) -> Result<(), StoreError> {
    let mode = owned(dir, path)?;
    match mode & 0o077 {
        0 => Ok(()),
        _ => Err(StoreError::Mode {
            path: path.to_owned(),
            mode,
        }),
    }
}

/// Its mode, if it belongs to the user of this process: root, but in tests.
fn owned(dir: &UntrustedDir, path: &Path) -> Result<u32, StoreError> {
    let metadata = dir
        .handle()
        .and_then(|dir| dir.metadata())
        .map_err(io("look at", path))?;
    if metadata.uid() == geteuid().as_raw() {
        Ok(metadata.mode() & 0o7777)
    } else {
        Err(StoreError::Owner {
            path: path.to_owned(),
            owner: metadata.uid(),
        })
    }
}
