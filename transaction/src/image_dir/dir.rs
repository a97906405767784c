//! The directory that receives an image: the workload's memory, including its keys and passwords.
//!
//! The directory is opened when the request begins, and firn, the runtime and CRIU access it through that
//! descriptor. containerd removes its directory when its client goes away (Ctrl-C of `ctr`): it is never
//! created again, and a dump whose directory has vanished, was replaced, or has lost files to another program
//! has failed ([`ImageDirError::Gone`]).
//!
//! Only the owner may enter the directory, and only the owner may read its files, whoever created it.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use firn_config::{OpenImageDir, names};
use firn_host::UnlessAbsent;
use firn_host::durable::{self, NotOnDisk};
use firn_image::form::LAST;
use firn_image::manifest::{self, ImageFile};
use firn_process::OrWarn;
use firn_process::blocking::blocking;
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::ImageDirError;
use crate::end_proof::Durable;
use crate::journal::{DirId, ImageWas};

/// Deadline of opening or checking the directory, at the start of a request and for a container without GPUs.
const LIMIT: Duration = Duration::from_secs(10);

/// Permissions of users other than the owner.
const OF_OTHERS: u32 = 0o077;

/// An image directory and its state before the dump. Cheap to clone.
#[derive(Clone)]
pub struct ImageDir(Arc<DirState>);

struct DirState {
    path: PathBuf,
    was: ImageWas,
    /// The path may be a symbolic link, as with the stock shim.
    links: bool,
    open: OnceLock<Open>,
    /// It was cleared: a directory that a delayed call creates afterwards must be removed again.
    cleared: AtomicBool,
}

struct Open {
    dir: File,
    id: DirId,
    watch: OnceLock<Watch>,
}

/// Detects files that another program removes. CRIU removes none, and firn removes only hidden ones.
struct Watch {
    inotify: Inotify,
    seen: AtomicBool,
}

impl ImageDir {
    /// Runs `work` on a blocking thread; if it hangs beyond the limit, it has failed.
    pub async fn at(
        &self,
        work: impl FnOnce(&Self) -> Result<(), ImageDirError> + Send + 'static,
    ) -> Result<(), ImageDirError> {
        let image = self.clone();
        let done = tokio::time::timeout(LIMIT, blocking(move || work(&image))).await;
        done.map_err(|_| ImageDirError::io(self.path(), ErrorKind::TimedOut.into()))?
    }

    /// Opens the directory, if it exists. Creates nothing. Fails if containerd's directory has been removed.
    pub async fn find(path: &Path, links: bool) -> Result<Self, ImageDirError> {
        let of = path.to_owned();
        let late = |_| ImageDirError::io(path, ErrorKind::TimedOut.into());
        tokio::time::timeout(LIMIT, blocking(move || Self::look(&of, links)))
            .await
            .map_err(late)?
    }

    fn look(path: &Path, links: bool) -> Result<Self, ImageDirError> {
        match open(path, links) {
            Ok(dir) => {
                let was = match is_empty(&dir) {
                    Ok(true) => ImageWas::Empty,
                    Ok(false) => ImageWas::Filled,
                    Err(source) => return Err(ImageDirError::io(path, source)),
                };
                let found = Self::new(path, was, links);
                found.keep(dir)?;
                Ok(found)
            }
            // containerd creates its directory before the request: its client has gone, and the directory was
            // removed.
            Err(error) if error.kind() == ErrorKind::NotFound && is_containerds(path) => {
                Err(ImageDirError::gone(path))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::new(path, ImageWas::Absent, links)),
            Err(source) => Err(ImageDirError::io(path, source)),
        }
    }

    /// A directory that firn has not opened: the runtime reports its errors.
    pub(crate) fn unopened(path: &Path) -> Self {
        Self::new(path, ImageWas::Filled, true)
    }

