//! The files of a copy.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use firn_host::{FileId, UnlessAbsent, is_criu_link, open_below, reopen_regular};
use firn_image::criu;
use firn_image::pod_shm::{Entry, FillShm, Kind, MadeFile, Reader};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, ResolveFlag, open, openat};
use nix::sys::stat::{FchmodatFlags, Mode, fchmodat, fstat, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, fchownat, linkat, mkfifo, symlinkat, unlinkat};
use rustix::fs::{SeekFrom, seek};

use super::held::{held_by, pids_below};
use super::{MOST, handle, is_below, open_dir, read};
use crate::rights;

/// Bytes that are compared at once.
const PIECE: usize = 64 << 10;
/// How often a name is tried that others make and remove meanwhile.
const TRIES: usize = 8;

/// Makes the archived files, and records which.
pub fn fill(request: impl Read) -> Result<()> {
    let request: FillShm = read(request)?;
    let dir = open_dir(&request.dir)?;
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let archive = open(&request.archive, flags, Mode::empty()).map_err(io::Error::from);
    let archive = archive.and_then(reopen_regular);
    let archive = archive.with_context(|| format!("cannot open {}", request.archive.display()))?;
    let image = request.archive.parent().unwrap_or(Path::new(""));
    let links = criu::names_of_links(image).context("cannot read the image")?;
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
        links,
        is_held: |file| held_by(&pids_below(&request.pod), device).contains_key(&file),
        puts: HashMap::new(),
    };
    filler.fill(BufReader::with_capacity(1 << 20, archive))
}

