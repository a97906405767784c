//! Writing into a store.
//!
//! A writer has a directory of its own in `new/`. Extents are written there and moved to their place when
//! their content is durable. So an extent in its place is whole, also after a crash of the node.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::fcntl::{Flock, FlockArg, OFlag, openat, renameat};
use nix::sys::stat::Mode;
use nix::sys::statvfs::fstatvfs;
use nix::unistd::{UnlinkatFlags, syncfs, unlinkat};

use super::error::{io, is_full};
use super::{Digest, EXTENT, Index, Store, StoreError, index, layout};
use crate::dir::UntrustedDir;

/// The index, before it gets its name.
const INDEX: &str = "index";

/// Puts the memory of one checkpoint into a store. Several threads may use it at once.
///
/// It ends with [`Writer::finish`] or [`Writer::abort`]. What one has written that was dropped goes with the
/// next writer that is alone, or with `gc`.
#[derive(Debug)]
pub struct Writer {
    store: Store,
    /// Held shared: keeps `gc` out.
    _lock: Flock<File>,
    /// Its directory, in `new/`.
    own: UntrustedDir,
    new: UntrustedDir,
    name: String,
    /// Bytes that the cap leaves.
    room: Option<AtomicU64>,
    /// Reads what the store has already, and writes it again if it is damaged.
    compares: bool,
    /// Makes names of files that are being written.
    count: AtomicU64,
    written: AtomicU64,
    reused: AtomicU64,
}

impl Store {
    /// Begins to write. With a cap, the extents of the store are counted and may not take more bytes than it;
    /// what others write at the same time is not counted.
    pub fn writer(&self, cap: Option<u64>) -> Result<Writer, StoreError> {
        let room = self.ready(cap)?;
        self.writer_within(room)
    }

    /// Does what takes the longer the more the store holds, or others are at work: removes what writers have
    /// left, waits for the lock, and counts the extents if there is a cap. Returns the bytes that it leaves.
    pub fn ready(&self, cap: Option<u64>) -> Result<Option<u64>, StoreError> {
        let (dir, root) = (self.dir(), self.root());
        let new = self.inside(layout::NEW)?;
        if let Some(_alone) = layout::try_lock(dir, root, FlockArg::LockExclusiveNonblock)? {
            clear(&new).map_err(io("clear", root.join(layout::NEW)))?;
        }
        // gc is not at work any more, and the count is right.
        let _lock = layout::lock(dir, root, FlockArg::LockSharedNonblock)?;
        let left = |cap: u64| Ok(cap.saturating_sub(self.extents()?.values().sum()));
        cap.map(left).transpose()
    }

    /// As [`Store::writer`], with what [`Store::ready`] has returned.
    pub fn writer_within(&self, room: Option<u64>) -> Result<Writer, StoreError> {
        Writer::new(self, room)
    }
}

impl Writer {
    fn new(store: &Store, room: Option<u64>) -> Result<Self, StoreError> {
        let (dir, root) = (store.dir(), store.root());
        let new = store.inside(layout::NEW)?;
        let lock = layout::lock(dir, root, FlockArg::LockSharedNonblock)?;
        let name = layout::random_id()?;
        let made = layout::make(&new, &name).and_then(|()| new.inside(&name));
        Ok(Self {
            store: store.clone(),
            _lock: lock,
            own: made.map_err(io("make", root.join(layout::NEW).join(&name)))?,
            new,
            name,
            room: room.map(Into::into),
            compares: false,
            count: AtomicU64::new(0),
            written: AtomicU64::new(0),
            reused: AtomicU64::new(0),
        })
    }

    /// Reads every extent that the store has already: one that is damaged is written again. For a workload
    /// that ends on it: it is believed by its size otherwise.
    #[must_use]
    pub fn comparing(self, compares: bool) -> Self {
        Self { compares, ..self }
    }

    /// Stores one extent of at most [`EXTENT`] bytes and returns its digest. None: they are all zero, and
    /// nothing is stored. What the store has already is not written again.
    pub fn put(&self, bytes: &[u8]) -> Result<Option<Digest>, StoreError> {
        debug_assert!(bytes.len() <= EXTENT, "an extent of {} bytes", bytes.len());
        if is_zero(bytes) {
            return Ok(None);
        }
        let (digest, length) = (Digest::of(bytes), bytes.len() as u64);
        let is_there = if self.compares {
            self.has_own(&digest, length)? || self.is_whole(&digest, length)?
        } else {
            self.has(&digest, length)?
        };
        let count = if is_there {
            &self.reused
        } else {
            let name = self.store.form().name(&digest);
            let packed = self.store.form().packed_extent(&name, bytes);
            self.write(&name, &packed.map_err(io("pack", self.path()))?)?;
            &self.written
        };
        count.fetch_add(length, Ordering::Relaxed);
        Ok(Some(digest))
    }

    /// Makes everything durable, the index last, and returns the index's digest.
    pub fn finish(self, index: &Index) -> Result<Digest, StoreError> {
        match index::to_bytes(index) {
            Ok(bytes) => self.finish_as(&bytes),
            Err(source) => {
                self.abort();
                Err(StoreError::Unwritable { source })
            }
        }
    }

    /// As [`Writer::finish`], with an index of another store as [`Store::verified_index`] has read it.
    pub fn finish_as(mut self, index: &[u8]) -> Result<Digest, StoreError> {
        let stored = self.publish().and_then(|()| self.publish_index(index));
        self.abort();
        stored
    }

    /// Removes what is not published.
    pub fn abort(self) {
        // What cannot be removed is left to the next writer that is alone, or to gc.
        let _ = remove(&self.new, &self.name);
    }