    /// A directory that an earlier transaction has used. It is opened only if it is still the same one.
    pub fn known(path: &Path, was: ImageWas, id: Option<DirId>) -> Self {
        let known = Self::new(path, was, true);
        if let Ok(dir) = open(path, true)
            && let Ok(metadata) = dir.metadata()
            && id.is_none_or(|id| id == id_of(&metadata))
        {
            // For a directory without an id the journal has recorded only the path.
            let _ = known.keep(dir);
        }
        known
    }

    fn new(path: &Path, was: ImageWas, links: bool) -> Self {
        Self(Arc::new(DirState {
            path: path.to_owned(),
            was,
            links,
            open: OnceLock::new(),
            cleared: AtomicBool::new(false),
        }))
    }

    fn keep(&self, dir: File) -> Result<&Open, ImageDirError> {
        let id = dir.metadata().map(|metadata| id_of(&metadata));
        let id = id.map_err(|source| ImageDirError::io(self.path(), source))?;
        Ok(self.0.open.get_or_init(|| Open {
            dir,
            id,
            watch: OnceLock::new(),
        }))
    }

    /// Its path, for messages.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The path through the descriptor, for this process and others of root's. The plain path while the
    /// directory is not open.
    pub fn inside(&self) -> PathBuf {
        match self.0.open.get() {
            Some(open) => open.inside(),
            None => self.0.path.clone(),
        }
    }

    /// Whether containerd has created it, and will remove it.
    pub(crate) fn is_containerds(&self) -> bool {
        is_containerds(self.path())
    }

    pub fn was(&self) -> ImageWas {
        self.0.was
    }

    pub fn id(&self) -> Option<DirId> {
        self.0.open.get().map(|open| open.id)
    }

    /// Refuses a directory that others may enter, if firn may not or cannot make it private. Changes nothing.
    pub fn admit(&self, others: OpenImageDir) -> Result<(), ImageDirError> {
        let Some(open) = self.0.open.get() else {
            return Ok(());
        };
        let metadata = open
            .dir
            .metadata()
            .map_err(|source| ImageDirError::io(self.path(), source))?;
        let refused = match others {
            OpenImageDir::Allow => false,
            OpenImageDir::Refuse => true,
            // Existing files may be links to other places, or other users may need the directory open.
            OpenImageDir::Tighten => self.0.was == ImageWas::Filled,
        };
        if refused && is_open_to_others(&metadata) {
            return Err(self.open_to_others(&metadata));
        }
        Ok(())
    }

    fn open_to_others(&self, metadata: &Metadata) -> ImageDirError {
        ImageDirError::OpenToOthers {
            image: self.0.path.clone(),
            mode: metadata.mode() & 0o7777,
            owner: metadata.uid(),
        }
    }

    /// Creates the directory if there is none, and starts to watch it. Makes it private as `others` permits.
    pub fn enter(&self, others: Option<OpenImageDir>) -> Result<(), ImageDirError> {
        let failed = |source| ImageDirError::io(self.path(), source);
        let open = match self.0.open.get() {
            Some(open) => open,
            None if self.0.was == ImageWas::Absent => self.make()?,
            None => return Ok(()),
        };
        if let Some(others) = others {
            self.admit(others)?;
            if others == OpenImageDir::Tighten {
                self.tighten(open)?;
            }
        }
        match Watch::begin(&open.inside()) {
            Ok(watch) => drop(open.watch.set(watch)),
            // Without a watch [`ImageDir::check`] still compares the directory itself.
            Err(errno) => log::debug!("cannot watch {}: {errno}", self.path().display()),
        }
        if self.0.was == ImageWas::Empty && !is_empty(&open.dir).map_err(failed)? {
            let path = self.path().display();
            log::warn!("another program has put files into {path} meanwhile");
        }
        self.check()
    }

    fn make(&self) -> Result<&Open, ImageDirError> {
        let path = self.path();
        let failed = |source| ImageDirError::io(path, source);
        let mut builder = DirBuilder::new();
        builder.mode(0o700);
        if let Some(parent) = path.parent() {
            builder.recursive(true).create(parent).map_err(failed)?;
        }
        match builder.recursive(false).create(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(ImageDirError::gone(path)),
            made => made.map_err(failed)?,
        }
        let opened = open(path, false).map_err(failed).and_then(|dir| self.keep(dir));
        if opened.is_err() || self.0.cleared.load(Ordering::SeqCst) {
            let _ = fs::remove_dir(path);
        }
        opened
    }

