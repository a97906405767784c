//! The files of a copy.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use firn_host::{FileId, UnlessAbsent, open_below, reopen_regular};
use firn_image::pod_shm::{Entry, FillShm, Kind, MadeFile, Reader};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, ResolveFlag, open, openat, renameat};
use nix::sys::stat::{Mode, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, linkat, mkfifo, symlinkat, unlinkat};
use rustix::fs::{SeekFrom, seek};

use super::held::held_by;
use super::{MOST, handle, is_below, open_dir, read};
use crate::rights;

/// What a name has until it replaces a leftover; the inode follows.
const REPLACING: &str = ".firn-restore-";
/// Bytes that are compared at once.
const PIECE: usize = 64 << 10;

/// Makes the archived files, and records which.
pub fn fill(request: impl Read) -> Result<()> {
    let request: FillShm = read(request)?;
    let dir = open_dir(&request.dir)?;
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let archive = open(&request.archive, flags, Mode::empty()).map_err(io::Error::from);
    let archive = archive.and_then(reopen_regular);
    let archive = archive.with_context(|| format!("cannot open {}", request.archive.display()))?;
    let record = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&request.record);
    let record = record.with_context(|| format!("cannot make {}", request.record.display()))?;
    rights::keep_filling()?;
    let device = dir.metadata()?.dev();
    let filler = Filler {
        dir,
        record,
        is_held: |file| held_by(&request.pids, device).contains_key(&file),
        puts: HashMap::new(),
    };
    filler.fill(BufReader::with_capacity(1 << 20, archive))
}

/// Removes what was made, but what a process has open by now.
pub fn empty(request: impl Read) -> Result<()> {
    let request: FillShm = read(request)?;
    let record = match File::open(&request.record) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        record => record?,
    };
    let dir = open_dir(&request.dir)?;
    rights::keep_filling()?;
    let held = held_by(&request.pids, dir.metadata()?.dev());
    let mut made = Vec::new();
    for line in BufReader::new(record).split(b'\n') {
        // The last line may be cut: what it names was not made.
        made.extend(serde_json::from_slice::<MadeFile>(&line?).ok());
    }
    for MadeFile { name, inode } in made.iter().rev() {
        let place = Place::of(&dir, name)?;
        let Ok(found) = fstatat(&place.above, place.name, AtFlags::AT_SYMLINK_NOFOLLOW) else {
            continue;
        };
        if found.st_ino == *inode && !held.contains_key(&FileId::new(found.st_dev, found.st_ino)) {
            place.remove();
        }
    }
    Ok(fs::remove_file(&request.record).unless_absent()?)
}

/// A directory and a name in it.
struct Place<'n> {
    above: OwnedFd,
    name: &'n OsStr,
}

impl<'n> Place<'n> {
    fn of(dir: &File, name: &'n [u8]) -> Result<Self> {
        let path = Path::new(OsStr::from_bytes(name));
        ensure!(is_below(path), "a path of the archive leads out of it");
        let above = Path::new(".").join(path.parent().unwrap_or(Path::new("")));
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
        let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
        Ok(Self {
            above: open_below(dir, &above, flags, resolve)?,
            name: path.file_name().unwrap_or_default(),
        })
    }

    /// A directory stays while others have files there.
    fn remove(&self) {
        let removed = unlinkat(&self.above, self.name, UnlinkatFlags::NoRemoveDir);
        if removed == Err(Errno::EISDIR) {
            let _used = unlinkat(&self.above, self.name, UnlinkatFlags::RemoveDir);
        }
    }

    fn handle(&self) -> io::Result<Option<File>> {
        handle(&File::from(self.above.try_clone()?), Path::new(self.name))
    }
}

/// What became of a file of the archive.
#[derive(Clone, Copy)]
struct Put {
    file: FileId,
    /// It is the archive's, whose names may take the places of leftovers.
    is_ours: bool,
}

/// `is_held` looks at this moment whether a process of the pod has a file.
pub struct Filler<H> {
    pub dir: File,
    pub record: File,
    pub is_held: H,
    puts: HashMap<Vec<u8>, Put>,
}

impl<H: Fn(FileId) -> bool> Filler<H> {
    #[cfg(test)]
    pub fn new(dir: File, record: File, is_held: H) -> Self {
        Self {
            dir,
            record,
            is_held,
            puts: HashMap::new(),
        }
    }

