//! Unpacking the processes of a checkpoint image into a directory.
//!
//! The archive comes from others: it has plain files, each directly in it, and nothing else is taken.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use firn_image::form::{Archived, Entry};
use tar::Archive;

use crate::archive;
use crate::containerd::{self, CallError, Containerd};
use crate::oci_image::{ImageError, Part};
use crate::steps::Steps;

/// Parts of a blob that another thread unpacks.
struct Parts {
    receiver: Receiver<Vec<u8>>,
    part: io::Cursor<Vec<u8>>,
}

impl Read for Parts {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = self.part.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            match self.receiver.recv() {
                Ok(part) => self.part = io::Cursor::new(part),
                Err(_) => return Ok(0),
            }
        }
    }
}

/// Unpacks a blob into a directory.
pub async fn unpack(
    containerd: &Containerd,
    part: &Part,
    dir: &Path,
    steps: &mut Steps,
) -> Result<(), ImageError> {
    let (sender, receiver) = sync_channel(2);
    let parts = Parts {
        receiver,
        part: io::Cursor::default(),
    };
    let to = dir.to_owned();
    let unpacking = thread::spawn(move || files(parts, &to));
    let sent = send(containerd, part, sender, steps).await;
    let unpacked = unpacking
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("the thread has ended")));
    // Order matters: what cannot be written ends the sending as well.
    unpacked.map_err(|source| match source.kind() {
        io::ErrorKind::InvalidData => ImageError::Entry {
            digest: part.digest.clone(),
            source,
        },
        _ => ImageError::file(format!("unpack {} into {}", part.digest, dir.display()))(source),
    })?;
    Ok(sent?)
}

async fn send(
    containerd: &Containerd,
    part: &Part,
    sender: SyncSender<Vec<u8>>,
    steps: &mut Steps,
) -> Result<(), CallError> {
    let (mut blob, mut done) = (containerd.blob(&part.digest).await?, 0);
    while let Some(content) = containerd::next(&mut blob).await? {
        done += content.data.len() as u64;
        if sender.send(content.data).is_err() {
            break;
        }
        steps.show_copied(done, part.size);
    }
    Ok(())
}

fn files(from: impl Read, dir: &Path) -> io::Result<()> {
    let mut archive = Archive::new(from);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let name = match Archived::Image.entry(&path, archive::kind(entry.header())) {
            Ok(Entry::File(name)) => name,
            Ok(Entry::Layer | Entry::Spec | Entry::Nothing) => continue,
            Err(error) => {
                let message = format!("{}: {error}", path.display());
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
        };
        let mut options = OpenOptions::new();
        let options = options.write(true).create_new(true).mode(0o600);
        io::copy(&mut entry, &mut options.open(dir.join(name))?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tar::{Builder, EntryType, Header};

    use super::*;

    fn archive(name: &str, kind: EntryType) -> Vec<u8> {
        let mut header = Header::new_gnu();
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(if kind == EntryType::Regular { 3 } else { 0 });
        header.set_entry_type(kind);
        header.set_cksum();
        let mut archive = Builder::new(Vec::new());
        let data: &[u8] = if kind == EntryType::Regular { b"abc" } else { b"" };
        archive.append(&header, data).unwrap();
        archive.into_inner().unwrap()
    }

    #[test]
    fn only_plain_files_directly_in_the_archive_are_taken() {
        let dir = tempfile::tempdir().unwrap();
        files(&*archive("./", EntryType::Directory), dir.path()).unwrap();
        files(&*archive("core-1.img", EntryType::Regular), dir.path()).unwrap();
        assert_eq!(fs::read(dir.path().join("core-1.img")).unwrap(), b"abc");
        for (name, kind) in [
            ("../outside", EntryType::Regular),
            ("/outside", EntryType::Regular),
            ("below/file", EntryType::Regular),
            ("link", EntryType::Symlink),
            ("node", EntryType::Char),
            // It is there already.
            ("core-1.img", EntryType::Regular),
        ] {
            let taken = files(&*archive(name, kind), dir.path());
            assert!(taken.is_err(), "{name} {kind:?}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