/// Removes what was made, but what a process has open by now.
pub fn empty(request: impl Read) -> Result<()> {
    let request: FillShm = read(request)?;
    let Some(record) = File::open(&request.record).if_present()? else {
        return Ok(());
    };
    let dir = open_dir(&request.dir)?;
    rights::keep_filling()?;
    let held = held_by(&pids_below(&request.pod), dir.metadata()?.dev());
    let mut made = Vec::new();
    for line in BufReader::new(record).split(b'\n') {
        // The last line may be cut.
        made.extend(serde_json::from_slice::<MadeFile>(&line?).ok());
    }
    for MadeFile { name, inode } in made.iter().rev() {
        // What was moved or removed meanwhile is nobody's any more.
        let Ok(place) = Slot::of(&dir, name) else {
            continue;
        };
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
struct Slot<'n> {
    above: OwnedFd,
    name: &'n OsStr,
}

impl<'n> Slot<'n> {
    /// `name` has no `..`.
    fn of(dir: &File, name: &'n [u8]) -> nix::Result<Self> {
        let path = Path::new(OsStr::from_bytes(name));
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
    /// The names of CRIU's links that the image refers to. Those of other containers are nobody's.
    pub links: HashSet<Vec<u8>>,
    pub is_held: H,
    puts: HashMap<Vec<u8>, Put>,
}

impl<H: Fn(FileId) -> bool> Filler<H> {
    #[cfg(any(test, fuzzing))]
    pub fn new(dir: File, record: File, is_held: H) -> Self {
        Self {
            dir,
            record,
            links: HashSet::new(),
            is_held,
            puts: HashMap::new(),
        }
    }

    pub fn fill(mut self, archive: impl Read + Seek) -> Result<()> {
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

    fn put(&mut self, entry: &Entry, archive: &mut Reader<impl Read + Seek>) -> Result<()> {
        let dir = self.dir.try_clone()?;
        let name = Path::new(OsStr::from_bytes(&entry.name));
        ensure!(is_below(name), "a path of the archive leads out of it");
        let is_wanted = !name.file_name().is_some_and(is_criu_link) || self.links.contains(&entry.name);
        let place = Slot::of(&dir, &entry.name);
        let place = match (is_wanted, place) {
            (true, Ok(place)) => place,
            // Others have something else in the place of its directory.
            (false, _) | (_, Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP)) => {
                return match entry.kind {
                    Kind::File(size) => Ok(archive.skip_content(size)?),
                    _ => Ok(()),
                };
            }
            (true, Err(errno)) => return Err(errno.into()),
        };
        let (above, name) = (&place.above, place.name);
        match &entry.kind {
            Kind::Directory => {
                if is_new(mkdirat(above, name, Mode::S_IRWXU))? {
                    self.own_made(entry, &place)?;
                    let made = handle_of_dir(&place)?;
                    fchown(&made, Some(entry.uid), Some(entry.gid))?;
                    made.set_permissions(Permissions::from_mode(entry.mode & 0o3777))?;
                }
            }
            Kind::Symlink(target) => {
                if is_new(symlinkat(OsStr::from_bytes(target), above, name))? {
                    self.own_made(entry, &place)?;
                    own(entry, &place)?;
                }
            }
            Kind::Pipe => {
                let at = format!("/proc/self/fd/{}", above.as_raw_fd());
                if is_new(mkfifo(&Path::new(&at).join(name), Mode::S_IRUSR))? {
                    let file = self.own_made(entry, &place)?;
                    own(entry, &place)?;
                    let mode = Mode::from_bits_truncate(entry.mode & 0o1777);
                    fchmodat(above, name, mode, FchmodatFlags::NoFollowSymlink)?;
                    self.puts.insert(entry.name.clone(), Put { file, is_ours: true });
                }
            }
            Kind::Link(first) => {
                if let Some(put) = self.puts.get(first).copied() {
                    self.link(entry, &place, first, put)?;
                }
            }
            Kind::File(size) => {
                let put = self.put_file(entry, *size, &place, archive)?;
                self.puts.insert(entry.name.clone(), put);
            }
        }
        Ok(())
    }

    /// Records a file before it gets its name.
    fn note(&mut self, entry: &Entry, inode: u64) -> Result<()> {
        let made = MadeFile {
            name: entry.name.clone(),
            inode,
        };
        let mut line = serde_json::to_vec(&made)?;
        line.push(b'\n');
        Ok(self.record.write_all(&line)?)
    }

    /// Records what was made.
    fn own_made(&mut self, entry: &Entry, place: &Slot<'_>) -> Result<FileId> {
        let found = fstatat(&place.above, place.name, AtFlags::AT_SYMLINK_NOFOLLOW)?;
        self.note(entry, found.st_ino)?;
        Ok(FileId::new(found.st_dev, found.st_ino))
    }

    fn put_file(
        &mut self,
        entry: &Entry,
        size: u64,
        place: &Slot<'_>,
        archive: &mut Reader<impl Read + Seek>,
    ) -> Result<Put> {
        let content = archive.position()?;
        for _ in 0..TRIES {
            if let Some(there) = place.handle()? {
                let metadata = there.metadata()?;
                let id = FileId::of(&metadata);
                let is_ours = metadata.is_file() && is_same(entry, size, &there, archive)?;
                let is_leftover = || metadata.is_file() && entry.held && !(self.is_held)(id);
                archive.seek(content)?;
                if is_ours || !is_leftover() {
                    archive.skip_content(size)?;
                    return Ok(Put { file: id, is_ours });
                }
                // Order matters: there may not be room for both.
                unlinkat(&place.above, place.name, UnlinkatFlags::NoRemoveDir)?;
            }
            let file = make_file(entry, size, place, archive)?;
            let id = FileId::of(&file.metadata()?);
            self.note(entry, fstat(&file)?.st_ino)?;
            if is_new(link_to(&file, &place.above, place.name))? {
                return Ok(Put {
                    file: id,
                    is_ours: true,
                });
            }
            archive.seek(content)?;
        }
        bail!("others make and remove it all the time")
    }

    /// Another name of a file of the archive, whatever became of that.
    fn link(&mut self, entry: &Entry, place: &Slot<'_>, first: &[u8], put: Put) -> Result<()> {
        let dir = self.dir.try_clone()?;
        let Some(file) = Slot::of(&dir, first)?.handle()? else {
            return Ok(());
        };
        if FileId::of(&file.metadata()?) != put.file {
            return Ok(());
        }
        let Some(there) = place.handle()? else {
            self.note(entry, fstat(&file)?.st_ino)?;
            let _others = is_new(link_to(&file, &place.above, place.name))?;
            return Ok(());
        };
        let metadata = there.metadata()?;
        let theirs = FileId::of(&metadata);
        if put.is_ours && entry.held && metadata.is_file() && theirs != put.file && !(self.is_held)(theirs) {
            unlinkat(&place.above, place.name, UnlinkatFlags::NoRemoveDir)?;
            self.note(entry, fstat(&file)?.st_ino)?;
            let _others = is_new(link_to(&file, &place.above, place.name))?;
        }
        Ok(())
    }
}

/// A file with its content and without a name.
fn make_file(entry: &Entry, size: u64, place: &Slot<'_>, archive: &mut Reader<impl Read>) -> Result<File> {
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
    Ok(file)
}

/// Gives what has this name its owner.
fn own(entry: &Entry, place: &Slot<'_>) -> Result<()> {
    let owner = (Some(entry.uid.into()), Some(entry.gid.into()));
    Ok(fchownat(
        &place.above,
        place.name,
        owner.0,
        owner.1,
        AtFlags::AT_SYMLINK_NOFOLLOW,
    )?)
}

/// Gives a file a name in the directory.
fn link_to(file: &File, above: &OwnedFd, name: &OsStr) -> nix::Result<()> {
    let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
    linkat(AT_FDCWD, &*opened, above, name, AtFlags::AT_SYMLINK_FOLLOW)
}

fn handle_of_dir(place: &Slot<'_>) -> Result<File> {
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

/// Whether the file has the mode, owner and content of the entry, which is read up to a difference.
fn is_same(entry: &Entry, size: u64, there: &File, archive: &mut Reader<impl Read>) -> Result<bool> {
    let found = there.metadata()?;
    let facts = (found.mode() & 0o7777, found.uid(), found.gid(), found.len());
    if facts != (entry.mode & 0o1777, entry.uid, entry.gid, size) {
        return Ok(false);
    }
    let (there, mut piece, mut end) = (reopen_regular(there)?, Vec::new(), 0);
    let mut read = vec![0; PIECE];
    while let Some(offset) = archive.content(end, size, &mut piece)? {
        if !is_hole(&there, end, offset)? {
            return Ok(false);
        }
        for (nth, part) in piece.chunks(PIECE).enumerate() {
            let at = offset + (nth * PIECE) as u64;
            match there.read_exact_at(&mut read[..part.len()], at) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
                done => done?,
            }
            if read[..part.len()] != *part {
                return Ok(false);
            }
        }
        end = offset + piece.len() as u64;
    }
    is_hole(&there, end, size)
}

/// Whether a file has nothing but zeros in this part, without reading its holes.
fn is_hole(file: &File, begin: u64, end: u64) -> Result<bool> {
    let (mut at, mut read) = (begin, vec![0; PIECE]);
    while at < end {
        let data = match seek(file, SeekFrom::Data(at)) {
            Err(error) if error.raw_os_error() == Errno::ENXIO as i32 => return Ok(true),
            data => data?,
        };
        let until = seek(file, SeekFrom::Hole(data))?.min(end);
        at = data;
        while at < until {
            let length = usize::try_from(until - at).map_or(PIECE, |left| left.min(PIECE));
            file.read_exact_at(&mut read[..length], at)?;
            if read[..length].iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
            at += length as u64;
        }
    }
    Ok(true)
}