    pub fn fill(mut self, archive: impl Read) -> Result<()> {
        let mut archive = Reader::begin(archive)?;
        let mut count = 0;
        while let Some(entry) = archive.entry()? {
            count += 1;
            ensure!(count <= MOST, "there are more than {MOST} files");
            let put = self.put(&entry, &mut archive);
            put.with_context(|| OsStr::from_bytes(&entry.name).display().to_string())?;
        }
        Ok(())
    }

    fn put(&mut self, entry: &Entry, archive: &mut Reader<impl Read>) -> Result<()> {
        let dir = self.dir.try_clone()?;
        let place = Place::of(&dir, &entry.name)?;
        let (above, name) = (&place.above, place.name);
        match &entry.kind {
            Kind::Directory => {
                let mode = Mode::from_bits_truncate(entry.mode);
                if is_new(mkdirat(above, name, Mode::S_IRWXU))? {
                    self.own(entry, &place)?;
                    let made = handle_of_dir(&place)?;
                    fchown(&made, Some(entry.uid), Some(entry.gid))?;
                    made.set_permissions(Permissions::from_mode(mode.bits()))?;
                }
            }
            Kind::Symlink(target) => {
                if is_new(symlinkat(OsStr::from_bytes(target), above, name))? {
                    self.own(entry, &place)?;
                    let owner = (Some(entry.uid.into()), Some(entry.gid.into()));
                    nix::unistd::fchownat(above, name, owner.0, owner.1, AtFlags::AT_SYMLINK_NOFOLLOW)?;
                }
            }
            Kind::Pipe => {
                let mode = Mode::from_bits_truncate(entry.mode);
                let at = format!("/proc/self/fd/{}", above.as_raw_fd());
                if is_new(mkfifo(&Path::new(&at).join(name), Mode::S_IRUSR))? {
                    self.own(entry, &place)?;
                    let owner = (Some(entry.uid.into()), Some(entry.gid.into()));
                    nix::unistd::fchownat(above, name, owner.0, owner.1, AtFlags::AT_SYMLINK_NOFOLLOW)?;
                    let follow = nix::sys::stat::FchmodatFlags::NoFollowSymlink;
                    nix::sys::stat::fchmodat(above, name, mode, follow)?;
                }
            }
            Kind::Link(first) => {
                if let Some(put) = self.puts.get(first).copied() {
                    self.link(entry, &place, first, put)?;
                }
            }
            Kind::File(size) => self.put_file(entry, *size, &place, archive)?,
        }
        Ok(())
    }

    /// Records what was made where nothing was.
    fn own(&mut self, entry: &Entry, place: &Place<'_>) -> Result<FileId> {
        let found = fstatat(&place.above, place.name, AtFlags::AT_SYMLINK_NOFOLLOW)?;
        let made = MadeFile {
            name: entry.name.clone(),
            inode: found.st_ino,
        };
        let mut line = serde_json::to_vec(&made)?;
        line.push(b'\n');
        self.record.write_all(&line)?;
        Ok(FileId::new(found.st_dev, found.st_ino))
    }

    fn put_file(
        &mut self,
        entry: &Entry,
        size: u64,
        place: &Place<'_>,
        archive: &mut Reader<impl Read>,
    ) -> Result<()> {
        let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
        let file = File::from(openat(&place.above, ".", flags, Mode::S_IRUSR)?);
        file.set_len(size)?;
        let (mut piece, mut end) = (Vec::new(), 0);
        while let Some(offset) = archive.content(end, size, &mut piece)? {
            file.write_all_at(&piece, offset)?;
            end = offset + piece.len() as u64;
        }
        fchown(&file, Some(entry.uid), Some(entry.gid))?;
        // No set-user-ID: what a restored process may become is decided by its image alone.
        file.set_permissions(Permissions::from_mode(entry.mode & 0o1777))?;
        let put = if is_new(link_to(&file, &place.above, place.name))? {
            let file = self.own(entry, place)?;
            Put { file, is_ours: true }
        } else {
            self.meet(entry, &file, place)?
        };
        self.puts.insert(entry.name.clone(), put);
        Ok(())
    }