    /// Makes the extents durable that were put so far, and moves them to their place. Nobody can put one
    /// meanwhile.
    pub fn publish(&mut self) -> Result<(), StoreError> {
        let path = self.path();
        let names = self.own.names().map_err(io("list", &path))?;
        // Order matters: an extent in its place is whole.
        self.sync()?;
        for name in names {
            if let Ok(digest) = name.parse::<Digest>() {
                self.move_in(&digest).map_err(io("move", path.join(&name)))?;
            }
        }
        self.sync()
    }

    /// Bytes of memory that were written.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Bytes that the store had already.
    pub fn reused(&self) -> u64 {
        self.reused.load(Ordering::Relaxed)
    }

    fn publish_index(&self, bytes: &[u8]) -> Result<Digest, StoreError> {
        let path = self.path().join(INDEX);
        let digest = Digest::of(bytes);
        let packed = self.store.form().packed_index(&digest, bytes);
        let bytes = &*packed.map_err(io("pack", &path))?;
        let images = self.store.images_dir();
        let write = || {
            create(&self.own, INDEX, bytes)?.sync_all()?;
            renameat(&self.own, INDEX, images, digest.to_string().as_str())?;
            images.handle()?.sync_all()
        };
        write().map_err(|error| self.failed(error, path, bytes.len() as u64))?;
        Ok(digest)
    }

    /// Whether an extent is in its place or among those of this writer. One of another size is written again.
    pub fn has(&self, digest: &Digest, length: u64) -> Result<bool, StoreError> {
        Ok(self.store.has(digest, length)? || self.has_own(digest, length)?)
    }

    /// Whether an extent is in its place, with its content. One that cannot be read is not.
    fn is_whole(&self, digest: &Digest, length: u64) -> Result<bool, StoreError> {
        if !self.store.has(digest, length)? {
            return Ok(false);
        }
        let mut buffer = vec![0; usize::try_from(length).unwrap_or(EXTENT)];
        Ok(self.store.read(digest, &mut buffer).is_ok())
    }

    fn has_own(&self, digest: &Digest, length: u64) -> Result<bool, StoreError> {
        let form = self.store.form();
        let own = super::size(&self.own, &form.name(digest).to_string());
        let own = own.map_err(io("look for", self.path()))?;
        Ok(own.is_some_and(|size| form.may_hold(size, length)))
    }

    fn write(&self, name: &Digest, bytes: &[u8]) -> Result<(), StoreError> {
        let length = bytes.len() as u64;
        self.reserve(length)?;
        let temporary = self.count.fetch_add(1, Ordering::Relaxed).to_string();
        let written = create(&self.own, &temporary, bytes).and_then(|_| {
            let name = name.to_string();
            Ok(renameat(&self.own, temporary.as_str(), &self.own, name.as_str())?)
        });
        written.map_err(|error| {
            // It takes the room that others need; what cannot be removed now goes with the directory.
            let _ = unlinkat(&self.own, temporary.as_str(), UnlinkatFlags::NoRemoveDir);
            self.failed(error, self.path().join(&temporary), length)
        })
    }

    /// Counts bytes against the cap.
    fn reserve(&self, length: u64) -> Result<(), StoreError> {
        let Some(room) = &self.room else {
            return Ok(());
        };
        let reserve = |free: u64| free.checked_sub(length);
        let reserved = room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve);
        reserved.map(drop).map_err(|free| StoreError::Full {
            path: self.store.root().to_owned(),
            needed: length,
            free,
            limit: "its cap",
        })
    }

    fn move_in(&self, digest: &Digest) -> io::Result<()> {
        let (name, extents) = (digest.to_string(), self.store.extents_dir());
        layout::make(extents, &name[..2])?;
        let to = extents.inside(&name[..2])?;
        Ok(renameat(&self.own, name.as_str(), &to, name.as_str())?)
    }

    fn sync(&self) -> Result<(), StoreError> {
        syncfs(&self.own).map_err(|error| self.failed(error.into(), self.path(), self.written()))
    }

    fn failed(&self, error: io::Error, path: PathBuf, needed: u64) -> StoreError {
        if !is_full(&error) {
            return io("write", path)(error);
        }
        let free = fstatvfs(&self.own).map_or(0, |fs| fs.blocks_available() * fs.fragment_size());
        StoreError::Full {
            path: self.store.root().to_owned(),
            needed,
            free,
            limit: "its file system",
        }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.store.root().join(layout::NEW).join(&self.name)
    }
}

/// Whether all bytes are zero. Sixteen at once: musl's memcmp takes them one by one.
pub fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}

/// A new file with this content.
fn create(dir: &UntrustedDir, name: &str, bytes: &[u8]) -> io::Result<File> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut file = File::from(openat(dir, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?);
    file.write_all(bytes)?;
    Ok(file)
}

/// Removes what writers have left. The caller holds the lock alone.
pub(super) fn clear(new: &UntrustedDir) -> io::Result<()> {
    new.names()?.iter().try_for_each(|name| remove(new, name))
}

/// Removes a writer's directory, or whatever else has its name.
fn remove(new: &UntrustedDir, name: &str) -> io::Result<()> {
    let Ok(own) = new.inside(name) else {
        return Ok(unlinkat(new, name, UnlinkatFlags::NoRemoveDir)?);
    };
    for file in own.names()? {
        unlinkat(&own, file.as_str(), UnlinkatFlags::NoRemoveDir)?;
    }
    Ok(unlinkat(new, name, UnlinkatFlags::RemoveDir)?)
}
