//! The files that a container had written before its checkpoint, for a copy that gets them from an archive.
//!
//! The archive is a layer as OCI images have them, of the container's own root file system; its content is
//! hostile. It is unpacked from within the new root file system, which no path and no link leads out of, as
//! far as it takes no more than a given number of bytes. Device nodes are left out: the archive gives no
//! right to a device.

#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod kept;

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{PermissionsExt, chroot, lchown};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use firn_host::reopen_regular;
use flate2::bufread::MultiGzDecoder;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use rustix::fs::{XattrFlags, lsetxattr};
use tar::{Archive, Entry, EntryType};

#[cfg_attr(fuzzing, expect(unused_imports, reason = "no target calls it"))]
pub use kept::keep;

use crate::cap::{Cap, ENTRY, limit_process};
use crate::rights;

/// The name of an entry that removes the file of the rest of its name.
const REMOVED: &[u8] = b".wh.";
/// The name of an entry that empties its directory of what the image had there.
const EMPTIED: &[u8] = b".wh..wh..opq";
/// Before the name of an extended attribute.
const ATTRIBUTE: &str = "SCHILY.xattr.";
/// An archive ends with a block of zeros.
const BLOCK: u64 = 512;

/// Unpacks the archive into the root file system, and returns how many device nodes were left out. It may
/// take `cap` bytes there, with 0 half of what is free. This process is in that root file system afterwards,
/// with a part of its rights.
pub fn apply(root: &Path, archive: &Path, cap: &str) -> Result<usize> {
    let opened = || {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        reopen_regular(open(archive, flags, Mode::empty())?)
    };
    let file = opened().with_context(|| format!("cannot open {}", archive.display()))?;
    chroot(root).with_context(|| format!("cannot enter {}", root.display()))?;
    std::env::set_current_dir("/").context("cannot enter the root file system")?;
    rights::keep_writing()?;
    limit_process()?;
    let cap = Cap::of(cap, Path::new("/"))?;
    let unpacked = decompressed(BufReader::new(file)).and_then(|source| unpack(source, Path::new("/"), &cap));
    unpacked.with_context(|| format!("cannot unpack {}", archive.display()))
}

/// containerd's layers are compressed by gzip, those of other runtimes not at all.
fn decompressed<'a>(mut source: impl BufRead + 'a) -> Result<Box<dyn Read + 'a>> {
    Ok(match source.fill_buf()? {
        [0x1f, 0x8b, ..] => Box::new(MultiGzDecoder::new(source)),
        _ => Box::new(source),
    })
}

fn unpack(source: impl Read, root: &Path, cap: &Cap) -> Result<usize> {
    let source = cap.reader(source);
    let (mut devices, mut written) = (0, HashSet::new());
    let mut archive = Archive::new(Ended { source, zeros: 0 });
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    archive.set_overwrite(true);
    for entry in archive.entries()? {
        let mut entry = entry?;
        cap.take(ENTRY)?;
        // Order matters: what follows a record that is not understood may look like another one, with a path.
        for extension in entry.pax_extensions()?.into_iter().flatten() {
            extension.context("an entry has attributes that are not understood")?;
        }
        match entry.header().entry_type() {
            EntryType::Char | EntryType::Block => devices += 1,
            EntryType::XGlobalHeader | EntryType::XHeader => {}
            _ => {
                let shown = entry.path()?.display().to_string();
                apply_entry(entry, root, &mut written).with_context(|| shown)?;
            }
        }
    }
    ensure!(archive.into_inner().zeros >= BLOCK, "the archive has no end");
    Ok(devices)
}