    fn tighten(&self, open: &Open) -> Result<(), ImageDirError> {
        let failed = |source| ImageDirError::io(self.path(), source);
        let metadata = open.dir.metadata().map_err(failed)?;
        if !is_open_to_others(&metadata) {
            return Ok(());
        }
        if let Err(error) = close_to_others(&open.dir) {
            log::warn!("cannot close {} to others: {error}", self.path().display());
            return Err(self.open_to_others(&open.dir.metadata().map_err(failed)?));
        }
        log::warn!(
            "{} was open to others (mode {:o}, owner {}): it has mode 700 now",
            self.path().display(),
            metadata.mode() & 0o7777,
            metadata.uid()
        );
        Ok(())
    }

    /// Whether the path still names this directory, with all files that were put there.
    pub fn check(&self) -> Result<(), ImageDirError> {
        let Some(open) = self.0.open.get() else {
            return Ok(());
        };
        let lost = open.watch.get().is_some_and(Watch::saw_a_loss);
        if lost || !self.is_there(open) {
            return Err(ImageDirError::gone(self.path()));
        }
        Ok(())
    }

    fn is_there(&self, open: &Open) -> bool {
        let now = if self.0.links {
            fs::metadata(self.path())
        } else {
            fs::symlink_metadata(self.path())
        };
        now.is_ok_and(|metadata| id_of(&metadata) == open.id)
    }

    /// Whether CRIU finished the dump.
    pub(crate) fn check_complete(&self) -> Result<(), ImageDirError> {
        let inside = self.inside();
        match LAST.into_iter().find(|name| !inside.join(name).is_file()) {
            None => Ok(()),
            Some(missing) => Err(ImageDirError::Incomplete {
                image: self.0.path.clone(),
                missing,
            }),
        }
    }

    /// Makes the image's files private. New files are private already; CRIU keeps the mode of existing ones.
    pub fn seal(&self) {
        let sealed = || -> io::Result<()> {
            let inside = self.inside();
            let files = manifest::UntrustedDir::open(&inside)?;
            for entry in fs::read_dir(&inside)? {
                let entry = entry?;
                let (name, metadata) = (entry.file_name(), entry.metadata()?);
                let Some(name) = name.to_str() else { continue };
                let ours = self.0.was != ImageWas::Filled || manifest::is_of_image(name);
                if ours && metadata.is_file() && metadata.mode() & OF_OTHERS != 0 {
                    files.file(name)?.set_permissions(Permissions::from_mode(0o600))?;
                }
            }
            Ok(())
        };
        let path = self.path().display();
        sealed().or_warn(format_args!("cannot set the modes of the files in {path}"));
    }

    /// Lets CRIU write so many pages files to nowhere.
    pub fn discard_pages(&self, count: usize) -> Result<(), ImageDirError> {
        for number in 1..=count {
            let link = self.inside().join(format!("pages-{number}.img"));
            let made = std::os::unix::fs::symlink("/dev/null", link);
            match made {
                // Of an earlier dump into the same directory: CRIU itself writes it.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                made => made.map_err(|source| ImageDirError::io(self.path(), source))?,
            }
        }
        Ok(())
    }

    /// Lets CRIU write the pages files that went nowhere.
    pub fn empty_discarded_pages(&self) -> Result<(), ImageDirError> {
        firn_image::memory::empty_discarded_pages(&self.inside())
            .map_err(|source| ImageDirError::io(self.path(), source))
    }

    /// Makes sure that the image is on its disk: each of its files, the directory, and the name of a new
    /// directory. Fails soon after `stop` is set, and if one of `files` is not there as it was.
    pub fn sync(&self, files: &[ImageFile], stop: &AtomicBool) -> Result<Durable, NotOnDisk> {
        let durable = Durable::image(&self.inside(), self.path(), files, stop)?;
        if let (ImageWas::Absent, Some(above)) = (self.0.was, self.path().parent()) {
            durable::sync_names(above)?;
        }
        Ok(durable)
    }

