//! The archive of a checkpoint.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use firn_host::{FileId, UnlessAbsent, is_criu_link, reopen_regular};
use firn_image::pod_shm::{Entry, KeepShm, Kind, Writer};
use nix::errno::Errno;
use nix::fcntl::readlinkat;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use rustix::fs::{SeekFrom, seek};

use super::held::{Held, held_by, pids_below};
use super::{MOST, handle, open_dir, read};
use crate::rights;

/// Directories within each other at most.
pub const DEEPEST: usize = 64;
/// The archive until it is complete.
const UNFINISHED: &str = ".dev-shm";

/// Archives the files. Without any, there is no archive, or an empty one in the place of an earlier one.
pub fn keep(request: impl Read) -> Result<()> {
    let request: KeepShm = read(request)?;
    let dir = open_dir(&request.dir)?;
    let is_tmpfs = fstatfs(&dir)?.filesystem_type() == TMPFS_MAGIC;
    let device = dir.metadata()?.dev();
    let mut others = pids_below(&request.pod);
    others.retain(|pid| !request.own.contains(pid));
    let (own, others) = (held_by(&request.own, device), held_by(&others, device));
    rights::keep_archiving()?;
    let found = if is_tmpfs {
        kept(&dir, &own, &others)?
    } else {
        Vec::new()
    };
    let archive = &request.archive;
    if found.is_empty() && request.earlier.symlink_metadata().is_err() {
        return Ok(());
    }
    let unfinished = archive.with_file_name(UNFINISHED);
    fs::remove_file(&unfinished).unless_absent()?;
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&unfinished);
    let file = file.with_context(|| format!("cannot make {}", unfinished.display()))?;
    let written = write(&dir, &found, &own, BufWriter::new(&file));
    // Order matters: nothing was there that CRIU or a client could take for the archive.
    let kept = written.and_then(|()| Ok(fs::rename(&unfinished, archive)?));
    if kept.is_err() {
        let _gone = fs::remove_file(&unfinished);
    }
    kept
}

/// What is below the directory.
pub struct ShmFile {
    pub path: PathBuf,
    id: FileId,
    is_dir: bool,
}

/// Everything but what is only of others: files and pipes that they alone have open, and directories with
/// nothing else. Names of CRIU's come last: all names of a file have the fate of the first.
pub fn kept(dir: &File, own: &Held, others: &Held) -> Result<Vec<ShmFile>> {
    let mut found = Vec::new();
    list(dir, Path::new(""), &mut found)?;
    let is_others = |file: &ShmFile| !own.contains_key(&file.id) && others.contains_key(&file.id);
    let (mut used, mut theirs) = (HashSet::new(), HashSet::new());
    for file in &found {
        let of = if is_others(file) { &mut theirs } else { &mut used };
        if !file.is_dir || is_others(file) {
            of.extend(file.path.ancestors().skip(1).map(Path::to_owned));
        }
    }
    found.retain(|file| {
        let has_only_theirs = theirs.contains(&file.path) && !used.contains(&file.path);
        !is_others(file) && (!file.is_dir || !has_only_theirs)
    });
    found.sort_by_key(|file| !file.is_dir && is_criu_link(file.path.file_name().unwrap_or_default()));
    Ok(found)
}

/// Adds everything below `at`, each after the directory that it is in. Others may change it meanwhile.
fn list(dir: &File, at: &Path, found: &mut Vec<ShmFile>) -> Result<()> {
    ensure!(
        at.components().count() <= DEEPEST,
        "more than {DEEPEST} directories are in each other"
    );
    let Some(opened) = handle(dir, &Path::new(".").join(at))? else {
        return Ok(());
    };
    for entry in fs::read_dir(format!("/proc/self/fd/{}/", opened.as_raw_fd()))? {
        let path = at.join(entry?.file_name());
        let Some(file) = handle(dir, &path)? else {
            continue;
        };
        let metadata = file.metadata()?;
        ensure!(found.len() < MOST, "there are more than {MOST} files");
        found.push(ShmFile {
            path: path.clone(),
            id: FileId::of(&metadata),
            is_dir: metadata.is_dir(),
        });
        if metadata.is_dir() {
            list(dir, &path, found)?;
        }
    }
    Ok(())
}

/// Writes the archive. It has every file that the container has open by a name that is there.
pub fn write(dir: &File, found: &[ShmFile], own: &Held, into: impl Write) -> Result<()> {
    let mut archive = Writer::begin(into)?;
    let (mut names, mut directories) = (HashMap::new(), HashSet::new());
    for ShmFile { path, .. } in found {
        let Some(file) = handle(dir, path)? else {
            continue;
        };
        let above = path.parent().unwrap_or(Path::new(""));
        if above != Path::new("") && !directories.contains(above) {
            continue;
        }
        if file.metadata()?.is_dir() {
            directories.insert(path.as_path());
        }
        let added = add(&mut archive, path, &file, own, &mut names);
        added.with_context(|| path.display().to_string())?;
    }
    let lost = own
        .iter()
        .find(|(file, is_named)| **is_named && !names.contains_key(*file));
    ensure!(
        lost.is_none(),
        "a file that the container has open was renamed or removed meanwhile"
    );
    Ok(archive.end()?)
}

/// Adds one. Sockets are made by CRIU, and device nodes by nobody. `names` has the first name of every file.
fn add(
    archive: &mut Writer<impl Write>,
    path: &Path,
    handle: &File,
    own: &Held,
    names: &mut HashMap<FileId, Vec<u8>>,
) -> Result<()> {
    let metadata = handle.metadata()?;
    let (id, kind) = (FileId::of(&metadata), metadata.file_type());
    let name = path.as_os_str().as_bytes().to_vec();
    let kind = if kind.is_dir() {
        Kind::Directory
    } else if kind.is_symlink() {
        Kind::Symlink(readlinkat(handle, "")?.into_vec())
    } else if !kind.is_file() && !kind.is_fifo() {
        return Ok(());
    } else if let Some(first) = names.get(&id) {
        Kind::Link(first.clone())
    } else if kind.is_fifo() {
        Kind::Pipe
    } else {
        Kind::File(metadata.len())
    };
    names.entry(id).or_insert_with(|| name.clone());
    ensure!(
        metadata.is_dir() || !own.contains_key(&id) || metadata.mode() & 0o6000 == 0,
        "the container has it open, and no copy gets its set-user-ID or set-group-ID bit"
    );
    archive.entry(&Entry {
        name,
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        gid: metadata.gid(),
        held: own.contains_key(&id),
        kind: kind.clone(),
    })?;
    if let Kind::File(size) = kind {
        add_content(archive, &mut reopen_regular(handle)?, size)?;
    }
    Ok(())
}

/// The content without its holes.
fn add_content(archive: &mut Writer<impl Write>, file: &mut File, size: u64) -> Result<()> {
    let mut end = 0;
    while end < size {
        let begin = match seek(&*file, SeekFrom::Data(end)) {
            Err(error) if error.raw_os_error() == Errno::ENXIO as i32 => break,
            begin => begin?.min(size),
        };
        end = seek(&*file, SeekFrom::Hole(begin))?.min(size);
        file.seek(io::SeekFrom::Start(begin))?;
        archive.content(begin, end.saturating_sub(begin), file)?;
    }
    ensure!(file.metadata()?.len() == size, "it was resized meanwhile");
    Ok(archive.end_content()?)
}