fn apply_entry<R: Read>(mut entry: Entry<'_, R>, root: &Path, written: &mut HashSet<PathBuf>) -> Result<()> {
    let path = entry.path()?.into_owned();
    match removed(&path)? {
        Some(Removed::ContentOf(dir)) => return Ok(empty(&inside(root, &dir)?, written)?),
        Some(Removed::File(file)) => return Ok(remove(&inside(root, &file)?)?),
        None => {}
    }
    let at = inside(root, &path)?;
    let kind = entry.header().entry_type();
    let is_dir = kind.is_dir() || entry.path_bytes().ends_with(b"/");
    make_room(&at, is_dir)?;
    written.extend(at.ancestors().map(Path::to_owned));
    if kind.is_fifo() {
        let header = entry.header();
        let (uid, gid) = (u32::try_from(header.uid()?)?, u32::try_from(header.gid()?)?);
        mkfifo(&at, Mode::S_IRUSR)?;
        lchown(&at, Some(uid), Some(gid))?;
        return Ok(fs::set_permissions(
            &at,
            fs::Permissions::from_mode(header.mode()?),
        )?);
    }
    let attributes = attributes(&mut entry)?;
    ensure!(
        entry.unpack_in(root)?,
        "the path leads out of the root file system"
    );
    if !kind.is_symlink() {
        for (name, value) in attributes {
            lsetxattr(&at, &*name, &value, XattrFlags::empty())
                .with_context(|| format!("cannot set {}", name.display()))?;
        }
    }
    Ok(())
}

/// Extended attributes that belong to the file alone, as those of an image: others are for who runs the host.
fn attributes<R: Read>(entry: &mut Entry<'_, R>) -> Result<Vec<(OsString, Vec<u8>)>> {
    let mut found = Vec::new();
    for extension in entry.pax_extensions()?.into_iter().flatten() {
        let extension = extension?;
        let Some(name) = extension.key_bytes().strip_prefix(ATTRIBUTE.as_bytes()) else {
            continue;
        };
        if may_be_kept(name) {
            found.push((
                OsString::from_vec(name.to_vec()),
                extension.value_bytes().to_vec(),
            ));
        }
    }
    Ok(found)
}

fn may_be_kept(name: &[u8]) -> bool {
    name == b"security.capability" || name.starts_with(b"user.") && !name.starts_with(b"user.overlay.")
}

/// Counts the zeros at the end of what was read.
struct Ended<R> {
    source: R,
    zeros: u64,
}

impl<R: Read> Read for Ended<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read(buffer)?;
        let zeros = buffer[..count]
            .iter()
            .rev()
            .take_while(|byte| **byte == 0)
            .count();
        self.zeros = zeros as u64 + if zeros == count { self.zeros } else { 0 };
        Ok(count)
    }
}

#[derive(Debug, PartialEq)]
enum Removed {
    File(PathBuf),
    ContentOf(PathBuf),
}

fn removed(path: &Path) -> Result<Option<Removed>> {
    let name = path.file_name().unwrap_or_default().as_bytes();
    let dir = path.parent().unwrap_or(Path::new(""));
    if name == EMPTIED {
        return Ok(Some(Removed::ContentOf(dir.to_owned())));
    }
    let Some(name) = name.strip_prefix(REMOVED) else {
        return Ok(None);
    };
    ensure!(![&b""[..], b".", b".."].contains(&name), "it removes no file");
    Ok(Some(Removed::File(dir.join(OsStr::from_bytes(name)))))
}

/// A path of the archive below the root; the kernel follows its links inside of it.
fn inside(root: &Path, path: &Path) -> Result<PathBuf> {
    let mut at = root.to_owned();
    for part in path.components() {
        match part {
            Component::Normal(name) => at.push(name),
            Component::RootDir | Component::CurDir => {}
            _ => bail!("the path leads out of the root file system"),
        }
    }
    Ok(at)
}

