//! Keeps what a container has written to its own root file system, as a layer that [`super::apply`] unpacks.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use firn_host::{FileId, mountinfo};
use rustix::fs::{lgetxattr, llistxattr};
use tar::{Builder, EntryType, Header};

use super::{ATTRIBUTE, EMPTIED, REMOVED, limit_process, may_be_kept};

/// overlayfs marks a directory that hides what is below it; in mounts of users by the second name.
const OPAQUE: [&[u8]; 2] = [b"trusted.overlay.opaque", b"user.overlay.opaque"];
/// It marks what has its content elsewhere.
const ELSEWHERE: [&[u8]; 4] = [
    b"trusted.overlay.redirect",
    b"user.overlay.redirect",
    b"trusted.overlay.metacopy",
    b"user.overlay.metacopy",
];

/// Files in one directory, and files with several names: both are held in memory.
const MOST: usize = 1 << 20;

/// Writes the upper directory of the container's root file system into a new archive. Nothing may write there
/// meanwhile.
pub fn keep(bundle: &Path, archive: &Path) -> Result<()> {
    let upper = upper_of(&bundle.join("rootfs"))?;
    limit_process()?;
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(archive);
    let file = file.with_context(|| format!("cannot make {}", archive.display()))?;
    let written = write(&upper, BufWriter::new(&file)).and_then(|()| Ok(file.sync_all()?));
    if written.is_err() {
        let _gone = fs::remove_file(archive);
    }
    written.with_context(|| format!("cannot keep {} in {}", upper.display(), archive.display()))
}

/// The directory with what was written, of an overlay that is mounted there.
fn upper_of(rootfs: &Path) -> Result<PathBuf> {
    let mounts = mountinfo::mounted().context("cannot list the mounts")?;
    let there = mounts.iter().rev().find(|mount| mount.mount_point == rootfs);
    let options = there.filter(|mount| mount.fs_type == "overlay");
    let options = options
        .map(|mount| mount.super_options.split(','))
        .into_iter()
        .flatten();
    let upper = options
        .filter_map(|option| option.strip_prefix("upperdir="))
        .next();
    upper.map(PathBuf::from).with_context(|| {
        format!(
            "{} is no overlay: what was written there is not known",
            rootfs.display()
        )
    })
}

/// Archives everything below `upper`.
fn write(upper: &Path, into: impl Write) -> Result<()> {
    let mut archive = Builder::new(into);
    archive.follow_symlinks(false);
    let mut links = HashMap::new();
    add_directory(&mut archive, upper, Path::new(""), &mut links)?;
    archive.into_inner()?.flush()?;
    Ok(())
}

/// `links` has the first name of every file that has several.
type Links = HashMap<FileId, PathBuf>;

fn add_directory(
    archive: &mut Builder<impl Write>,
    upper: &Path,
    dir: &Path,
    links: &mut Links,
) -> Result<()> {
    for entry in names(&upper.join(dir), MOST).with_context(|| dir.display().to_string())? {
        let name = dir.join(entry);
        let metadata = fs::symlink_metadata(upper.join(&name))?;
        add(archive, upper, &name, &metadata, links).with_context(|| name.display().to_string())?;
    }
    Ok(())
}

/// The names in a directory, in their order. The container has made as many as it liked.
fn names(dir: &Path, most: usize) -> Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        ensure!(names.len() < most, "more than {most} files are in one directory");
        names.push(entry?.file_name());
    }
    names.sort_unstable();
    Ok(names)
}