    /// Removes the manifest of an image that is not on its disk, also from a directory that had files before.
    pub fn remove_manifest(&self) {
        let removed = fs::remove_file(self.inside().join(names::MANIFEST)).unless_absent();
        removed.or_warn(format_args!(
            "cannot remove a manifest in {}",
            self.path().display()
        ));
    }

    /// Removes the files of a failed dump, unless the directory had other files before.
    pub fn clear(&self) {
        self.0.cleared.store(true, Ordering::SeqCst);
        let Some(open) = self.0.open.get() else { return };
        let cleared = match self.0.was {
            ImageWas::Filled => return,
            ImageWas::Empty => remove_entries(&open.inside()),
            ImageWas::Absent => remove_entries(&open.inside()).and_then(|()| {
                if self.is_there(open) {
                    fs::remove_dir(self.path())
                } else {
                    Ok(())
                }
            }),
        };
        let cleared = cleared.unless_absent();
        cleared.or_warn(format_args!("cannot clear {}", self.path().display()));
    }
}

impl Open {
    fn inside(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.dir.as_raw_fd()).into()
    }
}

impl Watch {
    fn begin(dir: &Path) -> nix::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        let files = AddWatchFlags::IN_DELETE | AddWatchFlags::IN_MOVED_FROM;
        let itself = AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF;
        inotify.add_watch(dir, files | itself | AddWatchFlags::IN_ONLYDIR)?;
        Ok(Self {
            inotify,
            seen: AtomicBool::new(false),
        })
    }

    fn saw_a_loss(&self) -> bool {
        loop {
            let events = match self.inotify.read_events() {
                Ok(events) => events,
                Err(Errno::EAGAIN) => break,
                Err(errno) => {
                    log::debug!("cannot read the events of the image directory: {errno}");
                    break;
                }
            };
            let is_hidden = |name: &std::ffi::OsString| name.as_encoded_bytes().starts_with(b".");
            if events
                .iter()
                .any(|event| !event.name.as_ref().is_some_and(is_hidden))
            {
                self.seen.store(true, Ordering::Relaxed);
            }
        }
        self.seen.load(Ordering::Relaxed)
    }
}

fn open(path: &Path, links: bool) -> io::Result<File> {
    let nofollow = if links { 0 } else { libc::O_NOFOLLOW };
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECTORY | nofollow);
    options.open(path)
}

#[expect(clippy::disallowed_methods, reason = "its device is kept with it")]
fn id_of(metadata: &Metadata) -> DirId {
    DirId {
        dev: metadata.dev(),
        ino: metadata.ino(),
    }
}

fn is_empty(dir: &File) -> io::Result<bool> {
    let entries = fs::read_dir(format!("/proc/self/fd/{}", dir.as_raw_fd()))?.next();
    entries.transpose().map(|entry| entry.is_none())
}

fn own_uid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// Makes a directory private to root.
pub(super) fn close_to_others(dir: &File) -> io::Result<()> {
    if !is_open_to_others(&dir.metadata()?) {
        return Ok(());
    }
    fchown(dir, Some(own_uid()), None)?;
    dir.set_permissions(Permissions::from_mode(0o700))?;
    if is_open_to_others(&dir.metadata()?) {
        // The file system has no owners.
        Err(ErrorKind::Unsupported.into())
    } else {
        Ok(())
    }
}

fn is_open_to_others(metadata: &Metadata) -> bool {
    metadata.mode() & OF_OTHERS != 0 || metadata.uid() != own_uid()
}

pub(crate) fn is_containerds(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.as_encoded_bytes()
        .starts_with(names::CONTAINERD_CHECKPOINT.as_bytes())
}

fn remove_entries(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let removed = if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())
        } else {
            fs::remove_file(entry.path())
        };
        // Its owner clears it too.
        removed.unless_absent()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