/// What is of another kind than the entry gives way to it.
fn make_room(at: &Path, is_dir: bool) -> io::Result<()> {
    match fs::symlink_metadata(at) {
        Ok(there) if there.is_dir() && is_dir => Ok(()),
        Ok(_) => remove(at),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn remove(at: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(at) {
        Ok(there) if there.is_dir() => fs::remove_dir_all(at),
        Ok(_) => fs::remove_file(at),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// What this layer has written stays.
fn empty(dir: &Path, written: &HashSet<PathBuf>) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        if !written.contains(&path) {
            remove(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
    use std::process::Command;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use tar::{Builder, Header};

    use super::*;

    const FILE: EntryType = EntryType::Regular;

    /// As hostile as it can be: no check of the path.
    fn entry(builder: &mut Builder<Vec<u8>>, path: &str, kind: EntryType, text: &str) {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o640);
        header.set_uid(1000);
        header.set_gid(1000);
        header.set_mtime(0);
        header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
        let is_link = [EntryType::Symlink, EntryType::Link].contains(&kind);
        if is_link {
            header.as_gnu_mut().unwrap().linkname[..text.len()].copy_from_slice(text.as_bytes());
        }
        let text = if is_link { "" } else { text };
        header.set_size(text.len() as u64);
        header.set_cksum();
        builder.append(&header, text.as_bytes()).unwrap();
    }

    fn layer(entries: &[(&str, EntryType, &str)]) -> Vec<u8> {
        let mut builder = Builder::new(Vec::new());
        for (path, kind, text) in entries {
            entry(&mut builder, path, *kind, text);
        }
        builder.into_inner().unwrap()
    }

    fn plenty() -> Cap {
        Cap::new(1 << 30)
    }

    /// A few KiB of an archive that would be a few MiB of files, of what is skipped, of names.
    #[test]
    fn a_small_archive_takes_no_more_than_it_may() {
        let zeros = "\0".repeat(4 << 20);
        let names: Vec<String> = (0..600).map(|n| format!("file-{n}")).collect();
        let names: Vec<_> = names.iter().map(|name| (&**name, FILE, "")).collect();
        for (what, entries) in [
            ("a file", &[("bomb", FILE, &*zeros)][..]),
            ("what is left out", &[("node", EntryType::Char, &*zeros)]),
            ("what removes a file", &[(".wh.bomb", FILE, &*zeros)]),
            ("names", &names),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let mut compressed = GzEncoder::new(Vec::new(), Compression::best());
            compressed.write_all(&layer(entries)).unwrap();
            let bomb = compressed.finish().unwrap();
            assert!(bomb.len() < 64 << 10, "{what}: {}", bomb.len());
            let applied = |cap: u64| unpack(decompressed(&*bomb).unwrap(), dir.path(), &Cap::new(cap));
            let error = format!("{:#}", applied(2 << 20).unwrap_err());
            assert!(
                error.contains("more bytes than images may have"),
                "{what}: {error}"
            );
            let written: u64 = fs::read_dir(dir.path())
                .unwrap()
                .map(|entry| entry.unwrap().metadata().unwrap().len())
                .sum();
            assert!(written <= 2 << 20, "{what}: {written}");
            applied(8 << 20).unwrap();
        }
    }

    /// Its holes cost nothing: they are not written.
    #[test]
    fn a_sparse_file_is_charged_by_what_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let file = fs::File::create(at("sparse")).unwrap();
        file.set_len(1 << 30).unwrap();
        std::os::unix::fs::FileExt::write_at(&file, &[7; 4096], 512 << 20).unwrap();
        fs::create_dir(at("root")).unwrap();
        let tar = Command::new("tar")
            .current_dir(dir.path())
            .args(["--create", "--sparse", "--file", "layer.tar", "sparse"])
            .status();
        assert!(tar.unwrap().success());
        let archive = fs::File::open(at("layer.tar")).unwrap();
        let cap = Cap::new(1 << 20);
        assert_eq!(unpack(archive, &at("root"), &cap).unwrap(), 0);
        let made = fs::metadata(at("root/sparse")).unwrap();
        assert!(made.len() == 1 << 30 && made.blocks() < 1024, "{made:?}");
    }

    #[test]
    fn a_layer_adds_replaces_and_removes() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        for made in ["kept/old", "emptied/old", "dir/file", "old-tar/kept"] {
            fs::create_dir_all(at(made).parent().unwrap()).unwrap();
            fs::write(at(made), "of the image").unwrap();
        }
        let layer = layer(&[
            ("kept/new", FILE, "written"),
            ("kept/.wh.old", FILE, ""),
            ("kept/.wh.absent", FILE, ""),
            ("emptied/new", FILE, "written"),
            ("emptied/.wh..wh..opq", FILE, ""),
            ("dir", FILE, "a file now"),
            ("old-tar/", FILE, ""),
            ("kept", EntryType::XGlobalHeader, ""),
            ("pipe", EntryType::Fifo, ""),
            ("node", EntryType::Char, ""),
        ]);
        let mut compressed = GzEncoder::new(Vec::new(), Compression::fast());
        compressed.write_all(&layer).unwrap();
        let layer = compressed.finish().unwrap();
        assert_eq!(
            unpack(decompressed(&*layer).unwrap(), dir.path(), &plenty()).unwrap(),
            1
        );
        assert_eq!(fs::read_to_string(at("kept/new")).unwrap(), "written");
        let written = fs::metadata(at("kept/new")).unwrap();
        assert_eq!((written.mode() & 0o777, written.uid()), (0o640, 1000));
        assert!(!at("kept/old").exists() && !at("emptied/old").exists() && at("emptied/new").exists());
        assert_eq!(fs::read_to_string(at("dir")).unwrap(), "a file now");
        assert!(at("old-tar/kept").exists() && !at("node").exists());
        let pipe = fs::metadata(at("pipe")).unwrap();
        assert!(pipe.file_type().is_fifo() && (pipe.mode() & 0o777, pipe.gid()) == (0o640, 1000));
    }

    #[test]
    fn archives_that_are_wrong_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        fs::write(dir.path().join("outside"), "kept").unwrap();
        for path in [
            "../outside",
            "../.wh.outside",
            "a/../../outside",
            "a/.wh.",
            "a/.wh...",
        ] {
            assert!(
                unpack(&*layer(&[(path, FILE, "taken")]), &root, &plenty()).is_err(),
                "{path}"
            );
            assert_eq!(fs::read_to_string(dir.path().join("outside")).unwrap(), "kept");
        }
        let whole = layer(&[("first", FILE, "1"), ("second", FILE, "2")]);
        let cut = unpack(&whole[..1024], &root, &plenty()).unwrap_err();
        assert_eq!(cut.to_string(), "the archive has no end");
    }

    const TEST: &str = "layer::tests::unpack_in_a_process_of_its_own";

    #[test]
    #[ignore = "no test: the next one runs it"]
    fn unpack_in_a_process_of_its_own() {
        let dir = PathBuf::from(std::env::var_os("DIR").unwrap());
        let cap = std::env::var("CAP").unwrap_or("0".to_owned());
        apply(&dir.join("root"), &dir.join("layer.tar"), &cap).unwrap();
    }

    #[test]
    fn links_of_a_hostile_archive_lead_nowhere_outside() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        let outside = dir.path().display().to_string();
        fs::create_dir(at("root")).unwrap();
        fs::create_dir(at("kept")).unwrap();
        fs::write(at("kept/file"), "of the host").unwrap();
        let absolute = format!("{outside}/kept");
        let entries = [
            ("absolute", EntryType::Symlink, &*absolute),
            ("relative", EntryType::Symlink, "../kept"),
            ("absolute/file", FILE, "taken"),
            ("relative/file", FILE, "taken"),
            ("relative/.wh.file", FILE, ""),
            ("absolute/.wh..wh..opq", FILE, ""),
        ];
        let apply = |name: &str| {
            let run = crate::alone::run(TEST, &[("DIR", dir.path().as_os_str())]);
            assert_eq!(
                fs::read_to_string(at("kept/file")).unwrap(),
                "of the host",
                "{name}"
            );
            run.status.success()
        };
        // Each link alone, too: one that is refused must not hide the next.
        for link in [0, 1] {
            for through in [2, 3, 4, 5] {
                fs::write(at("layer.tar"), layer(&[entries[link], entries[through]])).unwrap();
                apply(&format!("{link} {through}"));
            }
        }
        let hard = ("hard", EntryType::Link, &*format!("{absolute}/file"));
        fs::write(at("layer.tar"), layer(&[hard, ("hard", FILE, "taken")])).unwrap();
        assert!(!apply("hard link"));
        fs::write(at("layer.tar"), layer(&[("good", FILE, "written")])).unwrap();
        assert!(apply("good"));
        // The argument counts: the archive has more than a block.
        let limited = [("DIR", dir.path().as_os_str()), ("CAP", "512".as_ref())];
        let run = crate::alone::run(TEST, &limited);
        assert!(!run.status.success());
        assert_eq!(fs::read_to_string(at("root/good")).unwrap(), "written");
        fs::rename(at("layer.tar"), at("elsewhere.tar")).unwrap();
        symlink("elsewhere.tar", at("layer.tar")).unwrap();
        assert!(!apply("a link in the place of the archive"));
    }
}