fn add(
    archive: &mut Builder<impl Write>,
    upper: &Path,
    name: &Path,
    metadata: &Metadata,
    links: &mut Links,
) -> Result<()> {
    let (from, kind) = (upper.join(name), metadata.file_type());
    if kind.is_char_device() && metadata.rdev() == 0 {
        let removed = [REMOVED, name.file_name().unwrap_or_default().as_bytes()].concat();
        return marker(archive, &name.with_file_name(OsStr::from_bytes(&removed)));
    }
    // Sockets are made by their processes; device nodes are left out when the layer is unpacked, too.
    if kind.is_socket() || kind.is_char_device() || kind.is_block_device() {
        return Ok(());
    }
    if kind.is_file() && metadata.nlink() > 1 {
        ensure!(links.len() < MOST, "more than {MOST} files have several names");
        let first = links
            .entry(FileId::of(metadata))
            .or_insert_with(|| name.to_owned());
        if first != name {
            let mut header = Header::new_gnu();
            header.set_metadata(metadata);
            header.set_entry_type(EntryType::Link);
            header.set_size(0);
            return Ok(archive.append_link(&mut header, name, first)?);
        }
    }
    if kind.is_file() || kind.is_dir() {
        let attributes = attributes(&from)?;
        if let Some((name, _)) = attributes.iter().find(|(name, _)| ELSEWHERE.contains(&&**name)) {
            bail!(
                "overlayfs has its content elsewhere ({})",
                String::from_utf8_lossy(name)
            );
        }
        let mut named = Vec::new();
        for (name, value) in attributes.iter().filter(|(name, _)| may_be_kept(name)) {
            named.push((archived(name, value)?, &**value));
        }
        if !named.is_empty() {
            archive.append_pax_extensions(named.iter().map(|(name, value)| (&**name, *value)))?;
        }
        if kind.is_dir() {
            archive.append_dir(name, &from)?;
            if attributes
                .iter()
                .any(|(name, value)| OPAQUE.contains(&&**name) && value == b"y")
            {
                marker(archive, &name.join(OsStr::from_bytes(EMPTIED)))?;
            }
            return add_directory(archive, upper, name, links);
        }
        return Ok(archive.append_file(name, &mut File::open(&from)?)?);
    }
    let mut header = Header::new_gnu();
    header.set_metadata(metadata);
    header.set_size(0);
    if kind.is_symlink() {
        archive.append_link(&mut header, name, fs::read_link(&from)?)?
    } else {
        archive.append_data(&mut header, name, io::empty())?
    }
    Ok(())
}

/// An empty file, whose name has a meaning.
fn marker(archive: &mut Builder<impl Write>, name: &Path) -> Result<()> {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(0o600);
    header.set_size(0);
    Ok(archive.append_data(&mut header, name, io::empty())?)
}

/// The name of an attribute in an archive. Readers take the end of a line for that of an attribute.
fn archived(name: &[u8], value: &[u8]) -> Result<String> {
    let text = String::from_utf8(name.to_vec()).ok();
    let text = text.filter(|name| !name.contains(['\n', '=']) && !value.contains(&b'\n'));
    let text = text.with_context(|| format!("its attribute {} cannot be archived", name.escape_ascii()))?;
    Ok(format!("{ATTRIBUTE}{text}"))
}

