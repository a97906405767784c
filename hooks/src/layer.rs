//! The files that a container had written before its checkpoint, for a copy that gets them from an archive.
//!
//! The archive is a layer as OCI images have them, of the container's own root file system; its content is
//! hostile. It is unpacked from within the new root file system, which no path and no link leads out of.
//! Device nodes are left out: the archive gives no right to a device.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::chroot;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use flate2::bufread::MultiGzDecoder;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tar::{Archive, EntryType};

/// The name of an entry that removes the file of the rest of its name.
const REMOVED: &str = ".wh.";
/// The name of an entry that empties its directory.
const EMPTIED: &str = ".wh..wh..opq";

/// Unpacks the archive into the root file system. This process is in it afterwards.
pub fn apply(root: &Path, archive: &Path) -> Result<()> {
    let file = File::open(archive).with_context(|| format!("cannot open {}", archive.display()))?;
    chroot(root).with_context(|| format!("cannot enter {}", root.display()))?;
    std::env::set_current_dir("/").context("cannot enter the root file system")?;
    let unpacked = decompressed(BufReader::new(file)).and_then(|source| unpack(source, Path::new("/")));
    unpacked.with_context(|| format!("cannot unpack {}", archive.display()))
}

/// containerd's layers are compressed by gzip, those of other runtimes not at all.
fn decompressed<'a>(mut source: impl BufRead + 'a) -> Result<Box<dyn Read + 'a>> {
    Ok(match source.fill_buf()? {
        [0x1f, 0x8b, ..] => Box::new(MultiGzDecoder::new(source)),
        _ => Box::new(source),
    })
}

fn unpack(source: impl Read, root: &Path) -> Result<()> {
    let mut archive = Archive::new(source);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    archive.set_unpack_xattrs(true);
    archive.set_overwrite(true);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let shown = || format!("{}", path.display());
        match removed(&path) {
            Some(Removed::ContentOf(dir)) => empty(&inside(root, &dir)?).with_context(shown)?,
            Some(Removed::File(file)) => remove(&inside(root, &file)?).with_context(shown)?,
            None => match entry.header().entry_type() {
                EntryType::Char | EntryType::Block => {
                    report!("firn-hook: device node {} is left out", shown())
                }
                EntryType::Fifo => {
                    let at = inside(root, &path)?;
                    remove(&at).with_context(shown)?;
                    mkfifo(&at, Mode::from_bits_truncate(entry.header().mode()?)).with_context(shown)?;
                }
                kind => {
                    make_room(&inside(root, &path)?, kind).with_context(shown)?;
                    entry.unpack_in(root).with_context(shown)?;
                }
            },
        }
    }
    Ok(())
}

#[derive(Debug, PartialEq)]
enum Removed {
    File(PathBuf),
    ContentOf(PathBuf),
}

fn removed(path: &Path) -> Option<Removed> {
    let name = path.file_name()?.to_str()?;
    let dir = path.parent().unwrap_or(Path::new(""));
    if name == EMPTIED {
        return Some(Removed::ContentOf(dir.to_owned()));
    }
    name.strip_prefix(REMOVED)
        .map(|name| Removed::File(dir.join(name)))
}

/// A path of the archive below the root; the kernel follows its links inside of it.
fn inside(root: &Path, path: &Path) -> Result<PathBuf> {
    let mut at = root.to_owned();
    for part in path.components() {
        match part {
            std::path::Component::Normal(name) => at.push(name),
            std::path::Component::RootDir | std::path::Component::CurDir => {}
            _ => bail!("the path leads out of the root file system"),
        }
    }
    Ok(at)
}

/// What is of another kind than the entry gives way to it.
fn make_room(at: &Path, kind: EntryType) -> io::Result<()> {
    match fs::symlink_metadata(at) {
        Ok(there) if there.is_dir() && kind.is_dir() => Ok(()),
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

fn empty(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        remove(&entry?.path())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use tar::{Builder, Header};

    use super::*;

    fn entry(builder: &mut Builder<Vec<u8>>, path: &str, kind: EntryType, text: &str) {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o640);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(text.len() as u64);
        // As hostile as it can be: no check of the path.
        header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
        header.set_cksum();
        builder.append(&header, text.as_bytes()).unwrap();
    }

    #[test]
    fn a_layer_adds_replaces_and_removes() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        for made in ["kept/old", "emptied/old", "dir/file"] {
            fs::create_dir_all(at(made).parent().unwrap()).unwrap();
            fs::write(at(made), "of the image").unwrap();
        }
        let mut builder = Builder::new(Vec::new());
        entry(&mut builder, "kept/new", EntryType::Regular, "written");
        entry(&mut builder, "kept/.wh.old", EntryType::Regular, "");
        entry(&mut builder, "kept/.wh.absent", EntryType::Regular, "");
        entry(&mut builder, "emptied/.wh..wh..opq", EntryType::Regular, "");
        entry(&mut builder, "dir", EntryType::Regular, "a file now");
        entry(&mut builder, "pipe", EntryType::Fifo, "");
        entry(&mut builder, "node", EntryType::Char, "");
        let mut compressed = GzEncoder::new(Vec::new(), Compression::fast());
        compressed.write_all(&builder.into_inner().unwrap()).unwrap();
        let layer = compressed.finish().unwrap();
        unpack(decompressed(&*layer).unwrap(), dir.path()).unwrap();
        assert_eq!(fs::read_to_string(at("kept/new")).unwrap(), "written");
        assert_eq!(fs::metadata(at("kept/new")).unwrap().mode() & 0o777, 0o640);
        assert!(!at("kept/old").exists() && !at("emptied/old").exists() && at("emptied").is_dir());
        assert_eq!(fs::read_to_string(at("dir")).unwrap(), "a file now");
        assert!(at("pipe").exists() && !at("node").exists());
    }

    #[test]
    fn paths_that_lead_out_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        fs::write(dir.path().join("outside"), "kept").unwrap();
        fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
        for path in ["../outside", "../.wh.outside", "a/../../outside"] {
            let mut builder = Builder::new(Vec::new());
            entry(&mut builder, path, EntryType::Regular, "taken");
            assert!(unpack(&*builder.into_inner().unwrap(), &root).is_err(), "{path}");
            assert_eq!(fs::read_to_string(dir.path().join("outside")).unwrap(), "kept");
        }
    }
}