    /// Something has the name already.
    fn meet(&self, entry: &Entry, file: &File, place: &Place<'_>) -> Result<Put> {
        let id = FileId::of(&file.metadata()?);
        let Some(there) = place.handle()? else {
            return Ok(Put {
                file: id,
                is_ours: false,
            });
        };
        let theirs = FileId::of(&there.metadata()?);
        if !there.metadata()?.is_file() {
            return Ok(Put {
                file: theirs,
                is_ours: false,
            });
        }
        if is_same(file, &reopen_regular(&there)?)? {
            return Ok(Put {
                file: theirs,
                is_ours: true,
            });
        }
        if !entry.held || (self.is_held)(theirs) {
            return Ok(Put {
                file: theirs,
                is_ours: false,
            });
        }
        replace(file, place)?;
        Ok(Put {
            file: id,
            is_ours: true,
        })
    }

    /// Another name of a file of the archive, whatever became of that.
    fn link(&mut self, entry: &Entry, place: &Place<'_>, first: &[u8], put: Put) -> Result<()> {
        let dir = self.dir.try_clone()?;
        let Some(file) = Place::of(&dir, first)?.handle()? else {
            return Ok(());
        };
        if FileId::of(&file.metadata()?) != put.file {
            return Ok(());
        }
        if is_new(link_to(&file, &place.above, place.name))? {
            self.own(entry, place)?;
            return Ok(());
        }
        let Some(there) = place.handle()? else {
            return Ok(());
        };
        let (theirs, is_file) = (FileId::of(&there.metadata()?), there.metadata()?.is_file());
        if put.is_ours && entry.held && is_file && theirs != put.file && !(self.is_held)(theirs) {
            replace(&file, place)?;
        }
        Ok(())
    }
}

/// Gives a file a name in the directory.
fn link_to(file: &File, above: &OwnedFd, name: &OsStr) -> nix::Result<()> {
    let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
    linkat(AT_FDCWD, &*opened, above, name, AtFlags::AT_SYMLINK_FOLLOW)
}

/// Puts a file into the place of what is there.
fn replace(file: &File, place: &Place<'_>) -> Result<()> {
    let other = format!("{REPLACING}{}", std::process::id());
    link_to(file, &place.above, OsStr::new(&other))?;
    let renamed = renameat(&place.above, &*other, &place.above, place.name);
    if renamed.is_err() {
        let _gone = unlinkat(&place.above, &*other, UnlinkatFlags::NoRemoveDir);
    }
    Ok(renamed?)
}

fn handle_of_dir(place: &Place<'_>) -> Result<File> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Ok(File::from(openat(
        &place.above,
        place.name,
        flags,
        Mode::empty(),
    )?))
}

/// False if something is there already.
fn is_new(made: nix::Result<()>) -> Result<bool> {
    match made {
        Err(Errno::EEXIST) => Ok(false),
        made => Ok(made.map(|()| true)?),
    }
}

/// Whether both files have the same mode, owner and content.
pub fn is_same(one: &File, other: &File) -> Result<bool> {
    let facts = |file: &File| -> io::Result<_> {
        let found = file.metadata()?;
        Ok((found.mode(), found.uid(), found.gid(), found.len()))
    };
    Ok(facts(one)? == facts(other)? && is_in(one, other)? && is_in(other, one)?)
}

/// Whether everything but the holes of `one` is in `other`.
fn is_in(one: &File, other: &File) -> Result<bool> {
    let (size, mut buffers) = (one.metadata()?.len(), [vec![0; PIECE], vec![0; PIECE]]);
    let mut end = 0;
    while end < size {
        let begin = match seek(one, SeekFrom::Data(end)) {
            Err(error) if error.raw_os_error() == Errno::ENXIO as i32 => return Ok(true),
            begin => begin?,
        };
        end = seek(one, SeekFrom::Hole(begin))?.min(size);
        let mut at = begin;
        while at < end {
            let length = usize::try_from(end - at).map_or(PIECE, |left| left.min(PIECE));
            let [a, b] = &mut buffers;
            for (file, buffer) in [(one, &mut *a), (other, &mut *b)] {
                match file.read_exact_at(&mut buffer[..length], at) {
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
                    read => read?,
                }
            }
            if a[..length] != b[..length] {
                return Ok(false);
            }
            at += length as u64;
        }
    }
    Ok(true)
}