/// The extended attributes of a file, by name.
fn attributes(path: &Path) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut list = vec![0; 64 << 10];
    let length = match llistxattr(path, &mut list) {
        Err(rustix::io::Errno::NOTSUP) => return Ok(Vec::new()),
        length => length?,
    };
    let mut found = Vec::new();
    for name in list[..length]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
    {
        let mut value = vec![0; 64 << 10];
        let length = lgetxattr(path, name, &mut value)?;
        value.truncate(length);
        found.push((name.to_vec(), value));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use nix::sys::stat::{Mode, SFlag, mknod};
    use nix::unistd::mkfifo;

    use super::super::unpack;
    use super::*;
    use crate::cap::Cap;

    #[test]
    fn what_was_written_and_removed_is_the_same_after_it_was_unpacked() {
        let (dir, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let at = |path: &str| dir.path().join(path);
        fs::create_dir_all(at("dir/deep")).unwrap();
        fs::write(at("dir/deep/file"), vec![7; 300_000]).unwrap();
        fs::set_permissions(at("dir/deep/file"), fs::Permissions::from_mode(0o4750)).unwrap();
        fs::hard_link(at("dir/deep/file"), at("dir/other name")).unwrap();
        symlink("/nowhere", at("link")).unwrap();
        mkfifo(&at("pipe"), Mode::S_IRUSR).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        let long = format!("dir/{}", "n".repeat(200));
        fs::write(at(&long), "long").unwrap();
        if nix::unistd::geteuid().is_root() {
            mknod(&at("dir/gone"), SFlag::S_IFCHR, Mode::empty(), 0).unwrap();
        }
        let old = |path: &str| root.path().join(path);
        fs::create_dir(old("dir")).unwrap();
        fs::write(old("dir/gone"), "of the image").unwrap();
        fs::write(old("dir/kept"), "of the image").unwrap();

        let mut archive = Vec::new();
        write(dir.path(), &mut archive).unwrap();
        assert_eq!(unpack(&*archive, root.path(), &Cap::new(1 << 40)).unwrap(), 0);
        let (file, other) = (
            fs::metadata(old("dir/deep/file")).unwrap(),
            fs::metadata(old("dir/other name")).unwrap(),
        );
        assert_eq!(
            (file.len(), file.mode() & 0o7777, FileId::of(&file)),
            (300_000, 0o4750, FileId::of(&other))
        );
        assert_eq!(fs::read_link(old("link")).unwrap(), Path::new("/nowhere"));
        assert!(fs::symlink_metadata(old("pipe")).unwrap().file_type().is_fifo());
        assert_eq!(fs::read_to_string(old(&long)).unwrap(), "long");
        assert!(!old("socket").exists() && old("dir/kept").exists());
        assert_eq!(old("dir/gone").exists(), !nix::unistd::geteuid().is_root());
    }

    #[test]
    fn the_names_of_a_directory_are_sorted_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b", "c", "a"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(names(dir.path(), 3).unwrap(), ["a", "b", "c"]);
        let error = names(dir.path(), 2).unwrap_err();
        assert!(error.to_string().contains("more than 2 files"), "{error}");
    }

    fn set(path: &Path, name: &str, value: &[u8]) {
        rustix::fs::lsetxattr(path, name, value, rustix::fs::XattrFlags::empty()).unwrap();
    }

    #[test]
    fn attributes_are_kept_and_those_that_no_archive_can_have_are_an_error() {
        let (dir, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = dir.path().join("file");
        fs::write(&file, "text").unwrap();
        set(&file, "user.mine", b"\x00=bytes");
        let mut archive = Vec::new();
        write(dir.path(), &mut archive).unwrap();
        unpack(&*archive, root.path(), &Cap::new(1 << 40)).unwrap();
        let mut value = [0; 32];
        let length = lgetxattr(root.path().join("file"), "user.mine", &mut value).unwrap();
        assert_eq!(&value[..length], b"\x00=bytes");
        set(&file, "user.mine", b"a\n23 path=etc/.wh.shadow");
        let error = write(dir.path(), io::sink()).unwrap_err();
        assert!(
            format!("{error:#}").contains("user.mine cannot be archived"),
            "{error:#}"
        );
    }

    /// As another program may write it.
    #[test]
    fn an_attribute_that_looks_like_a_path_is_refused() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        fs::write(root.path().join("etc/shadow"), "kept").unwrap();
        let mut archive = Builder::new(Vec::new());
        let attribute = ("SCHILY.xattr.user.x", &b"a\n23 path=etc/.wh.shadow"[..]);
        archive.append_pax_extensions([attribute]).unwrap();
        marker(&mut archive, Path::new("file")).unwrap();
        let archive = archive.into_inner().unwrap();
        let error = unpack(&*archive, root.path(), &Cap::new(1 << 40)).unwrap_err();
        assert!(
            error.to_string().contains("attributes that are not understood"),
            "{error:#}"
        );
        assert!(root.path().join("etc/shadow").exists());
    }

    #[test]
    fn a_root_file_system_that_is_no_overlay_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let error = keep(dir.path(), &dir.path().join("layer.tar")).unwrap_err();
        assert!(error.to_string().contains("is no overlay"), "{error:#}");
        assert!(!dir.path().join("layer.tar").exists());
    }
}
